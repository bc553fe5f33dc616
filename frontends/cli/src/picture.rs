//! A plan as a picture: time from left to right, addresses from bottom to top, coloured by class.
//!
//! A block of several pixels is a rectangle with its description. Smaller blocks are merged in
//! cells of two by two pixels. A cell has the colour of the class that covers most of it. Equal
//! cells share one shape. So the picture stays small and legible for any number of blocks.

use crate::size::short;
use crate::svg;
use addresses::stats::{Class, classes, live_bytes};
use std::fmt::Write as _;
use trace::Pool;

/// Pixels of a pool's plot.
const WIDTH: usize = 1200;
const HEIGHT: usize = 480;
/// Pixels around the plot, for axis labels and a heading.
const LEFT: usize = 90;
const RIGHT: usize = 20;
const ABOVE: usize = 56;
const BELOW: usize = 36;
/// Pixels of a cell's side.
const CELL: usize = 2;
const COLUMNS: usize = WIDTH / CELL;
const ROWS: usize = HEIGHT / CELL;
/// A block whose sides have at least this many pixels is drawn separately, largest first, up to the
/// limit below.
const LEGIBLE: f64 = 3.0;
const MOST_RECTANGLES: usize = 4000;
/// A cell is coloured if at least this share of it is covered.
const COVERED: f32 = 0.25;

/// Names and colours: the three classes, and blocks whose sizes were unknown.
const KINDS: [(&str, &str); 4] = [
    ("persistent", "#4e79a7"),
    ("scoped", "#59a14f"),
    ("transient", "#f28e2b"),
    ("dynamic", "#e15759"),
];
const DYNAMIC: usize = 3;

/// A rectangle in pixels of the plot, from the upper left corner.
#[derive(Clone, Copy)]
struct Area {
    left: f64,
    top: f64,
    width: f64,
    height: f64,
}

/// Draws plans: offsets for each block of each pool.
pub(crate) fn draw(pools: &[Pool], offsets: &[&[u64]]) -> String {
    let width = LEFT + WIDTH + RIGHT;
    let step = ABOVE + HEIGHT + BELOW;
    let height = step * pools.len();
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" \
         width=\"{width}\" height=\"{height}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"{width}\" \
         height=\"{height}\" fill=\"#fff\"/>\n"
    );
    for (i, (pool, offsets)) in pools.iter().zip(offsets).enumerate() {
        out += &format!("<g transform=\"translate({LEFT} {})\">\n", i * step + ABOVE);
        out += &draw_pool(pool, offsets);
        out += "</g>\n";
    }
    out + "</svg>\n"
}

/// The positions of a pool's moments and addresses in its plot.
struct Plot {
    /// The first and the last moment.
    first: u64,
    last: u64,
    /// The highest address in use.
    peak: u64,
}

impl Plot {
    fn new(pool: &Pool, offsets: &[u64]) -> Plot {
        let blocks = &pool.trace.blocks;
        let ends = blocks
            .iter()
            .zip(offsets)
            .map(|(block, offset)| offset + block.bytes);
        Plot {
            first: blocks.iter().map(|block| block.start).min().unwrap_or(0),
            last: blocks.iter().map(|block| block.end).max().unwrap_or(1),
            peak: ends.max().unwrap_or(1).max(1),
        }
    }

    fn x(&self, tick: u64) -> f64 {
        let ticks = (self.last - self.first).max(1);
        (tick - self.first) as f64 / ticks as f64 * WIDTH as f64
    }

    fn y(&self, bytes: u64) -> f64 {
        // Some room above the peak's line.
        let top = self.peak as f64 * 1.04;
        HEIGHT as f64 * (1.0 - bytes as f64 / top)
    }
}

fn draw_pool(pool: &Pool, offsets: &[u64]) -> String {
    let blocks = &pool.trace.blocks;
    let plot = Plot::new(pool, offsets);
    // The largest first; areas that are too small, or too many, go into cells.
    let size = |area: &Area| area.width * area.height;
    let mut rectangles = rectangles(pool, offsets, &plot);
    rectangles.sort_by(|a, b| size(&b.0).total_cmp(&size(&a.0)).then(a.1.cmp(&b.1)));
    let legible = |area: &Area| LEGIBLE <= area.width && LEGIBLE <= area.height;
    let mut cells = vec![[0f32; KINDS.len()]; COLUMNS * ROWS];
    let mut drawn = vec![];
    for (area, block, kind) in rectangles {
        if legible(&area) && drawn.len() < MOST_RECTANGLES {
            drawn.push((area, block, kind));
        } else {
            cover(&mut cells, area, kind);
        }
    }

    let mut out = legend(pool);
    out += &shapes(&cells);
    for (area, i, kind) in drawn {
        let block = &blocks[i];
        let (size, at, (name, colour)) = (short(block.bytes), short(offsets[i]), KINDS[kind]);
        let (id, start, end) = (&block.id, block.start, block.end);
        out += &svg::element("rect")
            .at("x", area.left)
            .at("y", area.top)
            .at("width", area.width)
            .at("height", area.height)
            .with("fill", colour)
            .with("stroke", "#fff")
            .with("stroke-width", ".4")
            .titled(&format!(
                "{id}: {size} at {at}, ticks {start} to {end}, {name}"
            ));
    }
    let live = live_bytes(&pool.trace);
    out += &alive(&live, &plot);
    out += &peaks(&live, &plot);
    out + &axes(&plot)
}

/// The areas of all blocks, with their block and kind. A block that leaves for a while has several.
fn rectangles(pool: &Pool, offsets: &[u64], plot: &Plot) -> Vec<(Area, usize, usize)> {
    let (class, _) = classes(&pool.trace);
    let mut rectangles = vec![];
    for (i, (block, &offset)) in pool.trace.blocks.iter().zip(offsets).enumerate() {
        let kind = if block.origin.dynamic {
            DYNAMIC
        } else {
            let known = Class::ALL.iter().position(|&known| known == class[i]);
            known.unwrap_or(0)
        };
        let mut start = block.start;
        for (until, next) in block.gaps.iter().copied().chain([(block.end, block.end)]) {
            let (left, top) = (plot.x(start), plot.y(offset + block.bytes));
            let area = Area {
                left,
                top,
                width: plot.x(until.max(start)) - left,
                height: plot.y(offset) - top,
            };
            rectangles.push((area, i, kind));
            start = next;
        }
    }
    rectangles
}

/// The pool's name and the meaning of the colours.
fn legend(pool: &Pool) -> String {
    let blocks = pool.trace.blocks.len();
    let name = svg::element("text")
        .with("x", 0)
        .with("y", -36)
        .with("font-size", 15);
    let mut out = name.text(&format!("{}: {blocks} blocks", pool.name));
    let word = |x: usize, text: &str| {
        let word = svg::element("text").with("x", x).with("y", -36);
        word.text(text)
    };
    for (i, (name, colour)) in KINDS.iter().enumerate() {
        let at = 300 + 110 * i;
        let key = svg::element("rect").with("x", at).with("y", -47);
        out += &key
            .with("width", 12)
            .with("height", 12)
            .with("fill", colour)
            .empty();
        out += &word(at + 18, name);
    }
    let line = svg::path("M745 -41h24")
        .with("stroke", "#000")
        .with("fill", "none");
    out + &line.empty() + &word(775, "bytes alive")
}

/// Live bytes: the maximum in each column of pixels.
fn alive(live: &[(u64, u64)], plot: &Plot) -> String {
    let mut columns = [0u64; WIDTH];
    for (i, &(tick, bytes)) in live.iter().enumerate() {
        let until = live.get(i + 1).map_or(tick, |next| next.0);
        let column = |tick: u64| (plot.x(tick) as usize).min(WIDTH - 1);
        for most in &mut columns[column(tick)..=column(until)] {
            *most = (*most).max(bytes);
        }
    }
    let mut path = format!("M0 {:.1}", plot.y(columns[0]));
    let mut before = columns[0];
    for (column, &bytes) in columns.iter().enumerate().skip(1) {
        if bytes != 0 && bytes != before {
            path += &format!("H{column}V{:.1}", plot.y(bytes));
            before = bytes;
        }
    }
    path += &format!("H{WIDTH}");
    let path = svg::path(&path).with("fill", "none").with("stroke", "#000");
    path.with("stroke-width", ".8").empty()
}

/// The peak, and the moment with the most live bytes.
fn peaks(live: &[(u64, u64)], plot: &Plot) -> String {
    let (mut tick, mut most) = (plot.first, 0);
    for &(at, bytes) in live {
        if bytes > most {
            (tick, most) = (at, bytes);
        }
    }
    let dashed = |path: String, dashes: &str| {
        let path = svg::path(&path).with("stroke", "#c00");
        path.with("stroke-dasharray", dashes).empty()
    };
    let peak = plot.peak;
    let across = dashed(format!("M0 {:.1}H{WIDTH}", plot.y(peak)), "6 4");
    let down = dashed(format!("M{:.1} 0V{HEIGHT}", plot.x(tick)), "2 4");
    let text = svg::element("text").with("x", WIDTH).with("y", -8);
    let text = text
        .with("text-anchor", "end")
        .with("fill", "#c00")
        .text(&format!(
            "peak {} ({peak} bytes); most alive {}, at tick {tick}",
            short(peak),
            short(most)
        ));
    across + &down + &text
}

fn axes(plot: &Plot) -> String {
    let frame = svg::path(&format!("M0 0V{HEIGHT}H{WIDTH}"));
    let mut out = frame.with("fill", "none").with("stroke", "#333").empty();
    for quarter in 0..=4u64 {
        let part = |of: u64| (u128::from(of) * u128::from(quarter) / 4) as u64;
        let bytes = part(plot.peak);
        out += &svg::element("text")
            .with("x", -8)
            .at("y", plot.y(bytes) + 4.0)
            .with("text-anchor", "end")
            .text(&short(bytes));
        let tick = plot.first + part(plot.last - plot.first);
        out += &svg::element("text")
            .at("x", plot.x(tick))
            .with("y", HEIGHT + 18)
            .with("text-anchor", "middle")
            .text(&tick.to_string());
    }
    out
}

/// Adds an area to the cells that it touches.
fn cover(cells: &mut [[f32; KINDS.len()]], area: Area, kind: usize) {
    let side = CELL as f64;
    // The first and the last cell, and the covered share of each: whole cells except the two at the
    // ends.
    let span = |from: f64, length: f64, n: usize| {
        let (from, to) = (from / side, (from + length) / side);
        let first = (from as usize).min(n - 1);
        let last = (to.ceil() as usize).clamp(first + 1, n);
        (first..last).map(move |i| (i, (to.min((i + 1) as f64) - from.max(i as f64)).max(0.0)))
    };
    for (row, down) in span(area.top, area.height, ROWS) {
        for (column, across) in span(area.left, area.width, COLUMNS) {
            cells[row * COLUMNS + column][kind] += (down * across) as f32;
        }
    }
}

/// Draws cells: a path for each kind, of rectangles of equal cells.
fn shapes(cells: &[[f32; KINDS.len()]]) -> String {
    let kind = |cell: &[f32; KINDS.len()]| {
        let most = (0..KINDS.len()).max_by(|&a, &b| cell[a].total_cmp(&cell[b]))?;
        (COVERED <= cell.iter().sum()).then_some(most)
    };
    let mut paths: [String; KINDS.len()] = Default::default();
    // Rectangles of the row above that may grow: kind, first and last column, first row.
    let mut open: Vec<(usize, usize, usize, usize)> = vec![];
    for row in 0..=ROWS {
        let mut runs: Vec<(usize, usize, usize)> = vec![];
        for column in 0..COLUMNS {
            let Some(kind) = cells.get(row * COLUMNS + column).and_then(kind) else {
                continue;
            };
            match runs.last_mut() {
                Some((before, _, end)) if *before == kind && *end == column => *end += 1,
                _ => runs.push((kind, column, column + 1)),
            }
        }
        let mut still = vec![];
        for (kind, start, end, since) in std::mem::take(&mut open) {
            match runs.iter().position(|&run| run == (kind, start, end)) {
                Some(at) => {
                    runs.swap_remove(at);
                    still.push((kind, start, end, since));
                }
                None => {
                    let (x, y, width, height) = (
                        start * CELL,
                        since * CELL,
                        (end - start) * CELL,
                        (row - since) * CELL,
                    );
                    // Writing to a String cannot fail.
                    let _ = write!(paths[kind], "M{x} {y}h{width}v{height}h-{width}z");
                }
            }
        }
        still.extend(
            runs.into_iter()
                .map(|(kind, start, end)| (kind, start, end, row)),
        );
        open = still;
    }
    let painted = paths.iter().zip(KINDS).filter(|(path, _)| !path.is_empty());
    painted
        .map(|(path, (_, colour))| svg::path(path).with("fill", colour).empty())
        .collect()
}
