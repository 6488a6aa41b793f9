//! A model folder's settings for pictures.

use std::collections::BTreeSet;
use std::path::Path;

use serde_json::Value;
use vlm_family::{FAMILIES, Family, ProcessorClass, ResizeRule, VisionParts};

use crate::{Result, VlmDataError};

use super::read::in_file;

/// The library whose arithmetic resizes and normalises pictures. The results differ by one level of
/// 255 in few pixels, and in the last bit of all values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Backend {
    /// torchvision on a CPU, the default of transformers since 2025.
    #[default]
    Torchvision,
    /// PIL and NumPy, as in transformers' classes with `Pil` in their name, with Pillow 13: columns
    /// are resized before rows if the number of rows removed is more than twice the number of
    /// columns removed.
    Pil,
    /// The same with Pillow 12.2 and 12.3: columns come first in pictures more than 100 times as high as
    /// wide whose height shrinks.
    Pil12_2,
    /// The same with Pillow before 12.2: rows come first.
    PilBefore12_2,
}

/// The conversion of pictures to patches.
///
/// Fields can be set freely, such as a smaller `max_pixels` for fewer tokens per picture;
/// [`PictureProcessor::new`](super::PictureProcessor::new) validates them.
#[derive(Debug, Clone, PartialEq)]
pub struct PictureConfig {
    /// The rule for the size of a resized picture.
    pub rule: ResizeRule,
    /// Side of a patch in pixels.
    pub patch_size: usize,
    /// Frames per patch; a picture is repeated this number of times.
    pub temporal_patch_size: usize,
    /// Side, in patches, of the square that becomes one token.
    pub merge_size: usize,
    /// The least area of a resized picture in pixels; of all its frames together for GLM.
    pub min_pixels: u64,
    /// The largest area of a resized picture in pixels; of all its frames together for GLM.
    pub max_pixels: u64,
    /// True if pictures are resized; if not, their sides must be multiples of
    /// `patch_size * merge_size`.
    pub resize: bool,
    /// The factor on the levels 0 to 255; `None` leaves them unchanged.
    pub rescale: Option<f64>,
    /// Mean and standard deviation of each colour for the normalisation, in units of the rescaled
    /// levels; `None` disables it.
    pub normalize: Option<[[f64; 3]; 2]>,
    /// The library whose arithmetic is used.
    pub backend: Backend,
}

/// One of the two processors of a folder.
struct Kind {
    class: fn(&'static VisionParts) -> &'static ProcessorClass,
    /// The key in `processor_config.json`.
    nested: &'static str,
    /// Its own files; the first that exists is used.
    files: &'static [&'static str],
    /// The keys under which a file names its class.
    names: &'static [&'static str],
}

const IMAGES: Kind = Kind {
    class: |vision| &vision.pictures,
    nested: "image_processor",
    files: &["preprocessor_config.json"],
    names: &["image_processor_type", "feature_extractor_type"],
};

const VIDEOS: Kind = Kind {
    class: |vision| &vision.videos,
    nested: "video_processor",
    files: &["video_preprocessor_config.json", "preprocessor_config.json"],
    names: &["video_processor_type"],
};

/// PIL's number of bicubic resampling, the only one that the families use.
const BICUBIC: u64 = 3;
/// The size limit of a processor's file, far above any real one.
const MAX_JSON_BYTES: u64 = 16 << 20;

impl PictureConfig {
    /// Returns the configuration with the values of a family's published files; `None` for a family
    /// of text alone.
    pub fn of_family(family: &Family) -> Option<Self> {
        let vision = family.vision.as_ref()?;
        Some(Self {
            rule: vision.pictures.rule,
            patch_size: vision.patch_size,
            temporal_patch_size: 2,
            merge_size: 2,
            min_pixels: vision.limits[0],
            max_pixels: vision.limits[1],
            resize: true,
            rescale: Some(1.0 / 255.0),
            normalize: Some(vision.colours),
            backend: Backend::default(),
        })
    }

    /// Reads the picture configuration of a model folder.
    ///
    /// `image_processor` of `processor_config.json` takes precedence over
    /// `preprocessor_config.json`, as in transformers. If neither names its class, the `model_type`
    /// of `config.json` decides.
    ///
    /// # Errors
    /// [`VlmDataError::NoProcessorFile`] if neither file exists; [`VlmDataError::InFile`] around
    /// the errors of [`PictureConfig::from_json`]
    /// # Source
    /// transformers 5.24.0, `get_image_processor_dict` of image_processing_base.py
    pub fn from_folder(folder: impl AsRef<Path>) -> Result<Self> {
        Self::read_kind(&IMAGES, folder.as_ref())
    }

    /// Reads the video configuration of a model folder.
    ///
    /// The order of precedence is that of transformers: `video_processor` of
    /// `processor_config.json`, then `video_preprocessor_config.json`, then
    /// `preprocessor_config.json`. Limits apply to one frame for Qwen2-VL and Qwen2.5-VL, and to
    /// all frames together for other families.
    ///
    /// # Errors
    /// those of [`PictureConfig::from_folder`]
    /// # Source
    /// transformers 5.24.0, `get_video_processor_dict` of video_processing_utils.py
    pub fn videos_from_folder(folder: impl AsRef<Path>) -> Result<Self> {
        Self::read_kind(&VIDEOS, folder.as_ref())
    }

    fn read_kind(kind: &Kind, folder: &Path) -> Result<Self> {
        let nested = folder.join("processor_config.json");
        let mut found = None;
        if let Some(Value::Object(mut processor)) = read_json(&nested)?
            && let Some(value) = processor.remove(kind.nested)
        {
            found = Some((nested, value));
        }
        for name in kind.files {
            let path = folder.join(name);
            if found.is_none()
                && let Some(value) = read_json(&path)?
            {
                found = Some((path, value));
            }
        }
        let Some((path, value)) = found else {
            return Err(VlmDataError::NoProcessorFile {
                folder: folder.to_owned(),
            });
        };
        let model = match class_name(&value, kind) {
            Some(_) => None,
            None => read_json(&folder.join("config.json"))?,
        };
        let model_type = model
            .as_ref()
            .and_then(|model| model.get("model_type")?.as_str());
        Self::from_value(kind, &value, model_type).map_err(|source| in_file(&path, source))
    }

    /// Reads the text of a `preprocessor_config.json`.
    ///
    /// Areas have two spellings: `min_pixels` and `max_pixels`, or `size.shortest_edge` and
    /// `size.longest_edge`, which are areas despite their names. The first spelling takes
    /// precedence. Omitted keys have the defaults of the class, whose `max_pixels` is a twelfth of
    /// the value in Qwen's published files. `model_type` selects the class if the file does not
    /// name it.
    ///
    /// # Errors
    /// - [`VlmDataError::Json`]: the text is not JSON
    /// - [`VlmDataError::UnknownProcessor`]: the class belongs to no family in [`FAMILIES`](vlm_family::FAMILIES)
    /// - [`VlmDataError::Config`]: a value has the wrong type; the two spellings contradict each
    ///   other for GLM, whose class reads only the second; resampling is not bicubic
    /// # Source
    /// transformers 5.24.0, `__init__` of `Qwen2VLImageProcessor` and `Glm4vImageProcessor`
    pub fn from_json(text: &str, model_type: Option<&str>) -> Result<Self> {
        let value: Value = serde_json::from_str(text).map_err(|error| VlmDataError::Json {
            reason: error.to_string(),
        })?;
        Self::from_value(&IMAGES, &value, model_type)
    }

    fn from_value(kind: &Kind, value: &Value, model_type: Option<&str>) -> Result<Self> {
        let class = class_of(kind, value, model_type)?;
        let [min_pixels, max_pixels] = limits(value, class)?;
        match value.get("resample") {
            None | Some(Value::Null) => {}
            Some(number) if number.as_u64() == Some(BICUBIC) => {}
            Some(found) => return Err(wrong("resample", "3 (bicubic)", found)),
        }
        // For videos: an additional limit per frame, which no published file has.
        match value.get("cap_pixels_per_frame") {
            None | Some(Value::Null | Value::Bool(false)) => {}
            Some(found) => return Err(wrong("cap_pixels_per_frame", "false", found)),
        }
        let rescale = match flag(value, "do_rescale")? {
            true => Some(number(value, "rescale_factor")?.unwrap_or(1.0 / 255.0)),
            false => None,
        };
        let normalize = match flag(value, "do_normalize")? {
            true => Some([
                colours(value, "image_mean")?.unwrap_or(class.colours[0]),
                colours(value, "image_std")?.unwrap_or(class.colours[1]),
            ]),
            false => None,
        };
        Ok(Self {
            rule: class.rule,
            patch_size: count(value, "patch_size")?.unwrap_or(class.patch_size),
            temporal_patch_size: count(value, "temporal_patch_size")?.unwrap_or(2),
            merge_size: count(value, "merge_size")?.unwrap_or(2),
            min_pixels,
            max_pixels,
            resize: flag(value, "do_resize")?,
            rescale,
            normalize,
            backend: Backend::default(),
        })
    }
}

fn wrong(key: &'static str, expected: &'static str, found: &Value) -> VlmDataError {
    VlmDataError::Config {
        key,
        expected,
        found: found.to_string(),
    }
}

/// Reads the family from the `config.json` of a folder.
///
/// # Errors
/// [`VlmDataError::File`] if the file is missing or its model type is unknown
pub(crate) fn family_of(folder: &Path) -> Result<&'static Family> {
    let path = folder.join("config.json");
    let config = read_json(&path)?.unwrap_or(Value::Null);
    let model_type = config.get("model_type").and_then(Value::as_str);
    Family::of(model_type.unwrap_or_default()).map_err(|unknown| VlmDataError::File {
        path,
        reason: unknown.to_string(),
    })
}

/// The contents of a file, or `None` if there is none.
fn read_json(path: &Path) -> Result<Option<Value>> {
    let text = match plain_files::read_text(path, MAX_JSON_BYTES) {
        Err(error) if error.is_missing() => return Ok(None),
        read => read?,
    };
    serde_json::from_str(&text).map(Some).map_err(|cause| {
        in_file(
            path,
            VlmDataError::Json {
                reason: cause.to_string(),
            },
        )
    })
}

/// The name of its class that a file states.
fn class_name<'a>(value: &'a Value, kind: &Kind) -> Option<&'a str> {
    kind.names.iter().find_map(|&key| value.get(key)?.as_str())
}

/// The families with pictures.
fn visions() -> impl Iterator<Item = &'static VisionParts> {
    FAMILIES.iter().filter_map(|family| family.vision.as_ref())
}

fn class_of(
    kind: &Kind,
    value: &Value,
    model_type: Option<&str>,
) -> Result<&'static ProcessorClass> {
    let named = class_name(value, kind);
    let class = match named {
        Some(name) => {
            let name = name
                .strip_suffix("Fast")
                .or(name.strip_suffix("Pil"))
                .unwrap_or(name);
            let mut classes = visions().map(kind.class);
            classes.find(|class| class.names.contains(&name))
        }
        None => model_type.and_then(|model_type| {
            let vision = Family::of(model_type).ok()?.vision.as_ref();
            vision.map(kind.class)
        }),
    };
    class.ok_or_else(|| {
        let known = visions().flat_map(|vision| (kind.class)(vision).names);
        let known: BTreeSet<&str> = known.copied().collect();
        VlmDataError::UnknownProcessor {
            found: named.or(model_type).unwrap_or("without a name").to_owned(),
            known: known.into_iter().collect(),
        }
    })
}

/// The least and the largest area.
fn limits(value: &Value, class: &ProcessorClass) -> Result<[u64; 2]> {
    const KEYS: [[&str; 2]; 2] = [
        ["min_pixels", "size.shortest_edge"],
        ["max_pixels", "size.longest_edge"],
    ];
    let size = value.get("size").filter(|size| !size.is_null());
    let mut limits = class.limits;
    for (limit, [pixels, edge]) in limits.iter_mut().zip(KEYS) {
        let own = area(value.get(pixels), pixels)?;
        let edge_name = edge.trim_start_matches("size.");
        let sized = match size {
            // A file that states a size states both edges, or pixels instead.
            Some(size) => area(size.get(edge_name), edge)?,
            None => Some(*limit),
        };
        if class.reads_pixels {
            let found = size.map_or("absent".into(), Value::to_string);
            let expected = "an object with shortest_edge and longest_edge";
            *limit = own.or(sized).ok_or(VlmDataError::Config {
                key: "size",
                expected,
                found,
            })?;
            continue;
        }
        let Some(sized) = sized else {
            let found = "absent".into();
            return Err(VlmDataError::Config {
                key: edge,
                expected: "an area in pixels",
                found,
            });
        };
        if let Some(own) = own.filter(|&own| own != sized) {
            let expected = "the area in size, which is all that this processor reads";
            return Err(VlmDataError::Config {
                key: pixels,
                expected,
                found: own.to_string(),
            });
        }
        *limit = sized;
    }
    Ok(limits)
}

fn area(value: Option<&Value>, key: &'static str) -> Result<Option<u64>> {
    match value {
        None | Some(Value::Null) => Ok(None),
        Some(value) => match value.as_u64().filter(|&area| area > 0) {
            Some(area) => Ok(Some(area)),
            None => Err(wrong(
                key,
                "an area in pixels, a whole number above 0",
                value,
            )),
        },
    }
}

/// A flag, true by default.
fn flag(value: &Value, key: &'static str) -> Result<bool> {
    match value.get(key) {
        None | Some(Value::Null) => Ok(true),
        Some(Value::Bool(on)) => Ok(*on),
        Some(other) => Err(wrong(key, "true or false", other)),
    }
}

fn count(value: &Value, key: &'static str) -> Result<Option<usize>> {
    match value.get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => match value.as_u64().and_then(|count| usize::try_from(count).ok()) {
            Some(count) => Ok(Some(count)),
            None => Err(wrong(key, "a whole number", value)),
        },
    }
}

fn number(value: &Value, key: &'static str) -> Result<Option<f64>> {
    match value.get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => match value.as_f64() {
            Some(number) => Ok(Some(number)),
            None => Err(wrong(key, "a number", value)),
        },
    }
}

/// Three numbers, or one for all colours.
fn colours(value: &Value, key: &'static str) -> Result<Option<[f64; 3]>> {
    let Some(found) = value.get(key).filter(|found| !found.is_null()) else {
        return Ok(None);
    };
    if let Some(number) = found.as_f64() {
        return Ok(Some([number; 3]));
    }
    let numbers: Option<Vec<f64>> = found
        .as_array()
        .and_then(|list| list.iter().map(Value::as_f64).collect());
    match numbers.and_then(|numbers| <[f64; 3]>::try_from(numbers).ok()) {
        Some(colours) => Ok(Some(colours)),
        None => Err(wrong(key, "three numbers, or one for all colours", found)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<PictureConfig> {
        PictureConfig::from_json(text, None)
    }

    #[test]
    fn both_spellings_and_class_defaults_are_read() {
        let limits = |text: &str| {
            let config = read(text).expect("it can be read");
            [config.min_pixels, config.max_pixels]
        };
        let qwen =
            |rest: &str| format!(r#"{{"image_processor_type": "Qwen2VLImageProcessor"{rest}}}"#);
        assert_eq!(limits(&qwen("")), [3136, 1_003_520]);
        assert_eq!(
            limits(&qwen(r#", "min_pixels": 1, "max_pixels": 9"#)),
            [1, 9]
        );
        let size = r#", "size": {"shortest_edge": 65536, "longest_edge": 16777216}"#;
        assert_eq!(limits(&qwen(size)), [65_536, 16_777_216]);
        let both = r#", "max_pixels": 70000, "size": {"shortest_edge": 65536, "longest_edge": 7}"#;
        assert_eq!(limits(&qwen(both)), [65_536, 70_000]);
        // As transformers 4.4x saved it.
        let old =
            r#", "min_pixels": 4, "max_pixels": 5, "size": {"min_pixels": 4, "max_pixels": 5}"#;
        assert_eq!(limits(&qwen(old)), [4, 5]);
        assert!(read(&qwen(r#", "size": {"min_pixels": 4, "max_pixels": 5}"#)).is_err());
        assert!(
            read(&qwen(
                r#", "size": {"shortest_edge": 0, "longest_edge": 7}"#
            ))
            .is_err()
        );
        assert!(read(&qwen(r#", "resample": 2"#)).is_err());
        assert!(read(&qwen(r#", "image_mean": [0.5, 0.5]"#)).is_err());
        assert!(read(&qwen(r#", "do_resize": 1"#)).is_err());
    }

    #[test]
    fn glm_reads_size_alone() {
        let glm =
            |rest: &str| format!(r#"{{"image_processor_type": "Glm4vImageProcessorFast"{rest}}}"#);
        let config = read(&glm(
            r#", "size": {"shortest_edge": 12544, "longest_edge": 9633792}"#,
        ));
        assert_eq!(config.expect("it can be read").max_pixels, 9_633_792);
        let contradiction = read(&glm(r#", "max_pixels": 1000"#));
        assert!(matches!(
            contradiction,
            Err(VlmDataError::Config {
                key: "max_pixels",
                ..
            })
        ));
    }

    #[test]
    fn the_model_type_names_a_class_that_the_file_does_not() {
        assert!(matches!(
            read("{}"),
            Err(VlmDataError::UnknownProcessor { .. })
        ));
        let config = PictureConfig::from_json("{}", Some("glm4v")).expect("a known model type");
        assert_eq!(config.rule, ResizeRule::Glm);
        let other = read(r#"{"image_processor_type": "CLIPImageProcessor"}"#);
        assert!(matches!(other, Err(VlmDataError::UnknownProcessor { .. })));
    }
}
