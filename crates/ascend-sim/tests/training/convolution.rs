//! Convolutions, by their definition.

use std::ptr::{null, null_mut};

use ascend_sim::abi::aclnn::*;
use ascend_sim::abi::operators::*;
use ascend_sim::control;

use crate::harness::*;
use crate::support::{Device, recent_message};

/// A convolution of two axes by its definition.
struct Definition {
    dims: [usize; 4],
    weight: [usize; 4],
    stride: usize,
    padding: usize,
    dilation: usize,
    groups: usize,
}

impl Definition {
    fn out(&self) -> [usize; 4] {
        let size = |axis: usize| {
            (self.dims[axis] + 2 * self.padding - self.dilation * (self.weight[axis] - 1) - 1)
                / self.stride
                + 1
        };
        [self.dims[0], self.weight[0], size(2), size(3)]
    }

    fn apply(&self, x: &[f64], w: &[f64], b: &[f64]) -> Vec<f64> {
        let [_, channels, height, width] = self.dims;
        let [given, taken, kh, kw] = self.weight;
        let [batch, _, rows, columns] = self.out();
        let mut y = Vec::new();
        for n in 0..batch {
            for o in 0..given {
                let group = o / (given / self.groups);
                for r in 0..rows {
                    for c in 0..columns {
                        let mut sum = b[o];
                        for i in 0..taken {
                            for p in 0..kh {
                                for q in 0..kw {
                                    let (h, v) = (
                                        r * self.stride + p * self.dilation,
                                        c * self.stride + q * self.dilation,
                                    );
                                    let (Some(h), Some(v)) =
                                        (h.checked_sub(self.padding), v.checked_sub(self.padding))
                                    else {
                                        continue;
                                    };
                                    if h < height && v < width {
                                        sum += x[((n * channels + group * taken + i) * height + h)
                                            * width
                                            + v]
                                            * w[((o * taken + i) * kh + p) * kw + q];
                                    }
                                }
                            }
                        }
                        y.push(sum);
                    }
                }
            }
        }
        y
    }
}

#[test]
fn convolutions_and_their_gradients() {
    let device = Device::new();
    let image = |dtype: Type, dims: [usize; 4], data: &[f64]| {
        let dims = dims.map(|dim| dim as i64);
        let plain = device.tensor(dtype, &dims, data);
        Tensor {
            raw: describe(&dims, None, 0, dtype, NCHW, data.len(), plain.address),
            ..plain
        }
    };
    let count = |dims: [usize; 4]| dims.iter().product::<usize>();
    for case in [
        Definition {
            dims: [2, 3, 4, 4],
            weight: [5, 3, 2, 2],
            stride: 2,
            padding: 0,
            dilation: 1,
            groups: 1,
        },
        Definition {
            dims: [1, 4, 5, 6],
            weight: [6, 2, 3, 3],
            stride: 1,
            padding: 1,
            dilation: 2,
            groups: 2,
        },
    ] {
        let out_dims = case.out();
        let (x, w, b) = (
            numbers(count(case.dims), 12),
            numbers(count(case.weight), 13),
            numbers(case.weight[0], 14),
        );
        let g = numbers(count(out_dims), 15);
        let (input, weight) = (image(F32, case.dims, &x), image(F32, case.weight, &w));
        let (bias, output) = (
            device.tensor(F32, &[b.len() as i64], &b),
            image(F32, out_dims, &vec![0.0; g.len()]),
        );
        let pair = |x: usize| ints(&[x as i64; 2]);
        let (stride, padding, dilation) =
            (pair(case.stride), pair(case.padding), pair(case.dilation));
        check! { device;
            aclnnConvolution aclnnConvolutionGetWorkspaceSize(input.raw, weight.raw, bias.raw, stride, padding, dilation, false, pair(0), case.groups as i64, output.raw, 1) => output near case.apply(&x, &w, &b), 1e-5;
        }
        let gradient = image(F32, out_dims, &g);
        let (dx, dw, db) = (
            image(F32, case.dims, &x),
            image(F32, case.weight, &w),
            device.out(F32, &[b.len() as i64]),
        );
        check! { device;
            aclnnConvolutionBackward aclnnConvolutionBackwardGetWorkspaceSize(gradient.raw, input.raw, weight.raw, ints(&[b.len() as i64]), stride, padding, dilation, false, pair(0), case.groups as i32, bools(&[true; 3]), 0, dx.raw, dw.raw, db.raw) => dx near numeric(&|x| case.apply(x, &w, &b), &x, &g), 1e-5;
        }
        assert_close(
            &dw.values(),
            &numeric(&|w| case.apply(&x, w, &b), &w, &g),
            1e-5,
            "dw",
        );
        assert_close(
            &db.values(),
            &numeric(&|b| case.apply(&x, &w, b), &b, &g),
            1e-5,
            "db",
        );
        // A transposed convolution is the gradient of the input of the plain one.
        if case.groups == 1 {
            check! { device;
                aclnnConvolution aclnnConvolutionGetWorkspaceSize(gradient.raw, weight.raw, null(), stride, padding, dilation, true, pair(0), 1, dx.raw, 1) => dx near numeric(&|x| case.apply(x, &w, &b), &x, &g), 1e-5;
            }
        }
        let forward = |format: *mut aclTensor, math: i8| {
            plan!(aclnnConvolutionGetWorkspaceSize(
                format,
                weight.raw,
                bias.raw,
                stride,
                padding,
                dilation,
                false,
                pair(0),
                case.groups as i64,
                output.raw,
                math
            ))
        };
        assert_refused(forward(input.raw, 0), PARAM_INVALID, "cubeMathType is 0");
        let plain = device.tensor(F32, &case.dims.map(|dim| dim as i64), &x);
        assert_refused(forward(plain.raw, 1), INNER_NULLPTR, "NCHW (0)");
    }
    assert_eq!(control::violations(), []);
}
