//! The rotations that checks run over: small, deterministic, and every combination of what a
//! rotation can be.

use rope_core::reference::HeadMatrix;
use rope_core::{
    AxisLayout, Direction, Frequencies, Lane, Layout, Pairing, Positions, RopeError, RotarySpec,
};

use crate::engine::Case;
use crate::names::{axes_name, layout_name, pairing_name};

/// Pairs of the matrix's cases: a vector of eight and a rest, also in each half of Quarter.
const PAIRS: usize = 18;

/// A case and what it is called.
#[derive(Clone, Debug)]
pub struct NamedCase {
    /// Unique; the factors of the case, separated by slashes.
    pub name: String,
    /// The rotation.
    pub case: Case,
    /// The level of each factor; empty for a case outside the matrix.
    levels: Vec<usize>,
}

impl NamedCase {
    /// The pairing's and the axis layout's part of the name.
    pub fn group(&self) -> (&str, &str) {
        let mut parts = self.name.split('/');
        (
            parts.next().unwrap_or_default(),
            parts.next().unwrap_or_default(),
        )
    }
}

/// One factor: a name per level.
type Factor = &'static [&'static str];

/// In the order of the names. The first six are crossed in full, the others drawn so that all pairs
/// of levels occur.
const FACTORS: [Factor; 10] = [
    &["half", "adjacent", "quarter", "interleave_half"],
    &[
        "single",
        "contiguous[4,7,7]",
        "contiguous[3,5,5,5]",
        "striped[6,6,6]",
        "striped[8,5,5]",
        "ernie[7,7,4]",
        "per_axis[9,9]",
        "per_axis[2,8,8]",
        "per_channel[5,5,4,4]",
        "per_channel[9,9]",
        "lanes[18]",
        "lanes[36]",
    ],
    &["bsnd", "bnsd", "sbnd", "tnd"],
    &["whole", "partial", "partial+3"],
    &["dense", "strided"],
    &["out", "in_place"],
    &["mha", "gqa", "no_k"],
    &["per_sample", "shared"],
    &["x1", "x1.25"],
    &["ids", "real"],
];
const CROSSED: usize = 6;

fn axis_layout(level: usize) -> AxisLayout {
    match level {
        0 => AxisLayout::Single,
        1 => AxisLayout::Contiguous(vec![4, 7, 7]),
        2 => AxisLayout::Contiguous(vec![3, 5, 5, 5]),
        3 => AxisLayout::Striped(vec![6, 6, 6]),
        4 => AxisLayout::Striped(vec![8, 5, 5]),
        5 => AxisLayout::Ernie(vec![7, 7, 4]),
        6 => AxisLayout::PerAxis(vec![9, 9]),
        7 => AxisLayout::PerAxis(vec![2, 8, 8]),
        8 => AxisLayout::PerChannel(vec![5, 5, 4, 4]),
        9 => AxisLayout::PerChannel(vec![9, 9]),
        10 => lanes(PAIRS),
        _ => lanes(2 * PAIRS),
    }
}

/// Lanes in no order: axes and frequencies change from lane to lane, and lanes share both.
fn lanes(count: usize) -> AxisLayout {
    let lane = |lane: usize| Lane {
        axis: (lane * 5 % 7 % 3) as u8,
        frequency: (lane * 11 % LISTED.len()) as u32,
    };
    AxisLayout::Lanes((0..count).map(lane).collect())
}

/// The frequencies that lanes as data pick from: 0 for lanes that do not rotate, negative ones for
/// lanes that rotate the other way.
const LISTED: [f64; 10] = [1.0, -0.8, 0.0, 0.51, 0.37, -0.2, 0.11, 0.0, 0.03, 0.004];

fn case(levels: &[usize]) -> Result<Case, RopeError> {
    let (head_dim, offset) = [(2 * PAIRS, 0), (2 * PAIRS + 3, 0), (2 * PAIRS + 5, 3)][levels[3]];
    let axes = axis_layout(levels[1]);
    let is_data = matches!(axes, AxisLayout::Lanes(_));
    let mut spec = RotarySpec::builder(head_dim)
        .rotary_dim(2 * PAIRS)
        .rotary_offset(offset)
        .pairing(Pairing::ALL[levels[0]])
        .axis_layout(axes)
        .attention_scaling([1.0, 1.25][levels[8]]);
    if is_data {
        spec = spec.frequencies(Frequencies::listed(LISTED.to_vec())?);
    }
    let spec = spec.build()?;
    let layout = Layout::ALL[levels[2]];
    // Packed tokens are one sample.
    let (batch, seq) = if layout == Layout::Tnd {
        (1, 5)
    } else {
        (2, 3)
    };
    let tokens = if levels[7] == 0 { batch * seq } else { seq };
    let mut positions = scattered_positions(spec.axis_count(), tokens)?;
    if levels[9] == 1 {
        positions = centred(&positions)?;
    }
    let (heads, kv_heads) = [(2, 2), (3, 1), (2, 0)][levels[6]];
    Ok(Case {
        heads,
        kv_heads,
        strided: levels[4] == 1,
        in_place: levels[5] == 1,
        ..Case::new(spec, positions, layout, batch, seq)
    })
}

/// Ids below 100 that differ between axes and jump between tokens.
///
/// # Errors
/// Those of [`Positions::new`].
pub fn scattered_positions(axes: usize, tokens: usize) -> Result<Positions, RopeError> {
    let id = |axis: usize, token: usize| ((37 * token + 11 * axis * (token + 1) + 5) % 97) as i64;
    let ids: Vec<i64> = (0..axes)
        .flat_map(|axis| (0..tokens).map(move |token| id(axis, token)))
        .collect();
    Positions::new(axes, &ids)
}

/// Negative and fractional positions in the place of ids below 100.
fn centred(ids: &Positions) -> Result<Positions, RopeError> {
    let axes = 0..ids.axis_count();
    let tokens = axes.flat_map(|axis| (0..ids.tokens()).map(move |token| (axis, token)));
    let values = tokens.map(|(axis, token)| (ids.value(axis, token) - 48.0) * 0.625);
    Positions::real(ids.axis_count(), &values.collect::<Vec<f64>>())
}

/// Every pairing x axis layout x layout x partial x strided x in place; head counts, shared
/// positions, attention scaling and real positions vary along with them.
///
/// # Errors
/// Those of the specifications; none are expected.
pub fn matrix() -> Result<Vec<NamedCase>, RopeError> {
    let count: usize = FACTORS[..CROSSED].iter().map(|f| f.len()).product();
    (0..count)
        .map(|index| {
            let mut rest = index;
            let mut drawn = mix(index as u64) as usize;
            let levels: Vec<usize> = FACTORS
                .iter()
                .enumerate()
                .map(|(factor, names)| {
                    let from = if factor < CROSSED {
                        &mut rest
                    } else {
                        &mut drawn
                    };
                    let level = *from % names.len();
                    *from /= names.len();
                    level
                })
                .collect();
            let names: Vec<&str> = FACTORS.iter().zip(&levels).map(|(f, l)| f[*l]).collect();
            Ok(NamedCase {
                name: names.join("/"),
                case: case(&levels)?,
                levels,
            })
        })
        .collect()
}

/// The part of [`matrix`] in which every two levels of different factors still occur together.
///
/// # Errors
/// As [`matrix`].
pub fn pairwise() -> Result<Vec<NamedCase>, RopeError> {
    let all = matrix()?;
    let mut covered = vec![false; MOST_LEVELS.pow(2) * FACTORS.len().pow(2)];
    let mut chosen = Vec::new();
    let most = FACTORS.len() * (FACTORS.len() - 1) / 2;
    // The pairs that a case would add, when they were last counted: they only become fewer.
    let mut counts = vec![most; all.len()];
    // The richest first: a greedy cover.
    for wanted in (1..=most).rev() {
        for (case, count) in all.iter().zip(&mut counts) {
            if *count < wanted {
                continue;
            }
            let pairs = level_pairs(&case.levels);
            *count = pairs.filter(|pair| !covered[*pair]).count();
            if *count >= wanted {
                level_pairs(&case.levels).for_each(|pair| covered[pair] = true);
                chosen.push(case.clone());
            }
        }
    }
    Ok(chosen)
}

/// A bound of the levels of a factor.
const MOST_LEVELS: usize = 16;

/// A number for each pair of a case's levels.
fn level_pairs(levels: &[usize]) -> impl Iterator<Item = usize> {
    let pairs = (0..levels.len()).flat_map(|i| (i + 1..levels.len()).map(move |j| [i, j]));
    pairs.map(|[i, j]| {
        let factors = i * FACTORS.len() + j;
        (factors * MOST_LEVELS + levels[i]) * MOST_LEVELS + levels[j]
    })
}

/// The rotations of published models, at their size.
///
/// # Errors
/// As [`matrix`].
pub fn models() -> Result<Vec<NamedCase>, RopeError> {
    use AxisLayout::{
        Balanced, Contiguous, Ernie, PerAxis, PerAxisStriped, PerChannel, Single, Striped,
    };
    use Pairing::{Adjacent, Half};
    let lane = |axis: usize, frequency: usize| Lane {
        axis: axis as u8,
        frequency: frequency as u32,
    };
    // Height takes every other frequency from the first on, width those between.
    let pixtral = (0..32).map(|j| lane(j / 16, 2 * (j % 16) + j / 16));
    // Time, height and width take 20 channels each, in which channel c turns at frequency c mod 10:
    // the members of an adjacent pair turn by different angles.
    let vjepa2 = (0..60).map(|c| {
        let (pair, member) = (c % 30, c / 30);
        lane(pair / 10, (2 * (pair % 10) + member) % 10)
    });
    let (pixtral, vjepa2) = (pixtral.collect(), vjepa2.collect());
    let families = [
        ("llama", Half, Single, 128, 128),
        ("glm4", Adjacent, Single, 128, 64),
        ("qwen2_vl", Half, Contiguous(vec![16, 24, 24]), 128, 128),
        ("qwen3_vl", Half, Striped(vec![24, 20, 20]), 128, 128),
        ("qwen3_5", Half, Striped(vec![11, 11, 10]), 256, 64),
        ("glm4v", Adjacent, Contiguous(vec![8, 12, 12]), 128, 64),
        ("ernie4_5_vl", Adjacent, Ernie(vec![22, 22, 20]), 128, 128),
        ("vision", Half, PerAxis(vec![20, 20]), 80, 80),
        ("flux", Adjacent, PerAxis(vec![8, 28, 28]), 128, 128),
        ("kimi_vl", Adjacent, PerAxisStriped(vec![18, 18]), 72, 72),
        ("openpangu_vl", Half, Balanced(vec![24, 20, 20]), 128, 128),
        (
            "hunyuan_vl",
            Half,
            PerChannel(vec![16, 16, 16, 16]),
            128,
            128,
        ),
        ("pixtral", Half, AxisLayout::Lanes(pixtral), 64, 64),
        ("vjepa2", Adjacent, AxisLayout::Lanes(vjepa2), 64, 60),
    ];
    families
        .into_iter()
        .map(|(model, pairing, axes, head_dim, rotary_dim)| {
            let name = format!(
                "{}/{}{}/{model}",
                pairing_name(pairing),
                axes_name(&axes),
                sections_name(&axes),
            );
            let spec = RotarySpec::builder(head_dim)
                .rotary_dim(rotary_dim)
                .pairing(pairing)
                .axis_layout(axes)
                .build()?;
            let positions = scattered_positions(spec.axis_count(), 3)?;
            Ok(NamedCase {
                name,
                case: Case::new(spec, positions, Layout::Bsnd, 1, 3),
                levels: Vec::new(),
            })
        })
        .collect()
}

/// Angles per head, mixed from two axes: every pairing in every layout, the other factors varying
/// along with them. Positions and frequencies are below 1, for differences with respect to them.
///
/// # Errors
/// As [`matrix`].
pub fn per_head() -> Result<Vec<NamedCase>, RopeError> {
    let pairings = Pairing::ALL.into_iter().enumerate();
    let both = pairings.flat_map(|(i, pairing)| {
        let layouts = Layout::ALL.into_iter().enumerate();
        layouts.map(move |(j, layout)| ((i + j) % 4, j, pairing, layout))
    });
    both.map(|(varying, layout_index, pairing, layout)| {
        let pairs = 6;
        let per_channel = varying == 3;
        let axes = if per_channel {
            AxisLayout::PerChannel(vec![2, 4])
        } else {
            AxisLayout::Single
        };
        let spec = RotarySpec::builder(2 * pairs + 3 * (varying % 2))
            .rotary_dim(2 * pairs)
            .rotary_offset(varying % 2)
            .pairing(pairing)
            .axis_layout(axes)
            .build()?;
        let (batch, seq) = if layout == Layout::Tnd {
            (1, 4)
        } else {
            (2, 3)
        };
        let (strided, in_place) = (varying / 2 == 1, (varying + layout_index) % 2 == 1);
        let (shared, no_k) = (layout_index % 2 == 1, varying == 1);
        let (axes, heads) = (2, 3);
        let tokens = if shared { seq } else { batch * seq };
        let lanes = spec.geometry().lane_count();
        let or = |is: bool, name: &'static str, other| if is { name } else { other };
        let name = format!(
            "{}/per_head[{heads}]/{}/{}/{}/{}/{}",
            pairing_name(pairing),
            layout_name(layout),
            or(strided, "strided", "dense"),
            or(in_place, "in_place", "out"),
            or(no_k, "no_k", "mha"),
            or(shared, "shared", "per_sample"),
        );
        let positions = Positions::real(axes, &values(7, axes * tokens))?;
        let case = Case {
            head_frequencies: Some(values(8, axes * heads * lanes).into()),
            heads,
            kv_heads: if no_k { 0 } else { heads },
            strided,
            in_place,
            ..Case::new(spec, positions, layout, batch, seq)
        };
        let levels = Vec::new();
        Ok(NamedCase { name, case, levels })
    })
    .collect()
}

/// The sections, or the number of lanes where they are data.
fn sections_name(axes: &AxisLayout) -> String {
    if let AxisLayout::Lanes(lanes) = axes {
        return format!("[{}]", lanes.len());
    }
    let sections: Vec<String> = axes.sections().iter().map(usize::to_string).collect();
    if sections.is_empty() {
        String::new()
    } else {
        format!("[{}]", sections.join(","))
    }
}

/// `count` values in [-1, 1), the same for the same seed.
pub fn values(seed: u64, count: usize) -> Vec<f64> {
    (0..count as u64)
        .map(|i| {
            let bits = mix(mix(seed).wrapping_add(i)) >> 11;
            bits as f64 / (1u64 << 52) as f64 - 1.0
        })
        .collect()
}

/// SplitMix64's finaliser (Steele, Lea and Flood, 2014).
fn mix(seed: u64) -> u64 {
    let mut z = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// The exact result for a contiguous x with `heads` heads, in f64, by the matrix of each token, or
/// of each head of it.
///
/// # Errors
/// Those of [`HeadMatrix::new`].
pub fn exact(
    case: &Case,
    direction: Direction,
    heads: usize,
    x: &[f64],
) -> Result<Vec<f64>, RopeError> {
    let (spec, positions) = (&case.spec, &case.positions);
    let matrices = (0..case.angle_rows())
        .map(|row| match &case.head_frequencies {
            None => HeadMatrix::new(spec, positions, row, case.seq_len),
            Some(frequencies) => {
                let (token, head) = (row / case.heads, row % case.heads);
                HeadMatrix::per_head(spec, positions, token, (frequencies, case.heads, head))
            }
        })
        .collect::<Result<Vec<_>, _>>()?;
    let mut y = vec![0.0; x.len()];
    for (angles, start) in case.rows(heads) {
        let row = start..start + case.spec.head_dim();
        let rotated = match direction {
            Direction::Forward => matrices[angles].apply(&x[row.clone()]),
            Direction::Adjoint => matrices[angles].apply_adjoint(&x[row.clone()]),
        };
        y[row].copy_from_slice(&rotated);
    }
    Ok(y)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn all_pairs_of_levels_meet_and_names_are_unique() {
        let expected: usize = (0..FACTORS.len())
            .flat_map(|i| (i + 1..FACTORS.len()).map(move |j| FACTORS[i].len() * FACTORS[j].len()))
            .sum();
        let (all, few) = (matrix().expect("valid"), pairwise().expect("valid"));
        assert_eq!(all.len(), 4 * 12 * 4 * 3 * 2 * 2);
        assert!(FACTORS.iter().all(|factor| factor.len() <= MOST_LEVELS));
        for cases in [&all, &few] {
            let pairs = cases.iter().flat_map(|case| level_pairs(&case.levels));
            assert_eq!(pairs.collect::<HashSet<_>>().len(), expected);
        }
        assert!(few.len() <= 60, "{} cases cover all pairs", few.len());
        let (models, heads) = (models().expect("valid"), per_head().expect("valid"));
        let others = models.iter().chain(&heads);
        let names: HashSet<_> = all.iter().chain(others).map(|c| &c.name).collect();
        assert_eq!(names.len(), all.len() + models.len() + heads.len());
    }

    #[test]
    fn names_say_what_the_cases_are() {
        assert_eq!(FACTORS[0], Pairing::ALL.map(pairing_name));
        assert_eq!(FACTORS[2], Layout::ALL.map(layout_name));
        for named in matrix().expect("valid") {
            let axes = named.case.spec.axis_layout();
            let found = format!("{}{}", axes_name(axes), sections_name(axes));
            assert_eq!(named.group().1, found);
        }
    }
}
