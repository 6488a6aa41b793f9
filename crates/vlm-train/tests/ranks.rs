//! Several ranks over one global batch: equal to one rank, and equal between runs.

#![allow(clippy::unwrap_used, reason = "test code")]

mod common;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use qwen_vl::QwenVlConfig;
use vlm_data::{DataPosition, GlobalBatch, MicroBatch, VlmDataError};
use vlm_train::{
    Ending, Event, HostSums, Rank, RankGroup, Recipe, Rendezvous, RendezvousError, RunOptions,
    StepReport, TrainedParts, Trainer, VlmTrainError, run,
};

use common::{ALL, load, lora, packed, recipe, samples};

const FAMILY: &str = "qwen2_5_vl_tiny";
const SECONDS: Duration = Duration::from_secs(20);

/// What a rank does wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    None,
    /// At step 2: an error of the data, a panic, or too long a pause.
    Data,
    Panic,
    Slow,
    /// From the beginning.
    OtherData,
    OtherRecipe,
}

/// A rank's part of the batches from a step on: each `ranks`-th of four samples, in two
/// micro-batches of uneven length where there are several.
fn batches(
    config: &QwenVlConfig,
    (rank, ranks): (usize, usize),
    from: usize,
    fault: Fault,
) -> impl Iterator<Item = vlm_data::Result<GlobalBatch>> {
    (from..).map(move |step| {
        if step == 2 {
            match fault {
                Fault::Data => {
                    let reason = "it is gone".to_owned();
                    let path = PathBuf::from("data.jsonl");
                    return Err(VlmDataError::File { path, reason });
                }
                Fault::Panic => panic!("a bug"),
                Fault::Slow => std::thread::sleep(Duration::from_secs(5)),
                _ => {}
            }
        }
        let own: Vec<_> = samples(step, config)
            .into_iter()
            .skip(rank)
            .step_by(ranks)
            .collect();
        let cut = own.len().div_ceil(2).max(1);
        let micro_batches: Vec<MicroBatch> =
            own.chunks(cut).map(|part| packed(part.to_vec())).collect();
        let next = DataPosition {
            fingerprint: 7,
            seed: None,
            epoch: 0,
            samples: 4 * (step as u64 + 1),
        };
        Ok(GlobalBatch {
            micro_batches,
            trained_tokens: 0,
            tokens: 0,
            skipped: Vec::new(),
            epoch: 0,
            next,
        })
    })
}

struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let name = format!("vlm-train-ranks-{name}-{}", std::process::id());
        let folder = Self(std::env::temp_dir().join(name));
        let _none = std::fs::remove_dir_all(&folder.0);
        folder
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _gone = std::fs::remove_dir_all(&self.0);
    }
}

fn short(trained: TrainedParts, steps: usize) -> Recipe {
    Recipe {
        steps,
        warmup_steps: 1,
        ..recipe(trained)
    }
}

/// The steps of one rank, or of the only one.
fn train(
    rank: Option<&Rank>,
    recipe: &Recipe,
    folder: &Path,
    resume: bool,
    fault: Fault,
) -> Result<Vec<StepReport>, VlmTrainError> {
    let (config, model) = load(FAMILY);
    let mut recipe = recipe.clone();
    let mut identity = BTreeMap::from([("data".to_owned(), "8 samples".to_owned())]);
    if fault == Fault::OtherRecipe {
        recipe.weight_decay += 0.5;
    }
    if fault == Fault::OtherData {
        identity.insert("data".to_owned(), "9 samples".to_owned());
    }
    let mut trainer = if resume {
        Trainer::resume(model, recipe, folder, &identity)?
    } else {
        Trainer::new(model, recipe)?
    };
    let mut place = (0, 1);
    if let Some(rank) = rank {
        place = (rank.rank(), rank.ranks());
        trainer = trainer.with_ranks(rank.clone(), Arc::new(HostSums(rank.clone())));
    }
    let validation: Vec<_> = samples(1, &config)
        .into_iter()
        .map(|sample| packed(vec![sample]))
        .collect();
    let options = RunOptions {
        folder,
        identity: &identity,
        checkpoint_every: 2,
        validation: &validation,
        questions: None,
        validate_every: 2,
        record_step: None,
        stop: &AtomicBool::new(false),
    };
    let from = trainer
        .position()
        .map_or(0, |position| position.samples as usize / 4);
    let mut batches = batches(&config, place, from, fault);
    let mut reports = Vec::new();
    let ending = run(&mut trainer, &mut batches, options, &mut |event| {
        if let Event::Step(done) = event {
            reports.push(done.clone());
        }
    })?;
    assert_eq!(ending, Ending::Finished);
    Ok(reports)
}

/// The steps of several ranks of this process, of which the last has a fault.
fn train_ranks(
    ranks: usize,
    recipe: &Recipe,
    folder: &Path,
    resume: bool,
    fault: Fault,
) -> Result<Vec<Vec<StepReport>>, VlmTrainError> {
    let timeout = match fault {
        Fault::Slow => Duration::from_secs(2),
        _ => SECONDS,
    };
    let (recipe, folder) = (recipe.clone(), folder.to_owned());
    RankGroup::of_process(ranks, timeout).run(move |rank| {
        let is_last = rank.rank() + 1 == rank.ranks();
        let fault = if is_last { fault } else { Fault::None };
        let reports = train(Some(rank), &recipe, &folder, resume, fault);
        reports.map_err(|error| error.to_string())
    })
}

fn state(folder: &Path, steps: usize) -> Vec<u8> {
    let checkpoint = format!("checkpoint-{steps:08}/state.safetensors");
    std::fs::read(folder.join(checkpoint)).unwrap()
}

/// The largest relative difference of losses and norms.
fn apart(left: &[StepReport], right: &[StepReport]) -> f64 {
    assert_eq!(left.len(), right.len());
    let relative = |a: f64, b: f64| (a - b).abs() / a.abs().max(1e-30);
    let pairs = left.iter().zip(right);
    let of_pair = |(a, b): (&StepReport, &StepReport)| {
        assert_eq!((a.tokens, a.labelled), (b.tokens, b.labelled));
        relative(a.loss, b.loss).max(relative(a.gradient_norm, b.gradient_norm))
    };
    pairs.map(of_pair).fold(0.0, f64::max)
}

fn agree(name: &str, trained: TrainedParts, ranks: &[usize], steps: usize) {
    let recipe = short(trained, steps);
    let alone = Folder::new(&format!("{name}-1"));
    let expected = train(None, &recipe, &alone.0, false, Fault::None).unwrap();
    for ranks in ranks.iter().copied() {
        let [first, second] = [0, 1].map(|again| {
            let folder = Folder::new(&format!("{name}-{ranks}-{again}"));
            let all = train_ranks(ranks, &recipe, &folder.0, false, Fault::None).unwrap();
            let log = std::fs::read(folder.0.join("log.jsonl")).unwrap();
            (all, log, state(&folder.0, steps))
        });
        assert_eq!(first, second, "{ranks} ranks, twice");
        let (all, ..) = first;
        let is_equal = all.iter().all(|reports| *reports == all[0]);
        assert!(is_equal, "{ranks} ranks");
        let apart = apart(&expected, &all[0]);
        println!("{name}: {ranks} ranks: {apart:.1e}");
        assert!(apart <= 1e-6, "{name}: {ranks} ranks: {apart:.1e}");
    }
}

#[test]
fn adapters_of_several_ranks_learn_what_one_learns() {
    agree("lora", lora(), &[2, 4], 3);
}

#[test]
fn whole_models_of_several_ranks_learn_what_one_learns() {
    agree("full", TrainedParts::Full(ALL.to_vec()), &[2], 3);
}

/// Of eight ranks, four have no sample of a batch.
#[test]
#[ignore = "minutes: in the deep checks"]
fn twenty_steps_of_up_to_eight_ranks_learn_what_one_learns() {
    agree("lora-deep", lora(), &[2, 4, 8], 20);
    agree(
        "full-deep",
        TrainedParts::Full(ALL.to_vec()),
        &[2, 4, 8],
        20,
    );
}

#[test]
fn a_run_continues_on_another_number_of_ranks() {
    let recipe = short(lora(), 4);
    let (alone, moved) = (Folder::new("alone"), Folder::new("moved"));
    let expected = train(None, &recipe, &alone.0, false, Fault::None).unwrap();
    let broken = train_ranks(2, &recipe, &moved.0, false, Fault::Data);
    assert!(
        matches!(broken, Err(VlmTrainError::Rank { rank: 1, .. })),
        "{broken:?}"
    );
    let rest = train_ranks(4, &recipe, &moved.0, true, Fault::None).unwrap();
    let apart = apart(&expected[2..], &rest[0]);
    assert!(apart <= 1e-6, "{apart:.1e}");
}

#[test]
fn a_fault_of_one_rank_ends_all_with_its_number_and_cause() {
    for (fault, says) in [
        (Fault::Data, "data.jsonl"),
        (Fault::Panic, "its thread panicked: a bug"),
        (Fault::Slow, "within 2 s"),
    ] {
        let folder = Folder::new(&format!("{fault:?}"));
        let begun = Instant::now();
        let error = train_ranks(2, &short(lora(), 4), &folder.0, false, fault).unwrap_err();
        assert!(begun.elapsed() < Duration::from_secs(30), "{fault:?}");
        let text = error.to_string();
        assert!(
            text.starts_with("rank 1 stopped the run"),
            "{fault:?}: {text}"
        );
        assert!(text.contains(says), "{fault:?}: {text}");
        assert!(!state(&folder.0, 2).is_empty(), "{fault:?}");
    }
}

#[test]
fn ranks_of_other_runs_are_refused_by_what_differs() {
    for (fault, says) in [
        (
            Fault::OtherData,
            "data is \"9 samples\", and \"8 samples\" on rank 0",
        ),
        (
            Fault::OtherRecipe,
            "weight_decay is 0.51, and 0.01 on rank 0",
        ),
    ] {
        let folder = Folder::new(&format!("{fault:?}"));
        let error = train_ranks(2, &short(lora(), 4), &folder.0, false, fault).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("rank 1 is of another run"), "{text}");
        assert!(text.contains(says), "{text}");
    }
}

fn free_port() -> String {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    format!("127.0.0.1:{}", listener.local_addr().unwrap().port())
}

fn host(address: &str, hosts: usize, host: usize) -> Rendezvous {
    Rendezvous {
        address: address.to_owned(),
        hosts,
        host,
        local: host + 1,
        token: b"a token of some length".to_vec(),
        timeout: Duration::from_secs(3),
    }
}

/// What each host's ranks return.
fn meet<T: Send + 'static>(
    hosts: Vec<Rendezvous>,
    work: impl Fn(&Rank) -> Result<T, String> + Send + Sync + Clone + 'static,
) -> Vec<Result<Vec<T>, String>> {
    let threads = hosts.into_iter().map(|host| {
        let work = work.clone();
        std::thread::spawn(move || {
            let group = host.meet().map_err(|error| error.to_string())?;
            group.run(work).map_err(|error| error.to_string())
        })
    });
    let threads: Vec<_> = threads.collect();
    threads
        .into_iter()
        .map(|thread| thread.join().unwrap())
        .collect()
}

#[test]
fn ranks_of_three_hosts_receive_what_all_gave() {
    let address = free_port();
    let hosts = (0..3).map(|h| host(&address, 3, h)).collect();
    let found = meet(hosts, |rank| {
        let mut all = Vec::new();
        for round in 0..3 {
            let own = vec![rank.rank() as u8; round];
            all.push(rank.exchange(own).map_err(|e| e.to_string())?.to_vec());
        }
        Ok((rank.rank(), rank.ranks(), all))
    });
    let mut numbers = Vec::new();
    for (number, ranks, all) in found.into_iter().flat_map(Result::unwrap) {
        assert_eq!(ranks, 6);
        for (round, parts) in all.into_iter().enumerate() {
            let expected: Vec<_> = (0..6).map(|rank| vec![rank; round]).collect();
            assert_eq!(parts, expected);
        }
        numbers.push(number);
    }
    assert_eq!(numbers, [0, 1, 2, 3, 4, 5]);
}

#[test]
fn a_host_that_fails_is_named_on_all_others() {
    let address = free_port();
    let hosts = (0..2).map(|h| host(&address, 2, h)).collect();
    let found = meet(hosts, |rank| {
        if rank.rank() == 2 {
            return Err("out of memory".to_owned());
        }
        let late = rank.exchange(Vec::new());
        late.map(drop).map_err(|error| error.to_string())
    });
    for ended in found {
        let text = ended.unwrap_err();
        assert!(
            text.contains("rank 2 stopped the run: out of memory"),
            "{text}"
        );
    }
}

#[test]
fn strangers_and_hosts_of_another_run_are_refused_and_those_missing_are_named() {
    let address = free_port();
    let mut stranger = host(&address, 2, 1);
    stranger.token = b"another token".to_vec();
    let other = host(&address, 3, 1);
    let waits = {
        let first = host(&address, 2, 0);
        std::thread::spawn(move || first.meet().map(drop))
    };
    let refused = stranger.meet().unwrap_err();
    assert!(
        matches!(refused, RendezvousError::Token { .. }),
        "{refused}"
    );
    // Neither a token nor a greeting.
    let mut noise = std::net::TcpStream::connect(&address).unwrap();
    std::io::Write::write_all(&mut noise, &[0xff; 64]).unwrap();
    let refused = other.meet().unwrap_err().to_string();
    assert!(refused.contains("one of 3 hosts, host 0 of 2"), "{refused}");
    let missing = waits.join().unwrap().unwrap_err().to_string();
    assert!(missing.contains("hosts 1 did not come"), "{missing}");
    let nobody = host(&free_port(), 2, 1).meet().unwrap_err();
    assert!(
        matches!(nobody, RendezvousError::Unreachable { .. }),
        "{nobody}"
    );
}
