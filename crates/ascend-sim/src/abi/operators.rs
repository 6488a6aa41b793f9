//! The operators, each with its two phases, by the notation of their documentation.
//!
//! | letter | parameter |
//! | --- | --- |
//! | `T`, `MaybeT` | a tensor that is read; one that may be null |
//! | `Out`, `MaybeOut` | a tensor that is written; one that may be null |
//! | `Ref`, `MaybeRef` | a tensor that is read and written; one that may be null |
//! | `S`, `MaybeS` | a host scalar; one that may be null |
//! | `Ints`, `MaybeInts`, `Bools`, `Tensors` | host lists |
//! | `DType`, `Text` | an element type by its number; a C string |
#![allow(non_snake_case, reason = "the vendor's spelling")]

use std::ffi::{c_char, c_void};

use super::aclnn::{aclBoolArray, aclIntArray, aclOpExecutor, aclScalar, aclTensor, aclTensorList};
use crate::abi::Export;
use crate::abi::runtime::{get_text, put};
use crate::aclnn::descriptor::Scalar;
use crate::aclnn::index::Source;
use crate::aclnn::matrix::{Added, Product, add_product, product};
use crate::aclnn::normalize::{LayerNorm, LayerNormSaved, RmsNormSaved, masked_outputs};
use crate::aclnn::pointwise::{
    self, Backward, Binary, Sum, Test, Unary, Value, binary, binary_scalar, unary,
};
use crate::aclnn::reduce::{self, Fold};
use crate::aclnn::rotary::GradTensors;
use crate::aclnn::train::{AdamW, Loss};
use crate::aclnn::{
    Call, apply, cache, convolution, execute, fill, index, movement, normalize, random, rotary,
    train,
};
use crate::codes::{ACLNN_NULLPTR, Failure, Outcome};
use crate::state::boundary;

/// Hands out the result of a first phase.
///
/// # Safety
/// - Both pointers are null or valid for writing.
unsafe fn give(
    workspace_bytes: *mut u64,
    executor: *mut *mut aclOpExecutor,
    plan: impl FnOnce() -> Outcome<(u64, u64)>,
) -> Outcome {
    if workspace_bytes.is_null() || executor.is_null() {
        return Err(Failure::new(
            ACLNN_NULLPTR,
            "workspaceSize or executor is null",
        ));
    }
    let (bytes, planned) = plan()?;
    // SAFETY: not null, and valid for writing by the function's own condition.
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
    // SAFETY: by the function's own condition.
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
    MaybeRef *mut aclTensor;
    S *const aclScalar;
    MaybeS *const aclScalar;
    Ints *const aclIntArray;
    MaybeInts *const aclIntArray;
    Bools *const aclBoolArray;
    Tensors *const aclTensorList;
    DType i32;
    Text *const c_char;
    i64 i64;
    u64 u64;
    i32 i32;
    i8 i8;
    bool bool;
    f32 f32;
    f64 f64;
}

/// What a parameter is to its operator. A name that Rust reserves ends in an underscore here.
macro_rules! take {
    ($call:ident, $arg:ident, Text) => {
        // SAFETY: null or a C string by the C declaration.
        unsafe { text($arg, stringify!($arg)) }?
    };
    ($call:ident, $arg:ident, $kind:ident) => {
        take!(@ $call, $arg, stringify!($arg).trim_end_matches('_'), $kind)
    };
    (@ $call:ident, $arg:ident, $name:expr, T) => { $call.input($arg as u64, $name)? };
    (@ $call:ident, $arg:ident, $name:expr, MaybeT) => { $call.optional_input($arg as u64, $name)? };
    (@ $call:ident, $arg:ident, $name:expr, Out) => { $call.output($arg as u64, $name)? };
    (@ $call:ident, $arg:ident, $name:expr, MaybeOut) => { $call.optional_output($arg as u64, $name)? };
    (@ $call:ident, $arg:ident, $name:expr, Ref) => { $call.in_place($arg as u64, $name)? };
    (@ $call:ident, $arg:ident, $name:expr, MaybeRef) => { $call.optional_in_place($arg as u64, $name)? };
    (@ $call:ident, $arg:ident, $name:expr, S) => { $call.scalar($arg as u64, $name)? };
    (@ $call:ident, $arg:ident, $name:expr, MaybeS) => { $call.optional_scalar($arg as u64, $name)? };
    (@ $call:ident, $arg:ident, $name:expr, Ints) => { $call.ints($arg as u64, $name)? };
    (@ $call:ident, $arg:ident, $name:expr, MaybeInts) => { $call.optional_ints($arg as u64, $name)?.unwrap_or_default() };
    (@ $call:ident, $arg:ident, $name:expr, Bools) => { $call.bools($arg as u64, $name)? };
    (@ $call:ident, $arg:ident, $name:expr, Tensors) => { $call.input_list($arg as u64, $name)? };
    (@ $call:ident, $arg:ident, $name:expr, DType) => { $call.dtype($arg, $name)? };
    (@ $call:ident, $arg:ident, $name:expr, $plain:ident) => { $arg };
}

/// Defines both phases of each operator: the second's name, the first's, the parameters, and what
/// checks them and says what to do.
macro_rules! operators {
    ($( $run:ident $plan:ident($($arg:ident: $kind:ident),* $(,)?) |$call:ident| $body:expr; )*) => {
        $(
            #[doc = concat!("First phase of `", stringify!($run), "`.")]
            ///
            /// # Safety
            /// - Pointers are valid for what the C declaration says, or null where it allows null.
            #[unsafe(no_mangle)]
            #[allow(clippy::too_many_arguments, reason = "the C function has as many")]
            pub unsafe extern "C" fn $plan($($arg: c_type!($kind),)* workspaceSize: *mut u64, executor: *mut *mut aclOpExecutor) -> i32 {
                boundary(stringify!($plan), move || {
                    let plan = || {
                        let mut call = Call::new(stringify!($run));
                        let $call = &mut call;
                        $( let $arg = take!($call, $arg, $kind); )*
                        let kernel = $body?;
                        call.finish(kernel)
                    };
                    // SAFETY: out parameters, null or valid by the C declaration.
                    unsafe { give(workspaceSize, executor, plan) }
                })
            }
            #[doc = concat!("Second phase of `", stringify!($run), "`.")]
            ///
            /// # Safety
            /// - Pointers are handles and device addresses; wrong ones are errors.
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $run(workspace: *mut c_void, workspaceSize: u64, executor: *mut aclOpExecutor, stream: *mut c_void) -> i32 {
                boundary(stringify!($run), move || execute(stringify!($run), workspace as u64, workspaceSize, executor as u64, stream as u64))
            }
        )*
        pub(crate) fn table() -> Vec<Export> {
            vec![ $(
                Export {
                    name: stringify!($plan),
                    signature: concat!("fn(", $( spelled!($kind), ", ", )* "*mut u64, *mut *mut aclOpExecutor) -> i32"),
                    address: $plan as *const c_void,
                },
                Export {
                    name: stringify!($run),
                    signature: "fn(*mut c_void, u64, *mut aclOpExecutor, *mut c_void) -> i32",
                    address: $run as *const c_void,
                },
            )* ]
        }
    };
}

operators! {
    // Rotary position embedding.
    aclnnRotaryPositionEmbedding aclnnRotaryPositionEmbeddingGetWorkspaceSize(x: T, cos: T, sin: T, mode: i64, out: Out) |call| { call.distinct(); rotary::forward(&x, &cos, &sin, mode, &out) };
    aclnnRotaryPositionEmbeddingGrad aclnnRotaryPositionEmbeddingGradGetWorkspaceSize(dy: T, cos: T, sin: T, xOptional: MaybeT, mode: i64, dxOut: Out, dcosOut: Out, dsinOut: Out) |call| {
        call.distinct();
        // Without x nothing is written to the outputs for the angles, which may not be null either way.
        let angles = xOptional.is_some().then_some((dcosOut, dsinOut));
        rotary::gradient(GradTensors { dy, cos, sin, x: xOptional, dx: dxOut, angles }, mode)
    };
    aclnnRopeWithSinCosCache aclnnRopeWithSinCosCacheGetWorkspaceSize(positions: T, queryIn: T, keyIn: T, cosSinCache: T, mropeSection: MaybeInts, headSize: i64, isNeoxStyle: bool, queryOut: Out, keyOut: Out) |call| cache::cached(cache::Parameters {
        operator: call.operator(), positions, query: queryIn, key: keyIn, cos_sin: cosSinCache, sections: mropeSection, head_size: headSize, neox: isNeoxStyle, cache_mode: None, query_out: queryOut, key_out: keyOut,
    });
    aclnnRopeWithSinCosCacheV2 aclnnRopeWithSinCosCacheV2GetWorkspaceSize(positions: T, queryIn: T, keyIn: T, cosSinCache: T, mropeSection: MaybeInts, headSize: i64, isNeoxStyle: bool, cacheMode: i64, queryOut: Out, keyOut: Out) |call| cache::cached(cache::Parameters {
        operator: call.operator(), positions, query: queryIn, key: keyIn, cos_sin: cosSinCache, sections: mropeSection, head_size: headSize, neox: isNeoxStyle, cache_mode: Some(cacheMode), query_out: queryOut, key_out: keyOut,
    });
    aclnnApplyRotaryPosEmb aclnnApplyRotaryPosEmbGetWorkspaceSize(queryRef: Ref, keyRef: Ref, cos: T, sin: T, layout: i64) |call| apply::apply(&queryRef, &keyRef, &cos, &sin, layout, "half");
    aclnnApplyRotaryPosEmbV2 aclnnApplyRotaryPosEmbV2GetWorkspaceSize(queryRef: Ref, keyRef: Ref, cos: T, sin: T, layout: i64, rotaryMode: Text) |call| apply::apply(&queryRef, &keyRef, &cos, &sin, layout, &rotaryMode);
    aclnnInterleaveRope aclnnInterleaveRopeGetWorkspaceSize(x: T, cos: T, sin: T, out: Out) |call| { call.distinct(); apply::interleave(&x, &cos, &sin, &out) };

    // Arithmetic of two tensors, or of a tensor and a scalar.
    aclnnAdd aclnnAddGetWorkspaceSize(self_: T, other: T, alpha: S, out: Out) |call| pointwise::sum(Sum::Add, &self_, &other, &alpha, &out);
    aclnnInplaceAdd aclnnInplaceAddGetWorkspaceSize(selfRef: Ref, other: T, alpha: S) |call| pointwise::sum(Sum::Add, &selfRef, &other, &alpha, &selfRef);
    aclnnAdds aclnnAddsGetWorkspaceSize(self_: T, other: S, alpha: S, out: Out) |call| pointwise::sum_scalar(Sum::Add, &self_, &other, &alpha, &out);
    aclnnInplaceAdds aclnnInplaceAddsGetWorkspaceSize(selfRef: Ref, other: S, alpha: S) |call| pointwise::sum_scalar(Sum::Add, &selfRef, &other, &alpha, &selfRef);
    aclnnSub aclnnSubGetWorkspaceSize(self_: T, other: T, alpha: S, out: Out) |call| pointwise::sum(Sum::Sub, &self_, &other, &alpha, &out);
    aclnnInplaceSub aclnnInplaceSubGetWorkspaceSize(selfRef: Ref, other: T, alpha: S) |call| pointwise::sum(Sum::Sub, &selfRef, &other, &alpha, &selfRef);
    aclnnSubs aclnnSubsGetWorkspaceSize(self_: T, other: S, alpha: S, out: Out) |call| pointwise::sum_scalar(Sum::Sub, &self_, &other, &alpha, &out);
    aclnnInplaceSubs aclnnInplaceSubsGetWorkspaceSize(selfRef: Ref, other: S, alpha: S) |call| pointwise::sum_scalar(Sum::Sub, &selfRef, &other, &alpha, &selfRef);
    aclnnRsub aclnnRsubGetWorkspaceSize(self_: T, other: T, alpha: S, out: Out) |call| pointwise::sum(Sum::Rsub, &self_, &other, &alpha, &out);
    aclnnRsubs aclnnRsubsGetWorkspaceSize(self_: T, other: S, alpha: S, out: Out) |call| pointwise::sum_scalar(Sum::Rsub, &self_, &other, &alpha, &out);
    aclnnMul aclnnMulGetWorkspaceSize(self_: T, other: T, out: Out) |call| binary(Binary::Mul, &self_, &other, &out);
    aclnnInplaceMul aclnnInplaceMulGetWorkspaceSize(selfRef: Ref, other: T) |call| binary(Binary::Mul, &selfRef, &other, &selfRef);
    aclnnMuls aclnnMulsGetWorkspaceSize(self_: T, other: S, out: Out) |call| binary_scalar(Binary::Mul, &self_, &other, &out, false);
    aclnnInplaceMuls aclnnInplaceMulsGetWorkspaceSize(selfRef: Ref, other: S) |call| binary_scalar(Binary::Mul, &selfRef, &other, &selfRef, false);
    aclnnDiv aclnnDivGetWorkspaceSize(self_: T, other: T, out: Out) |call| binary(Binary::Div, &self_, &other, &out);
    aclnnInplaceDiv aclnnInplaceDivGetWorkspaceSize(selfRef: Ref, other: T) |call| binary(Binary::Div, &selfRef, &other, &selfRef);
    aclnnDivs aclnnDivsGetWorkspaceSize(self_: T, other: S, out: Out) |call| binary_scalar(Binary::Div, &self_, &other, &out, false);
    aclnnInplaceDivs aclnnInplaceDivsGetWorkspaceSize(selfRef: Ref, other: S) |call| binary_scalar(Binary::Div, &selfRef, &other, &selfRef, false);
    aclnnDivMod aclnnDivModGetWorkspaceSize(self_: T, other: T, mode: i32, out: Out) |call| binary(pointwise::division(mode)?, &self_, &other, &out);
    aclnnInplaceDivMod aclnnInplaceDivModGetWorkspaceSize(selfRef: Ref, other: T, mode: i32) |call| binary(pointwise::division(mode)?, &selfRef, &other, &selfRef);
    aclnnDivMods aclnnDivModsGetWorkspaceSize(self_: T, other: S, mode: i32, out: Out) |call| binary_scalar(pointwise::division(mode)?, &self_, &other, &out, false);
    aclnnInplaceDivMods aclnnInplaceDivModsGetWorkspaceSize(selfRef: Ref, other: S, mode: i32) |call| binary_scalar(pointwise::division(mode)?, &selfRef, &other, &selfRef, false);
    aclnnFloorDivide aclnnFloorDivideGetWorkspaceSize(self_: T, other: T, out: Out) |call| binary(Binary::DivFloor, &self_, &other, &out);
    aclnnInplaceFloorDivide aclnnInplaceFloorDivideGetWorkspaceSize(selfRef: Ref, other: T) |call| binary(Binary::DivFloor, &selfRef, &other, &selfRef);
    aclnnFloorDivides aclnnFloorDividesGetWorkspaceSize(self_: T, other: S, out: Out) |call| binary_scalar(Binary::DivFloor, &self_, &other, &out, false);
    aclnnInplaceFloorDivides aclnnInplaceFloorDividesGetWorkspaceSize(selfRef: Ref, other: S) |call| binary_scalar(Binary::DivFloor, &selfRef, &other, &selfRef, false);
    aclnnRemainderTensorTensor aclnnRemainderTensorTensorGetWorkspaceSize(self_: T, other: T, out: Out) |call| binary(Binary::Remainder, &self_, &other, &out);
    aclnnInplaceRemainderTensorTensor aclnnInplaceRemainderTensorTensorGetWorkspaceSize(selfRef: Ref, other: T) |call| binary(Binary::Remainder, &selfRef, &other, &selfRef);
    aclnnRemainderTensorScalar aclnnRemainderTensorScalarGetWorkspaceSize(self_: T, other: S, out: Out) |call| binary_scalar(Binary::Remainder, &self_, &other, &out, false);
    aclnnInplaceRemainderTensorScalar aclnnInplaceRemainderTensorScalarGetWorkspaceSize(selfRef: Ref, other: S) |call| binary_scalar(Binary::Remainder, &selfRef, &other, &selfRef, false);
    aclnnRemainderScalarTensor aclnnRemainderScalarTensorGetWorkspaceSize(self_: S, other: T, out: Out) |call| binary_scalar(Binary::Remainder, &other, &self_, &out, true);
    aclnnPowTensorTensor aclnnPowTensorTensorGetWorkspaceSize(self_: T, exponent: T, out: Out) |call| binary(Binary::Pow, &self_, &exponent, &out);
    aclnnInplacePowTensorTensor aclnnInplacePowTensorTensorGetWorkspaceSize(selfRef: Ref, exponent: T) |call| binary(Binary::Pow, &selfRef, &exponent, &selfRef);
    aclnnPowTensorScalar aclnnPowTensorScalarGetWorkspaceSize(self_: T, exponent: S, out: Out) |call| binary_scalar(Binary::Pow, &self_, &exponent, &out, false);
    aclnnInplacePowTensorScalar aclnnInplacePowTensorScalarGetWorkspaceSize(selfRef: Ref, exponent: S) |call| binary_scalar(Binary::Pow, &selfRef, &exponent, &selfRef, false);
    aclnnPowScalarTensor aclnnPowScalarTensorGetWorkspaceSize(self_: S, exponent: T, out: Out) |call| binary_scalar(Binary::Pow, &exponent, &self_, &out, true);
    aclnnMaximum aclnnMaximumGetWorkspaceSize(self_: T, other: T, out: Out) |call| binary(Binary::Maximum, &self_, &other, &out);
    aclnnMinimum aclnnMinimumGetWorkspaceSize(self_: T, other: T, out: Out) |call| binary(Binary::Minimum, &self_, &other, &out);
    aclnnClampMinTensor aclnnClampMinTensorGetWorkspaceSize(self_: T, clipValueMin: T, out: Out) |call| binary(Binary::Maximum, &self_, &clipValueMin, &out);
    aclnnInplaceClampMinTensor aclnnInplaceClampMinTensorGetWorkspaceSize(selfRef: Ref, clipValueMin: T) |call| binary(Binary::Maximum, &selfRef, &clipValueMin, &selfRef);
    aclnnClampMaxTensor aclnnClampMaxTensorGetWorkspaceSize(self_: T, clipValueMax: T, out: Out) |call| binary(Binary::Minimum, &self_, &clipValueMax, &out);
    aclnnInplaceClampMaxTensor aclnnInplaceClampMaxTensorGetWorkspaceSize(selfRef: Ref, clipValueMax: T) |call| binary(Binary::Minimum, &selfRef, &clipValueMax, &selfRef);
    aclnnClamp aclnnClampGetWorkspaceSize(self_: T, clipValueMin: MaybeS, clipValueMax: MaybeS, out: Out) |call| pointwise::clamp(&self_, clipValueMin, clipValueMax, &out);
    aclnnClampMin aclnnClampMinGetWorkspaceSize(self_: T, clipValueMin: S, out: Out) |call| pointwise::clamp(&self_, Some(clipValueMin), None, &out);
    aclnnClampMax aclnnClampMaxGetWorkspaceSize(self_: T, clipValueMax: S, out: Out) |call| pointwise::clamp(&self_, None, Some(clipValueMax), &out);
    aclnnInplaceClampMax aclnnInplaceClampMaxGetWorkspaceSize(selfRef: Ref, clipValueMax: S) |call| pointwise::clamp(&selfRef, None, Some(clipValueMax), &selfRef);

    // Functions of one tensor.
    aclnnNeg aclnnNegGetWorkspaceSize(self_: T, out: Out) |call| unary(Unary::Neg, &self_, &out);
    aclnnInplaceNeg aclnnInplaceNegGetWorkspaceSize(selfRef: Ref) |call| unary(Unary::Neg, &selfRef, &selfRef);
    aclnnAbs aclnnAbsGetWorkspaceSize(self_: T, out: Out) |call| unary(Unary::Abs, &self_, &out);
    aclnnSign aclnnSignGetWorkspaceSize(self_: T, result: Out) |call| unary(Unary::Sign, &self_, &result);
    aclnnSqrt aclnnSqrtGetWorkspaceSize(self_: T, out: Out) |call| unary(Unary::Sqrt, &self_, &out);
    aclnnInplaceSqrt aclnnInplaceSqrtGetWorkspaceSize(selfRef: Ref) |call| unary(Unary::Sqrt, &selfRef, &selfRef);
    aclnnRsqrt aclnnRsqrtGetWorkspaceSize(self_: T, out: Out) |call| unary(Unary::Rsqrt, &self_, &out);
    aclnnInplaceRsqrt aclnnInplaceRsqrtGetWorkspaceSize(selfRef: Ref) |call| unary(Unary::Rsqrt, &selfRef, &selfRef);
    aclnnReciprocal aclnnReciprocalGetWorkspaceSize(self_: T, out: Out) |call| unary(Unary::Reciprocal, &self_, &out);
    aclnnInplaceReciprocal aclnnInplaceReciprocalGetWorkspaceSize(selfRef: Ref) |call| unary(Unary::Reciprocal, &selfRef, &selfRef);
    aclnnExp aclnnExpGetWorkspaceSize(self_: T, out: Out) |call| unary(Unary::Exp, &self_, &out);
    aclnnInplaceExp aclnnInplaceExpGetWorkspaceSize(selfRef: Ref) |call| unary(Unary::Exp, &selfRef, &selfRef);
    aclnnLog aclnnLogGetWorkspaceSize(self_: T, out: Out) |call| unary(Unary::Log, &self_, &out);
    aclnnInplaceLog aclnnInplaceLogGetWorkspaceSize(selfRef: Ref) |call| unary(Unary::Log, &selfRef, &selfRef);
    aclnnLog1p aclnnLog1pGetWorkspaceSize(self_: T, out: Out) |call| unary(Unary::Log1p, &self_, &out);
    aclnnInplaceLog1p aclnnInplaceLog1pGetWorkspaceSize(selfRef: Ref) |call| unary(Unary::Log1p, &selfRef, &selfRef);
    aclnnErf aclnnErfGetWorkspaceSize(self_: T, out: Out) |call| unary(Unary::Erf, &self_, &out);
    aclnnInplaceErf aclnnInplaceErfGetWorkspaceSize(selfRef: Ref) |call| unary(Unary::Erf, &selfRef, &selfRef);
    aclnnTanh aclnnTanhGetWorkspaceSize(self_: T, out: Out) |call| unary(Unary::Tanh, &self_, &out);
    aclnnInplaceTanh aclnnInplaceTanhGetWorkspaceSize(selfRef: Ref) |call| unary(Unary::Tanh, &selfRef, &selfRef);
    aclnnSin aclnnSinGetWorkspaceSize(self_: T, out: Out) |call| unary(Unary::Sin, &self_, &out);
    aclnnInplaceSin aclnnInplaceSinGetWorkspaceSize(selfRef: Ref) |call| unary(Unary::Sin, &selfRef, &selfRef);
    aclnnCos aclnnCosGetWorkspaceSize(input: T, out: Out) |call| unary(Unary::Cos, &input, &out);
    aclnnInplaceCos aclnnInplaceCosGetWorkspaceSize(selfRef: Ref) |call| unary(Unary::Cos, &selfRef, &selfRef);
    aclnnFloor aclnnFloorGetWorkspaceSize(self_: T, out: Out) |call| unary(Unary::Floor, &self_, &out);
    aclnnInplaceFloor aclnnInplaceFloorGetWorkspaceSize(selfRef: Ref) |call| unary(Unary::Floor, &selfRef, &selfRef);
    aclnnCeil aclnnCeilGetWorkspaceSize(self_: T, out: Out) |call| unary(Unary::Ceil, &self_, &out);
    aclnnInplaceCeil aclnnInplaceCeilGetWorkspaceSize(selfRef: Ref) |call| unary(Unary::Ceil, &selfRef, &selfRef);
    aclnnRound aclnnRoundGetWorkspaceSize(self_: T, out: Out) |call| unary(Unary::Round, &self_, &out);
    aclnnInplaceRound aclnnInplaceRoundGetWorkspaceSize(selfRef: Ref) |call| unary(Unary::Round, &selfRef, &selfRef);

    // Activations and their gradients.
    aclnnSigmoid aclnnSigmoidGetWorkspaceSize(self_: T, out: Out) |call| unary(Unary::Sigmoid, &self_, &out);
    aclnnInplaceSigmoid aclnnInplaceSigmoidGetWorkspaceSize(selfRef: Ref) |call| unary(Unary::Sigmoid, &selfRef, &selfRef);
    aclnnSigmoidBackward aclnnSigmoidBackwardGetWorkspaceSize(gradOutput: T, output: T, gradInput: Out) |call| pointwise::backward(Backward::Sigmoid, &gradOutput, &output, &gradInput);
    aclnnTanhBackward aclnnTanhBackwardGetWorkspaceSize(gradOutput: T, output: T, gradInput: Out) |call| pointwise::backward(Backward::Tanh, &gradOutput, &output, &gradInput);
    aclnnSilu aclnnSiluGetWorkspaceSize(self_: T, out: Out) |call| unary(Unary::Silu, &self_, &out);
    aclnnSiluBackward aclnnSiluBackwardGetWorkspaceSize(gradOutput: T, self_: T, gradInput: Out) |call| pointwise::backward(Backward::Silu, &gradOutput, &self_, &gradInput);
    aclnnSwish aclnnSwishGetWorkspaceSize(self_: T, betaOptional: MaybeS, out: Out) |call| unary(Unary::Swish(betaOptional.map_or(1.0, |beta| beta.real())), &self_, &out);
    aclnnSwishBackward aclnnSwishBackwardGetWorkspaceSize(gradOutput: T, self_: T, betaOptional: MaybeS, gradInput: Out) |call| pointwise::backward(Backward::Swish(betaOptional.map_or(1.0, |beta| beta.real())), &gradOutput, &self_, &gradInput);
    aclnnGelu aclnnGeluGetWorkspaceSize(self_: T, out: Out) |call| unary(Unary::GeluTanh, &self_, &out);
    aclnnGeluV2 aclnnGeluV2GetWorkspaceSize(x: T, approximate: i64, y: Out) |call| unary(pointwise::gelu(approximate)?, &x, &y);
    aclnnGeluBackwardV2 aclnnGeluBackwardV2GetWorkspaceSize(gradOutput: T, self_: T, approximate: Text, gradInput: Out) |call| pointwise::backward(pointwise::gelu_backward(&approximate)?, &gradOutput, &self_, &gradInput);
    aclnnRelu aclnnReluGetWorkspaceSize(self_: T, out: Out) |call| unary(Unary::Relu, &self_, &out);
    aclnnInplaceRelu aclnnInplaceReluGetWorkspaceSize(selfRef: Ref) |call| unary(Unary::Relu, &selfRef, &selfRef);

    // Comparison, logic, selection.
    aclnnEqTensor aclnnEqTensorGetWorkspaceSize(self_: T, other: T, out: Out) |call| pointwise::test(Test::Eq, &self_, &other, &out);
    aclnnNeTensor aclnnNeTensorGetWorkspaceSize(self_: T, other: T, out: Out) |call| pointwise::test(Test::Ne, &self_, &other, &out);
    aclnnGtTensor aclnnGtTensorGetWorkspaceSize(self_: T, other: T, out: Out) |call| pointwise::test(Test::Gt, &self_, &other, &out);
    aclnnGeTensor aclnnGeTensorGetWorkspaceSize(self_: T, other: T, out: Out) |call| pointwise::test(Test::Ge, &self_, &other, &out);
    aclnnLtTensor aclnnLtTensorGetWorkspaceSize(self_: T, other: T, out: Out) |call| pointwise::test(Test::Lt, &self_, &other, &out);
    aclnnLeTensor aclnnLeTensorGetWorkspaceSize(self_: T, other: T, out: Out) |call| pointwise::test(Test::Le, &self_, &other, &out);
    aclnnInplaceEqTensor aclnnInplaceEqTensorGetWorkspaceSize(selfRef: Ref, other: T) |call| pointwise::test(Test::Eq, &selfRef, &other, &selfRef);
    aclnnInplaceNeTensor aclnnInplaceNeTensorGetWorkspaceSize(selfRef: Ref, other: T) |call| pointwise::test(Test::Ne, &selfRef, &other, &selfRef);
    aclnnInplaceGtTensor aclnnInplaceGtTensorGetWorkspaceSize(selfRef: Ref, other: T) |call| pointwise::test(Test::Gt, &selfRef, &other, &selfRef);
    aclnnInplaceGeTensor aclnnInplaceGeTensorGetWorkspaceSize(selfRef: Ref, other: T) |call| pointwise::test(Test::Ge, &selfRef, &other, &selfRef);
    aclnnInplaceLtTensor aclnnInplaceLtTensorGetWorkspaceSize(selfRef: Ref, other: T) |call| pointwise::test(Test::Lt, &selfRef, &other, &selfRef);
    aclnnInplaceLeTensor aclnnInplaceLeTensorGetWorkspaceSize(selfRef: Ref, other: T) |call| pointwise::test(Test::Le, &selfRef, &other, &selfRef);
    aclnnEqScalar aclnnEqScalarGetWorkspaceSize(self_: T, other: S, out: Out) |call| pointwise::test_scalar(Test::Eq, &self_, &other, &out);
    aclnnNeScalar aclnnNeScalarGetWorkspaceSize(self_: T, other: S, out: Out) |call| pointwise::test_scalar(Test::Ne, &self_, &other, &out);
    aclnnGtScalar aclnnGtScalarGetWorkspaceSize(self_: T, other: S, out: Out) |call| pointwise::test_scalar(Test::Gt, &self_, &other, &out);
    aclnnGeScalar aclnnGeScalarGetWorkspaceSize(self_: T, other: S, out: Out) |call| pointwise::test_scalar(Test::Ge, &self_, &other, &out);
    aclnnLtScalar aclnnLtScalarGetWorkspaceSize(self_: T, other: S, out: Out) |call| pointwise::test_scalar(Test::Lt, &self_, &other, &out);
    aclnnLeScalar aclnnLeScalarGetWorkspaceSize(self_: T, other: S, out: Out) |call| pointwise::test_scalar(Test::Le, &self_, &other, &out);
    aclnnInplaceEqScalar aclnnInplaceEqScalarGetWorkspaceSize(selfRef: Ref, other: S) |call| pointwise::test_scalar(Test::Eq, &selfRef, &other, &selfRef);
    aclnnInplaceNeScalar aclnnInplaceNeScalarGetWorkspaceSize(selfRef: Ref, other: S) |call| pointwise::test_scalar(Test::Ne, &selfRef, &other, &selfRef);
    aclnnInplaceGtScalar aclnnInplaceGtScalarGetWorkspaceSize(selfRef: Ref, other: S) |call| pointwise::test_scalar(Test::Gt, &selfRef, &other, &selfRef);
    aclnnInplaceGeScalar aclnnInplaceGeScalarGetWorkspaceSize(selfRef: Ref, other: S) |call| pointwise::test_scalar(Test::Ge, &selfRef, &other, &selfRef);
    aclnnInplaceLtScalar aclnnInplaceLtScalarGetWorkspaceSize(selfRef: Ref, other: S) |call| pointwise::test_scalar(Test::Lt, &selfRef, &other, &selfRef);
    aclnnInplaceLeScalar aclnnInplaceLeScalarGetWorkspaceSize(selfRef: Ref, other: S) |call| pointwise::test_scalar(Test::Le, &selfRef, &other, &selfRef);
    aclnnLogicalAnd aclnnLogicalAndGetWorkspaceSize(self_: T, other: T, out: Out) |call| pointwise::test(Test::And, &self_, &other, &out);
    aclnnInplaceLogicalAnd aclnnInplaceLogicalAndGetWorkspaceSize(selfRef: Ref, other: T) |call| pointwise::test(Test::And, &selfRef, &other, &selfRef);
    aclnnLogicalOr aclnnLogicalOrGetWorkspaceSize(self_: T, other: T, out: Out) |call| pointwise::test(Test::Or, &self_, &other, &out);
    aclnnInplaceLogicalOr aclnnInplaceLogicalOrGetWorkspaceSize(selfRef: Ref, other: T) |call| pointwise::test(Test::Or, &selfRef, &other, &selfRef);
    aclnnLogicalXor aclnnLogicalXorGetWorkspaceSize(self_: T, other: T, out: Out) |call| pointwise::test(Test::Xor, &self_, &other, &out);
    aclnnLogicalNot aclnnLogicalNotGetWorkspaceSize(self_: T, out: Out) |call| pointwise::truth(&self_, &out, false);
    aclnnInplaceLogicalNot aclnnInplaceLogicalNotGetWorkspaceSize(selfRef: Ref) |call| pointwise::truth(&selfRef, &selfRef, false);
    aclnnIsFinite aclnnIsFiniteGetWorkspaceSize(self_: T, out: Out) |call| pointwise::truth(&self_, &out, true);
    aclnnSWhere aclnnSWhereGetWorkspaceSize(condition: T, self_: T, other: T, out: Out) |call| pointwise::select(&condition, &self_, &other, &out);
    aclnnInplaceMaskedFillScalar aclnnInplaceMaskedFillScalarGetWorkspaceSize(selfRef: Ref, mask: T, value: S) |call| pointwise::masked_fill(&selfRef, &mask, Value::Scalar(value));
    aclnnInplaceMaskedFillTensor aclnnInplaceMaskedFillTensorGetWorkspaceSize(selfRef: Ref, mask: T, value: T) |call| pointwise::masked_fill(&selfRef, &mask, Value::Tensor(value));

    // Cast, fill, copy, range.
    aclnnCast aclnnCastGetWorkspaceSize(self_: T, dtype: DType, out: Out) |call| fill::cast(&self_, dtype, &out);
    aclnnInplaceCopy aclnnInplaceCopyGetWorkspaceSize(selfRef: Out, src: T) |call| fill::copy(call, &selfRef, &src);
    aclnnInplaceZero aclnnInplaceZeroGetWorkspaceSize(selfRef: Out) |call| fill::fill(&selfRef, fill::ZERO_TYPES, Scalar::truth(false));
    aclnnInplaceOne aclnnInplaceOneGetWorkspaceSize(selfRef: Out) |call| fill::fill(&selfRef, fill::ZERO_TYPES, Scalar::truth(true));
    aclnnInplaceFillScalar aclnnInplaceFillScalarGetWorkspaceSize(selfRef: Out, value: S) |call| fill::fill(&selfRef, fill::FILL_TYPES, value);
    aclnnInplaceFillTensor aclnnInplaceFillTensorGetWorkspaceSize(selfRef: Out, value: T) |call| fill::fill_tensor(&selfRef, &value);
    aclnnArange aclnnArangeGetWorkspaceSize(start: S, end: S, step: S, out: Out) |call| fill::arange(start, end, step, &out);

    // Reductions.
    aclnnReduceSum aclnnReduceSumGetWorkspaceSize(self_: T, dims: Ints, keepDims: bool, dtype: DType, out: Out) |call| reduce::fold_as(Fold::Sum, &self_, &dims, keepDims, dtype, &out);
    aclnnMean aclnnMeanGetWorkspaceSize(self_: T, dim: Ints, keepDim: bool, dtype: DType, out: Out) |call| reduce::fold_as(Fold::Mean, &self_, &dim, keepDim, dtype, &out);
    aclnnAmax aclnnAmaxGetWorkspaceSize(self_: T, dim: Ints, keepDim: bool, out: Out) |call| reduce::fold(Fold::Max, &self_, &dim, keepDim, &out);
    aclnnAmin aclnnAminGetWorkspaceSize(self_: T, dim: Ints, keepDim: bool, out: Out) |call| reduce::fold(Fold::Min, &self_, &dim, keepDim, &out);
    aclnnMax aclnnMaxGetWorkspaceSize(self_: T, out: Out) |call| reduce::whole_extreme(Fold::Max, &self_, &out);
    aclnnMin aclnnMinGetWorkspaceSize(self_: T, out: Out) |call| reduce::whole_extreme(Fold::Min, &self_, &out);
    aclnnMaxDim aclnnMaxDimGetWorkspaceSize(self_: T, dim: i64, keepdim: bool, out: Out, indices: Out) |call| reduce::extreme(Fold::Max, &self_, dim, keepdim, Some(&out), &indices);
    aclnnMinDim aclnnMinDimGetWorkspaceSize(self_: T, dim: i64, keepdim: bool, out: Out, indices: Out) |call| reduce::extreme(Fold::Min, &self_, dim, keepdim, Some(&out), &indices);
    aclnnArgMax aclnnArgMaxGetWorkspaceSize(self_: T, dim: i64, keepdim: bool, out: Out) |call| reduce::extreme(Fold::Max, &self_, dim, keepdim, None, &out);
    aclnnArgMin aclnnArgMinGetWorkspaceSize(self_: T, dim: i64, keepdim: bool, out: Out) |call| reduce::extreme(Fold::Min, &self_, dim, keepdim, None, &out);
    aclnnProd aclnnProdGetWorkspaceSize(self_: T, dtype: DType, out: Out) |call| reduce::whole_product(&self_, dtype, &out);
    aclnnProdDim aclnnProdDimGetWorkspaceSize(self_: T, dim: i64, keepDim: bool, dtype: DType, out: Out) |call| reduce::product(&self_, dim, keepDim, dtype, &out);
    aclnnAny aclnnAnyGetWorkspaceSize(self_: T, dim: Ints, keepdim: bool, out: Out) |call| reduce::fold(Fold::Any, &self_, &dim, keepdim, &out);
    aclnnAll aclnnAllGetWorkspaceSize(self_: T, dim: Ints, keepdim: bool, out: Out) |call| reduce::fold(Fold::All, &self_, &dim, keepdim, &out);
    aclnnCumsum aclnnCumsumGetWorkspaceSize(self_: T, dim: i64, dtype: DType, out: Out) |call| reduce::cumulate(call, &self_, dim, dtype, &out);

    // Matrix products.
    aclnnMatmul aclnnMatmulGetWorkspaceSize(self_: T, mat2: T, out: Out, cubeMathType: i8) |call| product(call, Product::General, &self_, &mat2, &out, cubeMathType);
    aclnnMm aclnnMmGetWorkspaceSize(self_: T, mat2: T, out: Out, cubeMathType: i8) |call| product(call, Product::Matrix, &self_, &mat2, &out, cubeMathType);
    aclnnBatchMatMul aclnnBatchMatMulGetWorkspaceSize(self_: T, mat2: T, out: Out, cubeMathType: i8) |call| product(call, Product::Batch, &self_, &mat2, &out, cubeMathType);
    aclnnAddmm aclnnAddmmGetWorkspaceSize(self_: T, mat1: T, mat2: T, beta: S, alpha: S, out: Out, cubeMathType: i8) |call| add_product(call, Product::Matrix, Added { term: &self_, beta, alpha }, &mat1, &mat2, &out, cubeMathType);
    aclnnInplaceAddmm aclnnInplaceAddmmGetWorkspaceSize(selfRef: Ref, mat1: T, mat2: T, beta: S, alpha: S, cubeMathType: i8) |call| add_product(call, Product::Matrix, Added { term: &selfRef, beta, alpha }, &mat1, &mat2, &selfRef, cubeMathType);
    aclnnBaddbmm aclnnBaddbmmGetWorkspaceSize(self_: T, batch1: T, batch2: T, beta: S, alpha: S, out: Out, cubeMathType: i8) |call| add_product(call, Product::Batch, Added { term: &self_, beta, alpha }, &batch1, &batch2, &out, cubeMathType);

    // Data movement.
    aclnnPermute aclnnPermuteGetWorkspaceSize(self_: T, dims: Ints, out: Out) |call| movement::permute(call, &self_, &dims, &out);
    aclnnCat aclnnCatGetWorkspaceSize(tensors: Tensors, dim: i64, out: Out) |call| movement::concatenate(call, tensors, dim, &out);
    aclnnRepeat aclnnRepeatGetWorkspaceSize(self_: T, repeats: Ints, out: Out) |call| movement::repeat(call, &self_, &repeats, &out);
    aclnnExpand aclnnExpandGetWorkspaceSize(self_: T, size: Ints, out: Out) |call| movement::expand(call, &self_, &size, &out);
    aclnnSlice aclnnSliceGetWorkspaceSize(self_: T, dim: i64, start: i64, end: i64, step: i64, out: Out) |call| movement::slice(call, &self_, dim, [start, end, step], &out);
    aclnnFlip aclnnFlipGetWorkspaceSize(self_: T, dims: Ints, out: Out) |call| movement::flip(call, &self_, &dims, &out);
    aclnnConstantPadNd aclnnConstantPadNdGetWorkspaceSize(self_: T, pad: Ints, value: S, out: Out) |call| movement::pad(call, &self_, &pad, value, &out);
    aclnnTril aclnnTrilGetWorkspaceSize(self_: T, diagonal: i64, out: Out) |call| movement::triangle(&self_, diagonal, true, &out);
    aclnnInplaceTril aclnnInplaceTrilGetWorkspaceSize(selfRef: Ref, diagonal: i64) |call| movement::triangle(&selfRef, diagonal, true, &selfRef);
    aclnnTriu aclnnTriuGetWorkspaceSize(self_: T, diagonal: i64, out: Out) |call| movement::triangle(&self_, diagonal, false, &out);
    aclnnInplaceTriu aclnnInplaceTriuGetWorkspaceSize(selfRef: Ref, diagonal: i64) |call| movement::triangle(&selfRef, diagonal, false, &selfRef);
    // `stable` asks for what holds anyway.
    aclnnSort aclnnSortGetWorkspaceSize(self_: T, stable: bool, dim: i64, descending: bool, valuesOut: Out, indicesOut: Out) |call| { let _ = stable; movement::sort(call, &self_, dim, descending, &valuesOut, &indicesOut) };
    aclnnTopk aclnnTopkGetWorkspaceSize(self_: T, k: i64, dim: i64, largest: bool, sorted: bool, valuesOut: Out, indicesOut: Out) |call| movement::top(call, &self_, [k, dim], largest, sorted, &valuesOut, &indicesOut);

    // Indexing.
    aclnnGather aclnnGatherGetWorkspaceSize(self_: T, dim: i64, index: T, out: Out) |call| index::gather(call, &self_, dim, &index, &out);
    aclnnScatter aclnnScatterGetWorkspaceSize(self_: T, dim: i64, index: T, src: T, reduce: i64, out: Out) |call| index::scatter(&self_, dim, &index, Source::Tensor(src), index::meets(reduce)?, &out);
    aclnnInplaceScatter aclnnInplaceScatterGetWorkspaceSize(selfRef: Ref, dim: i64, index: T, src: T, reduce: i64) |call| index::scatter(&selfRef, dim, &index, Source::Tensor(src), index::meets(reduce)?, &selfRef);
    aclnnScatterValue aclnnScatterValueGetWorkspaceSize(self_: T, dim: i64, index: T, value: S, reduce: i64, out: Out) |call| index::scatter(&self_, dim, &index, Source::Scalar(value), index::meets(reduce)?, &out);
    aclnnInplaceScatterValue aclnnInplaceScatterValueGetWorkspaceSize(selfRef: Ref, dim: i64, index: T, value: S, reduce: i64) |call| index::scatter(&selfRef, dim, &index, Source::Scalar(value), index::meets(reduce)?, &selfRef);
    aclnnScatterAdd aclnnScatterAddGetWorkspaceSize(self_: T, dim: i64, index: T, src: T, out: Out) |call| index::scatter_add(&self_, dim, &index, &src, &out);
    aclnnIndexSelect aclnnIndexSelectGetWorkspaceSize(self_: T, dim: i64, index: T, out: Out) |call| index::index_select(call, &self_, dim, &index, &out);
    aclnnIndexAdd aclnnIndexAddGetWorkspaceSize(self_: T, dim: i64, index: T, source: T, alpha: S, out: Out) |call| index::index_add(&self_, dim, &index, &source, alpha, &out);
    aclnnEmbedding aclnnEmbeddingGetWorkspaceSize(weight: T, indices: T, out: Out) |call| index::embedding(call, &weight, &indices, &out);
    aclnnEmbeddingDenseBackward aclnnEmbeddingDenseBackwardGetWorkspaceSize(grad: T, indices: T, numWeights: u64, paddingIdx: u64, scaleGradByFreq: bool, out: Out) |call| index::embedding_backward(call, &grad, &indices, [numWeights, paddingIdx], scaleGradByFreq, &out);

    // Softmax and normalisation.
    aclnnSoftmax aclnnSoftmaxGetWorkspaceSize(self_: T, dim: i64, out: Out) |call| normalize::softmax(&self_, dim, false, &out);
    aclnnLogSoftmax aclnnLogSoftmaxGetWorkspaceSize(self_: T, dim: i64, out: Out) |call| normalize::softmax(&self_, dim, true, &out);
    aclnnSoftmaxBackward aclnnSoftmaxBackwardGetWorkspaceSize(gradOutput: T, output: T, dim: i64, out: Out) |call| normalize::softmax_backward(&gradOutput, &output, dim, false, &out);
    aclnnLogSoftmaxBackward aclnnLogSoftmaxBackwardGetWorkspaceSize(gradOutput: T, output: T, dim: i64, out: Out) |call| normalize::softmax_backward(&gradOutput, &output, dim, true, &out);
    aclnnLayerNorm aclnnLayerNormGetWorkspaceSize(input: T, normalizedShape: Ints, weightOptional: MaybeT, biasOptional: MaybeT, eps: f64, out: Out, meanOutOptional: MaybeOut, rstdOutOptional: MaybeOut) |call| {
        let parameters = LayerNorm { normalized: &normalizedShape, weight: weightOptional, bias: biasOptional };
        normalize::layer_norm(call, &input, parameters, eps, &out, meanOutOptional, rstdOutOptional)
    };
    aclnnLayerNormBackward aclnnLayerNormBackwardGetWorkspaceSize(gradOut: T, input: T, normalizedShape: Ints, mean: T, rstd: T, weightOptional: MaybeT, biasOptional: MaybeT, outputMask: Bools, gradInputOut: MaybeOut, gradWeightOut: MaybeOut, gradBiasOut: MaybeOut) |call| {
        let outputs = [(gradInputOut, "gradInputOut"), (gradWeightOut, "gradWeightOut"), (gradBiasOut, "gradBiasOut")];
        let parameters = LayerNorm { normalized: &normalizedShape, weight: weightOptional, bias: biasOptional };
        let saved = LayerNormSaved { gradient: &gradOut, x: &input, mean: &mean, rstd: &rstd };
        normalize::layer_norm_backward(call, saved, parameters, masked_outputs(&outputMask, outputs)?)
    };
    aclnnRmsNorm aclnnRmsNormGetWorkspaceSize(x: T, gamma: T, epsilon: f64, yOut: Out, rstdOut: Out) |call| normalize::rms_norm(call, &x, &gamma, epsilon, &yOut, &rstdOut);
    aclnnRmsNormGrad aclnnRmsNormGradGetWorkspaceSize(dy: T, x: T, rstd: T, gamma: T, dxOut: Out, dgammaOut: Out) |call| normalize::rms_norm_backward(call, RmsNormSaved { dy: &dy, x: &x, rstd: &rstd, gamma: &gamma }, &dxOut, &dgammaOut);

    // Random numbers.
    aclnnInplaceUniform aclnnInplaceUniformGetWorkspaceSize(selfRef: Out, from: f64, to: f64, seed: u64, offset: u64) |call| random::uniform_in_place(call, &selfRef, [from, to], [seed, offset]);
    aclnnInplaceNormal aclnnInplaceNormalGetWorkspaceSize(selfRef: Out, mean: f32, std: f32, seed: i64, offset: i64) |call| random::normal(call, &selfRef, [mean, std], [seed, offset]);
    aclnnNormalFloatFloat aclnnNormalFloatFloatGetWorkspaceSize(mean: f32, std: f32, seed: i64, offset: i64, out: Out) |call| random::normal(call, &out, [mean, std], [seed, offset]);
    aclnnBernoulli aclnnBernoulliGetWorkspaceSize(self_: T, prob: S, seed: i64, offset: i64, out: Out) |call| { out.expect_dims(&self_.dims)?; random::bernoulli(call, prob, [seed, offset], &out) };
    aclnnInplaceBernoulli aclnnInplaceBernoulliGetWorkspaceSize(selfRef: Out, prob: S, seed: i64, offset: i64) |call| random::bernoulli(call, prob, [seed, offset], &selfRef);

    // Convolution.
    aclnnConvolution aclnnConvolutionGetWorkspaceSize(input: T, weight: T, bias: MaybeT, stride: Ints, padding: Ints, dilation: Ints, transposed: bool, outputPadding: Ints, groups: i64, output: Out, cubeMathType: i8) |call| {
        let given = convolution::Given { stride, padding, dilation, transposed, output_padding: outputPadding, groups };
        convolution::forward(call, [&input, &weight], bias, &given, &output, cubeMathType)
    };
    aclnnConvolutionBackward aclnnConvolutionBackwardGetWorkspaceSize(gradOutput: T, input: T, weight: T, biasSizes: MaybeInts, stride: Ints, padding: Ints, dilation: Ints, transposed: bool, outputPadding: Ints, groups: i32, outputMask: Bools, cubeMathType: i8, gradInput: MaybeOut, gradWeight: MaybeOut, gradBias: MaybeOut) |call| {
        let given = convolution::Given { stride, padding, dilation, transposed, output_padding: outputPadding, groups: i64::from(groups) };
        let saved = convolution::Saved { gradient: &gradOutput, x: &input, weight: &weight, bias_sizes: &biasSizes };
        let outputs = [(gradInput, "gradInput"), (gradWeight, "gradWeight"), (gradBias, "gradBias")];
        convolution::backward(call, saved, &given, cubeMathType, masked_outputs(&outputMask, outputs)?)
    };

    // Loss and optimiser.
    aclnnNLLLoss aclnnNLLLossGetWorkspaceSize(self_: T, target: T, weight: T, reduction: i64, ignoreIndex: i64, out: Out, totalWeightOut: Out) |call| {
        train::nll_loss(Loss { x: self_, target, weight, reduction: train::reduction(reduction)?, ignored: ignoreIndex }, &out, &totalWeightOut)
    };
    aclnnNLLLossBackward aclnnNLLLossBackwardGetWorkspaceSize(gradOutput: T, self_: T, target: T, weight: T, reduction: i64, ignoreIndex: i64, totalWeight: T, out: Out) |call| {
        train::nll_loss_backward(Loss { x: self_, target, weight, reduction: train::reduction(reduction)?, ignored: ignoreIndex }, &gradOutput, &totalWeight, &out)
    };
    aclnnApplyAdamWV2 aclnnApplyAdamWV2GetWorkspaceSize(varRef: Ref, mRef: Ref, vRef: Ref, maxGradNormOptionalRef: MaybeRef, grad: T, step: T, lr: f32, beta1: f32, beta2: f32, weightDecay: f32, eps: f32, amsgrad: bool, maximize: bool) |call| train::adam_w(call, AdamW {
        parameter: varRef, first: mRef, second: vRef, largest: maxGradNormOptionalRef, gradient: grad, step, lr, beta1, beta2, weight_decay: weightDecay, eps, amsgrad, maximize,
    });
}
