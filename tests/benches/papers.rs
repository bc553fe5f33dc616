//! Prints docs/papers.md, or the named sections of it: `cargo bench -p lighterage-tests --bench
//! papers [-- SECTION …]`. `make papers` writes the file.

use lighterage_tests::document;
use std::io::Write;

fn main() {
    let names: Vec<String> = std::env::args()
        .skip(1)
        .filter(|arg| !arg.starts_with("--"))
        .collect();
    let text = if names.is_empty() {
        document::document()
    } else {
        let papers = document::papers();
        let sections = papers.iter().flat_map(|paper| &paper.sections);
        let found: Vec<String> = sections
            .filter(|section| names.iter().any(|name| name == section.name))
            .map(document::print)
            .collect();
        assert!(
            !found.is_empty(),
            "no section has one of these names: {names:?}"
        );
        found.join("\n")
    };
    std::io::stdout()
        .write_all(text.as_bytes())
        .expect("stdout should be open");
}
