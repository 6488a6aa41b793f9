//! The Ascend path, on the simulated NPU: golden vectors, gradients and shapes.
//!
//! The simulator compiles the kernels with the host's C++17 compiler: without one these tests fail.
//! So they do if the simulator has found a violation.

use rope_ascend::rope::{Npu, violations};
use rope_check::ascend::{self, Path as DevicePath};
use rope_check::buffer::{Buffer, DType};
use rope_check::cases;
use rope_check::engine::Case;
use rope_check::golden::{Artifact, GoldenVectors};
use rope_check::gradcheck::{Row, quick_suite};
use rope_check::tolerance::{self, Operation};
use rope_core::{AxisLayout, Direction, Layout, Pairing, Positions, RotarySpec};

const DTYPES: [DType; 3] = [DType::F32, DType::F16, DType::Bf16];

/// The simulated NPU of a test, which fails if it has found violations when the test ends.
struct Simulated(Npu);

impl std::ops::Deref for Simulated {
    type Target = Npu;
    fn deref(&self) -> &Npu {
        &self.0
    }
}

impl Drop for Simulated {
    fn drop(&mut self) {
        let violations = violations();
        if !std::thread::panicking() {
            assert!(violations.is_empty(), "{}", violations.join("\n"));
        }
    }
}

fn simulated() -> Simulated {
    Simulated(Npu::simulated().expect("the simulator starts"))
}

/// The same with its kernels, which need the host's C++17 compiler.
fn npu() -> Simulated {
    let npu = simulated();
    npu.kernels().unwrap_or_else(|error| panic!("{error}"));
    npu
}

fn golden() -> Vec<(String, Box<GoldenVectors>)> {
    let folder = rope_check::fixtures().expect("the test runs in the workspace");
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
    let npu = npu();
    let golden = golden();
    assert_eq!(golden.len(), 30);
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
fn golden_vectors_pass_through_the_cube_unit_or_are_beyond_its_buffers() {
    let npu = npu();
    let (mut compared, mut refused) = (0, Vec::new());
    for (file, vectors) in golden() {
        for engine in ascend::engines(&npu, DevicePath::Matrix) {
            for dtype in [DType::F16, DType::Bf16] {
                match vectors.compare(engine.as_ref(), dtype) {
                    Ok(rows) => {
                        compared += 1;
                        assert!(rows.len() >= 2, "{file} compares nothing");
                        for row in rows {
                            assert!(row.pass, "{file}: {row:?}");
                        }
                    }
                    Err(error) => refused.push(format!("{file}: {:?}", error.limit())),
                }
            }
        }
    }
    assert!(compared >= 40, "{compared} compared, {refused:?}");
    let by_size = |refusal: &String| refusal.contains("the cube unit takes at most");
    assert!(refused.iter().all(by_size), "{refused:?}");
}

#[test]
fn golden_vectors_pass_through_the_stock_operators_or_are_beyond_their_limits() {
    let npu = simulated();
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
    let npu = npu();
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
fn gradients_by_the_cube_unit() {
    let npu = npu();
    let mut kinds = std::collections::BTreeSet::new();
    for (named, depth) in quick_suite().expect("the cases are valid") {
        for row in ascend::check(&npu, DevicePath::Matrix, &named, depth) {
            assert!(row.pass, "{row:?}");
            kinds.insert((named.group().0.to_owned(), row.check, row.dtype.name()));
        }
    }
    // Each pairing, in two types: forward, adjoint, and the identity of both.
    assert_eq!(kinds.len(), 4 * 2 * 3, "{kinds:?}");
}

#[test]
fn stock_operators_are_checked_or_name_the_limit_that_keeps_them() {
    let npu = simulated();
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
    let npu = npu();
    let spec = RotarySpec::builder(head_dim)
        .pairing(Pairing::Half)
        .axis_layout(AxisLayout::Contiguous(vec![head_dim / 2 - 8, 4, 4]))
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
            .map(|axis| case.positions.value(axis, token) as i64)
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
                (found - exact).abs() <= tolerance::allowed(Operation::Rotation, dtype, *exact),
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
