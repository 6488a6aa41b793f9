//! Gradients of a batch, summed in f32.

use std::collections::{HashMap, HashSet};

use burn::module::ParamId;
use burn::tensor::{DType, Tensor};
use burn_attention::{divided, square_sums};

/// The gradients of a batch so far, flat.
#[derive(Clone, Debug, Default)]
pub(crate) struct GradientSums {
    sums: HashMap<ParamId, Tensor<1>>,
    /// Those that are computed together, in this order.
    order: Vec<ParamId>,
    /// True if a gradient keeps its type until another is added.
    pub(crate) keeps_types: bool,
    /// Parameters whose gradients are on other ranks.
    elsewhere: HashSet<ParamId>,
}

/// Elements up to which a tensor is computed together with others, where each operation costs a
/// launch: the time of a longer one is that of its memory.
const SMALL: usize = 1 << 20;

/// True for a type whose sums are in a wider one.
pub(crate) fn is_narrow(dtype: DType) -> bool {
    !matches!(dtype, DType::F32 | DType::F64)
}

pub(crate) fn widened(x: Tensor<1>) -> Tensor<1> {
    if is_narrow(x.dtype()) {
        x.cast(DType::F32)
    } else {
        x
    }
}

/// One tensor of several.
pub(crate) fn joined(mut tensors: Vec<Tensor<1>>) -> Tensor<1> {
    match tensors.len() {
        1 => tensors.remove(0),
        _ => Tensor::cat(tensors, 0),
    }
}

/// The parts of [`joined`] tensors, of these lengths.
pub(crate) fn parts(joined: &Tensor<1>, lengths: &[usize]) -> Vec<Tensor<1>> {
    let shapes: Vec<[usize; 1]> = lengths.iter().map(|length| [*length]).collect();
    divided(joined.clone(), &shapes).expect("the lengths of what was joined")
}

impl GradientSums {
    /// Adds the gradient of a micro-batch. Sums of 16-bit gradients are in f32.
    pub(crate) fn add(&mut self, id: ParamId, gradient: Tensor<1>) {
        let sum = match self.sums.remove(&id) {
            Some(earlier) => widened(earlier) + widened(gradient),
            None if self.keeps_types => gradient,
            None => widened(gradient),
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

    /// True if a parameter has a gradient, here or only on other ranks.
    pub(crate) fn is_anywhere(&self, id: ParamId) -> bool {
        self.has(id) || self.elsewhere.contains(&id)
    }

    /// True if a gradient is computed together with others.
    pub(crate) fn is_joined(&self, id: ParamId) -> bool {
        self.order.contains(&id) && self.has(id)
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
        let small = self.small().map(|(sums, _)| sums);
        let large = ids.filter(|id| !self.order.contains(id));
        let large = large.filter_map(|id| self.get(id));
        let Some(squares) = square_sums(small.into_iter().chain(large).collect()) else {
            return Ok(0.0);
        };
        let squares = squares.try_into_data();
        let squares = squares.map_err(|error| error.reason().to_owned())?;
        Ok(squares.iter::<f64>().sum())
    }

    /// Multiplies all gradients.
    pub(crate) fn scale(&mut self, factor: f64) {
        self.together(|sum| widened(sum) * factor);
        let order = &self.order;
        let scaled = |(id, sum): (ParamId, Tensor<1>)| {
            let sum = if order.contains(&id) {
                sum
            } else {
                widened(sum) * factor
            };
            (id, sum)
        };
        // No handle of a sum is left: the product may take its memory.
        let sums = std::mem::take(&mut self.sums).into_iter();
        self.sums = sums.map(scaled).collect();
    }

    /// Computes the small gradients in this order together from now on, where each operation costs
    /// a launch.
    pub(crate) fn join(&mut self, ids: impl Iterator<Item = ParamId>) {
        let is_small = |id: &ParamId| self.sums.get(id).is_some_and(|x| x.dims()[0] <= SMALL);
        let ids: Vec<ParamId> = ids.filter(is_small).collect();
        let is_narrow = |id: &ParamId| self.sums.get(id).is_some_and(|x| is_narrow(x.dtype()));
        let (narrow, wide): (Vec<_>, Vec<_>) = ids.into_iter().partition(is_narrow);
        self.order = narrow;
        self.together(widened);
        self.order.extend(wide);
        self.together(|sum| sum);
    }

    /// Replaces the joined gradients by parts of what a function makes of them.
    fn together(&mut self, change: impl FnOnce(Tensor<1>) -> Tensor<1>) {
        let Some((sums, lengths)) = self.small() else {
            return;
        };
        // No handle of the parts is left: the result may take their memory.
        self.order.iter().for_each(|id| _ = self.sums.remove(id));
        let sums = parts(&change(sums), &lengths);
        self.sums.extend(self.order.iter().copied().zip(sums));
    }

    /// The joined gradients, and their lengths.
    fn small(&self) -> Option<(Tensor<1>, Vec<usize>)> {
        let sums: Vec<_> = self.order.iter().filter_map(|id| self.get(*id)).collect();
        let lengths = sums.iter().map(|sum| sum.dims()[0]).collect();
        (!sums.is_empty()).then(|| (joined(sums), lengths))
    }
}
