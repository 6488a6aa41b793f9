//! Pictures: from a file to the patches that a vision tower takes.
//!
//! [`Picture`] reads a file as `load_image` of transformers does. [`PictureConfig`] is what a
//! model folder says about pictures, and [`PictureProcessor`] makes [`Patches`] of a picture: the
//! `pixel_values` and the row of `image_grid_thw` that transformers makes, bit for bit.
//!
//! ```
//! use vlm_data::picture::{Family, Picture, PictureProcessor};
//!
//! let family = Family::of("qwen3_vl").expect("a family of the table");
//! let processor = PictureProcessor::new(family.config())?;
//! let picture = Picture::from_rgb(640, 480, vec![127; 3 * 640 * 480])?;
//! let patches = processor.patches(&picture)?;
//! assert_eq!(patches.grid, [1, 30, 40]);
//! assert_eq!(patches.values.len(), 30 * 40 * patches.channels);
//! assert_eq!(processor.placeholders(patches.grid), 300); // tokens in the prompt
//! # Ok::<(), vlm_data::VlmDataError>(())
//! ```
//!
//! | module | contents |
//! |---|---|
//! | `read` | a file's pixels as RGB; `gif`, `orientation` and `colour` are its parts |
//! | `config` | the families, and what a model folder says |
//! | `smart_resize` | the size that a picture is resized to |
//! | `resample` | resizing, in the integers of torchvision and of PIL |
//! | `patches` | all of it: resizing, normalising and cutting into patches |

mod colour;
mod config;
mod gif;
mod orientation;
mod patches;
mod read;
mod resample;
mod smart_resize;

pub use config::{Backend, BoxForm, FAMILIES, Family, PictureConfig, ResizeRule};
pub use patches::{Patches, PictureProcessor};
pub use read::{Alpha, Picture, ReadOptions};
pub(crate) use read::{Contents, Wanted, contents, in_file, read_file};
pub use smart_resize::smart_resize;
