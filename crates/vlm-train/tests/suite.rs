//! Training against transformers, itself and its checkpoints. One program: each would link all of
//! burn. Those that count memory are programs of their own.

#![allow(clippy::unwrap_used, reason = "test code")]

mod common;
mod compare;
mod generation;
mod precision;
mod ranks;
mod reference;
mod resume;
