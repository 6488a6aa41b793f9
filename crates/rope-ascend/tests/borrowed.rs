//! Borrowed memory and a borrowed stream, created through the simulator's C interface as torch_npu
//! creates its own: they stay valid, and results equal rope-core's.
#![allow(
    unsafe_code,
    reason = "calls the C interface as another framework does"
)]
#![allow(clippy::unwrap_used, missing_docs, reason = "test code")]

mod support;

use std::ffi::c_void;
use std::sync::Arc;

use ascend_sim::{Machine, Session, control};
use rope_ascend::rope::{AngleRows, Heads, KernelType, Kernels, Operand, Rotation, Rotator};
use rope_ascend::safe::{DeviceMemory, Runtime, Stream};
use rope_ascend::sys::{AclRt, aclrtMemMallocPolicy, aclrtMemcpyKind, aclrtStream};
use rope_core::{
    Direction, Geometry, HeadsLayout, HeadsMut, Layout, Operand as HostOperand, Pairing, Positions,
    RotarySpec, TokenAngles,
};
use support::{Numbers, api, kernel_binary};

/// Another framework: it has started the runtime, and has a device and a stream.
struct Owner {
    rt: AclRt,
    stream: aclrtStream,
}

impl Owner {
    fn new() -> Self {
        // SAFETY: the simulator's functions have the vendor's signatures, and are part of this
        // program.
        let rt = unsafe { AclRt::load(&mut ascend_sim::symbol) }.unwrap();
        let mut stream = std::ptr::null_mut();
        // SAFETY: a null path selects the defaults; a local receives the stream.
        let codes = unsafe {
            [
                (rt.aclInit)(std::ptr::null()),
                (rt.aclrtSetDevice)(0),
                (rt.aclrtCreateStream)(&raw mut stream),
            ]
        };
        assert!(codes.iter().all(|code| *code == 0), "{codes:?}");
        Self { rt, stream }
    }

    /// Memory that holds a copy of `values`.
    fn tensor(&self, values: &[f32]) -> *mut c_void {
        let (mut pointer, bytes) = (std::ptr::null_mut(), size_of_val(values));
        let kind = aclrtMemcpyKind::HOST_TO_DEVICE;
        // SAFETY: a local receives memory of as many bytes as are copied into it.
        unsafe {
            let policy = aclrtMemMallocPolicy::HUGE_FIRST;
            assert_eq!((self.rt.aclrtMalloc)(&raw mut pointer, bytes, policy), 0);
            let copied = (self.rt.aclrtMemcpy)(pointer, bytes, values.as_ptr().cast(), bytes, kind);
            assert_eq!(copied, 0);
        }
        pointer
    }

    fn values(&self, pointer: *mut c_void, len: usize) -> Vec<f32> {
        let mut values = vec![0f32; len];
        let (bytes, kind) = (4 * len, aclrtMemcpyKind::DEVICE_TO_HOST);
        // SAFETY: memory of `tensor`, and a vector of as many bytes.
        unsafe {
            assert_eq!((self.rt.aclrtSynchronizeStream)(self.stream), 0);
            let copied =
                (self.rt.aclrtMemcpy)(values.as_mut_ptr().cast(), bytes, pointer, bytes, kind);
            assert_eq!(copied, 0);
        }
        values
    }

    fn free(&self, pointer: *mut c_void) {
        // SAFETY: memory of `tensor`.
        assert_eq!(unsafe { (self.rt.aclrtFree)(pointer) }, 0);
    }

    fn finish(self) {
        // SAFETY: its own stream, device and runtime, which nothing uses any more.
        let codes = unsafe {
            [
                (self.rt.aclrtDestroyStream)(self.stream),
                (self.rt.aclrtResetDevice)(0),
                (self.rt.aclFinalize)(),
            ]
        };
        assert!(codes.iter().all(|code| *code == 0), "{codes:?}");
    }
}

/// This crate as a guest in the owner's process.
struct Guest {
    kernels: Arc<Kernels>,
    stream: Stream,
    runtime: Runtime,
}

impl Guest {
    fn new(owner: &Owner, architecture: u32) -> Self {
        let runtime = Runtime::start(api()).unwrap();
        let device = runtime.current_device().unwrap();
        // SAFETY: the owner's stream, which it destroys after the guest is gone.
        let stream = unsafe { Stream::borrowed(&device, owner.stream) };
        let kernels = Kernels::load(&stream, &kernel_binary(architecture)).unwrap();
        Self {
            kernels: Arc::new(kernels),
            stream,
            runtime,
        }
    }

    fn memory(&self, pointer: *mut c_void, len: usize) -> DeviceMemory {
        // SAFETY: memory of the owner, which each test frees last, or means to free too early.
        unsafe { DeviceMemory::borrowed(&self.stream, pointer, 4 * len) }
    }
}

struct Case {
    geometry: Geometry,
    angles: Vec<f32>,
    layout: HeadsLayout,
    x: Vec<f32>,
}

impl Case {
    fn new(pairing: Pairing) -> Self {
        let spec = RotarySpec::builder(64).pairing(pairing).build().unwrap();
        let positions = Positions::text(1, 3, 5).unwrap();
        let angles = TokenAngles::<f32>::new(&spec, &positions, None).unwrap();
        let layout = HeadsLayout::contiguous(Layout::Bnsd, 2, 5, 3, 64);
        let mut numbers = Numbers(7);
        Self {
            geometry: spec.geometry(),
            angles: angles.rows().to_vec(),
            layout,
            x: (0..layout.elems()).map(|_| numbers.unit() as f32).collect(),
        }
    }

    fn on_host(&self, direction: Direction) -> Vec<f32> {
        let mut x = self.x.clone();
        let view = HeadsMut::new(&mut x, self.layout).unwrap();
        let angles = rope_core::Angles::Tokens(&self.angles);
        let rotator = rope_core::Rotator::new(self.geometry, angles).unwrap();
        rotator
            .apply(direction, HostOperand::InPlace(view), None)
            .unwrap();
        x
    }

    /// Queues the rotation of memory at `x` in place.
    fn queue(&self, guest: &Guest, rotator: &Rotator, direction: Direction, at: [*mut c_void; 2]) {
        let mut x = guest.memory(at[0], self.x.len());
        let angles = guest.memory(at[1], self.angles.len());
        let q = Operand::InPlace(Heads {
            memory: &mut x,
            offset: 0,
            layout: self.layout,
        });
        let angles = AngleRows {
            memory: &angles,
            offset_bytes: 0,
            rows: 5,
        };
        let rotation = Rotation {
            element: KernelType::F32,
            direction,
            q,
            k: None,
            angles,
        };
        rotator.rotate(rotation).unwrap();
    }
}

fn violations() -> Vec<String> {
    let found = control::take_violations();
    found.iter().map(ToString::to_string).collect()
}

#[test]
fn the_owner_s_memory_stream_and_device_stay_as_they_were() {
    let machine = Machine::default();
    let architecture = machine.architecture;
    let session = Session::with_machine(machine);
    let owner = Owner::new();
    control::clear_calls();
    let guest = Guest::new(&owner, architecture);
    for pairing in Pairing::ALL {
        let case = Case::new(pairing);
        let rotator =
            Rotator::new(&guest.stream, Arc::clone(&guest.kernels), case.geometry).unwrap();
        for direction in [Direction::Forward, Direction::Adjoint] {
            let at = [&case.x, &case.angles].map(|values| owner.tensor(values));
            case.queue(&guest, &rotator, direction, at);
            // After the guest's work, the owner's: it goes on with the same stream and memory.
            assert_eq!(
                owner.values(at[0], case.x.len()),
                case.on_host(direction),
                "{pairing:?} {direction:?}"
            );
            at.into_iter().for_each(|pointer| owner.free(pointer));
        }
    }
    let Guest {
        kernels,
        stream,
        runtime,
    } = guest;
    drop((kernels, stream));
    runtime.close().unwrap();
    let untouched = [
        "aclrtSetDevice",
        "aclrtResetDevice",
        "aclrtDestroyStream",
        "aclrtCreateStream",
        "aclrtCreateStreamWithConfig",
        "aclFinalize",
    ];
    let calls = control::calls();
    let called = calls.iter().map(|call| call.function);
    let found: Vec<_> = called.filter(|name| untouched.contains(name)).collect();
    assert!(found.is_empty(), "{found:?}");
    owner.finish();
    assert_eq!(violations(), Vec::<String>::new());
    drop(session);
}

#[test]
fn memory_that_its_owner_frees_too_early_is_noticed() {
    let machine = Machine::default();
    let architecture = machine.architecture;
    let session = Session::with_machine(machine);
    let owner = Owner::new();
    let guest = Guest::new(&owner, architecture);
    let case = Case::new(Pairing::Half);
    let rotator = Rotator::new(&guest.stream, Arc::clone(&guest.kernels), case.geometry).unwrap();
    let at = [&case.x, &case.angles].map(|values| owner.tensor(values));
    // The rotator's memory on the device is there after the first launch.
    case.queue(&guest, &rotator, Direction::Forward, at);
    owner.values(at[0], case.x.len());
    assert_eq!(violations(), Vec::<String>::new());

    control::hold_streams(true);
    case.queue(&guest, &rotator, Direction::Forward, at);
    owner.free(at[0]);
    control::hold_streams(false);
    // SAFETY: the owner's stream.
    unsafe { (owner.rt.aclrtSynchronizeStream)(owner.stream) };
    let found = violations();
    assert!(!found.is_empty(), "nothing was noticed");
    drop((rotator, guest, session));
}
