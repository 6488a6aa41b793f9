//! `cargo xtask vendor-headers`: the kernels held to the vendor's own Ascend C headers.
//!
//! The headers are compiled for the host with clang. What Huawei's compiler supplies by itself is
//! in `crates/xtask/vendor-headers`: keywords, address spaces, types, and the intrinsics, which
//! execute and check what they are given. The compiled kernels run in the simulator's runtime, so
//! the suites of the workspace go through the vendor's queues, masks and copies.

mod compile;

use std::io;
use std::path::{Path, PathBuf};

use compile::Harness;

/// What may be asked for.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Options {
    /// The checkout of asc-devkit, or the installed CANN.
    pub(crate) folder: PathBuf,
    /// Architectures; both if empty.
    pub(crate) architectures: Vec<u32>,
    /// Only compile.
    pub(crate) compile_only: bool,
}

/// The architectures that the kernels are for, as `__NPU_ARCH__`.
const ARCHITECTURES: [u32; 2] = [2201, 3510];

impl Options {
    /// The options in the words of a command line.
    pub(crate) fn parse(words: &[&str]) -> Option<Self> {
        let mut options = Self::default();
        let mut words = words.iter();
        while let Some(word) = words.next() {
            match *word {
                "--arch" => {
                    let number = words.next()?.parse().ok()?;
                    ARCHITECTURES.contains(&number).then_some(())?;
                    options.architectures.push(number);
                }
                "--compile" => options.compile_only = true,
                word if word.starts_with('-') => return None,
                word if options.folder.as_os_str().is_empty() => options.folder = word.into(),
                _ => return None,
            }
        }
        if options.architectures.is_empty() {
            options.architectures = ARCHITECTURES.to_vec();
        }
        (!options.folder.as_os_str().is_empty()).then_some(options)
    }
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum VendorError {
    #[error(
        "the harness keeps the unified buffer behind a segment register of x86-64 Linux, this is \
         {0}: run it there"
    )]
    Host(String),
    #[error(
        "{} holds no include/basic_api/kernel_basic_intf.h beside impl/, itself or in asc/ or \
         include/asc/: name a checkout of asc-devkit (github.com/hicann/asc-devkit) or an \
         installed CANN", .0.display()
    )]
    NoHeaders(PathBuf),
    #[error("no clang 15 or later, tried {tried}: `apt install clang-15`, or set CLANG")]
    NoClang { tried: String },
    #[error("cannot access {}: {source}", path.display())]
    File { path: PathBuf, source: io::Error },
    #[error("the path {} holds white space, at which CXXFLAGS is cut: use another", .0.display())]
    Space(PathBuf),
    #[error("dav-{architecture}: {count} errors, of which the first is\n{first}")]
    Compile {
        architecture: u32,
        count: usize,
        first: String,
    },
}

type Result<T> = std::result::Result<T, VendorError>;

/// For `map_err`: the file that cannot be accessed.
fn cannot_access(path: &Path) -> impl FnOnce(io::Error) -> VendorError {
    let path = path.to_path_buf();
    move |source| VendorError::File { path, source }
}

/// Runs what was asked for; returns a summary.
pub(crate) fn run(options: &Options) -> Result<String> {
    let harness = Harness::find(&options.folder)?;
    println!("{}", harness.title());
    for &architecture in &options.architectures {
        let compiled = harness.compile(architecture)?;
        println!("dav-{architecture}: {compiled}");
    }
    Ok(String::new())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_read_or_refused() {
        let options = Options::parse(&["--arch", "3510", "somewhere"]).expect("valid");
        assert_eq!(options.folder, Path::new("somewhere"));
        assert_eq!(options.architectures, [3510]);
        let both = Options::parse(&["somewhere"]).expect("valid");
        assert_eq!(both.architectures, ARCHITECTURES);
        for wrong in [
            &[][..],
            &["--arch", "2201"],
            &["--arch", "9", "a"],
            &["a", "b"],
            &["--fast", "a"],
        ] {
            assert_eq!(Options::parse(wrong), None, "{wrong:?}");
        }
    }
}
