//! Seeded faults: every broken kernel is reported, by the right kind and at the right line.
#![allow(clippy::disallowed_methods, reason = "test code")]

mod support;

use std::path::Path;
use std::sync::LazyLock;

use ascend_sim::{Machine, control};
use support::{Device, compile, compile_for};

/// A broken kernel: the report expected of it, the number of its blocks, and words of the message.
struct Fault {
    kernel: &'static str,
    kind: &'static str,
    blocks: u32,
    says: &'static str,
}

/// Rows of a kernel, its blocks, the kind of report and its words.
macro_rules! faults {
    ($($kernel:literal $blocks:literal $kind:literal $says:literal;)*) => {
        &[$(Fault { kernel: $kernel, kind: $kind, blocks: $blocks, says: $says }),*]
    };
}

const FAULTS: &[Fault] = faults! {
    "queue_over_capacity" 1 "ub-capacity" "exceed the unified buffer of 188160 bytes";
    "sum_over_capacity" 1 "ub-capacity" "131072 in use";
    "misaligned_operand" 1 "ub-misaligned" "dst starts at UB byte 260";
    "misaligned_copy" 1 "ub-misaligned" "dst starts at UB byte 12";
    "reads_unwritten" 1 "ub-undefined-read" "src reads byte 0 of TBuf 0";
    "reads_past_what_was_loaded" 1 "ub-undefined-read" "reads byte 128 of VECIN queue 0";
    "stores_padding" 1 "ub-undefined-read" "go to global memory";
    "stores_computed_padding" 1 "ub-undefined-read" "go to global memory";
    "reads_past_tensor" 1 "gm-out-of-bounds" "bytes [0, 256) of a global tensor of 144 bytes";
    "reads_past_allocation" 1 "gm-out-of-bounds" "reach outside allocation";
    "writes_past_tensor" 1 "gm-out-of-bounds"
        "writes bytes [0, 256) of a global tensor of 240 bytes";
    "writes_to_null" 1 "gm-out-of-bounds" "the device pointer is null";
    "scalar_read_outside" 1 "gm-out-of-bounds" "GlobalTensor::GetValue";
    "too_many_blocks" 1 "dma-parameter" "blockCount is 4096";
    "length_cut_off" 1 "dma-parameter" "blockLen (32-byte units) is 65544";
    "length_of_half_an_element" 1 "dma-parameter" "blockLen of 6 bytes";
    "count_rounded_down" 1 "dma-parameter" "not a multiple of 32";
    "copy_into_scratch" 1 "dma-parameter" "VECCALC";
    "dequeue_before_enqueue" 1 "queue" "EnQue is missing";
    "never_freed_in_loop" 1 "queue" "FreeTensor is missing";
    "never_freed" 1 "queue" "FreeTensor is missing";
    "never_dequeued" 1 "queue" "DeQue is missing";
    "queue_too_deep" 1 "queue" "of depth 1";
    "freed_twice" 1 "queue" "was freed already";
    "freed_into_wrong_queue" 1 "queue" "belongs to another queue";
    "used_after_free" 1 "tensor-lifetime" "after FreeTensor";
    "used_while_enqueued" 1 "tensor-lifetime" "between EnQue and DeQue";
    "nine_live_tensors" 1 "queue" "the limit is 8";
    "two_pipes" 1 "queue" "another TPipe";
    "queue_without_memory" 1 "queue" "InitBuffer is missing";
    "blocks_write_same" 2 "block-conflict" "blocks run in any order";
    "block_reads_what_another_writes" 3 "block-conflict" "blocks run in any order";
    "no_flag_before_compute" 1 "ordering" "HardEvent::MTE2_V";
    "wrong_flag_before_compute" 1 "ordering" "HardEvent::MTE2_V";
    "no_flag_before_store" 1 "ordering" "HardEvent::V_MTE3";
    "store_of_input_queue" 1 "ordering" "HardEvent::V_MTE3";
    "no_flag_before_reload" 1 "ordering" "HardEvent::V_MTE2";
    "no_flag_before_rewrite" 1 "ordering" "HardEvent::MTE3_V";
    "copies_into_same_bytes" 1 "ordering" "PipeBarrier<PIPE_MTE2>";
    "reloads_what_it_stored" 1 "gm-ordering" "HardEvent::MTE3_MTE2";
    "dependent_vectors" 1 "ordering" "PipeBarrier<PIPE_V>";
    "vector_write_over_vector_read" 1 "ordering" "PipeBarrier<PIPE_V>";
    "scalar_read_of_vector_result" 1 "ordering" "HardEvent::V_S";
    "scalar_read_of_loaded" 1 "ordering" "HardEvent::MTE2_S";
    "vector_read_of_scalar" 1 "ordering" "HardEvent::S_V";
    "vector_write_over_scalar_read" 1 "ordering" "HardEvent::S_V";
    "load_over_scalar" 1 "ordering" "HardEvent::S_MTE2";
    "store_of_scalar" 1 "ordering" "HardEvent::S_MTE3";
    "scalar_write_over_stored" 1 "ordering" "HardEvent::MTE3_S";
    "no_flag_beside_a_scalar" 1 "ordering" "HardEvent::MTE2_V";
    "scalars_in_one_line" 2 "block-conflict" "in one cache line of 64 bytes";
    "event_id_not_allocated" 1 "event" "nobody allocated id 0";
    "event_id_of_the_system" 1 "event" "id 7 is the system's";
    "gather_repeats_wrap" 1 "vector-parameter" "is 256, outside the documented range [0, 255]";
    "gather_into_source" 1 "overlap" "dst and src share memory";
    "gather_into_offsets" 1 "overlap" "dst and srcOffset share memory";
    "wait_without_set" 1 "event" "the device would hang";
    "set_without_wait" 1 "event" "was not waited for";
    "set_twice" 1 "event" "was not waited for";
    "event_id_out_of_range" 1 "event" "id 8 is outside 0..7";
    "event_id_of_queue" 1 "event" "held by a queue";
    "overlapping_operands" 1 "overlap" "dst and src overlap";
    "overlapping_repeats" 1 "overlap" "from one repeat to the next";
    "too_many_repeats" 1 "vector-parameter" "repeatTime is 300";
    "stride_cut_off" 1 "vector-parameter" "dstRepStride is 264";
    "mask_above_limit" 1 "vector-parameter" "mask 65 is above the 64";
    "writes_past_buffer" 1 "tensor-bounds" "bytes [0, 256) of TBuf 0, which has 128 bytes";
    "gathers_between_elements" 1 "ub-misaligned" "is byte 6";
    "undocumented_rounding" 1 "vector-parameter" "CAST_NONE";
    "atomic_left_on" 1 "dma-parameter" "SetAtomicAdd is still on";
    "vector_work_on_the_cube_core" 1 "core" "has no UB";
    "cube_memory_on_a_vector_core" 1 "core" "has no L1";
    "l0b_over_capacity" 1 "ub-capacity" "exceed the L0B of 65536 bytes";
    "product_from_l1" 1 "cube-parameter" "it has to be in L0A";
    "product_of_nothing" 1 "ub-undefined-read" "fm reads byte 0";
    "rows_of_fifteen_columns" 1 "cube-parameter" "not a multiple of 16";
    "one_vector_core_sets_the_flag" 1 "cross-core" "would hang";
    "a_flag_beyond_fifteen" 1 "cross-core" "outside 0..15";
    "a_flag_without_a_cube_core" 1 "cross-core" "vector cores alone";
};

const BYTES: usize = 4096;

static SOURCE: LazyLock<String> = LazyLock::new(|| {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/kernels/faults.cpp");
    std::fs::read_to_string(path).expect("the source is there")
});

static LIBRARY: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let kernels: Vec<&str> = FAULTS.iter().map(|fault| fault.kernel).collect();
    compile("faults.cpp", &kernels)
});

/// The line that carries the fault of a kernel.
fn line_of(kernel: &str) -> u32 {
    let mark = format!("// FAULT {kernel}");
    let line = SOURCE.lines().position(|line| line.ends_with(&mark));
    line.unwrap_or_else(|| panic!("{mark} is in the source")) as u32 + 1
}

#[test]
fn every_seeded_fault_is_reported_at_its_line() {
    let mut missed = Vec::new();
    for fault in FAULTS {
        let device = Device::new();
        let (x, y) = (
            device.upload(&[1.0_f32; BYTES / 4]),
            device.upload(&[0.0_f32; BYTES / 4]),
        );
        let result = device.launch(&LIBRARY, fault.kernel, fault.blocks, &[x, y]);
        let violations = control::take_violations();
        let found = violations.iter().find(|v| {
            v.kind == fault.kind
                && v.line == Some(line_of(fault.kernel))
                && v.file
                    .as_deref()
                    .is_some_and(|file| file.ends_with("faults.cpp"))
                && v.kernel.as_deref() == Some(fault.kernel)
                && v.message.contains(fault.says)
        });
        match (&result, found) {
            // The rest of the kernel is correct: nothing is reported of another line.
            (Err((507035, message)), Some(_))
                if message.contains(fault.kernel)
                    && violations
                        .iter()
                        .all(|v| v.line == Some(line_of(fault.kernel))) => {}
            _ => missed.push(format!(
                "{}: expected [{}] at line {} with `{}`; launch: {result:?}; \
                 found: {violations:#?}",
                fault.kernel,
                fault.kind,
                line_of(fault.kernel),
                fault.says
            )),
        }
    }
    assert!(
        missed.is_empty(),
        "{} of {} faults missed:\n{}",
        missed.len(),
        FAULTS.len(),
        missed.join("\n")
    );
}

#[test]
fn the_hardware_of_dav_3510_orders_vector_instructions() {
    let kernels: Vec<&str> = FAULTS.iter().map(|fault| fault.kernel).collect();
    let library = compile_for("faults.cpp", &kernels, 3510, &[]).expect("compiles");
    let device = Device::on(Machine::ascend_950());
    let (x, y) = (
        device.upload(&[1.0_f32; BYTES / 4]),
        device.upload(&[0.0_f32; BYTES / 4]),
    );
    device
        .launch(&library, "dependent_vectors", 1, &[x, y])
        .expect("ordered by hardware");
    assert_eq!(control::violations(), []);
}
