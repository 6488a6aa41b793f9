//! `mrope merge`, `mrope generate` and `mrope compare` as a user runs them, on the example's model.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Output;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use crate::program::{command, says, text};
use vlm_models::VlmConfig;
use vlm_models::file::TensorFile;

fn example() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/shapes")
}

/// The path of a folder that does not exist yet, for a test.
fn fresh(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    fs::remove_dir_all(&folder).ok();
    folder
}

fn run(arguments: &str) -> Output {
    let arguments: Vec<&str> = arguments.split_whitespace().collect();
    let mut command = command(&arguments);
    command
        .current_dir(example())
        .output()
        .expect("the program starts")
}

fn done(arguments: &str) -> String {
    let output = run(arguments);
    assert!(
        output.status.success(),
        "{arguments}: {}",
        text(&output.stderr)
    );
    text(&output.stdout)
}

const TUNE: &str = "--data train.jsonl --batch 2 --learning-rate 2e-2 --rank 4 --micro-tokens 512";

/// A folder with a model of one step (`run/model`), an adapter of two with its first step recorded
/// (`tuned`), and the same step padded (`cut`) and with dropout (`dropped`).
pub(crate) fn made() -> &'static Path {
    static MADE: OnceLock<PathBuf> = OnceLock::new();
    MADE.get_or_init(|| {
        let folder = fresh("after-training");
        fs::create_dir_all(&folder).expect("creates");
        let at = |name: &str| folder.join(name).display().to_string();
        done(&format!(
            "finetune model --random-weights --full --data train.jsonl --batch 2 --steps 1 --warmup 0 \
             --out {}",
            at("run")
        ));
        for (name, options) in [
            ("tuned", ""),
            ("cut", "--batching padded"),
            ("dropped", "--dropout 0.3"),
        ] {
            done(&format!(
                "finetune {} {TUNE} --steps 2 --record-step 1 --out {} {options}",
                at("run/model"),
                at(name)
            ));
        }
        folder
    })
}

fn at(name: &str) -> String {
    made().join(name).display().to_string()
}

/// Without log-probabilities, in which rounding shows.
fn answers(options: &str) -> String {
    let data = "--data test.jsonl --limit 5 --max-new 6 --json";
    let given = done(&format!("generate {options} {data}"));
    let lines = given.lines().map(|line| {
        let mut line: serde_json::Value = serde_json::from_str(line).expect("JSON");
        let numbers = line
            .as_object_mut()
            .and_then(|line| line.remove("log_probabilities"));
        assert_eq!(
            numbers.and_then(|numbers| Some(numbers.as_array()?.len())),
            line["tokens"].as_array().map(Vec::len)
        );
        format!("{line}\n")
    });
    lines.collect()
}

#[test]
fn a_merged_model_answers_as_the_base_with_its_adapter() {
    let (base, adapter, out) = (at("run/model"), at("tuned/adapter"), at("merged"));
    let shown = done(&format!("merge {base} --adapter {adapter} --out {out}"));
    says(&shown, "lost to rounding");
    says(&shown, "logits of a prompt with a picture");
    let expected = answers(&format!("{base} --adapter {adapter} --batch 5"));
    assert_eq!(expected.lines().count(), 5, "{expected}");
    assert_eq!(answers(&format!("{out} --batch 1")), expected);
    assert_ne!(answers(&base), expected, "the adapter changes an answer");
    let on_merged = format!("generate {out} --adapter {adapter} --prompt Which? --max-new 2");
    let refused = run(&on_merged);
    assert!(!refused.status.success());
    says(&text(&refused.stderr), "fingerprint");
    done(&format!("{on_merged} --any-base"));
    let drawn = |seed| {
        answers(&format!(
            "{base} --temperature 1.5 --top-k 50 --seed {seed}"
        ))
    };
    assert_eq!(drawn(1), drawn(1));
    assert_ne!(drawn(1), drawn(2));
    // A picture without a mark comes first.
    let asked = |prompt: &str| {
        done(&format!(
            "generate {base} --image pictures/test_01.png --prompt {prompt} --max-new 4 --json"
        ))
    };
    assert_eq!(asked("<image>Which?"), asked("Which?"));
    let streamed = run(&format!(
        "generate {base} --image pictures/test_01.png pictures/test_02.png --prompt Which? --max-new 4"
    ));
    says(&text(&streamed.stderr), "tokens/s");
    assert!(streamed.status.success() && streamed.stdout.ends_with(b"\n"));
}

#[test]
fn recorded_steps_are_compared() {
    let record = |name: &str| at(&format!("{name}/step-1.safetensors"));
    let picture = at("cut.svg");
    let equal = done(&format!(
        "compare {} {} --picture {picture}",
        record("tuned"),
        record("cut")
    ));
    says(&equal, "equal apart from rounding");
    says(&fs::read_to_string(picture).expect("a picture"), "<svg");
    let other = run(&format!(
        "compare {} {}",
        record("tuned"),
        record("dropped")
    ));
    assert_eq!(other.status.code(), Some(1));
    let shown = text(&other.stdout);
    says(&shown, "suspicion: dropout");
    says(&shown, "layer 1");
    let json = run(&format!(
        "compare {} {} --json",
        record("tuned"),
        record("dropped")
    ));
    let json: serde_json::Value = serde_json::from_slice(&json.stdout).expect("JSON");
    assert_eq!(
        (&json["equal"], &json["suspicion"]["fault"]),
        (&false.into(), &"Dropout".into())
    );
}

#[test]
fn wrong_inputs_are_one_clear_error() {
    let (base, adapter) = (at("run/model"), at("tuned/adapter"));
    let other = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/finetune");
    let other = other.display();
    let record = at("tuned/step-1.safetensors");
    let cut = made().join("cut.safetensors");
    let whole = fs::read(&record).expect("a record");
    fs::write(&cut, &whole[..whole.len() / 2]).expect("writes");
    let (cut, out) = (cut.display(), at("never"));
    let pickled = at("pickled");
    fs::create_dir_all(&pickled).expect("a folder");
    for entry in fs::read_dir(&base).expect("a folder") {
        let path = entry.expect("an entry").path();
        let name = path.file_name().expect("a name").to_string_lossy();
        let name = name.replace("model.safetensors", "pytorch_model.bin");
        fs::copy(&path, Path::new(&pickled).join(name)).expect("a file");
    }
    let own = format!("merge {base} --adapter {adapter}");
    for (arguments, expected) in [
        (
            format!("merge {base} --adapter {other}/qwen2_vl_tiny --out {out}"),
            "shape",
        ),
        (format!("{own} --out {}", at("run")), "it exists"),
        (
            format!("{own} --weights 1,2 --out {out}"),
            "2 numbers for 1 adapters",
        ),
        (format!("{own} --weights 0 --out {out}"), "other than 0"),
        (
            format!("merge {base} --adapter {base} --out {out}"),
            "adapter_config.json",
        ),
        (
            format!("merge model --adapter {adapter} --out {out}"),
            "model.safetensors",
        ),
        (
            format!("generate {pickled} --prompt A"),
            "pytorch_model*.bin, which is not read",
        ),
        (format!("generate {base}"), "--prompt"),
        (
            format!("generate {base} --prompt A --image none.png"),
            "none.png",
        ),
        (
            format!("generate {base} --prompt <image><image>A --image pictures/test_01.png"),
            "2 <image> placeholders, the record lists 1 image",
        ),
        (
            format!("generate {base} --prompt A<|im_end|>"),
            "<|im_end|>",
        ),
        (
            format!("generate {base} --prompt A --temperature 0"),
            "temperature = 0",
        ),
        (
            format!("generate {base} --prompt A --temperature 1 --top-p 1.5"),
            "top_p = 1.5",
        ),
        (
            format!("generate {base} --prompt A --top-k 3"),
            "--temperature",
        ),
        (format!("generate {base} --data none.jsonl"), "none.jsonl"),
        (
            format!("generate {base} --adapter {other} --prompt A"),
            "adapter_config.json",
        ),
        (
            format!("compare {record} {base}/model.safetensors"),
            "is not a record of a step",
        ),
        (format!("compare {record} {cut}"), "copy it again"),
        (
            format!("compare {record} {other}/../faults/right.safetensors"),
            "in common",
        ),
    ] {
        let failed = run(&arguments);
        let shown = text(&failed.stderr);
        assert!(!failed.status.success(), "{arguments}");
        assert!(
            shown.contains(expected) && !shown.contains("panicked"),
            "{arguments}: {shown}"
        );
        assert!(!Path::new(&out).exists(), "{arguments}");
    }
}

/// True if a folder is one that a model is loaded from.
fn loads(folder: &Path) -> bool {
    let Ok(config) = VlmConfig::from_folder(folder) else {
        return false;
    };
    config.load(folder, &burn::tensor::Device::flex()).is_ok()
}

#[test]
#[ignore = "a minute: a part of `cargo xtask deep training`"]
fn a_killed_merge_leaves_no_folder_that_loads() {
    let (base, adapter) = (at("run/model"), at("tuned/adapter"));
    let parent = fresh("after-training-killed");
    let out = parent.join("out");
    let arguments = format!("merge {base} --adapter {adapter} --out {}", out.display());
    let arguments: Vec<&str> = arguments.split_whitespace().collect();
    let started = Instant::now();
    assert!(
        command(&arguments)
            .output()
            .expect("starts")
            .status
            .success()
    );
    let (whole, bytes) = (started.elapsed(), fs::read(out.join("model.safetensors")));
    let bytes = bytes.expect("weights");
    let (mut cut, mut complete) = (0, 0);
    for kill in 1..=30 {
        fs::remove_dir_all(&parent).expect("removes");
        fs::create_dir_all(&parent).expect("creates");
        let mut child = command(&arguments).spawn().expect("starts");
        std::thread::sleep(whole.mul_f64((f64::from(kill) * 0.618_034).fract()));
        let _ended = child.kill();
        child.wait().expect("it ends");
        for entry in fs::read_dir(&parent).expect("reads") {
            let path = entry.expect("reads").path();
            if loads(&path) {
                let found = fs::read(path.join("model.safetensors")).expect("weights");
                assert!(found == bytes && path == out, "{}", path.display());
                complete += 1;
            } else {
                cut += 1;
            }
        }
        // A second run cleans up after it.
        if !loads(&out) {
            assert!(
                command(&arguments)
                    .output()
                    .expect("starts")
                    .status
                    .success()
            );
            assert_eq!(fs::read_dir(&parent).expect("reads").count(), 1);
        }
    }
    println!("{cut} folders were cut off, {complete} complete");
    assert!(cut > 0 && whole > Duration::ZERO, "none was cut");
}

/// Names and shapes of a Qwen2-VL checkpoint with a small tower and 16 layers of one of 3 billion
/// parameters.
fn large() -> (serde_json::Value, Vec<(String, Vec<usize>)>) {
    const HIDDEN: usize = 2048;
    const INNER: usize = 11_008;
    const KEYS: usize = 256;
    const VOCABULARY: usize = 151_936;
    const LAYERS: usize = 16;
    const TOWER: usize = 640;
    const DEPTH: usize = 2;
    let config = serde_json::json!({
        "model_type": "qwen2_vl", "tie_word_embeddings": true, "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS,
        "num_attention_heads": 16, "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
        "rope_theta": 1e6, "rope_scaling": { "type": "mrope", "mrope_section": [16, 24, 24] },
        "vision_config": {
            "depth": DEPTH, "embed_dim": TOWER, "hidden_size": HIDDEN, "num_heads": 8,
            "mlp_ratio": 4, "patch_size": 14, "temporal_patch_size": 2, "spatial_merge_size": 2,
            "in_channels": 3, "hidden_act": "quick_gelu"
        }
    });
    let mut tensors = vec![
        (
            "model.embed_tokens.weight".to_owned(),
            vec![VOCABULARY, HIDDEN],
        ),
        ("model.norm.weight".to_owned(), vec![HIDDEN]),
        (
            "visual.patch_embed.proj.weight".to_owned(),
            vec![TOWER, 3, 2, 14, 14],
        ),
    ];
    let mut add = |name: String, shape: &[usize]| {
        tensors.push((format!("{name}.weight"), shape.to_vec()));
    };
    for layer in 0..LAYERS {
        let name = |part: &str| format!("model.layers.{layer}.{part}");
        for (part, shape) in [
            ("input_layernorm", &[HIDDEN][..]),
            ("post_attention_layernorm", &[HIDDEN]),
            ("self_attn.q_proj", &[HIDDEN, HIDDEN]),
            ("self_attn.k_proj", &[KEYS, HIDDEN]),
            ("self_attn.v_proj", &[KEYS, HIDDEN]),
            ("self_attn.o_proj", &[HIDDEN, HIDDEN]),
            ("mlp.gate_proj", &[INNER, HIDDEN]),
            ("mlp.up_proj", &[INNER, HIDDEN]),
            ("mlp.down_proj", &[HIDDEN, INNER]),
        ] {
            add(name(part), shape);
        }
    }
    for block in 0..DEPTH {
        let name = |part: &str| format!("visual.blocks.{block}.{part}");
        for (part, shape) in [
            ("norm1", &[TOWER][..]),
            ("norm2", &[TOWER]),
            ("attn.qkv", &[3 * TOWER, TOWER]),
            ("attn.proj", &[TOWER, TOWER]),
            ("mlp.fc1", &[4 * TOWER, TOWER]),
            ("mlp.fc2", &[TOWER, 4 * TOWER]),
        ] {
            add(name(part), shape);
        }
    }
    add("visual.merger.ln_q".to_owned(), &[TOWER]);
    add("visual.merger.mlp.0".to_owned(), &[4 * TOWER, 4 * TOWER]);
    add("visual.merger.mlp.2".to_owned(), &[HIDDEN, 4 * TOWER]);
    let has_bias = |name: &str| {
        let is_in_tower = name.starts_with("visual.") && !name.contains("patch_embed");
        is_in_tower
            || ["q_proj", "k_proj", "v_proj"]
                .iter()
                .any(|part| name.contains(part))
    };
    let biased: Vec<(String, Vec<usize>)> = tensors
        .iter()
        .filter(|(name, _)| has_bias(name))
        .map(|(name, shape)| (name.replace(".weight", ".bias"), vec![shape[0]]))
        .collect();
    tensors.extend(biased);
    (config, tensors)
}

/// A safetensors file of zeros, which takes no room on the disk.
fn zeros(path: &Path, dtype: &str, bytes: usize, tensors: &[(String, Vec<usize>)]) {
    use std::io::Write;
    let (mut header, mut end) = (serde_json::Map::new(), 0);
    for (name, shape) in tensors {
        let start = end;
        end += shape.iter().product::<usize>() * bytes;
        let entry =
            serde_json::json!({ "dtype": dtype, "shape": shape, "data_offsets": [start, end] });
        header.insert(name.clone(), entry);
    }
    let header = serde_json::Value::Object(header).to_string();
    let mut file = fs::File::create(path).expect("creates");
    file.write_all(&(header.len() as u64).to_le_bytes())
        .expect("writes");
    file.write_all(header.as_bytes()).expect("writes");
    file.set_len((8 + header.len() + end) as u64)
        .expect("grows");
}

#[cfg(target_os = "linux")]
#[test]
#[ignore = "minutes, and 3 GB of disk: a part of `cargo xtask deep training`"]
fn three_gigabytes_merge_in_less_than_one_of_memory() {
    let folder = fresh("after-training-large");
    let [base, adapter] = ["base", "adapter"].map(|name| folder.join(name));
    for path in [&base, &adapter] {
        fs::create_dir_all(path).expect("creates");
    }
    let (config, tensors) = large();
    fs::write(base.join("config.json"), config.to_string()).expect("writes");
    zeros(&base.join("model.safetensors"), "BF16", 2, &tensors);
    assert!(
        base.join("model.safetensors")
            .metadata()
            .expect("is there")
            .len()
            > 3_000_000_000
    );
    let halves: Vec<(String, Vec<usize>)> = tensors
        .iter()
        .filter(|(name, _)| name.contains("o_proj") || name.contains("down_proj"))
        .flat_map(|(name, shape)| {
            let of = format!("base_model.model.{}", name.trim_end_matches(".weight"));
            [
                (format!("{of}.lora_A.weight"), vec![8, shape[1]]),
                (format!("{of}.lora_B.weight"), vec![shape[0], 8]),
            ]
        })
        .collect();
    zeros(
        &adapter.join("adapter_model.safetensors"),
        "F32",
        4,
        &halves,
    );
    let text = r#"{ "peft_type": "LORA", "r": 8, "lora_alpha": 16 }"#;
    fs::write(adapter.join("adapter_config.json"), text).expect("writes");
    let out = folder.join("out");
    let limit = "ulimit -v 1048576; exec \"$0\" merge \"$1\" --adapter \"$2\" --out \"$3\"";
    let merged = std::process::Command::new("sh")
        .args(["-c", limit, env!("CARGO_BIN_EXE_mrope")])
        .args([&base, &adapter, &out])
        .output()
        .expect("starts");
    assert!(merged.status.success(), "{}", text_of(&merged));
    let [before, after] = [&base, &out].map(|folder| {
        let file = TensorFile::open(&folder.join("model.safetensors")).expect("opens");
        file.tensors().len()
    });
    assert_eq!(before, after);
    fs::remove_dir_all(folder).expect("removes");
}

#[cfg(target_os = "linux")]
fn text_of(output: &Output) -> String {
    text(&output.stderr)
}
