//! Time of forward and backward, fused against composed, in turns on one machine:
//! `cargo run --release -p burn-attention --example speed -- [tokens] [rounds]`.

use std::time::Instant;

use burn::tensor::{Device, Distribution, Tensor};
use burn_attention::{Attention, AttentionMask, MaskRules, Method};

/// Query heads, key heads and channels: a quarter of the heads of Qwen2.5-VL-7B.
const HEADS: [usize; 3] = [7, 1, 128];

fn seconds(attention: &Attention, tokens: usize, device: &Device) -> f64 {
    let [heads, kv_heads, head_dim] = HEADS;
    let random = |heads| {
        let shape = [1, heads, tokens, head_dim];
        Tensor::<4>::random(shape, Distribution::Default, device).require_grad()
    };
    let (q, k, v) = (random(heads), random(kv_heads), random(kv_heads));
    let start = Instant::now();
    let gradients = attention.forward(q.clone(), k, v).sum().backward();
    let seconds = start.elapsed().as_secs_f64();
    assert!(q.grad(&gradients).is_some());
    seconds
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let mut number = |default| arguments.next().map_or(Ok(default), |text| text.parse());
    let (tokens, rounds) = (number(2048)?, number(5)?);
    let device = Device::flex().autodiff();
    for (name, causal) in [("causal", true), ("all keys", false)] {
        let rules = MaskRules {
            causal,
            ..Default::default()
        };
        let fused = Attention::new(AttentionMask::new(&rules, 1, tokens, tokens)?);
        let composed = fused.clone().with_method(Method::Composed);
        // In turns, so that what else the machine does slows both.
        let mut ratios: Vec<f64> = (0..=rounds)
            .map(|_| {
                let (fused, composed) = (
                    seconds(&fused, tokens, &device),
                    seconds(&composed, tokens, &device),
                );
                println!("{name}: fused {fused:.3} s, composed {composed:.3} s");
                fused / composed
            })
            .skip(1)
            .collect();
        ratios.sort_by(f64::total_cmp);
        println!(
            "{name}: {tokens} tokens, fused / composed {:.2}",
            ratios[rounds / 2]
        );
    }
    Ok(())
}
