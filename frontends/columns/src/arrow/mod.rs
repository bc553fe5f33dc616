//! Arrow's format for files and streams: a schema, then batches of rows, each with its buffers. The
//! index at a file's end says where each batch is: some writers, such as polars, leave gaps between
//! batches.

mod batch;
mod flat;
mod schema;

use crate::{Error, Sink, Source, choose};
use batch::Batch;
use flat::{Block, Malformed, Table};
use schema::Column;

/// What a file begins and ends with.
const MAGIC: &[u8] = b"ARROW1";
/// The length of the index, and the magic.
const TAIL: u64 = 10;
/// What a message begins with.
const CONTINUES: u32 = u32::MAX;
/// More bytes than the metadata of a message have, data sets' descriptions in them included.
const MOST_METADATA: u64 = 1 << 26;
/// The version of metadata since Arrow 1.0.
const V5: i16 = 4;

/// Kinds of messages.
const SCHEMA: u8 = 1;
const BATCH: u8 = 3;

impl From<Malformed> for Error {
    fn from(Malformed: Malformed) -> Error {
        Error::file("the file is damaged: the metadata of a message cannot be read")
    }
}

/// Reads a column of a file.
pub(crate) fn read_file(
    source: &dyn Source,
    name: Option<&str>,
    sink: &mut dyn Sink,
) -> Result<(), Error> {
    let cut = || Error::file("not a whole Arrow file: its end is missing");
    let end = source.length().checked_sub(TAIL).ok_or_else(cut)?;
    let tail = source.read(end, TAIL as usize)?;
    let (index, magic) = tail.split_first_chunk::<4>().ok_or_else(cut)?;
    let length = u64::from(u32::from_le_bytes(*index));
    if magic != MAGIC || length > MOST_METADATA {
        return Err(cut());
    }
    let end = end.checked_sub(length).ok_or_else(cut)?;
    let index = source.read(end, length as usize)?;
    let index = Table::root(&index)?;
    is_current(index)?;
    let column = chosen(index.table(1)?.ok_or(Malformed)?, name)?;
    let mut rows = 0;
    for Block {
        start,
        metadata,
        body,
    } in index.blocks(3)?
    {
        let mut at = start;
        let metadata_bytes = message(source, &mut at, end)?.ok_or(Malformed)?;
        let from = start.checked_add(metadata).ok_or(Malformed)?;
        let body = (from, from.checked_add(body).ok_or(Malformed)?);
        if body.1 > end {
            return Err(not_whole());
        }
        let message = Table::root(&metadata_bytes)?;
        if message.byte(1)? != BATCH {
            return Err(Malformed.into());
        }
        let header = message.table(2)?.ok_or(Malformed)?;
        Batch::new(source, &column, header, body)?.read(&mut rows, sink)?;
    }
    Ok(())
}

/// Reads a column of a stream.
pub(crate) fn read_stream(
    source: &dyn Source,
    name: Option<&str>,
    sink: &mut dyn Sink,
) -> Result<(), Error> {
    let (mut at, end) = (0, source.length());
    let mut column: Option<Column> = None;
    let mut rows = 0;
    let mut has_ended = false;
    while at < end {
        let Some(metadata) = message(source, &mut at, end)? else {
            has_ended = true;
            break;
        };
        let message = Table::root(&metadata)?;
        is_current(message)?;
        let header = message.table(2)?.ok_or(Malformed)?;
        let bytes = u64::try_from(message.i64(3)?).map_err(|_| Malformed)?;
        let body = (at, at.saturating_add(bytes));
        if body.1 > end {
            return Err(not_whole());
        }
        match (message.byte(1)?, &column) {
            (SCHEMA, None) => column = Some(chosen(header, name)?),
            (SCHEMA, Some(_)) => return Err(Error::file("the file has two schemas")),
            (BATCH, Some(column)) => {
                Batch::new(source, column, header, body)?.read(&mut rows, sink)?;
            }
            // Values of dictionaries.
            (_, Some(_)) => {}
            (_, None) => return Err(Error::file("the file does not begin with a schema")),
        }
        at = body.1;
    }
    match (column, has_ended) {
        (None, _) => Err(Error::file("the file has no schema")),
        (Some(_), false) => Err(Error::file(
            "not a whole Arrow stream: its end is missing; was it closed?",
        )),
        (Some(_), true) => Ok(()),
    }
}

fn not_whole() -> Error {
    Error::file("the file is cut: a batch is not whole")
}

/// An error if an index or a message is older than what is read here.
fn is_current(table: Table<'_>) -> Result<(), Error> {
    match table.i16(0)? < V5 {
        true => Err(Error::file("the file is older than Arrow 1.0")),
        false => Ok(()),
    }
}

/// The metadata of the message at a position, and goes on behind them; `None` at the end.
fn message(source: &dyn Source, at: &mut u64, end: u64) -> Result<Option<Vec<u8>>, Error> {
    let cut = || Error::file("the file is cut: a message is not whole");
    if end.checked_sub(8).is_none_or(|last| *at > last) {
        return Err(cut());
    }
    let head = source.read(*at, 8)?;
    let (continues, length) = head.split_at(4);
    if continues != CONTINUES.to_le_bytes() {
        return Err(Error::file(
            "the file is damaged: no message where one begins",
        ));
    }
    let length = length.iter().rev().fold(0, |n, &b| n << 8 | u64::from(b));
    *at += 8;
    if length == 0 {
        return Ok(None);
    }
    if length > end - *at || length > MOST_METADATA {
        return Err(cut());
    }
    let metadata = source.read(*at, length as usize)?;
    *at += length;
    Ok(Some(metadata))
}

/// The column to read.
fn chosen(schema: Table<'_>, name: Option<&str>) -> Result<Column, Error> {
    if schema.i16(0)? != 0 {
        return Err(Error::file("its numbers are in big-endian order"));
    }
    let mut columns = schema::columns(schema)?;
    let named: Vec<_> = columns.iter().map(Column::named).collect();
    Ok(columns.swap_remove(choose(&named, name)?))
}
