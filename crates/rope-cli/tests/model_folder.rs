//! Model folders whose tensors do not fit each other.

use std::path::{Path, PathBuf};

use crate::program::mrope;
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};

fn fixture() -> PathBuf {
    rope_check::fixtures()
        .expect("the test runs in the workspace")
        .join("models/qwen2_vl_tiny")
}

/// A copy of the fixture where `tensor` of `file` holds the same elements in another shape, or
/// their first.
fn reshaped(file: &str, tensor: &str, shape: &[usize]) -> PathBuf {
    changed("reshaped", file, tensor, |view| {
        let (elements, data) = (view.shape().iter().product::<usize>(), view.data());
        let kept = shape.iter().product::<usize>() * (data.len() / elements);
        (view.dtype(), shape.to_vec(), data[..kept].to_vec())
    })
}

/// A copy of the fixture with another `tensor` in `file`.
fn changed(
    how: &str,
    file: &str,
    tensor: &str,
    change: impl Fn(&TensorView) -> (Dtype, Vec<usize>, Vec<u8>),
) -> PathBuf {
    let to = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{how}-{tensor}"));
    std::fs::create_dir_all(&to).expect("folder is made");
    for entry in fixture().read_dir().expect("folder reads") {
        let entry = entry.expect("entry reads");
        std::fs::copy(entry.path(), to.join(entry.file_name())).expect("file copies");
    }
    let bytes = std::fs::read(to.join(file)).expect("file reads");
    let old = SafeTensors::deserialize(&bytes).expect("file parses");
    let (dtype, shape, data) = change(&old.tensor(tensor).expect("tensor is there"));
    let new = TensorView::new(dtype, shape, &data).expect("tensor is whole");
    let views = old.tensors().into_iter().map(|(name, view)| {
        let view = if name == tensor { new.clone() } else { view };
        (name, view)
    });
    safetensors::serialize_to_file(views.collect::<Vec<_>>(), None, &to.join(file))
        .expect("file is written");
    to
}

#[test]
fn a_tensor_of_another_shape_than_the_prompts_is_named_with_its_file() {
    for (file, tensor, shape, expected) in [
        ("expected", "hidden.0.in", &[64, 128][..], "[2,32,..]"),
        ("expected", "logits", &[64 * 300], "[2,32,..]"),
        // Tokens before samples.
        ("expected", "attn.0.out", &[32, 2, 128], "[2,32,..]"),
        ("expected", "q_post", &[4, 64, 32], "[2,H,32,..]"),
        ("expected", "grad_act.k_pre", &[2, 32, 2, 32], "[2,H,32,..]"),
        ("expected", "k_pre", &[2, 64, 32], "4 dimensions"),
        (
            "expected",
            "vision.image.block.0.out",
            &[72 * 32],
            "[patches, channels]",
        ),
        ("expected", "loss", &[0], "[1]"),
        ("legacy", "logits", &[64, 300], "[2,32,..]"),
        ("inputs", "input_ids", &[64], "[B,S]"),
        ("inputs", "input_ids", &[2, 0], "[B,S]"),
        ("inputs", "attention_mask", &[64], "[2,32], as input_ids"),
    ] {
        let file = format!("{file}.safetensors");
        let folder = reshaped(&file, tensor, shape);
        let output = mrope(&["verify".as_ref(), folder.as_os_str()]);
        let found = String::from_utf8_lossy(&output.stdout);
        assert_eq!(output.status.code(), Some(1), "{tensor}: {output:?}");
        let message =
            format!("FAIL tensor {tensor} of {file} has shape {shape:?}, expected {expected}");
        assert!(found.contains(&message), "{message}\n{found}");
    }
}

/// transformers gives frames of Qwen3-Omni's videos fractions of an id: cos and sin are then those
/// of the fractions.
#[test]
fn a_fraction_of_an_id_is_not_dropped() {
    let folder = changed(
        "fractional",
        "expected.safetensors",
        "position_ids",
        |view| {
            let ids = view.data().as_chunks::<8>().0.iter();
            let ids = ids.map(|id| i64::from_le_bytes(*id) as f32);
            let half = |(i, id)| if i == 5 { id + 0.5 } else { id };
            let data = ids.enumerate().map(half).flat_map(f32::to_le_bytes);
            (Dtype::F32, view.shape().to_vec(), data.collect())
        },
    );
    let output = mrope(&["verify".as_ref(), folder.as_os_str()]);
    let found = String::from_utf8_lossy(&output.stdout);
    for tensor in ["position_ids", "cos", "sin"] {
        let fails = |line: &str| line.split_whitespace().take(2).eq(["FAIL", tensor]);
        assert!(found.lines().any(fails), "{tensor}: {found}");
    }
}

/// Among golden files too, where its files by themselves would be skipped.
#[test]
fn a_folder_without_one_of_its_files_or_with_a_broken_one_is_refused_by_its_name() {
    let outer = Path::new(env!("CARGO_TARGET_TMPDIR")).join("incomplete");
    let inner = outer.join("model");
    let whole = |file: &str| std::fs::read(fixture().join(file)).expect("file reads");
    let config = String::from_utf8(whole("config.json")).expect("JSON");
    let mut config: serde_json::Value = serde_json::from_str(&config).expect("JSON");
    config["text_config"]["intermediate_size"] = (-1).into();
    let (config, cut) = (config.to_string(), whole("model.safetensors"));
    let golden = rope_check::fixtures()
        .expect("the test runs in the workspace")
        .join("llama_rope_half.safetensors");
    let cases: [(&str, Option<&[u8]>, &str); 7] = [
        (
            "expected.safetensors",
            None,
            "FAIL has no expected.safetensors;",
        ),
        (
            "inputs.safetensors",
            None,
            "FAIL has no inputs.safetensors;",
        ),
        ("config.json", None, "FAIL has no config.json;"),
        (
            "config.json",
            Some(b"{"),
            "FAIL the configuration is not JSON: EOF",
        ),
        (
            "train.json",
            Some(b"{"),
            "FAIL train.json cannot be read: EOF",
        ),
        (
            "config.json",
            Some(config.as_bytes()),
            "FAIL text_config cannot be read: intermediate_size: invalid value: integer `-1`",
        ),
        (
            "model.safetensors",
            Some(&cut[..1000]),
            "model.safetensors: it has 1000 bytes, its header alone takes",
        ),
    ];
    for (file, content, expected) in cases {
        std::fs::remove_dir_all(&outer).ok();
        std::fs::create_dir_all(&inner).expect("folder is made");
        std::fs::copy(&golden, outer.join("golden.safetensors")).expect("file copies");
        for kept in [
            "config.json",
            "inputs.safetensors",
            "expected.safetensors",
            "model.safetensors",
        ] {
            std::fs::write(inner.join(kept), whole(kept)).expect("file is written");
        }
        match content {
            Some(content) => std::fs::write(inner.join(file), content),
            None => std::fs::remove_file(inner.join(file)),
        }
        .expect("it is changed");
        let output = mrope(&["verify".as_ref(), outer.as_os_str()]);
        let found = String::from_utf8_lossy(&output.stdout);
        assert_eq!(output.status.code(), Some(1), "{file}: {found}");
        assert!(found.contains(expected), "{expected}: {found}");
        assert!(found.contains("1 file cannot be verified"), "{found}");
    }
}
