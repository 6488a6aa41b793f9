//! Decodes token by token with a cache of rotated keys, and compares with one pass over all.
//!
//!     cargo run -p mrope-examples --example 03_decode

use burn::tensor::{Device, Distribution, Tensor};
use burn_attention::{Attention, AttentionMask, MaskRules};
use mrope_examples::{AttentionLayer, WIDTH};
use rope_burn::rope_core::Positions;

const TOKENS: usize = 12;
const PROMPT: usize = 8;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let device = Device::flex();
    let layer = AttentionLayer::new(&device)?;
    let hidden = Tensor::<3>::random([1, TOKENS, WIDTH], Distribution::Default, &device);
    // Queries count from the end of the keys, so one rule serves prompt and decoding.
    let causal = |queries, keys| {
        let rules = MaskRules {
            causal: true,
            ..MaskRules::default()
        };
        AttentionMask::new(&rules, 1, queries, keys).map(Attention::new)
    };

    let angles = layer
        .rotary
        .angles(&Positions::text(3, 0, TOKENS)?, &device);
    let whole = layer.forward(hidden.clone(), &angles, &causal(TOKENS, TOKENS)?, &mut None);

    // The prompt at once, then one token at a time. A key is rotated once, when it is cached.
    let mut cache = None;
    let mut parts = Vec::new();
    let mut start = 0;
    for end in PROMPT..=TOKENS {
        let angles = layer
            .rotary
            .angles(&Positions::text(3, start as u32, end - start)?, &device);
        let tokens = hidden.clone().slice([0..1, start..end]);
        parts.push(layer.forward(tokens, &angles, &causal(end - start, end)?, &mut cache));
        start = end;
    }
    let difference = (whole - Tensor::cat(parts, 1))
        .abs()
        .max()
        .into_scalar::<f32>();
    println!("largest difference between decoding and one pass: {difference:e}");
    assert!(difference < 1e-5);
    Ok(())
}
