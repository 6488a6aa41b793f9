//! The memory of this process, as Linux tells it.

use std::path::Path;

/// Bytes that Linux can give to this process, by its limits: memory that is free or can be freed,
/// that of its control group, and its addresses. `None` elsewhere.
pub fn available_memory() -> Option<f64> {
    let read = |path| {
        plain_files::read_text(Path::new(path), plain_files::MAX_TEXT_BYTES).unwrap_or_default()
    };
    let (system, own) = (read("/proc/meminfo"), read("/proc/self/status"));
    let kib = |text: &str, name: &str| number(text, name).map(|kib| 1024.0 * kib);
    let swap = kib(&system, "SwapFree:").unwrap_or(0.0);
    let free = kib(&system, "MemAvailable:").map(|free| free + swap);
    let group = number(&read("/sys/fs/cgroup/memory.max"), "");
    let addresses = number(&read("/proc/self/limits"), "Max address space");
    let used = kib(&own, "VmSize:").unwrap_or(0.0);
    let addresses = addresses.map(|most| (most - used).max(0.0));
    [free, group, addresses]
        .into_iter()
        .flatten()
        .reduce(f64::min)
}

/// Bytes of memory that this process occupies, on Linux; `None` elsewhere.
pub fn resident_memory() -> Option<u64> {
    let own =
        plain_files::read_text(Path::new("/proc/self/status"), plain_files::MAX_TEXT_BYTES).ok()?;
    number(&own, "VmRSS:").map(|kib| 1024 * kib as u64)
}

/// The number that follows a name at the start of a line.
fn number(text: &str, name: &str) -> Option<f64> {
    let rest = text.lines().find_map(|line| line.strip_prefix(name))?;
    let number: u64 = rest.split_whitespace().next()?.parse().ok()?;
    Some(number as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_read_where_there_are_some() {
        let limits = "Limit             Soft Limit  Hard Limit  Units\n\
                      Max data size     unlimited   unlimited   bytes\n\
                      Max address space 4096000     unlimited   bytes\n";
        assert_eq!(number(limits, "Max address space"), Some(4_096_000.0));
        assert_eq!(number(limits, "Max data size"), None);
        assert_eq!(number("max\n", ""), None);
        assert_eq!(number("", ""), None);
    }
}
