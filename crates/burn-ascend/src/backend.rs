//! The backend type.

use burn::backend::flex::{Flex, FlexDevice};
use burn::backend::ir::{BackendIr, HandleKind, TensorHandle};
use burn::backend::{
    Backend, BackendTypes, DType, DTypeUsageSet, ExecutionError, GraphUnsupported,
};

use crate::error::execution;
use crate::npu::AscendDevice;
use crate::quantized::AscendQTensor;
use crate::tensor::AscendTensor;

/// The burn backend of Ascend NPUs.
///
/// ```
/// use burn::backend::ops::FloatTensorOps;
/// use burn::backend::{Backend, TensorData};
/// use burn_ascend::{Ascend, AscendDevice};
///
/// let device = AscendDevice::new(0);
/// // Without CANN the error says what was looked for.
/// if let Err(error) = device.open() {
///     println!("{error}");
/// } else {
///     let x = Ascend::float_from_data(TensorData::from([1.0_f32, 2.0]), &device);
///     let y = Ascend::float_exp(x);
///     println!("{:?}", y.read()?);
/// }
/// # Ok::<(), burn::backend::ExecutionError>(())
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct Ascend;

impl BackendTypes for Ascend {
    type Device = AscendDevice;
    type FloatTensorPrimitive = AscendTensor;
    type IntTensorPrimitive = AscendTensor;
    type BoolTensorPrimitive = AscendTensor;
    type QuantizedTensorPrimitive = AscendQTensor;
    type GraphPrimitive = GraphUnsupported;
}

impl Backend for Ascend {
    fn name(device: &AscendDevice) -> String {
        device.to_string()
    }

    fn seed(device: &AscendDevice, seed: u64) {
        // The host's generator draws types that the device does not support.
        Flex::seed(&FlexDevice, seed);
        if let Ok(context) = device.context() {
            context.seed(seed);
        }
    }

    fn sync(device: &AscendDevice) -> Result<(), ExecutionError> {
        device.opened().map_or(Ok(()), |context| context.sync())
    }

    fn memory_cleanup(device: &AscendDevice) {
        if let Some(context) = device.opened()
            && let Err(error) = context.trim()
        {
            context.failed(&execution(&error));
        }
    }

    fn flush(_device: &AscendDevice) -> Result<(), ExecutionError> {
        // Work is passed to the runtime when it is queued.
        Ok(())
    }

    fn dtype_usage(_device: &AscendDevice, dtype: DType) -> DTypeUsageSet {
        match dtype {
            DType::F32 | DType::F16 | DType::BF16 => DTypeUsageSet::all(),
            // Types of the host, through the fallback.
            other => Flex::dtype_usage(&FlexDevice, other),
        }
    }

    fn device_count(type_id: u16) -> usize {
        AscendDevice::count(type_id).unwrap_or(0)
    }
}

/// Returns the tensor of a handle of one kind.
macro_rules! tensor_of {
    ($handle:expr, $kind:ident) => {
        match $handle.handle {
            HandleKind::$kind(tensor) => tensor,
            // A broken invariant of the interpreter: it registers handles by kind.
            other => unreachable!(
                "a {} handle where {} is due",
                other.name(),
                stringify!($kind)
            ),
        }
    };
}

impl BackendIr for Ascend {
    type Handle = HandleKind<Self>;

    fn float_tensor(handle: TensorHandle<Self::Handle>) -> AscendTensor {
        tensor_of!(handle, Float)
    }

    fn int_tensor(handle: TensorHandle<Self::Handle>) -> AscendTensor {
        tensor_of!(handle, Int)
    }

    fn bool_tensor(handle: TensorHandle<Self::Handle>) -> AscendTensor {
        tensor_of!(handle, Bool)
    }

    fn quantized_tensor(handle: TensorHandle<Self::Handle>) -> AscendQTensor {
        tensor_of!(handle, Quantized)
    }

    fn float_tensor_handle(tensor: AscendTensor) -> Self::Handle {
        HandleKind::Float(tensor)
    }

    fn int_tensor_handle(tensor: AscendTensor) -> Self::Handle {
        HandleKind::Int(tensor)
    }

    fn bool_tensor_handle(tensor: AscendTensor) -> Self::Handle {
        HandleKind::Bool(tensor)
    }

    fn quantized_tensor_handle(tensor: AscendQTensor) -> Self::Handle {
        HandleKind::Quantized(tensor)
    }
}
