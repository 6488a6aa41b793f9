//! The operators (`libopapi_math.so`, `libopapi_nn.so`, `libopapi_transformer.so`).
//!
//! Each row of a table declares both phases of one operator: `aclnnXGetWorkspaceSize`, which takes
//! the listed parameters, and `aclnnX`. It names the repository of the operator's documentation,
//! the function that wraps it, and the documented limits. [`for_each_operator`] passes the training
//! operators to a macro, [`for_each_fused_operator`] the training operators whose first phases the
//! vendor's build generates, and [`for_each_rotary_operator`] the stock rotary operators. Here the
//! macro declares the C functions; in [`aclnn`](crate::aclnn) it wraps them.
//!
//! # Source
//! Public operator documents of hicann/ops-math, hicann/ops-nn and hicann/ops-transformer,
//! `<group>/<operator>/docs/aclnn*.md`.

use std::ffi::{c_char, c_void};

use super::describe::{CType, Signature};
use super::types::{
    CubeMath, aclDataType, aclIntArray, aclOpExecutor, aclScalar, aclTensor, aclTensorList,
    aclnnStatus, aclrtStream,
};

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

impl<P> Operator<P> {
    /// True if the installation has both phases.
    pub(crate) fn is_complete(&self) -> bool {
        self.plan.is_some() && self.run.is_some()
    }
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
    /// A list of tensors that are written.
    #[derive(Debug)]
    pub enum Outs {}
    /// A list of tensors that are read, or null.
    #[derive(Debug)]
    pub enum OptIns {}
    /// A list of tensors that are written, or null.
    #[derive(Debug)]
    pub enum OptOuts {}
    /// A number.
    #[derive(Debug)]
    pub enum Num {}
    /// A number, or null.
    #[derive(Debug)]
    pub enum OptNum {}
    /// A list of integers.
    #[derive(Debug)]
    pub enum Ints {}
    /// A list of integers, or null.
    #[derive(Debug)]
    pub enum OptInts {}
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
    kind::Outs => *mut aclTensorList,
    kind::OptIns => *const aclTensorList,
    kind::OptOuts => *mut aclTensorList,
    kind::Num => *const aclScalar,
    kind::OptNum => *const aclScalar,
    kind::Ints => *const aclIntArray,
    kind::OptInts => *const aclIntArray,
    kind::Text => *mut c_char,
    kind::DataType => aclDataType,
    i64 => i64,
    u64 => u64,
    f32 => f32,
    f64 => f64,
    bool => bool,
    CubeMath => CubeMath,
}

/// Calls `$then!` with the remaining tokens and the table of the operators of training.
macro_rules! for_each_operator {
    ($then:ident $($head:tt)*) => {
        $then! {
            $($head)*;
            /// x + alpha·other. Limits: `alpha` is required.
            math fn add = Add(x: In, other: In, alpha: Num, out: Out);
            /// x + alpha·other; other is a number. Limits: `alpha` is required; integers are exact
            /// up to 2^24.
            math fn adds = Adds(x: In, other: Num, alpha: Num, out: Out);
            /// x - alpha·other. Limits: `alpha` is required.
            math fn sub = Sub(x: In, other: In, alpha: Num, out: Out);
            /// x·other.
            math fn mul = Mul(x: In, other: In, out: Out);
            /// x·other; other is a number.
            math fn muls = Muls(x: In, other: Num, out: Out);
            /// x / other. Limits: integers need a float result.
            math fn div = Div(x: In, other: In, out: Out);
            /// x / other; other is a number. Limits: integers need a float result.
            math fn divs = Divs(x: In, other: Num, out: Out);
            /// Remainder with the sign of the divisor. Limits: i32 is exact within ±2^24.
            math fn remainder = RemainderTensorTensor(x: In, other: In, out: Out);
            /// Remainder of division by a number, with its sign. Limits: i32 is exact within ±2^24.
            math fn remainder_scalar = RemainderTensorScalar(x: In, other: Num, out: Out);
            /// x to the power of a tensor, element by element.
            math fn pow = PowTensorTensor(x: In, exponent: In, out: Out);
            /// x to the power of a number.
            math fn pow_scalar = PowTensorScalar(x: In, exponent: Num, out: Out);
            /// -x. Limits: no bool, u8, i16.
            math fn neg = Neg(x: In, out: Out);
            /// Absolute value.
            math fn abs = Abs(x: In, out: Out);
            /// -1, 0 or 1 by the sign of x. Limits: 1 to 8 axes.
            math fn sign = Sign(x: In, out: Out);
            /// Square root.
            math fn sqrt = Sqrt(x: In, out: Out);
            /// 1 / x.
            math fn reciprocal = Reciprocal(x: In, out: Out);
            /// e to the power of x.
            math fn exp = Exp(x: In, out: Out);
            /// Natural logarithm.
            math fn log = Log(x: In, out: Out);
            /// Natural logarithm of 1 + x.
            math fn log1p = Log1p(x: In, out: Out);
            /// Error function. Limits: bf16 on A3 only.
            math fn erf = Erf(x: In, out: Out);
            /// Hyperbolic tangent.
            math fn tanh = Tanh(x: In, out: Out);
            /// Sine. Limits: accurate from -1e7 to 1e7.
            math fn sin = Sin(x: In, out: Out);
            /// Cosine. Limits: accurate from -1e7 to 1e7.
            math fn cos = Cos(x: In, out: Out);
            /// Largest integer that is at most x.
            math fn floor = Floor(x: In, out: Out);
            /// Smallest integer that is at least x.
            math fn ceil = Ceil(x: In, out: Out);
            /// Nearest integer, ties to even.
            math fn round = Round(x: In, out: Out);
            /// x clamped to one or two bounds. Limits: 1 to 8 axes; at least one bound.
            math fn clamp = Clamp(x: In, low: OptNum, high: OptNum, out: Out);
            /// 1 / (1 + e^-x).
            nn fn sigmoid = Sigmoid(x: In, out: Out);
            /// Gradient of the sigmoid from its output. Limits: equal shapes.
            nn fn sigmoid_backward = SigmoidBackward(grad: In, output: In, out: Out);
            /// GELU; `approximate` is 0 for the error function, 1 for tanh.
            nn fn gelu = GeluV2(x: In, approximate: i64, out: Out);
            /// Gradient of GELU; `approximate` is "none" or "tanh".
            nn fn gelu_backward = GeluBackwardV2(grad: In, x: In, approximate: Text, out: Out);
            /// max(x, 0).
            nn fn relu = Relu(x: In, out: Out);

            /// x = other.
            math fn eq = EqTensor(x: In, other: In, out: Out);
            /// x ≠ other.
            math fn ne = NeTensor(x: In, other: In, out: Out);
            /// x > other.
            math fn gt = GtTensor(x: In, other: In, out: Out);
            /// x ≥ other.
            math fn ge = GeTensor(x: In, other: In, out: Out);
            /// x < other.
            math fn lt = LtTensor(x: In, other: In, out: Out);
            /// x ≤ other.
            math fn le = LeTensor(x: In, other: In, out: Out);
            /// x = other; other is a number.
            math fn eq_scalar = EqScalar(x: In, other: Num, out: Out);
            /// x ≠ other; other is a number.
            math fn ne_scalar = NeScalar(x: In, other: Num, out: Out);
            /// x > other; other is a number.
            math fn gt_scalar = GtScalar(x: In, other: Num, out: Out);
            /// x ≥ other; other is a number.
            math fn ge_scalar = GeScalar(x: In, other: Num, out: Out);
            /// x < other; other is a number.
            math fn lt_scalar = LtScalar(x: In, other: Num, out: Out);
            /// x ≤ other; other is a number.
            math fn le_scalar = LeScalar(x: In, other: Num, out: Out);
            /// True if both are true.
            math fn logical_and = LogicalAnd(x: In, other: In, out: Out);
            /// True if at least one is true.
            math fn logical_or = LogicalOr(x: In, other: In, out: Out);
            /// True if exactly one is true.
            math fn logical_xor = LogicalXor(x: In, other: In, out: Out);
            /// True if x is false.
            math fn logical_not = LogicalNot(x: In, out: Out);
            /// x where the condition is true, else other.
            math fn select_where = SWhere(condition: In, x: In, other: In, out: Out);
            /// Writes `value` into x where the mask is true. Limits: the mask is bool and
            /// broadcasts to x; strided masks are undocumented.
            math fn masked_fill = InplaceMaskedFillScalar(x: Ref, mask: In, value: Num);

            /// x in another element type. Limits: bool sources must be dense; NaN gives 0 in
            /// integers.
            math fn cast = Cast(x: In, dtype: DataType, out: Out);
            /// Writes one number to every element.
            math fn fill = InplaceFillScalar(x: Ref, value: Num);
            /// Writes source into x: any strides, any type, repeated along axes of length 1.
            /// Limits: 1 to 8 axes; the two must not overlap.
            math fn copy = InplaceCopy(x: Ref, source: In);
            /// start, start + step, … below end. Limits: the caller sizes `out`.
            math fn arange = Arange(start: Num, end: Num, step: Num, out: Out);
            /// Uniform random numbers from `low` to `high`.
            math fn uniform = InplaceUniform(x: Ref, low: f64, high: f64, seed: u64, offset: u64);
            /// Normal random numbers.
            math fn normal = InplaceNormal(
                x: Ref, mean: f32, deviation: f32, seed: i64, offset: i64
            );
            /// 1 with the given probability, else 0. Limits: `offset` in multiples of 4.
            math fn bernoulli = InplaceBernoulli(x: Ref, probability: Num, seed: i64, offset: i64);

            /// Sum over axes; no axes means all.
            math fn reduce_sum = ReduceSum(
                x: In, dims: Ints, keep_dims: bool, dtype: DataType, out: Out
            );
            /// Mean over axes; no axes means all. Limits: used for floats only; integers differ
            /// from torch's.
            math fn mean = Mean(x: In, dims: Ints, keep_dims: bool, dtype: DataType, out: Out);
            /// Largest along axes; no axes means all. Limits: no axis twice.
            math fn amax = Amax(x: In, dims: Ints, keep_dims: bool, out: Out);
            /// Smallest along axes; no axes means all. Limits: no axis twice.
            math fn amin = Amin(x: In, dims: Ints, keep_dims: bool, out: Out);
            /// Largest along an axis, and its index. Limits: no i32 on A2 and A3; 1 to 8 axes.
            math fn max_dim = MaxDim(x: In, dim: i64, keep_dim: bool, out: Out, indices: Out);
            /// Smallest along an axis, and its index. Limits: no i32 on A2 and A3; 1 to 8 axes.
            math fn min_dim = MinDim(x: In, dim: i64, keep_dim: bool, out: Out, indices: Out);
            /// Index of the largest along an axis. Limits: one axis.
            math fn argmax = ArgMax(x: In, dim: i64, keep_dim: bool, out: Out);
            /// Index of the smallest along an axis. Limits: one axis.
            math fn argmin = ArgMin(x: In, dim: i64, keep_dim: bool, out: Out);
            /// Product along an axis.
            math fn prod_dim = ProdDim(x: In, dim: i64, keep_dim: bool, dtype: DataType, out: Out);
            /// True if any along axes is true; no axes means all.
            math fn any = Any(x: In, dims: Ints, keep_dims: bool, out: Out);
            /// True if all along axes are true; no axes means all.
            math fn all = All(x: In, dims: Ints, keep_dims: bool, out: Out);
            /// Cumulative sum along an axis. Limits: `dtype` equals the type of `out`.
            math fn cumsum = Cumsum(x: In, dim: i64, dtype: DataType, out: Out);

            /// Concatenation of tensors along an axis. Limits: 1 to 8 axes; `out` dense; no u16,
            /// u32, u64 on A2 and A3.
            math fn cat = Cat(tensors: Ins, dim: i64, out: Out);
            /// x repeated along each axis. Limits: at most 4 repeated axes.
            math fn repeat = Repeat(x: In, repeats: Ints, out: Out);
            /// x in reverse order along axes. Limits: 1 to 8 axes; `out` dense.
            nn fn flip = Flip(x: In, dims: Ints, out: Out);
            /// Elements of x at the indices in `index` along an axis. Limits: indices are not
            /// checked.
            nn fn gather = Gather(x: In, dim: i64, index: In, out: Out);
            /// Writes source into x at the indices in `index` along an axis. Limits: indices are
            /// not checked; `source` is no smaller than `index`.
            nn fn scatter = InplaceScatter(x: Ref, dim: i64, index: In, source: In, reduce: i64);
            /// x plus source at the indices in `index` along an axis. Limits: `source` and `out`
            /// dense; `out` may be x itself.
            nn fn scatter_add = ScatterAdd(x: In, dim: i64, index: In, source: In, out: Out);
            /// Slices of x at the indices in `index` along an axis. Limits: `index` and `out`
            /// dense; indices are not checked.
            nn fn index_select = IndexSelect(x: In, dim: i64, index: In, out: Out);
            /// x plus alpha·source at the slices in `index` along an axis. Limits: `source` dense;
            /// the order of additions is not fixed by default.
            nn fn index_add = IndexAdd(
                x: In, dim: i64, index: In, source: In, alpha: Num, out: Out
            );
            /// Rows of the weight by index. Limits: the weight has two axes.
            nn fn embedding = Embedding(weight: In, indices: In, out: Out);
            /// Gradient of the weight; `padding` is the index of a row without gradient, or -1.
            /// Limits: the order of additions is not fixed by default.
            nn fn embedding_backward = EmbeddingDenseBackward(
                grad: In, indices: In, rows: u64, padding: u64, scale_by_frequency: bool, out: Out
            );

            /// Matrix product. Limits: two axes; `out` dense; bf16 with f16 or f32 is refused.
            nn fn mm = Mm(x: In, other: In, out: Out, cube_math: CubeMath);
            /// alpha·x @ other + beta·addend; with numbers 1 and a row as the addend one kernel.
            /// Limits: two axes; `out` dense; one type.
            nn fn add_mm = Addmm(
                addend: In, x: In, other: In, beta: Num, alpha: Num, out: Out, cube_math: CubeMath
            );
            /// Batched matrix product. Limits: three axes, a batch of 1 is broadcast; `out` dense;
            /// bf16 with f16 or f32 is refused.
            nn fn batch_mm = BatchMatMul(x: In, other: In, out: Out, cube_math: CubeMath);

            /// Product of each group's rows of x and its matrix: `group_type` 0, weight
            /// `[groups, inputs, outputs]`; or of each group's columns of x and rows of weight: 2,
            /// `out` `[groups, ..]`. `group_list` counts them if `group_list_type` is 1. Limits:
            /// Atlas A2; one type; at most 1,024 groups; dimensions of memory's last axes at most
            /// 65,535; for 2, x is a transposed view.
            transformer fn grouped_mm = GroupedMatmulV4(
                x: Ins, weight: Ins, bias: OptIns, scale: OptIns, offset: OptIns,
                antiquant_scale: OptIns, antiquant_offset: OptIns, per_token_scale: OptIns,
                group_list: OptIn, activation_input: OptIns, activation_quant_scale: OptIns,
                activation_quant_offset: OptIns, split_item: i64, group_type: i64,
                group_list_type: i64, act_type: i64, out: Outs, activation_feature: OptOuts,
                dyn_quant_scale: OptOuts
            );

            /// Softmax along an axis.
            nn fn softmax = Softmax(x: In, dim: i64, out: Out);
            /// Logarithm of the softmax along an axis.
            nn fn log_softmax = LogSoftmax(x: In, dim: i64, out: Out);
            /// LayerNorm over trailing axes, with its mean and rstd.
            nn fn layer_norm = LayerNorm(
                x: In, normalized: Ints, weight: OptIn, bias: OptIn, epsilon: f64, out: Out,
                mean: OptOut, rstd: OptOut
            );

            /// Attention, and each row's largest score and sum of exponentials, repeated 8 times.
            /// Limits: Atlas A2; at most 256 heads of at most 768 channels, in v at most as many as
            /// in q; `atten_mask` is true at hidden keys.
            transformer fn flash_attention = FlashAttentionScore(
                q: In, k: In, v: In, real_shift: OptIn, drop_mask: OptIn, padding_mask: OptIn,
                atten_mask: OptIn, prefix: OptInts, scale: f64, keep: f64, pre_tokens: i64,
                next_tokens: i64, heads: i64, layout: Text, inner_precise: i64, sparse_mode: i64,
                softmax_max: Out, softmax_sum: Out, softmax_out: OptOut, out: Out
            );
            /// Gradients of attention's q, k and v. Limits: as the forward; the order of additions
            /// is not fixed by default.
            transformer fn flash_attention_grad = FlashAttentionScoreGrad(
                q: In, k: In, v: In, dy: In, pse_shift: OptIn, drop_mask: OptIn,
                padding_mask: OptIn, atten_mask: OptIn, softmax_max: OptIn, softmax_sum: OptIn,
                softmax_in: OptIn, out: In, prefix: OptInts, scale: f64, keep: f64,
                pre_tokens: i64, next_tokens: i64, heads: i64, layout: Text, inner_precise: i64,
                sparse_mode: i64, dq: Out, dk: Out, dv: Out, dpse: OptOut
            );
            /// Attention within packed sequences, given by cumulative lengths. Limits: as for one
            /// sequence; at most 2048 sequences; each row of `atten_mask` leaves a key visible.
            transformer fn flash_attention_packed = FlashAttentionVarLenScore(
                q: In, k: In, v: In, real_shift: OptIn, drop_mask: OptIn, padding_mask: OptIn,
                atten_mask: OptIn, prefix: OptInts, q_ends: OptInts, k_ends: OptInts, scale: f64,
                keep: f64, pre_tokens: i64, next_tokens: i64, heads: i64, layout: Text,
                inner_precise: i64, sparse_mode: i64, softmax_max: Out, softmax_sum: Out,
                softmax_out: OptOut, out: Out
            );
            /// Gradients of attention within packed sequences. Limits: as the forward, with at most
            /// 512 channels per head; the order of additions is not fixed by default.
            transformer fn flash_attention_packed_grad = FlashAttentionUnpaddingScoreGrad(
                q: In, k: In, v: In, dy: In, pse_shift: OptIn, drop_mask: OptIn,
                padding_mask: OptIn, atten_mask: OptIn, softmax_max: OptIn, softmax_sum: OptIn,
                softmax_in: OptIn, out: In, prefix: OptInts, q_ends: OptInts, k_ends: OptInts,
                scale: f64, keep: f64, pre_tokens: i64, next_tokens: i64, heads: i64, layout: Text,
                inner_precise: i64, sparse_mode: i64, dq: Out, dk: Out, dv: Out, dpse: OptOut
            );
        }
    };
}
pub(crate) use for_each_operator;

/// Calls `$then!` with the remaining tokens and the table of the stock rotary operators.
macro_rules! for_each_rotary_operator {
    ($then:ident $($head:tt)*) => {
        $then! {
            $($head)*;
            /// x·cos + rotate(x)·sin.
            transformer fn rotary_position_embedding = RotaryPositionEmbedding(
                x: In, cos: In, sin: In, mode: i64, out: Out
            );
            /// The adjoint; with x also the gradients of cos and sin.
            transformer fn rotary_position_embedding_grad = RotaryPositionEmbeddingGrad(
                dy: In, cos: In, sin: In, x: OptIn, mode: i64, dx: Out, dcos: Out, dsin: Out
            );
            /// The adjoint for q and k, by halves, on Ascend 950; `layout` 1 is BSND, 2 SBND, 4 TND.
            /// Without q and k, `dcos` and `dsin` are not written. Limits: at most 1,024 channels;
            /// cos and sin of one head, and of one batch or of all.
            transformer fn apply_rotary_pos_emb_grad = ApplyRotaryPosEmbGrad(
                dq_out: In, dk_out: In, cos: In, sin: In, q: OptIn, k: OptIn, mode: Text,
                layout: i64, dq: Out, dk: Out, dcos: Out, dsin: Out
            );
            /// Rotation by a table of cos and sin, indexed by position ids.
            transformer fn rope_with_sin_cos_cache = RopeWithSinCosCache(
                positions: In, query: In, key: In, cache: In, sections: Ints, head_size: i64,
                neox: bool, query_out: Out, key_out: Out
            );
            /// The same; `mode` 1 is for striped sections.
            transformer fn rope_with_sin_cos_cache_v2 = RopeWithSinCosCacheV2(
                positions: In, query: In, key: In, cache: In, sections: Ints, head_size: i64,
                neox: bool, mode: i64, query_out: Out, key_out: Out
            );
        }
    };
}
pub(crate) use for_each_rotary_operator;

/// Calls `$then!` with the remaining tokens and the table of the operators of training whose first
/// phases the vendor's build generates, so that no published code checks their calls.
macro_rules! for_each_fused_operator {
    ($then:ident $($head:tt)*) => {
        $then! {
            $($head)*;
            /// x·rstd·gamma with rstd = 1/sqrt(mean(x²) + epsilon) over the trailing axes of gamma,
            /// and rstd. Limits: `gamma` has the type of x or f32.
            nn fn rms_norm = RmsNorm(x: In, gamma: In, epsilon: f64, out: Out, rstd: Out);
            /// Gradients of x and gamma. Limits: two axes or more; `dgamma` in f32; `rstd` without
            /// the axes of gamma.
            nn fn rms_norm_grad = RmsNormGrad(
                dy: In, x: In, rstd: In, gamma: In, dx: Out, dgamma: Out
            );
            /// Sums of the rows of each token, each times its share, in f32 and rounded once;
            /// `places` has the rows of one token after the other, and those beyond the rows add
            /// nothing. Limits: Atlas A2; `places` in i32, at most 512 for a token; `padded` is
            /// false and `restored` null.
            transformer fn token_unpermute = MoeTokenUnpermute(
                rows: In, places: In, shares: OptIn, padded: bool, restored: OptInts, out: Out
            );
            /// Gradients of the rows and of their shares. A row without a place is not written.
            /// Limits: those of `token_unpermute`.
            transformer fn token_unpermute_grad = MoeTokenUnpermuteGrad(
                rows: In, gradient: In, places: In, shares: OptIn, padded: bool, restored: OptInts,
                drows: Out, dshares: Out
            );
            /// Sums of the gradients of each token's rows. Limits: those of `token_unpermute`.
            transformer fn token_permute_grad = MoeTokenPermuteGrad(
                gradient: In, places: In, per_token: i64, padded: bool, out: Out
            );
        }
    };
}
pub(crate) use for_each_fused_operator;

/// The first phase's type, from the kinds of its parameters.
macro_rules! plan_type {
    ($($kind:ident),*) => {
        unsafe extern "C" fn(
            $(<$kind as Kind>::C,)*
            *mut u64,
            *mut *mut aclOpExecutor,
        ) -> aclnnStatus
    };
}

macro_rules! declare {
    (
        $(#[$table_meta:meta])* $table:ident;
        $(
            $(#[$meta:meta])*
            $_repository:ident fn $_safe:ident = $name:ident($($arg:ident: $kind:ident),*);
        )*
    ) => {
        $(#[$table_meta])*
        #[derive(Clone, Copy, Debug)]
        #[allow(missing_docs, reason = "the functions of `aclnn` describe them")]
        pub struct $table {
            $( pub $name: Operator<plan_type!($($kind),*)>, )*
        }

        impl $table {
            /// Fills the table from `resolve`.
            ///
            /// # Safety
            /// - Each address that `resolve` returns is that of the C function of that name, with
            ///   the signature that this table declares.
            /// - The code at the addresses stays mapped as long as the table is used.
            pub unsafe fn load(resolve: &mut super::Resolve<'_>) -> Self {
                Self {
                    $( $name: Operator {
                        // SAFETY: a null pointer becomes `None`, the null niche of the function
                        // pointer; the caller vouches for the signature of any other address.
                        plan: unsafe {
                            std::mem::transmute::<*const c_void, Option<plan_type!($($kind),*)>>(
                                resolve(super::c_name(concat!(
                                    "aclnn", stringify!($name), "GetWorkspaceSize\0"
                                ))),
                            )
                        },
                        // SAFETY: a null pointer becomes `None`, the null niche of the function
                        // pointer; the second phase of every operator has the type `Run`.
                        run: unsafe { std::mem::transmute::<*const c_void, Option<Run>>(
                            resolve(super::c_name(concat!("aclnn", stringify!($name), "\0"))),
                        ) },
                    }, )*
                }
            }

            /// The functions that this table lacks.
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

use kind::{
    DataType, In, Ins, Ints, Num, OptIn, OptIns, OptInts, OptNum, OptOut, OptOuts, Out, Outs, Ref,
    Text,
};
for_each_operator! {
    declare
    /// The operators of training. An installation may lack any of them.
    AclOperators
}
for_each_rotary_operator! {
    declare
    /// The stock rotary operators. An installation may lack any of them.
    AclRotary
}
for_each_fused_operator! {
    declare
    /// Operators of training whose first phases are generated. An installation may lack any.
    AclFused
}
