//! The simulated NPUs of a test process, and `mrope` as a user runs it.
#![allow(dead_code, unused_imports, reason = "no test file uses all of it")]

use std::io::{BufRead, BufReader};
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, MutexGuard, Once};
use std::time::Duration;

pub(crate) use crate::program::{command, mrope, says, text};
use ascend_sim::Machine;
use ascend_sim::control::{self, Session};
use burn_ascend::{AscendDevice, AscendHost};

/// Longer than anything here takes on a busy machine: only a hang reaches it.
pub(crate) const HANG: Duration = Duration::from_secs(120);

/// Fails if `body` does not end.
pub(crate) fn within<T: Send + 'static>(
    limit: Duration,
    body: impl FnOnce() -> T + Send + 'static,
) -> T {
    let (done, result) = channel();
    let thread = std::thread::spawn(move || done.send(body()).is_ok());
    match result.recv_timeout(limit) {
        Ok(value) => value,
        Err(_) if thread.is_finished() => panic!("the thread under test panicked"),
        Err(_) => panic!("no end after {limit:?}"),
    }
}

/// The simulated machine, for one test at a time: memory, calls and faults are those of the
/// process. A test fails if the machine has found violations when it ends.
pub(crate) struct Held(#[expect(dead_code, reason = "held, not read")] MutexGuard<'static, ()>);

impl Drop for Held {
    fn drop(&mut self) {
        let violations = control::take_violations();
        if !std::thread::panicking() {
            assert!(violations.is_empty(), "{violations:#?}");
        }
    }
}

/// Two simulated NPUs, which need the host's C++17 compiler.
pub(crate) fn npus() -> (Held, [AscendDevice; 2]) {
    static ONE: Mutex<()> = Mutex::new(());
    static MACHINE: Once = Once::new();
    let held = ONE.lock().unwrap_or_else(|broken| broken.into_inner());
    MACHINE.call_once(|| {
        let devices = 2;
        // Kept: the runtime, which is started once, belongs to this machine.
        std::mem::forget(Session::with_machine(Machine {
            devices,
            ..Machine::default()
        }));
    });
    let npu = rope_ascend::rope::Npu::simulated().expect("the simulator starts");
    npu.kernels().unwrap_or_else(|error| panic!("{error}"));
    control::clear_faults();
    control::set_memory_limit(None);
    let npus = [0, 1].map(AscendDevice::simulated);
    (Held(held), npus)
}

/// A served NPU and its burn device.
pub(crate) fn host(npu: AscendDevice) -> (AscendHost, burn::tensor::Device) {
    let host = AscendHost::start(&[npu]).expect("the simulated device opens");
    let device = host.devices()[0].clone();
    (host, device)
}

/// A free address for a server that is yet to start. Its port is below those that the system gives to
/// connections, of which other tests open thousands.
pub(crate) fn free_address() -> SocketAddr {
    static TRIED: AtomicU16 = AtomicU16::new(0);
    let first = std::process::id() as u16;
    loop {
        let next = first.wrapping_add(TRIED.fetch_add(1, Ordering::Relaxed));
        let address = SocketAddr::from(([127, 0, 0, 1], 20_000 + next % 12_000));
        if TcpListener::bind(address).is_ok() {
            return address;
        }
    }
}

/// A folder for a test's files, which does not exist yet.
pub(crate) fn fresh(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    if path.is_dir() {
        std::fs::remove_dir_all(&path).expect("the old folder goes");
    } else if path.exists() {
        std::fs::remove_file(&path).expect("the old file goes");
    }
    path
}

/// A running `mrope serve`; killed with it.
pub(crate) struct Served {
    child: Child,
    pub(crate) url: String,
    pub(crate) token_file: PathBuf,
    pub(crate) said: String,
    log: Arc<Mutex<String>>,
}

impl Served {
    pub(crate) fn start(device: &str, name: &str) -> Self {
        Self::start_with(device, name, [])
    }

    /// With variables of the environment.
    pub(crate) fn start_with<const N: usize>(
        device: &str,
        name: &str,
        variables: [(&str, &str); N],
    ) -> Self {
        let token_file = fresh(&format!("{name}.token"));
        let path = token_file.display().to_string();
        let arguments = ["serve", "--device", device, "--bind", "127.0.0.1:0"];
        let mut child = command(&arguments)
            .args(["--token-file", &path])
            .envs(variables)
            .stdout(Stdio::piped())
            .spawn()
            .expect("program starts");
        let mut output = BufReader::new(child.stdout.take().expect("a pipe"));
        let mut said = String::new();
        while !said.contains("stop ") {
            let read = output.read_line(&mut said).expect("output is text");
            assert!(read > 0, "it ended: {said}");
        }
        // Its log must not fill the pipe.
        let log = Arc::new(Mutex::new(String::new()));
        let lines = log.clone();
        std::thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                let mut log = lines.lock().expect("no reader panicked");
                log.push_str(&line);
                log.push('\n');
            }
        });
        let url = said
            .split_whitespace()
            .find(|word| word.starts_with("ws://"));
        Self {
            url: url.expect("an address").to_owned(),
            child,
            token_file,
            said,
            log,
        }
    }

    /// Its device for `--device`.
    pub(crate) fn remote(&self) -> String {
        format!("remote:{}", self.url)
    }

    pub(crate) fn token(&self) -> String {
        std::fs::read_to_string(&self.token_file).expect("the token was written")
    }

    /// Its output since the start.
    pub(crate) fn log(&self) -> String {
        self.log.lock().expect("no writer panicked").clone()
    }

    /// Its process.
    pub(crate) fn process(&mut self) -> &mut Child {
        &mut self.child
    }

    /// Ends the process as a crash does.
    pub(crate) fn kill(&mut self) {
        self.child.kill().expect("it was running");
        self.child.wait().expect("it ends");
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        // It may have been killed before.
        let _gone = self.child.kill();
        let _ended = self.child.wait();
    }
}
