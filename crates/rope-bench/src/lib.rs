//! Measurements of `mrope bench` and their methods: shapes, cases, interleaved sampling, and rows
//! of results.
//!
//! | module | what |
//! |---|---|
//! | [`shapes`] | the only place where benchmark dimensions are written |
//! | [`cases`] | rotations to time, by name |
//! | [`memory`] | models whose rotations are counted in memory |
//! | [`rotation`] | a case with its tensors, checked against the oracle and its baseline |
//! | [`norm`] | the same for a case of the norm with the rotation |
//! | [`timed`] | either, whatever its element type, and several in turns |
//! | [`sample`] | samples of several contestants, taken in turn |
//! | [`rows`] | results, as JSON lines |
//! | [`names`] | names of implementations in them |

pub mod cases;
pub mod memory;
pub mod names;
pub mod norm;
pub mod rotation;
pub mod rows;
pub mod sample;
pub mod shapes;
pub mod timed;
