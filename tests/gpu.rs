//! rope-burn's kernels for CubeCL on the first GPU, or on Mesa's software driver.
//!
//! Element types that the driver lacks are printed as skipped; f32 never is.

mod device;
mod gpu_layers;
mod norm_cases;

use std::path::Path;

use burn::tensor::{DType as BurnDType, Device, Distribution, Tensor};
use device::device;
use norm_cases::{fused_agrees_with_ordinary_operations, results_are_those_of_transformers};
use rope_burn::rope_core::{Layout, Pairing, Positions, RopeError, RotarySpec};
use rope_burn::{Implementation, Rotary, RotaryAngles, RotaryError};
use rope_check::buffer::{Buffer, DType};
use rope_check::cases::{NamedCase, exact, models, pairwise, scattered_positions, values};
use rope_check::engine::{Case, Engine, burn_engines};
use rope_check::golden::Artifact;
use rope_check::gradcheck::{Depth, check_on, quick_suite};
use rope_check::model::{GPU_SLACK, Models, is_model_folder};
use rope_check::tolerance::{Operation, allowed};
use rope_core::{AxisLayout, Direction, HeadNorm, Lane, NormOrder};
#[cfg(not(feature = "fusion"))]
use {
    burn::backend::Dispatch,
    rope_burn::{NormRotaryOp, NormRotaryOps, RotaryOp, RotaryOps},
};

/// The fused engine.
fn fused(device: &Device) -> Box<dyn Engine> {
    let engine = burn_engines(device).find(|engine| engine.name() == "burn/fused");
    engine.expect("one of burn's engines is the fused one")
}

/// The types that the device has, f32 among them.
fn dtypes(engine: &dyn Engine) -> Vec<DType> {
    let (has, lacks): (Vec<DType>, Vec<DType>) =
        DType::ALL.into_iter().partition(|d| engine.supports(*d));
    for dtype in lacks {
        println!("skipped: {} on this driver", dtype.name());
    }
    assert!(has.contains(&DType::F32), "every driver has f32");
    has
}

/// Forward and backward of the golden vectors; `chosen` takes types of the device for a file.
fn vectors_are_met(chosen: impl Fn(usize, &[DType]) -> Vec<DType>) {
    let engine = fused(&device());
    let (dtypes, mut files) = (dtypes(&*engine), 0);
    let folder = rope_check::fixtures().expect("the test runs in the workspace");
    for entry in folder.read_dir().expect("fixtures are there") {
        let path = entry.expect("entry reads").path();
        let Ok(Artifact::Vectors(vectors)) = Artifact::open(&path) else {
            continue;
        };
        for dtype in chosen(files, &dtypes) {
            let rows = vectors.compare(&*engine, dtype).expect("engine runs");
            assert_eq!(rows.len(), 4, "q, k and their gradients: {rows:?}");
            let failed: Vec<_> = rows.iter().filter(|row| !row.pass).collect();
            assert!(failed.is_empty(), "{}: {failed:?}", path.display());
        }
        files += 1;
    }
    assert!(files >= 10, "only {files} files of vectors");
}

/// Each file in one type, all types in turn: the driver compiles kernels for each type anew.
#[test]
fn every_vector_is_met_forward_and_backward() {
    vectors_are_met(|file, dtypes| vec![dtypes[file % dtypes.len()]]);
}

#[test]
#[ignore = "a minute on a software driver: `cargo xtask deep gpu` runs it"]
fn every_vector_is_met_in_every_type() {
    vectors_are_met(|_, dtypes| dtypes.to_vec());
}

/// Forward and adjoint of a case against the matrix oracle.
fn meets_the_oracle(engine: &dyn Engine, case: &Case, dtype: DType) {
    let x: Vec<Buffer> = [case.heads, case.kv_heads]
        .into_iter()
        .filter(|heads| *heads > 0)
        .map(|heads| {
            let values = values(heads as u64, case.contiguous(heads).elems());
            Buffer::from_f64(dtype, &values)
        })
        .collect();
    for direction in [Direction::Forward, Direction::Adjoint] {
        let what = || format!("{dtype:?} {direction:?} {case:?}");
        let (q, k) = engine
            .apply(case, direction, &x[0], x.get(1))
            .unwrap_or_else(|error| panic!("{error}: {}", what()));
        let found: Vec<Buffer> = std::iter::once(q).chain(k).collect();
        assert_eq!(found.len(), x.len(), "{}", what());
        for ((x, found), heads) in x.iter().zip(found).zip([case.heads, case.kv_heads]) {
            let expected = exact(case, direction, heads, &x.to_f64()).expect("valid positions");
            assert_eq!(found.len(), expected.len(), "{}", what());
            for (i, (found, exact)) in found.to_f64().iter().zip(&expected).enumerate() {
                let allowed = allowed(Operation::Rotation, dtype, *exact);
                assert!(
                    (found - exact).abs() <= allowed,
                    "element {i}: {found} instead of {exact}, {}",
                    what()
                );
            }
        }
    }
}

#[test]
fn every_pair_of_factors_meets_the_oracle() {
    let engine = fused(&device());
    let dtypes = dtypes(&*engine);
    for (i, NamedCase { case, .. }) in pairwise().expect("valid cases").iter().enumerate() {
        meets_the_oracle(&*engine, case, DType::F32);
        meets_the_oracle(&*engine, case, dtypes[i % dtypes.len()]);
    }
}

/// Lanes as data, one for each pair or one for each channel: axes and frequencies in no order.
fn lanes(count: usize, pairs: usize) -> AxisLayout {
    let lane = |i: usize| Lane {
        axis: (i % 3) as u8,
        frequency: ((5 * i + 1) % pairs) as u32,
    };
    AxisLayout::Lanes((0..count).map(lane).collect())
}

#[test]
fn models_whose_lanes_are_data_meet_the_oracle() {
    let engine = fused(&device());
    let dtypes = dtypes(&*engine);
    let models = models().expect("valid cases").into_iter();
    let mut per_channel = [false; 2];
    for NamedCase { case, .. } in models {
        if !matches!(case.spec.axis_layout(), AxisLayout::Lanes(_)) {
            continue;
        }
        per_channel[usize::from(case.spec.geometry().per_channel())] = true;
        for dtype in &dtypes {
            meets_the_oracle(&*engine, &case, *dtype);
        }
    }
    assert_eq!(per_channel, [true; 2], "with one angle for a pair, and two");
}

/// Every vector size, in the rotated part, in its offset and in the head.
fn widths_meet_the_oracle(chosen: impl Fn(usize, &[DType]) -> Vec<DType>) {
    let engine = fused(&device());
    let (dtypes, mut cases) = (dtypes(&*engine), 0);
    for pairing in Pairing::ALL {
        for (pairs, offset, rest) in [(1, 1, 0), (3, 0, 1), (4, 4, 4), (6, 2, 2), (16, 8, 0)] {
            if pairing == Pairing::Quarter && pairs % 2 == 1 {
                continue;
            }
            let mut layouts = vec![AxisLayout::Single];
            // Widths meet these in the types that have vectors of their own.
            if pairs % 4 == 0 {
                layouts.push(AxisLayout::PerChannel(vec![pairs / 2, pairs - pairs / 2]));
                layouts.extend([pairs, 2 * pairs].map(|count| lanes(count, pairs)));
            }
            for axes in layouts {
                let spec = RotarySpec::builder(offset + 2 * pairs + rest)
                    .rotary_dim(2 * pairs)
                    .rotary_offset(offset)
                    .pairing(pairing)
                    .axis_layout(axes)
                    .build()
                    .expect("a valid specification");
                let positions = scattered_positions(spec.axis_count(), 3).expect("valid positions");
                let layout = Layout::ALL[pairs % 4];
                let batch = if layout == Layout::Tnd { 1 } else { 2 };
                // Nine heads: two blocks that are loaded together and a rest.
                let case = Case {
                    heads: 9,
                    kv_heads: pairs % 3,
                    strided: pairs % 4 == 0,
                    in_place: pairs % 8 == 0,
                    ..Case::new(spec, positions, layout, batch, 3)
                };
                for dtype in chosen(cases, &dtypes) {
                    meets_the_oracle(&*engine, &case, dtype);
                }
                cases += 1;
            }
        }
    }
}

#[test]
fn heads_of_all_widths_meet_the_oracle() {
    widths_meet_the_oracle(|case, dtypes| vec![dtypes[case % dtypes.len()]]);
}

#[test]
#[ignore = "a minute on a software driver: `cargo xtask deep gpu` runs it"]
fn heads_of_all_widths_meet_the_oracle_in_every_type() {
    widths_meet_the_oracle(|_, dtypes| dtypes.to_vec());
}

/// From one unit for each head to one unit for all heads, and more units than one dimension of a
/// launch has.
#[test]
fn many_tokens_are_rotated_as_on_the_cpu() {
    let (device, cpu) = (device(), Device::flex());
    for (layout, batch, seq, heads, kv_heads, head_dim) in [
        (Layout::Bsnd, 2, 1, 3, 1, 128),
        (Layout::Bsnd, 1, 1500, 12, 2, 32),
        (Layout::Bnsd, 2, 700, 5, 3, 64),
        (Layout::Bsnd, 1, 70_000, 3, 1, 8),
        (Layout::Bnsd, 1, 70_000, 2, 2, 8),
        (Layout::Sbnd, 3, 20_001, 2, 1, 10),
    ] {
        let spec = RotarySpec::builder(head_dim).build().expect("valid");
        let rotary = Rotary::new(spec, layout);
        let positions = Positions::text(1, 0, seq).expect("in range");
        let dims = |heads| match layout {
            Layout::Bnsd => [batch, heads, seq, head_dim],
            Layout::Sbnd => [seq, batch, heads, head_dim],
            _ => [batch, seq, heads, head_dim],
        };
        let random = |heads| Tensor::<4>::random(dims(heads), Distribution::Default, &cpu);
        let (q, k) = (random(heads), random(kv_heads));
        let on = |device: &Device| {
            let angles = rotary.angles(&positions, device);
            let [q, k] = [&q, &k].map(|x| Tensor::<4>::from_data(x.to_data(), device));
            let (q, k) = rotary.forward(q, k, &angles);
            let (dq, dk) = rotary.adjoint(q.clone(), k.clone(), &angles);
            [q, k, dq, dk].map(|x| x.into_data().try_into_vec::<f32>().expect("f32"))
        };
        for (found, expected) in on(&device).iter().zip(&on(&cpu)) {
            assert_eq!(found.len(), expected.len());
            let different = found.iter().zip(expected).position(|(found, expected)| {
                let tolerance = allowed(Operation::Rotation, DType::F32, f64::from(*expected));
                f64::from((found - expected).abs()) > tolerance
            });
            assert_eq!(different, None, "{layout:?} {:?}", dims(heads));
        }
    }
}

/// Every `step`th case of the suite: differences take launches for every channel, and `mrope
/// gradcheck --device gpu` has all cases.
fn gradients_of(pairing: &str, step: usize) {
    let device = device();
    let cases = quick_suite().expect("the cases are valid").into_iter();
    let pairing_cases =
        cases.filter(|(named, depth)| named.group().0 == pairing && *depth == Depth::Full);
    let (mut cases, mut passed, mut skipped) = (0, 0, 0);
    for (named, depth) in pairing_cases.step_by(step) {
        cases += 1;
        for row in check_on(&device, &named, depth) {
            assert!(row.pass || row.skipped.is_some(), "{row:?}");
            assert!(row.pass || row.dtype != DType::F32, "{row:?}");
            passed += usize::from(row.pass);
            skipped += usize::from(!row.pass);
        }
    }
    println!("{pairing}: {cases} cases, {passed} checks, {skipped} skipped for their type");
    assert!(
        cases > 0 && passed >= 6 * cases,
        "{passed} checks of {cases} cases of {pairing}"
    );
}

#[test]
fn gradients_half() {
    gradients_of("half", 32);
}

#[test]
fn gradients_adjacent() {
    gradients_of("adjacent", 32);
}

#[test]
#[ignore = "six minutes on a software driver: `cargo xtask deep gpu` runs it"]
fn gradients_of_eight_times_as_many_cases() {
    for pairing in ["half", "adjacent", "quarter", "interleave_half"] {
        gradients_of(pairing, 4);
    }
}

/// Learned angles: sums over heads and samples, in one part and in many.
#[test]
fn gradients_of_angles_are_those_of_the_cpu() {
    let (device, cpu) = (device(), Device::flex());
    for pairing in Pairing::ALL {
        for (layout, batch, seq, heads, shared) in [
            (Layout::Bsnd, 2, 3, 2, false),
            (Layout::Bnsd, 9, 2, 40, true),
            (Layout::Sbnd, 3, 5, 33, true),
            (Layout::Bsnd, 1, 4, 1, false),
        ] {
            for axes in [AxisLayout::Single, AxisLayout::PerChannel(vec![4, 8])] {
                let spec = RotarySpec::builder(26).rotary_dim(24).rotary_offset(1);
                let spec = spec
                    .pairing(pairing)
                    .axis_layout(axes)
                    .build()
                    .expect("valid");
                let lanes = spec.geometry().lane_count();
                let rotary = Rotary::new(spec, layout);
                let tokens = if shared { seq } else { batch * seq };
                let dims = match layout {
                    Layout::Bnsd => [batch, heads, seq, 26],
                    Layout::Sbnd => [seq, batch, heads, 26],
                    _ => [batch, seq, heads, 26],
                };
                let x = Tensor::<4>::random(dims, Distribution::Default, &cpu).into_data();
                let v = Tensor::<4>::random(dims, Distribution::Default, &cpu).into_data();
                let angles = Tensor::<2>::random([tokens, 2 * lanes], Distribution::Default, &cpu);
                let angles = angles.into_data();
                let on = |device: &Device, adjoint: bool| {
                    let device = device.clone().autodiff();
                    let rows = Tensor::<2>::from_data(angles.clone(), &device).require_grad();
                    let [x, v] = [&x, &v].map(|x| Tensor::<4>::from_data(x.clone(), &device));
                    let half = |start| rows.clone().narrow(1, start, lanes);
                    let by = RotaryAngles::from_cos_sin(half(0), half(lanes)).expect("one shape");
                    let (y, _) = if adjoint {
                        rotary.adjoint(x.clone(), x, &by)
                    } else {
                        (rotary.forward_single(x.clone(), &by), x)
                    };
                    let gradients = (y * v).flatten::<1>(0, 3).sum_dim(0).backward();
                    let gradient = rows.grad(&gradients).expect("angles are tracked");
                    let gradient = gradient.into_data().try_into_vec::<f32>();
                    gradient.expect("f32")
                };
                for adjoint in [false, true] {
                    let found = on(&device, adjoint);
                    assert_eq!(on(&device, adjoint), found, "the sums are deterministic");
                    let expected = on(&cpu, adjoint);
                    assert_eq!(found.len(), expected.len());
                    let terms = 2 * heads * if shared { batch } else { 1 };
                    for (found, expected) in found.iter().zip(expected) {
                        let tolerance = terms as f32 * 2.0 * f32::EPSILON;
                        assert!(
                            (found - expected).abs() <= tolerance,
                            "{found} instead of {expected}: {pairing:?} {layout:?} {dims:?}"
                        );
                    }
                }
            }
        }
    }
}

/// From the table that the device gets once, as from the host.
#[test]
fn a_device_gathers_the_angles_of_the_host() {
    let (device, cpu) = (device(), Device::flex());
    for axes in [
        AxisLayout::Contiguous(vec![4, 6, 6]),
        AxisLayout::Striped(vec![6, 5, 5]),
        AxisLayout::PerChannel(vec![4, 4, 4, 4]),
        lanes(16, 16),
        lanes(32, 16),
    ] {
        let spec = RotarySpec::builder(32)
            .axis_layout(axes)
            .build()
            .expect("valid");
        let positions = scattered_positions(spec.axis_count(), 60).expect("in range");
        let rotary = Rotary::new(spec, Layout::Bsnd);
        let expected = rotary.angles(&positions, &cpu).rows().into_data();
        // The device gathers once it has received as many rows as the table has.
        for _ in 0..4 {
            let found = rotary.angles(&positions, &device).rows().into_data();
            assert_eq!(found, expected);
        }
    }
}

fn models_come_out(chosen: impl Fn(&Path) -> bool, least: usize) {
    let device = device();
    let folder = rope_check::fixtures().expect("the test runs in the workspace");
    let mut models = 0;
    for entry in folder.join("models").read_dir().expect("models are there") {
        let path = entry.expect("entry reads").path();
        if !is_model_folder(&path) || !chosen(&path) {
            continue;
        }
        models += 1;
        let on_gpu = Models::new(device.clone(), Some("gpu".into()), Implementation::Fused);
        let report = on_gpu.with_slack(GPU_SLACK).compare(&path);
        let report = report.expect("the model runs");
        assert!(report.computed > 0 && report.skipped.is_none());
        let failed: Vec<_> = report.rows.iter().filter(|row| !row.pass).collect();
        assert!(failed.is_empty(), "{}: {failed:?}", path.display());
    }
    assert!(models >= least, "only {models} models");
}

/// One that sees, and one with experts.
#[test]
fn models_of_transformers_come_out() {
    let kinds = ["qwen2_5_vl_tiny", "qwen3_moe_tiny"];
    models_come_out(
        |path| kinds.iter().any(|kind| path.ends_with(kind)),
        kinds.len(),
    );
}

#[test]
#[ignore = "a minute on a software driver: `cargo xtask deep gpu` runs it"]
fn all_models_of_transformers_come_out() {
    models_come_out(|_| true, 12);
}

/// The norm of the heads with the rotation, forward and backward.
#[test]
fn the_norm_is_that_of_ordinary_operations() {
    let device = device();
    let dtypes = dtypes(&*fused(&device));
    let allowed = [
        (DType::F64, BurnDType::F64, 1e-11),
        (DType::F32, BurnDType::F32, 2e-5),
        (DType::Bf16, BurnDType::BF16, 0.5),
        (DType::F16, BurnDType::F16, 0.05),
    ];
    let mut has = allowed.to_vec();
    has.retain(|(dtype, ..)| dtypes.contains(dtype));
    let has: Vec<_> = has
        .iter()
        .map(|(_, dtype, error)| (*dtype, *error))
        .collect();
    fused_agrees_with_ordinary_operations(&device, &has, has.len());
    results_are_those_of_transformers(&device, &[(BurnDType::F32, 5e-6)]);
}

/// Blocks of heads and a rest, more rows than teams, and sums over many cubes.
#[test]
fn the_norm_of_many_heads_and_tokens_is_that_of_the_cpu() {
    let (device, cpu) = (device(), Device::flex());
    let norm = HeadNorm::new(1e-6).expect("valid");
    for (layout, order, seq, heads, head_dim) in [
        (Layout::Bsnd, NormOrder::BeforeRotation, 3, 9, 128),
        (Layout::Bnsd, NormOrder::AfterRotation, 17_000, 2, 64),
        (Layout::Bsnd, NormOrder::BeforeRotation, 1_001, 6, 60),
    ] {
        let spec = RotarySpec::builder(head_dim).rotary_dim(head_dim / 2);
        let rotary = Rotary::new(spec.build().expect("valid"), layout);
        let norm = norm.with_order(order);
        let positions = Positions::text(1, 0, seq).expect("in range");
        let dims = match layout {
            Layout::Bnsd => [1, heads, seq, head_dim],
            _ => [1, seq, heads, head_dim],
        };
        let random = || Tensor::<4>::random(dims, Distribution::Default, &cpu).into_data();
        let [x, dy] = [random(), random()];
        let weight = Tensor::<1>::random([head_dim], Distribution::Default, &cpu).into_data();
        let on = |device: &Device| {
            let device = device.clone().autodiff();
            let angles = rotary.angles(&positions, &device);
            let leaf = Tensor::<4>::from_data(x.clone(), &device).require_grad();
            let weights = [(); 2].map(|()| Tensor::<1>::from_data(weight.clone(), &device));
            let [q_weight, k_weight] = weights.map(Tensor::require_grad);
            let k = leaf.clone().detach();
            let q = leaf.clone() * 1.0;
            let (y, _) = rotary.forward_norm(q, k, [q_weight.clone(), k_weight], norm, &angles);
            let y_data = y.clone().into_data().try_into_vec::<f32>().expect("f32");
            let dy = Tensor::<4>::from_data(dy.clone(), &device);
            let gradients = (y * dy).flatten::<1>(0, 3).sum_dim(0).backward();
            let dx = leaf.grad(&gradients).expect("tracked").into_data();
            let dweight = q_weight.grad(&gradients).expect("tracked").into_data();
            let [dx, dweight] = [dx, dweight].map(|x| x.try_into_vec::<f32>().expect("f32"));
            [y_data, dx, dweight]
        };
        let found = on(&device);
        assert_eq!(on(&device), found, "the sums are deterministic");
        // A weight's gradient adds up a term for each head.
        let dweight_limit = 1e-6 * (seq * heads) as f32;
        for ((found, expected), allowed) in
            found.iter().zip(on(&cpu)).zip([2e-5, 2e-5, dweight_limit])
        {
            assert_eq!(found.len(), expected.len());
            let different = |(found, expected): (&f32, &f32)| (found - expected).abs() > allowed;
            let at = found.iter().zip(&expected).position(different);
            let values = at.map(|at| (at, found[at], expected[at]));
            assert_eq!(values, None, "{layout:?} {dims:?}, allowed {allowed}");
        }
    }
}

/// The backward of a rotation and of a norm, whose kernels read the gradient by the heads of x.
/// Fusion runs them later, on a thread of its own.
#[cfg(not(feature = "fusion"))]
fn backward_of(heads: usize, gradient_heads: usize, norm: Option<HeadNorm>) {
    let device = device();
    let geometry = RotarySpec::builder(16).build().expect("valid").geometry();
    let layout = Layout::Bsnd;
    let of = |heads| Tensor::<4>::zeros([1, 3, heads, 16], &device).into_dispatch();
    let (x, gradient) = (of(heads), of(gradient_heads));
    let angles = Tensor::<2>::zeros([3, 16], &device).into_dispatch();
    match norm {
        None => {
            let direction = Direction::Forward;
            let op = RotaryOp {
                geometry,
                layout,
                direction,
            };
            Dispatch::rotary_angle_gradients(x, gradient, angles, op);
        }
        Some(norm) => {
            let op = NormRotaryOp {
                geometry,
                layout,
                norm,
                skips_weight: false,
            };
            let weight = Tensor::<1>::zeros([16], &device).into_dispatch();
            Dispatch::norm_rotary_backward(x, weight, angles, gradient, op);
        }
    }
}

#[cfg(not(feature = "fusion"))]
#[test]
#[should_panic(expected = "x has heads 8, its gradient has 2")]
fn gradients_of_angles_want_the_heads_of_x() {
    backward_of(8, 2, None);
}

#[cfg(not(feature = "fusion"))]
#[test]
#[should_panic(expected = "x has heads 2, its gradient has 8")]
fn the_backward_of_the_norm_wants_the_heads_of_x() {
    backward_of(2, 8, Some(HeadNorm::new(1e-6).expect("an epsilon")));
}

/// The same errors as on the CPU, before anything is launched.
#[test]
fn wrong_input_is_refused_by_the_same_errors() {
    let spec = RotarySpec::builder(16).build().expect("valid");
    let rotary = Rotary::new(spec, Layout::Bsnd);
    let wrong = |device: &Device| -> Vec<RotaryError> {
        let positions = Positions::text(1, 0, 3).expect("in range");
        let angles = rotary.angles(&positions, device);
        let ones = |dims: [usize; 4]| Tensor::<4>::ones(dims, (device, BurnDType::F32));
        let x = || ones([2, 3, 2, 16]);
        let refused = |q, k, angles: &RotaryAngles| {
            let refused = rotary.try_forward(q, k, angles);
            refused.map(|_| "a rotation").expect_err("a wrong input")
        };
        let cos = angles.rows().slice([0..3, 0..7]);
        let narrow = RotaryAngles::from_cos_sin(cos.clone(), cos).expect("of one shape");
        let others = rotary.angles(&Positions::text(1, 0, 4).expect("in range"), device);
        let ranks = rotary.try_forward_single(Tensor::<3>::ones([3, 2, 16], device), &angles);
        vec![
            refused(ones([2, 3, 2, 18]), x(), &angles),
            refused(x(), ones([2, 3, 2, 8]), &angles),
            refused(x(), ones([1, 3, 2, 16]), &angles),
            refused(x(), ones([2, 4, 2, 16]), &angles),
            refused(x(), x(), &narrow),
            refused(x(), x(), &others),
            ranks.map(|_| "a rotation").expect_err("a wrong rank"),
        ]
    };
    let errors = wrong(&device());
    assert_eq!(errors, wrong(&Device::flex()));
    assert!(matches!(
        errors[0],
        RotaryError::Rope(RopeError::ShapeMismatch { .. })
    ));
}
