//! A device with the kernels, opened once per process.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use rope_core::Geometry;

use super::kernel_files::MAX_KERNEL_BYTES;
use super::kernels::Kernels;
use super::rotator::Rotator;
use crate::error::{AscendError, Result};
use crate::safe::{Device, Runtime, Stream};

/// Variable that names a file of precompiled kernels, which is preferred to compiling at run time.
pub(crate) const KERNELS_VARIABLE: &str = "ROPE_ASCEND_KERNELS";

/// The device to open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Target {
    Ascend(u32),
    #[cfg(feature = "ascend-sim")]
    Simulated(u32),
}

impl Target {
    fn name(self) -> String {
        match self {
            Self::Ascend(ordinal) => format!("ascend:{ordinal}"),
            #[cfg(feature = "ascend-sim")]
            Self::Simulated(0) => "ascend-sim".to_owned(),
            #[cfg(feature = "ascend-sim")]
            Self::Simulated(ordinal) => format!("ascend-sim:{ordinal}"),
        }
    }
}

#[derive(Debug)]
struct Inner {
    target: Target,
    device: Device,
    kernels: OnceLock<Result<Arc<Kernels>>>,
}

/// A real or simulated device with this crate's kernels. Clones share it.
///
/// It is opened once and kept until the process ends, since a process can start the runtime only
/// once. To close it, use [`Runtime`] and [`Kernels`] instead.
///
/// # Examples
/// ```no_run
/// use rope_ascend::rope::Npu;
/// use rope_core::{Geometry, Pairing};
/// let npu = Npu::open(0)?;
/// let stream = npu.stream()?;
/// let rotator = npu.rotator(&stream, Geometry::new(128, 128, 0, Pairing::Half, false)?)?;
/// # Ok::<(), rope_ascend::AscendError>(())
/// ```
#[derive(Clone, Debug)]
pub struct Npu {
    inner: Arc<Inner>,
}

impl Npu {
    /// Opens device `ordinal` through the installed CANN.
    ///
    /// # Errors
    /// [`AscendError::Load`] if CANN is missing; [`AscendError::InvalidArgument`] if there is no
    /// such device; otherwise those of the runtime.
    pub fn open(ordinal: u32) -> Result<Self> {
        let open = || Self::runtime()?.device(ordinal);
        Self::shared(Target::Ascend(ordinal), open)
    }

    /// Uses the calling thread's current device, in a process where another framework owns it; see
    /// [`Runtime::current_device`].
    ///
    /// # Errors
    /// [`AscendError::Load`] if CANN is missing; [`AscendError::InvalidArgument`] if the thread has
    /// set no device.
    pub fn current() -> Result<Self> {
        let device = Self::runtime()?.current_device()?;
        Self::shared(Target::Ascend(device.ordinal()), || Ok(device))
    }

    /// Opens the simulator's first device.
    ///
    /// # Errors
    /// Those of the simulator; none are expected.
    #[cfg(feature = "ascend-sim")]
    pub fn simulated() -> Result<Self> {
        Self::simulated_device(0)
    }

    /// Opens device `ordinal` of the simulator, which has up to 64 devices, created on demand.
    ///
    /// # Errors
    /// [`AscendError::InvalidArgument`] if `ordinal` is beyond these.
    #[cfg(feature = "ascend-sim")]
    pub fn simulated_device(ordinal: u32) -> Result<Self> {
        ascend_sim::control::provide_devices((ordinal + 1).min(64));
        let open = || Self::simulated_runtime()?.device(ordinal);
        Self::shared(Target::Simulated(ordinal), open)
    }

    /// As [`current`](Self::current), on the simulator.
    ///
    /// # Errors
    /// [`AscendError::InvalidArgument`] if the thread has set no device of the simulator.
    #[cfg(feature = "ascend-sim")]
    pub fn simulated_current() -> Result<Self> {
        let device = Self::simulated_runtime()?.current_device()?;
        Self::shared(Target::Simulated(device.ordinal()), || Ok(device))
    }

    /// Returns the installed CANN's runtime, started once and kept until the process ends.
    ///
    /// # Errors
    /// [`AscendError::Load`] if CANN is missing; otherwise those of the runtime.
    pub fn runtime() -> Result<Runtime> {
        static RUNTIME: Mutex<Option<Runtime>> = Mutex::new(None);
        once(&RUNTIME, || Runtime::open(None))
    }

    #[cfg(feature = "ascend-sim")]
    fn simulated_runtime() -> Result<Runtime> {
        static RUNTIME: Mutex<Option<Runtime>> = Mutex::new(None);
        once(
            &RUNTIME,
            || Runtime::start(crate::loader::Api::simulated()?),
        )
    }

    fn shared(target: Target, open_device: impl FnOnce() -> Result<Device>) -> Result<Self> {
        static OPEN: Mutex<Vec<Npu>> = Mutex::new(Vec::new());
        let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(npu) = open.iter().find(|npu| npu.inner.target == target) {
            return Ok(npu.clone());
        }
        let npu = Self {
            inner: Arc::new(Inner {
                target,
                device: open_device()?,
                kernels: OnceLock::new(),
            }),
        };
        open.push(npu.clone());
        Ok(npu)
    }

    /// The name used in tables: `ascend:0`, or `ascend-sim`.
    pub fn name(&self) -> String {
        self.inner.target.name()
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.inner.device
    }

    /// Creates a stream.
    ///
    /// # Errors
    /// Those of the runtime.
    pub fn stream(&self) -> Result<Stream> {
        self.inner.device.stream()
    }

    /// Returns the kernels: from the file of the variable `ROPE_ASCEND_KERNELS`, otherwise compiled
    /// at run time; on the simulator, compiled for the host. They are built at the first call.
    ///
    /// # Errors
    /// [`AscendError::NoKernels`] with a remedy; otherwise those of the runtime.
    pub fn kernels(&self) -> Result<Arc<Kernels>> {
        let kernels = self.inner.kernels.get_or_init(|| {
            let stream = self.stream()?;
            self.make_kernels(&stream).map(Arc::new)
        });
        kernels.clone()
    }

    /// Creates a rotator of `geometry` on one of the device's streams.
    ///
    /// # Errors
    /// As [`Self::kernels`] and [`Rotator::new`].
    pub fn rotator(&self, stream: &Stream, geometry: Geometry) -> Result<Rotator> {
        Rotator::new(stream, self.kernels()?, geometry)
    }

    fn make_kernels(&self, stream: &Stream) -> Result<Kernels> {
        match self.inner.target {
            Target::Ascend(_) => {
                if let Some(path) = std::env::var_os(KERNELS_VARIABLE) {
                    let path = PathBuf::from(path);
                    let binary = plain_files::read(&path, MAX_KERNEL_BYTES).map_err(|error| {
                        let reason =
                            format!("{KERNELS_VARIABLE} is {}: {}", path.display(), error.cause);
                        self.no_kernels(reason, "name the object that cmake built from kernels/")
                    })?;
                    return Kernels::load(stream, &binary);
                }
                Kernels::compile(stream).map_err(|error| match error {
                    AscendError::Load(error) => self.no_kernels(
                        error.to_string(),
                        "build kernels/ with cmake and name the object in ROPE_ASCEND_KERNELS, or \
                         install CANN 8.5 or later to compile at run time",
                    ),
                    other => other,
                })
            }
            #[cfg(feature = "ascend-sim")]
            Target::Simulated(_) => {
                use crate::safe::Architecture;
                let architecture = match self.inner.device.machine()?.architecture {
                    Architecture::Dav2201 => 2201,
                    Architecture::Dav3510 => 3510,
                };
                let binary =
                    ascend_sim::build::KernelSource::from_texts(super::compile::KERNEL_SOURCES)
                        .kernels(kernel_names(architecture))
                        .architecture(architecture)
                        .compile()
                        .map_err(|error| {
                            self.no_kernels(
                                error.to_string(),
                                "a simulated NPU needs g++ or clang++ with C++17",
                            )
                        })?;
                Kernels::load(stream, &binary)
            }
        }
    }

    fn no_kernels(&self, reason: String, remedy: &'static str) -> AscendError {
        AscendError::NoKernels {
            device: self.name(),
            reason,
            remedy,
        }
    }
}

/// Returns the faults of this process that the simulator has found so far, one sentence each; empty
/// without a built-in simulator. After a fault, the simulator continues with a wrong result, as a
/// device would.
pub fn violations() -> Vec<String> {
    #[cfg(feature = "ascend-sim")]
    let found = ascend_sim::control::violations()
        .iter()
        .map(ToString::to_string)
        .collect();
    #[cfg(not(feature = "ascend-sim"))]
    let found = Vec::new();
    found
}

/// The value, created at the first success.
fn once<T: Clone>(cell: &Mutex<Option<T>>, make: impl FnOnce() -> Result<T>) -> Result<T> {
    let mut cell = cell.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(value) = &*cell {
        return Ok(value.clone());
    }
    Ok(cell.insert(make()?).clone())
}

/// The entry points of `kernels/rope/rope.cpp`.
#[cfg(feature = "ascend-sim")]
fn kernel_names(architecture: u32) -> impl Iterator<Item = String> {
    const PAIRS: [&str; 4] = ["split", "adjacent", "deinterleave", "interleave"];
    let kernels = [
        ("rotate", &PAIRS[..]),
        ("angle_grad", &PAIRS[..3]),
        ("norm", &PAIRS[..3]),
        ("norm_grad", &PAIRS[..3]),
    ];
    let matrix = ["rope_matrix_f16", "rope_matrix_bf16"].into_iter();
    let matrix = matrix.filter(move |_| architecture == 2201);
    kernels
        .into_iter()
        .flat_map(|(kernel, pairs)| {
            pairs.iter().flat_map(move |pairs| {
                ["f32", "f16", "bf16"].map(|dtype| format!("rope_{kernel}_{pairs}_{dtype}"))
            })
        })
        .chain(
            [
                "low_rank",
                "swiglu",
                "swiglu_grad",
                "short_convolution",
                "short_convolution_grad",
                "adamw",
                "square_sums",
                "delta_prepare",
            ]
            .into_iter()
            .flat_map(|kernel| {
                ["f32", "f16", "bf16"].map(|dtype| format!("rope_{kernel}_{dtype}"))
            }),
        )
        .chain(
            ["adamw_narrow_f16", "adamw_narrow_bf16", "delta_local_f32"]
                .map(|kernel| format!("rope_{kernel}")),
        )
        .chain(matrix.map(str::to_owned))
}
