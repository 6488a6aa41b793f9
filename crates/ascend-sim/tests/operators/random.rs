//! Random numbers.

use std::ptr::null_mut;

use ascend_sim::abi::aclnn::*;
use ascend_sim::abi::operators::*;

use crate::harness::*;
use crate::support::{Device, recent_message};

#[test]
fn random_numbers_have_their_distribution_and_are_never_repeatable() {
    let device = Device::new();
    let count = 20_000;
    let x = device.out(F32, &[count]);
    let moments = |x: &[f64]| {
        let mean = x.iter().sum::<f64>() / x.len() as f64;
        (
            mean,
            x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / x.len() as f64,
        )
    };
    check! { device;
        aclnnInplaceUniform(x.raw, -1.0, 3.0, 1, 0);
    }
    let first = x.values();
    let (mean, variance) = moments(&first);
    assert!(
        (mean - 1.0).abs() < 0.04 && (variance - 16.0 / 12.0).abs() < 0.04,
        "{mean} {variance}"
    );
    assert!(first.iter().all(|x| (-1.0..3.0).contains(x)));
    check! { device;
        aclnnInplaceUniform(x.raw, -1.0, 3.0, 1, 0) => x is first;
        aclnnInplaceUniform(x.raw, -1.0, 3.0, 1, 10);
    }
    // An offset is a place in the sequence of the seed.
    assert_eq!(x.values()[..first.len() - 10], first[10..]);
    check! { device;
        aclnnInplaceNormal(x.raw, 2.0, 0.5, 7, 0);
    }
    let (mean, variance) = moments(&x.values());
    assert!(
        (mean - 2.0).abs() < 0.02 && (variance - 0.25).abs() < 0.01,
        "{mean} {variance}"
    );
    check! { device;
        aclnnInplaceBernoulli(x.raw, scalar(F64, 0.3), 7, 4);
    }
    assert!(
        (moments(&x.values()).0 - 0.3).abs() < 0.02
            && x.values().iter().all(|x| *x == 0.0 || *x == 1.0)
    );
    check! { device;
        aclnnInplaceBernoulli(x.raw, scalar(F64, 0.3), 7, 2)
            refuses PARAM_INVALID, "a multiple of 4";
        aclnnInplaceBernoulli(x.raw, scalar(I64, 1.0), 7, 4)
            refuses PARAM_INVALID, "prob is Int64";
    }
    let (_, executor) = plan!(aclnnInplaceNormal(x.raw, 2.0, 0.5, 7, 0)).expect("plans");
    // SAFETY: a live executor.
    unsafe {
        assert_eq!(aclSetAclOpExecutorRepeatable(executor), 561000);
        assert_eq!(aclDestroyAclOpExecutor(executor), 0);
    }
}
