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
        let out = device.out(dtype, &[3, 2]);
        check! { device;
            aclnnPermute aclnnPermuteGetWorkspaceSize(x.raw, ints(&[1, -2]), out.raw) => out is [0.0, 3.0, 1.0, 4.0, 2.0, 5.0];
        }
        let out = device.out(dtype, &[2, 3]);
        check! { device;
            aclnnFlip aclnnFlipGetWorkspaceSize(x.raw, ints(&[1]), out.raw) => out is [2.0, 1.0, 0.0, 5.0, 4.0, 3.0];
            aclnnTril aclnnTrilGetWorkspaceSize(x.raw, 0, out.raw) => out is [0.0, 0.0, 0.0, 3.0, 4.0, 0.0];
            aclnnTriu aclnnTriuGetWorkspaceSize(x.raw, 1, out.raw) => out is [0.0, 1.0, 2.0, 0.0, 0.0, 5.0];
        }
        let out = device.out(dtype, &[2, 2, 3]);
        check! { device;
            aclnnRepeat aclnnRepeatGetWorkspaceSize(x.raw, ints(&[2, 1, 1]), out.raw) => out is [data.clone(), data.clone()].concat();
            aclnnExpand aclnnExpandGetWorkspaceSize(x.raw, ints(&[2, -1, 3]), out.raw) => out is [data.clone(), data.clone()].concat();
        }
        let out = device.out(dtype, &[2, 1]);
        check! { device;
            aclnnSlice aclnnSliceGetWorkspaceSize(x.raw, 1, -2, 9, 2, out.raw) => out is [1.0, 4.0];
        }
        let out = device.out(dtype, &[3, 3]);
        check! { device;
            aclnnConstantPadNd aclnnConstantPadNdGetWorkspaceSize(x.raw, ints(&[-1, 1, 1, 0]), scalar(F64, 7.0), out.raw) => out is [7.0, 7.0, 7.0, 1.0, 2.0, 7.0, 4.0, 5.0, 7.0];
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
            aclnnCat aclnnCatGetWorkspaceSize(list, -1, out.raw) => out is [0.0, 1.0, 2.0, 8.0, 3.0, 4.0, 5.0, 9.0];
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
        device.out(F32, &[2, 2]),
    );
    check! { device;
        aclnnConstantPadNdGetWorkspaceSize(x.raw, ints(&[1]), scalar(F64, 0.0), out.raw) refuses INNER_NULLPTR, "an even count";
        aclnnRepeatGetWorkspaceSize(x.raw, ints(&[2; 5]), out.raw) refuses PARAM_INVALID, "at most 4 of them above 1";
    }
    let data = [3.0, f64::NAN, 1.0, 2.0];
    let (x, values, places) = (
        device.tensor(F32, &[4], &data),
        device.out(F32, &[2]),
        device.out(I64, &[2]),
    );
    check! { device;
        aclnnTopk aclnnTopkGetWorkspaceSize(x.raw, 2, 0, false, true, values.raw, places.raw);
    }
    assert_eq!(
        (values.values(), places.values()),
        (vec![1.0, 2.0], vec![2.0, 3.0])
    );
    let (values, places) = (device.out(F32, &[4]), device.out(I64, &[4]));
    check! { device;
        aclnnSort aclnnSortGetWorkspaceSize(x.raw, true, 0, true, values.raw, places.raw) => places is [1.0, 0.0, 3.0, 2.0];
    }
    assert_eq!(control::violations(), []);
}

#[test]
fn indices_pick_and_add() {
    let device = Device::new();
    let data: Vec<f64> = (0..6).map(f64::from).collect();
    let x = device.tensor(F32, &[2, 3], &data);
    let (index, out) = (
        device.tensor(I64, &[2, 2], &[2.0, -1.0, 0.0, 1.0]),
        device.out(F32, &[2, 2]),
    );
    check! { device;
        aclnnGather aclnnGatherGetWorkspaceSize(x.raw, 1, index.raw, out.raw) => out is [2.0, 2.0, 3.0, 4.0];
    }
    let (index, src) = (
        device.tensor(I32, &[2, 2], &[0.0, 0.0, 2.0, 1.0]),
        device.tensor(F32, &[2, 2], &[10.0, 20.0, 30.0, 40.0]),
    );
    let out = device.out(F32, &[2, 3]);
    for (reduce, expected) in [
        (0, [20.0, 1.0, 2.0, 3.0, 40.0, 30.0]),
        (1, [30.0, 1.0, 2.0, 3.0, 44.0, 35.0]),
        (2, [0.0, 1.0, 2.0, 3.0, 160.0, 150.0]),
    ] {
        check! { device;
            aclnnScatter aclnnScatterGetWorkspaceSize(x.raw, 1, index.raw, src.raw, reduce, out.raw) => out is expected;
        }
    }
    check! { device;
        aclnnScatterAdd aclnnScatterAddGetWorkspaceSize(out.raw, 1, index.raw, src.raw, out.raw) => out is [30.0, 1.0, 2.0, 3.0, 200.0, 180.0];
    }
    let (index, out) = (
        device.tensor(I64, &[3], &[2.0, 0.0, 2.0]),
        device.out(F32, &[2, 3]),
    );
    check! { device;
        aclnnIndexSelect aclnnIndexSelectGetWorkspaceSize(x.raw, -1, index.raw, out.raw) => out is [2.0, 0.0, 2.0, 5.0, 3.0, 5.0];
    }
    let source = device.tensor(F32, &[2, 3], &[1.0, 1.0, 1.0, 2.0, 2.0, 2.0]);
    check! { device;
        aclnnIndexAdd aclnnIndexAddGetWorkspaceSize(x.raw, 1, index.raw, source.raw, scalar(F32, 10.0), out.raw) => out is [10.0, 1.0, 22.0, 23.0, 4.0, 45.0];
    }
    let out = device.out(F32, &[3, 3]);
    let index = device.tensor(I32, &[3], &[1.0, 0.0, 1.0]);
    check! { device;
        aclnnEmbedding aclnnEmbeddingGetWorkspaceSize(x.raw, index.raw, out.raw) => out is [3.0, 4.0, 5.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0];
    }
    let gradient = device.tensor(F32, &[3, 3], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0]);
    let sums = device.out(F32, &[2, 3]);
    for (padding, by_frequency, expected) in [
        (u64::MAX, false, [4.0, 5.0, 6.0, 8.0, 10.0, 12.0]),
        (u64::MAX, true, [4.0, 5.0, 6.0, 4.0, 5.0, 6.0]),
        (0, false, [0.0, 0.0, 0.0, 8.0, 10.0, 12.0]),
    ] {
        check! { device;
            aclnnEmbeddingDenseBackward aclnnEmbeddingDenseBackwardGetWorkspaceSize(gradient.raw, index.raw, 2, padding, by_frequency, sums.raw) => sums is expected;
        }
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
            run!(device, aclnnEmbedding aclnnEmbeddingGetWorkspaceSize(weight.raw, index.raw, out.raw)),
            EXCEPTION,
            &format!("indices {value} is outside of 0..3"),
        );
        assert_eq!(control::violations().len(), 1);
    }
}
