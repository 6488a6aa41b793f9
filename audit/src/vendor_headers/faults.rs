//! Faults seeded into a copy of the kernels, each of which has to be noticed.

use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};

use serde::Serialize;

use super::compile::Harness;
use super::suites::{self, DIFFERENTIAL, differences};
use super::{KERNELS, Result, VendorError, cannot_access};

/// A change of a file of `kernels/rope`.
struct Fault {
    name: &'static str,
    file: &'static str,
    from: &'static str,
    to: &'static str,
    architectures: &'static [u32],
}

const BOTH: &[u32] = &[2201, 3510];

const FAULTS: [Fault; 14] = [
    Fault {
        name: "const GM_ADDR a[], b[]: the macro makes b an array of bytes",
        file: "rope_rotate.h",
        from: "GM_ADDR const output[kTensors] = {q_out, k_out};",
        to: "const GM_ADDR none[1] = {q}, output[kTensors] = {q_out, k_out};",
        architectures: BOTH,
    },
    Fault {
        name: "global memory taken for the unified buffer",
        file: "rope_base.h",
        from: "DataCopyPad(gm[from], ub[to], copy);",
        to: "DataCopyPad(ub[to], ub[to], copy);",
        architectures: BOTH,
    },
    Fault {
        name: "no barrier between vector instructions",
        file: "rope_base.h",
        from: "AscendC::PipeBarrier<PIPE_V>();",
        to: "",
        architectures: &[2201],
    },
    Fault {
        name: "one barrier less, before the signs of the coefficients",
        file: "rope_rotate.h",
        from: "        VectorBarrier();\n        const Rows rows{0, t_.coef_pitch};",
        to: "        const Rows rows{0, t_.coef_pitch};",
        architectures: &[2201],
    },
    Fault {
        name: "arithmetic does not wait for the load",
        file: "rope_rotate.h",
        from: "slots_.template EnQue<TPosition::GM, TPosition::VECIN, T>(slot);\n        \
               slot = slots_.template DeQue<TPosition::GM, TPosition::VECIN, T>();",
        to: "",
        architectures: BOTH,
    },
    Fault {
        name: "the store does not wait for the arithmetic",
        file: "rope_rotate.h",
        from: "slots_.template EnQue<TPosition::VECOUT, TPosition::GM, T>(slot);\n        \
               slot = slots_.template DeQue<TPosition::VECOUT, TPosition::GM, T>();",
        to: "",
        architectures: BOTH,
    },
    Fault {
        name: "a flag is waited for that nobody set",
        file: "rope_base.h",
        from: "AscendC::SetFlag<HardEvent::MTE2_V>(id);",
        to: "",
        architectures: BOTH,
    },
    Fault {
        name: "a flag is set that nobody waits for",
        file: "rope_base.h",
        from: "AscendC::WaitFlag<HardEvent::MTE2_V>(id);",
        to: "",
        architectures: BOTH,
    },
    Fault {
        name: "a gap of one block too many in the unified buffer",
        file: "rope_base.h",
        from: "(counted.ub - padded) / kUnit : 0",
        to: "(counted.ub - padded) / kUnit + 1 : 0",
        architectures: BOTH,
    },
    Fault {
        name: "a gap of one element too many in global memory",
        file: "rope_base.h",
        from: "(counted.gm - run) * sizeof(T) : 0",
        to: "(counted.gm - run + 1) * sizeof(T) : 0",
        architectures: BOTH,
    },
    Fault {
        name: "a whole repeat where lanes are left over",
        file: "rope_base.h",
        from: "const uint64_t mask = Min(lanes - lane, kLanes);",
        to: "const uint64_t mask = kLanes;",
        architectures: BOTH,
    },
    Fault {
        name: "a step between rows beyond its 8 bits",
        file: "rope_base.h",
        from: "furthest > kMaxRowStride ? 1 : kMaxRepeats",
        to: "kMaxRepeats",
        architectures: BOTH,
    },
    Fault {
        name: "one row too few in the sum over heads",
        file: "rope_angle_grad.h",
        from: "rows -= half;",
        to: "rows -= half; if (rows == 2) rows = 1;",
        architectures: BOTH,
    },
    Fault {
        name: "ties rounded away from zero",
        file: "rope_rotate.h",
        from: "RoundMode::CAST_RINT",
        to: "RoundMode::CAST_ROUND",
        architectures: BOTH,
    },
];

/// A change that is no fault: with it everything has to be as without, so that a fault is not taken
/// for noticed where the tests fail anyway.
const CONTROL: Fault = Fault {
    name: "a comment",
    file: "rope_base.h",
    from: "namespace rope {",
    to: "namespace rope {  // control",
    architectures: BOTH,
};

/// The tests that a fault has to pass, which run in seconds; those with a cube core are compiled
/// only.
const TESTS: [&str; 6] = [
    "every_pairing_with_shared_and_separate_angles",
    "partial_and_unaligned_heads",
    "angle_gradients",
    "sizes",
    "--skip",
    "cube",
];

/// How a fault was noticed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Caught {
    /// The kernels do not compile.
    Compiler,
    /// Violations of these kinds.
    Violations(String),
    /// A test failed: the results are wrong.
    Results,
    /// The tests passed, but N launches left other memory than without the fault.
    Memory(usize),
    /// Not at all.
    Missed,
}

impl Caught {
    pub(super) fn words(&self) -> String {
        match self {
            Self::Compiler => "does not compile".to_owned(),
            Self::Violations(kinds) => format!("violation: {kinds}"),
            Self::Results => "wrong results".to_owned(),
            Self::Memory(launches) => format!("other memory after {launches} launches"),
            Self::Missed => "NOT CAUGHT".to_owned(),
        }
    }
}

/// What became of a fault.
#[derive(Serialize)]
pub(super) struct FaultRow {
    pub(super) fault: &'static str,
    pub(super) architecture: u32,
    pub(super) caught: Caught,
}

impl Harness {
    /// Seeds all faults for an architecture, one after the other.
    pub(super) fn faults(
        &self,
        architecture: u32,
        mut each: impl FnMut(&FaultRow),
    ) -> Result<Vec<FaultRow>> {
        let record = self.work.join("launches-fault");
        let run = |environment: &[(&'static str, String)]| {
            suites::run(
                &self.root,
                DIFFERENTIAL,
                &TESTS,
                architecture,
                environment,
                &record,
            )
        };
        let right = run(&self.environment_with(&CONTROL)?)?;
        if right.launches.is_empty() || judge(&right, &right) != Caught::Missed {
            let output = right.output;
            return Err(VendorError::Failed(format!(
                "the kernels do not pass without a fault, so none can be seeded:\n{output}"
            )));
        }
        let mut rows = Vec::new();
        for fault in FAULTS
            .iter()
            .filter(|f| f.architectures.contains(&architecture))
        {
            let caught = match run(&self.environment_with(fault)?) {
                Ok(run) => judge(&run, &right),
                // It ended the process.
                Err(VendorError::Tests { .. }) => Caught::Results,
                Err(other) => return Err(other),
            };
            let row = FaultRow {
                fault: fault.name,
                architecture,
                caught,
            };
            each(&row);
            rows.push(row);
        }
        Ok(rows)
    }

    /// The environment in which clang reads the changed file in place of the kernels' own.
    fn environment_with(&self, fault: &Fault) -> Result<Vec<(&'static str, String)>> {
        let path = self.root.join(KERNELS).join(fault.file);
        // As the simulator names it to clang, which compares names: the folder is a link.
        let path = fs::canonicalize(&path).map_err(cannot_access(&path))?;
        let text = fs::read_to_string(&path).map_err(cannot_access(&path))?;
        let changed = text.replace(fault.from, fault.to);
        if changed == text {
            return Err(VendorError::Fault {
                name: fault.name,
                file: fault.file,
            });
        }
        let changed = self.write("fault.h", &changed)?;
        let overlay = serde_json::json!({
            "version": 0,
            // The file keeps its name, so that its own includes are found beside it.
            "use-external-names": "false",
            "roots": [{ "type": "file", "name": path, "external-contents": changed }],
        });
        let overlay = self.write("fault.json", &overlay.to_string())?;
        let mut hasher = DefaultHasher::new();
        (fault.from, fault.to, text, &path).hash(&mut hasher);
        let mut environment = self.environment()?;
        for (name, value) in &mut environment {
            if *name == "CXXFLAGS" {
                // The number makes the simulator's cache tell the faults apart.
                *value += &format!(
                    " -ivfsoverlay {} -DHARNESS_FAULT=0x{:x}",
                    overlay.display(),
                    hasher.finish()
                );
            }
        }
        Ok(environment)
    }
}

fn judge(run: &suites::Run, right: &suites::Run) -> Caught {
    if run.output.contains("does not compile for dav-") {
        return Caught::Compiler;
    }
    let kinds = run
        .launches
        .iter()
        .filter_map(|line| line.split(' ').nth(3));
    let mut kinds: Vec<&str> = kinds.flat_map(|kinds| kinds.split(',')).collect();
    kinds.sort_unstable();
    kinds.dedup();
    kinds.retain(|kind| *kind != "-");
    let different = differences(&run.launches, &right.launches);
    if !kinds.is_empty() {
        Caught::Violations(kinds.join(", "))
    } else if run.failed > 0 {
        Caught::Results
    } else if different > 0 {
        Caught::Memory(different)
    } else {
        Caught::Missed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_fault_changes_the_kernels() {
        let folder = crate::root().join(KERNELS);
        for fault in FAULTS.iter().chain([&CONTROL]) {
            let text = fs::read_to_string(folder.join(fault.file)).expect("a kernel");
            assert!(
                text.contains(fault.from),
                "{}: not in {}",
                fault.name,
                fault.file
            );
            assert_ne!(fault.from, fault.to, "{}", fault.name);
        }
    }

    #[test]
    fn a_fault_is_judged_by_violations_then_results_then_memory() {
        let run = |failed, output: &str, launches: &[&str]| suites::Run {
            passed: 1,
            failed,
            output: output.to_owned(),
            launches: launches.iter().map(|line| (*line).to_owned()).collect(),
        };
        let right = run(0, "", &["2201 k 1 - 4:aa"]);
        let of = |failed, output, launches| judge(&run(failed, output, launches), &right);
        assert_eq!(
            of(1, "a.cpp does not compile for dav-2201: ..", &[]),
            Caught::Compiler
        );
        let kinds = Caught::Violations("event, ordering".to_owned());
        assert_eq!(of(1, "", &["2201 k 1 ordering,event 4:aa"]), kinds);
        assert_eq!(of(1, "", &["2201 k 1 - 4:bb"]), Caught::Results);
        assert_eq!(of(0, "", &["2201 k 1 - 4:bb"]), Caught::Memory(1));
        assert_eq!(of(0, "", &["2201 k 1 - 4:aa"]), Caught::Missed);
    }
}
