//! Text: converts data files to token ids and labels.
//!
//! ```no_run
//! use vlm_data::text::{EncodeOptions, Grid, Grids, FileOptions, TextEncoder, read};
//!
//! let encoder = TextEncoder::from_folder("Qwen3-VL-2B-Instruct")?;
//! for conversation in read("train.jsonl", &FileOptions::default())? {
//!     let conversation = conversation?;
//!     // One grid for each picture, from its size in pixels; here all have 16 x 16 patches.
//!     let images = vec![Grid { time: 1, height: 16, width: 16 }; conversation.images.len()];
//!     let grids = Grids { images: &images, videos: &[] };
//!     let sample = encoder.encode(&conversation, grids, &EncodeOptions::default())?;
//!     let trained = sample.labels.iter().filter(|&&label| label != -100).count();
//!     println!("{} tokens, {trained} trained on", sample.input_ids.len());
//! }
//! # Ok::<(), vlm_data::text::TextError>(())
//! ```
//!
//! | module | contents |
//! |---|---|
//! | [`mod@format`] | data files to conversations |
//! | [`tokenizer`] | the tokenizer of a checkpoint folder |
//! | [`template`] | its chat template |
//! | [`expand`] | pads for pictures and videos |
//! | [`labels`] | conversations to token ids and labels |
//! | `pair` | two answers to one prompt |
//! | [`json`] | JSON that keeps its order, written like Python's |
//! | [`error`] | faults of a record, and their remedies |

mod account;
mod budget;
mod chat;
pub mod error;
pub mod expand;
pub mod format;
pub mod json;
pub mod labels;
mod pair;
pub mod template;
pub mod tokenizer;

pub use error::{RecordProblem, Result, TextError};
pub use expand::{Grid, Grids, VideoGrid};
pub use format::{
    Answers, Conversation, Conversations, DataIndex, DataReader, FileOptions, Format, Message,
    OtherAnswer, Part, Role, read,
};
pub use labels::{EncodeOptions, IGNORED, LabelRule, Overlong, Sample, TextEncoder, Trained};
pub use pair::AnswerPair;
pub use template::{ChatTemplate, RenderOptions};
pub use tokenizer::Tokenizer;
pub use vlm_family::MediaStyle;
