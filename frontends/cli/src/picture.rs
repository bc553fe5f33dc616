//! A plan as a picture: time from left to right, addresses from bottom to top, coloured by class.
//!
//! A block of several pixels is a rectangle with its description. Smaller blocks are merged in
//! cells of two by two pixels. A cell has the colour of the class that covers most of it. Equal
//! cells share one shape. So the picture stays small and legible for any number of blocks.

use crate::size::short;
use passes::alloc::stats::{Class, classes, live_bytes};
use std::fmt::Write;
use trace::Pool;

/// Pixels of a pool's plot.
const WIDTH: usize = 1200;
const HEIGHT: usize = 480;
/// Pixels around it: axes' labels, a heading.
const LEFT: usize = 90;
const RIGHT: usize = 20;
const ABOVE: usize = 56;
const BELOW: usize = 36;
/// Pixels of a cell's side.
const CELL: usize = 2;
const COLUMNS: usize = WIDTH / CELL;
const ROWS: usize = HEIGHT / CELL;
/// A block with sides of at least this many pixels is drawn on its own, up to the limit below,
/// largest first.
const LEGIBLE: f64 = 3.0;
const MOST_RECTANGLES: usize = 4000;
/// A cell is coloured if so much of it is covered.
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
        // Writing to a String cannot fail.
        let _ = writeln!(
            out,
            "<g transform=\"translate({LEFT} {})\">",
            i * step + ABOVE
        );
        let _ = draw_pool(&mut out, pool, offsets);
        out += "</g>\n";
    }
    out + "</svg>\n"
}

fn draw_pool(out: &mut String, pool: &Pool, offsets: &[u64]) -> std::fmt::Result {
    let blocks = &pool.trace.blocks;
    let first = blocks.iter().map(|block| block.start).min().unwrap_or(0);
    let last = blocks.iter().map(|block| block.end).max().unwrap_or(1);
    let peak = blocks
        .iter()
        .zip(offsets)
        .map(|(block, offset)| offset + block.bytes)
        .max()
        .unwrap_or(1)
        .max(1);
    // Some room above the peak's line.
    let top = peak as f64 * 1.04;
    let x = |tick: u64| (tick - first) as f64 / (last - first).max(1) as f64 * WIDTH as f64;
    let y = |bytes: u64| HEIGHT as f64 * (1.0 - bytes as f64 / top);
    let (class, _) = classes(&pool.trace);
    let mut cells = vec![[0f32; KINDS.len()]; COLUMNS * ROWS];
    let mut rectangles: Vec<(Area, usize, usize)> = vec![];
    for (i, (block, &offset)) in blocks.iter().zip(offsets).enumerate() {
        let kind = match block.origin.dynamic {
            true => DYNAMIC,
            false => Class::ALL
                .iter()
                .position(|&known| known == class[i])
                .unwrap_or(0),
        };
        let mut start = block.start;
        for (until, next) in block.gaps.iter().copied().chain([(block.end, block.end)]) {
            let (left, top) = (x(start), y(offset + block.bytes));
            let area = Area {
                left,
                top,
                width: x(until.max(start)) - left,
                height: y(offset) - top,
            };
            rectangles.push((area, i, kind));
            start = next;
        }
    }
    // The largest first; those that are too small, or too many, go into cells.
    let size = |area: &Area| area.width * area.height;
    rectangles.sort_by(|a, b| size(&b.0).total_cmp(&size(&a.0)).then(a.1.cmp(&b.1)));
    let legible = |area: &Area| LEGIBLE <= area.width && LEGIBLE <= area.height;
    let mut drawn = vec![];
    for (area, block, kind) in rectangles {
        if legible(&area) && drawn.len() < MOST_RECTANGLES {
            drawn.push((area, block, kind));
        } else {
            cover(&mut cells, area, kind);
        }
    }
    let name = escaped(&pool.name);
    writeln!(
        out,
        "<text x=\"0\" y=\"-36\" font-size=\"15\">{name}: {} blocks</text>",
        blocks.len()
    )?;
    for (i, (name, colour)) in KINDS.iter().enumerate() {
        let at = 300 + 110 * i;
        writeln!(
            out,
            "<rect x=\"{at}\" y=\"-47\" width=\"12\" height=\"12\" fill=\"{colour}\"/>"
        )?;
        writeln!(out, "<text x=\"{}\" y=\"-36\">{name}</text>", at + 18)?;
    }
    writeln!(
        out,
        "<path d=\"M745 -41h24\" stroke=\"#000\" fill=\"none\"/><text x=\"775\" y=\"-36\">bytes \
         alive</text>"
    )?;
    shapes(out, &cells)?;
    for (
        Area {
            left,
            top,
            width,
            height,
        },
        i,
        kind,
    ) in drawn
    {
        let (block, offset) = (&blocks[i], offsets[i]);
        let (id, size, at) = (escaped(&block.id), short(block.bytes), short(offset));
        writeln!(
            out,
            "<rect x=\"{left:.1}\" y=\"{top:.1}\" width=\"{width:.1}\" height=\"{height:.1}\" \
             fill=\"{}\" stroke=\"#fff\" \
             stroke-width=\".4\"><title>{id}: {size} at {at}, ticks {} to {}, {}</title></rect>",
            KINDS[kind].1, block.start, block.end, KINDS[kind].0
        )?;
    }
    // Bytes alive: the most in each column of pixels.
    let live = live_bytes(&pool.trace);
    let mut columns = [0u64; WIDTH];
    for (i, &(tick, bytes)) in live.iter().enumerate() {
        let until = live.get(i + 1).map_or(tick, |next| next.0);
        let column = |tick: u64| (x(tick) as usize).min(WIDTH - 1);
        for most in &mut columns[column(tick)..=column(until)] {
            *most = (*most).max(bytes);
        }
    }
    let mut path = format!("M0 {:.1}", y(columns[0]));
    let mut before = columns[0];
    for (column, &bytes) in columns
        .iter()
        .enumerate()
        .skip(1)
        .filter(|&(_, &bytes)| bytes != 0)
    {
        if bytes != before {
            write!(path, "H{column}V{:.1}", y(bytes))?;
            before = bytes;
        }
    }
    writeln!(
        out,
        "<path d=\"{path}H{WIDTH}\" fill=\"none\" stroke=\"#000\" stroke-width=\".8\"/>"
    )?;
    // The peak, and when most is alive.
    let (mut tick, mut most) = (first, 0);
    for &(at, bytes) in &live {
        if most < bytes {
            (tick, most) = (at, bytes);
        }
    }
    let line = y(peak);
    writeln!(
        out,
        "<path d=\"M0 {line:.1}H{WIDTH}\" stroke=\"#c00\" stroke-dasharray=\"6 4\"/>"
    )?;
    writeln!(
        out,
        "<path d=\"M{:.1} 0V{HEIGHT}\" stroke=\"#c00\" stroke-dasharray=\"2 4\"/>",
        x(tick)
    )?;
    writeln!(
        out,
        "<text x=\"{WIDTH}\" y=\"-8\" text-anchor=\"end\" fill=\"#c00\">peak {} ({peak} bytes); \
         most alive {}, at tick {tick}</text>",
        short(peak),
        short(most)
    )?;
    writeln!(
        out,
        "<path d=\"M0 0V{HEIGHT}H{WIDTH}\" fill=\"none\" stroke=\"#333\"/>"
    )?;
    for quarter in 0..=4u64 {
        let bytes = (u128::from(peak) * u128::from(quarter) / 4) as u64;
        writeln!(
            out,
            "<text x=\"-8\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
            y(bytes) + 4.0,
            short(bytes)
        )?;
        let tick = first + (u128::from(last - first) * u128::from(quarter) / 4) as u64;
        writeln!(
            out,
            "<text x=\"{:.1}\" y=\"{}\" text-anchor=\"middle\">{tick}</text>",
            x(tick),
            HEIGHT + 18
        )?;
    }
    Ok(())
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
fn shapes(out: &mut String, cells: &[[f32; KINDS.len()]]) -> std::fmt::Result {
    let kind = |cell: &[f32; KINDS.len()]| {
        let most = (0..KINDS.len()).max_by(|&a, &b| cell[a].total_cmp(&cell[b]))?;
        (COVERED <= cell.iter().sum()).then_some(most)
    };
    let mut paths: [String; KINDS.len()] = Default::default();
    // Runs of the row above that may grow: kind, first and last column, first row.
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
                    write!(paths[kind], "M{x} {y}h{width}v{height}h-{width}z")?;
                }
            }
        }
        still.extend(
            runs.into_iter()
                .map(|(kind, start, end)| (kind, start, end, row)),
        );
        open = still;
    }
    for (path, (_, colour)) in paths.iter().zip(KINDS) {
        if !path.is_empty() {
            writeln!(out, "<path d=\"{path}\" fill=\"{colour}\"/>")?;
        }
    }
    Ok(())
}

/// Text within markup.
fn escaped(text: &str) -> String {
    let mut out = String::new();
    for c in text.chars() {
        match c {
            '&' => out += "&amp;",
            '<' => out += "&lt;",
            '>' => out += "&gt;",
            '"' => out += "&quot;",
            // No markup may hold these at all.
            c if c.is_control() || c == '\u{fffe}' || c == '\u{ffff}' => out.push('\u{fffd}'),
            c => out.push(c),
        }
    }
    out
}
