//! Merges adapters into their weights, from files to files.
//!
//! A merged checkpoint has the files of its base, byte for byte except for the elements of adapted
//! weights: a shard is copied in byte order, with only some rows of a weight in memory at a time.
//! The sum W + s B A is computed in f32 in PEFT's order of operations and rounded once, to the
//! weight's type. A weight trained whole replaces the base's.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::ErrorKind;
use std::ops::AddAssign;
use std::path::{Path, PathBuf};

use burn::tensor::{DType, Device, Element, Tensor, TensorData};

use crate::config::VlmConfig;
use crate::error::{Result, VlmError};
use crate::file::{self, Sink, TensorFile};
use crate::linear::adapter_dtype;
use crate::load::{Found, INDEX, Kind, Part, SINGLE, Weights, fingerprint, weights};
use crate::model::{HEAD, TABLE};
use crate::peft::AdapterFile;
use crate::streamed::{OpenAdapter, Streamed, logits_allowed};

/// Bytes copied at a time, and bytes of the rows of a weight in memory, in f32.
const PIECE_BYTES: usize = 16 << 20;
/// The file without which no folder can be loaded, so it is written last.
const CONFIG: &str = "config.json";
/// A file that marks an incomplete folder. A folder with it and without a configuration was
/// interrupted.
const MARK: &str = ".mrope-partial";
/// Prefixes and suffixes of files that hold or index weights. The base's files are not the merged
/// model's, and transformers loads an adapter stored beside weights.
const ADAPTER: &str = "adapter_";
const WEIGHTS: [&str; 6] = [
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".gguf",
    ".index.json",
];

/// Adapters and their base checkpoint, with only names and shapes read so far.
#[derive(Debug)]
pub struct Merge {
    config: VlmConfig,
    base: PathBuf,
    device: Device,
    /// The base's, and one of each adapter.
    files: Vec<Weights>,
    /// The base's tensors.
    found: BTreeMap<String, Found>,
    /// The tensors of the adapters that replace those of the same parameters.
    replaced: BTreeMap<String, Found>,
    changed: Vec<Changed>,
    adapters: Vec<OpenAdapter>,
}

/// A tensor of the base that changes.
#[derive(Clone, Debug)]
struct Changed {
    /// Its parameter, or the one of which it is a part.
    path: String,
    found: Found,
    /// The number of matrices in it, the first of which is this one of its parameter.
    matrices: usize,
    first: usize,
    /// The row of that matrix with which it begins.
    row: usize,
    /// True if its matrices are transposed in the file.
    is_swapped: bool,
}

/// A merged weight.
#[derive(Clone, Debug, PartialEq)]
pub struct MergedTensor {
    /// Its name in the checkpoint.
    pub name: String,
    /// Its type there.
    pub dtype: DType,
    /// The root mean square of the change by the adapters, per element.
    pub change: f64,
    /// The largest difference between a stored element and the exact sum.
    pub rounding: f64,
    /// The L2 norm of these differences relative to the L2 norm of the change: 1 means that
    /// rounding is as large as the adapter's effect.
    pub lost: f64,
}

/// Comparison of logits over a small prompt with a picture, for part of the vocabulary.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MergeCheck {
    /// The largest magnitude of the logits of the base with its adapters.
    pub largest: f64,
    /// The largest difference between the base with its adapters and the base.
    pub effect: f64,
    /// The largest difference between the base with its adapters and the merged model.
    pub difference: f64,
}

impl Merge {
    /// Opens a checkpoint folder and adapters in PEFT's files, each with a factor on its effect; 1
    /// means the adapter as trained. Products are computed on `device`.
    ///
    /// An adapter with weights trained whole has the factor 1, and no other adapter changes these.
    /// With `any_base`, an adapter that records a different checkpoint is accepted; names and
    /// shapes must still match.
    ///
    /// # Errors
    /// Those of [`VlmConfig::from_folder`], [`VlmConfig::load`] and
    /// [`Vlm::load_adapter`](crate::Vlm::load_adapter); [`VlmError::OtherBase`];
    /// [`VlmError::Unsupported`] if a factor is 0 or not finite, or a weight trained whole is changed
    /// otherwise too.
    pub fn open(
        base: impl AsRef<Path>,
        adapters: &[(PathBuf, f64)],
        any_base: bool,
        device: &Device,
    ) -> Result<Self> {
        let base = base.as_ref();
        let config = VlmConfig::from_folder(base)?;
        let files = weights(base)?;
        let found = config.found(&files)?;
        let mut model = config.init(device)?;
        let uses = model.plan(Kind::Base, &found)?;
        let base_print = (!any_base)
            .then(|| fingerprint(&files, &found))
            .transpose()?;
        let mut merge = Self {
            base: base.to_owned(),
            device: device.clone(),
            config,
            files,
            found: found.clone(),
            replaced: BTreeMap::new(),
            changed: Vec::new(),
            adapters: Vec::new(),
        };
        for (folder, factor) in adapters {
            let file = AdapterFile::open(folder, &mut model)?;
            if let Some(base_print) = base_print {
                file.expect_base(folder, base_print)?;
            }
            merge.add(file, *factor)?;
        }
        model.plan(Kind::Base, &merge.merged())?;
        merge.changed = merge.changed_tensors(&uses)?;
        Ok(merge)
    }

    /// Adds an adapter.
    ///
    /// # Errors
    /// [`VlmError::Unsupported`]
    fn add(&mut self, file: AdapterFile, factor: f64) -> Result<()> {
        let unsupported = |key, found: String, expected| VlmError::Unsupported {
            key,
            found,
            expected,
        };
        if !factor.is_finite() || factor == 0.0 {
            let expected = "a finite number other than 0";
            let key = "the weight of an adapter";
            return Err(unsupported(key, factor.to_string(), expected));
        }
        if factor != 1.0 && !file.whole.is_empty() {
            let key = "the weight of an adapter with modules_to_save";
            return Err(unsupported(key, factor.to_string(), "1"));
        }
        let index = self.files.len();
        let moved = |found: Found| Found {
            file: index,
            ..found
        };
        self.files.push(file.weights);
        for (path, found) in file.whole {
            if let Some(other) = self.replaced.insert(path, moved(found)) {
                let expected = "each of its modules in one adapter";
                return Err(unsupported("modules_to_save", other.name, expected));
            }
        }
        let layers = file.layers.into_iter().map(|(path, halves)| {
            let scale = file.scales[&path] * factor;
            (path, (halves.map(moved), scale))
        });
        self.adapters.push(OpenAdapter {
            layers: layers.collect(),
        });
        let is_adapted = |path: &&String| {
            let layer = path.trim_end_matches(".weight");
            self.adapters
                .iter()
                .any(|adapter| adapter.layers.contains_key(layer))
        };
        match self.replaced.keys().find(is_adapted) {
            Some(path) => {
                let expected = "modules that no other adapter changes";
                Err(unsupported("modules_to_save", path.clone(), expected))
            }
            None => Ok(()),
        }
    }

    /// The base's tensors, with those of the weights trained whole in place of theirs.
    fn merged(&self) -> BTreeMap<String, Found> {
        let mut merged = self.found.clone();
        merged.extend(self.replaced.clone());
        merged
    }

    /// The base's tensors that change. A tied head that is stored beside the word embeddings changes
    /// as these do.
    ///
    /// # Errors
    /// [`VlmError::TensorShape`] for a stored head of another shape.
    fn changed_tensors(&self, uses: &BTreeMap<String, Part<'_>>) -> Result<Vec<Changed>> {
        let is_changed = |(path, _): &(&String, &Part<'_>)| {
            let layer = path.trim_end_matches(".weight");
            let has_layer = |adapter: &OpenAdapter| adapter.layers.contains_key(layer);
            self.replaced.contains_key(*path) || self.adapters.iter().any(has_layer)
        };
        let mut changed = Vec::new();
        for (path, part) in uses.iter().filter(is_changed) {
            let whole = Changed {
                path: path.clone(),
                found: part.found.clone(),
                matrices: match part.found.stored.shape[..] {
                    [matrices, _, _] => matrices,
                    _ => 1,
                },
                first: 0,
                row: 0,
                is_swapped: part.is_swapped,
            };
            let of_expert = part.found.pieces.len() / whole.matrices;
            if of_expert == 0 {
                changed.push(whole);
            }
            for (index, piece) in part.found.pieces.iter().enumerate() {
                changed.push(Changed {
                    path: path.clone(),
                    found: piece.clone(),
                    matrices: 1,
                    first: index / of_expert,
                    row: index % of_expert * piece.stored.shape[0],
                    is_swapped: false,
                });
            }
        }
        let Some(table) = self.replaced.get(TABLE).filter(|_| self.config.tied) else {
            return Ok(changed);
        };
        let expected = [table.stored.shape[0], table.stored.shape[1]];
        for (file, weights) in self.files.iter().enumerate() {
            if let Some(stored) = weights.tensors.get(HEAD) {
                let head = Found::new(HEAD.to_owned(), file, stored.clone());
                head.expect(&expected)?;
                changed.push(Changed {
                    path: TABLE.to_owned(),
                    found: head,
                    matrices: 1,
                    first: 0,
                    row: 0,
                    is_swapped: false,
                });
            }
        }
        Ok(changed)
    }

    /// Writes the merged checkpoint into a new folder and calls `each` after every merged weight.
    ///
    /// Weights are first written to a temporary folder beside it. The folder gets its name when
    /// they are on disk and their logits match those of the base with its adapters. `config.json`
    /// is written last, so an interrupted folder cannot be loaded. The next merge into the same
    /// name removes it.
    ///
    /// # Errors
    /// [`VlmError::File`]; [`VlmError::NotFinite`], [`VlmError::MergeDiffers`];
    /// [`VlmError::Transfer`] if the device fails. After an error, no folder is left.
    pub fn write(
        &self,
        out: impl AsRef<Path>,
        each: &mut dyn FnMut(&MergedTensor),
    ) -> Result<MergeCheck> {
        let out = out.as_ref();
        if out.join(MARK).exists() && !out.join(CONFIG).exists() {
            fs::remove_dir_all(out).map_err(VlmError::file("remove", out))?;
        }
        if out.symlink_metadata().is_ok() {
            let reason = "it exists; choose another name, or remove it";
            return Err(VlmError::file("create", out)(reason));
        }
        let partial = Partial::create(out)?;
        let shards = self.files.len() - self.adapters.len();
        for (index, file) in self.files[..shards].iter().enumerate() {
            self.write_shard(index, file, &partial.path, each)?;
        }
        self.copy_others(&partial.path)?;
        let check = self.check(&partial.path)?;
        let config = self.base.join(CONFIG);
        let config = file::text(&config)?;
        partial.commit(out)?;
        plain_files::write_whole(&out.join(CONFIG), config.as_bytes())?;
        let mark = out.join(MARK);
        fs::remove_file(&mark).map_err(VlmError::file("remove", &mark))?;
        Ok(check)
    }

    /// Copies a file of weights and adds the adapters.
    fn write_shard(
        &self,
        index: usize,
        file: &Weights,
        folder: &Path,
        each: &mut dyn FnMut(&MergedTensor),
    ) -> Result<()> {
        let source = &file.source;
        let name = source.path().strip_prefix(&self.base);
        let path = folder.join(name.unwrap_or(source.path()));
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent).map_err(VlmError::file("create", parent))?;
        }
        let changed = self.changed.iter().filter(|part| part.found.file == index);
        let mut changed: Vec<&Changed> = changed.collect();
        changed.sort_by_key(|part| part.found.stored.bytes().start);
        let mut sink = Sink::begin(&path)?;
        let mut done = 0;
        for part in changed {
            let bytes = part.found.stored.bytes();
            copy(source, done..bytes.start, &mut sink)?;
            each(&match self.replaced.get(&part.path) {
                Some(new) => self.write_whole(new, part, source, &mut sink)?,
                None => self.write_sum(part, source, &mut sink)?,
            });
            done = bytes.end;
        }
        let tensors = source.tensors();
        let end = tensors.values().map(|tensor| tensor.bytes().end).max();
        copy(source, done..end.unwrap_or(source.start()), &mut sink)?;
        sink.commit()
    }

    /// Writes the sum of a weight and its adapters.
    fn write_sum(
        &self,
        part: &Changed,
        source: &TensorFile,
        sink: &mut Sink,
    ) -> Result<MergedTensor> {
        let (name, stored) = (&part.found.name, &part.found.stored);
        // A float of two dimensions or three, as checked by the plan of the model.
        let dtype = stored.dtype().unwrap_or(DType::F32);
        let [rows, columns] = match stored.shape[..] {
            [rows, columns] | [_, rows, columns] => [rows, columns],
            _ => [1, stored.elements()],
        };
        let wide = adapter_dtype(dtype);
        let layer = part.path.trim_end_matches(".weight");
        let products = self
            .adapters
            .iter()
            .filter_map(|adapter| adapter.halves(layer, &self.files, (&self.device, wide)));
        let products: Vec<(Tensor<2>, Tensor<2>, f64)> = products.collect::<Result<_>>()?;
        let step = (PIECE_BYTES / (columns * wide.size()).max(1)).max(1);
        let mut sums = Sums::default();
        for matrix in 0..part.matrices {
            let factors: Vec<[Tensor<2>; 2]> = products
                .iter()
                .map(|(a, b, _)| self.factors(part, matrix, [a, b]))
                .collect();
            for first in (0..rows).step_by(step) {
                let end = (first + step).min(rows);
                let start = matrix * rows;
                let elements = (start + first) * columns..(start + end) * columns;
                let weight = source.read(stored, dtype, elements)?;
                let mut changes = Vec::with_capacity(products.len());
                for ([left, right], (_, _, scale)) in factors.iter().zip(&products) {
                    let rows = left.clone().narrow(0, first, end - first);
                    let change = (rows.matmul(right.clone()) * *scale).try_into_data();
                    changes.push(change.map_err(|error| {
                        let name = name.clone();
                        let reason = error.to_string();
                        VlmError::TensorUnreadable { name, reason }
                    })?);
                }
                let rounded = match wide {
                    DType::F64 => sums.add::<f64>(weight, &changes, dtype),
                    _ => sums.add::<f32>(weight, &changes, dtype),
                };
                sink.write(rounded.bytes())?;
            }
        }
        sums.of(name, stored.elements(), dtype)
    }

    /// The factors of an adapter's product for a matrix of a tensor, in its order in the file.
    fn factors(&self, part: &Changed, matrix: usize, [a, b]: [&Tensor<2>; 2]) -> [Tensor<2>; 2] {
        let experts = self.experts_of(&part.path);
        let ([rows, inputs], [outputs, _]) = (a.dims(), b.dims());
        let (rank, expert) = (rows / experts, part.first + matrix);
        let a = a.clone().narrow(0, expert * rank, rank);
        let b = b.clone().reshape([outputs, rank, experts]);
        let b = b.narrow(2, expert, 1).reshape([outputs, rank]);
        match part.is_swapped {
            true => [a.transpose(), b.transpose()],
            false => {
                let rows = part.found.stored.shape.iter().rev().nth(1);
                let rows = *rows.unwrap_or(&outputs);
                [b.narrow(0, part.row, rows), a.reshape([rank, inputs])]
            }
        }
    }

    /// The number of matrices of a parameter.
    fn experts_of(&self, path: &str) -> usize {
        match self.found[path].stored.shape[..] {
            [experts, _, _] => experts,
            _ => 1,
        }
    }

    /// Writes a weight trained whole, in the type of the base's.
    fn write_whole(
        &self,
        new: &Found,
        part: &Changed,
        source: &TensorFile,
        sink: &mut Sink,
    ) -> Result<MergedTensor> {
        let found = &part.found;
        let (dtype, from) = (found.float()?, new.float()?);
        let (elements, step) = (found.stored.elements(), PIECE_BYTES / size_of::<f32>());
        let (shape, columns) = (
            &self.found[&part.path].stored.shape,
            found.stored.shape.last(),
        );
        // The elements before those of the part.
        let rows = part.first * shape.iter().rev().nth(1).unwrap_or(&1) + part.row;
        let before = rows * columns.unwrap_or(&1);
        let mut sums = Sums::default();
        for first in (0..elements).step_by(step) {
            let part = first..(first + step).min(elements);
            let old = source.read(&found.stored, dtype, part.clone())?;
            let part = before + part.start..before + part.end;
            let exact = match new.stored.shape == *shape {
                true => new.read(&self.files, from, part)?,
                false => new.read_swapped(&self.files, from, part)?,
            };
            let rounded = exact.clone().convert_dtype(dtype);
            sums.replace(&old, &exact, &rounded);
            sink.write(rounded.bytes())?;
        }
        sums.of(&found.name, elements, dtype)
    }

    /// Copies the other files of the folder, without weights and the configuration.
    fn copy_others(&self, folder: &Path) -> Result<()> {
        let failed = || VlmError::file("read", &self.base);
        let sharded = self.files.iter().any(|file| {
            let name = file.source.path().file_name();
            name.is_some_and(|name| name != SINGLE)
        });
        for entry in fs::read_dir(&self.base).map_err(failed())? {
            let path = entry.map_err(failed())?.path();
            let Some(name) = path.file_name().and_then(|name| name.to_str()) else {
                continue;
            };
            let is_index = sharded && name == INDEX;
            let is_weights = WEIGHTS.iter().any(|end| name.ends_with(end)) && !is_index;
            let is_own = [CONFIG, MARK].contains(&name);
            if is_weights || name.starts_with(ADAPTER) || is_own || !path.is_file() {
                continue;
            }
            let copied = fs::copy(&path, folder.join(name)).and_then(|_| {
                let copy = plain_files::open(&folder.join(name)).map_err(|error| error.cause)?;
                copy.sync_all()
            });
            copied.map_err(VlmError::file("copy", &path))?;
        }
        Ok(())
    }

    /// Compares logits of the written files with those of the base and its adapters.
    fn check(&self, folder: &Path) -> Result<MergeCheck> {
        let device = &self.device;
        let plain = Streamed::new(&self.config, &self.files, &self.found, device)?.logits(&[])?;
        let found = self.merged();
        let adapted = Streamed::new(&self.config, &self.files, &found, device)?;
        let adapted = adapted.logits(&self.adapters)?;
        if !adapted.iter().all(|logit| logit.is_finite()) {
            let (name, dtype) = ("logits".to_owned(), DType::F32);
            return Err(VlmError::NotFinite { name, dtype });
        }
        let files = weights(folder)?;
        let found = self.config.found(&files)?;
        let merged = Streamed::new(&self.config, &files, &found, device)?.logits(&[])?;
        let apart = |others: &[f64]| {
            let pairs = adapted.iter().zip(others);
            // NaN counts as the largest.
            pairs.fold(0.0_f64, |most, (left, right)| {
                let apart = (left - right).abs();
                if apart <= most { most } else { apart }
            })
        };
        let check = MergeCheck {
            largest: adapted
                .iter()
                .fold(0.0, |most, logit| most.max(logit.abs())),
            effect: apart(&plain),
            difference: apart(&merged),
        };
        let types = found.values().filter_map(|found| found.stored.dtype());
        let allowed = types.map(logits_allowed).fold(0.0, f64::max) * check.largest;
        // NaN is not within.
        if check.difference <= allowed {
            return Ok(check);
        }
        Err(VlmError::MergeDiffers {
            difference: check.difference,
            allowed,
        })
    }
}

/// Copies bytes of a file.
fn copy(source: &TensorFile, bytes: std::ops::Range<u64>, sink: &mut Sink) -> Result<()> {
    let mut start = bytes.start;
    while start < bytes.end {
        let end = bytes.end.min(start + PIECE_BYTES as u64);
        sink.write(&source.bytes(start..end)?)?;
        start = end;
    }
    Ok(())
}

/// Sums over the changes of a weight and their rounding, in f64.
struct Sums {
    change: f64,
    rounding: f64,
    largest: f64,
    is_finite: bool,
}

impl Default for Sums {
    fn default() -> Self {
        Self {
            change: 0.0,
            rounding: 0.0,
            largest: 0.0,
            is_finite: true,
        }
    }
}

impl Sums {
    /// Adds changes to some rows of a weight, one after the other, and rounds once.
    fn add<E: Element + Copy + AddAssign + Into<f64>>(
        &mut self,
        weight: TensorData,
        changes: &[TensorData],
        dtype: DType,
    ) -> TensorData {
        let unreachable = "the type was converted to";
        let mut sum = weight.convert_dtype(E::dtype());
        let mut exact: Vec<f64> = sum.iter::<f64>().collect();
        let mut change = vec![0.0_f64; exact.len()];
        for term in changes {
            let term = term.as_slice::<E>().expect(unreachable);
            let sums = sum.as_mut_slice::<E>().expect(unreachable);
            for (((sum, change), exact), term) in
                sums.iter_mut().zip(&mut change).zip(&mut exact).zip(term)
            {
                *sum += *term;
                *change += (*term).into();
                *exact += (*term).into();
            }
        }
        let rounded = sum.convert_dtype(dtype);
        let stored = rounded.clone().convert_dtype(E::dtype());
        let stored = stored.as_slice::<E>().expect(unreachable);
        for ((stored, exact), change) in stored.iter().zip(&exact).zip(&change) {
            let apart = ((*stored).into() - exact).abs();
            self.is_finite &= apart.is_finite();
            self.largest = self.largest.max(apart);
            self.rounding += apart * apart;
            self.change += change * change;
        }
        rounded
    }

    /// Adds the change of part of a weight to new elements, which are then rounded.
    fn replace(&mut self, old: &TensorData, exact: &TensorData, rounded: &TensorData) {
        let elements = old.iter::<f64>().zip(exact.iter::<f64>());
        for ((old, exact), stored) in elements.zip(rounded.iter::<f64>()) {
            let apart = (stored - exact).abs();
            self.is_finite &= apart.is_finite();
            self.largest = self.largest.max(apart);
            self.rounding += apart * apart;
            self.change += (exact - old) * (exact - old);
        }
    }

    /// The report on a weight of so many elements.
    ///
    /// # Errors
    /// [`VlmError::NotFinite`]
    fn of(self, name: &str, elements: usize, dtype: DType) -> Result<MergedTensor> {
        let name = name.to_owned();
        if !self.is_finite {
            return Err(VlmError::NotFinite { name, dtype });
        }
        Ok(MergedTensor {
            name,
            dtype,
            change: (self.change / elements.max(1) as f64).sqrt(),
            rounding: self.largest,
            lost: (self.rounding / self.change.max(f64::MIN_POSITIVE)).sqrt(),
        })
    }
}

/// An incomplete folder, removed on drop unless committed.
struct Partial {
    path: PathBuf,
}

impl Partial {
    /// Creates a folder beside `out`. Remains of an earlier merge into the same name are removed.
    fn create(out: &Path) -> Result<Self> {
        let mut name = OsString::from(".");
        name.push(out.file_name().unwrap_or_default());
        name.push(MARK);
        let path = out.with_file_name(name);
        fs::remove_dir_all(&path)
            .or_else(|error| match error.kind() {
                ErrorKind::NotFound => Ok(()),
                _ => Err(error),
            })
            .map_err(VlmError::file("remove", &path))?;
        fs::create_dir_all(&path).map_err(VlmError::file("create", &path))?;
        let partial = Self { path };
        let mark = partial.path.join(MARK);
        File::create(&mark).map_err(VlmError::file("create", &mark))?;
        Ok(partial)
    }

    /// Gives the folder its name.
    fn commit(self, out: &Path) -> Result<()> {
        plain_files::sync_folder(&self.path)?;
        fs::rename(&self.path, out).map_err(VlmError::file("rename", out))
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        // Gone already if it was renamed.
        let _gone = fs::remove_dir_all(&self.path);
    }
}
