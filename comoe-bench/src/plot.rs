//! Tokens a second against slots, and below it on the same axis the hits that explain them, as one SVG.

use std::path::Path;

use plotters::coord::Shift;
use plotters::prelude::*;

use crate::error::{Error, Result};

const SIZE: (u32, u32) = (900, 760);
/// Colours that also people who see few colours can tell apart (Okabe and Ito 2008).
const COLOURS: [RGBColor; 6] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(230, 159, 0),
    RGBColor(120, 120, 120),
];

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Drawn = std::result::Result<(), Box<dyn std::error::Error>>;

/// A number of slots, measured.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Point {
    /// Slots, as [`Plot::slots`] counts them.
    pub slots: usize,
    /// Tokens a second.
    pub tokens_per_s: f64,
    /// Hits per access, 0 to 1.
    pub hit_rate: f64,
}

/// What is drawn.
#[derive(Debug, Clone, PartialEq)]
pub struct Plot {
    /// Above all.
    pub title: String,
    /// How slots are counted: `slots a layer`.
    pub slots: &'static str,
    /// By name, a line each.
    pub series: Vec<(String, Vec<Point>)>,
}

impl Plot {
    /// A plot without lines.
    pub fn new(title: String, slots: &'static str) -> Self {
        Self { title, slots, series: Vec::new() }
    }

    /// Puts a point on the line of this name.
    pub fn add(&mut self, name: &str, point: Point) {
        match self.series.iter_mut().find(|(n, _)| n == name) {
            Some((_, points)) => points.push(point),
            None => self.series.push((name.to_owned(), vec![point])),
        }
    }

    /// Draws it to a file.
    ///
    /// # Errors
    /// [`Error::Plot`] when nothing was measured, [`Error::Io`].
    pub fn write(&self, path: &Path) -> Result<()> {
        let bad = |reason: String| Error::Plot { path: path.to_owned(), reason };
        if self.series.is_empty() {
            return Err(bad("nothing was measured".to_owned()));
        }
        let svg = self.svg().map_err(|e| bad(e.to_string()))?;
        std::fs::write(path, svg).map_err(|e| Error::io(path, e))
    }

    fn svg(&self) -> std::result::Result<String, Box<dyn std::error::Error>> {
        let mut svg = String::new();
        {
            let root = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
            root.fill(&WHITE)?;
            let root = root.titled(&self.title, ("sans-serif", 20))?;
            let (speed, hits) = root.split_vertically((SIZE.1 - 40) * 3 / 5);
            self.speed(&speed)?;
            self.hits(&hits)?;
            root.present()?;
        }
        Ok(svg)
    }

    /// Points of every line, from few slots to many.
    fn sorted(&self) -> impl Iterator<Item = (&str, RGBColor, Vec<Point>)> {
        self.series.iter().enumerate().map(|(i, (name, points))| {
            let mut points = points.clone();
            points.sort_by_key(|p| p.slots);
            (name.as_str(), COLOURS[i % COLOURS.len()], points)
        })
    }

    fn most(&self, of: impl Fn(&Point) -> f64) -> f64 {
        self.series.iter().flat_map(|(_, points)| points).map(of).fold(1.0, f64::max)
    }

    fn speed(&self, area: &Area<'_>) -> Drawn {
        self.chart(area, "tokens a second", self.most(|p| p.tokens_per_s) * 1.1, |p| p.tokens_per_s, true)
    }

    fn hits(&self, area: &Area<'_>) -> Drawn {
        self.chart(area, "% hits", 105.0, |p| 100.0 * p.hit_rate, false)
    }

    fn chart(
        &self,
        area: &Area<'_>,
        what: &str,
        most: f64,
        of: impl Fn(&Point) -> f64,
        speed: bool,
    ) -> Drawn {
        let last = self.most(|p| p.slots as f64) * 1.04;
        let mut chart = ChartBuilder::on(area)
            .margin(12)
            .margin_right(24)
            .x_label_area_size(36)
            .y_label_area_size(60)
            .build_cartesian_2d(0.0..last, 0.0..most)?;
        chart
            .configure_mesh()
            .x_desc(self.slots)
            .y_desc(what)
            .light_line_style(TRANSPARENT)
            .x_label_formatter(&whole)
            .y_label_formatter(&whole)
            .label_style(("sans-serif", 13))
            .draw()?;
        for (name, colour, points) in self.sorted() {
            let style = colour.stroke_width(2);
            let at: Vec<_> = points.iter().map(|p| (p.slots as f64, of(p))).collect();
            chart
                .draw_series(LineSeries::new(at.iter().copied(), style))?
                .label(name)
                .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], style));
            chart.draw_series(at.iter().map(|p| Circle::new(*p, 4, colour.filled())))?;
        }
        if speed {
            chart
                .configure_series_labels()
                .position(SeriesLabelPosition::LowerRight)
                .background_style(WHITE.mix(0.85))
                .border_style(RGBColor(160, 160, 160))
                .label_font(("sans-serif", 14))
                .draw()?;
        }
        Ok(())
    }
}

/// Labels for axes of whole numbers; ticks between them have none.
fn whole(x: &f64) -> String {
    if x.fract() == 0.0 { format!("{x:.0}") } else { String::new() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plot() -> Plot {
        let mut plot = Plot::new("Decode, \"qwen\" <shape> & more".to_owned(), "slots a layer");
        for (slots, first, second) in [(128, 400.0, 410.0), (32, 120.5, 150.0), (64, 200.0, 240.0)] {
            plot.add("first pass", Point { slots, tokens_per_s: first, hit_rate: first / 410.0 });
            plot.add("second pass", Point { slots, tokens_per_s: second, hit_rate: second / 410.0 });
        }
        plot
    }

    /// Every point is in both charts, further right with more slots, and higher with more tokens a second.
    #[test]
    fn the_picture_is_xml_and_has_the_points() {
        let svg = plot().svg().unwrap();
        let xml = roxmltree::Document::parse(&svg).unwrap();
        let circles: Vec<(f64, f64)> = xml
            .descendants()
            .filter(|n| n.has_tag_name("circle"))
            .map(|n| ["cx", "cy"].map(|a| n.attribute(a).unwrap().parse().unwrap()))
            .map(|[x, y]| (x, y))
            .collect();
        assert_eq!(circles.len(), 2 * 2 * 3);
        for line in circles.chunks(3) {
            assert!(line.is_sorted_by(|a, b| a.0 < b.0 && a.1 > b.1), "{line:?}");
        }
        // 32 slots lie where 64 and 128 say.
        let [a, b, c] = [circles[0].0, circles[1].0, circles[2].0];
        assert!(((c - b) / (b - a) - 2.0).abs() < 0.05, "{a} {b} {c}");
        let text: Vec<_> = xml.descendants().filter_map(|n| n.text()).map(str::trim).collect();
        for label in ["first pass", "second pass", "tokens a second", "% hits", "slots a layer"] {
            assert!(text.contains(&label), "{label}: {text:?}");
        }
        assert!(text.iter().any(|t| t.contains("\"qwen\" <shape> & more")), "{text:?}");
    }

    #[test]
    fn nothing_measured_is_no_picture() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("plot.svg");
        let error = Plot::new(String::new(), "slots").write(&path).unwrap_err().to_string();
        assert!(error.contains("nothing was measured") && !path.exists(), "{error}");
        plot().write(&path).unwrap();
        assert!(std::fs::read_to_string(&path).unwrap().starts_with("<svg"));
    }
}
