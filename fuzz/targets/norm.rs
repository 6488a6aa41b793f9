//! Norm and rotation in one pass, forward and backward: refused, or what the oracle says, with any
//! weights, order, views and instruction set.

#![no_main]

use arbitrary::{Result, Unstructured};
use fuzz::{WIDEST, builder, one_of, positions, values, view};
use rope_core::reference::{HeadMatrix, HeadRmsNorm};
use rope_core::{
    HeadNorm, HeadsLayout, HeadsMut, HeadsRef, InstructionSet, NormGradient, NormInput, NormOrder,
    Parallelism, Rotator, TokenAngles,
};

const MOST: u128 = 4096;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let _ = run(&mut Unstructured::new(bytes));
});

fn run(u: &mut Unstructured) -> Result<()> {
    let Ok(spec) = builder(u)?.build() else {
        return Ok(());
    };
    // Sums of squares lose digits where cos and sin are far from 1.
    let sane = (0.5..=2.0).contains(&spec.attention_scaling());
    let eps = if u.ratio(7, 8)? {
        1e-6
    } else {
        fuzz::number(u)?
    };
    let Ok(norm) = HeadNorm::new(eps) else {
        return Ok(());
    };
    let after = u.arbitrary()?;
    let order = if after {
        NormOrder::AfterRotation
    } else {
        NormOrder::BeforeRotation
    };
    let norm = norm.with_order(order).with_unit_offset(u.arbitrary()?);
    let layout = view(u, spec.head_dim())?;
    if spec.head_dim() > WIDEST || !sane || layout.extent() > MOST {
        return Ok(());
    }
    let empty = layout.extent() == 0;
    let (batch, seq) = if empty {
        (1, 1)
    } else {
        (layout.batch, layout.seq)
    };
    // Strides of 0 make any number of tokens out of one.
    let tokens = batch.saturating_mul(seq);
    if tokens > MOST as usize {
        return Ok(());
    }
    let positions = positions(u, spec.axis_count(), tokens)?;
    let Ok(angles) = TokenAngles::<f64>::new(&spec, &positions, None) else {
        return Ok(());
    };
    let rotator = Rotator::new(spec.geometry(), angles.angles())
        .expect("the specification's own angles")
        .with_parallelism(Parallelism::SERIAL)
        .with_instructions(one_of(u, &InstructionSet::available().collect::<Vec<_>>())?);

    let count = layout.extent() as usize;
    let channels = if u.ratio(15, 16)? {
        spec.head_dim()
    } else {
        u.int_in_range(0..=WIDEST)?
    };
    let weight = if u.arbitrary()? {
        Some(values(channels))
    } else {
        None
    };
    let x = values(count);
    let mut y = x.clone().into_boxed_slice();
    let Ok(written) = HeadsMut::new(&mut y, layout) else {
        return Ok(());
    };
    let input = NormInput {
        x: written.into(),
        weight: weight.as_deref(),
    };
    if rotator.norm_rotate(&norm, input, None).is_err() {
        return Ok(());
    }
    let g = values(count + 1);
    let mut dx = g[1..].to_vec().into_boxed_slice();
    let mut dw = vec![0.0; spec.head_dim()];
    let backward = NormGradient {
        x: HeadsRef::new(&x, layout).expect("as y"),
        weight: weight.as_deref(),
        gradient: HeadsMut::new(&mut dx, layout).expect("as y").into(),
        weight_gradient: Some(&mut dw),
    };
    rotator
        .norm_rotate_backward(&norm, backward, None)
        .expect("the forward was taken");
    if empty || eps < 1e-9 || !eps.is_finite() {
        return Ok(());
    }

    let offset = if norm.unit_offset() { 1.0 } else { 0.0 };
    let weight = weight.map_or(vec![1.0; spec.head_dim()], |weight| {
        weight.iter().map(|w| offset + w).collect()
    });
    let oracle = HeadRmsNorm {
        weight: &weight,
        eps,
    };
    let mut expected_dw = vec![0.0; spec.head_dim()];
    for (token, start) in heads(&layout) {
        let head = start..start + spec.head_dim();
        let (x, g) = (&x[head.clone()], &g[1..][head.clone()]);
        let matrix = HeadMatrix::new(&spec, &positions, token, None).expect("angles were made");
        let (expected, dx_expected, dw_expected) = if after {
            let rotated = matrix.apply(x);
            let (inner, dw) = oracle.apply_adjoint(&rotated, g);
            (oracle.apply(&rotated), matrix.apply_adjoint(&inner), dw)
        } else {
            let (dx, dw) = oracle.apply_adjoint(x, &matrix.apply_adjoint(g));
            (matrix.apply(&oracle.apply(x)), dx, dw)
        };
        expected_dw
            .iter_mut()
            .zip(dw_expected)
            .for_each(|(sum, dw)| *sum += dw);
        close(&y[head.clone()], &expected, "y", 1.0);
        close(&dx[head], &dx_expected, "dx", eps.sqrt().recip());
    }
    close(&dw, &expected_dw, "dw", layout.elems() as f64);
    Ok(())
}

/// Token and first element of every head.
fn heads(layout: &HeadsLayout) -> Vec<(usize, usize)> {
    let mut found = Vec::new();
    for b in 0..layout.batch {
        for s in 0..layout.seq {
            for n in 0..layout.heads {
                let strides = layout.strides;
                let start = b * strides.batch + s * strides.seq + n * strides.head;
                found.push((b * layout.seq + s, start));
            }
        }
    }
    found
}

fn close(found: &[f64], expected: &[f64], what: &str, scale: f64) {
    let largest = expected
        .iter()
        .fold(scale.max(1.0), |most, x| most.max(x.abs()));
    for (index, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert!(
            (found - expected).abs() <= 1e-11 * largest,
            "{what}[{index}]: {found}, not {expected}"
        );
    }
}
