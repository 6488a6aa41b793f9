//! Failure injection: the nth call of a function returns a chosen code, the nth run of an operator
//! ends its stream with one, computes something else, or takes long.

use std::collections::HashMap;
use std::time::Duration;

use crate::codes::{Failure, Outcome};

/// What happens to a run of an operator.
#[derive(Clone, Copy, Debug)]
pub(crate) enum RunFault {
    /// The stream ends with this code.
    Code(i32),
    /// One element of its first output is altered.
    Wrong,
    /// It never ends.
    Hang,
    /// It takes this much longer.
    Slow(Duration),
}

impl RunFault {
    /// Fails, waits, or does nothing that could be seen before the run.
    pub(crate) fn strike(self, operator: &str) -> Outcome {
        match self {
            Self::Code(code) => {
                let message = format!("{operator}: this failure on the stream was injected");
                return Err(Failure::new(code, message));
            }
            Self::Hang => loop {
                std::thread::park();
            },
            Self::Slow(longer) => std::thread::sleep(longer),
            Self::Wrong => {}
        }
        Ok(())
    }
}

struct Fault<T> {
    function: String,
    /// 0: every one.
    nth: u64,
    effect: T,
}

/// Faults of one kind, by function.
pub(crate) struct Faults<T = i32> {
    planned: Vec<Fault<T>>,
    counts: HashMap<&'static str, u64>,
}

impl<T> Default for Faults<T> {
    fn default() -> Self {
        Self {
            planned: Vec::new(),
            counts: HashMap::new(),
        }
    }
}

impl<T: Copy> Faults<T> {
    /// Plans what the `nth` call from now on (counting from 1; 0: every call) does.
    pub(crate) fn plan(&mut self, function: &str, nth: u64, effect: T) {
        let done = self.counts.get(function).copied().unwrap_or(0);
        self.planned.push(Fault {
            function: function.to_owned(),
            nth: if nth == 0 { 0 } else { done + nth },
            effect,
        });
    }

    pub(crate) fn clear(&mut self) {
        self.planned.clear();
    }

    /// Counts a call; what it has to do, if that was planned.
    pub(crate) fn next(&mut self, function: &'static str) -> Option<T> {
        let count = self.counts.entry(function).or_default();
        *count += 1;
        let count = *count;
        let position = self.planned.iter().position(|fault| {
            fault.function == function && (fault.nth == count || fault.nth == 0)
        })?;
        let effect = self.planned[position].effect;
        if self.planned[position].nth != 0 {
            self.planned.swap_remove(position);
        }
        Some(effect)
    }
}

/// The faults that a variable plans for a whole process.
#[derive(Default)]
pub(crate) struct PlannedFaults {
    pub(crate) calls: Faults,
    pub(crate) runs: Faults<RunFault>,
    pub(crate) memory: Option<u64>,
}

impl PlannedFaults {
    /// Reads `call:FUNCTION:N:CODE`, `run:OPERATOR:N:CODE`, `wrong:OPERATOR:N`,
    /// `hang:OPERATOR:N`, `slow:OPERATOR:N:MILLISECONDS` and `memory:BYTES`, separated by commas.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let mut planned = Self::default();
        for fault in text.split(',').filter(|fault| !fault.is_empty()) {
            planned.add(fault).ok_or_else(|| {
                format!(
                    "expected ASCEND_SIM_FAULTS as docs/dev/simulator.md describes it, found {fault:?}"
                )
            })?;
        }
        Ok(planned)
    }

    fn add(&mut self, fault: &str) -> Option<()> {
        let parts: Vec<&str> = fault.split(':').collect();
        let number = |at: usize| parts.get(at)?.parse::<u64>().ok();
        let code = || parts.get(3)?.parse::<i32>().ok();
        if parts[0] == "memory" {
            self.memory = Some(number(1)?);
            return Some(());
        }
        let (name, nth) = (parts.get(1)?, number(2)?);
        match parts[0] {
            "call" => self.calls.plan(name, nth, code()?),
            "run" => self.runs.plan(name, nth, RunFault::Code(code()?)),
            "wrong" => self.runs.plan(name, nth, RunFault::Wrong),
            "hang" => self.runs.plan(name, nth, RunFault::Hang),
            "slow" => {
                let longer = Duration::from_millis(number(3)?);
                self.runs.plan(name, nth, RunFault::Slow(longer));
            }
            _ => return None,
        }
        Some(())
    }
}
