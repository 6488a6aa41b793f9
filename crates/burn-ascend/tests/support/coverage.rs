//! Every method of the backend traits has a case, a test of its own, or a written reason why not.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::Command;

use burn::backend::flex::Flex;
use burn::backend::{BoolStore, DType};

use super::cases::{activation, boolean, float, int, module, quantized, transaction};
use super::groups::every_group;
use super::suite::Suite;

/// The traits that make up a burn backend, the file that declares each, and how many methods it has
/// at least: what the reader of the sources would miss is no method without a case.
const TRAITS: &[(&str, &str, usize)] = &[
    ("FloatTensorOps", "tensor.rs", 128),
    ("IntTensorOps", "int_tensor.rs", 107),
    ("BoolTensorOps", "bool_tensor.rs", 39),
    ("ActivationOps", "activation.rs", 14),
    ("ModuleOps", "modules/base.rs", 60),
    ("QTensorOps", "qtensor.rs", 80),
    ("TransactionOps", "transaction.rs", 1),
];

/// Methods with a test of their own.
const ELSEWHERE: &[(&str, &str)] = &[
    ("float_random", "random::distributions"),
    ("int_random", "random::distributions"),
    (
        "has_ctc_loss_backward",
        "backend.rs: no_gradient_of_its_own_for_ctc",
    ),
];

/// Methods without a test, and why.
const UNTESTED: &[(&str, &str)] = &[(
    "ctc_loss_backward",
    "called only where has_ctc_loss_backward is true, and Flex has none to compare with",
)];

fn with_cases() -> BTreeSet<&'static str> {
    let mut ops = BTreeSet::new();
    macro_rules! collect {
        ([] $($test:ident: $dtype:expr, $group:path;)*) => {$(
            let mut suite = Suite::<Flex>::new($dtype);
            $group(&mut suite);
            ops.extend(suite.ops());
        )*};
    }
    every_group!(collect,);
    ops
}

#[test]
fn every_method_has_a_case_or_a_reason() {
    let cases = with_cases();
    let elsewhere: BTreeSet<_> = ELSEWHERE.iter().map(|(op, _)| *op).collect();
    let excused = |op: &str| UNTESTED.iter().any(|(excuse, _)| op == *excuse);
    let methods = methods();
    let methods: BTreeSet<&str> = methods.iter().map(String::as_str).collect();

    let missing: Vec<_> = methods
        .iter()
        .filter(|op| !cases.contains(**op) && !elsewhere.contains(**op) && !excused(op))
        .collect();
    assert!(
        missing.is_empty(),
        "neither a case nor a reason: {missing:?}"
    );
    let unknown: Vec<_> = cases
        .union(&elsewhere)
        .filter(|op| !methods.contains(**op))
        .collect();
    assert!(
        unknown.is_empty(),
        "no method of any backend trait: {unknown:?}"
    );
    let excused: Vec<_> = cases.iter().filter(|op| excused(op)).collect();
    assert!(
        excused.is_empty(),
        "has a case and a reason for none: {excused:?}"
    );
}

/// The methods of the traits, as the version of burn in use declares them.
fn methods() -> BTreeSet<String> {
    let sources = trait_sources();
    let mut methods = BTreeSet::new();
    for (name, file, least) in TRAITS {
        let path = sources.join(file);
        let text = std::fs::read_to_string(&path)
            .unwrap_or_else(|error| panic!("cannot read {}: {error}", path.display()));
        let declared = text.split_once(&format!("pub trait {name}"));
        let declared = declared.expect("the trait").1;
        // The trait ends at the first brace in the first column; its methods are indented by four.
        let body = declared.split_once("\n}").expect("the trait's end").0;
        let before = methods.len();
        let lines = body.lines().filter_map(|line| {
            let asynchronous = || line.strip_prefix("    async fn ");
            line.strip_prefix("    fn ").or_else(asynchronous)
        });
        let names = lines.filter_map(|line| line.split(['(', '<']).next());
        methods.extend(names.map(str::to_owned));
        let found = methods.len() - before;
        assert!(
            found >= *least,
            "{name}: {found} methods are read, {least} expected"
        );
    }
    methods
}

/// Where cargo keeps the sources of the burn-backend that this test was built with.
fn trait_sources() -> PathBuf {
    // The sources of other platforms' crates need not be on this machine.
    let compiler = Command::new("rustc")
        .arg("-vV")
        .output()
        .expect("rustc runs");
    let compiler = String::from_utf8_lossy(&compiler.stdout).into_owned();
    let host = compiler
        .lines()
        .find_map(|line| line.strip_prefix("host: "))
        .expect("the compiler's platform");
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version", "1", "--offline", "--locked"])
        .args(["--filter-platform", host])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .expect("cargo runs");
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let metadata = String::from_utf8_lossy(&output.stdout);
    let manifest = metadata
        .split("\"manifest_path\":\"")
        .filter_map(|rest| rest.split('"').next())
        .find(|path| path.contains("/burn-backend-0"))
        .expect("burn-backend is a dependency");
    PathBuf::from(manifest)
        .with_file_name("src")
        .join("backend/ops")
}
