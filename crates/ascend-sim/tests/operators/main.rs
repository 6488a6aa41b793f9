//! The operators: values by their mathematical definition in f64, shapes, types, views, refusals
//! and lifetimes.
#![allow(clippy::disallowed_methods, reason = "test code")]
#![allow(unsafe_code, reason = "the tests call the C ABI, as programs do")]

#[macro_use]
mod harness;
#[path = "../support/mod.rs"]
mod support;

mod attention;
mod elementwise;
mod matrix;
mod movement;
mod normalization;
mod protocol;
mod random;
mod reduction;
mod rotary;
