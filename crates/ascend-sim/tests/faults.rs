//! Seeded faults: every broken kernel is reported, by the right kind and at the right line.

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

const fn fault(kernel: &'static str, kind: &'static str, says: &'static str) -> Fault {
    Fault {
        kernel,
        kind,
        blocks: 1,
        says,
    }
}

const FAULTS: &[Fault] = &[
    fault(
        "queue_over_capacity",
        "ub-capacity",
        "exceed the unified buffer of 188160 bytes",
    ),
    fault("sum_over_capacity", "ub-capacity", "131072 in use"),
    fault(
        "misaligned_operand",
        "ub-misaligned",
        "dst starts at UB byte 260",
    ),
    fault(
        "misaligned_copy",
        "ub-misaligned",
        "dst starts at UB byte 12",
    ),
    fault(
        "reads_unwritten",
        "ub-undefined-read",
        "src reads byte 0 of TBuf 0",
    ),
    fault(
        "reads_past_what_was_loaded",
        "ub-undefined-read",
        "reads byte 128 of VECIN queue 0",
    ),
    fault("stores_padding", "ub-undefined-read", "go to global memory"),
    fault(
        "stores_computed_padding",
        "ub-undefined-read",
        "go to global memory",
    ),
    fault(
        "reads_past_tensor",
        "gm-out-of-bounds",
        "bytes [0, 256) of a global tensor of 144 bytes",
    ),
    fault(
        "reads_past_allocation",
        "gm-out-of-bounds",
        "reach outside allocation",
    ),
    fault(
        "writes_past_tensor",
        "gm-out-of-bounds",
        "writes bytes [0, 256) of a global tensor of 240 bytes",
    ),
    fault(
        "writes_to_null",
        "gm-out-of-bounds",
        "the device pointer is null",
    ),
    fault(
        "scalar_read_outside",
        "gm-out-of-bounds",
        "GlobalTensor::GetValue",
    ),
    fault("too_many_blocks", "dma-parameter", "blockCount is 4096"),
    fault(
        "length_cut_off",
        "dma-parameter",
        "blockLen (32-byte units) is 65544",
    ),
    fault(
        "length_of_half_an_element",
        "dma-parameter",
        "blockLen of 6 bytes",
    ),
    fault(
        "count_rounded_down",
        "dma-parameter",
        "not a multiple of 32",
    ),
    fault("copy_into_scratch", "dma-parameter", "VECCALC"),
    fault("dequeue_before_enqueue", "queue", "EnQue is missing"),
    fault("never_freed_in_loop", "queue", "FreeTensor is missing"),
    fault("never_freed", "queue", "FreeTensor is missing"),
    fault("never_dequeued", "queue", "DeQue is missing"),
    fault("queue_too_deep", "queue", "of depth 1"),
    fault("freed_twice", "queue", "was freed already"),
    fault(
        "freed_into_wrong_queue",
        "queue",
        "belongs to another queue",
    ),
    fault("used_after_free", "tensor-lifetime", "after FreeTensor"),
    fault(
        "used_while_enqueued",
        "tensor-lifetime",
        "between EnQue and DeQue",
    ),
    fault("nine_live_tensors", "queue", "the limit is 8"),
    fault("two_pipes", "queue", "another TPipe"),
    fault("queue_without_memory", "queue", "InitBuffer is missing"),
    Fault {
        blocks: 2,
        ..fault(
            "blocks_write_same",
            "block-conflict",
            "blocks run in any order",
        )
    },
    Fault {
        blocks: 3,
        ..fault(
            "block_reads_what_another_writes",
            "block-conflict",
            "blocks run in any order",
        )
    },
    fault("no_flag_before_compute", "ordering", "HardEvent::MTE2_V"),
    fault("wrong_flag_before_compute", "ordering", "HardEvent::MTE2_V"),
    fault("no_flag_before_store", "ordering", "HardEvent::V_MTE3"),
    fault("store_of_input_queue", "ordering", "HardEvent::V_MTE3"),
    fault("no_flag_before_reload", "ordering", "HardEvent::V_MTE2"),
    fault("no_flag_before_rewrite", "ordering", "HardEvent::MTE3_V"),
    fault(
        "copies_into_same_bytes",
        "ordering",
        "PipeBarrier<PIPE_MTE2>",
    ),
    fault(
        "reloads_what_it_stored",
        "gm-ordering",
        "HardEvent::MTE3_MTE2",
    ),
    fault("dependent_vectors", "ordering", "PipeBarrier<PIPE_V>"),
    fault(
        "vector_write_over_vector_read",
        "ordering",
        "PipeBarrier<PIPE_V>",
    ),
    fault("scalar_read_of_vector_result", "ordering", "HardEvent::V_S"),
    fault("scalar_read_of_loaded", "ordering", "HardEvent::MTE2_S"),
    fault("vector_read_of_scalar", "ordering", "HardEvent::S_V"),
    fault(
        "vector_write_over_scalar_read",
        "ordering",
        "HardEvent::S_V",
    ),
    fault("load_over_scalar", "ordering", "HardEvent::S_MTE2"),
    fault("store_of_scalar", "ordering", "HardEvent::S_MTE3"),
    fault("scalar_write_over_stored", "ordering", "HardEvent::MTE3_S"),
    fault("no_flag_beside_a_scalar", "ordering", "HardEvent::MTE2_V"),
    Fault {
        blocks: 2,
        ..fault(
            "scalars_in_one_line",
            "block-conflict",
            "in one cache line of 64 bytes",
        )
    },
    fault("event_id_not_allocated", "event", "nobody allocated id 0"),
    fault("event_id_of_the_system", "event", "id 7 is the system's"),
    fault(
        "gather_repeats_wrap",
        "vector-parameter",
        "is 256, outside the documented range [0, 255]",
    ),
    fault("gather_into_source", "overlap", "dst and src share memory"),
    fault(
        "gather_into_offsets",
        "overlap",
        "dst and srcOffset share memory",
    ),
    fault("wait_without_set", "event", "the device would hang"),
    fault("set_without_wait", "event", "was not waited for"),
    fault("set_twice", "event", "was not waited for"),
    fault("event_id_out_of_range", "event", "id 8 is outside 0..7"),
    fault("event_id_of_queue", "event", "held by a queue"),
    fault("overlapping_operands", "overlap", "dst and src overlap"),
    fault(
        "overlapping_repeats",
        "overlap",
        "from one repeat to the next",
    ),
    fault("too_many_repeats", "vector-parameter", "repeatTime is 300"),
    fault("stride_cut_off", "vector-parameter", "dstRepStride is 264"),
    fault(
        "mask_above_limit",
        "vector-parameter",
        "mask 65 is above the 64",
    ),
    fault(
        "writes_past_buffer",
        "tensor-bounds",
        "bytes [0, 256) of TBuf 0, which has 128 bytes",
    ),
    fault("gathers_between_elements", "ub-misaligned", "is byte 6"),
    fault("undocumented_rounding", "vector-parameter", "CAST_NONE"),
    fault(
        "atomic_left_on",
        "dma-parameter",
        "SetAtomicAdd is still on",
    ),
    fault("vector_work_on_the_cube_core", "core", "has no UB"),
    fault("cube_memory_on_a_vector_core", "core", "has no L1"),
    fault(
        "l0b_over_capacity",
        "ub-capacity",
        "exceed the L0B of 65536 bytes",
    ),
    fault("product_from_l1", "cube-parameter", "it has to be in L0A"),
    fault("product_of_nothing", "ub-undefined-read", "fm reads byte 0"),
    fault(
        "rows_of_fifteen_columns",
        "cube-parameter",
        "not a multiple of 16",
    ),
    fault("one_vector_core_sets_the_flag", "cross-core", "would hang"),
    fault("a_flag_beyond_fifteen", "cross-core", "outside 0..15"),
    fault(
        "a_flag_without_a_cube_core",
        "cross-core",
        "vector cores alone",
    ),
];

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
