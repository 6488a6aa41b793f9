//! `mrope train`: options, printing, plots and files around the example `mrope-digits`.

mod error;
mod options;
mod plots;
mod report;
mod run;

pub(crate) use options::TrainArgs;
pub(crate) use run::run;
