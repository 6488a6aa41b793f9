//! Packs two prompts into one row: positions start again, and no token sees the other prompt.
//!
//!     cargo run -p mrope-examples --example 04_packed_batch

use burn::tensor::{Device, Distribution, Tensor};
use burn_attention::{Attention, AttentionMask, MaskRules};
use mrope_examples::{AttentionLayer, WIDTH};
use rope_burn::rope_core::Positions;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let device = Device::flex();
    let layer = AttentionLayer::new(&device)?;
    let ends = [0, 3, 8]; // two prompts, of 3 and 5 tokens
    let hidden = Tensor::<3>::random([1, 8, WIDTH], Distribution::Default, &device);

    let ids = [0, 1, 2, 0, 1, 2, 3, 4].repeat(3);
    let angles = layer.rotary.angles(&Positions::new(3, &ids)?, &device);
    let rules = MaskRules {
        causal: true,
        cu_seqlens: Some(&ends),
        ..MaskRules::default()
    };
    let packed = Attention::new(AttentionMask::new(&rules, 1, 8, 8)?);
    let packed = layer.forward(hidden.clone(), &angles, &packed, &mut None);

    for prompt in ends.windows(2) {
        let (start, end) = (prompt[0], prompt[1]);
        let tokens = end - start;
        let angles = layer
            .rotary
            .angles(&Positions::text(3, 0, tokens)?, &device);
        let rules = MaskRules {
            causal: true,
            ..MaskRules::default()
        };
        let alone = Attention::new(AttentionMask::new(&rules, 1, tokens, tokens)?);
        let hidden = hidden.clone().slice([0..1, start..end]);
        let alone = layer.forward(hidden, &angles, &alone, &mut None);
        let packed = packed.clone().slice([0..1, start..end]);
        let difference = (alone - packed).abs().max().into_scalar::<f32>();
        println!("prompt of {tokens} tokens: packed and alone differ by {difference:e}");
        assert!(difference < 1e-5);
    }
    Ok(())
}
