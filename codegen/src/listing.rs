//! The kernels of a compiled step as readable text: MLIR, LLVM's, assembly or PTX.

use crate::kernels::{Generated, Stage, Target, run_all};
use crate::{Error, kernel};
use ir::{Program, text};
use std::collections::BTreeMap;
use std::fmt;

/// What a listing shows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Form {
    /// MLIR, as emitted; needs no kernel generator.
    Mlir,
    /// LLVM's text, after its passes.
    Llvm,
    /// Assembly; for a GPU, PTX.
    Asm,
}

/// The kernels of a program, and the ops without one. It prints as the kernels' text with comments.
#[derive(Debug)]
pub struct Listing {
    /// Generated kernels of the program's nodes, each once.
    pub kernels: Vec<Listed>,
    /// Ops that run as the runtime's own kernels.
    pub plain: Vec<Plain>,
    /// The start of a comment in the kernels' text.
    comment: &'static str,
}

/// A generated kernel.
#[derive(Debug)]
pub struct Listed {
    /// The function's name; functions of later phases have their number after it.
    pub name: String,
    /// The op and its operands' types.
    pub op: String,
    /// Nodes that it computes.
    pub nodes: Vec<String>,
    /// The number of parts of each phase, which may run in parallel; empty if there is nothing to
    /// do.
    pub parts: Vec<u64>,
    /// Bytes that it needs in addition to operands and results.
    pub scratch_bytes: u64,
    /// Its text.
    pub text: String,
}

/// An op without a generated kernel.
#[derive(Debug)]
pub struct Plain {
    /// The op and its operands' types.
    pub op: String,
    /// Nodes that it computes.
    pub nodes: Vec<String>,
    /// Why it has none.
    pub why: String,
}

impl fmt::Display for Listing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let comment = self.comment;
        for kernel in &self.kernels {
            let parts = match kernel.parts.is_empty() {
                true => "nothing to do".into(),
                false => kernel
                    .parts
                    .iter()
                    .map(|n| format!("{n} parts"))
                    .collect::<Vec<_>>()
                    .join(", then "),
            };
            writeln!(f, "{comment} {}: {}", kernel.name, kernel.op)?;
            writeln!(f, "{comment} nodes {}", kernel.nodes.join(" "))?;
            writeln!(
                f,
                "{comment} {parts}; {} bytes of scratch\n{}",
                kernel.scratch_bytes, kernel.text
            )?;
        }
        for Plain { op, nodes, why } in &self.plain {
            writeln!(
                f,
                "{comment} {op}\n{comment} nodes {}\n{comment} {why}\n",
                nodes.join(" ")
            )?;
        }
        Ok(())
    }
}

/// The generated kernels of a program's nodes, in the order of their ops' text. Errors come from
/// the kernel generator.
pub fn listing(program: &Program, target: &Target, form: Form) -> Result<Listing, Error> {
    let graph = &program.graph;
    let mut kernels: BTreeMap<String, (Generated, Vec<String>)> = BTreeMap::new();
    let mut plain: BTreeMap<String, Plain> = BTreeMap::new();
    for &node in &graph.order {
        let data = &graph.nodes[node];
        let name = graph.node_name(node).to_string();
        let types = graph.types(&data.inputs);
        let scratch = graph.work(node).scratch.on(target.processor());
        let of = types
            .iter()
            .map(ToString::to_string)
            .collect::<Vec<_>>()
            .join(", ");
        let op = format!("{} of {of}", text::print_op(&data.op));
        let nodes = match kernel(&data.op, &types, target, scratch) {
            Ok(kernel) => &mut kernels.entry(op).or_insert_with(|| (kernel, vec![])).1,
            Err(why) => {
                let none = || Plain {
                    op: op.clone(),
                    nodes: vec![],
                    why: why.to_string(),
                };
                &mut plain.entry(op.clone()).or_insert_with(none).nodes
            }
        };
        nodes.push(name);
    }
    let made: Vec<&Generated> = kernels.values().map(|(kernel, _)| kernel).collect();
    let texts = match form {
        Form::Mlir => made
            .iter()
            .map(|kernel| kernel.mlir.clone().into_bytes())
            .collect(),
        Form::Llvm => run_all(&made, target, Stage::Llvm)?,
        Form::Asm => run_all(&made, target, Stage::Asm)?,
    };
    let mut listed = vec![];
    for ((op, (kernel, nodes)), text) in kernels.into_iter().zip(texts) {
        listed.push(Listed {
            name: kernel.name,
            op,
            nodes,
            parts: kernel.phases.iter().map(|phase| phase.parts).collect(),
            scratch_bytes: kernel.scratch_bytes,
            text: String::from_utf8_lossy(&text).into_owned(),
        });
    }
    Ok(Listing {
        kernels: listed,
        plain: plain.into_values().collect(),
        comment: comment(form, target),
    })
}

/// The start of a comment in a form.
fn comment(form: Form, target: &Target) -> &'static str {
    match form {
        Form::Llvm => ";",
        Form::Asm if target.triple().starts_with("x86_64") => "#",
        Form::Mlir | Form::Asm => "//",
    }
}
