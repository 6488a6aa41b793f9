//! The declarations as data, for the check against the vendor's headers.

use std::ffi::{c_char, c_void};

/// The C spelling of a type of the interface.
pub trait CType {
    /// The type's spelling in a C declaration.
    fn c() -> String;
}

macro_rules! spell {
    ($($rust:ty => $c:expr),* $(,)?) => {
        $( impl $crate::sys::CType for $rust { fn c() -> String { $c.to_owned() } } )*
    };
}
pub(super) use spell;

spell! {
    i32 => "int32_t",
    i64 => "int64_t",
    u32 => "uint32_t",
    u64 => "uint64_t",
    usize => "size_t",
    f32 => "float",
    f64 => "double",
    bool => "bool",
    c_void => "void",
    c_char => "char",
}

impl<T: CType> CType for *const T {
    fn c() -> String {
        format!("{} const *", T::c())
    }
}

impl<T: CType> CType for *mut T {
    fn c() -> String {
        format!("{} *", T::c())
    }
}

/// One function of the interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Signature {
    /// The exported name.
    pub name: &'static str,
    /// C spelling of the result.
    pub returns: String,
    /// C spelling of each parameter, in order.
    pub parameters: Vec<String>,
    /// True if loading fails without it.
    pub required: bool,
}

/// One field of a structure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Field {
    /// The vendor's name of the field.
    pub name: &'static str,
    /// Offset from the start of the structure.
    pub offset_bytes: usize,
}

/// One structure of the interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// The vendor's name of the structure.
    pub name: &'static str,
    /// Size of the structure.
    pub size_bytes: usize,
    /// Alignment of the structure.
    pub align_bytes: usize,
    /// Fields in order.
    pub fields: Vec<Field>,
}

/// Every named value of the interface: the vendor's name and our value.
pub fn constants() -> Vec<(&'static str, i64)> {
    super::types::all_constants()
}

/// Every structure of the interface.
pub fn records() -> Vec<Record> {
    super::types::all_records()
}
