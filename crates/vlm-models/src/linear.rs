//! Linear layers, one or one of each expert, and the adapters beside their weights.

use burn::module::{Module, Param, ParamId};
use burn::nn::LinearConfig;
use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_attention::{
    GradientSource, adapted_linear_source, adapted_linears, concatenates_at_once, divided,
    flattened, gated_linear, gated_linear_source, grouped_linear, has_adapter_kernels, linear,
    linear_source, scaled_parts, swiglu, wide_linear, wide_linear_onto, wide_linear_source,
    wide_linears,
};

use crate::error::Result;
use crate::random::Stream;

/// The random numbers of each row of a layer's input; `None` disables dropout.
pub(crate) type Draw<'a> = Option<&'a [Stream]>;

/// y = x W + b + s (x A^T) B; the last term only with an adapter.
///
/// The two small products are separate from the large one: neither the sum W + s A^T B nor its
/// gradient, each as large as W, is ever computed.
#[derive(Module, Debug)]
pub(crate) struct Linear {
    /// `[inputs, outputs]`
    pub(crate) weight: Param<Tensor<2>>,
    pub(crate) bias: Option<Param<Tensor<1>>>,
    pub(crate) adapter: Option<Adapter>,
    /// True during a pass whose gradients may be wider than the weights.
    #[module(skip)]
    has_wide_gradients: bool,
}

/// A and B beside a weight, in f32 if it is of 16 bits. In PEFT's files, too, the experts of a layer
/// have one adapter: A has the rows of an expert together, B those of a rank.
#[derive(Module, Debug)]
pub(crate) struct Adapter {
    /// `[rank, inputs]`, or `[experts * rank, inputs]`
    a: Param<Tensor<2>>,
    /// `[rank, outputs]`, or `[rank * experts, outputs]`
    b: Param<Tensor<2>>,
    /// s A and s B as the kernels take them, during a pass with the current values.
    #[module(skip)]
    factors: Option<[Tensor<2>; 2]>,
    #[module(skip)]
    scale: f64,
    /// The probability with which an input of A is dropped.
    #[module(skip)]
    dropout: f64,
    /// Its index among the model's adapters.
    #[module(skip)]
    index: u64,
}

/// The type of an adapter beside a weight.
pub(crate) fn adapter_dtype(weight: DType) -> DType {
    match weight {
        DType::F64 => DType::F64,
        _ => DType::F32,
    }
}

/// The settings of an adapter.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AdapterConfig {
    /// Rows of A and of B.
    pub(crate) rows: usize,
    pub(crate) scale: f64,
    pub(crate) dropout: f64,
}

/// A matrix of each expert, transposed, and the adapter beside them.
#[derive(Module, Debug)]
pub(crate) struct Matrices {
    /// `[experts, outputs, inputs]`
    matrices: Param<Tensor<3>>,
    adapter: Option<Adapter>,
}

/// The place of the experts in a parameter of a layer's experts, as if its shape was `[outer,
/// experts, inner]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertAxis {
    /// Parts that each have elements of every expert.
    pub outer: usize,
    /// The number of experts.
    pub experts: usize,
    /// Adjacent elements of an expert.
    pub inner: usize,
}

impl Matrices {
    pub(crate) fn of(matrices: Param<Tensor<3>>) -> Self {
        Self {
            matrices,
            adapter: None,
        }
    }

    /// The number of matrices.
    pub(crate) fn count(&self) -> usize {
        self.matrices.lazy_shape()[0]
    }

    /// How the experts divide the elements of the parameters.
    pub(crate) fn axes(&self) -> Vec<(ParamId, ExpertAxis)> {
        let [experts, outputs, inputs] = self.matrices.lazy_shape().dims();
        let axis = |outer, inner| ExpertAxis {
            outer,
            experts,
            inner,
        };
        let mut axes = vec![(self.matrices.id, axis(1, outputs * inputs))];
        if let Some(Adapter { a, b, .. }) = &self.adapter {
            let [rows, inputs] = a.lazy_shape().dims();
            let rank = rows / experts.max(1);
            axes.push((a.id, axis(1, rank * inputs)));
            axes.push((b.id, axis(rank, b.lazy_shape()[1])));
        }
        axes
    }

    /// Multiplies rows, sorted by expert, by the transposed matrix of theirs.
    pub(crate) fn forward(&self, rows: Tensor<2>, counts: &[usize]) -> Result<Tensor<2>> {
        let y = grouped_linear(rows.clone(), self.matrices.val(), counts)?;
        let Some(adapter) = &self.adapter else {
            return Ok(y);
        };
        let [a, b] = adapter.of_experts(counts.len());
        let (narrow, wide) = (y.dtype(), a.dtype());
        let delta = grouped_linear(grouped_linear(rows.cast(wide), a, counts)?, b, counts)?;
        // The sum is rounded once, rather than each of its two terms.
        Ok((y.cast(wide) + delta).cast(narrow))
    }
}

/// A layer that an adapter may be beside.
pub(crate) enum Adaptable<'a> {
    Linear(&'a mut Linear),
    /// A router, or the gate of an expert: adapted only if a target names it.
    Gate(&'a mut Linear),
    /// Adapted only if a target names them, without dropout.
    Experts(&'a mut Matrices),
}

impl Adaptable<'_> {
    /// Inputs and outputs.
    pub(crate) fn sizes(&self) -> [usize; 2] {
        match self {
            Self::Linear(layer) | Self::Gate(layer) => layer.weight.lazy_shape().dims(),
            Self::Experts(experts) => {
                let [_, outputs, inputs] = experts.matrices.lazy_shape().dims();
                [inputs, outputs]
            }
        }
    }

    /// The number of matrices.
    pub(crate) fn count(&self) -> usize {
        match self {
            Self::Experts(experts) => experts.matrices.lazy_shape()[0],
            _ => 1,
        }
    }

    pub(crate) fn adapter(&mut self) -> &mut Option<Adapter> {
        match self {
            Self::Linear(layer) | Self::Gate(layer) => &mut layer.adapter,
            Self::Experts(experts) => &mut experts.adapter,
        }
    }

    /// The device and the type of its weight.
    pub(crate) fn like(&self) -> (Device, DType) {
        match self {
            Self::Linear(layer) | Self::Gate(layer) => {
                (layer.weight.device(), layer.weight.dtype())
            }
            Self::Experts(experts) => (experts.matrices.device(), experts.matrices.dtype()),
        }
    }
}

/// How a layer is computed.
enum Way<'a> {
    /// With dropout before its adapter.
    Dropped(&'a Adapter, &'a [Stream]),
    /// By the device's kernels for adapters.
    Kernels(&'a Adapter),
    /// With a gradient of the weight that is not rounded.
    WideGradient,
    Plain(Option<&'a Adapter>),
}

impl Linear {
    pub(crate) fn new(inputs: usize, outputs: usize, bias: bool, device: &Device) -> Self {
        let base = LinearConfig::new(inputs, outputs)
            .with_bias(bias)
            .init(device);
        Self {
            weight: base.weight,
            bias: base.bias,
            adapter: None,
            has_wide_gradients: false,
        }
    }

    pub(crate) fn forward<const D: usize>(&self, x: Tensor<D>, draw: Draw) -> Result<Tensor<D>> {
        let (weight, bias) = (self.weight.val(), self.bias.as_ref().map(Param::val));
        match self.way(&x, draw) {
            Way::Dropped(adapter, rows) => {
                let y = linear(x.clone(), weight, bias, None)?;
                let dtype = y.dtype();
                // The sum is rounded once, rather than each of its two terms.
                let delta = adapter.dropped(x, rows)?;
                Ok((y.cast(delta.dtype()) + delta).cast(dtype))
            }
            Way::Kernels(adapter) => {
                let adapter = adapter.for_kernels(x.dtype());
                let [y] = adapted_linears(x, [(weight, bias, adapter)])?;
                Ok(y)
            }
            Way::WideGradient => Ok(wide_linear(x, weight, bias)?),
            Way::Plain(adapter) => Ok(linear(x, weight, bias, adapter.map(Adapter::scaled))?),
        }
    }

    /// y and the layer's output, in one product where the device has one for it.
    pub(crate) fn forward_onto<const D: usize>(
        &self,
        y: Tensor<D>,
        x: Tensor<D>,
        draw: Draw,
    ) -> Result<Tensor<D>> {
        match (self.way(&x, draw), &self.bias) {
            (Way::WideGradient, None) => Ok(wide_linear_onto(y, x, self.weight.val())?),
            _ => Ok(y + self.forward(x, draw)?),
        }
    }

    /// The output of silu(gate) * up, or its sum with y.
    pub(crate) fn forward_gated<const D: usize>(
        &self,
        [gate, up]: [Tensor<D>; 2],
        y: Option<Tensor<D>>,
        draw: Draw,
    ) -> Result<Tensor<D>> {
        if self.takes_gated(&gate, draw) {
            return Ok(gated_linear(gate, up, self.weight.val(), y)?);
        }
        let x = swiglu(gate, up)?;
        match y {
            Some(y) => self.forward_onto(y, x, draw),
            None => self.forward(x, draw),
        }
    }

    /// As [`source`](Self::source), of the layer's output of silu(gate) * up.
    pub(crate) fn source_gated<const D: usize>(
        &self,
        [gate, up]: [Tensor<D>; 2],
        draw: Draw,
        gradient: Tensor<D>,
    ) -> Result<GradientSource> {
        if self.takes_gated(&gate, draw) {
            return Ok(gated_linear_source(gate, up, self.weight.val(), gradient)?);
        }
        self.source(swiglu(gate, up)?, draw, gradient)
    }

    /// True if the gate is part of the layer's operation.
    fn takes_gated<const D: usize>(&self, gate: &Tensor<D>, draw: Draw) -> bool {
        matches!(self.way(gate, draw), Way::WideGradient) && self.bias.is_none()
    }

    /// The source of the backward from the gradient of an output that nothing reads. Where it can,
    /// it does not compute the output.
    pub(crate) fn source<const D: usize>(
        &self,
        x: Tensor<D>,
        draw: Draw,
        gradient: Tensor<D>,
    ) -> Result<GradientSource> {
        let (weight, bias) = (self.weight.val(), self.bias.as_ref().map(Param::val));
        Ok(match self.way(&x, draw) {
            Way::Dropped(adapter, rows) => {
                let delta = adapter.dropped(x.clone(), rows)?;
                let of_delta = gradient.clone().cast(delta.dtype());
                let of_product = linear_source(x, weight, bias, None, gradient)?;
                of_product.and(GradientSource::new(delta, of_delta)?)
            }
            Way::Kernels(adapter) => {
                let adapter = adapter.for_kernels(x.dtype());
                adapted_linear_source(x, (weight, bias, adapter), gradient)?
            }
            Way::WideGradient => wide_linear_source(x, weight, bias, gradient)?,
            Way::Plain(adapter) => {
                linear_source(x, weight, bias, adapter.map(Adapter::scaled), gradient)?
            }
        })
    }

    fn way<'a, const D: usize>(&'a self, x: &Tensor<D>, draw: Draw<'a>) -> Way<'a> {
        let is_empty = x.dims().contains(&0);
        match (&self.adapter, draw) {
            (Some(adapter), Some(rows)) if adapter.dropout > 0.0 => Way::Dropped(adapter, rows),
            (Some(adapter), _) if has_adapter_kernels(&x.device()) && !is_empty => {
                Way::Kernels(adapter)
            }
            (None, _) if self.takes_wide(&x.device()) && !is_empty => Way::WideGradient,
            (adapter, _) => Way::Plain(adapter.as_ref()),
        }
    }

    /// True for the product that a pass with gradients takes. So that others have its bits, they take
    /// it too where no gradient of the weight is rounded.
    fn takes_wide(&self, device: &Device) -> bool {
        let is_frozen = !self.weight.val().is_require_grad();
        self.has_wide_gradients || (is_frozen && has_adapter_kernels(device))
    }

    /// The outputs of layers with one input, whose adapters read it once where there are kernels
    /// for it.
    pub(crate) fn forward_together<const D: usize, const N: usize>(
        layers: [&Self; N],
        x: Tensor<D>,
        draw: Draw,
    ) -> Result<[Tensor<D>; N]> {
        let is_wide = |layer: &Self| matches!(layer.way(&x, draw), Way::WideGradient);
        if layers.into_iter().all(is_wide) {
            let parts = |layer: &Self| (layer.weight.val(), layer.bias.as_ref().map(Param::val));
            return Ok(wide_linears(x, layers.map(parts))?);
        }
        let inputs = layers.map(|layer| match layer.way(&x, draw) {
            Way::Kernels(adapter) => {
                let bias = layer.bias.as_ref().map(Param::val);
                Some((layer.weight.val(), bias, adapter.for_kernels(x.dtype())))
            }
            _ => None,
        });
        if inputs.iter().any(Option::is_none) {
            let outputs: Result<Vec<_>> = layers
                .into_iter()
                .map(|layer| layer.forward(x.clone(), draw))
                .collect();
            return Ok(outputs?
                .try_into()
                .unwrap_or_else(|_| unreachable!("N layers")));
        }
        let inputs = inputs.map(|input| input.unwrap_or_else(|| unreachable!("N inputs")));
        Ok(adapted_linears(x, inputs)?)
    }
}

/// Prepares layers for a pass. Kernels get the current values of all adapters by a few operations.
pub(crate) fn prepare(mut linears: Vec<&mut Linear>, wide_gradients: bool) {
    for linear in &mut linears {
        linear.has_wide_gradients |= wide_gradients && has_adapter_kernels(&linear.weight.device());
    }
    let mut adapted: Vec<(DType, &mut Adapter)> = linears
        .into_iter()
        .filter_map(|linear| {
            let dtype = linear.weight.dtype();
            Some((dtype, linear.adapter.as_mut()?))
        })
        .collect();
    let Some((dtype, first)) = adapted.first() else {
        return;
    };
    let (dtype, scale, wide) = (*dtype, first.scale, first.a.dtype());
    let is_like_first = |(other, adapter): &(DType, &mut Adapter)| {
        *other == dtype && adapter.scale == scale && adapter.factors.is_none()
    };
    let device = first.a.device();
    if !has_adapter_kernels(&device) {
        return;
    }
    if !concatenates_at_once(&device) {
        for (dtype, adapter) in &mut adapted {
            adapter.factors = Some(adapter.for_kernels(*dtype).factors);
        }
        return;
    }
    if !adapted.iter().all(is_like_first) {
        return;
    }
    let matrices = |which: fn(&Adapter) -> &Param<Tensor<2>>| {
        adapted
            .iter()
            .map(move |(_, adapter)| which(adapter).val().detach())
    };
    let matrices = matrices(|x| &x.a).chain(matrices(|x| &x.b));
    let has_graph = device.is_autodiff();
    let matrices = matrices.map(|x| if has_graph { x.inner() } else { x });
    let matrices: Vec<Tensor<2>> = matrices.collect();
    let dims: Vec<[usize; 2]> = matrices.iter().map(Tensor::dims).collect();
    let flat = flattened(matrices.into_iter().map(Tensor::into_dispatch).collect());
    let flat = Tensor::cat(flat, 0);
    let [count] = flat.dims();
    let scaled = scaled_parts(flat.unsqueeze(), scale, dtype);
    let parts = scaled.dims()[0];
    let scaled = scaled.reshape([parts * count]);
    // The parts of a matrix one after the other.
    let scaled = if dtype == wide {
        scaled
    } else {
        let lengths = dims.iter().map(|[rows, columns]| [rows * columns]);
        let lengths: Vec<[usize; 1]> = lengths.cycle().take(parts * dims.len()).collect();
        let pieces = divided(scaled, &lengths).expect("the parts of all matrices");
        let mut by_matrix = Vec::new();
        for matrix in 0..dims.len() {
            by_matrix.extend(pieces.iter().skip(matrix).step_by(dims.len()).cloned());
        }
        drop(pieces);
        Tensor::cat(by_matrix, 0)
    };
    let shapes = dims.iter().map(|[rows, columns]| [parts * rows, *columns]);
    let shapes: Vec<[usize; 2]> = shapes.collect();
    let factors = divided(scaled, &shapes).expect("the parts of all matrices");
    let outer = |x| if has_graph { Tensor::from_inner(x) } else { x };
    let mut factors = factors.into_iter().map(outer);
    let of_a: Vec<Tensor<2>> = factors.by_ref().take(adapted.len()).collect();
    for ((_, adapter), factors) in adapted.iter_mut().zip(of_a.into_iter().zip(factors)) {
        adapter.factors = Some(factors.into());
    }
}

impl Adapter {
    /// An adapter without effect: B is 0, and A is uniform within 1 / sqrt(inputs), as in PEFT.
    pub(crate) fn new(
        [inputs, outputs]: [usize; 2],
        config: AdapterConfig,
        (device, weight): (&Device, DType),
        stream: (Stream, u64),
    ) -> Self {
        let (dtype, rows) = (adapter_dtype(weight), config.rows);
        let (stream, index) = stream;
        let drawn = stream
            .part(index)
            .symmetric(inputs * rows, 1.0 / (inputs as f64).sqrt());
        // The numbers are drawn input by input.
        let of_row = |row: usize| drawn.iter().skip(row).step_by(rows);
        let a: Vec<_> = (0..rows).flat_map(of_row).copied().collect();
        let a = TensorData::new(a, [rows, inputs]).convert_dtype(dtype);
        let a = Tensor::from_data(a, (device, dtype));
        Self {
            scale: config.scale,
            dropout: config.dropout,
            index,
            ..Self::of(a, Tensor::zeros([rows, outputs], (device, dtype)))
        }
    }

    /// An adapter of the matrices `[rows, inputs]` and `[rows, outputs]`, the second already scaled.
    pub(crate) fn of(a: Tensor<2>, b: Tensor<2>) -> Self {
        Self {
            a: Param::from_tensor(a),
            b: Param::from_tensor(b),
            factors: None,
            scale: 1.0,
            dropout: 0.0,
            index: 0,
        }
    }

    /// A and s B of each expert, `[experts, rank, inputs]` and `[experts, outputs, rank]`.
    pub(crate) fn of_experts(&self, experts: usize) -> [Tensor<3>; 2] {
        let [a, b] = self.scaled();
        let a = a.transpose();
        let [[rows, inputs], [_, outputs]] = [a.dims(), b.dims()];
        let rank = rows / experts;
        let b = b.reshape([rank, experts, outputs]).permute([1, 2, 0]);
        [a.reshape([experts, rank, inputs]), b]
    }

    /// A^T and s B.
    fn scaled(&self) -> [Tensor<2>; 2] {
        let b = self.b.val();
        let b = if self.scale == 1.0 { b } else { b * self.scale };
        [self.a.val().transpose(), b]
    }

    /// The matrices as kernels for activations of a type take them.
    fn for_kernels(&self, dtype: DType) -> burn_attention::Adapter {
        let (a, b) = (self.a.val(), self.b.val());
        let factors = self.factors.clone().unwrap_or_else(|| {
            [&a, &b].map(|x| scaled_parts(x.clone().detach(), self.scale, dtype))
        });
        burn_attention::Adapter { a, b, factors }
    }

    /// s (x A^T) B in the adapter's type, with dropout applied to x.
    fn dropped<const D: usize>(&self, x: Tensor<D>, rows: &[Stream]) -> Result<Tensor<D>> {
        let [a, b] = self.scaled();
        let (dims, kept) = (x.dims(), 1.0 / (1.0 - self.dropout));
        let row_mask = |row: &Stream| {
            let stream = row.part(self.index);
            stream.mask(dims[D - 1], self.dropout, kept as f32)
        };
        let mask: Vec<f32> = rows.iter().flat_map(row_mask).collect();
        let mask = TensorData::new(mask, dims).convert_dtype(a.dtype());
        let x = x.cast(a.dtype()) * Tensor::from_data(mask, (&a.device(), a.dtype()));
        Ok(linear(linear(x, a, None, None)?, b, None, None)?)
    }
}
