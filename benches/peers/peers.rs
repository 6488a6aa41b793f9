//! Against candle's `rope` and `rope_i` on the CPU, in the same run: `cargo bench -p rope-peers
//! --features candle`.
//!
//! candle allocates its result; so that nothing hides in that, the kernels are timed both into a
//! buffer that is there and into a new one. candle takes cos and sin in the element type of x. `--
//! --csv FILE` writes the rows; under `cargo test` everything runs once, on small tensors.

use std::error::Error;
use std::fs::File;

use bytemuck::Zeroable;
use candle_core::{Device, Tensor, WithDType};
use candle_nn::rotary_emb::{rope, rope_i};
use half::bf16;
use rope_bench::bars::{self, names};
use rope_bench::cases::{Group, TimedCase};
use rope_bench::rotation::{BASELINE, CaseError, ROTATION, TimedElement, TimedRotation, is_within};
use rope_bench::rows::{SpeedRow, time, write_csv};
use rope_bench::sample::{Contest, Plan, interleaved};
use rope_bench::shapes::FLUX_SINGLE;
use rope_check::tolerance::unit;
use rope_core::{Layout, Pairing};

/// Contestants after the two of [`TimedRotation`].
const NEW_BUFFER: usize = 2;
const CANDLE: usize = 3;

struct Peers<E> {
    rotation: TimedRotation<E>,
    rope: fn(&Tensor, &Tensor, &Tensor) -> candle_core::Result<Tensor>,
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    kept: Option<Tensor>,
    kept_buffer: Vec<E>,
}

impl<E: TimedElement + WithDType + Zeroable> Peers<E> {
    fn new(case: &TimedCase) -> Result<Self, Box<dyn Error>> {
        let rotation = TimedRotation::<E>::new(case)?;
        let shape = case.shape;
        let dims = (1, shape.heads, shape.seq, shape.head_dim);
        let [cos, sin] = rotation.cos_sin().ok_or("the case has a table")?;
        let rows = |values: Vec<f32>| -> candle_core::Result<Tensor> {
            let shape = (shape.seq, shape.rotary_dim / 2);
            Tensor::from_vec(values, shape, &Device::Cpu)?.to_dtype(<E as WithDType>::DTYPE)
        };
        Ok(Self {
            rope: match case.pairing {
                Pairing::Half => rope,
                _ => rope_i,
            },
            x: Tensor::from_slice(rotation.q().0, dims, &Device::Cpu)?,
            cos: rows(cos)?,
            sin: rows(sin)?,
            rotation,
            kept: None,
            kept_buffer: Vec::new(),
        })
    }

    /// The rotation into a buffer that comes zeroed from the system.
    fn in_new_buffer(&self) -> Result<Vec<E>, CaseError> {
        let mut target = bytemuck::zeroed_vec(self.rotation.q().0.len());
        self.rotation.rotate_q_into(&mut target)?;
        Ok(target)
    }

    fn candle(&self) -> candle_core::Result<Tensor> {
        (self.rope)(&self.x, &self.cos, &self.sin)
    }

    /// The kernels against the oracle, and the others against the kernels.
    fn check(&mut self) -> Result<(), Box<dyn Error>> {
        self.rotation.check(8)?;
        let ours = self.rotation.q().1;
        if self.in_new_buffer()? != ours {
            return Err("the kernels differ from themselves in a new buffer".into());
        }
        let candle = self.candle()?.flatten_all()?.to_vec1::<E>()?;
        // cos, sin, two products and a sum, each rounded to E and of order 1.
        let tolerance = 6.0 * unit(<E as TimedElement>::DTYPE) + 2e-6;
        for (index, (ours, candle)) in ours.iter().zip(&candle).enumerate() {
            let (ours, theirs) = (f64::from(ours.widen()), f64::from(candle.widen()));
            if !is_within(theirs, ours, tolerance) {
                return Err(format!(
                    "element {index} is {theirs} from candle and {ours} here; nothing was timed"
                )
                .into());
            }
        }
        Ok(())
    }
}

impl<E: TimedElement + WithDType + Zeroable> Contest for Peers<E> {
    fn contestants(&self) -> usize {
        CANDLE + 1
    }

    fn prepare(&mut self, contestant: usize) {
        (self.kept, self.kept_buffer) = (None, Vec::new());
        if contestant <= ROTATION {
            self.rotation.prepare(contestant);
        }
    }

    fn run(&mut self, contestant: usize, iterations: usize) {
        match contestant {
            // `check` has run the same calls.
            CANDLE => (0..iterations).for_each(|_| self.kept = Some(self.candle().expect("runs"))),
            NEW_BUFFER => (0..iterations).for_each(|_| {
                self.kept_buffer = self.in_new_buffer().expect("runs");
            }),
            contestant => self.rotation.run(contestant, iterations),
        }
    }
}

fn compare<E: TimedElement + WithDType + Zeroable>(
    pairing: Pairing,
    measures: bool,
) -> Result<Vec<SpeedRow>, Box<dyn Error>> {
    let (shape, plan) = if measures {
        (FLUX_SINGLE, Plan::default())
    } else {
        (FLUX_SINGLE.at(48), Plan::ONCE)
    };
    let case = TimedCase {
        dtype: <E as TimedElement>::DTYPE,
        pairing,
        layout: Layout::Bnsd,
        in_place: false,
        ..TimedCase::new(Group::Peers, shape)
    };
    let mut peers = Peers::<E>::new(&case)?;
    peers.check()?;
    let timings = interleaved(&mut peers, &plan);
    let candle = match pairing {
        Pairing::Half => names::CANDLE_ROPE,
        _ => names::CANDLE_ROPE_I,
    };
    let names = [
        (ROTATION, names::KERNELS),
        (NEW_BUFFER, names::KERNELS_NEW_BUFFER),
        (CANDLE, candle),
    ];
    Ok(names
        .map(|(contestant, name)| {
            SpeedRow::new(
                &case,
                name,
                ("copy", timings[BASELINE]),
                timings[contestant],
            )
        })
        .into())
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().collect();
    let measures = arguments.iter().any(|argument| argument == "--bench");
    let csv = arguments
        .iter()
        .skip_while(|argument| *argument != "--csv")
        .nth(1);
    let mut rows = Vec::new();
    for pairing in [Pairing::Half, Pairing::Adjacent] {
        rows.extend(compare::<f32>(pairing, measures)?);
        rows.extend(compare::<bf16>(pairing, measures)?);
    }
    if !measures {
        println!("{} rows agree with the oracle and with candle", rows.len());
        return Ok(());
    }
    for row in &rows {
        println!(
            "{:24} {:9} {:5} {:>9}, {:>5.2} of a copy",
            row.implementation,
            row.pairing,
            row.dtype.name(),
            time(row.median_ns),
            row.copy_ratio
        );
    }
    for bar in bars::speed(&rows) {
        println!("{bar}");
    }
    if let Some(path) = csv {
        write_csv(&rows, File::create(path)?)?;
    }
    Ok(())
}
