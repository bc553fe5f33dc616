//! The rows of a batch, from the buffers of a column: streams that are read side by side.

use super::flat::{Malformed, Table};
use super::schema::{Column, Layout, Shape};
use crate::codec::Codec;
use crate::section::Section;
use crate::{Error, Place, Sink, Source};
use std::io::{self, Read};

/// A column in a batch.
pub(super) struct Batch<'a> {
    source: &'a dyn Source,
    column: &'a str,
    layout: Layout,
    rows: u64,
    codec: Option<Codec>,
    /// The number of values of each node.
    nodes: Vec<u64>,
    /// The positions of each buffer.
    buffers: Vec<(u64, u64)>,
}

impl<'a> Batch<'a> {
    /// The batch with this header, whose buffers lie between two positions.
    pub(super) fn new(
        source: &'a dyn Source,
        column: &'a Column,
        header: Table<'_>,
        body: (u64, u64),
    ) -> Result<Batch<'a>, Error> {
        let size = |n: i64| u64::try_from(n).map_err(|_| Malformed);
        let layout = column.layout.ok_or(Malformed)?;
        let codec = match header.table(3)? {
            None => None,
            Some(compression) => Some(match compression.byte(0)? {
                0 => Codec::Lz4Frame,
                1 => Codec::Zstd,
                _ => return Err(Error::file("a batch is compressed with an unknown codec")),
            }),
        };
        let more = header.i64s(4)?;
        let more = more.get(..layout.views).ok_or(Malformed)?;
        let more = more.iter().try_fold(0u64, |n, &views| {
            n.checked_add(size(views)?).ok_or(Malformed)
        })?;
        let first = usize::try_from(more).map_err(|_| Malformed)?;
        let first = first.checked_add(layout.buffer).ok_or(Malformed)?;

        let n = match layout.shape {
            Shape::Integer => 1,
            Shape::List(_) | Shape::Fixed(_) => 2,
        };
        let nodes = header.pairs(1)?;
        let nodes = nodes.get(layout.node..).and_then(|nodes| nodes.get(..n));
        let nodes = nodes.ok_or(Malformed)?.iter();
        let nodes: Vec<u64> = nodes.map(|node| size(node[0])).collect::<Result<_, _>>()?;
        let buffer = |&[offset, length]: &[i64; 2]| {
            let start = body.0.checked_add(size(offset)?).ok_or(Malformed)?;
            let end = start.checked_add(size(length)?).ok_or(Malformed)?;
            (end <= body.1).then_some((start, end)).ok_or(Malformed)
        };
        let buffers = header.pairs(2)?;
        let buffers = buffers.get(first..).ok_or(Malformed)?.iter().take(4);
        let buffers = buffers.map(buffer).collect::<Result<_, _>>()?;
        Ok(Batch {
            source,
            column: &column.name,
            layout,
            rows: size(header.i64(0)?)?,
            codec,
            nodes,
            buffers,
        })
    }

    /// Gives the rows to a sink; `before` is the number of rows before them.
    pub(super) fn read(&self, before: &mut u64, sink: &mut dyn Sink) -> Result<(), Error> {
        if self.nodes[0] != self.rows {
            return Err(Malformed.into());
        }
        let mut validity = Validity::of(self.buffer(0)?);
        let mut lists = match self.layout.shape {
            Shape::Integer => None,
            Shape::List(width) => {
                let offsets = self.buffer(1)?;
                // Without rows there may be no offsets.
                if offsets.is_none() && self.rows > 0 {
                    return Err(Malformed.into());
                }
                Some(Lists::new(width, offsets)?)
            }
            Shape::Fixed(length) => Some(Lists::Fixed(length)),
        };
        let mut values = match self.layout.shape {
            Shape::Integer => Values::new(self.layout, None, self.buffer(1)?),
            Shape::List(_) => Values::new(self.layout, self.buffer(2)?, self.buffer(3)?),
            Shape::Fixed(_) => Values::new(self.layout, self.buffer(1)?, self.buffer(2)?),
        };
        if let Some(lists) = &lists {
            values.skip(lists.first())?;
        }
        for _ in 0..self.rows {
            let place = Place {
                column: self.column,
                row: *before,
            };
            if !validity.next()? {
                return Err(place.is_null());
            }
            let n = match &mut lists {
                None => 1,
                Some(lists) => lists.next()?,
            };
            for _ in 0..n {
                sink.integer(values.next(&place)?).map_err(Error::Sink)?;
            }
            if lists.is_some() {
                sink.list_ends().map_err(Error::Sink)?;
            }
            *before += 1;
        }
        // Invariant: the batch has no more values than its node says.
        match self.nodes.last() {
            Some(&n) if values.taken <= n => Ok(()),
            _ => Err(Malformed.into()),
        }
    }

    /// A buffer of the column as a stream; `None` if it is empty.
    fn buffer(&self, n: usize) -> Result<Option<Box<dyn Read + 'a>>, Error> {
        let &(start, end) = self.buffers.get(n).ok_or(Malformed)?;
        if start == end {
            return Ok(None);
        }
        let Some(codec) = self.codec else {
            return Ok(Some(Box::new(Section::new(self.source, start, end))));
        };
        let mut section = Section::new(self.source, start, end);
        let mut size = [0; 8];
        section.read_exact(&mut size)?;
        Ok(match i64::from_le_bytes(size) {
            // Some buffers become no smaller.
            -1 => Some(Box::new(section)),
            0 => None,
            size => {
                let size = u64::try_from(size).map_err(|_| Malformed)?;
                Some(Box::new(codec.stream(section)?.take(size)))
            }
        })
    }
}

/// Which values are not null. Without bits all are valid.
struct Validity<'a> {
    bits: Option<Box<dyn Read + 'a>>,
    byte: u8,
    /// Bits that are left of the byte.
    left: u32,
}

impl<'a> Validity<'a> {
    fn of(bits: Option<Box<dyn Read + 'a>>) -> Validity<'a> {
        Validity {
            bits,
            byte: 0,
            left: 0,
        }
    }

    fn next(&mut self) -> io::Result<bool> {
        let Some(bits) = &mut self.bits else {
            return Ok(true);
        };
        if self.left == 0 {
            let mut byte = [0];
            bits.read_exact(&mut byte)?;
            (self.byte, self.left) = (byte[0], 8);
        }
        let is_valid = self.byte & 1 != 0;
        self.byte >>= 1;
        self.left -= 1;
        Ok(is_valid)
    }
}

/// The lengths of lists.
enum Lists<'a> {
    /// Offsets of this many bytes: the first, and the last that was read.
    Offsets(Box<dyn Read + 'a>, usize, [u64; 2]),
    /// All have this length.
    Fixed(u64),
}

impl<'a> Lists<'a> {
    fn new(width: usize, offsets: Option<Box<dyn Read + 'a>>) -> Result<Lists<'a>, Error> {
        let Some(mut offsets) = offsets else {
            return Ok(Lists::Fixed(0));
        };
        let first = offset(&mut offsets, width)?;
        Ok(Lists::Offsets(offsets, width, [first; 2]))
    }

    /// The number of values before the first list.
    fn first(&self) -> u64 {
        match self {
            Lists::Offsets(_, _, [first, _]) => *first,
            Lists::Fixed(_) => 0,
        }
    }

    fn next(&mut self) -> Result<u64, Error> {
        match self {
            Lists::Fixed(length) => Ok(*length),
            Lists::Offsets(offsets, width, [_, last]) => {
                let next = offset(offsets, *width)?;
                let length = next.checked_sub(*last);
                *last = next;
                length.ok_or_else(|| Malformed.into())
            }
        }
    }
}

fn offset(from: &mut dyn Read, width: usize) -> Result<u64, Error> {
    let mut bytes = [0; 8];
    from.read_exact(&mut bytes[..width])?;
    // A negative one is beyond the end of any buffer.
    Ok(u64::from_le_bytes(bytes))
}

/// The integers of a column, or those in its lists.
struct Values<'a> {
    layout: Layout,
    validity: Validity<'a>,
    bytes: Option<Box<dyn Read + 'a>>,
    taken: u64,
}

impl<'a> Values<'a> {
    fn new(
        layout: Layout,
        validity: Option<Box<dyn Read + 'a>>,
        bytes: Option<Box<dyn Read + 'a>>,
    ) -> Values<'a> {
        Values {
            layout,
            validity: Validity::of(validity),
            bytes,
            taken: 0,
        }
    }

    /// The bytes of the next value, and whether it is valid.
    fn raw(&mut self) -> Result<(u64, bool), Error> {
        let is_valid = self.validity.next()?;
        let bytes = self.bytes.as_mut();
        let bytes = bytes.ok_or_else(|| Error::file("the file is damaged: values are missing"))?;
        let mut wide = [0; 8];
        bytes.read_exact(&mut wide[..self.layout.width])?;
        self.taken += 1;
        Ok((u64::from_le_bytes(wide), is_valid))
    }

    fn skip(&mut self, n: u64) -> Result<(), Error> {
        (0..n).try_for_each(|_| self.raw().map(|_| ()))
    }

    fn next(&mut self, place: &Place<'_>) -> Result<i64, Error> {
        let (raw, is_valid) = self.raw()?;
        if !is_valid {
            return Err(place.has_null());
        }
        if self.layout.unsigned {
            return i64::try_from(raw).map_err(|_| place.too_large());
        }
        let unused = u64::BITS - 8 * self.layout.width as u32;
        Ok((raw << unused) as i64 >> unused)
    }
}
