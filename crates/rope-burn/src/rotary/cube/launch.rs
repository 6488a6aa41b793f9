//! Chooses how a rotation is divided among units and launches its kernel.

use burn::backend::TensorMetadata;
use burn::tensor::{DType, Shape};
use burn_cubecl::CubeBackend;
use burn_cubecl::cubecl::client::Client;
use burn_cubecl::cubecl::prelude::*;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::ops::numeric::empty_device_dtype;
use burn_cubecl::tensor::CubeTensor;
use burn_fused::cube::{
    ENOUGH_UNITS, add, address_type, cubes, empty_beside, starts_at_vectors_of, types,
};
use rope_core::{Direction, HeadsLayout, Layout, Pairing, Strides};

use super::kernels::{
    HeadStepsLaunch, RowPartsLaunch, Specialization, StepsLaunch, SumGridLaunch, UnitGridLaunch,
    angle_sums, rotate_pair, rotate_single,
};
use crate::prepared::{HeadsTensor, PreparedTensor};
use crate::rotary::RotaryOp;
use crate::rotary::composed;

/// Units are numbered in 32 bits, and a division by a constant is exact below half of them.
pub(crate) const MOST_UNITS: usize = 1 << 31;
/// Terms of an angle's gradient below which a sum is not divided.
const FEWEST_TERMS: usize = 16;

impl HeadsTensor for CubeTensor {
    /// The kernels can follow strides within the tensor's memory, with contiguous channels.
    fn heads_layout(&self, layout: Layout) -> Option<HeadsLayout> {
        if self.meta.is_tiled() {
            return None;
        }
        let (shape, strides) = (self.meta.shape(), self.meta.strides());
        let layout = HeadsLayout::strided(layout, shape, strides).ok()?;
        let elems = self.handle.size_in_used() as usize / self.dtype.size();
        layout.check_fits("the tensor", elems).ok().map(|()| layout)
    }

    fn into_contiguous(self) -> Self {
        into_contiguous(self)
    }

    fn is_unique(&self) -> bool {
        self.can_mut()
    }

    fn empty_like(&self) -> Self {
        let (client, device) = (self.client.clone(), self.device.clone());
        empty_device_dtype(client, device, self.shape(), self.dtype)
    }
}

/// A tensor to rotate, which a pairing that reads one way and writes the other must not overwrite.
pub(crate) fn prepare(x: CubeTensor, op: &RotaryOp) -> PreparedTensor<CubeTensor> {
    let mut prepared = PreparedTensor::readable(x, op);
    let reorders = op.geometry.pairing() == Pairing::InterleaveHalf;
    if reorders || !prepared.may_be_overwritten() {
        prepared.allocate_output(op);
    }
    prepared
}

impl PreparedTensor<CubeTensor> {
    fn in_place(&self) -> bool {
        self.target.is_none()
    }

    fn to(&self) -> HeadsLayout {
        self.target.as_ref().map_or(self.from, |(_, to)| *to)
    }

    pub(crate) fn is_vectors_of(&self, n: usize) -> bool {
        let target = self.target.as_ref();
        is_vectors_of(&self.source, &self.from, n)
            && target.is_none_or(|(target, to)| is_vectors_of(target, to, n))
    }

    pub(crate) fn operand(&self, n: usize) -> HeadStepsLaunch {
        HeadStepsLaunch::new(
            self.from.heads as u32,
            steps(&self.from, n),
            steps(&self.to(), n),
            self.in_place(),
        )
    }

    /// The argument to write, given the index of the one to read.
    pub(crate) fn written(&self, read: usize) -> BufferArg {
        match &self.target {
            Some((target, _)) => target.clone().into_buffer_arg(),
            None => BufferArg::alias(read, self.from.elems()),
        }
    }
}

/// True if all heads start at multiples of `n` elements.
pub(crate) fn is_vectors_of(x: &CubeTensor, layout: &HeadsLayout, n: usize) -> bool {
    let Strides { batch, seq, head } = layout.strides;
    let steps = [
        (layout.batch, batch),
        (layout.seq, seq),
        (layout.heads, head),
    ];
    starts_at_vectors_of(x, n)
        && steps
            .iter()
            .all(|(size, step)| *size <= 1 || step.is_multiple_of(n))
}

/// Strides in vectors of `n`; one that is never taken is zero.
pub(crate) fn steps(layout: &HeadsLayout, n: usize) -> StepsLaunch {
    let Strides { batch, seq, head } = layout.strides;
    let step = |size: usize, step: usize| if size > 1 { step / n } else { 0 };
    StepsLaunch::new(
        step(layout.batch, batch),
        step(layout.seq, seq),
        step(layout.heads, head),
    )
}

/// The widest vectors that a head's parts and all `tensors` consist of.
pub(crate) fn vector_size(
    client: &Client,
    dtype: DType,
    op: &RotaryOp,
    copies: bool,
    tensors: impl Fn(usize) -> bool,
) -> usize {
    let geometry = op.geometry;
    let parts = |n: usize| {
        run(op).is_multiple_of(n)
            && geometry.rotary_offset().is_multiple_of(n)
            && (!copies || geometry.head_dim().is_multiple_of(n))
    };
    let mut sizes = client.io_optimized_vector_sizes(dtype.size());
    sizes.find(|n| parts(*n) && tensors(*n)).unwrap_or(1)
}

/// The widest vectors of angles, and of weights, that vectors of `n` elements consist of.
pub(crate) fn angle_width(
    client: &Client,
    n: usize,
    angles: &CubeTensor,
    weight: Option<&CubeTensor>,
) -> usize {
    let step = angles.meta.strides()[0];
    let starts = |w| {
        let mut read = std::iter::once(angles).chain(weight);
        read.all(|x| starts_at_vectors_of(x, w))
    };
    let mut sizes = client.io_optimized_vector_sizes(angles.dtype.size());
    let fits = |w: &usize| n.is_multiple_of(*w) && step.is_multiple_of(*w) && starts(*w);
    sizes.find(fits).unwrap_or(1)
}

/// A head in vectors of `n`, and rows of angles `step` elements apart in vectors of `w`.
pub(crate) fn row_parts(op: &RotaryOp, n: usize, w: usize, step: usize) -> RowPartsLaunch {
    let geometry = op.geometry;
    RowPartsLaunch::new(
        (geometry.rotary_offset() / n) as u32,
        (geometry.pairs() / n) as u32,
        (run(op) / n) as u32,
        step / w,
        geometry.lane_count() / w,
    )
}

/// Pairs whose members lie the same distance apart.
fn run(op: &RotaryOp) -> usize {
    let runs = if op.geometry.pairing() == Pairing::Quarter {
        2
    } else {
        1
    };
    op.geometry.pairs() / runs
}

pub(crate) fn access(op: &RotaryOp, shared_rows: bool) -> Specialization {
    let (read, write) = match op.geometry.pairing() {
        Pairing::Half | Pairing::Quarter => (false, false),
        Pairing::Adjacent => (true, true),
        Pairing::InterleaveHalf => (true, false),
    };
    let adjoint = op.direction == Direction::Adjoint;
    let (zipped_read, zipped_write) = if adjoint {
        (write, read)
    } else {
        (read, write)
    };
    Specialization {
        zipped_read,
        zipped_write,
        adjoint,
        per_channel: op.geometry.per_channel(),
        heads_outside: op.layout == Layout::Bnsd,
        shared_rows,
    }
}

/// The heads of a unit and the number of groups of that size, at `units` units a group.
pub(crate) fn grouped(heads: usize, units: usize) -> (usize, usize) {
    let groups = ENOUGH_UNITS.div_ceil(units).clamp(1, heads);
    let unit_heads = heads.div_ceil(groups);
    (unit_heads, heads.div_ceil(unit_heads))
}

/// Rotates one tensor, or two in one launch; composed where there is no kernel.
pub(crate) fn rotate<const T: usize>(
    x: [CubeTensor; T],
    angles: CubeTensor,
    op: &RotaryOp,
) -> [CubeTensor; T] {
    let composed = |x: [CubeTensor; T], angles: &CubeTensor| {
        x.map(|x| composed::rotate::<CubeBackend>(x, angles.clone(), *op))
    };
    let (client, dtype) = (x[0].client.clone(), x[0].dtype);
    let Some(types) = types(&client, dtype) else {
        return composed(x, &angles);
    };
    if x.iter().all(|x| x.meta.num_elements() == 0) {
        return x;
    }
    x.iter().for_each(|x| x.assert_is_on_same_device(&angles));
    let angles = rows(angles);
    let prepared = x.map(|x| prepare(x, op));
    let geometry = op.geometry;
    let unrotated = geometry.head_dim() - geometry.rotary_dim();
    let copies = unrotated > 0 && prepared.iter().any(|x| !x.in_place());
    let n = vector_size(&client, dtype, op, copies, |n| {
        prepared.iter().all(|x| x.is_vectors_of(n))
    });
    let layout = prepared[0].from;
    let tokens = layout.batch * layout.seq;
    let rotating = geometry.pairs() / n;
    let lanes = rotating + if copies { unrotated / n } else { 0 };
    let heads = prepared.iter().map(|x| x.from.heads).sum();
    let (unit_heads, groups) = grouped(heads, tokens * lanes);
    let units = tokens.saturating_mul(lanes).saturating_mul(groups);
    if units > MOST_UNITS {
        return composed(prepared.map(|x| x.source), &angles);
    }
    let angle_rows = angles.meta.shape()[0];
    let access = access(op, angle_rows == layout.seq);
    let inner = if access.heads_outside { tokens } else { groups };
    let w = angle_width(&client, n, &angles, None);
    let row = row_parts(op, n, w, angles.meta.strides()[0]);
    let grid = UnitGridLaunch::new(
        units as u32,
        lanes as u32,
        inner as u32,
        layout.seq as u32,
        unit_heads as u32,
    );
    let (count, dim) = cubes(&client, units);
    let mut tensors = vec![&angles];
    for x in &prepared {
        tensors.push(&x.source);
        tensors.extend(x.target.as_ref().map(|(target, _)| target));
    }
    let address = address_type(&tensors);
    let read = |x: &PreparedTensor<CubeTensor>| x.source.clone().into_buffer_arg();
    let angles = angles.into_buffer_arg();
    // SAFETY: `RotaryOp::check` has compared the sizes of q, k and the angles; `strided` keeps each
    // tensor within its memory, `empty` makes targets of the sources' shapes, `rows` a matrix of
    // angles; `prepare` writes in place only memory that nothing else holds, each element by one
    // unit. `vector_size` and `w` divide every offset and stride, and each part of a row.
    unsafe {
        match &prepared[..] {
            [x] => rotate_single::launch_unchecked(
                &client,
                count,
                dim,
                address,
                n,
                w,
                read(x),
                angles,
                x.written(0),
                x.operand(n),
                row,
                grid,
                access,
                types,
            ),
            [q, k] => rotate_pair::launch_unchecked(
                &client,
                count,
                dim,
                address,
                n,
                w,
                read(q),
                read(k),
                angles,
                q.written(0),
                k.written(1),
                q.operand(n),
                k.operand(n),
                row,
                grid,
                access,
                types,
            ),
            _ => unreachable!("one tensor, or two"),
        }
    }
    prepared.map(PreparedTensor::into_output)
}

/// The angles with contiguous columns.
pub(crate) fn rows(angles: CubeTensor) -> CubeTensor {
    let contiguous = angles.meta.shape()[1] <= 1 || angles.meta.strides()[1] == 1;
    if contiguous && !angles.meta.is_tiled() {
        angles
    } else {
        into_contiguous(angles)
    }
}

/// The gradients of the angles of a forward rotation of `x`, in two deterministic steps: sums over
/// parts of a row's terms, then over the parts. None where there is no kernel.
pub(crate) fn angle_gradients(
    operands: [&CubeTensor; 2],
    angles: &CubeTensor,
    op: &RotaryOp,
) -> Option<CubeTensor> {
    let (client, dtype) = (operands[0].client.clone(), operands[0].dtype);
    let types = types(&client, dtype)?;
    let [(x, from), (gradient, gradient_from)] = operands.map(|x| {
        let x = PreparedTensor::readable(x.clone(), op);
        (x.source, x.from)
    });
    let (geometry, rows) = (op.geometry, angles.meta.shape()[0]);
    let n = vector_size(&client, dtype, op, false, |n| {
        is_vectors_of(&x, &from, n) && is_vectors_of(&gradient, &gradient_from, n)
    });
    let shared = rows == from.seq;
    let terms = from.heads * if shared { from.batch } else { 1 };
    let lanes = geometry.pairs() / n;
    if terms * rows == 0 {
        return None;
    }
    let width = 2 * geometry.lane_count();
    let most = terms.div_ceil(FEWEST_TERMS);
    // By the pairs, not by the units: the sum's order is the same for every vector size.
    let parts = ENOUGH_UNITS
        .div_ceil(rows * geometry.pairs())
        .clamp(1, most);
    let part = terms.div_ceil(parts);
    let parts = terms.div_ceil(part);
    let units = rows.saturating_mul(lanes).saturating_mul(parts);
    if units > MOST_UNITS {
        return None;
    }
    let matrix = |rows: usize| empty_beside(&x, Shape::new([rows, width]), angles.dtype);
    let (gradients, sums) = (matrix(rows), (parts > 1).then(|| matrix(parts * rows)));
    let written = sums.as_ref().unwrap_or(&gradients);
    let row = row_parts(op, n, 1, width);
    let grid = SumGridLaunch::new(
        units as u32,
        lanes as u32,
        rows as u32,
        from.seq as u32,
        from.heads as u32,
        terms as u32,
        part as u32,
        rows as u32,
    );
    let (count, dim) = cubes(&client, units);
    // SAFETY: as in `rotate`; `sums` has a row for each part of each row of angles, or is the
    // gradients, of which the one part is all.
    unsafe {
        angle_sums::launch_unchecked(
            &client,
            count,
            dim,
            address_type(&[&x, &gradient, written]),
            n,
            x.clone().into_buffer_arg(),
            gradient.clone().into_buffer_arg(),
            written.clone().into_buffer_arg(),
            steps(&from, n),
            steps(&gradient_from, n),
            row,
            grid,
            access(op, shared),
            types,
        );
    }
    if let Some(sums) = sums {
        add(sums, &gradients, types[1]);
    }
    Some(gradients)
}
