//! Launches every vector kernel and the matrix kernels once in each type, with the share of a core
//! of Atlas A2, on a simulator that writes what its first block does.

use std::error::Error;
use std::sync::Arc;

use ascend_sim::build::KernelSource;
use ascend_sim::{Machine, Session};
use rope_ascend::loader::Api;
use rope_ascend::rope::{
    AngleGradient, AngleRows, ChannelWeights, DeltaGradient, DeltaLocal, DeltaPrepare, DeltaSizes,
    Gate, GateBackward, Heads, KernelType, Kernels, LayerKernels, LowRankTerm, MemoryPart,
    NormBackward, NormBackwardTensor, NormRotation, NormTensor, Npu, Operand, OutputGradient,
    Rotation, Rotator, ShortConvolution, ShortConvolutionGradients, Unit, Update, UpdateFactors,
};
use rope_ascend::safe::{DeviceBuffer, DeviceMemory, Runtime, Stream};
use rope_core::{Direction, Geometry, HeadNorm, HeadsLayout, Layout, Pairing};

/// The hidden word of the command line for [`launch`].
pub(crate) const WORD: &str = "time-launch";

/// Qwen3-VL-8B: heads of q and k, channels of a head.
const HEADS: [usize; 2] = [32, 8];
const HEAD_DIM: usize = 128;
/// Of the simulated machine; a kernel with a cube core takes two.
const CORES: usize = 2;
/// Of 8,192 tokens on 40 cores, a core has at most these.
const TOKENS: usize = CORES * 205;
/// Of the dense kernels, as many elements as a core has of a gate of 8,192 x 1,280.
const ELEMENTS: usize = CORES * 8_192 * 32;
const RANK: usize = 16;
const COLUMNS: usize = 4_096;
const CHUNK: usize = 8_192;
/// The gated delta rule of Qwen3.5. A core has 96 chunks of a head; of 8,192 tokens it has 102.
const DELTA: DeltaSizes = DeltaSizes {
    batch: 1,
    tokens: 6 * DeltaSizes::CHUNK,
    key_heads: 16,
    heads: 32,
    key_dim: 128,
    value_dim: 128,
};
const TAPS: usize = 4;

/// What a launch does; the names of kernels say the rest.
#[derive(Clone, Copy, Debug)]
enum Work {
    Rotate(Pairing, Direction, Unit),
    AngleGradient(Pairing),
    Norm(Pairing),
    NormBackward(Pairing),
    LowRank,
    Gate,
    GateBackward,
    /// As the backward, and the output again.
    GateAgain,
    /// With a gradient in f32, or of 16 bits.
    Update,
    NarrowUpdate,
    SquareSums,
    ShortConvolution,
    ShortConvolutionBackward,
    DeltaPrepare,
    DeltaLocal,
}

const WORK: [Work; 28] = {
    use Direction::{Adjoint, Forward};
    use Pairing::{Adjacent, Half, InterleaveHalf, Quarter};
    [
        Work::Rotate(Half, Forward, Unit::Vector),
        Work::Rotate(Quarter, Forward, Unit::Vector),
        Work::Rotate(Adjacent, Forward, Unit::Vector),
        Work::Rotate(InterleaveHalf, Forward, Unit::Vector),
        Work::Rotate(InterleaveHalf, Adjoint, Unit::Vector),
        Work::Rotate(Half, Forward, Unit::Cube),
        Work::Rotate(InterleaveHalf, Forward, Unit::Cube),
        Work::AngleGradient(Half),
        Work::AngleGradient(Quarter),
        Work::AngleGradient(Adjacent),
        Work::AngleGradient(InterleaveHalf),
        Work::Norm(Half),
        Work::Norm(Adjacent),
        Work::Norm(InterleaveHalf),
        Work::NormBackward(Half),
        Work::NormBackward(Adjacent),
        Work::NormBackward(InterleaveHalf),
        Work::LowRank,
        Work::Gate,
        Work::GateBackward,
        Work::GateAgain,
        Work::Update,
        Work::NarrowUpdate,
        Work::SquareSums,
        Work::ShortConvolution,
        Work::ShortConvolutionBackward,
        Work::DeltaPrepare,
        Work::DeltaLocal,
    ]
};

const TYPES: [KernelType; 3] = [KernelType::Bf16, KernelType::F16, KernelType::F32];
/// The kernel of the first work in the first type.
const FIRST: &str = "rope_rotate_split_bf16";

type Outcome<T> = Result<T, Box<dyn Error>>;

/// Launches the kernels, and returns a line for each launch: its variant, if the name of the kernel
/// does not say it. In a process of its own, whose environment names the file of the
/// trace. `words` may be a source, whose first kernel alone is launched.
pub(crate) fn launch(words: &[&str]) -> Outcome<String> {
    let _session = Session::with_machine(Machine {
        vector_cores: CORES as u32,
        ..Machine::ascend_910b()
    });
    let (runtime, npu);
    let (mut works, mut elements) = (&WORK[..], &TYPES[..]);
    let (stream, kernels) = match words.first() {
        Some(source) => {
            (works, elements) = (&WORK[..1], &TYPES[..1]);
            let source = KernelSource::new(*source).kernels([FIRST]);
            let binary = source.architecture(2201).compile()?;
            runtime = Runtime::start(Api::simulated()?)?;
            let stream = runtime.device(0)?.stream()?;
            let kernels = Arc::new(Kernels::load(&stream, &binary)?);
            (stream, kernels)
        }
        None => {
            npu = Npu::simulated()?;
            (npu.stream()?, npu.kernels()?)
        }
    };
    let mut bench = Bench::new(stream, kernels)?;
    let mut lines = String::new();
    for &work in works {
        for &element in elements {
            if work.has(element) {
                bench.run(work, element)?;
                lines += work.pairing();
                lines.push('\n');
            }
        }
    }
    Ok(lines)
}

impl Work {
    /// Whether there is a kernel for the type.
    fn has(self, element: KernelType) -> bool {
        match self {
            Self::Rotate(_, _, Unit::Cube) | Self::NarrowUpdate => element != KernelType::F32,
            Self::DeltaLocal => element == KernelType::F32,
            _ => true,
        }
    }

    /// The pairing, if the name of the kernel does not say it.
    fn pairing(self) -> &'static str {
        match self {
            Self::Rotate(Pairing::Quarter, ..) | Self::AngleGradient(Pairing::Quarter) => "quarter",
            Self::Rotate(Pairing::InterleaveHalf, _, Unit::Cube) => "interleave-half",
            Self::GateAgain => "with output",
            _ => "",
        }
    }
}

/// Memory for every kernel. Of elements of 16 bits there are the bytes only.
struct Bench {
    stream: Stream,
    kernels: Arc<Kernels>,
    layers: LayerKernels,
    /// q, k and their gradients, and as much for the tensors of layers.
    tensors: [DeviceBuffer<f32>; 5],
    rows: DeviceBuffer<f32>,
    weights: DeviceBuffer<f32>,
    sums: DeviceBuffer<f32>,
}

impl Bench {
    fn new(stream: Stream, kernels: Arc<Kernels>) -> Outcome<Self> {
        let largest = ELEMENTS.max(TOKENS * HEADS[0] * HEAD_DIM);
        let zeros = |elements| stream.zeros::<f32>(elements);
        Ok(Self {
            layers: LayerKernels::new(&stream, kernels.clone()),
            tensors: [
                zeros(largest)?,
                zeros(largest)?,
                zeros(largest)?,
                zeros(largest)?,
                zeros(largest)?,
            ],
            rows: zeros(TOKENS * HEAD_DIM)?,
            weights: zeros(RANK * COLUMNS)?,
            sums: zeros(TOKENS * HEAD_DIM)?,
            stream,
            kernels,
        })
    }

    fn run(&mut self, work: Work, element: KernelType) -> Outcome<()> {
        let layouts =
            HEADS.map(|heads| HeadsLayout::contiguous(Layout::Bsnd, 1, TOKENS, heads, HEAD_DIM));
        let angles = AngleRows {
            memory: &self.rows,
            offset_bytes: 0,
            rows: TOKENS,
        };
        let weight = ChannelWeights {
            memory: &self.weights,
            offset_bytes: 0,
            channels: HEAD_DIM,
        };
        let geometry = |pairing| Geometry::new(HEAD_DIM, HEAD_DIM, 0, pairing, false);
        let rotator = |pairing| -> Outcome<Rotator> {
            Ok(Rotator::new(
                &self.stream,
                self.kernels.clone(),
                geometry(pairing)?,
            )?)
        };
        let [a, b, c, d, e] = &mut self.tensors;
        let norm = HeadNorm::new(1e-6)?;
        let is_f32 = element == KernelType::F32;
        match work {
            Work::Rotate(pairing, direction, unit) => {
                rotator(pairing)?.by(unit).rotate(Rotation {
                    element,
                    direction,
                    q: Operand::InPlace(heads(&mut **a, layouts[0])),
                    k: Some(Operand::InPlace(heads(&mut **b, layouts[1]))),
                    angles,
                })?;
            }
            Work::AngleGradient(pairing) => rotator(pairing)?.angle_gradient(AngleGradient {
                element,
                q: [heads(&**a, layouts[0]), heads(&**c, layouts[0])],
                k: Some([heads(&**b, layouts[1]), heads(&**d, layouts[1])]),
                out: &mut self.sums,
            })?,
            Work::Norm(pairing) => {
                let tensor = |x, layout| NormTensor {
                    x: Operand::InPlace(heads(x, layout)),
                    weight,
                };
                rotator(pairing)?.norm_rotate(NormRotation {
                    element,
                    norm,
                    q: tensor(&mut **a, layouts[0]),
                    k: Some(tensor(&mut **b, layouts[1])),
                    angles,
                })?;
            }
            Work::NormBackward(pairing) => {
                let tensor = |x, gradient, layout| NormBackwardTensor {
                    x: heads(x, layout),
                    gradient: Operand::InPlace(heads(gradient, layout)),
                    weight,
                };
                rotator(pairing)?.norm_rotate_backward(NormBackward {
                    element,
                    norm,
                    q: tensor(&**a, &mut **c, layouts[0]),
                    k: Some(tensor(&**b, &mut **d, layouts[1])),
                    angles,
                    weight_sums: &mut self.sums,
                })?;
            }
            Work::LowRank => self.layers.add_low_rank(LowRankTerm {
                element,
                size: [TOKENS, COLUMNS],
                rank: RANK,
                part_starts: &[0],
                y: part(&mut **a),
                h: part(&self.rows),
                b: part(&self.weights),
                rounded_h: None,
            })?,
            Work::Gate => self.layers.gate(Gate {
                element,
                elements: ELEMENTS,
                gate: part(&**a),
                up: part(&**b),
                y: part(&mut **c),
            })?,
            Work::GateBackward | Work::GateAgain => self.layers.gate_backward(GateBackward {
                element,
                elements: ELEMENTS,
                gate: part(&**a),
                up: part(&**b),
                gradient: match work {
                    Work::GateAgain => OutputGradient::Replaced(part(&mut **c)),
                    _ => OutputGradient::Kept(part(&**c)),
                },
                gate_gradient: part(&mut **d),
                up_gradient: part(&mut **e),
            })?,
            Work::Update | Work::NarrowUpdate => self.layers.update(Update {
                elements: ELEMENTS,
                factors: UpdateFactors {
                    scale: 1.0,
                    of_gradient: 0.1,
                    of_square: 0.001,
                    kept: 0.999,
                    correction: 1.0,
                    epsilon: 1e-8,
                    stay: 1.0,
                    step: 1e-3,
                },
                value: part(&mut **a),
                gradient: match work {
                    Work::NarrowUpdate => (element, part(&**b)),
                    _ => (KernelType::F32, part(&**b)),
                },
                moments: [part(&mut **c), part(&mut **d)],
                rounded: (!is_f32).then(|| (element, part(&mut **e))),
            })?,
            Work::SquareSums => {
                let sums: &mut DeviceMemory = &mut self.sums;
                self.layers
                    .square_sums(ELEMENTS, CHUNK, (element, part(&**a)), part(sums))?;
            }
            Work::ShortConvolution => {
                let request = convolution(element, a, &self.weights, &self.rows);
                self.layers.short_convolution(request, part(&mut **b))?;
            }
            Work::ShortConvolutionBackward => {
                let request = convolution(element, a, &self.weights, &self.rows);
                let gradients = ShortConvolutionGradients {
                    gradient: part(&**b),
                    x_gradient: part(&mut **c),
                    weight_sums: part(&mut **d),
                };
                self.layers.short_convolution_backward(request, gradients)?;
            }
            Work::DeltaPrepare | Work::DeltaLocal => self.delta(work, element)?,
        }
        Ok(self.stream.synchronize()?)
    }

    /// The kernels of the delta rule, as the backward launches them: with all that they can write.
    fn delta(&self, work: Work, element: KernelType) -> Outcome<()> {
        const CHUNK: usize = DeltaSizes::CHUNK;
        let DeltaSizes {
            key_dim, value_dim, ..
        } = DELTA;
        let chunks = 0..DELTA.tokens / CHUNK;
        let units = chunks.len() * DELTA.matrices();
        let zeros = |rows: usize, columns: usize| self.stream.zeros::<f32>(units * rows * columns);
        let mut numbers = zeros(6, CHUNK)?;
        let mut left = zeros(CHUNK, key_dim + CHUNK)?;
        if matches!(work, Work::DeltaLocal) {
            let products = zeros(CHUNK, 2 * CHUNK)?;
            let (mut inverse, mut decays) = (zeros(CHUNK, CHUNK)?, zeros(CHUNK, CHUNK)?);
            self.layers.local_delta(DeltaLocal {
                sizes: DELTA,
                chunks,
                products: part(&products),
                numbers: part(&numbers),
                left: part(&mut left),
                inverse: part(&mut inverse),
                decays: Some(part(&mut decays)),
            })?;
            return Ok(self.stream.synchronize()?);
        }
        let [a, b, c, ..] = &self.tensors;
        let mut qk = zeros(2 * CHUNK, key_dim)?;
        let mut driven = zeros(CHUNK, value_dim + key_dim)?;
        let mut base = zeros(key_dim + CHUNK, key_dim)?;
        let mut values = zeros(CHUNK, value_dim)?;
        let mut joint = zeros(key_dim + 2 * CHUNK, value_dim)?;
        self.layers.prepare_delta(DeltaPrepare {
            element,
            sizes: DELTA,
            chunks,
            epsilon: 1e-6,
            q: part(&**a),
            k: part(&**b),
            v: part(&**c),
            g: part(&self.rows),
            beta: part(&self.rows),
            qk: part(&mut qk),
            driven: part(&mut driven),
            left: part(&mut left),
            base: part(&mut base),
            numbers: part(&mut numbers),
            backward: Some(DeltaGradient {
                gradient: part(&**c),
                values: part(&mut values),
                joint: part(&mut joint),
            }),
        })?;
        Ok(self.stream.synchronize()?)
    }
}

fn heads<M>(memory: M, layout: HeadsLayout) -> Heads<M> {
    Heads {
        memory,
        offset: 0,
        layout,
    }
}

/// A convolution over one sequence, whose start is the first number of `starts`: the bits of 0 in f32
/// are those in i32.
fn convolution<'a>(
    element: KernelType,
    x: &'a DeviceMemory,
    weight: &'a DeviceMemory,
    starts: &'a DeviceMemory,
) -> ShortConvolution<'a> {
    ShortConvolution {
        element,
        size: [TOKENS, COLUMNS],
        taps: TAPS,
        sequences: 1,
        x: part(x),
        weight: part(weight),
        starts: part(starts),
    }
}

fn part<M>(memory: M) -> MemoryPart<M> {
    MemoryPart { memory, offset: 0 }
}
