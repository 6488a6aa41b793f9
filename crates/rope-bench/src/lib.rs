//! Measurements of `mrope bench` and their methods: shapes, cases, interleaved sampling, and rows
//! of results.
//!
//! | module | contents |
//! |---|---|
//! | [`shapes`] | the only place where benchmark dimensions are written |
//! | [`cases`] | rotations to time, by name |
//! | [`memory`] | models whose rotations are measured in memory |
//! | [`rotation`] | a case with its tensors, checked against the oracle and its baseline |
//! | [`norm`] | the same for a case of the norm with the rotation |
//! | [`timed`] | either of these for any element type, and several in turns |
//! | [`sample`] | alternating samples of several contestants |
//! | [`series`] | cases in turns over several rounds |
//! | [`rows`] | results, as JSON lines |
//! | [`names`] | names of implementations in results |
//! | [`burn`] | rotations and attention in burn: bytes and time |

pub mod burn;
pub mod cases;
pub mod memory;
pub mod names;
pub mod norm;
pub mod rotation;
pub mod rows;
pub mod sample;
pub mod series;
pub mod shapes;
pub mod timed;
