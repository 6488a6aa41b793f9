//! cos and sin of a step as a tensor, gathered from tables on the host and on devices.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

#[cfg(any(feature = "cube", feature = "remote"))]
use burn::backend::DispatchDevice;
use burn::tensor::{Bool, DType, Device, Element, Int, Tensor, TensorData};
use rope_core::{CosSinTable, LaneMap, Positions, Real, RopeError, TokenAngles};

use crate::error::{Result, RotaryError};

/// cos and sin for the tokens of a step, computed once and shared by all layers.
///
/// [`Rotary::angles`](crate::Rotary::angles) computes them, in f64
/// [`Rotary::try_angles_for`](crate::Rotary::try_angles_for). They can also come from angles
/// computed on the host, or from custom tensors. If custom tensors require gradients, the backward
/// computes these, and the graph keeps q and k for it. Cloning shares the tensor.
///
/// # Angles per head
/// Each head may have separate angles (LTX-2, Mochi, RoPE-Mixed). Their memory grows with the
/// number of heads, and each row is read for one head. Every backend rotates such heads as tokens
/// of one head, with its ordinary kernels. In layouts with heads outside tokens or samples inside
/// them ([`Layout::Bnsd`], [`Layout::Sbnd`]), and for other views, the tensor is copied first,
/// unless it is a view of tokens with adjacent heads, as from a projection.
///
/// [`Layout::Bnsd`]: rope_core::Layout::Bnsd
/// [`Layout::Sbnd`]: rope_core::Layout::Sbnd
#[derive(Clone, Debug)]
pub struct RotaryAngles {
    /// The result of [`rows`](Self::rows); `heads` divides their number.
    pub(crate) rows: Tensor<2>,
    /// Rows per token: 1, or the number of heads with separate angles.
    heads: usize,
}

impl RotaryAngles {
    /// Takes custom cos and sin, `[tokens, lanes]` each; gradients reach both.
    ///
    /// # Errors
    /// [`RotaryError::AngleDType`], [`RopeError::AngleShape`] if the shape of sin differs from that
    /// of cos.
    pub fn from_cos_sin(cos: Tensor<2>, sin: Tensor<2>) -> Result<Self> {
        // burn takes a 0 in a shape for the size that was there: such are refused first.
        expect_alike(&cos, &sin)?;
        Self::per_head(cos.unsqueeze_dim(1), sin.unsqueeze_dim(1))
    }

    /// Takes custom cos and sin for each head, `[tokens, heads, lanes]` each; gradients reach both.
    ///
    /// # Errors
    /// As [`from_cos_sin`](Self::from_cos_sin); [`RopeError::AngleShape`] without a head or a lane.
    pub fn per_head(cos: Tensor<3>, sin: Tensor<3>) -> Result<Self> {
        expect_alike(&cos, &sin)?;
        let [tokens, heads, lanes] = cos.dims();
        let rows = Tensor::cat(vec![cos, sin], 2).reshape([tokens * heads, 2 * lanes]);
        Ok(Self { rows, heads })
    }

    /// Computes cos and sin from positions and frequencies, either of which may be learned. Each
    /// head's angles mix all axes:
    ///
    /// angle\[token, head, lane\] = sum over axes of position\[axis, token\] * frequency\[axis,
    /// head, lane\]
    ///
    /// If required, gradients reach the frequencies, summed over tokens, and the positions, summed
    /// over heads and lanes. With one head, all heads of q and k share the angles.
    /// [`TokenAngles::per_head`] computes the same angles in f64 for frequencies that are not
    /// learned.
    ///
    /// # Shapes
    /// positions `[axes, tokens]`, frequencies `[axes, heads, lanes]`, both in f32 or f64
    ///
    /// # Units
    /// frequencies in radians per unit of the positions
    ///
    /// # Memory
    /// The graph keeps the angles, one number each, beside cos and sin, and the tensors that the
    /// rotation keeps for [learned angles](Self).
    ///
    /// # Numerics
    /// Products, sums, cos and sin are computed in the tensors' type: in f32, the error of an angle
    /// of 1000 radians is up to 6e-5. Shader-based GPU backends (Vulkan, wgpu) have no cos and sin
    /// in f64.
    ///
    /// # Errors
    /// [`RopeError::PositionAxes`], [`RopeError::HeadFrequencies`] without an axis, a head or a
    /// lane, [`RotaryError::AngleDType`] if the types differ.
    ///
    /// # Examples
    /// ```
    /// use burn::tensor::{Device, Distribution, Tensor};
    /// use rope_burn::{Rotary, RotaryAngles, rope_core::{Layout, RotarySpec}};
    ///
    /// let device = Device::flex().autodiff();
    /// let rotary = Rotary::new(RotarySpec::builder(8).build()?, Layout::Bsnd);
    /// // Rows and columns of 2 x 3 patches; 4 heads of 8 channels, 4 pairs each.
    /// let positions = [[0., 0., 0., 1., 1., 1.], [0., 1., 2., 0., 1., 2.]];
    /// let positions = Tensor::<2>::from_data(positions, &device);
    /// let frequencies = Tensor::<3>::random([2, 4, 4], Distribution::Default, &device);
    /// let frequencies = frequencies.require_grad(); // or a parameter of a module
    /// let angles = RotaryAngles::from_frequencies(positions, frequencies.clone())?;
    /// let q = Tensor::<4>::random([1, 6, 4, 8], Distribution::Default, &device);
    /// let gradients = rotary.forward_single(q, &angles).powi_scalar(3).sum().backward();
    /// assert_eq!(frequencies.grad(&gradients).unwrap().dims(), [2, 4, 4]);
    /// # Ok::<(), rope_burn::RotaryError>(())
    /// ```
    ///
    /// # Source
    /// Heo, Park, Han and Yun, 2024, Rotary Position Embedding for Vision Transformer, RoPE-Mixed.
    pub fn from_frequencies(positions: Tensor<2>, frequencies: Tensor<3>) -> Result<Self> {
        let ([found, _], [axes, heads, lanes]) = (positions.dims(), frequencies.dims());
        if found != axes {
            let expected = axes;
            return Err(RopeError::PositionAxes { expected, found }.into());
        }
        let (found, expected) = (frequencies.dtype(), positions.dtype());
        if found != expected {
            return Err(RotaryError::AngleDType {
                what: "the frequencies",
                found,
                expected,
            });
        }
        let found = axes * heads * lanes;
        let none = RopeError::HeadFrequencies { axes, heads, found };
        if found == 0 {
            return Err(none.into());
        }
        // Not a matrix product, which some devices compute in fewer bits than the type has.
        let axis_rows = |axis| {
            let positions = positions.clone().narrow(0, axis, 1);
            // `reshape` takes a size of 0 for the input's own.
            positions.swap_dims(0, 1).unsqueeze_dim::<3>(2) * frequencies.clone().narrow(0, axis, 1)
        };
        let angle = (0..axes).map(axis_rows).reduce(|sum, angle| sum + angle);
        let angle = angle.ok_or(none)?;
        Self::per_head(angle.clone().cos(), angle.sin())
    }

    /// Copies angles computed on the host, shared by all heads or per head, to `device`.
    pub fn upload<A: Real + Element>(angles: TokenAngles<A>, device: &Device) -> Self {
        let heads = angles.heads().unwrap_or(1);
        let shape = [angles.tokens() * heads, 2 * angles.lanes()];
        let data = TensorData::new(angles.into_rows(), shape);
        // Whatever the device's default type: 16-bit angles would lose the position.
        let rows = Tensor::from_data(data, (device, A::dtype()));
        Self { rows, heads }
    }

    /// Returns `[tokens, 2 * lanes]`: each token's cosines, then its sines, attention scaling
    /// included, in f32 (f64 to rotate f64 tensors). Lanes are the pairs, or for a per-channel axis
    /// layout all first members, then all second members. Angles per head are `[tokens * heads, 2 *
    /// lanes]`, with the heads of a token adjacent.
    pub fn rows(&self) -> Tensor<2> {
        self.rows.clone()
    }

    /// Makes the angles parameters: [`rows`](Self::rows) receives a gradient.
    #[must_use]
    pub fn require_grad(self) -> Self {
        Self {
            rows: self.rows.require_grad(),
            ..self
        }
    }

    /// Returns the number of tokens.
    pub fn tokens(&self) -> usize {
        self.rows.dims()[0] / self.heads
    }

    /// Returns the rows per token: 1 if all heads share the angles, else the number of heads of the
    /// tensors to rotate.
    pub fn heads(&self) -> usize {
        self.heads
    }

    /// Returns the element type of cos and sin.
    pub fn dtype(&self) -> DType {
        self.rows.dtype()
    }
}

/// A module's tables, shared by its clones.
///
/// A device with separate memory receives a copy of the table once it has received as many rows of
/// angles as the table has. From then on a step sends only its position ids, and no sequence of
/// steps sends more than three times the bytes of the rows alone.
///
/// Rows are computed and gathered on the threads of the pool. A thread that waits for the pool may
/// run other work that requests angles, so the locks are held only to read and to replace.
pub(crate) struct Tables {
    /// Always complete: a longer table replaces it once all rows are computed.
    host: Mutex<Arc<CosSinTable>>,
    copies: Mutex<Vec<Copy>>,
    budget_bytes: usize,
}

/// Prints the host's table without its values, for the output of modules.
impl fmt::Debug for Tables {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        lock(&self.host).fmt(f)
    }
}

/// Locks, even after a panic: the guarded value is replaced as a whole, so it is never incomplete.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A table on a device.
#[derive(Clone)]
struct Copy {
    device: Device,
    /// Rows of angles that the device has received.
    received: usize,
    /// `[positions, 2 * lanes]`: each lane's cosine, then each lane's sine.
    rows: Option<Tensor<2>>,
    /// For each axis except the first, `[1, 2 * lanes]`: the columns that it drives.
    columns: Vec<Tensor<2, Bool>>,
}

impl Copy {
    fn new(device: Device, map: &LaneMap) -> Self {
        let columns = (1..map.axis_count()).map(|axis| {
            let driven = map
                .lanes()
                .iter()
                .map(|lane| usize::from(lane.axis) == axis);
            let driven: Vec<bool> = driven.clone().chain(driven).collect();
            let shape = [1, driven.len()];
            Tensor::from_data(TensorData::new(driven, shape), &device)
        });
        Self {
            columns: columns.collect(),
            device,
            received: 0,
            rows: None,
        }
    }

    /// Gathers the rows of the tokens at `positions`: for each axis, the columns that it drives.
    ///
    /// # Errors
    /// Those of [`Positions::axis`].
    fn gather(&self, rows: &Tensor<2>, positions: &Positions) -> rope_core::Result<Tensor<2>> {
        let tokens = positions.tokens();
        let axis_rows = |axis| -> rope_core::Result<Tensor<2>> {
            // Within the table, whose length its budget keeps far below 2^31.
            let ids = positions.axis(axis)?.iter().map(|id| id.cast_signed());
            let ids = TensorData::new(ids.collect::<Vec<i32>>(), [tokens]);
            let ids = Tensor::<1, Int>::from_data(ids, (&self.device, DType::I32));
            Ok(rows.clone().select(0, ids))
        };
        let mut further = self.columns.iter().enumerate();
        further.try_fold(axis_rows(0)?, |gathered, (axis, columns)| {
            let columns = columns.clone().expand(gathered.dims());
            Ok(gathered.mask_where(columns, axis_rows(axis + 1)?))
        })
    }
}

impl Tables {
    pub(crate) fn new(host: CosSinTable, budget_bytes: usize) -> Self {
        Self {
            host: Mutex::new(Arc::new(host.with_budget_bytes(budget_bytes))),
            copies: Mutex::default(),
            budget_bytes,
        }
    }

    /// Computes the angles of the tokens at `positions`.
    ///
    /// # Errors
    /// Those of [`CosSinTable::grow_to`] and [`TokenAngles::gather`].
    pub(crate) fn angles(
        &self,
        positions: &Positions,
        device: &Device,
    ) -> rope_core::Result<RotaryAngles> {
        let table = self.table(positions.highest())?;
        if !in_host_memory(device)
            && let Some(rows) = self.on_device(&table, positions, device)?
        {
            return Ok(RotaryAngles { rows, heads: 1 });
        }
        let angles = TokenAngles::gather(&table, positions)?;
        Ok(RotaryAngles::upload(angles, device))
    }

    /// Returns the host's table, grown to the row of `position`.
    ///
    /// # Errors
    /// Those of [`CosSinTable::grow_to`].
    fn table(&self, position: u32) -> rope_core::Result<Arc<CosSinTable>> {
        let table = lock(&self.host).clone();
        if (position as usize) < table.rows() {
            return Ok(table);
        }
        let mut longer = CosSinTable::clone(&table);
        longer.grow_to(position)?;
        let longer = Arc::new(longer);
        let mut host = lock(&self.host);
        if host.rows() < longer.rows() {
            *host = longer.clone();
        }
        Ok(longer)
    }

    /// Returns the rows that the device gathers, or none before it has the table.
    fn on_device(
        &self,
        table: &CosSinTable,
        positions: &Positions,
        device: &Device,
    ) -> rope_core::Result<Option<Tensor<2>>> {
        let (map, rows) = (table.lane_map(), table.rows());
        let (lanes, tokens) = (map.lanes().len(), positions.tokens());
        if tokens == 0 || positions.axis_count() != map.axis_count() {
            return Ok(None);
        }
        let inner = device.clone().inner();
        let (index, copy) = {
            let mut copies = lock(&self.copies);
            let known = copies.iter().position(|copy| copy.device == inner);
            let index = known.unwrap_or(copies.len());
            if known.is_none() {
                copies.push(Copy::new(inner.clone(), map));
            }
            let copy = &mut copies[index];
            let highest = positions.highest() as usize;
            copy.rows = copy.rows.take().filter(|rows| highest < rows.dims()[0]);
            let bytes = rows * 2 * lanes * size_of::<f32>();
            if copy.rows.is_none() && (copy.received < rows || bytes > self.budget_bytes) {
                copy.received += tokens;
                return Ok(None);
            }
            (index, copy.clone())
        };
        let rows = match &copy.rows {
            Some(rows) => rows.clone(),
            None => {
                let all = Positions::text(map.axis_count(), 0, rows)?;
                let all = TokenAngles::gather(table, &all)?;
                let rows = RotaryAngles::upload(all, &inner).rows;
                lock(&self.copies)[index].rows = Some(rows.clone());
                rows
            }
        };
        let gathered = copy.gather(&rows, positions)?;
        Ok(Some(match device.gradient_checkpointing_strategy() {
            Some(strategy) => {
                let gathered = gathered.autodiff();
                gathered.with_gradient_checkpointing_strategy(strategy)
            }
            None => gathered,
        }))
    }
}

/// Checks that sin has the type and sizes of cos, and that a token has angles.
fn expect_alike<const D: usize>(cos: &Tensor<D>, sin: &Tensor<D>) -> Result<()> {
    let (dims, found) = (cos.dims(), sin.dtype());
    if found != cos.dtype() {
        return Err(RotaryError::AngleDType {
            what: "sin",
            found,
            expected: cos.dtype(),
        });
    }
    let (tokens, sizes) = (dims[0], &dims[1..]);
    let refused = |what, found, width| {
        Err(RotaryError::from(RopeError::AngleShape {
            what,
            found,
            expected: tokens * width,
            tokens,
            width,
        }))
    };
    let width = sizes.iter().product();
    if width == 0 {
        return refused("cos", 0, sizes.iter().map(|size| (*size).max(1)).product());
    }
    if sin.dims() != dims {
        return refused("sin", sin.shape().num_elements(), width);
    }
    Ok(())
}

/// True if a device shares the host's memory, so that nothing must be sent to it.
fn in_host_memory(device: &Device) -> bool {
    match device.clone().inner().as_dispatch() {
        #[cfg(feature = "cube")]
        DispatchDevice::Cube(_) => false,
        #[cfg(feature = "remote")]
        DispatchDevice::Remote(_) => false,
        _ => true,
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use rayon::prelude::*;
    use rope_core::{AxisLayout, RotarySpec};

    use super::*;

    /// While one thread's rows are gathered, the pool's threads ask for rows themselves: one that
    /// waits for a part of its own rows is given another one's request.
    #[test]
    fn threads_of_a_pool_get_angles_at_once() {
        let spec = RotarySpec::builder(32).build().expect("valid");
        let table = CosSinTable::new(&spec, None).expect("valid");
        let tables = Arc::new(Tables::new(table, 1 << 24));
        let (done, finished) = mpsc::channel();
        let ask = move |tokens: usize| {
            let positions = Positions::text(1, 0, tokens).expect("in range");
            let angles = tables.angles(&positions, &Device::flex()).expect("valid");
            assert_eq!(angles.rows.dims()[0], tokens);
        };
        // More threads than cores, so that some are free to take parts of another's rows.
        let pool = rayon::ThreadPoolBuilder::new().num_threads(16).build();
        let pool = pool.expect("threads");
        std::thread::spawn(move || {
            for round in 0..50 {
                pool.install(|| (0..64).into_par_iter().for_each(|_| ask(512 + round)));
            }
            done.send(()).expect("the test waits");
        });
        let limit = Duration::from_secs(60);
        finished
            .recv_timeout(limit)
            .expect("no thread waits for itself");
    }

    #[test]
    fn a_device_gathers_the_same_bits_as_the_host() {
        let device = Device::flex();
        let layouts = [
            AxisLayout::Single,
            AxisLayout::Contiguous(vec![4, 6, 6]),
            AxisLayout::Striped(vec![6, 5, 5]),
            AxisLayout::Ernie(vec![5, 5, 6]),
            AxisLayout::Balanced(vec![4, 6, 6]),
            AxisLayout::PerAxis(vec![4, 6, 6]),
            AxisLayout::PerAxisStriped(vec![8, 8]),
            AxisLayout::PerChannel(vec![4, 4, 4, 4]),
        ];
        for layout in layouts {
            let spec = RotarySpec::builder(32).axis_layout(layout.clone()).build();
            let spec = spec.unwrap_or_else(|error| panic!("{layout:?}: {error}"));
            let table = CosSinTable::new(&spec, None).expect("valid");
            let tables = Tables::new(table, 1 << 20);
            let ids: Vec<i64> = (0..spec.axis_count() as i64 * 50)
                .map(|i| i * 37 % 97)
                .collect();
            let positions = Positions::new(spec.axis_count(), &ids).expect("in range");
            let sent = tables.angles(&positions, &device).expect("valid").rows;
            let table = tables.table(positions.highest()).expect("in the budget");
            for received in [0, 50, 100] {
                let rows = tables.on_device(&table, &positions, &device);
                let rows = rows.expect("valid");
                assert_eq!(rows.is_none(), received < 100, "{layout:?}: {received}");
                if let Some(rows) = rows {
                    assert_eq!(rows.into_data(), sent.to_data(), "{layout:?}");
                }
            }
        }
    }
}
