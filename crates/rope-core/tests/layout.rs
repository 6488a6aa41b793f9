//! Sizes and strides of tensors, against numbers written out by hand.

use rope_core::{HeadsLayout, HeadsMut, HeadsRef, Layout, RopeError, Strides};

#[test]
fn strides_follow_the_order_of_dimensions() {
    let strides = |layout| {
        let Strides { batch, seq, head } = HeadsLayout::contiguous(layout, 2, 3, 5, 4).strides;
        [batch, seq, head]
    };
    assert_eq!(strides(Layout::Bsnd), [60, 20, 4]);
    assert_eq!(strides(Layout::Bnsd), [60, 4, 12]);
    assert_eq!(strides(Layout::Sbnd), [20, 40, 4]);
    let view = HeadsLayout::strided(Layout::Sbnd, &[3, 2, 5, 4], &[40, 20, 4, 1]);
    assert_eq!(view, Ok(HeadsLayout::contiguous(Layout::Sbnd, 2, 3, 5, 4)));
}

#[test]
fn a_broadcast_view_can_be_read_but_not_written() {
    let layout =
        HeadsLayout::strided(Layout::Bsnd, &[2, 3, 5, 4], &[0, 0, 0, 1]).expect("unit stride");
    let mut data = [0f32; 4];
    assert!(HeadsRef::new(&data, layout).is_ok());
    assert_eq!(
        HeadsMut::new(&mut data, layout).err(),
        Some(RopeError::Overlap { what: "the tensor" })
    );
}

#[test]
fn an_extent_that_would_wrap_around_fits_no_buffer() {
    // 2 * 2^63 * (2^64 - 1) + 2^32 * 2^32 is 2^128.
    let half = (1 << 63) + 1;
    let layout = HeadsLayout {
        batch: half,
        seq: half,
        heads: (1 << 32) + 1,
        head_dim: 4,
        strides: Strides {
            batch: usize::MAX,
            seq: usize::MAX,
            head: 1 << 32,
        },
    };
    assert_eq!(layout.extent(), u128::MAX);
    assert!(!layout.is_injective());
    assert!(HeadsRef::new(&[0f32; 4], layout).is_err());
}

#[test]
fn last_stride_and_extent_are_checked() {
    let refused = HeadsLayout::strided(Layout::Tnd, &[3, 5, 4], &[20, 4, 2]);
    assert_eq!(
        refused,
        Err(RopeError::LastStride {
            what: "the tensor",
            found: 2
        })
    );
    let layout = HeadsLayout::contiguous(Layout::Bnsd, 2, 3, 5, 4);
    assert!(matches!(
        HeadsRef::new(&[0f32; 119], layout).err(),
        Some(RopeError::BufferTooSmall {
            needed: 120,
            found: 119,
            ..
        })
    ));
}
