//! `cargo xtask package`: what crates.io would get, and whether a crate outside the workspace can
//! use it.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;
use std::{fs, io};

use serde::Deserialize;

#[derive(Debug, thiserror::Error)]
pub(crate) enum PackageError {
    #[error("cannot run {command}: {source}")]
    Start { command: String, source: io::Error },
    #[error("{0} failed; its messages are above")]
    Failed(String),
    #[error("cannot access {path}: {source}")]
    File { path: PathBuf, source: io::Error },
    #[error("cannot read the output of cargo metadata: {0}")]
    Metadata(#[from] serde_json::Error),
    #[error(
        "public items differ from docs/api; if that is meant, `cargo xtask api --write` and a \
         line in the changelog:\n{}",
        .0.join("\n")
    )]
    Api(Vec<String>),
    #[error("not fit for crates.io:\n{}", .0.join("\n"))]
    Unfit(Vec<String>),
}

pub(crate) type Result<T, E = PackageError> = std::result::Result<T, E>;

#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
    target_directory: PathBuf,
    workspace_root: PathBuf,
}

#[derive(Clone, Debug, Default, Deserialize)]
pub(crate) struct Package {
    pub(crate) name: String,
    version: String,
    /// The registries that may take it; none for "no registry", absent for "any".
    publish: Option<Vec<String>>,
    description: Option<String>,
    license: Option<String>,
    readme: Option<String>,
    rust_version: Option<String>,
    keywords: Vec<String>,
    categories: Vec<String>,
}

/// The categories of crates.io that the workspace uses; crates.io drops others. All of them:
/// src/boot/categories.toml of rust-lang/crates.io.
const CATEGORIES: [&str; 7] = [
    "api-bindings",
    "computer-vision",
    "development-tools::testing",
    "emulators",
    "hardware-support",
    "mathematics",
    "science",
];

/// Folders that a package may contain: sources of Rust, of kernels, and headers for kernels.
const FOLDERS: [&str; 3] = ["src/", "kernels/", "include/"];
/// Its other files; those that cargo does not write are in the repository, and required.
const OWN_FILES: [&str; 3] = ["README.md", LICENSES[0], LICENSES[1]];
const CARGO_FILES: [&str; 4] = [
    "Cargo.toml",
    "Cargo.toml.orig",
    "Cargo.lock",
    ".cargo_vcs_info.json",
];
const LICENSES: [&str; 2] = ["LICENSE-APACHE", "LICENSE-MIT"];
/// A package of more compressed bytes contains something that does not belong there; crates.io
/// takes 10 MiB.
const MOST_BYTES: u64 = 1 << 20;

/// Features of packages that the reader turns on.
const READER_FEATURES: [(&str, &str); 1] = [("burn-ascend", "\"ascend-sim\"")];
/// What the reader depends on besides: with these features its external crates are the ones that
/// the workspace's tests were compiled with, and are not compiled again. Where one is missing, the
/// check takes minutes longer; `cargo tree -f "{p} {f}"` of both tells which.
const READER_DEPENDENCIES: &str = r#"
burn = { version = "0.22", default-features = false, features = [
    "std", "autodiff", "flex", "optim", "rayon", "simd",
] }
num-traits = "0.2"
regex-syntax = "0.8"
rustix = { version = "1", features = ["termios"] }
"#;
/// As in the workspace, for the same reason.
const READER_PROFILE: &str = r#"
[profile.dev]
debug = "line-tables-only"
incremental = false
[profile.dev.package."*"]
debug = false
"#;

/// Checks and packages the published crates, then builds and runs the examples of their READMEs in
/// a crate that depends on the packages. Returns what was done.
pub(crate) fn run() -> Result<String> {
    let Published {
        packages: published,
        target,
        root,
    } = Published::find()?;
    let mut unfit: Vec<String> = published.iter().flat_map(manifest_faults).collect();

    let mut package = crate::cargo::cargo();
    package.current_dir(&root);
    package.args([
        "package",
        "--quiet",
        "--offline",
        "--locked",
        "--no-verify",
        "--allow-dirty",
    ]);
    for published in &published {
        package.args(["-p", &published.name]);
    }
    finish(&mut package)?;

    let outside = target.join("outside");
    if outside.exists() {
        fs::remove_dir_all(&outside).map_err(cannot_access(&outside))?;
    }
    let reader = outside.join("reader");
    fs::create_dir_all(reader.join("src")).map_err(cannot_access(&reader))?;
    let licenses = LICENSES.map(|name| read(&root.join(name)));
    let mut summary = String::new();
    let mut pages = vec![("README.md".to_owned(), read(&root.join("README.md"))?)];
    for package in &published {
        let name = format!("{}-{}", package.name, package.version);
        let file = target.join(format!("package/{name}.crate"));
        finish(
            Command::new("tar")
                .arg("-xzf")
                .arg(&file)
                .arg("-C")
                .arg(&outside),
        )?;
        let folder = outside.join(&name);
        let files = files(&folder)?;
        let compressed = fs::metadata(&file).map_err(cannot_access(&file))?.len();
        unfit.extend(file_faults(&name, &files, compressed));
        for (license, expected) in LICENSES.iter().zip(&licenses) {
            let path = folder.join(license);
            if path.exists() && Some(&read(&path)?) != expected.as_ref().ok() {
                unfit.push(format!("{name}: {license} is not the repository's"));
            }
        }
        let readme = read(&folder.join("README.md")).unwrap_or_default();
        if examples(&readme).is_empty() {
            unfit.push(format!("{name}: README.md has no example"));
        }
        pages.push((name.clone(), readme));
        let (count, bytes) = (files.len(), files.values().sum::<u64>());
        let kib = |bytes: u64| bytes.div_ceil(1024);
        let _ = writeln!(
            summary,
            "{name}: {count} files, {} KiB, {} KiB compressed",
            kib(bytes),
            kib(compressed)
        );
    }
    if !unfit.is_empty() {
        return Err(PackageError::Unfit(unfit));
    }

    let lock = reader.join("Cargo.lock");
    let workspace_lock = root.join("Cargo.lock");
    fs::copy(&workspace_lock, &lock).map_err(cannot_access(&workspace_lock))?;
    write(&reader.join("Cargo.toml"), &reader_manifest(&published))?;
    write(&reader.join("src/main.rs"), &reader_program(&pages))?;
    let start = Instant::now();
    finish(
        crate::cargo::cargo()
            .current_dir(&reader)
            .args(["run", "--offline", "--target-dir"])
            .arg(&target),
    )?;
    let seconds = start.elapsed().as_secs();
    let _ = write!(
        summary,
        "the READMEs' examples built and ran outside the workspace in {seconds} s"
    );
    Ok(summary)
}

/// The published packages, and the folders of the workspace.
pub(crate) struct Published {
    pub(crate) packages: Vec<Package>,
    pub(crate) target: PathBuf,
    pub(crate) root: PathBuf,
}

impl Published {
    /// Those that no manifest key keeps from being published.
    pub(crate) fn find() -> Result<Self> {
        let arguments = ["metadata", "--no-deps", "--offline", "--format-version=1"];
        let metadata: Metadata =
            serde_json::from_str(&output(crate::cargo::cargo().args(arguments))?)?;
        let mut packages = metadata.packages;
        packages.retain(|package| package.publish.is_none());
        Ok(Self {
            packages,
            target: metadata.target_directory,
            root: metadata.workspace_root,
        })
    }
}

/// What crates.io would refuse or drop in a manifest
/// (<https://doc.rust-lang.org/cargo/reference/manifest.html>), and what readers would miss.
fn manifest_faults(package: &Package) -> Vec<String> {
    let Package {
        keywords,
        categories,
        ..
    } = package;
    let texts = [
        ("description", &package.description),
        ("license", &package.license),
        ("readme", &package.readme),
        ("rust-version", &package.rust_version),
    ];
    let absent = texts
        .iter()
        .filter(|(_, text)| text.as_ref().is_none_or(String::is_empty));
    let mut faults: Vec<String> = absent.map(|(key, _)| format!("no {key}")).collect();
    for (key, list) in [("keywords", keywords), ("categories", categories)] {
        if !(1..=5).contains(&list.len()) {
            faults.push(format!("{} {key}, expected 1 to 5", list.len()));
        }
    }
    let is_keyword = |word: &&String| {
        word.len() <= 20
            && word.starts_with(|c: char| c.is_ascii_alphanumeric())
            && word
                .chars()
                .all(|c| c.is_ascii_alphanumeric() || "_-+".contains(c))
    };
    let wrong = keywords.iter().filter(|word| !is_keyword(word));
    faults.extend(wrong.map(|word| format!("{word:?} is no keyword")));
    let unknown = categories
        .iter()
        .filter(|name| !CATEGORIES.contains(&name.as_str()));
    faults.extend(unknown.map(|name| format!("{name:?} is no known category")));
    faults
        .iter()
        .map(|fault| format!("{}: {fault}", package.name))
        .collect()
}

/// Files that are missing in a package, or should not be there.
fn file_faults(name: &str, files: &BTreeMap<String, u64>, compressed: u64) -> Vec<String> {
    let missing = OWN_FILES.iter().filter(|file| !files.contains_key(**file));
    let mut faults: Vec<String> = missing.map(|file| format!("{name}: no {file}")).collect();
    let belongs = |file: &str| {
        FOLDERS.iter().any(|folder| file.starts_with(folder))
            || OWN_FILES.contains(&file)
            || CARGO_FILES.contains(&file)
    };
    let foreign = files.keys().filter(|file| !belongs(file));
    faults.extend(foreign.map(|file| format!("{name}: {file} does not belong there")));
    if compressed > MOST_BYTES {
        faults.push(format!(
            "{name}: {compressed} bytes, expected at most {MOST_BYTES}"
        ));
    }
    faults
}

/// Whether an example is run, or only compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Run,
    Compile,
}

/// The Rust examples of a page, as rustdoc takes them: `# ` hides a line from readers only.
fn examples(page: &str) -> Vec<(Kind, String)> {
    let mut found = Vec::new();
    let mut lines = page.lines();
    while let Some(line) = lines.next() {
        let kind = match line {
            "```rust" => Kind::Run,
            "```rust,no_run" => Kind::Compile,
            _ => continue,
        };
        let code = lines.by_ref().take_while(|line| *line != "```");
        let code = code.map(|line| line.strip_prefix("# ").unwrap_or(line));
        found.push((kind, code.flat_map(|line| [line, "\n"]).collect()));
    }
    found
}

/// A program of the examples of all pages. The simulator stands for the NPU that one wants.
fn reader_program(pages: &[(String, String)]) -> String {
    let mut functions = String::new();
    let mut main = String::new();
    let all = pages
        .iter()
        .flat_map(|(page, text)| examples(text).into_iter().map(move |e| (page, e)));
    for (index, (page, (kind, code))) in all.enumerate() {
        let simulated = code.replace("Npu::open(0)", "Npu::simulated()");
        let runs = kind == Kind::Run || simulated != code;
        let end = if code.contains("Ok::<") {
            ""
        } else {
            "Ok::<(), ()>(())\n"
        };
        let _ = write!(
            functions,
            "fn example_{index}() -> Result<(), impl std::fmt::Debug> {{\n{simulated}{end}}}\n\n"
        );
        let call = match runs {
            true => format!("println!(\"{page}\");\nexample_{index}().expect(\"{page}\");"),
            false => format!("let _ = example_{index};"),
        };
        let _ = writeln!(main, "{call}");
    }
    format!("{functions}fn main() {{\n{main}}}\n")
}

/// The manifest of a package that depends on the packages by version, as from crates.io.
fn reader_manifest(published: &[Package]) -> String {
    let mut dependencies = String::new();
    let mut patches = String::new();
    for Package { name, version, .. } in published {
        let features = READER_FEATURES.iter().find(|(package, _)| package == name);
        let features = features.map_or("", |(_, features)| features);
        let _ = writeln!(
            dependencies,
            "{name} = {{ version = \"={version}\", features = [{features}] }}"
        );
        let _ = writeln!(patches, "{name} = {{ path = \"../{name}-{version}\" }}");
    }
    format!(
        "[package]\nname = \"reader\"\nversion = \"0.0.0\"\nedition = \"2024\"\n\n[workspace]\n\n\
         [dependencies]\n{dependencies}{READER_DEPENDENCIES}\n[patch.crates-io]\n{patches}\
         {READER_PROFILE}"
    )
}

/// The files below a folder with their bytes, by their paths from it.
pub(crate) fn files(folder: &Path) -> Result<BTreeMap<String, u64>> {
    let mut found = BTreeMap::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(next) = folders.pop() {
        for entry in fs::read_dir(&next).map_err(cannot_access(&next))? {
            let path = entry.map_err(cannot_access(&next))?.path();
            let data = fs::metadata(&path).map_err(cannot_access(&path))?;
            if data.is_dir() {
                folders.push(path);
            } else {
                let name = path.strip_prefix(folder).unwrap_or(&path);
                found.insert(name.to_string_lossy().replace('\\', "/"), data.len());
            }
        }
    }
    Ok(found)
}

pub(crate) fn cannot_access(path: &Path) -> impl FnOnce(io::Error) -> PackageError {
    |source| PackageError::File {
        path: path.to_owned(),
        source,
    }
}

pub(crate) fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path).map_err(cannot_access(path))
}

pub(crate) fn write(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).map_err(cannot_access(path))
}

/// A command as its program and first argument, for messages.
fn name(command: &Command) -> String {
    let program = Path::new(command.get_program())
        .file_name()
        .unwrap_or_default();
    let argument = command.get_args().next().unwrap_or_default();
    format!("{} {}", program.display(), argument.display())
}

pub(crate) fn finish(command: &mut Command) -> Result<()> {
    output(command.stdout(Stdio::inherit())).map(drop)
}

/// What a command prints, unless its standard output was given elsewhere.
fn output(command: &mut Command) -> Result<String> {
    let output = command.stderr(Stdio::inherit()).output();
    let output = output.map_err(|source| PackageError::Start {
        command: name(command),
        source,
    })?;
    match output.status.success() {
        true => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
        false => Err(PackageError::Failed(name(command))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_of_a_manifest_are_named() {
        let text = |text: &str| Some(text.to_owned());
        let fit = Package {
            name: "a".to_owned(),
            description: text("What it is"),
            license: text("MIT"),
            readme: text("README.md"),
            rust_version: text("1.95"),
            keywords: vec!["rope".to_owned()],
            categories: vec!["science".to_owned()],
            ..Package::default()
        };
        assert_eq!(manifest_faults(&fit), [""; 0]);
        let unfit = Package {
            description: text(""),
            license: None,
            keywords: vec!["two words".to_owned(), "a".repeat(21)],
            categories: vec!["machine-learning".to_owned()],
            ..fit
        };
        let expected = [
            "a: no description",
            "a: no license",
            "a: \"two words\" is no keyword",
            "a: \"aaaaaaaaaaaaaaaaaaaaa\" is no keyword",
            "a: \"machine-learning\" is no known category",
        ];
        assert_eq!(manifest_faults(&unfit), expected);
        assert_eq!(manifest_faults(&Package::default()).len(), 6);
    }

    #[test]
    fn missing_and_foreign_files_are_named() {
        let names = [
            "src/lib.rs",
            "README.md",
            "LICENSE-MIT",
            "tests/fixtures/a.safetensors",
        ];
        let files = names.map(|name| (name.to_owned(), 1)).into();
        let expected = [
            "a: no LICENSE-APACHE",
            "a: tests/fixtures/a.safetensors does not belong there",
            "a: 1048577 bytes, expected at most 1048576",
        ];
        assert_eq!(file_faults("a", &files, MOST_BYTES + 1), expected);
    }

    #[test]
    fn examples_are_taken_as_rustdoc_takes_them() {
        let page = "```sh\nls\n```\n```rust\nlet a = 1;\n# Ok::<(), ()>(())\n```\n\
                    ```rust,no_run\nopen();\n```\n```rust,ignore\n?\n```\n";
        let expected = [
            (Kind::Run, "let a = 1;\nOk::<(), ()>(())\n".to_owned()),
            (Kind::Compile, "open();\n".to_owned()),
        ];
        assert_eq!(examples(page), expected);
    }
}
