//! Boxes and names of a record: ms-swift's `objects`.

use super::{Conversation, Message, Part, media::wrong};
use crate::text::error::RecordProblem;
use crate::text::json::Json;

/// The values of the marks `<bbox>` and `<ref-object>` in the text, in order.
#[derive(Clone, Debug, PartialEq)]
pub struct Objects {
    /// The names.
    pub names: Vec<String>,
    /// Points \[x, y\] or boxes \[x1, y1, x2, y2\], in pixels of the upright picture as read, or
    /// from 0 to 1 of its sides.
    pub boxes: Vec<Vec<f64>>,
    /// The picture of each box, from 0.
    pub images: Vec<usize>,
    /// True if boxes are from 0 to 1: ms-swift's `"bbox_type": "norm1"`.
    pub is_norm1: bool,
}

impl Objects {
    pub(super) fn read(value: &Json, images: usize) -> Result<Self, RecordProblem> {
        let list = |key: &str| -> Result<&[Json], RecordProblem> {
            let Some(value) = value.get(key) else {
                return Ok(&[]);
            };
            value
                .as_array()
                .ok_or_else(|| wrong(&format!("objects.{key}"), "a list", value))
        };
        if !matches!(value, Json::Object(_)) {
            return Err(wrong("objects", "an object", value));
        }
        let is_norm1 = match value.get("bbox_type") {
            None => false,
            Some(Json::String(kind)) if kind == "real" => false,
            Some(Json::String(kind)) if kind == "norm1" => true,
            Some(kind) => {
                return Err(RecordProblem::Value {
                    key: "objects.bbox_type".to_owned(),
                    expected: "\"real\", boxes in pixels, or \"norm1\", from 0 to 1",
                    found: format!("{kind:?}"),
                });
            }
        };
        let name = |name: &Json| {
            let error = || wrong("objects.ref", "a list of texts", name);
            name.as_str().map(str::to_owned).ok_or_else(error)
        };
        let numbers = |(index, value): (usize, &Json)| {
            let error = || {
                wrong(
                    &format!("objects.bbox[{index}]"),
                    "a list of numbers",
                    value,
                )
            };
            let items = value.as_array().ok_or_else(error)?;
            let found: Vec<f64> = items
                .iter()
                .map(|item| item.as_f64().ok_or_else(error))
                .collect::<Result<_, _>>()?;
            let ordered = match found[..] {
                [_, _] => true,
                [x1, y1, x2, y2] => x1 <= x2 && y1 <= y2,
                _ => false,
            };
            match ordered && found.iter().all(|number| number.is_finite()) {
                true => Ok(found),
                false => Err(RecordProblem::Box { index, found }),
            }
        };
        let names = list("ref")?.iter().map(name).collect::<Result<_, _>>()?;
        let boxes: Vec<_> = list("bbox")?
            .iter()
            .enumerate()
            .map(numbers)
            .collect::<Result<_, _>>()?;
        let stated = list("image_id")?;
        let mut places = vec![0; boxes.len()];
        for (index, place) in places.iter_mut().enumerate() {
            let error = |value| wrong("objects.image_id", "a list of whole numbers", value);
            match stated.get(index) {
                None => {}
                Some(Json::Int(image)) => {
                    *place = usize::try_from(*image).map_err(|_| error(&stated[index]))?;
                }
                Some(other) => return Err(error(other)),
            }
            if *place >= images {
                return Err(RecordProblem::BoxImage {
                    index,
                    image: *place,
                    images,
                });
            }
        }
        Ok(Self {
            names,
            boxes,
            images: places,
            is_norm1,
        })
    }
}

impl Conversation {
    /// Replaces the marks `<ref-object>` and `<bbox>` in all messages by text.
    ///
    /// `write_name` gets a name, `write_box` a picture's index and a box. The caller rescales
    /// boxes: Qwen2-VL and Qwen3-VL write coordinates from 0 to 1000 of the picture's sides,
    /// Qwen2.5-VL pixels of the **resized** picture. Without `objects`, the text is unchanged.
    ///
    /// # Errors
    /// [`RecordProblem::ObjectCount`] if marks and values differ in number.
    pub fn write_objects(
        &mut self,
        mut write_name: impl FnMut(&str) -> String,
        mut write_box: impl FnMut(usize, &[f64]) -> String,
    ) -> crate::text::Result<()> {
        let Some(objects) = &self.objects else {
            return Ok(());
        };
        let mut names = objects.names.iter().map(|name| write_name(name));
        let mut boxes = objects
            .boxes
            .iter()
            .zip(&objects.images)
            .map(|(numbers, &image)| write_box(image, numbers));
        let marks = [
            replace(&mut self.messages, "<ref-object>", &mut names),
            replace(&mut self.messages, "<bbox>", &mut boxes),
        ];
        for (mark, key, marks, values) in [
            ("<ref-object>", "ref", marks[0], objects.names.len()),
            ("<bbox>", "bbox", marks[1], objects.boxes.len()),
        ] {
            if marks != values {
                let problem = RecordProblem::ObjectCount {
                    mark,
                    key,
                    marks,
                    values,
                };
                return Err(problem.at(self.line));
            }
        }
        Ok(())
    }
}

/// Replaces each mark by the next value, and counts the marks.
fn replace(
    messages: &mut [Message],
    mark: &str,
    values: &mut dyn Iterator<Item = String>,
) -> usize {
    let mut marks = 0;
    for part in messages.iter_mut().flat_map(|message| &mut message.parts) {
        let Part::Text(text) = part else {
            continue;
        };
        let mut pieces = text.split(mark);
        let mut out = pieces.next().unwrap_or("").to_owned();
        for piece in pieces {
            marks += 1;
            out.push_str(&values.next().unwrap_or_default());
            out.push_str(piece);
        }
        *text = out;
    }
    marks
}
