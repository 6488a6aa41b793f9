//! Sums over simulated devices through the owned handles; each call fails in turn.
#![allow(clippy::unwrap_used, missing_docs, reason = "test code")]

mod support;

use std::sync::{Arc, Barrier, Mutex};
use std::thread;
use std::time::Duration;

use ascend_sim::{Machine, Session, control};
use rope_ascend::safe::{
    Communicator, CommunicatorOptions, DeviceBuffer, RootInfo, Runtime, Span, Stream, SumType,
};
use rope_ascend::{AscendError, Result};
use support::api;

const INJECTED: i32 = 500_000;

fn begin(devices: u32) -> (Session, Runtime) {
    let machine = Machine {
        devices,
        ..Machine::default()
    };
    let session = Session::with_machine(machine);
    let second = Duration::from_secs(1);
    control::set_collective_timeouts(second, second);
    (session, Runtime::start(api()).unwrap())
}

fn whole(memory: DeviceBuffer<f32>) -> Span<Buffer> {
    let count = memory.len();
    Span {
        memory: Buffer(memory),
        first_byte: 0,
        count,
    }
}

/// A buffer as memory that takes part.
#[derive(Debug)]
struct Buffer(DeviceBuffer<f32>);

impl std::borrow::Borrow<rope_ascend::safe::DeviceMemory> for Buffer {
    fn borrow(&self) -> &rope_ascend::safe::DeviceMemory {
        &self.0
    }
}

/// Runs `work` on a thread for each device of a communicator; the first error.
fn on_ranks<T: Send + 'static>(
    runtime: &Runtime,
    ranks: u32,
    work: impl Fn(&Stream, &Communicator) -> Result<T> + Send + Sync + Clone + 'static,
) -> Vec<Result<T>> {
    let root = Arc::new(Mutex::new(None::<Result<RootInfo>>));
    let barrier = Arc::new(Barrier::new(ranks as usize));
    let threads = (0..ranks).map(|rank| {
        let (runtime, work) = (runtime.clone(), work.clone());
        let (root, barrier) = (root.clone(), barrier.clone());
        thread::spawn(move || {
            let stream = runtime.device(rank).and_then(|device| device.stream());
            if rank == 0 {
                let made = stream.as_ref().map_err(Clone::clone);
                *root.lock().unwrap() = Some(made.and_then(|s| s.device().root_info()));
            }
            barrier.wait();
            let root = root.lock().unwrap().clone().unwrap()?;
            let root = RootInfo::from_bytes(&root.to_bytes())?;
            let stream = stream?;
            let options = CommunicatorOptions::new(ranks, rank);
            let communicator = Communicator::join(&stream, &root, options)?;
            work(&stream, &communicator)
        })
    });
    let threads: Vec<_> = threads.collect();
    threads.into_iter().map(|t| t.join().unwrap()).collect()
}

fn close(runtime: Runtime) {
    runtime.close().unwrap();
    assert_eq!(control::take_violations(), []);
    assert_eq!(control::live().communicators, 0);
}

/// One step: work before, a sum, work behind it.
fn step(stream: &Stream, communicator: &Communicator) -> Result<Vec<f32>> {
    let rank = communicator.options().rank as f32;
    let values = stream.upload(&[1.0 + rank, 10.0, -rank])?;
    let mut copy = stream.zeros::<f32>(3)?;
    stream.copy(&values, &mut copy)?;
    drop(values);
    let sum = communicator.all_reduce(whole(copy), SumType::F32)?;
    // Not of the sum, so it need not wait.
    drop(stream.zeros::<f32>(64)?);
    let Buffer(sum) = sum.finish()?;
    let mut behind = stream.alloc::<f32>(3)?;
    stream.copy(&sum, &mut behind)?;
    stream.download(&behind)
}

#[test]
fn every_rank_receives_the_sum_in_the_order_of_its_stream() {
    let (_session, runtime) = begin(3);
    let sums = on_ranks(&runtime, 3, |stream, communicator| {
        assert!(communicator.is_deterministic());
        for _ in 0..3 {
            assert_eq!(step(stream, communicator)?, [6.0, 30.0, -3.0]);
        }
        // Added in another order the first would not be lost.
        let value = [1.0, 1e8, -1e8][communicator.options().rank as usize];
        for _ in 0..16 {
            let span = whole(stream.upload(&[value])?);
            let Buffer(sum) = communicator.all_reduce(span, SumType::F32)?.finish()?;
            assert_eq!(stream.download(&sum)?, [0.0]);
        }
        let used = stream.device().memory_use();
        assert_eq!(used.communicator_bytes, 400 << 20);
        Ok((communicator.traffic(), stream.device().clone()))
    });
    for sum in sums {
        let (traffic, device) = sum.unwrap();
        assert_eq!(
            device.memory_use().communicator_bytes,
            0,
            "it was given back"
        );
        assert_eq!((traffic.calls, traffic.bytes), (19, 3 * 12 + 16 * 4));
        assert_eq!(traffic.least_sent_bytes, 3 * 16 + 16 * 4);
    }
    close(runtime);
}

#[test]
fn parts_are_scattered_and_gathered() {
    let (_session, runtime) = begin(2);
    let found = on_ranks(&runtime, 2, |stream, communicator| {
        let rank = communicator.options().rank as f32;
        let from = whole(stream.upload(&[rank, 1.0, 2.0, 3.0])?);
        let part = whole(stream.alloc::<f32>(2)?);
        let (_, part) = communicator
            .reduce_scatter(from, part, SumType::F32)?
            .finish()?;
        let all = whole(stream.alloc::<f32>(4)?);
        let pending = communicator.all_gather(whole(part.0), all, SumType::F32)?;
        let (_, Buffer(all)) = pending.finish()?;
        Ok((stream.download(&all)?, communicator.traffic()))
    });
    let counted = control::collectives();
    let sent = counted.values().map(|of| of.sent_bytes).sum::<u64>();
    for found in found {
        let (all, traffic) = found.unwrap();
        assert_eq!(all, [1.0, 2.0, 4.0, 6.0]);
        assert_eq!((traffic.calls, traffic.bytes), (2, 2 * 16));
        assert_eq!(2 * traffic.least_sent_bytes, sent);
    }
    close(runtime);
}

#[test]
fn ranks_exchange_as_many_elements_as_each_pair_says() {
    let (_session, runtime) = begin(2);
    let found = on_ranks(&runtime, 2, |stream, communicator| {
        let rank = communicator.options().rank as usize;
        // Rank 0 keeps one and gives two, rank 1 gives all.
        let counts = [[[1, 2], [3, 0]][rank], [[1, 3], [2, 0]][rank]];
        let own = [1.0, 2.0, 3.0].map(|x| x + 10.0 * rank as f32);
        let to = whole(stream.alloc::<f32>(counts[1].iter().sum())?);
        let counts = counts.each_ref().map(|list| &list[..]);
        let pending =
            communicator.all_to_all(whole(stream.upload(&own)?), to, counts, SumType::F32)?;
        let (_, Buffer(to)) = pending.finish()?;
        Ok((stream.download(&to)?, communicator.traffic()))
    });
    let [first, second]: [_; 2] = found.try_into().unwrap();
    let ((first, of_first), (second, of_second)) = (first.unwrap(), second.unwrap());
    assert_eq!(first, [1.0, 11.0, 12.0, 13.0]);
    assert_eq!(second, [2.0, 3.0]);
    assert_eq!((of_first.bytes, of_first.least_sent_bytes), (16, 8));
    assert_eq!((of_second.bytes, of_second.least_sent_bytes), (12, 12));
    close(runtime);
}

/// Dropped memory returns to its stream, whose later work waits for the operation.
#[test]
fn memory_that_is_dropped_at_once_is_not_reused_too_early() {
    let (_session, runtime) = begin(2);
    let done = on_ranks(&runtime, 2, |stream, communicator| {
        for round in 0..4 {
            let span = whole(stream.upload(&vec![round as f32; 300])?);
            drop(communicator.all_reduce(span, SumType::F32)?);
            drop(stream.zeros::<f32>(300)?);
        }
        stream.trim()
    });
    assert!(done.into_iter().all(|done| done.is_ok()));
    close(runtime);
}

/// The thread of a session and one that joins ranks call at the same time.
#[test]
fn a_device_makes_one_call_at_a_time_for_any_number_of_threads() {
    let (_session, runtime) = begin(1);
    let device = runtime.device(0).unwrap();
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..10 {
                    device.root_info().unwrap();
                }
            });
        }
    });
    drop(device);
    close(runtime);
}

#[test]
fn spans_outside_of_their_memory_are_refused() {
    let (_session, runtime) = begin(2);
    let refused = on_ranks(&runtime, 2, |stream, communicator| {
        let other = stream.device().stream()?;
        let messages = [
            (whole(other.zeros::<f32>(2)?), 0, 2),
            (whole(stream.zeros::<f32>(2)?), 4, 2),
            (whole(stream.zeros::<f32>(2)?), 2, 1),
            (whole(stream.zeros::<f32>(2)?), 0, usize::MAX),
        ]
        .map(|(span, first_byte, count)| {
            let span = Span {
                first_byte,
                count,
                ..span
            };
            let refused = communicator.all_reduce(span, SumType::F32);
            refused.expect_err("refused").to_string()
        });
        for (counts, says) in [
            ([&[1][..], &[1, 1]], "one for each of 2 ranks"),
            ([&[1, 2], &[1, 1]], "elements must be 3"),
            ([&[1, 1], &[2, 1]], "elements must be 3"),
            ([&[usize::MAX, 2], &[1, 1]], "elements must be"),
        ] {
            let [from, to] = [0, 1].map(|_| stream.zeros::<f32>(2));
            let refused = communicator.all_to_all(whole(from?), whole(to?), counts, SumType::F32);
            let refused = refused.expect_err("refused").to_string();
            assert!(refused.contains(says), "{refused}");
        }
        // Nothing is nothing to wait for.
        let none = whole(stream.zeros::<f32>(0)?);
        let _nothing = communicator.all_reduce(none, SumType::F32)?.finish()?;
        Ok(messages)
    });
    for messages in refused {
        let messages = messages.unwrap();
        assert!(messages[0].contains("made by this stream"), "{messages:?}");
        assert!(
            messages[1..]
                .iter()
                .all(|m| m.contains("within the 8 bytes"))
        );
    }
    assert_eq!(control::collectives(), Default::default());
    close(runtime);
}

#[test]
fn every_call_that_fails_is_an_error_and_nothing_leaks() {
    const CALLS: [(&str, u64); 8] = [
        ("HcclGetRootInfo", 1),
        ("HcclCommInitRootInfoConfig", 1),
        ("HcclAllReduce", 1),
        ("HcclCommDestroy", 1),
        ("aclrtCreateEvent", 3),
        ("aclrtRecordEvent", 2),
        ("aclrtStreamWaitEvent", 4),
        ("aclrtDestroyEvent", 1),
    ];
    for (function, nth) in CALLS {
        let (_session, runtime) = begin(2);
        control::inject_fault(function, nth, INJECTED);
        let mut errors: Vec<AscendError> = on_ranks(&runtime, 2, step)
            .into_iter()
            .filter_map(Result::err)
            .collect();
        let ended = runtime.close();
        errors.extend(ended.err());
        let names = |error: &AscendError| error.to_string().contains(function);
        assert!(errors.iter().any(names), "{function}: {errors:?}");
        let violations = control::take_violations();
        // A resource survives a failed attempt to destroy it.
        if !function.contains("Destroy") {
            let live = control::live();
            let live = (live.communicators, live.events, live.streams);
            assert_eq!(live, (0, 0, 0), "{function}");
            assert_eq!(violations, [], "{function}");
        }
    }
}

#[test]
fn a_rank_that_does_not_come_surfaces_when_the_stream_is_waited_for() {
    let (_session, runtime) = begin(2);
    let ends = on_ranks(&runtime, 2, |stream, communicator| {
        if communicator.options().rank == 1 {
            return Ok(());
        }
        let span = whole(stream.zeros::<f32>(8)?);
        drop(communicator.all_reduce(span, SumType::F32)?);
        stream.synchronize()
    });
    let error = ends[0].as_ref().expect_err("it waited in vain");
    assert!(matches!(error, AscendError::Execution { .. }), "{error}");
    assert!(error.to_string().contains("ranks 1 did not"), "{error}");
    assert!(ends[1].is_ok());
    // The stream's failure was reported.
    let _reported = runtime.close();
    assert_eq!(control::live().communicators, 0);
}

#[test]
fn ranks_that_disagree_are_told_who_does() {
    let (_session, runtime) = begin(2);
    let ends = on_ranks(&runtime, 2, |stream, communicator| {
        let count = 4 + communicator.options().rank as usize;
        let span = whole(stream.zeros::<f32>(count)?);
        drop(communicator.all_reduce(span, SumType::F32)?);
        stream.synchronize()
    });
    for end in ends {
        let error = end.expect_err("they differ").to_string();
        assert!(error.contains("rank 0 calls HcclAllReduce of 4"), "{error}");
    }
    let _reported = runtime.close();
}

#[test]
fn a_product_without_bf16_and_root_infos_cut_off_are_refused_with_the_vendors_text() {
    let _session = Session::with_machine(Machine {
        soc_name: c"Ascend910A",
        ..Machine::default()
    });
    let runtime = Runtime::start(api()).unwrap();
    let found = on_ranks(&runtime, 1, |stream, communicator| {
        let span = Span {
            count: 1,
            ..whole(stream.zeros::<f32>(1)?)
        };
        communicator.all_reduce(span, SumType::Bf16).map(drop)
    });
    let error = found.into_iter().next().unwrap().expect_err("refused");
    assert_eq!(
        error.to_string(),
        "HcclAllReduce of rank 0 returned 5 (not support feature): HcclAllReduce: Ascend910A does \
         not combine Bf16 by Sum"
    );
    let cut = RootInfo::from_bytes(&[1, 2]).expect_err("cut off");
    assert!(cut.to_string().contains("4108 bytes, found 2"), "{cut}");
    close(runtime);
}
