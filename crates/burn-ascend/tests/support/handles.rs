//! Handles that share buffers: a write through one is never seen through another.

use burn::backend::flex::{Flex, FlexDevice};
use burn::backend::ops::FloatTensorOps;
use burn::backend::tensor::{Device, FloatTensor, IndexingUpdateOp};
use burn::backend::{Backend, BoolDType, DType, Scalar, TensorMetadata, read_sync};
use burn::tensor::{Shape, Slice};

use super::compare::{Tolerance, compare};
use super::input::{Random, Range, tensor_data};
use super::suite::{Failures, caught};

/// One step on a pool of tensors, the same on every backend.
#[derive(Clone, Debug)]
enum Step {
    New { seed: u64 },
    Clone { of: usize },
    Drop { at: usize },
    SwapDims { at: usize },
    Slice { at: usize, step: isize },
    Reshape { at: usize },
    Expand { at: usize },
    Flip { at: usize },
    AddScalar { at: usize },
    Clamp { at: usize },
    Add { left: usize, right: usize },
    Centre { at: usize },
    SliceAssign { at: usize, from: usize },
    MaskFill { at: usize },
    SelectAssign { at: usize },
    Cat { left: usize, right: usize },
}

fn program(seed: u64, length: usize) -> Vec<Step> {
    let mut random = Random(seed);
    // Small pools keep buffers shared and operands alike.
    let mut pool = 0usize;
    let mut steps = Vec::new();
    while steps.len() < length {
        let mut below = |bound: usize| random.below(bound);
        let kind = if pool < 2 { 0 } else { below(20) };
        let (at, other) = (below(pool.max(1)), below(pool.max(1)));
        let step = match kind {
            0 => Step::New {
                seed: steps.len() as u64,
            },
            1..=3 if pool < 8 => Step::Clone { of: at },
            1..=3 => Step::Drop { at },
            4 => Step::SwapDims { at },
            5 => Step::Slice { at, step: 1 },
            6 => Step::Slice { at, step: 2 },
            7 => Step::Reshape { at },
            8 => Step::Expand { at },
            9 => Step::Flip { at },
            10 | 11 => Step::AddScalar { at },
            12 => Step::Clamp { at },
            13 | 14 => Step::Add {
                left: at,
                right: other,
            },
            15 => Step::Centre { at },
            16 | 17 => Step::SliceAssign { at, from: other },
            18 => Step::MaskFill { at },
            _ if other % 2 == 0 => Step::SelectAssign { at },
            _ => Step::Cat {
                left: at,
                right: other,
            },
        };
        match step {
            Step::New { .. } | Step::Clone { .. } => pool += 1,
            Step::Drop { .. } => pool -= 1,
            _ => {}
        }
        steps.push(step);
    }
    steps
}

/// Every tensor of the pool has rank 2; a step replaces the tensor that it names, and consumes its
/// handle.
fn apply<B: Backend>(pool: &mut Vec<FloatTensor<B>>, step: &Step, device: &Device<B>) {
    let all = Slice::new(0, None, 1);
    // A fresh tensor of the shape of another.
    let like = |x: &FloatTensor<B>, factor: f64| {
        let shape = x.shape();
        let values: Vec<f64> = (0..shape.num_elements())
            .map(|k| factor * (k % 13) as f64)
            .collect();
        B::float_from_data(tensor_data(DType::F32, &values, &shape.to_vec()), device)
    };
    let replace = |pool: &mut Vec<FloatTensor<B>>,
                   at: usize,
                   f: &dyn Fn(FloatTensor<B>) -> FloatTensor<B>| {
        let x = pool.remove(at);
        pool.insert(at, f(x));
    };
    match *step {
        Step::New { seed } => {
            let values = Random(seed).draw(&Range::Quarters, 12);
            pool.push(B::float_from_data(
                tensor_data(DType::F32, &values, &[3, 4]),
                device,
            ));
        }
        Step::Clone { of } => pool.push(pool[of].clone()),
        Step::Drop { at } => drop(pool.remove(at)),
        Step::SwapDims { at } => replace(pool, at, &|x| B::float_swap_dims(x, 0, 1)),
        Step::Slice { at, step } => replace(pool, at, &|x| {
            // Keep at least one element of each dimension.
            let start = isize::from(x.shape()[1] > 1);
            B::float_slice(x, &[all, Slice::new(start, None, step)])
        }),
        Step::Reshape { at } => replace(pool, at, &|x| {
            let [rows, columns] = x.shape().dims();
            B::float_reshape(x, Shape::new([columns, rows]))
        }),
        Step::Expand { at } => replace(pool, at, &|x| {
            let [rows, _] = x.shape().dims();
            B::float_expand(
                B::float_slice(x, &[all, Slice::new(0, Some(1), 1)]),
                Shape::new([rows, 5]),
            )
        }),
        Step::Flip { at } => replace(pool, at, &|x| B::float_flip(x, &[1])),
        Step::AddScalar { at } => {
            replace(pool, at, &|x| B::float_add_scalar(x, Scalar::Float(0.5)))
        }
        Step::Clamp { at } => replace(pool, at, &|x| {
            B::float_clamp(B::float_neg(x), (-9.0).into(), 9.0.into())
        }),
        Step::Add { left, right } => {
            let shape = pool[left].shape();
            let other = match pool[right].shape() == shape {
                true => pool[right].clone(),
                false => like(&pool[left], 0.25),
            };
            replace(pool, left, &|x| B::float_add(x, other.clone()));
        }
        Step::Centre { at } => replace(pool, at, &|x| {
            let sum = B::float_sum_dim(x.clone(), 1);
            B::float_sub(x, sum)
        }),
        Step::SliceAssign { at, from } => {
            let rows = pool[at].shape()[0].min(pool[from].shape()[0]);
            let columns = pool[at].shape()[1].min(pool[from].shape()[1]);
            let cut = [
                Slice::new(0, Some(rows as isize), 1),
                Slice::new(0, Some(columns as isize), 1),
            ];
            let value = B::float_slice(pool[from].clone(), &cut);
            replace(pool, at, &|x| B::float_slice_assign(x, &cut, value.clone()));
        }
        Step::MaskFill { at } => replace(pool, at, &|x| {
            let mask = B::float_greater_elem(x.clone(), 1.0.into(), BoolDType::Native);
            B::float_mask_fill(x, B::bool_not(mask), 0.25.into())
        }),
        Step::SelectAssign { at } => replace(pool, at, &|x| {
            let mut row = x.shape().to_vec();
            row[0] = 2;
            let ones = B::float_ones(Shape::from(row), device, DType::F32.into());
            let zeros = B::int_zeros(Shape::new([2]), device, DType::I32.into());
            B::float_select_assign(x, 0, zeros, ones, IndexingUpdateOp::Add)
        }),
        Step::Cat { left, right } => {
            let rows = pool[left].shape()[0];
            let other = match pool[right].shape()[0] == rows {
                true => pool[right].clone(),
                false => like(&pool[left], 0.5),
            };
            // Keep the tensors small.
            replace(pool, left, &|x| {
                let joined = B::float_cat(vec![x, other.clone()], 1);
                let columns = joined.shape()[1].min(6) as isize;
                B::float_slice(joined, &[all, Slice::new(-columns, None, 1)])
            });
        }
    }
}

/// Random programs over shared handles: after every few steps the whole pool equals Flex's.
pub(crate) fn programs<B: Backend>(device: &Device<B>) {
    const PROGRAMS: u64 = 12;
    const STEPS: usize = 120;
    let mut failures = Failures::default();
    for seed in 0..PROGRAMS {
        let steps = program(seed, STEPS);
        let result = caught(|| {
            let (mut flex, mut tested) = (Vec::new(), Vec::new());
            for (chunk, steps) in steps.chunks(8).enumerate() {
                steps
                    .iter()
                    .for_each(|step| apply::<Flex>(&mut flex, step, &FlexDevice));
                let work = || {
                    steps
                        .iter()
                        .for_each(|step| apply::<B>(&mut tested, step, device))
                };
                // Every other part runs on a thread of its own: handles go where a server's threads
                // are.
                let done = match chunk % 2 {
                    0 => caught(work),
                    _ => std::thread::scope(|scope| {
                        scope.spawn(|| caught(work)).join().expect("caught")
                    }),
                };
                done.map_err(|message| format!("program {seed}: {message} in {steps:?}"))?;
                for (at, (e, f)) in flex.iter().zip(&tested).enumerate() {
                    let expected = read_sync(Flex::float_into_data(e.clone())).expect("Flex reads");
                    let found = read_sync(B::float_into_data(f.clone()))
                        .map_err(|error| format!("read failed: {error:?}"))?;
                    compare(&expected, &found, Tolerance::Scaled(4)).map_err(|difference| {
                        format!("program {seed}, tensor {at}: {difference}; last steps {steps:?}")
                    })?;
                }
            }
            Ok(())
        });
        failures.check("handles", result.and_then(|result| result));
    }
    failures.report(&B::name(device));
}
