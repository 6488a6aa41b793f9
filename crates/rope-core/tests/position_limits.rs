//! Position ids beyond the limit of a rotation, and grids beyond the limit of a prompt: errors, not
//! overflow.

use rope_core::position_ids::{
    PositionIdsError, PositionRules, Prompt, TokenIds, vision_cu_seqlens, vision_positions,
    vision_windows, zigzag,
};
use rope_core::{
    Angles, AxisLayout, CosSinTable, Direction, Frequencies, Geometry, HeadNorm, HeadsLayout,
    HeadsMut, HeadsRef, Layout, NormInput, Pairing, Positions, RopeError, RotarySpec, Rotator,
    Strides, TokenAngles,
};

fn video(grid: [usize; 3], seconds: f64, videos: usize) -> Result<(), RopeError> {
    const VIDEO: i64 = 8;
    let tokens: Vec<i64> = std::iter::repeat_n([0, VIDEO, VIDEO], videos)
        .flatten()
        .collect();
    let prompt = Prompt {
        input_ids: &tokens,
        video_grids: &vec![grid; videos],
        seconds_per_grid: Some(&vec![seconds; videos]),
        ..Prompt::default()
    };
    let rules = PositionRules::new("qwen2_5_vl", TokenIds::new(7, VIDEO))?;
    rules.position_ids(&prompt).map(|_| ())
}

#[test]
fn ids_beyond_any_position_are_refused() {
    let two_frames = [2, 2, 2];
    assert!(video(two_frames, 0.5, 2).is_ok());
    for seconds in [1e30, 1e10, 4e9] {
        assert!(
            matches!(
                video(two_frames, seconds, 1),
                Err(RopeError::PositionIds(PositionIdsError::Parameter {
                    parameter: "seconds_per_grid",
                    found,
                    ..
                })) if found == seconds
            ),
            "{seconds}"
        );
    }
    // Infinite in f32, in which no number times it is 0.
    assert!(video([1, 2, 4], 1e300, 1).is_err());
    let rules = PositionRules::new("qwen2_5_vl", TokenIds::new(7, 8)).expect("a family");
    assert!(rules.with_ids_per_second(1e300).is_err());
    // Each video within range, both together not.
    assert!(video(two_frames, 1e9, 1).is_ok());
    assert!(matches!(
        video(two_frames, 1e9, 2),
        Err(RopeError::PositionOutOfRange { found, token: 5, .. }) if found > 1 << 31
    ));
}

#[test]
fn grids_beyond_counting_are_refused() {
    for grid in [[1 << 62, 2, 2], [1 << 40, 1 << 40, 1 << 40]] {
        assert!(matches!(
            video(grid, 1.0, 1),
            Err(RopeError::PositionIds(PositionIdsError::GridTokens {
                found: 2,
                ..
            }))
        ));
    }
}

fn is_too_many<T: std::fmt::Debug>(result: Result<T, RopeError>) {
    assert!(
        matches!(
            result,
            Err(RopeError::PositionIds(PositionIdsError::TooMany { .. }))
        ),
        "{result:?}"
    );
}

#[test]
fn towers_beyond_memory_are_refused() {
    // The products of the first two do not fit in 64 bits; 2^45 patches do not fit in memory.
    for grid in [
        [1, 1 << 32, 1 << 32],
        [1 << 62, 2, 2],
        [1 << 5, 1 << 20, 1 << 20],
    ] {
        is_too_many(vision_positions(&[grid], 2));
        is_too_many(vision_windows(&[grid], 2, 4));
    }
    is_too_many(vision_cu_seqlens(&[[1, 1 << 32, 1 << 32]]));
    is_too_many(vision_cu_seqlens(&[
        [1, 1 << 31, 1 << 32],
        [1, 1 << 31, 1 << 32],
    ]));
    is_too_many(vision_cu_seqlens(&[[1 << 45, 1, 1]]));

    let whole = vision_windows(&[[1, 4, 6]], 1, 6);
    assert_eq!(vision_windows(&[[1, 4, 6]], 1, usize::MAX), whole);
    assert!(vision_windows(&[], usize::MAX, 1).is_ok());
}

#[test]
fn splits_beyond_memory_or_counting_are_refused() {
    is_too_many(zigzag(&[0, 1 << 45], 1, 0));
    is_too_many(zigzag(&[0, usize::MAX], 1, 0));
    assert!(matches!(
        zigzag(&[0, usize::MAX], 2, 0),
        Err(RopeError::PositionIds(PositionIdsError::Zigzag { .. }))
    ));
    let error = zigzag(&[0, 8], usize::MAX, 0).expect_err("too few tokens");
    assert!(
        error.to_string().contains("2 x 18446744073709551615"),
        "{error}"
    );
    assert_eq!(zigzag(&[0, 0], 1 << 63, 0), Ok(Vec::new()));
}

#[test]
fn text_beyond_any_position_or_memory_is_refused() {
    let out_of_range = |result: Result<Positions, RopeError>, expected: i64| {
        let is_it = matches!(
            result,
            Err(RopeError::PositionOutOfRange { found, .. }) if found == expected
        );
        assert!(is_it, "{result:?}");
    };
    out_of_range(Positions::text(1, 1 << 31, 2), (1 << 31) + 1);
    out_of_range(Positions::text(3, 0, 1 << 40), (1 << 40) - 1);
    out_of_range(Positions::text(1, 7, usize::MAX), i64::MAX);
    is_too_many(Positions::text(1 << 40, 0, 1 << 20));
    is_too_many(Positions::text(usize::MAX, 0, 3));
    assert!(matches!(
        Positions::text(0, 0, 1),
        Err(RopeError::PositionShape { .. })
    ));
    let last = Positions::text(2, (1 << 31) - 1, 2).expect("up to 2^31");
    assert_eq!((last.highest(), last.tokens()), (1 << 31, 2));
    assert_eq!(Positions::text(2, 5, 0).map(|empty| empty.highest()), Ok(0));
}

#[test]
fn rows_and_continuations_beyond_counting_are_refused() {
    use rope_core::position_ids::Rows;
    let rules = PositionRules::new("qwen2_vl", TokenIds::new(7, 8)).expect("a family");
    let rows = |count| {
        let rows = Rows::Batch(count);
        rules.position_ids(&Prompt {
            rows,
            ..Prompt::default()
        })
    };
    assert_eq!(rows(3).map(|ids| ids.rope_deltas().len()), Ok(3));
    for count in [1 << 40, usize::MAX] {
        assert!(matches!(
            rows(count),
            Err(RopeError::PositionIds(PositionIdsError::Batch {
                tokens: 0,
                ..
            }))
        ));
    }
    let ids = rules.position_ids(&Prompt {
        input_ids: &[1, 2],
        ..Prompt::default()
    });
    let ids = ids.expect("two tokens of text");
    assert_eq!(ids.continuation(0, 0).map(|none| none.tokens()), Ok(0));
    for count in [1 << 32, usize::MAX] {
        let beyond = ids.continuation(0, count);
        assert!(
            matches!(beyond, Err(RopeError::PositionOutOfRange { .. })),
            "{beyond:?}"
        );
    }
}

/// A prompt may end at the highest position: nothing follows it, and nothing may.
#[test]
fn after_the_highest_position_come_no_tokens() {
    let rules = PositionRules::new("qwen2_5_vl", TokenIds::new(7, 8)).expect("a family");
    let ids = rules.position_ids(&Prompt {
        input_ids: &[8, 8],
        video_grids: &[[2, 2, 2]],
        seconds_per_grid: Some(&[f64::from(1 << 30)]),
        ..Prompt::default()
    });
    let ids = ids.expect("two frames");
    assert_eq!(ids.axis(0)[1], f64::from(1_u32 << 31));
    assert_eq!(ids.continuation(0, 0).map(|none| none.tokens()), Ok(0));
    assert!(matches!(
        ids.continuation(0, 1),
        Err(RopeError::PositionOutOfRange { token: 0, .. })
    ));
}

/// Sizes whose products wrap around are of no table and no buffer.
#[test]
fn rows_and_tensors_beyond_counting_are_refused() {
    let spec = RotarySpec::builder(8).build().expect("a specification");
    let mut table = CosSinTable::<f32>::new(&spec, None).expect("its frequencies");
    table.grow_to(3).expect("four rows");
    assert!(table.row(3).is_some_and(|row| row.len() == 8));
    for beyond in [4, 1 << 61, 1 << 62, usize::MAX] {
        assert_eq!(table.row(beyond), None);
    }
    for layout in Layout::ALL {
        let wide = HeadsLayout::contiguous(layout, 1 << 32, 1 << 32, 4, 8);
        assert_eq!(wide.elems(), usize::MAX);
        let refused = HeadsRef::new(&[0.0; 64], wide).err();
        assert!(matches!(refused, Some(RopeError::BufferTooSmall { .. })));
    }
}

/// A tensor without heads has no elements, whatever its other sizes are.
#[test]
fn empty_tensors_of_any_size_are_nothing_to_do() {
    let spec = RotarySpec::builder(8).build().expect("a specification");
    let strides = Strides {
        batch: 0,
        seq: 0,
        head: 8,
    };
    let layout = |batch, seq, heads| HeadsLayout {
        batch,
        seq,
        heads,
        head_dim: 8,
        strides,
    };
    let rows = [0.0_f32; 16];
    let heads = 1 << 62;
    let head_angles = Angles::Heads { rows: &rows, heads };
    for (layout, angles, fits) in [
        // Two rows, shared by any number of samples.
        (layout(usize::MAX, 2, 0), Angles::Tokens(&rows), true),
        (layout(1 << 40, 1 << 40, 0), Angles::Tokens(&rows), false),
        (layout(0, 2, heads), head_angles, false),
    ] {
        let rotator = Rotator::new(spec.geometry(), angles).expect("any rows");
        let empty = || HeadsMut::<f32>::new(&mut [], layout).expect("no elements");
        assert_eq!(rotator.rotate(empty(), None).is_ok(), fits, "{layout:?}");
        let norm = HeadNorm::new(1e-6).expect("a norm");
        let input = NormInput {
            x: empty().into(),
            weight: None,
        };
        let outcome = rotator.norm_rotate(&norm, input, None);
        assert_eq!(outcome.is_ok(), fits, "{layout:?}");
    }
}

#[test]
fn strides_of_single_rows_may_be_any_number() {
    #[repr(align(64))]
    struct Lines([f32; 32]);
    let layout = HeadsLayout {
        batch: 1,
        seq: 1,
        heads: 1,
        head_dim: 32,
        strides: Strides {
            batch: usize::MAX,
            seq: usize::MAX,
            head: usize::MAX,
        },
    };
    let geometry = Geometry::new(32, 32, 0, Pairing::Half, false).expect("valid");
    let angles = [[0.0f32; 16], [1.0; 16]].concat();
    let rotator = Rotator::new(geometry, Angles::Tokens(&angles)).expect("valid");
    let mut x = Lines(std::array::from_fn(|i| i as f32));
    let q = HeadsMut::new(&mut x.0, layout).expect("one row");
    rotator
        .with_streaming(0)
        .apply(Direction::Forward, q, None)
        .expect("a quarter turn");
    assert_eq!((x.0[0], x.0[16], x.0[31]), (-16.0, 0.0, 15.0));
}

#[test]
fn frequencies_beyond_floats_are_refused() {
    // theta to the power of -116/128 is beyond the highest frequency.
    let build = |theta| {
        let spec = RotarySpec::builder(128).axis_layout(AxisLayout::Single);
        spec.theta(theta).build()
    };
    assert!(matches!(
        build(1e-310),
        Err(RopeError::Frequency { index: 58, .. })
    ));
    assert!(build(1e-280).is_ok());
    // Finite, but not times the highest position.
    for found in [1e281, -1e305, f64::INFINITY, f64::NAN] {
        let refused = Frequencies::listed(vec![1.0, found]);
        assert!(matches!(
            refused,
            Err(RopeError::Frequency { index: 1, .. })
        ));
    }
}

#[test]
fn angles_of_the_highest_frequency_are_finite() {
    let highest = Frequencies::listed(vec![1e280]).expect("the highest");
    let spec = RotarySpec::builder(2).frequencies(highest).build();
    let positions = Positions::new(1, &[1 << 31]).expect("the highest");
    let angles = TokenAngles::<f64>::new(&spec.expect("valid"), &positions, None);
    let angles = angles.expect("in range");
    let Angles::Tokens(values) = angles.angles() else {
        panic!("angles of tokens")
    };
    assert!(values.iter().all(|value| value.is_finite()), "{values:?}");
}

#[test]
fn angle_gradients_without_heads_are_zero_for_any_number_of_samples() {
    let geometry = Geometry::new(2, 2, 0, Pairing::Half, false).expect("valid");
    let layout = HeadsLayout::contiguous(Layout::Bsnd, usize::MAX, 1, 0, 2);
    let rotator = Rotator::new(geometry, Angles::Tokens(&[1.0f32, 0.0])).expect("valid");
    let view = || HeadsRef::new(&[0f32; 0], layout).expect("empty");
    let mut sums = [1.0; 2];
    rotator
        .angle_gradients((view(), view()), None, &mut sums)
        .expect("nothing to add");
    assert_eq!(sums, [0.0; 2]);
}
