//! Rotates q and k by the positions of a picture between two words, and takes gradients back.
//!
//!     cargo run -p mrope-examples --example 01_rotation

use burn::tensor::{Device, Distribution, Tensor};
use rope_burn::rope_core::{AxisLayout, Layout, Positions, RotarySpec};
use rope_burn::{Result, Rotary};

fn main() -> Result<()> {
    let device = Device::flex().autodiff();

    // Once per model. RotarySpec::from_hf_config reads a config.json instead.
    let axes = AxisLayout::Striped(vec![3, 3, 2]);
    let spec = RotarySpec::builder(16)
        .axis_layout(axes)
        .theta(1e4)
        .build()?;
    let rotary = Rotary::new(spec, Layout::Bsnd);

    // Once per step: a word, 2 x 2 tokens of a picture, a word; time, height, width.
    let ids = [[0, 1, 1, 1, 1, 3], [0, 1, 1, 2, 2, 3], [0, 1, 2, 1, 2, 3]].concat();
    let angles = rotary.angles(&Positions::new(3, &ids)?, &device);

    // In each layer.
    let random = |heads| Tensor::<4>::random([1, 6, heads, 16], Distribution::Default, &device);
    let (q, k) = (random(4).require_grad(), random(2).require_grad());
    let (q_rotated, k_rotated) = rotary.forward(q.clone(), k.clone(), &angles);

    let gradients = (q_rotated.sum() + k_rotated.sum()).backward();
    let dq = q.grad(&gradients).expect("q is tracked");
    println!(
        "dq of the first word, which is at position 0: {}",
        dq.slice([0..1, 0..1, 0..1])
    );
    Ok(())
}
