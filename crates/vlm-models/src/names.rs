//! Parameter names of checkpoints and of this crate.
//!
//! `vlm_family::Names` lists the differences of each family.

use burn::tensor::DType;
use burn_store::{KeyRemapper, ModuleContext};
use vlm_family::Names;

use crate::linear::adapter_dtype;

/// The correction of a router's choice, a buffer in transformers.
const CORRECTION: &str = "e_score_correction_bias";

/// The maps between names that a family's differences make.
pub(crate) trait Remap {
    /// True if a name in a checkpoint belongs to a part that no module reads.
    fn is_unread(&self, name: &str) -> bool;
    /// The map from checkpoint names, with the prefixes of any family, to module names.
    fn to_module(&self) -> KeyRemapper;
    /// The map from module names to checkpoint names.
    fn to_checkpoint(&self) -> KeyRemapper;
    /// The map from module names to those of transformers' classes, under which adapters are saved.
    fn to_class(&self) -> KeyRemapper;
}

impl Remap for Names {
    fn is_unread(&self, name: &str) -> bool {
        self.unread.is_some_and(|unread| name.starts_with(unread))
    }

    fn to_module(&self) -> KeyRemapper {
        let prefixes = [
            (r"^(?:model\.)?visual\.", "visual."),
            (r"^model\.(?:language_model\.)?", "language_model."),
        ];
        let parts = self.parts.iter();
        let parts = parts.map(|part| in_part(part.within, part.checkpoint, part.module));
        remapper(prefixes.map(owned).into_iter().chain(parts))
    }

    fn to_checkpoint(&self) -> KeyRemapper {
        named(self, self.visual.unwrap_or_default(), self.text)
    }

    fn to_class(&self) -> KeyRemapper {
        match self.visual {
            Some(_) => named(self, "model.visual.", "model.language_model."),
            None => self.to_checkpoint(),
        }
    }
}

fn named(names: &Names, visual: &'static str, text: &'static str) -> KeyRemapper {
    let prefixes = [(r"^visual\.", visual), (r"^language_model\.", text)];
    let parts = names.parts.iter();
    let parts = parts.map(|part| in_part(part.within, part.module, part.checkpoint));
    remapper(parts.chain(prefixes.map(owned)))
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

/// The name in transformers of a layer, or of the parameter of experts.
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

    /// The type of the parameter in a model of a type.
    pub(crate) fn dtype(&self, model: DType) -> DType {
        match self.container() {
            Some("Struct:SigmoidRouter") => adapter_dtype(model),
            _ => model,
        }
    }

    /// True if the parameter is never trained.
    pub(crate) fn is_constant(&self) -> bool {
        self.names.last().is_some_and(|name| name == CORRECTION)
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

/// The matrices of experts are no module.
fn as_in_pytorch(name: &str) -> String {
    match name.rsplit_once('.') {
        Some((parameter, "matrices")) => parameter.to_owned(),
        _ => name.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAIRS: [[&str; 3]; 18] = [
        [
            "llama",
            "model.layers.1.mlp.gate_proj.weight",
            "language_model.layers.1.mlp.gate_proj.weight",
        ],
        [
            "qwen2_vl",
            "visual.blocks.3.mlp.fc1.weight",
            "visual.blocks.3.mlp.up_proj.weight",
        ],
        [
            "qwen2_vl",
            "visual.merger.mlp.2.bias",
            "visual.merger.mlp.down_proj.bias",
        ],
        [
            "qwen2_5_vl",
            "visual.merger.ln_q.weight",
            "visual.merger.norm.weight",
        ],
        [
            "qwen2_5_vl",
            "visual.blocks.0.mlp.gate_proj.weight",
            "visual.blocks.0.mlp.gate_proj.weight",
        ],
        [
            "qwen2_5_vl",
            "model.layers.1.mlp.up_proj.weight",
            "language_model.layers.1.mlp.up_proj.weight",
        ],
        [
            "qwen3_vl",
            "model.visual.deepstack_merger_list.0.linear_fc1.weight",
            "visual.deepstack_merger_list.0.mlp.up_proj.weight",
        ],
        [
            "qwen3_vl",
            "model.visual.blocks.0.mlp.linear_fc2.bias",
            "visual.blocks.0.mlp.down_proj.bias",
        ],
        [
            "qwen3_vl",
            "model.language_model.norm.weight",
            "language_model.norm.weight",
        ],
        [
            "glm4v",
            "model.language_model.layers.11.mlp.gate_up_proj.weight",
            "language_model.layers.11.mlp.up_proj.weight",
        ],
        [
            "glm4v",
            "model.visual.blocks.0.mlp.up_proj.weight",
            "visual.blocks.0.mlp.up_proj.weight",
        ],
        [
            "glm4v",
            "model.visual.merger.up_proj.weight",
            "visual.merger.mlp.up_proj.weight",
        ],
        [
            "glm4v",
            "model.visual.downsample.bias",
            "visual.merger.downsample.bias",
        ],
        [
            "glm4v",
            "model.visual.embeddings.position_embedding.weight",
            "visual.pos_embed.weight",
        ],
        [
            "qwen3_5",
            "model.language_model.layers.2.linear_attn.A_log",
            "language_model.layers.2.linear_attn.a_log",
        ],
        [
            "qwen3_5_moe",
            "model.language_model.layers.2.mlp.shared_expert.up_proj.weight",
            "language_model.layers.2.mlp.shared_expert.0.up_proj.weight",
        ],
        [
            "glm4v_moe",
            "model.language_model.layers.2.mlp.shared_experts.up_proj.weight",
            "language_model.layers.2.mlp.shared_expert.0.up_proj.weight",
        ],
        [
            "glm4v_moe",
            "model.language_model.layers.0.mlp.up_proj.weight",
            "language_model.layers.0.mlp.up_proj.weight",
        ],
    ];

    fn names(family: &str) -> Names {
        vlm_family::Family::of(family).expect("a family").names
    }

    #[test]
    fn names_go_both_ways() {
        for [family, checkpoint, module] in PAIRS {
            let names = names(family);
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
                rename(&names("qwen2_vl").to_module(), name),
                "visual.merger.norm.weight"
            );
        }
        for name in ["model.language_model.norm.weight", "model.norm.weight"] {
            assert_eq!(
                rename(&names("qwen2_vl").to_module(), name),
                "language_model.norm.weight"
            );
        }
        assert_eq!(
            rename(&names("qwen2_vl").to_module(), "lm_head.weight"),
            "lm_head.weight"
        );
    }
}
