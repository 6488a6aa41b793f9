//! Pictures: converts a file to the patches that a vision tower takes.
//!
//! [`Picture`] reads a file like transformers' `load_image`. [`PictureConfig`] has a model folder's
//! settings for pictures, and [`PictureProcessor`] computes the [`Patches`] of a picture:
//! transformers' `pixel_values` and row of `image_grid_thw`, bit for bit.
//!
//! ```
//! use vlm_data::picture::{Family, Picture, PictureConfig, PictureProcessor};
//!
//! let family = Family::of("qwen3_vl").expect("a family of the table");
//! let config = PictureConfig::of_family(family).expect("a family with pictures");
//! let processor = PictureProcessor::new(config)?;
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
//! | `read` | a file's pixels as RGB; `jpeg`, `png`, `gif`, `bmp`, `orientation` and `colour` are its parts |
//! | `config` | the settings of a model folder |
//! | `smart_resize` | the size that a picture is resized to |
//! | `resample` | resizing, in the integers of torchvision and of PIL |
//! | `patches` | the whole conversion: resizing, normalising and cutting into patches |

mod bmp;
mod colour;
mod config;
mod gif;
mod jpeg;
mod orientation;
mod patches;
mod png;
mod read;
mod resample;
mod smart_resize;

pub(crate) use config::family_of;
pub use config::{Backend, PictureConfig};
pub use patches::{Patches, PictureProcessor};
pub use read::{Alpha, Picture, ReadOptions};
pub(crate) use read::{Contents, KeptFile, Wanted, contents, in_file};
pub use smart_resize::smart_resize;
pub use vlm_family::{BoxForm, FAMILIES, Family, ResizeRule};
