//! Declarations against the vendor's headers.
//!
//! The Rust declarations are turned into C++ `static_assert`s and compiled with the headers on the
//! include path. `rope-ascend`'s are compared type by type; the simulator's, which are spelled in
//! plain Rust types, by how each argument is passed: pointer, integer of N bytes, float. The
//! operator library's headers are not in the wheel, so there the two sets of declarations are
//! compared with each other.

use rope_ascend::sys::{
    AclFused, AclMeta, AclOperators, AclRotary, AclRt, AclRtc, Field, Record, Signature, constants,
    records,
};
use std::fmt::Write as _;
use std::fs;
use std::io;
use std::mem::offset_of;
use std::path::{Path, PathBuf};
use std::process::Command;

const WHEEL: &str = "torch-npu==2.14.0";
const HEADERS_IN_WHEEL: &str = "torch_npu/include";

#[derive(Debug, thiserror::Error)]
pub(crate) enum AbiError {
    #[error("{command} failed: {output}")]
    Command { command: String, output: String },
    #[error("cannot access {path}: {source}")]
    File { path: PathBuf, source: io::Error },
    #[error("no wheel of {WHEEL} in {}", folder.display())]
    NoWheel { folder: PathBuf },
    #[error("declarations differ from the headers:\n{0}")]
    Differs(String),
}

type Result<T> = std::result::Result<T, AbiError>;

/// Runs the check; returns what was compared.
pub(crate) fn run(headers: Option<&Path>) -> Result<String> {
    let work = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/abi");
    let work = fs::create_dir_all(&work)
        .and_then(|()| work.canonicalize())
        .map_err(|source| AbiError::File { path: work, source })?;
    let headers = headers.map_or_else(|| download(&work), |folder| Ok(folder.to_owned()))?;
    let operators = compare_operators()?;
    let source = generate();
    let unit = work.join("abi.cpp");
    fs::write(&unit, &source.text).map_err(|error| AbiError::File {
        path: unit.clone(),
        source: error,
    })?;
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".to_owned());
    let mut command = Command::new(compiler);
    command.args([
        "-std=c++17",
        "-fsyntax-only",
        "-Wno-deprecated-declarations",
        "-Wno-invalid-offsetof",
    ]);
    command
        .arg("-I")
        .arg(&headers)
        .arg("-I")
        .arg(headers.join("acl"))
        .arg(&unit);
    match output_of(&mut command) {
        Ok(_) => Ok(format!(
            "the declarations agree with the headers in {}: {} functions, {} values, {} structures of rope-ascend, \
             {} functions of the simulator; {operators} functions outside the headers agree with each other",
            headers.display(),
            source.functions,
            source.values,
            source.structures,
            source.simulated,
        )),
        Err(AbiError::Command { output, .. }) => Err(AbiError::Differs(failures(&output))),
        Err(other) => Err(other),
    }
}

/// The lines of the compiler's output that say what failed.
fn failures(output: &str) -> String {
    let lines: Vec<&str> = output
        .lines()
        .filter(|line| line.contains("error"))
        .collect();
    if lines.is_empty() {
        output.to_owned()
    } else {
        lines.join("\n")
    }
}

fn output_of(command: &mut Command) -> Result<String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command.output().map_err(|error| AbiError::Command {
        command: name.clone(),
        output: error.to_string(),
    })?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned()
        + &String::from_utf8_lossy(&output.stderr);
    if output.status.success() {
        Ok(text)
    } else {
        Err(AbiError::Command {
            command: name,
            output: text,
        })
    }
}

/// Fetches the wheel and unpacks it, unless an earlier run has.
fn download(work: &Path) -> Result<PathBuf> {
    let unpacked = work.join("wheel");
    let headers = unpacked.join(HEADERS_IN_WHEEL);
    if headers.join("acl/acl.h").exists() {
        return Ok(headers);
    }
    let mut pip = Command::new("python3");
    pip.args([
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
    ]);
    // The headers are the same in every wheel of the release; this one exists for every host.
    pip.args([
        "--platform",
        "manylinux_2_28_x86_64",
        "--python-version",
        "3.11",
        "--implementation",
        "cp",
    ]);
    output_of(pip.args([WHEEL, "--dest"]).arg(work))?;
    let wheel = fs::read_dir(work)
        .map_err(|source| AbiError::File {
            path: work.to_owned(),
            source,
        })?
        .filter_map(|entry| entry.ok().map(|entry| entry.path()))
        .find(|path| path.extension().is_some_and(|extension| extension == "whl"))
        .ok_or_else(|| AbiError::NoWheel {
            folder: work.to_owned(),
        })?;
    output_of(
        Command::new("python3")
            .args(["-m", "zipfile", "-e"])
            .arg(&wheel)
            .arg(&unpacked),
    )?;
    Ok(headers)
}

struct Source {
    text: String,
    functions: usize,
    values: usize,
    structures: usize,
    simulated: usize,
}

const PRELUDE: &str = r#"// Generated by `cargo xtask abi`.
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include "acl/acl.h"
#include "acl/acl_rt.h"

// How a value is passed: pointer, float, integer or enumeration of N bytes.
template <class T> constexpr char how() {
    if (std::is_void_v<T>) return 'v';
    if (std::is_pointer_v<T>) return 'p';
    if (std::is_floating_point_v<T>) return sizeof(T) == 4 ? 'f' : 'd';
    return static_cast<char>('0' + sizeof(T));
}
template <class> struct Passed;
template <class R, class... P> struct Passed<R (*)(P...)> {
    static constexpr char value[] = {how<R>(), how<P>()..., 0};
};
constexpr bool equal(const char* a, const char* b) {
    while (*a != 0 && *a == *b) { ++a; ++b; }
    return *a == *b;
}
"#;

fn generate() -> Source {
    let mut text = PRELUDE.to_owned();
    let mut line = |statement: String| {
        // Writing to a string does not fail.
        let _ = writeln!(text, "{statement}");
    };
    let functions = AclRt::signatures();
    for Signature {
        name,
        returns,
        parameters,
        ..
    } in &functions
    {
        let parameters = parameters.join(", ");
        line(format!(
            "static_assert(std::is_same_v<decltype(&{name}), {returns} (*)({parameters})>, \"type of {name}\");"
        ));
    }
    let values = constants();
    for (name, value) in &values {
        line(format!(
            "static_assert(static_cast<long long>({name}) == {value}LL, \"value of {name}\");"
        ));
    }
    let structures = records();
    for record in &structures {
        let name = record.name;
        line(format!(
            "static_assert(sizeof({name}) == {}, \"size of {name}\");",
            record.size_bytes
        ));
        line(format!(
            "static_assert(alignof({name}) == {}, \"alignment of {name}\");",
            record.align_bytes
        ));
        for field in &record.fields {
            line(format!(
                "static_assert(offsetof({name}, {}) == {}, \"offset of {name}::{}\");",
                field.name, field.offset_bytes, field.name
            ));
        }
    }
    let simulated: Vec<_> = ascend_sim::exports()
        .into_iter()
        .filter(|export| in_headers(export.name))
        .collect();
    for export in &simulated {
        line(format!(
            "static_assert(equal(Passed<decltype(&{0})>::value, \"{1}\"), \"how the simulator's {0} passes its arguments\");",
            export.name,
            passed(export.signature)
        ));
    }
    for record in simulated_records() {
        let name = record.name;
        line(format!(
            "static_assert(sizeof({name}) == {}, \"size of the simulator's {name}\");",
            record.size_bytes
        ));
        for Field {
            name: field,
            offset_bytes,
        } in record.fields
        {
            line(format!(
                "static_assert(offsetof({name}, {field}) == {offset_bytes}, \"the simulator's {name}::{field}\");"
            ));
        }
    }
    Source {
        functions: functions.len(),
        values: values.len(),
        structures: structures.len(),
        simulated: simulated.len(),
        text,
    }
}

/// Structures that the simulator declares for itself.
fn simulated_records() -> Vec<Record> {
    use ascend_sim::abi::runtime::{AclrtLaunchKernelAttr, AclrtLaunchKernelCfg};
    macro_rules! record {
        ($ours:ty as $name:literal { $($field:ident as $theirs:literal),* }) => {
            Record {
                name: $name,
                size_bytes: size_of::<$ours>(),
                align_bytes: align_of::<$ours>(),
                fields: vec![$(Field { name: $theirs, offset_bytes: offset_of!($ours, $field) }),*],
            }
        };
    }
    vec![
        record!(AclrtLaunchKernelAttr as "aclrtLaunchKernelAttr" { id as "id", value as "value" }),
        record!(AclrtLaunchKernelCfg as "aclrtLaunchKernelCfg" {
            attrs as "attrs", num_attrs as "numAttrs"
        }),
    ]
}

/// Whether the wheel's headers declare the function: the runtime's do, the operators' are not in
/// it.
fn in_headers(name: &str) -> bool {
    let prefixes = ["aclnn", "aclCreate", "aclDestroy"];
    // Of executors, which the operators' headers declare.
    let others = [
        "aclSetAclOpExecutorRepeatable",
        "aclSetInputTensorAddr",
        "aclSetOutputTensorAddr",
        "aclSetDynamicInputTensorAddr",
    ];
    !prefixes.iter().any(|prefix| name.starts_with(prefix)) && !others.contains(&name)
}

/// How `fn(A, B) -> R` passes its result and arguments, a letter each.
fn passed(signature: &str) -> String {
    let flat: String = signature.split_whitespace().collect::<Vec<_>>().join(" ");
    let (parameters, returns) = flat
        .strip_prefix("fn(")
        .and_then(|rest| rest.rsplit_once(')'))
        .unwrap_or((flat.as_str(), ""));
    let returns = returns.trim().trim_start_matches("->").trim();
    let returns = if returns.is_empty() {
        'v'
    } else {
        letter(returns)
    };
    let parameters = parameters
        .split(',')
        .map(str::trim)
        .filter(|p| !p.is_empty())
        .map(letter);
    std::iter::once(returns).chain(parameters).collect()
}

fn letter(rust: &str) -> char {
    match rust {
        _ if rust.starts_with('*') => 'p',
        "()" => 'v',
        "f32" => 'f',
        "f64" => 'd',
        "bool" | "u8" | "i8" => '1',
        "u16" | "i16" => '2',
        "i32" | "u32" => '4',
        "i64" | "u64" | "usize" | "isize" => '8',
        _ => '?',
    }
}

/// As [`letter`], for a type in C's spelling.
fn c_letter(c: &str) -> char {
    match c {
        _ if c.ends_with('*') => 'p',
        "float" => 'f',
        "double" => 'd',
        "bool" | "int8_t" => '1',
        "int64_t" | "uint64_t" | "size_t" => '8',
        "aclnnStatus" | "aclError" | "int32_t" | "uint32_t" | "aclDataType" | "aclFormat" => '4',
        _ => '?',
    }
}

/// Compares the operator functions of rope-ascend with the simulator's; returns how many.
fn compare_operators() -> Result<usize> {
    let declared = [
        AclMeta::signatures(),
        AclRotary::signatures(),
        AclOperators::signatures(),
        AclFused::signatures(),
        AclRtc::signatures(),
    ]
    .concat();
    let exports = ascend_sim::exports();
    let mut compared = 0;
    let mut differences = Vec::new();
    for signature in &declared {
        let Some(export) = exports.iter().find(|export| export.name == signature.name) else {
            continue;
        };
        compared += 1;
        let ours: String = std::iter::once(&signature.returns)
            .chain(&signature.parameters)
            .map(|c| c_letter(c))
            .collect();
        let theirs = passed(export.signature);
        if ours != theirs || ours.contains('?') {
            differences.push(format!(
                "{}: rope-ascend {ours}, simulator {theirs}",
                signature.name
            ));
        }
    }
    if differences.is_empty() {
        Ok(compared)
    } else {
        Err(AbiError::Differs(differences.join("\n")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signatures_become_letters() {
        assert_eq!(passed("fn(*mut *mut c_void, usize, i32) -> i32"), "4p84");
        assert_eq!(passed("fn() -> *const c_char"), "p");
        assert_eq!(passed("fn(f32)"), "vf");
    }

    #[test]
    fn the_simulator_has_every_operator_of_training_and_declares_it_alike() {
        compare_operators().expect("equal declarations");
        let exports = ascend_sim::exports();
        let all = [AclOperators::signatures(), AclFused::signatures()];
        for signature in all.concat() {
            let found = exports.iter().any(|export| export.name == signature.name);
            assert!(found, "{} is not simulated", signature.name);
        }
    }

    #[test]
    fn every_declared_type_has_a_letter() {
        let all = [
            AclMeta::signatures(),
            AclRotary::signatures(),
            AclOperators::signatures(),
            AclFused::signatures(),
        ];
        for signature in all.concat() {
            for c in signature.parameters {
                assert_ne!(c_letter(&c), '?', "{c} in {}", signature.name);
            }
        }
    }
}
