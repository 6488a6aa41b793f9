//! `mrope serve`: who gets in, and what a user reads.

mod common;

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use common::{HANG, Served, command, fresh, mrope, text, within};

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
    assert!(
        token.trim().len() >= 32 && !served.said.contains(token.trim()),
        "{}",
        served.said
    );
    for part in ["cpu at ws://", "--token-file", &remote, "Ctrl+C"] {
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
    assert!(
        none.contains("--token-file") && none.contains("MROPE_TOKEN"),
        "{none}"
    );
    let wrong = command(&verify)
        .env("MROPE_TOKEN", "guess")
        .output()
        .expect("it starts");
    assert!(
        text(&wrong.stderr).contains("rejected the credential"),
        "{wrong:?}"
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
    assert!(npu.contains("is no device of this machine"), "{npu}");
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
    assert!(
        found.contains("burn/fused") && found.contains(" 0 out of tolerance"),
        "{found}"
    );
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
    assert!(again.contains("cannot listen on 127.0.0.1:"), "{again}");
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

/// A connection that asks for a WebSocket on a route.
fn upgrade(address: &str, route: &str) -> TcpStream {
    let mut stranger = TcpStream::connect(address).expect("it listens");
    stranger.set_read_timeout(Some(HANG)).expect("not zero");
    let request = format!(
        "GET {route} HTTP/1.1\r\nHost: {address}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
         Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
    );
    stranger.write_all(request.as_bytes()).expect("it reads");
    stranger
}

/// A WebSocket on the route of sessions that has sent no message.
fn session(address: &str) -> TcpStream {
    let mut stranger = upgrade(address, "/session");
    let mut answer = Vec::new();
    while !answer.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        stranger.read_exact(&mut byte).expect("it answers");
        answer.extend(byte);
    }
    assert!(answer.starts_with(b"HTTP/1.1 101 "), "{answer:?}");
    stranger
}

/// What a connection is told before it is closed.
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

#[cfg(target_os = "linux")]
#[test]
fn strangers_are_told_nothing_and_cost_little_while_the_owner_is_served() {
    const MIB: usize = 1 << 20;
    let mut served = Served::start("cpu", "guarded");
    let address = served.url.replace("ws://", "");
    let before = resident(served.process().id());

    let data = told(upgrade(&address, "/data"));
    assert!(data.starts_with("HTTP/1.1 404 "), "{data}");
    let mut declared = session(&address);
    let gibibyte: u64 = 1 << 30;
    let header = [&[0x82, 0xff][..], &gibibyte.to_be_bytes()].concat();
    declared.write_all(&header).expect("it reads");
    assert_eq!(told(declared), "");
    let mut garbage = TcpStream::connect(&address).expect("it listens");
    // It may be refused before all is written.
    let _refused = garbage.write_all(&[0xa5; 1 << 20]);
    assert_eq!(told(garbage), "");

    let opened = Instant::now();
    let strangers: Vec<TcpStream> = (0..200)
        .map(|stranger| match stranger % 4 {
            0 => TcpStream::connect(&address).expect("it listens"),
            1 => {
                let mut one_byte = TcpStream::connect(&address).expect("it listens");
                one_byte.write_all(b"G").expect("it reads");
                one_byte
            }
            2 => session(&address),
            _ => {
                let mut slow = session(&address);
                slow.write_all(&[0x82, 0xfe, 0xff, 0xff, 0, 0, 0, 0, 1])
                    .expect("it reads");
                slow
            }
        })
        .collect();
    let (remote, token) = (served.remote(), served.token());
    let owner = command(&["verify", "--device", &remote, "no-such-file"])
        .env("MROPE_TOKEN", token)
        .output()
        .expect("it starts");
    assert!(text(&owner.stdout).contains("no-such-file"), "{owner:?}");
    let grown = resident(served.process().id()).saturating_sub(before);
    assert!(grown < 100 * MIB, "{grown} bytes more");
    for stranger in strangers {
        stranger.set_read_timeout(Some(HANG)).expect("not zero");
        assert_eq!(told(stranger), "");
    }
    assert!(
        opened.elapsed() < Duration::from_secs(60),
        "{:?}",
        opened.elapsed()
    );
}

#[cfg(unix)]
#[test]
fn a_signal_stops_it_also_while_strangers_are_connected() {
    for signal in ["-TERM", "-INT"] {
        let mut served = Served::start("cpu", "signalled");
        let address = served.url.replace("ws://", "");
        let mut stranger = TcpStream::connect(&address).expect("it listens");
        stranger.write_all(b"G").expect("it reads");
        let process = served.process().id().to_string();
        let asked = Instant::now();
        let kill = std::process::Command::new("kill")
            .args([signal, &process])
            .status();
        assert!(kill.expect("a command of each Unix").success());
        let ended = served.process().wait().expect("it ends");
        assert!(ended.success(), "{signal}: {ended}");
        assert!(
            asked.elapsed() < Duration::from_secs(20),
            "{:?}",
            asked.elapsed()
        );
    }
}

#[test]
fn an_address_for_others_wants_a_named_token() {
    let open = refused(&["serve", "--device", "cpu", "--bind", "0.0.0.0:0"]);
    assert!(
        open.contains("open to other machines") && open.contains("--token-file"),
        "{open}"
    );
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
