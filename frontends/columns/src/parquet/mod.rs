//! A Parquet file: its columns, and the pages of one of them. The metadata are at the end.

mod encoding;
mod pages;
mod schema;
mod thrift;

use crate::codec::Codec;
use crate::{Error, Sink, Source, choose};
use pages::{Chunk, Decoder};
use schema::Leaf;
use thrift::Value;

/// What every file begins and ends with.
const MAGIC: &[u8] = b"PAR1";
/// The length of the metadata and the magic.
const TAIL: u64 = 8;
/// More bytes than the metadata of any column store have. In memory they take some 40 times that.
const MOST_METADATA: u64 = 1 << 26;

/// Reads a column.
pub(crate) fn read(
    source: &dyn Source,
    name: Option<&str>,
    sink: &mut dyn Sink,
) -> Result<(), Error> {
    let footer = footer(source)?;
    let metadata = Value::read(&footer).map(|(value, _)| value);
    let metadata = metadata.ok_or_else(|| damaged("metadata"))?;
    let columns = schema::columns(&metadata).ok_or_else(|| damaged("schema"))?;
    let named: Vec<_> = columns.iter().map(schema::Column::named).collect();
    let column = &columns[choose(&named, name)?];
    let leaf = column.leaf.as_ref().ok_or_else(|| damaged("schema"))?;

    let groups = metadata.list(4).ok_or_else(|| damaged("metadata"))?;
    let mut decoder = Decoder::new(&column.name, leaf, sink);
    for (number, group) in groups.iter().enumerate() {
        let what = || damaged(&format!("row group {number}"));
        let rows = group.size(3).ok_or_else(what)?;
        let chunk = chunk(group, leaf).ok_or_else(what)??;
        let before = decoder.rows();
        decoder.chunk(source, &chunk)?;
        let found = decoder.rows() - before;
        if found != rows {
            return Err(Error::File(format!(
                "the file is damaged: row group {number} has {found} rows, and should have {rows}"
            )));
        }
    }
    Ok(())
}

fn damaged(what: &str) -> Error {
    Error::File(format!("the file is damaged: its {what} cannot be read"))
}

/// The bytes of the metadata.
fn footer(source: &dyn Source) -> Result<Vec<u8>, Error> {
    let cut = || Error::file("not a whole Parquet file: its end is missing");
    let end = source.length().checked_sub(TAIL).ok_or_else(cut)?;
    let tail = source.read(end, TAIL as usize)?;
    let (length, magic) = tail.split_first_chunk::<4>().ok_or_else(cut)?;
    match magic {
        MAGIC => {}
        b"PARE" => return Err(Error::file("the file is encrypted")),
        _ => return Err(cut()),
    }
    let length = u64::from(u32::from_le_bytes(*length));
    if length > MOST_METADATA {
        return Err(Error::File(format!(
            "its metadata have {length} bytes, and at most {MOST_METADATA} are read"
        )));
    }
    let start = end.checked_sub(length).ok_or_else(cut)?;
    Ok(source.read(start, length as usize)?)
}

/// Where a row group has the column. `None` if it is malformed, an error for what is not read.
fn chunk(group: &Value<'_>, leaf: &Leaf) -> Option<Result<Chunk, Error>> {
    let column = group.list(1)?.get(leaf.number)?;
    let refused = |why: &str| Some(Err(Error::file(why)));
    if column.field(1).is_some() {
        return refused("its columns are in other files");
    }
    if column.field(8).is_some() || column.field(9).is_some() {
        return refused("the column is encrypted");
    }
    let metadata = column.field(3)?;
    let codec = match metadata.int(4)? {
        0 => Codec::Plain,
        1 => Codec::Snappy,
        2 => Codec::Gzip,
        6 => Codec::Zstd,
        7 => Codec::Lz4Block,
        other => {
            let name = match other {
                3 => "LZO",
                4 => "Brotli",
                5 => "an old form of LZ4",
                _ => "an unknown codec",
            };
            return refused(&format!(
                "the column is compressed with {name}; write it with zstd, snappy, gzip, lz4 or \
                 without compression"
            ));
        }
    };
    let data = metadata.size(9)?;
    let dictionary = metadata.size(11).filter(|&at| at > 0);
    let start = dictionary.map_or(data, |at| at.min(data));
    Some(Ok(Chunk {
        codec,
        values: metadata.size(5)?,
        start,
        end: start.checked_add(metadata.size(7)?)?,
    }))
}
