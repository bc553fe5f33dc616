//! The compiler's table of ops and the runtime's table of kernels agree; neither crate depends on
//! the other.

use ir::op::OpKind;
use runtime::kernels::{KERNELS, find};

#[test]
fn every_row_has_its_kernel() {
    for &op in OpKind::ALL {
        let (name, facts) = (op.name(), op.facts());
        let kernel = find(name);
        if !facts.has_kernel {
            assert!(kernel.is_none(), "{name} has no plain kernel");
            continue;
        }
        let kernel = kernel.unwrap_or_else(|| panic!("there should be a kernel for {name}"));
        assert_eq!(kernel.inputs, facts.inputs, "operands of {name}");
        assert_eq!(kernel.inplace, facts.inplace, "in-place pairs of {name}");
    }
    let without = OpKind::ALL.iter().filter(|op| !op.facts().has_kernel);
    let without: Vec<&str> = without.map(|op| op.name()).collect();
    assert_eq!(without, ["reshape", "detach", "fused", "extern"]);
    assert_eq!(KERNELS.len(), OpKind::ALL.len() - without.len());
}
