//! Where the fixtures are.

use std::io;
use std::path::PathBuf;

/// The folder `tests/fixtures` of the workspace that the process runs in, as `cargo test` runs
/// every test.
///
/// # Errors
/// [`io::ErrorKind::NotFound`] if neither the current folder nor one above it has such a folder.
pub fn fixtures() -> io::Result<PathBuf> {
    let current = std::env::current_dir()?;
    let mut candidates = current
        .ancestors()
        .map(|above| above.join("tests/fixtures"));
    candidates
        .find(|folder| folder.join("MANIFEST").is_file())
        .ok_or_else(|| {
            let message = format!("no tests/fixtures in {} or above it", current.display());
            io::Error::new(io::ErrorKind::NotFound, message)
        })
}
