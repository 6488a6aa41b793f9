//! The operators of training (`libopapi_math.so`, `libopapi_nn.so`).
//!
//! Each line of the table declares both phases of one operator: `aclnnXGetWorkspaceSize`, which takes the listed
//! parameters, and `aclnnX`. The table is handed to a macro by [`for_each_operator`]: here to one that declares the C
//! functions, in [`aclnn`](crate::aclnn) to one that wraps them.
//!
//! # Source
//! Public operator documents of hicann/ops-math and hicann/ops-nn, `<group>/<operator>/docs/aclnn*.md`.

use super::describe::{CType, Signature};
use super::types::{
    CubeMath, aclDataType, aclIntArray, aclOpExecutor, aclScalar, aclTensor, aclTensorList,
    aclnnStatus, aclrtStream,
};
use std::ffi::{c_char, c_void};

/// Second phase of every operator.
pub type Run =
    unsafe extern "C" fn(*mut c_void, u64, *mut aclOpExecutor, aclrtStream) -> aclnnStatus;

/// The two phases of an operator, as far as the installation has them.
#[derive(Clone, Copy, Debug)]
pub struct Operator<P> {
    /// Plans a call and names its workspace.
    pub plan: Option<P>,
    /// Runs a planned call.
    pub run: Option<Run>,
}

/// How a parameter of an operator crosses the C interface.
pub trait Kind {
    /// Its C type.
    type C: CType;
}

/// Parameters that are descriptors, by role.
pub mod kind {
    /// A tensor that is read.
    #[derive(Debug)]
    pub enum In {}
    /// A tensor that is written.
    #[derive(Debug)]
    pub enum Out {}
    /// A tensor that is read and written, or written in part.
    #[derive(Debug)]
    pub enum Ref {}
    /// A tensor that is written, or null.
    #[derive(Debug)]
    pub enum OptOut {}
    /// A tensor that is read, or null.
    #[derive(Debug)]
    pub enum OptIn {}
    /// A list of tensors that are read.
    #[derive(Debug)]
    pub enum Ins {}
    /// A number.
    #[derive(Debug)]
    pub enum Num {}
    /// A number, or null.
    #[derive(Debug)]
    pub enum OptNum {}
    /// A list of integers.
    #[derive(Debug)]
    pub enum Ints {}
    /// A string of the host.
    #[derive(Debug)]
    pub enum Text {}
    /// An element type.
    #[derive(Debug)]
    pub enum DataType {}
}

macro_rules! kinds {
    ($($kind:ty => $c:ty),* $(,)?) => { $( impl Kind for $kind { type C = $c; } )* };
}

kinds! {
    kind::In => *const aclTensor,
    kind::Out => *mut aclTensor,
    kind::Ref => *mut aclTensor,
    kind::OptIn => *const aclTensor,
    kind::OptOut => *mut aclTensor,
    kind::Ins => *const aclTensorList,
    kind::Num => *const aclScalar,
    kind::OptNum => *const aclScalar,
    kind::Ints => *const aclIntArray,
    kind::Text => *mut c_char,
    kind::DataType => aclDataType,
    i64 => i64,
    u64 => u64,
    f32 => f32,
    f64 => f64,
    bool => bool,
    CubeMath => CubeMath,
}

/// Calls `$then!` with the table of operators.
macro_rules! for_each_operator {
    ($then:ident) => {
        $then! {
            /// x + alpha·other.
            fn add = Add(x: In, other: In, alpha: Num, out: Out);
            /// x + alpha·other, of a number.
            fn adds = Adds(x: In, other: Num, alpha: Num, out: Out);
            /// x - alpha·other.
            fn sub = Sub(x: In, other: In, alpha: Num, out: Out);
            /// x·other.
            fn mul = Mul(x: In, other: In, out: Out);
            /// x·other, of a number.
            fn muls = Muls(x: In, other: Num, out: Out);
            /// x / other.
            fn div = Div(x: In, other: In, out: Out);
            /// x / other, of a number.
            fn divs = Divs(x: In, other: Num, out: Out);
            /// Remainder with the sign of the divisor.
            fn remainder = RemainderTensorTensor(x: In, other: In, out: Out);
            /// Remainder by a number, with its sign.
            fn remainder_scalar = RemainderTensorScalar(x: In, other: Num, out: Out);
            /// x to the power of a tensor.
            fn pow = PowTensorTensor(x: In, exponent: In, out: Out);
            /// x to the power of a number.
            fn pow_scalar = PowTensorScalar(x: In, exponent: Num, out: Out);
            /// -x.
            fn neg = Neg(x: In, out: Out);
            /// Absolute value.
            fn abs = Abs(x: In, out: Out);
            /// Sign, or 0.
            fn sign = Sign(x: In, out: Out);
            /// Square root.
            fn sqrt = Sqrt(x: In, out: Out);
            /// 1 / x.
            fn reciprocal = Reciprocal(x: In, out: Out);
            /// e to the power of x.
            fn exp = Exp(x: In, out: Out);
            /// Natural logarithm.
            fn log = Log(x: In, out: Out);
            /// Natural logarithm of 1 + x.
            fn log1p = Log1p(x: In, out: Out);
            /// Error function.
            fn erf = Erf(x: In, out: Out);
            /// Hyperbolic tangent.
            fn tanh = Tanh(x: In, out: Out);
            /// Sine.
            fn sin = Sin(x: In, out: Out);
            /// Cosine.
            fn cos = Cos(x: In, out: Out);
            /// Next integer below.
            fn floor = Floor(x: In, out: Out);
            /// Next integer above.
            fn ceil = Ceil(x: In, out: Out);
            /// Nearest integer, halves to even.
            fn round = Round(x: In, out: Out);
            /// x within bounds, of which one may be absent.
            fn clamp = Clamp(x: In, low: OptNum, high: OptNum, out: Out);
            /// 1 / (1 + e^-x).
            fn sigmoid = Sigmoid(x: In, out: Out);
            /// Gradient of the sigmoid from its output.
            fn sigmoid_backward = SigmoidBackward(grad: In, output: In, out: Out);
            /// Gaussian error unit; `approximate` 0 by the error function, 1 by tanh.
            fn gelu = GeluV2(x: In, approximate: i64, out: Out);
            /// Gradient of the Gaussian error unit; `approximate` is "none" or "tanh".
            fn gelu_backward = GeluBackwardV2(grad: In, x: In, approximate: Text, out: Out);
            /// max(x, 0).
            fn relu = Relu(x: In, out: Out);

            /// x = other.
            fn eq = EqTensor(x: In, other: In, out: Out);
            /// x ≠ other.
            fn ne = NeTensor(x: In, other: In, out: Out);
            /// x > other.
            fn gt = GtTensor(x: In, other: In, out: Out);
            /// x ≥ other.
            fn ge = GeTensor(x: In, other: In, out: Out);
            /// x < other.
            fn lt = LtTensor(x: In, other: In, out: Out);
            /// x ≤ other.
            fn le = LeTensor(x: In, other: In, out: Out);
            /// x = other, of a number.
            fn eq_scalar = EqScalar(x: In, other: Num, out: Out);
            /// x ≠ other, of a number.
            fn ne_scalar = NeScalar(x: In, other: Num, out: Out);
            /// x > other, of a number.
            fn gt_scalar = GtScalar(x: In, other: Num, out: Out);
            /// x ≥ other, of a number.
            fn ge_scalar = GeScalar(x: In, other: Num, out: Out);
            /// x < other, of a number.
            fn lt_scalar = LtScalar(x: In, other: Num, out: Out);
            /// x ≤ other, of a number.
            fn le_scalar = LeScalar(x: In, other: Num, out: Out);
            /// Both are true.
            fn logical_and = LogicalAnd(x: In, other: In, out: Out);
            /// One is true.
            fn logical_or = LogicalOr(x: In, other: In, out: Out);
            /// Just one is true.
            fn logical_xor = LogicalXor(x: In, other: In, out: Out);
            /// x is not true.
            fn logical_not = LogicalNot(x: In, out: Out);
            /// x where the condition holds, else other.
            fn select_where = SWhere(condition: In, x: In, other: In, out: Out);
            /// Writes `value` into x where the mask holds.
            fn masked_fill = InplaceMaskedFillScalar(x: Ref, mask: In, value: Num);

            /// x in another element type.
            fn cast = Cast(x: In, dtype: DataType, out: Out);
            /// Writes one number everywhere.
            fn fill = InplaceFillScalar(x: Ref, value: Num);
            /// Writes source into x: any strides, any type, repeated along axes of length 1.
            fn copy = InplaceCopy(x: Ref, source: In);
            /// start, start + step, … below end.
            fn arange = Arange(start: Num, end: Num, step: Num, out: Out);
            /// Uniform random numbers from `low` up to `high`.
            fn uniform = InplaceUniform(x: Ref, low: f64, high: f64, seed: u64, offset: u64);
            /// Normal random numbers.
            fn normal = InplaceNormal(x: Ref, mean: f32, deviation: f32, seed: i64, offset: i64);
            /// 1 with a probability, else 0.
            fn bernoulli = InplaceBernoulli(x: Ref, probability: Num, seed: i64, offset: i64);

            /// Sum over axes; no axes means all.
            fn reduce_sum = ReduceSum(x: In, dims: Ints, keep_dims: bool, dtype: DataType, out: Out);
            /// Mean over axes; no axes means all.
            fn mean = Mean(x: In, dims: Ints, keep_dims: bool, dtype: DataType, out: Out);
            /// Largest along axes; no axes means all.
            fn amax = Amax(x: In, dims: Ints, keep_dims: bool, out: Out);
            /// Smallest along axes; no axes means all.
            fn amin = Amin(x: In, dims: Ints, keep_dims: bool, out: Out);
            /// Largest along an axis, and where it is.
            fn max_dim = MaxDim(x: In, dim: i64, keep_dim: bool, out: Out, indices: Out);
            /// Smallest along an axis, and where it is.
            fn min_dim = MinDim(x: In, dim: i64, keep_dim: bool, out: Out, indices: Out);
            /// Where the largest along an axis is.
            fn argmax = ArgMax(x: In, dim: i64, keep_dim: bool, out: Out);
            /// Where the smallest along an axis is.
            fn argmin = ArgMin(x: In, dim: i64, keep_dim: bool, out: Out);
            /// Product along an axis.
            fn prod_dim = ProdDim(x: In, dim: i64, keep_dim: bool, dtype: DataType, out: Out);
            /// Whether any along axes is true; no axes means all.
            fn any = Any(x: In, dims: Ints, keep_dims: bool, out: Out);
            /// Whether all along axes are true; no axes means all.
            fn all = All(x: In, dims: Ints, keep_dims: bool, out: Out);
            /// Running sum along an axis.
            fn cumsum = Cumsum(x: In, dim: i64, dtype: DataType, out: Out);

            /// Tensors one behind the other along an axis.
            fn cat = Cat(tensors: Ins, dim: i64, out: Out);
            /// x repeated along each axis.
            fn repeat = Repeat(x: In, repeats: Ints, out: Out);
            /// x in reverse order along axes.
            fn flip = Flip(x: In, dims: Ints, out: Out);
            /// Along an axis, the elements that `index` names.
            fn gather = Gather(x: In, dim: i64, index: In, out: Out);
            /// Writes source into x at the places along an axis that `index` names.
            fn scatter = InplaceScatter(x: Ref, dim: i64, index: In, source: In, reduce: i64);
            /// x with source added at the places along an axis that `index` names.
            fn scatter_add = ScatterAdd(x: In, dim: i64, index: In, source: In, out: Out);
            /// Along an axis, the slices that `index` names.
            fn index_select = IndexSelect(x: In, dim: i64, index: In, out: Out);
            /// x with alpha·source added to the slices along an axis that `index` names.
            fn index_add = IndexAdd(x: In, dim: i64, index: In, source: In, alpha: Num, out: Out);
            /// Rows of the weight.
            fn embedding = Embedding(weight: In, indices: In, out: Out);
            /// Gradient of the weight; `padding` is a row without one, or -1.
            fn embedding_backward = EmbeddingDenseBackward(grad: In, indices: In, rows: u64, padding: u64, scale_by_frequency: bool, out: Out);
            /// Values in order along an axis, and where they were.
            fn sort = Sort(x: In, stable: bool, dim: i64, descending: bool, out: Out, indices: Out);

            /// Product of matrices.
            fn mm = Mm(x: In, other: In, out: Out, cube_math: CubeMath);
            /// Products of matrices, batch by batch.
            fn batch_mm = BatchMatMul(x: In, other: In, out: Out, cube_math: CubeMath);

            /// Softmax along an axis.
            fn softmax = Softmax(x: In, dim: i64, out: Out);
            /// Logarithm of the softmax along an axis.
            fn log_softmax = LogSoftmax(x: In, dim: i64, out: Out);
            /// Normalisation over trailing axes.
            fn layer_norm = LayerNorm(x: In, normalized: Ints, weight: OptIn, bias: OptIn, epsilon: f64, out: Out, mean: OptOut, rstd: OptOut);
        }
    };
}
pub(crate) use for_each_operator;

/// The first phase's type, from the kinds of its parameters.
macro_rules! plan_type {
    ($($kind:ident),*) => {
        unsafe extern "C" fn($(<$kind as Kind>::C,)* *mut u64, *mut *mut aclOpExecutor) -> aclnnStatus
    };
}

macro_rules! declare {
    ($( $(#[$meta:meta])* fn $_safe:ident = $name:ident($($arg:ident: $kind:ident),*); )*) => {
        /// The operators of training. An installation may lack any of them.
        #[derive(Clone, Copy, Debug)]
        #[allow(missing_docs, reason = "the functions of `aclnn` describe them")]
        pub struct AclOperators {
            $( pub $name: Operator<plan_type!($($kind),*)>, )*
        }

        impl AclOperators {
            /// Fills the table from `resolve`.
            ///
            /// # Safety
            /// - Each address that `resolve` returns is that of the C function of that name, with the signature that
            ///   this table declares.
            /// - The code behind the addresses stays mapped as long as the table is used.
            #[must_use]
            pub unsafe fn load(resolve: &mut super::Resolve<'_>) -> Self {
                Self {
                    $( $name: Operator {
                        // SAFETY: a null pointer becomes `None`, the null niche of the function pointer; the caller
                        // vouches for the signature of any other address.
                        plan: unsafe { std::mem::transmute::<*const c_void, Option<plan_type!($($kind),*)>>(
                            resolve(super::c_name(concat!("aclnn", stringify!($name), "GetWorkspaceSize\0"))),
                        ) },
                        // SAFETY: as above.
                        run: unsafe { std::mem::transmute::<*const c_void, Option<Run>>(
                            resolve(super::c_name(concat!("aclnn", stringify!($name), "\0"))),
                        ) },
                    }, )*
                }
            }

            /// The functions that this table lacks.
            #[must_use]
            pub fn missing(&self) -> Vec<&'static str> {
                let mut missing = Vec::new();
                $(
                    if self.$name.plan.is_none() {
                        missing.push(concat!("aclnn", stringify!($name), "GetWorkspaceSize"));
                    }
                    if self.$name.run.is_none() {
                        missing.push(concat!("aclnn", stringify!($name)));
                    }
                )*
                missing
            }

            /// The C signatures of the table's functions.
            #[must_use]
            pub fn signatures() -> Vec<Signature> {
                let run = [
                    <*mut c_void>::c(),
                    u64::c(),
                    <*mut aclOpExecutor>::c(),
                    aclrtStream::c(),
                ];
                vec![
                    $(
                        Signature {
                            name: concat!("aclnn", stringify!($name), "GetWorkspaceSize"),
                            returns: aclnnStatus::c(),
                            parameters: vec![
                                $( <$kind as Kind>::C::c(), )*
                                <*mut u64>::c(),
                                <*mut *mut aclOpExecutor>::c(),
                            ],
                            required: false,
                        },
                        Signature {
                            name: concat!("aclnn", stringify!($name)),
                            returns: aclnnStatus::c(),
                            parameters: run.to_vec(),
                            required: false,
                        },
                    )*
                ]
            }
        }
    };
}

use kind::{DataType, In, Ins, Ints, Num, OptIn, OptNum, OptOut, Out, Ref, Text};
for_each_operator!(declare);
