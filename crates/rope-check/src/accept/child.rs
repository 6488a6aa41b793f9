//! A process with time limits, whose end is a result: it may exit, crash or hang.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

/// Lines of output that are kept.
const LINES_KEPT: usize = 100_000;
/// Bytes of a line that are kept.
const LINE_BYTES: u64 = 1 << 20;
/// Last lines of standard error that are kept.
const MESSAGES_KEPT: usize = 8;
/// The wait for a killed process, which a driver may hold.
const BURIAL: Duration = Duration::from_secs(5);
const POLL: Duration = Duration::from_millis(50);

/// The end of a process.
#[derive(Debug)]
pub(super) enum End {
    /// With its exit code.
    Exit(i32),
    /// By a signal, such as that of a crash.
    Killed(String),
    /// It was ended for taking longer than this.
    Hang(Duration),
    /// It could not be started.
    Unstarted(String),
}

/// A process that has ended.
#[derive(Debug)]
pub(super) struct Ended {
    pub(super) end: End,
    /// Of standard output.
    pub(super) lines: Vec<String>,
    /// The last lines of standard error.
    pub(super) messages: Vec<String>,
}

/// The time that a process may take, in all and from one line of output to the next.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    pub(super) total: Duration,
    pub(super) silence: Duration,
}

/// Runs a process to its end, at the latest to its limit.
pub(super) fn run(mut command: Command, limits: Limits) -> Ended {
    let started = Instant::now();
    let spawned = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let mut child = match spawned {
        Ok(child) => child,
        Err(error) => {
            return Ended {
                end: End::Unstarted(error.to_string()),
                lines: Vec::new(),
                messages: Vec::new(),
            };
        }
    };
    let (to_lines, lines) = channel();
    let (to_messages, messages) = channel();
    send_lines(child.stdout.take(), to_lines);
    send_lines(child.stderr.take(), to_messages);
    let mut kept = Vec::new();
    let end = watch(&mut child, &lines, &mut kept, limits, started);
    // What was written before the end; a process that it started may hold the pipe open.
    while kept.len() < LINES_KEPT
        && let Ok(line) = lines.recv_timeout(Duration::from_secs(1))
    {
        kept.push(line);
    }
    let mut said = Vec::new();
    while let Ok(line) = messages.recv_timeout(POLL) {
        said.push(line);
        if said.len() > MESSAGES_KEPT {
            said.remove(0);
        }
    }
    Ended {
        end,
        lines: kept,
        messages: said,
    }
}

/// Waits for the end, and kills at a limit.
fn watch(
    child: &mut Child,
    lines: &Receiver<String>,
    kept: &mut Vec<String>,
    limits: Limits,
    started: Instant,
) -> End {
    let mut heard = Instant::now();
    loop {
        match lines.recv_timeout(POLL) {
            Ok(line) => {
                heard = Instant::now();
                if kept.len() < LINES_KEPT {
                    kept.push(line);
                }
                continue;
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => thread::sleep(POLL),
        }
        match child.try_wait() {
            Ok(Some(status)) => return ended(status),
            Ok(None) => {}
            Err(error) => return End::Killed(error.to_string()),
        }
        let limit = match (started.elapsed(), heard.elapsed()) {
            (all, _) if all > limits.total => limits.total,
            (_, silent) if silent > limits.silence => limits.silence,
            _ => continue,
        };
        bury(child);
        return End::Hang(limit);
    }
}

/// Kills a process, and waits for it as long as a driver may hold it.
fn bury(child: &mut Child) {
    // Fails for one that has ended.
    let _ = child.kill();
    let killed = Instant::now();
    while killed.elapsed() < BURIAL && matches!(child.try_wait(), Ok(None)) {
        thread::sleep(POLL);
    }
}

fn ended(status: ExitStatus) -> End {
    match status.code() {
        Some(code) => End::Exit(code),
        // "signal: 6 (SIGABRT) (core dumped)"
        None => End::Killed(status.to_string()),
    }
}

/// Sends each line of a pipe, until its end.
fn send_lines(pipe: Option<impl Read + Send + 'static>, to: Sender<String>) {
    let Some(pipe) = pipe else { return };
    thread::spawn(move || {
        let mut reader = BufReader::new(pipe);
        loop {
            let mut line = Vec::new();
            let read = reader
                .by_ref()
                .take(LINE_BYTES)
                .read_until(b'\n', &mut line);
            let text = String::from_utf8_lossy(&line).trim_end().to_owned();
            if !matches!(read, Ok(1..)) || to.send(text).is_err() {
                return;
            }
        }
    });
}
