//! Gradients through burn's autodiff over the backend, compared with those over Flex.

use burn::backend::flex::{Flex, FlexDevice};
use burn::backend::ops::{
    ActivationOps, AttentionModuleOptions, ConvOptions, FloatTensorOps, IntTensorOps, ModuleOps,
};
use burn::backend::tensor::{Device, FloatTensor, IndexingUpdateOp};
use burn::backend::{
    Autodiff, AutodiffBackend, Backend, BoolStore, DType, TensorData, TensorMetadata, read_sync,
};
use burn::tensor::{FloatDType, Shape, Slice};
use burn_attention::{
    AdapterOps, Bias, GatedLinearOps, GroupedLinearOp, GroupedLinearOps, RoutesOps, Sequences,
    ShortConvolutionOp, ShortConvolutionOps, SwiGluOps,
};

use super::compare::{Tolerance, compare};
use super::input::{
    FLAGS, Input, POSITIVE, Random, Range, SPREAD, UNIT, Value,
    View::{self, Contiguous, Sliced, Stepped, Transposed},
};
use super::suite::{Args, Failures, caught};

/// A backend with the operations that are tested.
pub(crate) trait Tested:
    GatedLinearOps + GroupedLinearOps + RoutesOps + ShortConvolutionOps
{
}

impl<B: GatedLinearOps + GroupedLinearOps + RoutesOps + ShortConvolutionOps> Tested for B {}

type A<B> = Autodiff<B>;
type Expression<B> = Box<dyn Fn(&mut Args<A<B>>) -> FloatTensor<A<B>>>;

struct Gradient<B: Backend> {
    name: &'static str,
    inputs: Vec<Input>,
    expression: Expression<B>,
}

struct Gradients<B: Backend> {
    dtype: DType,
    random: Random,
    all: Vec<Gradient<B>>,
}

impl<B: Backend> Gradients<B> {
    fn x(&mut self, shape: &[usize], view: View, range: &Range) -> Input {
        Input::new(shape, view, self.dtype, range, &mut self.random)
    }

    fn indices(&mut self, shape: &[usize], bound: i64) -> Input {
        Input::new(
            shape,
            Contiguous,
            DType::I32,
            &Range::Whole(0, bound),
            &mut self.random,
        )
    }

    fn push(
        &mut self,
        name: &'static str,
        inputs: Vec<Input>,
        expression: impl Fn(&mut Args<A<B>>) -> FloatTensor<A<B>> + 'static,
    ) {
        self.all.push(Gradient {
            name,
            inputs,
            expression: Box::new(expression),
        });
    }

    fn unary(
        &mut self,
        name: &'static str,
        range: &Range,
        f: fn(FloatTensor<A<B>>) -> FloatTensor<A<B>>,
    ) {
        for view in [Contiguous, Transposed, Stepped] {
            let x = self.x(&[3, 4], view, range);
            self.push(name, vec![x], move |a| f(a.f()));
        }
    }
}

/// Mean over the last dimension.
fn mean_last<B: Backend>(x: FloatTensor<A<B>>) -> FloatTensor<A<B>> {
    let last = x.rank() - 1;
    A::<B>::float_mean_dim(x, last)
}

fn expressions<B: Tested>(g: &mut Gradients<B>) {
    g.unary("exp", &SPREAD, A::<B>::float_exp);
    g.unary("log", &POSITIVE, A::<B>::float_log);
    g.unary("sqrt", &POSITIVE, A::<B>::float_sqrt);
    g.unary("recip", &POSITIVE, A::<B>::float_recip);
    g.unary("sin", &SPREAD, A::<B>::float_sin);
    g.unary("cos", &SPREAD, A::<B>::float_cos);
    g.unary("tanh", &SPREAD, A::<B>::float_tanh);
    g.unary("abs", &SPREAD, A::<B>::float_abs);
    g.unary("erf", &SPREAD, A::<B>::float_erf);
    g.unary("square", &SPREAD, |x| {
        A::<B>::float_powf_scalar(x, 2.0.into())
    });
    g.unary("relu", &SPREAD, A::<B>::relu);
    g.unary("gelu", &SPREAD, A::<B>::gelu);
    g.unary("sigmoid", &SPREAD, A::<B>::sigmoid);
    g.unary("log_sigmoid", &SPREAD, A::<B>::log_sigmoid);
    g.unary("silu", &SPREAD, |x| {
        A::<B>::float_mul(x.clone(), A::<B>::sigmoid(x))
    });
    g.unary("softmax", &SPREAD, |x| A::<B>::softmax(x, 1));
    g.unary("log_softmax", &SPREAD, |x| A::<B>::log_softmax(x, 1));
    g.unary("mean", &SPREAD, A::<B>::float_mean);
    g.unary("sum_dim", &SPREAD, |x| A::<B>::float_sum_dim(x, 0));
    g.unary("max_dim", &Range::Distinct, |x| A::<B>::float_max_dim(x, 1));
    g.unary("min_dim", &Range::Distinct, |x| A::<B>::float_min_dim(x, 0));
    g.unary("clamp", &SPREAD, |x| {
        A::<B>::float_clamp(x, (-1.0).into(), 1.0.into())
    });
    g.unary("cumsum", &SPREAD, |x| A::<B>::float_cumsum(x, 1));
    g.unary("flip", &SPREAD, |x| A::<B>::float_flip(x, &[0, 1]));
    g.unary("repeat", &SPREAD, |x| A::<B>::float_repeat_dim(x, 0, 3));
    g.unary("reshape of a permutation", &SPREAD, |x| {
        A::<B>::float_reshape(A::<B>::float_permute(x, &[1, 0]), Shape::new([2, 6]))
    });
    g.unary("slices joined", &SPREAD, |x| {
        let (all, half) = (Slice::new(0, None, 1), |from, to| {
            Slice::new(from, Some(to), 1)
        });
        let left = A::<B>::float_slice(x.clone(), &[all, half(0, 2)]);
        let right = A::<B>::float_slice(x, &[all, half(2, 4)]);
        // As a rotary embedding turns halves.
        A::<B>::float_cat(vec![A::<B>::float_neg(right), left], 1)
    });
    g.unary("root mean square norm", &SPREAD, |x| {
        let squares = A::<B>::float_powf_scalar(x.clone(), 2.0.into());
        let mean = A::<B>::float_add_scalar(mean_last::<B>(squares), 1e-3.into());
        A::<B>::float_mul(x, A::<B>::float_recip(A::<B>::float_sqrt(mean)))
    });

    for (l, r) in [
        (vec![3, 4], vec![3, 4]),
        (vec![3, 1], vec![1, 4]),
        (vec![2, 3, 4], vec![1, 1, 4]),
    ] {
        for view in [Contiguous, Transposed] {
            let operands = vec![g.x(&l, view, &SPREAD), g.x(&r, Stepped, &POSITIVE)];
            g.push("add", operands.clone(), |a| A::<B>::float_add(a.f(), a.f()));
            g.push("sub", operands.clone(), |a| A::<B>::float_sub(a.f(), a.f()));
            g.push("mul", operands.clone(), |a| A::<B>::float_mul(a.f(), a.f()));
            g.push("div", operands, |a| A::<B>::float_div(a.f(), a.f()));
        }
    }
    for (l, r) in [
        (vec![3, 4], vec![4, 5]),
        (vec![2, 3, 4], vec![2, 4, 5]),
        (vec![2, 3, 4], vec![1, 4, 5]),
        (vec![2, 1, 3, 4], vec![1, 2, 4, 3]),
    ] {
        for view in [Contiguous, Transposed, Sliced] {
            let operands = vec![g.x(&l, view, &UNIT), g.x(&r, view, &UNIT)];
            g.push("matmul", operands, |a| A::<B>::float_matmul(a.f(), a.f()));
        }
    }

    let layer = vec![
        g.x(&[2, 3, 4], Sliced, &UNIT),
        g.x(&[4, 5], Transposed, &UNIT),
        g.x(&[5], Contiguous, &UNIT),
    ];
    g.push("linear", layer, |a| {
        A::<B>::linear(a.f(), a.f(), Some(a.f()))
    });
    let norm = vec![
        g.x(&[2, 3, 8], Transposed, &SPREAD),
        g.x(&[8], Contiguous, &POSITIVE),
        g.x(&[8], Contiguous, &UNIT),
    ];
    g.push("layer_norm", norm, |a| {
        A::<B>::layer_norm(a.f(), a.f(), Some(a.f()), 1e-3)
    });
    let words = vec![g.x(&[5, 4], Contiguous, &SPREAD), g.indices(&[2, 6], 5)];
    g.push("embedding", words, |a| A::<B>::embedding(a.f(), a.i()));

    let scores = vec![
        g.x(&[6, 5], Contiguous, &SPREAD),
        g.x(&[5, 7], Transposed, &UNIT),
        g.indices(&[6, 1], 7),
    ];
    g.push("cross entropy of logits", scores, |a| {
        let logits = A::<B>::float_matmul(a.f(), a.f());
        let picked = A::<B>::float_gather(1, A::<B>::log_softmax(logits, 1), a.i());
        A::<B>::float_neg(A::<B>::float_mean(picked))
    });
    let heads = [(); 3].map(|()| g.x(&[2, 2, 4, 3], Contiguous, &UNIT));
    let hidden = (0..16)
        .map(|k| f64::from(u8::from(k % 4 > k / 4)))
        .collect();
    let mask = Input::new(
        &[1, 1, 4, 4],
        Contiguous,
        DType::Bool(BoolStore::Native),
        &Range::Listed(hidden),
        &mut g.random,
    );
    let inputs = heads.iter().cloned().chain([mask]).collect();
    g.push("attention of parts, causal", inputs, |a| {
        let (q, k, v) = (a.f(), a.f(), a.f());
        let scores = A::<B>::float_matmul(q, A::<B>::float_swap_dims(k, 2, 3));
        let scores = A::<B>::float_mul_scalar(scores, 0.5.into());
        let mask = B::bool_expand(a.b(), Shape::new([2, 2, 4, 4]));
        let scores = A::<B>::float_mask_fill(scores, mask, f64::NEG_INFINITY.into());
        A::<B>::float_matmul(A::<B>::softmax(scores, 3), v)
    });
    g.push("attention", heads.into(), |a| {
        let options = AttentionModuleOptions {
            scale: None,
            softcap: None,
            is_causal: true,
        };
        A::<B>::attention(a.f(), a.f(), a.f(), None, None, options)
    });

    for view in [Contiguous, Transposed, Sliced] {
        let inputs = [(); 2].map(|()| g.x(&[9, 70], view, &SPREAD));
        g.push("gate", inputs.into(), |a| {
            A::<B>::swiglu_forward(a.f(), a.f())
        });
    }
    // Sequences shorter than the taps, borders of samples and of packed sequences, more taps than
    // the kernels have, and tensors that are no dense ones.
    for (cu_seqlens, channels, taps, view) in [
        (&[0, 1][..], 3, 4, Contiguous),
        (&[0, 2], 5, 4, Sliced),
        (&[0, 9], 6, 4, Transposed),
        (&[0, 1, 3, 4, 11], 20, 4, Sliced),
        (&[0, 5, 12], 3, 1, Contiguous),
        (&[0, 4, 12], 2, 9, Transposed),
    ] {
        let tokens = cu_seqlens[cu_seqlens.len() - 1];
        let sequences = Sequences::packed(cu_seqlens, tokens).expect("valid lengths");
        let op = ShortConvolutionOp { sequences };
        let inputs = vec![
            g.x(&[2, tokens, channels], view, &UNIT),
            g.x(&[channels, taps], view, &UNIT),
        ];
        g.push("short convolution", inputs, move |args| {
            A::<B>::short_convolution_forward(args.f(), args.f(), op.clone())
        });
    }
    for ([rows, channels, outputs], has_bias) in [([5, 6, 7], true), ([33, 40, 70], false)] {
        let shapes = [
            [rows, channels],
            [channels, outputs],
            [3, channels],
            [3, outputs],
        ];
        let mut inputs: Vec<Input> = shapes
            .iter()
            .map(|shape| g.x(shape, Contiguous, &UNIT))
            .collect();
        inputs.extend(has_bias.then(|| g.x(&[outputs], Contiguous, &UNIT)));
        let dtype = g.dtype;
        g.push("linear layer with an adapter", inputs, move |args| {
            let (x, weight, a, b) = (args.f(), args.f(), args.f(), args.f());
            let bias = if has_bias {
                Bias::Added(args.f())
            } else {
                Bias::Absent
            };
            let [a, b] = [a, b].map(|x| A::<B>::float_cast(x, FloatDType::F32));
            let factor = |x: &FloatTensor<A<B>>| {
                let x = A::<B>::inner(x.clone());
                if dtype == DType::F32 {
                    return A::<B>::from_inner(x);
                }
                let upper = B::float_cast(x.clone(), dtype.into());
                let rest = B::float_sub(x, B::float_cast(upper.clone(), FloatDType::F32));
                let lower = B::float_cast(rest, dtype.into());
                A::<B>::from_inner(B::float_cat(vec![upper, lower], 0))
            };
            let h = A::<B>::adapter_inner(factor(&a), x.clone());
            let factor = factor(&b);
            A::<B>::adapted_linear(x, weight, bias, h, a, b, factor, Bias::Absent)
        });
    }
    for (rows, inputs, outputs, view) in [(5, 6, 7, Contiguous), (33, 40, 70, Transposed)] {
        let matrices = [[rows, outputs], [rows, inputs], [inputs, outputs]];
        let matrices = matrices.map(|shape| g.x(&shape, view, &UNIT));
        g.push("linear layer onto a sum", matrices.into(), |a| {
            A::<B>::wide_linear_onto(a.f(), a.f(), a.f())
        });
        // The second layer adds to the gradient of x that the first has computed, or the reverse.
        let matrices = [[rows, inputs], [inputs, outputs], [inputs, outputs]];
        let matrices = matrices.map(|shape| g.x(&shape, view, &UNIT));
        g.push("linear layers of one x", matrices.into(), |a| {
            let x = A::<B>::float_neg(a.f());
            let mark = A::<B>::float_empty(Shape::new([1]), &x.device(), x.dtype().into());
            let [first, second] = [a.f(), a.f()].map(|weight| {
                let mark = Bias::Added(mark.clone());
                A::<B>::wide_linear(x.clone(), weight, Bias::Absent, mark)
            });
            A::<B>::float_mul(first, second)
        });
        let inputs = [
            [rows, inputs],
            [rows, inputs],
            [inputs, outputs],
            [rows, outputs],
        ];
        let inputs = inputs.map(|shape| g.x(&shape, view, &UNIT));
        g.push("gated linear layer onto a sum", inputs.into(), |a| {
            let (gate, up, weight) = (a.f(), a.f(), a.f());
            A::<B>::gated_linear(gate, up, weight, Bias::Added(a.f()))
        });
    }
    // Groups without rows, of one row, of one channel, and weights that are no dense tensors.
    for (groups, [inputs, outputs], view) in [
        (&[3, 0, 2, 1][..], [6, 4], Contiguous),
        (&[0, 7, 0], [5, 1], Transposed),
        (&[1], [1, 3], Contiguous),
        (&[0, 1], [1, 1], Contiguous),
        (&[20, 13], [40, 33], Sliced),
    ] {
        let rows: usize = groups.iter().sum();
        let inputs = vec![
            g.x(&[rows, inputs], view, &UNIT),
            g.x(&[groups.len(), outputs, inputs], view, &UNIT),
        ];
        g.push("linear layers of groups", inputs, |args| {
            let op = GroupedLinearOp {
                rows: groups.to_vec(),
            };
            A::<B>::grouped_linear_forward(args.f(), args.f(), op)
        });
    }
    // Padding, one row of each token, and tensors that are no dense ones.
    for (places, per_token, channels, view) in [
        (&[1, 3, 4, 2, 0, 5][..], 2, 5, Contiguous),
        (&[9, 9, 2, 9, 1, 0], 2, 3, Transposed),
        (&[2, 0, 1], 1, 1, Sliced),
    ] {
        let tokens = places.len() / per_token;
        let mut of_rows: Vec<(i32, i32)> = (0..).zip(places).map(|(at, row)| (*row, at)).collect();
        of_rows.retain(|(row, _)| (*row as usize) < places.len());
        of_rows.sort_unstable();
        let of_rows: Vec<i32> = of_rows
            .iter()
            .map(|(_, at)| at / per_token as i32)
            .collect();
        let rows = of_rows.len();
        let places = move |device: &B::Device| {
            let data = TensorData::new(places.to_vec(), [tokens, per_token]);
            A::<B>::int_from_data(data, device)
        };
        let x = vec![g.x(&[tokens, channels], view, &UNIT)];
        g.push("rows of tokens", x, move |args| {
            let x = args.f();
            let device = x.device();
            let of_rows = TensorData::new(of_rows.clone(), [rows]);
            let of_rows = A::<B>::int_from_data(of_rows, &device);
            A::<B>::routed_rows_forward(x, of_rows, places(&device))
        });
        let inputs = vec![
            g.x(&[rows, channels], view, &UNIT),
            g.x(&[tokens, per_token], view, &UNIT),
        ];
        g.push("sums of rows", inputs, move |args| {
            let rows = args.f();
            let shares = A::<B>::float_cast(args.f(), FloatDType::F32);
            let places = places(&rows.device());
            A::<B>::routed_sum_forward(rows, shares, places)
        });
    }

    let patches = vec![
        g.x(&[2, 3, 6, 4], Sliced, &UNIT),
        g.x(&[5, 3, 3, 2], Contiguous, &UNIT),
        g.x(&[5], Contiguous, &UNIT),
    ];
    g.push("conv2d of patches", patches, |a| {
        A::<B>::conv2d(
            a.f(),
            a.f(),
            Some(a.f()),
            ConvOptions::new([3, 2], [0, 0], [1, 1], 1),
        )
    });
    let image = vec![
        g.x(&[1, 4, 5, 6], Contiguous, &UNIT),
        g.x(&[6, 2, 3, 3], Contiguous, &UNIT),
    ];
    g.push("conv2d with padding and groups", image, |a| {
        A::<B>::conv2d(
            a.f(),
            a.f(),
            None,
            ConvOptions::new([2, 1], [1, 1], [1, 1], 2),
        )
    });
    let frames = vec![
        g.x(&[2, 3, 2, 4, 4], Contiguous, &UNIT),
        g.x(&[5, 3, 2, 2, 2], Contiguous, &UNIT),
    ];
    g.push("conv3d of patches", frames, |a| {
        A::<B>::conv3d(
            a.f(),
            a.f(),
            None,
            ConvOptions::new([2, 2, 2], [0; 3], [1; 3], 1),
        )
    });

    let taken = vec![g.x(&[4, 5], Transposed, &SPREAD), g.indices(&[3, 5], 4)];
    g.push("gather", taken, |a| A::<B>::float_gather(0, a.f(), a.i()));
    let chosen = vec![g.x(&[4, 5], Transposed, &SPREAD), g.indices(&[7], 5)];
    g.push("select", chosen, |a| A::<B>::float_select(a.f(), 1, a.i()));
    let added = |g: &mut Gradients<B>, indices: &[usize], values: &[usize]| {
        vec![
            g.x(&[4, 5], Stepped, &SPREAD),
            g.indices(indices, 4),
            g.x(values, Transposed, &SPREAD),
        ]
    };
    let inputs = added(g, &[3, 5], &[3, 5]);
    g.push("scatter", inputs, |a| {
        A::<B>::float_scatter(0, a.f(), a.i(), a.f(), IndexingUpdateOp::Add)
    });
    let inputs = added(g, &[6], &[6, 5]);
    g.push("select_assign", inputs, |a| {
        A::<B>::float_select_assign(a.f(), 0, a.i(), a.f(), IndexingUpdateOp::Add)
    });
    let inputs = vec![
        g.x(&[4, 5], Transposed, &SPREAD),
        g.x(&[2, 3], Stepped, &SPREAD),
    ];
    g.push("slice_assign", inputs, |a| {
        A::<B>::float_slice_assign(
            a.f(),
            &[Slice::new(1, Some(3), 1), Slice::new(0, Some(5), 2)],
            a.f(),
        )
    });
    let flags = Input::new(
        &[3, 4],
        Stepped,
        DType::Bool(BoolStore::Native),
        &FLAGS,
        &mut g.random,
    );
    let inputs = vec![
        g.x(&[3, 4], Transposed, &SPREAD),
        flags,
        g.x(&[3, 4], Sliced, &SPREAD),
    ];
    g.push("mask_where", inputs, |a| {
        A::<B>::float_mask_where(a.f(), a.b(), a.f())
    });
    let inputs = vec![
        g.x(&[1, 4], Contiguous, &SPREAD),
        g.x(&[3, 4], Contiguous, &SPREAD),
    ];
    g.push("expand", inputs, |a| {
        A::<B>::float_mul(A::<B>::float_expand(a.f(), Shape::new([3, 4])), a.f())
    });
    let inputs = vec![g.x(&[3, 4], Contiguous, &UNIT)];
    g.push("one tensor used again and again", inputs, |a| {
        let x = a.f();
        let product = A::<B>::float_matmul(x.clone(), A::<B>::float_swap_dims(x.clone(), 0, 1));
        A::<B>::float_matmul(A::<B>::softmax(product, 1), x)
    });
}

impl<B: Backend> Gradient<B> {
    /// The value and the gradient of every float input.
    fn run(&self, device: &Device<B>, views: bool) -> Result<Vec<TensorData>, String> {
        caught(|| {
            let leaves: Vec<Value<A<B>>> = self
                .inputs
                .iter()
                .map(|input| match views {
                    true => input.upload(device).1,
                    false => Value::upload(input.data(), device),
                })
                .map(|value| match value {
                    Value::Float(x) => Value::Float(A::<B>::float_set_require_grad(x, true)),
                    other => other,
                })
                .collect();
            let mut args = Args::new(leaves.clone(), device.clone());
            let out = (self.expression)(&mut args);
            // A gradient of the plain sum would not see elements exchanged.
            let shape = out.shape();
            let weights = Random(5).draw(&Range::Quarters, shape.num_elements());
            let weights = super::input::tensor_data(out.dtype(), &weights, &shape.to_vec());
            let weighted = A::<B>::float_mul(out.clone(), A::<B>::float_from_data(weights, device));
            let gradients = A::<B>::backward(A::<B>::float_sum(weighted));
            let mut results = vec![read_sync(B::float_into_data(A::<B>::inner(out)))];
            for leaf in &leaves {
                if let Value::Float(x) = leaf {
                    let gradient = A::<B>::grad(x, &gradients).ok_or("an input has no gradient")?;
                    results.push(read_sync(B::float_into_data(gradient)));
                }
            }
            results
                .into_iter()
                .map(|read| read.map_err(|error| format!("read failed: {error:?}")))
                .collect()
        })?
    }
}

/// Every expression's value and gradients, with inputs in views, against Flex with plain inputs.
pub(crate) fn against_flex<B: Tested>(device: &Device<B>, dtype: DType) {
    let mut flex = Gradients::<Flex> {
        dtype,
        random: Random(3),
        all: Vec::new(),
    };
    expressions(&mut flex);
    let mut tested = Gradients::<B> {
        dtype,
        random: Random(3),
        all: Vec::new(),
    };
    expressions(&mut tested);
    // A chain rounds after every op in half precision.
    let tolerance = Tolerance::Scaled(if dtype == DType::F32 { 64 } else { 12 });

    let mut failures = Failures::default();
    for (reference, case) in flex.all.iter().zip(&tested.all) {
        let inputs: Vec<String> = case.inputs.iter().map(Input::to_string).collect();
        let describe = |message| format!("{}({}): {message}", case.name, inputs.join("; "));
        let result = reference
            .run(&FlexDevice, false)
            .map_err(|message| format!("the reference {message}"))
            .and_then(|expected| Ok((expected, case.run(device, true)?)))
            .and_then(|(expected, found)| {
                expected
                    .iter()
                    .zip(&found)
                    .enumerate()
                    .try_for_each(|(k, (e, f))| {
                        let what = if k == 0 {
                            "value".into()
                        } else {
                            format!("gradient of input {}", k - 1)
                        };
                        compare(e, f, tolerance)
                            .map_err(|difference| format!("{what}: {difference}"))
                    })
            });
        failures.check(case.name, result.map_err(describe));
    }
    failures.report(&B::name(device));
}
