//! The definitions named in docs/tables/words.md exist in the sources, and its words have no second
//! definition. Names of functions keep the rule of `try_`. Modules use each other in no circle.
#![allow(clippy::disallowed_methods, reason = "test code")]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The page of words.
fn page() -> String {
    read(&root().join("docs/tables/words.md"))
}

/// The rows of the tables of a text with `columns` columns, without headings and rules.
fn rows(text: &str, columns: usize) -> Vec<Vec<&str>> {
    let lines = text.lines().filter(|line| line.starts_with("| `"));
    let cells = lines.map(|line| line.trim_matches('|').split(" | ").map(str::trim).collect());
    cells
        .filter(|cells: &Vec<_>| cells.len() == columns)
        .collect()
}

/// Rust files by their paths from `crates`, without the simulator, which stands for the vendor.
fn sources() -> BTreeMap<String, String> {
    fn visit(folder: &Path, crates: &Path, found: &mut BTreeMap<String, String>) {
        for entry in fs::read_dir(folder).expect("a readable folder") {
            let path = entry.expect("a readable entry").path();
            if path.is_dir() {
                visit(&path, crates, found);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let name = path.strip_prefix(crates).expect("below crates");
                found.insert(name.to_string_lossy().replace('\\', "/"), read(&path));
            }
        }
    }
    let crates = root().join("crates");
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(&crates).expect("the folder of crates") {
        let entry = entry.expect("a readable entry");
        if entry.file_name() != "ascend-sim" {
            visit(&entry.path().join("src"), &crates, &mut found);
        }
    }
    found
}

fn is_name(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// Name and visibility of the type or trait that a line starts to define: `pub`, `pub(crate)`, ...
fn definition(line: &str) -> Option<(&str, &str)> {
    let mut words = line.split_whitespace();
    let visibility = words.next().filter(|word| word.starts_with("pub"))?;
    let mut words = words.skip_while(|word| *word == "unsafe");
    let keyword = words.next()?;
    ["struct", "enum", "trait", "type", "union"]
        .contains(&keyword)
        .then_some(())?;
    let name = words.next()?.split(|c| !is_name(c)).next()?;
    (!name.is_empty()).then_some((name, visibility))
}

/// Where each type and trait is defined whose visibility is accepted.
fn definitions(accepted: impl Fn(&str) -> bool) -> BTreeMap<String, Vec<String>> {
    let mut found: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (path, text) in sources() {
        for (name, visibility) in text.lines().filter_map(definition) {
            if accepted(visibility) {
                found.entry(name.to_owned()).or_default().push(path.clone());
            }
        }
    }
    found
}

#[test]
fn each_word_is_defined_once_where_the_table_says() {
    let (page, defined) = (page(), definitions(|_| true));
    let words = rows(&page, 3);
    assert!(words.len() > 20, "{} rows", words.len());
    let wrong: Vec<String> = (words.iter())
        .filter_map(|row| {
            let (word, path) = (row[0].trim_matches('`'), row[1].trim_matches('`'));
            let found = defined.get(word).map_or(&[][..], Vec::as_slice);
            (found != [path]).then(|| format!("{word}: expected in {path}, found in {found:?}"))
        })
        .collect();
    assert!(
        wrong.is_empty(),
        "docs/tables/words.md: correct the file of\n{}",
        wrong.join("\n")
    );
}

#[test]
fn no_other_public_word_is_defined_twice() {
    let page = page();
    let listed: BTreeSet<&str> = (rows(&page, 2).iter())
        .map(|row| row[0].trim_matches('`'))
        .collect();
    let defined = definitions(|visibility| visibility == "pub");
    let twice = defined.iter().filter(|(_, paths)| paths.len() > 1);
    let unlisted: Vec<String> = (twice.clone())
        .filter(|(word, _)| !listed.contains(word.as_str()))
        .map(|(word, paths)| format!("{word}: {}", paths.join(", ")))
        .collect();
    assert!(
        unlisted.is_empty(),
        "defined twice; rename one, or list both meanings in docs/tables/words.md:\n{}",
        unlisted.join("\n")
    );
    let twice: BTreeSet<&str> = twice.map(|(word, _)| word.as_str()).collect();
    let stale: Vec<_> = listed.difference(&twice).collect();
    assert!(
        stale.is_empty(),
        "docs/tables/words.md lists words that are defined once: {stale:?}"
    );
}

/// cargo finds test programs by itself only where `autotests` is on.
#[test]
fn each_file_of_tests_is_in_a_program() {
    let crates = fs::read_dir(root().join("crates")).expect("the folder of crates");
    let folders = crates.map(|entry| entry.expect("a readable entry").path());
    let mut places: Vec<_> = folders
        .map(|path| (path.clone(), path.join("tests")))
        .collect();
    places.push((root().join("tests"), root().join("tests")));
    let mut alone = Vec::new();
    for (package, tests) in places {
        let manifest = read(&package.join("Cargo.toml"));
        if !manifest.contains("\nautotests = false\n") {
            continue;
        }
        let files = fs::read_dir(&tests).expect("a folder of tests");
        let files: Vec<_> = files
            .map(|entry| entry.expect("a readable entry").path())
            .collect();
        let files = files
            .iter()
            .filter(|path| path.extension().is_some_and(|end| end == "rs"));
        let name = |path: &Path| {
            path.file_stem()
                .expect("a name")
                .to_string_lossy()
                .into_owned()
        };
        let is_program = |path: &Path| manifest.contains(&format!("\nname = \"{}\"\n", name(path)));
        let (programs, modules): (Vec<_>, Vec<_>) = files.partition(|path| is_program(path));
        let programs: String = programs.into_iter().map(|path| read(path)).collect();
        let is_missing = |path: &&PathBuf| !programs.contains(&format!("\nmod {};\n", name(path)));
        alone.extend(modules.into_iter().filter(is_missing).cloned());
    }
    assert!(
        alone.is_empty(),
        "add `mod NAME;` to the suite for {alone:?}"
    );
}

/// `try_` marks the fallible twin of a function that panics; one without a twin has no prefix.
#[test]
fn each_fallible_twin_has_its_panicking_one() {
    let mut alone = Vec::new();
    for (path, text) in sources() {
        let names = text.lines().filter_map(|line| {
            let item = line.trim_start().strip_prefix("pub fn ")?;
            item.split(['(', '<']).next()
        });
        let names: BTreeSet<&str> = names.collect();
        let twins = names.iter().filter_map(|name| name.strip_prefix("try_"));
        for name in twins.filter(|name| !names.contains(name)) {
            alone.push(format!("{path}: try_{name}"));
        }
    }
    assert!(alone.is_empty(), "no twin: {alone:?}");
}

/// The crates whose modules use each other in circles. Remove one from the list once it has none.
const WITH_CIRCLES: [&str; 6] = [
    "burn-ascend",
    "rope-burn",
    "rope-cli",
    "rope-core",
    "vlm-data",
    "vlm-train",
];

/// For each crate the modules of its root, each with the modules that it uses by `crate::`. Tests
/// and comments do not count.
fn uses() -> BTreeMap<String, BTreeMap<String, BTreeSet<String>>> {
    let mut crates: BTreeMap<String, BTreeMap<String, BTreeSet<String>>> = BTreeMap::new();
    for (path, text) in sources() {
        let (package, file) = path.split_once("/src/").expect("a file of src");
        let module = file.split('/').next().unwrap_or(file);
        let module = module.trim_end_matches(".rs").to_owned();
        if ["lib", "main"].contains(&module.as_str()) {
            continue;
        }
        let code = text.split("\n#[cfg(test)]").next().unwrap_or_default();
        let code = code
            .lines()
            .map(|line| line.split("//").next().unwrap_or(line));
        let code: Vec<&str> = code.collect();
        let code = code.join("\n");
        let names = code.split("crate::").skip(1);
        let names = names.filter_map(|rest| rest.split(|c: char| !is_name(c)).next());
        let used = crates.entry(package.to_owned()).or_default();
        let used = used.entry(module.clone()).or_default();
        used.extend(names.filter(|name| *name != module).map(str::to_owned));
    }
    crates
}

#[test]
fn modules_use_each_other_in_no_circle() {
    let mut wrong = Vec::new();
    for (package, mut modules) in uses() {
        // Modules that use none of the rest are removed until none is left, or a circle.
        loop {
            let rest: BTreeSet<String> = modules.keys().cloned().collect();
            modules.retain(|_, used| used.iter().any(|name| rest.contains(name)));
            if modules.len() == rest.len() {
                break;
            }
        }
        let (has, may) = (
            !modules.is_empty(),
            WITH_CIRCLES.contains(&package.as_str()),
        );
        match (has, may) {
            (true, false) => wrong.push(format!("{package}: {modules:?}")),
            (false, true) => wrong.push(format!("{package} has none: remove it from the list")),
            _ => {}
        }
    }
    assert!(
        wrong.is_empty(),
        "cut the circle, by a module below both:\n{}",
        wrong.join("\n")
    );
}
