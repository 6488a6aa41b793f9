//! The plan of a rotation by a product with a matrix: the same tiles, for vector cores in pairs
//! that share a cube core.

use rope_core::MatrixForm;

use super::super::args::KernelType;
use super::super::coefficients::{Coefficients, Segments};
use super::{
    Fit, MAX_RUNS, Plan, Problem, SLACK_BYTES, UNITS_PER_CORE, set_routes, tile_row, tiling_of,
};
use crate::error::{AscendError, Result};
use crate::safe::{Architecture, Machine};

/// A launch with cube cores, ready except for the addresses.
#[derive(Clone, Debug, PartialEq)]
pub(in super::super) struct MatrixPlan {
    pub(in super::super) plan: Plan,
    /// The matrix, `[channels, products * channels]` of the element type, two in a word.
    pub(in super::super) matrix: Vec<u32>,
    /// The workspace in global memory, in words of two elements.
    pub(in super::super) workspace_words: usize,
}

/// Vector cores of a cube core.
const VECTORS: u32 = 2;
/// Products of a vector core that are in flight, in the workspace and in its unified buffer.
const IN_FLIGHT: u32 = 2;
/// Rows and columns of a fractal of 16-bit elements.
const FRACTAL: u32 = 16;
/// Elements of the matrix that fit L0B (64 KiB), and of a tile's product that fit half of L0C (128
/// KiB, in f32).
const MOST_OF_MATRIX: u32 = 64 * 1024 / 2;
const MOST_OF_PRODUCT: u32 = 64 * 1024 / 4;

/// 1 in bits of the type, and the sign bit.
fn one(element: KernelType) -> Option<u32> {
    match element {
        KernelType::F16 => Some(0x3c00),
        KernelType::Bf16 => Some(0x3f80),
        KernelType::F32 => None,
    }
}
const SIGN: u32 = 0x8000;

/// The matrix of a rotation as [`MatrixPlan::matrix`] has it, where `one` is 1.
fn matrix(form: &MatrixForm, products: u32, pitch: u32, one: u32) -> Vec<u32> {
    let width = (products * pitch) as usize;
    let mut matrix = vec![0; pitch as usize * width / 2];
    let permutations = match products {
        1 => vec![form.partner()],
        _ => vec![form.own(), form.partner()],
    };
    for (product, permutation) in permutations.into_iter().enumerate() {
        let moves = permutation.sources().iter().zip(permutation.signs());
        for (channel, (source, sign)) in moves.enumerate() {
            let at = *source as usize * width + product * pitch as usize + channel;
            let bits = if *sign < 0 { one | SIGN } else { one };
            matrix[at / 2] |= bits << (at % 2 * 16);
        }
    }
    matrix
}

/// Divides a rotation into tiles for pairs of vector cores that share a cube core.
///
/// # Errors
/// [`AscendError::CubeLimit`] for f32, for more channels than the cube core's buffers hold, and on
/// dav-3510, whose cube unit the kernel does not support; otherwise as
/// [`plan_rotation`](super::plan_rotation).
pub(in super::super) fn plan_matrix(problem: &Problem, machine: Machine) -> Result<MatrixPlan> {
    let refuse = |limit: String, found: String| AscendError::CubeLimit { limit, found };
    if machine.architecture != Architecture::Dav2201 {
        let found = machine.architecture.name();
        return Err(refuse("on dav-2201".to_owned(), found.to_owned()));
    }
    let one =
        one(problem.element).ok_or_else(|| refuse("f16 and bf16".to_owned(), "f32".to_owned()))?;
    let channels = problem.channels;
    let form = MatrixForm::new(channels.geometry, problem.direction);
    let products = if form.own().is_identity() { 1 } else { 2 };
    let pitch = channels.rotary_dim.next_multiple_of(FRACTAL);
    if products * pitch * pitch > MOST_OF_MATRIX {
        let most = (MOST_OF_MATRIX / products).isqrt() / FRACTAL * FRACTAL;
        let pairing = channels.pairing;
        let limit = format!("at most {most} channels with {pairing:?} pairs");
        return Err(refuse(limit, channels.rotary_dim.to_string()));
    }
    let segments = Segments {
        count: 1,
        length: channels.rotary_dim,
        pitch,
    };
    let coefficients = Coefficients::wide(channels, &form);
    let (grid, mut tiling) = tiling_of(problem, segments, segments, &coefficients)?;
    let map = coefficients
        .gather
        .as_ref()
        .map_or(Vec::new(), |gather| gather.offsets().to_vec());
    let heads = problem.heads[0] + problem.heads[1];
    tiling.expand = 1;
    tiling.map_words = map.len() as u32;
    tiling.products = products;
    tiling.head_major = u32::from(grid.head_major(problem.heads));

    let cores = u64::from(machine.vector_cores / VECTORS * VECTORS).max(u64::from(VECTORS));
    let wanted = (UNITS_PER_CORE * cores).div_ceil(tiling.tokens);
    tiling.head_groups = wanted.clamp(1, u64::from(heads)) as u32;
    let units = tiling.tokens * u64::from(tiling.head_groups);
    let blocks = units.min(cores).div_ceil(u64::from(VECTORS)) as u32;

    let element_bytes = problem.element.bytes() as u32;
    let slot_row = (0..3)
        .map(|span| tile_row(span, &tiling.load, pitch, element_bytes) * element_bytes)
        .max()
        .unwrap_or(0);
    let share = tiling.tokens.div_ceil(u64::from(blocks * VECTORS));
    let longest = share.min(tiling.seq).min(u64::from(MAX_RUNS)) as u32;
    let fit = Fit {
        ub: machine.ub_bytes,
        fixed: SLACK_BYTES + 4 * tiling.map_words.next_multiple_of(8),
        token_bytes: 4 * (2 * tiling.raw_pitch + tiling.coef_pitch),
        slot_row,
        work_row: pitch * 4 * 2 + IN_FLIGHT * products * slot_row,
        heads,
        longest: longest.min(MAX_RUNS / coefficients.pieces).max(1),
    };
    let mut fitted = if tiling.head_major == 0 {
        fit.token_major()
    } else {
        fit.head_major()
    }?;
    // A tile's product has to fit L0C as well.
    let most_rows = MOST_OF_PRODUCT / (products * pitch) / FRACTAL * FRACTAL;
    fitted.heads = fitted.heads.min(most_rows);
    fitted.tokens = fitted.tokens.min((most_rows / fitted.heads).max(1));
    tiling.tokens_per_tile = fitted.tokens;
    tiling.heads_per_tile = fitted.heads;
    set_routes(&mut tiling, element_bytes);

    let matrix = matrix(&form, products, pitch, one);
    let rows = (fitted.tokens * fitted.heads) as usize;
    let steps = (blocks * VECTORS * IN_FLIGHT) as usize;
    Ok(MatrixPlan {
        workspace_words: steps * rows * (products * pitch) as usize / 2,
        plan: Plan {
            kernel: format!("rope_matrix_{}", problem.element.name()),
            blocks,
            tiling,
            map,
            ub_bytes: fit.used(&fitted),
        },
        matrix,
    })
}
