//! The rotations to time.

use std::collections::HashSet;

use rope_check::buffer::DType;
use rope_check::names::{axes_name, layout_name, pairing_name};
use rope_core::{AxisLayout, Layout, Pairing};
use serde::{Deserialize, Serialize};

use crate::shapes::{FLUX, LONG, LONG_SEQS, QWEN3_5, QWEN3_VL_8B, Shape};

/// The element types that are timed.
pub const DTYPES: [DType; 3] = [DType::F32, DType::Bf16, DType::F16];
/// Those that are timed on a GPU.
const GPU_DTYPES: [DType; 2] = [DType::F32, DType::Bf16];

/// The direction that is timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Way {
    /// The rotation.
    Forward,
    /// Its transpose, on the gradients.
    Backward,
    /// One after the other.
    Both,
}

impl Way {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Forward, Self::Backward, Self::Both];

    /// The name in tables and results.
    pub fn name(self) -> &'static str {
        match self {
            Self::Forward => "forward",
            Self::Backward => "backward",
            Self::Both => "both",
        }
    }

    /// Passes over q and k.
    pub fn passes(self) -> usize {
        if self == Self::Both { 2 } else { 1 }
    }
}

/// The part of the results that a case belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Group {
    /// Tensors of 64 MiB and more, in the pairings that models have.
    Large,
    /// The rarer pairings, and pairs with two angles.
    Rare,
    /// Other heads, and axes.
    Other,
    /// From one token up: does a token always cost the same?
    Length,
    /// A single token, as in decoding.
    Decode,
    /// Through burn, with its autodiff.
    Burn,
    /// The norm of the heads with the rotation.
    Norm,
    /// On a GPU.
    Gpu,
}

impl Group {
    /// All parts.
    pub const ALL: [Self; 8] = [
        Self::Large,
        Self::Rare,
        Self::Other,
        Self::Length,
        Self::Decode,
        Self::Norm,
        Self::Burn,
        Self::Gpu,
    ];

    /// The name in results.
    pub fn name(self) -> &'static str {
        match self {
            Self::Large => "large",
            Self::Rare => "rare",
            Self::Other => "other",
            Self::Length => "length",
            Self::Decode => "decode",
            Self::Burn => "burn",
            Self::Norm => "norm",
            Self::Gpu => "gpu",
        }
    }
}

/// A rotation to time.
#[derive(Clone, Debug, PartialEq)]
pub struct TimedCase {
    /// The part of the results that it belongs to.
    pub group: Group,
    /// q and k.
    pub shape: Shape,
    /// Their elements.
    pub dtype: DType,
    /// The pairing of channels.
    pub pairing: Pairing,
    /// The axis that drives each pair.
    pub axes: AxisLayout,
    /// The order of the dimensions.
    pub layout: Layout,
    /// The direction.
    pub way: Way,
    /// True if q and k are overwritten.
    pub in_place: bool,
}

impl TimedCase {
    /// q and k in f32, half, BSND, forward, in place, by rows gathered for the step.
    pub fn new(group: Group, shape: Shape) -> Self {
        Self {
            group,
            shape,
            dtype: DType::F32,
            pairing: Pairing::Half,
            axes: AxisLayout::Single,
            layout: Layout::Bsnd,
            way: Way::Forward,
            in_place: true,
        }
    }

    /// Unique; the factors of the case, separated by slashes.
    pub fn name(&self) -> String {
        let norm = if self.group == Group::Norm {
            "/norm"
        } else {
            ""
        };
        format!(
            "{}/{}/{}/{}/{}/{}@{}/{}{norm}",
            self.way.name(),
            layout_name(self.layout),
            self.dtype.name(),
            pairing_name(self.pairing),
            axes_name(&self.axes),
            self.shape.name,
            self.shape.seq,
            if self.in_place { "in_place" } else { "into" },
        )
    }

    /// True if the cost of a token is compared with that of the other case: they are timed in
    /// turns.
    pub fn is_compared_with(&self, other: &Self) -> bool {
        let long = |case: &Self| case.group == Group::Length && case.shape.seq >= LONG_SEQS[0];
        let series = |case: &Self| (case.dtype, case.layout, case.in_place);
        long(self) && long(other) && series(self) == series(other)
    }

    /// Bytes of q and k.
    pub fn tensor_bytes(&self) -> usize {
        self.shape.elems() * self.dtype.size_bytes()
    }

    /// Bytes that have to be read and written: q and k once each way and pass. cos and sin are not
    /// counted. The backward of the norm reads x too.
    pub fn moved_bytes(&self) -> usize {
        if self.group == Group::Norm && self.way == Way::Backward {
            return 3 * self.tensor_bytes();
        }
        2 * self.way.passes() * self.tensor_bytes()
    }
}

/// How many of the cases.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Selection {
    /// One of each kind, tiny: whether everything runs, not how fast.
    Quick,
    /// Everything that docs/benchmarks.md shows.
    #[default]
    Default,
}

const LAYOUTS: [Layout; 3] = [Layout::Bsnd, Layout::Bnsd, Layout::Tnd];
const WAYS: [Way; 2] = [Way::Forward, Way::Backward];
/// HunyuanVL's sections.
fn per_channel() -> AxisLayout {
    AxisLayout::PerChannel(vec![16, 16, 16, 16])
}
/// Qwen3-VL's sections.
fn striped() -> AxisLayout {
    AxisLayout::Striped(vec![24, 20, 20])
}

/// The cases of a selection, in the order of the results.
pub fn cases(selection: Selection) -> Vec<TimedCase> {
    let mut cases = Vec::new();
    let common = [Pairing::Half, Pairing::Adjacent].map(|pairing| (pairing, AxisLayout::Single));
    let rare = [
        (Pairing::Quarter, AxisLayout::Single),
        (Pairing::InterleaveHalf, AxisLayout::Single),
        (Pairing::Half, per_channel()),
    ];
    for dtype in DTYPES {
        let base = |group, shape| TimedCase {
            dtype,
            ..TimedCase::new(group, shape)
        };
        let large = base(Group::Large, QWEN3_VL_8B);
        crossed(&mut cases, &large, &common, &LAYOUTS);
        let large = base(Group::Rare, QWEN3_VL_8B);
        crossed(&mut cases, &large, &rare, &LAYOUTS[..1]);
        other(&mut cases, dtype);
        length(&mut cases, dtype);
        let token = base(Group::Decode, QWEN3_VL_8B.at(1));
        crossed(&mut cases, &token, &common, &LAYOUTS[..1]);
        let norm = base(Group::Norm, QWEN3_VL_8B);
        crossed(&mut cases, &norm, &common, &LAYOUTS[..2]);
    }
    if selection == Selection::Quick {
        shorten(&mut cases);
    }
    cases
}

/// The cases on a GPU, in the order of the results.
pub fn gpu_cases(selection: Selection) -> Vec<TimedCase> {
    let mut cases = Vec::new();
    let common = [Pairing::Half, Pairing::Adjacent].map(|pairing| (pairing, AxisLayout::Single));
    let longest = LONG_SEQS[LONG_SEQS.len() - 1];
    for dtype in GPU_DTYPES {
        for (shape, layouts) in [
            (QWEN3_VL_8B, &LAYOUTS[..]),
            (QWEN3_VL_8B.at(longest), &LAYOUTS[..1]),
            (FLUX, &LAYOUTS[1..2]),
            (QWEN3_VL_8B.at(1), &LAYOUTS[..1]),
        ] {
            let base = TimedCase {
                dtype,
                ..TimedCase::new(Group::Gpu, shape)
            };
            crossed(&mut cases, &base, &common, layouts);
        }
    }
    if selection == Selection::Quick {
        shorten(&mut cases);
    }
    cases
}

fn shorten(cases: &mut Vec<TimedCase>) {
    for case in cases.iter_mut() {
        case.shape = case.shape.at(case.shape.seq.min(64));
    }
    let mut seen = HashSet::new();
    cases.retain(|case| seen.insert(case.name()));
}

/// `base` in place and not, for each way, pairing and layout.
fn crossed(
    cases: &mut Vec<TimedCase>,
    base: &TimedCase,
    pairings: &[(Pairing, AxisLayout)],
    layouts: &[Layout],
) {
    for in_place in [true, false] {
        for way in WAYS {
            for (pairing, axes) in pairings {
                cases.extend(layouts.iter().map(|&layout| TimedCase {
                    pairing: *pairing,
                    axes: axes.clone(),
                    layout,
                    way,
                    in_place,
                    ..base.clone()
                }));
            }
        }
    }
}

fn other(cases: &mut Vec<TimedCase>, dtype: DType) {
    let base = TimedCase {
        dtype,
        ..TimedCase::new(Group::Other, QWEN3_VL_8B)
    };
    cases.push(TimedCase {
        axes: striped(),
        ..base.clone()
    });
    cases.push(TimedCase {
        shape: QWEN3_5,
        axes: AxisLayout::Striped(vec![11, 11, 10]),
        ..base.clone()
    });
}

/// Tokens below which a token's cost is that of starting, not of moving bytes.
const SHORT_SEQS: [usize; 3] = [16, 256, 2048];

fn length(cases: &mut Vec<TimedCase>, dtype: DType) {
    if dtype == DType::F16 {
        return;
    }
    for seq in SHORT_SEQS.into_iter().chain(LONG_SEQS) {
        cases.push(TimedCase {
            dtype,
            in_place: false,
            ..TimedCase::new(Group::Length, LONG.at(seq))
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_large_means_64_mib() {
        for selection in [Selection::Quick, Selection::Default] {
            let mut cases = cases(selection);
            cases.extend(gpu_cases(selection));
            let key = |case: &TimedCase| (case.name(), case.group == Group::Gpu);
            let names: HashSet<_> = cases.iter().map(key).collect();
            assert_eq!(names.len(), cases.len(), "{selection:?}");
        }
        for case in cases(Selection::Default) {
            if matches!(case.group, Group::Large | Group::Rare | Group::Norm) {
                assert!(case.tensor_bytes() >= 64 << 20, "{}", case.name());
            }
        }
    }

    #[test]
    fn the_default_holds_every_case_of_the_page() {
        let cases = cases(Selection::Default);
        let count = |group| cases.iter().filter(|case| case.group == group).count();
        // dtype x pairing x layout x way x in place or into.
        assert_eq!(count(Group::Large), 3 * 2 * 3 * 2 * 2);
        assert_eq!(count(Group::Rare), 3 * 3 * 2 * 2);
        assert_eq!(count(Group::Decode), 3 * 2 * 2 * 2);
        assert_eq!(count(Group::Norm), 3 * 2 * 2 * 2 * 2);
        let longest = cases.iter().map(|case| case.shape.seq).max();
        assert_eq!(longest, Some(131_072));
    }
}
