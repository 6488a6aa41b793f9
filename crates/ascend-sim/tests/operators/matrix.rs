//! Products of matrices.

use std::ptr::null_mut;

use ascend_sim::abi::aclnn::*;
use ascend_sim::abi::operators::*;
use ascend_sim::control;

use crate::harness::*;
use crate::support::{Device, recent_message};

fn dense_product(a: &[f64], b: &[f64], [rows, depth, columns]: [usize; 3]) -> Vec<f64> {
    let element = |i: usize| {
        let (row, column) = (i / columns, i % columns);
        let terms = (0..depth).map(|k| a[row * depth + k] * b[k * columns + column]);
        terms.sum()
    };
    (0..rows * columns).map(element).collect()
}

#[test]
fn products_of_matrices() {
    let device = Device::new();
    let sizes = [5, 70, 300];
    let [rows, depth, columns] = sizes;
    let [r, d, c] = sizes.map(|size| size as i64);
    let (a, b) = (numbers(2 * rows * depth, 4), numbers(depth * columns, 5));
    let (first, second) = a.split_at(rows * depth);
    let (first_product, second_product) = (
        dense_product(first, &b, sizes),
        dense_product(second, &b, sizes),
    );
    for dtype in [F32, F16, Bf16] {
        let (x, y) = (
            device.tensor(dtype, &[r, d], first),
            device.tensor(dtype, &[d, c], &b),
        );
        let out = device.out(dtype, &[r, c]);
        check! { device;
            aclnnMm(x.raw, y.raw, out.raw, 0) => out near first_product, dtype.step();
        }
    }
    // The same with the second matrix stored transposed, in a batch that it broadcasts over.
    let at = |i: usize| b[i % depth * columns + i / depth];
    let transposed: Vec<f64> = (0..depth * columns).map(at).collect();
    let x = device.tensor(F32, &[2, r, d], &a);
    let y = device.view(F32, &transposed, &[1, d, c], Some(&[0, 1, d]), 0);
    let out = device.out(F32, &[2, r, c]);
    let products = [first_product, second_product].concat();
    check! { device;
        aclnnBatchMatMul(x.raw, y.raw, out.raw, 1) => out near products, F32.step();
    }
    // Other types meet in f32.
    let (x, y) = (
        device.tensor(Bf16, &[1, 1], &[3.0]),
        device.tensor(F32, &[1, 1], &[1.1]),
    );
    let out = device.out(F32, &[1, 1]);
    check! { device;
        aclnnMm(x.raw, y.raw, out.raw, 0) => out near [3.3], F32.step();
    }
    // A product of no depth.
    let (x, y) = (
        device.tensor(F32, &[2, 0], &[]),
        device.tensor(F32, &[0, 2], &[]),
    );
    let out = device.out(F32, &[2, 2]);
    check! { device;
        aclnnMm(x.raw, y.raw, out.raw, 0) => out is [0.0; 4];
    }

    let half = device.tensor(Bf16, &[2, 2], &[0.0; 4]);
    let (v, w) = (
        device.tensor(F32, &[2], &[0.0; 2]),
        device.tensor(F32, &[2, 2], &[0.0; 4]),
    );
    let strided = device.view(F32, &[0.0; 8], &[2, 2], Some(&[4, 1]), 0);
    let (three, two) = (device.out(F32, &[3, 2, 2]), device.out(F32, &[2, 2, 2]));
    check! { device;
        aclnnMm(half.raw, w.raw, half.raw, 0) refuses PARAM_INVALID, "out is Bf16";
        aclnnMm(half.raw, half.raw, half.raw, 3) refuses PARAM_INVALID, "cubeMathType is 3";
        aclnnMm(w.raw, w.raw, out.raw, 7) refuses PARAM_INVALID, "cubeMathType is 7";
        aclnnMm(w.raw, v.raw, out.raw, 0) refuses PARAM_INVALID, "mat2 has rank 1";
        aclnnMm(w.raw, y.raw, out.raw, 0) refuses PARAM_INVALID, "2 columns, 0 rows";
        aclnnMm(w.raw, w.raw, strided.raw, 0)
            refuses PARAM_INVALID, "a contiguous tensor is expected";
        aclnnBatchMatMul(three.raw, two.raw, three.raw, 0)
            refuses PARAM_INVALID, "do not broadcast";
    }
    // A transposed matrix is read as it is, other views are copied into the workspace.
    let transposed = device.view(F32, &[0.0; 4], &[2, 2], Some(&[1, 2]), 0);
    let bytes =
        |second: *const aclTensor| plan!(aclnnMm(w.raw, second, out.raw, 0)).expect("plans").0;
    assert_eq!(bytes(transposed.raw), bytes(w.raw));
    assert!(bytes(strided.raw) > bytes(w.raw));
    assert_eq!(control::violations(), []);
}

/// Both splits of a grouped product, with a group without rows, and what the vendor refuses.
#[test]
fn products_of_groups() {
    let device = Device::new();
    let [rows, depth, columns, groups] = [5, 3, 2, 3];
    let [r, d, c, g] = [5, 3, 2, 3];
    let (a, b) = (
        numbers(rows * depth, 6),
        numbers(groups * depth * columns, 7),
    );
    let gradient = numbers(rows * columns, 8);
    let by_rows: Vec<f64> = [0, 0, 2, 2, 2]
        .into_iter()
        .zip(a.chunks(depth))
        .flat_map(|(group, row)| {
            let matrix = &b[group * depth * columns..][..depth * columns];
            dense_product(row, matrix, [1, depth, columns])
        })
        .collect();
    let sum = |from: usize, to: usize| {
        let transposed: Vec<f64> = (0..depth)
            .flat_map(|channel| (from..to).map(move |row| row * depth + channel))
            .map(|at| a[at])
            .collect();
        dense_product(
            &transposed,
            &gradient[from * columns..to * columns],
            [depth, to - from, columns],
        )
    };
    let by_sums = [sum(0, 2), vec![0.0; depth * columns], sum(2, 5)].concat();
    // The matrices, stored transposed.
    let stored: Vec<f64> = b
        .chunks(depth * columns)
        .flat_map(|matrix| (0..depth * columns).map(|at| matrix[at % depth * columns + at / depth]))
        .collect();

    // SAFETY: a list of one live tensor.
    let list = |x: Tensor<'_>| unsafe { aclCreateTensorList((&raw const x.raw).cast(), 1) };
    macro_rules! grouped {
        ($how:ident, $x:expr, $weight:expr, $groups:expr, [$split:expr, $kind:expr], $out:expr) => {{
            let none = std::ptr::null;
            $how!(aclnnGroupedMatmulV4(
                list($x),
                list($weight),
                none(),
                none(),
                none(),
                none(),
                none(),
                none(),
                $groups.raw,
                none(),
                none(),
                none(),
                3,
                $split,
                $kind,
                0,
                list($out),
                null_mut(),
                null_mut(),
            ))
        }};
    }
    macro_rules! on_device {
        ($($call:tt)*) => { run!(device, $($call)*) };
    }
    let counts = device.tensor(I64, &[3], &[2.0, 0.0, 3.0]);
    let ends = device.tensor(I64, &[3], &[2.0, 2.0, 5.0]);
    for dtype in [F32, F16, Bf16] {
        let x = device.tensor(dtype, &[r, d], &a);
        let weight = device.tensor(dtype, &[g, d, c], &b);
        let transposed = device.view(dtype, &stored, &[g, d, c], Some(&[d * c, 1, d]), 0);
        for (weight, groups, kind) in [
            (weight, counts, 1),
            (weight, ends, 0),
            (transposed, counts, 1),
        ] {
            let out = device.out(dtype, &[r, c]);
            grouped!(on_device, x, weight, groups, [0, kind], out).expect("rows");
            assert_close(&out.values(), &by_rows, dtype.step(), "rows");
        }
        let x = device.view(dtype, &a, &[d, r], Some(&[1, d]), 0);
        let (dy, out) = (
            device.tensor(dtype, &[r, c], &gradient),
            device.out(dtype, &[g, d, c]),
        );
        grouped!(on_device, x, dy, counts, [2, 1], out).expect("sums");
        assert_close(&out.values(), &by_sums, dtype.step(), "sums");
    }

    let tensor = |dtype, dims: &[i64]| device.out(dtype, dims);
    let (x, weight, out) = (
        tensor(F32, &[r, d]),
        tensor(F32, &[g, d, c]),
        tensor(F32, &[r, c]),
    );
    let dy = tensor(F32, &[r, c]);
    for (x, weight, groups, numbers, out, says) in [
        (
            x,
            weight,
            tensor(I64, &[2]),
            [0, 1],
            out,
            "has 2 elements, 3",
        ),
        (
            x,
            weight,
            tensor(I32, &[3]),
            [0, 1],
            out,
            "groupListOptional is Int32",
        ),
        (x, weight, counts, [1, 1], out, "groupType is 1"),
        (
            x,
            tensor(F16, &[g, d, c]),
            counts,
            [0, 1],
            out,
            "weight is Float16",
        ),
        (
            x,
            tensor(F32, &[g, c, d]),
            counts,
            [0, 1],
            out,
            "do not multiply",
        ),
        (
            x,
            dy,
            counts,
            [2, 1],
            tensor(F32, &[g, r, c]),
            "do not multiply",
        ),
        (
            tensor(F32, &[d, r]),
            dy,
            counts,
            [2, 1],
            weight,
            "expected to be transposed",
        ),
        (
            device.view(F32, &a, &[r, d], Some(&[1, r]), 0),
            weight,
            counts,
            [0, 1],
            out,
            "not transposed",
        ),
        (
            x,
            weight,
            counts,
            [0, 1],
            tensor(F32, &[r, d]),
            "[5, 2] is expected",
        ),
    ] {
        let refused = grouped!(plan, x, weight, groups, [numbers[0], numbers[1]], out);
        assert_refused(refused, PARAM_INVALID, says);
    }
    // The device finds counts that are too large.
    let more = device.tensor(I64, &[3], &[2.0, 0.0, 9.0]);
    assert!(grouped!(on_device, x, weight, more, [0, 1], out).is_err());
}
