//! Faults between ranks that divide tokens, seeded into their exchanges and records, and named by
//! the comparison with one device.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use burn::tensor::Tensor;
use vlm_data::MicroBatch;
use vlm_train::compare::{Comparison, Fault, compare};
use vlm_train::{
    Begun, Collective, HostSums, Rank, RankGroup, Recipe, Sharding, StepRecord, TrainedParts,
    Trainer,
};

use crate::common::{FAMILIES, Folder, WITH_EXPERTS, load, lora, packed, padded, recipe, sample};
use crate::compare_ranks::{shown, whole};
use crate::context::dropping;
use crate::ranks::SECONDS;

/// The rank whose fault it is.
const WRONG: usize = 1;

/// What a rank receives, from its elements and those of another.
type Change = fn(Tensor<1>) -> Tensor<1>;

/// A fault of the second step.
#[derive(Clone, Copy)]
enum Seed {
    None,
    /// In this exchange of the step, this rank receives something else.
    Exchange(usize, usize, Change),
    /// As on all ranks.
    ExchangeOnAll(usize, Change),
    /// Rank 1 has the samples in another order, or one of another line.
    Order,
    Line,
    /// The records are changed.
    Record(fn(&mut StepRecord)),
}

/// Collectives with a fault.
#[derive(Debug)]
struct Faulty {
    inner: HostSums,
    change: Option<(usize, Change)>,
    /// The exchanges of the step so far; none are counted before the second.
    exchanges: Arc<AtomicUsize>,
}

impl Collective for Faulty {
    fn all_reduce(&self, x: Tensor<1>) -> Result<Tensor<1>, String> {
        self.inner.all_reduce(x)
    }

    fn begin_scatter(&self, x: Tensor<1>) -> Result<Begun, String> {
        self.inner.begin_scatter(x)
    }

    fn begin_gather(&self, x: Tensor<1>) -> Result<Begun, String> {
        self.inner.begin_gather(x)
    }

    fn all_to_all(&self, x: Tensor<1>, counts: [&[usize]; 2]) -> Result<Tensor<1>, String> {
        let at = self.exchanges.fetch_add(1, Ordering::Relaxed);
        let received = self.inner.all_to_all(x, counts)?;
        Ok(match self.change {
            Some((exchange, change)) if exchange == at => change(received),
            _ => received,
        })
    }
}

/// Family, trained parts, ranks, and how many of them divide tokens.
#[derive(Clone)]
struct Case {
    family: &'static str,
    trained: TrainedParts,
    cut: fn(Vec<vlm_data::TrainingSample>) -> MicroBatch,
    ranks: usize,
    context: usize,
    sharding: Sharding,
    seed: Seed,
}

/// The micro-batches of a step: one for each group of ranks.
fn batches(case: &Case, groups: usize) -> Vec<MicroBatch> {
    let (config, _) = load(case.family);
    let all = (0..6).map(|index| sample(index, &config));
    let all: Vec<_> = all.collect();
    let of_group = |group| all.iter().skip(group).step_by(groups).cloned().collect();
    (0..groups)
        .map(|group| (case.cut)(of_group(group)))
        .collect()
}

/// Records the second step of one device, or of a rank.
fn record(folder: &Folder, case: &Case, rank: Option<&Rank>) {
    let (_, model) = load(case.family);
    let recipe = Recipe {
        router_loss: WITH_EXPERTS.contains(&case.family).then_some(0.1),
        ..recipe(case.trained.clone())
    };
    let groups = case.ranks / case.context;
    let batches = batches(case, groups);
    let mut trainer = Trainer::new(model, recipe).unwrap();
    let Some(rank) = rank else {
        trainer.step(&batches).unwrap();
        let path = folder.0.join("whole.safetensors");
        trainer.record_step(&batches, &path).unwrap();
        return;
    };
    let place = rank.rank();
    let change = match case.seed {
        Seed::Exchange(exchange, wrong, change) if place == wrong => Some((exchange, change)),
        Seed::ExchangeOnAll(exchange, change) => Some((exchange, change)),
        _ => None,
    };
    let exchanges = Arc::new(AtomicUsize::new(usize::MAX / 2));
    let collective = Arc::new(Faulty {
        inner: HostSums(rank.clone()),
        change,
        exchanges: exchanges.clone(),
    });
    let trainer = trainer.with_ranks(rank.clone(), collective, case.sharding);
    let mut trainer = trainer.unwrap().with_context(case.context).unwrap();
    let mut own = batches[place / case.context].clone();
    trainer.step(std::slice::from_ref(&own)).unwrap();
    exchanges.store(0, Ordering::Relaxed);
    match case.seed {
        Seed::Order if place == WRONG => {
            let (config, _) = load(case.family);
            own = (case.cut)((0..6).rev().map(|index| sample(index, &config)).collect());
        }
        Seed::Line if place == WRONG => own.lines[0] = 77,
        _ => {}
    }
    let path = folder.0.join("ranks.safetensors");
    trainer.record_step(&[own], &path).unwrap();
}

/// The records of one device, and of all ranks.
fn records(case: &Case) -> [Vec<StepRecord>; 2] {
    let folder = Folder::new("compare-parts");
    record(&folder, case, None);
    std::thread::scope(|scope| {
        for rank in RankGroup::of_process(case.ranks, SECONDS).ranks() {
            let folder = &folder;
            scope.spawn(move || record(folder, case, Some(&rank)));
        }
    });
    let read = |name: &str| StepRecord::read_ranks(&folder.0.join(name)).unwrap();
    let mut ranks = read("ranks.safetensors");
    if let Seed::Record(change) = case.seed {
        ranks.iter_mut().for_each(change);
    }
    [read("whole.safetensors"), ranks]
}

/// Ranks that divide tokens take the step of one device, item by item.
#[test]
fn ranks_that_divide_tokens_take_the_step_of_one_device() {
    for (family, trained, cut, [ranks, context], sharding) in [
        (
            FAMILIES[2],
            dropping(),
            packed as fn(_) -> _,
            [4, 2],
            Sharding::All,
        ),
        (FAMILIES[0], whole(), padded, [3, 3], Sharding::None),
        (FAMILIES[3], whole(), packed, [4, 4], Sharding::None),
        (FAMILIES[4], whole(), packed, [3, 3], Sharding::Gradients),
        (FAMILIES[4], lora(), padded, [3, 3], Sharding::None),
        (WITH_EXPERTS[0], whole(), padded, [2, 2], Sharding::None),
    ] {
        let case = Case {
            family,
            trained,
            cut,
            ranks,
            context,
            sharding,
            seed: Seed::None,
        };
        let [whole, ranks] = records(&case);
        for found in [compare(&whole, &ranks), compare(&ranks, &whole)] {
            let what = format!("{family}, {context} of {}: {}", case.ranks, shown(&found));
            assert!(
                found.suspicion.is_none() && found.first().is_none(),
                "{what}"
            );
            let [only, more] = &found.only;
            let missing: Vec<_> = only.iter().chain(more).collect();
            let is_of_tower = |name: &&&String| name.contains("vision.");
            assert!(missing.iter().all(|name| is_of_tower(&name)), "{missing:?}");
        }
    }
}

fn zeros(x: Tensor<1>) -> Tensor<1> {
    x.zeros_like()
}

fn reversed(x: Tensor<1>) -> Tensor<1> {
    x.flip([0])
}

/// Without the first half of what ranks gave.
fn without_first(x: Tensor<1>) -> Tensor<1> {
    let half = x.dims()[0] / 2;
    x.clone()
        .slice_assign(0..half, x.slice(0..half).zeros_like())
}

/// Changes the items of a name that ends so, at the tokens of rank 1.
fn change_items(record: &mut StepRecord, end: &str, change: impl Fn(&mut Vec<f32>, usize)) {
    let place = record.header.rank.as_ref().map(|rank| rank.rank);
    if place != Some(WRONG) {
        return;
    }
    let names: Vec<String> = record.items.keys().cloned().collect();
    for name in names.iter().filter(|name| name.ends_with(end)) {
        let line = name.split('/').nth(1).unwrap();
        let owners = record.items[&format!("part/{line}/tokens")].clone();
        let values = record.items.get_mut(name).unwrap();
        let own = (0..owners.len()).filter(|token| owners[*token] == WRONG as f32);
        own.for_each(|token| change(values, token));
    }
}

fn one_axis(record: &mut StepRecord) {
    change_items(record, "/position_ids", |ids, token| {
        let tokens = ids.len() / 3;
        ids[tokens + token] = ids[token];
        ids[2 * tokens + token] = ids[token];
    });
}

fn no_last_target(record: &mut StepRecord) {
    change_items(record, "/targets", |targets, token| {
        if token + 1 < targets.len() && targets[token] >= 0.0 {
            targets[token] = -100.0;
        }
    });
}

fn counted_on_each(record: &mut StepRecord) {
    let labelled = record.header.labelled.unwrap();
    record.header.labelled = Some(3 * labelled);
}

/// A fault, the family, what is named, and words of place and evidence.
type Row = (Seed, usize, Fault, &'static str, &'static str);

/// The exchanges of a step: two for each layer forward; then, from the last layer, two as it is
/// computed again, and two of gradients.
#[rustfmt::skip]
fn rows() -> [Row; 15] {
    [
        (Seed::Exchange(0, 1, zeros), 4, Fault::Halo, "rank 1, layer 0", "the rank before"),
        (Seed::Exchange(4, 2, reversed), 4, Fault::Halo, "rank 2, layer 2", "the rank before"),
        (Seed::Exchange(1, 1, zeros), 4, Fault::State, "rank 1, layer 0", "an earlier rank"),
        (Seed::Exchange(1, 2, without_first), 4, Fault::State, "rank 2, layer 0", "an earlier rank"),
        (Seed::Exchange(5, 2, zeros), 4, Fault::State, "rank 2, layer 2", "an earlier rank"),
        (Seed::ExchangeOnAll(8, zeros), 4, Fault::Exchange, "layer 2", "the product after"),
        (Seed::Exchange(2, 1, reversed), 4, Fault::Exchange, "layer 1", "equal on all ranks"),
        (Seed::Exchange(0, 1, reversed), 2, Fault::Exchange, "layer 0", "equal on all ranks"),
        (Seed::Exchange(1, 1, reversed), 2, Fault::Exchange, "rank 1, layer 0", "equal on all ranks"),
        (Seed::ExchangeOnAll(7, zeros), 2, Fault::Exchange, "layer 1", "the product after"),
        (Seed::Order, 2, Fault::Division, "ranks 0 and 1", "other tokens"),
        (Seed::Line, 2, Fault::Division, "ranks 0 and 1", "other samples"),
        (Seed::Record(one_axis), 2, Fault::PositionIds, "rank 1", "expected ["),
        (Seed::Record(no_last_target), 2, Fault::Border, "rank 1", "what is predicted"),
        (Seed::Record(counted_on_each), 2, Fault::Count, "rank 0", "each counts all"),
    ]
}

#[test]
fn seeded_faults_of_divided_tokens_are_named() {
    let mut wrong: Vec<String> = Vec::new();
    for (row, (seed, family, fault, place, because)) in rows().into_iter().enumerate() {
        let case = Case {
            family: FAMILIES[family],
            trained: whole(),
            // Of states, each sequence is on all ranks.
            cut: if family == 4 { padded } else { packed },
            ranks: 3,
            context: 3,
            sharding: Sharding::None,
            seed,
        };
        let [whole, ranks] = records(&case);
        let found: Comparison = compare(&whole, &ranks);
        let is_named = found.suspicion.as_ref().is_some_and(|found| {
            found.fault == fault && found.place.contains(place) && found.because.contains(because)
        });
        if !is_named {
            wrong.push(format!("{row}, {fault:?}: {}", shown(&found)));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}
