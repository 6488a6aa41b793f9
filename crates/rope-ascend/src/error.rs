//! Errors, with the data that explains them.

use std::path::PathBuf;

/// Result of the crate's functions.
pub type Result<T, E = AscendError> = std::result::Result<T, E>;

/// The reason why the runtime's libraries cannot be used.
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
        /// Each candidate path with the loader's message.
        tried: Vec<(PathBuf, String)>,
    },
    /// The library lacks functions that this crate requires.
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
    /// An environment variable has an invalid value.
    #[error("the variable {variable} must be {expected}, found {found}")]
    Setting {
        /// The variable.
        variable: &'static str,
        /// The valid values.
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

/// The cores on which a kernel runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Cores {
    /// Vector cores only.
    Vector,
    /// A cube core and two vector cores per block.
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

/// The alternative if kernels cannot be launched on these cores.
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
    /// The installation lacks a required function.
    #[error("{symbol} is needed for {purpose} but {library} lacks it")]
    SymbolUnavailable {
        /// The missing function.
        symbol: &'static str,
        /// The libraries searched.
        library: String,
        /// Its purpose.
        purpose: &'static str,
    },
    /// A runtime call returned an error.
    #[error("{function} returned {code} ({meaning}): {detail}")]
    Call {
        /// The C function.
        function: &'static str,
        /// Its result code.
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
        /// Its result code.
        code: i32,
        /// The library's text for the code.
        meaning: String,
        /// The runtime's last message.
        detail: String,
    },
    /// The runtime rejected a kernel launch.
    #[error("launch of {kernel} returned {code} ({meaning}): {detail}")]
    Launch {
        /// The kernel.
        kernel: String,
        /// The result code of the launch.
        code: i32,
        /// The meaning of the code.
        meaning: &'static str,
        /// The runtime's last message.
        detail: String,
    },
    /// This runtime has no launch function that passes a kernel's arguments correctly.
    #[error(
        "launching {kernel} on {cores} needs {needed}, but {library} lacks {}; install CANN \
         8.5 or later{}",
        lacking.join(", "),
        remedy(cores)
    )]
    NoLaunch {
        /// The kernel.
        kernel: String,
        /// The cores on which it runs.
        cores: Cores,
        /// The functions of the possible launch methods.
        needed: &'static str,
        /// The libraries searched.
        library: String,
        /// The missing functions.
        lacking: Vec<&'static str>,
    },
    /// Work queued earlier failed; the error surfaced at a synchronisation.
    #[error("work queued earlier failed, found by {function}: {code} ({meaning}): {detail}")]
    Execution {
        /// The synchronising C function.
        function: &'static str,
        /// Its result code.
        code: i32,
        /// The meaning of the code.
        meaning: &'static str,
        /// The runtime's last message.
        detail: String,
    },
    /// Device or pinned host memory ran out, even after the caches were emptied.
    #[error(
        "out of memory in {function}: {requested_bytes} bytes requested, {live_bytes} in use, \
         {cached_bytes} cached in pieces of at most {largest_cached_bytes}: {detail}"
    )]
    OutOfMemory {
        /// The C function.
        function: &'static str,
        /// Bytes requested.
        requested_bytes: usize,
        /// Bytes in use through this crate on that device.
        live_bytes: usize,
        /// Bytes cached by this crate on that device.
        cached_bytes: usize,
        /// Bytes of the largest cached piece.
        largest_cached_bytes: usize,
        /// The runtime's last message.
        detail: String,
    },
    /// A runtime was closed while handles are alive.
    #[error("the runtime is still in use by {handles} handles; drop streams and buffers first")]
    StillInUse {
        /// Handles alive besides the one being closed.
        handles: usize,
    },
    /// An invalid argument.
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
    /// A stock operator would reject the call or compute it wrongly.
    #[error("{operator} takes {limit}, found {found}; use this crate's own kernels instead")]
    OperatorLimit {
        /// The operator.
        operator: &'static str,
        /// Its documented limit.
        limit: String,
        /// The value found instead.
        found: String,
    },
    /// A rotation that the cube cores do not support.
    #[error("the cube cores rotate {limit}, found {found}; use the vector cores instead")]
    CubeLimit {
        /// The supported rotations.
        limit: String,
        /// The value found instead.
        found: String,
    },
    /// Shapes or strides of q and k that do not match each other or their memory.
    #[error(transparent)]
    Rope(#[from] rope_core::RopeError),
    /// A rotation beyond the limits of this crate's kernels.
    #[error("the kernels take at most {limit} {what}, found {found}")]
    KernelLimit {
        /// The quantity, in the plural.
        what: &'static str,
        /// Its limit.
        limit: usize,
        /// The number requested.
        found: usize,
    },
    /// The run-time compiler rejected the kernels.
    #[error("the kernels do not compile ({code}): {log}")]
    Compile {
        /// The result code of the compiler.
        code: i32,
        /// The compiler's log.
        log: String,
    },
    /// The rotary kernels are not available for this device.
    #[error("no rotary kernels for {device}: {reason}; {remedy}")]
    NoKernels {
        /// The device.
        device: String,
        /// The source tried, with the cause of its failure.
        reason: String,
        /// The remedy.
        remedy: &'static str,
    },
    /// The data of one row does not fit the unified buffer.
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
    /// Creates an argument error with the values as given.
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
