//! The pages of a column in a row group: a dictionary, if there is one, and pages with levels and
//! values.

use super::encoding::{Hybrid, Values};
use super::schema::Leaf;
use super::thrift::Value;
use crate::codec::Codec;
use crate::{Error, Place, Sink, Source};

/// A column in a row group.
pub(super) struct Chunk {
    pub(super) codec: Codec,
    /// Values, nulls and lists without elements.
    pub(super) values: u64,
    /// The first byte of its pages, and the one after the last.
    pub(super) start: u64,
    pub(super) end: u64,
}

/// The header of a page is looked for in this many bytes, then in this many.
const HEADERS: [u64; 2] = [1 << 12, 1 << 22];

/// What is in a page.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Data,
    /// The levels are not compressed.
    DataV2,
    Dictionary,
    /// An index.
    Other,
}

/// A page as it lies in the file.
struct Page {
    kind: Kind,
    bytes: Vec<u8>,
    /// Its bytes when they are inflated.
    size: usize,
    n: u64,
    encoding: i64,
    /// The encodings of levels.
    level_encodings: [i64; 2],
    /// Of a page whose levels are not compressed: their bytes, and whether the values are.
    levels: [usize; 2],
    is_compressed: bool,
}

/// The levels and values of a page.
struct Parts<'a> {
    n: u64,
    repeated: Option<Hybrid<'a>>,
    defined: Option<Hybrid<'a>>,
    values: Values<'a>,
}

/// Gives the values of pages to a sink.
pub(super) struct Decoder<'a> {
    column: &'a str,
    leaf: &'a Leaf,
    sink: &'a mut dyn Sink,
    /// Rows that have begun.
    rows: u64,
    /// Whether the last one is a list that may go on.
    is_open: bool,
}

impl<'a> Decoder<'a> {
    pub(super) fn new(column: &'a str, leaf: &'a Leaf, sink: &'a mut dyn Sink) -> Decoder<'a> {
        Decoder {
            column,
            leaf,
            sink,
            rows: 0,
            is_open: false,
        }
    }

    /// The number of rows so far.
    pub(super) fn rows(&self) -> u64 {
        self.rows
    }

    /// Reads all pages of a chunk.
    pub(super) fn chunk(&mut self, source: &dyn Source, chunk: &Chunk) -> Result<(), Error> {
        let end = chunk.end.min(source.length());
        let (mut at, mut left) = (chunk.start, chunk.values);
        let mut dictionary = None;
        while left > 0 {
            let page = Page::read(source, &mut at, end)?;
            if page.kind == Kind::Other {
                continue;
            }
            let bytes = page.inflate(chunk.codec)?;
            if page.kind == Kind::Dictionary {
                dictionary = Some(self.dictionary(&page, &bytes)?);
                continue;
            }
            let parts = self.parts(&page, &bytes, dictionary.as_deref());
            let parts = parts.ok_or_else(|| unreadable(&page))?;
            left = left.checked_sub(parts.n).ok_or_else(damaged)?;
            self.take(parts)?;
        }
        self.end_list()
    }

    fn dictionary(&self, page: &Page, bytes: &[u8]) -> Result<Vec<i64>, Error> {
        let mut values = Values::Plain(bytes, self.leaf.width);
        // Invariant: nothing is allocated for integers that are not there.
        let values: Vec<i64> = std::iter::from_fn(|| values.next()).collect();
        match values.len() as u64 == page.n {
            true => Ok(values),
            false => Err(damaged()),
        }
    }

    /// The levels and values in a page's bytes. `None` if they are malformed.
    fn parts<'b>(
        &self,
        page: &Page,
        bytes: &'b [u8],
        dictionary: Option<&'b [i64]>,
    ) -> Option<Parts<'b>> {
        let most = [u32::from(self.leaf.element.is_some()), self.leaf.defined];
        let (mut levels, mut rest) = ([None, None], bytes);
        for k in 0..2 {
            let length = match (page.kind, most[k]) {
                (Kind::DataV2, _) => page.levels[k],
                (_, 0) => 0,
                // Only runs and packed numbers; the other encoding was replaced in 2013.
                _ if page.level_encodings[k] != 3 => return None,
                _ => {
                    let (length, after) = rest.split_first_chunk::<4>()?;
                    rest = after;
                    usize::try_from(u32::from_le_bytes(*length)).ok()?
                }
            };
            let (coded, after) = rest.split_at_checked(length)?;
            rest = after;
            if most[k] > 0 {
                levels[k] = Some(Hybrid::new(coded, u32::BITS - most[k].leading_zeros())?);
            }
        }
        let [repeated, defined] = levels;
        Some(Parts {
            n: page.n,
            repeated,
            defined,
            values: Values::new(page.encoding, rest, self.leaf.width, dictionary)?,
        })
    }

    /// Gives the values to the sink.
    fn take(&mut self, mut parts: Parts<'_>) -> Result<(), Error> {
        let leaf = self.leaf;
        for _ in 0..parts.n {
            let level = |levels: &mut Option<Hybrid<'_>>, none: u32| match levels {
                Some(levels) => levels.next().ok_or_else(damaged),
                None => Ok(u64::from(none)),
            };
            let repeated = level(&mut parts.repeated, 0)?;
            let defined = level(&mut parts.defined, leaf.defined)?;
            match repeated {
                0 => {
                    self.end_list()?;
                    self.rows += 1;
                    self.is_open = leaf.element.is_some();
                }
                _ if !self.is_open => return Err(damaged()),
                _ => {}
            }
            if defined == u64::from(leaf.defined) {
                let value = parts.values.next().ok_or_else(damaged)?;
                self.give(value)?;
                continue;
            }
            // A list without elements ends one level below them.
            let element = leaf.element.map(u64::from);
            if element.is_none_or(|element| defined + 1 < element) {
                return Err(self.place().is_null());
            }
            if element.is_some_and(|element| defined >= element) {
                return Err(self.place().has_null());
            }
        }
        Ok(())
    }

    fn give(&mut self, value: i64) -> Result<(), Error> {
        let value = match (self.leaf.unsigned, self.leaf.width) {
            (true, 4) => i64::from(value as u32),
            (true, _) if value < 0 => return Err(self.place().too_large()),
            _ => value,
        };
        self.sink.integer(value).map_err(Error::Sink)
    }

    /// The row under way.
    fn place(&self) -> Place<'_> {
        Place {
            column: self.column,
            row: self.rows.saturating_sub(1),
        }
    }

    fn end_list(&mut self) -> Result<(), Error> {
        if std::mem::take(&mut self.is_open) {
            self.sink.list_ends().map_err(Error::Sink)?;
        }
        Ok(())
    }
}

impl Page {
    /// Reads the page at a position, and goes on behind it.
    fn read(source: &dyn Source, at: &mut u64, end: u64) -> Result<Page, Error> {
        let rest = end.saturating_sub(*at);
        let mut page = None;
        for most in HEADERS {
            let head = source.read(*at, most.min(rest) as usize)?;
            if let Some((header, after)) = Value::read(&head) {
                let length = (head.len() - after.len()) as u64;
                page = Page::of(&header).map(|(page, stored, crc)| (page, length, stored, crc));
                break;
            }
            if rest <= most {
                break;
            }
        }
        let (mut page, length, stored, crc) = page.ok_or_else(damaged)?;
        if stored > rest - length {
            return Err(damaged());
        }
        page.bytes = source.read(*at + length, stored as usize)?;
        *at += length + stored;
        if crc.is_some_and(|crc| crc != crc32fast::hash(&page.bytes)) {
            return Err(Error::file(
                "the file is damaged: a page's checksum is wrong",
            ));
        }
        Ok(page)
    }

    /// A page without its bytes, from its header; the number of bytes, and their checksum.
    fn of(header: &Value<'_>) -> Option<(Page, u64, Option<u32>)> {
        let (kind, of_kind) = match header.int(1)? {
            0 => (Kind::Data, header.field(5)),
            2 => (Kind::Dictionary, header.field(7)),
            3 => (Kind::DataV2, header.field(8)),
            _ => (Kind::Other, None),
        };
        let mut page = Page {
            kind,
            bytes: vec![],
            size: usize::try_from(header.size(2)?).ok()?,
            n: 0,
            encoding: 0,
            level_encodings: [3; 2],
            levels: [0; 2],
            is_compressed: true,
        };
        if kind != Kind::Other {
            page.n = of_kind?.size(1)?;
        }
        match (kind, of_kind) {
            (Kind::Data, Some(data)) => {
                page.encoding = data.int(2)?;
                page.level_encodings = [data.int(4)?, data.int(3)?];
            }
            (Kind::DataV2, Some(data)) => {
                page.encoding = data.int(4)?;
                let bytes = |field| usize::try_from(data.size(field)?).ok();
                page.levels = [bytes(6)?, bytes(5)?];
                page.is_compressed = data.bool(7).unwrap_or(true);
            }
            _ => {}
        }
        let crc = header.int(4).map(|crc| crc as u32);
        Some((page, header.size(3)?, crc))
    }

    /// The page's bytes without compression.
    fn inflate(&self, codec: Codec) -> Result<Vec<u8>, Error> {
        if self.kind != Kind::DataV2 {
            return codec.inflate(&self.bytes, self.size);
        }
        let levels = self.levels[0].checked_add(self.levels[1]);
        let parts = levels.and_then(|levels| {
            let rest = self.size.checked_sub(levels)?;
            Some((self.bytes.split_at_checked(levels)?, rest))
        });
        let ((levels, values), rest) = parts.ok_or_else(damaged)?;
        // A page of nulls alone has no values to compress.
        let values = match self.is_compressed && !values.is_empty() {
            true => codec.inflate(values, rest)?,
            false => Codec::Plain.inflate(values, rest)?,
        };
        Ok([levels, &values].concat())
    }
}

fn damaged() -> Error {
    Error::file("the file is damaged: a page of the column cannot be read")
}

/// A page that is malformed, or has an encoding that is not for integers.
fn unreadable(page: &Page) -> Error {
    match page.encoding {
        0 | 2 | 5 | 8 | 9 => damaged(),
        other => Error::File(format!(
            "a page of the column has the encoding {other}, which is not one of integers"
        )),
    }
}
