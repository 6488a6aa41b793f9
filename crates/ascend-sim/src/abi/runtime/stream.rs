//! Streams and events.
#![allow(non_snake_case, reason = "the vendor's spelling")]

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::Arc;
use std::time::Duration;

use super::{handle, invalid, pointer, put};
use crate::abi::export::export;
use crate::clock::{Actor, Clock};
use crate::codes::*;
use crate::state::{Event, Sim, sim};
use crate::stream::{Stream, Ticket, Work};
use crate::trace::Violation;

/// Waits for a stream; its failure, if it has one, becomes the call's.
fn synchronize(stream: *mut c_void, timeout: Option<Duration>) -> Outcome {
    let (stream, waiter, clock) = {
        let mut state = sim();
        let stream = state.stream_handle(handle(stream))?;
        let found = state.streams.get(stream)?;
        (stream, found.waiter(), found.clock.clone())
    };
    let Some(failure) = waiter.wait(timeout) else {
        let message = format!("stream 0x{stream:x} is still busy");
        return Err(Failure::new(RT_STREAM_SYNC_TIMEOUT, message));
    };
    let mut known = clock;
    known.raise(Actor::Stream(stream), waiter.target());
    sim().host_waited(&known);
    failure.map_or(Ok(()), Err)
}

const FAST_LAUNCH: u32 = 1;
const FAST_SYNC: u32 = 2;

/// Creates a stream on the thread's device.
fn create(stream: *mut *mut c_void) -> Outcome {
    let mut state = sim();
    let device = state.current_device()?;
    if stream.is_null() {
        return invalid("stream is null");
    }
    let created = state.streams.insert(Stream::new(device)?);
    // SAFETY: not null, and valid for writing by the C declaration.
    unsafe { put(stream, pointer(created), "stream") }
}

/// The last record of an event, if there was one.
fn recorded(state: &Sim, event: *mut c_void) -> Outcome<Option<(Arc<Ticket>, Clock)>> {
    Ok(state.events.get(handle(event))?.recorded.clone())
}

export! {
    status {
        fn aclrtCreateStream(stream: *mut *mut c_void) {
            create(stream)
        }
        fn aclrtCreateStreamWithConfig(stream: *mut *mut c_void, priority: u32, flag: u32) {
            // The priority is reserved, and flags that are not known create a default stream; the
            // two known here change how fast things are. Of the others, streams that run nothing by
            // themselves are not simulated.
            let _ = priority;
            if flag & !(FAST_LAUNCH | FAST_SYNC) != 0 {
                let message = format!("stream flag 0x{flag:x} is not simulated");
                return Err(Failure::new(RT_FEATURE_NOT_SUPPORTED, message));
            }
            create(stream)
        }
        fn aclrtDestroyStream(stream: *mut c_void) {
            if stream.is_null() {
                let message = "the default stream cannot be destroyed";
                return Err(Failure::new(RT_INVALID_HANDLE, message));
            }
            let mut state = sim();
            let stream = state.stream_handle(handle(stream))?;
            let destroyed = state.streams.remove(stream)?;
            let submitted = destroyed.waiter().target();
            if submitted > state.host_clock.get(Actor::Stream(stream)) {
                let message = format!(
                    "stream 0x{stream:x} is destroyed without waiting for its work: \
                     call aclrtSynchronizeStream first"
                );
                state.violate(Violation::host("stream-destroyed-busy", message));
            }
            drop(state);
            destroyed.close(false);
            // Reported above; what follows from it is not.
            sim().host_clock.raise(Actor::Stream(stream), submitted);
            Ok(())
        }
        fn aclrtSynchronizeStream(stream: *mut c_void) {
            synchronize(stream, None)
        }
        fn aclrtSynchronizeStreamWithTimeout(stream: *mut c_void, timeout: i32) {
            // -1 waits for ever, as the runtime's other timeouts do.
            match u64::try_from(timeout) {
                Ok(ms) => synchronize(stream, Some(Duration::from_millis(ms))),
                Err(_) if timeout == -1 => synchronize(stream, None),
                Err(_) => invalid(format!("timeout of {timeout} ms")),
            }
        }
        fn aclrtCreateEvent(event: *mut *mut c_void) {
            let mut state = sim();
            state.current_device()?;
            if event.is_null() {
                return invalid("event is null");
            }
            let created = state.events.insert(Event { recorded: None, uses: BTreeMap::new() });
            // SAFETY: not null, and valid for writing by the C declaration.
            unsafe { put(event, pointer(created), "event") }
        }
        fn aclrtDestroyEvent(event: *mut c_void) {
            let mut state = sim();
            state.current_device()?;
            let destroyed = state.events.remove(handle(event))?;
            let mut uses = destroyed.uses.iter();
            let busy = uses.find(|(actor, epoch)| state.host_clock.get(**actor) < **epoch);
            if let Some((actor, _)) = busy {
                let message = format!(
                    "event {event:p} is destroyed while {actor} may still complete it or wait for \
                     it: synchronise first"
                );
                state.violate(Violation::host("event-destroyed-busy", message));
            }
            Ok(())
        }
        fn aclrtRecordEvent(event: *mut c_void, stream: *mut c_void) {
            let mut state = sim();
            let stream = state.stream_handle(handle(stream))?;
            state.events.get(handle(event))?;
            let ticket = Arc::new(Ticket::default());
            let epoch = state.submit(stream, Work::Record(Arc::clone(&ticket)))?;
            let clock = state.streams.get(stream)?.clock.clone();
            let recorded = state.events.get_mut(handle(event))?;
            recorded.recorded = Some((ticket, clock));
            recorded.uses.insert(Actor::Stream(stream), epoch);
            Ok(())
        }
        fn aclrtStreamWaitEvent(stream: *mut c_void, event: *mut c_void) {
            let mut state = sim();
            let stream = state.stream_handle(handle(stream))?;
            let Some((ticket, clock)) = recorded(&state, event)? else { return Ok(()) };
            state.streams.get_mut(stream)?.clock.join(&clock);
            let epoch = state.submit(stream, Work::Wait(ticket))?;
            let waited = state.events.get_mut(handle(event))?;
            waited.uses.insert(Actor::Stream(stream), epoch);
            Ok(())
        }
        fn aclrtSynchronizeEvent(event: *mut c_void) {
            let recorded = {
                let state = sim();
                state.current_device()?;
                recorded(&state, event)?
            };
            let Some((ticket, clock)) = recorded else { return Ok(()) };
            let failure = ticket.wait();
            sim().host_waited(&clock);
            failure.map_or(Ok(()), Err)
        }
        fn aclrtEventElapsedTime(_ms: *mut f32, start: *mut c_void, end: *mut c_void) {
            let state = sim();
            state.current_device()?;
            state.events.get(handle(start))?;
            state.events.get(handle(end))?;
            Err(Failure::new(RT_FEATURE_NOT_SUPPORTED, "the simulator reports no times"))
        }
    }
    value {}
}
