//! Measures the structure of the workspace's source and compares it with the project's goals:
//!
//! - no circle of more than two files in a crate: files that use each other's items, directly or
//!   indirectly;
//! - functions of more than 60 lines of code: at most 2 % of all;
//! - lines of more than 100 columns: none;
//! - public signatures with `Result<_, String>`: none;
//! - test files that are in no test program: none.
//!
//! Circles, functions and signatures are measured in `src` folders without test code; lines and
//! test files in all files that git knows. For a figure that has not reached its goal, `bounds.txt`
//! has an upper bound, which may only fall. The program prints each figure, and the places that
//! count if a figure is above its bound (with `--all`, all places). It exits with 1 if a figure is
//! above its bound.

mod circles;
mod functions;
mod lex;
mod source;

use circles::Circle;
use functions::{Function, functions};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

/// The largest number of columns of a line.
const COLUMNS: usize = 100;
/// A function with more lines of code is long.
const LINES: usize = 60;
/// The largest number of long functions in a thousand.
const LONG: usize = 20;

/// One measured figure.
struct Figure {
    /// Its name in `bounds.txt`.
    name: &'static str,
    /// The description of the count.
    of: &'static str,
    count: usize,
    goal: usize,
    /// The places that count, one for each line.
    over: Vec<String>,
}

fn main() -> ExitCode {
    let all = std::env::args().any(|argument| argument == "--all");
    let (text, ok) = match measured(all) {
        Ok(answer) => answer,
        Err(error) => (format!("structure: {error}\n"), false),
    };
    // The reader may have closed the pipe.
    let _ = std::io::stdout().write_all(text.as_bytes());
    ExitCode::from(u8::from(!ok))
}

/// The report, and whether all figures are within their bounds.
fn measured(all: bool) -> Result<(String, bool), String> {
    let root = workspace()?;
    let files = tracked(&root)?;
    let bounds = bounds(&root.join("scripts/structure/bounds.txt"))?;
    let (circles, functions) = crates(&root, &files)?;
    let figures = [
        circle_figure(&circles),
        length_figure(&functions),
        column_figure(&root, &files)?,
        signature_figure(&functions),
        test_figure(&root, &files)?,
    ];

    let mut text = String::new();
    let mut ok = true;
    for figure in &figures {
        let bound = bounds
            .get(figure.name)
            .copied()
            .unwrap_or(figure.goal)
            .max(figure.goal);
        let within = figure.count <= bound;
        ok &= within;
        let note = match () {
            () if !within => format!(" ABOVE {bound}"),
            () if figure.count < bound => format!(", bound {bound}: it can fall"),
            () if bound > figure.goal => format!(", bound {bound}"),
            () => String::new(),
        };
        let (count, of, goal) = (figure.count, figure.of, figure.goal);
        _ = writeln!(text, "structure: {count} {of} (goal {goal}{note})");
        if all || !within {
            figure
                .over
                .iter()
                .for_each(|line| _ = writeln!(text, "  {line}"));
        }
    }
    Ok((text, ok))
}

/// The folder of the workspace.
fn workspace() -> Result<PathBuf, String> {
    // The variable at run time, not at build time: a worktree may have a copy of another worktree's
    // build.
    let here = std::env::var_os("CARGO_MANIFEST_DIR");
    let here = here.map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from);
    let root = here.ancestors().nth(2);
    root.map(Path::to_path_buf)
        .ok_or_else(|| "no workspace".to_string())
}

/// The Rust files that git tracks or would add, relative to the workspace.
fn tracked(root: &Path) -> Result<Vec<PathBuf>, String> {
    let arguments = [
        "ls-files",
        "--cached",
        "--others",
        "--exclude-standard",
        "*.rs",
    ];
    let output = Command::new("git")
        .args(arguments)
        .current_dir(root)
        .output();
    let output = output.map_err(|error| format!("git: {error}"))?;
    if !output.status.success() {
        return Err(format!("git: {}", String::from_utf8_lossy(&output.stderr)));
    }
    let lines = String::from_utf8_lossy(&output.stdout);
    // A removed file is listed until the removal is committed.
    let files = lines
        .lines()
        .map(PathBuf::from)
        .filter(|file| root.join(file).is_file());
    Ok(files.collect())
}

/// `NAME COUNT` on each line; `#` starts a comment.
fn bounds(file: &Path) -> Result<BTreeMap<String, usize>, String> {
    let Ok(text) = std::fs::read_to_string(file) else {
        return Ok(BTreeMap::new());
    };
    let lines = text
        .lines()
        .filter(|line| !line.is_empty() && !line.starts_with('#'));
    let read = |line: &str| {
        let (name, count) = line.split_once(' ')?;
        Some((name.to_string(), count.trim().parse().ok()?))
    };
    lines
        .map(|line| read(line).ok_or_else(|| format!("{}: `{line}`?", file.display())))
        .collect()
}

/// The circles of all crates, and their functions with their files.
fn crates(root: &Path, files: &[PathBuf]) -> Result<(Vec<Circle>, Vec<Function>), String> {
    let mut circles = Vec::new();
    let mut found = Vec::new();
    let is_root = |file: &&PathBuf| file.ends_with("src/lib.rs") || file.ends_with("src/main.rs");
    for file in files
        .iter()
        .filter(is_root)
        .filter(|file| !file.starts_with("tests"))
    {
        let modules = source::modules(&root.join(file))?;
        circles.extend(circles::circles(&modules));
        for module in modules.values() {
            let file = module.file.strip_prefix(root).unwrap_or(&module.file);
            found.extend(functions(file, &module.tokens));
        }
    }
    Ok((circles, found))
}

fn circle_figure(circles: &[Circle]) -> Figure {
    let name = |file: &Path| {
        let parts: Vec<_> = file.iter().map(|part| part.to_string_lossy()).collect();
        let src = parts.iter().rposition(|part| part == "src").unwrap_or(1);
        parts[src.saturating_sub(1)..].join("/")
    };
    let mut over = Vec::new();
    for circle in circles {
        over.push(format!("{} files in a circle:", circle.files));
        for ((from, to), names) in &circle.uses {
            let names: Vec<&str> = names.iter().map(String::as_str).collect();
            over.push(format!(
                "  {} -> {}: {}",
                name(from),
                name(to),
                names.join(", ")
            ));
        }
    }
    Figure {
        name: "circles",
        of: "circles of more than two files",
        count: circles.len(),
        goal: 0,
        over,
    }
}

fn length_figure(functions: &[Function]) -> Figure {
    let mut long: Vec<_> = functions.iter().filter(|f| f.lines > LINES).collect();
    long.sort_by_key(|f| std::cmp::Reverse(f.lines));
    let line = |f: &&Function| {
        format!(
            "{:4} lines: {}:{} {}",
            f.lines,
            f.file.display(),
            f.line,
            f.name
        )
    };
    Figure {
        name: "long-functions",
        of: "functions in a thousand with more than 60 lines of code",
        count: (1000 * long.len()).div_ceil(functions.len().max(1)),
        goal: LONG,
        over: long.iter().map(line).collect(),
    }
}

fn column_figure(root: &Path, files: &[PathBuf]) -> Result<Figure, String> {
    let mut over = Vec::new();
    for file in files {
        let text = std::fs::read_to_string(root.join(file))
            .map_err(|error| format!("{}: {error}", file.display()))?;
        let long = text
            .lines()
            .enumerate()
            .filter(|(_, line)| line.chars().count() > COLUMNS);
        over.extend(long.map(|(i, line)| {
            format!(
                "{}:{}: {} columns",
                file.display(),
                i + 1,
                line.chars().count()
            )
        }));
    }
    Ok(Figure {
        name: "long-lines",
        of: "lines of more than 100 columns",
        count: over.len(),
        goal: 0,
        over,
    })
}

fn signature_figure(functions: &[Function]) -> Figure {
    let text = functions.iter().filter(|f| f.public && f.text_error);
    let over: Vec<String> = text
        .map(|f| format!("{}:{} {}", f.file.display(), f.line, f.name))
        .collect();
    Figure {
        name: "text-errors",
        of: "public signatures with Result<_, String>",
        count: over.len(),
        goal: 0,
        over,
    }
}

/// Crates list their test programs (`autotests = false`), so cargo does not find a file that no
/// program includes.
fn test_figure(root: &Path, files: &[PathBuf]) -> Result<Figure, String> {
    let mut over = Vec::new();
    for file in files {
        let Some(folder) = file.parent().filter(|folder| folder.ends_with("tests")) else {
            continue;
        };
        let manifest = root.join(folder).with_file_name("Cargo.toml");
        // `src/tests.rs` and similar files are ordinary modules.
        let Ok(manifest) = std::fs::read_to_string(manifest) else {
            continue;
        };
        let name = file.file_stem().unwrap_or_default().to_string_lossy();
        let main = std::fs::read_to_string(root.join(folder).join("main.rs")).unwrap_or_default();
        let program = manifest.contains(&format!("path = \"tests/{name}.rs\""));
        let module = main.lines().any(|line| line == format!("mod {name};"));
        let found = !manifest.contains("autotests = false");
        if !(program || module || found) {
            over.push(format!(
                "{}: no `mod {name};` in main.rs beside it",
                file.display()
            ));
        }
    }
    Ok(Figure {
        name: "lost-tests",
        of: "files of tests that no program has",
        count: over.len(),
        goal: 0,
        over,
    })
}
