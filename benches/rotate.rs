//! Every case of the table beside its baseline, by divan: `cargo bench -p rope-benches --bench
//! rotate`.
//!
//! `mrope bench speed` takes the same cases in turns with their baselines and gives ratios; this
//! target is for looking at one kernel while it is worked on (`-- FILTER`). Under `cargo test` each
//! case runs once, on small tensors.

use divan::counter::BytesCount;
use rope_bench::cases::{Selection, TimedCase, cases};
use rope_bench::rotation::{BASELINE, ROTATION, timed};
use rope_core::{AxisLayout, CosSinTable, Positions, RotarySpec, TokenAngles};

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

fn measures() -> bool {
    std::env::args().any(|argument| argument == "--bench")
}

fn table() -> Vec<Named> {
    let selection = if measures() {
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

/// cos and sin of a long context's tokens from a table that has their positions, on 3 axes: what a
/// step does before its layers. Beside it, a loop that writes as many bytes on one thread.
#[divan::bench_group]
mod angles {
    use super::*;

    fn tokens() -> usize {
        if measures() { 131_072 } else { 96 }
    }

    #[divan::bench]
    fn gathered(bencher: divan::Bencher) {
        let spec = RotarySpec::builder(128).axes(AxisLayout::Striped(vec![24, 20, 20]));
        let spec = spec.build().expect("the sections divide the pairs");
        let positions = Positions::text(3, 0, tokens()).expect("in range");
        let mut table = CosSinTable::<f32>::new(&spec, None).expect("theta is finite");
        table.grow_to(positions.highest()).expect("within budget");
        bencher.bench_local(|| TokenAngles::gather(&table, &positions).expect("in the table"));
    }

    #[divan::bench]
    fn written(bencher: divan::Bencher) {
        let values = tokens() * 128;
        bencher.bench_local(|| (0..values).map(|i| i as f32).collect::<Vec<f32>>());
    }
}
