//! Shapes and views that the families of methods are run over.

use View::{Contiguous, Expanded, Sliced, Stepped, SteppedTransposed, Transposed};
use burn::tensor::Slice;

use crate::support::input::View;

/// A shape and how it is stored.
pub(crate) type Sample = (&'static [usize], View);

/// Ranks 1 to 5, every view, one element, no elements, and a length that is no multiple of a
/// vector.
pub(crate) const SAMPLES: &[Sample] = &[
    (&[1], Contiguous),
    (&[7], Stepped),
    // Contiguous, but not from the buffer's start: a unique one may be written in place.
    (&[5], Sliced),
    (&[67], Contiguous),
    (&[3, 4], Transposed),
    (&[3, 4], Expanded(0)),
    (&[2, 3, 4], Sliced),
    (&[2, 3, 5], Expanded(1)),
    (&[2, 3, 1, 2], SteppedTransposed),
    (&[2, 1, 3, 2, 2], Transposed),
    (&[0], Contiguous),
    (&[2, 0, 3], Transposed),
];

/// The reductions of empty samples that have a result to compare.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Empty {
    /// All: nothing reduces to a neutral element.
    Reduces,
    /// Those over a dimension that has elements: nothing has no mean or largest element.
    Refused,
    /// Those with elements in the result: Flex panics where there are none.
    Unnamed,
}

impl Empty {
    pub(crate) fn allows(self, shape: &[usize], dim: usize) -> bool {
        match self {
            Empty::Reduces => true,
            Empty::Refused => shape[dim] > 0,
            Empty::Unnamed => shape
                .iter()
                .enumerate()
                .all(|(d, &size)| size > 0 || d == dim),
        }
    }
}

/// Pairs of operands: equal shapes in unlike views, and broadcasts of either side and of both.
pub(crate) const PAIRS: &[(Sample, Sample)] = &[
    ((&[1], Contiguous), (&[1], Contiguous)),
    ((&[7], Stepped), (&[7], Contiguous)),
    ((&[5], Sliced), (&[5], Sliced)),
    ((&[67], Contiguous), (&[67], Contiguous)),
    ((&[3, 4], Transposed), (&[3, 4], Sliced)),
    ((&[3, 4], Contiguous), (&[3, 4], Transposed)),
    ((&[3, 4], Expanded(0)), (&[3, 4], Transposed)),
    ((&[3, 4], Contiguous), (&[3, 4], Expanded(1))),
    ((&[3, 1], Contiguous), (&[1, 4], Contiguous)),
    ((&[2, 3, 4], Sliced), (&[1, 3, 1], Transposed)),
    ((&[1, 1, 4], Stepped), (&[2, 3, 4], Contiguous)),
    (
        (&[1, 1, 1, 1], Contiguous),
        (&[2, 1, 3, 2], SteppedTransposed),
    ),
    ((&[2, 1, 3, 1, 2], Transposed), (&[1, 2, 3, 2, 1], Sliced)),
    ((&[0], Contiguous), (&[0], Contiguous)),
    ((&[2, 0, 3], Contiguous), (&[1, 1, 3], Contiguous)),
];

/// A tensor, the slices taken of it, and how it is stored.
pub(crate) fn slices() -> Vec<(Vec<usize>, Vec<Slice>, View)> {
    let range = |start, end| Slice::new(start, Some(end), 1);
    let step = |start, end, step| Slice::new(start, Some(end), step);
    let all = Slice::new(0, None, 1);
    vec![
        (vec![7], vec![range(2, 5)], Contiguous),
        (vec![7], vec![step(1, 7, 2)], Stepped),
        (vec![7], vec![Slice::new(0, None, -1)], Contiguous),
        (vec![1], vec![all], Contiguous),
        (vec![7], vec![range(3, 3)], Contiguous),
        (vec![4, 5], vec![range(1, 3)], Contiguous),
        (vec![4, 5], vec![range(1, 3), range(0, 5)], Transposed),
        (vec![4, 5], vec![all, step(0, 5, 3)], Sliced),
        (vec![4, 5], vec![Slice::new(0, None, -2), all], Transposed),
        (vec![4, 5], vec![range(-3, -1), range(-2, 5)], Contiguous),
        (vec![4, 5], vec![range(1, 3), range(1, 4)], Expanded(0)),
        (
            vec![2, 3, 4],
            vec![all, range(1, 2), step(1, 4, 2)],
            SteppedTransposed,
        ),
        (
            vec![2, 3, 2, 2],
            vec![range(1, 2), step(0, 3, 2), all, range(0, 1)],
            Sliced,
        ),
        (
            vec![2, 1, 3, 2, 2],
            vec![all, all, range(1, 3), all, range(1, 2)],
            Transposed,
        ),
        (vec![2, 0, 3], vec![all, all, range(0, 2)], Contiguous),
    ]
}

/// The shape that `slices` cut out of `shape`.
pub(crate) fn sliced(shape: &[usize], slices: &[Slice]) -> Vec<usize> {
    let mut out = shape.to_vec();
    for (size, slice) in out.iter_mut().zip(slices) {
        *size = slice.output_size(*size);
    }
    out
}

/// Shapes to concatenate, along which dimension, and how each is stored.
pub(crate) fn concatenations() -> Vec<(usize, Vec<Sample>)> {
    vec![
        (
            0,
            vec![(&[3], Contiguous), (&[1], Contiguous), (&[4], Stepped)],
        ),
        (0, vec![(&[2, 3], Transposed), (&[1, 3], Contiguous)]),
        (
            1,
            vec![
                (&[2, 3], Sliced),
                (&[2, 1], Contiguous),
                (&[2, 2], Expanded(0)),
            ],
        ),
        (
            2,
            vec![(&[2, 1, 3], SteppedTransposed), (&[2, 1, 2], Contiguous)],
        ),
        (1, vec![(&[2, 0, 3], Contiguous), (&[2, 2, 3], Transposed)]),
        (
            3,
            vec![(&[1, 2, 1, 2], Contiguous), (&[1, 2, 1, 1], Sliced)],
        ),
        (
            4,
            vec![
                (&[1, 2, 1, 2, 1], Transposed),
                (&[1, 2, 1, 2, 2], Contiguous),
            ],
        ),
        (0, vec![(&[2, 3], Transposed)]),
    ]
}

/// A tensor, dimension and shape of indices for gathering from it and scattering into it.
pub(crate) const GATHERS: &[(Sample, usize, Sample)] = &[
    ((&[6], Contiguous), 0, (&[4], Contiguous)),
    ((&[6], Stepped), 0, (&[1], Contiguous)),
    ((&[4, 5], Transposed), 0, (&[3, 5], Contiguous)),
    ((&[4, 5], Sliced), 1, (&[4, 2], Transposed)),
    ((&[4, 5], Expanded(0)), 1, (&[4, 3], Stepped)),
    ((&[3, 2, 4], SteppedTransposed), 2, (&[3, 2, 1], Contiguous)),
    ((&[3, 2, 4], Contiguous), 1, (&[3, 2, 4], Sliced)),
    ((&[2, 3, 2, 2], Transposed), 1, (&[2, 2, 2, 2], Contiguous)),
    (
        (&[2, 1, 3, 2, 2], Contiguous),
        2,
        (&[2, 1, 4, 2, 2], SteppedTransposed),
    ),
    ((&[4, 5], Contiguous), 0, (&[0, 5], Contiguous)),
];

/// A tensor, dimension, and number and view of the indices that select from it.
pub(crate) const SELECTS: &[(Sample, usize, Sample)] = &[
    ((&[6], Contiguous), 0, (&[4], Contiguous)),
    ((&[1], Contiguous), 0, (&[3], Stepped)),
    ((&[4, 5], Transposed), 0, (&[6], Contiguous)),
    ((&[4, 5], Sliced), 1, (&[2], Stepped)),
    ((&[4, 5], Expanded(0)), 1, (&[3], Sliced)),
    ((&[3, 2, 4], SteppedTransposed), 1, (&[1], Contiguous)),
    ((&[2, 3, 2, 2], Transposed), 1, (&[5], Contiguous)),
    ((&[2, 1, 3, 2, 2], Contiguous), 4, (&[3], Contiguous)),
    ((&[4, 5], Contiguous), 0, (&[0], Contiguous)),
];
