//! How q and k lie in device memory.

use super::args::TensorLayout;
use crate::error::{AscendError, Result};

/// Order of the dimensions of a contiguous tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Layout {
    /// batch, seq, heads, head_dim.
    Bsnd,
    /// batch, heads, seq, head_dim.
    Bnsd,
    /// seq, batch, heads, head_dim.
    Sbnd,
    /// tokens, heads, head_dim: packed sequences, `batch` = 1.
    Tnd,
}

/// Heads of all tokens in a buffer. Strides count elements; channels are contiguous.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct View {
    /// First element.
    pub offset: u64,
    /// Number of heads.
    pub heads: u32,
    /// Between batches.
    pub batch_stride: u64,
    /// Between tokens of a batch.
    pub token_stride: u64,
    /// Between heads of a token.
    pub head_stride: u64,
}

impl View {
    /// The view of a contiguous tensor from the start of its buffer.
    #[must_use]
    pub fn contiguous(layout: Layout, batch: u32, seq: u32, heads: u32, head_dim: u32) -> Self {
        let [batch, seq, heads_wide, dim] = [batch, seq, heads, head_dim].map(u64::from);
        let (batch_stride, token_stride, head_stride) = match layout {
            Layout::Bsnd | Layout::Tnd => (seq * heads_wide * dim, heads_wide * dim, dim),
            Layout::Bnsd => (heads_wide * seq * dim, dim, seq * dim),
            Layout::Sbnd => (heads_wide * dim, batch * heads_wide * dim, dim),
        };
        Self {
            offset: 0,
            heads,
            batch_stride,
            token_stride,
            head_stride,
        }
    }

    /// Elements from the first to one past the last.
    pub(crate) fn extent(&self, batch: u32, seq: u32, head_dim: u32) -> Option<u64> {
        let steps = |n: u32, stride: u64| u64::from(n.saturating_sub(1)).checked_mul(stride);
        steps(batch, self.batch_stride)?
            .checked_add(steps(seq, self.token_stride)?)?
            .checked_add(steps(self.heads, self.head_stride)?)?
            .checked_add(u64::from(head_dim))
    }

    /// Checks that rows lie in a buffer of `len` elements and do not overlap.
    pub(crate) fn check(
        &self,
        argument: &'static str,
        batch: u32,
        seq: u32,
        head_dim: u32,
        len: usize,
    ) -> Result<TensorLayout> {
        const OP: &str = "rotate";
        if self.heads == 0 {
            return Err(AscendError::argument(OP, argument, "at least one head", 0));
        }
        let extent = self.extent(batch, seq, head_dim);
        let end = extent.and_then(|extent| extent.checked_add(self.offset));
        let Some((extent, _)) = extent.zip(end.filter(|&end| end <= len as u64)) else {
            let found = end.map_or("an overflow".to_owned(), |end| format!("a view of {end}"));
            return Err(AscendError::argument(
                OP,
                argument,
                format!("within its buffer of {len} elements"),
                found,
            ));
        };
        let mut axes = [
            (self.batch_stride, batch),
            (self.token_stride, seq),
            (self.head_stride, self.heads),
        ];
        axes.sort_unstable();
        let mut occupied = u64::from(head_dim);
        for (stride, n) in axes.into_iter().filter(|&(_, n)| n > 1) {
            if stride < occupied {
                let expected = format!("without overlap: a stride of at least {occupied}");
                return Err(AscendError::argument(OP, argument, expected, stride));
            }
            occupied += stride * u64::from(n - 1);
        }
        Ok(TensorLayout {
            extent,
            batch_stride: self.batch_stride,
            token_stride: self.token_stride,
            head_stride: self.head_stride,
        })
    }
}
