//! The gated delta rule as custom operations.

use burn::backend::{Remote, TensorMetadata, tensor::FloatTensor};
use burn::tensor::Shape;
use burn_fused::{Reader, WireOp, Writer, like, send};

use super::chunk_tokens;
use super::op::{GatedDeltaOp, GatedDeltaOps, KeptStates, Sizes};
use crate::error::{AttentionError, Result};
use crate::sequences::Sequences;

/// The custom operations.
const FORWARD: &str = "gated_delta.forward";
const BACKWARD: &str = "gated_delta.backward";

/// The numbers are whether all states are returned; whether blocks have a size, and the size; and
/// those of the sequences.
impl WireOp for GatedDeltaOp {
    const VERSION: u64 = 1;
    type Error = AttentionError;

    fn write(&self, numbers: &mut Writer) {
        numbers.flag(self.keeps_states);
        numbers.flag(self.blocks.is_some());
        numbers.size(self.blocks.unwrap_or(0));
        self.sequences.write(numbers);
    }

    fn read(numbers: &mut Reader<'_>) -> Result<Self> {
        let keeps_states = numbers.flag("the choice of states")?;
        let in_blocks = numbers.flag("the choice of blocks")?;
        let blocks = numbers.size("the elements of a block", usize::MAX)?;
        let sequences = Sequences::read(numbers)?;
        Ok(Self {
            sequences,
            keeps_states,
            blocks: in_blocks.then_some(blocks),
        })
    }
}

/// The shape of the states, of which there are this many.
fn states(sizes: &Sizes, count: usize) -> Shape {
    Shape::new([count, sizes.matrices(), sizes.key_dim, sizes.value_dim])
}

/// One before each chunk, and the last.
fn all_states(sizes: &Sizes) -> Shape {
    states(sizes, sizes.tokens.div_ceil(chunk_tokens(sizes.tokens)) + 1)
}

impl GatedDeltaOps for Remote {
    fn gated_delta_forward(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        g: FloatTensor<Self>,
        beta: FloatTensor<Self>,
        op: GatedDeltaOp,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let sizes = Sizes::of(&q, &v);
        let shape = match op.keeps_states {
            true => all_states(&sizes),
            false => states(&sizes, 1),
        };
        let outputs = [like(&v), (shape, g.dtype())];
        send(FORWARD, &op, vec![q, k, v, g, beta], outputs).into()
    }

    // A step is ordinary operations, each sent separately.

    fn gated_delta_backward(
        kept: KeptStates<Self>,
        gradient: FloatTensor<Self>,
        op: GatedDeltaOp,
    ) -> (
        FloatTensor<Self>,
        FloatTensor<Self>,
        FloatTensor<Self>,
        FloatTensor<Self>,
        FloatTensor<Self>,
    ) {
        let KeptStates {
            q,
            k,
            v,
            g,
            beta,
            states,
        } = kept;
        let outputs = [&q, &k, &v, &g, &beta].map(like);
        let inputs = vec![q, k, v, g, beta, states, gradient];
        send(BACKWARD, &op, inputs, outputs).into()
    }
}

#[cfg(feature = "remote-server")]
mod server {
    use burn::backend::ir::BackendIr;
    use burn_fused::{expect_rank, expect_shape, handle};
    use burn_remote::server::CustomOpRegistry;

    use super::*;

    /// Lets a server compute the rule by its backend.
    pub(crate) fn register<B: BackendIr + GatedDeltaOps>(operations: &mut CustomOpRegistry<B>) {
        handle(
            operations,
            FORWARD,
            |op: &GatedDeltaOp, inputs: &[_; 5]| check(op, inputs.each_ref()),
            |op, [q, k, v, g, beta]| <[_; 2]>::from(B::gated_delta_forward(q, k, v, g, beta, op)),
        );
        handle(
            operations,
            BACKWARD,
            |op: &GatedDeltaOp, [q, k, v, g, beta, states, gradient]: &[_; 7]| {
                check(op, [q, k, v, g, beta])?;
                let shape = all_states(&Sizes::of(q, v));
                expect_shape("the states", states, (&shape, g.dtype()), q)?;
                Ok(expect_shape(
                    "the gradient",
                    gradient,
                    (&v.shape(), q.dtype()),
                    q,
                )?)
            },
            |op, [q, k, v, g, beta, states, gradient]| {
                let kept = KeptStates {
                    q,
                    k,
                    v,
                    g,
                    beta,
                    states,
                };
                <[_; 5]>::from(B::gated_delta_backward(kept, gradient, op))
            },
        );
    }

    fn check<T: TensorMetadata>(op: &GatedDeltaOp, [q, k, v, g, beta]: [&T; 5]) -> Result<()> {
        for (name, x) in [("q", q), ("k", k), ("v", v)] {
            expect_rank(name, x, 4)?;
        }
        expect_rank("g", g, 3)?;
        expect_rank("beta", beta, 3)?;
        op.check([q, k, v, g, beta])
    }
}

#[cfg(feature = "remote-server")]
pub(crate) use server::register;

#[cfg(test)]
mod tests {
    use burn::backend::ir::ScalarIr;
    use burn_fused::{decode, encode};

    use super::*;

    fn op(sequences: Sequences) -> GatedDeltaOp {
        GatedDeltaOp {
            sequences,
            keeps_states: true,
            blocks: Some(9),
        }
    }

    fn shapes(tokens: usize) -> [Shape; 1] {
        [Shape::new([2, tokens, 2, 8])]
    }

    #[test]
    fn the_numbers_on_the_wire_stay_what_they_are() {
        let packed = Sequences::packed(&[0, 2, 2, 5], 5).expect("valid lengths");
        let numbers = [1, 1, 1, 9, 1, 2].map(ScalarIr::UInt);
        assert_eq!(encode(&op(packed)), numbers);
        let whole = GatedDeltaOp {
            keeps_states: false,
            blocks: None,
            ..op(Sequences::whole(5))
        };
        assert_eq!(encode(&whole), [1, 0, 0, 0, 0].map(ScalarIr::UInt));
    }

    #[test]
    fn all_sequences_come_back() {
        for lengths in [&[0, 7][..], &[0, 1, 7], &[0, 3, 3, 4, 7]] {
            for blocks in [None, Some(0), Some(1 << 40)] {
                let sent = GatedDeltaOp {
                    blocks,
                    ..op(Sequences::packed(lengths, 7).expect("valid lengths"))
                };
                let found: GatedDeltaOp = decode(&encode(&sent), &shapes(7)).expect("reads");
                assert_eq!(found, sent);
            }
        }
    }

    #[test]
    fn foreign_numbers_are_refused_by_name() {
        let valid = encode(&op(Sequences::packed(&[0, 2, 5], 5).expect("valid lengths")));
        let refused = |index: usize, number: u64, part: &str| {
            let mut foreign = valid.clone();
            foreign[index] = ScalarIr::UInt(number);
            let error = decode::<GatedDeltaOp>(&foreign, &shapes(5)).expect_err(part);
            let error = error.to_string();
            assert!(error.contains(part), "{part} is not in {error}");
        };
        refused(0, 2, "the version");
        refused(1, 2, "the choice of states");
        refused(2, 2, "the choice of blocks");
        refused(4, 6, "the sequences after the first");
        // No more is allocated than the tensors have.
        refused(4, u64::MAX, "the sequences after the first");
        refused(5, 6, "the first token of a sequence");
        assert!(decode::<GatedDeltaOp>(&valid[..5], &shapes(5)).is_err());
        assert!(decode::<GatedDeltaOp>(&valid[..4], &shapes(5)).is_err());
    }
}
