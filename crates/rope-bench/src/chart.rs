//! Results as bars.

use std::error::Error;

use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use crate::bars::names;
use crate::cases::{DTYPES, Group, Way};
use crate::rows::{AttentionRow, MemoryRow, Source, SpeedRow, StepRow, bytes};

const FONT: &str = "sans-serif";
const WIDTH: i32 = 1000;
const LABELS: i32 = 330;
const RIGHT: i32 = 110;
const TOP: i32 = 74;
const BAR: i32 = 15;
const GAP: i32 = 9;
const COLORS: [RGBColor; 5] = [
    RGBColor(31, 119, 180),
    RGBColor(214, 90, 14),
    RGBColor(110, 110, 110),
    RGBColor(44, 140, 70),
    RGBColor(150, 80, 160),
];

/// The peaks of fused and composed attention.
pub fn attention(rows: &[AttentionRow]) -> BarChart {
    let same = |a: &AttentionRow, b: &AttentionRow| (a.dtype, a.tokens) == (b.dtype, b.tokens);
    let group = |rows: &[AttentionRow]| BarGroup {
        label: format!("{}, {} tokens", rows[0].dtype.name(), rows[0].tokens),
        bars: (rows.iter())
            .map(|row| {
                let peak = row.step_peak_bytes? as f64;
                Some((peak / f64::from(1 << 20), bytes(peak)))
            })
            .collect(),
    };
    BarChart {
        title: "Attention: the most bytes of forward and backward".into(),
        series: vec![names::FUSED.into(), names::COMPOSED.into()],
        groups: rows.chunk_by(same).map(group).collect(),
        line: None,
        logarithmic: true,
    }
}

/// Bars that belong together, one per series; a series without a value leaves its bar out.
#[derive(Clone, Debug)]
pub struct BarGroup {
    /// What they are bars of.
    pub label: String,
    /// For each series, a value and how to write it.
    pub bars: Vec<Option<(f64, String)>>,
}

/// A chart of horizontal bars.
#[derive(Clone, Debug)]
pub struct BarChart {
    /// The heading.
    pub title: String,
    /// Names of the series, in the order of each group's bars.
    pub series: Vec<String>,
    /// From top to bottom.
    pub groups: Vec<BarGroup>,
    /// A value to draw a line at, and what it means.
    pub line: Option<(f64, String)>,
    /// Whether equal lengths are equal factors, from 1 up.
    pub logarithmic: bool,
}

impl BarChart {
    /// The chart as SVG.
    ///
    /// # Errors
    /// The drawing library's; none are expected.
    pub fn svg(&self) -> Result<String, Box<dyn Error>> {
        let bars: usize = self
            .groups
            .iter()
            .map(|group| group.bars.iter().flatten().count())
            .sum();
        let height = TOP + bars as i32 * BAR + (self.groups.len() as i32 + 1) * GAP + 20;
        let mut text = String::new();
        self.draw(&mut text, height)?;
        if !text.ends_with('\n') {
            text.push('\n');
        }
        Ok(text)
    }

    fn draw(&self, to: &mut String, height: i32) -> Result<(), Box<dyn Error>> {
        let area = SVGBackend::with_string(to, (WIDTH as u32, height as u32)).into_drawing_area();
        area.fill(&WHITE)?;
        let style = |size: i32| (FONT, size).into_text_style(&area);
        let middle = |style: TextStyle<'static>, at: HPos| style.pos(Pos::new(at, VPos::Center));
        let plain = |size: i32| TextStyle::from((FONT, size).into_font());
        area.draw(&Text::new(self.title.clone(), (16, 12), style(18)))?;
        let mut x = 16;
        for (index, name) in self.series.iter().enumerate() {
            let color = COLORS[index % COLORS.len()];
            area.draw(&Rectangle::new([(x, 44), (x + 12, 56)], color.filled()))?;
            area.draw(&Text::new(
                name.clone(),
                (x + 17, 50),
                middle(plain(13), HPos::Left),
            ))?;
            x += 34 + 7 * name.len() as i32;
        }

        let values = self
            .groups
            .iter()
            .flat_map(|group| group.bars.iter().flatten());
        let highest = values.map(|(value, _)| *value).fold(0.0, f64::max);
        let highest = self
            .line
            .as_ref()
            .map_or(highest, |(at, _)| highest.max(*at));
        let length = |value: f64| {
            if self.logarithmic {
                value.max(1.0).ln()
            } else {
                value
            }
        };
        let scale = f64::from(WIDTH - LABELS - RIGHT) / length(highest).max(f64::MIN_POSITIVE);
        let place = |value: f64| LABELS + (length(value) * scale).round() as i32;
        let mut y = TOP;
        for group in &self.groups {
            let top = y;
            for (index, bar) in group.bars.iter().enumerate() {
                let Some((value, label)) = bar else { continue };
                let color = COLORS[index % COLORS.len()];
                area.draw(&Rectangle::new(
                    [
                        (LABELS, y + 1),
                        (place(*value).max(LABELS + 1), y + BAR - 2),
                    ],
                    color.filled(),
                ))?;
                let at = (place(*value) + 6, y + BAR / 2);
                area.draw(&Text::new(label.clone(), at, middle(plain(12), HPos::Left)))?;
                y += BAR;
            }
            let at = (LABELS - 8, (top + y) / 2);
            area.draw(&Text::new(
                group.label.clone(),
                at,
                middle(plain(12), HPos::Right),
            ))?;
            y += GAP;
        }
        area.draw(&PathElement::new(
            [(LABELS, TOP - 4), (LABELS, y)],
            BLACK.mix(0.5),
        ))?;
        if let Some((value, meaning)) = &self.line {
            let x = place(*value);
            area.draw(&PathElement::new([(x, TOP - 4), (x, y)], BLACK.mix(0.6)))?;
            let at = (x, y + 8);
            area.draw(&Text::new(
                meaning.clone(),
                at,
                middle(plain(12), HPos::Center),
            ))?;
        }
        area.present()?;
        Ok(())
    }
}

/// The most that a step holds at the largest number of layers, as a multiple of the gradients'
/// bytes.
pub fn memory(rows: &[MemoryRow]) -> BarChart {
    let most = rows.iter().map(|row| row.layers).max().unwrap_or(1);
    let key = |row: &MemoryRow| {
        let checkpointing = if row.checkpointing {
            ", checkpointing"
        } else {
            ""
        };
        format!("{}, {}{checkpointing}", row.shape, row.dtype.name())
    };
    let series = [names::FUSED, names::COMPOSED, names::ROTARY_ENCODING];
    let mut groups: Vec<BarGroup> = Vec::new();
    let counted = rows
        .iter()
        .filter(|row| row.layers == most && row.source == Source::Measured);
    for row in counted {
        let Some(index) = series.iter().position(|name| *name == row.implementation) else {
            continue;
        };
        if groups.last().is_none_or(|group| group.label != key(row)) {
            groups.push(BarGroup {
                label: key(row),
                bars: vec![None; series.len()],
            });
        }
        if let (Some(group), Some(peak)) = (groups.last_mut(), row.step_peak_bytes) {
            let times = peak as f64 / row.gradient_bytes as f64;
            group.bars[index] = Some((times, format!("{times:.1}")));
        }
    }
    BarChart {
        title: format!(
            "Peak memory of {most} rotations, forward and backward, over the gradients' bytes \
             (logarithmic, from 1)"
        ),
        series: series.map(str::to_owned).into(),
        groups,
        line: None,
        logarithmic: true,
    }
}

/// Times of the kernels on large tensors, as multiples of the baseline's: the larger of forward and
/// backward.
pub fn speed(rows: &[SpeedRow]) -> BarChart {
    let mut groups: Vec<BarGroup> = Vec::new();
    let kernels = rows.iter().filter(|row| {
        let ours = match row.group {
            Group::Large | Group::Rare => names::KERNELS,
            Group::Gpu => names::FUSED,
            _ => return false,
        };
        row.direction != Way::Both && row.implementation == ours
    });
    for row in kernels {
        let how = if row.in_place { "in place" } else { "into" };
        let axes = if row.axes == "single" {
            ""
        } else {
            ", two angles a pair"
        };
        let mut label = format!("{how}, {}{axes} {}", row.pairing, row.layout);
        if row.group == Group::Gpu {
            label = format!("{} x {}, {label}", row.shape, row.tokens);
        }
        let index = groups.iter().position(|group| group.label == label);
        let index = index.unwrap_or_else(|| {
            groups.push(BarGroup {
                label,
                bars: vec![None; DTYPES.len()],
            });
            groups.len() - 1
        });
        let dtype = DTYPES.iter().position(|dtype| *dtype == row.dtype);
        let Some(bar) = dtype.map(|dtype| &mut groups[index].bars[dtype]) else {
            continue;
        };
        if bar
            .as_ref()
            .is_none_or(|(ratio, _)| *ratio < row.copy_ratio)
        {
            *bar = Some((row.copy_ratio, format!("{:.2}", row.copy_ratio)));
        }
    }
    BarChart {
        title: "Time over that of a plain copy; in place, of a read-modify-write of the same bytes"
            .into(),
        series: DTYPES.map(|dtype| dtype.name().to_owned()).into(),
        groups,
        line: Some((1.1, "1.1".into())),
        logarithmic: false,
    }
}

/// The share of a step that rotation takes.
pub fn step(rows: &[StepRow]) -> BarChart {
    let groups = rows.iter().map(|row| BarGroup {
        label: format!("{}, {}", row.step, row.implementation),
        bars: vec![Some((
            100.0 * row.share,
            format!("{:.2} %", 100.0 * row.share),
        ))],
    });
    BarChart {
        title: "Share of a training step that rotation takes, %".into(),
        series: vec!["rotation".into()],
        groups: groups.collect(),
        line: Some((3.0, "3 %".into())),
        logarithmic: false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bar_is_as_long_as_its_value_and_text_is_escaped() {
        let bar = |value: f64| Some((value, format!("{value}")));
        let chart = BarChart {
            title: "a < b".into(),
            series: vec!["one".into(), "two".into()],
            groups: vec![BarGroup {
                label: "group".into(),
                bars: vec![bar(2.0), bar(1.0)],
            }],
            line: Some((1.0, "limit".into())),
            logarithmic: false,
        };
        let svg = chart.svg().unwrap();
        let whole = WIDTH - LABELS - RIGHT;
        assert!(svg.contains(&format!("width=\"{whole}\"")), "{svg}");
        assert!(svg.contains(&format!("width=\"{}\"", whole / 2)), "{svg}");
        assert!(svg.contains("a &lt; b"));
    }
}
