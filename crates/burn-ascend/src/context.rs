//! The state of one open device.

use std::any::{Any, TypeId};
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn::backend::ExecutionError;
use rope_ascend::aclnn::Operators;
use rope_ascend::rope::Npu;
use rope_ascend::safe::{DeviceBuffer, Stream};
use rope_ascend::{AscendError, Result};

use crate::collective::Memberships;
use crate::error::execution;
use crate::npu::AscendDevice;

/// The limit on numbers kept in device memory.
const NUMBERS: usize = 16;

/// An open device: its stream, the state of its random numbers, and the first unreported failure.
#[derive(Debug)]
pub(crate) struct Context {
    device: AscendDevice,
    npu: Npu,
    operators: Operators,
    random: Mutex<Random>,
    numbers: Mutex<VecDeque<(u32, Arc<DeviceBuffer<u8>>)>>,
    unseen: Mutex<Option<ExecutionError>>,
    /// True if queued work has failed since the last call of [`failure`](Self::failure).
    suspect: AtomicBool,
    caches: Mutex<HashMap<TypeId, Arc<dyn Any + Send + Sync>>>,
    /// Declared last, so that everything else is dropped before it; see [`alive`](Self::alive).
    alive: Arc<()>,
}

/// State of the counter-based generator of the operator library.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Random {
    pub(crate) seed: i64,
    pub(crate) offset: i64,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Context {
    pub(crate) fn new(device: AscendDevice, npu: Npu) -> Result<Self> {
        Ok(Self {
            device,
            operators: Operators::new(npu.stream()?),
            npu,
            random: Mutex::new(Random { seed: 0, offset: 0 }),
            numbers: Mutex::default(),
            unseen: Mutex::new(None),
            suspect: AtomicBool::new(false),
            caches: Mutex::default(),
            alive: Arc::default(),
        })
    }

    pub(crate) fn device(&self) -> AscendDevice {
        self.device
    }

    pub(crate) fn npu(&self) -> &Npu {
        &self.npu
    }

    pub(crate) fn stream(&self) -> &Stream {
        self.operators.stream()
    }

    pub(crate) fn operators(&self) -> &Operators {
        &self.operators
    }

    /// Shared with this context until the last of its device handles is released. The count of an
    /// `Arc<Context>` would be zero earlier, while another thread may still be releasing them.
    pub(crate) fn alive(&self) -> Arc<()> {
        self.alive.clone()
    }

    /// The device's single value of a type, in which an operation caches data.
    pub(crate) fn cache<T: Default + Send + Sync + 'static>(&self) -> Arc<T> {
        let mut caches = lock(&self.caches);
        let cache = caches
            .entry(TypeId::of::<T>())
            .or_insert_with(|| Arc::<T>::default());
        match cache.clone().downcast() {
            Ok(cache) => cache,
            Err(_) => unreachable!("its key is its type"),
        }
    }

    pub(crate) fn seed(&self, seed: u64) {
        *lock(&self.random) = Random {
            seed: seed.cast_signed(),
            offset: 0,
        };
    }

    /// Returns the generator's state for a draw of `count` numbers, and advances it.
    pub(crate) fn draw(&self, count: usize) -> Random {
        let mut random = lock(&self.random);
        let state = *random;
        // Each counter step gives four numbers; the operators require a multiple of four.
        let steps = i64::try_from(count.next_multiple_of(4)).unwrap_or(i64::MAX);
        random.offset = random.offset.wrapping_add(steps);
        state
    }

    /// A number in device memory. Recently used ones are kept, since a training step uses the same
    /// numbers for all parameters.
    pub(crate) fn number(&self, value: f32) -> Result<Arc<DeviceBuffer<u8>>> {
        let mut numbers = lock(&self.numbers);
        let bits = value.to_bits();
        if let Some((_, number)) = numbers.iter().find(|(known, _)| *known == bits) {
            return Ok(number.clone());
        }
        let number = Arc::new(self.stream().upload_queued(&value.to_ne_bytes())?);
        if numbers.len() == NUMBERS {
            numbers.pop_front();
        }
        numbers.push_back((bits, number.clone()));
        Ok(number)
    }

    /// Keeps the first failure for [`sync`](Self::sync) to report.
    pub(crate) fn failed(&self, error: &ExecutionError) {
        lock(&self.unseen).get_or_insert_with(|| error.clone());
    }

    /// Clears the failure reported by `error`, which a read has returned.
    pub(crate) fn seen(&self, error: &ExecutionError) {
        let mut unseen = lock(&self.unseen);
        if unseen
            .as_ref()
            .is_some_and(|kept| kept.reason() == error.reason())
        {
            *unseen = None;
        }
    }

    /// Waits for the queued work.
    pub(crate) fn sync(&self) -> Result<(), ExecutionError> {
        let waited = self.explained(self.stream().synchronize());
        match lock(&self.unseen).take() {
            Some(error) => Err(error),
            None => waited,
        }
    }

    /// Waits for the queued work and copies `bytes` of a block, from `first` on, to the host.
    pub(crate) fn read(
        &self,
        block: &DeviceBuffer<u8>,
        first: usize,
        bytes: usize,
    ) -> Result<Vec<u8>, ExecutionError> {
        let mut host = vec![0; bytes];
        self.explained(self.stream().read_from(block, first, &mut host))?;
        Ok(host)
    }

    /// A failure of queued work names the synchronising call; this adds the most recently queued
    /// operators.
    fn explained(&self, outcome: Result<()>) -> Result<(), ExecutionError> {
        outcome.map_err(|error| match &error {
            AscendError::Execution { .. } => {
                self.suspect.store(true, Ordering::Relaxed);
                ExecutionError::with_context(format!(
                    "{error}; operators queued last: {}",
                    self.operators.recent().join(", ")
                ))
            }
            other => execution(other),
        })
    }

    /// The error of a failed stream, returned by each wait since.
    pub(crate) fn failure(&self) -> Option<AscendError> {
        if !self.suspect.swap(false, Ordering::Relaxed) {
            return None;
        }
        let error = self.stream().synchronize().err()?;
        self.suspect.store(true, Ordering::Relaxed);
        Some(error)
    }

    /// Waits for the queued work and returns cached memory to the device.
    pub(crate) fn trim(&self) -> Result<()> {
        // Their tensors hold this context.
        self.cache::<Memberships>().finish();
        self.stream().trim()
    }
}
