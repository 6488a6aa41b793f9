//! The norm and the rotation from ordinary operations of burn, beside the fused ones.

use std::error::Error;

use crate::cases::{TimedCase, Way};
use crate::names;
use crate::rotation::{positions, values};
use crate::sample::Contest;
use crate::timed::Together;
use burn::tensor::{DType as BurnDType, Device, Tensor, TensorData};
use rope_core::{HeadsLayout, Layout, Pairing};

use super::float;
use super::norm_scheme::NormScheme;

/// The contestants of a case of the norm, then the composition on burn's CPU backend.
pub struct ComposedBaseline<'a> {
    kernels: &'a mut Together,
    scheme: NormScheme,
    source: [Tensor<4>; 2],
    way: Way,
    input: Option<[Tensor<4>; 2]>,
    output: Option<(Tensor<4>, Tensor<4>)>,
}

/// True if the composition is timed beside this case. It makes new tensors, and is slow: one layout
/// and pairing says enough.
pub fn is_composed(case: &TimedCase) -> bool {
    !case.in_place && (case.layout, case.pairing) == (Layout::Bsnd, Pairing::Half)
}

impl<'a> ComposedBaseline<'a> {
    /// Makes the tensors of `case`, whose layout is BSND.
    ///
    /// # Errors
    /// If the case is refused.
    pub fn new(case: &TimedCase, kernels: &'a mut Together) -> Result<Self, Box<dyn Error>> {
        let device = Device::flex();
        let dtype = BurnDType::from(float(case.dtype));
        let tensor = |layout: HeadsLayout| {
            let dims = [1, layout.seq, layout.heads, layout.head_dim];
            let data = TensorData::new(values::<f32>(layout.elems()), dims).convert_dtype(dtype);
            Tensor::from_data(data, (&device, dtype))
        };
        let spec = case.shape.spec(case.pairing, case.axes.clone())?;
        let positions = positions(spec.axis_count(), case.shape.seq)?;
        let scheme_device = match case.way {
            Way::Forward => device.clone(),
            _ => device.clone().autodiff(),
        };
        let schemes = NormScheme::all(&spec, case.layout, &positions, case.dtype, &scheme_device)?;
        let composed = schemes
            .into_iter()
            .find(|(name, _)| *name == names::COMPOSED);
        Ok(Self {
            kernels,
            scheme: composed.ok_or("there is no composition")?.1,
            source: [case.shape.q(case.layout), case.shape.k(case.layout)].map(tensor),
            way: case.way,
            input: None,
            output: None,
        })
    }

    fn forward(&mut self) {
        self.output = self.input.take().map(|[q, k]| self.scheme.pair(q, k));
    }
}

impl Contest for ComposedBaseline<'_> {
    fn contestants(&self) -> usize {
        self.kernels.contestants() + 1
    }

    fn prepare(&mut self, contestant: usize) {
        (self.input, self.output) = (None, None);
        if contestant < self.kernels.contestants() {
            return self.kernels.prepare(contestant);
        }
        let new = |x: &Tensor<4>| x.clone() + 0.0;
        self.input = Some(self.source.each_ref().map(new));
        if self.way == Way::Backward {
            let leaves = self.input.take();
            self.input = leaves.map(|tensors| tensors.map(|x| x.autodiff().require_grad()));
            self.forward();
        }
    }

    fn run(&mut self, contestant: usize, iterations: usize) {
        if contestant < self.kernels.contestants() {
            return self.kernels.run(contestant, iterations);
        }
        if self.way == Way::Forward {
            return self.forward();
        }
        if let Some((q, k)) = self.output.take() {
            // Start from ones, as large as the outputs.
            drop((q.backward(), k.backward()));
        }
    }
}
