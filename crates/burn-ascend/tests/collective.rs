//! Sums over several simulated NPUs through burn: `all_reduce`, and gradients of distributed
//! parameters in the worker threads that burn's `ExecutionStrategy::ddp` has.
#![allow(clippy::unwrap_used, missing_docs, reason = "test code")]

use std::sync::{Arc, Barrier, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use ascend_sim::control;
use burn::module::ParamId;
use burn::tensor::distributed::{
    DistributedConfig, DistributedContext, ReduceOperation, all_reduce,
};
use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_ascend::{AscendDevice, AscendHost, Ranks};

static TURN: Mutex<()> = Mutex::new(());

/// NPUs of the simulator, closed at the end without a violation.
struct Host {
    host: Option<AscendHost>,
    _turn: MutexGuard<'static, ()>,
}

impl Host {
    fn new(npus: u16) -> Self {
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        control::clear_collectives();
        let limit = Duration::from_secs(10);
        control::set_collective_timeouts(limit, limit);
        let npus: Vec<_> = (0..npus).map(AscendDevice::simulated).collect();
        Self {
            host: Some(AscendHost::start(&npus).unwrap()),
            _turn: turn,
        }
    }

    fn devices(&self) -> Vec<Device> {
        self.host.as_ref().unwrap().devices().to_vec()
    }

    fn npus(&self) -> Vec<AscendDevice> {
        self.host.as_ref().unwrap().npus().to_vec()
    }

    /// The results of `work` on a thread for each device.
    fn on_each<T: Send>(&self, work: impl Fn(usize, &Device) -> T + Sync) -> Vec<T> {
        let devices = self.devices();
        thread::scope(|scope| {
            let work = &work;
            let spawn = |(rank, device)| scope.spawn(move || work(rank, device));
            let threads: Vec<_> = devices.iter().enumerate().map(spawn).collect();
            threads.into_iter().map(|t| t.join().unwrap()).collect()
        })
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.host = None;
        control::clear_faults();
        let violations = control::take_violations();
        if !thread::panicking() {
            assert_eq!(violations, []);
            let live = control::live();
            let live = [
                live.communicators,
                live.allocations,
                live.events,
                live.streams,
            ];
            assert_eq!(live, [0; 4]);
        }
    }
}

fn sum<const D: usize>(x: Tensor<D>, op: ReduceOperation, devices: &[Device]) -> Tensor<D> {
    all_reduce(x, op, devices.to_vec()).resolve()
}

fn values<const D: usize>(x: Tensor<D>) -> Result<Vec<f32>, String> {
    let data = x
        .cast(DType::F32)
        .try_into_data()
        .map_err(|e| e.to_string())?;
    Ok(data.iter::<f32>().collect())
}

#[test]
fn each_device_receives_sum_and_mean_in_every_type_that_is_summed() {
    let host = Host::new(3);
    let devices = host.devices();
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        let found = host.on_each(|rank, device| {
            let data = TensorData::from([1.0 + rank as f32, -2.0, 8.0]);
            let x = Tensor::<1>::from_data(data, (device, dtype));
            let [summed, mean] = [ReduceOperation::Sum, ReduceOperation::Mean]
                .map(|op| sum(x.clone(), op, &devices));
            // A view, of a tensor that is still held.
            let view = sum(x.clone().slice(1..3), ReduceOperation::Sum, &devices);
            [summed, mean, view, x].map(|x| values(x).unwrap())
        });
        for (rank, [summed, mean, view, x]) in found.into_iter().enumerate() {
            assert_eq!(summed, [6.0, -6.0, 24.0]);
            assert_eq!((mean[1], mean[2]), (-2.0, 8.0));
            assert_eq!(view, [-6.0, 24.0]);
            assert_eq!(x, [1.0 + rank as f32, -2.0, 8.0]);
        }
    }
    let npu = host.npus()[0];
    assert!(npu.is_deterministic());
    assert_eq!(npu.traffic().calls, 9);
    assert_eq!(control::collectives()["HcclAllReduce"].calls, 27);
}

#[test]
fn what_an_npu_does_not_sum_and_what_it_fails_to_sum_is_an_error_of_the_tensor() {
    let host = Host::new(2);
    let devices = host.devices();
    let found = host.on_each(|_, device| {
        let x = Tensor::<1>::from_data(TensorData::from([1.0_f64]), (device, DType::F64));
        values(sum(x, ReduceOperation::Sum, &devices))
    });
    for message in found {
        let message = message.unwrap_err();
        assert!(message.contains("f32, f16 and bf16"), "{message}");
    }
    control::inject_fault("HcclAllReduce", 1, 15);
    control::inject_fault("HcclAllReduce", 2, 15);
    let found = host.on_each(|_, device| {
        let x = Tensor::<1>::from_data([1.0_f32], device);
        values(sum(x, ReduceOperation::Sum, &devices))
    });
    for message in found {
        let message = message.unwrap_err();
        assert!(
            message.contains("returned 15 (call runtime api fail)"),
            "{message}"
        );
    }
}

/// A transposed tensor, as the gradient of a product's right side is, and devices that each rank
/// names in another order.
#[test]
fn elements_are_summed_in_the_order_of_the_tensor_whatever_that_of_memory_and_devices() {
    let host = Host::new(2);
    let devices = host.devices();
    let found = host.on_each(|rank, device| {
        let data = [[1.0_f32, 2.0, 3.0], [4.0, 5.0, 6.0]];
        let x = Tensor::<2>::from_data(data, device);
        let x = match rank {
            0 => x.transpose(),
            _ => x.reshape([3, 2]),
        };
        let mut devices = devices.clone();
        devices.rotate_left(rank);
        values(sum(x, ReduceOperation::Sum, &devices)).unwrap()
    });
    assert_eq!(found, [[2.0, 6.0, 5.0, 9.0, 8.0, 12.0]; 2].map(Vec::from));
    let npus = host.npus();
    assert_eq!(npus[1].memory().unwrap().communicator_bytes, 400 << 20);
}

/// Each NPU as that of a process of its own, twice: of an earlier run nothing is left.
#[test]
fn ranks_of_a_wider_group_are_joined_beforehand() {
    let host = Host::new(2);
    let npus = host.npus();
    for _ in 0..2 {
        let root = npus[0].root_info().unwrap();
        let found = host.on_each(|rank, device| {
            let ranks = Ranks {
                npus: &npus[rank..=rank],
                first: rank as u32,
                all: 2,
            };
            ranks.join(&root).unwrap();
            let x = Tensor::<1>::from_data([rank as f32, 8.0], device);
            let of_all = ranks.all_gather(x.clone()).unwrap();
            let own = [device.clone()];
            let [sum, mean] =
                [ReduceOperation::Sum, ReduceOperation::Mean].map(|op| sum(x.clone(), op, &own));
            [of_all, sum, mean].map(|x| values(x).unwrap())
        });
        for [of_all, sum, mean] in found {
            assert_eq!(of_all, [0.0, 8.0, 1.0, 8.0]);
            assert_eq!((sum, mean), (vec![1.0, 16.0], vec![0.5, 8.0]));
        }
        assert_eq!(npus[1].memory().unwrap().communicator_bytes, 400 << 20);
    }
}

#[test]
fn joined_ranks_receive_parts_of_sums_and_the_tensors_of_all() {
    let host = Host::new(2);
    let npus = host.npus();
    let ranks = Ranks {
        npus: &npus,
        first: 0,
        all: 2,
    };
    let device = host.devices()[0].clone();
    let three = || Tensor::<1>::from_data([1.0_f32, 2.0, 3.0], &device);
    let early = ranks.all_gather(three()).unwrap_err().to_string();
    assert!(early.contains("joined before"), "{early}");
    ranks.join(&npus[0].root_info().unwrap()).unwrap();
    let odd = ranks.reduce_scatter(three()).unwrap_err().to_string();
    assert!(odd.contains("must be a multiple of 2 ranks"), "{odd}");
    let host_tensor = Tensor::<1>::from_data([1.0_f32], &Device::flex());
    let elsewhere = ranks.all_gather(host_tensor).unwrap_err().to_string();
    assert!(
        elsewhere.contains("the burn device of an NPU"),
        "{elsewhere}"
    );
    for dtype in [DType::F32, DType::BF16] {
        let found = host.on_each(|rank, device| {
            let own = [1.0, 2.0, 3.0, 4.0].map(|x| x + 10.0 * rank as f32);
            let x = Tensor::<1>::from_data(TensorData::from(own), (device, dtype));
            let part = ranks.reduce_scatter(x.clone()).unwrap();
            // A view that does not begin its block.
            let both = ranks.all_gather(x.clone().slice(1..3)).unwrap();
            let again = ranks.all_gather(part.clone()).unwrap();
            [part, both, again, x].map(|x| values(x).unwrap())
        });
        for (rank, [part, both, again, x]) in found.into_iter().enumerate() {
            assert_eq!(part, [[12.0, 14.0], [16.0, 18.0]][rank]);
            assert_eq!(both, [2.0, 3.0, 12.0, 13.0]);
            assert_eq!(again, [12.0, 14.0, 16.0, 18.0]);
            assert_eq!(x[0], 1.0 + 10.0 * rank as f32);
        }
    }
    // The simulated NPUs, a ring, sent the fewest bytes possible: half of all that is scattered or
    // gathered.
    let counted = control::collectives();
    let sent = counted.values().map(|of| of.sent_bytes).sum::<u64>();
    let traffic = npus[0].traffic();
    assert_eq!(sent, 2 * traffic.least_sent_bytes);
    assert_eq!(2 * traffic.least_sent_bytes, traffic.bytes);
    for function in ["HcclReduceScatter", "HcclAllGather"] {
        control::inject_fault(function, 1, 15);
        control::inject_fault(function, 2, 15);
        let found = host.on_each(|_, device| {
            let x = Tensor::<1>::from_data([1.0_f32, 2.0], device);
            values(match function {
                "HcclAllGather" => ranks.all_gather(x).unwrap(),
                _ => ranks.reduce_scatter(x).unwrap(),
            })
        });
        for message in found {
            let message = message.unwrap_err();
            assert!(message.contains(function), "{message}");
        }
    }
}

/// Of counts that differ between pairs, some of them 0; all to one; none at all.
#[test]
fn joined_ranks_give_each_other_as_many_elements_as_they_say() {
    let host = Host::new(3);
    let npus = host.npus();
    let ranks = Ranks {
        npus: &npus,
        first: 0,
        all: 3,
    };
    let device = host.devices()[0].clone();
    let x = || Tensor::<1>::zeros([2], &device);
    let early = ranks
        .all_to_all(x(), [&[1, 1, 0]; 2])
        .unwrap_err()
        .to_string();
    assert!(early.contains("joined before"), "{early}");
    ranks.join(&npus[0].root_info().unwrap()).unwrap();
    for counts in [[&[1, 1, 0][..], &[2]], [&[1, 1, 1], &[0, 0, 0]]] {
        let wrong = ranks.all_to_all(x(), counts).unwrap_err().to_string();
        assert!(wrong.contains("counts"), "{wrong}");
    }
    let counts: [fn(usize, usize) -> usize; 3] = [
        |from, to| (3 * from + 2 * to) % 4,
        |from, to| if to == 1 && from != 1 { 5 } else { 0 },
        |_, _| 0,
    ];
    let mut others = 0;
    for dtype in [DType::F32, DType::BF16] {
        for count in counts {
            let found = host.on_each(|rank, device| {
                let given: Vec<usize> = (0..3).map(|to| count(rank, to)).collect();
                let received: Vec<usize> = (0..3).map(|from| count(from, rank)).collect();
                let of_pair = |to: usize| {
                    let numbers = 0..count(rank, to);
                    numbers.map(move |index| (64 * rank + 16 * to + index) as f32)
                };
                let own: Vec<f32> = (0..3).flat_map(of_pair).collect();
                let x = Tensor::<1>::from_data(&own[..], (device, dtype));
                values(ranks.all_to_all(x, [&given, &received]).unwrap()).unwrap()
            });
            for (rank, found) in found.into_iter().enumerate() {
                let of_pair = |from: usize| {
                    let numbers = 0..count(from, rank);
                    numbers.map(move |index| (64 * from + 16 * rank + index) as f32)
                };
                let expected: Vec<f32> = (0..3).flat_map(of_pair).collect();
                assert_eq!(found, expected, "{dtype:?}, rank {rank}");
                let own = count(rank, rank);
                let given: usize = (0..3).map(|to| count(rank, to)).sum();
                others += (given - own) * dtype.size();
            }
        }
    }
    let counted = control::collectives()["HcclAlltoAllV"];
    assert_eq!((counted.calls, counted.sent_bytes), (18, others as u64));
    let sent = npus.iter().map(|npu| npu.traffic().least_sent_bytes);
    assert_eq!(sent.sum::<u64>(), others as u64);
}

/// A gather that has begun is queued before what the device computes beside it, and the device waits
/// for it after that.
#[test]
fn a_device_computes_beside_a_gather_that_has_begun() {
    let host = Host::new(1);
    let npus = host.npus();
    let ranks = Ranks {
        npus: &npus,
        first: 0,
        all: 1,
    };
    ranks.join(&npus[0].root_info().unwrap()).unwrap();
    let device = host.devices()[0].clone();
    let x = Tensor::<1>::from_data([1.0_f32, 2.0, 3.0], &device);
    control::clear_calls();
    let begun = ranks.begin_all_gather(x.clone()).unwrap();
    let beside = values(x.clone() + x).unwrap();
    let gathered = values(begun.wait()).unwrap();
    assert_eq!(
        (beside, gathered),
        (vec![2.0, 4.0, 6.0], vec![1.0, 2.0, 3.0])
    );
    let calls: Vec<_> = control::calls().iter().map(|call| call.function).collect();
    let after = |start: usize, name: &str| {
        let place = calls[start..].iter().position(|call| *call == name);
        start + place.unwrap_or_else(|| panic!("no {name} after {start}: {calls:?}"))
    };
    let gather = after(0, "HcclAllGather");
    let sum = after(gather, "aclnnAdd");
    assert!(!calls[gather..sum].contains(&"aclrtStreamWaitEvent"));
    after(sum, "aclrtStreamWaitEvent");
}

/// The gradients of two parameters, over several steps: as burn's workers, each on a thread, with
/// the barrier between steps that its worker loop lacks (a fast worker would begin the next backward
/// while the sums of a slow one are due, and both would wait for ever).
#[test]
fn gradients_of_distributed_parameters_are_those_of_the_whole_batch() {
    const STEPS: usize = 5;
    let host = Host::new(2);
    let devices: Vec<_> = host.devices().into_iter().map(Device::autodiff).collect();
    let config = DistributedConfig {
        all_reduce_op: ReduceOperation::Mean,
    };
    let context = DistributedContext::init(devices.clone(), config);
    let barrier = Arc::new(Barrier::new(2));
    let ids = [ParamId::new(), ParamId::new()];
    let workers = devices.into_iter().enumerate().map(|(rank, device)| {
        let barrier = barrier.clone();
        thread::spawn(move || {
            let mut weights = [[1.0_f32, -1.0], [0.5, 2.0]];
            for step in 0..STEPS {
                let [a, b] = [0, 1].map(|index| {
                    let x = Tensor::<1>::from_data(weights[index], &device).require_grad();
                    x.set_distributed(ids[index])
                });
                let x = Tensor::<1>::from_data([rank as f32 + 1.0, step as f32], &device);
                let loss = (a.clone() * x.clone() + b.clone() * x.clone() * x).sum();
                let gradients = loss.backward();
                barrier.wait();
                for (weight, tensor) in weights.iter_mut().zip([a, b]) {
                    let gradient = values(tensor.grad(&gradients).unwrap()).unwrap();
                    for (weight, gradient) in weight.iter_mut().zip(gradient) {
                        *weight -= 0.1 * gradient;
                    }
                }
            }
            weights
        })
    });
    let workers: Vec<_> = workers.collect();
    let found: Vec<_> = workers.into_iter().map(|w| w.join().unwrap()).collect();
    drop(context);
    let mut expected = [[1.0_f32, -1.0], [0.5, 2.0]];
    for step in 0..STEPS {
        let step = step as f32;
        let gradients = [[1.5, step], [2.5, step * step]];
        for (weight, gradient) in expected
            .iter_mut()
            .flatten()
            .zip(gradients.iter().flatten())
        {
            *weight -= 0.1 * gradient;
        }
    }
    assert_eq!(found, [expected, expected]);
    let counted = control::collectives()["HcclAllReduce"];
    assert_eq!(counted.calls as usize, 2 * 2 * STEPS);
}
