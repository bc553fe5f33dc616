//! Elements of drawings, as text.

use std::fmt::{Display, Write};

/// An unfinished element: `<NAME A="..."`.
#[must_use]
pub struct Element {
    name: &'static str,
    text: String,
}

/// An element without attributes yet.
pub fn element(name: &'static str) -> Element {
    Element {
        name,
        text: format!("<{name}"),
    }
}

/// A path along `d`.
pub fn path(d: &str) -> Element {
    element("path").with("d", d)
}

impl Element {
    /// Adds an attribute. Its value is ours and needs no escapes.
    pub fn with(mut self, name: &str, value: impl Display) -> Element {
        // Writing to a String cannot fail.
        let _ = write!(self.text, " {name}=\"{value}\"");
        self
    }

    /// Adds a coordinate, to a tenth of a pixel.
    pub fn at(self, name: &str, pixels: f64) -> Element {
        self.with(name, format_args!("{pixels:.1}"))
    }

    /// The element, empty, on a line.
    pub fn empty(self) -> String {
        self.text + "/>\n"
    }

    /// The element with any text.
    pub fn text(self, text: &str) -> String {
        let content = escaped(text);
        self.close(&content)
    }

    /// The element with a description that the viewer shows on demand.
    pub fn titled(self, title: &str) -> String {
        let content = format!("<title>{}</title>", escaped(title));
        self.close(&content)
    }

    fn close(self, content: &str) -> String {
        let Element { name, text } = self;
        format!("{text}>{content}</{name}>\n")
    }
}

/// Text within markup.
pub fn escaped(text: &str) -> String {
    let mut out = String::new();
    for c in text.chars() {
        match c {
            '&' => out += "&amp;",
            '<' => out += "&lt;",
            '>' => out += "&gt;",
            '"' => out += "&quot;",
            // Markup must not contain these at all.
            c if c.is_control() || c == '\u{fffe}' || c == '\u{ffff}' => out.push('\u{fffd}'),
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_are_written() {
        let line = element("line")
            .with("class", "grid")
            .at("x1", 1.25)
            .at("x2", 2.0);
        assert_eq!(
            line.empty(),
            "<line class=\"grid\" x1=\"1.2\" x2=\"2.0\"/>\n"
        );
        let rect = element("rect").with("width", 3);
        assert_eq!(
            rect.titled("a < b"),
            "<rect width=\"3\"><title>a &lt; b</title></rect>\n"
        );
        assert_eq!(element("text").text("\u{1}"), "<text>\u{fffd}</text>\n");
    }
}
