//! Every method of attention with large scores, and with extreme values at masked keys.

use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_attention::{Attention, AttentionMask, Implementation, MaskRules};

use super::{Place, on_each_device};

/// The implementation that computes, and the size of its blocks.
type Method = (Implementation, Option<usize>);

const METHODS: [Method; 4] = [
    (Implementation::Fused, None),
    (Implementation::Fused, Some(1)),
    (Implementation::Fused, Some(1 << 20)),
    (Implementation::Composed, None),
];

/// One head of one sample, its tensors as rows of tokens.
#[derive(Clone, Default)]
struct Problem {
    queries: usize,
    keys: usize,
    q: Vec<f64>,
    k: Vec<f64>,
    v: Vec<f64>,
    dy: Vec<f64>,
    /// queries x keys.
    bias: Option<Vec<f64>>,
    scale: f64,
    causal: bool,
    attended: Option<Vec<bool>>,
}

/// The output and the gradients of q, k, v and the bias.
type Results = [Vec<f64>; 5];
const ALL: [usize; 5] = [0, 1, 2, 3, 4];
const NAMES: [&str; 5] = ["the output", "dq", "dk", "dv", "dbias"];

fn dot(left: &[f64], right: &[f64]) -> f64 {
    left.iter().zip(right).map(|(x, y)| x * y).sum()
}

fn add(sum: &mut [f64], factor: f64, row: &[f64]) {
    for (sum, x) in sum.iter_mut().zip(row) {
        *sum += factor * x;
    }
}

impl Problem {
    /// As a type holds it.
    fn rounded(mut self, dtype: DType) -> Self {
        for x in [&mut self.q, &mut self.k, &mut self.v, &mut self.dy] {
            let len = x.len();
            let data = TensorData::new(std::mem::take(x), [len]).convert_dtype(dtype);
            *x = data.iter::<f64>().collect();
        }
        self
    }

    fn channels(&self) -> usize {
        self.q.len() / self.queries
    }

    fn value_dim(&self) -> usize {
        self.v.len() / self.keys
    }

    fn expected(&self) -> Results {
        let (channels, value_dim) = (self.channels(), self.value_dim());
        let row = |x: &'_ [f64], index: usize, len: usize| x[index * len..][..len].to_vec();
        let zeros = |x: &[f64]| vec![0.0; x.len()];
        let mut y = zeros(&self.dy);
        let [mut dq, mut dk, mut dv] = [&self.q, &self.k, &self.v].map(|x| zeros(x));
        let mut dbias = vec![0.0; self.queries * self.keys];
        for i in 0..self.queries {
            let (q, dy) = (row(&self.q, i, channels), row(&self.dy, i, value_dim));
            let score = |j: usize| {
                let bias = self
                    .bias
                    .as_ref()
                    .map_or(0.0, |bias| bias[i * self.keys + j]);
                self.scale * dot(&q, &row(&self.k, j, channels)) + bias
            };
            let sees = |j: &usize| {
                (!self.causal || j + self.queries <= i + self.keys)
                    && self.attended.as_ref().is_none_or(|attended| attended[*j])
            };
            let seen = (0..self.keys).filter(sees).map(|j| (j, score(j)));
            let seen: Vec<_> = seen.filter(|(_, score)| *score >= -1e20).collect();
            let largest = seen
                .iter()
                .fold(f64::MIN, |max, (_, score)| max.max(*score));
            let sum: f64 = seen.iter().map(|(_, score)| (score - largest).exp()).sum();
            let weigh = |(j, score): &(usize, f64)| (*j, (score - largest).exp() / sum);
            let weights: Vec<_> = seen.iter().map(weigh).collect();
            let slope = |j: usize| dot(&dy, &row(&self.v, j, value_dim));
            let mean: f64 = weights.iter().map(|(j, p)| p * slope(*j)).sum();
            for (j, p) in weights {
                let dscore = p * (slope(j) - mean);
                let v = row(&self.v, j, value_dim);
                add(&mut y[i * value_dim..][..value_dim], p, &v);
                add(&mut dv[j * value_dim..][..value_dim], p, &dy);
                let (scaled, k) = (dscore * self.scale, row(&self.k, j, channels));
                add(&mut dq[i * channels..][..channels], scaled, &k);
                add(&mut dk[j * channels..][..channels], scaled, &q);
                if self.bias.is_some() {
                    dbias[i * self.keys + j] = dscore;
                }
            }
        }
        [y, dq, dk, dv, dbias]
    }

    fn found(&self, device: &Device, dtype: DType, method: Method) -> Results {
        let tensor = |values: &[f64], rows: usize, dtype| {
            let data = TensorData::new(values.to_vec(), [1, 1, rows, values.len() / rows]);
            Tensor::<4>::from_data(data, (device, dtype)).require_grad()
        };
        let wide = if dtype == DType::F64 {
            dtype
        } else {
            DType::F32
        };
        let (q, k, v) = (
            tensor(&self.q, self.queries, dtype),
            tensor(&self.k, self.keys, dtype),
            tensor(&self.v, self.keys, dtype),
        );
        let bias = self.bias.as_ref();
        let bias = bias.map(|bias| tensor(bias, self.queries, wide));
        let rules = MaskRules {
            causal: self.causal,
            attended: self.attended.as_deref(),
            ..MaskRules::default()
        };
        let mask = AttentionMask::new(&rules, 1, self.queries, self.keys).expect("valid rules");
        let attention = Attention::new(mask)
            .with_scale(self.scale)
            .with_bias(bias.clone())
            .with_implementation(method.0)
            .with_blocks(method.1);
        let out = attention.forward(q.clone(), k.clone(), v.clone());
        let dy = tensor(&self.dy, self.queries, dtype).detach();
        let gradients = (out.clone() * dy).sum().backward();
        let values = |x: Tensor<4>| -> Vec<f64> { x.into_data().iter::<f64>().collect() };
        let of = |x: &Tensor<4>| values(x.grad(&gradients).expect("a gradient"));
        let none = vec![0.0; self.queries * self.keys];
        let dbias = bias.as_ref().map_or(none, of);
        [values(out), of(&q), of(&k), of(&v), dbias]
    }

    /// Compares some of the results, relative to the largest number of each, or to 1.
    fn check(&self, place: &Place, name: &str, dtype: DType, results: &[usize], tolerance: f64) {
        if !place.has(dtype) {
            return;
        }
        let expected = self.expected();
        for method in METHODS {
            let found = self.found(&place.device, dtype, method);
            for &result in results {
                let (what, expected, found) = (NAMES[result], &expected[result], &found[result]);
                assert_eq!(expected.len(), found.len(), "{what}");
                let largest = expected.iter().fold(1.0, |max: f64, x| max.max(x.abs()));
                for (index, (expected, found)) in expected.iter().zip(found).enumerate() {
                    assert!(
                        (expected - found).abs() <= largest * tolerance,
                        "{}: {name}, {dtype:?}, {method:?}: {what}[{index}] is {found}, \
                         expected {expected}",
                        place.name,
                    );
                }
            }
        }
    }
}

/// Numbers of a mean of 0 and a deviation that look random and are the same in every run.
fn numbers(seed: u64, count: usize, deviation: f64) -> Vec<f64> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 11) as f64 / (1u64 << 52) as f64 - 1.0
    };
    (0..count)
        .map(|_| next() * deviation * 3f64.sqrt())
        .collect()
}

const F16_ROUNDINGS: f64 = 2.0 / 2048.0;
const BF16_ROUNDINGS: f64 = 2.0 / 256.0;

#[test]
fn f16_does_not_overflow_where_the_result_does_not() {
    on_each_device(|place| {
        let equal_keys = Problem {
            queries: 2,
            keys: 1024,
            q: vec![0.0; 8],
            k: vec![0.0; 4096],
            v: vec![100.0; 4096],
            dy: vec![1.0; 8],
            scale: 0.5,
            ..Problem::default()
        };
        let largest = Problem {
            v: vec![65504.0; 4096],
            dy: vec![0.25; 8],
            ..equal_keys.clone()
        };
        // q k^T is 102,400 and the scores 1,600; below, 2,560,000 and 320,000.
        let scores = |x: f64, scale: f64| Problem {
            queries: 1,
            keys: 3,
            q: vec![x; 64],
            k: vec![x; 192],
            v: vec![1.0, 2.0, 6.0],
            dy: vec![2.0],
            scale,
            ..Problem::default()
        };
        // dy v^T is 360,000; the output, 299.5, is a number of f16.
        let slopes = Problem {
            queries: 1,
            keys: 2,
            q: vec![1.0, 0.0],
            k: vec![0.5, 1.0, 0.5, -1.0],
            v: vec![300.0, 300.0, 300.0, 300.0, 299.0, 299.0, 299.0, 299.0],
            dy: vec![300.0; 4],
            scale: 1.0,
            ..Problem::default()
        };
        for (name, problem) in [
            ("equal keys", equal_keys),
            ("the largest v", largest),
            ("scores of 1,600", scores(40.0, 1.0 / 64.0)),
            ("scores of 320,000", scores(200.0, 0.125)),
            ("slopes", slopes),
        ] {
            problem.check(place, name, DType::F16, &ALL, F16_ROUNDINGS);
            problem
                .rounded(DType::BF16)
                .check(place, name, DType::BF16, &ALL, BF16_ROUNDINGS);
        }
    });
}

#[test]
fn scores_of_16_bit_tensors_keep_their_digits() {
    on_each_device(|place| {
        for (dtype, other, expected, roundings) in [
            (DType::BF16, 8.5, 0.622_459, BF16_ROUNDINGS),
            (DType::F16, 8.25, 0.562_177, F16_ROUNDINGS),
        ] {
            let mut k = vec![8.0; 128];
            k[64] = other;
            let problem = Problem {
                queries: 1,
                keys: 2,
                q: vec![8.0; 64],
                k,
                v: vec![0.0, 1.0],
                dy: vec![1.0],
                scale: 0.125,
                ..Problem::default()
            };
            // The scores differ by 1/2 and 1/4: 1 / (1 + e^-x).
            assert!((problem.expected()[0][0] - expected).abs() < 1e-6);
            problem.check(place, "near scores", dtype, &ALL, roundings);
        }
        for (dtype, roundings) in [(DType::BF16, BF16_ROUNDINGS), (DType::F16, F16_ROUNDINGS)] {
            for (deviation, results) in [(4.0, &ALL[..]), (40.0, &ALL[..1])] {
                let problem = Problem {
                    queries: 21,
                    keys: 37,
                    q: numbers(1, 21 * 64, deviation),
                    k: numbers(2, 37 * 64, deviation),
                    v: numbers(3, 37 * 8, 1.0),
                    dy: numbers(4, 21 * 8, 1.0),
                    scale: 0.125,
                    causal: true,
                    ..Problem::default()
                };
                let problem = problem.rounded(dtype);
                problem.check(place, "large scores", dtype, results, roundings);
            }
        }
    });
}

#[test]
fn gradients_are_right_beside_large_scores() {
    on_each_device(|place| {
        let problem = |queries: usize, bias: Option<f64>| Problem {
            queries,
            keys: 8,
            q: vec![0.0; queries * 2],
            k: numbers(2, 16, 1.0),
            v: numbers(3, 24, 1.0),
            dy: vec![1.0; queries * 3],
            bias: bias.map(|bias| vec![bias; queries * 8]),
            scale: 1.0,
            ..Problem::default()
        };
        // A weight is 1 / 8 whatever the bias of all keys is.
        assert!(
            problem(1, Some(-1e9)).expected()[3]
                .iter()
                .all(|dv| *dv == 0.125)
        );
        for bias in [-1e4, -65504.0, -1e9, 1e9, 60.0, 70.0] {
            problem(3, Some(bias)).check(
                place,
                &format!("a bias of {bias}"),
                DType::F32,
                &ALL,
                4e-6,
            );
        }
        let wide = 2f64.powi(54);
        for bias in [-wide, wide] {
            problem(3, Some(bias)).check(place, "a bias of 2^54", DType::F64, &ALL, 1e-14);
        }
        // Scores of 2^20 and 2^24 that are alike; the second channel has a gradient.
        for size in [1024.0, 4096.0] {
            let mut large = problem(2, None);
            (large.q, large.scale) = (vec![size, 0.0, -size, 0.0], 1.0);
            for key in large.k.chunks_mut(2) {
                key[0] = size;
            }
            large.k[6] = -size;
            large.check(place, "large products", DType::F32, &[0, 3], 4e-6);
            // dq and dk have the size of k and q.
            large.check(place, "large products", DType::F32, &[1, 2], 4e-6 * size);
        }
    });
}

#[test]
fn scores_below_the_floor_are_hidden_and_rows_of_them_are_0() {
    on_each_device(|place| {
        for low in [f64::NEG_INFINITY, -1e30, -1e21] {
            let mut bias = vec![0.0; 6];
            bias[1] = low;
            bias[3..].fill(low);
            let problem = Problem {
                queries: 2,
                keys: 3,
                q: numbers(1, 4, 1.0),
                k: numbers(2, 6, 1.0),
                v: numbers(3, 6, 1.0),
                dy: numbers(4, 4, 1.0),
                bias: Some(bias),
                scale: 1.0,
                ..Problem::default()
            };
            let [y, dq, ..] = problem.expected();
            assert!(y[2..].iter().chain(&dq[2..]).all(|x| *x == 0.0) && y[0] != 0.0);
            problem.check(place, "a low bias", DType::F32, &ALL, 4e-6);
            problem.check(place, "a low bias", DType::F64, &ALL, 1e-14);
        }
    });
}

#[test]
fn no_bias_shows_what_a_mask_hides() {
    on_each_device(|place| {
        for wild in [1e30, 3e38, f64::INFINITY, f64::NAN] {
            for (causal, attended) in [(true, None), (false, Some(vec![true, true, false]))] {
                let mut bias = vec![0.0; 9];
                // The key that is hidden from the first two queries by either rule.
                (bias[2], bias[5]) = (wild, wild);
                if attended.is_some() {
                    bias[8] = wild;
                }
                let problem = Problem {
                    queries: 3,
                    keys: 3,
                    q: numbers(1, 6, 1.0),
                    k: numbers(2, 6, 1.0),
                    v: numbers(3, 6, 1.0),
                    dy: numbers(4, 6, 1.0),
                    bias: Some(bias),
                    scale: 1.0,
                    causal,
                    attended,
                };
                problem.check(place, "a wild bias", DType::F32, &ALL, 4e-6);
            }
        }
    });
}

/// A NaN is no number to hide from those who see it.
#[test]
fn what_is_not_finite_reaches_the_queries_that_see_it() {
    on_each_device(|place| {
        let mut problem = Problem {
            queries: 2,
            keys: 2,
            q: vec![1.0; 2],
            k: vec![1.0; 2],
            v: vec![1.0; 2],
            dy: vec![1.0; 2],
            scale: 1.0,
            causal: true,
            ..Problem::default()
        };
        for wild in [f64::NAN, f64::INFINITY] {
            problem.k[1] = wild;
            for method in METHODS {
                let [y, ..] = problem.found(&place.device, DType::F32, method);
                assert!(y[0] == 1.0 && y[1].is_nan(), "{method:?}: {y:?}");
            }
        }
    });
}

#[test]
fn empty_attention_is_tracked_to_all_its_tensors() {
    on_each_device(|place| {
        let device = &place.device;
        for [batch, queries, keys] in [[1, 3, 0], [1, 0, 3], [0, 3, 3], [2, 0, 0]] {
            for dtype in [DType::F32, DType::BF16] {
                if !place.has(dtype) {
                    continue;
                }
                for method in METHODS {
                    // Their values must not matter.
                    let tensor = |heads, tokens, channels, dtype| {
                        let shape = [batch, heads, tokens, channels];
                        Tensor::<4>::full(shape, f64::NAN, (device, dtype)).require_grad()
                    };
                    let q = tensor(4, queries, 5, dtype);
                    let (k, v) = (tensor(2, keys, 5, dtype), tensor(2, keys, 7, dtype));
                    let bias = Tensor::<4>::ones([1, 4, 1, 1], (device, DType::F32)).require_grad();
                    let mask = AttentionMask::new(&MaskRules::default(), batch, queries, keys);
                    let attention = Attention::new(mask.expect("valid"))
                        .with_bias(bias.clone())
                        .with_implementation(method.0)
                        .with_blocks(method.1);
                    let out = attention.forward(q.clone(), k.clone(), v.clone());
                    assert_eq!((out.dims(), out.dtype()), ([batch, 4, queries, 7], dtype));
                    assert!(out.clone().into_data().iter::<f32>().all(|x| x == 0.0));
                    let gradients = out.sum().backward();
                    for x in [q, k, v, bias] {
                        let gradient = x.grad(&gradients).expect("tracked");
                        assert_eq!((gradient.dims(), gradient.dtype()), (x.dims(), x.dtype()));
                        assert!(gradient.into_data().iter::<f32>().all(|x| x == 0.0));
                    }
                }
            }
        }
    });
}
