//! Compiled kernels, kept in files between processes.
//!
//! A file is found by a hash of the compiler's inputs. It is used if it contains these in full
//! (source, options, toolkit), and a binary of the stated length and checksum. Any other file is
//! ignored. This detects damage, not forgery: the folder belongs to the user.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::{env, fs, io};

use plain_files::Fingerprint;

/// Variable that names the folder of compiled kernels, or is `off`.
pub(crate) const CACHE_VARIABLE: &str = "ROPE_ASCEND_CACHE";

const MAGIC: &[u8; 8] = b"ropekrn1";
/// The size limit of a file of kernels, which have a few MiB.
pub(super) const MAX_KERNEL_BYTES: u64 = 1 << 30;
const HEADER_BYTES: usize = MAGIC.len() + 3 * size_of::<u64>();

/// The cache file of one compilation's kernels.
#[derive(Debug)]
pub(crate) struct KernelFile {
    path: PathBuf,
    key: String,
}

/// The folder, unless it is switched off: the variable's, else the one of the XDG Base Directory
/// Specification.
fn folder(variable: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    let set = |name| variable(name).filter(|value| !value.is_empty());
    if let Some(chosen) = set(CACHE_VARIABLE) {
        return (chosen != "off").then(|| chosen.into());
    }
    // The specification requires relative paths to be ignored.
    let cache = set("XDG_CACHE_HOME").map(PathBuf::from);
    let cache = cache.filter(|path| path.is_absolute());
    let home = || set("HOME").map(|home| Path::new(&home).join(".cache"));
    Some(cache.or_else(home)?.join("rope-ascend"))
}

/// The same on every machine and in every release.
fn checksum<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> u64 {
    let mut hash = Fingerprint::default();
    parts.into_iter().for_each(|part| hash.add(part));
    hash.value()
}

impl KernelFile {
    /// The file for `source`, compiled with `options` by `toolkit`; `None` if the cache is
    /// disabled.
    pub(crate) fn of(source: &str, options: &[String], toolkit: &str) -> Option<Self> {
        Some(Self::within(
            &folder(|name| env::var_os(name))?,
            source,
            options,
            toolkit,
        ))
    }

    fn within(folder: &Path, source: &str, options: &[String], toolkit: &str) -> Self {
        let key = format!("{toolkit}\n{}\n{source}", options.join(" "));
        let name = format!("{:016x}.kernels", checksum([key.as_bytes()]));
        let path = folder.join(name);
        Self { path, key }
    }

    /// The binary, if the file exists and is intact.
    pub(crate) fn read(&self) -> Option<Vec<u8>> {
        let mut file = plain_files::read(&self.path, MAX_KERNEL_BYTES).ok()?;
        let (header, rest) = file.split_at_checked(HEADER_BYTES)?;
        let (magic, numbers) = header.split_at(MAGIC.len());
        let mut numbers = numbers.chunks_exact(size_of::<u64>()).map(|bytes| {
            let bytes = bytes.try_into().unwrap_or_default();
            u64::from_le_bytes(bytes)
        });
        let key_bytes = self.key.len();
        let whole = magic == MAGIC
            && numbers.next() == Some(key_bytes as u64)
            && numbers.next() == Some(rest.len().checked_sub(key_bytes)? as u64)
            && numbers.next() == Some(checksum([rest]))
            && rest.starts_with(self.key.as_bytes());
        whole.then(|| file.split_off(HEADER_BYTES + key_bytes))
    }

    /// Stores `binary`. After a failure, it is compiled again next time.
    pub(crate) fn write(&self, binary: &[u8]) {
        let _not_kept = self.try_write(binary);
    }

    fn try_write(&self, binary: &[u8]) -> io::Result<()> {
        static WRITES: AtomicU32 = AtomicU32::new(0);
        let folder = self.path.parent().unwrap_or(Path::new(""));
        fs::create_dir_all(folder)?;
        let key = self.key.as_bytes();
        let mut file = MAGIC.to_vec();
        for number in [
            key.len() as u64,
            binary.len() as u64,
            checksum([key, binary]),
        ] {
            file.extend(number.to_le_bytes());
        }
        file.extend(key);
        file.extend(binary);
        let write = WRITES.fetch_add(1, Ordering::Relaxed);
        let unfinished = format!("{}-{write}.unfinished", std::process::id());
        let unfinished = self.path.with_extension(unfinished);
        // Renaming is atomic: a reader finds a whole file or none.
        let written =
            fs::write(&unfinished, file).and_then(|()| fs::rename(&unfinished, &self.path));
        if written.is_err() {
            let _failed = fs::remove_file(&unfinished);
        }
        written
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_folder_is_the_variables_or_the_users() {
        let folder = |set: &[(&str, &str)]| {
            folder(|name| {
                let found = set.iter().find(|(other, _)| *other == name);
                found.map(|(_, value)| (*value).into())
            })
        };
        let home = ("HOME", "/home/a");
        let expected = |path: &str| Some(PathBuf::from(path));
        assert_eq!(folder(&[home]), expected("/home/a/.cache/rope-ascend"));
        assert_eq!(
            folder(&[home, ("XDG_CACHE_HOME", "/var/b")]),
            expected("/var/b/rope-ascend")
        );
        assert_eq!(
            folder(&[home, ("XDG_CACHE_HOME", "b")]),
            expected("/home/a/.cache/rope-ascend")
        );
        assert_eq!(folder(&[home, (CACHE_VARIABLE, "/c")]), expected("/c"));
        assert_eq!(folder(&[home, (CACHE_VARIABLE, "off")]), None);
        assert_eq!(folder(&[]), None);
    }

    #[test]
    fn a_file_serves_what_it_was_made_from_and_only_whole() {
        let folder = env::temp_dir().join(format!("rope-ascend-test-{}", std::process::id()));
        let options = ["--npu-arch=dav-2201".to_owned()];
        let file = KernelFile::within(&folder, "source", &options, "toolkit 1");
        assert_eq!(file.read(), None);
        file.write(b"binary");
        assert_eq!(file.read(), Some(b"binary".to_vec()));
        for other in [
            KernelFile::within(&folder, "other source", &options, "toolkit 1"),
            KernelFile::within(&folder, "source", &[], "toolkit 1"),
            KernelFile::within(&folder, "source", &options, "toolkit 2"),
        ] {
            assert_eq!(other.read(), None);
            // Neither if their hashes were the same.
            let path = file.path.clone();
            assert_eq!(KernelFile { path, ..other }.read(), None);
        }
        let whole = fs::read(&file.path).unwrap();
        for bytes in 0..whole.len() {
            fs::write(&file.path, &whole[..bytes]).unwrap();
            assert_eq!(file.read(), None, "cut to {bytes} bytes");
            let mut flipped = whole.clone();
            flipped[bytes] ^= 1;
            fs::write(&file.path, flipped).unwrap();
            assert_eq!(file.read(), None, "byte {bytes} changed");
        }
        fs::write(&file.path, [&whole[..], b"more"].concat()).unwrap();
        assert_eq!(file.read(), None);
        file.write(b"binary");
        assert_eq!(file.read(), Some(b"binary".to_vec()));
        assert_eq!(
            fs::read_dir(&folder).unwrap().count(),
            1,
            "nothing unfinished is left"
        );
        fs::remove_dir_all(&folder).unwrap();
        // A folder that cannot be made is no error.
        KernelFile::within(Path::new("/proc/none"), "", &[], "").write(b"");
    }
}
