//! A device that fails: each failure is reported as an error, nothing hangs or leaks, and the
//! process continues.

use std::net::TcpListener;
use std::sync::mpsc::channel;

use crate::common::{HANG, Served, fresh, host, mrope, npus, says, text, within};
use ascend_sim::control;
use burn::backend::ExecutionError;
use burn::tensor::{Device, Tensor};
use burn_ascend::serve::{self, Token};
use burn_ascend::{Ascend, AscendDevice, operations};

/// The simulator's objects that an NPU's session holds: allocations, streams, descriptors.
fn held() -> (usize, usize, usize) {
    let live = control::live();
    (live.allocations, live.streams, live.descriptors)
}

fn matrix(size: usize, device: &Device) -> Tensor<2> {
    Tensor::full([size, size], 0.5, device)
}

/// Reads, within the limit.
fn read(x: Tensor<2>) -> Result<Vec<f32>, ExecutionError> {
    within(HANG, move || Ok(x.try_into_data()?.iter::<f32>().collect()))
}

fn reason<T: std::fmt::Debug>(outcome: Result<T, ExecutionError>) -> String {
    outcome.expect_err("the device failed").reason().to_owned()
}

/// The device computes.
fn assert_works(device: &Device) {
    let x = matrix(2, device);
    assert_eq!(
        read(x.clone().matmul(x) + 1.0).expect("it computes"),
        [1.5; 4]
    );
}

/// Lets a device fail, and checks that it works again, at once or opened anew, that another one
/// works, and that nothing remains allocated.
fn survives(npu: AscendDevice, other: AscendDevice, fail: impl FnOnce(&Device)) {
    let before = held();
    let (failing, device) = host(npu);
    assert_works(&device);
    fail(&device);
    control::clear_faults();
    control::set_memory_limit(None);
    {
        let (_host, device) = host(other);
        assert_works(&device);
    }
    within(HANG, move || drop(failing));
    assert_eq!(held(), before, "allocations, streams, descriptors");
    let (_host, device) = host(npu);
    assert_works(&device);
}

#[test]
fn out_of_memory_is_an_error_and_the_device_goes_on() {
    let (_held, [npu, other]) = npus();
    survives(npu, other, |device| {
        let kept = matrix(64, device);
        read(kept.clone()).expect("it fits");
        control::set_memory_limit(Some(control::live().bytes + (1 << 20)));
        let large = matrix(2048, device);
        let reported = reason(read(large.clone().matmul(large)));
        says(&reported, "out of memory");
        says(&reported, "aclrtMalloc");
        assert_eq!(read(kept).expect("what was there is there")[0], 0.5);
        control::set_memory_limit(None);
        assert_eq!(
            read(matrix(2048, device)).expect("there is room again")[0],
            0.5
        );
    });
}

#[test]
fn an_operator_that_fails_in_the_forward_is_named_with_its_code() {
    let (_held, [npu, other]) = npus();
    survives(npu, other, |device| {
        let x = matrix(3, device);
        device.sync().expect("nothing failed yet");
        control::inject_fault("aclnnExpGetWorkspaceSize", 1, 561_103);
        let failed = x.clone().exp();
        let reported = reason(read((failed.clone() + x.clone()).sum_dim(0)));
        says(&reported, "aclnnExp");
        says(&reported, "561103");
        // Told as often as it is asked, and nothing else is concerned.
        assert!(reason(read(failed)).contains("561103"));
        assert_eq!(read(x * 2.0).expect("another computation")[0], 1.0);
    });
}

#[test]
fn an_operator_that_fails_in_the_backward_is_the_error_of_the_gradient() {
    let (_held, [npu, other]) = npus();
    survives(npu, other, |device| {
        // Of these, only the backward of the sine takes a cosine.
        let x = matrix(3, &device.clone().autodiff()).require_grad();
        let y = matrix(3, &device.clone().autodiff()).require_grad();
        let loss = x.clone().sin() + y.clone();
        device.sync().expect("nothing failed yet");
        control::inject_fault("aclnnCosGetWorkspaceSize", 1, 561_103);
        let gradients = loss.sum().backward();
        let reported = reason(read(x.grad(&gradients).expect("a gradient")));
        says(&reported, "aclnnCos");
        says(&reported, "561103");
        assert_eq!(
            read(y.grad(&gradients).expect("a gradient")).expect("computed")[0],
            1.0
        );

        // And of a synchronisation, where nobody reads it.
        control::inject_fault("aclnnCosGetWorkspaceSize", 1, 561_103);
        let loss = x.clone().sin().sum();
        drop(loss.backward());
        let device = device.clone();
        let reported = reason(within(HANG, move || device.sync()));
        assert!(reported.contains("561103"), "{reported}");
    });
}

#[test]
fn a_lost_device_is_told_at_every_read_until_it_is_opened_anew() {
    let (_held, [npu, other]) = npus();
    survives(npu, other, |device| {
        let x = matrix(3, device);
        device.sync().expect("nothing failed yet");
        // An AI core raises an exception: the stream does nothing more.
        control::inject_stream_fault("aclnnExp", 1, 507_015);
        let y = x.clone().exp();
        let reported = reason(read(y));
        says(&reported, "507015");
        says(&reported, "aclnnExp");
        for _ in 0..3 {
            let reported = reason(read(x.clone() * 2.0));
            assert!(reported.contains("507015"), "{reported}");
        }
    });
}

#[test]
fn a_server_whose_device_failed_ends_and_says_why() {
    let (_held, [npu, _]) = npus();
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let url = format!("ws://{}", listener.local_addr().expect("bound"));
    let token = Token::new("a token of this test").expect("not empty");
    let (began, begun) = channel();
    let server = {
        let token = token.clone();
        let ready = move || began.send(()).map_err(std::io::Error::other);
        std::thread::spawn(move || {
            serve::serve(
                [npu],
                operations::<Ascend>(),
                &token,
                listener,
                AscendDevice::failure,
                ready,
            )
            .map_err(|error| error.to_string())
        })
    };
    begun.recv_timeout(HANG).expect("it begins");
    let device = Device::remote_options(&token.host(&url))
        .init()
        .expect("it answers");
    assert_works(&device);
    // An operator that is refused leaves the device as it was, and the server.
    control::inject_fault("aclnnExpGetWorkspaceSize", 1, 561_103);
    let refused = reason(read(matrix(3, &device).exp()));
    assert!(refused.contains("561103"), "{refused}");
    std::thread::sleep(std::time::Duration::from_secs(2));
    assert!(!server.is_finished());
    control::clear_faults();
    control::inject_stream_fault("aclnnExp", 1, 507_015);
    let reported = reason(read(matrix(3, &device).exp()));
    assert!(reported.contains("507015"), "{reported}");
    let ended = within(HANG, move || server.join().expect("it ran"));
    let said = ended.expect_err("the device failed");
    says(&said, "507015");
    says(&said, "restart the server");
    control::clear_faults();
    npu.close().ok();
    let (_host, device) = host(npu);
    assert_works(&device);
}

#[test]
fn a_killed_server_is_an_error_that_says_so_and_the_process_goes_on() {
    let (_held, [npu, _]) = npus();
    let mut served = Served::start("ascend-sim", "killed");
    let (url, token) = (served.url.clone(), served.token());
    let token = Token::new(&token).expect("not empty");
    let device = Device::remote_options(&token.host(&url))
        .init()
        .expect("it answers");
    assert_works(&device);
    let x = matrix(3, &device);
    served.kill();
    for _ in 0..3 {
        let reported = reason(read(x.clone() * 2.0));
        assert!(
            reported.contains("RecvError") || reported.contains("closed"),
            "{reported}"
        );
    }
    let synced = device.clone();
    reason(within(HANG, move || synced.sync()));
    let (_host, device) = host(npu);
    assert_works(&device);
    assert_works(&Device::flex());
}

#[test]
fn a_run_on_a_killed_server_ends_and_says_why() {
    let mut served = Served::start("cpu", "killed-training");
    let out = fresh("train-killed").display().to_string();
    let (remote, token_file) = (served.remote(), served.token_file.display().to_string());
    let run = std::thread::spawn(move || {
        let place = ["--device", &remote, "--token-file", &token_file];
        mrope(&[&["train", "--steps", "100000", "--out", &out], &place[..]].concat())
    });
    // Long enough for the first steps, at any time of which it may die.
    std::thread::sleep(std::time::Duration::from_secs(3));
    served.kill();
    let output = within(HANG, move || run.join().expect("it ran"));
    let errors = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{errors}");
    says(&errors, "the connection to the device's server is lost");
}

#[test]
fn fine_tuning_on_a_killed_server_ends_and_says_why() {
    let mut served = Served::start("cpu", "killed-fine-tuning");
    let example = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/shapes");
    let out = fresh("finetune-killed").display().to_string();
    let (remote, token_file) = (served.remote(), served.token_file.display().to_string());
    let run = std::thread::spawn(move || {
        let (model, data) = (format!("{example}/model"), format!("{example}/train.jsonl"));
        let run = ["finetune", &model, "--random-weights", "--data", &data];
        let steps = ["--steps", "100000", "--checkpoint-every", "100000"];
        let place = ["--device", &remote, "--token-file", &token_file];
        mrope(&[&run[..], &steps, &place, &["--out", &out]].concat())
    });
    // Long enough for the first steps, at any time of which it may die.
    std::thread::sleep(std::time::Duration::from_secs(3));
    served.kill();
    let output = within(HANG, move || run.join().expect("it ran"));
    let errors = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{errors}");
    let last = errors.lines().last().unwrap_or_default();
    says(&last, "the connection to the device's server is lost");
    says(&last, "--resume continues from the last checkpoint");
}

#[test]
fn a_verification_on_a_killed_server_has_a_row_that_says_so() {
    let mut served = Served::start("cpu", "killed-verification");
    let (remote, token_file) = (served.remote(), served.token_file.display().to_string());
    let fixtures = rope_check::fixtures().expect("the test runs in the workspace");
    let folder = fixtures.join("models/qwen2_vl_tiny").display().to_string();
    let run = std::thread::spawn(move || {
        let place = ["verify", "--device", &remote, "--token-file", &token_file];
        // More than it can do before the server dies.
        mrope(&[&place[..], &[&folder[..]; 100]].concat())
    });
    std::thread::sleep(std::time::Duration::from_secs(3));
    served.kill();
    let output = within(HANG, move || run.join().expect("it ran"));
    let errors = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{errors}");
    assert!(!errors.contains("panicked"), "{errors}");
    assert!(text(&output.stdout).contains("  FAIL "));
}
