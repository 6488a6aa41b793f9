//! Position ids against two versions of Hugging Face transformers, and where the rule departs from
//! each.

use rope_core::position_ids::{
    Compatibility, Divergence, PositionIds, PositionIdsError, PositionRules, Prompt, Rows,
    TokenIds, vision_cu_seqlens, vision_positions, vision_windows, zigzag,
};
use rope_core::{Positions, RopeError};
use serde::Deserialize;

use Compatibility::{Exact, Transformers4_57, Transformers5_23};

const AXES: usize = 3;

#[derive(Deserialize)]
struct File {
    cases: Vec<Case>,
}

/// A prompt and its position ids, as the fixtures record them.
#[derive(Clone, Deserialize)]
struct Case {
    model: String,
    scenario: String,
    input_ids: Vec<Vec<i64>>,
    attention_mask: Option<Vec<Vec<i64>>>,
    mm_token_type_ids: Option<Vec<Vec<i64>>>,
    #[serde(default)]
    image_grid_thw: Vec<[usize; 3]>,
    #[serde(default)]
    video_grid_thw: Vec<[usize; 3]>,
    second_per_grid_ts: Option<Vec<f64>>,
    #[serde(default)]
    kwargs: Kwargs,
    position_ids: Vec<Vec<Vec<f64>>>,
    rope_deltas: Vec<[f64; 1]>,
}

#[derive(Clone, Default, Deserialize)]
struct Kwargs {
    #[serde(default)]
    image_grid_thw: Vec<[usize; 3]>,
    #[serde(default)]
    video_grid_thw: Vec<[usize; 3]>,
    second_per_grids: Option<Vec<f64>>,
}

/// The ids that `_meta` of the fixtures states, whatever the model.
const TOKENS: TokenIds = TokenIds {
    image: 151_655,
    video: 151_656,
    audio: Some(151_646),
    vision_start: Some(151_652),
    audio_start: Some(151_647),
    video_start: Some(151_690),
    video_end: Some(151_691),
};

impl Case {
    fn mask(&self) -> Vec<bool> {
        let all = vec![vec![1; self.input_ids[0].len()]; self.input_ids.len()];
        let mask = self.attention_mask.as_ref().unwrap_or(&all);
        mask.concat()
            .iter()
            .map(|attended| *attended == 1)
            .collect()
    }

    fn ids(&self, rules: PositionRules, typed: bool) -> Result<PositionIds, RopeError> {
        let types = self
            .mm_token_type_ids
            .as_ref()
            .filter(|_| typed)
            .map(|types| types.concat());
        let kwargs = &self.kwargs;
        rules.position_ids(&Prompt {
            input_ids: &self.input_ids.concat(),
            rows: Rows::Batch(self.input_ids.len()),
            attention_mask: Some(&self.mask()),
            mm_token_type_ids: types.as_deref(),
            image_grids: &[&self.image_grid_thw[..], &kwargs.image_grid_thw].concat(),
            video_grids: &[&self.video_grid_thw[..], &kwargs.video_grid_thw].concat(),
            seconds_per_grid: self
                .second_per_grid_ts
                .as_deref()
                .or(kwargs.second_per_grids.as_deref()),
        })
    }

    /// Tokens, padding left out, whose ids differ, and rows whose rope deltas differ.
    fn differences(&self, found: &PositionIds) -> (Vec<usize>, Vec<usize>) {
        let mask = self.mask();
        let expected: Vec<Vec<f64>> = self.position_ids.iter().map(|axis| axis.concat()).collect();
        let differs = |token: &usize| {
            mask[*token] && (0..AXES).any(|axis| found.axis(axis)[*token] != expected[axis][*token])
        };
        let tokens = (0..found.tokens()).filter(differs).collect();
        let delta_differs = |row: &usize| found.rope_deltas()[*row] != self.rope_deltas[*row][0];
        (
            tokens,
            (0..self.rope_deltas.len()).filter(delta_differs).collect(),
        )
    }

    fn name(&self) -> String {
        format!("{}/{}", self.model, self.scenario)
    }
}

fn cases(json: &str) -> Vec<Case> {
    serde_json::from_str::<File>(json)
        .expect("fixture parses")
        .cases
}

fn published() -> [(Compatibility, Vec<Case>); 2] {
    let mut new = cases(include_str!("fixtures/rope_index_5.23.0.json"));
    new.extend(cases(include_str!("fixtures/rope_index_omni_5.23.0.json")));
    let old = cases(include_str!("fixtures/rope_index_4.57.6.json"));
    [(Transformers4_57, old), (Transformers5_23, new)]
}

fn rules(model: &str) -> PositionRules {
    PositionRules::new(model, TOKENS).expect(model)
}

/// Each version is reproduced, and names a divergence exactly where the default's ids differ from
/// its own. rope-cli's test of `mrope verify` lists the cases with their reasons.
#[test]
fn versions_are_reproduced_and_say_where_they_diverge() {
    for (version, cases) in published() {
        assert!(cases.len() > 20);
        for case in cases {
            // Version 4.57 knows no token types.
            let typed = version != Transformers4_57;
            let ids = |compatibility| {
                let rules = rules(&case.model).with_compatibility(compatibility);
                let found = case.ids(rules, typed);
                found.unwrap_or_else(|error| panic!("{}: {error}", case.name()))
            };
            let (exact, found, nothing) = (ids(Exact), ids(version), (vec![], vec![]));
            assert_eq!(
                case.differences(&found),
                nothing,
                "{} {version:?}",
                case.name()
            );
            assert!(exact.divergences().is_empty());
            let is_same = case.differences(&exact) == nothing;
            assert_eq!(
                is_same,
                found.divergences().is_empty(),
                "{} {version:?}",
                case.name()
            );
        }
    }
}

/// Without token types, the token ids suffice.
#[test]
fn token_types_can_be_read_off_the_tokens() {
    for (version, cases) in published() {
        for case in cases.iter().filter(|case| case.mm_token_type_ids.is_some()) {
            let typed = rules(&case.model).with_compatibility(version);
            if version == Transformers4_57 && case.model == "glm4v" {
                continue; // the recorded types call video frames images there
            }
            assert_eq!(
                case.ids(typed, true),
                case.ids(typed, false),
                "{}",
                case.name()
            );
        }
    }
}

#[derive(Deserialize)]
struct Models {
    towers: Vec<Tower>,
    prompts: Vec<ModelPrompt>,
}

#[derive(Deserialize)]
struct Tower {
    name: String,
    grids: Vec<[usize; 3]>,
    positions: Vec<[u32; 2]>,
    cu_seqlens: Option<Vec<usize>>,
}

#[derive(Deserialize)]
struct ModelPrompt {
    model: String,
    config: serde_json::Value,
    input_ids: Vec<Vec<i64>>,
    attention_mask: Vec<Vec<i64>>,
    mm_token_type_ids: Vec<Vec<i64>>,
    image_grid_thw: Vec<[usize; 3]>,
    video_grid_thw: Vec<[usize; 3]>,
    transformers_5_23: Recorded,
    transformers_4_57: Recorded,
}

#[derive(Deserialize)]
struct Recorded {
    position_ids: Vec<Vec<Vec<f64>>>,
    rope_deltas: Vec<[f64; 1]>,
}

fn models() -> Models {
    serde_json::from_str(include_str!("fixtures/position_ids_models.json")).expect("fixture parses")
}

#[test]
fn whole_models_with_the_rules_of_their_configuration() {
    for prompt in models().prompts {
        let rules = PositionRules::from_hf_config(&prompt.config.to_string()).expect("rules");
        let versions = [
            (Transformers5_23, prompt.transformers_5_23),
            (Transformers4_57, prompt.transformers_4_57),
        ];
        for (version, recorded) in versions {
            let case = Case {
                model: prompt.model.clone(),
                scenario: "model".to_owned(),
                input_ids: prompt.input_ids.clone(),
                attention_mask: Some(prompt.attention_mask.clone()),
                mm_token_type_ids: Some(prompt.mm_token_type_ids.clone()),
                image_grid_thw: prompt.image_grid_thw.clone(),
                video_grid_thw: prompt.video_grid_thw.clone(),
                second_per_grid_ts: None,
                kwargs: Kwargs::default(),
                position_ids: recorded.position_ids,
                rope_deltas: recorded.rope_deltas,
            };
            let found = case
                .ids(rules.with_compatibility(version), true)
                .expect("ids");
            assert_eq!(
                case.differences(&found),
                (vec![], vec![]),
                "{} {version:?}",
                case.model
            );
        }
    }
}

#[test]
fn vision_towers_in_merge_block_order() {
    let towers = models().towers;
    assert!(towers.len() >= 5);
    for tower in towers {
        let found = vision_positions(&tower.grids, 2).expect("positions");
        let expected = |axis: usize| {
            tower
                .positions
                .iter()
                .map(|patch| patch[axis])
                .collect::<Vec<_>>()
        };
        let ids = |axis| found.axis(axis).expect("ids");
        assert_eq!(ids(0), expected(0), "{} rows", tower.name);
        assert_eq!(ids(1), expected(1), "{} columns", tower.name);
        if let Some(cu_seqlens) = tower.cu_seqlens {
            assert_eq!(
                vision_cu_seqlens(&tower.grids),
                Ok(cu_seqlens),
                "{}",
                tower.name
            );
        }
    }
    let reading_order = vision_positions(&[[1, 2, 3]], 1).expect("positions");
    assert_eq!(reading_order.axis(0).expect("ids"), [0, 0, 0, 1, 1, 1]);
    assert_eq!(reading_order.axis(1).expect("ids"), [0, 1, 2, 0, 1, 2]);
}

/// Windows of 2 x 2 merged tokens over 3 x 5, drawn by hand, and over two frames of 2 x 2.
#[test]
fn windows_cover_each_frame_row_by_row() {
    let found = vision_windows(&[[1, 6, 10], [2, 4, 4]], 2, 2).expect("windows");
    #[rustfmt::skip]
    let expected = [
        0, 1, 5, 6,   2, 3, 7, 8,   4, 9,
        10, 11,       12, 13,       14,
        15, 16, 17, 18,
        19, 20, 21, 22,
    ];
    assert_eq!(found.window_index, expected);
    assert_eq!(found.cu_window_seqlens, [0, 16, 32, 40, 48, 56, 60, 76, 92]);
}

/// Ids of a prompt of one row, as rows of T, H, W.
fn ids(rules: PositionRules, prompt: Prompt) -> [Vec<i64>; 3] {
    let found = rules.position_ids(&prompt).expect("ids");
    [0, 1, 2].map(|axis| whole(found.axis(axis)))
}

fn whole(ids: &[f64]) -> Vec<i64> {
    assert!(ids.iter().all(|id| id.fract() == 0.0), "{ids:?}");
    ids.iter().map(|id| *id as i64).collect()
}

/// Qwen3-Omni lays audio in video by time, with ids of its own for both start tokens. By hand: 2
/// frames of one token at 0 and 13 ids, 15 audio tokens.
#[test]
fn audio_in_video_of_qwen3_omni() {
    let [image, video, audio] = [TOKENS.image, TOKENS.video, 151_646];
    assert_ne!(image, video);
    let mut input_ids = vec![100, 151_652, 151_647, video];
    input_ids.extend([audio; 14]);
    input_ids.extend([video, audio, 151_648, 151_653, 100]);
    let prompt = Prompt {
        input_ids: &input_ids,
        video_grids: &[[2, 2, 2]],
        ..Prompt::default()
    };
    let mut expected: Vec<i64> = vec![0, 1, 2, 3];
    expected.extend(3..17);
    expected.extend([16, 17, 18, 19, 20]);
    let [time, height, width] = ids(rules("qwen3_omni_moe"), prompt);
    assert_eq!(time, expected);
    expected[18] = 3; // the second frame is in the first row and column again
    assert_eq!([height, width], [expected.clone(), expected.clone()]);

    // Where the tokens stand in the order of time, transformers agrees: frame 2 comes with id 13,
    // after the audio tokens 0 to 12.
    let by_time = [
        &input_ids[..17],
        &[video, audio, audio][..],
        &input_ids[20..],
    ]
    .concat();
    let prompt = Prompt {
        input_ids: &by_time,
        ..prompt
    };
    let exact = rules("qwen3_omni_moe").position_ids(&prompt).expect("ids");
    let compatible = rules("qwen3_omni_moe").with_compatibility(Transformers5_23);
    assert_eq!(compatible.position_ids(&prompt), Ok(exact));
}

#[test]
fn transformers_forgets_a_video_that_outlasts_its_sound() {
    // Qwen2.5-Omni: one chunk with frames at 0 and 25 ids and one audio token. The audio is dealt
    // out last.
    let video = TOKENS.video;
    let input_ids = [151_652, 151_647, video, video, 151_646, 151_648, 151_653];
    let prompt = Prompt {
        input_ids: &input_ids,
        video_grids: &[[2, 2, 2]],
        ..Prompt::default()
    };
    let exact = rules("qwen2_5_omni").position_ids(&prompt).expect("ids");
    assert_eq!(whole(exact.axis(0)), [0, 0, 1, 26, 1, 27, 27]);
    let compatible = rules("qwen2_5_omni").with_compatibility(Transformers5_23);
    let compatible = compatible.position_ids(&prompt).expect("ids");
    assert_eq!(whole(compatible.axis(0)), [0, 0, 1, 26, 1, 2, 2]);
    assert_eq!(compatible.divergences(), [Divergence::LastPieceOnly]);
}

#[test]
fn seconds_are_kept_until_after_the_product() {
    let prompt = |seconds| Prompt {
        input_ids: &[TOKENS.video; 4],
        video_grids: &[[4, 2, 2]],
        seconds_per_grid: seconds,
        ..Prompt::default()
    };
    let time = |compatibility, seconds| {
        let rules = rules("qwen2_5_vl").with_compatibility(compatibility);
        ids(rules, prompt(seconds))[0].clone()
    };
    assert_eq!(time(Exact, Some(&[0.5])), [0, 1, 2, 3]);
    assert_eq!(time(Exact, Some(&[0.7])), [0, 1, 2, 4]);
    assert_eq!(time(Transformers4_57, Some(&[0.7])), [0, 0, 0, 0]);
    assert_eq!(time(Exact, None), [0, 2, 4, 6]);
    let faster = rules("qwen2_5_vl").with_ids_per_second(4.0).expect("rules");
    assert_eq!(ids(faster, prompt(Some(&[1.5])))[0], [0, 6, 12, 18]);
    // Qwen3-Omni at half a second: transformers stops between ids, and the rotation takes them so.
    let fractional = rules("qwen3_omni_moe").with_compatibility(Transformers5_23);
    let found = fractional.position_ids(&prompt(Some(&[0.5]))).expect("ids");
    assert_eq!(found.axis(0), [0.0, 6.5, 13.0, 19.5]);
    assert_eq!(found.divergences(), [Divergence::Fractions]);
    let positions = found.positions().expect("in range");
    assert_eq!([1, 3].map(|token| positions.value(0, token)), [6.5, 19.5]);
    let after = found.continuation(0, 2).expect("in range");
    assert_eq!([0, 1].map(|token| after.value(2, token)), [20.5, 21.5]);
    let selected = found.select(&[3, 0]).expect("in range");
    assert_eq!([0, 1].map(|token| selected.value(0, token)), [19.5, 0.0]);
    assert_eq!(
        ids(rules("qwen3_omni_moe"), prompt(Some(&[0.5])))[0],
        [0, 6, 13, 19]
    );
}

#[test]
fn glm_frames_are_image_tokens_between_video_marks() {
    let [image, start, end] = [TOKENS.image, 151_690, 151_691];
    let prompt = Prompt {
        input_ids: &[start, image, 9, image, 9, end, image],
        image_grids: &[[1, 2, 2]],
        video_grids: &[[2, 2, 2]],
        ..Prompt::default()
    };
    assert_eq!(
        ids(rules("glm4v"), prompt),
        [0, 1, 2].map(|_| (0..7).collect::<Vec<i64>>())
    );
}

/// A decoder continues where the prompt ends, by its own count of tokens plus the rope delta.
#[test]
fn decoding_continues_after_the_highest_id() {
    for (version, cases) in published() {
        for case in cases {
            for compatibility in [Exact, version] {
                let rules = rules(&case.model).with_compatibility(compatibility);
                let found = case.ids(rules, version != Transformers4_57).expect("ids");
                let seq = case.input_ids[0].len();
                for row in 0..case.input_ids.len() {
                    let mask = &case.mask()[row * seq..(row + 1) * seq];
                    let row_ids = |axis: usize| &found.axis(axis)[row * seq..(row + 1) * seq];
                    let highest = (0..AXES)
                        .flat_map(|axis| row_ids(axis).iter().zip(mask).filter(|(_, m)| **m))
                        .fold(-1.0, |highest: f64, (id, _)| highest.max(*id));
                    let continuation = found.continuation(row, 2).expect("continues");
                    for axis in 0..AXES {
                        let expected = [highest as u32 + 1, highest as u32 + 2];
                        assert_eq!(
                            continuation.axis(axis).expect("ids"),
                            expected,
                            "{}",
                            case.name()
                        );
                    }
                    let counted = match (compatibility, rules_count_padding(&case.model)) {
                        (Transformers4_57, true) => seq,
                        _ => mask.iter().filter(|attended| **attended).count(),
                    };
                    assert_eq!(counted as f64 + found.rope_deltas()[row], highest + 1.0);
                }
            }
        }
    }
}

fn rules_count_padding(model: &str) -> bool {
    !model.contains("omni")
}

/// Packing rows end to end gives each the ids it has alone; grids and seconds run on.
#[test]
fn packed_sequences_start_over() {
    let mut packed_cases = 0;
    for case in published().into_iter().flat_map(|(_, cases)| cases) {
        if case.input_ids.len() < 2 || case.model == "glm4v" {
            continue;
        }
        packed_cases += 1;
        let rules = rules(&case.model);
        let separate = case.ids(rules, true).expect("ids");
        let mask = case.mask();
        let kept: Vec<usize> = (0..mask.len()).filter(|token| mask[*token]).collect();
        let input_ids: Vec<i64> = kept
            .iter()
            .map(|token| case.input_ids.concat()[*token])
            .collect();
        let seq = case.input_ids[0].len();
        let mut cu_seqlens = vec![0];
        for row in mask.chunks(seq) {
            let len = row.iter().filter(|attended| **attended).count();
            cu_seqlens.push(cu_seqlens[cu_seqlens.len() - 1] + len);
        }
        let packed = rules.position_ids(&Prompt {
            input_ids: &input_ids,
            rows: Rows::Packed(&cu_seqlens),
            image_grids: &case.image_grid_thw,
            video_grids: &case.video_grid_thw,
            seconds_per_grid: case.second_per_grid_ts.as_deref(),
            ..Prompt::default()
        });
        let packed = packed.expect("ids");
        assert_eq!(
            packed.positions(),
            separate.select(&kept),
            "{}",
            case.name()
        );
        assert_eq!(packed.rope_deltas(), separate.rope_deltas());
    }
    assert!(packed_cases >= 8);
}

#[test]
fn a_zigzag_split_gathered_equals_the_whole() {
    let case = &cases(include_str!("fixtures/rope_index_5.23.0.json"))[2];
    let prompt: Vec<i64> = case
        .input_ids
        .concat()
        .into_iter()
        .chain([100; 10])
        .collect();
    let input_ids = [&prompt[..], &prompt[..]].concat();
    let cu_seqlens = [0, prompt.len(), input_ids.len()];
    let grids = [case.video_grid_thw[0]; 2];
    let whole = rules(&case.model).position_ids(&Prompt {
        input_ids: &input_ids,
        rows: Rows::Packed(&cu_seqlens),
        video_grids: &grids,
        ..Prompt::default()
    });
    let whole = whole.expect("ids");
    for ranks in [1, 2, 4, 8] {
        let mut gathered = vec![[0.0; AXES]; input_ids.len()];
        for rank in 0..ranks {
            let held = zigzag(&cu_seqlens, ranks, rank).expect("splits");
            assert_eq!(held.len(), input_ids.len() / ranks);
            let positions: Positions = whole.select(&held).expect("selects");
            for (at, token) in held.iter().enumerate() {
                gathered[*token] = [0, 1, 2].map(|axis| positions.value(axis, at));
            }
        }
        for axis in 0..AXES {
            let axis_ids: Vec<f64> = gathered.iter().map(|ids| ids[axis]).collect();
            assert_eq!(axis_ids, whole.axis(axis), "{ranks} ranks, axis {axis}");
        }
    }
    // Causal work is even: the sum of the positions held in a sequence is the same on every rank.
    let work = |rank| zigzag(&[0, 32], 4, rank).map(|held| held.iter().sum::<usize>());
    assert!((0..4).all(|rank| work(rank) == work(0)));
}

/// The division of Megatron Bridge, computed by its own function.
#[test]
fn a_zigzag_split_is_that_of_megatron() {
    #[derive(Deserialize)]
    struct Split {
        cu_seqlens: Vec<usize>,
        held: Vec<Vec<usize>>,
    }
    #[derive(Deserialize)]
    struct Splits {
        cases: Vec<Split>,
    }
    let text = include_str!("fixtures/zigzag.json");
    let splits: Splits = serde_json::from_str(text).expect("JSON");
    let mut ranks = 0;
    for Split { cu_seqlens, held } in splits.cases {
        for (rank, expected) in held.iter().enumerate() {
            let found = zigzag(&cu_seqlens, held.len(), rank).expect("splits");
            assert_eq!(found, *expected, "{cu_seqlens:?}, rank {rank}");
            ranks += 1;
        }
    }
    assert_eq!(ranks, 19);
}

#[test]
fn a_single_rank_holds_sequences_of_any_length() {
    assert_eq!(zigzag(&[0, 5], 1, 0), Ok((0..5).collect()));
    assert_eq!(zigzag(&[0, 3, 3, 8], 1, 0), Ok((0..8).collect()));
    assert!(zigzag(&[0, 9, 8], 1, 0).is_err());
}

#[test]
fn token_ids_of_real_configurations() {
    let omni = r#"{"model_type": "qwen2_5_omni", "thinker_config": {"model_type": "qwen2_5_omni_thinker",
        "audio_token_index": 151646, "image_token_index": 151655, "video_token_index": 151656,
        "vision_start_token_id": 151652, "vision_end_token_id": 151653, "audio_start_token_id": 151647,
        "audio_end_token_id": 151648, "position_id_per_seconds": 25, "seconds_per_chunk": 2,
        "vision_config": {"spatial_merge_size": 2, "tokens_per_second": 25}}}"#;
    let rules = PositionRules::from_hf_config(omni).expect("rules");
    let case = cases(include_str!("fixtures/rope_index_omni_5.23.0.json")).remove(2);
    let found = case
        .ids(rules.with_compatibility(Transformers5_23), false)
        .expect("ids");
    assert_eq!(case.differences(&found), (vec![], vec![]));

    let qwen2_5_vl = |vision: &str| {
        format!(
            r#"{{"model_type": "qwen2_5_vl", "image_token_id": 1, "video_token_id": 2, "vision_config": {vision}}}"#
        )
    };
    let rules = PositionRules::from_hf_config(&qwen2_5_vl(
        r#"{"tokens_per_second": 4, "spatial_merge_size": 1}"#,
    ));
    let prompt = Prompt {
        input_ids: &[2, 2],
        video_grids: &[[2, 1, 1]],
        ..Prompt::default()
    };
    assert_eq!(ids(rules.expect("rules"), prompt)[0], [0, 4]);
    // Qwen2-VL does not scale time, whatever its configuration carries.
    let unscaled =
        qwen2_5_vl(r#"{"tokens_per_second": 4, "spatial_merge_size": 1}"#).replace("2_5", "2");
    assert_eq!(
        ids(
            PositionRules::from_hf_config(&unscaled).expect("rules"),
            prompt
        )[0],
        [0, 1]
    );

    let missing = qwen2_5_vl("{}").replace(r#""video_token_id": 2,"#, "");
    let error = PositionRules::from_hf_config(&missing)
        .expect_err("incomplete")
        .to_string();
    assert!(error.contains("video_token_id"), "{error}");
    let no_merge = qwen2_5_vl(r#"{"spatial_merge_size": 0}"#);
    assert!(matches!(
        PositionRules::from_hf_config(&no_merge),
        Err(RopeError::PositionIds(PositionIdsError::Parameter {
            parameter: "spatial_merge_size",
            ..
        }))
    ));
    let frozen = qwen2_5_vl(r#"{"tokens_per_second": -1.0}"#);
    assert!(matches!(
        PositionRules::from_hf_config(&frozen),
        Err(RopeError::PositionIds(PositionIdsError::Parameter {
            parameter: "ids per second",
            ..
        }))
    ));
    assert!(matches!(
        PositionRules::new("gemma", TOKENS),
        Err(RopeError::PositionIds(PositionIdsError::UnknownModelType { found })) if found == ["gemma"]
    ));
}

fn of(input_ids: &[i64]) -> Prompt<'_> {
    Prompt {
        input_ids,
        ..Prompt::default()
    }
}

/// `model tokens { fields of the prompt } => the error,`
macro_rules! refused {
    ($($model:literal $tokens:expr, { $($field:ident: $value:expr),* } => $error:pat,)*) => {$(
        match rules($model).position_ids(&Prompt { $($field: $value,)* ..of(&$tokens) }) {
            Err(RopeError::PositionIds($error)) => {}
            other => panic!(
                "{} {}: {other:?}, not {}",
                $model, stringify!($tokens $($field: $value)*), stringify!($error)
            ),
        }
    )*};
}

#[test]
fn prompts_that_do_not_fit_are_refused() {
    use PositionIdsError::{
        Batch, CuSeqlens, Grid, GridTokens, Length, MissingGrid, Parameter, TokenType, UnusedGrid,
    };
    let [image, video] = [TOKENS.image, TOKENS.video];
    refused! {
        "qwen2_vl" [1, 2], { attention_mask: Some(&[true]) } =>
            Length { what: "attention_mask", per: "token", expected: 2, found: 1 },
        "qwen2_vl" [1, 2], { mm_token_type_ids: Some(&[0, 0, 0]) } =>
            Length { what: "mm_token_type_ids", per: "token", expected: 2, found: 3 },
        "qwen2_vl" [1], { seconds_per_grid: Some(&[1.0]) } =>
            Length { what: "seconds_per_grid", per: "video", expected: 0, found: 1 },
        "qwen2_vl" [1, 2], { mm_token_type_ids: Some(&[0, 4]) } => TokenType { found: 4, token: 1 },
        "qwen2_vl" [1, 2, 3], { rows: Rows::Batch(0) } => Batch { tokens: 3, rows: 0 },
        "qwen2_vl" [1, 2, 3], { rows: Rows::Batch(2) } => Batch { tokens: 3, rows: 2 },
        "qwen2_vl" [1, image], {} =>
            MissingGrid { kind: "image", row: 0, token: 1, given: 0 },
        "qwen2_vl" [1], { video_grids: &[[1, 2, 2]] } =>
            UnusedGrid { kind: "video", given: 1, used: 0 },
        // One frame of two: the video is not used up.
        "qwen3_vl" [video], { video_grids: &[[2, 2, 2]] } =>
            UnusedGrid { kind: "video", given: 1, used: 0 },
        "qwen2_vl" [1, image, image, image, 1], { image_grids: &[[1, 4, 4]] } =>
            GridTokens {
                kind: "image", row: 0, token: 1, grid: [1, 4, 4], expected: 4, found: 3
            },
        "qwen2_vl" [image], { image_grids: &[[1, 3, 4]] } =>
            Grid { kind: "image", grid: [1, 3, 4], merge: [1, 2, 2] },
        "qwen2_vl" [image], { image_grids: &[[0, 2, 2]] } =>
            Grid { kind: "image", grid: [0, 2, 2], merge: [1, 2, 2] },
        // ERNIE merges two frames into one.
        "ernie4_5_vl_moe" [video], { video_grids: &[[3, 2, 2]] } =>
            Grid { kind: "video", grid: [3, 2, 2], merge: [2, 2, 2] },
        "qwen2_5_vl" [video], { video_grids: &[[1, 2, 2]], seconds_per_grid: Some(&[-1.0]) } =>
            Parameter { parameter: "seconds_per_grid", .. },
        // Audio in video with a frame too many.
        "qwen2_5_omni" [151_652, 151_647, video, video, 151_646, 151_648, 151_653],
            { video_grids: &[[1, 2, 2]] } => GridTokens { expected: 1, found: 2, .. },
    }
    for ends in [&[][..], &[1, 3], &[0, 2], &[0, 2, 1, 3]] {
        let prompt = Prompt {
            rows: Rows::Packed(ends),
            ..of(&[1, 2, 3])
        };
        let (cu_seqlens, tokens) = (ends.to_vec(), 3);
        let refused = CuSeqlens { cu_seqlens, tokens }.into();
        assert_eq!(rules("qwen2_vl").position_ids(&prompt), Err(refused));
    }

    let found = rules("qwen2_vl").position_ids(&of(&[1, 2])).expect("ids");
    assert_eq!(
        found.select(&[2]),
        Err(PositionIdsError::Index {
            what: "token",
            found: 2,
            count: 2
        }
        .into())
    );
    assert_eq!(
        found.continuation(1, 1),
        Err(PositionIdsError::Index {
            what: "row",
            found: 1,
            count: 1
        }
        .into())
    );
    assert_eq!(
        zigzag(&[0, 8], 2, 2),
        Err(PositionIdsError::Index {
            what: "rank",
            found: 2,
            count: 2
        }
        .into())
    );
    assert_eq!(
        zigzag(&[0, 8, 14], 2, 0),
        Err(PositionIdsError::Zigzag {
            sequence: 1,
            len: 6,
            ranks: 2
        }
        .into())
    );
    assert!(vision_positions(&[[1, 3, 2]], 2).is_err());
    assert!(vision_positions(&[[1, 2, 2]], 0).is_err());
    assert!(vision_cu_seqlens(&[[0, 2, 2]]).is_err());
    assert!(vision_windows(&[[1, 2, 2]], 2, 0).is_err());
}
