//! Parsers of what several benchmarks take.

use clap::builder::{PossibleValuesParser, RangedU64ValueParser, TypedValueParser};

/// More tokens than any of the models has.
pub(super) const MAX_TOKENS: u64 = 1 << 20;

/// A whole number from 1 to `most`.
pub(super) fn count_up_to(most: u64) -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(1..=most)
}

/// One of `all` by its name; `--help` and errors list the names.
pub(super) fn one_of<T: Copy + Send + Sync + 'static>(
    all: &'static [T],
    name: fn(T) -> &'static str,
) -> impl TypedValueParser<Value = T> {
    let names: Vec<&str> = all.iter().map(|value| name(*value)).collect();
    PossibleValuesParser::new(names).try_map(move |text| {
        let found = all.iter().find(|value| name(**value) == text);
        found.copied().ok_or("unknown name")
    })
}
