//! The backward, for autodiff over any backend.

use burn::backend::AutodiffBackend;
use burn::backend::autodiff::{Autodiff, checkpoint::strategy::CheckpointStrategy};
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn_fused::{node, parts};

use super::op::RoutesOps;

impl<B: RoutesOps, C: CheckpointStrategy> RoutesOps for Autodiff<B, C> {
    fn routed_rows_forward(
        x: FloatTensor<Self>,
        tokens: IntTensor<Self>,
        places: IntTensor<Self>,
    ) -> FloatTensor<Self> {
        let ([x], nodes) = parts([x]);
        node::<B, C, _, 1>(
            nodes,
            places,
            |places| B::routed_rows_forward(x, tokens, places),
            |places, gradient, _| [Some(B::routed_rows_backward(gradient, places))],
        )
    }

    fn routed_rows_backward(
        gradient: FloatTensor<Self>,
        places: IntTensor<Self>,
    ) -> FloatTensor<Self> {
        Self::from_inner(B::routed_rows_backward(Self::inner(gradient), places))
    }

    fn routed_sum_forward(
        rows: FloatTensor<Self>,
        shares: FloatTensor<Self>,
        places: IntTensor<Self>,
    ) -> FloatTensor<Self> {
        let ([rows, shares], nodes) = parts([rows, shares]);
        node::<B, C, _, 2>(
            nodes,
            (rows, shares, places),
            |(rows, shares, places)| B::routed_sum_forward(rows, shares, places),
            |(rows, shares, places), gradient, _| {
                let (drows, dshares) = B::routed_sum_backward(rows, shares, gradient, places);
                [Some(drows), Some(dshares)]
            },
        )
    }

    fn routed_sum_backward(
        rows: FloatTensor<Self>,
        shares: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
        places: IntTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let [rows, shares, gradient] = [rows, shares, gradient].map(Self::inner);
        let (drows, dshares) = B::routed_sum_backward(rows, shares, gradient, places);
        (Self::from_inner(drows), Self::from_inner(dshares))
    }
}
