//! Parsers of what several commands take.

use std::path::Path;

use clap::error::ErrorKind;
use clap::{ArgMatches, Command, ValueHint};

use crate::stdio::plain;
use vlm_train::job::in_options;
pub(crate) use vlm_train::job::parse::{MAX_TOKENS, above_0, count_in, one_of, seed};

/// An error's message for a terminal, with options in place of a library's keys.
pub(crate) fn complaint(error: &impl ToString) -> String {
    plain(&in_options(error.to_string()))
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
            ValueHint::FilePath => "file",
            ValueHint::DirPath => "folder",
            _ => return None,
        };
        let mut given = matches
            .get_raw(argument.get_id().as_str())
            .into_iter()
            .flatten();
        given.find_map(|path| {
            let reason = match Path::new(path).try_exists() {
                Ok(true) => return None,
                Ok(false) => format!("no such {expected}"),
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
