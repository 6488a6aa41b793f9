//! The memory that this process can still get: an allocation that fails ends a process, so what
//! is too large is refused before.

use rope_bench::rows::bytes;
use vlm_train::available_memory;

use crate::device::Device;

/// Refuses what needs more bytes than there are. `needed` is a lower bound, so what is refused
/// would have failed.
///
/// # Errors
/// A message that continues with `instead`, what to do. None on devices with memory of their own,
/// and none where the system does not say what is available.
pub(crate) fn expect(
    device: &Device,
    needed: f64,
    what: &str,
    instead: &str,
) -> Result<(), String> {
    let is_ours = matches!(device, Device::Cpu | Device::AscendSim(_));
    match available_memory().filter(|available| is_ours && needed > *available) {
        Some(available) => Err(format!(
            "{what} needs at least {} of memory, and {} are available; {instead}",
            bytes(needed),
            bytes(available)
        )),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_than_any_machine_has_is_refused_on_devices_in_its_memory() {
        if !cfg!(target_os = "linux") {
            return;
        }
        let most = 1e18;
        let refused = expect(&Device::Cpu, most, "this", "choose less");
        let refused = refused.expect_err("an exabyte");
        assert!(
            refused.starts_with("this needs at least ") && refused.ends_with("; choose less"),
            "{refused}"
        );
        assert_eq!(expect(&Device::Gpu(0), most, "this", "choose less"), Ok(()));
        assert_eq!(expect(&Device::Cpu, 1.0, "this", "choose less"), Ok(()));
    }
}
