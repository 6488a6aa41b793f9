//! Position ids of multimodal prompts: from token ids, grids, timestamps and masks to one id per
//! axis and token.
//!
//! One rule covers every family. Text and audio take the next id on all axes. A block of vision
//! tokens starts at the next id: T counts time, H and W the rows and columns of the merged grid.
//! After a block the next id is one more than the highest on any axis. Families differ in data
//! only: whether a video is one block or a block per frame, how many ids a second takes, which
//! patches merge.
//!
//! Released versions of Hugging Face transformers depart from this rule, each in its own way;
//! [`Compatibility`] reproduces them and [`Divergence`] names where they depart.

mod audio_video;
mod error;
mod prompt;
mod rules;
mod split;
mod vision;

pub use error::PositionIdsError;
pub use prompt::{PositionIds, Prompt, Rows};
pub use rules::{Compatibility, Divergence, PositionRules, TokenIds};
pub(crate) use split::reserved;
pub use split::zigzag;
pub use vision::{VisionWindows, vision_cu_seqlens, vision_positions, vision_windows};
