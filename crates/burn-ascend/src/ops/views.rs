//! Operations that change only a tensor's description, not its elements.

use burn::backend::{Shape, Slice};

use crate::tensor::AscendTensor;

/// Swaps two axes.
pub(crate) fn swap(tensor: &AscendTensor, a: usize, b: usize) -> AscendTensor {
    let mut axes: Vec<usize> = (0..tensor.dims().len()).collect();
    axes.swap(a, b);
    permute(tensor, &axes)
}

/// Moves axis `axes[i]` to index i.
pub(crate) fn permute(tensor: &AscendTensor, axes: &[usize]) -> AscendTensor {
    let dims: Vec<usize> = axes.iter().map(|&axis| tensor.dims()[axis]).collect();
    let strides = axes.iter().map(|&axis| tensor.strides()[axis]).collect();
    tensor.view(Shape::from(dims), strides, tensor.offset())
}

/// Repeats axes of length 1, and adds axes in front.
pub(crate) fn expand(tensor: &AscendTensor, shape: &Shape) -> AscendTensor {
    let added = shape.len() - tensor.dims().len();
    let strides = (0..shape.len())
        .map(|axis| match axis.checked_sub(added) {
            Some(own) if tensor.dims()[own] == shape[axis] => tensor.strides()[own],
            _ => 0,
        })
        .collect();
    tensor.view(shape.clone(), strides, tensor.offset())
}

/// The same elements in another shape: a view if the strides allow it, otherwise of a dense copy.
pub(crate) fn reshape(tensor: AscendTensor, shape: &Shape) -> AscendTensor {
    let strides = reshaped_strides(tensor.dims(), tensor.strides(), shape);
    match strides {
        Some(strides) => tensor.view(shape.clone(), strides, tensor.offset()),
        None => {
            let dense = tensor.contiguous();
            let strides = crate::tensor::dense_strides(shape);
            dense.view(shape.clone(), strides, dense.offset())
        }
    }
}

/// Strides of the same elements in dimensions `to`, unless they need a copy.
///
/// Axes of the source that lie densely in each other form runs; each run must be filled by whole
/// axes of the target.
fn reshaped_strides(dims: &[usize], strides: &[usize], to: &[usize]) -> Option<Vec<usize>> {
    if dims.contains(&0) || to.contains(&0) {
        return Some(crate::tensor::dense_strides(to));
    }
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for (&dim, &stride) in dims.iter().zip(strides).filter(|(dim, _)| **dim != 1) {
        match runs.last_mut() {
            Some((length, step)) if *step == stride * dim => {
                *length *= dim;
                *step = stride;
            }
            _ => runs.push((dim, stride)),
        }
    }
    let mut out = vec![1; to.len()];
    let mut runs = runs.into_iter().rev();
    let (mut left, mut step) = runs.next().unwrap_or((1, 1));
    for axis in (0..to.len()).rev() {
        if to[axis] == 1 {
            out[axis] = step * left.max(1);
            continue;
        }
        if left == 1 {
            (left, step) = runs.next()?;
        }
        if left % to[axis] != 0 {
            return None;
        }
        out[axis] = step;
        step *= to[axis];
        left /= to[axis];
    }
    Some(out)
}

/// The elements selected by `slices`, and the axes to reverse afterwards.
///
/// A negative step names the same range from its end; strides of the operator library are never
/// negative.
pub(crate) fn slice(tensor: &AscendTensor, slices: &[Slice]) -> (AscendTensor, Vec<usize>) {
    let mut dims = tensor.dims().to_vec();
    let mut strides = tensor.strides().to_vec();
    let mut offset = tensor.offset();
    let mut reversed = Vec::new();
    for (axis, slice) in slices.iter().enumerate().take(dims.len()) {
        let range = slice.to_range(dims[axis]);
        let step = slice.step().unsigned_abs();
        let count = range.len().div_ceil(step);
        let first = if slice.is_reversed() && count > 0 {
            reversed.push(axis);
            range.end - 1 - (count - 1) * step
        } else {
            range.start
        };
        dims[axis] = count;
        if count > 0 {
            offset += first * strides[axis];
        }
        strides[axis] *= step;
    }
    (tensor.view(Shape::from(dims), strides, offset), reversed)
}

/// The axes in the order of their strides, largest first.
pub(crate) fn falling_strides(tensor: &AscendTensor) -> Vec<usize> {
    let mut axes: Vec<usize> = (0..tensor.dims().len()).collect();
    axes.sort_by_key(|&axis| std::cmp::Reverse(tensor.strides()[axis]));
    axes
}

/// Two tensors of one shape with the fewest axes that describe both: neighbouring axes that are
/// dense in both become one.
pub(crate) fn merged(tensors: [&AscendTensor; 2]) -> [AscendTensor; 2] {
    let [a, b] = tensors;
    let mut axes: Vec<(usize, [usize; 2])> = Vec::new();
    for (axis, &dim) in a.dims().iter().enumerate().filter(|(_, dim)| **dim != 1) {
        let steps = [a.strides()[axis], b.strides()[axis]];
        match axes.last_mut() {
            Some((length, last)) if *last == steps.map(|step| step * dim) => {
                *length *= dim;
                *last = steps;
            }
            _ => axes.push((dim, steps)),
        }
    }
    if axes.is_empty() {
        axes.push((1, [1; 2]));
    }
    let dims = Shape::from(axes.iter().map(|axis| axis.0).collect::<Vec<_>>());
    [0, 1].map(|which: usize| {
        let strides = axes.iter().map(|axis| axis.1[which]).collect();
        tensors[which].view(dims.clone(), strides, tensors[which].offset())
    })
}

/// The tensor at one index of its first axis, without that axis.
pub(crate) fn at(tensor: &AscendTensor, index: usize) -> AscendTensor {
    let offset = tensor.offset() + index * tensor.strides()[0];
    let dims = tensor.dims()[1..].to_vec();
    tensor.view(Shape::from(dims), tensor.strides()[1..].to_vec(), offset)
}

fn repeats_along(tensor: &AscendTensor, axis: usize) -> bool {
    tensor.strides()[axis] == 0 && tensor.dims()[axis] > 1
}

/// True if an axis repeats one element by a stride of 0.
pub(crate) fn repeats(tensor: &AscendTensor) -> bool {
    (0..tensor.dims().len()).any(|axis| repeats_along(tensor, axis))
}

/// The tensor with repeated axes (stride 0) cut to length 1, where `cut` allows it.
///
/// Operators repeat axes of length 1 without a copy, but would first copy an axis of stride 0.
pub(crate) fn narrow_repeats(tensor: &AscendTensor, cut: impl Fn(usize) -> bool) -> AscendTensor {
    if !repeats(tensor) {
        return tensor.clone();
    }
    let dims: Vec<usize> = (0..tensor.dims().len())
        .map(|axis| {
            if repeats_along(tensor, axis) && cut(axis) {
                1
            } else {
                tensor.dims()[axis]
            }
        })
        .collect();
    tensor.view(
        Shape::from(dims),
        tensor.strides().to_vec(),
        tensor.offset(),
    )
}

/// True if `tensor` is longer than 1 on the axis that is `axis` of a tensor of `rank` axes.
pub(crate) fn is_long(tensor: &AscendTensor, rank: usize, axis: usize) -> bool {
    (axis + tensor.dims().len())
        .checked_sub(rank)
        .is_some_and(|own| tensor.dims()[own] > 1)
}

/// Windows of `size` elements along `axis`, each `step` after the one before; the window is a new
/// last axis.
pub(crate) fn unfold(tensor: &AscendTensor, axis: usize, size: usize, step: usize) -> AscendTensor {
    let mut dims = tensor.dims().to_vec();
    let mut strides = tensor.strides().to_vec();
    dims[axis] = (dims[axis] + step).saturating_sub(size) / step;
    dims.push(size);
    strides.push(strides[axis]);
    strides[axis] *= step;
    tensor.view(Shape::from(dims), strides, tensor.offset())
}

#[cfg(test)]
mod tests {
    use super::reshaped_strides;

    #[test]
    fn dense_tensors_take_any_shape() {
        assert_eq!(
            reshaped_strides(&[2, 3, 4], &[12, 4, 1], &[6, 4]),
            Some(vec![4, 1])
        );
        assert_eq!(
            reshaped_strides(&[24], &[1], &[2, 1, 12]).map(|s| (s[0], s[2])),
            Some((12, 1))
        );
        assert_eq!(
            reshaped_strides(&[], &[], &[1, 1]).map(|s| s.len()),
            Some(2)
        );
    }

    #[test]
    fn a_split_axis_of_a_transposed_tensor_stays_a_view() {
        // [4, 6] transposed is [6, 4] with strides [1, 6]; splitting the 6 keeps each part's step.
        assert_eq!(
            reshaped_strides(&[6, 4], &[1, 6], &[2, 3, 4]),
            Some(vec![3, 1, 6])
        );
        assert_eq!(reshaped_strides(&[6, 4], &[1, 6], &[24]), None);
    }

    #[test]
    fn repeated_axes_merge_with_repeated_axes_only() {
        assert_eq!(
            reshaped_strides(&[2, 3, 4], &[0, 0, 1], &[6, 4]),
            Some(vec![0, 1])
        );
        assert_eq!(reshaped_strides(&[2, 3], &[0, 1], &[6]), None);
    }
}
