//! The module for a model.

use std::sync::Arc;

use burn::backend::{Dispatch, DispatchTensor, TensorMetadata};
use burn::config::Config;
use burn::module::{Content, Module, ModuleDisplay};
use burn::tensor::{DType, Device, Element, FloatDType, Int, Tensor};
use burn_fused::{Implementation, accumulator, or_panic};
use rope_core::{
    CosSinTable, DEFAULT_TABLE_BUDGET_BYTES, Direction, Layout, Positions, Real, RopeError,
    RotarySpec, TokenAngles,
};

use super::composed;
use super::op::reaches;
use super::{RotaryOp, RotaryOps};
use crate::angles::{RotaryAngles, Tables};
use crate::error::{Result, RotaryError};
use crate::heads::HeadsAsTokens;

/// Configuration of a [`Rotary`].
#[derive(Config, Debug)]
pub struct RotaryConfig {
    /// The rotation of the model's configuration.
    pub spec: RotarySpec,
    /// The order of the dimensions of q and k.
    #[config(default = "Layout::Bsnd")]
    pub layout: Layout,
    /// The implementation of the rotation.
    #[config(default = "Implementation::Fused")]
    pub implementation: Implementation,
    /// The byte limit of the table of cos and sin; beyond it, angles are computed only for each
    /// step's tokens.
    #[config(default = "DEFAULT_TABLE_BUDGET_BYTES")]
    pub table_budget_bytes: usize,
}

impl RotaryConfig {
    /// Creates the module, which has no parameters and no device.
    ///
    /// # Errors
    /// [`RotaryError::Rope`] if the frequencies cannot be computed.
    pub fn try_init(&self) -> Result<Rotary> {
        let table = CosSinTable::new(&self.spec, None)?;
        let tables = Tables::new(table, self.table_budget_bytes);
        Ok(Rotary {
            spec: self.spec.clone(),
            layout: self.layout,
            implementation: self.implementation,
            tables: Arc::new(tables),
        })
    }

    /// Creates the module, which has no parameters and no device.
    ///
    /// # Panics
    /// If the frequencies cannot be computed; see [`try_init`](Self::try_init).
    #[track_caller]
    pub fn init(&self) -> Rotary {
        or_panic(self.try_init())
    }
}

/// Rotates q and k by the positions of their tokens, forward and backward.
///
/// Call [`angles`](Self::angles) once per step and [`forward`](Self::forward) in each layer, as in
/// the [example](crate#example). Cloning shares the table of cos and sin.
///
/// # Shapes
/// q and k in the order of the layout. Their head counts may differ, unless they are rotated
/// together by angles per head. q and k with different tokens or angles, as in cross-attention,
/// decoding or grouped queries with angles per head, are rotated one by one
/// ([`forward_single`](Self::forward_single)), which takes no more passes over memory.
///
/// # Memory
/// The autodiff graph keeps the step's angles, which all layers share, and neither q nor k. Tensors
/// that nothing else holds are rotated in place.
///
/// # Records
/// A record of the model contains nothing of this module: weights load silently into a rotation
/// with another theta or axis layout. Save the [`RotaryConfig`] beside them
/// ([`Config::save`](burn::config::Config::save)) and build the module from it.
#[derive(Module, Debug)]
#[module(custom_display)]
pub struct Rotary {
    #[module(skip)]
    spec: RotarySpec,
    #[module(skip)]
    layout: Layout,
    #[module(skip)]
    implementation: Implementation,
    #[module(skip)]
    tables: Arc<Tables>,
}

/// Prints the properties that distinguish rotations, without the table.
impl ModuleDisplay for Rotary {
    fn custom_content(&self, content: Content) -> Option<Content> {
        let geometry = self.spec.geometry();
        content
            .set_top_level_type("Rotary")
            .add_debug_attribute("head_dim", &geometry.head_dim())
            .add_debug_attribute("rotary_dim", &geometry.rotary_dim())
            .add_debug_attribute("pairing", &geometry.pairing())
            .add_debug_attribute("axes", self.spec.axis_layout())
            .add_debug_attribute("frequencies", self.spec.frequencies())
            .add_debug_attribute("layout", &self.layout)
            .add_debug_attribute("implementation", &self.implementation)
            .optional()
    }
}

impl Rotary {
    /// Creates a fused rotation of tensors in `layout`.
    ///
    /// # Panics
    /// If the frequencies cannot be computed; see [`RotaryConfig::try_init`].
    #[track_caller]
    pub fn new(spec: RotarySpec, layout: Layout) -> Self {
        RotaryConfig::new(spec).with_layout(layout).init()
    }

    /// Sets the implementation of the rotation.
    #[must_use]
    pub fn with_implementation(mut self, implementation: Implementation) -> Self {
        self.implementation = implementation;
        self
    }

    /// Returns the rotation of the model's configuration.
    pub fn spec(&self) -> &RotarySpec {
        &self.spec
    }

    /// Returns the order of the dimensions of q and k.
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// Returns the implementation of the rotation.
    pub fn implementation(&self) -> Implementation {
        self.implementation
    }

    /// Computes cos and sin for the tokens of a step, on `device`; one tensor serves all layers.
    ///
    /// Positions of a batch are `[axes, batch * seq]`, or `[axes, seq]` if all samples share them.
    /// The device is that of q and k, with or without autodiff.
    ///
    /// # Panics
    /// If the positions do not fit the specification; see [`try_angles`](Self::try_angles).
    #[track_caller]
    pub fn angles(&self, positions: &Positions, device: &Device) -> RotaryAngles {
        or_panic(self.try_angles(positions, device))
    }

    /// Computes cos and sin for the tokens of a step, on `device`; one tensor serves all layers.
    ///
    /// They are gathered from the module's table, which grows to the positions in use. A device
    /// that does not share the host's memory gathers from its own copy, so a step sends only
    /// position ids. Angles are computed for just these tokens if the table would exceed its
    /// budget, if the positions are not ids, or if the frequencies depend on the sequence length
    /// (dynamic, longrope), which is the highest position + 1.
    ///
    /// # Errors
    /// [`RopeError::PositionAxes`] if the axes of the positions differ from the specification's.
    pub fn try_angles(&self, positions: &Positions, device: &Device) -> Result<RotaryAngles> {
        if positions.are_ids() && !self.spec.frequencies().depends_on_seq_len() {
            match self.tables.angles(positions, device) {
                Err(RopeError::TableBudget { .. }) => {}
                angles => return Ok(angles?),
            }
        }
        self.angles_alone::<f32>(positions, device)
    }

    /// Computes angles for just these tokens, without a table.
    fn angles_alone<A: Real + Element>(
        &self,
        positions: &Positions,
        device: &Device,
    ) -> Result<RotaryAngles> {
        let depends = self.spec.frequencies().depends_on_seq_len();
        let seq_len = depends.then(|| u64::from(positions.highest()) + 1);
        let angles = TokenAngles::<A>::new(&self.spec, positions, seq_len)?;
        Ok(RotaryAngles::upload(angles, device))
    }

    /// Computes the same as [`angles`](Self::angles), in the type for rotating tensors of `dtype`:
    /// f64 for f64, f32 for the others.
    ///
    /// # Panics
    /// If the positions do not fit the specification; see [`try_angles_for`](Self::try_angles_for).
    #[track_caller]
    pub fn angles_for(&self, dtype: DType, positions: &Positions, device: &Device) -> RotaryAngles {
        or_panic(self.try_angles_for(dtype, positions, device))
    }

    /// Computes the same as [`try_angles`](Self::try_angles), in the type for rotating tensors of
    /// `dtype`: f64 for f64, f32 for the others. In f64, angles are computed for just these tokens,
    /// without a table.
    ///
    /// # Errors
    /// As [`try_angles`](Self::try_angles);
    /// [`OpError::UnsupportedDType`](crate::OpError::UnsupportedDType).
    pub fn try_angles_for(
        &self,
        dtype: DType,
        positions: &Positions,
        device: &Device,
    ) -> Result<RotaryAngles> {
        if accumulator(dtype)? == FloatDType::F32 {
            return self.try_angles(positions, device);
        }
        self.angles_alone::<f64>(positions, device)
    }

    /// Computes the same as [`angles`](Self::angles), from ids `[axes, tokens]` in a tensor, on its
    /// device. Reads the ids back to check them: once per step, not per layer.
    ///
    /// # Panics
    /// If the ids do not fit the specification or cannot be read; see
    /// [`try_angles_from_ids`](Self::try_angles_from_ids).
    #[track_caller]
    pub fn angles_from_ids(&self, ids: Tensor<2, Int>) -> RotaryAngles {
        or_panic(self.try_angles_from_ids(ids))
    }

    /// Computes the same as [`try_angles`](Self::try_angles), from ids `[axes, tokens]` in a
    /// tensor, on its device. Reads the ids back to check them: once per step, not per layer.
    ///
    /// # Errors
    /// As [`try_angles`](Self::try_angles); [`RopeError::PositionOutOfRange`];
    /// [`RotaryError::Positions`] if the ids cannot be read.
    pub fn try_angles_from_ids(&self, ids: Tensor<2, Int>) -> Result<RotaryAngles> {
        let (device, axes) = (ids.device(), ids.dims()[0]);
        let ids = ids.try_into_data().map_err(|error| {
            let reason = error.to_string();
            RotaryError::Positions { reason }
        })?;
        let ids: Vec<i64> = ids.iter::<i64>().collect();
        self.try_angles(&Positions::new(axes, &ids)?, &device)
    }

    /// Rotates q and k.
    ///
    /// # Panics
    /// If shapes, types or angles disagree; see [`try_forward`](Self::try_forward).
    #[track_caller]
    pub fn forward<const D: usize>(
        &self,
        q: Tensor<D>,
        k: Tensor<D>,
        angles: &RotaryAngles,
    ) -> (Tensor<D>, Tensor<D>) {
        or_panic(self.try_forward(q, k, angles))
    }

    /// Rotates q and k.
    ///
    /// # Errors
    /// [`RotaryError::Rank`], [`RotaryError::Op`], [`RotaryError::AngleDType`];
    /// [`RopeError::ShapeMismatch`], [`RopeError::AngleShape`], [`RopeError::PositionTokens`].
    pub fn try_forward<const D: usize>(
        &self,
        q: Tensor<D>,
        k: Tensor<D>,
        angles: &RotaryAngles,
    ) -> Result<(Tensor<D>, Tensor<D>)> {
        self.rotate_pair(Direction::Forward, [q, k], angles)
    }

    /// Rotates one tensor: a k to be cached, a q whose k is cached, or q and k of different tokens
    /// one by one, as in cross-attention.
    ///
    /// # Panics
    /// If shapes, types or angles disagree; see [`try_forward_single`](Self::try_forward_single).
    #[track_caller]
    pub fn forward_single<const D: usize>(&self, x: Tensor<D>, angles: &RotaryAngles) -> Tensor<D> {
        or_panic(self.try_forward_single(x, angles))
    }

    /// Rotates one tensor.
    ///
    /// # Errors
    /// As [`try_forward`](Self::try_forward).
    pub fn try_forward_single<const D: usize>(
        &self,
        x: Tensor<D>,
        angles: &RotaryAngles,
    ) -> Result<Tensor<D>> {
        self.rotate_single(Direction::Forward, x, angles)
    }

    /// Rotates one tensor back by the angles: the output of an attention whose values were rotated
    /// too (DeepSeek-V4), so that it depends on the distance between tokens.
    ///
    /// Computes the adjoint (the transpose) of [`forward_single`](Self::forward_single), as a
    /// differentiable operation whose gradient is the forward rotation. It undoes the rotation if
    /// the attention scaling is 1 and both members of each pair share an angle. With an attention
    /// scaling of a, forward and adjoint together multiply x by a^2; with two angles per pair,
    /// their result is not a multiple of x.
    ///
    /// # Panics
    /// If shapes, types or angles disagree; see [`try_adjoint_single`](Self::try_adjoint_single).
    #[track_caller]
    pub fn adjoint_single<const D: usize>(&self, x: Tensor<D>, angles: &RotaryAngles) -> Tensor<D> {
        or_panic(self.try_adjoint_single(x, angles))
    }

    /// Rotates one tensor back, like [`adjoint_single`](Self::adjoint_single).
    ///
    /// # Errors
    /// As [`try_forward`](Self::try_forward).
    pub fn try_adjoint_single<const D: usize>(
        &self,
        x: Tensor<D>,
        angles: &RotaryAngles,
    ) -> Result<Tensor<D>> {
        self.rotate_single(Direction::Adjoint, x, angles)
    }

    /// Applies [`adjoint_single`](Self::adjoint_single) to q and k, for hand-written backward
    /// passes.
    ///
    /// # Panics
    /// If shapes, types or angles disagree; see [`try_adjoint`](Self::try_adjoint).
    #[track_caller]
    pub fn adjoint<const D: usize>(
        &self,
        dq: Tensor<D>,
        dk: Tensor<D>,
        angles: &RotaryAngles,
    ) -> (Tensor<D>, Tensor<D>) {
        or_panic(self.try_adjoint(dq, dk, angles))
    }

    /// Rotates q and k back, like [`adjoint`](Self::adjoint).
    ///
    /// # Errors
    /// As [`try_forward`](Self::try_forward).
    pub fn try_adjoint<const D: usize>(
        &self,
        dq: Tensor<D>,
        dk: Tensor<D>,
        angles: &RotaryAngles,
    ) -> Result<(Tensor<D>, Tensor<D>)> {
        self.rotate_pair(Direction::Adjoint, [dq, dk], angles)
    }

    fn rotate_single<const D: usize>(
        &self,
        direction: Direction,
        x: Tensor<D>,
        angles: &RotaryAngles,
    ) -> Result<Tensor<D>> {
        let [x] = self.apply(direction, [x], angles, |op, [x], angles| {
            op.check(&x, None, &angles)?;
            let rotate = if self.fuses(&x) {
                Dispatch::rotary_single
            } else {
                composed::rotate::<Dispatch>
            };
            Ok([rotate(x, angles, op)])
        })?;
        Ok(x)
    }

    fn rotate_pair<const D: usize>(
        &self,
        direction: Direction,
        tensors: [Tensor<D>; 2],
        angles: &RotaryAngles,
    ) -> Result<(Tensor<D>, Tensor<D>)> {
        let rotated = self.apply(direction, tensors, angles, |op, [q, k], angles| {
            op.check(&q, Some(&k), &angles)?;
            if self.fuses(&q) {
                return Ok(Dispatch::rotary_pair(q, k, angles, op).into());
            }
            let k = composed::rotate::<Dispatch>(k, angles.clone(), op);
            Ok([composed::rotate::<Dispatch>(q, angles, op), k])
        });
        Ok(rotated?.into())
    }

    /// Runs an operation on tensors and rows of angles; heads with separate angles are treated as
    /// tokens.
    pub(crate) fn apply<const D: usize, const N: usize>(
        &self,
        direction: Direction,
        tensors: [Tensor<D>; N],
        angles: &RotaryAngles,
        run: impl FnOnce(RotaryOp, [DispatchTensor; N], DispatchTensor) -> Result<[DispatchTensor; N]>,
    ) -> Result<[Tensor<D>; N]> {
        let op = RotaryOp {
            geometry: self.spec.geometry(),
            layout: self.layout,
            direction,
        };
        let rows = angles.rows.clone().into_dispatch();
        if angles.heads() <= 1 {
            let outputs = run(op, tensors.map(Tensor::into_dispatch), rows)?;
            return Ok(outputs.map(Tensor::from_dispatch));
        }
        let heads = HeadsAsTokens::new(op, &tensors[0], tensors.get(1), angles)?;
        let tensors = tensors.map(|x| heads.flatten(x).into_dispatch());
        let outputs = run(heads.op(), tensors, rows)?;
        Ok(outputs.map(|x| heads.restore(Tensor::from_dispatch(x))))
    }

    /// True if the backend receives one operation instead of ordinary ones.
    pub(crate) fn fuses(&self, x: &DispatchTensor) -> bool {
        self.implementation == Implementation::Fused && reaches(&x.device())
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use burn::tensor::TensorData;
    use burn_fused::OpError;
    use rope_core::AxisLayout;

    use super::*;

    fn rotary() -> Rotary {
        let spec = RotarySpec::builder(64)
            .axis_layout(AxisLayout::Striped(vec![12, 10, 10]))
            .build();
        Rotary::new(spec.expect("a valid specification"), Layout::Bsnd)
    }

    #[test]
    fn a_model_is_printed_without_its_table() {
        let rotary = rotary();
        let positions = Positions::text(3, 4000, 8).expect("in range");
        rotary.angles(&positions, &Device::flex());
        let (shown, debugged) = (format!("{rotary}"), format!("{rotary:?}"));
        for word in ["head_dim: 64", "Striped([12, 10, 10])", "layout: Bsnd"] {
            assert!(shown.contains(word), "`{word}` is not in: {shown}");
        }
        assert!(shown.len() < 500, "{shown}");
        assert!(debugged.len() < 8000, "{} bytes", debugged.len());
    }

    fn wave<const D: usize>(shape: [usize; D], phase: f32) -> Tensor<D> {
        let count = shape.iter().product::<usize>();
        let values: Vec<f32> = (0..count).map(|i| (0.7 * i as f32 + phase).sin()).collect();
        Tensor::from_data(TensorData::new(values, shape), &Device::flex())
    }

    /// The last two tokens as q, all five as k, as in decoding and cross-attention.
    #[test]
    fn q_may_be_shorter_than_k() {
        let (rotary, device) = (rotary(), Device::flex());
        let ids: Vec<i64> = (0..15).map(|i| i * 7 % 11).collect();
        let all = Positions::new(3, &ids).expect("in range");
        let tensor = Tensor::from_data(TensorData::new(ids.clone(), [3, 5]), &device);
        let from_ids = rotary.angles_from_ids(tensor).rows().into_data();
        assert_eq!(from_ids, rotary.angles(&all, &device).rows().into_data());
        let last: Vec<i64> = ids.chunks(5).flat_map(|axis| axis[3..].to_vec()).collect();
        let last = Positions::new(3, &last).expect("in range");
        let (q, k) = (wave([2, 5, 4, 64], 0.1), wave([2, 5, 2, 64], 0.2));
        let (long, expected) = rotary.forward(q.clone(), k.clone(), &rotary.angles(&all, &device));
        let short = rotary.forward_single(q.narrow(1, 3, 2), &rotary.angles(&last, &device));
        let k = rotary.forward_single(k, &rotary.angles(&all, &device));
        assert_eq!(short.into_data(), long.narrow(1, 3, 2).into_data());
        assert_eq!(k.into_data(), expected.into_data());
    }

    /// Each head of q, and of k with fewer heads, equals the result of rotating it alone.
    #[test]
    fn heads_of_q_and_of_k_have_angles_of_their_own() {
        let rotary = Rotary::new(
            RotarySpec::builder(16).build().expect("valid"),
            Layout::Bnsd,
        );
        let positions = wave([2, 5], 0.3);
        for (heads, phase) in [(4, 0.1), (2, 0.4)] {
            let (x, frequencies) = (wave([2, heads, 5, 16], phase), wave([2, heads, 8], phase));
            let rotate = |x: Tensor<4>, frequencies: Tensor<3>| {
                let angles = RotaryAngles::from_frequencies(positions.clone(), frequencies);
                rotary.forward_single(x, &angles.expect("valid"))
            };
            let rotated = rotate(x.clone(), frequencies.clone());
            for head in 0..heads {
                let own = frequencies.clone().narrow(1, head, 1);
                let alone = rotate(x.clone().narrow(1, head, 1), own);
                let found = rotated.clone().narrow(1, head, 1);
                assert_eq!(found.into_data(), alone.into_data(), "head {head}");
            }
        }
    }

    #[test]
    fn f64_tensors_get_angles_in_f64() {
        let (rotary, device) = (rotary(), Device::flex());
        let positions = Positions::text(3, 1 << 20, 5).expect("in range");
        let angles = rotary.angles_for(DType::F64, &positions, &device);
        let q = Tensor::<4>::ones([1, 5, 2, 64], (&device, DType::F64));
        let rotated = rotary.try_forward_single(q, &angles).expect("types agree");
        let rotated: Vec<f64> = rotated.into_data().iter::<f64>().collect();
        // Channel 0 of the last token rotates by its position in radians; its partner is 1 too.
        let angle = f64::from((1 << 20) + 4);
        let found = rotated[4 * 2 * 64];
        assert!(
            (found - (angle.cos() - angle.sin())).abs() < 1e-9,
            "{found}"
        );
        let narrow = rotary.try_angles_for(DType::BF16, &positions, &device);
        assert_eq!(narrow.expect("valid").dtype(), DType::F32);
        let refused = rotary.try_angles_for(DType::I32, &positions, &device);
        let expected = OpError::UnsupportedDType { found: DType::I32 }.into();
        assert_eq!(refused.err(), Some(expected));
    }
}
