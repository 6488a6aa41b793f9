//! A linear layer, and the adapter beside its weight.

use burn::module::{Module, Param};
use burn::nn::LinearConfig;
use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_attention::linear;

use crate::error::Result;
use crate::random::Stream;

/// The random numbers of each row of a layer's input; `None` disables dropout.
pub(crate) type Draw<'a> = Option<&'a [Stream]>;

/// y = x W + b + s (x A) B; the last term only with an adapter.
///
/// The two small products are separate from the large one: neither the sum W + s A B nor its
/// gradient, each as large as W, is ever computed.
#[derive(Module, Debug)]
pub(crate) struct Linear {
    /// `[inputs, outputs]`
    pub(crate) weight: Param<Tensor<2>>,
    pub(crate) bias: Option<Param<Tensor<1>>>,
    pub(crate) adapter: Option<Adapter>,
}

/// A and B of a [`Linear`], in f32 beside 16-bit weights.
#[derive(Module, Debug)]
pub(crate) struct Adapter {
    /// `[inputs, rank]`
    a: Param<Tensor<2>>,
    /// `[rank, outputs]`
    b: Param<Tensor<2>>,
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

/// The settings that all adapters of a model share.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AdapterConfig {
    pub(crate) rank: usize,
    pub(crate) scale: f64,
    pub(crate) dropout: f64,
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
        }
    }

    /// Inputs and outputs.
    pub(crate) fn sizes(&self) -> [usize; 2] {
        self.weight.lazy_shape().dims()
    }

    /// Adds an adapter without effect: B is 0, and A is uniform within 1 / sqrt(inputs), as in
    /// PEFT.
    pub(crate) fn adapt(&mut self, config: AdapterConfig, index: u64, stream: Stream) {
        let [inputs, outputs] = self.sizes();
        let device = self.weight.device();
        let dtype = adapter_dtype(self.weight.dtype());
        let drawn = stream
            .part(index)
            .symmetric(inputs * config.rank, 1.0 / (inputs as f64).sqrt());
        let a = TensorData::new(drawn, [inputs, config.rank]).convert_dtype(dtype);
        let b = Tensor::zeros([config.rank, outputs], (&device, dtype));
        self.adapter = Some(Adapter {
            a: Param::from_tensor(Tensor::from_data(a, (&device, dtype))),
            b: Param::from_tensor(b),
            scale: config.scale,
            dropout: config.dropout,
            index,
        });
    }

    /// Adds an adapter with the matrices `[inputs, rank]` and `[rank, outputs]`, the second already
    /// scaled.
    pub(crate) fn place(&mut self, a: Tensor<2>, b: Tensor<2>) {
        self.adapter = Some(Adapter {
            a: Param::from_tensor(a),
            b: Param::from_tensor(b),
            scale: 1.0,
            dropout: 0.0,
            index: 0,
        });
    }

    pub(crate) fn forward<const D: usize>(&self, x: Tensor<D>, draw: Draw) -> Result<Tensor<D>> {
        let (weight, bias) = (self.weight.val(), self.bias.as_ref().map(Param::val));
        match (&self.adapter, draw) {
            (Some(adapter), Some(rows)) if adapter.dropout > 0.0 => {
                let y = linear(x.clone(), weight, bias, None)?;
                let dtype = y.dtype();
                // The sum is rounded once, rather than each of its two terms.
                let delta = adapter.dropped(x, rows)?;
                Ok((y.cast(delta.dtype()) + delta).cast(dtype))
            }
            (adapter, _) => {
                let adapter = adapter.as_ref().map(Adapter::scaled);
                Ok(linear(x, weight, bias, adapter)?)
            }
        }
    }
}

impl Adapter {
    /// A and s B.
    fn scaled(&self) -> [Tensor<2>; 2] {
        let b = self.b.val();
        let b = if self.scale == 1.0 { b } else { b * self.scale };
        [self.a.val(), b]
    }

    /// s (x A) B in the adapter's type, with dropout applied to x.
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
