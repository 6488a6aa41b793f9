//! Cuts pictures into patches.

use burn::tensor::Tensor;

use crate::config::VisionConfig;
use crate::error::{Result, VlmError};

impl VisionConfig {
    /// Cuts frames into patches, in the order in which the tower reads them, and returns their
    /// grid.
    ///
    /// Frames are normalised as the checkpoint's `preprocessor_config.json` states. If the frames
    /// do not fill the last temporal patch, as with a single image, the last frame is repeated.
    ///
    /// # Shapes
    /// `[frames, colours, height, width]` to `[patches, colours * frames * rows * columns]` and
    /// (T, H, W) in patches
    ///
    /// # Errors
    /// [`VlmError::Frames`] unless height and width divide into squares of merged patches.
    pub fn patches(&self, frames: Tensor<4>) -> Result<(Tensor<2>, [usize; 3])> {
        let [colours, depth, patch, _] = self.patch;
        let [count, found_colours, height, width] = frames.dims();
        let side = patch * self.spatial_merge;
        let fits = count > 0
            && found_colours == colours
            && height > 0
            && width > 0
            && height.is_multiple_of(side)
            && width.is_multiple_of(side);
        if !fits {
            return Err(VlmError::Frames {
                found: [count, found_colours, height, width],
                colours,
                side,
            });
        }
        let missing = count.next_multiple_of(depth) - count;
        let mut frames = frames;
        if missing > 0 {
            let last = frames.clone().narrow(0, count - 1, 1);
            frames = Tensor::cat(vec![frames, last.repeat_dim(0, missing)], 0);
        }
        let grid = [(count + missing) / depth, height / patch, width / patch];
        let merge = self.spatial_merge;
        let rows = [grid[1] / merge, merge, patch];
        let columns = [grid[2] / merge, merge, patch];
        let patches = frames
            .reshape([
                grid[0], depth, colours, rows[0], rows[1], rows[2], columns[0], columns[1],
                columns[2],
            ])
            // Time, then squares in reading order, then patches within a square; within a patch
            // colours, frames, pixels.
            .permute([0, 3, 6, 4, 7, 2, 1, 5, 8])
            .reshape([grid.iter().product(), self.patch_elems()]);
        Ok((patches, grid))
    }
}
