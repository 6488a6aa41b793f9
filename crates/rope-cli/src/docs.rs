//! The Rust code of pages, which rustdoc compiles here: this crate depends on all the others. It needs
//! the feature `ascend-sim`, for the devices that it names. README.md and docs/models.md are
//! compiled by rope-check.

/// Declares a page; the tests find it by its path in this text.
macro_rules! page {
    ($name:ident, $path:literal) => {
        #[cfg(all(doctest, feature = "ascend-sim"))]
        #[doc = include_str!($path)]
        struct $name;
    };
}

page!(Ascend, "../../../docs/ascend.md");
page!(AscendBackend, "../../../docs/dev/ascend-backend.md");
page!(ComingFrom, "../../../docs/coming-from.md");
page!(Mrope, "../../../docs/mrope.md");
page!(NewBackend, "../../../docs/dev/new-backend.md");
page!(NewFamily, "../../../docs/dev/new-family.md");
page!(NewOperation, "../../../docs/dev/new-operation.md");
