//! The kernels of a compiled step as text for people: MLIR, LLVM's, assembly or PTX.

use crate::kernels::{Generated, Stage, Target, generate_op, run_all};
use ir::{Program, text};
use std::collections::BTreeMap;
use std::fmt::Write;

/// What a listing shows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Form {
    /// What kernels are made as; needs no kernel generator.
    Mlir,
    /// LLVM's text, after its passes.
    Llvm,
    /// Assembly; for a GPU, PTX.
    Asm,
}

/// All kernels that are generated for a program's nodes, each once, under a comment with its nodes; then, as comments, the ops
/// that run as the runtime's own kernels, and why. An error is the kernel generator's.
pub fn listing(program: &Program, target: &Target, form: Form) -> Result<String, String> {
    let graph = &program.graph;
    let mut kernels: BTreeMap<String, (Generated, Vec<String>)> = BTreeMap::new();
    let mut plain: BTreeMap<String, (String, Vec<String>)> = BTreeMap::new();
    for &node in &graph.order {
        let data = &graph.nodes[node];
        let name = graph.node_name(node).to_string();
        let types: Vec<_> = data.inputs.iter().map(|&v| graph.values[v].ty.clone()).collect();
        let of = types.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        let op = format!("{} of {of}", text::print_op(&data.op));
        match generate_op(&data.op, &types, target) {
            Ok(kernel) => kernels.entry(op).or_insert_with(|| (kernel, vec![])).1.push(name),
            Err(why) => plain.entry(op).or_insert_with(|| (why.to_string(), vec![])).1.push(name),
        }
    }
    let made: Vec<&Generated> = kernels.values().map(|(kernel, _)| kernel).collect();
    let texts = match form {
        Form::Mlir => made.iter().map(|kernel| kernel.mlir.clone().into_bytes()).collect(),
        Form::Llvm => run_all(&made, target, Stage::Llvm).map_err(|e| e.to_string())?,
        Form::Asm => run_all(&made, target, Stage::Asm).map_err(|e| e.to_string())?,
    };
    let comment = match form {
        Form::Llvm => ";",
        Form::Asm if target.triple.starts_with("x86_64") => "#",
        Form::Mlir | Form::Asm => "//",
    };
    let mut out = String::new();
    for ((op, (kernel, nodes)), text) in kernels.iter().zip(texts) {
        let shape = match kernel.phases.is_empty() {
            true => "nothing to do".into(),
            false => kernel.phases.iter().map(|p| format!("{} parts", p.parts)).collect::<Vec<_>>().join(", then "),
        };
        let wrote = write!(
            out,
            "{comment} {}: {op}\n{comment} nodes {}\n{comment} {shape}; {} bytes of scratch\n{}\n",
            kernel.name,
            nodes.join(" "),
            kernel.scratch_bytes,
            String::from_utf8_lossy(&text)
        );
        wrote.expect("a string takes all");
    }
    for (op, (why, nodes)) in plain {
        let wrote = write!(out, "{comment} {op}\n{comment} nodes {}\n{comment} {why}\n\n", nodes.join(" "));
        wrote.expect("a string takes all");
    }
    Ok(out)
}
