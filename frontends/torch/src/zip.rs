//! The parts of zip archives that .pt2 files need: entries that are stored or deflated, with or
//! without the 64-bit records of large files. We have our own reader because it is small and
//! strict: the directory must be at the place that the end of the file gives, an entry must lie
//! before the directory, and its checksum must be right.

use flate2::read::DeflateDecoder;
use std::collections::BTreeMap;
use std::io::{Read, Seek, SeekFrom};

/// An opened archive.
pub(crate) struct Zip<R> {
    reader: R,
    entries: BTreeMap<String, Entry>,
    /// The start of the directory; entries lie before it.
    end: u64,
}

/// An entry of the directory.
struct Entry {
    /// The start of its own header.
    offset: u64,
    /// Bytes in the file.
    stored: u64,
    /// Bytes when inflated.
    size: u64,
    crc: u32,
    method: u16,
    is_encrypted: bool,
}

const STORED: u16 = 0;
const DEFLATED: u16 = 8;

/// Bytes of the record at the end of an archive, without its comment of at most 2^16 - 1 bytes.
const END: usize = 22;
/// Bytes of the 64-bit record that the end may refer to, and of the reference, which lies before
/// the end.
const END_64: usize = 56;
const LOCATOR: usize = 20;
/// Bytes of an entry's header in the directory and before its data, without names and extra fields.
const CENTRAL: usize = 46;
const LOCAL: usize = 30;

/// Little-endian fields of a record, one after the other.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn take(&mut self, n: usize) -> Result<&'a [u8], String> {
        let (head, tail) = self
            .0
            .split_at_checked(n)
            .ok_or("a record of the archive is cut off")?;
        self.0 = tail;
        Ok(head)
    }
    fn number(&mut self, n: usize) -> Result<u64, String> {
        Ok(self
            .take(n)?
            .iter()
            .rev()
            .fold(0, |number, &byte| number << 8 | u64::from(byte)))
    }
    fn signature(&mut self, signature: &[u8; 4], what: &str) -> Result<(), String> {
        if self.take(4)? == signature {
            Ok(())
        } else {
            Err(format!("there is no {what} where it should be"))
        }
    }
}

/// Finds the start of the end record in an archive's last bytes. Its comment ends at the end of the
/// file. If a comment looks like a record too, the last one counts.
fn find_end(tail: &[u8]) -> Option<usize> {
    let is_end = |&at: &usize| {
        let record = &tail[at..];
        record.starts_with(b"PK\x05\x06")
            && usize::from(record[20]) + 256 * usize::from(record[21]) == record.len() - END
    };
    let starts = 0..(tail.len() + 1).saturating_sub(END);
    starts.rev().find(is_end)
}

/// The directory of an archive: its number of entries, size and offset.
fn directory(
    read: &mut impl FnMut(u64, u64) -> Result<Vec<u8>, String>,
    bytes: u64,
) -> Result<(u64, u64, u64), String> {
    let tail = bytes.min((END + usize::from(u16::MAX)) as u64);
    let text = read(bytes - tail, tail)?;
    let at = find_end(&text).ok_or("its end is missing")?;
    let end_at = bytes - tail + at as u64;
    let mut end = Fields(&text[at + 4..]);
    let (disk, first_disk) = (end.number(2)?, end.number(2)?);
    let (mut here, mut total) = (end.number(2)?, end.number(2)?);
    let (mut size, mut offset) = (end.number(4)?, end.number(4)?);
    let mut directory_end = end_at;
    // Numbers that do not fit are in a record of 64-bit fields before this one.
    if total == 0xffff || size == 0xffff_ffff || offset == 0xffff_ffff {
        let locator_at = end_at.checked_sub(LOCATOR as u64);
        let locator_at = locator_at.ok_or("its 64-bit end is missing")?;
        let locator = read(locator_at, LOCATOR as u64)?;
        let mut fields = Fields(&locator);
        fields.signature(b"PK\x06\x07", "64-bit end")?;
        fields.take(4)?;
        directory_end = fields.number(8)?;
        let record = read(directory_end, END_64 as u64)?;
        let mut fields = Fields(&record);
        fields.signature(b"PK\x06\x06", "64-bit end")?;
        fields.take(20)?;
        (here, total) = (fields.number(8)?, fields.number(8)?);
        (size, offset) = (fields.number(8)?, fields.number(8)?);
    }
    if (disk, first_disk) != (0, 0) || here != total {
        return Err("it is one part of several".into());
    }
    let directory = offset.checked_add(size);
    if directory.is_none_or(|end| end > directory_end) {
        return Err("its directory reaches beyond its end".into());
    }
    Ok((total, size, offset))
}

impl<R: Read + Seek> Zip<R> {
    /// Reads the directory of an archive of `bytes` bytes.
    pub(crate) fn open(mut reader: R, bytes: u64) -> Result<Zip<R>, String> {
        let mut read = |offset: u64, n: u64| -> Result<Vec<u8>, String> {
            let fits = offset.checked_add(n).is_some_and(|end| end <= bytes);
            if !fits {
                return Err(format!(
                    "{n} bytes at {offset} are not within the file's {bytes}"
                ));
            }
            read_at(&mut reader, offset, n)
        };
        let (total, size, offset) = directory(&mut read, bytes)?;
        let directory = read(offset, size)?;
        let mut fields = Fields(&directory);
        let mut entries = BTreeMap::new();
        // The directory ends with its bytes, so a false number of entries costs nothing.
        for _ in 0..total {
            let (name, entry) = central(&mut fields)?;
            // torch writes names in ASCII; entries with other names are ignored.
            let Ok(name) = String::from_utf8(name.to_vec()) else {
                continue;
            };
            if entries.contains_key(&name) {
                return Err(format!("two entries have the name {name}"));
            }
            entries.insert(name, entry);
        }
        Ok(Zip {
            reader,
            entries,
            end: offset,
        })
    }

    /// The names of all entries, in order.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.entries.keys().map(String::as_str)
    }

    /// The claimed size of the entry with this name, if any, bytes.
    pub(crate) fn size(&self, name: &str) -> Option<u64> {
        self.entries.get(name).map(|entry| entry.size)
    }

    /// An entry's bytes. The caller has compared [`Zip::size`] with what it may allocate.
    pub(crate) fn read(&mut self, name: &str) -> Result<Vec<u8>, String> {
        let entry = self.entries.get(name).ok_or("there is no such entry")?;
        if entry.is_encrypted {
            return Err("it is encrypted".into());
        }
        let bounds = |from: u64, n: u64| from.checked_add(n).filter(|&end| end <= self.end);
        let outside = "it is not within the archive";
        bounds(entry.offset, LOCAL as u64).ok_or(outside)?;
        let header = read_at(&mut self.reader, entry.offset, LOCAL as u64)?;
        let mut fields = Fields(&header);
        fields.signature(b"PK\x03\x04", "header")?;
        fields.take(22)?;
        // The names and extra fields here may differ in length from those in the directory: torch
        // aligns with them.
        let skipped = LOCAL as u64 + fields.number(2)? + fields.number(2)?;
        let start = bounds(entry.offset, skipped).ok_or(outside)?;
        bounds(start, entry.stored).ok_or(outside)?;
        let bytes = match entry.method {
            STORED if entry.stored == entry.size => read_at(&mut self.reader, start, entry.size)?,
            STORED => return Err("it has two sizes".into()),
            DEFLATED => {
                let stored = read_at(&mut self.reader, start, entry.stored)?;
                let mut bytes = vec![];
                // One byte more than the claimed size, to notice a longer entry.
                let mut inflated =
                    DeflateDecoder::new(&stored[..]).take(entry.size.saturating_add(1));
                inflated
                    .read_to_end(&mut bytes)
                    .map_err(|e| e.to_string())?;
                bytes
            }
            other => {
                return Err(format!(
                    "it is compressed by method {other}; stored and deflated entries are read"
                ));
            }
        };
        if bytes.len() as u64 != entry.size || crc32fast::hash(&bytes) != entry.crc {
            return Err("its bytes are not those that its checksum was taken of".into());
        }
        Ok(bytes)
    }
}

/// `n` bytes at an offset; both are known to be within the file.
fn read_at<R: Read + Seek>(reader: &mut R, offset: u64, n: u64) -> Result<Vec<u8>, String> {
    reader
        .seek(SeekFrom::Start(offset))
        .map_err(|e| e.to_string())?;
    let mut bytes = Vec::with_capacity(usize::try_from(n).map_err(|_| "it is too large")?);
    reader
        .take(n)
        .read_to_end(&mut bytes)
        .map_err(|e| e.to_string())?;
    // The file may have become shorter in the meantime.
    if bytes.len() as u64 == n {
        Ok(bytes)
    } else {
        Err("the file ends before it".into())
    }
}

/// The next entry of a directory, and its name.
fn central<'a>(fields: &mut Fields<'a>) -> Result<(&'a [u8], Entry), String> {
    let mut header = Fields(fields.take(CENTRAL)?);
    header.signature(b"PK\x01\x02", "entry of its directory")?;
    header.take(4)?;
    let (flags, method) = (header.number(2)?, header.number(2)?);
    header.take(4)?;
    let crc = header.number(4)?;
    let (mut stored, mut size) = (header.number(4)?, header.number(4)?);
    let (n_name, n_extra, n_comment) = (header.number(2)?, header.number(2)?, header.number(2)?);
    header.take(8)?;
    let mut offset = header.number(4)?;
    let name = fields.take(n_name as usize)?;
    let mut extra = Fields(fields.take(n_extra as usize)?);
    fields.take(n_comment as usize)?;
    // Fields that overflow are in an extra record, in this order. Anything may follow the last
    // whole record.
    while extra.0.len() >= 4 {
        let (id, n) = (extra.number(2)?, extra.number(2)?);
        let Ok(record) = extra.take(n as usize) else {
            break;
        };
        if id == 1 {
            let mut record = Fields(record);
            for number in [&mut size, &mut stored, &mut offset] {
                if *number == 0xffff_ffff {
                    *number = record.number(8)?;
                }
            }
        }
    }
    let is_encrypted = flags & 1 != 0;
    Ok((
        name,
        Entry {
            offset,
            stored,
            size,
            crc: crc as u32,
            method: method as u16,
            is_encrypted,
        },
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Cursor;

    /// An archive with one entry, `a`, whose directory has 64-bit fields if `wide`, and a comment.
    fn archive(wide: bool, comment: &[u8]) -> Vec<u8> {
        let data = b"abcabc";
        let crc = crc32fast::hash(data).to_le_bytes();
        let number = |n: u64, bytes: usize| n.to_le_bytes()[..bytes].to_vec();
        let or_wide = |n: u64, bytes: usize| number(if wide { u64::MAX } else { n }, bytes);
        let mut bytes = b"PK\x03\x04".to_vec();
        bytes.extend(
            [
                vec![0; 10],
                crc.to_vec(),
                number(6, 4),
                number(6, 4),
                number(1, 2),
                number(3, 2),
            ]
            .concat(),
        );
        bytes.extend(b"a---");
        bytes.extend(data);
        let directory = bytes.len() as u64;
        bytes.extend(b"PK\x01\x02");
        let sizes = [
            or_wide(6, 4),
            or_wide(6, 4),
            number(1, 2),
            number(if wide { 28 } else { 0 }, 2),
        ]
        .concat();
        bytes.extend([vec![0; 12], crc.to_vec(), sizes, vec![0; 10], or_wide(0, 4)].concat());
        bytes.extend(b"a");
        if wide {
            bytes.extend(
                [
                    number(1, 2),
                    number(24, 2),
                    number(6, 8),
                    number(6, 8),
                    number(0, 8),
                ]
                .concat(),
            );
        }
        let end = bytes.len() as u64;
        if wide {
            bytes.extend(b"PK\x06\x06");
            let counts = [
                number(1, 8),
                number(1, 8),
                number(end - directory, 8),
                number(directory, 8),
            ]
            .concat();
            bytes.extend([number(44, 8), vec![0; 12], counts].concat());
            bytes.extend(b"PK\x06\x07");
            bytes.extend([number(0, 4), number(end, 8), number(1, 4)].concat());
        }
        bytes.extend(b"PK\x05\x06");
        let counts = [
            or_wide(1, 2),
            or_wide(1, 2),
            or_wide(end - directory, 4),
            or_wide(directory, 4),
        ]
        .concat();
        bytes.extend([vec![0; 4], counts, number(comment.len() as u64, 2)].concat());
        bytes.extend(comment);
        bytes
    }

    fn read(bytes: &[u8]) -> Result<Vec<u8>, String> {
        Zip::open(Cursor::new(bytes), bytes.len() as u64)?.read("a")
    }

    #[test]
    fn small_and_large_fields_are_read() {
        for wide in [false, true] {
            for comment in [
                &b""[..],
                b"a comment",
                b"PK\x05\x06 that looks like an end of an archive",
            ] {
                assert_eq!(
                    read(&archive(wide, comment)).unwrap(),
                    b"abcabc",
                    "{wide} {comment:?}"
                );
            }
        }
    }

    #[test]
    fn every_flipped_bit_is_noticed_or_harmless() {
        for wide in [false, true] {
            let mut bytes = archive(wide, b"");
            for bit in 0..8 * bytes.len() {
                bytes[bit / 8] ^= 1 << (bit % 8);
                if let Ok(data) = read(&bytes) {
                    assert_eq!(data, b"abcabc", "bit {bit}");
                }
                bytes[bit / 8] ^= 1 << (bit % 8);
            }
            for end in 0..bytes.len() {
                assert!(read(&bytes[..end]).is_err(), "{end}");
            }
        }
    }
}
