//! The kernels by the model of time: what the published costs say about what they do.
#![allow(clippy::expect_used, missing_docs, reason = "test code")]

use rope_bench::model::{self, BoundBy, ModelRow, Pass};
use rope_bench::rows::Source;
use rope_check::buffer::DType;

/// What a modelled time is held to, as a multiple of the memory's.
const BAR: f64 = 1.15;

/// Microseconds of the least bytes at 1.6 TB/s: x in and out once, and two f32 for each pair.
fn least_us(tokens: u64, heads: u64, element_bytes: u64) -> f64 {
    let bytes = tokens * (2 * heads * 128 * element_bytes + 2 * 64 * 4);
    bytes as f64 / 1.6e6
}

#[test]
fn rotations_take_the_memorys_time() {
    let rows = model::rows().expect("the simulator runs");
    let rotations = |row: &&ModelRow| row.direction != Pass::Angles;
    assert_eq!(rows.iter().filter(rotations).count(), 4 * 4 + 2 * 9);
    assert_eq!(rows.len(), 4 * 4 + 3 * 9);
    for row in &rows {
        assert_eq!(row.source, Source::Modelled);
        assert!(row.modelled_us >= row.memory_us, "{row:?}");
        // The longest unit is part of the whole, and what bounds.
        let longest = match row.bound_by {
            BoundBy::Memory => row.memory_us,
            BoundBy::Vector => row.vector_us,
            BoundBy::Load => row.load_us,
            BoundBy::Store => row.store_us,
            BoundBy::Scalar => row.scalar_us,
            BoundBy::Cube => row.cube_us,
        };
        for unit in [
            row.memory_us,
            row.vector_us,
            row.load_us,
            row.store_us,
            row.scalar_us,
            row.cube_us,
        ] {
            assert!(longest >= unit, "{row:?}");
        }
        assert!(row.start_up_us < row.vector_us, "{row:?}");
    }
    for row in rows.iter().filter(rotations) {
        assert!(row.ratio <= BAR, "{row:?}");
        // A third more than is assumed.
        assert!(row.barrier_cycles_at_bar > 27.0, "{row:?}");
        let bytes = if row.dtype == DType::F32 { 4 } else { 2 };
        let least = if row.case.starts_with("Qwen3-VL-8B") {
            least_us(8192, 40, bytes)
        } else {
            least_us(28_800, 24, bytes)
        };
        assert!((row.least_us / least - 1.0).abs() < 1e-3, "{row:?}");
        // x read twice, a product written and read; the rest are the maps of offsets, and R.
        let passes = if row.kernel == "matrix" { 2.5 } else { 1.0 };
        let bytes = row.memory_us / least / passes;
        assert!((0.97..1.001).contains(&bytes), "{row:?}: {least}");
        if row.kernel == "vector" {
            assert!(
                (row.memory_us / least - 1.0).abs() < 1e-3,
                "{row:?}: {least}"
            );
        }
    }
}

/// Why the matrix is an explicit choice: by the model, the vector cores alone are faster in every
/// row of the table that the vendor publishes.
#[test]
fn the_vector_kernels_are_faster_than_the_matrix_in_every_published_row() {
    let rows = model::rows().expect("the simulator runs");
    let matrix = rows.iter().filter(|row| row.kernel == "matrix");
    let mut compared = 0;
    for matrix in matrix {
        let same = |row: &&ModelRow| {
            let named = (&row.case, row.direction) == (&matrix.case, matrix.direction);
            named && row.kernel == "vector"
        };
        let vector = rows.iter().find(same).expect("both kernels are modelled");
        println!(
            "{} {:?}: {:.1} us by the vector cores, {:.1} us by the matrix",
            matrix.case, matrix.direction, vector.modelled_us, matrix.modelled_us
        );
        assert!(
            vector.modelled_us * 2.0 < matrix.modelled_us,
            "{vector:?} {matrix:?}"
        );
        compared += 1;
    }
    assert_eq!(compared, 2 * 4);
}
