//! Specifications, from the builder or from JSON, through tables to the rotation: in f64 it is what
//! the oracle says; in each narrower type all instruction sets give the same bits.

#![no_main]

use arbitrary::{Result, Unstructured};
use fuzz::{WIDEST, builder, positions, values};
use half::{bf16, f16};
use rope_core::reference::HeadMatrix;
use rope_core::{
    Angles, CosSinTable, Direction, Element, HeadsLayout, HeadsMut, InstructionSet, Layout,
    Parallelism, Positions, Real, RotarySpec, Rotator, TokenAngles,
};

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let _ = run(&mut Unstructured::new(bytes));
});

fn run(u: &mut Unstructured) -> Result<()> {
    let spec = if u.ratio(1, 4)? {
        let text = u.arbitrary::<&str>()?;
        let Ok(spec) = serde_json::from_str::<RotarySpec>(text) else {
            return Ok(());
        };
        spec
    } else {
        let Ok(spec) = builder(u)?.build() else {
            return Ok(());
        };
        spec
    };
    let json = serde_json::to_string(&spec).expect("a specification is JSON");
    let again: RotarySpec = serde_json::from_str(&json).expect("what was written is read");
    assert_eq!(spec, again, "{json}");
    if spec.head_dim() > WIDEST {
        return Ok(());
    }

    let (tokens, heads) = (u.int_in_range(0..=4)?, u.int_in_range(1..=3)?);
    let positions = positions(u, spec.axis_count(), tokens)?;
    let seq_len = if u.arbitrary()? {
        Some(u.arbitrary::<u32>()?.into())
    } else {
        None
    };
    let direction = if u.arbitrary()? {
        Direction::Forward
    } else {
        Direction::Adjoint
    };
    let Ok(angles) = TokenAngles::<f64>::new(&spec, &positions, seq_len) else {
        return Ok(());
    };
    let layout = HeadsLayout::contiguous(Layout::Tnd, 1, tokens, heads, spec.head_dim());
    let x = values(layout.elems());
    let y = rotated(
        &spec,
        angles.angles(),
        layout,
        direction,
        InstructionSet::best(),
        &x,
    );
    for token in 0..tokens {
        let matrix = HeadMatrix::new(&spec, &positions, token, seq_len).expect("angles were made");
        for head in 0..heads {
            let start = (token * heads + head) * spec.head_dim();
            let x = &x[start..start + spec.head_dim()];
            let expected = match direction {
                Direction::Forward => matrix.apply(x),
                Direction::Adjoint => matrix.apply_adjoint(x),
            };
            let most = 1e-13 * spec.attention_scaling().max(1.0);
            for (channel, expected) in expected.into_iter().enumerate() {
                let found = y[start + channel];
                assert!(
                    (found - expected).abs() <= most,
                    "token {token}, channel {channel}: {found}, not {expected}; {spec:?}, {positions:?}"
                );
            }
        }
    }
    same_bits::<f32>(&spec, &positions, seq_len, layout, direction, &x);
    same_bits::<f16>(&spec, &positions, seq_len, layout, direction, &x);
    same_bits::<bf16>(&spec, &positions, seq_len, layout, direction, &x);
    Ok(())
}

/// By each instruction set, with angles of the tokens and from a table.
fn same_bits<E: Element<Acc = f32>>(
    spec: &RotarySpec,
    positions: &Positions,
    seq_len: Option<u64>,
    layout: HeadsLayout,
    direction: Direction,
    x: &[f64],
) {
    let angles = TokenAngles::<f32>::new(spec, positions, seq_len).expect("as in f64");
    let mut table = CosSinTable::<f32>::new(spec, seq_len).expect("as the angles");
    let in_table = positions.are_ids() && positions.highest() < 512;
    if in_table {
        table.grow_to(positions.highest()).expect("512 rows");
    }
    let x: Vec<E> = x.iter().map(|x| E::narrow(f32::from_f64(*x))).collect();
    let mut first: Option<Vec<u64>> = None;
    let gathered =
        in_table.then(|| TokenAngles::gather(&table, positions).expect("rows of all positions"));
    for instructions in InstructionSet::available() {
        for angles in std::iter::once(&angles).chain(&gathered) {
            let found = rotated(spec, angles.angles(), layout, direction, instructions, &x);
            let found: Vec<u64> = found.iter().map(|y| y.widen().to_f64().to_bits()).collect();
            let first = first.get_or_insert_with(|| found.clone());
            assert_eq!(*first, found, "{}; {spec:?}", instructions.name());
        }
    }
}

fn rotated<E: Element>(
    spec: &RotarySpec,
    angles: Angles<'_, E::Acc>,
    layout: HeadsLayout,
    direction: Direction,
    instructions: InstructionSet,
    x: &[E],
) -> Vec<E> {
    // No more than it needs, so that a step beyond it is beyond the buffer.
    let mut y = x.to_vec().into_boxed_slice();
    Rotator::new(spec.geometry(), angles)
        .expect("the specification's own angles")
        .with_parallelism(Parallelism::SERIAL)
        .with_instructions(instructions)
        .apply(
            direction,
            HeadsMut::new(&mut y, layout).expect("fits"),
            None,
        )
        .expect("the shapes agree");
    y.into_vec()
}
