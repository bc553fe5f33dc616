//! The compiler's table of ops and the runtime's table of kernels say the same; neither crate sees
//! the other.

use ir::op::ROWS;
use runtime::kernels::{KERNELS, find};

#[test]
fn every_row_has_its_kernel() {
    for row in ROWS {
        let kernel = find(row.name);
        if matches!(row.name, "reshape" | "fused" | "extern") {
            assert!(kernel.is_none(), "{} has no plain kernel", row.name);
            continue;
        }
        let kernel = kernel.unwrap_or_else(|| panic!("there should be a kernel for {}", row.name));
        assert_eq!(kernel.inputs, row.inputs, "operands of {}", row.name);
        assert_eq!(
            kernel.inplace, row.inplace,
            "in-place pairs of {}",
            row.name
        );
    }
    assert_eq!(KERNELS.len(), ROWS.len() - 3);
}
