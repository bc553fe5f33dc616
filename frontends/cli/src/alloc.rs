//! `lighterage alloc`: addresses for the blocks of any program's trace.

use crate::args::{
    AddressPlanner, AllocArgs, AllocCheckArgs, AllocCommand, AllocConvertArgs, AllocPlanArgs,
    AllocStatsArgs, TraceArgs,
};
use crate::data::{check_writable, save_atomically};
use crate::failure::Failure;
use crate::model::read_text;
use crate::size::{bytes, short};
use crate::{generate, out, picture};
use addresses::caching::{self, Held, Segments};
use addresses::serve;
use addresses::stats::{Class, Share, Stats, stats};
use papers::stalloc;
use placement::check::{Fault, Told, check};
use placement::trace::Trace;
use placement::{Method, Options, Placement, gap, place};
use serde_json::{Value as Json, json};
use std::fmt::Write;
use std::time::{Duration, Instant};
use trace::{Pool, events, table};

/// Runs the command.
pub(crate) fn run(args: &AllocArgs) -> Result<(), Failure> {
    match &args.command {
        AllocCommand::Plan(args) => plan(args),
        AllocCommand::Check(args) => check_plan(args),
        AllocCommand::Stats(args) => describe(args),
        AllocCommand::Convert(args) => convert(args),
        AllocCommand::Generate(args) => generate::run(args),
    }
}

fn read(args: &TraceArgs) -> Result<Vec<Pool>, Failure> {
    let spinner = out::spinner(format!("reading {}", args.trace.display()));
    let pools = trace::read(&args.trace, args.format).map_err(|e| Failure::Input(e.to_string()));
    drop(spinner);
    pools
}

/// If `share` is true, lets streams use each other's bytes.
fn share_streams(share: bool, pools: &mut [Pool]) {
    if share {
        pools
            .iter_mut()
            .for_each(|pool| pool.trace = pool.trace.one_stream());
    }
}

/// A pool's plan, and the time of planning.
struct Planned<'a> {
    pool: &'a Pool,
    placement: Placement,
    time: Duration,
}

fn plan(args: &AllocPlanArgs) -> Result<(), Failure> {
    for (option, path) in [
        ("--output", &args.output),
        ("--serve", &args.serve),
        ("--svg", &args.svg),
    ] {
        path.iter()
            .try_for_each(|path| check_writable(option, path))?;
    }
    let mut pools = read(&args.trace)?;
    let recorded: Vec<Trace> = pools
        .iter()
        .map(|pool| pool.trace.clone())
        .filter(|_| args.serve.is_some())
        .collect();
    share_streams(args.share_streams, &mut pools);
    let planner = Planner::new(args);
    let planned = pools.iter().map(|pool| planner.plan(pool));
    let planned = planned.collect::<Result<Vec<Planned<'_>>, Failure>>()?;
    match args.json {
        true => out::line(&plan_json(&planned, args.capacity).to_string()),
        false => out::text(&plan_report(&planned, args.capacity)),
    }
    check_capacity(&planned, args.capacity)?;
    let offsets: Vec<&[u64]> = planned
        .iter()
        .map(|planned| &planned.placement.offsets[..])
        .collect();
    if let Some(path) = &args.output {
        let owned: Vec<Vec<u64>> = offsets.iter().map(|offsets| offsets.to_vec()).collect();
        save_atomically(path, &[table::write_plan(&pools, &owned).as_bytes()])?;
    }
    if let Some(path) = &args.serve {
        let [step] = &recorded[..] else {
            return Err(Failure::Input(format!(
                "--serve: the trace has {} pools; a plan file is of one",
                pools.len()
            )));
        };
        save_atomically(path, &[planner.serve(step)?.as_bytes()])?;
    }
    if let Some(path) = &args.svg {
        save_atomically(path, &[picture::draw(&pools, &offsets).as_bytes()])?;
    }
    Ok(())
}

/// Plans the blocks of traces.
struct Planner<'a> {
    args: &'a AllocPlanArgs,
    options: Options,
}

impl<'a> Planner<'a> {
    fn new(args: &'a AllocPlanArgs) -> Planner<'a> {
        let threads = args.threads.map_or_else(
            || std::thread::available_parallelism().map_or(1, |n| n.get()),
            usize::from,
        );
        let without = Method::ALL.map(|method| args.without.contains(&method).then_some(method));
        let options = Options {
            effort: args.effort,
            capacity: args.capacity,
            align: args.align,
            threads,
            without,
        };
        Planner { args, options }
    }

    /// Places a pool's blocks, shows the progress, and checks the plan.
    fn plan<'p>(&self, pool: &'p Pool) -> Result<Planned<'p>, Failure> {
        let what = format!(
            "placing {} blocks of {}",
            pool.trace.blocks.len(),
            pool.name
        );
        let spinner = out::spinner(what.clone());
        let start = Instant::now();
        let mut see = |found: &str, peak: u64| {
            if let Some(spinner) = &spinner {
                spinner.set_message(format!("{what}: {}, {found}", short(peak)));
            }
        };
        let placement = self.place(&pool.trace, &mut see);
        let time = start.elapsed();
        if let Some(spinner) = spinner {
            spinner.finish_and_clear();
        }
        let path = self.args.trace.trace.display();
        let placement = placement
            .map_err(|error| Failure::Input(format!("{path}: pool {}: {error}", pool.name)))?;
        // An independent check: it shares no code with the planners.
        let peak = check(&pool.trace, &placement.offsets, self.args.align, None)
            .map_err(|faults| wrong_plan(&faults, pool, &placement.offsets, &path.to_string()))?;
        if peak > placement.peak {
            return Err(Failure::Bug(format!(
                "the plan's peak is {peak} and was said to be {}",
                placement.peak
            )));
        }
        Ok(Planned {
            pool,
            placement,
            time,
        })
    }

    fn place(
        &self,
        trace: &Trace,
        see: &mut dyn FnMut(&str, u64),
    ) -> Result<Placement, placement::Error> {
        match self.args.planner {
            AddressPlanner::Ours => place(trace, &self.options, see),
            AddressPlanner::Stalloc => stalloc::place(trace, self.args.align),
        }
    }

    /// The plan file of a step. The addresses are for the step only, which repeats.
    fn serve(&self, step: &Trace) -> Result<String, Failure> {
        let fixed = |step: &Trace| {
            let shared = self.args.share_streams.then(|| step.one_stream());
            self.place(shared.as_ref().unwrap_or(step), &mut |_, _| ())
                .map(|placement| placement.offsets)
        };
        serve::plan(step, self.args.align, fixed).map_err(|error| Failure::Input(error.to_string()))
    }
}

/// Fails if a pool's plan needs more than `capacity` bytes.
fn check_capacity(planned: &[Planned<'_>], capacity: Option<u64>) -> Result<(), Failure> {
    let Some(capacity) = capacity else {
        return Ok(());
    };
    let over = planned
        .iter()
        .find(|planned| capacity < planned.placement.peak);
    let Some(Planned {
        pool, placement, ..
    }) = over
    else {
        return Ok(());
    };
    let why = match capacity < placement.lower_bound {
        true => format!(
            "{} are alive at once, so that no plan fits",
            bytes(placement.lower_bound)
        ),
        false => format!(
            "the best plan found takes {}; --effort max looks longer",
            bytes(placement.peak)
        ),
    };
    let why = format!("{} does not fit {}: {why}", pool.name, bytes(capacity));
    Err(Failure::NoSchedule(why, None))
}

/// If the trace fixes the wrong addresses, it is an input error; otherwise it is our bug.
fn wrong_plan(faults: &[Fault], pool: &Pool, offsets: &[u64], path: &str) -> Failure {
    let fixed = |block: usize| pool.trace.blocks[block].offset.is_some();
    let given = |fault: &&Fault| match **fault {
        Fault::Overlap {
            below: a, above: b, ..
        }
        | Fault::Unordered {
            before: a,
            after: b,
            ..
        } => fixed(a) && fixed(b),
        Fault::Misaligned { block, .. } | Fault::Outside { block, .. } => fixed(block),
        Fault::Count { .. } | Fault::Moved { .. } | Fault::Apart { .. } => false,
    };
    let told = |fault: &Fault| Told(fault, &pool.trace, offsets).to_string();
    match (faults.iter().find(given), faults.first()) {
        (Some(fault), _) => Failure::Input(format!(
            "{path}: pool {}: {}, as the trace fixes it",
            pool.name,
            told(fault)
        )),
        (None, Some(fault)) => Failure::Bug(format!("a wrong plan: {}", told(fault))),
        (None, None) => Failure::Bug("a plan was refused without a reason".into()),
    }
}

fn plan_json(planned: &[Planned<'_>], capacity: Option<u64>) -> Json {
    let sum = |number: fn(&Placement) -> u64| {
        let placements = planned.iter().map(|planned| &planned.placement);
        placements.map(number).sum()
    };
    let n_blocks = |planned: &Planned<'_>| planned.pool.trace.blocks.len();
    let all = Figures {
        peak: sum(|placement| placement.peak),
        lower_bound: sum(|placement| placement.lower_bound),
        optimal: planned.iter().all(|planned| planned.placement.optimal),
        n_blocks: planned.iter().map(n_blocks).sum(),
        time: planned.iter().map(|planned| planned.time).sum(),
    };
    let mut json = all.json();
    if let Some(capacity) = capacity {
        let mut peaks = planned.iter().map(|planned| planned.placement.peak);
        json["capacity_bytes"] = json!(capacity);
        let fits = peaks.all(|peak| peak <= capacity);
        json["fits"] = json!(fits);
        if !fits {
            // As every command says it.
            json["error"] = json!("does not fit");
        }
    }
    let pool = |planned: &Planned<'_>| {
        let placement = &planned.placement;
        let figures = Figures {
            peak: placement.peak,
            lower_bound: placement.lower_bound,
            optimal: placement.optimal,
            n_blocks: n_blocks(planned),
            time: planned.time,
        };
        let mut json = figures.json();
        json["pool"] = json!(planned.pool.name);
        json["method"] = json!(placement.method);
        if let Some(capacity) = capacity {
            json["fits"] = json!(placement.peak <= capacity);
        }
        json
    };
    json["pools"] = json!(planned.iter().map(pool).collect::<Vec<_>>());
    json
}

/// The figures of one plan, or of all plans together.
struct Figures {
    peak: u64,
    lower_bound: u64,
    optimal: bool,
    n_blocks: usize,
    time: Duration,
}

impl Figures {
    fn json(&self) -> Json {
        json!({
            "peak_bytes": self.peak,
            "lower_bound_bytes": self.lower_bound,
            "gap": gap(self.peak, self.lower_bound),
            "optimal": self.optimal,
            "buffers": self.n_blocks,
            "ms": self.time.as_secs_f64() * 1e3,
        })
    }
}

fn plan_report(planned: &[Planned<'_>], capacity: Option<u64>) -> String {
    let mut out = String::new();
    for Planned {
        pool,
        placement,
        time,
    } in planned
    {
        let Placement {
            peak,
            lower_bound,
            optimal,
            method,
            ..
        } = placement;
        // Writing to a String cannot fail.
        let _ = writeln!(
            out,
            "{}: {} blocks, checked",
            pool.name,
            pool.trace.blocks.len()
        );
        let _ = writeln!(out, "  peak         {}", bytes(*peak));
        let over = match optimal {
            true => "the peak is the least there is".into(),
            false => format!(
                "the peak is {:.2}% above it",
                100.0 * gap(*peak, *lower_bound)
            ),
        };
        let _ = writeln!(out, "  lower bound  {}; {over}", bytes(*lower_bound));
        if let Some(capacity) = capacity {
            let _ = writeln!(out, "  capacity     {}", bytes(capacity));
        }
        let _ = writeln!(
            out,
            "  found by     {method}, in {:.2} s",
            time.as_secs_f64()
        );
    }
    out
}

/// The largest number of faults that are listed.
const TOLD: usize = 20;

fn check_plan(args: &AllocCheckArgs) -> Result<(), Failure> {
    let mut pools = read(&args.trace)?;
    share_streams(args.share_streams, &mut pools);
    let path = args.plan.display();
    let offsets = table::read_plan(&read_text(&args.plan)?, &pools)
        .map_err(|e| Failure::Input(format!("{path}: {e}")))?;
    let mut rows = vec![];
    let mut told: Vec<String> = vec![];
    let mut n_faults = 0;
    for (pool, offsets) in pools.iter().zip(&offsets) {
        let (peak, faults) = match check(&pool.trace, offsets, args.align, args.capacity) {
            Ok(peak) => (Some(peak), vec![]),
            Err(faults) => (None, faults),
        };
        n_faults += faults.len();
        told.extend(
            faults
                .iter()
                .take(TOLD)
                .map(|fault| format!("{}: {}", pool.name, Told(fault, &pool.trace, offsets))),
        );
        rows.push((pool, peak));
    }
    let valid = n_faults == 0;
    if args.json {
        let pool = |(pool, peak): &(&Pool, Option<u64>)| {
            json!({"pool": pool.name,
            "buffers": pool.trace.blocks.len(), "valid": peak.is_some(), "peak_bytes": peak})
        };
        let pools: Vec<Json> = rows.iter().map(pool).collect();
        out::line(
            &json!({"valid": valid, "pools": pools, "faults": n_faults, "first_faults": told})
                .to_string(),
        );
    } else {
        for (pool, peak) in rows
            .iter()
            .filter_map(|(pool, peak)| peak.map(|peak| (pool, peak)))
        {
            out::line(&format!(
                "{}: {} blocks, none meet; peak {}",
                pool.name,
                pool.trace.blocks.len(),
                bytes(peak)
            ));
        }
        told.iter().for_each(|line| out::line(line));
    }
    match n_faults {
        0 => Ok(()),
        1 => Err(Failure::Input(format!("{path}: refused, 1 fault"))),
        n => Err(Failure::Input(format!("{path}: refused, {n} faults"))),
    }
}

/// The bytes that allocators would reserve, and that the recorded one reserved.
struct Holding {
    cached: Held,
    expandable: Held,
    replayed: Option<caching::Agreement>,
}

fn describe(args: &AllocStatsArgs) -> Result<(), Failure> {
    let pools = read(&args.trace)?;
    let described = pools.iter().map(|pool| {
        let holding = Holding {
            cached: caching::simulate(&pool.trace, Segments::Fixed),
            expandable: caching::simulate(&pool.trace, Segments::Expandable),
            replayed: pool.history.as_ref().and_then(caching::replay),
        };
        (pool, stats(&pool.trace), holding)
    });
    if args.json {
        let pools: Vec<Json> = described
            .map(|(pool, stats, holding)| stats_json(pool, &stats, &holding))
            .collect();
        out::line(&json!({"pools": pools}).to_string());
        return Ok(());
    }
    for (pool, stats, holding) in described {
        out::text(&stats_report(pool, &stats, &holding));
    }
    Ok(())
}

fn convert(args: &AllocConvertArgs) -> Result<(), Failure> {
    if let Some(path) = &args.output {
        check_writable("--output", path)?;
    }
    let text = events::write(&read(&args.trace)?);
    match &args.output {
        Some(path) => save_atomically(path, &[text.as_bytes()]),
        None => {
            out::text(&text);
            Ok(())
        }
    }
}

/// Memory efficiency: needed bytes as a share of reserved bytes (STAlloc, Eq 1).
fn efficiency(stats: &Stats, held: u64) -> f64 {
    if held == 0 {
        1.0
    } else {
        stats.live_peak_bytes as f64 / held as f64
    }
}

fn stats_json(pool: &Pool, stats: &Stats, holding: &Holding) -> Json {
    let share = |share: &Share| {
        json!({"blocks": share.blocks, "bytes": share.bytes,
        "peak_bytes": share.peak_bytes})
    };
    let held = |held: &Held| {
        json!({
            "reserved_bytes": held.reserved_bytes,
            "segments": held.segments,
            "efficiency": efficiency(stats, held.reserved_bytes),
        })
    };
    let sizes: Vec<Json> = stats
        .frequent
        .iter()
        .map(|(bytes, n)| json!({"bytes": bytes, "blocks": n}))
        .collect();
    let classes: serde_json::Map<String, Json> = Class::ALL
        .iter()
        .zip(&stats.classes)
        .map(|(class, of)| (class.name().into(), share(of)))
        .collect();
    json!({
        "pool": pool.name,
        "buffers": stats.blocks,
        "buffers_above_512_bytes": stats.above_512,
        "sizes_above_512_bytes": stats.sizes_above_512,
        "frequent_sizes": sizes,
        "live_peak_bytes": stats.live_peak_bytes,
        "peak_tick": stats.peak_tick,
        "ticks": stats.ticks,
        "classes": classes,
        "classes_by": if stats.by_phases { "phases" } else { "lifetimes" },
        "dynamic": share(&stats.dynamic),
        "phases": stats.phases,
        "modules": stats.modules,
        "streams": stats.streams,
        "caching": held(&holding.cached),
        "expandable": held(&holding.expandable),
        "recorded_reserved_bytes": pool.reserved_bytes,
        "replay": holding.replayed.map(|agreement| json!({"requests": agreement.requests,
            "same_address": agreement.same})),
    })
}

fn stats_report(pool: &Pool, stats: &Stats, holding: &Holding) -> String {
    let mut out = String::new();
    // Writing to a String cannot fail.
    let _ = write_stats(&mut out, pool, stats, holding);
    out
}

fn write_stats(
    out: &mut String,
    pool: &Pool,
    stats: &Stats,
    holding: &Holding,
) -> std::fmt::Result {
    writeln!(
        out,
        "{}: {} blocks in {} ticks\n",
        pool.name, stats.blocks, stats.ticks
    )?;
    writeln!(
        out,
        "  live peak   {} at tick {}",
        bytes(stats.live_peak_bytes),
        stats.peak_tick
    )?;
    writeln!(
        out,
        "  sizes       {} above 512 bytes, of {} blocks",
        stats.sizes_above_512, stats.above_512
    )?;
    for (size, n) in &stats.frequent {
        writeln!(out, "              {n:>8} of {}", bytes(*size))?;
    }
    write_classes(out, stats)?;
    writeln!(out, "\n  phases      {}", stats.phases)?;
    writeln!(out, "  modules     {}", stats.modules)?;
    writeln!(out, "  streams     {}", stats.streams)?;
    write_holding(out, pool, stats, holding)
}

fn write_classes(out: &mut String, stats: &Stats) -> std::fmt::Result {
    let by = if stats.by_phases {
        "phases"
    } else {
        "how long they live: the trace has no phases"
    };
    writeln!(
        out,
        "\n  classes, by {by}\n                blocks   bytes in all   at the peak"
    )?;
    let dynamic = (0 < stats.dynamic.blocks).then_some(("dynamic", &stats.dynamic));
    for (name, share) in Class::ALL
        .iter()
        .map(|class| class.name())
        .zip(&stats.classes)
        .chain(dynamic)
    {
        let (all, peak) = (short(share.bytes), short(share.peak_bytes));
        writeln!(
            out,
            "    {name:<10}  {:>6}   {all:>12}   {peak:>11}",
            share.blocks
        )?;
    }
    Ok(())
}

/// Writes the bytes that allocators would reserve for the pool, and that the recorded one reserved.
fn write_holding(
    out: &mut String,
    pool: &Pool,
    stats: &Stats,
    holding: &Holding,
) -> std::fmt::Result {
    writeln!(out, "\n  what an allocator would hold")?;
    for (name, held) in [
        ("PyTorch's", &holding.cached),
        ("expandable", &holding.expandable),
    ] {
        let percent = 100.0 * efficiency(stats, held.reserved_bytes);
        writeln!(
            out,
            "    {name:<10}  {:>10}  in {} segments, {percent:.1}% of it needed",
            short(held.reserved_bytes),
            held.segments
        )?;
    }
    if let Some(reserved) = pool.reserved_bytes {
        // Memory that went back to the system before the end may have been needed.
        let needed = match stats.live_peak_bytes <= reserved {
            true => format!(", {:.1}% of it needed", 100.0 * efficiency(stats, reserved)),
            false => String::new(),
        };
        writeln!(
            out,
            "    recorded    {:>10}  at the end{needed}",
            short(reserved)
        )?;
    }
    if let Some(agreement) = holding.replayed {
        let caching::Agreement { requests, same } = agreement;
        writeln!(
            out,
            "    replayed    {same} of {requests} requests land where they did, by PyTorch's rules"
        )?;
    }
    Ok(())
}
