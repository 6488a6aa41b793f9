//! Views: any shape and strides are refused, or rotated as a contiguous copy is, and no byte
//! outside the view changes.

#![no_main]

use arbitrary::{Result, Unstructured};
use fuzz::{one_of, size, values, view};
use rope_core::{
    Angles, Direction, Geometry, HeadsLayout, HeadsMut, HeadsRef, InstructionSet, Operand, Pairing,
    Parallelism, Rotator,
};

/// The most elements of a buffer.
const MOST: usize = 4096;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let _ = run(&mut Unstructured::new(bytes));
});

fn run(u: &mut Unstructured) -> Result<()> {
    let geometry = Geometry::new(
        size(u, 40)?,
        size(u, 40)?,
        size(u, 8)?,
        one_of(u, &Pairing::ALL)?,
        u.arbitrary()?,
    );
    let Ok(geometry) = geometry else {
        return Ok(());
    };
    if geometry.head_dim() > MOST {
        return Ok(());
    }
    let from = view(u, geometry.head_dim())?;
    let to = if u.arbitrary()? {
        HeadsLayout {
            strides: view(u, 1)?.strides,
            ..from
        }
    } else {
        from
    };
    let k = if u.arbitrary()? {
        Some(HeadsLayout {
            heads: size(u, 3)?,
            ..from
        })
    } else {
        None
    };
    let rows = match u.int_in_range(0..=8)? {
        0 => size(u, 40)?,
        1..=4 => from.seq,
        _ => from.seq.saturating_mul(from.batch),
    };
    let (width, own_heads) = (2 * geometry.lane_count(), u.ratio(1, 4)?);
    let row = if own_heads {
        width.saturating_mul(from.heads)
    } else {
        width
    };
    let Some(angles) = rows.checked_mul(row).filter(|count| *count <= 16 * MOST) else {
        return Ok(());
    };
    let angles: Vec<f32> = values(angles).into_iter().map(|x| x as f32).collect();
    let angles = if own_heads {
        Angles::Heads {
            rows: &angles,
            heads: from.heads,
        }
    } else {
        Angles::Tokens(&angles)
    };
    let Ok(rotator) = Rotator::new(geometry, angles) else {
        return Ok(());
    };
    let rotator = rotator
        .with_parallelism(Parallelism::SERIAL)
        .with_streaming(if u.arbitrary()? { 0 } else { usize::MAX })
        .with_instructions(one_of(u, &InstructionSet::available().collect::<Vec<_>>())?);
    let direction = if u.arbitrary()? {
        Direction::Forward
    } else {
        Direction::Adjoint
    };

    let least = |layout: &HeadsLayout| usize::try_from(layout.extent()).unwrap_or(MOST).min(MOST);
    let short = usize::from(u.ratio(1, 16)?);
    let buffer = |layout: &HeadsLayout| -> Box<[f32]> {
        let found = least(layout).saturating_sub(short);
        values(found).into_iter().map(|x| x as f32).collect()
    };
    let source = buffer(&from);
    let (mut q, mut dk) = (buffer(&to), k.as_ref().map(&buffer));
    let before = q.clone();
    let in_place = u.arbitrary::<bool>()?;
    let outcome = (|| {
        let q: Operand<f32> = if in_place {
            HeadsMut::new(&mut q, to)?.into()
        } else {
            (HeadsRef::new(&source, from)?, HeadsMut::new(&mut q, to)?).into()
        };
        let k = match (&mut dk, k) {
            (Some(data), Some(layout)) => Some(HeadsMut::new(data, layout)?.into()),
            _ => None,
        };
        rotator.apply(direction, q, k)
    })();
    let changed = (before.iter().zip(&q)).any(|(a, b)| a.to_bits() != b.to_bits());
    if outcome.is_err() {
        assert!(!changed, "a refused rotation wrote");
        return Ok(());
    }
    let source: (&[f32], HeadsLayout) = if in_place {
        (&before, to)
    } else {
        (&source, from)
    };
    let expected = contiguous(&rotator, direction, source);
    let mut named = vec![false; q.len()];
    for (index, expected) in indices(&to).zip(expected) {
        assert_eq!(
            q[index].to_bits(),
            expected.to_bits(),
            "{geometry:?}, {from:?}, {to:?}"
        );
        named[index] = true;
    }
    for (index, named) in named.into_iter().enumerate() {
        assert!(
            named || q[index].to_bits() == before[index].to_bits(),
            "outside: {to:?}"
        );
    }

    // A view with strides of 0 has any number of elements, and each counts.
    let most = 64 * MOST;
    let k_elems = k.map_or(0, |k| k.elems());
    if from.extent() > 0 && from.elems().max(k_elems) > most {
        return Ok(());
    }
    let mut sums: Vec<f32> = vec![0.0; rows * row];
    let source = HeadsRef::new(source.0, source.1).expect("it was rotated");
    let result = HeadsRef::new(&q, to).expect("it was written");
    let _ = rotator.angle_gradients((source, result), None, &mut sums);
    Ok(())
}

/// The elements of a view in the order of batch, token, head and channel.
fn indices(layout: &HeadsLayout) -> impl Iterator<Item = usize> {
    let HeadsLayout {
        batch,
        seq,
        heads,
        head_dim,
        strides,
    } = *layout;
    let empty = [batch, seq, heads].contains(&0);
    (0..if empty { 0 } else { batch }).flat_map(move |b| {
        (0..seq).flat_map(move |s| {
            (0..heads).flat_map(move |n| {
                let start = b * strides.batch + s * strides.seq + n * strides.head;
                start..start + head_dim
            })
        })
    })
}

fn contiguous(
    rotator: &Rotator,
    direction: Direction,
    (data, from): (&[f32], HeadsLayout),
) -> Vec<f32> {
    let mut copy: Vec<f32> = indices(&from).map(|index| data[index]).collect();
    let layout = rope_core::Layout::Bsnd;
    let HeadsLayout {
        batch,
        seq,
        heads,
        head_dim,
        ..
    } = from;
    if copy.is_empty() {
        return copy;
    }
    let layout = HeadsLayout::contiguous(layout, batch, seq, heads, head_dim);
    let view = HeadsMut::new(&mut copy, layout).expect("as many as it has");
    rotator
        .apply(direction, view, None)
        .expect("as the view was");
    copy
}
