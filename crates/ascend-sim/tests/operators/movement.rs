//! Elements that move, by rule or by index.

use std::ptr::{null, null_mut};

use ascend_sim::abi::aclnn::*;
use ascend_sim::abi::operators::*;
use ascend_sim::control;

use crate::harness::*;
use crate::support::{Device, recent_message};

#[test]
fn elements_move() {
    let device = Device::new();
    let data: Vec<f64> = (0..6).map(f64::from).collect();
    for dtype in [F32, Bf16, I64, I32, U8] {
        let x = device.tensor(dtype, &[2, 3], &data);
        let (same, more) = (device.out(dtype, &[2, 3]), device.out(dtype, &[2, 2, 3]));
        check! { device;
            aclnnFlip(x.raw, ints(&[1]), same.raw) => same is [2.0, 1.0, 0.0, 5.0, 4.0, 3.0];
            aclnnRepeat(x.raw, ints(&[2, 1, 1]), more.raw) => more is data.repeat(2);
        }
        // A list owns its members: they are destroyed with it.
        let parts = [
            device.tensor(dtype, &[2, 3], &data).raw,
            device.tensor(dtype, &[2, 0], &[]).raw,
            device.tensor(dtype, &[2, 1], &[8.0, 9.0]).raw,
        ];
        // SAFETY: a list of the given length.
        let list = unsafe { aclCreateTensorList(parts.as_ptr().cast(), 3) };
        let out = device.out(dtype, &[2, 4]);
        check! { device;
            aclnnCat(list, -1, out.raw) => out is [0.0, 1.0, 2.0, 8.0, 3.0, 4.0, 5.0, 9.0];
        }
        let before = control::live().descriptors;
        // SAFETY: a live list, destroyed once; then a member of it.
        unsafe {
            assert_eq!(aclDestroyTensorList(list), 0);
            assert_eq!(control::live().descriptors, before - 4);
            assert_eq!(aclDestroyTensor(parts[0]), 107017);
        }
    }
    let (x, out) = (
        device.tensor(F32, &[1, 1], &[1.0]),
        device.out(F32, &[2; 5]),
    );
    check! { device;
        aclnnRepeat(x.raw, ints(&[2; 5]), out.raw)
            refuses INNER, "at most 4 of them above 1";
        aclnnFlip(device.out(U16, &[1]).raw, ints(&[0]), device.out(U16, &[1]).raw)
            refuses PARAM_INVALID, "self is Uint16";
    }
    // Only tensors of shape [0] may differ from the others.
    let list = |dims: &[i64]| {
        let parts = [
            device.out(F32, dims).raw,
            device.tensor(F32, &[1, 2], &[5.0, 6.0]).raw,
        ];
        // SAFETY: a list of the given length.
        unsafe { aclCreateTensorList(parts.as_ptr().cast(), 2) }
    };
    let (row, whole) = (device.out(F32, &[1, 2]), device.out(I32, &[1, 2]));
    check! { device;
        aclnnCat(list(&[0]), 0, row.raw) => row is [5.0, 6.0];
        aclnnCat(list(&[0]), 0, device.out(F32, &[2, 2]).raw) refuses INNER, "out has shape";
        aclnnCat(list(&[1, 2]), 0, row.raw) refuses PARAM_INVALID, "out has shape";
        aclnnCat(list(&[0, 3]), 0, row.raw) refuses PARAM_INVALID, "differs from";
        aclnnCat(list(&[0]), 0, whole.raw) refuses PARAM_INVALID, "does not convert";
        aclnnCat(list(&[0]), 0, device.out(U16, &[1, 2]).raw)
            refuses PARAM_INVALID, "out is Uint16";
    }
    assert_eq!(control::violations(), []);
}

#[test]
fn indices_pick_and_add() {
    let device = Device::new();
    let data: Vec<f64> = (0..6).map(f64::from).collect();
    let x = device.tensor(F32, &[2, 3], &data);
    let index = device.tensor(I64, &[2, 2], &[2.0, -1.0, 0.0, 1.0]);
    let out = device.out(F32, &[2, 2]);
    check! { device;
        aclnnGather(x.raw, 1, index.raw, out.raw) => out is [2.0, 2.0, 3.0, 4.0];
    }
    let index = device.tensor(I32, &[2, 2], &[0.0, 0.0, 2.0, 1.0]);
    let src = device.tensor(F32, &[2, 2], &[10.0, 20.0, 30.0, 40.0]);
    for (reduce, expected) in [
        (0, [20.0, 1.0, 2.0, 3.0, 40.0, 30.0]),
        (1, [30.0, 1.0, 2.0, 3.0, 44.0, 35.0]),
        (2, [0.0, 1.0, 2.0, 3.0, 160.0, 150.0]),
    ] {
        let target = device.tensor(F32, &[2, 3], &data);
        check! { device;
            aclnnInplaceScatter(target.raw, 1, index.raw, src.raw, reduce) => target is expected;
        }
    }
    let out = device.out(F32, &[2, 3]);
    check! { device;
        aclnnScatterAdd(x.raw, 1, index.raw, src.raw, out.raw)
            => out is [30.0, 1.0, 2.0, 3.0, 44.0, 35.0];
    }
    let index = device.tensor(I64, &[3], &[2.0, 0.0, 2.0]);
    let source = device.tensor(F32, &[2, 3], &[1.0, 1.0, 1.0, 2.0, 2.0, 2.0]);
    check! { device;
        aclnnIndexSelect(x.raw, -1, index.raw, out.raw) => out is [2.0, 0.0, 2.0, 5.0, 3.0, 5.0];
        aclnnIndexAdd(x.raw, 1, index.raw, source.raw, scalar(F32, 10.0), out.raw)
            => out is [10.0, 1.0, 22.0, 23.0, 4.0, 45.0];
    }
    let (index, rows) = (
        device.tensor(I32, &[3], &[1.0, 0.0, 1.0]),
        device.out(F32, &[3, 3]),
    );
    check! { device;
        aclnnEmbedding(x.raw, index.raw, rows.raw)
            => rows is [3.0, 4.0, 5.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0];
    }
    let terms: Vec<f64> = (1..10).map(f64::from).collect();
    let gradient = device.tensor(F32, &[3, 3], &terms);
    for (padding, by_frequency, expected) in [
        (u64::MAX, false, [4.0, 5.0, 6.0, 8.0, 10.0, 12.0]),
        (u64::MAX, true, [4.0, 5.0, 6.0, 4.0, 5.0, 6.0]),
        (0, false, [0.0, 0.0, 0.0, 8.0, 10.0, 12.0]),
    ] {
        check! { device;
            aclnnEmbeddingDenseBackward(
                gradient.raw, index.raw, 2, padding, by_frequency, out.raw,
            ) => out is expected;
        }
    }
    // Row numbers may be floats, and of another shape.
    let index = device.tensor(F16, &[1, 3, 1], &[1.0, 0.0, 1.0]);
    let (few, long) = (device.out(F32, &[2]).raw, device.out(F32, &[3, 4]).raw);
    let (empty, at) = (
        device.out(F32, &[2, 0]),
        device.tensor(I64, &[1, 1], &[0.0]),
    );
    let number = device.out(F32, &[]);
    let rows_of = device.tensor(I32, &[3], &[1.0, 0.0, 1.0]);
    check! { device;
        aclnnEmbeddingDenseBackward(gradient.raw, index.raw, 2, u64::MAX, false, out.raw)
            => out is [4.0, 5.0, 6.0, 8.0, 10.0, 12.0];
        aclnnEmbedding(x.raw, rows_of.raw, few) refuses PARAM_INVALID, "out has rank 1";
        aclnnEmbedding(x.raw, rows_of.raw, long) refuses INNER, "out has shape";
        aclnnGather(empty.raw, 1, at.raw, device.out(F32, &[1, 1]).raw)
            refuses PARAM_INVALID, "nothing to select";
        aclnnIndexSelect(number.raw, 0, rows_of.raw, number.raw) refuses PARAM_INVALID, "takes one";
    }
    assert_eq!(control::violations(), []);
}

#[test]
fn a_wrong_index_is_an_exception_on_the_stream() {
    for value in [3.0, -1.0] {
        let device = Device::new();
        let (weight, out) = (
            device.tensor(F32, &[3, 2], &[0.0; 6]),
            device.out(F32, &[1, 2]),
        );
        let index = device.tensor(I64, &[1], &[value]);
        assert_refused(
            run!(device, aclnnEmbedding(weight.raw, index.raw, out.raw)),
            EXCEPTION,
            &format!("indices {value} is outside of 0..3"),
        );
        assert_eq!(control::violations().len(), 1);
    }
}

const TOKENS: usize = 3;
const PLACES: usize = 2;
const WIDTH: usize = 4;
const ROWS: usize = 5;
/// The row of each place: row 1 has none, and two places have no row.
const PLACED: [f64; TOKENS * PLACES] = [4.0, 0.0, 9.0, 2.0, 9.0, 3.0];

/// The terms of a token: its place and its row, which is none where it was dropped.
fn terms(token: usize, places: usize) -> impl Iterator<Item = (usize, Option<usize>)> {
    (token * places..(token + 1) * places).map(|place| {
        let row = PLACED[place] as usize;
        (place, (row < ROWS).then_some(row))
    })
}

/// Tokens from the rows that experts had of them, and the gradients, in every pair of types. All
/// numbers are exact in f32, so that a result is the exact one, rounded once.
#[test]
fn tokens_return_from_experts() {
    let device = Device::new();
    let [n, k, h, r] = [TOKENS, PLACES, WIDTH, ROWS].map(|size| size as i64);
    let x = numbers(ROWS * WIDTH, 1);
    // Only f32 holds these as they are.
    let p = numbers(TOKENS * PLACES, 2)
        .into_iter()
        .map(|p| p + 1.0 / 1024.0);
    let p: Vec<f64> = p.collect();
    let g = numbers(TOKENS * WIDTH, 3);
    let sums = |factor: &dyn Fn(usize) -> f64, places: usize| -> Vec<f64> {
        let tokens = TOKENS * PLACES / places;
        let element = |i: usize| {
            let rows = terms(i / WIDTH, places);
            let kept = rows.filter_map(|(place, row)| Some((place, row?)));
            kept.map(|(place, row)| factor(place) * x[row * WIDTH + i % WIDTH])
                .sum()
        };
        (0..tokens * WIDTH).map(element).collect()
    };
    let scattered = |factor: &dyn Fn(usize) -> f64, places: usize, slopes: &[f64]| -> Vec<f64> {
        // What the memory held stays where no place has the row.
        let mut rows = vec![77.0; ROWS * WIDTH];
        for token in 0..slopes.len() / WIDTH {
            for (place, row) in terms(token, places) {
                let Some(row) = row else { continue };
                for i in 0..WIDTH {
                    rows[row * WIDTH + i] = factor(place) * slopes[token * WIDTH + i];
                }
            }
        }
        rows
    };
    let dots: Vec<f64> = (0..TOKENS)
        .flat_map(|token| terms(token, PLACES).map(move |(_, row)| (token, row)))
        .map(|(token, row)| {
            let product =
                |i: usize| row.map_or(0.0, |row| x[row * WIDTH + i] * g[token * WIDTH + i]);
            (0..WIDTH).map(product).sum()
        })
        .collect();
    let long = numbers(TOKENS * PLACES * WIDTH, 4);
    for dtype in [F32, F16, Bf16] {
        let rounded = |values: Vec<f64>, dtype: Type| -> Vec<f64> {
            values
                .iter()
                .flat_map(|x| dtype.decode(&dtype.encode(*x)))
                .collect()
        };
        let rows = device.tensor(dtype, &[r, h], &x);
        let slopes = device.tensor(dtype, &[n, h], &g);
        let at = device.tensor(I32, &[n * k], &PLACED);
        let (out, one) = (device.out(dtype, &[n, h]), device.out(dtype, &[n * k, h]));
        for probs in [F32, F16, Bf16] {
            let weights = device.tensor(probs, &[n, k], &p);
            let (dx, dp) = (device.out(dtype, &[r, h]), device.out(probs, &[n, k]));
            let given = weights.values();
            let weighted = |place: usize| given[place];
            check! { device;
                aclnnMoeTokenUnpermute(rows.raw, at.raw, weights.raw, false, null(), out.raw)
                    => out is rounded(sums(&weighted, PLACES), dtype);
                aclnnMoeTokenUnpermuteGrad(
                    rows.raw, slopes.raw, at.raw, weights.raw, false, null(), dx.raw, dp.raw,
                ) => dp is rounded(dots.clone(), probs);
            }
            assert_eq!(
                dx.values(),
                rounded(scattered(&weighted, PLACES, &g), dtype)
            );
        }
        // Without weights a token has one place, other than where the call says how many.
        let slopes = device.tensor(dtype, &[n * k, h], &long);
        let (dx, unused) = (device.out(dtype, &[r, h]), device.out(dtype, &[0]));
        check! { device;
            aclnnMoeTokenUnpermute(rows.raw, at.raw, null(), false, null(), one.raw)
                => one is rounded(sums(&|_| 1.0, 1), dtype);
            aclnnMoeTokenPermuteGrad(rows.raw, at.raw, PLACES as i64, false, out.raw)
                => out is rounded(sums(&|_| 1.0, PLACES), dtype);
            aclnnMoeTokenUnpermuteGrad(
                rows.raw, slopes.raw, at.raw, null(), false, null(), dx.raw, unused.raw,
            ) => dx is rounded(scattered(&|_| 1.0, 1, &long), dtype);
        }
    }
    // Inputs may be views.
    let every_other =
        |values: &[f64]| -> Vec<f64> { values.iter().flat_map(|x| [*x, f64::NAN]).collect() };
    let strides = Some(&[2 * h, 2][..]);
    let rows = device.view(F32, &every_other(&x), &[r, h], strides, 0);
    let at = device.view(I32, &every_other(&PLACED), &[n * k], Some(&[2]), 0);
    let out = device.out(F32, &[n, h]);
    check! { device;
        aclnnMoeTokenPermuteGrad(rows.raw, at.raw, PLACES as i64, false, out.raw)
            => out is sums(&|_| 1.0, PLACES);
    }
    assert_eq!(control::violations(), []);
}

/// What the kernels do that the formulas leave open.
#[test]
fn sums_over_places_follow_the_kernels() {
    let device = Device::new();
    let step = f64::from(f32::EPSILON);
    let near = 1.0 + 2048.0 * step;
    let pair = |x: [f64; 2]| device.tensor(F32, &[2, 1], &x);
    let at = device.tensor(I32, &[2], &[0.0, 1.0]);
    let weights = |p: [f64; 2]| device.tensor(F32, &[1, 2], &p).raw;
    let out = device.out(F32, &[1, 1]);
    // The square of `near` is rounded before it is added; the exact one would leave a rest.
    let rest = pair([-(1.0 + 4096.0 * step), near]);
    // A factor of 0 leaves the row out.
    let infinite = pair([f64::INFINITY, 2.0]);
    let zero = pair([-0.0, 5.0]);
    check! { device;
        aclnnMoeTokenUnpermute(rest.raw, at.raw, weights([1.0, near]), false, null(), out.raw)
            => out is [0.0];
        aclnnMoeTokenUnpermute(infinite.raw, at.raw, weights([0.0, 3.0]), false, null(), out.raw)
            => out is [6.0];
        aclnnMoeTokenUnpermute(zero.raw, at.raw, weights([1.0, 0.0]), false, null(), out.raw)
            => out is [0.0];
    }
    assert!(out.values()[0].is_sign_negative());
    // In the gradient a dropped row reads as zeros, and a factor of 0 drops nothing.
    let slope = device.tensor(F32, &[1, 1], &[f64::INFINITY]);
    let at = device.tensor(I32, &[2], &[0.0, 2.0]);
    let (dx, dp) = (device.out(F32, &[2, 1]), device.out(F32, &[1, 2]));
    check! { device;
        aclnnMoeTokenUnpermuteGrad(
            zero.raw, slope.raw, at.raw, weights([0.0, 1.0]), false, null(), dx.raw, dp.raw,
        );
    }
    assert!(dx.values()[0].is_nan() && dx.values()[1] == 77.0);
    assert!(dp.values()[1].is_nan());
    assert_eq!(control::violations(), []);
}

#[test]
fn what_experts_had_has_to_fit_the_tokens() {
    let device = Device::new();
    let tensor = |dtype, dims: &[i64]| device.out(dtype, dims).raw;
    let float = |dims: &[i64]| tensor(F32, dims);
    let strided =
        |dims: &[i64], strides: &[i64]| device.view(F32, &[0.0; 64], dims, Some(strides), 0).raw;
    let (x, at, p, out) = (
        float(&[5, 4]),
        tensor(I32, &[6]),
        float(&[3, 2]),
        float(&[3, 4]),
    );
    let (g, dx, dp) = (out, float(&[5, 4]), float(&[3, 2]));
    let many = [float(&[1, 513]), tensor(I32, &[513]), float(&[1, 4])];
    macro_rules! unpermute {
        ($x:expr, $at:expr, $p:expr, $out:expr => $code:ident, $says:expr) => {
            let refused = plan!(aclnnMoeTokenUnpermute($x, $at, $p, false, null(), $out));
            assert_refused(refused, $code, $says);
        };
    }
    macro_rules! backward {
        ($g:expr, $p:expr, $dx:expr, $dp:expr => $code:ident, $says:expr) => {
            let refused = plan!(aclnnMoeTokenUnpermuteGrad(
                x,
                $g,
                at,
                $p,
                false,
                null(),
                $dx,
                $dp
            ));
            assert_refused(refused, $code, $says);
        };
    }
    unpermute!(null(), at, p, out => NULL_POINTER, "permutedTokens is null");
    unpermute!(tensor(I32, &[5, 4]), at, p, out => PARAM_INVALID, "permutedTokens is Int32");
    unpermute!(tensor(F64, &[5, 4]), at, p, out => PARAM_INVALID, "permutedTokens is Double");
    unpermute!(x, tensor(I64, &[6]), p, out => PARAM_INVALID, "sortedIndices is Int64");
    unpermute!(x, at, tensor(F64, &[3, 2]), out => PARAM_INVALID, "probsOptional is Double");
    unpermute!(x, at, p, tensor(F16, &[3, 4]) => PARAM_INVALID, "out is Float16");
    unpermute!(x, at, p, strided(&[3, 4], &[8, 2]) => PARAM_INVALID, "out has strides");
    unpermute!(float(&[5, 2, 2]), at, p, out => TILING, "permutedTokens has rank 3");
    unpermute!(x, tensor(I32, &[3, 2]), p, out => TILING, "sortedIndices has rank 2");
    unpermute!(x, at, float(&[6]), out => TILING, "probsOptional has rank 1");
    unpermute!(x, at, p, float(&[3, 2, 2]) => TILING, "out has rank 3");
    unpermute!(x, tensor(I32, &[5]), p, out => TILING, "[6] is expected");
    unpermute!(x, at, float(&[2, 2]), out => TILING, "probsOptional has shape [2, 2]");
    unpermute!(x, at, null(), out => TILING, "[3] is expected");
    unpermute!(x, at, p, float(&[3, 5]) => TILING, "[3, 4] is expected");
    unpermute!(float(&[0, 4]), at, p, out => TILING, "permutedTokens has no elements");
    unpermute!(x, at, float(&[3, 0]), out => TILING, "0 places");
    unpermute!(x, many[1], many[0], many[2] => TILING, "513 places");

    backward!(null(), p, dx, dp => NULL_POINTER, "unpermutedTokensGrad is null");
    backward!(g, p, dx, null_mut() => NULL_POINTER, "probsGradOut is null");
    backward!(tensor(Bf16, &[3, 4]), p, dx, dp => PARAM_INVALID, "unpermutedTokensGrad is Bf16");
    backward!(g, p, tensor(F16, &[5, 4]), dp => PARAM_INVALID, "permutedTokensGradOut is Float16");
    backward!(g, p, dx, tensor(F16, &[3, 2]) => PARAM_INVALID, "probsGradOut is Float16");
    backward!(g, p, strided(&[5, 4], &[8, 2]), dp => PARAM_INVALID, "Out has strides");
    backward!(g, p, dx, strided(&[3, 2], &[4, 2]) => PARAM_INVALID, "probsGradOut has strides");
    backward!(float(&[3, 5]), p, dx, dp => TILING, "[3, 4] is expected");
    backward!(float(&[0, 4]), p, dx, dp => TILING, "unpermutedTokensGrad has no elements");
    backward!(g, p, float(&[6, 4]), dp => TILING, "[5, 4] is expected");
    backward!(g, p, dx, float(&[6]) => TILING, "[3, 2] is expected");
    backward!(g, null(), dx, dp => TILING, "[3] is expected");
    let single = [float(&[6, 4]), tensor(I32, &[6, 4])];
    backward!(single[0], null(), dx, single[1] => PARAM_INVALID, "probsGradOut is Int32");

    let list = ints(&[3, 4]);
    check! { device;
        aclnnMoeTokenUnpermute(x, at, p, true, null(), out) refuses PARAM_INVALID, "Mode is true";
        aclnnMoeTokenUnpermute(x, at, p, false, list, out) refuses PARAM_INVALID, "[3, 4], false";
        aclnnMoeTokenUnpermuteGrad(x, g, at, p, true, null(), dx, dp)
            refuses PARAM_INVALID, "paddedMode is true";
        aclnnMoeTokenUnpermuteGrad(x, g, at, p, false, list, dx, dp)
            refuses PARAM_INVALID, "restoreShapeOptional [3, 4]";
        aclnnMoeTokenPermuteGrad(x, at, 2, true, out) refuses PARAM_INVALID, "paddedMode is true";
        aclnnMoeTokenPermuteGrad(x, at, -1, false, out) refuses TILING, "-1 places";
        aclnnMoeTokenPermuteGrad(x, at, 0, false, out) refuses TILING, "0 places";
        aclnnMoeTokenPermuteGrad(x, many[1], 513, false, many[2]) refuses TILING, "513 places";
        aclnnMoeTokenPermuteGrad(x, at, 3, false, out) refuses TILING, "[9] is expected";
    }
}

#[test]
fn a_row_of_experts_has_one_place() {
    for (second, says) in [
        (-1.0, "sortedIndices -1 is outside"),
        (4.0, "has row 4 twice"),
    ] {
        for backward in [false, true] {
            let device = Device::new();
            let tensor = |dims: &[i64]| device.out(F32, dims).raw;
            let at = device.tensor(I32, &[2], &[4.0, second]).raw;
            let (x, g, p) = (tensor(&[5, 4]), tensor(&[1, 4]), tensor(&[1, 2]));
            let failed = if backward {
                let (dx, dp) = (tensor(&[5, 4]), tensor(&[1, 2]));
                run!(
                    device,
                    aclnnMoeTokenUnpermuteGrad(x, g, at, p, false, null(), dx, dp)
                )
            } else {
                run!(device, aclnnMoeTokenPermuteGrad(x, at, 2, false, g))
            };
            assert_refused(failed, EXCEPTION, says);
            assert_eq!(control::violations().len(), 1);
        }
    }
}
