//! `docs/autodiff.md` tells the truth: its table of derivatives is the real one.

use ir::op::OpKind;
use passes::graph::autodiff::{Derivative, derivative};
use std::collections::BTreeMap;

const DOC: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/autodiff.md");
const START: &str = "<!-- derivatives: `BLESS=1 cargo test -p lighterage-tests \
                     autodiff::docs` rewrites the table -->\n";
const END: &str = "<!-- /derivatives -->";

/// A row for each kind of derivative, in the order: rule, zero, reasons.
fn table() -> String {
    let mut rows: BTreeMap<(u8, String), Vec<String>> = BTreeMap::new();
    for &op in OpKind::ALL {
        let row = match derivative(op) {
            Derivative::Rule(_) => (0, "a rule".to_string()),
            Derivative::Zero => (1, "zero, or none is needed".to_string()),
            Derivative::Refused(why) => (2, format!("refused: {why}")),
        };
        rows.entry(row)
            .or_default()
            .push(format!("`{}`", op.name()));
    }
    let mut table = String::from("| derivative | ops |\n|---|---|\n");
    for ((_, derivative), ops) in rows {
        table += &format!("| {derivative} | {} |\n", ops.join(" "));
    }
    table
}

#[test]
fn the_table_of_derivatives() {
    let doc = std::fs::read_to_string(DOC).unwrap();
    let (before, rest) = doc
        .split_once(START)
        .expect("the table should have a start");
    let (found, after) = rest.split_once(END).expect("the table should have an end");
    let table = table();
    if std::env::var("BLESS").is_ok() {
        std::fs::write(DOC, [before, START, &table, END, after].concat()).unwrap();
        return;
    }
    assert_eq!(
        found, table,
        "BLESS=1 cargo test -p lighterage-tests autodiff::docs"
    );
}
