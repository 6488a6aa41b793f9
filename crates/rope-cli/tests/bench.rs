//! `mrope bench` as a user runs it, on small tensors: results, forms and promises, never times.

use std::collections::BTreeSet;
use std::process::{Command, Output};

use crate::program::{self, text};
use rope_bench::rows::{AttentionRow, MemoryRow, SpeedRow, read_json_lines};
use serde_json::Value;

fn mrope(arguments: &[&str]) -> Output {
    program::mrope(&[&["bench"], arguments].concat())
}

fn succeeded(arguments: &[&str]) -> String {
    let output = mrope(arguments);
    assert!(output.status.success(), "{}", text(&output.stderr));
    text(&output.stdout)
}

/// The bytes that a layer's two nodes may take in the graph itself.
const BOOKKEEPING_BYTES: usize = 4 << 10;
/// The working memory of the kernels' tasks.
const WORKSPACE_BYTES: usize = 512 << 10;

#[test]
fn fused_keeps_no_data_and_its_backward_peaks_at_the_gradients() {
    let json = succeeded(&["memory", "--quick", "--json"]);
    let rows: Vec<MemoryRow> = read_json_lines(&json).expect("one object a line");
    // Model x type x checkpointing x scheme x layers.
    assert_eq!(rows.len(), 4 * 2 * 2 * 3 * 2);
    for row in &rows {
        assert_eq!(row.device, "flex");
        let name = format!("{row:?}");
        let able =
            row.implementation != "burn::nn::RotaryEncoding" || row.rotary_dim == row.head_dim;
        assert_eq!(row.retained_bytes.is_some(), able, "{name}");
        assert_eq!(able, !row.note.contains("whole heads only"), "{name}");
        if !able {
            continue;
        }
        let peak = row.backward_peak_bytes.expect("counted");
        if row.implementation == "fused" {
            assert_eq!(row.retained_data_bytes, Some(0), "{name}");
            assert_eq!(row.forward_large_allocations, Some(0), "{name}");
            assert_eq!(
                row.backward_large_peak_bytes,
                Some(row.gradient_bytes),
                "{name}"
            );
            let allowed = row.gradient_bytes + row.layers * BOOKKEEPING_BYTES + WORKSPACE_BYTES;
            assert!(peak >= row.gradient_bytes && peak <= allowed, "{name}");
            assert!(row.composed_ratio > Some(2.0), "{name}");
        } else {
            // The same count must see the others' tensors, or it could not fail.
            assert!(row.forward_large_allocations > Some(0), "{name}");
            assert!(row.backward_large_allocations > Some(0), "{name}");
        }
    }
}

#[test]
fn the_graph_of_the_norm_keeps_q_and_k_alone() {
    let json = succeeded(&["memory", "--norm", "--quick", "--json"]);
    let rows: Vec<MemoryRow> = read_json_lines(&json).expect("one object a line");
    // Model x type x checkpointing x scheme x layers.
    assert_eq!(rows.len(), 2 * 2 * 2 * 3 * 2);
    for row in &rows {
        let kept = row.retained_data_bytes.expect("counted").cast_unsigned();
        let (inputs, name) = (row.layers * row.gradient_bytes, format!("{row:?}"));
        if row.implementation == "fused" {
            // Beside them, weights in the type that is computed in.
            let weights = row.layers * BOOKKEEPING_BYTES;
            assert!((inputs..=inputs + weights).contains(&kept), "{name}");
            assert_eq!(
                row.backward_large_peak_bytes,
                Some(row.gradient_bytes),
                "{name}"
            );
            let results = 2 * row.layers;
            assert_eq!(row.forward_large_allocations, Some(results), "{name}");
            assert!(row.composed_ratio > Some(1.5), "{name}");
        } else if !row.checkpointing {
            assert!(kept > 2 * inputs, "{name}");
        }
    }
    let failed = mrope(&["memory", "--norm", "--shape", "flux"]);
    assert!(text(&failed.stderr).contains("qwen3-vl-8b"));
}

#[test]
fn attention_keeps_no_matrix_of_scores() {
    let output = Command::new(env!("CARGO_BIN_EXE_mrope"))
        .args(["bench", "memory", "--attention", "--quick", "--json"])
        // Each thread keeps a buffer from its first product on; the row must not count it.
        .env("RAYON_NUM_THREADS", "32")
        .output()
        .expect("the program starts");
    assert!(output.status.success(), "{}", text(&output.stderr));
    let json = text(&output.stdout);
    let rows: Vec<AttentionRow> = read_json_lines(&json).expect("one object a line");
    // Two types, two numbers of tokens, fused and composed.
    assert_eq!(rows.len(), 8);
    for row in &rows {
        let kept = row.retained_bytes.expect("counted").cast_unsigned();
        let peak = row.step_peak_bytes.expect("counted");
        if row.implementation == "fused" {
            // The output, and one number in f32 for each row of scores.
            let rows = row.tokens * row.heads;
            let output = rows * row.head_dim * row.dtype.size_bytes();
            let expected = output + 4 * rows;
            assert!(kept.abs_diff(expected) <= BOOKKEEPING_BYTES, "{row:?}");
        } else {
            assert!(
                kept > row.scores_bytes && peak > 2 * row.scores_bytes,
                "{row:?}"
            );
        }
    }
    let text = succeeded(&["memory", "--attention", "--tokens", "16", "--dtype", "f32"]);
    assert!(text.contains("composed / fused"), "{text}");
    assert!(
        text.lines().all(|line| line.chars().count() <= 100),
        "{text}"
    );
}

#[cfg(feature = "ascend-sim")]
#[test]
fn on_the_simulated_npu_fused_holds_nothing_but_gradients() {
    let arguments = [
        "memory",
        "--quick",
        "--json",
        "--device",
        "ascend-sim",
        "--shape",
        "qwen3-vl-8b",
    ];
    let output = mrope(&arguments);
    let errors = text(&output.stderr);
    assert!(output.status.success(), "{errors}");
    let rows: Vec<MemoryRow> = read_json_lines(&text(&output.stdout)).expect("one object a line");
    // Type x checkpointing x scheme x layers.
    assert_eq!(rows.len(), 2 * 2 * 3 * 2);
    for row in rows {
        assert_eq!(row.device, "ascend-sim");
        let peak = row.backward_peak_bytes.expect("counted");
        if row.implementation == "fused" {
            assert_eq!(row.retained_bytes, Some(0), "{row:?}");
            assert_eq!(row.forward_peak_bytes, Some(0), "{row:?}");
            let allowed = row.gradient_bytes + BOOKKEEPING_BYTES;
            assert!(peak >= row.gradient_bytes && peak <= allowed, "{row:?}");
        } else {
            // The same count must see the others' tensors, or it could not fail.
            assert!(
                row.step_peak_bytes > Some(2 * row.gradient_bytes),
                "{row:?}"
            );
        }
    }
}

#[test]
fn every_kind_of_case_is_checked_and_timed() {
    let json = succeeded(&["speed", "--quick", "--json"]);
    for line in json.lines() {
        let row: Value = serde_json::from_str(line).expect("one object a line");
        for key in [
            "case",
            "implementation",
            "direction",
            "dtype",
            "pairing",
            "layout",
        ] {
            assert!(row[key].is_string(), "{key}: {line}");
        }
        for key in ["bytes", "median_ns", "copy_ratio"] {
            assert!(row[key].as_f64() > Some(0.0), "{key}: {line}");
        }
    }
    let rows: Vec<SpeedRow> = read_json_lines(&json).expect("rows");
    let distinct =
        |value: &dyn Fn(&SpeedRow) -> String| rows.iter().map(value).collect::<BTreeSet<_>>();
    assert_eq!(distinct(&|row| row.pairing.clone()).len(), 4);
    assert_eq!(distinct(&|row| row.dtype.name().to_owned()).len(), 3);
    assert_eq!(distinct(&|row| row.layout.clone()).len(), 3);
    let baselines = distinct(&|row| row.baseline.clone());
    let expected = [
        "copy",
        "read_modify_write",
        "read_two_write_one",
        "rotation",
    ];
    assert_eq!(baselines, expected.map(str::to_owned).into());
    let implementations = distinct(&|row| row.implementation.clone());
    let expected = [
        "burn::nn::RotaryEncoding",
        "composed",
        "fused",
        "no rotation",
        "rope-core",
    ];
    assert_eq!(implementations, expected.map(str::to_owned).into());
    for row in &rows {
        let tensors = match (row.direction.name(), row.group.name()) {
            ("both", _) => 4,
            ("backward", "norm") => 3,
            _ => 2,
        };
        assert_eq!(
            row.bytes % (tensors * row.tokens * row.dtype.size_bytes()),
            0,
            "{row:?}"
        );
    }
}

#[test]
fn rounds_add_their_samples_to_those_before() {
    let arguments = [
        "speed",
        "--quick",
        "--json",
        "--dtype",
        "f32",
        "--group",
        "decode,burn",
    ];
    let rounds = |number| {
        let json = succeeded(&[&arguments[..], &["--rounds", number]].concat());
        read_json_lines::<SpeedRow>(&json).expect("rows")
    };
    let (one, three) = (rounds("1"), rounds("3"));
    assert_eq!(one.len(), three.len());
    for (one, three) in one.iter().zip(&three) {
        let all = if one.implementation == "rope-core" {
            3
        } else {
            1
        };
        assert_eq!((&one.case, one.samples), (&three.case, 1));
        assert_eq!(three.samples, all, "{three:?}");
    }
}

#[test]
fn cases_are_chosen_by_name_and_by_factor() {
    let list = |arguments: &[&str]| -> Vec<String> {
        let all = ["speed", "--list"]
            .iter()
            .chain(arguments)
            .copied()
            .collect::<Vec<_>>();
        succeeded(&all).lines().map(str::to_owned).collect()
    };
    let filters = ["adjacent", "bnsd", "in_place"].map(|part| ["--filter", part]);
    let chosen = list(&[&["--dtype", "bf16"], filters.as_flattened()].concat());
    assert_eq!(
        chosen,
        [
            "forward/bnsd/bf16/adjacent/single/Qwen3-VL-8B@8192/in_place",
            "backward/bnsd/bf16/adjacent/single/Qwen3-VL-8B@8192/in_place",
            "forward/bnsd/bf16/adjacent/single/Qwen3-VL-8B@8192/in_place/norm",
            "backward/bnsd/bf16/adjacent/single/Qwen3-VL-8B@8192/in_place/norm",
        ]
    );
    let tokens = list(&["--group", "decode", "--tokens", "7"]);
    assert!(tokens.iter().all(|name| name.contains("@7/")), "{tokens:?}");

    for (arguments, expected) in [
        (&["speed", "--filter", "fp8"][..], "--list"),
        (&["speed", "--group", "neox"], "large"),
        (&["memory", "--tokens", "0"], "from 1 to 1048576"),
        (
            &["speed", "--tokens", "99999999999999"],
            "from 1 to 1048576",
        ),
        (&["memory", "--layers", "99999999999"], "from 1 to 1000"),
        (&["memory", "--shape", "gpt"], "qwen3-vl-8b"),
        (&["memory", "--dtype", "f64"], "f32, bf16, f16"),
        (&["speed", "--dtype", "f64"], "f32, bf16, f16"),
        (&["speed", "--list", "--json"], "cannot be used with"),
    ] {
        let failed = mrope(arguments);
        assert!(!failed.status.success(), "{arguments:?}");
        let message = text(&failed.stderr);
        assert!(
            message.starts_with("error: ") && message.contains(expected),
            "{message}"
        );
    }
}

#[test]
fn tables_fit_a_terminal_and_say_how_figures_came_about() {
    let commands: [&[&str]; 2] = [
        &[
            "memory",
            "--quick",
            "--shape",
            "qwen2.5-vl-7b",
            "--layers",
            "1,36",
        ],
        &["speed", "--quick", "--dtype", "f32"],
    ];
    for arguments in commands {
        for line in succeeded(arguments).lines() {
            assert!(line.chars().count() <= 100, "{arguments:?}: {line}");
        }
    }
    let table = succeeded(&["memory", "--quick", "--shape", "flux", "--dtype", "f32"]);
    for words in ["measured on flex", "gradient checkpointing", "0+0", "saves"] {
        assert!(table.contains(words), "{words}: {table}");
    }
}

/// With the addresses that a process may have cut to 4 GB.
#[cfg(target_os = "linux")]
#[test]
fn tensors_that_the_memory_does_not_hold_are_refused_in_one_line() {
    for arguments in [
        "bench memory --tokens 1048576 --layers 1 --dtype f32 --shape flux",
        "bench memory --attention --tokens 1048576 --dtype f32",
        "bench speed --quick --tokens 1048576 --group large",
    ] {
        let refused = Command::new("sh")
            .args(["-c", "ulimit -v 4000000 && exec \"$0\" \"$@\""])
            .arg(env!("CARGO_BIN_EXE_mrope"))
            .args(arguments.split(' '))
            .output()
            .expect("a shell of each Unix");
        let message = String::from_utf8_lossy(&refused.stderr);
        assert_eq!(refused.status.code(), Some(1), "{arguments}: {message}");
        assert!(
            message.starts_with("error: ")
                && message.contains(" needs at least ")
                && message.contains("choose fewer --tokens"),
            "{message}"
        );
        assert_eq!(message.lines().count(), 1, "{message}");
    }
}
