//! Parsers of what several commands take.

use std::fmt::Display;
use std::ops::RangeInclusive;
use std::path::Path;
use std::str::FromStr;

use clap::builder::{PossibleValuesParser, StringValueParser, TypedValueParser};
use clap::error::ErrorKind;
use clap::{ArgMatches, Command, ValueHint};

/// More tokens than any of the models has.
pub(crate) const MAX_TOKENS: usize = 1 << 20;

/// A number of things in a range.
pub(crate) fn count_in(range: RangeInclusive<usize>) -> impl TypedValueParser<Value = usize> {
    whole(range)
}

/// A seed.
pub(crate) fn seed() -> impl TypedValueParser<Value = u64> {
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

/// Refuses a path that is read where nothing is. Such arguments have [`ValueHint::FilePath`] or
/// [`ValueHint::DirPath`]; a parser of values would look for the files of each example in a page.
pub(crate) fn expect_existing(
    command: &mut Command,
    matches: &ArgMatches,
) -> Result<(), clap::Error> {
    if let Some((name, matches)) = matches.subcommand()
        && let Some(command) = command.find_subcommand_mut(name)
    {
        return expect_existing(command, matches);
    }
    let fault = command.get_arguments().find_map(|argument| {
        let expected = match argument.get_value_hint() {
            ValueHint::FilePath => "a file",
            ValueHint::DirPath => "a folder",
            _ => return None,
        };
        let mut given = matches
            .get_raw(argument.get_id().as_str())
            .into_iter()
            .flatten();
        given.find_map(|path| {
            let reason = match Path::new(path).try_exists() {
                Ok(true) => return None,
                Ok(false) => format!("nothing is there; expected {expected} that exists"),
                Err(error) => error.to_string(),
            };
            let path = path.display();
            Some(format!("invalid value '{path}' for '{argument}': {reason}"))
        })
    });
    fault.map_or(Ok(()), |fault| {
        Err(command.error(ErrorKind::ValueValidation, fault))
    })
}

/// One of `all` by its name; `--help` and errors list the names.
pub(crate) fn one_of<T: Copy + Send + Sync + 'static>(
    all: &'static [T],
    name: fn(T) -> &'static str,
) -> impl TypedValueParser<Value = T> {
    let names: Vec<&str> = all.iter().map(|value| name(*value)).collect();
    PossibleValuesParser::new(names).try_map(move |text| {
        let found = all.iter().find(|value| name(**value) == text);
        found.copied().ok_or("unknown name")
    })
}
