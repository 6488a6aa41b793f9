//! Tensors of PyTorch as this crate sees them: memory that is borrowed for one call.
#![allow(
    unsafe_code,
    reason = "views of memory that PyTorch owns; each states what makes it sound"
)]

use pyo3::FromPyObject;
use rope_core::{Element, HeadsLayout, HeadsMut, HeadsRef, Layout, Operand, Real, RopeError};

use crate::error::{Error, Result};

/// Where a tensor's memory is and what is in it: `(address, dtype, shape, strides)`, strides in
/// elements.
///
/// # Safety
/// Python cannot state it in types, so `mrope.torch` does: it makes these of tensors that it holds
/// through the call, whose elements PyTorch guarantees to be in memory. As under PyTorch's own
/// operators, another thread that writes them meanwhile is the caller's mistake.
#[derive(Clone, Debug, FromPyObject)]
pub(crate) struct Tensor {
    #[pyo3(item(0))]
    pub(crate) address: usize,
    #[pyo3(item(1))]
    pub(crate) dtype: String,
    #[pyo3(item(2))]
    pub(crate) shape: Vec<usize>,
    #[pyo3(item(3))]
    pub(crate) strides: Vec<usize>,
}

impl Tensor {
    /// Shape and strides as q and k have them.
    pub(crate) fn heads(&self, layout: Layout) -> Result<HeadsLayout> {
        Ok(HeadsLayout::strided(layout, &self.shape, &self.strides)?)
    }

    /// The first element, aligned; of an empty tensor any address.
    fn start<T>(&self, what: &'static str) -> Result<*mut T> {
        if self.shape.contains(&0) {
            return Ok(std::ptr::dangling_mut());
        }
        if self.address == 0 {
            return Err(Error::NoMemory(what));
        }
        if !self.address.is_multiple_of(align_of::<T>()) {
            let bytes = align_of::<T>();
            return Err(Error::Misaligned { what, bytes });
        }
        Ok(std::ptr::with_exposed_provenance_mut(self.address))
    }

    pub(crate) fn expect_dtype(&self, what: &'static str, expected: &'static str) -> Result<()> {
        if self.dtype == expected {
            return Ok(());
        }
        let found = self.dtype.clone();
        Err(Error::Dtype {
            what,
            found,
            expected,
        })
    }

    pub(crate) fn expect_contiguous(&self, what: &'static str) -> Result<()> {
        let mut inner = 1;
        for (&size, &stride) in self.shape.iter().zip(&self.strides).rev() {
            if size > 1 && stride != inner {
                return Err(Error::NotContiguous {
                    what,
                    shape: self.shape.clone(),
                    strides: self.strides.clone(),
                });
            }
            inner = inner.saturating_mul(size);
        }
        Ok(())
    }

    /// All elements of a contiguous tensor.
    ///
    /// # Safety
    /// As [`Tensor`]; they are not written for 'a.
    pub(crate) unsafe fn values<'a, T: Plain>(&self, what: &'static str) -> Result<&'a [T]> {
        let (start, len) = self.stretch::<T>(what)?;
        // SAFETY: aligned, of `len` elements of T; the caller guarantees their memory.
        Ok(unsafe { std::slice::from_raw_parts(start, len) })
    }

    /// All elements of a contiguous tensor, to write.
    ///
    /// # Safety
    /// As [`Tensor`]; nothing else reads or writes them for 'a.
    pub(crate) unsafe fn values_mut<'a, T: Plain>(
        &self,
        what: &'static str,
    ) -> Result<&'a mut [T]> {
        let (start, len) = self.stretch::<T>(what)?;
        // SAFETY: as in `values`; the caller guarantees that nothing else uses them.
        Ok(unsafe { std::slice::from_raw_parts_mut(start, len) })
    }

    /// Start and length of a contiguous tensor of T.
    fn stretch<T: Plain>(&self, what: &'static str) -> Result<(*mut T, usize)> {
        self.expect_dtype(what, T::DTYPE)?;
        self.expect_contiguous(what)?;
        Ok((self.start(what)?, self.shape.iter().product()))
    }

    /// A tensor of q's or k's shape, to read.
    ///
    /// # Safety
    /// As [`Tensor`]; what the layout names is not written for 'a.
    pub(crate) unsafe fn read<'a, E: Element>(
        &self,
        what: &'static str,
        layout: Layout,
    ) -> Result<HeadsRef<'a, E>> {
        self.expect_dtype(what, E::NAME)?;
        let heads = self.heads(layout)?;
        // SAFETY: aligned (`start`); the caller guarantees the memory of the layout's elements.
        Ok(unsafe { HeadsRef::from_raw(self.start::<E>(what)?, heads) })
    }

    /// The operand that is written to `to`, or in place where both are one tensor.
    ///
    /// # Safety
    /// As [`Tensor`]; what the layouts name is not written, and that of `to` not read, for 'a but
    /// through the result.
    pub(crate) unsafe fn operand<'a, E: Element>(
        &self,
        to: &Tensor,
        what: &'static str,
        layout: Layout,
    ) -> Result<Operand<'a, E>> {
        to.expect_dtype(what, E::NAME)?;
        let heads = to.heads(layout)?;
        // SAFETY: aligned (`start`); the caller guarantees the memory of the layout's elements.
        let written = unsafe { HeadsMut::from_raw(to.start::<E>(what)?, heads) }?;
        if self.address == to.address && self.shape == to.shape && self.strides == to.strides {
            self.expect_dtype(what, E::NAME)?;
            return Ok(Operand::InPlace(written));
        }
        // SAFETY: the caller's.
        let read = unsafe { self.read(what, layout) }?;
        Ok(Operand::Into(read, written))
    }
}

/// Numbers that are read and written whole.
pub(crate) trait Plain: Copy + 'static {
    const DTYPE: &'static str;
}

impl Plain for f32 {
    const DTYPE: &'static str = "f32";
}

impl Plain for f64 {
    const DTYPE: &'static str = "f64";
}

impl Plain for i64 {
    const DTYPE: &'static str = "i64";
}

/// A type that rotation is computed in.
pub(crate) trait Computed: Real + Plain {}

impl Computed for f32 {}
impl Computed for f64 {}

pub(crate) fn layout(name: &str) -> Result<Layout> {
    match name {
        "bsnd" => Ok(Layout::Bsnd),
        "bnsd" => Ok(Layout::Bnsd),
        "sbnd" => Ok(Layout::Sbnd),
        "tnd" => Ok(Layout::Tnd),
        found => Err(Error::Layout {
            found: found.to_owned(),
        }),
    }
}

/// Refuses q and k that are rotated in place and may share elements.
///
/// Known to be apart are stretches of memory that do not meet, and parts of one packed buffer: some
/// of batch and seq have equal strides in both, and within such a cell k follows q, or q follows k.
pub(crate) fn check_apart(q: &Tensor, k: &Tensor, layout: Layout, bytes: usize) -> Result<()> {
    let (first, second) = if q.address <= k.address {
        (q, k)
    } else {
        (k, q)
    };
    let heads = [first.heads(layout)?, second.heads(layout)?];
    if heads.iter().any(|heads| heads.extent() == 0) {
        return Ok(());
    }
    let distance = (second.address - first.address) as u128;
    let elems = distance / bytes as u128;
    let in_cells = |per_batch: bool, per_seq: bool| {
        let [first, second] = heads.map(|heads| HeadsLayout {
            batch: if per_batch { 1 } else { heads.batch },
            seq: if per_seq { 1 } else { heads.seq },
            ..heads
        });
        let [outer, other] = heads.map(|heads| HeadsLayout {
            batch: if per_batch { heads.batch } else { 1 },
            seq: if per_seq { heads.seq } else { 1 },
            heads: 1,
            head_dim: usize::try_from(elems + second.extent()).unwrap_or(usize::MAX),
            ..heads
        });
        let same = |size: usize, strides: [usize; 2]| size == 1 || strides[0] == strides[1];
        elems >= first.extent()
            && same(outer.batch, [outer.strides.batch, other.strides.batch])
            && same(outer.seq, [outer.strides.seq, other.strides.seq])
            && outer.is_injective()
    };
    let cells = [(false, false), (true, false), (false, true), (true, true)];
    let is_apart = distance.is_multiple_of(bytes as u128)
        && cells.into_iter().any(|(batch, seq)| in_cells(batch, seq));
    if is_apart {
        Ok(())
    } else {
        Err(RopeError::Overlap { what: "q and k" }.into())
    }
}
