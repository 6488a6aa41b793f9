//! Small helpers on tensors and modules.

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{Device, Int, Tensor, TensorData};

pub(crate) fn ints(values: impl Iterator<Item = i64>, device: &Device) -> Tensor<1, Int> {
    let values: Vec<i64> = values.collect();
    let len = values.len();
    Tensor::from_data(TensorData::new(values, [len]), device)
}

pub(crate) fn indices(values: Vec<usize>, device: &Device) -> Tensor<1, Int> {
    ints(values.into_iter().map(|value| value as i64), device)
}

/// True if a module has a parameter that is trained.
pub(crate) fn trains(module: &impl Module) -> bool {
    struct Any(bool);
    impl ModuleVisitor for Any {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.0 |= param.val().is_require_grad();
        }
    }
    let mut any = Any(false);
    module.visit(&mut any);
    any.0
}

/// For each layer, and for the level after the last, true if the gradient of its input is needed.
/// `first` applies to the first layer; `trained` states for each layer if it trains.
pub(crate) fn wanted_inputs(first: bool, trained: impl Iterator<Item = bool>) -> Vec<bool> {
    let above = trained.scan(first, |wanted, trained| {
        *wanted |= trained;
        Some(*wanted)
    });
    std::iter::once(first).chain(above).collect()
}

/// A leaf, at which the graph ends.
pub(crate) fn leaf<const D: usize>(x: Tensor<D>, wanted: bool) -> Tensor<D> {
    if wanted { x.detach().require_grad() } else { x }
}
