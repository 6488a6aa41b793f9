//! Parsers of what several commands take.

use std::path::Path;

use clap::error::ErrorKind;
use clap::{ArgMatches, Command, ValueHint};

use crate::stdio::plain;
pub(crate) use vlm_train::job::parse::{MAX_TOKENS, count_in, one_of, seed};

/// Keys in the messages of libraries, and the options that set them.
const KEYS: [(&str, &str); 12] = [
    ("`allow_truncated`", "--allow-truncated"),
    ("`betas[0]`", "--betas"),
    ("`betas[1]`", "--betas"),
    ("`epsilon`", "--epsilon"),
    ("`least_share`", "--least-rate"),
    ("`max_norm`", "--max-norm"),
    ("`max_tokens`", "--max-tokens"),
    ("`rates.decoder`", "--learning-rate"),
    ("`rates.merger`", "--merger-rate"),
    ("`rates.tower`", "--tower-rate"),
    ("`warmup_steps`", "--warmup-steps"),
    ("`weight_decay`", "--weight-decay"),
];

/// An error's message for a terminal, with options in place of keys.
pub(crate) fn complaint(error: &impl ToString) -> String {
    let replace = |text: String, (key, option): &(&str, &str)| text.replace(key, option);
    plain(&KEYS.iter().fold(error.to_string(), replace))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_key_has_an_option() {
        let command = crate::command();
        let finetune = command.find_subcommand("finetune").expect("a command");
        for (key, option) in KEYS {
            let mut names = finetune.get_arguments().filter_map(clap::Arg::get_long);
            assert!(names.any(|name| option == format!("--{name}")), "{option}");
            assert_eq!(complaint(&format!("{key} is 1")), format!("{option} is 1"));
        }
    }
}
