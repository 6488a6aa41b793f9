//! The operators, each with its two phases, by the notation of their documentation.
//!
//! | letter | parameter |
//! | --- | --- |
//! | `T`, `MaybeT` | a tensor that is read; one that may be null |
//! | `Out`, `MaybeOut` | a tensor that is written; one that may be null |
//! | `Ref` | a tensor that is read and written |
//! | `S`, `MaybeS` | a host scalar; one that may be null |
//! | `Ints`, `MaybeInts`, `Tensors`, `MaybeTensors` | host lists; two that may be null |
//! | `OutTensors`, `MaybeOutTensors` | lists of tensors that are written; one that may be null |
//! | `DType`, `Text` | an element type by its number; a C string |
#![allow(non_snake_case, reason = "the vendor's spelling")]

use std::ffi::{c_char, c_void};

use super::aclnn::{aclIntArray, aclOpExecutor, aclScalar, aclTensor, aclTensorList};
use crate::abi::Export;
use crate::abi::runtime::{get_text, put};
use crate::aclnn::attention::{Forward, Gradient, Inputs, Options};
use crate::aclnn::call::{Access, required};
use crate::aclnn::executor::execute;
use crate::aclnn::index::{Meets, Weights};
use crate::aclnn::matrix::{Addend, Grouping, Product, grouped, product};
use crate::aclnn::normalize::{LayerNorm, RmsNormSaved};
use crate::aclnn::pointwise::{Backward, Binary, Test, Unary, backward, binary, test, unary};
use crate::aclnn::reduce::Fold;
use crate::aclnn::rotary::GradTensors;
use crate::aclnn::{
    Call, attention, cache, fill, index, movement, normalize, pointwise, random, reduce, rotary,
};
use crate::codes::{ACLNN_NULLPTR, Failure, Outcome};
use crate::record;
use crate::state::boundary;

/// Writes the result of a first phase to its out parameters.
///
/// # Safety
/// - Both pointers are null or valid for writing.
unsafe fn give(
    workspace_bytes: *mut u64,
    executor: *mut *mut aclOpExecutor,
    plan: impl FnOnce() -> Outcome<(u64, u64)>,
) -> Outcome {
    if workspace_bytes.is_null() || executor.is_null() {
        let message = "workspaceSize or executor is null";
        return Err(Failure::new(ACLNN_NULLPTR, message));
    }
    let (bytes, planned) = plan()?;
    // SAFETY: neither is null, and both are valid for writing by the function's own condition.
    unsafe {
        put(workspace_bytes, bytes, "workspaceSize")?;
        put(executor, planned as *mut aclOpExecutor, "executor")
    }
}

/// A C string parameter.
///
/// # Safety
/// - `text` is null or a C string.
unsafe fn text(text: *const c_char, name: &str) -> Outcome<String> {
    // SAFETY: null or a C string by the function's own condition.
    unsafe { get_text(text, name) }.map_err(|failure| Failure::new(ACLNN_NULLPTR, failure.message))
}

/// The C type of a kind of parameter, and how it is spelled.
macro_rules! kinds {
    ($($kind:ident $ty:ty;)*) => {
        macro_rules! c_type { $( ($kind) => { $ty }; )* }
        macro_rules! spelled { $( ($kind) => { stringify!($ty) }; )* }
    };
}
kinds! {
    T *const aclTensor;
    MaybeT *const aclTensor;
    Out *mut aclTensor;
    MaybeOut *mut aclTensor;
    Ref *mut aclTensor;
    Over *mut aclTensor;
    S *const aclScalar;
    MaybeS *const aclScalar;
    Ints *const aclIntArray;
    MaybeInts *const aclIntArray;
    Tensors *const aclTensorList;
    MaybeTensors *const aclTensorList;
    OutTensors *mut aclTensorList;
    MaybeOutTensors *mut aclTensorList;
    DType i32;
    Text *const c_char;
    i64 i64;
    u64 u64;
    i8 i8;
    bool bool;
    f32 f32;
    f64 f64;
}

/// Takes a parameter by its role in its operator.
macro_rules! take {
    ($call:ident, $arg:ident, $name:expr, T) => {
        required(take!($call, $arg, $name, MaybeT), $name)?
    };
    ($call:ident, $arg:ident, $name:expr, MaybeT) => {
        $call.tensor($arg as u64, $name, Access::Read)?
    };
    ($call:ident, $arg:ident, $name:expr, Out) => {
        required(take!($call, $arg, $name, MaybeOut), $name)?
    };
    ($call:ident, $arg:ident, $name:expr, MaybeOut) => {
        $call.tensor($arg as u64, $name, Access::Write)?
    };
    ($call:ident, $arg:ident, $name:expr, Ref) => {
        required($call.tensor($arg as u64, $name, Access::Both)?, $name)?
    };
    // Documented as input and output, but only written.
    ($call:ident, $arg:ident, $name:expr, Over) => {
        required(
            $call.tensor_counted($arg as u64, $name, Access::Write, Access::Both)?,
            $name,
        )?
    };
    ($call:ident, $arg:ident, $name:expr, S) => {
        required(take!($call, $arg, $name, MaybeS), $name)?
    };
    ($call:ident, $arg:ident, $name:expr, MaybeS) => {
        $call.held($arg as u64, $name, |all| &all.scalars)?
    };
    ($call:ident, $arg:ident, $name:expr, Ints) => {
        required($call.held($arg as u64, $name, |all| &all.ints)?, $name)?
    };
    ($call:ident, $arg:ident, $name:expr, MaybeInts) => {
        $call
            .held($arg as u64, $name, |all| &all.ints)?
            .unwrap_or_default()
    };
    ($call:ident, $arg:ident, $name:expr, Tensors) => {
        required(take!($call, $arg, $name, MaybeTensors), $name)?
    };
    ($call:ident, $arg:ident, $name:expr, MaybeTensors) => {
        $call.tensors($arg as u64, $name, Access::Read)?
    };
    ($call:ident, $arg:ident, $name:expr, OutTensors) => {
        required(take!($call, $arg, $name, MaybeOutTensors), $name)?
    };
    ($call:ident, $arg:ident, $name:expr, MaybeOutTensors) => {
        $call.tensors($arg as u64, $name, Access::Write)?
    };
    ($call:ident, $arg:ident, $name:expr, DType) => {
        $call.dtype($arg, $name)?
    };
    ($call:ident, $arg:ident, $name:expr, Text) => {
        // SAFETY: null or a C string by the C declaration of the operator.
        unsafe { text($arg, $name) }?
    };
    ($call:ident, $arg:ident, $name:expr, $plain:ident) => {
        $arg
    };
}

/// A parameter as recordings write it.
macro_rules! spelled_value {
    ($arg:ident, T) => {
        record::tensor($arg as u64)
    };
    ($arg:ident, MaybeT) => {
        record::tensor($arg as u64)
    };
    ($arg:ident, Out) => {
        record::tensor($arg as u64)
    };
    ($arg:ident, MaybeOut) => {
        record::tensor($arg as u64)
    };
    ($arg:ident, Ref) => {
        record::tensor($arg as u64)
    };
    ($arg:ident, MaybeRef) => {
        record::tensor($arg as u64)
    };
    ($arg:ident, Over) => {
        record::tensor($arg as u64)
    };
    ($arg:ident, S) => {
        record::scalar($arg as u64)
    };
    ($arg:ident, MaybeS) => {
        record::scalar($arg as u64)
    };
    ($arg:ident, Ints) => {
        record::ints($arg as u64)
    };
    ($arg:ident, MaybeInts) => {
        record::ints($arg as u64)
    };
    ($arg:ident, Tensors) => {
        record::tensors($arg as u64)
    };
    ($arg:ident, MaybeTensors) => {
        record::tensors($arg as u64)
    };
    ($arg:ident, OutTensors) => {
        record::tensors($arg as u64)
    };
    ($arg:ident, MaybeOutTensors) => {
        record::tensors($arg as u64)
    };
    ($arg:ident, Text) => {
        // SAFETY: null or a C string by the C declaration of the operator.
        unsafe { text($arg, "") }.map_or_else(|_| "null".to_owned(), |text| format!("{text:?}"))
    };
    ($arg:ident, bool) => {
        u8::from($arg).to_string()
    };
    ($arg:ident, $plain:ident) => {
        $arg.to_string()
    };
}

/// Defines both phases of each operator from its name, its parameters, and what checks them and
/// returns the work. A parameter that Rust reserves the name of ends in an underscore here.
macro_rules! operators {
    ($( $operator:ident($($arg:ident: $kind:ident),* $(,)?) |$call:ident| $body:expr; )*) => {
        $(
            #[doc = concat!("The two phases of `", stringify!($operator), "`.")]
            pub mod $operator {
                use super::*;

                #[doc = concat!("First phase of `", stringify!($operator), "`.")]
                ///
                /// # Safety
                /// - Each pointer is valid as the C declaration requires, or null where it
                ///   allows null.
                #[unsafe(export_name = concat!(stringify!($operator), "GetWorkspaceSize"))]
                #[allow(clippy::too_many_arguments, reason = "the C function has as many")]
                pub unsafe extern "C" fn plan(
                    $($arg: c_type!($kind),)*
                    workspaceSize: *mut u64,
                    executor: *mut *mut aclOpExecutor,
                ) -> i32 {
                    let body = move || {
                        let plan = || {
                            let mut call = Call::new(stringify!($operator));
                            let $call = &mut call;
                            $(
                                let $arg = take!(
                                    $call, $arg, stringify!($arg).trim_end_matches('_'), $kind
                                );
                            )*
                            let kernel = $body?;
                            call.finish(kernel)
                        };
                        // SAFETY: out parameters, null or valid by the C declaration.
                        unsafe { give(workspaceSize, executor, plan) }
                    };
                    let code = boundary(concat!(stringify!($operator), "GetWorkspaceSize"), body);
                    record::operator(stringify!($operator), code, || {
                        vec![ $( spelled_value!($arg, $kind) ),* ]
                    });
                    code
                }

                #[doc = concat!("Second phase of `", stringify!($operator), "`.")]
                ///
                /// # Safety
                /// - None: handles and device addresses are looked up, wrong ones are errors.
                #[unsafe(export_name = stringify!($operator))]
                pub unsafe extern "C" fn run(
                    workspace: *mut c_void,
                    workspaceSize: u64,
                    executor: *mut aclOpExecutor,
                    stream: *mut c_void,
                ) -> i32 {
                    let (workspace, executor) = (workspace as u64, executor as u64);
                    boundary(stringify!($operator), move || {
                        let name = stringify!($operator);
                        execute(name, workspace, workspaceSize, executor, stream as u64)
                    })
                }
            }
        )*
        pub(crate) fn table() -> Vec<Export> {
            vec![ $(
                Export {
                    name: concat!(stringify!($operator), "GetWorkspaceSize"),
                    signature: concat!(
                        "fn(", $( spelled!($kind), ", ", )*
                        "*mut u64, *mut *mut aclOpExecutor) -> i32"
                    ),
                    address: $operator::plan as *const c_void,
                },
                Export {
                    name: stringify!($operator),
                    signature: "fn(*mut c_void, u64, *mut aclOpExecutor, *mut c_void) -> i32",
                    address: $operator::run as *const c_void,
                },
            )* ]
        }
    };
}

operators! {
    // Rotary position embedding.
    aclnnRotaryPositionEmbedding(x: T, cos: T, sin: T, mode: i64, out: Out) |call| {
        call.distinct();
        rotary::forward(x, cos, sin, mode, out)
    };
    aclnnRotaryPositionEmbeddingGrad(
        dy: T, cos: T, sin: T, xOptional: MaybeT, mode: i64, dxOut: Out, dcosOut: Out, dsinOut: Out,
    ) |call| {
        call.distinct();
        let (x, dx, dcos, dsin) = (xOptional, dxOut, dcosOut, dsinOut);
        rotary::gradient(GradTensors { dy, cos, sin, x, dx, dcos, dsin }, mode)
    };
    aclnnApplyRotaryPosEmbGrad(
        gradQueryEmbed: T, gradKeyEmbed: T, cos: T, sin: T, queryOptional: MaybeT,
        keyOptional: MaybeT, rotaryModeOptional: Text, layout: i64, gradQueryOut: Out,
        gradKeyOut: Out, gradCosOut: Out, gradSinOut: Out,
    ) |call| {
        call.distinct();
        let given = [(gradQueryEmbed, queryOptional), (gradKeyEmbed, keyOptional)];
        let written = [gradQueryOut, gradKeyOut, gradCosOut, gradSinOut];
        rotary::both_gradients(given, [cos, sin], &rotaryModeOptional, layout, written)
    };
    aclnnRopeWithSinCosCache(
        positions: T, queryIn: T, keyIn: T, cosSinCache: T, mropeSection: MaybeInts, headSize: i64,
        isNeoxStyle: bool, queryOut: Out, keyOut: Out,
    ) |call| {
        let tensors = [positions, queryIn, keyIn, cosSinCache, queryOut, keyOut];
        cache::cached(call.operator(), tensors, mropeSection, headSize, isNeoxStyle, None)
    };
    aclnnRopeWithSinCosCacheV2(
        positions: T, queryIn: T, keyIn: T, cosSinCache: T, mropeSection: MaybeInts, headSize: i64,
        isNeoxStyle: bool, cacheMode: i64, queryOut: Out, keyOut: Out,
    ) |call| {
        let tensors = [positions, queryIn, keyIn, cosSinCache, queryOut, keyOut];
        let mode = Some(cacheMode);
        cache::cached(call.operator(), tensors, mropeSection, headSize, isNeoxStyle, mode)
    };

    // Arithmetic of two tensors, or of a tensor and a scalar.
    aclnnAdd(self_: T, other: T, alpha: S, out: Out)
        |call| binary(Binary::Add, self_, other, Some(alpha), out);
    aclnnAdds(self_: T, other: S, alpha: S, out: Out)
        |call| binary(Binary::Add, self_, other, Some(alpha), out);
    aclnnSub(self_: T, other: T, alpha: S, out: Out)
        |call| binary(Binary::Sub, self_, other, Some(alpha), out);
    aclnnMul(self_: T, other: T, out: Out) |call| binary(Binary::Mul, self_, other, None, out);
    aclnnMuls(self_: T, other: S, out: Out) |call| binary(Binary::Mul, self_, other, None, out);
    aclnnDiv(self_: T, other: T, out: Out) |call| binary(Binary::Div, self_, other, None, out);
    aclnnDivs(self_: T, other: S, out: Out) |call| binary(Binary::Div, self_, other, None, out);
    aclnnRemainderTensorTensor(self_: T, other: T, out: Out)
        |call| binary(Binary::Remainder, self_, other, None, out);
    aclnnRemainderTensorScalar(self_: T, other: S, out: Out)
        |call| binary(Binary::Remainder, self_, other, None, out);
    aclnnPowTensorTensor(self_: T, exponent: T, out: Out)
        |call| binary(Binary::Pow, self_, exponent, None, out);
    aclnnPowTensorScalar(self_: T, exponent: S, out: Out)
        |call| binary(Binary::Pow, self_, exponent, None, out);
    aclnnClamp(self_: T, clipValueMin: MaybeS, clipValueMax: MaybeS, out: Out)
        |call| pointwise::clamp(self_, clipValueMin, clipValueMax, out);

    // Functions of one tensor.
    aclnnNeg(self_: T, out: Out) |call| unary(Unary::Neg, self_, out);
    aclnnAbs(self_: T, out: Out) |call| unary(Unary::Abs, self_, out);
    aclnnSign(self_: T, result: Out) |call| unary(Unary::Sign, self_, result);
    aclnnSqrt(self_: T, out: Out) |call| unary(Unary::Sqrt, self_, out);
    aclnnReciprocal(self_: T, out: Out) |call| unary(Unary::Reciprocal, self_, out);
    aclnnExp(self_: T, out: Out) |call| unary(Unary::Exp, self_, out);
    aclnnLog(self_: T, out: Out) |call| unary(Unary::Log, self_, out);
    aclnnLog1p(self_: T, out: Out) |call| unary(Unary::Log1p, self_, out);
    aclnnErf(self_: T, out: Out) |call| unary(Unary::Erf, self_, out);
    aclnnTanh(self_: T, out: Out) |call| unary(Unary::Tanh, self_, out);
    aclnnSin(self_: T, out: Out) |call| unary(Unary::Sin, self_, out);
    aclnnCos(input: T, out: Out) |call| unary(Unary::Cos, input, out);
    aclnnFloor(self_: T, out: Out) |call| unary(Unary::Floor, self_, out);
    aclnnCeil(self_: T, out: Out) |call| unary(Unary::Ceil, self_, out);
    aclnnRound(self_: T, out: Out) |call| unary(Unary::Round, self_, out);

    // Activations and their gradients.
    aclnnSigmoid(self_: T, out: Out) |call| unary(Unary::Sigmoid, self_, out);
    aclnnSigmoidBackward(gradOutput: T, output: T, gradInput: Out)
        |call| backward(Backward::Sigmoid, gradOutput, output, gradInput);
    aclnnGeluV2(x: T, approximate: i64, y: Out) |call| unary(Unary::gelu(approximate)?, x, y);
    aclnnGeluBackwardV2(gradOutput: T, self_: T, approximate: Text, gradInput: Out)
        |call| backward(Backward::gelu(&approximate)?, gradOutput, self_, gradInput);
    aclnnRelu(self_: T, out: Out) |call| unary(Unary::Relu, self_, out);

    // Comparison, logic, selection.
    aclnnEqTensor(self_: T, other: T, out: Out) |call| test(Test::Eq, self_, other, out);
    aclnnNeTensor(self_: T, other: T, out: Out) |call| test(Test::Ne, self_, other, out);
    aclnnGtTensor(self_: T, other: T, out: Out) |call| test(Test::Gt, self_, other, out);
    aclnnGeTensor(self_: T, other: T, out: Out) |call| test(Test::Ge, self_, other, out);
    aclnnLtTensor(self_: T, other: T, out: Out) |call| test(Test::Lt, self_, other, out);
    aclnnLeTensor(self_: T, other: T, out: Out) |call| test(Test::Le, self_, other, out);
    aclnnEqScalar(self_: T, other: S, out: Out) |call| test(Test::Eq, self_, other, out);
    aclnnNeScalar(self_: T, other: S, out: Out) |call| test(Test::Ne, self_, other, out);
    aclnnGtScalar(self_: T, other: S, out: Out) |call| test(Test::Gt, self_, other, out);
    aclnnGeScalar(self_: T, other: S, out: Out) |call| test(Test::Ge, self_, other, out);
    aclnnLtScalar(self_: T, other: S, out: Out) |call| test(Test::Lt, self_, other, out);
    aclnnLeScalar(self_: T, other: S, out: Out) |call| test(Test::Le, self_, other, out);
    aclnnLogicalAnd(self_: T, other: T, out: Out) |call| test(Test::And, self_, other, out);
    aclnnLogicalOr(self_: T, other: T, out: Out) |call| test(Test::Or, self_, other, out);
    aclnnLogicalXor(self_: T, other: T, out: Out) |call| test(Test::Xor, self_, other, out);
    aclnnLogicalNot(self_: T, out: Out) |call| pointwise::logical_not(self_, out);
    aclnnSWhere(condition: T, self_: T, other: T, out: Out)
        |call| pointwise::select(condition, self_, other, out);
    aclnnInplaceMaskedFillScalar(selfRef: Ref, mask: T, value: S)
        |call| pointwise::masked_fill(selfRef, mask, value);

    // Cast, fill, copy, range.
    aclnnCast(self_: T, dtype: DType, out: Out) |call| fill::cast(self_, dtype, out);
    aclnnInplaceCopy(selfRef: Over, src: T) |call| fill::copy(call, selfRef, src);
    aclnnInplaceFillScalar(selfRef: Over, value: S) |call| fill::fill(selfRef, value);
    aclnnArange(start: S, end: S, step: S, out: Out) |call| fill::arange(start, end, step, out);

    // Reductions.
    aclnnReduceSum(self_: T, dims: Ints, keepDims: bool, dtype: DType, out: Out)
        |call| reduce::fold_as(Fold::Sum, self_, &dims, keepDims, dtype, out);
    aclnnMean(self_: T, dim: Ints, keepDim: bool, dtype: DType, out: Out)
        |call| reduce::fold_as(Fold::Mean, self_, &dim, keepDim, dtype, out);
    aclnnAmax(self_: T, dim: Ints, keepDim: bool, out: Out)
        |call| reduce::fold(Fold::Max, self_, &dim, keepDim, out);
    aclnnAmin(self_: T, dim: Ints, keepDim: bool, out: Out)
        |call| reduce::fold(Fold::Min, self_, &dim, keepDim, out);
    aclnnMaxDim(self_: T, dim: i64, keepdim: bool, out: Out, indices: Out)
        |call| reduce::extreme(Fold::Max, self_, dim, keepdim, Some(out), indices);
    aclnnMinDim(self_: T, dim: i64, keepdim: bool, out: Out, indices: Out)
        |call| reduce::extreme(Fold::Min, self_, dim, keepdim, Some(out), indices);
    aclnnArgMax(self_: T, dim: i64, keepdim: bool, out: Out)
        |call| reduce::extreme(Fold::Max, self_, dim, keepdim, None, out);
    aclnnArgMin(self_: T, dim: i64, keepdim: bool, out: Out)
        |call| reduce::extreme(Fold::Min, self_, dim, keepdim, None, out);
    aclnnProdDim(self_: T, dim: i64, keepDim: bool, dtype: DType, out: Out)
        |call| reduce::product(self_, dim, keepDim, dtype, out);
    aclnnAny(self_: T, dim: Ints, keepdim: bool, out: Out)
        |call| reduce::fold(Fold::Any, self_, &dim, keepdim, out);
    aclnnAll(self_: T, dim: Ints, keepdim: bool, out: Out)
        |call| reduce::fold(Fold::All, self_, &dim, keepdim, out);
    aclnnCumsum(self_: T, dim: i64, dtype: DType, out: Out)
        |call| reduce::cumulate(call, self_, dim, dtype, out);

    // Matrix products.
    aclnnMm(self_: T, mat2: T, out: Out, cubeMathType: i8)
        |call| product(call, Product::Matrix, [self_, mat2, out], None, cubeMathType);
    aclnnAddmm(self_: T, mat1: T, mat2: T, beta: S, alpha: S, out: Out, cubeMathType: i8) |call| {
        let addend = Addend { tensor: self_, beta, alpha };
        product(call, Product::Matrix, [mat1, mat2, out], Some(addend), cubeMathType)
    };
    aclnnBatchMatMul(self_: T, mat2: T, out: Out, cubeMathType: i8)
        |call| product(call, Product::Batch, [self_, mat2, out], None, cubeMathType);
    aclnnGroupedMatmulV4(
        x: Tensors, weight: Tensors, biasOptional: MaybeTensors, scaleOptional: MaybeTensors,
        offsetOptional: MaybeTensors, antiquantScaleOptional: MaybeTensors,
        antiquantOffsetOptional: MaybeTensors, perTokenScaleOptional: MaybeTensors,
        groupListOptional: MaybeT, activationInputOptional: MaybeTensors,
        activationQuantScaleOptional: MaybeTensors, activationQuantOffsetOptional: MaybeTensors,
        splitItem: i64, groupType: i64, groupListType: i64, actType: i64, out: OutTensors,
        activationFeatureOutOptional: MaybeOutTensors, dynQuantScaleOutOptional: MaybeOutTensors,
    ) |call| {
        let absent = [
            biasOptional, scaleOptional, offsetOptional, antiquantScaleOptional,
            antiquantOffsetOptional, perTokenScaleOptional, activationInputOptional,
            activationQuantScaleOptional, activationQuantOffsetOptional,
            activationFeatureOutOptional, dynQuantScaleOutOptional,
        ];
        let numbers = Grouping { splitItem, groupType, groupListType, actType };
        grouped(call, [x, weight, out], absent, groupListOptional, numbers)
    };

    // Data movement.
    aclnnCat(tensors: Tensors, dim: i64, out: Out)
        |call| movement::concatenate(call, tensors, dim, out);
    aclnnRepeat(self_: T, repeats: Ints, out: Out)
        |call| movement::repeat(call, self_, &repeats, out);
    aclnnFlip(self_: T, dims: Ints, out: Out) |call| movement::flip(call, self_, &dims, out);

    // Indexing.
    aclnnGather(self_: T, dim: i64, index: T, out: Out)
        |call| index::gather(call, self_, dim, index, out);
    aclnnInplaceScatter(selfRef: Ref, dim: i64, index: T, src: T, reduce: i64)
        |call| index::scatter(selfRef.clone(), dim, index, src, Meets::from_code(reduce)?, selfRef);
    aclnnScatterAdd(self_: T, dim: i64, index: T, src: T, out: Out)
        |call| index::scatter_add(self_, dim, index, src, out);
    aclnnIndexSelect(self_: T, dim: i64, index: T, out: Out)
        |call| index::index_select(call, self_, dim, index, out);
    aclnnIndexAdd(self_: T, dim: i64, index: T, source: T, alpha: S, out: Out)
        |call| index::index_add(self_, dim, index, source, alpha, out);
    aclnnEmbedding(weight: T, indices: T, out: Out)
        |call| index::embedding(call, weight, indices, out);
    aclnnEmbeddingDenseBackward(
        grad: T, indices: T, numWeights: u64, paddingIdx: u64, scaleGradByFreq: bool, out: Out,
    ) |call| {
        let sizes = [numWeights, paddingIdx];
        index::embedding_backward(call, grad, indices, sizes, scaleGradByFreq, out)
    };

    // Tokens on their way from experts.
    aclnnMoeTokenUnpermute(
        permutedTokens: T, sortedIndices: T, probsOptional: MaybeT, paddedMode: bool,
        restoreShapeOptional: MaybeInts, out: Out,
    ) |call| {
        let weights = probsOptional.map_or(Weights::Ones(1), Weights::Given);
        let padding = (paddedMode, restoreShapeOptional);
        index::unpermute(call, permutedTokens, sortedIndices, weights, padding, out)
    };
    aclnnMoeTokenUnpermuteGrad(
        permuteTokens: T, unpermutedTokensGrad: T, sortedIndices: T, probsOptional: MaybeT,
        paddedMode: bool, restoreShapeOptional: MaybeInts, permutedTokensGradOut: Out,
        probsGradOut: Out,
    ) |call| {
        let weights = probsOptional.map_or(Weights::Ones(1), Weights::Given);
        let padding = (paddedMode, restoreShapeOptional);
        let given = [permuteTokens, unpermutedTokensGrad, sortedIndices];
        let written = [permutedTokensGradOut, probsGradOut];
        index::unpermute_backward(call, given, weights, padding, written)
    };
    aclnnMoeTokenPermuteGrad(
        permutedOutputGrad: T, sortedIndices: T, numTopk: i64, paddedMode: bool, out: Out,
    ) |call| {
        let (weights, padding) = (Weights::Ones(numTopk), (paddedMode, Vec::new()));
        index::unpermute(call, permutedOutputGrad, sortedIndices, weights, padding, out)
    };

    // Softmax and normalisation.
    aclnnSoftmax(self_: T, dim: i64, out: Out) |call| normalize::softmax(self_, dim, false, out);
    aclnnLogSoftmax(self_: T, dim: i64, out: Out) |call| normalize::softmax(self_, dim, true, out);
    aclnnLayerNorm(
        input: T, normalizedShape: Ints, weightOptional: MaybeT, biasOptional: MaybeT, eps: f64,
        out: Out, meanOutOptional: MaybeOut, rstdOutOptional: MaybeOut,
    ) |call| normalize::layer_norm(call, input, LayerNorm {
        normalized: normalizedShape,
        weight: weightOptional,
        bias: biasOptional,
        eps,
        mean: meanOutOptional,
        rstd: rstdOutOptional,
    }, out);
    aclnnRmsNorm(x: T, gamma: T, epsilon: f64, yOut: Out, rstdOut: Out)
        |call| normalize::rms_norm(call, x, gamma, epsilon, yOut, rstdOut);
    aclnnRmsNormGrad(dy: T, x: T, rstd: T, gamma: T, dxOut: Out, dgammaOut: Out) |call| {
        let saved = RmsNormSaved { dy, x, rstd, gamma };
        normalize::rms_norm_backward(call, saved, dxOut, dgammaOut)
    };

    // Attention.
    aclnnFlashAttentionScore(
        query: T, key: T, value: T, realShiftOptional: MaybeT, dropMaskOptional: MaybeT,
        paddingMaskOptional: MaybeT, attenMaskOptional: MaybeT, prefixOptional: MaybeInts,
        scaleValue: f64, keepProb: f64, preTokens: i64, nextTokens: i64, headNum: i64,
        inputLayout: Text, innerPrecise: i64, sparseMode: i64, softmaxMaxOut: Out,
        softmaxSumOut: Out, softmaxOutOut: MaybeOut, attentionOutOut: Out,
    ) |call| {
        let _never_written = softmaxOutOut;
        attention::forward(call, Inputs {
            q: query, k: key, v: value,
            unmodelled: [realShiftOptional, dropMaskOptional, paddingMaskOptional],
            mask: attenMaskOptional, prefix: prefixOptional, lengths: None,
        }, Options {
            scale: scaleValue, keep: keepProb, tokens: [preTokens, nextTokens], heads: headNum,
            layout: inputLayout, precise: innerPrecise, sparse: sparseMode,
        }, Forward { max: softmaxMaxOut, sum: softmaxSumOut, out: attentionOutOut })
    };
    aclnnFlashAttentionVarLenScore(
        query: T, key: T, value: T, realShiftOptional: MaybeT, dropMaskOptional: MaybeT,
        paddingMaskOptional: MaybeT, attenMaskOptional: MaybeT, prefixOptional: MaybeInts,
        actualSeqQLenOptional: MaybeInts, actualSeqKvLenOptional: MaybeInts,
        scaleValue: f64, keepProb: f64, preTokens: i64, nextTokens: i64, headNum: i64,
        inputLayout: Text, innerPrecise: i64, sparseMode: i64, softmaxMaxOut: Out,
        softmaxSumOut: Out, softmaxOutOut: MaybeOut, attentionOutOut: Out,
    ) |call| {
        let _never_written = softmaxOutOut;
        attention::forward(call, Inputs {
            q: query, k: key, v: value,
            unmodelled: [realShiftOptional, dropMaskOptional, paddingMaskOptional],
            mask: attenMaskOptional, prefix: prefixOptional,
            lengths: Some([actualSeqQLenOptional, actualSeqKvLenOptional]),
        }, Options {
            scale: scaleValue, keep: keepProb, tokens: [preTokens, nextTokens], heads: headNum,
            layout: inputLayout, precise: innerPrecise, sparse: sparseMode,
        }, Forward { max: softmaxMaxOut, sum: softmaxSumOut, out: attentionOutOut })
    };
    aclnnFlashAttentionScoreGrad(
        query: T, keyIn: T, value: T, dy: T, pseShiftOptional: MaybeT, dropMaskOptional: MaybeT,
        paddingMaskOptional: MaybeT, attenMaskOptional: MaybeT, softmaxMaxOptional: MaybeT,
        softmaxSumOptional: MaybeT, softmaxInOptional: MaybeT, attentionInOptional: T,
        prefixOptional: MaybeInts, scaleValue: f64, keepProb: f64, preTokens: i64,
        nextTokens: i64, headNum: i64, inputLayout: Text, innerPrecise: i64, sparseMode: i64,
        dqOut: Out, dkOut: Out, dvOut: Out, dpseOut: MaybeOut,
    ) |call| {
        let _never_read = softmaxInOptional;
        attention::backward(call, Inputs {
            q: query, k: keyIn, v: value,
            unmodelled: [pseShiftOptional, dropMaskOptional, paddingMaskOptional],
            mask: attenMaskOptional, prefix: prefixOptional, lengths: None,
        }, Options {
            scale: scaleValue, keep: keepProb, tokens: [preTokens, nextTokens], heads: headNum,
            layout: inputLayout, precise: innerPrecise, sparse: sparseMode,
        }, Gradient {
            dy, max: softmaxMaxOptional, sum: softmaxSumOptional, out: attentionInOptional,
            dq: dqOut, dk: dkOut, dv: dvOut, dpse: dpseOut,
        })
    };
    aclnnFlashAttentionUnpaddingScoreGrad(
        query: T, keyIn: T, value: T, dy: T, pseShiftOptional: MaybeT, dropMaskOptional: MaybeT,
        paddingMaskOptional: MaybeT, attenMaskOptional: MaybeT, softmaxMaxOptional: MaybeT,
        softmaxSumOptional: MaybeT, softmaxInOptional: MaybeT, attentionInOptional: T,
        prefixOptional: MaybeInts, actualSeqQLenOptional: MaybeInts,
        actualSeqKvLenOptional: MaybeInts, scaleValue: f64, keepProb: f64, preTokens: i64,
        nextTokens: i64, headNum: i64, inputLayout: Text, innerPrecise: i64, sparseMode: i64,
        dqOut: Out, dkOut: Out, dvOut: Out, dpseOut: MaybeOut,
    ) |call| {
        let _never_read = softmaxInOptional;
        attention::backward(call, Inputs {
            q: query, k: keyIn, v: value,
            unmodelled: [pseShiftOptional, dropMaskOptional, paddingMaskOptional],
            mask: attenMaskOptional, prefix: prefixOptional,
            lengths: Some([actualSeqQLenOptional, actualSeqKvLenOptional]),
        }, Options {
            scale: scaleValue, keep: keepProb, tokens: [preTokens, nextTokens], heads: headNum,
            layout: inputLayout, precise: innerPrecise, sparse: sparseMode,
        }, Gradient {
            dy, max: softmaxMaxOptional, sum: softmaxSumOptional, out: attentionInOptional,
            dq: dqOut, dk: dkOut, dv: dvOut, dpse: dpseOut,
        })
    };

    // Random numbers.
    aclnnInplaceUniform(selfRef: Over, from: f64, to: f64, seed: u64, offset: u64)
        |call| random::uniform_in_place(call, selfRef, [from, to], [seed, offset]);
    aclnnInplaceNormal(selfRef: Over, mean: f32, std: f32, seed: i64, offset: i64)
        |call| random::normal(call, selfRef, [mean, std], [seed, offset]);
    aclnnInplaceBernoulli(selfRef: Over, prob: S, seed: i64, offset: i64)
        |call| random::bernoulli(call, prob, [seed, offset], selfRef);
}
