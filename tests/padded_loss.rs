//! The loss of rows of different lengths: packed, and padded on either side.

use burn::tensor::Device;
use vlm_models::rope_core::position_ids::{Compatibility, Prompt, Rows};
use vlm_models::{Inputs, VlmConfig, VlmError};

const TOKENS: [i64; 8] = [11, 12, 13, 14, 15, 21, 22, 23];
const RIGHT: [i64; 10] = [11, 12, 13, 14, 15, 21, 22, 23, 0, 0];
const LEFT: [i64; 10] = [11, 12, 13, 14, 15, 0, 0, 21, 22, 23];
/// Of losses of order 1 to 10, which are known to six decimals.
const TOLERANCE: f32 = 5e-6;

/// Each model, its loss, and the loss that transformers gives of the same rows padded left.
const LOSSES: [(&str, f32, f32); 5] = [
    ("qwen2_vl_tiny", 5.890_446, 5.939_689),
    ("qwen2_5_vl_tiny", 6.842_684, 6.725_144),
    ("qwen3_vl_tiny", 5.941_822, 5.718_623),
    ("glm4v_tiny", 5.849_793, 6.183_862),
    ("qwen3_5_tiny", 6.004_015, 6.285_512),
];

fn folder(name: &str) -> std::path::PathBuf {
    let fixtures = rope_check::fixtures().expect("the test runs in the workspace");
    fixtures.join("models").join(name)
}

fn config(name: &str) -> VlmConfig {
    VlmConfig::from_folder(folder(name)).expect("the configuration reads")
}

fn loss(
    (name, config): (&str, &VlmConfig),
    prompt: Prompt<'_>,
    labels: &[i64],
) -> Result<f32, VlmError> {
    let model = config.load(folder(name), &Device::flex())?;
    let batch = model.batch(&Inputs {
        prompt,
        ..Inputs::default()
    })?;
    Ok(model.loss(&batch, labels)?.into_scalar::<f32>())
}

/// Of two rows, whose token 0 is padding.
fn padded(of: (&str, &VlmConfig), input_ids: &[i64], labels: &[i64]) -> Result<f32, VlmError> {
    let attended: Vec<bool> = input_ids.iter().map(|token| *token != 0).collect();
    let prompt = Prompt {
        input_ids,
        rows: Rows::Batch(2),
        attention_mask: Some(&attended),
        ..Prompt::default()
    };
    loss(of, prompt, labels)
}

fn expect_near(found: Result<f32, VlmError>, expected: f32, what: &str) {
    let found = found.expect("it has targets");
    let difference = (found - expected).abs();
    assert!(difference <= TOLERANCE, "{what}: {found} for {expected}");
}

/// As trainers label: -100 at padding.
fn without_padding(input_ids: &[i64]) -> Vec<i64> {
    let label = |token: &i64| if *token == 0 { -100 } else { *token };
    input_ids.iter().map(label).collect()
}

#[test]
fn the_loss_does_not_depend_on_the_side_of_the_padding() {
    for (name, expected, _) in LOSSES {
        let config = config(name);
        let of = (name, &config);
        let packed = Prompt {
            input_ids: &TOKENS,
            rows: Rows::Packed(&[0, 5, 8]),
            ..Prompt::default()
        };
        expect_near(loss(of, packed, &TOKENS), expected, name);
        for ids in [RIGHT, LEFT] {
            let labels = without_padding(&ids);
            expect_near(padded(of, &ids, &labels), expected, name);
            // Labels of padding do not count either.
            expect_near(padded(of, &ids, &ids), expected, name);
        }
    }
    let config = config("qwen3_vl_tiny");
    let mut only_first = [-100; 10];
    only_first[7] = 21;
    let error = padded(("qwen3_vl_tiny", &config), &LEFT, &only_first);
    let error = error.expect_err("the first token of a row follows nothing");
    assert!(matches!(error, VlmError::NoTargets), "{error}");
}

#[test]
fn a_run_of_transformers_goes_on_with_its_loss() {
    for (name, expected, transformers_loss) in LOSSES {
        let exact = config(name);
        let mut chosen = exact.clone();
        chosen.padding_predicts = true;
        let followed = exact.with_compatibility(Compatibility::Transformers5_23);
        for config in [chosen, followed] {
            let of = (name, &config);
            let left = padded(of, &LEFT, &without_padding(&LEFT));
            expect_near(left, transformers_loss, name);
            let right = padded(of, &RIGHT, &without_padding(&RIGHT));
            expect_near(right, expected, name);
        }
    }
}
