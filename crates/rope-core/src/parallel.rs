//! Splits work over threads; no arithmetic.

use std::ops::Range;

/// The conditions for splitting work and the number of tasks. The threads are those of the caller's
/// rayon pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parallelism {
    min_bytes_per_task: usize,
    max_tasks: usize,
}

/// Size of a task that an idle thread may usefully take over.
#[cfg(feature = "rayon")]
const BALANCED_BYTES: usize = 2 << 20;
/// Tasks of that size per thread, so that a slow thread delays the others only a little.
#[cfg(feature = "rayon")]
const TASKS_PER_THREAD: usize = 4;

impl Parallelism {
    /// One task, on the calling thread.
    pub const SERIAL: Self = Self {
        min_bytes_per_task: usize::MAX,
        max_tasks: 1,
    };

    /// Splits into at most `max_tasks` tasks (0 and 1 mean one) of at least `min_bytes_per_task`
    /// bytes of q and k.
    pub const fn new(min_bytes_per_task: usize, max_tasks: usize) -> Self {
        Self {
            min_bytes_per_task,
            max_tasks,
        }
    }

    /// Calls `work` on ranges that cover `0..items`.
    pub(crate) fn for_each_range(
        self,
        items: usize,
        bytes: usize,
        work: impl Fn(Range<usize>) + Sync,
    ) {
        let tasks = self.tasks_for(items, bytes);
        if tasks == 1 {
            return work(0..items);
        }
        #[cfg(feature = "rayon")]
        {
            use rayon::iter::{IndexedParallelIterator, IntoParallelIterator, ParallelIterator};
            let tasks_alone = (0..tasks).into_par_iter().with_max_len(1);
            tasks_alone.for_each(|task| {
                work(items * task / tasks..items * (task + 1) / tasks);
            });
        }
    }

    /// The number of tasks for `items`, which are `bytes` of q and k.
    pub(crate) fn tasks_for(self, items: usize, bytes: usize) -> usize {
        let most = items.min(bytes / self.min_bytes_per_task.max(1));
        // Small work does not touch the pool: querying its size would start its threads.
        if most <= 1 {
            1
        } else {
            self.tasks(bytes).min(most)
        }
    }

    #[cfg(feature = "rayon")]
    fn tasks(self, bytes: usize) -> usize {
        if self.max_tasks <= 1 {
            return 1;
        }
        let threads = rayon::current_num_threads();
        let several = (bytes / BALANCED_BYTES).clamp(threads, TASKS_PER_THREAD * threads);
        self.max_tasks.min(several)
    }

    #[cfg(not(feature = "rayon"))]
    fn tasks(self, _: usize) -> usize {
        1
    }
}

/// Calls `work` on every block, on the threads of the pool if there are several blocks.
pub(crate) fn for_each_block<T: Send>(blocks: Vec<T>, work: impl Fn(T) + Sync + Send) {
    #[cfg(feature = "rayon")]
    if blocks.len() > 1 {
        use rayon::iter::{IntoParallelIterator, ParallelIterator};
        return blocks.into_par_iter().for_each(work);
    }
    blocks.into_iter().for_each(work);
}

impl Default for Parallelism {
    /// Tasks of at least 256 KiB, since handing over smaller ones costs more than it saves. One
    /// task per thread of the pool, up to four if they are large.
    fn default() -> Self {
        Self::new(256 << 10, usize::MAX)
    }
}
