//! Converts a picture to patches.

use std::borrow::Cow;
use std::ops::Range;

use crate::memory::zeros;
use crate::{Result, VlmDataError};

use super::config::{Backend, PictureConfig};
use super::read::Picture;
use super::resample::{Axis, COLOURS, columns_first, resize_in_floats};
use super::smart_resize::smart_resize;

/// The limit on the pixels of a patch times its frames; larger sizes are mistakes.
const MAX_PATCH: usize = 1 << 24;
/// Rows that one task resizes.
const TASK_ROWS: usize = 16;

/// Converts pictures and video frames to patches, as a [`PictureConfig`] specifies.
#[derive(Debug, Clone)]
pub struct PictureProcessor {
    config: PictureConfig,
    /// The value of each level of each colour.
    values: Box<[[f32; 256]; COLOURS]>,
}

/// The patches of a picture.
#[derive(Debug, Clone, PartialEq)]
pub struct Patches {
    /// `pixel_values`: `[patches, channels]`. Patches are ordered by squares of merged patches, row
    /// by row; channels by colour, frame, row and column of a pixel.
    pub values: Vec<f32>,
    /// Channels of a patch.
    pub channels: usize,
    /// The row of `image_grid_thw`: patches in time, height and width.
    pub grid: [usize; 3],
}

impl Picture {
    /// The picture with other sides, by bicubic interpolation in the arithmetic of a backend.
    ///
    /// # Errors
    /// [`VlmDataError::Memory`] if an allocation fails
    pub(crate) fn resized(self, [height, width]: [usize; 2], backend: Backend) -> Result<Self> {
        let stride = self.width() * COLOURS;
        let rows = Axis::new(self.width(), width, backend)?;
        let columns = Axis::new(self.height(), height, backend)?;
        let rgb = Self::into_levels(Cow::Owned(self));
        let rgb = match (rows.as_ref(), columns.as_ref()) {
            (Some(axis), Some(columns)) if columns_first(axis, columns, backend) => {
                let low = all_columns(columns, rgb, stride)?;
                all_rows(Some(axis), Cow::Owned(low))?
            }
            (rows, Some(columns)) => {
                let narrow = all_rows(rows, rgb)?;
                Cow::Owned(all_columns(columns, narrow, width * COLOURS)?)
            }
            (rows, None) => all_rows(rows, rgb)?,
        };
        Self::from_rgb(width, height, rgb.into_owned())
    }

    /// As [`Picture::resized`], in the arithmetic of torchvision's older functions.
    ///
    /// # Errors
    /// [`VlmDataError::Memory`] if an allocation fails
    pub(crate) fn resized_in_floats(self, [height, width]: [usize; 2]) -> Result<Self> {
        let sides = [self.width(), self.height()];
        if sides == [width, height] {
            return Ok(self);
        }
        let rgb = resize_in_floats(self.rgb(), sides, [width, height])?;
        Self::from_rgb(width, height, rgb)
    }
}

impl PictureProcessor {
    /// Validates a configuration and creates its processor.
    ///
    /// # Errors
    /// [`VlmDataError::Config`] if a size is 0 or too large, the smallest area exceeds the largest,
    /// or a number of the normalisation is not finite
    pub fn new(config: PictureConfig) -> Result<Self> {
        let wrong = |key, expected, found: String| {
            Err(VlmDataError::Config {
                key,
                expected,
                found,
            })
        };
        let sizes = [
            ("patch_size", config.patch_size),
            ("temporal_patch_size", config.temporal_patch_size),
            ("merge_size", config.merge_size),
        ];
        for (key, size) in sizes {
            if size == 0 || size > 4096 {
                return wrong(key, "a whole number from 1 to 4096", size.to_string());
            }
        }
        let side = config.patch_size * config.merge_size;
        if side * side > MAX_PATCH / config.temporal_patch_size {
            let product = format!("{side} x {side} x {}", config.temporal_patch_size);
            let expected = "a product of at most 2^24 with itself and temporal_patch_size";
            return wrong("patch_size x merge_size", expected, product);
        }
        for (key, area) in [
            ("min_pixels", config.min_pixels),
            ("max_pixels", config.max_pixels),
        ] {
            if area == 0 || area > 1 << 53 {
                return wrong(key, "an area from 1 to 2^53 pixels", area.to_string());
            }
        }
        if config.min_pixels > config.max_pixels {
            let found = format!("{} and max_pixels {}", config.min_pixels, config.max_pixels);
            return wrong("min_pixels", "at most max_pixels", found);
        }
        if let Some(scale) = config
            .rescale
            .filter(|scale| !(scale.is_finite() && *scale > 0.0))
        {
            return wrong(
                "rescale_factor",
                "a finite number above 0",
                scale.to_string(),
            );
        }
        if let Some([mean, std]) = config.normalize {
            if !mean.iter().all(|mean| mean.is_finite()) {
                return wrong("image_mean", "finite numbers", format!("{mean:?}"));
            }
            if !std.iter().all(|std| std.is_finite() && *std > 0.0) {
                return wrong("image_std", "finite numbers above 0", format!("{std:?}"));
            }
        }
        let values = Box::new(std::array::from_fn(|colour| {
            std::array::from_fn(|level| value(&config, colour, level as u8))
        }));
        Ok(Self { config, values })
    }

    /// The configuration.
    pub fn config(&self) -> &PictureConfig {
        &self.config
    }

    /// Computes the grid of a picture's patches in time, height and width from its sides in pixels.
    ///
    /// # Errors
    /// as [`smart_resize`], or [`VlmDataError::NotDivisible`] if pictures are not resized
    pub fn grid(&self, height: usize, width: usize) -> Result<[usize; 3]> {
        self.video_grid(self.config.temporal_patch_size, height, width)
    }

    /// Computes the grid of a video's patches in time, height and width from the number of frames
    /// and their sides in pixels. The last temporal patch is completed by repeating the last frame.
    ///
    /// # Errors
    /// those of [`PictureProcessor::grid`]
    pub fn video_grid(&self, frames: usize, height: usize, width: usize) -> Result<[usize; 3]> {
        let [height, width] = self.size(frames, height, width)?;
        Ok([
            frames.div_ceil(self.config.temporal_patch_size),
            height / self.config.patch_size,
            width / self.config.patch_size,
        ])
    }

    /// The grid of frames that have been resized before, which must keep their size.
    ///
    /// # Errors
    /// those of [`PictureProcessor::grid`]; [`VlmDataError::Restated`]
    pub(crate) fn grid_of_resized(&self, frames: usize, stated: [usize; 2]) -> Result<[usize; 3]> {
        let grid = self.video_grid(frames, stated[0], stated[1])?;
        let found = [grid[1], grid[2]].map(|side| side * self.config.patch_size);
        if found != stated {
            let limits = [self.config.min_pixels, self.config.max_pixels];
            return Err(VlmDataError::Restated {
                stated,
                found,
                limits,
            });
        }
        Ok(grid)
    }

    /// The number of placeholder tokens of a grid in the prompt.
    pub fn placeholders(&self, grid: [usize; 3]) -> usize {
        let square = self.config.merge_size * self.config.merge_size;
        grid.iter()
            .fold(1_usize, |product, &side| product.saturating_mul(side))
            / square
    }

    /// Channels of a patch: colours x frames x pixels.
    pub fn channels(&self) -> usize {
        COLOURS * self.config.temporal_patch_size * self.config.patch_size * self.config.patch_size
    }

    /// Computes the patches of a picture.
    ///
    /// The picture is resized in 8 bits, its levels are rescaled and normalised in f32 as by the
    /// backend, and the result is cut into patches. Each frame of a patch is the same picture.
    ///
    /// # Shapes
    /// `values`: `[grid product, channels]`
    /// # Errors
    /// those of [`PictureProcessor::grid`]; [`VlmDataError::Memory`] if an allocation fails
    /// # Source
    /// transformers 5.24.0, `_preprocess` of models/qwen2_vl/image_processing_qwen2_vl.py and
    /// image_processing_pil_qwen2_vl.py, and those of models/glm4v
    pub fn patches(&self, picture: &Picture) -> Result<Patches> {
        let grid = self.grid(picture.height(), picture.width())?;
        let channels = self.channels();
        let elements = grid.iter().map(|&side| side as u128).product::<u128>() * channels as u128;
        let mut values = zeros("the patches", elements)?;
        self.write_patches(picture, &mut values)?;
        Ok(Patches {
            values,
            channels,
            grid,
        })
    }

    /// Writes the patches of a picture into part of a buffer and returns their grid.
    ///
    /// Reusing the buffer of a batch takes less time than allocating new ones.
    ///
    /// # Errors
    /// those of [`PictureProcessor::patches`]; [`VlmDataError::BufferLength`] if the length of
    /// `values` is not grid product x channels
    pub fn write_patches(&self, picture: &Picture, values: &mut [f32]) -> Result<[usize; 3]> {
        let grid = self.grid(picture.height(), picture.width())?;
        self.write(Cow::Borrowed(picture), [0, 1], grid, values)?;
        Ok(grid)
    }

    /// Writes one frame of a video to its part of the buffer of all patches. The last frame is
    /// repeated to complete the last temporal patch.
    ///
    /// `grid` is that of [`PictureProcessor::video_grid`].
    ///
    /// # Shapes
    /// `values`: `[grid product, channels]`
    /// # Errors
    /// [`VlmDataError::BufferLength`] if the length of `values` is not grid product x channels or
    /// the grid has no place for the frame; [`VlmDataError::Memory`]
    /// # Source
    /// transformers 5.24.0, `_preprocess` of models/qwen2_vl/video_processing_qwen2_vl.py
    pub fn write_frame(
        &self,
        picture: &Picture,
        which: [usize; 2],
        grid: [usize; 3],
        values: &mut [f32],
    ) -> Result<()> {
        self.write(Cow::Borrowed(picture), which, grid, values)
    }

    /// As [`PictureProcessor::write_frame`]; an owned picture is freed once one of its axes is
    /// resized. A picture is the frame 0 of 1.
    pub(crate) fn write(
        &self,
        picture: Cow<'_, Picture>,
        [frame, frames]: [usize; 2],
        grid: [usize; 3],
        values: &mut [f32],
    ) -> Result<()> {
        let depth = self.config.temporal_patch_size;
        let length = grid[1] * grid[2] * self.channels();
        let first = frame % depth;
        let end = if frame + 1 == frames {
            depth
        } else {
            first + 1
        };
        let found = values.len();
        let part = values.chunks_exact_mut(length.max(1)).nth(frame / depth);
        let part = part.ok_or(VlmDataError::BufferLength {
            expected: (frame / depth + 1) * length,
            found,
        })?;
        self.write_planes(picture, [1, grid[1], grid[2]], first..end, part)
    }

    /// Reconstructs the pictures in patches, frame by frame: the resized frames of
    /// [`PictureProcessor::write_frame`], or twice the picture of [`PictureProcessor::patches`].
    ///
    /// # Shapes
    /// `values`: `[grid product, channels]`
    /// # Errors
    /// [`VlmDataError::BufferLength`] if `values` has the wrong length; [`VlmDataError::Memory`]
    pub fn pictures(&self, values: &[f32], grid: [usize; 3]) -> Result<Vec<Picture>> {
        let PictureConfig {
            patch_size,
            merge_size,
            temporal_patch_size,
            rescale,
            normalize,
            ..
        } = self.config;
        let expected = grid.iter().product::<usize>() * self.channels();
        if values.len() != expected || grid[2] == 0 || !grid[2].is_multiple_of(merge_size) {
            let found = values.len();
            return Err(VlmDataError::BufferLength { expected, found });
        }
        let [height, width] = [grid[1], grid[2]].map(|side| side * patch_size);
        let plane = patch_size * patch_size;
        let level = |value: f32, colour: usize| {
            let [mean, std] = normalize.map_or([0.0, 1.0], |both| both.map(|all| all[colour]));
            let level = (f64::from(value) * std + mean) / rescale.unwrap_or(1.0);
            level.round() as u8
        };
        let squares = grid[2] / merge_size;
        let mut pictures = Vec::new();
        for frame in 0..grid[0] * temporal_patch_size {
            let mut rgb = zeros("a picture", (height * width * COLOURS) as u128)?;
            let patches = values.chunks_exact(self.channels());
            let first = frame / temporal_patch_size * grid[1] * grid[2];
            for (patch, values) in patches.skip(first).take(grid[1] * grid[2]).enumerate() {
                let (square, within) = (patch / merge_size.pow(2), patch % merge_size.pow(2));
                let row = square / squares * merge_size + within / merge_size;
                let column = square % squares * merge_size + within % merge_size;
                for pixel in 0..plane {
                    let y = row * patch_size + pixel / patch_size;
                    let x = column * patch_size + pixel % patch_size;
                    for colour in 0..COLOURS {
                        let plane_index =
                            colour * temporal_patch_size + frame % temporal_patch_size;
                        let value = values[plane_index * plane + pixel];
                        rgb[(y * width + x) * COLOURS + colour] = level(value, colour);
                    }
                }
            }
            pictures.push(Picture::from_rgb(width, height, rgb)?);
        }
        Ok(pictures)
    }

    /// Resizes a picture and writes it as some frames of one temporal patch.
    fn write_planes(
        &self,
        picture: Cow<'_, Picture>,
        grid: [usize; 3],
        planes: Range<usize>,
        values: &mut [f32],
    ) -> Result<()> {
        let [height, width] = [grid[1], grid[2]].map(|side| side * self.config.patch_size);
        let expected = grid[1] * grid[2] * self.channels();
        if values.len() != expected {
            return Err(VlmDataError::BufferLength {
                expected,
                found: values.len(),
            });
        }
        let backend = self.config.backend;
        let rows = Axis::new(picture.width(), width, backend)?;
        let columns = Axis::new(picture.height(), height, backend)?;
        let side = self.config.patch_size * self.config.merge_size;
        let strip_values = expected / (height / side);
        let rgb = Picture::into_levels(picture);
        // One axis is resized for the whole picture, the other per row of squares, which then stays
        // in the cache until it is cut.
        match (rows, columns) {
            (Some(rows), Some(columns)) if columns_first(&rows, &columns, backend) => {
                let (from, to) = (rows.inputs * COLOURS, rows.outputs * COLOURS);
                let low = all_columns(&columns, rgb, from)?;
                for_each_chunk(values, strip_values, |square_row, values| {
                    let mut strip = vec![0; side * to];
                    rows.resize_rows(&low[square_row * side * from..], &mut strip);
                    self.cut(&strip, planes.clone(), values);
                });
            }
            (rows, Some(columns)) => {
                let narrow = all_rows(rows.as_ref(), rgb)?;
                for_each_chunk(values, strip_values, |square_row, values| {
                    let mut strip = vec![0; side * width * COLOURS];
                    for (y, row) in strip.chunks_exact_mut(width * COLOURS).enumerate() {
                        columns.resize_columns(&narrow, square_row * side + y, row);
                    }
                    self.cut(&strip, planes.clone(), values);
                });
            }
            (rows, None) => {
                let resized = all_rows(rows.as_ref(), rgb)?;
                let bytes = side * width * COLOURS;
                for_each_chunk(values, strip_values, |square_row, values| {
                    self.cut(
                        &resized[square_row * bytes..][..bytes],
                        planes.clone(),
                        values,
                    );
                });
            }
        }
        Ok(())
    }

    /// The sides of the resized picture, height and width in pixels.
    fn size(&self, frames: usize, height: usize, width: usize) -> Result<[usize; 2]> {
        let config = &self.config;
        let factor = config.patch_size * config.merge_size;
        if !config.resize {
            if height == 0 || width == 0 {
                return Err(VlmDataError::NoPixels {
                    width: width as u64,
                    height: height as u64,
                });
            }
            if !height.is_multiple_of(factor) || !width.is_multiple_of(factor) {
                return Err(VlmDataError::NotDivisible {
                    width,
                    height,
                    factor,
                });
            }
            return Ok([height, width]);
        }
        let sides = [height as u64, width as u64];
        let limits = [config.min_pixels, config.max_pixels];
        let [height, width] = smart_resize(
            config.rule,
            sides,
            factor as u64,
            [frames as u64, config.temporal_patch_size as u64],
            limits,
        )?;
        // All values computed from the sides fit their type.
        let bytes = u128::from(height) * u128::from(width) * 4 * self.channels() as u128;
        match (
            usize::try_from(bytes),
            usize::try_from(height),
            usize::try_from(width),
        ) {
            (Ok(_), Ok(height), Ok(width)) => Ok([height, width]),
            _ => Err(VlmDataError::Memory {
                what: "the patches",
                bytes,
            }),
        }
    }

    /// Cuts a row of squares, `[patch_size * merge_size, width, 3]`, into some frames of patches.
    fn cut(&self, strip: &[u8], planes: Range<usize>, values: &mut [f32]) {
        let PictureConfig {
            patch_size,
            merge_size,
            temporal_patch_size,
            ..
        } = self.config;
        let side = patch_size * merge_size;
        let stride = strip.len() / side;
        let plane = patch_size * patch_size;
        for (patch, values) in values.chunks_exact_mut(self.channels()).enumerate() {
            let [square, within] = [
                patch / (merge_size * merge_size),
                patch % (merge_size * merge_size),
            ];
            let top = within / merge_size * patch_size;
            let left = square * side + within % merge_size * patch_size;
            let frames = values
                .chunks_exact_mut(plane * temporal_patch_size)
                .zip(&*self.values);
            for (colour, (frames, table)) in frames.enumerate() {
                let frames = &mut frames[planes.start * plane..planes.end * plane];
                let (first, others) = frames.split_at_mut(plane);
                for (y, row) in first.chunks_exact_mut(patch_size).enumerate() {
                    let start = (top + y) * stride + left * COLOURS;
                    let pixels = strip[start..][..patch_size * COLOURS].chunks_exact(COLOURS);
                    for (value, pixel) in row.iter_mut().zip(pixels) {
                        *value = table[usize::from(pixel[colour])];
                    }
                }
                for frame in others.chunks_exact_mut(plane) {
                    frame.copy_from_slice(first);
                }
            }
        }
    }
}

/// The value of a level of a colour.
///
/// torchvision folds the rescaling into mean and deviation; PIL's classes rescale in f64, round
/// to f32, and normalise.
fn value(config: &PictureConfig, colour: usize, level: u8) -> f32 {
    let normalize = config
        .normalize
        .map(|numbers| numbers.map(|colours| colours[colour] as f32));
    let level = f32::from(level);
    match (config.backend, config.rescale, normalize) {
        (_, None, None) => level,
        (_, None, Some([mean, std])) => (level - mean) / std,
        (Backend::Torchvision, Some(scale), None) => level * scale as f32,
        (Backend::Torchvision, Some(scale), Some(numbers)) => {
            let [mean, std] = numbers.map(|number| number * (1.0 / scale) as f32);
            (level - mean) / std
        }
        (_, Some(scale), normalize) => {
            let scaled = (f64::from(level) * scale) as f32;
            normalize.map_or(scaled, |[mean, std]| (scaled - mean) / std)
        }
    }
}

/// Resizes all rows of `rgb`, which is then freed.
fn all_rows<'a>(rows: Option<&Axis>, rgb: Cow<'a, [u8]>) -> Result<Cow<'a, [u8]>> {
    let Some(rows) = rows else {
        return Ok(rgb);
    };
    let (from, to) = (rows.inputs * COLOURS, rows.outputs * COLOURS);
    let mut resized = zeros("the resized rows", (rgb.len() / from) as u128 * to as u128)?;
    for_each_chunk(&mut resized, TASK_ROWS * to, |task, output| {
        rows.resize_rows(&rgb[task * TASK_ROWS * from..], output);
    });
    Ok(Cow::Owned(resized))
}

/// Resizes all columns of `rgb`, whose rows have `stride` bytes and which is then freed.
fn all_columns(columns: &Axis, rgb: Cow<'_, [u8]>, stride: usize) -> Result<Vec<u8>> {
    let mut resized = zeros(
        "the resized columns",
        columns.outputs as u128 * stride as u128,
    )?;
    for_each_chunk(&mut resized, TASK_ROWS * stride, |task, output| {
        for (y, row) in output.chunks_exact_mut(stride).enumerate() {
            columns.resize_columns(&rgb, task * TASK_ROWS + y, row);
        }
    });
    Ok(resized)
}

/// Calls a function on each chunk with its index, on all cores if there are several.
fn for_each_chunk<T: Send>(
    elements: &mut [T],
    length: usize,
    work: impl Fn(usize, &mut [T]) + Sync,
) {
    #[cfg(feature = "rayon")]
    {
        use rayon::prelude::*;
        elements
            .par_chunks_mut(length)
            .enumerate()
            .for_each(|(index, chunk)| work(index, chunk));
    }
    #[cfg(not(feature = "rayon"))]
    elements
        .chunks_mut(length)
        .enumerate()
        .for_each(|(index, chunk)| work(index, chunk));
}
