//! Tokens divided among ranks: equal to one device, whatever the division and the batch.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use burn::module::ParamId;
use burn::tensor::{Device, Tensor};
use vlm_data::{MicroBatch, TrainingSample};
use vlm_models::{
    Backward, LoraConfig, ModelPart, TokenShare, Visit, Vlm, VlmConfig, VlmError, Walk,
};
use vlm_train::{
    Collective, HostSums, LossRule, RankGroup, Recipe, Sharding, TrainedParts, VlmTrainError,
    inputs,
};

use crate::common::{FAMILIES, Folder, Numbers, WITH_EXPERTS, load, lora, packed, padded};
use crate::expert_parallel::{Divide, agree_divided, continues_in_another_division};
use crate::ranks::{Job, SECONDS, short, train_ranks, whole};
use crate::reference::apart_in_torch;

type CutFn = fn(Vec<TrainingSample>) -> MicroBatch;

const PACKED: CutFn = packed;
const PADDED: CutFn = padded;

const BY_TOKENS: Divide = |job, size| job.context = size;

fn agree(job: Job, divisions: &[[usize; 2]], bounds: [f64; 3]) {
    agree_divided(job, (divisions, BY_TOKENS), bounds);
}

fn job(family: &'static str, recipe: Recipe) -> Job {
    Job {
        family,
        ..Job::new(&recipe, &Folder::new("none"))
    }
}

/// Adapters that drop some of their inputs.
pub(crate) fn dropping() -> TrainedParts {
    match lora() {
        TrainedParts::Lora(config) => TrainedParts::Lora(LoraConfig {
            dropout: 0.2,
            ..config
        }),
        full @ TrainedParts::Full(_) => full,
    }
}

/// With as many heads as ranks, more, fewer, and a number that does not divide.
#[test]
fn divided_tokens_learn_what_one_device_learns() {
    for (family, trained, cut, division) in [
        (FAMILIES[0], whole(), PACKED, [4, 4]),
        (FAMILIES[1], dropping(), PADDED, [2, 2]),
        (FAMILIES[2], whole(), PADDED, [3, 3]),
        (FAMILIES[3], lora(), PACKED, [4, 4]),
        (FAMILIES[4], whole(), PACKED, [3, 3]),
        (FAMILIES[4], lora(), PADDED, [4, 2]),
        (WITH_EXPERTS[0], whole(), PADDED, [2, 2]),
    ] {
        let has_experts = family == WITH_EXPERTS[0];
        let recipe = Recipe {
            router_loss: has_experts.then_some(0.1),
            ..short(trained, 3)
        };
        let job = Job {
            cut,
            ..job(family, recipe)
        };
        // Torch's own runs of Qwen3.5 drift apart alike.
        let of_norms = if family == FAMILIES[4] { 1e-5 } else { 4e-6 };
        agree(job, &[division], [1e-6, of_norms, 5e-6]);
    }
}

/// Groups without a micro-batch, ranks without a label or a picture, and shards of weights; the
/// tower alone, whose gradients come from other ranks; a mean over micro-batches.
#[test]
fn ranks_that_divide_tokens_divide_weights_too_and_wait_for_other_groups() {
    let tower = TrainedParts::Full(vec![ModelPart::Tower, ModelPart::Merger].into());
    for (family, trained, batch, state) in [
        (FAMILIES[2], whole(), 1, Sharding::All),
        (FAMILIES[1], tower, 2, Sharding::Gradients),
        (FAMILIES[4], lora(), 1, Sharding::All),
        (FAMILIES[0], whole(), 3, Sharding::None),
    ] {
        let recipe = Recipe {
            loss_rule: match batch {
                3 => LossRule::MicroBatches,
                _ => LossRule::Tokens,
            },
            ..short(trained, 3)
        };
        let job = Job {
            batch,
            state,
            ..job(family, recipe)
        };
        let divisions = match batch {
            1 => [[4, 2]],
            // Of a mean over micro-batches, other ranks would cut the batch into others.
            _ => [[4, 4]],
        };
        // Torch's own runs of Qwen3.5 drift apart alike.
        let of_norms = if family == FAMILIES[4] { 1e-5 } else { 4e-6 };
        agree(job, &divisions, [1e-6, of_norms, 5e-6]);
    }
}

#[test]
fn a_run_continues_with_its_tokens_in_another_division() {
    continues_in_another_division(job(FAMILIES[2], short(lora(), 4)), BY_TOKENS);
}

/// Of up to eight ranks for a micro-batch, and of two micro-batches at a time.
fn twenty_steps(families: &[&'static str]) {
    let cases = families.iter().flat_map(|family| {
        let kinds = [("lora", lora()), ("full", whole())];
        kinds.map(|(name, trained)| (*family, name, trained))
    });
    for (family, name, trained) in cases {
        for cut in [PACKED, PADDED] {
            let has_experts = WITH_EXPERTS.contains(&family);
            let recipe = Recipe {
                router_loss: has_experts.then_some(0.1),
                ..short(trained.clone(), 20)
            };
            let job = Job {
                cut,
                ..job(family, recipe)
            };
            let [of_losses, of_norms] = apart_in_torch(family, name, 20);
            // A state over several ranks is rounded more often than in one, and with experts this grows
            // fastest: adapters of Qwen3.5 with experts were 1.2e-6 and 9.5e-5 apart.
            let [least, times] = match family == WITH_EXPERTS[1] {
                true => [2e-6, 8.0],
                false => [1e-6, 4.0],
            };
            let bounds = [
                f64::max(least, times * of_losses),
                f64::max(4e-6, times * of_norms),
            ];
            let divisions = [[2, 2], [4, 2], [4, 4], [8, 4], [8, 8], [16, 8]];
            agree(job, &divisions, [bounds[0], bounds[1], 1e-4]);
        }
    }
}

#[test]
#[ignore = "minutes: in the deep checks"]
fn twenty_steps_of_divided_tokens_learn_what_one_device_learns() {
    twenty_steps(&FAMILIES[..4]);
}

#[test]
#[ignore = "minutes: in the deep checks"]
fn twenty_steps_of_divided_states_learn_what_one_device_learns() {
    twenty_steps(&[FAMILIES[4], WITH_EXPERTS[1]]);
}

#[test]
#[ignore = "minutes: in the deep checks"]
fn twenty_steps_of_divided_tokens_of_experts_learn_what_one_device_learns() {
    twenty_steps(&[WITH_EXPERTS[0], WITH_EXPERTS[2]]);
}

/// A sample of text, pictures and videos, some larger than a rank's tokens.
fn drawn(draw: &mut Numbers, line: u64, (family, config): (&str, &VlmConfig)) -> TrainingSample {
    let vision = config.vision.as_ref().unwrap();
    let (start, end) = (292, 293);
    let mut sample = TrainingSample {
        line,
        ..TrainingSample::default()
    };
    let mut below = |bound: i64| draw.text(1)[0] % bound;
    let mut input_ids: Vec<i64> = (0..=below(6)).map(|_| 1 + below(250)).collect();
    for _ in 0..below(4) {
        let grid = [1, 2, 2].map(|side| (side * (1 + below(4))) as usize);
        let is_video = below(3) == 0 && !family.starts_with("glm");
        // Qwen3's videos have marks around each frame.
        let frames_apart = family.starts_with("qwen3");
        let frames = if is_video { grid[0] } else { 1 };
        let grid = [frames, grid[1], grid[2]];
        let patches = grid.iter().product::<usize>();
        let token = if is_video {
            vision.video_token
        } else {
            vision.image_token
        };
        let spans = if frames_apart { frames } else { 1 };
        for _ in 0..spans {
            input_ids.push(start);
            input_ids.extend(vec![token; patches / 4 / spans]);
            input_ids.push(end);
        }
        let elements = patches * vision.patch_elems();
        let pixels = (0..elements).map(|_| (below(256) as f32 - 128.0) / 64.0);
        if is_video {
            sample.video_patches.extend(pixels);
            sample.video_grids.push(grid);
            sample.seconds_per_grid.push(1.0);
        } else {
            sample.image_patches.extend(pixels);
            sample.image_grids.push(grid);
        }
        input_ids.extend((0..below(5)).map(|_| 7));
    }
    let question = input_ids.len();
    input_ids.extend((0..=below(9)).map(|_| 1 + below(250)));
    sample.text.labels = input_ids.clone();
    sample.text.labels[..question].fill(-100);
    sample.text.input_ids = input_ids;
    sample
}

/// The walk of a rank, by the collectives of its group.
struct Ranks<'a> {
    sums: &'a HostSums,
    gradients: HashMap<ParamId, Tensor<1>>,
    /// The elements that all ranks give to others, in the model's type and wide.
    given: &'a [AtomicUsize; 2],
}

impl Walk for Ranks<'_> {
    fn add(&mut self, id: ParamId, gradient: Tensor<1>) {
        let sum = match self.gradients.remove(&id) {
            Some(sum) => sum + gradient,
            None => gradient,
        };
        self.gradients.insert(id, sum);
    }

    fn exchange(
        &mut self,
        visit: Visit,
        given: Tensor<1>,
        counts: [&[usize]; 2],
    ) -> vlm_models::Result<Tensor<1>> {
        let Visit::Exchange { is_wide, .. } = visit else {
            return Err(VlmError::Walk(format!("{visit:?}")));
        };
        let to_others = counts[0].iter().sum::<usize>() - counts[0][self.sums.0.rank()];
        self.given[usize::from(is_wide)].fetch_add(to_others, Ordering::Relaxed);
        self.sums.all_to_all(given, counts).map_err(VlmError::Walk)
    }
}

/// The mean loss, the gradients by parameter, and the elements exchanged, of some ranks.
fn passed(
    ranks: usize,
    (family, trained): (&'static str, &TrainedParts),
    micro: &MicroBatch,
) -> (f64, Vec<Vec<f32>>, [usize; 2]) {
    let load = move || load(family).1;
    passed_by((load, trained), ranks, micro)
}

fn passed_by(
    (load, trained): (impl Fn() -> Vlm + Send + Sync + 'static, &TrainedParts),
    ranks: usize,
    micro: &MicroBatch,
) -> (f64, Vec<Vec<f32>>, [usize; 2]) {
    let given: Arc<[AtomicUsize; 2]> = Arc::default();
    let (counting, micro, trained) = (given.clone(), micro.clone(), trained.clone());
    let passed = RankGroup::of_process(ranks, SECONDS).run(move |rank| {
        let model = load();
        let model = match &trained {
            TrainedParts::Lora(config) => model.with_lora(config, 7).unwrap(),
            TrainedParts::Full(weights) => model.train_weights(weights).unwrap(),
        };
        let of_rank = gradients_of(
            &model,
            rank.ranks(),
            &micro,
            (&HostSums(rank.clone()), &counting),
        );
        of_rank.map_err(|error| error.to_string())
    });
    let passed = passed.unwrap();
    let loss = passed.iter().map(|(loss, _)| loss).sum();
    let mut sums = passed[0].1.clone();
    for (_, gradients) in &passed[1..] {
        for (sum, gradient) in sums.iter_mut().zip(gradients) {
            let longest = sum.len().max(gradient.len());
            sum.resize(longest, 0.0);
            sum.iter_mut().zip(gradient).for_each(|(sum, x)| *sum += x);
        }
    }
    let given = [0, 1].map(|which| given[which].load(Ordering::Relaxed));
    (loss, sums, given)
}

/// A rank's part of the loss, and its gradients in the order of the parameters.
fn gradients_of(
    model: &Vlm,
    count: usize,
    micro: &MicroBatch,
    (sums, given): (&HostSums, &[AtomicUsize; 2]),
) -> vlm_models::Result<(f64, Vec<Vec<f32>>)> {
    let inputs = inputs(micro, &Device::flex().autodiff());
    let share = TokenShare {
        index: sums.0.rank(),
        count,
    };
    let [all, own] = model.labelled_part(&inputs.prompt, &micro.labels, share)?;
    let batch = match count {
        1 => model.batch(&inputs)?,
        _ => model.batch_part(&inputs, share)?,
    };
    let mut walk = Ranks {
        sums,
        gradients: HashMap::new(),
        given,
    };
    let weight = own as f64 / all as f64;
    let how = Backward {
        weight,
        ..Backward::default()
    };
    let loss = model.backward(&batch, &micro.labels, how, &mut walk)?;
    let of = |id| {
        let gradient = walk.gradients.get(&id);
        gradient.map_or(Vec::new(), |x| x.to_data().iter::<f32>().collect())
    };
    let gradients = model.parameters().iter().map(|p| of(p.id)).collect();
    Ok((weight * loss, gradients))
}

/// The largest difference of gradients of parameters, in units of the norm of all.
fn largest_apart(expected: &[Vec<f32>], found: &[Vec<f32>]) -> f64 {
    let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
    let all = norm(&mut expected.iter().flatten().map(|x| f64::from(*x)));
    assert_eq!(expected.len(), found.len());
    let pairs = expected.iter().zip(found).map(|(expected, found)| {
        // None is zeros.
        let value = |of: &[f32], at: usize| f64::from(of.get(at).copied().unwrap_or(0.0));
        let places = 0..expected.len().max(found.len());
        norm(&mut places.map(|at| value(expected, at) - value(found, at))) / all
    });
    // Unlike max, which ignores NaN.
    pairs.fold(0.0, |most, apart| match apart <= most {
        true => most,
        false => apart,
    })
}

/// Thirty batches with pictures and videos across the borders of ranks.
#[test]
fn gradients_of_random_batches_do_not_depend_on_the_division() {
    let mut draw = Numbers(77);
    let mut most = [0.0_f64; 2];
    for batch in 0..30 {
        let family = FAMILIES[batch % FAMILIES.len()];
        let (config, _) = load(family);
        let samples =
            (0..1 + batch % 3).map(|line| drawn(&mut draw, line as u64 + 1, (family, &config)));
        let micro = [PACKED, PADDED][batch % 2](samples.collect());
        let case = (family, &whole());
        let (loss, gradients, _) = passed(1, case, &micro);
        let ranks = [2, 3, 4][batch % 3];
        let (found, of_ranks, _) = passed(ranks, case, &micro);
        let apart = [
            ((found - loss) / loss).abs(),
            largest_apart(&gradients, &of_ranks),
        ];
        most = [0, 1].map(|at| most[at].max(apart[at]));
        let bounds = if family == "qwen3_5_tiny" {
            [1e-6, 1e-5]
        } else {
            [1e-6, 1e-6]
        };
        assert!(
            apart[0] <= bounds[0] && apart[1] <= bounds[1],
            "batch {batch}, {family}, {ranks} ranks: {apart:?}"
        );
    }
    println!("losses and gradients at most {most:?} apart");
}

#[test]
fn divisions_that_a_run_cannot_have_are_refused() {
    let refused = |ranks: usize, size: usize, change: fn(&mut Job)| {
        let mut job = job(FAMILIES[2], short(whole(), 2));
        job.context = size;
        change(&mut job);
        let error = train_ranks(ranks, &job).unwrap_err();
        assert!(matches!(error, VlmTrainError::Rank { .. }), "{error}");
        error.to_string()
    };
    for (error, says) in [
        (refused(3, 2, |_| {}), "does not divide the 3 devices"),
        (refused(2, 0, |_| {}), "does not divide the 2 devices"),
        (
            refused(2, 2, |job| job.recipe.recompute = false),
            "leave out --no-recompute",
        ),
        (
            refused(2, 2, |job| {
                job.family = WITH_EXPERTS[0];
                job.expert_parallel = 2;
            }),
            "does not go with --expert-parallel",
        ),
    ] {
        assert!(error.contains(says), "{error}");
    }
}

/// Attention's elements that ranks give to others in a pass, token by token: each query of a head to
/// the rank that computes its output, and back; the keys and values of a head to each rank with
/// queries that read it. `parts`: of the queries of a head.
fn of_attention(tokens: usize, ranks: usize, parts: usize, config: &VlmConfig) -> usize {
    let (heads, kv_heads) = (config.text.heads, config.text.kv_heads);
    let (groups, width) = (ranks / parts, config.text.rotation.head_dim());
    let chunk = tokens / (2 * parts);
    let mut sum = 0;
    for token in 0..tokens {
        let owner = token * ranks / tokens;
        let part = (token / chunk).min(2 * parts - 1 - token / chunk);
        for rank in (0..ranks).filter(|rank| *rank != owner) {
            let group = rank / parts;
            if rank % parts == part {
                sum += 2 * heads / groups * width;
            }
            let first = group * heads / groups;
            let last = (group + 1) * heads / groups - 1;
            let key = |head: usize| head * kv_heads / heads;
            sum += 2 * (key(last) - key(first) + 1) * width;
        }
    }
    sum
}

/// A model whose layers are all with a state.
fn of_states() -> VlmConfig {
    let (mut config, _) = load(FAMILIES[4]);
    let delta = config.text.delta.as_mut().unwrap();
    delta.full_attention_layers.clear();
    config
}

/// Expects the elements that ranks give to others: three times in a layer, forward, once more as it
/// is computed again, and with the gradients. What layers with a state exchange does not depend on
/// the number of tokens: the last inputs of a convolution, and to each later rank a state and what
/// the tokens do to one.
fn exchange_as_in_theory(config: fn() -> VlmConfig, [ranks, parts, tokens]: [usize; 3]) {
    let load = move || config().init(&Device::flex().autodiff()).unwrap();
    let text = &config().text;
    let mut sample = TrainingSample::default();
    sample.text.input_ids = (0..tokens).map(|token| 1 + token as i64 % 250).collect();
    sample.text.labels = sample.text.input_ids.clone();
    let micro = packed(vec![sample]);
    let (_, _, [narrow, wide]) = passed_by((load, &whole()), ranks, &micro);
    let (with_state, [of_convolution, of_state]) = match &text.delta {
        Some(delta) => {
            let layers = text.layers - delta.full_attention_layers.len();
            let values = delta.heads * delta.value_dim;
            let channels = 2 * delta.key_heads * delta.key_dim + values;
            let halo = (ranks - 1) * (delta.taps - 1) * channels;
            let state = delta.heads * delta.key_dim * (delta.value_dim + delta.key_dim);
            (layers, [halo, ranks * (ranks - 1) / 2 * state])
        }
        None => (0, [0, 0]),
    };
    let attending = text.layers - with_state;
    let of_attention = match attending {
        0 => 0,
        layers => layers * of_attention(tokens, ranks, parts, &config()),
    };
    let theory = [
        3 * (of_attention + with_state * of_convolution),
        3 * with_state * of_state,
    ];
    println!("{ranks} ranks, {tokens} tokens: {narrow} and {wide} elements");
    assert_eq!([narrow, wide], theory, "{ranks} ranks, {tokens} tokens");
}

#[test]
fn each_layer_exchanges_what_the_theory_says() {
    let heads = || load(FAMILIES[2]).0;
    let queries = || load(FAMILIES[3]).0;
    let states = || load(FAMILIES[4]).0;
    let cases: [(fn() -> VlmConfig, _); 8] = [
        (heads, [2, 1, 64]),
        (heads, [4, 1, 64]),
        (queries, [4, 2, 64]),
        (queries, [8, 4, 64]),
        (states, [2, 1, 64]),
        (states, [4, 1, 64]),
        (states, [4, 1, 256]),
        (of_states, [8, 1, 4096]),
    ];
    for (config, sizes) in cases {
        exchange_as_in_theory(config, sizes);
    }
}

#[test]
#[ignore = "minutes: in the deep checks"]
fn a_state_of_131_072_tokens_is_exchanged_as_one_of_4_096() {
    for tokens in [4096, 32_768, 131_072] {
        exchange_as_in_theory(of_states, [8, 1, tokens]);
    }
    // Attention's elements are in proportion to the tokens.
    exchange_as_in_theory(|| load(FAMILIES[3]).0, [8, 4, 4096]);
}
