//! What CubeCL makes of the GPU kernels for NVIDIA's compiler, on a machine without a GPU:
//! `cuda-source FOLDER` writes CUDA C++, a file for each launch of the cases below, and
//! `kernels.json`, what `cargo xaudit gpu-kernels` holds the compiled kernels to.
//!
//! The crates launch as they would on a GPU: the tensors lie on a device with the properties that
//! CubeCL's CUDA runtime states, whose server compiles each launch and runs none. Tensors have no
//! memory, so they may be of any size.

#![allow(unsafe_code, reason = "CubeCL declares launches so; none runs")]

use std::any::Any;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use burn::tensor::{DType, Shape};
use burn_attention::{AdamWOp, AdamWOps, RmsNormOps, SwiGluOps};
use burn_cubecl::cubecl::client::Client;
use burn_cubecl::cubecl::ir::{
    DeviceIdentity, DeviceProperties, HardwareProperties, MemoryDeviceProperties, TargetProperties,
    VectorSize, features::Plane,
};
use burn_cubecl::cubecl::{Compiler as _, CubeKernel};
use burn_cubecl::ops::numeric::{empty_device_contiguous_dtype, empty_device_dtype};
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{CubeBackend, CubeDevice};
use cubecl_common::bytes::Bytes;
use cubecl_common::device::{DeviceId, DeviceService, ServiceId};
use cubecl_common::profile::{ProfileDuration, TimingMethod};
use cubecl_cpp::register_supported_types;
use cubecl_cpp::shared::{CompilationOptions, CppCompiler, CppSupportedFeatures};
use cubecl_cpp::target::Cuda;
use cubecl_environment::future::DynFut;
use cubecl_environment::stream::StreamId;
use cubecl_server::allocator::PitchedMemoryLayoutPolicy;
use cubecl_server::dry_run::LaunchMode;
use cubecl_server::logging::ServerLogger;
use cubecl_server::memory_management::{
    ManagedMemoryHandle, MemoryAllocationMode, StreamMemoryReport,
};
use cubecl_server::server::{
    BufferBinding, CopyDescriptor, CubeCount, KernelArguments, ProfileError, ProfilingToken,
    Server, ServerCommunication, ServerError, ServerStorage, ServerUtilities,
};
use cubecl_server::storage::{BytesResource, BytesStorage, ManagedResource};
use rope_burn::{NormRotaryOp, NormRotaryOps, RotaryOp, RotaryOps};
use rope_core::{Direction, Geometry, HeadNorm, Layout, NormOrder, Pairing};
use serde::Serialize;

/// What was launched since it was last taken.
static LAUNCHED: Mutex<Vec<Result<Source, String>>> = Mutex::new(Vec::new());

struct Source {
    kernel: String,
    entry: String,
    text: String,
    units_of_cube: u32,
    cubes: u64,
}

/// Compiles what is launched, and runs nothing.
#[derive(Debug)]
struct OnlyCompiles {
    utilities: Arc<ServerUtilities>,
}

impl DeviceService for OnlyCompiles {
    fn init(device: DeviceId) -> Self {
        // Those of a GPU of compute capability 8.0 and later, as CubeCL's CUDA runtime states them.
        let hardware = HardwareProperties {
            load_width: 128,
            vector_register_count: None,
            plane_size_min: 32,
            plane_size_max: 32,
            max_bindings: 1024,
            max_shared_memory_size: 99 << 10,
            max_cube_count: (i32::MAX as u32, 0xffff, 0xffff),
            max_units_per_cube: 1024,
            max_cube_dim: (1024, 1024, 64),
            num_streaming_multiprocessors: Some(132),
            num_tensor_cores: Some(4),
            min_tensor_cores_dim: Some(8),
            num_cpu_cores: None,
            last_level_cache_size: None,
            max_vector_size: VectorSize::MAX,
            cube_mma_reserved_shared_memory: 0,
        };
        let mut properties = DeviceProperties::new(
            Default::default(),
            MemoryDeviceProperties::new(1 << 40, ALIGNMENT as u64),
            hardware,
            TimingMethod::Device,
            DeviceIdentity {
                name: "none".to_owned(),
                fingerprint: "none".to_owned(),
                physical: None,
            },
        );
        register_supported_types(&mut properties);
        properties.features.memory_reinterpret = true;
        properties.features.alignment = true;
        properties.features.device_memory_scope = true;
        properties.features.plane.insert(Plane::Ops);
        properties
            .features
            .plane
            .insert(Plane::NonUniformControlFlow);
        let (utilities, _) = ServerUtilities::init(
            ServiceId::of::<Self>(device),
            "cuda",
            properties,
            TargetProperties::default(),
            Arc::new(ServerLogger::default()),
            PitchedMemoryLayoutPolicy::new(ALIGNMENT),
        );
        Self {
            utilities: Arc::new(utilities),
        }
    }

    fn utilities(&self) -> Arc<dyn Any + Send + Sync> {
        self.utilities.clone()
    }
}

/// Bytes that rows of a tensor are aligned to, as by CubeCL's CUDA runtime.
const ALIGNMENT: usize = 512;

impl OnlyCompiles {
    fn compile(kernel: &dyn CubeKernel, count: &CubeCount) -> Result<Source, String> {
        let options = CompilationOptions {
            supports_features: CppSupportedFeatures {
                fast_math: true,
                dp4a: true,
                grid_constants: true,
                ..Default::default()
            },
            ..Default::default()
        };
        let definition = kernel.define();
        let entry = definition.settings.kernel_name.clone();
        let dim = definition.settings.cube_dim;
        let CubeCount::Static(x, y, z) = *count else {
            return Err(format!("{entry}: its count of cubes lies on the device"));
        };
        let compiled = CppCompiler::<Cuda>::default().compile(definition, &options);
        let compiled = compiled.map_err(|error| format!("{entry}: {error}"))?;
        Ok(Source {
            kernel: short_name(kernel.name()),
            entry,
            text: compiled.source,
            units_of_cube: dim.x * dim.y * dim.z,
            cubes: u64::from(x) * u64::from(y) * u64::from(z),
        })
    }
}

/// The function of `a::b::function::Function<..>`.
fn short_name(name: &str) -> String {
    let path = name.split('<').next().unwrap_or(name);
    path.rsplit("::").nth(1).unwrap_or(path).to_owned()
}

impl ServerCommunication for OnlyCompiles {}

impl Server for OnlyCompiles {
    fn initialize_memory(
        &mut self,
        _: ManagedMemoryHandle,
        _: u64,
        _: StreamId,
    ) -> Result<(), ServerError> {
        Ok(())
    }

    fn logger(&self) -> Arc<ServerLogger> {
        self.utilities.logger.clone()
    }

    fn utilities(&self) -> Arc<ServerUtilities> {
        self.utilities.clone()
    }

    fn read(
        &mut self,
        _: Vec<CopyDescriptor>,
        _: StreamId,
    ) -> DynFut<Result<Vec<Bytes>, ServerError>> {
        unimplemented!("nothing is computed")
    }

    fn write(&mut self, _: Vec<(CopyDescriptor, Bytes)>, _: StreamId) {}

    fn sync(&mut self, _: Vec<BufferBinding>, _: StreamId) -> DynFut<Result<(), ServerError>> {
        Box::pin(async { Ok(()) })
    }

    fn check(&mut self, _: Vec<BufferBinding>, _: StreamId) -> Result<(), ServerError> {
        Ok(())
    }

    unsafe fn launch(
        &mut self,
        kernel: Box<dyn CubeKernel>,
        count: CubeCount,
        _: KernelArguments,
        _: StreamId,
        _: LaunchMode,
    ) {
        let source = Self::compile(&*kernel, &count);
        LAUNCHED.lock().expect("no launch panics").push(source);
    }

    fn flush(&mut self, _: StreamId) -> Result<(), ServerError> {
        Ok(())
    }

    fn memory_report(&mut self, _: StreamId) -> Option<StreamMemoryReport> {
        None
    }

    fn memory_cleanup(&mut self, _: StreamId) -> Result<(), ServerError> {
        Ok(())
    }

    fn start_profile(&mut self, _: StreamId) -> Result<ProfilingToken, ServerError> {
        unimplemented!("nothing runs")
    }

    fn end_profile(
        &mut self,
        _: StreamId,
        _: ProfilingToken,
    ) -> Result<ProfileDuration, ProfileError> {
        unimplemented!("nothing runs")
    }

    fn allocation_mode(&mut self, _: MemoryAllocationMode, _: StreamId) {}
}

impl ServerStorage for OnlyCompiles {
    type Storage = BytesStorage;

    fn get_resource(
        &mut self,
        _: BufferBinding,
        _: StreamId,
    ) -> Result<ManagedResource<BytesResource>, ServerError> {
        unimplemented!("tensors have no memory")
    }
}

/// What is launched.
#[derive(Clone, Copy)]
enum Launches {
    /// q and k.
    Pair,
    Single,
    AngleGradients,
    Norm(NormOrder),
    NormBackward(NormOrder),
    Layer(Layer),
}

/// Kernels of a layer over tokens with all channels of q, and of its update.
#[derive(Clone, Copy)]
enum Layer {
    /// With the gradient in f32, or in the type of the case.
    Update,
    NarrowUpdate,
    SquareSums,
    RmsNorm,
    RmsNormBackward,
    SwiGlu,
    SwiGluBackward,
}

/// A case: Qwen3-VL-8B's q and k at 8192 tokens, but for what is said here.
#[derive(Clone, Copy)]
struct Case {
    name: &'static str,
    launches: Launches,
    direction: Direction,
    pairing: Pairing,
    layout: Layout,
    /// Channels of a head, rotated ones, and the first of those.
    head: [usize; 3],
    per_channel: bool,
    /// Whether the tensors are shared, so that new ones are written.
    shared: bool,
    tokens: usize,
    /// Channels in one access of f32 and of the 16-bit types.
    channels: [usize; 2],
}

const CASE: Case = Case {
    name: "",
    launches: Launches::Pair,
    direction: Direction::Forward,
    pairing: Pairing::Half,
    layout: Layout::Bsnd,
    head: [128, 128, 0],
    per_channel: false,
    shared: false,
    tokens: 8192,
    channels: [4, 8],
};

const HEADS: usize = 32;
const KV_HEADS: usize = 8;

const CASES: &[Case] = &[
    Case {
        name: "q and k, in place",
        ..CASE
    },
    Case {
        name: "adjoint, in place",
        direction: Direction::Adjoint,
        ..CASE
    },
    Case {
        name: "into new tensors",
        shared: true,
        ..CASE
    },
    Case {
        name: "BNSD",
        layout: Layout::Bnsd,
        ..CASE
    },
    Case {
        name: "adjacent",
        pairing: Pairing::Adjacent,
        ..CASE
    },
    Case {
        name: "adjacent, adjoint",
        pairing: Pairing::Adjacent,
        direction: Direction::Adjoint,
        ..CASE
    },
    Case {
        name: "quarter",
        pairing: Pairing::Quarter,
        ..CASE
    },
    Case {
        name: "interleave-half",
        pairing: Pairing::InterleaveHalf,
        ..CASE
    },
    Case {
        name: "per channel",
        per_channel: true,
        ..CASE
    },
    Case {
        name: "partial, into new tensors",
        head: [128, 64, 32],
        shared: true,
        ..CASE
    },
    Case {
        name: "one token",
        tokens: 1,
        ..CASE
    },
    Case {
        name: "head of 80",
        head: [80, 80, 0],
        ..CASE
    },
    Case {
        name: "head of 72",
        head: [72, 72, 0],
        channels: [4, 4],
        ..CASE
    },
    Case {
        name: "head of 36",
        head: [36, 36, 0],
        channels: [2, 2],
        ..CASE
    },
    Case {
        name: "head of 18",
        head: [18, 18, 0],
        channels: [1, 1],
        ..CASE
    },
    Case {
        name: "more than 2^32 elements",
        tokens: 1 << 21,
        ..CASE
    },
    Case {
        name: "one tensor",
        launches: Launches::Single,
        ..CASE
    },
    Case {
        name: "gradients of cos and sin",
        launches: Launches::AngleGradients,
        ..CASE
    },
    Case {
        name: "norm, rotation",
        launches: Launches::Norm(NormOrder::BeforeRotation),
        ..CASE
    },
    Case {
        name: "rotation, norm",
        launches: Launches::Norm(NormOrder::AfterRotation),
        ..CASE
    },
    Case {
        name: "norm, rotation: backward",
        launches: Launches::NormBackward(NormOrder::BeforeRotation),
        ..CASE
    },
    Case {
        name: "rotation, norm: backward",
        launches: Launches::NormBackward(NormOrder::AfterRotation),
        ..CASE
    },
    Case {
        name: "update, gradient in f32",
        launches: Launches::Layer(Layer::Update),
        channels: [4, 4],
        ..CASE
    },
    Case {
        name: "update",
        launches: Launches::Layer(Layer::NarrowUpdate),
        channels: [4, 4],
        ..CASE
    },
    Case {
        name: "sums of squares",
        launches: Launches::Layer(Layer::SquareSums),
        ..CASE
    },
    Case {
        name: "norm of rows",
        launches: Launches::Layer(Layer::RmsNorm),
        channels: [4, 4],
        ..CASE
    },
    Case {
        name: "norm of rows: backward",
        launches: Launches::Layer(Layer::RmsNormBackward),
        channels: [4, 4],
        ..CASE
    },
    Case {
        name: "gate",
        launches: Launches::Layer(Layer::SwiGlu),
        ..CASE
    },
    Case {
        name: "gate: backward",
        launches: Launches::Layer(Layer::SwiGluBackward),
        ..CASE
    },
];

impl Case {
    fn run(&self, client: &Client, dtype: DType) {
        let [head_dim, rotary_dim, offset] = self.head;
        let geometry = Geometry::new(head_dim, rotary_dim, offset, self.pairing, self.per_channel);
        let geometry = geometry.expect("the cases are valid");
        let device = CubeDevice::Cuda(Default::default());
        let heads = |heads: usize| {
            let shape = match self.layout {
                Layout::Bnsd => [1, heads, self.tokens, head_dim],
                _ => [1, self.tokens, heads, head_dim],
            };
            empty_device_dtype(client.clone(), device.clone(), Shape::new(shape), dtype)
        };
        let flat = |shape: Shape| {
            let dtype = if dtype == DType::F64 {
                dtype
            } else {
                DType::F32
            };
            empty_device_contiguous_dtype(client.clone(), device.clone(), shape, dtype)
        };
        let angles = flat(Shape::new([self.tokens, 2 * geometry.lane_count()]));
        let weight = flat(Shape::new([head_dim]));
        let op = RotaryOp {
            geometry,
            layout: self.layout,
            direction: self.direction,
        };
        let norm = |order| NormRotaryOp {
            geometry,
            layout: self.layout,
            norm: HeadNorm::new(1e-6).expect("valid").with_order(order),
            skips_weight: false,
        };
        let q = heads(HEADS);
        let other = self.shared.then(|| q.clone());
        match self.launches {
            Launches::Pair => {
                let k = heads(KV_HEADS);
                let other_k = self.shared.then(|| k.clone());
                CubeBackend::rotary_pair(q, k, angles, op);
                drop(other_k);
            }
            Launches::Single => {
                CubeBackend::rotary_single(q, angles, op);
            }
            Launches::AngleGradients => {
                CubeBackend::rotary_angle_gradients(q, heads(HEADS), angles, op);
            }
            Launches::Norm(order) => {
                CubeBackend::norm_rotary(q, weight, angles, norm(order));
            }
            Launches::NormBackward(order) => {
                let gradient = heads(HEADS);
                CubeBackend::norm_rotary_backward(q, weight, angles, gradient, norm(order));
            }
            Launches::Layer(layer) => {
                let tokens = Shape::new([self.tokens, HEADS * head_dim]);
                let rows = flat(Shape::new([self.tokens, 1]));
                let weight = flat(Shape::new([HEADS * head_dim]));
                let wide = || flat(tokens.clone());
                let narrow = || {
                    let shape = tokens.clone();
                    empty_device_contiguous_dtype(client.clone(), device.clone(), shape, dtype)
                };
                layer.run(dtype, [rows, weight], wide, narrow);
            }
        }
        drop(other);
    }
}

impl Layer {
    fn run(
        self,
        dtype: DType,
        [rows, weight]: [CubeTensor; 2],
        wide: impl Fn() -> CubeTensor,
        narrow: impl Fn() -> CubeTensor,
    ) {
        let op = AdamWOp {
            rate: 1e-3,
            decay: 0.1,
            betas: [0.9, 0.999],
            epsilon: 1e-8,
            steps: 1,
            scale: 1.0,
        };
        match self {
            Self::Update => {
                let dtype = dtype.into();
                CubeBackend::adamw_rounded(wide(), wide(), wide(), wide(), op, dtype);
            }
            Self::NarrowUpdate => {
                let dtype = dtype.into();
                CubeBackend::adamw_rounded(wide(), narrow(), wide(), wide(), op, dtype);
            }
            Self::SquareSums => {
                CubeBackend::square_sums(narrow());
            }
            Self::RmsNorm => {
                CubeBackend::rms_norm_forward(narrow(), weight, 1e-6);
            }
            Self::RmsNormBackward => {
                CubeBackend::rms_norm_backward(narrow(), weight, rows, narrow());
            }
            Self::SwiGlu => {
                CubeBackend::swiglu_forward(narrow(), narrow());
            }
            Self::SwiGluBackward => {
                CubeBackend::swiglu_backward(narrow(), narrow(), narrow());
            }
        }
    }
}

/// A compiled launch, as `kernels.json` lists it.
#[derive(Serialize)]
struct Kernel {
    case: &'static str,
    dtype: &'static str,
    kernel: String,
    entry: String,
    file: PathBuf,
    units_of_cube: u32,
    cubes: u64,
    /// Bytes of one access to the tensors, and to cos and sin.
    access_bytes: [usize; 2],
}

fn write(folder: &Path) -> Result<usize, String> {
    let file_error =
        |error: std::io::Error| format!("cannot write to {}: {error}", folder.display());
    std::fs::create_dir_all(folder).map_err(file_error)?;
    let client = Client::load::<OnlyCompiles>(DeviceId::new(0, 0));
    let mut kernels = Vec::new();
    for case in CASES {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            case.run(&client, dtype);
            client.flush().map_err(|error| error.to_string())?;
            let launched = std::mem::take(&mut *LAUNCHED.lock().expect("no launch panics"));
            if launched.is_empty() {
                return Err(format!("{} in {dtype:?}: nothing was launched", case.name));
            }
            let n = case.channels[usize::from(dtype != DType::F32)];
            for source in launched {
                let source = source.map_err(|error| format!("{}: {error}", case.name))?;
                let file = PathBuf::from(format!("{}.cu", kernels.len()));
                std::fs::write(folder.join(&file), source.text).map_err(file_error)?;
                // Sums are added up a number at a time.
                let access_bytes = match source.kernel.as_str() {
                    "add_parts" => [4, 4],
                    // Sums in f32 of the widest vectors of the type.
                    "sums_of_columns" => [16, 16],
                    // Numbers in f32 beside those of the type.
                    "update" | "update_rounded" => [16, n * dtype.size()],
                    _ => [n * dtype.size(), n.min(4) * 4],
                };
                kernels.push(Kernel {
                    case: case.name,
                    dtype: dtype.name(),
                    kernel: source.kernel,
                    entry: source.entry,
                    file,
                    units_of_cube: source.units_of_cube,
                    cubes: source.cubes,
                    access_bytes,
                });
            }
        }
    }
    let list = serde_json::to_string_pretty(&kernels).map_err(|error| error.to_string())?;
    std::fs::write(folder.join("kernels.json"), list).map_err(file_error)?;
    Ok(kernels.len())
}

fn main() {
    let Some(folder) = std::env::args_os().nth(1) else {
        eprintln!("usage: cuda-source FOLDER");
        std::process::exit(2);
    };
    match write(folder.as_ref()) {
        Ok(count) => println!("{count} kernels"),
        Err(error) => {
            eprintln!("error: {error}");
            std::process::exit(1);
        }
    }
}
