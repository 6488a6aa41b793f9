//! The model of a run, before its first step.

use std::fs;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{DType, Device, FloatDType, Tensor};
use parking_lot::Mutex;
use vlm_data::Fingerprint;
use vlm_models::{Vlm, VlmConfig};

use super::config::FinetuneConfig;
use crate::error::{Result, VlmTrainError};
use crate::recipe::Recipe;
use crate::trainer::Trainer;

/// Files of a model's folder that hold weights, or say where they are.
const WEIGHTS: [&str; 3] = [".safetensors", ".safetensors.index.json", ".bin"];

/// Bytes that a file of weights is known by: as many pieces as these, evenly spaced.
const PIECES: u64 = 1024;
const PIECE_BYTES: usize = 4096;

/// A number that changes with the configuration, and with weights that were trained anew: of their
/// files it reads a few pieces, not all.
pub(super) fn fingerprint(folder: &Path) -> Result<u64> {
    read(folder).map_err(VlmTrainError::file("read", folder))
}

fn read(folder: &Path) -> io::Result<u64> {
    let mut names = Vec::new();
    for entry in fs::read_dir(folder)? {
        names.extend(entry?.file_name().into_string());
    }
    names.sort();
    let mut hash = Fingerprint::default();
    for name in names {
        if name != "config.json" && !WEIGHTS.iter().any(|end| name.ends_with(end)) {
            continue;
        }
        let mut file = plain_files::open(&folder.join(&name)).map_err(io::Error::other)?;
        let bytes = file.metadata()?.len();
        hash.add(name.as_bytes());
        hash.add(&bytes.to_le_bytes());
        let mut piece = Vec::with_capacity(PIECE_BYTES);
        for index in 0..PIECES {
            let last = bytes.saturating_sub(PIECE_BYTES as u64);
            let start = u128::from(last) * u128::from(index) / u128::from(PIECES - 1);
            file.seek(SeekFrom::Start(start as u64))?;
            piece.clear();
            (&mut file)
                .take(PIECE_BYTES as u64)
                .read_to_end(&mut piece)?;
            hash.add(&piece);
        }
    }
    Ok(hash.value())
}

/// A trainer of the model, from its adapter if the options name one; with stand-ins for weights that
/// ranks read in parts.
pub(super) fn trainer(
    options: &FinetuneConfig,
    config: &VlmConfig,
    recipe: Recipe,
    (device, in_parts): (&Device, bool),
) -> Result<Trainer> {
    let mut model = load(options, config, (device, in_parts))?;
    let Some(folder) = &options.trained.adapter else {
        return Trainer::new(model, recipe);
    };
    if options.trained.any_base {
        model = model.of_any_base();
    }
    Trainer::from_adapter(model, recipe, folder)
}

/// The model in its precision, on a device that it configures.
fn load(
    options: &FinetuneConfig,
    config: &VlmConfig,
    (device, in_parts): (&Device, bool),
) -> Result<Vlm> {
    // Ranks draw one after the other: the host has one generator.
    static DRAWING: Mutex<()> = Mutex::new(());
    let mut device = device.clone();
    // Drawn on the host, whose generator is the same everywhere.
    let mut host = Device::flex();
    if options.dtype() != DType::F32 {
        configure(&mut device, options.dtype())?;
        if options.trained.random_weights {
            configure(&mut host, options.dtype())?;
        }
    }
    if !options.trained.random_weights {
        let (folder, device) = (&options.folder, device.autodiff());
        return Ok(match in_parts {
            true => config.load_stand_ins(folder, &device)?,
            false => config.load(folder, &device)?,
        });
    }
    let _alone = DRAWING.lock();
    host.seed(options.optimizer.seed);
    let model = config.init(&host)?.map(&mut DrawWeights::default());
    Ok(model.fork(&device).train())
}

/// Makes `dtype` the type of new tensors on a device, which burn takes once: other ranks on the device
/// ask for the same.
fn configure(device: &mut Device, dtype: DType) -> Result<()> {
    let dtype = FloatDType::from(dtype);
    match device.configure(dtype) {
        Err(_) if device.settings().float_dtype == dtype => Ok(()),
        configured => configured.map_err(|error| {
            VlmTrainError::Options(format!("the device computes nothing in {dtype:?}: {error}"))
        }),
    }
}

/// Draws the weights now; otherwise each is drawn at first use, in an order that the first forward
/// pass decides. Word embeddings, which may also be the head, are made as small as transformers
/// draws them, or the first losses would be far above those of a guess.
#[derive(Default)]
struct DrawWeights {
    is_table: bool,
}

impl ModuleMapper for DrawWeights {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.is_table = name == "embed_tokens" || (self.is_table && name == "weight");
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let scale = if self.is_table { 0.02 } else { 1.0 };
        param.map(|drawn| drawn * scale)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changed_weights_are_noticed_and_other_files_are_not() {
        let folder = std::env::temp_dir().join(format!("mrope-weights-{}", std::process::id()));
        fs::create_dir_all(&folder).expect("a folder");
        let write = |name: &str, content: &[u8]| {
            fs::write(folder.join(name), content).expect("a file");
            fingerprint(&folder).expect("a number")
        };
        let mut weights = vec![7_u8; 100_000];
        write("config.json", b"{}");
        let first = write("model.safetensors", &weights);
        assert_eq!(write("chat_template.jinja", b"{{ messages }}"), first);
        weights[77_777] = 8;
        let second = write("model.safetensors", &weights);
        assert_ne!(second, first);
        assert_ne!(write("config.json", b"{ }"), second);
        fs::remove_dir_all(&folder).expect("removes");
    }
}
