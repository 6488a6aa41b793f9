//! Rotations as data: lanes, lists of frequencies, real positions. Expected values are written out
//! from the formulas.

use rope_core::reference::HeadMatrix;
use rope_core::{
    AxisLayout, CosSinTable, Frequencies, Lane, Positions, RopeError, RotarySpec, Scaling,
    TokenAngles,
};

fn lanes(of: &[(u8, u32)]) -> AxisLayout {
    let lane = |(axis, frequency): &(u8, u32)| Lane {
        axis: *axis,
        frequency: *frequency,
    };
    AxisLayout::Lanes(of.iter().map(lane).collect())
}

fn spec(head_dim: usize, axes: AxisLayout, inv_freq: &[f64]) -> Result<RotarySpec, RopeError> {
    let frequencies = Frequencies::listed(inv_freq.to_vec())?;
    RotarySpec::builder(head_dim)
        .axis_layout(axes)
        .frequencies(frequencies)
        .build()
}

/// cos, then sin, of each angle in turn.
fn cos_sin(angles: &[f64]) -> Vec<f64> {
    let cos = angles.iter().map(|angle| angle.cos());
    cos.chain(angles.iter().map(|angle| angle.sin())).collect()
}

#[test]
fn lanes_take_any_axis_and_any_frequency() {
    // Height takes every other frequency from the first on, width from the second; as Pixtral.
    let axes = lanes(&[(0, 0), (0, 2), (1, 1), (1, 3)]);
    let spec = RotarySpec::builder(8).axis_layout(axes).theta(16.0).build();
    let spec = spec.expect("valid");
    assert_eq!(spec.axis_count(), 2);
    assert!(!spec.geometry().per_channel());
    let positions = Positions::new(2, &[3, 5]).expect("valid");
    let found = TokenAngles::<f64>::new(&spec, &positions, None).expect("valid");
    assert_eq!(
        found.rows(),
        cos_sin(&[3.0, 3.0 * 0.25, 5.0 * 0.5, 5.0 * 0.125])
    );
}

#[test]
fn a_list_may_hold_zeros_and_negative_frequencies() {
    let spec = spec(6, AxisLayout::Single, &[0.5, 0.0, -2.0]).expect("valid");
    let positions = Positions::text(1, 7, 1).expect("valid");
    let found = TokenAngles::<f64>::new(&spec, &positions, None).expect("valid");
    assert_eq!(found.rows(), cos_sin(&[3.5, 0.0, -14.0]));
    assert_eq!((found.rows()[1], found.rows()[4]), (1.0, 0.0));
    let mut table = CosSinTable::<f64>::new(&spec, None).expect("valid");
    table.grow_to(7).expect("small");
    let gathered = TokenAngles::gather(&table, &positions).expect("valid");
    assert_eq!(gathered.rows(), found.rows());
}

#[test]
fn lanes_per_channel_may_share_a_short_list() {
    // The members of a pair turn by different angles; as V-JEPA 2.
    let axes = lanes(&[(0, 0), (0, 0), (0, 1), (0, 1)]);
    let spec = spec(4, axes, &[1.0, 0.1]).expect("valid");
    assert!(spec.geometry().per_channel());
    let positions = Positions::text(1, 2, 1).expect("valid");
    let found = TokenAngles::<f64>::new(&spec, &positions, None).expect("valid");
    assert_eq!(found.rows(), cos_sin(&[2.0, 2.0, 0.2, 0.2]));
}

#[test]
fn real_positions_are_exact_far_out_and_close_in() {
    let spec = spec(4, AxisLayout::Single, &[1.0, 0.5]).expect("valid");
    let values = [6.5, -3.25, 1e-3, 0.0, 2f64.powi(31), -(2f64.powi(31)) + 0.5];
    let positions = Positions::real(1, &values).expect("valid");
    assert!(!positions.are_ids());
    assert_eq!(positions.highest(), 1 << 31);
    let found = TokenAngles::<f64>::new(&spec, &positions, None).expect("valid");
    for (row, value) in found.rows().chunks(4).zip(values) {
        assert_eq!(row, cos_sin(&[value, 0.5 * value]));
    }
    // A token at 0 does not rotate.
    assert_eq!(&found.rows()[12..16], [1.0, 1.0, 0.0, 0.0]);
}

#[test]
fn real_positions_that_are_ids_are_ids() {
    let ids = Positions::new(2, &[0, 1, 2, 1 << 31]).expect("valid");
    let real = Positions::real(2, &[0.0, 1.0, 2.0, 2f64.powi(31)]).expect("valid");
    assert_eq!(ids, real);
}

#[test]
fn wrong_positions_are_refused() {
    let out = 2f64.powi(31) + 1.0;
    for (value, axis, token) in [(f64::NAN, 0, 1), (f64::INFINITY, 1, 0), (-out, 1, 1)] {
        let mut values = [0.5; 4];
        values[2 * axis + token] = value;
        let error = Positions::real(2, &values).expect_err("refused");
        let RopeError::RealPositionOutOfRange {
            found,
            axis: at_axis,
            token: at_token,
        } = error
        else {
            panic!("{error}");
        };
        assert_eq!(found.to_bits(), value.to_bits());
        assert_eq!((at_axis, at_token), (axis, token));
    }
    assert!(matches!(
        Positions::real(2, &[0.5; 3]),
        Err(RopeError::PositionShape { ids: 3, axes: 2 })
    ));
    // A table has no rows for them.
    let spec = RotarySpec::builder(4).build().expect("valid");
    let positions = Positions::real(1, &[1.0, 6.5]).expect("valid");
    let mut table = CosSinTable::<f32>::new(&spec, None).expect("valid");
    table.grow_to(positions.highest()).expect("small");
    let refused = RopeError::PositionNotId {
        found: 6.5,
        axis: 0,
        token: 1,
    };
    assert_eq!(
        TokenAngles::gather(&table, &positions).expect_err("refused"),
        refused
    );
    assert_eq!(positions.axis(0), Err(refused));
}

#[test]
fn wrong_lanes_and_lists_are_refused() {
    let refused = |axes, inv_freq: &[f64]| spec(4, axes, inv_freq).expect_err("refused");
    assert_eq!(
        refused(lanes(&[(0, 0); 3]), &[1.0, 0.1]),
        RopeError::LaneCount { found: 3, pairs: 2 }
    );
    assert_eq!(
        refused(lanes(&[(0, 0), (4, 0)]), &[1.0, 0.1]),
        RopeError::LaneOutOfRange {
            lane: 1,
            what: "axis",
            found: 4,
            limit: 4
        }
    );
    assert_eq!(
        refused(lanes(&[(0, 2), (0, 0)]), &[1.0, 0.1]),
        RopeError::LaneOutOfRange {
            lane: 0,
            what: "frequency",
            found: 2,
            limit: 2
        }
    );
    let count = |expected, found| RopeError::FrequencyCount { expected, found };
    assert_eq!(refused(AxisLayout::Single, &[1.0]), count(2, 1));
    assert_eq!(
        refused(AxisLayout::PerAxis(vec![1, 1]), &[1.0, 0.1]),
        count(1, 2)
    );
    assert!(matches!(
        refused(AxisLayout::Single, &[1.0, f64::NAN]),
        RopeError::Frequency { index: 1, .. }
    ));
    let list = Frequencies::listed(vec![1.0]).expect("valid");
    assert_eq!(
        list.with_scaling(Scaling::Linear { factor: 2.0 }),
        Err(RopeError::ListScaled {
            rope_type: "linear"
        })
    );
}

#[test]
fn lanes_and_lists_survive_serialization_and_are_checked_on_the_way_back() {
    let spec = spec(4, lanes(&[(1, 0), (0, 1)]), &[1.0, -0.1]).expect("valid");
    let json = serde_json::to_string(&spec).expect("serializes");
    let back: RotarySpec = serde_json::from_str(&json).expect("valid");
    assert_eq!(back, spec);
    let wrong = json.replace("\"axis\":1", "\"axis\":9");
    assert_ne!(wrong, json);
    let error = serde_json::from_str::<RotarySpec>(&wrong).expect_err("refused");
    assert!(error.to_string().contains("lane 0 names axis 9"), "{error}");
    // As written before lists were there.
    let plain = RotarySpec::builder(4).build().expect("valid");
    let json = serde_json::to_string(plain.frequencies()).expect("serializes");
    assert_eq!(
        json,
        r#"{"theta":10000.0,"scaling":{"rope_type":"default"}}"#
    );
}

fn arranged(layout: AxisLayout, pairs: usize) -> Result<RotarySpec, RopeError> {
    RotarySpec::builder(2 * pairs)
        .axis_layout(layout)
        .theta(64.0)
        .build()
}

fn axes(layout: AxisLayout, pairs: usize) -> String {
    let spec = arranged(layout, pairs).expect("a valid layout");
    let lanes = spec.lane_map().lanes().iter();
    lanes
        .map(|lane| char::from(b"THWX"[usize::from(lane.axis)]))
        .collect()
}

#[test]
fn arrangements_written_out_by_hand() {
    assert_eq!(axes(AxisLayout::Contiguous(vec![2, 3, 3]), 8), "TTHHHWWW");
    assert_eq!(axes(AxisLayout::Striped(vec![4, 2, 2]), 8), "THWTHWTT");
    assert_eq!(axes(AxisLayout::Striped(vec![3, 3, 2]), 8), "THWTHWTH");
    assert_eq!(axes(AxisLayout::Ernie(vec![3, 3, 2]), 8), "HWHWHWTT");
    assert_eq!(axes(AxisLayout::PerAxis(vec![4, 4]), 8), "TTTTHHHH");
    assert_eq!(axes(AxisLayout::PerAxisStriped(vec![4, 4]), 8), "HTHTHTHT");
    // The two that vLLM's users pin.
    assert_eq!(axes(AxisLayout::Balanced(vec![2, 2]), 4), "THTH");
    assert_eq!(axes(AxisLayout::Balanced(vec![2, 3, 3]), 8), "THWHWHWT");
    assert_eq!(
        axes(AxisLayout::PerChannel(vec![1, 1, 1, 1]), 4),
        "TTHHWWXX"
    );
}

#[test]
fn frequencies_restart_per_axis_and_equal_axes_share_columns() {
    let spec = arranged(AxisLayout::PerAxis(vec![2, 3, 3]), 8).expect("a valid layout");
    let columns = |spec: &RotarySpec| -> Vec<u32> {
        let lanes = spec.lane_map().lanes().iter();
        lanes.map(|lane| lane.frequency).collect()
    };
    assert_eq!(columns(&spec), [0, 1, 2, 3, 4, 2, 3, 4]);
    assert_eq!(spec.lane_map().frequency_count(), 5);
    // 64^(-j / 2), then 64^(-j / 3).
    let expected = [1.0, 1.0 / 8.0, 1.0, 1.0 / 4.0, 1.0 / 16.0];
    for (found, expected) in spec.inv_freq(None).expect("valid").iter().zip(expected) {
        assert!((found - expected).abs() < 1e-15, "{found}, {expected}");
    }
    let spec = arranged(AxisLayout::PerAxisStriped(vec![3, 3]), 6).expect("a valid layout");
    assert_eq!(columns(&spec), [0, 0, 1, 1, 2, 2]);
    assert!(matches!(
        arranged(AxisLayout::PerAxisStriped(vec![2, 4]), 6),
        Err(RopeError::SectionsNotRealisable { .. })
    ));
}

/// The oracle derives axis and frequency of each pair from the layout's definition alone.
fn agrees_with_the_oracle(layout: AxisLayout) {
    let (axes, pairs) = (layout.axis_count(), layout.sections().iter().sum::<usize>());
    let positions = Positions::new(axes, &[3, 5, 7][..axes]).expect("valid positions");
    let spec = RotarySpec::builder(2 * pairs).axis_layout(layout);
    let spec = spec.build().expect("a valid specification");
    let found = TokenAngles::<f64>::new(&spec, &positions, None).expect("valid angles");
    let expected = HeadMatrix::new(&spec, &positions, 0, None).expect("valid positions");
    for (pair, cos) in found.rows()[..pairs].iter().enumerate() {
        let expected = expected.get(pair, pair);
        let layout = spec.axis_layout();
        assert!((cos - expected).abs() < 1e-12, "{layout:?}, pair {pair}");
    }
}

#[test]
fn striped_axes_of_uneven_sections_turn_by_their_own_frequencies() {
    for sections in [vec![4, 4], vec![1, 1, 2], vec![2, 3, 3], vec![6, 7]] {
        agrees_with_the_oracle(AxisLayout::PerAxisStriped(sections));
    }
}

#[test]
fn balanced_sections_are_those_of_the_oracle_also_without_axis_0() {
    for first in 0..5 {
        for second in 0..5 {
            for third in 0..5 {
                if first + second + third > 0 {
                    agrees_with_the_oracle(AxisLayout::Balanced(vec![first, second, third]));
                }
                if first + second > 0 {
                    agrees_with_the_oracle(AxisLayout::Balanced(vec![first, second]));
                }
            }
        }
    }
}

#[test]
fn sections_that_sum_right_but_cannot_be_arranged_are_refused() {
    let striped = AxisLayout::Striped(vec![2, 20, 10]);
    assert!(matches!(
        arranged(striped, 32),
        Err(RopeError::SectionsNotRealisable { pairs: 32, .. })
    ));
    let ernie = AxisLayout::Ernie(vec![2, 4, 2]);
    assert!(matches!(
        arranged(ernie, 8),
        Err(RopeError::SectionsNotRealisable { .. })
    ));
}
