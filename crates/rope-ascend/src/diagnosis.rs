//! The parts of CANN on this machine, the rotation paths that work with them, and the parts that
//! the others lack.

use std::env;
use std::path::{Path, PathBuf};

use crate::error::{AscendError, LoadError};
use crate::loader::{self, Api, LibraryNames, Opened, candidates};
use crate::rope::{CACHE_VARIABLE, KERNELS_VARIABLE, Npu};
use crate::safe::{Architecture, Device, Runtime};

mod launches;
pub use launches::LaunchFinding;
use launches::launches;

/// Environment variables that affect the search.
const SETTINGS: [&str; 7] = [
    loader::PATH_VARIABLE,
    "ASCEND_HOME_PATH",
    "ASCEND_TOOLKIT_HOME",
    "LD_LIBRARY_PATH",
    KERNELS_VARIABLE,
    CACHE_VARIABLE,
    loader::POOL_VARIABLE,
];

/// Libraries with their purposes and the remedies if they are missing.
const LIBRARIES: [(LibraryNames, &str, &str); 5] = [
    (loader::RUNTIME, "everything", INSTALL),
    (loader::DESCRIPTORS, "the stock operators", OPERATORS_REMEDY),
    (loader::OPERATORS, "the stock operators", OPERATORS_REMEDY),
    (
        loader::COMPILER,
        "our kernels, compiled at run time",
        NO_COMPILER,
    ),
    (loader::COLLECTIVES, "training on several devices", INSTALL),
];

/// The purposes of functions, by the prefix of their names.
const PURPOSES: [(&str, &str); 11] = [
    ("aclrtBinary", "our kernels"),
    (
        "aclrtLaunchKernelWithArgsArray",
        "arguments placed by the binary's description",
    ),
    (
        "aclrtFunctionGetParamCount",
        "arguments placed by the binary's description",
    ),
    ("aclrtLaunchKernel", "our kernels"),
    ("aclrtKernelArgs", "our kernels"),
    ("aclrtGetDeviceInfo", "our kernels (sizes of the device)"),
    ("aclrtMallocAlign32", "device memory without padding"),
    ("aclrtCreateStream", "faster launches and waits"),
    ("aclnn", "this stock operator"),
    ("aclCreate", "the stock operators"),
    ("aclDestroy", "the stock operators"),
];

const INSTALL: &str = "\
    install the CANN toolkit (or its runtime package) and source its set_env.sh; where it is not in \
    a standard place, set ROPE_ASCEND_LIB_PATH to the folder of its libraries";
const OPERATORS_REMEDY: &str =
    "install the CANN operator package for this product, or use our kernels, which need none of it";
const NO_COMPILER: &str = "install CANN 8.5 or later, or compile the kernels beforehand";
const PRECOMPILE: &str = "\
    in rope-ascend's folder: cmake -S kernels -B build/kernels -DROPE_NPU_ARCH=dav-2201 && cmake \
    --build build/kernels, then set ROPE_ASCEND_KERNELS to build/kernels/rope-dav-2201.o there \
    (dav-3510 for Ascend 950)";

/// The state of one part: present, or missing with the reason and the remedy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Finding {
    /// Present, with a description.
    Ready(String),
    /// Missing.
    Missing {
        /// The reason.
        reason: String,
        /// The remedy.
        remedy: String,
    },
}

impl Finding {
    /// True if the part is present.
    pub fn is_ready(&self) -> bool {
        matches!(self, Self::Ready(_))
    }

    fn missing(reason: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self::Missing {
            reason: reason.into(),
            remedy: remedy.into(),
        }
    }
}

/// A library, or several that form one role.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LibraryFinding {
    /// Its role.
    pub role: &'static str,
    /// Its purpose.
    pub needed_for: &'static str,
    /// The path found, or the paths searched.
    pub found: Finding,
}

/// A device as described by the runtime.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceFinding {
    /// Its name for `--device`.
    pub name: String,
    /// Product, architecture, cores and memory.
    pub found: Finding,
}

/// A missing function.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MissingSymbol {
    /// Its name.
    pub symbol: &'static str,
    /// Its purpose.
    pub needed_for: &'static str,
}

/// An implementation of the rotation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PathFinding {
    /// Its name.
    pub name: &'static str,
    /// True if it works.
    pub found: Finding,
}

/// The complete diagnosis.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Diagnosis {
    /// Environment variables that affect the search, with their values if set.
    pub settings: Vec<(&'static str, Option<String>)>,
    /// Driver and toolkit: their version files and versions.
    pub installed: Vec<(PathBuf, String)>,
    /// Libraries.
    pub libraries: Vec<LibraryFinding>,
    /// The runtime and its version.
    pub runtime: Finding,
    /// Devices.
    pub devices: Vec<DeviceFinding>,
    /// Functions missing from the libraries found.
    pub missing_symbols: Vec<MissingSymbol>,
    /// A launch of each family of this crate's kernels; empty without kernels or a device.
    pub launches: Vec<LaunchFinding>,
    /// Implementations of the rotation.
    pub paths: Vec<PathFinding>,
}

impl Diagnosis {
    /// Diagnoses the installed CANN, if any. It never fails: every problem is a finding.
    pub fn of_installation() -> Self {
        let api = Api::open(None);
        let opened = api.as_ref().map_or(&[][..], |api| &api.opened);
        let set = |name| env::var_os(name).map(|value| value.to_string_lossy().into_owned());
        let mut found = Self {
            settings: SETTINGS.map(|name| (name, set(name))).into(),
            installed: installed(),
            libraries: LIBRARIES.iter().map(|row| library(*row, opened)).collect(),
            runtime: Finding::missing("", INSTALL),
            devices: Vec::new(),
            missing_symbols: Vec::new(),
            launches: Vec::new(),
            paths: Vec::new(),
        };
        match api {
            Ok(api) => {
                // Checked before the runtime is started, which also needs a driver.
                let mut operators = operators(&api);
                found.missing_symbols = missing_symbols(&api);
                let compiler = api.rtc.as_ref().map(|_| ()).map_err(Clone::clone);
                (found.runtime, found.devices) = match Npu::runtime() {
                    Ok(runtime) => (version(&runtime), devices(&runtime)),
                    Err(error) => (refused(&error), Vec::new()),
                };
                let first = Npu::runtime().and_then(|runtime| runtime.device(0));
                operators.extend(first.ok().and_then(|device| both_gradients(&device)));
                (found.paths, found.launches) = own_kernels(&found.devices, compiler);
                found.paths.extend(operators);
            }
            Err(error) => {
                found.runtime = Finding::missing(short(&error), INSTALL);
                let operators = OPERATORS.iter().map(|(name, _)| *name);
                let names = [BEFOREHAND, AT_RUN_TIME].into_iter().chain(operators);
                let path = |name| PathFinding {
                    name,
                    found: Finding::missing("there is no Ascend runtime", INSTALL),
                };
                found.paths = names.map(path).collect();
            }
        }
        found
    }

    /// Diagnoses an open device, such as the simulator's, and builds and runs its kernels.
    pub fn of(npu: &Npu) -> Self {
        let runtime = npu.device().runtime();
        let api = runtime.api();
        let (made, launches) = run_kernels(npu);
        let mut paths = vec![PathFinding {
            name: "our kernels",
            found: made,
        }];
        paths.extend(operators(api));
        paths.extend(both_gradients(npu.device()));
        Self {
            runtime: version(runtime),
            devices: vec![device(&npu.name(), npu.device())],
            missing_symbols: missing_symbols(api),
            launches,
            paths,
            settings: Vec::new(),
            installed: Vec::new(),
            libraries: Vec::new(),
        }
    }

    /// True if nothing is missing.
    pub fn is_complete(&self) -> bool {
        let found = self.libraries.iter().map(|library| &library.found);
        let found = found.chain(self.devices.iter().map(|device| &device.found));
        let found = found.chain(self.paths.iter().map(|path| &path.found));
        let launches = self.launches.iter().map(|launch| &launch.found);
        let mut found = found.chain(launches).chain([&self.runtime]);
        self.missing_symbols.is_empty() && !self.devices.is_empty() && found.all(Finding::is_ready)
    }
}

const RUNTIME_REMEDY: &str = "\
    check the driver: npu-smi info must list the devices, and the user must be allowed to open \
    /dev/davinci* (in a container, pass these devices in)";
const BEFOREHAND: &str = "our kernels, compiled beforehand";
const AT_RUN_TIME: &str = "our kernels, compiled at run time";
/// Stock operators, each with its functions, of which one pair suffices.
const OPERATORS: [(&str, &[&str]); 3] = [
    (
        "npu_mrope, with a gradient",
        &["aclnnRopeWithSinCosCacheV2", "aclnnRopeWithSinCosCache"],
    ),
    ("npu_rotary_mul", &["aclnnRotaryPositionEmbedding"]),
    (
        "npu_rotary_mul's gradient",
        &["aclnnRotaryPositionEmbeddingGrad"],
    ),
];

/// Of Ascend 950, from CANN's releases of 2026: no fault where it is missing.
const BOTH_GRADIENTS: &str = "aclnnApplyRotaryPosEmbGrad";

fn short(error: &LoadError) -> String {
    match error {
        LoadError::LibraryNotFound { library, .. } => format!("no {library} found"),
        other => other.to_string(),
    }
}

fn library(
    (names, needed_for, remedy): (LibraryNames, &'static str, &str),
    opened: &[Opened],
) -> LibraryFinding {
    let listed = |paths: &mut dyn Iterator<Item = &PathBuf>| {
        let paths: Vec<String> = paths.map(|path| path.display().to_string()).collect();
        paths.join(", ")
    };
    let found = opened.iter().filter(|library| library.role == names.role);
    let found = listed(&mut found.map(|library| &library.path));
    let found = if found.is_empty() {
        let tried = listed(&mut candidates(names, None).iter());
        Finding::missing(format!("tried {tried}"), remedy)
    } else {
        Finding::Ready(found)
    };
    LibraryFinding {
        role: names.role,
        needed_for,
        found,
    }
}

/// The finding for an error of the runtime.
fn refused(error: &AscendError) -> Finding {
    Finding::missing(error.to_string(), RUNTIME_REMEDY)
}

fn version(runtime: &Runtime) -> Finding {
    let origin = &runtime.api().origin;
    match runtime.version() {
        Ok(Some((major, minor, patch))) => {
            Finding::Ready(format!("{origin}, ACL {major}.{minor}.{patch}"))
        }
        Ok(None) => Finding::Ready(format!("{origin}, which does not report its version")),
        Err(error) => refused(&error),
    }
}

fn devices(runtime: &Runtime) -> Vec<DeviceFinding> {
    let failed = |name, error| DeviceFinding {
        name,
        found: refused(&error),
    };
    let found = |ordinal| {
        let name = format!("ascend:{ordinal}");
        match runtime.device(ordinal) {
            Ok(found) => device(&name, &found),
            Err(error) => failed(name, error),
        }
    };
    match runtime.device_count() {
        Ok(count) => (0..count).map(found).collect(),
        Err(error) => vec![failed("ascend".into(), error)],
    }
}

fn device(name: &str, device: &Device) -> DeviceFinding {
    let describe = || -> crate::Result<String> {
        let soc = device.soc_name()?.unwrap_or_else(|| "unnamed".into());
        let machine = device.machine()?;
        let (_, total) = device.memory()?;
        Ok(format!(
            "{soc}, {}, {} vector cores, {} bytes of unified buffer each, {} GiB",
            machine.architecture.name(),
            machine.vector_cores,
            machine.ub_bytes,
            total >> 30
        ))
    };
    let remedy = "the kernels are for Atlas A2 and A3 (dav-2201) and Ascend 950 (dav-3510)";
    DeviceFinding {
        name: name.to_owned(),
        found: describe().map_or_else(
            |error| Finding::missing(error.to_string(), remedy),
            Finding::Ready,
        ),
    }
}

fn missing_symbols(api: &Api) -> Vec<MissingSymbol> {
    let mut symbols = api.rt.missing();
    if let Ok(meta) = &api.meta {
        symbols.extend(meta.missing());
    }
    let rotary = api.rotary.missing().into_iter();
    symbols.extend(rotary.filter(|symbol| !symbol.starts_with(BOTH_GRADIENTS)));
    let purpose = |symbol: &str| {
        let known = PURPOSES
            .iter()
            .find(|(prefix, _)| symbol.starts_with(prefix));
        known.map_or("details", |(_, purpose)| purpose)
    };
    symbols
        .into_iter()
        .map(|symbol| MissingSymbol {
            symbol,
            needed_for: purpose(symbol),
        })
        .collect()
}

/// The two sources of kernels on an installed CANN. On a device, the kernels are run rather than
/// only searched for.
fn own_kernels(
    devices: &[DeviceFinding],
    compiler: Result<(), LoadError>,
) -> (Vec<PathFinding>, Vec<LaunchFinding>) {
    let file = env::var_os(KERNELS_VARIABLE);
    let usable = devices.iter().any(|device| device.found.is_ready());
    let run = || match Npu::open(0) {
        _ if !usable => (
            Finding::missing("there is no usable device", RUNTIME_REMEDY),
            Vec::new(),
        ),
        Ok(npu) => run_kernels(&npu),
        Err(error) => (refused(&error), Vec::new()),
    };
    let missing = |reason, remedy: &str| (Finding::missing(reason, remedy), Vec::new());
    let (beforehand, mut launches) = match &file {
        None => missing(format!("{KERNELS_VARIABLE} is not set"), PRECOMPILE),
        Some(path) if !Path::new(path).is_file() => missing(
            format!(
                "{KERNELS_VARIABLE} names no file: {}",
                Path::new(path).display()
            ),
            PRECOMPILE,
        ),
        Some(_) => run(),
    };
    let at_run_time = match compiler {
        Err(error) => Finding::missing(short(&error), NO_COMPILER),
        Ok(()) if file.is_some() => {
            Finding::Ready(format!("not used while {KERNELS_VARIABLE} is set"))
        }
        Ok(()) => {
            let (made, run) = run();
            launches = run;
            made
        }
    };
    let paths = [(BEFOREHAND, beforehand), (AT_RUN_TIME, at_run_time)]
        .map(|(name, found)| PathFinding { name, found })
        .into();
    (paths, launches)
}

/// Builds the kernels and launches one of each family. Returns the state of the kernels, including
/// the first launch, and the result of each launch.
fn run_kernels(npu: &Npu) -> (Finding, Vec<LaunchFinding>) {
    let kernels = match npu.kernels() {
        Ok(kernels) => kernels,
        Err(AscendError::NoKernels { reason, remedy, .. }) => {
            return (Finding::missing(reason, remedy), Vec::new());
        }
        Err(error) => return (refused(&error), Vec::new()),
    };
    let launches = launches(npu, &kernels);
    let rotation = launches.first().map(|launch| launch.found.clone());
    let made = match rotation {
        Some(missing @ Finding::Missing { .. }) => missing,
        Some(Finding::Ready(_)) | None => Finding::Ready("compiled, run, result correct".into()),
    };
    (made, launches)
}

fn operators(api: &Api) -> Vec<PathFinding> {
    let missing = api.rotary.missing();
    let both = |name: &str| {
        let plan = format!("{name}GetWorkspaceSize");
        !missing
            .iter()
            .any(|symbol| *symbol == name || *symbol == plan)
    };
    OPERATORS
        .iter()
        .map(|(name, functions)| {
            let found = match (functions.iter().find(|name| both(name)), &api.meta) {
                (Some(function), Ok(_)) => Finding::Ready((*function).to_owned()),
                (Some(_), Err(error)) => Finding::missing(short(error), OPERATORS_REMEDY),
                (None, _) => Finding::missing(
                    format!("the operator libraries lack {}", functions.join(" and ")),
                    OPERATORS_REMEDY,
                ),
            };
            PathFinding { name, found }
        })
        .collect()
}

/// The gradient of q and k in one call, on products that it is made for. An installation without
/// it lacks nothing: the gradients are two calls then.
fn both_gradients(device: &Device) -> Option<PathFinding> {
    (device.machine().ok()?.architecture == Architecture::Dav3510).then(|| {
        let missing = device.runtime().api().rotary.missing();
        let found = if missing.iter().any(|name| name.starts_with(BOTH_GRADIENTS)) {
            format!("two calls, for this CANN has no {BOTH_GRADIENTS}")
        } else {
            BOTH_GRADIENTS.to_owned()
        };
        PathFinding {
            name: "npu_rotary_mul's gradient of q and k at once",
            found: Finding::Ready(found),
        }
    })
}

/// The existing version files of driver and toolkit.
fn installed() -> Vec<(PathBuf, String)> {
    let mut files = vec![PathBuf::from("/usr/local/Ascend/driver/version.info")];
    let homes = ["ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"];
    for home in homes.iter().filter_map(env::var_os) {
        // The last two since CANN 8.5, a folder for each package (cmake/package.cmake of runtime at
        // 681ef7610df1 and of asc-devkit at 82b89a15f).
        for name in [
            "aarch64-linux/ascend_toolkit_install.info",
            "x86_64-linux/ascend_toolkit_install.info",
            "share/info/runtime/version.info",
            "share/info/asc-devkit/version.info",
        ] {
            let file = Path::new(&home).join(name);
            if !files.contains(&file) {
                files.push(file);
            }
        }
    }
    let version = |file: &PathBuf| {
        let text = plain_files::read_text(file, plain_files::MAX_TEXT_BYTES).ok()?;
        let line = text
            .lines()
            .find(|line| line.to_lowercase().starts_with("version"))?;
        Some(line.split_once('=')?.1.trim().to_owned())
    };
    files
        .into_iter()
        .filter_map(|file| version(&file).map(|version| (file, version)))
        .collect()
}
