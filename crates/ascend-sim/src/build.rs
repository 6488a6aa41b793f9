//! Compiles Ascend C kernel sources for the host, at run time, into libraries that
//! `aclrtBinaryLoadFromData` takes.
//!
//! The result is cached by content (sources, headers, options, compiler) in `ASCEND_SIM_CACHE`, or
//! else in the user's cache folder, so that only a change costs a compilation.

use std::ffi::OsString;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::{env, fs, io};

/// The headers that kernels include, by path and with their text.
macro_rules! headers {
    ($($path:literal)*) => { &[$(($path, include_str!(concat!("../include/", $path)))),*] };
}

const HEADERS: &[(&str, &str)] = headers! {
    "kernel_operator.h"
    "ascend_sim/block.h"
    "ascend_sim/cast.h"
    "ascend_sim/cube.h"
    "ascend_sim/dma.h"
    "ascend_sim/group.h"
    "ascend_sim/keywords.h"
    "ascend_sim/launch.h"
    "ascend_sim/library.h"
    "ascend_sim/numeric.h"
    "ascend_sim/params.h"
    "ascend_sim/queues.h"
    "ascend_sim/rearrange.h"
    "ascend_sim/sync.h"
    "ascend_sim/tensors.h"
    "ascend_sim/vector.h"
    "ascend_sim/vector_engine.h"
};

/// Contraction would fuse a product and a sum that the device rounds apart; narrowing in braces is
/// an error for the device compiler too. It cuts other values off without a word: an implicit
/// conversion that may change a value is an error here, so that the kernel states it.
const OPTIONS: &[&str] = &[
    "-std=c++17",
    "-O2",
    "-fPIC",
    "-shared",
    "-pthread",
    "-fvisibility=hidden",
    "-fno-strict-aliasing",
    "-ffp-contract=off",
    "-Werror=narrowing",
    "-Werror=conversion",
    "-Wno-sign-conversion",
    "-Werror=overflow",
];
const COMPILERS: &[&str] = &["c++", "g++", "clang++"];

/// Why kernels could not be compiled.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BuildError {
    /// There is no C++ compiler.
    #[error(
        "no C++17 compiler found to compile kernels for the simulator, tried {}: \
         install g++ or clang++, or set CXX",
        .tried.join(", ")
    )]
    NoCompiler {
        /// The commands that were tried.
        tried: Vec<String>,
    },
    /// The compiler rejected the source.
    #[error("{} does not compile for dav-{architecture}: {output}", .path.display())]
    Compile {
        /// The kernel source.
        path: PathBuf,
        /// The architecture it was compiled for.
        architecture: u32,
        /// The compiler's output.
        output: String,
    },
    /// A file could not be read or written.
    #[error("cannot access {}: {error}", .path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The error of the system.
        #[source]
        error: io::Error,
    },
}

/// Result of a compilation.
pub type Result<T> = std::result::Result<T, BuildError>;

#[derive(Clone, Debug)]
enum Origin {
    File(PathBuf),
    Texts(Vec<(String, String)>),
}

/// A kernel source and what it takes to compile it.
#[derive(Clone, Debug)]
pub struct KernelSource {
    origin: Origin,
    kernels: Vec<String>,
    defines: Vec<String>,
    architecture: u32,
}

impl KernelSource {
    /// The source at `path`, for dav-2201, with no kernels yet.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self::from_origin(Origin::File(path.into()))
    }

    /// A source and its headers as texts with their file names, for programs that contain them.
    /// The last is the one that is compiled.
    pub fn from_texts<N: Into<String>, T: Into<String>>(
        files: impl IntoIterator<Item = (N, T)>,
    ) -> Self {
        let files = files
            .into_iter()
            .map(|(name, text)| (name.into(), text.into()));
        Self::from_origin(Origin::Texts(files.collect()))
    }

    fn from_origin(origin: Origin) -> Self {
        Self {
            origin,
            kernels: Vec::new(),
            defines: Vec::new(),
            architecture: 2201,
        }
    }

    /// The file to compile. Texts are written to a folder named after their content.
    fn file(&self, cache: &Path) -> Result<PathBuf> {
        match &self.origin {
            Origin::File(path) => fs::canonicalize(path).map_err(cannot_access(path)),
            Origin::Texts(files) => {
                let texts = files
                    .iter()
                    .map(|(name, text)| (name.as_str(), text.as_str()));
                let files: Vec<(&str, &str)> = texts.collect();
                let dir = write_folder(cache, "source", &files)?;
                Ok(dir.join(files.last().map_or("", |(name, _)| name)))
            }
        }
    }

    /// Adds entry points (`extern "C"` functions of the source) that launches name.
    #[must_use]
    pub fn kernels<S: Into<String>>(mut self, names: impl IntoIterator<Item = S>) -> Self {
        self.kernels.extend(names.into_iter().map(Into::into));
        self
    }

    /// Adds a macro definition, `NAME` or `NAME=VALUE`.
    #[must_use]
    pub fn define(mut self, definition: impl Into<String>) -> Self {
        self.defines.push(definition.into());
        self
    }

    /// Sets `__NPU_ARCH__`: 2201 or 3510.
    #[must_use]
    pub fn architecture(mut self, architecture: u32) -> Self {
        self.architecture = architecture;
        self
    }

    /// Compiles, or takes the result of an earlier compilation of the same content.
    ///
    /// # Errors
    /// When there is no compiler, the source does not compile, or a file cannot be accessed.
    pub fn compile(&self) -> Result<Vec<u8>> {
        let compiler = find_compiler()?;
        let cache = cache_dir();
        let path = self.file(&cache)?;
        let headers = write_folder(&cache, "include", HEADERS)?;
        let wrapper = self.wrapper(&path);
        let options = self.options(&compiler, &headers);
        let key = self.key(&path, &compiler, &wrapper)?;
        let library = cache.join(format!("{key:016x}.so"));
        if let Ok(bytes) = fs::read(&library) {
            return Ok(bytes);
        }
        let unique = format!("{key:016x}-{}", unique());
        let unit = cache.join(format!("{unique}.cpp"));
        let output = cache.join(format!("{unique}.so"));
        write(&unit, wrapper.as_bytes())?;
        let run = Command::new(&compiler.command)
            .args(&options)
            .arg(&unit)
            .arg("-o")
            .arg(&output)
            .output()
            .map_err(cannot_access(Path::new(&compiler.command)))?;
        // A work file that is left over does no harm.
        let _ = fs::remove_file(&unit);
        if !run.status.success() {
            return Err(BuildError::Compile {
                path,
                architecture: self.architecture,
                output: String::from_utf8_lossy(&run.stderr).into_owned(),
            });
        }
        let bytes = fs::read(&output).map_err(cannot_access(&output))?;
        // Renaming is atomic: a reader of the cached name finds a complete library or none.
        fs::rename(&output, &library).map_err(cannot_access(&library))?;
        Ok(bytes)
    }

    fn wrapper(&self, path: &Path) -> String {
        let entries: Vec<String> = self
            .kernels
            .iter()
            .map(|name| format!("ASCEND_SIM_KERNEL({name})"))
            .collect();
        let path = path
            .display()
            .to_string()
            .replace('\\', "\\\\")
            .replace('"', "\\\"");
        format!(
            "#include \"kernel_operator.h\"\n\
             #include \"{path}\"\n\
             #include \"ascend_sim/library.h\"\n\
             ASCEND_SIM_LIBRARY({})\n",
            entries.join(", ")
        )
    }

    fn options(&self, compiler: &Compiler, headers: &Path) -> Vec<OsString> {
        let mut options: Vec<OsString> = compiler.flags.iter().map(OsString::from).collect();
        options.extend(OPTIONS.iter().map(OsString::from));
        if !compiler.version.contains("clang") {
            // One definition per library, not one per process, for what headers define inline.
            options.push("-fno-gnu-unique".into());
        }
        options.push(format!("-D__NPU_ARCH__={}", self.architecture).into());
        let defines = self.defines.iter();
        options.extend(defines.map(|define| format!("-D{define}").into()));
        // As system headers, which the errors above spare.
        options.extend([OsString::from("-isystem"), headers.into()]);
        options
    }

    /// A number that differs when anything that goes into the library differs.
    fn key(&self, path: &Path, compiler: &Compiler, wrapper: &str) -> Result<u64> {
        let mut hasher = DefaultHasher::new();
        (
            OPTIONS,
            &compiler.command,
            &compiler.version,
            &compiler.flags,
            wrapper,
            &self.defines,
            self.architecture,
            HEADERS,
        )
            .hash(&mut hasher);
        if let Some(dir) = path.parent() {
            hash_folder(dir, &mut hasher)?;
        }
        Ok(hasher.finish())
    }
}

/// For `map_err`: the file that cannot be accessed.
fn cannot_access(path: &Path) -> impl FnOnce(io::Error) -> BuildError {
    let path = path.to_path_buf();
    move |error| BuildError::File { path, error }
}

fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    let folder = path.parent().map_or(Ok(()), fs::create_dir_all);
    folder
        .and_then(|()| fs::write(path, bytes))
        .map_err(cannot_access(path))
}

/// Names and contents of the C++ files below a folder, in a fixed order.
fn hash_folder(dir: &Path, hasher: &mut DefaultHasher) -> Result<()> {
    let mut entries: Vec<PathBuf> = fs::read_dir(dir)
        .and_then(|list| list.map(|entry| entry.map(|e| e.path())).collect())
        .map_err(cannot_access(dir))?;
    entries.sort();
    for entry in entries {
        let ending = entry.extension().and_then(|ending| ending.to_str());
        if entry.is_dir() {
            hash_folder(&entry, hasher)?;
        } else if matches!(ending, Some("h" | "hpp" | "cpp" | "asc" | "inc")) {
            entry.hash(hasher);
            let bytes = fs::read(&entry).map_err(cannot_access(&entry))?;
            bytes.hash(hasher);
        }
    }
    Ok(())
}

/// Files written where the compiler can read them, in a folder named after their content.
fn write_folder(cache: &Path, kind: &str, files: &[(&str, &str)]) -> Result<PathBuf> {
    let mut hasher = DefaultHasher::new();
    files.hash(&mut hasher);
    let dir = cache.join(format!("{kind}-{:016x}", hasher.finish()));
    for (name, text) in files {
        let path = dir.join(name);
        if fs::read(&path).ok().as_deref() == Some(text.as_bytes()) {
            continue;
        }
        // Another process or thread may be reading: rename complete files.
        let temporary = dir.join(format!("{name}.{}", unique()));
        write(&temporary, text.as_bytes())?;
        fs::rename(&temporary, &path).map_err(cannot_access(&path))?;
    }
    Ok(dir)
}

/// A name that no other thread or process uses now.
fn unique() -> String {
    static SERIAL: AtomicU32 = AtomicU32::new(0);
    format!(
        "{}-{}",
        std::process::id(),
        SERIAL.fetch_add(1, Ordering::Relaxed)
    )
}

fn cache_dir() -> PathBuf {
    let set = |name: &str| {
        env::var_os(name)
            .filter(|value| !value.is_empty())
            .map(PathBuf::from)
    };
    set("ASCEND_SIM_CACHE")
        .or_else(|| set("XDG_CACHE_HOME").map(|dir| dir.join("ascend-sim")))
        .or_else(|| set("HOME").map(|dir| dir.join(".cache").join("ascend-sim")))
        .unwrap_or_else(|| env::temp_dir().join(format!("ascend-sim-{}", std::process::id())))
}

struct Compiler {
    command: String,
    version: String,
    /// `CXXFLAGS`, which come first, so that the simulator's own options override them.
    flags: Vec<String>,
}

fn find_compiler() -> Result<Compiler> {
    let chosen = env::var("CXX").ok().filter(|command| !command.is_empty());
    // A compiler that was asked for is the only one tried.
    let candidates: Vec<String> = chosen.map_or_else(
        || COMPILERS.iter().map(|c| (*c).to_owned()).collect(),
        |command| vec![command],
    );
    let flags = env::var("CXXFLAGS").unwrap_or_default();
    let flags: Vec<String> = flags.split_whitespace().map(str::to_owned).collect();
    candidates
        .iter()
        .find_map(|command| {
            let output = Command::new(command).arg("--version").output().ok()?;
            output.status.success().then(|| Compiler {
                command: command.clone(),
                version: String::from_utf8_lossy(&output.stdout).into_owned(),
                flags: flags.clone(),
            })
        })
        .ok_or(BuildError::NoCompiler { tried: candidates })
}
