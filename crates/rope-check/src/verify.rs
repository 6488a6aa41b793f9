//! Golden files and models' folders, compared with engines: the work of `mrope verify`.

use std::error::Error;
use std::io;
use std::path::{Path, PathBuf};

use rope_core::InstructionSet;
use serde::Serialize;

use crate::buffer::DType;
use crate::engine::Engine;
use crate::golden::{Artifact, GoldenError, Row};
use crate::model::{Report, is_model_folder};

/// The engines that a name selects.
pub enum Engines {
    /// For each element type, the widest kernel that has it.
    Best(Vec<Box<dyn Engine>>),
    /// All of them.
    Named(Vec<Box<dyn Engine>>),
}

impl Engines {
    /// Selects engines: `best`, `all`, or a part of their names.
    ///
    /// # Errors
    /// If none has that name; the message lists them.
    pub fn named(mut engines: Vec<Box<dyn Engine>>, name: &str) -> Result<Self, String> {
        if name == "all" {
            return Ok(Self::Named(engines));
        }
        if name == "best" {
            let widest = format!("cpu/{}", InstructionSet::best());
            engines.sort_by_key(|engine| engine.name() != widest);
            return Ok(Self::Best(engines));
        }
        let names: Vec<String> = engines.iter().map(|engine| engine.name()).collect();
        let is_part = |whole: &str| {
            let parts: Vec<&str> = whole.split('/').collect();
            name.split(['/', '-']).all(|part| parts.contains(&part))
        };
        match engines.iter().position(|engine| engine.name() == name) {
            Some(exact) => engines = vec![engines.swap_remove(exact)],
            None => engines.retain(|engine| is_part(&engine.name())),
        }
        if engines.is_empty() {
            let names = names.join(", ");
            return Err(format!(
                "no engine {name:?} on this machine; expected best, all or a part of {names}"
            ));
        }
        Ok(Self::Named(engines))
    }

    /// The selected engines that have a type.
    fn of(&self, dtype: DType) -> impl Iterator<Item = &dyn Engine> {
        let (engines, count) = match self {
            Self::Best(engines) => (engines, 1),
            Self::Named(engines) => (engines, usize::MAX),
        };
        let supporting = engines.iter().filter(move |engine| engine.supports(dtype));
        supporting.map(|engine| &**engine).take(count)
    }
}

/// The outcome for one file.
pub struct Outcome {
    /// Its path.
    pub file: String,
    /// The comparisons.
    pub result: Result<Vec<Row>, Box<dyn Error>>,
    /// Why it, or a part of it, was not compared.
    pub skipped: Option<String>,
    /// The comparisons that known limits of engines or element types rule out.
    pub refused: Vec<Refused>,
    /// Rows that an engine or a model computed.
    pub rotated: usize,
}

/// A comparison that the limits of an engine or of an element type rule out.
#[derive(Clone, Debug, Serialize)]
pub struct Refused {
    /// The element type.
    pub dtype: DType,
    /// The engine's name.
    pub engine: String,
    /// The limit.
    pub skipped: String,
}

impl Outcome {
    /// The outcome for a path that cannot be read.
    pub fn unreadable(path: &Path, error: io::Error) -> Self {
        let error = GoldenError::from(error);
        let expected = "expected a golden file, or a folder of them or of a model";
        Self {
            file: path.display().to_string(),
            result: Err(format!("{error}; {expected}").into()),
            skipped: None,
            refused: Vec::new(),
            rotated: 0,
        }
    }
}

/// Compares a model's folder with its outputs.
pub type CompareModel<'a> = dyn Fn(&Path) -> Result<Report, Box<dyn Error>> + 'a;

/// Compares a golden file by engines, or a model's folder by `compare_model`. `in_folder` is true for
/// a path that was found in a folder, where other files are skipped.
pub fn verify(
    path: &Path,
    engines: &Engines,
    compare_model: &CompareModel<'_>,
    in_folder: bool,
) -> Outcome {
    let (mut skipped, mut refused, mut rotated) = (None, Vec::new(), 0);
    let rows = || -> Result<Vec<Row>, Box<dyn Error>> {
        if in_folder && is_linked_folder(path) {
            skipped = Some("a link to a folder, which is not followed".to_owned());
            return Ok(Vec::new());
        }
        if path.is_dir() {
            let report = compare_model(path)?;
            skipped = report.skipped;
            rotated += report.computed;
            return Ok(report.rows);
        }
        Ok(match Artifact::open(path)? {
            Artifact::Tables(tables) => tables.compare()?,
            Artifact::Prompts(prompts) => prompts.compare()?,
            Artifact::Vectors(vectors) => {
                let mut rows = vectors.lost_gradients();
                rows.extend(vectors.compare_angles()?);
                for dtype in DType::ALL {
                    for engine in engines.of(dtype) {
                        match vectors.compare(engine, dtype) {
                            Ok(compared) => {
                                rotated += compared.len();
                                rows.extend(compared);
                            }
                            Err(error) => refused.push(Refused {
                                dtype,
                                engine: engine.name(),
                                skipped: error.limit().ok_or(error)?,
                            }),
                        }
                    }
                }
                vectors.explain(&mut rows);
                rows
            }
            Artifact::Other { reason } if in_folder => {
                skipped = Some(reason.to_owned());
                Vec::new()
            }
            Artifact::Other { reason } => return Err(GoldenError::NotGolden { reason }.into()),
        })
    };
    Outcome {
        file: path.display().to_string(),
        result: { rows }(),
        skipped,
        refused,
        rotated,
    }
}

/// A path that cannot be read, with the reason.
pub type Unreadable = (PathBuf, io::Error);

/// The files and model folders under a path, sorted, to any depth, and the links to folders, which
/// are not followed.
pub fn files(path: &Path) -> Vec<Result<PathBuf, Unreadable>> {
    if let Err(error) = path.metadata() {
        return vec![Err((path.to_owned(), error))];
    }
    if !path.is_dir() || is_model_folder(path) {
        return vec![Ok(path.to_owned())];
    }
    let read = || {
        let entries = path.read_dir()?.collect::<io::Result<Vec<_>>>()?;
        let mut paths: Vec<_> = entries.into_iter().map(|entry| entry.path()).collect();
        paths.sort();
        Ok(paths)
    };
    let inner = |path: PathBuf| match is_linked_folder(&path) {
        true => vec![Ok(path)],
        false => files(&path),
    };
    match read() {
        Err(error) => vec![Err((path.to_owned(), error))],
        Ok(paths) => paths.into_iter().flat_map(inner).collect(),
    }
}

fn is_linked_folder(path: &Path) -> bool {
    path.is_symlink() && path.is_dir()
}

/// Counts over outcomes.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tally {
    /// Files with comparisons.
    pub files: usize,
    /// Comparisons.
    pub rows: usize,
    /// Comparisons out of tolerance.
    pub failed: usize,
    /// Files that could not be verified.
    pub unreadable: usize,
    /// Files that were skipped, or a part of which was.
    pub skipped: usize,
    /// Comparisons that limits ruled out.
    pub refused: usize,
    /// Comparisons that an engine or a model computed.
    pub rotated: usize,
}

impl Tally {
    /// Adds an outcome.
    pub fn add(&mut self, outcome: &Outcome) {
        self.refused += outcome.refused.len();
        self.rotated += outcome.rotated;
        self.skipped += usize::from(outcome.skipped.is_some());
        match &outcome.result {
            Err(_) => self.unreadable += 1,
            Ok(rows) => {
                self.files += usize::from(!rows.is_empty());
                self.rows += rows.len();
                self.failed += rows.iter().filter(|row| !row.pass).count();
            }
        }
    }
}
