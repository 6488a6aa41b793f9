//! Shape and strides of q and k, and checked views of their data.

#![allow(
    unsafe_code,
    reason = "views of memory that others own; each states what makes it sound"
)]

use std::marker::PhantomData;

use serde::{Deserialize, Serialize};

use crate::error::{Result, RopeError};

/// The order of the dimensions of q and k, outermost first; the last is always the channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Layout {
    /// `[batch, seq, heads, head_dim]`, also called BSHD.
    Bsnd,
    /// `[batch, heads, seq, head_dim]`, also called BHSD.
    Bnsd,
    /// `[seq, batch, heads, head_dim]`.
    Sbnd,
    /// `[tokens, heads, head_dim]`, packed sequences as a batch of one, also called THD.
    Tnd,
}

impl Layout {
    /// All layouts.
    pub const ALL: [Layout; 4] = [Self::Bsnd, Self::Bnsd, Self::Sbnd, Self::Tnd];
}

/// Shape and strides of q or k. Strides count elements; the channels of a head are contiguous.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadsLayout {
    /// Samples.
    pub batch: usize,
    /// Tokens of a sample.
    pub seq: usize,
    /// Heads of a token.
    pub heads: usize,
    /// Channels of a head.
    pub head_dim: usize,
    /// Elements between samples, tokens and heads.
    pub strides: Strides,
}

/// Elements from one sample, token or head to the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Strides {
    /// Between samples.
    pub batch: usize,
    /// Between tokens.
    pub seq: usize,
    /// Between heads.
    pub head: usize,
}

impl HeadsLayout {
    /// Describes a contiguous tensor. For [`Layout::Tnd`] the number of tokens is `batch * seq`.
    pub fn contiguous(
        layout: Layout,
        batch: usize,
        seq: usize,
        heads: usize,
        head_dim: usize,
    ) -> Self {
        // Sizes that overflow fit no buffer: their extent exceeds any.
        let token = heads.saturating_mul(head_dim);
        let sample = seq.saturating_mul(token);
        let (per_sample, per_token, per_head) = match layout {
            Layout::Bsnd | Layout::Tnd => (sample, token, head_dim),
            Layout::Bnsd => (sample, head_dim, seq.saturating_mul(head_dim)),
            Layout::Sbnd => (token, batch.saturating_mul(token), head_dim),
        };
        let strides = Strides {
            batch: per_sample,
            seq: per_token,
            head: per_head,
        };
        Self {
            batch,
            seq,
            heads,
            head_dim,
            strides,
        }
    }

    /// Describes a tensor with the given shape and strides (in elements), in `layout`'s order of
    /// dimensions: three for [`Layout::Tnd`], four otherwise.
    ///
    /// # Errors
    /// [`RopeError::LastStride`] if the channels of a head are not contiguous;
    /// [`RopeError::ShapeMismatch`] if the number of dimensions is not the layout's.
    pub fn strided(layout: Layout, shape: &[usize], strides: &[usize]) -> Result<Self> {
        let rank = if layout == Layout::Tnd { 3 } else { 4 };
        for (right, size) in [("its shape", shape.len()), ("its strides", strides.len())] {
            if size != rank {
                return Err(RopeError::ShapeMismatch {
                    left: "the layout",
                    right,
                    dimension: "rank",
                    left_size: rank,
                    right_size: size,
                });
            }
        }
        let [b, s, n] = match layout {
            Layout::Bsnd => [Some(0), Some(1), Some(2)],
            Layout::Bnsd => [Some(0), Some(2), Some(1)],
            Layout::Sbnd => [Some(1), Some(0), Some(2)],
            Layout::Tnd => [None, Some(0), Some(1)],
        };
        let size = |dim: Option<usize>| dim.map_or(1, |dim| shape[dim]);
        let stride = |dim: Option<usize>| dim.map_or(0, |dim| strides[dim]);
        let head_dim = shape[rank - 1];
        if strides[rank - 1] != 1 && head_dim > 1 {
            return Err(RopeError::LastStride {
                what: "the tensor",
                found: strides[rank - 1],
            });
        }
        Ok(Self {
            batch: size(b),
            seq: size(s),
            heads: size(n),
            head_dim,
            strides: Strides {
                batch: stride(b),
                seq: stride(s),
                head: stride(n),
            },
        })
    }

    /// Elements of the tensor, saturating at the largest `usize`.
    pub fn elems(&self) -> usize {
        let heads = self.tokens().saturating_mul(self.heads);
        heads.saturating_mul(self.head_dim)
    }

    /// Tokens of all samples, saturating at the largest `usize`, which only a broadcast or an empty
    /// tensor reaches.
    #[inline]
    pub(crate) fn tokens(&self) -> usize {
        self.batch.saturating_mul(self.seq)
    }

    #[inline]
    fn dims(&self) -> [(usize, usize); 3] {
        [
            (self.batch, self.strides.batch),
            (self.seq, self.strides.seq),
            (self.heads, self.strides.head),
        ]
    }

    #[inline]
    fn is_empty(&self) -> bool {
        [self.batch, self.seq, self.heads, self.head_dim].contains(&0)
    }

    /// Elements from the view's first to its last, both included.
    #[inline]
    pub fn extent(&self) -> u128 {
        if self.is_empty() {
            return 0;
        }
        let reach = |(size, stride)| (size as u128 - 1) * stride as u128;
        // Saturating: one product fits, and three of them wrapped around may fit any buffer.
        let dims = self.dims().into_iter().map(reach);
        dims.fold(self.head_dim as u128, u128::saturating_add)
    }

    /// Checks that the view lies within a buffer of `found` elements.
    ///
    /// # Errors
    /// [`RopeError::BufferTooSmall`].
    #[inline]
    pub fn check_fits(&self, what: &'static str, found: usize) -> Result<()> {
        let needed = self.extent();
        if needed > found as u128 {
            return Err(RopeError::BufferTooSmall {
                what,
                needed,
                found,
            });
        }
        Ok(())
    }

    /// True if different indices are known to name different elements, so that the view can be
    /// written.
    ///
    /// True for nested strides: each is at least the extent of the dimensions inside it, as in
    /// every layout and every slice and permutation of one.
    #[inline]
    pub fn is_injective(&self) -> bool {
        if self.is_empty() {
            return true;
        }
        let [mut a, mut b, mut c] = self.dims();
        // Sorted by stride, smallest first, by hand: this is on the path of every call.
        if a.1 > b.1 {
            std::mem::swap(&mut a, &mut b);
        }
        if b.1 > c.1 {
            std::mem::swap(&mut b, &mut c);
        }
        if a.1 > b.1 {
            std::mem::swap(&mut a, &mut b);
        }
        let mut inner = self.head_dim as u128;
        for (size, stride) in [a, b, c] {
            if size > 1 {
                if (stride as u128) < inner {
                    return false;
                }
                inner = inner.saturating_add((size as u128 - 1) * stride as u128);
            }
        }
        true
    }

    /// Checks that two tensors have equal dimensions, including heads if `heads_too`. The names
    /// appear in the message.
    ///
    /// # Errors
    /// [`RopeError::ShapeMismatch`].
    #[inline]
    pub fn check_same(
        &self,
        other: &Self,
        left: &'static str,
        right: &'static str,
        heads_too: bool,
    ) -> Result<()> {
        let dims = [
            ("batch", self.batch, other.batch),
            ("seq", self.seq, other.seq),
            ("head_dim", self.head_dim, other.head_dim),
            (
                "heads",
                self.heads,
                if heads_too { other.heads } else { self.heads },
            ),
        ];
        for (dimension, left_size, right_size) in dims {
            if left_size != right_size {
                return Err(RopeError::ShapeMismatch {
                    left,
                    right,
                    dimension,
                    left_size,
                    right_size,
                });
            }
        }
        Ok(())
    }
}

/// A tensor to read.
#[derive(Clone, Copy, Debug)]
pub struct HeadsRef<'a, E> {
    /// The tensor's first element; all elements that the layout names are borrowed.
    pub(crate) start: *const E,
    pub(crate) layout: HeadsLayout,
    borrowed: PhantomData<&'a [E]>,
}

// SAFETY: it is a shared borrow of its elements, as `&[E]` is.
unsafe impl<E: Sync> Send for HeadsRef<'_, E> {}
// SAFETY: as above.
unsafe impl<E: Sync> Sync for HeadsRef<'_, E> {}

impl<'a, E> HeadsRef<'a, E> {
    /// Creates a view of `data`, whose first element is the tensor's first.
    ///
    /// # Errors
    /// [`RopeError::BufferTooSmall`].
    pub fn new(data: &'a [E], layout: HeadsLayout) -> Result<Self> {
        layout.check_fits("the tensor", data.len())?;
        // SAFETY: `data` holds each element that the layout names, borrowed for 'a.
        Ok(unsafe { Self::from_raw(data.as_ptr(), layout) })
    }

    /// Creates a view of memory with another owner, such as another framework's tensor. Elements
    /// between those of the view may belong to another tensor and be written meanwhile.
    ///
    /// # Safety
    /// `start` is aligned. For 'a, each element that the layout names, counted from `start`, is
    /// initialised, readable and not written.
    pub unsafe fn from_raw(start: *const E, layout: HeadsLayout) -> Self {
        Self {
            start,
            layout,
            borrowed: PhantomData,
        }
    }
}

/// A tensor to write. Each element is named by exactly one index.
#[derive(Debug)]
pub struct HeadsMut<'a, E> {
    /// The tensor's first element; all elements that the layout names are borrowed.
    pub(crate) start: *mut E,
    pub(crate) layout: HeadsLayout,
    borrowed: PhantomData<&'a mut [E]>,
}

// SAFETY: it is an exclusive borrow of its elements, as `&mut [E]` is.
unsafe impl<E: Send> Send for HeadsMut<'_, E> {}
// SAFETY: as above.
unsafe impl<E: Sync> Sync for HeadsMut<'_, E> {}

impl<'a, E> HeadsMut<'a, E> {
    /// Creates a view of `data`, whose first element is the tensor's first.
    ///
    /// # Errors
    /// [`RopeError::BufferTooSmall`]; [`RopeError::Overlap`] if two indices name one element, as in
    /// a broadcast view.
    pub fn new(data: &'a mut [E], layout: HeadsLayout) -> Result<Self> {
        layout.check_fits("the tensor", data.len())?;
        // SAFETY: `data` holds each element that the layout names, borrowed for 'a by nobody else.
        unsafe { Self::from_raw(data.as_mut_ptr(), layout) }
    }

    /// Creates a view of memory with another owner, such as another framework's tensor. Elements
    /// between those of the view may belong to another tensor: q and k in one packed buffer have a
    /// view each.
    ///
    /// # Errors
    /// [`RopeError::Overlap`] as [`new`](Self::new).
    ///
    /// # Safety
    /// `start` is aligned. For 'a, each element that the layout names, counted from `start`, is
    /// initialised, writable, and read and written only through this view.
    pub unsafe fn from_raw(start: *mut E, layout: HeadsLayout) -> Result<Self> {
        if !layout.is_injective() {
            return Err(RopeError::Overlap { what: "the tensor" });
        }
        Ok(Self {
            start,
            layout,
            borrowed: PhantomData,
        })
    }
}
