//! `mrope serve`: admitted and rejected clients, and the messages to a user.

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::common::{HANG, Served, command, fresh, mrope, says, text, within};

/// Says no, in one line.
fn refused(arguments: &[&str]) -> String {
    let output = mrope(arguments);
    let errors = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{errors}");
    assert!(
        errors.starts_with("error: ") && errors.lines().count() == 1,
        "{errors}"
    );
    errors
}

#[test]
fn only_who_has_the_token_gets_in() {
    let served = Served::start("cpu", "strangers");
    let (url, remote) = (served.url.clone(), served.remote());
    assert!(url.starts_with("ws://127.0.0.1:"), "{url}");
    let token = served.token();
    let named = format!("--token-file {}\n", served.token_file.display());
    says(&served.said, named);
    assert!(
        token.trim().len() >= 32 && !served.said.contains(token.trim()),
        "{}",
        served.said
    );
    for part in ["cpu at ws://", &remote, "Ctrl+C"] {
        assert!(
            served.said.contains(part),
            "{part} is not in {}",
            served.said
        );
    }
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        let mode = served
            .token_file
            .metadata()
            .expect("it is there")
            .permissions()
            .mode();
        assert_eq!(mode & 0o777, 0o600);
    }

    let verify = ["verify", "--device", &remote, "no-such-file"];
    let none = refused(&verify);
    says(&none, "--token-file");
    says(&none, "MROPE_TOKEN");
    let wrong = command(&verify)
        .env("MROPE_TOKEN", "guess")
        .output()
        .expect("it starts");
    says(&text(&wrong.stderr), "rejected the credential");
    says(
        &text(&wrong.stderr),
        "MROPE_TOKEN is not the server's token",
    );
    let right = command(&verify)
        .env("MROPE_TOKEN", token)
        .output()
        .expect("it starts");
    assert!(text(&right.stdout).contains("no-such-file"), "{right:?}");
    let second = refused(&[
        "train",
        "--device",
        &format!("{remote}#1"),
        "--token-file",
        &served.token_file.display().to_string(),
    ]);
    assert!(second.contains("hosts only 1 device"), "{second}");
    let npu = refused(&["gradcheck", "--device", &remote]);
    assert!(npu.contains("is not a device of this machine"), "{npu}");
}

#[test]
fn golden_files_verify_on_a_served_device() {
    let served = Served::start("cpu", "golden");
    let fixture = rope_check::fixtures()
        .expect("the test runs in the workspace")
        .join("qwen3_vl_mrope_24_20_20_interleaved.safetensors");
    let fixture = fixture.display().to_string();
    let token_file = served.token_file.display().to_string();
    let remote = served.remote();
    let output = mrope(&[
        "verify",
        "--device",
        &remote,
        "--token-file",
        &token_file,
        &fixture,
    ]);
    let found = text(&output.stdout);
    assert!(output.status.success(), "{found}{}", text(&output.stderr));
    says(&found, "burn/fused");
    says(&found, " 0 out of tolerance");
    // The end of a client's program is no warning.
    let started = Instant::now();
    while !served.log().contains("left after") && started.elapsed() < HANG {
        std::thread::sleep(Duration::from_millis(20));
    }
    std::thread::sleep(Duration::from_millis(200));
    let log = served.log();
    says(&log, " connected");
    says(&log, "left after");
    assert!(!log.contains("closing handshake"), "{log}");
}

/// Through the inner port, clients could bypass the guard.
#[test]
fn the_inner_port_is_not_logged() {
    let served = Served::start_with("cpu", "inner", [("RUST_LOG", "debug")]);
    let client = command(&["verify", "--device", &served.remote(), "no-such-file"])
        .env("MROPE_TOKEN", served.token())
        .output();
    let client = client.expect("it starts");
    assert!(text(&client.stdout).contains("no-such-file"), "{client:?}");
    let started = Instant::now();
    while !served.log().contains("left after") && started.elapsed() < HANG {
        std::thread::sleep(Duration::from_millis(20));
    }
    let log = served.log();
    says(&log, "left after");
    assert!(!log.contains("Server started, listening on"), "{log}");
}

#[test]
fn a_token_is_kept_and_must_be_kept_safe() {
    let served = Served::start("cpu", "kept");
    let (token, path) = (served.token(), served.token_file.display().to_string());
    drop(served);
    // As another run finds it.
    let again = within(HANG, {
        let path = path.clone();
        move || {
            let taken = TcpListener::bind("127.0.0.1:0").expect("a free port");
            let address = taken.local_addr().expect("an address").to_string();
            refused(&[
                "serve",
                "--device",
                "cpu",
                "--bind",
                &address,
                "--token-file",
                &path,
            ])
        }
    });
    says(&again, "cannot listen on 127.0.0.1:");
    says(&again, "choose another --bind");
    assert_eq!(std::fs::read_to_string(&path).expect("it is there"), token);
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        let open = std::fs::Permissions::from_mode(0o644);
        std::fs::set_permissions(&path, open).expect("it is ours");
        let open = refused(&["serve", "--device", "cpu", "--token-file", &path]);
        assert!(open.contains("chmod 600"), "{open}");
    }
    let empty = fresh("empty.token");
    std::fs::write(&empty, "\n").expect("it is ours");
    let empty = empty.display().to_string();
    let empty = refused(&[
        "train",
        "--device",
        "remote:ws://127.0.0.1:1",
        "--token-file",
        &empty,
    ]);
    assert!(empty.contains("is empty"), "{empty}");
}

/// A connection that asks for a WebSocket on a route, and sends `more` after that.
fn upgrade(address: &str, route: &str, more: &[u8]) -> TcpStream {
    let mut stranger = TcpStream::connect(address).expect("it listens");
    stranger.set_read_timeout(Some(HANG)).expect("not zero");
    let request = format!(
        "GET {route} HTTP/1.1\r\nHost: {address}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
         Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
    );
    let sent = [request.as_bytes(), more].concat();
    stranger.write_all(&sent).expect("it reads");
    stranger
}

/// A WebSocket on the route of sessions that has sent no message.
fn session(address: &str) -> TcpStream {
    try_session(address).expect("it answers")
}

/// The same; an error if the server closed the connection to make room.
fn try_session(address: &str) -> std::io::Result<TcpStream> {
    let mut stranger = upgrade(address, "/session", b"");
    let mut answer = Vec::new();
    while !answer.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        stranger.read_exact(&mut byte)?;
        answer.extend(byte);
    }
    assert!(answer.starts_with(b"HTTP/1.1 101 "), "{answer:?}");
    Ok(stranger)
}

/// The message that a connection receives before it is closed.
fn told(mut stranger: TcpStream) -> String {
    let mut told = Vec::new();
    match stranger.read_to_end(&mut told) {
        Ok(_) => {}
        Err(error) => assert_eq!(error.kind(), ErrorKind::ConnectionReset, "{error}"),
    }
    String::from_utf8_lossy(&told).into_owned()
}

/// Bytes of a process in memory.
#[cfg(target_os = "linux")]
fn resident(process: u32) -> usize {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).expect("it runs");
    let line = status.lines().find(|line| line.starts_with("VmRSS:"));
    let kib = line.and_then(|line| line.split_whitespace().nth(1));
    kib.and_then(|kib| kib.parse::<usize>().ok()).expect("kB") << 10
}

/// Openings of strangers in all kinds and splits of bytes: what the server says after its answer to
/// the request is the refusal of a token or nothing; its memory stays, and others are answered.
#[cfg(target_os = "linux")]
fn openings(name: &str, count: usize, at_once: usize) {
    let mut served = Served::start("cpu", name);
    let (address, process) = (served.url.replace("ws://", ""), served.process().id());
    assert_eq!(owner_verifies(&served), "");
    let idle = resident(process);
    let (left, upgraded) = (AtomicUsize::new(count), AtomicUsize::new(0));
    let (mut slowest, mut grown) = (Duration::ZERO, 0);
    std::thread::scope(|scope| {
        for thread in 0..at_once {
            let (address, left, upgraded) = (&address, &left, &upgraded);
            scope.spawn(move || {
                let mut state = thread as u64 + 1;
                let one_less = |left: usize| left.checked_sub(1);
                while left
                    .fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_less)
                    .is_ok()
                {
                    let came_far = opening(address, &mut state);
                    upgraded.fetch_add(usize::from(came_far), Ordering::Relaxed);
                }
            });
        }
        while left.load(Ordering::Relaxed) > 0 {
            let started = Instant::now();
            // The strangers have this client's address and crowd it out, so it tries again.
            while try_session(&address).is_err() && started.elapsed() < HANG {}
            slowest = slowest.max(started.elapsed());
            grown = grown.max(resident(process).saturating_sub(idle));
            std::thread::sleep(Duration::from_millis(50));
        }
    });
    assert_eq!(owner_verifies(&served), "");
    let upgraded = upgraded.into_inner();
    println!(
        "{count} openings, {upgraded} of them with a WebSocket; {} MiB more at most, another client \
         was answered within {slowest:?}",
        grown >> 20
    );
    // On a busy machine, more of them reach their own deadlines first.
    assert!(upgraded > count / 40, "few have come so far: {upgraded}");
    assert!(grown < 64 << 20, "{grown} bytes more");
    assert!(slowest < Duration::from_secs(1), "{slowest:?}");
    stopped(&mut served, "-TERM");
}

/// One opening. True if it got a WebSocket; panics if the server says more than a refusal there.
#[cfg(target_os = "linux")]
fn opening(address: &str, state: &mut u64) -> bool {
    let mut below = |limit: usize| {
        *state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (*state >> 33) as usize % limit
    };
    const MORE: [&str; 8] = [
        "Content-Length: 6",
        "Content-Length: 0",
        "Transfer-Encoding: chunked",
        "Upgrade: h2c",
        "Connection: close",
        "Expect: 100-continue",
        "Sec-WebSocket-Extensions: permessage-deflate",
        "X: y",
    ];
    let mut lines = vec!["GET /session HTTP/1.1", "Host: x", "Connection: Upgrade"];
    lines.extend(["Upgrade: websocket", "Sec-WebSocket-Version: 13"]);
    lines.push("Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==");
    // Half of them declare the head of the first message as the request's body, which makes frames
    // of the message: a ping, whose answer opened the way once in 180 tries.
    let crafted = below(2) == 0;
    let (mut end, mut frames) = ("\r\n", 0);
    if crafted {
        lines.insert(5, MORE[0]);
    } else {
        frames = below(4);
        for _ in 0..below(3) {
            let place = 1 + below(lines.len());
            lines.insert(place, MORE[below(MORE.len())]);
        }
        if below(8) == 0 {
            lines[0] = ["GET /data HTTP/1.1", "POST /session HTTP/1.1"][below(2)];
        }
        if below(12) == 0 {
            end = "\n";
        }
    }
    let mut bytes: Vec<u8> = (lines.join(end) + end + end).into_bytes();
    let mask = [0; 4];
    let ping = [&[0x89, 0x82][..], &mask, b"hi"].concat();
    let gibibyte = [&[0x82, 0xff][..], &(1_u64 << 30).to_be_bytes(), &mask].concat();
    let small = |content: &[u8]| [&[0x82, 0x80 | content.len() as u8][..], &mask, content].concat();
    let head_bytes = bytes.len();
    if crafted {
        bytes.extend(small(&[&ping[..], &gibibyte].concat()));
    }
    for _ in 0..frames {
        match below(6) {
            0 => bytes.extend(&ping),
            1 => bytes.extend(&gibibyte),
            2 => bytes.extend(small(&[&ping[..], &gibibyte].concat())),
            3 => bytes.extend(small(&[ping[0]; 40][..below(40)])),
            4 => bytes.extend([0xa5; 16]),
            _ => bytes.extend(lines[0].as_bytes()),
        }
    }
    let mut stranger = TcpStream::connect(address).expect("it listens");
    stranger.set_nodelay(true).expect("a socket");
    // The head by itself, most often; else the bytes in any pieces.
    let pieces = below(4);
    for piece in 0..pieces.max(1) {
        let length = match (pieces, piece) {
            (0 | 1, 0) => head_bytes,
            _ => below(bytes.len().max(1)),
        };
        let first: Vec<u8> = bytes.drain(..length).collect();
        // It may be refused before all is written.
        let _refused = stranger.write_all(&first);
        std::thread::yield_now();
    }
    let _refused = stranger.write_all(&bytes);
    let soon = Some(Duration::from_millis(20));
    stranger.set_read_timeout(soon).expect("not zero");
    let mut told = Vec::new();
    let _ended_or_late = stranger.read_to_end(&mut told);
    let answer = told.windows(4).position(|bytes| bytes == b"\r\n\r\n");
    let said = answer.map_or(&[][..], |end| &told[end + 4..]);
    if let Some(first) = said.first() {
        // The server's word on the first message, after which it closes.
        assert_eq!(*first, 0x82, "{said:?}");
        stranger.set_read_timeout(Some(HANG)).expect("not zero");
        self::told(stranger);
    }
    told.starts_with(b"HTTP/1.1 101 ")
}

#[cfg(target_os = "linux")]
#[test]
fn openings_of_strangers_let_nobody_in() {
    openings("openings", 2000, 16);
}

#[cfg(target_os = "linux")]
#[test]
#[ignore = "an hour"]
fn a_million_openings_let_nobody_in() {
    // Most of the time of an opening is the stranger's, who waits for an answer.
    openings("million", 1_000_000, 96);
}

#[cfg(target_os = "linux")]
#[test]
fn strangers_are_told_nothing_and_cost_little_while_the_owner_is_served() {
    const MIB: usize = 1 << 20;
    let mut served = Served::start("cpu", "guarded");
    let address = served.url.replace("ws://", "");
    let before = resident(served.process().id());

    let data = told(upgrade(&address, "/data", b""));
    assert!(data.starts_with("HTTP/1.1 404 "), "{data}");
    let mut declared = session(&address);
    let gibibyte: u64 = 1 << 30;
    let header = [&[0x82, 0xff][..], &gibibyte.to_be_bytes()].concat();
    declared.write_all(&header).expect("it reads");
    assert_eq!(told(declared), "");
    // A ping, whose answer is none to a first message, and the header of a message of 1 GiB, in one
    // write with the request.
    let frames = [&b"\x89\x80\0\0\0\0"[..], &header, b"\0\0\0\0\r\n\r\n"].concat();
    let smuggled = told(upgrade(&address, "/session", &frames));
    assert_eq!(smuggled, "");
    let mut garbage = TcpStream::connect(&address).expect("it listens");
    // It may be refused before all is written.
    let _refused = garbage.write_all(&[0xa5; 1 << 20]);
    assert_eq!(told(garbage), "");

    let opened = Instant::now();
    let crowd = strangers(&address, 200);
    assert_eq!(owner_verifies(&served), "");
    let grown = resident(served.process().id()).saturating_sub(before);
    assert!(grown < 100 * MIB, "{grown} bytes more");
    for stranger in crowd {
        stranger.set_read_timeout(Some(HANG)).expect("not zero");
        assert_eq!(told(stranger), "");
    }
    assert!(
        opened.elapsed() < Duration::from_secs(60),
        "{:?}",
        opened.elapsed()
    );
}

/// Connections without the token, of every kind: idle, of one byte, a session without a message,
/// one whose message does not come, garbage, and a message of 1 GiB.
fn strangers(address: &str, count: usize) -> Vec<TcpStream> {
    let connect = |number: usize| {
        let mut stranger = match number % 6 {
            0 | 1 | 4 => TcpStream::connect(address).expect("it listens"),
            _ => session(address),
        };
        let sent = match number % 6 {
            1 => stranger.write_all(b"G"),
            3 => stranger.write_all(&[0x82, 0xfe, 0xff, 0xff, 0, 0, 0, 0, 1]),
            4 => stranger.write_all(&[0xa5; 1 << 12]),
            5 => stranger.write_all(&[&[0x82, 0xff][..], &(1_u64 << 30).to_be_bytes()].concat()),
            _ => Ok(()),
        };
        // Garbage may be refused before all is written.
        assert!(sent.is_ok() || number % 6 >= 4, "{sent:?}");
        stranger
    };
    (0..count).map(connect).collect()
}

/// The output of a failed check of golden vectors on the served device; empty if it passes.
fn owner_verifies(served: &Served) -> String {
    let fixture = rope_check::fixtures()
        .expect("the test runs in the workspace")
        .join("qwen3_vl_mrope_24_20_20_interleaved.safetensors");
    let fixture = fixture.display().to_string();
    let output = command(&["verify", "--device", &served.remote(), &fixture])
        .env("MROPE_TOKEN", served.token())
        .output()
        .expect("it starts");
    let found = text(&output.stdout);
    if output.status.success() && found.contains(" 0 out of tolerance") {
        String::new()
    } else {
        format!("{found}{}", text(&output.stderr))
    }
}

/// Ends the server by a signal, and says how long that took.
#[cfg(unix)]
fn stopped(served: &mut Served, signal: &str) -> Duration {
    let process = served.process().id().to_string();
    let asked = Instant::now();
    let kill = std::process::Command::new("kill")
        .args([signal, &process])
        .status();
    assert!(kill.expect("a command of each Unix").success());
    let ended = served.process().wait().expect("it ends");
    assert!(ended.success(), "{signal}: {ended}");
    asked.elapsed()
}

#[cfg(unix)]
#[test]
fn a_signal_stops_it_within_five_seconds_also_while_strangers_are_connected() {
    for signal in ["-TERM", "-INT"] {
        let mut served = Served::start("cpu", "signalled");
        let _crowd = strangers(&served.url.replace("ws://", ""), 200);
        let took = stopped(&mut served, signal);
        assert!(took < Duration::from_secs(5), "{signal}: {took:?}");
    }
}

/// The fault that a [`relay`] adds to the connection of a client with the token.
#[derive(Clone, Copy)]
enum Fault {
    /// The connection ends after some bytes in either direction.
    Cut(usize),
    /// The client reads some bytes a millisecond, and vanishes after a second.
    Slow(usize),
}

/// An address that passes one client's connections on to the server, with a fault.
fn relay(server: &str, fault: Fault) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = listener.local_addr().expect("an address");
    let server = server.to_owned();
    std::thread::spawn(move || {
        while let Ok((client, _)) = listener.accept() {
            let Ok(server) = TcpStream::connect(&server) else {
                return;
            };
            for (from, to) in [(&client, &server), (&server, &client)] {
                let ends = [from, to].map(|end| end.try_clone().expect("a socket"));
                std::thread::spawn(move || pass(ends, fault));
            }
        }
    });
    format!("ws://{address}")
}

fn pass([mut from, mut to]: [TcpStream; 2], fault: Fault) {
    let started = Instant::now();
    let (mut left, mut buffer) = (usize::MAX, vec![0; 64 << 10]);
    if let Fault::Cut(most) = fault {
        left = most;
    }
    while left > 0 {
        if let Fault::Slow(bytes) = fault {
            std::thread::sleep(Duration::from_millis(1));
            buffer.truncate(bytes);
            if started.elapsed() > Duration::from_secs(1) {
                break;
            }
        }
        let most = left.min(buffer.len());
        let Ok(bytes @ 1..) = from.read(&mut buffer[..most]) else {
            break;
        };
        if to.write_all(&buffer[..bytes]).is_err() {
            break;
        }
        left -= bytes;
    }
    for end in [from, to] {
        // The other direction may have closed it.
        let _closed = end.shutdown(std::net::Shutdown::Both);
    }
}

/// Clients with the token that are cut off, read slowly, vanish or are killed, among strangers of
/// every kind: the memory does not grow with them, and the owner is served in between and after.
#[cfg(target_os = "linux")]
#[test]
fn a_soak_under_faults_leaves_memory_and_owner_as_they_were() {
    const ROUNDS: usize = 6;
    let mut served = Served::start("cpu", "soaked");
    let address = served.url.replace("ws://", "");
    let token = served.token();
    assert_eq!(owner_verifies(&served), "");
    let before = resident(served.process().id());
    for round in 0..ROUNDS {
        let crowd = strangers(&address, 60);
        let faults = [
            Fault::Cut(700 << round),
            Fault::Cut(20_000 << round),
            Fault::Slow(16 << round),
        ];
        let clients = faults.map(|fault| {
            let url = format!("remote:{}", relay(&address, fault));
            let fixtures = rope_check::fixtures().expect("the test runs in the workspace");
            command(&["verify", "--device", &url, &fixtures.display().to_string()])
                .env("MROPE_TOKEN", &token)
                .stdout(std::process::Stdio::null())
                .stderr(std::process::Stdio::null())
                .spawn()
                .expect("it starts")
        });
        assert_eq!(owner_verifies(&served), "", "round {round}");
        drop(crowd);
        for (number, mut client) in clients.into_iter().enumerate() {
            if number == round % 3 {
                std::thread::sleep(Duration::from_millis(100));
            } else {
                std::thread::sleep(Duration::from_millis(400));
            }
            // It may have failed before.
            let _gone = client.kill();
            client.wait().expect("it ends");
        }
    }
    assert_eq!(owner_verifies(&served), "");
    let grown = resident(served.process().id()).saturating_sub(before);
    assert!(grown < 100 << 20, "{grown} bytes more");
    let took = stopped(&mut served, "-TERM");
    assert!(took < Duration::from_secs(5), "{took:?}");
}

#[test]
fn what_holds_no_token_is_refused() {
    let serve = |path: &str| refused(&["serve", "--device", "cpu", "--token-file", path]);
    let folder = env!("CARGO_TARGET_TMPDIR");
    for path in [folder, "/dev/null"] {
        if path == folder || cfg!(unix) {
            let said = serve(path);
            says(&said, format!("{path} is not a regular file"));
        }
    }
    // A token that a full disk once cut short, and the next run took.
    let cut = fresh("cut.token");
    std::fs::write(&cut, "0123456789").expect("writes");
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        let closed = std::fs::Permissions::from_mode(0o600);
        std::fs::set_permissions(&cut, closed).expect("it is ours");
    }
    let said = serve(&cut.display().to_string());
    says(
        &said,
        "cut.token holds a token of 10 characters, expected at least 16",
    );
    // A token that no first message has room for, here and on the client's side.
    std::fs::write(&cut, "0123456789".repeat(7000)).expect("writes");
    let path = cut.display().to_string();
    let url = "remote:ws://127.0.0.1:1";
    for said in [
        serve(&path),
        refused(&["train", "--device", url, "--token-file", &path]),
    ] {
        assert!(said.contains("holds more than 4096 bytes"), "{said}");
    }
    #[cfg(unix)]
    {
        let link = fresh("link.token");
        std::os::unix::fs::symlink(&cut, &link).expect("it links");
        let said = serve(&link.display().to_string());
        says(&said, "(it is a link; name the file itself)");
        // A pipe that nobody writes to must not be waited for.
        let pipe = fresh("pipe.token");
        let made = std::process::Command::new("mkfifo").arg(&pipe).status();
        assert!(made.expect("mkfifo runs").success());
        let path = pipe.display().to_string();
        let client = ["train", "--device", url, "--token-file", &path].map(str::to_owned);
        let server = ["serve", "--device", "cpu", "--token-file", &path].map(str::to_owned);
        for args in [client, server] {
            let said = within(HANG, move || refused(&args.each_ref().map(String::as_str)));
            assert!(said.contains("pipe.token is not a regular file"), "{said}");
        }
    }
}

/// `ulimit -f` stands for a full disk; ignored, its signal becomes an error of the write.
#[cfg(unix)]
#[test]
fn a_token_that_cannot_be_written_leaves_no_file() {
    let file = fresh("unwritten.token");
    let path = file.display().to_string();
    let ended = std::process::Command::new("sh")
        .args(["-c", "trap '' XFSZ; ulimit -f 0 && exec \"$0\" \"$@\""])
        .arg(env!("CARGO_BIN_EXE_mrope"))
        .args(["serve", "--device", "cpu", "--bind", "127.0.0.1:0"])
        .args(["--token-file", &path])
        .env_remove("MROPE_TOKEN")
        .stdin(std::process::Stdio::null())
        .output()
        .expect("a shell of each Unix");
    let said = text(&ended.stderr);
    assert_eq!(ended.status.code(), Some(1), "{said}");
    let expected = format!("error: cannot write the token file {path}: ");
    assert!(said.starts_with(&expected), "{said}");
    assert!(!file.exists());
}

#[cfg(unix)]
#[test]
fn a_variable_that_is_no_text_is_not_taken_for_none() {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;
    let ended = command(&["serve", "--device", "cpu", "--bind", "127.0.0.1:0"])
        .env("MROPE_TOKEN", OsStr::from_bytes(b"secret\xff"))
        .output()
        .expect("program starts");
    assert_eq!(ended.status.code(), Some(1));
    let said = text(&ended.stderr);
    says(&said, "MROPE_TOKEN is set, but is no UTF-8 text");
}

#[test]
fn an_address_for_others_wants_a_named_token() {
    let open = refused(&["serve", "--device", "cpu", "--bind", "0.0.0.0:0"]);
    says(&open, "open to other machines");
    says(&open, "--token-file");
}

#[test]
fn help_has_both_sides_and_what_the_network_sees() {
    let output = mrope(&["serve", "--help"]);
    let help = text(&output.stdout);
    for part in [
        "mrope train --device remote:ws://",
        "RemoteHost::websocket",
        "ssh -L",
        "not encrypted",
    ] {
        assert!(help.contains(part), "{part} is not in {help}");
    }
}

#[test]
fn without_cann_it_says_what_is_missing_and_how_to_get_on() {
    for command in ["train", "serve"] {
        let missing = refused(&[command, "--device", "ascend"]);
        for part in [
            "no Ascend runtime library found",
            "install CANN",
            "mrope doctor",
            "--device ascend-sim",
        ] {
            assert!(missing.contains(part), "{part} is not in {missing}");
        }
    }
}
