//! The norm with the rotation: one launch per tensor. The backward has up to two more small
//! launches (four on devices with very small groups), which sum the weight's gradient in a fixed
//! order.

#![allow(
    unsafe_code,
    reason = "kernels trust the sizes that they are launched with"
)]

mod kernels;

use burn::backend::tensor::FloatTensor;
use burn::tensor::Shape;
use burn_cubecl::CubeBackend;
use burn_cubecl::cubecl::client::Client;
use burn_cubecl::cubecl::ir::ElemType;
use burn_cubecl::cubecl::prelude::*;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use burn_fused::cube::{ENOUGH_UNITS, add, address_type, empty_beside, types};
use rope_core::{Direction, HeadsLayout, NormOrder};

use self::kernels::{NormShape, TeamGridLaunch, norm_rotate, norm_rotate_back};
use crate::norm_rotary::{NormRotaryOp, NormRotaryOps, composed};
use crate::prepared::PreparedTensor;
use crate::rotary::cube::checked;
use crate::rotary::cube::kernels::{RowPartsLaunch, UnitGridLaunch};
use crate::rotary::cube::launch::{
    MOST_UNITS, access, angle_width, grouped, is_vectors_of, prepare, row_parts, rows, steps,
    vector_size,
};
use crate::rotary::{RotaryOp, RotaryOps};

impl NormRotaryOps for CubeBackend {
    fn norm_rotary(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        angles: FloatTensor<Self>,
        op: NormRotaryOp,
    ) -> FloatTensor<Self> {
        let rotary = op.rotary(Direction::Forward);
        checked(rotary.check(&x, None, &angles));
        checked(op.check_weight("the weight", &weight, &x));
        forward(x, weight, angles, op, &rotary)
    }

    fn norm_rotary_backward(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        angles: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
        op: NormRotaryOp,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let rotary = op.rotary(Direction::Forward);
        checked(rotary.check_gradient(&x, &gradient, &angles));
        checked(op.check_weight("the weight", &weight, &x));
        backward(x, weight, angles, gradient, op, &rotary)
    }
}

/// The units of a cube, unless the device has fewer.
const CUBE: usize = 256;
/// Numbers that each unit writes to shared memory.
const SHARED: usize = 4;
/// Parts that one unit of the weight's sum adds up.
const PARTS: usize = 32;

/// How a launch divides the heads.
struct Teams {
    shape: NormShape,
    cubes: usize,
    /// Units of a team that hold channels.
    holding: usize,
    teams: usize,
    rows: usize,
    inner: usize,
    seq: usize,
    unit_heads: usize,
}

impl Teams {
    /// None where a head is larger than a cube, or there is too much of it for 32 bits.
    fn new(
        client: &Client,
        layout: &HeadsLayout,
        op: &NormRotaryOp,
        rotary: &RotaryOp,
        n: usize,
        angle_rows: usize,
        computed: ElemType,
    ) -> Option<Self> {
        let (geometry, hardware) = (op.geometry, &client.properties().hardware);
        let holding = (geometry.pairs() + geometry.head_dim() - geometry.rotary_dim()) / n;
        let team = holding.next_power_of_two();
        let most = hardware.max_units_per_cube as usize;
        let cube = if most >= CUBE {
            CUBE
        } else {
            most.checked_ilog2().map_or(0, |log| 1 << log)
        };
        let shared = (SHARED * cube + geometry.head_dim()) * computed.size();
        if team > cube || shared > hardware.max_shared_memory_size {
            return None;
        }
        let (tokens, heads) = (layout.batch * layout.seq, layout.heads);
        let (unit_heads, groups) = grouped(heads, tokens * team);
        let rows = tokens * groups;
        if rows > MOST_UNITS {
            return None;
        }
        let cubes = rows.min(ENOUGH_UNITS / team).div_ceil(cube / team);
        let access = access(rotary, angle_rows == layout.seq);
        Some(Self {
            shape: NormShape {
                team,
                cube,
                head_dim: geometry.head_dim(),
                after: op.norm.order() == NormOrder::AfterRotation,
                unit_offset: op.norm.unit_offset(),
                access,
            },
            cubes,
            holding,
            teams: cubes * (cube / team),
            rows,
            inner: if access.heads_outside { tokens } else { groups },
            seq: layout.seq,
            unit_heads,
        })
    }

    fn grid(&self) -> TeamGridLaunch {
        let grid = UnitGridLaunch::new(
            (self.cubes * self.shape.cube) as u32,
            self.shape.team as u32,
            self.inner as u32,
            self.seq as u32,
            self.unit_heads as u32,
        );
        TeamGridLaunch::new(
            grid,
            self.holding as u32,
            self.teams as u32,
            self.rows as u32,
            self.rows.div_ceil(self.teams) as u32,
        )
    }

    fn launched(&self) -> (CubeCount, CubeDim) {
        let count = CubeCount::Static(self.cubes as u32, 1, 1);
        (count, CubeDim::new_1d(self.shape.cube as u32))
    }
}

/// Composed where there is no kernel.
fn forward(
    x: CubeTensor,
    weight: CubeTensor,
    angles: CubeTensor,
    op: NormRotaryOp,
    rotary: &RotaryOp,
) -> CubeTensor {
    let composed = |x, weight, angles| {
        let rotate = CubeBackend::rotary_single;
        composed::norm_rotate::<CubeBackend>(x, weight, angles, op, rotate)
    };
    let (client, dtype) = (x.client.clone(), x.dtype);
    let Some(types) = types(&client, dtype) else {
        return composed(x, weight, angles);
    };
    if x.meta.num_elements() == 0 {
        return x;
    }
    x.assert_is_on_same_device(&angles);
    x.assert_is_on_same_device(&weight);
    let (weight, angles) = (into_contiguous(weight), rows(angles));
    let prepared = prepare(x, rotary);
    let n = vector_size(&client, dtype, rotary, true, |n| prepared.is_vectors_of(n));
    let angle_rows = angles.meta.shape()[0];
    let teams = Teams::new(
        &client,
        &prepared.from,
        &op,
        rotary,
        n,
        angle_rows,
        types[1],
    );
    let Some(teams) = teams else {
        return composed(prepared.source, weight, angles);
    };
    let w = angle_width(&client, n, &angles, Some(&weight));
    let mut tensors = vec![&weight, &angles, &prepared.source];
    tensors.extend(prepared.target.as_ref().map(|(target, _)| target));
    let address = address_type(&tensors);
    let row: RowPartsLaunch = row_parts(rotary, n, w, angles.meta.strides()[0]);
    let (count, dim) = teams.launched();
    // SAFETY: as in `rotate`; the weight has an element for each channel. A team writes the rows
    // of which it alone has read the heads.
    unsafe {
        norm_rotate::launch_unchecked(
            &client,
            count,
            dim,
            address,
            n,
            w,
            prepared.source.clone().into_buffer_arg(),
            weight.into_buffer_arg(),
            angles.into_buffer_arg(),
            prepared.written(0),
            prepared.operand(n),
            row,
            teams.grid(),
            InputScalar::new(op.norm.eps(), types[1]),
            teams.shape,
            types,
        );
    }
    prepared.into_output()
}

/// Composed where there is no kernel.
fn backward(
    x: CubeTensor,
    weight: CubeTensor,
    angles: CubeTensor,
    gradient: CubeTensor,
    op: NormRotaryOp,
    rotary: &RotaryOp,
) -> (CubeTensor, CubeTensor) {
    let composed = |x, weight, angles, gradient| {
        let rotate = CubeBackend::rotary_single;
        composed::norm_rotate_backward::<CubeBackend>(x, weight, angles, gradient, op, rotate)
    };
    let (client, dtype) = (x.client.clone(), x.dtype);
    let Some(types) = types(&client, dtype).filter(|_| x.meta.num_elements() > 0) else {
        return composed(x, weight, angles, gradient);
    };
    for other in [&weight, &angles, &gradient] {
        x.assert_is_on_same_device(other);
    }
    let x = PreparedTensor::readable(x, rotary);
    let (x, x_layout) = (x.source, x.from);
    let prepared = prepare(gradient, rotary);
    let n = vector_size(&client, dtype, rotary, true, |n| {
        prepared.is_vectors_of(n) && is_vectors_of(&x, &x_layout, n)
    });
    let angle_rows = angles.meta.shape()[0];
    let teams = Teams::new(
        &client,
        &prepared.from,
        &op,
        rotary,
        n,
        angle_rows,
        types[1],
    );
    let Some(teams) = teams else {
        return composed(x, weight, angles, prepared.source);
    };
    let (weight, angles) = (into_contiguous(weight), rows(angles));
    let w = angle_width(&client, n, &angles, Some(&weight));
    let head_dim = op.geometry.head_dim();
    let sums_of = |rows: usize| empty_beside(&x, Shape::new([rows * head_dim]), weight.dtype);
    let mut sums = sums_of(teams.cubes);
    let mut tensors = vec![&weight, &angles, &x, &prepared.source, &sums];
    tensors.extend(prepared.target.as_ref().map(|(target, _)| target));
    let address = address_type(&tensors);
    let row: RowPartsLaunch = row_parts(rotary, n, w, angles.meta.strides()[0]);
    let (count, dim) = teams.launched();
    // SAFETY: as forward; x has the gradient's shape, and `sums` a row for each cube.
    unsafe {
        norm_rotate_back::launch_unchecked(
            &client,
            count,
            dim,
            address,
            n,
            w,
            x.clone().into_buffer_arg(),
            weight.clone().into_buffer_arg(),
            angles.clone().into_buffer_arg(),
            prepared.source.clone().into_buffer_arg(),
            prepared.written(3),
            sums.clone().into_buffer_arg(),
            steps(&x_layout, n),
            prepared.operand(n),
            row,
            teams.grid(),
            InputScalar::new(op.norm.eps(), types[1]),
            teams.shape,
            types,
        );
    }
    let mut parts = teams.cubes;
    while parts > 1 {
        parts = parts.div_ceil(PARTS);
        let added = sums_of(parts);
        add(sums, &added, types[1]);
        sums = added;
    }
    (prepared.into_output(), sums)
}
