//! The trace of a kernel's first block, and when its instructions run if each takes the cycles that
//! a judge gives it.

use std::collections::BTreeMap;

/// Pipes of a core in the trace, in the simulator's order.
const PIPES: usize = 5;
/// Two vector cores, then the cube core.
const CORES: usize = 3;
const LANES: usize = CORES * PIPES;
/// The first pipe of the cube core.
const CUBE: usize = 2 * PIPES;
const PIPE_V: usize = 1;
const PIPE_MTE2: usize = 2;
const PIPE_MTE3: usize = 3;
pub(super) const BARRIER: &str = "PipeBarrier<PIPE_V>";
/// Not in the trace: another pipe waited for the vector unit.
pub(super) const WAIT: &str = "wait for V";
/// What moves between global memory and a core.
pub(super) const TRANSFERS: [&str; 4] = ["GM -> UB", "UB -> GM", "GM -> L1", "L0C -> GM"];

/// An instruction, a transfer or a barrier of the trace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Step {
    /// Core and pipe that run it.
    pub(super) lane: usize,
    epoch: u32,
    /// Repeats, bytes or products.
    pub(super) amount: u64,
    /// What has to be complete before, by lane.
    seen: [u32; LANES],
    pub(super) what: String,
    pub(super) types: String,
}

/// A launch of a kernel.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Trace {
    pub(super) kernel: String,
    pub(super) steps: Vec<Step>,
}

/// How long a kernel takes, in cycles.
#[derive(Clone, Debug, Default)]
pub(super) struct Time {
    pub(super) all: f64,
    /// Its transfers alone, at the core's share of the chip's memory.
    pub(super) memory: f64,
    /// The pipes of the vector core alone.
    pub(super) vector: f64,
    pub(super) loads: f64,
    pub(super) stores: f64,
    /// Cycles of the vector unit by instruction.
    pub(super) by_instruction: BTreeMap<String, f64>,
}

impl Trace {
    /// The launches of a trace's text; none if a line is not as the simulator writes it.
    pub(super) fn read(text: &str) -> Option<Vec<Self>> {
        let mut launches: Vec<Self> = Vec::new();
        // The last instruction of each pipe, and what it knew of its core's vector unit.
        let (mut last, mut known) = ([0; LANES], [0; LANES]);
        for line in text.lines() {
            if !line.contains(' ') {
                // A kernel with a cube core is named twice, the first time without having begun.
                launches.pop_if(|launch| launch.steps.is_empty());
                launches.push(Self {
                    kernel: line.to_owned(),
                    steps: Vec::new(),
                });
                (last, known) = ([0; LANES], [0; LANES]);
                continue;
            }
            let step = Step::read(line)?;
            let steps = &mut launches.last_mut()?.steps;
            let vector = step.lane / PIPES * PIPES + PIPE_V;
            let knows = step.seen[vector];
            if step.lane != vector && vector < CUBE && knows > known[step.lane] {
                steps.push(Step {
                    lane: vector,
                    epoch: last[vector],
                    amount: 0,
                    seen: [0; LANES],
                    what: WAIT.to_owned(),
                    types: String::new(),
                });
            }
            (last[step.lane], known[step.lane]) = (step.epoch, knows);
            steps.push(step);
        }
        Some(launches)
    }

    /// Runs the steps, each pipe in its order, by the cycles of each. `bytes_per_cycle` is the
    /// share of a vector core in the chip's memory, which transfers of both directions take in
    /// turns.
    pub(super) fn run(&self, cycles: &[f64], bytes_per_cycle: f64) -> Time {
        let mut queues: Vec<Vec<usize>> = vec![Vec::new(); LANES];
        for (index, step) in self.steps.iter().enumerate() {
            queues[step.lane].push(index);
        }
        let has_cube = queues[CUBE..].iter().any(|queue| !queue.is_empty());
        let mut time = Time::default();
        let mut next = [0; LANES];
        let mut free = [0.0_f64; LANES];
        let mut memory_free = 0.0_f64;
        // Of each lane, the epochs that have run and when they ended.
        let mut ends: Vec<Vec<(u32, f64)>> = vec![Vec::new(); LANES];
        loop {
            // Of the pipes' next steps, the one that can start first.
            let mut first: Option<(f64, usize)> = None;
            for lane in 0..LANES {
                let Some(&index) = queues[lane].get(next[lane]) else {
                    continue;
                };
                let ready = self.ready(&self.steps[index], &queues, &next, &ends);
                let Some(start) = ready.map(|ready| ready.max(free[lane])) else {
                    continue;
                };
                if first.is_none_or(|(earliest, _)| start < earliest) {
                    first = Some((start, lane));
                }
            }
            let Some((start, lane)) = first else {
                break;
            };
            let index = queues[lane][next[lane]];
            let step = &self.steps[index];
            let mut end = start + cycles[index];
            if TRANSFERS.contains(&step.what.as_str()) {
                // The second vector core of a block moves as much as the first, which is traced.
                let twice = has_cube && lane < CUBE;
                let share = if has_cube { 2.0 } else { 1.0 } * bytes_per_cycle;
                let shared = step.amount as f64 * if twice { 2.0 } else { 1.0 } / share;
                memory_free = memory_free.max(start) + shared;
                end = end.max(memory_free);
                time.memory += shared;
            }
            if lane % PIPES == PIPE_V && lane < CUBE {
                time.vector += cycles[index];
                *time.by_instruction.entry(step.what.clone()).or_default() += cycles[index];
            }
            match lane {
                PIPE_MTE2 => time.loads += cycles[index],
                PIPE_MTE3 => time.stores += cycles[index],
                _ => {}
            }
            free[lane] = end;
            ends[lane].push((step.epoch, end));
            next[lane] += 1;
            time.all = time.all.max(end);
        }
        time
    }

    /// When all that a step waits for is complete; none if some of it has not started.
    fn ready(
        &self,
        step: &Step,
        queues: &[Vec<usize>],
        next: &[usize],
        ends: &[Vec<(u32, f64)>],
    ) -> Option<f64> {
        let mut ready = 0.0_f64;
        for (lane, &epoch) in step.seen.iter().enumerate() {
            if lane == step.lane || epoch == 0 {
                continue;
            }
            let waits = queues[lane].get(next[lane]);
            if waits.is_some_and(|&index| self.steps[index].epoch <= epoch) {
                return None;
            }
            let done = ends[lane].partition_point(|(of, _)| *of <= epoch);
            if done > 0 {
                ready = ready.max(ends[lane][done - 1].1);
            }
        }
        Some(ready)
    }
}

impl Step {
    fn read(line: &str) -> Option<Self> {
        let mut words = line.splitn(LANES + 4, ' ');
        let mut number = || words.next()?.parse::<u64>().ok();
        let (lane, epoch, amount) = (number()? as usize, number()? as u32, number()?);
        let mut seen = [0; LANES];
        for of in &mut seen {
            *of = number()? as u32;
        }
        let (what, types) = words.next()?.split_once('|')?;
        // What the pipe has waited for belongs to the instruction after a barrier.
        if what == BARRIER {
            seen = [0; LANES];
        }
        (lane < LANES).then(|| Self {
            lane,
            epoch,
            amount,
            seen,
            what: what.to_owned(),
            types: types.to_owned(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two tiles: a load, an instruction after a barrier, a store.
    fn trace() -> Trace {
        // Lane, epoch, amount, what it follows, and what it is.
        let lines = [
            (2, 1, 4096, None, "GM -> UB|"),
            (1, 0, 0, None, "PipeBarrier<PIPE_V>|"),
            (1, 1, 10, Some((2, 1)), "Mul|f32"),
            (3, 1, 4096, Some((1, 1)), "UB -> GM|"),
            (2, 2, 4096, None, "GM -> UB|"),
            (1, 2, 10, Some((2, 2)), "Mul|f32"),
            (3, 2, 4096, Some((1, 2)), "UB -> GM|"),
        ];
        // A kernel with a cube core is named twice.
        let mut text = "rope_matrix_f16\nrope_matrix_f16\n".to_owned();
        for (lane, epoch, amount, follows, what) in lines {
            let mut seen = [0; LANES];
            if let Some((lane, epoch)) = follows {
                seen[lane] = epoch;
            }
            let seen = seen.map(|epoch: u32| epoch.to_string()).join(" ");
            text += &format!("{lane} {epoch} {amount} {seen} {what}\n");
        }
        let mut traces = Trace::read(&text).expect("a trace");
        assert_eq!(traces.len(), 1);
        traces.remove(0)
    }

    #[test]
    fn a_trace_shows_what_waits_for_the_vector_unit() {
        assert_eq!(Trace::read("1 2"), None);
        let trace = trace();
        let what: Vec<&str> = trace.steps.iter().map(|step| &*step.what).collect();
        let expected = [
            "GM -> UB", BARRIER, "Mul", WAIT, "UB -> GM", "GM -> UB", "Mul", WAIT, "UB -> GM",
        ];
        assert_eq!(what, expected);
    }

    #[test]
    fn pipes_overlap_and_transfers_share_the_memory() {
        let trace = trace();
        let cycles = |load: f64, vector: f64, store: f64| -> Vec<f64> {
            let of = |step: &Step| match &*step.what {
                "GM -> UB" => load,
                "UB -> GM" => store,
                "Mul" => vector,
                _ => 0.0,
            };
            trace.steps.iter().map(of).collect()
        };
        // The second load runs beside the first arithmetic, the last store after the last.
        let time = trace.run(&cycles(10.0, 30.0, 10.0), 4096.0);
        assert_eq!((time.all, time.memory, time.vector), (80.0, 4.0, 60.0));
        // Four transfers in turns; the arithmetic is hidden.
        let time = trace.run(&cycles(1.0, 1.0, 1.0), 409.6);
        assert!((time.all - 40.0).abs() < 1e-9, "{}", time.all);
        assert!((time.memory - 40.0).abs() < 1e-9);
    }
}
