//! Timing several contestants in turn, so that a disturbance hits all of them alike.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

/// Things that are timed against each other.
pub trait Contest {
    /// How many there are.
    fn contestants(&self) -> usize;
    /// Makes ready for a sample of `contestant`, outside the time that is taken.
    fn prepare(&mut self, contestant: usize);
    /// Runs `contestant` `iterations` times.
    fn run(&mut self, contestant: usize, iterations: usize);
    /// True if a sample may hold more than one run; not where each run uses up what
    /// [`prepare`](Self::prepare) made.
    fn repeats(&self) -> bool {
        true
    }
}

/// How many samples, and how long they may take.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// Samples of each contestant.
    pub samples: usize,
    /// Fewer samples of those, but at least three, who would take more than their share of this.
    pub budget: Duration,
    /// Runs are repeated within a sample until it is at least this long.
    pub shortest_sample: Duration,
}

impl Plan {
    /// One run of each, for a test that looks at no time.
    pub const ONCE: Self = Self {
        samples: 1,
        budget: Duration::MAX,
        shortest_sample: Duration::ZERO,
    };
}

impl Default for Plan {
    fn default() -> Self {
        Self {
            samples: 11,
            budget: Duration::from_secs(4),
            shortest_sample: Duration::from_micros(500),
        }
    }
}

/// The middle of the samples and their spread, in nanoseconds a run.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Timing {
    /// Half the samples are below.
    pub median_ns: f64,
    /// A quarter of the samples is below.
    pub lower_quartile_ns: f64,
    /// A quarter of the samples is above.
    pub upper_quartile_ns: f64,
    /// Samples.
    pub samples: usize,
}

impl Timing {
    /// Of samples in nanoseconds a run, at least one.
    pub fn of(mut samples: Vec<f64>) -> Self {
        samples.sort_by(f64::total_cmp);
        // Linear between the two nearest samples.
        let quantile = |part: f64| {
            let place = part * (samples.len() - 1) as f64;
            let (low, high) = (
                samples[place.floor() as usize],
                samples[place.ceil() as usize],
            );
            low + (high - low) * place.fract()
        };
        Self {
            median_ns: quantile(0.5),
            lower_quartile_ns: quantile(0.25),
            upper_quartile_ns: quantile(0.75),
            samples: samples.len(),
        }
    }

    /// Of one of the equal parts that a run consists of.
    pub fn divided_by(self, parts: usize) -> Self {
        let part = |ns: f64| ns / parts as f64;
        Self {
            median_ns: part(self.median_ns),
            lower_quartile_ns: part(self.lower_quartile_ns),
            upper_quartile_ns: part(self.upper_quartile_ns),
            samples: self.samples,
        }
    }
}

/// Times each contestant by [`samples`].
pub fn interleaved(contest: &mut dyn Contest, plan: &Plan) -> Vec<Timing> {
    samples(contest, plan).into_iter().map(Timing::of).collect()
}

/// Times each contestant, one sample of each after another: A B C A B C ...; in nanoseconds a run.
///
/// A first round warms up, says how often to repeat short runs, and how many samples each can have:
/// all share the budget alike, and a slow one sits out most rounds instead of costing the others
/// theirs.
pub fn samples(contest: &mut dyn Contest, plan: &Plan) -> Vec<Vec<f64>> {
    let count = contest.contestants();
    let time = |contest: &mut dyn Contest, contestant, iterations| {
        contest.prepare(contestant);
        let started = Instant::now();
        contest.run(contestant, iterations);
        started.elapsed()
    };
    let share = plan.budget.as_secs_f64() / count.max(1) as f64;
    let warmed: Vec<(usize, usize)> = (0..count)
        .map(|contestant| {
            let mut iterations = 1;
            loop {
                let taken = time(contest, contestant, iterations);
                if taken >= plan.shortest_sample || !contest.repeats() {
                    let affordable = share / taken.as_secs_f64().max(1e-9);
                    let samples = plan.samples.min((affordable as usize).max(3)).max(1);
                    return (iterations, samples);
                }
                // Towards the wanted length by the length that was seen, no more than a hundredfold
                // at once.
                let missing = plan.shortest_sample.as_secs_f64() / taken.as_secs_f64().max(1e-9);
                iterations =
                    (iterations as f64 * (1.1 * missing).clamp(1.5, 100.0)).ceil() as usize;
            }
        })
        .collect();
    let rounds = warmed.iter().map(|(_, samples)| *samples).max();
    let rounds = rounds.unwrap_or(0);
    let mut taken = vec![Vec::new(); count];
    for round in 0..rounds {
        for (contestant, (iterations, samples)) in warmed.iter().enumerate() {
            // Evenly over the rounds.
            if round * samples / rounds == (round + 1) * samples / rounds {
                continue;
            }
            let time = time(contest, contestant, *iterations);
            taken[contestant].push(time.as_secs_f64() * 1e9 / *iterations as f64);
        }
    }
    taken
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quartiles_lie_between_the_nearest_samples() {
        let timing = Timing::of(vec![4.0, 1.0, 3.0, 2.0]);
        assert_eq!((timing.lower_quartile_ns, timing.median_ns), (1.75, 2.5));
        assert_eq!((timing.upper_quartile_ns, timing.samples), (3.25, 4));
        let part = timing.divided_by(5);
        assert_eq!((part.lower_quartile_ns, part.median_ns), (0.35, 0.5));
        assert_eq!((part.upper_quartile_ns, part.samples), (0.65, 4));
        assert_eq!(Timing::of(vec![7.0]).median_ns, 7.0);
    }

    /// Records who ran.
    struct Recorder(Vec<(usize, usize)>);

    impl Contest for Recorder {
        fn contestants(&self) -> usize {
            2
        }
        fn prepare(&mut self, _: usize) {}
        fn run(&mut self, contestant: usize, iterations: usize) {
            self.0.push((contestant, iterations));
            std::thread::sleep(Duration::from_micros(200 * iterations as u64));
        }
    }

    #[test]
    fn samples_are_taken_in_turn_and_short_runs_are_repeated() {
        let plan = Plan {
            samples: 3,
            // Longer than a busy machine holds up a run of 200 us.
            shortest_sample: Duration::from_millis(60),
            ..Plan::default()
        };
        let mut recorder = Recorder(Vec::new());
        let timings = interleaved(&mut recorder, &plan);
        let runs = &recorder.0[recorder.0.len() - 6..];
        let turns: Vec<usize> = runs.iter().map(|(contestant, _)| *contestant).collect();
        assert_eq!(turns, [0, 1, 0, 1, 0, 1]);
        assert!(
            runs.iter().all(|(_, iterations)| *iterations > 1),
            "{runs:?}"
        );
        assert!(timings.iter().all(|timing| timing.samples == 3));
        // A run sleeps for 200 us at least, however many a sample holds.
        assert!(
            timings
                .iter()
                .all(|timing| timing.lower_quartile_ns >= 200e3)
        );
    }

    /// Its second contestant is slow.
    struct Slow(Vec<usize>);

    impl Contest for Slow {
        fn contestants(&self) -> usize {
            2
        }
        fn prepare(&mut self, _: usize) {}
        fn run(&mut self, contestant: usize, _: usize) {
            self.0.push(contestant);
            // The other returns at once: a busy machine does not make it slow.
            if contestant == 1 {
                std::thread::sleep(Duration::from_millis(50));
            }
        }
    }

    #[test]
    fn a_slow_contestant_costs_the_others_no_samples() {
        let plan = Plan {
            samples: 9,
            budget: Duration::from_millis(200),
            shortest_sample: Duration::ZERO,
        };
        let mut slow = Slow(Vec::new());
        let taken = samples(&mut slow, &plan);
        assert_eq!((taken[0].len(), taken[1].len()), (9, 3));
        // Behind the first round: three of its own between each two of the other's.
        assert_eq!(slow.0[2..], [0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1]);
    }
}
