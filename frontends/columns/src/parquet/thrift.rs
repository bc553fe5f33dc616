//! Thrift's compact protocol, in which Parquet has its metadata:
//! <https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md>.

use crate::bits::{varint, zigzag};

/// Structs in structs; Parquet has fewer.
const MOST_DEPTH: u32 = 24;

/// A value.
#[derive(Debug)]
pub(super) enum Value<'a> {
    Bool(bool),
    Int(i64),
    Bytes(&'a [u8]),
    List(Vec<Value<'a>>),
    Struct(Vec<(i16, Value<'a>)>),
    /// What Parquet's metadata of columns does not need: maps, floating-point numbers.
    Other,
}

impl<'a> Value<'a> {
    /// Reads a struct; returns it and the bytes after it. `None` if it is cut or malformed.
    pub(super) fn read(bytes: &'a [u8]) -> Option<(Value<'a>, &'a [u8])> {
        let mut reader = Reader { rest: bytes };
        let value = reader.fields(0)?;
        Some((value, reader.rest))
    }

    /// A field of a struct.
    pub(super) fn field(&self, number: i16) -> Option<&Value<'a>> {
        let Value::Struct(fields) = self else {
            return None;
        };
        let found = fields.iter().find(|(n, _)| *n == number);
        found.map(|(_, value)| value)
    }

    pub(super) fn int(&self, number: i16) -> Option<i64> {
        match self.field(number)? {
            Value::Int(value) => Some(*value),
            _ => None,
        }
    }

    /// A size or a position.
    pub(super) fn size(&self, number: i16) -> Option<u64> {
        self.int(number).and_then(|size| u64::try_from(size).ok())
    }

    pub(super) fn bool(&self, number: i16) -> Option<bool> {
        match self.field(number)? {
            Value::Bool(value) => Some(*value),
            _ => None,
        }
    }

    pub(super) fn bytes(&self, number: i16) -> Option<&'a [u8]> {
        match self.field(number)? {
            Value::Bytes(value) => Some(value),
            _ => None,
        }
    }

    pub(super) fn list(&self, number: i16) -> Option<&[Value<'a>]> {
        match self.field(number)? {
            Value::List(values) => Some(values),
            _ => None,
        }
    }
}

struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    fn take(&mut self, n: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.rest.split_at_checked(n)?;
        self.rest = rest;
        Some(taken)
    }

    fn byte(&mut self) -> Option<u8> {
        self.take(1).map(|taken| taken[0])
    }

    fn varint(&mut self) -> Option<u64> {
        let (value, rest) = varint(self.rest)?;
        self.rest = rest;
        Some(value)
    }

    fn fields(&mut self, depth: u32) -> Option<Value<'a>> {
        if depth > MOST_DEPTH {
            return None;
        }
        let (mut fields, mut number) = (vec![], 0i16);
        loop {
            let head = self.byte()?;
            if head == 0 {
                return Some(Value::Struct(fields));
            }
            number = match head >> 4 {
                0 => i16::try_from(zigzag(self.varint()?)).ok()?,
                more => number.checked_add(i16::from(more))?,
            };
            let value = match head & 0xF {
                1 => Value::Bool(true),
                2 => Value::Bool(false),
                kind => self.value(kind, depth)?,
            };
            fields.push((number, value));
        }
    }

    fn value(&mut self, kind: u8, depth: u32) -> Option<Value<'a>> {
        Some(match kind {
            // Within a list.
            1 | 2 => Value::Bool(self.byte()? == 1),
            3 => Value::Int(i64::from(self.byte()? as i8)),
            4..=6 => Value::Int(zigzag(self.varint()?)),
            7 => {
                self.take(8)?;
                Value::Other
            }
            8 => {
                let length = usize::try_from(self.varint()?).ok()?;
                Value::Bytes(self.take(length)?)
            }
            9 | 10 => self.list(depth)?,
            11 => self.map(depth)?,
            12 => self.fields(depth + 1)?,
            _ => return None,
        })
    }

    fn list(&mut self, depth: u32) -> Option<Value<'a>> {
        let head = self.byte()?;
        let length = match head >> 4 {
            15 => self.varint()?,
            length => u64::from(length),
        };
        // An element has at least a byte.
        let length = usize::try_from(length).ok();
        let length = length.filter(|&length| length <= self.rest.len())?;
        let mut values = vec![];
        for _ in 0..length {
            values.push(self.nested(head & 0xF, depth)?);
        }
        Some(Value::List(values))
    }

    fn map(&mut self, depth: u32) -> Option<Value<'a>> {
        let length = self.varint()?;
        if length > 0 {
            let kinds = self.byte()?;
            for _ in 0..length {
                self.nested(kinds >> 4, depth)?;
                self.nested(kinds & 0xF, depth)?;
            }
        }
        Some(Value::Other)
    }

    fn nested(&mut self, kind: u8, depth: u32) -> Option<Value<'a>> {
        if depth > MOST_DEPTH {
            return None;
        }
        self.value(kind, depth + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn structs_are_read() {
        // 1: 150; 2: true; 4: [1, -1]; 5: {1: "a"}; 100: 7.
        let bytes = [
            0x15, 0xAC, 0x02, 0x11, 0x29, 0x25, 0x02, 0x01, 0x1C, 0x18, 0x01, b'a', 0x00, 0x05,
            0xC8, 0x01, 0x0E, 0x00, 0x99,
        ];
        let (value, rest) = Value::read(&bytes).unwrap();
        assert_eq!(rest, [0x99]);
        assert_eq!(value.int(1), Some(150));
        assert_eq!(value.bool(2), Some(true));
        assert!(matches!(
            value.list(4),
            Some([Value::Int(1), Value::Int(-1)])
        ));
        let inner = value.field(5).unwrap();
        assert_eq!(inner.bytes(1), Some(&b"a"[..]));
        assert_eq!(value.int(100), Some(7));
        assert_eq!((value.size(3), value.size(2)), (None, None));
        for n in 0..bytes.len() - 1 {
            assert!(Value::read(&bytes[..n]).is_none(), "{n}");
        }
    }

    #[test]
    fn what_is_nested_too_deeply_is_refused() {
        assert!(Value::read(&[0x1C; 4096]).is_none());
        assert!(Value::read(&[&[0x19][..], &[0x19; 4096]].concat()).is_none());
    }
}
