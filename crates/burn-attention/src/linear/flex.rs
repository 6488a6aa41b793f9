//! Flex, burn's CPU backend: kernels on the tensors' storage, on all threads of rayon's pool.

use burn::backend::TensorMetadata;
use burn::backend::flex::{Flex, FlexTensor};
use burn::backend::tensor::FloatTensor;
use burn::tensor::{DType, Shape};
use burn_fused::{elements, zeros};
use half::bf16;
use rayon::prelude::*;

use super::avx512::{Product, Weight};
use super::op::LinearOps;
use crate::attention::flex::matrix::{Matrix, Write, product};
use crate::rows::fewest;

/// Elements that are widened at once for a product with few columns.
const WIDENED: usize = 1 << 16;

impl LinearOps for Flex {
    fn linear_forward(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        a: FloatTensor<Self>,
        b: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        let (x, bias) = (x.to_contiguous(), bias.to_contiguous());
        let u = thin(&x, &a);
        wide(&x, weight, elements::<bf16>(&bias), &u, &b)
    }

    fn linear_x_gradient(
        gradient: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        a: FloatTensor<Self>,
        b: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        let gradient = gradient.to_contiguous();
        let v = thin(&gradient, &b.transpose(0, 1));
        wide(
            &gradient,
            weight.transpose(0, 1),
            &[],
            &v,
            &a.transpose(0, 1),
        )
    }

    fn linear_adapter_gradients(
        x: FloatTensor<Self>,
        a: FloatTensor<Self>,
        b: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let (x, gradient) = (x.to_contiguous(), gradient.to_contiguous());
        let (u, v) = (thin(&x, &a), thin(&gradient, &b.transpose(0, 1)));
        let rank = a.shape()[1];
        (
            outer(&x, &v, rank),
            outer(&gradient, &u, rank).transpose(0, 1),
        )
    }
}

fn contiguous(x: &FlexTensor) -> Vec<f32> {
    elements(&x.to_contiguous()).to_vec()
}

fn widen(x: &[bf16]) -> impl Iterator<Item = f32> {
    x.iter()
        .map(|x| f32::from_bits(u32::from(x.to_bits()) << 16))
}

/// x weight + bias + u b, rounded once.
fn wide(
    x: &FlexTensor,
    weight: FlexTensor,
    bias: &[bf16],
    u: &[f32],
    b: &FlexTensor,
) -> FlexTensor {
    let [rows, inputs] = x.shape().dims();
    let [rank, outputs] = b.shape().dims();
    let strides = |weight: &FlexTensor| -> [isize; 2] {
        let strides = weight.layout().strides();
        [strides[0], strides[1]]
    };
    let is_readable = |[row, column]: [isize; 2]| row.min(column) == 1;
    let weight = if is_readable(strides(&weight)) {
        weight
    } else {
        weight.to_contiguous()
    };
    let mut out = zeros(Shape::new([rows, outputs]), DType::BF16);
    let problem = Product {
        rows,
        inputs,
        outputs,
        rank,
        x: elements::<bf16>(x),
        weight: Weight {
            data: &weight.storage::<bf16>()[weight.layout().start_offset()..],
            strides: strides(&weight).map(isize::unsigned_abs),
        },
        bias,
        u,
        b: &contiguous(b),
    };
    problem.write(out.storage_mut::<bf16>());
    out
}

/// x t, in f32, of a matrix with few columns: `[rows, columns]`.
fn thin(x: &FlexTensor, t: &FlexTensor) -> Vec<f32> {
    let [rows, inputs] = x.shape().dims();
    let [_, columns] = t.shape().dims();
    let (x, t) = (elements::<bf16>(x), contiguous(t));
    let mut out = vec![0.0; rows * columns];
    if columns == 0 {
        return out;
    }
    let fewest = fewest([inputs, columns]);
    let step = (WIDENED / inputs.max(1)).max(fewest);
    let blocks = out.par_chunks_mut(step * columns).enumerate();
    blocks.for_each(|(index, out)| {
        let rows = out.len() / columns;
        let mut x: Vec<f32> = widen(&x[index * step * inputs..][..rows * inputs]).collect();
        let t = Matrix::new(&t, inputs, columns, columns);
        if rows >= fewest {
            let x = Matrix::new(&x, rows, inputs, inputs);
            return product(out, columns, Write::Replace, 1.0, x, t);
        }
        x.resize(fewest * inputs, 0.0);
        let x = Matrix::new(&x, fewest, inputs, inputs);
        let mut all = vec![0.0; fewest * columns];
        product(&mut all, columns, Write::Replace, 1.0, x, t);
        out.copy_from_slice(&all[..rows * columns]);
    });
    out
}

/// x^T v, in f32, of a matrix with few columns: `[inputs, columns]`.
fn outer(x: &FlexTensor, v: &[f32], columns: usize) -> FlexTensor {
    let [rows, inputs] = x.shape().dims();
    let x = elements::<bf16>(x);
    let mut out = zeros(Shape::new([inputs, columns]), DType::F32);
    if columns == 0 || rows == 0 {
        return out;
    }
    let step = (WIDENED / rows).max(16);
    let blocks = out.storage_mut::<f32>().par_chunks_mut(step * columns);
    blocks.enumerate().for_each(|(index, out)| {
        let (first, count) = (index * step, out.len() / columns);
        let part = |row: usize| widen(&x[row * inputs + first..][..count]);
        let x: Vec<f32> = (0..rows).flat_map(part).collect();
        let x = Matrix::new(&x, rows, count, count).transposed();
        let v = Matrix::new(v, rows, columns, columns);
        product(out, columns, Write::Replace, 1.0, x, v);
    });
    out
}
