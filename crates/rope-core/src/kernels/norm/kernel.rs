//! The order of a tile's rows and the work on each, once for every way of reading and writing
//! pairs.

use std::marker::PhantomData;

use super::channels::{convert, norm_backward, normalise};
use super::rotation::RowRotation;
use super::rows::{Partials, Queue, Row, Rows, Scales, WIDEST, totals};
use super::sums::{products, squares};
use super::{AHEAD, LINE_BYTES, NormTile, Part, Shape, factors_len};
use crate::element::{Element, Real};
use crate::kernels::order::{Order, Split};
use crate::kernels::tile::{Coefficients, HEADS_OUTSIDE_GROUP};
use crate::kernels::vector::{self, Instructions, Memory, Register};

impl<E: Element> Part<*const E> {
    /// Prefetches the row of `dim` elements that lies `bytes` after one of these rows; it may
    /// belong to another head or token.
    #[inline(always)]
    fn prefetch<M: Memory<E>>(&self, token: usize, head: usize, dim: usize, bytes: usize) {
        let rows = bytes.div_ceil(dim * size_of::<E>());
        let later = rows.wrapping_mul(self.token.min(self.head));
        let row = self.offset(token, head).wrapping_add(later);
        for at in (0..dim).step_by(LINE_BYTES / size_of::<E>()) {
            M::Register::prefetch::<false, _>(self.start.wrapping_add(row.wrapping_add(at)));
        }
    }
}

/// Registers of values as in `W`, without regard to the order of their contents: two that hold
/// first and second members of pairs are written and read one after the other.
struct Raw<W>(PhantomData<W>);

impl<W: Instructions> Instructions for Raw<W> {
    #[inline(always)]
    unsafe fn run<K: vector::Kernel>(args: K::Args<'_>) {
        // SAFETY: the caller guarantees the instructions, and what the kernel demands.
        unsafe { W::run::<K>(args) }
    }
}

impl<W: Memory<A>, A: Real> Memory<A> for Raw<W> {
    type Register = W::Register;
    type Narrower = W::Narrower;
    type Wide = W::Wide;
    const DOUBLES: bool = true;
    const UNZIPS: bool = true;

    #[inline(always)]
    unsafe fn load(from: *const A) -> Self::Register {
        // SAFETY: the caller guarantees what the inner one demands.
        unsafe { W::load(from) }
    }
    #[inline(always)]
    unsafe fn store<const STREAM: bool>(x: Self::Register, to: *mut A) {
        // SAFETY: as above.
        unsafe { W::store::<STREAM>(x, to) }
    }
    #[inline(always)]
    unsafe fn load_pairs(from: *const A) -> [Self::Register; 2] {
        // SAFETY: the caller guarantees `2 N` values; each load takes `N` of them.
        unsafe { [W::load(from), W::load(from.add(Self::N))] }
    }
    #[inline(always)]
    unsafe fn store_pairs<const STREAM: bool>(pairs: [Self::Register; 2], to: *mut A) {
        // SAFETY: the caller guarantees room for `2 N` values; `store_both` takes as many.
        unsafe { W::store_both::<STREAM>(pairs, to) }
    }
}

/// The work on rows, for one direction and order of the norm.
///
/// # Safety
/// Of every function: the processor has the instructions; the tile is as
/// [`norm_tile`](super::norm_tile) demands, and a row is one of its rows.
trait Steps<E: Element>: Copy {
    /// Writes the factors of the pairs of rows with these coefficients.
    unsafe fn prepare(self, factors: Factors<'_, E>);
    /// Writes the partial sums of each row: of its squares, and in the backward of its products.
    unsafe fn sums(self, rows: &Rows<'_, E>, partials: &mut Partials<E::Acc>);
    /// The partial sums of each row added up.
    unsafe fn totals(self, partials: &Partials<E::Acc>) -> Scales<E::Acc>;
    /// Writes the results of rows by their scales.
    unsafe fn results(self, rows: &Rows<'_, E>, scales: &Scales<E::Acc>);
}

/// Arguments of [`Steps::prepare`]: the coefficients of a token, and room for its factors.
pub(super) struct Factors<'t, E: Element> {
    by: Coefficients<E::Acc>,
    to: *mut E::Acc,
    tile: &'t NormTile<E>,
    shape: Shape,
}

/// Rows, and room for their partial sums.
type SumsArgs<'a, E> = (&'a Rows<'a, E>, &'a mut Partials<<E as Element>::Acc>);
/// Partial sums, and room for their totals.
type TotalsArgs<'a, E> = (
    &'a Partials<<E as Element>::Acc>,
    &'a mut Scales<<E as Element>::Acc>,
);
/// Rows and their scales.
type ResultsArgs<'a, E> = (&'a Rows<'a, E>, &'a Scales<<E as Element>::Acc>);

/// Steps in separate functions, called from one loop for every instruction set, for rows of any
/// length and number.
#[derive(Clone, Copy)]
struct Calls<E: Element> {
    prepare: unsafe fn(Factors<'_, E>),
    sums: unsafe fn(SumsArgs<'_, E>),
    totals: unsafe fn(TotalsArgs<'_, E>),
    results: unsafe fn(ResultsArgs<'_, E>),
}

impl<E: Element> Steps<E> for Calls<E> {
    #[inline(always)]
    unsafe fn prepare(self, factors: Factors<'_, E>) {
        // SAFETY: the caller guarantees what the function demands.
        unsafe { (self.prepare)(factors) }
    }
    #[inline(always)]
    unsafe fn sums(self, rows: &Rows<'_, E>, partials: &mut Partials<E::Acc>) {
        // SAFETY: the caller guarantees what the function demands.
        unsafe { (self.sums)((rows, partials)) }
    }
    #[inline(always)]
    unsafe fn totals(self, partials: &Partials<E::Acc>) -> Scales<E::Acc> {
        let mut totals = [[E::Acc::ZERO; AHEAD]; 2];
        // SAFETY: the caller guarantees what the function demands.
        unsafe { (self.totals)((partials, &mut totals)) };
        totals
    }
    #[inline(always)]
    unsafe fn results(self, rows: &Rows<'_, E>, scales: &Scales<E::Acc>) {
        // SAFETY: the caller guarantees what the function demands.
        unsafe { (self.results)((rows, scales)) }
    }
}

/// [`Kernel::prepare`] in a separate function, with the same conditions.
struct Prepare<K, const BACKWARD: bool, const AFTER: bool>(PhantomData<K>);
/// [`Kernel::sums`] in a separate function, with the same conditions.
struct Sums<K, const BACKWARD: bool, const AFTER: bool>(PhantomData<K>);
/// [`rows::totals`](totals) in a separate function, with the same conditions.
struct Totals<M, E>(PhantomData<(M, E)>);
/// [`Kernel::results`] in a separate function, with the same conditions.
struct Results<K, const BACKWARD: bool, const AFTER: bool>(PhantomData<K>);

impl<K: Work, const BACKWARD: bool, const AFTER: bool> vector::Kernel
    for Prepare<K, BACKWARD, AFTER>
{
    type Args<'a> = Factors<'a, K::E>;
    #[inline(always)]
    unsafe fn run(factors: Factors<'_, K::E>) {
        // SAFETY: the caller guarantees what the function demands.
        unsafe { K::prepare::<BACKWARD, AFTER>(factors) }
    }
}

impl<K: Work, const BACKWARD: bool, const AFTER: bool> vector::Kernel for Sums<K, BACKWARD, AFTER> {
    type Args<'a> = SumsArgs<'a, K::E>;
    #[inline(always)]
    unsafe fn run((rows, partials): SumsArgs<'_, K::E>) {
        // SAFETY: the caller guarantees what the function demands.
        unsafe { K::sums::<BACKWARD, AFTER>(rows, rows.heads.len(), partials) }
    }
}

impl<M: Memory<E>, E: Element> vector::Kernel for Totals<M, E> {
    type Args<'a> = TotalsArgs<'a, E>;
    #[inline(always)]
    unsafe fn run((partials, to): TotalsArgs<'_, E>) {
        // SAFETY: the caller guarantees what the function demands.
        *to = unsafe { totals::<M, E>(partials) };
    }
}

impl<K: Work, const BACKWARD: bool, const AFTER: bool> vector::Kernel
    for Results<K, BACKWARD, AFTER>
{
    type Args<'a> = ResultsArgs<'a, K::E>;
    #[inline(always)]
    unsafe fn run((rows, scales): ResultsArgs<'_, K::E>) {
        // SAFETY: the caller guarantees what the function demands.
        unsafe { K::results::<BACKWARD, AFTER, false>(rows, rows.heads.len(), scales) }
    }
}

/// The steps of one [`Kernel`], whatever its type parameters.
///
/// # Safety
/// As [`Steps`].
trait Work {
    /// The element type.
    type E: Element;
    /// The instructions.
    type M: Memory<Self::E>;

    unsafe fn prepare<const BACKWARD: bool, const AFTER: bool>(factors: Factors<'_, Self::E>);
    unsafe fn sums<const BACKWARD: bool, const AFTER: bool>(
        rows: &Rows<'_, Self::E>,
        count: usize,
        partials: &mut Partials<<Self::E as Element>::Acc>,
    );
    unsafe fn results<const BACKWARD: bool, const AFTER: bool, const STREAM: bool>(
        rows: &Rows<'_, Self::E>,
        count: usize,
        scales: &Scales<<Self::E as Element>::Acc>,
    );
}

/// Steps of the norm before the rotation, inlined in their loop, for full groups of rows of the
/// common length.
struct Inlined<K, const BACKWARD: bool, const STREAM: bool>(PhantomData<K>);

impl<K, const BACKWARD: bool, const STREAM: bool> Clone for Inlined<K, BACKWARD, STREAM> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<K, const BACKWARD: bool, const STREAM: bool> Copy for Inlined<K, BACKWARD, STREAM> {}

impl<K: Work, const BACKWARD: bool, const STREAM: bool> Steps<K::E>
    for Inlined<K, BACKWARD, STREAM>
{
    #[inline(always)]
    unsafe fn prepare(self, factors: Factors<'_, K::E>) {
        // SAFETY: the caller guarantees what the function demands.
        unsafe { K::prepare::<BACKWARD, false>(factors) }
    }
    #[inline(always)]
    unsafe fn sums(self, rows: &Rows<'_, K::E>, partials: &mut Partials<<K::E as Element>::Acc>) {
        debug_assert_eq!(rows.heads.len(), AHEAD);
        // SAFETY: the caller guarantees what the function demands, and the number of rows.
        unsafe { K::sums::<BACKWARD, false>(&rows.common(), AHEAD, partials) }
    }
    #[inline(always)]
    unsafe fn totals(
        self,
        partials: &Partials<<K::E as Element>::Acc>,
    ) -> Scales<<K::E as Element>::Acc> {
        // SAFETY: the caller guarantees the instructions, whose registers wrote the sums.
        unsafe { totals::<K::M, K::E>(partials) }
    }
    #[inline(always)]
    unsafe fn results(self, rows: &Rows<'_, K::E>, scales: &Scales<<K::E as Element>::Acc>) {
        debug_assert_eq!(rows.heads.len(), AHEAD);
        // SAFETY: the caller guarantees what the function demands, and the number of rows.
        unsafe { K::results::<BACKWARD, false, STREAM>(&rows.common(), AHEAD, scales) }
    }
}

/// [`each_row`] of rows of one common length, with the norm before the rotation.
struct Common<K, const BACKWARD: bool, const STREAM: bool>(PhantomData<K>);

impl<K: Work, const BACKWARD: bool, const STREAM: bool> vector::Kernel
    for Common<K, BACKWARD, STREAM>
{
    type Args<'a> = &'a NormTile<K::E>;
    #[inline(always)]
    unsafe fn run(tile: &NormTile<K::E>) {
        let steps = Inlined::<K, BACKWARD, STREAM>(PhantomData);
        let narrow = <K::M as Memory<K::E>>::N < WIDEST;
        // SAFETY: the caller guarantees the tile, whose rows have the length, and the instructions.
        unsafe {
            each_row(tile, Shape::COMMON, steps, [BACKWARD, false], narrow);
            if STREAM {
                <K::M as Memory<K::E>>::Register::fence();
            }
        }
    }
}

/// Takes the rows in memory order, a group of heads at a time, as the rotation does.
///
/// # Safety
/// As [`Steps`].
#[inline(always)]
unsafe fn each_row<E: Element, S: Steps<E>>(
    tile: &NormTile<E>,
    shape: Shape,
    steps: S,
    [backward, after]: [bool; 2],
    narrow: bool,
) {
    let own = tile.head_coefficients > 0;
    let (group, ahead) = match (tile.is_heads_outside(), own) {
        (_, true) => (1, 1),
        // Twice the number where one tensor is read rather than two, since their rows share cache
        // sets, and where registers are widest.
        (true, false) if backward || narrow => (HEADS_OUTSIDE_GROUP, AHEAD),
        (true, false) => (2 * HEADS_OUTSIDE_GROUP, AHEAD),
        (false, false) => (tile.heads.max(1), AHEAD),
    };
    let mut queue = Queue::<E>::new(backward, after);
    // Factors and scratch rows of these rows and of the previous ones.
    let under_way = queue.under_way();
    let (mut slot, mut turn) = (0, 0);
    let mut factors = tile.factors;
    let mut partials = Partials([[[E::Acc::ZERO; WIDEST]; AHEAD]; 2]);
    let (mut first, mut token, mut head) = (0, 0, 0);
    let mut left = under_way;
    // One loop for rows that begin and rows that are left: the steps are inlined in it once.
    while left > 1 {
        let end = (first + group).min(tile.heads);
        let rows = if first < tile.heads && tile.tokens > 0 {
            if head == first {
                let values = token * tile.coefficients.stride + first * tile.head_coefficients;
                factors = tile.factors.wrapping_add(slot * factors_len(tile.geometry));
                slot = (slot + 1) % under_way;
                // SAFETY: the caller guarantees the tile, whose tokens and heads these are, with
                // room for the factors of as many tokens as are under way.
                unsafe {
                    steps.prepare(Factors {
                        by: tile.coefficients.skip(values),
                        to: factors,
                        tile,
                        shape,
                    });
                }
            }
            let rows = Rows {
                tile,
                shape,
                token,
                heads: head..(head + ahead).min(end),
                factors,
                scratch: tile.scratch.wrapping_add(turn * 2 * AHEAD * shape.dim),
            };
            turn = (turn + 1) % under_way;
            head = rows.heads.end;
            if head == end {
                token += 1;
                if token == tile.tokens {
                    (first, token) = (end, 0);
                }
                head = first;
            }
            Some(rows)
        } else {
            left -= 1;
            None
        };
        // SAFETY: these are rows of the caller's tile, with scratch rows for each group under way.
        unsafe {
            let totals = steps.totals(&partials);
            let (due, scales) = queue.turn(rows.clone(), totals, tile, shape.dim);
            if let Some(rows) = rows {
                steps.sums(&rows, &mut partials);
            }
            if let Some(due) = due {
                steps.results(&due, &scales);
            }
        }
    }
}

/// [`each_row`] of rows of any length, once for all instructions.
///
/// # Safety
/// As [`Steps`].
#[inline(never)]
unsafe fn any_length<E: Element>(tile: &NormTile<E>, steps: Calls<E>, narrow: bool) {
    // SAFETY: the caller guarantees what the steps demand.
    unsafe {
        let order = [tile.dy.is_some(), tile.after];
        each_row(tile, Shape::of(tile), steps, order, narrow);
    }
}

/// The algorithm for one way in which the forward reads and writes pairs, with scratch rows as `W`
/// reads and writes them.
///
/// # Safety
/// Of every function: the processor has the instructions of `M`; a tile is as
/// [`norm_tile`](super::norm_tile) demands, and a row is one of its rows.
pub(super) struct Kernel<M, W, E, Read, Write>(PhantomData<(M, W, E, Read, Write)>);

// No closures around loads, stores and arithmetic: see `tile`.
impl<M, E, Read, Write> Kernel<M, M::Wide, E, Read, Write>
where
    M: Memory<E>,
    E: Element,
    Read: Order,
    Write: Order,
{
    /// The norm after the rotation.
    pub(super) unsafe fn after(tile: &NormTile<E>) {
        // SAFETY: the caller guarantees the tile and the instructions.
        unsafe {
            if tile.dy.is_none() {
                any_length(tile, Self::calls::<false, true>(), Self::NARROW);
            } else {
                any_length(tile, Self::calls::<true, true>(), Self::NARROW);
            }
        }
    }

    /// The norm before the rotation.
    pub(super) unsafe fn before(tile: &NormTile<E>) {
        // SAFETY: the caller guarantees the tile and the instructions.
        unsafe {
            if tile.dy.is_none() {
                any_length(tile, Self::calls::<false, false>(), Self::NARROW);
            } else {
                any_length(tile, Self::calls::<true, false>(), Self::NARROW);
            }
        }
    }

    /// [`before`](Self::before), with separate code for the head length of most models.
    pub(super) unsafe fn common_before(tile: &NormTile<E>) {
        let common = M::Register::COMMON_LENGTHS
            && Shape::of(tile).is_common()
            && tile.heads.is_multiple_of(AHEAD)
            && tile.head_coefficients == 0;
        if !common {
            // SAFETY: the caller guarantees the tile and the instructions.
            return unsafe { Self::before(tile) };
        }
        let stream = M::Register::STREAMS && tile.stream && tile.starts_lines();
        // SAFETY: the caller guarantees the tile and the instructions; the rows have the length;
        // `stream` implies that they start and fill cache lines.
        unsafe {
            match (tile.dy.is_some(), stream) {
                (false, false) => M::run::<Common<Self, false, false>>(tile),
                (false, true) => M::run::<Common<Self, false, true>>(tile),
                _ if M::UNZIPS => {
                    Kernel::<M, Raw<M::Wide>, E, Read, Write>::common_backward(tile, stream);
                }
                _ => Self::common_backward(tile, stream),
            }
        }
    }
}

impl<M, W, E, Read, Write> Work for Kernel<M, W, E, Read, Write>
where
    M: Memory<E>,
    W: Memory<E::Acc, Register = M::Register>,
    E: Element,
    Read: Order,
    Write: Order,
{
    type E = E;
    type M = M;

    #[inline(always)]
    unsafe fn prepare<const BACKWARD: bool, const AFTER: bool>(factors: Factors<'_, E>) {
        let Factors {
            by,
            to: factors,
            tile,
            shape,
        } = factors;
        // SAFETY: the caller guarantees coefficients of all pairs, and room; the weights of pairs
        // follow those of channels.
        unsafe {
            let weight = tile.weight.add(shape.dim);
            match (BACKWARD, AFTER) {
                (false, false) => {
                    RowRotation::<M, M, E, E, Read, Write>::prepare::<false, true>(
                        by, weight, factors, shape,
                    );
                }
                (_, true) => {
                    RowRotation::<M, W, E, E::Acc, Read, Write>::prepare::<false, false>(
                        by, weight, factors, shape,
                    );
                    if BACKWARD {
                        let factors = factors.add(4 * shape.pairs);
                        RowRotation::<W, M, E::Acc, E, Write, Read>::prepare::<true, false>(
                            by, weight, factors, shape,
                        );
                    }
                }
                (true, false) => {
                    RowRotation::<M, W, E, E::Acc, Write, Read>::prepare::<true, true>(
                        by, weight, factors, shape,
                    );
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn sums<const BACKWARD: bool, const AFTER: bool>(
        rows: &Rows<'_, E>,
        count: usize,
        partials: &mut Partials<E::Acc>,
    ) {
        let (tile, dim) = (rows.tile, rows.shape.dim);
        // SAFETY: the caller guarantees rows of `head_dim` elements, as many weights and their
        // gradients, and scratch rows. In the backward these hold g = R^T dy, or z = R x and then
        // dz; dy is not read after it was overwritten.
        unsafe {
            let zero = M::Register::splat(E::Acc::ZERO);
            for i in 0..count {
                let row = rows.row(i);
                let head = rows.heads.start + i;
                if let Some(bytes) = Self::fetched::<BACKWARD>(tile) {
                    tile.x.prefetch::<M>(rows.token, head, dim, bytes);
                    if let (true, Some(dy)) = (BACKWARD, &tile.dy) {
                        dy.prefetch::<M>(rows.token, head, dim, bytes);
                    }
                }
                let [square, product] = match (BACKWARD, AFTER) {
                    (false, false) => {
                        let wide = Self::KEEPS_WIDE.then_some(row.scratch);
                        [squares::<M, E>(row.x, wide, dim), zero]
                    }
                    (false, true) => {
                        Self::widen::<Read, Write>(row.x, None, &row);
                        [squares::<W, E::Acc>(row.scratch, None, dim), zero]
                    }
                    (true, false) => {
                        Self::widen::<Write, Read>(row.dy, Some(tile.weight), &row);
                        let wide =
                            (!Self::READS_AGAIN).then_some(row.scratch.wrapping_add(AHEAD * dim));
                        products::<M, W, E, E::Acc>(row.x, row.scratch, None, wide, dim)
                    }
                    (true, true) => {
                        Self::widen::<Read, Write>(row.x, None, &row);
                        let weight = Some(tile.weight);
                        products::<W, M, E::Acc, E>(row.scratch, row.dy, weight, None, dim)
                    }
                };
                square.write(partials.0[0][i].as_mut_ptr());
                if BACKWARD {
                    product.write(partials.0[1][i].as_mut_ptr());
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn results<const BACKWARD: bool, const AFTER: bool, const STREAM: bool>(
        rows: &Rows<'_, E>,
        count: usize,
        [rstds, by_x]: &Scales<E::Acc>,
    ) {
        let (tile, dim) = (rows.tile, rows.shape.dim);
        // SAFETY: as in `sums`, whose scratch rows these are.
        unsafe {
            let first = rows.row(0);
            let scratch = (first.scratch, dim);
            let scales = [&rstds[..count], &by_x[..count]];
            match (BACKWARD, AFTER) {
                (false, false) => Self::forward::<STREAM>(rows, scales[0]),
                (false, true) => {
                    for (i, rstd) in scales[0].iter().enumerate() {
                        let Row { scratch, to, .. } = rows.row(i);
                        normalise::<W, M, E::Acc, E>(scratch, to, tile.weight, *rstd, 0, dim);
                    }
                }
                (true, false) => {
                    if STREAM && Self::NARROW && tile.is_heads_outside() {
                        // The start of g's rows, which are read before they are overwritten.
                        let apart = dim * size_of::<E::Acc>() / size_of::<E>();
                        Self::gradients::<false>(rows, (scratch.0.cast(), apart), scales);
                        for i in 0..count {
                            let Row { scratch, to, .. } = rows.row(i);
                            Self::past_caches(scratch.cast_const().cast(), to, dim);
                        }
                    } else {
                        Self::gradients::<STREAM>(rows, (first.to, tile.to.head), scales);
                    }
                }
                (true, true) => {
                    let z = (scratch.0.cast_const(), dim);
                    let dy = (first.dy, tile.dy.unwrap_or(tile.x).head);
                    norm_backward::<W, M, W, E::Acc, E, E::Acc, false>(
                        z,
                        dy,
                        scratch,
                        Some(tile.weight),
                        rows.dweight(),
                        dim,
                        scales,
                    );
                    for i in 0..count {
                        Self::turn_back(&rows.row(i));
                    }
                }
            }
        }
    }
}

impl<M, W, E, Read, Write> Kernel<M, W, E, Read, Write>
where
    M: Memory<E>,
    W: Memory<E::Acc, Register = M::Register>,
    E: Element,
    Read: Order,
    Write: Order,
{
    /// True if x is read again where it is needed again, not written widened.
    const READS_AGAIN: bool = M::UNZIPS && W::UNZIPS;
    /// True if the forward writes x widened with its squares, and rotates that.
    const KEEPS_WIDE: bool = M::KEEPS_WIDE;
    /// True if registers are not the widest. With tokens as the inner dimension, other orders are
    /// then faster: measured on Zen 3, where AVX2 rotates, and on Zen 4 and Xeons, where AVX-512
    /// does; not with NEON.
    const NARROW: bool = M::N < WIDEST;

    /// Bytes from the row being read to the row prefetched with it into the second-level cache, if
    /// any. The hardware prefetcher looks too short a distance ahead for the computation in
    /// between, and the first level has too few outstanding lines to cover the latency of memory.
    #[inline(always)]
    fn fetched<const BACKWARD: bool>(tile: &NormTile<E>) -> Option<usize> {
        let narrow_outside = Self::NARROW && tile.is_heads_outside();
        match BACKWARD {
            // With wide elements, the forward is limited by memory alone, and the hardware
            // prefetcher is faster.
            false if size_of::<E>() >= 4 => None,
            false if narrow_outside => Some(1024),
            // Four heads of two tensors are eight streams of memory: the hardware prefetcher
            // follows them unless software requests their lines first.
            true if narrow_outside => None,
            _ => Some(4096),
        }
    }

    /// The steps in separate functions. Steps that do not depend on the orders of pairs use the
    /// same function for all orders.
    fn calls<const BACKWARD: bool, const AFTER: bool>() -> Calls<E> {
        type Any<M, W, E> = Kernel<M, W, E, Split, Split>;
        Calls {
            prepare: M::run::<Prepare<Self, BACKWARD, AFTER>>,
            sums: if BACKWARD || AFTER {
                M::run::<Sums<Self, BACKWARD, AFTER>>
            } else {
                M::run::<Sums<Any<M, W, E>, BACKWARD, AFTER>>
            },
            totals: M::run::<Totals<M, E>>,
            results: if BACKWARD == AFTER {
                M::run::<Results<Self, BACKWARD, AFTER>>
            } else {
                M::run::<Results<Any<M, W, E>, BACKWARD, AFTER>>
            },
        }
    }

    /// The backward of rows of the common length, the norm before the rotation.
    unsafe fn common_backward(tile: &NormTile<E>, stream: bool) {
        // SAFETY: the caller guarantees the tile and the instructions.
        unsafe {
            if stream {
                M::run::<Common<Self, true, true>>(tile);
            } else {
                M::run::<Common<Self, true, false>>(tile);
            }
        }
    }

    /// Writes dx and adds to dw, of rows whose g lies in scratch rows.
    #[inline(always)]
    unsafe fn gradients<const STREAM: bool>(
        rows: &Rows<'_, E>,
        to: (*mut E, usize),
        scales: [&[E::Acc]; 2],
    ) {
        let (tile, dim) = (rows.tile, rows.shape.dim);
        // SAFETY: the caller guarantees the rows, whose sums were computed.
        unsafe {
            let first = rows.row(0);
            let g = (first.scratch.cast_const(), dim);
            let dweight = rows.dweight();
            if Self::READS_AGAIN {
                let x = (first.x, tile.x.head);
                norm_backward::<M, W, M, E, E::Acc, E, STREAM>(
                    x, g, to, None, dweight, dim, scales,
                );
            } else {
                let x = (first.scratch.add(AHEAD * dim).cast_const(), dim);
                norm_backward::<W, W, M, E::Acc, E::Acc, E, STREAM>(
                    x, g, to, None, dweight, dim, scales,
                );
            }
        }
    }

    /// Writes a row past the caches, line after line. Writing one line of each of several distant
    /// rows at a time takes 1.7 to 2.7 times as long (on Zen 3). The row at `to` starts a cache
    /// line and fills its lines.
    #[inline(always)]
    unsafe fn past_caches(from: *const E, to: *mut E, dim: usize) {
        let (from, to) = (from.cast::<E::Acc>(), to.cast::<E::Acc>());
        let words = dim * size_of::<E>() / size_of::<E::Acc>();
        debug_assert!(to.addr().is_multiple_of(LINE_BYTES) && words.is_multiple_of(M::N));
        for at in (0..words).step_by(M::N) {
            // SAFETY: the caller guarantees rows of `dim` elements, which fill cache lines, and `to`
            // at the start of one; registers divide lines, so that each store is aligned.
            unsafe { W::store::<true>(W::load(from.add(at)), to.add(at)) }
        }
    }

    /// y = R (x * rstd * w).
    #[inline(always)]
    unsafe fn forward<const STREAM: bool>(rows: &Rows<'_, E>, rstds: &[E::Acc]) {
        let (tile, shape) = (rows.tile, rows.shape);
        let Shape { dim, start, .. } = shape;
        let end = shape.end();
        // SAFETY: the caller guarantees rows of `head_dim` elements, in which `start..end` is the
        // rotated part, weights for all of them, and scratch rows.
        unsafe {
            if end - start < dim {
                for (i, rstd) in rstds.iter().enumerate() {
                    let Row { x, to, .. } = rows.row(i);
                    normalise::<M, M, E, E>(x, to, tile.weight, *rstd, 0, start);
                    normalise::<M, M, E, E>(x, to, tile.weight, *rstd, end, dim);
                }
            }
            let first = rows.row(0);
            let from = (first.x.add(start), tile.x.head);
            let to = (first.to.add(start), tile.to.head);
            if Self::KEEPS_WIDE {
                RowRotation::<W, M, E::Acc, E, Read, Write>::rows::<true, STREAM>(
                    (first.scratch.add(start).cast_const(), dim),
                    to,
                    rows.factors,
                    rstds,
                    shape,
                );
            } else if Read::ZIPPED == Write::ZIPPED || from.0 != to.0.cast_const() {
                RowRotation::<M, M, E, E, Read, Write>::rows::<true, STREAM>(
                    from,
                    to,
                    rows.factors,
                    rstds,
                    shape,
                );
            } else {
                RowRotation::<M, W, E, E::Acc, Read, Write>::rows::<true, false>(
                    from,
                    (first.scratch, dim),
                    rows.factors,
                    rstds,
                    shape,
                );
                for i in 0..rstds.len() {
                    let (from, to) = (first.scratch.add(i * dim), to.0.add(i * to.1));
                    convert::<W, M, E::Acc, E>(from, to, 0, end - start);
                }
            }
        }
    }

    /// dx = R^T dz, from the scratch row.
    #[inline(always)]
    unsafe fn turn_back(row: &Row<E>) {
        let (shape, scratch) = (row.shape, row.scratch);
        let Shape { dim, start, .. } = shape;
        // SAFETY: the caller guarantees rows of `head_dim` elements, in which `start..end` is the
        // rotated part; the adjoint's factors follow the forward's.
        unsafe {
            convert::<W, M, E::Acc, E>(scratch, row.to, 0, start);
            convert::<W, M, E::Acc, E>(scratch, row.to, shape.end(), dim);
            RowRotation::<W, M, E::Acc, E, Write, Read>::rows::<false, false>(
                (scratch.add(start), 0),
                (row.to.add(start), 0),
                row.factors.add(4 * shape.pairs),
                &[E::Acc::ZERO],
                shape,
            );
        }
    }

    /// Writes x times the row's factors into the scratch row: R x, or R^T x times the weights
    /// if there are any.
    #[inline(always)]
    unsafe fn widen<From: Order, To: Order>(
        x: *const E,
        weight: Option<*const E::Acc>,
        row: &Row<E>,
    ) {
        let (shape, scratch) = (row.shape, row.scratch);
        let Shape { dim, start, .. } = shape;
        let end = shape.end();
        // SAFETY: the caller guarantees `head_dim` elements at x and in the scratch row, in which
        // `start..end` is the rotated part, and as many weights.
        unsafe {
            if end - start < dim {
                for (at, end) in [(0, start), (end, dim)] {
                    match weight {
                        None => convert::<M, W, E, E::Acc>(x, scratch, at, end),
                        Some(w) => {
                            let one = E::Acc::from_f64(1.0);
                            normalise::<M, W, E, E::Acc>(x, scratch, w, one, at, end);
                        }
                    }
                }
            }
            RowRotation::<M, W, E, E::Acc, From, To>::rows::<false, false>(
                (x.add(start), 0),
                (scratch.add(start), 0),
                row.factors,
                &[E::Acc::ZERO],
                shape,
            );
        }
    }
}
