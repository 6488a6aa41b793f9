//! Sizes and strides of tensors, against numbers written out by hand, and borrowed memory.
#![allow(unsafe_code, reason = "views of raw memory")]

use rope_core::{
    Geometry, HeadsLayout, HeadsMut, HeadsRef, Layout, Operand, Pairing, Positions, RopeError,
    RotarySpec, Rotator, Strides, TokenAngles,
};

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

/// q and k of one packed buffer are read and written between each other's rows.
#[test]
fn views_of_one_buffer_rotate_as_tensors_of_their_own_do() {
    const SEQ: usize = 3;
    let spec = RotarySpec::builder(8).build().expect("a specification");
    let positions = Positions::text(1, 0, SEQ).expect("positions");
    let angles = TokenAngles::<f32>::new(&spec, &positions, None).expect("angles");
    let geometry = Geometry::new(8, 8, 0, Pairing::Half, false).expect("a geometry");
    let rotator = Rotator::new(geometry, angles.angles()).expect("a rotator");
    // Of each token two heads of q, one of k and one of v.
    let heads_of = |heads| {
        HeadsLayout::strided(Layout::Tnd, &[SEQ, heads, 8], &[32, 8, 1]).expect("unit stride")
    };
    let packed: Vec<f32> = (0..SEQ * 32).map(|i| i as f32).collect();
    let apart = |start: usize, heads: usize| -> Vec<f32> {
        let rows = packed.chunks(32);
        let mut x: Vec<f32> = rows
            .flat_map(|row| row[start..start + 8 * heads].to_vec())
            .collect();
        let layout = HeadsLayout::contiguous(Layout::Tnd, 1, SEQ, heads, 8);
        let view = HeadsMut::new(&mut x, layout).expect("a view");
        rotator.rotate(view, None).expect("a rotation");
        x
    };
    let (q, k) = (apart(0, 2), apart(16, 1));

    let mut buffer = packed.clone();
    let start = buffer.as_mut_ptr();
    // SAFETY: rows of 32 elements lie in the buffer, q's in the first 16 of each and k's in the
    // next 8; nothing else uses it meanwhile.
    let views = unsafe {
        [
            HeadsMut::from_raw(start, heads_of(2)).expect("apart"),
            HeadsMut::from_raw(start.add(16), heads_of(1)).expect("apart"),
        ]
    };
    let [in_q, in_k] = views.map(Operand::from);
    rotator.rotate(in_q, Some(in_k)).expect("a rotation");
    for (token, row) in buffer.chunks(32).enumerate() {
        assert_eq!(row[..16], q[16 * token..][..16]);
        assert_eq!(row[16..24], k[8 * token..][..8]);
        assert_eq!(row[24..], packed[32 * token + 24..][..8]);
    }

    // SAFETY: one element, which the layout names twice.
    let twice = unsafe {
        HeadsMut::from_raw(
            start,
            HeadsLayout {
                seq: 2,
                ..overlapping()
            },
        )
    };
    assert_eq!(twice.err(), Some(RopeError::Overlap { what: "the tensor" }));
}

fn overlapping() -> HeadsLayout {
    HeadsLayout::strided(Layout::Tnd, &[1, 1, 8], &[0, 0, 1]).expect("unit stride")
}
