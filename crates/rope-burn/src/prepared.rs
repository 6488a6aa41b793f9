//! Tensors as kernels take them.

use rope_core::{HeadsLayout, Layout};

use crate::rotary::RotaryOp;

/// A backend's tensor of heads.
pub trait HeadsTensor: Sized {
    /// Its sizes and strides, if the kernels can follow them.
    fn heads_layout(&self, layout: Layout) -> Option<HeadsLayout>;
    /// Itself, or a copy without gaps if it has any.
    fn into_contiguous(self) -> Self;
    /// True if nothing else holds its memory.
    fn is_unique(&self) -> bool;
    /// A new tensor of the same shape and type, whatever its elements are.
    fn empty_like(&self) -> Self;
}

/// A tensor that a kernel reads by its strides, and the tensor that it writes: the same if nothing
/// else holds it, else a new one.
#[derive(Debug)]
pub struct PreparedTensor<T> {
    /// The tensor to read.
    pub source: T,
    /// Its sizes and strides.
    pub from: HeadsLayout,
    /// The tensor to write and its strides, unless it is the source.
    pub target: Option<(T, HeadsLayout)>,
}

impl<T: HeadsTensor> PreparedTensor<T> {
    /// A tensor to read or to overwrite; a copy where the kernels cannot follow its strides.
    ///
    /// # Panics
    /// If it has another rank than the layout: [`RotaryOp::check`] reports that.
    pub fn readable(x: T, op: &RotaryOp) -> Self {
        let (source, from) = match x.heads_layout(op.layout) {
            Some(from) => (x, from),
            None => contiguous(x.into_contiguous(), op),
        };
        Self {
            source,
            from,
            target: None,
        }
    }

    /// A tensor to overwrite where that changes nothing else.
    ///
    /// # Panics
    /// As [`readable`](Self::readable).
    pub fn new(x: T, op: &RotaryOp) -> Self {
        let mut prepared = Self::readable(x, op);
        if !prepared.may_be_overwritten() {
            prepared.allocate_output(op);
        }
        prepared
    }

    /// True if nothing else holds the tensor, and no two of its elements are one.
    pub fn may_be_overwritten(&self) -> bool {
        self.source.is_unique() && self.from.is_injective()
    }

    /// Writes to a new tensor.
    pub fn allocate_output(&mut self, op: &RotaryOp) {
        self.target = Some(contiguous(self.source.empty_like(), op));
    }

    /// The tensor that was written.
    pub fn into_output(self) -> T {
        self.target.map_or(self.source, |(target, _)| target)
    }
}

fn contiguous<T: HeadsTensor>(x: T, op: &RotaryOp) -> (T, HeadsLayout) {
    let layout = x.heads_layout(op.layout);
    let layout = layout.expect("kernels follow a contiguous tensor of the layout's rank");
    (x, layout)
}
