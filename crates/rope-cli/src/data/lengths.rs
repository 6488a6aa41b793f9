//! How long the samples are, and what of them is trained on, drawn.

use std::path::Path;

use plotters::prelude::*;
use vlm_data::check::{DataReport, Histogram};

use crate::svg::{self, Area, BLUE, Drawn, GREEN, GREY, ORANGE};

const WIDTH: i32 = 1100;
const HEIGHT: i32 = 450;
const MARGIN: i32 = 24;
const HEADING: i32 = 70;
const CHART: (i32, i32) = (515, 270);
const ROW: i32 = 34;
/// Bars of a histogram.
const BARS: usize = 40;

/// Draws histograms of tokens and of the share that is trained on, and how full rows become.
pub(super) fn draw(path: &Path, report: &DataReport) -> Drawn {
    let samples = &report.samples;
    let tokens = Histogram::of(samples.iter().map(|sample| sample.tokens), BARS);
    // In thousandths, so that bars are whole numbers.
    let shares = samples
        .iter()
        .map(|sample| (u64::from(sample.trained) * 1000 / u64::from(sample.tokens.max(1))) as u32);
    let shares = Histogram::of(shares, BARS);
    let packing = report.packing(report.row_tokens());
    svg::draw(path, (WIDTH, HEIGHT), |area| {
        let title = format!(
            "{} samples of {} records, {} with errors",
            samples.len(),
            report.records,
            report.bad_records
        );
        svg::text(area, title, (MARGIN, 16), 21, BLACK)?;
        histogram(
            area,
            MARGIN,
            "tokens of a sample",
            BLUE,
            &tokens,
            1.0,
            report.max_tokens,
        )?;
        let left = MARGIN + CHART.0 + MARGIN;
        histogram(
            area,
            left,
            "% of its tokens are trained on",
            GREEN,
            &shares,
            10.0,
            None,
        )?;
        let rows = [
            ("packed", packing.packed_rows, packing.packed_filled, BLUE),
            (
                "padded",
                packing.padded_batches,
                packing.padded_filled,
                ORANGE,
            ),
        ];
        for (index, (name, count, filled, color)) in rows.into_iter().enumerate() {
            let top = HEADING + CHART.1 + MARGIN + index as i32 * ROW;
            let name = format!("{name}: {count} rows of {} tokens", packing.row_tokens);
            svg::text(area, name, (MARGIN, top + 4), 15, BLACK)?;
            let (from, to) = (360, WIDTH - MARGIN - 90);
            let end = from + (f64::from(to - from) * filled.min(1.0)) as i32;
            let bar = |to, style: ShapeStyle| Rectangle::new([(from, top), (to, top + 20)], style);
            area.draw(&bar(to, BLACK.mix(0.08).filled()))?;
            area.draw(&bar(end, color.mix(0.8).filled()))?;
            let share = format!("{:.1} % full", 100.0 * filled);
            svg::text(area, share, (to + 10, top + 4), 15, GREY)?;
        }
        Ok(())
    })
}

/// Draws a histogram, whose numbers are divided by `unit`, and a line at a limit.
fn histogram(
    area: &Area<'_>,
    left: i32,
    name: &str,
    color: RGBColor,
    histogram: &Histogram,
    unit: f64,
    limit: Option<usize>,
) -> Drawn {
    let (width, height) = CHART;
    let part = area
        .clone()
        .shrink((left, HEADING), (width as u32, height as u32));
    let bars: Vec<_> = histogram.bars().collect();
    let ends = |at: fn(&std::ops::Range<u32>) -> u32| bars.iter().map(move |(range, _)| at(range));
    let from = f64::from(ends(|range| range.start).min().unwrap_or(0)) / unit;
    let to = f64::from(ends(|range| range.end).max().unwrap_or(1)) / unit;
    let to = limit.map_or(to, |limit| to.max(limit as f64 * 1.02));
    let most = histogram.counts.iter().copied().max().unwrap_or(1).max(1) as f64 * 1.08;
    let mut chart = ChartBuilder::on(&part)
        .x_label_area_size(42)
        .y_label_area_size(52)
        .build_cartesian_2d(from..to, 0.0..most)?;
    svg::axes(&mut chart, (name, 8), ("samples", 6), &|count| {
        format!("{count:.0}")
    })?;
    chart.draw_series(bars.iter().map(|(range, count)| {
        let [start, end] = [range.start, range.end].map(|edge| f64::from(edge) / unit);
        let gap = 0.06 * (end - start);
        Rectangle::new(
            [(start + gap, 0.0), (end - gap, *count as f64)],
            color.mix(0.8).filled(),
        )
    }))?;
    if let Some(limit) = limit {
        let ends = [(limit as f64, 0.0), (limit as f64, most)];
        svg::dashed(
            &mut chart,
            ends,
            BLACK.stroke_width(1),
            Some("--max-tokens"),
        )?;
        svg::legend(&mut chart, SeriesLabelPosition::UpperRight)?;
    }
    Ok(())
}
