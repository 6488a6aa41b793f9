//! The parts that `mrope verify`, `mrope gradcheck` and the tests share: the implementations under
//! test under one trait, and the checks that run over all of them.

pub mod accept;
pub mod alloc;
#[cfg(feature = "ascend")]
pub mod ascend;
pub mod buffer;
pub mod cases;
pub mod engine;
mod fixtures;
pub mod golden;
#[cfg(feature = "burn")]
pub mod gradcheck;
#[cfg(feature = "models")]
pub mod model;
pub mod names;
#[cfg(feature = "models")]
pub mod operators;
pub mod prompt;
pub mod tolerance;
#[cfg(feature = "models")]
pub mod verify;

pub use fixtures::fixtures;

/// Fails unless a value matches the pattern, and shows it.
#[macro_export]
macro_rules! assert_is {
    ($value:expr => $pattern:pat $(if $guard:expr)?) => {
        match $value {
            $pattern $(if $guard)? => {}
            ref other => panic!("{other} is not {}", stringify!($pattern)),
        }
    };
}

// Pages outside the published crates, whose packages could not include them: their code is
// compiled, and run where it says nothing else.
/// The first page.
#[cfg(all(doctest, feature = "burn"))]
#[doc = include_str!("../../../README.md")]
pub struct FirstPage;

/// The page on models.
#[cfg(all(doctest, feature = "models"))]
#[doc = include_str!("../../../docs/models.md")]
pub struct ModelsPage;
