//! Training against transformers, itself and its checkpoints. One program, since each links all of
//! burn; the tests that count memory are separate programs.

#![allow(clippy::disallowed_methods, clippy::unwrap_used, reason = "test code")]

mod common;
mod compare;
mod compare_parts;
mod compare_ranks;
mod context;
mod expert_parallel;
mod generation;
mod job;
mod lazy;
mod parts;
mod policies;
mod precision;
mod preferences;
mod ranks;
mod reference;
mod resume;
mod rollouts;
