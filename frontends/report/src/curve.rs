//! Step time against budget: the plans that no other beats in both, as a table, as JSON and as a
//! drawing.
//!
//! A budget between two points gets the plan of the smaller one: the curve is a staircase.

use crate::size::{micros, short};
use crate::svg;
use ir::schedule::MemorySpace;
use passes::pipeline::Compiled;
use passes::plan::machine::COMPUTE;
use serde_json::{Value as Json, json};
use std::fmt::Write as _;

/// One plan of the curve.
#[derive(Clone, PartialEq, Debug)]
pub struct Point {
    /// The smallest budget that has it, bytes.
    pub bytes: u64,
    /// Its step, µs.
    pub micros: f64,
    /// Its bytes as a share of what keeping everything needs.
    pub of_keep: f64,
    /// How much longer its step takes than the fastest: 0.1 is 10 %.
    pub slower: f64,
    /// What each percent of `keep` saved costs, against the next faster plan, µs; none for the
    /// fastest.
    pub micros_per_percent: Option<f64>,
    /// What only the plan that was finished is known of.
    pub chosen: Option<Chosen>,
}

/// More of the plan that was chosen.
#[derive(Clone, PartialEq, Debug)]
pub struct Chosen {
    /// Peak of the host's pool, bytes.
    pub host_peak: u64,
    /// Peak of the pool on a disk, bytes; `None` if there is none.
    pub disk_peak: Option<u64>,
    /// The peaks of both, in words.
    pub peaks: String,
    /// What its step is spent on, mostly.
    pub dominant: String,
}

/// The curve, fastest first. Invariant: bytes fall, times never do.
pub fn points(compiled: &Compiled) -> Vec<Point> {
    let decided = &compiled.decided;
    let fastest = decided.curve.first().map_or(1.0, |&(_, micros)| micros);
    let keep = decided.keep_peak.max(1) as f64;
    // Of equally fast plans that with the fewest decisions is chosen: its peak may be above the
    // point it stands for.
    let stands_for = decided
        .curve
        .iter()
        .map(|&(bytes, _)| bytes)
        .find(|&bytes| bytes <= compiled.planned_peak);
    let mut before: Option<(u64, f64)> = None;
    let point = |&(bytes, micros): &(u64, f64)| {
        let percent = |more: u64| 100.0 * more.saturating_sub(bytes).max(1) as f64 / keep;
        let micros_per_percent = before.map(|(more, faster)| (micros - faster) / percent(more));
        before = Some((bytes, micros));
        Point {
            bytes,
            micros,
            of_keep: bytes as f64 / keep,
            slower: if 0.0 < fastest {
                micros / fastest - 1.0
            } else {
                0.0
            },
            micros_per_percent,
            chosen: (Some(bytes) == stands_for).then(|| chosen(compiled)),
        }
    };
    decided.curve.iter().map(point).collect()
}

fn chosen(compiled: &Compiled) -> Chosen {
    Chosen {
        host_peak: compiled.peak_in(MemorySpace::Host).unwrap_or(0),
        disk_peak: compiled.peak_in(MemorySpace::Disk),
        peaks: compiled.peaks_beyond(&short),
        dominant: dominant(compiled),
    }
}

/// The stream that is busy most, with its share of the step: `computing 97%`, `h2d 88%`.
fn dominant(compiled: &Compiled) -> String {
    let timeline = &compiled.timeline;
    let streams = &compiled.program.schedule.streams;
    // The first of equally busy ones.
    let busiest = timeline.busy.iter().rev().max_by(|a, b| a.1.total_cmp(b.1));
    let Some((stream, busy)) = busiest else {
        return "nothing".into();
    };
    let share = 100.0 * busy / timeline.micros.max(f64::MIN_POSITIVE);
    match stream == COMPUTE {
        true => format!("computing {share:.0}%"),
        false => format!("{} {share:.0}%", streams[stream].name),
    }
}

/// The curve for programs.
pub fn json(points: &[Point]) -> Vec<Json> {
    let object = |p: &Point| {
        json!({
            "budget_bytes": p.bytes,
            "predicted_ms": p.micros / 1e3,
            "of_keep": p.of_keep,
            "slower": p.slower,
            "ms_per_percent_of_keep": p.micros_per_percent.map(|micros| micros / 1e3),
            "chosen": p.chosen.is_some(),
            "host_peak_bytes": p.chosen.as_ref().map(|chosen| chosen.host_peak),
            "disk_peak_bytes": p.chosen.as_ref().and_then(|chosen| chosen.disk_peak),
            "dominant": p.chosen.as_ref().map(|chosen| chosen.dominant.as_str()),
        })
    };
    points.iter().map(object).collect()
}

/// The curve for people: every point, one a line.
pub fn table(points: &[Point]) -> String {
    let mut out = format!(
        "{:>12}  {:>8}  {:>14}  {:>14}  {:>8}  {:>14}\n",
        "budget", "of keep", "bytes", "predicted step", "overhead", "1% less costs"
    );
    for p in points {
        let price = p.micros_per_percent.map_or("-".into(), micros);
        let chosen = match &p.chosen {
            Some(Chosen {
                peaks, dominant, ..
            }) => format!("  < chosen: {peaks}, {dominant}"),
            None => String::new(),
        };
        // Writing to a String cannot fail.
        let _ = writeln!(
            out,
            "{:>12}  {:>7.1}%  {:>14}  {:>14}  {:>+7.1}%  {price:>14}{chosen}",
            short(p.bytes),
            100.0 * p.of_keep,
            p.bytes,
            micros(p.micros),
            100.0 * p.slower,
        );
    }
    out
}

// --- drawing ---

/// The drawing's size, and the frame within it: left, top, right, bottom.
const SIZE: (f64, f64) = (920.0, 340.0);
const FRAME: (f64, f64, f64, f64) = (84.0, 22.0, 900.0, 286.0);
/// The axis is logarithmic if the largest value is at least this many times the smallest.
const WIDE: f64 = 12.0;
/// Points that have a dot and a tooltip of their own.
const DOTS: usize = 400;

/// An axis: from values to pixels.
struct Axis {
    low: f64,
    high: f64,
    log: bool,
    /// Pixels at `low` and at `high`.
    from: f64,
    to: f64,
}

impl Axis {
    fn new(low: f64, high: f64, from: f64, to: f64) -> Axis {
        let log = 0.0 < low && WIDE < high / low;
        let (low, high) = match log {
            true => (low / 1.1, high * 1.1),
            // The axis does not start at zero: the curve is read for its slope. The labels say
            // where it starts.
            false => {
                let room = 0.06 * (high - low).max(0.02 * high.abs()).max(f64::MIN_POSITIVE);
                ((low - room).max(0.0), high + room)
            }
        };
        Axis {
            low,
            high,
            log,
            from,
            to,
        }
    }

    fn at(&self, value: f64) -> f64 {
        let scale = |v: f64| {
            if self.log {
                v.max(f64::MIN_POSITIVE).ln()
            } else {
                v
            }
        };
        let share = (scale(value) - scale(self.low)) / (scale(self.high) - scale(self.low));
        self.from + share.clamp(0.0, 1.0) * (self.to - self.from)
    }

    /// Round values, in `unit`s: 1, 2 or 5 times a power of ten apart; powers of two on a
    /// logarithmic axis.
    fn ticks(&self, unit: f64) -> Vec<f64> {
        let (low, high) = (self.low / unit, self.high / unit);
        if self.log {
            let (first, last) = (low.log2().ceil() as i32, high.log2().floor() as i32);
            let step = 1 + (last - first).max(0) as usize / 10;
            return (first..=last)
                .step_by(step)
                .map(|power| unit * f64::from(power).exp2())
                .collect();
        }
        let rough = (high - low) / 9.0;
        let power = 10f64.powf(rough.log10().floor());
        let step = [1.0, 2.0, 5.0, 10.0]
            .into_iter()
            .map(|m| m * power)
            .find(|&s| rough <= s)
            .unwrap_or(rough);
        let (first, last) = ((low / step).ceil() as i64, (high / step).floor() as i64);
        (first..=last).map(|k| unit * k as f64 * step).collect()
    }
}

/// The largest unit that is not above `value`, with its name.
fn unit(value: f64, units: &[(f64, &'static str)]) -> (f64, &'static str) {
    units
        .iter()
        .copied()
        .find(|&(unit, _)| unit <= value)
        .unwrap_or((1.0, units[units.len() - 1].1))
}

const BYTES: [(f64, &str); 5] = [
    (1099511627776.0, "TiB"),
    (1073741824.0, "GiB"),
    (1048576.0, "MiB"),
    (1024.0, "KiB"),
    (1.0, "bytes"),
];
const TIMES: [(f64, &str); 3] = [(1e6, "s"), (1e3, "ms"), (1.0, "µs")];

/// A number without needless zeros: `12`, `0.25`.
fn plain(value: f64) -> String {
    let text = format!("{value:.3}");
    text.trim_end_matches('0').trim_end_matches('.').to_string()
}

/// The drawing, as an `svg` element without a namespace: for a page. `budget` is drawn as a line.
pub fn svg(points: &[Point], budget: Option<u64>) -> String {
    let (width, height) = SIZE;
    let mut out = format!(
        "<svg class=\"curve\" viewBox=\"0 0 {width} {height}\" role=\"img\" \
         aria-label=\"Predicted step time against budget\">\n"
    );
    out += &draw(points, budget);
    out + "</svg>\n"
}

/// The same as a file of its own.
pub fn svg_file(points: &[Point], budget: Option<u64>) -> String {
    let svg = svg(points, budget);
    let (width, height) = SIZE;
    let root =
        format!("<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" ");
    let style = format!(
        "<style>\n{}</style>\n<rect class=\"paper\" width=\"100%\" height=\"100%\"/>\n",
        include_str!("page/curve.css")
    );
    match svg
        .strip_prefix("<svg ")
        .and_then(|rest| rest.split_once('\n'))
    {
        Some((attributes, body)) => format!("{root}{attributes}\n{style}{body}"),
        None => svg,
    }
}

/// The axes of a drawing.
struct Plane {
    /// Budgets.
    x: Axis,
    /// Times.
    y: Axis,
}

fn draw(points: &[Point], budget: Option<u64>) -> String {
    let (left, top, right, bottom) = FRAME;
    let (Some(fastest), Some(smallest)) = (points.first(), points.last()) else {
        return String::new();
    };
    let plane = Plane {
        x: Axis::new(smallest.bytes as f64, fastest.bytes as f64, left, right),
        y: Axis::new(fastest.micros, smallest.micros, bottom, top),
    };
    let mut out = grid(&plane);
    out += &stairs(&plane, points, fastest);
    let limit = plane.x.at(smallest.bytes as f64);
    out += &svg::element("rect")
        .with("class", "none")
        .with("x", left)
        .with("y", top)
        .at("width", limit - left)
        .at("height", bottom - top)
        .titled(&format!("nothing fits below {}", short(smallest.bytes)));
    out += &dots(&plane, points);
    let within = |budget: &u64| plane.x.low <= *budget as f64 && *budget as f64 <= plane.x.high;
    if let Some(budget) = budget.filter(within) {
        out += &budget_line(&plane, budget);
    }
    out
}

/// Lines at round numbers, with the numbers, and what the axes show.
fn grid(plane: &Plane) -> String {
    let (left, top, right, bottom) = FRAME;
    let (bytes, bytes_name) = unit(plane.x.high / 2.0, &BYTES);
    let (time, time_name) = unit(plane.y.high / 2.0, &TIMES);
    let mut out = String::new();
    for tick in plane.x.ticks(bytes) {
        let at = plane.x.at(tick);
        let line = svg::element("line").with("class", "grid");
        out += &line
            .at("x1", at)
            .at("x2", at)
            .with("y1", top)
            .with("y2", bottom)
            .empty();
        out += &svg::element("text")
            .at("x", at)
            .with("y", bottom + 18.0)
            .with("text-anchor", "middle")
            .text(&plain(tick / bytes));
    }
    for tick in plane.y.ticks(time) {
        let at = plane.y.at(tick);
        let line = svg::element("line").with("class", "grid");
        out += &line
            .with("x1", left)
            .with("x2", right)
            .at("y1", at)
            .at("y2", at)
            .empty();
        out += &svg::element("text")
            .with("x", left - 8.0)
            .at("y", at + 4.0)
            .with("text-anchor", "end")
            .text(&plain(tick / time));
    }
    let scale = |axis: &Axis| if axis.log { ", logarithmic" } else { "" };
    let title = || svg::element("text").with("class", "title");
    out += &title()
        .with("x", (left + right) / 2.0)
        .with("y", bottom + 42.0)
        .with("text-anchor", "middle")
        .text(&format!("budget, {bytes_name}{}", scale(&plane.x)));
    let middle = (top + bottom) / 2.0;
    out += &title()
        .with("x", 20)
        .with("y", middle)
        .with("text-anchor", "middle")
        .with("transform", format_args!("rotate(-90 20 {middle})"))
        .text(&format!("predicted step, {time_name}{}", scale(&plane.y)));
    out
}

/// From the fastest leftwards: a budget below a point gets the next slower one.
fn stairs(plane: &Plane, points: &[Point], fastest: &Point) -> String {
    let mut path = format!("M{:.1} {:.1}", FRAME.2, plane.y.at(fastest.micros));
    for pair in points.windows(2) {
        let (x, y) = (plane.x.at(pair[0].bytes as f64), plane.y.at(pair[1].micros));
        path += &format!("H{x:.1}V{y:.1}");
    }
    if let Some(smallest) = points.last() {
        path += &format!("H{:.1}", plane.x.at(smallest.bytes as f64));
    }
    let stairs = svg::element("path").with("class", "stairs");
    stairs.with("d", path).empty()
}

/// A dot for each point, or for some where there are many; the chosen one is large.
fn dots(plane: &Plane, points: &[Point]) -> String {
    let mut out = String::new();
    let every = points.len().div_ceil(DOTS).max(1);
    for (k, p) in points.iter().enumerate() {
        if p.chosen.is_none() && k % every != 0 && k + 1 != points.len() {
            continue;
        }
        let (class, radius) = if p.chosen.is_some() {
            ("chosen", 6.0)
        } else {
            ("dot", 2.5)
        };
        let (bytes, time) = (short(p.bytes), micros(p.micros));
        out += &svg::element("circle")
            .with("class", class)
            .at("cx", plane.x.at(p.bytes as f64))
            .at("cy", plane.y.at(p.micros))
            .with("r", radius)
            .titled(&format!("{bytes}: {time}, {:+.1}%", 100.0 * p.slower));
    }
    out
}

fn budget_line(plane: &Plane, budget: u64) -> String {
    let (left, top, right, bottom) = FRAME;
    let at = plane.x.at(budget as f64);
    let (anchor, shift) = if at < (left + right) / 2.0 {
        ("start", 6.0)
    } else {
        ("end", -6.0)
    };
    let line = svg::element("line").with("class", "budget");
    let line = line
        .at("x1", at)
        .at("x2", at)
        .with("y1", top)
        .with("y2", bottom)
        .empty();
    let text = svg::element("text").with("class", "budget");
    let text = text
        .at("x", at + shift)
        .with("y", top + 12.0)
        .with("text-anchor", anchor);
    line + &text.text(&format!("budget {}", short(budget)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_within() {
        let axis = Axis::new(3.0, 17.0, 0.0, 100.0);
        assert_eq!(axis.ticks(1.0), [4.0, 6.0, 8.0, 10.0, 12.0, 14.0, 16.0]);
        let wide = Axis::new(1.0, 64.0, 0.0, 100.0);
        assert_eq!(wide.ticks(1.0), [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0]);
        assert_eq!((wide.at(0.0), wide.at(1e9)), (0.0, 100.0));
        // Equal plans still have an axis.
        assert!(Axis::new(5.0, 5.0, 0.0, 100.0).ticks(1.0).len() < 20);
    }
}
