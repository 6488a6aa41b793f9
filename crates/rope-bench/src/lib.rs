//! What is measured and how: the shapes, the table of cases that `cargo bench`, `mrope bench` and
//! `cargo xtask benchmarks` share, interleaved sampling, and the rows that come out.
//!
//! | module | what |
//! |---|---|
//! | [`shapes`] | the only place where benchmark dimensions are written |
//! | [`cases`] | rotations to time, by name |
//! | [`memory`] | what rotations hold in memory, and formulas for what does not run here |
//! | [`model`] | how long a rotation takes on an NPU, by published costs of what it does |
//! | [`rotation`] | a case with its tensors, checked against the oracle and its baseline |
//! | [`norm`] | the same for a case of the norm with the rotation |
//! | [`sample`] | samples of several contestants, taken in turn |
//! | [`rows`] | results, as CSV and as JSON lines |
//! | [`bars`] | what the results are held to |
//! | [`chart`] | results as bars |

pub mod bars;
pub mod cases;
pub mod chart;
pub mod memory;
pub mod model;
pub mod norm;
pub mod rotation;
pub mod rows;
pub mod sample;
pub mod shapes;
