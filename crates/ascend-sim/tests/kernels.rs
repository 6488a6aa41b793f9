//! Kernels on the simulator: a clean run says nothing, and each fault is named.

mod support;

use support::{Device, compile};

#[test]
fn a_correct_kernel_computes_and_reports_nothing() {
    let device = Device::new();
    let library = compile("reference.cpp", &["add_tiles", "scale_in_place"]);
    let elements = 1000_u32;
    let x: Vec<f32> = (0..elements).map(|i| i as f32).collect();
    let (input, output) = (device.upload(&x), device.alloc(4 * elements as usize));
    device.launch(&library, "add_tiles", 3, &[input, output, u64::from(elements) | 128 << 32]).expect("runs");
    let y: Vec<f32> = device.download(output, elements as usize);
    for (i, y) in y.iter().enumerate() {
        assert_eq!(*y, 2.0 * i as f32 + 1.0);
    }
    let report = ascend_sim::control::launches().pop().expect("one launch");
    assert_eq!(report.counters.gm_bytes_read, 4000);
    assert_eq!(report.counters.gm_bytes_written, 4000);
    assert_eq!(report.counters.gm_transfers_in, 8);
    assert_eq!(report.counters.vector_instructions, 16);
    assert_eq!(report.counters.vector_repeats, 2 * (7 * 2 + 2));
    assert_eq!(report.counters.ub_high_water_bytes, 4 * 128 * 4);
    assert_eq!(ascend_sim::control::violations(), []);
}
