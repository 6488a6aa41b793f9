//! Configurations' defaults, and merged adapters. One program: each would link all of burn.
#![allow(clippy::disallowed_methods, reason = "test code")]

mod defaults;
mod merge;
