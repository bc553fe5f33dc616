//! Functions: their lengths, and whether their signatures have `Result<_, String>`.

use crate::lex::{Kind, Token};
use crate::source::closing;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// A function of a file.
pub(crate) struct Function {
    pub(crate) file: PathBuf,
    pub(crate) name: String,
    /// The line of its `fn`.
    pub(crate) line: usize,
    /// Its lines of code, signature included: neither blank lines nor comments.
    pub(crate) lines: usize,
    /// By its own `pub`, other crates can call it.
    pub(crate) public: bool,
    /// Its signature has a `Result` whose error is a `String`.
    pub(crate) text_error: bool,
}

/// The functions of a file, nested ones too.
pub(crate) fn functions(file: &Path, code: &[Token]) -> Vec<Function> {
    let starts = (0..code.len()).filter(|&i| code[i].is_word("fn"));
    starts
        .filter_map(|start| function(file, code, start))
        .collect()
}

/// The function whose `fn` is at `start`; none if this is the type of a function pointer.
fn function(file: &Path, code: &[Token], start: usize) -> Option<Function> {
    let name = code.get(start + 1)?.word()?.to_string();
    let body = signature_end(code, start);
    let end = match code.get(body)?.is('{') {
        true => closing(code, body),
        false => body,
    };
    let lines: BTreeSet<usize> = code[start..=end].iter().map(|token| token.line).collect();
    Some(Function {
        file: file.to_path_buf(),
        name,
        line: code[start].line,
        lines: lines.len(),
        public: is_public(code, start),
        text_error: has_text_error(&code[start..body]),
    })
}

/// The end of a signature: its body, or the semicolon of a function without a body.
fn signature_end(code: &[Token], start: usize) -> usize {
    let mut at = start;
    while at < code.len() {
        match code[at].kind {
            Kind::Mark('{' | ';') => break,
            Kind::Mark('(' | '[') => at = closing(code, at) + 1,
            _ => at += 1,
        }
    }
    at
}

/// True if a plain `pub` comes before the function; only qualifiers may be between.
fn is_public(code: &[Token], start: usize) -> bool {
    let qualifiers = ["const", "async", "unsafe", "extern"];
    let before = code[..start].iter().rev();
    let mut before = before.skip_while(|token| match &token.kind {
        Kind::Word(word) => qualifiers.contains(&word.as_str()),
        Kind::Literal(_) => true,
        Kind::Mark(_) => false,
    });
    before.next().is_some_and(|token| token.is_word("pub"))
}

/// The tokens have `Result<.., String>`.
fn has_text_error(signature: &[Token]) -> bool {
    let results = (1..signature.len())
        .filter(|&i| signature[i].is('<') && signature[i - 1].is_word("Result"));
    results.into_iter().any(|open| {
        last_argument(&signature[open..]).is_some_and(|last| match last {
            [only] => only.is_word("String"),
            _ => false,
        })
    })
}

/// The last of the generic arguments between the `<` that the tokens start with and its `>`, if
/// there are several.
fn last_argument(tokens: &[Token]) -> Option<&[Token]> {
    let mut depth = 0usize;
    let mut start = None;
    for (i, token) in tokens.iter().enumerate() {
        let arrow = i > 0 && tokens[i - 1].is('-');
        match token.kind {
            Kind::Mark('<' | '(' | '[') => depth += 1,
            Kind::Mark('>') if arrow => {}
            Kind::Mark('>' | ')' | ']') => {
                depth -= 1;
                if depth == 0 {
                    // A comma may follow the last argument.
                    return start.map(|start| &tokens[start..i]);
                }
            }
            Kind::Mark(',') if depth == 1 && !tokens[i + 1].is('>') => start = Some(i + 1),
            _ => {}
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lex::tokens;

    #[test]
    fn functions_are_found_and_measured() {
        let source = "pub const fn a() -> Result<(), String> {\n\n// why\nb()\n}\nfn c(d: fn(u8));
            pub(crate) fn e(f: impl Fn() -> Result<Vec<u8>, String>) {}
            pub fn g() -> Result<String, Error> { fn h() {} }";
        let found: Vec<_> = functions(Path::new("a.rs"), &tokens(source))
            .into_iter()
            .map(|f| (f.name, f.lines, f.public, f.text_error))
            .collect();
        let expected = [
            ("a", 3, true, true),
            ("c", 1, false, false),
            ("e", 1, false, true),
            ("g", 1, true, false),
            ("h", 1, false, false),
        ];
        assert_eq!(found, expected.map(|(n, l, p, t)| (n.to_string(), l, p, t)));
    }
}
