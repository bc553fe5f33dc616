//! `lighterage plan --report`: one self-contained page for the browser that shows a whole plan.
//!
//! Short content is in the page as text: figures, tensors at the peak, other budgets, the passes'
//! times. Long content is in it as JSON, in columns, for the script (`page/page.js`) to draw:
//! lines, addresses over time, decisions. Names come from untrusted files. `escaped` and
//! `embedded` are the only ways into the page, and the script inserts them as text, never as
//! markup.

use crate::curve::{self, Chosen, Point};
use crate::module;
use crate::size::{self, flops, rate, short};
use ir::graph::Def;
use ir::schedule::{InstrKind, MemorySpace, PoolData, Why};
use ir::{Graph, Id, Phase, Pool, Program, Stream, Table, Value};
use passes::decide::bound::Certificate;
use passes::decide::layout::Described;
use passes::decide::{Means, Problem, Reason};
use passes::explain::{self, Class, Peak, Residence, Tally};
use passes::pipeline::{Compiled, Options};
use passes::plan::machine::{self, DEVICE};
use passes::schedule::order::Update;
use serde_json::{Value as Json, json};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::time::Duration;

/// A pass, its time, and whether it changed the program.
pub type PassTime = (&'static str, Duration, bool);

/// What the page tells of.
pub struct Source<'a> {
    /// The step.
    pub compiled: &'a Compiled,
    /// What its planner read.
    pub problem: &'a Problem<'a>,
    /// What the user chose.
    pub options: Options,
    /// The counts of its decisions.
    pub tally: Tally,
    /// What lies in memory at its peak.
    pub peak: &'a Peak,
    /// The plans for other budgets.
    pub curve: &'a [Point],
    /// How long each pass took.
    pub times: &'a [PassTime],
    /// The command or the call that asked for it.
    pub command: String,
    /// Calls without a kernel.
    pub unsupported: &'a [torch::Unsupported],
}

/// Tensors at the peak that stand in the page; the script shows all of any moment.
const NAMED: usize = 30;
/// A tensor with at least this share of the bytes that a decision frees was decided about alone;
/// padding is the rest.
const NEARLY_ALONE: f64 = 0.98;
/// Calls without a kernel that are named.
const CALLS: usize = 10;

/// What tensors are, as the drawing colours them, from the bottom up. The script and the styles
/// know them by position.
const CLASSES: [&str; 8] = [
    "parameters",
    "optimizer states",
    "other states",
    "gradients",
    "activations",
    "updates",
    "inputs and outputs",
    "scratch",
];

/// What lines do, as the drawing colours them; see [`kind`].
const KINDS: [&str; 13] = [
    "forward",
    "backward",
    "optimizer",
    "rerun",
    "swap out",
    "swap in",
    "gather",
    "offload",
    "update",
    "feed",
    "fetch",
    "load",
    "store",
];

/// The page.
pub fn page(source: &Source<'_>) -> String {
    let mut out = String::new();
    // Writing to a String cannot fail.
    let _ = write(&mut out, source);
    out
}

/// The word of an update.
pub fn update_name(update: Update) -> &'static str {
    match update {
        Update::Backward => "backward",
        Update::After => "after",
    }
}

/// Text for a page or an attribute.
fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            // No page may hold these.
            c if c.is_control() && !matches!(c, '\n' | '\t') => out.push('\u{FFFD}'),
            c => out.push(c),
        }
    }
    out
}

/// JSON for a `script` element: whatever a string holds, the element does not end in it.
fn embedded(json: &Json) -> String {
    json.to_string()
        .replace('<', "\\u003c")
        .replace('>', "\\u003e")
        .replace('&', "\\u0026")
}

/// A time for people.
fn duration(micros: f64) -> String {
    size::micros(micros).replace(" us", " µs")
}

/// µs with two digits behind the point.
fn rounded(micros: f64) -> f64 {
    (micros * 100.0).round() / 100.0
}

fn write(out: &mut String, source: &Source<'_>) -> std::fmt::Result {
    let Compiled {
        program, timeline, ..
    } = source.compiled;
    // Times rounded as they are written, so a buffer that ends within a digit of another's start
    // does not overlap it.
    let mut residences = explain::residences(source.compiled);
    residences
        .iter_mut()
        .for_each(|r| (r.from, r.to) = (rounded(r.from), rounded(r.to)));
    residences.retain(|r| r.from < r.to);
    let grouped = Grouped::new(source, &residences);
    let name = escaped(&program.graph.name);
    writeln!(
        out,
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\"/>\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src \
         'unsafe-inline'; script-src \
         'unsafe-inline'\"/>\n<meta name=\"viewport\" content=\"width=device-width, \
         initial-scale=1\"/>\n\
         <meta name=\"color-scheme\" content=\"light dark\"/>\n<title>{name}: \
         plan</title>\n<style>\n{}{}</style>\n</head>\n\
         <body>\n<main>",
        include_str!("page/page.css"),
        include_str!("page/curve.css")
    )?;
    head(out, source)?;
    writeln!(
        out,
        "<noscript><p class=\"note\">The drawings of memory and streams, and the table of \
         decisions, need JavaScript; it is \
         in this file.</p></noscript>"
    )?;
    writeln!(
        out,
        "<section id=\"time\">\n<h2>One step in time</h2>\n<p class=\"lead\">A step of {}, \
         simulated, among others like it. \
         Drag to pan; Ctrl, Shift or ⌘ and the wheel zoom, as do the buttons; click a moment to \
         see the tensors in memory.</p>\n\
         <div class=\"tools\"><button type=\"button\" data-zoom=\"in\">+</button><button \
         type=\"button\" \
         data-zoom=\"out\">−</button><button type=\"button\" data-zoom=\"all\">whole \
         step</button><span id=\"range\"></span></div>\n\
         <h3>Device memory</h3>\n<div class=\"legend\" id=\"classes\"></div>\n\
         <canvas id=\"memory\" class=\"figure\" tabindex=\"0\" aria-label=\"Device memory over \
         time, by class\"></canvas>\n\
         <h3>Streams</h3>\n<div class=\"legend\" id=\"kinds\"></div>\n\
         <canvas id=\"streams\" class=\"figure\" tabindex=\"0\" aria-label=\"What each stream \
         does when\"></canvas>\n\
         {}<div id=\"tip\" hidden=\"hidden\"></div>\n</section>",
        duration(timeline.micros),
        beyond(source.compiled)
    )?;
    peak(out, source)?;
    decisions(out, source)?;
    budgets(out, source)?;
    streams(out, source)?;
    made_by(out, source)?;
    passes(out, source.times)?;
    unsupported(out, source.unsupported)?;
    writeln!(
        out,
        "<footer>lighterage {}. Times are predicted. Places and waits are proved: every read \
         finds its value, every \
         conflict is ordered.</footer>\n</main>",
        env!("CARGO_PKG_VERSION")
    )?;
    let data = data(source, &residences, &grouped);
    writeln!(
        out,
        "<script id=\"data\" type=\"application/json\">{}</script>",
        embedded(&data)
    )?;
    writeln!(
        out,
        "<script>\n{}</script>\n</body>\n</html>",
        include_str!("page/page.js")
    )
}

// --- in words ---

/// The title and the figures.
fn head(out: &mut String, source: &Source<'_>) -> std::fmt::Result {
    let Program {
        graph, schedule, ..
    } = &source.compiled.program;
    let options = &source.options;
    let optimizer = match options.optimizer.name() {
        "none" => "no optimizer".to_string(),
        name => format!(
            "{name}, updates {}",
            match update_name(options.update) {
                "backward" => "in backward",
                _ => "after backward",
            }
        ),
    };
    writeln!(
        out,
        "<header>\n<h1>{}</h1>\n<p class=\"lead\">on <b>{}</b> · {} · planner {} · {} lines</p>",
        escaped(&graph.name),
        escaped(&schedule.device),
        escaped(&optimizer),
        escaped(&source.compiled.planner()),
        grouped_digits(schedule.instrs.len())
    )?;
    writeln!(out, "<dl class=\"figures\">")?;
    for (what, value, remark) in figures(source) {
        let (what, value, remark) = (escaped(what), escaped(&value), escaped(&remark));
        writeln!(
            out,
            "<div><dt>{what}</dt><dd><b>{value}</b><span>{remark}</span></dd></div>"
        )?;
    }
    writeln!(out, "</dl>\n</header>")
}

/// A figure of the head: name, value, remark.
type Figure = (&'static str, String, String);

/// The figures in order. A new figure is one line.
fn figures(source: &Source<'_>) -> Vec<Figure> {
    let Compiled {
        timeline,
        certificate,
        ..
    } = source.compiled;
    let fastest = source.curve.first().map_or(timeline.micros, |p| p.micros);
    let mut figures: Vec<Figure> = vec![(
        "predicted step",
        duration(timeline.micros),
        format!(
            "{:+.1}% over the fastest plan",
            100.0 * (timeline.micros / fastest.max(f64::MIN_POSITIVE) - 1.0)
        ),
    )];
    if let Some(Certificate {
        lower_bound, gap, ..
    }) = certificate
    {
        let remark = format!("no plan at this budget is faster; gap {:.1}%", 100.0 * gap);
        figures.push(("lower bound", duration(*lower_bound), remark));
    }
    figures.extend(memory_figures(source));
    figures.extend([
        (
            "recomputing",
            duration(timeline.recomputed),
            format!(
                "{} of the step",
                share_of(timeline.recomputed, timeline.micros)
            ),
        ),
        (
            "moved a step",
            short(timeline.swapped_bytes),
            "swaps and states, both ways over the link".into(),
        ),
    ]);
    if timeline.disk_bytes > 0 {
        let remark = "in a step, between the host and the disk".into();
        figures.push(("read and written", short(timeline.disk_bytes), remark));
    }
    figures.extend(loss(source.compiled));
    figures.extend(source.compiled.decided.layout.as_ref().map(protrain));
    figures
}

fn memory_figures(source: &Source<'_>) -> Vec<Figure> {
    let Compiled {
        program,
        decided,
        planned_peak,
        ..
    } = source.compiled;
    let of_keep = |bytes: u64| {
        format!(
            "{} of keeping everything",
            share_of(bytes as f64, decided.keep_peak as f64)
        )
    };
    let mut figures: Vec<Figure> =
        vec![("planned peak", short(*planned_peak), of_keep(*planned_peak))];
    if let Some(budget) = decided.budget {
        figures.push((
            "budget",
            short(budget),
            format!("{} used", share_of(*planned_peak as f64, budget as f64)),
        ));
    }
    let smallest = smallest(source);
    figures.extend([
        (
            "in use at the peak",
            short(source.peak.bytes),
            format!(
                "{} in gaps and in ended parts of chunks",
                short(planned_peak.saturating_sub(source.peak.bytes))
            ),
        ),
        ("smallest feasible", short(smallest), of_keep(smallest)),
        (
            "keep everything",
            short(decided.keep_peak),
            "nothing swapped or recomputed".into(),
        ),
    ]);
    for pool in source.compiled.pools_beyond() {
        let peak = program.plan.as_ref().map_or(0, |plan| plan.peak[pool]);
        let PoolData { space, limit, .. } = program.schedule.pools[pool];
        let what = match space {
            MemorySpace::Disk => "disk peak",
            MemorySpace::Host | MemorySpace::Device(_) => "host peak",
        };
        let of = limit.map_or("no limit".into(), |limit| format!("of {}", short(limit)));
        figures.push((what, short(peak), of));
    }
    figures
}

/// A part as a share of a whole.
fn share_of(part: f64, whole: f64) -> String {
    if whole > 0.0 {
        format!("{:.1}%", 100.0 * part / whole)
    } else {
        "-".into()
    }
}

/// The layout in the words of ProTrain's paper.
fn protrain(layout: &Described) -> Figure {
    let times = layout.times;
    let remark = format!(
        "N_chunk {} of {}: {}; N_block {}, N_interval {}: {}; by formula {}, {}",
        layout.n_chunk,
        short(layout.chunk_bytes),
        layout.chunks,
        layout.n_block,
        interval(layout),
        layout.blocks,
        duration(times.step()),
        short(layout.memory)
    );
    ("protrain", layout.config.to_string(), remark)
}

/// `N_interval` of a layout; `-` if no number of blocks hides a swap.
pub fn interval(layout: &Described) -> String {
    match layout.n_interval {
        usize::MAX => "-".into(),
        blocks => blocks.to_string(),
    }
}

/// How the loss is computed, if there was a choice, and the cost of the alternative.
fn loss(compiled: &Compiled) -> Option<Figure> {
    let chunks = compiled.loss_chunks;
    let name = |chunks| {
        if chunks == 1 {
            "whole".to_string()
        } else {
            format!("in {chunks} chunks")
        }
    };
    let other = compiled
        .loss_variants
        .iter()
        .find(|way| way.chunks != chunks);
    let remark = other.map(|way| match way.outcome.fastest {
        Some((bytes, time)) => {
            format!("{}: {}, {}", name(way.chunks), short(bytes), duration(time))
        }
        None => format!(
            "{}: {}, which does not fit",
            name(way.chunks),
            short(way.outcome.keep.0)
        ),
    });
    (1 < chunks || other.is_some()).then(|| ("loss", name(chunks), remark.unwrap_or_default()))
}

/// The tensors in memory at the peak.
fn peak(out: &mut String, source: &Source<'_>) -> std::fmt::Result {
    let Peak {
        at, bytes, tensors, ..
    } = source.peak;
    let grouped = Grouped::new(source, tensors);
    let there: Vec<(usize, &Residence)> = tensors.iter().enumerate().collect();
    writeln!(
        out,
        "<section id=\"peak\">\n<h2>Tensors in memory</h2>\n<p class=\"lead\" id=\"moment\">At the \
         peak, {} into the step: {} in {} \
         tensors. The pool has {}{}.</p>\n<div class=\"beside\">",
        duration(*at),
        short(*bytes),
        there.len(),
        short(source.compiled.planned_peak),
        if *bytes < source.compiled.planned_peak {
            ": the rest lies between tensors, or in parts of chunks that are no longer used"
        } else {
            ""
        }
    )?;
    class_sums(out, &there, *bytes, &grouped)?;
    let graph = &source.compiled.program.graph;
    list_tensors(out, graph, &there, &grouped)?;
    writeln!(out, "</div>\n</section>")
}

/// The table of tensors by class; `bytes` is their sum.
fn class_sums(
    out: &mut String,
    there: &[(usize, &Residence)],
    bytes: u64,
    grouped: &Grouped,
) -> std::fmt::Result {
    let mut sums = [(0u64, 0usize); CLASSES.len()];
    for (k, residence) in there {
        let (bytes, count) = &mut sums[grouped.class[*k]];
        *bytes += residence.bytes;
        *count += 1;
    }
    writeln!(
        out,
        "<table id=\"sums\"><thead><tr><th>class</th><th>tensors</th><th>bytes</th>\
         <th>share</th></tr></thead><tbody>"
    )?;
    for (k, (sum, count)) in sums.iter().enumerate().filter(|(_, (_, count))| 0 < *count) {
        let share = 100.0 * *sum as f64 / bytes.max(1) as f64;
        writeln!(
            out,
            "<tr><td><i class=\"key c{k}\"></i>{}</td><td class=\"n\">{count}</td><td \
             class=\"n\">{}</td><td \
             class=\"n\">{share:.1}%</td></tr>",
            CLASSES[k],
            short(*sum)
        )?;
    }
    writeln!(out, "</tbody></table>")
}

/// The table of the largest tensors.
fn list_tensors(
    out: &mut String,
    graph: &Graph,
    there: &[(usize, &Residence)],
    grouped: &Grouped,
) -> std::fmt::Result {
    writeln!(
        out,
        "<div class=\"scroll\"><table \
         id=\"there\"><thead><tr><th>tensor</th><th>module</th><th>class</th>\
         <th>bytes</th></tr></thead><tbody>"
    )?;
    for (k, residence) in there.iter().take(NAMED) {
        let class = grouped.class[*k];
        writeln!(
            out,
            "<tr><td><code>{}</code></td><td>{}</td><td><i class=\"key c{class}\"></i>{}</td><td \
             class=\"n\">{}</td></tr>",
            escaped(&residence.name),
            escaped(module::of(graph, residence)),
            CLASSES[class],
            short(residence.bytes)
        )?;
    }
    if NAMED < there.len() {
        let rest: u64 = there[NAMED..].iter().map(|(_, r)| r.bytes).sum();
        let n = there.len() - NAMED;
        writeln!(
            out,
            "<tr><td>{n} more</td><td></td><td></td><td class=\"n\">{}</td></tr>",
            short(rest)
        )?;
    }
    writeln!(out, "</tbody></table></div>")
}

/// The figure of each pool behind the link.
fn beyond(compiled: &Compiled) -> String {
    let figure = |pool: Pool| {
        let title = match compiled.program.schedule.pools[pool].space {
            MemorySpace::Disk => "Disk",
            MemorySpace::Host | MemorySpace::Device(_) => "Host memory",
        };
        format!(
            "<h3>{title}</h3>\n<canvas id=\"pool{0}\" class=\"figure beyond\" data-pool=\"{0}\" \
             tabindex=\"0\" aria-label=\"{title} over time, by class\"></canvas>\n",
            pool.index()
        )
    };
    compiled.pools_beyond().map(figure).collect()
}

/// The counts of decisions, and the place of their table.
fn decisions(out: &mut String, source: &Source<'_>) -> std::fmt::Result {
    let Tally {
        kept,
        swap,
        recompute,
        hosted,
    } = source.tally;
    let decisions = &source.compiled.decided.decisions;
    let beyond = machine::beyond(source.problem.device).name();
    let words = [
        (kept, "tensors are kept"),
        (swap, "are swapped over a gap"),
        (recompute, "are recomputed after one"),
        (hosted, &format!("states live on the {beyond}")),
    ];
    let words: Vec<String> = words
        .iter()
        .map(|(count, what)| {
            format!(
                "{} {what} ({})",
                grouped_digits(count.count as usize),
                short(count.bytes)
            )
        })
        .collect();
    let mut lead = words.join(", ");
    if !decisions.chunks.is_empty() {
        let chunks = match decisions.chunks.len() {
            1 => "1 chunk".into(),
            n => format!("{n} chunks"),
        };
        lead += &format!("; hosted states come in {chunks}");
    }
    if !decisions.on_host.is_empty() {
        lead += &format!("; {} updates run on the host", decisions.on_host.len());
    }
    writeln!(
        out,
        "<section id=\"decided\">\n<h2>Decisions</h2>\n<p class=\"lead\">{lead}.</p>\n<p \
         class=\"hint\">The price is the \
         planner's estimate of what a decision adds to the step. The simulation of the whole step \
         decides, not the sum of prices. The line is that of the planner's schedule for which it \
         decided. <code>lighterage explain MODEL VALUE</code> simulates the \
         alternatives.</p>\n\
         <div class=\"tools\"><input id=\"filter\" type=\"search\" placeholder=\"filter by name, \
         module or class\" \
         aria-label=\"Filter decisions\"/><select id=\"means\" aria-label=\"Means\"><option \
         value=\"\">every means</option>\
         <option>swap</option><option>recompute</option><option>{beyond}</option></select><button \
         type=\"button\" \
         id=\"unfold\">unfold all</button><span id=\"shown\"></span></div>\n<div class=\"scroll \
         tall\"><table \
         id=\"decisions\"><thead></thead><tbody></tbody></table></div>\n</section>"
    )
}

/// The command that wrote the page, and the figures of the device that predictions come from.
fn made_by(out: &mut String, source: &Source<'_>) -> std::fmt::Result {
    let device = source.problem.device;
    let beyond = match machine::beyond(device) {
        MemorySpace::Disk => "disk".to_string(),
        MemorySpace::Host | MemorySpace::Device(_) => "host memory".to_string(),
    };
    let rows = [
        ("device memory", short(device.device_bytes)),
        (&beyond, short(device.host_bytes)),
        ("f32 products", flops(device.f32_flops)),
        ("bf16 and f16 products", flops(device.bf16_flops)),
        (
            "attention",
            flops(device.attention_flops.unwrap_or(device.bf16_flops)),
        ),
        ("memory bandwidth", rate(device.memory_bandwidth)),
        ("start of a kernel", duration(device.launch_micros)),
        ("link, one direction", rate(device.link_bandwidth)),
        (
            "link, both directions",
            format!("{} each", rate(device.link_bandwidth * device.duplex)),
        ),
        ("start of a copy", duration(device.link_micros)),
        ("updates on the host", rate(device.host_bandwidth)),
    ];
    writeln!(
        out,
        "<section id=\"device\">\n<h2>Command and device</h2>\n\
         <p><code>{}</code></p>\n<table><tbody>",
        escaped(&source.command)
    )?;
    for (what, value) in rows {
        let value = escaped(&value);
        writeln!(out, "<tr><td>{what}</td><td class=\"n\">{value}</td></tr>")?;
    }
    writeln!(out, "</tbody></table>\n</section>")
}

/// The smallest budget that fits, bytes.
fn smallest(source: &Source<'_>) -> u64 {
    source
        .compiled
        .decided
        .smallest
        .unwrap_or(source.compiled.planned_peak)
}

/// The curve.
fn budgets(out: &mut String, source: &Source<'_>) -> std::fmt::Result {
    let decided = &source.compiled.decided;
    writeln!(
        out,
        "<section id=\"budgets\">\n<h2>Other budgets</h2>\n<p class=\"lead\">The plans that no \
         other beats in both memory and \
         time: from {} down to {}, below which nothing fits.</p>\n{}",
        short(source.curve.first().map_or(decided.keep_peak, |p| p.bytes)),
        short(smallest(source)),
        curve::svg(source.curve, decided.budget)
    )?;
    writeln!(
        out,
        "<details><summary>Plans: {}</summary>\n<div \
         class=\"scroll\"><table><thead><tr><th>budget</th><th>of keep</th><th>bytes</th>\
         <th>predicted step</th><th>overhead</th><th>1% less \
         costs</th><th></th></tr></thead><tbody>",
        source.curve.len()
    )?;
    for p in source.curve {
        let chosen = match &p.chosen {
            Some(Chosen {
                peaks, dominant, ..
            }) => format!("chosen: {peaks}, {}", escaped(dominant)),
            None => String::new(),
        };
        let class = if p.chosen.is_some() {
            " class=\"chosen\""
        } else {
            ""
        };
        writeln!(
            out,
            "<tr{class}><td class=\"n\">{}</td><td class=\"n\">{:.1}%</td><td \
             class=\"n\">{}</td><td class=\"n\">{}</td><td \
             class=\"n\">{:+.1}%</td><td class=\"n\">{}</td><td>{chosen}</td></tr>",
            short(p.bytes),
            100.0 * p.of_keep,
            p.bytes,
            duration(p.micros),
            100.0 * p.slower,
            p.micros_per_percent.map_or("-".into(), duration)
        )?;
    }
    writeln!(out, "</tbody></table></div></details>\n</section>")
}

/// How busy each stream is, and with what.
fn streams(out: &mut String, source: &Source<'_>) -> std::fmt::Result {
    let Compiled {
        program, timeline, ..
    } = source.compiled;
    let schedule = &program.schedule;
    writeln!(
        out,
        "<section id=\"busy\">\n<h2>What the time is spent on</h2>\n<div \
         class=\"beside\">\n<table><thead><tr><th>stream</th>\
         <th>busy</th><th>of the step</th><th></th></tr></thead><tbody>"
    )?;
    for (stream, data) in schedule.streams.iter() {
        let share = (100.0 * timeline.busy[stream] / timeline.micros.max(f64::MIN_POSITIVE))
            .clamp(0.0, 100.0);
        writeln!(
            out,
            "<tr><td>{}</td><td class=\"n\">{}</td><td class=\"n\">{share:.1}%</td>{}</tr>",
            escaped(&data.name),
            duration(timeline.busy[stream]),
            bar(share)
        )?;
    }
    writeln!(
        out,
        "</tbody></table>\n<table><thead><tr><th>lines</th><th>count</th><th>time</th><th>bytes \
         copied</th></tr></thead><tbody>"
    )?;
    let mut sums = [(0usize, 0f64, 0u64); KINDS.len()];
    for (instr, data) in schedule.instrs.iter() {
        let (count, time, bytes) = &mut sums[kind(&program.graph, data)];
        *count += 1;
        *time += timeline.end[instr] - timeline.start[instr];
        if let InstrKind::Copy { bytes: copied, .. } = data.kind {
            *bytes += copied;
        }
    }
    for (k, (count, time, bytes)) in sums
        .into_iter()
        .enumerate()
        .filter(|(_, (count, ..))| 0 < *count)
    {
        let bytes = if bytes == 0 { "-".into() } else { short(bytes) };
        writeln!(
            out,
            "<tr><td><i class=\"key k{k}\"></i>{}</td><td class=\"n\">{}</td><td \
             class=\"n\">{}</td><td class=\"n\">{bytes}</td></tr>",
            KINDS[k],
            grouped_digits(count),
            duration(time)
        )?;
    }
    writeln!(out, "</tbody></table>\n</div>\n</section>")
}

/// A cell with a bar.
fn bar(percent: f64) -> String {
    format!("<td class=\"bar\"><i style=\"width:{percent:.1}%\"></i></td>")
}

/// The passes' times.
fn passes(out: &mut String, times: &[PassTime]) -> std::fmt::Result {
    let total: f64 = times.iter().map(|(_, time, _)| time.as_secs_f64()).sum();
    writeln!(
        out,
        "<section id=\"passes\">\n<h2>Compiling</h2>\n<p class=\"lead\">{} in \
         all.</p>\n<table><thead><tr><th>pass</th><th>time\
         </th><th>changed</th><th></th></tr></thead><tbody>",
        duration(total * 1e6)
    )?;
    for (name, time, changed) in times {
        writeln!(
            out,
            "<tr><td>{}</td><td class=\"n\">{}</td><td>{}</td>{}</tr>",
            escaped(name),
            duration(time.as_secs_f64() * 1e6),
            if *changed { "yes" } else { "no" },
            bar(100.0 * time.as_secs_f64() / total.max(f64::MIN_POSITIVE))
        )?;
    }
    writeln!(out, "</tbody></table>\n</section>")
}

/// What can be planned, not run.
fn unsupported(out: &mut String, calls: &[torch::Unsupported]) -> std::fmt::Result {
    if calls.is_empty() {
        return Ok(());
    }
    let n = calls.len();
    writeln!(
        out,
        "<section id=\"unsupported\">\n<h2>No kernel</h2>\n<p class=\"lead\">{n} calls have no \
         kernel. In Python, PyTorch computes them, and what it allocates for them is not in this \
         plan; the command line can only plan such a step.</p>\n<ul>"
    )?;
    for call in calls.iter().take(CALLS) {
        let (target, node, why) = (
            escaped(&call.target),
            escaped(&call.node),
            escaped(&call.why),
        );
        writeln!(
            out,
            "<li><code>{target}</code> (node <code>{node}</code>): {why}</li>"
        )?;
    }
    writeln!(out, "</ul>\n</section>")
}

/// `12,345`.
fn grouped_digits(n: usize) -> String {
    let digits = n.to_string();
    let mut out = String::new();
    for (k, digit) in digits.chars().enumerate() {
        if k != 0 && (digits.len() - k).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

// --- for the script ---

/// The class of each residence, as the drawing has it.
struct Grouped {
    class: Vec<usize>,
}

impl Grouped {
    fn new(source: &Source<'_>, residences: &[Residence]) -> Grouped {
        let graph = source.problem.graph;
        let mut is_output = Table::filled(graph.values.len(), false);
        for output in &graph.outputs {
            is_output[graph.root(output.value)] = true;
        }
        let class = |r: &Residence| match r.class {
            Class::Param => 0,
            Class::Moment => 1,
            Class::Buffer | Class::Const | Class::Rng => 2,
            Class::Input => 6,
            Class::Scratch => 7,
            _ if r.values.iter().any(|&value| is_output[graph.root(value)]) => 6,
            Class::Gradient => 3,
            Class::Activation => 4,
            Class::Update => 5,
        };
        Grouped {
            class: residences.iter().map(class).collect(),
        }
    }
}

/// A line's position in [`KINDS`].
fn kind(graph: &Graph, data: &ir::schedule::InstrData) -> usize {
    let phase = match &data.kind {
        InstrKind::Run { node, .. } => Some(graph.nodes[*node].phase),
        InstrKind::Copy { .. } => None,
    };
    match (data.why, phase) {
        (Why::Recompute, _) => 3,
        (Why::SwapOut, _) => 4,
        (Why::SwapIn, _) => 5,
        (Why::Gather, _) => 6,
        (Why::Offload, _) => 7,
        (Why::Feed, _) => 9,
        (Why::Fetch, _) => 10,
        (Why::Load, _) => 11,
        (Why::Store, _) => 12,
        (_, Some(Phase::Forward)) => 0,
        (_, Some(Phase::Backward)) => 1,
        (_, Some(Phase::Optimizer)) => 2,
        (Why::Model | Why::Update, None) => 8,
    }
}

/// Strings that occur often, each once.
#[derive(Default)]
struct Words {
    list: Vec<String>,
    at: BTreeMap<String, usize>,
}

impl Words {
    fn number(&mut self, word: &str) -> usize {
        if let Some(&at) = self.at.get(word) {
            return at;
        }
        self.list.push(word.to_string());
        self.at.insert(word.to_string(), self.list.len() - 1);
        self.list.len() - 1
    }
}

/// Everything that the script draws.
fn data(source: &Source<'_>, residences: &[Residence], grouped: &Grouped) -> Json {
    let Compiled {
        program,
        timeline,
        decided,
        planned_peak,
        ..
    } = source.compiled;
    let schedule = &program.schedule;
    let mut words = Words::default();
    let (peak_at, peak_bytes) = explain::fullest(residences, DEVICE);
    let stays = stays(&program.graph, residences, grouped, &mut words);
    let lines = lines(source.compiled, &mut words);
    let decisions = rows(source, &mut words);
    let pool = |pool: Pool| {
        let peak = program.plan.as_ref().map_or(0, |plan| plan.peak[pool]);
        json!({"name": schedule.pools[pool].name, "peak": peak,
            "limit": schedule.pools[pool].limit})
    };
    json!({
        "model": program.graph.name,
        "device": schedule.device,
        "step": rounded(timeline.micros),
        "budget": decided.budget,
        "planned_peak": planned_peak,
        "peak": {"at": peak_at, "bytes": peak_bytes},
        "pools": schedule.pools.ids().map(pool).collect::<Vec<_>>(),
        "streams": schedule.streams.iter().map(|(stream, data): (Stream, _)| json!({
            "name": data.name,
            "busy": rounded(timeline.busy[stream]),
        })).collect::<Vec<_>>(),
        "classes": CLASSES,
        "kinds": KINDS,
        "lines": lines,
        "stays": stays,
        "decisions": decisions,
        "curve": curve::json(source.curve),
        "words": words.list,
    })
}

/// The residences, column by column.
fn stays(graph: &Graph, residences: &[Residence], grouped: &Grouped, words: &mut Words) -> Json {
    let column = |of: &dyn Fn(&Residence) -> Json| residences.iter().map(of).collect::<Vec<_>>();
    json!({
        "pool": column(&|r| json!(r.pool.index())),
        "class": grouped.class,
        "bytes": column(&|r| json!(r.bytes)),
        "from": column(&|r| json!(r.from)),
        "to": column(&|r| json!(r.to)),
        "name": residences.iter().map(|r| words.number(&r.name)).collect::<Vec<_>>(),
        "module": residences
            .iter()
            .map(|r| words.number(module::of(graph, r)))
            .collect::<Vec<_>>(),
    })
}

/// The lines of the schedule, column by column.
fn lines(compiled: &Compiled, words: &mut Words) -> Json {
    let Compiled {
        program, timeline, ..
    } = compiled;
    let (graph, schedule) = (&program.graph, &program.schedule);
    let (mut names, mut ops, mut modules, mut bytes) = (vec![], vec![], vec![], vec![]);
    for data in schedule.instrs.values() {
        let (name, op, module, size) = match &data.kind {
            InstrKind::Run { node, .. } => (
                graph.node_name(*node),
                graph.nodes[*node].op.name(),
                graph.nodes[*node].module.as_str(),
                0,
            ),
            InstrKind::Copy { src, bytes, .. } => (
                schedule.buffers[src.buffer].name.as_str(),
                "copy",
                "",
                *bytes,
            ),
        };
        names.push(words.number(name));
        ops.push(words.number(op));
        modules.push(words.number(module));
        bytes.push(size);
    }
    json!({
        "stream": schedule.instrs.values().map(|data| data.stream.index()).collect::<Vec<_>>(),
        "kind": schedule.instrs.values().map(|data| kind(graph, data)).collect::<Vec<_>>(),
        "start": timeline.start.values().map(|&t| rounded(t)).collect::<Vec<_>>(),
        "end": timeline.end.values().map(|&t| rounded(t)).collect::<Vec<_>>(),
        "name": names,
        "op": ops,
        "module": modules,
        "bytes": bytes,
    })
}

/// One row per decision: value, class, module, block, bytes, means, where, price, and the
/// estimates. Decisions made together, such as a block's states, have one reason; each row has its
/// share of it, by bytes.
fn rows(source: &Source<'_>, words: &mut Words) -> Vec<Json> {
    let (graph, decisions) = (source.problem.graph, &source.compiled.decided.decisions);
    let params: BTreeSet<&str> = graph
        .states
        .values()
        .map(|state| state.path.as_str())
        .collect();
    let mut row = |value: Value, means: &str, place: Vec<String>, reason: &Reason| {
        let decision = Decision {
            value,
            module: module(graph, &params, value),
            means,
            place,
            reason,
        };
        decision.row(graph, words)
    };
    let mut rows = vec![];
    let beyond = machine::beyond(source.problem.device).name();
    for (&state, reason) in &decisions.hosted {
        let data = &graph.states[state];
        let chunk = decisions.chunks.iter().position(|c| c.contains(&state));
        let chunk = chunk.map(|chunk| format!("comes in chunk {chunk}"));
        let update = graph.def_node(graph.root(data.after));
        let on_host = update.is_some_and(|node| decisions.on_host.contains(&node));
        let update = on_host.then(|| "updated on the host".to_string());
        let gaps = (decisions.cuts.keys()).filter(|gap| gap.value == data.before);
        let gaps = gaps.map(|gap| format!("not on the device after access {}", gap.gap));
        let place = chunk.into_iter().chain(update).chain(gaps).collect();
        rows.push(row(data.before, &beyond, place, reason));
    }
    let hosted = explain::hosted_values(source.problem, decisions);
    for (gap, (means, reason)) in &decisions.cuts {
        let means = match means {
            // It is in the state's row.
            Means::Swap if hosted.contains(&gap.value) => continue,
            Means::Swap => "swap",
            Means::Recompute => "recompute",
        };
        let place = vec![format!("after access {}", gap.gap)];
        rows.push(row(gap.value, means, place, reason));
    }
    for (gap, reason) in &decisions.solved(source.problem) {
        let place = vec![format!("after access {}", gap.gap)];
        rows.push(row(gap.value, "recompute", place, reason));
    }
    rows
}

/// The path of the module that a value belongs to; `params` are the paths of all states.
fn module<'a>(graph: &'a Graph, params: &BTreeSet<&str>, value: Value) -> &'a str {
    match graph.values[value].def {
        Def::Input(_) => "",
        Def::State(state) => {
            let path = graph.states[state].path.as_str();
            // A moment belongs to its parameter's module. Its path is `exp_avg.` and that of the
            // parameter.
            let of = path
                .split_once('.')
                .map(|(_, of)| of)
                .filter(|of| params.contains(of));
            of.unwrap_or(path)
                .rsplit_once('.')
                .map_or("", |(module, _)| module)
        }
        Def::Node(node, _) => graph.nodes[node].module.as_str(),
    }
}

/// What a row is made of.
struct Decision<'a> {
    value: Value,
    module: &'a str,
    means: &'a str,
    place: Vec<String>,
    reason: &'a Reason,
}

impl Decision<'_> {
    fn row(self, graph: &Graph, words: &mut Words) -> Json {
        let Decision {
            value,
            module,
            means,
            place,
            reason,
        } = self;
        let bytes = graph.values[value].ty.bytes();
        let share = (bytes as f64 / reason.bytes.max(1) as f64).min(1.0);
        let price = if means == "recompute" {
            reason.recompute
        } else {
            reason.swap
        };
        let together = match price {
            Some(price) if share < NEARLY_ALONE => Some(format!(
                "one of {} taken together for {}",
                short(reason.bytes),
                duration(price)
            )),
            _ => None,
        };
        // No node computes an input.
        let is_input = matches!(graph.values[value].def, Def::Input(_));
        let recompute = reason.recompute.filter(|_| !is_input);
        let reasoned = reason.swap.is_some() || reason.recompute.is_some();
        let began = (!reasoned).then(|| "the search began with it".to_string());
        let place: Vec<String> = place.into_iter().chain(together).chain(began).collect();
        let shared = |price: Option<f64>| price.map(|price| rounded(price * share));
        json!({
            "name": words.number(&graph.values[value].name),
            "class": explain::class(graph, value).name(),
            "module": words.number(module),
            "block": words.number(block(module)),
            "bytes": bytes,
            "means": means,
            "where": place.join("; "),
            "line": reasoned.then_some(reason.line),
            "price": shared(price),
            "swap": shared(reason.swap),
            "recompute": shared(recompute),
        })
    }
}

/// The block of a module: its path up to its first number, `model.layers.3` of
/// `model.layers.3.mlp.up`; else its first two parts.
fn block(module: &str) -> &str {
    let mut end = 0;
    for (k, part) in module.split('.').enumerate() {
        end += part.len();
        if !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit()) {
            return &module[..end];
        }
        if k == 1 && !module[end..].bytes().any(|b| b.is_ascii_digit()) {
            return &module[..end];
        }
        end += 1;
    }
    module
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_cannot_leave_their_place() {
        assert_eq!(
            escaped("<a href=\"x\">&'\u{0}"),
            "&lt;a href=&quot;x&quot;&gt;&amp;&#39;\u{FFFD}"
        );
        let hostile = "</script><!--&\u{2028}";
        let text = embedded(&json!(hostile));
        assert!(!text.contains(['<', '>', '&']), "{text}");
        assert_eq!(serde_json::from_str::<String>(&text).unwrap(), hostile);
    }

    #[test]
    fn modules_are_grouped_by_block() {
        assert_eq!(block("model.layers.3.mlp.up"), "model.layers.3");
        assert_eq!(block("model.layers.3"), "model.layers.3");
        assert_eq!(block("a.b.c.3.d"), "a.b.c.3");
        assert_eq!(block("model.lm_head.inner"), "model.lm_head");
        assert_eq!(block("fc1"), "fc1");
        assert_eq!(block(""), "");
    }

    #[test]
    fn long_numbers_are_grouped() {
        let written = [0, 12, 123, 1234, 123456, 1234567].map(grouped_digits);
        assert_eq!(written, ["0", "12", "123", "1,234", "123,456", "1,234,567"]);
    }
}
