//! docs/dev/architecture.md names definitions and functions of the sources. They must be there, and
//! the words that it lists must have no second definition.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The text of a second-level section.
fn section(heading: &str) -> String {
    let page = read(&root().join("docs/dev/architecture.md"));
    let sections = page.split("\n## ");
    let found: Vec<_> = sections
        .filter_map(|text| text.strip_prefix(heading))
        .collect();
    assert_eq!(
        found.len(),
        1,
        "sections of docs/dev/architecture.md that start with {heading:?}"
    );
    found[0].to_owned()
}

/// What stands between backticks.
fn code(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2)
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

/// Name and visibility of the type or trait that a line starts to define: `pub`, `pub(crate)`, ...
fn definition(line: &str) -> Option<(&str, &str)> {
    let mut words = line.split_whitespace();
    let visibility = words.next().filter(|word| word.starts_with("pub"))?;
    let mut words = words.skip_while(|word| *word == "unsafe");
    let keyword = words.next()?;
    ["struct", "enum", "trait", "type", "union"]
        .contains(&keyword)
        .then_some(())?;
    let is_name = |c: char| c.is_alphanumeric() || c == '_';
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
    let (section, defined) = (section("Words"), definitions(|_| true));
    let words = rows(&section, 3);
    assert!(words.len() > 20, "{} rows", words.len());
    let wrong: Vec<String> = (words.iter())
        .filter_map(|row| {
            let (word, path) = (row[0].trim_matches('`'), row[1].trim_matches('`'));
            let found = defined.get(word).map_or(&[][..], Vec::as_slice);
            (found != [path]).then(|| format!("{word}: expected in {path}, found in {found:?}"))
        })
        .collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn no_other_public_word_is_defined_twice() {
    let section = section("Words");
    let listed: BTreeSet<&str> = (rows(&section, 2).iter())
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
        "defined twice:\n{}",
        unlisted.join("\n")
    );
    let twice: BTreeSet<&str> = twice.map(|(word, _)| word.as_str()).collect();
    let stale: Vec<_> = listed.difference(&twice).collect();
    assert!(stale.is_empty(), "listed, but defined once: {stale:?}");
}

#[test]
fn each_function_of_the_two_ways_exists_and_files_are_counted() {
    let sources = sources();
    for heading in ["The way of `mrope_section`", "The way of q"] {
        let section = section(heading);
        let lists = section.split(" files):\n").collect::<Vec<_>>();
        assert!(lists.len() > 1, "no list in {heading:?}");
        for pair in lists.windows(2) {
            let count = pair[0].rsplit('(').next().expect("a count");
            let lines = pair[1].lines().skip_while(|line| line.is_empty());
            let steps: String = lines.take_while(|line| !line.is_empty()).collect();
            let places = code(&steps).filter_map(|place| place.split_once(".rs:"));
            let mut files = BTreeSet::new();
            for (file, function) in places {
                let path = format!("{file}.rs");
                let text = sources.get(&path).unwrap_or_else(|| panic!("no {path}"));
                let start = format!("fn {function}");
                let is_there = text
                    .match_indices(&start)
                    .any(|(at, start)| text[at + start.len()..].starts_with(['(', '<']));
                assert!(is_there, "no function {function} in {path}");
                files.insert(path);
            }
            assert_eq!(count, files.len().to_string(), "files of {files:?}");
        }
    }
}
