//! burn's `ExecutionStrategy::ddp` over two simulated NPUs learns what one NPU learns from the same
//! global batches.
#![allow(clippy::unwrap_used, missing_docs, reason = "test code")]

use std::sync::{Arc, Barrier};

use ascend_sim::control;
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataloader::{DataLoader, DataLoaderBuilder};
use burn::data::dataset::InMemDataset;
use burn::lr_scheduler::constant::ConstantLr;
use burn::module::{Module, Param};
use burn::optim::SgdConfig;
use burn::tensor::distributed::{DistributedConfig, ReduceOperation};
use burn::tensor::{Device, Tensor, TensorData};
use burn::train::logger::InMemoryMetricLogger;
use burn::train::metric::LossMetric;
use burn::train::{
    ExecutionStrategy, InferenceStep, Learner, RegressionOutput, SupervisedTraining, TrainOutput,
    TrainStep,
};
use burn_ascend::{AscendDevice, AscendHost};

const NPUS: usize = 2;
/// Examples of a batch on each NPU.
const PART: usize = 3;
/// Batches of an epoch.
const STEPS: usize = 4;
const EPOCHS: usize = 2;
const INPUTS: usize = 3;
/// Weights and bias.
const PARAMETERS: usize = 2;

type Example = ([f32; INPUTS], f32);

/// A linear layer.
#[derive(Module, Debug)]
struct Model {
    weight: Param<Tensor<2>>,
    bias: Param<Tensor<1>>,
    /// Where the workers wait for each other after each backward.
    #[module(skip)]
    workers: Arc<Barrier>,
}

impl Model {
    fn new(device: &Device, workers: usize) -> Self {
        let weight = TensorData::from([[0.5_f32], [-0.25], [0.125]]);
        let bias = TensorData::from([0.0625_f32]);
        Self {
            weight: Param::from_tensor(Tensor::from_data(weight, device)),
            bias: Param::from_tensor(Tensor::from_data(bias, device)),
            workers: Arc::new(Barrier::new(workers)),
        }
    }

    fn values(&self) -> Vec<f32> {
        let weight = self.weight.val().try_into_vec_as::<f32>().unwrap();
        let bias = self.bias.val().try_into_vec_as::<f32>().unwrap();
        [weight, bias].concat()
    }
}

#[derive(Clone, Debug)]
struct Batch {
    inputs: Tensor<2>,
    targets: Tensor<2>,
}

struct Batches;

impl Batcher<Example, Batch> for Batches {
    fn batch(&self, examples: Vec<Example>, device: &Device) -> Batch {
        let count = examples.len();
        let (inputs, targets): (Vec<_>, Vec<_>) = examples.into_iter().unzip();
        let inputs = TensorData::new(inputs.concat(), [count, INPUTS]);
        let targets = TensorData::new(targets, [count, 1]);
        Batch {
            inputs: Tensor::from_data(inputs, device),
            targets: Tensor::from_data(targets, device),
        }
    }
}

impl InferenceStep for Model {
    type Input = Batch;
    type Output = RegressionOutput;

    fn step(&self, batch: Batch) -> RegressionOutput {
        let output = batch.inputs.matmul(self.weight.val()) + self.bias.val().unsqueeze::<2>();
        let difference = output.clone() - batch.targets.clone();
        let loss = (difference.clone() * difference).mean();
        RegressionOutput::new(loss, output, batch.targets)
    }
}

impl TrainStep for Model {
    type Input = Batch;
    type Output = RegressionOutput;

    fn step(&self, batch: Batch) -> TrainOutput<RegressionOutput> {
        let output = InferenceStep::step(self, batch);
        let gradients = output.loss.backward();
        // burn sends operations to an NPU in batches. A worker that waited for the other's metrics
        // with a sum unsent would keep the other's NPU waiting, and its metrics.
        output.loss.device().flush().unwrap();
        // In burn 0.22.1 a worker that begins the next backward before another has ended its own
        // makes both wait for ever.
        self.workers.wait();
        TrainOutput::new(self, gradients, output)
    }
}

/// The parameters after training on batches of `batch` examples for each of the workers.
fn train(
    strategy: ExecutionStrategy,
    workers: usize,
    examples: Vec<Example>,
    batch: usize,
) -> Vec<f32> {
    let model = Model::new(strategy.main_device(), workers);
    let loader = |examples: Vec<Example>| -> Arc<dyn DataLoader<Batch>> {
        let loader = DataLoaderBuilder::new(Batches).batch_size(batch);
        loader.build(InMemDataset::new(examples))
    };
    let validation = loader(examples[..batch].to_vec());
    // Nothing is written there.
    let folder = std::env::temp_dir();
    let training = SupervisedTraining::new(folder, loader(examples), validation)
        .num_epochs(EPOCHS)
        .with_training_strategy(strategy.into())
        .with_metric_logger(InMemoryMetricLogger::new())
        .metric_train_numeric(LossMetric::new())
        .metric_valid_numeric(LossMetric::new())
        .with_application_logger(None);
    let learner = Learner::new(model, SgdConfig::new().init(), ConstantLr::new(0.1));
    let learned = training.launch(learner);
    assert!(learned.error.is_none(), "{:?}", learned.error);
    learned.model.values()
}

#[test]
fn two_npus_learn_what_one_learns_from_the_same_global_batches() {
    let npus = [0, 1].map(AscendDevice::simulated);
    let host = AscendHost::start(&npus).unwrap();
    let devices: Vec<_> = host
        .devices()
        .iter()
        .cloned()
        .map(Device::autodiff)
        .collect();
    let example = |number: usize| {
        let number = number as f32;
        let inputs = [(0.7 * number).sin(), (1.3 * number).cos(), 0.05 * number];
        (inputs, (0.4 * number).sin())
    };
    // burn gives each device a part of the data that is contiguous.
    let examples: Vec<Example> = (0..NPUS * STEPS * PART).map(example).collect();
    let parts: Vec<_> = examples.chunks(STEPS * PART).collect();
    let of_step = |step: usize| {
        parts
            .iter()
            .flat_map(move |part| &part[step * PART..][..PART])
    };
    let global: Vec<Example> = (0..STEPS).flat_map(of_step).copied().collect();

    let config = DistributedConfig {
        all_reduce_op: ReduceOperation::Mean,
    };
    let both = ExecutionStrategy::ddp(devices.clone(), config);
    let found = train(both, NPUS, examples, PART);
    let sums = control::collectives()["HcclAllReduce"].calls as usize;
    assert_eq!(sums, NPUS * PARAMETERS * STEPS * EPOCHS);

    let one = ExecutionStrategy::single(devices[0].clone());
    let begun = Model::new(&devices[0], 1).values();
    let expected = train(one, 1, global, NPUS * PART);
    for ((found, expected), begun) in found.iter().zip(&expected).zip(&begun) {
        let apart = (found - expected).abs() / expected.abs();
        assert!(apart <= 1e-6, "{found} and {expected}: {apart:.1e}");
        assert!((expected - begun).abs() > 1e-3, "{expected} was learned");
    }
    assert_eq!(control::collectives()["HcclAllReduce"].calls as usize, sums);
    drop(host);
    assert_eq!(control::take_violations(), []);
    assert_eq!(control::live().communicators, 0);
}
