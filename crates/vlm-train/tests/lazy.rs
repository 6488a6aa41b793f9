//! Models and plans draw nothing: the type of a device can be configured after them.

use std::process::Command;

use burn::tensor::{DType, Device, FloatDType};
use vlm_models::VlmConfig;
use vlm_train::{MemoryPlan, Recipe, TrainedParts};

use crate::common::{ALL, FAMILIES, fixtures, lora};

/// The family and the type of a child.
const CHILD: &str = "MROPE_LAZY";

/// A device's settings are fixed for a process at its first tensor, so each case is a process.
#[test]
fn a_device_is_configured_after_models_and_plans() {
    if let Ok(child) = std::env::var(CHILD) {
        return configure(&child);
    }
    for family in FAMILIES {
        for dtype in ["bf16", "f16"] {
            let child = Command::new(std::env::current_exe().unwrap())
                .args([
                    "--exact",
                    "lazy::a_device_is_configured_after_models_and_plans",
                ])
                .env(CHILD, format!("{family} {dtype}"))
                .output()
                .unwrap();
            let said = String::from_utf8_lossy(&child.stdout);
            assert!(child.status.success(), "{family} in {dtype}: {said}");
            assert!(said.contains("1 passed"), "no test ran: {said}");
        }
    }
}

fn configure(child: &str) {
    let (family, dtype) = child.split_once(' ').unwrap();
    let dtype = match dtype {
        "bf16" => DType::BF16,
        _ => DType::F16,
    };
    let config = VlmConfig::from_folder(fixtures().join("models").join(family)).unwrap();
    let mut device = Device::flex();
    let model = config.init(&device).unwrap();
    for trained in [lora(), TrainedParts::Full(ALL.to_vec().into())] {
        let recipe = Recipe {
            trained,
            ..Recipe::default()
        };
        MemoryPlan::new(&config, &recipe, dtype).unwrap();
    }
    device.configure(FloatDType::from(dtype)).unwrap();
    drop(model);
}
