//! Properties of any rotation, tried on random ones, in f64.

use proptest::collection::vec;
use proptest::prelude::*;
use rope_check::cases::values;
use rope_core::{
    AxisLayout, Direction, HeadsLayout, HeadsMut, Layout, MatrixForm, Pairing, Positions,
    RotarySpec, Rotator, SignedPermutation, TokenAngles,
};

/// Rounding of an angle of at most `HIGHEST` rad, and of a few operations on values of order 1.
const TOLERANCE: f64 = 1e-10;
const HIGHEST: i64 = 10_000;
const HEADS: usize = 2;

/// Pairs, axis layout, and the axes' number; sections that each axis layout can arrange.
fn axis_layouts() -> impl Strategy<Value = (usize, AxisLayout)> {
    let sections = vec(0usize..7, 1..=4).prop_map(|mut sections| {
        // An even number of pairs, for Quarter, and at least one frequency for each axis.
        sections.iter_mut().for_each(|s| *s += 1);
        sections[0] += sections.iter().sum::<usize>() % 2;
        sections
    });
    let sum = |sections: &[usize]| sections.iter().sum::<usize>();
    prop_oneof![
        (1usize..24).prop_map(|pairs| (2 * pairs, AxisLayout::Single)),
        sections
            .clone()
            .prop_map(move |s| (sum(&s), AxisLayout::Contiguous(s))),
        sections
            .clone()
            .prop_map(move |s| (sum(&s), AxisLayout::PerAxis(s))),
        sections.prop_map(move |s| (sum(&s), AxisLayout::PerChannel(s))),
        // Axis 0 takes the rest, and is the longest.
        (1usize..6, 0usize..6).prop_map(|(others, more)| {
            let pairs = 3 * others + 2 * more + others % 2;
            let first = pairs - 2 * others;
            (pairs, AxisLayout::Striped(vec![first, others, others]))
        }),
        (1usize..8, 0usize..5).prop_map(|(alternating, time)| {
            let pairs = 2 * alternating + 2 * time;
            (
                pairs,
                AxisLayout::Ernie(vec![alternating, alternating, 2 * time]),
            )
        }),
    ]
}

fn specs() -> impl Strategy<Value = RotarySpec> {
    let pairing = proptest::sample::select(Pairing::ALL.to_vec());
    let scaling = prop_oneof![Just(1.0), 0.5f64..2.0];
    (axis_layouts(), pairing, 0usize..4, 0usize..4, scaling).prop_map(
        |((pairs, axes), pairing, before, after, scaling)| {
            RotarySpec::builder(before + 2 * pairs + after)
                .rotary_dim(2 * pairs)
                .rotary_offset(before)
                .pairing(pairing)
                .axis_layout(axes)
                .attention_scaling(scaling)
                .build()
                .expect("the sections can be arranged")
        },
    )
}

fn is_rotation(spec: &RotarySpec) -> bool {
    !matches!(spec.axis_layout(), AxisLayout::PerChannel(_))
}

/// Ids on up to four axes for up to six tokens.
fn ids() -> impl Strategy<Value = Vec<Vec<i64>>> {
    (1usize..=6).prop_flat_map(|tokens| vec(vec(0..HIGHEST, tokens), 4))
}

fn positions(spec: &RotarySpec, ids: &[Vec<i64>]) -> Positions {
    let ids: Vec<i64> = ids[..spec.axis_count()].concat();
    Positions::new(spec.axis_count(), &ids).expect("ids in range")
}

fn x_for(spec: &RotarySpec, tokens: usize, seed: u64) -> Vec<f64> {
    values(seed, tokens * HEADS * spec.head_dim())
}

/// x as packed tokens, rotated by f64 angles.
fn apply(spec: &RotarySpec, positions: &Positions, direction: Direction, x: &[f64]) -> Vec<f64> {
    let angles = TokenAngles::<f64>::new(spec, positions, None).expect("valid positions");
    let layout =
        HeadsLayout::contiguous(Layout::Tnd, 1, positions.tokens(), HEADS, spec.head_dim());
    let mut y = x.to_vec();
    Rotator::new(spec.geometry(), angles.angles())
        .expect("valid angles")
        .apply(
            direction,
            HeadsMut::new(&mut y, layout).expect("fits"),
            None,
        )
        .expect("valid shapes");
    y
}

fn rotate(spec: &RotarySpec, positions: &Positions, x: &[f64]) -> Vec<f64> {
    apply(spec, positions, Direction::Forward, x)
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn assert_close(found: &[f64], expected: &[f64], what: &str) -> Result<(), TestCaseError> {
    prop_assert_eq!(found.len(), expected.len());
    for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
        let error = (found - expected).abs();
        prop_assert!(
            error < TOLERANCE,
            "{}: element {}: {} instead of {}",
            what,
            i,
            found,
            expected
        );
    }
    Ok(())
}

/// The same specification with another pairing, axis layout or attention scaling.
fn like(spec: &RotarySpec, pairing: Pairing, axes: AxisLayout, scaling: f64) -> RotarySpec {
    RotarySpec::builder(spec.head_dim())
        .rotary_dim(spec.rotary_dim())
        .rotary_offset(spec.rotary_offset())
        .pairing(pairing)
        .axis_layout(axes)
        .attention_scaling(scaling)
        .build()
        .expect("as valid as the other")
}

fn unscaled(spec: &RotarySpec) -> RotarySpec {
    like(spec, spec.pairing(), spec.axis_layout().clone(), 1.0)
}

/// The rotated channels of each head of x, one after the other.
fn rotated_channels(spec: &RotarySpec, x: &[f64]) -> Vec<f64> {
    let rotated = spec.rotary_offset()..spec.rotary_offset() + spec.rotary_dim();
    let heads = x.chunks(spec.head_dim());
    heads
        .flat_map(|head| head[rotated.clone()].to_vec())
        .collect()
}

/// x @ M, or x @ M^T.
fn product(x: &[f64], permutation: &SignedPermutation, transposed: bool) -> Vec<f64> {
    let (dim, matrix) = (x.len(), permutation.matrix());
    let entry = |row: usize, column: usize| {
        let (row, column) = if transposed {
            (column, row)
        } else {
            (row, column)
        };
        f64::from(matrix[row * dim + column])
    };
    let column = |c: usize| (0..dim).map(|k| x[k] * entry(k, c)).sum();
    (0..dim).map(column).collect()
}

fn times(a: &[f64], b: &[f64]) -> Vec<f64> {
    a.iter().zip(b).map(|(a, b)| a * b).collect()
}

fn sum(a: &[f64], b: &[f64]) -> Vec<f64> {
    a.iter().zip(b).map(|(a, b)| a + b).collect()
}

/// The matrix form of a rotation against the elementwise one, in both directions: by the formulas
/// with rows of full width, and by the form that kernels take.
fn check_matrix_form(spec: &RotarySpec, positions: &Positions) -> Result<(), TestCaseError> {
    let angles = TokenAngles::<f64>::new(spec, positions, None).expect("valid positions");
    let [cos, sin] = angles.cos_sin();
    let lanes = spec.geometry().lane_count();
    let forward = MatrixForm::new(spec.geometry(), Direction::Forward);
    let adjoint = MatrixForm::new(spec.geometry(), Direction::Adjoint);
    let x = x_for(spec, positions.tokens(), 10);
    let rows = rotated_channels(spec, &x);
    let mut found: [Vec<f64>; 3] = Default::default();
    for (row, x) in rows.chunks(spec.rotary_dim()).enumerate() {
        let start = row / HEADS * lanes;
        let wide = |values: &[f64], lanes: &[u32]| -> Vec<f64> {
            lanes
                .iter()
                .map(|lane| values[start + *lane as usize])
                .collect()
        };
        let (c, s) = (
            wide(&cos, forward.cos_lanes()),
            wide(&sin, forward.sin_lanes()),
        );
        let (own, partner) = (forward.own(), forward.partner());
        // y = (x @ P) cos + (x @ R) sin
        let first = times(&product(x, own, false), &c);
        found[0].extend(sum(&first, &times(&product(x, partner, false), &s)));
        // dx = (dy cos) @ P^T + (dy sin) @ R^T
        let first = product(&times(x, &c), own, true);
        found[1].extend(sum(&first, &product(&times(x, &s), partner, true)));
        let (c, s) = (
            wide(&cos, adjoint.cos_lanes()),
            wide(&sin, adjoint.sin_lanes()),
        );
        let first = times(&product(x, adjoint.own(), false), &c);
        found[2].extend(sum(
            &first,
            &times(&product(x, adjoint.partner(), false), &s),
        ));
    }
    let whole = |direction| rotated_channels(spec, &apply(spec, positions, direction, &x));
    assert_close(&found[0], &whole(Direction::Forward), "x cos + (x @ R) sin")?;
    assert_close(
        &found[1],
        &whole(Direction::Adjoint),
        "dy cos + (dy sin) @ R^T",
    )?;
    assert_close(
        &found[2],
        &whole(Direction::Adjoint),
        "the adjoint's own form",
    )
}

/// The rotations of image and video models: whole heads of 128 channels by one axis, 64 + 64 by two
/// and 44 + 44 + 40 by three, with frequencies that restart on each axis.
#[test]
fn one_matrix_for_one_two_and_three_axes() {
    let axes = [
        AxisLayout::Single,
        AxisLayout::PerAxis(vec![32, 32]),
        AxisLayout::PerAxis(vec![22, 22, 20]),
    ];
    for pairing in Pairing::ALL {
        for axes in &axes {
            let spec = RotarySpec::builder(128)
                .pairing(pairing)
                .axis_layout(axes.clone());
            let spec = spec.build().expect("128 channels");
            let ids: Vec<i64> = (0..4 * spec.axis_count() as i64)
                .map(|i| 37 * i % 101)
                .collect();
            let positions = Positions::new(spec.axis_count(), &ids).expect("ids in range");
            check_matrix_form(&spec, &positions)
                .unwrap_or_else(|e| panic!("{pairing:?} {axes:?}: {e}"));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn norms_are_kept(spec in specs().prop_filter("a rotation", is_rotation), ids in ids()) {
        let spec = unscaled(&spec);
        let positions = positions(&spec, &ids);
        let x = x_for(&spec, positions.tokens(), 1);
        let y = rotate(&spec, &positions, &x);
        for (x, y) in x.chunks(spec.head_dim()).zip(y.chunks(spec.head_dim())) {
            prop_assert!((dot(x, x) - dot(y, y)).abs() < TOLERANCE);
        }
    }

    #[test]
    fn a_product_with_a_signed_permutation_is_the_rotation(spec in specs(), ids in ids()) {
        check_matrix_form(&spec, &positions(&spec, &ids))?;
    }

    #[test]
    fn the_adjoint_undoes_a_rotation_up_to_the_scaling_squared(
        spec in specs().prop_filter("a rotation", is_rotation),
        ids in ids(),
    ) {
        let positions = positions(&spec, &ids);
        let x = x_for(&spec, positions.tokens(), 2);
        let back = apply(&spec, &positions, Direction::Adjoint, &rotate(&spec, &positions, &x));
        let rotated = spec.rotary_offset()..spec.rotary_offset() + spec.rotary_dim();
        let expected: Vec<f64> = x
            .iter()
            .enumerate()
            .map(|(i, x)| {
                let scaled = rotated.contains(&(i % spec.head_dim()));
                if scaled { x * spec.attention_scaling().powi(2) } else { *x }
            })
            .collect();
        assert_close(&back, &expected, "R'R x")?;
    }

    #[test]
    fn the_adjoint_is_the_transpose(spec in specs(), ids in ids()) {
        let positions = positions(&spec, &ids);
        let (x, y) = (x_for(&spec, positions.tokens(), 3), x_for(&spec, positions.tokens(), 4));
        let forward = dot(&rotate(&spec, &positions, &x), &y);
        let adjoint = dot(&x, &apply(&spec, &positions, Direction::Adjoint, &y));
        prop_assert!(
            (forward - adjoint).abs() < TOLERANCE,
            "<Rx, y> = {forward}, <x, R'y> = {adjoint}"
        );
    }

    #[test]
    fn angles_add(
        spec in specs().prop_filter("a rotation", is_rotation),
        first in ids(),
        second in vec(0..HIGHEST, 4 * 6),
    ) {
        let spec = unscaled(&spec);
        let second = second.chunks(6).map(|ids| ids[..first[0].len()].to_vec());
        let second: Vec<Vec<i64>> = second.collect();
        let sum: Vec<Vec<i64>> = first
            .iter()
            .zip(&second)
            .map(|(a, b)| a.iter().zip(b).map(|(a, b)| a + b).collect())
            .collect();
        // InterleaveHalf leaves its output in the order that Half reads.
        let next = match spec.pairing() {
            Pairing::InterleaveHalf => Pairing::Half,
            other => other,
        };
        let next = like(&spec, next, spec.axis_layout().clone(), 1.0);
        let x = x_for(&spec, first[0].len(), 5);
        let once = rotate(&spec, &positions(&spec, &first), &x);
        let twice = rotate(&next, &positions(&spec, &second), &once);
        assert_close(&twice, &rotate(&spec, &positions(&spec, &sum), &x), "R(b) R(a) x")?;
    }

    #[test]
    fn only_relative_positions_matter(
        spec in specs().prop_filter("a rotation", is_rotation),
        q_ids in ids(),
        k_ids in vec(0..HIGHEST, 4 * 6),
        shift in vec(0..HIGHEST, 4),
    ) {
        let spec = unscaled(&spec);
        let tokens = q_ids[0].len();
        let k_ids: Vec<Vec<i64>> = k_ids.chunks(6).map(|ids| ids[..tokens].to_vec()).collect();
        let shifted = |ids: &[Vec<i64>]| -> Vec<Vec<i64>> {
            ids.iter().zip(&shift).map(|(ids, by)| ids.iter().map(|id| id + by).collect()).collect()
        };
        let (q, k) = (x_for(&spec, tokens, 6), x_for(&spec, tokens, 7));
        let scores = |q_ids: &[Vec<i64>], k_ids: &[Vec<i64>]| -> Vec<f64> {
            let q = rotate(&spec, &positions(&spec, q_ids), &q);
            let k = rotate(&spec, &positions(&spec, k_ids), &k);
            let heads = q.chunks(spec.head_dim()).zip(k.chunks(spec.head_dim()));
            heads.map(|(q, k)| dot(q, k)).collect()
        };
        assert_close(&scores(&shifted(&q_ids), &shifted(&k_ids)), &scores(&q_ids, &k_ids), "q.k")?;
    }

    #[test]
    fn packed_sequences_are_rotated_as_separate_ones(
        spec in specs(),
        first in ids(),
        second in ids(),
        direction in proptest::sample::select(vec![Direction::Forward, Direction::Adjoint]),
    ) {
        let packed = first.iter().zip(&second).map(|(a, b)| [&a[..], b].concat());
        let packed: Vec<Vec<i64>> = packed.collect();
        let positions = [&packed, &first, &second].map(|ids| positions(&spec, ids));
        let x = x_for(&spec, positions[0].tokens(), 8);
        let (a, b) = x.split_at(positions[1].tokens() * HEADS * spec.head_dim());
        let separate = [(&positions[1], a), (&positions[2], b)];
        let separate = separate.map(|(positions, x)| apply(&spec, positions, direction, x));
        prop_assert_eq!(apply(&spec, &positions[0], direction, &x), separate.concat());
    }

    #[test]
    fn text_is_rotated_as_by_plain_rope(
        spec in specs(),
        start in 0..HIGHEST as u32,
        tokens in 1usize..7,
    ) {
        prop_assume!(!matches!(spec.axis_layout(), AxisLayout::PerAxis(_)));
        let plain = like(&spec, spec.pairing(), AxisLayout::Single, spec.attention_scaling());
        let x = x_for(&spec, tokens, 9);
        let text = Positions::text(spec.axis_count(), start, tokens).expect("in range");
        let found = rotate(&spec, &text, &x);
        let expected = rotate(&plain, &Positions::text(1, start, tokens).expect("in range"), &x);
        prop_assert_eq!(found, expected);
    }
}
