//! The kernels of layers compared with plain f64 loops.

use rope_ascend::AscendError;
use rope_ascend::rope::{
    Gate, GateBackward, KernelType, LayerKernels, LowRankTerm, MemoryPart, OutputGradient,
    ShortConvolution, ShortConvolutionGradients, Update, UpdateFactors,
};
use rope_ascend::safe::{DeviceBuffer, DeviceMemory};

use super::{Bench, Number, Numbers};

pub fn text(error: AscendError) -> String {
    error.to_string()
}

#[derive(Clone, Copy, Debug)]
pub struct Case {
    pub size: [usize; 2],
    pub rank: usize,
    pub parts: usize,
    pub rounds_h: bool,
}

pub fn numbers(seed: u64, count: usize) -> Vec<f64> {
    let mut numbers = Numbers(seed);
    (0..count).map(|_| numbers.unit()).collect()
}

/// Elements before and after each tensor, which must stay.
pub const MARGIN: usize = 24;

/// Compares a low-rank term with f64.
pub fn low_rank<T: Number>(
    bench: &Bench,
    kernels: &LayerKernels,
    case: Case,
) -> Result<(), String> {
    let Case {
        size: [rows, columns],
        rank,
        parts,
        rounds_h,
    } = case;
    let stream = &bench.stream;
    let narrow = |x: &f64| T::of(*x);
    let wide = |x: &f64| *x as f32;
    let y_before: Vec<T> = numbers(1, 2 * MARGIN + rows * columns)
        .iter()
        .map(narrow)
        .collect();
    let gap = 7;
    let part_stride = if parts == 2 { rank * rows + gap } else { 0 };
    let h: Vec<f32> = numbers(2, MARGIN + part_stride + rank * rows)
        .iter()
        .map(wide)
        .collect();
    let b: Vec<f32> = numbers(3, MARGIN + rank * columns)
        .iter()
        .map(wide)
        .collect();
    let mut y = stream.upload(&y_before).map_err(text)?;
    let (h_memory, b_memory) = (
        stream.upload(&h).map_err(text)?,
        stream.upload(&b).map_err(text)?,
    );
    let marks = vec![T::of(0.5); 2 * MARGIN + rank * rows];
    let mut rounded = stream.upload(&marks).map_err(text)?;
    let starts = [0, part_stride];

    kernels
        .add_low_rank(LowRankTerm {
            element: T::TYPE,
            size: case.size,
            rank,
            part_starts: &starts[..parts],
            y: part_mut(&mut y),
            h: part(&h_memory),
            b: part(&b_memory),
            rounded_h: rounds_h.then(|| part_mut(&mut rounded)),
        })
        .map_err(text)?;
    stream.synchronize().map_err(text)?;
    let found = stream.download(&y).map_err(text)?;
    let whole_h = |r: usize, t: usize| -> f64 {
        let part = |part: usize| h[MARGIN + part * part_stride + r * rows + t];
        f64::from((1..parts).fold(part(0), |sum, next| sum + part(next)))
    };
    for (index, (found, before)) in found.iter().zip(&y_before).enumerate() {
        let inside = index
            .checked_sub(MARGIN)
            .filter(|index| *index < rows * columns);
        let Some(index) = inside else {
            if found.wide().to_bits() == before.wide().to_bits() {
                continue;
            }
            return Err(format!("{case:?}: {index} outside is {found:?}"));
        };
        let (t, c) = (index / columns, index % columns);
        let terms = (0..rank).map(|r| whole_h(r, t) * f64::from(b[MARGIN + r * columns + c]));
        let expected = before.wide() + terms.sum::<f64>();
        let bound = 1e-6 * (1.0 + rank as f64) + T::half_ulp(expected) * 1.01;
        let apart = (found.wide() - expected).abs();
        if apart > bound || apart.is_nan() {
            return Err(format!(
                "{case:?}: [{t}, {c}] is {found:?}, expected {expected}"
            ));
        }
    }
    let found = stream.download(&rounded).map_err(text)?;
    for (index, found) in found.iter().enumerate() {
        let inside = index
            .checked_sub(MARGIN)
            .filter(|index| *index < rank * rows && rounds_h);
        let expected = inside.map_or(0.5, |index| whole_h(index / rows, index % rows));
        let expected = T::rounded(expected as f32).wide();
        if found.wide() != expected {
            return Err(format!("{case:?}: rounded h at {index}"));
        }
    }
    Ok(())
}

pub fn part<T: Number>(memory: &DeviceBuffer<T>) -> MemoryPart<&DeviceMemory> {
    let offset = MARGIN;
    MemoryPart { memory, offset }
}

pub fn part_mut<T: Number>(memory: &mut DeviceBuffer<T>) -> MemoryPart<&mut DeviceMemory> {
    let offset = MARGIN;
    MemoryPart { memory, offset }
}

/// Compares the gate and its backward with f64.
pub fn gate<T: Number>(bench: &Bench, kernels: &LayerKernels, count: usize) -> Result<(), String> {
    let stream = &bench.stream;
    let tensor = |seed, scale: f64| -> Vec<T> {
        let numbers = numbers(seed, MARGIN + count + MARGIN);
        numbers.iter().map(|x| T::of(x * scale)).collect()
    };
    // Gates from where the sigmoid is 0 to where it is 1.
    let [gate, up, dy] = [tensor(4, 60.0), tensor(5, 2.0), tensor(6, 2.0)];
    let upload = |x: &[T]| stream.upload(x).map_err(text);
    let (gates, ups) = (upload(&gate)?, upload(&up)?);
    let mut y = upload(&gate)?;
    kernels
        .gate(Gate {
            element: T::TYPE,
            elements: count,
            gate: part(&gates),
            up: part(&ups),
            y: part_mut(&mut y),
        })
        .map_err(text)?;
    let mut found = vec![stream.download(&y).map_err(text)?];
    // The gradient stays, then the output replaces it.
    for replaces in [false, true] {
        let (mut gate_gradient, mut up_gradient) = (upload(&gate)?, upload(&up)?);
        let mut gradient = upload(&dy)?;
        kernels
            .gate_backward(GateBackward {
                element: T::TYPE,
                elements: count,
                gate: part(&gates),
                up: part(&ups),
                gradient: match replaces {
                    false => OutputGradient::Kept(part(&gradient)),
                    true => OutputGradient::Replaced(part_mut(&mut gradient)),
                },
                gate_gradient: part_mut(&mut gate_gradient),
                up_gradient: part_mut(&mut up_gradient),
            })
            .map_err(text)?;
        for results in [&gate_gradient, &up_gradient, &gradient] {
            found.push(stream.download(results).map_err(text)?);
        }
    }
    for index in 0..gate.len() {
        let inside = (MARGIN..MARGIN + count).contains(&index);
        let [g, u, d] = [&gate, &up, &dy].map(|x| x[index].wide());
        let s = 1.0 / (1.0 + (-g).exp());
        // The slope is a difference of terms.
        let terms = (1.0 + d.abs()) * s * (1.0 + g.abs()) * (1.0 + u.abs());
        let expected = if inside {
            let (y, dgate, dup) = (g * s * u, d * (s + g * s * (1.0 - s)) * u, d * g * s);
            [y, dgate, dup, d, dgate, dup, y]
        } else {
            [g, g, u, d, g, u, d]
        };
        for (found, expected) in found.iter().zip(expected) {
            let bound = 1e-6 * (terms + 1e-4) + T::half_ulp(expected) * 1.01;
            let apart = (found[index].wide() - expected).abs();
            if apart > bound || apart.is_nan() {
                return Err(format!(
                    "{count}: {:?} at {index}, expected {expected}",
                    found[index]
                ));
            }
        }
    }
    Ok(())
}

/// A convolution of sequences with these numbers of tokens.
#[derive(Clone, Copy, Debug)]
pub struct Convolution<'a> {
    pub sequences: &'a [usize],
    pub channels: usize,
    pub taps: usize,
}

/// Compares a short convolution and its backward with f64. What lies beside the tensors is NaN.
pub fn convolution<T: Number>(
    bench: &Bench,
    kernels: &LayerKernels,
    case: Convolution<'_>,
) -> Result<(), String> {
    let Convolution {
        sequences,
        channels,
        taps,
    } = case;
    let stream = &bench.stream;
    let tokens: usize = sequences.iter().sum();
    let tensor = |seed, count: usize, scale: f64| -> Vec<T> {
        let mut all = vec![T::of(f64::NAN); MARGIN + count + MARGIN];
        for (to, x) in all[MARGIN..].iter_mut().zip(numbers(seed, count)) {
            *to = T::of(x * scale);
        }
        all
    };
    let count = tokens * channels;
    let (x, dy) = (tensor(1, count, 4.0), tensor(2, count, 2.0));
    let weight = tensor(3, taps * channels, 3.0);
    let mut starts = vec![u32::MAX; MARGIN];
    let mut firsts = Vec::new();
    for length in sequences {
        starts.push(firsts.len() as u32);
        firsts.extend(vec![firsts.len(); *length]);
    }
    let upload = |x: &[T]| stream.upload(x).map_err(text);
    let (x_memory, weight_memory, dy_memory) = (upload(&x)?, upload(&weight)?, upload(&dy)?);
    let starts = stream.upload(&starts).map_err(text)?;
    let request = ShortConvolution {
        element: T::TYPE,
        size: [tokens, channels],
        taps,
        sequences: sequences.len(),
        x: part(&x_memory),
        weight: part(&weight_memory),
        starts: MemoryPart {
            memory: &starts,
            offset: MARGIN,
        },
    };
    let parts = kernels.short_convolution_parts(request).map_err(text)?;
    let marks = vec![T::of(0.5); MARGIN + count + MARGIN];
    let (mut y, mut dx) = (upload(&marks)?, upload(&marks)?);
    let marks = vec![0.5_f32; MARGIN + parts * taps * channels + MARGIN];
    let mut sums = stream.upload(&marks).map_err(text)?;
    kernels
        .short_convolution(request, part_mut(&mut y))
        .map_err(text)?;
    let gradients = ShortConvolutionGradients {
        gradient: part(&dy_memory),
        x_gradient: part_mut(&mut dx),
        weight_sums: part_mut(&mut sums),
    };
    kernels
        .short_convolution_backward(request, gradients)
        .map_err(text)?;
    stream.synchronize().map_err(text)?;

    // Each result, and the sum of the sizes of its terms.
    let mut expected = [(); 2].map(|()| vec![(0.0, 0.0); count]);
    let mut of_weight = vec![(0.0, 0.0); taps * channels];
    let inside = |x: &[T], at: usize| x[MARGIN + at].wide();
    for (t, first) in firsts.iter().enumerate() {
        for c in 0..channels {
            let terms = (0..taps).filter_map(|tap| {
                let from = (t + tap + 1).checked_sub(taps)?;
                let is_own = from >= *first;
                is_own.then_some((from * channels + c, tap * channels + c))
            });
            let terms: Vec<_> = terms.collect();
            let product =
                |(x_at, w_at): &(usize, usize)| inside(&x, *x_at) * inside(&weight, *w_at);
            let z: f64 = terms.iter().map(product).sum();
            let size: f64 = terms.iter().map(|term| product(term).abs()).sum();
            let s = 1.0 / (1.0 + (-z).exp());
            let at = t * channels + c;
            expected[0][at] = (z * s, size);
            let dy = inside(&dy, at);
            let dz = dy * (s + z * s * (1.0 - s));
            let dz_size = dy.abs() * (1.0 + size);
            for (x_at, w_at) in terms {
                let (x, w) = (inside(&x, x_at), inside(&weight, w_at));
                for (sum, factor) in [(&mut expected[1][x_at], w), (&mut of_weight[w_at], x)] {
                    *sum = (sum.0 + dz * factor, sum.1 + dz_size * factor.abs());
                }
            }
        }
    }
    let check = |name, found: f64, (expected, size): (f64, f64), half_ulp: f64| {
        let apart = (found - expected).abs();
        let bound = 1e-6 * (size + 1e-4) + half_ulp * 1.01;
        if apart <= bound {
            return Ok(());
        }
        Err(format!("{case:?}: {name} is {found}, expected {expected}"))
    };
    let found = [&y, &dx].map(|found| stream.download(found).map_err(text));
    for ((name, found), expected) in ["y", "dx"].into_iter().zip(found).zip(&expected) {
        for (index, found) in found?.into_iter().enumerate() {
            let inside = index.checked_sub(MARGIN).and_then(|at| expected.get(at));
            let expected = *inside.unwrap_or(&(0.5, 0.0));
            check(name, found.wide(), expected, T::half_ulp(expected.0))?;
        }
    }
    let found = stream.download(&sums).map_err(text)?;
    let (found, after) = found[MARGIN..].split_at(parts * taps * channels);
    if after.iter().any(|mark| *mark != 0.5) {
        return Err(format!("{case:?}: sums outside their tensor"));
    }
    for (at, expected) in of_weight.into_iter().enumerate() {
        let parts = found.iter().skip(at).step_by(taps * channels);
        let found = parts.map(|x| f64::from(*x)).sum();
        check("dw", found, expected, 0.0)?;
    }
    Ok(())
}

/// Compares an AdamW update with f64. T is the type of the rounded values, f32 for none, and G that
/// of the gradient.
pub fn update<T: Number, G: Number>(
    bench: &Bench,
    kernels: &LayerKernels,
    count: usize,
) -> Result<(), String> {
    let stream = &bench.stream;
    let tensor = |seed, scale: f64| -> Vec<f32> {
        let numbers = numbers(seed, MARGIN + count + MARGIN);
        numbers.iter().map(|x| (x * scale) as f32).collect()
    };
    let [value, first] = [tensor(1, 2.0), tensor(3, 0.5)];
    let gradient: Vec<G> = tensor(2, 3.0).into_iter().map(G::rounded).collect();
    let second: Vec<f32> = tensor(4, 0.3).iter().map(|x| x * x).collect();
    let factors = UpdateFactors {
        scale: 0.7,
        of_gradient: 0.1,
        of_square: 0.003,
        kept: 0.997,
        correction: 0.3,
        epsilon: 0.05,
        stay: 0.9,
        step: 0.2,
    };
    let upload = |x: &[f32]| stream.upload(x).map_err(text);
    let gradients = stream.upload(&gradient).map_err(text)?;
    let [mut values, mut firsts, mut seconds] =
        [upload(&value)?, upload(&first)?, upload(&second)?];
    let marks = vec![T::of(0.5); MARGIN + count + MARGIN];
    let mut rounded = stream.upload(&marks).map_err(text)?;
    let rounds = T::TYPE != KernelType::F32;
    kernels
        .update(Update {
            elements: count,
            factors,
            value: part_mut(&mut values),
            gradient: (G::TYPE, part(&gradients)),
            moments: [part_mut(&mut firsts), part_mut(&mut seconds)],
            rounded: rounds.then(|| (T::TYPE, part_mut(&mut rounded))),
        })
        .map_err(text)?;
    stream.synchronize().map_err(text)?;
    let download = |x| stream.download(x).map_err(text);
    let found = [download(&values)?, download(&firsts)?, download(&seconds)?];
    let rounded = stream.download(&rounded).map_err(text)?;
    let by = |factor: f32| f64::from(factor);
    for index in 0..value.len() {
        let before = [&value, &first, &second].map(|x| f64::from(x[index]));
        let [value, first, second] = before;
        let g = gradient[index].wide() * by(factors.scale);
        let first = first + (g - first) * by(factors.of_gradient);
        let second = second * by(factors.kept) + g * g * by(factors.of_square);
        let root = second.sqrt() / by(factors.correction) + by(factors.epsilon);
        let value = value * by(factors.stay) - first / root * by(factors.step);
        let inside = (MARGIN..MARGIN + count).contains(&index);
        let expected = if inside {
            [value, first, second]
        } else {
            before
        };
        for (found, expected) in found.iter().zip(expected) {
            let apart = (f64::from(found[index]) - expected).abs();
            if apart > 2e-6 || apart.is_nan() {
                let found = found[index];
                return Err(format!(
                    "{count}: {found:?} at {index}, expected {expected}"
                ));
            }
        }
        let new = if inside && rounds {
            T::rounded(found[0][index]).wide()
        } else {
            0.5
        };
        if rounded[index].wide() != new {
            return Err(format!(
                "{count}: rounded {:?} at {index}, expected {new}",
                rounded[index]
            ));
        }
    }
    Ok(())
}

/// Compares the sums of squares of chunks with f64.
pub fn square_sums<T: Number>(
    bench: &Bench,
    kernels: &LayerKernels,
    [count, chunk]: [usize; 2],
) -> Result<(), String> {
    let stream = &bench.stream;
    let x = numbers(7, MARGIN + count + MARGIN);
    let x: Vec<T> = x.iter().map(|x| T::rounded(*x as f32)).collect();
    let chunks = count.div_ceil(chunk);
    let x_memory = stream.upload(&x).map_err(text)?;
    let mut sums = stream
        .upload(&vec![0.5_f32; MARGIN + chunks + MARGIN])
        .map_err(text)?;
    kernels
        .square_sums(
            count,
            chunk,
            (T::TYPE, part(&x_memory)),
            part_mut(&mut sums),
        )
        .map_err(text)?;
    stream.synchronize().map_err(text)?;
    let found = stream.download(&sums).map_err(text)?;
    for (index, found) in found.iter().enumerate() {
        let inside = index.checked_sub(MARGIN).filter(|index| *index < chunks);
        let expected = inside.map_or(0.5, |index| {
            let all = &x[MARGIN..MARGIN + count];
            let chunk = &all[index * chunk..(index * chunk + chunk).min(count)];
            chunk.iter().map(|x| x.wide().powi(2)).sum()
        });
        let apart = (f64::from(*found) - expected).abs();
        if apart > 1e-6 * expected || apart.is_nan() {
            return Err(format!(
                "{count}, {chunk}: sum {index} is {found}, expected {expected}"
            ));
        }
    }
    Ok(())
}
