//! Parameter names of checkpoints and of this crate.
//!
//! Modules have the names of Qwen3-VL's checkpoints, except that a feed-forward network has the
//! same names in every family: `gate_proj` (if it is gated), `up_proj` and `down_proj`. Everything
//! after a tower's blocks is its merger.

use burn_store::{KeyRemapper, ModuleContext};

/// The names in one family's checkpoints that differ from this crate's.
#[derive(Debug)]
pub(crate) struct Names {
    /// Prefix of the vision tower.
    visual: &'static str,
    /// Prefix of the language decoder.
    text: &'static str,
    /// Names inside the modules.
    parts: &'static [Part],
    /// The prefix of names that no module reads, if any.
    unread: Option<&'static str>,
}

/// The beginning of a name inside a module.
#[derive(Debug)]
struct Part {
    /// A pattern of the module's own name.
    within: &'static str,
    checkpoint: &'static str,
    module: &'static str,
}

const fn part(within: &'static str, checkpoint: &'static str, module: &'static str) -> Part {
    Part {
        within,
        checkpoint,
        module,
    }
}

const TOWER: &str = r"visual\.";
const BLOCKS: &str = r"visual\.blocks\.";
/// The merger, and those of DeepStack.
const MERGERS: &str = r"visual\.\w*merger\w*\.";
const LAYERS: &str = r"language_model\.layers\.";

pub(crate) const QWEN2: Names = Names {
    visual: "visual.",
    text: "model.",
    parts: &[
        part(BLOCKS, "mlp.fc1.", "mlp.up_proj."),
        part(BLOCKS, "mlp.fc2.", "mlp.down_proj."),
        part(MERGERS, "ln_q.", "norm."),
        part(MERGERS, "mlp.0.", "mlp.up_proj."),
        part(MERGERS, "mlp.2.", "mlp.down_proj."),
    ],
    unread: None,
};

pub(crate) const QWEN2_5: Names = Names {
    parts: &[
        part(MERGERS, "ln_q.", "norm."),
        part(MERGERS, "mlp.0.", "mlp.up_proj."),
        part(MERGERS, "mlp.2.", "mlp.down_proj."),
    ],
    ..QWEN2
};

pub(crate) const QWEN3: Names = Names {
    visual: "model.visual.",
    text: "model.language_model.",
    parts: &[
        part(BLOCKS, "mlp.linear_fc1.", "mlp.up_proj."),
        part(BLOCKS, "mlp.linear_fc2.", "mlp.down_proj."),
        part(MERGERS, "linear_fc1.", "mlp.up_proj."),
        part(MERGERS, "linear_fc2.", "mlp.down_proj."),
    ],
    unread: None,
};

/// The checkpoints have a layer for multi-token prediction, which transformers does not read
/// either.
pub(crate) const QWEN3_5: Names = Names {
    parts: &[
        part(LAYERS, "linear_attn.A_log", "linear_attn.a_log"),
        part(BLOCKS, "mlp.linear_fc1.", "mlp.up_proj."),
        part(BLOCKS, "mlp.linear_fc2.", "mlp.down_proj."),
        part(MERGERS, "linear_fc1.", "mlp.up_proj."),
        part(MERGERS, "linear_fc2.", "mlp.down_proj."),
    ],
    unread: Some("mtp."),
    ..QWEN3
};

pub(crate) const GLM4: Names = Names {
    parts: &[
        part(LAYERS, "mlp.gate_up_proj.", "mlp.up_proj."),
        part(TOWER, "embeddings.position_embedding.", "pos_embed."),
        part(TOWER, "post_layernorm.", "merger.post_layernorm."),
        part(TOWER, "downsample.", "merger.downsample."),
        part(MERGERS, "gate_proj.", "mlp.gate_proj."),
        part(MERGERS, "up_proj.", "mlp.up_proj."),
        part(MERGERS, "down_proj.", "mlp.down_proj."),
    ],
    ..QWEN3
};

impl Names {
    /// True if a name in a checkpoint belongs to a part that no module reads.
    pub(crate) fn is_unread(&self, name: &str) -> bool {
        self.unread.is_some_and(|unread| name.starts_with(unread))
    }

    /// The map from checkpoint names, with the prefixes of any family, to module names.
    pub(crate) fn to_module(&self) -> KeyRemapper {
        let prefixes = [
            (r"^(?:model\.)?visual\.", "visual."),
            (r"^model\.(?:language_model\.)?", "language_model."),
        ];
        let parts = self.parts.iter();
        let parts = parts.map(|part| in_part(part.within, part.checkpoint, part.module));
        remapper(prefixes.map(owned).into_iter().chain(parts))
    }

    /// The map from module names to checkpoint names.
    pub(crate) fn to_checkpoint(&self) -> KeyRemapper {
        self.named(self.visual, self.text)
    }

    /// The map from module names to those of transformers' classes, under which adapters are saved.
    pub(crate) fn to_class(&self) -> KeyRemapper {
        self.named(QWEN3.visual, QWEN3.text)
    }

    fn named(&self, visual: &'static str, text: &'static str) -> KeyRemapper {
        let prefixes = [(r"^visual\.", visual), (r"^language_model\.", text)];
        let parts = self.parts.iter();
        let parts = parts.map(|part| in_part(part.within, part.module, part.checkpoint));
        remapper(parts.chain(prefixes.map(owned)))
    }
}

fn owned((from, to): (&str, &str)) -> (String, String) {
    (from.to_owned(), to.to_owned())
}

/// A pattern that renames inside one module, and its replacement.
fn in_part(within: &str, from: &str, to: &str) -> (String, String) {
    let from = from.replace('.', r"\.");
    (
        format!(r"^({within}(?:\d+\.)?){from}"),
        format!("${{1}}{to}"),
    )
}

fn remapper(patterns: impl Iterator<Item = (String, String)>) -> KeyRemapper {
    patterns.fold(KeyRemapper::new(), |remapper, (from, to)| {
        remapper
            .add_pattern(&from, to)
            .unwrap_or_else(|error| unreachable!("the table of names is fixed: {error}"))
    })
}

/// Applies a remapper to one name.
pub(crate) fn rename(remapper: &KeyRemapper, name: &str) -> String {
    remapper
        .patterns
        .iter()
        .fold(name.to_owned(), |name, (pattern, to)| {
            pattern.replace_all(&name, to.as_str()).into_owned()
        })
}

/// The prefix of the adapted layer's name.
pub(crate) const PREFIX: &str = "base_model.model.";
/// The suffixes of A and B, in the module and in a file.
pub(crate) const SUFFIXES: [(&str, &str); 2] = [
    (".adapter.a", ".lora_A.weight"),
    (".adapter.b", ".lora_B.weight"),
];

/// A layer's name in transformers.
pub(crate) fn class_name(to_class: &KeyRemapper, path: &str) -> String {
    // The patterns are those of parameters.
    let name = rename(to_class, &format!("{path}.weight"));
    name.trim_end_matches(".weight").to_owned()
}

/// The name of an adapter's parameter in a file; `None` for other parameters.
pub(crate) fn adapter_name(to_class: &KeyRemapper, path: &str) -> Option<String> {
    SUFFIXES.iter().find_map(|(end, suffix)| {
        let layer = class_name(to_class, path.strip_suffix(end)?);
        Some(format!("{PREFIX}{layer}{suffix}"))
    })
}

/// The position of a visitor in the modules.
#[derive(Default)]
pub(crate) struct ModulePath {
    names: Vec<String>,
    containers: Vec<String>,
}

impl ModulePath {
    pub(crate) fn enter(&mut self, name: &str, container: &str) {
        self.containers.push(container.to_owned());
        if !is_variant(container) {
            self.names.push(name.to_owned());
        }
    }

    pub(crate) fn exit(&mut self, container: &str) {
        self.containers.pop();
        if !is_variant(container) {
            self.names.pop();
        }
    }

    /// The parameter's name; a norm's as in PyTorch.
    pub(crate) fn name(&self) -> String {
        as_in_pytorch(&self.names.join("."))
    }

    /// The parameter's name in a file: by `names`, or PEFT's name for an adapter.
    pub(crate) fn checkpoint_name(&self, names: &KeyRemapper) -> String {
        let name = self.name();
        adapter_name(names, &name).unwrap_or_else(|| rename(names, &name))
    }

    /// True if the parameter is that of an adapter.
    pub(crate) fn is_adapter(&self) -> bool {
        self.container() == Some("Struct:Adapter")
    }

    /// True if the parameter is transposed in files: the matrix of a linear layer, or the second of
    /// its adapter.
    pub(crate) fn is_transposed(&self) -> bool {
        let is_called = |expected| self.names.last().is_some_and(|name| name == expected);
        match self.container() {
            Some("Struct:Linear") => is_called("weight"),
            _ => self.is_adapter() && is_called("b"),
        }
    }

    /// The struct that holds the parameter.
    fn container(&self) -> Option<&str> {
        ModuleContext::new(&self.containers).module_type()
    }
}

/// Variants of enums are no part of a checkpoint's names.
fn is_variant(container: &str) -> bool {
    container.starts_with("Enum:")
}

/// burn's names of norm parameters are `gamma` and `beta`.
fn as_in_pytorch(name: &str) -> String {
    match name.rsplit_once('.') {
        Some((module, "gamma")) => format!("{module}.weight"),
        Some((module, "beta")) => format!("{module}.bias"),
        _ => name.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAIRS: [(&Names, &str, &str); 14] = [
        (
            &QWEN2,
            "visual.blocks.3.mlp.fc1.weight",
            "visual.blocks.3.mlp.up_proj.weight",
        ),
        (
            &QWEN2,
            "visual.merger.mlp.2.bias",
            "visual.merger.mlp.down_proj.bias",
        ),
        (
            &QWEN2_5,
            "visual.merger.ln_q.weight",
            "visual.merger.norm.weight",
        ),
        (
            &QWEN2_5,
            "visual.blocks.0.mlp.gate_proj.weight",
            "visual.blocks.0.mlp.gate_proj.weight",
        ),
        (
            &QWEN2_5,
            "model.layers.1.mlp.up_proj.weight",
            "language_model.layers.1.mlp.up_proj.weight",
        ),
        (
            &QWEN3,
            "model.visual.deepstack_merger_list.0.linear_fc1.weight",
            "visual.deepstack_merger_list.0.mlp.up_proj.weight",
        ),
        (
            &QWEN3,
            "model.visual.blocks.0.mlp.linear_fc2.bias",
            "visual.blocks.0.mlp.down_proj.bias",
        ),
        (
            &QWEN3,
            "model.language_model.norm.weight",
            "language_model.norm.weight",
        ),
        (
            &GLM4,
            "model.language_model.layers.11.mlp.gate_up_proj.weight",
            "language_model.layers.11.mlp.up_proj.weight",
        ),
        (
            &GLM4,
            "model.visual.blocks.0.mlp.up_proj.weight",
            "visual.blocks.0.mlp.up_proj.weight",
        ),
        (
            &GLM4,
            "model.visual.merger.up_proj.weight",
            "visual.merger.mlp.up_proj.weight",
        ),
        (
            &GLM4,
            "model.visual.downsample.bias",
            "visual.merger.downsample.bias",
        ),
        (
            &GLM4,
            "model.visual.embeddings.position_embedding.weight",
            "visual.pos_embed.weight",
        ),
        (
            &QWEN3_5,
            "model.language_model.layers.2.linear_attn.A_log",
            "language_model.layers.2.linear_attn.a_log",
        ),
    ];

    #[test]
    fn names_go_both_ways() {
        for (names, checkpoint, module) in PAIRS {
            assert_eq!(rename(&names.to_module(), checkpoint), module);
            assert_eq!(rename(&names.to_checkpoint(), module), checkpoint);
        }
    }

    #[test]
    fn either_prefix_is_read() {
        for name in [
            "model.visual.merger.ln_q.weight",
            "visual.merger.ln_q.weight",
        ] {
            assert_eq!(
                rename(&QWEN2.to_module(), name),
                "visual.merger.norm.weight"
            );
        }
        for name in ["model.language_model.norm.weight", "model.norm.weight"] {
            assert_eq!(
                rename(&QWEN2.to_module(), name),
                "language_model.norm.weight"
            );
        }
        assert_eq!(
            rename(&QWEN2.to_module(), "lm_head.weight"),
            "lm_head.weight"
        );
    }
}
