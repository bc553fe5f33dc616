//! `docs/ir.md` tells the truth: its dumps parse, print and prove, and its table of ops is the real
//! one.

use lighterage_ir::op::{Kind, OpKind, Purity, attributes};
use lighterage_ir::schedule::Why;
use lighterage_ir::text::{self, File};
use lighterage_ir::{DType, Phase, StateKind, check, verify};

const DOC: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/ir.md");
const START: &str =
    "<!-- ops: `BLESS=1 cargo test -p lighterage-ir docs::` rewrites the table -->\n";
const END: &str = "<!-- /ops -->";

fn doc() -> String {
    std::fs::read_to_string(DOC).unwrap()
}

#[test]
fn dumps_parse_and_prove() {
    let doc = doc();
    let dumps: Vec<&str> = doc
        .split("```ir\n")
        .skip(1)
        .map(|rest| rest.split_once("```").unwrap().0)
        .collect();
    assert!(!dumps.is_empty());
    for dump in dumps {
        match text::parse_file(dump).unwrap_or_else(|e| panic!("{e}\n{dump}")) {
            File::Graph(graph) => {
                assert_eq!(verify::graph(&graph), []);
                assert_eq!(text::print_graph(&graph), dump);
            }
            File::Program(program) => {
                assert_eq!(verify::program(&program), []);
                let findings = check::check(&program).err().unwrap_or_default();
                assert!(
                    findings.is_empty(),
                    "{}",
                    text::print_program_with_findings(&program, &findings)
                );
                assert_eq!(text::print_program(&program), dump);
            }
        }
    }
}

#[test]
fn the_example_is_the_one_of_the_tests() {
    assert!(doc().contains(include_str!("example.ir")));
}

#[test]
fn words_are_those_of_the_types() {
    let doc = doc();
    let quoted = |words: &[&str]| {
        words
            .iter()
            .map(|word| format!("\"{word}\""))
            .collect::<Vec<_>>()
            .join(" | ")
    };
    let rule = |name: &str, words: &[&str]| {
        let line = format!("{name:<9} = {} ;\n", quoted(words));
        assert!(doc.contains(&line), "docs/ir.md should have {line}");
    };
    rule("kind", &StateKind::ALL.map(StateKind::name));
    rule("phase", &Phase::ALL.map(Phase::name));
    rule("element", &DType::ALL.map(DType::name));
    for why in Why::ALL {
        assert!(
            doc.contains(&format!("`{}`", why.name())),
            "docs/ir.md should name {}",
            why.name()
        );
    }
}

fn ops() -> String {
    let mut table =
        String::from("| op | operands | attributes | in place | |\n|---|---|---|---|---|\n");
    for &op in OpKind::ALL {
        let facts = op.facts();
        let (least, most) = facts.inputs;
        let operands = if least == most {
            least.to_string()
        } else {
            format!("{least} to {most}")
        };
        let kind = |kind: Kind| match kind {
            Kind::Int => "int",
            Kind::Float => "float",
            Kind::Number => "number",
            Kind::Bool => "bool",
            Kind::Ints => "ints",
            Kind::Type => "type",
            Kind::Str => "string",
            Kind::Body => "body",
        };
        let attrs: Vec<String> = attributes(op)
            .iter()
            .map(|&(key, k)| format!("`{key}`: {}", kind(k)))
            .collect();
        let inplace: Vec<String> = facts
            .inplace
            .iter()
            .map(|(operand, result)| format!("{operand} → {result}"))
            .collect();
        let purity = if facts.purity == Purity::Opaque {
            "opaque"
        } else {
            ""
        };
        let (attrs, inplace) = (attrs.join(", "), inplace.join(", "));
        table.push_str(&format!(
            "| `{}` | {operands} | {attrs} | {inplace} | {purity} |\n",
            op.name()
        ));
    }
    table
}

#[test]
fn the_table_of_ops_is_the_real_one() {
    let doc = doc();
    let (head, rest) = doc.split_once(START).unwrap();
    let (table, tail) = rest.split_once(END).unwrap();
    if std::env::var_os("BLESS").is_some() {
        // Other tests read the page at the same time, so it is replaced in one step.
        let new = format!("{DOC}.new");
        std::fs::write(&new, format!("{head}{START}{}{END}{tail}", ops())).unwrap();
        std::fs::rename(new, DOC).unwrap();
    } else {
        let ops = ops();
        let mut rows = ops
            .lines()
            .zip(table.lines().chain(std::iter::repeat("no row")));
        let differs = rows.find(|(row, written)| row != written);
        assert_eq!(
            differs, None,
            "a row of the table in docs/ir.md, and what it has; `BLESS=1 cargo test -p \
             lighterage-ir docs::` writes it anew"
        );
        assert_eq!(
            table.lines().count(),
            ops.lines().count(),
            "rows in docs/ir.md"
        );
    }
}
