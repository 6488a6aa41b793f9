//! Failure injection: the nth call of a function returns a chosen code, the nth run of an operator
//! ends its stream with one.

use std::collections::HashMap;

struct Fault {
    function: String,
    nth: u64,
    code: i32,
}

#[derive(Default)]
pub(crate) struct Faults {
    planned: Vec<Fault>,
    counts: HashMap<&'static str, u64>,
}

impl Faults {
    /// Makes the `nth` call from now on (counting from 1) return `code`.
    pub(crate) fn plan(&mut self, function: &str, nth: u64, code: i32) {
        let done = self.counts.get(function).copied().unwrap_or(0);
        self.planned.push(Fault {
            function: function.to_owned(),
            nth: done + nth,
            code,
        });
    }

    pub(crate) fn clear(&mut self) {
        self.planned.clear();
    }

    /// Counts a call; the code that it has to return, if one was planned.
    pub(crate) fn next(&mut self, function: &'static str) -> Option<i32> {
        let count = self.counts.entry(function).or_default();
        *count += 1;
        let count = *count;
        let position = self
            .planned
            .iter()
            .position(|fault| fault.function == function && fault.nth == count)?;
        Some(self.planned.swap_remove(position).code)
    }
}
