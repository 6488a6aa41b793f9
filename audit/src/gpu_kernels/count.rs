//! What a kernel's machine code says: registers, memory of its own, widths of accesses.

use std::collections::BTreeMap;

use super::compile::Compiled;

/// Accesses by their bytes.
pub(super) type Accesses = BTreeMap<usize, usize>;

/// What was counted in a kernel.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Counts {
    pub(super) registers: usize,
    /// Bytes of registers that did not fit, and of arrays that are not in registers.
    pub(super) spilled: usize,
    pub(super) stack: usize,
    /// Accesses to memory of the unit's own.
    pub(super) local: usize,
    /// Divisions of 64-bit integers.
    pub(super) wide_divisions: usize,
    pub(super) loads: Accesses,
    pub(super) stores: Accesses,
    /// Those of the innermost loop with most loads.
    pub(super) loop_loads: Accesses,
    pub(super) loop_stores: Accesses,
}

impl Counts {
    /// None if the compiler's report has another form than is known.
    pub(super) fn of(compiled: &Compiled) -> Option<Self> {
        let report = &compiled.report;
        let spills = before(report, " bytes spill stores")? + before(report, " bytes spill loads")?;
        let lines: Vec<&str> = compiled.code.lines().collect();
        let whole = accesses(&lines);
        let innermost = loops(&lines)
            .into_iter()
            .map(|(from, to)| accesses(&lines[from..=to]));
        let busiest = innermost.max_by_key(|[loads, _]| loads.values().sum::<usize>());
        let [loop_loads, loop_stores] = busiest.unwrap_or_default();
        let [loads, stores] = whole;
        let wide = ["div.u64", "div.s64", "rem.u64", "rem.s64"];
        Some(Self {
            registers: after(report, "Used ")?,
            spilled: spills,
            stack: before(report, " bytes stack frame")?,
            local: lines.iter().filter(|line| local(line)).count(),
            wide_divisions: wide
                .iter()
                .map(|name| compiled.ptx.matches(name).count())
                .sum(),
            loads,
            stores,
            loop_loads,
            loop_stores,
        })
    }
}

/// The number in front of `words`.
fn before(text: &str, words: &str) -> Option<usize> {
    let text = &text[..text.find(words)?];
    text.rsplit(|c: char| !c.is_ascii_digit())
        .next()?
        .parse()
        .ok()
}

/// The number behind `words`.
fn after(text: &str, words: &str) -> Option<usize> {
    let text = &text[text.find(words)? + words.len()..];
    text.split(|c: char| !c.is_ascii_digit())
        .next()?
        .parse()
        .ok()
}

/// The instruction's name with its suffixes.
fn instruction(line: &str) -> Option<&str> {
    let (_, text) = line.trim_start().strip_prefix("/*")?.split_once("*/")?;
    let mut words = text.split_whitespace();
    words.find(|word| !word.starts_with('@') && *word != "{")
}

fn local(line: &str) -> bool {
    instruction(line).is_some_and(|name| {
        let name = name.split('.').next();
        name == Some("LDL") || name == Some("STL")
    })
}

/// Loads and stores of memory that all units share on the device.
fn accesses(lines: &[&str]) -> [Accesses; 2] {
    let mut counted = [Accesses::new(), Accesses::new()];
    for name in lines.iter().filter_map(|line| instruction(line)) {
        let mut parts = name.split('.');
        let which = match parts.next() {
            Some("LDG" | "LD") => 0,
            Some("STG" | "ST") => 1,
            _ => continue,
        };
        let width = parts.find_map(|part| match part {
            "U8" | "S8" => Some(1),
            "U16" | "S16" => Some(2),
            "64" => Some(8),
            "128" => Some(16),
            "256" => Some(32),
            _ => None,
        });
        *counted[which].entry(width.unwrap_or(4)).or_default() += 1;
    }
    counted
}

/// Innermost loops: from a label to the branch back to it, without another such branch between.
fn loops(lines: &[&str]) -> Vec<(usize, usize)> {
    let mut labels = BTreeMap::new();
    let mut all = Vec::new();
    for (at, line) in lines.iter().enumerate() {
        if let Some(label) = line.trim().strip_suffix(':') {
            labels.insert(label, at);
        } else if instruction(line).is_some_and(|name| name.split('.').next() == Some("BRA"))
            && let Some((_, target)) = line.rsplit_once("`(")
            && let Some(start) = target.split(')').next().and_then(|label| labels.get(label))
        {
            all.push((*start, at));
        }
    }
    let inner = |outer: &(usize, usize)| {
        !all.iter()
            .any(|l| l != outer && outer.0 <= l.0 && l.1 <= outer.1)
    };
    // A branch to itself ends the code: it is no loop.
    all.iter()
        .filter(|l| l.0 + 1 < l.1 && inner(l))
        .copied()
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const CODE: &str = "
.L_x_1:
        /*0010*/                   LDG.E.128.CONSTANT R4, desc[UR4][R2.64] ;
        /*0020*/              @!P0 LDG.E.U16 R8, desc[UR4][R2.64+0x10] ;
.L_x_2:
        /*0030*/                   LDG.E R9, [R2.64] ;
        /*0040*/                   STG.E.64 desc[UR4][R2.64], R8 ;
        /*0050*/               @P1 BRA `(.L_x_2) ;
        /*0060*/                   LDL.64 R4, [R1] ;
        /*0070*/               @P1 BRA `(.L_x_1) ;
        /*0080*/                   EXIT ;
.L_x_3:
        /*0090*/                   BRA `(.L_x_3);
";

    #[test]
    fn machine_code_is_counted() {
        let report = "ptxas info    : Function properties for k
    8 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers";
        let compiled = Compiled {
            ptx: "div.u64 %rd1; rem.s64 %rd2; div.u32 %r1;".to_owned(),
            report: report.to_owned(),
            code: CODE.to_owned(),
        };
        let counts = Counts::of(&compiled).expect("the report is complete");
        let expected = Counts {
            registers: 40,
            spilled: 28,
            stack: 8,
            local: 1,
            wide_divisions: 2,
            loads: [(16, 1), (2, 1), (4, 1)].into(),
            stores: [(8, 1)].into(),
            loop_loads: [(4, 1)].into(),
            loop_stores: [(8, 1)].into(),
        };
        assert_eq!(counts, expected);
    }

    #[test]
    fn another_report_is_no_report() {
        let (ptx, code) = (String::new(), CODE.to_owned());
        let report = "ptxas info    : Used 40 registers".to_owned();
        assert_eq!(Counts::of(&Compiled { ptx, report, code }), None);
    }
}
