//! `mrope doctor`, and `--device` of the other commands, as a user runs them. The simulated NPU
//! needs the host's C++17 compiler.

#[cfg(feature = "ascend-sim")]
use crate::program::{command, says};
use crate::program::{mrope, text};
use serde_json::Value;

fn fixtures() -> String {
    let path = rope_check::fixtures().expect("the test runs in the workspace");
    path.display().to_string()
}

/// The golden files, without the models, which other tests run.
#[cfg(feature = "ascend-sim")]
fn golden_files() -> Vec<String> {
    let files = std::fs::read_dir(fixtures()).expect("fixtures");
    let files = files.map(|entry| entry.expect("an entry").path().display().to_string());
    let files: Vec<String> = files
        .filter(|path| path.ends_with(".safetensors"))
        .collect();
    assert!(files.len() >= 30, "{files:?}");
    files
}

/// The output of a command on the simulated NPU, in which nothing was violated.
#[cfg(feature = "ascend-sim")]
fn simulated(arguments: &[&str]) -> std::process::Output {
    let output = mrope(arguments);
    let errors = text(&output.stderr);
    assert!(!errors.contains("error: "), "{errors}");
    output
}

#[cfg(feature = "ascend-sim")]
#[test]
fn without_a_compiler_the_simulated_npu_says_what_to_install() {
    for words in [["verify", "x"], ["gradcheck", "--json"]] {
        let output = command(&words)
            .args(["--device", "ascend-sim"])
            .env("CXX", "/no/such/compiler")
            .output()
            .expect("program starts");
        let errors = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{errors}");
        says(&errors, "no C++17 compiler");
        says(&errors, "g++");
    }
}

/// A program that does not wait may find the right result. That it has no right to it is an error
/// of the run.
#[cfg(feature = "ascend-sim")]
#[test]
fn a_download_that_does_not_wait_for_its_stream_fails_the_run() {
    let file = fixtures() + "/llama_rope_half.safetensors";
    for path in ["kernels", "matrix", "aclnn"] {
        let arguments = ["verify", "--device", "ascend-sim", "--path", path, &file];
        assert_eq!(simulated(&arguments).status.code(), Some(0));
        let output = command(&arguments)
            .env("ASCEND_SIM_IGNORE", "aclrtSynchronizeStream")
            .output()
            .expect("program starts");
        let errors = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{errors}");
        says(&errors, "the simulated NPU found");
        says(&errors, "[stream-order]");
    }
}

#[test]
fn doctor_without_cann_says_what_is_missing_and_what_to_do() {
    let output = mrope(&["doctor"]);
    let found = text(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{found}");
    for part in [
        "ROPE_ASCEND_LIB_PATH=/no/such/folder",
        "/no/such/folder/libacl_rt.so, /no/such/folder/libascendcl.so",
        "our kernels, compiled at run time",
        "npu_mrope, with a gradient",
        "set_env.sh",
        "0 of 5 rotation paths",
    ] {
        assert!(found.contains(part), "{part} is not in {found}");
    }
    let remedy = found.matches("set_env.sh").count();
    assert_eq!(remedy, 1, "a remedy is said once: {found}");
}

#[test]
fn doctor_prints_json() {
    let output = mrope(&["doctor", "--json"]);
    assert_eq!(output.status.code(), Some(0));
    let found: Value = serde_json::from_str(&text(&output.stdout)).expect("an object");
    assert_eq!(found["complete"], false);
    assert_eq!(found["paths"].as_array().map(Vec::len), Some(5));
    for path in found["paths"].as_array().expect("a list") {
        assert!(
            path["ready"] == false && path["remedy"].is_string(),
            "{path}"
        );
    }
}

#[cfg(feature = "ascend-sim")]
#[test]
fn doctor_is_all_green_on_the_simulator() {
    let output = simulated(&["doctor", "--device", "ascend-sim"]);
    let found = text(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{found}");
    assert!(
        !found.contains("  --  ") && found.contains("Everything works"),
        "{found}"
    );
    says(&found, "our kernels: compiled, run, result correct");
}

/// The families of kernels that `mrope doctor` launches; the last one is of the cube cores.
#[cfg(feature = "ascend-sim")]
const FAMILIES: [(&str, &str); 6] = [
    ("rotation", "rope_rotate_split_f32"),
    ("its adjoint", "rope_rotate_split_f32"),
    ("gradient of the angles", "rope_angle_grad_split_f32"),
    ("norm with the rotation", "rope_norm_split_f32"),
    ("its backward", "rope_norm_grad_split_f32"),
    (
        "rotation by a matrix, on the cube cores",
        "rope_matrix_bf16",
    ),
];

/// The lines of `mrope doctor` on a simulated runtime that lacks functions.
#[cfg(feature = "ascend-sim")]
fn doctor_lacking(functions: &str) -> String {
    let output = command(&["doctor", "--device", "ascend-sim"])
        .env("ASCEND_SIM_LACKS", functions)
        .output()
        .expect("program starts");
    let (found, errors) = (text(&output.stdout), text(&output.stderr));
    assert_eq!(output.status.code(), Some(0), "{found}{errors}");
    assert_eq!(errors, "", "nothing is violated");
    found
}

#[cfg(feature = "ascend-sim")]
const ARRAY: &str = "aclrtLaunchKernelWithArgsArray";
#[cfg(feature = "ascend-sim")]
const LIST: &str = "aclrtLaunchKernelWithConfig";

#[cfg(feature = "ascend-sim")]
#[test]
fn doctor_launches_a_kernel_of_each_family() {
    for (lacking, vector) in [("", ARRAY), (ARRAY, LIST)] {
        let found = doctor_lacking(lacking);
        for (i, (family, kernel)) in FAMILIES.into_iter().enumerate() {
            let function = if i == 5 { LIST } else { vector };
            let line =
                format!("  ok  {family}: {kernel} by {function}, as on the CPU, guards intact\n");
            assert!(found.contains(&line), "{line} is not in {found}");
        }
        assert_eq!(
            found.contains("Everything works"),
            lacking.is_empty(),
            "{found}"
        );
        let names_it = format!("{ARRAY} (for arguments placed by");
        assert_eq!(found.contains(&names_it), !lacking.is_empty(), "{found}");
    }
}

#[cfg(feature = "ascend-sim")]
#[test]
fn doctor_says_which_kernels_a_runtime_cannot_launch() {
    let without_list = doctor_lacking("aclrtKernelArgsFinalize");
    let without_both = doctor_lacking(&format!("{ARRAY},{LIST}"));
    for (i, (family, kernel)) in FAMILIES.into_iter().enumerate() {
        let cores = if i == 5 {
            "cube and vector cores"
        } else {
            "the vector cores"
        };
        let refused = format!("  --  {family}: launching {kernel} on {cores} needs ");
        let works = format!("  ok  {family}: {kernel} by {ARRAY}");
        let expected = if i == 5 { &refused } else { &works };
        assert!(
            without_list.contains(expected),
            "{expected} is not in {without_list}"
        );
        assert!(
            without_both.contains(&refused),
            "{refused} is not in {without_both}"
        );
    }
    says(&without_list, "lacks aclrtKernelArgsFinalize; ");
    let lacks = format!("lacks {ARRAY}, {LIST}; install CANN 8.5 or later");
    assert!(without_both.contains(&lacks), "{without_both}");
    let remedy = "install CANN 8.5 or later: its runtime launches all of our kernels";
    assert_eq!(without_both.matches(remedy).count(), 1, "{without_both}");
    assert!(
        !without_both.contains("our kernels: made"),
        "{without_both}"
    );
}

#[cfg(feature = "ascend-sim")]
#[test]
fn doctor_on_dav_3510_has_no_kernel_of_the_cube_cores() {
    let output = command(&["doctor", "--device", "ascend-sim", "--json"])
        .env("ASCEND_SIM_MACHINE", "ascend_950")
        .output()
        .expect("program starts");
    let found: Value = serde_json::from_str(&text(&output.stdout)).expect("an object");
    assert_eq!(found["complete"], true, "{found}");
    let launches = found["launches"].as_array().expect("a list");
    for (launch, (family, kernel)) in launches.iter().zip(&FAMILIES[..5]) {
        assert_eq!(launch["name"], *family);
        let how = format!("{kernel} by {ARRAY}, as on the CPU, guards intact");
        assert_eq!(launch["found"], how);
    }
    let matrix = launches[5]["found"].as_str().expect("text");
    assert!(
        matrix.starts_with("none: the cube cores rotate"),
        "{matrix}"
    );
}

#[test]
fn a_device_without_cann_is_one_clear_error() {
    for command in [
        &["verify", "--device", "ascend", "x"][..],
        &["gradcheck", "--device", "ascend:3"],
    ] {
        let output = mrope(command);
        let errors = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{errors}");
        assert!(
            errors.starts_with("error: no Ascend runtime library found, tried"),
            "{errors}"
        );
        assert_eq!(errors.lines().count(), 1, "{errors}");
    }
    let output = mrope(&["verify", "--path", "aclnn", "x"]);
    assert!(text(&output.stderr).contains("add --device ascend"));
    let output = mrope(&["verify", "--device", "tpu", "x"]);
    assert!(text(&output.stderr).contains(
        "expected cpu, gpu, gpu:N, ascend, ascend:N, ascend-sim, ascend-sim:N or remote:"
    ));
}

#[cfg(not(feature = "ascend"))]
#[test]
fn what_the_program_was_built_without_is_named_with_its_feature() {
    let models = fixtures() + "/models/qwen2_vl_tiny";
    for (command, feature) in [
        (&["serve", "--device", "cpu"][..], "ascend"),
        (&["train", "--device", "ascend"], "ascend"),
        (&["train", "--device", "ascend-sim"], "ascend-sim"),
        (&["doctor", "--device", "ascend-sim"], "ascend-sim"),
        (
            &["verify", "--device", "remote:ws://127.0.0.1:1", &models],
            "ascend",
        ),
    ] {
        let output = mrope(command);
        let errors = text(&output.stderr);
        let expected = format!(
            "cargo run --release --features {feature} -- {} (to install it: cargo install --path \
             crates/rope-cli --features {feature})",
            command.join(" ")
        );
        assert_eq!(output.status.code(), Some(1), "{errors}");
        assert!(
            errors.starts_with("error: this program was built without ")
                && errors.trim_end().ends_with(&expected),
            "{errors}"
        );
    }
}

#[test]
fn a_gpu_that_cannot_be_had_is_one_clear_error() {
    let expected = if cfg!(feature = "cube") {
        "gpu:97 is not there; looked in "
    } else {
        "this program was built without a GPU's runtime (cuda, metal, rocm, vulkan or wgpu): cargo"
    };
    for command in [
        "verify x",
        "gradcheck",
        "train --steps 1",
        "bench speed",
        "bench memory --dtype f32",
    ] {
        let mut arguments: Vec<&str> = command.split(' ').collect();
        arguments.extend(["--device", "gpu:97"]);
        let output = mrope(&arguments);
        let errors = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{errors}");
        assert!(errors.contains(expected), "{errors}");
        assert_eq!(errors.lines().count(), 1, "{errors}");
    }
}

#[cfg(feature = "ascend-sim")]
#[test]
fn verify_runs_the_kernels_on_the_simulator() {
    let files = golden_files();
    let files: Vec<&str> = files.iter().map(String::as_str).collect();
    let verify = ["verify", "--device", "ascend-sim"];
    let output = simulated(&[&verify[..], &files].concat());
    let found = text(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{found}");
    assert!(found.contains("files: 0 out of tolerance"), "{found}");
    for dtype in ["f32", "f16", "bf16"] {
        let rows = found.lines().filter(|line| {
            line.contains("ascend-sim/kernels") && line.contains(&format!(" {dtype} "))
        });
        assert!(rows.count() >= 2 * 10, "{dtype}: {found}");
    }
    let arguments = [&verify[..], &["--engine", "kernels", files[0]]].concat();
    let one = text(&mrope(&arguments).stdout);
    assert!(one.contains("ascend-sim/kernels"), "{one}");
}

#[cfg(feature = "ascend-sim")]
#[test]
fn verify_counts_what_the_stock_operators_do_not_take() {
    let files = golden_files();
    let files: Vec<&str> = files.iter().map(String::as_str).collect();
    let verify = [
        "verify",
        "--device",
        "ascend-sim",
        "--path",
        "aclnn",
        "--json",
    ];
    let output = simulated(&[&verify[..], &files].concat());
    assert_eq!(output.status.code(), Some(0));
    let rows: Vec<Value> = text(&output.stdout)
        .lines()
        .map(|line| serde_json::from_str(line).expect("each line is an object"))
        .collect();
    let of = |name: &str| {
        let engine = |row: &&Value| {
            row["engine"]
                .as_str()
                .is_some_and(|engine| engine.ends_with(name))
        };
        rows.iter().filter(engine).collect::<Vec<_>>()
    };
    for operator in ["npu_mrope", "npu_rotary_mul"] {
        let rows = of(operator);
        assert!(
            rows.iter().any(|row| row["pass"] == true),
            "{operator}: {rows:?}"
        );
        let mut skipped = rows.iter().filter_map(|row| row["skipped"].as_str());
        assert!(
            skipped.any(|reason| reason.contains(" takes ")),
            "{operator}: {rows:?}"
        );
    }
}

#[cfg(feature = "ascend-sim")]
#[test]
fn gradcheck_runs_on_the_simulator() {
    let case = "half/striped[24,20,20]/qwen3_vl";
    let arguments = [
        "gradcheck",
        "--device",
        "ascend-sim",
        "--json",
        "--filter",
        case,
    ];
    let output = simulated(&arguments);
    let rows: Vec<Value> = text(&output.stdout)
        .lines()
        .map(|line| serde_json::from_str(line).expect("each line is an object"))
        .collect();
    assert_eq!(output.status.code(), Some(0), "{rows:?}");
    assert!(rows.iter().all(|row| row["pass"] == true), "{rows:?}");
    // Three types: forward, adjoint, identity, and the gradients of cos and sin.
    assert_eq!(rows.len(), 3 * 4, "{rows:?}");
}
