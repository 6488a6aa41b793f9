//! A file of options: TOML, with the names that the options have on the command line.

use std::ffi::OsString;
use std::path::Path;

use clap::parser::ValueSource;
use clap::{ArgAction, ArgMatches, Command};
use toml::{Table, Value};

/// More than any file of options has.
const MOST_BYTES: u64 = 1 << 20;
/// The option that names the file, and those that belong to one start of the program.
const OWN: [&str; 9] = [
    "options",
    "resume",
    "plan",
    "memory",
    "prove_cut",
    "prove_same",
    "hosts",
    "host",
    "rendezvous",
];

/// The arguments with the options of the file that `--options` names in front. Those that are also
/// given as arguments are left out of the file's.
///
/// # Errors
/// If the file cannot be read, or names an option that does not exist.
pub(crate) fn with_file(command: &Command, args: Vec<OsString>) -> Result<Vec<OsString>, String> {
    let Some(command) = command.find_subcommand("finetune") else {
        return Ok(args);
    };
    if args.get(1).is_none_or(|name| name != "finetune") {
        return Ok(args);
    }
    // What the arguments say, whether or not they are complete.
    let given = command.clone().ignore_errors(true).no_binary_name(true);
    let Ok(given) = given.try_get_matches_from(&args[2..]) else {
        return Ok(args);
    };
    let Some(path) = given.get_raw("options").and_then(|mut paths| paths.next()) else {
        return Ok(args);
    };
    let path = Path::new(path);
    let wrong = |reason: String| format!("cannot take options from {}: {reason}", path.display());
    let text =
        plain_files::read_text(path, MOST_BYTES).map_err(|error| wrong(error.cause.to_string()))?;
    let table: Table = text
        .parse()
        .map_err(|error: toml::de::Error| wrong(error.to_string()))?;
    let mut all = args[..2].to_vec();
    for (name, value) in &table {
        let argument = command.get_arguments().find(|argument| {
            let aliases = argument.get_all_aliases().unwrap_or_default();
            let long = argument.get_long().unwrap_or(argument.get_id().as_str());
            long == name || aliases.contains(&&name[..])
        });
        let Some(argument) = argument.filter(|argument| !OWN.contains(&argument.get_id().as_str()))
        else {
            return Err(wrong(format!(
                "it has {name}, and `mrope finetune --help` has no such option for a file"
            )));
        };
        let source = given.value_source(argument.get_id().as_str());
        if source == Some(ValueSource::CommandLine) {
            continue;
        }
        let values = match value {
            Value::Array(values) => &values[..],
            value => std::slice::from_ref(value),
        };
        let texts = values.iter().map(|value| text_of(name, value));
        let texts: Vec<String> = texts.collect::<Result<_, _>>().map_err(wrong)?;
        if matches!(argument.get_action(), ArgAction::SetTrue) {
            match value {
                Value::Boolean(true) => all.push(format!("--{name}").into()),
                Value::Boolean(false) => {}
                _ => {
                    return Err(wrong(format!(
                        "expected {name} = true or false, found {value}"
                    )));
                }
            }
        } else if argument.is_positional() {
            all.extend(texts.into_iter().map(OsString::from));
        } else if argument
            .get_num_args()
            .is_some_and(|count| count.max_values() == 2)
        {
            all.push(format!("--{name}").into());
            all.extend(texts.into_iter().map(OsString::from));
        } else {
            all.extend(
                texts
                    .into_iter()
                    .map(|text| format!("--{name}={text}").into()),
            );
        }
    }
    all.extend_from_slice(&args[2..]);
    Ok(all)
}

fn text_of(name: &str, value: &Value) -> Result<String, String> {
    Ok(match value {
        Value::String(text) => text.clone(),
        Value::Integer(number) => number.to_string(),
        Value::Float(number) => number.to_string(),
        Value::Boolean(is) => is.to_string(),
        _ => {
            return Err(format!(
                "expected {name} to be a text, a number, true, false or a list of them"
            ));
        }
    })
}

/// The options of a run as such a file, defaults included.
pub(crate) fn written(command: &Command, matches: &ArgMatches) -> String {
    let Some(command) = command.find_subcommand("finetune") else {
        return String::new();
    };
    let mut table = Table::new();
    for argument in command.get_arguments() {
        let id = argument.get_id().as_str();
        let name = argument.get_long().unwrap_or(id);
        if OWN.contains(&id) || matches.try_contains_id(id).is_err() {
            continue;
        }
        if matches!(argument.get_action(), ArgAction::SetTrue) {
            if matches.get_flag(id) {
                table.insert(name.to_owned(), Value::Boolean(true));
            }
            continue;
        }
        let raw = matches.get_raw(id).into_iter().flatten();
        let texts: Vec<String> = raw
            .map(|value| value.to_string_lossy().into_owned())
            .collect();
        let value = match &texts[..] {
            [] => continue,
            [one] if !is_list(argument) => value_of(one),
            several => Value::Array(several.iter().map(|text| value_of(text)).collect()),
        };
        table.insert(name.to_owned(), value);
    }
    table.to_string()
}

fn is_list(argument: &clap::Arg) -> bool {
    matches!(argument.get_action(), ArgAction::Append)
}

/// A number, if the text is one that reads back the same.
fn value_of(text: &str) -> Value {
    if let Ok(number) = text.parse::<i64>() {
        return Value::Integer(number);
    }
    match text.parse::<f64>() {
        Ok(number) if number.is_finite() => Value::Float(number),
        _ => Value::String(text.to_owned()),
    }
}
