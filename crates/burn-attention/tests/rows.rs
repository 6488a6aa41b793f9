//! On the CPU, the bits of a row do not depend on the other rows, however many there are.

use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_attention::{
    Attention, AttentionMask, CrossEntropy, MaskRules, Window, grouped_linear, linear,
};

use crate::numbers;

/// Not f16: gemm rounds its sums in between, elsewhere for few rows.
const DTYPES: [DType; 3] = [DType::F64, DType::F32, DType::BF16];

fn tensor<const D: usize>(seed: u64, shape: [usize; D], dtype: DType) -> Tensor<D> {
    let data = TensorData::new(numbers(seed, shape.iter().product(), dtype), shape);
    Tensor::from_data(data, (&Device::flex(), dtype))
}

/// The bits of the first rows of what `of` computes for more and fewer rows are equal.
fn expect_independent(
    what: &str,
    rows: Tensor<2>,
    counts: &[usize],
    of: impl Fn(Tensor<2>) -> Tensor<2>,
) {
    let whole = of(rows.clone());
    let [_, columns] = whole.dims();
    let whole = whole.into_data();
    for count in counts {
        let found = of(rows.clone().narrow(0, 0, *count)).into_data();
        let bytes = count * columns * whole.dtype().size();
        assert_eq!(
            found.bytes()[..],
            whole.bytes()[..bytes],
            "{what}: {count} rows"
        );
    }
}

#[test]
fn products_have_the_rows_of_larger_ones() {
    const ROWS: usize = 300;
    const COUNTS: [usize; 7] = [1, 2, 7, 33, 64, 65, 257];
    for dtype in DTYPES {
        let inputs: &[usize] = match dtype {
            DType::F32 => &[2, 3, 64, 512, 514, 896, 1100],
            _ => &[3, 896],
        };
        for &inputs in inputs {
            for outputs in [1, 2, 24, 65, 258] {
                for transposed in [false, true] {
                    let what = format!("{dtype:?}, {inputs} to {outputs}, {transposed}");
                    let x = tensor(1, [ROWS, inputs], dtype);
                    let weight = match transposed {
                        false => tensor(2, [inputs, outputs], dtype),
                        true => tensor(2, [outputs, inputs], dtype).transpose(),
                    };
                    let bias = tensor(3, [outputs], dtype);
                    expect_independent(&what, x, &COUNTS, |x| {
                        linear(x, weight.clone(), Some(bias.clone()), None).expect("it fits")
                    });
                }
            }
        }
    }
}

/// A trainer computes what a generator does.
#[test]
fn products_with_gradients_have_the_bits_of_those_without() {
    for dtype in [DType::F32, DType::BF16] {
        for inputs in [3, 64, 896] {
            for outputs in [1, 2, 15, 24, 65] {
                for rows in [1, 2, 17, 64, 65, 300] {
                    let x = tensor(1, [rows, inputs], dtype);
                    let weight = tensor(2, [outputs, inputs], dtype).transpose();
                    let plain = linear(x.clone(), weight.clone(), None, None).expect("it fits");
                    let [x, weight] = [x, weight].map(Tensor::from_inner);
                    let tracked = linear(x.require_grad(), weight, None, None).expect("it fits");
                    assert_eq!(
                        tracked.inner().into_data().bytes()[..],
                        plain.into_data().bytes()[..],
                        "{dtype:?}, {rows} rows, {inputs} to {outputs}"
                    );
                }
            }
        }
    }
}

#[test]
fn products_with_adapters_and_of_groups_have_the_rows_of_larger_ones() {
    for dtype in [DType::F32, DType::BF16] {
        let x = tensor(1, [300, 896], dtype);
        let (weight, a) = (
            tensor(2, [896, 70], dtype),
            tensor(3, [896, 16], DType::F32),
        );
        let b = tensor(4, [16, 70], DType::F32);
        expect_independent("an adapter", x.clone(), &[1, 5, 64, 65, 200], |x| {
            let adapter = [a.clone(), b.clone()];
            linear(x, weight.clone(), None, Some(adapter)).expect("it fits")
        });
        let weight = tensor(5, [1, 30, 896], dtype);
        expect_independent("a group", x, &[1, 5, 64, 65, 200], |x| {
            let rows = x.dims()[0];
            grouped_linear(x, weight.clone(), &[rows]).expect("it fits")
        });
    }
}

#[test]
fn losses_have_the_rows_of_larger_batches() {
    const WORDS: usize = 1500;
    for dtype in [DType::F32, DType::BF16] {
        let weight = tensor(2, [WORDS, 24], dtype);
        for blocks in [None, Some(1 << 16)] {
            let hidden = tensor(1, [130, 24], dtype);
            expect_independent("losses", hidden, &[1, 2, 17, 64, 129], |hidden| {
                let rows = hidden.dims()[0];
                let targets: Vec<i64> = (0..rows as i64).map(|row| row * 11 % 1500).collect();
                let loss = CrossEntropy::new(&targets, WORDS).expect("valid");
                let loss = loss.with_blocks(blocks);
                let losses = loss.by_row(hidden, weight.clone()).expect("it fits");
                losses.unsqueeze_dim(1)
            });
        }
    }
}

const HEADS: [usize; 2] = [4, 2];
const CHANNELS: usize = 24;
/// More keys than two tiles have.
const TOKENS: usize = 600;

/// q, k and v of a sequence, `[1, heads, tokens, channels]`.
fn sequence(dtype: DType) -> [Tensor<4>; 3] {
    [(1, HEADS[0]), (2, HEADS[1]), (3, HEADS[1])]
        .map(|(seed, heads)| tensor(seed, [1, heads, TOKENS, CHANNELS], dtype))
}

fn attend(rules: &MaskRules, [q, k, v]: [Tensor<4>; 3]) -> Tensor<4> {
    let ([batch, _, queries, _], [_, _, keys, _]) = (q.dims(), k.dims());
    let mask = AttentionMask::new(rules, batch, queries, keys).expect("valid rules");
    Attention::new(mask).try_forward(q, k, v).expect("it fits")
}

/// The bits of some tokens of the first sample.
fn bits(out: &Tensor<4>, tokens: std::ops::Range<usize>) -> Vec<u8> {
    let part = out.clone().slice([0..1, 0..HEADS[0], tokens]);
    part.into_data().bytes().to_vec()
}

#[test]
fn attention_has_the_rows_of_prefill_padding_and_packs() {
    for dtype in [DType::F32, DType::BF16] {
        for window in [
            None,
            Some(Window {
                before: 290,
                after: 0,
            }),
        ] {
            let causal = MaskRules {
                causal: true,
                window,
                ..MaskRules::default()
            };
            let tokens = sequence(dtype);
            let whole = attend(&causal, tokens.clone());
            let cut = |x: &Tensor<4>, tokens| x.clone().slice([0..1, 0..x.dims()[1], tokens]);
            // A prompt, and one token or some after it, with the keys of a cache.
            for (start, end) in [
                (0, 1),
                (0, 2),
                (0, 300),
                (1, 2),
                (17, 18),
                (299, 300),
                (512, 520),
            ] {
                let [q, k, v] = &tokens;
                let found = [cut(q, start..end), cut(k, 0..end), cut(v, 0..end)];
                let found = attend(&causal, found);
                let name = format!("{dtype:?}, {window:?}, {start}..{end}");
                assert_eq!(
                    bits(&found, 0..end - start),
                    bits(&whole, start..end),
                    "{name}"
                );
            }
            // Behind padding, beside a longer sample.
            for padding in [1, 40, 300] {
                let behind = tokens.each_ref().map(|x| {
                    let [_, heads, _, channels] = x.dims();
                    let before = tensor(9, [1, heads, padding, channels], dtype);
                    let row = Tensor::cat(vec![before, x.clone()], 2);
                    let other = tensor(8, row.dims(), dtype);
                    Tensor::cat(vec![row, other], 0)
                });
                let all = padding + TOKENS;
                let attended: Vec<bool> = (0..2 * all).map(|key| key >= padding).collect();
                let rules = MaskRules {
                    attended: Some(&attended),
                    ..causal
                };
                let found = attend(&rules, behind);
                let name = format!("{dtype:?}, {window:?}, {padding} of padding");
                assert_eq!(
                    bits(&found, padding..all),
                    bits(&whole, 0..TOKENS),
                    "{name}"
                );
            }
            // Between other sequences of a pack.
            for (before, after) in [(1, 0), (100, 50), (300, 7)] {
                let packed = tokens.each_ref().map(|x| {
                    let [_, heads, _, channels] = x.dims();
                    let other = |seed, count| tensor(seed, [1, heads, count, channels], dtype);
                    let mut parts = vec![other(6, before), x.clone()];
                    parts.extend((after > 0).then(|| other(7, after)));
                    Tensor::cat(parts, 2)
                });
                let end = before + TOKENS;
                let mut ends = vec![0, before, end, end + after];
                ends.dedup();
                let rules = MaskRules {
                    cu_seqlens: Some(&ends),
                    ..causal
                };
                let found = attend(&rules, packed);
                let name = format!("{dtype:?}, {window:?}, {before} before, {after} after");
                assert_eq!(bits(&found, before..end), bits(&whole, 0..TOKENS), "{name}");
            }
        }
    }
}
