//! `mrope` as a user runs it, and the simulated NPU under whole models. One program: each would link
//! all of burn.
#![allow(clippy::disallowed_methods, reason = "test code")]

#[cfg(feature = "ascend-sim")]
mod common;
#[cfg(feature = "ascend-sim")]
#[path = "../../vlm-train/tests/common/ended.rs"]
mod ended;
#[path = "common/program.rs"]
mod program;

#[cfg(feature = "ascend-sim")]
mod accept;
mod after_training;
#[cfg(feature = "ascend-sim")]
mod ascend_faults;
#[cfg(feature = "ascend-sim")]
mod ascend_training;
#[cfg(feature = "ascend-sim")]
mod attention;
mod bench;
mod daily;
mod data;
mod device;
mod dumps;
mod finetune;
#[cfg(unix)]
mod irregular;
mod model_folder;
mod models;
mod output;
mod pages;
#[cfg(feature = "ascend-sim")]
mod serve;
#[cfg(feature = "ascend-sim")]
mod several_devices;
#[cfg(all(feature = "ascend-sim", target_os = "linux"))]
mod strangers;
mod train;
mod verify;
mod workflow;
