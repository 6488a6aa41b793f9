//! The parts of a call: tensors and scalars, the operator library's objects for them, and the
//! operator's names.

use std::ffi::{CStr, c_char};

use crate::error::{AscendError, Result};
use crate::result::{optional, recent_message};
use crate::safe::{DeviceMemory, Stream};
use crate::sys::{
    AclMeta, aclDataType, aclFormat, aclIntArray, aclScalar, aclTensor, aclTensorList, code,
};

/// The limit on axes of a tensor descriptor.
const MAX_RANK: usize = 25;

/// A view of device memory for an operator. Strides and offset count elements; a stride of 0
/// repeats an element.
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    /// The memory.
    pub buffer: &'a DeviceMemory,
    /// Type of the elements.
    pub dtype: aclDataType,
    /// Elements along each axis.
    pub dims: &'a [usize],
    /// Step along each axis.
    pub strides: &'a [usize],
    /// Offset of the first element.
    pub offset: usize,
}

/// A number passed to an operator.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Number {
    /// A float, passed in double precision.
    Float(f64),
    /// An integer.
    Int(i64),
    /// One element of a tensor: its type, and its bits from the lowest on. Bits beyond the type are
    /// ignored.
    Element(aclDataType, u64),
}

/// An argument, before it becomes an object of the operator library.
#[derive(Clone, Copy, Debug)]
pub(super) enum Argument<'a> {
    In(View<'a>),
    Out(View<'a>),
    /// Read and written: operators differ in whether their executors treat it as input or output.
    Ref(View<'a>),
    Ins(&'a [View<'a>]),
    Outs(&'a [View<'a>]),
    Number(Number),
    Ints(&'a [i64]),
    Text(&'static CStr),
    Bits(u64),
    /// An absent input and an absent output. Each has an index among the operator's inputs or
    /// outputs.
    NoInput,
    NoOutput,
    Absent,
}

/// An argument in its form at the C interface.
#[derive(Debug)]
pub(super) enum Raw {
    Tensor(*mut aclTensor),
    Tensors(*mut aclTensorList),
    Scalar(*mut aclScalar),
    Ints(*mut aclIntArray),
    Text(*mut c_char),
    Bits(u64),
    Null,
}

/// Names of an operator: its two functions, its method, its parameters.
#[derive(Clone, Copy, Debug)]
pub(super) struct Names {
    pub(super) plan: &'static str,
    pub(super) run: &'static str,
    /// The method of [`Operators`](super::Operators).
    pub(super) method: &'static str,
    pub(super) parameters: &'static [&'static str],
}

impl View<'_> {
    pub(super) fn check(&self, operator: &'static str) -> Result<()> {
        let rank = self.dims.len();
        if self.strides.len() != rank || rank > MAX_RANK {
            return Err(AscendError::argument(
                operator,
                "view",
                format!("at most {MAX_RANK} axes with a stride each"),
                format!("{rank} axes, {} strides", self.strides.len()),
            ));
        }
        if self.dims.contains(&0) {
            return Ok(());
        }
        let last = self
            .dims
            .iter()
            .zip(self.strides)
            .try_fold(self.offset, |last, (dim, stride)| {
                (dim - 1).checked_mul(*stride)?.checked_add(last)
            });
        let held = self.buffer.bytes() / self.dtype.bytes();
        match last {
            Some(last) if last < held => Ok(()),
            _ => Err(AscendError::argument(
                operator,
                "view",
                format!("elements within {held}"),
                format!(
                    "dimensions {:?} with strides {:?} from {}",
                    self.dims, self.strides, self.offset
                ),
            )),
        }
    }
}

/// Objects of the operator library, one for each argument; destroyed with this value.
#[derive(Debug)]
pub(super) struct Objects {
    pub(super) raw: Vec<Raw>,
    pub(super) meta: AclMeta,
    /// True if a list is written: the function that sets its members' addresses is not declared here.
    pub(super) writes_list: bool,
}

impl Objects {
    pub(super) fn has_list(&self) -> bool {
        self.raw.iter().any(|raw| matches!(raw, Raw::Tensors(_)))
    }

    pub(super) fn new(stream: &Stream, arguments: &[Argument<'_>]) -> Result<Self> {
        let mut objects = Self {
            raw: Vec::with_capacity(arguments.len()),
            meta: *stream
                .device()
                .runtime()
                .api()
                .meta
                .as_ref()
                .map_err(Clone::clone)?,
            writes_list: arguments
                .iter()
                .any(|argument| matches!(argument, Argument::Outs(_))),
        };
        for argument in arguments {
            let raw = objects.make(stream, argument)?;
            objects.raw.push(raw);
        }
        Ok(objects)
    }

    fn make(&self, stream: &Stream, argument: &Argument<'_>) -> Result<Raw> {
        let made = |null: bool, function, raw: Raw| {
            if null {
                return Err(AscendError::Call {
                    function,
                    code: code::OPERATOR_PARAM_INVALID,
                    meaning: code::meaning(code::OPERATOR_PARAM_INVALID),
                    detail: recent_message(&stream.device().runtime().api().rt),
                });
            }
            Ok(raw)
        };
        match *argument {
            Argument::In(view) | Argument::Out(view) | Argument::Ref(view) => {
                let tensor = self.tensor(&view);
                made(tensor.is_null(), "aclCreateTensor", Raw::Tensor(tensor))
            }
            Argument::Ins(views) | Argument::Outs(views) => {
                let create = needed(stream, self.meta.aclCreateTensorList, "aclCreateTensorList")?;
                let tensors: Vec<*const aclTensor> = views
                    .iter()
                    .map(|view| self.tensor(view).cast_const())
                    .collect();
                let list = if tensors.iter().any(|tensor| tensor.is_null()) {
                    std::ptr::null_mut()
                } else {
                    // SAFETY: as many live descriptors as the count says; the list
                    // copies the array and owns its members.
                    unsafe { create(tensors.as_ptr(), tensors.len() as u64) }
                };
                if list.is_null() {
                    for tensor in tensors {
                        // SAFETY: made above (null is accepted), and no list owns it.
                        let _ = unsafe { (self.meta.aclDestroyTensor)(tensor) };
                    }
                }
                made(list.is_null(), "aclCreateTensorList", Raw::Tensors(list))
            }
            Argument::Number(number) => {
                let create = needed(stream, self.meta.aclCreateScalar, "aclCreateScalar")?;
                // SAFETY: the value is read during the call and has the type that is named; no
                // element type is larger than the 16 bytes of an element.
                let scalar = unsafe {
                    match number {
                        Number::Float(mut v) => create((&raw mut v).cast(), aclDataType::DOUBLE),
                        Number::Int(mut v) => create((&raw mut v).cast(), aclDataType::INT64),
                        Number::Element(dtype, bits) => {
                            let mut v = u128::from(bits).to_le();
                            create((&raw mut v).cast(), dtype)
                        }
                    }
                };
                made(scalar.is_null(), "aclCreateScalar", Raw::Scalar(scalar))
            }
            Argument::Ints(values) => {
                // SAFETY: the array is as long as the count says; the library copies it.
                let array =
                    unsafe { (self.meta.aclCreateIntArray)(values.as_ptr(), values.len() as u64) };
                made(array.is_null(), "aclCreateIntArray", Raw::Ints(array))
            }
            Argument::Text(text) => Ok(Raw::Text(text.as_ptr().cast_mut())),
            Argument::Bits(bits) => Ok(Raw::Bits(bits)),
            Argument::NoInput | Argument::NoOutput | Argument::Absent => Ok(Raw::Null),
        }
    }

    /// A descriptor, or null.
    fn tensor(&self, view: &View<'_>) -> *mut aclTensor {
        let rank = view.dims.len();
        let mut dims = [0_i64; MAX_RANK];
        let mut strides = [0_i64; MAX_RANK];
        for axis in 0..rank {
            dims[axis] = view.dims[axis] as i64;
            strides[axis] = view.strides[axis] as i64;
        }
        let storage = (view.buffer.bytes() / view.dtype.bytes()) as i64;
        // SAFETY: dims and strides have `rank` entries, at most `MAX_RANK` (`View::check`), and the
        // storage one; the library copies them. Offset precedes format. The device address is only
        // recorded.
        unsafe {
            (self.meta.aclCreateTensor)(
                dims.as_ptr(),
                rank as u64,
                view.dtype,
                strides.as_ptr(),
                view.offset as i64,
                aclFormat::ND,
                &raw const storage,
                1,
                view.buffer.pointer(),
            )
        }
    }
}

impl Drop for Objects {
    fn drop(&mut self) {
        let meta = &self.meta;
        for raw in &self.raw {
            // SAFETY: each object was made by this value and is destroyed once; the calls that it
            // was handed to have run or were given up. A failure leaks a host object, about which
            // nothing can be done.
            let _ = unsafe {
                match *raw {
                    Raw::Tensor(tensor) => (meta.aclDestroyTensor)(tensor),
                    Raw::Tensors(list) => meta.aclDestroyTensorList.map_or(0, |f| f(list)),
                    Raw::Scalar(scalar) => meta.aclDestroyScalar.map_or(0, |f| f(scalar)),
                    Raw::Ints(array) => (meta.aclDestroyIntArray)(array),
                    Raw::Text(_) | Raw::Bits(_) | Raw::Null => 0,
                }
            };
        }
    }
}

/// The optional function, or an error that names it.
pub(super) fn needed<F>(stream: &Stream, function: Option<F>, symbol: &'static str) -> Result<F> {
    let library = &stream.device().runtime().api().origin;
    optional(function, symbol, library, "this stock operator")
}
