//! Compiled kernels as objects of an artifact.

use crate::Error;
use crate::kernels::{Cache, Generated, Target, compile_kernels_until};
use artifact::Object;
use passes::plan::Cancel;
use std::collections::BTreeSet;

/// The objects of kernels, as artifacts have them: for a processor, one object for each kernel; for
/// a GPU, one module with all of them, because a driver compiles each module separately. `cancel`
/// is looked at before each kernel.
///
/// Kernels for tensors of other shapes may be the same code with the same symbol, such as updates
/// of transposed parameters. A module has it once: drivers refuse a second definition.
pub fn objects(
    kernels: &[&Generated],
    target: &Target,
    cancel: &Cancel,
) -> Result<Vec<Object>, Error> {
    let mut seen = BTreeSet::new();
    let distinct: Vec<&Generated> = kernels
        .iter()
        .copied()
        .filter(|kernel| !target.is_gpu() || seen.insert(&kernel.name))
        .collect();
    let compiled = compile_kernels_until(&distinct, target, &Cache::user(), cancel)?;
    let object = |bytes| Object {
        target: target.in_artifacts(),
        bytes,
    };
    if target.is_gpu() && !compiled.is_empty() {
        return Ok(vec![object(joined(&compiled).into_bytes())]);
    }
    Ok(compiled.into_iter().map(object).collect())
}

/// Joins modules of PTX to one. The directives of the first one apply to all.
fn joined(modules: &[Vec<u8>]) -> String {
    let is_directive = |line: &str| {
        let word = line.split_whitespace().next();
        matches!(word, Some(".version" | ".target" | ".address_size"))
    };
    let mut all = String::new();
    for (i, module) in modules.iter().enumerate() {
        for line in String::from_utf8_lossy(module).lines() {
            let is_comment = line.is_empty() || line.starts_with("//");
            if i == 0 || !(is_comment || is_directive(line)) {
                all.push_str(line);
                all.push('\n');
            }
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::joined;

    #[test]
    fn directives_stand_once() {
        let module = |name: &str| format!("//\n\n.version 8.0\n.target sm_90\n\t.entry {name}\n");
        let text = joined(&[module("a").into_bytes(), module("b").into_bytes()]);
        assert_eq!(text, format!("{}\t.entry b\n", module("a")));
    }
}
