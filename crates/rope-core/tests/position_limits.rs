//! Position ids beyond what a rotation takes, and grids beyond what a prompt holds: errors, not
//! overflow.

use rope_core::RopeError;
use rope_core::position_ids::{PositionIdsError, PositionRules, Prompt, TokenIds};

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
