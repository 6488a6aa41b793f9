//! Position ids of multimodal prompts: one id per axis and token, from token ids, grids, timestamps
//! and masks.
//!
//! One rule covers every family. Text and audio take the next id on all axes. A block of vision
//! tokens starts at the next id: T counts time, H and W the rows and columns of the merged grid.
//! After a block, the next id is one more than the highest on any axis. Families differ only in
//! data: one block per video or per frame, the number of ids per second, and the patches that
//! merge.
//!
//! Released versions of Hugging Face transformers each diverge from this rule; [`Compatibility`]
//! reproduces them, and [`Divergence`] names the differences.

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
