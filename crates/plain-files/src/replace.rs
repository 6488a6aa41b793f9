//! Files that a user names for results: replaced whole or not at all, through links, with their
//! permissions.

use std::ffi::OsString;
use std::fs::{self, File};
use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};

use crate::error::{FileError, Result};

/// Writes a file of results. An earlier one keeps its content until the new one is complete, and its
/// permissions; a link leads to the same file as before; a pipe or device is written to.
///
/// # Errors
/// [`Cause::System`](crate::Cause::System); the earlier file is as it was then.
pub fn replace(path: &Path, content: &[u8]) -> Result<()> {
    replace_target(path, content).map_err(FileError::of("write", path))
}

fn replace_target(path: &Path, content: &[u8]) -> io::Result<()> {
    // Replaces the target of a link, not the link.
    let target = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let earlier = target.metadata().ok();
    if earlier.as_ref().is_some_and(|earlier| !earlier.is_file()) {
        // A pipe or a device keeps nothing that could be lost.
        return fs::write(&target, content);
    }
    let partial = partial(&target);
    let written = File::create_new(&partial).and_then(|mut file| {
        file.write_all(content)?;
        if let Some(earlier) = &earlier {
            file.set_permissions(earlier.permissions())?;
        }
        drop(file);
        fs::rename(&partial, &target)
    });
    match written {
        // A folder that takes no new files, or a file system without their permissions.
        Err(error) if error.kind() == ErrorKind::PermissionDenied => {
            fs::remove_file(&partial).ok();
            fs::write(&target, content)
        }
        Err(error) => {
            fs::remove_file(&partial).ok();
            Err(error)
        }
        Ok(()) => Ok(()),
    }
}

/// Gives a file the permissions of any new file in its folder: a library that writes through a
/// temporary file leaves it to its owner alone.
///
/// # Errors
/// [`Cause::System`](crate::Cause::System)
pub fn share(path: &Path) -> Result<()> {
    let partial = partial(path);
    let shared = || {
        let permissions = File::create_new(&partial)?.metadata()?.permissions();
        fs::remove_file(&partial)?;
        fs::set_permissions(path, permissions)
    };
    shared().map_err(FileError::of("write", path))
}

/// Where the content is written before it has its name: a name that nobody can have put a link at,
/// and that no other process writes to.
fn partial(target: &Path) -> PathBuf {
    let random = RandomState::new().build_hasher().finish();
    let mut name = OsString::from(".");
    name.push(target.file_name().unwrap_or_default());
    name.push(format!(".{random:016x}.partial"));
    target.with_file_name(name)
}

/// True if two paths name one file, so that writing one loses the other. Pipes and devices take
/// both.
#[must_use]
pub fn is_same(a: &Path, b: &Path) -> bool {
    let is_kept = a.metadata().map_or(true, |found| found.is_file());
    is_kept && identity(a).is_some_and(|a| Some(a) == identity(b))
}

/// The path without links, of a file that need not exist yet.
fn identity(path: &Path) -> Option<PathBuf> {
    path.canonicalize().ok().or_else(|| {
        let folder = path.parent().filter(|folder| *folder != Path::new(""));
        let folder = folder.unwrap_or(Path::new(".")).canonicalize().ok()?;
        Some(folder.join(path.file_name()?))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(name: &str) -> PathBuf {
        let name = format!("mrope-files-{name}-{}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        fs::create_dir_all(&folder).expect("creates");
        folder
    }

    #[test]
    fn a_file_is_replaced_whole_or_stays() {
        let folder = folder("replaced");
        // A name that leaves no room for that of the partial file, which cannot be made.
        let long = folder.join("x".repeat(250));
        fs::write(&long, "earlier and longer").expect("writes");
        replace(&long, b"new").expect_err("a name of more than 255 bytes");
        assert_eq!(fs::read(&long).expect("reads"), b"earlier and longer");
        fs::remove_file(&long).expect("removes");
        let file = folder.join("rows.csv");
        fs::write(&file, "earlier and longer").expect("writes");
        assert_ne!(partial(&file), partial(&file));
        replace(&file, b"new").expect("replaces");
        assert_eq!(fs::read(&file).expect("reads"), b"new");
        replace(&folder.join("other.csv"), b"other").expect("creates");
        assert_eq!(fs::read_dir(&folder).expect("reads").count(), 2);
        fs::remove_dir_all(folder).expect("removes");
    }

    #[cfg(unix)]
    #[test]
    fn a_link_and_the_permissions_stay() {
        use std::os::unix::fs::{PermissionsExt, symlink};
        let folder = folder("link");
        let (file, link) = (folder.join("rows.csv"), folder.join("link.csv"));
        fs::write(&file, "earlier").expect("writes");
        fs::set_permissions(&file, fs::Permissions::from_mode(0o640)).expect("sets");
        symlink(&file, &link).expect("links");
        assert!(is_same(&file, &link));
        replace(&link, b"new").expect("replaces");
        assert!(link.is_symlink());
        assert_eq!(fs::read(&file).expect("reads"), b"new");
        let mode = file.metadata().expect("reads").permissions().mode();
        assert_eq!(mode & 0o777, 0o640);
        fs::remove_dir_all(folder).expect("removes");
    }

    #[cfg(unix)]
    #[test]
    fn a_shared_file_has_the_permissions_of_a_new_one() {
        use std::os::unix::fs::PermissionsExt;
        let folder = folder("shared");
        let (new, shared) = (folder.join("new"), folder.join("model.safetensors"));
        fs::write(&new, "").expect("writes");
        fs::write(&shared, "model").expect("writes");
        fs::set_permissions(&shared, fs::Permissions::from_mode(0o600)).expect("sets");
        share(&shared).expect("shares");
        let mode = |file: &Path| file.metadata().expect("reads").permissions().mode();
        assert_eq!(mode(&shared), mode(&new));
        assert_eq!(fs::read(&shared).expect("reads"), b"model");
        fs::remove_dir_all(folder).expect("removes");
    }

    #[test]
    fn two_spellings_are_one_file_before_it_exists() {
        let folder = folder("spellings");
        let file = folder.join("rows.csv");
        assert!(is_same(&file, &folder.join(".").join("rows.csv")));
        assert!(is_same(Path::new("absent"), Path::new("./absent")));
        assert!(!is_same(&file, &folder.join("rows.svg")));
        if cfg!(unix) {
            assert!(!is_same(Path::new("/dev/null"), Path::new("/dev/null")));
        }
        fs::remove_dir_all(folder).expect("removes");
    }
}
