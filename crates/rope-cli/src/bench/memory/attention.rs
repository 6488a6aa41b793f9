//! The table of attention's bytes.

use rope_bench::rows::{AttentionRow, bytes};

use crate::table::{Table, or_dash};

/// The rows as tables, one for each element type.
pub(super) fn table(rows: &[AttentionRow]) -> String {
    let type_table = |rows: &[AttentionRow]| {
        let first = &rows[0];
        let title = format!(
            "Causal attention, a key head of {} with its {} query heads x {}, {}, on {}\n",
            first.shape,
            first.heads,
            first.head_dim,
            first.dtype.name(),
            first.device,
        );
        let mut table = Table::new(
            &["", "tokens"],
            &[
                "kept",
                "peak forward",
                "peak backward",
                "peak",
                "composed / fused",
            ],
        );
        let size = |count: Option<f64>| or_dash(count.map(bytes));
        for row in rows {
            table.row([
                row.implementation.clone(),
                row.tokens.to_string(),
                size(row.retained_bytes.map(|count| count as f64)),
                size(row.forward_peak_bytes.map(|count| count as f64)),
                size(row.backward_peak_bytes.map(|count| count as f64)),
                size(row.step_peak_bytes.map(|count| count as f64)),
                or_dash(row.composed_ratio.map(|ratio| format!("{ratio:.1}"))),
            ]);
        }
        let not_run = rows.iter().find(|row| row.step_peak_bytes.is_none());
        let note = not_run.map_or(String::new(), |row| {
            format!(
                "  From {} tokens on, composed was not run: one of its matrices takes {}.\n",
                row.tokens,
                bytes(row.scores_bytes as f64)
            )
        });
        format!("{title}{table}{note}\n")
    };
    let tables = rows.chunk_by(|a, b| a.dtype == b.dtype).map(type_table);
    tables.collect()
}
