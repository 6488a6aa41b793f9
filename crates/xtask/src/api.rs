//! `cargo xtask api`: the public items of the published crates, as rustdoc shows them, against
//! those kept in docs/api.
//!
//! rustdoc's JSON would be the better source, but stable compilers do not write it, and its readers
//! turn on features of serde_json, by which burn would be compiled again.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use crate::package::{PackageError, Published, Result, cannot_access, files, finish, read, write};

/// The features that `.ci/run` compiles everything with.
const FEATURES: &str =
    "rope-tests/wgpu,rope-cli/wgpu,rope-cli/ascend-sim,rope-cli/rayon,rope-check/ascend-sim";

/// One run over the items.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Run {
    /// Renders the pages, and compares.
    Compare,
    /// Compares pages that are there.
    CompareRendered,
    /// Renders the pages, and writes the items.
    Write,
}

/// Returns what was done.
pub(crate) fn run(run: Run) -> Result<String> {
    let Published {
        packages,
        target,
        root,
    } = Published::find()?;
    let pages = target.join("doc");
    let mut changes = Vec::new();
    let mut count = 0;
    if run != Run::CompareRendered {
        for package in &packages {
            // Pages of items that are gone would stay.
            let folder = pages.join(package.name.replace('-', "_"));
            if folder.exists() {
                fs::remove_dir_all(&folder).map_err(cannot_access(&folder))?;
            }
        }
        finish(
            crate::cargo::cargo()
                .current_dir(&root)
                .env("RUSTDOCFLAGS", "-D warnings")
                .args(["doc", "--quiet", "--workspace", "--no-deps", "--locked"])
                .args(["--features", FEATURES]),
        )?;
    }
    for package in &packages {
        let items = items(&pages.join(package.name.replace('-', "_")))?;
        count += items.len();
        let path = root.join(format!("docs/api/{}.txt", package.name));
        if run == Run::Write {
            let text: String = items.iter().flat_map(|item| [item, "\n"]).collect();
            write(&path, &text)?;
        } else {
            let kept = read(&path)?.lines().map(str::to_owned).collect();
            changes.extend(differences(&kept, &items));
        }
    }
    if changes.is_empty() {
        return Ok(format!("{count} public items of {} crates", packages.len()));
    }
    Err(PackageError::Api(changes))
}

/// The declarations on the pages of a crate, each after the path of its page.
fn items(folder: &Path) -> Result<BTreeSet<String>> {
    let mut items = BTreeSet::new();
    for name in files(folder)? {
        if let Some(page) = name.strip_suffix(".html") {
            let text = read(&folder.join(&name))?;
            let (derived, declared) = split(declarations(&text));
            items.extend(declared.into_iter().map(|text| format!("{page}: {text}")));
            if !derived.is_empty() {
                let derived = Vec::from_iter(derived).join(", ");
                items.insert(format!("{page}: derives {derived}"));
            }
        }
    }
    Ok(items)
}

/// Traits that are derived, and have no rows of their own.
const DERIVED: [&str; 9] = [
    "Clone",
    "Copy",
    "Debug",
    "Eq",
    "Hash",
    "Ord",
    "PartialEq",
    "PartialOrd",
    "StructuralPartialEq",
];

/// The derived traits among declarations, and the others. Variants stand in the declaration of
/// their enum, too.
fn split(declarations: Vec<String>) -> (BTreeSet<String>, Vec<String>) {
    let (mut derived, mut others) = (BTreeSet::new(), Vec::new());
    for text in declarations {
        let implemented = text.split_once(" for ").map(|(start, _)| start);
        let name = implemented.and_then(|start| start.rsplit(' ').next());
        match name.filter(|name| text.starts_with("impl") && DERIVED.contains(name)) {
            Some("StructuralPartialEq") => {}
            Some(name) => _ = derived.insert(name.to_owned()),
            None => others.push(text),
        }
    }
    (derived, others)
}

/// The text that opens a declaration, the text that closes it, and the part of a page from which on
/// there are others.
const DECLARATIONS: [(&str, &str, &str); 3] = [
    ("<pre class=\"rust item-decl\">", "</pre>", IMPLIED),
    // Members; those of implemented traits are the traits'.
    (
        "<h4 class=\"code-header\">",
        "</h4>",
        "id=\"trait-implementations\"",
    ),
    // Implementations; after these, they follow from fields and from other traits.
    ("<h3 class=\"code-header\">", "</h3>", IMPLIED),
];
const IMPLIED: &str = "id=\"synthetic-implementations\"";

/// The declarations on a page of rustdoc, each in one line.
fn declarations(page: &str) -> Vec<String> {
    let mut found = Vec::new();
    for (opening, closing, end) in DECLARATIONS {
        let page = page.split_once(end).map_or(page, |(before, _)| before);
        let parts = page.split(opening).skip(1);
        let texts = parts.filter_map(|part| Some(text(part.split_once(closing)?.0)));
        // Headings that are no implementation are variants of the enum declared above.
        let is_variant = |text: &String| opening.starts_with("<h3") && !text.starts_with("impl");
        found.extend(texts.filter(|text| !is_variant(text)));
    }
    found
}

/// The text of HTML in one line.
fn text(html: &str) -> String {
    let parts = html.split('<').enumerate();
    let text: String = parts
        .map(|(index, part)| match index {
            0 => part,
            _ => part.split_once('>').map_or("", |(_, text)| text),
        })
        .collect();
    let text = text.replace("&lt;", "<").replace("&gt;", ">");
    let text = text
        .replace("&nbsp;", " ")
        .replace("&#39;", "'")
        .replace("&quot;", "\"");
    let words: Vec<&str> = text.split_whitespace().collect();
    words.join(" ").replace("&amp;", "&")
}

/// The items of one list that the other has not: `-` for those of the first.
fn differences(kept: &BTreeSet<String>, found: &BTreeSet<String>) -> Vec<String> {
    let removed = kept.difference(found).map(|item| format!("-{item}"));
    let added = found.difference(kept).map(|item| format!("+{item}"));
    removed.chain(added).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn features_are_those_of_continuous_integration() {
        let run = include_str!("../../../.ci/run");
        assert!(run.contains(&format!("\nfeatures={FEATURES}\n")));
    }

    #[test]
    fn declarations_lose_their_tags_and_implied_ones_are_left_out() {
        let page = "<pre class=\"rust item-decl\"><code>pub struct <b>A</b>&lt;'a&gt; {\n    pub a:\
                    \n &amp;'a u8,\n}</code></pre><h4 class=\"code-header\">pub fn <a>b</a>()</h4>\
                    <h2 id=\"trait-implementations\"></h2><h3 class=\"code-header\">impl Clone \
                    for A</h3><h4 class=\"code-header\">fn clone()</h4>\
                    <h2 id=\"synthetic-implementations\"></h2>\
                    <h3 class=\"code-header\">impl Send for A</h3>";
        let (derived, others) = split(declarations(page));
        assert_eq!(
            others,
            ["pub struct A<'a> { pub a: &'a u8, }", "pub fn b()"]
        );
        assert_eq!(derived, BTreeSet::from(["Clone".to_owned()]));
    }

    #[test]
    fn removed_and_added_items_are_named() {
        let set = |items: &[&str]| items.iter().map(|item| (*item).to_owned()).collect();
        assert_eq!(
            differences(&set(&["a", "b"]), &set(&["b", "c"])),
            ["-a", "+c"]
        );
        assert_eq!(differences(&set(&["a"]), &set(&["a"])), [""; 0]);
    }
}
