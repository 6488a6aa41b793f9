//! Dumps of other programs: causes that are named, and files that are refused or compared where
//! they were passed over. The rotations are written out here, in plain loops.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use half::{bf16, f16};
use rope_check::assert_is;
use rope_check::buffer::DType;
use rope_check::engine::host_engines;
use rope_check::golden::{Artifact, GoldenError, GoldenVectors, Row};
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};

/// A file as its parts.
#[derive(Clone, Default)]
struct File {
    metadata: HashMap<String, String>,
    tensors: BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>,
}

impl File {
    fn read(bytes: &[u8]) -> Self {
        let (_, header) = SafeTensors::read_metadata(bytes).expect("it parses");
        let tensors = SafeTensors::deserialize(bytes).expect("it parses");
        let part = |view: TensorView| (view.dtype(), view.shape().to_vec(), view.data().to_vec());
        Self {
            metadata: header.metadata().clone().unwrap_or_default(),
            tensors: tensors
                .tensors()
                .into_iter()
                .map(|(name, view)| (name, part(view)))
                .collect(),
        }
    }

    fn fixture(name: &str) -> Self {
        let folder = rope_check::fixtures().expect("the test runs in the workspace");
        Self::read(&std::fs::read(folder.join(name)).expect("fixture is there"))
    }

    fn state(mut self, key: &str, value: &str) -> Self {
        self.metadata.insert(key.to_owned(), value.to_owned());
        self
    }

    fn without(mut self, name: &str) -> Self {
        let removed = self.tensors.remove(name).is_some() | self.metadata.remove(name).is_some();
        assert!(removed, "{name} was there");
        self
    }

    fn ids(mut self, ids: &[i64], shape: &[usize]) -> Self {
        let bytes = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        let tensor = (Dtype::I64, shape.to_vec(), bytes);
        self.tensors.insert("position_ids".to_owned(), tensor);
        self
    }

    /// A tensor, rounded to the type that its name ends in.
    fn floats(mut self, name: &str, shape: &[usize], values: &[f64]) -> Self {
        let (_, suffix) = name.rsplit_once('.').expect("a type is in the name");
        let (dtype, bytes): (_, Vec<u8>) = match suffix {
            "f64" => (
                Dtype::F64,
                values.iter().flat_map(|x| x.to_le_bytes()).collect(),
            ),
            "f32" => (
                Dtype::F32,
                values
                    .iter()
                    .flat_map(|x| (*x as f32).to_le_bytes())
                    .collect(),
            ),
            "bf16" => (
                Dtype::BF16,
                values
                    .iter()
                    .flat_map(|x| bf16::from_f64(*x).to_le_bytes())
                    .collect(),
            ),
            other => panic!("{other} is not written"),
        };
        let tensor = (dtype, shape.to_vec(), bytes);
        self.tensors.insert(name.to_owned(), tensor);
        self
    }

    /// Changes an element of an f64 tensor.
    fn add(mut self, name: &str, at: usize, difference: f64) -> Self {
        let tensor = self.tensors.get_mut(name).expect("tensor is there");
        let element = &mut tensor.2.as_chunks_mut::<8>().0[at];
        *element = (f64::from_le_bytes(*element) + difference).to_le_bytes();
        self
    }

    fn bytes(&self) -> Vec<u8> {
        let views = self.tensors.iter().map(|(name, (dtype, shape, data))| {
            let view = TensorView::new(*dtype, shape.clone(), data).expect("data fits shape");
            (name, view)
        });
        let metadata = (!self.metadata.is_empty()).then(|| self.metadata.clone());
        safetensors::serialize(views, metadata).expect("parts serialise")
    }

    fn write(&self, name: &str) -> PathBuf {
        let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        std::fs::write(&file, self.bytes()).expect("file is written");
        file
    }

    /// All rows in f64 and f32, explained.
    fn rows(&self) -> Vec<Row> {
        let vectors = GoldenVectors::read(&self.bytes()).expect("file reads");
        let mut rows = vectors.lost_gradients();
        rows.extend(vectors.compare_angles().expect("angles compare"));
        for dtype in [DType::F64, DType::F32] {
            let compared = vectors.compare(&*host_engines()[0], dtype);
            rows.extend(compared.expect("engine runs"));
        }
        vectors.explain(&mut rows);
        rows
    }

    /// The diagnosis of a tensor in f64, which has to fail.
    fn diagnosis(&self, tensor: &str) -> Option<String> {
        let mut rows = self.rows().into_iter();
        let row = rows.find(|row| row.tensor == tensor).expect("it is there");
        assert!(!row.pass, "{row:?}");
        row.diagnosis
    }

    fn error(&self) -> String {
        let error = GoldenVectors::read(&self.bytes()).expect_err("it is refused");
        error.to_string()
    }
}

/// Values of order 1, exact in bf16, from a linear congruential generator.
fn values(seed: u32, count: usize) -> Vec<f64> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (f64::from(state >> 25) - 63.5) / 64.0
    };
    (0..count).map(|_| next()).collect()
}

const HEADS: usize = 2;
const HEAD_DIM: usize = 32;
const PAIRS: usize = HEAD_DIM / 2;
const THETA: f64 = 1e6;
const ROTATION: &str =
    r#"{"head_dim": 32, "pairing": "half", "axis_layout": "single", "theta": 1000000.0}"#;

/// A text program: its angle for a position and channel pair, and its pairing.
#[derive(Clone, Copy)]
struct Program {
    angle: fn(f64, usize) -> f64,
    cos_sin: fn(f64) -> f64,
    members: fn(usize) -> [usize; 2],
    sign: f64,
    /// The type of its results.
    store: fn(f64) -> f64,
}

fn half(pair: usize) -> [usize; 2] {
    [pair, pair + PAIRS]
}

fn inv_freq(pair: usize) -> f64 {
    THETA.powf(-(pair as f64) / PAIRS as f64)
}

/// As transformers makes them.
fn inv_freq_in_f32(pair: usize) -> f32 {
    1.0 / (THETA as f32).powf((2 * pair) as f32 / HEAD_DIM as f32)
}

fn in_f32(position: f64, pair: usize) -> f64 {
    f64::from(position as f32 * inv_freq_in_f32(pair))
}

fn same(x: f64) -> f64 {
    x
}

fn f32_of(x: f64) -> f64 {
    f64::from(x as f32)
}

fn bf16_of(x: f64) -> f64 {
    bf16::from_f64(x).to_f64()
}

fn f16_of(x: f64) -> f64 {
    f16::from_f64(x).to_f64()
}

const RIGHT: Program = Program {
    angle: |position, pair| position * inv_freq(pair),
    cos_sin: same,
    members: half,
    sign: 1.0,
    store: same,
};

impl Program {
    fn turn(&self, x: &[f64], ids: &[i64], sign: f64) -> Vec<f64> {
        let mut y = x.to_vec();
        for (row, (x, y)) in x.chunks(HEAD_DIM).zip(y.chunks_mut(HEAD_DIM)).enumerate() {
            for pair in 0..PAIRS {
                let angle = (self.angle)(ids[row % ids.len()] as f64, pair);
                let cos = (self.cos_sin)(angle.cos());
                let sin = sign * self.sign * (self.cos_sin)(angle.sin());
                let [a, b] = (self.members)(pair);
                y[a] = (self.store)(x[a] * cos - x[b] * sin);
                y[b] = (self.store)(x[a] * sin + x[b] * cos);
            }
        }
        y
    }

    /// A dump of q, its forward and its gradient.
    fn dump(&self, ids: &[i64], dtype: &str) -> File {
        let shape = [1, HEADS, ids.len(), HEAD_DIM];
        let count = HEADS * ids.len() * HEAD_DIM;
        let (q, gq) = (values(1, count), values(2, count));
        File::default()
            .state("rotation", ROTATION)
            .ids(ids, &[ids.len()])
            .floats(&format!("q.{dtype}"), &shape, &q)
            .floats(&format!("gq.{dtype}"), &shape, &gq)
            .floats(&format!("q_out.{dtype}"), &shape, &self.turn(&q, ids, 1.0))
            .floats(&format!("dq.{dtype}"), &shape, &self.turn(&gq, ids, -1.0))
    }
}

#[test]
fn what_a_program_rounds_on_the_way_to_its_angles_is_named() {
    const FAR: [i64; 5] = [0, 3, 1857, 200_003, 262_143];
    const NEAR: [i64; 4] = [3, 700, 1023, 1857];
    type Angle = fn(f64, usize) -> f64;
    type Rounds = (&'static str, &'static [i64], Angle, fn(f64) -> f64);
    let programs: [Rounds; 10] = [
        ("angles computed in f32", &FAR, in_f32, same),
        (
            "frequencies rounded to bf16",
            &[4095],
            |p, j| p * bf16_of(inv_freq(j)),
            same,
        ),
        (
            "frequencies rounded to bf16",
            &FAR,
            |p, j| f64::from(p as f32 * bf16_of(inv_freq(j)) as f32),
            same,
        ),
        (
            "frequencies rounded to f16",
            &NEAR,
            |p, j| p * f16_of(inv_freq(j)),
            same,
        ),
        (
            "positions rounded to bf16",
            &[0, 255, 15_962],
            |p, j| bf16_of(p) * inv_freq(j),
            same,
        ),
        (
            "positions rounded to bf16",
            &[0, 255, 15_962],
            |p, j| in_f32(bf16_of(p), j),
            same,
        ),
        (
            "positions and frequencies rounded to bf16",
            &NEAR,
            |p, j| bf16_of(p) * bf16_of(inv_freq(j)),
            same,
        ),
        (
            "angles rounded to bf16",
            &NEAR,
            |p, j| bf16_of(p * inv_freq(j)),
            same,
        ),
        (
            "angles computed in f16",
            &NEAR,
            |p, j| f16_of(f16_of(p) * f16_of(inv_freq(j))),
            same,
        ),
        ("cos and sin rounded to bf16", &NEAR, RIGHT.angle, bf16_of),
    ];
    for (what, ids, angle, cos_sin) in programs {
        for (dtype, store) in [("f64", same as fn(f64) -> f64), ("f32", f32_of)] {
            let program = Program {
                angle,
                cos_sin,
                store,
                ..RIGHT
            };
            let file = program.dump(ids, dtype);
            let said = ["q_out", "dq"].map(|tensor| file.diagnosis(tensor));
            let expected = [
                Some(format!("q_out was computed with {what}")),
                Some(format!("dq is right for a rotation with {what}")),
            ];
            assert_eq!(said, expected, "{what} at {ids:?} in {dtype}");
        }
    }
}

/// Files of transformers 5.24's operations in PyTorch, bit-identical to its users' dumps.
#[test]
fn transformers_own_angles_are_named() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data");
    for (name, what) in [
        ("angles_f32", "angles computed in f32"),
        ("frequencies_bf16", "frequencies rounded to bf16"),
    ] {
        let bytes = std::fs::read(folder.join(format!("{name}.safetensors"))).expect("it reads");
        let rows = File::read(&bytes).rows();
        let failed: Vec<&Row> = rows.iter().filter(|row| !row.pass).collect();
        assert!(!failed.is_empty(), "{name}");
        for row in failed {
            let said = row.diagnosis.as_deref().unwrap_or_default();
            assert!(said.contains(what), "{name}: {row:?}");
        }
    }
}

#[test]
fn a_value_that_no_rounding_makes_has_no_such_cause() {
    let ids = [0, 3, 70, 4095];
    for at in [HEAD_DIM + 1, 3 * HEAD_DIM + 5] {
        for difference in [1e-9, 1e-7, 1e-5, 1e-3] {
            for tensor in ["q_out", "dq"] {
                let altered = RIGHT
                    .dump(&ids, "f64")
                    .add(&format!("{tensor}.f64"), at, difference);
                assert_eq!(altered.diagnosis(tensor), None, "{difference} at {at}");
            }
        }
    }
    let altered = RIGHT.dump(&[131_071], "f32");
    let far = Program {
        store: f32_of,
        ..RIGHT
    }
    .turn(&values(1, 64), &[131_071], 1.0);
    let mut far: Vec<f64> = far;
    far[5] += 0.01;
    let altered = altered.floats("q_out.f32", &[1, HEADS, 1, HEAD_DIM], &far);
    assert_eq!(altered.diagnosis("q_out"), None);
    // Results rounded everywhere are named: in bf16 and in f32, at small positions.
    let near = [1, 2, 3];
    for (store, to) in [(bf16_of as fn(f64) -> f64, "16 bits"), (f32_of, "f32")] {
        let said = Program { store, ..RIGHT }
            .dump(&near, "f64")
            .diagnosis("q_out");
        let said = said.expect("it is named");
        assert!(said.contains(&format!("as roundings to {to} do")), "{said}");
    }
}

#[test]
fn two_faults_are_named_where_one_is_theta() {
    fn angle(position: f64, pair: usize) -> f64 {
        position * 1e4f64.powf(-(pair as f64) / PAIRS as f64)
    }
    let adjacent = |pair| [2 * pair, 2 * pair + 1];
    let program = Program { angle, ..RIGHT };
    let pairing = "pairing adjacent, not half, and theta 10000";
    let sign = "the angles of the opposite sign, and theta 10000";
    let ids = [0, 3, 4, 77];
    for (program, what) in [
        (
            Program {
                members: adjacent,
                ..program
            },
            pairing,
        ),
        (
            Program {
                sign: -1.0,
                ..program
            },
            sign,
        ),
    ] {
        let file = program.dump(&ids, "f64");
        let said = file.diagnosis("q_out");
        assert_eq!(said, Some(format!("q_out was computed with {what}")));
        let said = file.diagnosis("dq");
        assert_eq!(
            said,
            Some(format!("dq is right for a rotation with {what}"))
        );
    }
    // The angles of such a program are in f32 far out.
    let far = Program {
        angle: |position, pair| {
            let theta = 1e4f32.powf((2 * pair) as f32 / HEAD_DIM as f32);
            f64::from(position as f32 * (1.0 / theta))
        },
        store: f32_of,
        ..RIGHT
    };
    let said = far.dump(&[3, 262_143], "f32").diagnosis("q_out");
    let what = "theta 10000, and angles computed in f32";
    assert_eq!(said, Some(format!("q_out was computed with {what}")));
}

/// A dump of an operator without a backward, with k.
fn without_gradients() -> File {
    let ids = [3, 4, 9];
    let (file, shape) = (RIGHT.dump(&ids, "f64"), [1, HEADS, 3, HEAD_DIM]);
    let k = values(3, HEADS * 3 * HEAD_DIM);
    file.floats("k.f64", &shape, &k)
        .floats("k_out.f64", &shape, &RIGHT.turn(&k, &ids, 1.0))
        .floats("gk.f64", &shape, &k)
        .without("dq.f64")
}

#[test]
fn an_operator_without_a_backward_is_compared_and_fails_by_its_gradient_alone() {
    let failed = |file: &File| -> Vec<(String, Option<String>)> {
        let failed = file.rows().into_iter().filter(|row| !row.pass);
        failed.map(|row| (row.tensor, row.diagnosis)).collect()
    };
    let file = without_gradients();
    let found = failed(&file);
    let named: Vec<&str> = found.iter().map(|(tensor, _)| &tensor[..]).collect();
    assert_eq!(named, ["dq", "dk"]);
    for (_, said) in &found {
        let said = said.as_deref().unwrap_or_default();
        let cause = "no gradient: the operator that wrote this file has none";
        assert!(said.starts_with(cause), "{said}");
    }
    // The gradient of k is compared without that of q.
    let k = values(3, HEADS * 3 * HEAD_DIM);
    let dk = RIGHT.turn(&k, &[3, 4, 9], -1.0);
    let with_dk = file.floats("dk.f64", &[1, HEADS, 3, HEAD_DIM], &dk);
    assert_eq!(failed(&with_dk).len(), 1);
    let wrong = failed(&with_dk.clone().add("dk.f64", 7, 0.1));
    let named: Vec<&str> = wrong.iter().map(|(tensor, _)| &tensor[..]).collect();
    assert_eq!(named, ["dq", "dk", "dk"]);
    // A wrong forward is named beside it.
    let q_out = with_dk.add("q_out.f64", 7, 0.1);
    assert_eq!(failed(&q_out)[1].0, "q_out");
    // In 16 bits it is there, and not to compare with.
    let shape = [1, HEADS, 3, HEAD_DIM];
    let narrow = RIGHT.dump(&[3, 4, 9], "f64").without("dq.f64");
    let narrow = narrow.floats("dq.bf16", &shape, &dk);
    assert!(narrow.error().contains("has no tensor dq.{f64,f32}"));
}

#[test]
fn what_holds_golden_tensors_is_not_passed_over() {
    let mixed = File::fixture("rope_mixed.safetensors").without("model_type");
    let open = |file: &File| Artifact::open(&file.write("dumps_claimed.safetensors"));
    let Ok(Artifact::Vectors(_)) = open(&mixed) else {
        panic!("its frequencies and pairing are enough");
    };
    let error = open(&mixed.without("pairing")).expect_err("it is incomplete");
    assert!(error.to_string().contains("\"pairing\""), "{error}");
    let right = RIGHT.dump(&[3, 4], "f64");
    let error = open(&right.clone().without("rotation")).expect_err("it states no rotation");
    assert_is!(error => GoldenError::MissingMetadata { .. });
    let untyped = File::default().floats("q.f64", &[1], &[1.0]);
    let untyped = File {
        tensors: HashMap::from([("q_out", 0), ("q", 0)])
            .keys()
            .map(|name| ((*name).to_owned(), untyped.tensors["q.f64"].clone()))
            .collect(),
        ..File::default()
    };
    let error = open(&untyped)
        .expect_err("its names have no types")
        .to_string();
    assert!(
        error.contains("has no tensor q.{f64,f32,f16,bf16}"),
        "{error}"
    );
    let mut empty = right;
    empty.tensors.clear();
    let error = open(&empty).expect_err("nothing to compare").to_string();
    assert!(error.ends_with("found no tensor at all"), "{error}");
    // A checkpoint is something else.
    let weights = File::default().floats("model.norm.weight.f32", &[2], &[1.0, 1.0]);
    assert!(matches!(open(&weights), Ok(Artifact::Other { .. })));
}

#[test]
fn a_rotation_is_read_whole_or_refused_by_the_key() {
    let error = |change: &dyn Fn(&str) -> String| {
        let changed = change(ROTATION);
        assert_ne!(changed, ROTATION);
        RIGHT
            .dump(&[3, 4], "f64")
            .state("rotation", &changed)
            .error()
    };
    let said = error(&|stated| stated.replace("theta", "rope_theta"));
    assert!(
        said.contains("a key \"rope_theta\" that is not read"),
        "{said}"
    );
    assert!(said.contains("here it is \"theta\""), "{said}");
    let frequencies = |given: &str| {
        let replaced = format!("\"frequencies\": {given}");
        error(&|stated| stated.replace("\"theta\": 1000000.0", &replaced))
    };
    let scaling = r#"{"rope_type": "linear", "factor": 2.0, "low_freq_factor": 1.0}"#;
    let said = frequencies(&format!(r#"{{"theta": 1e6, "scaling": {scaling}}}"#));
    assert!(
        said.contains("\"frequencies.scaling.low_freq_factor\""),
        "{said}"
    );
    let said =
        frequencies(r#"{"theta": 1e6, "scaling": {"rope_type": "default"}, "inv_freq": [1.0]}"#);
    assert!(said.contains("\"frequencies.inv_freq\""), "{said}");
    let said =
        frequencies(r#"{"theta": 1e6, "scaling": {"rope_type": "default"}}, "theta": 10000.0"#);
    assert!(said.contains("a key \"theta\" that is not read"), "{said}");
    let said = error(&|stated| stated.replace("single", "striped"));
    assert!(said.contains(r#"as {"striped": [24, 20, 20]}"#), "{said}");
    // Known keys are read.
    let whole = ROTATION.replace(
        "\"theta\": 1000000.0",
        r#""rotary_dim": 32, "rotary_offset": 0, "attention_scaling": 1.0,
           "frequencies": {"theta": 1e6, "scaling": {"rope_type": "default"}}"#,
    );
    let whole = RIGHT.dump(&[3, 4], "f64").state("rotation", &whole);
    assert!(whole.rows().iter().all(|row| row.pass));
}

#[test]
fn a_refused_model_type_says_why() {
    let mixed = File::fixture("mochi_learned.safetensors")
        .without("head_frequencies.f64")
        .without("dhead_frequencies.f64");
    for (model_type, why) in [
        ("MochiTransformer3DModel", "its angles are learned"),
        (
            "LTX2VideoTransformer3DModel",
            "each head has angles of its own",
        ),
        ("nemotron_h", "its attention does not rotate"),
    ] {
        let bare = mixed.clone().state("model_type", model_type);
        let stated = bare.clone().state("component", "text");
        let stated = stated.state("rope_parameters", r#"{"rope_theta": 10000.0}"#);
        for file in [bare, stated] {
            let said = file.error();
            assert!(said.contains(model_type) && said.contains(why), "{said}");
            assert!(said.contains("head_frequencies"), "{said}");
        }
    }
}

/// cos and sin of each token and channel.
fn tables(file: &File, rows: &[usize], angle: impl Fn(usize, usize) -> f64) -> File {
    let [tokens, width] = rows else {
        panic!("two sizes")
    };
    let of = |f: fn(f64) -> f64| -> Vec<f64> {
        let row = |token| (0..*width).map(move |channel| (token, channel));
        let all = (0..*tokens).flat_map(row);
        all.map(|(token, channel)| f(angle(token, channel)))
            .collect()
    };
    let shape = [1, *tokens, *width];
    file.clone()
        .floats("cos.f64", &shape, &of(f64::cos))
        .floats("sin.f64", &shape, &of(f64::sin))
}

fn ids(file: &File) -> Vec<f64> {
    let bytes = file.tensors["position_ids"].2.as_chunks::<8>().0;
    bytes
        .iter()
        .map(|id| i64::from_le_bytes(*id) as f64)
        .collect()
}

#[test]
fn the_tables_of_correct_modules_are_accepted() {
    let failed = |file: &File| -> Vec<String> {
        let failed = file.rows().into_iter().filter(|row| !row.pass);
        failed.map(|row| row.tensor).collect()
    };
    // Gemma 4's tower: a block for each axis, in it the 16 angles twice.
    let gemma = File::fixture("gemma4_vision_quarter.safetensors");
    let at = ids(&gemma);
    let angle = |token: usize, channel: usize| {
        let (axis, lane) = (channel / 32, channel % 32 % 16);
        at[2 * token + axis] * 100f64.powf(-(lane as f64) / 16.0)
    };
    assert_eq!(
        failed(&tables(&gemma, &[6, 64], angle)),
        Vec::<String>::new()
    );
    let exchanged = |token: usize, channel: usize| angle(token, (channel + 32) % 64);
    let found = failed(&tables(&gemma, &[6, 64], exchanged));
    assert_eq!(found, ["cos", "sin", "cos", "sin"]);

    // nanochat: frequencies above 0, and their sines; the sign is in its rotate_half.
    let nanochat = File::fixture("nanochat_reversed.safetensors");
    let at = ids(&nanochat);
    let inv_freq = |lane: usize| 1e4f64.powf(-(lane as f64) / 64.0);
    let angle = |token: usize, channel: usize| at[token] * inv_freq(channel % 64);
    let listed: Vec<f64> = (0..64).map(inv_freq).collect();
    let own = tables(&nanochat, &[6, 128], angle).floats("inv_freq.f64", &[64], &listed);
    assert_eq!(failed(&own), Vec::<String>::new());
    let doubled: Vec<f64> = listed.iter().map(|x| 2.0 * x).collect();
    let wrong = own.floats("inv_freq.f64", &[64], &doubled);
    assert_eq!(failed(&wrong), ["inv_freq"]);

    // Where nothing turns backwards, a sine of the other sign is wrong.
    let llama = RIGHT.dump(&[3, 4, 9], "f64");
    let backwards = |token: usize, lane: usize| -([3.0, 4.0, 9.0][token]) * self::inv_freq(lane);
    let found = failed(&tables(&llama, &[3, PAIRS], backwards));
    assert_eq!(found, ["sin", "sin"]);
}

#[test]
fn gradients_of_given_frequencies_are_compared() {
    for name in ["mochi_learned.safetensors", "rope_mixed.safetensors"] {
        let file = File::fixture(name);
        let row = |file: &File| {
            let mut rows = file.rows().into_iter();
            let row = rows.find(|row| row.tensor == "dhead_frequencies");
            row.expect("it is compared")
        };
        let right = row(&file);
        assert!(right.pass && right.tolerance < 1e-7, "{name}: {right:?}");
        let wrong = row(&file.clone().add("dhead_frequencies.f64", 40, 1e-6));
        assert!(!wrong.pass, "{wrong:?}");
        assert_eq!(
            wrong.worst.map(|worst| worst.at),
            Some("[0, 1, 8]".to_owned())
        );
        for name in ["gq.bf16", "k.bf16"] {
            let incomplete = File {
                tensors: BTreeMap::from_iter(file.tensors.clone().into_iter().filter(
                    |(held, _)| {
                        held != name && !held.starts_with(['k', 'd']) || held.starts_with("dhead")
                    },
                )),
                ..file.clone()
            };
            let said = incomplete.error();
            assert!(
                said.contains("the comparison of dhead_frequencies"),
                "{said}"
            );
        }
        let reshaped = file.clone().floats("dhead_frequencies.f64", &[1], &[0.0]);
        assert!(reshaped.error().contains("as head_frequencies has"));
    }
}

#[cfg(feature = "burn")]
mod gradients {
    use rope_check::gradcheck::{Row, check_dump};

    use super::*;

    const IDS: [i64; 4] = [0, 3, 1857, 4095];

    fn checked(file: &File) -> Row {
        let rows = check_dump(&file.write("dumps_gradcheck.safetensors")).expect("it reads");
        rows.into_iter().next().expect("q is checked")
    }

    /// A module that runs in bf16: also its products are rounded.
    fn in_bf16() -> Program {
        Program {
            cos_sin: bf16_of,
            store: bf16_of,
            ..RIGHT
        }
    }

    #[test]
    fn a_dump_of_16_bits_has_their_tolerance() {
        for dtype in ["f32", "bf16"] {
            let right = in_bf16().dump(&IDS, dtype);
            let row = checked(&right);
            assert!(row.pass && row.dtype == DType::Bf16, "{row:?}");
            assert!(row.max_error > 0.0, "{row:?}");
            let shape = [1, HEADS, IDS.len(), HEAD_DIM];
            let gq = values(2, HEADS * IDS.len() * HEAD_DIM);
            for (dq, said) in [
                (
                    in_bf16().turn(&gq, &IDS, 1.0),
                    "is not the gradient of q_out",
                ),
                (gq.clone(), "dq is gq"),
                (vec![0.0; gq.len()], "dq is zero"),
            ] {
                let row = checked(&right.clone().floats(&format!("dq.{dtype}"), &shape, &dq));
                let problem = row.problem.clone().unwrap_or_default();
                assert!(!row.pass && problem.contains(said), "{row:?}");
            }
        }
        // In f64 nothing is rounded to 16 bits but by mistake.
        let row = checked(&in_bf16().dump(&IDS, "f64"));
        let problem = row.problem.clone().unwrap_or_default();
        assert!(
            !row.pass && problem.contains("q_out was rounded to bf16"),
            "{row:?}"
        );
    }

    #[test]
    fn a_gradient_that_is_not_there_is_a_row_that_fails() {
        let file = without_gradients().write("dumps_no_gradient.safetensors");
        let rows = check_dump(&file).expect("it reads");
        assert_eq!(rows.len(), 2);
        for row in rows {
            let said = row.problem.clone().unwrap_or_default();
            assert!(!row.pass && said.contains("the operator that wrote this file has none"));
        }
    }
}
