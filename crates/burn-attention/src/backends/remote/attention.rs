//! Attention as a custom operation.
//!
//! A mask travels as runs of queries whose spans of keys stand still or advance by one key a query,
//! so that a causal one is five numbers whatever its size, and padding as the lengths of its runs.

use burn::backend::ir::ScalarIr;
use burn::backend::{Remote, TensorMetadata, tensor::FloatTensor};
use burn::tensor::{DType, Shape};

use super::wire::{Reader, next, send};
use crate::error::Result;
use crate::mask::{AttentionMask, Run};
use crate::ops::{AttentionOp, AttentionOps, Bias, Kept, Method, accumulator};

/// The version of the numbers that an operation travels as; another meaning of one is another
/// version.
const VERSION: u64 = 2;

/// The most queries, keys and padding flags of a mask that is read: tensors without elements may
/// state any sizes.
const MOST_TOKENS: usize = 1 << 26;
const MOST_FLAGS: usize = 1 << 30;

/// The custom operations.
const FORWARD: &str = "attention.forward";
const BACKWARD: &str = "attention.backward";

/// What an operation is called with besides tensors.
#[derive(Clone, Debug)]
struct Call {
    op: AttentionOp,
    /// Whether a bias is among the tensors.
    biased: bool,
    /// Whether its gradient is.
    bias_wanted: bool,
}

/// The numbers of an operation: version, the bits of the scale, method (0 fused, 1 blocks, 2
/// composed) and its scores, bias, gradient of the bias, keys, the number of runs, five numbers for
/// each; the number of runs of padding flags, and their lengths, of true and of false in turns.
fn encode(call: &Call) -> Vec<u64> {
    let Call {
        op,
        biased,
        bias_wanted,
    } = call;
    let (method, scores) = match op.method {
        Method::Fused => (0, 0),
        Method::Blocks { scores } => (1, scores),
        Method::Composed => (2, 0),
    };
    let runs = op.mask.runs();
    let mut numbers = vec![
        VERSION,
        op.scale.to_bits(),
        method,
        scores as u64,
        u64::from(*biased),
        u64::from(*bias_wanted),
        op.mask.keys() as u64,
        runs.len() as u64,
    ];
    for run in runs {
        numbers.extend([run.queries, run.start, run.end].map(|number| number as u64));
        numbers.extend([run.start_advances, run.end_advances].map(u64::from));
    }
    let flags = op.mask.padding().map(alternating).unwrap_or_default();
    numbers.push(flags.len() as u64);
    numbers.extend(flags);
    numbers
}

/// The lengths of runs of equal flags, of which the first is one of true.
fn alternating(flags: &[bool]) -> Vec<u64> {
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

/// The sizes of the tensors that a call came with, which bound what its numbers may ask for.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(
    not(feature = "remote-server"),
    allow(dead_code, reason = "a client only encodes")
)]
struct Came {
    batch: usize,
    queries: usize,
    keys: usize,
}

/// The inverse of [`encode`].
///
/// # Errors
/// [`AttentionError::Wire`](crate::AttentionError::Wire) for other numbers, and for a mask of more
/// queries, keys or samples than came: nothing larger than the tensors is allocated.
#[cfg_attr(
    not(feature = "remote-server"),
    allow(dead_code, reason = "a client only encodes")
)]
fn decode(scalars: &[ScalarIr], came: Came) -> Result<Call> {
    let mut reader = Reader::new(scalars, VERSION)?;
    let scale = f64::from_bits(reader.number("the scale", u64::MAX)?);
    let method = reader.number("the method", 2)?;
    let scores = reader.number("the scores of a block", u64::MAX)? as usize;
    let biased = reader.flag("the bias")?;
    let bias_wanted = reader.flag("the gradient of the bias")?;
    let keys = reader.size("the keys", came.keys.min(MOST_TOKENS))?;
    let mut left = came.queries.min(MOST_TOKENS);
    let count = reader.size("the runs of queries", left)?;
    let mut runs = Vec::new();
    for _ in 0..count {
        let run = Run {
            queries: reader.size("the queries of a run", left)?,
            start: reader.size("the first key of a run", keys)?,
            end: reader.size("the end of a run", keys)?,
            start_advances: reader.flag("whether the first key advances")?,
            end_advances: reader.flag("whether the end advances")?,
        };
        left -= run.queries;
        runs.push(run);
    }
    let mut left = came.batch.saturating_mul(keys).min(MOST_FLAGS);
    let count = reader.size("the runs of padding", left.saturating_add(1))?;
    let mut attended = Vec::new();
    for index in 0..count {
        let length = reader.size("a run of padding", left)?;
        left -= length;
        attended.resize(attended.len() + length, index % 2 == 0);
    }
    reader.end()?;
    let mask = AttentionMask::of_runs(keys, &runs, attended)?;
    let method = match method {
        0 => Method::Fused,
        1 => Method::Blocks { scores },
        _ => Method::Composed,
    };
    let op = AttentionOp {
        mask,
        scale,
        method,
    };
    Ok(Call {
        op,
        biased,
        bias_wanted,
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
        let outputs = vec![
            (Shape::new([batch, heads, queries, value_dim]), q.dtype()),
            (Shape::new([batch, heads, queries, 2]), wide),
        ];
        let bias = bias.into_option();
        let call = Call {
            op,
            biased: bias.is_some(),
            bias_wanted: false,
        };
        let inputs = [q, k, v].into_iter().chain(bias).collect();
        let mut outputs = send(FORWARD, inputs, outputs, encode(&call));
        (next(&mut outputs), next(&mut outputs))
    }

    fn attention_backward(
        kept: Kept<Self>,
        gradient: FloatTensor<Self>,
        bias_wanted: bool,
        op: AttentionOp,
    ) -> (
        FloatTensor<Self>,
        FloatTensor<Self>,
        FloatTensor<Self>,
        Option<FloatTensor<Self>>,
    ) {
        let Kept {
            q,
            k,
            v,
            bias,
            out,
            softmax,
        } = kept;
        let bias = bias.into_option();
        let mut outputs: Vec<(Shape, DType)> = [&q, &k, &v].map(|x| (x.shape(), x.dtype())).into();
        let wanted = bias.as_ref().filter(|_| bias_wanted);
        outputs.extend(wanted.map(|bias| (bias.shape(), bias.dtype())));
        let call = Call {
            op,
            biased: bias.is_some(),
            bias_wanted: wanted.is_some(),
        };
        let tensors = [q, k, v, out, softmax, gradient];
        let inputs = tensors.into_iter().chain(bias).collect();
        let mut outputs = send(BACKWARD, inputs, outputs, encode(&call));
        (
            next(&mut outputs),
            next(&mut outputs),
            next(&mut outputs),
            call.bias_wanted.then(|| next(&mut outputs)),
        )
    }
}

#[cfg(feature = "remote-server")]
mod server {
    use burn::backend::ir::{BackendIr, CustomOpIr, HandleContainer};
    use burn_remote::server::CustomOpRegistry;

    use super::*;
    use crate::backends::remote::wire::server::{expect_shape, numbers, tensors, write};
    use crate::error::AttentionError;
    use crate::ops::Sizes;

    /// Lets a server attend by its backend.
    pub(crate) fn register<B: BackendIr + AttentionOps>(operations: &mut CustomOpRegistry<B>) {
        operations.register(FORWARD, |handles, ir, _| {
            let (call, [q, k, v], bias) = read::<B, 3>(handles, ir, |_, _| Ok(()));
            let (out, softmax) = B::attention_forward(q, k, v, bias, call.op);
            write::<B>(handles, ir, [out, softmax]);
        });
        operations.register(BACKWARD, |handles, ir, _| {
            let (call, tensors, bias) = read::<B, 6>(handles, ir, check_results::<B>);
            let [q, k, v, out, softmax, gradient] = tensors;
            let kept = Kept {
                q,
                k,
                v,
                bias,
                out,
                softmax,
            };
            let (dq, dk, dv, dbias) =
                B::attention_backward(kept, gradient, call.bias_wanted, call.op);
            write::<B>(handles, ir, [dq, dk, dv].into_iter().chain(dbias));
        });
    }

    /// Checks what a backward has besides the tensors of its forward.
    fn check_results<B: BackendIr>(tensors: &[FloatTensor<B>; 6], sizes: Sizes) -> Result<()> {
        let [q, _, _, out, softmax, gradient] = tensors;
        let Sizes {
            batch,
            heads,
            queries,
            value_dim,
            ..
        } = sizes;
        let (rows, wide) = ([batch, heads, queries, 2], accumulator(q.dtype())?);
        let shape = [batch, heads, queries, value_dim];
        expect_shape("the output", out, &shape, q.dtype(), q)?;
        expect_shape("the gradient", gradient, &shape, q.dtype(), q)?;
        expect_shape("the sums of the softmax", softmax, &rows, wide.into(), q)
    }

    /// What an operation is called with: its first `N` tensors, and the bias. `check_others` is for
    /// the tensors after q, k and v.
    fn read<B: BackendIr, const N: usize>(
        handles: &mut HandleContainer<B::Handle>,
        ir: &CustomOpIr,
        check_others: impl FnOnce(&[FloatTensor<B>; N], Sizes) -> Result<()>,
    ) -> (Call, [FloatTensor<B>; N], Bias<B>) {
        let (first, bias) = tensors::<B, N>(handles, ir, ir.inputs.len() > N);
        let [q, k, v] = [0, 1, 2].map(|index| &first[index]);
        let call = numbers(ir, |scalars| {
            let [batch, _, queries, _] = sizes("q", q)?;
            let [_, _, keys, _] = sizes("k", k)?;
            sizes("v", v)?;
            if let Some(bias) = &bias {
                sizes("the bias", bias)?;
            }
            let came = Came {
                batch,
                queries,
                keys,
            };
            let call = decode(scalars, came)?;
            if call.biased != bias.is_some() {
                return Err(AttentionError::Wire {
                    what: "the number of tensors",
                    expected: (N + usize::from(call.biased)).to_string(),
                    found: ir.inputs.len().to_string(),
                });
            }
            call.op.check(q, k, v, bias.as_ref())?;
            let sizes = Sizes::of(q, k, v);
            if sizes.are_empty() {
                // A client of ours computes it itself.
                return Err(AttentionError::Wire {
                    what: "the sizes of q and k",
                    expected: "none that is 0".to_owned(),
                    found: format!("{:?} and {:?}", &q.shape()[..], &k.shape()[..]),
                });
            }
            check_others(&first, sizes)?;
            Ok(call)
        });
        (call, first, bias.into())
    }

    fn sizes(what: &'static str, tensor: &impl TensorMetadata) -> Result<[usize; 4]> {
        let shape = tensor.shape();
        match shape[..] {
            [batch, heads, tokens, dim] => Ok([batch, heads, tokens, dim]),
            _ => Err(AttentionError::Wire {
                what,
                expected: "4 dimensions".to_owned(),
                found: shape.to_string(),
            }),
        }
    }
}

#[cfg(feature = "remote-server")]
pub(super) use server::register;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backends::remote::wire::scalars;
    use crate::mask::{MaskRules, Window};

    fn call(rules: &MaskRules, [batch, queries, keys]: [usize; 3], method: Method) -> Call {
        Call {
            op: AttentionOp {
                mask: AttentionMask::new(rules, batch, queries, keys).expect("valid rules"),
                scale: 0.125,
                method,
            },
            biased: true,
            bias_wanted: false,
        }
    }

    fn came([batch, queries, keys]: [usize; 3]) -> Came {
        Came {
            batch,
            queries,
            keys,
        }
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
        let call = call(&rules, [2, 3, 3], Method::Blocks { scores: 9 });
        let scale = 0.125_f64.to_bits();
        let expected = [2, scale, 1, 9, 1, 0, 3, 1, 3, 0, 1, 0, 1, 3, 1, 2, 3];
        assert_eq!(encode(&call), expected);
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
            for method in [Method::Fused, Method::Blocks { scores: 1 << 40 }] {
                let sent = call(&rules, [2, 5, 5], method);
                let found = decode(&scalars(encode(&sent)), came([2, 5, 5])).expect("reads");
                assert_eq!(found.op.mask, sent.op.mask);
                assert_eq!((found.op.scale, found.op.method), (0.125, method));
                assert!(found.biased && !found.bias_wanted);
            }
        }
        // As long as the tokens are many, the numbers stay few.
        let long = call(&CAUSAL, [1, 100_000, 100_000], Method::Fused);
        assert_eq!(encode(&long).len(), 14);
    }

    #[test]
    fn foreign_numbers_are_refused_by_name() {
        let valid = scalars(encode(&call(&CAUSAL, [1, 4, 4], Method::Fused)));
        let refused = |index: usize, number: u64, part: &str| {
            let mut foreign = valid.clone();
            foreign[index] = ScalarIr::UInt(number);
            let error = decode(&foreign, came([1, 4, 4])).expect_err(part);
            let error = error.to_string();
            assert!(error.contains(part), "{part} is not in {error}");
        };
        refused(0, 1, "the version");
        refused(2, 3, "the method");
        refused(6, 5, "the keys");
        refused(6, 3, "the end of a run");
        // No more is allocated than the tensors have.
        refused(7, u64::MAX, "the runs of queries");
        refused(8, 5, "the queries of a run");
        refused(8, u64::from(u32::MAX), "the queries of a run");
        refused(13, 6, "the runs of padding");
        refused(9, 5, "the first key of a run");
        refused(13, 1, "a run of padding");
        for others in [&valid[..9], &[], &[&valid[..], &valid[..1]].concat()] {
            assert!(decode(others, came([1, 4, 4])).is_err());
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
            let mut numbers = scalars(encode(&call(rules, sizes, Method::Fused)));
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
            let Ok(found) = decode(&numbers, came(sizes)) else {
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
                decode(&scalars(encode(&found)), came(sizes)).expect("what was read is written");
            assert_eq!(again.op.mask, found.op.mask, "{numbers:?}");
        }
        assert!(
            read > 1000 && refused > 1000,
            "{read} read, {refused} refused"
        );
    }
}
