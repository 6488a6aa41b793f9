//! `ModuleOps`.

use burn::backend::ops::{
    AttentionModuleOptions, ConvOptions, ConvTransposeOptions, DeformConvOptions, InterpolateMode,
    InterpolateOptions, UnfoldOptions,
};
use burn::backend::{Backend, BoolStore, DType};

use super::families::ops;
use super::shapes::SAMPLES;
use crate::support::compare::Tolerance::{Exact, Scaled};
use crate::support::input::{
    Input, POSITIVE, Range, SPREAD, UNIT, Value,
    View::{self, Contiguous, Sliced, Stepped, SteppedTransposed, Transposed},
};
use crate::support::suite::{Suite, op};

const FLAG: DType = DType::Bool(BoolStore::Native);
const INDEX: DType = DType::I32;
const VIEWS: [View; 4] = [Contiguous, Transposed, Sliced, SteppedTransposed];

/// Linear layers, embeddings, norms.
pub(crate) fn layers<B: Backend>(s: &mut Suite<B>) {
    for (shape, view) in [
        (vec![1, 1], Contiguous),
        (vec![3, 4], Transposed),
        (vec![2, 5], Stepped),
        (vec![2, 3, 4], Sliced),
        (vec![2, 1, 3, 4], SteppedTransposed),
        (vec![2, 1, 2, 2, 3], Transposed),
        (vec![0, 4], Contiguous),
    ] {
        let inner = shape[shape.len() - 1];
        let mut out = shape.clone();
        out[shape.len() - 1] = 6;
        let x = s.input(&shape, view, &SPREAD);
        let weight = s.input(&[inner, 6], Transposed, &UNIT);
        let bias = s.plain(&[6], &SPREAD);
        let grad = s.input(&out, view, &UNIT);
        ops!(s, Scaled(16), [x.clone(), weight.clone(), bias], "", |a|
            Float::linear(a.f(), a.f(), Some(a.f())););
        ops!(s, Scaled(16), [x.clone(), weight.clone()], "no bias", |a|
            Float::linear(a.f(), a.f(), None););
        ops!(s, Scaled(16), [weight, grad.clone()], "", |a|
            Float::linear_x_backward(a.f(), a.f()););
        ops!(s, Scaled(16), [x.clone(), grad.clone()], "", |a|
            Float::linear_weight_backward(a.f(), a.f()););
        ops!(s, Scaled(16), [grad], "", |a| Float::linear_bias_backward(a.f()););
    }
    for (batch, tokens, rows, width) in [(2, 3, 7, 4), (1, 1, 1, 1), (2, 0, 5, 3), (3, 5, 4, 2)] {
        for view in [Contiguous, Transposed, Stepped] {
            for dtype in [DType::I32, DType::I64] {
                let weights = s.input(&[rows, width], view, &SPREAD);
                // Tokens repeat: their gradients add up.
                let ids = s.typed(&[batch, tokens], view, dtype, &Range::Whole(0, rows as i64));
                let grad = s.input(&[batch, tokens, width], view, &SPREAD);
                ops!(s, Exact, [weights.clone(), ids.clone()], "", |a|
                    Float::embedding(a.f(), a.i()););
                ops!(s, Scaled(8), [weights, grad, ids], "", |a|
                    Float::embedding_backward(a.f(), a.f(), a.i()););
            }
        }
    }
    for (shape, view) in SAMPLES.iter().filter(|(shape, _)| !shape.contains(&0)) {
        let width = [shape[shape.len() - 1]];
        let x = s.input(shape, *view, &SPREAD);
        let gamma = s.plain(&width, &POSITIVE);
        let beta = s.plain(&width, &SPREAD);
        ops!(s, Scaled(64), [x.clone(), gamma.clone(), beta], "", |a|
            Float::layer_norm(a.f(), a.f(), Some(a.f()), 1e-3););
        ops!(s, Scaled(64), [x, gamma], "no beta", |a|
            Float::layer_norm(a.f(), a.f(), None, 1e-3););
    }
    for (shape, view) in [
        (vec![4, 3], Transposed),
        (vec![2, 3, 4], Sliced),
        (vec![2, 3, 2, 4], SteppedTransposed),
        (vec![2, 1, 3, 2, 2], Contiguous),
    ] {
        let channels = [shape[1]];
        let x = s.input(&shape, view, &SPREAD);
        let gamma = s.plain(&channels, &POSITIVE);
        let beta = s.plain(&channels, &SPREAD);
        let mean = s.plain(&channels, &UNIT);
        let variance = s.plain(&channels, &POSITIVE);
        let grad = s.input(&shape, view, &UNIT);
        op!(
            s,
            Scaled(32),
            [
                x.clone(),
                gamma.clone(),
                beta.clone(),
                mean.clone(),
                variance.clone()
            ],
            |a| Float::batch_norm(a.f(), a.f(), a.f(), a.f(), a.f(), 1e-3)
        );
        s.push(
            "batch_norm_train",
            "",
            vec![x.clone(), gamma.clone(), beta],
            Scaled(64),
            |a| {
                let out = B::batch_norm_train(a.f(), a.f(), a.f(), 1e-3);
                vec![
                    Value::Float(out.output),
                    Value::Float(out.mean),
                    Value::Float(out.variance),
                ]
            },
        );
        s.push(
            "batch_norm_train_backward",
            "",
            vec![x, gamma, mean, variance, grad],
            Scaled(64),
            |a| {
                let out = B::batch_norm_train_backward(a.f(), a.f(), a.f(), a.f(), 1e-3, a.f());
                vec![
                    Value::Float(out.x_grad),
                    Value::Float(out.gamma_grad),
                    Value::Float(out.beta_grad),
                ]
            },
        );
    }
}

/// Attention, losses over sequences.
pub(crate) fn sequences<B: Backend>(s: &mut Suite<B>) {
    let options = |scale, softcap, is_causal| AttentionModuleOptions {
        scale,
        softcap,
        is_causal,
    };
    for view in VIEWS {
        let q = s.input(&[2, 2, 3, 4], view, &UNIT);
        let k = s.input(&[2, 2, 5, 4], view, &UNIT);
        let v = s.input(&[2, 2, 5, 6], view, &SPREAD);
        let bias = s.input(&[2, 2, 3, 5], view, &SPREAD);
        // The first key stays visible, so that no row is masked whole.
        let hidden = (0..60)
            .map(|at| f64::from(u8::from(at % 5 != 0 && at % 3 == 0)))
            .collect();
        let mask = s.typed(&[2, 2, 3, 5], view, FLAG, &Range::Listed(hidden));
        let qkv = [q, k, v];
        for options in [
            options(None, None, false),
            options(Some(0.3), Some(5.0), false),
        ] {
            ops!(s, Scaled(32), qkv.clone(), format!("{options:?}"), |a|
                Float::attention(a.f(), a.f(), a.f(), None, None, options););
        }
        let plain = options(None, None, false);
        let all = qkv.iter().cloned().chain([mask, bias]);
        ops!(s, Scaled(32), all.collect::<Vec<_>>(), "mask and bias", |a|
            Float::attention(a.f(), a.f(), a.f(), Some(a.b()), Some(a.f()), plain););
        let square = [(); 3].map(|()| s.input(&[1, 2, 4, 3], view, &UNIT));
        let causal = options(None, None, true);
        ops!(s, Scaled(32), square, "causal", |a|
            Float::attention(a.f(), a.f(), a.f(), None, None, causal););
    }
    // [time, batch, classes] log-probabilities; class 0 is the blank.
    let log_probs = s.plain(&[6, 2, 4], &Range::Uniform(-3.0, -0.5));
    let targets = s.typed(
        &[2, 2],
        Contiguous,
        INDEX,
        &Range::Listed(vec![1.0, 2.0, 3.0, 3.0]),
    );
    let inputs = s.typed(&[2], Contiguous, INDEX, &Range::Listed(vec![6.0, 5.0]));
    let lengths = s.typed(&[2], Contiguous, INDEX, &Range::Listed(vec![2.0, 2.0]));
    ops!(s, Scaled(32), [log_probs, targets, inputs, lengths], "", |a|
        Float::ctc_loss(a.f(), a.i(), a.i(), a.i(), 0););
}

/// A convolution with a bias, and the gradients of its weight and bias.
macro_rules! layer {
    ($s:ident, [$x:ident, $weight:ident, $bias:ident, $grad:ident], $options:ident,
     $conv:ident $weight_backward:ident $bias_backward:ident) => {{
        let note = format!("{:?}", $options);
        let [o1, o2] = [(); 2].map(|()| $options.clone());
        let inputs = [$x.clone(), $weight.clone(), $bias.clone()];
        op!($s, Scaled(32), inputs, note.clone(), |a| {
            Float::$conv(a.f(), a.f(), Some(a.f()), o1.clone())
        });
        let inputs = [$x.clone(), $weight, $grad.clone()];
        op!($s, Scaled(32), inputs, note.clone(), |a| {
            Float::$weight_backward(a.f(), a.f(), a.f(), o2.clone())
        });
        op!($s, Scaled(32), [$x, $bias, $grad], note, |a| {
            Float::$bias_backward(a.f(), a.f(), a.f())
        });
    }};
}

/// Expands for 1, 2 and 3 spatial dimensions.
macro_rules! convolutions {
    ($s:ident, $n:literal, $conv:ident $x_backward:ident $weight_backward:ident $bias_backward:ident,
     $transpose:ident $tx_backward:ident $tweight_backward:ident $tbias_backward:ident) => {{
        let spatial: [usize; $n] = std::array::from_fn(|d| 5 + d);
        let kernel: [usize; $n] = std::array::from_fn(|d| 2 + d % 2);
        // Plain; everything set; groups; patches, where the kernel's size is its stride.
        let options = [
            ConvOptions::<$n>::new([1; $n], [0; $n], [1; $n], 1),
            ConvOptions::<$n>::new([2; $n], [1; $n], [2; $n], 1),
            ConvOptions::<$n>::new([1; $n], [1; $n], [1; $n], 2),
            ConvOptions::<$n>::new(kernel, [0; $n], [1; $n], 1),
        ];
        for (options, view) in options.into_iter().zip(VIEWS) {
            let patches = options.stride == kernel && kernel != [1; $n];
            let size: [usize; $n] =
                std::array::from_fn(|d| if patches { 2 * kernel[d] } else { spatial[d] });
            let out: [usize; $n] = std::array::from_fn(|d| {
                (size[d] + 2 * options.padding[d].0 - options.dilation[d] * (kernel[d] - 1) - 1)
                    / options.stride[d]
                    + 1
            });
            let x = $s.input(&[&[2, 4][..], &size].concat(), view, &UNIT);
            let weight = $s.input(
                &[&[6, 4 / options.groups][..], &kernel].concat(),
                view,
                &UNIT,
            );
            let bias = $s.plain(&[6], &UNIT);
            let grad = $s.input(&[&[2, 6][..], &out].concat(), view, &UNIT);
            let (o, note) = (options.clone(), format!("no bias {options:?}"));
            op!($s, Scaled(32), [x.clone(), weight.clone()], note, |a| {
                Float::$conv(a.f(), a.f(), None, o.clone())
            });
            let inputs = [x.clone(), weight.clone(), grad.clone()];
            let (o, note) = (options.clone(), format!("{options:?}"));
            op!($s, Scaled(32), inputs, note, |a| {
                Float::$x_backward(a.f(), a.f(), a.f(), o.clone())
            });
            layer!($s, [x, weight, bias, grad], options, $conv $weight_backward $bias_backward);
        }
        let options = [
            ConvTransposeOptions::<$n>::new([1; $n], [0; $n], [0; $n], [1; $n], 1),
            ConvTransposeOptions::<$n>::new([2; $n], [1; $n], [1; $n], [1; $n], 1),
            ConvTransposeOptions::<$n>::new([1; $n], [1; $n], [0; $n], [2; $n], 2),
        ];
        for (options, view) in options.into_iter().zip(VIEWS) {
            let size: [usize; $n] = std::array::from_fn(|d| 3 + d);
            let out: [usize; $n] = std::array::from_fn(|d| {
                (size[d] - 1) * options.stride[d]
                    + options.dilation[d] * (kernel[d] - 1)
                    + 1
                    + options.padding_out[d]
                    - 2 * options.padding[d]
            });
            let channels_out = 3 * options.groups;
            let x = $s.input(&[&[2, 4][..], &size].concat(), view, &UNIT);
            let weight = $s.input(&[&[4, 3][..], &kernel].concat(), view, &UNIT);
            let bias = $s.plain(&[channels_out], &UNIT);
            let grad = $s.input(&[&[2, channels_out][..], &out].concat(), view, &UNIT);
            let (o, note) = (options.clone(), format!("{options:?}"));
            op!($s, Scaled(32), [weight.clone(), grad.clone()], note, |a| {
                Float::$tx_backward(a.f(), a.f(), o.clone())
            });
            layer!($s, [x, weight, bias, grad], options, $transpose $tweight_backward $tbias_backward);
        }
    }};
}

/// Convolutions of all kinds.
pub(crate) fn convolutions<B: Backend>(s: &mut Suite<B>) {
    convolutions!(s, 1,
        conv1d conv1d_x_backward conv1d_weight_backward conv1d_bias_backward,
        conv_transpose1d conv_transpose1d_x_backward conv_transpose1d_weight_backward conv_transpose1d_bias_backward);
    convolutions!(s, 2,
        conv2d conv2d_x_backward conv2d_weight_backward conv2d_bias_backward,
        conv_transpose2d conv_transpose2d_x_backward conv_transpose2d_weight_backward conv_transpose2d_bias_backward);
    convolutions!(s, 3,
        conv3d conv3d_x_backward conv3d_weight_backward conv3d_bias_backward,
        conv_transpose3d conv_transpose3d_x_backward conv_transpose3d_weight_backward conv_transpose3d_bias_backward);
    for view in [Contiguous, Transposed] {
        let x = s.input(&[2, 2, 4, 4], view, &UNIT);
        let offset = s.input(&[2, 18, 4, 4], view, &UNIT);
        let weight = s.input(&[3, 2, 3, 3], view, &UNIT);
        let mask = s.input(&[2, 9, 4, 4], view, &POSITIVE);
        let bias = s.plain(&[3], &UNIT);
        let grad = s.input(&[2, 3, 4, 4], view, &UNIT);
        let options = DeformConvOptions::new([1, 1], [1, 1], [1, 1], 1, 1);
        let backward = options.clone();
        let forward: [Input; 5] = [x, offset, weight, mask, bias];
        ops!(s, Scaled(64), forward.clone(), "", |a|
            Float::deform_conv2d(a.f(), a.f(), a.f(), Some(a.f()), Some(a.f()), options.clone()););
        let inputs = forward.into_iter().chain([grad]).collect();
        s.push("deform_conv2d_backward", "", inputs, Scaled(64), move |a| {
            let out = B::deform_conv2d_backward(
                a.f(),
                a.f(),
                a.f(),
                Some(a.f()),
                Some(a.f()),
                a.f(),
                backward.clone(),
            );
            let given = [out.x_grad, out.offset_grad, out.weight_grad];
            given
                .into_iter()
                .chain(out.mask_grad)
                .chain(out.bias_grad)
                .map(Value::Float)
                .collect()
        });
    }
    for (options, view) in [
        (UnfoldOptions::new([1, 1], [0, 0], [1, 1]), Contiguous),
        (UnfoldOptions::new([2, 1], [1, 0], [1, 2]), Transposed),
        (UnfoldOptions::new([2, 3], [0, 0], [1, 1]), Stepped),
    ] {
        let (size, kernel) = ([4, 6], [2, 3]);
        let blocks: usize = (0..2)
            .map(|d| {
                (size[d] + 2 * options.padding[d] - options.dilation[d] * (kernel[d] - 1) - 1)
                    / options.stride[d]
                    + 1
            })
            .product();
        let x = s.input(&[2, 3, 4, 6], view, &SPREAD);
        let columns = s.input(&[2, 18, blocks], view, &SPREAD);
        let note = format!("{options:?}");
        let fold = options.clone();
        ops!(s, Exact, [x], note.clone(), |a| Float::unfold4d(a.f(), kernel, options.clone()););
        ops!(s, Scaled(16), [columns], note, |a| Float::fold4d(a.f(), size, kernel, fold.clone()););
    }
}

/// Pooling and resizing.
pub(crate) fn pooling<B: Backend>(s: &mut Suite<B>) {
    for (view, padding, counted, ceil) in [
        (Contiguous, 0, true, false),
        (Transposed, 1, true, false),
        (Stepped, 1, false, false),
        (Sliced, 0, true, true),
    ] {
        let note = format!("padding {padding} counted {counted} ceil {ceil}");
        let x1 = s.input(&[2, 3, 7], view, &Range::Distinct);
        let x2 = s.input(&[1, 2, 6, 7], view, &Range::Distinct);
        let out = |size: usize, kernel: usize, stride: usize| {
            let reach = size + 2 * padding - kernel;
            if ceil {
                reach.div_ceil(stride) + 1
            } else {
                reach / stride + 1
            }
        };
        let g1 = s.input(&[2, 3, out(7, 3, 2)], view, &UNIT);
        let g2 = s.input(&[1, 2, out(6, 2, 2), out(7, 3, 2)], view, &UNIT);
        ops!(s, Scaled(8), [x1.clone()], note.clone(), |a|
            Float::avg_pool1d(a.f(), 3, 2, padding, counted, ceil););
        ops!(s, Scaled(8), [x1.clone(), g1.clone()], note.clone(), |a|
            Float::avg_pool1d_backward(a.f(), a.f(), 3, 2, padding, counted, ceil););
        ops!(s, Scaled(8), [x2.clone()], note.clone(), |a|
            Float::avg_pool2d(a.f(), [2, 3], [2, 2], [padding; 2], counted, ceil););
        ops!(s, Scaled(8), [x2.clone(), g2.clone()], note.clone(), |a|
            Float::avg_pool2d_backward(a.f(), a.f(), [2, 3], [2, 2], [padding; 2], counted, ceil););
        ops!(s, Exact, [x1.clone()], note.clone(), |a|
            Float::max_pool1d(a.f(), 3, 2, padding, 1, ceil););
        ops!(s, Exact, [x2.clone()], note.clone(), |a|
            Float::max_pool2d(a.f(), [2, 3], [2, 2], [padding; 2], [1, 1], ceil););
        s.push(
            "max_pool1d_with_indices",
            note.clone(),
            vec![x1.clone()],
            Exact,
            move |a| {
                let out = B::max_pool1d_with_indices(a.f(), 3, 2, padding, 1, ceil, INDEX.into());
                vec![Value::Float(out.output), Value::Int(out.indices)]
            },
        );
        s.push(
            "max_pool2d_with_indices",
            note.clone(),
            vec![x2.clone()],
            Exact,
            move |a| {
                let out = B::max_pool2d_with_indices(
                    a.f(),
                    [2, 3],
                    [2, 2],
                    [padding; 2],
                    [1, 1],
                    ceil,
                    INDEX.into(),
                );
                vec![Value::Float(out.output), Value::Int(out.indices)]
            },
        );
        s.push(
            "max_pool1d_with_indices_backward",
            note.clone(),
            vec![x1, g1],
            Scaled(8),
            move |a| {
                let x = a.f();
                let indices =
                    B::max_pool1d_with_indices(x.clone(), 3, 2, padding, 1, ceil, INDEX.into())
                        .indices;
                let out =
                    B::max_pool1d_with_indices_backward(x, 3, 2, padding, 1, ceil, a.f(), indices);
                vec![Value::Float(out.x_grad)]
            },
        );
        s.push(
            "max_pool2d_with_indices_backward",
            note,
            vec![x2, g2],
            Scaled(8),
            move |a| {
                let x = a.f();
                let (kernel, stride, padding) = ([2, 3], [2, 2], [padding; 2]);
                let indices = B::max_pool2d_with_indices(
                    x.clone(),
                    kernel,
                    stride,
                    padding,
                    [1, 1],
                    ceil,
                    INDEX.into(),
                )
                .indices;
                let out = B::max_pool2d_with_indices_backward(
                    x,
                    kernel,
                    stride,
                    padding,
                    [1, 1],
                    ceil,
                    a.f(),
                    indices,
                );
                vec![Value::Float(out.x_grad)]
            },
        );
    }
    for view in VIEWS {
        let x1 = s.input(&[2, 3, 7], view, &SPREAD);
        let x2 = s.input(&[2, 2, 5, 6], view, &SPREAD);
        let x3 = s.input(&[1, 2, 4, 5, 6], view, &SPREAD);
        let g1 = s.input(&[2, 3, 3], view, &UNIT);
        let g2 = s.input(&[2, 2, 2, 4], view, &UNIT);
        let g3 = s.input(&[1, 2, 2, 3, 4], view, &UNIT);
        ops!(s, Scaled(8), [x1.clone()], "", |a| Float::adaptive_avg_pool1d(a.f(), 3););
        ops!(s, Scaled(8), [x2.clone()], "", |a| Float::adaptive_avg_pool2d(a.f(), [2, 4]););
        ops!(s, Scaled(8), [x3.clone()], "", |a| Float::adaptive_avg_pool3d(a.f(), [2, 3, 4]););
        ops!(s, Scaled(8), [x1, g1], "", |a| Float::adaptive_avg_pool1d_backward(a.f(), a.f()););
        ops!(s, Scaled(8), [x2.clone(), g2], "", |a|
            Float::adaptive_avg_pool2d_backward(a.f(), a.f()););
        ops!(s, Scaled(8), [x3, g3], "", |a| Float::adaptive_avg_pool3d_backward(a.f(), a.f()););
        let grad = s.input(&[2, 2, 8, 9], view, &UNIT);
        // Flex, and with it every fallback, refuses `NearestExact`.
        for mode in [
            InterpolateMode::Nearest,
            InterpolateMode::Bilinear,
            InterpolateMode::Bicubic,
            InterpolateMode::Lanczos3,
        ] {
            let note = format!("{mode:?}");
            let options = InterpolateOptions::new(mode.clone()).with_align_corners(false);
            let forward = options.clone();
            ops!(s, Scaled(32), [x2.clone()], note.clone(), |a|
                Float::interpolate(a.f(), [8, 9], forward.clone()););
            if matches!(mode, InterpolateMode::Nearest) {
                ops!(s, Scaled(32), [x2.clone(), grad.clone()], note, |a|
                    Float::interpolate_backward(a.f(), a.f(), [8, 9], options.clone()););
            }
        }
    }
}
