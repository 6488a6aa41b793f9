//! Rows of tokens and the sums of their outputs, with gradients, equal a plain computation in f64.

use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_attention::{AttentionError, Routes, routed_rows, routed_sum};

use crate::numbers;

const PER_TOKEN: usize = 2;
/// The last token is padding: its places are beyond the rows.
const TOKENS: usize = 4;
const ROWS: [usize; 6] = [2, 0, 1, 0, 1, 2];
const PLACES: [usize; TOKENS * PER_TOKEN] = [1, 3, 4, 2, 0, 5, 6, usize::MAX];

fn routes(device: &Device) -> Routes {
    Routes::new(&ROWS, &PLACES, PER_TOKEN, device)
}

fn values<const D: usize>(x: Tensor<D>) -> Vec<f64> {
    x.into_data().iter::<f64>().collect()
}

fn expect_near(found: Vec<f64>, expected: &[f64], within: f64, what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (found, expected) in found.iter().zip(expected) {
        let apart = (found - expected).abs();
        assert!(
            apart <= within * expected.abs().max(1.0),
            "{what}: {apart:e}"
        );
    }
}

#[test]
fn all_equals_a_plain_computation() {
    let device = Device::flex().autodiff();
    for channels in [1, 5, 16, 37] {
        for (dtype, wide, within) in [
            (DType::F64, DType::F64, 1e-13),
            (DType::F32, DType::F32, 1e-5),
            (DType::BF16, DType::F32, 0.01),
            (DType::F16, DType::F32, 0.01),
        ] {
            let matrix = |seed: u64, [rows, columns]: [usize; 2], dtype: DType| {
                let numbers = numbers(seed, rows * columns, dtype);
                let data = TensorData::new(numbers.clone(), [rows, columns]);
                (Tensor::<2>::from_data(data, (&device, dtype)), numbers)
            };
            let what = format!("{channels} channels, {dtype:?}");

            let (x, of_x) = matrix(1, [TOKENS, channels], dtype);
            let (gradient, of_gradient) = matrix(2, [ROWS.len(), channels], dtype);
            let x = x.require_grad();
            let rows = routed_rows(x.clone(), &routes(&device)).expect("it fits");
            let mut expected = Vec::new();
            let mut dx = vec![0.0; TOKENS * channels];
            for (row, token) in ROWS.into_iter().enumerate() {
                expected.extend(&of_x[token * channels..][..channels]);
                for channel in 0..channels {
                    dx[token * channels + channel] += of_gradient[row * channels + channel];
                }
            }
            expect_near(values(rows.clone()), &expected, 0.0, &what);
            let gradients = (rows * gradient).sum().backward();
            let found = x.grad(&gradients).expect("a gradient");
            expect_near(values(found), &dx, within, &what);

            let (rows, of_rows) = matrix(3, [ROWS.len(), channels], dtype);
            let (shares, of_shares) = matrix(4, [TOKENS, PER_TOKEN], wide);
            let (gradient, of_gradient) = matrix(5, [TOKENS, channels], dtype);
            let (rows, shares) = (rows.require_grad(), shares.require_grad());
            let sums = routed_sum(rows.clone(), shares.clone(), &routes(&device)).expect("it fits");
            let mut expected = vec![0.0; TOKENS * channels];
            let mut drows = vec![0.0; ROWS.len() * channels];
            let mut dshares = vec![0.0; TOKENS * PER_TOKEN];
            for (place, row) in PLACES.into_iter().enumerate() {
                let token = place / PER_TOKEN;
                if row >= ROWS.len() {
                    continue;
                }
                for channel in 0..channels {
                    let (at, of) = (token * channels + channel, row * channels + channel);
                    expected[at] += of_rows[of] * of_shares[place];
                    drows[of] += of_gradient[at] * of_shares[place];
                    dshares[place] += of_gradient[at] * of_rows[of];
                }
            }
            expect_near(values(sums.clone()), &expected, within, &what);
            let gradients = (sums * gradient).sum().backward();
            let found = rows.grad(&gradients).expect("a gradient");
            expect_near(values(found), &drows, within, &what);
            let found = shares.grad(&gradients).expect("a gradient");
            expect_near(values(found), &dshares, 10.0 * within, &what);
        }
    }
}

#[test]
fn tensors_that_do_not_fit_are_refused() {
    let device = Device::flex();
    let matrix = |rows: usize, columns: usize| Tensor::<2>::ones([rows, columns], &device);
    let is_refused = |found: Result<Tensor<2>, AttentionError>| {
        assert!(matches!(found, Err(AttentionError::Size { .. })));
    };
    is_refused(routed_rows(matrix(TOKENS - 1, 3), &routes(&device)));
    is_refused(routed_sum(
        matrix(5, 3),
        matrix(TOKENS, 2),
        &routes(&device),
    ));
    is_refused(routed_sum(
        matrix(6, 3),
        matrix(TOKENS + 1, 2),
        &routes(&device),
    ));
    is_refused(routed_sum(
        matrix(6, 3),
        matrix(TOKENS, 3),
        &routes(&device),
    ));
    let wide = matrix(TOKENS, 2).cast(DType::F64);
    assert!(routed_sum(matrix(6, 3), wide, &routes(&device)).is_err());
}

#[test]
fn no_rows_and_only_padding_are_zeros() {
    let device = Device::flex().autodiff();
    let routes = Routes::new(&[], &[0, 0, 0, 0], 2, &device);
    let x = Tensor::<2>::ones([2, 3], &device).require_grad();
    let rows = routed_rows(x.clone(), &routes).expect("it fits");
    assert_eq!(rows.dims(), [0, 3]);
    let shares = Tensor::<2>::ones([2, 2], &device).require_grad();
    let sums = routed_sum(rows, shares.clone(), &routes).expect("it fits");
    let gradients = sums.clone().sum().backward();
    assert_eq!(values(sums), [0.0; 6]);
    assert_eq!(values(x.grad(&gradients).expect("a gradient")), [0.0; 6]);
    assert_eq!(values(shares.grad(&gradients).expect("one")), [0.0; 4]);
}

#[test]
fn rows_without_one_place_of_their_token_are_refused() {
    for (tokens, places) in [([0, 1], [0, 2]), ([0, 1], [1, 0]), ([0, 0], [0, 0])] {
        let made = || Routes::new(&tokens, &places, 1, &Device::flex());
        assert!(
            std::panic::catch_unwind(made).is_err(),
            "{tokens:?}, {places:?}"
        );
    }
}
