//! Suspicious parts of valid texts.

use super::findings::Found;
use crate::picture::BoxForm;
use crate::sample::{SampleEncoder, TrainingSample};
use crate::text::{Conversation, Message, Part, Role};

/// Checks roles and texts.
pub(super) fn check(conversation: &Conversation, found: &mut Vec<Found>) {
    if let Some(other) = &conversation.other
        && conversation.messages.get(other.prompt..) == Some(&other.messages)
    {
        found.push(Found::new(
            "equal-answers",
            "both answers are equal, so that the pair teaches nothing",
        ));
    }
    let mut before: Option<&Message> = None;
    for (index, message) in conversation.messages.iter().enumerate() {
        let number = index + 1;
        let text = message.text();
        let has_media = message
            .parts
            .iter()
            .any(|part| !matches!(part, Part::Text(_)));
        if message.role == Role::User && text.trim().is_empty() && !has_media {
            found.push(Found::new(
                "empty-question",
                format!("message {number} asks nothing: it has neither text nor a picture"),
            ));
        }
        if message.role == Role::Assistant && text.trim() != text {
            found.push(Found::new(
                "answer-space",
                format!(
                    "the answer in message {number} begins or ends with white space, which the \
                     model will learn to write"
                ),
            ));
        }
        if text.contains('\u{fffd}') {
            found.push(Found::new(
                "replacement-character",
                format!(
                    "message {number} has the character \u{fffd}, which stands for text that \
                     was read in a wrong encoding"
                ),
            ));
        }
        let earlier = before.map(|message| message.role);
        let is_odd = match message.role {
            Role::Assistant => matches!(earlier, None | Some(Role::System | Role::Assistant)),
            Role::User => earlier == Some(Role::User),
            Role::System | Role::Tool => false,
        };
        if is_odd {
            found.push(Found::new(
                "role-order",
                format!(
                    "message {number} is the {}'s after {}; is a turn missing?",
                    message.role.name(),
                    earlier.map_or("nothing".to_owned(), |role| format!(
                        "the {}'s",
                        role.name()
                    )),
                ),
            ));
        }
        before = Some(message);
    }
}

/// Checks the text for boxes that extend beyond their pictures, as unscaled ones do.
pub(super) fn check_boxes(
    conversation: &Conversation,
    sample: &TrainingSample,
    encoder: &SampleEncoder,
    found: &mut Vec<Found>,
) {
    let Some(media) = encoder.media() else {
        return;
    };
    let patch = media.pictures.config().patch_size;
    let sides = |axis: usize| {
        sample
            .image_grids
            .iter()
            .map(move |grid| grid[axis] * patch)
    };
    let (Some(width), Some(height)) = (sides(2).max(), sides(1).max()) else {
        return;
    };
    let (limits, counted) = match media.boxes {
        BoxForm::Pixels => ([width, height], "in pixels of the resized picture"),
        BoxForm::Marked | BoxForm::Thousandths => ([1000, 1000], "from 0 to 1000"),
    };
    for (index, message) in conversation.messages.iter().enumerate() {
        for part in &message.parts {
            let Part::Text(text) = part else { continue };
            for numbers in boxes_in(text) {
                let is_outside = |(axis, number): (usize, &f64)| *number > limits[axis % 2] as f64;
                if !numbers.iter().enumerate().any(is_outside) {
                    continue;
                }
                found.push(Found::new(
                    "box-text",
                    format!(
                        "message {}: {numbers:?} leaves the picture of {} x {}; this family counts \
                         {counted}. Write <bbox> and \"objects\" to have boxes scaled",
                        index + 1,
                        limits[0],
                        limits[1]
                    ),
                ));
            }
        }
    }
}

/// The numbers of each `"bbox_2d": [...]`, `"point_2d": [...]` and `<|box_start|>...<|box_end|>`.
fn boxes_in(text: &str) -> impl Iterator<Item = Vec<f64>> {
    let lists = ["bbox_2d", "point_2d"].into_iter().flat_map(|key| {
        text.split(key).skip(1).filter_map(|rest| {
            let (before, list) = rest.split_once('[')?;
            let is_value = before
                .chars()
                .all(|c| c.is_whitespace() || "\"':=".contains(c));
            let (list, _) = list.split_once(']')?;
            is_value.then_some(list)
        })
    });
    let marked = text
        .split("<|box_start|>")
        .skip(1)
        .filter_map(|rest| Some(rest.split_once("<|box_end|>")?.0));
    lists.chain(marked).map(|list| {
        list.split(|c: char| !c.is_ascii_digit() && c != '.')
            .filter_map(|number| number.parse().ok())
            .collect()
    })
}

#[cfg(test)]
mod tests {
    use super::boxes_in;

    #[test]
    fn boxes_are_found_in_text() {
        let text = r#"a [5] "bbox_2d": [1, 2.5, 30, 4], 'point_2d' : [7,8] bbox_2d is [9] and
            <|box_start|>(10,11),(12,13)<|box_end|>"#;
        let found: Vec<Vec<f64>> = boxes_in(text).collect();
        let expected = [
            vec![1.0, 2.5, 30.0, 4.0],
            vec![7.0, 8.0],
            vec![10.0, 11.0, 12.0, 13.0],
        ];
        assert_eq!(found, expected);
    }
}
