//! Times products on the CPU, of few rows as decoding has them and of many as training has them, with
//! weights as checkpoints have them: burn's, and this crate's `linear`, in which the bits of a row do
//! not depend on the others.
//!
//! `cargo run --release -p burn-attention --example rows`

use std::error::Error;
use std::hint::black_box;
use std::time::Instant;

use burn::tensor::{Device, Distribution, Tensor};
use burn_attention::linear;

/// Inputs, outputs, and weights in turns, so that they come from memory as those of a model do.
const WEIGHTS: [[usize; 3]; 6] = [
    [256, 256, 1],
    [256, 512, 4],
    [512, 512, 4],
    [1536, 1536, 12],
    [1536, 8960, 4],
    [4096, 12_288, 2],
];
const ROWS: [usize; 8] = [1, 2, 8, 32, 128, 512, 2048, 8192];
const ROUNDS: usize = 5;
/// Multiply-adds of a round, at least.
const WORK: usize = 100_000_000;

fn main() -> Result<(), Box<dyn Error>> {
    let device = Device::flex();
    println!("| rows x inputs x outputs | burn, us | linear, us | quotient |\n|---|---|---|---|");
    for [inputs, outputs, count] in WEIGHTS {
        let random = |shape| Tensor::<2>::random(shape, Distribution::Default, &device);
        let weights = (0..count).map(|_| random([outputs, inputs]).transpose());
        let weights: Vec<_> = weights.collect();
        for rows in ROWS {
            let repeats = WORK.div_ceil(rows * inputs * outputs * count);
            let x = random([rows, inputs]);
            let mut least = [f64::INFINITY; 2];
            for round in 0..2 * ROUNDS {
                let which = round % 2;
                let start = Instant::now();
                for weight in weights.iter().cycle().take(repeats * count) {
                    let (x, weight) = (x.clone(), weight.clone());
                    let y = match which {
                        0 => x.matmul(weight),
                        _ => linear(x, weight, None, None)?,
                    };
                    black_box(y.into_data());
                }
                let seconds = start.elapsed().as_secs_f64() / (repeats * count) as f64;
                least[which] = least[which].min(seconds);
            }
            let [burn, ours] = least.map(|seconds| 1e6 * seconds);
            println!(
                "| {rows} x {inputs} x {outputs} | {burn:.0} | {ours:.0} | {:.2} |",
                ours / burn
            );
        }
    }
    Ok(())
}
