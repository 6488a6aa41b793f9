//! Gradients of a batch, summed in f32.

use std::collections::{HashMap, HashSet};

use burn::module::ParamId;
use burn::tensor::{DType, Tensor};

/// The gradients of a batch so far, flat.
#[derive(Clone, Debug, Default)]
pub(crate) struct GradientSums {
    sums: HashMap<ParamId, Tensor<1>>,
    /// Parameters whose gradients are on other ranks.
    elsewhere: HashSet<ParamId>,
}

/// Elements whose squares are summed together; in a longer f32 sum, the last terms would be lost.
const CHUNK: usize = 4096;

impl GradientSums {
    /// Adds the gradient of a micro-batch. Sums of 16-bit gradients are in f32.
    pub(crate) fn add(&mut self, id: ParamId, gradient: Tensor<1>) {
        let gradient = match gradient.dtype() {
            DType::F64 => gradient,
            _ => gradient.cast(DType::F32),
        };
        let sum = match self.sums.remove(&id) {
            Some(earlier) => earlier + gradient,
            None => gradient,
        };
        self.sums.insert(id, sum);
    }

    /// Records that a parameter has a gradient only on other ranks.
    pub(crate) fn add_elsewhere(&mut self, id: ParamId) {
        self.elsewhere.insert(id);
    }

    pub(crate) fn elsewhere(&self) -> impl Iterator<Item = ParamId> {
        self.elsewhere.iter().copied()
    }

    pub(crate) fn get(&self, id: ParamId) -> Option<Tensor<1>> {
        self.sums.get(&id).cloned()
    }

    /// True if a parameter has a gradient here.
    pub(crate) fn has(&self, id: ParamId) -> bool {
        self.sums.contains_key(&id)
    }

    pub(crate) fn take(&mut self, id: ParamId) -> Option<Tensor<1>> {
        self.sums.remove(&id)
    }

    /// The root of [`squares`](Self::squares).
    ///
    /// # Errors
    /// The device's message.
    pub(crate) fn norm(&self, ids: impl Iterator<Item = ParamId>) -> Result<f64, String> {
        Ok(self.squares(ids)?.sqrt())
    }

    /// The sum of all squares, in the order of `ids`.
    ///
    /// # Errors
    /// The device's message.
    pub(crate) fn squares(&self, ids: impl Iterator<Item = ParamId>) -> Result<f64, String> {
        let squares: Vec<Tensor<1>> = ids
            .filter_map(|id| self.sums.get(&id))
            .map(|sum| square(sum.clone()).cast(DType::F32))
            .collect();
        if squares.is_empty() {
            return Ok(0.0);
        }
        let squares = Tensor::cat(squares, 0).try_into_data();
        let squares = squares.map_err(|error| error.reason().to_owned())?;
        Ok(squares.iter::<f64>().sum())
    }

    /// Multiplies all gradients.
    pub(crate) fn scale(&mut self, factor: f64) {
        let sums = std::mem::take(&mut self.sums).into_iter();
        self.sums = sums.map(|(id, sum)| (id, sum * factor)).collect();
    }
}

/// The sum of the squares of a tensor, `[1]`.
fn square(x: Tensor<1>) -> Tensor<1> {
    let [elements] = x.dims();
    let whole = elements - elements % CHUNK;
    let at_once = |x: Tensor<1>| (x.clone() * x).sum();
    if whole == 0 {
        return at_once(x);
    }
    let rows = x.clone().slice(0..whole).reshape([whole / CHUNK, CHUNK]);
    let sum = (rows.clone() * rows).sum_dim(1).sum();
    if whole == elements {
        return sum;
    }
    sum + at_once(x.slice(whole..elements))
}
