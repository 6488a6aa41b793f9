//! The collective library as seen by host programs: sums of the vendor's types over devices of this
//! process and of another, and refused calls.
#![allow(clippy::disallowed_methods, reason = "test code")]
#![allow(unsafe_code, reason = "the tests call the C ABI, as programs do")]

mod support;

use std::ffi::c_void;
use std::process::Command;
use std::ptr::null_mut;
use std::sync::{Arc, Barrier, Mutex};
use std::thread;
use std::time::Duration;

use ascend_sim::abi::collective::*;
use ascend_sim::abi::runtime::*;
use ascend_sim::{Machine, Session, control};
use half::{bf16, f16};
use support::{DEVICE_TO_HOST, HOST_TO_DEVICE, one_violation, recent_message};

const FP16: i32 = 3;
const FP32: i32 = 4;
const INT8: i32 = 0;
const INT16: i32 = 1;
const UINT8: i32 = 7;
const FP64: i32 = 10;
const BF16: i32 = 11;
const SUM: i32 = 0;
const PROD: i32 = 1;
const MAX: i32 = 2;
const TIMED_OUT: i32 = 507_048;
const DIFFER: i32 = 507_049;

type Root = [u8; 4108];

fn machine(devices: u32) -> Machine {
    Machine {
        devices,
        ..Machine::default()
    }
}

fn start(machine: Machine) -> Session {
    let session = Session::with_machine(machine);
    let seconds = Duration::from_secs;
    control::set_collective_timeouts(seconds(5), seconds(1));
    // SAFETY: a null path means no configuration file.
    assert_eq!(unsafe { aclInit(std::ptr::null()) }, 0);
    session
}

fn root() -> Root {
    let mut root = [0; 4108];
    // SAFETY: as many bytes as a root info has.
    let code = unsafe { HcclGetRootInfo(root.as_mut_ptr().cast()) };
    assert_eq!(code, 0, "{}", recent_message());
    root
}

/// A thread's device with a stream and its end of a communicator.
struct Rank {
    rank: u32,
    comm: *mut c_void,
    stream: *mut c_void,
}

impl Rank {
    fn join(root: &Root, ranks: u32, rank: u32) -> Self {
        let (mut comm, mut stream) = (null_mut(), null_mut());
        // SAFETY: valid out parameters.
        unsafe {
            assert_eq!(aclrtCreateStream(&raw mut stream), 0);
            let code = HcclCommInitRootInfo(ranks, root.as_ptr().cast(), rank, &raw mut comm);
            assert_eq!(code, 0, "{}", recent_message());
        }
        Self { rank, comm, stream }
    }

    fn upload<T: Copy>(&self, data: &[T]) -> *mut c_void {
        let (mut address, bytes) = (null_mut(), size_of_val(data));
        // SAFETY: the source is a slice of `bytes` bytes.
        unsafe {
            assert_eq!(aclrtMalloc(&raw mut address, bytes, 0), 0);
            let from = data.as_ptr().cast();
            assert_eq!(aclrtMemcpy(address, bytes, from, bytes, HOST_TO_DEVICE), 0);
        }
        address
    }

    fn download<T: Copy + Default>(&self, address: *mut c_void, len: usize) -> Vec<T> {
        let mut data = vec![T::default(); len];
        let bytes = size_of_val(&data[..]);
        // SAFETY: the target is a vector of `bytes` bytes of plain numbers.
        let code = unsafe {
            let to = data.as_mut_ptr().cast();
            aclrtMemcpy(to, bytes, address, bytes, DEVICE_TO_HOST)
        };
        assert_eq!(code, 0, "{}", recent_message());
        data
    }

    fn synchronize(&self) -> i32 {
        // SAFETY: the stream is this thread's.
        unsafe { aclrtSynchronizeStream(self.stream) }
    }

    fn all_reduce(&self, address: *mut c_void, count: u64, dtype: i32, how: i32) -> i32 {
        // SAFETY: wrong memory is an error.
        unsafe { HcclAllReduce(address, address, count, dtype, how, self.comm, self.stream) }
    }

    /// Sums one value of each rank in place.
    fn sum<T: Copy + Default>(&self, values: &[T], dtype: i32, how: i32) -> Vec<T> {
        let memory = self.upload(values);
        let code = self.all_reduce(memory, values.len() as u64, dtype, how);
        assert_eq!(code, 0, "{}", recent_message());
        assert_eq!(self.synchronize(), 0, "{}", recent_message());
        let result = self.download(memory, values.len());
        self.free(memory);
        result
    }

    fn free(&self, memory: *mut c_void) {
        // SAFETY: wrong memory is an error.
        assert_eq!(unsafe { aclrtFree(memory) }, 0, "{}", recent_message());
    }

    fn end(self) {
        // SAFETY: both are live and this thread's.
        unsafe {
            assert_eq!(HcclCommDestroy(self.comm), 0, "{}", recent_message());
            assert_eq!(aclrtDestroyStream(self.stream), 0);
            let mut device = 0;
            assert_eq!(aclrtGetDevice(&raw mut device), 0);
            assert_eq!(aclrtResetDevice(device), 0);
        }
    }
}

/// Runs `work` on a thread for each device of a communicator.
fn on_ranks(ranks: u32, work: impl Fn(&Rank) + Send + Sync + Clone + 'static) {
    let shared = Arc::new((Mutex::new(None), Barrier::new(ranks as usize)));
    let threads = (0..ranks).map(|rank| {
        let (work, shared) = (work.clone(), shared.clone());
        thread::spawn(move || {
            // SAFETY: takes a number.
            assert_eq!(unsafe { aclrtSetDevice(rank.cast_signed()) }, 0);
            if rank == 0 {
                *shared.0.lock().expect("no panic") = Some(root());
            }
            shared.1.wait();
            let root = shared.0.lock().expect("no panic").expect("made above");
            let rank = Rank::join(&root, ranks, rank);
            work(&rank);
            shared.1.wait();
            rank.end();
        })
    });
    for thread in threads.collect::<Vec<_>>() {
        thread.join().expect("the thread's assertions hold");
    }
}

fn finish(session: Session) {
    // SAFETY: nothing is used afterwards.
    assert_eq!(unsafe { aclFinalize() }, 0);
    assert_eq!(control::take_violations(), []);
    drop(session);
}

#[test]
fn four_devices_combine_in_the_vendors_types() {
    let session = start(machine(4));
    on_ranks(4, |rank| {
        let r = rank.rank as f32;
        assert_eq!(rank.sum(&[1.5 + r, r], FP32, SUM), [12.0, 6.0]);
        assert_eq!(rank.sum(&[r + 1.0], FP32, PROD), [24.0]);
        assert_eq!(rank.sum(&[-r], FP32, MAX), [0.0]);
        assert_eq!(rank.sum(&[50_i8], INT8, SUM), [-56]);
        // Rounded after each addition: 2049 is no f16, 257 no bf16.
        let f16_values = [2048.0, 1.0, 1.0, 0.0].map(f16::from_f32);
        let value = f16_values[rank.rank as usize];
        assert_eq!(rank.sum(&[value], FP16, MAX), [f16::from_f32(2048.0)]);
        let bf16_values = [256.0, 0.5, 0.25, 0.25].map(bf16::from_f32);
        let sum = rank.sum(&[bf16_values[rank.rank as usize]], BF16, SUM)[0].to_f32();
        assert!((256.0..=258.0).contains(&sum), "{sum}");
    });
    let counted = control::collectives()["HcclAllReduce"];
    assert_eq!(counted.calls, 6 * 4);
    finish(session);
}

#[test]
fn sums_are_scattered_and_parts_are_gathered_in_rank_order() {
    let session = start(machine(2));
    on_ranks(2, |rank| {
        let r = rank.rank as f32;
        let from = rank.upload(&[1.0 + r, 2.0, 10.0 + r, 20.0]);
        let to = rank.upload(&[0.0_f32; 2]);
        let all = rank.upload(&[0.0_f32; 4]);
        // SAFETY: live memory of the sizes that the counts name.
        unsafe {
            let (comm, stream) = (rank.comm, rank.stream);
            assert_eq!(HcclReduceScatter(from, to, 2, FP32, SUM, comm, stream), 0);
            assert_eq!(HcclAllGather(to, all, 2, FP32, comm, stream), 0);
        }
        assert_eq!(rank.synchronize(), 0);
        let own = [[3.0, 4.0], [21.0, 40.0]][rank.rank as usize];
        assert_eq!(rank.download::<f32>(to, 2), own);
        assert_eq!(rank.download::<f32>(all, 4), [3.0, 4.0, 21.0, 40.0]);
        for memory in [from, to, all] {
            rank.free(memory);
        }
    });
    let sent = control::collectives()["HcclAllGather"].sent_bytes;
    assert_eq!(sent, 2 * 8);
    finish(session);
}

/// The elements that a rank gives to another, by their ranks: uneven, and some of them 0.
fn counts_of_pair(from: u64, to: u64) -> u64 {
    (3 * from + 2 * to) % 4
}

/// The lists of a rank in an exchange: elements for each rank and from it, with the first of each.
fn lists(rank: u64, ranks: u64, of: fn(u64, u64) -> u64) -> [Vec<u64>; 4] {
    let given: Vec<u64> = (0..ranks).map(|to| of(rank, to)).collect();
    let received: Vec<u64> = (0..ranks).map(|from| of(from, rank)).collect();
    let firsts = [&given, &received].map(|list| {
        let sums = (0..list.len()).map(|end| list[..end].iter().sum());
        sums.collect()
    });
    let [given_at, received_at] = firsts;
    [given, given_at, received, received_at]
}

impl Rank {
    /// An exchange of f32 in the vendor's order of parameters, with a number for each list.
    fn exchange(&self, from: *mut c_void, lists: &[Vec<u64>; 4], to: *mut c_void) -> i32 {
        let [given, given_at, received, received_at] =
            lists.each_ref().map(|list| list.as_ptr().cast());
        // SAFETY: a number for each rank; wrong memory is an error.
        unsafe {
            HcclAlltoAllV(
                from,
                given,
                given_at,
                FP32,
                to,
                received,
                received_at,
                FP32,
                self.comm,
                self.stream,
            )
        }
    }
}

#[test]
fn each_pair_of_ranks_exchanges_its_own_number_of_elements() {
    let session = start(machine(3));
    on_ranks(3, |rank| {
        let own = u64::from(rank.rank);
        let [given, given_at, received, mut received_at] = lists(own, 3, counts_of_pair);
        let pairs = (0..3).flat_map(|to| (0..given[to]).map(move |i| (to, i)));
        let elements: Vec<f32> = pairs
            .map(|(to, i)| (100 * own + 10 * to as u64 + i) as f32)
            .collect();
        let from = rank.upload(&elements);
        let to = rank.upload(&[-1.0_f32; 16]);
        // Those of rank 0 come last, after a gap.
        received_at[0] = 10;
        let lists = [given, given_at, received.clone(), received_at.clone()];
        assert_eq!(rank.exchange(from, &lists, to), 0, "{}", recent_message());
        assert_eq!(rank.synchronize(), 0, "{}", recent_message());
        let mut expected = [-1.0_f32; 16];
        for source in 0..3 {
            for i in 0..received[source] {
                let at = (received_at[source] + i) as usize;
                expected[at] = (100 * source as u64 + 10 * own + i) as f32;
            }
        }
        assert_eq!(rank.download::<f32>(to, 16), expected);
        // All to one, which itself gives nothing; the others receive into no memory.
        let to_last = |_: u64, to: u64| u64::from(to == 2);
        let all = if own == 2 { to } else { null_mut() };
        assert_eq!(rank.exchange(from, &self::lists(own, 3, to_last), all), 0);
        // Nothing at all.
        let none = self::lists(own, 3, |_, _| 0);
        assert_eq!(rank.exchange(null_mut(), &none, null_mut()), 0);
        assert_eq!(rank.synchronize(), 0, "{}", recent_message());
        if own == 2 {
            assert_eq!(rank.download::<f32>(to, 3), [10.0, 100.0, 200.0]);
        }
        rank.free(from);
        rank.free(to);
    });
    let counted = control::collectives()["HcclAlltoAllV"];
    // Of (3 a + 2 b) mod 4, and of one element for the last of three.
    let others = (0..3).flat_map(|a| (0..3).map(move |b| (a, b)));
    let others = others.filter(|(a, b)| a != b);
    let others: u64 = others.map(|(a, b)| counts_of_pair(a, b)).sum();
    assert_eq!((counted.calls, counted.sent_bytes), (9, 4 * (others + 2)));
    finish(session);
}

#[test]
fn exchanges_of_ranks_that_differ_in_their_counts_are_refused() {
    let session = start(machine(2));
    on_ranks(2, |rank| {
        let (from, to) = (rank.upload(&[1.0_f32; 4]), rank.upload(&[0.0_f32; 4]));
        let own = u64::from(rank.rank);
        let mut lists = lists(own, 2, |_, _| 1);
        if own == 1 {
            // Rank 0 gives one.
            lists[2][0] = 2;
            lists[3][1] = 2;
        }
        assert_eq!(rank.exchange(from, &lists, to), 0, "{}", recent_message());
        assert_eq!(rank.synchronize(), DIFFER);
        let says = "rank 0 gives 1 elements to rank 1, which expects 2";
        assert!(recent_message().contains(says), "{}", recent_message());
        rank.free(from);
        rank.free(to);
    });
    assert_eq!(control::take_violations().len(), 2);
    finish(session);
}

#[test]
fn wrong_exchanges_are_refused() {
    let session = start(machine(2));
    on_ranks(2, |rank| {
        let (from, to) = (rank.upload(&[1.0_f32; 4]), rank.upload(&[0.0_f32; 4]));
        let good = || lists(u64::from(rank.rank), 2, |_, _| 2);
        let refused = |from, change: &dyn Fn(&mut [Vec<u64>; 4]), to, expected, says: &str| {
            let mut lists = good();
            change(&mut lists);
            let code = rank.exchange(from, &lists, to);
            assert_eq!(code, expected, "{}", recent_message());
            assert!(recent_message().contains(says), "{}", recent_message());
        };
        let none = |_: &mut [Vec<u64>; 4]| {};
        refused(null_mut(), &none, to, 2, "sendBuf is null");
        refused(from, &none, null_mut(), 2, "recvBuf is null");
        refused(from, &none, from, 1, "sendBuf and recvBuf overlap");
        refused(from, &|lists| lists[1][1] = 3, to, 1, "sendBuf of rank 1: ");
        refused(
            from,
            &|lists| lists[3][1] = 3,
            to,
            1,
            "reach outside allocation",
        );
        refused(
            from,
            &|lists| lists[3][1] = 1,
            to,
            1,
            "two ranks overlap in recvBuf",
        );
        refused(
            from,
            &|lists| lists[1][0] = 1 << 62,
            to,
            1,
            "sendBuf has 2 elements",
        );
        let lists = good();
        let [given, given_at, received, received_at] =
            lists.each_ref().map(|list| list.as_ptr().cast());
        let none = std::ptr::null();
        let (comm, stream) = (rank.comm, rank.stream);
        // SAFETY: a number for each rank, or null; wrong calls are errors.
        unsafe {
            let code = HcclAlltoAllV(
                from,
                given,
                given_at,
                FP32,
                to,
                received,
                received_at,
                FP16,
                comm,
                stream,
            );
            assert_eq!(code, 1);
            assert!(recent_message().contains("sendType is 4, recvType 3"));
            let code = HcclAlltoAllV(
                from,
                given,
                none,
                FP32,
                to,
                received,
                received_at,
                FP32,
                comm,
                stream,
            );
            assert_eq!(code, 2);
            assert!(recent_message().contains("displacements of sendBuf is null"));
        }
        rank.free(from);
        rank.free(to);
    });
    assert!(!control::collectives().contains_key("HcclAlltoAllV"));
    finish(session);
}

#[test]
fn only_a_fixed_order_gives_equal_sums_in_every_run() {
    let session = start(machine(4));
    let rounds = |fixed: i32| {
        // SAFETY: takes numbers.
        assert_eq!(unsafe { HcclSetConfig(0, fixed) }, 0);
        let seen = Arc::new(Mutex::new(Vec::new()));
        let found = seen.clone();
        on_ranks(4, move |rank| {
            let value = [1.0_f32, 1e8, -1e8, 0.5][rank.rank as usize];
            for _ in 0..40 {
                let sum = rank.sum(&[value], FP32, SUM)[0];
                found.lock().expect("no panic").push(sum.to_bits());
            }
        });
        let mut seen = seen.lock().expect("no panic").clone();
        seen.sort_unstable();
        seen.dedup();
        seen.len()
    };
    assert_eq!(rounds(1), 1);
    assert!(rounds(0) > 1);
    finish(session);
}

#[test]
fn what_the_ranks_call_must_agree() {
    let session = start(machine(2));
    on_ranks(2, |rank| {
        let memory = rank.upload(&[1.0_f32; 4]);
        let count = 3 + u64::from(rank.rank);
        assert_eq!(rank.all_reduce(memory, count, FP32, SUM), 0);
        assert_eq!(rank.synchronize(), DIFFER);
        assert!(recent_message().contains("rank 0 calls HcclAllReduce of 3 Float"));
        rank.free(memory);
    });
    let found = control::take_violations();
    assert_eq!(found.len(), 2, "{found:?}");
    assert!(found.iter().all(|v| v.kind == "collective"));
    finish(session);
}

#[test]
fn a_rank_that_does_not_come_ends_the_wait() {
    let session = start(machine(2));
    on_ranks(2, |rank| {
        if rank.rank == 0 {
            let memory = rank.upload(&[1.0_f32]);
            assert_eq!(rank.all_reduce(memory, 1, FP32, SUM), 0);
            // SAFETY: a wrong call is an error.
            let busy = unsafe { HcclCommDestroy(rank.comm) };
            assert_eq!(busy, 20, "{}", recent_message());
            assert_eq!(rank.synchronize(), TIMED_OUT);
            assert!(recent_message().contains("ranks 1 did not"));
            rank.free(memory);
        }
    });
    control::set_collective_timeouts(Duration::from_millis(50), Duration::from_secs(1));
    // SAFETY: valid parameters.
    unsafe {
        assert_eq!(aclrtSetDevice(0), 0);
        let (root, mut comm) = (root(), null_mut());
        assert_eq!(
            HcclCommInitRootInfo(2, root.as_ptr().cast(), 0, &raw mut comm),
            9
        );
        assert!(recent_message().contains("ranks 1 did not"));
        assert_eq!(aclrtResetDevice(0), 0);
    }
    finish(session);
}

#[test]
fn wrong_calls_are_refused() {
    let session = start(machine(2));
    on_ranks(2, |rank| {
        let memory = rank.upload(&[1.0_f64; 4]);
        let refused = |code: i32, expected: i32, says: &str| {
            let message = recent_message();
            assert_eq!(code, expected, "{message}");
            assert!(message.contains(says), "`{message}` says `{says}`");
        };
        let call = |at: *mut c_void, count, dtype, how| rank.all_reduce(at, count, dtype, how);
        refused(call(null_mut(), 1, FP32, SUM), 2, "sendBuf is null");
        let odd = memory.wrapping_byte_add(2);
        refused(call(odd, 1, FP32, SUM), 1, "not aligned to 4 bytes");
        refused(call(memory, 9, FP32, SUM), 1, "reach outside allocation");
        refused(call(memory, 0, FP32, SUM), 1, "0 elements");
        refused(call(memory, 1, 13, SUM), 1, "type 13 does not exist");
        refused(call(memory, 1, FP32, 7), 1, "reduction 7 does not exist");
        refused(
            call(memory, 1, INT16, PROD),
            5,
            "does not combine Int16 by Product",
        );
        refused(
            call(memory, 1, BF16, PROD),
            5,
            "does not combine Bf16 by Product",
        );
        refused(call(memory, 1, UINT8, SUM), 5, "does not combine Uint8");
        refused(call(memory, 1, FP64, SUM), 5, "does not combine Double");
        let (comm, stream) = (rank.comm, rank.stream);
        // SAFETY: wrong calls are errors.
        unsafe {
            let next = memory.wrapping_byte_add(4);
            let code = HcclAllReduce(memory, next, 2, FP32, SUM, comm, stream);
            refused(code, 1, "overlap");
            let code = HcclAllReduce(memory, memory, 1, FP32, SUM, stream, stream);
            refused(code, 1, "is a stream handle");
        }
        rank.free(memory);
    });
    finish(session);
}

#[test]
fn products_that_do_not_sum_bf16_say_so() {
    let session = start(Machine {
        soc_name: c"Ascend910A",
        ..machine(1)
    });
    on_ranks(1, |rank| {
        let memory = rank.upload(&[0_u16]);
        assert_eq!(rank.all_reduce(memory, 1, BF16, SUM), 5);
        assert!(recent_message().contains("Ascend910A does not combine Bf16"));
        let lists = [1_u64, 0].map(|number| [number]);
        let [count, at] = lists.each_ref().map(|list| list.as_ptr().cast());
        let (to, comm, stream) = (rank.upload(&[0_u16]), rank.comm, rank.stream);
        // SAFETY: a number for each rank; a type that is not exchanged is an error.
        let code =
            unsafe { HcclAlltoAllV(memory, count, at, BF16, to, count, at, BF16, comm, stream) };
        assert_eq!(code, 5, "{}", recent_message());
        rank.free(to);
        rank.free(memory);
    });
    finish(session);
}

#[test]
fn a_communicator_is_of_its_device_and_gone_once_destroyed() {
    let session = start(machine(2));
    // SAFETY: wrong calls are errors.
    unsafe {
        assert_eq!(aclrtSetDevice(0), 0);
        let root = root();
        let rank = Rank::join(&root, 1, 0);
        let memory = rank.upload(&[1.0_f32]);
        let (comm, stream) = (rank.comm, rank.stream);
        let mut again = null_mut();
        let code = HcclCommInitRootInfo(1, root.as_ptr().cast(), 0, &raw mut again);
        assert_eq!(
            code,
            11,
            "a root info is of one communicator: {}",
            recent_message()
        );
        assert_eq!(aclrtSetDevice(1), 0);
        assert_eq!(
            HcclAllReduce(memory, memory, 1, FP32, SUM, comm, null_mut()),
            1
        );
        assert!(recent_message().contains("the communicator is of device 0"));
        assert_eq!(aclrtResetDevice(1), 0);
        assert_eq!(aclrtSetDevice(0), 0);
        assert_eq!(HcclCommDestroy(comm), 0);
        assert_eq!(HcclAllReduce(memory, memory, 1, FP32, SUM, comm, stream), 1);
        assert!(recent_message().contains("was destroyed before"));
        assert_eq!(HcclCommDestroy(comm), 1);
        rank.free(memory);
        assert_eq!(aclrtDestroyStream(stream), 0);
        assert_eq!(aclrtResetDevice(0), 0);
        assert_eq!(aclrtResetDevice(0), 0);
    }
    finish(session);
}

#[test]
fn an_operation_needs_order_and_lasting_memory() {
    let _session = start(machine(1));
    on_ranks(1, |rank| {
        let memory = rank.upload(&[1.0_f32]);
        let mut other = null_mut();
        // SAFETY: valid calls without an event between them.
        unsafe {
            assert_eq!(aclrtCreateStream(&raw mut other), 0);
            assert_eq!(aclrtMemsetAsync(memory, 4, 0, 4, other), 0);
            assert_eq!(rank.all_reduce(memory, 1, FP32, SUM), 0);
            assert_eq!(aclrtSynchronizeStream(other), 0);
            assert_eq!(rank.synchronize(), 0);
        }
        // Whichever of the two ran first.
        let found = control::take_violations();
        assert!(!found.is_empty());
        assert!(found.iter().all(|v| v.kind == "stream-order"), "{found:?}");
        assert_eq!(rank.all_reduce(memory, 1, FP32, SUM), 0);
        rank.free(memory);
        one_violation("stream-order", "freed while HcclAllReduce");
        let _failed_or_not = rank.synchronize();
        // SAFETY: live, and not used afterwards.
        assert_eq!(unsafe { aclrtDestroyStream(other) }, 0);
    });
}

#[test]
fn communicators_take_memory_of_the_device() {
    let session = start(machine(1));
    control::set_memory_limit(Some(500 << 20));
    on_ranks(1, |rank| {
        assert_eq!(rank.sum(&[1.0_f32], FP32, SUM), [1.0]);
        let mut address = null_mut();
        // SAFETY: a valid out parameter.
        let code = unsafe { aclrtMalloc(&raw mut address, 200 << 20, 0) };
        assert_eq!(code, 207_001, "{}", recent_message());
        let (mut again, root) = (null_mut(), root());
        // SAFETY: valid parameters.
        let code = unsafe { HcclCommInitRootInfo(1, root.as_ptr().cast(), 0, &raw mut again) };
        assert_eq!(code, 3, "{}", recent_message());
    });
    finish(session);
}

const CHILD: &str = "ASCEND_SIM_TEST_ROOT";

/// The other process of the next test.
#[test]
fn the_other_process() {
    let Ok(path) = std::env::var(CHILD) else {
        return;
    };
    let root: Root = std::fs::read(path)
        .expect("the root info")
        .try_into()
        .expect("its size");
    let session = start(machine(1));
    // SAFETY: takes a number.
    assert_eq!(unsafe { aclrtSetDevice(0) }, 0);
    let rank = Rank::join(&root, 2, 1);
    assert_eq!(rank.sum(&[10.0_f32, 20.0], FP32, SUM), [11.0, 22.0]);
    assert_eq!(exchange_of_two(&rank), [1.0, 2.0]);
    rank.end();
    finish(session);
}

/// What a rank receives of 10 times its rank and the two numbers after it, of which rank 0 takes
/// one and rank 1 two, but not from itself.
fn exchange_of_two(rank: &Rank) -> Vec<f32> {
    let own = f32::from(rank.rank as u8) * 10.0;
    let from = rank.upload(&[own + 1.0, own + 2.0]);
    let to = rank.upload(&[0.0_f32; 2]);
    let of_pair = |from: u64, to: u64| if from == to { 0 } else { 1 + to };
    let lists = lists(rank.rank.into(), 2, of_pair);
    assert_eq!(rank.exchange(from, &lists, to), 0, "{}", recent_message());
    assert_eq!(rank.synchronize(), 0, "{}", recent_message());
    let received = rank.download::<f32>(to, 1 + rank.rank as usize);
    rank.free(from);
    rank.free(to);
    received
}

#[test]
fn devices_of_two_processes_sum() {
    let session = start(machine(1));
    let file = std::env::temp_dir().join(format!("ascend-sim-root-{}", std::process::id()));
    // SAFETY: takes a number.
    assert_eq!(unsafe { aclrtSetDevice(0) }, 0);
    let root = root();
    std::fs::write(&file, root).expect("a file");
    let program = std::env::current_exe().expect("this program");
    let mut other = Command::new(program)
        .args(["--exact", "the_other_process"])
        .env(CHILD, &file)
        .spawn()
        .expect("another process");
    let rank = Rank::join(&root, 2, 0);
    assert_eq!(rank.sum(&[1.0_f32, 2.0], FP32, SUM), [11.0, 22.0]);
    assert_eq!(exchange_of_two(&rank), [11.0]);
    rank.end();
    assert!(other.wait().expect("it ends").success());
    let _gone = std::fs::remove_file(&file);
    finish(session);
}
