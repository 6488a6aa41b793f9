//! Position ids beyond what a rotation takes, and grids beyond what a prompt holds: errors, not
//! overflow.

use rope_core::position_ids::{
    PositionIdsError, PositionRules, Prompt, TokenIds, vision_cu_seqlens, vision_positions,
    vision_windows, zigzag,
};
use rope_core::{AxisLayout, Positions, RopeError, RotarySpec};

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
    assert!(matches!(
        zigzag(&[0, usize::MAX], 1, 0),
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
fn frequencies_beyond_floats_are_refused() {
    // theta to the power of -126/128 is beyond the largest f64.
    let build = |theta| {
        let spec = RotarySpec::builder(128).axes(AxisLayout::Single);
        spec.theta(theta).build()
    };
    assert!(matches!(
        build(1e-320),
        Err(RopeError::Frequency { index: 62, .. })
    ));
    assert!(build(1e-300).is_ok());
}
