//! The scaling of Llama 3.1 and of later checkpoints with the same rope type.

use rope_core::{Frequencies, Llama3Scaling, RopeError, Scaling};

/// Llama 4 Scout as published: no band between the kept and the divided frequencies.
#[test]
fn llama3_without_a_band_is_a_step() {
    let original = 8192;
    let scaling = |low, high| {
        Scaling::Llama3(Llama3Scaling {
            factor: 8.0,
            low_freq_factor: low,
            high_freq_factor: high,
            original_max_position_embeddings: original,
        })
    };
    let plain = Frequencies::new(500_000.0).expect("valid");
    let step = plain
        .clone()
        .with_scaling(scaling(1.0, 1.0))
        .expect("published");
    let plain_values = plain.inv_freq(128, None).expect("even");
    let values = step.inv_freq(128, None).expect("even");
    let mut divided = 0;
    for (plain, found) in plain_values.iter().zip(values) {
        let turns = original as f64 * plain / std::f64::consts::TAU;
        let expected = if turns < 1.0 { plain / 8.0 } else { *plain };
        divided += usize::from(turns < 1.0);
        assert!(
            (found - expected).abs() <= 1e-15 * expected,
            "{turns} turns: {found}, expected {expected}"
        );
    }
    assert!(divided > 0 && divided < 64, "{divided}");

    // The edge itself is kept: the first frequency, 1, makes `original / tau` turns.
    let edge = original as f64 / std::f64::consts::TAU;
    let at_edge = plain
        .clone()
        .with_scaling(scaling(edge, edge))
        .expect("valid");
    assert_eq!(at_edge.inv_freq(128, None).expect("even")[0], 1.0);

    let refused = plain.with_scaling(scaling(2.0, 1.0));
    assert!(matches!(
        refused,
        Err(RopeError::ScalingParameter {
            parameter: "high_freq_factor",
            ..
        })
    ));
}
