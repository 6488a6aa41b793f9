//! Faults seeded into a copy of burn-ascend, whose calls the vendor's code has to refuse.
//!
//! All faults are compiled at once; an environment variable chooses the one that acts.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde::Serialize;

use super::ask::ask;
use super::build::{Builder, Library};
use super::call::Call;
use super::replay::{MODELS, Recording, Refusal, features, recorded, refusals};
use super::{Result, Soc, VendorError, cannot_access};

/// An expression of burn-ascend that another takes the place of.
struct Fault {
    name: &'static str,
    /// Below `crates/burn-ascend/src`.
    file: &'static str,
    from: &'static str,
    to: &'static str,
    /// The test that reaches it: its target, and its name.
    test: [&'static str; 2],
}

const FAULTS: [Fault; 10] = [
    Fault {
        name: "type: a running sum in u32",
        file: "ops/reduce.rs",
        from: "ops.cumsum(x, axis as i64, data_type(dtype)?, out)",
        to: "ops.cumsum(x, axis as i64, rope_ascend::sys::aclDataType::UINT32, out)",
        test: ["backend", "ascend::float_reductions_f32"],
    },
    Fault {
        name: "type: slices named by floats",
        file: "ops/index.rs",
        from: "ops.index_select(x, axis as i64, index, out)",
        to: "ops.index_select(x, axis as i64, rope_ascend::aclnn::View { dtype: rope_ascend::sys::aclDataType::FLOAT, \
             ..index }, out)",
        test: ["backend", "ascend::float_movement_f32"],
    },
    Fault {
        name: "shape: a product's axis dropped from the call, not from the output",
        file: "ops/reduce.rs",
        from: "ops.prod_dim(x, axis as i64, true, data_type(dtype)?, out)",
        to: "ops.prod_dim(x, axis as i64, false, data_type(dtype)?, out)",
        test: ["backend", "ascend::float_reductions_f32"],
    },
    Fault {
        name: "shape: the factors of a matrix product swapped",
        file: "ops/matmul.rs",
        from: "ops.mm(x, y, out, CubeMath::KEEP_DTYPE)",
        to: "ops.mm(y, x, out, CubeMath::KEEP_DTYPE)",
        test: ["backend", "ascend::float_products_f32"],
    },
    Fault {
        name: "scalar: a factor of one half between integers",
        file: "ops/elementwise.rs",
        from: "ops.add(x, other, Number::Int(1), out)",
        to: "ops.add(x, other, Number::Float(0.5), out)",
        test: ["backend", "ascend::int_elementwise_i64"],
    },
    Fault {
        name: "scalar: a probability of 2",
        file: "ops/movement.rs",
        from: "ops.bernoulli(out, Number::Float(probability), state.seed, state.offset)",
        to: "ops.bernoulli(out, Number::Float(2.0), state.seed, state.offset)",
        test: ["backend", "ascend::random_tensors"],
    },
    Fault {
        name: "attribute: an axis that no tensor has",
        file: "ops/index.rs",
        from: "ops.gather(x, axis as i64, index, out)",
        to: "ops.gather(x, axis as i64 + 9, index, out)",
        test: ["backend", "ascend::float_movement_f32"],
    },
    Fault {
        name: "attribute: a list with an axis that no tensor has",
        file: "ops/movement.rs",
        from: "ops.flip(x, &axes, out)",
        to: "ops.flip(x, &[9], out)",
        test: ["backend", "ascend::float_movement_f32"],
    },
    Fault {
        name: "attribute: a word that the operator does not know",
        file: "ops/elementwise.rs",
        from: "ops.gelu_backward(grad, x, c\"none\", out)",
        to: "ops.gelu_backward(grad, x, c\"erf\", out)",
        test: ["backend", "ascend::activation_f32"],
    },
    Fault {
        name: "attribute: a head of attention more than its tensors have",
        file: "fused/attention.rs",
        from: "heads as i64",
        to: "heads as i64 + 1",
        test: ["suite", MODELS],
    },
];

/// The variable that chooses a fault by its index.
const VARIABLE: &str = "BURN_ASCEND_FAULT";
/// What the copy's crate root ends in.
const CHOICE: &str = "
/// Whether a seeded fault acts.
pub(crate) fn is_seeded(index: &str) -> bool {
    std::env::var(\"BURN_ASCEND_FAULT\").is_ok_and(|chosen| chosen == index)
}
";

/// What became of a fault.
#[derive(Serialize)]
pub(super) struct FaultRow {
    pub(super) fault: &'static str,
    /// Calls that the vendor refuses with the fault and that are not made without it.
    pub(super) refused: usize,
    pub(super) example: Option<Refusal>,
}

/// A source with its faults seeded, each where its text stands.
fn seeded(file: &str, text: &str) -> Result<String> {
    let mut text = text.to_owned();
    let here = FAULTS
        .iter()
        .enumerate()
        .filter(|(_, fault)| fault.file == file);
    for (index, fault) in here {
        if text.matches(fault.from).count() != 1 {
            return Err(VendorError::Fault {
                name: fault.name,
                file: fault.file,
            });
        }
        let both = format!(
            "(if crate::is_seeded(\"{index}\") {{ {} }} else {{ {} }})",
            fault.to, fault.from
        );
        text = text.replace(fault.from, &both);
    }
    Ok(text)
}

/// Copies what git tracks of the workspace, with the faults in burn-ascend. Files keep their times,
/// so that cargo takes what it built of them in the workspace.
fn copy(root: &Path, to: &Path) -> Result<()> {
    let output = Command::new("git")
        .arg("-C")
        .arg(root)
        .args(["ls-files", "-z"])
        .output();
    let output = output.map_err(cannot_access(Path::new("git")))?;
    for name in String::from_utf8_lossy(&output.stdout).split('\0') {
        let source = root.join(name);
        let path = to.join(name);
        let folder = path.parent().unwrap_or(to);
        fs::create_dir_all(folder).map_err(cannot_access(folder))?;
        // A link to a folder, whose files have names of their own.
        if source.is_symlink() && source.is_dir() && !path.exists() {
            let target = fs::read_link(&source).map_err(cannot_access(&source))?;
            symlink(target, &path).map_err(cannot_access(&path))?;
        }
        if !source.is_file() {
            continue;
        }
        let mut bytes = fs::read(&source).map_err(cannot_access(&source))?;
        if let Some(file) = name.strip_prefix("crates/burn-ascend/src/") {
            let mut text = seeded(file, &String::from_utf8_lossy(&bytes))?;
            text += if file == "lib.rs" { CHOICE } else { "" };
            bytes = text.into_bytes();
        }
        fs::write(&path, bytes).map_err(cannot_access(&path))?;
        let time = source.metadata().and_then(|about| about.modified());
        let file = fs::File::options().write(true).open(&path);
        time.and_then(|time| file?.set_modified(time))
            .map_err(cannot_access(&path))?;
    }
    Ok(())
}

/// Removes what was built of burn-ascend. To cargo, its sources in the copy and in the workspace
/// are the same ones, of which it would take whatever was built last.
fn clean(root: &Path) -> Result<()> {
    let mut command = crate::cargo::cargo();
    command
        .current_dir(root)
        .args(["clean", "--quiet", "-p", "burn-ascend"]);
    let status = command
        .status()
        .map_err(cannot_access(Path::new("cargo")))?;
    if status.success() {
        return Ok(());
    }
    Err(VendorError::Failed(format!("{command:?} failed")))
}

/// Seeds each fault, and asks the vendor's code about the calls that are made then.
pub(super) fn faults(
    builder: &Builder,
    library: &Library,
    each: impl FnMut(&FaultRow),
) -> Result<Vec<FaultRow>> {
    let folder = builder.work.join("seeded");
    eprintln!("building burn-ascend with {} faults", FAULTS.len());
    copy(&builder.root, &folder)?;
    clean(&builder.root)?;
    let rows = rows(builder, library, &folder, each);
    clean(&builder.root)?;
    rows
}

fn rows(
    builder: &Builder,
    library: &Library,
    folder: &Path,
    mut each: impl FnMut(&FaultRow),
) -> Result<Vec<FaultRow>> {
    let features = features(&builder.root)?;
    let run = |[target, test]: [&str; 2], fault: Option<usize>| -> Result<Recording> {
        let file: PathBuf = builder.work.join("recorded-fault");
        let mut command = crate::cargo::cargo();
        command
            .current_dir(folder)
            .args([
                "test",
                "--features",
                &features,
                "--quiet",
                "--locked",
                "--workspace",
                "--test",
                target,
                "--",
                "--exact",
                test,
            ])
            .env("CARGO_TARGET_DIR", builder.root.join("target"))
            .envs(fault.map(|index| (VARIABLE, index.to_string())));
        // With a fault, the test may fail.
        recorded(&mut command, &file, fault.is_none())
    };
    let mut rows = Vec::new();
    for (index, fault) in FAULTS.iter().enumerate() {
        let right = run(fault.test, None)?;
        let known: BTreeSet<String> = right.all.iter().map(Call::to_string).collect();
        let mut calls = run(fault.test, Some(index))?.all;
        calls.retain(|call| !known.contains(&call.to_string()));
        let answers = ask(&library.path, Soc::A2, &calls, &builder.work)?;
        let refused = refusals(&calls, &answers);
        let row = FaultRow {
            fault: fault.name,
            refused: refused.len(),
            example: refused.into_iter().next(),
        };
        each(&row);
        rows.push(row);
    }
    Ok(rows)
}

impl FaultRow {
    pub(super) fn words(&self) -> String {
        match &self.example {
            None => "NOT REFUSED".to_owned(),
            Some(Refusal { code, place, .. }) => {
                format!("{code} {place}, {} calls", self.refused)
            }
        }
    }
}

pub(super) fn table(rows: &[FaultRow]) -> String {
    let mut text = "\n| seeded fault | refused by the vendor |\n|---|---|\n".to_owned();
    rows.iter()
        .for_each(|row| text += &format!("| {} | {} |\n", row.fault, row.words()));
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_fault_is_found_once_in_burn_ascend() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../crates/burn-ascend/src/");
        for fault in &FAULTS {
            let text = fs::read_to_string(format!("{folder}{}", fault.file)).expect("a source");
            let text = seeded(fault.file, &text).expect(fault.name);
            assert!(text.contains(fault.to), "{}", fault.name);
            assert_ne!(fault.from, fault.to, "{}", fault.name);
        }
        assert!(seeded(FAULTS[0].file, "").is_err());
        assert!(CHOICE.contains(VARIABLE));
    }
}
