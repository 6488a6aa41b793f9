//! Kernel launches: argument checks at the call, execution on the stream, reports afterwards.

use std::sync::Arc;

use crate::abi::kernel::{LaunchOutput, Region};
use crate::abi::sys::{Engine, SharedBytes};
use crate::codes::{Failure, Outcome, RT_PARAM_INVALID, RT_VECTOR_CORE_EXCEPTION};
use crate::conflicts::{self, Access, Conflict};
use crate::memory::Allocation;
use crate::state::{Function, sim};
use crate::stream::{TaskContext, Work};
use crate::trace::{Counters, LaunchReport, Violation};

const MAX_BLOCKS: u32 = 65535;
/// Conflicts reported per launch and kind: one is enough to find the fault.
const CONFLICTS_REPORTED: usize = 4;
const PIPES: [&str; 4] = ["S", "V", "MTE2", "MTE3"];

/// Data that travels behind the arguments: at `data_offset` of the host buffer, its device address
/// goes to `address_offset`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PlaceHolder {
    pub(crate) address_offset: usize,
    pub(crate) data_offset: usize,
}

/// Puts a launch on a stream (its real handle).
pub(crate) fn submit(
    function: u64,
    blocks: u32,
    stream: u64,
    mut args: Vec<u8>,
    place_holders: &[PlaceHolder],
) -> Outcome {
    let mut state = sim();
    let function = state.functions.get(function)?.clone();
    let kernel = &function.library.kernels[function.kernel];
    if !(1..=MAX_BLOCKS).contains(&blocks) {
        return Err(Failure::new(
            RT_PARAM_INVALID,
            format!(
                "kernel `{}`: {blocks} blocks, 1..={MAX_BLOCKS} are allowed",
                kernel.name
            ),
        ));
    }
    let inline = place_holders
        .iter()
        .map(|p| p.data_offset)
        .min()
        .unwrap_or(args.len());
    let accepted = kernel.args_bytes.saturating_sub(7)..=kernel.args_bytes;
    if !accepted.contains(&(inline as u64)) {
        return Err(Failure::new(
            RT_PARAM_INVALID,
            format!(
                "kernel `{}` takes {} bytes of arguments, {inline} were given",
                kernel.name, kernel.args_bytes
            ),
        ));
    }
    let tail = inline..args.len();
    if !tail.is_empty() {
        let device = state.current_device()?;
        let limit = state.machine.memory_bytes;
        let address = state.memory.allocate(tail.len() as u64, device, limit)?;
        for holder in place_holders {
            let target = args
                .get_mut(holder.address_offset..holder.address_offset + 8)
                .ok_or_else(|| {
                    Failure::new(
                        RT_PARAM_INVALID,
                        format!(
                            "placeholder address offset {} lies outside the arguments",
                            holder.address_offset
                        ),
                    )
                })?;
            target.copy_from_slice(&(address + (holder.data_offset - inline) as u64).to_ne_bytes());
        }
        let data = args[tail].to_vec();
        let cleanup = address;
        state.submit(
            stream,
            Work::Run(Box::new(move |engine, _| fill(engine, address, &data))),
        )?;
        state.submit(stream, run_work(function, blocks, args))?;
        state.submit(
            stream,
            Work::Run(Box::new(move |_, _| {
                sim().memory.release(cleanup).map(drop)
            })),
        )?;
        return Ok(());
    }
    args.resize(kernel.args_bytes as usize, 0);
    state
        .submit(stream, run_work(function, blocks, args))
        .map(drop)
}

fn fill(engine: &mut Engine<'_>, address: u64, data: &[u8]) -> Outcome {
    let bytes = Arc::clone(&sim().memory.find(address, data.len() as u64)?.bytes);
    bytes.write(engine, 0, data);
    Ok(())
}

fn run_work(function: Function, blocks: u32, args: Vec<u8>) -> Work {
    Work::Run(Box::new(move |engine, context| {
        run(engine, context, &function, blocks, &args)
    }))
}

/// What a launch needs of an allocation: its place, and its bytes kept alive.
struct Held {
    start: u64,
    size: u64,
    bytes: Arc<SharedBytes>,
}

fn hold(allocation: &Allocation) -> Held {
    Held {
        start: allocation.start,
        size: allocation.size,
        bytes: Arc::clone(&allocation.bytes),
    }
}

fn run(
    engine: &mut Engine<'_>,
    context: &TaskContext,
    function: &Function,
    blocks: u32,
    args: &[u8],
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
    let mut output =
        function
            .library
            .run(engine, function.kernel, blocks, args, &regions, &machine);
    explain_addresses(&mut output.violations);
    output.violations.extend(find_conflicts(kernel, &output));
    let mut counters = Counters::default();
    output
        .per_block
        .iter()
        .for_each(|block| counters.add(block));

    let mut state = sim();
    for (touched, write) in extents(&held, &output.accesses) {
        state.task_touch(
            touched.0,
            touched.1 - touched.0,
            write,
            context,
            &format!("kernel `{kernel}`"),
        );
    }
    let violations = output.violations.len();
    let first = output.violations.first().map(Violation::to_string);
    output
        .violations
        .into_iter()
        .for_each(|violation| state.violate(violation));
    state.launches.push(LaunchReport {
        kernel: kernel.clone(),
        blocks,
        counters,
        per_block: output.per_block,
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
        violation.message = format!(
            "{}; {}",
            violation.message,
            state.memory.why_not(address, 0)
        );
    }
}

fn find_conflicts(kernel: &str, output: &LaunchOutput) -> Vec<Violation> {
    let verb = |access: &Access| if access.write { "writes" } else { "reads" };
    let place = |access: &Access| format!("{}:{}", output.places[access.place], access.line);
    let violation = |kind: &str, (block, access): (u32, Access), message: String| Violation {
        kind: kind.to_owned(),
        kernel: Some(kernel.to_owned()),
        block: Some(block),
        file: output.places[access.place]
            .split_once(" at ")
            .map(|(_, file)| file.to_owned()),
        line: Some(access.line),
        message,
    };
    let writer = |found: &Conflict| {
        if found.second.1.write {
            found.second
        } else {
            found.first
        }
    };
    let blocks = conflicts::between_blocks(&output.accesses, CONFLICTS_REPORTED);
    let inside = output
        .accesses
        .iter()
        .flat_map(|(block, accesses)| conflicts::inside_block(*block, accesses, 1))
        .take(CONFLICTS_REPORTED);
    blocks
        .iter()
        .map(|found| {
            let message = format!(
                "block {} {} device byte 0x{:x} ({}) and block {} {} it ({}): blocks run in any order",
                found.first.0,
                verb(&found.first.1),
                found.byte,
                place(&found.first.1),
                found.second.0,
                verb(&found.second.1),
                place(&found.second.1),
            );
            violation("block-conflict", writer(found), message)
        })
        .chain(inside.map(|found| {
            let (first, second) = (PIPES[usize::from(found.first.1.pipe)], PIPES[usize::from(found.second.1.pipe)]);
            let remedy = if first == second {
                format!("PipeBarrier<PIPE_{first}>")
            } else {
                format!("SetFlag/WaitFlag<HardEvent::{first}_{second}>")
            };
            let message = format!(
                "{} {} device byte 0x{:x} on pipe {second}, not ordered after {} which {} it on pipe {first}: {remedy} is missing",
                place(&found.second.1),
                verb(&found.second.1),
                found.byte,
                place(&found.first.1),
                verb(&found.first.1),
            );
            violation("gm-ordering", found.second, message)
        }))
        .collect()
}

/// For each allocation, the bytes that the launch read and wrote, as one extent each.
fn extents(held: &[Held], accesses: &[(u32, Vec<Access>)]) -> Vec<((u64, u64), bool)> {
    let mut found: Vec<[Option<(u64, u64)>; 2]> = vec![[None; 2]; held.len()];
    for access in accesses.iter().flat_map(|(_, list)| list) {
        let index = held
            .partition_point(|h| h.start <= access.start)
            .saturating_sub(1);
        let extent = &mut found[index][usize::from(access.write)];
        let (start, end) = extent.unwrap_or((access.start, access.end()));
        *extent = Some((start.min(access.start), end.max(access.end())));
    }
    found
        .into_iter()
        .flat_map(|[read, write]| [(read, false), (write, true)])
        .filter_map(|(extent, write)| extent.map(|extent| (extent, write)))
        .collect()
}
