#![allow(dead_code, missing_docs)]
mod clip;
mod data;
mod error;
mod model;
mod options;
mod trainer;
pub(crate) use options::RunConfig;
pub(crate) use trainer::quick;
