//! `lighterage plan`: what a step needs, what was decided, what other budgets would cost.

use crate::args::{Compiling, PlanArgs};
use crate::buckets::Sizes;
use crate::curve::{self, Point};
use crate::data::{check_writable, save_atomically};
use crate::failure::Failure;
use crate::model::{Machine, Model};
use crate::observe::Dumps;
use crate::page::{self, PassTime, update_name};
use crate::size::{micros, short};
use crate::{buckets, micro_batches, model, module, out, size};
use ir::schedule::MemorySpace;
use ir::{Device, Id, Phase, Program, Stream, text};
use passes::cost::{self, ProductKind, ProductRate};
use passes::decide::Problem;
use passes::decide::bound::Certificate;
use passes::decide::layout::Described;
use passes::explain::{self, Count, Peak, Tally};
use passes::pipeline::{Compiled, LossVariant};
use passes::plan::machine::{COMPUTE, D2H, H2D, beyond};
use placement::gap;
use serde_json::{Value as Json, json};
use std::collections::BTreeSet;
use std::fmt::Write;

/// Tensors at the peak that are named.
const NAMED: usize = 10;
/// Rows of the table of budgets, for people.
const ROWS: usize = 12;
/// The largest steps up in time of which both sides are among the rows.
const JUMPS: usize = 3;

/// Runs the command.
pub(crate) fn run(args: &PlanArgs) -> Result<(), Failure> {
    for (option, path) in [
        ("--report", &args.report),
        ("--curve-svg", &args.curve_svg),
        ("--lines", &args.lines),
    ] {
        path.iter()
            .try_for_each(|path| check_writable(option, path))?;
    }
    let (reading, sizes) = buckets::largest(&args.model.model, &args.model.reading, &args.buckets)?;
    let model = model::read(&args.model.model, &reading, &args.compiling.forward)?;
    let machine = model::machine(&args.compiling)?;
    let (model, compiling, compiled, times) = planned(model, &args.compiling, &machine)?;
    let smaller = match &sizes {
        Some(sizes) => sizes.compiled(&model, &compiled, &compiling, &machine)?,
        None => vec![],
    };
    let problem = Problem::new(&compiled.program.graph, &machine.device, &*machine.cost);
    let facts = Facts {
        args,
        compiled: &compiled,
        buckets: sizes.as_ref().map(|sizes| (sizes, &smaller[..])),
        unsupported: &model.unsupported,
        tally: explain::tally(&problem, &compiled.decided.decisions),
        peak: explain::peak(&compiled),
        curve: curve::points(&compiled),
        products: cost::product_rates(&compiled.program.graph, &*machine.cost),
        device: &machine.device,
    };
    if let Some(path) = &args.curve_svg {
        let svg = curve::svg_file(&facts.curve, compiled.decided.budget);
        save_atomically(path, &[svg.as_bytes()])?;
    }
    if let Some(path) = &args.lines {
        save_atomically(path, &[lines(&compiled).as_bytes()])?;
    }
    if let Some(path) = &args.report {
        let source = page::Source {
            compiled: &compiled,
            problem: &problem,
            options: model::options(&compiling),
            tally: facts.tally,
            peak: &facts.peak,
            curve: &facts.curve,
            times: &times,
            command: command_line(),
            unsupported: &model.unsupported,
        };
        save_atomically(path, &[page::page(&source).as_bytes()])?;
    }
    if args.json {
        out::line(&facts.json().to_string());
        return Ok(());
    }
    let report = facts.report();
    match args.compiling.dump_ir_after.is_some() && args.compiling.dump_dir.is_none() {
        true => out::note(report.trim_end()),
        false => out::text(&report),
    }
    Ok(())
}

/// The plan of a model's step, with the options that were left open.
fn planned(
    model: Model,
    compiling: &Compiling,
    machine: &Machine,
) -> Result<(Model, Compiling, Compiled, Vec<PassTime>), Failure> {
    let (model, compiling) = micro_batches::decide(model, compiling, machine)?;
    let (compiled, times) = model::plan(&model.graph, &compiling, machine, Dumps::Stdout)?;
    Ok((model, compiling, compiled, times))
}

/// The step's lines as a table of comma-separated values.
fn lines(compiled: &Compiled) -> String {
    let Program {
        graph, schedule, ..
    } = &compiled.program;
    let quoted = |text: &str| format!("\"{}\"", text.replace('"', "\"\""));
    let mut table = String::from(
        "line,stream,start_ms,end_ms,phase,module,before_bytes,delta_bytes,after_bytes,text\n",
    );
    for line in explain::lines(compiled) {
        let (start, end) = (
            compiled.timeline.start[line.instr],
            compiled.timeline.end[line.instr],
        );
        // Writing to a String cannot fail.
        let _ = writeln!(
            table,
            "{},{},{:.6},{:.6},{},{},{},{},{},{}",
            line.instr.index(),
            schedule.streams[schedule.instrs[line.instr].stream].name,
            start / 1e3,
            end / 1e3,
            line.phase.map_or("", Phase::name),
            quoted(&line.module),
            line.before,
            line.delta,
            line.after,
            quoted(&text::print_instr(graph, schedule, line.instr)),
        );
    }
    table
}

/// The command line as a shell takes it.
fn command_line() -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=%,:+@".contains(c);
    let quoted = |word: String| match !word.is_empty() && word.chars().all(plain) {
        true => word,
        false => format!("'{}'", word.replace('\'', r"'\''")),
    };
    let words = std::env::args_os().skip(1);
    let words = words.map(|word| quoted(word.to_string_lossy().into_owned()));
    let words: Vec<String> = std::iter::once("lighterage".into()).chain(words).collect();
    words.join(" ")
}

struct Facts<'a> {
    args: &'a PlanArgs,
    compiled: &'a Compiled,
    /// The steps of smaller batches.
    buckets: Option<(&'a Sizes, &'a [(u64, Compiled)])>,
    unsupported: &'a [torch::Unsupported],
    tally: Tally,
    peak: Peak,
    curve: Vec<Point>,
    products: Vec<ProductRate>,
    device: &'a Device,
}

impl Facts<'_> {
    /// The data sheet's figure for products of a kind.
    fn peak_flops(&self, kind: ProductKind) -> Option<f64> {
        match kind {
            ProductKind::Half => self.device.bf16_peak,
            ProductKind::Single => self.device.f32_peak,
            ProductKind::Attention => None,
        }
    }

    /// Of each pool: its name, its peak, and the least that its buffers need.
    fn pools(&self) -> Vec<(&str, u64, u64)> {
        let Program { schedule, plan, .. } = &self.compiled.program;
        let peak = |pool| plan.as_ref().map_or(0, |plan| plan.peak[pool]);
        schedule
            .pools
            .iter()
            .map(|(pool, data)| (data.name.as_str(), peak(pool), self.compiled.bounds[pool]))
            .collect()
    }

    fn json(&self) -> Json {
        let Compiled {
            program,
            timeline,
            decided,
            certificate,
            planned_peak,
            live_peak,
            ..
        } = self.compiled;
        let options = model::options(&self.args.compiling);
        let count = |count: Count| json!({"count": count.count, "bytes": count.bytes});
        let millis = |micros: f64| micros / 1e3;
        let unsupported: Vec<_> = self
            .unsupported
            .iter()
            .map(|op| json!({"op": op.target, "node": op.node, "why": op.why}))
            .collect();
        let tensors = self.peak.tensors.iter().take(NAMED);
        let tensors: Vec<_> = tensors
            .map(|t| {
                json!({
                    "name": t.name,
                    "bytes": t.bytes,
                    "class": t.class.name(),
                    "module": module::of(&program.graph, t),
                })
            })
            .collect();
        json!({
            "model": program.graph.name,
            "device": program.schedule.device,
            "optimizer": options.optimizer.name(),
            "update": update_name(options.update),
            "micro_batches": options.micro_batches.unwrap_or(1),
            "planner": options.planner.name(),
            "found_by": decided.origin.name(),
            "protrain": decided.layout.as_ref().map(protrain_json),
            "budget_bytes": decided.budget,
            "planned_peak_bytes": planned_peak,
            "keep_peak_bytes": decided.keep_peak,
            "lower_bound_bytes": live_peak,
            "smallest_feasible_bytes": decided.smallest,
            "host_peak_bytes": self.compiled.peak_in(MemorySpace::Host).unwrap_or(0),
            "disk_peak_bytes": self.compiled.peak_in(MemorySpace::Disk),
            "addresses": self.addresses_json(),
            "predicted_ms": millis(timeline.micros),
            "products": self.products_json(),
            "lower_bound_ms": certificate.as_ref()
                .map(|certificate| millis(certificate.lower_bound)),
            "gap": certificate.as_ref().map(|certificate| certificate.gap),
            "lower_bound_if": certificate
                .iter()
                .flat_map(|certificate| &certificate.changes)
                .map(|&(change, micros)| (change.name().to_string(), json!(millis(micros))))
                .collect::<serde_json::Map<_, _>>(),
            "swapped_bytes": timeline.swapped_bytes,
            "disk_bytes": timeline.disk_bytes,
            "recomputed_ms": millis(timeline.recomputed),
            "loss_chunks": self.compiled.loss_chunks,
            "loss_ways": self.loss_variants_json(),
            "link_busy_ms": self.link_busy_json(),
            "lines": program.schedule.instrs.len(),
            "decisions": {
                "kept": count(self.tally.kept),
                "swap": count(self.tally.swap),
                "recompute": count(self.tally.recompute),
                "hosted_states": count(self.tally.hosted),
            },
            "curve": curve::json(&self.curve),
            "peak_at_ms": millis(self.peak.at),
            "peak_line": self.peak.text,
            "peak_in_use_bytes": self.peak.bytes,
            "peak_tensors": tensors,
            "unsupported": unsupported,
            "buckets": self.buckets_json(),
        })
    }

    /// The busy time of each stream of copies.
    fn link_busy_json(&self) -> Json {
        let streams = self.compiled.program.schedule.streams.iter();
        let busy = &self.compiled.timeline.busy;
        let copies = streams.filter(|(stream, data)| *stream != COMPUTE && data.name != "host");
        copies
            .map(|(stream, data)| (data.name.clone(), json!(busy[stream] / 1e3)))
            .collect::<serde_json::Map<_, _>>()
            .into()
    }

    /// The name of the size that differs, and the step for each of its values, largest first.
    fn steps(&self) -> Option<(&str, Vec<(u64, &Compiled)>)> {
        let (sizes, smaller) = self.buckets?;
        let mut steps = vec![(sizes.largest(), self.compiled)];
        steps.extend(smaller.iter().map(|(size, compiled)| (*size, compiled)));
        Some((sizes.name(), steps))
    }

    fn buckets_json(&self) -> Option<Vec<Json>> {
        let (name, steps) = self.steps()?;
        let one = |(size, compiled): (u64, &Compiled)| {
            json!({
                name: size,
                "planned_peak_bytes": compiled.planned_peak,
                "predicted_ms": compiled.timeline.micros / 1e3,
            })
        };
        Some(steps.into_iter().map(one).collect())
    }

    fn write_buckets(&self, out: &mut String) -> std::fmt::Result {
        let Some((name, steps)) = self.steps() else {
            return Ok(());
        };
        writeln!(
            out,
            "\n  steps that take turns on the memory and the states of this one"
        )?;
        writeln!(out, "  {name:<18} {:>10}  {:>14}", "peak", "predicted step")?;
        for (size, compiled) in steps {
            let (peak, time) = (
                short(compiled.planned_peak),
                micros(compiled.timeline.micros),
            );
            writeln!(out, "  {size:<18} {peak:>10}  {time:>14}")?;
        }
        Ok(())
    }

    fn products_json(&self) -> Vec<Json> {
        let rate = |rate: &ProductRate| {
            json!({
                "kind": rate.kind.name(),
                "flops": rate.flops,
                "ms": rate.micros / 1e3,
                "flops_per_second": rate.per_second(),
                "peak_flops_per_second": self.peak_flops(rate.kind),
            })
        };
        self.products.iter().map(rate).collect()
    }

    /// What the prediction takes products to run at.
    fn products(&self) -> String {
        let one = |rate: &ProductRate| {
            let reached = rate.per_second();
            let share = self.peak_flops(rate.kind).map(|peak| reached / peak);
            let share = share.map(|share| format!(" ({:.0}% of the peak)", 100.0 * share));
            let share = share.unwrap_or_default();
            format!("{} {}{share}", rate.kind.name(), size::flops(reached))
        };
        let all: Vec<String> = self.products.iter().map(one).collect();
        all.join(", ")
    }

    fn addresses_json(&self) -> Vec<Json> {
        let pool = |(pool, peak, bound): (&str, u64, u64)| {
            json!({
                "pool": pool,
                "peak_bytes": peak,
                "lower_bound_bytes": bound,
                "gap": gap(peak, bound),
            })
        };
        self.pools().into_iter().map(pool).collect()
    }

    fn loss_variants_json(&self) -> Vec<Json> {
        let millis = |micros: f64| micros / 1e3;
        let variant = |LossVariant { chunks, outcome }: &LossVariant| {
            json!({
                "chunks": chunks,
                "keep_peak_bytes": outcome.keep.0,
                "keep_ms": millis(outcome.keep.1),
                "smallest_feasible_bytes": outcome.smallest,
                "planned_peak_bytes": outcome.fastest.map(|fastest| fastest.0),
                "predicted_ms": outcome.fastest.map(|fastest| millis(fastest.1)),
            })
        };
        self.compiled.loss_variants.iter().map(variant).collect()
    }

    /// The report for people.
    fn report(&self) -> String {
        let mut out = String::new();
        // Writing to a String cannot fail.
        let _ = self.write(&mut out);
        out
    }

    fn write(&self, out: &mut String) -> std::fmt::Result {
        let Compiled {
            program,
            decided,
            planned_peak,
            ..
        } = self.compiled;
        let options = model::options(&self.args.compiling);
        writeln!(
            out,
            "{} on {}: {} lines, optimizer {}, planner {}\n",
            program.graph.name,
            program.schedule.device,
            program.schedule.instrs.len(),
            options.optimizer.name(),
            self.compiled.planner()
        )?;
        self.write_bytes(out)?;
        self.write_times(out)?;
        self.write_tally(out)?;
        self.write_protrain(out)?;
        if 1 < self.compiled.loss_chunks || 1 < self.compiled.loss_variants.len() {
            self.write_loss_variants(out)?;
        }
        self.write_buckets(out)?;
        self.write_peak(out)?;
        self.write_curve(out)?;
        self.write_unsupported(out)?;
        let budget = decided.budget.map_or(String::new(), |budget| {
            format!(" of {}", size::short(budget))
        });
        writeln!(
            out,
            "\nproved: every read finds its value, every conflict is ordered; peak {}{budget}",
            short(*planned_peak)
        )
    }

    /// A number of bytes as a share of what keeping everything needs, in 14 columns.
    fn share(&self, bytes: u64) -> String {
        let keep = self.compiled.decided.keep_peak.max(1);
        match 100.0 * bytes as f64 / keep as f64 {
            share if share < 1000.0 => format!("{share:5.1}% of keep"),
            _ => format!("{:14}", ""),
        }
    }

    fn write_bytes(&self, out: &mut String) -> std::fmt::Result {
        let decided = &self.compiled.decided;
        let mut row = |name: &str, bytes: u64, remark: &str| {
            let (short, share) = (short(bytes), self.share(bytes));
            writeln!(out, "  {name:<18} {short:>10}  {share}  {bytes}{remark}")
        };
        if let Some(budget) = decided.budget {
            row("budget", budget, "")?;
        }
        row("planned peak", self.compiled.planned_peak, "")?;
        let rest = match self.peak.bytes < self.compiled.planned_peak {
            true => "; the rest: gaps, and parts of chunks that are no longer used",
            false => "",
        };
        row("in use at the peak", self.peak.bytes, rest)?;
        if let Some(smallest) = decided.smallest {
            row("smallest feasible", smallest, "")?;
        }
        row("keep everything", decided.keep_peak, "")?;
        for pool in self.compiled.pools_beyond() {
            let (name, peak, _) = self.pools()[pool.index()];
            writeln!(out, "  {:<18} {:>10}", format!("{name} peak"), short(peak))?;
        }
        let gaps = self
            .pools()
            .into_iter()
            .map(|(pool, peak, bound)| format!("{pool} {:.2}%", 100.0 * gap(peak, bound)));
        let gaps = gaps.collect::<Vec<_>>().join(", ");
        writeln!(
            out,
            "  {:<18} {gaps} above the least that their buffers need",
            "addresses"
        )
    }

    fn write_times(&self, out: &mut String) -> std::fmt::Result {
        let timeline = &self.compiled.timeline;
        writeln!(
            out,
            "  {:<18} {:>10}",
            "predicted step",
            micros(timeline.micros)
        )?;
        if !self.products.is_empty() {
            let label = "products run at";
            writeln!(out, "  {label:<18} {}", self.products())?;
        }
        if let Some(Certificate {
            lower_bound,
            gap,
            changes,
        }) = &self.compiled.certificate
        {
            let (bound, gap) = (micros(*lower_bound), 100.0 * gap);
            writeln!(
                out,
                "  {:<18} {bound:>10}  no plan at this budget is faster; gap {gap:.1}%",
                "lower bound"
            )?;
            let changes = changes
                .iter()
                .map(|&(change, bound)| format!("{} with {}", micros(bound), change.name()));
            let changes = changes.collect::<Vec<_>>().join(", ");
            writeln!(out, "  {:<18} the bound would be {changes}", "")?;
        }
        let busy = |stream: Stream| micros(timeline.busy[stream]);
        let ways = "link at work";
        writeln!(out, "  {ways:<18} {:>10} in, {} out", busy(H2D), busy(D2H))?;
        let streams = &self.compiled.program.schedule.streams;
        let stream = |name| streams.ids().find(|&stream| streams[stream].name == name);
        if let (Some(load), Some(store)) = (stream("disk2h"), stream("h2disk")) {
            let ways = "disk at work";
            writeln!(
                out,
                "  {ways:<18} {:>10} read, {} written",
                busy(load),
                busy(store)
            )?;
        }
        writeln!(
            out,
            "  {:<18} {:>10}",
            "recomputing",
            micros(timeline.recomputed)
        )
    }

    fn write_tally(&self, out: &mut String) -> std::fmt::Result {
        writeln!(out, "\ndecisions           count       bytes")?;
        let Tally {
            kept,
            swap,
            recompute,
            hosted,
        } = self.tally;
        let beyond = beyond(self.device).name();
        for (name, count) in [
            ("kept", kept),
            ("swapped", swap),
            ("recomputed", recompute),
            (&format!("states on the {beyond}"), hosted),
        ] {
            writeln!(
                out,
                "  {name:<18} {:>4}  {:>10}",
                count.count,
                short(count.bytes)
            )?;
        }
        Ok(())
    }

    /// The layout in the words of ProTrain's paper.
    fn write_protrain(&self, out: &mut String) -> std::fmt::Result {
        let Some(layout) = &self.compiled.decided.layout else {
            return Ok(());
        };
        let (numbers, times) = (layout.config, layout.times);
        writeln!(out, "\nprotrain             {numbers}")?;
        writeln!(
            out,
            "  chunks             N_chunk {} of {}, {:.1}% waste: {}",
            layout.n_chunk,
            short(layout.chunk_bytes),
            layout.waste_percent,
            layout.chunks
        )?;
        writeln!(
            out,
            "  blocks             N_block {}, N_interval {}: {}",
            layout.n_block,
            page::interval(layout),
            layout.blocks
        )?;
        writeln!(
            out,
            "  by formula         step {}: forward {}, backward {}, updates {} on the device, {} \
             on the host; {}",
            micros(times.step()),
            micros(times.forward),
            micros(times.backward),
            micros(times.update_device),
            micros(times.update_host),
            short(layout.memory)
        )?;
        writeln!(
            out,
            "  P persistent, B in its buffer from forward to backward; K kept, S swapped, R \
             computed again"
        )
    }

    fn write_peak(&self, out: &mut String) -> std::fmt::Result {
        writeln!(
            out,
            "\nat the peak, {} into the step, {} are in use by {} tensors: {}",
            micros(self.peak.at),
            short(self.peak.bytes),
            self.peak.tensors.len(),
            self.peak.text
        )?;
        let graph = &self.compiled.program.graph;
        let named = self.peak.tensors.iter().take(NAMED);
        let widths = named.clone().map(|t| t.name.chars().count());
        let width = widths.max().unwrap_or(0);
        for tensor in named {
            writeln!(
                out,
                "{}",
                format!(
                    "  {:<width$}  {:>10}  {:<10}  {}",
                    tensor.name,
                    short(tensor.bytes),
                    tensor.class.name(),
                    module::short(module::of(graph, tensor))
                )
                .trim_end()
            )?;
        }
        let rest = self.peak.tensors.get(NAMED..).unwrap_or(&[]);
        if !rest.is_empty() {
            let bytes: u64 = rest.iter().map(|t| t.bytes).sum();
            writeln!(
                out,
                "  {:<width$}  {:>10}",
                format!("{} more", rest.len()),
                short(bytes)
            )?;
        }
        Ok(())
    }

    fn write_curve(&self, out: &mut String) -> std::fmt::Result {
        if self.args.curve {
            return write!(out, "\n{}", curve::table(&self.curve));
        }
        let rows = curve_rows(&self.curve);
        writeln!(
            out,
            "\n{:>12}  {:>8}  {:>14}  {:>14}  {:>8}",
            "budget", "of keep", "bytes", "predicted step", "overhead"
        )?;
        for &row in &rows {
            let p = &self.curve[row];
            let chosen = match p.chosen {
                // Of equally fast plans that with the fewest decisions is taken.
                Some(_) if p.bytes < self.compiled.planned_peak => {
                    format!(
                        "  < chosen; as fast with {}",
                        short(self.compiled.planned_peak)
                    )
                }
                Some(_) => "  <".to_string(),
                None => String::new(),
            };
            writeln!(
                out,
                "{:>12}  {:>7.1}%  {:>14}  {:>14}  {:>+7.1}%{chosen}",
                short(p.bytes),
                100.0 * p.of_keep,
                p.bytes,
                micros(p.micros),
                100.0 * p.slower
            )?;
        }
        let (shown, all) = (rows.len(), self.curve.len());
        if shown < all {
            writeln!(out, "{shown} of {all} rows; --curve prints all")?;
        }
        Ok(())
    }

    fn write_unsupported(&self, out: &mut String) -> std::fmt::Result {
        if self.unsupported.is_empty() {
            return Ok(());
        }
        writeln!(
            out,
            "\nno kernel for {} calls: this step can be planned, not run",
            self.unsupported.len()
        )?;
        for op in self.unsupported.iter().take(NAMED) {
            writeln!(out, "  {} (node {}): {}", op.target, op.node, op.why)?;
        }
        if let Some(help) = crate::compile::instead(self.unsupported) {
            writeln!(out, "{help}")?;
        }
        Ok(())
    }

    /// What each way to compute the loss needs and takes.
    fn write_loss_variants(&self, out: &mut String) -> std::fmt::Result {
        writeln!(
            out,
            "\n{:<20} {:<22}  {:<22}  smallest",
            "loss", "keeping everything", "within the budget"
        )?;
        for LossVariant { chunks, outcome } in &self.compiled.loss_variants {
            let name = if *chunks == 1 {
                "whole".to_string()
            } else {
                format!("{chunks} chunks of rows")
            };
            let figures =
                |(bytes, time): (u64, f64)| format!("{:>10}  {:>10}", short(bytes), micros(time));
            let keep = figures(outcome.keep);
            let unknown = if outcome.planned {
                "does not fit"
            } else {
                "not planned"
            };
            let fastest = outcome.fastest.map_or(format!("{unknown:<22}"), figures);
            let smallest = outcome.smallest.map_or("-".into(), short);
            let chosen = if *chunks == self.compiled.loss_chunks {
                "  <"
            } else {
                ""
            };
            writeln!(
                out,
                "  {name:<18} {keep}  {fastest}  {smallest:>10}{chosen}"
            )?;
        }
        Ok(())
    }
}

/// The layout in the words of ProTrain's paper.
fn protrain_json(layout: &Described) -> Json {
    let Described { config, times, .. } = layout;
    let interval = (layout.n_interval != usize::MAX).then_some(layout.n_interval);
    json!({
        "n_persist": config.n_persist,
        "n_buffer": config.n_buffer,
        "n_swap": config.n_swap,
        "n_ckpt": config.n_recompute,
        "n_chunk": layout.n_chunk,
        "chunk_bytes": layout.chunk_bytes,
        "chunk_waste_percent": layout.waste_percent,
        "n_block": layout.n_block,
        "n_interval": interval,
        "chunks": layout.chunks,
        "blocks": layout.blocks,
        "formula_ms": times.step() / 1e3,
        "formula_forward_ms": times.forward / 1e3,
        "formula_backward_ms": times.backward / 1e3,
        "formula_update_device_ms": times.update_device / 1e3,
        "formula_update_host_ms": times.update_host / 1e3,
        "formula_bytes": layout.memory,
    })
}

/// Positions of the points that are printed, ascending: the first, the last, the chosen one, both
/// sides of the largest steps up in time, and points between them.
fn curve_rows(curve: &[Point]) -> Vec<usize> {
    if curve.len() <= ROWS {
        return (0..curve.len()).collect();
    }
    let mut jumps: Vec<usize> = (1..curve.len()).collect();
    let rise = |&at: &usize| curve[at].micros / curve[at - 1].micros.max(f64::MIN_POSITIVE);
    jumps.sort_by(|a, b| rise(b).total_cmp(&rise(a)).then(a.cmp(b)));
    let mut rows: BTreeSet<usize> = [0, curve.len() - 1].into();
    rows.extend(curve.iter().position(|p| p.chosen.is_some()));
    rows.extend(jumps.into_iter().take(JUMPS).flat_map(|at| [at - 1, at]));
    // The rest goes into the middle of the widest gaps.
    while rows.len() < ROWS {
        let pairs = rows.iter().zip(rows.iter().skip(1));
        let widest = pairs.max_by_key(|&(a, b)| (b - a, std::cmp::Reverse(*a)));
        let Some((a, b)) = widest.filter(|&(a, b)| b - a > 1) else {
            break;
        };
        rows.insert(a.midpoint(*b));
    }
    rows.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_sides_of_a_jump_are_printed() {
        let point = |k: u64, micros: f64| Point {
            bytes: 1000 - k,
            micros,
            of_keep: 1.0,
            slower: 0.0,
            micros_per_percent: None,
            chosen: None,
        };
        let time = |k: u64| if k < 37 { 1.0 } else { 2.0 } + 1e-4 * k as f64;
        let curve: Vec<Point> = (0..60).map(|k| point(k, time(k))).collect();
        let rows = curve_rows(&curve);
        assert_eq!(rows.len(), ROWS);
        assert!(rows.contains(&36) && rows.contains(&37), "{rows:?}");
        assert_eq!((rows[0], rows[ROWS - 1]), (0, 59));
        assert_eq!(curve_rows(&curve[..3]), [0, 1, 2]);
    }
}
