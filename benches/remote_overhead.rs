//! What an operation costs on its way from the client to the launched kernel, beside the same way
//! to burn's CPU backend.
//!
//! Both devices are reached through burn-remote, in this process. The simulator's operators are
//! stubbed: they are checked, launched and counted, and compute nothing. What is left of the Ascend
//! side is the path: client, wire, server, backend, plan and launch. The CPU backend computes, on
//! tensors of 16 elements. Samples of the two are taken in turn.
//!
//! `cargo bench -p rope-benches --bench remote_overhead` prints the medians and their ratio, and
//! ends with 1 if the ratio is above 2. Without `--bench`, as `cargo test` runs it, it only checks
//! that both devices compute the right thing.

use std::error::Error;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use ascend_sim::control;
use burn::backend::flex::{Flex, FlexDevice};
use burn::tensor::{Device, Tensor, TensorData};
use burn_ascend::serve::Server;
use burn_ascend::{AscendHost, fallbacks, operations, reset_fallbacks};

/// The most that the Ascend path may cost, in costs of the other.
const BAR: f64 = 2.0;
/// Operations of one turn of [`turn`], as burn-remote counts them.
const OPERATIONS: usize = 8;
/// Turns of a sample.
const TURNS: usize = 250;
/// Samples of each device.
const SAMPLES: usize = 30;

/// A few of the operations that training is made of; values stay below 1.
fn turn(x: Tensor<2>, weight: &Tensor<2>, bias: &Tensor<2>) -> Tensor<2> {
    let hidden = x.matmul(weight.clone()) + bias.clone();
    let gate = (hidden.clone() * 0.5).tanh();
    let mean = hidden.mean_dim(1);
    (gate - mean).exp() * 0.25
}

/// The tensors of a device.
struct Work {
    x: Tensor<2>,
    weight: Tensor<2>,
    bias: Tensor<2>,
}

impl Work {
    fn new(device: &Device) -> Self {
        let wave = |phase: f32| {
            let values: Vec<f32> = (0..16).map(|i| 0.3 * (i as f32 + phase).sin()).collect();
            Tensor::from_data(TensorData::new(values, [4, 4]), device)
        };
        Self {
            x: wave(0.0),
            weight: wave(1.0),
            bias: wave(2.0),
        }
    }

    fn run(&self, turns: usize) -> Tensor<2> {
        (0..turns).fold(self.x.clone(), |x, _| turn(x, &self.weight, &self.bias))
    }

    fn values(&self, turns: usize) -> Result<Vec<f32>, Box<dyn Error>> {
        Ok(self.run(turns).try_into_data()?.iter::<f32>().collect())
    }

    /// The time of a sample: until the device has done the last of its operations.
    fn sample(&self, device: &Device) -> Result<Duration, Box<dyn Error>> {
        let started = Instant::now();
        let last = self.run(TURNS);
        device.sync()?;
        let taken = started.elapsed();
        drop(last);
        Ok(taken)
    }
}

fn check(found: &[f32], expected: &[f32]) -> Result<(), Box<dyn Error>> {
    let same = |(a, b): (&f32, &f32)| (a - b).abs() < 1e-5;
    if found.len() == expected.len() && found.iter().zip(expected).all(same) {
        return Ok(());
    }
    Err(format!("computed {found:?}, expected {expected:?}").into())
}

/// Lower quartile, median, upper quartile, in microseconds an operation.
fn quartiles(mut samples: Vec<Duration>) -> [f64; 3] {
    samples.sort_unstable();
    [1, 2, 3].map(|quarter| {
        let sample = samples[quarter * (samples.len() - 1) / 4];
        sample.as_secs_f64() * 1e6 / (TURNS * OPERATIONS) as f64
    })
}

fn run() -> Result<ExitCode, Box<dyn Error>> {
    let host = AscendHost::start(&[burn_ascend::simulated(0)?])?;
    let server = Server::start::<Flex>([FlexDevice], operations())?;
    let devices = [host.devices()[0].clone(), server.connect(0)?];
    let [ascend, cpu] = devices.each_ref().map(Work::new);

    reset_fallbacks();
    let expected = Work::new(&Device::flex()).values(3)?;
    for work in [&ascend, &cpu] {
        check(&work.values(3)?, &expected)?;
    }
    if !fallbacks().is_empty() {
        return Err(format!("the host would be measured as well: {:?}", fallbacks()).into());
    }
    if !std::env::args().any(|argument| argument == "--bench") {
        println!("both devices compute the right thing");
        return Ok(ExitCode::SUCCESS);
    }

    control::stub_operators(true);
    control::clear_operator_runs();
    let mut samples = [(); 2].map(|()| Vec::with_capacity(SAMPLES));
    for round in 0..=SAMPLES {
        for ((work, device), samples) in [&ascend, &cpu].into_iter().zip(&devices).zip(&mut samples)
        {
            let taken = work.sample(device)?;
            // The first round plans the operators.
            if round > 0 {
                samples.push(taken);
            }
        }
    }
    let launched: u64 = control::operator_runs().values().sum();
    control::stub_operators(false);

    let [ascend, cpu] = samples.map(quartiles);
    println!("microseconds an operation: median (lower to upper quartile)");
    for (name, [low, median, high]) in [
        ("client to launched Ascend operator", ascend),
        ("client to burn's CPU backend", cpu),
    ] {
        println!("  {name:<36} {median:>6.2}  ({low:.2} to {high:.2})");
    }
    let ratio = ascend[1] / cpu[1];
    let verdict = if ratio <= BAR { "met" } else { "not met" };
    println!("  ratio {ratio:.2}, at most {BAR}: {verdict}; {launched} operators were launched");
    Ok(if ratio <= BAR {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

fn main() -> ExitCode {
    run().unwrap_or_else(|error| {
        eprintln!("error: {error}");
        ExitCode::FAILURE
    })
}
