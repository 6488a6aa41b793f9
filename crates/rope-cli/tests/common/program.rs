//! `mrope` as a user runs it.
#![allow(dead_code, reason = "no test file uses all of it")]

use std::ffi::OsStr;
use std::fmt::Display;
use std::process::{Command, Output};

use serde_json::Value;

pub(crate) fn command<A: AsRef<OsStr>>(arguments: &[A]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_mrope"));
    command
        .args(arguments)
        // A machine with CANN, or with a token of its user's, is to give the same answers.
        .env("ROPE_ASCEND_LIB_PATH", "/no/such/folder")
        .env_remove("ROPE_ASCEND_KERNELS")
        .env_remove("MROPE_TOKEN");
    command
}

/// Runs the program.
pub(crate) fn mrope<A: AsRef<OsStr>>(arguments: &[A]) -> Output {
    command(arguments).output().expect("the program starts")
}

pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("output is text")
}

/// Lines that are objects of JSON.
pub(crate) fn objects(bytes: &[u8]) -> Vec<Value> {
    let parse = |line| serde_json::from_str(line).expect("each line is an object");
    text(bytes).lines().map(parse).collect()
}

/// Fails unless the text has that part.
#[track_caller]
pub(crate) fn says(text: &impl Display, part: impl Display) {
    let (text, part) = (text.to_string(), part.to_string());
    assert!(text.contains(&part), "{part:?} is not in: {text}");
}
