//! The backward, for autodiff over any backend.

use burn::backend::AutodiffBackend;
use burn::backend::autodiff::{Autodiff, checkpoint::strategy::CheckpointStrategy};
use burn::backend::tensor::FloatTensor;
use burn_fused::{node, parts};

use super::Routes;
use super::op::RoutesOps;

impl<B: RoutesOps, C: CheckpointStrategy> RoutesOps for Autodiff<B, C> {
    fn routed_rows_forward(x: FloatTensor<Self>, routes: Routes) -> FloatTensor<Self> {
        let ([x], nodes) = parts([x]);
        node::<B, C, _, 1>(
            nodes,
            routes,
            |routes| B::routed_rows_forward(x, routes),
            |routes, gradient, _| [Some(B::routed_rows_backward(gradient, routes))],
        )
    }

    fn routed_rows_backward(gradient: FloatTensor<Self>, routes: Routes) -> FloatTensor<Self> {
        Self::from_inner(B::routed_rows_backward(Self::inner(gradient), routes))
    }

    fn routed_sum_forward(
        rows: FloatTensor<Self>,
        shares: FloatTensor<Self>,
        routes: Routes,
    ) -> FloatTensor<Self> {
        let ([rows, shares], nodes) = parts([rows, shares]);
        node::<B, C, _, 2>(
            nodes,
            (rows, shares, routes),
            |(rows, shares, routes)| B::routed_sum_forward(rows, shares, routes),
            |(rows, shares, routes), gradient, _| {
                let (drows, dshares) = B::routed_sum_backward(rows, shares, gradient, routes);
                [Some(drows), Some(dshares)]
            },
        )
    }

    fn routed_sum_backward(
        rows: FloatTensor<Self>,
        shares: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
        routes: Routes,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let [rows, shares, gradient] = [rows, shares, gradient].map(Self::inner);
        let (drows, dshares) = B::routed_sum_backward(rows, shares, gradient, routes);
        (Self::from_inner(drows), Self::from_inner(dshares))
    }
}
