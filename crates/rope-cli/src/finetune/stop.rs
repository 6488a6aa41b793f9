//! The signals that end a run: it saves a checkpoint after its step, and exits with a code of its
//! own.

use std::io;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;

/// The exit codes that a shell reports for a process that a signal ended.
const CODE_OF_SIGNAL: usize = 128;

/// The request of a signal.
#[derive(Clone, Debug)]
pub(super) struct Stop {
    flag: Arc<AtomicBool>,
    signal: Arc<AtomicUsize>,
}

impl Stop {
    /// Catches Ctrl+C and a scheduler's SIGTERM; a second one ends the process at once.
    ///
    /// # Errors
    /// Those of the system.
    pub(super) fn new() -> io::Result<Self> {
        let stop = Self {
            flag: Arc::new(AtomicBool::new(false)),
            signal: Arc::new(AtomicUsize::new(0)),
        };
        for signal in [SIGINT, SIGTERM] {
            let number = signal as usize;
            let code = (CODE_OF_SIGNAL + number) as i32;
            flag::register_conditional_shutdown(signal, code, stop.flag.clone())?;
            flag::register_usize(signal, stop.signal.clone(), number)?;
            flag::register(signal, stop.flag.clone())?;
        }
        Ok(stop)
    }

    /// The flag that is true once a signal came.
    pub(super) fn request(&self) -> Arc<AtomicBool> {
        self.flag.clone()
    }

    /// The exit code of a run that stopped: 130 for Ctrl+C, 143 for SIGTERM.
    pub(super) fn code(&self) -> ExitCode {
        // Another host's signal stops this one as well.
        let signal = match self.signal.load(Ordering::Relaxed) {
            0 => SIGTERM as usize,
            signal => signal,
        };
        ExitCode::from((CODE_OF_SIGNAL + signal) as u8)
    }
}
