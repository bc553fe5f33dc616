//! ONNX's operators in terms of the op table: tables by family, and functions that read inputs by
//! position and attributes by name. Compositions that other front ends need too are in
//! [`lighterage_lower`].

mod attention;
mod binary;
mod index;
mod inputs;
mod loss;
mod norm;
mod product;
mod quantise;
mod random;
mod recurrent;
mod reduce;
mod resize;
mod sample;
mod shape;
mod signal;
mod unary;
mod window;

pub(crate) use inputs::{Input, Inputs, Row};
use std::collections::BTreeMap;
use std::sync::LazyLock;

const FAMILIES: [&[Row]; 16] = [
    attention::OPS,
    binary::OPS,
    index::OPS,
    loss::OPS,
    norm::OPS,
    product::OPS,
    random::OPS,
    quantise::OPS,
    recurrent::OPS,
    reduce::OPS,
    resize::OPS,
    sample::OPS,
    shape::OPS,
    signal::OPS,
    unary::OPS,
    window::OPS,
];

static TABLE: LazyLock<BTreeMap<&'static str, &'static Row>> = LazyLock::new(|| {
    FAMILIES
        .into_iter()
        .flatten()
        .map(|row| (row.name, row))
        .collect()
});

/// All operators, by name.
pub(crate) fn rows() -> impl Iterator<Item = &'static Row> {
    TABLE.values().copied()
}

/// The row of an operator.
pub(crate) fn find(name: &str) -> Option<&'static Row> {
    TABLE.get(name).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_operator_stands_in_one_family() {
        let n: usize = FAMILIES.iter().map(|family| family.len()).sum();
        assert_eq!(n, TABLE.len());
    }
}
