//! Shared by the tests: the simulator as a runtime, and the plain f64 loops that the kernels are
//! compared with.
#![allow(dead_code, reason = "each test file uses a part")]
#![allow(
    unsafe_code,
    reason = "the simulator's symbols are handed to the loader"
)]
#![allow(
    clippy::unwrap_used,
    clippy::missing_panics_doc,
    missing_docs,
    unreachable_pub,
    reason = "test code"
)]

pub mod delta;
pub mod layer;
pub mod norm;

use ascend_sim::Session;
use half::{bf16, f16};
use rope_ascend::loader::Api;
use rope_ascend::rope::{AngleRows, KernelType, Kernels, Rotator, Unit};
use rope_ascend::safe::{DeviceBuffer, Element, Pooling, Runtime, Stream};
use rope_core::{Direction, Geometry, HeadsLayout, Pairing};
use std::cell::RefCell;
use std::collections::HashMap;
use std::ops::{Add, Mul, Sub};
use std::rc::Rc;
use std::sync::{Arc, Mutex, PoisonError};

/// Runs a test of each pairing on a machine.
pub fn on_each_pairing(machine: ascend_sim::Machine, test: impl Fn(&Bench, Pairing)) {
    let bench = Bench::new(machine);
    Pairing::ALL
        .into_iter()
        .for_each(|pairing| test(&bench, pairing));
    bench.finish();
}

/// Heads, their rotated channels, heads of q and k, tokens and samples, such that each of two cores has
/// whole batches, full tiles and several tokens.
pub const FEW_CORES: [(usize, usize, [usize; 2], usize, usize); 4] = [
    // Fewer tokens than parts of the heads, which do not divide 15 heads evenly.
    (64, 64, [13, 2], 3, 1),
    // The cores' shares end within a batch, and tiles within a share.
    (64, 64, [5, 2], 37, 3),
    // More channels pass through than are rotated.
    (256, 64, [4, 2], 37, 2),
    // Rows of angles that are no whole blocks.
    (20, 12, [5, 2], 37, 3),
];

pub fn kernel_names(architecture: u32) -> Vec<String> {
    let mut names = Vec::new();
    for dtype in ["f32", "f16", "bf16"] {
        for kernel in [
            "low_rank",
            "swiglu",
            "swiglu_grad",
            "short_convolution",
            "short_convolution_grad",
            "adamw",
            "square_sums",
            "delta_prepare",
        ] {
            names.push(format!("rope_{kernel}_{dtype}"));
        }
        for pairs in ["split", "adjacent", "deinterleave", "interleave"] {
            names.push(format!("rope_rotate_{pairs}_{dtype}"));
        }
        for pairs in ["split", "adjacent", "deinterleave"] {
            for kernel in ["angle_grad", "norm", "norm_grad"] {
                names.push(format!("rope_{kernel}_{pairs}_{dtype}"));
            }
        }
    }
    let others = ["adamw_narrow_f16", "adamw_narrow_bf16", "delta_local_f32"];
    names.extend(others.map(|kernel| format!("rope_{kernel}")));
    if architecture == 2201 {
        names.extend(["rope_matrix_f16", "rope_matrix_bf16"].map(str::to_owned));
    }
    names
}

/// The kernels compiled for the simulator; one compilation at a time, the others wait for it.
pub fn kernel_binary(architecture: u32) -> Vec<u8> {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/kernels/rope/rope.cpp");
    ascend_sim::build::KernelSource::new(path)
        .kernels(kernel_names(architecture))
        .architecture(architecture)
        .compile()
        .unwrap_or_else(|error| panic!("{error}"))
}

/// The simulator as a runtime, each buffer an allocation of its own, so that the simulator sees
/// every access beyond one.
pub fn api() -> Api {
    api_with(Pooling::Blocks)
}

pub fn api_with(pooling: Pooling) -> Api {
    // SAFETY: the simulator's functions have the vendor's signatures (checked by `cargo xtask
    // abi`) and are part of this program.
    let api = unsafe { Api::from_resolver("ascend-sim", ascend_sim::symbol) }.unwrap();
    api.with_pooling(pooling)
}

/// A simulated machine with the kernels loaded. Fields drop in order, the session last.
pub struct Bench {
    rotators: RefCell<HashMap<(Geometry, Unit), Rc<Rotator>>>,
    pub kernels: Arc<Kernels>,
    pub stream: Stream,
    pub runtime: Runtime,
    pub session: Session,
}

impl Bench {
    pub fn new(machine: ascend_sim::Machine) -> Self {
        let binary = kernel_binary(machine.architecture);
        Self::with_kernels(machine, &binary)
    }

    pub fn with_kernels(machine: ascend_sim::Machine, binary: &[u8]) -> Self {
        let session = Session::with_machine(machine);
        let runtime = Runtime::start(api()).unwrap();
        let stream = runtime.device(0).unwrap().stream().unwrap();
        let kernels = Arc::new(Kernels::load(&stream, binary).unwrap());
        Self {
            rotators: RefCell::default(),
            kernels,
            stream,
            runtime,
            session,
        }
    }

    /// The rotator of a geometry. As in a program, one serves all cases with its caches.
    pub fn rotator(&self, geometry: Geometry, unit: Unit) -> Rc<Rotator> {
        let make = || Rotator::new(&self.stream, self.kernels.clone(), geometry).unwrap();
        let mut rotators = self.rotators.borrow_mut();
        let rotator = rotators.entry((geometry, unit));
        rotator.or_insert_with(|| Rc::new(make().by(unit))).clone()
    }

    /// Asserts that nothing was violated and nothing leaks.
    pub fn finish(self) {
        let Self {
            rotators,
            kernels,
            stream,
            runtime,
            session,
        } = self;
        stream.synchronize().unwrap();
        drop((rotators, kernels));
        drop(stream);
        runtime.close().unwrap();
        let violations = ascend_sim::control::take_violations();
        assert!(
            violations.is_empty(),
            "{}",
            violations
                .iter()
                .map(ToString::to_string)
                .collect::<Vec<_>>()
                .join("\n")
        );
        drop(session);
    }
}

/// Numbers without structure, the same in every run.
pub struct Numbers(pub u64);

impl Numbers {
    pub fn bits(&mut self) -> u64 {
        // xorshift64*: Marsaglia 2003, Vigna 2016.
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    pub fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1_u64 << 53) as f64 * 2.0 - 1.0
    }

    pub fn below(&mut self, n: u64) -> u64 {
        self.bits() % n
    }
}

pub trait Number: Element + PartialEq + std::fmt::Debug {
    const TYPE: KernelType;
    fn of(value: f64) -> Self;
    /// Rounded to nearest even, exactly: `half` drops bits of an f64.
    fn rounded(value: f32) -> Self;
    fn wide(self) -> f64;
    /// Distance of neighbouring values around `value`, halved: the error of one rounding.
    fn half_ulp(value: f64) -> f64;
}

impl Number for f32 {
    const TYPE: KernelType = KernelType::F32;
    fn of(value: f64) -> Self {
        value as f32
    }
    fn rounded(value: f32) -> Self {
        value
    }
    fn wide(self) -> f64 {
        f64::from(self)
    }
    fn half_ulp(value: f64) -> f64 {
        value.abs() * 2_f64.powi(-24)
    }
}
impl Number for f16 {
    const TYPE: KernelType = KernelType::F16;
    fn of(value: f64) -> Self {
        f16::from_f64(value)
    }
    fn rounded(value: f32) -> Self {
        f16::from_f32(value)
    }
    fn wide(self) -> f64 {
        f64::from(self)
    }
    fn half_ulp(value: f64) -> f64 {
        (value.abs() * 2_f64.powi(-11)).max(2_f64.powi(-25))
    }
}
impl Number for bf16 {
    const TYPE: KernelType = KernelType::Bf16;
    fn of(value: f64) -> Self {
        bf16::from_f64(value)
    }
    fn rounded(value: f32) -> Self {
        bf16::from_f32(value)
    }
    fn wide(self) -> f64 {
        f64::from(self)
    }
    fn half_ulp(value: f64) -> f64 {
        value.abs() * 2_f64.powi(-8)
    }
}

/// Two f32 products of values up to 1, and their sum.
pub fn tolerance<T: Number>(truth: f64) -> f64 {
    T::half_ulp(truth) + 3.0 * 2_f64.powi(-24)
}

/// Channels of pair `j`: where its members are read, and where they are written (forward).
pub fn pair_channels(pairing: Pairing, rotary_dim: usize, j: usize) -> ([usize; 2], [usize; 2]) {
    let pairs = rotary_dim / 2;
    match pairing {
        Pairing::Half => ([j, j + pairs], [j, j + pairs]),
        Pairing::Adjacent => ([2 * j, 2 * j + 1], [2 * j, 2 * j + 1]),
        Pairing::Quarter => {
            let quarter = rotary_dim / 4;
            let first = if j < quarter {
                j
            } else {
                2 * quarter + j - quarter
            };
            ([first, first + quarter], [first, first + quarter])
        }
        Pairing::InterleaveHalf => ([2 * j, 2 * j + 1], [j, j + pairs]),
    }
}

/// Offset and layout of a tensor in its buffer.
pub type At = (usize, HeadsLayout);

/// Index of a channel.
pub fn index((offset, layout): &At, b: usize, s: usize, h: usize, c: usize) -> usize {
    let strides = layout.strides;
    offset + b * strides.batch + s * strides.seq + h * strides.head + c
}

/// The rotation over one tensor, with each product and sum rounded to F: in f64 the truth, in f32
/// the arithmetic that the kernels promise. `angle(token, lane)` gives cosine and sine.
pub fn rotate_plainly<F>(
    (x, x_at): (&[F], At),
    (y, y_at): (&mut [F], At),
    geometry: Geometry,
    direction: Direction,
    angle: &dyn Fn(usize, usize) -> (F, F),
) where
    F: Copy + Add<Output = F> + Sub<Output = F> + Mul<Output = F>,
{
    let (offset, dim) = (geometry.rotary_offset(), geometry.rotary_dim());
    let HeadsLayout {
        batch, seq, heads, ..
    } = x_at.1;
    for b in 0..batch {
        for s in 0..seq {
            for h in 0..heads {
                for c in 0..geometry.head_dim() {
                    if c < offset || c >= offset + dim {
                        y[index(&y_at, b, s, h, c)] = x[index(&x_at, b, s, h, c)];
                    }
                }
                for j in 0..dim / 2 {
                    let (read, write) = pair_channels(geometry.pairing(), dim, j);
                    let (c1, s1) = angle(b * seq + s, j);
                    let (c2, s2) = if geometry.per_channel() {
                        angle(b * seq + s, dim / 2 + j)
                    } else {
                        (c1, s1)
                    };
                    let (from, to) = if direction == Direction::Forward {
                        (read, write)
                    } else {
                        (write, read)
                    };
                    let [v1, v2] = from.map(|c| x[index(&x_at, b, s, h, offset + c)]);
                    let out = match direction {
                        Direction::Forward => [c1 * v1 - s1 * v2, s2 * v1 + c2 * v2],
                        Direction::Adjoint => [c1 * v1 + s2 * v2, c2 * v2 - s1 * v1],
                    };
                    for (c, out) in to.into_iter().zip(out) {
                        y[index(&y_at, b, s, h, offset + c)] = out;
                    }
                }
            }
        }
    }
}

/// All rows of a buffer of angles.
pub fn angles(memory: &DeviceBuffer<f32>, rows: usize) -> AngleRows<'_> {
    AngleRows {
        memory,
        offset_bytes: 0,
        rows,
    }
}
