//! Text: data files to token ids and labels.
//!
//! | module | contents |
//! |---|---|
//! | [`format`] | data files to conversations |
//! | [`tokenizer`] | the tokenizer of a checkpoint folder |
//! | [`template`] | its chat template |
//! | [`expand`] | pads for pictures and videos |
//! | [`labels`] | conversations to token ids and labels |
//! | [`json`] | JSON that keeps its order, and Python's way of writing it |
//! | [`error`] | what is wrong with a record, and what to do |

pub mod error;
pub mod expand;
pub mod format;
pub mod json;
pub mod labels;
pub mod template;
pub mod tokenizer;

pub use error::{RecordProblem, Result, TextError};
pub use expand::{Grid, Grids, MediaStyle, VideoGrid};
pub use format::{Conversation, Format, Message, Part, ReadOptions, Role, read};
pub use labels::{EncodeOptions, IGNORED, LabelRule, Overlong, Sample, TextEncoder, Trained};
pub use template::{ChatTemplate, RenderOptions};
pub use tokenizer::Tokenizer;
