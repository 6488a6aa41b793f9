//! Reductions along axes.

use std::ptr::{null, null_mut};

use ascend_sim::abi::aclnn::*;
use ascend_sim::abi::operators::*;

use crate::harness::*;
use crate::support::{Device, recent_message};

#[test]
fn reductions_along_axes() {
    let device = Device::new();
    let data: Vec<f64> = vec![1.0, -2.0, 3.0, 4.0, 5.0, -6.0];
    for dtype in [F32, F16, Bf16] {
        let x = device.tensor(dtype, &[2, 3], &data);
        let (all, rows, columns) = (
            device.out(dtype, &[]),
            device.out(dtype, &[2, 1]),
            device.out(dtype, &[3]),
        );
        let id = dtype as i32;
        check! { device;
            aclnnReduceSum(x.raw, ints(&[]), false, id, all.raw) => all is [5.0];
            aclnnReduceSum(x.raw, ints(&[-1]), true, id, rows.raw) => rows is [2.0, 3.0];
            aclnnMean(x.raw, ints(&[1]), true, id, rows.raw)
                => rows near [2.0 / 3.0, 1.0], dtype.step();
            aclnnAmax(x.raw, ints(&[0]), false, columns.raw) => columns is [4.0, 5.0, 3.0];
            aclnnAmin(x.raw, ints(&[0, 1]), false, all.raw) => all is [-6.0];
        }
        let (best, indices_out) = (device.out(dtype, &[3]), device.out(I64, &[3]));
        check! { device;
            aclnnMaxDim(x.raw, 0, false, best.raw, indices_out.raw);
        }
        assert_eq!(
            (best.values(), indices_out.values()),
            (vec![4.0, 5.0, 3.0], vec![1.0, 1.0, 0.0])
        );
        let indices_out = device.out(I32, &[2, 1]);
        check! { device;
            aclnnArgMin(x.raw, 1, true, indices_out.raw) => indices_out is [1.0, 2.0];
        }
        let out = device.out(dtype, &[2, 3]);
        check! { device;
            aclnnCumsum(x.raw, 1, id, out.raw) => out is [1.0, -1.0, 2.0, 4.0, 9.0, 3.0];
        }
    }
    // Sums of many halves do not stick: 4096 times 1 in f16, and bool counted in i64.
    let (x, out) = (
        device.tensor(F16, &[4096], &[1.0; 4096]),
        device.out(F16, &[]),
    );
    check! { device;
        aclnnReduceSum(x.raw, ints(&[0]), false, F16 as i32, out.raw) => out is [4096.0];
    }
    let (x, out) = (
        device.tensor(Bool, &[2, 2], &[1.0, 0.0, 1.0, 1.0]),
        device.out(I64, &[]),
    );
    check! { device;
        aclnnReduceSum(x.raw, ints(&[]), false, I64 as i32, out.raw) => out is [3.0];
    }
    let out = device.out(Bool, &[2]);
    check! { device;
        aclnnAll(x.raw, ints(&[1]), false, out.raw) => out is [0.0, 1.0];
        aclnnAny(x.raw, ints(&[1]), false, out.raw) => out is [1.0, 1.0];
    }
    let (x, out) = (
        device.tensor(F32, &[4], &[1.0, 2.0, 3.0, 4.0]),
        device.out(F32, &[]),
    );
    check! { device;
        aclnnProdDim(x.raw, 0, false, F32 as i32, out.raw) => out is [24.0];
    }
    // NaN is more extreme than all; of equals the first counts.
    let x = device.tensor(F32, &[5], &[1.0, f64::NAN, 9.0, f64::NAN, 9.0]);
    let (out, index_out) = (device.out(F32, &[]), device.out(I64, &[]));
    check! { device;
        aclnnMinDim(x.raw, 0, false, out.raw, index_out.raw);
    }
    assert!(out.values()[0].is_nan() && index_out.values() == [1.0]);
    let x = device.tensor(I32, &[3], &[1.0, 9.0, 9.0]);
    check! { device;
        aclnnArgMax(x.raw, 0, false, index_out.raw) => index_out is [1.0];
    }
    // Of nothing: a sum is 0, a mean NaN, an extreme an error.
    let (x, out) = (device.tensor(F32, &[0, 2], &[]), device.out(F32, &[2]));
    check! { device;
        aclnnReduceSum(x.raw, ints(&[0]), false, 0, out.raw) => out is [0.0, 0.0];
        aclnnMean(x.raw, ints(&[0]), false, 0, out.raw);
    }
    assert!(out.values().iter().all(|x| x.is_nan()));
    check! { device;
        aclnnAmax(x.raw, ints(&[0]), false, out.raw) refuses PARAM_INVALID, "no extreme";
    }
    let (x, indices_out) = (device.tensor(I32, &[2], &[1.0, 2.0]), device.out(I64, &[]));
    let out = device.out(I32, &[]);
    check! { device;
        aclnnMaxDim(x.raw, 0, false, out.raw, indices_out.raw)
            refuses PARAM_INVALID, "self is Int32";
        aclnnReduceSum(x.raw, null(), false, 3, out.raw) refuses NULL_POINTER, "dims is null";
        aclnnAmax(x.raw, ints(&[0, -1]), false, out.raw) refuses PARAM_INVALID, "axis 0 twice";
    }
}

#[test]
fn types_and_shapes_of_reductions() {
    let device = Device::new();
    // A mean is computed in `dtype`, which may differ from the output's type.
    let x = device.tensor(I32, &[2], &[2049.0, 2049.0]);
    let (single, one) = (device.out(F32, &[1]), device.out(I32, &[1]));
    let all = device.out(F32, &[]);
    let (f16, i32, bool) = (F16 as i32, I32 as i32, Bool as i32);
    check! { device;
        aclnnMean(x.raw, ints(&[]), false, f16, single.raw) => single is [2048.0];
        aclnnMean(x.raw, ints(&[]), false, i32, one.raw) => one is [2049.0];
        aclnnMean(single.raw, ints(&[]), false, i32, one.raw)
            refuses PARAM_INVALID, "does not convert";
    }
    // An axis may be named twice for any, and a single number has any shape.
    let flags = device.tensor(Bool, &[2, 2], &[0.0, 0.0, 1.0, 0.0]);
    let (rows, any) = (device.out(Bool, &[2]), device.out(Bool, &[1]));
    check! { device;
        aclnnAny(flags.raw, ints(&[1, -1]), false, rows.raw) => rows is [0.0, 1.0];
        aclnnAny(flags.raw, ints(&[0, 1]), false, any.raw) => any is [1.0];
        aclnnAny(flags.raw, ints(&[-3]), false, rows.raw) refuses PARAM_INVALID, "dim is -3";
        aclnnAll(flags.raw, ints(&[0, 1]), false, any.raw) refuses PARAM_INVALID, "out has shape";
        aclnnAll(flags.raw, ints(&[1, -1]), false, rows.raw) refuses PARAM_INVALID, "twice";
        aclnnMean(flags.raw, ints(&[]), false, f16, single.raw)
            refuses PARAM_INVALID, "self is Bool";
        aclnnCumsum(flags.raw, 0, bool, flags.raw) refuses PARAM_INVALID, "out is Bool";
        aclnnReduceSum(x.raw, ints(&[]), false, U16 as i32, device.out(U16, &[]).raw)
            refuses PARAM_INVALID, "out is Uint16";
        aclnnMean(x.raw, ints(&[]), false, U16 as i32, single.raw)
            refuses PARAM_INVALID, "dtype is Uint16";
        // A tensor of rank 0 takes axis 0 only.
        aclnnAmax(all.raw, ints(&[0]), false, all.raw);
        aclnnAmax(all.raw, ints(&[1]), false, all.raw) refuses PARAM_INVALID, "dim is 1";
    }
}
