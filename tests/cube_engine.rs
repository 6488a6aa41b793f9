//! burn's CubeCL backend as an engine, without the fusion that tensors go through in a build with
//! the feature `fusion`: the operation as the backend implements it.

use burn::backend::ops::FloatTensorOps;
use burn::backend::wgpu::{CubeBackend, CubeTensor, WgpuDevice};
use burn::backend::{read_sync, tensor::Device};
use burn::tensor::{Element, TensorData};
use rope_burn::rope_core::{Direction, Real};
use rope_burn::{RotaryOp, RotaryOps};
use rope_check::buffer::{Buffer, DType};
use rope_check::engine::{Case, Engine, EngineError};

pub(crate) struct CubeEngine {
    device: Device<CubeBackend>,
    /// The types that the device has.
    dtypes: Vec<DType>,
}

impl CubeEngine {
    /// On wgpu's default device, which has `dtypes`.
    pub(crate) fn new(dtypes: Vec<DType>) -> Self {
        Self {
            device: WgpuDevice::default().into(),
            dtypes,
        }
    }

    fn angles<A: Real + Element>(&self, case: &Case) -> Result<CubeTensor, EngineError> {
        let angles = case.angles::<A>()?;
        let shape = [angles.tokens(), 2 * angles.lanes()];
        let data = TensorData::new(angles.into_rows(), shape);
        Ok(CubeBackend::float_from_data(data, &self.device))
    }

    /// Strided ones are views of a tensor with its first two dimensions exchanged.
    fn tensor(&self, case: &Case, x: &Buffer, heads: usize) -> Result<CubeTensor, EngineError> {
        let dims = case.dims(heads);
        let data = match x {
            Buffer::F64(values) => TensorData::new(values.clone(), dims),
            Buffer::F32(values) => TensorData::new(values.clone(), dims),
            Buffer::F16(values) => TensorData::new(values.clone(), dims),
            Buffer::Bf16(values) => TensorData::new(values.clone(), dims),
        };
        let x = CubeBackend::float_from_data(data, &self.device);
        if !case.strided {
            return Ok(x);
        }
        let exchanged = downloaded(CubeBackend::float_swap_dims(x, 0, 1))?;
        let exchanged = CubeBackend::float_from_data(exchanged, &self.device);
        Ok(CubeBackend::float_swap_dims(exchanged, 0, 1))
    }
}

impl Engine for CubeEngine {
    fn name(&self) -> String {
        "cube".into()
    }

    fn supports(&self, dtype: DType) -> bool {
        self.dtypes.contains(&dtype)
    }

    fn apply(
        &self,
        case: &Case,
        direction: Direction,
        q: &Buffer,
        k: Option<&Buffer>,
    ) -> Result<(Buffer, Option<Buffer>), EngineError> {
        if case.head_frequencies.is_some() {
            // `Rotary` makes tokens of such heads before it calls a backend.
            let (engine, dtype) = (self.name() + " for angles per head", q.dtype());
            return Err(EngineError::Unsupported { engine, dtype });
        }
        let op = RotaryOp {
            geometry: case.spec.geometry(),
            layout: case.layout,
            direction,
        };
        let angles = match q {
            Buffer::F64(_) => self.angles::<f64>(case)?,
            _ => self.angles::<f32>(case)?,
        };
        let q = self.tensor(case, q, case.heads)?;
        let k = k.map(|k| self.tensor(case, k, case.kv_heads));
        let k = k.transpose()?;
        // A tensor that is held twice cannot be overwritten.
        let held = (!case.in_place).then(|| (q.clone(), k.clone()));
        let (q, k) = match k {
            Some(k) => {
                let (q, k) = CubeBackend::rotary_pair(q, k, angles, op);
                (q, Some(k))
            }
            None => (CubeBackend::rotary_single(q, angles, op), None),
        };
        drop(held);
        Ok((read(q)?, k.map(read).transpose()?))
    }
}

fn downloaded(x: CubeTensor) -> Result<TensorData, EngineError> {
    read_sync(CubeBackend::float_into_data(x)).map_err(|error| EngineError::Burn(error.to_string()))
}

fn read(x: CubeTensor) -> Result<Buffer, EngineError> {
    use burn::tensor::DType;
    let data = downloaded(x)?;
    let read = match data.dtype() {
        DType::F64 => data.try_into_vec().map(Buffer::F64),
        DType::F32 => data.try_into_vec().map(Buffer::F32),
        DType::F16 => data.try_into_vec().map(Buffer::F16),
        _ => data.try_into_vec().map(Buffer::Bf16),
    };
    read.map_err(|error| EngineError::Burn(format!("{error:?}")))
}
