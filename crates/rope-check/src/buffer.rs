//! Host tensors of any element type.

use half::{bf16, f16};

/// The element types that are checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DType {
    /// IEEE double precision.
    F64,
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// bfloat16.
    Bf16,
}

impl DType {
    /// All of them.
    pub const ALL: [DType; 4] = [Self::F64, Self::F32, Self::F16, Self::Bf16];

    /// The name in tables and reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::F64 => "f64",
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
        }
    }

    /// The type that values of this one are computed in, and that cos and sin have by default.
    pub fn computed_in(self) -> Self {
        match self {
            Self::F64 => Self::F64,
            _ => Self::F32,
        }
    }

    /// The nearest value of this type.
    pub fn round(self, value: f64) -> f64 {
        match self {
            Self::F64 => value,
            Self::F32 => f64::from(value as f32),
            Self::F16 => f16::from_f64(value).to_f64(),
            Self::Bf16 => bf16::from_f64(value).to_f64(),
        }
    }

    /// Bytes of an element.
    pub fn size_bytes(self) -> usize {
        match self {
            Self::F64 => 8,
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }
}

/// The elements of a tensor.
#[derive(Clone, Debug, PartialEq)]
pub enum Buffer {
    /// f64 elements.
    F64(Vec<f64>),
    /// f32 elements.
    F32(Vec<f32>),
    /// f16 elements.
    F16(Vec<f16>),
    /// bf16 elements.
    Bf16(Vec<bf16>),
}

impl Buffer {
    /// Rounds values to a type, to nearest.
    pub fn from_f64(dtype: DType, values: &[f64]) -> Self {
        match dtype {
            DType::F64 => Self::F64(values.to_vec()),
            DType::F32 => Self::F32(values.iter().map(|v| *v as f32).collect()),
            DType::F16 => Self::F16(values.iter().map(|v| f16::from_f64(*v)).collect()),
            DType::Bf16 => Self::Bf16(values.iter().map(|v| bf16::from_f64(*v)).collect()),
        }
    }

    /// The values, exactly.
    pub fn to_f64(&self) -> Vec<f64> {
        match self {
            Self::F64(values) => values.clone(),
            Self::F32(values) => values.iter().map(|v| f64::from(*v)).collect(),
            Self::F16(values) => values.iter().map(|v| v.to_f64()).collect(),
            Self::Bf16(values) => values.iter().map(|v| v.to_f64()).collect(),
        }
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        match self {
            Self::F64(_) => DType::F64,
            Self::F32(_) => DType::F32,
            Self::F16(_) => DType::F16,
            Self::Bf16(_) => DType::Bf16,
        }
    }

    /// The number of elements.
    pub fn len(&self) -> usize {
        match self {
            Self::F64(values) => values.len(),
            Self::F32(values) => values.len(),
            Self::F16(values) => values.len(),
            Self::Bf16(values) => values.len(),
        }
    }

    /// True if there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}
