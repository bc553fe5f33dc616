//! FlatBuffers, in which Arrow has its metadata: tables whose fields are found by offsets.
//! <https://flatbuffers.dev/internals/>.

/// A place that lies outside of the bytes.
#[derive(Debug)]
pub(super) struct Malformed;

/// Where a file has a message: its first byte, and the bytes of its metadata and of its body.
pub(super) struct Block {
    pub(super) start: u64,
    pub(super) metadata: u64,
    pub(super) body: u64,
}

/// A table.
#[derive(Clone, Copy)]
pub(super) struct Table<'a> {
    bytes: &'a [u8],
    at: usize,
}

fn number<const N: usize>(bytes: &[u8], at: usize) -> Result<[u8; N], Malformed> {
    let found = bytes.get(at..).and_then(|rest| rest.first_chunk());
    found.copied().ok_or(Malformed)
}

/// Where the offset at a place leads.
fn follow(bytes: &[u8], at: usize) -> Result<usize, Malformed> {
    let offset = u32::from_le_bytes(number(bytes, at)?);
    at.checked_add(offset as usize).ok_or(Malformed)
}

impl<'a> Table<'a> {
    /// The table that the bytes are of.
    pub(super) fn root(bytes: &'a [u8]) -> Result<Table<'a>, Malformed> {
        let at = follow(bytes, 0)?;
        Ok(Table { bytes, at })
    }

    /// Where a field is; `None` if it has its default.
    fn field(self, n: usize) -> Result<Option<usize>, Malformed> {
        let back = i32::from_le_bytes(number(self.bytes, self.at)?);
        let fields = usize::try_from(self.at as i64 - i64::from(back)).map_err(|_| Malformed)?;
        let bytes = usize::from(u16::from_le_bytes(number(self.bytes, fields)?));
        // After two sizes.
        let entry = 4 + 2 * n;
        if bytes < entry + 2 {
            return Ok(None);
        }
        let offset = usize::from(u16::from_le_bytes(number(self.bytes, fields + entry)?));
        Ok((offset > 0).then_some(self.at + offset))
    }

    pub(super) fn byte(self, n: usize) -> Result<u8, Malformed> {
        let at = self.field(n)?;
        at.map_or(Ok(0), |at| Ok(number::<1>(self.bytes, at)?[0]))
    }

    pub(super) fn i16(self, n: usize) -> Result<i16, Malformed> {
        let at = self.field(n)?;
        at.map_or(Ok(0), |at| Ok(i16::from_le_bytes(number(self.bytes, at)?)))
    }

    pub(super) fn i32(self, n: usize) -> Result<i32, Malformed> {
        let at = self.field(n)?;
        at.map_or(Ok(0), |at| Ok(i32::from_le_bytes(number(self.bytes, at)?)))
    }

    pub(super) fn i64(self, n: usize) -> Result<i64, Malformed> {
        let at = self.field(n)?;
        at.map_or(Ok(0), |at| Ok(i64::from_le_bytes(number(self.bytes, at)?)))
    }

    pub(super) fn table(self, n: usize) -> Result<Option<Table<'a>>, Malformed> {
        let Some(at) = self.field(n)? else {
            return Ok(None);
        };
        let at = follow(self.bytes, at)?;
        Ok(Some(Table { at, ..self }))
    }

    /// The first element of a vector, and their number; elements have at least `bytes` each.
    fn vector(self, n: usize, bytes: usize) -> Result<(usize, usize), Malformed> {
        let Some(at) = self.field(n)? else {
            return Ok((0, 0));
        };
        let at = follow(self.bytes, at)?;
        let length = u32::from_le_bytes(number(self.bytes, at)?) as usize;
        let all = length.checked_mul(bytes).ok_or(Malformed)?;
        let first = at + 4;
        match first.checked_add(all) {
            Some(end) if end <= self.bytes.len() => Ok((first, length)),
            _ => Err(Malformed),
        }
    }

    pub(super) fn text(self, n: usize) -> Result<String, Malformed> {
        let (at, length) = self.vector(n, 1)?;
        Ok(String::from_utf8_lossy(&self.bytes[at..][..length]).into_owned())
    }

    pub(super) fn tables(self, n: usize) -> Result<Vec<Table<'a>>, Malformed> {
        let (first, length) = self.vector(n, 4)?;
        let table = |i| {
            let at = follow(self.bytes, first + 4 * i)?;
            Ok(Table { at, ..self })
        };
        (0..length).map(table).collect()
    }

    pub(super) fn i64s(self, n: usize) -> Result<Vec<i64>, Malformed> {
        let (first, length) = self.vector(n, 8)?;
        let one = |i| Ok(i64::from_le_bytes(number(self.bytes, first + 8 * i)?));
        (0..length).map(one).collect()
    }

    /// The pairs of numbers of a vector.
    pub(super) fn pairs(self, n: usize) -> Result<Vec<[i64; 2]>, Malformed> {
        let (first, length) = self.vector(n, 16)?;
        let one = |at| Ok(i64::from_le_bytes(number(self.bytes, at)?));
        let pair = |i| Ok([one(first + 16 * i)?, one(first + 16 * i + 8)?]);
        (0..length).map(pair).collect()
    }

    /// The blocks of a vector.
    pub(super) fn blocks(self, n: usize) -> Result<Vec<Block>, Malformed> {
        let (first, length) = self.vector(n, 24)?;
        let size = |n: i64| u64::try_from(n).map_err(|_| Malformed);
        let long = |at| size(i64::from_le_bytes(number(self.bytes, at)?));
        let block = |i| {
            let at = first + 24 * i;
            let metadata = i32::from_le_bytes(number(self.bytes, at + 8)?);
            Ok(Block {
                start: long(at)?,
                metadata: size(i64::from(metadata))?,
                body: long(at + 16)?,
            })
        };
        (0..length).map(block).collect()
    }
}
