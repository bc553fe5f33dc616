//! Allocators on traces of training steps, as tables in Markdown:
//! `cargo bench -p lighterage-tests --bench traces [-- figure8 | figure9 | figure10 | table2]`.
//!
//! Each allocator's efficiency: the largest number of live bytes divided by its reserved bytes
//! (STAlloc, section 2.2, Eq 1). The traces are generated (`addresses::generate`); figures
//! and tables have the paper's numbers. `caching` and `expandable` simulate PyTorch's allocators,
//! `gmlake` simulates GMLake's with its default limit of 512 MiB and with 64; `stalloc` is the
//! paper's planner; `fast` and `normal` are ours with these efforts. Here, all of them know the
//! sizes of dynamic requests.

use addresses::caching::{self, Segments};
use addresses::generate::Setup;
use lighterage_tests::document::allocation::{self, ALIGN};
use papers::stalloc;
use placement::check;
use placement::trace::Trace;
use placement::{Effort, Options, lower_bound, place};
use std::io::Write;
use std::time::Instant;

fn say(text: &str) {
    writeln!(std::io::stdout(), "{text}").expect("stdout should be open");
}

fn main() {
    let args: Vec<String> = std::env::args()
        .skip(1)
        .filter(|arg| !arg.starts_with("--"))
        .collect();
    let only = |name: &str| args.is_empty() || args.iter().any(|arg| arg == name);
    if only("figure8") {
        say("\nFigure 8: recomputation (R), virtual pipeline (V), ZeRO (Z), offloading (O)\n");
        table(&allocation::figure_8());
    }
    if only("figure9") {
        say("\nFigure 9: stages of the pipeline, with recomputation or a virtual pipeline\n");
        table(&allocation::figure_9());
    }
    if only("figure10") {
        say("\nFigure 10: Llama2-7B with recomputation, sequences of a micro-batch\n");
        table(&allocation::figure_10());
    }
    if only("table2") {
        say(
            "\nTable 2: time of planning. The paper's requests and seconds are those of its own \
             traces.\n",
        );
        say(
            "| model | requests | stalloc s | lighterage fast s | lighterage normal s | the \
             paper's requests | s |",
        );
        say("|---|---|---|---|---|---|---|");
        for (name, setup, requests, seconds) in allocation::table_2() {
            let trace = allocation::planned(&setup);
            let [theirs, fast, normal] = [
                timed(|| drop(theirs_of(&trace))),
                timed(|| _ = ours(&trace, Effort::Fast)),
                timed(|| _ = ours(&trace, Effort::Normal)),
            ];
            let n = trace.blocks.len();
            say(&format!(
                "| {name} | {n} | {theirs:.2} | {fast:.2} | {normal:.2} | {requests} | {seconds} |"
            ));
        }
    }
}

fn timed(what: impl FnOnce()) -> f64 {
    let start = Instant::now();
    what();
    start.elapsed().as_secs_f64()
}

/// The bytes of our plan.
fn ours(trace: &Trace, effort: Effort) -> u64 {
    let options = Options {
        effort,
        align: ALIGN,
        ..Options::default()
    };
    let placement =
        place(trace, &options, &mut |_, _| ()).expect("a generated trace should have a plan");
    checked(trace, &placement.offsets)
}

/// Addresses of the paper's planner.
fn theirs_of(trace: &Trace) -> Vec<u64> {
    stalloc::place(trace, ALIGN)
        .expect("a generated trace should have a plan")
        .offsets
}

/// The peak of a plan, after its proof.
fn checked(trace: &Trace, offsets: &[u64]) -> u64 {
    check::check(trace, offsets, ALIGN, None)
        .unwrap_or_else(|faults| panic!("{} faults", faults.len()))
}

fn table(rows: &[(String, Setup)]) {
    say(
        "| trace | requests | live GiB | caching | expandable | gmlake | gmlake 64 | stalloc | \
         fast | normal | stalloc s | fast s | \
         normal s |",
    );
    say("|---|---|---|---|---|---|---|---|---|---|---|---|---|");
    for (name, setup) in rows {
        let trace = allocation::planned(setup);
        let live = lower_bound(&trace, ALIGN);
        let stitched = |mib: u64| Segments::Stitched(mib << 20);
        let [fixed, expandable, gmlake, gmlake_64] = [
            Segments::Fixed,
            Segments::Expandable,
            stitched(512),
            stitched(64),
        ]
        .map(|rule| caching::simulate(&trace, rule).reserved_bytes);
        let mut theirs = 0;
        let their_seconds = timed(|| theirs = checked(&trace, &theirs_of(&trace)));
        let (mut fast, mut normal) = (0, 0);
        let fast_seconds = timed(|| fast = ours(&trace, Effort::Fast));
        let normal_seconds = timed(|| normal = ours(&trace, Effort::Normal));
        let share = |held: u64| format!("{:.1} %", 100.0 * live as f64 / held as f64);
        say(&format!(
            "| {name} | {} | {:.1} | {} | {} | {} | {} | {} | {} | {} | {their_seconds:.3} | \
             {fast_seconds:.3} | \
             {normal_seconds:.3} |",
            trace.blocks.len(),
            live as f64 / (1u64 << 30) as f64,
            share(fixed),
            share(expandable),
            share(gmlake),
            share(gmlake_64),
            share(theirs),
            share(fast),
            share(normal),
        ));
    }
}
