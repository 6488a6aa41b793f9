//! Inputs of the cases: values drawn from a range, stored as a view.

use std::fmt;

use burn::backend::tensor::{BoolTensor, Device, FloatTensor, IntTensor};
use burn::backend::{Backend, Bytes, DType, ExecutionError, TensorData, bf16, f16, read_sync};
use burn::tensor::{Shape, Slice};

/// How an input lies in its buffer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum View {
    /// Row-major, from the buffer's start.
    Contiguous,
    /// First and last dimension stored in exchanged order.
    Transposed,
    /// Inside a larger buffer: one element before and after in every dimension.
    Sliced,
    /// Every second element of a larger buffer, from the second on, in every dimension.
    Stepped,
    /// [`View::Stepped`], with the first and last dimension stored in exchanged order.
    SteppedTransposed,
    /// The dimension has one stored entry, read again and again: stride 0.
    Expanded(usize),
}

/// The values from which an input draws.
#[derive(Clone, Debug)]
pub(crate) enum Range {
    /// Uniform in `[low, high)`.
    Uniform(f64, f64),
    /// Of both signs, with magnitudes around 1: products of many stay in range.
    Factors,
    /// Multiples of 1/4 in `[-4, 4]`: exact in every float type, with ties, zeros and halves.
    Quarters,
    /// [`Range::Quarters`] without zero.
    NonZeroQuarters,
    /// Every value once, in mixed order: for results that depend on which of two equal values is
    /// taken.
    Distinct,
    /// NaN, infinities, zeros of both signs, ones, and ordinary numbers.
    Special,
    /// Whole numbers in `[low, high)`.
    Whole(i64, i64),
    /// As written.
    Listed(Vec<f64>),
}

pub(crate) const SPREAD: Range = Range::Uniform(-4.0, 4.0);
pub(crate) const POSITIVE: Range = Range::Uniform(0.1, 4.0);
pub(crate) const UNIT: Range = Range::Uniform(-0.95, 0.95);
pub(crate) const FLAGS: Range = Range::Whole(0, 2);

/// A generator of the house, so that a case's values never change with a dependency's version.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    fn bits(&mut self) -> u64 {
        // SplitMix64 (Steele, Lea, Flood 2014).
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 53) as f64
    }

    pub(crate) fn below(&mut self, bound: usize) -> usize {
        (self.unit() * bound as f64) as usize
    }

    pub(crate) fn draw(&mut self, range: &Range, count: usize) -> Vec<f64> {
        const SPECIAL: [f64; 9] = [
            f64::NAN,
            f64::INFINITY,
            f64::NEG_INFINITY,
            0.0,
            -0.0,
            1.0,
            -1.0,
            2.5,
            -0.5,
        ];
        match range {
            Range::Uniform(low, high) => (0..count)
                .map(|_| low + self.unit() * (high - low))
                .collect(),
            Range::Factors => (0..count)
                .map(|_| {
                    let magnitude = 0.8 + 0.45 * self.unit();
                    if self.below(2) == 0 {
                        magnitude
                    } else {
                        -magnitude
                    }
                })
                .collect(),
            Range::Quarters => (0..count)
                .map(|_| self.below(33) as f64 / 4.0 - 4.0)
                .collect(),
            Range::NonZeroQuarters => (0..count)
                .map(|_| {
                    let magnitude = (1 + self.below(16)) as f64 / 4.0;
                    if self.below(2) == 0 {
                        magnitude
                    } else {
                        -magnitude
                    }
                })
                .collect(),
            Range::Distinct => {
                let mut values: Vec<f64> =
                    (0..count).map(|k| k as f64 - (count / 2) as f64).collect();
                for k in (1..count).rev() {
                    values.swap(k, self.below(k + 1));
                }
                values
            }
            Range::Special => (0..count)
                .map(|_| SPECIAL[self.below(SPECIAL.len())])
                .collect(),
            Range::Whole(low, high) => (0..count)
                .map(|_| (low + self.below((high - low) as usize) as i64) as f64)
                .collect(),
            Range::Listed(values) => values.clone(),
        }
    }
}

/// One input of a case: logical values and how they are to be stored.
#[derive(Clone)]
pub(crate) struct Input {
    pub(crate) shape: Vec<usize>,
    pub(crate) dtype: DType,
    pub(crate) view: View,
    values: Vec<f64>,
}

impl fmt::Display for Input {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {:?}", self.dtype.name(), self.shape)?;
        match self.view {
            View::Contiguous => Ok(()),
            view => write!(f, " {view:?} (strides {:?})", self.strides()),
        }
    }
}

impl Input {
    pub(crate) fn new(
        shape: &[usize],
        view: View,
        dtype: DType,
        range: &Range,
        random: &mut Random,
    ) -> Self {
        let mut values = random.draw(range, shape.iter().product());
        if let View::Expanded(dim) = view {
            let inner: usize = shape[dim + 1..].iter().product();
            values = (0..values.len())
                .map(|k| values[k / (inner * shape[dim]) * (inner * shape[dim]) + k % inner])
                .collect();
        }
        Self {
            shape: shape.to_vec(),
            dtype,
            view,
            values,
        }
    }

    /// The values in logical order.
    pub(crate) fn data(&self) -> TensorData {
        tensor_data(self.dtype, &self.values, &self.shape)
    }

    /// The input as the device holds it: the buffer, and the view of it.
    pub(crate) fn upload<B: Backend>(&self, device: &Device<B>) -> (Value<B>, Value<B>) {
        let stored = self.stored_shape();
        // Elements around a view must never show up in a result.
        let around = match self.dtype {
            dtype if dtype.is_float() => f64::NAN,
            dtype if dtype.is_bool() => 1.0,
            _ => 113.0,
        };
        let mut buffer = vec![around; stored.iter().product()];
        for (k, value) in self.values.iter().enumerate() {
            buffer[self.stored_index(k, &stored)] = *value;
        }
        let stored = Value::<B>::upload(tensor_data(self.dtype, &buffer, &stored), device);
        let view = self.look(stored.clone());
        (stored, view)
    }

    fn look<B: Backend>(&self, stored: Value<B>) -> Value<B> {
        let last = self.shape.len().saturating_sub(1);
        let cut = |shape: &[usize], first: isize, step: isize| -> Vec<Slice> {
            let cut = |&size: &usize| match size as isize {
                0 => Slice::new(first, Some(first), 1),
                size => Slice::new(first, Some(first + (size - 1) * step + 1), step),
            };
            shape.iter().map(cut).collect()
        };
        let mut exchanged = self.shape.clone();
        exchanged.swap(0, last);
        match self.view {
            View::Contiguous => stored,
            View::Transposed => stored.swap_dims(0, last),
            View::Sliced => stored.slice(&cut(&self.shape, 1, 1)),
            View::Stepped => stored.slice(&cut(&self.shape, 1, 2)),
            View::SteppedTransposed => stored.slice(&cut(&exchanged, 1, 2)).swap_dims(0, last),
            View::Expanded(_) => stored.expand(Shape::from(self.shape.clone())),
        }
    }

    fn stored_shape(&self) -> Vec<usize> {
        let mut shape = self.shape.clone();
        let last = shape.len().saturating_sub(1);
        match self.view {
            View::Contiguous => {}
            View::Transposed => shape.swap(0, last),
            View::Sliced => shape.iter_mut().for_each(|size| *size += 2),
            View::Stepped => shape.iter_mut().for_each(|size| *size = 2 * *size + 1),
            View::SteppedTransposed => {
                shape.swap(0, last);
                shape.iter_mut().for_each(|size| *size = 2 * *size + 1);
            }
            View::Expanded(dim) => shape[dim] = 1,
        }
        shape
    }

    fn stored_index(&self, logical: usize, stored: &[usize]) -> usize {
        let mut index = unravel(logical, &self.shape);
        let last = index.len().saturating_sub(1);
        match self.view {
            View::Contiguous => {}
            View::Transposed => index.swap(0, last),
            View::Sliced => index.iter_mut().for_each(|k| *k += 1),
            View::Stepped => index.iter_mut().for_each(|k| *k = 1 + 2 * *k),
            View::SteppedTransposed => {
                index.swap(0, last);
                index.iter_mut().for_each(|k| *k = 1 + 2 * *k);
            }
            View::Expanded(dim) => index[dim] = 0,
        }
        index
            .iter()
            .zip(stored)
            .fold(0, |flat, (k, size)| flat * size + k)
    }

    /// Strides in elements, as a failure's reader needs them.
    fn strides(&self) -> Vec<usize> {
        let stored = self.stored_shape();
        let last = stored.len().saturating_sub(1);
        let mut strides: Vec<usize> = (0..stored.len())
            .map(|d| stored[d + 1..].iter().product())
            .collect();
        match self.view {
            View::Contiguous | View::Sliced => {}
            View::Transposed => strides.swap(0, last),
            View::Stepped => strides.iter_mut().for_each(|s| *s *= 2),
            View::SteppedTransposed => {
                strides.iter_mut().for_each(|s| *s *= 2);
                strides.swap(0, last);
            }
            View::Expanded(dim) => strides[dim] = 0,
        }
        strides
    }
}

/// Index per dimension of the row-major position `flat`.
pub(crate) fn unravel(mut flat: usize, shape: &[usize]) -> Vec<usize> {
    let mut index = vec![0; shape.len()];
    for (k, size) in index.iter_mut().zip(shape).rev() {
        *k = flat % size;
        flat /= size;
    }
    index
}

/// `values` rounded to `dtype`.
pub(crate) fn tensor_data(dtype: DType, values: &[f64], shape: &[usize]) -> TensorData {
    macro_rules! bytes {
        ($convert:expr) => {
            values
                .iter()
                .flat_map(|&v| $convert(v).to_ne_bytes())
                .collect::<Vec<u8>>()
        };
    }
    let bytes = match dtype {
        DType::F64 => bytes!(|v: f64| v),
        DType::F32 | DType::Flex32 => bytes!(|v: f64| v as f32),
        DType::F16 => bytes!(f16::from_f64),
        DType::BF16 => bytes!(bf16::from_f64),
        DType::I64 => bytes!(|v: f64| v as i64),
        DType::I32 => bytes!(|v: f64| v as i32),
        DType::I16 => bytes!(|v: f64| v as i16),
        DType::I8 => bytes!(|v: f64| v as i8),
        DType::U64 => bytes!(|v: f64| v as u64),
        DType::U32 => bytes!(|v: f64| v as u32),
        DType::U16 => bytes!(|v: f64| v as u16),
        DType::U8 => bytes!(|v: f64| v as u8),
        DType::Bool(_) => bytes!(|v: f64| u8::from(v != 0.0)),
        DType::QFloat(_) => panic!("quantised tensors have no plain values"),
    };
    TensorData::from_bytes(Bytes::from_bytes_vec(bytes), shape.to_vec(), dtype)
}

/// A tensor of any of the three kinds.
#[derive(Clone, Debug)]
pub(crate) enum Value<B: Backend> {
    Float(FloatTensor<B>),
    Int(IntTensor<B>),
    Bool(BoolTensor<B>),
}

macro_rules! each_kind {
    ($value:expr, $x:ident => $float:expr, $int:expr, $bool:expr) => {
        match $value {
            Value::Float($x) => Value::Float($float),
            Value::Int($x) => Value::Int($int),
            Value::Bool($x) => Value::Bool($bool),
        }
    };
}

impl<B: Backend> Value<B> {
    pub(crate) fn upload(data: TensorData, device: &Device<B>) -> Self {
        match data.dtype() {
            dtype if dtype.is_float() => Value::Float(B::float_from_data(data, device)),
            dtype if dtype.is_bool() => Value::Bool(B::bool_from_data(data, device)),
            _ => Value::Int(B::int_from_data(data, device)),
        }
    }

    pub(crate) fn read(self) -> Result<TensorData, ExecutionError> {
        match self {
            Value::Float(x) => read_sync(B::float_into_data(x)),
            Value::Int(x) => read_sync(B::int_into_data(x)),
            Value::Bool(x) => read_sync(B::bool_into_data(x)),
        }
    }

    fn swap_dims(self, a: usize, b: usize) -> Self {
        each_kind!(self, x => B::float_swap_dims(x, a, b), B::int_swap_dims(x, a, b), B::bool_swap_dims(x, a, b))
    }

    fn slice(self, slices: &[Slice]) -> Self {
        each_kind!(self, x => B::float_slice(x, slices), B::int_slice(x, slices), B::bool_slice(x, slices))
    }

    fn expand(self, shape: Shape) -> Self {
        each_kind!(self, x => B::float_expand(x, shape), B::int_expand(x, shape), B::bool_expand(x, shape))
    }
}
