//! Rotations, configurations and lanes, in one program.
#![allow(clippy::disallowed_methods, reason = "test code")]

mod configurations;
mod families;
mod hf_config;
mod implied;
mod lanes;
mod layout;
mod llama3;
mod norm;
mod odd;
mod position_limits;
mod reported;
