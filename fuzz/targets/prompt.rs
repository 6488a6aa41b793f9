//! Prompts to position ids, for every family and version, and the splits and grids beside them:
//! ids or an error, never more ids than tokens ask for.

#![no_main]

use arbitrary::{Result, Unstructured};
use fuzz::{number, one_of, size};
use rope_core::Positions;
use rope_core::position_ids::{
    Compatibility, PositionRules, Prompt, Rows, TokenIds, vision_cu_seqlens, vision_positions,
    vision_windows, zigzag,
};

const FAMILIES: [&str; 7] = [
    "qwen2_vl",
    "qwen2_5_vl",
    "ernie4_5_vl_moe",
    "qwen3_vl",
    "glm4v",
    "qwen2_5_omni",
    "qwen3_omni_moe",
];
/// Results of more elements are possible, and slow.
const MOST: usize = 1 << 14;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let _ = run(&mut Unstructured::new(bytes));
});

fn run(u: &mut Unstructured) -> Result<()> {
    match u.int_in_range(0..=7)? {
        0 => vision(u),
        1 => {
            let cu_seqlens = list(u, |u| size(u, 64))?;
            let tokens = cu_seqlens.last().copied().unwrap_or(0);
            if tokens <= MOST || tokens >= 1 << 60 {
                let _ = zigzag(&cu_seqlens, size(u, 4)?, size(u, 4)?);
            }
            Ok(())
        }
        _ => prompt(u),
    }
}

fn list<T>(u: &mut Unstructured, one: impl Fn(&mut Unstructured) -> Result<T>) -> Result<Vec<T>> {
    let count = u.int_in_range(0..=6)?;
    (0..count).map(|_| one(u)).collect()
}

fn grid(u: &mut Unstructured) -> Result<[usize; 3]> {
    let [t, h, w] = [size(u, 3)?, size(u, 3)?, size(u, 3)?];
    let merge = if u.ratio(7, 8)? { 2 } else { 1 };
    Ok([t, h.saturating_mul(merge), w.saturating_mul(merge)])
}

fn vision(u: &mut Unstructured) -> Result<()> {
    let grids = list(u, grid)?;
    let (merge, window) = (size(u, 3)?, size(u, 4)?);
    let sum = |of: fn([u128; 3]) -> u128| {
        let of = grids.iter().map(|grid| of(grid.map(|n| n as u128)));
        of.fold(0, u128::saturating_add)
    };
    let patches = sum(|[t, h, w]| t.saturating_mul(h).saturating_mul(w));
    let frames = sum(|[t, ..]| t);
    let merged = patches / (merge as u128 * merge as u128).max(1);
    let is_slow = |results| (MOST as u128..1 << 60).contains(&results);
    if [patches, frames, merged].into_iter().any(is_slow) {
        return Ok(());
    }
    if let Ok(positions) = vision_positions(&grids, merge) {
        assert!(positions.tokens() as u128 <= patches);
    }
    if let Ok(ends) = vision_cu_seqlens(&grids) {
        assert!(ends.is_sorted() && ends[0] == 0);
    }
    if let Ok(windows) = vision_windows(&grids, merge, window) {
        let mut order = windows.window_index;
        order.sort_unstable();
        assert!(order.iter().copied().eq(0..order.len()), "every token once");
        assert!(windows.cu_window_seqlens.is_sorted());
    }
    Ok(())
}

fn prompt(u: &mut Unstructured) -> Result<()> {
    // 7 image, 8 video, 9 audio, 4 and 3 their starts, 5 and 6 start and end of a GLM video.
    let optional = |u: &mut Unstructured, id: i64| -> Result<Option<i64>> {
        Ok(if u.ratio(7, 8)? { Some(id) } else { None })
    };
    let tokens = TokenIds {
        image: 7,
        video: if u.ratio(15, 16)? { 8 } else { 7 },
        audio: optional(u, 9)?,
        vision_start: optional(u, 4)?,
        audio_start: optional(u, 3)?,
        video_start: optional(u, 5)?,
        video_end: optional(u, 6)?,
    };
    let family = one_of(u, &FAMILIES)?;
    let mut rules = PositionRules::new(family, tokens).expect("a family");
    if u.ratio(1, 4)? {
        match rules.with_ids_per_second(number(u)?) {
            Ok(others) => rules = others,
            Err(_) => return Ok(()),
        }
    }
    let versions = [
        Compatibility::Exact,
        Compatibility::Transformers4_57,
        Compatibility::Transformers5_23,
    ];
    let rules = rules.with_compatibility(one_of(u, &versions)?);

    let (image_grids, video_grids) = (list(u, grid)?, list(u, grid)?);
    let seconds = if u.arbitrary()? {
        let count = if u.ratio(15, 16)? {
            video_grids.len()
        } else {
            1
        };
        Some(
            (0..count)
                .map(|_| number(u))
                .collect::<Result<Vec<f64>>>()?,
        )
    } else {
        None
    };
    // Runs of a token, so that blocks of a grid's size come about.
    let mut input_ids = Vec::new();
    for _ in 0..u.int_in_range(0..=14)? {
        let id = u.int_in_range(1..=9)?;
        input_ids.extend(vec![
            id;
            if u.arbitrary()? {
                1
            } else {
                u.int_in_range(1..=18)?
            }
        ]);
    }
    let count = input_ids.len();
    let flags = |u: &mut Unstructured| -> Result<Vec<bool>> {
        let start = u.int_in_range(0..=count)?;
        let end = u.int_in_range(start..=count)?;
        let inside: bool = u.arbitrary()?;
        Ok((0..count)
            .map(|i| (start..end).contains(&i) == inside)
            .collect())
    };
    let mask = if u.arbitrary()? {
        Some(flags(u)?)
    } else {
        None
    };
    let types = if u.ratio(1, 4)? {
        let kind = |id: &i64| match id {
            7 => 1,
            8 => 2,
            9 => 3,
            _ => 0,
        };
        Some(input_ids.iter().map(kind).collect::<Vec<i64>>())
    } else {
        None
    };
    let cu_seqlens = if u.arbitrary()? {
        let middle = u.int_in_range(0..=count)?;
        vec![0, middle, count]
    } else {
        list(u, |u| size(u, 40))?
    };
    let rows = if u.arbitrary()? {
        Rows::Packed(&cu_seqlens)
    } else {
        Rows::Batch(size(u, 3)?)
    };
    // Sequences of no tokens are allowed, as many as there may be.
    if matches!(rows, Rows::Batch(rows) if rows > MOST) && count == 0 && u.ratio(15, 16)? {
        return Ok(());
    }
    let found = rules.position_ids(&Prompt {
        input_ids: &input_ids,
        rows,
        attention_mask: mask.as_deref(),
        mm_token_type_ids: types.as_deref(),
        image_grids: &image_grids,
        video_grids: &video_grids,
        seconds_per_grid: seconds.as_deref(),
    });
    let Ok(ids) = found else { return Ok(()) };
    assert_eq!(ids.tokens(), count);
    let positions: Positions = ids.positions().expect("checked when they were made");
    assert_eq!((positions.axis_count(), positions.tokens()), (3, count));
    for axis in 0..3 {
        assert!(
            ids.axis(axis)
                .iter()
                .all(|id| (0.0..=2f64.powi(31)).contains(id))
        );
    }
    let row = u.int_in_range(0..=3)?;
    if let Ok(next) = ids.continuation(row, 3) {
        assert_eq!(next.tokens(), 3);
    }
    let _ = ids.select(&[size(u, 40)?]);
    Ok(())
}
