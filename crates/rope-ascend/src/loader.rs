//! Finding and opening the runtime's libraries.
//!
//! The tables of [`sys`](crate::sys) are filled through a resolver, so the vendor's libraries, the
//! simulator and a hand-written stub take the same path.
#![allow(
    unsafe_code,
    reason = "opening a library and calling through its symbols is unsafe"
)]

use crate::error::LoadError;
use crate::sys::{AclMeta, AclOperators, AclOps, AclRt, AclRtc, Resolve};
use libloading::Library;
use std::env;
use std::ffi::{CStr, c_void};
use std::path::{Path, PathBuf};

/// One role with its library names, newest first.
#[derive(Clone, Copy, Debug)]
pub struct LibraryNames {
    /// What the library is for.
    pub role: &'static str,
    /// File names to try in order.
    pub names: &'static [&'static str],
}

/// The runtime.
pub const RUNTIME: LibraryNames = LibraryNames {
    role: "Ascend runtime library",
    names: &["libacl_rt.so", "libascendcl.so"],
};
/// Operator descriptors.
pub const DESCRIPTORS: LibraryNames = LibraryNames {
    role: "operator descriptor library",
    names: &["libnnopbase.so"],
};
/// The library of all operators, of installations before it was split.
const ALL_OPERATORS: &str = "libopapi.so";
/// One of the libraries that it was split into.
const SPLIT_OPERATORS: &str = "libopapi_nn.so";
/// Operators; all that exist are searched, in this order.
pub const OPERATORS: LibraryNames = LibraryNames {
    role: "operator library",
    names: &[
        "libcust_opapi.so",
        "libopapi_math.so",
        SPLIT_OPERATORS,
        "libopapi_transformer.so",
        ALL_OPERATORS,
    ],
};
/// Run-time compiler.
pub const COMPILER: LibraryNames = LibraryNames {
    role: "run-time compiler library",
    names: &["libacl_rtc.so"],
};

/// Variable that names the folder of the libraries and overrides the search.
pub const PATH_VARIABLE: &str = "ROPE_ASCEND_LIB_PATH";

/// The folders that are searched, in order; the loader's own path comes last.
#[must_use]
pub fn search_folders(explicit: Option<&Path>) -> Vec<PathBuf> {
    if let Some(folder) = explicit {
        return vec![folder.to_owned()];
    }
    if let Some(folder) = env::var_os(PATH_VARIABLE) {
        return vec![folder.into()];
    }
    ["ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"]
        .iter()
        .filter_map(env::var_os)
        .map(|home| Path::new(&home).join("lib64"))
        .collect()
}

/// The paths that are tried for `library`, in order.
#[must_use]
pub fn candidates(library: LibraryNames, explicit: Option<&Path>) -> Vec<PathBuf> {
    let folders = search_folders(explicit);
    let overridden = explicit.is_some() || env::var_os(PATH_VARIABLE).is_some();
    let in_folders = folders
        .iter()
        .flat_map(|folder| library.names.iter().map(move |name| folder.join(name)));
    let on_loader_path = library
        .names
        .iter()
        .map(PathBuf::from)
        .filter(|_| !overridden);
    in_folders.chain(on_loader_path).collect()
}

fn open(library: LibraryNames, explicit: Option<&Path>) -> Result<(Library, PathBuf), LoadError> {
    let mut tried = Vec::new();
    for path in candidates(library, explicit) {
        // SAFETY: initialisers of the vendor's libraries run here; the names are those that the
        // vendor installs, in folders that the user or the system's loader configuration chose.
        match unsafe { Library::new(&path) } {
            Ok(opened) => return Ok((opened, path)),
            Err(error) => tried.push((path, error.to_string())),
        }
    }
    Err(LoadError::LibraryNotFound {
        library: library.role,
        tried,
    })
}

fn address(library: &Library, name: &CStr) -> *const c_void {
    // SAFETY: the symbol is only turned into an address here, never read as a value; the table
    // that receives it declares the function's type.
    unsafe { library.get::<*const c_void>(name.to_bytes_with_nul()) }
        .map_or(std::ptr::null(), |symbol| *symbol)
}

/// The function tables, and the libraries that they point into.
///
/// Field order matters: the libraries are unmapped after everything else is gone.
#[derive(Debug)]
pub struct Api {
    /// The runtime.
    pub rt: AclRt,
    /// Operator descriptors, where the library exists.
    pub meta: Result<AclMeta, LoadError>,
    /// Stock rotary operators; each may be missing on its own.
    pub ops: AclOps,
    /// Operators of training; each may be missing on its own.
    pub operators: AclOperators,
    /// Run-time compiler, where it exists.
    pub rtc: Result<AclRtc, LoadError>,
    /// Where the runtime was found.
    pub origin: String,
    /// The files that were opened, each with its role.
    pub opened: Vec<(&'static str, PathBuf)>,
    _libraries: Vec<Library>,
}

impl Api {
    /// Opens the vendor's libraries: those in `folder`, else in `$ROPE_ASCEND_LIB_PATH`, else in
    /// `$ASCEND_HOME_PATH/lib64`, `$ASCEND_TOOLKIT_HOME/lib64` and on the loader's path.
    ///
    /// # Errors
    /// [`LoadError::LibraryNotFound`] with everything tried, or [`LoadError::SymbolsMissing`].
    /// Missing operator and compiler libraries are errors only when they are used.
    pub fn open(folder: Option<&Path>) -> Result<Self, LoadError> {
        let (runtime, path) = open(RUNTIME, folder)?;
        let origin = path.display().to_string();
        // SAFETY: the addresses are those of the vendor's functions, whose declarations are
        // checked against the vendor's headers; `runtime` is kept beside the table.
        let rt =
            unsafe { AclRt::load(&mut |name| address(&runtime, name)) }.map_err(|symbols| {
                LoadError::SymbolsMissing {
                    library: origin.clone(),
                    symbols,
                }
            })?;
        let mut libraries = vec![runtime];
        let mut opened = vec![(RUNTIME.role, path)];
        let meta = open(DESCRIPTORS, folder).and_then(|(library, path)| {
            // SAFETY: as above.
            let table =
                unsafe { AclMeta::load(&mut |name| address(&library, name)) }.map_err(|symbols| {
                    LoadError::SymbolsMissing {
                        library: path.display().to_string(),
                        symbols,
                    }
                });
            libraries.push(library);
            opened.push((DESCRIPTORS.role, path));
            table
        });
        let mut operators: Vec<(Library, PathBuf)> = Vec::new();
        for name in OPERATORS.names {
            // The library of all operators is not to be loaded beside those that replace it.
            let replaced = operators
                .iter()
                .any(|(_, path)| path.ends_with(SPLIT_OPERATORS));
            if replaced && *name == ALL_OPERATORS {
                continue;
            }
            let opened = candidates(OPERATORS, folder)
                .into_iter()
                .filter(|path| path.ends_with(name))
                // SAFETY: as in `open`.
                .find_map(|path| Some((unsafe { Library::new(&path) }.ok()?, path)));
            operators.extend(opened);
        }
        let (ops, training) = load_ops(&mut |name| {
            operators
                .iter()
                .map(|(library, _)| address(library, name))
                .find(|p| !p.is_null())
                .unwrap_or(std::ptr::null())
        });
        for (library, path) in operators {
            libraries.push(library);
            opened.push((OPERATORS.role, path));
        }
        let rtc = open(COMPILER, folder).and_then(|(library, path)| {
            // SAFETY: as above.
            let table =
                unsafe { AclRtc::load(&mut |name| address(&library, name)) }.map_err(|symbols| {
                    LoadError::SymbolsMissing {
                        library: path.display().to_string(),
                        symbols,
                    }
                });
            libraries.push(library);
            opened.push((COMPILER.role, path));
            table
        });
        Ok(Self {
            rt,
            meta,
            ops,
            operators: training,
            rtc,
            origin,
            opened,
            _libraries: libraries,
        })
    }

    /// Fills the tables through `resolve`, which returns null for what it lacks.
    ///
    /// # Errors
    /// [`LoadError::SymbolsMissing`] for functions of the runtime itself.
    ///
    /// # Safety
    /// - Each address that `resolve` returns is that of the C function of that name, with the
    ///   signature declared in [`sys`](crate::sys).
    /// - The code stays mapped for the life of the process.
    pub unsafe fn from_resolver(
        origin: &str,
        mut resolve: impl FnMut(&CStr) -> *const c_void,
    ) -> Result<Self, LoadError> {
        let missing = |symbols| LoadError::SymbolsMissing {
            library: origin.to_owned(),
            symbols,
        };
        let resolve: &mut Resolve<'_> = &mut resolve;
        // SAFETY: the caller vouches for addresses and lifetime.
        let rt = unsafe { AclRt::load(resolve) }.map_err(missing)?;
        // SAFETY: as above.
        let meta = unsafe { AclMeta::load(resolve) }.map_err(missing);
        let (ops, operators) = load_ops(resolve);
        // SAFETY: as above.
        let rtc = unsafe { AclRtc::load(resolve) }.map_err(missing);
        Ok(Self {
            rt,
            meta,
            ops,
            operators,
            rtc,
            origin: origin.to_owned(),
            opened: Vec::new(),
            _libraries: Vec::new(),
        })
    }

    /// The simulator's functions, which are part of this program.
    ///
    /// # Errors
    /// [`LoadError::SymbolsMissing`], if the simulator lacked functions of the runtime.
    #[cfg(feature = "ascend-sim")]
    pub fn simulated() -> Result<Self, LoadError> {
        // SAFETY: the simulator declares its functions as the vendor does (compared by `cargo xtask abi`), and is linked
        // into this program.
        unsafe { Self::from_resolver("ascend-sim", ascend_sim::symbol) }
    }

    /// Names of the functions that this installation lacks.
    #[must_use]
    pub fn missing_symbols(&self) -> Vec<&'static str> {
        let mut missing = self.rt.missing();
        match &self.meta {
            Ok(table) => missing.extend(table.missing()),
            Err(_) => missing.extend(AclMeta::signatures().into_iter().map(|s| s.name)),
        }
        missing.extend(self.ops.missing());
        match &self.rtc {
            Ok(table) => missing.extend(table.missing()),
            Err(_) => missing.extend(AclRtc::signatures().into_iter().map(|s| s.name)),
        }
        missing
    }
}

fn load_ops(resolve: &mut Resolve<'_>) -> (AclOps, AclOperators) {
    // SAFETY: reached only from the two constructors above, whose conditions cover it.
    let operators = unsafe { AclOperators::load(resolve) };
    // SAFETY: as above. The table has no required function, so loading cannot fail.
    match unsafe { AclOps::load(resolve) } {
        Ok(ops) => (ops, operators),
        Err(symbols) => unreachable!("no operator is required, yet {symbols:?} are"),
    }
}
