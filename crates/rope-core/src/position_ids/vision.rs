//! Positions inside vision towers: height and width of every patch, and the order in which patches
//! attend.

use super::error::{Kind, PositionIdsError};
use crate::error::Result;
use crate::positions::Positions;

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

/// Row and column of every patch, two axes, in the order in which processors emit patches: block by
/// block of the `merge` x `merge` patches that become one token.
///
/// `merge` 1 gives reading order (PaddleOCR-VL's tower).
///
/// # Shapes
/// `[2, patches]` (height, width); patches run over all frames of all grids
/// # Errors
/// [`PositionIdsError::Grid`] if a grid is empty or does not divide into blocks.
///
/// # Examples
/// ```
/// use rope_core::position_ids::vision_positions;
///
/// let positions = vision_positions(&[[1, 2, 4]], 2)?;
/// assert_eq!(positions.axis(0), [0, 0, 1, 1, 0, 0, 1, 1]);
/// assert_eq!(positions.axis(1), [0, 1, 0, 1, 2, 3, 2, 3]);
/// # Ok::<(), rope_core::RopeError>(())
/// ```
pub fn vision_positions(grids: &[[usize; 3]], merge: usize) -> Result<Positions> {
    let (mut rows, mut columns) = (Vec::new(), Vec::new());
    for grid in grids {
        let [frames, height, width] = check(*grid, merge)?;
        let patches = height * width;
        for patch in (0..frames).flat_map(|_| 0..patches) {
            let (block, inside) = (patch / (merge * merge), patch % (merge * merge));
            let blocks_per_row = width / merge;
            rows.push((block / blocks_per_row * merge + inside / merge) as i64);
            columns.push((block % blocks_per_row * merge + inside % merge) as i64);
        }
    }
    rows.append(&mut columns);
    Positions::new(2, &rows)
}

/// Cumulative lengths of full attention in a tower: one sequence per frame, in patches.
///
/// # Errors
/// [`PositionIdsError::Grid`] if a grid is empty.
pub fn vision_cu_seqlens(grids: &[[usize; 3]]) -> Result<Vec<usize>> {
    let mut cu_seqlens = vec![0];
    for grid in grids {
        let [frames, height, width] = check(*grid, 1)?;
        for _ in 0..frames {
            cu_seqlens.push(cu_seqlens[cu_seqlens.len() - 1] + height * width);
        }
    }
    Ok(cu_seqlens)
}

/// The order of windowed attention.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VisionWindows {
    /// For each merged token in window order, its index in the tower's own order. A merged token is
    /// `merge * merge` consecutive patches.
    pub window_index: Vec<usize>,
    /// Cumulative lengths of the windows, in patches.
    pub cu_window_seqlens: Vec<usize>,
}

/// Windows of `window` x `window` merged tokens over each frame, row by row; those at the right and
/// lower edges are smaller.
///
/// Qwen2.5-VL: `window = window_size / spatial_merge_size / patch_size`, 4 as published.
///
/// # Errors
/// [`PositionIdsError::Grid`] if a grid is empty or does not divide into blocks;
/// [`PositionIdsError::Parameter`] if `window` is 0.
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
    let mut window_index = Vec::new();
    let mut cu_window_seqlens = vec![0];
    let mut frame_start = 0;
    for grid in grids {
        let [frames, height, width] = check(*grid, merge)?;
        let (height, width) = (height / merge, width / merge);
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
