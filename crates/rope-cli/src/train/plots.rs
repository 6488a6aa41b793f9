//! Plots of a run: loss and accuracy, and where the model looks for an answer.

use std::path::Path;

use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::data::Question;
use super::error::{Result, TrainError};
use super::trainer::{History, Test, Trainer};

const FONT: &str = "sans-serif";
const TRAINING: RGBColor = RGBColor(31, 119, 180);
const UNSEEN: RGBColor = RGBColor(214, 90, 14);
const REFERENCE: RGBColor = RGBColor(110, 110, 110);

/// Steps that a drawn point is averaged over, as a share of the run.
const SMOOTHED_PART: usize = 60;

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Drawn = std::result::Result<(), Box<dyn std::error::Error>>;

/// Loss and accuracy over the steps; `blind` is the best accuracy without positions.
pub(crate) fn curves(path: &Path, history: &History, last: &Test, blind: f64) -> Result<()> {
    draw_curves(path, history, last, blind).map_err(TrainError::file("draw", path))
}

fn draw_curves(path: &Path, history: &History, last: &Test, blind: f64) -> Drawn {
    let area = SVGBackend::new(path, (1000, 420)).into_drawing_area();
    area.fill(&WHITE)?;
    let (left, right) = area.split_horizontally(500);
    let tests: Vec<Test> = history.tests.iter().copied().chain([*last]).collect();
    let steps = history.losses.len().max(2) as f64;

    let highest = history.losses.iter().copied().fold(0.1, f32::max);
    draw_curve(
        &left,
        &Curve {
            title: "Loss (cross entropy, nats)",
            steps,
            top: f64::from(highest) * 1.05,
            percent: false,
            training: smoothed(&history.losses),
            unseen: tests.iter().map(|t| (t.step, t.loss)).collect(),
            reference: (
                f64::from(super::data::CLASSES as u32).ln(),
                "any digit alike",
            ),
        },
    )?;
    draw_curve(
        &right,
        &Curve {
            title: "Accuracy (%)",
            steps,
            top: 1.0,
            percent: true,
            training: smoothed(&history.accuracies),
            unseen: tests.iter().map(|t| (t.step, t.accuracy)).collect(),
            reference: (blind, "best without positions"),
        },
    )?;
    area.present()?;
    Ok(())
}

/// One quantity over the steps.
struct Curve {
    title: &'static str,
    steps: f64,
    top: f64,
    percent: bool,
    training: Vec<(usize, f32)>,
    unseen: Vec<(usize, f32)>,
    reference: (f64, &'static str),
}

fn draw_curve(area: &Area<'_>, curve: &Curve) -> Drawn {
    let mut chart = ChartBuilder::on(area)
        .margin(14)
        .caption(curve.title, (FONT, 19))
        .x_label_area_size(40)
        .y_label_area_size(46)
        .build_cartesian_2d(0.0..curve.steps, 0.0..curve.top)?;
    let scale = if curve.percent { 100.0 } else { 1.0 };
    let digits = usize::from(!curve.percent);
    chart
        .configure_mesh()
        .light_line_style(TRANSPARENT)
        .bold_line_style(BLACK.mix(0.08))
        .axis_style(BLACK.mix(0.5))
        .x_labels(6)
        .y_labels(6)
        .x_desc("step")
        .x_label_formatter(&|step| format!("{step:.0}"))
        .y_label_formatter(&|value| format!("{:.digits$}", value * scale))
        .label_style((FONT, 13))
        .draw()?;

    let points = |values: &[(usize, f32)]| -> Vec<(f64, f64)> {
        values
            .iter()
            .map(|&(step, value)| (step as f64, f64::from(value)))
            .collect()
    };
    let legend = |color: RGBColor| {
        move |(x, y)| PathElement::new([(x, y), (x + 18, y)], color.stroke_width(2))
    };
    let (level, meaning) = curve.reference;
    chart
        .draw_series(DashedLineSeries::new(
            [(0.0, level), (curve.steps, level)],
            5,
            4,
            REFERENCE.stroke_width(1),
        ))?
        .label(meaning)
        .legend(legend(REFERENCE));
    chart
        .draw_series(LineSeries::new(
            points(&curve.training),
            TRAINING.stroke_width(2),
        ))?
        .label("training")
        .legend(legend(TRAINING));
    chart
        .draw_series(LineSeries::new(
            points(&curve.unseen),
            UNSEEN.stroke_width(2),
        ))?
        .label("unseen digits")
        .legend(legend(UNSEEN));
    chart
        .configure_series_labels()
        .position(if curve.percent {
            SeriesLabelPosition::LowerRight
        } else {
            SeriesLabelPosition::UpperRight
        })
        .background_style(WHITE.mix(0.85))
        .label_font((FONT, 13))
        .draw()?;
    Ok(())
}

/// Means over runs of steps, at the last step of each.
fn smoothed(values: &[f32]) -> Vec<(usize, f32)> {
    let size = values.len().div_ceil(SMOOTHED_PART).max(1);
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
/// Width that the panels of one layer should fit in.
const WIDTH: i32 = 1500;

/// The clip of `question`, once for each layer and head, with the attention of the last token laid over it.
pub(crate) fn attention(path: &Path, trainer: &Trainer, question: &Question) -> Result<()> {
    draw_attention(path, trainer, question).map_err(TrainError::file("draw", path))
}

fn draw_attention(path: &Path, trainer: &Trainer, question: &Question) -> Drawn {
    let clip = trainer.config().clip();
    let answer = trainer.answer(question)?;
    let layers: Vec<Vec<(String, Vec<f32>)>> = answer
        .attention
        .iter()
        .enumerate()
        .map(|(layer, heads)| panels_of_layer(layer, heads))
        .collect();

    let panels = layers.iter().map(Vec::len).max().unwrap_or(1) as i32;
    let pixels_wide = 8 * (clip.frames * clip.columns) as i32;
    let pixel = ((WIDTH / panels - PANEL_GAP) / pixels_wide).clamp(1, LARGEST_PIXEL);
    let cell = 8 * pixel + 2;
    let panel_width =
        clip.frames as i32 * (clip.columns as i32 * cell + FRAME_GAP) - FRAME_GAP + PANEL_GAP;
    let panel_height = PANEL_TITLE + clip.rows as i32 * cell + PANEL_GAP;
    let size = (
        (2 * MARGIN + panels * panel_width - PANEL_GAP).max(640) as u32,
        (HEADING + layers.len() as i32 * panel_height + MARGIN - PANEL_GAP) as u32,
    );

    let area = SVGBackend::new(path, size).into_drawing_area();
    area.fill(&WHITE)?;
    let text = |size: i32| (FONT, size).into_text_style(&area);
    let truth = trainer.digits().answer(question);
    let verdict = if answer.digit == truth {
        "right".to_owned()
    } else {
        format!("wrong, it is {truth}")
    };
    area.draw(&Text::new(
        format!(
            "{} The model says {} ({:.0} %): {verdict}.",
            clip.question(question.cell),
            answer.digit,
            100.0 * answer.probability
        ),
        (MARGIN, 18),
        text(21),
    ))?;
    area.draw(&Text::new(
        format!(
            "Orange: share of the last token's attention. Blue: the cell asked for.{}",
            if clip.frames > 1 {
                " Frames from left to right."
            } else {
                ""
            }
        ),
        (MARGIN, 50),
        text(14).color(&REFERENCE),
    ))?;

    for (row, panels) in layers.iter().enumerate() {
        for (column, (title, weights)) in panels.iter().enumerate() {
            let x0 = MARGIN + column as i32 * panel_width;
            let y0 = HEADING + row as i32 * panel_height;
            area.draw(&Text::new(title.clone(), (x0, y0), text(13)))?;
            for (index, weight) in weights.iter().enumerate() {
                let [frame, line, place] = clip.place(index).map(|n| n as i32);
                let x = x0 + frame * (clip.columns as i32 * cell + FRAME_GAP) + place * cell;
                let y = y0 + PANEL_TITLE + line * cell;
                let image = trainer.digits().image(question.digits[index]);
                draw_cell(&area, (x, y), pixel, image, *weight)?;
                if index == question.cell {
                    area.draw(&Rectangle::new(
                        [(x, y), (x + 8 * pixel, y + 8 * pixel)],
                        TRAINING.stroke_width(3),
                    ))?;
                }
            }
        }
    }
    area.present()?;
    Ok(())
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
        let (px, py) = (
            x + (index % 8) as i32 * pixel,
            y + (index / 8) as i32 * pixel,
        );
        let grey = (255.0 - 205.0 * ink) as u8;
        area.draw(&Rectangle::new(
            [(px, py), (px + pixel, py + pixel)],
            RGBColor(grey, grey, grey).filled(),
        ))?;
    }
    let side = 8 * pixel;
    area.draw(&Rectangle::new(
        [(x, y), (x + side, y + side)],
        UNSEEN.mix(0.75 * f64::from(weight)).filled(),
    ))?;
    if pixel >= 4 {
        let style = (FONT, 12)
            .into_text_style(area)
            .color(&BLACK)
            .pos(Pos::new(HPos::Right, VPos::Bottom));
        area.draw(&Rectangle::new(
            [(x + side - 28, y + side - 14), (x + side, y + side)],
            WHITE.mix(0.7).filled(),
        ))?;
        area.draw(&Text::new(
            format!("{:.0} %", 100.0 * weight),
            (x + side - 2, y + side - 1),
            style,
        ))?;
    }
    Ok(())
}
