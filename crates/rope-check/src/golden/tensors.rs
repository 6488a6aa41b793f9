//! A `.safetensors` file, its values exact in f64.

use std::collections::{BTreeMap, HashMap};
#[cfg(feature = "models")]
use std::path::Path;

use half::{bf16, f16};
use safetensors::tensor::{Dtype, TensorView};
use safetensors::{SafeTensorError, SafeTensors};

use super::artifact::MAX_BYTES;
use super::error::GoldenError;
use crate::buffer::{Buffer, DType};

/// The tensors and the metadata of a file.
pub(crate) struct Tensors {
    /// The file's name in messages, after the name of a tensor; empty where they name it
    /// themselves.
    origin: String,
    pub(crate) metadata: HashMap<String, String>,
    /// By name; of a tensor of another type than those read, the type.
    entries: BTreeMap<String, Result<Values, Dtype>>,
}

/// A tensor's values.
#[derive(Clone, Debug)]
pub(crate) struct Values {
    /// The name in messages.
    pub(crate) name: String,
    pub(crate) shape: Vec<usize>,
    pub(crate) values: Vec<f64>,
    dtype: Dtype,
}

/// The element types that a tensor may have.
#[derive(Clone, Copy)]
pub(crate) enum Kind {
    Floats,
    Numbers,
}

impl Kind {
    fn takes(self, dtype: Dtype) -> bool {
        let is_integer = matches!(dtype, Dtype::I64 | Dtype::I32);
        match self {
            Self::Floats => !is_integer,
            Self::Numbers => true,
        }
    }

    fn expected(self) -> &'static str {
        match self {
            Self::Floats => "F64, F32, F16 or BF16",
            Self::Numbers => "I64, I32, F64, F32, BF16 or F16",
        }
    }
}

impl Tensors {
    /// # Errors
    /// [`GoldenError::Container`].
    pub(crate) fn parse(bytes: &[u8]) -> Result<Self, GoldenError> {
        let broken = |error: SafeTensorError| GoldenError::Container {
            detail: error.to_string(),
        };
        let (_, header) = SafeTensors::read_metadata(bytes).map_err(broken)?;
        let file = SafeTensors::deserialize(bytes).map_err(broken)?;
        let entry = |(name, view): (String, TensorView)| {
            let values = Values::decode(&name, &view).ok_or(view.dtype());
            (name, values)
        };
        Ok(Self {
            origin: String::new(),
            metadata: header.metadata().clone().unwrap_or_default(),
            entries: file.tensors().into_iter().map(entry).collect(),
        })
    }

    /// Reads a file, which messages then name.
    ///
    /// # Errors
    /// [`GoldenError::Io`]; [`GoldenError::Container`].
    #[cfg(feature = "models")]
    pub(crate) fn read(path: &Path) -> Result<Self, GoldenError> {
        let bytes = plain_files::read(path, MAX_BYTES).map_err(|error| {
            let cause = std::io::Error::from(error.cause);
            let named = format!("{}: {cause}", path.display());
            std::io::Error::new(cause.kind(), named)
        })?;
        let mut tensors = Self::parse(&bytes).map_err(|error| match error {
            GoldenError::Container { detail } => GoldenError::Container {
                detail: format!("{}: {detail}", path.display()),
            },
            other => other,
        })?;
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        tensors.origin = format!(" of {name}");
        for values in tensors.entries.values_mut().flatten() {
            values.name += &tensors.origin;
        }
        Ok(tensors)
    }

    /// The tensor of that name, if there is one.
    ///
    /// # Errors
    /// [`GoldenError::TensorType`] for another type than `kind` has.
    pub(crate) fn find(&self, name: &str, kind: Kind) -> Result<Option<&Values>, GoldenError> {
        let found = match self.entries.get(name) {
            None => return Ok(None),
            Some(Ok(values)) if kind.takes(values.dtype) => return Ok(Some(values)),
            Some(Ok(values)) => values.dtype,
            Some(Err(dtype)) => *dtype,
        };
        Err(GoldenError::TensorType {
            name: format!("{name}{}", self.origin),
            expected: kind.expected(),
            found: format!("{found:?}"),
        })
    }

    pub(crate) fn missing(&self, name: &str, needed_by: &str) -> GoldenError {
        let found: Vec<&str> = self.entries.keys().map(String::as_str).collect();
        GoldenError::MissingTensor {
            name: name.to_owned(),
            needed_by: needed_by.to_owned(),
            found: if found.is_empty() {
                "no tensor at all".to_owned()
            } else {
                found.join(", ")
            },
        }
    }
}

/// Methods for the comparison of a model.
#[cfg(feature = "models")]
impl Tensors {
    /// The tensor of that name.
    ///
    /// # Errors
    /// [`GoldenError::MissingTensor`]; [`GoldenError::TensorType`].
    pub(crate) fn get(&self, name: &str) -> Result<&Values, GoldenError> {
        let missing = || self.missing(name, "the comparison of a model folder");
        self.find(name, Kind::Numbers)?.ok_or_else(missing)
    }

    /// The tensors whose names begin with `prefix`.
    ///
    /// # Errors
    /// [`GoldenError::TensorType`].
    /// Repeats a tensor that one row of a batch stands for.
    #[cfg(feature = "models")]
    pub(crate) fn repeat_row(&mut self, name: &str, rows: usize) {
        if let Some(Ok(values)) = self.entries.get_mut(name)
            && values.shape.first() == Some(&1)
        {
            values.shape[0] = rows;
            values.values = values.values.repeat(rows);
        }
    }

    pub(crate) fn with_prefix(&self, prefix: &str) -> Result<Vec<(&str, &Values)>, GoldenError> {
        let names = self.entries.keys().filter(|name| name.starts_with(prefix));
        names.map(|name| Ok((&name[..], self.get(name)?))).collect()
    }
}

impl Values {
    /// Nothing for a type that is not read.
    fn decode(name: &str, view: &TensorView) -> Option<Self> {
        let values = match view.dtype() {
            Dtype::I64 => elements(view, |x| i64::from_le_bytes(x) as f64),
            Dtype::I32 => elements(view, |x| f64::from(i32::from_le_bytes(x))),
            Dtype::F64 => elements(view, f64::from_le_bytes),
            Dtype::F32 => elements(view, |x| f64::from(f32::from_le_bytes(x))),
            Dtype::F16 => elements(view, |x| f16::from_le_bytes(x).to_f64()),
            Dtype::BF16 => elements(view, |x| bf16::from_le_bytes(x).to_f64()),
            _ => return None,
        };
        Some(Self {
            name: name.to_owned(),
            shape: view.shape().to_vec(),
            values,
            dtype: view.dtype(),
        })
    }

    pub(crate) fn is_integer(&self) -> bool {
        matches!(self.dtype, Dtype::I64 | Dtype::I32)
    }

    /// The type in which the values were computed.
    pub(crate) fn is_f64(&self) -> bool {
        self.dtype == Dtype::F64
    }

    /// Values of this program's own, to compare with.
    #[cfg(feature = "models")]
    pub(crate) fn list(name: &str, values: Vec<f64>) -> Self {
        Self {
            name: name.to_owned(),
            shape: vec![values.len()],
            values,
            dtype: Dtype::F64,
        }
    }

    #[cfg(feature = "models")]
    pub(crate) fn integers(&self) -> Vec<i64> {
        self.values.iter().map(|value| *value as i64).collect()
    }

    pub(crate) fn misshapen(&self, expected: impl Into<String>) -> GoldenError {
        GoldenError::TensorShape {
            name: self.name.clone(),
            expected: expected.into(),
            found: self.shape.clone(),
        }
    }

    /// # Errors
    /// [`GoldenError::NotFinite`] names the first infinity or NaN.
    #[cfg(feature = "burn")]
    pub(crate) fn expect_finite(&self) -> Result<(), GoldenError> {
        match self.values.iter().position(|value| !value.is_finite()) {
            Some(at) => Err(GoldenError::NotFinite {
                name: self.name.clone(),
                index: self.index(at),
                found: self.values[at],
            }),
            None => Ok(()),
        }
    }

    /// # Errors
    /// [`GoldenError::Overflow`] if a finite value is infinite in `dtype`.
    pub(crate) fn fits(&self, dtype: DType) -> Result<(), GoldenError> {
        let narrowed = Buffer::from_f64(dtype, &self.values).to_f64();
        let overflow =
            |(value, narrowed): &(&f64, f64)| value.is_finite() && narrowed.is_infinite();
        match self.values.iter().zip(narrowed).find(overflow) {
            Some((found, _)) => Err(GoldenError::Overflow {
                name: self.name.clone(),
                found: *found,
                dtype: dtype.name(),
            }),
            None => Ok(()),
        }
    }

    /// The indices of an element, as `[0, 2, 5]`.
    pub(crate) fn index(&self, mut flat: usize) -> String {
        let mut parts = Vec::new();
        for size in self.shape.iter().rev() {
            parts.push(flat % (*size).max(1));
            flat /= (*size).max(1);
        }
        parts.reverse();
        format!("{parts:?}")
    }
}

/// The largest finite magnitude.
pub(crate) fn largest(values: impl Iterator<Item = f64>) -> f64 {
    let finite = values.map(f64::abs).filter(|x| x.is_finite());
    finite.fold(0.0, f64::max)
}

fn elements<const BYTES: usize>(view: &TensorView, read: impl Fn([u8; BYTES]) -> f64) -> Vec<f64> {
    let (chunks, _) = view.data().as_chunks::<BYTES>();
    chunks.iter().map(|bytes| read(*bytes)).collect()
}
