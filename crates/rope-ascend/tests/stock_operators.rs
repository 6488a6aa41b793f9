//! The wrappers of the stock operators, on the simulator's.
#![allow(clippy::unwrap_used, missing_docs, reason = "test code")]
#![allow(
    unsafe_code,
    reason = "the simulator's symbols are handed to the loader"
)]

mod support;

use ascend_sim::{Session, control};
use half::{bf16, f16};
use rope_ascend::aclnn::{
    AngleGradients, Dense, MropeAngles, MropeCall, Number as Scalar, Operators, View,
};
use rope_ascend::safe::{DeviceBuffer, Runtime, Stream};
use rope_ascend::sys::aclDataType;
use rope_ascend::{AscendError, Result};
use rope_core::{AxisLayout, CosSinTable, Direction, Layout, Pairing, Positions, RotarySpec};
use support::{Number, Numbers, api, tolerance};

/// The operator library's name of a type.
trait Acl: Number {
    const ACL: aclDataType;
}
impl Acl for f32 {
    const ACL: aclDataType = aclDataType::FLOAT;
}
impl Acl for f16 {
    const ACL: aclDataType = aclDataType::FLOAT16;
}
impl Acl for bf16 {
    const ACL: aclDataType = aclDataType::BF16;
}

/// A dense tensor of `dims`, all zeros.
struct Zeros<T: Acl>(DeviceBuffer<T>, Dense);

impl<T: Acl> Zeros<T> {
    fn new(stream: &Stream, dims: &[usize]) -> Self {
        let len = dims.iter().product();
        Self(stream.zeros(len).unwrap(), Dense::new(dims))
    }

    fn view(&self) -> View<'_> {
        self.1.view(&self.0, T::ACL)
    }
}

/// A dense tensor of `dims` with these values.
fn tensor<T: Acl>(stream: &Stream, values: &[T], dims: &[usize]) -> Zeros<T> {
    Zeros(stream.upload(values).unwrap(), Dense::new(dims))
}

fn with_stream(machine: ascend_sim::Machine, test: impl FnOnce(&Stream)) {
    let _session = Session::with_machine(machine);
    let runtime = Runtime::start(api()).unwrap();
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

fn mrope<T: Acl>(axes: AxisLayout, pairing: Pairing) {
    with_stream(ascend_sim::Machine::default(), |stream| {
        let (tokens, head_dim, heads, rows) = (5_usize, 128_usize, [3_usize, 2], 20_u64);
        let sections = axes.sections().to_vec();
        let pairs: usize = sections.iter().sum();
        let spec = RotarySpec::builder(head_dim)
            .rotary_dim(2 * pairs)
            .pairing(pairing);
        let spec = spec.axis_layout(axes.clone()).build().unwrap();
        let mut table = CosSinTable::<f32>::new(&spec, None).unwrap();
        let mut numbers = Numbers(11);
        let ids: Vec<i64> = (0..sections.len() * tokens)
            .map(|_| numbers.below(rows) as i64)
            .collect();
        let positions = Positions::new(sections.len(), &ids).unwrap();
        let x: [Vec<T>; 2] = heads.map(|heads| values(&mut numbers, tokens * heads * head_dim));
        let device = [stream.upload(&x[0]).unwrap(), stream.upload(&x[1]).unwrap()];
        for direction in [Direction::Forward, Direction::Adjoint] {
            let angles =
                MropeAngles::new(stream, T::ACL, &mut table, &positions, tokens, direction);
            let out = [
                stream.zeros::<T>(x[0].len()).unwrap(),
                stream.zeros::<T>(x[1].len()).unwrap(),
            ];
            Operators::new(stream.clone())
                .mrope(&MropeCall {
                    angles: &angles.unwrap(),
                    axes: &axes,
                    pairing,
                    head_dim,
                    q: &device[0],
                    k: &device[1],
                    q_out: &out[0],
                    k_out: &out[1],
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
                        let axis = match &axes {
                            AxisLayout::Striped(sections) => {
                                let axis = lane % sections.len();
                                if lane < sections[axis] * sections.len() {
                                    axis
                                } else {
                                    0
                                }
                            }
                            _ => {
                                let mut end = 0;
                                let mut ends = sections.iter().map(|section| {
                                    end += section;
                                    end
                                });
                                ends.position(|end| lane < end).unwrap()
                            }
                        };
                        let angles = table.row(ids[axis * tokens + token] as usize).unwrap();
                        // As the table is rounded to the data's type.
                        let [c, s] = [angles[lane], angles[pairs + lane]]
                            .map(|value| T::of(f64::from(value)).wide());
                        let channels = if pairing == Pairing::Half {
                            [lane, lane + pairs]
                        } else {
                            [2 * lane, 2 * lane + 1]
                        };
                        let [a, b] = channels.map(|channel| row * head_dim + channel);
                        let (x1, x2) = (x[i][a].wide(), x[i][b].wide());
                        let (y1, y2) = match direction {
                            Direction::Forward => (c * x1 - s * x2, s * x1 + c * x2),
                            Direction::Adjoint => (c * x1 + s * x2, c * x2 - s * x1),
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

/// Each is an error of a limit of the operator, found without a call of the operator.
fn expect_limits<const N: usize>(errors: [(&str, AscendError); N]) {
    for (expected, error) in errors {
        let is_limit = matches!(error, AscendError::OperatorLimit { .. });
        assert!(is_limit && error.to_string().contains(expected), "{error}");
    }
    let calls = control::calls();
    let mut functions = calls.iter().map(|call| &call.function);
    assert!(functions.all(|function| !function.starts_with("aclnn")));
}

#[test]
fn npu_mrope_and_its_gradient() {
    mrope::<f32>(AxisLayout::Contiguous(vec![16, 24, 24]), Pairing::Half);
    mrope::<bf16>(AxisLayout::Striped(vec![24, 20, 20]), Pairing::Half);
    mrope::<f16>(AxisLayout::Contiguous(vec![8, 12, 12]), Pairing::Adjacent);
    mrope::<f32>(AxisLayout::Contiguous(vec![16, 16, 16, 16]), Pairing::Half);
}

#[test]
fn limits_of_npu_mrope_are_refused_before_the_call() {
    use AxisLayout::{Contiguous, Striped};
    with_stream(ascend_sim::Machine::default(), |stream| {
        let angles = |pairs: usize, axes: usize, position: i64| {
            let spec = RotarySpec::builder(2 * pairs).build().unwrap();
            let mut table = CosSinTable::<f32>::new(&spec, None).unwrap();
            let positions = Positions::new(axes, &vec![position; 2 * axes]).unwrap();
            let direction = Direction::Forward;
            MropeAngles::new(
                stream,
                aclDataType::BF16,
                &mut table,
                &positions,
                2,
                direction,
            )
        };
        let attempt = |pairs: usize,
                       (position_axes, axes): (usize, AxisLayout),
                       pairing,
                       head_dim: usize,
                       heads: usize|
         -> AscendError {
            let x = stream.zeros::<bf16>(2 * heads * head_dim).unwrap();
            let out = stream.zeros::<bf16>(x.len()).unwrap();
            let refused = Operators::new(stream.clone()).mrope(&MropeCall {
                angles: &angles(pairs, position_axes, 0).unwrap(),
                axes: &axes,
                pairing,
                head_dim,
                q: &x,
                k: &x,
                q_out: &out,
                k_out: &out,
            });
            refused.unwrap_err()
        };
        let half = Pairing::Half;
        let qwen = || Contiguous(vec![16, 24, 24]);
        let attempts = [
            (
                "[24, 20, 20]",
                attempt(32, (3, Striped(vec![11, 11, 10])), half, 256, 2),
            ),
            (
                "multiples of 32",
                attempt(40, (3, Contiguous(vec![16, 12, 12])), half, 80, 2),
            ),
            (
                "fewer than 43 heads",
                attempt(64, (3, qwen()), half, 128, 43),
            ),
            ("in sum", attempt(32, (3, qwen()), half, 128, 2)),
            (
                "one section for each axis",
                attempt(64, (1, qwen()), half, 128, 2),
            ),
            (
                "three of them",
                attempt(64, (4, Striped(vec![16, 16, 16, 16])), half, 128, 2),
            ),
            (
                "contiguous or striped",
                attempt(64, (3, AxisLayout::Ernie(vec![24, 24, 16])), half, 128, 2),
            ),
            (
                "halves or adjacent",
                attempt(64, (3, qwen()), Pairing::Quarter, 128, 2),
            ),
            (
                "on several axes",
                attempt(64, (3, AxisLayout::Single), half, 128, 2),
            ),
            ("whole heads", attempt(64, (3, qwen()), half, 128, 0)),
            ("1, 3 or 4 axes", angles(64, 2, 0).unwrap_err()),
            ("positions below", angles(64, 3, 1 << 16).unwrap_err()),
        ];
        expect_limits(attempts);
    });
}

/// Rotation of BSND by full-width angles of one batch and one head.
#[test]
fn rotary_mul_and_its_gradient() {
    for (machine, pairing) in [
        (ascend_sim::Machine::default(), Pairing::Half),
        (ascend_sim::Machine::default(), Pairing::Adjacent),
        (ascend_sim::Machine::ascend_950(), Pairing::Quarter),
        (ascend_sim::Machine::ascend_950(), Pairing::InterleaveHalf),
    ] {
        with_stream(machine, |stream| {
            let operators = Operators::new(stream.clone());
            let (batch, seq, heads, dim) = (2_usize, 3_usize, 2_usize, 64_usize);
            let mut numbers = Numbers(5);
            let dims = [batch, seq, heads, dim];
            let angle_dims = [1, seq, 1, dim];
            let len = batch * seq * heads * dim;
            let (x, g): (Vec<f32>, Vec<f32>) =
                (values(&mut numbers, len), values(&mut numbers, len));
            let (cos, sin): (Vec<f32>, Vec<f32>) = (
                values(&mut numbers, seq * dim),
                values(&mut numbers, seq * dim),
            );
            let [xd, gd] = [&x, &g].map(|values| tensor(stream, values, &dims));
            let [cd, sd] = [&cos, &sin].map(|values| tensor(stream, values, &angle_dims));
            let [yd, dxd] = [0, 1].map(|_| Zeros::<f32>::new(stream, &dims));
            let [dcd, dsd] = [0, 1].map(|_| Zeros::<f32>::new(stream, &angle_dims));
            let (angles, layout) = ([cd.view(), sd.view()], Layout::Bsnd);
            operators
                .rotary_mul(xd.view(), angles, pairing, layout, yd.view())
                .unwrap();
            let wanted = AngleGradients {
                x: xd.view(),
                cos: dcd.view(),
                sin: dsd.view(),
            };
            let (dy, dx) = (gd.view(), dxd.view());
            operators
                .rotary_mul_gradient(dy, angles, pairing, layout, dx, Some(wanted))
                .unwrap();
            let [y, dx, dcos, dsin] =
                [&yd, &dxd, &dcd, &dsd].map(|out| stream.download(&out.0).unwrap());
            // <R x, g> = <x, R' g>, and the derivative along the angles.
            let dot = |a: &[f32], b: &[f32]| {
                a.iter()
                    .zip(b)
                    .map(|(a, b)| f64::from(*a) * f64::from(*b))
                    .sum::<f64>()
            };
            assert!((dot(&y, &g) - dot(&x, &dx)).abs() < 1e-4, "{pairing:?}");
            // y is linear in (cos, sin), so <y, g> = <cos, dcos> + <sin, dsin>.
            assert!(
                (dot(&y, &g) - dot(&cos, &dcos) - dot(&sin, &dsin)).abs() < 1e-4,
                "{pairing:?}"
            );
            let first = f64::from(x[0]) * f64::from(cos[0]);
            let partner = match pairing {
                Pairing::Half => 32,
                Pairing::Adjacent | Pairing::InterleaveHalf => 1,
                Pairing::Quarter => 16,
            };
            let truth = first - f64::from(x[partner]) * f64::from(sin[0]);
            assert!(
                (f64::from(y[0]) - truth).abs() < 1e-6,
                "{pairing:?}: {} instead of {truth}",
                y[0]
            );
        });
    }
}

/// The gradient alone is the same as with gradients of the angles, in every layout, and TND is BSND
/// with a batch of one.
#[test]
fn the_gradient_without_gradients_of_the_angles() {
    use Layout::{Bnsd, Bsnd, Sbnd, Tnd};
    with_stream(ascend_sim::Machine::default(), |stream| {
        let operators = Operators::new(stream.clone());
        let (seq, heads, dim) = (3, 2, 64);
        let len = seq * heads * dim;
        let mut numbers = Numbers(17);
        let (g, x): (Vec<f32>, Vec<f32>) = (values(&mut numbers, len), values(&mut numbers, len));
        let (cos, sin): (Vec<f32>, Vec<f32>) = (
            values(&mut numbers, seq * dim),
            values(&mut numbers, seq * dim),
        );
        let gradient = |dims: &[usize], angle_dims: &[usize], layout, pairing, wanted: bool| {
            let [g, x] = [&g, &x].map(|values| tensor(stream, values, dims));
            let [cos, sin] = [&cos, &sin].map(|values| tensor(stream, values, angle_dims));
            let [dcos, dsin] = [0, 1].map(|_| Zeros::<f32>::new(stream, angle_dims));
            let out = Zeros::<f32>::new(stream, dims);
            let wanted = wanted.then(|| AngleGradients {
                x: x.view(),
                cos: dcos.view(),
                sin: dsin.view(),
            });
            let angles = [cos.view(), sin.view()];
            operators
                .rotary_mul_gradient(g.view(), angles, pairing, layout, out.view(), wanted)
                .unwrap();
            stream.download(&out.0).unwrap()
        };
        for pairing in [Pairing::Half, Pairing::Adjacent] {
            let layouts = [
                (Bsnd, vec![1, seq, heads, dim], vec![1, seq, 1, dim]),
                (Bnsd, vec![1, heads, seq, dim], vec![1, 1, seq, dim]),
                (Sbnd, vec![seq, 1, heads, dim], vec![seq, 1, 1, dim]),
                (Tnd, vec![seq, heads, dim], vec![seq, 1, dim]),
            ];
            let [bsnd, _, sbnd, tnd] = layouts.map(|(layout, dims, angle_dims)| {
                let alone = gradient(&dims, &angle_dims, layout, pairing, false);
                assert_eq!(
                    alone,
                    gradient(&dims, &angle_dims, layout, pairing, true),
                    "{layout:?} {pairing:?}"
                );
                alone
            });
            assert_eq!((&sbnd, &tnd), (&bsnd, &bsnd), "{pairing:?}");
        }
    });
}

type Dims = Vec<usize>;

/// Calls the gradient of q and k with random tensors, and returns those given, the angles and the
/// results.
#[expect(clippy::type_complexity, reason = "three pairs of tensors")]
fn both_gradients(
    stream: &Stream,
    dims: &[Dims; 2],
    angle_dims: &[usize],
    layout: Layout,
) -> Result<([Zeros<f32>; 2], [Zeros<f32>; 2], [Zeros<f32>; 2])> {
    let mut numbers = Numbers(23);
    let mut random = |dims: &[usize]| {
        let values: Vec<f32> = values(&mut numbers, dims.iter().product());
        tensor(stream, &values, dims)
    };
    let given = dims.each_ref().map(|dims| random(dims));
    let angles = [random(angle_dims), random(angle_dims)];
    let out = dims.each_ref().map(|dims| Zeros::new(stream, dims));
    let [dy, angle, dx] = [&given, &angles, &out].map(|pair| pair.each_ref().map(Zeros::view));
    Operators::new(stream.clone()).rotary_mul_gradients(dy, angle, layout, dx)?;
    Ok((given, angles, out))
}

/// On Ascend 950 alone, as for q and for k alone.
#[test]
fn gradients_of_q_and_k_in_one_call() {
    use Layout::{Bsnd, Sbnd, Tnd};
    with_stream(ascend_sim::Machine::default(), |stream| {
        let operators = Operators::new(stream.clone());
        assert!(!operators.has_rotary_mul_gradients().unwrap());
    });
    with_stream(ascend_sim::Machine::ascend_950(), |stream| {
        let operators = Operators::new(stream.clone());
        assert!(operators.has_rotary_mul_gradients().unwrap());
        for (dims, angle_dims, layout) in [
            (
                [vec![2, 3, 2, 64], vec![2, 3, 1, 64]],
                vec![1, 3, 1, 64],
                Bsnd,
            ),
            (
                [vec![2, 3, 2, 64], vec![2, 3, 1, 64]],
                vec![2, 3, 1, 64],
                Bsnd,
            ),
            (
                [vec![3, 2, 2, 64], vec![3, 2, 1, 64]],
                vec![3, 1, 1, 64],
                Sbnd,
            ),
            ([vec![3, 2, 64], vec![3, 1, 64]], vec![3, 1, 64], Tnd),
        ] {
            let (given, angles, out) = both_gradients(stream, &dims, &angle_dims, layout).unwrap();
            let angles = angles.each_ref().map(Zeros::view);
            for ((given, out), dims) in given.iter().zip(&out).zip(&dims) {
                let alone = Zeros::<f32>::new(stream, dims);
                let (dy, dx, half) = (given.view(), alone.view(), Pairing::Half);
                let alone_done = operators.rotary_mul_gradient(dy, angles, half, layout, dx, None);
                alone_done.unwrap();
                let [found, expected] = [out, &alone].map(|out| stream.download(&out.0).unwrap());
                assert_eq!(found, expected, "{layout:?}");
            }
        }
    });
}

#[test]
fn limits_of_gradients_of_q_and_k_in_one_call() {
    use Layout::{Bnsd, Bsnd};
    with_stream(ascend_sim::Machine::ascend_950(), |stream| {
        let attempt = |q: &[usize], k: &[usize], angles: &[usize], layout| {
            let found = both_gradients(stream, &[q.to_vec(), k.to_vec()], angles, layout);
            found.err().expect("is refused")
        };
        let like = [1, 3, 2, 64];
        expect_limits([
            (
                "BSND, SBND or TND",
                attempt(&like, &like, &[1, 1, 2, 64], Bnsd),
            ),
            ("of one head", attempt(&like, &like, &[1, 3, 2, 64], Bsnd)),
            (
                "equal batches",
                attempt(&like, &[2, 3, 2, 64], &[1, 3, 1, 64], Bsnd),
            ),
            (
                "at most 1024",
                attempt(&[1, 3, 2, 1026], &like, &[1, 3, 1, 64], Bsnd),
            ),
        ]);
    });
}

#[test]
fn angles_of_each_batch_need_more_tokens_than_batches_in_the_gradient() {
    with_stream(ascend_sim::Machine::default(), |stream| {
        let gradient = |dims: &[usize], angle_dims: &[usize], layout| {
            let dy = Zeros::<f32>::new(stream, dims);
            let angles = Zeros::<f32>::new(stream, angle_dims);
            let dx = Zeros::<f32>::new(stream, dims);
            let (angles, half) = ([angles.view(); 2], Pairing::Half);
            let operators = Operators::new(stream.clone());
            operators.rotary_mul_gradient(dy.view(), angles, half, layout, dx.view(), None)
        };
        use Layout::{Bnsd, Sbnd};
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
fn limits_of_rotary_mul() {
    with_stream(ascend_sim::Machine::default(), |stream| {
        let attempt = |x: &[usize], angles: &[usize], pairing, layout| -> Result<()> {
            let out = Zeros::<bf16>::new(stream, x);
            let x = Zeros::<bf16>::new(stream, x);
            let angles = Zeros::<bf16>::new(stream, angles);
            let operators = Operators::new(stream.clone());
            let angles = [angles.view(); 2];
            operators.rotary_mul(x.view(), angles, pairing, layout, out.view())
        };
        use Layout::{Bnsd, Bsnd, Tnd};
        use Pairing::{Adjacent, Half, Quarter};
        let cases = [
            (
                "3 dimensions in this layout",
                attempt(&[1, 2, 1, 64], &[1, 2, 1, 64], Half, Tnd),
            ),
            (
                "4 dimensions in this layout",
                attempt(&[2, 1, 64], &[2, 1, 64], Half, Bsnd),
            ),
            (
                "D below 896",
                attempt(&[1, 2, 1, 896], &[1, 2, 1, 896], Half, Bsnd),
            ),
            (
                "full width",
                attempt(&[1, 2, 1, 64], &[1, 2, 1, 32], Half, Bsnd),
            ),
            (
                "Ascend 950 only",
                attempt(&[1, 2, 1, 64], &[1, 2, 1, 64], Quarter, Bsnd),
            ),
            (
                "shared over batch",
                attempt(&[2, 2, 1, 64], &[2, 2, 1, 64], Adjacent, Bsnd),
            ),
            (
                "B*N of at most 8*S",
                attempt(&[2, 8, 1, 64], &[1, 1, 1, 64], Half, Bnsd),
            ),
            (
                "2*B*N of at most S/cores",
                attempt(&[1, 2, 8, 72], &[1, 1, 8, 72], Half, Bnsd),
            ),
        ];
        expect_limits(cases.map(|(expected, outcome)| (expected, outcome.unwrap_err())));
    });
}

#[test]
fn a_plan_whose_workspace_does_not_fit_is_given_up() {
    with_stream(ascend_sim::Machine::default(), |stream| {
        let dims = [1, 4, 2, 64];
        let [x, out] = [0, 1].map(|_| Zeros::<f32>::new(stream, &dims));
        let angles = Zeros::<f32>::new(stream, &[1, 4, 1, 64]);
        control::set_memory_limit(Some(control::live().bytes));
        let (angles, half, bsnd) = ([angles.view(); 2], Pairing::Half, Layout::Bsnd);
        let operators = Operators::new(stream.clone());
        let found = operators.rotary_mul(x.view(), angles, half, bsnd, out.view());
        assert!(
            matches!(found, Err(AscendError::OutOfMemory { .. })),
            "{found:?}"
        );
        assert_eq!(control::live().descriptors, 0);
        control::set_memory_limit(None);
    });
}

/// The calls on executors between the phases, and on repeatable ones.
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

/// The operator library would answer the second call from a cache that the first one entered, with
/// what cannot be repeated.
#[test]
fn a_call_is_repeatable_from_its_first_planning_on() {
    with_stream(ascend_sim::Machine::default(), |stream| {
        let operators = Operators::new(stream.clone());
        let [x, y, out] = [0, 1, 2].map(|_| Zeros::<f32>::new(stream, &[4]));
        let (x, y, out) = (x.view(), y.view(), out.view());
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
    });
}

#[test]
fn calls_that_differ_in_one_thing_are_kept_apart() {
    type Call<'a> = &'a dyn Fn(&Operators) -> Result<()>;
    fn view<'a>(buffer: &'a DeviceBuffer<f32>, strides: &'a [usize; 2], offset: usize) -> View<'a> {
        View {
            buffer,
            dtype: aclDataType::FLOAT,
            dims: &[2, 2],
            strides,
            offset,
        }
    }
    with_stream(ascend_sim::Machine::default(), |stream| {
        let [x, y, out] = [(); 3].map(|()| stream.zeros::<f32>(8).unwrap());
        let (shifted, turned) = (view(&x, &[2, 1], 1), view(&x, &[1, 2], 0));
        let [x, y, out] = [&x, &y, &out].map(|buffer| view(buffer, &[2, 1], 0));
        let [none, one] = [None, Some(Scalar::Float(1.0))];
        let (plain, number): (Call<'_>, Call<'_>) = (&|ops| ops.mul(x, y, out), &|ops| {
            ops.adds(x, Scalar::Float(0.0), Scalar::Float(1.0), out)
        });
        let pairs: [(&str, [Call<'_>; 2]); 7] = [
            ("an offset", [plain, &|ops| ops.mul(shifted, y, out)]),
            ("strides", [plain, &|ops| ops.mul(turned, y, out)]),
            ("an input twice", [plain, &|ops| ops.mul(x, x, out)]),
            ("a result over an input", [plain, &|ops| ops.mul(x, y, x)]),
            (
                "the sign of 0",
                [number, &|ops| {
                    ops.adds(x, Scalar::Float(-0.0), Scalar::Float(1.0), out)
                }],
            ),
            (
                "ints",
                [&|ops| ops.flip(x, &[0], out), &|ops| ops.flip(x, &[1], out)],
            ),
            (
                "what is absent",
                [&|ops| ops.clamp(x, one, none, out), &|ops| {
                    ops.clamp(x, none, one, out)
                }],
            ),
        ];
        for (what, calls) in pairs {
            let operators = Operators::new(stream.clone());
            // A plan is kept from the second call on.
            for call in [calls[0], calls[0], calls[1], calls[1]] {
                call(&operators).unwrap();
            }
            assert_eq!(operators.kept_plans(), 2, "{what}");
        }
    });
}

/// Views with an offset, lists, and tensors that are read and written: planned with one memory, run
/// with another.
#[test]
fn kept_calls_follow_offsets_lists_and_written_inputs() {
    with_stream(ascend_sim::Machine::default(), |stream| {
        let operators = Operators::new(stream.clone());
        let mut used = Vec::new();
        for round in 0..4 {
            let upload = |values: [f32; 4]| stream.upload(&values.map(|x| x + 10.0 * round as f32));
            let [x, y] = [[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]].map(|x| upload(x).unwrap());
            let [joined, target] = [8, 6].map(|len| stream.zeros::<f32>(len).unwrap());
            let view = |buffer, dims, offset| View {
                buffer,
                dtype: aclDataType::FLOAT,
                dims,
                strides: &[1],
                offset,
            };
            control::clear_calls();
            operators
                .cat(
                    &[view(&x, &[3], 1), view(&y, &[4], 0)],
                    0,
                    view(&joined, &[7], 1),
                )
                .unwrap();
            operators
                .copy(view(&target, &[3], 2), view(&joined, &[3], 3))
                .unwrap();
            let planned = control::calls();
            let planned = planned
                .iter()
                .filter(|call| call.function.ends_with("WorkspaceSize"));
            assert_eq!(
                planned.count(),
                if round < 2 { 2 } else { 0 },
                "round {round}"
            );
            let (a, b) = (10.0 * round as f32, 10.0 * round as f32 + 4.0);
            let expected = [
                0.0,
                a + 2.0,
                a + 3.0,
                a + 4.0,
                b + 1.0,
                b + 2.0,
                b + 3.0,
                b + 4.0,
            ];
            assert_eq!(stream.download(&joined).unwrap(), expected);
            let expected = [0.0, 0.0, a + 4.0, b + 1.0, b + 2.0, 0.0];
            assert_eq!(stream.download(&target).unwrap(), expected);
            // The next round has other memory.
            used.push([x, y, joined, target]);
        }
        assert_eq!(operators.kept_plans(), 2);
        assert_eq!(control::violations(), []);
    });
}

#[test]
fn views_stay_within_their_memory() {
    with_stream(ascend_sim::Machine::default(), |stream| {
        let operators = Operators::new(stream.clone());
        let [x, y] = [(); 2].map(|()| stream.zeros::<u8>(64).unwrap());
        for (dtype, offset, expected) in [
            // An element of a type that this crate does not list may be as wide as any.
            (aclDataType(17), 0, "elements within 4"),
            (aclDataType::UINT8, 1, "elements within 64"),
        ] {
            let view = |buffer| View {
                buffer,
                dtype,
                dims: &[64],
                strides: &[1],
                offset,
            };
            control::clear_calls();
            let error = operators.copy(view(&x), view(&y)).unwrap_err();
            assert!(error.to_string().contains(expected), "{error}");
            assert!(control::calls().is_empty());
        }
    });
}
