//! There are three kinds of test. The first changes one small program in one place for every rule.
//! The second compares mutants of random programs with [`legal`], a simple implementation of the
//! same rules, with 64-byte units and all pairs of lines. The third, [`shuffled`], uses no rules:
//! it runs the lines in random permitted orders and compares what they read.

use super::{Proof, check};
use crate::finding::Place;
use crate::graph::{Def, Graph, Phase, State, StateKind, Value};
use crate::op::{Attr, Op, parse_type};
use crate::plan::Plan;
use crate::schedule::{
    ALIGN, Access, Buffer, BufferData, Dep, Instr, InstrData, InstrKind, Loc, MemorySpace, Pool,
    PoolData, Schedule, Stream, StreamData, Why,
};
use crate::table::{Id, Table};
use crate::{DType, Node, Part, Program};
use std::collections::{BTreeMap, BTreeSet};

const DEVICE: usize = 0;
const HOST: usize = 1;
const COMPUTE: usize = 0;
const H2D: usize = 1;
const D2H: usize = 2;

// --- builder ---

/// A program that is built line by line.
#[derive(Default)]
struct Draft {
    graph: Graph,
    schedule: Schedule,
    offset: Table<Buffer, u64>,
}

fn op(name: &str) -> Op {
    Op::new(name, []).unwrap()
}

impl Draft {
    fn new() -> Draft {
        let mut draft = Draft::default();
        for space in [MemorySpace::Device(0), MemorySpace::Host] {
            draft.schedule.pools.push(PoolData {
                name: space.name(),
                space,
                limit: None,
            });
        }
        for name in ["compute", "h2d", "d2h"] {
            draft
                .schedule
                .streams
                .push(StreamData { name: name.into() });
        }
        draft
    }
    fn input(&mut self, name: &str, ty: &str) -> Value {
        self.graph.add_input(name, parse_type(ty).unwrap())
    }
    fn state(&mut self, name: &str, ty: &str) -> Value {
        self.graph
            .add_state(name, name, StateKind::Param, parse_type(ty).unwrap())
    }
    fn nodes(&mut self, op: Op, inputs: &[Value], names: &[String]) -> Vec<Value> {
        self.graph
            .add_node(op, inputs, names, Phase::Forward, "")
            .unwrap()
    }
    fn node(&mut self, op: Op, inputs: &[Value], name: &str) -> Value {
        self.nodes(op, inputs, &[name.to_string()])[0]
    }
    fn reshape(&mut self, value: Value, shape: &[i64], name: &str) -> Value {
        self.node(
            Op::new("reshape", [("shape", Attr::Ints(shape.to_vec()))]).unwrap(),
            &[value],
            name,
        )
    }
    fn output(&mut self, value: Value) {
        self.graph.outputs.push(crate::graph::Output {
            name: format!("out{}", self.graph.outputs.len()),
            value,
        });
    }
    fn buffer(&mut self, name: &str, pool: usize, offset: u64, bytes: u64) -> Loc {
        self.offset.push(offset);
        self.schedule
            .buffers
            .push(BufferData {
                name: name.into(),
                pool: Pool::new(pool),
                bytes,
            })
            .into()
    }
    fn line(&mut self, stream: usize, kind: InstrKind, after: &[Instr]) -> Instr {
        let after = after
            .iter()
            .map(|&instr| Dep {
                instr,
                previous: false,
            })
            .collect();
        self.schedule.instrs.push(InstrData {
            kind,
            stream: Stream::new(stream),
            after,
            why: Why::Model,
        })
    }
    /// Runs the node that computes a value.
    fn run(&mut self, value: Value, args: &[Loc], outs: &[Loc], after: &[Instr]) -> Instr {
        let node = self.graph.def_node(value).unwrap();
        let kind = InstrKind::Run {
            node,
            args: args.to_vec(),
            outs: outs.to_vec(),
            scratch: None,
            part: None,
        };
        self.line(COMPUTE, kind, after)
    }
    fn copy(&mut self, stream: usize, src: Loc, dst: Loc, bytes: u64, after: &[Instr]) -> Instr {
        self.line(stream, InstrKind::Copy { src, dst, bytes }, after)
    }
    fn end(self) -> Program {
        let plan = Plan::new(&self.schedule, self.offset);
        Program {
            graph: self.graph,
            schedule: self.schedule,
            plan: Some(plan),
        }
    }
}

fn plus(loc: Loc, offset: u64) -> Loc {
    Loc {
        buffer: loc.buffer,
        offset: loc.offset + offset,
    }
}
fn i(index: usize) -> Instr {
    Instr::new(index)
}

/// Everything in eight lines: a swap, reuse of its bytes, two in-place updates, a reshape, an
/// output.
fn swap() -> Program {
    let mut draft = Draft::new();
    let x = draft.input("x", "f32[16]");
    let w = draft.state("w", "f32[16]");
    let h = draft.node(op("mul"), &[x, w], "h");
    let r = draft.node(op("relu"), &[h], "r");
    let t = draft.node(op("tanh"), &[r], "t");
    let square = draft.reshape(h, &[4, 4], "square");
    let flat = draft.reshape(square, &[16], "flat");
    let g = draft.node(op("mul"), &[t, flat], "g");
    let w2 = draft.node(op("sub"), &[w, g], "w2");
    let y = draft.node(op("neg"), &[g], "y");
    draft.graph.states[State::new(0)].after = w2;
    draft.output(y);
    let bx = draft.buffer("x", DEVICE, 0, 64);
    let bw = draft.buffer("w", DEVICE, 64, 64);
    let bh = draft.buffer("h", DEVICE, 128, 64);
    let br = draft.buffer("r", DEVICE, 192, 64);
    let bt = draft.buffer("t", DEVICE, 128, 64);
    let bh2 = draft.buffer("h.2", DEVICE, 256, 64);
    let by = draft.buffer("y", DEVICE, 320, 64);
    let host = draft.buffer("h.host", HOST, 0, 64);
    draft.run(h, &[bx, bw], &[bh], &[]);
    draft.copy(D2H, bh, host, 64, &[i(0)]);
    draft.run(r, &[bh], &[br], &[]);
    draft.run(t, &[br], &[bt], &[i(1)]);
    draft.copy(H2D, host, bh2, 64, &[i(1)]);
    draft.run(g, &[bt, bh2], &[bt], &[i(4)]);
    draft.run(w2, &[bw, bt], &[bw], &[]);
    draft.run(y, &[bt], &[by], &[]);
    draft.schedule.entry = vec![(w, bw), (x, bx)];
    draft.schedule.exit = vec![(w2, bw), (y, by)];
    draft.end()
}

fn proof(program: &Program) -> Proof {
    check(program).unwrap_or_else(|findings| panic!("{findings:#?}"))
}

/// The findings of a changed [`swap`], each with its place.
fn findings_of(change: impl FnOnce(&mut Program)) -> Vec<String> {
    let mut program = swap();
    change(&mut program);
    findings(&program)
}
fn findings(program: &Program) -> Vec<String> {
    check(program)
        .err()
        .unwrap_or_default()
        .iter()
        .map(ToString::to_string)
        .collect()
}

#[track_caller]
fn refused(change: impl FnOnce(&mut Program), message: &str) {
    let findings = findings_of(change);
    assert!(
        findings.iter().any(|finding| finding.contains(message)),
        "{message:?} is not in {findings:#?}"
    );
}
#[track_caller]
fn accepted(change: impl FnOnce(&mut Program)) {
    let findings = findings_of(change);
    assert!(findings.is_empty(), "{findings:#?}");
}

fn line(program: &mut Program, index: usize) -> &mut InstrData {
    &mut program.schedule.instrs[i(index)]
}
fn offset(program: &mut Program, buffer: usize) -> &mut u64 {
    &mut program.plan.as_mut().unwrap().offset[Buffer::new(buffer)]
}
fn args(program: &mut Program, index: usize) -> &mut Vec<Loc> {
    match &mut line(program, index).kind {
        InstrKind::Run { args, .. } => args,
        InstrKind::Copy { .. } => panic!("{index} should be a run"),
    }
}
fn outs(program: &mut Program, index: usize) -> &mut Vec<Loc> {
    match &mut line(program, index).kind {
        InstrKind::Run { outs, .. } => outs,
        InstrKind::Copy { .. } => panic!("{index} should be a run"),
    }
}
fn value(program: &Program, name: &str) -> Value {
    program
        .graph
        .values
        .iter()
        .find(|(_, data)| data.name == name)
        .unwrap()
        .0
}
fn loc(buffer: usize) -> Loc {
    Buffer::new(buffer).into()
}

#[test]
fn a_right_program_is_proved() {
    let program = swap();
    let proof = proof(&program);
    assert_eq!((proof.lines, proof.waits, proof.copied_bytes), (8, 4, 128));
    // Nine operands, one state and one output.
    assert_eq!(proof.reads, 11);
    assert_eq!(proof.peak, program.plan.as_ref().unwrap().peak);
    assert!(legal(&program));
    for seed in 0..50 {
        shuffled(&program, seed).unwrap();
    }
}

#[test]
fn an_empty_program_is_proved() {
    assert_eq!(proof(&Draft::new().end()).lines, 0);
    let empty = Program {
        graph: Graph::default(),
        schedule: Schedule::default(),
        plan: None,
    };
    assert_eq!(
        findings(&empty),
        ["has no plan: buffers have no addresses yet"]
    );
}

// --- form ---

/// No value of the types makes the checker panic or hang: each of these is refused with a sentence.
#[test]
fn malformed_programs_are_refused() {
    let bad = Value::new(99);
    refused(|p| p.plan = None, "has no plan");
    refused(
        |p| p.plan.as_mut().unwrap().offset = Table::new(),
        "the plan is for 0 buffers",
    );
    refused(
        |p| p.plan.as_mut().unwrap().peak = Table::new(),
        "in 0 pools, the schedule has 8 in 2",
    );
    // The graph.
    refused(|p| p.graph.inputs[0] = bad, "input 0 names v99");
    refused(
        |p| p.graph.inputs.push(p.graph.inputs[0]),
        "input 1 names v0",
    );
    refused(
        |p| p.graph.states[State::new(0)].before = bad,
        "state 0: is v99 before the step",
    );
    refused(
        |p| p.graph.states[State::new(0)].after = bad,
        "state 0: v99 is no value",
    );
    refused(
        |p| p.graph.outputs[0].value = bad,
        "output 0: v99 is no value",
    );
    refused(|p| p.graph.order.push(Node::new(99)), "the order names n99");
    refused(
        |p| p.graph.order.push(Node::new(0)),
        "n0: stands in the order twice",
    );
    refused(
        |p| p.graph.nodes[Node::new(1)].inputs[0] = bad,
        "n1: operand v99 is no value",
    );
    refused(
        |p| p.graph.nodes[Node::new(1)].outputs[0] = bad,
        "n1: result 0 is v99",
    );
    refused(
        |p| p.graph.nodes[Node::new(1)].outputs[0] = Value::new(0),
        "n1: result 0 is v0",
    );
    refused(
        |p| p.graph.nodes[Node::new(1)].inputs.clear(),
        "n1: relu takes 1 to 1 operands, not 0",
    );
    refused(
        |p| p.graph.nodes[Node::new(1)].outputs.clear(),
        "n1: relu has 1 results, not 0",
    );
    refused(
        |p| p.graph.values[Value::new(2)].ty = parse_type("f32[8]").unwrap(),
        "n0: mul results in f32[16], but %h is f32[8]",
    );
    refused(
        |p| p.graph.states[State::new(0)].after = value(p, "square"),
        "",
    );
    // The schedule.
    refused(
        |p| p.schedule.buffers[Buffer::new(0)].pool = Pool::new(9),
        "x lies in pool9, which is no pool",
    );
    refused(
        |p| line(p, 0).stream = Stream::new(9),
        "i0: queues on stream9",
    );
    refused(
        |p| line(p, 3).after[0].instr = i(99),
        "i3: waits for i99, which is no line",
    );
    refused(
        |p| {
            line(p, 3).after.push(Dep {
                instr: i(99),
                previous: true,
            })
        },
        "i3: waits for i99, which is no line",
    );
    refused(
        |p| line(p, 3).after[0].instr = i(3),
        "i3: waits for i3, which does not stand before it",
    );
    refused(
        |p| line(p, 3).after[0].instr = i(5),
        "i3: waits for i5, which does not stand before it",
    );
    let run = |node| InstrKind::Run {
        node: Node::new(node),
        args: vec![],
        outs: vec![],
        scratch: None,
        part: None,
    };
    refused(
        |p| line(p, 3).kind = run(99),
        "i3: runs n99, which is no node",
    );
    refused(
        |p| line(p, 3).kind = run(3),
        "i3: runs reshape, which shares its operand's bytes",
    );
    refused(
        |p| p.graph.order.retain(|&node| node != Node::new(2)),
        "i3: runs n2, which is not part of the step",
    );
    refused(
        |p| args(p, 0).truncate(1),
        "i0: mul has 2 operands, the line has places for 1",
    );
    refused(
        |p| outs(p, 0).push(loc(0)),
        "i0: mul has 1 results, the line has places for 2",
    );
    refused(
        |p| args(p, 0)[0].buffer = Buffer::new(99),
        "i0: names buffer99, which is no buffer",
    );
    refused(
        |p| args(p, 0)[0].offset = 64,
        "i0: 64 bytes at x+64 end beyond its 64",
    );
    refused(|p| args(p, 0)[0].offset = u64::MAX, "end beyond its 64");
    refused(
        |p| {
            line(p, 1).kind = InstrKind::Copy {
                src: loc(2),
                dst: loc(99),
                bytes: 64,
            }
        },
        "i1: names buffer99",
    );
    refused(
        |p| {
            line(p, 1).kind = InstrKind::Copy {
                src: loc(2),
                dst: loc(7),
                bytes: u64::MAX,
            }
        },
        "end beyond its 64",
    );
    refused(
        |p| p.schedule.entry.push((bad, loc(0))),
        "entry 2: names v99",
    );
    refused(
        |p| p.schedule.entry.push((value(p, "h"), loc(2))),
        "entry 2: %h is neither an input nor a state",
    );
    refused(
        |p| p.schedule.entry[0].1.buffer = Buffer::new(99),
        "entry 0: names buffer99",
    );
    refused(|p| p.schedule.exit.push((bad, loc(0))), "exit 2: names v99");
    refused(
        |p| p.schedule.exit[0].1.offset = 1,
        "exit 0: 64 bytes at w+1 end beyond its 64",
    );
}

/// A reshape of itself has no first value; following it must end, and no line can compute it.
#[test]
fn cyclic_reshapes_end() {
    refused(
        |p| {
            let (square, flat) = (Node::new(3), Node::new(4));
            let output = p.graph.nodes[flat].outputs[0];
            p.graph.nodes[square].inputs[0] = output;
        },
        "i5: reads h.2 for %flat at device+256, which holds %h since i4",
    );
}

#[test]
fn types_of_states_agree() {
    let mut draft = Draft::new();
    let w = draft.state("w", "f32[16]");
    draft.graph.states[State::new(0)].after = draft.node(
        Op::new("cast", [("dtype", Attr::Type(DType::F64))]).unwrap(),
        &[w],
        "w2",
    );
    let program = draft.end();
    assert_eq!(
        findings(&program),
        ["state 0: %w2 has 128 bytes and cannot take the place of %w, which has 64"]
    );
}

#[test]
fn buffers_lie_in_their_pools() {
    accepted(|p| p.schedule.pools[Pool::new(0)].limit = Some(384));
    refused(
        |p| p.schedule.pools[Pool::new(0)].limit = Some(320),
        "device needs 384 bytes, 64 more than its limit 320",
    );
    refused(
        |p| *offset(p, 6) = 384,
        "y at device+384:64 ends beyond the pool's 384 bytes",
    );
    refused(
        |p| *offset(p, 6) = u64::MAX - 63,
        "ends beyond the pool's 384 bytes",
    );
    refused(
        |p| *offset(p, 6) = 300,
        "y at device+300 is not at a multiple of 64",
    );
}

/// A state that no line reads in this step is at the place of the product's scratch.
#[test]
fn scratch_spoils_what_it_covers() {
    let program = |at: u64| {
        let mut draft = Draft::new();
        let (x, w) = (draft.input("x", "bf16[4,4]"), draft.state("w", "f32[16]"));
        let product = Op::new(
            "matmul",
            [("ta", Attr::Bool(false)), ("tb", Attr::Bool(false))],
        )
        .unwrap();
        let y = draft.node(product, &[x, x], "y");
        let (bx, by, bw) = (
            draft.buffer("x", DEVICE, 0, 64),
            draft.buffer("y", DEVICE, 64, 64),
            draft.buffer("w", DEVICE, 128, 64),
        );
        let place = draft.buffer("scratch", DEVICE, at, 192);
        let line = draft.run(y, &[bx, bx], &[by], &[]);
        let InstrKind::Run { scratch, .. } = &mut draft.schedule.instrs[line].kind else {
            panic!()
        };
        *scratch = Some(place);
        draft.schedule.entry = vec![(x, bx), (w, bw)];
        draft.schedule.exit = vec![(w, bw)];
        draft.end()
    };
    assert_eq!(findings(&program(192)), [""; 0]);
    assert_eq!(
        findings(&program(128)),
        ["exit 0: should leave %w in w at device+128, which holds scratch since i0"]
    );
}

/// Kernels load whole vectors; copies may move any bytes.
#[test]
fn kernels_touch_aligned_places() {
    let program = |skew: u64| {
        let mut draft = Draft::new();
        let x = draft.input("x", "f32[16]");
        let y = draft.node(op("relu"), &[x], "y");
        draft.output(y);
        let chunk = draft.buffer("chunk", HOST, 0, 128);
        let on_device = draft.buffer("c", DEVICE, 0, 128);
        draft.copy(H2D, plus(chunk, 8), plus(on_device, skew), 64, &[]);
        draft.run(
            y,
            &[plus(on_device, skew)],
            &[plus(on_device, skew)],
            &[i(0)],
        );
        draft.schedule.entry = vec![(x, plus(chunk, 8))];
        draft.schedule.exit = vec![(y, plus(on_device, skew))];
        draft.end()
    };
    assert_eq!(findings(&program(64)), [""; 0]);
    assert_eq!(
        findings(&program(4)),
        ["i1: uses c+4, which is not at a multiple of 64"]
    );
}

#[test]
fn scratch_is_there_and_apart() {
    let product = || {
        Op::new(
            "matmul",
            [("ta", Attr::Bool(false)), ("tb", Attr::Bool(false))],
        )
        .unwrap()
    };
    // bf16 factors of 4 × 4 are widened: three times 64 bytes.
    let program_on = |sm: Option<u32>, scratch: Option<(u64, u64)>| {
        let mut draft = Draft::new();
        draft.schedule.sm = sm;
        let x = draft.input("x", "bf16[4,4]");
        let y = draft.node(product(), &[x, x], "y");
        draft.output(y);
        let bx = draft.buffer("x", DEVICE, 0, 64);
        let by = draft.buffer("y", DEVICE, 64, 64);
        let line = draft.run(y, &[bx, bx], &[by], &[]);
        if let Some((at, bytes)) = scratch {
            let place = draft.buffer("scratch", DEVICE, at, bytes);
            let InstrKind::Run { scratch, .. } = &mut draft.schedule.instrs[line].kind else {
                panic!()
            };
            *scratch = Some(place);
        }
        draft.schedule.entry = vec![(x, bx)];
        draft.schedule.exit = vec![(y, by)];
        draft.end()
    };
    let program = |scratch| program_on(None, scratch);
    assert_eq!(findings(&program(Some((128, 192)))), [""; 0]);
    // A GPU multiplies them as they are.
    assert_eq!(findings(&program_on(Some(90), None)), [""; 0]);
    assert_eq!(
        findings(&program(None)),
        ["i0: matmul needs 192 bytes of scratch, the line has none"]
    );
    assert_eq!(
        findings(&program(Some((128, 128)))),
        ["i0: 192 bytes at scratch+0 end beyond its 128"]
    );
    assert_eq!(
        findings(&program(Some((64, 192)))),
        ["i0: has its scratch (device+64..256) in the bytes of %y (device+64..96)"]
    );
    let findings = findings(&program(Some((0, 192))));
    assert_eq!(
        findings[0],
        "i0: has its scratch (device+0..192) in the bytes of %x (device+0..32)"
    );
}

// --- contents ---

#[test]
fn operands_are_found() {
    // h's bytes belong to t by then, and the other places hold other values.
    refused(
        |p| args(p, 5)[1] = loc(2),
        "i5: reads h for %flat at device+128, which holds %t since i3",
    );
    refused(
        |p| args(p, 5)[1] = loc(0),
        "i5: reads x for %flat at device+0, which holds %x since the start of the step",
    );
    refused(
        |p| args(p, 2)[0] = loc(6),
        "i2: reads y for %h at device+320, which holds nothing yet",
    );
    // Values of one step are not values of the next: y's bytes still hold y of the last step, which
    // is another value.
    refused(
        |p| args(p, 5)[0] = loc(6),
        "i5: reads y for %t at device+320, which holds nothing yet",
    );
    refused(
        |p| outs(p, 2)[0] = loc(5),
        "i3: reads r for %r at device+192, which holds nothing yet",
    );
}

/// A chunk may be copied as one or in parts. Its values are found at their places in it.
#[test]
fn copies_move_what_they_hold() {
    let program = |parts: &[(u64, u64)], read_at: u64| {
        let mut draft = Draft::new();
        let (a, b) = (draft.state("a", "f32[32]"), draft.state("b", "f32[32]"));
        let y = draft.node(op("add"), &[a, b], "y");
        draft.output(y);
        let home = draft.buffer("home", HOST, 0, 256);
        let chunk = draft.buffer("chunk", DEVICE, 0, 256);
        let by = draft.buffer("y", DEVICE, 256, 128);
        for &(from, bytes) in parts {
            draft.copy(COMPUTE, plus(home, from), plus(chunk, from), bytes, &[]);
        }
        draft.run(y, &[chunk, plus(chunk, read_at)], &[by], &[]);
        draft.schedule.entry = vec![(a, home), (b, plus(home, 128))];
        draft.schedule.exit = vec![(a, home), (b, plus(home, 128)), (y, by)];
        draft.end()
    };
    assert_eq!(findings(&program(&[(0, 256)], 128)), [""; 0]);
    assert_eq!(findings(&program(&[(100, 156), (0, 100)], 128)), [""; 0]);
    assert_eq!(
        findings(&program(&[(0, 200)], 128)),
        ["i1: reads chunk for %b at device+128, which from device+200 on holds nothing yet"]
    );
    assert_eq!(
        findings(&program(&[(0, 256)], 64)),
        ["i1: reads chunk for %b at device+64, which holds %a from its byte 64 on since i0"]
    );
}

/// A value that is partly overwritten is lost, but only lines that read it are wrong.
#[test]
fn a_value_may_be_overwritten_in_part() {
    let program = |late: bool| {
        let mut draft = Draft::new();
        let x = draft.input("x", "f32[32]");
        let s = draft.input("s", "f32[16]");
        let y = draft.node(op("relu"), &[x], "y");
        let t = draft.node(op("relu"), &[s], "t");
        draft.output(y);
        draft.output(t);
        let (bx, bs) = (
            draft.buffer("x", DEVICE, 0, 128),
            draft.buffer("s", DEVICE, 128, 64),
        );
        let by = draft.buffer("y", DEVICE, 192, 128);
        let bt = draft.buffer("t", DEVICE, 64, 64);
        if late {
            draft.run(t, &[bs], &[bt], &[]);
            draft.run(y, &[bx], &[by], &[]);
        } else {
            draft.run(y, &[bx], &[by], &[]);
            draft.run(t, &[bs], &[bt], &[]);
        }
        draft.schedule.entry = vec![(x, bx), (s, bs)];
        draft.schedule.exit = vec![(y, by), (t, bt)];
        draft.end()
    };
    assert_eq!(findings(&program(false)), [""; 0]);
    assert_eq!(
        findings(&program(true)),
        ["i1: reads x for %x at device+0, which from device+64 on holds %t since i0"]
    );
}

#[test]
fn values_of_no_bytes_are_everywhere() {
    let mut draft = Draft::new();
    let x = draft.input("x", "f32[0]");
    let y = draft.node(op("relu"), &[x], "y");
    draft.output(y);
    let place = draft.buffer("place", DEVICE, 0, 64);
    draft.run(y, &[plus(place, 7)], &[plus(place, 64)], &[]);
    draft.schedule.entry = vec![(x, place)];
    draft.schedule.exit = vec![(y, place)];
    assert_eq!(findings(&draft.end()), [""; 0]);
}

/// h is computed again into the bytes that came back from the host. It is the same node, so it is
/// the same value.
#[test]
fn reruns_reproduce_their_value() {
    let rerun = |p: &mut Program| {
        let again = line(p, 0).kind.clone();
        line(p, 4).kind = again;
        outs(p, 4)[0] = loc(5);
    };
    accepted(|p| {
        rerun(p);
        line(p, 4).stream = Stream::new(COMPUTE);
    });
    refused(
        |p| {
            rerun(p);
            args(p, 4).swap(0, 1);
        },
        "i4: reads w for %x",
    );
}

#[test]
fn opaque_nodes_run_once() {
    let program = |runs: usize| {
        let mut draft = Draft::new();
        let attrs = [
            ("name", Attr::Str("log".into())),
            ("node", Attr::Str("log_1".into())),
            ("pure", Attr::Bool(false)),
            ("types", Attr::Str("f32[16]".into())),
        ];
        let y = draft.node(Op::new("extern", attrs).unwrap(), &[], "y");
        let place = draft.buffer("place", DEVICE, 0, 64);
        for _ in 0..runs {
            draft.run(y, &[], &[place], &[]);
        }
        draft.end()
    };
    assert_eq!(
        findings(&program(0)),
        ["n0: no line runs extern, which may have effects"]
    );
    assert_eq!(findings(&program(1)), [""; 0]);
    assert_eq!(
        findings(&program(2)),
        ["i1: runs extern again after i0, but it may have effects"]
    );
}

// --- operands ---

#[test]
fn in_place_pairs_are_declared() {
    // matmul reads its operands many times.
    let program = |op: Op, at: u64| {
        let mut draft = Draft::new();
        let (x, y) = (draft.input("x", "f32[8,8]"), draft.input("y", "f32[8,8]"));
        let z = draft.node(op, &[x, y], "z");
        draft.output(z);
        let (bx, by) = (
            draft.buffer("x", DEVICE, 0, 256),
            draft.buffer("y", DEVICE, 256, 256),
        );
        let bz = draft.buffer("z", DEVICE, at, 256);
        draft.run(z, &[bx, by], &[bz], &[]);
        draft.schedule.entry = vec![(x, bx), (y, by)];
        draft.schedule.exit = vec![(z, bz)];
        draft.end()
    };
    let matmul = || {
        Op::new(
            "matmul",
            [("ta", Attr::Bool(false)), ("tb", Attr::Bool(false))],
        )
        .unwrap()
    };
    assert_eq!(findings(&program(matmul(), 512)), [""; 0]);
    assert_eq!(
        findings(&program(matmul(), 256)),
        ["i0: overwrites its operand %y (device+256..512) with %z (device+256..512)"]
    );
    assert_eq!(findings(&program(op("add"), 0)), [""; 0]);
    assert_eq!(findings(&program(op("add"), 256)), [""; 0]);
    // Not the same bytes: element 0 of the result would be written over element 16 of the operand.
    assert_eq!(findings(&program(op("add"), 64)).len(), 2);
    assert!(
        findings(&program(op("add"), 448))[0]
            .contains("overwrites its operand %y (device+256..512)")
    );
}

/// p' may be in the bytes of p and m' in the bytes of m, but not p' in the bytes of m. The three
/// results are disjoint.
#[test]
fn adamw_works_in_place() {
    let program = |to: [usize; 3]| {
        let mut draft = Draft::new();
        let states: Vec<Value> = ["p", "m", "v"]
            .iter()
            .map(|name| draft.state(name, "f32[16]"))
            .collect();
        let g = draft.input("g", "f32[16]");
        let (step, hyper) = (draft.input("step", "i64[]"), draft.input("hyper", "f64[5]"));
        let names = ["p2", "m2", "v2"].map(String::from);
        let new = draft.nodes(
            op("adamw"),
            &[states[0], g, states[1], states[2], step, hyper],
            &names,
        );
        let b: Vec<Loc> = (0..6)
            .map(|k| draft.buffer(&format!("b{k}"), DEVICE, 64 * k, 64))
            .collect();
        for k in 0..3 {
            draft.graph.states[State::new(k)].after = new[k];
            draft.schedule.entry.push((states[k], b[k]));
            draft.schedule.exit.push((new[k], b[k]));
        }
        draft
            .schedule
            .entry
            .extend([(g, b[3]), (step, b[4]), (hyper, b[5])]);
        draft.run(
            new[0],
            &[b[0], b[3], b[1], b[2], b[4], b[5]],
            &to.map(|k| b[k]),
            &[],
        );
        draft.end()
    };
    assert_eq!(findings(&program([0, 1, 2])), [""; 0]);
    let crossed = findings(&program([1, 0, 2]));
    assert_eq!(
        crossed
            .iter()
            .filter(|f| f.contains("overwrites its operand"))
            .count(),
        2,
        "{crossed:#?}"
    );
    let shared = findings(&program([0, 0, 2]));
    assert!(
        shared
            .iter()
            .any(|f| f.contains("writes %p2 and %m2 to the same bytes")),
        "{shared:#?}"
    );
}

/// The same bytes may be read as two operands; the broadcast one must not be written.
#[test]
fn types_of_in_place_pairs_agree() {
    let mut draft = Draft::new();
    let (x, b) = (draft.input("x", "f32[4,16]"), draft.input("b", "f32[16]"));
    let y = draft.node(op("add"), &[b, x], "y");
    draft.output(y);
    let (bx, bb) = (
        draft.buffer("x", DEVICE, 0, 256),
        draft.buffer("b", DEVICE, 256, 64),
    );
    let by = draft.buffer("y", DEVICE, 256, 256);
    draft.run(y, &[bb, bx], &[by], &[]);
    draft.schedule.entry = vec![(x, bx), (b, bb)];
    draft.schedule.exit = vec![(y, by)];
    assert_eq!(
        findings(&draft.end()),
        ["i0: overwrites its operand %b (device+256..320) with %y (device+256..512)"]
    );

    // The same number of bytes, but another type: the pair is declared only for equal types.
    let mut draft = Draft::new();
    let (x, b) = (draft.input("x", "f32[1,16]"), draft.input("b", "f32[16]"));
    let y = draft.node(op("add"), &[b, x], "y");
    draft.output(y);
    let (bx, bb) = (
        draft.buffer("x", DEVICE, 0, 64),
        draft.buffer("b", DEVICE, 64, 64),
    );
    draft.run(y, &[bb, bx], &[bb], &[]);
    draft.schedule.entry = vec![(x, bx), (b, bb)];
    draft.schedule.exit = vec![(y, bb)];
    let program = draft.end();
    assert_eq!(
        findings(&program),
        ["i0: overwrites its operand %b (device+64..128) with %y (device+64..128)"]
    );
}

#[test]
fn copies_do_not_overlap_themselves() {
    refused(
        |p| {
            p.schedule.buffers[Buffer::new(5)].bytes = 128;
            line(p, 4).kind = InstrKind::Copy {
                src: loc(5),
                dst: plus(loc(5), 32),
                bytes: 64,
            };
        },
        "i4: copies device+256..320 onto itself: device+288..352",
    );
}

// --- conflicts ---

#[test]
fn conflicting_lines_are_ordered() {
    let drop = |index: usize| move |p: &mut Program| line(p, index).after.clear();
    refused(
        drop(1),
        "i1: reads h (device+128..192) while i0 on compute still writes h: no wait orders them",
    );
    refused(
        drop(3),
        "i3: writes t (device+128..192) while i1 on d2h still reads h: no wait orders them",
    );
    refused(
        drop(4),
        "i4: reads h.host (host+0..64) while i1 on d2h still writes h.host: no wait orders them",
    );
    refused(
        drop(5),
        "i5: reads h.2 (device+256..320) while i4 on h2d still writes h.2: no wait orders them",
    );
    // An indirect wait is enough: i4 waits for i3, which waits for i1.
    accepted(|p| line(p, 4).after[0].instr = i(3));
}

/// Nothing in this step orders the copy at its end before the next step's start.
#[test]
fn steps_overlap() {
    let program = |wait: Option<Dep>| {
        let mut draft = Draft::new();
        let w = draft.state("w", "f32[16]");
        let w2 = draft.node(op("relu"), &[w], "w2");
        draft.graph.states[State::new(0)].after = w2;
        let home = draft.buffer("home", HOST, 0, 64);
        let place = draft.buffer("place", DEVICE, 0, 64);
        draft.copy(H2D, home, place, 64, &[]);
        draft.run(w2, &[place], &[place], &[i(0)]);
        draft.copy(D2H, place, home, 64, &[i(1)]);
        draft.schedule.instrs[i(0)].after.extend(wait);
        draft.schedule.entry = vec![(w, home)];
        draft.schedule.exit = vec![(w2, home)];
        draft.end()
    };
    let races = [
        "i0: in the next step reads home (host+0..64) while i2 of this step on d2h still writes \
         home: no wait orders them",
        "i0: in the next step writes place (device+0..64) while i1 of this step on compute still \
         writes place: no wait orders them",
    ];
    // i0 also writes bytes that i2 still reads. This is not reported again: one wait solves both.
    assert_eq!(findings(&program(None)), races);
    assert_eq!(
        findings(&program(Some(Dep {
            instr: i(1),
            previous: true
        }))),
        [races[0]]
    );
    assert_eq!(
        findings(&program(Some(Dep {
            instr: i(2),
            previous: true
        }))),
        [""; 0]
    );
}

/// The host waits for the output and for the readers of the input, and for nothing else.
#[test]
fn the_host_orders_steps() {
    let program = |output: bool, input: bool| {
        let mut draft = Draft::new();
        let x = draft.input("x", "f32[16]");
        let w = draft.state("w", "f32[16]");
        let y = draft.node(op("add"), &[x, w], "y");
        if output {
            draft.output(y);
        }
        let (home, there) = (
            draft.buffer("home", HOST, 0, 64),
            draft.buffer("out", HOST, 64, 64),
        );
        let (bx, bw) = (
            draft.buffer("x", DEVICE, 0, 64),
            draft.buffer("w", DEVICE, 64, 64),
        );
        let by = draft.buffer("y", DEVICE, 128, 64);
        draft.run(y, &[bx, bw], &[by], &[]);
        draft.copy(D2H, by, there, 64, &[i(0)]);
        draft.schedule.entry = vec![(x, bx), (w, bw)];
        draft.schedule.exit = vec![(w, bw), (y, there)];
        if input {
            // The copy is the last to read the input's bytes, so the host waits for it.
            draft.copy(D2H, bx, home, 64, &[]);
        }
        draft.end()
    };
    let race = "i0: in the next step writes y (device+128..192) while i1 of this step on d2h \
        still reads y: no wait orders them";
    assert_eq!(findings(&program(false, false)), [race]);
    assert_eq!(findings(&program(true, false)), [""; 0]);
    assert_eq!(findings(&program(false, true)), [""; 0]);
}

/// An output with two places may be read from either.
#[test]
fn the_host_surely_waits_for_one_place() {
    let program = |places: usize| {
        let mut draft = Draft::new();
        let x = draft.input("x", "f32[16]");
        let y = draft.node(op("relu"), &[x], "y");
        draft.output(y);
        let bx = draft.buffer("x", DEVICE, 0, 64);
        let by = draft.buffer("y", DEVICE, 64, 64);
        let there = draft.buffer("there", HOST, 0, 64);
        draft.run(y, &[bx], &[by], &[]);
        draft.copy(D2H, by, there, 64, &[i(0)]);
        draft.schedule.entry = vec![(x, bx)];
        draft.schedule.exit = [(y, there), (y, by)][..places].to_vec();
        draft.end()
    };
    assert_eq!(findings(&program(1)), [""; 0]);
    assert_eq!(findings(&program(2)).len(), 1);
}

#[test]
fn more_streams_than_clocks_can_hold_are_refused() {
    let mut draft = Draft::new();
    let place = draft.buffer("place", DEVICE, 0, 128);
    for stream in 0..9000 {
        draft.schedule.streams.push(StreamData {
            name: format!("s{stream}"),
        });
        draft.copy(3 + stream, place, plus(place, 64), 64, &[]);
    }
    assert_eq!(
        findings(&draft.end()),
        ["9000 lines on 9000 streams are too many to prove: use fewer streams"]
    );
}

// --- entry and exit ---

#[test]
fn what_a_step_finds_is_disjoint() {
    refused(
        |p| *offset(p, 0) = 64,
        "entry 1: %x in x (device+64..128) shares bytes with %w",
    );
}

#[test]
fn inputs_states_and_outputs_have_places() {
    refused(
        |p| {
            p.schedule.entry.remove(0);
        },
        "state 0: %w has no place at entry",
    );
    refused(
        |p| {
            p.schedule.entry.remove(1);
        },
        "input %x has no place at entry",
    );
    refused(
        |p| {
            p.schedule.exit.remove(0);
        },
        "state 0: %w is found in w+0, but %w2 is not left there",
    );
    refused(
        |p| p.schedule.exit[0].1 = loc(3),
        "state 0: %w is found in w+0, but %w2 is not left there",
    );
    refused(
        |p| {
            p.schedule.exit.remove(1);
        },
        "output 0: %y has no place at exit",
    );
}

#[test]
fn what_must_leave_leaves() {
    refused(
        |p| outs(p, 6)[0] = loc(3),
        "exit 0: should leave %w2 in w at device+64, which holds %w since the start of the step",
    );
    refused(
        |p| {
            p.schedule.instrs.push(InstrData {
                kind: InstrKind::Copy {
                    src: loc(0),
                    dst: loc(6),
                    bytes: 64,
                },
                stream: Stream::new(COMPUTE),
                after: vec![],
                why: Why::Fetch,
            });
        },
        "exit 1: should leave %y in y at device+320, which holds %x since i8",
    );
    let findings = check(&{
        let mut program = swap();
        outs(&mut program, 6)[0] = loc(3);
        program
    });
    assert_eq!(findings.unwrap_err()[0].place, Place::Exit(0));
}

/// The host reads outputs before it writes inputs. So an output may be in an input's bytes, and may
/// be the input.
#[test]
fn outputs_may_take_the_place_of_inputs() {
    let mut draft = Draft::new();
    let (x, z) = (draft.input("x", "f32[16]"), draft.input("z", "f32[16]"));
    let y = draft.node(op("relu"), &[x], "y");
    draft.output(y);
    draft.output(z);
    let (bx, bz) = (
        draft.buffer("x", DEVICE, 0, 64),
        draft.buffer("z", DEVICE, 64, 64),
    );
    draft.run(y, &[bx], &[bx], &[]);
    draft.schedule.entry = vec![(x, bx), (z, bz)];
    draft.schedule.exit = vec![(y, bx), (z, bz)];
    assert_eq!(findings(&draft.end()), [""; 0]);
}

/// A state whose new value is another's old one: the exchange needs a third place.
#[test]
fn states_may_change_places() {
    let program = |spare: bool| {
        let mut draft = Draft::new();
        let (a, b) = (draft.state("a", "f32[16]"), draft.state("b", "f32[16]"));
        draft.graph.states[State::new(0)].after = b;
        draft.graph.states[State::new(1)].after = a;
        let (ba, bb) = (
            draft.buffer("a", DEVICE, 0, 64),
            draft.buffer("b", DEVICE, 64, 64),
        );
        let third = draft.buffer("third", DEVICE, 128, 64);
        if spare {
            draft.copy(COMPUTE, ba, third, 64, &[]);
        }
        draft.copy(COMPUTE, bb, ba, 64, &[]);
        draft.copy(COMPUTE, if spare { third } else { ba }, bb, 64, &[]);
        draft.schedule.entry = vec![(a, ba), (b, bb)];
        draft.schedule.exit = vec![(b, ba), (a, bb)];
        draft.end()
    };
    assert_eq!(findings(&program(true)), [""; 0]);
    assert_eq!(
        findings(&program(false)),
        ["exit 1: should leave %a in b at device+64, which holds %b since i1"]
    );
}

// --- random programs ---

/// SplitMix64: a seed reproduces a program.
struct Random(u64);

fn mix(x: u64) -> u64 {
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }
    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }
    fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }
    fn pick<T: Copy>(&mut self, items: &[T]) -> T {
        items[self.below(items.len())]
    }
}

/// A legal program with swaps, reruns, chunks and in-place updates. Offsets and waits come last, by
/// brute force.
struct Growth {
    random: Random,
    draft: Draft,
    /// The current place of each root.
    on_device: BTreeMap<Value, Loc>,
    on_host: BTreeMap<Value, Loc>,
}

impl Growth {
    fn bytes(&self, value: Value) -> u64 {
        self.draft.graph.values[value].ty.bytes()
    }
    fn place(&mut self, value: Value, pool: usize) -> Loc {
        let name = format!(
            "{}.{}",
            self.draft.graph.values[value].name,
            self.draft.schedule.buffers.len()
        );
        let bytes = self.bytes(value);
        self.draft.buffer(&name, pool, 0, bytes)
    }
    /// Brings a value to the device, from the host or by running its node again. Returns where it
    /// is.
    fn want(&mut self, value: Value) -> Loc {
        let root = self.draft.graph.root(value);
        if let Some(&at) = self.on_device.get(&root) {
            return at;
        }
        let to = match self.on_host.get(&root) {
            Some(&from) if self.draft.graph.def_node(root).is_none() || !self.random.one_in(3) => {
                let to = self.place(root, DEVICE);
                let bytes = self.bytes(root);
                self.draft.copy(H2D, from, to, bytes, &[]);
                to
            }
            _ => return self.run(root, false),
        };
        self.on_device.insert(root, to);
        to
    }
    /// Runs the node of a value, in place if that is allowed and `in_place` is true.
    fn run(&mut self, value: Value, in_place: bool) -> Loc {
        let node = self.draft.graph.def_node(value).unwrap();
        let data = self.draft.graph.nodes[node].clone();
        // Bringing one operand must not drop another.
        let args: Vec<Loc> = data
            .inputs
            .iter()
            .map(|&operand| self.want(operand))
            .collect();
        let graph = &self.draft.graph;
        let same = |&&(operand, _): &&(usize, usize)| {
            let root = graph.root(data.inputs[operand]);
            let alone = data
                .inputs
                .iter()
                .filter(|&&other| graph.root(other) == root)
                .count()
                == 1;
            alone
                && graph.def_node(root).is_some()
                && graph.values[data.inputs[operand]].ty == graph.values[value].ty
        };
        let pair = data.op.inplace().iter().find(same).filter(|_| in_place);
        let to = match pair {
            Some(&(operand, _)) => {
                let gone = graph.root(data.inputs[operand]);
                self.on_device.remove(&gone);
                args[operand]
            }
            None => self.place(value, DEVICE),
        };
        self.draft.run(value, &args, &[to], &[]);
        self.on_device.insert(value, to);
        to
    }
    /// Forgets a computed value on the device, swapped out or not.
    fn drop_one(&mut self) {
        let graph = &self.draft.graph;
        let computed: Vec<Value> = self
            .on_device
            .keys()
            .copied()
            .filter(|&v| graph.def_node(v).is_some())
            .collect();
        if computed.is_empty() {
            return;
        }
        let value = self.random.pick(&computed);
        if !self.on_host.contains_key(&value) && !self.random.one_in(3) {
            let (from, bytes) = (self.on_device[&value], self.bytes(value));
            let to = self.place(value, HOST);
            self.draft.copy(D2H, from, to, bytes, &[]);
            self.on_host.insert(value, to);
        }
        self.on_device.remove(&value);
    }
}

fn random_program(seed: u64) -> Program {
    let random = Random(mix(seed));
    let mut growth = Growth {
        random,
        draft: Draft::new(),
        on_device: BTreeMap::new(),
        on_host: BTreeMap::new(),
    };
    let draft = &mut growth.draft;
    let random = &mut growth.random;
    // The graph: values of two widths, which are never combined.
    let mut made: Vec<Value> = vec![];
    let mut updates: Vec<(State, Value)> = vec![];
    for (lane, ty) in ["f32[16]", "f32[48]"].iter().enumerate() {
        let x = draft.input(&format!("x{lane}"), ty);
        let states: Vec<Value> = (0..2)
            .map(|k| draft.state(&format!("w{lane}{k}"), ty))
            .collect();
        let mut known = vec![x, states[0], states[1]];
        for k in 0..4 + random.below(5) {
            let name = format!("v{lane}.{k}");
            let operand = random.pick(&known[known.len().saturating_sub(4)..]);
            let result = match random.below(5) {
                0 => draft.node(op("relu"), &[operand], &name),
                1 => draft.node(
                    Op::new("cumsum", [("dim", Attr::Int(0))]).unwrap(),
                    &[operand],
                    &name,
                ),
                2 => {
                    let view = draft.reshape(
                        operand,
                        &[-1, 4].map(|d| if d < 0 { 4 + 8 * lane as i64 } else { d }),
                        &format!("{name}.a"),
                    );
                    draft.reshape(view, &[16 + 32 * lane as i64], &name)
                }
                _ => {
                    let other = random.pick(&known);
                    draft.node(op("mul"), &[operand, other], &name)
                }
            };
            known.push(result);
        }
        let gradients: Vec<Value> = known[3..].to_vec();
        // Not the old value of a state under another name, because that would have to be saved
        // before the update.
        let computed: Vec<Value> = gradients
            .iter()
            .copied()
            .filter(|&v| draft.graph.def_node(draft.graph.root(v)).is_some())
            .collect();
        for k in 0..2 {
            if !computed.is_empty() && (k == 0 || random.one_in(2)) {
                updates.push((State::new(2 * lane + k), random.pick(&computed)));
            }
        }
        made.extend(gradients);
    }
    let outputs = [random.pick(&made), random.pick(&made)];
    let outputs: Vec<Value> = outputs.map(|v| draft.node(op("neg"), &[v], "out")).to_vec();
    for &output in &outputs {
        draft.output(output);
    }
    let states: Table<State, Value> = draft.graph.states.values().map(|s| s.before).collect();
    for &(state, gradient) in &updates {
        let name = format!("{}.new", draft.graph.values[states[state]].name);
        let after = draft.node(op("sub"), &[states[state], gradient], &name);
        draft.graph.states[state].after = after;
    }
    // Entry: inputs on either side; the states of the second lane are a chunk on the host.
    for &x in &draft.graph.inputs.clone() {
        let pool = random.below(2);
        let bytes = draft.graph.values[x].ty.bytes();
        let at = draft.buffer(&format!("in{pool}"), pool, 0, bytes);
        draft.schedule.entry.push((x, at));
        if pool == DEVICE {
            growth.on_device.insert(x, at)
        } else {
            growth.on_host.insert(x, at)
        };
    }
    let home = draft.buffer("home", HOST, 0, 384);
    let chunk = draft.buffer("chunk", DEVICE, 0, 384);
    draft.copy(H2D, home, chunk, 384, &[]);
    for (id, &state) in states.iter() {
        let k = id.index();
        let (at, entry) = match k {
            2 | 3 => (
                plus(chunk, 192 * (k as u64 - 2)),
                plus(home, 192 * (k as u64 - 2)),
            ),
            _ => {
                let at = draft.buffer(&format!("state{k}"), DEVICE, 0, 64);
                (at, at)
            }
        };
        growth.on_device.insert(state, at);
        draft.schedule.entry.push((state, entry));
        let after = draft.graph.states[id].after;
        draft.schedule.exit.push((after, entry));
    }
    // The lines.
    for &value in &made {
        if growth.draft.graph.root(value) == value {
            let in_place = growth.random.one_in(2);
            growth.run(value, in_place);
        }
        if growth.random.one_in(2) {
            growth.drop_one();
        }
    }
    for &value in &outputs {
        let from = growth.run(value, false);
        let (to, bytes) = (growth.place(value, HOST), growth.bytes(value));
        growth.draft.copy(D2H, from, to, bytes, &[]);
        growth.draft.schedule.exit.push((value, to));
    }
    // All gradients before the first update: a rerun may need a state's old value.
    let gradients: Vec<Loc> = updates
        .iter()
        .map(|&(_, gradient)| growth.want(gradient))
        .collect();
    let new: Vec<(Value, Value, Loc)> = updates
        .iter()
        .zip(&gradients)
        .map(|(&(state, _), &from)| (growth.draft.graph.states[state].after, states[state], from))
        .collect();
    for &(after, before, from) in &new {
        let at = growth.on_device[&before];
        growth.draft.run(after, &[at, from], &[at], &[]);
    }
    growth.draft.copy(D2H, chunk, home, 384, &[]);
    let mut program = growth.draft.end();
    allocate(&mut program);
    synchronise(&mut program);
    program
}

/// First fit by list position.
fn allocate(program: &mut Program) {
    let schedule = &program.schedule;
    let mut lives: Table<Buffer, Option<(usize, usize)>> =
        Table::filled(schedule.buffers.len(), None);
    let mut extend = |buffer: Buffer, at: usize| {
        let (first, last) = lives[buffer].unwrap_or((at, at));
        lives[buffer] = Some((first.min(at), last.max(at)));
    };
    for (line, _) in schedule.instrs.iter() {
        for access in schedule.accesses(&program.graph, line) {
            extend(access.loc.buffer, line.index());
        }
    }
    for &(_, loc) in schedule.entry.iter().chain(&schedule.exit) {
        extend(loc.buffer, 0);
        extend(loc.buffer, schedule.instrs.len());
    }
    let mut offset: Table<Buffer, u64> = Table::new();
    for (buffer, data) in schedule.buffers.iter() {
        let mut at = 0;
        let apart = |a: Option<(usize, usize)>, b: Option<(usize, usize)>| match (a, b) {
            (Some(a), Some(b)) => a.1 < b.0 || b.1 < a.0,
            _ => true,
        };
        let mut placed: Vec<(u64, u64)> = offset
            .iter()
            .filter(|&(other, _)| {
                schedule.buffers[other].pool == data.pool && !apart(lives[other], lives[buffer])
            })
            .map(|(other, &start)| (start, start + schedule.buffers[other].bytes))
            .collect();
        placed.sort_unstable();
        for (start, end) in placed {
            if at + data.bytes <= start {
                break;
            }
            at = at.max(end);
        }
        offset.push(at);
    }
    program.plan = Some(Plan::new(schedule, offset));
}

// --- brute force ---

/// Units of 64 bytes that an access touches.
fn units(program: &Program, access: &Access) -> (Pool, std::ops::Range<usize>) {
    let plan = program.plan.as_ref().unwrap();
    let start = plan.address(access.loc);
    let pool = program.schedule.buffers[access.loc.buffer].pool;
    (
        pool,
        (start / ALIGN) as usize..((start + access.bytes).div_ceil(ALIGN)) as usize,
    )
}
fn meet(a: &(Pool, std::ops::Range<usize>), b: &(Pool, std::ops::Range<usize>)) -> bool {
    a.0 == b.0 && a.1.start < b.1.end && b.1.start < a.1.end
}
fn value_units(program: &Program, value: Value, loc: Loc) -> (Pool, std::ops::Range<usize>) {
    units(
        program,
        &Access {
            loc,
            bytes: program.graph.values[value].ty.bytes(),
            write: false,
        },
    )
}

/// Whether the host waits for each line after its step.
fn watched(program: &Program) -> Vec<bool> {
    let Program {
        graph, schedule, ..
    } = program;
    let is_output = |v: Value| graph.outputs.iter().any(|o| o.value == v);
    let inputs: Vec<_> = schedule
        .entry
        .iter()
        .filter(|&&(v, _)| matches!(graph.values[v].def, Def::Input(_)))
        .map(|&(v, loc)| value_units(program, v, loc))
        .collect();
    let outputs: Vec<_> = schedule
        .exit
        .iter()
        .filter(|&&(v, _)| is_output(v))
        .map(|&(v, loc)| value_units(program, v, loc))
        .collect();
    let touches = |line: Instr| {
        schedule.accesses(graph, line).iter().any(|access| {
            let at = units(program, access);
            inputs.iter().any(|input| meet(input, &at))
                || (access.write && outputs.iter().any(|output| meet(output, &at)))
        })
    };
    schedule.instrs.ids().map(touches).collect()
}

/// A set of positions in the list appended to itself.
type Set = Vec<bool>;

fn unite(set: &mut Set, other: &Set) {
    set.iter_mut().zip(other).for_each(|(a, &b)| *a |= b);
}

/// For each position, the positions before it. `wait` is called at each line with the set so far,
/// and may add waits.
fn predecessors(
    program: &mut Program,
    mut wait: impl FnMut(&Program, usize, &Set, &[Set]) -> Vec<Dep>,
) -> Vec<Set> {
    let n = program.schedule.instrs.len();
    let watched = watched(program);
    let mut before: Vec<Set> = vec![];
    for t in 0..2 * n {
        let line = i(t % n);
        let mut set = vec![false; 2 * n];
        let follow = |set: &mut Set, other: usize, before: &[Set]| {
            set[other] = true;
            unite(set, &before[other]);
        };
        if n <= t {
            for other in (0..n).filter(|&other| watched[other]) {
                follow(&mut set, other, &before);
            }
        }
        let stream = program.schedule.instrs[line].stream;
        if let Some(other) = (0..t)
            .rev()
            .find(|&other| program.schedule.instrs[i(other % n)].stream == stream)
        {
            follow(&mut set, other, &before);
        }
        let resolve = |dep: &Dep| match dep.previous {
            true if t < n => None,
            true => Some(dep.instr.index()),
            false => Some(t / n * n + dep.instr.index()),
        };
        for other in program.schedule.instrs[line]
            .after
            .iter()
            .filter_map(resolve)
        {
            follow(&mut set, other, &before);
        }
        let added = wait(program, t, &set, &before);
        for other in added.iter().filter_map(resolve) {
            follow(&mut set, other, &before);
        }
        program.schedule.instrs[line].after.extend(added);
        before.push(set);
    }
    before
}

fn conflict(program: &Program, a: usize, b: usize) -> bool {
    let accesses = |t: usize| {
        program
            .schedule
            .accesses(&program.graph, i(t % program.schedule.instrs.len()))
    };
    let (a, b) = (accesses(a), accesses(b));
    a.iter().any(|x| {
        b.iter()
            .any(|y| (x.write || y.write) && meet(&units(program, x), &units(program, y)))
    })
}

/// Adds a wait for every conflict that is not ordered yet, latest first, so that every wait is
/// needed.
fn synchronise(program: &mut Program) {
    let n = program.schedule.instrs.len();
    predecessors(program, |program, t, set, before| {
        let mut set = set.clone();
        let mut added = vec![];
        for other in (0..t).rev() {
            if !set[other] && conflict(program, other, t) {
                added.push(Dep {
                    instr: i(other % n),
                    previous: other / n < t / n,
                });
                set[other] = true;
                unite(&mut set, &before[other]);
            }
        }
        added
    });
}

/// The result of the checker, by brute force. Before: the program is well-formed except for the
/// order of its lines and their addresses.
fn legal(program: &Program) -> bool {
    /// For each pool and unit: step, root, unit of the root.
    type Memory = Vec<Vec<Option<(usize, Value, usize)>>>;
    let (graph, schedule) = (&program.graph, &program.schedule);
    let plan = program.plan.as_ref().unwrap();
    let n = schedule.instrs.len();
    let fits = |(buffer, data): (Buffer, &BufferData)| {
        plan.offset[buffer] + data.bytes <= plan.peak[data.pool]
    };
    let points_up = |(line, data): (Instr, &InstrData)| {
        data.after
            .iter()
            .all(|dep| dep.previous || dep.instr < line)
    };
    if !schedule.buffers.iter().all(fits) || !schedule.instrs.iter().all(points_up) {
        return false;
    }
    for data in schedule.instrs.values() {
        match &data.kind {
            InstrKind::Copy { src, dst, bytes } => {
                let at = |loc: Loc| {
                    units(
                        program,
                        &Access {
                            loc,
                            bytes: *bytes,
                            write: false,
                        },
                    )
                };
                if meet(&at(*src), &at(*dst)) {
                    return false;
                }
            }
            InstrKind::Run {
                node, args, outs, ..
            } => {
                let node = &graph.nodes[*node];
                for (o, &out) in outs.iter().enumerate() {
                    let to = value_units(program, node.outputs[o], out);
                    for (k, &arg) in args.iter().enumerate() {
                        let from = value_units(program, node.inputs[k], arg);
                        let pair = node.op.inplace().contains(&(k, o)) && from == to;
                        if meet(&from, &to) && !pair {
                            return false;
                        }
                    }
                }
            }
        }
    }
    // Both steps. A state's old value is the one that the step before left.
    let mut memory: Memory = plan
        .peak
        .values()
        .map(|&peak| vec![None; peak.div_ceil(ALIGN) as usize])
        .collect();
    let name = |mut step: usize, value: Value| {
        let mut root = graph.root(value);
        while let Def::State(state) = graph.values[root].def
            && 0 < step
        {
            (step, root) = (step - 1, graph.root(graph.states[state].after));
        }
        (step, root)
    };
    let write = |memory: &mut Memory, step: usize, value: Value, loc: Loc| {
        let (pool, range) = value_units(program, value, loc);
        let (s, v) = name(step, value);
        for (k, unit) in range.enumerate() {
            memory[pool.index()][unit] = Some((s, v, k));
        }
    };
    let holds = |memory: &Memory, step: usize, value: Value, loc: Loc| {
        let (pool, range) = value_units(program, value, loc);
        let (s, v) = name(step, value);
        range
            .enumerate()
            .all(|(k, unit)| memory[pool.index()][unit] == Some((s, v, k)))
    };
    let mut taken = BTreeSet::new();
    for &(value, loc) in &schedule.entry {
        let (pool, range) = value_units(program, value, loc);
        if !range.into_iter().all(|unit| taken.insert((pool, unit))) {
            return false;
        }
        write(&mut memory, 0, value, loc);
    }
    for step in 0..2 {
        for &(value, loc) in &schedule.entry {
            if 0 < step && matches!(graph.values[value].def, Def::Input(_)) {
                write(&mut memory, step, value, loc);
            }
        }
        for data in schedule.instrs.values() {
            match &data.kind {
                &InstrKind::Copy { src, dst, bytes } => {
                    let (from, source) = units(
                        program,
                        &Access {
                            loc: src,
                            bytes,
                            write: false,
                        },
                    );
                    let (to, target) = units(
                        program,
                        &Access {
                            loc: dst,
                            bytes,
                            write: false,
                        },
                    );
                    for (a, b) in source.zip(target) {
                        memory[to.index()][b] = memory[from.index()][a];
                    }
                }
                InstrKind::Run {
                    node, args, outs, ..
                } => {
                    let node = &graph.nodes[*node];
                    if !node
                        .inputs
                        .iter()
                        .zip(args)
                        .all(|(&value, &loc)| holds(&memory, step, value, loc))
                    {
                        return false;
                    }
                    for (&value, &loc) in node.outputs.iter().zip(outs) {
                        write(&mut memory, step, value, loc);
                    }
                }
            }
        }
        if !schedule
            .exit
            .iter()
            .all(|&(value, loc)| holds(&memory, step, value, loc))
        {
            return false;
        }
    }
    let mut program = program.clone();
    let before = predecessors(&mut program, |_, _, _, _| vec![]);
    (0..2 * n).all(|t| (0..t).all(|other| before[t][other] || !conflict(&program, other, t)))
}

// --- interpreter ---

const POISON: u64 = 0xdead;

/// Runs three steps in a random order that streams, waits and the host permit. When a line starts,
/// it reads its operands and overwrites its results with poison. Later it reads again and writes.
/// An error is a wrong operand, state or output, or a deadlock.
fn shuffled(program: &Program, seed: u64) -> Result<(), String> {
    const STEPS: usize = 3;
    let (graph, schedule) = (&program.graph, &program.schedule);
    let mut random = Random(mix(seed));
    let n = schedule.instrs.len();
    let watched = watched(program);
    let fresh = |value: Value, step: usize| -> Vec<u64> {
        let n_units = graph.values[value].ty.bytes().div_ceil(ALIGN);
        (0..n_units)
            .map(|unit| mix(mix(value.index() as u64 ^ (step as u64) << 32) ^ unit))
            .collect()
    };
    // What each step should compute.
    let mut right: Vec<Table<Value, Vec<u64>>> = vec![];
    for step in 0..STEPS {
        let mut values: Table<Value, Vec<u64>> = Table::filled(graph.values.len(), vec![]);
        for &input in &graph.inputs {
            values[input] = fresh(input, step);
        }
        for state in graph.states.values() {
            values[state.before] = match step {
                0 => fresh(state.before, 0),
                _ => right[step - 1][state.after].clone(),
            };
        }
        for &node in &graph.order {
            let data = &graph.nodes[node];
            if data.op.is_alias() {
                values[data.outputs[0]] = values[data.inputs[0]].clone();
                continue;
            }
            let key = data
                .inputs
                .iter()
                .flat_map(|&v| &values[v])
                .fold(mix(node.index() as u64 + 1), |h, &u| mix(h ^ u));
            for (o, &output) in data.outputs.iter().enumerate() {
                let n_units = graph.values[output].ty.bytes().div_ceil(ALIGN);
                values[output] = (0..n_units)
                    .map(|unit| mix(key ^ (o as u64 + 1) << 32 ^ unit))
                    .collect();
            }
        }
        right.push(values);
    }
    let plan = program.plan.as_ref().unwrap();
    let mut memory: Vec<Vec<u64>> = plan
        .peak
        .values()
        .map(|&peak| vec![POISON; peak.div_ceil(ALIGN) as usize])
        .collect();
    type Units = (Pool, std::ops::Range<usize>);
    let read =
        |memory: &[Vec<u64>], (pool, range): &Units| memory[pool.index()][range.clone()].to_vec();
    let write = |memory: &mut [Vec<u64>], (pool, range): &Units, data: &[u64]| {
        memory[pool.index()][range.clone()].copy_from_slice(data);
    };
    for &(value, loc) in &schedule.entry {
        write(
            &mut memory,
            &value_units(program, value, loc),
            &right[0][value],
        );
    }
    let mut queues: Vec<Vec<usize>> = vec![vec![]; schedule.streams.len()];
    for t in 0..STEPS * n {
        queues[schedule.instrs[i(t % n)].stream.index()].push(t);
    }
    let mut next = vec![0; queues.len()];
    // The operands that each started line has read.
    let mut running: Vec<Option<Vec<u64>>> = vec![None; queues.len()];
    let mut done = vec![false; STEPS * n];
    // The number of steps that the host has started.
    let mut started = 1;
    let mut priority: Vec<u64> = queues.iter().map(|_| random.next()).collect();
    loop {
        while started < STEPS && (0..n).all(|line| !watched[line] || done[(started - 1) * n + line])
        {
            for output in &graph.outputs {
                let &(_, loc) = schedule
                    .exit
                    .iter()
                    .find(|&&(v, _)| v == output.value)
                    .unwrap();
                if read(&memory, &value_units(program, output.value, loc))
                    != right[started - 1][output.value]
                {
                    return Err(format!("output {} of step {}", output.name, started - 1));
                }
            }
            for &(value, loc) in &schedule.entry {
                if matches!(graph.values[value].def, Def::Input(_)) {
                    write(
                        &mut memory,
                        &value_units(program, value, loc),
                        &right[started][value],
                    );
                }
            }
            started += 1;
        }
        let ready = |q: usize| {
            let &t = queues[q].get(next[q])?;
            let free = |dep: &Dep| match (dep.previous, t / n) {
                (true, 0) => true,
                (true, step) => done[(step - 1) * n + dep.instr.index()],
                (false, step) => done[step * n + dep.instr.index()],
            };
            (t / n < started && schedule.instrs[i(t % n)].after.iter().all(free)).then_some(t)
        };
        let candidates: Vec<(usize, usize)> = (0..queues.len())
            .filter_map(|q| Some((q, ready(q)?)))
            .collect();
        if candidates.is_empty() {
            break;
        }
        // One stream runs far ahead of the others, until another does.
        if random.one_in(8) {
            let q = random.below(queues.len());
            priority[q] = random.next();
        }
        let &(q, t) = candidates
            .iter()
            .max_by_key(|&&(q, _)| priority[q])
            .unwrap();
        let (line, step) = (i(t % n), t / n);
        match &schedule.instrs[line].kind {
            InstrKind::Run {
                node, args, outs, ..
            } => {
                let data = &graph.nodes[*node];
                let outs: Vec<Units> = data
                    .outputs
                    .iter()
                    .zip(outs)
                    .map(|(&v, &loc)| value_units(program, v, loc))
                    .collect();
                for (&value, &loc) in data.inputs.iter().zip(args) {
                    let at = value_units(program, value, loc);
                    let spoiled = running[q].is_some() && outs.iter().any(|out| meet(out, &at));
                    if !spoiled && read(&memory, &at) != right[step][value] {
                        return Err(format!(
                            "{line:?} of step {step} reads %{}",
                            graph.values[value].name
                        ));
                    }
                }
                for (out, &value) in outs.iter().zip(&data.outputs) {
                    let result = &right[step][value];
                    match running[q].is_some() {
                        true => write(&mut memory, out, result),
                        false => write(&mut memory, out, &vec![POISON; result.len()]),
                    }
                }
                running[q] = if running[q].is_some() {
                    None
                } else {
                    Some(vec![])
                };
            }
            &InstrKind::Copy { src, dst, bytes } => {
                let src = units(
                    program,
                    &Access {
                        loc: src,
                        bytes,
                        write: false,
                    },
                );
                let dst = units(
                    program,
                    &Access {
                        loc: dst,
                        bytes,
                        write: true,
                    },
                );
                let now = read(&memory, &src);
                match running[q].take() {
                    None => {
                        write(&mut memory, &dst, &vec![POISON; now.len()]);
                        running[q] = Some(now);
                    }
                    Some(then) => {
                        let torn = then
                            .iter()
                            .zip(&now)
                            .map(|(a, b)| if a == b { *a } else { POISON });
                        write(&mut memory, &dst, &torn.collect::<Vec<u64>>());
                    }
                }
            }
        }
        if running[q].is_none() {
            done[t] = true;
            next[q] += 1;
        }
    }
    if !done.iter().all(|&d| d) {
        return Err("the streams stand still".to_string());
    }
    for &(value, loc) in &schedule.exit {
        if read(&memory, &value_units(program, value, loc)) != right[STEPS - 1][value] {
            return Err(format!("%{} at the end", graph.values[value].name));
        }
    }
    Ok(())
}

// --- mutants ---

/// The checker agrees with brute force, and an accepted program is right in many orders.
#[track_caller]
fn agree(program: &Program, what: &str) -> bool {
    let verdict = check(program);
    assert_eq!(verdict.is_ok(), legal(program), "{what}: {verdict:#?}");
    if verdict.is_ok() {
        for seed in 0..8 {
            if let Err(harm) = shuffled(program, seed) {
                panic!("{what} is accepted, but in order {seed} {harm} is wrong");
            }
        }
    }
    verdict.is_ok()
}

fn mutants(program: &Program, random: &mut Random) -> Vec<(String, Program)> {
    let mut mutants = vec![];
    let mut add = |what: String, change: &mut dyn FnMut(&mut Program)| {
        let mut mutant = program.clone();
        change(&mut mutant);
        mutants.push((what, mutant));
    };
    let n = program.schedule.instrs.len();
    for (line, data) in program.schedule.instrs.iter() {
        for k in 0..data.after.len() {
            add(format!("{line:?} without wait {k}"), &mut |p| {
                p.schedule.instrs[line].after.remove(k);
            });
        }
        let stream = Stream::new(random.below(3));
        add(format!("{line:?} on {stream:?}"), &mut |p| {
            p.schedule.instrs[line].stream = stream
        });
        if let InstrKind::Run { args, .. } = &data.kind {
            let other = Buffer::new(random.below(program.schedule.buffers.len()));
            let wide = program.schedule.buffers[other].bytes
                == program.schedule.buffers[args[0].buffer].bytes;
            if wide && args[0].offset == 0 {
                add(format!("{line:?} reading {other:?}"), &mut |p| {
                    self::args(p, line.index())[0] = other.into()
                });
            }
        }
    }
    for (buffer, data) in program.schedule.buffers.iter() {
        let peak = program.plan.as_ref().unwrap().peak[data.pool];
        for _ in 0..3 {
            let at = random.below((peak / ALIGN) as usize) as u64 * ALIGN;
            add(format!("{buffer:?} at {at}"), &mut |p| {
                p.plan.as_mut().unwrap().offset[buffer] = at
            });
        }
    }
    for a in 1..n {
        let b = a - 1;
        let swapped = |line: Instr| match line.index() {
            x if x == a => i(b),
            x if x == b => i(a),
            _ => line,
        };
        add(format!("i{b} and i{a} swapped"), &mut |p| {
            let lines: Vec<InstrData> = p
                .schedule
                .instrs
                .ids()
                .map(|line| program.schedule.instrs[swapped(line)].clone())
                .collect();
            p.schedule.instrs = lines.into_iter().collect();
            for line in p.schedule.instrs.ids() {
                for dep in &mut p.schedule.instrs[line].after {
                    dep.instr = swapped(dep.instr);
                }
            }
        });
    }
    mutants
}

#[test]
fn random_programs_are_proved() {
    for seed in 0..100 {
        let program = random_program(seed);
        assert!(
            agree(&program, &format!("program {seed}")),
            "program {seed}: {:#?}",
            check(&program)
        );
    }
}

#[test]
fn mutants_are_refused_or_harmless() {
    let (mut n_mutants, mut n_accepted) = (0, 0);
    for seed in 0..20 {
        let program = random_program(seed);
        let mut random = Random(seed);
        for (what, mutant) in mutants(&program, &mut random) {
            n_mutants += 1;
            n_accepted += usize::from(agree(&mutant, &format!("program {seed}, {what}")));
        }
    }
    // Some of each kind, otherwise the test is weak.
    assert!(
        n_mutants / 20 < n_accepted && n_accepted < n_mutants / 2,
        "{n_accepted} of {n_mutants} mutants accepted"
    );
}

/// Checks that [`shuffled`] finds errors: for most waits, some order is wrong without the wait.
/// (Not for all: a rerun may write the same value.)
#[test]
fn dropped_waits_do_harm() {
    let (mut n_dropped, mut n_harmful) = (0, 0);
    for seed in 0..10 {
        let program = random_program(seed);
        for (line, data) in program.schedule.instrs.iter() {
            for k in 0..data.after.len() {
                let mut mutant = program.clone();
                mutant.schedule.instrs[line].after.remove(k);
                if check(&mutant).is_err() {
                    n_dropped += 1;
                    n_harmful +=
                        usize::from((0..40).any(|order| shuffled(&mutant, order).is_err()));
                }
            }
        }
    }
    assert!(
        n_dropped * 3 / 4 < n_harmful,
        "{n_harmful} of {n_dropped} dropped waits do harm"
    );
}

/// Any number is replaced by any other: the checker must return. An overflow would panic in this
/// build.
#[test]
fn garbage_is_answered() {
    let mut n_refused = 0;
    for seed in 0..4000 {
        let mut random = Random(mix(seed));
        let mut program = random_program(seed % 16);
        for _ in 0..1 + random.below(3) {
            corrupt(&mut program, &mut random);
        }
        n_refused += usize::from(check(&program).is_err());
    }
    assert!(3000 < n_refused, "{n_refused} refused");
}

fn corrupt(program: &mut Program, random: &mut Random) {
    let Program {
        graph,
        schedule,
        plan,
    } = program;
    let plan = plan.as_mut().unwrap();
    let number = match random.below(4) {
        0 => random.pick(&[u64::MAX, u64::MAX - 63, 1 << 63, 1 << 32, 0, 1]),
        1 => random.next(),
        _ => random.below(16) as u64 * ALIGN,
    };
    // An id that may just be out of range.
    let id = random.below(graph.values.len().max(schedule.instrs.len()) + 2);
    let (value, node) = (Value::new(id), Node::new(id));
    let a_value = Value::new(random.below(graph.values.len()));
    let a_node = Node::new(random.below(graph.nodes.len()));
    let a_line = i(random.below(schedule.instrs.len()));
    let a_buffer = Buffer::new(random.below(schedule.buffers.len()));
    let loc = Loc {
        buffer: if random.one_in(2) {
            a_buffer
        } else {
            Buffer::new(id)
        },
        offset: number,
    };
    let k = random.below(2);
    let set = |list: &mut Vec<Value>| {
        if let Some(last) = list.last_mut() {
            *last = value
        }
    };
    match random.below(22) {
        0 => set(&mut graph.inputs),
        1 => graph.states[State::new(k)].before = value,
        2 => graph.states[State::new(k)].after = value,
        3 => graph.outputs[k].value = value,
        4 => graph.order.push(node),
        5 => graph.order.swap(0, id % 3),
        6 => set(&mut graph.nodes[a_node].inputs),
        7 => set(&mut graph.nodes[a_node].outputs),
        8 => drop(graph.nodes[a_node].inputs.pop()),
        9 => {
            graph.values[a_value].def = random.pick(&[
                Def::Node(node, k),
                Def::Input(id),
                Def::State(State::new(id)),
            ])
        }
        10 => graph.values[a_value].ty = parse_type("i64[3,1]").unwrap(),
        11 if a_buffer.index() < plan.offset.len() => plan.offset[a_buffer] = number,
        12 => plan.peak[Pool::new(k)] = number,
        13 => schedule.buffers[a_buffer].bytes = number,
        14 => schedule.buffers[a_buffer].pool = Pool::new(id % 4),
        15 => schedule.instrs[a_line].stream = Stream::new(id % 5),
        16 => schedule.instrs[a_line].after.push(Dep {
            instr: i(id),
            previous: k == 0,
        }),
        17 => schedule.entry[k] = (random.pick(&[value, a_value]), loc),
        18 => schedule.exit[k] = (random.pick(&[value, a_value]), loc),
        19 => plan.offset = Table::filled(id, number),
        20 => schedule.pools[Pool::new(k)].limit = Some(number),
        _ => match &mut schedule.instrs[a_line].kind {
            InstrKind::Copy { src, dst, bytes } => match random.below(3) {
                0 => *src = loc,
                1 => *dst = loc,
                _ => *bytes = number,
            },
            InstrKind::Run {
                node: ran,
                args,
                outs,
                scratch,
                part,
            } => match random.below(6) {
                0 => *ran = node,
                1 => args.insert(0, loc),
                2 => args[0] = loc,
                3 => outs[0] = loc,
                4 => {
                    *part = Some(Part {
                        start: number,
                        end: id as u64,
                    });
                }
                _ => *scratch = Some(loc),
            },
        },
    }
}

// --- size ---

/// A chain of `n` swapped activations with in-place updates: `3 n + 1` nodes, `5 n + 1` lines.
fn tower(n: usize) -> Program {
    const WINDOW: usize = 8;
    let mut draft = Draft::new();
    let x = draft.input("x", "f32[16]");
    let bx = draft.buffer("x", DEVICE, 0, 64);
    draft.schedule.entry.push((x, bx));
    // Forward: h[k] = relu h[k-1], swapped out; one of WINDOW places on the device.
    let place = |draft: &mut Draft, name: String, k: usize| {
        draft.buffer(&name, DEVICE, 64 + 64 * (k % WINDOW) as u64, 64)
    };
    let (mut value, mut from) = (x, bx);
    let (mut values, mut hosts, mut outs) = (vec![], vec![], vec![]);
    for k in 0..n {
        value = draft.node(op("relu"), &[value], &format!("h{k}"));
        let to = place(&mut draft, format!("h{k}"), k);
        let host = draft.buffer(&format!("h{k}.host"), HOST, 64 * k as u64, 64);
        let after: Vec<Instr> = if WINDOW <= k {
            vec![outs[k - WINDOW]]
        } else {
            vec![]
        };
        let run = draft.run(value, &[from], &[to], &after);
        let out = draft.copy(D2H, to, host, 64, &[run]);
        values.push(value);
        hosts.push(host);
        outs.push(out);
        from = to;
    }
    // Backward: g = g * h[k], in place, h[k] brought back; w[k] = w[k] - g, in place.
    let mut g = draft.node(op("neg"), &[value], "g");
    let bg = draft.buffer("g", DEVICE, 64 + 64 * WINDOW as u64, 64);
    let start = draft.run(g, &[from], &[bg], &outs[n.saturating_sub(WINDOW)..]);
    let mut ends = vec![start];
    for k in (0..n).rev() {
        let back = place(&mut draft, format!("h{k}.back"), k);
        let after = if ends.len() <= WINDOW {
            start
        } else {
            ends[ends.len() - WINDOW]
        };
        let copy = draft.copy(H2D, hosts[k], back, 64, &[after]);
        g = draft.node(op("mul"), &[g, values[k]], &format!("g{k}"));
        ends.push(draft.run(g, &[bg, back], &[bg], &[copy]));
        let w = draft.state(&format!("w{k}"), "f32[16]");
        let home = draft.buffer(&format!("w{k}"), DEVICE, 1024 + 64 * k as u64, 64);
        let w2 = draft.node(op("sub"), &[w, g], &format!("w{k}.2"));
        draft.graph.states[State::new(n - 1 - k)].after = w2;
        draft.run(w2, &[home, bg], &[home], &[]);
        draft.schedule.entry.push((w, home));
        draft.schedule.exit.push((w2, home));
    }
    draft.output(g);
    draft.schedule.exit.push((g, bg));
    draft.end()
}

#[test]
fn large_programs_are_proved() {
    let program = tower(6000);
    let start = std::time::Instant::now();
    let proof = proof(&program);
    let seconds = start.elapsed().as_secs_f64();
    assert_eq!((program.graph.order.len(), proof.lines), (18_001, 30_001));
    // Seconds, not minutes, in any build on any machine. A quadratic pass would take minutes.
    assert!(seconds < 20.0, "{seconds} s");
    if std::env::var_os("LIGHTERAGE_TIMES").is_some() {
        let mut out = std::io::stderr();
        std::io::Write::write_fmt(
            &mut out,
            format_args!("checked {} lines in {seconds:.3} s\n", proof.lines),
        )
        .unwrap();
    }
}

// --- parts ---

/// An update in two parts, through buffers for half of the parameter.
const PARTS: &str = "graph g {
  input  %g : f32[64]
  input  %hyper : f64[3]
  state  param %w -> %w' : f32[64] \"w\"
  opt - %w' = sgd %w, %g, %hyper : f32[64]
  output o = %g
}
schedule g on test {
  pool device peak 576
  pool host peak 576
  stream compute
  stream h2d
  stream d2h
  entry %w = w.host@host+0:256
  entry %g = g.host@host+256:256
  entry %hyper = h.host@host+512:64
  i0 h2d feed g.host -> g@device+0:256 after ^i6
  i1 h2d feed h.host -> h@device+256:64 bytes=24
  i2 h2d gather w.host -> a@device+320:128 after ^i4
  i3 compute run w' a, g, h -> a part start=0 end=32 after i2
  i4 d2h offload a -> w.host bytes=128 after i3
  i5 h2d gather w.host+128 -> b@device+448:128 after ^i7
  i6 compute update:run w' b, g+128, h -> b part start=32 end=64 after i5
  i7 d2h offload b -> w.host+128 bytes=128 after i6
  exit %w' = w.host
  exit %g = g.host
}
";

#[test]
fn a_node_may_run_in_parts() {
    let program = crate::text::parse_program(PARTS).unwrap();
    assert_eq!(check(&program).map(|proof| proof.lines), Ok(8));
    assert_eq!(
        crate::text::print_program(&program)
            .matches(" part ")
            .count(),
        2
    );
    for (good, bad, says) in [
        // A part that was computed already, at the place of another.
        (
            "start=32 end=64",
            "start=0 end=32",
            "%w from its byte 128 on",
        ),
        // A part at the place of another.
        (
            "-> w.host+128 bytes=128 after i6",
            "-> w.host bytes=128 after i6",
            "leave %w'",
        ),
        // Half of a part.
        ("start=32 end=64", "start=32 end=48", "leave %w'"),
        ("start=32 end=64", "start=32 end=65", "32..65 is no part"),
        ("start=32 end=64", "start=32 end=32", "32..32 is no part"),
        // Another half of the gradient.
        ("w' b, g+128, h", "w' b, g, h", "reads g for %g"),
        // The copy does not wait for the part.
        (
            "bytes=128 after i6",
            "bytes=128 after i5",
            "no wait orders them",
        ),
        ("sgd %w, %g, %hyper", "add %w, %g", "cannot run in parts"),
    ] {
        let text = PARTS.replacen(good, bad, 1);
        let text = match good.starts_with("sgd") {
            true => text.replace(", h ->", " ->"),
            false => text,
        };
        let findings = match crate::text::parse_program(&text) {
            Ok(program) => format!("{:?}", check(&program).unwrap_err()),
            Err(error) => error.to_string(),
        };
        assert!(findings.contains(says), "{bad}: {findings}");
    }
}

/// A parameter that comes from the disk by a buffer of the host.
const STAGED: &str = r#"graph g {
  state  param  %w : f32[16] "w"
  fwd -          %y = relu %w : f32[16]
  output y = %y
}
schedule g on test {
  pool device peak 128
  pool host peak 128
  pool disk peak 64
  stream compute
  stream h2d
  stream d2h
  stream disk2h
  entry %w = w.disk@disk+0:64
  i0   disk2h  load    w.disk -> w.staged@host+0:64 after ^i1
  i1   h2d     gather  w.staged -> w@device+0:64 after i0 ^i2
  i2   compute run     y w -> y@device+64:64 after i1 ^i3
  i3   d2h     fetch   y -> y.host@host+64:64 after i2
  exit %w = w.disk
  exit %y = y.host
}
"#;

#[test]
fn a_staged_buffer_is_read_after_its_load() {
    let found = |text: &str| findings(&crate::text::parse_program(text).unwrap());
    let program = crate::text::parse_program(STAGED).unwrap();
    assert_eq!(crate::text::print_program(&program), STAGED);
    assert_eq!(found(STAGED), [""; 0]);
    let unordered = found(&STAGED.replace("after i0 ^i2", "after ^i2"));
    assert!(unordered[0].contains("i0"), "{unordered:?}");
    // The text's names of lines are their positions.
    let early = STAGED
        .replace(
            "  i0   disk2h  load    w.disk -> w.staged@host+0:64 after ^i1\n",
            "",
        )
        .replace(
            "i1   h2d     gather  w.staged -> w",
            "i0   h2d     gather  w.staged@host+0:64 -> w",
        )
        .replace(
            "after i0 ^i2\n",
            "after ^i2\n  i1   disk2h  load    w.disk -> w.staged after i0\n",
        )
        .replace("after i1 ^i3", "after i0 ^i3");
    let early = found(&early);
    assert!(
        early[0].contains("should hold %w") || early[0].contains("w.staged"),
        "{early:?}"
    );
}
