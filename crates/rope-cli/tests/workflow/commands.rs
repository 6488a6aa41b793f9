//! The commands of the table: each runs `mrope` for a cell and gives its value beside a reference.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::{Map, Value};

use super::reference::{
    digest, expected, fixtures, json_of, merged, model, records, round, tensors,
};
use super::{Cell, Outcome};
use crate::program::{command, objects, text};

/// As tests/fixtures/generate/workflow.py trains, in several micro-batches.
const FIXED: &str = "--schedule constant --warmup 0 --weight-decay 0 --seed 11 --micro-tokens 160";
const STEPS: usize = 4;
/// Steps that a loss scale of 65,536 may cost before it is small enough for a family in f16.
const SKIPPED: [(&str, usize); 2] = [("qwen3_5", 8), ("qwen3_moe", 1)];
/// Rows of families whose states amplify rounding, and of all others (no name): precision; the
/// largest relative differences of losses, of the first norm, and of all norms; margins of greedy
/// tokens, relative to the largest logit, that rounding may reverse (torch's own bf16 moves those of
/// GLM by 3.3e-2, and reverses 0.108 of Qwen3.5). Updates amplify rounding: the
/// norms of Qwen3.5 in torch differ by up to 1.0 between bf16 and f32, so its first norm is the check.
/// With experts, rounding sends a token to others: torch's own losses in bf16 are 2e-2 from its f32,
/// first norms 4.3e-2, norms 0.13; in f16 6.5e-3, 2.1e-3 and 2.7e-2; with groups of experts 4e-2,
/// 3.6e-2 and 0.47; in f16 4.9e-3, 6.8e-4 and 0.10.
const BOUNDS: [(&str, &str, [f64; 4]); 13] = [
    ("qwen3_5_moe", "f32", [2e-5, 1e-4, 2e-3, 0.0]),
    ("qwen3_moe", "bf16", [1e-2, 5e-2, 0.15, 0.1]),
    ("qwen3_moe", "f16", [1e-2, 5e-3, 0.1, 2e-3]),
    ("qwen3_vl_moe", "bf16", [1e-2, 5e-2, 0.15, 0.1]),
    ("qwen3_vl_moe", "f16", [1e-2, 5e-3, 0.1, 2e-3]),
    ("glm4v_moe", "bf16", [3e-2, 5e-2, 0.5, 0.1]),
    ("glm4v_moe", "f16", [5e-3, 5e-3, 0.1, 2e-3]),
    ("qwen3_5", "f32", [5e-6, 1e-5, 3e-4, 0.0]),
    ("qwen3_5", "bf16", [1e-2, 5e-2, 1.0, 1e-1]),
    ("qwen3_5", "f16", [1e-3, 5e-3, 8e-2, 2e-3]),
    ("", "f32", [5e-6, 5e-6, 1e-4, 0.0]),
    ("", "bf16", [5e-3, 2e-2, 2e-2, 3e-2]),
    ("", "f16", [1e-3, 5e-3, 5e-3, 2e-3]),
];
/// Planned and counted peaks differ at most so much.
const PLANNED: f64 = 0.05;
/// The factor between the tiny models and those whose memory is counted.
const WIDER: u64 = 4;
const STOPPED_STEPS: usize = 8;

pub(super) fn program(arguments: &str) -> Command {
    let arguments: Vec<&str> = arguments.split_whitespace().collect();
    let mut command = command(&arguments);
    command.current_dir(fixtures().join("workflow"));
    command
}

/// Output and messages of a run that succeeds.
pub(super) fn done(arguments: &str) -> Result<(Vec<u8>, String), String> {
    ended(&mut program(arguments), arguments)
}

/// As [`done`], of a program with these arguments.
pub(super) fn ended(program: &mut Command, arguments: &str) -> Result<(Vec<u8>, String), String> {
    let output = program.output().expect("the program starts");
    let told = text(&output.stderr);
    if output.status.success() {
        return Ok((output.stdout, told));
    }
    let last: Vec<&str> = told.lines().rev().take(2).collect();
    Err(format!(
        "`mrope {arguments}` ends with {:?}: {}",
        output.status.code(),
        last.join(" / ")
    ))
}

fn log(out: &Path) -> Vec<Map<String, Value>> {
    let log = std::fs::read(out.join("log.jsonl")).expect("a log");
    let lines = objects(&log).into_iter().map(|line| match line {
        Value::Object(line) => line,
        other => panic!("{other}"),
    });
    lines.collect()
}

/// The options that train all parts of a model.
fn whole(cell: &Cell) -> &'static str {
    match cell.sees() {
        true => "--full --parts tower,merger,decoder",
        false => "--full",
    }
}

/// The option of the validation data.
fn validation(cell: &Cell) -> &'static str {
    match cell.sees() {
        true => "--val pictures.jsonl",
        false => "--val text.jsonl",
    }
}

fn all_data(cell: &Cell, times: usize) -> String {
    let data = format!("--data {}.jsonl ", cell.data).repeat(times);
    let batch = times * records(cell).len();
    format!("{data}--batch {batch} --precision {}", cell.precision)
}

/// Steps that overflow before one is taken, at most.
fn skipped(cell: &Cell) -> usize {
    let mut rows = SKIPPED.iter();
    let row = rows.find(|(family, _)| cell.family.starts_with(family));
    row.filter(|_| cell.precision == "f16")
        .map_or(0, |(_, steps)| *steps)
}

fn bounds(cell: &Cell) -> [f64; 4] {
    let row = BOUNDS.iter().find(|(family, precision, _)| {
        *precision == cell.precision && cell.family.starts_with(family)
    });
    row.expect("a row of each precision").2
}

/// The largest relative difference.
fn apart(found: &[Value], expected: &[Value]) -> f64 {
    let each = found.iter().zip(expected).map(|(found, expected)| {
        let (found, expected) = (found.as_f64(), expected.as_f64().expect("a number"));
        found.map_or(f64::INFINITY, |found| (found / expected - 1.0).abs())
    });
    each.fold(
        0.0,
        |most: f64, x| if x > most || x.is_nan() { x } else { most },
    )
}

pub(super) fn train_adapters(cell: &Cell) -> Result<Outcome, String> {
    train(cell, "lora", "--rank 4 --alpha 8 --learning-rate 2e-3")
}

pub(super) fn train_whole(cell: &Cell) -> Result<Outcome, String> {
    train(
        cell,
        "full",
        &format!("{} --learning-rate 2e-4", whole(cell)),
    )
}

fn train(cell: &Cell, mode: &str, options: &str) -> Result<Outcome, String> {
    let (folder, out) = (model(cell, true, |_| ()), cell.fresh("out"));
    done(&format!(
        "finetune {} {} --steps {} {FIXED} {} {options} --out {}",
        folder.display(),
        all_data(cell, 1),
        STEPS + skipped(cell),
        validation(cell),
        out.display()
    ))?;
    let log = log(&out);
    let curve = &expected(cell, "curves")[cell.data][mode][cell.precision];
    let numbers = |name: &str| curve[name].as_array().expect("numbers").clone();
    // Which steps overflow depends on the sums in 16 bits. A skipped one changes nothing.
    let is_step = |line: &&Map<String, Value>| line.contains_key("loss");
    let steps = log.iter().filter(is_step);
    let taken: Vec<_> = steps.filter(|line| !line.contains_key("skipped")).collect();
    let column = |name: &str| -> Vec<Value> {
        let values = taken.iter().map(|line| line[name].clone());
        values.take(STEPS).collect()
    };
    let validations: Vec<&Value> = log
        .iter()
        .filter_map(|line| line.get("validation_loss"))
        .collect();
    if taken.len() < STEPS || validations.len() != 1 {
        return Err(format!(
            "{} steps, {} validations",
            taken.len(),
            validations.len()
        ));
    }
    let (mut found, mut known) = (column("loss"), numbers("losses"));
    // Else it is the loss after other steps.
    if taken.len() == STEPS {
        found.push(validations[0].clone());
        known.push(curve["validation"].clone());
    }
    assert_eq!(found.len(), known.len());
    let [loss_bound, first_bound, norm_bound, _] = bounds(cell);
    let (norms, known_norms) = (column("gradient_norm"), numbers("norms"));
    let loss = apart(&found, &known);
    let (first, norm) = (
        apart(&norms[..1], &known_norms),
        apart(&norms, &known_norms),
    );
    Ok(Outcome {
        value: format!("loss {loss:.1e}, first norm {first:.1e}, norm {norm:.1e} apart"),
        reference: "transformers, PEFT, torch",
        bound: format!("{loss_bound:.0e}, {first_bound:.0e}, {norm_bound:.0e}"),
        holds: loss < loss_bound && first < first_bound && norm < norm_bound,
    })
}

/// More heads and channels, of the same size each.
fn widen(config: &mut Value) {
    // In Qwen2-VL's tower it is the width of the decoder.
    let width = match config["model_type"].as_str() {
        Some("qwen2_vl") => "hidden_size",
        _ => "out_hidden_size",
    };
    let of_text = [
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "linear_num_key_heads",
        "linear_num_value_heads",
        "moe_intermediate_size",
        "shared_expert_intermediate_size",
    ];
    // The decoder's are at the top in a model of text alone.
    let of_text = of_text.map(|name| [format!("/text_config/{name}"), format!("/{name}")]);
    let of_tower = format!("/vision_config/{width}");
    for path in of_text.into_iter().flatten().chain([of_tower]) {
        if let Some(value) = config.pointer_mut(&path) {
            *value = Value::from(value.as_u64().expect("a number") * WIDER);
        }
    }
}

/// A size as the program prints it.
fn bytes(text: &str) -> Option<f64> {
    let (number, unit) = text.trim().split_once(' ')?;
    let unit = match unit {
        "B" => 1.0,
        "KiB" => 1024.0,
        "MiB" => 1024.0 * 1024.0,
        "GiB" => 1024.0 * 1024.0 * 1024.0,
        _ => return None,
    };
    Some(number.parse::<f64>().ok()? * unit)
}

/// Adapters and the whole model; the worse of both.
pub(super) fn plan(cell: &Cell) -> Result<Outcome, String> {
    let folder = model(cell, false, widen);
    let sees = json_of(&folder.join("config.json"))["vision_config"].is_object();
    // Without a tower, a step needs so little that what is not planned, 0.4 MiB whatever the tokens,
    // would be 5 % of it.
    let data = all_data(cell, if sees { 1 } else { 6 });
    let mut worst = (0.0, String::new());
    for (mode, options) in [("adapters", ""), ("whole", whole(cell))] {
        let out = cell.fresh(mode);
        let (_, told) = done(&format!(
            "finetune {} --random-weights {} {options} --steps {} --warmup 0 --out {}",
            folder.display(),
            data,
            2 + skipped(cell),
            out.display()
        ))?;
        let line = told
            .lines()
            .find_map(|line| line.split_once("peak memory of a step: "));
        let sizes = line.and_then(|(_, rest)| {
            let (counted, rest) = rest.split_once(" counted, ")?;
            Some((bytes(counted)?, bytes(rest.strip_suffix(" planned")?)?))
        });
        let (counted, planned) = sizes.ok_or_else(|| format!("no peak in {told:?}"))?;
        let apart = planned / counted - 1.0;
        let size = counted / f64::from(1 << 20);
        let value = format!("{mode} planned {:+.1} % of {size:.0} MiB", 100.0 * apart);
        if apart.abs() >= worst.0 {
            worst = (apart.abs(), value);
        }
    }
    Ok(Outcome {
        value: worst.1,
        reference: "counted bytes",
        bound: format!("{:.0} %", 100.0 * PLANNED),
        holds: worst.0 < PLANNED,
    })
}

/// A model that is trained until it knows the answers gives them.
pub(super) fn samples(cell: &Cell) -> Result<Outcome, String> {
    let (folder, out) = (model(cell, true, |_| ()), cell.fresh("out"));
    let (records, all) = (records(cell), all_data(cell, 1));
    done(&format!(
        "finetune {} {all} {} --steps 60 --schedule linear --warmup 0 --learning-rate 2e-3 \
         --samples {} --out {}",
        folder.display(),
        whole(cell),
        records.len(),
        out.display()
    ))?;
    let log = log(&out);
    let last = log.iter().rev().find_map(|line| line.get("answers"));
    let answers = last.and_then(Value::as_array).ok_or("no answers")?;
    let is_answer = |answer: &&Value, turn: &dyn Fn(&[&Value]) -> Value, key: &str| {
        let line = answer["line"].as_u64().expect("a line") as usize;
        let turns: Vec<&Value> = records[line - 1]["messages"]
            .as_array()
            .expect("turns")
            .iter()
            .filter(|turn| turn["role"] == "assistant")
            .collect();
        answer[key] == turn(&turns)
    };
    let first = |turns: &[&Value]| turns[0]["content"].clone();
    let end = |turns: &[&Value]| turns[turns.len() - 1]["content"].clone();
    let right = answers
        .iter()
        .filter(|a| is_answer(a, &first, "found"))
        .count();
    let (given, _) = done(&format!(
        "generate {} --data {}.jsonl --precision {} --max-new 40 --json",
        out.join("model").display(),
        cell.data,
        cell.precision
    ))?;
    let generated = objects(&given);
    let equal = generated
        .iter()
        .filter(|a| is_answer(a, &end, "answer"))
        .count();
    let count = records.len();
    Ok(Outcome {
        value: format!("{right} answers right, {equal} of generate"),
        reference: "the labels",
        bound: format!("{count} of {count}"),
        holds: right == count && equal == count,
    })
}

/// Greedy tokens without and with PEFT's adapter. In 16 bits, the first other token of an answer has a
/// margin that rounding may reverse.
pub(super) fn generate(cell: &Cell) -> Result<Outcome, String> {
    let folder = model(cell, true, |_| ());
    let adapter = fixtures().join(format!("finetune/{}_tiny", cell.family));
    let adapter = format!("--adapter {}", adapter.display());
    let [.., margin] = bounds(cell);
    let (mut all, mut equal, mut other) = (0, 0, 0.0_f64);
    for (name, options) in [("plain", ""), ("adapter", adapter.as_str())] {
        let rows = expected(cell, "greedy")[cell.data][name]
            .as_array()
            .expect("rows");
        let (given, _) = done(&format!(
            "generate {} --data {}.jsonl --precision {} --max-new 12 --json {options}",
            folder.display(),
            cell.data,
            cell.precision
        ))?;
        let given = objects(&given);
        if given.len() != rows.len() {
            return Err(format!("{} answers to {} prompts", given.len(), rows.len()));
        }
        for (given, row) in given.iter().zip(rows) {
            let tokens = row["tokens"].as_array().expect("tokens");
            let found = given["tokens"].as_array().expect("tokens");
            let same = found.iter().zip(tokens).take_while(|(a, b)| a == b).count();
            all += tokens.len();
            equal += same;
            if same < tokens.len() {
                let of_other = row["margins"][same].as_f64().expect("a margin");
                other = other.max(of_other);
            } else if found.len() != tokens.len() {
                other = f64::INFINITY;
            }
        }
    }
    Ok(Outcome {
        value: format!("{equal} of {all} tokens equal, others from a margin of {other:e}"),
        reference: "transformers, PEFT",
        bound: format!("margin {margin:e}"),
        holds: equal > 0 && other <= margin,
    })
}

/// The mean log-probability of the answers is the negative of torch's first loss.
pub(super) fn score(cell: &Cell) -> Result<Outcome, String> {
    let folder = model(cell, true, |_| ());
    let (given, _) = done(&format!(
        "score {} --data {}.jsonl --precision {} --batch 2 --json",
        folder.display(),
        cell.data,
        cell.precision
    ))?;
    let numbers = objects(&given).into_iter().flat_map(|row| {
        let numbers = row["log_probabilities"].as_array().cloned();
        numbers.expect("log-probabilities")
    });
    let numbers: Vec<f64> = numbers.map(|x| x.as_f64().expect("a number")).collect();
    let mean = numbers.iter().sum::<f64>() / numbers.len() as f64;
    let curve = &expected(cell, "curves")[cell.data]["lora"][cell.precision];
    let loss = curve["losses"][0].as_f64().expect("a loss");
    let (apart, [within, ..]) = ((mean / -loss - 1.0).abs(), bounds(cell));
    Ok(Outcome {
        value: format!("{apart:.1e} from the loss"),
        reference: "torch",
        bound: format!("{within:.0e}"),
        holds: apart <= within,
    })
}

/// The record of transformers is in f32; `compare` knows the rounding of ours.
pub(super) fn compare(cell: &Cell) -> Result<Outcome, String> {
    let (folder, out) = (model(cell, true, |_| ()), cell.fresh("out"));
    // In f16 some gradients overflow at first, and those steps change no weight.
    let step = if cell.precision == "f16" { 12 } else { 1 };
    done(&format!(
        "finetune {} {} {} --steps {step} --warmup 0 --learning-rate 1e-12 --record-step {step} \
         --out {}",
        folder.display(),
        all_data(cell, 1),
        whole(cell),
        out.display()
    ))?;
    // In f16 some of their gradients overflow.
    let precision = if cell.precision == "bf16" {
        "bf16"
    } else {
        "f32"
    };
    let theirs = format!("workflow/{}/record-{precision}.safetensors", cell.family);
    let theirs = fixtures().join(theirs);
    let ours = out.join(format!("step-{step}.safetensors"));
    let arguments = format!("compare {} {} --json", theirs.display(), ours.display());
    let output = program(&arguments).output().expect("the program starts");
    let found = objects(&output.stdout)
        .pop()
        .ok_or_else(|| text(&output.stderr))?;
    let items = found["items"].as_array().map_or(0, Vec::len);
    let has = |name: &str| {
        let names = found["items"].as_array().into_iter().flatten();
        names
            .filter_map(|item| item["name"].as_str())
            .any(|item| item.contains(name))
    };
    let value = match found["suspicion"].is_null() {
        true => format!("{items} items equal apart from rounding"),
        false => format!("{}", found["suspicion"]),
    };
    let has_all = has("logits") && has("visual.") == cell.sees();
    Ok(Outcome {
        value,
        reference: "transformers",
        bound: "no suspicion".to_owned(),
        holds: found["equal"] == true && output.status.success() && has_all,
    })
}

pub(super) fn merge(cell: &Cell) -> Result<Outcome, String> {
    let (folder, out) = (model(cell, true, |_| ()), cell.fresh("out"));
    round(&folder, cell.precision);
    let adapter = fixtures().join(format!("finetune/{}_tiny", cell.family));
    done(&format!(
        "merge {} --adapter {} --out {}",
        folder.display(),
        adapter.display(),
        out.display()
    ))?;
    let found = tensors(&out.join("model.safetensors"));
    let expected = merged(cell);
    let equal = expected.iter().filter(|(name, value)| {
        let ours = found.iter().filter(|tensor| {
            let decoder = tensor.name.find("layers.").map(|at| &tensor.name[at..]);
            decoder == Some(name.as_str())
        });
        ours.map(|tensor| digest(&tensor.bytes))
            .any(|ours| *value == &ours)
    });
    let (equal, count) = (equal.count(), expected.len());
    Ok(Outcome {
        value: format!("{equal} weights equal in their bits"),
        reference: "PEFT's merge_and_unload",
        bound: format!("{count} of {count}"),
        holds: equal == count && count > 0,
    })
}

/// The log without speed and memory, and the adapter.
fn result(out: &Path) -> (Vec<Map<String, Value>>, Vec<u8>) {
    let mut log = log(out);
    for line in &mut log {
        line.remove("tokens_per_second");
        line.remove("memory_bytes");
    }
    let adapter = out.join("adapter/adapter_model.safetensors");
    (log, std::fs::read(adapter).expect("an adapter"))
}

/// A killed run, continued, and one that is not killed.
pub(super) fn resume(cell: &Cell) -> Result<Outcome, String> {
    let folder = model(cell, true, |_| ());
    let [whole, killed] = ["whole", "killed"].map(|name| cell.fresh(name));
    let arguments = |out: &Path| {
        format!(
            "finetune {} --data {}.jsonl --batch 2 --precision {} --dropout 0.1 --steps \
             {STOPPED_STEPS} --checkpoint-every 1 {} --validate-every 4 --out {}",
            folder.display(),
            cell.data,
            cell.precision,
            validation(cell),
            out.display()
        )
    };
    done(&arguments(&whole))?;
    let mut child = program(&arguments(&killed))
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("the program starts");
    while !killed.join("checkpoint-00000002").exists()
        && child.try_wait().is_ok_and(|x| x.is_none())
    {
        std::thread::sleep(Duration::from_millis(1));
    }
    child
        .kill()
        .map_err(|error| format!("it ended before it was killed: {error}"))?;
    let ended = child.wait().expect("it ends");
    if ended.code().is_some() {
        return Err(format!("it ended before it was killed: {ended}"));
    }
    let at = log(&killed)
        .iter()
        .filter(|line| line.contains_key("loss"))
        .count();
    done(&format!("{} --resume", arguments(&killed)))?;
    let is_equal = result(&whole) == result(&killed);
    let value = if is_equal { "equal" } else { "other" };
    Ok(Outcome {
        value: format!("{value} log and adapter, killed at step {at}"),
        reference: "the run without a stop",
        bound: "bytes".to_owned(),
        holds: is_equal && (1..STOPPED_STEPS).contains(&at),
    })
}
