//! Operators that create, copy and reorder elements.

use burn::backend::{DType, Distribution, ExecutionError, Scalar, Shape, Slice, TensorMetadata};
use rope_ascend::Result;
use rope_ascend::aclnn::{Number, stores_on_ai_core};

use super::elementwise::{cast, lower_halves};
use super::launch::{Out, compute, compute_of_list, is_free, number};
use super::views::{self, narrow_repeats};
use crate::context::Context;
use crate::npu::AscendDevice;
use crate::tensor::{AscendTensor, dense_bytes, dense_strides};

/// The type under which elements of `dtype` are only moved: the operators of data movement take
/// signed integers of each size.
fn moved(dtype: DType) -> DType {
    match dtype {
        DType::F64 | DType::U64 => DType::I64,
        DType::U32 => DType::I32,
        DType::U16 => DType::I16,
        dtype if crate::tensor::is_byte_bool(dtype) => DType::U8,
        other => other,
    }
}

/// Runs `work` on the bits of a tensor's elements.
pub(crate) fn as_bits(
    x: AscendTensor,
    work: impl FnOnce(AscendTensor) -> AscendTensor,
) -> AscendTensor {
    let dtype = x.dtype();
    work(x.reinterpret(moved(dtype))).reinterpret(dtype)
}

/// The limit on axes of a copy.
const MAX_AXES: usize = 8;

/// A dense copy.
pub(crate) fn copy(x: &AscendTensor) -> AscendTensor {
    let target = AscendTensor::empty(&x.device(), x.shape(), x.dtype());
    let failure = write(&target, x);
    unless(failure, target)
}

/// Writes `source`, repeated along axes of length 1, through the view `target` of memory that only
/// the caller holds. Returns the failure, if any.
pub(crate) fn write(target: &AscendTensor, source: &AscendTensor) -> Option<ExecutionError> {
    let failure = target.failure().or(source.failure());
    if failure.is_some() || target.is_empty() {
        return failure.cloned();
    }
    let source = views::expand(source, &target.shape());
    let order = views::falling_strides(target);
    let [target, source] = [target, &source].map(|x| views::permute(x, &order));
    let [target, source] =
        views::merged([&target, &source]).map(|x| x.clone().reinterpret(moved(x.dtype())));
    if target.dims().len() <= MAX_AXES && stores_on_ai_core(target.dims(), target.strides()) {
        let source = without_narrow_repeats(source);
        let source = narrow_repeats(&source, |_| true);
        let written = compute([&source], Out::Over(target), |ops, [source], out| {
            ops.copy(out, source)
        });
        return written.failure().cloned();
    }
    match by_rows(&target) {
        Some((rows, hull, inside)) => write(&rows, &hull)
            .or_else(|| write(&inside, &source))
            .or_else(|| write(&hull, &rows)),
        None => (0..target.dims()[0])
            .find_map(|index| write(&views::at(&target, index), &views::at(&source, index))),
    }
}

/// The elements without a stride of 0 where they are 16-bit integers: the AI Core repeats those of
/// 32 bits.
fn without_narrow_repeats(x: AscendTensor) -> AscendTensor {
    if x.dtype() != DType::I16 || !views::repeats(&x) {
        return x;
    }
    lower_halves(&copy(&cast(x, DType::I32)))
}

/// Fewest rows for which [`by_rows`] needs fewer operators than one per row.
const ROWS: usize = 4;

/// A way to write a view of falling strides on the AI Core, where the vendor's operator would use
/// the AI CPU: a copy of its rows, including the gaps between their elements, in which one more
/// pair of axes is dense.
///
/// Returns the copy, its source, and the view within the copy; `None` if that is not possible, or
/// if writing row by row is less work.
fn by_rows(target: &AscendTensor) -> Option<(AscendTensor, AscendTensor, AscendTensor)> {
    let (dims, steps) = (target.dims(), target.strides());
    // The axes from here on are a row.
    let row = (1..dims.len()).find(|&axis| steps[axis - 1] != dims[axis] * steps[axis])?;
    let (outer, inner) = dims.split_at(row);
    let spans = inner.iter().zip(&steps[row..]);
    let width = 1 + spans.map(|(dim, step)| (dim - 1) * step).sum::<usize>();
    let padded = dims[row] * steps[row];
    // Rows that overlap, or axes that do, cannot be copied row by row.
    let apart = width <= padded.min(steps[row - 1]);
    if outer.iter().product::<usize>() < ROWS || dims.len() > MAX_AXES || !apart {
        return None;
    }
    let copied = Shape::from([outer, &[padded]].concat());
    let copy = AscendTensor::empty(&target.device(), copied, target.dtype());
    let shape = Shape::from([outer, &[width]].concat());
    let rows = copy.view(shape.clone(), copy.strides().to_vec(), 0);
    let hull = target.view(shape, [&steps[..row], &[1]].concat(), target.offset());
    let steps = [&copy.strides()[..row], &steps[row..]].concat();
    let inside = copy.view(target.shape(), steps, 0);
    Some((rows, hull, inside))
}

/// The tensor, or the failure of a step of its computation.
pub(crate) fn unless(failure: Option<ExecutionError>, x: AscendTensor) -> AscendTensor {
    match failure {
        Some(error) => AscendTensor::failed(&x.device(), x.shape(), x.dtype(), error),
        None => x,
    }
}

/// The tensor in separate memory that may be overwritten.
pub(crate) fn owned(x: AscendTensor) -> AscendTensor {
    if is_free(&x) { x } else { copy(&x) }
}

/// New memory, filled by `work`.
fn made(
    device: &AscendDevice,
    shape: Shape,
    dtype: DType,
    work: impl FnOnce(&Context, rope_ascend::aclnn::View<'_>) -> Result<()>,
) -> AscendTensor {
    let target = AscendTensor::empty(device, shape, dtype);
    compute([&target], Out::Over(target.clone()), |_, [x], _| {
        match target.context() {
            Ok(context) => work(context, x),
            // Its view would not exist.
            Err(_) => unreachable!("a tensor with a view is in an open device"),
        }
    })
}

/// One number everywhere.
pub(crate) fn full(
    device: &AscendDevice,
    shape: Shape,
    value: Scalar,
    dtype: DType,
) -> AscendTensor {
    // Two types that the AI Core cannot fill are filled as another type.
    match dtype {
        DType::U8 => {
            let value = Scalar::Int(value.elem::<i64>());
            full(device, shape, value, DType::I8).reinterpret(dtype)
        }
        DType::I16 => {
            let half = i64::from(value.elem::<i64>() as u16);
            let pairs = Shape::from([shape.num_elements().div_ceil(2)]);
            let pairs = full(device, pairs, Scalar::Int(half << 16 | half), DType::I32);
            let strides = dense_strides(&shape);
            pairs.split(dtype).view(shape, strides, 0)
        }
        _ => {
            let number = number(value, dtype);
            made(device, shape, dtype, |context, out| {
                context.operators().fill(out, number)
            })
        }
    }
}

/// Zeros.
pub(crate) fn zeros(device: &AscendDevice, shape: Shape, dtype: DType) -> AscendTensor {
    let bytes = dense_bytes(&shape, dtype);
    AscendTensor::allocated(device, shape, dtype, |stream| stream.zeros(bytes))
}

/// start, start + step, … below end.
pub(crate) fn arange(
    device: &AscendDevice,
    range: &std::ops::Range<i64>,
    step: usize,
    dtype: DType,
) -> AscendTensor {
    let length = usize::try_from(range.end - range.start).unwrap_or(0);
    let shape = Shape::from([length.div_ceil(step)]);
    let [start, end, step] = [range.start, range.end, step as i64].map(Number::Int);
    made(device, shape, dtype, |context, out| {
        context.operators().arange(start, end, step, out)
    })
}

/// Random numbers.
pub(crate) fn random(
    device: &AscendDevice,
    shape: Shape,
    distribution: Distribution,
    dtype: DType,
) -> AscendTensor {
    let count = shape.num_elements();
    made(device, shape, dtype, |context, out| {
        let (ops, state) = (context.operators(), context.draw(count));
        let uniform = |low, high| {
            let (seed, offset) = (state.seed.cast_unsigned(), state.offset.cast_unsigned());
            ops.uniform(out, low, high, seed, offset)
        };
        match distribution {
            Distribution::Default => uniform(0.0, 1.0),
            Distribution::Uniform(low, high) => uniform(low, high),
            Distribution::Normal(mean, deviation) => {
                ops.normal(out, mean as f32, deviation as f32, state.seed, state.offset)
            }
            Distribution::Bernoulli(probability) => {
                ops.bernoulli(out, Number::Float(probability), state.seed, state.offset)
            }
        }
    })
}

/// Tensors one after the other along an axis.
pub(crate) fn cat(tensors: Vec<AscendTensor>, axis: usize) -> AscendTensor {
    let dtype = tensors[0].dtype();
    let mut dims = tensors[0].dims().to_vec();
    dims[axis] = tensors.iter().map(|x| x.dims()[axis]).sum();
    let parts: Vec<AscendTensor> = tensors
        .into_iter()
        .map(|x| without_narrow_repeats(x.reinterpret(moved(dtype))))
        .collect();
    let inputs: Vec<&AscendTensor> = parts
        .iter()
        .filter(|x| !x.is_empty() || x.failure().is_some())
        .collect();
    if let Some(whole) = neighbours(&inputs, axis, &dims) {
        return whole.reinterpret(dtype);
    }
    let out = Out::New(Shape::from(dims), moved(dtype));
    match inputs.as_slice() {
        // All are empty, and so is the result.
        [] => compute([&parts[0]], out, |_, [_], _| Ok(())),
        [one] => copy(one),
        inputs => compute_of_list(inputs, out, |ops, views, out| {
            ops.cat(views, axis as i64, out)
        }),
    }
    .reinterpret(dtype)
}

/// The tensors as one view, if they lie in one memory each after the one before.
fn neighbours(tensors: &[&AscendTensor], axis: usize, dims: &[usize]) -> Option<AscendTensor> {
    let (first, rest) = tensors.split_first()?;
    let block = first.buffer().ok()?;
    let stride = first.strides()[axis];
    let mut end = first.offset() + first.dims()[axis] * stride;
    for next in rest {
        let follows = next.offset() == end && next.strides() == first.strides();
        if !follows || next.buffer().ok()?.pointer() != block.pointer() {
            return None;
        }
        end += next.dims()[axis] * stride;
    }
    (!rest.is_empty()).then(|| {
        let dims = burn::backend::Shape::from(dims.to_vec());
        first.view(dims, first.strides().to_vec(), first.offset())
    })
}

/// The tensor several times along an axis.
pub(crate) fn repeat(x: AscendTensor, axis: usize, times: usize) -> AscendTensor {
    as_bits(x, |x| {
        let mut dims = x.dims().to_vec();
        dims[axis] *= times;
        let mut repeats = vec![1_i64; dims.len()];
        repeats[axis] = times as i64;
        let out = Out::New(Shape::from(dims), x.dtype());
        compute([&x], out, |ops, [x], out| ops.repeat(x, &repeats, out))
    })
}

/// Axes in reverse order.
pub(crate) fn flip(x: AscendTensor, axes: &[usize]) -> AscendTensor {
    if axes.is_empty() {
        return x;
    }
    let dtype = x.dtype();
    // The types of each size that the AI Core flips; none has one byte.
    let flipped = match dtype.size() {
        1 => {
            return axes.iter().fold(x, |x, &axis| {
                let falling = falling(&x.device(), x.dims()[axis]);
                super::index::select(x, axis, falling)
            });
        }
        2 => DType::I16,
        _ => moved(dtype),
    };
    let axes: Vec<i64> = axes.iter().map(|&axis| axis as i64).collect();
    // Repeated elements are copied in their own type: the AI Core does not repeat 16-bit integers.
    let x = if dtype == flipped { x } else { x.contiguous() };
    let x = x.reinterpret(flipped);
    let out = Out::New(x.shape(), flipped);
    compute([&x], out, |ops, [x], out| ops.flip(x, &axes, out)).reinterpret(dtype)
}

/// length - 1, length - 2, … 0.
fn falling(device: &AscendDevice, length: usize) -> AscendTensor {
    let [start, end] = [length as i64 - 1, -1].map(Number::Int);
    made(device, Shape::from([length]), DType::I64, |context, out| {
        context.operators().arange(start, end, Number::Int(-1), out)
    })
}

/// A part of the tensor: a view, unless an axis is reversed.
pub(crate) fn slice(x: &AscendTensor, slices: &[Slice]) -> AscendTensor {
    let (part, reversed) = views::slice(x, slices);
    flip(part, &reversed)
}

/// The tensor with another part.
pub(crate) fn slice_assign(x: AscendTensor, slices: &[Slice], value: AscendTensor) -> AscendTensor {
    let x = owned(x);
    let (part, reversed) = views::slice(&x, slices);
    let value = flip(value, &reversed);
    let failure = write(&part, &value);
    unless(failure, x)
}
