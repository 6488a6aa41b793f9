//! Elements that move, by rule or by index.

use std::ptr::null_mut;

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
