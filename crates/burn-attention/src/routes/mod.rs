//! Rows of tokens for the experts of each, and the sum of their outputs, as one operation each.

mod backward;
#[cfg(feature = "flex")]
mod flex;
mod op;

use std::sync::Arc;

use burn::backend::Dispatch;
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use burn_fused::{accumulator, expect};

use crate::error::{Result, equal};

pub use op::RoutesOps;

burn_fused::reaches!(Flex: cfg(feature = "flex"));

/// The rows of a mixture's experts: which token each is of, and which rows each token has. Clones
/// share it.
#[derive(Clone, Debug)]
pub struct Routes {
    /// The token of each row.
    tokens: Arc<[usize]>,
    /// The rows of each token one after the other, the same number for each.
    places: Arc<[usize]>,
    per_token: usize,
}

impl Routes {
    /// Rows of these tokens. places: for each token one after the other, its `per_token` rows.
    /// Places of a token that no row is of, which is padding, are in its sum, but have no gradient.
    ///
    /// # Panics
    /// If `per_token` is 0 or does not divide the places, if a row's token is not among its tokens'
    /// places, or a place beyond the rows.
    pub fn new(tokens: Vec<usize>, places: Vec<usize>, per_token: usize) -> Self {
        assert!(
            per_token > 0 && places.len().is_multiple_of(per_token),
            "places of {per_token} rows for each token"
        );
        let is_placed = |(row, token): (usize, &usize)| {
            let places = places.get(token * per_token..(token + 1) * per_token);
            places.is_some_and(|places| places.contains(&row))
        };
        assert!(
            tokens.iter().enumerate().all(is_placed),
            "a row without a place"
        );
        assert!(
            places.iter().all(|row| *row < tokens.len()),
            "a place beyond the rows"
        );
        Self {
            tokens: tokens.into(),
            places: places.into(),
            per_token,
        }
    }

    /// The token of each row.
    pub fn tokens(&self) -> &[usize] {
        &self.tokens
    }

    /// The number of tokens.
    fn count(&self) -> usize {
        self.places.len() / self.per_token
    }
}

fn indices(values: &[usize], device: &Device) -> Tensor<1, Int> {
    let values: Vec<i64> = values.iter().map(|value| *value as i64).collect();
    let len = values.len();
    Tensor::from_data(TensorData::new(values, [len]), device)
}

/// The rows of tokens for their experts.
///
/// # Shapes
/// x: `[tokens, channels]`; out: `[rows, channels]`
///
/// # Numerics
/// On the CPU, the gradient of a token is summed in f32, or f64, and rounded once.
///
/// # Errors
/// [`Size`](crate::AttentionError::Size), [`Op`](crate::AttentionError::Op).
///
/// # Example
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_attention::{Routes, routed_rows, routed_sum};
///
/// // The first token passes both experts, the second twice the first.
/// let routes = Routes::new(vec![0, 1, 1, 0], vec![0, 3, 1, 2], 2);
/// let device = Device::flex();
/// let x = Tensor::<2>::from_floats([[1.0], [2.0]], &device);
/// let rows = routed_rows(x, &routes)?;
/// assert_eq!(rows.to_data().iter::<f32>().collect::<Vec<_>>(), [1.0, 2.0, 2.0, 1.0]);
/// let shares = Tensor::<2>::from_floats([[0.5, 0.5], [0.25, 0.5]], &device);
/// let sums = routed_sum(rows, shares, &routes)?;
/// assert_eq!(sums.into_data().iter::<f32>().collect::<Vec<_>>(), [1.0, 1.5]);
/// # Ok::<(), burn_attention::AttentionError>(())
/// ```
pub fn routed_rows(x: Tensor<2>, routes: &Routes) -> Result<Tensor<2>> {
    accumulator(x.dtype())?;
    let [tokens, channels] = x.dims();
    equal(["x", "the routes"], "tokens", tokens, routes.count())?;
    if routes.tokens.is_empty() || channels == 0 || !reaches(x.device().as_dispatch()) {
        let tokens = indices(&routes.tokens, &x.device());
        return Ok(x.select(0, tokens));
    }
    let out = Dispatch::routed_rows_forward(x.into_dispatch(), routes.clone());
    Ok(Tensor::from_dispatch(out))
}

/// The sums of the rows of each token, each times its share.
///
/// # Shapes
/// - rows: `[rows, channels]`
/// - shares: `[tokens, per_token]`, in f32, or f64 for f64 rows
/// - out: `[tokens, channels]`, in the type of rows
///
/// # Numerics
/// Products and sum are in the type of the shares, and the sum is rounded once.
///
/// # Memory
/// On the CPU, the autodiff graph keeps rows and shares.
///
/// # Errors
/// [`Size`](crate::AttentionError::Size), [`Op`](crate::AttentionError::Op).
pub fn routed_sum(rows: Tensor<2>, shares: Tensor<2>, routes: &Routes) -> Result<Tensor<2>> {
    let wide = DType::from(accumulator(rows.dtype())?);
    let [count, channels] = rows.dims();
    let [tokens, per_token] = shares.dims();
    let first = rows.clone().into_dispatch();
    expect("shares", &shares.clone().into_dispatch(), wide, &first)?;
    equal(["rows", "the routes"], "rows", count, routes.tokens.len())?;
    equal(["shares", "the routes"], "tokens", tokens, routes.count())?;
    let expected = routes.per_token;
    equal(
        ["shares", "the routes"],
        "rows of a token",
        per_token,
        expected,
    )?;
    if rows.dims().contains(&0) {
        return Ok(rows.reshape([tokens, channels]));
    }
    if !reaches(rows.device().as_dispatch()) {
        let narrow = rows.dtype();
        let rows = rows
            .clone()
            .select(0, indices(&routes.places, &rows.device()));
        let rows = rows.reshape([tokens, per_token, channels]);
        let shares = shares.reshape([tokens, per_token, 1]);
        let sums = (rows.cast(wide) * shares).sum_dim(1).cast(narrow);
        return Ok(sums.reshape([tokens, channels]));
    }
    let (rows, shares) = (rows.into_dispatch(), shares.into_dispatch());
    let out = Dispatch::routed_sum_forward(rows, shares, routes.clone());
    Ok(Tensor::from_dispatch(out))
}
