//! The budget of a chat template: each element of a value that is printed, compared, sorted or
//! stored is charged before the work, and a rendering has a deadline.
//!
//! The engine charges a list by its own items. A list of shared lists costs one step to store and
//! 2^40 to print, so this module walks it first.

use std::cell::Cell;
use std::time::{Duration, Instant};

use minijinja::value::{Rest, Value, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State, filters};

/// The longest rendering. A conversation of 1,000 turns takes a fraction of a second.
const LONGEST: Duration = Duration::from_secs(4);

/// Bytes of text in lists that cost one step.
const BYTES_PER_STEP: u64 = 256;

/// The nesting limit of values; the engine's recursion limit is of this order.
pub(super) const MAX_DEPTH: usize = 128;

thread_local! {
    /// The end of the rendering of this thread.
    static DEADLINE: Cell<Option<Instant>> = const { Cell::new(None) };
}

/// Starts the time of a rendering.
pub(super) fn start() {
    DEADLINE.set(Instant::now().checked_add(LONGEST));
}

fn in_time() -> Result<(), Error> {
    match DEADLINE.get() {
        Some(end) if Instant::now() > end => Err(Error::new(
            ErrorKind::InvalidOperation,
            format!("it took longer than {} s", LONGEST.as_secs()),
        )),
        _ => Ok(()),
    }
}

/// Charges each element of `value`, those of shared lists once for each mention.
pub(super) fn charge(state: &State, value: &Value) -> Result<(), Error> {
    in_time()?;
    walk(state, value, 0)
}

fn walk(state: &State, value: &Value, depth: usize) -> Result<(), Error> {
    if depth > MAX_DEPTH {
        let message = format!("values nest deeper than {MAX_DEPTH}");
        return Err(Error::new(ErrorKind::BadSerialization, message));
    }
    match value.kind() {
        ValueKind::String => {
            let bytes = value.as_str().map_or(0, str::len) as u64;
            state.consume_fuel(bytes / BYTES_PER_STEP)
        }
        ValueKind::Seq | ValueKind::Iterable => {
            for item in value.try_iter()? {
                state.consume_fuel(1)?;
                walk(state, &item, depth + 1)?;
            }
            Ok(())
        }
        ValueKind::Map => {
            for key in value.try_iter()? {
                state.consume_fuel(1)?;
                walk(state, &value.get_item(&key)?, depth + 1)?;
            }
            Ok(())
        }
        _ => Ok(()),
    }
}

/// Replaces filters and tests of the engine that visit elements by ones that charge them first.
pub(super) fn charge_filters(environment: &mut Environment<'static>) {
    environment.add_filter("_join", filters::join);
    environment.add_filter("_sort", filters::sort);
    environment.add_filter("_unique", filters::unique);
    environment.add_filter("_groupby", filters::groupby);
    environment.add_filter("_min", filters::min);
    environment.add_filter("_max", filters::max);
    environment.add_filter("_pprint", filters::pprint);
    environment.add_filter("_format", filters::format);
    environment.add_filter("_replace", filters::replace);
    environment.add_filter("_upper", filters::upper);
    environment.add_filter("_lower", filters::lower);
    environment.add_filter("_title", filters::title);
    environment.add_filter("_capitalize", filters::capitalize);
    environment.add_filter("_trim", filters::trim);
    environment.add_filter("_sum", filters::sum);
    for (name, inner) in [
        ("upper", "_upper"),
        ("lower", "_lower"),
        ("title", "_title"),
        ("capitalize", "_capitalize"),
        ("trim", "_trim"),
        ("sum", "_sum"),
        ("join", "_join"),
        ("sort", "_sort"),
        ("unique", "_unique"),
        ("groupby", "_groupby"),
        ("min", "_min"),
        ("max", "_max"),
        ("pprint", "_pprint"),
        ("format", "_format"),
        ("replace", "_replace"),
    ] {
        environment.add_filter(name, move |state: &mut State, values: Rest<Value>| {
            for value in values.iter() {
                charge(state, value)?;
            }
            // Python refuses it, too; each sum would be copied for the next.
            if name == "sum"
                && let Some(list) = values.first()
                && list
                    .try_iter()?
                    .any(|item| item.kind() == ValueKind::String)
            {
                let message = "sum adds numbers; use join for texts";
                return Err(Error::new(ErrorKind::InvalidOperation, message));
            }
            state.apply_filter(inner, &values)
        });
    }
    for name in ["eq", "equalto", "=="] {
        environment.add_test(name, |state: &State, left: &Value, right: &Value| {
            charge(state, left)?;
            charge(state, right).map(|()| left == right)
        });
    }
    for name in ["ne", "!="] {
        environment.add_test(name, |state: &State, left: &Value, right: &Value| {
            charge(state, left)?;
            charge(state, right).map(|()| left != right)
        });
    }
}
