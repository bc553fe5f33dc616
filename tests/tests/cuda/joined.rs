//! A concatenation of more tensors than a kernel can have operands.

use super::machine::{none, standin};
use super::products::{compiled, feed, run};
use super::watched::Watch;
use runtime::CudaOptions;

#[test]
fn more_tensors_than_a_kernel_takes_are_joined() {
    const N: usize = 600;
    let inputs: String = (0..N)
        .map(|i| format!("  input %x{i} : f32[1,3]\n"))
        .collect();
    let names: Vec<String> = (0..N).map(|i| format!("%x{i}")).collect();
    let names = names.join(", ");
    let text = format!(
        "graph joined {{\n{inputs}  fwd - %y = cat {names} dim=0 : f32[{N},3]\n  output y = %y\n}}"
    );
    let artifact = compiled(&text);
    let most = artifact.commands.iter().map(|command| match &command.kind {
        artifact::CommandKind::Launch { ins, .. } => ins.len(),
        _ => 0,
    });
    assert_eq!(most.max(), Some(256));
    let watch = Watch::new(&standin(1));
    let left = run(&watch, &artifact, CudaOptions::default()).unwrap();
    assert_eq!(watch.standin.findings(), none());
    let feed = feed(&artifact);
    let expected: Vec<u8> = (0..N)
        .flat_map(|i| feed[&format!("x{i}")].clone())
        .collect();
    assert!(left["y"] == expected);
}
