//! RMSNorm of each head of q and k fused with their rotation: definition and entry points.

use std::mem::MaybeUninit;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::{HEADS_OUTSIDE_TILE_BYTES, Operand, Rotator, Stream, TILE_BYTES};
use crate::element::{Element, Real};
use crate::error::{Result, RopeError};
use crate::kernels::norm::{AHEAD, BLOCK_TOKENS, NormTile, Part, TURNS, factors_len};
use crate::kernels::tile::Coefficients;
use crate::layout::{HeadsLayout, HeadsRef, Strides};
use crate::parallel::for_each_block;
use crate::spec::{Geometry, Pairing};

/// Values aligned to a cache line, since a register that spans two lines is read and written in two
/// accesses.
struct Lines<T> {
    values: Vec<T>,
    start: usize,
    len: usize,
}

impl<T: Copy> Lines<T> {
    fn new(len: usize, value: T) -> Self {
        let before = 64 / size_of::<T>() - 1;
        let values = vec![value; before + len];
        // Unaligned values are correct but slower.
        let start = values.as_ptr().align_offset(64).min(before);
        Self { values, start, len }
    }

    fn as_mut_slice(&mut self) -> &mut [T] {
        &mut self.values[self.start..][..self.len]
    }

    fn as_slice(&self) -> &[T] {
        &self.values[self.start..][..self.len]
    }
}

/// Order of the norm of heads and their rotation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NormOrder {
    /// The norm first, as in Qwen3, Qwen3-VL, Qwen3.5, Gemma 3, GLM-4.5, LFM2, EXAONE 4 and most
    /// others.
    #[default]
    BeforeRotation,
    /// The rotation first, as in Hunyuan (dense, MoE, VL), Llama 4 and nanochat.
    AfterRotation,
}

/// RMSNorm of each head of q and k: x / sqrt(mean(x^2) + eps) * weight.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "UncheckedNorm")]
pub struct HeadNorm {
    eps: f64,
    unit_offset: bool,
    order: NormOrder,
}

/// A [`HeadNorm`] in its serialized form.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct UncheckedNorm {
    eps: f64,
    #[serde(default)]
    unit_offset: bool,
    #[serde(default)]
    order: NormOrder,
}

impl TryFrom<UncheckedNorm> for HeadNorm {
    type Error = RopeError;
    fn try_from(norm: UncheckedNorm) -> Result<Self> {
        Ok(Self::new(norm.eps)?
            .with_unit_offset(norm.unit_offset)
            .with_order(norm.order))
    }
}

impl HeadNorm {
    /// Creates a norm before the rotation, with `eps` added to the mean of the squares.
    ///
    /// # Errors
    /// [`RopeError::NormEps`] unless `eps` is 0 or a normal f32 number: f32 and 16-bit heads are
    /// computed in f32.
    pub fn new(eps: f64) -> Result<Self> {
        let in_f32 = f64::from(f32::MIN_POSITIVE)..=f64::from(f32::MAX);
        if eps != 0.0 && !in_f32.contains(&eps) {
            return Err(RopeError::NormEps { found: eps });
        }
        Ok(Self {
            eps,
            unit_offset: false,
            order: NormOrder::BeforeRotation,
        })
    }

    /// Enables the unit offset: channels are multiplied by 1 + weight, as in Gemma 3 and Qwen3.5,
    /// rather than by the weight.
    pub fn with_unit_offset(mut self, unit_offset: bool) -> Self {
        self.unit_offset = unit_offset;
        self
    }

    /// Sets the order of norm and rotation.
    pub fn with_order(mut self, order: NormOrder) -> Self {
        self.order = order;
        self
    }

    /// The number added to the mean of the squares.
    pub fn eps(&self) -> f64 {
        self.eps
    }

    /// True if channels are multiplied by 1 + weight (unit offset).
    pub fn unit_offset(&self) -> bool {
        self.unit_offset
    }

    /// Order of norm and rotation.
    pub fn order(&self) -> NormOrder {
        self.order
    }

    /// The factor of each channel, then the factors of the pairs' first members in order, then
    /// those of the second members.
    fn channel_weights<A: Real>(&self, weight: Option<&[A]>, geometry: Geometry) -> Vec<A> {
        let offset = A::from_f64(if self.unit_offset { 1.0 } else { 0.0 });
        let mut weights = match weight {
            Some(weight) if self.unit_offset => weight.iter().map(|w| offset + *w).collect(),
            Some(weight) => weight.to_vec(),
            None => vec![A::from_f64(1.0); geometry.head_dim()],
        };
        let (pairs, start) = (geometry.pairs(), geometry.rotary_offset());
        let member = |j: usize, second: usize| match geometry.pairing() {
            Pairing::Half => j + second * pairs,
            Pairing::Adjacent | Pairing::InterleaveHalf => 2 * j + second,
            // Both members of the first half's pairs precede those of the second half's.
            Pairing::Quarter => {
                let skipped = if j < pairs / 2 { 0 } else { pairs / 2 };
                j + skipped + second * (pairs / 2)
            }
        };
        for second in [0, 1] {
            for j in 0..pairs {
                // Unused with the norm after the rotation.
                weights.push(weights[start + member(j, second)]);
            }
        }
        weights
    }

    /// The divisor of the kernel's sums that gives the weight's gradient if the norm comes before
    /// the rotation: the weight, or one if it is zero or so small or large that products might
    /// leave the range of numbers.
    fn divisor<A: Real>(&self, weight: A) -> A {
        match (self.order, weight.to_f64().abs()) {
            (NormOrder::AfterRotation, _) | (_, 1e-4..=1e4) => weight,
            _ => A::from_f64(1.0),
        }
    }
}

/// q or k to normalise and rotate.
#[derive(Debug)]
pub struct NormInput<'a, E: Element> {
    /// The tensor: in place, or from one buffer into another.
    pub x: Operand<'a, E>,
    /// The weight, `[head_dim]`, in the type of the arithmetic; `None` means ones.
    pub weight: Option<&'a [E::Acc]>,
}

/// The tensors that the backward of q or k reads and writes.
#[derive(Debug)]
pub struct NormGradient<'a, E: Element> {
    /// The tensor before norm and rotation.
    pub x: HeadsRef<'a, E>,
    /// The weight of the forward.
    pub weight: Option<&'a [E::Acc]>,
    /// The gradient of the result. It is replaced by the gradient of x in place, or that is written
    /// to another buffer.
    pub gradient: Operand<'a, E>,
    /// The gradient of the weight, `[head_dim]`, overwritten.
    pub weight_gradient: Option<&'a mut [E::Acc]>,
}

/// A tensor as the kernels take it.
struct NormStream<E: Element> {
    x: Part<*const E>,
    x_batch: usize,
    gradient: Option<(Part<*const E>, usize)>,
    to: Part<*mut E>,
    to_batch: usize,
    layout: HeadsLayout,
    /// The weights of [`HeadNorm::channel_weights`].
    weights: Lines<E::Acc>,
    /// [`HeadNorm::divisor`] of each; none in the forward.
    divisors: Lines<E::Acc>,
}

impl<E: Element> NormStream<E> {
    /// True if y replaces x, or dx the gradient of y.
    fn in_place(&self) -> bool {
        let from = self.gradient.map_or(self.x, |(dy, _)| dy);
        from.start == self.to.start.cast_const()
    }

    /// True if the kernel's sums are divided by the weights themselves.
    fn is_divisible(&self) -> bool {
        let mut both = self.weights.as_slice().iter().zip(self.divisors.as_slice());
        both.all(|(weight, divisor)| weight.to_f64() == divisor.to_f64())
    }
}

// SAFETY: the tasks that share it read and write rows of disjoint token ranges; the views that the
// pointers come from outlive the call that the tasks run in; `Element` requires E to be Send and
// Sync.
unsafe impl<E: Element> Sync for NormStream<E> {}

fn part<P>(start: P, strides: Strides) -> Part<P> {
    Part {
        start,
        token: strides.seq,
        head: strides.head,
    }
}

impl<A: Real> Rotator<'_, A> {
    /// Normalises and rotates each head of q, and of k if given, in one pass over memory.
    ///
    /// y = R (x * rstd * weight) with rstd = 1 / sqrt(mean(x^2) + eps) over the whole head, or
    /// y = R x * rstd * weight with the mean of (R x)^2; see [`NormOrder`].
    ///
    /// # Shapes
    /// As [`rotate`](Self::rotate); weights `[head_dim]`.
    ///
    /// # Numerics
    /// Computed in f32, or f64, and rounded once on store. A pair is multiplied by rstd, then by
    /// cos and sin times the weight, with a product and a multiply-add rounded once. Every
    /// instruction set, thread count and layout gives the same bits. Infinite and zero rows follow
    /// the formula: one infinity makes its pair NaN and the rest of its head zero.
    ///
    /// # Errors
    /// Those of [`rotate`](Self::rotate); [`RopeError::NormWeight`] if a weight is not
    /// `[head_dim]`.
    ///
    /// # Examples
    /// ```
    /// use rope_core::*;
    /// let spec = RotarySpec::builder(64).build()?;
    /// let angles = TokenAngles::<f32>::new(&spec, &Positions::text(1, 0, 10)?, None)?;
    /// let rotator = Rotator::new(spec.geometry(), angles.angles())?;
    /// let layout = HeadsLayout::contiguous(Layout::Bsnd, 1, 10, 4, 64);
    /// let mut q = vec![5f32; layout.elems()];
    /// let (norm, weight) = (HeadNorm::new(0.0)?, [2.0; 64]);
    /// let x = HeadsMut::new(&mut q, layout)?.into();
    /// rotator.norm_rotate(&norm, NormInput { x, weight: Some(&weight) }, None)?;
    /// assert!(q[..64].iter().all(|y| *y == 2.0)); // position 0 is not rotated
    /// # Ok::<(), RopeError>(())
    /// ```
    pub fn norm_rotate<E: Element<Acc = A>>(
        &self,
        norm: &HeadNorm,
        q: NormInput<'_, E>,
        k: Option<NormInput<'_, E>>,
    ) -> Result<()> {
        let mut streams = Vec::with_capacity(2);
        for (operand, names) in std::iter::once(q).chain(k).zip(NAMES) {
            let stream = Stream::new(operand.x, [names.x, names.y])?;
            let weights = self.weights(norm, operand.weight, names.weight)?;
            streams.push(NormStream {
                x: part(stream.src, stream.src_layout.strides),
                x_batch: stream.src_layout.strides.batch,
                gradient: None,
                to: part(stream.dst, stream.dst_layout.strides),
                to_batch: stream.dst_layout.strides.batch,
                layout: stream.src_layout,
                weights,
                divisors: Lines::new(0, A::ZERO),
            });
        }
        let task = self.norm_task(norm, streams)?;
        let (tokens, bytes) = (task.tokens(), task.bytes());
        if tokens == 0 {
            return Ok(());
        }
        self.parallelism.for_each_range(tokens, bytes, |tokens| {
            let mut workspace = task.workspace(tokens.len());
            task.run(tokens, &mut workspace, &mut []);
        });
        Ok(())
    }

    /// The backward of [`norm_rotate`](Self::norm_rotate): maps the gradients of the results to
    /// those of q and k in one pass, optionally in place, and computes those of the weights.
    ///
    /// With g = R^T dy and n = x * rstd, which is recomputed from x:
    /// dx = rstd * (g * weight - n * mean(g * weight * n)), and the gradient of the weight is the
    /// sum of g * n over tokens and heads.
    ///
    /// # Numerics
    /// Computed in f32, or f64. The weights' gradients are summed over blocks of 32 tokens, then
    /// over the blocks in f64: bit-identical with every instruction set and any number of threads.
    ///
    /// With the norm before the rotation, a weight whose magnitude is not between 1e-4 and 1e4,
    /// such as zero, costs a second pass over x and dy.
    ///
    /// # Errors
    /// As [`norm_rotate`](Self::norm_rotate).
    pub fn norm_rotate_backward<E: Element<Acc = A>>(
        &self,
        norm: &HeadNorm,
        q: NormGradient<'_, E>,
        k: Option<NormGradient<'_, E>>,
    ) -> Result<()> {
        let (mut streams, mut weight_gradients) = (Vec::with_capacity(2), Vec::with_capacity(2));
        let head_dim = self.geometry.head_dim();
        for (operand, names) in std::iter::once(q).chain(k).zip(NAMES) {
            let stream = Stream::new(operand.gradient, [names.dy, names.dx])?;
            let layout = operand.x.layout;
            layout.check_same(&stream.src_layout, names.x, names.dy, true)?;
            let weights = self.weights(norm, operand.weight, names.weight)?;
            let mut divisors = Lines::new(weights.len, A::ZERO);
            for (to, weight) in divisors.as_mut_slice().iter_mut().zip(weights.as_slice()) {
                *to = norm.divisor(*weight);
            }
            if let Some(gradient) = &operand.weight_gradient {
                check_weight(names.weight_gradient, gradient.len(), head_dim)?;
            }
            weight_gradients.push(operand.weight_gradient);
            let dy = part(stream.src, stream.src_layout.strides);
            streams.push(NormStream {
                x: part(operand.x.start, layout.strides),
                x_batch: layout.strides.batch,
                gradient: Some((dy, stream.src_layout.strides.batch)),
                to: part(stream.dst, stream.dst_layout.strides),
                to_batch: stream.dst_layout.strides.batch,
                layout,
                weights,
                divisors,
            });
        }
        let mut task = self.norm_task(norm, streams)?;
        let separate = weight_gradients.iter().any(Option::is_some)
            && !task.streams.iter().all(NormStream::is_divisible);
        task.sums_only = separate;
        let sums = task.run_backward();
        if separate {
            task.sums_only = false;
            task.run_backward();
        }
        let width = task.streams.len() * head_dim;
        for (i, gradient) in weight_gradients.into_iter().enumerate() {
            let (at, divisors) = (i * head_dim, task.streams[i].divisors.as_slice());
            for (channel, to) in gradient.into_iter().flatten().enumerate() {
                let block_sums = sums.as_slice().chunks_exact(width);
                let sum: f64 = block_sums.map(|sums| sums[at + channel].to_f64()).sum();
                *to = A::from_f64(match norm.order {
                    NormOrder::BeforeRotation => sum / divisors[channel].to_f64(),
                    NormOrder::AfterRotation => sum,
                });
            }
        }
        Ok(())
    }

    fn weights(
        &self,
        norm: &HeadNorm,
        weight: Option<&[A]>,
        what: &'static str,
    ) -> Result<Lines<A>> {
        if let Some(weight) = weight {
            check_weight(what, weight.len(), self.geometry.head_dim())?;
        }
        let weights = norm.channel_weights(weight, self.geometry);
        let mut lines = Lines::new(weights.len(), A::ZERO);
        lines.as_mut_slice().copy_from_slice(&weights);
        Ok(lines)
    }

    fn norm_task<E: Element<Acc = A>>(
        &self,
        norm: &HeadNorm,
        streams: Vec<NormStream<E>>,
    ) -> Result<NormTask<'_, '_, E>> {
        let q = streams[0].layout;
        self.check_shape(&q, "q")?;
        let k = streams.get(1).map(|k| k.layout);
        if let Some(k) = &k {
            q.check_same(k, "q", "k", false)?;
        }
        self.check_heads(&q, k.as_ref())?;
        let mut task = NormTask {
            rotator: self,
            norm: *norm,
            streams,
            angle_tokens: self.check_angles(q.batch, q.seq)?,
            past_caches: false,
            sums_only: false,
        };
        task.past_caches = task.bytes() >= self.stream_bytes;
        Ok(task)
    }
}

/// Names in messages for the tensors of q or of k.
struct Names {
    x: &'static str,
    y: &'static str,
    dy: &'static str,
    dx: &'static str,
    weight: &'static str,
    weight_gradient: &'static str,
}

const NAMES: [Names; 2] = [
    Names {
        x: "q",
        y: "the rotated q",
        dy: "the gradient of the rotated q",
        dx: "the gradient of q",
        weight: "the weight of q's norm",
        weight_gradient: "the gradient of the weight of q's norm",
    },
    Names {
        x: "k",
        y: "the rotated k",
        dy: "the gradient of the rotated k",
        dx: "the gradient of k",
        weight: "the weight of k's norm",
        weight_gradient: "the gradient of the weight of k's norm",
    },
];

fn check_weight(what: &'static str, found: usize, expected: usize) -> Result<()> {
    if found != expected {
        return Err(RopeError::NormWeight {
            what,
            found,
            expected,
        });
    }
    Ok(())
}

/// One call's work, shared by its threads.
struct NormTask<'r, 'a, E: Element> {
    rotator: &'r Rotator<'a, E::Acc>,
    norm: HeadNorm,
    streams: Vec<NormStream<E>>,
    angle_tokens: usize,
    past_caches: bool,
    /// True if no tensor is written and the divisors replace the weights.
    sums_only: bool,
}

/// Rows that a thread needs besides the tensors.
struct Workspace<A> {
    tile_tokens: usize,
    /// The kernel's scratch rows, and one for unneeded results.
    rows: Lines<MaybeUninit<A>>,
    factors: Lines<MaybeUninit<A>>,
}

impl<E: Element> NormTask<'_, '_, E> {
    fn tokens(&self) -> usize {
        // For a tensor without elements, their number may be too large to count.
        let any = self.streams.iter().any(|stream| stream.layout.elems() > 0);
        if any {
            self.streams[0].layout.tokens()
        } else {
            0
        }
    }

    /// Bytes of q and k.
    fn bytes(&self) -> usize {
        let elems = self.streams.iter().map(|stream| stream.layout.elems());
        elems.sum::<usize>() * size_of::<E>()
    }

    /// The number of values of a token's angles: of all its heads, if these have separate angles.
    fn row(&self) -> usize {
        2 * self.rotator.geometry.lane_count() * self.rotator.angles.own_heads().unwrap_or(1)
    }

    /// Room for work on at most `tokens` tokens.
    fn workspace(&self, tokens: usize) -> Workspace<E::Acc> {
        let row = self.row();
        let q = &self.streams[0].x;
        let tile_bytes = if q.head > q.token {
            HEADS_OUTSIDE_TILE_BYTES
        } else {
            TILE_BYTES
        };
        let fitting = (tile_bytes / (row * size_of::<E::Acc>())).clamp(1, tokens.max(1));
        let tile_tokens = match self.streams[0].gradient {
            Some(_) => fitting.next_multiple_of(BLOCK_TOKENS),
            None => fitting,
        };
        Workspace {
            tile_tokens,
            factors: Lines::new(
                TURNS * factors_len(self.rotator.geometry),
                MaybeUninit::uninit(),
            ),
            rows: Lines::new(
                (2 * TURNS * AHEAD + 1) * self.rotator.geometry.head_dim(),
                MaybeUninit::uninit(),
            ),
        }
    }

    /// Runs the backward of all tokens. Returns the contribution of each block to the gradients of
    /// the weights, `[blocks, streams, head_dim]`, to be divided by the divisors if the norm
    /// precedes the rotation.
    fn run_backward(&self) -> Lines<E::Acc> {
        let (tokens, width) = (
            self.tokens(),
            self.streams.len() * self.rotator.geometry.head_dim(),
        );
        let blocks = tokens.div_ceil(BLOCK_TOKENS);
        let tasks = self.rotator.parallelism.tasks_for(blocks, self.bytes());
        let per_task = blocks.div_ceil(tasks.max(1)).max(1);
        let mut sums = Lines::new(blocks * width, E::Acc::ZERO);
        let task_sums = sums.as_mut_slice().chunks_mut(per_task * width);
        for_each_block(task_sums.enumerate().collect(), |(at, sums)| {
            let first = at * per_task * BLOCK_TOKENS;
            let range = first..(first + sums.len() / width * BLOCK_TOKENS).min(tokens);
            let mut workspace = self.workspace(range.len());
            self.run(range, &mut workspace, sums);
        });
        sums
    }

    /// Processes the tokens of a range, counted over the batch. In the backward, the range starts a
    /// block, and the contribution of each block is added to `sums`, `[blocks, streams, head_dim]`.
    fn run(&self, tokens: Range<usize>, workspace: &mut Workspace<E::Acc>, sums: &mut [E::Acc]) {
        let geometry = self.rotator.geometry;
        let (head_dim, row) = (geometry.head_dim(), self.row());
        let mut instructions = self.rotator.instructions;
        for stream in &self.streams {
            instructions = instructions.for_values::<E>(stream.weights.as_slice());
        }
        let seq = self.streams[0].layout.seq;
        let mut token = tokens.start;
        while token < tokens.end {
            let (b, s) = (token / seq, token % seq);
            let left = (tokens.end - token).min(seq - s);
            // Only samples divide blocks: the order of sums must not depend on the number of tokens
            // of a tile.
            let in_block = if sums.is_empty() {
                0
            } else {
                token % BLOCK_TOKENS
            };
            let count = left.min(workspace.tile_tokens - in_block);
            let block = (token - tokens.start) / BLOCK_TOKENS;
            let first = token % self.angle_tokens;
            let angles = &self.rotator.angles.rows()[first * row..][..count * row];
            let kernel = E::norm_kernel(instructions.for_values::<E>(angles));
            for (i, stream) in self.streams.iter().enumerate() {
                // A tensor without heads has no elements that a token's address could be in.
                if stream.layout.heads == 0 {
                    continue;
                }
                let width = self.streams.len() * head_dim;
                let dweight = match sums.get_mut(block * width + i * head_dim..) {
                    Some(sums) => sums.as_mut_ptr(),
                    None => std::ptr::null_mut(),
                };
                // SAFETY: token (b, s) is one of the views', which `HeadsRef::new` and
                // `HeadsMut::new` checked to reach only into their buffers.
                let (x, dy, mut to) = unsafe {
                    (
                        at(stream.x, b * stream.x_batch, s),
                        stream.gradient.map(|(dy, batch)| at(dy, b * batch, s)),
                        at_mut(stream.to, b * stream.to_batch, s),
                    )
                };
                let rows: *mut E::Acc = workspace.rows.as_mut_slice().as_mut_ptr().cast();
                let mut weights = &stream.weights;
                if self.sums_only {
                    weights = &stream.divisors;
                    to = Part {
                        start: rows.wrapping_add(2 * TURNS * AHEAD * head_dim).cast(),
                        token: 0,
                        head: 0,
                    };
                }
                let tile = NormTile {
                    x,
                    dy,
                    to,
                    tokens: count,
                    heads: stream.layout.heads,
                    geometry,
                    after: self.norm.order == NormOrder::AfterRotation,
                    eps: E::Acc::from_f64(self.norm.eps),
                    coefficients: self.coefficients(angles.as_ptr()),
                    head_coefficients: match self.rotator.angles.own_heads() {
                        Some(_) => 2 * geometry.lane_count(),
                        None => 0,
                    },
                    weight: weights.as_slice().as_ptr(),
                    dweight,
                    dweight_stride: width,
                    in_block,
                    stream: self.past_caches && !stream.in_place() && !self.sums_only,
                    scratch: rows,
                    factors: workspace.factors.as_mut_slice().as_mut_ptr().cast(),
                };
                // SAFETY: an `InstructionSet` exists only for instructions that the processor has.
                // `HeadsRef::new` and `HeadsMut::new` checked that views reach only into their
                // buffers and, where written, name each element once; source and destination are
                // one view, or a shared and an exclusive borrow, and shapes agree. `Geometry::new`
                // keeps the rotated part within the head and Quarter's pairs even. There are cos
                // and sin for `count` tokens from `first`, and for each of their heads if these
                // have their own: a tile does not cross samples, `check_angles` counted the rows
                // and `check_heads` the heads. `channel_weights` made `head_dim + rotary_dim`
                // weights, and there are as many divisors; a row of `rows` that is no scratch row
                // takes the results if there are to be sums only. In the backward `sums` holds
                // `head_dim` values for each block and stream, and belongs to this thread, as the
                // rows do.
                unsafe { kernel(&tile) };
            }
            token += count;
        }
    }

    /// The forward's c1, s1, c2, s2 among a row's cosines and sines.
    fn coefficients(&self, row: *const E::Acc) -> Coefficients<E::Acc> {
        let geometry = self.rotator.geometry;
        let (lanes, shared) = (geometry.lane_count(), !geometry.per_channel());
        let second = if shared { 0 } else { geometry.pairs() };
        let [cos, sin] =
            [0, lanes].map(|start| [start, start + second].map(|at| row.wrapping_add(at)));
        Coefficients {
            cos,
            sin,
            stride: self.row(),
            negate: false,
            shared,
        }
    }
}

/// The part that starts at a token, `elements` after the start of the tensor's first sample.
///
/// # Safety
/// The token is one of the tensor's.
unsafe fn at<E>(part: Part<*const E>, elements: usize, token: usize) -> Part<*const E> {
    // SAFETY: the caller guarantees a token within the tensor.
    let start = unsafe { part.start.add(elements + token * part.token) };
    Part { start, ..part }
}

/// [`at`] of a tensor to write.
///
/// # Safety
/// As [`at`].
unsafe fn at_mut<E>(part: Part<*mut E>, elements: usize, token: usize) -> Part<*mut E> {
    // SAFETY: the caller guarantees a token within the tensor.
    let start = unsafe { part.start.add(elements + token * part.token) };
    Part { start, ..part }
}
