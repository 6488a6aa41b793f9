//! `mrope doctor`: what this machine has for Ascend, and what to do about the rest.

use std::error::Error;
use std::io::{BufWriter, Write, stdout};

use clap::Args;
use rope_ascend::diagnosis::{Diagnosis, Finding};
use serde_json::{Value, json};

use crate::device::{Device, simulated};

/// Say what of CANN is here, which ways to rotate work, and what to do about the others
///
/// Finding nothing is an answer, not an error: the exit code is 0 without CANN and without a device.
#[derive(Args, Clone, Debug)]
pub(crate) struct DoctorArgs {
    /// What to look at: ascend (the installed CANN), or ascend-sim (the simulated NPU).
    #[arg(long, default_value = "ascend")]
    device: Device,
    /// One JSON object.
    #[arg(long)]
    json: bool,
}

/// Looks, and prints what there is.
///
/// # Errors
/// If this program has no simulator and it was asked for, or standard output cannot be written.
pub(crate) fn run(args: &DoctorArgs) -> Result<(), Box<dyn Error>> {
    let diagnosis = match args.device {
        Device::AscendSim => Diagnosis::of(&simulated()?),
        Device::Ascend(0) => Diagnosis::of_installation(),
        Device::Ascend(_) | Device::Cpu | Device::Remote { .. } => {
            return Err("expected --device ascend (all its NPUs) or --device ascend-sim".into());
        }
    };
    let mut out = BufWriter::new(stdout().lock());
    if args.json {
        writeln!(out, "{}", to_json(&diagnosis))?;
    } else {
        print(&mut out, &diagnosis)?;
    }
    Ok(out.flush()?)
}

fn print(out: &mut impl Write, diagnosis: &Diagnosis) -> std::io::Result<()> {
    let set: Vec<_> = (diagnosis.settings.iter())
        .filter_map(|(name, value)| Some((name, value.as_ref()?)))
        .collect();
    if !diagnosis.settings.is_empty() {
        writeln!(out, "Settings")?;
    }
    for (name, value) in &set {
        writeln!(out, "  {name}={value}")?;
    }
    if set.is_empty() && !diagnosis.settings.is_empty() {
        let names: Vec<_> = diagnosis.settings.iter().map(|(name, _)| *name).collect();
        writeln!(out, "  none of {} is set", names.join(", "))?;
    }
    for (file, version) in &diagnosis.installed {
        writeln!(out, "  {}: version {version}", file.display())?;
    }
    writeln!(out, "Runtime")?;
    finding(out, "Ascend runtime", &diagnosis.runtime)?;
    if !diagnosis.libraries.is_empty() {
        writeln!(out, "Libraries")?;
    }
    for library in &diagnosis.libraries {
        let name = format!("{} (for {})", library.role, library.needed_for);
        finding(out, &name, &library.found)?;
    }
    writeln!(out, "Devices")?;
    for device in &diagnosis.devices {
        finding(out, &device.name, &device.found)?;
    }
    if diagnosis.devices.is_empty() {
        writeln!(out, "  none")?;
    }
    if !diagnosis.missing_symbols.is_empty() {
        writeln!(out, "Functions that the libraries lack")?;
    }
    for missing in &diagnosis.missing_symbols {
        writeln!(out, "  {} (for {})", missing.symbol, missing.needed_for)?;
    }
    writeln!(out, "Ways to rotate")?;
    for path in &diagnosis.paths {
        finding(out, path.name, &path.found)?;
    }
    if diagnosis.is_complete() {
        return writeln!(out, "\nEverything works.");
    }
    // One remedy serves many findings: each is said once.
    let mut remedies = Vec::new();
    let missing = [&diagnosis.runtime].into_iter();
    let missing = missing.chain(diagnosis.libraries.iter().map(|library| &library.found));
    let missing = missing.chain(diagnosis.devices.iter().map(|device| &device.found));
    for found in missing.chain(diagnosis.paths.iter().map(|path| &path.found)) {
        if let Finding::Missing { remedy, .. } = found
            && !remedies.contains(&remedy)
        {
            remedies.push(remedy);
        }
    }
    if !remedies.is_empty() {
        writeln!(out, "To do")?;
    }
    for (number, remedy) in remedies.iter().enumerate() {
        writeln!(out, "  {}. {remedy}", number + 1)?;
    }
    let ready = diagnosis.paths.iter().filter(|path| path.found.is_ready());
    let (ready, all) = (ready.count(), diagnosis.paths.len());
    writeln!(
        out,
        "\n{ready} of {all} ways to rotate on Ascend work here. The CPU needs none of this; a simulated NPU is in \
         mrope built with --features ascend-sim."
    )
}

fn finding(out: &mut impl Write, name: &str, found: &Finding) -> std::io::Result<()> {
    match found {
        Finding::Ready(what) => writeln!(out, "  ok  {name}: {what}"),
        Finding::Missing { reason, .. } => writeln!(out, "  --  {name}: {reason}"),
    }
}

fn to_json(diagnosis: &Diagnosis) -> Value {
    let found = |finding: &Finding| match finding {
        Finding::Ready(what) => json!({ "ready": true, "found": what }),
        Finding::Missing { reason, remedy } => {
            json!({ "ready": false, "reason": reason, "remedy": remedy })
        }
    };
    let named = |name: &str, finding: &Finding| {
        let mut value = found(finding);
        value["name"] = name.into();
        value
    };
    let libraries = diagnosis.libraries.iter().map(|library| {
        let mut value = named(library.role, &library.found);
        value["needed_for"] = library.needed_for.into();
        value
    });
    let symbols = diagnosis.missing_symbols.iter();
    let symbols = symbols
        .map(|missing| json!({ "symbol": missing.symbol, "needed_for": missing.needed_for }));
    let installed = diagnosis.installed.iter();
    let installed = installed.map(|(file, version)| json!({ "file": file, "version": version }));
    json!({
        "settings": diagnosis.settings.iter().map(|(name, value)| ((*name).to_owned(), json!(value))).collect::<serde_json::Map<_, _>>(),
        "installed": installed.collect::<Vec<_>>(),
        "runtime": found(&diagnosis.runtime),
        "libraries": libraries.collect::<Vec<_>>(),
        "devices": diagnosis.devices.iter().map(|device| named(&device.name, &device.found)).collect::<Vec<_>>(),
        "missing_symbols": symbols.collect::<Vec<_>>(),
        "paths": diagnosis.paths.iter().map(|path| named(path.name, &path.found)).collect::<Vec<_>>(),
        "complete": diagnosis.is_complete(),
    })
}
