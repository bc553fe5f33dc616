//! Ops that the runtime has no kernel for. A program that has functions for them gives the machine
//! one [`Foreign`], which computes their launches: the Python package does, with PyTorch's.
//!
//! Such an op is an `extern` of the language. Its kernel in an artifact has no code and four
//! attributes: the operator's `name` and the call's `node` where they were traced, whether the op
//! is `pure`, and the `types` of the results. What the function allocates is no part of the plan.

use crate::machine::Lent;
use crate::memory;
use artifact::{Artifact, Attr, CommandKind, DType, Kernel, Operand};
use ops::OpKind;

/// Functions of the program that runs a machine.
pub trait Foreign: Send + Sync {
    /// Computes one launch: reads the operands and writes every element of the results, which
    /// overlap nothing. It is called on the thread of the launch's stream, possibly on two at the
    /// same time, and may touch the tensors until it returns. The error is for the user.
    fn compute(&self, call: &ForeignCall<'_>) -> Result<(), String>;
}

/// A launch for [`Foreign`].
#[derive(Clone, Copy, Debug)]
pub struct ForeignCall<'a> {
    /// The operator's name where it was traced.
    pub name: &'a str,
    /// The call's name there.
    pub node: &'a str,
    /// Operands, row-major.
    pub ins: &'a [Lent],
    /// Results, row-major.
    pub outs: &'a [Lent],
}

impl ForeignCall<'_> {
    /// A copy of operand `i`'s bytes. Panics if there is none.
    pub fn read(&self, i: usize) -> Vec<u8> {
        let tensor = self.ins[i].tensor();
        let mut bytes = vec![0; tensor.bytes];
        memory::read(tensor, &mut bytes);
        bytes
    }
    /// Writes result `j`. Panics if there is none, or if it has another number of bytes.
    pub fn write(&self, j: usize, bytes: &[u8]) {
        memory::write(self.outs[j].tensor(), bytes);
    }
}

/// True for a kernel that only a [`Foreign`] has.
pub(crate) fn is_foreign(kernel: &Kernel) -> bool {
    kernel.op == OpKind::Extern.name() && kernel.code.is_none()
}

/// A text attribute of a kernel.
pub(crate) fn text<'a>(kernel: &'a Kernel, key: &str) -> Option<&'a str> {
    let found = kernel.attrs.iter().find(|(name, _)| name == key);
    match found {
        Some((_, Attr::Str(text))) => Some(text),
        _ => None,
    }
}

/// The launches of an artifact that need a [`Foreign`]: operator and line, each operator with its
/// first line.
pub(crate) fn needed(artifact: &Artifact) -> Vec<(&str, &str)> {
    let mut found: Vec<(&str, &str)> = Vec::new();
    for command in &artifact.commands {
        let CommandKind::Launch { kernel, .. } = command.kind else {
            continue;
        };
        let kernel = artifact.kernels.get(kernel as usize);
        let Some(kernel) = kernel.filter(|kernel| is_foreign(kernel)) else {
            continue;
        };
        let name = text(kernel, "name").unwrap_or(&kernel.op);
        let line = artifact.lines.get(command.line as usize);
        if found.iter().all(|(other, _)| *other != name) {
            found.push((name, line.map_or("?", |line| &line.name)));
        }
    }
    found
}

/// Whether the attributes are an `extern`'s, and the results have its types.
pub(crate) fn check(kernel: &Kernel, outs: &[Operand]) -> Result<(), String> {
    let known = ["name", "node", "pure", "types"];
    let are_known = kernel.attrs.iter().map(|(key, _)| &**key).eq(known);
    let is_flag = kernel
        .attrs
        .get(2)
        .is_some_and(|(_, pure)| matches!(pure, Attr::Bool(_)));
    let texts = ["name", "node", "types"].map(|key| text(kernel, key));
    let [Some(name), Some(_), Some(types)] = texts else {
        return Err("an extern should have a name, a node and types".into());
    };
    if !are_known || !is_flag {
        return Err(format!("{name}: an extern has the attributes {known:?}"));
    }
    let given: Vec<&str> = types.split_whitespace().collect();
    let fits = given.len() == outs.len()
        && given
            .iter()
            .zip(outs)
            .all(|(text, out)| *text == type_text(out));
    match fits {
        true => Ok(()),
        false => Err(format!("{name}: its results should be {types}")),
    }
}

/// `f32[4,64]`.
fn type_text(operand: &Operand) -> String {
    let dtype = match operand.dtype {
        DType::Bool => "bool",
        DType::U8 => "u8",
        DType::I8 => "i8",
        DType::I16 => "i16",
        DType::I32 => "i32",
        DType::I64 => "i64",
        DType::F16 => "f16",
        DType::BF16 => "bf16",
        DType::F32 => "f32",
        DType::F64 => "f64",
        DType::F8E4M3 => "f8e4m3",
        DType::F8E5M2 => "f8e5m2",
    };
    let shape: Vec<String> = operand.shape.iter().map(u64::to_string).collect();
    format!("{dtype}[{}]", shape.join(","))
}
