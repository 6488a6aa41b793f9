//! Dumps of rotations with known mistakes: `mrope verify` names the mistake, `mrope gradcheck`
//! finds wrong gradients. The rotations are written out here, in plain loops.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use crate::program::{self, command, objects, says, text};
use safetensors::tensor::{Dtype, TensorView};
use serde_json::Value;

const TOKENS: usize = 6;
const HEADS: usize = 2;
const HEAD_DIM: usize = 16;
const PAIRS: usize = HEAD_DIM / 2;
const SECTIONS: [usize; 3] = [4, 2, 2];
const THETA: f64 = 1e4;
const ROTATION: &str = r#"{"head_dim": 16, "pairing": "half", "theta": 10000.0,
    "axis_layout": {"contiguous": [4, 2, 2]}}"#;

/// Time, height and width of two words, an image of two by two, and a word.
const POSITIONS: [[i64; TOKENS]; 3] = [[3, 4, 5, 5, 5, 9], [3, 4, 5, 5, 6, 9], [3, 4, 5, 6, 6, 9]];

type Axis = fn(usize) -> usize;

fn contiguous(pair: usize) -> usize {
    let ends = [SECTIONS[0], SECTIONS[0] + SECTIONS[1]];
    ends.iter().filter(|end| pair >= **end).count()
}

/// Pair j has axis j mod 3 while that axis has pairs left, else axis 0: T H W T H W T T.
fn striped(pair: usize) -> usize {
    let axis = pair % 3;
    if axis > 0 && pair < 3 * SECTIONS[axis] {
        axis
    } else {
        0
    }
}

fn half(pair: usize) -> [usize; 2] {
    [pair, pair + PAIRS]
}

fn adjacent(pair: usize) -> [usize; 2] {
    [2 * pair, 2 * pair + 1]
}

/// A rotation as a program may have it.
#[derive(Clone, Copy)]
struct Rotation {
    axis: Axis,
    members: fn(usize) -> [usize; 2],
    theta: f64,
    sign: f64,
    /// Factor on the products with sin.
    sin: f64,
}

const RIGHT: Rotation = Rotation {
    axis: contiguous,
    members: half,
    theta: THETA,
    sign: 1.0,
    sin: 1.0,
};

impl Rotation {
    /// `[heads, tokens, head_dim]`.
    fn of(&self, x: &[f64]) -> Vec<f64> {
        let mut y = x.to_vec();
        for (row, (x, y)) in x.chunks(HEAD_DIM).zip(y.chunks_mut(HEAD_DIM)).enumerate() {
            for pair in 0..PAIRS {
                let position = POSITIONS[(self.axis)(pair)][row % TOKENS] as f64;
                let angle = self.sign * position * self.theta.powf(-(pair as f64) / PAIRS as f64);
                let [a, b] = (self.members)(pair);
                let sin = self.sin * angle.sin();
                y[a] = x[a] * angle.cos() - x[b] * sin;
                y[b] = x[a] * sin + x[b] * angle.cos();
            }
        }
        y
    }

    fn back(&self, x: &[f64]) -> Vec<f64> {
        Self {
            sign: -self.sign,
            ..*self
        }
        .of(x)
    }
}

/// Values of order 1, exact in bf16, from a linear congruential generator.
fn values(seed: u32) -> Vec<f64> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (f64::from(state >> 25) - 63.5) / 64.0
    };
    (0..HEADS * TOKENS * HEAD_DIM).map(|_| next()).collect()
}

/// A file of q alone; without `dq` the framework gave none.
fn dump(name: &str, q_out: &[f64], dq: Option<&[f64]>) -> PathBuf {
    let (q, gq) = (values(1), values(2));
    let mut tensors = vec![("q", &q[..]), ("gq", &gq), ("q_out", q_out)];
    tensors.extend(dq.map(|dq| ("dq", dq)));
    write(name, [1, HEADS, TOKENS, HEAD_DIM], &tensors)
}

/// A file of tensors of one shape, [batch, heads, tokens, head_dim].
fn write(name: &str, shape: [usize; 4], tensors: &[(&str, &[f64])]) -> PathBuf {
    let ids: Vec<u8> = POSITIONS
        .iter()
        .flat_map(|axis| &axis[..shape[2]])
        .flat_map(|id| id.to_le_bytes())
        .collect();
    let mut entries = vec![(
        "position_ids".to_owned(),
        Dtype::I64,
        vec![3, shape[2]],
        ids,
    )];
    for (name, values) in tensors {
        let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        entries.push((format!("{name}.f64"), Dtype::F64, shape.to_vec(), bytes));
    }
    let views = entries.iter().map(|(name, dtype, shape, bytes)| {
        (
            name,
            TensorView::new(*dtype, shape.clone(), bytes).expect("sizes fit"),
        )
    });
    let metadata = HashMap::from([("rotation".to_owned(), ROTATION.to_owned())]);
    let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("dump_{name}.safetensors"));
    safetensors::serialize_to_file(views, Some(metadata), &file).expect("file is written");
    file
}

/// The exit code of a command on a file, and its lines of JSON.
fn mrope(command: &str, file: &Path) -> (i32, Vec<Value>) {
    let output = program::mrope(&[command.as_ref(), "--json".as_ref(), file.as_os_str()]);
    let code = output.status.code().expect("it ends by itself");
    (code, objects(&output.stdout))
}

/// The diagnosis of a tensor by `mrope verify`: the same in every element type.
fn diagnosis(rows: &[Value], tensor: &str) -> Option<String> {
    let mut tensor_rows = rows.iter().filter(|row| row["tensor"] == tensor);
    let said = tensor_rows.next().expect("it is compared")["diagnosis"].clone();
    assert!(
        tensor_rows.all(|row| row["diagnosis"] == said),
        "{tensor}: {said}"
    );
    said.as_str().map(str::to_owned)
}

/// A dump, and the expected finding on q_out and on dq; `None` for none.
fn check(name: &str, q_out: &[f64], dq: &[f64], says: [Option<&str>; 2], is_gradient: bool) {
    let file = dump(name, q_out, Some(dq));
    let (code, rows) = mrope("verify", &file);
    assert_eq!(code, i32::from(says != [None, None]), "{name}");
    for (tensor, says) in ["q_out", "dq"].into_iter().zip(says) {
        assert_eq!(diagnosis(&rows, tensor).as_deref(), says, "{name}");
    }
    let (code, rows) = mrope("gradcheck", &file);
    assert_eq!(
        (code, rows.len()),
        (i32::from(!is_gradient), 1),
        "{name}: {rows:?}"
    );
    assert_eq!(rows[0]["pass"], is_gradient, "{name}");
}

#[test]
fn a_wrong_rotation_is_named() {
    let (q, gq) = (values(1), values(2));
    let others: [(&str, Rotation, &str); 6] = [
        (
            "adjacent",
            Rotation {
                members: adjacent,
                ..RIGHT
            },
            "pairing adjacent, not half",
        ),
        (
            "striped",
            Rotation {
                axis: striped,
                ..RIGHT
            },
            "axes striped, not contiguous",
        ),
        (
            "one_axis",
            Rotation {
                axis: |_| 0,
                ..RIGHT
            },
            "the positions of axis 0 on all axes",
        ),
        (
            "sign",
            Rotation {
                sign: -1.0,
                ..RIGHT
            },
            "the angles of the opposite sign",
        ),
        (
            "theta",
            Rotation {
                theta: 1e6,
                ..RIGHT
            },
            "theta 1000000",
        ),
        (
            "both",
            Rotation {
                members: adjacent,
                axis: striped,
                ..RIGHT
            },
            "axes striped, not contiguous, and pairing adjacent, not half",
        ),
    ];
    check("right", &RIGHT.of(&q), &RIGHT.back(&gq), [None, None], true);
    for (name, other, what) in others {
        let q_out = format!("q_out was computed with {what}");
        let dq = format!("dq is right for a rotation with {what}");
        check(
            name,
            &other.of(&q),
            &other.back(&gq),
            [Some(&q_out), Some(&dq)],
            true,
        );
    }
    let nothing = Some("q_out is q: nothing is rotated");
    check("nothing", &q, &RIGHT.back(&gq), [nothing, None], false);
    // A mistake that nobody has made before has no name.
    let unknown = Rotation {
        theta: 77.0,
        ..RIGHT
    };
    let file = dump("unknown", &unknown.of(&q), Some(&unknown.back(&gq)));
    let (code, rows) = mrope("verify", &file);
    assert_eq!(
        (code, diagnosis(&rows, "q_out"), diagnosis(&rows, "dq")),
        (1, None, None)
    );
}

#[test]
fn a_wrong_gradient_is_named() {
    let (q_out, gq) = (RIGHT.of(&values(1)), values(2));
    let right = RIGHT.back(&gq);
    let mut lost = right.clone();
    lost[TOKENS * HEAD_DIM..].fill(0.0);
    let other = Rotation {
        members: adjacent,
        ..RIGHT
    }
    .back(&gq);
    let cos_products = Rotation { sin: 0.0, ..RIGHT }.of(&gq);
    let gradients: [(&str, &[f64], &str); 6] = [
        (
            "zero",
            &vec![0.0; gq.len()],
            "dq is zero: the gradient of q is lost",
        ),
        ("unrotated", &gq, "dq is gq: the backward rotates nothing"),
        (
            "forward",
            &RIGHT.of(&gq),
            "dq is gq rotated forward: the gradient rotates backwards, with -sin",
        ),
        (
            "of_cos",
            &cos_products,
            "dq has the products with cos alone: the gradient through those with sin (the rotated \
             half) is lost",
        ),
        (
            "one_head",
            &lost,
            "dq is zero in 6 of 12 heads of tokens, and right in the others",
        ),
        (
            "other",
            &other,
            "dq is the gradient of a rotation with pairing adjacent, not half; q_out was rotated \
             otherwise",
        ),
    ];
    for (name, dq, says) in gradients {
        check(name, &q_out, dq, [None, Some(says)], false);
    }
}

#[test]
fn rounding_to_16_bits_is_told_from_a_mistake() {
    let rounded = |values: Vec<f64>| -> Vec<f64> {
        let round = |x: f64| half::bf16::from_f64(x).to_f64();
        values.into_iter().map(round).collect()
    };
    let (q_out, dq) = (RIGHT.of(&values(1)), RIGHT.back(&values(2)));
    let file = dump("rounded", &rounded(q_out), Some(&rounded(dq)));
    let (code, rows) = mrope("verify", &file);
    // In bf16 itself the file agrees.
    let mut reasons = rows.iter().filter_map(|row| row["diagnosis"].as_str());
    let said = reasons.next().expect("it differs");
    assert!(
        code == 1 && said.contains("as roundings to 16 bits do"),
        "{said}"
    );
    let (code, rows) = mrope("gradcheck", &file);
    let said = rows[0]["problem"].as_str().expect("it says why");
    assert!(
        code == 1 && said.contains("q_out was rounded to bf16"),
        "{said}"
    );
}

#[test]
fn a_gradient_that_the_framework_did_not_give_is_lost() {
    let file = dump("none", &RIGHT.of(&values(1)), None);
    for (command, field) in [("verify", "diagnosis"), ("gradcheck", "problem")] {
        let (code, rows) = mrope(command, &file);
        assert_eq!(code, 1);
        // The operator's result for q is right, in every type.
        let (passed, failed): (Vec<_>, Vec<_>) = rows.iter().partition(|row| row["pass"] == true);
        assert!(passed.iter().all(|row| row["tensor"] == "q_out"));
        assert_eq!(
            (passed.len(), failed.len()),
            (if command == "verify" { 4 } else { 0 }, 1)
        );
        let said = failed[0][field].as_str().expect("it says why");
        let cause = "no gradient: the operator that wrote this file has none";
        assert!(said.starts_with(cause), "{said}");
        assert!(said.contains("the gradient of q is lost"), "{said}");
    }
    let text = report(&[&file]).1;
    assert!(text.contains("missing") && !text.contains("inf"), "{text}");
}

/// The exit code of `mrope verify`, and its report.
fn report(paths: &[&Path]) -> (i32, String) {
    let output = command(&["verify"]).args(paths).output();
    let output = output.expect("the program starts");
    let code = output.status.code().expect("it ends by itself");
    (code, text(&output.stdout))
}

#[test]
fn a_report_begins_with_the_diagnosis() {
    let other = Rotation {
        theta: 1e6,
        ..RIGHT
    };
    let file = dump(
        "report",
        &other.of(&values(1)),
        Some(&other.back(&values(2))),
    );
    let (code, text) = report(&[&file]);
    assert_eq!(code, 1);
    let at = |part: &str| {
        text.find(part)
            .unwrap_or_else(|| panic!("{part} in {text}"))
    };
    let order = ["diagnosis: q_out", "FAIL", "q_out at ["].map(at);
    assert!(order.is_sorted(), "{text}");
    // One element of each tensor, and no more digits than say something.
    assert_eq!(text.matches(": computed").count(), 2, "{text}");
    assert!(text.contains(">1e6"), "{text}");
}

#[test]
fn a_folder_does_not_pass_by_what_is_not_looked_at() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("dumps_folder");
    if folder.exists() {
        std::fs::remove_dir_all(&folder).expect("old folder goes");
    }
    std::fs::create_dir_all(folder.join("inner")).expect("folder is made");
    let right = dump(
        "folder",
        &RIGHT.of(&values(1)),
        Some(&RIGHT.back(&values(2))),
    );
    let whole = std::fs::read(right).expect("it reads");
    std::fs::write(folder.join("right.safetensors"), &whole).expect("it is written");
    assert_eq!(report(&[&folder]).0, 0);
    #[cfg(unix)]
    {
        let link = folder.join("link");
        std::os::unix::fs::symlink(folder.join("inner"), &link).expect("links");
        let (code, text) = report(&[&folder]);
        assert_eq!(code, 0);
        says(&text, "link: a link to a folder, which is not followed");
    }
    // A dump without metadata.
    let file = safetensors::SafeTensors::deserialize(&whole).expect("it parses");
    let bare = safetensors::serialize(file.tensors(), None).expect("it serialises");
    std::fs::write(folder.join("bare.safetensors"), bare).expect("it is written");
    let (code, text) = report(&[&folder]);
    assert_eq!(code, 1);
    assert!(text.contains("has no metadata \"model_type\""), "{text}");
}

/// The message about a file that is refused.
fn refused(command: &str, file: &Path) -> String {
    let (code, rows) = mrope(command, file);
    assert_eq!((code, rows.len()), (1, 1), "{file:?}: {rows:?}");
    assert_eq!(rows[0]["pass"], false);
    let field = ["error", "problem"].map(|field| rows[0][field].as_str());
    let said = field.into_iter().flatten().next();
    said.expect("it says why").to_owned()
}

#[test]
fn a_value_that_is_not_finite_excuses_no_gradient() {
    let (q, gq) = (values(1), values(2));
    let (q_out, wrong) = (RIGHT.of(&q), vec![123.0; q.len()]);
    let shape = [1, HEADS, TOKENS, HEAD_DIM];
    for (tensor, value, at) in [
        ("q", f64::INFINITY, 0),
        ("gq", f64::NEG_INFINITY, 17),
        ("q_out", f64::NAN, q.len() - 1),
    ] {
        let tensors = [("q", &q), ("gq", &gq), ("q_out", &q_out), ("dq", &wrong)];
        let tensors = tensors.map(|(name, values)| {
            let mut values = values.clone();
            if name == tensor {
                values[at] = value;
            }
            (name, values)
        });
        let tensors = tensors
            .each_ref()
            .map(|(name, values)| (*name, &values[..]));
        let said = refused("gradcheck", &write("not_finite", shape, &tensors));
        let [head, token, channel] = [
            at / (TOKENS * HEAD_DIM),
            at / HEAD_DIM % TOKENS,
            at % HEAD_DIM,
        ];
        let expected = format!(
            "tensor {tensor}.f64 holds {value} at [0, {head}, {token}, {channel}], expected finite"
        );
        assert!(said.contains(&expected), "{said}");
    }
}

#[test]
fn a_dump_without_a_sample_a_head_or_a_token_is_refused() {
    let full = [1, HEADS, TOKENS, HEAD_DIM];
    for axis in 0..3 {
        let mut shape = full;
        shape[axis] = 0;
        let tensors = ["q", "gq", "q_out", "dq"].map(|name| (name, &[][..]));
        let file = write(&format!("empty_{axis}"), shape, &tensors);
        for command in ["verify", "gradcheck"] {
            let said = refused(command, &file);
            says(&said, format!("has shape {shape:?}, expected at least one"));
        }
    }
}

#[test]
fn half_of_a_pair_is_not_passed_over() {
    let (q, gq) = (values(1), values(2));
    let (q_out, dq) = (RIGHT.of(&q), RIGHT.back(&gq));
    let shape = [1, HEADS, TOKENS, HEAD_DIM];
    let both = [("q", &q[..]), ("q_out", &q_out)];
    let with_gradient = [&both[..], &[("gq", &gq), ("dq", &dq)]].concat();
    for (name, tensors, missing) in [
        ("k_out", [&both[..], &[("k_out", &q_out)]].concat(), "k."),
        ("dq", [&both[..], &[("dq", &dq)]].concat(), "gq."),
        ("dk", [&with_gradient[..], &[("dk", &dq)]].concat(), "gk."),
    ] {
        let file = write(&format!("half_{name}"), shape, &tensors);
        let said = refused("verify", &file);
        says(&said, format!("has no tensor {missing}"));
        says(&said, format!("the comparison of {name} needs it"));
        if name == "dk" {
            let (code, rows) = mrope("gradcheck", &file);
            assert_eq!(code, 1, "{rows:?}");
        }
    }
}
