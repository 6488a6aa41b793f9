//! The Ascend path, on the simulated NPU: golden vectors, gradients, shapes, and burn through the device and back.
//!
//! The simulator compiles the kernels with the host's C++17 compiler. Where there is none these tests say so and pass
//! without a result; everything else fails.

use std::path::Path;

use burn::tensor::{DType as BurnDType, Device, Tensor, TensorData};
use rope_ascend::AscendError;
use rope_ascend::rope::Npu;
use rope_burn::ascend::AscendRotary;
use rope_burn::{Rotary, RotaryError};
use rope_check::ascend::{self, Path as DevicePath};
use rope_check::buffer::{Buffer, DType};
use rope_check::cases;
use rope_check::engine::Case;
use rope_check::golden::{Artifact, GoldenVectors};
use rope_check::gradcheck::{Row, quick_suite};
use rope_check::tolerance;
use rope_core::{AxisLayout, Direction, Layout, Pairing, Positions, RotarySpec};

const DTYPES: [DType; 3] = [DType::F32, DType::F16, DType::Bf16];

/// The simulated NPU with its kernels, where they can be compiled.
fn npu() -> Option<Npu> {
    let npu = Npu::simulated().expect("the simulator starts");
    match npu.kernels() {
        Ok(_) => Some(npu),
        Err(AscendError::NoKernels { reason, .. }) if reason.contains("no C++17 compiler") => {
            eprintln!("skipped: {reason}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

fn golden() -> Vec<(String, Box<GoldenVectors>)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures");
    let mut paths: Vec<_> = std::fs::read_dir(folder)
        .expect("the fixtures are there")
        .map(|entry| entry.expect("the folder reads").path())
        .collect();
    paths.sort();
    let vectors = paths.into_iter().filter_map(|path| {
        let name = path.file_name()?.to_string_lossy().into_owned();
        match Artifact::open(&path) {
            Ok(Artifact::Vectors(vectors)) => Some((name, vectors)),
            _ => None,
        }
    });
    vectors.collect()
}

#[test]
fn golden_vectors_pass_through_the_kernels() {
    let Some(npu) = npu() else { return };
    let golden = golden();
    assert_eq!(golden.len(), 10);
    for (file, vectors) in golden {
        for engine in ascend::engines(&npu, DevicePath::Kernels) {
            for dtype in DTYPES {
                let rows = vectors
                    .compare(engine.as_ref(), dtype)
                    .expect("the kernels run");
                assert!(rows.len() >= 2, "{file} compares nothing");
                for row in rows {
                    assert!(row.pass, "{file}: {row:?}");
                }
            }
        }
    }
}

#[test]
fn golden_vectors_pass_through_the_stock_operators_or_are_beyond_their_limits() {
    let npu = Npu::simulated().expect("the simulator starts");
    let mut compared = std::collections::BTreeSet::new();
    for (file, vectors) in golden() {
        for engine in ascend::engines(&npu, DevicePath::Aclnn) {
            for dtype in DTYPES {
                match vectors.compare(engine.as_ref(), dtype) {
                    Ok(rows) => {
                        compared.insert((file.clone(), engine.name()));
                        for row in rows {
                            assert!(row.pass, "{file}: {row:?}");
                        }
                    }
                    Err(error) => assert!(error.limit().is_some(), "{file}: {error}"),
                }
            }
        }
    }
    let by = |name: &str| {
        compared
            .iter()
            .filter(|(_, engine)| engine.ends_with(name))
            .count()
    };
    assert!(by("npu_rotary_mul") >= 5, "{compared:?}");
    assert!(by("npu_mrope") >= 1, "{compared:?}");
}

/// The quick suite of one pairing; one test per pairing, so that they run side by side.
fn gradients_of(pairing: &str) {
    let Some(npu) = npu() else { return };
    let mut kinds = std::collections::BTreeSet::new();
    for (named, depth) in quick_suite().expect("the cases are valid") {
        if named.group().0 != pairing {
            continue;
        }
        for row in ascend::check(&npu, DevicePath::Kernels, &named, depth) {
            assert!(row.pass, "{row:?}");
            kinds.insert((row.check, row.dtype.name()));
        }
    }
    assert_eq!(kinds.len(), 4 * DTYPES.len(), "{kinds:?}");
}

#[test]
fn gradients_half() {
    gradients_of("half");
}

#[test]
fn gradients_adjacent() {
    gradients_of("adjacent");
}

#[test]
fn gradients_quarter() {
    gradients_of("quarter");
}

#[test]
fn gradients_interleave_half() {
    gradients_of("interleave_half");
}

#[test]
fn stock_operators_are_checked_or_name_the_limit_that_keeps_them() {
    let npu = Npu::simulated().expect("the simulator starts");
    let (mut checked, mut skipped) = (0, 0);
    for (named, depth) in quick_suite().expect("the cases are valid") {
        for row in ascend::check(&npu, DevicePath::Aclnn, &named, depth) {
            let Row {
                skipped: limit,
                pass,
                ..
            } = &row;
            match limit {
                Some(limit) => {
                    skipped += 1;
                    assert!(limit.contains(" takes ") && !pass, "{row:?}");
                }
                None => {
                    checked += 1;
                    assert!(pass, "{row:?}");
                }
            }
        }
    }
    assert!(
        checked >= 30 && skipped >= 30,
        "{checked} checked, {skipped} skipped"
    );
}

/// A rotation, its size given by tokens, heads of q and head_dim.
fn sized(tokens: usize, heads: usize, head_dim: usize, dtype: DType, strided: bool) {
    let Some(npu) = npu() else { return };
    let spec = RotarySpec::builder(head_dim)
        .pairing(Pairing::Half)
        .axes(AxisLayout::Contiguous(vec![head_dim / 2 - 8, 4, 4]))
        .build()
        .expect("a valid specification");
    let positions = cases::scattered_positions(3, tokens).expect("valid positions");
    let case = Case {
        heads,
        kv_heads: heads.min(2),
        strided,
        ..Case::new(spec, positions, Layout::Tnd, 1, tokens)
    };
    let values = |seed, heads| {
        let elems = case.contiguous(heads).elems();
        Buffer::from_f64(dtype, &cases::values(seed, elems))
    };
    let (q, k) = (values(1, case.heads), values(2, case.kv_heads));
    for engine in ascend::engines(&npu, DevicePath::Kernels) {
        for direction in [Direction::Forward, Direction::Adjoint] {
            let found = engine
                .apply(&case, direction, &q, Some(&k))
                .expect("the kernels run");
            compare(&case, direction, case.heads, &q, &found.0);
            let found = found.1.expect("k comes back");
            compare(&case, direction, case.kv_heads, &k, &found);
        }
    }
}

/// Some tokens, the first and the last among them, against the matrix of each.
fn compare(case: &Case, direction: Direction, heads: usize, x: &Buffer, found: &Buffer) {
    let dtype = found.dtype();
    let (x, found) = (x.to_f64(), found.to_f64());
    assert_eq!(x.len(), found.len());
    let (seq, row) = (case.seq, heads * case.spec.head_dim());
    for token in (0..seq).step_by((seq / 3).max(1)).chain([seq - 1]) {
        let ids: Vec<i64> = (0..3)
            .map(|axis| i64::from(case.positions.axis(axis)[token]))
            .collect();
        let one = Case {
            positions: Positions::new(3, &ids).expect("valid positions"),
            seq: 1,
            ..case.clone()
        };
        let at = token * row..(token + 1) * row;
        let exact = cases::exact(&one, direction, heads, &x[at.clone()]).expect("the oracle runs");
        for (channel, (found, exact)) in found[at].iter().zip(&exact).enumerate() {
            assert!(
                (found - exact).abs() <= tolerance::rotated(dtype, *exact),
                "{direction:?} {dtype:?} {seq} tokens, {heads} heads of {}: token {token}, channel {channel}: {found} \
                 instead of {exact}",
                case.spec.head_dim(),
            );
        }
    }
}

#[test]
fn from_one_token_to_a_hundred_thousand() {
    for tokens in [1, 2, 39, 41, 1000] {
        sized(tokens, 4, 64, DType::Bf16, false);
    }
    sized(100_000, 1, 32, DType::Bf16, false);
}

#[test]
fn from_one_head_to_128() {
    for heads in [1, 3, 32, 128] {
        sized(9, heads, 128, DType::F16, heads == 3);
    }
}

#[test]
fn head_dims_aligned_or_not_dense_or_strided() {
    for head_dim in [32, 72, 80, 128, 256, 512] {
        for dtype in DTYPES {
            sized(17, 3, head_dim, dtype, false);
            sized(17, 3, head_dim, dtype, true);
        }
    }
}

fn tensor(seed: u64, dims: [usize; 4], dtype: BurnDType, device: &Device) -> Tensor<4> {
    let data = TensorData::new(cases::values(seed, dims.iter().product()), dims);
    Tensor::from_data(data.convert_dtype(dtype), (device, dtype))
}

fn values(x: Tensor<4>) -> Vec<f64> {
    x.into_data()
        .convert_dtype(BurnDType::F64)
        .try_into_vec()
        .expect("f64 values")
}

/// A step through burn: rotated q and k, and the gradients of both.
fn step(
    dtype: BurnDType,
    layout: Layout,
    rotate: impl Fn(Tensor<4>, Tensor<4>) -> (Tensor<4>, Tensor<4>),
) -> [Vec<f64>; 4] {
    let device = Device::flex().autodiff();
    let dims = |heads| match layout {
        Layout::Bnsd => [2, heads, 5, 40],
        _ => [2, 5, heads, 40],
    };
    // Views: their dimensions lie in another order in memory.
    let q = tensor(1, dims(3), dtype, &device)
        .swap_dims(0, 1)
        .swap_dims(0, 1)
        .require_grad();
    let k = tensor(2, dims(1), dtype, &device).require_grad();
    let weights = [
        tensor(3, dims(3), dtype, &device),
        tensor(4, dims(1), dtype, &device),
    ];
    let (y, yk) = rotate(q.clone(), k.clone());
    let [w, wk] = weights;
    let gradients = ((y.clone() * w).sum() + (yk.clone() * wk).sum()).backward();
    let gradient = |x: &Tensor<4>| values(x.grad(&gradients).expect("a gradient"));
    [values(y), values(yk), gradient(&q), gradient(&k)]
}

fn rotary(layout: Layout) -> Rotary {
    let spec = RotarySpec::builder(40)
        .rotary_dim(32)
        .pairing(Pairing::Adjacent)
        .axes(AxisLayout::PerChannel(vec![4, 4, 8]))
        .build()
        .expect("a valid specification");
    Rotary::new(spec, layout)
}

#[test]
fn burn_through_the_device_is_burn_on_the_host() {
    let Some(npu) = npu() else { return };
    for layout in [Layout::Bsnd, Layout::Bnsd] {
        let host = rotary(layout);
        let device = AscendRotary::try_new(host.clone(), &npu).expect("kernels are there");
        // Of each sample, then shared by both.
        for tokens in [10, 5] {
            let positions = cases::scattered_positions(3, tokens).expect("valid positions");
            let on_host = host.angles(&positions, &Device::flex().autodiff());
            let on_device = device.try_angles(&positions).expect("angles are uploaded");
            let copied = device
                .try_angles_from(&on_host)
                .expect("angles are uploaded");
            assert_eq!((on_device.tokens(), copied.tokens()), (tokens, tokens));
            for (dtype, checked) in [
                (BurnDType::F32, DType::F32),
                (BurnDType::F16, DType::F16),
                (BurnDType::BF16, DType::Bf16),
            ] {
                let expected = step(dtype, layout, |q, k| host.forward(q, k, &on_host));
                for angles in [&on_device, &copied] {
                    let found = step(dtype, layout, |q, k| {
                        device
                            .try_forward(q, k, angles)
                            .expect("the device rotates")
                    });
                    device
                        .backward_result()
                        .expect("the device takes gradients back");
                    for (found, expected) in found.iter().flatten().zip(expected.iter().flatten()) {
                        // Each may be off by its tolerance.
                        let allowed = 2.0 * tolerance::rotated(checked, *expected);
                        let error = (found - expected).abs();
                        assert!(error <= allowed, "{dtype:?}: {found} instead of {expected}");
                    }
                }
            }
        }
    }
}

#[test]
fn what_does_not_fit_is_an_error_of_the_caller() {
    let Some(npu) = npu() else { return };
    let rotary = AscendRotary::try_new(rotary(Layout::Bsnd), &npu).expect("kernels are there");
    let positions = cases::scattered_positions(3, 5).expect("valid positions");
    let angles = rotary.try_angles(&positions).expect("angles are uploaded");
    let flex = Device::flex();
    let x = |dims, dtype| tensor(1, dims, dtype, &flex);
    let narrow = rotary.try_forward_single(x([2, 5, 3, 32], BurnDType::F32), &angles);
    assert!(matches!(narrow, Err(RotaryError::Rope(_))), "{narrow:?}");
    let long = rotary.try_forward_single(x([1, 6, 3, 40], BurnDType::F32), &angles);
    assert!(matches!(long, Err(RotaryError::Rope(_))), "{long:?}");
    let wide = rotary.try_forward_single(x([2, 5, 3, 40], BurnDType::F64), &angles);
    let message = wide.expect_err("there is no f64").to_string();
    assert!(
        message.contains("f32, f16 or bf16") && message.contains("f64"),
        "{message}"
    );
    let nothing = rotary.try_forward_single(x([2, 5, 0, 40], BurnDType::F32), &angles);
    assert_eq!(nothing.expect("no heads are no work").dims(), [2, 5, 0, 40]);
}
