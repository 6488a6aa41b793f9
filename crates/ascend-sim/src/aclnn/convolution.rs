//! Convolutions of one to three spatial axes and their gradients, as matrix products of patches.

use super::call::{Call, Kernel, Operand, kernel};
use super::descriptor::spatial_format;
use super::dtype::{DataType, FLT};
use super::matrix::{multiply_add, product_type};
use crate::codes::{ACLNN_INNER_NULLPTR, ACLNN_PARAM_INVALID, Failure, Outcome};

/// What the operators say of specifications they do not support.
fn unsupported<T>(message: impl std::fmt::Display) -> Outcome<T> {
    Err(Failure::new(ACLNN_INNER_NULLPTR, message))
}

fn as_unsupported<T>(outcome: Outcome<T>) -> Outcome<T> {
    outcome.map_err(|failure| Failure::new(ACLNN_INNER_NULLPTR, failure.message))
}

/// The lists that a convolution is called with.
pub(crate) struct Given {
    pub(crate) stride: Vec<i64>,
    pub(crate) padding: Vec<i64>,
    pub(crate) dilation: Vec<i64>,
    pub(crate) transposed: bool,
    pub(crate) output_padding: Vec<i64>,
    pub(crate) groups: i64,
}

/// How one position of the dense side (a convolution's output, a transposed one's input) reaches
/// the other side: `position·stride - before + tap·dilation`.
#[derive(Clone, Debug)]
struct Geometry {
    transposed: bool,
    groups: usize,
    kernel: Vec<usize>,
    stride: Vec<i64>,
    before: Vec<i64>,
    after: Vec<i64>,
    dilation: Vec<i64>,
    output_padding: Vec<i64>,
}

/// Refuses numbers outside a range.
fn expect_range(values: &[i64], range: std::ops::RangeInclusive<i64>, name: &str) -> Outcome {
    match values.iter().find(|value| !range.contains(value)) {
        None => Ok(()),
        Some(_) => unsupported(format!(
            "{name} is {values:?}, numbers from {} to {} are expected",
            range.start(),
            range.end()
        )),
    }
}

impl Geometry {
    fn new(given: &Given, x: &Operand, weight: &Operand) -> Outcome<Self> {
        let rank = x.rank();
        let Some((format, name)) = spatial_format(rank) else {
            return unsupported(format!("input has rank {rank}, 3 to 5 is expected"));
        };
        let spatial = rank - 2;
        for tensor in [x, weight] {
            if tensor.format != format || tensor.rank() != rank {
                return unsupported(format!(
                    "{} has format {} and rank {}, {name} ({format}) and {rank} are expected",
                    tensor.name,
                    tensor.format,
                    tensor.rank()
                ));
            }
        }
        for (list, name, lengths) in [
            (&given.stride, "stride", [spatial, spatial]),
            (&given.dilation, "dilation", [spatial, spatial]),
            (&given.output_padding, "outputPadding", [spatial, spatial]),
            (
                &given.padding,
                "padding",
                [spatial, if spatial == 3 { 3 } else { 2 * spatial }],
            ),
        ] {
            if !lengths.contains(&list.len()) {
                return unsupported(format!(
                    "{name} has {} numbers, {} are expected",
                    list.len(),
                    lengths[0]
                ));
            }
        }
        let kernel = weight.dims[2..].to_vec();
        let taps: Vec<i64> = kernel.iter().map(|k| *k as i64).collect();
        expect_range(&given.padding, 0..=255, "padding")?;
        expect_range(&given.dilation, 1..=255, "dilation")?;
        expect_range(
            &given.stride,
            1..=if spatial == 3 { 63 } else { i64::MAX },
            "stride",
        )?;
        let kernel_most = match (spatial, given.transposed) {
            (_, true) => 255,
            (3, false) => 511,
            _ => i64::MAX,
        };
        expect_range(&taps, 1..=kernel_most, "the kernel of weight")?;
        expect_range(&[given.groups], 1..=65535, "groups")?;
        if !given.transposed {
            expect_range(&given.output_padding, 0..=0, "outputPadding")?;
        }
        let (before, after) = if given.padding.len() == spatial {
            (given.padding.clone(), given.padding.clone())
        } else {
            given
                .padding
                .chunks_exact(2)
                .map(|pair| (pair[0], pair[1]))
                .unzip()
        };
        Ok(Self {
            transposed: given.transposed,
            groups: given.groups as usize,
            kernel,
            stride: given.stride.clone(),
            before,
            after,
            dilation: given.dilation.clone(),
            output_padding: given.output_padding.clone(),
        })
    }

    /// The output's shape.
    fn out_dims(&self, x: &Operand, weight: &Operand) -> Outcome<Vec<usize>> {
        let (w0, w1) = (weight.dims[0], weight.dims[1]);
        let (taken, given) = if self.transposed {
            (w0, w1 * self.groups)
        } else {
            (w1 * self.groups, w0)
        };
        let whole = w0.is_multiple_of(self.groups);
        if x.dims[1] != taken || !whole {
            return unsupported(format!(
                "input has {} channels and weight shape {:?} in {} groups, {taken} channels are expected",
                x.dims[1], weight.dims, self.groups
            ));
        }
        let mut dims = vec![x.dims[0], given];
        for axis in 0..self.kernel.len() {
            let size = x.dims[2 + axis] as i64;
            let reach = self.dilation[axis] * (self.kernel[axis] as i64 - 1);
            let frame = self.before[axis] + self.after[axis];
            let out = if self.transposed {
                (size - 1) * self.stride[axis] - frame + reach + self.output_padding[axis] + 1
            } else {
                (size + frame - reach - 1).div_euclid(self.stride[axis]) + 1
            };
            if out <= 0 {
                return unsupported(format!(
                    "input has shape {:?}, of which axis {} gives {out} positions",
                    x.dims,
                    2 + axis
                ));
            }
            dims.push(out as usize);
        }
        Ok(dims)
    }

    /// For each tap and position of the dense side, the element of one channel of the other side.
    fn reach(&self, dense: &[usize], other: &[usize]) -> Vec<Option<usize>> {
        let count = |dims: &[usize]| dims.iter().product::<usize>();
        let mut found = Vec::with_capacity(count(&self.kernel) * count(dense));
        for tap in 0..count(&self.kernel) {
            for position in 0..count(dense) {
                let (mut tap, mut position) = (tap, position);
                let (mut element, mut step, mut inside) = (0, 1, true);
                for axis in (0..dense.len()).rev() {
                    let (t, p) = (tap % self.kernel[axis], position % dense[axis]);
                    (tap, position) = (tap / self.kernel[axis], position / dense[axis]);
                    let at = p as i64 * self.stride[axis] - self.before[axis]
                        + t as i64 * self.dilation[axis];
                    inside &= (0..other[axis] as i64).contains(&at);
                    element += at.max(0) as usize * step;
                    step *= other[axis];
                }
                found.push(inside.then_some(element));
            }
        }
        found
    }
}

/// One convolution as products of matrices: the dense side is where the kernel is applied, the wide
/// side what its taps reach.
struct Sizes {
    batch: usize,
    groups: usize,
    /// Channels of a group on the dense side and on the wide side.
    dense_channels: usize,
    wide_channels: usize,
    dense: usize,
    wide: usize,
    taps: usize,
    reach: Vec<Option<usize>>,
}

impl Sizes {
    /// `x` and `out` as of the forward.
    fn new(geometry: &Geometry, x: &[usize], out: &[usize]) -> Self {
        let (wide, dense) = if geometry.transposed {
            (out, x)
        } else {
            (x, out)
        };
        let count = |dims: &[usize]| dims.iter().product();
        Self {
            batch: x[0],
            groups: geometry.groups,
            dense_channels: dense[1] / geometry.groups,
            wide_channels: wide[1] / geometry.groups,
            dense: count(&dense[2..]),
            wide: count(&wide[2..]),
            taps: count(&geometry.kernel),
            reach: geometry.reach(&dense[2..], &wide[2..]),
        }
    }

    /// Visits each image and group: its parts of the dense side, the wide side and the weight.
    fn each(
        &self,
        mut visit: impl FnMut(std::ops::Range<usize>, std::ops::Range<usize>, std::ops::Range<usize>),
    ) {
        let (dense, wide) = (
            self.dense_channels * self.dense,
            self.wide_channels * self.wide,
        );
        let weight = self.dense_channels * self.patch();
        for image in 0..self.batch {
            for group in 0..self.groups {
                let at = image * self.groups + group;
                visit(
                    at * dense..(at + 1) * dense,
                    at * wide..(at + 1) * wide,
                    group * weight..(group + 1) * weight,
                );
            }
        }
    }

    /// Elements that one position reaches.
    fn patch(&self) -> usize {
        self.wide_channels * self.taps
    }

    /// The patches of a wide side, `[patch, dense]`; zeros in the frame.
    fn patches(&self, wide: &[f32]) -> Vec<f32> {
        let mut patches = Vec::with_capacity(self.patch() * self.dense);
        for channel in wide.chunks_exact(self.wide) {
            patches.extend(self.reach.iter().map(|at| at.map_or(0.0, |at| channel[at])));
        }
        patches
    }

    /// Adds patches to the wide side they come from.
    fn add_patches(&self, patches: &[f32], wide: &mut [f32]) {
        for (channel, patches) in wide
            .chunks_exact_mut(self.wide)
            .zip(patches.chunks_exact(self.reach.len()))
        {
            for (at, value) in self.reach.iter().zip(patches) {
                if let Some(at) = at {
                    channel[*at] += value;
                }
            }
        }
    }

    /// The dense side of a wide side: weight `[dense channels, patch]` times patches.
    fn gather(&self, wide: &[f32], weight: &[f32]) -> Vec<f32> {
        let mut dense = vec![0.0; self.batch * self.groups * self.dense_channels * self.dense];
        self.each(|d, w, k| {
            multiply_add(
                &weight[k],
                &self.patches(&wide[w]),
                &mut dense[d],
                [self.dense_channels, self.patch(), self.dense],
            );
        });
        dense
    }

    /// The wide side of a dense side: patches are the transposed weight times the dense side.
    fn spread(&self, dense: &[f32], weight: &[f32]) -> Vec<f32> {
        let mut wide = vec![0.0; self.batch * self.groups * self.wide_channels * self.wide];
        self.each(|d, w, k| {
            let turned = transpose(&weight[k], self.dense_channels, self.patch());
            let mut patches = vec![0.0; self.patch() * self.dense];
            multiply_add(
                &turned,
                &dense[d],
                &mut patches,
                [self.patch(), self.dense_channels, self.dense],
            );
            self.add_patches(&patches, &mut wide[w]);
        });
        wide
    }

    /// The weight's gradient: the dense side times the transposed patches.
    fn correlate(&self, dense: &[f32], wide: &[f32]) -> Vec<f32> {
        let mut weight = vec![0.0; self.groups * self.dense_channels * self.patch()];
        self.each(|d, w, k| {
            let turned = transpose(&self.patches(&wide[w]), self.patch(), self.dense);
            multiply_add(
                &dense[d],
                &turned,
                &mut weight[k],
                [self.dense_channels, self.dense, self.patch()],
            );
        });
        weight
    }
}

fn transpose(matrix: &[f32], rows: usize, columns: usize) -> Vec<f32> {
    let mut turned = Vec::with_capacity(matrix.len());
    for column in 0..columns {
        turned.extend((0..rows).map(|row| matrix[row * columns + column]));
    }
    turned
}

/// What cubeMathType allows; only the backward keeps f32.
fn expect_math_type(code: i8, dtype: DataType, keeps_f32: bool) -> Outcome {
    let refused = match code {
        0 => !keeps_f32 && dtype == DataType::Float,
        2 => dtype == DataType::Bf16,
        1 | 3 => false,
        _ => true,
    };
    if refused {
        return Err(Failure::new(
            ACLNN_PARAM_INVALID,
            format!(
                "cubeMathType is {code}, which is not offered for {dtype:?}{}",
                if code == 0 {
                    ": f32 is convolved in HF32 (1 or 3)"
                } else {
                    ""
                }
            ),
        ));
    }
    Ok(())
}

/// A tensor of the output's format and shape.
fn expect_image(tensor: &Operand, like: &Operand, dims: &[usize]) -> Outcome {
    as_unsupported(tensor.expect_dims(dims))?;
    if tensor.format != like.format {
        return unsupported(format!(
            "{} has format {}, {} of {} is expected",
            tensor.name, tensor.format, like.format, like.name
        ));
    }
    Ok(())
}

/// The convolution of `input` with `weight`, plus `bias`.
pub(crate) fn forward(
    call: &mut Call,
    [x, weight]: [&Operand; 2],
    bias: Option<Operand>,
    given: &Given,
    out: &Operand,
    cube_math_type: i8,
) -> Outcome<Kernel> {
    call.distinct();
    let dtype = product_type(x, weight)?;
    expect_math_type(cube_math_type, dtype, false)?;
    let geometry = Geometry::new(given, x, weight)?;
    let dims = geometry.out_dims(x, weight)?;
    expect_image(out, x, &dims)?;
    out.expect_dtype(dtype)?;
    if let Some(bias) = &bias {
        bias.expect_type(FLT)?;
        as_unsupported(bias.expect_dims(&[dims[1]]))?;
    }
    let patch = geometry.kernel.iter().product::<usize>() * weight.dims[1];
    call.workspace((patch * dims[2..].iter().product::<usize>()) as u64 * dtype.bytes());
    let (x, weight, out) = (x.clone(), weight.clone(), out.clone());
    kernel(move |data| {
        let sizes = Sizes::new(&geometry, &x.dims, &dims);
        let (values, w) = (data.read::<f32>(&x)?, data.read::<f32>(&weight)?);
        let mut result = if geometry.transposed {
            sizes.spread(&values, &w)
        } else {
            sizes.gather(&values, &w)
        };
        if let Some(bias) = &bias {
            let bias = data.read::<f32>(bias)?;
            let positions = dims[2..].iter().product();
            for (channel, values) in result.chunks_exact_mut(positions).enumerate() {
                values
                    .iter_mut()
                    .for_each(|x| *x += bias[channel % dims[1]]);
            }
        }
        data.write(&out, &result)
    })
}

/// The tensors that the gradients are taken of.
pub(crate) struct Saved<'a> {
    pub(crate) gradient: &'a Operand,
    pub(crate) x: &'a Operand,
    pub(crate) weight: &'a Operand,
    pub(crate) bias_sizes: &'a [i64],
}

/// The gradients of input, weight and bias.
pub(crate) fn backward(
    call: &mut Call,
    saved: Saved<'_>,
    given: &Given,
    cube_math_type: i8,
    outputs: [Option<Operand>; 3],
) -> Outcome<Kernel> {
    call.distinct();
    let Saved {
        gradient,
        x,
        weight,
        bias_sizes,
    } = saved;
    let dtype = product_type(x, weight)?;
    gradient.expect_type(FLT)?;
    expect_math_type(cube_math_type, dtype, true)?;
    let geometry = Geometry::new(given, x, weight)?;
    expect_range(
        &geometry
            .kernel
            .iter()
            .map(|k| *k as i64)
            .collect::<Vec<_>>(),
        1..=255,
        "the kernel of weight",
    )?;
    let dims = geometry.out_dims(x, weight)?;
    expect_image(gradient, x, &dims)?;
    let [to_x, to_weight, to_bias] = &outputs;
    for (out, like) in [(to_x, x), (to_weight, weight)] {
        if let Some(out) = out {
            expect_image(out, like, &like.dims)?;
            out.expect_dtype(like.dtype)?;
            out.expect_contiguous()?;
        }
    }
    if let Some(out) = to_bias {
        if bias_sizes != [dims[1] as i64] {
            return unsupported(format!(
                "biasSizes is {bias_sizes:?}, [{}] is expected",
                dims[1]
            ));
        }
        as_unsupported(out.expect_dims(&[dims[1]]))?;
        out.expect_contiguous()?;
    }
    let patch = geometry.kernel.iter().product::<usize>() * weight.dims[1];
    call.workspace((patch * dims[2..].iter().product::<usize>()) as u64 * dtype.bytes());
    let (gradient, x, weight) = (gradient.clone(), x.clone(), weight.clone());
    kernel(move |data| {
        let sizes = Sizes::new(&geometry, &x.dims, &dims);
        let g = data.read::<f32>(&gradient)?;
        let [to_x, to_weight, to_bias] = &outputs;
        if let Some(out) = to_x {
            let w = data.read::<f32>(&weight)?;
            let dx = if geometry.transposed {
                sizes.gather(&g, &w)
            } else {
                sizes.spread(&g, &w)
            };
            data.write(out, &dx)?;
        }
        if let Some(out) = to_weight {
            let values = data.read::<f32>(&x)?;
            let dw = if geometry.transposed {
                sizes.correlate(&values, &g)
            } else {
                sizes.correlate(&g, &values)
            };
            data.write(out, &dw)?;
        }
        if let Some(out) = to_bias {
            let positions = dims[2..].iter().product();
            let mut sums = vec![0.0_f64; dims[1]];
            for (channel, values) in g.chunks_exact(positions).enumerate() {
                sums[channel % dims[1]] += values.iter().map(|x| f64::from(*x)).sum::<f64>();
            }
            data.write(out, &sums)?;
        }
        Ok(())
    })
}
