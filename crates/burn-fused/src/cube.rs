//! Launches of CubeCL's kernels.

#![allow(
    unsafe_code,
    reason = "kernels trust the sizes that they are launched with"
)]

use burn::tensor::{DType, Shape};
use burn_cubecl::cubecl;
use burn_cubecl::cubecl::client::Client;
use burn_cubecl::cubecl::features::TypeUsage;
use burn_cubecl::cubecl::ir::{AddressType, ElemType, FloatKind};
use burn_cubecl::cubecl::prelude::*;
use burn_cubecl::cubecl::{CubeDim, calculate_cube_count_elemwise};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::ops::numeric::empty_device_contiguous_dtype;
use burn_cubecl::tensor::CubeTensor;

use crate::accumulator;

/// Units that keep a large device busy.
pub const ENOUGH_UNITS: usize = 1 << 17;

/// Returns the types of tensors and of the computation with them, if the runtime can store and
/// convert the one and compute in the other.
pub fn types(client: &Client, dtype: DType) -> Option<[ElemType; 2]> {
    let float = |dtype| match dtype {
        DType::F64 => Some(FloatKind::F64),
        DType::F32 => Some(FloatKind::F32),
        DType::F16 => Some(FloatKind::F16),
        DType::BF16 => Some(FloatKind::BF16),
        _ => None,
    };
    let stored = ElemType::Float(float(dtype)?);
    let computed = ElemType::Float(float(accumulator(dtype).ok()?.into())?);
    let usage = |kind| client.properties().type_usage(kind);
    let stores = TypeUsage::Buffer | TypeUsage::Conversion;
    let runs = usage(stored).is_superset(stores)
        && usage(computed).is_superset(stores | TypeUsage::Arithmetic);
    runs.then_some([stored, computed])
}

/// Returns the type that holds the addresses of all these tensors' elements.
pub fn address_type(tensors: &[&CubeTensor]) -> AddressType {
    let required = tensors.iter().map(|x| x.required_address_type());
    required.max().unwrap_or_default()
}

/// Divides units among cubes.
pub fn cubes(client: &Client, units: usize) -> (CubeCount, CubeDim) {
    let dim = CubeDim::new(client, units);
    (calculate_cube_count_elemwise(client, units, dim), dim)
}

/// Returns true if the first element of a tensor is that of a vector of `n` elements.
pub fn starts_at_vectors_of(x: &CubeTensor, n: usize) -> bool {
    let start = x.handle.offset_start.unwrap_or(0);
    start.is_multiple_of((n * x.dtype.size()) as u64)
}

/// Returns the widest vectors that `row` elements, and the starts of all tensors, consist of.
pub fn vector_size(tensors: &[&CubeTensor], row: usize) -> usize {
    let Some(widest) = tensors.iter().max_by_key(|x| x.dtype.size()) else {
        return 1;
    };
    let fits = |n: &usize| {
        let starts = |x: &&CubeTensor| starts_at_vectors_of(x, *n);
        row.is_multiple_of(*n) && tensors.iter().all(starts)
    };
    let mut sizes = widest.client.io_optimized_vector_sizes(widest.dtype.size());
    sizes.find(fits).unwrap_or(1)
}

/// Returns a contiguous tensor that a kernel may overwrite: the tensor itself if nothing else holds
/// it, or a copy.
pub fn owned(x: CubeTensor) -> CubeTensor {
    let x = into_contiguous(x);
    if x.can_mut() { x } else { x.copy() }
}

/// Allocates a contiguous tensor on the device of another.
pub fn empty_beside(x: &CubeTensor, shape: Shape, dtype: DType) -> CubeTensor {
    empty_device_contiguous_dtype(x.client.clone(), x.device.clone(), shape, dtype)
}

/// Queues the sum of the parts in `sums`, each of the size of `added`, the last perhaps cut short.
/// Both are contiguous.
pub fn add(sums: CubeTensor, added: &CubeTensor, computed: ElemType) {
    let (size, total) = (added.meta.num_elements(), sums.meta.num_elements());
    let client = sums.client.clone();
    let (count, dim) = cubes(&client, size);
    let address = address_type(&[&sums]);
    // SAFETY: both are contiguous, and of the sizes that the kernel is given.
    unsafe {
        add_parts::launch_unchecked(
            &client,
            count,
            dim,
            address,
            sums.into_buffer_arg(),
            added.clone().into_buffer_arg(),
            size,
            total,
            computed,
        );
    }
}

/// Adds up parts of `size` numbers, `total` numbers in all.
#[cube(launch_unchecked, address_type = "dynamic")]
fn add_parts<A: Float>(
    sums: &[A],
    added: &mut [A],
    size: usize,
    total: usize,
    #[define(A)] _type: ElemType,
) {
    if ABSOLUTE_POS >= size {
        terminate!();
    }
    let mut sum = sums[ABSOLUTE_POS];
    let mut at = ABSOLUTE_POS + size;
    while at < total {
        sum += sums[at];
        at += size;
    }
    added[ABSOLUTE_POS] = sum;
}

/// Returns the units of a cube, a power of two, for rows of `vectors` vectors.
pub fn units_of_row(client: &Client, vectors: usize) -> usize {
    const FEWEST: usize = 32;
    const MOST: usize = 256;
    let most = client.properties().hardware.max_units_per_cube as usize;
    let most = most.checked_ilog2().map_or(1, |log| 1 << log).min(MOST);
    vectors.next_power_of_two().max(FEWEST).min(most)
}

#[doc(hidden)]
pub use sums::{sum_of_vector, sum_over_cube};

#[allow(
    missing_docs,
    reason = "the macro documents the function, and not the rest that it writes"
)]
mod sums {
    use burn_cubecl::cubecl;
    use burn_cubecl::cubecl::prelude::*;

    /// Adds up a number of each unit of a cube, whose size is a power of two; all units get the sum, in
    /// an order of additions that depends only on that size. All units of the cube call it.
    #[cube]
    pub fn sum_over_cube<A: Float>(
        shared: &mut Shared<[A]>,
        number: A,
        #[comptime] cube: usize,
    ) -> A {
        let unit = UNIT_POS as usize;
        // The sum before may still be read.
        sync_cube();
        shared[unit] = number;
        sync_cube();
        let steps = comptime![cube.trailing_zeros() as usize];
        #[unroll]
        for step in 0..steps {
            let stride = comptime![cube >> (step + 1)];
            if unit < stride {
                let other = shared[unit + stride];
                shared[unit] += other;
            }
            sync_cube();
        }
        shared[0usize]
    }

    /// Returns the sum of a vector's numbers, in their order.
    #[cube]
    pub fn sum_of_vector<A: Float, N: Size>(x: Vector<A, N>) -> A {
        let mut sum = x.extract(0usize);
        #[unroll]
        for i in 1..N::value() {
            sum += x.extract(i);
        }
        sum
    }
}
