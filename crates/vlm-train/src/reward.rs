//! Rewards of answers: rules, one row each, or a command.

use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread;
use std::time::Duration;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use vlm_data::picture::BoxForm;
use vlm_data::read_boxes;
use vlm_data::text::json::Json;

use crate::error::{Result, VlmTrainError};

/// What rewards an answer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Reward {
    /// A rule.
    Rule {
        /// The rule.
        rule: RewardRule,
        /// How far a number may be from the expected one.
        tolerance: f64,
    },
    /// A command for a shell. Each device of a run starts it once. It reads an object in JSON per line, with the record's
    /// keys and `prompt`, `completion` and `answer`, and writes a number per line.
    Command {
        /// The command.
        command: String,
        /// The longest wait for a line, in seconds.
        seconds: f64,
    },
}

/// A rule that compares an answer with that of the data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RewardRule {
    /// 1 if the texts are equal apart from white space around them.
    Exact,
    /// 1 if the last numbers of the texts are equal up to the tolerance.
    Number,
    /// The overlap of boxes, in the family's notation.
    Boxes,
}

/// A row of the table.
struct RuleRow {
    rule: RewardRule,
    /// The name as an option.
    name: &'static str,
    /// The reward; `None` if the expected answer lacks what is compared.
    reward: fn(&Compared<'_>) -> Option<f64>,
    /// What an expected answer must have.
    needs: &'static str,
}

/// An answer beside that of the data.
struct Compared<'a> {
    expected: &'a str,
    found: &'a str,
    tolerance: f64,
    boxes: BoxForm,
}

const RULES: [RuleRow; 3] = [
    RuleRow {
        rule: RewardRule::Exact,
        name: "exact",
        reward: |of| Some(f64::from(u8::from(of.expected.trim() == of.found.trim()))),
        needs: "a text",
    },
    RuleRow {
        rule: RewardRule::Number,
        name: "number",
        reward: |of| {
            let expected = last_number(of.expected)?;
            // 3.1 is within 0.1 of 3.
            let rounding = 4.0 * f64::EPSILON * expected.abs();
            let is_near = |found: f64| (found - expected).abs() <= of.tolerance + rounding;
            let is_right = last_number(of.found).is_some_and(is_near);
            Some(f64::from(u8::from(is_right)))
        },
        needs: "a number",
    },
    RuleRow {
        rule: RewardRule::Boxes,
        name: "boxes",
        reward: |of| {
            let expected = read_boxes(of.boxes, of.expected);
            (!expected.is_empty()).then(|| overlap(&expected, &read_boxes(of.boxes, of.found)))
        },
        needs: "a box in the family's notation",
    },
];

impl RewardRule {
    /// All of them.
    pub const ALL: [Self; 3] = {
        let mut all = [Self::Exact; 3];
        let mut row = 0;
        while row < RULES.len() {
            all[row] = RULES[row].rule;
            row += 1;
        }
        all
    };

    fn row(self) -> &'static RuleRow {
        const ROWS: &[RuleRow; 3] = &RULES;
        ROWS.iter().find(|row| row.rule == self).unwrap_or(&ROWS[0])
    }

    /// The name as an option.
    pub fn name(self) -> &'static str {
        self.row().name
    }
}

/// The last number of a text. Commas between groups of three digits are left out.
fn last_number(text: &str) -> Option<f64> {
    let end = text.rfind(|c: char| c.is_ascii_digit())? + 1;
    let exponent = text[..end].trim_end_matches(|c: char| c.is_ascii_digit());
    let mantissa = exponent.trim_end_matches(['-', '+']);
    if exponent.len() - mantissa.len() <= 1
        && let Some(mantissa) = mantissa.strip_suffix(['e', 'E'])
        && mantissa.ends_with(|c: char| c.is_ascii_digit())
    {
        let exponent = &text[mantissa.len()..end];
        return format!("{}{exponent}", last_number(mantissa)?).parse().ok();
    }
    let is_part = |c: char| c.is_ascii_digit() || matches!(c, '.' | ',');
    let start = text[..end].trim_end_matches(is_part).len();
    let mut digits = &text[start..end];
    let is_number = |digits: &str| {
        let (whole, fraction) = digits.split_once('.').unwrap_or((digits, ""));
        let mut groups = whole.split(',');
        let first = groups.next().unwrap_or_default();
        let mut others = groups.peekable();
        let is_grouped = others.peek().is_none() || (1..=3).contains(&first.len());
        is_grouped && others.all(|group| group.len() == 3) && !fraction.contains(['.', ','])
    };
    while !is_number(digits) {
        let (_, rest) = digits.split_once([',', '.'])?;
        digits = rest;
    }
    let number: f64 = digits.replace(',', "").parse().ok()?;
    let before = &text[..end - digits.len()];
    let is_negative = before
        .strip_suffix(['-', '\u{2212}'])
        .is_some_and(|before| {
            // Not a hyphen, nor the sign of a difference.
            !before.ends_with(|c: char| c.is_alphanumeric() || c == ')')
        });
    Some(if is_negative { -number } else { number })
}

/// The mean overlap of boxes, each with one other at most, the largest overlaps first. Boxes without
/// another count as 0.
fn overlap(expected: &[[f64; 4]], found: &[[f64; 4]]) -> f64 {
    let mut pairs: Vec<(f64, usize, usize)> = Vec::new();
    for (one, expected) in expected.iter().enumerate() {
        let of = |(other, found)| (intersection_over_union(expected, found), one, other);
        pairs.extend(found.iter().enumerate().map(of));
    }
    pairs.sort_by(|one, other| other.0.total_cmp(&one.0));
    let mut is_taken = [vec![false; expected.len()], vec![false; found.len()]];
    let mut sum = 0.0;
    for (overlap, one, other) in pairs {
        if !is_taken[0][one] && !is_taken[1][other] {
            (is_taken[0][one], is_taken[1][other]) = (true, true);
            sum += overlap;
        }
    }
    sum / expected.len().max(found.len()).max(1) as f64
}

fn intersection_over_union(one: &[f64; 4], other: &[f64; 4]) -> f64 {
    let area =
        |[left, top, right, bottom]: [f64; 4]| (right - left).max(0.0) * (bottom - top).max(0.0);
    let shared = area([
        one[0].max(other[0]),
        one[1].max(other[1]),
        one[2].min(other[2]),
        one[3].min(other[3]),
    ]);
    let all = area(*one) + area(*other) - shared;
    if all > 0.0 { shared / all } else { 0.0 }
}

/// An answer to be rewarded.
pub(crate) struct Completion<'a> {
    /// The line of its record.
    pub(crate) line: u64,
    /// The answer of the data.
    pub(crate) expected: &'a str,
    /// The sampled one.
    pub(crate) found: String,
    /// The prompt and the record's other keys, for a command.
    pub(crate) columns: &'a [(String, Json)],
}

/// Gives rewards; a command runs as long as this lives.
pub(crate) enum Scorer {
    Rule(RewardRule, f64, BoxForm),
    Command(Box<Mutex<Process>>),
}

impl Scorer {
    /// # Errors
    /// [`VlmTrainError::Reward`] for a command that does not start; [`VlmTrainError::Options`] for
    /// boxes of a model of text alone.
    pub(crate) fn new(reward: &Reward, boxes: Option<BoxForm>) -> Result<Self> {
        Ok(match reward {
            Reward::Rule {
                rule: RewardRule::Boxes,
                ..
            } if boxes.is_none() => {
                let text = "--reward boxes is for models that see; this one is of text alone";
                return Err(VlmTrainError::Options(text.to_owned()));
            }
            Reward::Rule { rule, tolerance } => {
                Self::Rule(*rule, *tolerance, boxes.unwrap_or(BoxForm::Thousandths))
            }
            Reward::Command { command, seconds } => {
                let wait = Duration::try_from_secs_f64(*seconds).map_err(|_error| {
                    VlmTrainError::Options(format!(
                        "--reward-timeout is {seconds}; expected seconds above 0, such as 60"
                    ))
                })?;
                Self::Command(Box::new(Mutex::new(Process::start(command, wait)?)))
            }
        })
    }

    /// True if it reads the columns of records.
    pub(crate) fn reads_columns(&self) -> bool {
        matches!(self, Self::Command(_))
    }

    /// # Errors
    /// [`VlmTrainError::Options`] for an expected answer without what is compared;
    /// [`VlmTrainError::Reward`] for a command that fails.
    pub(crate) fn rewards(&self, completions: &[Completion<'_>]) -> Result<Vec<f64>> {
        match self {
            Self::Rule(rule, tolerance, boxes) => {
                let row = rule.row();
                let reward = |completion: &Completion<'_>| {
                    let compared = Compared {
                        expected: completion.expected,
                        found: &completion.found,
                        tolerance: *tolerance,
                        boxes: *boxes,
                    };
                    (row.reward)(&compared).ok_or_else(|| {
                        let Completion { line, expected, .. } = completion;
                        let (name, needs) = (row.name, row.needs);
                        VlmTrainError::Options(format!(
                            "--reward {name} needs {needs} in each answer of the data, and that at \
                             line {line} is {expected:?}; mend it, or choose another reward"
                        ))
                    })
                };
                completions.iter().map(reward).collect()
            }
            Self::Command(process) => {
                let lines = completions.iter().map(Completion::json);
                process.lock().rewards(&lines.collect::<Vec<_>>())
            }
        }
    }
}

impl Completion<'_> {
    /// One line for a command.
    fn json(&self) -> String {
        let own = [("completion", &self.found[..]), ("answer", self.expected)];
        let is_other = |(key, _): &&(String, Json)| own.iter().all(|(name, _)| name != key);
        let others = self.columns.iter().filter(is_other).cloned();
        let text =
            |(key, text): &(&str, &str)| ((*key).to_owned(), Json::String((*text).to_owned()));
        Json::Object(others.chain(own.iter().map(text)).collect()).to_string()
    }
}

/// The longest line that a command may write.
const MOST_BYTES: u64 = 4096;
/// The wait for lines that a command should not write.
const SILENCE: Duration = Duration::from_millis(20);
/// Lines that a command may be ahead.
const AHEAD: usize = 1024;

/// A command that runs.
pub(crate) struct Process {
    command: String,
    wait: Duration,
    child: Child,
    /// Closed when this is dropped.
    input: Option<ChildStdin>,
    lines: Receiver<Vec<u8>>,
}

impl Process {
    fn start(command: &str, wait: Duration) -> Result<Self> {
        let failed = |error: std::io::Error| VlmTrainError::Reward {
            command: command.to_owned(),
            reason: format!("could not be started: {error}"),
        };
        let mut shell = Command::new("sh");
        shell.args(["-c", command]);
        // Python would keep the lines in a buffer.
        shell.env("PYTHONUNBUFFERED", "1");
        shell.stdin(Stdio::piped()).stdout(Stdio::piped());
        // Ctrl+C is for the run, which ends after its step.
        #[cfg(unix)]
        std::os::unix::process::CommandExt::process_group(&mut shell, 0);
        let mut child = shell.spawn().map_err(failed)?;
        let (sender, lines) = sync_channel(AHEAD);
        if let Some(output) = child.stdout.take() {
            thread::spawn(move || read_lines(BufReader::new(output), &sender));
        }
        Ok(Self {
            command: command.to_owned(),
            wait,
            input: child.stdin.take(),
            child,
            lines,
        })
    }

    fn failed(&self, reason: String) -> VlmTrainError {
        let command = self.command.clone();
        VlmTrainError::Reward { command, reason }
    }

    /// Writes objects, and reads as many numbers.
    fn rewards(&mut self, objects: &[String]) -> Result<Vec<f64>> {
        self.expect_silence(Duration::ZERO)?;
        let Some(mut input) = self.input.take() else {
            return Err(self.failed("has ended".to_owned()));
        };
        let mut text = String::new();
        for object in objects {
            _ = writeln!(text, "{object}");
        }
        // A command may write before it has read everything.
        let (written, returned) = sync_channel(1);
        thread::spawn(move || {
            // The output of a command that has ended says so.
            _ = input
                .write_all(text.as_bytes())
                .and_then(|()| input.flush());
            _ = written.send(input);
        });
        let mut rewards = Vec::with_capacity(objects.len());
        while rewards.len() < objects.len() {
            let reward = self.next(rewards.len(), objects.len());
            match reward {
                Ok(reward) => rewards.push(reward),
                Err(error) => {
                    self.stop();
                    return Err(error);
                }
            }
        }
        self.expect_silence(SILENCE)?;
        self.input = returned.recv_timeout(self.wait).ok();
        if self.input.is_none() {
            self.stop();
            let all = objects.len();
            let reason = format!("wrote {all} numbers, and did not read the {all} lines for them");
            return Err(self.failed(reason));
        }
        Ok(rewards)
    }

    fn next(&mut self, done: usize, all: usize) -> Result<f64> {
        let so_far = format!("after {done} of {all} rewards");
        let line = match self.lines.recv_timeout(self.wait) {
            Ok(line) => line,
            Err(RecvTimeoutError::Timeout) => {
                let seconds = self.wait.as_secs_f64();
                return Err(self.failed(format!(
                    "wrote nothing for {seconds} s {so_far}; it must write a line for each that it \
                     reads, without keeping it in a buffer, or raise --reward-timeout"
                )));
            }
            Err(RecvTimeoutError::Disconnected) => {
                let ended = match self.ended() {
                    Some(status) => format!("ended ({status})"),
                    None => "closed its output".to_owned(),
                };
                return Err(self.failed(format!(
                    "{ended} {so_far}; its own message, if there is one, is above"
                )));
            }
        };
        let text = String::from_utf8_lossy(&line);
        match text.trim().parse::<f64>() {
            Ok(reward) if reward.is_finite() => Ok(reward),
            _ => Err(self.failed(format!(
                "wrote {:?} {so_far}; expected one finite number in each line",
                text.trim_end()
            ))),
        }
    }

    /// The status of a command that has just closed its output.
    fn ended(&mut self) -> Option<std::process::ExitStatus> {
        for _attempt in 0..50 {
            if let Ok(Some(status)) = self.child.try_wait() {
                return Some(status);
            }
            thread::sleep(Duration::from_millis(10));
        }
        None
    }

    /// # Errors
    /// [`VlmTrainError::Reward`] if there is a line that no object asked for, which would be taken
    /// for the reward of the next one.
    fn expect_silence(&mut self, wait: Duration) -> Result<()> {
        match self.lines.recv_timeout(wait) {
            Ok(line) => {
                self.stop();
                let text = String::from_utf8_lossy(&line);
                Err(self.failed(format!(
                    "wrote {:?} beyond one number for each line that it read; write anything else \
                     to standard error",
                    text.trim_end()
                )))
            }
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => Ok(()),
        }
    }

    /// Ends the shell and the processes that it has started.
    fn stop(&mut self) {
        #[cfg(unix)]
        {
            let kill = format!("kill -s KILL -- -{}", self.child.id());
            let mut shell = Command::new("sh");
            // The group may have ended.
            _ = shell.args(["-c", &kill]).stderr(Stdio::null()).status();
        }
        _ = self.child.kill();
        _ = self.child.wait();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.input = None;
        if self.ended().is_none() {
            self.stop();
        }
    }
}

/// Sends the lines of an output until it ends or nobody receives them.
fn read_lines(mut output: impl BufRead, sender: &SyncSender<Vec<u8>>) {
    loop {
        let mut line = Vec::new();
        let read = output
            .by_ref()
            .take(MOST_BYTES)
            .read_until(b'\n', &mut line);
        let is_end = !matches!(read, Ok(bytes) if bytes > 0);
        if is_end || sender.send(line).is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_number_of_a_text_is_read() {
        for (text, expected) in [
            ("18", Some(18.0)),
            ("the answer is -3.5.", Some(-3.5)),
            ("5-3", Some(3.0)),
            ("f(2)-3", Some(3.0)),
            ("from 2 to \u{2212}7", Some(-7.0)),
            ("$1,234,567.25!", Some(1_234_567.25)),
            ("1, 2,3", Some(3.0)),
            ("12,34", Some(34.0)),
            ("of .5 m", Some(0.5)),
            ("version 1.2.30", Some(2.3)),
            ("about 2.5e-3 m", Some(2.5e-3)),
            ("1,000E+2", Some(1e5)),
            ("-1e5", Some(-1e5)),
            ("the3", Some(3.0)),
            ("none", None),
            ("", None),
        ] {
            assert_eq!(last_number(text), expected, "{text}");
        }
    }

    #[test]
    fn boxes_overlap_one_by_one() {
        let square = |left: f64, top: f64| [left, top, left + 10.0, top + 10.0];
        let one = [square(0.0, 0.0)];
        for (expected, found, reward) in [
            (&one[..], &one[..], 1.0),
            (&one, &[], 0.0),
            (&one, &[square(5.0, 0.0)], 1.0 / 3.0),
            (&one, &[square(20.0, 0.0)], 0.0),
            // A second box that is not there costs as much as one that is missing.
            (&one, &[square(0.0, 0.0), square(0.0, 0.0)], 0.5),
            (&[square(0.0, 0.0), square(50.0, 0.0)], &one, 0.5),
            // The box that fits takes it.
            (
                &[square(5.0, 0.0), square(0.0, 0.0)],
                &[square(0.0, 0.0), square(5.0, 0.0)],
                1.0,
            ),
            // Sides turned round have no area.
            (&one, &[[10.0, 10.0, 0.0, 0.0]], 0.0),
        ] {
            let found = overlap(expected, found);
            assert!((found - reward).abs() < 1e-12, "{expected:?}: {found}");
        }
    }

    fn rewards(rule: RewardRule, expected: &str, found: &str) -> Result<Vec<f64>> {
        let reward = Reward::Rule {
            rule,
            tolerance: 0.01,
        };
        let scorer = Scorer::new(&reward, Some(BoxForm::Pixels)).expect("a rule");
        scorer.rewards(&[completion(expected, found)])
    }

    fn completion<'a>(expected: &'a str, found: &str) -> Completion<'a> {
        Completion {
            line: 7,
            expected,
            found: found.to_owned(),
            columns: &[],
        }
    }

    #[test]
    fn rules_compare_answers() {
        for (rule, expected, found, reward) in [
            (RewardRule::Exact, "red", " red\n", 1.0),
            (RewardRule::Exact, "red", "Red", 0.0),
            (RewardRule::Number, "3.14", "about 3.145 m", 1.0),
            (RewardRule::Number, "3.14", "about 3.2 m", 0.0),
            (RewardRule::Number, "3.14", "pi", 0.0),
            (RewardRule::Number, "3", "3.01", 1.0),
            (RewardRule::Number, "3", "3.0101", 0.0),
            (RewardRule::Boxes, "[0, 0, 10, 10]", "at [0, 0, 10, 5]", 0.5),
        ] {
            let found = rewards(rule, expected, found).expect("comparable");
            assert_eq!(found, [reward], "{expected}");
        }
        for rule in [RewardRule::Number, RewardRule::Boxes] {
            let error = rewards(rule, "red", "1").expect_err("nothing to compare");
            let error = error.to_string();
            assert!(
                error.contains("line 7") && error.contains("\"red\""),
                "{error}"
            );
        }
        let boxes = Reward::Rule {
            rule: RewardRule::Boxes,
            tolerance: 0.0,
        };
        assert!(Scorer::new(&boxes, None).is_err(), "a model of text alone");
    }

    /// The rewards of two batches of answers by a command, beside an answer of the data.
    fn commanded(command: &str, expected: &str) -> Result<[Vec<f64>; 2]> {
        let reward = Reward::Command {
            command: command.to_owned(),
            seconds: 2.0,
        };
        let scorer = Scorer::new(&reward, None)?;
        let of = |found: &[&str]| {
            let all: Vec<_> = found
                .iter()
                .map(|found| completion(expected, found))
                .collect();
            scorer.rewards(&all)
        };
        Ok([of(&["a", "b"])?, of(&["c"])?])
    }

    #[test]
    fn a_command_rewards_lines_of_json() {
        // It counts the lines, and gives 1 for the answer c.
        let found = commanded(
            "while read -r line; do case \"$line\" in \
             *'\"completion\": \"c\", \"answer\": \"x\"'*) echo 1;; *) echo -0.5;; esac; done",
            "x",
        );
        assert_eq!(found.expect("rewards"), [vec![-0.5, -0.5], vec![1.0]]);
    }

    #[test]
    fn commands_that_fail_are_one_error() {
        for (command, says) in [
            ("exit 3", "ended (exit status: 3) after 0 of 2 rewards"),
            ("head -n 1 > /dev/null; echo 1", "after 1 of 2 rewards"),
            ("sleep 60", "wrote nothing for 2 s"),
            ("echo right; cat > /dev/null", "wrote \"right\""),
            ("echo NaN; cat > /dev/null", "wrote \"NaN\""),
            (
                "while read -r line; do echo 1; echo 2; done",
                "beyond one number",
            ),
            ("exec cat /dev/zero", "wrote \""),
            ("no-such-command-here", "ended (exit status: 127)"),
            (
                "sleep 0.5; echo 1; echo 1; sleep 60 | cat",
                "did not read the 2 lines",
            ),
        ] {
            let start = std::time::Instant::now();
            // More than a pipe holds.
            let expected = "x".repeat(1 << 17);
            let error = match commanded(command, &expected) {
                Ok(rewards) => panic!("{command}: {rewards:?}"),
                Err(error) => error.to_string(),
            };
            assert!(error.contains(says) && error.contains(command), "{error}");
            assert!(start.elapsed().as_secs() < 20, "{command}");
        }
    }
}
