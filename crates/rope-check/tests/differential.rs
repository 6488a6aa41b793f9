//! Every implementation against the matrix oracle, at all lengths around the vector widths, and
//! against each other bit for bit where they promise it.

use half::{bf16, f16};
use rope_check::buffer::{Buffer, DType};
use rope_check::cases::{exact, scattered_positions, values};
use rope_check::engine::{Case, Engine, host_engines};
use rope_check::tolerance::{Operation, allowed};
use rope_core::{
    Angles, AxisLayout, Direction, Element, Geometry, HeadsLayout, HeadsMut, HeadsRef,
    InstructionSet, Layout, Pairing, Parallelism, Positions, Real, RotarySpec, Rotator, Strides,
    TokenAngles,
};

use crate::odd;

const DIRECTIONS: [Direction; 2] = [Direction::Forward, Direction::Adjoint];

/// The bits of the elements: equal bits are asked for where -0.0 and NaN must be distinguished too.
fn bits(buffer: &Buffer) -> Vec<u64> {
    match buffer {
        Buffer::F64(values) => values.iter().map(|v| v.to_bits()).collect(),
        Buffer::F32(values) => values.iter().map(|v| v.to_bits().into()).collect(),
        Buffer::F16(values) => values.iter().map(|v| v.to_bits().into()).collect(),
        Buffer::Bf16(values) => values.iter().map(|v| v.to_bits().into()).collect(),
    }
}

fn is_kernel(engine: &dyn Engine) -> bool {
    engine.name().starts_with("cpu/")
}

/// A case with `pairs` pairs whose other sizes, strides and places go through small and odd numbers
/// along with it.
fn case_of(pairs: usize, pairing: Pairing, per_channel: bool) -> Case {
    let spec = odd::spec(pairs, pairing, per_channel);
    let seq = [1, 2, 3, 4, 5, 7][pairs % 6];
    let positions = scattered_positions(spec.axis_count(), seq).expect("valid positions");
    Case {
        // Kernels take four heads at a time where tokens are inside: two groups and a rest.
        heads: [1, 3, 9][pairs % 3],
        kv_heads: pairs % 2,
        strided: pairs % 5 < 2,
        in_place: pairs % 7 < 3,
        ..Case::new(spec, positions, Layout::ALL[pairs % 4], 1, seq)
    }
}

fn every_engine_at_every_length(pairing: Pairing) {
    let engines = host_engines();
    for pairs in 1..=70 {
        if pairing == Pairing::Quarter && pairs % 2 == 1 {
            continue;
        }
        for per_channel in [false, true] {
            let case = case_of(pairs, pairing, per_channel);
            for (direction, dtype) in DIRECTIONS
                .into_iter()
                .flat_map(|direction| DType::ALL.map(|dtype| (direction, dtype)))
            {
                // Every length meets every type in one of the directions.
                if (pairs + dtype as usize) % 2 != direction as usize && dtype != DType::F32 {
                    continue;
                }
                every_engine(&engines, &case, direction, dtype, pairs);
            }
        }
    }
}

/// Each head of each token rotates by angles of its own, mixed from two axes.
#[test]
fn heads_with_angles_of_their_own() {
    let engines = host_engines();
    for pairs in (1..=40).chain([64]) {
        for pairing in Pairing::ALL {
            if pairing == Pairing::Quarter && pairs % 2 == 1 {
                continue;
            }
            for batch in [1, 2] {
                let shared = case_of(pairs, pairing, false);
                let layout = shared.layout;
                let batch = if layout == Layout::Tnd { 1 } else { batch };
                let per_sample = pairs % 3 == 0;
                let tokens = shared.seq * if per_sample { batch } else { 1 };
                let heads = 1 + (pairs + batch) % 4;
                let lanes = pairs * if pairs % 4 < 2 { 1 } else { 2 };
                let frequencies = values(pairs as u64, 2 * heads * lanes);
                let spec = RotarySpec::builder(shared.spec.head_dim())
                    .rotary_dim(2 * pairs)
                    .rotary_offset(shared.spec.rotary_offset())
                    .pairing(pairing)
                    .axis_layout(if lanes == pairs {
                        AxisLayout::Single
                    } else {
                        AxisLayout::PerChannel(vec![0, pairs])
                    });
                let case = Case {
                    spec: spec.build().expect("a valid specification"),
                    positions: scattered_positions(2, tokens).expect("valid positions"),
                    head_frequencies: Some(frequencies.into()),
                    batch,
                    heads,
                    kv_heads: heads * (pairs % 2),
                    ..shared
                };
                for (direction, dtype) in DIRECTIONS
                    .into_iter()
                    .flat_map(|direction| DType::ALL.map(|dtype| (direction, dtype)))
                {
                    every_engine(&engines, &case, direction, dtype, pairs);
                }
            }
        }
    }
}

fn every_engine(
    engines: &[Box<dyn Engine>],
    case: &Case,
    direction: Direction,
    dtype: DType,
    seed: usize,
) {
    let x: Vec<Buffer> = [case.heads, case.kv_heads]
        .into_iter()
        .filter(|heads| *heads > 0)
        .map(|heads| {
            let count = case.contiguous(heads).elems();
            Buffer::from_f64(dtype, &values((seed + heads) as u64, count))
        })
        .collect();
    let expected: Vec<Vec<f64>> = x
        .iter()
        .zip([case.heads, case.kv_heads])
        .map(|(x, heads)| exact(case, direction, heads, &x.to_f64()).expect("valid positions"))
        .collect();
    let mut first: Option<Vec<Vec<u64>>> = None;
    for engine in engines.iter().filter(|engine| engine.supports(dtype)) {
        let what = || format!("{} {dtype:?} {direction:?} {case:?}", engine.name());
        let (q, k) = engine
            .apply(case, direction, &x[0], x.get(1))
            .unwrap_or_else(|error| panic!("{error}: {}", what()));
        let found: Vec<Buffer> = std::iter::once(q).chain(k).collect();
        assert_eq!(found.len(), x.len(), "{}", what());
        for (found, expected) in found.iter().zip(&expected) {
            assert_eq!(found.len(), expected.len(), "{}", what());
            for (i, (found, exact)) in found.to_f64().iter().zip(expected).enumerate() {
                let error = (found - exact).abs();
                assert!(
                    error <= allowed(Operation::Rotation, dtype, *exact),
                    "element {i}: {found} instead of {exact}, {}",
                    what()
                );
            }
        }
        if is_kernel(engine.as_ref()) {
            let found: Vec<Vec<u64>> = found.iter().map(bits).collect();
            let first = first.get_or_insert_with(|| found.clone());
            assert!(*first == found, "other bits: {}", what());
        }
    }
}

#[test]
fn half_at_every_length() {
    every_engine_at_every_length(Pairing::Half);
}

#[test]
fn adjacent_at_every_length() {
    every_engine_at_every_length(Pairing::Adjacent);
}

#[test]
fn quarter_at_every_length() {
    every_engine_at_every_length(Pairing::Quarter);
}

#[test]
fn interleave_half_at_every_length() {
    every_engine_at_every_length(Pairing::InterleaveHalf);
}

/// x in another layout: the heads of the tokens, each taken from where the one layout has it to
/// where the other does.
fn laid_out(x: &[f64], from: &Case, to: &Case, heads: usize) -> Vec<f64> {
    let mut moved = vec![f64::NAN; x.len()];
    let head_dim = from.spec.head_dim();
    for ((_, from), (_, to)) in from.rows(heads).into_iter().zip(to.rows(heads)) {
        moved[to..to + head_dim].copy_from_slice(&x[from..from + head_dim]);
    }
    moved
}

#[test]
fn the_same_inputs_in_another_layout_give_the_same_bits() {
    for pairing in Pairing::ALL {
        let spec = RotarySpec::builder(2 * 22 + 3)
            .rotary_dim(44)
            .pairing(pairing)
            .axis_layout(AxisLayout::Striped(vec![8, 7, 7]))
            .build()
            .expect("a valid specification");
        let positions = scattered_positions(3, 2 * 5).expect("valid positions");
        let reference = Case::new(spec, positions, Layout::Bsnd, 2, 5);
        for layout in Layout::ALL {
            let case = Case {
                layout,
                // Packed tokens are one sample.
                batch: if layout == Layout::Tnd { 1 } else { 2 },
                seq: if layout == Layout::Tnd { 10 } else { 5 },
                ..reference.clone()
            };
            for engine in host_engines() {
                for dtype in DType::ALL {
                    if !engine.supports(dtype) {
                        continue;
                    }
                    let heads = [reference.heads, reference.kv_heads];
                    let x = heads.map(|heads| {
                        let values = values(9, reference.contiguous(heads).elems());
                        Buffer::from_f64(dtype, &values).to_f64()
                    });
                    let run = |case: &Case| {
                        let [q, k] = [0, 1].map(|i| {
                            let moved = laid_out(&x[i], &reference, case, heads[i]);
                            Buffer::from_f64(dtype, &moved)
                        });
                        let y = engine.apply(case, Direction::Forward, &q, Some(&k));
                        let (q, k) = y.expect("a valid case");
                        [q, k.expect("k was given")].map(|y| y.to_f64())
                    };
                    let (expected, found) = (run(&reference), run(&case));
                    for ((expected, found), heads) in expected.iter().zip(found).zip(heads) {
                        let found = laid_out(&found, &case, &reference, heads);
                        assert!(
                            found
                                .iter()
                                .map(|v| v.to_bits())
                                .eq(expected.iter().map(|v| v.to_bits())),
                            "{layout:?} differs from Bsnd with {pairing:?}, {dtype:?}, {}",
                            engine.name()
                        );
                    }
                }
            }
        }
    }
}

/// Values that arithmetic would not leave alone: -0.0, a signalling and a quiet NaN with payloads,
/// a subnormal.
fn fragile(dtype: DType, count: usize) -> Buffer {
    let pick = |i: usize, choices: [u64; 4]| choices[i % 4];
    match dtype {
        DType::F64 => {
            let choices = [1 << 63, 0x7ff0_0000_0000_0abc, 0xfff8_0000_0000_0123, 7];
            Buffer::F64(
                (0..count)
                    .map(|i| f64::from_bits(pick(i, choices)))
                    .collect(),
            )
        }
        DType::F32 => {
            let choices = [1 << 31, 0x7f80_0abc, 0xffc0_0123, 7];
            Buffer::F32(
                (0..count)
                    .map(|i| f32::from_bits(pick(i, choices) as u32))
                    .collect(),
            )
        }
        DType::F16 => {
            let choices = [1 << 15, 0x7c12, 0xfe34, 7];
            Buffer::F16(
                (0..count)
                    .map(|i| f16::from_bits(pick(i, choices) as u16))
                    .collect(),
            )
        }
        DType::Bf16 => {
            let choices = [1 << 15, 0x7f82, 0xffc4, 7];
            Buffer::Bf16(
                (0..count)
                    .map(|i| bf16::from_bits(pick(i, choices) as u16))
                    .collect(),
            )
        }
    }
}

#[test]
fn channels_outside_the_rotated_part_pass_through_bit_for_bit() {
    for (pairing, offset, in_place) in Pairing::ALL
        .into_iter()
        .flat_map(|p| [(p, 0, false), (p, 3, true), (p, 5, false)])
    {
        let spec = RotarySpec::builder(offset + 36 + 7)
            .rotary_dim(36)
            .rotary_offset(offset)
            .pairing(pairing)
            .build()
            .expect("a valid specification");
        let positions = scattered_positions(1, 3).expect("valid positions");
        let case = Case {
            in_place,
            strided: offset == 5,
            ..Case::new(spec, positions, Layout::Bsnd, 2, 3)
        };
        for engine in host_engines() {
            for (dtype, direction) in DType::ALL
                .into_iter()
                .flat_map(|dtype| DIRECTIONS.map(|direction| (dtype, direction)))
            {
                // burn's adjoint comes from a loss that multiplies the gradient in, and arithmetic
                // quiets a NaN.
                let in_a_loss =
                    engine.name().starts_with("burn/") && direction == Direction::Adjoint;
                if !engine.supports(dtype) || in_a_loss {
                    continue;
                }
                let x = fragile(dtype, case.contiguous(case.heads).elems());
                let (y, _) = engine
                    .apply(&case, direction, &x, None)
                    .expect("a valid case");
                let (before, after) = (bits(&x), bits(&y));
                for (_, start) in case.rows(case.heads) {
                    for channel in (0..offset).chain(offset + 36..offset + 43) {
                        let i = start + channel;
                        assert_eq!(
                            after[i],
                            before[i],
                            "channel {channel}, {pairing:?}, {dtype:?}, {direction:?}, {}",
                            engine.name()
                        );
                    }
                }
            }
        }
    }
}

/// Where no element of the view lies, nothing is written; every instruction set, in place and not.
fn gaps<E: Element + PartialEq>(pairs: usize, pairing: Pairing, instructions: InstructionSet) {
    let sentinel = E::narrow(E::Acc::from_f64(77.0));
    let (head_dim, tokens, heads) = (2 * pairs + 1, 3, 2);
    let row = [0.5, 0.25].map(|value| vec![E::Acc::from_f64(value); pairs]);
    let angles = row.concat().repeat(tokens);
    let geometry = Geometry::new(head_dim, 2 * pairs, 1, pairing, false).expect("valid");
    let rotator = Rotator::new(geometry, Angles::Tokens(&angles))
        .expect("valid angles")
        .with_instructions(instructions);
    let layout = HeadsLayout {
        batch: 1,
        seq: tokens,
        heads,
        head_dim,
        strides: Strides {
            batch: 0,
            seq: heads * (head_dim + 1) + 2,
            head: head_dim + 1,
        },
    };
    let inside = |i: usize| {
        let within_token = i % layout.strides.seq;
        i / layout.strides.seq < tokens
            && within_token / layout.strides.head < heads
            && within_token % layout.strides.head < head_dim
    };
    let room = layout.strides.seq * tokens + 16;
    let x: Vec<E> = (0..room)
        .map(|i| {
            if inside(i) {
                E::narrow(E::Acc::from_f64(1.0))
            } else {
                sentinel
            }
        })
        .collect();
    let check = |y: &[E], what: &str| {
        for (i, y) in y.iter().enumerate() {
            assert_eq!(
                *y == sentinel,
                !inside(i),
                "element {i} {what} with {pairs} pairs, {pairing:?}, {}, {instructions}",
                E::NAME
            );
        }
    };
    for direction in DIRECTIONS {
        let mut y = x.clone();
        let view = HeadsMut::new(&mut y, layout).expect("fits");
        rotator.apply(direction, view, None).expect("valid shapes");
        check(&y, "in place");
        let mut y = vec![sentinel; room];
        let views = (
            HeadsRef::new(&x, layout).expect("fits"),
            HeadsMut::new(&mut y, layout).expect("fits"),
        );
        rotator.apply(direction, views, None).expect("valid shapes");
        check(&y, "out of place");
    }
}

#[test]
fn gaps_between_rows_stay_as_they_are() {
    for instructions in InstructionSet::available() {
        for pairing in Pairing::ALL {
            for pairs in (2..=36).step_by(2) {
                gaps::<f32>(pairs, pairing, instructions);
                gaps::<f16>(pairs, pairing, instructions);
                gaps::<bf16>(pairs, pairing, instructions);
                gaps::<f64>(pairs, pairing, instructions);
            }
        }
    }
}

#[test]
fn any_number_of_threads_gives_the_same_bits() {
    // More tokens than a tile of coefficients holds, and samples that end within a task.
    let (batch, seq, heads) = (3, 67, 3);
    for pairing in Pairing::ALL {
        let spec = RotarySpec::builder(128)
            .pairing(pairing)
            .axis_layout(AxisLayout::PerChannel(vec![16, 16, 16, 16]))
            .build()
            .expect("a valid specification");
        let positions = scattered_positions(4, seq).expect("valid positions");
        let angles = TokenAngles::<f32>::new(&spec, &positions, None).expect("valid angles");
        let layout = HeadsLayout::contiguous(Layout::Sbnd, batch, seq, heads, 128);
        let x: Vec<f32> = values(3, layout.elems())
            .iter()
            .map(|v| *v as f32)
            .collect();
        let rotate = |parallelism| {
            let rotator = Rotator::new(spec.geometry(), angles.angles()).expect("valid angles");
            let mut y = x.clone();
            rotator
                .with_parallelism(parallelism)
                .rotate(HeadsMut::new(&mut y, layout).expect("fits"), None)
                .expect("valid shapes");
            y
        };
        let angle_gradients = |parallelism| {
            let rotator = Rotator::new(spec.geometry(), angles.angles()).expect("valid angles");
            let x = HeadsRef::new(&x, layout).expect("fits");
            let mut gradients = vec![0f32; angles.rows().len()];
            rotator
                .with_parallelism(parallelism)
                .angle_gradients((x, x), None, &mut gradients)
                .expect("valid shapes");
            gradients
        };
        let (serial, serial_gradients) = (
            rotate(Parallelism::SERIAL),
            angle_gradients(Parallelism::SERIAL),
        );
        let case = Case {
            heads,
            ..Case::new(spec.clone(), positions.clone(), Layout::Sbnd, batch, seq)
        };
        let wide: Vec<f64> = x.iter().map(|x| f64::from(*x)).collect();
        let truth = exact(&case, Direction::Forward, heads, &wide).expect("valid positions");
        for (y, exact) in serial.iter().zip(&truth) {
            assert!(
                (f64::from(*y) - exact).abs() <= allowed(Operation::Rotation, DType::F32, *exact)
            );
        }
        for threads in [1, 2, 3, 4, 5, 8] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
            let pool = pool.expect("threads can be started");
            for tasks in [1, 2, 3, 7, usize::MAX] {
                let y = pool.install(|| rotate(Parallelism::new(1, tasks)));
                assert!(
                    y == serial,
                    "{tasks} tasks on {threads} threads with {pairing:?}"
                );
                let gradients = pool.install(|| angle_gradients(Parallelism::new(1, tasks)));
                assert!(
                    gradients == serial_gradients,
                    "gradients by {tasks} tasks on {threads} threads with {pairing:?}"
                );
            }
        }
    }
}

#[test]
fn heads_wider_than_the_stack_workspace_are_rotated_too() {
    let (rotary_dim, tokens) = (1 << 14, 3);
    for pairing in Pairing::ALL {
        let spec = RotarySpec::builder(rotary_dim)
            .pairing(pairing)
            .build()
            .expect("a valid specification");
        let positions = Positions::text(1, 5, tokens).expect("valid positions");
        let angles = TokenAngles::<f32>::new(&spec, &positions, None).expect("valid angles");
        let inv_freq = spec.inv_freq(None).expect("valid frequencies");
        let x: Vec<f32> = values(8, tokens * rotary_dim)
            .iter()
            .map(|v| *v as f32)
            .collect();
        let mut y = x.clone();
        let layout = HeadsLayout::contiguous(Layout::Tnd, 1, tokens, 1, rotary_dim);
        Rotator::new(spec.geometry(), angles.angles())
            .expect("valid angles")
            .rotate(HeadsMut::new(&mut y, layout).expect("fits"), None)
            .expect("valid shapes");
        for token in 0..tokens {
            let (x, y) = (&x[token * rotary_dim..], &y[token * rotary_dim..]);
            for (j, inv_freq) in inv_freq.iter().enumerate() {
                let (from, to) = rope_core::reference::pair_channels(pairing, rotary_dim, j);
                let (sin, cos) = ((5 + token) as f64 * inv_freq).sin_cos();
                let [x1, x2] = from.map(|i| f64::from(x[i]));
                for (i, exact) in to
                    .into_iter()
                    .zip([cos * x1 - sin * x2, sin * x1 + cos * x2])
                {
                    let error = (f64::from(y[i]) - exact).abs();
                    assert!(
                        error <= allowed(Operation::Rotation, DType::F32, exact),
                        "{pairing:?} token {token} pair {j}"
                    );
                }
            }
        }
    }
}

/// A type of 16 bits, all values of which are tried.
trait Sixteen: Element<Acc = f32> + PartialEq {
    fn from_bits(bits: u16) -> Self;
    fn bits(self) -> u16;
    fn rounded(value: f32) -> Self;
}

impl Sixteen for f16 {
    fn from_bits(bits: u16) -> Self {
        f16::from_bits(bits)
    }
    fn bits(self) -> u16 {
        self.to_bits()
    }
    fn rounded(value: f32) -> Self {
        f16::from_f32(value)
    }
}

impl Sixteen for bf16 {
    fn from_bits(bits: u16) -> Self {
        bf16::from_bits(bits)
    }
    fn bits(self) -> u16 {
        self.to_bits()
    }
    fn rounded(value: f32) -> Self {
        bf16::from_f32(value)
    }
}

/// Pairs of a row: some vectors of eight or sixteen and a rest, rows that fit the registers of
/// either, and one of several double vectors and a single one.
const ROWS: [usize; 4] = [22, 32, 64, 80];

/// Rotates rows of `pairs` pairs that hold all `values`, by one angle.
fn rotate_all<E: Sixteen>(
    pairs: usize,
    values: &[E],
    cos: f32,
    sin: f32,
    pairing: Pairing,
    instructions: InstructionSet,
) -> Vec<E> {
    let (cos, sin) = (vec![cos; pairs], vec![sin; pairs]);
    rotate_by(values, &cos, &sin, pairing, instructions)
}

/// Rotates rows that hold all `values`, by an angle for each pair.
fn rotate_by<E: Sixteen>(
    values: &[E],
    cos: &[f32],
    sin: &[f32],
    pairing: Pairing,
    instructions: InstructionSet,
) -> Vec<E> {
    let pairs = cos.len();
    let mut x = values.to_vec();
    x.resize(values.len().next_multiple_of(2 * pairs), values[0]);
    let heads = x.len() / (2 * pairs);
    let geometry = Geometry::new(2 * pairs, 2 * pairs, 0, pairing, false).expect("valid");
    let angles = [cos, sin].concat();
    let layout = HeadsLayout::contiguous(Layout::Bsnd, 1, 1, heads, 2 * pairs);
    Rotator::new(geometry, Angles::Tokens(&angles))
        .expect("valid angles")
        .with_instructions(instructions)
        .rotate(HeadsMut::new(&mut x, layout).expect("fits"), None)
        .expect("valid shapes");
    x.truncate(values.len());
    x
}

const KEEPING_ORDER: [Pairing; 3] = [Pairing::Half, Pairing::Adjacent, Pairing::Quarter];

fn angle_zero_keeps_every_value<E: Sixteen>() {
    let all = (0..=u16::MAX).map(E::from_bits);
    let finite: Vec<E> = all.clone().filter(|x| x.widen().is_finite()).collect();
    let nans: Vec<E> = all.filter(|x| x.widen().is_nan()).collect();
    let rows = InstructionSet::available().flat_map(|set| ROWS.map(|pairs| (set, pairs)));
    for (instructions, pairs) in rows {
        for pairing in KEEPING_ORDER {
            let kept = rotate_all(pairs, &finite, 1.0, 0.0, pairing, instructions);
            for (x, y) in finite.iter().zip(&kept) {
                // Equal as numbers: x + 0 * y makes 0.0 of -0.0.
                assert!(
                    x.widen() == y.widen(),
                    "{} {:#06x} becomes {:#06x} with {pairing:?}, {instructions}",
                    E::NAME,
                    x.bits(),
                    y.bits()
                );
            }
            let kept = rotate_all(pairs, &nans, 1.0, 0.0, pairing, instructions);
            assert!(kept.iter().all(|y| y.widen().is_nan()));
        }
    }
}

#[test]
fn angle_zero_keeps_every_16_bit_value() {
    angle_zero_keeps_every_value::<f16>();
    angle_zero_keeps_every_value::<bf16>();
}

/// A NaN among the angles takes another path through rounding, which could carry it to infinity or
/// zero: it stays one, and its neighbours become what they become one at a time.
#[test]
fn a_nan_stays_one_and_leaves_its_neighbours_alone() {
    let values: Vec<bf16> = (0..=u16::MAX).map(bf16::from_bits).collect();
    for (row, pairing) in ROWS.iter().flat_map(|row| Pairing::ALL.map(|p| (*row, p))) {
        let mut cos = vec![0.75; row];
        cos[row / 3] = f32::from_bits(0x7fff_ffff);
        let sin = vec![0.6; row];
        let rotate = |set| -> Vec<u16> {
            let y = rotate_by(&values, &cos, &sin, pairing, set);
            let comparable = |y: bf16| if y.is_nan() { 0x7fff } else { y.to_bits() };
            y.into_iter().map(comparable).collect()
        };
        let expected = rotate(InstructionSet::PORTABLE);
        let numbers = expected.iter().filter(|y| **y != 0x7fff).count();
        assert!((values.len() / 2..values.len() * (row - 1) / row).contains(&numbers));
        for set in InstructionSet::available() {
            assert!(rotate(set) == expected, "{row} {pairing:?} {set}");
        }
    }
}

/// Stores past the caches write the same bytes as other stores, and no others, wherever the
/// destination starts.
fn streamed<E: Element<Acc = f32>>(pairs: usize, outside: usize, pairing: Pairing, layout: Layout) {
    const LINE: usize = 64;
    let head_dim = 2 * pairs + 2 * outside;
    let geometry = Geometry::new(head_dim, 2 * pairs, outside, pairing, false).expect("valid");
    let (tokens, heads) = (5, 19);
    let angle = |i: usize| (i as f32 * 0.37).sin();
    let rows: Vec<f32> = (0..tokens * 2 * pairs).map(angle).collect();
    let from = HeadsLayout::contiguous(layout, 1, tokens, heads, head_dim);
    let mut to = from;
    // A line between rows.
    let wider = |stride: usize| stride / head_dim * (head_dim + LINE / size_of::<E>());
    to.strides.seq = wider(from.strides.seq);
    to.strides.head = wider(from.strides.head);
    let x: Vec<E> = (0..from.elems()).map(|i| E::narrow(angle(7 * i))).collect();
    let mut room = vec![E::narrow(77.0); 2 * from.elems() + head_dim + 2 * LINE];
    let aligned = (0..LINE)
        .find(|start| room[*start..].as_ptr().addr().is_multiple_of(LINE))
        .expect("one of them starts a line");
    for (set, direction) in
        InstructionSet::available().flat_map(|set| DIRECTIONS.map(|direction| (set, direction)))
    {
        for shift in [0, 1, 8, 16] {
            let mut write = |min_bytes| -> Vec<u32> {
                room.fill(E::narrow(77.0));
                let y = &mut room[aligned + shift..];
                let views = (
                    HeadsRef::new(&x, from).expect("fits"),
                    HeadsMut::new(y, to).expect("fits"),
                );
                Rotator::new(geometry, Angles::Tokens(&rows))
                    .expect("valid")
                    .with_instructions(set)
                    .with_streaming(min_bytes)
                    .apply(direction, views, None)
                    .expect("valid shapes");
                room.iter().map(|y| y.widen().to_bits()).collect()
            };
            let (past_the_caches, through_them) = (write(0), write(usize::MAX));
            assert!(
                past_the_caches == through_them,
                "{} {pairs} of {head_dim} {pairing:?} {layout:?} {direction:?} {set}, {shift} \
                 elements into a line",
                E::NAME
            );
        }
    }
}

#[test]
fn streamed_stores_write_the_same_bits() {
    for pairing in Pairing::ALL {
        for layout in [Layout::Bsnd, Layout::Bnsd] {
            for (pairs, outside) in [
                (16, 0),
                (22, 0),
                (32, 0),
                (32, 32),
                (64, 0),
                (64, 8),
                (96, 0),
            ] {
                streamed::<bf16>(pairs, outside, pairing, layout);
                streamed::<f16>(pairs, outside, pairing, layout);
                streamed::<f32>(pairs, outside, pairing, layout);
            }
        }
    }
}

/// The neighbours of a rounded value are no nearer; of two as near, the even one was taken.
fn assert_nearest<E: Sixteen>(exact: f32, y: E) {
    let error = |bits: u16| (f64::from(E::from_bits(bits).widen()) - f64::from(exact)).abs();
    let (bits, magnitude) = (y.bits(), y.bits() & 0x7fff);
    let mut neighbours = Vec::new();
    if magnitude > 0 {
        neighbours.push(bits - 1);
    }
    if E::from_bits(bits + 1).widen().is_finite() {
        neighbours.push(bits + 1);
    }
    for neighbour in neighbours {
        let (mine, other) = (error(bits), error(neighbour));
        assert!(
            mine < other || mine == other && bits.is_multiple_of(2),
            "{exact} became {bits:#06x}, {neighbour:#06x} is nearer"
        );
    }
}

fn stores_round_to_nearest_even<E: Sixteen>() {
    let all: Vec<E> = (0..=u16::MAX)
        .map(E::from_bits)
        .filter(|x| x.widen().is_finite())
        .collect();
    // A zero beside each value, so that the result is the value times cos, or times sin.
    let pairs: Vec<E> = all.iter().flat_map(|x| [*x, E::from_bits(0)]).collect();
    let scales = [
        0.5,
        2f32.powi(-3),
        2f32.powi(-9),
        2f32.powi(-14),
        1.5,
        1.0 + 2f32.powi(-8),
        1.0 + 2f32.powi(-11),
        0.75 + 2f32.powi(-12),
        1.0 / 3.0,
        0.9999,
        4.0,
        65536.0,
    ];
    for (cos, sin) in scales.iter().zip(scales.iter().rev()) {
        let mut first: Option<Vec<u16>> = None;
        let rows = InstructionSet::available().flat_map(|set| ROWS.map(|row| (set, row)));
        for (instructions, row) in rows {
            let y = rotate_all(row, &pairs, *cos, *sin, Pairing::Adjacent, instructions);
            for (x, y) in all.iter().zip(y.chunks_exact(2)) {
                for (scale, y) in [(cos, y[0]), (sin, y[1])] {
                    let exact = scale * x.widen();
                    // -0.0 and 0.0 may both stand for 0.
                    assert!(
                        y == E::rounded(exact),
                        "{} {exact} became {:#06x} with {instructions}",
                        E::NAME,
                        y.bits()
                    );
                    if first.is_none() && y.widen().is_finite() {
                        assert_nearest(exact, y);
                    }
                }
            }
            let bits: Vec<u16> = y.iter().map(|y| y.bits()).collect();
            let first = first.get_or_insert_with(|| bits.clone());
            assert!(
                *first == bits,
                "{} has other bits with {instructions}",
                E::NAME
            );
            // Split stores are other code than zipped ones: the same values, read zipped and read
            // split.
            let mut apart = Vec::with_capacity(pairs.len());
            for row in pairs.chunks(2 * row) {
                apart.extend(row.iter().step_by(2));
                apart.extend(row.iter().skip(1).step_by(2));
            }
            let through = [(Pairing::InterleaveHalf, &pairs), (Pairing::Half, &apart)];
            for (pairing, values) in through {
                let split = rotate_all(row, values, *cos, *sin, pairing, instructions);
                for (zipped, split) in y.chunks_exact(2 * row).zip(split.chunks_exact(2 * row)) {
                    for (j, zipped) in zipped.chunks_exact(2).enumerate() {
                        let split = [split[j].bits(), split[row + j].bits()];
                        let zipped = [zipped[0].bits(), zipped[1].bits()];
                        assert_eq!(zipped, split, "{} {pairing:?} {instructions}", E::NAME);
                    }
                }
            }
        }
    }
}

#[test]
fn f16_stores_round_to_nearest_even() {
    stores_round_to_nearest_even::<f16>();
}

#[test]
fn bf16_stores_round_to_nearest_even() {
    stores_round_to_nearest_even::<bf16>();
}

/// Longer than the tiles of any layout and wider than their groups of heads, so that second and
/// later ones are checked too: many tokens at once have the bits of each token alone, which the
/// oracle checks.
#[test]
fn many_tiles_equal_one_token_at_a_time() {
    let (tokens, heads, head_dim) = (1100, 9, 256);
    let elems = tokens * heads * head_dim;
    for pairing in Pairing::ALL {
        let spec = RotarySpec::builder(head_dim)
            .pairing(pairing)
            .build()
            .expect("valid");
        let rotate = |x: &mut [f32], layout, first: u32, seq| {
            let positions = Positions::text(1, first, seq).expect("in range");
            let angles = TokenAngles::<f32>::new(&spec, &positions, None).expect("valid");
            let layout = HeadsLayout::contiguous(layout, 1, seq, heads, head_dim);
            Rotator::new(spec.geometry(), angles.angles())
                .expect("valid")
                .with_parallelism(Parallelism::SERIAL)
                .rotate(HeadsMut::new(x, layout).expect("fits"), None)
                .expect("valid");
        };
        let value = |i: usize| ((i * 7919) % 1009) as f32 / 504.5 - 1.0;
        let mut alone: Vec<f32> = (0..elems).map(value).collect();
        for (token, x) in alone.chunks_exact_mut(heads * head_dim).enumerate() {
            rotate(x, Layout::Bsnd, token as u32, 1);
        }
        let mut together: Vec<f32> = (0..elems).map(value).collect();
        rotate(&mut together, Layout::Bsnd, 0, tokens);
        assert_eq!(together, alone, "{pairing:?} in BSND");

        let row = |token: usize, head: usize| (token * heads + head) * head_dim;
        let mut transposed: Vec<f32> = (0..heads)
            .flat_map(|n| (0..tokens).flat_map(move |t| row(t, n)..row(t, n) + head_dim))
            .map(value)
            .collect();
        rotate(&mut transposed, Layout::Bnsd, 0, tokens);
        for (i, x) in transposed.chunks_exact(head_dim).enumerate() {
            let (head, token) = (i / tokens, i % tokens);
            assert_eq!(
                x,
                &alone[row(token, head)..][..head_dim],
                "{pairing:?} in BNSD, token {token}"
            );
        }
    }
}

/// k without heads, as a layer with nothing but queries to rotate may hold it.
#[test]
fn a_tensor_without_heads_is_nothing_to_do() {
    let (tokens, head_dim) = (1100, 256);
    let spec = RotarySpec::builder(head_dim).build().expect("valid");
    let positions = Positions::text(1, 0, tokens).expect("in range");
    let angles = TokenAngles::<f32>::new(&spec, &positions, None).expect("valid");
    for layout in Layout::ALL {
        let heads = |n| HeadsLayout::contiguous(layout, 1, tokens, n, head_dim);
        let mut q = vec![1f32; heads(2).elems()];
        let mut nothing = [];
        let k = HeadsMut::new(&mut nothing, heads(0)).expect("fits");
        Rotator::new(spec.geometry(), angles.angles())
            .expect("valid")
            .rotate(
                HeadsMut::new(&mut q, heads(2)).expect("fits"),
                Some(k.into()),
            )
            .expect("valid");
        assert!(
            q.iter().any(|x| *x != 1.0),
            "q was left alone in {layout:?}"
        );
    }
}
