//! Activations by name: whole ones, or samples of large ones.

use std::collections::BTreeMap;
use std::ops::Range;

use burn::backend::ExecutionError;
use burn::tensor::{DType, Device, Int, Tensor, TensorData};

use crate::error::{Result, VlmError};
use crate::tensors::indices;

/// Activations recorded by a pass, under the names of `docs/models.md`. Nothing is recorded by
/// default.
#[derive(Debug, Default)]
pub struct Trace {
    mode: Mode,
}

#[derive(Debug, Default)]
enum Mode {
    #[default]
    Off,
    Whole(BTreeMap<String, Result<TensorData, ExecutionError>>),
    Samples {
        count: usize,
        segments: Vec<Segment>,
        rows: TokenRows,
        /// By label and name.
        found: BTreeMap<(String, String), Sampled>,
        error: Option<VlmError>,
    },
}

/// The rows of tokens in activations: of all, or of a rank's tokens by their ascending indices.
#[derive(Debug)]
enum TokenRows {
    All,
    Own(Vec<usize>),
}

impl TokenRows {
    fn of(&self, token: usize) -> Option<usize> {
        match self {
            Self::All => Some(token),
            Self::Own(own) => own.binary_search(&token).ok(),
        }
    }
}

/// A sample of a batch: the place of its rows in the activations of a pass.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Its name, independent of the division into micro-batches.
    pub label: String,
    /// Its tokens among those of all rows.
    pub tokens: Range<usize>,
    /// Its patches among those of all pictures and videos.
    pub patches: Range<usize>,
}

/// Some elements of a tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampled {
    /// The shape of the tensor.
    pub shape: Vec<usize>,
    /// The elements at [`sampled_elements`], in order.
    pub values: Vec<f32>,
}

/// Returns the indices of at most `count` of `elements` elements: one in each of `count` equal
/// parts, at a different place in each part.
pub fn sampled_elements(elements: usize, count: usize) -> impl Iterator<Item = usize> + Clone {
    let count = count.min(elements);
    let part = elements / count.max(1);
    (0..count).map(move |index| {
        let hash = (index as u64).wrapping_mul(2_654_435_761) % (1 << 32);
        let start = (index as u128 * elements as u128 / count as u128) as usize;
        start + ((u128::from(hash) * part as u128) >> 32) as usize
    })
}

impl Sampled {
    /// Samples a tensor, read by `index`: from an element of the tensor to its index in `flat`,
    /// `None` for one that is not there, whose value is 0.
    ///
    /// # Errors
    /// [`VlmError::TensorUnreadable`] if it cannot be read from the device.
    pub(crate) fn take(
        name: &str,
        flat: Tensor<1>,
        shape: &[usize],
        count: usize,
        index: impl Fn(usize) -> Option<usize>,
    ) -> Result<Self> {
        let elements = shape.iter().product();
        let places: Vec<Option<usize>> = sampled_elements(elements, count).map(index).collect();
        let there: Vec<usize> = places.iter().flatten().copied().collect();
        let found: Vec<f32> = if there.is_empty() {
            Vec::new()
        } else {
            let places = indices_on(there, &flat.device());
            let data = flat
                .inner()
                .select(0, places)
                .cast(DType::F32)
                .try_into_data();
            let data = data.map_err(|error| VlmError::TensorUnreadable {
                name: name.to_owned(),
                reason: error.reason().to_owned(),
            })?;
            data.iter::<f32>().collect()
        };
        let mut found = found.into_iter();
        let values = places.into_iter();
        let values = values.map(|place| place.and_then(|_| found.next()).unwrap_or(0.0));
        Ok(Self {
            shape: shape.to_vec(),
            values: values.collect(),
        })
    }
}

/// Indices on a device without autodiff.
fn indices_on(places: Vec<usize>, device: &Device) -> Tensor<1, Int> {
    indices(places, &device.clone().inner())
}

impl Trace {
    /// Creates a trace that records nothing and costs nothing.
    pub fn off() -> Self {
        Self::default()
    }

    /// Creates a trace that copies every named activation to the host.
    pub fn recording() -> Self {
        Self {
            mode: Mode::Whole(BTreeMap::new()),
        }
    }

    /// Creates a trace that copies, for each sample, at most `count` elements of every named
    /// activation and of its gradient. Of a rank that has some of the tokens, `own` has their
    /// ascending indices: elements of others are 0, and the tower's are not copied.
    pub fn sampling(count: usize, segments: Vec<Segment>, own: Option<Vec<usize>>) -> Self {
        Self {
            mode: Mode::Samples {
                count,
                segments,
                rows: own.map_or(TokenRows::All, TokenRows::Own),
                found: BTreeMap::new(),
                error: None,
            },
        }
    }

    /// The activation called `name`, if whole activations are recorded.
    ///
    /// # Errors
    /// [`VlmError::TensorUnreadable`] if it could not be read from the device.
    pub fn get(&self, name: &str) -> Result<Option<&TensorData>> {
        let found = match &self.mode {
            Mode::Whole(found) => found.get(name),
            _ => None,
        };
        found
            .map(|found| found.as_ref())
            .transpose()
            .map_err(|error| VlmError::TensorUnreadable {
                name: name.to_owned(),
                reason: error.reason().to_owned(),
            })
    }

    /// The samples by label and name.
    ///
    /// # Errors
    /// [`VlmError::TensorUnreadable`] if one could not be read from the device.
    pub fn into_samples(self) -> Result<BTreeMap<(String, String), Sampled>> {
        match self.mode {
            Mode::Samples {
                error: Some(error), ..
            } => Err(error),
            Mode::Samples { found, .. } => Ok(found),
            _ => Ok(BTreeMap::new()),
        }
    }

    /// True if activations are recorded.
    pub(crate) fn is_recording(&self) -> bool {
        !matches!(self.mode, Mode::Off)
    }

    /// True if samples are recorded.
    pub(crate) fn is_sampling(&self) -> bool {
        matches!(self.mode, Mode::Samples { .. })
    }

    /// The recorded names of whole activations.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        let found = match &self.mode {
            Mode::Whole(found) => Some(found),
            _ => None,
        };
        found.into_iter().flatten().map(|(name, _)| &name[..])
    }

    pub(crate) fn record<const D: usize>(&mut self, name: impl FnOnce() -> String, x: &Tensor<D>) {
        match &mut self.mode {
            Mode::Off => {}
            Mode::Whole(activations) => {
                let copied = x.clone().try_into_data();
                if let Ok(data) = &copied {
                    // CubeCL copies on first access, when later operations may have written in
                    // place.
                    let _ = data.as_bytes();
                }
                activations.insert(name(), copied);
            }
            Mode::Samples {
                count,
                segments,
                rows: of_tokens,
                found,
                error,
            } => {
                let name = name();
                let is_own = matches!(of_tokens, TokenRows::Own(_));
                if is_own && name.starts_with("vision.") {
                    return;
                }
                let patches = segments.iter().map(|segment| segment.patches.len()).sum();
                for segment in segments.iter() {
                    let rows = segment.rows(&name, x.dims()[0], patches);
                    if rows.is_empty() {
                        continue;
                    }
                    match sample_rows(&name, x, (rows, of_tokens), *count) {
                        Ok(sampled) => {
                            found.insert((segment.label.clone(), name.clone()), sampled);
                        }
                        Err(failed) => _ = error.get_or_insert(failed),
                    }
                }
            }
        }
    }
}

/// Tokens of a sample whose logits are recorded.
const FEW: usize = 16;

impl Trace {
    /// Samples the results of a function for a few tokens of each sample, `[tokens, ..]`.
    pub(crate) fn record_few(
        &mut self,
        name: impl Fn() -> String,
        hidden: &Tensor<3>,
        of: impl Fn(Tensor<2>) -> Tensor<2>,
    ) {
        let Mode::Samples {
            count,
            segments,
            rows: of_tokens,
            found,
            error,
        } = &mut self.mode
        else {
            return;
        };
        let [rows, seq, channels] = hidden.dims();
        let flat = hidden.clone().inner().reshape([rows * seq, channels]);
        for segment in segments.iter().filter(|segment| !segment.tokens.is_empty()) {
            let tokens = sampled_elements(segment.tokens.len(), FEW);
            let rows = tokens.map(|token| of_tokens.of(segment.tokens.start + token));
            let rows: Vec<Option<usize>> = rows.collect();
            let there: Vec<usize> = rows.iter().flatten().copied().collect();
            if there.is_empty() {
                continue;
            }
            let few = of(flat.clone().select(0, indices(there, &flat.device())));
            let [count_there, width] = few.dims();
            let shape = [rows.len(), width];
            let flat = few.reshape([count_there * width]);
            let index = |element: usize| {
                let row = element / width;
                let before = rows[..row].iter().flatten().count();
                rows[row].map(|_| before * width + element % width)
            };
            match Sampled::take(&name(), flat, &shape, *count, index) {
                Ok(sampled) => _ = found.insert((segment.label.clone(), name()), sampled),
                Err(failed) => _ = error.get_or_insert(failed),
            }
        }
    }
}

impl Segment {
    /// Its rows in an activation whose first dimension is `length`.
    fn rows(&self, name: &str, length: usize, patches: usize) -> Range<usize> {
        if !name.starts_with("vision.") {
            return self.tokens.clone();
        }
        // Merged patches are fewer.
        let group = (patches / length.max(1)).max(1);
        self.patches.start / group..self.patches.end / group
    }
}

/// Samples rows of an activation: patches, `[patches, ..]`, or tokens, `[rows, tokens, ..]`.
fn sample_rows<const D: usize>(
    name: &str,
    x: &Tensor<D>,
    (rows, of_tokens): (Range<usize>, &TokenRows),
    count: usize,
) -> Result<Sampled> {
    let dims = x.dims();
    let (row_dims, of_tokens) = match name.starts_with("vision.") {
        true => (1, &TokenRows::All),
        false => (2, of_tokens),
    };
    let width: usize = dims[row_dims..].iter().product();
    let elements: usize = dims.iter().product();
    let shape = [&[rows.len()], &dims[row_dims..]].concat();
    let flat = x.clone().inner().reshape([elements]);
    Sampled::take(name, flat, &shape, count, |element| {
        let row = of_tokens.of(rows.start + element / width)?;
        Some(row * width + element % width)
    })
}
