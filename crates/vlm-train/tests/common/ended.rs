//! How a run of several ranks ends when one of them fails.

use std::time::{Duration, Instant};

/// The most time between a fault and the end of the last rank.
const LIMIT: Duration = Duration::from_secs(30);

/// Checks what each process says at its end, after a fault since `since`: one error, which names
/// who failed, as "rank 1", and the cause.
pub(crate) fn expect_ended<S: AsRef<str>>(since: Instant, said: &[S], who: &str, cause: &str) {
    let took = since.elapsed();
    assert!(
        took < LIMIT,
        "{who}, {cause}: the last ended after {took:?}"
    );
    for said in said {
        let said = said.as_ref();
        let errors: Vec<&str> = said.lines().filter(|line| line.contains(cause)).collect();
        let is_one = matches!(errors[..], [error] if error.contains(who));
        assert!(is_one, "expected one error of {who}, {cause}: {said}");
    }
}
