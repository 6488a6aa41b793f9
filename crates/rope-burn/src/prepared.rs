//! Tensors as kernels take them.

use rope_core::{HeadsLayout, Layout};

use crate::rotary::RotaryOp;

/// A backend's tensor of heads.
pub trait HeadsTensor: Sized {
    /// Returns the sizes and strides, if the kernels can follow them.
    fn heads_layout(&self, layout: Layout) -> Option<HeadsLayout>;
    /// Returns the tensor, or a copy without gaps if it has any.
    fn into_contiguous(self) -> Self;
    /// True if nothing else holds the tensor's memory.
    fn is_unique(&self) -> bool;
    /// Allocates a tensor of the same shape and type, with arbitrary elements.
    fn empty_like(&self) -> Self;
}

/// A tensor that a kernel reads by its strides, and the tensor that it writes: the same one if
/// nothing else holds it, else a new one.
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
    /// Prepares a tensor to read or to overwrite, or a copy if the kernels cannot follow its
    /// strides.
    ///
    /// # Panics
    /// If the tensor's rank differs from the layout's; [`RotaryOp::check`] reports this.
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

    /// Prepares a tensor to overwrite if nothing else holds it, and else allocates an output.
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

    /// True if nothing else holds the tensor, and no two of its elements share memory.
    pub fn may_be_overwritten(&self) -> bool {
        self.source.is_unique() && self.from.is_injective()
    }

    /// Allocates a new tensor to write.
    pub fn allocate_output(&mut self, op: &RotaryOp) {
        self.target = Some(contiguous(self.source.empty_like(), op));
    }

    /// Returns the written tensor.
    pub fn into_output(self) -> T {
        self.target.map_or(self.source, |(target, _)| target)
    }
}

fn contiguous<T: HeadsTensor>(x: T, op: &RotaryOp) -> (T, HeadsLayout) {
    let layout = x.heads_layout(op.layout);
    let layout = layout.expect("kernels follow a contiguous tensor of the layout's rank");
    (x, layout)
}
