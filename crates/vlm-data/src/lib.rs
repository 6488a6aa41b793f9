#![doc = include_str!("../README.md")]
#![cfg_attr(test, allow(clippy::disallowed_methods, reason = "test code"))]

mod batch;
pub mod check;
mod dataset;
mod error;
mod fetch;
mod loader;
mod memory;
#[cfg(feature = "parquet")]
pub mod parquet;
pub mod picture;
mod sample;
mod survey;
pub mod text;
mod video;

pub use batch::{Cut, MicroBatch, SampleRows};
pub use dataset::{DataSet, DataSetReader, HeldOut, Share};
pub use error::{Result, VlmDataError};
pub use loader::{BatchSize, DataPosition, GlobalBatch, Loader, LoaderOptions, OnError};
pub use plain_files::Fingerprint;
pub use sample::{MediaEncoder, SampleEncoder, SampleOptions, TrainingSample, read_boxes};
pub use survey::{NoSample, Survey, SurveyOptions, Surveyed};

#[cfg(doctest)]
#[doc = include_str!("../../../docs/data-text.md")]
mod page_of_text {}

#[cfg(doctest)]
#[doc = include_str!("../../../docs/data.md")]
mod page_of_pictures {}
