//! Rows of tokens for the experts of each, and the sum of their outputs, as one operation each.

mod backward;
pub mod composed;
#[cfg(feature = "flex")]
mod flex;
mod op;
#[cfg(feature = "remote")]
pub(crate) mod wire;

use burn::backend::ops::FloatTensorOps;
use burn::backend::{Dispatch, DispatchTensor, TensorMetadata};
use burn::tensor::{DType, Device, Int, Shape, Tensor, TensorData};
use burn_fused::primitive::zeros_from;
use burn_fused::{accumulator, expect, expect_device};

use crate::backends;
use crate::error::{Result, equal};

pub use op::RoutesOps;

/// The rows of a mixture's experts on a device: which token each is of, and which rows each token
/// has. Clones share it.
#[derive(Clone, Debug)]
pub struct Routes {
    /// The token of each row.
    tokens: Tensor<1, Int>,
    /// The rows of each token, the same number for each.
    places: Tensor<2, Int>,
}

impl Routes {
    /// Rows of these tokens. places: for each token one after the other, its `per_token` rows; one
    /// beyond the rows, as of padding, has no row.
    ///
    /// # Panics
    /// If `per_token` is 0 or does not divide the places, if a row does not have one place of its
    /// token, or for 2^31 places and more.
    pub fn new(tokens: &[usize], places: &[usize], per_token: usize, device: &Device) -> Self {
        assert!(
            per_token > 0 && places.len().is_multiple_of(per_token),
            "places of {per_token} rows for each token"
        );
        let mut is_placed = vec![false; tokens.len()];
        for (place, row) in places.iter().enumerate() {
            let Some(token) = tokens.get(*row) else {
                continue;
            };
            let is_other = std::mem::replace(&mut is_placed[*row], true);
            assert!(
                !is_other && *token == place / per_token,
                "a row with places of other tokens, or several"
            );
        }
        assert!(
            is_placed.into_iter().all(|placed| placed),
            "a row without a place"
        );
        assert!(i32::try_from(places.len()).is_ok(), "2^31 places or more");
        // Each place without a row gets an index of its own: vendors document that none repeats.
        let mut beyond = tokens.len()..;
        let mut index = |row: &usize| match *row < tokens.len() {
            true => *row as i32,
            false => beyond.next().unwrap_or_default() as i32,
        };
        let shape = [places.len() / per_token, per_token];
        let places = places.iter().map(&mut index).collect();
        let tokens: Vec<i32> = tokens.iter().map(|token| *token as i32).collect();
        let rows = [tokens.len()];
        Self {
            tokens: indices(tokens, rows, device),
            places: indices(places, shape, device),
        }
    }

    /// The tokens and the places, for an operation with this tensor.
    fn on_device_of(&self, first: &DispatchTensor) -> Result<[DispatchTensor; 2]> {
        let tokens = self.tokens.clone().into_dispatch();
        expect_device("the routes", &tokens, first)?;
        Ok([tokens, self.places.clone().into_dispatch()])
    }
}

fn indices<const D: usize>(values: Vec<i32>, shape: [usize; D], device: &Device) -> Tensor<D, Int> {
    Tensor::from_data(TensorData::new(values, shape), (device, DType::I32))
}

/// The rows of tokens for their experts.
///
/// # Shapes
/// x: `[tokens, channels]`; out: `[rows, channels]`
///
/// # Numerics
/// The gradient of a token is summed in f32, or f64, and rounded once.
///
/// # Errors
/// [`Size`](crate::AttentionError::Size), [`Op`](crate::AttentionError::Op).
///
/// # Example
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_attention::{Routes, routed_rows, routed_sum};
///
/// let device = Device::flex();
/// // The first token passes both experts, the second twice the first.
/// let routes = Routes::new(&[0, 1, 1, 0], &[0, 3, 1, 2], 2, &device);
/// let x = Tensor::<2>::from_floats([[1.0], [2.0]], &device);
/// let rows = routed_rows(x, &routes)?;
/// assert_eq!(rows.to_data().iter::<f32>().collect::<Vec<_>>(), [1.0, 2.0, 2.0, 1.0]);
/// let shares = Tensor::<2>::from_floats([[0.5, 0.5], [0.25, 0.5]], &device);
/// let sums = routed_sum(rows, shares, &routes)?;
/// assert_eq!(sums.into_data().iter::<f32>().collect::<Vec<_>>(), [1.0, 1.5]);
/// # Ok::<(), burn_attention::AttentionError>(())
/// ```
pub fn routed_rows(x: Tensor<2>, routes: &Routes) -> Result<Tensor<2>> {
    let (rows, channels) = (routes.tokens.dims()[0], x.dims()[1]);
    let x = x.into_dispatch();
    let [tokens, places] = routes.on_device_of(&x)?;
    check_rows(&x, places.shape()[0])?;
    let out = if rows == 0 || channels == 0 {
        zeros_from::<Dispatch>(Shape::new([rows, channels]), x.dtype().into(), vec![x])
    } else if backends::reaches(&x.device()) {
        Dispatch::routed_rows_forward(x, tokens, places)
    } else {
        Dispatch::float_select(x, 0, tokens)
    };
    Ok(Tensor::from_dispatch(out))
}

/// Checks tokens, of which there must be a number.
fn check_rows<T: TensorMetadata>(x: &T, tokens: usize) -> Result<()> {
    accumulator(x.dtype())?;
    equal(["x", "the routes"], "tokens", x.shape()[0], tokens)
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
/// The autodiff graph keeps rows and shares.
///
/// # Errors
/// [`Size`](crate::AttentionError::Size), [`Op`](crate::AttentionError::Op).
pub fn routed_sum(rows: Tensor<2>, shares: Tensor<2>, routes: &Routes) -> Result<Tensor<2>> {
    let channels = rows.dims()[1];
    let (rows, shares) = (rows.into_dispatch(), shares.into_dispatch());
    let [tokens, places] = routes.on_device_of(&rows)?;
    equal(
        ["rows", "the routes"],
        "rows",
        rows.shape()[0],
        tokens.shape()[0],
    )?;
    check_sum(&rows, &shares, &places)?;
    let out = if rows.shape().contains(&0) {
        let shape = Shape::new([shares.shape()[0], channels]);
        zeros_from::<Dispatch>(shape, rows.dtype().into(), vec![rows, shares])
    } else if backends::reaches(&rows.device()) {
        Dispatch::routed_sum_forward(rows, shares, places)
    } else {
        composed::sum_forward::<Dispatch>(rows, shares, places)
    };
    Ok(Tensor::from_dispatch(out))
}

/// Checks the shares of rows, for tokens with these places.
fn check_sum<T: TensorMetadata>(rows: &T, shares: &T, places: &impl TensorMetadata) -> Result<()> {
    expect("shares", shares, accumulator(rows.dtype())?.into(), rows)?;
    let ([tokens, per_token], [expected, of_each]) = (shares.shape().dims(), places.shape().dims());
    equal(["shares", "the routes"], "tokens", tokens, expected)?;
    equal(
        ["shares", "the routes"],
        "rows of a token",
        per_token,
        of_each,
    )
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;

    /// As the vendor of NPUs documents it: no index repeats, and all are below the places' number.
    #[test]
    fn each_place_has_an_index_of_its_own() {
        let beyond = [7, 1, usize::MAX, 0, 7, 2];
        let routes = Routes::new(&[1, 0, 2], &beyond, 2, &Device::flex());
        let mut indices: Vec<i32> = routes.places.into_data().iter().collect();
        assert_eq!([indices[1], indices[3], indices[5]], [1, 0, 2]);
        indices.sort_unstable();
        assert_eq!(indices, [0, 1, 2, 3, 4, 5]);
    }
}
