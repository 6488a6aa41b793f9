//! Attention as a custom operation.
//!
//! A mask is sent as runs of queries whose spans of keys stand still or advance by one key per
//! query, so a causal mask is five numbers whatever its size. Padding is sent as the lengths of its
//! runs.

use burn::backend::{Remote, TensorMetadata, tensor::FloatTensor};
use burn::tensor::{DType, Shape};
use burn_fused::{OpError, Reader, WireOp, Writer, accumulator, like, send};

use super::mask::{AttentionMask, Run};
use super::op::{AttentionGradients, AttentionOp, AttentionOps, Bias, Kept};
use crate::error::{AttentionError, Result};

/// The most queries, keys and padding flags of a mask that is read: tensors without elements may
/// state any sizes.
const MOST_TOKENS: usize = 1 << 26;
const MOST_FLAGS: usize = 1 << 30;

/// The custom operations.
const FORWARD: &str = "attention.forward";
const BACKWARD: &str = "attention.backward";

/// The arguments of an operation besides tensors.
#[derive(Clone, Debug)]
struct Call {
    op: AttentionOp,
    /// True if the gradient of the bias is among the outputs.
    bias_wanted: bool,
}

/// The lengths of runs of equal flags, of which the first is one of true.
fn alternating(flags: &[bool]) -> Vec<usize> {
    let mut lengths = vec![0];
    let mut kind = true;
    for flag in flags {
        if *flag != kind {
            kind = *flag;
            lengths.push(0);
        }
        if let Some(length) = lengths.last_mut() {
            *length += 1;
        }
    }
    lengths
}

/// The numbers are the scale; whether blocks compute, and their scores; whether the gradient of the
/// bias is wanted; keys, the number of runs, five numbers for each; the number of runs of padding
/// flags, and their lengths, alternately of true and false.
impl WireOp for Call {
    const VERSION: u64 = 3;
    type Error = AttentionError;

    fn write(&self, numbers: &mut Writer) {
        let AttentionOp {
            mask,
            scale,
            blocks,
        } = &self.op;
        numbers.float(*scale);
        numbers.flag(blocks.is_some());
        numbers.size(blocks.unwrap_or(0));
        numbers.flag(self.bias_wanted);
        numbers.size(mask.keys());
        let runs = mask.runs();
        numbers.size(runs.len());
        for run in runs {
            numbers.size(run.queries);
            numbers.size(run.start);
            numbers.size(run.end);
            numbers.flag(run.start_advances);
            numbers.flag(run.end_advances);
        }
        let flags = mask.padding().map(alternating).unwrap_or_default();
        numbers.size(flags.len());
        flags.into_iter().for_each(|length| numbers.size(length));
    }

    /// Allocates nothing larger than the tensors: a mask has no more queries, keys and samples.
    fn read(numbers: &mut Reader<'_>) -> Result<Self> {
        let shapes = numbers.shapes().iter();
        let shapes: Result<Vec<[usize; 4]>, _> = shapes.map(four_dims).collect();
        let ([batch, _, queries, _], [_, _, most_keys, _]) = match &shapes?[..] {
            [q, k, ..] => (*q, *k),
            _ => unreachable!("the number of tensors was compared"),
        };
        let scale = numbers.float("the scale")?;
        let in_blocks = numbers.flag("the choice of blocks")?;
        let scores = numbers.size("the scores of a block", usize::MAX)?;
        let bias_wanted = numbers.flag("the gradient of the bias")?;
        let keys = numbers.size("the keys", most_keys.min(MOST_TOKENS))?;
        let mut left = queries.min(MOST_TOKENS);
        let count = numbers.size("the runs of queries", left)?;
        let mut runs = Vec::new();
        for _ in 0..count {
            let run = Run {
                queries: numbers.size("the queries of a run", left)?,
                start: numbers.size("the first key of a run", keys)?,
                end: numbers.size("the end of a run", keys)?,
                start_advances: numbers.flag("whether the first key advances")?,
                end_advances: numbers.flag("whether the end advances")?,
            };
            left -= run.queries;
            runs.push(run);
        }
        let mut left = batch.saturating_mul(keys).min(MOST_FLAGS);
        let count = numbers.size("the runs of padding", left.saturating_add(1))?;
        let mut attended = Vec::new();
        for index in 0..count {
            let length = numbers.size("a run of padding", left)?;
            left -= length;
            attended.resize(attended.len() + length, index % 2 == 0);
        }
        let op = AttentionOp {
            mask: AttentionMask::from_runs(keys, &runs, attended)?,
            scale,
            blocks: in_blocks.then_some(scores),
        };
        Ok(Self { op, bias_wanted })
    }
}

fn four_dims(shape: &Shape) -> Result<[usize; 4], OpError> {
    shape[..].try_into().map_err(|_| OpError::Wire {
        what: "the shape of a tensor",
        expected: "4 dimensions".to_owned(),
        found: shape.to_string(),
    })
}

impl AttentionOps for Remote {
    fn attention_forward(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        bias: Bias<Self>,
        op: AttentionOp,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let [batch, heads, queries, _] = q.shape().dims();
        let value_dim = v.shape()[3];
        let wide = accumulator(q.dtype()).map_or(DType::F32, DType::from);
        let outputs = [
            (Shape::new([batch, heads, queries, value_dim]), q.dtype()),
            (Shape::new([batch, heads, queries, 2]), wide),
        ];
        let call = Call {
            op,
            bias_wanted: false,
        };
        let inputs = [q, k, v].into_iter().chain(bias.into_option()).collect();
        send(FORWARD, &call, inputs, outputs).into()
    }

    fn attention_backward(
        kept: Kept<Self>,
        gradient: FloatTensor<Self>,
        bias_wanted: bool,
        op: AttentionOp,
    ) -> AttentionGradients<Self> {
        let bias = kept.bias.into_option();
        let [dq, dk, dv] = [&kept.q, &kept.k, &kept.v].map(like);
        let dbias = bias.as_ref().filter(|_| bias_wanted).map(like);
        let call = Call {
            op,
            bias_wanted: dbias.is_some(),
        };
        let tensors = [kept.q, kept.k, kept.v, kept.out, kept.softmax, gradient];
        let inputs = tensors.into_iter().chain(bias).collect();
        match dbias {
            Some(dbias) => {
                let [dq, dk, dv, dbias] = send(BACKWARD, &call, inputs, [dq, dk, dv, dbias]);
                (dq, dk, dv, Some(dbias))
            }
            None => {
                let [dq, dk, dv] = send(BACKWARD, &call, inputs, [dq, dk, dv]);
                (dq, dk, dv, None)
            }
        }
    }
}

#[cfg(feature = "remote-server")]
mod server {
    use burn::backend::ir::BackendIr;
    use burn_fused::{expect_shape, handle};
    use burn_remote::server::CustomOpRegistry;

    use super::*;
    use crate::attention::op::Sizes;

    /// Lets a server attend by its backend.
    pub(crate) fn register<B: BackendIr + AttentionOps>(operations: &mut CustomOpRegistry<B>) {
        handle(
            operations,
            FORWARD,
            |call: &Call, ([q, k, v], bias): &([_; 3], _)| check(call, [q, k, v], bias.as_ref()),
            |call, ([q, k, v], bias)| {
                <[_; 2]>::from(B::attention_forward(q, k, v, bias.into(), call.op))
            },
        );
        handle(
            operations,
            BACKWARD,
            |call: &Call, ([q, k, v, out, softmax, gradient], bias): &([_; 6], _)| {
                check(call, [q, k, v], bias.as_ref())?;
                let Sizes {
                    batch,
                    heads,
                    queries,
                    value_dim,
                    ..
                } = Sizes::of(q, k, v);
                let output = (&[batch, heads, queries, value_dim][..], q.dtype());
                let rows = (
                    &[batch, heads, queries, 2][..],
                    accumulator(q.dtype())?.into(),
                );
                expect_shape("the output", out, output, q)?;
                expect_shape("the gradient", gradient, output, q)?;
                Ok(expect_shape("the sums of the softmax", softmax, rows, q)?)
            },
            |call, ([q, k, v, out, softmax, gradient], bias)| {
                let kept = Kept {
                    q,
                    k,
                    v,
                    bias: bias.into(),
                    out,
                    softmax,
                };
                let (dq, dk, dv, dbias) =
                    B::attention_backward(kept, gradient, call.bias_wanted, call.op);
                [dq, dk, dv].into_iter().chain(dbias)
            },
        );
    }

    fn check<T: TensorMetadata>(call: &Call, [q, k, v]: [&T; 3], bias: Option<&T>) -> Result<()> {
        call.op.check(q, k, v, bias)?;
        if Sizes::of(q, k, v).are_empty() {
            // A client of ours computes it itself.
            return Err(OpError::Wire {
                what: "the sizes of q and k",
                expected: "none that is 0".to_owned(),
                found: format!("{:?} and {:?}", &q.shape()[..], &k.shape()[..]),
            }
            .into());
        }
        Ok(())
    }
}

#[cfg(feature = "remote-server")]
pub(crate) use server::register;

#[cfg(test)]
mod tests {
    use burn::backend::ir::ScalarIr;
    use burn_fused::{decode, encode};

    use super::*;
    use crate::attention::mask::{MaskRules, Window};

    fn call(rules: &MaskRules, [batch, queries, keys]: [usize; 3], blocks: Option<usize>) -> Call {
        Call {
            op: AttentionOp {
                mask: AttentionMask::new(rules, batch, queries, keys).expect("valid rules"),
                scale: 0.125,
                blocks,
            },
            bias_wanted: false,
        }
    }

    /// The shapes of q and k.
    fn shapes([batch, queries, keys]: [usize; 3]) -> [Shape; 2] {
        [queries, keys].map(|tokens| Shape::new([batch, 2, tokens, 8]))
    }

    const CAUSAL: MaskRules<'static> = MaskRules {
        causal: true,
        window: None,
        cu_seqlens: None,
        attended: None,
    };

    #[test]
    fn the_numbers_on_the_wire_stay_what_they_are() {
        let attended = [true, false, false, true, true, true];
        let rules = MaskRules {
            attended: Some(&attended),
            ..CAUSAL
        };
        let call = call(&rules, [2, 3, 3], Some(9));
        let counts = [1, 9, 0, 3, 1, 3, 0, 1, 0, 1, 3, 1, 2, 3].map(ScalarIr::UInt);
        let first = [ScalarIr::UInt(3), ScalarIr::Float(0.125)];
        assert_eq!(encode(&call), [&first[..], &counts].concat());
    }

    #[test]
    fn every_mask_comes_back() {
        let attended = [false, true, true, true, true, true, true, true, true, false];
        let window = |before, after| MaskRules {
            window: Some(Window { before, after }),
            ..MaskRules::default()
        };
        for rules in [
            MaskRules::default(),
            CAUSAL,
            window(2, 0),
            window(1, 3),
            MaskRules {
                cu_seqlens: Some(&[0, 2, 2, 5]),
                ..CAUSAL
            },
            MaskRules {
                attended: Some(&attended),
                ..CAUSAL
            },
        ] {
            for blocks in [None, Some(1 << 40)] {
                let sent = call(&rules, [2, 5, 5], blocks);
                let found: Call = decode(&encode(&sent), &shapes([2, 5, 5])).expect("reads");
                assert_eq!(found.op.mask, sent.op.mask);
                assert_eq!((found.op.scale, found.op.blocks), (0.125, blocks));
                assert!(!found.bias_wanted);
            }
        }
        // As long as the tokens are many, the numbers stay few.
        let long = call(&CAUSAL, [1, 100_000, 100_000], None);
        assert_eq!(encode(&long).len(), 13);
    }

    #[test]
    fn foreign_numbers_are_refused_by_name() {
        let valid = encode(&call(&CAUSAL, [1, 4, 4], None));
        let refused = |index: usize, number: u64, part: &str| {
            let mut foreign = valid.clone();
            foreign[index] = ScalarIr::UInt(number);
            let error = decode::<Call>(&foreign, &shapes([1, 4, 4])).expect_err(part);
            let error = error.to_string();
            assert!(error.contains(part), "{part} is not in {error}");
        };
        refused(0, 1, "the version");
        refused(1, 0, "the scale is 0, expected a float");
        refused(2, 2, "the choice of blocks");
        refused(5, 5, "the keys");
        refused(5, 3, "the end of a run");
        // No more is allocated than the tensors have.
        refused(6, u64::MAX, "the runs of queries");
        refused(7, 5, "the queries of a run");
        refused(7, u64::from(u32::MAX), "the queries of a run");
        refused(12, 6, "the runs of padding");
        refused(8, 5, "the first key of a run");
        refused(12, 1, "a run of padding");
        for others in [&valid[..9], &[], &[&valid[..], &valid[..1]].concat()] {
            assert!(decode::<Call>(others, &shapes([1, 4, 4])).is_err());
        }
    }

    /// Numbers of real calls, some of them others: refused, or a mask within the tensors that reads
    /// back as itself.
    #[test]
    fn damaged_numbers_are_refused_or_make_a_mask_within_the_tensors() {
        let padding = [true, false, true, true, true, true, true, false];
        let rules = [
            CAUSAL,
            MaskRules {
                window: Some(Window {
                    before: 1,
                    after: 1,
                }),
                ..MaskRules::default()
            },
            MaskRules {
                cu_seqlens: Some(&[0, 1, 4]),
                attended: Some(&padding),
                ..CAUSAL
            },
        ];
        let mut state = 1_u64;
        let mut random = |limit: u64| {
            // The generator of Steele, Lea and Flood 2014, SplitMix.
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut z = state;
            z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            (z ^ (z >> 31)) % limit
        };
        let sizes = [2, 4, 4];
        let (mut read, mut refused) = (0, 0);
        for _ in 0..200_000 {
            let rules = &rules[random(3) as usize];
            let mut numbers = encode(&call(rules, sizes, None));
            for _ in 0..=random(3) {
                let at = random(numbers.len() as u64) as usize;
                match random(8) {
                    0 => numbers.truncate(at + 1),
                    1 => numbers.push(ScalarIr::UInt(random(6))),
                    2 => numbers[at] = ScalarIr::Float(1.0),
                    3 => numbers[at] = ScalarIr::UInt(u64::MAX >> random(64)),
                    _ => numbers[at] = ScalarIr::UInt(random(6)),
                }
            }
            let Ok(found) = decode::<Call>(&numbers, &shapes(sizes)) else {
                refused += 1;
                continue;
            };
            read += 1;
            let mask = &found.op.mask;
            assert!(mask.keys() <= 4 && mask.queries() <= 4, "{numbers:?}");
            assert!(mask.padding().is_none_or(|flags| flags.len() <= 8));
            for query in 0..mask.queries() {
                let span = mask.span(query);
                assert!(
                    span.start <= span.end && span.end <= mask.keys(),
                    "{numbers:?}"
                );
            }
            let again =
                decode::<Call>(&encode(&found), &shapes(sizes)).expect("what was read is written");
            assert_eq!(again.op.mask, found.op.mask, "{numbers:?}");
        }
        assert!(
            read > 1000 && refused > 1000,
            "{read} read, {refused} refused"
        );
    }
}
