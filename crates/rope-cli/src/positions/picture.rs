//! Position ids drawn: over the sequence, and grid by grid.

use std::path::Path;

use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use rope_core::position_ids::PositionIds;

use crate::svg::{self, Area, BLUE, Drawn, FONT, GREEN, GREY, ORANGE};
use rope_check::prompt::{ExpandedPrompt, PartTokens, PromptPart, id_range, id_text};

const VISION: RGBColor = RGBColor(120, 120, 140);
/// Name, colour and line width of each axis. On text the three coincide: drawn from wide to narrow,
/// all of them stay visible.
const AXES: [(&str, RGBColor, u32); 3] = [
    ("T (time)", BLUE, 7),
    ("H (height)", ORANGE, 4),
    ("W (width)", GREEN, 2),
];

const WIDTH: i32 = 1100;
const MARGIN: i32 = 24;
const HEADING: i32 = 46;
const CHART: i32 = 360;
const LEFT_LABELS: i32 = 52;
const PANEL_TITLE: i32 = 44;
const PANEL_GAP: i32 = 34;
const MAP_GAP: i32 = 22;
const LARGEST_CELL: i32 = 30;
const SMALLEST_CELL: i32 = 2;
/// Cells of this size hold a number.
const NUMBERED_CELL: i32 = 20;
/// A grid's maps are drawn at most this wide, and this high.
const LARGEST_MAP: i32 = 330;
/// Rows and columns that a map has room for. Of more, every second is drawn, or every third and so
/// on.
const MOST_CELLS: usize = (LARGEST_MAP / SMALLEST_CELL) as usize;
/// Tokens whose ids the chart has room for, several of them to a pixel. Of more, it shows some.
const MOST_TOKENS: usize = 4096;

/// Draws ids over tokens, then heat maps of each grid.
pub(super) fn draw(
    path: &Path,
    model: &str,
    prompt: &ExpandedPrompt,
    found: &PositionIds,
) -> Drawn {
    let panels: Vec<Panel> = prompt
        .spans
        .iter()
        .filter(|span| matches!(span.part, PromptPart::Image(_) | PromptPart::Video(..)))
        .map(|span| Panel::new(span, prompt, found))
        .collect();
    let (corners, bottom) = flow(&panels);
    svg::draw(path, (WIDTH, bottom), |area| {
        let title = format!("Position ids of a prompt, {model}");
        svg::text(area, title, (MARGIN, 16), 21, BLACK)?;
        draw_sequence(area, prompt, found)?;
        for (panel, corner) in panels.iter().zip(corners) {
            panel.draw(area, corner)?;
        }
        Ok(())
    })
}

/// The upper left corners of the panels, from left to right and row by row, and the height of the
/// picture.
fn flow(panels: &[Panel]) -> (Vec<(i32, i32)>, i32) {
    let (mut x, mut y, mut row_height) = (MARGIN, HEADING + CHART + MARGIN, 0);
    let mut corners = Vec::new();
    for panel in panels {
        if x > MARGIN && x + panel.width() > WIDTH - MARGIN {
            (x, y) = (MARGIN, y + row_height + PANEL_GAP);
            row_height = 0;
        }
        corners.push((x, y));
        x += panel.width() + PANEL_GAP;
        row_height = row_height.max(panel.height());
    }
    (corners, y + row_height + MARGIN)
}

fn draw_sequence(area: &Area<'_>, prompt: &ExpandedPrompt, found: &PositionIds) -> Drawn {
    let tokens = found.tokens();
    let ids = (0..3).flat_map(|axis| found.axis(axis).iter().copied());
    let highest = ids.fold(0.0, f64::max);
    // Room for the names of the grids.
    let top = (highest * 1.14).max(1.0);
    let chart_area = area.clone().shrink(
        (MARGIN, HEADING),
        ((WIDTH - 2 * MARGIN) as u32, CHART as u32),
    );
    let mut chart = ChartBuilder::on(&chart_area)
        .x_label_area_size(42)
        .y_label_area_size(LEFT_LABELS)
        .build_cartesian_2d(-0.5..tokens as f64 - 0.5, 0.0..top)?;
    let label = |id: &f64| format!("{id:.0}");
    svg::axes(&mut chart, ("token", 12), ("position id", 8), &label)?;

    let pixels_per_token = f64::from(WIDTH - 2 * MARGIN - LEFT_LABELS) / tokens as f64;
    let label = (FONT, 13)
        .into_text_style(area)
        .color(&GREY)
        .pos(Pos::new(HPos::Center, VPos::Top));
    for span in &prompt.spans {
        if matches!(span.part, PromptPart::Text(_)) {
            continue;
        }
        let (start, end) = (span.tokens.start as f64 - 0.5, span.tokens.end as f64 - 0.5);
        let band = Rectangle::new([(start, 0.0), (end, top)], VISION.mix(0.13).filled());
        chart.draw_series([band])?;
        let name = span.name();
        if (end - start) * pixels_per_token > 8.0 * name.len() as f64 {
            let place = ((start + end) / 2.0, top * 0.985);
            chart.draw_series([Text::new(name, place, label.clone())])?;
        }
    }
    let inner = 1..prompt.cu_seqlens.len() - 1;
    for boundary in &prompt.cu_seqlens[inner] {
        let x = *boundary as f64 - 0.5;
        let style = BLACK.mix(0.6).stroke_width(1);
        svg::dashed(&mut chart, [(x, 0.0), (x, top)], style, None)?;
    }
    for (axis, (name, color, width)) in AXES.into_iter().enumerate() {
        let ids = found.axis(axis);
        for (index, sequence) in prompt.cu_seqlens.windows(2).enumerate() {
            // A token has one id, so the line is level over the token's width.
            let step = tokens.div_ceil(MOST_TOKENS);
            let last = sequence[1]
                .checked_sub(1)
                .filter(|last| *last >= sequence[0]);
            let points = (sequence[0]..sequence[1])
                .step_by(step)
                .chain(last.filter(|_| step > 1))
                .flat_map(|token| [-0.5, 0.5].map(|edge| (token as f64 + edge, ids[token])));
            let name = (index == 0).then_some(name);
            svg::line(&mut chart, points, color.stroke_width(width), name)?;
        }
    }
    svg::legend(&mut chart, SeriesLabelPosition::Coordinate(10, 30))
}

/// The maps of one grid.
struct Panel {
    title: String,
    maps: Vec<Map>,
    cell: i32,
}

/// The ids of one axis over rows and columns.
struct Map {
    axis: usize,
    caption: &'static str,
    columns: usize,
    ids: Vec<f64>,
    /// Of all ids, also those that are not drawn.
    range: String,
    /// The part of the rows and columns that is drawn, in words; empty if all are.
    drawn: String,
}

impl Map {
    /// Of ids, row by row. Of more rows or columns than there is room for it draws some.
    fn new(axis: usize, caption: &'static str, columns: usize, ids: &[f64]) -> Self {
        let sizes = [("rows", ids.len() / columns), ("columns", columns)];
        let steps = sizes.map(|(name, count)| (name, count.div_ceil(MOST_CELLS)));
        let [(_, row_step), (_, column_step)] = steps;
        let drawn = steps.iter().filter(|(_, step)| *step > 1);
        let drawn = drawn.map(|(name, step)| format!(", 1 in {step} {name} drawn"));
        let rows = ids.chunks(columns).step_by(row_step);
        let kept = rows.flat_map(|row| row.iter().step_by(column_step).copied());
        Self {
            axis,
            caption,
            columns: columns.div_ceil(column_step),
            ids: kept.collect(),
            range: id_range(ids),
            drawn: drawn.collect(),
        }
    }

    fn rows(&self) -> usize {
        self.ids.len() / self.columns
    }
}

impl Panel {
    fn new(span: &PartTokens, prompt: &ExpandedPrompt, found: &PositionIds) -> Self {
        let [frames, height, width] = span.merged;
        let placeholders = prompt.shown(span);
        let of = |axis: usize, tokens: &[usize]| -> Vec<f64> {
            tokens
                .iter()
                .map(|token| found.axis(axis)[*token])
                .collect()
        };
        let first_frame = &placeholders[..height * width];
        let first_tokens: Vec<usize> = placeholders
            .iter()
            .step_by(height * width)
            .copied()
            .collect();
        let map = |axis, caption, columns, tokens: &[usize]| {
            Map::new(axis, caption, columns, &of(axis, tokens))
        };
        let maps = if frames > 1 {
            // H and W of later frames may start elsewhere; T is one id per frame.
            vec![
                map(1, "H, first frame", width, first_frame),
                map(2, "W, first frame", width, first_frame),
                map(0, "T, frame by frame", frames, &first_tokens),
            ]
        } else {
            vec![
                map(1, "H", width, first_frame),
                map(2, "W", width, first_frame),
            ]
        };
        let size = if frames > 1 {
            format!("{frames} frames of {height} x {width} tokens")
        } else {
            format!(
                "{height} x {width} tokens, T = {}",
                id_text(found.axis(0)[first_frame[0]])
            )
        };
        let widest = maps.iter().map(|map| map.columns).max().unwrap_or(1) as i32;
        Self {
            title: format!("{}: {size}{}", span.name(), maps[0].drawn),
            cell: (LARGEST_MAP / widest).clamp(SMALLEST_CELL, LARGEST_CELL),
            maps,
        }
    }

    fn width(&self) -> i32 {
        let maps: i32 = self.maps.iter().map(|map| self.map_width(map)).sum();
        let title = self.title.len() as i32 * 8;
        (maps + (self.maps.len() as i32 - 1) * MAP_GAP).max(title)
    }

    /// The width of the cells or of the caption, whichever is larger.
    fn map_width(&self, map: &Map) -> i32 {
        (map.columns as i32 * self.cell).max(self.caption(map).len() as i32 * 7)
    }

    /// The caption, with the range of the ids where the cells are too small to hold numbers.
    fn caption(&self, map: &Map) -> String {
        if self.cell >= NUMBERED_CELL {
            map.caption.to_owned()
        } else {
            format!("{}, {}", map.caption, map.range)
        }
    }

    fn height(&self) -> i32 {
        let rows = self.maps.iter().map(Map::rows).max().unwrap_or(0);
        PANEL_TITLE + rows as i32 * self.cell
    }

    fn draw(&self, area: &Area<'_>, (left, top): (i32, i32)) -> Drawn {
        svg::text(area, &self.title, (left, top), 15, BLACK)?;
        let mut x = left;
        for map in &self.maps {
            let (_, color, _) = AXES[map.axis];
            svg::text(area, self.caption(map), (x, top + 23), 13, color)?;
            self.draw_map(area, map, (x, top + PANEL_TITLE))?;
            x += self.map_width(map) + MAP_GAP;
        }
        Ok(())
    }

    fn draw_map(&self, area: &Area<'_>, map: &Map, (left, top): (i32, i32)) -> Drawn {
        let (_, color, _) = AXES[map.axis];
        let low = map.ids.iter().copied().fold(f64::INFINITY, f64::min);
        let high = map.ids.iter().copied().fold(low, f64::max);
        let cell = self.cell;
        let gap = i32::from(cell >= 8);
        for (index, id) in map.ids.iter().enumerate() {
            let (row, column) = ((index / map.columns) as i32, (index % map.columns) as i32);
            let (x, y) = (left + column * cell, top + row * cell);
            let share = (id - low) / (high - low).max(1.0);
            let shade = color.mix(0.12 + 0.78 * share);
            svg::square(area, (x, y), cell - gap, shade.filled())?;
            if cell >= NUMBERED_CELL {
                let style = (FONT, 12)
                    .into_text_style(area)
                    .color(if share > 0.7 { &WHITE } else { &BLACK })
                    .pos(Pos::new(HPos::Center, VPos::Center));
                let middle = (x + (cell - gap) / 2, y + (cell - gap) / 2);
                area.draw(&Text::new(id_text(*id), middle, style))?;
            }
        }
        Ok(())
    }
}
