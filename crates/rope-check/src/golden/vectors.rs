//! A golden `.safetensors` file: read, checked, and turned into a [`Case`].

use rope_core::hf::{Component, ConfigError};
use rope_core::{Direction, Layout, Pairing, Positions, RopeError, RotarySpec};

use super::error::{GoldenError, lost_gradient};
use super::row::Row;
use super::tensors::{Kind, Tensors, Values};
use crate::engine::Case;
use crate::names::pairing_name;

/// Spellings of the layouts, by the first letters of their dimensions.
const LAYOUTS: [(&str, Layout); 9] = [
    ("BHSD", Layout::Bnsd),
    ("BNSD", Layout::Bnsd),
    ("BSHD", Layout::Bsnd),
    ("BSND", Layout::Bsnd),
    ("SBHD", Layout::Sbnd),
    ("SBND", Layout::Sbnd),
    ("NHD", Layout::Tnd),
    ("THD", Layout::Tnd),
    ("TND", Layout::Tnd),
];
const LAYOUT_NAMES: &str = "[B,H,S,D], [B,S,H,D], [S,B,H,D] or [T,H,D]";

const PAIRING_NAMES: &str = "half, adjacent, quarter or interleave_half";

/// The element types that values may be stored in, most exact first, and how tensor names end in
/// them.
const INPUT_TYPES: [&str; 4] = ["f64", "f32", "f16", "bf16"];
/// The types in which a truth is worth comparing with.
pub(super) const TRUTH_TYPES: [&str; 2] = ["f64", "f32"];

/// Names of cos, and of sin, in dumps: tables of HF's modules, or real and imaginary parts of
/// complex ones.
const COS: [&str; 2] = ["cos", "freqs_cis_re"];
const SIN: [&str; 2] = ["sin", "freqs_cis_im"];

/// Another implementation's results for one rotary module.
#[derive(Clone, Debug)]
pub struct GoldenVectors {
    pub(super) case: Case,
    /// The operation from q to q_out: the rotation, or the inverse.
    pub(super) operation: Direction,
    /// q, and k where it is there.
    pub(super) forward: Vec<Mapping>,
    /// The gradients that are there.
    pub(super) adjoint: Vec<Mapping>,
    pub(super) frequencies: Option<FrequencyGradient>,
    /// Of q and k those whose gradient is not there, though that of the output is.
    lost: Vec<&'static str>,
    pub(super) cos: Option<Values>,
    pub(super) sin: Option<Values>,
    pub(super) inv_freq: Option<Values>,
    pub(super) attention_scaling: Option<f64>,
}

/// The gradient of the frequencies that a file gives, `[axes, heads, lanes]`, and what makes it.
#[derive(Clone, Debug)]
pub(super) struct FrequencyGradient {
    pub(super) truth: Values,
    /// q and gq, then k and gk where there is k with a gradient.
    pub(super) passes: Vec<[Values; 2]>,
}

/// q or k, or the gradient of one, and what became of it.
#[derive(Clone, Debug)]
pub(super) struct Mapping {
    pub(super) heads: usize,
    pub(super) input: Values,
    pub(super) truth: Values,
}

impl GoldenVectors {
    /// Reads the bytes of a `.safetensors` file.
    ///
    /// # Errors
    /// [`GoldenError`]: broken container, metadata or tensors missing, of the wrong type or shape,
    /// or no rotation made of the metadata.
    pub fn read(bytes: &[u8]) -> Result<Self, GoldenError> {
        let file = File(Tensors::parse(bytes)?);
        let layout = file.layout()?;
        let q = file.require("q", &INPUT_TYPES, "every comparison")?;
        let rank = if layout == Layout::Tnd { 3 } else { 4 };
        let stated_head_dim = file.number::<usize>("head_dim", "a number of channels")?;
        let head_dim = stated_head_dim.or(q.shape.last().copied()).unwrap_or(0);
        let fits = |shape: &[usize]| shape.len() == rank && shape.last() == Some(&head_dim);
        let expected = || format!("{LAYOUT_NAMES} as the layout says, with D = {head_dim}");
        if !fits(&q.shape) {
            return Err(q.misshapen(expected()));
        }
        let own = file.optional("head_frequencies", &INPUT_TYPES)?;
        let (batch, seq, heads) = dimensions(layout, &q.shape);
        if q.values.is_empty() {
            let expected =
                "at least one sample, token, head and channel: there is nothing to compare";
            return Err(q.misshapen(expected));
        }
        file.expect_inputs_of_outputs()?;
        let (spec, axes) = match &own {
            None => {
                let spec = file.spec(head_dim)?;
                let axes = spec.axis_count();
                (spec, axes)
            }
            Some(own) => file.spec_of_heads(own, heads, head_dim)?,
        };
        let positions = file.positions(axes, layout, batch, seq)?;
        let seq_len = file.number("seq_len", "a number of tokens")?;

        let mut case = Case::new(spec, positions, layout, batch, seq);
        // transformers takes the highest position in use for the length that dynamic and LongRoPE
        // frequencies depend on.
        case.seq_len = seq_len.or(Some(u64::from(case.positions.highest()) + 1));
        case.heads = heads;
        let k = file.optional("k", &INPUT_TYPES)?;
        let gk = file.optional("gk", &INPUT_TYPES)?;
        case.kv_heads = 0;
        if let Some(k) = k.as_ref().or(gk.as_ref()) {
            if !fits(&k.shape) {
                return Err(k.misshapen(expected()));
            }
            case.kv_heads = dimensions(layout, &k.shape).2;
            if own.is_some() && case.kv_heads != heads {
                return Err(k.misshapen(format!("{heads} heads, as head_frequencies has")));
            }
        }
        let (q_dims, k_dims) = (case.dims(case.heads), case.dims(case.kv_heads));
        let given = [(Some(&q), "gq", &q_dims[..]), (k.as_ref(), "gk", &k_dims)];
        let frequencies = file.frequency_gradient(own.as_ref(), given)?;
        case.head_frequencies = own.map(|own| own.values.into());
        let mut forward = vec![file.mapping(q, "q_out", case.heads, &q_dims)?];
        if let Some(k) = k {
            forward.push(file.mapping(k, "k_out", case.kv_heads, &k_dims)?);
        }
        let gq = match (file.optional("gq", &INPUT_TYPES)?, &gk) {
            (None, Some(_)) => return Err(file.0.missing("gq", "the gradient (gk is there)")),
            (gq, _) => gq,
        };
        let sides = [
            ("q", gq, case.heads, &q_dims[..]),
            ("k", gk, case.kv_heads, &k_dims),
        ];
        let (adjoint, lost) = file.gradients(sides)?;
        let first = |names: [&str; 2]| {
            names
                .iter()
                .find_map(|name| file.optional(name, &TRUTH_TYPES).transpose())
                .transpose()
        };
        Ok(Self {
            case,
            operation: file.operation()?,
            forward,
            adjoint,
            frequencies,
            lost,
            cos: first(COS)?,
            sin: first(SIN)?,
            inv_freq: file.optional("inv_freq", &TRUTH_TYPES)?,
            attention_scaling: file.number("attention_scaling", "a number")?,
        })
    }

    /// A failing row for each gradient that is not there, though that of the output is: the forward
    /// of an operator without a backward is compared, and does not pass for a whole module.
    pub fn lost_gradients(&self) -> Vec<Row> {
        let row = |of: &&str| Row::missing(&format!("d{of}"), lost_gradient(of));
        self.lost.iter().map(row).collect()
    }
}

/// The container and its metadata.
struct File(Tensors);

impl File {
    /// The gradients of q and k that are there, and the names of those that are not, though that of
    /// the output is.
    fn gradients(
        &self,
        sides: [(&'static str, Option<Values>, usize, &[usize]); 2],
    ) -> Result<(Vec<Mapping>, Vec<&'static str>), GoldenError> {
        let (mut adjoint, mut lost) = (Vec::new(), Vec::new());
        for (of, upstream, heads, dims) in sides {
            let Some(upstream) = upstream else { continue };
            let name = format!("d{of}");
            match self.optional(&name, &INPUT_TYPES)? {
                Some(_) => adjoint.push(self.mapping(upstream, &name, heads, dims)?),
                None => lost.push(of),
            }
        }
        Ok((adjoint, lost))
    }

    fn positions(
        &self,
        axes: usize,
        layout: Layout,
        batch: usize,
        seq: usize,
    ) -> Result<Positions, GoldenError> {
        let ids = self.0.find("position_ids", Kind::Numbers)?;
        let ids = ids.ok_or_else(|| self.0.missing("position_ids", "every comparison"))?;
        let mut found = positions(ids, axes, layout, batch, seq);
        // It is the layout that does not fit, more often than the ids.
        if let Err(GoldenError::TensorShape { expected, .. }) = &mut found
            && !self.0.metadata.contains_key("layout")
        {
            *expected += "; q was read as [B,H,S,D], the default: set layout in the metadata";
        }
        found
    }

    fn text(&self, key: &'static str, expected: &'static str) -> Result<&str, GoldenError> {
        let found = self.0.metadata.get(key).map(String::as_str);
        found.ok_or(GoldenError::MissingMetadata { key, expected })
    }

    fn number<T: std::str::FromStr>(
        &self,
        key: &'static str,
        expected: &'static str,
    ) -> Result<Option<T>, GoldenError> {
        let Some(found) = self.0.metadata.get(key) else {
            return Ok(None);
        };
        let wrong = |_| GoldenError::Metadata {
            key,
            expected,
            found: found.clone(),
        };
        found.trim().parse().map(Some).map_err(wrong)
    }

    /// The layout, from the first bracket of the metadata: Hugging Face's `[B,H,S,D]` where nothing
    /// is stated.
    fn layout(&self) -> Result<Layout, GoldenError> {
        let Some(stated) = self.0.metadata.get("layout") else {
            return Ok(Layout::Bnsd);
        };
        let bracket = stated
            .split_once('[')
            .and_then(|(_, rest)| rest.split_once(']'));
        let initials: String = match bracket {
            Some((dims, _)) => dims
                .split(',')
                .filter_map(|dim| dim.trim().chars().next())
                .collect(),
            None => stated.trim().to_owned(),
        };
        let known = LAYOUTS
            .iter()
            .find(|(name, _)| name.eq_ignore_ascii_case(&initials));
        let unknown = || GoldenError::Metadata {
            key: "layout",
            expected: LAYOUT_NAMES,
            found: stated.clone(),
        };
        known.map(|(_, layout)| *layout).ok_or_else(unknown)
    }

    /// The operation of the file, whose transpose made the gradients.
    fn operation(&self) -> Result<Direction, GoldenError> {
        match self.0.metadata.get("operation").map(String::as_str) {
            None | Some("rotation") => Ok(Direction::Forward),
            Some("inverse") => Ok(Direction::Adjoint),
            Some(found) => Err(GoldenError::Metadata {
                key: "operation",
                expected: "\"rotation\" or \"inverse\"",
                found: found.to_owned(),
            }),
        }
    }

    /// The rotation that is stated as such, or the one that the model's parameters make.
    fn spec(&self, head_dim: usize) -> Result<RotarySpec, GoldenError> {
        if let Some(stated) = self.0.metadata.get("rotation") {
            let refused = |found: String| GoldenError::Metadata {
                key: "rotation",
                expected: "the JSON of a RotarySpec for heads as wide as q's",
                found,
            };
            expect_sections(stated)?;
            let spec: RotarySpec = serde_json::from_str(stated)
                .map_err(|error| refused(format!("{stated} ({error})")))?;
            expect_known_keys(stated, &spec)?;
            let fits = spec.head_dim() == head_dim;
            return fits.then_some(spec).ok_or_else(|| refused(stated.clone()));
        }
        let model_type = self.text("model_type", "the Hugging Face model type")?;
        let component = self.text("component", "\"text\" or \"vision\"");
        let component = component.and_then(|name| Ok(name.parse().map_err(RopeError::from)?));
        // Before anything else is asked for, which could not help.
        let stated_component = component.as_ref().copied().unwrap_or(Component::Text);
        if let Some(refused) = refusal(model_type, stated_component) {
            return Err(refused);
        }
        let parameters = self.text("rope_parameters", "the JSON of that configuration object")?;
        Ok(RotarySpec::from_rope_parameters(
            model_type, component?, parameters, head_dim,
        )?)
    }

    /// The channels that turn and how they pair, and the number of axes, where the file states
    /// frequencies for each head.
    fn spec_of_heads(
        &self,
        frequencies: &Values,
        heads: usize,
        head_dim: usize,
    ) -> Result<(RotarySpec, usize), GoldenError> {
        let [axes, found, lanes] = frequencies.shape[..] else {
            return Err(frequencies.misshapen("[axes, heads, lanes]"));
        };
        if axes == 0 || found != heads || lanes == 0 {
            let expected = format!("[axes, {heads}, lanes], which follows from q");
            return Err(frequencies.misshapen(expected));
        }
        let stated = self.text("pairing", PAIRING_NAMES)?;
        let mut known = Pairing::ALL.into_iter();
        let pairing = known.find(|pairing| pairing_name(*pairing) == stated);
        let pairing = pairing.ok_or_else(|| GoldenError::Metadata {
            key: "pairing",
            expected: PAIRING_NAMES,
            found: stated.to_owned(),
        })?;
        let spec = RotarySpec::builder(head_dim).rotary_dim(2 * lanes);
        Ok((spec.pairing(pairing).build()?, axes))
    }

    /// The tensor `stem.X` for the first X of `types` that is present, without its type in
    /// messages.
    fn optional(&self, stem: &str, types: &[&str]) -> Result<Option<Values>, GoldenError> {
        for suffix in types {
            if let Some(found) = self.0.find(&format!("{stem}.{suffix}"), Kind::Floats)? {
                let mut found = found.clone();
                found.name = stem.to_owned();
                return Ok(Some(found));
            }
        }
        Ok(None)
    }

    fn require(&self, stem: &str, types: &[&str], needed_by: &str) -> Result<Values, GoldenError> {
        let name = format!("{stem}.{{{}}}", types.join(","));
        let missing = || self.0.missing(&name, needed_by);
        self.optional(stem, types)?.ok_or_else(missing)
    }

    /// Refuses an output whose input is missing: it would be compared with nothing. A missing
    /// output is refused where its input is read.
    fn expect_inputs_of_outputs(&self) -> Result<(), GoldenError> {
        for (input, output) in [("k", "k_out"), ("gq", "dq"), ("gk", "dk")] {
            if self.optional(output, &INPUT_TYPES)?.is_some() {
                self.require(input, &INPUT_TYPES, &format!("the comparison of {output}"))?;
            }
        }
        Ok(())
    }

    /// The comparison with dhead_frequencies, if the file has that.
    fn frequency_gradient(
        &self,
        frequencies: Option<&Values>,
        given: [(Option<&Values>, &str, &[usize]); 2],
    ) -> Result<Option<FrequencyGradient>, GoldenError> {
        const NAME: &str = "dhead_frequencies";
        if self.optional(NAME, &INPUT_TYPES)?.is_none() {
            return Ok(None);
        }
        let needed_by = format!("the comparison of {NAME}");
        let truth = self.require(NAME, &TRUTH_TYPES, &needed_by)?;
        let Some(frequencies) = frequencies else {
            return Err(self.0.missing("head_frequencies", &needed_by));
        };
        if truth.shape != frequencies.shape {
            let expected = format!("{:?}, as head_frequencies has", frequencies.shape);
            return Err(truth.misshapen(expected));
        }
        let mut passes = Vec::new();
        for (of, upstream, dims) in given {
            let found = self.optional(upstream, &INPUT_TYPES)?;
            match (of, found) {
                (Some(of), Some(upstream)) => {
                    for values in [of, &upstream] {
                        if values.shape != dims {
                            let expected = format!("{dims:?}, which follows from q and k");
                            return Err(values.misshapen(expected));
                        }
                    }
                    passes.push([of.clone(), upstream]);
                }
                // k takes no part in the loss then.
                (_, None) if upstream == "gk" => {}
                (None, _) => return Err(self.0.missing("k", &needed_by)),
                (_, None) => return Err(self.0.missing("gq", &needed_by)),
            }
        }
        Ok(Some(FrequencyGradient { truth, passes }))
    }

    fn mapping(
        &self,
        input: Values,
        image: &str,
        heads: usize,
        dims: &[usize],
    ) -> Result<Mapping, GoldenError> {
        let truth = self.require(image, &TRUTH_TYPES, &format!("the image of {}", input.name))?;
        for values in [&input, &truth] {
            if values.shape != dims {
                return Err(values.misshapen(format!("{dims:?}, which follows from q and k")));
            }
        }
        Ok(Mapping {
            heads,
            input,
            truth,
        })
    }
}

/// The error for a model type that is refused, with the reason. A configuration of the model type
/// alone is enough to get it.
fn refusal(model_type: &str, component: Component) -> Option<GoldenError> {
    let config = serde_json::json!({ "model_type": model_type }).to_string();
    let read = match component {
        Component::Text => RotarySpec::from_hf_config(&config),
        Component::Vision => RotarySpec::from_hf_vision_config(&config),
    };
    match read {
        Err(RopeError::Config(ConfigError::UnsupportedModelType { model_type, reason })) => {
            Some(GoldenError::ModelType { model_type, reason })
        }
        _ => None,
    }
}

/// The keys of a rotation.
const ROTATION_KEYS: [&str; 8] = [
    "head_dim",
    "rotary_dim",
    "rotary_offset",
    "pairing",
    "axis_layout",
    "theta",
    "frequencies",
    "attention_scaling",
];
/// Other programs' names of the keys.
const ROTATION_ALIASES: [(&str, &str); 9] = [
    ("base", "theta"),
    ("rope_theta", "theta"),
    ("rope_scaling", "frequencies"),
    ("rope_parameters", "frequencies"),
    ("inv_freq", "frequencies"),
    ("mrope_section", "axis_layout"),
    ("sections", "axis_layout"),
    ("axes", "axis_layout"),
    ("interleaved", "pairing"),
];

/// A name of an axis layout in the place of the layout, which serde would call a unit variant.
fn expect_sections(stated: &str) -> Result<(), GoldenError> {
    let Ok(json) = serde_json::from_str::<serde_json::Value>(stated) else {
        return Ok(());
    };
    match json["axis_layout"].as_str() {
        None | Some("single") => Ok(()),
        Some(name) => Err(GoldenError::Metadata {
            key: "rotation",
            expected: "the JSON of a RotarySpec: axis_layout is \"single\", or a layout with its \
                       sections, as {\"striped\": [24, 20, 20]}",
            found: format!("axis_layout {name:?}"),
        }),
    }
}

/// Refuses keys that serde would pass over: the rotation would be another than the file says.
fn expect_known_keys(stated: &str, spec: &RotarySpec) -> Result<(), GoldenError> {
    let json: serde_json::Value = serde_json::from_str(stated).unwrap_or_default();
    let unknown = |key: &str, at: &str, expected: &[&str]| {
        let meant = ROTATION_ALIASES.iter().find(|(alias, _)| *alias == key);
        let meant = meant.filter(|_| at.is_empty());
        GoldenError::RotationKey {
            key: format!("{:?}", format!("{at}{key}")),
            expected: expected.join(", "),
            advice: meant.map_or(String::new(), |(_, key)| format!("; here it is {key:?}")),
        }
    };
    let check = |json: &serde_json::Value, at: &str, expected: &[&str]| {
        let mut keys = json
            .as_object()
            .into_iter()
            .flat_map(|object| object.keys());
        let extra = keys.find(|key| !expected.contains(&&key[..]));
        extra.map_or(Ok(()), |key| Err(unknown(key, at, expected)))
    };
    check(&json, "", &ROTATION_KEYS)?;
    let given = &json["frequencies"];
    if !given.is_null() {
        if !json["theta"].is_null() {
            let others = ROTATION_KEYS.into_iter().filter(|key| *key != "theta");
            return Err(unknown("theta", "", &others.collect::<Vec<_>>()));
        }
        // The frequencies as they were read.
        let read = serde_json::to_value(spec.frequencies()).unwrap_or_default();
        for (at, given, read) in [
            ("frequencies.", given, &read),
            ("frequencies.scaling.", &given["scaling"], &read["scaling"]),
        ] {
            let read = read.as_object().into_iter().flat_map(|read| read.keys());
            let read: Vec<&str> = read.map(String::as_str).collect();
            check(given, at, &read)?;
        }
    }
    Ok(())
}

/// Batch, seq and heads of a shape in `layout`'s order.
fn dimensions(layout: Layout, shape: &[usize]) -> (usize, usize, usize) {
    match layout {
        Layout::Bsnd => (shape[0], shape[1], shape[2]),
        Layout::Bnsd => (shape[0], shape[2], shape[1]),
        Layout::Sbnd => (shape[1], shape[0], shape[2]),
        Layout::Tnd => (1, shape[0], shape[1]),
    }
}

/// Positions as `[axes, tokens]`, from any of the shapes that the field keeps them in.
fn positions(
    tokens: &Values,
    axes: usize,
    layout: Layout,
    batch: usize,
    seq: usize,
) -> Result<Positions, GoldenError> {
    let (ids, shape) = (&tokens.values, &tokens.shape[..]);
    let keep = |values: &[f64]| -> Result<Positions, GoldenError> {
        Ok(if tokens.is_integer() {
            let ids: Vec<i64> = values.iter().map(|id| *id as i64).collect();
            Positions::new(axes, &ids)?
        } else {
            Positions::real(axes, values)?
        })
    };
    // Vision towers and packed image tokens list the axes of each token.
    if layout == Layout::Tnd && axes > 1 && shape == [seq, axes] {
        let by_axis: Vec<f64> = (0..axes)
            .flat_map(|axis| ids.iter().skip(axis).step_by(axes).copied())
            .collect();
        return keep(&by_axis);
    }
    let per_axis = match shape {
        [first, rest @ ..] if *first == axes && !rest.is_empty() => rest,
        _ if axes == 1 => shape,
        _ => &[],
    };
    if ![&[batch, seq][..], &[1, seq], &[seq]].contains(&per_axis) {
        let expected = match (axes, layout) {
            (1, Layout::Tnd) => format!("[{seq}]"),
            (1, _) => format!("[{batch}, {seq}] or [{seq}]"),
            (_, Layout::Tnd) => format!("[{seq}, {axes}] or [{axes}, {seq}]"),
            _ => format!("[{axes}, {batch}, {seq}] or [{axes}, {seq}]"),
        };
        return Err(tokens.misshapen(format!("{expected}, one id per position axis and token")));
    }
    keep(ids)
}
