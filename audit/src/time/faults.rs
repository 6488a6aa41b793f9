//! Slow kernels: changes that leave every result as it is, each of which has to be reported.

use std::fs;
use std::path::{Path, PathBuf};

use serde::Serialize;

use super::{Result, Row, TimeError};
use crate::file::cannot_access;

/// A change of a file of `kernels/rope`.
pub(super) struct Fault {
    pub(super) name: &'static str,
    file: &'static str,
    from: &'static str,
    to: &'static str,
}

pub(super) const FAULTS: [Fault; 3] = [
    Fault {
        name: "one slot: no transfer while a tile is rotated",
        file: "rope_rotate.h",
        from: "static_cast<uint8_t>(t_.slots)",
        to: "1",
    },
    Fault {
        name: "each number widened nine times",
        file: "rope_rotate.h",
        from: "        const LocalTensor<float> x = Widen(slot, rows);",
        to: "        for (int again = 0; again < 8; ++again, VectorBarrier()) Widen(slot, rows);\n        \
             const LocalTensor<float> x = Widen(slot, rows);",
    },
    Fault {
        name: "two divisions of each number that nothing needs",
        file: "rope_rotate.h",
        from: "        Narrow(slot, y, rows);",
        to: "        Narrow(slot, y, rows);\n        for (int again = 0; again < 2; ++again) {\n            \
             VectorBarrier();\n            AscendC::Div(t_work_, y, y, elements);\n        }",
    },
];

/// What became of a slow kernel.
#[derive(Debug, Serialize)]
pub(super) struct FaultRow {
    pub(super) fault: &'static str,
    /// The rotation of halves in bf16, in shares of its memory's time.
    pub(super) all: [f64; 2],
    pub(super) reported_by: Vec<&'static str>,
}

impl Fault {
    /// Copies the kernels into a folder with the change; returns their source.
    pub(super) fn seed(&self, root: &Path, folder: &Path) -> Result<PathBuf> {
        fs::create_dir_all(folder).map_err(cannot_access(folder))?;
        let kernels = root.join("kernels/rope");
        let entries = fs::read_dir(&kernels).map_err(cannot_access(&kernels))?;
        for entry in entries {
            let path = entry.map_err(cannot_access(&kernels))?.path();
            let name = path.file_name().unwrap_or_default();
            let text = fs::read_to_string(&path).map_err(cannot_access(&path))?;
            let changed = if name == self.file {
                text.replacen(self.from, self.to, 1)
            } else {
                text.clone()
            };
            if name == self.file && changed == text {
                return Err(TimeError::Fault(self.name));
            }
            let to = folder.join(name);
            fs::write(&to, changed).map_err(cannot_access(&to))?;
        }
        Ok(folder.join("rope.cpp"))
    }

    pub(super) fn judge(&self, rows: &[Row]) -> FaultRow {
        let slow = rows.first();
        let judges = ["msKPP", "PTO-ISA"].into_iter();
        let verdicts = slow.map_or([false; 2], Row::is_slow);
        FaultRow {
            fault: self.name,
            all: slow.map_or([0.0; 2], |row| [row.mskpp.all, row.pto.all]),
            reported_by: judges
                .zip(verdicts)
                .filter_map(|(judge, slow)| slow.then_some(judge))
                .collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_fault_changes_the_kernels() {
        for fault in &FAULTS {
            let path = crate::root().join("kernels/rope").join(fault.file);
            let text = fs::read_to_string(path).expect("a kernel");
            assert!(text.contains(fault.from), "{}", fault.name);
        }
    }
}
