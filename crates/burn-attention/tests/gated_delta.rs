//! The gated delta rule and its gradients equal the recurrence, token by token in f64.

use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_attention::{AttentionError, GatedDelta, Sequences, gated_delta_step};

/// Batch, heads of q and k, heads of v, channels of q and k, channels of v.
type Sizes = [usize; 5];

const SMALL: Sizes = [1, 1, 2, 3, 2];
const GROUPED: Sizes = [2, 2, 4, 5, 6];

fn numbers(seed: u64, count: usize) -> Vec<f64> {
    crate::numbers(seed, count, DType::F64)
}

/// q, k, v, g, beta and the gradient of the output, token by token.
#[derive(Clone)]
struct Case {
    sizes: Sizes,
    tokens: usize,
    cu_seqlens: Vec<usize>,
    values: [Vec<f64>; 6],
}

impl Case {
    /// With decays around e^-0.5.
    fn new(sizes: Sizes, cu_seqlens: &[usize]) -> Self {
        let tokens = cu_seqlens[cu_seqlens.len() - 1];
        let [batch, key_heads, heads, key_dim, value_dim] = sizes;
        let rows = batch * tokens;
        let mut seed = tokens as u64;
        let mut draw = |count: usize| {
            seed += 1;
            numbers(seed, rows * count)
        };
        let values = [
            draw(key_heads * key_dim),
            draw(key_heads * key_dim),
            draw(heads * value_dim),
            draw(heads).into_iter().map(|x| 0.5 * (x - 1.0)).collect(),
            draw(heads).into_iter().map(|x| 0.5 * (x + 1.0)).collect(),
            draw(heads * value_dim),
        ];
        Self {
            sizes,
            tokens,
            cu_seqlens: cu_seqlens.to_vec(),
            values,
        }
    }

    fn whole(sizes: Sizes, tokens: usize) -> Self {
        Self::new(sizes, &[0, tokens])
    }

    fn rounded(mut self, dtype: DType) -> Self {
        let wide = if dtype == DType::F64 {
            DType::F64
        } else {
            DType::F32
        };
        for (index, values) in self.values.iter_mut().enumerate() {
            let to = if [3, 4].contains(&index) { wide } else { dtype };
            let data = TensorData::new(values.clone(), [values.len()]).convert_dtype(to);
            *values = data.iter::<f64>().collect();
        }
        self
    }
}

/// The output and the gradients of q, k, v, g and beta.
type Results = [Vec<f64>; 6];

/// x / sqrt(sum of squares + 1e-6), and the gradient of x from that of it.
fn normalised(x: &[f64]) -> Vec<f64> {
    let norm = (x.iter().map(|x| x * x).sum::<f64>() + 1e-6).sqrt();
    x.iter().map(|x| x / norm).collect()
}

fn through_norm(x: &[f64], gradient: &[f64]) -> Vec<f64> {
    let norm = (x.iter().map(|x| x * x).sum::<f64>() + 1e-6).sqrt();
    let along: f64 = x.iter().zip(gradient).map(|(x, g)| x / norm * g).sum();
    let across = x.iter().zip(gradient).map(|(x, g)| g - x / norm * along);
    across.map(|x| x / norm).collect()
}

/// One head of one sample, and where its numbers lie.
struct Head<'a> {
    case: &'a Case,
    sample: usize,
    head: usize,
}

impl Head<'_> {
    fn range(&self, input: usize, token: usize) -> std::ops::Range<usize> {
        let [_, key_heads, heads, key_dim, value_dim] = self.case.sizes;
        let key_head = self.head / (heads / key_heads);
        let (heads, head, width) = match input {
            0 | 1 => (key_heads, key_head, key_dim),
            2 | 5 => (heads, self.head, value_dim),
            _ => (heads, self.head, 1),
        };
        let at = ((self.sample * self.case.tokens + token) * heads + head) * width;
        at..at + width
    }

    fn of(&self, input: usize, token: usize) -> &[f64] {
        &self.case.values[input][self.range(input, token)]
    }

    /// Adds this head's part of the output and of the gradients.
    fn run(&self, results: &mut Results) {
        for sequence in self.case.cu_seqlens.windows(2) {
            self.sequence(sequence[0]..sequence[1], results);
        }
    }

    fn sequence(&self, tokens: std::ops::Range<usize>, results: &mut Results) {
        let [_, _, _, key_dim, value_dim] = self.case.sizes;
        let scale = 1.0 / (key_dim as f64).sqrt();
        let mut add = |into: usize, input: usize, token: usize, values: &[f64]| {
            let range = self.range(input, token);
            for (sum, value) in results[into][range].iter_mut().zip(values) {
                *sum += value;
            }
        };
        let cells = || (0..key_dim).flat_map(|i| (0..value_dim).map(move |j| (i, j)));
        // The state after it has forgotten, and after it was written to, at each token.
        let mut state = vec![0.0; key_dim * value_dim];
        let mut kept = Vec::new();
        for token in tokens.clone() {
            let [q, k] = [0, 1].map(|input| normalised(self.of(input, token)));
            let (decay, beta) = (self.of(3, token)[0].exp(), self.of(4, token)[0]);
            state.iter_mut().for_each(|x| *x *= decay);
            let forgotten = state.clone();
            let mut rest = self.of(2, token).to_vec();
            for (i, j) in cells() {
                rest[j] -= forgotten[i * value_dim + j] * k[i];
            }
            let mut out = vec![0.0; value_dim];
            for (i, j) in cells() {
                state[i * value_dim + j] += k[i] * beta * rest[j];
                out[j] += scale * state[i * value_dim + j] * q[i];
            }
            add(0, 2, token, &out);
            kept.push((forgotten, state.clone(), rest));
        }
        let mut dstate = vec![0.0; key_dim * value_dim];
        for (token, (forgotten, state, rest)) in tokens.zip(kept).rev() {
            let [q, k] = [0, 1].map(|input| normalised(self.of(input, token)));
            let (decay, beta) = (self.of(3, token)[0].exp(), self.of(4, token)[0]);
            let dout = self.of(5, token);
            let (mut dq, mut dk) = (vec![0.0; key_dim], vec![0.0; key_dim]);
            let mut dwritten = vec![0.0; value_dim];
            for (i, j) in cells() {
                let at = i * value_dim + j;
                dq[i] += scale * state[at] * dout[j];
                dstate[at] += scale * q[i] * dout[j];
                dk[i] += dstate[at] * beta * rest[j];
                dwritten[j] += dstate[at] * k[i];
            }
            let dv: Vec<f64> = dwritten.iter().map(|x| beta * x).collect();
            let dbeta: f64 = dwritten.iter().zip(&rest).map(|(x, y)| x * y).sum();
            let mut dg = 0.0;
            for (i, j) in cells() {
                let at = i * value_dim + j;
                dk[i] -= forgotten[at] * dv[j];
                dstate[at] -= k[i] * dv[j];
                dg += dstate[at] * forgotten[at];
                dstate[at] *= decay;
            }
            add(1, 0, token, &through_norm(self.of(0, token), &dq));
            add(2, 1, token, &through_norm(self.of(1, token), &dk));
            add(3, 2, token, &dv);
            add(4, 3, token, &[dg]);
            add(5, 4, token, &[dbeta]);
        }
    }
}

fn expected(case: &Case) -> Results {
    let of = |input: usize| vec![0.0; case.values[input].len()];
    let mut results = [of(5), of(0), of(1), of(2), of(3), of(4)];
    let [batch, _, heads, ..] = case.sizes;
    for sample in 0..batch {
        for head in 0..heads {
            Head { case, sample, head }.run(&mut results);
        }
    }
    results
}

fn values<const D: usize>(x: Tensor<D>) -> Vec<f64> {
    x.into_data().iter::<f64>().collect()
}

/// q, k, v, g and beta, and the gradient of the output.
fn tensors(case: &Case, dtype: DType) -> ([Tensor<4>; 3], [Tensor<3>; 2], Tensor<4>) {
    let device = Device::flex().autodiff();
    let [batch, key_heads, heads, key_dim, value_dim] = case.sizes;
    let tensor = |input: usize, heads: usize, width: usize, dtype: DType| {
        let shape = [batch, case.tokens, heads, width];
        let data = TensorData::new(case.values[input].clone(), shape);
        Tensor::<4>::from_data(data, (&device, dtype))
    };
    let wide = if dtype == DType::F64 {
        DType::F64
    } else {
        DType::F32
    };
    (
        [
            tensor(0, key_heads, key_dim, dtype).require_grad(),
            tensor(1, key_heads, key_dim, dtype).require_grad(),
            tensor(2, heads, value_dim, dtype).require_grad(),
        ],
        [3, 4].map(|input| {
            let x = tensor(input, heads, 1, wide);
            x.squeeze_dim::<3>(3).require_grad()
        }),
        tensor(5, heads, value_dim, dtype),
    )
}

fn found(case: &Case, dtype: DType, blocks: Option<usize>) -> Results {
    let ([q, k, v], [g, beta], gradient) = tensors(case, dtype);
    let sequences = Sequences::packed(&case.cu_seqlens, case.tokens).expect("valid lengths");
    let rule = GatedDelta::new(sequences).with_blocks(blocks);
    let inputs = (q.clone(), k.clone(), v.clone(), g.clone(), beta.clone());
    let (out, _) = rule
        .try_forward(inputs.0, inputs.1, inputs.2, inputs.3, inputs.4)
        .expect("it fits");
    assert_eq!(out.dtype(), dtype);
    let gradients = (out.clone() * gradient).sum().backward();
    let of = |x: &Tensor<4>| values(x.grad(&gradients).expect("a gradient"));
    let number_gradient = |x: &Tensor<3>| values(x.grad(&gradients).expect("a gradient"));
    [
        values(out),
        of(&q),
        of(&k),
        of(&v),
        number_gradient(&g),
        number_gradient(&beta),
    ]
}

const NAMES: [&str; 6] = ["out", "dq", "dk", "dv", "dg", "dbeta"];

/// Compares by the largest of the expected numbers, of inputs of order 1.
fn assert_near(found: &Results, expected: &Results, within: f64, what: &str) {
    for ((found, expected), name) in found.iter().zip(expected).zip(NAMES) {
        assert_eq!(found.len(), expected.len());
        let size = expected.iter().fold(0.1_f64, |size, x| size.max(x.abs()));
        let apart = found.iter().zip(expected).map(|(x, y)| (x - y).abs());
        let apart = apart.fold(0.0, |a: f64, b| if b >= a { b } else { a + b - b });
        let finite = found.iter().all(|x| x.is_finite());
        assert!(
            finite && apart <= within * size,
            "{what}: {name} {apart:e} of {size:e}"
        );
    }
}

#[test]
fn every_length_equals_the_recurrence() {
    let all = (1..=17).chain([
        31, 32, 33, 63, 64, 65, 127, 128, 129, 192, 193, 255, 257, 300,
    ]);
    for tokens in all {
        let case = Case::whole(SMALL, tokens);
        let what = format!("{tokens} tokens");
        assert_near(
            &found(&case, DType::F64, None),
            &expected(&case),
            1e-11,
            &what,
        );
    }
}

#[test]
fn groups_of_heads_samples_and_blocks_equal_the_recurrence() {
    for tokens in [3, 64, 150] {
        let case = Case::whole(GROUPED, tokens);
        let expected = expected(&case);
        for blocks in [None, Some(1)] {
            let found = found(&case, DType::F64, blocks);
            assert_near(&found, &expected, 1e-11, "f64");
        }
        let case = case.rounded(DType::F32);
        assert_near(&found(&case, DType::F32, None), &expected, 1e-5, "f32");
    }
}

/// Borders in a chunk, at its ends, and sequences of one token.
const PACKED: [usize; 13] = [0, 1, 2, 2, 3, 40, 64, 65, 127, 129, 130, 192, 230];

#[test]
fn packed_sequences_equal_the_recurrence_of_each() {
    let case = Case::new(GROUPED, &PACKED);
    let expected = expected(&case);
    for blocks in [None, Some(1)] {
        let found = found(&case, DType::F64, blocks);
        assert_near(&found, &expected, 1e-11, "f64");
    }
    let ones: Vec<usize> = (0..=70).collect();
    let case = Case::new(SMALL, &ones);
    assert_near(
        &found(&case, DType::F64, None),
        &self::expected(&case),
        1e-11,
        "ones",
    );
}

/// Without the lengths, as in the code of transformers 5.24.0 for machines without its kernels, the
/// state of one sequence reaches the next.
#[test]
fn packed_sequences_are_those_alone_and_leak_without_their_lengths() {
    let case = Case::new(SMALL, &PACKED).rounded(DType::F32);
    let packed = found(&case, DType::F32, None);
    let [_, key_heads, heads, key_dim, value_dim] = SMALL;
    let widths = [
        key_heads * key_dim,
        key_heads * key_dim,
        heads * value_dim,
        heads,
        heads,
        heads * value_dim,
    ];
    let result_widths = [widths[5], widths[0], widths[1], widths[2], heads, heads];
    for sequence in PACKED.windows(2).filter(|pair| pair[0] < pair[1]) {
        let part = |values: &Vec<f64>, width: usize| {
            values[sequence[0] * width..sequence[1] * width].to_vec()
        };
        let mut alone = Case::whole(SMALL, sequence[1] - sequence[0]);
        for (index, values) in alone.values.iter_mut().enumerate() {
            *values = part(&case.values[index], widths[index]);
        }
        let alone = found(&alone, DType::F32, None);
        let mut index = 0;
        let packed = packed.each_ref().map(|values| {
            index += 1;
            part(values, result_widths[index - 1])
        });
        assert_near(&packed, &alone, 1e-6, &format!("{sequence:?}"));
    }
    let mut unaware = case.clone();
    unaware.cu_seqlens = vec![0, case.tokens];
    let leaking = found(&unaware, DType::F32, None);
    let apart = leaking[0]
        .iter()
        .zip(&packed[0])
        .map(|(x, y)| (x - y).abs());
    assert!(apart.fold(0.0, f64::max) > 1e-2);
}

/// Decays near 0 and near 1 beside each other, in f32.
#[test]
fn decays_of_any_size_keep_their_digits() {
    let decays: [fn(usize) -> f64; 4] = [
        |_| -1e-7,
        |_| -60.0,
        // Forgets all, then nearly nothing: a difference of one long sum would lose the latter.
        |token| if token % 64 < 20 { -50.0 } else { -1e-3 },
        |_| 0.0,
    ];
    for (index, decay) in decays.into_iter().enumerate() {
        let mut case = Case::whole(SMALL, 200);
        let [_, _, heads, ..] = SMALL;
        for (at, g) in case.values[3].iter_mut().enumerate() {
            *g = decay(at / heads);
        }
        let case = case.rounded(DType::F32);
        let what = format!("decays {index}");
        assert_near(
            &found(&case, DType::F32, None),
            &expected(&case),
            2e-5,
            &what,
        );
    }
}

/// One key for all tokens, written at a rate of 1: the powers of A have binomial coefficients of 64.
#[test]
fn keys_that_resemble_each_other_keep_their_digits() {
    let mut case = Case::whole(SMALL, 130);
    let [_, _, _, key_dim, _] = SMALL;
    for key in case.values[1].chunks_mut(key_dim) {
        key.copy_from_slice(&[0.3, -0.5, 0.8]);
    }
    case.values[3].fill(-1e-4);
    case.values[4].fill(0.999);
    let case = case.rounded(DType::F32);
    assert_near(
        &found(&case, DType::F32, None),
        &expected(&case),
        1e-4,
        "one key",
    );
}

#[test]
fn results_of_16_bits_are_rounded_once() {
    for (dtype, half_unit) in [(DType::BF16, 0.004), (DType::F16, 0.0005)] {
        let case = Case::new(GROUPED, &[0, 30, 100]).rounded(dtype);
        let found = found(&case, dtype, None);
        assert_near(&found, &expected(&case), half_unit, &format!("{dtype:?}"));
    }
}

/// Of the forward alone, along a random direction of all inputs at once.
#[test]
fn gradients_are_those_of_finite_differences() {
    let case = Case::new(GROUPED, &[0, 10, 75]);
    let gradients = found(&case, DType::F64, None);
    let loss = |case: &Case| -> f64 {
        let out = &found(case, DType::F64, None)[0];
        out.iter().zip(&case.values[5]).map(|(x, y)| x * y).sum()
    };
    let directions: Vec<Vec<f64>> = (0..5)
        .map(|input| numbers(90 + input as u64, case.values[input].len()))
        .collect();
    let step = 1e-5;
    let moved = |by: f64| {
        let mut case = case.clone();
        for (values, direction) in case.values.iter_mut().zip(&directions) {
            for (value, along) in values.iter_mut().zip(direction) {
                *value += by * along;
            }
        }
        loss(&case)
    };
    let difference = (moved(step) - moved(-step)) / (2.0 * step);
    let pairs = gradients[1..].iter().zip(&directions);
    let slope: f64 = pairs
        .flat_map(|(gradient, along)| gradient.iter().zip(along))
        .map(|(gradient, along)| gradient * along)
        .sum();
    assert!(
        (difference - slope).abs() < 1e-6 * slope.abs().max(1.0),
        "{difference} {slope}"
    );
}

#[test]
fn steps_go_on_from_the_state_of_a_prompt() {
    let case = Case::whole(GROUPED, 70).rounded(DType::F32);
    let expected = found(&case, DType::F32, None).into_iter().next();
    let expected = expected.expect("an output");
    let ([q, k, v], [g, beta], _) = tensors(&case, DType::F32);
    let [q, k, v] = [q, k, v].map(Tensor::inner);
    let [g, beta] = [g, beta].map(Tensor::inner);
    let part = |x: &Tensor<4>| x.clone().narrow(1, 0, 66);
    let numbers = |x: &Tensor<3>| x.clone().narrow(1, 0, 66);
    let rule = GatedDelta::new(Sequences::whole(66));
    let (_, mut state) = rule
        .try_forward(part(&q), part(&k), part(&v), numbers(&g), numbers(&beta))
        .expect("it fits");
    let [batch, _, heads, _, value_dim] = GROUPED;
    for token in 66..70 {
        let of = |x: &Tensor<4>| x.clone().narrow(1, token, 1).squeeze_dim::<3>(1);
        let numbers = |x: &Tensor<3>| x.clone().narrow(1, token, 1).squeeze_dim::<2>(1);
        let out;
        (out, state) = gated_delta_step(
            [of(&q), of(&k), of(&v)],
            [numbers(&g), numbers(&beta)],
            state,
        )
        .expect("it fits");
        let width = heads * value_dim;
        let out = values(out);
        for sample in 0..batch {
            let at = (sample * 70 + token) * width;
            for (found, expected) in out[sample * width..].iter().zip(&expected[at..at + width]) {
                assert!((found - expected).abs() < 1e-5, "{found} {expected}");
            }
        }
    }
}

#[test]
fn tensors_that_do_not_fit_are_refused() {
    let device = Device::flex();
    let four = |dims: [usize; 4]| Tensor::<4>::zeros(dims, &device);
    let three = |dims: [usize; 3]| Tensor::<3>::zeros(dims, &device);
    let rule = |q, k, v, g, beta| {
        let rule = GatedDelta::new(Sequences::whole(5));
        rule.try_forward(four(q), four(k), four(v), three(g), three(beta))
            .map(drop)
    };
    let (key, value, number) = ([1, 5, 2, 3], [1, 5, 4, 3], [1, 5, 4]);
    assert_eq!(rule(key, key, value, number, number), Ok(()));
    for (result, left) in [
        (rule(key, [1, 5, 2, 4], value, number, number), "q"),
        (rule(key, key, value, number, [1, 5, 3]), "g"),
        (
            rule(key, key, value, [1, 5, 3], [1, 5, 3]),
            "v but its channels",
        ),
    ] {
        let error = result.expect_err("shapes differ");
        assert!(
            matches!(error, AttentionError::Shapes { left: found, .. } if found == left),
            "{error}"
        );
    }
    let six = ([1, 6, 2, 3], [1, 6, 4, 3], [1, 6, 4]);
    let error = rule(six.0, six.0, six.1, six.2, six.2).expect_err("too many tokens");
    assert!(
        matches!(
            error,
            AttentionError::Size {
                dimension: "tokens",
                ..
            }
        ),
        "{error}"
    );
    let error = rule(key, key, [1, 5, 3, 3], [1, 5, 3], [1, 5, 3]).expect_err("3 of 2");
    let expected = AttentionError::ValueHeads {
        heads: 3,
        key_heads: 2,
    };
    assert_eq!(error, expected);
    let empty = rule([1, 5, 2, 0], [1, 5, 2, 0], value, number, number);
    assert_eq!(empty, Err(AttentionError::NoChannels));
    let error = Sequences::packed(&[0, 6], 5).expect_err("beyond the tokens");
    assert!(
        matches!(error, AttentionError::CuSeqlens { index: 1, .. }),
        "{error}"
    );
    // Nothing to compute.
    let nothing = rule(
        [0, 5, 2, 3],
        [0, 5, 2, 3],
        [0, 5, 4, 3],
        [0, 5, 4],
        [0, 5, 4],
    );
    assert_eq!(nothing, Ok(()));
}
