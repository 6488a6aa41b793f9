//! Position ids of prompts: `rope_index_*.json`.

use rope_core::position_ids::{Compatibility, PositionIds, PositionRules, Prompt, Rows, TokenIds};
use serde::Deserialize;

use super::error::GoldenError;
use super::row::Row;

const AXES: usize = 3;

/// The token ids of Qwen's and GLM's checkpoints, where a file does not state its own.
const TOKENS: TokenIds = TokenIds {
    image: 151_655,
    video: 151_656,
    audio: Some(151_646),
    vision_start: Some(151_652),
    audio_start: Some(151_647),
    video_start: Some(151_690),
    video_end: Some(151_691),
};

/// Prompts, and the position ids that another implementation gave them.
#[derive(Clone, Debug, Deserialize)]
pub struct PromptCases {
    #[serde(rename = "_meta", default)]
    meta: Meta,
    cases: Vec<Case>,
}

#[derive(Clone, Debug, Default, Deserialize)]
struct Meta {
    /// The version of transformers that gave the ids.
    transformers: Option<String>,
    #[serde(default)]
    token_ids: StatedTokens,
}

#[derive(Clone, Debug, Default, Deserialize)]
struct StatedTokens {
    image_token_id: Option<i64>,
    video_token_id: Option<i64>,
    vision_start_token_id: Option<i64>,
}

#[derive(Clone, Debug, Deserialize)]
struct Case {
    model: String,
    scenario: String,
    input_ids: Vec<Vec<i64>>,
    attention_mask: Option<Vec<Vec<i64>>>,
    mm_token_type_ids: Option<Vec<Vec<i64>>>,
    #[serde(flatten)]
    grids: Grids,
    /// Where audio models have their grids.
    #[serde(default)]
    kwargs: Grids,
    position_ids: Vec<Vec<Vec<f64>>>,
    rope_deltas: Vec<[f64; 1]>,
}

#[derive(Clone, Debug, Default, Deserialize)]
struct Grids {
    #[serde(default)]
    image_grid_thw: Vec<[usize; 3]>,
    #[serde(default)]
    video_grid_thw: Vec<[usize; 3]>,
    #[serde(alias = "second_per_grids")]
    second_per_grid_ts: Option<Vec<f64>>,
}

/// The option that reproduces the position ids of a version of transformers.
pub(crate) fn version_of(transformers: Option<&str>) -> Compatibility {
    match transformers {
        Some(version) if version.starts_with("4.") => Compatibility::Transformers4_57,
        Some(version) if version.starts_with("5.") => Compatibility::Transformers5_23,
        _ => Compatibility::Exact,
    }
}

/// Why the ids differ from the default's; empty if they do not.
pub(crate) fn reasons(found: &PositionIds) -> String {
    let reasons = found.divergences().iter().map(ToString::to_string);
    reasons.collect::<Vec<_>>().join("; ")
}

impl PromptCases {
    pub(super) fn read(json: serde_json::Value) -> Result<Self, GoldenError> {
        serde_json::from_value(json).map_err(|error| GoldenError::Json {
            detail: error.to_string(),
        })
    }

    /// One row per case: the ids of all tokens but padding, then the rope deltas, as the file's
    /// version of transformers has them. A row's note says why the default differs, where it does.
    ///
    /// # Errors
    /// [`GoldenError::Rope`] for prompts whose tokens, grids and masks do not fit together.
    pub fn compare(&self) -> Result<Vec<Row>, GoldenError> {
        self.cases
            .iter()
            .map(|case| self.compare_case(case))
            .collect()
    }

    fn compare_case(&self, case: &Case) -> Result<Row, GoldenError> {
        let stated = &self.meta.token_ids;
        let tokens = TokenIds {
            image: stated.image_token_id.unwrap_or(TOKENS.image),
            video: stated.video_token_id.unwrap_or(TOKENS.video),
            vision_start: stated.vision_start_token_id.or(TOKENS.vision_start),
            ..TOKENS
        };
        let version = version_of(self.meta.transformers.as_deref());
        let rules = PositionRules::new(&case.model, tokens)?;
        let found = case.position_ids(rules.with_compatibility(version), version)?;
        let exact = case.position_ids(rules, version)?;
        let (values, labels) = case.values(&found);
        let (exact_values, _) = case.values(&exact);
        let expected = case.expected();
        let mut row = Row::compare(
            &format!("{}/{}", case.model, case.scenario),
            "i64",
            &match &self.meta.transformers {
                Some(version) => format!("transformers {version}"),
                None => "default".to_owned(),
            },
            &values,
            &expected,
            |_, _| 0.0,
            |i| labels.get(i).cloned().unwrap_or_default(),
        );
        if exact_values != expected {
            row.note = Some(reasons(&found));
        }
        Ok(row)
    }
}

impl Case {
    fn attended(&self) -> Vec<bool> {
        match &self.attention_mask {
            Some(mask) => mask
                .iter()
                .flatten()
                .map(|attended| *attended == 1)
                .collect(),
            None => self.input_ids.iter().flatten().map(|_| true).collect(),
        }
    }

    fn position_ids(
        &self,
        rules: PositionRules,
        version: Compatibility,
    ) -> Result<PositionIds, GoldenError> {
        // Version 4.57 knows no token types, and GLM's files call video frames images there.
        let types = self
            .mm_token_type_ids
            .as_ref()
            .filter(|_| version != Compatibility::Transformers4_57)
            .map(|types| types.concat());
        let (grids, kwargs) = (&self.grids, &self.kwargs);
        Ok(rules.position_ids(&Prompt {
            input_ids: &self.input_ids.concat(),
            rows: Rows::Batch(self.input_ids.len()),
            attention_mask: Some(&self.attended()),
            mm_token_type_ids: types.as_deref(),
            image_grids: &[&grids.image_grid_thw[..], &kwargs.image_grid_thw].concat(),
            video_grids: &[&grids.video_grid_thw[..], &kwargs.video_grid_thw].concat(),
            seconds_per_grid: grids
                .second_per_grid_ts
                .as_deref()
                .or(kwargs.second_per_grid_ts.as_deref()),
        })?)
    }

    /// Ids of attended tokens axis by axis, then deltas, each with its name.
    fn values(&self, found: &PositionIds) -> (Vec<f64>, Vec<String>) {
        let seq = self.input_ids.first().map_or(1, Vec::len).max(1);
        let attended = self.attended();
        let ids = (0..AXES).flat_map(|axis| {
            let attended_id = |(token, id): (usize, &f64)| {
                let name = format!("axis {axis}, row {}, token {}", token / seq, token % seq);
                attended[token].then_some((*id, name))
            };
            found
                .axis(axis)
                .iter()
                .enumerate()
                .filter_map(attended_id)
                .collect::<Vec<_>>()
        });
        let deltas = found.rope_deltas().iter().enumerate();
        ids.chain(deltas.map(|(row, delta)| (*delta, format!("rope delta of row {row}"))))
            .unzip()
    }

    fn expected(&self) -> Vec<f64> {
        let attended = self.attended();
        let ids = self.position_ids.iter().flat_map(|axis| {
            let ids = axis.iter().flatten().zip(&attended);
            ids.filter_map(|(id, attended)| attended.then_some(*id))
                .collect::<Vec<_>>()
        });
        ids.chain(self.rope_deltas.iter().map(|delta| delta[0]))
            .collect()
    }
}
