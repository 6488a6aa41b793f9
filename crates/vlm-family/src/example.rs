//! A family for tests, as a guide: Qwen3-VL with three other numbers.

use serde_json::{Value, json};

use crate::family::Family;
use crate::qwen3_vl;

pub(crate) const ROW: Family = Family {
    name: "Example-VL",
    model_type: "example_vl",
    other_types: &[],
    defaults,
    ..qwen3_vl::ROW
};

fn defaults() -> Value {
    let mut defaults = (qwen3_vl::ROW.defaults)();
    defaults["text_config"]["num_hidden_layers"] = json!(2);
    defaults["vision_config"]["depth"] = json!(2);
    defaults["vision_config"]["num_position_embeddings"] = json!(36);
    defaults
}
