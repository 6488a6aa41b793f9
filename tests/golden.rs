//! Every engine against the vectors of Hugging Face transformers, and every way in which a file can
//! be wrong.

use std::collections::{BTreeSet, HashMap};
use std::path::{Path, PathBuf};

use rope_check::assert_is;
use rope_check::buffer::{Buffer, DType};
use rope_check::engine::{Case, Engine, EngineError, host_engines};
use rope_check::golden::{Artifact, GoldenError, GoldenVectors, Row};
use rope_core::hf::ConfigError;
use rope_core::{Direction, RopeError};
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};

const LLAMA: &str = "llama_rope_half.safetensors";

fn fixtures() -> PathBuf {
    rope_check::fixtures().expect("the test runs in the workspace")
}

fn read(name: &str) -> Vec<u8> {
    std::fs::read(fixtures().join(name)).expect("fixture is there")
}

/// Compares with the portable kernel, which has every element type.
fn rows(vectors: &GoldenVectors) -> Vec<Row> {
    rows_of(vectors, &host_engines()[..1])
}

/// Compares with each engine that has the element type.
fn rows_of(vectors: &GoldenVectors, engines: &[Box<dyn Engine>]) -> Vec<Row> {
    let mut rows = vectors.compare_angles().expect("angles compare");
    for engine in engines {
        for dtype in DType::ALL
            .into_iter()
            .filter(|dtype| engine.supports(*dtype))
        {
            rows.extend(vectors.compare(&**engine, dtype).expect("engine runs"));
        }
    }
    rows
}

fn failures(rows: &[Row]) -> Vec<&Row> {
    rows.iter().filter(|row| !row.pass).collect()
}

/// A file as its parts, to be put together differently.
#[derive(Clone)]
struct Parts {
    metadata: HashMap<String, String>,
    tensors: HashMap<String, (Dtype, Vec<usize>, Vec<u8>)>,
}

impl Parts {
    fn of(name: &str) -> Self {
        let bytes = read(name);
        let (_, header) = SafeTensors::read_metadata(&bytes).expect("fixture parses");
        let tensors = SafeTensors::deserialize(&bytes).expect("fixture parses");
        let part = |view: TensorView| (view.dtype(), view.shape().to_vec(), view.data().to_vec());
        Self {
            metadata: header.metadata().clone().expect("fixture has metadata"),
            tensors: tensors
                .tensors()
                .into_iter()
                .map(|(name, view)| (name, part(view)))
                .collect(),
        }
    }

    fn bytes(&self) -> Vec<u8> {
        let views = self.tensors.iter().map(|(name, (dtype, shape, data))| {
            let view = TensorView::new(*dtype, shape.clone(), data).expect("data fits shape");
            (name, view)
        });
        safetensors::serialize(views, Some(self.metadata.clone())).expect("parts serialise")
    }

    fn vectors(&self) -> Result<GoldenVectors, GoldenError> {
        GoldenVectors::read(&self.bytes())
    }

    fn error(&self) -> GoldenError {
        match self.vectors() {
            Ok(vectors) => vectors.compare_angles().expect_err("file is refused"),
            Err(error) => error,
        }
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

    fn tensor(&mut self, name: &str) -> &mut (Dtype, Vec<usize>, Vec<u8>) {
        self.tensors.get_mut(name).expect("tensor is there")
    }

    fn reshape(mut self, name: &str, shape: &[usize]) -> Self {
        self.tensor(name).1 = shape.to_vec();
        self
    }

    /// Changes f64 elements.
    fn map_f64(mut self, name: &str, change: impl Fn(usize, f64) -> f64) -> Self {
        let (chunks, rest) = self.tensor(name).2.as_chunks_mut::<8>();
        assert!(rest.is_empty());
        for (i, chunk) in chunks.iter_mut().enumerate() {
            *chunk = change(i, f64::from_le_bytes(*chunk)).to_le_bytes();
        }
        self
    }

    /// Sets one bf16 element.
    fn set_bf16(mut self, name: &str, at: usize, value: f32) -> Self {
        let chunks = self.tensor(name).2.as_chunks_mut::<2>().0;
        chunks[at] = half::bf16::from_f32(value).to_le_bytes();
        self
    }

    /// Multiplies bf16 elements by a power of two, which is exact.
    fn scale_bf16(mut self, name: &str, factor: f32) -> Self {
        for chunk in self.tensor(name).2.as_chunks_mut::<2>().0 {
            let value = half::bf16::from_le_bytes(*chunk).to_f32() * factor;
            *chunk = half::bf16::from_f32(value).to_le_bytes();
        }
        self
    }
}

#[test]
fn every_engine_meets_every_vector_forward_and_backward() {
    let mut files = 0;
    let engines = host_engines();
    for entry in fixtures().read_dir().expect("fixtures are there") {
        let path = entry.expect("entry reads").path();
        let Artifact::Vectors(vectors) = Artifact::open(&path).expect("fixture is golden or other")
        else {
            continue;
        };
        files += 1;
        let rows = rows_of(&vectors, &engines);
        assert_eq!(failures(&rows), Vec::<&Row>::new(), "{}", path.display());
        for engine in &engines {
            for dtype in DType::ALL
                .into_iter()
                .filter(|dtype| engine.supports(*dtype))
            {
                let compared: BTreeSet<&str> = rows
                    .iter()
                    .filter(|row| row.engine == engine.name() && row.dtype == dtype.name())
                    .map(|row| &row.tensor[..])
                    .collect();
                let expected = BTreeSet::from(["q_out", "k_out", "dq", "dk"]);
                assert_eq!(compared, expected, "{} {dtype:?}", engine.name());
            }
        }
    }
    assert_eq!(files, 30);
}

/// The bounds that the project promises, not those that the comparison derives.
#[test]
fn tolerances_of_the_fixtures_are_the_promised_ones() {
    for (name, f64_bound) in [
        (LLAMA, 3e-11),
        ("llama_rope_half_longpos.safetensors", 1e-8),
    ] {
        for row in rows(&GoldenVectors::read(&read(name)).expect("fixture reads")) {
            let rotated = !["angles", "frequencies"].contains(&&row.engine[..]);
            match row.dtype {
                "f32" if rotated => assert_eq!(row.tolerance, 2e-6, "{row:?}"),
                "f64" if rotated => assert!(row.tolerance < f64_bound, "{row:?}"),
                // Results are below 8, where half a unit of bf16 is 2^-7.
                "bf16" => assert!(row.tolerance <= 2f64.powi(-6) + 2.001e-6, "{row:?}"),
                _ => {}
            }
        }
    }
}

#[test]
fn every_frequency_table_is_met_and_an_altered_one_is_not() {
    let path = fixtures().join("inv_freq_tables.json");
    let Ok(Artifact::Tables(tables)) = Artifact::open(&path) else {
        panic!("the tables are tables");
    };
    let rows = tables.compare().expect("parameters make frequencies");
    assert_eq!(rows.len(), 14);
    assert_eq!(failures(&rows), Vec::<&Row>::new());

    let text = std::fs::read_to_string(&path).expect("tables read");
    let mut json: serde_json::Value = serde_json::from_str(&text).expect("tables parse");
    let scaling = &mut json["cases"][7]["attention_scaling"];
    *scaling = (scaling.as_f64().expect("a number") * (1.0 + 2e-7)).into();
    let frequency = &mut json["cases"][12]["inv_freq_f64"][40];
    *frequency = (frequency.as_f64().expect("a number") * (1.0 - 2e-7)).into();
    let Ok(Artifact::Tables(altered)) = Artifact::open(&scratch("altered.json", json.to_string()))
    else {
        panic!("still tables");
    };
    let rows = altered.compare().expect("parameters make frequencies");
    let named: Vec<_> = failures(&rows)
        .iter()
        .map(|row| {
            (
                &row.tensor[..],
                row.worst.as_ref().map(|worst| &worst.at[..]),
            )
        })
        .collect();
    let expected = [
        ("yarn_gpt_oss_32_notrunc", Some("attention_scaling")),
        ("llama3_1_8", Some("inv_freq[40]")),
    ];
    assert_eq!(named, expected);
}

#[test]
fn one_altered_value_fails_and_is_named() {
    // [1, 1, 7, 100] of [2, 2, 24, 128], and the same of k with its one head.
    for (name, at, index) in [
        ("q_out", 10_212, "[1, 1, 7, 100]"),
        ("k_out", 4_068, "[1, 0, 7, 100]"),
        ("dq", 10_212, "[1, 1, 7, 100]"),
        ("dk", 4_068, "[1, 0, 7, 100]"),
        ("cos", 4_068, "[1, 7, 100]"),
        ("sin", 4_068, "[1, 7, 100]"),
    ] {
        let alter = |i: usize, value: f64| if i == at { value + 5e-6 } else { value };
        let parts = Parts::of(LLAMA).map_f64(&format!("{name}.f64"), alter);
        let rows = rows(&parts.vectors().expect("file reads"));
        for row in rows.iter().filter(|row| matches!(row.dtype, "f32" | "f64")) {
            assert_eq!(row.pass, row.tensor != name, "{row:?}");
            assert_eq!(
                row.worst.as_ref().map(|worst| &worst.at[..]),
                (!row.pass).then_some(index)
            );
        }
    }
}

#[test]
fn tolerances_grow_with_inputs_and_attention_scaling_and_no_further() {
    const FACTOR: f64 = 64.0;
    // LongRoPE with factors of one leaves the frequencies and scales cos and sin: the truth is
    // known without a new dump.
    let parameters = serde_json::json!({
        "rope_type": "longrope", "rope_theta": 10000.0, "factor": 2.0, "attention_factor": FACTOR,
        "original_max_position_embeddings": 1 << 21,
        "short_factor": vec![1.0; 64], "long_factor": vec![2.0; 64],
    });
    let grown = |parts: Parts, names: &[&str]| {
        names.iter().fold(parts, |parts, name| {
            parts.map_f64(name, |_, value| value * FACTOR)
        })
    };
    let results = ["q_out.f64", "k_out.f64", "dq.f64", "dk.f64"];
    let scaled = grown(Parts::of(LLAMA), &results)
        .state("rope_parameters", &parameters.to_string())
        .state("attention_scaling", &FACTOR.to_string());
    let scaled = grown(scaled, &["cos.f64", "sin.f64"]);
    let large = ["q.bf16", "k.bf16", "gq.bf16", "gk.bf16"]
        .iter()
        .fold(Parts::of(LLAMA), |parts, name| {
            parts.scale_bf16(name, FACTOR as f32)
        });
    let large = grown(large, &results);
    // Of the per-channel layout, whose adjoint mixes two angles.
    let per_channel = ["q.bf16", "k.bf16", "gq.bf16", "gk.bf16"].iter().fold(
        Parts::of("hunyuan_vl_xdrope_16x4.safetensors"),
        |parts, name| parts.scale_bf16(name, FACTOR as f32),
    );
    let per_channel = grown(per_channel, &results);
    for parts in [scaled, large, per_channel] {
        let engines = host_engines();
        let rows_of = |parts: &Parts| rows_of(&parts.vectors().expect("file reads"), &engines);
        assert_eq!(failures(&rows_of(&parts)), Vec::<&Row>::new());
        let wrong = |i: usize, value: f64| {
            if i == 99 {
                value + 4e-6 * FACTOR
            } else {
                value
            }
        };
        let altered = rows_of(&parts.clone().map_f64("dq.f64", wrong));
        for row in altered.iter().filter(|row| row.dtype == "f32") {
            assert_eq!(row.pass, row.tensor != "dq", "{row:?}");
        }
    }
}

#[test]
fn inputs_that_a_type_does_not_hold_widen_its_tolerance_only() {
    // Subnormal in f16.
    let tiny = Parts::of(LLAMA).scale_bf16("q.bf16", 2f32.powi(-20));
    let tiny = tiny.map_f64("q_out.f64", |_, value| value * 2f64.powi(-20));
    let rows = rows(&tiny.vectors().expect("file reads"));
    assert_eq!(failures(&rows), Vec::<&Row>::new());
    for row in rows.iter().filter(|row| row.tensor == "q_out") {
        assert!(row.tolerance < 2.3e-6, "{row:?}");
    }
}

/// Channel 0 of the token at position 1, of head 0 of sample 0, and the other member of its pair.
const PAIR: [usize; 2] = [128, 192];

#[test]
fn an_infinity_is_compared_by_itself_and_the_rest_as_ever() {
    let infinite = |name: &str, truth: [f64; 2]| {
        let parts = Parts::of(LLAMA).set_bf16(&format!("{name}.bf16"), PAIR[0], f32::INFINITY);
        let truth_name = if name == "q" { "q_out.f64" } else { "dq.f64" };
        parts.map_f64(truth_name, move |i, value| {
            let member = PAIR.iter().position(|at| *at == i);
            member.map_or(value, |member| truth[member])
        })
    };
    // cos and sin of one radian are positive; the adjoint subtracts in the second member.
    let (inf, engines) = (f64::INFINITY, host_engines());
    for (name, output, truth) in [("q", "q_out", [inf, inf]), ("gq", "dq", [inf, -inf])] {
        let right = infinite(name, truth);
        let rows = rows_of(&right.vectors().expect("file reads"), &engines);
        assert_eq!(failures(&rows), Vec::<&Row>::new());

        let zero = |parts: Parts| parts.map_f64(&format!("{output}.f64"), |_, _| 0.0);
        let off_by = |difference: f64| {
            let alter = move |i, value| if i == 130 { value + difference } else { value };
            right.clone().map_f64(&format!("{output}.f64"), alter)
        };
        // Half a unit of bf16 and of f16 is less for values below 4.
        for (wrong, spared) in [
            (zero(right.clone()), &[][..]),
            (infinite(name, [inf, -truth[1]]), &[]),
            (infinite(name, [1e3, truth[1]]), &[]),
            (off_by(0.1), &[]),
            (off_by(5e-6), &["bf16", "f16"]),
        ] {
            for row in rows_of(&wrong.vectors().expect("file reads"), &engines) {
                let expected = row.tensor != output || spared.contains(&row.dtype);
                assert_eq!(row.pass, expected, "{row:?}");
                assert!(row.tolerance.is_finite(), "{row:?}");
            }
        }
    }
}

#[test]
fn a_large_value_widens_the_tolerance_of_its_own_head_only() {
    // At position 0 the rotation is the identity.
    let large = Parts::of(LLAMA).set_bf16("q.bf16", 0, 2f32.powi(14));
    let wrong = |at: usize| {
        large.clone().map_f64("q_out.f64", move |i, value| match i {
            0 => 2f64.powi(14),
            i if i == at => value + 5e-5,
            _ => value,
        })
    };
    let passes = |parts: Parts| {
        let rows = rows(&parts.vectors().expect("file reads"));
        let row = |row: &&Row| row.tensor == "q_out" && row.dtype == "f32";
        rows.iter().find(row).map(|row| row.pass)
    };
    assert_eq!(passes(wrong(5)), Some(true));
    assert_eq!(passes(wrong(1000)), Some(false));
}

#[test]
fn values_that_a_type_cannot_hold_are_not_compared_in_it() {
    let engine = &*host_engines()[0];
    let refusal = |vectors: &GoldenVectors, dtype| {
        let error = vectors.compare(engine, dtype).expect_err("it is refused");
        (error.limit(), error.to_string())
    };
    // Beyond f16 as an input, and as an output alone.
    let input = Parts::of(LLAMA).set_bf16("q.bf16", 0, 2f32.powi(17));
    let input = input.map_f64("q_out.f64", |i, x| if i == 0 { 2f64.powi(17) } else { x });
    let output = Parts::of(LLAMA).map_f64("q_out.f64", |i, x| if i == 7 { 65520.0 } else { x });
    for (parts, tensor, found) in [(input, "q", "131072"), (output, "q_out", "65520")] {
        let vectors = parts.vectors().expect("file reads");
        let (limit, message) = refusal(&vectors, DType::F16);
        assert_eq!(limit.as_ref(), Some(&message));
        assert!(
            message.contains(&format!("{tensor} holds {found}")),
            "{message}"
        );
        assert!(message.contains("f16"), "{message}");
        for dtype in [DType::F64, DType::F32, DType::Bf16] {
            assert!(vectors.compare(engine, dtype).is_ok());
        }
    }
    // The greatest f16 is one.
    let most = Parts::of(LLAMA).map_f64("q_out.f64", |i, x| if i == 7 { 65519.0 } else { x });
    let vectors = most.vectors().expect("file reads");
    assert!(vectors.compare(engine, DType::F16).is_ok());
    // At this size no rounding can be bounded.
    let parameters = r#"{"rope_theta": 10000.0, "rope_type": "yarn", "factor": 2.0,
        "original_max_position_embeddings": 4096, "attention_factor": 1e300}"#;
    let huge = Parts::of(LLAMA).state("rope_parameters", parameters);
    let huge = huge.set_bf16("q.bf16", 0, 2f32.powi(100));
    let (limit, message) = refusal(&huge.vectors().expect("file reads"), DType::F64);
    assert_eq!(limit, None);
    assert!(message.contains("no finite tolerance"), "{message}");
}

#[test]
fn parts_may_be_absent_in_pairs() {
    let names = |parts: Parts| -> BTreeSet<String> {
        let rows = rows(&parts.vectors().expect("file reads"));
        assert_eq!(failures(&rows), Vec::<&Row>::new());
        let rotated = |row: &&Row| !["angles", "frequencies"].contains(&&row.engine[..]);
        rows.iter()
            .filter(rotated)
            .map(|row| row.tensor.clone())
            .collect()
    };
    let bare = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
    let without = |parts: Parts, names: &[&str]| {
        names.iter().fold(parts, |parts, name| {
            let types = ["bf16", "f32", "f64"].map(|dtype| format!("{name}.{dtype}"));
            let held = types
                .iter()
                .filter(|name| parts.tensors.contains_key(*name));
            let held: Vec<String> = held.cloned().collect();
            held.iter().fold(parts, |parts, name| parts.without(name))
        })
    };
    let no_k = without(Parts::of(LLAMA), &["k", "k_out", "gk", "dk"]);
    assert_eq!(names(no_k.clone()), bare(&["q_out", "dq"]));
    assert_eq!(names(without(no_k, &["gq", "dq"])), bare(&["q_out"]));
    let forward = without(Parts::of(LLAMA), &["gq", "dq", "gk", "dk"]);
    assert_eq!(names(forward), bare(&["q_out", "k_out"]));
    let mixed = without(Parts::of(LLAMA), &["gk", "dk"]);
    assert_eq!(names(mixed), bare(&["q_out", "k_out", "dq"]));
}

#[test]
fn positions_are_read_in_every_shape_of_the_field() {
    let vision = "qwen2_vl_vision_axial2d.safetensors";
    let mut by_axis = Parts::of(vision);
    let ids = &mut by_axis.tensor("position_ids").2;
    let (height, width): (Vec<_>, Vec<_>) = ids
        .as_chunks::<16>()
        .0
        .iter()
        .map(|pair| pair.split_at(8))
        .unzip();
    *ids = [height.concat(), width.concat()].concat();
    let by_axis = by_axis.reshape("position_ids", &[2, 40]);
    let with_axis = Parts::of(LLAMA).reshape("position_ids", &[1, 2, 24]);
    for parts in [by_axis, with_axis] {
        assert_eq!(
            failures(&rows(&parts.vectors().expect("file reads"))),
            Vec::<&Row>::new()
        );
    }
}

#[test]
fn frequencies_of_heads_are_checked() {
    let name = "ltx2_split.safetensors";
    let heads = || Parts::of(name);
    let misshapen = |parts: Parts, expected: &str| {
        let error = parts.error();
        assert_is!(&error => GoldenError::TensorShape { .. });
        assert!(error.to_string().contains(expected), "{error}");
    };
    misshapen(
        heads().reshape("head_frequencies.f64", &[3, 64]),
        "[axes, heads, lanes]",
    );
    misshapen(
        heads().reshape("head_frequencies.f64", &[3, 4, 16]),
        "[axes, 2, lanes]",
    );
    misshapen(
        heads().reshape("head_frequencies.f64", &[6, 2, 16]),
        "[6, 1, 6]",
    );
    misshapen(heads().reshape("gk.bf16", &[1, 1, 12, 64]), "[1, 2, 6, 64]");
    misshapen(heads().reshape("k.bf16", &[1, 1, 12, 64]), "2 heads");
    let error = heads().state("pairing", "zipped").error();
    assert!(error.to_string().contains("zipped"), "{error}");
    let error = heads().without("pairing").error();
    assert!(error.to_string().contains("pairing"), "{error}");
    // One head's frequencies differ from the other's, or the file would show nothing.
    let exchanged = heads().map_f64("head_frequencies.f64", |i, f| if i < 32 { 0.0 } else { f });
    assert!(!failures(&rows(&exchanged.vectors().expect("file reads"))).is_empty());
}

#[test]
fn a_truncated_file_is_refused_wherever_it_ends() {
    let whole = read(LLAMA);
    for length in [0, 5, 8, 100, 4_000, whole.len() / 2, whole.len() - 1] {
        let path = scratch(&format!("truncated_{length}.safetensors"), &whole[..length]);
        let error = Artifact::open(&path).expect_err("file is refused");
        assert!(
            matches!(error, GoldenError::Container { .. }),
            "{length}: {error}"
        );
        assert!(
            error.to_string().contains("copy or dump it again"),
            "{error}"
        );
    }
    let json = std::fs::read(fixtures().join("inv_freq_tables.json")).expect("tables read");
    let path = scratch("truncated.json", &json[..json.len() - 2]);
    assert!(matches!(
        Artifact::open(&path),
        Err(GoldenError::Json { .. })
    ));
    let path = scratch(
        "incomplete.json",
        r#"{"cases": [{"name": "x", "rope_parameters": {}}]}"#,
    );
    let error = Artifact::open(&path)
        .expect_err("a field is missing")
        .to_string();
    assert!(error.contains("missing field `head_dim`"), "{error}");
    let missing = Artifact::open(&fixtures().join("no_such.safetensors"));
    assert!(matches!(missing, Err(GoldenError::Io(_))));
}

#[test]
fn incomplete_metadata_is_named() {
    for key in ["model_type", "component", "rope_parameters"] {
        let error = Parts::of(LLAMA).without(key).error();
        assert_is!(error => GoldenError::MissingMetadata { key: found, .. } if found == key);
    }
    for (key, value) in [
        ("layout", "[B,D,H,S]"),
        ("head_dim", "wide"),
        ("seq_len", "-1"),
        ("attention_scaling", "one"),
    ] {
        let error = Parts::of(LLAMA).state(key, value).error();
        assert_is!(
            &error => GoldenError::Metadata { key: at, found, .. } if *at == key && found == value
        );
    }
}

#[test]
fn a_rotation_and_its_inverse_are_not_mistaken_for_each_other() {
    const INVERSE: &str = "deepseek_v4_inverse.safetensors";
    let failing = |operation: &str| {
        let parts = Parts::of(INVERSE).state("operation", operation);
        failures(&rows(&parts.vectors().expect("file reads"))).len()
    };
    assert_eq!(failing("inverse"), 0);
    // q, k and their gradients, in four types.
    assert_eq!(failing("rotation"), 16);
    for (key, value) in [("operation", "backwards"), ("rotation", "{}")] {
        let error = Parts::of(INVERSE).state(key, value).error();
        assert_is!(
            &error => GoldenError::Metadata { key: at, found, .. }
                if *at == key && found.starts_with(value)
        );
    }
    let stated = &Parts::of(INVERSE).metadata["rotation"];
    let narrow = stated.replace("\"head_dim\": 128", "\"head_dim\": 256");
    assert_ne!(*stated, narrow);
    let error = Parts::of(INVERSE).state("rotation", &narrow).error();
    assert_is!(error => GoldenError::Metadata { key: "rotation", .. });
}

#[test]
fn a_file_without_a_tensor_says_which_and_what_there_is() {
    for (removed, name) in [
        (&["position_ids"][..], "position_ids"),
        (&["q.bf16"], "q.{f64,f32,f16,bf16}"),
        (&["k_out.f64", "k_out.f32"], "k_out.{f64,f32}"),
        (&["gq.bf16"], "gq.{f64,f32,f16,bf16}"),
    ] {
        let parts = removed
            .iter()
            .fold(Parts::of(LLAMA), |parts, name| parts.without(name));
        let error = parts.error();
        assert_is!(
            &error => GoldenError::MissingTensor { name: at, found, .. }
                if at == name && found.contains("inv_freq.f64")
        );
    }
    for name in ["dq", "dk"] {
        let stored = ["f64", "f32", "bf16"].map(|dtype| format!("{name}.{dtype}"));
        let parts = stored
            .iter()
            .fold(Parts::of(LLAMA), |parts, name| parts.without(name));
        let lost = parts.vectors().expect("file reads").lost_gradients();
        let named: Vec<_> = lost.iter().map(|row| (&row.tensor[..], row.pass)).collect();
        assert_eq!(named, [(name, false)]);
    }
}

#[test]
fn wrong_shapes_and_types_are_named() {
    let shapes = [
        ("q.bf16", &[2, 48, 128][..]),
        ("q.bf16", &[2, 2, 48, 64]),
        ("k.bf16", &[48, 128]),
        ("k_out.f64", &[2, 24, 1, 128]),
        ("gq.bf16", &[2, 24, 2, 128]),
        ("dk.f64", &[1, 2, 24, 128]),
        ("cos.f64", &[2, 48, 64]),
        ("sin.f64", &[2, 12, 256]),
        ("position_ids", &[48]),
        ("position_ids", &[2, 2, 12]),
        ("position_ids", &[24, 2]),
    ];
    for (name, shape) in shapes {
        let error = Parts::of(LLAMA).reshape(name, shape).error();
        assert!(
            matches!(&error, GoldenError::TensorShape { name: at, found, .. }
                if name.starts_with(&at[..]) && found == shape),
            "{name} {shape:?}: {error}"
        );
    }
    let axes = Parts::of("qwen2_vl_mrope_16_24_24.safetensors").state("model_type", "hunyuan_vl");
    let parameters = r#"{"rope_theta": 10000.0, "mrope_section": [16, 16, 16, 16]}"#;
    let error = axes.state("rope_parameters", parameters).error();
    assert!(
        error.to_string().contains("expected [4, 2, 24] or [4, 24]"),
        "{error}"
    );
    for (name, dtype) in [("position_ids", Dtype::U64), ("q_out.f64", Dtype::I64)] {
        let mut parts = Parts::of(LLAMA);
        parts.tensor(name).0 = dtype;
        let error = parts.error();
        assert_is!(&error => GoldenError::TensorType { name: at, .. } if at == name);
    }
}

#[test]
fn metadata_that_make_no_rotation_are_refused() {
    let unknown = Parts::of(LLAMA)
        .state("model_type", "no_such_model")
        .error();
    assert!(
        matches!(&unknown, GoldenError::Rope(RopeError::Config(ConfigError::UnknownModelType { found, .. }))
            if found == &["no_such_model"]),
        "{unknown}"
    );
    let component = Parts::of(LLAMA).state("component", "audio").error();
    assert_is!(
        component => GoldenError::Rope(RopeError::Config(ConfigError::UnknownComponent { .. }))
    );
    let broken = Parts::of(LLAMA).state("rope_parameters", "{").error();
    assert_is!(broken => GoldenError::Rope(RopeError::Config(ConfigError::Json { .. })));
    let mut negative = Parts::of(LLAMA);
    negative.tensor("position_ids").2[..8].copy_from_slice(&(-1i64).to_le_bytes());
    assert!(matches!(
        negative.error(),
        GoldenError::Rope(RopeError::PositionOutOfRange {
            found: -1,
            axis: 0,
            token: 0
        })
    ));
}

/// A model read as another one fails, so the comparison sees pairing, axis layout and frequencies.
#[test]
fn a_wrong_rotation_is_seen() {
    for (file, model_type, parameters) in [
        (LLAMA, "cohere", r#"{"rope_theta": 10000.0}"#),
        (LLAMA, "llama", r#"{"rope_theta": 10001.0}"#),
        (
            "qwen2_vl_mrope_16_24_24.safetensors",
            "qwen3_vl",
            r#"{"rope_theta": 1000000.0, "mrope_section": [24, 20, 20]}"#,
        ),
        (
            "nanochat_reversed.safetensors",
            "llama",
            r#"{"rope_theta": 10000.0}"#,
        ),
        (
            "gemma4_vision_quarter.safetensors",
            "sam3_vit_model",
            r#"{"rope_theta": 100.0}"#,
        ),
        (
            "pixtral_vision_lanes.safetensors",
            "inkling2_vision",
            r#"{"rope_theta": 10000.0}"#,
        ),
    ] {
        let parts = Parts::of(file)
            .state("model_type", model_type)
            .state("rope_parameters", parameters);
        for row in rows(&parts.vectors().expect("file reads")) {
            let rotated = !["angles", "frequencies"].contains(&&row.engine[..]);
            assert!(!(rotated && row.pass), "{file} as {model_type}: {row:?}");
        }
    }
}

/// An engine of which something is wrong.
struct Broken(fn(Direction) -> Result<Direction, EngineError>);

impl Engine for Broken {
    fn name(&self) -> String {
        "broken".into()
    }

    fn supports(&self, _: DType) -> bool {
        true
    }

    fn apply(
        &self,
        case: &Case,
        direction: Direction,
        q: &Buffer,
        k: Option<&Buffer>,
    ) -> Result<(Buffer, Option<Buffer>), EngineError> {
        let engine = host_engines().swap_remove(0);
        engine.apply(case, (self.0)(direction)?, q, k)
    }
}

#[test]
fn broken_engines_are_seen() {
    let vectors = GoldenVectors::read(&read(LLAMA)).expect("fixture reads");
    let forward_twice = Broken(|_| Ok(Direction::Forward));
    for dtype in DType::ALL {
        for row in vectors.compare(&forward_twice, dtype).expect("engine runs") {
            assert_eq!(row.pass, row.tensor.ends_with("_out"), "{row:?}");
        }
    }
    let failing = Broken(|_| Err(EngineError::Burn("out of cheese".into())));
    let error = vectors
        .compare(&failing, DType::F32)
        .expect_err("engine fails");
    assert_is!(&error => GoldenError::Engine { engine, .. } if engine == "broken");
}

#[test]
fn every_fixture_is_in_the_manifest() {
    let manifest = std::fs::read_to_string(fixtures().join("MANIFEST")).expect("manifest reads");
    let listed: BTreeSet<&str> = manifest
        .lines()
        .filter(|line| !line.starts_with('#'))
        .filter_map(|line| line.split('\t').next())
        .collect();
    let files: BTreeSet<String> = fixtures()
        .read_dir()
        .expect("fixtures are there")
        .map(|entry| entry.expect("entry reads").path())
        .filter(|path| path.is_file() && !path.ends_with("MANIFEST"))
        .filter_map(|path| Some(path.file_name()?.to_string_lossy().into_owned()))
        .collect();
    assert_eq!(
        files.iter().map(|name| &name[..]).collect::<BTreeSet<_>>(),
        listed
    );
}

fn scratch(name: &str, contents: impl AsRef<[u8]>) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::write(&path, contents).expect("scratch file is written");
    path
}
