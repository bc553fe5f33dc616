//! The header of NumPy's `.npy` files: an array of integers of one dimension.
//! The format: <https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html>.

use super::files::Input;
use super::span::{Integer, Span};
use crate::failure::Failure;

/// What every file begins with.
const MAGIC: &[u8] = b"\x93NUMPY";
/// Bytes of the magic and the two numbers of the version.
const VERSION_END: usize = 8;
/// More bytes than any header of an array without fields.
const MOST_HEADER_BYTES: usize = 1 << 16;

/// Where the file's integers lie.
pub(super) fn span(input: &Input) -> Result<Span, Failure> {
    let refused = |why: &str| {
        let path = input.path().display();
        Failure::Input(format!("{path}: {why}"))
    };
    let read = |start: usize, length: usize| {
        let bytes = input.read(start as u64, length);
        bytes.map_err(|_| refused("not a whole .npy file: its header is cut"))
    };
    let head = read(0, VERSION_END)?;
    if !head.starts_with(MAGIC) {
        return Err(refused("not a .npy file"));
    }
    // Version 1 has the length of the header in two bytes, later ones in four.
    let width = if head[MAGIC.len()] == 1 { 2 } else { 4 };
    let length = read(VERSION_END, width)?;
    let length = length.iter().rev().fold(0, |n, &b| n << 8 | usize::from(b));
    if length > MOST_HEADER_BYTES {
        return Err(refused(
            "not a .npy file of one array: its header is too long",
        ));
    }
    let start = VERSION_END + width;
    let header = read(start, length)?;
    let header = String::from_utf8_lossy(&header);

    let integer = value(&header, "descr").and_then(integer);
    let integer = integer.ok_or_else(|| {
        let found = value(&header, "descr").unwrap_or("nothing");
        refused(&format!(
            "its elements are {found}; they should be integers in little-endian order, such as \
             '<u2' or '<i8'"
        ))
    })?;
    let count = value(&header, "shape").and_then(count);
    let count = count.ok_or_else(|| {
        let found = value(&header, "shape").unwrap_or("nothing");
        refused(&format!(
            "its shape is {found}; tokens have one dimension: save array.reshape(-1)"
        ))
    })?;
    let span = Span {
        start: (start + length) as u64,
        count,
        integer,
    };
    match span.end().is_some_and(|end| end <= input.length()) {
        true => Ok(span),
        false => Err(refused(&format!(
            "not a whole .npy file: it should have {count} elements of {} bytes after its header",
            integer.bytes
        ))),
    }
}

/// The text of a value in the header, which is a dictionary in Python's notation: a string with its
/// quotes, or a tuple with its brackets.
fn value<'a>(header: &'a str, key: &str) -> Option<&'a str> {
    let at = header.find(&format!("'{key}'"))?;
    let (_, rest) = header[at..].split_once(':')?;
    let rest = rest.trim_start();
    let end = match rest.chars().next()? {
        '(' => rest.find(')')? + 1,
        quote @ ('\'' | '"') => rest[1..].find(quote)? + 2,
        _ => rest.find([',', '}'])?,
    };
    Some(&rest[..end])
}

/// `'<u2'`.
fn integer(descr: &str) -> Option<Integer> {
    let descr = descr.trim_matches('\'');
    // A byte has no order.
    let kind = descr.strip_prefix(['<', '|'])?;
    Some(match kind {
        "u1" => Integer::new(1, false),
        "i1" => Integer::new(1, true),
        "u2" => Integer::new(2, false),
        "i2" => Integer::new(2, true),
        "u4" => Integer::new(4, false),
        "i4" => Integer::new(4, true),
        "u8" => Integer::new(8, false),
        "i8" => Integer::new(8, true),
        _ => return None,
    })
}

/// `(1000,)`.
fn count(shape: &str) -> Option<u64> {
    let inner = shape.strip_prefix('(')?.strip_suffix(')')?;
    inner.trim().strip_suffix(',')?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_are_read() {
        let header = "{'descr': '<u2', 'fortran_order': False, 'shape': (1000,), }   \n";
        assert_eq!(value(header, "descr"), Some("'<u2'"));
        assert_eq!(value(header, "shape"), Some("(1000,)"));
        assert_eq!(count("(1000,)"), Some(1000));
        for shape in [
            "()",
            "(2, 3)",
            "(,)",
            "1000",
            "(-1,)",
            "(99999999999999999999,)",
        ] {
            assert_eq!(count(shape), None, "{shape}");
        }
        assert_eq!(integer("'<i8'"), Some(Integer::new(8, true)));
        for descr in ["'>u2'", "'<f4'", "'|b1'", "'<U5'", "''", "[('a', '<u2')]"] {
            assert_eq!(integer(descr), None, "{descr}");
        }
        assert_eq!(value("{'descr': '<u2", "descr"), None);
    }
}
