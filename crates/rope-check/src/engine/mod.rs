//! The implementations under test.

#[cfg(feature = "burn")]
mod burn;
mod cpu;

use std::sync::Arc;

use rope_core::{
    Direction, HeadsLayout, InstructionSet, Layout, Parallelism, Positions, Real, RopeError,
    RotarySpec, TokenAngles,
};

#[cfg(feature = "burn")]
pub use self::burn::{Burn, burn_engines};
#[cfg(feature = "burn")]
pub(crate) use self::burn::{
    angle_tensors, burn_error, engine_name, expect_dtype, place, read, rotary, rotate, sum,
};
pub use self::cpu::Cpu;
#[cfg(feature = "burn")]
pub(crate) use self::cpu::Placed;

use crate::buffer::{Buffer, DType};

/// One rotation to perform.
#[derive(Clone, Debug)]
pub struct Case {
    /// The rotation.
    pub spec: RotarySpec,
    /// For which tokens; `batch * seq` of them, or `seq`.
    pub positions: Positions,
    /// Frequencies of each head, `[axes, heads, lanes]`, instead of those of `spec`: k has as many
    /// heads as q then, or is not there.
    pub head_frequencies: Option<Arc<[f64]>>,
    /// The length that the frequencies are made for, where they depend on it.
    pub seq_len: Option<u64>,
    /// The order of the dimensions.
    pub layout: Layout,
    /// Samples.
    pub batch: usize,
    /// Tokens of a sample.
    pub seq: usize,
    /// Heads of q.
    pub heads: usize,
    /// Heads of k; 0 for no k.
    pub kv_heads: usize,
    /// True if q and k have gaps between their rows.
    pub strided: bool,
    /// True if q and k are overwritten.
    pub in_place: bool,
}

impl Case {
    /// A contiguous, out-of-place case in which q has two heads and k one.
    pub fn new(
        spec: RotarySpec,
        positions: Positions,
        layout: Layout,
        batch: usize,
        seq: usize,
    ) -> Self {
        let seq_len = None;
        Self {
            spec,
            positions,
            head_frequencies: None,
            seq_len,
            layout,
            batch,
            seq,
            heads: 2,
            kv_heads: 1,
            strided: false,
            in_place: false,
        }
    }

    /// The strides of q (or k, by its heads) in a contiguous buffer.
    pub fn contiguous(&self, heads: usize) -> HeadsLayout {
        HeadsLayout::contiguous(
            self.layout,
            self.batch,
            self.seq,
            heads,
            self.spec.head_dim(),
        )
    }

    /// Dimensions of a tensor with `heads` heads, in the layout's order.
    pub fn dims(&self, heads: usize) -> Vec<usize> {
        let (b, s, n, d) = (self.batch, self.seq, heads, self.spec.head_dim());
        match self.layout {
            Layout::Bsnd => vec![b, s, n, d],
            Layout::Bnsd => vec![b, n, s, d],
            Layout::Sbnd => vec![s, b, n, d],
            Layout::Tnd => vec![b * s, n, d],
        }
    }

    /// cos and sin of the case's tokens, or of each head of them.
    ///
    /// # Errors
    /// Those of [`TokenAngles::new`] and [`TokenAngles::per_head`].
    pub fn angles<A: Real>(&self) -> Result<TokenAngles<A>, RopeError> {
        match &self.head_frequencies {
            None => TokenAngles::new(&self.spec, &self.positions, self.seq_len),
            Some(frequencies) => TokenAngles::per_head(&self.positions, frequencies, self.heads),
        }
    }

    /// The number of rows of angles: one per token of the positions, or per head of these.
    pub fn angle_rows(&self) -> usize {
        let own_heads = self.head_frequencies.as_ref().map_or(1, |_| self.heads);
        self.positions.tokens() * own_heads
    }

    /// The offset of each head of each token in a contiguous buffer: `(row of the angles, first
    /// element)`.
    pub fn rows(&self, heads: usize) -> Vec<(usize, usize)> {
        let strides = self.contiguous(heads).strides;
        let mut rows = Vec::with_capacity(self.batch * self.seq * heads);
        for b in 0..self.batch {
            for s in 0..self.seq {
                let token = (b * self.seq + s) % self.positions.tokens().max(1);
                rows.extend((0..heads).map(|n| {
                    let own = self.head_frequencies.as_ref();
                    (
                        own.map_or(token, |_| token * heads + n),
                        b * strides.batch + s * strides.seq + n * strides.head,
                    )
                }));
            }
        }
        rows
    }
}

/// Why an engine did not run a case.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// The engine has no path for this element type.
    #[error("{engine} has no {dtype:?}")]
    Unsupported {
        /// The engine's name.
        engine: String,
        /// The element type.
        dtype: DType,
    },
    /// The rotation was refused.
    #[error(transparent)]
    Rope(#[from] RopeError),
    /// burn refused, or lost, a tensor.
    #[cfg(feature = "burn")]
    #[error("burn: {0}")]
    Burn(String),
    /// The Ascend runtime, its operators or the kernels refused or failed.
    #[cfg(feature = "ascend")]
    #[error(transparent)]
    Ascend(Box<rope_ascend::AscendError>),
}

#[cfg(feature = "ascend")]
impl From<rope_ascend::AscendError> for EngineError {
    fn from(error: rope_ascend::AscendError) -> Self {
        Self::Ascend(Box::new(error))
    }
}

impl EngineError {
    /// The limit that kept the engine from running, where it is one that the engine is known to
    /// have: such a case is skipped, not failed.
    pub fn limit(&self) -> Option<String> {
        match self {
            Self::Unsupported { .. } => Some(self.to_string()),
            #[cfg(feature = "ascend")]
            Self::Ascend(error) => match &**error {
                rope_ascend::AscendError::OperatorLimit {
                    operator,
                    limit,
                    found,
                } => Some(format!("{operator} takes {limit}, found {found}")),
                rope_ascend::AscendError::CubeLimit { limit, found } => {
                    Some(format!("the cube unit takes {limit}, found {found}"))
                }
                _ => None,
            },
            _ => None,
        }
    }
}

/// Something that rotates host tensors. q and k are contiguous in the case's layout, whatever the
/// engine makes of them.
pub trait Engine {
    /// The name in tables.
    fn name(&self) -> String;

    /// True if there is a path for an element type.
    fn supports(&self, dtype: DType) -> bool;

    /// The type that cos and sin are rounded to for tensors of type `dtype`.
    fn angle_dtype(&self, dtype: DType) -> DType {
        dtype.computed_in()
    }

    /// Rotates q and k (or applies the adjoint); k is absent where the case has no kv_heads.
    ///
    /// # Errors
    /// [`EngineError`].
    fn apply(
        &self,
        case: &Case,
        direction: Direction,
        q: &Buffer,
        k: Option<&Buffer>,
    ) -> Result<(Buffer, Option<Buffer>), EngineError>;
}

/// Every engine on this machine that needs no device.
pub fn host_engines() -> Vec<Box<dyn Engine>> {
    let mut engines: Vec<Box<dyn Engine>> = Vec::new();
    for instructions in InstructionSet::available() {
        engines.push(Box::new(Cpu {
            instructions,
            parallelism: Parallelism::SERIAL,
        }));
    }
    let parallelism = Parallelism::new(1, usize::MAX);
    let instructions = InstructionSet::best();
    engines.push(Box::new(Cpu {
        instructions,
        parallelism,
    }));
    #[cfg(feature = "burn")]
    engines.extend(burn_engines(&::burn::tensor::Device::flex()));
    engines
}
