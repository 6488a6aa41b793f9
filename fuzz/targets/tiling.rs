//! The plans of Ascend launches: refused, or within the unified buffer, for any geometry, views and
//! machine.

#![no_main]

use arbitrary::{Result, Unstructured};
use fuzz::{one_of, size};
use rope_ascend::rope::{KernelType, fuzz::Launch};
use rope_core::{Direction, Geometry, HeadsLayout, Layout, NormOrder, Pairing, Strides};

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let _ = run(&mut Unstructured::new(bytes));
});

fn run(u: &mut Unstructured) -> Result<()> {
    let head_dim = size(u, 288)?;
    let rotary_dim = if u.arbitrary()? {
        head_dim
    } else {
        size(u, 160)?
    };
    let offset = if u.arbitrary()? { 0 } else { size(u, 64)? };
    let pairing = one_of(u, &Pairing::ALL)?;
    let geometry = Geometry::new(head_dim, rotary_dim, offset, pairing, u.arbitrary()?);
    let Ok(geometry) = geometry else {
        return Ok(());
    };
    let (batch, seq) = (size(u, 9)?, size(u, 9000)?);
    let heads = [size(u, 70)?, if u.arbitrary()? { 0 } else { size(u, 20)? }];
    let layout = one_of(u, &Layout::ALL)?;
    let view = |u: &mut Unstructured, heads: usize| -> Result<Option<HeadsLayout>> {
        let elems = [batch, seq, heads, head_dim]
            .into_iter()
            .try_fold(1usize, usize::checked_mul);
        Ok(if u.ratio(7, 8)? {
            elems.map(|_| HeadsLayout::contiguous(layout, batch, seq, heads, head_dim))
        } else {
            let strides = Strides {
                batch: u.arbitrary::<u64>()? as usize >> 16,
                seq: u.arbitrary::<u32>()? as usize,
                head: size(u, 4096)?,
            };
            Some(HeadsLayout {
                batch,
                seq,
                heads,
                head_dim,
                strides,
            })
        })
    };
    let mut views = [[HeadsLayout::contiguous(layout, 1, 1, 1, 1); 3]; 2];
    for (views, heads) in views.iter_mut().zip(heads) {
        for to in views {
            let Some(found) = view(u, heads.max(1))? else {
                return Ok(());
            };
            *to = found;
        }
    }
    Launch {
        geometry,
        direction: if u.arbitrary()? {
            Direction::Forward
        } else {
            Direction::Adjoint
        },
        element: one_of(u, &[KernelType::F32, KernelType::F16, KernelType::Bf16])?,
        heads,
        views,
        in_place: u.arbitrary()?,
        shared_over_batch: u.arbitrary()?,
        order: one_of(u, &[NormOrder::BeforeRotation, NormOrder::AfterRotation])?,
        vector_cores: i64::from(u.int_in_range(0..=70u8)?),
        ub_bytes: if u.arbitrary()? {
            None
        } else {
            Some(u.arbitrary::<u32>()?.into())
        },
        architecture: one_of(u, &[None, Some(2201), Some(3510), Some(1)])?,
    }
    .plan_all();
    Ok(())
}
