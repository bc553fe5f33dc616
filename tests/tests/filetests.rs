//! Tests each pass by text: `tests/filetests/PASS/CASE.ir` is a graph or a program; the result of
//! the pass is next to it.
//!
//! The first line says which pass to run: `; test PASS device=NAME`, and the user's options:
//! `budget=BYTES`, `host=BYTES`, `disk=BYTES` behind it, `optimizer=NAME`, `master=split`,
//! `clip_norm=NORM`,
//! `micro_batches=N`, `loss_chunks=N`, `update=after`, `planner=NAME`, `variant=N`. The next line
//! says what the case shows. A program goes through this one pass. For a schedule pass, a graph
//! goes through all schedule passes up to this one, with decisions from comments: `; cut %h 0 swap`
//! swaps in the gap after access 0 of `%h` (its definition, if a line computes it), `; cut %h 0
//! recompute` recomputes it there, `; host %m` puts a state on the host, `; chunk %a %b` places and
//! copies hosted states together, `; update %w'` computes a node on the host.
//!
//! `; test emit target=NAME` shows the MLIR of a graph's kernels instead of a pass.
//!
//! `INSTA_UPDATE=always cargo test -p lighterage-tests filetests::` writes the results again. Check
//! the difference.

use codegen::kernels::Target;
use codegen::{Form, listing};
use ir::text::{self, File};
use ir::{Graph, Program, Schedule};
use lighterage_tests::forced;
use papers::protrain::Fixed;
use passes::cost::Roofline;
use passes::decide::{Decisions, Extent, Gap, Means, Planner, Problem, Reason, decide};
use passes::graph::loss::Chunks;
use passes::graph::optimizer::{Master, Optimizer, Rounding};
use passes::graph::precision::Precision;
use passes::graph::quantize::Base;
use passes::graph::reduction::Combination;
use passes::graph::scale::LossScale;
use passes::list::{GraphContext, ScheduleContext, graph_passes, schedule_passes};
use passes::pipeline::{Budget, Kernels, Options};
use passes::plan::Cancel;
use passes::schedule::lives::Variant;
use passes::schedule::order::Update;
use passes::{devices, sim};
use std::collections::{BTreeMap, BTreeSet};

#[test]
fn filetests() {
    insta::glob!("../filetests", "**/*.ir", |path| {
        let input = std::fs::read_to_string(path).unwrap();
        let pass = path
            .parent()
            .and_then(|folder| folder.file_name())
            .unwrap()
            .to_str()
            .unwrap();
        let output = if pass == "emit" {
            emit(&input)
        } else {
            run(pass, &input)
        };
        let mut settings = insta::Settings::clone_current();
        settings.set_snapshot_path(path.parent().unwrap());
        settings.remove_snapshot_suffix();
        settings.set_prepend_module_to_snapshot(false);
        settings.set_omit_expression(true);
        settings
            .bind(|| insta::assert_snapshot!(path.file_stem().unwrap().to_str().unwrap(), output));
    });
}

/// The first line of a file.
struct Header<'a> {
    options: Options,
    device: ir::Device,
    variant: Variant,
    pass: &'a str,
}

impl Header<'_> {
    fn read(input: &str) -> Header<'_> {
        let mut lines = input.lines();
        let mut words = lines.next().unwrap_or_default().split_whitespace();
        assert!(
            words.next() == Some(";") && words.next() == Some("test"),
            "the first line should start with `; test`"
        );
        let pass = words.next().expect("the first line should name a pass");
        let mut given: BTreeMap<&str, &str> = words
            .map(|word| word.split_once('=').expect("KEY=VALUE"))
            .collect();
        let mut device = devices::named(
            given
                .remove("device")
                .expect("the first line should name a device"),
        )
        .unwrap();
        let bytes = |text: &str| text.parse::<u64>().expect("a number of bytes");
        device.disk = given.remove("disk").map(|text| ir::Disk {
            bytes: bytes(text),
            ..forced::disk()
        });
        let options = Options {
            optimizer: given.remove("optimizer").map_or(Optimizer::None, |name| {
                Optimizer::ALL
                    .into_iter()
                    .find(|o| o.name() == name)
                    .expect("an optimizer's name")
            }),
            master: given.remove("master").map_or(Master::None, |name| {
                Master::ALL
                    .into_iter()
                    .find(|m| m.name() == name)
                    .expect("a master's name")
            }),
            clip_norm: given
                .remove("clip_norm")
                .map(|text| text.parse().expect("a number")),
            // A header has no list of paths; the pass's own test has groups.
            groups: BTreeMap::new(),
            grad_norm: false,
            precision: given.remove("precision").map_or(Precision::F32, |name| {
                Precision::ALL
                    .into_iter()
                    .find(|p| p.name() == name)
                    .expect("a precision's name")
            }),
            rounding: given.remove("rounding").map_or(Rounding::Nearest, |name| {
                Rounding::ALL
                    .into_iter()
                    .find(|r| r.name() == name)
                    .expect("a rounding's name")
            }),
            loss_scale: LossScale::default(),
            base: given.remove("base").map_or(Base::Whole, |name| {
                Base::ALL
                    .into_iter()
                    .find(|base| base.name() == name)
                    .expect("a base's name")
            }),
            group_options: vec![],
            whole_groups: BTreeSet::new(),
            cancel: Cancel::default(),
            protrain: Fixed::default(),
            micro_batches: given
                .remove("micro_batches")
                .map(|text| bytes(text) as usize),
            reduction: Combination::Auto,
            loss_chunks: given
                .remove("loss_chunks")
                .map_or(Chunks::Auto, |text| Chunks::Of(bytes(text))),
            update: given.remove("update").map_or(Update::Backward, |word| {
                assert_eq!(word, "after");
                Update::After
            }),
            budget: given
                .remove("budget")
                .map_or(Budget::Device, |text| Budget::Bytes(bytes(text))),
            host: given.remove("host").map(bytes),
            planner: given.remove("planner").map_or(Planner::Auto, |name| {
                Planner::ALL
                    .into_iter()
                    .find(|p| p.name() == name)
                    .expect("a planner's name")
            }),
            kernels: if matches!(pass, "fuse" | "logits") {
                Kernels::Generated
            } else {
                Kernels::Plain
            },
            extent: Extent::Curve,
            homes: None,
            parts: None,
            tf32: false,
            differentiate: pass == "autodiff",
            evaluate: pass == "evaluate",
            without_simplify: false,
        };
        let variant = given
            .remove("variant")
            .map_or(Variant::ByTime, |text| Variant::ALL[bytes(text) as usize]);
        assert!(given.is_empty(), "{given:?} means nothing");
        let says = lines.next().unwrap_or_default();
        assert!(
            says.starts_with("; ") && says.len() < 160,
            "the second line should say what is to be seen"
        );
        Header {
            options,
            device,
            variant,
            pass,
        }
    }
}

/// The kernels of a graph's nodes, as MLIR.
fn emit(input: &str) -> String {
    let mut lines = input.lines();
    let first = lines
        .next()
        .and_then(|line| line.strip_prefix("; test emit target="));
    let name = first.expect("the first line should be `; test emit target=NAME`");
    assert!(lines.next().is_some_and(|line| line.starts_with("; ")));
    let target = Target::ALL.into_iter().find(|target| target.name() == name);
    let target = target.unwrap_or_else(|| panic!("there is no target {name}"));
    let graph = match text::parse_file(input).unwrap_or_else(|e| panic!("{e}")) {
        File::Graph(graph) => graph,
        File::Program(program) => program.graph,
    };
    assert_eq!(ir::verify::graph(&graph), vec![]);
    let program = Program {
        graph,
        schedule: Schedule::default(),
        plan: None,
    };
    listing(&program, &target, Form::Mlir).unwrap().to_string()
}

/// The result of the passes on a file.
fn run(folder: &str, input: &str) -> String {
    let header = Header::read(input);
    assert_eq!(
        header.pass, folder,
        "the file should lie in its pass's folder"
    );
    let file = text::parse_file(input).unwrap_or_else(|e| panic!("{e}"));
    let cost = Roofline::new(&header.device);
    let budget = if let Budget::Bytes(bytes) = header.options.budget {
        Some(bytes)
    } else {
        None
    };
    let loss_chunks = match header.options.loss_chunks {
        Chunks::Auto => 1,
        Chunks::Of(n) => n,
    };
    let context = GraphContext {
        options: &header.options,
        cost: &cost,
        loss_chunks,
    };
    let host = header.options.host.unwrap_or(header.device.host_bytes);
    let pass = header.pass;
    match file {
        File::Graph(mut graph) if graph_passes().any(|p| p.name == pass) => {
            let pass = graph_passes().find(|p| p.name == pass).unwrap();
            (pass.run)(&mut graph, &context).unwrap();
            let graph = graph.compact();
            assert_eq!(
                ir::verify::graph(&graph),
                vec![],
                "{}",
                text::print_graph(&graph)
            );
            text::print_graph(&graph)
        }
        File::Graph(graph) if pass == "decide" => {
            let problem = Problem::new(&graph, &header.device, &cost).with_host_limit(host);
            match decide(&problem, header.options.planner, header.options.budget) {
                Ok(decided) => {
                    let curve: Vec<String> = decided
                        .curve
                        .iter()
                        .map(|(bytes, micros)| format!("{bytes}: {micros:.3} us"))
                        .collect();
                    let (keep, smallest) = (decided.keep_peak, decided.smallest.unwrap());
                    format!(
                        "keep {keep}, smallest {smallest}\n{}\n{}",
                        curve.join("\n"),
                        decided.decisions.print(&graph)
                    )
                }
                Err(error) => error.to_string(),
            }
        }
        File::Graph(graph) => {
            let decisions = decisions(&graph, input);
            let problem = Problem::new(&graph, &header.device, &cost).with_host_limit(host);
            let context = ScheduleContext {
                variant: header.variant,
                budget,
                ..ScheduleContext::new(&problem, &decisions)
            };
            let mut program = Program {
                graph: graph.clone(),
                schedule: Schedule::default(),
                plan: None,
            };
            for p in schedule_passes() {
                p.run_on(&mut program, &context).unwrap();
                if p.name == pass {
                    return print(pass, &program, &cost);
                }
            }
            panic!("there is no pass {pass}")
        }
        File::Program(mut program) => {
            let decisions = Decisions::default();
            let graph = program.graph.clone();
            let problem = Problem::new(&graph, &header.device, &cost);
            let context = ScheduleContext {
                variant: header.variant,
                ..ScheduleContext::new(&problem, &decisions)
            };
            let found = schedule_passes()
                .find(|p| p.name == pass)
                .unwrap_or_else(|| panic!("there is no pass {pass}"));
            found.run_on(&mut program, &context).unwrap();
            print(pass, &program, &cost)
        }
    }
}

/// The decisions in a file's comments.
fn decisions(graph: &Graph, input: &str) -> Decisions {
    let reason = Reason {
        bytes: 0,
        swap: None,
        recompute: None,
        line: 0,
    };
    let value = |name: &str| {
        let found = graph
            .values
            .iter()
            .find(|(_, data)| name.strip_prefix('%') == Some(&data.name));
        found.unwrap_or_else(|| panic!("there is no {name}")).0
    };
    let state = |name: &str| {
        let before = value(name);
        let found = graph.states.iter().find(|(_, data)| data.before == before);
        found.expect("a state").0
    };
    let mut decisions = Decisions::default();
    for line in input.lines() {
        match line.split_whitespace().collect::<Vec<_>>()[..] {
            [";", "cut", name, gap, means] => {
                let gap = Gap {
                    value: value(name),
                    gap: gap.parse().expect("the number of an access"),
                };
                let means = match means {
                    "swap" => Means::Swap,
                    "recompute" => Means::Recompute,
                    other => panic!("{other} is neither swap nor recompute"),
                };
                decisions.cuts.insert(gap, (means, reason));
            }
            [";", "host", name] => {
                decisions.hosted.insert(state(name), reason);
            }
            [";", "chunk", ref names @ ..] => decisions
                .chunks
                .push(names.iter().map(|name| state(name)).collect()),
            [";", "update", name] => {
                decisions
                    .on_host
                    .insert(graph.def_node(value(name)).expect("a computed value"));
            }
            _ => {}
        }
    }
    decisions
}

/// The schedule's part of the text; the graph is in the input.
fn print(pass: &str, program: &Program, cost: &Roofline) -> String {
    assert_eq!(
        ir::verify::program(program),
        vec![],
        "{}",
        text::print_program(program)
    );
    let text = text::print_program(program);
    let again = text::parse_program(&text).unwrap_or_else(|e| panic!("{e}\n{text}"));
    assert_eq!(
        text::print_program(&again),
        text,
        "the result should read back"
    );
    if pass != "sync" {
        return text.split_once("\n}\n").unwrap().1.to_string();
    }
    if let Err(findings) = ir::check::check(program) {
        panic!("{}", text::print_program_with_findings(program, &findings));
    }
    let timeline = sim::simulate(&program.graph, &program.schedule, cost);
    sim::print(program, &timeline)
        .split_once("\n}\n")
        .unwrap()
        .1
        .to_string()
}
