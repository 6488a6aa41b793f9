//! The listeners of `mrope` under strangers: connections without the token, from this user and
//! others, from one address and many. All on this machine, and bounded in number and time.

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::common::{HANG, Served, command, free_address, fresh, mrope, says, text};

/// A user who owns nothing.
const NOBODY: u32 = 65534;

/// The ports at which a process listens on 127.0.0.1 or all addresses.
fn ports(process: u32) -> Vec<u16> {
    let Ok(files) = std::fs::read_dir(format!("/proc/{process}/fd")) else {
        return Vec::new();
    };
    let links = files.filter_map(|file| std::fs::read_link(file.ok()?.path()).ok());
    let links: Vec<String> = links.map(|link| link.display().to_string()).collect();
    let sockets = std::fs::read_to_string(format!("/proc/{process}/net/tcp")).unwrap_or_default();
    let rows = sockets.lines().map(|row| row.split_whitespace().collect());
    let listening = rows.filter(|row: &Vec<&str>| row.get(3) == Some(&"0A"));
    let own = listening.filter(|row| links.contains(&format!("socket:[{}]", row[9])));
    let ports = own.filter_map(|row| u16::from_str_radix(row[1].split_once(':')?.1, 16).ok());
    let mut ports: Vec<u16> = ports.collect();
    ports.sort_unstable();
    ports.dedup();
    ports
}

/// True if this process may become another user.
fn is_root() -> bool {
    let mut command = Command::new("true");
    command.uid(NOBODY).gid(NOBODY);
    command.status().is_ok_and(|status| status.success())
}

/// What a server says to the request for a session by another program: of another user, if this one
/// may become another. Empty if it accepts no connection within a second.
fn answer_to_stranger(port: u16) -> Vec<u8> {
    let request = "GET /session HTTP/1.1\\r\\nHost: x\\r\\nConnection: Upgrade\\r\\n\
         Upgrade: websocket\\r\\nSec-WebSocket-Version: 13\\r\\n\
         Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\\r\\n\\r\\n";
    let ask = format!("exec 3<>/dev/tcp/127.0.0.1/{port} && printf '{request}' >&3 && cat <&3");
    let mut stranger = Command::new("timeout");
    stranger.args(["1", "bash", "-c", &ask]).current_dir("/");
    if is_root() {
        stranger.uid(NOBODY).gid(NOBODY);
    }
    let asked = stranger.stderr(Stdio::null()).output();
    asked.expect("bash is there").stdout
}

#[test]
fn the_inner_port_is_closed_to_others_before_the_first_client() {
    let mut served = Served::start("cpu", "inner-closed");
    let public: SocketAddr = address(&served);
    assert!(answer_to_stranger(public.port()).starts_with(b"HTTP/1.1 101 "));
    let mut all = ports(served.process().id());
    all.retain(|port| *port != public.port());
    assert_eq!(all.len(), 1, "{all:?}");
    let inner = SocketAddr::from((Ipv4Addr::LOCALHOST, all[0]));
    assert_eq!(answer_to_stranger(inner.port()), b"");
    let found = TcpStream::connect_timeout(&inner, Duration::from_millis(300));
    assert_eq!(found.expect_err("closed").kind(), ErrorKind::TimedOut);
}

/// From the first moment to the last, the ports of a run on an NPU of this process answer nobody.
#[test]
fn the_port_of_a_run_on_an_npu_is_closed_to_others() {
    let out = fresh("closed-run").display().to_string();
    let shapes = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/shapes");
    let (model, data) = (format!("{shapes}/model"), format!("{shapes}/train.jsonl"));
    let train = ["train", "--steps", "5", "--device", "ascend-sim", "--quiet"];
    let finetune = [
        "finetune",
        &model,
        "--random-weights",
        "--data",
        &data,
        "--steps",
        "4",
        "--device",
        "ascend-sim",
        "--quiet",
    ];
    for arguments in [&train[..], &finetune] {
        let run = command(arguments)
            .args(["--out", &out])
            .stdout(Stdio::null())
            .spawn();
        let mut run = Killed(run.expect("starts"));
        let (mut asked, mut open) = (0, 0);
        let begun = Instant::now();
        while run.0.try_wait().expect("a child").is_none() && begun.elapsed() < HANG {
            for port in ports(run.0.id()) {
                let near = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
                let soon = Duration::from_millis(100);
                open += usize::from(TcpStream::connect_timeout(&near, soon).is_ok());
                if asked < 6 {
                    assert_eq!(answer_to_stranger(port), b"", "{arguments:?}");
                }
                asked += 1;
            }
        }
        assert!(run.0.wait().expect("a child").success(), "{arguments:?}");
        // A connection may fall into the moment of the run's own, which ends before a word.
        assert!(
            asked > 2 && open <= 2,
            "{arguments:?}: {open} of {asked} connections"
        );
    }
}

/// A program that is killed with this.
struct Killed(Child);

impl Killed {
    /// Fails if the program does not end.
    fn end(&mut self) -> ExitStatus {
        let begun = Instant::now();
        loop {
            if let Some(ended) = self.0.try_wait().expect("a child") {
                return ended;
            }
            assert!(begun.elapsed() < HANG, "no end after {HANG:?}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Killed {
    fn drop(&mut self) {
        // It may have ended.
        let _gone = self.0.kill();
        let _ended = self.0.wait();
    }
}

fn address(served: &Served) -> SocketAddr {
    served.url.replace("ws://", "").parse().expect("an address")
}

/// What strangers do with a connection.
#[derive(Clone, Copy, Debug)]
enum Way {
    /// They say nothing, and hold it.
    Idle,
    /// They send a byte now and then.
    Slow,
    Garbage,
    /// They announce a message of the greatest length.
    Huge,
    /// They say nothing, and open another as soon as it is closed.
    Evicting,
}

const WAYS: [Way; 5] = [Way::Idle, Way::Slow, Way::Garbage, Way::Huge, Way::Evicting];

/// Strangers on several threads, until dropped or `most` connections.
struct Flood {
    over: std::sync::Arc<AtomicBool>,
    opened: std::sync::Arc<AtomicUsize>,
    threads: Vec<std::thread::JoinHandle<()>>,
}

/// Connections that a thread of a flood holds.
const HELD: usize = 200;

impl Flood {
    /// Each thread holds some hundred connections and opens them anew, from 127.0.0.1 or from many
    /// addresses. They send the beginning of an honest client's message, or one that is too large.
    fn start(
        to: SocketAddr,
        most: usize,
        from_many: bool,
        [hello, huge]: [&'static [u8]; 2],
    ) -> Self {
        let (over, opened) = <(std::sync::Arc<AtomicBool>, std::sync::Arc<AtomicUsize>)>::default();
        let stranger = |_| {
            let (over, opened) = (over.clone(), opened.clone());
            std::thread::spawn(move || {
                let mut held = std::collections::VecDeque::new();
                while !over.load(Ordering::Relaxed) {
                    let number = opened.fetch_add(1, Ordering::Relaxed);
                    if number >= most {
                        // They hold what they have.
                        opened.fetch_sub(1, Ordering::Relaxed);
                        std::thread::sleep(Duration::from_millis(20));
                        continue;
                    }
                    let way = WAYS[number % WAYS.len()];
                    let from = if from_many { number } else { 0 };
                    let Ok(mut stranger) = connect_from(from, to) else {
                        std::thread::sleep(Duration::from_millis(1));
                        continue;
                    };
                    // It may be closed already.
                    let _sent = match way {
                        Way::Idle | Way::Evicting => Ok(()),
                        Way::Slow => stranger.write_all(&hello[..1]),
                        Way::Garbage => stranger.write_all(&[0xa5; 2048]),
                        Way::Huge => stranger.write_all(huge),
                    };
                    held.push_back((way, stranger));
                    if held.len() > HELD {
                        held.pop_front();
                    }
                    if let Some((Way::Slow, slow)) = held.get_mut(number % HELD) {
                        let _sent = slow.write_all(b"x");
                    }
                }
            })
        };
        Self {
            threads: (0..4).map(stranger).collect(),
            over,
            opened,
        }
    }

    fn opened(&self) -> usize {
        self.opened.load(Ordering::Relaxed)
    }
}

impl Drop for Flood {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            thread.join().expect("no panic");
        }
    }
}

/// A connection from 127.0.0.1 for 0, or from one of a million other addresses of this machine.
fn connect_from(number: usize, to: SocketAddr) -> std::io::Result<TcpStream> {
    let [_, a, b, c] = (number as u32 % 1_000_000).to_be_bytes();
    let from = match number {
        0 => Ipv4Addr::LOCALHOST,
        _ => Ipv4Addr::new(127, a + 1, b, c),
    };
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None)?;
    // Otherwise each end would keep a port for a minute.
    socket.set_linger(Some(Duration::ZERO))?;
    socket.bind(&SocketAddr::from((from, 0)).into())?;
    socket.connect_timeout(&to.into(), Duration::from_secs(1))?;
    Ok(socket.into())
}

const REQUEST: &[u8] = b"GET /session HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\n\
    Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\n\
    Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n";

/// A request and the head of a message of 1 GiB.
const OF_GIBIBYTE: &[u8] = b"GET /session HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\n\
    Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\n\
    Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n\x82\xff\0\0\0\0\x40\0\0\0\0\0\0\0";
const OF_SERVER: [&[u8]; 2] = [REQUEST, OF_GIBIBYTE];

/// A process's kibibytes in memory, open files and threads.
#[derive(Clone, Copy, Debug)]
struct Size {
    kib: usize,
    files: usize,
    threads: usize,
}

fn size(process: u32) -> Size {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).expect("it runs");
    let number = |name: &str| {
        let line = status.lines().find(|line| line.starts_with(name));
        let word = line.and_then(|line| line.split_whitespace().nth(1));
        word.and_then(|word| word.parse().ok()).expect("a number")
    };
    let files = std::fs::read_dir(format!("/proc/{process}/fd")).expect("it runs");
    Size {
        kib: number("VmRSS:"),
        files: files.count(),
        threads: number("Threads:"),
    }
}

/// Honest runs on a served device, one after the other until a flood is over; their number and the
/// longest.
fn train(served: &Served, while_true: impl Fn() -> bool) -> (usize, Duration) {
    let (mut runs, mut longest) = (0, Duration::ZERO);
    while runs == 0 || while_true() {
        let begun = Instant::now();
        let out = format!("flooded-{}", address(served).port());
        let out = fresh(&out).display().to_string();
        let run = command(&["train", "--steps", "1", "--test-questions", "1", "--quiet"])
            .args(["--device", &served.remote(), "--out", &out])
            .env("MROPE_TOKEN", served.token())
            .output()
            .expect("it starts");
        assert!(run.status.success(), "run {runs}: {}", text(&run.stderr));
        (runs, longest) = (runs + 1, longest.max(begun.elapsed()));
    }
    (runs, longest)
}

/// Floods the server by `most` strangers from one address, then from many, while honest clients of
/// 127.0.0.1 train.
fn flooded(name: &str, most: usize) {
    let mut served = Served::start("cpu", name);
    let process = served.process().id();
    train(&served, || false);
    let before = size(process);
    for from_many in [false, true] {
        let flood = Flood::start(address(&served), most, from_many, OF_SERVER);
        let begun = Instant::now();
        let limit = patience(most);
        let (runs, longest) = train(&served, || flood.opened() < most && begun.elapsed() < limit);
        println!(
            "{} strangers, from {}: {runs} runs, the longest {longest:?}; {:?}, before {before:?}",
            flood.opened(),
            if from_many {
                "many addresses"
            } else {
                "one address"
            },
            size(process)
        );
        assert!(flood.opened() >= most, "few strangers: {}", flood.opened());
        let grown = size(process).kib.saturating_sub(before.kib);
        assert!(grown < 64 << 10, "{grown} KiB more");
    }
    // The last of them had five seconds.
    std::thread::sleep(Duration::from_secs(6));
    let after = size(process);
    let is_flat = after.files <= before.files + 2 && after.threads <= before.threads + 2;
    assert!(is_flat, "{before:?} {after:?}");
}

#[test]
fn honest_clients_train_while_strangers_flood_the_server() {
    flooded("flooded", 1000);
}

#[test]
#[ignore = "some minutes: in the deep checks"]
fn honest_clients_train_through_20_000_strangers_of_each_address() {
    flooded("flooded-long", 20_000);
}

/// The time limit of a test with this many strangers, on a busy machine.
fn patience(strangers: usize) -> Duration {
    Duration::from_secs(60) + Duration::from_millis(20) * strangers as u32
}

/// Two hosts meet and train while strangers of the same address, or of many, call the rendezvous.
fn meeting(name: &str, most: usize) {
    let token = fresh(&format!("{name}.token"));
    let made = mrope_token(&token);
    assert!(made, "a token");
    let shapes = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/shapes");
    let patience = patience(most);
    for from_many in [false, true] {
        let to = free_address();
        let out = fresh(name).display().to_string();
        let host = |number: usize| {
            let model = format!("{shapes}/model");
            let data = format!("{shapes}/train.jsonl");
            let run = command(&["finetune", &model, "--random-weights", "--full"])
                .args([
                    "--data",
                    &data,
                    "--steps",
                    "1",
                    "--device",
                    "ascend-sim",
                    "--quiet",
                ])
                .args(["--out", &out, "--hosts", "2", "--host", &number.to_string()])
                .args(["--rendezvous", &to.to_string(), "--rank-timeout"])
                .arg(patience.as_secs().to_string())
                .args(["--token-file", &token.display().to_string()])
                .stdout(Stdio::null())
                .stderr(Stdio::piped())
                .spawn();
            Killed(run.expect("starts"))
        };
        let mut first = host(0);
        let begun = Instant::now();
        while TcpStream::connect(to).is_err() && begun.elapsed() < patience {
            std::thread::sleep(Duration::from_millis(20));
        }
        // As many as host 0 hears before the other comes.
        let flood = Flood::start(to, 2 * most, from_many, [&[64, 0, 0, 0], &[0xff; 4]]);
        while flood.opened() < most && begun.elapsed() < patience {
            std::thread::sleep(Duration::from_millis(10));
        }
        let held = size(first.0.id());
        let mut second = host(1);
        for run in [&mut first, &mut second] {
            let ended = run.end();
            let mut said = String::new();
            let stderr = run.0.stderr.as_mut().expect("a pipe");
            stderr.read_to_string(&mut said).expect("text");
            assert!(ended.success(), "{said}");
        }
        println!(
            "{} strangers, from {}: both hosts trained in {:?}; {held:?}",
            flood.opened(),
            if from_many {
                "many addresses"
            } else {
                "one address"
            },
            begun.elapsed(),
        );
        assert!(flood.opened() >= most, "few strangers: {}", flood.opened());
        assert!(held.files < 600 && held.threads < 300, "{held:?}");
    }
}

fn mrope_token(path: &std::path::Path) -> bool {
    use std::os::unix::fs::OpenOptionsExt as _;
    let file = std::fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path);
    file.and_then(|mut file| file.write_all(&[b'k'; 40]))
        .is_ok()
}

#[test]
fn hosts_meet_while_strangers_flood_the_rendezvous() {
    meeting("met", 1000);
}

#[test]
#[ignore = "some minutes: in the deep checks"]
fn hosts_meet_through_20_000_strangers_of_each_address() {
    meeting("met-long", 20_000);
}

/// A port that no server can have is no address to try for a while.
#[test]
fn a_port_beyond_the_last_is_refused_at_once() {
    let begun = Instant::now();
    let refused = mrope(&["train", "--device", "remote:ws://127.0.0.1:99999"]);
    says(
        &text(&refused.stderr),
        "expected a port from 1 to 65535, found \"99999\"",
    );
    assert_eq!(refused.status.code(), Some(2));
    assert!(
        begun.elapsed() < Duration::from_secs(5),
        "{:?}",
        begun.elapsed()
    );
}

/// Clients that train and die, for some minutes, among strangers: the server's memory, files and
/// threads end as they were. MROPE_SOAK_MINUTES sets another time than twenty minutes.
#[test]
#[ignore = "twenty minutes: in the deep checks"]
fn a_soak_of_twenty_minutes_leaves_the_servers_as_they_were() {
    let minutes = std::env::var("MROPE_SOAK_MINUTES").ok();
    let minutes: f64 = minutes.map_or(20.0, |text| text.parse().expect("a number"));
    let time = Duration::from_secs_f64(minutes * 60.0);
    let servers = ["cpu", "ascend-sim"].map(|device| {
        let served = Served::start(device, &format!("soaked-{device}"));
        (device, served)
    });
    let begun = Instant::now();
    std::thread::scope(|scope| {
        for (device, served) in servers {
            scope.spawn(move || soak(device, served, begun, time));
        }
    });
}

fn soak(device: &str, mut served: Served, begun: Instant, time: Duration) {
    let process = served.process().id();
    let (mut ended, mut killed) = (0, 0);
    let mut settled = None;
    let mut print = begun;
    while begun.elapsed() < time {
        // At most 20,000 in all, slowly, and of every kind.
        let flood = Flood::start(address(&served), 200, ended % 2 == 0, OF_SERVER);
        let dying = command(&["train", "--steps", "200", "--quiet"])
            .args(["--device", &served.remote()])
            .args([
                "--out",
                &fresh(&format!("dies-{device}")).display().to_string(),
            ])
            .env("MROPE_TOKEN", served.token())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        let dying = Killed(dying.expect("starts"));
        std::thread::sleep(Duration::from_millis(200 * (1 + killed % 7)));
        // The last steps may have come first.
        drop(dying);
        killed += 1;
        let (runs, _) = train(&served, || false);
        ended += runs;
        drop(flood);
        // The caches and records of the program are full after a quarter of the time.
        if settled.is_none() && begun.elapsed() > time / 4 {
            settled = Some(size(process));
        }
        if print.elapsed() > time / 20 {
            print = Instant::now();
            println!(
                "{device} {:?}: {killed} killed, {ended} ended, {:?}",
                begun.elapsed(),
                size(process)
            );
        }
    }
    std::thread::sleep(Duration::from_secs(7));
    let (settled, after) = (settled.expect("a quarter"), size(process));
    println!("{device}: {killed} killed, {ended} ended, {settled:?} then {after:?}");
    // What one session has would be far more over a soak.
    assert!(
        after.kib < settled.kib + (16 << 10),
        "{settled:?} {after:?}"
    );
    assert!(after.files <= 32 && after.threads <= 16, "{after:?}");
}
