//! Attention against a plain computation in f64, forward and backward, over masks, strides, group
//! sizes, windows, packed and odd lengths and types.

use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_attention::{Attention, AttentionMask, Implementation, MaskRules, Window};

/// The implementation, and the size of its blocks.
type Method = (Implementation, Option<usize>);

/// One attention to check.
#[derive(Clone, Copy)]
struct Case {
    name: &'static str,
    batch: usize,
    heads: usize,
    kv_heads: usize,
    queries: usize,
    keys: usize,
    head_dim: usize,
    value_dim: usize,
    rules: MaskRules<'static>,
    bias: Option<[usize; 4]>,
    /// True if the memory has the tokens before the heads.
    swapped: bool,
    scale: Option<f64>,
}

const ALL: MaskRules<'static> = MaskRules {
    causal: false,
    window: None,
    cu_seqlens: None,
    attended: None,
};
const CAUSAL: MaskRules<'static> = MaskRules {
    causal: true,
    ..ALL
};

const PLAIN: Case = Case {
    name: "plain",
    batch: 2,
    heads: 4,
    kv_heads: 2,
    queries: 19,
    keys: 19,
    head_dim: 8,
    value_dim: 8,
    rules: ALL,
    bias: None,
    swapped: false,
    scale: None,
};

const fn windowed(before: usize, after: usize, causal: bool) -> MaskRules<'static> {
    MaskRules {
        causal,
        window: Some(Window { before, after }),
        ..ALL
    }
}

const fn packed(cu_seqlens: &'static [usize], causal: bool) -> MaskRules<'static> {
    MaskRules {
        causal,
        cu_seqlens: Some(cu_seqlens),
        ..ALL
    }
}

/// Two samples of 19 keys: the first padded before, the second after and in between.
const PADDED: [bool; 38] = {
    let mut attended = [true; 38];
    let mut index = 0;
    while index < 38 {
        attended[index] = !(index < 5 || index == 25 || index > 34);
        index += 1;
    }
    attended
};

#[rustfmt::skip]
const CASES: [Case; 25] = [
    PLAIN,
    Case { name: "causal", rules: CAUSAL, ..PLAIN },
    Case { name: "causal, tokens first", rules: CAUSAL, swapped: true, ..PLAIN },
    Case { name: "one token", queries: 1, keys: 1, ..PLAIN },
    Case { name: "a cache", rules: CAUSAL, queries: 3, ..PLAIN },
    Case { name: "one query of a cache", rules: CAUSAL, queries: 1, ..PLAIN },
    Case { name: "more queries than keys", queries: 23, keys: 7, ..PLAIN },
    Case { name: "no groups", kv_heads: 4, rules: CAUSAL, ..PLAIN },
    Case { name: "one key head", kv_heads: 1, rules: CAUSAL, ..PLAIN },
    Case { name: "one head in all", batch: 1, heads: 1, kv_heads: 1, rules: CAUSAL, ..PLAIN },
    Case { name: "groups of three", heads: 6, rules: CAUSAL, swapped: true, ..PLAIN },
    Case { name: "other channels of v", value_dim: 5, rules: CAUSAL, ..PLAIN },
    Case { name: "odd channels", head_dim: 7, value_dim: 3, swapped: true, ..PLAIN },
    Case { name: "a scale", scale: Some(0.9), rules: CAUSAL, ..PLAIN },
    Case { name: "a sliding window", rules: windowed(3, 0, true), ..PLAIN },
    Case { name: "a window on both sides", rules: windowed(2, 4, false), ..PLAIN },
    Case { name: "a window of a cache", rules: windowed(2, 0, true), queries: 3, ..PLAIN },
    Case { name: "packed", rules: packed(&[0, 7, 8, 8, 19], false), ..PLAIN },
    Case { name: "packed, causal", rules: packed(&[0, 7, 8, 19], true), ..PLAIN },
    Case { name: "windows of one length", rules: packed(&[0, 4, 8, 12, 16, 19], false), swapped: true, ..PLAIN },
    Case { name: "padding", rules: MaskRules { attended: Some(&PADDED), ..ALL }, ..PLAIN },
    Case { name: "padding, causal", rules: MaskRules { attended: Some(&PADDED), ..CAUSAL }, ..PLAIN },
    Case { name: "a bias", bias: Some([2, 4, 19, 19]), rules: CAUSAL, ..PLAIN },
    Case { name: "a shared bias", bias: Some([1, 1, 19, 19]), rules: packed(&[0, 4, 8, 19], false), ..PLAIN },
    Case { name: "a window ahead", rules: windowed(0, 4, false), ..PLAIN },
];

/// Biases that are shared in other ways.
const SHARED: [[usize; 4]; 5] = [
    [2, 1, 1, 19],
    [1, 4, 19, 1],
    [1, 4, 1, 19],
    [2, 4, 1, 1],
    [1, 1, 1, 1],
];

/// A large case: more than one block of the kernels in both directions, none of them full.
const LARGE: Case = Case {
    name: "several blocks",
    batch: 1,
    heads: 2,
    kv_heads: 1,
    head_dim: 4,
    value_dim: 4,
    queries: 321,
    keys: 545,
    rules: CAUSAL,
    ..PLAIN
};

fn numbers(seed: u64, count: usize) -> Vec<f64> {
    crate::numbers(seed, count, DType::F64)
}

/// q, k, v, the bias and the gradient of the output, each `[batch, heads, tokens, channels]`.
#[derive(Clone)]
struct Data {
    q: Vec<f64>,
    k: Vec<f64>,
    v: Vec<f64>,
    bias: Vec<f64>,
    dy: Vec<f64>,
}

impl Case {
    fn shapes(&self) -> [[usize; 4]; 5] {
        [
            [self.batch, self.heads, self.queries, self.head_dim],
            [self.batch, self.kv_heads, self.keys, self.head_dim],
            [self.batch, self.kv_heads, self.keys, self.value_dim],
            self.bias.unwrap_or([1; 4]),
            [self.batch, self.heads, self.queries, self.value_dim],
        ]
    }

    /// Values that `dtype` holds exactly.
    fn data(&self, dtype: DType) -> Data {
        let [q, k, v, bias, dy] = self.shapes();
        let rounded = |seed, shape: [usize; 4], scale: f64| {
            let values = numbers(seed, shape.iter().product());
            let values: Vec<f64> = values.into_iter().map(|value| scale * value).collect();
            let data = TensorData::new(values, shape).convert_dtype(dtype);
            data.iter::<f64>().collect()
        };
        Data {
            q: rounded(1, q, 3.0),
            k: rounded(2, k, 3.0),
            v: rounded(3, v, 2.0),
            bias: rounded(4, bias, 2.0),
            dy: rounded(5, dy, 1.0),
        }
    }

    fn mask(&self) -> AttentionMask {
        AttentionMask::new(&self.rules, self.batch, self.queries, self.keys).expect(self.name)
    }

    fn scale(&self) -> f64 {
        self.scale.unwrap_or(1.0 / (self.head_dim as f64).sqrt())
    }

    /// True if a query sees a key, from the rules' own words.
    fn sees(&self, sample: usize, query: usize, key: usize) -> bool {
        let rules = &self.rules;
        let index = (query + self.keys) as i64 - self.queries as i64;
        let distance = key as i64 - index;
        let sequence = |cu_seqlens: &[usize], token: usize| {
            cu_seqlens.iter().filter(|start| **start <= token).count()
        };
        (!rules.causal || distance <= 0)
            && rules.window.is_none_or(|window| {
                -(window.before as i64) <= distance && distance <= window.after as i64
            })
            && rules
                .cu_seqlens
                .is_none_or(|cu| sequence(cu, query) == sequence(cu, key))
            && rules
                .attended
                .is_none_or(|attended| attended[sample * self.keys + key])
    }

    /// The output and the gradients of q, k, v and the bias.
    fn expected(&self, data: &Data) -> [Vec<f64>; 5] {
        let at = |shape: [usize; 4], index: [usize; 4]| {
            (0..4).fold(0, |flat, dim| flat * shape[dim] + index[dim] % shape[dim])
        };
        let [q_shape, k_shape, v_shape, b_shape, y_shape] = self.shapes();
        let zeros = |shape: [usize; 4]| vec![0.0; shape.iter().product()];
        let (mut y, mut dq, mut dk) = (zeros(y_shape), zeros(q_shape), zeros(k_shape));
        let (mut dv, mut dbias) = (zeros(v_shape), zeros(b_shape));
        let group = self.heads / self.kv_heads;
        for b in 0..self.batch {
            for h in 0..self.heads {
                for i in 0..self.queries {
                    let kv = |shape, j, c| at(shape, [b, h / group, j, c]);
                    let seen: Vec<usize> = (0..self.keys).filter(|j| self.sees(b, i, *j)).collect();
                    let score = |j: usize| {
                        let products = (0..self.head_dim)
                            .map(|c| data.q[at(q_shape, [b, h, i, c])] * data.k[kv(k_shape, j, c)]);
                        let bias = data.bias[at(b_shape, [b, h, i, j])];
                        let bias = if self.bias.is_some() { bias } else { 0.0 };
                        self.scale() * products.sum::<f64>() + bias
                    };
                    let scores: Vec<f64> = seen.iter().map(|j| score(*j)).collect();
                    let largest = scores.iter().copied().fold(f64::MIN, f64::max);
                    let sum: f64 = scores.iter().map(|s| (s - largest).exp()).sum();
                    let weights: Vec<f64> =
                        scores.iter().map(|s| (s - largest).exp() / sum).collect();
                    let dy = |c| data.dy[at(y_shape, [b, h, i, c])];
                    let dweight = |j: usize| -> f64 {
                        let channels = 0..self.value_dim;
                        channels.map(|c| dy(c) * data.v[kv(v_shape, j, c)]).sum()
                    };
                    let pairs = || seen.iter().zip(&weights);
                    let mean: f64 = pairs().map(|(j, p)| p * dweight(*j)).sum();
                    for (&j, p) in pairs() {
                        for c in 0..self.value_dim {
                            y[at(y_shape, [b, h, i, c])] += p * data.v[kv(v_shape, j, c)];
                            dv[kv(v_shape, j, c)] += p * dy(c);
                        }
                        let dscore = p * (dweight(j) - mean);
                        dbias[at(b_shape, [b, h, i, j])] += dscore;
                        for c in 0..self.head_dim {
                            let (at_q, at_k) = (at(q_shape, [b, h, i, c]), kv(k_shape, j, c));
                            dq[at_q] += dscore * self.scale() * data.k[at_k];
                            dk[at_k] += dscore * self.scale() * data.q[at_q];
                        }
                    }
                }
            }
        }
        [y, dq, dk, dv, dbias]
    }

    fn tensor(
        &self,
        values: &[f64],
        shape: [usize; 4],
        dtype: DType,
        device: &Device,
    ) -> Tensor<4> {
        let data = TensorData::new(values.to_vec(), shape);
        let x = Tensor::<4>::from_data(data, (device, dtype));
        if !self.swapped {
            return x;
        }
        // The same values in memory that has the tokens before the heads.
        let memory = x.swap_dims(1, 2).into_data();
        Tensor::from_data(memory, (device, dtype)).swap_dims(1, 2)
    }

    /// The crate's results, in the order of [`expected`](Self::expected).
    fn found(&self, data: &Data, dtype: DType, method: Method, device: &Device) -> [Vec<f64>; 5] {
        let [q_shape, k_shape, v_shape, b_shape, y_shape] = self.shapes();
        let wide = if dtype == DType::F64 {
            dtype
        } else {
            DType::F32
        };
        let input = |values, shape| self.tensor(values, shape, dtype, device).require_grad();
        let (q, k, v) = (
            input(&data.q, q_shape),
            input(&data.k, k_shape),
            input(&data.v, v_shape),
        );
        let bias =
            Tensor::<4>::from_data(TensorData::new(data.bias.clone(), b_shape), (device, wide))
                .require_grad();
        let mut attention = Attention::new(self.mask())
            .with_implementation(method.0)
            .with_blocks(method.1)
            .with_bias(self.bias.is_some().then(|| bias.clone()));
        if let Some(scale) = self.scale {
            attention = attention.with_scale(scale);
        }
        let out = attention.try_forward(q.clone(), k.clone(), v.clone());
        let out = out.expect(self.name);
        assert_eq!((out.dims(), out.dtype()), (y_shape, dtype), "{}", self.name);
        let dy = self.tensor(&data.dy, y_shape, dtype, device);
        let gradients = (out.clone() * dy).sum().backward();
        let values = |x: Tensor<4>| -> Vec<f64> { x.into_data().iter::<f64>().collect() };
        let gradient = |x: &Tensor<4>| x.grad(&gradients);
        let of = |x: &Tensor<4>| values(gradient(x).expect("a gradient"));
        let dbias = gradient(&bias).map_or_else(|| vec![0.0; data.bias.len()], values);
        [values(out), of(&q), of(&k), of(&v), dbias]
    }

    /// Compares all results, relative to the largest number of each, or to the inputs', which are
    /// about 1: what cancels has their roundings.
    fn check(&self, dtype: DType, method: Method) {
        self.check_data(&self.data(dtype), dtype, method);
    }

    fn check_data(&self, data: &Data, dtype: DType, method: Method) {
        let device = Device::flex().autodiff();
        let mut expected = self.expected(data);
        if self.bias.is_none() {
            expected[4].fill(0.0);
        }
        let found = self.found(data, dtype, method, &device);
        let names = ["the output", "dq", "dk", "dv", "dbias"];
        for ((name, expected), found) in names.iter().zip(&expected).zip(&found) {
            let largest = expected.iter().fold(1.0, |max: f64, x| max.max(x.abs()));
            let bound = largest * tolerance(dtype);
            assert_eq!(expected.len(), found.len());
            for (index, (expected, found)) in expected.iter().zip(found).enumerate() {
                let error = (expected - found).abs();
                assert!(
                    error <= bound,
                    "{}, {dtype:?}, {method:?}: {name}[{index}] is {found}, expected {expected}",
                    self.name
                );
            }
        }
    }
}

/// The largest error, relative to the largest result: a few roundings of the accumulator, and of
/// 16-bit data those of the output, which the backward reads, and of the result.
fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => 32.0 * f64::EPSILON,
        DType::F16 => 2.0 * 2f64.powi(-11),
        DType::BF16 => 2.0 * 2f64.powi(-8),
        _ => 32.0 * f64::from(f32::EPSILON),
    }
}

/// Blocks of the fewest queries, and one block for all.
const METHODS: [Method; 4] = [
    (Implementation::Fused, None),
    (Implementation::Fused, Some(1)),
    (Implementation::Fused, Some(1 << 20)),
    (Implementation::Composed, None),
];

fn check_all(case: &Case, dtype: DType) {
    for method in METHODS {
        case.check(dtype, method);
    }
}

#[test]
fn every_case_equals_the_plain_computation_in_f32() {
    CASES.iter().for_each(|case| check_all(case, DType::F32));
    check_all(&LARGE, DType::F32);
}

#[test]
fn every_case_equals_the_plain_computation_in_f64() {
    CASES.iter().for_each(|case| check_all(case, DType::F64));
    check_all(&LARGE, DType::F64);
}

#[test]
fn sixteen_bits_are_accumulated_in_f32() {
    for dtype in [DType::BF16, DType::F16] {
        CASES.iter().for_each(|case| check_all(case, dtype));
        check_all(&LARGE, dtype);
    }
}

#[test]
fn a_bias_may_be_shared_along_any_dimension() {
    for bias in SHARED {
        let name = "a bias shared in another way";
        let case = Case {
            name,
            bias: Some(bias),
            ..PLAIN
        };
        check_all(&case, DType::F64);
    }
}

#[test]
fn a_query_that_sees_no_key_has_the_output_0_and_no_gradient() {
    let case = CASES[21];
    assert!(case.name == "padding, causal" && (0..19).all(|key| !case.sees(0, 0, key)));
    let data = case.data(DType::F32);
    for method in METHODS {
        let [y, dq, ..] = case.found(&data, DType::F32, method, &Device::flex().autodiff());
        // Query 0 of the first sample, head 0.
        assert!(y[..8].iter().chain(&dq[..8]).all(|x| *x == 0.0));
    }
}

impl Data {
    /// Puts NaN and infinities where the rules say that it does not matter: into the keys that no
    /// query sees, and the queries that see no key. Returns how many there are of each.
    fn spoil(&mut self, case: &Case) -> [usize; 2] {
        let spoil = |values: &mut [f64], token: usize| {
            values.fill([f64::NAN, f64::INFINITY, f64::NEG_INFINITY][token % 3]);
        };
        let (queries, keys) = (case.queries, case.keys);
        let mut spoiled = [0; 2];
        for b in 0..case.batch {
            for j in (0..keys).filter(|j| (0..queries).all(|i| !case.sees(b, i, *j))) {
                for h in 0..case.kv_heads {
                    let row = (b * case.kv_heads + h) * keys + j;
                    spoil(&mut self.k[row * case.head_dim..][..case.head_dim], j);
                    spoil(&mut self.v[row * case.value_dim..][..case.value_dim], j);
                }
                spoiled[0] += 1;
            }
            for i in (0..queries).filter(|i| (0..keys).all(|j| !case.sees(b, *i, j))) {
                for h in 0..case.heads {
                    let row = (b * case.heads + h) * queries + i;
                    spoil(&mut self.q[row * case.head_dim..][..case.head_dim], i);
                    spoil(&mut self.dy[row * case.value_dim..][..case.value_dim], i);
                }
                spoiled[1] += 1;
            }
        }
        spoiled
    }
}

#[test]
fn what_is_hidden_from_all_reaches_nothing_whatever_it_holds() {
    let mut spoiled = [0; 2];
    for case in CASES {
        let biased = Case {
            bias: Some([case.batch, 1, case.queries, case.keys]),
            ..case
        };
        for (case, dtype) in [(case, DType::F32), (biased, DType::F32), (case, DType::F16)] {
            let mut data = case.data(dtype);
            let [keys, queries] = data.spoil(&case);
            if keys + queries == 0 {
                continue;
            }
            for method in METHODS {
                case.check_data(&data, dtype, method);
            }
            spoiled = [spoiled[0] + keys, spoiled[1] + queries];
        }
    }
    assert!(spoiled.iter().all(|count| *count > 0), "{spoiled:?}");
}

/// One of the inputs.
type Input = fn(&mut Data) -> &mut Vec<f64>;

/// The derivative of <y, dy> along each input, by central differences in f64.
#[test]
fn gradients_are_the_slopes_of_the_output() {
    let case = Case {
        name: "slopes",
        batch: 1,
        queries: 5,
        keys: 6,
        head_dim: 3,
        value_dim: 2,
        rules: CAUSAL,
        bias: Some([1, 4, 1, 6]),
        ..PLAIN
    };
    let device = Device::flex().autodiff();
    for method in [
        (Implementation::Fused, None),
        (Implementation::Fused, Some(1)),
    ] {
        let data = case.data(DType::F64);
        let [_, dq, dk, dv, dbias] = case.found(&data, DType::F64, method, &device);
        let value = |data: &Data| -> f64 {
            let [y, ..] = case.found(data, DType::F64, method, &device);
            y.iter().zip(&data.dy).map(|(y, dy)| y * dy).sum()
        };
        let inputs: [(&str, Input, Vec<f64>); 4] = [
            ("q", |data| &mut data.q, dq),
            ("k", |data| &mut data.k, dk),
            ("v", |data| &mut data.v, dv),
            ("bias", |data| &mut data.bias, dbias),
        ];
        for (name, input, gradient) in inputs {
            assert!(gradient.iter().any(|slope| slope.abs() > 1e-2), "{name}");
            for (index, gradient) in gradient.iter().enumerate() {
                let step = 1e-5;
                let moved = |by: f64| {
                    let mut data = data.clone();
                    input(&mut data)[index] += by;
                    value(&data)
                };
                let slope = (moved(step) - moved(-step)) / (2.0 * step);
                assert!(
                    (slope - gradient).abs() <= 1e-8,
                    "{method:?}: d{name}[{index}] is {gradient}, the slope is {slope}"
                );
            }
        }
    }
}

/// One head on one thread is computed whole; on three, its tiles are divided among them.
#[test]
fn the_bits_depend_on_no_number_of_threads() {
    let device = Device::flex().autodiff();
    let biases = [[321, 545], [1, 545], [321, 1], [1, 1]].map(|[rows, columns]| {
        let heads = if rows == columns { 1 } else { 2 };
        Some([1, heads, rows, columns])
    });
    for bias in biases.into_iter().chain([None]) {
        let case = Case { bias, ..LARGE };
        let data = case.data(DType::F32);
        case.check_data(&data, DType::F32, (Implementation::Fused, None));
        for method in [
            (Implementation::Fused, None),
            (Implementation::Fused, Some(1)),
        ] {
            let [one, three] = [1, 3].map(|threads| {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
                let run = || case.found(&data, DType::F32, method, &device);
                pool.expect("threads").install(run)
            });
            assert!(one == three, "{method:?}, bias {bias:?}");
        }
    }
}

#[test]
fn untracked_inputs_get_no_gradient() {
    let device = Device::flex().autodiff();
    let random = |seed| {
        let data = TensorData::new(numbers(seed, 24), [1, 2, 3, 4]);
        Tensor::<4>::from_data(data, (&device, DType::F32))
    };
    let mask = AttentionMask::new(&ALL, 1, 3, 3).expect("valid");
    let (q, k, v) = (random(1), random(2), random(3).require_grad());
    let out = Attention::new(mask).forward(q.clone(), k.clone(), v.clone());
    let gradients = out.sum().backward();
    assert!(q.grad(&gradients).is_none() && k.grad(&gradients).is_none());
    assert!(v.grad(&gradients).is_some());
}
