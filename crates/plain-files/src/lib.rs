#![doc = include_str!("../README.md")]
// The one crate that may call what clippy.toml forbids; its tests write files of their own.
#![allow(clippy::disallowed_methods)]

mod error;
mod fingerprint;
mod read;
mod replace;
mod write;

pub use error::{Cause, FileError, Result};
pub use fingerprint::Fingerprint;
pub use read::{MAX_TEXT_BYTES, open, open_no_link, read, read_opened, read_text};
pub use replace::{is_same, replace, share};
pub use write::{NewFile, sync_folder, write_whole};
