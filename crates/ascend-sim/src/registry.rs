//! Opaque handles. Each handle is made once, none is an address that can be followed, and a look-up
//! distinguishes a destroyed handle from one of another kind.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::abi::kernel::KernelLibrary;
use crate::aclnn::Tensor;
use crate::aclnn::descriptor::Scalar;
use crate::aclnn::executor::Executor;
use crate::codes::{Failure, Outcome, RT_INVALID_HANDLE};
use crate::collective::Communicator;
use crate::state::{Arguments, Event, Function};
use crate::stream::Stream;

/// The upper bits of every handle: no canonical address of a 64-bit machine.
const MARK: u64 = 0x5a << 56;
const KIND_SHIFT: u32 = 48;
const ID_MASK: u64 = (1 << KIND_SHIFT) - 1;

static NEXT_ID: AtomicU64 = AtomicU64::new(1);

/// Something that handles stand for.
pub(crate) trait Object {
    const KIND: Kind;
}

/// Lists the kinds of objects: type and name.
macro_rules! kinds {
    ($($kind:ident: $object:ty, $name:literal;)*) => {
        /// The kind of an object.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(u8)]
        pub(crate) enum Kind { $($kind),* }

        impl Kind {
            const ALL: &'static [(Self, &'static str)] = &[$((Self::$kind, $name)),*];
        }

        $( impl Object for $object { const KIND: Kind = Kind::$kind; } )*
    };
}
kinds! {
    Stream: Stream, "stream";
    Event: Event, "event";
    Binary: Arc<KernelLibrary>, "binary";
    Function: Function, "function";
    Arguments: Arguments, "argument list";
    Tensor: Arc<Tensor>, "tensor";
    IntArray: Vec<i64>, "int array";
    Scalar: Scalar, "scalar";
    TensorList: Vec<u64>, "tensor list";
    Executor: Executor, "executor";
    Communicator: Arc<Communicator>, "communicator";
}

impl Kind {
    fn name(self) -> &'static str {
        Self::ALL[self as usize].1
    }

    pub(crate) fn of(handle: u64) -> Option<Self> {
        let mut kinds = Self::ALL.iter().map(|(kind, _)| *kind);
        kinds.find(|kind| (MARK >> KIND_SHIFT | *kind as u64) == handle >> KIND_SHIFT)
    }
}

/// The live handles of one kind.
pub(crate) struct Registry<T> {
    live: HashMap<u64, T>,
}

impl<T> Default for Registry<T> {
    fn default() -> Self {
        Self {
            live: HashMap::new(),
        }
    }
}

impl<T: Object> Registry<T> {
    pub(crate) fn insert(&mut self, value: T) -> u64 {
        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed) & ID_MASK;
        let handle = MARK | (T::KIND as u64) << KIND_SHIFT | id;
        self.live.insert(handle, value);
        handle
    }

    pub(crate) fn get(&self, handle: u64) -> Outcome<&T> {
        self.live.get(&handle).ok_or_else(|| why_not::<T>(handle))
    }

    pub(crate) fn get_mut(&mut self, handle: u64) -> Outcome<&mut T> {
        let found = self.live.get_mut(&handle);
        found.ok_or_else(|| why_not::<T>(handle))
    }

    pub(crate) fn remove(&mut self, handle: u64) -> Outcome<T> {
        let removed = self.live.remove(&handle);
        removed.ok_or_else(|| why_not::<T>(handle))
    }

    pub(crate) fn live(&self) -> impl Iterator<Item = &T> {
        self.live.values()
    }

    pub(crate) fn len(&self) -> usize {
        self.live.len()
    }

    pub(crate) fn drain(&mut self) -> Vec<T> {
        self.live.drain().map(|(_, value)| value).collect()
    }
}

/// Why a handle that is not live is none of this kind.
fn why_not<T: Object>(handle: u64) -> Failure {
    let kind = T::KIND.name();
    let message = match (handle, Kind::of(handle)) {
        (0, _) => format!("the {kind} is null"),
        (_, Some(found)) if found != T::KIND => format!(
            "0x{handle:x} is a {} handle, a {kind} is expected",
            found.name()
        ),
        (_, Some(_)) if handle & ID_MASK < NEXT_ID.load(Ordering::Relaxed) => {
            format!("{kind} 0x{handle:x} was destroyed before")
        }
        _ => format!("0x{handle:x} is not a {kind}: no such handle was ever made"),
    };
    Failure::new(RT_INVALID_HANDLE, message)
}
