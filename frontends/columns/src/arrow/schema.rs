//! The columns of an Arrow file, and where a batch has the nodes and buffers of one.

use super::flat::{Malformed, Table};
use crate::Named;

/// Fields of a schema, those in others included.
const MOST_FIELDS: usize = 1 << 16;
/// Fields in fields.
const MOST_DEPTH: usize = 32;

/// A column: a top-level field.
pub(super) struct Column {
    pub(super) name: String,
    text: String,
    /// If it has integers or lists of integers.
    pub(super) layout: Option<Layout>,
}

impl Column {
    pub(super) fn named(&self) -> Named {
        Named {
            name: self.name.clone(),
            text: self.text.clone(),
            fits: self.layout.is_some(),
        }
    }
}

/// Where a batch has a column.
#[derive(Clone, Copy)]
pub(super) struct Layout {
    /// Nodes and buffers before it.
    pub(super) node: usize,
    pub(super) buffer: usize,
    /// Fields before it whose numbers of buffers the batch says.
    pub(super) views: usize,
    pub(super) shape: Shape,
    pub(super) width: usize,
    pub(super) unsigned: bool,
}

/// What a row is.
#[derive(Clone, Copy)]
pub(super) enum Shape {
    Integer,
    /// A list, between two offsets of this many bytes.
    List(usize),
    /// A list of this length.
    Fixed(u64),
}

/// Fields of tables.
mod field {
    pub(super) const NAME: usize = 0;
    pub(super) const KIND: usize = 2;
    pub(super) const TYPE: usize = 3;
    pub(super) const DICTIONARY: usize = 4;
    pub(super) const CHILDREN: usize = 5;
}

const INT: u8 = 2;
const LIST: u8 = 12;
const FIXED_LIST: u8 = 16;
const LARGE_LIST: u8 = 21;

/// What came before.
#[derive(Default)]
struct Counts {
    fields: usize,
    nodes: usize,
    buffers: usize,
    views: usize,
}

/// All columns.
pub(super) fn columns(schema: Table<'_>) -> Result<Vec<Column>, Malformed> {
    let mut before = Counts::default();
    let mut columns = vec![];
    for top in schema.tables(1)? {
        let (node, buffer, views) = (before.nodes, before.buffers, before.views);
        let (text, found) = integers(top)?;
        let layout = found.map(|(shape, width, unsigned)| Layout {
            node,
            buffer,
            views,
            shape,
            width,
            unsigned,
        });
        columns.push(Column {
            name: top.text(field::NAME)?,
            text,
            layout,
        });
        count(top, 0, &mut before)?;
    }
    Ok(columns)
}

/// Adds the nodes and buffers of a field and those in it.
fn count(of: Table<'_>, depth: usize, counts: &mut Counts) -> Result<(), Malformed> {
    counts.fields += 1;
    // A field may be named more than once, so that their number is exponential in the bytes.
    if counts.fields > MOST_FIELDS || depth > MOST_DEPTH {
        return Err(Malformed);
    }
    counts.nodes += 1;
    if of.table(field::DICTIONARY)?.is_some() {
        // Numbers of values, which are in batches of their own.
        counts.buffers += 2;
        return Ok(());
    }
    counts.buffers += match of.byte(field::KIND)? {
        // Nulls alone; runs, of which each has fields of its own.
        1 | 22 => 0,
        // Validity and what follows: a structure, a list of fixed length.
        13 | FIXED_LIST => 1,
        // Numbers, bytes of fixed length, offsets of lists.
        2 | 3 | 6..=11 | LIST | 15 | 17 | 18 | LARGE_LIST => 2,
        // Offsets and bytes; offsets and sizes.
        4 | 5 | 19 | 20 | 25 | 26 => 3,
        // Validity and views, then as many as the batch says.
        23 | 24 => {
            counts.views += 1;
            2
        }
        // The type of each value, and offsets if the union is dense.
        14 => match of.table(field::TYPE)? {
            Some(union) if union.i16(0)? == 1 => 2,
            _ => 1,
        },
        _ => return Err(Malformed),
    };
    for child in of.tables(field::CHILDREN)? {
        count(child, depth + 1, counts)?;
    }
    Ok(())
}

/// A column's type for people, and if it has integers, the shape, the bytes of one, and whether
/// they have no sign.
type Integers = (String, Option<(Shape, usize, bool)>);

fn integers(of: Table<'_>) -> Result<Integers, Malformed> {
    let (text, found) = integer(of)?;
    if let Some((width, unsigned)) = found {
        return Ok((text, Some((Shape::Integer, width, unsigned))));
    }
    let kind = of.byte(field::KIND)?;
    let shape = match kind {
        LIST => Shape::List(4),
        LARGE_LIST => Shape::List(8),
        FIXED_LIST => {
            let size = match of.table(field::TYPE)? {
                Some(list) => list.i32(0)?,
                None => 0,
            };
            Shape::Fixed(u64::try_from(size).map_err(|_| Malformed)?)
        }
        _ => return Ok((text, None)),
    };
    let children = of.tables(field::CHILDREN)?;
    let [child] = children[..] else {
        return Err(Malformed);
    };
    if of.table(field::DICTIONARY)?.is_some() {
        return Ok((text, None));
    }
    let (text, found) = integer(child)?;
    // Lists of no elements have no bytes that would bound their number.
    let found = found.filter(|_| !matches!(shape, Shape::Fixed(0)));
    let found = found.map(|(width, unsigned)| (shape, width, unsigned));
    Ok((format!("lists of {text}"), found))
}

/// A type's name, and for an integer its bytes and whether it has no sign.
fn integer(of: Table<'_>) -> Result<(String, Option<(usize, bool)>), Malformed> {
    let name = |name: &str| Ok((name.to_string(), None));
    if of.table(field::DICTIONARY)?.is_some() {
        return name("values of a dictionary");
    }
    match of.byte(field::KIND)? {
        INT => {}
        1 => return name("nulls"),
        3 => return name("floating-point numbers"),
        4 | 15 | 19 | 23 => return name("bytes"),
        5 | 20 | 24 => return name("text"),
        6 => return name("booleans"),
        7..=11 | 18 => return name("dates, times or decimals"),
        LIST | FIXED_LIST | LARGE_LIST | 25 | 26 => return name("lists"),
        13 | 14 | 17 => return name("a structure"),
        _ => return name("another type"),
    }
    let int = of.table(field::TYPE)?.ok_or(Malformed)?;
    let (bits, unsigned) = (int.i32(0)?, int.byte(1)? == 0);
    let width = match bits {
        8 | 16 | 32 | 64 => bits as usize / 8,
        _ => return Err(Malformed),
    };
    let sign = if unsigned { "u" } else { "" };
    Ok((format!("{sign}int{bits}"), Some((width, unsigned))))
}
