//! Opaque handles. Every handle ever made is different, none is an address that can be followed, and
//! a look-up tells a destroyed handle from one of another kind.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::codes::{Failure, Outcome, RT_INVALID_HANDLE};

/// The upper bits of every handle: no canonical address of a 64-bit machine.
const MARK: u64 = 0x5a << 56;
const KIND_SHIFT: u32 = 48;
const ID_MASK: u64 = (1 << KIND_SHIFT) - 1;

static NEXT_ID: AtomicU64 = AtomicU64::new(1);

/// What a handle stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Kind {
    Stream = 1,
    Event,
    Binary,
    Function,
    Arguments,
    Parameter,
    Tensor,
    IntArray,
    FloatArray,
    BoolArray,
    Scalar,
    TensorList,
    ScalarList,
    Executor,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Self::Stream => "stream",
            Self::Event => "event",
            Self::Binary => "binary",
            Self::Function => "function",
            Self::Arguments => "kernel arguments",
            Self::Parameter => "kernel parameter",
            Self::Tensor => "tensor",
            Self::IntArray => "int array",
            Self::FloatArray => "float array",
            Self::BoolArray => "bool array",
            Self::Scalar => "scalar",
            Self::TensorList => "tensor list",
            Self::ScalarList => "scalar list",
            Self::Executor => "executor",
        }
    }

    pub(crate) fn of(handle: u64) -> Option<Self> {
        const ALL: [Kind; 14] = [
            Kind::Stream,
            Kind::Event,
            Kind::Binary,
            Kind::Function,
            Kind::Arguments,
            Kind::Parameter,
            Kind::Tensor,
            Kind::IntArray,
            Kind::FloatArray,
            Kind::BoolArray,
            Kind::Scalar,
            Kind::TensorList,
            Kind::ScalarList,
            Kind::Executor,
        ];
        ALL.into_iter()
            .find(|kind| handle >> KIND_SHIFT == (MARK >> KIND_SHIFT) | *kind as u64)
    }
}

/// The live handles of one kind.
pub(crate) struct Registry<T> {
    kind: Kind,
    live: HashMap<u64, T>,
}

impl<T> Registry<T> {
    pub(crate) fn new(kind: Kind) -> Self {
        Self {
            kind,
            live: HashMap::new(),
        }
    }

    pub(crate) fn insert(&mut self, value: T) -> u64 {
        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed) & ID_MASK;
        let handle = MARK | (self.kind as u64) << KIND_SHIFT | id;
        self.live.insert(handle, value);
        handle
    }

    pub(crate) fn get(&self, handle: u64) -> Outcome<&T> {
        self.live.get(&handle).ok_or_else(|| self.why_not(handle))
    }

    pub(crate) fn get_mut(&mut self, handle: u64) -> Outcome<&mut T> {
        if !self.live.contains_key(&handle) {
            return Err(self.why_not(handle));
        }
        self.live
            .get_mut(&handle)
            .ok_or_else(|| Failure::new(RT_INVALID_HANDLE, "no such handle"))
    }

    pub(crate) fn remove(&mut self, handle: u64) -> Outcome<T> {
        self.live
            .remove(&handle)
            .ok_or_else(|| self.why_not(handle))
    }

    pub(crate) fn len(&self) -> usize {
        self.live.len()
    }

    pub(crate) fn drain(&mut self) -> Vec<T> {
        self.live.drain().map(|(_, value)| value).collect()
    }

    fn why_not(&self, handle: u64) -> Failure {
        let kind = self.kind.name();
        let message = match (handle, Kind::of(handle)) {
            (0, _) => format!("the {kind} is null"),
            (_, Some(found)) if found != self.kind => format!(
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
}
