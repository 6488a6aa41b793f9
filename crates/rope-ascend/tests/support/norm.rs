//! The norm of the heads with their rotation, and its backward, compared with plain f64 loops.

use rope_ascend::rope::{
    ChannelWeights, Heads, NormBackward, NormBackwardTensor, NormRotation, NormTensor, Operand,
    Unit,
};
use rope_ascend::safe::DeviceBuffer;
use rope_core::{Direction, Geometry, HeadNorm, HeadsLayout, Layout, NormOrder, Pairing, Strides};

use super::{At, Bench, Number, Numbers, angles, index, rotate_plainly};

#[derive(Clone, Debug)]
pub struct Case {
    pub batch: usize,
    pub seq: usize,
    pub heads: [usize; 2],
    pub head_dim: usize,
    pub channels: std::ops::Range<usize>,
    pub pairing: Pairing,
    pub per_channel: bool,
    pub layout: Layout,
    /// Rows cut out of a wider tensor.
    pub strided: bool,
    pub in_place: bool,
    pub shared: bool,
    pub norm: HeadNorm,
}

impl Case {
    pub fn plain(pairing: Pairing) -> Self {
        Self {
            batch: 2,
            seq: 5,
            heads: [4, 2],
            head_dim: 64,
            channels: 0..64,
            pairing,
            per_channel: false,
            layout: Layout::Bsnd,
            strided: false,
            in_place: true,
            shared: false,
            norm: HeadNorm::new(1e-6).unwrap(),
        }
    }

    fn geometry(&self) -> Geometry {
        let channels = &self.channels;
        let (pairing, per_channel) = (self.pairing, self.per_channel);
        Geometry::new(
            self.head_dim,
            channels.len(),
            channels.start,
            pairing,
            per_channel,
        )
        .unwrap()
    }

    fn tokens(&self) -> usize {
        self.batch * self.seq
    }

    /// Where a tensor of `heads` heads lies in its buffer, and the buffer's length.
    fn place(&self, layout: Layout, heads: usize) -> (At, usize) {
        let (batch, seq, head_dim) = (self.batch, self.seq, self.head_dim);
        let contiguous = HeadsLayout::contiguous(layout, batch, seq, heads, head_dim);
        if !self.strided {
            return ((0, contiguous), batch * seq * heads * head_dim);
        }
        // A slice of a tensor that has three more heads, and three more channels in each.
        let head = head_dim + 3;
        let token = (heads + 3) * head;
        let strides = Strides {
            batch: seq * token + 5,
            seq: token,
            head,
        };
        let offset = 2 * head + 1;
        let len = batch * strides.batch + offset;
        let layout = HeadsLayout {
            strides,
            ..contiguous
        };
        ((offset, layout), len)
    }

    /// The layout of outputs in other buffers, which differs from that of the inputs.
    fn other(&self) -> Layout {
        if self.layout == Layout::Bnsd {
            Layout::Bsnd
        } else {
            Layout::Bnsd
        }
    }
}

/// The rows of a tensor, [batch, seq, heads, head_dim].
fn rows_of<T: Number>(values: &[T], at: &At, head_dim: usize) -> Vec<f64> {
    let layout = at.1;
    let mut rows = Vec::with_capacity(layout.elems());
    for b in 0..layout.batch {
        for s in 0..layout.seq {
            for h in 0..layout.heads {
                rows.extend((0..head_dim).map(|c| values[index(at, b, s, h, c)].wide()));
            }
        }
    }
    rows
}

/// The values drawn for q or k, and the expected results.
struct Tensor<T> {
    heads: usize,
    x: (Vec<T>, At),
    dy: (Vec<T>, At),
    weight: Vec<f32>,
    y: Vec<f64>,
    dx: Vec<f64>,
    dweight: Vec<f64>,
    /// The sizes to which errors of each row, and of each weight's gradient, are relative.
    y_scale: Vec<f64>,
    dx_scale: Vec<f64>,
    dweight_scale: Vec<f64>,
}

impl<T: Number> Tensor<T> {
    fn draw(case: &Case, heads: usize, numbers: &mut Numbers) -> Self {
        let mut values =
            |len: usize| -> Vec<T> { (0..len).map(|_| T::of(numbers.unit() * 3.0)).collect() };
        let (x_at, x_len) = case.place(case.layout, heads);
        let dy_layout = if case.in_place {
            case.layout
        } else {
            case.other()
        };
        let (dy_at, dy_len) = case.place(dy_layout, heads);
        let (x, dy) = (values(x_len), values(dy_len));
        let weight = (0..case.head_dim).map(|_| numbers.unit() as f32 + 0.25);
        Self {
            heads,
            x: (x, x_at),
            dy: (dy, dy_at),
            weight: weight.collect(),
            y: Vec::new(),
            dx: Vec::new(),
            dweight: vec![0.0; case.head_dim],
            y_scale: Vec::new(),
            dx_scale: Vec::new(),
            dweight_scale: vec![0.0; case.head_dim],
        }
    }

    /// The f64 truth of forward and backward.
    fn compute(&mut self, case: &Case, angle: &dyn Fn(usize, usize) -> (f64, f64)) {
        let dim = case.head_dim;
        let layout = HeadsLayout::contiguous(Layout::Bsnd, case.batch, case.seq, self.heads, dim);
        let rotate = |x: &[f64], direction| {
            let mut y = vec![0.0; x.len()];
            let (from, to) = ((x, (0, layout)), (&mut y[..], (0, layout)));
            rotate_plainly(from, to, case.geometry(), direction, angle);
            y
        };
        let before = case.norm.order() == NormOrder::BeforeRotation;
        let offset = if case.norm.unit_offset() { 1.0 } else { 0.0 };
        let weight: Vec<f64> = self.weight.iter().map(|w| f64::from(*w) + offset).collect();
        let x = rows_of(&self.x.0, &self.x.1, dim);
        let dy = rows_of(&self.dy.0, &self.dy.1, dim);
        let (x, g) = if before {
            (x, rotate(&dy, Direction::Adjoint))
        } else {
            (rotate(&x, Direction::Forward), dy)
        };
        let (mut y, mut d) = (vec![0.0; x.len()], vec![0.0; x.len()]);
        let most = |row: &[f64]| row.iter().fold(0.0_f64, |most, x| most.max(x.abs()));
        for (row, (x, g)) in x.chunks_exact(dim).zip(g.chunks_exact(dim)).enumerate() {
            let mean = x.iter().map(|x| x * x).sum::<f64>() / dim as f64;
            let rstd = 1.0 / (mean + case.norm.eps()).sqrt();
            let n: Vec<f64> = x.iter().map(|x| x * rstd).collect();
            let h: Vec<f64> = g.iter().zip(&weight).map(|(g, w)| g * w).collect();
            let products = h.iter().zip(&n).map(|(h, n)| h * n);
            let mean = products.clone().sum::<f64>() / dim as f64;
            let sizes = products.map(f64::abs).sum::<f64>() / dim as f64;
            for c in 0..dim {
                y[row * dim + c] = n[c] * weight[c];
                d[row * dim + c] = rstd * (h[c] - n[c] * mean);
                self.dweight[c] += g[c] * n[c];
                self.dweight_scale[c] += most(g) * most(&n);
            }
            self.y_scale.push(2.0 * most(&y[row * dim..][..dim]));
            self.dx_scale
                .push(4.0 * rstd * (most(&h) + most(&n) * sizes));
        }
        (self.y, self.dx) = if before {
            (rotate(&y, Direction::Forward), d)
        } else {
            (y, rotate(&d, Direction::Adjoint))
        };
    }
}

fn compare<T: Number>(
    what: &str,
    found: &[f64],
    truth: &[f64],
    scale: &[f64],
    roundings: f64,
) -> Result<(), String> {
    let per_row = truth.len() / scale.len();
    for (i, (found, truth)) in found.iter().zip(truth).enumerate() {
        let error = (found - truth).abs();
        let allowed = T::half_ulp(*truth) + scale[i / per_row] * roundings * 2_f64.powi(-24);
        if error > allowed || error.is_nan() {
            return Err(format!(
                "{:?} {what}[{i}] is {found} instead of {truth}, off by {error:e}, not {allowed:e}",
                T::TYPE
            ));
        }
    }
    Ok(())
}

pub fn heads<M>(memory: M, (offset, layout): At) -> Heads<M> {
    Heads {
        memory,
        offset,
        layout,
    }
}

pub fn weights(memory: &DeviceBuffer<f32>) -> ChannelWeights<'_> {
    ChannelWeights {
        memory,
        offset_bytes: 0,
        channels: memory.len(),
    }
}

/// An operand and the memory of its result.
struct Placed<T: Number> {
    memory: DeviceBuffer<T>,
    at: At,
    to: Option<(DeviceBuffer<T>, At)>,
}

impl<T: Number> Placed<T> {
    fn new(bench: &Bench, case: &Case, values: &[T], at: At, to: Layout) -> Self {
        let memory = bench.stream.upload(values).unwrap();
        let to = (!case.in_place).then(|| {
            let (dim, heads) = (case.head_dim, at.1.heads);
            let layout = HeadsLayout::contiguous(to, case.batch, case.seq, heads, dim);
            let filled = vec![T::of(9.0); layout.elems()];
            (bench.stream.upload(&filled).unwrap(), (0, layout))
        });
        Self { memory, at, to }
    }

    fn operand(&mut self) -> Operand<'_> {
        match &mut self.to {
            None => Operand::InPlace(heads(&mut self.memory, self.at)),
            Some((to, at)) => Operand::Into {
                from: heads(&self.memory, self.at),
                to: heads(&mut **to, *at),
            },
        }
    }

    /// The rows of the result. Elements between rows of a view stay unchanged.
    fn result(&self, bench: &Bench, before: &[T], dim: usize) -> Result<Vec<f64>, String> {
        let (memory, at) = match &self.to {
            None => (&self.memory, &self.at),
            Some((to, at)) => (to, at),
        };
        let found = bench.stream.download(memory).map_err(text)?;
        if self.to.is_none() {
            let layout = at.1;
            let mut inside = vec![false; found.len()];
            for b in 0..layout.batch {
                for s in 0..layout.seq {
                    for h in 0..layout.heads {
                        (0..dim).for_each(|c| inside[index(at, b, s, h, c)] = true);
                    }
                }
            }
            for (i, inside) in inside.into_iter().enumerate() {
                if !inside && found[i] != before[i] {
                    return Err(format!("element {i} was written"));
                }
            }
        }
        Ok(rows_of(&found, at, dim))
    }
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

/// Runs forward and backward on the device; the error names a difference from the reference.
pub fn run<T: Number>(bench: &Bench, case: &Case) -> Result<(), String> {
    // Every core has to store its row of sums, one without work too: it has nothing in it before.
    let sums = |len| bench.stream.alloc::<f32>(len).unwrap();
    run_into::<T>(bench, case, &sums)
}

/// The same with the memory that the sums for the weights' gradients go into.
pub fn run_into<T: Number>(
    bench: &Bench,
    case: &Case,
    sums: &dyn Fn(usize) -> DeviceBuffer<f32>,
) -> Result<(), String> {
    let stream = &bench.stream;
    let mut numbers = Numbers(0x9e37_79b9 + case.head_dim as u64 * 31 + case.seq as u64);
    let geometry = case.geometry();
    let lanes = geometry.lane_count();
    let rows = if case.shared { case.seq } else { case.tokens() };
    let rotator = bench.rotator(geometry, Unit::Vector);
    let drawn: Vec<f32> = (0..rows * 2 * lanes)
        .map(|_| numbers.unit() as f32)
        .collect();
    let on_device = stream.upload(&drawn).unwrap();
    let angle = |token: usize, lane: usize| {
        let cos = token % rows * 2 * lanes + lane;
        (f64::from(drawn[cos]), f64::from(drawn[cos + lanes]))
    };
    let tensors: Vec<Tensor<T>> = (case.heads.into_iter().filter(|heads| *heads > 0))
        .map(|heads| {
            let mut tensor = Tensor::draw(case, heads, &mut numbers);
            tensor.compute(case, &angle);
            tensor
        })
        .collect();
    let weight: Vec<_> = tensors
        .iter()
        .map(|tensor| stream.upload(&tensor.weight).unwrap())
        .collect();

    let place =
        |tensor: &Tensor<T>| Placed::new(bench, case, &tensor.x.0, tensor.x.1, case.other());
    let mut placed: Vec<_> = tensors.iter().map(place).collect();
    let mut operands = placed
        .iter_mut()
        .zip(&weight)
        .map(|(x, weight)| NormTensor {
            x: x.operand(),
            weight: weights(weight),
        });
    let request = NormRotation {
        element: T::TYPE,
        norm: case.norm,
        q: operands.next().unwrap(),
        k: operands.next(),
        angles: angles(&on_device, rows),
    };
    drop(operands);
    rotator.norm_rotate(request).map_err(text)?;
    stream.synchronize().map_err(text)?;
    for (tensor, placed) in tensors.iter().zip(&placed) {
        let found = placed.result(bench, &tensor.x.0, case.head_dim)?;
        let what = format!("{case:?}: y");
        compare::<T>(&what, &found, &tensor.y, &tensor.y_scale, 16.0)?;
    }

    let x: Vec<_> = tensors
        .iter()
        .map(|tensor| stream.upload(&tensor.x.0).unwrap())
        .collect();
    let most = rotator.most_weight_sums() * tensors.len() * case.head_dim;
    let backward = || {
        let mut sums = sums(most);
        let place =
            |tensor: &Tensor<T>| Placed::new(bench, case, &tensor.dy.0, tensor.dy.1, case.layout);
        let mut placed: Vec<_> = tensors.iter().map(place).collect();
        let inputs = x.iter().zip(&tensors).zip(&weight);
        let mut operands =
            inputs
                .zip(&mut placed)
                .map(|(((x, tensor), weight), dy)| NormBackwardTensor {
                    x: heads(&**x, tensor.x.1),
                    gradient: dy.operand(),
                    weight: weights(weight),
                });
        let request = NormBackward {
            element: T::TYPE,
            norm: case.norm,
            q: operands.next().unwrap(),
            k: operands.next(),
            angles: angles(&on_device, rows),
            weight_sums: &mut sums,
        };
        drop(operands);
        let rows = rotator.norm_rotate_backward(request).map_err(text)?;
        stream.synchronize().map_err(text)?;
        let sums = stream.download(&sums).map_err(text)?;
        let written = rows * tensors.len() * case.head_dim;
        Ok::<_, String>((placed, sums[..written].to_vec()))
    };
    let ((placed, sums), (_, again)) = (backward()?, backward()?);
    let bits = |sums: &[f32]| sums.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    if bits(&sums) != bits(&again) {
        return Err("two runs differ".to_owned());
    }
    for (i, (tensor, placed)) in tensors.iter().zip(&placed).enumerate() {
        let found = placed.result(bench, &tensor.dy.0, case.head_dim)?;
        let what = format!("{case:?}: dx");
        compare::<T>(&what, &found, &tensor.dx, &tensor.dx_scale, 32.0)?;
        let mut dweight = vec![0.0; case.head_dim];
        for row in sums.chunks_exact(tensors.len() * case.head_dim) {
            for (sum, part) in dweight.iter_mut().zip(&row[i * case.head_dim..]) {
                *sum += f64::from(*part);
            }
        }
        let what = format!("{case:?}: dw");
        let truth = &tensor.dweight;
        compare::<f32>(&what, &dweight, truth, &tensor.dweight_scale, 16.0)?;
    }
    Ok(())
}
