//! What a tile of each kernel takes: vector instructions, barriers and transfers, counted by
//! launching it with some tokens a core and with twice as many, through the vendor's headers and
//! through the simulator's.

use std::collections::BTreeMap;
use std::error::Error;
use std::fmt::Write as _;
use std::process::Command;
use std::sync::Arc;
use std::{env, fs};

use ascend_sim::build::KernelSource;
use ascend_sim::{Machine, Session};
use rope_ascend::loader::Api;
use rope_ascend::rope::{
    AngleGradient, AngleRows, Heads, KernelType, Kernels, Operand, Rotation, Rotator,
};
use rope_ascend::safe::{Runtime, Stream};
use rope_core::{Direction, Geometry, HeadsLayout, Layout, Pairing};
use serde::Serialize;

use super::compile::{Compiled, Harness};
use super::{KERNELS, Result, VendorError, cannot_access};

/// Qwen3-VL-8B: heads of q and k, channels of a head.
const HEADS: [usize; 2] = [32, 8];
const HEAD_DIM: usize = 128;
const TYPES: [KernelType; 3] = [KernelType::F32, KernelType::F16, KernelType::Bf16];
/// Cores of the simulated machine; the counts are of one.
const CORES: usize = 2;
/// Tokens of a core in the two launches of a kernel.
const TOKENS: [usize; 2] = [48, 96];
const PIPE_V: usize = 1;
/// The hidden word of the command line for [`launch`].
pub(crate) const WORD: &str = "vendor-headers-launch";

/// Counts of one tile, rounded down where the last tile is a smaller one.
#[derive(Serialize)]
pub(super) struct TileRow {
    pub(super) kernel: String,
    pub(super) architecture: u32,
    pub(super) tokens: u64,
    pub(super) vendor: Counts,
    /// By the simulator's headers. On dav-3510 these count calls, and the vendor's headers register
    /// instructions.
    pub(super) simulator: Counts,
    /// The vendor's instructions by name.
    pub(super) instructions: BTreeMap<String, u64>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(super) struct Counts {
    pub(super) vector: u64,
    pub(super) barriers: u64,
    pub(super) transfers_in: u64,
    pub(super) transfers_out: u64,
}

/// Launches kernels with [`TOKENS`] tokens a core on the simulator; returns a line for each launch:
/// kernel and counts of a core. In a process of its own, because the environment says which headers
/// compile the kernels. `words` are the architecture, the source, and all entry points.
pub(crate) fn launch(words: &[&str]) -> std::result::Result<String, Box<dyn Error>> {
    let [architecture, source, kernels @ ..] = words else {
        return Err("an architecture, a source and kernels are expected".into());
    };
    let machine = match *architecture {
        "3510" => Machine::ascend_950(),
        _ => Machine::ascend_910b(),
    };
    let binary = KernelSource::new(*source)
        .kernels(kernels.iter().copied())
        .architecture(machine.architecture)
        .compile()?;
    let _session = Session::with_machine(Machine {
        vector_cores: CORES as u32,
        ..machine
    });
    let runtime = Runtime::start(Api::simulated()?)?;
    let stream = runtime.device(0)?.stream()?;
    let kernels = Arc::new(Kernels::load(&stream, &binary)?);
    for element in TYPES {
        for tokens in TOKENS {
            launch_type(&stream, &kernels, element, CORES * tokens)?;
        }
    }
    let mut text = String::new();
    for launch in ascend_sim::control::launches() {
        let (blocks, counters) = (u64::from(launch.blocks), &launch.counters);
        // Writing to a string does not fail.
        let _ = writeln!(
            text,
            "{} {} {} {} {}",
            launch.kernel,
            counters.vector_instructions / blocks,
            counters.barriers[PIPE_V] / blocks,
            counters.gm_transfers_in / blocks,
            counters.gm_transfers_out / blocks
        );
    }
    Ok(text)
}

fn launch_type(
    stream: &Stream,
    kernels: &Arc<Kernels>,
    element: KernelType,
    tokens: usize,
) -> rope_ascend::Result<()> {
    let rotators = [
        (Pairing::Half, &[Direction::Forward][..]),
        (Pairing::Adjacent, &[Direction::Forward]),
        (
            Pairing::InterleaveHalf,
            &[Direction::Forward, Direction::Adjoint],
        ),
    ];
    let rows = stream.zeros::<f32>(tokens * HEAD_DIM)?;
    // Of the elements' type there are the bytes only.
    let words = |heads| tokens * heads * HEAD_DIM * element.bytes() / size_of::<f32>();
    let [mut q, mut k] = [
        stream.zeros::<f32>(words(HEADS[0]))?,
        stream.zeros::<f32>(words(HEADS[1]))?,
    ];
    let layout = |heads| HeadsLayout::contiguous(Layout::Bsnd, 1, tokens, heads, HEAD_DIM);
    let [q_layout, k_layout] = HEADS.map(layout);
    for (pairing, directions) in rotators {
        let geometry = Geometry::new(HEAD_DIM, HEAD_DIM, 0, pairing, false)?;
        let rotator = Rotator::new(stream, kernels.clone(), geometry)?;
        for &direction in directions {
            rotator.rotate(Rotation {
                element,
                direction,
                q: Operand::InPlace(Heads {
                    memory: &mut q,
                    offset: 0,
                    layout: q_layout,
                }),
                k: Some(Operand::InPlace(Heads {
                    memory: &mut k,
                    offset: 0,
                    layout: k_layout,
                })),
                angles: AngleRows {
                    memory: &rows,
                    offset_bytes: 0,
                    rows: tokens,
                },
            })?;
        }
        let mut out = stream.alloc::<f32>(tokens * HEAD_DIM)?;
        rotator.angle_gradient(AngleGradient {
            element,
            q: [Heads {
                memory: &q,
                offset: 0,
                layout: q_layout,
            }; 2],
            k: Some(
                [Heads {
                    memory: &k,
                    offset: 0,
                    layout: k_layout,
                }; 2],
            ),
            out: &mut out,
        })?;
        stream.synchronize()?;
    }
    Ok(())
}

impl Harness {
    /// The counts of every kernel on an architecture.
    pub(super) fn counts(&self, compiled: &Compiled) -> Result<Vec<TileRow>> {
        let names = self.work.join("counts");
        if names.exists() {
            fs::remove_file(&names).map_err(cannot_access(&names))?;
        }
        let program = env::current_exe().map_err(cannot_access("this program".as_ref()))?;
        let launch = |environment: Vec<(&'static str, String)>| -> Result<String> {
            let output = Command::new(&program)
                .args([WORD, &compiled.architecture.to_string()])
                .arg(self.root.join(KERNELS).join("rope.cpp"))
                .args(&compiled.kernels)
                .envs(environment)
                .output()
                .map_err(cannot_access(&program))?;
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            let error = String::from_utf8_lossy(&output.stderr);
            output
                .status
                .success()
                .then_some(text)
                .ok_or_else(|| VendorError::Failed(error.trim().to_owned()))
        };
        let simulator = launch(Vec::new())?;
        let mut environment = self.environment()?;
        environment.push(("HARNESS_COUNTS", names.display().to_string()));
        let vendor = launch(environment)?;
        let names = fs::read_to_string(&names).map_err(cannot_access(&names))?;
        Ok(tiles(compiled.architecture, &vendor, &simulator, &names))
    }
}

/// Rows from the lines of the launches. Each kernel occurs twice.
fn tiles(architecture: u32, vendor: &str, simulator: &str, names: &str) -> Vec<TileRow> {
    let (vendor, simulator, names) = (by_kernel(vendor), by_kernel(simulator), by_kernel(names));
    let mut rows = Vec::new();
    for (kernel, lines) in vendor {
        let [Some(vendor), Some(simulator)] = [Some(&lines), simulator.get(kernel)].map(|lines| {
            let lines = lines?.iter().map(|words| counts(words));
            lines.collect::<Option<Vec<_>>>()
        }) else {
            continue;
        };
        let ([few, many], [few_calls, many_calls]) = (&vendor[..], &simulator[..]) else {
            continue;
        };
        // A tile stores q and k; of the gradient, the rows of its tokens.
        let stores = if kernel.starts_with("rope_rotate") {
            2
        } else {
            1
        };
        let tiles = ((many.transfers_out - few.transfers_out) / stores).max(1);
        let instructions = match names.get(kernel).map(Vec::as_slice) {
            Some([few, many]) => named(few, many, tiles),
            _ => BTreeMap::new(),
        };
        rows.push(TileRow {
            kernel: kernel.to_owned(),
            architecture,
            tokens: (TOKENS[1] - TOKENS[0]) as u64 / tiles,
            vendor: many.since(*few, tiles),
            simulator: many_calls.since(*few_calls, tiles),
            instructions,
        });
    }
    rows
}

/// The words of each line after the first, which names the kernel.
fn by_kernel(text: &str) -> BTreeMap<&str, Vec<Vec<&str>>> {
    let mut found: BTreeMap<&str, Vec<Vec<&str>>> = BTreeMap::new();
    for line in text.lines() {
        let mut words = line.split(' ');
        if let Some(kernel) = words.next() {
            found.entry(kernel).or_default().push(words.collect());
        }
    }
    found
}

fn counts(words: &[&str]) -> Option<Counts> {
    let numbers = words.iter().map(|word| word.parse().ok());
    match numbers.collect::<Option<Vec<u64>>>()?.as_slice() {
        &[vector, barriers, transfers_in, transfers_out] => Some(Counts {
            vector,
            barriers,
            transfers_in,
            transfers_out,
        }),
        _ => None,
    }
}

impl Counts {
    fn since(self, few: Self, tiles: u64) -> Self {
        Self {
            vector: (self.vector - few.vector) / tiles,
            barriers: (self.barriers - few.barriers) / tiles,
            transfers_in: (self.transfers_in - few.transfers_in) / tiles,
            transfers_out: (self.transfers_out - few.transfers_out) / tiles,
        }
    }
}

/// Vector instructions by name: the difference of two lines of `name=count`.
fn named(few: &[&str], many: &[&str], tiles: u64) -> BTreeMap<String, u64> {
    let read = |words: &[&str]| -> BTreeMap<String, u64> {
        let pairs = words.iter().filter_map(|word| word.split_once('='));
        let vector = pairs.filter(|(name, _)| name.starts_with('v'));
        vector
            .filter_map(|(name, count)| Some((name.to_owned(), count.parse().ok()?)))
            .collect()
    };
    let (few, many) = (read(few), read(many));
    let rows = many.into_iter().map(|(name, count)| {
        let before = few.get(&name).copied().unwrap_or(0);
        (name, count.saturating_sub(before) / tiles)
    });
    rows.filter(|(_, count)| *count > 0).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tile_is_the_difference_of_two_launches() {
        let lines = "rope_rotate_x 100 20 13 8\nrope_rotate_x 180 36 25 16\n";
        let names = "rope_rotate_x vmul=50 set_flag=9 vadds=3\nrope_rotate_x vmul=90 vadds=3\n";
        let rows = tiles(2201, lines, lines, names);
        assert_eq!(rows.len(), 1);
        assert_eq!((rows[0].tokens, rows[0].vendor), (12, rows[0].simulator));
        let expected = Counts {
            vector: 20,
            barriers: 4,
            transfers_in: 3,
            transfers_out: 2,
        };
        assert_eq!(rows[0].vendor, expected);
        assert_eq!(
            rows[0].instructions,
            BTreeMap::from([("vmul".to_owned(), 10)])
        );
    }
}
