//! The text form: what is printed parses back to an equal value, and no text makes the parser
//! panic.

use lighterage_ir::graph::{Def, Graph, Output, Phase, StateKind};
use lighterage_ir::op::body::Step;
use lighterage_ir::op::{Access, Kind, OpKind, attributes};
use lighterage_ir::schedule::{
    Buffer, BufferData, Dep, Instr, InstrData, InstrKind, Loc, MemorySpace, Pool, PoolData,
    Schedule, Stream, StreamData, Why,
};
use lighterage_ir::text::{self, File};
use lighterage_ir::{
    Attr, Body, DType, Id, Node, Op, Place, Plan, Program, State, Table, TensorType, Value, verify,
};
use proptest::prelude::*;
use proptest::sample::Index;

/// A program with a line of each kind; it is the example of `docs/ir.md`.
const EXAMPLE: &str = include_str!("example.ir");

#[test]
fn the_example_is_canonical() {
    let program = text::parse_program(EXAMPLE).unwrap();
    assert_eq!(text::print_program(&program), EXAMPLE);
    assert_eq!(verify::program(&program), []);
    assert_eq!(program.compact(), program);
}

#[test]
fn a_pool_says_its_space_unless_its_name_does() {
    let spaces = |device: &str| {
        let text = EXAMPLE.replacen("pool device ", device, 1);
        let program = text::parse_program(&text).unwrap();
        assert_eq!(text::print_program(&program), text);
        let spaces = program
            .schedule
            .pools
            .values()
            .map(|pool| pool.space.name());
        spaces.collect::<Vec<_>>()
    };
    assert_eq!(spaces("pool device "), ["device", "host"]);
    assert_eq!(spaces("pool device in device3 "), ["device3", "host"]);
    assert_eq!(spaces("pool device in host "), ["host", "host"]);
}

#[test]
fn a_file_is_a_graph_or_a_program() {
    let program = text::parse_program(EXAMPLE).unwrap();
    let graph = program.graph.to_string();
    assert_eq!(
        text::parse_file(&graph).unwrap(),
        File::Graph(program.graph.clone())
    );
    assert_eq!(text::parse_graph(&graph).unwrap(), program.graph);
    assert_eq!(text::parse_file(EXAMPLE).unwrap(), File::Program(program));
    assert!(text::parse_graph(EXAMPLE).is_err());
    assert!(text::parse_program(&graph).is_err());
}

#[test]
fn comments_stand_behind_lines() {
    let program = text::parse_program(EXAMPLE).unwrap();
    let with =
        text::print_program_with(&program, &|i| Some(format!("line {}\nof many", i.index())));
    assert!(
        with.lines().any(|line| line.ends_with(" ; line 3 of many")),
        "{with}"
    );
    assert_eq!(text::parse_program(&with).unwrap(), program);
}

#[test]
fn findings_stand_under_their_lines() {
    let program = text::parse_program(EXAMPLE).unwrap();
    let finding = |place, message: &str| lighterage_ir::Finding::new(place, message);
    let findings = [
        finding(Place::Instr(Instr::new(3)), "two\nlines"),
        finding(Place::Node(Node::new(1)), "node"),
        finding(Place::Value(program.graph.inputs[0]), "value"),
        finding(Place::Buffer(Buffer::new(0)), "buffer"),
        finding(Place::Instr(Instr::new(99)), "nowhere"),
        finding(Place::Output(0), "output"),
    ];
    let with = text::print_program_with_findings(&program, &findings);
    let pairs: Vec<(&str, &str)> = with.lines().zip(with.lines().skip(1)).collect();
    let under = |line: &str, message: &str| {
        let found = pairs
            .iter()
            .any(|(a, b)| a.trim().starts_with(line) && b.trim() == format!("; error: {message}"));
        assert!(found, "{message} should stand under {line}:\n{with}");
    };
    under("i3 ", "two lines");
    under("fwd act1", "node");
    under("input  %x", "value");
    under("entry %x = x@", "buffer");
    under("schedule", "i99: nowhere");
    under("output loss", "output");
    assert_eq!(text::parse_program(&with).unwrap(), program);
}

#[test]
fn one_line_prints_alone() {
    let program = text::parse_program(EXAMPLE).unwrap();
    let line = text::print_instr(&program.graph, &program.schedule, Instr::new(0));
    assert_eq!(line, "i0   compute run     h x, w -> h");
    let op = &program.graph.nodes[Node::new(0)].op;
    assert_eq!(text::print_op(op), "matmul ta=false tb=false");
}

#[test]
fn floats_keep_their_bits() {
    let bits = [
        0u64,
        1,
        1 << 63,
        f64::NAN.to_bits(),
        (-f64::NAN).to_bits(),
        f64::NAN.to_bits() | 1,
    ];
    let numbers = [
        1.0,
        1e-5,
        0.1,
        f64::MAX,
        f64::MIN_POSITIVE,
        1e300,
        123456789.0,
        f64::INFINITY,
        f64::NEG_INFINITY,
    ];
    for x in bits
        .map(f64::from_bits)
        .into_iter()
        .chain(numbers)
        .chain(numbers.map(|x| -x))
    {
        let mut graph = Graph::new("floats");
        let attrs = [
            ("dtype", Attr::Type(DType::F64)),
            ("shape", Attr::Ints(vec![])),
            ("value", Attr::Float(x)),
        ];
        graph
            .add_node(
                Op::new("full", attrs).unwrap(),
                &[],
                &["y".into()],
                Phase::Forward,
                "",
            )
            .unwrap();
        let text = graph.to_string();
        // Op's equality is that of bits.
        assert_eq!(text::parse_graph(&text).unwrap(), graph, "{text}");
    }
}

#[test]
fn errors_say_where_and_what() {
    let at = |from: &str, to: &str| {
        let text = EXAMPLE.replacen(from, to, 1);
        assert_ne!(text, EXAMPLE, "{from}");
        text::parse_program(&text).unwrap_err().to_string()
    };
    let cases = [
        (
            "graph mlp",
            "grap mlp",
            "line 1, column 1: expected `graph`, found grap",
        ),
        (
            "mlp {",
            "mlp",
            "line 1, column 10: expected `{`, found the end of the line",
        ),
        (
            "f32[64,64]",
            "f33[64,64]",
            "line 2, column 15: expected a type like f32[4,64], found f33",
        ),
        (
            "f32[64,64]",
            "f32[64,-1]",
            "line 2, column 22: expected a size, found -1",
        ),
        (
            "f32[64,64]",
            "f32[64,64",
            "line 2, column 24: expected `,` or `]`, found the end of the line",
        ),
        (
            "input  %x",
            "input  x",
            "line 2, column 10: expected a value like %x, found x",
        ),
        (
            "input  %hyper",
            "input  %x",
            "line 3, column 11: %x is defined already",
        ),
        (
            "param  %w",
            "weight %w",
            "line 4, column 10: expected a state's kind: param, buffer, const, moment or rng, \
             found weight",
        ),
        ("-> %w'", "-> %ww", "line 4, column 24: no line defines %ww"),
        (
            "matmul %x",
            "matmol %x",
            "line 5, column 23: there is no op matmol",
        ),
        (
            " ta=false",
            "",
            "line 5, column 23: matmul needs the attribute ta",
        ),
        (
            "tb=false",
            "ta=false",
            "line 5, column 46: the attribute ta stands twice",
        ),
        (
            "%x, %w ta",
            "%x, %v ta",
            "line 5, column 35: no line defines %v",
        ),
        (
            "input  %x : f32[64,64]",
            "input  %x : f32[64,32]",
            "line 5, column 23: matmul of f32[64,32], f32[64,64]: inner or batch dimensions differ",
        ),
        (
            "gradient \"fc1.weight\"",
            "gradient \"fc2.weight\"",
            "line 13, column 12: there is no state \"fc2.weight\"",
        ),
        (
            "pool device limit 80K",
            "pool device limit 80k",
            "line 16, column 21: expected a number of bytes below 2^64, like 4K, found 80k",
        ),
        (
            "peak 65664",
            "peak 64K",
            "line 16, column 30: the buffers of this pool end at 65664, not at 65536",
        ),
        (
            "pool host",
            "pool host in device01",
            "line 17, column 16: device01 is no space: expected device, device1, …, host or disk",
        ),
        (
            "pool host",
            "pool device",
            "line 17, column 8: this pool is declared already",
        ),
        (
            "w@device+16K:16K",
            "w",
            "line 23, column 14: no line above says where w lies: expected w@pool:size",
        ),
        (
            "w@device+16K:16K",
            "w@device:16K",
            "line 23, column 14: this buffer has no offset: expected name@pool+offset:size",
        ),
        (
            "w@device+16K:16K",
            "w@devise+16K:16K",
            "line 23, column 16: there is no pool devise",
        ),
        (
            "i1   compute",
            "i2   compute",
            "line 25, column 3: expected the line i1, found i2",
        ),
        (
            "i1   compute",
            "i1   compote",
            "line 25, column 8: there is no stream compote",
        ),
        (
            "swapout",
            "swapaut",
            "line 26, column 16: expected one of run, rerun, swapout, swapin, gather, offload, \
             update, feed, fetch, load, store, found swapaut",
        ),
        (
            "run     a h",
            "run     b h",
            "line 25, column 24: no node has the first result %b",
        ),
        (
            "after i1",
            "after 1",
            "line 26, column 53: expected a line like i3 or ^i3, found 1",
        ),
        (
            "  exit",
            "  entry",
            "line 33, column 3: expected the order pool, stream, entry, lines i0 i1 .., exit, \
             buffer",
        ),
    ];
    let mut wrong = vec![];
    for (from, to, error) in cases {
        if at(from, to) != error {
            wrong.push((from, at(from, to)));
        }
    }
    assert_eq!(wrong, []);
    let quotes = |text: &str| text::parse_graph(text).unwrap_err().to_string();
    assert_eq!(
        quotes("graph \"mlp {\n}"),
        "line 1, column 7: this quote is not closed on its line"
    );
    assert_eq!(
        quotes("graph \"\\x\" {\n}"),
        "line 1, column 8: an escape should be \\\" \\\\ \\n \\r \\t or \\u{hex}"
    );
    assert_eq!(
        quotes("graph é {\n}"),
        "line 1, column 7: the character 'é' should stand in quotes"
    );
    assert_eq!(
        quotes("; only a comment"),
        "line 1, column 17: expected `graph`, found the end of the text"
    );
}

#[test]
fn types_are_checked_against_the_shape_rule() {
    let text = EXAMPLE.replacen(
        "dims=[0,1] keepdim=false : f32[]",
        "dims=[0,1] keepdim=false : f32[1]",
        1,
    );
    let error = text::parse_program(&text).unwrap_err().to_string();
    assert!(
        error.ends_with("expected f32[], the type that follows from the operands, found f32[1]"),
        "{error}"
    );
}

#[test]
fn long_lines_and_deep_brackets_end() {
    for text in [
        "[".repeat(1 << 20),
        "graph g {\n".repeat(1 << 16),
        "%".repeat(1 << 20),
        "\"\\u{".repeat(1 << 18),
    ] {
        assert!(text::parse_file(&text).is_err());
        assert!(text::parse_file(&format!("graph g {{\n input %x : f32[{text}]\n}}")).is_err());
    }
}

// --- generators ---

/// A source of choices that proptest shrinks: numbers, each used once, then zeros.
struct Choices<'a> {
    numbers: std::slice::Iter<'a, u32>,
    names: &'a [String],
    n_names: usize,
}

impl Choices<'_> {
    fn below(&mut self, n: usize) -> usize {
        self.numbers.next().map_or(0, |&x| x as usize % n.max(1))
    }
    fn coin(&mut self) -> bool {
        self.below(2) == 1
    }
    /// A new name: one of the given strings, made unique.
    fn name(&mut self) -> String {
        self.n_names += 1;
        let base = if self.names.is_empty() {
            0
        } else {
            self.below(self.names.len())
        };
        let base = self.names.get(base).map_or("", String::as_str);
        // What follows the last dot keeps names apart; some are quoted and some are not.
        format!("{base}.{}", self.n_names)
    }
    fn word(&mut self) -> String {
        let i = self.below(self.names.len());
        self.names.get(i).cloned().unwrap_or_default()
    }
    fn float(&mut self) -> f64 {
        let special = [
            0.0,
            -0.0,
            1.0,
            1e-5,
            f64::NAN,
            f64::INFINITY,
            f64::NEG_INFINITY,
        ];
        match self.below(special.len() + 1) {
            i if i < special.len() => special[i],
            _ => f64::from_bits((self.below(1 << 31) as u64) << 32 | self.below(1 << 31) as u64),
        }
    }
    fn bytes(&mut self) -> u64 {
        (self.below(1 << 12) as u64) << self.below(35)
    }
}

fn tensor(dtype: DType, shape: &[u64]) -> TensorType {
    TensorType::new(dtype, shape).unwrap()
}

/// A random typed graph; its ids are not canonical, and some of its nodes are not part of the step.
fn graph(choices: &mut Choices<'_>) -> Graph {
    let mut graph = Graph::new(choices.word());
    let types = [
        tensor(DType::F32, &[2, 3]),
        tensor(DType::F32, &[3, 2]),
        tensor(DType::F32, &[]),
        tensor(DType::I64, &[2]),
        tensor(DType::BF16, &[3, 3]),
    ];
    for _ in 0..3 + choices.below(30) {
        let ty = types[choices.below(types.len())].clone();
        let n_values = graph.values.len();
        let operand = |choices: &mut Choices<'_>| Value::new(choices.below(n_values));
        let (op, operands): (Op, Vec<Value>) = match choices.below(12) {
            0 => {
                graph.add_input(choices.name(), ty);
                continue;
            }
            1 => {
                let kind = StateKind::ALL[choices.below(StateKind::ALL.len())];
                let (name, path) = (choices.name(), choices.name());
                graph.add_state(name, path, kind, ty);
                continue;
            }
            2 => (Op::new("relu", []).unwrap(), vec![operand(choices)]),
            3 => (
                Op::new("add", []).unwrap(),
                vec![operand(choices), operand(choices)],
            ),
            4 => {
                let attrs = [
                    ("ta", Attr::Bool(choices.coin())),
                    ("tb", Attr::Bool(choices.coin())),
                ];
                (
                    Op::new("matmul", attrs).unwrap(),
                    vec![operand(choices), operand(choices)],
                )
            }
            5 => {
                let attrs = [
                    ("dims", Attr::Ints(vec![0])),
                    ("keepdim", Attr::Bool(choices.coin())),
                ];
                (Op::new("sum", attrs).unwrap(), vec![operand(choices)])
            }
            6 => {
                let attrs = [
                    ("dim", Attr::Int(0)),
                    ("k", Attr::Int(1)),
                    ("largest", Attr::Bool(true)),
                ];
                (Op::new("topk", attrs).unwrap(), vec![operand(choices)])
            }
            7 => {
                let value = if choices.coin() {
                    Attr::Float(choices.float())
                } else {
                    Attr::Int(choices.below(9) as i64 - 4)
                };
                (
                    Op::new("mul_scalar", [("value", value)]).unwrap(),
                    vec![operand(choices)],
                )
            }
            8 => {
                let shape = ty.shape().iter().map(|&d| d as i64).collect();
                (
                    Op::new("reshape", [("shape", Attr::Ints(shape))]).unwrap(),
                    vec![operand(choices)],
                )
            }
            9 => {
                let attrs = [
                    ("dtype", Attr::Type(DType::ALL[choices.below(12)])),
                    ("shape", Attr::Ints(vec![2, 3])),
                    ("value", Attr::Float(choices.float())),
                ];
                (Op::new("full", attrs).unwrap(), vec![])
            }
            _ => {
                let attrs = [
                    ("name", Attr::Str(choices.word())),
                    ("node", Attr::Str(choices.word())),
                    ("pure", Attr::Bool(choices.below(2) == 0)),
                    ("types", Attr::Str("f32[2,3] i64[]".into())),
                ];
                let n = if n_values == 0 { 0 } else { choices.below(4) };
                (
                    Op::new("extern", attrs).unwrap(),
                    (0..n).map(|_| operand(choices)).collect(),
                )
            }
        };
        if operands.iter().any(|v| v.index() >= n_values) {
            continue;
        }
        let types: Vec<&TensorType> = operands.iter().map(|&v| &graph.values[v].ty).collect();
        let Ok(results) = op.infer(&types) else {
            continue;
        };
        let names: Vec<String> = results.iter().map(|_| choices.name()).collect();
        let phase = Phase::ALL[choices.below(3)];
        let module = if choices.coin() {
            choices.word()
        } else {
            String::new()
        };
        graph
            .add_node(op, &operands, &names, phase, module)
            .unwrap();
    }
    drop_unused(&mut graph, choices);
    let live: Vec<Value> = live(&graph);
    for state in graph.states.ids() {
        let before = graph.states[state].before;
        let same: Vec<Value> = live
            .iter()
            .copied()
            .filter(|&v| graph.values[v].ty == graph.values[before].ty)
            .collect();
        if choices.coin() {
            graph.states[state].after = same[choices.below(same.len())];
        }
        if choices.coin() {
            graph
                .gradients
                .push((state, same[choices.below(same.len())]));
        }
    }
    if !live.is_empty() {
        for _ in 0..choices.below(3) {
            let (name, value) = (choices.name(), live[choices.below(live.len())]);
            graph.outputs.push(Output { name, value });
        }
    }
    graph
}

/// Leaves some nodes out of the order whose results no node reads.
fn drop_unused(graph: &mut Graph, choices: &mut Choices<'_>) {
    for node in graph.order.clone().into_iter().rev() {
        let outputs = &graph.nodes[node].outputs;
        let is_read = graph
            .order
            .iter()
            .any(|&n| graph.nodes[n].inputs.iter().any(|v| outputs.contains(v)));
        if !is_read && choices.below(4) == 3 {
            graph.order.retain(|&n| n != node);
        }
    }
}

fn live(graph: &Graph) -> Vec<Value> {
    let is_live = |v: &Value| match graph.values[*v].def {
        Def::Node(node, _) => graph.order.contains(&node),
        _ => true,
    };
    graph.values.ids().filter(is_live).collect()
}

/// A random schedule over a graph: it prints, though it computes nothing sensible.
fn program(choices: &mut Choices<'_>) -> Program {
    let graph = graph(choices);
    let live = live(&graph);
    let mut schedule = Schedule {
        name: choices.word(),
        device: choices.word(),
        sm: choices.coin().then_some(90),
        ..Schedule::default()
    };
    for _ in 0..1 + choices.below(3) {
        let limit = choices.coin().then(|| choices.bytes());
        let spaces = [
            MemorySpace::Device(0),
            MemorySpace::Device(7),
            MemorySpace::Host,
        ];
        schedule.pools.push(PoolData {
            name: choices.name(),
            space: spaces[choices.below(3)],
            limit,
        });
        schedule.streams.push(StreamData {
            name: choices.name(),
        });
    }
    for _ in 0..choices.below(8) {
        let pool = Pool::new(choices.below(schedule.pools.len()));
        schedule.buffers.push(BufferData {
            name: choices.name(),
            pool,
            bytes: choices.bytes(),
        });
    }
    let n_buffers = schedule.buffers.len();
    let loc = |choices: &mut Choices<'_>| {
        let offset = if choices.coin() { choices.bytes() } else { 0 };
        Loc {
            buffer: Buffer::new(choices.below(n_buffers)),
            offset,
        }
    };
    if 0 < n_buffers && !live.is_empty() {
        for _ in 0..choices.below(4) {
            schedule
                .entry
                .push((live[choices.below(live.len())], loc(choices)));
            schedule
                .exit
                .push((live[choices.below(live.len())], loc(choices)));
        }
        for _ in 0..choices.below(12) {
            let kind = if choices.coin() && !graph.order.is_empty() {
                InstrKind::Run {
                    node: graph.order[choices.below(graph.order.len())],
                    args: (0..choices.below(3)).map(|_| loc(choices)).collect(),
                    outs: (0..choices.below(3)).map(|_| loc(choices)).collect(),
                    scratch: choices.coin().then(|| loc(choices)),
                    part: None,
                }
            } else {
                let (src, dst) = (loc(choices), loc(choices));
                let bytes = if choices.coin() {
                    choices.bytes()
                } else {
                    schedule.buffers[dst.buffer].bytes
                };
                InstrKind::Copy { src, dst, bytes }
            };
            let dep = |choices: &mut Choices<'_>| Dep {
                instr: Instr::new(choices.below(16)),
                previous: choices.coin(),
            };
            let after = (0..choices.below(4)).map(|_| dep(choices)).collect();
            let stream = Stream::new(choices.below(schedule.streams.len()));
            schedule.instrs.push(InstrData {
                kind,
                stream,
                after,
                why: Why::ALL[choices.below(9)],
            });
        }
    }
    let plan = choices.coin().then(|| {
        let offset: Table<Buffer, u64> = schedule.buffers.ids().map(|_| choices.bytes()).collect();
        Plan::new(&schedule, offset)
    });
    Program {
        graph,
        schedule,
        plan,
    }
}

prop_compose! {
    fn any_program()(
        numbers in prop::collection::vec(any::<u32>(), 100..400),
        names in prop::collection::vec(
            prop_oneof![
                "[a-z.]{1,4}",
                "\\PC{0,4}",
                any::<String>(),
                Just("after".to_string()),
                Just("-".to_string()),
            ],
            0..6,
        ),
    ) -> Program {
        program(&mut Choices { numbers: numbers.iter(), names: &names, n_names: 0 })
    }
}

/// Words of the grammar, to get past the first token.
fn any_words() -> impl Strategy<Value = String> {
    let words = [
        "graph g {\n",
        "schedule s on d {\n",
        "}",
        "\n",
        "input",
        "state param",
        "%x",
        "%y",
        ":",
        "f32[2]",
        "->",
        "\"p\"",
        "fwd -",
        "=",
        "relu",
        "output",
        "gradient",
        "pool p",
        "stream c",
        "limit 4K",
        "peak",
        "entry",
        "exit",
        "buffer",
        "i0 c",
        "run",
        "swapin",
        "b@p:64",
        "b@p+0:64",
        "b",
        "after",
        "^i1",
        ",",
        "scratch",
        "bytes=",
        "+4K",
        "; comment",
        "\\",
        "é",
    ];
    prop::collection::vec(prop::sample::select(words.to_vec()), 0..60)
        .prop_map(|words| words.join(" "))
}

fn no_panic(text: &str) {
    if let Ok(file) = text::parse_file(text) {
        match file {
            File::Graph(graph) => {
                assert_eq!(
                    text::parse_graph(&text::print_graph(&graph)).unwrap(),
                    graph
                );
                let _ = text::print_graph_with_findings(&graph, &verify::graph(&graph));
            }
            File::Program(program) => {
                assert_eq!(
                    text::parse_program(&text::print_program(&program)).unwrap(),
                    program
                );
                let _ = text::print_program_with_findings(&program, &verify::program(&program));
            }
        }
    }
}

/// An integer of an attribute: mostly small, some at the ends.
fn integer(choices: &mut Choices<'_>) -> i64 {
    let ends = [i64::MIN, i64::MAX, 1 << 32, (1 << 32) - 1, 1 << 50, -1];
    let i = choices.below(24);
    ends.get(i)
        .copied()
        .unwrap_or_else(|| choices.below(5) as i64)
}

/// Any op, with any attributes, and operands of any types.
/// Ops over whatever came before.
fn any_body(choices: &mut Choices<'_>, operands: usize) -> Body {
    let kinds = OpKind::ALL.iter().copied();
    let kinds: Vec<OpKind> = kinds
        .filter(|kind| kind.facts().access != Access::Whole)
        .collect();
    let full = [
        ("dtype", Attr::Type(DType::F32)),
        ("shape", Attr::Ints(vec![2, 3])),
        ("value", Attr::Float(0.5)),
    ];
    let mut steps: Vec<Step> = vec![];
    let mut values = operands;
    for _ in 0..1 + choices.below(4) {
        let kind = kinds[choices.below(kinds.len())];
        let attrs = attributes(kind);
        if values == 0
            || !attrs
                .iter()
                .all(|&(key, _)| key == "value" || key == "tanh")
        {
            continue;
        }
        let attr = |&(key, kind): &(&'static str, Kind)| match kind {
            Kind::Bool => (key, Attr::Bool(choices.coin())),
            _ => (key, Attr::Float(choices.float())),
        };
        let op = Op::new(kind.name(), attrs.iter().map(attr).collect::<Vec<_>>()).unwrap();
        let inputs = (0..kind.facts().inputs.0)
            .map(|_| choices.below(values))
            .collect();
        let outputs = 1 + choices.below(2);
        steps.push(Step {
            op,
            inputs,
            outputs,
        });
        values += outputs;
    }
    if steps.is_empty() {
        steps.push(Step {
            op: Op::new("full", full).unwrap(),
            inputs: vec![],
            outputs: 1,
        });
        values += 1;
    }
    Body::new(operands, steps, vec![values - 1]).unwrap()
}

fn any_call(choices: &mut Choices<'_>) -> (Op, Vec<TensorType>) {
    let op = OpKind::ALL[choices.below(OpKind::ALL.len())];
    let (least, most) = op.facts().inputs;
    let n_operands = (least + choices.below(4)).min(most);
    // Few ranks, element types and sizes: else nothing fits together.
    let ranks = [choices.below(6), choices.below(6)];
    let dtypes = [DType::ALL[choices.below(12)], DType::ALL[choices.below(12)]];
    let sizes = [2, 4, 2, 4, 2, 4, 1, 0, 1 << 24, 1 << 46];
    let n_sizes = [1, 2, 7, 10][choices.below(4)];
    let mut types = vec![];
    for _ in 0..n_operands {
        let rank = ranks[choices.below(2)];
        let shape: Vec<u64> = (0..rank).map(|_| sizes[choices.below(n_sizes)]).collect();
        types.extend(TensorType::new(dtypes[choices.below(2)], shape));
    }
    let attr = |choices: &mut Choices<'_>, kind: Kind| match kind {
        Kind::Int => Attr::Int(integer(choices)),
        Kind::Float | Kind::Number => Attr::Float(choices.float()),
        Kind::Bool => Attr::Bool(choices.coin()),
        Kind::Ints => Attr::Ints((0..choices.below(7)).map(|_| integer(choices)).collect()),
        Kind::Type => Attr::Type(DType::ALL[choices.below(12)]),
        Kind::Str => Attr::Str("f32[4] i64[]".into()),
        Kind::Body => Attr::Body(any_body(choices, n_operands).into()),
    };
    let attrs: Vec<(&'static str, Attr)> = attributes(op)
        .iter()
        .map(|&(key, kind)| (key, attr(choices, kind)))
        .collect();
    (Op::new(op.name(), attrs).unwrap(), types)
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn graphs_round_trip(program in any_program()) {
        let graph = program.graph;
        prop_assert_eq!(verify::graph(&graph), vec![]);
        let text = text::print_graph(&graph);
        let back = text::parse_graph(&text).map_err(|e| {
            TestCaseError::fail(format!(
                "{e}\n\
            {text}"
            ))
        })?;
        prop_assert_eq!(&back, &graph.compact(), "{}", text);
        prop_assert_eq!(text::print_graph(&back), text);
        prop_assert_eq!(back.compact(), back);
    }

    #[test]
    fn programs_round_trip(program in any_program()) {
        let text = text::print_program(&program);
        let back = text::parse_program(&text).map_err(|e| {
            TestCaseError::fail(format!(
                "{e}\n\
            {text}"
            ))
        })?;
        prop_assert_eq!(&back, &program.compact(), "{}", text);
        prop_assert_eq!(text::print_program(&back), text);
        let findings = verify::program(&back);
        let with = text::print_program_with_findings(&back, &findings);
        prop_assert_eq!(
            with.matches("; error: ").count(),
            findings.len(),
            "{}",
            with
        );
        prop_assert_eq!(text::parse_program(&with).unwrap(), back);
    }

    #[test]
    fn random_text_is_refused(text in any::<String>(), words in any_words()) {
        no_panic(&text);
        no_panic(&words);
    }

    #[test]
    fn no_attribute_makes_a_shape_rule_panic(numbers in prop::collection::vec(any::<u32>(), 60)) {
        let mut choices = Choices {
            numbers: numbers.iter(),
            names: &[],
            n_names: 0,
        };
        let (op, types) = any_call(&mut choices);
        let types: Vec<&TensorType> = types.iter().collect();
        if let Ok(results) = op.infer(&types) {
            op.work(&types, &results);
        }
    }

    #[test]
    fn mutated_text_is_read_or_refused(
        edits in prop::collection::vec(
            (any::<Index>(), any::<Index>(), 0..5, any::<char>()),
            1..4,
        ),
    ) {
        let mut chars: Vec<char> = EXAMPLE.chars().collect();
        for (at, other, what, new) in edits {
            let i = at.index(chars.len());
            let j = other.index(chars.len());
            match what {
                0 => {
                    chars.remove(i);
                }
                1 => chars.insert(i, new),
                2 => chars[i] = chars[j],
                3 => chars.swap(i, j),
                _ => {
                    chars.drain(i.min(j)..(i.min(j) + 8).min(i.max(j)));
                }
            }
        }
        no_panic(&chars.into_iter().collect::<String>());
    }

    #[test]
    fn mutated_words_are_read_or_refused(
        edits in prop::collection::vec((any::<Index>(), any::<Index>()), 1..4),
    ) {
        // Words of the example in each other's places: the text stays near the grammar.
        let mut words: Vec<&str> = EXAMPLE.split_inclusive([' ', '\n']).collect();
        for (at, other) in edits {
            let (i, j) = (at.index(words.len()), other.index(words.len()));
            words[i] = words[j];
        }
        no_panic(&words.concat());
    }

    #[test]
    fn broken_programs_are_found_and_printed(
        mut program in any_program(),
        what in 0..10,
        id in 0usize..40,
    ) {
        let value = Value::new(id);
        let (graph, schedule) = (&mut program.graph, &mut program.schedule);
        match what {
            0 => graph.inputs.push(value),
            1 => graph.order.push(Node::new(id)),
            2 => graph.outputs.push(Output {
                name: "odd".into(),
                value,
            }),
            3 => graph.gradients.push((State::new(id), value)),
            4 => graph
                .states
                .values_mut()
                .for_each(|state| state.after = value),
            5 => graph
                .values
                .ids()
                .collect::<Vec<_>>()
                .into_iter()
                .for_each(|v| graph.values[v].def = Def::Input(id)),
            6 => graph
                .nodes
                .ids()
                .collect::<Vec<_>>()
                .into_iter()
                .for_each(|n| graph.nodes[n].inputs.push(value)),
            7 => schedule.entry.push((value, Buffer::new(id).into())),
            8 => schedule
                .instrs
                .ids()
                .collect::<Vec<_>>()
                .into_iter()
                .for_each(|i| schedule.instrs[i].stream = Stream::new(id)),
            _ => graph
                .nodes
                .ids()
                .collect::<Vec<_>>()
                .into_iter()
                .for_each(|n| {
                    graph.nodes[n].outputs.pop();
                }),
        }
        let findings = verify::program(&program);
        let text = text::print_program_with_findings(&program, &findings);
        prop_assert_eq!(
            text.matches("; error: ").count(),
            findings.len(),
            "{}",
            text
        );
        let findings = verify::graph(&program.graph);
        text::print_graph_with_findings(&program.graph, &findings);
    }
}
