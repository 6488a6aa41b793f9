//! Device memory in segments, held by a training run with a new length in each step.
#![allow(clippy::unwrap_used, missing_docs, reason = "test code")]

mod support;

use ascend_sim::{Session, control};
use rope_ascend::AscendError;
use rope_ascend::safe::{DeviceBuffer, DeviceMemory, Pooling, Runtime, Stream};
use support::{Numbers, api_with};

const MIB: usize = 1 << 20;

type Buffers = Vec<DeviceBuffer<f32>>;

fn buffers<const N: usize>(stream: &Stream, elements: [usize; N]) -> Buffers {
    let each = elements.into_iter();
    each.map(|len| stream.alloc(len).unwrap()).collect()
}

const HIDDEN: usize = 512;
const WIDE: usize = 4 * HIDDEN;
const HEADS: usize = 8;
const VOCABULARY: usize = 2048;
const LAYERS: usize = 8;
const MOST_TOKENS: u64 = 1024;
/// Elements of a layer's weights.
const WEIGHTS: [usize; 9] = [
    HIDDEN * HIDDEN,
    HIDDEN * HIDDEN,
    HIDDEN * HIDDEN,
    HIDDEN * HIDDEN,
    HIDDEN * WIDE,
    HIDDEN * WIDE,
    HIDDEN * WIDE,
    HIDDEN,
    HIDDEN,
];

/// The buffers of a training step of a decoder in f32, made and dropped in the order in which burn
/// does: activations are kept for the backward pass, attention keeps its scores, gradients live
/// until the optimizer has used them, and each weight moves to new memory.
fn step(stream: &Stream, tokens: usize, weights: &mut Buffers) {
    let make = |elements: usize| stream.alloc::<f32>(elements).unwrap();
    let (rows, wide, scores) = (tokens * HIDDEN, tokens * WIDE, HEADS * tokens * tokens);
    let mut x = make(rows);
    let mut kept = Vec::new();
    for _ in 0..LAYERS {
        let mut layer = buffers(stream, [rows, tokens]);
        layer.insert(0, x);
        let q = buffers(stream, [rows]);
        layer.append(&mut buffers(stream, [rows, rows, rows]));
        drop(q);
        let raw = make(scores);
        layer.push(make(scores));
        drop(raw);
        layer.push(make(rows));
        let projected = make(rows);
        layer.push(make(rows));
        drop(projected);
        layer.append(&mut buffers(stream, [rows, wide, wide, wide, wide]));
        let down = make(rows);
        x = make(rows);
        drop(down);
        kept.push(layer);
    }
    let logits = make(tokens * VOCABULARY);
    let loss = make(tokens * VOCABULARY);
    drop(logits);
    let upstream = make(tokens * VOCABULARY);
    drop(loss);
    let mut gradient = make(rows);
    let mut gradients = buffers(stream, [VOCABULARY * HIDDEN]);
    drop((upstream, x));
    while let Some(layer) = kept.pop() {
        let hidden = buffers(stream, [wide, wide, wide]);
        gradients.append(&mut buffers(stream, [HIDDEN * WIDE; 3]));
        drop(hidden);
        let normed = make(rows);
        let raw = make(scores);
        let shifted = make(scores);
        drop(raw);
        let heads = buffers(stream, [rows, rows, rows]);
        drop(shifted);
        gradients.append(&mut buffers(stream, [HIDDEN * HIDDEN; 4]));
        gradients.append(&mut buffers(stream, [HIDDEN; 2]));
        gradient = make(rows);
        drop((normed, heads, layer));
    }
    drop(gradient);
    gradients.push(make(VOCABULARY * HIDDEN));
    for weight in weights.iter_mut() {
        // Moments are updated in place, the weight is not.
        drop(buffers(stream, [weight.len()]));
        drop(buffers(stream, [weight.len()]));
        let update = buffers(stream, [weight.len(), weight.len()]);
        *weight = make(weight.len());
        drop(update);
    }
}

/// Fragmentation is the share of the most memory held that no buffer asked for at the busiest
/// moment: (peak reserved - peak in use) / peak reserved.
#[test]
fn a_thousand_steps_of_other_lengths_waste_a_tenth_of_the_memory_at_most() {
    let _session = Session::begin();
    let runtime = Runtime::start(api_with(Pooling::Segments)).unwrap();
    let device = runtime.device(0).unwrap();
    let stream = device.stream().unwrap();
    let embeddings = [VOCABULARY * HIDDEN; 2];
    let elements: Vec<usize> = [&embeddings[..], &WEIGHTS.repeat(LAYERS)].concat();
    let make = || elements.iter().map(|len| stream.alloc(*len).unwrap());
    let mut weights: Buffers = make().collect();
    let moments: Buffers = make().chain(make()).collect();
    let mut lengths = Numbers(0x5eed_2026);
    for _ in 0..1000 {
        let tokens = 16 + lengths.below(MOST_TOKENS - 15);
        step(&stream, usize::try_from(tokens).unwrap(), &mut weights);
    }
    let memory = device.memory_use();
    let wasted = memory.peak_reserved_bytes - memory.peak_bytes;
    let fragmentation = wasted as f64 / memory.peak_reserved_bytes as f64;
    // The crate's counts are those of the runtime.
    let live = control::live();
    assert_eq!(live.peak_bytes, memory.peak_reserved_bytes as u64);
    assert_eq!(live.bytes, memory.reserved_bytes as u64);
    assert!(memory.peak_bytes > 1000 * MIB, "{memory:?}");
    println!(
        "fragmentation {:.2} %, {memory:?}, {} allocations",
        100.0 * fragmentation,
        control::calls()
            .iter()
            .filter(|call| call.function == "aclrtMallocAlign32")
            .count()
    );
    assert!(fragmentation <= 0.10, "{fragmentation:.3} of {memory:?}");
    drop((weights, moments));
    assert_eq!(device.memory_use().live_bytes, 0);
    stream.trim().unwrap();
    assert_eq!(control::live().bytes, 0);
}

#[test]
fn two_tensors_of_two_mib_share_a_segment() {
    let _session = Session::begin();
    let runtime = Runtime::start(api_with(Pooling::Segments)).unwrap();
    let device = runtime.device(0).unwrap();
    let stream = device.stream().unwrap();
    let [first, second] = [(); 2].map(|()| stream.alloc::<u8>(2 * MIB).unwrap());
    assert_eq!(control::live().allocations, 1);
    let distance = second.pointer().addr() - first.pointer().addr();
    // 32 bytes after each tensor are nobody's, and blocks start at multiples of 512.
    assert_eq!(distance, 2 * MIB + 512);
    let memory = device.memory_use();
    assert_eq!(memory.cached_bytes, memory.largest_cached_bytes);
    assert_eq!(memory.cached_bytes, 64 * MIB - 2 * distance);
}

#[test]
fn a_device_without_room_for_a_shared_segment_gives_a_smaller_one() {
    let _session = Session::begin();
    let runtime = Runtime::start(api_with(Pooling::Segments)).unwrap();
    let device = runtime.device(0).unwrap();
    let stream = device.stream().unwrap();
    control::set_memory_limit(Some(40 << 20));
    let first = stream.alloc::<u8>(33 * MIB).unwrap();
    let second = stream.alloc::<u8>(3 * MIB).unwrap();
    assert_eq!(device.memory_use().reserved_bytes, 38 * MIB);
    match stream.alloc::<u8>(2 * MIB) {
        Err(AscendError::OutOfMemory {
            requested_bytes,
            live_bytes,
            cached_bytes,
            largest_cached_bytes,
            ..
        }) => {
            assert_eq!((requested_bytes, live_bytes), (4 * MIB, 36 * MIB));
            assert_eq!(cached_bytes, 2 * MIB - 1024);
            assert_eq!(largest_cached_bytes, MIB - 512);
        }
        other => panic!("{other:?}"),
    }
    drop((first, second));
    stream.alloc::<u8>(33 * MIB).unwrap();
}

#[test]
fn sizes_beyond_the_address_space_are_refused_before_any_call() {
    let _session = Session::begin();
    let runtime = Runtime::start(api_with(Pooling::Segments)).unwrap();
    let stream = runtime.device(0).unwrap().stream().unwrap();
    control::clear_calls();
    for error in [
        stream.alloc::<f32>(usize::MAX / 2).unwrap_err(),
        stream.alloc::<u8>(usize::MAX).unwrap_err(),
        stream.zeros::<u8>(isize::MAX.unsigned_abs()).unwrap_err(),
    ] {
        assert!(
            matches!(error, AscendError::InvalidArgument { .. }),
            "{error}"
        );
    }
    assert!(control::calls().is_empty());
}

/// Buffers can be exchanged by the memory that they dereference to.
#[test]
fn a_copy_moves_elements_and_not_what_memory_has_beyond_them() {
    let _session = Session::begin();
    let runtime = Runtime::start(api_with(Pooling::Blocks)).unwrap();
    let stream = runtime.device(0).unwrap().stream().unwrap();
    let mut odd = stream.upload(&[7u8; 7]).unwrap();
    let mut from = stream.upload(&[1.0f32, 2.0]).unwrap();
    std::mem::swap::<DeviceMemory>(&mut odd, &mut from);
    let mut to = stream.zeros::<f32>(from.len()).unwrap();
    stream.copy(&from, &mut to).unwrap();
    let expected = f32::from_ne_bytes([7; 4]);
    assert_eq!(stream.download(&to).unwrap(), [expected]);
    assert_eq!(control::violations(), []);
}

#[test]
fn elements_are_read_from_any_on_to_the_last() {
    let _session = Session::begin();
    let runtime = Runtime::start(api_with(Pooling::Segments)).unwrap();
    let stream = runtime.device(0).unwrap().stream().unwrap();
    let buffer = stream.upload(&[1.0f32, 2.0, 3.0, 4.0]).unwrap();
    let mut found = [0.0; 2];
    stream.read_from(&buffer, 1, &mut found).unwrap();
    assert_eq!(found, [2.0, 3.0]);
    let error = stream.read_from(&buffer, 3, &mut found).unwrap_err();
    assert!(error.to_string().contains("2 from 3"), "{error}");
}

#[test]
fn large_uploads_are_queued_in_pieces_of_pinned_memory() {
    let _session = Session::begin();
    let runtime = Runtime::start(api_with(Pooling::Segments)).unwrap();
    let stream = runtime.device(0).unwrap().stream().unwrap();
    let values: Vec<u8> = (0..132 * MIB + 5).map(|at| (at >> 10) as u8).collect();
    control::clear_calls();
    let buffer = stream.upload_queued(&values).unwrap();
    let count = |function| {
        let calls = control::calls();
        calls
            .iter()
            .filter(|call| call.function == function)
            .count()
    };
    assert_eq!(count("aclrtMemcpyAsync"), 9);
    // Four pieces of 16 MiB are in queued copies before the fifth, and before the ninth.
    assert_eq!(count("aclrtSynchronizeStream"), 2);
    assert_eq!(count("aclrtMemcpy"), 0);
    // The pieces after a wait are copied from the same pinned memory, and 4 MiB + 5 from more.
    assert_eq!(count("aclrtMallocHost"), 5);
    assert!(stream.download(&buffer).unwrap() == values);
    assert_eq!(control::violations(), []);
}
