//! The size that a picture is resized to.

use crate::{Result, VlmDataError};

use vlm_family::ResizeRule;

/// The longer side may be this many times the shorter one.
const MAX_RATIO: u32 = 200;
/// Whole numbers up to this one are exact in f64, which Python uses for divisions.
const EXACT: u64 = 1 << 53;

/// Computes height and width of the resized picture from `height` and `width`.
///
/// Both become multiples of `factor`, and their product lies between `min_pixels` and
/// `max_pixels`, both areas. Rounding is Python's: halves go to the even number.
///
/// - [`ResizeRule::Qwen`]: the nearest multiples. If their area exceeds the limits, both sides are
///   scaled by one factor and rounded towards the limit, to at least `factor`.
/// - [`ResizeRule::Glm`]: a side below `factor` is first scaled up to `factor`, and the other side
///   with it, both truncated. Then as above for all frames together: the limits apply to frames x
///   height x width, with frames rounded to a multiple of `depth`.
///
/// `frames` is the number of frames of the video and `depth` that of a patch; a picture has `depth`
/// frames.
///
/// # Units
/// sides in pixels, limits in pixels of area
/// # Errors
/// [`VlmDataError::NoPixels`] if a side is 0; [`VlmDataError::AspectRatio`] if one side is more
/// than 200 times the other; [`VlmDataError::Config`] if `factor`, `depth` or a limit is 0;
/// [`VlmDataError::TooFewFrames`] without frames, and by GLM's rule with fewer than `depth`;
/// [`VlmDataError::TooManyPixels`] if an area is above 2^53
/// # Source
/// transformers 5.24.0, `smart_resize` of models/qwen2_vl/image_processing_qwen2_vl.py and
/// models/glm4v/image_processing_glm4v.py, and of the video processors of qwen2_vl, qwen3_vl and
/// glm4v
pub fn smart_resize(
    rule: ResizeRule,
    [height, width]: [u64; 2],
    factor: u64,
    [frames, depth]: [u64; 2],
    [min_pixels, max_pixels]: [u64; 2],
) -> Result<[u64; 2]> {
    if height == 0 || width == 0 {
        return Err(VlmDataError::NoPixels { width, height });
    }
    let positive = |key, value: u64| match value {
        0 => Err(VlmDataError::Config {
            key,
            expected: "a whole number above 0",
            found: "0".into(),
        }),
        _ => Ok(()),
    };
    positive("patch_size x merge_size", factor)?;
    positive("temporal_patch_size", depth)?;
    positive("min_pixels", min_pixels)?;
    positive("max_pixels", max_pixels)?;
    let least = if rule == ResizeRule::Glm { depth } else { 1 };
    if frames < least {
        return Err(VlmDataError::TooFewFrames {
            least,
            found: frames,
        });
    }
    let (mut height, mut width, mut counted) = (height, width, 1);
    if rule == ResizeRule::Glm {
        counted = frames;
        if height < factor || width < factor {
            let scale = (factor as f64 / height as f64).max(factor as f64 / width as f64);
            height = (height as f64 * scale) as u64;
            width = (width as f64 * scale) as u64;
        }
    }
    let too_many = VlmDataError::TooManyPixels {
        width,
        height,
        limit: EXACT,
    };
    let area = height
        .checked_mul(width)
        .and_then(|area| area.checked_mul(counted));
    let Some(area) = area.filter(|&area| area <= EXACT) else {
        return Err(too_many);
    };
    if factor > EXACT || min_pixels > EXACT || max_pixels > EXACT {
        return Err(too_many);
    }
    let (h, w) = (height as f64, width as f64);
    // A ratio slightly above 200 can round to 200 in f64, as in Python.
    if h.max(w) / h.min(w) > f64::from(MAX_RATIO) {
        return Err(VlmDataError::AspectRatio {
            width,
            height,
            limit: MAX_RATIO,
        });
    }
    let (f, area) = (factor as f64, area as f64);
    let (min_pixels, max_pixels) = (min_pixels as f64, max_pixels as f64);
    let nearest = |side: f64| (side / f).round_ties_even() * f;
    let (mut new_h, mut new_w) = (nearest(h), nearest(w));
    let counted = match rule {
        ResizeRule::Qwen => 1.0,
        ResizeRule::Glm => (frames as f64 / depth as f64).round_ties_even() * depth as f64,
    };
    let new_area = counted * new_h * new_w;
    if new_area > max_pixels {
        let beta = (area / max_pixels).sqrt();
        let below = |side: f64| f.max((side / beta / f).floor() * f);
        (new_h, new_w) = (below(h), below(w));
    } else if new_area < min_pixels {
        let beta = (min_pixels / area).sqrt();
        let above = |side: f64| (side * beta / f).ceil() * f;
        (new_h, new_w) = (above(h), above(w));
    }
    Ok([new_h as u64, new_w as u64])
}

#[cfg(test)]
mod tests {
    use super::*;

    const QWEN: [u64; 2] = [3136, 12_845_056];

    fn qwen(height: u64, width: u64) -> Result<[u64; 2]> {
        smart_resize(ResizeRule::Qwen, [height, width], 28, [2, 2], QWEN)
    }

    #[test]
    fn halves_round_to_the_even_multiple() {
        // 70 / 28 = 2.5 and 98 / 28 = 3.5.
        assert_eq!(qwen(70, 98).expect("fits"), [56, 112]);
    }

    #[test]
    fn a_side_never_falls_below_the_factor() {
        let limits = [1, 28 * 28 * 4];
        let size = smart_resize(ResizeRule::Qwen, [10, 1900], 28, [2, 2], limits).expect("fits");
        assert_eq!(size[0], 28);
    }

    #[test]
    fn glm_scales_thin_pictures_up_and_counts_frames() {
        let limits = [12_544, 11_760_000];
        let size = smart_resize(ResizeRule::Glm, [1, 1], 28, [2, 2], limits).expect("fits");
        // 28 x 28 twice are 1568, below 12544: 28 sqrt(8) is 79.2.
        assert_eq!(size, [84, 84]);
    }

    #[test]
    fn what_no_rule_resizes_is_an_error() {
        assert!(matches!(
            qwen(1, 201),
            Err(VlmDataError::AspectRatio { .. })
        ));
        assert!(matches!(qwen(0, 5), Err(VlmDataError::NoPixels { .. })));
        assert!(matches!(
            qwen(u64::MAX, u64::MAX),
            Err(VlmDataError::TooManyPixels { .. })
        ));
        let none = smart_resize(ResizeRule::Qwen, [9, 9], 0, [2, 2], QWEN);
        assert!(matches!(none, Err(VlmDataError::Config { .. })));
        let limits = [12_544, 11_760_000];
        assert!(smart_resize(ResizeRule::Glm, [1, 201], 28, [2, 2], limits).is_err());
    }
}
