//! cargo, started by a program that cargo started.

use std::process::Command;

/// cargo with the environment that a user starts it with. The variables that cargo sets for this
/// package would make it build other packages again, for minutes.
pub(crate) fn cargo() -> Command {
    let mut command = Command::new(env!("CARGO"));
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("CARGO_PKG_") || text.starts_with("CARGO_MANIFEST_") {
            command.env_remove(&name);
        }
    }
    command
}
