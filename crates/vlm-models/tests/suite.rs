//! Configurations' defaults, and merged adapters. One program: each would link all of burn.

mod defaults;
mod merge;
