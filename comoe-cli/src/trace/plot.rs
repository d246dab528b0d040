//! `comoe trace plot`: three pictures in one file.

use comoe_core::replay::{PredictOptions, PredictorKind, ReplayPolicy, recall_by_layer, replay};
use comoe_core::trace::Trace;
use comoe_core::{Scope, WholeFile};
use plotters::coord::Shift;
use plotters::prelude::*;

use super::args::PlotArgs;
use super::{name, open};
use crate::error::{Error, Result};
use crate::output::say;
use crate::output_file::{self, Kind};

const SIZE: (u32, u32) = (1200, 1500);
/// Colours that also people who see few colours can tell apart (Okabe and Ito 2008).
const COLOURS: [RGBColor; 7] = [
    RGBColor(0, 114, 178),
    RGBColor(230, 159, 0),
    RGBColor(0, 158, 115),
    RGBColor(213, 94, 0),
    RGBColor(204, 121, 167),
    RGBColor(86, 180, 233),
    RGBColor(120, 120, 120),
];

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Drawn = std::result::Result<(), Box<dyn std::error::Error>>;

pub(crate) fn run(args: &PlotArgs) -> Result<()> {
    let others = [("TRACE", Some(&args.file.trace)), ("--model", args.file.model.as_ref())];
    let others: Vec<_> =
        others.into_iter().filter_map(|(what, path)| Some((what, path?.as_path()))).collect();
    output_file::check(Kind::Picture, ("--output", &args.output), &others)?;
    let trace = open(&args.file)?;
    let mut svg = String::new();
    draw(&trace, args, &mut svg)
        .map_err(|e| Error::Plot { path: args.output.clone(), reason: e.to_string() })?;
    WholeFile::write(&args.output, svg.as_bytes()).map_err(Error::core)?;
    say!("drawn to {}", name(&args.output));
    Ok(())
}

fn draw(trace: &Trace, args: &PlotArgs, svg: &mut String) -> Drawn {
    let root = SVGBackend::with_string(svg, SIZE).into_drawing_area();
    root.fill(&WHITE)?;
    let title = format!(
        "{}: {} layers, top-{}, {} tokens",
        trace.info().model,
        trace.layers(),
        trace.info().top_k,
        trace.tokens().len()
    );
    let root = root.titled(&title, ("sans-serif", 26))?;
    let parts = root.split_evenly((3, 1));
    heat_map(trace, &parts[0])?;
    hit_rates(trace, args, &parts[1])?;
    recalls(trace, args, &parts[2])?;
    root.present()?;
    Ok(())
}

/// From white to dark blue; `x` is 0 to 1.
fn shade(x: f64) -> RGBColor {
    let mix = |from: f64, to: f64| (from + (to - from) * x) as u8;
    RGBColor(mix(250.0, 8.0), mix(250.0, 48.0), mix(255.0, 107.0))
}

/// Layers by experts, shaded by the part of the layer's choices.
fn heat_map(trace: &Trace, area: &Area<'_>) -> Drawn {
    let summary = trace.summary();
    let experts = summary.layers.iter().map(|l| l.experts).max().unwrap_or(1) as i32;
    let layers = summary.layers.len() as i32;
    let mut chart = ChartBuilder::on(area)
        .caption(
            "use of each expert: square root of its part of the layer's choices, darkest is the most used",
            ("sans-serif", 18),
        )
        .margin(12)
        .x_label_area_size(36)
        .y_label_area_size(52)
        .build_cartesian_2d(0..experts, 0..layers)?;
    let at_layer = |l: &i32| {
        let entry = usize::try_from(*l).ok().and_then(|l| summary.layers.get(l));
        entry.map_or_else(String::new, |e| e.layer.to_string())
    };
    chart
        .configure_mesh()
        .disable_mesh()
        .x_desc("expert")
        .y_desc("layer")
        .y_label_formatter(&at_layer)
        .label_style(("sans-serif", 13))
        .draw()?;
    let part = |count: u64, counts: &[u64]| count as f64 / counts.iter().sum::<u64>().max(1) as f64;
    let parts = summary.layers.iter().flat_map(|l| l.counts.iter().map(move |&c| part(c, &l.counts)));
    let most = parts.fold(f64::MIN_POSITIVE, f64::max);
    for (l, layer) in summary.layers.iter().enumerate() {
        for (e, &count) in layer.counts.iter().enumerate().filter(|(_, c)| **c > 0) {
            let colour = shade((part(count, &layer.counts) / most).sqrt());
            let (l, e) = (l as i32, e as i32);
            chart.draw_series([Rectangle::new([(e, l), (e + 1, l + 1)], colour.filled())])?;
        }
    }
    Ok(())
}

/// Labels for axes of whole numbers; ticks between them have none.
fn whole(x: &f64) -> String {
    if x.fract() == 0.0 { format!("{x:.0}") } else { String::new() }
}

/// Slots to compare: from top-k to all experts.
fn sizes(trace: &Trace) -> Vec<usize> {
    let experts = trace.info().directory.layers().iter().map(|l| l.experts).max().unwrap_or(1);
    let least = trace.info().top_k.max(1).min(experts);
    let steps = 16;
    let mut sizes: Vec<usize> = (0..=steps).map(|i| least + (experts - least) * i / steps).collect();
    sizes.dedup();
    sizes
}

fn hit_rates(trace: &Trace, args: &PlotArgs, area: &Area<'_>) -> Drawn {
    let sizes = sizes(trace);
    let last = sizes.last().copied().unwrap_or(1) as f64;
    let mut chart = ChartBuilder::on(area)
        .caption("hit rate of generated tokens, each layer with slots of its own", ("sans-serif", 18))
        .margin(12)
        .x_label_area_size(36)
        .y_label_area_size(52)
        .build_cartesian_2d(0.0..last, 0.0..100.0)?;
    chart
        .configure_mesh()
        .x_desc("slots per layer")
        .y_desc("% hits")
        .light_line_style(TRANSPARENT)
        .x_label_formatter(&whole)
        .y_label_formatter(&whole)
        .label_style(("sans-serif", 13))
        .draw()?;
    let others = args.policy.iter().copied().filter(|p| *p != ReplayPolicy::Belady);
    for (i, policy) in std::iter::once(ReplayPolicy::Belady).chain(others).enumerate() {
        let rate = |&slots: &usize| 100.0 * replay(trace, policy, Scope::Layer, slots).hit_rate();
        let points: Vec<_> = sizes.iter().map(|s| (*s as f64, rate(s))).collect();
        let (style, label) = match policy {
            ReplayPolicy::Belady => (BLACK.stroke_width(2), "belady (ceiling)".to_owned()),
            other => (COLOURS[(i - 1) % COLOURS.len()].stroke_width(2), other.to_string()),
        };
        chart
            .draw_series(LineSeries::new(points, style))?
            .label(label)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], style));
    }
    legend(&mut chart, SeriesLabelPosition::LowerRight)
}

fn recalls(trace: &Trace, args: &PlotArgs, area: &Area<'_>) -> Drawn {
    let layers = trace.layers();
    let k = trace.info().top_k.max(1);
    let experts = trace.info().directory.layers().iter().map(|l| l.experts).max().unwrap_or(1);
    let slots = args.slots.unwrap_or_else(|| experts.div_ceil(4).max(k));
    let caption = format!(
        "recall at {k} by layer; thin: over the accesses that an LRU of {slots} slots a layer misses"
    );
    let mut chart = ChartBuilder::on(area)
        .caption(caption, ("sans-serif", 18))
        .margin(12)
        .x_label_area_size(36)
        .y_label_area_size(52)
        .build_cartesian_2d(0.0..(layers.max(2) - 1) as f64, 0.0..100.0)?;
    chart
        .configure_mesh()
        .x_desc("layer, counted over those with experts")
        .y_desc("% recall")
        .light_line_style(TRANSPARENT)
        .x_label_formatter(&whole)
        .y_label_formatter(&whole)
        .label_style(("sans-serif", 13))
        .draw()?;
    for (i, predictor) in PredictorKind::for_trace(trace).into_iter().enumerate() {
        let scores = recall_by_layer(trace, &PredictOptions { predictor, depth: 1, k, slots })?;
        let colour = COLOURS[i % COLOURS.len()];
        let points = |recall: &dyn Fn(usize) -> f64| -> Vec<_> {
            (0..scores.len()).map(|l| (l as f64, 100.0 * recall(l))).collect()
        };
        let style = colour.stroke_width(2);
        chart
            .draw_series(LineSeries::new(points(&|l| scores[l].recall()), style))?
            .label(predictor.to_string())
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], style));
        let misses = points(&|l| scores[l].recall_on_misses());
        chart.draw_series(LineSeries::new(misses, colour.mix(0.6).stroke_width(1)))?;
    }
    legend(&mut chart, SeriesLabelPosition::UpperLeft)
}

fn legend<'a>(
    chart: &mut ChartContext<
        'a,
        SVGBackend<'a>,
        Cartesian2d<plotters::coord::types::RangedCoordf64, plotters::coord::types::RangedCoordf64>,
    >,
    position: SeriesLabelPosition,
) -> Drawn {
    chart
        .configure_series_labels()
        .position(position)
        .background_style(WHITE.mix(0.85))
        .border_style(RGBColor(160, 160, 160))
        .label_font(("sans-serif", 14))
        .draw()?;
    Ok(())
}
