//! docs/features.md has a row for each feature of the papers, and what a row names exists: test
//! functions, sections of `make papers`, commands of the product with their options, and files.

use lighterage_tests::document;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

const DOC: &str = include_str!("../../docs/features.md");
const ARGS: &str = include_str!("../../frontends/cli/src/args.rs");

/// The rows of each group.
const GROUPS: [(char, usize); 10] = [
    ('A', 12),
    ('B', 13),
    ('C', 7),
    ('D', 12),
    ('E', 15),
    ('F', 22),
    ('G', 8),
    ('H', 10),
    ('I', 8),
    ('N', 8),
];

/// A row: its name, what shows it, and its status.
struct Row<'a> {
    id: &'a str,
    shown: &'a str,
    status: &'a str,
}

fn rows() -> Vec<Row<'static>> {
    let is_row = |line: &&str| line.starts_with("| ") && !line.starts_with("| id");
    let row = |line: &'static str| {
        let cells: Vec<&str> = line.split(" | ").collect();
        let [id, _what, _source, shown, status] = cells[..] else {
            panic!("a row should have five cells: {line}");
        };
        Row {
            id: id.trim_start_matches("| "),
            shown,
            status: status.trim_end_matches(" |"),
        }
    };
    DOC.lines().filter(is_row).map(row).collect()
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// The text between backquotes.
fn quoted(text: &str) -> Vec<&str> {
    text.split('`').skip(1).step_by(2).collect()
}

/// Whether a file has a test function with this name.
fn has_test(file: &str, name: &str) -> bool {
    let text = std::fs::read_to_string(root().join(file)).unwrap_or_default();
    let lines: Vec<&str> = text.lines().map(str::trim).collect();
    if file.ends_with(".py") {
        let begin = format!("def {name}(");
        return name.starts_with("test_") && lines.iter().any(|line| line.starts_with(&begin));
    }
    let begin = format!("fn {name}(");
    let at = lines.iter().position(|line| line.starts_with(&begin));
    let above = at.map_or(&[][..], |at| &lines[..at]);
    let mut attributes = above.iter().rev();
    attributes
        .by_ref()
        .take_while(|line| line.starts_with("#[") || line.starts_with("//"))
        .any(|line| *line == "#[test]")
}

/// Why a command line of the product cannot be: a command or an option that does not exist.
fn unknown(words: &[&str]) -> Option<String> {
    let camel = |word: &str| -> String {
        let mut letters = word.chars();
        letters.next().map_or(String::new(), |first| {
            first.to_uppercase().chain(letters).collect()
        })
    };
    let (command, rest) = words.split_first()?;
    let variant = format!("    {}(", camel(command));
    if !ARGS.lines().any(|line| line.starts_with(&variant)) {
        return Some(format!("no command {command}"));
    }
    let options = rest.iter().filter_map(|word| word.strip_prefix("--"));
    let lacks = |option: &&str| {
        let field = option.replace('-', "_");
        !ARGS.contains(&format!("{field}:")) && !ARGS.contains(&format!("long = \"{option}\""))
    };
    options
        .filter(lacks)
        .map(|option| format!("no option --{option}"))
        .next()
}

#[test]
fn every_feature_has_a_row() {
    let rows = rows();
    let ids: Vec<&str> = rows.iter().map(|row| row.id).collect();
    let all = GROUPS.iter();
    let all = all.flat_map(|&(group, n)| (1..=n).map(move |i| format!("{group}{i}")));
    assert_eq!(ids, all.collect::<Vec<_>>());
    for row in rows {
        let kinds = ["works", "differs", "needs a GPU", "needs several devices"];
        let is_known = kinds.iter().any(|kind| row.status.starts_with(kind));
        assert!(is_known, "{}: {}", row.id, row.status);
        assert!(
            row.status.starts_with("needs") || !quoted(row.shown).is_empty(),
            "{}: a row should name what shows it",
            row.id
        );
    }
}

#[test]
fn what_a_row_names_exists() {
    let papers = document::papers();
    let sections: BTreeSet<&str> = papers
        .iter()
        .flat_map(|paper| paper.sections.iter().map(|section| section.name))
        .collect();
    let mut n_tests = 0;
    for row in rows() {
        for item in quoted(row.shown) {
            let words: Vec<&str> = item.split_whitespace().collect();
            let fault = match words[..] {
                ["make", "papers", only] => {
                    let name = only.strip_prefix("ONLY=").unwrap_or(only);
                    (!sections.contains(name)).then(|| format!("no section {name}"))
                }
                ["lighterage", ref rest @ ..] => unknown(rest),
                ["cargo", "bench", "-p", _, "--bench", name] => {
                    let found = ["tests", "runtime/allocator"]
                        .map(|folder| root().join(format!("{folder}/benches/{name}.rs")));
                    (!found.iter().any(|file| file.exists())).then(|| format!("no bench {name}"))
                }
                ["python", script] => (!root().join(script).exists()).then(|| script.to_string()),
                [item] => match item.split_once("::") {
                    Some((file, name)) => {
                        n_tests += 1;
                        (!has_test(file, name)).then(|| format!("no test {name} in {file}"))
                    }
                    // A file, or a word of the report in brackets.
                    None => (item.contains('/') && !root().join(item).exists())
                        .then(|| format!("no file {item}")),
                },
                _ => Some(format!("not understood: {item}")),
            };
            assert_eq!(fault, None, "{}: {item}", row.id);
        }
    }
    assert!(n_tests > 100, "{n_tests} tests named");
}

/// The checks above can fail.
#[test]
fn what_does_not_exist_is_noticed() {
    assert!(has_test(
        "tests/tests/features.rs",
        "every_feature_has_a_row"
    ));
    assert!(!has_test("tests/tests/features.rs", "every_feature_has"));
    assert!(!has_test(
        "tests/tests/nowhere.rs",
        "every_feature_has_a_row"
    ));
    assert_eq!(unknown(&["plan", "--budget"]), None);
    assert!(unknown(&["plan", "--bugdet"]).is_some());
    assert!(unknown(&["plane"]).is_some());
}
