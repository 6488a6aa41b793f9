//! Kernel launches: argument checks at the call, execution on the stream, reports afterwards.

use std::sync::Arc;

use crate::abi::kernel::{LaunchOutput, Region, Task};
use crate::abi::sys::{Engine, SharedBytes};
use crate::clock::Actor;
use crate::codes::{
    Failure, Outcome, RT_INVALID_HANDLE, RT_PARAM_INVALID, RT_VECTOR_CORE_EXCEPTION,
};
use crate::conflicts::{self, Access, Conflict, PIPES_OF_CORE};
use crate::machine::Machine;
use crate::memory::{Allocation, GUARD_BYTES};
use crate::record;
use crate::state::{Function, sim};
use crate::stream::{TaskContext, Work};
use crate::trace::{LaunchReport, Violation};

const MAX_BLOCKS: u32 = 65535;
/// Conflicts reported per launch and kind: one is enough to find the fault.
const CONFLICTS_REPORTED: usize = 4;
/// Runs of bytes recorded per launch and direction.
const EXTENTS_KEPT: usize = 1024;
const SMALLEST_GAP_BYTES: u64 = 64;
/// The pipes of a vector core and those of a cube core, in the order of `Pipe` in block.h.
const PIPES: [[&str; 5]; 2] = [
    ["S", "V", "MTE2", "MTE3", "-"],
    ["S", "M", "MTE2", "FIX", "MTE1"],
];
/// The number of a cube core in its block, after the two vector cores.
const CUBE_CORE: usize = 2;

/// How the arguments of a launch came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// As the program laid them out, or as the binary describes them.
    Copied,
    /// In a list that the runtime completed: it has the sync address, where the kernel wants one.
    Completed,
}

/// The argument block of a kernel from its parameters, one after the other at multiples of 8.
pub(crate) fn append(block: &mut Vec<u8>, parameter: &[u8]) {
    block.resize(block.len().next_multiple_of(8), 0);
    block.extend_from_slice(parameter);
}

/// Puts a launch on a stream.
pub(crate) fn submit(
    function: u64,
    blocks: u32,
    stream: u64,
    mut args: Vec<u8>,
    way: Way,
) -> Outcome {
    let mut state = sim();
    let stream = state.stream_handle(stream)?;
    let function = state.functions.get(function)?.clone();
    if state.binaries.get(function.binary).is_err() {
        let message = "the kernel's binary was unloaded: keep it until the last launch";
        return Err(Failure::new(RT_INVALID_HANDLE, message));
    }
    let kernel = &function.library.kernels[function.kernel];
    let (name, expected, given) = (&kernel.name, kernel.args_bytes, args.len() as u64);
    if !(1..=MAX_BLOCKS).contains(&blocks) {
        let message = format!("kernel `{name}`: {blocks} blocks, 1..={MAX_BLOCKS} are allowed");
        return Err(Failure::new(RT_PARAM_INVALID, message));
    }
    if !(expected.saturating_sub(7)..=expected).contains(&given) {
        let message =
            format!("kernel `{name}` takes {expected} bytes of arguments, {given} were given");
        return Err(Failure::new(RT_PARAM_INVALID, message));
    }
    args.resize(expected as usize, 0);
    let what = format!("kernel `{name}`");
    let words = args.chunks_exact(8).filter_map(|word| word.try_into().ok());
    let named: Vec<u64> = words.map(u64::from_ne_bytes).collect();
    let (binary, name) = (function.binary, name.clone());
    let late_if_mix = way == Way::Copied && !state.machine.sync_in_binary;
    let work = Work::Run(Box::new(move |engine, context| {
        let task = Task {
            kernel: function.kernel,
            blocks,
            args: &args,
            late_if_mix,
        };
        run(engine, context, &function, &task)
    }));
    let epoch = state.submit_using(stream, work, &what, named)?;
    let launched = state.launched.entry(binary).or_default();
    launched.insert(Actor::Stream(stream), (epoch, name));
    Ok(())
}

/// The parts of an allocation that a launch needs: its addresses, and its bytes kept alive.
struct Held {
    start: u64,
    size: u64,
    bytes: Arc<SharedBytes>,
}

fn hold(allocation: &Allocation) -> Held {
    Held {
        start: allocation.start,
        size: allocation.size,
        bytes: allocation.share(),
    }
}

fn run(
    engine: &mut Engine<'_>,
    context: &TaskContext,
    function: &Function,
    task: &Task<'_>,
) -> Outcome {
    let (held, machine) = {
        let state = sim();
        (
            state.memory.live().map(hold).collect::<Vec<_>>(),
            state.machine.clone(),
        )
    };
    let regions: Vec<Region> = held
        .iter()
        .map(|h| Region {
            device_address: h.start,
            size_bytes: h.size,
            bytes: h.bytes.as_ptr(),
        })
        .collect();
    let kernel = &function.library.kernels[function.kernel].name;
    let mut output = function.library.run(engine, task, &regions, &machine);
    explain_addresses(&mut output.violations);
    output.violations.extend(find_conflicts(kernel, &output));
    record_launch(kernel, task.blocks, &machine, engine, &held, &output);

    let mut state = sim();
    let what = format!("kernel `{kernel}`");
    for ((start, end), write) in extents(&output.accesses) {
        state.task_touch(start, end - start, write, context, &what);
    }
    let violations = output.violations.len();
    let first = output.violations.first().map(Violation::to_string);
    output
        .violations
        .into_iter()
        .for_each(|violation| state.violate(violation));
    state.report(LaunchReport {
        kernel: kernel.clone(),
        blocks: task.blocks,
        counters: output.counters,
        first_block: output.first_block,
        violations,
    });
    match first {
        None => Ok(()),
        Some(first) => Err(Failure::new(
            RT_VECTOR_CORE_EXCEPTION,
            format!("{first} ({violations} violations in this launch)"),
        )),
    }
}

/// Records the launch with what it left in the memory that it wrote, if that is asked for.
fn record_launch(
    kernel: &str,
    blocks: u32,
    machine: &Machine,
    engine: &Engine<'_>,
    held: &[Held],
    output: &LaunchOutput,
) {
    if !record::is_on() {
        return;
    }
    let extents = extents(&output.accesses);
    let written = extents.iter().filter(|(_, write)| *write);
    let bytes = written.filter_map(|&((start, end), _)| {
        let index = held.partition_point(|h| h.start <= start).checked_sub(1)?;
        let offset = (start - held[index].start) as usize;
        Some(
            held[index]
                .bytes
                .slice(engine, offset, (end - start) as usize),
        )
    });
    let mut kinds: Vec<&str> = output.violations.iter().map(|v| v.kind.as_str()).collect();
    kinds.sort_unstable();
    kinds.dedup();
    let kinds = if kinds.is_empty() {
        "-".to_owned()
    } else {
        kinds.join(",")
    };
    let architecture = machine.architecture;
    record::add(&format!("{architecture} {kernel} {blocks} {kinds}"), bytes);
}

/// Adds what is known about a wrong device address, such as that it was freed.
fn explain_addresses(violations: &mut [Violation]) {
    let state = sim();
    for violation in violations
        .iter_mut()
        .filter(|v| v.kind == "gm-out-of-bounds")
    {
        let Some(address) = violation
            .message
            .split_once("device bytes [0x")
            .and_then(|(_, rest)| rest.split_once(','))
            .and_then(|(hex, _)| u64::from_str_radix(hex, 16).ok())
        else {
            continue;
        };
        let why = state.memory.why_not(address, 0);
        violation.message = format!("{}; {why}", violation.message);
    }
}

/// The accesses of a launch that have no order, as violations.
fn find_conflicts(kernel: &str, output: &LaunchOutput) -> Vec<Violation> {
    let verb = |access: &Access| if access.write { "writes" } else { "reads" };
    let location = |access: &Access| {
        let operation = &output.locations[access.location];
        format!("{operation}:{}", access.line)
    };
    let violation = |kind: &str, (block, access): (u32, Access), message: String| Violation {
        kind: kind.to_owned(),
        kernel: Some(kernel.to_owned()),
        block: Some(block),
        file: output.locations[access.location]
            .split_once(" at ")
            .map(|(_, file)| file.to_owned()),
        line: Some(access.line),
        message,
    };
    let between = |Conflict {
                       first,
                       second,
                       byte,
                   }: &Conflict| {
        let message = format!(
            "block {} {} device byte 0x{byte:x} ({}) and block {} {} it ({}): \
             blocks run in any order",
            first.0,
            verb(&first.1),
            location(&first.1),
            second.0,
            verb(&second.1),
            location(&second.1),
        );
        let writer = if second.1.write { second } else { first };
        violation("block-conflict", *writer, message)
    };
    let line = |Conflict {
                    first,
                    second,
                    byte,
                }: &Conflict| {
        let message = format!(
            "blocks {} ({}) and {} ({}) write in one cache line of 64 bytes, at device byte \
             0x{byte:x}, at least one by a scalar: a core writes a line back whole",
            first.0,
            location(&first.1),
            second.0,
            location(&second.1),
        );
        violation("block-conflict", *second, message)
    };
    let inside = |Conflict {
                      first,
                      second,
                      byte,
                  }: Conflict| {
        let core = |access: &Access| usize::from(access.pipe / PIPES_OF_CORE);
        let [before, after] = [first, second].map(|(_, access)| {
            let cube = usize::from(core(&access) == CUBE_CORE);
            PIPES[cube][usize::from(access.pipe % PIPES_OF_CORE)]
        });
        let remedy = if core(&first.1) != core(&second.1) {
            "CrossCoreSetFlag/CrossCoreWaitFlag between the cores".to_owned()
        } else if before == after {
            format!("PipeBarrier<PIPE_{before}>")
        } else {
            format!("SetFlag/WaitFlag<HardEvent::{before}_{after}>")
        };
        let message = format!(
            "{} {} device byte 0x{byte:x} on pipe {after}, not ordered after {} which {} it \
             on pipe {before}: {remedy} is missing",
            location(&second.1),
            verb(&second.1),
            location(&first.1),
            verb(&first.1),
        );
        violation("gm-ordering", second, message)
    };
    let blocks = conflicts::between_blocks(&output.accesses, CONFLICTS_REPORTED);
    let lines = if blocks.is_empty() {
        conflicts::between_lines(&output.accesses, CONFLICTS_REPORTED)
    } else {
        Vec::new()
    };
    let lines = lines.iter().map(line);
    let within = output.accesses.iter();
    let within = within.flat_map(|(block, list)| conflicts::inside_block(*block, list, 1));
    let within = within.take(CONFLICTS_REPORTED).map(inside);
    let blocks = blocks.iter().map(between);
    blocks.chain(lines).chain(within).collect()
}

/// The runs of bytes that the launch read, and those that it wrote.
fn extents(accesses: &[(u32, Vec<Access>)]) -> Vec<((u64, u64), bool)> {
    let all = || accesses.iter().flat_map(|(_, list)| list);
    let of = |write: bool| {
        let runs = all().filter(|access| access.write == write);
        let mut runs: Vec<(u64, u64)> = runs.map(|access| (access.start, access.end())).collect();
        runs.sort_unstable();
        joined(&mut runs, 0);
        // Rows cut out of wider ones: what lies between them counts as touched where they are many.
        let mut gap = SMALLEST_GAP_BYTES;
        while runs.len() > EXTENTS_KEPT {
            joined(&mut runs, gap);
            gap *= 2;
        }
        runs.into_iter().map(move |run| (run, write))
    };
    of(false).chain(of(true)).collect()
}

/// Joins sorted runs that are at most `gap` bytes apart; not over the guard between allocations.
fn joined(runs: &mut Vec<(u64, u64)>, gap: u64) {
    runs.dedup_by(|next, run| {
        let join = next.0 <= run.1 + gap.min(GUARD_BYTES - 1);
        if join {
            run.1 = run.1.max(next.1);
        }
        join
    });
}
