//! Flash attention and its gradients, against plain sums in f64.

use std::ffi::CStr;
use std::ptr::{null, null_mut};

use ascend_sim::abi::aclnn::*;
use ascend_sim::abi::operators::*;
use ascend_sim::control;

use crate::harness::*;
use crate::support::{Device, recent_message};

const BNSD: &CStr = c"BNSD";
const BSND: &CStr = c"BSND";
const TND: &CStr = c"TND";
const BATCH: usize = 2;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const DIM: usize = 3;
const SCALE: f64 = 0.7;

/// Sizes, and which key each query of a sample sees.
struct Plain {
    batch: usize,
    queries: usize,
    keys: usize,
    sees: fn(usize, usize, usize) -> bool,
}

/// Values in the order [batch, heads, tokens, channels].
struct Expected {
    out: Vec<f64>,
    max: Vec<f64>,
    sum: Vec<f64>,
    dq: Vec<f64>,
    dk: Vec<f64>,
    dv: Vec<f64>,
}

impl Plain {
    fn run(&self, q: &[f64], k: &[f64], v: &[f64], g: &[f64]) -> Expected {
        let mut all = Expected {
            out: vec![0.0; q.len()],
            max: Vec::new(),
            sum: Vec::new(),
            dq: vec![0.0; q.len()],
            dk: vec![0.0; k.len()],
            dv: vec![0.0; v.len()],
        };
        for sample in 0..self.batch {
            for head in 0..HEADS {
                let kv_head = head / (HEADS / KV_HEADS);
                for query in 0..self.queries {
                    let at = ((sample * HEADS + head) * self.queries + query) * DIM;
                    let of = |key| ((sample * KV_HEADS + kv_head) * self.keys + key) * DIM;
                    let dot =
                        |a: &[f64], b: &[f64]| -> f64 { a.iter().zip(b).map(|(a, b)| a * b).sum() };
                    let seen: Vec<usize> = (0..self.keys)
                        .filter(|key| (self.sees)(sample, query, *key))
                        .collect();
                    let score = |key| SCALE * dot(&q[at..at + DIM], &k[of(key)..of(key) + DIM]);
                    let scores: Vec<f64> = seen.iter().map(|key| score(*key)).collect();
                    let max = scores.iter().copied().fold(f64::MIN, f64::max);
                    let sum: f64 = scores.iter().map(|score| (score - max).exp()).sum();
                    all.max.push(max);
                    all.sum.push(sum);
                    let weights: Vec<f64> = scores.iter().map(|s| (s - max).exp() / sum).collect();
                    for (key, weight) in seen.iter().zip(&weights) {
                        for c in 0..DIM {
                            all.out[at + c] += weight * v[of(*key) + c];
                        }
                    }
                    let g = &g[at..at + DIM];
                    let delta = dot(g, &all.out[at..at + DIM]);
                    for (key, weight) in seen.iter().zip(&weights) {
                        let to = of(*key);
                        let ds = weight * (dot(g, &v[to..to + DIM]) - delta) * SCALE;
                        for c in 0..DIM {
                            all.dq[at + c] += ds * k[to + c];
                            all.dk[to + c] += ds * q[at + c];
                            all.dv[to + c] += weight * g[c];
                        }
                    }
                }
            }
        }
        all
    }
}

fn eightfold(x: &[f64]) -> Vec<f64> {
    x.iter().flat_map(|x| [*x; 8]).collect()
}

/// [batch, heads, tokens, channels] as [batch, tokens, heads, channels].
fn tokens_first(x: &[f64], [batch, heads, tokens]: [usize; 3]) -> Vec<f64> {
    let width = x.len() / (batch * heads * tokens);
    let mut out = Vec::new();
    for b in 0..batch {
        for t in 0..tokens {
            for h in 0..heads {
                let at = ((b * heads + h) * tokens + t) * width;
                out.extend(&x[at..at + width]);
            }
        }
    }
    out
}

/// The triangle of any size.
fn triangle() -> Vec<f64> {
    let mask = (0..2048 * 2048).map(|i| f64::from(i % 2048 > i / 2048));
    mask.collect()
}

#[test]
fn every_mode_gives_the_plain_attention_and_its_gradients() {
    let device = Device::new();
    let triangle = device.tensor(Bool, &[2048, 2048], &triangle());
    let own: Vec<f64> = (0..BATCH * 5 * 6)
        .map(|i| {
            let (sample, query, key) = (i / 30, i / 6 % 5, i % 6);
            f64::from(key > query + sample)
        })
        .collect();
    let own = device.tensor(Bool, &[BATCH as i64, 1, 5, 6], &own);
    let all: (i64, i64) = (1 << 20, 1 << 20);
    type Case = (
        *const aclTensor,
        i64,
        (i64, i64),
        fn(usize, usize, usize) -> bool,
    );
    let cases: [Case; 5] = [
        (null(), 0, all, |_, _, _| true),
        (triangle.raw, 2, all, |_, query, key| key <= query),
        (triangle.raw, 3, all, |_, query, key| key <= query + 1),
        // From the lower right corner: 2 keys before and 1 after.
        (triangle.raw, 4, (2, 1), |_, query, key| {
            key + 2 > query && key <= query + 2
        }),
        (own.raw, 1, all, |sample, query, key| key <= query + sample),
    ];
    let (queries, keys) = (5, 6);
    let q = numbers(BATCH * HEADS * queries * DIM, 1);
    let [k, v] = [2, 3].map(|seed| numbers(BATCH * KV_HEADS * keys * DIM, seed));
    let g = numbers(q.len(), 4);
    for (mask, mode, (before, after), sees) in cases {
        let plain = Plain {
            batch: BATCH,
            queries,
            keys,
            sees,
        };
        let expected = plain.run(&q, &k, &v, &g);
        for layout in [BNSD, BSND] {
            let shaped = |x: &[f64], heads, tokens| match layout == BNSD {
                true => (x.to_vec(), [BATCH, heads, tokens, DIM].map(|n| n as i64)),
                false => (
                    tokens_first(x, [BATCH, heads, tokens]),
                    [BATCH, tokens, heads, DIM].map(|n| n as i64),
                ),
            };
            let input = |x: &[f64], heads, tokens| {
                let (values, dims) = shaped(x, heads, tokens);
                device.tensor(F32, &dims, &values)
            };
            let output = |heads, tokens| {
                let zeros = vec![0.0; BATCH * heads * tokens * DIM];
                let (_, dims) = shaped(&zeros, heads, tokens);
                device.out(F32, &dims)
            };
            let (qt, kt) = (input(&q, HEADS, queries), input(&k, KV_HEADS, keys));
            let (vt, gt) = (input(&v, KV_HEADS, keys), input(&g, HEADS, queries));
            let statistics = [BATCH, HEADS, queries, 8].map(|n| n as i64);
            let (max, sum) = (device.out(F32, &statistics), device.out(F32, &statistics));
            let out = output(HEADS, queries);
            let n = HEADS as i64;
            check! { device;
                aclnnFlashAttentionScore(
                    qt.raw, kt.raw, vt.raw, null(), null(), null(), mask, null(), SCALE, 1.0,
                    before, after, n, layout.as_ptr(), 0, mode, max.raw, sum.raw, null_mut(), out.raw
                ) => out near shaped(&expected.out, HEADS, queries).0, 1e-6;
            }
            assert_close(&max.values(), &eightfold(&expected.max), 1e-6, "max");
            assert_close(&sum.values(), &eightfold(&expected.sum), 1e-6, "sum");
            let (dq, dk) = (output(HEADS, queries), output(KV_HEADS, keys));
            let dv = output(KV_HEADS, keys);
            check! { device;
                aclnnFlashAttentionScoreGrad(
                    qt.raw, kt.raw, vt.raw, gt.raw, null(), null(), null(), mask, max.raw,
                    sum.raw, null(), out.raw, null(), SCALE, 1.0, before, after, n, layout.as_ptr(), 0,
                    mode, dq.raw, dk.raw, dv.raw, null_mut()
                ) => dq near shaped(&expected.dq, HEADS, queries).0, 1e-5;
            }
            assert_close(
                &dk.values(),
                &shaped(&expected.dk, KV_HEADS, keys).0,
                1e-5,
                "dk",
            );
            assert_close(
                &dv.values(),
                &shaped(&expected.dv, KV_HEADS, keys).0,
                1e-5,
                "dv",
            );
        }
    }
    assert_eq!(control::violations(), []);
}

#[test]
fn packed_sequences_attend_within_themselves() {
    let device = Device::new();
    let mask = device.tensor(Bool, &[2048, 2048], &triangle());
    // Two sequences of 2 and 3 tokens, and an empty one between them.
    let tokens = 5;
    let q = numbers(HEADS * tokens * DIM, 1);
    let [k, v] = [2, 3].map(|seed| numbers(KV_HEADS * tokens * DIM, seed));
    let g = numbers(q.len(), 4);
    let plain = Plain {
        batch: 1,
        queries: tokens,
        keys: tokens,
        sees: |_, query, key| key <= query && (query < 2) == (key < 2),
    };
    let expected = plain.run(&q, &k, &v, &g);
    let ends = || ints(&[2, 2, 5]);
    let dims = |heads: usize| [tokens, heads, DIM].map(|n| n as i64);
    let order = |x: &[f64], heads| tokens_first(x, [1, heads, tokens]);
    let input = |x: &[f64], heads| device.tensor(F32, &dims(heads), &order(x, heads));
    let (qt, gt) = (input(&q, HEADS), input(&g, HEADS));
    let (kt, vt) = (input(&k, KV_HEADS), input(&v, KV_HEADS));
    let statistics = [tokens, HEADS, 8].map(|n| n as i64);
    let (max, sum) = (device.out(F32, &statistics), device.out(F32, &statistics));
    let (out, dq) = (device.out(F32, &dims(HEADS)), device.out(F32, &dims(HEADS)));
    let (dk, dv) = (
        device.out(F32, &dims(KV_HEADS)),
        device.out(F32, &dims(KV_HEADS)),
    );
    let (n, tnd) = (HEADS as i64, TND.as_ptr());
    check! { device;
        aclnnFlashAttentionVarLenScore(
            qt.raw, kt.raw, vt.raw, null(), null(), null(), mask.raw, null(), ends(), ends(),
            SCALE, 1.0, 0, 0, n, tnd, 0, 3, max.raw, sum.raw, null_mut(), out.raw
        ) => out near order(&expected.out, HEADS), 1e-6;
        aclnnFlashAttentionUnpaddingScoreGrad(
            qt.raw, kt.raw, vt.raw, gt.raw, null(), null(), null(), mask.raw, max.raw, sum.raw,
            null(), out.raw, null(), ends(), ends(), SCALE, 1.0, 0, 0, n, tnd, 0, 3, dq.raw,
            dk.raw, dv.raw, null_mut()
        ) => dq near order(&expected.dq, HEADS), 1e-5;
        aclnnFlashAttentionVarLenScore(
            qt.raw, kt.raw, vt.raw, null(), null(), null(), mask.raw, null(), ints(&[2, 4]),
            ends(), SCALE, 1.0, 0, 0, n, tnd, 0, 3, max.raw, sum.raw, null_mut(), out.raw
        ) refuses TILING, "2 and 3 entries";
        aclnnFlashAttentionVarLenScore(
            qt.raw, kt.raw, vt.raw, null(), null(), null(), mask.raw, null(), ints(&[2, 4]),
            ints(&[2, 4]), SCALE, 1.0, 0, 0, n, tnd, 0, 3, max.raw, sum.raw, null_mut(), out.raw
        ) refuses TILING, "5] tokens";
    }
    assert_close(&dk.values(), &order(&expected.dk, KV_HEADS), 1e-5, "dk");
    assert_close(&dv.values(), &order(&expected.dv, KV_HEADS), 1e-5, "dv");
    assert_eq!(control::violations(), []);
}

#[test]
fn what_the_documents_exclude_is_refused_and_what_they_leave_open_is_noticed() {
    let device = Device::new();
    let dims = [1, 2, 4, 8];
    let x = numbers(64, 1);
    let q = device.tensor(F32, &dims, &x);
    let half = device.tensor(F16, &dims, &x);
    let narrow = device.tensor(F32, &[1, 2, 4, 4], &x[..32]);
    let three = device.tensor(F32, &[1, 3, 4, 8], &numbers(96, 2));
    let (max, sum) = (
        device.out(F32, &[1, 2, 4, 8]),
        device.out(F32, &[1, 2, 4, 8]),
    );
    let short = device.out(F32, &[1, 2, 4]);
    let out = device.out(F32, &dims);
    let small = device.tensor(Bool, &[4, 4], &[0.0; 16]);
    let odd = device.tensor(Bool, &[4, 3], &[0.0; 12]);
    let (bnsd, no) = (BNSD.as_ptr(), null::<aclTensor>());
    let all = 1 << 20;
    check! { device;
        aclnnFlashAttentionScore(
            q.raw, half.raw, q.raw, no, no, no, no, null(), 1.0, 1.0, all, all, 2, bnsd, 0, 0,
            max.raw, sum.raw, null_mut(), out.raw
        ) refuses PARAM_INVALID, "key is Float16";
        aclnnFlashAttentionScore(
            narrow.raw, narrow.raw, q.raw, no, no, no, no, null(), 1.0, 1.0, all, all, 2, bnsd, 0,
            0, max.raw, sum.raw, null_mut(), out.raw
        ) refuses PARAM_INVALID, "[1, 2, 4, 4] and [1, 2, 4, 8]; expected";
        aclnnFlashAttentionScore(
            q.raw, q.raw, q.raw, no, no, no, no, null(), 1.0, 1.0, all, all, 3, bnsd, 0, 0,
            max.raw, sum.raw, null_mut(), out.raw
        ) refuses NULL_POINTER, "softmaxMaxOut has shape [1, 2, 4, 8], [1, 3, 4, 8] is expected";
        aclnnFlashAttentionScoreGrad(
            q.raw, q.raw, q.raw, q.raw, no, no, no, no, max.raw, sum.raw, no, out.raw, null(), 1.0,
            1.0, all, all, 3, bnsd, 0, 0, out.raw, out.raw, out.raw, null_mut()
        ) refuses TILING, "tiling: headNum is 3";
        aclnnFlashAttentionScoreGrad(
            q.raw, q.raw, q.raw, q.raw, no, no, no, no, max.raw, sum.raw, no, out.raw, null(), 1.0,
            1.0, all, all, 2, bnsd, 0, 0, out.raw, max.raw, short.raw, null_mut()
        ) refuses NULL_POINTER, "dvOut has shape [1, 2, 4], [1, 2, 4, 8] is expected";
        aclnnFlashAttentionScore(
            q.raw, three.raw, three.raw, no, no, no, no, null(), 1.0, 1.0, all, all, 2, bnsd, 0, 0,
            max.raw, sum.raw, null_mut(), out.raw
        ) refuses TILING, "2 heads of q do not divide by 3";
        aclnnFlashAttentionScore(
            q.raw, q.raw, q.raw, no, no, no, small.raw, null(), 1.0, 1.0, all, all, 2, bnsd, 0, 3,
            max.raw, sum.raw, null_mut(), out.raw
        ) refuses TILING, "takes [2048, 2048]";
        aclnnFlashAttentionScore(
            q.raw, q.raw, q.raw, no, no, no, odd.raw, null(), 1.0, 1.0, all, all, 2, bnsd, 0, 1,
            max.raw, sum.raw, null_mut(), out.raw
        ) refuses TILING, "does not fit 4 queries and 4 keys";
        aclnnFlashAttentionScore(
            q.raw, q.raw, q.raw, no, no, no, small.raw, null(), 1.0, 1.0, -2, -1, 2, bnsd, 0, 0,
            max.raw, sum.raw, null_mut(), out.raw
        ) refuses TILING, "leave nothing to compute";
        aclnnFlashAttentionScore(
            q.raw, q.raw, q.raw, no, no, no, no, null(), 1.0, 1.0, all, all, 2, TND.as_ptr(), 0, 0,
            max.raw, sum.raw, null_mut(), out.raw
        ) refuses PARAM_INVALID, "TND";
        aclnnFlashAttentionScore(
            q.raw, q.raw, q.raw, no, no, no, no, null(), 1.0, 1.0, all, all, 2, bnsd, 0, 0,
            short.raw, sum.raw, null_mut(), out.raw
        ) refuses NULL_POINTER, "softmaxMaxOut has shape [1, 2, 4]";
        aclnnFlashAttentionScore(
            q.raw, q.raw, q.raw, no, no, no, no, null(), 1.0, 1.0, all, all, 0, bnsd, 0, 0,
            max.raw, sum.raw, null_mut(), out.raw
        ) refuses PARAM_INVALID, "headNum is 0";
        aclnnFlashAttentionScoreGrad(
            q.raw, q.raw, q.raw, q.raw, no, no, no, no, no, sum.raw, no, out.raw, null(), 1.0, 1.0,
            all, all, 2, bnsd, 0, 0, out.raw, out.raw, out.raw, null_mut()
        ) refuses TILING, "is null";
    }
    // A row that sees nothing.
    let hidden: Vec<f64> = (0..16).map(|i| f64::from(i < 4)).collect();
    let hidden = device.tensor(Bool, &[4, 4], &hidden);
    for (precise, expected) in [(0, f64::NAN), (2, 0.0)] {
        check! { device;
            aclnnFlashAttentionScore(
                q.raw, q.raw, q.raw, no, no, no, hidden.raw, null(), 1.0, 1.0, all, all, 2, bnsd,
                precise, 1, max.raw, sum.raw, null_mut(), out.raw
            );
        }
        assert_close(
            &out.values()[..8],
            &[expected; 8],
            0.0,
            "a row that sees nothing",
        );
        assert!(out.values()[8].is_finite());
    }
    assert_eq!(control::violations(), []);
}

#[test]
fn statistics_of_another_forward_end_the_stream() {
    let device = Device::new();
    let dims = [1, 1, 2, 4];
    let x = device.tensor(F32, &dims, &numbers(8, 1));
    let (max, sum) = (
        device.out(F32, &[1, 1, 2, 8]),
        device.out(F32, &[1, 1, 2, 8]),
    );
    let outs = [(); 3].map(|()| device.out(F32, &dims));
    let (bnsd, no) = (BNSD.as_ptr(), null::<aclTensor>());
    let failed = run!(
        device,
        aclnnFlashAttentionScoreGrad(
            x.raw,
            x.raw,
            x.raw,
            x.raw,
            no,
            no,
            no,
            no,
            max.raw,
            sum.raw,
            no,
            x.raw,
            null(),
            1.0,
            1.0,
            9,
            9,
            1,
            bnsd,
            0,
            0,
            outs[0].raw,
            outs[1].raw,
            outs[2].raw,
            null_mut()
        )
    );
    assert_eq!(failed.expect_err("they are of none").0, EXCEPTION);
    assert!(!control::take_violations().is_empty());
}
