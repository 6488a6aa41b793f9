//! The counts as tables.

use rope_bench::rows::{MemoryRow, Source, bytes};

use crate::table::{Table, or_dash};

/// For each shape and element type, tables of the largest number of layers: one for each way in
/// which figures came about. What is saved is the peak of the step, as a multiple.
pub(super) fn table(rows: &[MemoryRow]) -> String {
    let same_tensors = |a: &MemoryRow, b: &MemoryRow| {
        (&a.shape, a.dtype, a.tokens) == (&b.shape, b.dtype, b.tokens)
    };
    let tables: String = rows.chunk_by(same_tensors).map(tensor_table).collect();
    format!("{tables}{LEGEND}")
}

const LEGEND: &str = "\
kept: bytes of the graph after the forward, for the backward; data: tensors alone
of grads: peak of the backward over the bytes of the gradients of q and k
big allocs: allocations per layer that hold a value per token and pair, forward + backward
saves comp., saves burn's: peak of a step, composed or by RotaryEncoding, over this row's
";

fn tensor_table(rows: &[MemoryRow]) -> String {
    let first = &rows[0];
    let rotated = if first.rotary_dim < first.head_dim {
        format!(" ({} rotated)", first.rotary_dim)
    } else {
        String::new()
    };
    let title = format!(
        "{}, {} + {} heads x {}{rotated}, {} tokens, {}: q and k, and their gradients, {}\n",
        first.shape,
        first.heads,
        first.kv_heads,
        first.head_dim,
        first.tokens,
        first.dtype.name(),
        bytes(first.gradient_bytes as f64),
    );
    let range = Layers {
        rows,
        fewest: rows.iter().map(|row| row.layers).min().unwrap_or(1),
        most: rows.iter().map(|row| row.layers).max().unwrap_or(1),
    };
    let same_source = |a: &&MemoryRow, b: &&MemoryRow| {
        (a.source, &a.device, a.checkpointing) == (b.source, &b.device, b.checkpointing)
    };
    let shown: Vec<&MemoryRow> = rows.iter().filter(|row| row.layers == range.most).collect();
    let tables = shown.chunk_by(same_source).map(|rows| range.table(rows));
    std::iter::once(title)
        .chain(tables)
        .chain(["\n".to_owned()])
        .collect()
}

/// The rows of all numbers of layers.
struct Layers<'a> {
    rows: &'a [MemoryRow],
    fewest: usize,
    most: usize,
}

impl Layers<'_> {
    fn table(&self, rows: &[&MemoryRow]) -> String {
        let first = rows[0];
        let source = match first.source {
            Source::Measured => format!("measured on {}", first.device),
            source => source.label().to_owned(),
        };
        let source = if first.checkpointing {
            format!("{source},\ngradient checkpointing")
        } else {
            source
        };
        let kept = format!("kept by\n{} layers", self.most);
        let headings = [
            "data kept\nper layer",
            "all kept\nper layer",
            &kept,
            "peak of\nforward",
            "peak of\nbackward",
            "of\ngrads",
            "big\nallocs",
            "saves\ncomp.",
            "saves\nburn's",
        ];
        let mut table = Table::new(&[&source], &headings);
        let mut notes = String::new();
        for row in rows {
            if row.retained_bytes.is_none() {
                notes += &format!("  {} {}\n", row.implementation, row.note);
                continue;
            }
            let large = |count: fn(&MemoryRow) -> Option<usize>| {
                self.a_layer(row, |row| count(row).map(|count| count as f64))
            };
            let allocations = large(|row| row.forward_large_allocations)
                .zip(large(|row| row.backward_large_allocations));
            table.row([
                row.implementation.clone(),
                size(self.a_layer(row, |row| row.retained_data_bytes.map(|n| n as f64))),
                size(self.a_layer(row, |row| row.retained_bytes.map(|n| n as f64))),
                size(row.retained_bytes.map(|n| n as f64)),
                size(row.forward_peak_bytes.map(|n| n as f64)),
                size(row.backward_peak_bytes.map(|n| n as f64)),
                or_dash(row.backward_peak_bytes.map(|peak| {
                    let ratio = peak as f64 / row.gradient_bytes as f64;
                    format!("{ratio:.2}")
                })),
                or_dash(
                    allocations.map(|(forward, backward)| format!("{forward:.0}+{backward:.0}")),
                ),
                times(row.composed_ratio),
                times(row.rotary_encoding_ratio),
            ]);
        }
        format!("{table}{notes}")
    }

    /// The amount that a layer adds: the difference to the row of the fewest layers where there is
    /// one, else the mean over the layers.
    fn a_layer(&self, row: &MemoryRow, value: impl Fn(&MemoryRow) -> Option<f64>) -> Option<f64> {
        let scheme = |row: &MemoryRow| (row.implementation.clone(), row.checkpointing);
        let fewest = self.rows.iter().find(|other| {
            other.layers == self.fewest && self.fewest < self.most && scheme(other) == scheme(row)
        });
        let at_most = value(row)?;
        Some(match fewest.and_then(&value) {
            Some(at_fewest) => (at_most - at_fewest) / (self.most - self.fewest) as f64,
            None => at_most / self.most as f64,
        })
    }
}

fn size(count: Option<f64>) -> String {
    or_dash(count.map(bytes))
}

fn times(ratio: Option<f64>) -> String {
    or_dash(ratio.map(|ratio| {
        let decimals = usize::from(ratio < 99.95);
        format!("{ratio:.decimals$}x")
    }))
}
