//! Products of matrices.

use std::ptr::null_mut;

use ascend_sim::abi::aclnn::*;
use ascend_sim::abi::operators::*;
use ascend_sim::control;

use crate::harness::*;
use crate::support::{Device, recent_message};

fn dense_product(a: &[f64], b: &[f64], [rows, depth, columns]: [usize; 3]) -> Vec<f64> {
    (0..rows * columns)
        .map(|i| {
            (0..depth)
                .map(|k| a[i / columns * depth + k] * b[k * columns + i % columns])
                .sum()
        })
        .collect()
}

#[test]
fn products_of_matrices() {
    let device = Device::new();
    let (rows, depth, columns) = (5, 70, 300);
    let (a, b) = (numbers(2 * rows * depth, 4), numbers(depth * columns, 5));
    for dtype in [F32, F16, Bf16] {
        let (x, y) = (
            device.tensor(dtype, &[rows as i64, depth as i64], &a[..rows * depth]),
            device.tensor(dtype, &[depth as i64, columns as i64], &b),
        );
        let out = device.out(dtype, &[rows as i64, columns as i64]);
        check! { device;
            aclnnMm aclnnMmGetWorkspaceSize(x.raw, y.raw, out.raw, 0);
        }
        let expected = dense_product(&a[..rows * depth], &b, [rows, depth, columns]);
        assert_close(&out.values(), &expected, dtype.step(), "mm");
    }
    // The same with the second matrix stored transposed, in a batch that it broadcasts over.
    let turned: Vec<f64> = (0..depth * columns)
        .map(|i| b[i % depth * columns + i / depth])
        .collect();
    let x = device.tensor(F32, &[2, rows as i64, depth as i64], &a);
    let y = device.view(
        F32,
        &turned,
        &[1, depth as i64, columns as i64],
        Some(&[0, 1, depth as i64]),
        0,
    );
    let out = device.out(F32, &[2, rows as i64, columns as i64]);
    check! { device;
        aclnnBatchMatMul aclnnBatchMatMulGetWorkspaceSize(x.raw, y.raw, out.raw, 1);
    }
    let expected = [
        dense_product(&a[..rows * depth], &b, [rows, depth, columns]),
        dense_product(&a[rows * depth..], &b, [rows, depth, columns]),
    ]
    .concat();
    assert_close(&out.values(), &expected, F32.step(), "bmm");
    check! { device;
        aclnnMatmul aclnnMatmulGetWorkspaceSize(x.raw, y.raw, out.raw, 0) => out near expected, F32.step();
    }
    // Vectors, and a product of no depth.
    let (v, w) = (
        device.tensor(F32, &[2], &[2.0, 3.0]),
        device.tensor(F32, &[2, 2], &[1.0, 10.0, 100.0, 1000.0]),
    );
    let (row, one) = (device.out(F32, &[2]), device.out(F32, &[]));
    check! { device;
        aclnnMatmul aclnnMatmulGetWorkspaceSize(v.raw, w.raw, row.raw, 0) => row is [302.0, 3020.0];
        aclnnMatmul aclnnMatmulGetWorkspaceSize(v.raw, v.raw, one.raw, 0) => one is [13.0];
    }
    let (x, y, out) = (
        device.tensor(F32, &[2, 0], &[]),
        device.tensor(F32, &[0, 2], &[]),
        device.out(F32, &[2, 2]),
    );
    check! { device;
        aclnnMm aclnnMmGetWorkspaceSize(x.raw, y.raw, out.raw, 0) => out is [0.0; 4];
    }
    // 1·C + 2·A@B, in place.
    check! { device;
        aclnnInplaceAddmm aclnnInplaceAddmmGetWorkspaceSize(out.raw, w.raw, w.raw, scalar(F32, 1.0), scalar(F32, 2.0), 0) => out is [2002.0, 20020.0, 200_200.0, 2_002_000.0];
    }

    let half = device.tensor(Bf16, &[2, 2], &[0.0; 4]);
    check! { device;
        aclnnMmGetWorkspaceSize(half.raw, w.raw, out.raw, 0) refuses PARAM_INVALID, "Bf16 is only multiplied with Bf16";
        aclnnMmGetWorkspaceSize(half.raw, half.raw, half.raw, 3) refuses PARAM_INVALID, "cubeMathType is 3";
        aclnnMmGetWorkspaceSize(w.raw, w.raw, out.raw, 7) refuses PARAM_INVALID, "cubeMathType is 7";
        aclnnMmGetWorkspaceSize(w.raw, v.raw, out.raw, 0) refuses PARAM_INVALID, "mat2 has rank 1";
    }
    let strided = device.view(F32, &[0.0; 8], &[2, 2], Some(&[4, 1]), 0);
    check! { device;
        aclnnMmGetWorkspaceSize(w.raw, w.raw, strided.raw, 0) refuses PARAM_INVALID, "a contiguous tensor is expected";
    }
    // A transposed matrix is read as it is, other views are copied into the workspace.
    let turned = device.view(F32, &[0.0; 4], &[2, 2], Some(&[1, 2]), 0);
    let dense = plan!(aclnnMmGetWorkspaceSize(w.raw, w.raw, out.raw, 0))
        .expect("plans")
        .0;
    assert_eq!(
        plan!(aclnnMmGetWorkspaceSize(w.raw, turned.raw, out.raw, 0))
            .expect("plans")
            .0,
        dense
    );
    assert!(
        plan!(aclnnMmGetWorkspaceSize(w.raw, strided.raw, out.raw, 0))
            .expect("plans")
            .0
            > dense
    );
    assert_eq!(control::violations(), []);
}
