//! `curves.svg`: loss, gradient norm, rate and rewards over the steps, from the log.

use std::error::Error;
use std::path::Path;

use plotters::prelude::*;
use serde::Deserialize;

use crate::svg::{self, Area, BLUE, Drawn, FONT, ORANGE};

/// Width and height of one chart.
const CHART: (i32, i32) = (480, 380);

/// The fields of a line of the log that are drawn.
#[derive(Deserialize)]
struct Line {
    step: usize,
    loss: Option<f64>,
    validation_loss: Option<f64>,
    gradient_norm: Option<f64>,
    learning_rate: Option<f64>,
    reward_chosen: Option<f64>,
    reward_rejected: Option<f64>,
    reward: Option<f64>,
    validation_reward: Option<f64>,
    entropy: Option<f64>,
    kl: Option<f64>,
}

/// A title, and its curves by name.
type Chart = (
    &'static str,
    &'static [(&'static str, fn(&Line) -> Option<f64>)],
);

/// Those without a point are left out.
const CHARTS: [Chart; 6] = [
    (
        "Loss (nats per labelled token)",
        &[
            ("training", |line| line.loss),
            ("validation", |line| match line.validation_reward {
                None => line.validation_loss,
                Some(_) => None,
            }),
        ],
    ),
    (
        "Gradient norm",
        &[("before clipping", |line| line.gradient_norm)],
    ),
    ("Learning rate", &[("decoder", |line| line.learning_rate)]),
    (
        "Rewards",
        &[
            ("chosen", |line| line.reward_chosen),
            ("rejected", |line| line.reward_rejected),
        ],
    ),
    (
        "Reward",
        &[
            ("sampled answers", |line| line.reward),
            ("validation, likeliest answers", |line| {
                line.validation_reward
            }),
        ],
    ),
    (
        "Nats per token",
        &[
            ("entropy", |line| line.reward.and(line.entropy)),
            ("divergence from the reference", |line| {
                line.reward.and(line.kl)
            }),
        ],
    ),
];

/// Draws a run by its log.
///
/// # Errors
/// If the log cannot be read or the picture not be written.
pub(super) fn draw(log: &Path, picture: &Path) -> Result<(), Box<dyn Error>> {
    let text = plain_files::read_text(log, u64::MAX)?;
    let lines: Vec<Line> = text
        .lines()
        .map(serde_json::from_str)
        .collect::<Result<_, _>>()?;
    let points = |of: fn(&Line) -> Option<f64>| -> Vec<(f64, f64)> {
        let points = lines
            .iter()
            .filter_map(|line| Some((line.step as f64, of(line)?)));
        points.collect()
    };
    let is_drawn = |(_, curves): &&Chart| curves.iter().any(|(_, of)| !points(*of).is_empty());
    let charts: Vec<&Chart> = CHARTS.iter().filter(is_drawn).collect();
    let (width, height) = CHART;
    svg::draw(picture, (width * charts.len() as i32, height), |area| {
        let areas = area.split_evenly((1, charts.len()));
        for (area, (title, curves)) in areas.iter().zip(&charts) {
            let curves = curves.iter().map(|(name, of)| (*name, points(*of)));
            chart(area, title, &curves.collect::<Vec<_>>())?;
        }
        Ok(())
    })
}

fn chart(area: &Area<'_>, title: &str, curves: &[(&str, Vec<(f64, f64)>)]) -> Drawn {
    let all = || curves.iter().flat_map(|(_, points)| points);
    let steps = all().map(|(step, _)| *step).fold(2.0, f64::max);
    let top = all().map(|(_, value)| *value).fold(0.0, f64::max) * 1.05;
    let top = if top > 0.0 { top } else { 1.0 };
    let low = all().map(|(_, value)| *value).fold(0.0, f64::min) * 1.05;
    let mut chart = ChartBuilder::on(area)
        .margin(14)
        .caption(title, (FONT, 19))
        .x_label_area_size(40)
        .y_label_area_size(60)
        .build_cartesian_2d(0.0..steps, low..top)?;
    let label = |value: &f64| {
        if top < 0.1 {
            format!("{value:.1e}")
        } else {
            format!("{value:.1}")
        }
    };
    svg::axes(&mut chart, ("step", 6), ("", 6), &label)?;
    for ((name, points), color) in curves.iter().zip([BLUE, ORANGE]) {
        if !points.is_empty() {
            let points = points.iter().copied();
            svg::line(&mut chart, points, color.stroke_width(2), Some(name))?;
        }
    }
    svg::legend(&mut chart, SeriesLabelPosition::UpperRight)
}
