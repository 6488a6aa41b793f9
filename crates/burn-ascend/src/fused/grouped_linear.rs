//! The groups' linear layers by the vendor's grouped product.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Shape, TensorData, TensorMetadata};
use burn_attention::composed::grouped_linear as composed;
use burn_attention::{GroupedLinearOp, GroupedLinearOps};

use super::{Outputs, Refusal};
use crate::Ascend;
use crate::ops::launch::{self, Types};
use crate::ops::views::swap;
use crate::tensor::AscendTensor;

/// The operator's limits on groups, and on the last axis of a matrix in memory.
const MOST_GROUPS: usize = 1024;
const LONGEST_AXIS: usize = 65_535;

/// The operator's numbers: one tensor in and out, and a list that counts the rows of each group.
const ONE_TENSOR: i64 = 3;
const COUNTS: i64 = 1;
const NO_ACTIVATION: i64 = 0;

/// The axis that the groups divide.
#[derive(Clone, Copy, Debug)]
enum Split {
    /// Rows of x; each group has a matrix.
    Rows = 0,
    /// Columns of x and rows of the matrix; each group has a product.
    Sums = 2,
}

impl GroupedLinearOps for Ascend {
    fn grouped_linear_forward(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        op: GroupedLinearOp,
    ) -> FloatTensor<Self> {
        let out = Shape::from([x.dims()[0], weight.dims()[1]]);
        let dense = [&x, &weight].map(|x| x.clone().contiguous());
        let transposed = swap(&dense[1], 1, 2);
        product([&dense[0], &transposed], out, Split::Rows, &op)
            .unwrap_or_else(|| composed::forward::<Self>(x, weight, &op))
    }

    fn grouped_linear_x_gradient(
        weight: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
        op: GroupedLinearOp,
    ) -> FloatTensor<Self> {
        let out = Shape::from([gradient.dims()[0], weight.dims()[2]]);
        let dense = [&gradient, &weight].map(|x| x.clone().contiguous());
        product(dense.each_ref(), out, Split::Rows, &op)
            .unwrap_or_else(|| composed::x_gradient::<Self>(weight, gradient, &op))
    }

    fn grouped_linear_weight_gradient(
        x: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
        op: GroupedLinearOp,
    ) -> FloatTensor<Self> {
        let out = Shape::from([op.rows.len(), gradient.dims()[1], x.dims()[1]]);
        let dense = [&gradient, &x].map(|x| x.clone().contiguous());
        let transposed = swap(&dense[0], 0, 1);
        product([&transposed, &dense[1]], out, Split::Sums, &op)
            .unwrap_or_else(|| composed::weight_gradient::<Self>(x, gradient, &op))
    }
}

/// The product, or the failure; `None` beyond the operator's limits. Sums are in f32, also of f32
/// (no kernel of the operator chooses HF32), and rounded once.
fn product(
    factors: [&AscendTensor; 2],
    shape: Shape,
    split: Split,
    op: &GroupedLinearOp,
) -> Option<AscendTensor> {
    let described = (shape.clone(), factors[0].dtype());
    let outputs = Outputs::new(factors[0], [described]);
    match run(factors, shape, split, op) {
        Err(Refusal::Limit) => None,
        outcome => {
            let outcome = outcome.map(|out| [out]).map_err(|refusal| (refusal, ()));
            let [out] = outputs.or_composed(outcome, |()| unreachable!("not a limit"));
            Some(out)
        }
    }
}

fn run(
    factors: [&AscendTensor; 2],
    shape: Shape,
    split: Split,
    op: &GroupedLinearOp,
) -> Result<AscendTensor, Refusal> {
    let dtype = factors[0].dtype();
    let last_in_memory = |x: &&AscendTensor| {
        let axes = x.dims().iter().zip(x.strides());
        let lengths = axes.filter(|(_, stride)| **stride == 1);
        lengths.map(|(length, _)| *length).max()
    };
    let longest = factors.iter().filter_map(last_in_memory).max();
    // The operator reads the counts on the device, and no first phase compares them.
    let divided = match split {
        Split::Rows => factors[0].dims()[0],
        Split::Sums => factors[0].dims()[1],
    };
    let mut rows = op.rows.iter();
    let grouped = rows.try_fold(0_usize, |sum, rows| sum.checked_add(*rows));
    if !Types::FLOAT.contains(dtype)
        || op.rows.len() > MOST_GROUPS
        || longest > Some(LONGEST_AXIS)
        || grouped != Some(divided)
    {
        return Err(Refusal::Limit);
    }
    let context = factors[0].context()?.clone();
    let counts: Vec<i64> = op.rows.iter().map(|rows| *rows as i64).collect();
    let groups = counts.len();
    let counts = AscendTensor::upload(&context.device(), TensorData::new(counts, [groups]));
    let out = AscendTensor::empty_in(&context, shape, dtype);
    let [x, weight, counts, written] =
        launch::views([factors[0], factors[1], &counts, &out]).map_err(Refusal::from)?;
    let operators = context.operators();
    let queued = operators.grouped_mm(
        &[x],
        &[weight],
        None,
        None,
        None,
        None,
        None,
        None,
        Some(counts),
        None,
        None,
        None,
        ONE_TENSOR,
        split as i64,
        COUNTS,
        NO_ACTIVATION,
        &[written],
        None,
        None,
    );
    queued.map_err(Refusal::operator)?;
    Ok(out)
}

#[cfg(test)]
mod tests {
    use ascend_sim::control;
    use burn::backend::Backend;
    use burn::backend::ops::FloatTensorOps;

    use super::*;
    use crate::faults::{Alone, values};

    fn matrix(alone: &Alone, numbers: Vec<f32>, dims: &[usize]) -> AscendTensor {
        Ascend::float_from_data(TensorData::new(numbers, dims.to_vec()), &alone.0)
    }

    /// The output's first numbers of the first and the last row, and all gradients but those of
    /// rows, of x = 1, weights of 1, 2 and 3 by group, and gradients of 1.
    fn compute(alone: &Alone) -> [Vec<f32>; 3] {
        let rows = vec![40_000, 0, 30_000];
        let (all, groups, outputs, inputs) = (70_000, 3, 2, 4);
        let op = || GroupedLinearOp { rows: rows.clone() };
        let x = || matrix(alone, vec![1.0; all * inputs], &[all, inputs]);
        let gradient = || matrix(alone, vec![1.0; all * outputs], &[all, outputs]);
        let numbers = (0..groups).flat_map(|group| vec![group as f32 + 1.0; outputs * inputs]);
        let weight = matrix(alone, numbers.collect(), &[groups, outputs, inputs]);
        let ends = |y: AscendTensor| {
            let y = values(y).expect("computed");
            vec![y[0], y[y.len() - 1]]
        };
        [
            ends(Ascend::grouped_linear_forward(x(), weight.clone(), op())),
            ends(Ascend::grouped_linear_x_gradient(weight, gradient(), op())),
            values(Ascend::grouped_linear_weight_gradient(
                x(),
                gradient(),
                op(),
            ))
            .expect("computed"),
        ]
    }

    /// Also of more rows than the last axis may be long; and by ordinary products if an installation
    /// refuses the operator.
    #[test]
    fn all_groups_are_one_operator() {
        let alone = Alone::new();
        let of_groups = [[40_000.0; 8], [0.0; 8], [30_000.0; 8]].concat();
        let expected = [vec![4.0, 12.0], vec![2.0, 6.0], of_groups];
        for refused in [0, 3] {
            for call in 1..=refused {
                control::inject_fault("aclnnGroupedMatmulV4GetWorkspaceSize", call, 161_002);
            }
            control::clear_calls();
            assert_eq!(compute(&alone), expected);
            let calls = control::calls();
            let count = |name: &str| calls.iter().filter(|call| call.function == name).count();
            assert_eq!(count("aclnnGroupedMatmulV4"), 3 - refused as usize);
            assert_eq!(count("aclnnMm") > 0, refused > 0);
            control::clear_faults();
        }
        let _synchronised = Ascend::sync(&alone.0);
    }
}
