#![doc = include_str!("../README.md")]

mod family;

pub use family::{
    AttentionBias, BoxForm, ExpertParts, Family, MediaStyle, Names, ProcessorClass, Rename,
    ResizeRule, RouterRule, SharedRule, TextParts, TowerParts, UnknownModelType, VisionParts,
    WindowedLayers,
};

/// Declares the file of each row, and the table.
macro_rules! families {
    ($($(#[$condition:meta])? $file:ident,)*) => {
        $($(#[$condition])? mod $file;)*

        /// All families.
        pub static FAMILIES: &[Family] = &[$($(#[$condition])? $file::ROW),*];
    };
}

families! {
    qwen2_vl,
    qwen2_5_vl,
    qwen3_vl,
    qwen3_vl_moe,
    qwen3_5,
    qwen3_5_moe,
    glm4v,
    glm4v_moe,
    qwen2,
    qwen3,
    qwen3_moe,
    llama,
    mistral,
    #[cfg(feature = "example")] example,
}
