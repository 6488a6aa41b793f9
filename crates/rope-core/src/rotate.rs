//! The entry points: validate once, then run the kernels over tiles of tokens.

#![allow(
    unsafe_code,
    reason = "passes validated views to the kernels as pointers"
)]

mod norm;

use std::mem::MaybeUninit;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::angles::Angles;
use crate::element::{Element, Real};
use crate::error::{Result, RopeError};
use crate::kernels::tile::{Access, Coefficients, Tile};
use crate::kernels::{InstructionSet, TileKernel};
use crate::layout::{HeadsLayout, HeadsMut, HeadsRef};
use crate::parallel::{Parallelism, for_each_block};
use crate::spec::{Geometry, Pairing};

pub use norm::{HeadNorm, NormGradient, NormInput, NormOrder};

/// Bytes of a row of x on a task's stack, enough for 512 channels of f64. Longer rows come from the
/// heap. At most a page, since a larger frame is probed page by page, which would slow down a
/// single token.
const STACK_BYTES: usize = 4 << 10;
/// Bytes of a tile's coefficients: a third of a small first-level cache, which also holds the rows.
const TILE_BYTES: usize = 12 << 10;
/// Bytes of a tile's coefficients where tokens are the inner dimension: half a second-level cache.
/// A tile is then one contiguous stretch of memory per head, and prefetching needs long stretches.
const HEADS_OUTSIDE_TILE_BYTES: usize = 512 << 10;

/// Results of at least this size bypass the caches, which would not hold them anyway.
const STREAM_BYTES: usize = 32 << 20;

/// Direction of a rotation: forward for q and k, adjoint for their gradients.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Direction {
    /// The rotation.
    Forward,
    /// The transpose of the rotation. It maps the gradients of the rotated q and k to those of q
    /// and k.
    Adjoint,
}

impl Direction {
    /// The other direction, used by the backward of an operation in this direction.
    pub fn transposed(self) -> Self {
        match self {
            Self::Forward => Self::Adjoint,
            Self::Adjoint => Self::Forward,
        }
    }
}

/// A tensor to rotate: in place, or from one buffer into another.
#[derive(Debug)]
pub enum Operand<'a, E> {
    /// Overwrites the tensor.
    InPlace(HeadsMut<'a, E>),
    /// Reads the first and writes the second, which has the same shape and may have different
    /// strides.
    Into(HeadsRef<'a, E>, HeadsMut<'a, E>),
}

impl<'a, E> From<HeadsMut<'a, E>> for Operand<'a, E> {
    fn from(x: HeadsMut<'a, E>) -> Self {
        Self::InPlace(x)
    }
}

impl<'a, E> From<(HeadsRef<'a, E>, HeadsMut<'a, E>)> for Operand<'a, E> {
    fn from((from, to): (HeadsRef<'a, E>, HeadsMut<'a, E>)) -> Self {
        Self::Into(from, to)
    }
}

/// Rotates q and k, forward and backward, by given angles.
///
/// For each pair (x1, x2) with the angles' (c1, s1) and (c2, s2), which are equal unless each
/// channel has a separate angle: y1 = c1 x1 - s1 x2, y2 = s2 x1 + c2 x2. The adjoint is the
/// transpose of that map: dx1 = c1 g1 + s2 g2, dx2 = c2 g2 - s1 g1; it needs no x.
///
/// # Shapes
/// q and k may differ in heads, unless angles are per head. Angles are for `batch * seq` tokens, or
/// for `seq` tokens shared by the batch. If k has different tokens than q, as in cross-attention or
/// in decoding with a key cache, rotate it with a separate rotator.
///
/// # Numerics
/// f16 and bf16 are widened to f32; f32 and f64 are used as they are. Two products and a sum are
/// each rounded once, then there is one rounding on store. Without contraction, every instruction
/// set, thread count and layout gives the same bits.
///
/// # Examples
/// ```
/// use rope_core::*;
/// let spec = RotarySpec::builder(64).build()?;
/// let angles = TokenAngles::<f32>::new(&spec, &Positions::text(1, 0, 10)?, None)?;
/// let rotator = Rotator::new(spec.geometry(), angles.angles())?;
/// let layout = HeadsLayout::contiguous(Layout::Bsnd, 1, 10, 4, 64);
/// let mut q = vec![1f32; layout.elems()];
/// rotator.rotate(HeadsMut::new(&mut q, layout)?, None)?;
/// rotator.rotate_adjoint(HeadsMut::new(&mut q, layout)?, None)?;
/// assert!(q.iter().all(|x| (x - 1.0).abs() < 1e-6)); // a rotation's adjoint is its inverse
/// # Ok::<(), RopeError>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Rotator<'a, A: Real = f32> {
    geometry: Geometry,
    angles: Angles<'a, A>,
    parallelism: Parallelism,
    instructions: InstructionSet,
    stream_bytes: usize,
}

/// An operand as the kernels take it.
struct Stream<E> {
    src: *const E,
    dst: *mut E,
    src_layout: HeadsLayout,
    dst_layout: HeadsLayout,
}

// SAFETY: the tasks that share it read and write rows of disjoint token ranges, as
// `Parallelism::for_each_range` hands them out; the views that the pointers come from outlive the
// call that the tasks run in; `Element` requires E to be Send and Sync.
unsafe impl<E: Element> Sync for Stream<E> {}

impl<E: Element> Stream<E> {
    fn new(operand: Operand<'_, E>, names: [&'static str; 2]) -> Result<Self> {
        match operand {
            Operand::InPlace(x) => {
                let dst = x.start;
                Ok(Self {
                    src: dst,
                    dst,
                    src_layout: x.layout,
                    dst_layout: x.layout,
                })
            }
            Operand::Into(from, to) => {
                from.layout
                    .check_same(&to.layout, names[0], names[1], true)?;
                let (src, dst) = (from.start, to.start);
                Ok(Self {
                    src,
                    dst,
                    src_layout: from.layout,
                    dst_layout: to.layout,
                })
            }
        }
    }
}

impl<'a, A: Real> Rotator<'a, A> {
    /// Creates a rotation with `geometry` by `angles`, split over threads, with the processor's
    /// widest instruction set.
    ///
    /// # Errors
    /// None. Angles are checked against the tensors when these are rotated.
    pub fn new(geometry: Geometry, angles: Angles<'a, A>) -> Result<Self> {
        let (parallelism, instructions) = (Parallelism::default(), InstructionSet::best());
        Ok(Self {
            geometry,
            angles,
            parallelism,
            instructions,
            stream_bytes: STREAM_BYTES,
        })
    }

    /// Sets the split over threads.
    pub fn with_parallelism(mut self, parallelism: Parallelism) -> Self {
        self.parallelism = parallelism;
        self
    }

    /// Sets the instruction set; f64 has one kernel for all sets.
    pub fn with_instructions(mut self, instructions: InstructionSet) -> Self {
        self.instructions = instructions;
        self
    }

    /// Sets the size of q and k together from which results in other buffers bypass the caches
    /// (non-temporal stores); 32 MiB by default. This moves a third fewer bytes, but the next
    /// reader must fetch the results from memory. It applies only on x86-64, for Half, Adjacent and
    /// Quarter with one angle per pair, if rows start and fill cache lines of 64 bytes; with the
    /// norm, only to heads of 128 rotated channels whose number is a multiple of four.
    pub fn with_streaming(mut self, min_bytes: usize) -> Self {
        self.stream_bytes = min_bytes;
        self
    }

    /// Rotates q, and k if given.
    ///
    /// # Errors
    /// [`RopeError::ShapeMismatch`] if q, k, their destinations and the geometry disagree;
    /// [`RopeError::AngleShape`] if the angles are for different tokens or heads.
    pub fn rotate<'x, E: Element<Acc = A>>(
        &self,
        q: impl Into<Operand<'x, E>>,
        k: Option<Operand<'x, E>>,
    ) -> Result<()> {
        self.apply(Direction::Forward, q, k)
    }

    /// Maps the gradients of the rotated q and k to those of q and k.
    ///
    /// # Errors
    /// As [`rotate`](Self::rotate).
    pub fn rotate_adjoint<'x, E: Element<Acc = A>>(
        &self,
        dq: impl Into<Operand<'x, E>>,
        dk: Option<Operand<'x, E>>,
    ) -> Result<()> {
        self.apply(Direction::Adjoint, dq, dk)
    }

    /// Calls [`rotate`](Self::rotate) or [`rotate_adjoint`](Self::rotate_adjoint), by `direction`.
    ///
    /// # Errors
    /// As [`rotate`](Self::rotate).
    pub fn apply<'x, E: Element<Acc = A>>(
        &self,
        direction: Direction,
        q: impl Into<Operand<'x, E>>,
        k: Option<Operand<'x, E>>,
    ) -> Result<()> {
        let q = Stream::new(q.into(), ["q", "the rotated q"])?;
        let k = k
            .map(|k| Stream::new(k, ["k", "the rotated k"]))
            .transpose()?;
        self.run(q, k, direction)
    }

    /// Writes the gradients of cos and sin, `[tokens, 2 * lanes]` as in [`Angles::Tokens`], summed
    /// over heads, over q and k, and over the batch if its samples share angles. For
    /// [`Angles::Heads`] they are `[tokens, heads, 2 * lanes]` and not summed over heads. Only
    /// learned angles need these gradients, and only these gradients need x in the backward. The
    /// rotator's own rows are not read and may be empty.
    ///
    /// `q` and `k` are `(x, gradient of the rotated x)`. `gradients` is overwritten.
    ///
    /// # Numerics
    /// summed in f64, sample by sample and head by head: bit-identical with any number of threads
    ///
    /// # Errors
    /// As [`rotate`](Self::rotate), with the tokens taken from `gradients`.
    pub fn angle_gradients<E: Element<Acc = A>>(
        &self,
        q: (HeadsRef<'_, E>, HeadsRef<'_, E>),
        k: Option<(HeadsRef<'_, E>, HeadsRef<'_, E>)>,
        gradients: &mut [A],
    ) -> Result<()> {
        self.check_shape(&q.0.layout, "q")?;
        q.0.layout
            .check_same(&q.1.layout, "q", "its gradient", true)?;
        if let Some((k, dk)) = &k {
            q.0.layout.check_same(&k.layout, "q", "k", false)?;
            k.layout.check_same(&dk.layout, "k", "its gradient", true)?;
        }
        self.check_heads(&q.0.layout, k.as_ref().map(|(k, _)| &k.layout))?;
        let (batch, seq) = (q.0.layout.batch, q.0.layout.seq);
        let lanes = self.geometry.lane_count();
        let (own_heads, what) = (self.angles.own_heads(), "the gradient of the angles");
        let rows_per_token = own_heads.unwrap_or(1);
        let tokens = angle_rows(
            what,
            gradients,
            rows_per_token.saturating_mul(lanes),
            batch,
            seq,
        )?;
        let rows = tokens * rows_per_token;
        // Without heads, the number of samples may be too large to iterate over.
        let heads = q.0.layout.heads.max(k.map_or(0, |(k, _)| k.layout.heads));
        let (samples_per_row, pairs) = (
            if tokens == q.0.layout.tokens() {
                1
            } else if heads == 0 {
                0
            } else {
                batch
            },
            self.geometry.pairs(),
        );
        let row_gradients = |row: usize, sums: &mut [[f64; 2]]| {
            sums.fill([0.0; 2]);
            let (token, head) = (row / rows_per_token, row % rows_per_token);
            for sample in 0..samples_per_row {
                let (b, s) = if samples_per_row == 1 {
                    (token / seq, token % seq)
                } else {
                    (sample, token)
                };
                for (x, g) in std::iter::once(&q).chain(&k) {
                    let shared = 0..x.layout.heads;
                    for head in own_heads.map_or(shared, |_| head..head + 1) {
                        let (x, g) = (head_at(x, b, s, head), head_at(g, b, s, head));
                        for j in 0..pairs {
                            let [(x1, x2), (g1, g2)] = self.pair_values(x, g, j);
                            let second = if self.geometry.per_channel() {
                                pairs + j
                            } else {
                                j
                            };
                            sums[j][0] += g1 * x1;
                            sums[j][1] -= g1 * x2;
                            sums[second][0] += g2 * x2;
                            sums[second][1] += g2 * x1;
                        }
                    }
                }
            }
        };
        // Each task's rows, or all rows if the rotation itself would stay on this thread.
        let x_bytes = q.0.layout.elems().saturating_mul(size_of::<E>());
        let block = (rows / self.parallelism.tasks_for(rows, x_bytes)).max(1);
        let blocks = gradients.chunks_mut(block * 2 * lanes);
        for_each_block(blocks.enumerate().collect(), |(at, rows)| {
            let mut sums = vec![[0f64; 2]; lanes];
            for (row, values) in rows.chunks_exact_mut(2 * lanes).enumerate() {
                row_gradients(at * block + row, &mut sums);
                let (dcos, dsin) = values.split_at_mut(lanes);
                for (([c, s], dcos), dsin) in sums.iter().zip(dcos).zip(dsin) {
                    (*dcos, *dsin) = (A::from_f64(*c), A::from_f64(*s));
                }
            }
        });
        Ok(())
    }

    /// The members of pair `j` as the forward reads x and as it writes y.
    fn pair_values<E: Element>(&self, x: &[E], g: &[E], j: usize) -> [(f64, f64); 2] {
        let (pairs, offset) = (self.geometry.pairs(), self.geometry.rotary_offset());
        let split = (j, j + pairs);
        let zipped = (2 * j, 2 * j + 1);
        // Both members of the first half's pairs precede those of the second half's.
        let skipped = if j < pairs / 2 { 0 } else { pairs / 2 };
        let quarter = (j + skipped, j + skipped + pairs / 2);
        let (from, to) = match self.geometry.pairing() {
            Pairing::Half => (split, split),
            Pairing::Adjacent => (zipped, zipped),
            Pairing::Quarter => (quarter, quarter),
            Pairing::InterleaveHalf => (zipped, split),
        };
        let at = |row: &[E], i: usize| row[offset + i].widen().to_f64();
        [(at(x, from.0), at(x, from.1)), (at(g, to.0), at(g, to.1))]
    }

    fn check_shape(&self, layout: &HeadsLayout, what: &'static str) -> Result<()> {
        if layout.head_dim == self.geometry.head_dim() {
            return Ok(());
        }
        Err(RopeError::ShapeMismatch {
            left: "the rotation",
            right: what,
            dimension: "head_dim",
            left_size: self.geometry.head_dim(),
            right_size: layout.head_dim,
        })
    }

    /// Checks that angles per head match the number of heads of the tensors.
    fn check_heads(&self, q: &HeadsLayout, k: Option<&HeadsLayout>) -> Result<()> {
        let Some(heads) = self.angles.own_heads() else {
            return Ok(());
        };
        let named = [Some(("q", q.heads)), k.map(|k| ("k", k.heads))];
        match named
            .into_iter()
            .flatten()
            .find(|(_, found)| *found != heads)
        {
            None => Ok(()),
            Some((right, right_size)) => Err(RopeError::ShapeMismatch {
                left: "the angles",
                right,
                dimension: "heads",
                left_size: heads,
                right_size,
            }),
        }
    }

    fn run<E: Element<Acc = A>>(
        &self,
        q: Stream<E>,
        k: Option<Stream<E>>,
        direction: Direction,
    ) -> Result<()> {
        self.check_shape(&q.src_layout, "q")?;
        if let Some(k) = &k {
            q.src_layout.check_same(&k.src_layout, "q", "k", false)?;
        }
        self.check_heads(&q.src_layout, k.as_ref().map(|k| &k.src_layout))?;
        let (batch, seq) = (q.src_layout.batch, q.src_layout.seq);
        let angle_tokens = self.check_angles(batch, seq)?;
        let elems = q.src_layout.elems() + k.as_ref().map_or(0, |k| k.src_layout.elems());
        if elems == 0 {
            // The number of tokens may be too large to count.
            return Ok(());
        }
        let bytes = elems * size_of::<E>();
        let task = Task {
            rotator: self,
            q,
            k,
            direction,
            angle_tokens,
            stream: bytes >= self.stream_bytes,
        };
        self.parallelism
            .for_each_range(batch * seq, bytes, |tokens| task.rotate(tokens));
        Ok(())
    }

    /// Checks the number of tokens with angles, of the batch or of one sample, and returns it.
    fn check_angles(&self, batch: usize, seq: usize) -> Result<usize> {
        let lanes = self.angles.own_heads().unwrap_or(1);
        let lanes = lanes.saturating_mul(self.geometry.lane_count());
        angle_rows("the angles", self.angles.rows(), lanes, batch, seq)
    }
}

/// Checks and returns the number of rows of angles: one per token of the batch or of a sample.
fn angle_rows<A>(
    what: &'static str,
    values: &[A],
    lanes: usize,
    batch: usize,
    seq: usize,
) -> Result<usize> {
    let (width, found) = (lanes.saturating_mul(2), values.len());
    let tokens = if found == seq.saturating_mul(width) {
        seq
    } else {
        batch.saturating_mul(seq)
    };
    let expected = tokens.saturating_mul(width);
    if found != expected {
        return Err(RopeError::AngleShape {
            what,
            found,
            expected,
            tokens,
            width,
        });
    }
    Ok(tokens)
}

fn head_at<'x, E>(x: &HeadsRef<'x, E>, b: usize, s: usize, head: usize) -> &'x [E] {
    let strides = x.layout.strides;
    let start = b * strides.batch + s * strides.seq + head * strides.head;
    // SAFETY: the callers count within the layout, each element of which the view borrows for 'x.
    unsafe { std::slice::from_raw_parts(x.start.add(start), x.layout.head_dim) }
}

/// One call's work, shared by its threads.
struct Task<'r, 'a, E: Element> {
    rotator: &'r Rotator<'a, E::Acc>,
    q: Stream<E>,
    k: Option<Stream<E>>,
    direction: Direction,
    angle_tokens: usize,
    stream: bool,
}

impl<E: Element> Task<'_, '_, E> {
    /// Rotates the tokens of a range, counted over the batch.
    fn rotate(&self, tokens: Range<usize>) {
        let geometry = self.rotator.geometry;
        let own_heads = self.rotator.angles.own_heads();
        // The values of a token: of all its heads, if these have separate angles.
        let row = 2 * geometry.lane_count() * own_heads.unwrap_or(1);
        let row_bytes = row * size_of::<E::Acc>();
        let strides = self.q.src_layout.strides;
        let tile_bytes = if strides.head > strides.seq {
            HEADS_OUTSIDE_TILE_BYTES
        } else {
            TILE_BYTES
        };
        let tile_tokens = (tile_bytes / row_bytes).clamp(1, tokens.len().max(1));
        let needed = geometry.rotary_dim() * size_of::<E>();
        // u64 keeps it aligned for any element.
        let mut stack = [MaybeUninit::<u64>::uninit(); STACK_BYTES / 8];
        let mut heap = Vec::new();
        let scratch: *mut E = if needed <= STACK_BYTES {
            stack.as_mut_ptr().cast()
        } else {
            heap.resize(needed.div_ceil(8), MaybeUninit::<u64>::uninit());
            heap.as_mut_ptr().cast()
        };
        let seq = self.q.src_layout.seq;
        let mut token = tokens.start;
        while token < tokens.end {
            let (b, s) = (token / seq, token % seq);
            let count = tile_tokens.min(tokens.end - token).min(seq - s);
            let first = token % self.angle_tokens;
            let angles = &self.rotator.angles.rows()[first * row..][..count * row];
            let kernel = E::kernel(self.rotator.instructions.for_values::<E>(angles));
            let coefficients = self.arrange(angles.as_ptr());
            // A tensor without heads has no elements, so its tokens have no addresses.
            let operands = std::iter::once(&self.q).chain(&self.k);
            for operand in operands.filter(|operand| operand.src_layout.heads > 0) {
                let tile = self.tile(operand, b, s, count, coefficients, scratch);
                // SAFETY: an `InstructionSet` exists only for instructions that the processor has.
                // `HeadsRef::new` and `HeadsMut::new` checked that views reach only into their
                // buffers and, where written, name each element once; source and destination are
                // one view, or a shared and an exclusive borrow. `Geometry::new` keeps the rotated
                // part within the head and Quarter's pairs even. There are cos and sin for `count`
                // tokens from `first`, and for each of their heads if these have their own: a tile
                // does not cross samples, `check_angles` counted the rows and `check_heads` the
                // heads. `scratch` holds a row of x.
                unsafe {
                    match own_heads {
                        None => kernel(&tile),
                        Some(_) => rotate_heads(kernel, &tile),
                    }
                }
            }
            token += count;
        }
    }

    /// The c1, s1, c2, s2 of the direction among a row's cosines and sines, `lanes` each: the
    /// adjoint swaps s1 and s2 and negates both.
    fn arrange(&self, row: *const E::Acc) -> Coefficients<E::Acc> {
        let geometry = self.rotator.geometry;
        let (lanes, shared) = (geometry.lane_count(), !geometry.per_channel());
        let second = if shared { 0 } else { geometry.pairs() };
        let [cos, mut sin] =
            [0, lanes].map(|start| [start, start + second].map(|at| row.wrapping_add(at)));
        let negate = self.direction == Direction::Adjoint;
        if negate {
            sin.swap(0, 1);
        }
        Coefficients {
            cos,
            sin,
            stride: 2 * lanes,
            negate,
            shared,
        }
    }

    fn tile(
        &self,
        operand: &Stream<E>,
        b: usize,
        s: usize,
        tokens: usize,
        coefficients: Coefficients<E::Acc>,
        scratch: *mut E,
    ) -> Tile<E> {
        let geometry = self.rotator.geometry;
        let (src, dst) = (operand.src_layout.strides, operand.dst_layout.strides);
        let (runs, [read, write]) = match geometry.pairing() {
            Pairing::Half => (1, [Access::Split; 2]),
            Pairing::Adjacent => (1, [Access::Zipped; 2]),
            Pairing::Quarter => (2, [Access::Split; 2]),
            Pairing::InterleaveHalf => (1, [Access::Zipped, Access::Split]),
        };
        let [read, write] = if self.direction == Direction::Forward {
            [read, write]
        } else {
            [write, read]
        };
        Tile {
            // SAFETY: token (b, s) is one of the view's, which `HeadsRef::new` or `HeadsMut::new`
            // checked to reach only into its buffer.
            src: unsafe { operand.src.add(b * src.batch + s * src.seq) },
            // SAFETY: token (b, s) is one of the view's, which `HeadsMut::new` checked to reach
            // only into its buffer.
            dst: unsafe { operand.dst.add(b * dst.batch + s * dst.seq) },
            tokens,
            heads: operand.src_layout.heads,
            token_strides: [src.seq, dst.seq],
            head_strides: [src.head, dst.head],
            head_dim: geometry.head_dim(),
            offset: geometry.rotary_offset(),
            pairs: geometry.pairs(),
            run: geometry.pairs() / runs,
            read,
            write,
            coefficients,
            stream: self.stream && operand.src != operand.dst.cast_const(),
            scratch,
        }
    }
}

/// Rotates a tile with separate coefficients per head. Out of line, since the branch to it is on
/// the path of every single-token call.
///
/// # Safety
/// As the kernel demands, with coefficients for each head of each token.
#[cold]
#[inline(never)]
unsafe fn rotate_heads<E: Element>(kernel: TileKernel<E>, tile: &Tile<E>) {
    for tile in tile.each_head() {
        // SAFETY: its rows are those of one head, and of the caller's tile, which is sound; the
        // caller guarantees their coefficients.
        unsafe { kernel(&tile) };
    }
}
