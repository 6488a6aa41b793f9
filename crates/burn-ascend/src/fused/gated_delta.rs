//! The gated delta rule: its products by the vendor's operator, and what lies between them by
//! rope-ascend's kernels.
//!
//! In the names of burn-attention's chunks, with S the state before a chunk and S' that after it:
//!
//! - \[own, reading\] = T \[beta v, beta exp(c) k\], and N = own - reading S
//! - \[S'; out\] = map S + left^T own, left = \[keys to the end, weights^T\],
//!   map = \[exp(c(L)) 1; exp(c) q\] - left^T reading
//!
//! So a chunk's state takes one product and one sum; outputs are computed of all chunks of a block.
//! Backward, with E the gradient of S' and `joint` = \[E; dout; dZ\]:
//!
//! - the gradient of S is map^T \[E; dout\]: one product and one copy for each chunk
//! - dN = left \[E; dout\], and dZ = T^T dN, that of beta v - beta exp(c) k S
//! - N joint^T and \[dout; dZ\] S^T have the gradients of keys, queries, weights and A.

use std::ops::Range;
use std::sync::Arc;

use burn::backend::ops::FloatTensorOps;
use burn::backend::tensor::FloatTensor;
use burn::backend::{DType, Shape, Slice, TensorData, TensorMetadata};
use burn_attention::composed::gated_delta as composed;
use burn_attention::{GatedDeltaOp, GatedDeltaOps, KeptStates};
use burn_fused::like;
use burn_fused::primitive::cast;
use rope_ascend::aclnn::Number;
use rope_ascend::rope::{DeltaGradient, DeltaLocal, DeltaPrepare, DeltaSizes};
use rope_ascend::sys::CubeMath;

use super::{Outputs, Refusal, kernel_type, layer_kernels, read, write};
use crate::Ascend;
use crate::context::Context;
use crate::ops::launch::{self, Out};
use crate::ops::{movement, views};
use crate::tensor::AscendTensor;

const CHUNK: usize = DeltaSizes::CHUNK;
/// The numbers of a chunk's tokens, as rows: g comes first.
const NUMBERS: usize = 6;
const BETA: usize = 1;
const FROM_START: usize = 2;
const TO_END: usize = 3;
/// What normalises q, then k.
const NORMS: usize = 4;
/// The logarithm of the decay between sequences: finite, so that no product with it is NaN.
const FORGOTTEN: f32 = -1e30;

impl GatedDeltaOps for Ascend {
    fn gated_delta_forward(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        g: FloatTensor<Self>,
        beta: FloatTensor<Self>,
        op: GatedDeltaOp,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let sizes = sizes(&q, &v);
        let count = match op.keeps_states {
            true => sizes.tokens.div_ceil(CHUNK) + 1,
            false => 1,
        };
        let states = [count, sizes.matrices(), sizes.key_dim, sizes.value_dim];
        let outputs = Outputs::new(&q, [like(&v), (Shape::from(states), g.dtype())]);
        let outcome = forward([&q, &k, &v, &g, &beta], &op).map_err(|refusal| (refusal, ()));
        let composed = |()| composed::forward::<Self>([q, k, v, g, beta], &op).into();
        outputs.or_composed(outcome, composed).into()
    }

    fn gated_delta_backward(
        kept: KeptStates<Self>,
        gradient: FloatTensor<Self>,
        op: GatedDeltaOp,
    ) -> (
        FloatTensor<Self>,
        FloatTensor<Self>,
        FloatTensor<Self>,
        FloatTensor<Self>,
        FloatTensor<Self>,
    ) {
        let inputs = [&kept.q, &kept.k, &kept.v, &kept.g, &kept.beta];
        let outputs = Outputs::new(&kept.q, inputs.map(like));
        let outcome = backward(&kept, &gradient, &op).map_err(|refusal| (refusal, ()));
        let composed = |()| composed::backward::<Self>(kept, gradient, &op);
        outputs.or_composed(outcome, composed).into()
    }
}

fn sizes(q: &AscendTensor, v: &AscendTensor) -> DeltaSizes {
    let [batch, tokens, key_heads, key_dim] = q.shape().dims();
    let [_, _, heads, value_dim] = v.shape().dims();
    DeltaSizes {
        batch,
        tokens,
        key_heads,
        heads,
        key_dim,
        value_dim,
    }
}

/// A pass over dense inputs; where a sequence starts, g forgets all.
struct Run {
    context: Arc<Context>,
    sizes: DeltaSizes,
    inputs: [AscendTensor; 5],
}

/// The factors of a block of chunks, `[units, ..]` each: a unit is a chunk of a matrix.
struct Factors {
    /// The keys to the end, and the weights, transposed: `[.., 64, key_dim + 64]`.
    left: AscendTensor,
    /// `own` and `reading`, `[.., 64, value_dim + key_dim]`.
    driven: AscendTensor,
    /// What `left` times `reading` is subtracted from, `[.., key_dim + 64, key_dim]`.
    base: AscendTensor,
}

/// What the backward needs besides.
struct Local {
    /// q, then k, `[.., 128, key_dim]`.
    qk: AscendTensor,
    /// `[.., 6, 64]`
    numbers: AscendTensor,
    /// v, `[.., 64, value_dim]`.
    values: AscendTensor,
    /// E, dout and dZ, `[.., key_dim + 128, value_dim]`; only dout is there.
    joint: AscendTensor,
    /// P, transposed, `[.., 64, 64]`.
    decays: AscendTensor,
    /// T, `[.., 64, 64]`.
    inverse: AscendTensor,
}

impl Run {
    fn new(inputs: [&AscendTensor; 5], op: &GatedDeltaOp) -> Result<Self, Refusal> {
        let [q, _, v, ..] = inputs;
        kernel_type(q.dtype())?;
        let context = q.context()?.clone();
        let sizes = sizes(q, v);
        let [q, k, v, mut g, beta] = inputs.map(|x| x.clone().contiguous());
        let starts = op.sequences.starts();
        if starts.len() > 1 {
            let mut logs = vec![0.0; sizes.tokens];
            for start in &starts[1..] {
                logs[*start] = FORGOTTEN;
            }
            let logs = upload(&context, logs, [1, sizes.tokens, 1]);
            g = Ascend::float_add(g, logs);
        }
        Ok(Self {
            context,
            sizes,
            inputs: [q, k, v, g, beta],
        })
    }

    fn empty<const D: usize>(&self, dims: [usize; D]) -> AscendTensor {
        AscendTensor::empty_in(&self.context, Shape::from(dims), DType::F32)
    }

    fn zeros(&self) -> AscendTensor {
        let device = self.context.device();
        movement::zeros(&device, Shape::from([1, 1, 1]), DType::F32)
    }

    /// The units of a range of chunks.
    fn at(&self, units: &AscendTensor, chunks: Range<usize>) -> AscendTensor {
        let matrices = self.sizes.matrices();
        part(units, 0, chunks.start * matrices..chunks.end * matrices)
    }

    fn factors(
        &self,
        chunks: &Range<usize>,
        gradient: Option<&AscendTensor>,
    ) -> Result<(Factors, Option<Local>), Refusal> {
        let DeltaSizes {
            key_dim, value_dim, ..
        } = self.sizes;
        let units = chunks.len() * self.sizes.matrices();
        let kernels = layer_kernels(&self.context)?;
        let [q, k, v, g, beta] = &self.inputs;
        let mut qk = self.empty([units, 2 * CHUNK, key_dim]);
        let mut driven = self.empty([units, CHUNK, value_dim + key_dim]);
        let mut left = self.empty([units, CHUNK, key_dim + CHUNK]);
        let mut base = self.empty([units, key_dim + CHUNK, key_dim]);
        let mut numbers = self.empty([units, NUMBERS, CHUNK]);
        let mut kept = gradient.map(|gradient| {
            let values = self.empty([units, CHUNK, value_dim]);
            let joint = self.empty([units, key_dim + 2 * CHUNK, value_dim]);
            let decays = self.empty([units, CHUNK, CHUNK]);
            (gradient, values, joint, decays)
        });
        let backward = match &mut kept {
            Some((gradient, values, joint, _)) => Some(DeltaGradient {
                gradient: read(gradient)?,
                values: write(values)?,
                joint: write(joint)?,
            }),
            None => None,
        };
        kernels.prepare_delta(DeltaPrepare {
            element: kernel_type(q.dtype())?,
            sizes: self.sizes,
            chunks: chunks.clone(),
            epsilon: composed::NORM_EPSILON as f32,
            q: read(q)?,
            k: read(k)?,
            v: read(v)?,
            g: read(g)?,
            beta: read(beta)?,
            qk: write(&mut qk)?,
            driven: write(&mut driven)?,
            left: write(&mut left)?,
            base: write(&mut base)?,
            numbers: write(&mut numbers)?,
            backward,
        })?;
        let products = products(&qk);
        let mut inverse = self.empty([units, CHUNK, CHUNK]);
        kernels.local_delta(DeltaLocal {
            sizes: self.sizes,
            chunks: chunks.clone(),
            products: read(&products)?,
            numbers: read(&numbers)?,
            left: write(&mut left)?,
            inverse: write(&mut inverse)?,
            decays: match &mut kept {
                Some((.., decays)) => Some(write(decays)?),
                None => None,
            },
        })?;
        drop(products);
        let driven = Ascend::float_matmul(inverse.clone(), driven);
        let factors = Factors { left, driven, base };
        let local = kept.map(|(_, values, joint, decays)| Local {
            qk,
            numbers,
            values,
            joint,
            decays,
            inverse,
        });
        Ok((factors, local))
    }

    /// `[units, 64, channels]` to `[batch, tokens of the chunks, heads, channels]`, in a type. The
    /// heads of v that share a head of k are added, if these are wanted.
    fn unfold(&self, x: &AscendTensor, heads: usize, dtype: DType) -> AscendTensor {
        let [units, _, channels] = x.shape().dims();
        let (chunks, batch) = (units / self.sizes.matrices(), self.sizes.batch);
        let group = self.sizes.heads / heads;
        let shape = Shape::from([chunks, batch, heads, group, CHUNK, channels]);
        let mut x = views::reshape(x.clone(), &shape);
        if group > 1 {
            x = Ascend::float_sum_dim(x, 3);
        }
        let x = views::reshape(x, &Shape::from([chunks, batch, heads, CHUNK, channels]));
        let x = views::permute(&x, &[1, 0, 3, 2, 4]);
        let x = cast::<Ascend>(x, dtype.into());
        views::reshape(x, &Shape::from([batch, chunks * CHUNK, heads, channels]))
    }

    /// The parts of blocks one after the other, without the tokens after the last.
    fn joined(&self, parts: Vec<AscendTensor>) -> AscendTensor {
        let whole = match <[AscendTensor; 1]>::try_from(parts) {
            Ok([whole]) => whole,
            Err(parts) => Ascend::float_cat(parts, 1),
        };
        part(&whole, 1, 0..self.sizes.tokens)
    }
}

fn upload<const D: usize>(context: &Context, numbers: Vec<f32>, shape: [usize; D]) -> AscendTensor {
    AscendTensor::upload(&context.device(), TensorData::new(numbers, shape))
}

/// A range of an axis.
fn part(x: &AscendTensor, axis: usize, range: Range<usize>) -> AscendTensor {
    let mut slices = vec![Slice::full(); axis];
    slices.push(Slice::from(range));
    views::slice(x, &slices).0
}

/// The failure of a result, if any.
fn done(written: &AscendTensor) -> Result<(), Refusal> {
    match written.failure() {
        Some(error) => Err(error.clone().into()),
        None => Ok(()),
    }
}

/// Writes a product through a dense view of memory that only the caller holds.
fn multiply_into(target: &AscendTensor, x: &AscendTensor, y: &AscendTensor) -> Result<(), Refusal> {
    let out = Out::Over(target.clone());
    done(&launch::compute([x, y], out, |ops, [x, y], out| {
        ops.batch_mm(x, y, out, CubeMath::KEEP_DTYPE)
    }))
}

/// Adds `times` x through a view of such memory.
fn add_into(target: &AscendTensor, times: i64, x: &AscendTensor) -> Result<(), Refusal> {
    let out = Out::Over(target.clone());
    done(&launch::compute([target, x], out, |ops, [y, x], out| {
        ops.add(y, x, Number::Int(times), out)
    }))
}

/// k q^T and k k^T, `[.., 64, 128]`, of q, then k.
fn products(qk: &AscendTensor) -> AscendTensor {
    Ascend::float_matmul(part(qk, 1, CHUNK..2 * CHUNK), views::swap(qk, 1, 2))
}

/// Copies through such a view.
fn copy_into(target: &AscendTensor, x: &AscendTensor) -> Result<(), Refusal> {
    movement::write(target, x).map_or(Ok(()), |error| Err(error.into()))
}

fn forward(inputs: [&AscendTensor; 5], op: &GatedDeltaOp) -> Result<[AscendTensor; 2], Refusal> {
    let run = Run::new(inputs, op)?;
    let DeltaSizes {
        heads,
        key_dim,
        value_dim,
        ..
    } = run.sizes;
    let (dtype, matrices) = (inputs[2].dtype(), run.sizes.matrices());
    let blocks = composed::blocks_of(op, inputs[0], inputs[2]);
    // All states, or those of a block.
    let chunks = match op.keeps_states {
        true => run.sizes.tokens.div_ceil(CHUNK),
        false => blocks.iter().map(Range::len).max().unwrap_or(0),
    };
    let states = run.empty([(chunks + 1) * matrices, key_dim, value_dim]);
    copy_into(&run.at(&states, 0..1), &run.zeros())?;
    let mut last = 0;
    let mut outs = Vec::new();
    for block in blocks {
        let (Factors { left, driven, base }, _) = run.factors(&block, None)?;
        let product = Ascend::float_matmul(views::swap(&left, 1, 2), driven);
        let added = part(&product, 2, 0..value_dim);
        let map = Ascend::float_sub(base, part(&product, 2, value_dim..value_dim + key_dim));
        let [of_state, of_out] = [0..key_dim, key_dim..key_dim + CHUNK];
        if !op.keeps_states && last > 0 {
            copy_into(&run.at(&states, 0..1), &run.at(&states, last..last + 1))?;
            last = 0;
        }
        let first = last;
        for chunk in 0..block.len() {
            let [map, added] = [&map, &added].map(|x| {
                let x = part(x, 1, of_state.clone());
                run.at(&x, chunk..chunk + 1)
            });
            let next = run.at(&states, last + 1..last + 2);
            multiply_into(&next, &map, &run.at(&states, last..last + 1))?;
            add_into(&next, 1, &added)?;
            last += 1;
        }
        let before = run.at(&states, first..last);
        let out = Ascend::float_matmul(part(&map, 1, of_out.clone()), before);
        let out = Ascend::float_add(out, part(&added, 1, of_out));
        outs.push(run.unfold(&out, heads, dtype));
    }
    let states = match op.keeps_states {
        true => states,
        false => movement::copy(&run.at(&states, last..last + 1)),
    };
    let shape = Shape::from([states.dims()[0] / matrices, matrices, key_dim, value_dim]);
    Ok([run.joined(outs), views::reshape(states, &shape)])
}

/// The masks and factors of a backward.
struct Constants {
    /// `[1, 64, 2, 64]`: 1, then 1 where the column's token comes after the row's, negative.
    signs: AscendTensor,
    /// `[1, 64, 64]`: 1 where the column's token comes before the row's.
    before: AscendTensor,
    /// 1 where it does not.
    from_on: AscendTensor,
    /// `[1, 1, 1, 64]`: 1.
    ones: AscendTensor,
    /// `[1, 128, 1]`: the inverse square of the factor of q, then 1.
    squares: AscendTensor,
    /// The factor of q, then 1.
    scales: AscendTensor,
}

impl Constants {
    fn new(run: &Run) -> Self {
        let square = |is_one: fn(usize, usize) -> bool| {
            let row =
                move |row| (0..CHUNK).map(move |column| f32::from(u8::from(is_one(row, column))));
            (0..CHUNK).flat_map(row).collect::<Vec<f32>>()
        };
        let later = square(|row, column| column > row);
        let signs = later
            .chunks(CHUNK)
            .flat_map(|row| [1.0; CHUNK].into_iter().chain(row.iter().map(|x| -x)));
        let columns = |q: f32| [[q; CHUNK], [1.0; CHUNK]].concat();
        let key_dim = run.sizes.key_dim as f32;
        let context = &run.context;
        let shape = [1, CHUNK, CHUNK];
        Self {
            signs: upload(context, signs.collect(), [1, CHUNK, 2, CHUNK]),
            before: upload(context, square(|row, column| column < row), shape),
            from_on: upload(context, square(|row, column| column >= row), shape),
            ones: upload(context, vec![1.0; CHUNK], [1, 1, 1, CHUNK]),
            squares: upload(context, columns(key_dim), [1, 2 * CHUNK, 1]),
            scales: upload(context, columns(1.0 / key_dim.sqrt()), [1, 2 * CHUNK, 1]),
        }
    }
}

/// The gradients of a block's q, k, v, g and beta, unfolded; the gradient of the state after it
/// becomes that before it.
fn block_gradients(
    run: &Run,
    constants: &Constants,
    chunks: &Range<usize>,
    (states, gradient): (&AscendTensor, &AscendTensor),
    state_gradient: &mut AscendTensor,
) -> Result<[AscendTensor; 5], Refusal> {
    let mul = Ascend::float_mul;
    let sum = |x, y| Ascend::float_sum_dim(mul(x, y), 2);
    let matmul = Ascend::float_matmul;
    let transposed = |x: &AscendTensor| views::swap(x, 1, 2);
    let DeltaSizes {
        key_heads,
        heads,
        key_dim,
        value_dim,
        ..
    } = run.sizes;
    let units = chunks.len() * run.sizes.matrices();
    let states = run.at(states, chunks.clone());
    let (factors, local) = run.factors(chunks, Some(gradient))?;
    let Some(Local {
        qk,
        numbers,
        values,
        joint,
        decays,
        inverse,
    }) = local
    else {
        unreachable!("there is a gradient")
    };
    let Factors { left, driven, base } = factors;
    // The products would each copy rows of half the width for themselves.
    let halves = [0..value_dim, value_dim..value_dim + key_dim];
    let [written, reading] = halves.map(|half| movement::copy(&part(&driven, 2, half)));
    drop(driven);
    add_into(&written, -1, &matmul(reading.clone(), states.clone()))?;
    let map = Ascend::float_sub(base, matmul(transposed(&left), reading));

    // E, from the last chunk to the first.
    let (ends, known) = (
        part(&joint, 1, 0..key_dim),
        part(&joint, 1, 0..key_dim + CHUNK),
    );
    let all = chunks.len();
    copy_into(&run.at(&ends, all - 1..all), state_gradient)?;
    for chunk in (1..all).rev() {
        let map = transposed(&run.at(&map, chunk..chunk + 1));
        let before = run.at(&ends, chunk - 1..chunk);
        copy_into(&before, &matmul(map, run.at(&known, chunk..chunk + 1)))?;
    }
    if chunks.start > 0 {
        *state_gradient = matmul(transposed(&run.at(&map, 0..1)), run.at(&known, 0..1));
    }
    drop(map);
    let dwritten = matmul(left, known);
    let dalone = part(&joint, 1, key_dim + CHUNK..key_dim + 2 * CHUNK);
    copy_into(&dalone, &matmul(transposed(&inverse), dwritten))?;
    drop(inverse);
    let row = |index: usize| part(&numbers, 1, index..index + 1);
    let column = |index: usize| transposed(&row(index));
    let of_values = sum(dalone.clone(), values);
    let narrow = run.inputs[0].dtype();
    let dv = run.unfold(&mul(dalone, column(BETA)), heads, narrow);
    let cross = matmul(written, transposed(&joint));
    // Of exp(c) q, and of -beta exp(c) k.
    let of_states = matmul(
        part(&joint, 1, key_dim..key_dim + 2 * CHUNK),
        transposed(&states),
    );
    let ending = Ascend::float_sum_dims(mul(ends, states), &[1, 2]);
    drop(joint);

    // Of q and k, but for the weights and A.
    let rate = mul(column(BETA), column(FROM_START));
    let scales = Ascend::float_cat(vec![column(FROM_START), Ascend::float_neg(rate)], 1);
    let along = sum(of_states.clone(), qk.clone());
    let keys = part(&qk, 1, CHUNK..2 * CHUNK);
    let dqk = mul(of_states, scales.clone());
    let of_ends = part(&cross, 2, 0..key_dim);
    let dto_end = mul(sum(of_ends.clone(), keys.clone()), column(TO_END));
    let dkeys = part(&dqk, 1, CHUNK..2 * CHUNK);
    add_into(&dkeys, 1, &mul(of_ends, column(TO_END)))?;

    // Of the weights and of A, transposed and beside each other, times the decays.
    let pairs = |x: AscendTensor| views::reshape(x, &Shape::from([units, CHUNK, 2, CHUNK]));
    let decays = views::reshape(decays, &Shape::from([units, CHUNK, 1, CHUNK]));
    let decayed = mul(pairs(part(&cross, 2, key_dim..key_dim + 2 * CHUNK)), decays);
    drop(cross);
    let decayed = mul(decayed, constants.signs.clone());
    let as_pair = |x: AscendTensor| views::reshape(x, &Shape::from([units, 1, 1, CHUNK]));
    let ones = views::expand(&constants.ones, &Shape::from([units, 1, 1, CHUNK]));
    let rates = Ascend::float_cat(vec![ones, as_pair(row(BETA))], 2);
    // Again, for they would be among the most that is in memory at once.
    let logs = mul(pairs(products(&qk)), decayed.clone());
    let dbeta = Ascend::float_sum_dim(part(&logs, 2, 1..2), 1);
    let dbeta = views::reshape(dbeta, &Shape::from([units, CHUNK, 1]));
    let logs = Ascend::float_sum_dim(mul(logs, rates.clone()), 2);
    let logs = views::reshape(logs, &Shape::from([units, CHUNK, CHUNK]));
    let dproducts = mul(decayed, rates);
    let dproducts = views::reshape(dproducts, &Shape::from([units, CHUNK, 2 * CHUNK]));
    add_into(&dqk, 1, &matmul(transposed(&dproducts), keys))?;
    add_into(&dkeys, 1, &matmul(dproducts, qk.clone()))?;
    drop(dkeys);

    // Of beta and of g.
    let known = part(&along, 1, CHUNK..2 * CHUNK);
    let dbeta = Ascend::float_add(dbeta, of_values);
    let dbeta = Ascend::float_sub(dbeta, mul(known, column(FROM_START)));
    let dfrom_start = mul(along, scales);
    let dfrom_start = Ascend::float_add(
        part(&dfrom_start, 1, 0..CHUNK),
        part(&dfrom_start, 1, CHUNK..2 * CHUNK),
    );
    let between = matmul(constants.before.clone(), logs);
    let between = sum(between, constants.from_on.clone());
    let through = part(&column(FROM_START), 1, CHUNK - 1..CHUNK);
    let dg = Ascend::float_add(between, mul(ending, through));
    let dg = Ascend::float_add(dg, matmul(constants.before.clone(), dto_end));
    let dg = Ascend::float_add(dg, matmul(constants.from_on.clone(), dfrom_start));

    // Of q and k as they came.
    let along = mul(sum(dqk.clone(), qk.clone()), constants.squares.clone());
    let dqk = Ascend::float_sub(dqk, mul(qk, along));
    let norms = part(&numbers, 1, NORMS..NORMS + 2);
    let norms = views::reshape(norms, &Shape::from([units, 2 * CHUNK, 1]));
    let dqk = mul(dqk, mul(norms, constants.scales.clone()));
    Ok([
        run.unfold(&part(&dqk, 1, 0..CHUNK), key_heads, narrow),
        run.unfold(&part(&dqk, 1, CHUNK..2 * CHUNK), key_heads, narrow),
        dv,
        run.unfold(&dg, heads, DType::F32),
        run.unfold(&dbeta, heads, DType::F32),
    ])
}

fn backward(
    kept: &KeptStates<Ascend>,
    gradient: &AscendTensor,
    op: &GatedDeltaOp,
) -> Result<[AscendTensor; 5], Refusal> {
    let KeptStates {
        q,
        k,
        v,
        g,
        beta,
        states,
    } = kept;
    let inputs = [q, k, v, g, beta];
    let run = Run::new(inputs, op)?;
    let constants = Constants::new(&run);
    let DeltaSizes {
        key_dim, value_dim, ..
    } = run.sizes;
    let units = states.len() / (key_dim * value_dim);
    let states = views::reshape(states.clone(), &Shape::from([units, key_dim, value_dim]));
    let gradient = gradient.clone().contiguous();
    let mut state_gradient = run.zeros();
    let mut parts: [Vec<AscendTensor>; 5] = Default::default();
    for block in composed::blocks_of(op, q, v).into_iter().rev() {
        let given = (&states, &gradient);
        let found = block_gradients(&run, &constants, &block, given, &mut state_gradient)?;
        for (parts, part) in parts.iter_mut().zip(found) {
            parts.insert(0, part);
        }
    }
    let mut shapes = inputs.map(TensorMetadata::shape).into_iter();
    Ok(parts.map(|parts| {
        let whole = run.joined(parts);
        match shapes.next() {
            Some(shape) => views::reshape(whole, &shape),
            None => whole,
        }
    }))
}

#[cfg(test)]
mod tests {
    use ascend_sim::control;
    use burn::backend::Backend;
    use burn::backend::flex::{Flex, FlexDevice};
    use burn::backend::ops::FloatTensorOps;
    use burn_attention::Sequences;

    use super::*;
    use crate::faults::{Alone, values};

    /// Numbers between -1 and 1.
    fn numbers(seed: u64, count: usize) -> Vec<f32> {
        let mut state = seed;
        let next = |_| {
            // The generator of Steele, Lea and Flood 2014, SplitMix.
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut z = state;
            z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            (z ^ (z >> 31)) as i64 as f32 / i64::MAX as f32
        };
        (0..count).map(next).collect()
    }

    /// Keys and decays.
    #[derive(Clone, Copy, Debug, PartialEq)]
    enum Kind {
        Random,
        /// Nearly one key for all tokens, written at a rate of nearly 1.
        Similar,
        /// Tokens that forget all beside such that forget little.
        Forgetful,
    }

    #[derive(Clone, Debug)]
    struct Case {
        sizes: DeltaSizes,
        op: GatedDeltaOp,
        kind: Kind,
        dtype: DType,
    }

    impl Case {
        /// q, k, v, g, beta and the gradient of the output.
        fn inputs(&self) -> [TensorData; 6] {
            let DeltaSizes {
                batch,
                tokens,
                key_heads,
                heads,
                key_dim,
                value_dim,
            } = self.sizes;
            let (keys, values) = (
                [batch, tokens, key_heads, key_dim],
                [batch, tokens, heads, value_dim],
            );
            let data = |seed, shape: &[usize], f: &dyn Fn(usize, f32) -> f32| {
                let numbers = numbers(seed, shape.iter().product()).into_iter();
                let numbers: Vec<f32> = numbers.enumerate().map(|(at, x)| f(at, x)).collect();
                TensorData::new(numbers, shape.to_vec())
            };
            let plain = |_, x| x;
            let key = numbers(9, key_dim);
            let [q, k, v, gradient] = [
                data(1, &keys, &plain),
                data(2, &keys, &|at, x| match self.kind {
                    Kind::Similar => key[at % key_dim] + 1e-2 * x,
                    _ => x,
                }),
                data(3, &values, &plain),
                data(6, &values, &plain),
            ]
            .map(|data| data.convert_dtype(self.dtype));
            let g = data(4, &[batch, tokens, heads], &|at, x| match self.kind {
                Kind::Random => 0.5 * (x - 1.0),
                Kind::Similar => -1e-4,
                Kind::Forgetful if at / heads % 64 < 20 => -1e3,
                Kind::Forgetful => -1e-3,
            });
            let beta = data(5, &[batch, tokens, heads], &|_, x| match self.kind {
                Kind::Similar => 0.999,
                _ => 0.5 * (x + 1.0),
            });
            [q, k, v, g, beta, gradient]
        }

        /// The output, the states, and all gradients if these are kept.
        fn run<B: GatedDeltaOps>(&self, device: &B::Device) -> Vec<Vec<f32>> {
            let tensor = |data: TensorData| B::float_from_data(data, device);
            let [q, k, v, g, beta, gradient] = self.inputs().map(tensor);
            let inputs = [&q, &k, &v, &g, &beta].map(Clone::clone);
            let (out, states) = B::gated_delta_forward(q, k, v, g, beta, self.op.clone());
            if !self.op.keeps_states {
                return [out, states].map(|x| numbers_of::<B>(x)).to_vec();
            }
            let [q, k, v, g, beta] = inputs;
            let kept = KeptStates {
                q,
                k,
                v,
                g,
                beta,
                states: states.clone(),
            };
            let (dq, dk, dv, dg, dbeta) = B::gated_delta_backward(kept, gradient, self.op.clone());
            [out, states, dq, dk, dv, dg, dbeta]
                .map(|x| numbers_of::<B>(x))
                .to_vec()
        }
    }

    fn numbers_of<B: Backend>(x: FloatTensor<B>) -> Vec<f32> {
        let data = burn::backend::read_sync(B::float_into_data(x)).expect("computed");
        data.iter::<f32>().collect()
    }

    /// The largest difference as a part of the largest number.
    fn apart(found: &[f32], expected: &[f32]) -> f32 {
        assert_eq!(found.len(), expected.len());
        let size = expected.iter().fold(0.1_f32, |size, x| size.max(x.abs()));
        let apart = found.iter().zip(expected).map(|(x, y)| (x - y).abs());
        let apart = apart.fold(0.0_f32, |most, x| if x <= most { most } else { x });
        apart / size
    }

    const SIZES: DeltaSizes = DeltaSizes {
        batch: 2,
        tokens: 150,
        key_heads: 2,
        heads: 4,
        key_dim: 16,
        value_dim: 24,
    };

    fn case(sizes: DeltaSizes, cu_seqlens: &[usize], blocks: Option<usize>) -> Case {
        Case {
            sizes,
            op: GatedDeltaOp {
                sequences: Sequences::packed(cu_seqlens, sizes.tokens).expect("valid lengths"),
                keeps_states: true,
                blocks,
            },
            kind: Kind::Random,
            dtype: DType::F32,
        }
    }

    fn cases() -> Vec<Case> {
        let mut cases = Vec::new();
        for (tokens, heads) in [(1, 2), (63, 2), (64, 4), (65, 2), (200, 4)] {
            let sizes = DeltaSizes {
                tokens,
                heads,
                ..SIZES
            };
            cases.push(case(sizes, &[0, tokens], None));
        }
        let packed = [0, 1, 2, 2, 3, 40, 64, 65, 127, 129, 150];
        for blocks in [None, Some(1)] {
            cases.push(case(SIZES, &packed, blocks));
            let mut last = case(SIZES, &[0, 150], blocks);
            last.op.keeps_states = false;
            cases.push(last);
        }
        for kind in [Kind::Similar, Kind::Forgetful] {
            cases.push(Case {
                kind,
                ..case(SIZES, &[0, 150], None)
            });
        }
        for dtype in [DType::F16, DType::BF16] {
            cases.push(Case {
                dtype,
                ..case(SIZES, &packed, None)
            });
        }
        cases
    }

    #[test]
    fn results_are_those_of_the_recurrence() {
        let alone = Alone::new();
        for case in cases() {
            let (found, expected) = (case.run::<Ascend>(&alone.0), case.run::<Flex>(&FlexDevice));
            for (index, (found, expected)) in found.iter().zip(&expected).enumerate() {
                let within = match (case.dtype, case.kind) {
                    (DType::F16, _) => 1e-3,
                    (DType::BF16, _) => 8e-3,
                    (_, Kind::Similar) => 1e-4,
                    _ => 1e-5,
                };
                let apart = apart(found, expected);
                assert!(apart <= within, "{case:?}: {index} is {apart:e} apart");
            }
        }
        let _synchronised = Ascend::sync(&alone.0);
    }

    /// Channels that are no whole blocks are composed.
    #[test]
    fn a_pass_is_few_operators_and_composed_beyond_the_limits() {
        let alone = Alone::new();
        for (value_dim, most) in [(24, 110), (25, usize::MAX)] {
            let case = case(DeltaSizes { value_dim, ..SIZES }, &[0, 150], None);
            control::clear_calls();
            let found = case.run::<Ascend>(&alone.0);
            let calls = control::calls();
            let launched = |name: &str| {
                name.starts_with("aclnn") && !name.ends_with("GetWorkspaceSize")
                    || name.starts_with("aclrtLaunchKernel")
            };
            let count = calls.iter().filter(|call| launched(call.function)).count();
            assert!(count <= most, "{count} launches");
            assert_eq!(count > 200, value_dim == 25, "{count} launches");
            let expected = case.run::<Flex>(&FlexDevice);
            assert!(apart(&found[0], &expected[0]) <= 1e-5);
        }
        let _synchronised = Ascend::sync(&alone.0);
    }

    /// The most bytes in use beside those before.
    fn peak(alone: &Alone, work: impl FnOnce()) -> usize {
        let _synchronised = Ascend::sync(&alone.0);
        alone.0.reset_peak_memory().expect("an open device");
        let before = alone.0.memory().expect("an open device").live_bytes;
        work();
        let _synchronised = Ascend::sync(&alone.0);
        alone.0.memory().expect("an open device").peak_bytes - before
    }

    /// The kernels write factors that the composed pass does not have, and it masks that they lack.
    #[test]
    fn memory_is_little_more_than_that_of_ordinary_operations() {
        let alone = Alone::new();
        let sizes = DeltaSizes {
            batch: 1,
            tokens: 512,
            key_dim: 64,
            value_dim: 64,
            ..SIZES
        };
        let op = case(sizes, &[0, 512], None).op;
        let [q, k, v, g, beta, gradient] = case(sizes, &[0, 512], None)
            .inputs()
            .map(|x| Ascend::float_from_data(x, &alone.0));
        let inputs = || [&q, &k, &v, &g, &beta].map(Clone::clone);
        let mut states = None;
        let forward = peak(&alone, || {
            let [q, k, v, g, beta] = inputs();
            states = Some(Ascend::gated_delta_forward(q, k, v, g, beta, op.clone()).1);
        });
        let composed_forward = peak(&alone, || {
            drop(composed::forward::<Ascend>(inputs(), &op));
        });
        let states = states.expect("computed");
        let kept = || {
            let [q, k, v, g, beta] = inputs();
            let states = states.clone();
            KeptStates {
                q,
                k,
                v,
                g,
                beta,
                states,
            }
        };
        let backward = peak(&alone, || {
            drop(Ascend::gated_delta_backward(
                kept(),
                gradient.clone(),
                op.clone(),
            ));
        });
        let composed_backward = peak(&alone, || {
            drop(composed::backward::<Ascend>(kept(), gradient.clone(), &op));
        });
        let least = composed_forward * 4 / 5;
        assert!(forward < least, "{forward} of {composed_forward}");
        let most = composed_backward * 5 / 4;
        assert!(backward < most, "{backward} of {composed_backward}");
    }

    /// A failed input gives failed outputs of their shapes.
    #[test]
    fn failures_travel() {
        let alone = Alone::new();
        let case = case(SIZES, &[0, 150], None);
        let [q, k, v, g, beta, _] = case.inputs().map(|x| Ascend::float_from_data(x, &alone.0));
        let failure = burn::backend::ExecutionError::with_context("seeded");
        let q = AscendTensor::failed(&alone.0, q.shape(), q.dtype(), failure);
        let inputs = [&q, &k, &v, &g, &beta].map(Clone::clone);
        let gradient = v.clone();
        let (out, states) = Ascend::gated_delta_forward(q, k, v, g, beta, case.op.clone());
        assert_eq!(states.dims(), [4, 8, 16, 24]);
        assert!(values(out).is_err() && values(states.clone()).is_err());
        let [q, k, v, g, beta] = inputs;
        let kept = KeptStates {
            q,
            k,
            v,
            g,
            beta,
            states,
        };
        let (dq, .., dbeta) = Ascend::gated_delta_backward(kept, gradient, case.op);
        assert_eq!(
            (dq.dims(), dbeta.dims()),
            (&[2, 150, 2, 16][..], &[2, 150, 4][..])
        );
        assert!(values(dq).is_err() && values(dbeta).is_err());
        let _synchronised = Ascend::sync(&alone.0);
    }
}
