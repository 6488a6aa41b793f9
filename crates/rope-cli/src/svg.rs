//! The parts that the program's pictures have in common.

use std::error::Error;
use std::path::Path;

use plotters::chart::SeriesAnno;
use plotters::coord::Shift;
use plotters::coord::types::RangedCoordf64;
use plotters::prelude::*;

use crate::files;

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
    Ok(files::replace(path, svg.as_bytes())?)
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
    in_legend(drawn, style, name);
    Ok(())
}

/// Draws a dashed line between two points, with an entry in the legend if it has a name.
pub(crate) fn dashed(
    chart: &mut Chart<'_, '_>,
    ends: [(f64, f64); 2],
    style: ShapeStyle,
    name: Option<&str>,
) -> Drawn {
    let drawn = chart.draw_series(DashedLineSeries::new(ends, 6, 4, style))?;
    in_legend(drawn, style, name);
    Ok(())
}

fn in_legend(series: &mut SeriesAnno<'_, SVGBackend<'_>>, style: ShapeStyle, name: Option<&str>) {
    if let Some(name) = name {
        let sample = move |(x, y)| PathElement::new([(x, y), (x + 18, y)], style);
        series.label(name).legend(sample);
    }
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
