//! Launches that a function of the machine's caller computes ([`crate::foreign`]): which they are,
//! and what can be checked of them.

use artifact::{Artifact, Attr, CommandKind, DType, Kernel, Operand};
use ops::OpKind;

/// True for a kernel that only a [`Foreign`](crate::Foreign) has.
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

/// The launches of an artifact that need a [`Foreign`](crate::Foreign): operator and line, each
/// operator with its first line.
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
