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
