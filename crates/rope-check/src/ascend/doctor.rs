//! The findings of a diagnosis, for people and for programs.

use std::io::{self, Write};

use rope_ascend::diagnosis::{Diagnosis, Finding};
use serde_json::{Value, json};

/// Writes the findings as a list with remedies; `hint` follows in the last line where there is no
/// NPU.
///
/// # Errors
/// Those of `out`.
pub fn print(out: &mut impl Write, diagnosis: &Diagnosis, hint: &str) -> io::Result<()> {
    let set = |(name, value): &(&str, Option<String>)| Some(format!("{name}={}", value.as_ref()?));
    let mut settings: Vec<String> = diagnosis.settings.iter().filter_map(set).collect();
    if settings.is_empty() && !diagnosis.settings.is_empty() {
        let names: Vec<_> = diagnosis.settings.iter().map(|(name, _)| *name).collect();
        settings.push(format!("none of {} is set", names.join(", ")));
    }
    let installed = diagnosis.installed.iter();
    settings
        .extend(installed.map(|(file, version)| format!("{}: version {version}", file.display())));
    let runtime = [finding("Ascend runtime", &diagnosis.runtime)];
    let libraries = diagnosis.libraries.iter().map(|library| {
        let name = format!("{} (for {})", library.role, library.needed_for);
        finding(&name, &library.found)
    });
    let mut devices: Vec<String> = (diagnosis.devices.iter())
        .map(|device| finding(&device.name, &device.found))
        .collect();
    if devices.is_empty() {
        devices.push("none".to_owned());
    }
    let symbols = diagnosis.missing_symbols.iter();
    let symbols = symbols.map(|missing| format!("{} (for {})", missing.symbol, missing.needed_for));
    let launches = diagnosis.launches.iter();
    let launches = launches.map(|launch| finding(launch.family, &launch.found));
    let paths = diagnosis.paths.iter();
    let paths = paths.map(|path| finding(path.name, &path.found));
    let sections: [(&str, Vec<String>); 8] = [
        ("Settings", settings),
        ("Runtime", runtime.into()),
        ("Libraries", libraries.collect()),
        ("Devices", devices),
        ("Missing functions", symbols.collect()),
        ("Launches of our kernels", launches.collect()),
        ("Rotation paths", paths.collect()),
        ("To do", remedies(diagnosis)),
    ];
    for (heading, lines) in sections.iter().filter(|(_, lines)| !lines.is_empty()) {
        writeln!(out, "{heading}")?;
        for line in lines {
            writeln!(out, "  {line}")?;
        }
    }
    if diagnosis.is_complete() {
        return writeln!(out, "\nEverything works.");
    }
    let ready = diagnosis.paths.iter().filter(|path| path.found.is_ready());
    let (ready, all) = (ready.count(), diagnosis.paths.len());
    writeln!(
        out,
        "\n{ready} of {all} rotation paths of an NPU can run here{}.\n\
         The CPU needs none of them; {}.",
        if diagnosis.runtime.is_ready() {
            ""
        } else {
            ": there is no Ascend runtime"
        },
        hint
    )
}

fn finding(name: &str, found: &Finding) -> String {
    match found {
        Finding::Ready(what) => format!("ok  {name}: {what}"),
        Finding::Missing { reason, .. } => format!("--  {name}: {reason}"),
    }
}

/// The remedies, in numbered steps. One serves many findings: each is listed once.
fn remedies(diagnosis: &Diagnosis) -> Vec<String> {
    let libraries = diagnosis.libraries.iter().map(|library| &library.found);
    let devices = diagnosis.devices.iter().map(|device| &device.found);
    let launches = diagnosis.launches.iter().map(|launch| &launch.found);
    let paths = diagnosis.paths.iter().map(|path| &path.found);
    let mut remedies = Vec::new();
    for found in [&diagnosis.runtime]
        .into_iter()
        .chain(libraries)
        .chain(devices)
        .chain(launches)
        .chain(paths)
    {
        if let Finding::Missing { remedy, .. } = found
            && !remedies.contains(&remedy)
        {
            remedies.push(remedy);
        }
    }
    let steps = remedies.iter().zip(1..);
    steps
        .map(|(remedy, number)| format!("{number}. {remedy}"))
        .collect()
}

/// The findings as an object, which [`accept`](crate::accept) reads.
pub fn to_json(diagnosis: &Diagnosis) -> Value {
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
    let settings = diagnosis.settings.iter();
    let settings = settings.map(|(name, value)| ((*name).to_owned(), json!(value)));
    let devices = diagnosis.devices.iter();
    let devices = devices.map(|device| named(&device.name, &device.found));
    let launches = diagnosis.launches.iter();
    let launches = launches.map(|launch| named(launch.family, &launch.found));
    let paths = diagnosis.paths.iter();
    let paths = paths.map(|path| named(path.name, &path.found));
    json!({
        "settings": settings.collect::<serde_json::Map<_, _>>(),
        "installed": installed.collect::<Vec<_>>(),
        "runtime": found(&diagnosis.runtime),
        "libraries": libraries.collect::<Vec<_>>(),
        "devices": devices.collect::<Vec<_>>(),
        "missing_symbols": symbols.collect::<Vec<_>>(),
        "launches": launches.collect::<Vec<_>>(),
        "paths": paths.collect::<Vec<_>>(),
        "complete": diagnosis.is_complete(),
    })
}
