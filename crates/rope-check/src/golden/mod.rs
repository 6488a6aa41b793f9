//! Golden vectors: what another implementation computed, and how far an engine is from it.
//!
//! A file is one rotary module: positions, q and k, upstream gradients, and what the other
//! implementation made of them. The rotation is built from the metadata alone, as a user's
//! configuration would build it, so the files check that reading too.
//!
//! | module | what it holds |
//! |---|---|
//! | `artifact` | which kind of file a path is |
//! | `tensors` | a `.safetensors` file: tensors by name, exact in f64 |
//! | `vectors` | the file of a rotary module, checked |
//! | `rotation` | engines against the file's truth |
//! | `diagnosis` | which known mistake makes the values of a file that differs |
//! | `rounding` | how programs round on the way to cos and sin |
//! | `prompts` | `rope_index_*.json`: position ids of prompts |
//! | `tables` | `inv_freq_tables.json`: frequencies of every scaling |
//! | `row` | one comparison: largest difference, tolerance, worst element |

mod artifact;
mod diagnosis;
mod error;
mod prompts;
mod rotation;
mod rounding;
mod row;
mod tables;
pub(crate) mod tensors;
mod vectors;

pub use artifact::Artifact;
pub(crate) use artifact::MAX_BYTES;
pub use error::GoldenError;
#[cfg(feature = "burn")]
pub(crate) use error::lost_gradient;
pub use prompts::PromptCases;
#[cfg(feature = "models")]
pub(crate) use prompts::{reasons, version_of};
pub use row::{Row, Worst};
pub use tables::FrequencyTables;
pub use vectors::GoldenVectors;
