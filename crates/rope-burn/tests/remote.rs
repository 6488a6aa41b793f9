//! Rotating on a served device: values and gradients are those of the same backend used directly.

use std::net::TcpListener;
use std::sync::OnceLock;

use burn::backend::ir::{CustomOpIr, ScalarIr, TensorIr};
use burn::backend::tensor::FloatTensor;
use burn::backend::{
    Backend, Dispatch, Flex, FlexDevice, Remote, TensorMetadata, backend_extension,
};
use burn::remote::{CustomOpClient, RemoteHost};
use burn::tensor::{DType, Device, Shape, Tensor, TensorData};
use burn_remote::server::{BackendServer, CustomOpRegistry, WebSocketTransport};
use rope_burn::rope_core::{AxisLayout, Layout, Pairing, Positions, RotarySpec};
use rope_burn::{Implementation, OpError, Rotary, RotaryAngles, RotaryError, remote};
use tokio::runtime::Runtime;

/// Flex served by a socket, in a session of its own.
fn new_session() -> Device {
    static RUNTIME: OnceLock<Runtime> = OnceLock::new();
    let runtime = RUNTIME.get_or_init(|| Runtime::new().expect("threads for the server"));
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = listener.local_addr().expect("an address");
    let mut operations = CustomOpRegistry::new();
    remote::register::<Flex>(&mut operations);
    let server = BackendServer::new([FlexDevice]).with_custom_ops(operations);
    runtime.spawn(server.serve_async(WebSocketTransport::from_listener(listener)));
    let host = RemoteHost::websocket(&format!("ws://{address}"));
    Device::remote_options(&host).init().expect("it answers")
}

/// A session for all tests that do not end it.
fn served() -> Device {
    static SERVED: OnceLock<Device> = OnceLock::new();
    SERVED.get_or_init(new_session).clone()
}

fn wave<const D: usize>(shape: [usize; D], phase: f32, device: &Device) -> Tensor<D> {
    let count = shape.iter().product::<usize>();
    let values: Vec<f32> = (0..count).map(|i| (0.7 * i as f32 + phase).sin()).collect();
    Tensor::from_data(TensorData::new(values, shape), device)
}

fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().iter::<f32>().collect()
}

/// Rotated q and k, and the gradients of q, k and, where they are tracked, of the angles.
fn run(rotary: &Rotary, device: &Device, learned: bool) -> Vec<Vec<f32>> {
    let device = device.clone().autodiff();
    let positions = Positions::text(1, 3, 5).expect("valid positions");
    let mut angles = rotary.angles(&positions, &device);
    if learned {
        angles = angles.require_grad();
    }
    let shape = |heads| match rotary.layout() {
        Layout::Bnsd => [2, heads, 5, 16],
        _ => [2, 5, heads, 16],
    };
    let q = wave(shape(4), 0.1, &device).require_grad();
    let k = wave(shape(2), 0.9, &device).require_grad();
    let (q_out, k_out) = rotary.forward(q.clone(), k.clone(), &angles);
    let loss = (q_out.clone() * wave(shape(4), 2.0, &device)).sum()
        + (k_out.clone() * wave(shape(2), 3.0, &device)).sum();
    let gradients = loss.backward();
    let mut found = vec![values(q_out), values(k_out)];
    found.extend([&q, &k].map(|x| values(x.grad(&gradients).expect("a gradient"))));
    if learned {
        found.push(values(angles.rows().grad(&gradients).expect("a gradient")));
    }
    found
}

#[test]
fn values_and_gradients_are_those_of_the_backend_that_is_served() {
    let (local, served) = (Device::flex(), served());
    for pairing in Pairing::ALL {
        for layout in [Layout::Bsnd, Layout::Bnsd] {
            let spec = RotarySpec::builder(16).pairing(pairing).build();
            let rotary = Rotary::new(spec.expect("valid"), layout);
            for learned in [false, true] {
                let (expected, found) = (
                    run(&rotary, &local, learned),
                    run(&rotary, &served, learned),
                );
                assert_eq!(found, expected, "{pairing:?} {layout:?} {learned}");
            }
            let composed = rotary.with_implementation(Implementation::Composed);
            for (a, b) in run(&composed, &served, false)
                .concat()
                .iter()
                .zip(run(&composed, &local, false).concat())
            {
                assert!((a - b).abs() < 1e-5, "{pairing:?} {layout:?}: {a} {b}");
            }
        }
    }
}

#[test]
fn angles_per_head_are_rotated_by_the_server_too() {
    for layout in [Layout::Bsnd, Layout::Bnsd, Layout::Sbnd] {
        let spec = RotarySpec::builder(16).build().expect("valid");
        let rotary = Rotary::new(spec, layout);
        let run = |device: &Device| {
            let device = device.clone().autodiff();
            let positions = wave([2, 5], 0.3, &device);
            let frequencies = wave([2, 3, 8], 0.6, &device).require_grad();
            let angles = RotaryAngles::from_frequencies(positions, frequencies.clone());
            let shape = match layout {
                Layout::Bnsd => [2, 3, 5, 16],
                Layout::Sbnd => [5, 2, 3, 16],
                _ => [2, 5, 3, 16],
            };
            let q = wave(shape, 0.1, &device).require_grad();
            let rotated = rotary.forward_single(q.clone(), &angles.expect("valid"));
            let gradients = (rotated.clone() * wave(shape, 2.0, &device))
                .sum()
                .backward();
            [
                values(rotated),
                values(q.grad(&gradients).expect("a gradient")),
                values(frequencies.grad(&gradients).expect("a gradient")),
            ]
        };
        assert_eq!(run(&served()), run(&Device::flex()), "{layout:?}");
    }
}

#[test]
fn a_tensor_that_is_still_held_stays_as_it_was() {
    let device = served();
    let spec = RotarySpec::builder(16).build().expect("valid");
    let rotary = Rotary::new(spec, Layout::Bsnd);
    let angles = rotary.angles(&Positions::text(1, 1, 5).expect("valid"), &device);
    let q = wave([1, 5, 2, 16], 0.0, &device);
    let before = values(q.clone());
    let (q_out, k_out) = rotary.forward(q.clone(), q.clone(), &angles);
    assert_eq!(values(q_out.clone()), values(k_out));
    assert_eq!(values(q), before);
    assert_ne!(values(q_out), before);
}

#[test]
fn a_wrong_shape_is_refused_before_it_is_sent() {
    let device = served();
    let spec = RotarySpec::builder(16)
        .axis_layout(AxisLayout::Contiguous(vec![2, 3, 3]))
        .build();
    let rotary = Rotary::new(spec.expect("valid"), Layout::Bsnd);
    let angles = rotary.angles(&Positions::text(3, 0, 5).expect("valid"), &device);
    let wrong = wave([1, 5, 2, 8], 0.0, &device);
    let error = rotary.try_forward_single(wrong, &angles);
    assert!(error.expect_err("refused").to_string().contains("head_dim"));
    let right = wave([1, 5, 2, 16], 0.0, &device);
    rotary
        .try_forward_single(right, &angles)
        .expect("the session lives on")
        .into_data();
}

#[test]
fn tensors_of_two_devices_are_refused() {
    let device = served();
    let spec = RotarySpec::builder(16).build().expect("valid");
    let rotary = Rotary::new(spec, Layout::Bsnd);
    let positions = Positions::text(1, 0, 5).expect("valid");
    let x = |device: &Device| wave([1, 5, 2, 16], 0.0, device);
    let angles = rotary.angles(&positions, &device);
    let elsewhere = rotary.angles(&positions, &Device::flex());
    let error = rotary.try_forward(x(&device), x(&device), &elsewhere);
    let error = error.expect_err("angles on the host").to_string();
    assert!(error.contains("angles is on Flex"), "{error}");
    let error = rotary.try_forward(x(&device), x(&Device::flex()), &angles);
    let error = error.expect_err("k on the host");
    assert!(matches!(
        error,
        RotaryError::Op(OpError::Device { what: "k", .. })
    ));
    // Tracked or not, it is the same device.
    rotary
        .try_forward_single(x(&device.clone().autodiff()), &angles)
        .expect("one device");
}

#[backend_extension(Remote)]
trait Foreign: Backend {
    fn newer_version(x: FloatTensor<Self>) -> FloatTensor<Self>;
}

impl Foreign for Remote {
    fn newer_version(x: FloatTensor<Self>) -> FloatTensor<Self> {
        let client = CustomOpClient::new(&x.device());
        let id = client.create_empty_handle();
        let output = TensorIr::uninit(id, Shape::new([3]), DType::F32);
        let scalars = vec![ScalarIr::UInt(99)];
        let inputs = [x.into_ir()];
        let op = CustomOpIr::with_scalars("rope.rotary_single", &inputs, &[output], scalars);
        client.register(op).pop().expect("one output")
    }
}

#[test]
fn an_operation_of_another_version_ends_the_session_and_no_other() {
    let device = new_session();
    let x = wave([3], 0.0, &device);
    let output = Tensor::<1>::from_dispatch(Dispatch::newer_version(x.into_dispatch()));
    output
        .try_into_data()
        .expect_err("the server cannot read it");
    let later = wave([1], 0.0, &device);
    later.try_into_data().expect_err("the session is over");
    assert_eq!(values(wave([1], 0.0, &new_session())), [0.0]);
}
