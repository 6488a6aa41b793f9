//! What a matrix product of burn's CPU backend allocates beside its result: `gemm` copies its
//! factors to the order in which its kernels read them, in blocks for this machine's caches.

use gemm_common::cache::{CACHE_INFO, KernelParams, kernel_params};

/// A product of `[rows, inner]` and `[inner, columns]`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Product {
    pub(super) rows: usize,
    pub(super) columns: usize,
    pub(super) inner: usize,
    /// True for each factor that is read across its rows.
    pub(super) transposed: [bool; 2],
    /// True in f16, whose factors are always copied, to f32.
    pub(super) is_f16: bool,
}

/// Lanes of a vector, and rows and columns of a kernel: `MR_DIV_N` x N and NR of `gemm-f32`.
fn kernel() -> [usize; 3] {
    #[cfg(any(target_arch = "x86", target_arch = "x86_64"))]
    {
        if is_x86_feature_detected!("avx512f") {
            return [16, 64, 6];
        }
        if is_x86_feature_detected!("fma") {
            return [8, 16, 6];
        }
    }
    #[cfg(target_arch = "aarch64")]
    return [4, 8, 8];
    #[cfg(not(target_arch = "aarch64"))]
    [1, 2, 4]
}

/// Kernels of rows from which `gemm` copies a right factor whose elements are in order.
const PACKED_FROM: usize = 128;

impl Product {
    /// The bytes of the copies, of f32.
    pub(super) fn packed(&self) -> usize {
        const WIDTH: usize = size_of::<f32>();
        let [lanes, kernel_rows, kernel_columns] = kernel();
        // The result is in row order, so `gemm` computes its transpose.
        let (rows, columns, inner) = (self.columns, self.rows, self.inner);
        let [right, left] = self.transposed;
        if inner <= 2 || rows <= 1 || columns <= 1 {
            return 0;
        }
        let KernelParams { kc, mc, nc } = if rows <= 64 && columns <= 64 && !self.is_f16 {
            let kc = inner.min(512);
            KernelParams {
                kc,
                mc: CACHE_INFO[1].cache_bytes / WIDTH / kc / kernel_rows * kernel_rows,
                nc: columns.next_multiple_of(kernel_columns),
            }
        } else {
            kernel_params(rows, columns, inner, kernel_rows, kernel_columns, WIDTH)
        };
        let packs_right = self.is_f16
            || (right && rows > 2 * kernel_rows)
            || (!right && rows > PACKED_FROM * kernel_rows);
        let packs_left = rows <= 2 * mc && (!rows.is_multiple_of(lanes) || left);
        let right = if packs_right { nc } else { 0 };
        let left = if packs_left {
            rows.next_multiple_of(kernel_rows)
        } else {
            0
        };
        kc * (right + left) * WIDTH
    }
}

/// The bytes of the buffer that each thread keeps from its first product on.
pub(super) fn of_thread() -> usize {
    CACHE_INFO[1].cache_bytes
}

/// True if `burn-attention` computes products of rows in f32 and bf16.
pub(super) fn has_kernel() -> bool {
    #[cfg(target_arch = "x86_64")]
    return is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
    #[cfg(not(target_arch = "x86_64"))]
    cfg!(target_arch = "aarch64")
}

/// The bytes of the tiles that it makes of some rows of x, of parts of the weight, and of the sums of
/// its tasks.
pub(super) fn tiles(rows: usize, inner: usize) -> usize {
    /// Of a task, and of a tile.
    const ROWS: [usize; 2] = [256, 6];
    const COLUMNS: usize = 64;
    const STRETCH: usize = 512;
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let [task, tile] = ROWS;
    let tiles = match rows {
        0..=16 => 0,
        rows => rows.min(task * threads) / tile * tile * inner,
    };
    let of_task = COLUMNS * (inner.min(STRETCH) + rows.min(task));
    (tiles + threads * of_task) * size_of::<f32>()
}
