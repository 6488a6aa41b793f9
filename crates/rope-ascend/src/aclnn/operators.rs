//! Calls of operators.
//!
//! [`Operators`] has one method for each row of the tables in `sys`. Tensors are [`View`]s: memory,
//! and how its elements are read. Checks here protect memory that is not the caller's: a view must
//! lie within its memory, and the memory must belong to the stream. The operator checks element
//! types, shapes and attributes in its first phase, before anything is queued; its code and message
//! are returned as [`AscendError::Call`].
//!
//! [`AscendError::Call`]: crate::AscendError::Call

use std::ffi::CStr;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::ai_cpu;
use super::call::{Argument, Names, Number, Objects, Raw, View, needed};
use super::plans::{Kept, Plan, Plans};
use crate::error::Result;
use crate::result::check;
use crate::safe::Stream;
use crate::sys::kind::{
    DataType, In, Ins, Ints, Num, OptIn, OptIns, OptInts, OptNum, OptOut, OptOuts, Out, Outs, Ref,
    Text,
};
use crate::sys::{
    CubeMath, Kind, Run, aclDataType, aclOpExecutor, aclnnStatus, for_each_fused_operator,
    for_each_operator, for_each_rotary_operator,
};

/// The conversion of a parameter's Rust value to an argument, and of the argument to a C value.
trait Parameter<'a>: Kind {
    type Value;
    fn argument(value: Self::Value) -> Argument<'a>;
    fn pass(raw: &Raw) -> Self::C;
}

/// A panic here is a broken table of this module, not a caller's mistake.
macro_rules! pass {
    ($raw:expr, $variant:ident) => {
        match $raw {
            Raw::$variant(value) => value.cast(),
            Raw::Null => std::ptr::null_mut(),
            other => unreachable!(
                "{other:?} where the table declares {}",
                stringify!($variant)
            ),
        }
    };
}

macro_rules! parameters {
    ($( $kind:ty: $value:ty, $v:ident => $argument:expr, $variant:ident; )*) => {
        $( impl<'a> Parameter<'a> for $kind {
            type Value = $value;
            fn argument($v: $value) -> Argument<'a> { $argument }
            fn pass(raw: &Raw) -> Self::C { pass!(raw, $variant) }
        } )*
    };
}

parameters! {
    In: View<'a>, v => Argument::In(v), Tensor;
    Out: View<'a>, v => Argument::Out(v), Tensor;
    Ref: View<'a>, v => Argument::Ref(v), Tensor;
    OptIn: Option<View<'a>>, v => v.map_or(Argument::NoInput, Argument::In), Tensor;
    OptOut: Option<View<'a>>, v => v.map_or(Argument::NoOutput, Argument::Out), Tensor;
    Ins: &'a [View<'a>], v => Argument::Ins(v), Tensors;
    Outs: &'a [View<'a>], v => Argument::Outs(v), Tensors;
    OptIns: Option<&'a [View<'a>]>, v => v.map_or(Argument::NoInput, Argument::Ins), Tensors;
    OptOuts: Option<&'a [View<'a>]>, v => v.map_or(Argument::NoOutput, Argument::Outs), Tensors;
    Num: Number, v => Argument::Number(v), Scalar;
    OptNum: Option<Number>, v => v.map_or(Argument::Absent, Argument::Number), Scalar;
    Ints: &'a [i64], v => Argument::Ints(v), Ints;
    OptInts: Option<&'a [i64]>, v => v.map_or(Argument::Absent, Argument::Ints), Ints;
    Text: &'static CStr, v => Argument::Text(v), Text;
}

macro_rules! plain_parameters {
    ($( $ty:ty: $v:ident => $bits:expr, $b:ident => $value:expr; )*) => {
        $( impl<'a> Parameter<'a> for $ty {
            type Value = Self;
            fn argument($v: Self) -> Argument<'a> { Argument::Bits($bits) }
            fn pass(raw: &Raw) -> Self {
                match raw {
                    Raw::Bits($b) => { let $b = *$b; $value }
                    other => unreachable!("{other:?} where the table declares a number"),
                }
            }
        } )*
    };
}

plain_parameters! {
    i64: v => v.cast_unsigned(), b => b.cast_signed();
    u64: v => v, b => b;
    f64: v => v.to_bits(), b => f64::from_bits(b);
    f32: v => u64::from(v.to_bits()), b => f32::from_bits(b as u32);
    bool: v => u64::from(v), b => b != 0;
    CubeMath: v => u64::from(v.0.cast_unsigned()), b => Self((b as u8).cast_signed());
}

impl<'a> Parameter<'a> for DataType {
    type Value = aclDataType;
    fn argument(value: aclDataType) -> Argument<'a> {
        Argument::Bits(u64::from(value.0.cast_unsigned()))
    }
    fn pass(raw: &Raw) -> aclDataType {
        match raw {
            Raw::Bits(bits) => aclDataType((*bits as u32).cast_signed()),
            other => unreachable!("{other:?} where the table declares an element type"),
        }
    }
}

/// The Rust type of a parameter.
macro_rules! value {
    (In) => { View<'_> };
    (Out) => { View<'_> };
    (Ref) => { View<'_> };
    (OptIn) => { Option<View<'_>> };
    (OptOut) => { Option<View<'_>> };
    (Ins) => { &[View<'_>] };
    (Outs) => { &[View<'_>] };
    (OptIns) => { Option<&[View<'_>]> };
    (OptOuts) => { Option<&[View<'_>]> };
    (Num) => { Number };
    (OptNum) => { Option<Number> };
    (Ints) => { &[i64] };
    (OptInts) => { Option<&[i64]> };
    (Text) => { &'static CStr };
    (DataType) => { aclDataType };
    ($plain:ident) => { $plain };
}

/// The description of one operator.
#[derive(Clone, Copy, Debug)]
pub struct OperatorInfo {
    /// Its method of [`Operators`].
    pub method: &'static str,
    /// Its C function. The first phase has `GetWorkspaceSize` appended to the name.
    pub function: &'static str,
    /// Its parameters, each with its kind.
    pub parameters: &'static [(&'static str, &'static str)],
    /// Its computation, and its documented limits.
    pub about: &'static str,
    /// The repository of its documentation.
    pub repository: &'static str,
}

/// The operators of one stream. Each call queues one operator.
///
/// # Errors
/// Of every method: [`AscendError::Call`] with the operator's code if it rejects the call;
/// [`AscendError::SymbolUnavailable`] if the installation lacks it;
/// [`AscendError::InvalidArgument`] if a view extends beyond its memory or belongs to another
/// stream; [`AscendError::OutOfMemory`] if there is no memory for its workspace.
///
/// [`AscendError::Call`]: crate::AscendError::Call
/// [`AscendError::InvalidArgument`]: crate::AscendError::InvalidArgument
/// [`AscendError::OutOfMemory`]: crate::AscendError::OutOfMemory
/// [`AscendError::SymbolUnavailable`]: crate::AscendError::SymbolUnavailable
#[derive(Debug)]
pub struct Operators {
    plans: Mutex<Plans>,
    stream: Stream,
}

macro_rules! wrap {
    (
        $vis:vis $table:ident;
        $(
            $( #[doc = $doc:literal] )+
            $_repository:ident fn $safe:ident = $name:ident($($arg:ident: $kind:ident),*);
        )*
    ) => {
        impl Operators {
            $(
                $( #[doc = $doc] )+
                #[doc = concat!("\n\nOperator: `aclnn", stringify!($name), "`.")]
                ///
                /// # Errors
                /// As for every operator: see [`Operators`].
                #[allow(clippy::too_many_arguments, reason = "the operator's parameters")]
                $vis fn $safe(&self, $($arg: value!($kind)),*) -> Result<()> {
                    const NAMES: Names = Names {
                        plan: concat!("aclnn", stringify!($name), "GetWorkspaceSize"),
                        run: concat!("aclnn", stringify!($name)),
                        method: stringify!($safe),
                        parameters: &[$( stringify!($arg) ),*],
                    };
                    let operator = &self.stream.device().runtime().api().$table.$name;
                    let plan = needed(&self.stream, operator.plan, NAMES.plan)?;
                    let run = needed(&self.stream, operator.run, NAMES.run)?;
                    let arguments = [$( <$kind as Parameter<'_>>::argument($arg) ),*];
                    let mut plan = |raw: &[Raw], bytes, executor| {
                        let [$($arg),*] = raw else {
                            unreachable!("as many objects as arguments");
                        };
                        // SAFETY: objects made from these arguments, which `launch` keeps alive
                        // while it calls this; the table declares the function's parameters.
                        unsafe { plan($( <$kind as Parameter<'_>>::pass($arg), )* bytes, executor) }
                    };
                    self.launch(NAMES, &arguments, &mut plan, run)
                }
            )*
        }

    };
}

for_each_operator!(wrap pub operators);
for_each_fused_operator!(wrap pub fused);
for_each_rotary_operator!(wrap pub(super) rotary);

macro_rules! list {
    (;
        $(
            $( #[doc = $doc:literal] )+
            $repository:ident fn $safe:ident = $name:ident($($arg:ident: $kind:ident),*);
        )*
    ) => {
        /// The operators of training.
        pub const OPERATORS: &[OperatorInfo] = &[
            $( OperatorInfo {
                method: stringify!($safe),
                function: concat!("aclnn", stringify!($name)),
                parameters: &[$( (stringify!($arg), stringify!($kind)) ),*],
                about: concat!($($doc),+),
                repository: concat!("hicann/ops-", stringify!($repository)),
            }, )*
        ];
    };
}

for_each_operator!(list);

/// First phase of an operator, on objects of the operator library.
type PlanCall<'p> = dyn FnMut(&[Raw], *mut u64, *mut *mut aclOpExecutor) -> aclnnStatus + 'p;

impl Operators {
    /// Creates the operators of `stream`.
    pub fn new(stream: Stream) -> Self {
        Self {
            stream,
            plans: Mutex::default(),
        }
    }

    /// The stream.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// The most recently queued operators, oldest first.
    pub fn recent(&self) -> Vec<&'static str> {
        self.plans().recent()
    }

    fn plans(&self) -> MutexGuard<'_, Plans> {
        self.plans.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Plans a call, or reuses a kept plan, allocates its workspace and queues it.
    fn launch(
        &self,
        names: Names,
        arguments: &[Argument<'_>],
        plan: &mut PlanCall<'_>,
        run: Run,
    ) -> Result<()> {
        self.check_views(names.run, arguments)?;
        self.stream.make_current()?;
        let (repeat, key) = {
            let mut plans = self.plans();
            plans.note(names.run);
            match plans.find(names, arguments) {
                Kept::Plan(plan) => {
                    if plan.ai_cpu {
                        ai_cpu::count(names.run);
                    }
                    plan.set_addresses(&self.stream, arguments)?;
                    return plan.run(&self.stream, names.run, run);
                }
                Kept::Keep(key) => (true, Some(key)),
                Kept::First => (true, None),
                Kept::Once => (false, None),
            }
        };
        let objects = Objects::new(&self.stream, arguments)?;
        let mut workspace_bytes = 0;
        let mut executor = std::ptr::null_mut();
        let status = plan(&objects.raw, &raw mut workspace_bytes, &raw mut executor);
        self.check(names.plan, status)?;
        let plan = Plan {
            objects,
            executor,
            workspace_bytes,
            ai_cpu: ai_cpu::on_ai_cpu(names, arguments),
        };
        if plan.ai_cpu {
            ai_cpu::count(names.run);
        }
        let (plan, outcome) = match plan.into_repeatable(repeat) {
            Ok(plan) => {
                let outcome = plan.run(&self.stream, names.run, run);
                (Some(plan), outcome)
            }
            Err(plan) => (None, plan.run_once(&self.stream, names.run, run)),
        };
        if let Some(key) = key {
            self.plans().keep(key, plan);
        }
        outcome
    }

    /// The number of planned calls kept for reuse.
    pub fn kept_plans(&self) -> usize {
        self.plans().len()
    }

    fn check(&self, function: &'static str, status: aclnnStatus) -> Result<()> {
        check(&self.stream.device().runtime().api().rt, function, status)
    }

    /// Rejects views outside their buffer or of another stream.
    fn check_views(&self, operator: &'static str, arguments: &[Argument<'_>]) -> Result<()> {
        let each = |view: &View<'_>| -> Result<()> {
            self.stream.owns(operator, view.buffer)?;
            view.check(operator)
        };
        for argument in arguments {
            match argument {
                Argument::In(view) | Argument::Out(view) | Argument::Ref(view) => each(view)?,
                Argument::Ins(views) | Argument::Outs(views) => {
                    views.iter().try_for_each(each)?;
                }
                _ => {}
            }
        }
        Ok(())
    }
}
