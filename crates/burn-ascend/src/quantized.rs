//! Quantised tensors. They stay on the host, because no device operator supports burn's schemes.

use burn::backend::flex::FlexQTensor;
use burn::backend::{DType, ExecutionError, Shape, TensorMetadata};

use crate::npu::AscendDevice;

/// A quantised tensor, held on the host on behalf of a device.
#[derive(Clone, Debug)]
pub struct AscendQTensor {
    pub(crate) host: FlexQTensor,
    pub(crate) device: AscendDevice,
    /// The failure of the computation, if any; the elements are then invalid.
    pub(crate) failure: Option<ExecutionError>,
}

impl TensorMetadata for AscendQTensor {
    type Device = AscendDevice;

    fn dtype(&self) -> DType {
        self.host.dtype()
    }

    fn shape(&self) -> Shape {
        self.host.shape()
    }

    fn device(&self) -> AscendDevice {
        self.device
    }

    fn can_mut(&self) -> bool {
        self.host.can_mut()
    }
}
