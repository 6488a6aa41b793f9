//! Rotation through burn: with the graph, the allocations and the seed of the gradients.

use std::error::Error;

use crate::cases::{Group, Selection, TimedCase, Way};
use crate::names;
use crate::rotation::{copy, is_within, positions, values};
use crate::rows::SpeedRow;
use crate::sample::{Contest, Plan, Timing, interleaved};
use crate::shapes::FLUX_SINGLE;
use burn::backend::ExecutionError;
use burn::tensor::{Device, Gradients, Tensor, TensorData};
use rope_check::buffer::DType;
use rope_check::tolerance::{Operation, allowed};
use rope_core::reference::HeadMatrix;
use rope_core::{Layout, Pairing, Positions, RotarySpec};

use super::scheme::{NamedScheme, Scheme};

/// Every way at the shape that peers are compared on; adjacent pairs, because `RotaryEncoding` has
/// no others.
pub fn cases(selection: Selection) -> Vec<TimedCase> {
    let shape = match selection {
        Selection::Quick => FLUX_SINGLE.at(64),
        _ => FLUX_SINGLE,
    };
    let case = |way| TimedCase {
        pairing: Pairing::Adjacent,
        layout: Layout::Bnsd,
        way,
        ..TimedCase::new(Group::Burn, shape)
    };
    Way::ALL.map(case).into()
}

/// Contestants: a copy, then the schemes. One of these does not rotate, to see what the backward
/// takes by itself.
struct Through {
    way: Way,
    x: Tensor<4>,
    schemes: Vec<NamedScheme>,
    copy: Copy,
    /// Rotations of a run, one after another.
    rotations: usize,
    input: Option<Tensor<4>>,
    output: Option<Tensor<4>>,
    gradients: Option<Gradients>,
    /// The first failure of the device.
    failed: Option<ExecutionError>,
}

/// Who copies.
enum Copy {
    /// The threads of the host.
    Host { source: Vec<f32>, target: Vec<f32> },
    /// The device of x.
    Device,
}

/// Rotations of a run on a GPU, so that waiting for it counts little.
const ROTATIONS_ON_GPU: usize = 8;

impl Through {
    fn forward(&mut self, scheme: usize) {
        let Some(input) = self.input.take() else {
            return;
        };
        let rotations = 0..self.rotations;
        self.output = Some(match &self.schemes[scheme].1 {
            Some(scheme) => rotations.fold(input, |x, _| scheme.single(x)),
            None => input,
        });
    }

    fn backward(&mut self) {
        // Starts from ones, as large as the output.
        self.gradients = self.output.take().map(|output| output.backward());
    }

    fn run_copy(&mut self) -> Result<(), ExecutionError> {
        for _ in 0..self.way.passes() * self.rotations {
            match &mut self.copy {
                Copy::Host { source, target } => copy(source, target, rayon::current_num_threads()),
                Copy::Device => {
                    // burn's fusion could make several copies in one launch, or leave out what has
                    // been dropped.
                    let copied = self.x.clone() * 1.0;
                    self.x.device().flush()?;
                    drop(copied);
                }
            }
        }
        Ok(())
    }

    /// Waits for the device, and keeps its first failure.
    fn wait(&mut self, done: Result<(), ExecutionError>) {
        let result = done.and_then(|()| self.x.device().sync());
        self.failed = self.failed.take().or(result.err());
    }
}

impl Contest for Through {
    fn contestants(&self) -> usize {
        1 + self.schemes.len()
    }

    fn prepare(&mut self, contestant: usize) {
        (self.input, self.output, self.gradients) = (None, None, None);
        let Some(scheme) = contestant.checked_sub(1) else {
            return;
        };
        // A leaf that nobody else holds, so that a scheme that can rotates it in place.
        self.input = Some((self.x.clone() + 0.0).autodiff().require_grad());
        if self.way == Way::Backward {
            self.forward(scheme);
        }
        self.wait(Ok(()));
    }

    fn run(&mut self, contestant: usize, _: usize) {
        let Some(scheme) = contestant.checked_sub(1) else {
            let copied = self.run_copy();
            return self.wait(copied);
        };
        if self.way != Way::Backward {
            self.forward(scheme);
        }
        if self.way != Way::Forward {
            self.backward();
        }
        self.wait(Ok(()));
    }

    fn repeats(&self) -> bool {
        false
    }
}

/// Times a case in every scheme, on burn's CPU backend or on a GPU, after comparing each with the
/// oracle.
///
/// # Errors
/// If a result is not the oracle's, or the device fails.
pub fn time(
    case: &TimedCase,
    gpu: Option<&Device>,
    plan: &Plan,
) -> Result<Vec<SpeedRow>, Box<dyn Error>> {
    let device = gpu.cloned().unwrap_or_else(Device::flex);
    let shape = case.shape;
    let spec = shape.spec(case.pairing, case.axes.clone())?;
    let positions = positions(spec.axis_count(), shape.seq)?;
    let schemes = Scheme::all(&spec, &positions, &device.clone().autodiff())?;
    // The shape's heads are rotated whole, so there is every scheme.
    let mut schemes: Vec<NamedScheme> = schemes
        .into_iter()
        .filter(|(_, scheme)| scheme.is_some())
        .collect();
    let source = values::<f32>(shape.elems());
    let dims = [1, shape.heads, shape.seq, shape.head_dim];
    let x = Tensor::<4>::from_data(TensorData::new(source.clone(), dims), &device);
    for (name, scheme) in &schemes {
        if let Some(scheme) = scheme {
            check(name, scheme, &x, &spec, &positions)?;
        }
    }
    if case.way != Way::Forward {
        schemes.push((names::NONE, None));
    }
    let mut contest = Through {
        way: case.way,
        x,
        schemes,
        copy: match gpu {
            Some(_) => Copy::Device,
            None => Copy::Host {
                target: source.clone(),
                source,
            },
        },
        rotations: gpu.map_or(1, |_| ROTATIONS_ON_GPU),
        input: None,
        output: None,
        gradients: None,
        failed: None,
    };
    let timings: Vec<Timing> = interleaved(&mut contest, plan)
        .into_iter()
        .map(|timing| timing.divided_by(contest.rotations))
        .collect();
    if let Some(error) = contest.failed {
        return Err(error.into());
    }
    let rows = contest.schemes.iter().zip(&timings[1..]);
    Ok(rows
        .map(|((name, _), timing)| SpeedRow::new(case, name, ("copy", timings[0]), *timing))
        .collect())
}

/// Tokens that are compared. The f32 angles of `RotaryEncoding` drift from the exact ones as
/// positions grow.
const CHECKED_TOKENS: usize = 4;

fn check(
    name: &str,
    scheme: &Scheme,
    x: &Tensor<4>,
    spec: &RotarySpec,
    positions: &Positions,
) -> Result<(), Box<dyn Error>> {
    let leaf = x.clone().autodiff().require_grad();
    let output = scheme.single(leaf.clone());
    let tokens = |x: Tensor<4>| -> Vec<f32> {
        let [_, _, seq, channels] = x.dims();
        let few = x.slice([0..1, 0..1, 0..seq.min(CHECKED_TOKENS), 0..channels]);
        few.into_data().iter::<f32>().collect()
    };
    let found = tokens(output.clone().without_autodiff());
    let gradient = leaf
        .grad(&output.backward())
        .ok_or("the backward did not reach x")?;
    let (gradient, x) = (tokens(gradient), tokens(x.clone()));
    let wide = |row: &[f32]| row.iter().map(|x| f64::from(*x)).collect::<Vec<f64>>();
    let channels = spec.head_dim();
    for (token, x) in x.chunks(channels).enumerate() {
        let matrix = HeadMatrix::new(spec, positions, token, None)?;
        let row = token * channels..(token + 1) * channels;
        let expected = matrix
            .apply(&wide(x))
            .into_iter()
            .chain(matrix.apply_adjoint(&vec![1.0; channels]));
        let found = found[row.clone()].iter().chain(&gradient[row]);
        for (found, expected) in found.zip(expected) {
            // Twice the usual, for angles that were computed in f32.
            if !is_within(
                f64::from(*found),
                expected,
                2.0 * allowed(Operation::Passes(1), DType::F32, expected),
            ) {
                let problem = format!(
                    "{name}: token {token} has {found}, the oracle {expected}; nothing was timed"
                );
                return Err(problem.into());
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_scheme_is_the_oracles_and_is_timed() {
        for case in cases(Selection::Quick) {
            let rows = time(&case, None, &Plan::ONCE).unwrap();
            let found: Vec<&str> = rows.iter().map(|row| &*row.implementation).collect();
            let rotations = [names::FUSED, names::COMPOSED, names::ROTARY_ENCODING];
            assert_eq!(found[..3], rotations);
            assert_eq!(
                found[3..],
                [names::NONE][..usize::from(case.way != Way::Forward)]
            );
        }
    }
}
