//! The rules of `verify`. Each file in `verify/` shows a rule: its findings stand under their
//! lines. What no text can say, because the parser refuses it, is built here.
//!
//! `BLESS=1 cargo test -p lighterage-ir verify::` rewrites the files; the diff is to be read.

use lighterage_ir::graph::{Def, Phase};
use lighterage_ir::schedule::{Buffer, InstrKind, Loc, Pool, Stream};
use lighterage_ir::text::{self, File};
use lighterage_ir::{
    Finding, Graph, Id, Instr, Node, Op, Place, Program, State, Table, Value, verify,
};
use std::path::Path;

#[test]
fn files_show_their_findings() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/verify");
    let mut paths: Vec<_> = dir
        .read_dir()
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    paths.sort();
    assert!(paths.len() > 10);
    for path in paths {
        let given = std::fs::read_to_string(&path).unwrap();
        let head: String = given
            .lines()
            .take_while(|line| line.starts_with(';'))
            .map(|line| format!("{line}\n"))
            .collect();
        assert!(
            !head.is_empty(),
            "{} should say on top what it shows",
            path.display()
        );
        let found = match text::parse_file(&given)
            .unwrap_or_else(|e| panic!("{}: {e}", path.display()))
        {
            File::Graph(graph) => text::print_graph_with_findings(&graph, &verify::graph(&graph)),
            File::Program(program) => {
                text::print_program_with_findings(&program, &verify::program(&program))
            }
        };
        let found = head + &found;
        if std::env::var_os("BLESS").is_some() {
            std::fs::write(&path, found).unwrap();
        } else {
            assert_eq!(found, given, "{}", path.display());
        }
    }
}

const EXAMPLE: &str = include_str!("example.ir");

/// The findings of the example graph after `change`.
fn graph_findings(change: impl FnOnce(&mut Graph)) -> Vec<String> {
    let mut graph = text::parse_program(EXAMPLE).unwrap().graph;
    assert_eq!(verify::graph(&graph), []);
    change(&mut graph);
    verify::graph(&graph)
        .iter()
        .map(Finding::to_string)
        .collect()
}

/// The findings of the example program after `change`.
fn program_findings(change: impl FnOnce(&mut Program)) -> Vec<String> {
    let mut program = text::parse_program(EXAMPLE).unwrap();
    assert_eq!(verify::program(&program), []);
    change(&mut program);
    verify::program(&program)
        .iter()
        .map(Finding::to_string)
        .collect()
}

fn value(graph: &Graph, name: &str) -> Value {
    graph
        .values
        .iter()
        .find(|(_, data)| data.name == name)
        .unwrap()
        .0
}

#[test]
fn ids_are_in_their_tables() {
    let gone = Value::new(99);
    assert_eq!(
        graph_findings(|g| g.inputs.push(gone)),
        ["v99: v99 is not in the table of values"]
    );
    assert_eq!(
        graph_findings(|g| g.states[State::new(0)].after = gone),
        ["state 0: v99 is not in the table of values"]
    );
    assert_eq!(
        graph_findings(|g| g.nodes[Node::new(1)].inputs[0] = gone),
        ["n1: v99 is not in the table of values"]
    );
    assert_eq!(
        graph_findings(|g| g.nodes[Node::new(1)].outputs[0] = gone),
        ["n1: v99 is not in the table of values"]
    );
    assert_eq!(
        graph_findings(|g| g.outputs[0].value = gone),
        ["output 0: v99 is not in the table of values"]
    );
    assert_eq!(
        graph_findings(|g| g.gradients[0].1 = gone),
        ["gradient 0: v99 is not in the table of values"]
    );
    assert_eq!(
        graph_findings(|g| g.gradients[0].0 = State::new(7)),
        ["gradient 0: there is no state 7"]
    );
    assert_eq!(
        graph_findings(|g| g.order.push(Node::new(99))),
        ["n99: n99 is not in the table of nodes"]
    );
    assert_eq!(
        program_findings(|p| p.schedule.entry[0].0 = gone)[0],
        "entry 0: v99 is not in the table of values"
    );
    assert_eq!(
        program_findings(|p| p.schedule.exit[0].0 = gone)[0],
        "exit 0: v99 is not in the table of values"
    );
    let gone = Loc::from(Buffer::new(99));
    assert_eq!(
        program_findings(|p| p.schedule.entry[0].1 = gone)[0],
        "entry 0: buffer99 is not in the table of buffers"
    );
    assert_eq!(
        program_findings(|p| p.schedule.exit[0].1 = gone)[0],
        "exit 0: buffer99 is not in the table of buffers"
    );
    let i0 = Instr::new(0);
    assert_eq!(
        program_findings(|p| p.schedule.instrs[i0].stream = Stream::new(9)),
        ["i0: stream9 is no stream"]
    );
    assert_eq!(
        program_findings(|p| p.schedule.buffers[Buffer::new(0)].pool = Pool::new(9)),
        ["buffer0: x lies in pool9, which is no pool"]
    );
    let run = |node, args| InstrKind::Run {
        node,
        args,
        outs: vec![],
        scratch: None,
        part: None,
    };
    assert_eq!(
        program_findings(|p| p.schedule.instrs[i0].kind = run(Node::new(99), vec![])),
        ["i0: n99 is not in the table of nodes"]
    );
    assert_eq!(
        program_findings(|p| p.schedule.instrs[i0].kind = run(Node::new(0), vec![gone])),
        ["i0: buffer99 is not in the table of buffers"]
    );
    assert_eq!(
        program_findings(|p| p.schedule.instrs[i0].kind = InstrKind::Copy {
            src: gone,
            dst: gone,
            bytes: 64
        })
        .len(),
        2
    );
}

#[test]
fn names_are_unique() {
    let rename = |g: &mut Graph, from: &str, to: &str| {
        let v = value(g, from);
        g.values[v].name = to.into();
    };
    assert_eq!(
        graph_findings(|g| rename(g, "a", "h")),
        ["n1: another value has the name %h too"]
    );
    assert_eq!(
        graph_findings(|g| rename(g, "hyper", "x")),
        ["v1: another value has the name %x too"]
    );
    assert_eq!(
        graph_findings(|g| rename(g, "w", "x")),
        ["state 0: another value has the name %x too"]
    );
    let twice = graph_findings(|g| {
        let ty = g.values[g.states[State::new(0)].before].ty.clone();
        g.add_state("v", "fc1.weight", lighterage_ir::StateKind::Moment, ty);
    });
    assert_eq!(
        twice,
        ["state 1: another state has the path \"fc1.weight\" too"]
    );
    let pools = program_findings(|p| p.schedule.pools[Pool::new(1)].name = "device".into());
    assert_eq!(pools, ["pool1: another pool has the name device too"]);
    let streams = program_findings(|p| p.schedule.streams[Stream::new(1)].name = "compute".into());
    assert_eq!(
        streams,
        ["stream1: another stream has the name compute too"]
    );
    let buffers = program_findings(|p| p.schedule.buffers[Buffer::new(1)].name = "x".into());
    assert_eq!(buffers, ["buffer1: another buffer has the name x too"]);
}

#[test]
fn values_have_one_definition() {
    let twice = graph_findings(|g| g.inputs.push(g.inputs[0]));
    assert_eq!(twice, ["v0: %x is defined by an earlier line too"]);
    let other = graph_findings(|g| {
        let v = value(g, "a");
        g.values[v].def = Def::Node(Node::new(1), 1);
    });
    assert_eq!(
        other,
        ["n1: %a says of itself that it is Node(n1, 1), not Node(n1, 0)"]
    );
    let results = graph_findings(|g| {
        let h = value(g, "h");
        g.nodes[Node::new(1)].outputs.push(h);
    });
    assert_eq!(
        results,
        [
            "n1: %h is defined by an earlier line too",
            "n1: relu has 1 results, not 2"
        ]
    );
    let none = graph_findings(|g| {
        let op = Op::new(
            "extern",
            [
                ("name", lighterage_ir::Attr::Str("f".into())),
                ("node", lighterage_ir::Attr::Str("n".into())),
                ("pure", lighterage_ir::Attr::Bool(false)),
                ("types", lighterage_ir::Attr::Str("".into())),
            ],
        )
        .unwrap();
        g.add_node(op, &[], &[], Phase::Forward, "").unwrap();
    });
    assert_eq!(
        none,
        ["n7: extern should have a result: a node has the name of its first"]
    );
}

#[test]
fn the_order_is_topological() {
    assert_eq!(
        graph_findings(|g| g.order.swap(0, 1)),
        ["n1: reads %h, which a line below defines"]
    );
    let own = graph_findings(|g| {
        let a = value(g, "a");
        g.nodes[Node::new(1)].inputs[0] = a;
    });
    assert_eq!(own, ["n1: reads %a, which a line below defines"]);
    let dropped = graph_findings(|g| {
        g.order.remove(2);
    });
    assert_eq!(dropped, ["output 0: no line defines %loss"]);
    let dropped = graph_findings(|g| {
        g.order.remove(0);
    });
    assert_eq!(dropped, ["n1: reads %h, which no line defines"]);
    let last = graph_findings(|g| {
        g.order.pop();
    });
    assert_eq!(last, ["state 0: no line defines %w'"]);
    assert_eq!(
        graph_findings(|g| g.order.push(Node::new(0))),
        ["n0: this node stands twice in the order"]
    );
    let gradient = graph_findings(|g| {
        g.order.remove(5);
        g.order.remove(5);
        g.states[State::new(0)].after = g.states[State::new(0)].before;
    });
    assert_eq!(gradient, ["gradient 0: no line defines %dw"]);
}

#[test]
fn types_follow_from_the_operands() {
    let result = graph_findings(|g| {
        let (a, loss) = (value(g, "a"), value(g, "loss"));
        g.values[loss].ty = g.values[a].ty.clone();
    });
    assert_eq!(
        result,
        ["n2: %loss is f32[64,64], but f32[] follows from the operands"]
    );
    let operand = graph_findings(|g| {
        let hyper = value(g, "hyper");
        g.nodes[Node::new(6)].inputs[1] = hyper;
    });
    assert_eq!(
        operand,
        ["n6: sgd of f32[64,64], f64[3], f64[3]: operands 0 and 1 should have one type"]
    );
}

#[test]
fn runs_are_of_the_step() {
    let dead = program_findings(|p| {
        let g = &mut p.graph;
        let x = g.inputs[0];
        g.add_node(
            Op::new("neg", []).unwrap(),
            &[x],
            &["dead".into()],
            Phase::Forward,
            "",
        )
        .unwrap();
        let node = g.order.pop().unwrap();
        let i1 = &mut p.schedule.instrs[Instr::new(1)].kind;
        let InstrKind::Run { node: runs, .. } = i1 else {
            panic!("i1 should run a node")
        };
        *runs = node;
    });
    assert_eq!(dead, ["i1: runs n7, which is not part of the step"]);
}

#[test]
fn a_plan_has_a_row_for_each_buffer_and_pool() {
    let n_buffers = text::parse_program(EXAMPLE).unwrap().schedule.buffers.len();
    let plan = |p: &mut Program, offset: usize, peak: usize| {
        p.plan = Some(lighterage_ir::Plan {
            offset: Table::filled(offset, 0),
            peak: Table::filled(peak, 0),
        });
    };
    assert_eq!(
        program_findings(|p| plan(p, 0, 2)),
        [format!("the plan has 0 offsets for {n_buffers} buffers")]
    );
    assert_eq!(
        program_findings(|p| plan(p, n_buffers, 1)),
        ["the plan has 1 peaks for 2 pools"]
    );
    let peak = program_findings(|p| p.plan.as_mut().unwrap().peak[Pool::new(1)] = 64);
    assert_eq!(
        peak,
        ["pool1: the peak is 64, but the last buffer ends at 16384"]
    );
    let end = program_findings(|p| p.plan.as_mut().unwrap().offset[Buffer::new(0)] = u64::MAX - 63);
    assert_eq!(end, ["buffer0: x ends above 2^64"]);
}

#[test]
fn a_graph_with_findings_hides_those_of_its_schedule() {
    let findings = program_findings(|p| {
        p.graph.order.swap(0, 1);
        p.schedule.entry.clear();
    });
    assert_eq!(findings, ["n1: reads %h, which a line below defines"]);
}

#[test]
fn findings_name_their_place() {
    let finding = Finding::new(Place::Instr(Instr::new(3)), "reads h1 for %h1");
    assert_eq!(finding.to_string(), "i3: reads h1 for %h1");
}
