//! Circles: files of a crate that use each other's items, directly or indirectly.
//!
//! A file uses another if one of its `use` lines or paths names an item that is defined there. A
//! re-exported item counts for the file that defines it, so a `mod.rs` that only re-exports names
//! makes no circle. A module that calls its own submodules makes no circle either: it shares types
//! with them and calls them. These uses count only if the module is in a circle for another reason.

use crate::lex::{Kind, Token};
use crate::source::{Module, closing};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

type Modules = BTreeMap<Vec<String>, Module>;

/// File to file: the names that the first takes from the second.
type Uses = BTreeMap<(PathBuf, PathBuf), BTreeSet<String>>;

/// Files in a circle, and the uses between them.
pub(crate) struct Circle {
    /// The number of files.
    pub(crate) files: usize,
    pub(crate) uses: Uses,
}

/// One name that a `use` line imports.
struct Import {
    /// The name here; `*` for all names of a module.
    name: String,
    path: Vec<String>,
}

/// What a file defines and imports.
struct Names {
    defined: BTreeSet<String>,
    imports: Vec<Import>,
}

/// The target of a path.
enum Target<'a> {
    Module(&'a [String]),
    /// An item of a module.
    Item(&'a [String]),
}

/// The names of all modules of a crate.
struct House<'a> {
    names: BTreeMap<&'a [String], Names>,
}

/// The circles of a crate with more than two files.
pub(crate) fn circles(modules: &Modules) -> Vec<Circle> {
    let uses = uses(modules);
    // True from a module to its own submodules.
    let path_of: BTreeMap<&Path, &[String]> = modules
        .iter()
        .map(|(path, module)| (module.file.as_path(), path.as_slice()))
        .collect();
    let downwards = |from: &Path, to: &Path| path_of[to].starts_with(path_of[from]);
    let tied: BTreeSet<PathBuf> = tied_files(&uses, |from, to| !downwards(from, to))
        .into_iter()
        .filter(|files| files.len() > 1)
        .flatten()
        .map(Path::to_path_buf)
        .collect();

    let all = tied_files(&uses, |from, to| {
        !downwards(from, to) || tied.contains(from)
    });
    let large = all.into_iter().filter(|files| files.len() > 2);
    large.map(|files| circle(&uses, &files)).collect()
}

fn circle(uses: &Uses, files: &BTreeSet<&Path>) -> Circle {
    let inside = |file: &PathBuf| files.contains(file.as_path());
    let ties = uses
        .iter()
        .filter(|((from, to), _)| inside(from) && inside(to));
    Circle {
        files: files.len(),
        uses: ties
            .map(|(arrow, names)| (arrow.clone(), names.clone()))
            .collect(),
    }
}

/// Groups of files that reach each other by uses that count.
fn tied_files(uses: &Uses, counts: impl Fn(&Path, &Path) -> bool) -> Vec<BTreeSet<&Path>> {
    let mut arrows: BTreeMap<&Path, BTreeSet<&Path>> = BTreeMap::new();
    for (from, to) in uses.keys().filter(|(from, to)| counts(from, to)) {
        arrows.entry(from).or_default().insert(to);
    }
    let reached: BTreeMap<&Path, BTreeSet<&Path>> = arrows
        .keys()
        .map(|&from| (from, reachable(&arrows, from)))
        .collect();

    let mut groups = Vec::new();
    let mut seen: BTreeSet<&Path> = BTreeSet::new();
    for (&from, to) in &reached {
        let back = |&file: &&Path| reached.get(file).is_some_and(|to| to.contains(from));
        let files: BTreeSet<&Path> = to.iter().copied().filter(back).collect();
        if !files.is_empty() && !seen.contains(from) {
            seen.extend(&files);
            groups.push(files);
        }
    }
    groups
}

fn reachable<'a>(
    arrows: &BTreeMap<&'a Path, BTreeSet<&'a Path>>,
    from: &Path,
) -> BTreeSet<&'a Path> {
    let mut found = BTreeSet::new();
    let mut waiting: Vec<&Path> = arrows[from].iter().copied().collect();
    while let Some(file) = waiting.pop() {
        if found.insert(file) {
            waiting.extend(arrows.get(file).into_iter().flatten());
        }
    }
    found
}

/// The names that each file uses of each other file.
fn uses(modules: &Modules) -> Uses {
    let names = modules
        .iter()
        .map(|(path, module)| (path.as_slice(), names(module)))
        .collect();
    let house = House { names };
    let mut uses = Uses::new();
    for module in modules.values() {
        let imported = house.names[module.path.as_slice()].imports.iter();
        let imported = imported.map(|import| import.path.clone());
        for path in imported.chain(paths(&module.tokens)) {
            let Some((of, name)) = house.used(module, &path) else {
                continue;
            };
            if of != module.path {
                let arrow = (module.file.clone(), modules[of].file.clone());
                uses.entry(arrow).or_default().insert(name);
            }
        }
    }
    uses
}

impl<'a> House<'a> {
    /// The module that a path of another takes an item from, and the item's name.
    fn used(&self, module: &'a Module, path: &[String]) -> Option<(&'a [String], String)> {
        let name = path.last()?.clone();
        match (self.resolve(&module.path, path, 0)?, name.as_str()) {
            // All names of a module: their definitions are not looked up.
            (Target::Module(of), "*") | (Target::Item(of), _) => Some((of, name)),
            // Other paths say which items are used.
            (Target::Module(_), _) => None,
        }
    }

    /// Resolves a path in the module `here`; none if it leads out of the crate.
    fn resolve(&self, here: &'a [String], path: &[String], depth: usize) -> Option<Target<'a>> {
        // Re-exports may be circular.
        if depth > 20 {
            return None;
        }
        let (first, rest) = path.split_first()?;
        let target = match first.as_str() {
            "crate" => Target::Module(&here[..0]),
            "self" => Target::Module(here),
            "super" => Target::Module(&here[..here.len().checked_sub(1)?]),
            name => self.named(here, name, true, depth)?,
        };
        self.follow(target, rest, depth)
    }

    fn follow(&self, mut target: Target<'a>, rest: &[String], depth: usize) -> Option<Target<'a>> {
        for name in rest {
            target = match target {
                Target::Module(at) if name == "super" => {
                    Target::Module(&at[..at.len().checked_sub(1)?])
                }
                Target::Module(at) if name != "*" && name != "self" => {
                    // A name without a declaration comes from a macro of the file.
                    self.named(at, name, false, depth)
                        .unwrap_or(Target::Item(at))
                }
                other => return Some(other),
            };
        }
        Some(target)
    }

    /// Finds a name in a module: a child, a definition, or an import. `inside`: the name is used in
    /// the module itself; then globs of other modules are not searched.
    fn named(
        &self,
        at: &'a [String],
        name: &str,
        inside: bool,
        depth: usize,
    ) -> Option<Target<'a>> {
        let child = [at, &[name.to_string()]].concat();
        if let Some((path, _)) = self.names.get_key_value(child.as_slice()) {
            return Some(Target::Module(path));
        }
        let names = self.names.get(at)?;
        if names.defined.contains(name) {
            return Some(Target::Item(at));
        }
        if let Some(import) = names.imports.iter().find(|import| import.name == name) {
            // `use ir::..` in a module that imports the crate `ir` by that name.
            let of_itself = import.path.first().is_some_and(|first| first == name);
            return match of_itself {
                true => None,
                false => self.resolve(at, &import.path, depth + 1),
            };
        }
        if inside {
            return None;
        }
        let globs = names.imports.iter().filter(|import| import.name == "*");
        globs.into_iter().find_map(|glob| {
            let module = &glob.path[..glob.path.len() - 1];
            match self.resolve(at, module, depth + 1)? {
                Target::Module(of) => self.named(of, name, false, depth + 1),
                Target::Item(_) => None,
            }
        })
    }
}

/// The names that a module defines at its top level, and the names that it imports, also in
/// functions.
fn names(module: &Module) -> Names {
    let code = &module.tokens;
    let mut names = Names {
        defined: BTreeSet::new(),
        imports: Vec::new(),
    };
    let kinds = [
        "struct", "enum", "union", "fn", "trait", "type", "const", "static",
    ];
    let next = |at: usize| code.get(at).and_then(Token::word).map(str::to_string);
    let mut depth = 0usize;
    let mut at = 0;
    while at < code.len() {
        match &code[at].kind {
            Kind::Word(_) if is_use(code, at) => {
                at = imports(code, at + 1, &[], &mut names.imports);
                continue;
            }
            Kind::Word(word) if depth == 0 && word == "macro_rules" => {
                names.defined.extend(next(at + 2));
            }
            Kind::Word(word) if depth == 0 && kinds.contains(&word.as_str()) => {
                names.defined.extend(next(at + 1));
            }
            Kind::Mark('(' | '[' | '{') => depth += 1,
            Kind::Mark(')' | ']' | '}') => depth -= 1,
            _ => {}
        }
        at += 1;
    }
    names
}

/// A `use` line starts here, and not the `use<..>` of a type.
fn is_use(code: &[Token], at: usize) -> bool {
    code[at].is_word("use") && !code.get(at + 1).is_some_and(|token| token.is('<'))
}

/// Reads the tree of a `use` line from `at`, below `prefix`; returns where it ends.
fn imports(code: &[Token], mut at: usize, prefix: &[String], found: &mut Vec<Import>) -> usize {
    let mut path = prefix.to_vec();
    while at < code.len() {
        match &code[at].kind {
            Kind::Word(word) if word == "as" => {
                let name = code[at + 1].word().unwrap_or("_").to_string();
                found.push(Import { name, path });
                return at + 2;
            }
            Kind::Word(word) => path.push(word.clone()),
            Kind::Mark('*') => path.push("*".to_string()),
            Kind::Mark('{') => {
                let end = closing(code, at);
                at += 1;
                while at < end {
                    at = imports(code, at, &path, found);
                    if at < end && code[at].is(',') {
                        at += 1;
                    }
                }
                return end + 1;
            }
            Kind::Mark(':') => {}
            _ => break,
        }
        at += 1;
    }
    if path.last().is_some_and(|last| last == "self") {
        path.pop();
    }
    if let Some(name) = path.last().cloned() {
        found.push(Import { name, path });
    }
    at
}

/// The paths with more than one segment in a file's code, without `use` lines.
fn paths(code: &[Token]) -> Vec<Vec<String>> {
    let separated = |at: usize| {
        code.get(at).is_some_and(|t| t.is(':')) && code.get(at + 1).is_some_and(|t| t.is(':'))
    };
    let mut found = Vec::new();
    let mut at = 0;
    while at < code.len() {
        if is_use(code, at) {
            at = imports(code, at + 1, &[], &mut Vec::new());
            continue;
        }
        let Some(word) = code[at].word() else {
            at += 1;
            continue;
        };
        let mut path = vec![word.to_string()];
        at += 1;
        while let (true, Some(word)) = (separated(at), code.get(at + 2).and_then(Token::word)) {
            path.push(word.to_string());
            at += 3;
        }
        if path.len() > 1 {
            found.push(path);
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lex::tokens;

    fn house(files: &[(&str, &str)]) -> Modules {
        let module = |(path, source): &(&str, &str)| {
            let path: Vec<String> = path
                .split("::")
                .filter(|part| !part.is_empty())
                .map(str::to_string)
                .collect();
            let file = PathBuf::from(format!("/{}.rs", path.join("/")));
            let tokens = tokens(source);
            (path.clone(), Module { path, file, tokens })
        };
        files.iter().map(module).collect()
    }

    #[test]
    fn a_face_ties_nothing() {
        let modules = house(&[
            ("", "mod a; pub use a::{b::B, c::*};"),
            ("a", "pub mod b; pub mod c;"),
            ("a::b", "use crate::C; pub struct B;"),
            ("a::c", "pub struct C;"),
        ]);
        let uses = uses(&modules);
        let arrows: Vec<_> = uses
            .iter()
            .map(|((from, to), _)| format!("{} {}", from.display(), to.display()))
            .collect();
        assert_eq!(arrows, ["/.rs /a/b.rs", "/.rs /a/c.rs", "/a/b.rs /a/c.rs"]);
        assert!(circles(&modules).is_empty());
    }

    #[test]
    fn circles_are_found_through_imports_and_paths() {
        let modules = house(&[
            ("", "mod a; mod b; mod c;"),
            ("a", "use super::b; fn a() { b::b() }"),
            ("b", "pub fn b() { let x: crate::c::C = 1; }"),
            ("c", "use crate::a::{self as d, a as e}; pub struct C;"),
        ]);
        let circles = circles(&modules);
        assert_eq!(circles.len(), 1);
        assert_eq!(circles[0].files, 3);
        let names: Vec<_> = circles[0].uses.values().flatten().cloned().collect();
        assert_eq!(names, ["b", "C", "a"]);
    }

    #[test]
    fn two_files_may_use_each_other() {
        let modules = house(&[
            ("", "mod a; mod b;"),
            ("a", "use super::b::B; pub struct A;"),
            ("b", "use super::a::A; pub struct B;"),
        ]);
        assert!(circles(&modules).is_empty());
    }

    /// `b` and `b::c` are in a circle with `a` together, and leave it together.
    #[test]
    fn a_module_drives_its_submodules() {
        let free = [
            ("", "mod a; mod b;"),
            ("a", "pub struct A;"),
            (
                "b",
                "pub mod c; pub mod d; pub struct B; fn b() { c::c(); d::d() }",
            ),
            ("b::c", "use super::B; pub fn c() {}"),
            ("b::d", "use super::c::c; use crate::a::A; pub fn d() {}"),
        ];
        assert!(circles(&house(&free)).is_empty());
        let mut tied = free;
        tied[1].1 = "use crate::b::B; pub struct A;";
        tied[2].1 =
            "pub mod c; pub mod d; use crate::a::A; pub struct B; fn b() { c::c(); d::d() }";
        let circles = circles(&house(&tied));
        assert_eq!(
            circles
                .iter()
                .map(|circle| circle.files)
                .collect::<Vec<_>>(),
            [4]
        );
    }
}
