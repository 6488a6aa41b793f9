//! Parsers of options, for `clap`.

use std::fmt::Display;
use std::ops::RangeInclusive;
use std::str::FromStr;

use clap::builder::{PossibleValuesParser, StringValueParser, TypedValueParser};

/// More tokens than any of the models has.
pub const MAX_TOKENS: usize = 1 << 20;

/// A number of things in a range.
pub fn count_in(range: RangeInclusive<usize>) -> impl TypedValueParser<Value = usize> {
    whole(range)
}

/// A seed.
pub fn seed() -> impl TypedValueParser<Value = u64> {
    whole(0..=u64::MAX)
}

/// A whole number in a range, which the message about any other text names.
fn whole<T>(range: RangeInclusive<T>) -> impl TypedValueParser<Value = T>
where
    T: Clone + Display + FromStr + PartialOrd + Send + Sync + 'static,
{
    StringValueParser::new().try_map(move |text| {
        let number = text.parse().ok().filter(|number| range.contains(number));
        let (least, most) = (range.start(), range.end());
        number.ok_or_else(|| format!("expected a whole number from {least} to {most}"))
    })
}

/// A number above 0.
///
/// # Errors
/// For any other text.
pub fn above_0(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if number.is_finite() && number > 0.0 => Ok(number),
        _ => Err("expected a number above 0".to_owned()),
    }
}

/// A number of at least 0.
///
/// # Errors
/// For any other text.
pub fn at_least_0(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if number.is_finite() && number >= 0.0 => Ok(number),
        _ => Err("expected a number of at least 0".to_owned()),
    }
}

/// One of `all` by its name; `--help` and errors list the names.
pub fn one_of<T: Copy + Send + Sync + 'static>(
    all: &'static [T],
    name: fn(T) -> &'static str,
) -> impl TypedValueParser<Value = T> {
    let names: Vec<&str> = all.iter().map(|value| name(*value)).collect();
    PossibleValuesParser::new(names).try_map(move |text| {
        let found = all.iter().find(|value| name(**value) == text);
        found.copied().ok_or("unknown name")
    })
}
