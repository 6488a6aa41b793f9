//! The split of work over threads. The module is private, so it is compiled here, without kernels.
#![cfg(feature = "rayon")]

#[allow(
    dead_code,
    unreachable_pub,
    reason = "the crate uses the rest, and exports it"
)]
#[path = "../src/parallel.rs"]
mod parallel;

use std::sync::Mutex;

use parallel::Parallelism;

#[test]
fn several_tasks_a_thread_cover_every_item_once() {
    let (items, bytes) = (1001, 1 << 40);
    let parallelism = Parallelism::default();
    assert!(parallelism.tasks_for(items, bytes) > rayon::current_num_threads());
    let seen = Mutex::new(vec![0; items]);
    parallelism.for_each_range(items, bytes, |range| {
        let mut seen = seen.lock().unwrap();
        seen[range].iter_mut().for_each(|times| *times += 1);
    });
    assert!(seen.into_inner().unwrap().iter().all(|times| *times == 1));
}
