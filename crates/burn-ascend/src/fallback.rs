//! Operations without an operator on the device: computed on the host by Flex.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Mutex, PoisonError};

use burn::backend::flex::{Flex, FlexDevice, FlexQTensor, FlexTensor};
use burn::backend::ops::{DeformConv2dBackward, MaxPool2dBackward, MaxPool2dWithIndices};
use burn::backend::quantization::{QuantScheme, QuantizationParametersPrimitive};
use burn::backend::tensor::IndexingUpdateOp;
use burn::backend::{
    BoolDType, Distribution, ExecutionError, FloatDType, IntDType, Scalar, Shape, Slice,
    TensorMetadata, TensorPrimitive, ops,
};
use rope_ascend::aclnn::{ai_cpu_calls, reset_ai_cpu_calls};

use crate::npu::AscendDevice;
use crate::quantized::AscendQTensor;
use crate::tensor::AscendTensor;

/// The processor that ran an operation instead of the AI Core.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Processor {
    /// The host, with Flex.
    Host,
    /// The NPU's AI CPU: a few general-purpose cores, much slower.
    AiCpu,
}

impl fmt::Display for Processor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Host => "host",
            Self::AiCpu => "AI CPU",
        })
    }
}

/// The number of calls of one operation outside the AI Core, and their bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fallback {
    /// The operation: its method in burn's backend traits, or, on the AI CPU, the vendor's
    /// operator.
    pub op: &'static str,
    /// The processor.
    pub processor: Processor,
    /// Number of calls.
    pub calls: u64,
    /// Bytes copied to the host and back; 0 for the AI CPU.
    pub bytes: u64,
}

static TRIPS: Mutex<BTreeMap<&'static str, (u64, u64)>> = Mutex::new(BTreeMap::new());

/// Returns the operations of all devices that ran on the host or on the AI CPU since the start or
/// the last [`reset_fallbacks`], most bytes first.
///
/// Calls on the AI CPU are calculated from a table ([`rope_ascend::aclnn::runs_on_ai_cpu`]): the
/// operator library does not report them.
pub fn fallbacks() -> Vec<Fallback> {
    let trips = TRIPS.lock().unwrap_or_else(PoisonError::into_inner);
    let trips = trips.iter().map(|(&op, &(calls, bytes))| Fallback {
        op,
        processor: Processor::Host,
        calls,
        bytes,
    });
    let slow = ai_cpu_calls().into_iter().map(|(op, calls)| Fallback {
        op,
        processor: Processor::AiCpu,
        calls,
        bytes: 0,
    });
    let mut list: Vec<Fallback> = trips.chain(slow).collect();
    list.sort_by_key(|fallback| std::cmp::Reverse((fallback.bytes, fallback.calls)));
    list
}

/// Resets the counts of [`fallbacks`].
pub fn reset_fallbacks() {
    TRIPS.lock().unwrap_or_else(PoisonError::into_inner).clear();
    reset_ai_cpu_calls();
}

/// One call on the host: the bytes copied, the device of its results, and the failure carried by an
/// argument.
///
/// A failed argument is replaced by zeros, so that Flex gives the results their shapes; the results
/// then carry the failure.
#[derive(Debug)]
pub(crate) struct Trip {
    op: &'static str,
    bytes: u64,
    device: AscendDevice,
    failure: Option<ExecutionError>,
}

impl Trip {
    pub(crate) fn new(op: &'static str) -> Self {
        Self {
            op,
            bytes: 0,
            device: AscendDevice::default(),
            failure: None,
        }
    }

    /// Counts the call.
    pub(crate) fn end(self) {
        let mut trips = TRIPS.lock().unwrap_or_else(PoisonError::into_inner);
        let (calls, bytes) = trips.entry(self.op).or_default();
        *calls += 1;
        *bytes += self.bytes;
    }
}

/// Conversion of an argument of a backend operation to Flex.
pub(crate) trait ToHost {
    type Host;
    fn to_host(self, trip: &mut Trip) -> Self::Host;
}

/// Conversion of a result of a backend operation from Flex.
pub(crate) trait FromHost {
    type Host;
    fn from_host(host: Self::Host, trip: &mut Trip) -> Self;
}

impl ToHost for AscendTensor {
    type Host = FlexTensor;
    fn to_host(self, trip: &mut Trip) -> FlexTensor {
        trip.device = self.device();
        let (shape, dtype) = (self.shape(), self.dtype());
        match self.read() {
            Ok(data) => {
                trip.bytes += data.bytes().len() as u64;
                FlexTensor::from_data(data)
            }
            Err(error) => {
                trip.failure.get_or_insert(error);
                FlexTensor::zeros(shape, dtype)
            }
        }
    }
}

impl FromHost for AscendTensor {
    type Host = FlexTensor;
    fn from_host(host: FlexTensor, trip: &mut Trip) -> Self {
        if let Some(error) = &trip.failure {
            return Self::failed(&trip.device, host.shape(), host.dtype(), error.clone());
        }
        let data = host.into_data();
        trip.bytes += data.bytes().len() as u64;
        Self::upload(&trip.device, data)
    }
}

impl ToHost for AscendQTensor {
    type Host = FlexQTensor;
    fn to_host(self, trip: &mut Trip) -> FlexQTensor {
        trip.device = self.device;
        trip.failure = trip.failure.take().or(self.failure);
        self.host
    }
}

impl FromHost for AscendQTensor {
    type Host = FlexQTensor;
    fn from_host(host: FlexQTensor, trip: &mut Trip) -> Self {
        Self {
            host,
            device: trip.device,
            failure: trip.failure.clone(),
        }
    }
}

impl ToHost for TensorPrimitive<crate::Ascend> {
    type Host = TensorPrimitive<Flex>;
    fn to_host(self, trip: &mut Trip) -> Self::Host {
        match self {
            Self::Float(tensor) => TensorPrimitive::Float(tensor.to_host(trip)),
            Self::QFloat(tensor) => TensorPrimitive::QFloat(tensor.to_host(trip)),
        }
    }
}

impl ToHost for &AscendDevice {
    type Host = &'static FlexDevice;
    fn to_host(self, trip: &mut Trip) -> Self::Host {
        trip.device = *self;
        &FlexDevice
    }
}

impl<T: ToHost> ToHost for Option<T> {
    type Host = Option<T::Host>;
    fn to_host(self, trip: &mut Trip) -> Self::Host {
        self.map(|value| value.to_host(trip))
    }
}

impl<T: ToHost> ToHost for Vec<T> {
    type Host = Vec<T::Host>;
    fn to_host(self, trip: &mut Trip) -> Self::Host {
        self.into_iter().map(|value| value.to_host(trip)).collect()
    }
}

impl ToHost for QuantizationParametersPrimitive<crate::Ascend> {
    type Host = QuantizationParametersPrimitive<Flex>;
    fn to_host(self, trip: &mut Trip) -> Self::Host {
        QuantizationParametersPrimitive {
            scales: self.scales.to_host(trip),
            global: self.global.to_host(trip),
        }
    }
}

/// Arguments that are the same everywhere.
macro_rules! plain {
    ($($ty:ty),* $(,)?) => {
        $( impl ToHost for $ty {
            type Host = Self;
            fn to_host(self, _: &mut Trip) -> Self { self }
        } )*
    };
}

plain! {
    bool, usize, f64, Scalar, Shape, Distribution, BoolDType, FloatDType, IntDType, IndexingUpdateOp, &QuantScheme,
    [usize; 2], [usize; 3], &[usize], &[Slice], &[(usize, usize)], std::ops::Range<i64>,
    ops::PadMode, ops::GridSampleOptions, ops::InterpolateOptions, ops::AttentionModuleOptions, ops::UnfoldOptions,
    ops::ConvOptions<1>, ops::ConvOptions<2>, ops::ConvOptions<3>, ops::DeformConvOptions<2>,
    ops::ConvTransposeOptions<1>, ops::ConvTransposeOptions<2>, ops::ConvTransposeOptions<3>,
}

impl FromHost for TensorPrimitive<crate::Ascend> {
    type Host = TensorPrimitive<Flex>;
    fn from_host(host: Self::Host, trip: &mut Trip) -> Self {
        match host {
            TensorPrimitive::Float(tensor) => Self::Float(FromHost::from_host(tensor, trip)),
            TensorPrimitive::QFloat(tensor) => Self::QFloat(FromHost::from_host(tensor, trip)),
        }
    }
}

impl<A: FromHost, B: FromHost> FromHost for (A, B) {
    type Host = (A::Host, B::Host);
    fn from_host((a, b): Self::Host, trip: &mut Trip) -> Self {
        (A::from_host(a, trip), B::from_host(b, trip))
    }
}

impl<A: FromHost> FromHost for Option<A> {
    type Host = Option<A::Host>;
    fn from_host(host: Self::Host, trip: &mut Trip) -> Self {
        host.map(|value| A::from_host(value, trip))
    }
}

/// Results that are structures of tensors.
macro_rules! structures {
    ($( $name:ident { $($field:ident),* } )*) => {
        $( impl FromHost for $name<crate::Ascend> {
            type Host = $name<Flex>;
            fn from_host(host: Self::Host, trip: &mut Trip) -> Self {
                Self { $( $field: FromHost::from_host(host.$field, trip), )* }
            }
        } )*
    };
}

structures! {
    MaxPool2dWithIndices { output, indices }
    MaxPool2dBackward { x_grad }
    DeformConv2dBackward { x_grad, offset_grad, weight_grad, mask_grad, bias_grad }
}

/// Runs one method of a backend trait on the host.
macro_rules! host {
    ($trait:ident::$name:ident($($arg:ident),*) -> $ret:ty) => {{
        let mut trip = $crate::fallback::Trip::new(stringify!($name));
        $( let $arg = $crate::fallback::ToHost::to_host($arg, &mut trip); )*
        let result = <burn::backend::flex::Flex as $trait<burn::backend::flex::Flex>>::$name($($arg),*);
        let result = <$ret as $crate::fallback::FromHost>::from_host(result, &mut trip);
        trip.end();
        result
    }};
}
pub(crate) use host;
