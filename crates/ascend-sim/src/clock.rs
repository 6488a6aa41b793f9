//! Happens-before between the host and the streams.

use std::collections::BTreeMap;
use std::fmt;

/// The host program, or a stream by its handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Actor {
    Host,
    Stream(u64),
}

impl fmt::Display for Actor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host => f.write_str("the host"),
            Self::Stream(handle) => write!(f, "stream 0x{handle:x}"),
        }
    }
}

/// For each actor, the last of its actions that is known to be complete.
#[derive(Clone, Debug, Default)]
pub(crate) struct Clock(BTreeMap<Actor, u64>);

impl Clock {
    pub(crate) fn get(&self, actor: Actor) -> u64 {
        self.0.get(&actor).copied().unwrap_or(0)
    }

    pub(crate) fn raise(&mut self, actor: Actor, epoch: u64) {
        let known = self.0.entry(actor).or_default();
        *known = (*known).max(epoch);
    }

    pub(crate) fn join(&mut self, other: &Self) {
        for (actor, epoch) in &other.0 {
            self.raise(*actor, *epoch);
        }
    }
}
