//! Errors, with the data that explains them.

use std::path::PathBuf;

/// Result of the crate's functions.
pub type Result<T, E = AscendError> = std::result::Result<T, E>;

/// Why the runtime's libraries could not be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// No file of the library was found or could be opened.
    #[error(
        "no {library} found, tried {}; install CANN or set ASCEND_HOME_PATH to its folder",
        list(tried)
    )]
    LibraryNotFound {
        /// The library's role.
        library: &'static str,
        /// Each candidate with the loader's answer.
        tried: Vec<(PathBuf, String)>,
    },
    /// The library lacks functions that the crate cannot do without.
    #[error(
        "{library} lacks {}; its version is too old or it is not the Ascend runtime",
        symbols.join(", ")
    )]
    SymbolsMissing {
        /// The library that was opened.
        library: String,
        /// The missing functions.
        symbols: Vec<&'static str>,
    },
    /// A variable of the environment has a value that it does not take.
    #[error("the variable {variable} must be {expected}, found {found}")]
    Setting {
        /// The variable.
        variable: &'static str,
        /// The values that it takes.
        expected: &'static str,
        /// Its value.
        found: String,
    },
}

fn list(tried: &[(PathBuf, String)]) -> String {
    tried
        .iter()
        .map(|(path, why)| format!("{} ({why})", path.display()))
        .collect::<Vec<_>>()
        .join(", ")
}

/// The cores that a kernel runs on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Cores {
    /// Vector cores alone.
    Vector,
    /// A cube core and two vector cores for each block.
    CubeAndVector,
}

impl std::fmt::Display for Cores {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Vector => "the vector cores",
            Self::CubeAndVector => "cube and vector cores",
        })
    }
}

/// The alternative where cores cannot be launched on.
fn remedy(cores: &Cores) -> &'static str {
    match cores {
        Cores::Vector => "",
        Cores::CubeAndVector => ", or rotate by the vector cores",
    }
}

/// Errors of the Ascend runtime, its operators and this crate's kernels.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum AscendError {
    /// A library could not be loaded.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// A function that this installation lacks is needed.
    #[error("{symbol} is needed for {purpose} but {library} lacks it")]
    SymbolUnavailable {
        /// The missing function.
        symbol: &'static str,
        /// Where it was looked for.
        library: String,
        /// The purpose that it serves.
        purpose: &'static str,
    },
    /// A runtime call returned an error.
    #[error("{function} returned {code} ({meaning}): {detail}")]
    Call {
        /// The C function.
        function: &'static str,
        /// Its result.
        code: i32,
        /// The meaning of the code.
        meaning: &'static str,
        /// The runtime's last message.
        detail: String,
    },
    /// A call of the collective library returned an error.
    #[error("{function} of rank {rank} returned {code} ({meaning}): {detail}")]
    Collective {
        /// The C function.
        function: &'static str,
        /// The rank that called it.
        rank: u32,
        /// Its result.
        code: i32,
        /// The library's text for the code.
        meaning: String,
        /// The runtime's last message.
        detail: String,
    },
    /// A kernel launch was refused.
    #[error("launch of {kernel} returned {code} ({meaning}): {detail}")]
    Launch {
        /// The kernel.
        kernel: String,
        /// Result of the launch.
        code: i32,
        /// The meaning of the code.
        meaning: &'static str,
        /// The runtime's last message.
        detail: String,
    },
    /// This runtime has no way to launch a kernel that gives it its arguments right.
    #[error(
        "launching {kernel} on {cores} needs {needed}, of which {library} lacks {}; install CANN \
         8.5 or later{}",
        lacking.join(", "),
        remedy(cores)
    )]
    NoLaunch {
        /// The kernel.
        kernel: String,
        /// The cores that it runs on.
        cores: Cores,
        /// The functions of the ways that there are.
        needed: &'static str,
        /// Where they were looked for.
        library: String,
        /// Those that are not there.
        lacking: Vec<&'static str>,
    },
    /// Work that was queued earlier failed; the error surfaced at a synchronisation.
    #[error("work queued earlier failed, found by {function}: {code} ({meaning}): {detail}")]
    Execution {
        /// The synchronising C function.
        function: &'static str,
        /// Its result.
        code: i32,
        /// The meaning of the code.
        meaning: &'static str,
        /// The runtime's last message.
        detail: String,
    },
    /// Device or pinned host memory ran out, also after the caches were emptied.
    #[error(
        "out of memory in {function}: {requested_bytes} bytes asked for, {live_bytes} in use, \
         {cached_bytes} cached in pieces of at most {largest_cached_bytes}: {detail}"
    )]
    OutOfMemory {
        /// The C function.
        function: &'static str,
        /// Bytes asked for.
        requested_bytes: usize,
        /// Bytes in use through this crate on that device.
        live_bytes: usize,
        /// Bytes cached between those in use, by this crate on that device.
        cached_bytes: usize,
        /// Bytes of the largest cached piece.
        largest_cached_bytes: usize,
        /// The runtime's last message.
        detail: String,
    },
    /// Closing was asked for while handles are alive.
    #[error("the runtime is still in use by {handles} handles; drop streams and buffers first")]
    StillInUse {
        /// Handles alive besides the one being closed.
        handles: usize,
    },
    /// An argument does not fit.
    #[error("{operation}: {argument} must be {expected}, found {found}")]
    InvalidArgument {
        /// The operation.
        operation: &'static str,
        /// The argument.
        argument: &'static str,
        /// The condition that it must meet.
        expected: String,
        /// The value found.
        found: String,
    },
    /// A stock operator would refuse the call or compute it wrongly.
    #[error("{operator} takes {limit}, found {found}; use this crate's own kernels instead")]
    OperatorLimit {
        /// The operator.
        operator: &'static str,
        /// Its documented limit.
        limit: String,
        /// The value found instead.
        found: String,
    },
    /// A rotation that the cube cores do not do.
    #[error("the cube cores rotate {limit}, found {found}; use the vector cores instead")]
    CubeLimit {
        /// The rotations that they do.
        limit: String,
        /// The value found instead.
        found: String,
    },
    /// Shapes or strides of q and k that do not fit each other or their memory.
    #[error(transparent)]
    Rope(#[from] rope_core::RopeError),
    /// A rotation is beyond what this crate's kernels reach.
    #[error("the kernels take at most {limit} {what}, found {found}")]
    KernelLimit {
        /// The quantity, in the plural.
        what: &'static str,
        /// The most of it.
        limit: usize,
        /// The number asked for.
        found: usize,
    },
    /// The run-time compiler refused the kernels.
    #[error("the kernels do not compile ({code}): {log}")]
    Compile {
        /// Result of the compiler.
        code: i32,
        /// The compiler's log.
        log: String,
    },
    /// The rotary kernels could not be had for this device.
    #[error("no rotary kernels for {device}: {reason}; {remedy}")]
    NoKernels {
        /// The device.
        device: String,
        /// The way tried, and why it failed.
        reason: String,
        /// The remedy.
        remedy: &'static str,
    },
    /// One token's data does not fit the unified buffer.
    #[error(
        "{needed_bytes} bytes of unified buffer are needed for one row, the device has \
         {available_bytes}"
    )]
    TileTooLarge {
        /// Bytes of the smallest tile.
        needed_bytes: usize,
        /// Bytes of the unified buffer.
        available_bytes: usize,
    },
}

impl AscendError {
    /// An argument error; the values are shown as they are.
    pub(crate) fn argument(
        operation: &'static str,
        argument: &'static str,
        expected: impl Into<String>,
        found: impl std::fmt::Display,
    ) -> Self {
        Self::InvalidArgument {
            operation,
            argument,
            expected: expected.into(),
            found: found.to_string(),
        }
    }
}
