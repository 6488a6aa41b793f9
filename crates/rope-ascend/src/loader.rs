//! Finds and opens the runtime's libraries.
//!
//! The tables of [`sys`](crate::sys) are filled through a resolver, so the vendor's libraries, the
//! simulator and a hand-written stub use the same path.
#![allow(
    unsafe_code,
    reason = "opening a library and calling through its symbols is unsafe"
)]

use std::ffi::{CStr, c_void};
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};
use std::{env, fs};

use libloading::Library;

use crate::error::LoadError;
use crate::sys::{AclFused, AclMeta, AclOperators, AclRotary, AclRt, AclRtc, Hccl, Resolve};

/// A role with its library names, newest first.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LibraryNames {
    /// The library's role.
    pub(crate) role: &'static str,
    /// File names to try in order.
    pub(crate) names: &'static [&'static str],
}

/// The runtime.
pub(crate) const RUNTIME: LibraryNames = LibraryNames {
    role: "Ascend runtime library",
    names: &["libacl_rt.so", "libascendcl.so"],
};
/// Operator descriptors.
pub(crate) const DESCRIPTORS: LibraryNames = LibraryNames {
    role: "operator descriptor library",
    names: &["libnnopbase.so"],
};
/// The library of all operators, in installations from before it was split.
const ALL_OPERATORS: &str = "libopapi.so";
/// One of the libraries into which it was split.
const SPLIT_OPERATORS: &str = "libopapi_nn.so";
/// Operators; all existing libraries are searched, in this order.
pub(crate) const OPERATORS: LibraryNames = LibraryNames {
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
pub(crate) const COMPILER: LibraryNames = LibraryNames {
    role: "run-time compiler library",
    names: &["libacl_rtc.so"],
};
/// Collectives; all existing libraries are searched, in this order. Newer releases have the
/// functions of communicators in the second.
pub(crate) const COLLECTIVES: LibraryNames = LibraryNames {
    role: "collective library",
    names: &["libhccl.so", "libhcomm.so"],
};

/// Variable that names the folder of the libraries and overrides the search.
pub(crate) const PATH_VARIABLE: &str = "ROPE_ASCEND_LIB_PATH";

/// Variable that overrides the allocation of device memory: `segments` or `blocks`.
pub(crate) const POOL_VARIABLE: &str = "ROPE_ASCEND_POOL";

/// The allocation of device memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pooling {
    /// Segments, which are divided into buffers.
    #[default]
    Segments,
    /// One allocation per buffer, so that a memory checker sees the end of each. Buffers are still
    /// cached.
    Blocks,
}

impl Pooling {
    /// The pooling that the variable names, else `default`.
    fn chosen_or(default: Self) -> Result<Self, LoadError> {
        let Some(found) = env::var_os(POOL_VARIABLE) else {
            return Ok(default);
        };
        Self::named(&found.to_string_lossy())
    }

    fn named(name: &str) -> Result<Self, LoadError> {
        match name {
            "segments" => Ok(Self::Segments),
            "blocks" => Ok(Self::Blocks),
            other => Err(LoadError::Setting {
                variable: POOL_VARIABLE,
                expected: "segments or blocks",
                found: other.to_owned(),
            }),
        }
    }
}

/// The folders that are searched, in order; the loader's own path comes last.
fn search_folders(explicit: Option<&Path>) -> Vec<PathBuf> {
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
pub(crate) fn candidates(library: LibraryNames, explicit: Option<&Path>) -> Vec<PathBuf> {
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

/// A library that was opened.
#[derive(Debug)]
pub(crate) struct Opened {
    pub(crate) role: &'static str,
    pub(crate) path: PathBuf,
    /// Never unmapped: threads of CANN and its functions that run at exit may outlive every handle.
    library: ManuallyDrop<Library>,
}

impl Opened {
    /// The library at `path`, or the loader's message.
    fn at(path: PathBuf, role: &'static str) -> Result<Self, (PathBuf, String)> {
        // SAFETY: initialisers of the vendor's libraries run here; the names are those that the
        // vendor installs, in folders that the user or the system's loader configuration chose.
        match unsafe { Library::new(&path) } {
            Ok(library) => Ok(Self {
                role,
                path,
                library: ManuallyDrop::new(library),
            }),
            Err(error) => Err((path, error.to_string())),
        }
    }
}

/// Opens a library, fills its table by `load` and adds the library to `opened`.
///
/// # Safety
/// - The functions that `load` resolves have the signatures that its table declares.
unsafe fn table<T>(
    names: LibraryNames,
    folder: Option<&Path>,
    opened: &mut Vec<Opened>,
    load: unsafe fn(&mut Resolve<'_>) -> Result<T, Vec<&'static str>>,
) -> Result<T, LoadError> {
    let mut tried = Vec::new();
    for path in candidates(names, folder) {
        let found = match Opened::at(path, names.role) {
            Ok(found) => found,
            Err(refused) => {
                tried.push(refused);
                continue;
            }
        };
        // SAFETY: the caller vouches for the signatures, and keeps the library with the table.
        let table = unsafe { load(&mut |name| address(&found.library, name)) };
        let table = table.map_err(|symbols| LoadError::SymbolsMissing {
            library: found.path.display().to_string(),
            symbols,
        });
        opened.push(found);
        return table;
    }
    Err(LoadError::LibraryNotFound {
        library: names.role,
        tried,
    })
}

/// Opens every library of a role that exists, each by the first path that can be opened, adds them
/// to `opened`, and returns the answers of the loader to the other paths. `is_wanted` decides by
/// the name and those opened before.
fn open_all(
    names: LibraryNames,
    folder: Option<&Path>,
    opened: &mut Vec<Opened>,
    is_wanted: impl Fn(&str, &[Opened]) -> bool,
) -> Vec<(PathBuf, String)> {
    let first = opened.len();
    let mut tried = Vec::new();
    for name in names.names {
        if !is_wanted(name, &opened[first..]) {
            continue;
        }
        let paths = candidates(names, folder).into_iter();
        for path in paths.filter(|path| path.ends_with(name)) {
            match Opened::at(path, names.role) {
                Ok(found) => {
                    opened.push(found);
                    break;
                }
                Err(refused) => tried.push(refused),
            }
        }
    }
    tried
}

/// The address of a function in the first library that has it.
fn address_in(libraries: &[Opened], name: &CStr) -> *const c_void {
    let mut addresses = libraries.iter().map(|found| address(&found.library, name));
    addresses
        .find(|address| !address.is_null())
        .unwrap_or(std::ptr::null())
}

/// The table of collectives, from the libraries that each have a part of it.
fn collectives(folder: Option<&Path>, opened: &mut Vec<Opened>) -> Result<Hccl, LoadError> {
    let first = opened.len();
    let tried = open_all(COLLECTIVES, folder, opened, |_, _| true);
    let libraries = &opened[first..];
    if libraries.is_empty() {
        return Err(LoadError::LibraryNotFound {
            library: COLLECTIVES.role,
            tried,
        });
    }
    // SAFETY: the functions are the vendor's, whose declarations are checked against the vendor's
    // headers; the libraries stay mapped (`Opened`).
    let table = unsafe { Hccl::load(&mut |name| address_in(libraries, name)) };
    table.map_err(|symbols| {
        let paths = libraries.iter().map(|found| found.path.display());
        let paths: Vec<String> = paths.map(|path| path.to_string()).collect();
        LoadError::SymbolsMissing {
            library: paths.join(" and "),
            symbols,
        }
    })
}

/// The file that the loader found for a library.
fn mapped(library: &Path) -> Option<PathBuf> {
    if library.is_absolute() {
        return fs::canonicalize(library).ok();
    }
    let maps =
        plain_files::read_text(Path::new("/proc/self/maps"), plain_files::MAX_TEXT_BYTES).ok()?;
    let mut paths = maps
        .lines()
        .filter_map(|line| line.find('/').map(|at| Path::new(&line[at..])));
    let found = paths.find(|path| path.file_name() == library.file_name())?;
    fs::canonicalize(found).ok()
}

fn address(library: &Library, name: &CStr) -> *const c_void {
    // SAFETY: the symbol is only turned into an address here, never read as a value; the table
    // that receives it declares the function's type.
    unsafe { library.get::<*const c_void>(name.to_bytes_with_nul()) }
        .map_or(std::ptr::null(), |symbol| *symbol)
}

/// The function tables, and the libraries they point into, which stay mapped.
#[derive(Debug)]
pub struct Api {
    pub(crate) rt: AclRt,
    /// Operator descriptors, if the library exists.
    pub(crate) meta: Result<AclMeta, LoadError>,
    /// Training operators; each may be missing separately.
    pub(crate) operators: AclOperators,
    /// Training operators with generated first phases; each may be missing separately.
    pub(crate) fused: AclFused,
    /// Stock rotary operators; each may be missing separately.
    pub(crate) rotary: AclRotary,
    /// The run-time compiler, if it exists.
    pub(crate) rtc: Result<AclRtc, LoadError>,
    /// Collectives, if their libraries exist.
    pub(crate) hccl: Result<Hccl, LoadError>,
    /// The allocation of device memory.
    pub(crate) pooling: Pooling,
    /// The path of the runtime.
    pub(crate) origin: String,
    pub(crate) opened: Vec<Opened>,
}

impl Api {
    /// Opens the vendor's libraries: those in `folder`, else in `$ROPE_ASCEND_LIB_PATH`, else in
    /// `$ASCEND_HOME_PATH/lib64`, `$ASCEND_TOOLKIT_HOME/lib64` and on the loader's path.
    ///
    /// # Errors
    /// [`LoadError::LibraryNotFound`] with everything tried, [`LoadError::SymbolsMissing`], or
    /// [`LoadError::Setting`].
    /// Missing operator, compiler and collective libraries are errors only when they are used.
    pub fn open(folder: Option<&Path>) -> Result<Self, LoadError> {
        let mut opened = Vec::new();
        // SAFETY: the functions are the vendor's, whose declarations are checked against the
        // vendor's headers; the libraries stay mapped (`Opened`).
        let rt = unsafe { table(RUNTIME, folder, &mut opened, AclRt::load) }?;
        // SAFETY: the declarations are compared with the simulator's, which follow the vendor's
        // documents; the libraries stay mapped (`Opened`).
        let meta = unsafe { table(DESCRIPTORS, folder, &mut opened, AclMeta::load) };
        let first_operators = opened.len();
        open_all(OPERATORS, folder, &mut opened, |name, found| {
            // The library of all operators must not be loaded together with those that replace it.
            let mut found = found.iter();
            let replaced = found.any(|library| library.path.ends_with(SPLIT_OPERATORS));
            !(replaced && name == ALL_OPERATORS)
        });
        let libraries = &opened[first_operators..];
        let resolve: &mut Resolve<'_> = &mut |name| address_in(libraries, name);
        // SAFETY: the declarations follow the vendor's documents and are compared with the
        // simulator's; the libraries stay mapped (`Opened`).
        let operators = unsafe { AclOperators::load(resolve) };
        // SAFETY: the declarations follow the vendor's documents and are compared with the
        // simulator's; the libraries stay mapped (`Opened`).
        let fused = unsafe { AclFused::load(resolve) };
        // SAFETY: the declarations follow the vendor's documents and are compared with the
        // simulator's; the libraries stay mapped (`Opened`).
        let rotary = unsafe { AclRotary::load(resolve) };
        // SAFETY: the declarations follow the vendor's documents and are compared with the
        // simulator's; the libraries stay mapped (`Opened`).
        let rtc = unsafe { table(COMPILER, folder, &mut opened, AclRtc::load) };
        let hccl = collectives(folder, &mut opened);
        Ok(Self {
            rt,
            meta,
            operators,
            fused,
            rotary,
            rtc,
            hccl,
            pooling: Pooling::chosen_or(Pooling::Segments)?,
            origin: opened[0].path.display().to_string(),
            opened,
        })
    }

    /// Fills the tables through `resolve`, which returns null for missing functions.
    ///
    /// # Errors
    /// [`LoadError::SymbolsMissing`] for functions of the runtime itself; [`LoadError::Setting`].
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
        // SAFETY: the caller vouches for signatures and lifetime.
        let rt = unsafe { AclRt::load(resolve) }.map_err(missing)?;
        Ok(Self {
            rt,
            // SAFETY: the caller vouches for signatures and lifetime.
            meta: unsafe { AclMeta::load(resolve) }.map_err(missing),
            // SAFETY: the caller vouches for signatures and lifetime.
            operators: unsafe { AclOperators::load(resolve) },
            // SAFETY: the caller vouches for signatures and lifetime.
            fused: unsafe { AclFused::load(resolve) },
            // SAFETY: the caller vouches for signatures and lifetime.
            rotary: unsafe { AclRotary::load(resolve) },
            // SAFETY: the caller vouches for signatures and lifetime.
            rtc: unsafe { AclRtc::load(resolve) }.map_err(missing),
            // SAFETY: the caller vouches for signatures and lifetime.
            hccl: unsafe { Hccl::load(resolve) }.map_err(missing),
            pooling: Pooling::chosen_or(Pooling::Segments)?,
            origin: origin.to_owned(),
            opened: Vec::new(),
        })
    }

    /// Sets the allocation of device memory. The default is that of the variable `ROPE_ASCEND_POOL`
    /// (`segments` or `blocks`), otherwise segments.
    #[must_use]
    pub fn with_pooling(self, pooling: Pooling) -> Self {
        Self { pooling, ..self }
    }

    /// Returns the simulator's functions, which are part of this program. Unless `ROPE_ASCEND_POOL`
    /// states otherwise, each buffer is a separate allocation, so that the simulator detects every
    /// access beyond a buffer.
    ///
    /// # Errors
    /// [`LoadError::SymbolsMissing`] if the simulator lacks functions of the runtime;
    /// [`LoadError::Setting`].
    #[cfg(feature = "ascend-sim")]
    pub fn simulated() -> Result<Self, LoadError> {
        // SAFETY: the simulator declares its functions as the vendor does (compared by `cargo xtask
        // abi`), and is linked into this program.
        let api = unsafe { Self::from_resolver("ascend-sim", ascend_sim::symbol) }?;
        Ok(api.with_pooling(Pooling::chosen_or(Pooling::Blocks)?))
    }

    /// The identity of the run-time compiler and its headers, which differs between releases;
    /// `None` if unknown.
    ///
    /// The compiler lies in the folder of the toolkit, three folders above its library
    /// (`ExtractCannPath` in acl_rt_compile.cpp of asc-devkit at 82b89a15f), and each of the
    /// toolkit's packages states its version in `share/info` (documentation of
    /// aclsysGetVersionStr).
    pub(crate) fn compiler_identity(&self) -> Option<String> {
        let mut opened = self.opened.iter();
        let Some(compiler) = opened.find(|library| library.role == COMPILER.role) else {
            // Functions from a resolver, which has a name.
            return Some(self.origin.clone());
        };
        let path = mapped(&compiler.path)?;
        let file = fs::metadata(&path).ok()?;
        let mut identity = format!(
            "{} {} {:?}",
            path.display(),
            file.len(),
            file.modified().ok()?
        );
        let packages = path.ancestors().nth(3)?.join("share/info");
        let packages = fs::read_dir(packages).into_iter().flatten().flatten();
        let mut versions: Vec<_> = packages
            .map(|package| package.path().join("version.info"))
            .collect();
        versions.sort();
        for version in versions {
            identity +=
                &plain_files::read_text(&version, plain_files::MAX_TEXT_BYTES).unwrap_or_default();
        }
        Some(identity)
    }

    /// The names of functions missing from this installation.
    pub fn missing_symbols(&self) -> Vec<&'static str> {
        let mut missing = self.rt.missing();
        match &self.meta {
            Ok(table) => missing.extend(table.missing()),
            Err(_) => missing.extend(AclMeta::signatures().into_iter().map(|s| s.name)),
        }
        missing.extend(self.operators.missing());
        missing.extend(self.fused.missing());
        missing.extend(self.rotary.missing());
        match &self.rtc {
            Ok(table) => missing.extend(table.missing()),
            Err(_) => missing.extend(AclRtc::signatures().into_iter().map(|s| s.name)),
        }
        match &self.hccl {
            Ok(table) => missing.extend(table.missing()),
            Err(_) => missing.extend(Hccl::signatures().into_iter().map(|s| s.name)),
        }
        missing
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_way_to_ask_for_memory_is_refused() {
        assert_eq!(Pooling::named("blocks"), Ok(Pooling::Blocks));
        assert_eq!(Pooling::named("segments"), Ok(Pooling::Segments));
        let error = Pooling::named("off").unwrap_err().to_string();
        assert!(
            error.contains("ROPE_ASCEND_POOL") && error.contains("segments"),
            "{error}"
        );
    }
}
