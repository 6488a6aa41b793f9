//! The names of what rotations differ in, as tables, results and arguments have them.

use rope_core::{AxisLayout, Layout, Pairing};

/// The name of an order of the dimensions.
pub fn layout_name(layout: Layout) -> &'static str {
    match layout {
        Layout::Bsnd => "bsnd",
        Layout::Bnsd => "bnsd",
        Layout::Sbnd => "sbnd",
        Layout::Tnd => "tnd",
    }
}

/// The name of a pairing.
pub fn pairing_name(pairing: Pairing) -> &'static str {
    match pairing {
        Pairing::Half => "half",
        Pairing::Adjacent => "adjacent",
        Pairing::Quarter => "quarter",
        Pairing::InterleaveHalf => "interleave_half",
    }
}

/// The name of an axis layout, without its sections.
pub fn axes_name(axes: &AxisLayout) -> &'static str {
    match axes {
        AxisLayout::Single => "single",
        AxisLayout::Contiguous(_) => "contiguous",
        AxisLayout::Striped(_) => "striped",
        AxisLayout::Ernie(_) => "ernie",
        AxisLayout::Balanced(_) => "balanced",
        AxisLayout::PerAxis(_) => "per_axis",
        AxisLayout::PerAxisStriped(_) => "per_axis_striped",
        AxisLayout::PerChannel(_) => "per_channel",
        AxisLayout::Lanes(_) => "lanes",
    }
}
