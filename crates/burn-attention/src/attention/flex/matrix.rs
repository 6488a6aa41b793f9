//! Matrices in slices, and their product, computed by burn-flex's library.

use super::number::Real;

/// A matrix in a slice, by its strides in elements.
#[derive(Clone, Copy)]
pub(crate) struct Matrix<'a, R> {
    data: &'a [R],
    rows: usize,
    columns: usize,
    row_stride: usize,
    column_stride: usize,
}

impl<'a, R: Real> Matrix<'a, R> {
    /// Rows of `columns` contiguous elements, `row_stride` apart.
    pub(crate) fn new(data: &'a [R], rows: usize, columns: usize, row_stride: usize) -> Self {
        Self {
            data,
            rows,
            columns,
            row_stride,
            column_stride: 1,
        }
    }

    pub(crate) fn transposed(self) -> Self {
        Self {
            rows: self.columns,
            columns: self.rows,
            row_stride: self.column_stride,
            column_stride: self.row_stride,
            ..self
        }
    }

    fn is_within(&self) -> bool {
        let last = |size: usize, stride: usize| size.saturating_sub(1) * stride;
        let last = last(self.rows, self.row_stride) + last(self.columns, self.column_stride);
        self.rows * self.columns == 0 || last < self.data.len()
    }
}

/// How a product is written: over the values that are there, or added to them.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Write {
    Replace,
    Add,
}

/// Writes `factor * a * b` to rows of contiguous elements that are `row_stride` apart.
pub(crate) fn product<R: Real>(
    target: &mut [R],
    row_stride: usize,
    write: Write,
    factor: R,
    a: Matrix<R>,
    b: Matrix<R>,
) {
    let (rows, columns, inner) = (a.rows, b.columns, a.columns);
    assert_eq!(inner, b.rows, "a product of matrices that do not fit");
    let written = Matrix::new(target, rows, columns, row_stride);
    assert!(
        written.is_within() && columns <= row_stride,
        "a target that is too small"
    );
    assert!(a.is_within() && b.is_within(), "a matrix beyond its memory");
    if rows * columns == 0 {
        return;
    }
    let stride = usize::cast_signed;
    #[allow(unsafe_code, reason = "the matrix product takes pointers")]
    // SAFETY: all elements that the sizes and strides reach are within the slices, as asserted
    // above; `target` is borrowed mutably, so it overlaps neither matrix, and its rows do not
    // overlap. R is f32 or f64, for which gemm is implemented.
    unsafe {
        gemm::gemm(
            rows,
            columns,
            inner,
            target.as_mut_ptr(),
            1,
            stride(row_stride),
            write == Write::Add,
            a.data.as_ptr(),
            stride(a.column_stride),
            stride(a.row_stride),
            b.data.as_ptr(),
            stride(b.column_stride),
            stride(b.row_stride),
            R::ONE,
            factor,
            false,
            false,
            false,
            gemm::Parallelism::None,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_are_replaced_and_added() {
        let (a, b) = ([1.0f32, 2.0, 3.0, 4.0], [5.0f32, 6.0, 7.0, 8.0]);
        let (a, b) = (Matrix::new(&a, 2, 2, 2), Matrix::new(&b, 2, 2, 2));
        let mut target = [1.0f32; 5];
        product(&mut target, 3, Write::Replace, 2.0, a, b);
        assert_eq!(target, [38.0, 44.0, 1.0, 86.0, 100.0]);
        product(&mut target, 3, Write::Add, 1.0, a.transposed(), b);
        assert_eq!(target, [64.0, 74.0, 1.0, 124.0, 144.0]);
    }

    #[test]
    #[should_panic(expected = "a target that is too small")]
    fn a_small_target_is_refused() {
        let a = [1.0f32; 4];
        let a = Matrix::new(&a, 2, 2, 2);
        product(&mut [0.0; 3], 2, Write::Replace, 1.0, a, a);
    }
}
