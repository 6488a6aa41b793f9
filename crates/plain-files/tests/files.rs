//! Every kind of file at every function, and writing that is interrupted.
#![allow(clippy::disallowed_methods, clippy::unwrap_used)]

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use plain_files::{Cause, NewFile, open, open_no_link, read, read_text, write_whole};

struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let name = format!("plain-files-{name}-{}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        fs::create_dir_all(&folder).unwrap();
        Self(folder)
    }

    fn file(&self, name: &str, content: &[u8]) -> PathBuf {
        let path = self.0.join(name);
        fs::write(&path, content).unwrap();
        path
    }

    fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(&self.0).unwrap();
        let mut names: Vec<_> = entries
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).ok();
    }
}

#[cfg(unix)]
fn make_pipe(path: &std::path::Path) {
    let made = std::process::Command::new("mkfifo").arg(path).status();
    assert!(made.unwrap().success());
}

#[cfg(unix)]
#[test]
fn no_irregular_file_is_opened_or_waited_for() {
    use std::os::unix::fs::symlink;
    let folder = Folder::new("kinds");
    let path = |name: &str| folder.0.join(name);
    make_pipe(&path("pipe"));
    let _socket = std::os::unix::net::UnixListener::bind(path("socket")).unwrap();
    fs::create_dir(path("folder")).unwrap();
    symlink("/dev/zero", path("zero")).unwrap();
    symlink(path("pipe"), path("link-to-pipe")).unwrap();
    let started = Instant::now();
    for name in ["pipe", "socket", "folder", "zero", "link-to-pipe"] {
        let path = path(name);
        let errors = [
            open(&path).unwrap_err(),
            read(&path, u64::MAX).unwrap_err(),
            read_text(&path, 0).unwrap_err(),
        ];
        for error in errors {
            let expected = format!("cannot read {}: it is not a regular file", path.display());
            assert_eq!(error.to_string(), expected);
            assert!(!error.is_missing());
        }
        let error = open_no_link(&path).unwrap_err();
        assert_eq!(
            matches!(error.cause, Cause::Irregular),
            !path.is_symlink(),
            "{error}"
        );
    }
    assert!(started.elapsed() < Duration::from_secs(2));
}

/// A pipe in the place of a file, between the look at its kind and its opening, is neither waited
/// for nor taken for a file.
#[cfg(unix)]
#[test]
fn a_file_that_becomes_a_pipe_is_refused() {
    use std::sync::atomic::{AtomicBool, Ordering};
    let folder = Folder::new("race");
    let (file, pipe) = (folder.file("file", b"text"), folder.0.join("pipe"));
    make_pipe(&pipe);
    let (path, stop) = (folder.0.join("path"), AtomicBool::new(false));
    fs::hard_link(&file, &path).unwrap();
    let next = folder.0.join("next");
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for kind in [&pipe, &file].into_iter().cycle() {
                if stop.load(Ordering::Relaxed) {
                    break;
                }
                fs::hard_link(kind, &next).unwrap();
                fs::rename(&next, &path).unwrap();
                fs::remove_file(&next).ok();
            }
        });
        let mut counts = [0; 2];
        let started = Instant::now();
        while started.elapsed() < Duration::from_secs(20) && counts.iter().min() < Some(&500) {
            match read(&path, 100) {
                Ok(content) => {
                    assert_eq!(content, b"text");
                    counts[0] += 1;
                }
                Err(error) => {
                    assert!(matches!(error.cause, Cause::Irregular), "{error}");
                    counts[1] += 1;
                }
            }
        }
        stop.store(true, Ordering::Relaxed);
        assert!(counts.iter().all(|count| *count > 0), "{counts:?}");
    });
}

#[test]
fn a_limit_counts_bytes_and_is_checked_before_reading() {
    let folder = Folder::new("limit");
    let path = folder.file("ten", &[b'x'; 10]);
    assert_eq!(read(&path, 10).unwrap(), [b'x'; 10]);
    assert_eq!(read_text(&path, u64::MAX).unwrap(), "xxxxxxxxxx");
    let error = read(&path, 9).unwrap_err();
    assert!(matches!(
        error.cause,
        Cause::TooLarge {
            bytes: 10,
            limit_bytes: 9
        }
    ));
    // No memory for it, and no disk either.
    let huge = folder.0.join("huge");
    fs::File::create(&huge).unwrap().set_len(1 << 42).unwrap();
    assert!(
        read(&huge, 1 << 20)
            .unwrap_err()
            .to_string()
            .ends_with("it has 4398046511104 bytes, expected at most 1048576")
    );
}

#[test]
fn missing_files_and_wrong_text_are_told_apart() {
    let folder = Folder::new("told");
    assert!(read(&folder.0.join("none"), 1).unwrap_err().is_missing());
    let path = folder.file("latin", b"caf\xe9");
    let error = read_text(&path, 10).unwrap_err();
    assert!(
        matches!(error.cause, Cause::NotText { offset: 3 }),
        "{error}"
    );
    assert_eq!(error.path, path);
}

#[test]
fn a_file_has_its_name_once_it_is_complete() {
    use std::io::Write as _;
    let folder = Folder::new("whole");
    let path = folder.file("config.json", b"earlier and longer");
    let mut dropped = NewFile::create(&path).unwrap();
    dropped.write_all(b"half").unwrap();
    assert_eq!(folder.names(), ["config.json", "config.json.partial"]);
    drop(dropped);
    assert_eq!(fs::read(&path).unwrap(), b"earlier and longer");
    // The partial file of a process that was killed.
    folder.file("config.json.partial", b"half");
    write_whole(&path, b"new").unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"new");
    assert_eq!(folder.names(), ["config.json"]);
    let error = write_whole(&folder.0.join("none/file"), b"").unwrap_err();
    assert_eq!((error.action, error.is_missing()), ("write", true));
}

#[cfg(unix)]
#[test]
fn nothing_is_written_through_a_link() {
    let folder = Folder::new("link");
    let victim = folder.file("victim", b"kept");
    std::os::unix::fs::symlink(&victim, folder.0.join("new.partial")).unwrap();
    write_whole(&folder.0.join("new"), b"new").unwrap();
    assert_eq!(fs::read(&victim).unwrap(), b"kept");
    assert_eq!(folder.names(), ["new", "victim"]);
}
