//! Times the gated delta rule's forward and backward on the CPU: for each line of the input, such as
//! `chunks 2048` or `recurrence 512`, the seconds of one run. `benches/torch_gated_delta.py` takes
//! turns with it.
//!
//! `cargo run --release -p burn-attention --example gated_delta -- key_heads heads channels`

use std::error::Error;
use std::io::{BufRead as _, Write as _};
use std::time::Instant;

use burn::tensor::{Device, Distribution, Tensor};
use burn_attention::{GatedDelta, Result, Sequences, gated_delta_step};

/// Heads of q and k, heads of v, channels of all.
type Heads = [usize; 3];

/// Token by token, of ordinary operations: the graph keeps all states.
fn recurrence(
    [q, k, v]: [Tensor<4>; 3],
    [g, beta]: [Tensor<3>; 2],
    [_, heads, channels]: Heads,
) -> Result<Tensor<4>> {
    let [_, tokens, _, _] = q.dims();
    let mut state = Tensor::zeros([1, heads, channels, channels], &q.device());
    let mut outs = Vec::with_capacity(tokens);
    for token in 0..tokens {
        let of = |x: &Tensor<4>| x.clone().narrow(1, token, 1).squeeze_dim::<3>(1);
        let number = |x: &Tensor<3>| x.clone().narrow(1, token, 1).squeeze_dim::<2>(1);
        let inputs = [of(&q), of(&k), of(&v)];
        let out;
        (out, state) = gated_delta_step(inputs, [number(&g), number(&beta)], state)?;
        outs.push(out.unsqueeze_dim::<4>(1));
    }
    Ok(Tensor::cat(outs, 1))
}

fn seconds(in_chunks: bool, tokens: usize, heads: Heads) -> Result<f64> {
    let device = Device::flex().autodiff();
    let [key_heads, value_heads, channels] = heads;
    let random = |heads| {
        let shape = [1, tokens, heads, channels];
        Tensor::<4>::random(shape, Distribution::Default, &device).require_grad()
    };
    let (q, k, v) = (random(key_heads), random(key_heads), random(value_heads));
    let number = || {
        let shape = [1, tokens, value_heads];
        Tensor::<3>::random(shape, Distribution::Default, &device)
    };
    let (g, beta) = (number().neg().require_grad(), number().require_grad());
    let start = Instant::now();
    let out = if in_chunks {
        let rule = GatedDelta::new(Sequences::whole(tokens));
        rule.try_forward(q.clone(), k, v, g, beta)?.0
    } else {
        recurrence([q.clone(), k, v], [g, beta], heads)?
    };
    let gradients = out.sum().backward();
    let seconds = start.elapsed().as_secs_f64();
    assert!(q.grad(&gradients).is_some());
    Ok(seconds)
}

fn main() -> Result<(), Box<dyn Error>> {
    let numbers: Vec<usize> = std::env::args()
        .skip(1)
        .map(|text| text.parse())
        .collect::<Result<_, _>>()?;
    let heads = Heads::try_from(numbers).map_err(|_| "expected key_heads heads channels")?;
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let (in_chunks, tokens) = match line.split_once(' ') {
            Some(("chunks", tokens)) => (true, tokens.parse()?),
            Some(("recurrence", tokens)) => (false, tokens.parse()?),
            _ => return Err(format!("expected a way and a number, found `{line}`").into()),
        };
        println!("{}", seconds(in_chunks, tokens, heads)?);
        std::io::stdout().flush()?;
    }
    Ok(())
}
