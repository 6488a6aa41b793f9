//! Translates an operation to operator calls.

use burn::backend::{DType, ExecutionError, Scalar, Shape, TensorMetadata, bf16, f16};
use rope_ascend::aclnn::{Number, Operators, View};
use rope_ascend::sys::aclDataType;
use rope_ascend::{AscendError, Result};

use crate::error::execution;
use crate::tensor::AscendTensor;

/// The destination of a result.
#[derive(Debug)]
pub(crate) enum Out {
    /// Into new memory.
    New(Shape, DType),
    /// Over this tensor, which nothing else refers to.
    Over(AscendTensor),
}

impl Out {
    /// A result like `x`: over `x` if it is free, otherwise in new memory.
    pub(crate) fn over_or_like(x: &AscendTensor) -> Self {
        if is_free(x) {
            Self::Over(x.clone())
        } else {
            Self::New(x.shape(), x.dtype())
        }
    }

    fn shape_and_type(&self) -> (Shape, DType) {
        match self {
            Self::New(shape, dtype) => (shape.clone(), *dtype),
            Self::Over(tensor) => (tensor.shape(), tensor.dtype()),
        }
    }
}

/// True if the tensor's memory may be overwritten as a whole: nothing else holds it and no element
/// is repeated.
pub(crate) fn is_free(x: &AscendTensor) -> bool {
    x.is_unique() && x.is_contiguous()
}

/// The operator library's name of an element type.
pub(crate) fn acl(dtype: DType) -> Option<aclDataType> {
    Some(match dtype {
        DType::F64 => aclDataType::DOUBLE,
        DType::F32 => aclDataType::FLOAT,
        DType::F16 => aclDataType::FLOAT16,
        DType::BF16 => aclDataType::BF16,
        DType::I64 => aclDataType::INT64,
        DType::I32 => aclDataType::INT32,
        DType::I16 => aclDataType::INT16,
        DType::I8 => aclDataType::INT8,
        DType::U64 => aclDataType::UINT64,
        DType::U32 => aclDataType::UINT32,
        DType::U16 => aclDataType::UINT16,
        DType::U8 => aclDataType::UINT8,
        dtype if crate::tensor::is_byte_bool(dtype) => aclDataType::BOOL,
        _ => return None,
    })
}

/// As [`acl`], for a type that the operation's table lists.
pub(crate) fn data_type(dtype: DType) -> Result<aclDataType> {
    acl(dtype).ok_or_else(|| AscendError::InvalidArgument {
        operation: "operator",
        argument: "element type",
        expected: "one that the operator library knows".into(),
        found: format!("{dtype:?}"),
    })
}

/// A number for an operator on tensors of `dtype`: rounded to that type, as by Flex, and passed in
/// it.
///
/// The vendor's greater-than operators compare a 64-bit float that their tensor's type cannot
/// represent in 64 bits, on the AI CPU.
pub(crate) fn number(value: Scalar, dtype: DType) -> Number {
    let bits = match dtype {
        DType::F32 => value.elem::<f32>().to_bits().into(),
        // Rounded from 64 bits directly: rounding to 32 bits first can give a neighbouring value.
        DType::F16 => f16::from_f64(value.elem()).to_bits().into(),
        DType::BF16 => bf16::from_f64(value.elem()).to_bits().into(),
        DType::Bool(_) => value.elem::<bool>().into(),
        dtype if dtype.is_float() => return Number::Float(value.elem()),
        // Narrower integers are the lower bits.
        _ => value.elem::<i64>().cast_unsigned(),
    };
    acl(dtype).map_or(Number::Int(bits.cast_signed()), |dtype| {
        Number::Element(dtype, bits)
    })
}

pub(crate) fn view(tensor: &AscendTensor) -> std::result::Result<View<'_>, ExecutionError> {
    let dtype = data_type(tensor.dtype()).map_err(|error| execution(&error))?;
    Ok(View {
        buffer: tensor.buffer()?,
        dtype,
        dims: tensor.dims(),
        strides: tensor.strides(),
        offset: tensor.offset(),
    })
}

/// As [`view`], of several tensors.
pub(crate) fn views<const N: usize>(
    tensors: [&AscendTensor; N],
) -> std::result::Result<[View<'_>; N], ExecutionError> {
    let views: std::result::Result<Vec<_>, _> = tensors.into_iter().map(view).collect();
    views.map(|views| match views.try_into() {
        Ok(views) => views,
        Err(_) => unreachable!("as many views as tensors"),
    })
}

/// Queues `work` on the device of the inputs and returns its result.
///
/// A failed input gives a failed result. A rejected operator or a failed allocation gives a failed
/// result of the right shape. Nothing is queued for a result without elements.
pub(crate) fn compute<const N: usize>(
    inputs: [&AscendTensor; N],
    out: Out,
    work: impl FnOnce(&Operators, [View<'_>; N], View<'_>) -> Result<()>,
) -> AscendTensor {
    compute_of_list(
        &inputs,
        out,
        |operators, views, out| match <[View<'_>; N]>::try_from(views) {
            Ok(views) => work(operators, views, out),
            Err(_) => unreachable!("as many views as inputs"),
        },
    )
}

/// As [`compute`], for a number of inputs known only at run time.
pub(crate) fn compute_of_list(
    inputs: &[&AscendTensor],
    out: Out,
    work: impl FnOnce(&Operators, &[View<'_>], View<'_>) -> Result<()>,
) -> AscendTensor {
    let failed = |out: &Out, error: ExecutionError| {
        let (shape, dtype) = out.shape_and_type();
        let device = inputs.first().map_or_else(Default::default, |x| x.device());
        AscendTensor::failed(&device, shape, dtype, error)
    };
    let prepared: std::result::Result<Vec<_>, _> = inputs.iter().map(|x| view(x)).collect();
    let (views, context) = match (prepared, inputs.first().map(|x| x.context())) {
        (Ok(views), Some(Ok(context))) => (views, context.clone()),
        (Err(error), _) | (_, Some(Err(error))) => return failed(&out, error),
        (_, None) => unreachable!("an operation has an input"),
    };
    let (shape, dtype) = out.shape_and_type();
    let target = match out {
        Out::New(shape, dtype) => AscendTensor::empty_in(&context, shape, dtype),
        Out::Over(tensor) => tensor,
    };
    if target.is_empty() || target.failure().is_some() {
        return target;
    }
    let done = match view(&target) {
        Ok(out) => work(context.operators(), &views, out).map_err(|error| execution(&error)),
        Err(error) => Err(error),
    };
    match done {
        Ok(()) => target,
        Err(error) => {
            context.failed(&error);
            AscendTensor::failed(&context.device(), shape, dtype, error)
        }
    }
}

/// A set of element types.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Types(u16);

macro_rules! types {
    ($( $(#[$meta:meta])* $name:ident = $($dtype:pat_param)|+, $bit:literal; )*) => {
        impl Types {
            $( $(#[$meta])* pub(crate) const $name: Self = Self(1 << $bit); )*

            pub(crate) fn contains(self, dtype: DType) -> bool {
                let bit = match dtype {
                    $( $($dtype)|+ => 1 << $bit, )*
                    _ => 0,
                };
                self.0 & bit != 0
            }

            /// The names of the set's members, for the table in the documentation.
            #[cfg(test)]
            pub(crate) fn names(self) -> Vec<&'static str> {
                let mut names = Vec::new();
                $( if self.0 & (1 << $bit) != 0 { names.push(stringify!($name)); } )*
                names
            }
        }
    };
}

types! {
    F32 = DType::F32, 0;
    F16 = DType::F16, 1;
    BF16 = DType::BF16, 2;
    F64 = DType::F64, 3;
    I64 = DType::I64, 4;
    I32 = DType::I32, 5;
    I16 = DType::I16, 6;
    I8 = DType::I8, 7;
    U8 = DType::U8, 8;
    U16 = DType::U16, 9;
    U32 = DType::U32, 10;
    U64 = DType::U64, 11;
    BOOL = DType::Bool(burn::backend::BoolStore::Native | burn::backend::BoolStore::U8), 12;
}

impl Types {
    pub(crate) const fn and(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
    /// The floats of training.
    pub(crate) const FLOAT: Self = Self::F32.and(Self::F16).and(Self::BF16);
    /// Integers that name elements.
    pub(crate) const INDEX: Self = Self::I64.and(Self::I32);
    /// Integers that the arithmetic operators take.
    pub(crate) const INT: Self = Self::INDEX.and(Self::I16).and(Self::I8).and(Self::U8);
    /// Floats and truth values.
    pub(crate) const FLOAT_BOOL: Self = Self::FLOAT.and(Self::BOOL);
    /// Floats and the integers that name elements.
    pub(crate) const FLOAT_INDEX: Self = Self::FLOAT.and(Self::INDEX);
    /// Floats and the integers that the arithmetic operators take.
    pub(crate) const FLOAT_INT: Self = Self::FLOAT.and(Self::INT);
    /// Integers and truth values.
    pub(crate) const INT_BOOL: Self = Self::INT.and(Self::BOOL);
    /// Truth values and the integers that name elements.
    pub(crate) const BOOL_INDEX: Self = Self::BOOL.and(Self::INDEX);
    /// All types of a burn tensor.
    pub(crate) const ALL: Self = Self::FLOAT
        .and(Self::F64)
        .and(Self::INT_BOOL)
        .and(Self::U16)
        .and(Self::U32)
        .and(Self::U64);
}

/// True if the element types that an argument names lie in a set.
pub(crate) trait Fits {
    fn fits(&self, _types: Types) -> bool {
        true
    }
}

impl Fits for AscendTensor {
    fn fits(&self, types: Types) -> bool {
        types.contains(self.dtype())
    }
}

impl<T: Fits> Fits for Option<T> {
    fn fits(&self, types: Types) -> bool {
        self.as_ref().is_none_or(|value| value.fits(types))
    }
}

impl<T: Fits> Fits for Vec<T> {
    fn fits(&self, types: Types) -> bool {
        self.iter().all(|value| value.fits(types))
    }
}

macro_rules! named_types {
    ($($ty:ty),*) => {
        $( impl Fits for $ty {
            fn fits(&self, types: Types) -> bool {
                types.contains(DType::from(*self))
            }
        } )*
    };
}

named_types!(burn::backend::FloatDType, burn::backend::IntDType);

impl Fits for burn::backend::BoolDType {
    fn fits(&self, _types: Types) -> bool {
        crate::tensor::is_byte_bool(DType::Bool(*self))
    }
}

macro_rules! no_types {
    ($($ty:ty),* $(,)?) => { $( impl Fits for $ty {} )* };
}

no_types! {
    usize, f64, bool, Scalar, Shape, &crate::AscendDevice, &[usize], &[burn::backend::Slice], [usize; 2],
    std::ops::Range<i64>, burn::backend::ops::AttentionModuleOptions,
    burn::backend::ops::ConvOptions<2>, burn::backend::ops::ConvOptions<3>,
}

impl Fits for burn::backend::Distribution {}

impl Fits for burn::backend::tensor::IndexingUpdateOp {
    /// The operator library adds and overwrites.
    fn fits(&self, _types: Types) -> bool {
        matches!(self, Self::Add | Self::Assign)
    }
}
