//! Parsers of what several commands take.

use std::path::Path;

use clap::error::ErrorKind;
use clap::{ArgMatches, Command, ValueHint};

pub(crate) use vlm_train::job::parse::{MAX_TOKENS, count_in, one_of, seed};

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
