//! The source files of a crate, found by their `mod` declarations, without test code.

use crate::lex::{Kind, Token, tokens};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// A module with its own file.
pub(crate) struct Module {
    /// Its path within the crate, without `crate`: empty for the root.
    pub(crate) path: Vec<String>,
    pub(crate) file: PathBuf,
    /// The file's code, without tests.
    pub(crate) tokens: Vec<Token>,
}

/// The modules of the crate whose root is the file `root`, by their paths.
pub(crate) fn modules(root: &Path) -> Result<BTreeMap<Vec<String>, Module>, String> {
    let mut found = BTreeMap::new();
    let mut waiting = vec![(Vec::new(), root.to_path_buf())];
    while let Some((path, file)) = waiting.pop() {
        let source = std::fs::read_to_string(&file)
            .map_err(|error| format!("{}: {error}", file.display()))?;
        let code = without_tests(tokens(&source));
        for name in declared(&code) {
            let child = child_file(&file, &name)
                .ok_or_else(|| format!("{}: the module {name} has no file", file.display()))?;
            waiting.push(([path.as_slice(), &[name]].concat(), child));
        }
        let module = Module {
            path: path.clone(),
            file,
            tokens: code,
        };
        found.insert(path, module);
    }
    Ok(found)
}

/// The modules that a file declares: `mod NAME;`.
fn declared(code: &[Token]) -> Vec<String> {
    let declarations = code
        .windows(3)
        .filter(|w| w[0].is_word("mod") && w[2].is(';'));
    declarations
        .filter_map(|w| w[1].word().map(str::to_string))
        .collect()
}

/// The file of the module `name` that `file` declares.
fn child_file(file: &Path, name: &str) -> Option<PathBuf> {
    let folder = file.parent()?;
    let stem = file.file_stem()?.to_str()?;
    let folder = match stem {
        "lib" | "main" | "mod" => folder.to_path_buf(),
        _ => folder.join(stem),
    };
    let files = [
        folder.join(format!("{name}.rs")),
        folder.join(name).join("mod.rs"),
    ];
    files.into_iter().find(|file| file.is_file())
}

/// Drops each item under `#[test]` or `#[cfg(test)]`, with its attributes.
fn without_tests(code: Vec<Token>) -> Vec<Token> {
    let mut kept = Vec::new();
    let mut at = 0;
    while at < code.len() {
        if !(code[at].is('#') && code.get(at + 1).is_some_and(|t| t.is('['))) {
            kept.push(code[at].clone());
            at += 1;
            continue;
        }
        let end = closing(&code, at + 1);
        let words: Vec<&str> = code[at..end].iter().filter_map(Token::word).collect();
        let of_test = words.contains(&"test") && !words.contains(&"not");
        if of_test {
            at = item_end(&code, end + 1);
        } else {
            kept.extend_from_slice(&code[at..=end]);
            at = end + 1;
        }
    }
    kept
}

/// The position at which the bracket that opens at `at` closes.
pub(crate) fn closing(code: &[Token], at: usize) -> usize {
    let mut depth = 0usize;
    for (i, token) in code.iter().enumerate().skip(at) {
        match token.kind {
            Kind::Mark('(' | '[' | '{') => depth += 1,
            Kind::Mark(')' | ']' | '}') => {
                depth -= 1;
                if depth == 0 {
                    return i;
                }
            }
            _ => {}
        }
    }
    code.len() - 1
}

/// The first token after the item that starts at `at`. The item ends with a semicolon or a block.
fn item_end(code: &[Token], mut at: usize) -> usize {
    while at < code.len() {
        match code[at].kind {
            Kind::Mark(';') => return at + 1,
            Kind::Mark('{') => return closing(code, at) + 1,
            Kind::Mark('(' | '[') => at = closing(code, at) + 1,
            _ => at += 1,
        }
    }
    at
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tests_are_dropped() {
        let code = without_tests(tokens(
            "#[derive(A)] struct B; #[cfg(test)] mod tests { fn c() {} } #[cfg(not(test))] fn d() {}
             #[test] #[ignore] fn e() { f(); } #[cfg(test)] mod g; fn h() {}",
        ));
        let words: Vec<&str> = code.iter().filter_map(Token::word).collect();
        assert_eq!(
            words,
            [
                "derive", "A", "struct", "B", "cfg", "not", "test", "fn", "d", "fn", "h"
            ]
        );
    }
}
