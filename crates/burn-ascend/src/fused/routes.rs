//! The rows of a mixture's experts by the vendor's operators. The rows themselves are selected: the
//! vendor's permutation would sort again what the routes have in order.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Shape, TensorMetadata};
use burn_attention::RoutesOps;
use burn_attention::composed::routes as composed;
use burn_fused::like;

use super::{Outputs, Refusal};
use crate::Ascend;
use crate::ops::launch::{self, Types};
use crate::ops::views;
use crate::tensor::AscendTensor;

/// The operators' limit on the rows of a token.
const MOST_ROWS: usize = 512;

impl RoutesOps for Ascend {
    fn routed_rows_backward(
        gradient: FloatTensor<Self>,
        places: IntTensor<Self>,
    ) -> FloatTensor<Self> {
        let shape = Shape::from([places.dims()[0], gradient.dims()[1]]);
        let outputs = Outputs::new(&gradient, [(shape, gradient.dtype())]);
        let outcome = rows_backward(&gradient, &places).map_err(|refusal| (refusal, ()));
        let [out] = outputs.or_composed(outcome, |()| {
            [composed::rows_backward::<Self>(gradient, places)]
        });
        out
    }

    fn routed_sum_forward(
        rows: FloatTensor<Self>,
        shares: FloatTensor<Self>,
        places: IntTensor<Self>,
    ) -> FloatTensor<Self> {
        let shape = Shape::from([places.dims()[0], rows.dims()[1]]);
        let outputs = Outputs::new(&rows, [(shape, rows.dtype())]);
        let outcome = sum(&rows, &shares, &places).map_err(|refusal| (refusal, ()));
        let [out] = outputs.or_composed(outcome, |()| {
            [composed::sum_forward::<Self>(rows, shares, places)]
        });
        out
    }

    fn routed_sum_backward(
        rows: FloatTensor<Self>,
        shares: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
        places: IntTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let outputs = Outputs::new(&rows, [like(&rows), like(&shares)]);
        let outcome = sum_backward([&rows, &shares, &gradient], &places);
        let outcome = outcome.map_err(|refusal| (refusal, ()));
        let gradients = outputs.or_composed(outcome, |()| {
            composed::sum_backward::<Self>(rows, shares, gradient, places).into()
        });
        gradients.into()
    }
}

/// The places of all tokens one after the other, within the limits.
fn listed(rows: &AscendTensor, places: &AscendTensor) -> Result<AscendTensor, Refusal> {
    if !Types::FLOAT.contains(rows.dtype()) || places.dims()[1] > MOST_ROWS {
        return Err(Refusal::Limit);
    }
    let count = Shape::from([places.len()]);
    Ok(views::reshape(places.clone().contiguous(), &count))
}

fn rows_backward(
    gradient: &AscendTensor,
    places: &AscendTensor,
) -> Result<[AscendTensor; 1], Refusal> {
    let all = listed(gradient, places)?;
    let [tokens, per_token] = places.shape().dims();
    let context = gradient.context()?;
    let shape = Shape::from([tokens, gradient.dims()[1]]);
    let out = AscendTensor::empty_in(context, shape, gradient.dtype());
    let [gradient, all, written] = launch::views([gradient, &all, &out])?;
    let operators = context.operators();
    let done = operators.token_permute_grad(gradient, all, per_token as i64, false, written);
    done.map_err(Refusal::operator)?;
    Ok([out])
}

fn sum(
    rows: &AscendTensor,
    shares: &AscendTensor,
    places: &AscendTensor,
) -> Result<[AscendTensor; 1], Refusal> {
    let all = listed(rows, places)?;
    let context = rows.context()?;
    let shape = Shape::from([places.dims()[0], rows.dims()[1]]);
    let out = AscendTensor::empty_in(context, shape, rows.dtype());
    let [rows, all, shares, written] = launch::views([rows, &all, shares, &out])?;
    let operators = context.operators();
    let done = operators.token_unpermute(rows, all, Some(shares), false, None, written);
    done.map_err(Refusal::operator)?;
    Ok([out])
}

fn sum_backward(
    [rows, shares, gradient]: [&AscendTensor; 3],
    places: &AscendTensor,
) -> Result<[AscendTensor; 2], Refusal> {
    let all = listed(rows, places)?;
    let context = rows.context()?;
    let outputs = [rows, shares].map(|x| AscendTensor::empty_in(context, x.shape(), x.dtype()));
    let [drows, dshares] = outputs.each_ref();
    let [rows, gradient, all, shares, drows, dshares] =
        launch::views([rows, gradient, &all, shares, drows, dshares])?;
    let operators = context.operators();
    let shares = Some(shares);
    let done =
        operators.token_unpermute_grad(rows, gradient, all, shares, false, None, drows, dshares);
    done.map_err(Refusal::operator)?;
    Ok(outputs)
}

#[cfg(test)]
mod tests {
    use ascend_sim::control;
    use burn::backend::ops::{FloatTensorOps, IntTensorOps};
    use burn::backend::{Backend, TensorData};

    use super::*;
    use crate::faults::{Alone, values};

    /// Each is one operator; and composed if an installation refuses the operators.
    #[test]
    fn sums_and_gradients_are_one_operator_each() {
        let alone = Alone::new();
        let matrix = |numbers: &[f32], columns: usize| {
            let shape = [numbers.len() / columns, columns];
            Ascend::float_from_data(TensorData::new(numbers.to_vec(), shape), &alone.0)
        };
        // The second token's second place has no row.
        let places = || Ascend::int_from_data(TensorData::new(vec![2, 0, 1, 9], [2, 2]), &alone.0);
        let rows = || matrix(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], 2);
        let shares = || matrix(&[0.5, 2.0, 4.0, 3.0], 2);
        let gradient = || matrix(&[1.0, 10.0, 100.0, 1000.0], 2);
        let operators = [
            "aclnnMoeTokenPermuteGrad",
            "aclnnMoeTokenUnpermute",
            "aclnnMoeTokenUnpermuteGrad",
        ];
        for is_refused in [false, true] {
            for name in operators.iter().filter(|_| is_refused) {
                control::inject_fault(&format!("{name}GetWorkspaceSize"), 1, 161_002);
            }
            control::clear_calls();
            let of_tokens = Ascend::routed_rows_backward(rows(), places());
            let sums = Ascend::routed_sum_forward(rows(), shares(), places());
            let (drows, dshares) =
                Ascend::routed_sum_backward(rows(), shares(), gradient(), places());
            for (found, expected) in [
                (of_tokens, &[6.0, 8.0, 3.0, 4.0][..]),
                (sums, &[4.5, 7.0, 12.0, 16.0]),
                (drows, &[2.0, 20.0, 400.0, 4000.0, 0.5, 5.0]),
                (dshares, &[65.0, 21.0, 4300.0, 0.0]),
            ] {
                assert_eq!(values(found).expect("computed"), expected);
            }
            let calls = control::calls();
            for name in operators {
                let count = calls.iter().filter(|call| call.function == name).count();
                assert_eq!(count, usize::from(!is_refused), "{name}");
            }
            control::clear_faults();
        }
        let _synchronised = Ascend::sync(&alone.0);
    }
}
