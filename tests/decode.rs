//! Rotating one token costs no allocation and no thread.
//!
//! One check in a separate program, without the test harness: the allocator counts the whole
//! process, including the harness's thread.

use rope_bench::cases::{Group, Selection, cases};
use rope_bench::rotation::ROTATION;
use rope_bench::timed::timed;
use rope_check::alloc::CountingAllocator;
use rope_core::{
    HeadsLayout, HeadsMut, Layout, Parallelism, Positions, RotarySpec, Rotator, TokenAngles,
};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator::new();

/// Threads of this process, where the system says.
fn threads() -> Option<usize> {
    Some(std::fs::read_dir("/proc/self/task").ok()?.count())
}

fn main() {
    // 32 + 8 heads, as the decode cases have them.
    let spec = RotarySpec::builder(128).build().expect("valid");
    let position = Positions::text(1, 1000, 1).expect("small");
    let layout = |heads| HeadsLayout::contiguous(Layout::Bsnd, 1, 1, heads, 128);
    let (q_layout, k_layout) = (layout(32), layout(8));
    let (mut q, mut k) = (vec![1f32; 32 * 128], vec![1f32; 8 * 128]);
    let before = threads();
    let angles = TokenAngles::<f32>::new(&spec, &position, None).expect("valid");
    let rotator = Rotator::new(spec.geometry(), angles.angles()).expect("valid");
    let rotator = rotator.with_parallelism(Parallelism::SERIAL);
    let ((), usage) = ALLOCATOR.measure(1, || {
        for _ in 0..100 {
            let q = HeadsMut::new(&mut q, q_layout).expect("fits");
            let k = HeadsMut::new(&mut k, k_layout).expect("fits");
            rotator.rotate(q, Some(k.into())).expect("valid");
        }
    });
    assert_eq!(usage.allocations, 0);
    assert_eq!(threads(), before, "a thread was started");

    // `mrope bench speed` times the same call, in every type.
    for case in cases(Selection::Default)
        .iter()
        .filter(|case| case.group == Group::Decode)
    {
        let mut timed = timed(case).expect("valid");
        timed.check(1).expect("the oracle's result");
        // A thread that the check started may still allocate, once; a rotation would each time.
        let mut allocations = (0..3).map(|_| {
            let ((), usage) = ALLOCATOR.measure(1, || timed.run(ROTATION, 10));
            usage.allocations
        });
        assert!(allocations.any(|count| count == 0), "{}", case.name());
    }

    // The count must see an allocation, or it could not fail.
    let (values, usage) = ALLOCATOR.measure(1, || vec![0u8; 64]);
    assert_eq!((values.len(), usage.allocations), (64, 1));
}
