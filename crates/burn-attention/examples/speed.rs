//! Times attention's forward and backward on the CPU.
//!
//! - `cargo run --release -p burn-attention --example speed -- [tokens] [rounds]`: fused against
//!   composed, in turns.
//! - `speed --turns tokens heads channels`: for each line of the input, such as `bf16 causal` or
//!   `f32 all`, the seconds of one fused run. `benches/torch_attention.py` takes turns with it.

use std::error::Error;
use std::io::{BufRead as _, Write as _};
use std::time::Instant;

use burn::tensor::{DType, Device, Distribution, Tensor};
use burn_attention::{Attention, AttentionMask, Implementation, MaskRules};

/// Query heads, key heads and channels.
type Heads = [usize; 3];

/// A quarter of the heads of Qwen2.5-VL-7B.
const HEADS: Heads = [7, 1, 128];

fn attention(causal: bool, tokens: usize) -> Result<Attention, Box<dyn Error>> {
    let rules = MaskRules {
        causal,
        ..Default::default()
    };
    Ok(Attention::new(AttentionMask::new(
        &rules, 1, tokens, tokens,
    )?))
}

fn seconds(attention: &Attention, tokens: usize, heads: Heads, dtype: DType) -> f64 {
    let device = Device::flex().autodiff();
    let [heads, kv_heads, head_dim] = heads;
    let random = |heads| {
        let shape = [1, heads, tokens, head_dim];
        let x = Tensor::<4>::random(shape, Distribution::Default, &device);
        x.cast(dtype).detach().require_grad()
    };
    let (q, k, v) = (random(heads), random(kv_heads), random(kv_heads));
    let start = Instant::now();
    let gradients = attention.forward(q.clone(), k, v).sum().backward();
    let seconds = start.elapsed().as_secs_f64();
    assert!(q.grad(&gradients).is_some());
    seconds
}

fn take_turns(arguments: &[String]) -> Result<(), Box<dyn Error>> {
    let [tokens, heads, channels] = arguments else {
        return Err("expected --turns tokens heads channels".into());
    };
    let tokens = tokens.parse()?;
    let heads = [heads.parse()?, heads.parse()?, channels.parse()?];
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let (dtype, causal) = match line.split_once(' ') {
            Some(("f32", mask)) => (DType::F32, mask == "causal"),
            Some(("bf16", mask)) => (DType::BF16, mask == "causal"),
            _ => return Err(format!("expected `f32` or `bf16` and a mask, found `{line}`").into()),
        };
        let attention = attention(causal, tokens)?;
        println!("{}", seconds(&attention, tokens, heads, dtype));
        std::io::stdout().flush()?;
    }
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [first, rest @ ..] = arguments.as_slice()
        && first == "--turns"
    {
        return take_turns(rest);
    }
    let mut arguments = arguments.iter();
    let mut number = |default| arguments.next().map_or(Ok(default), |text| text.parse());
    let (tokens, rounds) = (number(2048)?, number(5)?);
    for (name, causal) in [("causal", true), ("all keys", false)] {
        let fused = attention(causal, tokens)?;
        let composed = fused.clone().with_implementation(Implementation::Composed);
        // In turns, so that what else the machine does slows both.
        let mut ratios: Vec<f64> = (0..=rounds)
            .map(|_| {
                let [fused, composed] =
                    [&fused, &composed].map(|way| seconds(way, tokens, HEADS, DType::F32));
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
