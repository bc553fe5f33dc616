//! The tables of `docs/onnx.md` are those of the reader.

const DOC: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/onnx.md");

/// The parts of the page between two marks, with what they should contain.
fn parts() -> [(&'static str, &'static str, String); 2] {
    let mut operators =
        String::from("| operator | nodes | folded | known inputs |\n|---|---|---|---|\n");
    for op in lighterage_onnx::operators() {
        let mark = |is: bool| if is { "yes" } else { "" };
        let known: Vec<String> = op.known.iter().map(usize::to_string).collect();
        operators.push_str(&format!(
            "| `{}` | {} | {} | {} |\n",
            op.name,
            mark(op.is_lowered),
            mark(op.is_folded),
            known.join(", ")
        ));
    }
    let mut refused = String::from("| operator | reason |\n|---|---|\n");
    for (op, why) in lighterage_onnx::refused() {
        refused.push_str(&format!("| `{op}` | {why} |\n"));
    }
    [
        (
            "<!-- operators: `BLESS=1 cargo test -p lighterage-onnx docs::` rewrites the \
             tables -->\n",
            "<!-- /operators -->",
            operators,
        ),
        ("<!-- refused -->\n", "<!-- /refused -->", refused),
    ]
}

#[test]
fn the_tables_are_the_real_ones() {
    let mut doc = std::fs::read_to_string(DOC).unwrap();
    let old = doc.clone();
    for (start, end, table) in parts() {
        let (head, rest) = doc.split_once(start).unwrap();
        let (_, tail) = rest.split_once(end).unwrap();
        doc = format!("{head}{start}{table}{end}{tail}");
    }
    if std::env::var_os("BLESS").is_some() {
        // Other tests may read the page at the same time, so it is replaced in one step.
        let new = format!("{DOC}.new");
        std::fs::write(&new, &doc).unwrap();
        std::fs::rename(new, DOC).unwrap();
        return;
    }
    let differs = old.lines().zip(doc.lines()).find(|(old, new)| old != new);
    assert_eq!(
        differs, None,
        "a line of docs/onnx.md, and what it should be"
    );
    assert_eq!(old.lines().count(), doc.lines().count());
}

#[test]
fn no_operator_is_both_read_and_refused() {
    for (op, _) in lighterage_onnx::refused() {
        let is_folded_only = *op == "NonZero";
        let known = lighterage_onnx::operators();
        let both = known.iter().any(|known| known.name == *op);
        assert_eq!(both, is_folded_only, "{op}");
    }
    let sorted = lighterage_onnx::refused()
        .windows(2)
        .all(|pair| pair[0].0 < pair[1].0);
    assert!(sorted);
}
