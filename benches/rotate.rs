//! Every case of the table beside its baseline, by divan: `cargo bench -p rope-benches --bench
//! rotate`.
//!
//! `mrope bench speed` takes the same cases in turns with their baselines and gives ratios; this
//! target is for looking at one kernel while it is worked on (`-- FILTER`). Under `cargo test` each
//! case runs once, on small tensors.

use divan::counter::BytesCount;
use rope_bench::cases::{Selection, TimedCase, cases};
use rope_bench::rotation::{BASELINE, ROTATION, timed};

fn main() {
    divan::main();
}

/// A case as an argument: shown by its name.
struct Named(TimedCase);

impl std::fmt::Display for Named {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0.name())
    }
}

fn table() -> Vec<Named> {
    let measures = std::env::args().any(|argument| argument == "--bench");
    let selection = if measures {
        Selection::Default
    } else {
        Selection::Quick
    };
    cases(selection).into_iter().map(Named).collect()
}

fn run(bencher: divan::Bencher, case: &TimedCase, contestant: usize) {
    let mut timed = timed(case).expect("the table's cases are valid");
    timed.check(4).unwrap_or_else(|error| panic!("{error}"));
    timed.prepare(contestant);
    let bytes = BytesCount::new(case.moved_bytes());
    bencher
        .counter(bytes)
        .bench_local(|| timed.run(contestant, 1));
}

#[divan::bench(args = table())]
fn rotation(bencher: divan::Bencher, Named(case): &Named) {
    run(bencher, case, ROTATION);
}

#[divan::bench(args = table())]
fn baseline(bencher: divan::Bencher, Named(case): &Named) {
    run(bencher, case, BASELINE);
}
