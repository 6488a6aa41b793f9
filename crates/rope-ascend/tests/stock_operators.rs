//! The wrappers of the stock operators, on the simulator's.
#![allow(clippy::unwrap_used, missing_docs, reason = "test code")]
#![allow(
    unsafe_code,
    reason = "the simulator's symbols are handed to the loader"
)]

mod support;

use ascend_sim::{Session, control};
use half::bf16;
use rope_ascend::aclnn::{
    CacheDirection, GradOutputs, Mode, MropeCall, OperatorElement, OperatorLayout, Operators,
    Output, SectionOrder, SinCosCache, StockPositions, Tensor, View, apply_rotary_pos_emb,
    interleave_rope, rope_with_sin_cos_cache, rotary_position_embedding,
    rotary_position_embedding_grad,
};
use rope_ascend::loader::Api;
use rope_ascend::safe::{Runtime, Stream};
use rope_ascend::sys::aclDataType;
use rope_ascend::{AscendError, Result};
use std::ffi::CStr;
use support::{Number, Numbers, api, tolerance};

fn with_stream(machine: ascend_sim::Machine, test: impl FnOnce(&Stream)) {
    with_stream_of(api(), machine, test);
}

fn with_stream_of(api: Api, machine: ascend_sim::Machine, test: impl FnOnce(&Stream)) {
    let _session = Session::with_machine(machine);
    let runtime = Runtime::start(api).unwrap();
    let stream = runtime.device(0).unwrap().stream().unwrap();
    test(&stream);
    stream.synchronize().unwrap();
    drop(stream);
    runtime.close().unwrap();
    let violations = control::take_violations();
    assert!(violations.is_empty(), "{violations:?}");
    assert_eq!(control::live().descriptors, 0);
}

fn values<T: Number>(numbers: &mut Numbers, len: usize) -> Vec<T> {
    (0..len).map(|_| T::of(numbers.unit())).collect()
}

fn mrope<T: Number + OperatorElement>(sections: &[i64], order: SectionOrder, half_pairing: bool) {
    with_stream(ascend_sim::Machine::default(), |stream| {
        let (tokens, head_dim, heads, rows) = (5_usize, 128_usize, [3_usize, 2], 20_usize);
        let pairs = 2 * sections.iter().sum::<i64>() as usize / 2;
        let axes = sections.len();
        let mut numbers = Numbers(11);
        // Values of the data's type, so that rounding the cache costs nothing.
        let angle = |numbers: &mut Numbers| T::of(numbers.unit()).wide() as f32;
        let cos: Vec<f32> = (0..rows * pairs).map(|_| angle(&mut numbers)).collect();
        let sin: Vec<f32> = (0..rows * pairs).map(|_| angle(&mut numbers)).collect();
        let ids: Vec<i64> = (0..axes * tokens)
            .map(|_| numbers.below(rows as u64) as i64)
            .collect();
        let cache = SinCosCache::<T>::new(stream, &cos, &sin, pairs as u32).unwrap();
        let positions = StockPositions::new(stream, &ids, axes as u32).unwrap();
        let x: [Vec<T>; 2] = heads.map(|heads| values(&mut numbers, tokens * heads * head_dim));
        let device = [stream.upload(&x[0]).unwrap(), stream.upload(&x[1]).unwrap()];
        for direction in [CacheDirection::Forward, CacheDirection::Gradient] {
            let mut out = [
                stream.zeros::<T>(x[0].len()).unwrap(),
                stream.zeros::<T>(x[1].len()).unwrap(),
            ];
            let [q_out, k_out] = &mut out;
            rope_with_sin_cos_cache(&mut MropeCall {
                direction,
                cache: &cache,
                positions: &positions,
                sections,
                order,
                head_dim: head_dim as u32,
                half_pairing,
                q: &device[0],
                k: &device[1],
                q_out,
                k_out,
            })
            .unwrap();
            for i in 0..2 {
                let got = stream.download(&out[i]).unwrap();
                for row in 0..tokens * heads[i] {
                    let token = row / heads[i];
                    for channel in 2 * pairs..head_dim {
                        assert_eq!(
                            got[row * head_dim + channel],
                            x[i][row * head_dim + channel]
                        );
                    }
                    for lane in 0..pairs {
                        let axis = match order {
                            SectionOrder::Contiguous => {
                                let mut end = 0;
                                sections
                                    .iter()
                                    .position(|s| {
                                        end += s;
                                        (lane as i64) < end
                                    })
                                    .unwrap()
                            }
                            SectionOrder::Striped => {
                                let axis = lane % axes;
                                if (lane as i64) < sections[axis] * axes as i64 {
                                    axis
                                } else {
                                    0
                                }
                            }
                        };
                        let at = ids[axis * tokens + token] as usize * pairs + lane;
                        let (c, s) = (f64::from(cos[at]), f64::from(sin[at]));
                        let channels = if half_pairing {
                            [lane, lane + pairs]
                        } else {
                            [2 * lane, 2 * lane + 1]
                        };
                        let [a, b] = channels.map(|channel| row * head_dim + channel);
                        let (x1, x2) = (x[i][a].wide(), x[i][b].wide());
                        let (y1, y2) = match direction {
                            CacheDirection::Forward => (c * x1 - s * x2, s * x1 + c * x2),
                            CacheDirection::Gradient => (c * x1 + s * x2, c * x2 - s * x1),
                        };
                        for (at, truth) in [(a, y1), (b, y2)] {
                            let error = (got[at].wide() - truth).abs();
                            assert!(
                                error <= tolerance::<T>(truth),
                                "{direction:?} {sections:?}: {} instead of {truth}",
                                got[at].wide()
                            );
                        }
                    }
                }
            }
        }
    });
}

#[test]
fn npu_mrope_and_its_gradient() {
    mrope::<f32>(&[16, 24, 24], SectionOrder::Contiguous, true);
    mrope::<bf16>(&[24, 20, 20], SectionOrder::Striped, true);
    mrope::<half::f16>(&[8, 12, 12], SectionOrder::Contiguous, false);
    mrope::<f32>(&[16, 16, 16, 16], SectionOrder::Contiguous, true);
}

#[test]
fn limits_of_npu_mrope_are_refused_before_the_call() {
    with_stream(ascend_sim::Machine::default(), |stream| {
        let cache = |pairs: u32| {
            SinCosCache::<bf16>::new(
                stream,
                &vec![1.0; 4 * pairs as usize],
                &vec![0.0; 4 * pairs as usize],
                pairs,
            )
            .unwrap()
        };
        let positions = |ids: &[i64], axes| StockPositions::new(stream, ids, axes).unwrap();
        let attempt = |pairs: u32,
                       sections: &[i64],
                       order,
                       head_dim: u32,
                       heads: usize,
                       position: i64|
         -> AscendError {
            let x = stream.zeros::<bf16>(2 * heads * head_dim as usize).unwrap();
            let (mut q_out, mut k_out) = (
                stream.zeros(x.len()).unwrap(),
                stream.zeros(x.len()).unwrap(),
            );
            rope_with_sin_cos_cache(&mut MropeCall {
                direction: CacheDirection::Forward,
                cache: &cache(pairs),
                positions: &positions(&[position; 6], 3),
                sections,
                order,
                head_dim,
                half_pairing: true,
                q: &x,
                k: &x,
                q_out: &mut q_out,
                k_out: &mut k_out,
            })
            .unwrap_err()
        };
        use SectionOrder::{Contiguous, Striped};
        let attempts = [
            (
                "[24, 20, 20]",
                attempt(32, &[11, 11, 10], Striped, 256, 2, 0),
            ),
            (
                "multiples of 32",
                attempt(40, &[16, 12, 12], Contiguous, 80, 2, 0),
            ),
            (
                "fewer than 43 heads",
                attempt(64, &[16, 24, 24], Contiguous, 128, 43, 0),
            ),
            (
                "below the cache's 4 rows",
                attempt(64, &[16, 24, 24], Contiguous, 128, 2, 4),
            ),
            ("in sum", attempt(32, &[16, 24, 24], Contiguous, 128, 2, 0)),
            (
                "three of them",
                attempt(64, &[16, 16, 16, 16], Striped, 128, 2, 0),
            ),
        ];
        for (i, (expected, error)) in attempts.iter().enumerate() {
            assert!(
                matches!(error, AscendError::OperatorLimit { .. }),
                "{error:?}"
            );
            // The last has four sections for three axes, which is found first.
            assert!(i == 5 || error.to_string().contains(expected), "{error}");
        }
        assert!(StockPositions::new(stream, &[0, 0], 2).is_err());
        assert!(
            control::calls()
                .iter()
                .all(|call| !call.function.starts_with("aclnn"))
        );
    });
}

/// Rotation of BSND by full-width angles of one batch and one head.
#[test]
fn rotary_position_embedding_and_its_gradient() {
    for (machine, mode) in [
        (ascend_sim::Machine::default(), Mode::Half),
        (ascend_sim::Machine::default(), Mode::Interleave),
        (ascend_sim::Machine::ascend_950(), Mode::Quarter),
        (ascend_sim::Machine::ascend_950(), Mode::InterleaveHalf),
    ] {
        with_stream(machine, |stream| {
            let (batch, seq, heads, dim) = (2_usize, 3_usize, 2_usize, 64_usize);
            let mut numbers = Numbers(5);
            let dims = [batch, seq, heads, dim].map(|d| d as u64);
            let angle_dims = [1, seq as u64, 1, dim as u64];
            let len = batch * seq * heads * dim;
            let (x, g): (Vec<f32>, Vec<f32>) =
                (values(&mut numbers, len), values(&mut numbers, len));
            let (cos, sin): (Vec<f32>, Vec<f32>) = (
                values(&mut numbers, seq * dim),
                values(&mut numbers, seq * dim),
            );
            let [xd, gd, cd, sd] = [&x, &g, &cos, &sin].map(|v| stream.upload(v).unwrap());
            let (mut yd, mut dxd) = (
                stream.zeros::<f32>(len).unwrap(),
                stream.zeros::<f32>(len).unwrap(),
            );
            let (mut dcd, mut dsd) = (
                stream.zeros::<f32>(seq * dim).unwrap(),
                stream.zeros::<f32>(seq * dim).unwrap(),
            );
            let (c, s) = (
                Tensor::new(&cd, &angle_dims).unwrap(),
                Tensor::new(&sd, &angle_dims).unwrap(),
            );
            let xt = Tensor::new(&xd, &dims).unwrap();
            rotary_position_embedding(
                &xt,
                &c,
                &s,
                mode,
                OperatorLayout::Bsnd,
                &mut Output::new(&mut yd, &dims).unwrap(),
            )
            .unwrap();
            let mut outputs = GradOutputs {
                dx: Output::new(&mut dxd, &dims).unwrap(),
                angles: Some((
                    xt.clone(),
                    Output::new(&mut dcd, &angle_dims).unwrap(),
                    Output::new(&mut dsd, &angle_dims).unwrap(),
                )),
            };
            rotary_position_embedding_grad(
                &Tensor::new(&gd, &dims).unwrap(),
                &c,
                &s,
                mode,
                OperatorLayout::Bsnd,
                &mut outputs,
            )
            .unwrap();
            let (y, dx) = (
                stream.download(&yd).unwrap(),
                stream.download(&dxd).unwrap(),
            );
            let (dcos, dsin) = (
                stream.download(&dcd).unwrap(),
                stream.download(&dsd).unwrap(),
            );
            // <R x, g> = <x, R' g>, and the derivative along the angles.
            let dot = |a: &[f32], b: &[f32]| {
                a.iter()
                    .zip(b)
                    .map(|(a, b)| f64::from(*a) * f64::from(*b))
                    .sum::<f64>()
            };
            assert!((dot(&y, &g) - dot(&x, &dx)).abs() < 1e-4, "{mode:?}");
            // y is linear in (cos, sin), so <y, g> = <cos, dcos> + <sin, dsin>.
            assert!(
                (dot(&y, &g) - dot(&cos, &dcos) - dot(&sin, &dsin)).abs() < 1e-4,
                "{mode:?}"
            );
            let first = f64::from(x[0]) * f64::from(cos[0]);
            let partner = match mode {
                Mode::Half => 32,
                Mode::Interleave | Mode::InterleaveHalf => 1,
                Mode::Quarter => 16,
            };
            let truth = first - f64::from(x[partner]) * f64::from(sin[0]);
            assert!(
                (f64::from(y[0]) - truth).abs() < 1e-6,
                "{mode:?}: {} instead of {truth}",
                y[0]
            );
        });
    }
}

/// The gradient alone is the same as with gradients of the angles, in every layout, and TND is BSND with a batch of one.
#[test]
fn the_gradient_without_gradients_of_the_angles() {
    use OperatorLayout::{Bnsd, Bsnd, Sbnd, Tnd};
    with_stream(ascend_sim::Machine::default(), |stream| {
        let (seq, heads, dim) = (3_u64, 2, 64);
        let len = (seq * heads * dim) as usize;
        let mut numbers = Numbers(17);
        let (g, x): (Vec<f32>, Vec<f32>) = (values(&mut numbers, len), values(&mut numbers, len));
        let angles = (seq * dim) as usize;
        let (cos, sin): (Vec<f32>, Vec<f32>) =
            (values(&mut numbers, angles), values(&mut numbers, angles));
        let [gd, xd, cd, sd] = [&g, &x, &cos, &sin].map(|v| stream.upload(v).unwrap());
        let gradient = |dims: &[u64], angle_dims: &[u64], layout, mode, with_angles: bool| {
            let mut out = stream.zeros::<f32>(len).unwrap();
            let (mut dcos, mut dsin) = (
                stream.zeros::<f32>(angles).unwrap(),
                stream.zeros::<f32>(angles).unwrap(),
            );
            let mut outputs = GradOutputs {
                dx: Output::new(&mut out, dims).unwrap(),
                angles: with_angles.then(|| {
                    (
                        Tensor::new(&xd, dims).unwrap(),
                        Output::new(&mut dcos, angle_dims).unwrap(),
                        Output::new(&mut dsin, angle_dims).unwrap(),
                    )
                }),
            };
            rotary_position_embedding_grad(
                &Tensor::new(&gd, dims).unwrap(),
                &Tensor::new(&cd, angle_dims).unwrap(),
                &Tensor::new(&sd, angle_dims).unwrap(),
                mode,
                layout,
                &mut outputs,
            )
            .unwrap();
            stream.download(&out).unwrap()
        };
        for mode in [Mode::Half, Mode::Interleave] {
            let layouts = [
                (Bsnd, vec![1, seq, heads, dim], vec![1, seq, 1, dim]),
                (Bnsd, vec![1, heads, seq, dim], vec![1, 1, seq, dim]),
                (Sbnd, vec![seq, 1, heads, dim], vec![seq, 1, 1, dim]),
                (Tnd, vec![seq, heads, dim], vec![seq, 1, dim]),
            ];
            let [bsnd, _, sbnd, tnd] = layouts.map(|(layout, dims, angle_dims)| {
                let alone = gradient(&dims, &angle_dims, layout, mode, false);
                assert_eq!(
                    alone,
                    gradient(&dims, &angle_dims, layout, mode, true),
                    "{layout:?} {mode:?}"
                );
                alone
            });
            assert_eq!((&sbnd, &tnd), (&bsnd, &bsnd), "{mode:?}");
        }
    });
}

#[test]
fn angles_of_each_batch_need_more_tokens_than_batches_in_the_gradient() {
    with_stream(ascend_sim::Machine::default(), |stream| {
        let gradient = |dims: &[u64], angle_dims: &[u64], layout| {
            let count = |dims: &[u64]| dims.iter().product::<u64>() as usize;
            let dy = stream.zeros::<f32>(count(dims)).unwrap();
            let angles = stream.zeros::<f32>(count(angle_dims)).unwrap();
            let mut dx = stream.zeros::<f32>(count(dims)).unwrap();
            let angles = Tensor::new(&angles, angle_dims).unwrap();
            rotary_position_embedding_grad(
                &Tensor::new(&dy, dims).unwrap(),
                &angles,
                &angles,
                Mode::Half,
                layout,
                &mut GradOutputs {
                    dx: Output::new(&mut dx, dims).unwrap(),
                    angles: None,
                },
            )
        };
        use OperatorLayout::{Bnsd, Sbnd};
        gradient(&[2, 4, 3, 64], &[2, 1, 3, 64], Bnsd).unwrap();
        gradient(&[3, 3, 2, 64], &[3, 3, 1, 64], Sbnd).unwrap();
        let error = gradient(&[3, 4, 3, 64], &[3, 1, 3, 64], Bnsd).unwrap_err();
        assert!(
            matches!(error, AscendError::OperatorLimit { .. })
                && error.to_string().contains("B below S"),
            "{error}"
        );
    });
}

#[test]
fn limits_of_rotary_position_embedding() {
    with_stream(ascend_sim::Machine::default(), |stream| {
        let attempt = |x: &[u64], angles: &[u64], mode, layout| -> Result<()> {
            let count = |dims: &[u64]| dims.iter().product::<u64>() as usize;
            let xd = stream.zeros::<bf16>(count(x)).unwrap();
            let ad = stream.zeros::<bf16>(count(angles)).unwrap();
            let mut out = stream.zeros::<bf16>(count(x)).unwrap();
            let angles = Tensor::new(&ad, angles).unwrap();
            rotary_position_embedding(
                &Tensor::new(&xd, x).unwrap(),
                &angles,
                &angles,
                mode,
                layout,
                &mut Output::new(&mut out, x).unwrap(),
            )
        };
        use OperatorLayout::{Bnsd, Bsnd, Tnd};
        let cases = [
            (
                "3 dimensions in this layout",
                attempt(&[1, 2, 1, 64], &[1, 2, 1, 64], Mode::Half, Tnd),
            ),
            (
                "4 dimensions in this layout",
                attempt(&[2, 1, 64], &[2, 1, 64], Mode::Half, Bsnd),
            ),
            (
                "D below 896",
                attempt(&[1, 2, 1, 896], &[1, 2, 1, 896], Mode::Half, Bsnd),
            ),
            (
                "full width",
                attempt(&[1, 2, 1, 64], &[1, 2, 1, 32], Mode::Half, Bsnd),
            ),
            (
                "Ascend 950 only",
                attempt(&[1, 2, 1, 64], &[1, 2, 1, 64], Mode::Quarter, Bsnd),
            ),
            (
                "shared over batch",
                attempt(&[2, 2, 1, 64], &[2, 2, 1, 64], Mode::Interleave, Bsnd),
            ),
            (
                "B*N of at most 8*S",
                attempt(&[2, 8, 1, 64], &[1, 1, 1, 64], Mode::Half, Bnsd),
            ),
            (
                "2*B*N of at most S/cores",
                attempt(&[1, 2, 8, 72], &[1, 1, 8, 72], Mode::Half, Bnsd),
            ),
        ];
        for (expected, outcome) in cases {
            let error = outcome.unwrap_err();
            assert!(
                matches!(error, AscendError::OperatorLimit { .. })
                    && error.to_string().contains(expected),
                "{error}"
            );
        }
        assert!(
            control::calls()
                .iter()
                .all(|call| !call.function.starts_with("aclnn"))
        );
    });
}

#[test]
fn operators_in_place_and_deinterleaving() {
    with_stream(ascend_sim::Machine::default(), |stream| {
        let (seq, dim) = (3_usize, 64_usize);
        let mut numbers = Numbers(3);
        let x: Vec<f32> = values(&mut numbers, seq * dim);
        let (cos, sin): (Vec<f32>, Vec<f32>) = (
            values(&mut numbers, seq * dim),
            values(&mut numbers, seq * dim),
        );
        let mut q = stream.upload(&x).unwrap();
        let mut k = stream.upload(&x).unwrap();
        let (cd, sd) = (stream.upload(&cos).unwrap(), stream.upload(&sin).unwrap());
        let dims = [seq as u64, 1, dim as u64];
        let (c, s) = (
            Tensor::new(&cd, &dims).unwrap(),
            Tensor::new(&sd, &dims).unwrap(),
        );
        apply_rotary_pos_emb(
            &mut Output::new(&mut q, &dims).unwrap(),
            &mut Output::new(&mut k, &dims).unwrap(),
            &c,
            &s,
            OperatorLayout::Tnd,
        )
        .unwrap();
        let y = stream.download(&q).unwrap();
        let truth = f64::from(x[0]) * f64::from(cos[0]) - f64::from(x[32]) * f64::from(sin[0]);
        assert!((f64::from(y[0]) - truth).abs() < 1e-6);
        let bnsd = [1, 1, seq as u64, dim as u64];
        let xd = stream.upload(&x).unwrap();
        let mut out = stream.zeros::<f32>(seq * dim).unwrap();
        let (c, s) = (
            Tensor::new(&cd, &bnsd).unwrap(),
            Tensor::new(&sd, &bnsd).unwrap(),
        );
        interleave_rope(
            &Tensor::new(&xd, &bnsd).unwrap(),
            &c,
            &s,
            &mut Output::new(&mut out, &bnsd).unwrap(),
        )
        .unwrap();
        let y = stream.download(&out).unwrap();
        let truth = f64::from(x[0]) * f64::from(cos[0]) - f64::from(x[1]) * f64::from(sin[0]);
        assert!((f64::from(y[0]) - truth).abs() < 1e-6);
    });
}

/// One rotation in each layout: V2 takes all of them on Ascend 950, and everything else takes BSND, and TND as such.
#[test]
fn layouts_of_the_operator_in_place() {
    use OperatorLayout::{Bnsd, Bsnd, Sbnd, Tnd};
    use ascend_sim::Machine;
    let old = |name: &CStr| {
        if name.to_bytes().starts_with(b"aclnnApplyRotaryPosEmbV2") {
            std::ptr::null()
        } else {
            ascend_sim::symbol(name)
        }
    };
    // SAFETY: as for `api`, less two functions.
    let without_v2 = || unsafe { Api::from_resolver("ascend-sim", old) }.unwrap();
    let everywhere = [
        (Bsnd, vec![1, 3, 1, 64]),
        (Tnd, vec![3, 1, 64]),
        (Bnsd, vec![1, 1, 3, 64]),
        (Sbnd, vec![3, 1, 1, 64]),
    ];
    for (machine, api, taken) in [
        (Machine::ascend_950(), api(), 4),
        (Machine::ascend_950(), without_v2(), 2),
        (Machine::default(), api(), 2),
        (Machine::default(), without_v2(), 2),
    ] {
        with_stream_of(api, machine, |stream| {
            let angles = stream.upload(&[0.5_f32; 192]).unwrap();
            for (place, (layout, dims)) in everywhere.iter().enumerate() {
                let mut q = stream.upload(&[1.0_f32; 192]).unwrap();
                let mut k = stream.upload(&[2.0_f32; 192]).unwrap();
                let angles = Tensor::new(&angles, dims).unwrap();
                let outcome = apply_rotary_pos_emb(
                    &mut Output::new(&mut q, dims).unwrap(),
                    &mut Output::new(&mut k, dims).unwrap(),
                    &angles,
                    &angles,
                    *layout,
                );
                if place < taken {
                    outcome.unwrap();
                    let (q, k) = (stream.download(&q).unwrap(), stream.download(&k).unwrap());
                    assert_eq!((q[0], q[32], k[0], k[32]), (0.0, 1.0, 0.0, 2.0));
                } else {
                    let error = outcome.unwrap_err();
                    assert!(
                        matches!(error, AscendError::OperatorLimit { .. })
                            && error.to_string().contains("BSND or TND"),
                        "{error}"
                    );
                }
            }
        });
    }
}

#[test]
fn a_plan_whose_workspace_does_not_fit_is_given_up() {
    with_stream(ascend_sim::Machine::default(), |stream| {
        let dims = [1, 4, 2, 64];
        let x = stream.zeros::<f32>(4 * 2 * 64).unwrap();
        let angles = stream.zeros::<f32>(4 * 64).unwrap();
        let mut out = stream.zeros::<f32>(x.len()).unwrap();
        control::set_memory_limit(Some(control::live().bytes));
        let angles = Tensor::new(&angles, &[1, 4, 1, 64]).unwrap();
        let found = rotary_position_embedding(
            &Tensor::new(&x, &dims).unwrap(),
            &angles,
            &angles,
            Mode::Half,
            OperatorLayout::Bsnd,
            &mut Output::new(&mut out, &dims).unwrap(),
        );
        assert!(
            matches!(found, Err(AscendError::OutOfMemory { .. })),
            "{found:?}"
        );
        assert_eq!(control::live().descriptors, 0);
        control::set_memory_limit(None);
    });
}

/// What was done to executors between the phases, and to repeatable ones.
fn executor_calls() -> Vec<String> {
    let calls = control::calls();
    let names = calls
        .iter()
        .filter_map(|call| call.function.strip_prefix("acl"));
    names
        .filter(|name| name.contains("Executor") || name.contains("TensorAddr"))
        .map(str::to_owned)
        .collect()
}

/// The operator library would answer the second call from a cache that the first one entered, with what cannot be repeated.
#[test]
fn a_call_is_repeatable_from_its_first_planning_on() {
    with_stream(ascend_sim::Machine::default(), |stream| {
        let operators = Operators::new(stream.clone());
        let buffer = || stream.zeros::<u8>(16).unwrap();
        let (x, y, out) = (buffer(), buffer(), buffer());
        let view = |buffer| View {
            buffer,
            dtype: aclDataType::FLOAT,
            dims: &[4],
            strides: &[1],
            offset: 0,
        };
        let (x, y, out) = (view(&x), view(&y), view(&out));
        let steps = [
            (
                0,
                &["SetAclOpExecutorRepeatable", "DestroyAclOpExecutor"][..],
            ),
            (1, &["SetAclOpExecutorRepeatable"]),
            (
                1,
                &[
                    "SetInputTensorAddr",
                    "SetInputTensorAddr",
                    "SetOutputTensorAddr",
                ],
            ),
        ];
        for (kept, expected) in steps {
            control::clear_calls();
            operators.mul(x, y, out).unwrap();
            assert_eq!(
                (operators.kept_plans(), executor_calls()),
                (
                    kept,
                    expected.iter().map(|name| (*name).to_owned()).collect()
                )
            );
        }
        // What no call comes back to in this form stays in that cache.
        control::clear_calls();
        operators
            .mul(
                View {
                    dims: &[2],
                    offset: 1,
                    ..x
                },
                View { dims: &[2], ..y },
                View { dims: &[2], ..out },
            )
            .unwrap();
        assert!(executor_calls().is_empty());
    });
}
