//! Rust source as tokens with their lines: enough to find functions, paths and types.
//!
//! Comments are dropped. Literals are kept without their content, so text in a string never counts
//! as code.

/// The kind of a token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// An identifier or a keyword.
    Word(String),
    /// One character of punctuation.
    Mark(char),
    /// A string, character or number. A string keeps its content, for `#[path = "..."]`.
    Literal(String),
}

/// A token and the line on which it starts, from 1.
#[derive(Clone, Debug)]
pub(crate) struct Token {
    pub(crate) kind: Kind,
    pub(crate) line: usize,
}

impl Token {
    pub(crate) fn word(&self) -> Option<&str> {
        match &self.kind {
            Kind::Word(word) => Some(word),
            _ => None,
        }
    }

    pub(crate) fn is_word(&self, word: &str) -> bool {
        self.word() == Some(word)
    }

    pub(crate) fn is(&self, mark: char) -> bool {
        self.kind == Kind::Mark(mark)
    }
}

/// Reads source text from its start to its end.
struct Lexer {
    text: Vec<char>,
    at: usize,
    line: usize,
}

/// The tokens of a file.
pub(crate) fn tokens(source: &str) -> Vec<Token> {
    let mut lexer = Lexer {
        text: source.chars().collect(),
        at: 0,
        line: 1,
    };
    let mut tokens = Vec::new();
    while let Some(c) = lexer.peek(0) {
        let line = lexer.line;
        if let Some(kind) = lexer.token(c) {
            tokens.push(Token { kind, line });
        }
    }
    tokens
}

impl Lexer {
    fn peek(&self, ahead: usize) -> Option<char> {
        self.text.get(self.at + ahead).copied()
    }

    fn next(&mut self) -> Option<char> {
        let c = self.peek(0)?;
        self.at += 1;
        if c == '\n' {
            self.line += 1;
        }
        Some(c)
    }

    /// Reads the token that starts with `c`; none for white space and comments.
    fn token(&mut self, c: char) -> Option<Kind> {
        match (c, self.peek(1)) {
            ('/', Some('/')) => {
                while self.peek(0).is_some_and(|c| c != '\n') {
                    self.next();
                }
                None
            }
            ('/', Some('*')) => {
                self.block_comment();
                None
            }
            ('"', _) => {
                self.next();
                Some(self.string())
            }
            ('\'', _) => self.quote(),
            _ if c.is_whitespace() => {
                self.next();
                None
            }
            _ if c.is_ascii_digit() => Some(self.number()),
            _ if is_word(c) => Some(self.word()),
            _ => {
                self.next();
                Some(Kind::Mark(c))
            }
        }
    }

    /// Block comments nest.
    fn block_comment(&mut self) {
        let mut depth = 0;
        while let Some(c) = self.next() {
            match (c, self.peek(0)) {
                ('/', Some('*')) => {
                    self.next();
                    depth += 1;
                }
                ('*', Some('/')) => {
                    self.next();
                    depth -= 1;
                    if depth == 0 {
                        return;
                    }
                }
                _ => {}
            }
        }
    }

    /// A string after its opening quote.
    fn string(&mut self) -> Kind {
        let mut content = String::new();
        while let Some(c) = self.next() {
            match c {
                '"' => break,
                '\\' => {
                    content.push(c);
                    content.extend(self.next());
                }
                _ => content.push(c),
            }
        }
        Kind::Literal(content)
    }

    /// A raw string after its `r` or `br`: hashes, a quote, the content, a quote, hashes.
    fn raw_string(&mut self) -> Kind {
        let mut hashes = 0;
        while self.peek(0) == Some('#') {
            self.next();
            hashes += 1;
        }
        self.next();
        let mut content = String::new();
        while let Some(c) = self.next() {
            if c == '"' && (0..hashes).all(|i| self.peek(i) == Some('#')) {
                self.at += hashes;
                break;
            }
            content.push(c);
        }
        Kind::Literal(content)
    }

    /// A character, or the name of a lifetime, which is dropped.
    fn quote(&mut self) -> Option<Kind> {
        self.next();
        let escaped = self.peek(0) == Some('\\');
        if escaped || self.peek(1) == Some('\'') {
            self.next();
            if escaped {
                // The escaped character may be a quote.
                self.next();
            }
            while self.next().is_some_and(|c| c != '\'') {}
            return Some(Kind::Literal(String::new()));
        }
        while self.peek(0).is_some_and(is_word) {
            self.next();
        }
        None
    }

    fn number(&mut self) -> Kind {
        while let Some(c) = self.peek(0) {
            let fraction = c == '.' && self.peek(1).is_some_and(|c| c.is_ascii_digit());
            if !is_word(c) && !fraction {
                break;
            }
            self.next();
        }
        Kind::Literal(String::new())
    }

    /// An identifier, or a literal with a prefix: `b'x'`, `b"x"`, `c"x"`, `r#"x"#`, `br"x"`. A raw
    /// identifier loses its `r#`.
    fn word(&mut self) -> Kind {
        let mut word = String::new();
        while let Some(c) = self.peek(0).filter(|&c| is_word(c)) {
            word.push(c);
            self.next();
        }
        match (word.as_str(), self.peek(0)) {
            ("b" | "c", Some('"')) => {
                self.next();
                self.string()
            }
            ("b", Some('\'')) => self.quote().unwrap_or(Kind::Word(word)),
            ("r" | "br" | "cr", Some('"')) => self.raw_string(),
            ("r" | "br" | "cr", Some('#')) if matches!(self.peek(1), Some('#' | '"')) => {
                self.raw_string()
            }
            ("r", Some('#')) => {
                self.next();
                self.word()
            }
            _ => Kind::Word(word),
        }
    }
}

fn is_word(c: char) -> bool {
    c == '_' || c.is_alphanumeric()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(source: &str) -> Vec<String> {
        let tokens = tokens(source);
        tokens
            .iter()
            .filter_map(|token| token.word().map(str::to_string))
            .collect()
    }

    #[test]
    fn text_and_comments_are_no_code() {
        let source = r###"
            a // b "
            /* c /* d */ e */ f "g \" h" 'i' '\'' b'\\' r#"j " k"# r"l" b"m" 1.5e3_f32 0..n
            'outer: loop {} r#match
        "###;
        assert_eq!(words(source), ["a", "f", "n", "loop", "match"]);
    }

    #[test]
    fn lines_are_counted_in_strings_and_comments() {
        let tokens = tokens("a\n\"x\ny\" /*\n\n*/ b\nr\"\n\" c");
        let lines: Vec<usize> = tokens.iter().map(|token| token.line).collect();
        assert_eq!(lines, [1, 2, 5, 6, 7]);
    }
}
