//! The harness: where the headers and the compiler are, and compiling the kernels with them.

use std::collections::BTreeSet;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::{env, fs};

use serde::Serialize;

use super::{ARCHITECTURES, KERNELS, Result, VendorError, cannot_access};
use crate::checkout::commit_of;

/// Below the folder that was named: a checkout, and where releases of CANN keep the headers.
const PLACES: [&str; 7] = [
    "",
    "asc",
    "include/asc",
    "x86_64-linux/asc",
    "x86_64-linux/include/asc",
    "aarch64-linux/asc",
    "aarch64-linux/include/asc",
];
const ENTRY: &str = "include/basic_api/kernel_basic_intf.h";
/// Include folders of the vendor, below the place, as its own build has them.
const INCLUDES: [&str; 6] = [
    "include",
    "include/basic_api",
    "include/utils",
    "",
    "impl",
    "impl/basic_api",
];
const OLDEST_CLANG: u32 = 15;
const NEWEST_CLANG: u32 = 22;
/// The linker's symbol for where dynamic memory of the unified buffer starts on dav-3510.
const DYNAMIC_UB: &str = "_ZN7AscendC14dynamicStartUBE";

/// The vendor's headers, clang, and the folder of what is made.
pub(super) struct Harness {
    headers: PathBuf,
    /// Of the checkout; none for an installation.
    commit: Option<String>,
    clang: String,
    clang_version: String,
    pub(super) root: PathBuf,
    pub(super) work: PathBuf,
}

/// What compiling showed: that there is no error.
#[derive(Serialize)]
pub(super) struct Compiled {
    pub(super) architecture: u32,
    pub(super) kernels: Vec<String>,
    /// Intrinsics that only the headers name and that have no body.
    pub(super) absent: usize,
}

impl Harness {
    /// Finds headers and compiler.
    pub(super) fn find(folder: &Path) -> Result<Self> {
        if !cfg!(all(target_arch = "x86_64", target_os = "linux")) {
            let host = format!("{} {}", env::consts::OS, env::consts::ARCH);
            return Err(VendorError::Host(host));
        }
        let headers = find_headers(folder)?;
        let (clang, clang_version) = find_clang(env::var("CLANG").ok())?;
        let root = crate::root();
        let root = fs::canonicalize(&root).map_err(cannot_access(&root))?;
        let work = root.join("target/vendor-headers");
        fs::create_dir_all(&work).map_err(cannot_access(&work))?;
        if work.display().to_string().contains(char::is_whitespace) {
            return Err(VendorError::Space(work));
        }
        let harness = Self {
            commit: commit_of(&headers),
            headers,
            clang,
            clang_version,
            root,
            work,
        };
        harness.write("options", &harness.options())?;
        Ok(harness)
    }

    /// The headers and the compiler.
    pub(super) fn title(&self) -> (String, String) {
        let commit = self.commit.as_deref().unwrap_or("no commit known");
        let headers = format!("{} ({commit})", self.headers.display());
        (headers, self.clang_version.clone())
    }

    pub(super) fn write(&self, name: &str, text: &str) -> Result<PathBuf> {
        let path = self.work.join(name);
        // A file that is the same keeps its time.
        if fs::read_to_string(&path).ok().as_deref() != Some(text) {
            fs::write(&path, text).map_err(cannot_access(&path))?;
        }
        Ok(path)
    }

    fn folder(&self) -> PathBuf {
        self.root.join("audit/vendor-headers")
    }

    /// The compiler's arguments, one a line, as clang reads them from a file. The vendor's folders
    /// are the system's, so that warnings are of the kernels and of the harness.
    fn options(&self) -> String {
        let mut lines = vec!["-std=c++17".to_owned(), "-include prelude.h".to_owned()];
        for folder in [self.folder(), self.work.clone()] {
            lines.push(format!("-I\"{}\"", folder.display()));
        }
        for include in INCLUDES {
            let folder = self.headers.join(include);
            lines.push(format!("-isystem \"{}\"", folder.display()));
        }
        lines.push(format!("-Wl,--defsym={DYNAMIC_UB}=0"));
        lines.push("-Wno-unused-command-line-argument".to_owned());
        lines.join("\n") + "\n"
    }

    /// Runs clang over a unit without making code.
    fn check(&self, architecture: u32, unit: &Path, more: &[&str]) -> Result<Output> {
        let output = Command::new(&self.clang)
            .arg(format!("@{}", self.work.join("options").display()))
            .arg(format!("-D__NPU_ARCH__={architecture}"))
            .arg("-I")
            .arg(self.root.join("crates/ascend-sim/include"))
            .args(["-ferror-limit=0", "-fno-caret-diagnostics"])
            .args(more)
            .arg(unit)
            .output();
        Ok(output.map_err(cannot_access(Path::new(&self.clang)))?)
    }

    /// Compiles every entry point of the kernels for an architecture. The names that the harness
    /// does not know are found with the headers alone, so that none of the kernels' own is among
    /// them.
    pub(super) fn compile(&self, architecture: u32) -> Result<Compiled> {
        // Kernels with a cube core are compiled for it, too.
        if architecture == 2201 {
            self.compile_for(architecture, "_cube", &["-fsyntax-only", "-DHARNESS_CUBE"])?;
        }
        self.compile_for(architecture, "", &["-fsyntax-only"])
    }

    fn compile_for(&self, architecture: u32, core: &str, options: &[&str]) -> Result<Compiled> {
        let absent = format!("absent_{architecture}{core}.h");
        self.write(&absent, "")?;
        let headers = self.write("headers.cpp", "#include \"kernel_operator.h\"\n")?;
        let mut names = BTreeSet::new();
        loop {
            let output = self.check(architecture, &headers, options)?;
            let text = String::from_utf8_lossy(&output.stderr).into_owned();
            let found: Vec<String> = unknown_names(&text).map(str::to_owned).collect();
            let before = names.len();
            names.extend(found);
            if names.len() == before {
                refuse_errors(architecture, &text, |_| true)?;
                break;
            }
            self.write(&absent, &declarations(&names))?;
        }

        let source = self.root.join(KERNELS).join("rope.cpp");
        let preprocess: Vec<&str> = [&["-E"], &options[1..]].concat();
        let output = self.check(architecture, &source, &preprocess)?;
        let kernels = entry_points(&String::from_utf8_lossy(&output.stdout), &source);
        let entries: Vec<String> = kernels
            .iter()
            .map(|name| format!("ASCEND_SIM_KERNEL({name})"))
            .collect();
        let unit = format!(
            "#include \"kernel_operator.h\"\n#include \"{}\"\n#include \"ascend_sim/library.h\"\n\
             ASCEND_SIM_LIBRARY({})\n",
            source.display(),
            entries.join(", ")
        );
        let unit = self.write("kernels.cpp", &unit)?;
        let errors = |more: &[&str]| -> Result<String> {
            let output = self.check(architecture, &unit, &[options, more].concat())?;
            Ok(String::from_utf8_lossy(&output.stderr).into_owned())
        };
        refuse_errors(architecture, &errors(&[])?, |_| true)?;
        // The vendor's printing takes string literals for global memory, which they are on the
        // device: its errors are none of the kernels'.
        let own = self.root.join(KERNELS).display().to_string();
        let text = errors(&["-DHARNESS_GM_SPACE"])?;
        refuse_errors(architecture, &text, |error| names_file(error, &own))?;
        Ok(Compiled {
            architecture,
            kernels,
            absent: names.len(),
        })
    }

    /// The environment in which the simulator compiles kernels with the vendor's headers: compiler,
    /// its options, and the cache of what was compiled.
    pub(super) fn environment(&self) -> Result<Vec<(&'static str, String)>> {
        let flags = format!(
            "@{} -DHARNESS_CONTENT=0x{:x}",
            self.work.join("options").display(),
            self.content()?
        );
        Ok(vec![
            ("CXX", self.clang.clone()),
            ("CXXFLAGS", flags),
            (
                "ASCEND_SIM_CACHE",
                self.work.join("cache").display().to_string(),
            ),
        ])
    }

    /// A number that differs when a header of the vendor or of the harness does. The simulator's
    /// cache knows the options only.
    fn content(&self) -> Result<u64> {
        let mut hasher = DefaultHasher::new();
        hash_sources(&self.folder(), &mut hasher)?;
        for folder in ["include", "impl/basic_api", "impl/utils"] {
            hash_sources(&self.headers.join(folder), &mut hasher)?;
        }
        for architecture in ARCHITECTURES {
            let path = self.work.join(format!("absent_{architecture}.h"));
            fs::read(&path).unwrap_or_default().hash(&mut hasher);
        }
        Ok(hasher.finish())
    }
}

/// Names and texts of the headers and sources below a folder.
pub(super) fn hash_sources(folder: &Path, hasher: &mut DefaultHasher) -> Result<()> {
    if !folder.is_dir() {
        return Ok(());
    }
    let mut entries: Vec<PathBuf> = fs::read_dir(folder)
        .and_then(|list| list.map(|entry| entry.map(|e| e.path())).collect())
        .map_err(cannot_access(folder))?;
    entries.sort();
    for entry in entries {
        if entry.is_dir() {
            hash_sources(&entry, hasher)?;
        } else if entry
            .extension()
            .is_some_and(|ending| ending == "h" || ending == "cpp")
        {
            entry.hash(hasher);
            let bytes = fs::read(&entry).map_err(cannot_access(&entry))?;
            bytes.hash(hasher);
        }
    }
    Ok(())
}

fn find_headers(folder: &Path) -> Result<PathBuf> {
    PLACES
        .iter()
        .map(|place| folder.join(place))
        .find(|place| place.join(ENTRY).is_file() && place.join("impl").is_dir())
        .and_then(|place| fs::canonicalize(place).ok())
        .ok_or_else(|| VendorError::NoHeaders(folder.to_owned()))
}

/// The compiler and its version. One that was asked for is the only one tried.
fn find_clang(chosen: Option<String>) -> Result<(String, String)> {
    let numbered = (OLDEST_CLANG..=NEWEST_CLANG).map(|version| format!("clang++-{version}"));
    let candidates: Vec<String> = match chosen {
        Some(command) => vec![command],
        None => std::iter::once("clang++".to_owned())
            .chain(numbered)
            .collect(),
    };
    for command in &candidates {
        let Ok(output) = Command::new(command).arg("--version").output() else {
            continue;
        };
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let line = text.lines().next().unwrap_or_default();
        if clang_version(line).is_some_and(|version| version >= OLDEST_CLANG) {
            return Ok((command.clone(), line.to_owned()));
        }
    }
    Err(VendorError::NoClang {
        tried: candidates.join(", "),
    })
}

/// The number before the first point of `... clang version 15.0.6`.
fn clang_version(line: &str) -> Option<u32> {
    let (_, version) = line.split_once("clang version ")?;
    version.split('.').next()?.parse().ok()
}

/// An error if the compiler's output has one that counts.
fn refuse_errors(architecture: u32, text: &str, counts: impl Fn(&str) -> bool) -> Result<()> {
    let errors: Vec<&str> = errors_of(text).filter(|error| counts(error)).collect();
    match errors.first() {
        None => Ok(()),
        Some(first) => Err(VendorError::Compile {
            architecture,
            count: errors.len(),
            first: (*first).to_owned(),
        }),
    }
}

/// Each error of the compiler's output with the notes after it, which say what led to it.
fn errors_of(text: &str) -> impl Iterator<Item = &str> {
    let is_start = |line: &str| line.contains(" error: ");
    let ends = |line: &str| is_start(line) || line.contains(" warning: ");
    let mut starts: Vec<(usize, bool)> = Vec::new();
    let mut at = 0;
    for line in text.split_inclusive('\n') {
        if ends(line) {
            starts.push((at, is_start(line)));
        }
        at += line.len();
    }
    let ends: Vec<usize> = starts
        .iter()
        .skip(1)
        .map(|(start, _)| *start)
        .chain([text.len()])
        .collect();
    starts
        .into_iter()
        .zip(ends)
        .filter(|((_, error), _)| *error)
        .map(|((start, _), end)| text[start..end].trim_end())
}

/// Whether an error, or what led to it, lies below a folder. Lines that say where the next error's
/// file was included follow this one.
fn names_file(error: &str, folder: &str) -> bool {
    let mut lines = error
        .lines()
        .filter(|line| !line.starts_with("In file included from"));
    lines.any(|line| line.contains(folder))
}

/// The names that the compiler's output misses as functions. Types and enumerators, which begin
/// with a capital, are the harness's to know.
fn unknown_names(text: &str) -> impl Iterator<Item = &str> {
    const MESSAGES: [&str; 2] = [
        "use of undeclared identifier '",
        "no matching function for call to '",
    ];
    text.lines()
        .filter_map(|line| {
            MESSAGES
                .iter()
                .find_map(|message| Some(line.split_once(message)?.1.split_once('\'')?.0))
        })
        .filter(|name| name.starts_with(|c: char| c.is_ascii_lowercase() || c == '_'))
}

/// Declares intrinsics without a body. What reads a register gives a number, with which the headers
/// calculate.
fn declarations(names: &BTreeSet<String>) -> String {
    let mut text = "#pragma once\n".to_owned();
    for name in names {
        let is_number = name.trim_start_matches('_').starts_with("get_");
        let kind = if is_number {
            "CCE_ABSENT_NUMBER"
        } else {
            "CCE_ABSENT"
        };
        text += &format!("{kind}({name})\n");
    }
    text
}

/// The `extern "C"` functions that `source` defines, in the preprocessor's output.
fn entry_points(preprocessed: &str, source: &Path) -> Vec<String> {
    let source = format!("\"{}\"", source.display());
    let mut inside = false;
    let mut found = Vec::new();
    for line in preprocessed.lines() {
        if line.starts_with("# ") {
            inside = line.contains(&source);
        } else if inside {
            let functions = line.split("extern \"C\"").skip(1);
            let names = functions.filter_map(|text| {
                let (head, _) = text.split_once('(')?;
                head.split_whitespace().last().map(str::to_owned)
            });
            found.extend(names);
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_said() {
        let error = find_headers(Path::new("/nowhere")).expect_err("no such folder");
        assert!(
            error.to_string().starts_with("/nowhere holds no include/"),
            "{error}"
        );
        let error = find_clang(Some("no-such-clang".to_owned())).expect_err("no such command");
        let text = error.to_string();
        assert!(
            text.contains("tried no-such-clang: `apt install clang-15`"),
            "{text}"
        );
    }

    #[test]
    fn versions_are_read() {
        assert_eq!(clang_version("Debian clang version 15.0.6"), Some(15));
        assert_eq!(clang_version("Ubuntu clang version 19.1.7 (3)"), Some(19));
        assert_eq!(clang_version("g++ (Debian 12.2.0) 12.2.0"), None);
    }

    const OUTPUT: &str = "\
In file included from a.cpp:1:
/v/a.h:3:9: error: use of undeclared identifier 'vfoo'
/v/a.h:4:9: error: no matching function for call to 'get_bar'
/k/rope.h:7:1: note: in instantiation of function template
In file included from a.cpp:2:
/v/a.h:5:9: warning: something
/v/a.h:6:9: error: use of undeclared identifier 'Type'
1 error generated.
";

    #[test]
    fn the_compilers_output_is_taken_apart() {
        let errors: Vec<&str> = errors_of(OUTPUT).collect();
        assert_eq!(errors.len(), 3);
        assert!(errors[1].contains("/k/rope.h") && !errors[0].contains("/k/"));
        assert!(refuse_errors(2201, OUTPUT, |error| names_file(error, "/k/")).is_err());
        assert!(refuse_errors(2201, OUTPUT, |error| names_file(error, "a.cpp")).is_ok());
        let names: Vec<&str> = unknown_names(OUTPUT).collect();
        assert_eq!(names, ["vfoo", "get_bar"]);
        let names = names.into_iter().map(str::to_owned).collect();
        let text = declarations(&names);
        assert_eq!(
            text,
            "#pragma once\nCCE_ABSENT_NUMBER(get_bar)\nCCE_ABSENT(vfoo)\n"
        );
    }

    #[test]
    fn entry_points_are_those_of_the_file() {
        let text = "# 1 \"/v/a.h\" 1\nextern \"C\" void other(int a);\n# 9 \"/k/rope.cpp\" 2\n\
                    extern \"C\" void one(int a) { } extern \"C\" void two(int b) { }\n";
        assert_eq!(entry_points(text, Path::new("/k/rope.cpp")), ["one", "two"]);
    }
}
