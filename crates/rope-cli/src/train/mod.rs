//! `mrope train`: a small vision-language model that finds a digit by time, height and width.

mod checkpoint;
mod clip;
mod data;
mod error;
mod model;
mod options;
mod plots;
mod report;
mod run;
mod trainer;

pub(crate) use options::TrainArgs;
pub(crate) use run::run;
