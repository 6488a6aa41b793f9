//! `config.json` to specifications: the text is read or refused, whatever it says; what is read
//! has finite frequencies, and reads back from its own JSON as itself.

#![no_main]

use rope_core::RotarySpec;
use rope_core::hf::{Component, LayerSpecs};
use rope_core::position_ids::PositionRules;

libfuzzer_sys::fuzz_target!(|text: &str| {
    if let Ok(specs) = LayerSpecs::from_hf_config(text) {
        assert!(specs.layers() <= 65_536, "layers without bound");
        specs.specs().for_each(|(_, spec)| check(spec));
        for layer in 0..specs.layers() {
            let _ = specs.layer(layer);
        }
    }
    for spec in [
        RotarySpec::from_hf_config(text),
        RotarySpec::from_hf_vision_config(text),
        RotarySpec::from_rope_parameters("qwen3_vl", Component::Text, text, 128),
        RotarySpec::from_rope_parameters("hunyuan_vl", Component::Text, text, 128),
        RotarySpec::from_rope_parameters("qwen2_vl", Component::Vision, text, 80),
    ]
    .into_iter()
    .flatten()
    {
        check(&spec);
    }
    if let Ok(rules) = PositionRules::from_hf_config(text) {
        assert!(rules.video_merge().iter().all(|merge| *merge > 0));
    }
});

fn check(spec: &RotarySpec) {
    for seq_len in [None, Some(1), Some(1 << 20)] {
        if let Ok(frequencies) = spec.inv_freq(seq_len) {
            assert!(frequencies.iter().all(|f| f.is_finite()), "{frequencies:?}");
        }
    }
    assert!(spec.inv_freq(None).is_ok());
    let json = serde_json::to_string(spec).expect("a specification is JSON");
    let again: RotarySpec = serde_json::from_str(&json).expect("what was written is read");
    assert_eq!(*spec, again, "{json}");
}
