//! Each input file of the program as a pipe, a device, a socket and a folder: refused at once, in
//! one line that names the file.

use std::fs;
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use crate::after_training::made;
use crate::program::{command, text};

/// Longer than any refusal takes on a busy machine.
const HANG: Duration = Duration::from_secs(20);

const GENERATE: &str = "generate model --prompt hi --max-new 1";
const ADAPTED: &str = "generate model --prompt hi --max-new 1 --adapter adapter";
const MERGE: &str = "merge model --adapter adapter --out merged";
const CHECK: &str = "data check data.jsonl --model model";
const SHOW: &str = "data check data.jsonl --model model --show 1";
const TUNE: &str = "finetune model --data data.jsonl --batch 2 --steps 2 --rank 4 --out out";
const RESUME: &str =
    "finetune model --data data.jsonl --batch 2 --steps 2 --rank 4 --out run --resume";
const TRAIN: &str = "train --steps 1 --batch 2 --test-questions 2 --out demo";
/// Files that would be read first.
const TOKENIZER: &[&str] = &["model/tokenizer.json"];
const WEIGHTS: &[&str] = &["model/model.safetensors"];
const NO_FILE: &str = "it is not a regular file";
const NO_CHECKPOINT: &str = "no complete checkpoint";
const NOT_OURS: &str = "no run of mrope train wrote it|it is a folder; move it away";
#[cfg(feature = "ascend-sim")]
const NO_TOKEN: &str = "token is not a regular file|(it is a link;";
const NO_GOLDEN: &str = "is not a golden file: it is not a regular file|nothing to verify";

/// A file of the folder, the files that must be away for it to be read, the command that reads it,
/// and the words of the refusal, or several, separated by bars.
const FILES: &[(&str, &[&str], &str, &str)] = &[
    ("model/config.json", &[], GENERATE, NO_FILE),
    ("model/config.json", &[], MERGE, NO_FILE),
    ("model/config.json", &[], CHECK, NO_FILE),
    ("model/config.json", &[], TUNE, NO_FILE),
    ("model/tokenizer.json", &[], GENERATE, NO_FILE),
    ("model/vocab.json", TOKENIZER, GENERATE, NO_FILE),
    ("model/merges.txt", TOKENIZER, GENERATE, NO_FILE),
    ("model/tokenizer_config.json", &[], GENERATE, NO_FILE),
    ("model/chat_template.json", &[], GENERATE, NO_FILE),
    ("model/chat_template.jinja", &[], GENERATE, NO_FILE),
    ("model/processor_config.json", &[], GENERATE, NO_FILE),
    ("model/preprocessor_config.json", &[], GENERATE, NO_FILE),
    ("model/video_preprocessor_config.json", &[], CHECK, NO_FILE),
    ("model/generation_config.json", &[], GENERATE, NO_FILE),
    ("model/model.safetensors", &[], GENERATE, NO_FILE),
    ("model/model.safetensors", &[], TUNE, NO_FILE),
    (
        "model/model.safetensors.index.json",
        WEIGHTS,
        GENERATE,
        NO_FILE,
    ),
    ("adapter/adapter_config.json", &[], ADAPTED, NO_FILE),
    ("adapter/adapter_config.json", &[], MERGE, NO_FILE),
    ("adapter/adapter_model.safetensors", &[], ADAPTED, NO_FILE),
    ("adapter/adapter_model.safetensors", &[], MERGE, NO_FILE),
    ("data.jsonl", &[], CHECK, NO_FILE),
    ("data.jsonl", &[], SHOW, NO_FILE),
    ("data.jsonl", &[], TUNE, NO_FILE),
    (
        "data.jsonl",
        &[],
        "generate model --data data.jsonl --max-new 1",
        NO_FILE,
    ),
    (
        "val.jsonl",
        &[],
        "finetune model --data data.jsonl --val val.jsonl --steps 2 --out out",
        NO_FILE,
    ),
    ("picture.png", &[], CHECK, NO_FILE),
    (
        "picture.png",
        &[],
        "generate model --image picture.png --prompt hi --max-new 1",
        NO_FILE,
    ),
    (
        "run/checkpoint-00000002/run.json",
        &[],
        RESUME,
        NO_CHECKPOINT,
    ),
    (
        "run/checkpoint-00000002/state.safetensors",
        &[],
        RESUME,
        NO_CHECKPOINT,
    ),
    (
        "options.toml",
        &[],
        "finetune --options options.toml",
        NO_FILE,
    ),
    (
        "record.safetensors",
        &[],
        "compare record.safetensors other.safetensors",
        NO_FILE,
    ),
    (
        "other.safetensors",
        &[],
        "compare record.safetensors other.safetensors",
        NO_FILE,
    ),
    (
        "golden.safetensors",
        &[],
        "verify golden.safetensors",
        NO_GOLDEN,
    ),
    ("golden.json", &[], "verify golden.json", NO_GOLDEN),
    ("golden/config.json", &[], "verify golden", NO_FILE),
    ("golden/inputs.safetensors", &[], "verify golden", NO_FILE),
    ("golden/expected.safetensors", &[], "verify golden", NO_FILE),
    ("golden/train.json", &[], "verify golden", NO_FILE),
    (
        "golden.safetensors",
        &[],
        "gradcheck golden.safetensors",
        NO_FILE,
    ),
    ("prompt.json", &[], "positions prompt.json", NO_FILE),
    (
        "model/config.json",
        &[],
        "positions text:4 --config model/config.json",
        NO_FILE,
    ),
    ("demo/model.safetensors", &[], TRAIN, NOT_OURS),
    #[cfg(feature = "ascend-sim")]
    (
        "token",
        &[],
        "serve --device cpu --token-file token",
        NO_TOKEN,
    ),
    #[cfg(feature = "ascend-sim")]
    (
        "token",
        &[],
        "train --device remote:ws://127.0.0.1:1 --token-file token",
        NO_TOKEN,
    ),
];

type Put = fn(&Path);

/// What is put in the place of a file.
const KINDS: [(&str, Put); 4] = [
    ("a pipe", |path| {
        let made = Command::new("mkfifo").arg(path).status();
        assert!(made.expect("mkfifo runs").success());
    }),
    ("an endless device", |path| {
        symlink("/dev/zero", path).expect("links")
    }),
    ("a folder", |path| fs::create_dir(path).expect("creates")),
    ("a socket", |path| {
        drop(UnixListener::bind(path).expect("binds"))
    }),
];

/// A folder with all files of [`FILES`], regular.
fn inputs() -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("irregular");
    fs::remove_dir_all(&folder).ok();
    let fixtures = rope_check::fixtures().expect("the test runs in the workspace");
    for (from, to) in [
        (made().join("run/model"), "model"),
        (made().join("tuned/adapter"), "adapter"),
        (made().join("tuned"), "run"),
        (fixtures.join("models/qwen2_vl_tiny"), "golden"),
    ] {
        copy(&from, &folder.join(to));
    }
    let at = |name: &str| folder.join(name);
    for (from, to) in [
        (
            made().join("tuned/step-1.safetensors"),
            "record.safetensors",
        ),
        (made().join("tuned/step-1.safetensors"), "other.safetensors"),
        (
            fixtures.join("llama_rope_half.safetensors"),
            "golden.safetensors",
        ),
        (fixtures.join("inv_freq_tables.json"), "golden.json"),
        (fixtures.join("pictures/rgb_8.png"), "picture.png"),
    ] {
        fs::copy(&from, at(to)).unwrap_or_else(|error| panic!("{}: {error}", from.display()));
    }
    let trained = ended(TRAIN, &folder).expect("it ends");
    assert!(trained.status.success(), "{}", text(&trained.stderr));
    let record = "{\"messages\": [{\"role\": \"user\", \"content\": \"<image>What?\"}, \
                  {\"role\": \"assistant\", \"content\": \"red\"}], \"images\": [\"picture.png\"]}\n";
    fs::write(at("data.jsonl"), record).expect("writes");
    fs::write(at("val.jsonl"), record).expect("writes");
    folder
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).expect("creates");
    for entry in fs::read_dir(from).expect("a folder") {
        let path = entry.expect("an entry").path();
        let to = to.join(path.file_name().expect("a name"));
        match path.is_dir() {
            true => copy(&path, &to),
            false => drop(fs::copy(&path, &to).expect("copies")),
        }
    }
}

/// The output of a command that ends by itself, else none.
fn ended(arguments: &str, folder: &Path) -> Option<Output> {
    let arguments: Vec<&str> = arguments.split(' ').collect();
    let mut child = command(&arguments)
        .current_dir(folder)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program starts");
    let started = Instant::now();
    while child.try_wait().expect("its state").is_none() {
        if started.elapsed() > HANG {
            child.kill().expect("it is ours");
            child.wait().expect("it ends");
            return None;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Some(child.wait_with_output().expect("its output"))
}

#[test]
fn no_input_is_waited_for_or_read_without_end() {
    let folder = inputs();
    let mut wrong = Vec::new();
    for (file, away, arguments, words) in FILES {
        let path = folder.join(file);
        let name = path
            .file_name()
            .expect("a name")
            .to_string_lossy()
            .into_owned();
        let hidden: Vec<PathBuf> = away
            .iter()
            .map(|name| folder.join(name))
            .chain([path.clone()])
            .collect();
        let aside = |path: &Path| path.with_extension("aside");
        for path in hidden.iter().filter(|path| path.exists()) {
            fs::rename(path, aside(path)).expect("renames");
        }
        for (kind, put) in KINDS {
            put(&path);
            let row = format!("{file} as {kind}: mrope {arguments}");
            match ended(arguments, &folder) {
                None => wrong.push(format!("{row}\n  no end after {HANG:?}")),
                Some(output) => {
                    let said = text(&output.stdout) + &text(&output.stderr);
                    let is_refusal = |line: &&str| {
                        let named = *words != NO_FILE || line.contains(&name);
                        named && words.split('|').any(|words| line.contains(words))
                    };
                    let refusals = said.lines().filter(is_refusal).count();
                    if (output.status.code(), refusals) != (Some(1), 1) {
                        wrong.push(format!("{row}\n  {}: {said}", output.status));
                    }
                }
            }
            fs::remove_file(&path)
                .or_else(|_| fs::remove_dir(&path))
                .expect("removes");
        }
        for path in hidden.iter().filter(|path| aside(path).exists()) {
            fs::rename(aside(path), path).expect("renames");
        }
    }
    assert!(
        wrong.is_empty(),
        "{} of {} rows x kinds:\n{}",
        wrong.len(),
        FILES.len() * KINDS.len(),
        wrong.join("\n")
    );
}
