//! Plots of a run: loss and accuracy, and where the model looks for an answer.

use std::path::Path;

use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use mrope_digits::{CLASSES, History, Question, SIDE, Test, Trainer};

use super::error::{Result, TrainError};
use crate::svg::{self, Area, BLUE, Drawn, FONT, GREY, ORANGE};

/// Points of a training curve: each is the mean of as many steps as that takes.
const POINTS: usize = 60;

/// Loss and accuracy over the steps; `blind` is the best accuracy without positions.
pub(crate) fn curves(path: &Path, history: &History, last: &Test, blind: f64) -> Result<()> {
    let tests: Vec<Test> = history.tests.iter().copied().chain([*last]).collect();
    let steps = history.losses.len().max(2) as f64;
    let highest = history.losses.iter().copied().fold(0.1, f32::max);
    let loss = Curve {
        title: "Loss (cross entropy, nats)",
        steps,
        top: f64::from(highest) * 1.05,
        percent: false,
        training: smoothed(&history.losses),
        unseen: tests.iter().map(|t| (t.step, t.loss)).collect(),
        reference: ((CLASSES as f64).ln(), "all digits equally likely"),
    };
    let accuracy = Curve {
        title: "Accuracy (%)",
        steps,
        top: 1.0,
        percent: true,
        training: smoothed(&history.accuracies),
        unseen: tests.iter().map(|t| (t.step, t.accuracy)).collect(),
        reference: (blind, "best without positions"),
    };
    svg::draw(path, (1000, 420), |area| {
        let (left, right) = area.split_horizontally(500);
        loss.draw(&left)?;
        accuracy.draw(&right)
    })
    .map_err(TrainError::file("draw", path))
}

/// One quantity over the steps.
struct Curve {
    title: &'static str,
    steps: f64,
    top: f64,
    percent: bool,
    training: Vec<(usize, f32)>,
    unseen: Vec<(usize, f32)>,
    /// A level to compare with, and what it is.
    reference: (f64, &'static str),
}

impl Curve {
    fn draw(&self, area: &Area<'_>) -> Drawn {
        let mut chart = ChartBuilder::on(area)
            .margin(14)
            .caption(self.title, (FONT, 19))
            .x_label_area_size(40)
            .y_label_area_size(46)
            .build_cartesian_2d(0.0..self.steps, 0.0..self.top)?;
        let (scale, digits, position) = if self.percent {
            (100.0, 0, SeriesLabelPosition::LowerRight)
        } else {
            (1.0, 1, SeriesLabelPosition::UpperRight)
        };
        let label = |value: &f64| format!("{:.digits$}", value * scale);
        svg::axes(&mut chart, ("step", 6), ("", 6), &label)?;
        let (level, meaning) = self.reference;
        let ends = [(0.0, level), (self.steps, level)];
        svg::dashed(&mut chart, ends, GREY.stroke_width(1), Some(meaning))?;
        for (values, color, name) in [
            (&self.training, BLUE, "training"),
            (&self.unseen, ORANGE, "unseen digits"),
        ] {
            let points = values
                .iter()
                .map(|&(step, value)| (step as f64, f64::from(value)));
            svg::line(&mut chart, points, color.stroke_width(2), Some(name))?;
        }
        svg::legend(&mut chart, position)
    }
}

/// Means over groups of steps, at the last step of each.
fn smoothed(values: &[f32]) -> Vec<(usize, f32)> {
    let size = values.len().div_ceil(POINTS).max(1);
    values
        .chunks(size)
        .enumerate()
        .map(|(index, chunk)| {
            let mean = chunk.iter().sum::<f32>() / chunk.len() as f32;
            (index * size + chunk.len(), mean)
        })
        .collect()
}

const MARGIN: i32 = 24;
const HEADING: i32 = 86;
const PANEL_TITLE: i32 = 22;
const PANEL_GAP: i32 = 26;
const FRAME_GAP: i32 = 10;
/// Pixels of the plot for one pixel of a scan, where the clip is small.
const LARGEST_PIXEL: i32 = 7;
/// Width in which the panels of one layer should fit.
const WIDTH: i32 = 1500;

/// Pixels of the plot for one scan where a pixel of the scan takes `pixel`.
fn side(pixel: i32) -> i32 {
    SIDE as i32 * pixel
}

/// The clip of `question`, once for each layer and head, under the attention of the last token.
pub(crate) fn attention(path: &Path, trainer: &Trainer, question: &Question) -> Result<()> {
    let clip = trainer.config().clip;
    let answer = trainer.answer(question)?;
    let layers: Vec<Vec<(String, Vec<f32>)>> = answer
        .attention
        .iter()
        .enumerate()
        .map(|(layer, heads)| panels_of_layer(layer, heads))
        .collect();

    let [frames, rows, columns] = [clip.frames, clip.rows, clip.columns].map(|n| n as i32);
    let panels = layers.iter().map(Vec::len).max().unwrap_or(1) as i32;
    let pixel = (WIDTH / panels - PANEL_GAP) / (side(1) * frames * columns);
    let pixel = pixel.clamp(1, LARGEST_PIXEL);
    let cell = side(pixel) + 2;
    let frame = columns * cell + FRAME_GAP;
    let panel_width = frames * frame - FRAME_GAP + PANEL_GAP;
    let panel_height = PANEL_TITLE + rows * cell + PANEL_GAP;
    let size = (
        (2 * MARGIN + panels * panel_width - PANEL_GAP).max(640),
        HEADING + layers.len() as i32 * panel_height + MARGIN - PANEL_GAP,
    );

    let truth = trainer.digits().answer(question);
    let verdict = if answer.digit == truth {
        "right".to_owned()
    } else {
        format!("wrong, it is {truth}")
    };
    let title = format!(
        "{} The model says {} ({:.0} %): {verdict}.",
        clip.question(question.cell),
        answer.digit,
        100.0 * answer.probability
    );
    let order = if frames > 1 {
        " Frames from left to right."
    } else {
        ""
    };
    let key =
        format!("Orange: share of the last token's attention. Blue: the cell asked for.{order}");
    svg::draw(path, size, |area| {
        svg::text(area, title, (MARGIN, 18), 21, BLACK)?;
        svg::text(area, key, (MARGIN, 50), 14, GREY)?;
        for (layer, panels) in layers.iter().enumerate() {
            for (panel, (title, weights)) in panels.iter().enumerate() {
                let left = MARGIN + panel as i32 * panel_width;
                let top = HEADING + layer as i32 * panel_height;
                svg::text(area, title, (left, top), 13, BLACK)?;
                for (index, weight) in weights.iter().enumerate() {
                    let [time, row, column] = clip.coordinates(index).map(|n| n as i32);
                    let x = left + time * frame + column * cell;
                    let y = top + PANEL_TITLE + row * cell;
                    let image = trainer.digits().image(question.digits[index]);
                    draw_cell(area, (x, y), pixel, image, *weight)?;
                    if index == question.cell {
                        svg::square(area, (x, y), side(pixel), BLUE.stroke_width(3))?;
                    }
                }
            }
        }
        Ok(())
    })
    .map_err(TrainError::file("draw", path))
}

/// The mean over the heads, then each head.
fn panels_of_layer(layer: usize, heads: &[Vec<f32>]) -> Vec<(String, Vec<f32>)> {
    let mean = (0..heads[0].len())
        .map(|cell| heads.iter().map(|head| head[cell]).sum::<f32>() / heads.len() as f32)
        .collect();
    let heads = heads.iter().enumerate();
    std::iter::once((format!("Layer {}, mean", layer + 1), mean))
        .chain(heads.map(|(index, head)| (format!("head {}", index + 1), head.clone())))
        .collect()
}

fn draw_cell(area: &Area<'_>, (x, y): (i32, i32), pixel: i32, image: &[f32], weight: f32) -> Drawn {
    for (index, ink) in image.iter().enumerate() {
        let [row, column] = [index / SIDE, index % SIDE].map(|n| n as i32);
        let grey = (255.0 - 205.0 * ink) as u8;
        let corner = (x + column * pixel, y + row * pixel);
        svg::square(area, corner, pixel, RGBColor(grey, grey, grey).filled())?;
    }
    let side = side(pixel);
    let shade = ORANGE.mix(0.75 * f64::from(weight));
    svg::square(area, (x, y), side, shade.filled())?;
    if pixel >= 4 {
        let style = (FONT, 12)
            .into_text_style(area)
            .color(&BLACK)
            .pos(Pos::new(HPos::Right, VPos::Bottom));
        let (right, bottom) = (x + side, y + side);
        area.draw(&Rectangle::new(
            [(right - 28, bottom - 14), (right, bottom)],
            WHITE.mix(0.7).filled(),
        ))?;
        let share = format!("{:.0} %", 100.0 * weight);
        area.draw(&Text::new(share, (right - 2, bottom - 1), style))?;
    }
    Ok(())
}
