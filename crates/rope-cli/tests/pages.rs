//! The pages of `docs`, and those outside it such as README.md: their commands are parsed, their links
//! followed, and their Rust code is compiled somewhere.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use clap::error::ErrorKind;

/// The languages that a block of code may state. `rust,ignore` is not among them. A block
/// without a language, which rustdoc takes for Rust, is an error.
const LANGUAGES: [&str; 7] = [
    "rust",
    "rust,no_run",
    "sh",
    "toml",
    "text",
    "python",
    "json",
];

/// The sources that name the pages to compile.
const COMPILED_BY: [&str; 3] = [
    include_str!("../src/docs.rs"),
    include_str!("../../rope-check/src/lib.rs"),
    include_str!("../../vlm-data/src/lib.rs"),
];

/// Folders of the packages whose names are not those of folders in `crates`.
const PACKAGES: [(&str, &str); 2] = [("mrope-examples", "examples"), ("rope-tests", "tests")];

/// Pages that the book does not contain.
const OUTSIDE: [&str; 4] = [
    "CONTRIBUTING.md",
    "README.md",
    "SECURITY.md",
    "examples/README.md",
];

struct Page {
    /// From the root of the repository.
    path: String,
    text: String,
}

struct Block<'a> {
    line: usize,
    language: &'a str,
    lines: Vec<&'a str>,
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn pages() -> Vec<Page> {
    let mut pages = OUTSIDE.map(str::to_owned).to_vec();
    let mut folders = vec!["docs".to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in root().join(&folder).read_dir().expect("folder opens") {
            let entry = entry.expect("folder lists");
            let path = format!("{folder}/{}", entry.file_name().display());
            if entry.path().is_dir() {
                folders.push(path);
            } else if path.ends_with(".md") {
                pages.push(path);
            }
        }
    }
    pages.sort();
    let read = |path: String| Page {
        text: std::fs::read_to_string(root().join(&path)).expect("page is text"),
        path,
    };
    pages.into_iter().map(read).collect()
}

impl Page {
    /// The blocks of code between fences, and the text outside them.
    fn blocks(&self) -> (Vec<Block<'_>>, String) {
        let (mut blocks, mut prose, mut open) = (Vec::new(), String::new(), None);
        for (number, line) in self.text.lines().enumerate() {
            match (line.trim_start().strip_prefix("```"), &mut open) {
                (Some(language), None) => {
                    open = Some(Block {
                        line: number + 1,
                        language,
                        lines: Vec::new(),
                    });
                }
                (Some(_), Some(_)) => blocks.extend(open.take()),
                (None, Some(block)) => block.lines.push(line.trim_start()),
                (None, None) => {
                    prose += line;
                    prose.push('\n');
                }
            }
        }
        assert!(
            open.is_none(),
            "{}: a block of code does not end",
            self.path
        );
        (blocks, prose)
    }

    /// The commands of shell blocks, and those in the text that are complete.
    fn commands(&self) -> Vec<Vec<String>> {
        let (blocks, prose) = self.blocks();
        let mut commands = Vec::new();
        for block in blocks.iter().filter(|block| block.language == "sh") {
            commands.extend(statements(&block.lines.join("\n").replace("\\\n", " ")));
        }
        let is_command = |span: &&str| span.starts_with("mrope ") || span.starts_with("cargo ");
        // Alternatives, left-out parts, and the placeholder of any command.
        let is_complete =
            |span: &&str| !["|", "..", " -- COMMAND"].iter().any(|x| span.contains(x));
        let spans = prose.split('`').skip(1).step_by(2).filter(is_command);
        for span in spans.filter(is_complete) {
            // A span goes on in the next line of its paragraph.
            for mut words in statements(&span.replace('\n', " ")) {
                // Text names a command without its arguments.
                if words[0] == "mrope" && words.iter().all(|word| is_lower(word)) {
                    words.push("--help".to_owned());
                }
                commands.push(words);
            }
        }
        let is_ours = |words: &Vec<String>| matches!(&*words[0], "mrope" | "cargo");
        commands.retain(is_ours);
        commands
    }
}

/// The commands of a piece of shell, as words: comments, redirections, and what is set for a
/// command left out.
fn statements(shell: &str) -> Vec<Vec<String>> {
    let mut found = vec![vec![]];
    let (mut word, mut quote, mut is_comment) = (String::new(), None, false);
    for c in shell.chars().chain(['\n']) {
        match (c, quote) {
            ('\n', None) => is_comment = false,
            _ if is_comment => continue,
            ('#', None) if word.is_empty() => is_comment = true,
            _ if quote == Some(c) => {
                quote = None;
                continue;
            }
            ('\'' | '"', None) => {
                quote = Some(c);
                continue;
            }
            (c, Some(_)) => word.push(c),
            (c, None) if !c.is_whitespace() && !"&|;".contains(c) => {
                word.push(c);
                continue;
            }
            _ => {}
        }
        if quote.is_none() {
            if !word.is_empty() {
                found
                    .last_mut()
                    .expect("one is open")
                    .push(std::mem::take(&mut word));
            }
            if "\n&|;".contains(c) {
                found.push(vec![]);
            }
        }
    }
    for words in &mut found {
        let is_set = |word: &String| word.split_once('=').is_some_and(|(name, _)| is_name(name));
        let settings = words.iter().take_while(|word| is_set(word)).count();
        words.drain(..settings);
        let redirected = words.iter().position(|word| word.starts_with(['>', '<']));
        words.truncate(redirected.unwrap_or(words.len()));
    }
    found.retain(|words| !words.is_empty());
    found
}

fn is_name(text: &str) -> bool {
    text.chars().all(|c| c.is_ascii_uppercase() || c == '_')
}

fn is_lower(text: &str) -> bool {
    text.chars().all(|c| c.is_ascii_lowercase())
}

/// Checks a command line; the error says what is wrong with it.
fn fault(words: &[String]) -> Result<(), String> {
    if words[0] == "mrope" {
        return parses(words);
    }
    let (words, rest) = match words.iter().position(|word| word == "--") {
        Some(at) => (&words[..at], &words[at + 1..]),
        None => (words, &[][..]),
    };
    let command = words.get(1).map_or("", String::as_str);
    let usages = [
        ("xtask", include_str!("../../xtask/src/main.rs")),
        ("xaudit", include_str!("../../../audit/src/main.rs")),
    ];
    if let Some((tool, usage)) = usages.iter().find(|(tool, _)| *tool == command) {
        let name = words.get(2).map_or("", String::as_str);
        let is_known = !name.is_empty() && usage.contains(&format!("cargo {tool} {name}"));
        return is_known
            .then_some(())
            .ok_or(format!("{tool} has no {name:?}"));
    }
    let value = |option: &str| {
        let at = words.iter().position(|word| word == option)?;
        words.get(at + 1).map(String::as_str)
    };
    let package = value("-p").unwrap_or("rope-cli");
    let known = PACKAGES.iter().find(|(name, _)| *name == package);
    let folder = known.map_or(format!("crates/{package}"), |(_, folder)| {
        folder.to_string()
    });
    let manifest = std::fs::read_to_string(root().join(&folder).join("Cargo.toml"))
        .map_err(|_| format!("no package {package:?}"))?;
    for (option, subfolder) in [
        ("--test", "tests"),
        ("--example", "examples"),
        ("--bench", ""),
    ] {
        for name in after(words, option) {
            let file = format!("{name}.rs");
            let is_there = [subfolder, "benches", ""]
                .iter()
                .any(|subfolder| root().join(&folder).join(subfolder).join(&file).is_file());
            let is_program = option != "--test"
                || !manifest.contains("\nautotests = false")
                || manifest.contains(&format!("\nname = \"{name}\""));
            if !is_there || !is_program {
                return Err(format!("{folder} has no {option} {name}"));
            }
        }
    }
    // The word after a suite is one of its modules.
    let mut suites = words.windows(3).filter(|words| words[1] == "suite");
    if let Some([_, _, module]) = suites.next().filter(|words| !words[2].starts_with('-')) {
        let suite = ["tests/suite.rs", "suite.rs"].map(|path| root().join(&folder).join(path));
        let texts = suite.iter().flat_map(std::fs::read_to_string);
        if !texts
            .into_iter()
            .any(|text| text.contains(&format!("\nmod {module};\n")))
        {
            return Err(format!("the suite of {folder} has no module {module}"));
        }
    }
    for feature in after(words, "--features").flat_map(|list| list.split(',')) {
        if !manifest.contains(&format!("\n{feature} = ")) {
            return Err(format!("{package} has no feature {feature}"));
        }
    }
    if let Some(path) = value("--path").filter(|path| !root().join(path).is_dir()) {
        return Err(format!("no folder {path}"));
    }
    match command {
        "run" if package == "rope-cli" && value("--example").is_none() && !rest.is_empty() => {
            let mut whole = vec!["mrope".to_owned()];
            whole.extend_from_slice(rest);
            parses(&whole)
        }
        "run" | "test" | "bench" | "build" | "check" | "install" | "doc" | "rustc" | "publish" => {
            Ok(())
        }
        // Tools of their own, which take no names of ours.
        "cyclonedx" | "deny" | "semver-checks" | "vendor" => Ok(()),
        other => Err(format!(
            "cargo {other} is not checked: teach this test what it takes"
        )),
    }
}

fn after<'a>(words: &'a [String], option: &'a str) -> impl Iterator<Item = &'a str> {
    let named = words.windows(2).filter(move |pair| pair[0] == option);
    named.map(|pair| pair[1].as_str())
}

fn parses(words: &[String]) -> Result<(), String> {
    // A list of commands names those that have commands of their own.
    let lists = |kind| {
        matches!(
            kind,
            ErrorKind::DisplayHelp | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand
        )
    };
    match rope_cli::command().try_get_matches_from(words) {
        Err(error) if !lists(error.kind()) => Err(error.to_string()),
        _ => Ok(()),
    }
}

#[test]
fn all_rust_is_compiled() {
    let mut compiled = 0;
    for page in pages() {
        let (blocks, _) = page.blocks();
        for Block { line, language, .. } in &blocks {
            assert!(
                LANGUAGES.contains(language),
                "{}:{line}: a block of {language:?}, expected one of {LANGUAGES:?}",
                page.path,
            );
        }
        let rust = blocks
            .iter()
            .filter(|block| block.language.starts_with("rust"))
            .count();
        let path = format!("\"../../../{}\"", page.path);
        let is_compiled = COMPILED_BY.iter().any(|source| source.contains(&path));
        assert_eq!(
            rust > 0,
            is_compiled,
            "{} has {rust} blocks of Rust; crates/rope-cli/src/docs.rs lists the pages that have",
            page.path,
        );
        compiled += rust;
    }
    assert!(compiled >= 5, "{compiled}");
}

#[test]
#[cfg_attr(
    not(feature = "ascend-sim"),
    ignore = "commands name devices: run it with --features ascend-sim"
)]
fn every_command_parses() {
    let mut seen = 0;
    let mut faults = Vec::new();
    // The changelog tells of what was, too.
    for page in pages()
        .iter()
        .filter(|page| page.path != "docs/CHANGELOG.md")
    {
        for words in page.commands() {
            seen += 1;
            if let Err(fault) = fault(&words) {
                faults.push(format!("{}: {}: {fault}", page.path, words.join(" ")));
            }
        }
        let (_, prose) = page.blocks();
        let hidden = |line: &&str| {
            line.starts_with("    ")
                && ["mrope ", "cargo "]
                    .iter()
                    .any(|x| line.trim_start().starts_with(x))
        };
        faults.extend(
            prose
                .lines()
                .filter(hidden)
                .map(|line| format!("{}: put this into a block of sh:{line}", page.path)),
        );
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
    assert!(seen > 100, "{seen}");
}

#[test]
fn shell_is_read_as_a_shell_reads_it() {
    let read = statements("A=1 mrope train --out 'a b' > log  # all\ncargo test; mrope x &\n");
    let expected = [
        &["mrope", "train", "--out", "a b"][..],
        &["cargo", "test"],
        &["mrope", "x"],
    ];
    assert_eq!(read, expected);
    for wrong in [
        "mrope verify",
        "mrope train --no-such",
        "cargo test -p rope-cli --test none",
        "cargo run -p none",
        "cargo run --features none",
        "cargo xtask none",
        "cargo xtask vendor-headers",
        "cargo xaudit none",
        "cargo run --release -- train --no-such",
    ] {
        assert!(fault(&statements(wrong)[0]).is_err(), "{wrong}");
    }
}

/// Links to files, and to headings of pages.
#[test]
fn every_link_leads_somewhere() {
    let pages = pages();
    let mut faults = BTreeSet::new();
    // Links of a template are those of the page that is made of it.
    for page in pages
        .iter()
        .filter(|page| !page.path.ends_with("template.md"))
    {
        let (_, prose) = page.blocks();
        let folder = Path::new(&page.path).parent().unwrap_or(Path::new(""));
        for target in prose
            .split("](")
            .skip(1)
            .filter_map(|rest| rest.split(')').next())
        {
            if target.contains("://") {
                continue;
            }
            let (file, heading) = target.split_once('#').unwrap_or((target, ""));
            let path = if file.is_empty() {
                root().join(&page.path)
            } else {
                root().join(folder).join(file)
            };
            let Ok(path) = path.canonicalize() else {
                faults.insert(format!("{}: {target}: no such file", page.path));
                continue;
            };
            if !heading.is_empty() {
                let text = std::fs::read_to_string(path).unwrap_or_default();
                if !text
                    .lines()
                    .filter(|line| line.starts_with('#'))
                    .any(|line| anchor(line) == heading)
                {
                    faults.insert(format!("{}: {target}: no such heading", page.path));
                }
            }
        }
    }
    assert!(faults.is_empty(), "{faults:#?}");
}

#[test]
fn the_contents_list_each_page_once() {
    let contents = std::fs::read_to_string(root().join("docs/SUMMARY.md")).expect("it is there");
    for page in pages() {
        let Some(path) = page.path.strip_prefix("docs/") else {
            continue;
        };
        let listed = contents.matches(&format!("]({path})")).count();
        let is_page = path != "SUMMARY.md" && !path.ends_with("template.md");
        let expected = usize::from(is_page);
        assert!(
            listed == expected,
            "docs/SUMMARY.md lists {path} {listed} times, expected {expected}"
        );
    }
}

/// The first cells of a table's rows.
fn names(text: &str) -> BTreeSet<String> {
    let rows = text.lines().filter_map(|line| line.strip_prefix("| "));
    let cells = rows.filter_map(|row| row.split('|').next());
    cells
        .map(str::trim)
        .filter(|cell| !cell.is_empty())
        .map(str::to_owned)
        .collect()
}

#[test]
fn each_claim_has_a_command() {
    let read = |path| std::fs::read_to_string(root().join(path)).expect("page is text");
    let (readme, claims) = (read("README.md"), read("docs/dev/evidence.md"));
    let (_, rest) = readme
        .split_once("\n## Measured\n")
        .expect("the README has this section");
    let measured = rest.split("\n## ").next().unwrap_or_default();
    let features = read("docs/features.md");
    let mut claimed = names(&features);
    claimed.extend(measured.split("**").skip(1).step_by(2).map(str::to_owned));
    let mut shown = names(&claims);
    shown.remove("claim");
    for name in &claimed {
        assert!(
            shown.contains(name),
            "docs/dev/evidence.md has no command for {name:?}"
        );
    }
    for name in &shown {
        assert!(
            [&readme, &features].iter().any(|page| page.contains(name)),
            "neither README.md nor docs/features.md claims {name:?}"
        );
    }
    let rows = claims.lines().filter(|line| line.starts_with("| ")).skip(1);
    for row in rows {
        let command = row.split('|').nth(2).unwrap_or_default().trim();
        assert!(
            command.starts_with("`mrope ") || command.starts_with("`cargo "),
            "docs/dev/evidence.md: no command in {row}"
        );
    }
}

/// The anchor that GitHub gives a heading.
fn anchor(heading: &str) -> String {
    let text = heading.trim_start_matches('#').trim().to_lowercase();
    let kept = text
        .chars()
        .filter(|c| c.is_alphanumeric() || " -_".contains(*c));
    kept.map(|c| if c == ' ' { '-' } else { c }).collect()
}
