//! The parts that the program's pictures have in common.

use std::error::Error;
use std::path::Path;

use plotters::coord::Shift;
use plotters::coord::types::RangedCoordf64;
use plotters::element::DashedPathElement;
use plotters::prelude::*;

/// Pixels of a dash and of the gap between two.
const DASH: i32 = 6;
const GAP: i32 = 4;
/// Pixels of a line in the legend.
const SAMPLE: i32 = 18;

pub(crate) const FONT: &str = "sans-serif";
pub(crate) const BLUE: RGBColor = RGBColor(31, 119, 180);
pub(crate) const ORANGE: RGBColor = RGBColor(214, 90, 14);
pub(crate) const GREEN: RGBColor = RGBColor(44, 150, 70);
pub(crate) const GREY: RGBColor = RGBColor(110, 110, 110);

pub(crate) type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
pub(crate) type Chart<'a, 'b> =
    ChartContext<'a, SVGBackend<'b>, Cartesian2d<RangedCoordf64, RangedCoordf64>>;
pub(crate) type Drawn = Result<(), Box<dyn Error>>;

/// Paints on white, and writes the file when the picture is complete. Sizes are pixels.
///
/// # Errors
/// If the file cannot be written.
pub(crate) fn draw(
    path: &Path,
    (width, height): (i32, i32),
    paint: impl FnOnce(&Area<'_>) -> Drawn,
) -> Drawn {
    let mut svg = String::new();
    let area = SVGBackend::with_string(&mut svg, (width as u32, height as u32)).into_drawing_area();
    area.fill(&WHITE)?;
    paint(&area)?;
    area.present()?;
    drop(area);
    Ok(plain_files::replace(path, svg.as_bytes()).map_err(|error| error.cause)?)
}

/// Writes text below and to the right of a point.
pub(crate) fn text(
    area: &Area<'_>,
    text: impl Into<String>,
    at: (i32, i32),
    size: i32,
    color: RGBColor,
) -> Drawn {
    let style = (FONT, size).into_text_style(area).color(&color);
    Ok(area.draw(&Text::new(text.into(), at, style))?)
}

/// Draws a square by its upper left corner.
pub(crate) fn square(
    area: &Area<'_>,
    (x, y): (i32, i32),
    side: i32,
    style: impl Into<ShapeStyle>,
) -> Drawn {
    Ok(area.draw(&Rectangle::new([(x, y), (x + side, y + side)], style))?)
}

/// Draws the axes, each with a name, if it is not empty, and a number of labels.
pub(crate) fn axes(
    chart: &mut Chart<'_, '_>,
    (x_name, x_labels): (&str, usize),
    (y_name, y_labels): (&str, usize),
    y_label: &dyn Fn(&f64) -> String,
) -> Drawn {
    let mut mesh = chart.configure_mesh();
    mesh.light_line_style(TRANSPARENT)
        .bold_line_style(BLACK.mix(0.07))
        .axis_style(BLACK.mix(0.5))
        .x_desc(x_name)
        .x_labels(x_labels)
        .x_label_formatter(&|x| format!("{x:.0}"))
        .y_labels(y_labels)
        .y_label_formatter(y_label)
        .label_style((FONT, 13));
    if !y_name.is_empty() {
        mesh.y_desc(y_name);
    }
    Ok(mesh.draw()?)
}

/// Draws a line, with an entry in the legend if it has a name.
pub(crate) fn line(
    chart: &mut Chart<'_, '_>,
    points: impl IntoIterator<Item = (f64, f64)>,
    style: ShapeStyle,
    name: Option<&str>,
) -> Drawn {
    let drawn = chart.draw_series(LineSeries::new(points, style))?;
    if let Some(name) = name {
        drawn
            .label(name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + SAMPLE, y)], style));
    }
    Ok(())
}

/// Draws a dashed line between two points, with an entry in the legend if it has a name.
pub(crate) fn dashed(
    chart: &mut Chart<'_, '_>,
    ends: [(f64, f64); 2],
    style: ShapeStyle,
    name: Option<&str>,
) -> Drawn {
    let drawn = chart.draw_series(DashedLineSeries::new(ends, DASH, GAP, style))?;
    if let Some(name) = name {
        drawn.label(name).legend(move |(x, y)| {
            DashedPathElement::new([(x, y), (x + SAMPLE, y)], DASH, GAP, style)
        });
    }
    Ok(())
}

/// Draws the legend.
pub(crate) fn legend<'a, 'b: 'a>(
    chart: &mut Chart<'a, 'b>,
    position: SeriesLabelPosition,
) -> Drawn {
    chart
        .configure_series_labels()
        .position(position)
        .background_style(WHITE.mix(0.85))
        .border_style(BLACK.mix(0.15))
        .label_font((FONT, 13))
        .draw()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn the_legend_of_a_dashed_line_is_dashed() {
        let file = std::env::temp_dir().join(format!("mrope-dashed-{}.svg", std::process::id()));
        draw(&file, (300, 200), |area| {
            let mut chart =
                ChartBuilder::on(area).build_cartesian_2d(0.0_f64..1.0, 0.0_f64..1.0)?;
            let (ends, style) = ([(0.0, 0.5), (1.0, 0.5)], GREY.stroke_width(1));
            dashed(&mut chart, ends, style, Some("level"))?;
            legend(&mut chart, SeriesLabelPosition::UpperRight)
        })
        .expect("draws");
        let svg = std::fs::read_to_string(&file).expect("reads");
        std::fs::remove_file(&file).expect("removes");
        let mut rows = BTreeSet::new();
        let is_grey = |line: &&str| line.starts_with("<polyline") && line.contains("#6E6E6E");
        for line in svg.lines().filter(is_grey) {
            let (_, points) = line.split_once("points=\"").expect("points");
            let points = points.trim_end_matches(|c: char| !c.is_ascii_digit());
            let points: Vec<(i32, i32)> = points
                .split_whitespace()
                .map(|point| {
                    let (x, y) = point.split_once(',').expect("a point");
                    (x.parse().expect("x"), y.parse().expect("y"))
                })
                .collect();
            let (first, last) = (points[0], points[points.len() - 1]);
            assert!(last.0 - first.0 < SAMPLE, "{line}");
            rows.insert(first.1);
        }
        assert_eq!(rows.len(), 2, "the line and its sample: {svg}");
    }
}
