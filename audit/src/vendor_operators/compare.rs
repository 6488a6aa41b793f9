//! Calls that the two sides judge differently, in groups, and which of them are explained.

use std::collections::BTreeMap;

use serde::Serialize;

use super::ask::{Answer, DIED, NO_ARGUMENT, Verdict};
use super::call::{Call, TYPES};
use super::explained::{EXPLAINED, Explained};

/// Who refuses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Difference {
    /// The vendor refuses, the simulator accepts.
    VendorRefuses,
    /// The simulator refuses, the vendor accepts.
    SimulatorRefuses,
    /// Both refuse, with different codes.
    Codes,
    /// The vendor's code does not return.
    VendorDies,
}

/// The difference between two verdicts, if there is one.
pub(super) fn difference(answer: &Answer) -> Option<Difference> {
    match (answer.vendor.code, answer.simulator.code) {
        (DIED, _) => Some(Difference::VendorDies),
        (0, 0) => None,
        (_, 0) => Some(Difference::VendorRefuses),
        (0, _) => Some(Difference::SimulatorRefuses),
        // A call whose arguments only one side makes is refused by the other.
        (vendor, simulator) if vendor == simulator || vendor == NO_ARGUMENT => None,
        (_, NO_ARGUMENT) => None,
        _ => Some(Difference::Codes),
    }
}

/// Calls of an operator that differ in the same way.
#[derive(Debug, Serialize)]
pub(super) struct Group {
    pub(super) operator: &'static str,
    pub(super) difference: Difference,
    pub(super) vendor_code: i32,
    /// File and line of the vendor's check.
    pub(super) place: String,
    pub(super) vendor_message: String,
    pub(super) simulator_code: i32,
    pub(super) simulator_message: String,
    pub(super) calls: usize,
    /// The shortest of the calls.
    pub(super) example: String,
    pub(super) reason: Option<&'static str>,
}

/// What a sweep showed.
#[derive(Debug, Default, Serialize)]
pub(super) struct Comparison {
    pub(super) calls: usize,
    pub(super) both_accept: usize,
    pub(super) both_refuse: usize,
    /// Calls that differ, by who refuses.
    pub(super) differing: BTreeMap<&'static str, usize>,
    pub(super) unexplained: Vec<Group>,
    /// Explanations with the calls that they explain.
    pub(super) explained: Vec<(&'static str, usize)>,
    /// Explanations of nothing.
    pub(super) stale: Vec<&'static str>,
}

/// File and line in a message of the vendor's log, which begins `[add.cpp:12]`.
pub(super) fn place(message: &str) -> &str {
    let inner = message
        .strip_prefix('[')
        .and_then(|rest| rest.split_once(']'));
    inner.map_or("", |(place, _)| place)
}

/// The message of the vendor's log without place, thread and function.
pub(super) fn reason(message: &str) -> &str {
    message
        .rsplit_once("errno[")
        .and_then(|(_, rest)| rest.split_once("] "))
        .map_or(message, |m| m.1)
}

/// A message without what differs from call to call.
fn shape_of(message: &str) -> String {
    let text = message.split_once(": ").map_or(message, |(_, text)| text);
    let mut words = Vec::new();
    for word in text
        .split([' ', ',', '[', ']', '(', ')'])
        .filter(|word| !word.is_empty())
    {
        let is_type = TYPES
            .iter()
            .any(|(name, _)| name.eq_ignore_ascii_case(word))
            || ["Float", "Float16", "Bf16", "Double"].contains(&word)
            || ["Int", "Uint"].iter().any(|kind| word.starts_with(kind));
        let is_number = word
            .trim_start_matches('-')
            .starts_with(|c: char| c.is_ascii_digit());
        let word = if is_type || is_number { "#" } else { word };
        if words.last() != Some(&word) {
            words.push(word);
        }
    }
    words.join(" ")
}

/// Groups what differs, and explains it by [`EXPLAINED`].
pub(super) fn compare(calls: &[Call], answers: &[Answer]) -> Comparison {
    compare_with(calls, answers, EXPLAINED)
}

fn compare_with(calls: &[Call], answers: &[Answer], rows: &[Explained]) -> Comparison {
    let mut comparison = Comparison {
        calls: calls.len(),
        ..Comparison::default()
    };
    let mut used = vec![0; rows.len()];
    let mut groups: BTreeMap<_, Group> = BTreeMap::new();
    for (call, answer) in calls.iter().zip(answers) {
        let Some(difference) = difference(answer) else {
            let accepted = answer.vendor.code == 0;
            comparison.both_accept += usize::from(accepted);
            comparison.both_refuse += usize::from(!accepted);
            continue;
        };
        let operator = call.operator.function;
        let Answer {
            vendor, simulator, ..
        } = answer;
        *comparison.differing.entry(difference.words()).or_default() += 1;
        let explained = rows
            .iter()
            .position(|row| row.explains(call, difference, answer));
        if let Some(at) = explained {
            used[at] += 1;
            continue;
        }
        let place = place(&vendor.message).to_owned();
        let key = (
            difference,
            operator,
            place.clone(),
            vendor.code,
            simulator.code,
            shape_of(&simulator.message),
        );
        let example = call.to_string();
        let group = groups.entry(key).or_insert_with(|| Group {
            operator,
            difference,
            vendor_code: vendor.code,
            place,
            vendor_message: reason(&vendor.message).to_owned(),
            simulator_code: simulator.code,
            simulator_message: without_function(simulator).to_owned(),
            calls: 0,
            example: example.clone(),
            reason: None,
        });
        group.calls += 1;
        if example.len() < group.example.len() {
            group.example = example;
        }
    }
    comparison.unexplained = groups.into_values().collect();
    for (row, calls) in rows.iter().zip(used) {
        match calls {
            0 => comparison.stale.push(row.reason),
            calls => comparison.explained.push((row.reason, calls)),
        }
    }
    comparison
}

/// The simulator's message without the function that it names first.
fn without_function(verdict: &Verdict) -> &str {
    let message = &verdict.message;
    message.split_once(": ").map_or(message, |(_, text)| text)
}

impl Difference {
    pub(super) fn words(self) -> &'static str {
        match self {
            Self::VendorRefuses => "vendor refuses, simulator accepts",
            Self::SimulatorRefuses => "simulator refuses, vendor accepts",
            Self::Codes => "both refuse, other codes",
            Self::VendorDies => "the vendor's code does not return",
        }
    }
}

impl Comparison {
    pub(super) fn failures(&self) -> Vec<String> {
        let calls: usize = self.unexplained.iter().map(|group| group.calls).sum();
        let unexplained = (calls > 0).then(|| {
            let groups = self.unexplained.len();
            format!("{calls} calls in {groups} groups differ without an explanation")
        });
        let stale = self.stale.iter().map(|reason| {
            format!("nothing differs any more by {reason:?}: remove the row of explained.rs")
        });
        unexplained.into_iter().chain(stale).collect()
    }

    pub(super) fn tables(&self) -> String {
        let mut text = "| sweep | calls |\n|---|---|\n".to_owned();
        let mut row = |name: &str, calls: usize| text += &format!("| {name} | {calls} |\n");
        row("all", self.calls);
        row("both accept", self.both_accept);
        row("both refuse, with the same code", self.both_refuse);
        self.differing
            .iter()
            .for_each(|(name, calls)| row(name, *calls));
        if !self.explained.is_empty() {
            text += "\n| explained difference | calls |\n|---|---|\n";
        }
        for (reason, calls) in &self.explained {
            text += &format!("| {reason} | {calls} |\n");
        }
        let mut difference = None;
        for group in &self.unexplained {
            if difference != Some(group.difference) {
                difference = Some(group.difference);
                text += &format!("\nUnexplained: {}\n", group.difference.words());
            }
            text += &group.text();
        }
        text
    }
}

impl Group {
    /// Four short lines: who says what, and an example.
    fn text(&self) -> String {
        let mut text = format!("\n{} ({} calls)\n", self.operator, self.calls);
        let mut side = |name: &str, code: i32, place: &str, message: &str| {
            if code != 0 {
                let message: String = message.chars().take(160).collect();
                text += &format!("  {name} {code} {place} {message}\n");
            }
        };
        side(
            "vendor",
            self.vendor_code,
            &self.place,
            &self.vendor_message,
        );
        side(
            "simulator",
            self.simulator_code,
            "",
            &self.simulator_message,
        );
        text + &format!("  {}\n", self.example)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn verdict(code: i32, message: &str) -> Verdict {
        Verdict {
            code,
            message: message.to_owned(),
        }
    }

    fn asked(line: &str, vendor: Verdict, simulator: Verdict) -> (Call, Answer) {
        let answer = Answer {
            vendor,
            simulator,
            ..Answer::default()
        };
        (Call::parse(line).expect(line), answer)
    }

    const LOG: &str = "[aclnn_neg.cpp:70][NNOP][Check][98] errno[161002] No DT_BOOL.";

    #[test]
    fn differences_are_grouped_and_explained_and_stale_rows_are_reported() {
        let (calls, answers): (Vec<_>, Vec<_>) = [
            asked(
                "aclnnNeg f32[2,3] bool[2,3]",
                verdict(161002, LOG),
                verdict(0, ""),
            ),
            asked(
                "aclnnNeg f32[2] bool[2]",
                verdict(161002, LOG),
                verdict(0, ""),
            ),
            asked(
                "aclnnNeg f32[] f32[]",
                verdict(0, ""),
                verdict(161002, "f: rank 0"),
            ),
            asked(
                "aclnnNeg f32[1] f32[2]",
                verdict(161002, LOG),
                verdict(161002, "f: no"),
            ),
            asked("aclnnNeg f32[1] f32[1]", verdict(0, ""), verdict(0, "")),
        ]
        .into_iter()
        .unzip();
        let row = |message, reason| Explained {
            operators: &["aclnnNeg"],
            difference: Difference::SimulatorRefuses,
            vendor: "",
            simulator: message,
            empty: false,
            reason,
        };
        let rows = [row("rank 0", "ranks"), row("rank 9", "stale")];
        let comparison = compare_with(&calls, &answers, &rows);
        assert_eq!((comparison.both_accept, comparison.both_refuse), (1, 1));
        assert_eq!(comparison.unexplained.len(), 1);
        let group = &comparison.unexplained[0];
        assert_eq!((group.calls, group.place.as_str()), (2, "aclnn_neg.cpp:70"));
        assert_eq!(group.example, "aclnnNeg f32[2] bool[2]");
        assert_eq!(group.vendor_message, "No DT_BOOL.");
        assert_eq!(comparison.explained, [("ranks", 1)]);
        let failures = comparison.failures();
        assert_eq!(failures.len(), 2, "{failures:?}");
        assert!(
            failures[1].contains("\"stale\": remove the row"),
            "{failures:?}"
        );
    }

    #[test]
    fn messages_are_alike_but_for_types_and_numbers() {
        let one = shape_of("f: self is Uint16, one of [Float, Int32] is expected");
        let two = shape_of("f: self is Bool, one of [Bf16] is expected");
        assert_eq!(one, two);
        assert_ne!(one, shape_of("f: other is Bool, one of [Bf16] is expected"));
    }
}
