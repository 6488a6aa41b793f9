//! The kernels: one algorithm ([`tile`]) over registers, chosen at run time by the processor's
//! instruction sets.

#![allow(
    unsafe_code,
    reason = "vector intrinsics and strided raw access; each block states what makes it sound"
)]

#[cfg(target_arch = "aarch64")]
mod aarch64;
pub(crate) mod norm;
mod order;
pub(crate) mod portable;
pub(crate) mod tile;
pub(crate) mod vector;
#[cfg(target_arch = "x86_64")]
mod x86_64;

use half::{bf16, f16};

#[cfg(target_arch = "aarch64")]
use self::aarch64::Neon;
use self::norm::{NormTile, norm_tile};
use self::portable::Portable;
use self::tile::{Tile, rotate_tile};
#[cfg(target_arch = "x86_64")]
use self::x86_64::{Avx2, Avx512};

/// A kernel for tiles of `E`.
///
/// # Safety
/// - the processor has the instructions that it was compiled for
/// - the tile's pointers are valid as [`rotate_tile`] demands
pub(crate) type TileKernel<E> = unsafe fn(&Tile<E>);

/// A kernel that normalises and rotates tiles of `E`.
///
/// # Safety
/// - the processor has the instructions that it was compiled for
/// - the tile is as [`norm_tile`] demands
pub(crate) type NormKernel<E> = unsafe fn(&NormTile<E>);

/// A set of vector instructions that this processor has. An unavailable set cannot be constructed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InstructionSet(Kind);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "aarch64")]
    Neon,
}

impl InstructionSet {
    /// Code for any processor, without optional instructions.
    pub const PORTABLE: Self = Self(Kind::Portable);

    /// Returns all sets that this processor has, from the portable one to the widest.
    pub fn available() -> impl Iterator<Item = Self> {
        let mut sets = [Some(Self::PORTABLE), None, None];
        #[cfg(target_arch = "x86_64")]
        {
            sets[1] = Avx2::is_available().then_some(Self(Kind::Avx2));
            sets[2] = Avx512::is_available().then_some(Self(Kind::Avx512));
        }
        #[cfg(target_arch = "aarch64")]
        {
            sets[1] = std::arch::is_aarch64_feature_detected!("neon").then_some(Self(Kind::Neon));
        }
        sets.into_iter().flatten()
    }

    /// Returns the widest set that this processor has.
    pub fn best() -> Self {
        Self::available().last().unwrap_or(Self::PORTABLE)
    }

    /// This set, or the portable one if vector kernels of `E` must not multiply by these values.
    pub(crate) fn for_values<E: crate::Element>(self, values: &[E::Acc]) -> Self {
        if E::are_safe(values) {
            self
        } else {
            Self::PORTABLE
        }
    }

    /// The name used in reports.
    pub fn name(self) -> &'static str {
        match self.0 {
            Kind::Portable => "portable",
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512 => "avx512",
            #[cfg(target_arch = "aarch64")]
            Kind::Neon => "neon",
        }
    }
}

impl std::fmt::Display for InstructionSet {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// Element types that have kernels.
///
/// Never inlined: a crate that inlines a function that names kernels compiles all kernels again,
/// and the compiler inlines functions of this size across crates.
pub(crate) trait KernelElement: Sized {
    /// True if vector kernels may multiply by these values.
    fn are_safe(_: &[Self::Acc]) -> bool
    where
        Self: crate::Element,
    {
        true
    }
    /// The kernel for an instruction set.
    fn kernel(set: InstructionSet) -> TileKernel<Self>
    where
        Self: crate::Element;
    /// The kernel that also normalises, for an instruction set.
    fn norm_kernel(set: InstructionSet) -> NormKernel<Self>
    where
        Self: crate::Element;
}

/// A kernel with the registers of an instruction set.
macro_rules! for_set {
    ($set:ident, $tile:ident) => {
        match $set.0 {
            Kind::Portable => $tile::<Portable<4>, Self>,
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2 => $tile::<Avx2, Self>,
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512 => $tile::<Avx512, Self>,
            #[cfg(target_arch = "aarch64")]
            Kind::Neon => $tile::<Neon, Self>,
        }
    };
}

macro_rules! kernels_for {
    ($($element:ty $(: $are_safe:path)?;)*) => {$(
        impl KernelElement for $element {
            $(fn are_safe(values: &[f32]) -> bool {
                $are_safe(values)
            })?
            #[inline(never)]
            fn kernel(set: InstructionSet) -> TileKernel<Self> {
                for_set!(set, rotate_tile)
            }
            #[inline(never)]
            fn norm_kernel(set: InstructionSet) -> NormKernel<Self> {
                for_set!(set, norm_tile)
            }
        }
    )*};
}

kernels_for! {
    f32;
    f16;
    bf16: are_numbers;
}

/// True if no NaN is among the values.
///
/// Vector kernels round to bf16 by adding to the bits, which may turn a NaN with bits in the lower
/// half of its word into zero. An element has no such bits, and arithmetic passes a NaN on
/// unchanged or produces one without them, so only angles and weights can contain them. The
/// portable kernel tests each value that it rounds.
fn are_numbers(values: &[f32]) -> bool {
    // Without an early exit, so that the compiler vectorises the loop.
    !values.iter().fold(false, |nan, value| nan | value.is_nan())
}

impl KernelElement for f64 {
    /// f64 exists for gradient checks, not for speed: one portable kernel.
    #[inline(never)]
    fn kernel(_: InstructionSet) -> TileKernel<Self> {
        rotate_tile::<Portable<4>, Self>
    }
    #[inline(never)]
    fn norm_kernel(_: InstructionSet) -> NormKernel<Self> {
        norm_tile::<Portable<4>, Self>
    }
}
