//! Positions in vision towers: row and column of every patch, and the order of patches in
//! attention.

use super::error::{Kind, PositionIdsError};
use super::split::reserved;
use crate::error::Result;
use crate::positions::Positions;

/// Checks every grid and sums `count` over the grids, saturating at the largest `usize`.
fn total(
    grids: &[[usize; 3]],
    merge: usize,
    count: impl Fn([usize; 3]) -> usize,
) -> Result<usize, PositionIdsError> {
    let add = |sum: usize, grid: &[usize; 3]| Ok(sum.saturating_add(count(check(*grid, merge)?)));
    grids.iter().try_fold(0, add)
}

/// Patches of a grid, saturating at the largest `usize`.
fn patches([frames, height, width]: [usize; 3]) -> usize {
    frames.saturating_mul(height).saturating_mul(width)
}

/// Checks that a sum of [`total`] did not saturate.
fn countable(patches: usize) -> Result<usize, PositionIdsError> {
    let (what, found) = ("patches", patches);
    let fits = patches < usize::MAX;
    fits.then_some(patches)
        .ok_or(PositionIdsError::TooMany { what, found })
}

fn check(grid: [usize; 3], merge: usize) -> Result<[usize; 3], PositionIdsError> {
    let [_, height, width] = grid;
    let fits = merge > 0
        && !grid.contains(&0)
        && height.is_multiple_of(merge)
        && width.is_multiple_of(merge);
    if fits {
        Ok(grid)
    } else {
        let merge = [1, merge, merge];
        Err(PositionIdsError::Grid {
            kind: Kind::Image.name(),
            grid,
            merge,
        })
    }
}

/// Computes row and column of every patch, in the order in which image processors emit patches: by
/// blocks of `merge` x `merge` patches, which become one token each.
///
/// With `merge` 1, patches are in reading order (PaddleOCR-VL's tower).
///
/// # Shapes
/// `[2, patches]` (height, width); patches run over all frames of all grids
/// # Errors
/// [`PositionIdsError::Grid`] if a grid is empty or does not divide into blocks;
/// [`PositionIdsError::TooMany`] if the result does not fit into memory.
///
/// # Examples
/// ```
/// use rope_core::position_ids::vision_positions;
///
/// let positions = vision_positions(&[[1, 2, 4]], 2)?;
/// assert_eq!(positions.axis(0)?, [0, 0, 1, 1, 0, 0, 1, 1]);
/// assert_eq!(positions.axis(1)?, [0, 1, 0, 1, 2, 3, 2, 3]);
/// # Ok::<(), rope_core::RopeError>(())
/// ```
pub fn vision_positions(grids: &[[usize; 3]], merge: usize) -> Result<Positions> {
    let count = total(grids, merge, patches)?;
    let mut ids = reserved("ids", count.saturating_mul(2))?;
    for column in [false, true] {
        for &[frames, height, width] in grids {
            let blocks_per_row = width / merge;
            for patch in (0..frames).flat_map(|_| 0..height * width) {
                let (block, inside) = (patch / (merge * merge), patch % (merge * merge));
                let (outer, inner) = if column {
                    (block % blocks_per_row, inside % merge)
                } else {
                    (block / blocks_per_row, inside / merge)
                };
                ids.push((outer * merge + inner) as i64);
            }
        }
    }
    Positions::new(2, &ids)
}

/// Computes the cumulative lengths of full attention in a tower, in patches: one sequence per
/// frame.
///
/// # Errors
/// [`PositionIdsError::Grid`] if a grid is empty; [`PositionIdsError::TooMany`] if the result does
/// not fit into memory, or the number of patches overflows a `usize`.
pub fn vision_cu_seqlens(grids: &[[usize; 3]]) -> Result<Vec<usize>> {
    countable(total(grids, 1, patches)?)?;
    let frames = total(grids, 1, |[frames, ..]| frames)?;
    let mut cu_seqlens = reserved("frames", frames.saturating_add(1))?;
    cu_seqlens.push(0);
    for &[frames, height, width] in grids {
        for _ in 0..frames {
            cu_seqlens.push(cu_seqlens[cu_seqlens.len() - 1] + height * width);
        }
    }
    Ok(cu_seqlens)
}

/// The order of windowed attention.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VisionWindows {
    /// For each merged token in window order, its index in the tower's order. A merged token is
    /// `merge * merge` consecutive patches.
    pub window_index: Vec<usize>,
    /// Cumulative lengths of the windows, in patches.
    pub cu_window_seqlens: Vec<usize>,
}

/// Divides each frame into windows of `window` x `window` merged tokens, row by row. Windows at the
/// right and lower edges may be smaller.
///
/// Qwen2.5-VL: `window = window_size / spatial_merge_size / patch_size`, 4 as published.
///
/// # Errors
/// [`PositionIdsError::Grid`] if a grid is empty or does not divide into blocks;
/// [`PositionIdsError::Parameter`] if `window` is 0; [`PositionIdsError::TooMany`] if the result
/// does not fit into memory.
///
/// # Source
/// Bai et al. 2025 (Qwen2.5-VL), section 2.1.1, <https://arxiv.org/abs/2502.13923>
pub fn vision_windows(grids: &[[usize; 3]], merge: usize, window: usize) -> Result<VisionWindows> {
    if window == 0 {
        let (parameter, expected) = ("window", "at least 1 merged token");
        return Err(PositionIdsError::Parameter {
            parameter,
            expected,
            found: 0.0,
        }
        .into());
    }
    let count = countable(total(grids, merge, patches)?)?;
    let mut window_index = reserved("merged tokens", count / merge.saturating_mul(merge).max(1))?;
    let mut cu_window_seqlens = vec![0];
    let mut frame_start = 0;
    for &[frames, height, width] in grids {
        let (height, width) = (height / merge, width / merge);
        // A larger window has the same effect, and its end could overflow a `usize`.
        let window = window.min(height.max(width));
        for _ in 0..frames {
            for top in (0..height).step_by(window) {
                for left in (0..width).step_by(window) {
                    for row in top..(top + window).min(height) {
                        let row_start = frame_start + row * width;
                        window_index
                            .extend(row_start + left..row_start + (left + window).min(width));
                    }
                    cu_window_seqlens.push(window_index.len() * merge * merge);
                }
            }
            frame_start += height * width;
        }
    }
    Ok(VisionWindows {
        window_index,
        cu_window_seqlens,
    })
}
