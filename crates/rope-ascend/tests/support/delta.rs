//! The kernels of the gated delta rule compared with plain f64 loops.

use std::ops::Range;

use rope_ascend::rope::{DeltaGradient, DeltaLocal, DeltaPrepare, DeltaSizes, LayerKernels};

use super::layer::{MARGIN, numbers, part, part_mut, text};
use super::{Bench, Number};

const CHUNK: usize = 64;
const NUMBERS: usize = 6;
const EPSILON: f64 = 1e-6;
/// Before what no output may touch.
const MARK: f32 = 0.5;

/// The logarithm of a decay of 0, as where a sequence starts.
pub const FORGOTTEN: f64 = -1e30;

/// Keys and decays.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kind {
    /// Without structure.
    Random,
    /// One key written at a rate of nearly 1, forgotten hardly: powers of A have 18 digits.
    Similar,
    /// Tokens that forget all beside such that forget little.
    Forgetful,
    /// Sequences that start inside chunks and at their first tokens.
    Packed,
}

#[derive(Clone, Debug)]
pub struct Case {
    pub sizes: DeltaSizes,
    pub chunks: Range<usize>,
    pub kind: Kind,
    /// The values and the decays are stored, too.
    pub keeps: bool,
}

struct Inputs {
    q: Vec<f64>,
    k: Vec<f64>,
    v: Vec<f64>,
    g: Vec<f64>,
    beta: Vec<f64>,
    gradient: Vec<f64>,
}

fn inputs<T: Number>(case: &Case) -> Inputs {
    let DeltaSizes {
        batch,
        tokens,
        key_heads,
        heads,
        key_dim,
        value_dim,
    } = case.sizes;
    let rows = batch * tokens;
    let rounded = |x: f64| T::of(x).wide();
    let single = |x: f64| f64::from(x as f32);
    let draw = |seed, count: usize| numbers(seed, rows * count).into_iter();
    let key = numbers(9, key_dim);
    let k = draw(2, key_heads * key_dim).enumerate();
    let k = k.map(|(index, x)| match case.kind {
        Kind::Similar => rounded(key[index % key_dim] + 1e-2 * x),
        _ => rounded(x),
    });
    let g = draw(4, heads).enumerate().map(|(index, x)| {
        let token = index / heads % tokens;
        single(match case.kind {
            Kind::Random => 0.5 * (x - 1.0),
            Kind::Similar => -1e-4,
            Kind::Forgetful if token % 64 < 20 => -1e3,
            Kind::Forgetful => -1e-3,
            Kind::Packed if [5, 64, 70, 127, 128].contains(&token) => FORGOTTEN,
            Kind::Packed => 0.1 * (x - 1.0),
        })
    });
    let beta = draw(5, heads).map(|x| {
        single(match case.kind {
            Kind::Similar => 0.999,
            _ => 0.5 * (x + 1.0),
        })
    });
    Inputs {
        q: draw(1, key_heads * key_dim).map(rounded).collect(),
        k: k.collect(),
        v: draw(3, heads * value_dim).map(rounded).collect(),
        g: g.collect(),
        beta: beta.collect(),
        gradient: draw(6, heads * value_dim).map(rounded).collect(),
    }
}

/// A chunk of a head of v of a sample.
struct Unit<'a> {
    sizes: DeltaSizes,
    inputs: &'a Inputs,
    token: usize,
    sample: usize,
    head: usize,
}

impl Unit<'_> {
    /// A row of a tensor, or zeros after the last token.
    fn row(&self, x: &[f64], heads: usize, width: usize, i: usize) -> Vec<f64> {
        let head = self.head / (self.sizes.heads / heads);
        let token = self.token + i;
        if token >= self.sizes.tokens {
            return vec![0.0; width];
        }
        let at = ((self.sample * self.sizes.tokens + token) * heads + head) * width;
        x[at..at + width].to_vec()
    }

    fn number(&self, x: &[f64], i: usize) -> f64 {
        self.row(x, self.sizes.heads, 1, i)[0]
    }

    /// The sum of g of some tokens.
    fn log(&self, tokens: Range<usize>) -> f64 {
        tokens.map(|i| self.number(&self.inputs.g, i)).sum()
    }

    fn key_row(&self, x: &[f64], i: usize) -> (Vec<f64>, f64) {
        let x = self.row(x, self.sizes.key_heads, self.sizes.key_dim, i);
        let norm = 1.0 / (x.iter().map(|x| x * x).sum::<f64>() + EPSILON).sqrt();
        (x.iter().map(|x| x * norm).collect(), norm)
    }

    /// q and k of all tokens, and what normalises them.
    fn keys(&self) -> [Vec<(Vec<f64>, f64)>; 2] {
        let scale = 1.0 / (self.sizes.key_dim as f64).sqrt();
        let mut q: Vec<_> = (0..CHUNK)
            .map(|i| self.key_row(&self.inputs.q, i))
            .collect();
        q.iter_mut()
            .for_each(|(q, _)| q.iter_mut().for_each(|q| *q *= scale));
        [
            q,
            (0..CHUNK)
                .map(|i| self.key_row(&self.inputs.k, i))
                .collect(),
        ]
    }
}

fn units<'a>(case: &Case, inputs: &'a Inputs) -> Vec<Unit<'a>> {
    let sizes = case.sizes;
    let matrices = (0..sizes.batch).flat_map(|sample| (0..sizes.heads).map(move |h| (sample, h)));
    let units = case
        .chunks
        .clone()
        .flat_map(|chunk| matrices.clone().map(move |m| (chunk, m)));
    let unit = |(chunk, (sample, head))| Unit {
        sizes,
        inputs,
        token: chunk * CHUNK,
        sample,
        head,
    };
    units.map(unit).collect()
}

/// The expected outputs of the first kernel: qk, driven, left, base, numbers, values and joint.
fn prepared(case: &Case, inputs: &Inputs) -> [Vec<f64>; 7] {
    let mut out: [Vec<f64>; 7] = Default::default();
    for unit in units(case, inputs) {
        let [q, k] = unit.keys();
        let beta: Vec<f64> = (0..CHUNK).map(|i| unit.number(&inputs.beta, i)).collect();
        let from_start: Vec<f64> = (0..CHUNK).map(|i| unit.log(0..i + 1).exp()).collect();
        let to_end: Vec<f64> = (0..CHUNK).map(|i| unit.log(i + 1..CHUNK).exp()).collect();
        let DeltaSizes {
            key_dim, value_dim, ..
        } = case.sizes;
        for (row, _) in q.iter().chain(&k) {
            out[0].extend(row);
        }
        out[6].extend(vec![f64::from(MARK); key_dim * value_dim]);
        for i in 0..CHUNK {
            let v = unit.row(&inputs.v, case.sizes.heads, value_dim, i);
            out[1].extend(v.iter().map(|v| v * beta[i]));
            out[1].extend(k[i].0.iter().map(|k| k * beta[i] * from_start[i]));
            out[2].extend(k[i].0.iter().map(|k| k * to_end[i]));
            out[2].extend([f64::from(MARK); CHUNK]);
            out[5].extend(&v);
            out[6].extend(unit.row(&inputs.gradient, case.sizes.heads, value_dim, i));
        }
        out[6].extend(vec![f64::from(MARK); CHUNK * value_dim]);
        for row in 0..key_dim {
            let through = |column| {
                if row == column {
                    from_start[CHUNK - 1]
                } else {
                    0.0
                }
            };
            out[3].extend((0..key_dim).map(through));
        }
        for i in 0..CHUNK {
            out[3].extend(q[i].0.iter().map(|q| q * from_start[i]));
        }
        out[4].extend((0..CHUNK).map(|i| unit.number(&inputs.g, i)));
        out[4].extend(&beta);
        out[4].extend(&from_start);
        out[4].extend(&to_end);
        for x in [&q, &k] {
            out[4].extend(x.iter().map(|(_, norm)| norm));
        }
    }
    out
}

/// The products and the numbers of g and beta; and the weights, the inverse and the decays.
fn triangles(case: &Case, inputs: &Inputs) -> ([Vec<f32>; 2], [Vec<f64>; 3]) {
    let (mut given, mut out): ([Vec<f32>; 2], [Vec<f64>; 3]) = Default::default();
    for unit in units(case, inputs) {
        let [q, k] = unit.keys();
        let dot = |x: &[f64], y: &[f64]| x.iter().zip(y).map(|(x, y)| x * y).sum::<f64>() as f32;
        let of = |j: usize| {
            let (q, k, own) = (q.iter(), k.iter(), &k[j].0);
            q.chain(k).map(|(x, _)| dot(own, x)).collect::<Vec<f32>>()
        };
        let products: Vec<Vec<f32>> = (0..CHUNK).map(of).collect();
        let beta = |i| unit.number(&inputs.beta, i);
        let decay = |i: usize, j: usize| {
            if i < j {
                0.0
            } else {
                unit.log(j + 1..i + 1).exp()
            }
        };
        let mut inverse = vec![vec![0.0; CHUNK]; CHUNK];
        for i in 0..CHUNK {
            let mut row = vec![0.0; CHUNK];
            row[i] = 1.0;
            for (j, earlier) in inverse.iter().enumerate().take(i) {
                let a = beta(i) * f64::from(products[j][CHUNK + i]) * decay(i, j);
                for (x, y) in row.iter_mut().zip(earlier) {
                    *x -= a * y;
                }
            }
            inverse[i] = row;
        }
        for (j, products) in products.iter().enumerate() {
            out[0].extend((0..CHUNK).map(|i| f64::from(products[i]) * decay(i, j)));
            out[2].extend((0..CHUNK).map(|i| decay(i, j)));
            given[0].extend(products);
        }
        out[1].extend(inverse.concat());
        given[1].extend((0..CHUNK).map(|i| unit.number(&inputs.g, i) as f32));
        given[1].extend((0..CHUNK).map(|i| beta(i) as f32));
        given[1].extend([f32::NAN; (NUMBERS - 2) * CHUNK]);
    }
    (given, out)
}

/// Compares an output, which has a margin on both sides, to a part of the largest number nearby.
fn compare(
    what: &str,
    found: &[f32],
    expected: &[f64],
    within: f64,
    row: usize,
) -> Result<(), String> {
    let inside = &found[MARGIN..MARGIN + expected.len()];
    let outside = found[..MARGIN]
        .iter()
        .chain(&found[MARGIN + expected.len()..]);
    if outside.into_iter().any(|x| *x != MARK) {
        return Err(format!("{what}: written outside"));
    }
    for (index, (found, expected)) in inside.iter().zip(expected).enumerate() {
        let apart = (f64::from(*found) - expected).abs();
        if apart > within * (expected.abs() + 1e-2) || apart.is_nan() {
            return Err(format!(
                "{what}: [{}, {}] is {found}, expected {expected}",
                index / row,
                index % row
            ));
        }
    }
    Ok(())
}

/// Compares both kernels with f64.
pub fn delta<T: Number>(bench: &Bench, kernels: &LayerKernels, case: &Case) -> Result<(), String> {
    let stream = &bench.stream;
    let inputs = inputs::<T>(case);
    let padded = |x: &[f64]| -> Vec<T> {
        let margin = || std::iter::repeat_n(T::of(0.5), MARGIN);
        let x = x.iter().map(|x| T::of(*x));
        margin().chain(x).chain(margin()).collect()
    };
    let single = |x: &[f64]| -> Vec<f32> {
        let margin = || std::iter::repeat_n(MARK, MARGIN);
        margin()
            .chain(x.iter().map(|x| *x as f32))
            .chain(margin())
            .collect()
    };
    let upload = |x: &[f64]| stream.upload(&padded(x)).map_err(text);
    let [q, k, v] = [upload(&inputs.q)?, upload(&inputs.k)?, upload(&inputs.v)?];
    let gradient = upload(&inputs.gradient)?;
    let [g, beta] = [&inputs.g, &inputs.beta].map(|x| stream.upload(&single(x)).map_err(text));
    let (g, beta) = (g?, beta?);
    let expected = prepared(case, &inputs);
    let marks = |count: usize| stream.upload(&vec![MARK; 2 * MARGIN + count]).map_err(text);
    let mut outputs = Vec::new();
    for expected in &expected {
        outputs.push(marks(expected.len())?);
    }
    let [qk, driven, left, base, numbers, values, joint] = &mut outputs[..] else {
        unreachable!("seven outputs")
    };
    kernels
        .prepare_delta(DeltaPrepare {
            element: T::TYPE,
            sizes: case.sizes,
            chunks: case.chunks.clone(),
            epsilon: EPSILON as f32,
            q: part(&q),
            k: part(&k),
            v: part(&v),
            g: part(&g),
            beta: part(&beta),
            qk: part_mut(qk),
            driven: part_mut(driven),
            left: part_mut(left),
            base: part_mut(base),
            numbers: part_mut(numbers),
            backward: case.keeps.then(|| DeltaGradient {
                gradient: part(&gradient),
                values: part_mut(values),
                joint: part_mut(joint),
            }),
        })
        .map_err(text)?;
    stream.synchronize().map_err(text)?;
    let names = ["qk", "driven", "left", "base", "numbers", "values", "joint"];
    let DeltaSizes {
        key_dim, value_dim, ..
    } = case.sizes;
    let widths = [
        key_dim,
        key_dim + value_dim,
        key_dim + CHUNK,
        key_dim,
        CHUNK,
        value_dim,
        value_dim,
    ];
    for (index, name) in names
        .into_iter()
        .enumerate()
        .take(5 + 2 * usize::from(case.keeps))
    {
        let found = stream.download(&outputs[index]).map_err(text)?;
        let what = format!("{case:?}: {name}");
        compare(&what, &found, &expected[index], 1e-5, widths[index])?;
    }

    let ([products, rates], [weights, inverse, decays]) = triangles(case, &inputs);
    let wide = |x: &[f32]| x.iter().map(|x| f64::from(*x)).collect::<Vec<_>>();
    let products = stream.upload(&single(&wide(&products))).map_err(text)?;
    let rates = stream.upload(&single(&wide(&rates))).map_err(text)?;
    let pitch = key_dim + CHUNK;
    let mut left = marks(weights.len() / CHUNK * pitch)?;
    let (mut found_inverse, mut found_decays) = (marks(inverse.len())?, marks(decays.len())?);
    kernels
        .local_delta(DeltaLocal {
            sizes: case.sizes,
            chunks: case.chunks.clone(),
            products: part(&products),
            numbers: part(&rates),
            left: part_mut(&mut left),
            inverse: part_mut(&mut found_inverse),
            decays: case.keeps.then(|| part_mut(&mut found_decays)),
        })
        .map_err(text)?;
    stream.synchronize().map_err(text)?;
    let rows = weights.chunks(CHUNK).flat_map(|weights| {
        let keys = std::iter::repeat_n(f64::from(MARK), key_dim);
        keys.chain(weights.iter().copied())
    });
    let rows: Vec<f64> = rows.collect();
    let found = stream.download(&left).map_err(text)?;
    compare(&format!("{case:?}: weights"), &found, &rows, 1e-5, pitch)?;
    let found = stream.download(&found_inverse).map_err(text)?;
    compare(&format!("{case:?}: inverse"), &found, &inverse, 2e-4, CHUNK)?;
    if case.keeps {
        let found = stream.download(&found_decays).map_err(text)?;
        compare(&format!("{case:?}: decays"), &found, &decays, 1e-5, CHUNK)?;
    }
    Ok(())
}
