//! Trains an attention layer to copy the token above. Tokens are random, so MRoPE is the only way to
//! find it: without positions the loss stays at 1.
//!
//!     cargo run -p mrope-examples --example 02_attention_layer

use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{Device, Distribution, Tensor};
use burn_attention::{Attention, AttentionMask, MaskRules};
use mrope_examples::{AttentionLayer, WIDTH};
use rope_burn::rope_core::Positions;

const SIDE: usize = 4;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let device = Device::flex().autodiff();
    let mut layer = AttentionLayer::new(&device)?;
    let mut optimizer = AdamWConfig::new().init();

    // A picture of 4 x 4 tokens: one time, four rows, four columns.
    let cells = 0..(SIDE * SIDE) as i64;
    let side = SIDE as i64;
    let rows = cells.clone().map(|cell| cell / side);
    let columns = cells.clone().map(|cell| cell % side);
    let ids: Vec<i64> = cells
        .clone()
        .map(|_| 0)
        .chain(rows)
        .chain(columns)
        .collect();
    let angles = layer.rotary.angles(&Positions::new(3, &ids)?, &device);
    let mask = AttentionMask::new(&MaskRules::default(), 8, SIDE * SIDE, SIDE * SIDE)?;
    let attention = Attention::new(mask);

    let mut losses = Vec::new();
    for step in 0..200 {
        let normal = Distribution::Normal(0.0, 1.0);
        let hidden = Tensor::random([8, SIDE * SIDE, WIDTH], normal, &device);
        let above = hidden.clone().slice([0..8, 0..SIDE * (SIDE - 1)]);
        let out = layer.forward(hidden, &angles, &attention, &mut None);
        let below = out.slice([0..8, SIDE..SIDE * SIDE]);
        let loss = (below - above).square().mean();
        losses.push(loss.clone().into_scalar::<f32>());
        let gradients = GradientsParams::from_grads(loss.backward(), &layer);
        layer = optimizer.step(0.02, layer, gradients);
        if step % 40 == 0 {
            println!("step {step:3}  loss {:.3}", losses[step]);
        }
    }
    let last = losses[losses.len() - 1];
    println!("step {}  loss {last:.3}", losses.len());
    assert!(last < 0.5, "{last}");
    Ok(())
}
