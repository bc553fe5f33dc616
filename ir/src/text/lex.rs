//! Text to tokens. The end of a line is a token; a comment is not.

use super::{ParseError, is_word};
use std::fmt;

/// A piece of text.
#[derive(Clone, PartialEq, Debug)]
pub(super) enum Token<'a> {
    /// A bare name, a keyword, a number.
    Word(&'a str),
    /// A quoted name with resolved escapes.
    Quoted(String),
    /// One of `% { } [ ] : = , @ + ^ |`.
    Sign(char),
    /// `->`
    Arrow,
    /// One or more ends of line.
    Newline,
    /// The end of the text.
    End,
}

impl fmt::Display for Token<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Token::Word(word) => write!(f, "{}", shortened(word)),
            Token::Quoted(name) => write!(f, "the quoted name {:?}", shortened(name)),
            Token::Sign(sign) => write!(f, "`{sign}`"),
            Token::Arrow => f.write_str("`->`"),
            Token::Newline => f.write_str("the end of the line"),
            Token::End => f.write_str("the end of the text"),
        }
    }
}

/// At most forty characters, so that a message fits on a line.
pub(super) fn shortened(text: &str) -> String {
    match text.char_indices().nth(40) {
        Some((end, _)) => format!("{}..", &text[..end]),
        None => text.to_string(),
    }
}

/// A position in a text, with its token.
pub(super) struct Lexer<'a> {
    text: &'a str,
    /// The start of `token`, bytes.
    start: usize,
    /// The end of `token`, bytes.
    end: usize,
    /// The token at the position.
    pub(super) token: Token<'a>,
}

impl<'a> Lexer<'a> {
    /// At the first token of a text.
    pub(super) fn new(text: &'a str) -> Result<Lexer<'a>, ParseError> {
        let mut lexer = Lexer {
            text,
            start: 0,
            end: 0,
            token: Token::End,
        };
        lexer.advance()?;
        // A text may start with empty lines and comments.
        if lexer.token == Token::Newline {
            lexer.advance()?;
        }
        Ok(lexer)
    }

    /// The start of the token, bytes from the start of the text.
    pub(super) fn position(&self) -> usize {
        self.start
    }

    /// An error at the token.
    pub(super) fn error(&self, message: impl Into<String>) -> ParseError {
        self.error_at(self.start, message)
    }

    /// An error at a position that [`Lexer::position`] gave.
    pub(super) fn error_at(&self, position: usize, message: impl Into<String>) -> ParseError {
        let before = &self.text[..position];
        let line_start = before.rfind('\n').map_or(0, |i| i + 1);
        ParseError {
            line: before.bytes().filter(|&b| b == b'\n').count() + 1,
            column: before[line_start..].chars().count() + 1,
            message: message.into(),
        }
    }

    /// Moves to the next token.
    pub(super) fn advance(&mut self) -> Result<(), ParseError> {
        let bytes = self.text.as_bytes();
        let mut at = self.end;
        let mut newline = None;
        while let Some(&byte) = bytes.get(at) {
            match byte {
                b' ' | b'\t' | b'\r' => at += 1,
                b'\n' => {
                    newline.get_or_insert(at);
                    at += 1;
                }
                b';' => at = self.text[at..].find('\n').map_or(bytes.len(), |n| at + n),
                _ => break,
            }
        }
        if let Some(start) = newline {
            (self.start, self.end, self.token) = (start, at, Token::Newline);
            return Ok(());
        }
        self.start = at;
        let Some(&byte) = bytes.get(at) else {
            (self.end, self.token) = (at, Token::End);
            return Ok(());
        };
        (self.end, self.token) = match byte {
            b'-' if bytes.get(at + 1) == Some(&b'>') => (at + 2, Token::Arrow),
            b'"' => self.quoted(at)?,
            b'%' | b'{' | b'}' | b'[' | b']' | b':' | b'=' | b',' | b'@' | b'+' | b'^' | b'|' => {
                (at + 1, Token::Sign(char::from(byte)))
            }
            _ if is_word(byte) => {
                // The `-` of an arrow that follows without a space is not part of the word.
                let ends = |i: usize| {
                    !is_word(bytes[i]) || (bytes[i] == b'-' && bytes.get(i + 1) == Some(&b'>'))
                };
                let end = (at..bytes.len()).find(|&i| ends(i)).unwrap_or(bytes.len());
                (end, Token::Word(&self.text[at..end]))
            }
            _ => {
                let found = self.text[at..].chars().next().unwrap_or(' ');
                return Err(self.error(format!("the character {found:?} should stand in quotes")));
            }
        };
        Ok(())
    }

    /// The quoted name that starts at `start`, and its end.
    fn quoted(&self, start: usize) -> Result<(usize, Token<'a>), ParseError> {
        let mut name = String::new();
        let mut chars = self.text[start + 1..].char_indices();
        while let Some((i, c)) = chars.next() {
            match c {
                '"' => return Ok((start + 1 + i + 1, Token::Quoted(name))),
                '\n' => break,
                '\\' => {
                    let at = start + 1 + i;
                    let unknown = || {
                        self.error_at(at, "an escape should be \\\" \\\\ \\n \\r \\t or \\u{hex}")
                    };
                    name.push(match chars.next().ok_or_else(unknown)?.1 {
                        '"' => '"',
                        '\\' => '\\',
                        'n' => '\n',
                        'r' => '\r',
                        't' => '\t',
                        'u' => {
                            // At most six digits, so the number cannot overflow.
                            let hex = chars.as_str().strip_prefix('{').and_then(|rest| {
                                let digits = rest
                                    .bytes()
                                    .take_while(u8::is_ascii_hexdigit)
                                    .take(7)
                                    .count();
                                let fits = (1..=6).contains(&digits)
                                    && rest.as_bytes().get(digits) == Some(&b'}');
                                fits.then(|| &rest[..digits])
                            });
                            let hex = hex.ok_or_else(unknown)?;
                            for _ in 0..hex.len() + 2 {
                                chars.next();
                            }
                            let code = u32::from_str_radix(hex, 16).ok().and_then(char::from_u32);
                            code.ok_or_else(unknown)?
                        }
                        _ => return Err(unknown()),
                    });
                }
                c => name.push(c),
            }
        }
        Err(self.error_at(start, "this quote is not closed on its line"))
    }
}
