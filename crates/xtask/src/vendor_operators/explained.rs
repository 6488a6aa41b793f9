//! Differences between the vendor's first phases and the simulator that are meant to be.

use super::ask::Answer;
use super::call::Call;
use super::compare::Difference;

/// Calls that are judged differently, and why that is right.
pub(super) struct Explained {
    /// The operators; all if empty.
    pub(super) operators: &'static [&'static str],
    pub(super) difference: Difference,
    /// What the vendor's message contains.
    pub(super) vendor: &'static str,
    /// What the simulator's message contains.
    pub(super) simulator: &'static str,
    pub(super) reason: &'static str,
}

impl Explained {
    pub(super) fn explains(&self, call: &Call, difference: Difference, answer: &Answer) -> bool {
        let function = call.operator.function;
        (self.operators.is_empty() || self.operators.contains(&function))
            && self.difference == difference
            && answer.vendor.message.contains(self.vendor)
            && answer.simulator.message.contains(self.simulator)
    }
}

/// The first row that fits explains a call. A row that explains none is an error.
pub(super) const EXPLAINED: &[Explained] = &[
    Explained {
        operators: &[],
        difference: Difference::SimulatorRefuses,
        vendor: "",
        simulator: "elements share memory",
        reason: "an output whose elements share memory: the vendor does not look at its strides, \
                 and the result depends on the order of the writes",
    },
    Explained {
        operators: &["aclnnEmbeddingDenseBackward"],
        difference: Difference::VendorDies,
        vendor: "",
        simulator: "",
        reason: "a gradient of rank 0, for which the vendor's loop over axes does not end",
    },
];
