//! RopeWithSinCosCache and its second version: rotation of flat rows by positions into a table.

use super::dtype::FLT;
use super::rotary::Mode;
use super::{DataType, Kernel, Operand, kernel, refuse};
use crate::codes::{Failure, Outcome, RT_VECTOR_CORE_EXCEPTION};
use crate::state::sim;
use crate::trace::Violation;

const SECTIONS_V1: &[&[i64]] = &[&[16, 24, 24]];
const SECTIONS_V2: &[&[i64]] = &[
    &[16, 24, 24],
    &[24, 20, 20],
    &[8, 12, 12],
    &[16, 16, 16, 16],
];

/// How sections are assigned to the lanes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CacheMode {
    Contiguous,
    Striped,
}

/// Parameters of both versions.
struct Parameters {
    positions: Operand,
    query: Operand,
    key: Operand,
    cos_sin: Operand,
    query_out: Operand,
    key_out: Operand,
    sections: Vec<i64>,
    head_size: i64,
    neox: bool,
    /// `None` in the first version.
    cache_mode: Option<i64>,
}

/// The axis of each lane.
fn lane_axes(sections: &[i64], mode: CacheMode, lanes: usize) -> Vec<usize> {
    if sections.is_empty() {
        return vec![0; lanes];
    }
    match mode {
        CacheMode::Contiguous => sections
            .iter()
            .enumerate()
            .flat_map(|(axis, width)| std::iter::repeat_n(axis, *width as usize))
            .collect(),
        // The axes alternate until a section is used up; the remaining lanes belong to the first.
        CacheMode::Striped => (0..lanes)
            .map(|lane| {
                let axis = lane % sections.len();
                let inside = (lane as i64) < sections[axis] * sections.len() as i64;
                if inside { axis } else { 0 }
            })
            .collect(),
    }
}

fn check(p: &Parameters) -> Outcome<CacheMode> {
    let dtype = p.query.dtype;
    let others = [&p.key, &p.cos_sin, &p.query_out, &p.key_out];
    if !FLT.has(dtype) || others.iter().any(|t| t.dtype != dtype) {
        return refuse(
            "query, key, cosSinCache and the outputs must share one of FLOAT, FLOAT16, BF16",
        );
    }
    p.positions.expect_dtype(DataType::Int64)?;
    for tensor in [&p.query, &p.key, &p.cos_sin] {
        tensor.expect_rank(2..=2)?;
    }
    p.query_out.expect_dims(&p.query.dims)?;
    p.key_out.expect_dims(&p.key.dims)?;
    let tokens = p.query.dims[0];
    let expected: &[&[usize]] = if p.sections.is_empty() {
        &[&[tokens]]
    } else {
        &[&[3, tokens], &[4, tokens]]
    };
    if p.key.dims[0] != tokens || !expected.contains(&p.positions.dims.as_slice()) {
        return refuse(format!(
            "positions {:?} and key {:?} do not fit query {:?}",
            p.positions.dims, p.key.dims, p.query.dims
        ));
    }
    let step = if dtype == DataType::Float { 16 } else { 32 };
    let (head_size, rotary_dim) = (p.head_size, p.cos_sin.dims[1] as i64);
    if head_size <= 0 || head_size % step != 0 || rotary_dim % step != 0 || rotary_dim > head_size {
        return refuse(format!(
            "headSize {head_size} and rotaryDim {rotary_dim} must be multiples of {step}, \
             the second at most the first"
        ));
    }
    if [&p.query, &p.key]
        .iter()
        .any(|t| t.dims[1] as i64 % head_size != 0)
    {
        return refuse(format!(
            "the widths {} and {} are not multiples of headSize {head_size}",
            p.query.dims[1], p.key.dims[1]
        ));
    }
    let mode = match p.cache_mode {
        None | Some(0) => CacheMode::Contiguous,
        Some(1) => CacheMode::Striped,
        Some(other) => {
            return refuse(format!(
                "cacheMode {other} does not exist: 0 contiguous, 1 striped"
            ));
        }
    };
    if !p.sections.is_empty() {
        let known = if p.cache_mode.is_some() {
            SECTIONS_V2
        } else {
            SECTIONS_V1
        };
        if !known.contains(&p.sections.as_slice()) {
            return refuse(format!(
                "mropeSection {:?} is not supported, only {known:?}",
                p.sections
            ));
        }
        if p.sections.len() == 4 && mode == CacheMode::Striped {
            return refuse("four sections need cacheMode 0");
        }
        if p.sections.len() != p.positions.dims[0]
            || p.sections.iter().sum::<i64>() != rotary_dim / 2
        {
            return refuse(format!(
                "mropeSection {:?} must have one entry per row of positions \
                 and sum to rotaryDim/2 = {}",
                p.sections,
                rotary_dim / 2
            ));
        }
    }
    Ok(mode)
}

/// Both versions of the operator; the first has no cache mode. The tensors are positions, query,
/// key, table, and the outputs for query and key.
pub(crate) fn cached(
    operator: &'static str,
    [positions, query, key, cos_sin, query_out, key_out]: [Operand; 6],
    mut sections: Vec<i64>,
    head_size: i64,
    neox: bool,
    cache_mode: Option<i64>,
) -> Outcome<Kernel> {
    // Zeros stand for no sections.
    if sections.iter().all(|width| *width == 0) {
        sections.clear();
    }
    let p = Parameters {
        positions,
        query,
        key,
        cos_sin,
        query_out,
        key_out,
        sections,
        head_size,
        neox,
        cache_mode,
    };
    let mode = check(&p)?;
    if !p.positions.is_contiguous() {
        let message = format!(
            "{operator}: positions are not contiguous; the operator ignores their strides and \
             rotates by wrong positions"
        );
        sim().violate(Violation::host("operator", message));
    }
    kernel(move |data| {
        let rotary_dim = p.cos_sin.dims[1];
        let (lanes, max_positions) = (rotary_dim / 2, p.cos_sin.dims[0] as i64);
        let axes = lane_axes(&p.sections, mode, lanes);
        let tokens = p.query.dims[0];
        let positions = data.read_ignoring_strides::<i64>(&p.positions)?;
        let table: Vec<f32> = data.read(&p.cos_sin)?;
        let mut outside = positions
            .iter()
            .filter(|p| !(0..max_positions).contains(*p));
        if let Some(outside) = outside.next() {
            let message = format!(
                "{operator}: position {outside} is outside the cosSinCache of {max_positions} \
                 rows; the operator does not check and reads other memory"
            );
            sim().violate(Violation::host("operator", &message));
            return Err(Failure::new(RT_VECTOR_CORE_EXCEPTION, message));
        }
        let terms = if p.neox { Mode::Half } else { Mode::Interleave }.terms(rotary_dim);
        let head_size = p.head_size as usize;
        for (input, output) in [(&p.query, &p.query_out), (&p.key, &p.key_out)] {
            let x: Vec<f32> = data.read(input)?;
            let mut y = x.clone();
            let width = input.dims[1];
            for token in 0..tokens {
                for head in 0..width / head_size {
                    let start = token * width + head * head_size;
                    for (i, (by_cos, by_sin, sign)) in terms.iter().enumerate() {
                        let lane = if p.neox { i % lanes } else { i / 2 };
                        let row = positions[axes[lane] * tokens + token] as usize * rotary_dim;
                        let (c, s) = (table[row + lane], table[row + lanes + lane]);
                        y[start + i] = x[start + by_cos] * c + sign * x[start + by_sin] * s;
                    }
                }
            }
            data.write(output, &y)?;
        }
        Ok(())
    })
}
