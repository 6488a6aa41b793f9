//! Files of pictures: decoded or refused, with the sides that the header alone gives, and nothing
//! of many pixels.

#![no_main]

use vlm_data::picture::{Alpha, Picture, ReadOptions};

const MAX_PIXELS: u64 = 1 << 16;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let [choice, file @ ..] = bytes else { return };
    let options = ReadOptions {
        max_pixels: MAX_PIXELS,
        upright: choice & 1 == 0,
        alpha: if choice & 2 == 0 {
            Alpha::Loaded
        } else {
            Alpha::OnWhite
        },
        allow_truncated: choice & 4 != 0,
    };
    let sides = Picture::sides(file, &options);
    if let Ok(picture) = Picture::decode(file, &options) {
        let found = [picture.width(), picture.height()];
        assert_eq!(sides.ok(), Some(found));
        assert_eq!(picture.rgb().len(), 3 * found[0] * found[1]);
        assert!((found[0] * found[1]) as u64 <= MAX_PIXELS);
    }
});
