//! What the results are held to.

use std::fmt;

use rope_check::buffer::DType;

use crate::cases::{DTYPES, Group, Way};
use crate::rows::{AttentionRow, MemoryRow, Source, SpeedRow, StepRow, bytes};
use crate::shapes::LONG_SEQS;

/// Implementation names that bars compare.
pub mod names {
    /// The kernels by themselves.
    pub const KERNELS: &str = "rope-core";
    /// The kernels, and a new buffer for each result.
    pub const KERNELS_NEW_BUFFER: &str = "rope-core, new buffer";
    /// One differentiable operation in burn.
    pub const FUSED: &str = "fused";
    /// Ordinary operations of burn.
    pub const COMPOSED: &str = "composed";
    /// burn's own norm, then the fused rotation.
    pub const FUSED_ROTATION: &str = "composed norm, fused rotation";
    /// The backward's seed alone.
    pub const NONE: &str = "no rotation";
    /// burn's own.
    pub const ROTARY_ENCODING: &str = "burn::nn::RotaryEncoding";
    /// candle's, for half.
    pub const CANDLE_ROPE: &str = "candle rope";
    /// candle's, for adjacent.
    pub const CANDLE_ROPE_I: &str = "candle rope_i";
}

/// Tensors from which a rotation on a GPU is compared with a copy.
const LARGE_BYTES: usize = 64 << 20;

/// A claim, and whether the results bear it out.
#[derive(Clone, Debug, PartialEq)]
pub struct Bar {
    /// The claim.
    pub claim: String,
    /// What was found, the worst case of it.
    pub found: String,
    /// Whether the claim holds.
    pub met: bool,
}

impl fmt::Display for Bar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verdict = if self.met { "met    " } else { "NOT MET" };
        write!(f, "{verdict}  {}: {}", self.claim, self.found)
    }
}

/// The bars of `mrope bench memory --attention` that the rows say something about.
pub fn attention(rows: &[AttentionRow]) -> Vec<Bar> {
    let mut bars = Vec::new();
    for dtype in DTYPES {
        let fused = rows
            .iter()
            .filter(|row| row.dtype == dtype && row.implementation == names::FUSED);
        let mut a_token = fused.clone().filter_map(|row| {
            let peak = row.step_peak_bytes? as f64;
            Some((row.tokens, peak / row.tokens as f64))
        });
        let (shortest, longest) = (a_token.clone().next(), a_token.next_back());
        if let Some(((from, first), (to, last))) = shortest.zip(longest).filter(|(a, b)| a != b) {
            bars.push(Bar {
                claim: format!(
                    "attention, {}: bytes a token do not grow from {from} to {to} tokens",
                    dtype.name()
                ),
                found: format!("{} and {}", bytes(first), bytes(last)),
                met: last <= 1.05 * first,
            });
        }
        let at_4096 = fused.clone().find(|row| row.tokens == 4096);
        if let Some(ratio) = at_4096.and_then(|row| row.composed_ratio) {
            bars.push(Bar {
                claim: format!(
                    "attention, {}: the peak at 4096 tokens is at least 10x below composed",
                    dtype.name()
                ),
                found: format!("{ratio:.1}x"),
                met: ratio >= 10.0,
            });
        }
    }
    bars
}

/// The bars of `mrope bench speed` that the rows say something about.
pub fn speed(rows: &[SpeedRow]) -> Vec<Bar> {
    let kernels = |group: Group| {
        rows.iter()
            .filter(move |row| row.group == group && row.implementation == names::KERNELS)
    };
    let mut bars = Vec::new();
    for dtype in DTYPES {
        for in_place in [true, false] {
            let (how, baseline) = if in_place {
                ("in place", "a read-modify-write")
            } else {
                ("into other buffers", "a copy")
            };
            let rows = kernels(Group::Large).filter(|row| {
                row.dtype == dtype && row.in_place == in_place && row.direction != Way::Both
            });
            let claim = format!(
                "{} of 64 MiB and more, {how}: within 1.10x of {baseline}",
                dtype.name()
            );
            bars.extend(ratios(claim, rows, 1.10));
        }
    }
    let rare = "Quarter, InterleaveHalf, PerChannel: within 1.5x".to_owned();
    bars.extend(ratios(rare, kernels(Group::Rare), 1.5));
    let decode = "one token of 40 heads x 128: within 3x of a copy".to_owned();
    bars.extend(ratios(decode, kernels(Group::Decode), 3.0));
    for (way, claim, limit) in [
        (Way::Forward, "within 1.15x of the rotation alone", 1.15),
        (
            Way::Backward,
            "within 1.3x of a pass that reads two tensors and writes one",
            1.3,
        ),
    ] {
        let claim = format!("norm and rotation, {}: {claim}", way.name());
        let rows = kernels(Group::Norm).filter(|row| row.direction == way);
        bars.extend(ratios(claim, rows, limit));
    }
    bars.extend(flat(kernels(Group::Length)));
    bars.extend(on_gpus(rows));
    bars.extend(through_burn(rows));
    for (peer, pairing) in [
        (names::CANDLE_ROPE, "half"),
        (names::CANDLE_ROPE_I, "adjacent"),
    ] {
        for (dtype, factor) in [(DType::F32, 6.0), (DType::Bf16, 20.0)] {
            let of = |implementation| {
                find(rows, implementation, |row| {
                    row.group == Group::Peers
                        && (row.dtype, row.pairing.as_str(), row.in_place)
                            == (dtype, pairing, false)
                })
            };
            let claim = format!("at least {factor:.0}x faster than {peer}, {}", dtype.name());
            bars.extend(faster(&claim, of(names::KERNELS), of(peer), factor));
        }
    }
    bars
}

/// The fused operation on a GPU against a copy, and for a single token against a launch.
fn on_gpus(rows: &[SpeedRow]) -> Vec<Bar> {
    let fused = rows
        .iter()
        .filter(|row| row.group == Group::Gpu && row.implementation == names::FUSED);
    let large = fused.clone().filter(|row| {
        let tensor_bytes = row.bytes / (2 * row.direction.passes());
        tensor_bytes >= LARGE_BYTES
    });
    let claim = "on a GPU, 64 MiB and more: within 1.10x of a copy".to_owned();
    let copies = ratios(claim, large, 1.10);
    let token = fused.filter(|row| row.tokens == 1 && row.direction != Way::Both);
    let claim = "on a GPU, one token: within 1.5x of a launch".to_owned();
    copies
        .into_iter()
        .chain(ratios(claim, token, 1.5))
        .collect()
}

fn ratios<'a>(claim: String, rows: impl Iterator<Item = &'a SpeedRow>, limit: f64) -> Option<Bar> {
    let rows: Vec<&SpeedRow> = rows.collect();
    let worst = rows
        .iter()
        .max_by(|a, b| a.copy_ratio.total_cmp(&b.copy_ratio))?;
    let within = rows.iter().filter(|row| row.copy_ratio <= limit).count();
    Some(Bar {
        claim,
        found: format!(
            "{within} of {}; worst {:.2}, {}",
            rows.len(),
            worst.copy_ratio,
            worst.case
        ),
        met: within == rows.len(),
    })
}

/// Whether a token costs the same at every length, in each series of equal rows.
fn flat<'a>(rows: impl Iterator<Item = &'a SpeedRow>) -> Vec<Bar> {
    let rows: Vec<&SpeedRow> = rows.filter(|row| row.tokens >= LONG_SEQS[0]).collect();
    let series = |row: &SpeedRow| (row.dtype, row.layout.clone(), row.in_place);
    let mut seen = Vec::new();
    for row in &rows {
        if !seen.contains(&series(row)) {
            seen.push(series(row));
        }
    }
    let bar = |key| {
        let rows = rows.iter().filter(|row| series(row) == key);
        let cost = |row: &SpeedRow| row.median_ns / row.tokens as f64;
        let (mut least, mut most, mut lengths) = (f64::INFINITY, 0f64, 0);
        for row in rows {
            (least, most) = (least.min(cost(row)), most.max(cost(row)));
            lengths += 1;
        }
        let (dtype, layout, _) = key;
        (lengths > 1).then(|| Bar {
            claim: format!(
                "the cost of a token varies by at most 20 % from 4k to 131k tokens, {} {layout}",
                dtype.name()
            ),
            found: format!(
                "{:.1} % over {lengths} lengths, {least:.0} to {most:.0} ns",
                100.0 * (most / least - 1.0)
            ),
            met: most <= 1.2 * least,
        })
    };
    seen.into_iter().filter_map(bar).collect()
}

fn find<'a>(
    rows: &'a [SpeedRow],
    implementation: &str,
    wanted: impl Fn(&SpeedRow) -> bool,
) -> Option<&'a SpeedRow> {
    rows.iter()
        .find(|row| row.implementation == implementation && wanted(row))
}

/// Fused against burn's own, net of what the backward of nothing takes.
fn through_burn(rows: &[SpeedRow]) -> Option<Bar> {
    let time = |implementation| {
        let row = find(rows, implementation, |row| {
            row.group == Group::Burn && row.direction == Way::Both
        });
        row.map(|row| row.median_ns)
    };
    let (fused, theirs) = (time(names::FUSED)?, time(names::ROTARY_ENCODING)?);
    let none = time(names::NONE)?;
    let (theirs_net, fused_net) = (theirs - none, fused - none);
    // Fused may drown in the noise of the seed.
    let net = if fused_net > 0.0 {
        format!("{:.1}x", theirs_net / fused_net)
    } else {
        "no time of its own seen".to_owned()
    };
    Some(Bar {
        claim: "at least 30x faster than burn::nn::RotaryEncoding, forward + backward, f32".into(),
        found: format!(
            "{net}; {:.1}x with the seed of the backward, which no rotation pays too",
            theirs / fused
        ),
        met: theirs_net >= 30.0 * fused_net,
    })
}

fn faster(
    claim: &str,
    ours: Option<&SpeedRow>,
    theirs: Option<&SpeedRow>,
    factor: f64,
) -> Option<Bar> {
    let found = theirs?.median_ns / ours?.median_ns;
    Some(Bar {
        claim: claim.to_owned(),
        found: format!("{found:.1}x"),
        met: found >= factor,
    })
}

/// Bytes of bookkeeping for a layer's two nodes of the graph.
const BOOKKEEPING_BYTES: usize = 4 << 10;
/// Bytes that the kernels' tasks work in; the same for tensors of any size.
const WORKSPACE_BYTES: usize = 512 << 10;

/// The bars of `mrope bench memory`.
pub fn memory(rows: &[MemoryRow]) -> Vec<Bar> {
    let kept = worst(rows, |row| Some(row.retained_data_bytes? as f64)).map(|kept| Bar {
        claim: "the fused graph keeps no tensor data".into(),
        found: format!("{} at most, at any number of layers", bytes(kept)),
        met: kept <= 0.0,
    });
    kept.into_iter().chain(backward_memory(rows)).collect()
}

/// The bars of `mrope bench memory --norm`.
pub fn norm_memory(rows: &[MemoryRow]) -> Vec<Bar> {
    let kept = worst(rows, |row| {
        let inputs = row.layers * row.gradient_bytes;
        Some(row.retained_data_bytes? as f64 / inputs as f64)
    });
    // With a few tokens, the weights count as tensor data too.
    let within = counted(rows).all(|row| {
        let allowed = row.layers * (row.gradient_bytes + BOOKKEEPING_BYTES);
        row.retained_data_bytes
            .is_none_or(|kept| kept <= allowed.cast_signed())
    });
    let kept = kept.map(|kept| Bar {
        claim: "of tensor data, the graph of the fused norm keeps q and k alone".into(),
        found: format!("{kept:.2} of q and k at most, at any number of layers"),
        met: within,
    });
    kept.into_iter().chain(backward_memory(rows)).collect()
}

/// What was counted of the fused operation.
fn counted(rows: &[MemoryRow]) -> impl Iterator<Item = &MemoryRow> {
    rows.iter()
        .filter(|row| row.implementation == names::FUSED && row.source != Source::Calculated)
}

/// The most of the fused operation.
fn worst(rows: &[MemoryRow], value: impl Fn(&MemoryRow) -> Option<f64>) -> Option<f64> {
    counted(rows).filter_map(value).max_by(f64::total_cmp)
}

fn backward_memory(rows: &[MemoryRow]) -> Option<Bar> {
    let tensors = worst(rows, |row| {
        Some(row.backward_large_peak_bytes? as f64 / row.gradient_bytes as f64)
    });
    let within = counted(rows).all(|row| {
        let allowed = row.gradient_bytes + row.layers * BOOKKEEPING_BYTES + WORKSPACE_BYTES;
        row.backward_peak_bytes.is_none_or(|peak| peak <= allowed)
    });
    let all = worst(rows, |row| {
        Some(row.backward_peak_bytes? as f64 / row.gradient_bytes as f64)
    })?;
    Some(Bar {
        claim: "its backward peaks at the gradients alone".into(),
        found: format!(
            "at most {all:.2} of the gradients' bytes, with the graph's nodes and the kernels' \
             workspace{}",
            tensors.map_or_else(String::new, |tensors| format!("; {tensors:.2} in tensors"))
        ),
        met: within && tensors.is_none_or(|tensors| tensors <= 1.0),
    })
}

/// The bar of `mrope bench step`.
pub fn step(rows: &[StepRow]) -> Vec<Bar> {
    rows.iter()
        .filter(|row| row.implementation == names::FUSED && row.step == TRAIN_STEP)
        .map(|row| Bar {
            claim: "rotation takes under 3 % of a training step of mrope train".into(),
            found: format!("{:.2} %", 100.0 * row.share),
            met: row.share < 0.03,
        })
        .collect()
}

/// The name of `mrope train`'s step in [`StepRow`]s.
pub const TRAIN_STEP: &str = "mrope train";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cases::{Selection, cases};
    use crate::sample::Timing;

    fn timing(median_ns: f64) -> Timing {
        Timing {
            median_ns,
            lower_quartile_ns: median_ns,
            upper_quartile_ns: median_ns,
            samples: 3,
        }
    }

    /// Every case at `ratio` times its baseline, a token costing 10 ns.
    fn rows(ratio: f64) -> Vec<SpeedRow> {
        cases(Selection::Default)
            .iter()
            .map(|case| {
                let baseline = timing(10.0 * case.shape.seq as f64 / ratio);
                let found = timing(10.0 * case.shape.seq as f64);
                SpeedRow::new(case, names::KERNELS, ("copy", baseline), found)
            })
            .collect()
    }

    #[test]
    fn bars_are_met_up_to_their_limits_and_not_beyond() {
        assert!(speed(&rows(1.05)).iter().all(|bar| bar.met));
        let met = |ratio| speed(&rows(ratio)).iter().filter(|bar| bar.met).count();
        // 3 types x in place or into; rare; decode; norm forward and backward; flat in two types.
        assert_eq!((met(1.05), met(1.12), met(1.2)), (12, 6, 5));
        assert_eq!((met(1.4), met(2.0), met(4.0)), (4, 3, 2));
    }

    #[test]
    fn one_length_out_of_line_is_not_flat() {
        let mut rows = rows(1.0);
        let last = rows.iter_mut().rev().find(|row| row.tokens == 131_072);
        last.expect("a long case").median_ns *= 1.3;
        assert_eq!(speed(&rows).iter().filter(|bar| !bar.met).count(), 1);
    }
}
