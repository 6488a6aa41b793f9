//! Specifications with odd sizes and places, for this crate's tests and rope-check's.

use rope_core::{AxisLayout, Pairing, RotarySpec};

/// A specification of `pairs` pairs, whose other sizes go through small and odd numbers along with it.
pub(crate) fn spec(pairs: usize, pairing: Pairing, per_channel: bool) -> RotarySpec {
    let axes = if per_channel {
        AxisLayout::PerChannel(vec![pairs / 3, pairs - pairs / 3])
    } else {
        AxisLayout::Single
    };
    let offset = pairs % 4;
    RotarySpec::builder(offset + 2 * pairs + pairs % 3)
        .rotary_dim(2 * pairs)
        .rotary_offset(offset)
        .pairing(pairing)
        .axis_layout(axes)
        .build()
        .expect("a valid specification")
}
