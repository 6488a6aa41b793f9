//! The vendor's first phases as a shared library of the host.
//!
//! The roots are the functions of the operator table. What they call is found by their undefined
//! symbols, and compiled, until nothing new is found. What then is still undefined is filled with
//! functions that note their name and return 0.

use std::collections::{BTreeMap, BTreeSet};
use std::env;
use std::ffi::OsStr;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Mutex;

use rope_ascend::aclnn::OPERATORS;
use serde::{Deserialize, Serialize};

use super::definitions::{definitions, name_of};
use super::{Result, VendorError, cannot_access};
use crate::checkout::commit_of;

/// The checkouts, all of github.com/hicann.
pub(super) const REPOSITORIES: [&str; 6] = [
    "opbase",
    "metadef",
    "runtime",
    "ops-math",
    "ops-nn",
    "ops-transformer",
];
/// Folders whose sources may be compiled. The runtime gives headers only: it talks to a driver.
const SEARCHED: [&str; 5] = [
    "opbase/src/nnopbase",
    "metadef/base",
    "ops-math",
    "ops-nn",
    "ops-transformer",
];
/// Of the operators' repositories: where first phases and what they call lie.
const OPERATOR_FOLDERS: [&str; 2] = ["op_api", "common"];
/// Folders that are left out wherever they lie.
const LEFT_OUT: [&str; 10] = [
    // Copies of other repositories' functions that look for them in an installation.
    "3rd",
    "tests",
    "test",
    "experimental",
    "examples",
    "example",
    "op_kernel",
    "op_kernel_aicpu",
    "stub",
    "docs",
];
/// Include folders of every source, below the folder of the checkouts.
const INCLUDES: [&str; 31] = [
    "opbase/include",
    "opbase/include/nnopbase",
    "opbase/include/nnopbase/opdev",
    "opbase/include/nnopbase/opdev/op_common",
    "opbase/include/nnopbase/aclnn",
    "opbase/include/op_common",
    "opbase/include/op_common/op_host",
    "opbase/src/nnopbase/common",
    "opbase/src/nnopbase/common/inc",
    "opbase/src/nnopbase/common/op_info_record",
    "opbase/src/nnopbase/composite_op",
    "opbase/src/nnopbase/composite_op/aclnn_engine",
    "opbase/src/nnopbase/individual_op",
    "opbase/src/nnopbase/individual_op/api",
    "opbase/src/nnopbase/individual_op/executor",
    "opbase/src/nnopbase/individual_op/utils",
    "metadef",
    "metadef/inc",
    "metadef/inc/external",
    "metadef/pkg_inc",
    "runtime/include",
    "runtime/include/dfx",
    "runtime/include/external",
    "runtime/include/external/acl",
    "runtime/pkg_inc",
    "runtime/pkg_inc/base",
    "runtime/pkg_inc/dump",
    "runtime/pkg_inc/profiling",
    "runtime/pkg_inc/runtime",
    "runtime/pkg_inc/toolchain",
    "runtime/pkg_inc/aicpu_sched/common",
];
/// Include folders of an operator repository's own sources.
const OWN_INCLUDES: [(&str, &[&str]); 3] = [
    (
        "ops-math",
        &[
            "common/inc",
            "common/inc/external",
            "common/inc/op_api",
            "",
            "math",
            "conversion",
            "random",
        ],
    ),
    (
        "ops-nn",
        &[
            "common/inc",
            "common/inc/op_api",
            "common/stub/op_api",
            "",
            "index",
            "activation",
            "matmul",
            "norm",
            "loss",
        ],
    ),
    (
        "ops-transformer",
        &[
            "common/include",
            "common/include/external",
            "common/inc",
            "",
            "posembedding",
        ],
    ),
];
/// As the vendor builds, without optimisation; its sources use extensions of g++. Without access
/// control the harness can describe shapes.
const FLAGS: [&str; 7] = [
    "-std=c++17",
    "-O0",
    "-w",
    "-fPIC",
    "-fpermissive",
    "-fno-access-control",
    "-DLOG_CPP",
];
/// In place of a commit.
const UNKNOWN: &str = "commit unknown";
/// Sources of the harness.
const OWN_SOURCES: [&str; 2] = ["platform.cpp", "shapes.cpp"];
/// What makes arguments, besides the first phases.
const DESCRIPTORS: [&str; 9] = [
    "aclCreateTensor",
    "aclCreateTensorList",
    "aclCreateScalar",
    "aclCreateIntArray",
    "aclDestroyTensor",
    "aclDestroyTensorList",
    "aclDestroyScalar",
    "aclDestroyIntArray",
    "aclDestroyAclOpExecutor",
];

/// The library, and what it was made of.
#[derive(Serialize, Deserialize)]
pub(super) struct Library {
    /// Of what it depends on.
    key: u64,
    pub(super) path: PathBuf,
    /// Sources of the vendor that were compiled.
    pub(super) sources: usize,
    /// Sources that need what the checkouts lack.
    pub(super) failed: Vec<String>,
    /// Symbols that were filled.
    pub(super) filled: usize,
    /// Operators without a public first phase: it is generated when the vendor builds.
    pub(super) absent: Vec<String>,
}

/// Checkouts, compiler, and the folder of what is made.
pub(super) struct Builder {
    folder: PathBuf,
    /// Name and commit of each checkout.
    pub(super) commits: Vec<(&'static str, String)>,
    compiler: String,
    pub(super) compiler_version: String,
    pub(super) root: PathBuf,
    pub(super) work: PathBuf,
    /// What every object depends on besides its source.
    common: u64,
}

/// An object file, and the symbols that it defines and that it needs, demangled.
#[derive(Clone, Default)]
struct Object {
    path: PathBuf,
    defined: Vec<String>,
    needed: Vec<String>,
}

impl Builder {
    /// Finds the checkouts and the compiler.
    pub(super) fn find(folder: &Path) -> Result<Self> {
        let folder = fs::canonicalize(folder).map_err(|_| VendorError::NoFolder {
            folder: folder.to_owned(),
        })?;
        if let Some(name) = REPOSITORIES.iter().find(|name| !folder.join(name).is_dir()) {
            return Err(VendorError::NoCheckout { folder, name });
        }
        let compiler = env::var("CXX").unwrap_or_else(|_| "g++".to_owned());
        let no_compiler = || VendorError::NoCompiler(compiler.clone());
        let version = Command::new(&compiler).arg("--version").output();
        let version = version.map_err(|_| no_compiler())?;
        let version = String::from_utf8_lossy(&version.stdout);
        let compiler_version = version.lines().next().ok_or_else(no_compiler)?.to_owned();
        let mut probe = Command::new(&compiler);
        probe.args([
            "-include",
            "nlohmann/json.hpp",
            "-fsyntax-only",
            "-x",
            "c++",
        ]);
        if !output_of(probe.arg("/dev/null"))?.status.success() {
            return Err(VendorError::NoJson);
        }
        let root = crate::root();
        let root = fs::canonicalize(&root).map_err(cannot_access(&root))?;
        let work = root.join("target/vendor-operators");
        fs::create_dir_all(work.join("objects")).map_err(cannot_access(&work))?;
        let commit = |name: &&'static str| {
            let commit = commit_of(&folder.join(name));
            (*name, commit.unwrap_or_else(|| UNKNOWN.to_owned()))
        };
        let commits: Vec<_> = REPOSITORIES.iter().map(commit).collect();
        let mut builder = Self {
            folder,
            commits,
            compiler,
            compiler_version,
            root,
            work,
            common: 0,
        };
        builder.common = builder.hash_of_common()?;
        Ok(builder)
    }

    fn own(&self) -> PathBuf {
        self.root.join("audit/vendor-operators")
    }

    fn hash_of_common(&self) -> Result<u64> {
        let mut hasher = DefaultHasher::new();
        (&self.commits, &self.compiler_version, &self.folder).hash(&mut hasher);
        (INCLUDES, OWN_INCLUDES, FLAGS).hash(&mut hasher);
        for header in files_below(&self.own().join("include"))? {
            fs::read(&header)
                .map_err(cannot_access(&header))?
                .hash(&mut hasher);
        }
        Ok(hasher.finish())
    }

    /// Builds the library; what is already built is kept. Progress goes to standard error.
    pub(super) fn build(&self) -> Result<Library> {
        let roots = self.write("calls.cpp", &calls())?;
        let own = OWN_SOURCES.iter().map(|name| self.own().join(name));
        let sources: Vec<PathBuf> = own.chain([roots]).collect();
        let mut hasher = DefaultHasher::new();
        (
            self.common,
            include_str!("build.rs"),
            include_str!("definitions.rs"),
        )
            .hash(&mut hasher);
        for source in &sources {
            fs::read(source)
                .map_err(cannot_access(source))?
                .hash(&mut hasher);
        }
        let key = hasher.finish();
        let note = self.work.join("library.json");
        let known = fs::read_to_string(&note).ok();
        let known = known.and_then(|text| serde_json::from_str::<Library>(&text).ok());
        // Without commits, nobody knows whether the checkouts changed.
        let is_dated = self.commits.iter().all(|(_, commit)| commit != UNKNOWN);
        if let Some(library) = known.filter(|library| is_dated && library.key == key) {
            return Ok(library);
        }
        let library = self.build_anew(key, &sources)?;
        let text = serde_json::to_string(&library);
        let text = text.map_err(|error| VendorError::Failed(error.to_string()))?;
        fs::write(&note, text).map_err(cannot_access(&note))?;
        Ok(library)
    }

    fn build_anew(&self, key: u64, sources: &[PathBuf]) -> Result<Library> {
        eprintln!("looking for the sources of {} operators", OPERATORS.len());
        let index = self.index()?;
        let mut objects = Vec::new();
        for (source, object) in sources.iter().zip(self.compile(sources)?) {
            objects.push(object.map_err(|first| VendorError::Compile {
                source_file: source.clone(),
                first,
            })?);
        }
        let mut tried: BTreeSet<PathBuf> = BTreeSet::new();
        let mut failed = Vec::new();
        loop {
            let next = next_sources(&index, &objects, &tried);
            if next.is_empty() {
                break;
            }
            for (source, object) in next.iter().zip(self.compile(&next)?) {
                match object {
                    Ok(object) => objects.push(object),
                    Err(first) => failed.push(format!("{}: {first}", self.short(source))),
                }
            }
            tried.extend(next);
        }
        let absent = OPERATORS.iter().map(|operator| operator.function);
        let absent = absent.filter(|name| !index.contains_key(&first_phase(name)));
        let absent = absent.map(str::to_owned).collect();
        let filled = self.link(&objects)?;
        Ok(Library {
            key,
            path: self.work.join("libvendor.so"),
            sources: objects.len() - sources.len(),
            failed,
            filled,
            absent,
        })
    }

    /// The sources that define each function.
    fn index(&self) -> Result<BTreeMap<String, Vec<PathBuf>>> {
        let mut index: BTreeMap<String, Vec<PathBuf>> = BTreeMap::new();
        for searched in SEARCHED {
            for path in files_below(&self.folder.join(searched))? {
                let ending = path.extension().and_then(OsStr::to_str);
                let below = path.strip_prefix(&self.folder).unwrap_or(&path);
                let has = |name: &str| below.iter().any(|part| part == name);
                let is_operator = searched.starts_with("ops-");
                if !matches!(ending, Some("cpp" | "cc"))
                    || LEFT_OUT.into_iter().any(has)
                    || (is_operator && !OPERATOR_FOLDERS.into_iter().any(has))
                {
                    continue;
                }
                let text = fs::read(&path).map_err(cannot_access(&path))?;
                for name in definitions(&String::from_utf8_lossy(&text)) {
                    index.entry(name).or_default().push(path.clone());
                }
            }
        }
        Ok(index)
    }

    fn write(&self, name: &str, text: &str) -> Result<PathBuf> {
        let path = self.work.join(name);
        fs::write(&path, text).map_err(cannot_access(&path))?;
        Ok(path)
    }

    /// A source's path below the checkouts.
    fn short(&self, source: &Path) -> String {
        let below = source.strip_prefix(&self.folder).unwrap_or(source);
        below.display().to_string()
    }

    /// Compiles sources, as many at a time as there are processors; each gives its object or the
    /// compiler's first error.
    fn compile(&self, sources: &[PathBuf]) -> Result<Vec<std::result::Result<Object, String>>> {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let results: Mutex<Vec<Option<Result<_>>>> =
            Mutex::new(sources.iter().map(|_| None).collect());
        let next = Mutex::new(sources.iter().enumerate());
        let lock = |error| VendorError::Failed(format!("a thread panicked: {error}"));
        std::thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(|| {
                    loop {
                        // A panic elsewhere ends the scope with it.
                        let Ok(Some((at, source))) = next.lock().map(|mut all| all.next()) else {
                            return;
                        };
                        let result = self.compile_one(source);
                        if let Ok(mut results) = results.lock() {
                            results[at] = Some(result);
                        }
                    }
                });
            }
        });
        let results = results
            .into_inner()
            .map_err(|error| lock(error.to_string()))?;
        results.into_iter().flatten().collect()
    }

    fn compile_one(&self, source: &Path) -> Result<std::result::Result<Object, String>> {
        let text = fs::read(source).map_err(cannot_access(source))?;
        let mut hasher = DefaultHasher::new();
        (self.common, &text).hash(&mut hasher);
        let key = format!("{:016x}", hasher.finish());
        let name = self.short(source).replace('/', "_");
        let object = self.work.join("objects").join(&name).with_extension("o");
        // The key, and the error if there was one.
        let note = object.with_extension("note");
        let known = fs::read_to_string(&note).unwrap_or_default();
        if let Some(error) = known.strip_prefix(&key) {
            if error.is_empty() {
                return symbols(object).map(Ok);
            }
            return Ok(Err(error.to_owned()));
        }
        eprintln!("compiling {}", self.short(source));
        let mut command = Command::new(&self.compiler);
        command
            .args(FLAGS)
            .arg("-I")
            .arg(self.own().join("include"));
        let folders = INCLUDES.iter().map(|name| self.folder.join(name));
        let own = OWN_INCLUDES.iter().flat_map(|(repository, names)| {
            let base = self.folder.join(repository);
            let is_own = source.starts_with(&base);
            names
                .iter()
                .filter(move |_| is_own)
                .map(move |name| base.join(name))
        });
        for folder in own.chain(folders) {
            command.arg("-I").arg(folder);
        }
        let output = output_of(command.arg("-c").arg(source).arg("-o").arg(&object))?;
        let errors = String::from_utf8_lossy(&output.stderr);
        let error = errors.lines().find(|line| line.contains("error"));
        let error = match output.status.success() {
            true => "",
            false => error.unwrap_or("the compiler failed"),
        };
        fs::write(&note, key + error).map_err(cannot_access(&note))?;
        if error.is_empty() {
            symbols(object).map(Ok)
        } else {
            Ok(Err(error.to_owned()))
        }
    }

    /// Links the objects, fills what is undefined, and links again; returns how many were filled.
    fn link(&self, objects: &[Object]) -> Result<usize> {
        let library = self.work.join("libvendor.so");
        self.link_with(objects, None, &library)?;
        let listed = |demangled: bool| -> Result<Vec<String>> {
            let mut command = Command::new("nm");
            command.args(["-D", "-p", "--undefined-only"]);
            command.args(demangled.then_some("-C"));
            let text = text_of(command.arg(&library))?;
            let names = text
                .lines()
                .filter_map(|line| line.trim().strip_prefix("U "));
            Ok(names.map(str::to_owned).collect())
        };
        let mut thread_local = BTreeSet::new();
        for object in objects {
            let text = text_of(Command::new("readelf").arg("-sW").arg(&object.path))?;
            let rows = text
                .lines()
                .map(|line| line.split_whitespace().collect::<Vec<_>>());
            let rows = rows.filter(|row| row.len() == 8 && row[3] == "TLS" && row[6] == "UND");
            thread_local.extend(rows.map(|row| row[7].to_owned()));
        }
        let mut text = "extern \"C\" void harness_undefined_called(const char *);\n".to_owned();
        let mut filled = 0;
        for (symbol, name) in listed(false)?.iter().zip(listed(true)?) {
            // One with a version is of the system's libraries.
            if symbol.contains('@') {
                continue;
            }
            let is_data = symbol.starts_with("_Z") && !name.contains('(');
            text += &match (thread_local.contains(symbol), is_data) {
                (true, _) => format!("__thread char data{filled}[65536] __asm__(\"{symbol}\");\n"),
                (_, true) => format!("char data{filled}[65536] __asm__(\"{symbol}\");\n"),
                _ => format!(
                    "long call{filled}() __asm__(\"{symbol}\");\nlong call{filled}()\n{{\n    \
                     harness_undefined_called(\"{}\");\n    return 0;\n}}\n",
                    name_of(&name)
                ),
            };
            filled += 1;
        }
        let fill = self.write("fill.cpp", &text)?;
        match self.compile_one(&fill)? {
            Ok(object) => self.link_with(objects, Some(&object.path), &library)?,
            Err(first) => {
                return Err(VendorError::Compile {
                    source_file: fill,
                    first,
                });
            }
        }
        Ok(filled)
    }

    /// The harness's own objects come first: where the vendor defines the same, theirs is not used.
    fn link_with(&self, objects: &[Object], fill: Option<&Path>, library: &Path) -> Result<()> {
        let mut command = Command::new(&self.compiler);
        command.args([
            "-shared",
            "-Wl,-z,lazy",
            "-Wl,--allow-multiple-definition",
            "-o",
        ]);
        command
            .arg(library)
            .args(objects.iter().map(|object| &object.path));
        text_of(command.args(fill).args(["-ldl", "-lpthread"])).map(drop)
    }
}

/// The first phase of an operator's function.
pub(super) fn first_phase(function: &str) -> String {
    format!("{function}GetWorkspaceSize")
}

/// Sources not tried yet that define what objects need, one for each symbol: of the same operator
/// or repository as the object, if there is one.
fn next_sources(
    index: &BTreeMap<String, Vec<PathBuf>>,
    objects: &[Object],
    tried: &BTreeSet<PathBuf>,
) -> Vec<PathBuf> {
    let defined = objects.iter().flat_map(|object| &object.defined);
    let defined: BTreeSet<&String> = defined.collect();
    let mut next = BTreeSet::new();
    for object in objects {
        for symbol in object.needed.iter().filter(|name| !defined.contains(name)) {
            let Some(sources) = index.get(name_of(symbol)) else {
                continue;
            };
            if sources.iter().any(|source| next.contains(source)) {
                continue;
            }
            // The name of an object is the path of its source.
            let needs = object.path.file_name().unwrap_or_default();
            let shared = |source: &&PathBuf| {
                let path = source.display().to_string().replace('/', "_");
                let needs = needs.to_string_lossy();
                let from = path.find(&needs[..needs.len().min(6)]).unwrap_or(0);
                let pairs = path[from..].chars().zip(needs.chars());
                pairs.take_while(|(a, b)| a == b).count()
            };
            let open = sources.iter().filter(|source| !tried.contains(*source));
            // The first of the best.
            next.extend(open.rev().max_by_key(shared).cloned());
        }
    }
    next.into_iter().collect()
}

/// The symbols of an object.
fn symbols(path: PathBuf) -> Result<Object> {
    let text = text_of(Command::new("nm").arg("-C").arg(&path))?;
    let mut object = Object {
        path,
        ..Object::default()
    };
    for line in text.lines() {
        // An address, if there is one, a letter and a name.
        let kind = line.get(17..18).unwrap_or_default();
        let name = line.get(19..).unwrap_or_default().to_owned();
        match kind {
            "U" => object.needed.push(name),
            "w" | "v" | "" => {}
            kind if kind.chars().all(char::is_uppercase) || kind == "u" => {
                object.defined.push(name);
            }
            _ => {}
        }
    }
    Ok(object)
}

/// The C++ that calls the first phase of each operator with arguments from 64-bit slots, and that
/// names all that the library has to have.
fn calls() -> String {
    let mut text = "#include <cstdint>\n#include <cstring>\n\n\
                    #include \"harness.h\"\n\n\
                    extern \"C\" void harness_undefined_called(const char *symbol)\n\
                    {\n    harness::Undefined(symbol);\n}\n\n\
                    template <typename T>\nstatic T Slot(uint64_t bits)\n\
                    {\n    T value;\n    memcpy(&value, &bits, sizeof value);\n    return value;\n\
                    }\n"
    .to_owned();
    let mut roots: Vec<String> = DESCRIPTORS.iter().map(|name| (*name).to_owned()).collect();
    for operator in OPERATORS {
        let types: Vec<&str> = operator
            .parameters
            .iter()
            .map(|(_, kind)| c_type(kind))
            .collect();
        let slots = types.iter().enumerate();
        let slots: Vec<String> = slots
            .map(|(at, ty)| format!("Slot<{ty}>(slots[{at}])"))
            .collect();
        text += &format!(
            "\nextern \"C\" int harness_call_{}(void *plan, const uint64_t *slots, uint64_t \
             *workspace,\n    void **executor)\n{{\n    \
             auto call = reinterpret_cast<int (*)({}, uint64_t *, void **)>(plan);\n    \
             return call({}, workspace, executor);\n}}\n",
            operator.function,
            types.join(", "),
            slots.join(", ")
        );
        roots.push(first_phase(operator.function));
    }
    for root in &roots {
        text += &format!("extern \"C\" void {root}();\n");
    }
    text + &format!(
        "extern \"C\" {{\nvoid (*harness_roots[])() = {{{}}};\n}}\n",
        roots.join(", ")
    )
}

/// The C type of a parameter, by its kind in the operator table.
fn c_type(kind: &str) -> &'static str {
    match kind {
        "i64" => "int64_t",
        "u64" => "uint64_t",
        "f64" => "double",
        "f32" => "float",
        "bool" => "bool",
        "CubeMath" => "int8_t",
        "DataType" => "int32_t",
        _ => "void *",
    }
}

/// All files below a folder, sorted.
fn files_below(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        let entries = fs::read_dir(&folder).map_err(cannot_access(&folder))?;
        for entry in entries {
            let entry = entry.map_err(cannot_access(&folder))?;
            let kind = entry.file_type().map_err(cannot_access(&entry.path()))?;
            if kind.is_dir() {
                folders.push(entry.path());
            } else if kind.is_file() {
                files.push(entry.path());
            }
        }
    }
    files.sort();
    Ok(files)
}

fn output_of(command: &mut Command) -> Result<Output> {
    let name = command.get_program().to_owned();
    Ok(command.output().map_err(cannot_access(Path::new(&name)))?)
}

/// What a command prints, if it succeeds.
fn text_of(command: &mut Command) -> Result<String> {
    let output = output_of(command)?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let program = command.get_program().to_string_lossy().into_owned();
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    Err(VendorError::Failed(format!("{program} failed: {error}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_said() {
        let error = |folder: &Path| Builder::find(folder).err().map(|error| error.to_string());
        let text = error(Path::new("/nowhere")).expect("no such folder");
        assert!(text.starts_with("/nowhere is no folder"), "{text}");
        let text = error(Path::new("/")).expect("no checkouts");
        assert!(text.contains("holds no opbase"), "{text}");
        assert!(
            text.contains("git clone https://github.com/hicann/opbase"),
            "{text}"
        );
        assert!(
            VendorError::NoJson
                .to_string()
                .contains("apt install nlohmann-json3-dev")
        );
        assert!(
            VendorError::NoCompiler("g++".to_owned())
                .to_string()
                .contains("apt install g++")
        );
    }

    #[test]
    fn one_source_is_taken_for_each_symbol_nearest_first() {
        let paths = |names: &[&str]| names.iter().map(PathBuf::from).collect::<Vec<_>>();
        let near = "/d/ops-nn/norm/op_api/cast.cpp";
        let far = "/d/ops-math/math/op_api/cast.cpp";
        let index = BTreeMap::from([("l0op::Cast".to_owned(), paths(&[far, near]))]);
        let objects = [Object {
            path: "/o/ops-nn_norm_op_api_aclnn.o".into(),
            defined: vec![],
            needed: vec!["l0op::Cast(int)".to_owned(), "memcpy".to_owned()],
        }];
        let mut tried = BTreeSet::new();
        assert_eq!(next_sources(&index, &objects, &tried), paths(&[near]));
        tried.insert(PathBuf::from(near));
        assert_eq!(next_sources(&index, &objects, &tried), paths(&[far]));
        let mut defined = objects.to_vec();
        defined[0].defined.push("l0op::Cast(int)".to_owned());
        assert!(next_sources(&index, &defined, &BTreeSet::new()).is_empty());
    }

    #[test]
    fn calls_have_the_types_of_the_table() {
        let text = calls();
        assert!(text.contains(
            "harness_call_aclnnInplaceNormal(void *plan, const uint64_t *slots, uint64_t"
        ));
        assert!(text.contains("int (*)(void *, float, float, int64_t, int64_t, uint64_t *"));
        assert!(text.contains("aclnnSoftmaxGetWorkspaceSize"));
    }
}
