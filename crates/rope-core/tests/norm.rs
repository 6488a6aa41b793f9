//! The norm fused with the rotation: against the oracle, against the composition, and by finite
//! differences.

use half::{bf16, f16};
use rope_core::reference::{HeadMatrix, HeadRmsNorm};
use rope_core::{
    Angles, CosSinTable, Direction, Element, HeadNorm, HeadsLayout, HeadsMut, HeadsRef,
    InstructionSet, Layout, NormGradient, NormInput, NormOrder, Operand, Pairing, Parallelism,
    Positions, Real, RopeError, RotarySpec, Rotator, Strides, TokenAngles,
};

use crate::odd;

const ORDERS: [NormOrder; 2] = [NormOrder::BeforeRotation, NormOrder::AfterRotation];

/// Numbers between -2 and 2, fixed by the seed.
fn values(seed: u64, count: usize) -> Vec<f64> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 11) as f64 / (1u64 << 53) as f64 * 4.0 - 2.0
    };
    (0..count).map(|_| next()).collect()
}

fn rounded<E: Element>(values: &[f64]) -> Vec<E> {
    let round = |v: &f64| E::narrow(E::Acc::from_f64(*v));
    values.iter().map(round).collect()
}

fn wide<E: Element>(values: &[E]) -> Vec<f64> {
    values.iter().map(|v| v.widen().to_f64()).collect()
}

/// A case to check; sizes, strides and the rest go through small and odd numbers with `pairs`.
struct Case {
    spec: RotarySpec,
    positions: Positions,
    norm: HeadNorm,
    /// Of x and the results; padded between heads, tokens and samples.
    layout: HeadsLayout,
    weighted: bool,
    in_place: bool,
    seed: u64,
}

/// The values, and in front of them as many others as put their first one at the start of a cache
/// line, where stores may bypass the caches.
fn at_a_line<E: Element>(values: &[E]) -> (Vec<E>, usize) {
    let mut padded = vec![E::narrow(E::Acc::from_f64(0.0)); values.len() + 64 / size_of::<E>()];
    let start = padded.as_ptr().align_offset(64);
    padded.truncate(start);
    // Within the capacity, so that nothing moves.
    padded.extend_from_slice(values);
    (padded, start)
}

impl Case {
    fn new(pairs: usize, pairing: Pairing, per_channel: bool, order: NormOrder) -> Self {
        let spec = odd::spec(pairs, pairing, per_channel);
        // Heads are taken by four and by eight.
        let heads = [1, 2, 3, 4, 5, 9][pairs % 6];
        let (batch, seq) = (1 + pairs % 2, [3, 1, 7, 33][pairs % 4]);
        let ids: Vec<i64> = (0..spec.axis_count() * seq)
            .map(|i| (7 * i % 23) as i64)
            .collect();
        let norm = HeadNorm::new([1e-6, 1e-2][pairs % 2]).expect("valid");
        let mut layout = HeadsLayout::contiguous(
            Layout::ALL[pairs / 4 % 4],
            batch,
            seq,
            heads,
            spec.head_dim() + pairs % 5,
        );
        layout.head_dim = spec.head_dim();
        Self {
            positions: Positions::new(spec.axis_count(), &ids).expect("valid"),
            spec,
            norm: norm.with_unit_offset(pairs % 3 == 1).with_order(order),
            layout,
            weighted: pairs % 7 != 3,
            in_place: pairs % 5 < 2,
            seed: pairs as u64,
        }
    }

    /// Elements of a buffer.
    fn len(&self) -> usize {
        self.layout.extent() as usize
    }

    fn weight<A: Real>(&self, seed: u64) -> Option<Vec<A>> {
        let mut values = values(self.seed + seed, self.spec.head_dim());
        // Some that the gradient of the weight cannot be divided by.
        if self.seed % 4 == 1 {
            let offset = f64::from(u8::from(self.norm.unit_offset()));
            for (i, value) in values.iter_mut().enumerate().step_by(3) {
                *value = [0.0, 1e-20][i % 2] - offset;
            }
        }
        self.weighted.then(|| rounded(&values))
    }

    /// The oracle's y, dx and gradient of the weight.
    fn exact(&self, weight: Option<&[f64]>, x: &[f64], dy: &[f64]) -> [Vec<f64>; 3] {
        let head_dim = self.spec.head_dim();
        let offset = f64::from(u8::from(self.norm.unit_offset()));
        let scale: Vec<f64> = match weight {
            Some(weight) => weight.iter().map(|w| offset + w).collect(),
            None => vec![1.0; head_dim],
        };
        let norm = HeadRmsNorm {
            weight: &scale,
            eps: self.norm.eps(),
        };
        let (mut y, mut dx, mut dw) = (x.to_vec(), dy.to_vec(), vec![0.0; head_dim]);
        for s in 0..self.layout.seq {
            let matrix = HeadMatrix::new(&self.spec, &self.positions, s, None).expect("valid");
            for (b, head) in (0..self.layout.batch)
                .flat_map(|b| (0..self.layout.heads).map(move |head| (b, head)))
            {
                let Strides {
                    batch,
                    seq,
                    head: n,
                } = self.layout.strides;
                let at = b * batch + s * seq + head * n;
                let row = at..at + head_dim;
                let (x, g) = (&x[row.clone()], &dy[row.clone()]);
                let (result, gradient, dw_part);
                if self.norm.order() == NormOrder::BeforeRotation {
                    result = matrix.apply(&norm.apply(x));
                    (gradient, dw_part) = norm.apply_adjoint(x, &matrix.apply_adjoint(g));
                } else {
                    let z = matrix.apply(x);
                    result = norm.apply(&z);
                    let dz;
                    (dz, dw_part) = norm.apply_adjoint(&z, g);
                    gradient = matrix.apply_adjoint(&dz);
                }
                y[row.clone()].copy_from_slice(&result);
                dx[row].copy_from_slice(&gradient);
                for (sum, value) in dw.iter_mut().zip(dw_part) {
                    *sum += value;
                }
            }
        }
        [y, dx, dw]
    }

    /// y, dx and the gradient of the weight by the kernels. Elements between rows keep what they
    /// hold: x in y, dy in dx.
    fn run<E: Element>(
        &self,
        rotator: Rotator<'_, E::Acc>,
        weight: Option<&[E::Acc]>,
        x: &[E],
        dy: &[E],
    ) -> (Vec<E>, Vec<E>, Vec<E::Acc>) {
        let [(mut y, y_at), (mut dx, dx_at)] = [x, dy].map(at_a_line);
        let (y, dx) = (&mut y[y_at..], &mut dx[dx_at..]);
        let mut dw = vec![E::Acc::from_f64(99.0); self.spec.head_dim()];
        rotator
            .norm_rotate(
                &self.norm,
                NormInput {
                    x: self.operand(x, y),
                    weight,
                },
                None,
            )
            .expect("valid");
        rotator
            .norm_rotate_backward(
                &self.norm,
                NormGradient {
                    x: HeadsRef::new(x, self.layout).expect("valid"),
                    weight,
                    gradient: self.operand(dy, dx),
                    weight_gradient: Some(&mut dw),
                },
                None,
            )
            .expect("valid");
        (y.to_vec(), dx.to_vec(), dw)
    }

    fn operand<'a, E>(&self, from: &'a [E], to: &'a mut [E]) -> Operand<'a, E> {
        let to = HeadsMut::new(to, self.layout).expect("valid");
        if self.in_place {
            return to.into();
        }
        (HeadsRef::new(from, self.layout).expect("valid"), to).into()
    }

    fn check<E: Element>(&self) {
        let (x, dy): (Vec<E>, Vec<E>) = (
            rounded(&values(self.seed + 1, self.len())),
            rounded(&values(self.seed + 2, self.len())),
        );
        let weight = self.weight::<E::Acc>(3);
        let wide_weight = weight.as_deref().map(wide);
        let exact = self.exact(wide_weight.as_deref(), &wide(&x), &wide(&dy));
        let angles = TokenAngles::<E::Acc>::new(&self.spec, &self.positions, None).expect("valid");
        let rotator = Rotator::new(self.spec.geometry(), angles.angles()).expect("valid");
        let mut first = None;
        for set in InstructionSet::available() {
            let rotator = rotator.with_instructions(set);
            let found = self.run(rotator, weight.as_deref(), &x, &dy);
            let what = || format!("{set} {} {:?} {:?}", E::NAME, self.spec, self.norm);
            for (found, exact, what_of) in [
                (wide(&found.0), &exact[0], "y"),
                (wide(&found.1), &exact[1], "dx"),
                (wide(&found.2), &exact[2], "the gradient of the weight"),
            ] {
                // Rounding on store, relative; and that of the computation, relative to its terms.
                let stored = if what_of.starts_with("the") {
                    0.0
                } else {
                    unit_roundoff::<E>()
                };
                let most = exact.iter().fold(1.0, |most: f64, v| most.max(v.abs()));
                let computed = 40.0 * unit_roundoff::<E::Acc>() * most;
                for (i, (found, exact)) in found.iter().zip(exact).enumerate() {
                    let allowed = stored * exact.abs() + computed + 1e-7 * stored;
                    assert!(
                        (found - exact).abs() <= allowed,
                        "{what_of} {i}: {found} instead of {exact}, {}",
                        what()
                    );
                }
            }
            let found = [wide(&found.0), wide(&found.1), wide(&found.2)].map(bits);
            let first = first.get_or_insert_with(|| found.clone());
            assert!(*first == found, "other bits: {}", what());
        }
    }
}

fn bits(values: Vec<f64>) -> Vec<u64> {
    values.into_iter().map(f64::to_bits).collect()
}

/// Half the distance of 1 to the next number.
fn unit_roundoff<E: Element>() -> f64 {
    match E::NAME {
        "f64" => f64::EPSILON / 2.0,
        "f32" => f64::from(f32::EPSILON) / 2.0,
        "f16" => f16::EPSILON.to_f64() / 2.0,
        _ => bf16::EPSILON.to_f64() / 2.0,
    }
}

fn every_length(pairing: Pairing) {
    for pairs in (1..=40).chain([48, 63, 64, 65, 70, 128]) {
        if pairing == Pairing::Quarter && pairs % 2 == 1 {
            continue;
        }
        for order in ORDERS {
            for per_channel in [false, true] {
                let case = Case::new(pairs, pairing, per_channel, order);
                case.check::<f32>();
                match pairs % 3 {
                    0 => case.check::<f64>(),
                    1 => case.check::<f16>(),
                    _ => case.check::<bf16>(),
                }
            }
        }
    }
}

#[test]
fn each_pairing_agrees_with_the_oracle_at_every_length() {
    std::thread::scope(|threads| {
        for pairing in Pairing::ALL {
            threads.spawn(move || every_length(pairing));
        }
    });
}

/// 128 channels, for which the kernels have code of their own, and three groups of heads.
#[test]
fn the_length_of_most_models_agrees_with_the_oracle() {
    for (pairing, layout, order) in [Pairing::Half, Pairing::Adjacent]
        .into_iter()
        .flat_map(|pairing| Layout::ALL.map(|layout| (pairing, layout)))
        .flat_map(|(pairing, layout)| ORDERS.map(|order| (pairing, layout, order)))
    {
        let (seq, heads) = (5, 17);
        for (in_place, seed) in [(false, 4), (true, 5), (true, 6)] {
            let case = Case {
                norm: HeadNorm::new(1e-6).unwrap().with_order(order),
                layout: HeadsLayout::contiguous(layout, 1, seq, heads, 128),
                spec: RotarySpec::builder(128).pairing(pairing).build().unwrap(),
                positions: Positions::text(1, 3, seq).unwrap(),
                weighted: true,
                in_place,
                seed,
            };
            case.check::<f32>();
            case.check::<f16>();
            case.check::<bf16>();
        }
    }
}

/// The sizes of Qwen3, and half its head, past the caches and not, by several threads and one: the
/// same bits, by all instructions.
#[test]
fn stores_and_threads_change_no_bit() {
    for pairing in [Pairing::Half, Pairing::Adjacent] {
        for head_dim in [128, 64] {
            bits_are_the_same::<f32>(pairing, head_dim);
            bits_are_the_same::<bf16>(pairing, head_dim);
            bits_are_the_same::<f16>(pairing, head_dim);
        }
    }
}

fn bits_are_the_same<E: Element>(pairing: Pairing, head_dim: usize) {
    let spec = RotarySpec::builder(head_dim)
        .pairing(pairing)
        .build()
        .expect("valid");
    let (batch, seq, heads) = (2, 37, 5);
    let ids: Vec<i64> = (0..seq as i64).map(|i| i * i % 61).collect();
    let positions = Positions::new(1, &ids).expect("valid");
    let mut table = CosSinTable::<E::Acc>::new(&spec, None).expect("valid");
    table.grow_to(61).expect("valid");
    let angles = TokenAngles::gather(&table, &positions).expect("valid");
    for (layout, order, set) in Layout::ALL
        .into_iter()
        .flat_map(|layout| ORDERS.map(|order| (layout, order)))
        .flat_map(|(layout, order)| {
            InstructionSet::available().map(move |set| (layout, order, set))
        })
    {
        let case = Case {
            norm: HeadNorm::new(1e-6).expect("valid").with_order(order),
            layout: HeadsLayout::contiguous(layout, batch, seq, heads, head_dim),
            spec: spec.clone(),
            positions: positions.clone(),
            weighted: true,
            in_place: false,
            seed: 6,
        };
        let x: Vec<E> = rounded(&values(1, case.len()));
        let dy: Vec<E> = rounded(&values(2, case.len()));
        let weight = case.weight::<E::Acc>(3);
        let mut first = None;
        for (angles, stream, parallelism) in [
            (angles.angles(), usize::MAX, Parallelism::SERIAL),
            (angles.angles(), 0, Parallelism::new(1, 7)),
            (angles.angles(), 0, Parallelism::new(1, usize::MAX)),
        ] {
            let rotator = Rotator::new(spec.geometry(), angles)
                .expect("valid")
                .with_instructions(set)
                .with_streaming(stream)
                .with_parallelism(parallelism);
            let found = case.run(rotator, weight.as_deref(), &x, &dy);
            let found = [wide(&found.0), wide(&found.1), wide(&found.2)].map(bits);
            let first = first.get_or_insert_with(|| found.clone());
            let name = E::NAME;
            assert!(
                *first == found,
                "{name} {head_dim} {layout:?} {order:?} {set} {parallelism:?}"
            );
        }
    }
}

/// Heads with angles of their own give the same as each by itself.
#[test]
fn heads_turn_by_angles_of_their_own() {
    let (batch, seq, heads, pairs) = (2, 37, 3, 10);
    let spec = RotarySpec::builder(2 * pairs).build().unwrap();
    let ids: Vec<i64> = (0..2 * seq as i64).map(|i| i * i % 61).collect();
    let positions = Positions::new(2, &ids).unwrap();
    let frequencies = values(9, 2 * heads * pairs);
    let angles = TokenAngles::<f64>::per_head(&positions, &frequencies, heads).unwrap();
    for (layout, order) in Layout::ALL
        .into_iter()
        .flat_map(|layout| ORDERS.map(|order| (layout, order)))
    {
        let mut case = Case {
            norm: HeadNorm::new(1e-6).unwrap().with_order(order),
            layout: HeadsLayout::contiguous(layout, batch, seq, heads, 2 * pairs),
            spec: spec.clone(),
            positions: positions.clone(),
            weighted: true,
            in_place: false,
            seed: 5,
        };
        let (x, dy) = (values(1, case.len()), values(2, case.len()));
        let weight = case.weight::<f64>(3);
        let rotator = Rotator::new(spec.geometry(), angles.angles()).unwrap();
        let (y, dx, _) = case.run(rotator, weight.as_deref(), &x, &dy);
        case.layout.heads = 1;
        for head in 0..heads {
            let rows = angles.rows().chunks_exact(2 * pairs);
            let rows: Vec<f64> = rows.skip(head).step_by(heads).flatten().copied().collect();
            let rotator = Rotator::new(spec.geometry(), Angles::Tokens(&rows)).unwrap();
            let start = head * case.layout.strides.head;
            let (x, dy) = (&x[start..], &dy[start..]);
            let (y1, dx1, _) = case.run(rotator, weight.as_deref(), x, dy);
            let Strides {
                batch: batch_stride,
                seq: seq_stride,
                ..
            } = case.layout.strides;
            for at in
                (0..batch).flat_map(|b| (0..seq).map(move |s| b * batch_stride + s * seq_stride))
            {
                let (own, all) = (at..at + 2 * pairs, start + at..start + at + 2 * pairs);
                assert_eq!(
                    y1[own.clone()],
                    y[all.clone()],
                    "{layout:?} {order:?} {head}"
                );
                assert_eq!(dx1[own], dx[all], "{layout:?} {order:?} {head}");
            }
        }
    }
}

/// q and k in one call, with weights of their own, give the same as two calls.
#[test]
fn q_and_k_have_their_own_weights() {
    let case = Case::new(16, Pairing::Half, false, NormOrder::BeforeRotation);
    let few = HeadsLayout {
        heads: 2,
        ..case.layout
    };
    assert!(few.heads < case.layout.heads);
    let [q, k, dq, dk] = [1, 2, 3, 4].map(|seed| values(seed, case.len()));
    let weights: [Vec<f64>; 2] = [5, 6].map(|seed| case.weight(seed).unwrap());
    let angles = TokenAngles::<f64>::new(&case.spec, &case.positions, None).unwrap();
    let rotator = Rotator::new(case.spec.geometry(), angles.angles()).unwrap();
    let q_results = case.run(rotator, Some(&weights[0]), &q, &dq);
    let k_results = Case {
        layout: few,
        ..Case::new(16, Pairing::Half, false, NormOrder::BeforeRotation)
    }
    .run(rotator, Some(&weights[1]), &k, &dk);

    let layouts = [case.layout, few];
    let (mut y, mut dx) = ([q.clone(), k.clone()], [dq, dk]);
    let mut dw = [7.0; 2].map(|value| vec![value; case.spec.head_dim()]);
    {
        let inputs = y.iter_mut().zip(layouts).zip(&weights);
        let mut inputs = inputs.map(|((y, layout), weight)| NormInput {
            x: HeadsMut::new(y, layout).unwrap().into(),
            weight: Some(weight),
        });
        rotator
            .norm_rotate(&case.norm, inputs.next().unwrap(), inputs.next())
            .unwrap();
    }
    let gradients = [&q, &k].into_iter().zip(&mut dx).zip(&mut dw);
    let mut gradients = gradients.zip(layouts).zip(&weights).map(
        |((((x, dx), weight_gradient), layout), weight)| NormGradient {
            x: HeadsRef::new(x, layout).unwrap(),
            weight: Some(weight),
            gradient: HeadsMut::new(dx, layout).unwrap().into(),
            weight_gradient: Some(weight_gradient),
        },
    );
    rotator
        .norm_rotate_backward(&case.norm, gradients.next().unwrap(), gradients.next())
        .unwrap();
    assert_eq!(
        (&y[0], &dx[0], &dw[0]),
        (&q_results.0, &q_results.1, &q_results.2)
    );
    assert_eq!(
        (&y[1], &dx[1], &dw[1]),
        (&k_results.0, &k_results.1, &k_results.2)
    );
}

/// By central differences in f64 of a sum of the results with random factors.
#[test]
fn gradients_are_those_of_finite_differences() {
    for (pairing, order) in Pairing::ALL
        .into_iter()
        .flat_map(|pairing| ORDERS.map(|order| (pairing, order)))
    {
        let case = Case {
            in_place: true,
            ..Case::new(8, pairing, true, order)
        };
        let angles = TokenAngles::<f64>::new(&case.spec, &case.positions, None).unwrap();
        let rotator = Rotator::new(case.spec.geometry(), angles.angles()).unwrap();
        let (x, dy) = (values(1, case.len()), values(2, case.len()));
        let weight: Vec<f64> = case.weight(3).unwrap();
        let loss = |x: &[f64], weight: &[f64]| -> f64 {
            let mut y = x.to_vec();
            let input = NormInput {
                x: HeadsMut::new(&mut y, case.layout).unwrap().into(),
                weight: Some(weight),
            };
            rotator.norm_rotate(&case.norm, input, None).unwrap();
            y.iter().zip(&dy).map(|(y, dy)| y * dy).sum()
        };
        let (_, dx, dw) = case.run(rotator, Some(&weight), &x, &dy);
        let step = 1e-5;
        let difference = |values: &[f64], i: usize, loss: &dyn Fn(&[f64]) -> f64| {
            let (mut below, mut above) = (values.to_vec(), values.to_vec());
            below[i] -= step;
            above[i] += step;
            (loss(&above) - loss(&below)) / (2.0 * step)
        };
        let Strides { batch, seq, head } = case.layout.strides;
        for (channel, found) in dw.iter().enumerate() {
            // One element of each channel: of the last sample, token and head.
            let last = (case.layout.batch - 1) * batch
                + (case.layout.seq - 1) * seq
                + (case.layout.heads - 1) * head;
            let i = last + channel;
            let by_x = difference(&x, i, &|x| loss(x, &weight));
            assert!((by_x - dx[i]).abs() < 1e-8, "{by_x} {} {pairing:?}", dx[i]);
            let by_weight = difference(&weight, channel, &|weight| loss(&x, weight));
            assert!((by_weight - found).abs() < 1e-7, "{by_weight} {found}");
        }
    }
}

/// Rows of infinities, NaN, zeros, and numbers whose squares are zero or infinite give what the
/// norm followed by the rotation gives.
#[test]
fn unusual_rows_are_those_of_the_norm_followed_by_the_rotation() {
    let spec = RotarySpec::builder(80).rotary_dim(64).build().unwrap();
    let positions = Positions::text(1, 3, 1).unwrap();
    let angles = TokenAngles::<f32>::new(&spec, &positions, None).unwrap();
    let rotator = Rotator::new(spec.geometry(), angles.angles()).unwrap();
    // Whole numbers: the sum of their squares is exact in any order.
    let whole: Vec<f32> = (0..80).map(|i| ((i * i) % 31) as f32 - 15.0).collect();
    let with = |at: usize, value: f32| {
        let mut row = whole.clone();
        row[at] = value;
        row
    };
    let scaled = |by: f32| whole.iter().map(|x| x * by).collect::<Vec<_>>();
    let rows = [
        whole.clone(),
        vec![0.0; 80],
        with(7, f32::INFINITY),
        with(70, f32::NEG_INFINITY),
        with(33, f32::NAN),
        scaled(1e-42),
        scaled(f32::powi(2.0, -40)),
        scaled(f32::powi(2.0, 100)),
    ];
    let weight: Vec<f32> = (0..80).map(|i| 0.5 + i as f32 / 64.0).collect();
    for eps in [0.0, 1e-6] {
        let norm = HeadNorm::new(eps).unwrap();
        for row in &rows {
            let layout = HeadsLayout::contiguous(Layout::Bsnd, 1, 1, 1, 80);
            let squares: f32 = row.iter().map(|x| x * x).sum();
            let rstd = (1.0 / f64::from(squares / 80.0 + eps as f32).sqrt()) as f32;
            let mut expected: Vec<f32> =
                row.iter().zip(&weight).map(|(x, w)| x * rstd * w).collect();
            rotator
                .rotate(HeadsMut::new(&mut expected, layout).unwrap(), None)
                .unwrap();
            let mut found = row.clone();
            let input = NormInput {
                x: HeadsMut::new(&mut found, layout).unwrap().into(),
                weight: Some(&weight),
            };
            rotator.norm_rotate(&norm, input, None).unwrap();
            let largest = expected.iter().fold(0.0f32, |a, b| a.max(b.abs()));
            for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
                let near = (found - expected).abs() <= 4.0 * f32::EPSILON * largest;
                let both_nan = found.is_nan() && expected.is_nan();
                let same = found == expected || both_nan;
                assert!(same || near, "{i}: {found} {expected} {eps} {row:?}");
            }
        }
    }
}

/// Rows of zeros, infinities, NaN, and numbers whose squares are zero or infinite, in types that
/// are widened: forward as transformers computes them, x * rsqrt(mean(x^2) + eps) in f32, and
/// backward as its autograd does.
fn extreme_rows<E: Element<Acc = f32>>() {
    let spec = RotarySpec::builder(80)
        .rotary_dim(64)
        .build()
        .expect("valid");
    let angles = TokenAngles::<f32>::new(&spec, &Positions::text(1, 3, 1).expect("valid"), None)
        .expect("valid");
    let layout = HeadsLayout::contiguous(Layout::Bsnd, 1, 1, 1, 80);
    let whole: Vec<f32> = (0..80).map(|i| ((i * i) % 31) as f32 - 15.0).collect();
    let with = |at: usize, value: f32| {
        let mut row = whole.clone();
        row[at] = value;
        row
    };
    let scaled = |by: f32| whole.iter().map(|x| x * by).collect::<Vec<_>>();
    // Of the gradient of x: the formula's, zeros, or NaN.
    let rows = [
        (whole.clone(), None),
        (vec![0.0; 80], None),
        (with(7, f32::INFINITY), Some(f32::NAN)),
        (with(70, f32::NEG_INFINITY), Some(f32::NAN)),
        (with(33, f32::NAN), Some(f32::NAN)),
        // Subnormal in f16; in bf16 the smallest that is not.
        (scaled(f32::powi(2.0, -24)), None),
        (scaled(f32::powi(2.0, -126)), None),
        // Infinite in f16; in bf16 and f32, squares that are.
        (
            scaled(f32::powi(2.0, 100)),
            Some(if E::NAME == "f16" { f32::NAN } else { 0.0 }),
        ),
    ];
    let weight: Vec<f32> = (0..80).map(|i| 0.5 + i as f32 / 64.0).collect();
    let mut not_a_number = weight.clone();
    // To round it as if it were a number gives zero.
    not_a_number[40] = f32::from_bits(0x7fff_ffff);
    let rows = rows
        .iter()
        .map(|(row, dy_number)| (row, &weight, *dy_number));
    let nan_weight = (&whole, &not_a_number, Some(f32::NAN));
    let dy: Vec<f32> = (0..80).map(|i| (i % 9) as f32 / 4.0 - 1.0).collect();
    let eps = 1e-6;
    let norm = HeadNorm::new(eps).expect("valid");
    let round = |row: &[f32]| row.iter().map(|x| E::narrow(*x)).collect::<Vec<E>>();
    for set in InstructionSet::available() {
        let rotator = Rotator::new(spec.geometry(), angles.angles())
            .expect("valid")
            .with_instructions(set);
        let turned = |mut row: Vec<f32>, direction| {
            let x = HeadsMut::new(&mut row, layout).expect("valid");
            rotator.apply::<f32>(direction, x, None).expect("valid");
            row
        };
        for (row, weight, dy_number) in rows.clone().chain([nan_weight]) {
            let x = round(row);
            let wide: Vec<f32> = x.iter().map(|x| x.widen()).collect();
            let squares: f32 = wide.iter().map(|x| x * x).sum();
            let rstd = 1.0 / (squares / 80.0 + eps as f32).sqrt();
            let products = wide.iter().zip(weight).map(|(x, w)| x * rstd * w);
            let y = turned(products.collect(), Direction::Forward);
            let mut found = x.clone();
            let input = NormInput {
                x: HeadsMut::new(&mut found, layout).expect("valid").into(),
                weight: Some(weight),
            };
            rotator.norm_rotate(&norm, input, None).expect("valid");
            assert_same(&found, &y, &format!("y {set} {} {row:?}", E::NAME));

            let h: Vec<f32> = turned(
                round(&dy).iter().map(|g| g.widen()).collect(),
                Direction::Adjoint,
            )
            .iter()
            .zip(weight)
            .map(|(g, w)| g * w)
            .collect();
            let mean = h
                .iter()
                .zip(&wide)
                .map(|(h, x)| h * (x * rstd))
                .sum::<f32>()
                / 80.0;
            let formula = |(h, x): (&f32, &f32)| rstd * (h - x * rstd * mean);
            let dx: Vec<f32> = match dy_number {
                Some(value) => vec![value; 80],
                None => h.iter().zip(&wide).map(formula).collect(),
            };
            let mut found = round(&dy);
            let gradient = NormGradient {
                x: HeadsRef::new(&x, layout).expect("valid"),
                weight: Some(weight),
                gradient: HeadsMut::new(&mut found, layout).expect("valid").into(),
                weight_gradient: None,
            };
            rotator
                .norm_rotate_backward(&norm, gradient, None)
                .expect("valid");
            assert_same(&found, &dx, &format!("dx {set} {} {row:?}", E::NAME));
        }
    }
}

/// Equal after rounding, up to the order of sums.
fn assert_same<E: Element<Acc = f32>>(found: &[E], exact: &[f32], what: &str) {
    let largest = exact.iter().fold(0.0, |most: f32, v| most.max(v.abs()));
    for (i, (found, exact)) in found.iter().zip(exact).enumerate() {
        let (found, rounded) = (found.widen(), E::narrow(*exact).widen());
        let allowed = f64::from(rounded.abs()) * 2.0 * unit_roundoff::<E>()
            + f64::from(largest) * 1e-6
            + 2f64.powi(-24);
        let both_nan = found.is_nan() && rounded.is_nan();
        let close = (f64::from(found) - f64::from(rounded)).abs() <= allowed;
        assert!(
            found == rounded || both_nan || close,
            "{what}, {i}: {found} instead of {rounded}"
        );
    }
}

#[test]
fn extreme_rows_are_those_of_transformers() {
    extreme_rows::<f32>();
    extreme_rows::<f16>();
    extreme_rows::<bf16>();
}

/// A NaN among the angles, of those that rounding to bf16 as a number would carry to zero, makes its
/// pair NaN, and in the backward its head.
#[test]
fn a_nan_among_the_angles_stays_one() {
    const NAN: f32 = f32::from_bits(0x7fff_ffff);
    let (pairs, pair) = (64, 5);
    let spec = RotarySpec::builder(2 * pairs).build().expect("valid");
    let layout = HeadsLayout::contiguous(Layout::Bsnd, 1, 1, 4, 2 * pairs);
    let mut rows = [vec![0.75f32; pairs], vec![0.6; pairs]].concat();
    rows[pair] = NAN;
    let x: Vec<bf16> = rounded(&values(1, layout.elems()));
    for (set, order) in InstructionSet::available().flat_map(|set| ORDERS.map(|o| (set, o))) {
        let rotator = Rotator::new(spec.geometry(), Angles::Tokens(&rows))
            .expect("valid")
            .with_instructions(set);
        let norm = HeadNorm::new(1e-6).expect("valid").with_order(order);
        let (mut y, mut dx) = (x.clone(), x.clone());
        let input = NormInput {
            x: HeadsMut::new(&mut y, layout).expect("fits").into(),
            weight: None,
        };
        rotator.norm_rotate(&norm, input, None).expect("valid");
        let gradient = NormGradient {
            x: HeadsRef::new(&x, layout).expect("fits"),
            weight: None,
            gradient: HeadsMut::new(&mut dx, layout).expect("fits").into(),
            weight_gradient: None,
        };
        rotator
            .norm_rotate_backward(&norm, gradient, None)
            .expect("valid");
        let whole = order == NormOrder::AfterRotation;
        for (i, y) in y.iter().enumerate() {
            let expected = whole || i % pairs == pair;
            assert!(y.is_nan() == expected, "y {set} {order:?} {i}: {y}");
        }
        assert!(dx.iter().all(|dx| dx.is_nan()), "dx {set} {order:?}");
    }
}

#[test]
fn wrong_inputs_are_named() {
    for eps in [-1e-6, f64::NAN, f64::INFINITY, 1e39, 1e-60] {
        let refused = HeadNorm::new(eps).unwrap_err();
        assert!(matches!(refused, RopeError::NormEps { .. }), "{refused}");
    }
    let case = Case::new(8, Pairing::Half, false, NormOrder::BeforeRotation);
    let head_dim = case.spec.head_dim();
    let angles = TokenAngles::<f32>::new(&case.spec, &case.positions, None).unwrap();
    let rotator = Rotator::new(case.spec.geometry(), angles.angles()).unwrap();
    let (x, mut y) = (vec![1f32; case.len()], vec![1f32; case.len()]);
    let short = vec![1f32; head_dim - 1];
    let input = NormInput {
        x: HeadsMut::new(&mut y, case.layout).unwrap().into(),
        weight: Some(&short),
    };
    assert_eq!(
        rotator.norm_rotate(&case.norm, input, None),
        Err(RopeError::NormWeight {
            what: "the weight of q's norm",
            found: head_dim - 1,
            expected: head_dim,
        })
    );
    let mut long = vec![0f32; head_dim + 1];
    let gradient = NormGradient {
        x: HeadsRef::new(&x, case.layout).unwrap(),
        weight: None,
        gradient: HeadsMut::new(&mut y, case.layout).unwrap().into(),
        weight_gradient: Some(&mut long),
    };
    assert_eq!(
        rotator.norm_rotate_backward(&case.norm, gradient, None),
        Err(RopeError::NormWeight {
            what: "the gradient of the weight of q's norm",
            found: head_dim + 1,
            expected: head_dim,
        })
    );
    let fewer = HeadsLayout {
        heads: case.layout.heads - 1,
        ..case.layout
    };
    let gradient = NormGradient {
        x: HeadsRef::new(&x, fewer).unwrap(),
        weight: None,
        gradient: HeadsMut::new(&mut y, case.layout).unwrap().into(),
        weight_gradient: None,
    };
    let refused = rotator.norm_rotate_backward(&case.norm, gradient, None);
    assert!(
        matches!(
            refused,
            Err(RopeError::ShapeMismatch {
                left: "q",
                dimension: "heads",
                ..
            })
        ),
        "{refused:?}"
    );
}

/// No tokens and no heads are no work, and the gradient of the weight is zero then.
#[test]
fn empty_tensors_give_zero_gradients() {
    let spec = RotarySpec::builder(16).build().unwrap();
    for (seq, heads) in [(0, 2), (2, 0)] {
        let positions = Positions::text(1, 0, seq).unwrap();
        let angles = TokenAngles::<f32>::new(&spec, &positions, None).unwrap();
        let rotator = Rotator::new(spec.geometry(), angles.angles()).unwrap();
        let layout = HeadsLayout::contiguous(Layout::Bsnd, 1, seq, heads, 16);
        let mut weight_gradient = [3f32; 16];
        let gradient = NormGradient {
            x: HeadsRef::<f32>::new(&[], layout).unwrap(),
            weight: None,
            gradient: HeadsMut::new(&mut [], layout).unwrap().into(),
            weight_gradient: Some(&mut weight_gradient),
        };
        let norm = HeadNorm::new(1e-6).unwrap();
        rotator.norm_rotate_backward(&norm, gradient, None).unwrap();
        assert_eq!(weight_gradient, [0f32; 16]);
    }
}
