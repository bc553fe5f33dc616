//! docs/papers.md is what `make papers` writes. Sections with clocks are left out, and so are those
//! that take long without optimisation, unless `LIGHTERAGE_LONG_TESTS=1` asks for them.

use lighterage_tests::document::{self, Kind};

const DOC: &str = include_str!("../../docs/papers.md");

#[test]
fn the_page_has_what_the_sections_say() {
    let is_long = std::env::var_os("LIGHTERAGE_LONG_TESTS").is_some();
    let mut compared = 0;
    for section in document::papers().iter().flat_map(|paper| &paper.sections) {
        let title = format!("### {}\n", section.title);
        assert!(DOC.contains(&title), "docs/papers.md should have {title}");
        if section.kind == Kind::Timed || !(section.quick || is_long) {
            continue;
        }
        let text = document::print(section);
        let lacking = text.lines().find(|line| !DOC.contains(line));
        assert!(
            DOC.contains(&text),
            "{} differs from docs/papers.md; `make papers` writes it: {lacking:?}",
            section.name
        );
        compared += 1;
    }
    assert!(compared > 10, "{compared} sections compared");
}
