//! Python's pickles, limited to data: containers, strings, numbers.
//!
//! A pickle is a program for a stack machine, and it can do harm because it can import, call and
//! build objects. Here it cannot: an opcode that is not data is an error with its name and place.
//! Protocols 2 to 5 of `pickle.dump` are supported; opcodes have the names of Python's
//! `pickletools`.
//!
//! Values are in one table and refer to each other by number, so a shared value exists once, and a
//! value may contain itself. An opcode has at least one byte and makes at most one value and one
//! entry on the stack, so memory is in proportion to the file. No function is recursive.

use crate::Error;
use std::collections::HashMap;
use std::ops::Range;

/// A value's number.
pub type Id = u32;

/// A value. It refers to other values by their numbers.
#[derive(Clone, PartialEq, Debug)]
pub enum Value {
    /// `None`.
    None,
    /// `True`, `False`.
    Bool(bool),
    /// A whole number; larger ones are refused.
    Int(i128),
    /// Other numbers.
    Float(f64),
    /// Text: its bytes in the file.
    Text(Range<usize>),
    /// Bytes of the file.
    Bytes(Range<usize>),
    /// A list.
    List(Vec<Id>),
    /// A tuple.
    Tuple(Vec<Id>),
    /// Keys and values in their order; of equal keys the last one counts.
    Dict(Vec<(Id, Id)>),
    /// A set, frozen or not.
    Set(Vec<Id>),
}

/// A pickle that has been read.
pub struct Pickle<'a> {
    bytes: &'a [u8],
    values: Vec<Value>,
    root: Id,
}

impl<'a> Pickle<'a> {
    /// The value that was pickled.
    pub fn root(&self) -> Id {
        self.root
    }

    /// The number of values; ids are below this.
    pub fn len(&self) -> usize {
        self.values.len()
    }

    /// Never true: a pickle has at least one value.
    pub fn is_empty(&self) -> bool {
        self.values.is_empty()
    }

    /// The value with this id.
    pub fn value(&self, id: Id) -> &Value {
        &self.values[id as usize]
    }

    /// The value's text, if it is a text of at most 64 KiB.
    pub fn text(&self, id: Id) -> Option<&'a str> {
        match self.value(id) {
            Value::Text(range) if range.len() <= MOST_TEXT => {
                std::str::from_utf8(&self.bytes[range.clone()]).ok()
            }
            _ => None,
        }
    }

    /// The value of a key in a dictionary; none if the dictionary has more than 1024 entries.
    pub fn get(&self, dict: Id, key: &str) -> Option<Id> {
        let is_key = |id: Id| match self.value(id) {
            Value::Text(range) => self.bytes[range.clone()] == *key.as_bytes(),
            _ => false,
        };
        match self.value(dict) {
            Value::Dict(entries) if entries.len() <= MOST_ENTRIES => entries
                .iter()
                .rev()
                .find(|&&(key, _)| is_key(key))
                .map(|&(_, value)| value),
            _ => None,
        }
    }

    /// The items of a list or tuple.
    pub fn items(&self, id: Id) -> Option<&[Id]> {
        match self.value(id) {
            Value::List(items) | Value::Tuple(items) => Some(items),
            _ => None,
        }
    }
}

/// Limits for texts and dictionaries: a pickle may share them, so they may be read many times.
const MOST_TEXT: usize = 1 << 16;
const MOST_ENTRIES: usize = 1 << 10;

/// Opcodes that are not data, with their names.
const FORBIDDEN: [(u8, &str); 15] = [
    (b'c', "GLOBAL"),
    (0x93, "STACK_GLOBAL"),
    (b'R', "REDUCE"),
    (b'b', "BUILD"),
    (b'i', "INST"),
    (b'o', "OBJ"),
    (0x81, "NEWOBJ"),
    (0x92, "NEWOBJ_EX"),
    (b'P', "PERSID"),
    (b'Q', "BINPERSID"),
    (0x82, "EXT1"),
    (0x83, "EXT2"),
    (0x84, "EXT4"),
    (0x97, "NEXT_BUFFER"),
    (0x98, "READONLY_BUFFER"),
];

/// Opcodes of protocols 0 and 1 that are written as text.
const TEXTUAL: &[u8] = b"SVILFgpd";

/// The largest number of values: ids have 32 bits.
const MOST_VALUES: usize = u32::MAX as usize;

struct Machine<'a> {
    bytes: &'a [u8],
    at: usize,
    values: Vec<Value>,
    stack: Vec<Id>,
    /// Heights of the stack at its marks.
    marks: Vec<usize>,
    memo: HashMap<u32, Id>,
}

/// Reads a pickle. The file must end with it.
pub fn read(bytes: &[u8]) -> Result<Pickle<'_>, Error> {
    let mut machine = Machine {
        bytes,
        at: 0,
        values: vec![],
        stack: vec![],
        marks: vec![],
        memo: HashMap::new(),
    };
    loop {
        let at = machine.at;
        match machine.step() {
            Ok(None) => {}
            Ok(Some(root)) => {
                return Ok(Pickle {
                    bytes,
                    values: machine.values,
                    root,
                });
            }
            Err(message) => return Err(Error::new(format!("byte {at}"), message)),
        }
    }
}

impl<'a> Machine<'a> {
    fn take(&mut self, n: usize) -> Result<&'a [u8], String> {
        let rest = &self.bytes[self.at..];
        if rest.len() < n {
            return Err(format!(
                "the file is cut off: {n} bytes are needed and {} are left",
                rest.len()
            ));
        }
        self.at += n;
        Ok(&rest[..n])
    }

    /// A number of `n` bytes, the lowest first.
    fn number(&mut self, n: usize) -> Result<u64, String> {
        Ok(self
            .take(n)?
            .iter()
            .rev()
            .fold(0, |number, &byte| number << 8 | u64::from(byte)))
    }

    /// The bytes of something whose length is a number of `n` bytes.
    fn range(&mut self, n: usize) -> Result<Range<usize>, String> {
        let length = self.number(n)?;
        let left = self.bytes.len() - self.at;
        if (left as u64) < length {
            return Err(format!("a length of {length} bytes, and {left} are left"));
        }
        let start = self.at;
        self.at += length as usize;
        Ok(start..self.at)
    }

    fn push(&mut self, value: Value) -> Result<(), String> {
        if MOST_VALUES <= self.values.len() {
            return Err(format!("more than {MOST_VALUES} values"));
        }
        self.stack.push(self.values.len() as Id);
        self.values.push(value);
        Ok(())
    }

    /// The stack's height at the last mark.
    fn floor(&self) -> usize {
        self.marks.last().copied().unwrap_or(0)
    }

    fn pop(&mut self) -> Result<Id, String> {
        if self.stack.len() <= self.floor() {
            return Err("the stack is empty".into());
        }
        self.stack.pop().ok_or_else(|| "the stack is empty".into())
    }

    fn top(&self) -> Result<Id, String> {
        let above = &self.stack[self.floor()..];
        above
            .last()
            .copied()
            .ok_or_else(|| "the stack is empty".into())
    }

    /// Pops the entries above the last mark.
    fn pop_mark(&mut self) -> Result<Vec<Id>, String> {
        let mark = self.marks.pop().ok_or("there is no mark on the stack")?;
        Ok(self.stack.split_off(mark))
    }

    fn append(&mut self, items: &[Id]) -> Result<(), String> {
        let list = self.top()?;
        match &mut self.values[list as usize] {
            Value::List(list) => list.extend_from_slice(items),
            other => return Err(format!("something is appended to {}", kind(other))),
        }
        Ok(())
    }

    fn set_items(&mut self, items: &[Id]) -> Result<(), String> {
        if items.len() % 2 == 1 {
            return Err("a key without a value".into());
        }
        let dict = self.top()?;
        match &mut self.values[dict as usize] {
            Value::Dict(dict) => dict.extend(items.chunks_exact(2).map(|pair| (pair[0], pair[1]))),
            other => return Err(format!("a key is set in {}", kind(other))),
        }
        Ok(())
    }

    fn tuple(&mut self, n: usize) -> Result<(), String> {
        let mut items = vec![];
        for _ in 0..n {
            items.push(self.pop()?);
        }
        items.reverse();
        self.push(Value::Tuple(items))
    }

    fn put(&mut self, index: u64) -> Result<(), String> {
        let top = self.top()?;
        self.memo.insert(index as u32, top);
        Ok(())
    }

    fn get(&mut self, index: u64) -> Result<(), String> {
        let found = self.memo.get(&(index as u32)).copied();
        self.stack
            .push(found.ok_or_else(|| format!("the memo has no entry {index}"))?);
        Ok(())
    }

    fn text(&mut self, n: usize) -> Result<(), String> {
        let range = self.range(n)?;
        self.push(Value::Text(range))
    }

    fn raw(&mut self, n: usize) -> Result<(), String> {
        let range = self.range(n)?;
        self.push(Value::Bytes(range))
    }

    /// A whole number of any length, in two's complement.
    fn long(&mut self, n: usize) -> Result<(), String> {
        let range = self.range(n)?;
        let bytes = &self.bytes[range];
        if bytes.len() > 16 {
            return Err(format!(
                "a number of {} bytes: 16 are the most",
                bytes.len()
            ));
        }
        let negative = bytes.last().is_some_and(|&byte| byte >= 128);
        let mut whole = [if negative { 255 } else { 0 }; 16];
        whole[..bytes.len()].copy_from_slice(bytes);
        self.push(Value::Int(i128::from_le_bytes(whole)))
    }

    /// Carries out an opcode. Returns the result if it was the last.
    fn step(&mut self) -> Result<Option<Id>, String> {
        let opcode = self.take(1)?[0];
        match opcode {
            // PROTO
            0x80 => match self.number(1)? {
                2..=5 => {}
                version => return Err(format!("protocol {version}: 2 to 5 are known")),
            },
            // FRAME: a hint for readers.
            0x95 => {
                self.number(8)?;
            }
            b'.' => return self.pop().map(Some),
            b'N' => self.push(Value::None)?,
            0x88 => self.push(Value::Bool(true))?,
            0x89 => self.push(Value::Bool(false))?,
            // BININT, BININT1, BININT2, LONG1, LONG4
            b'J' => {
                let number = self.number(4)? as u32 as i32;
                self.push(Value::Int(number.into()))?;
            }
            b'K' => {
                let number = self.number(1)?;
                self.push(Value::Int(number.into()))?;
            }
            b'M' => {
                let number = self.number(2)?;
                self.push(Value::Int(number.into()))?;
            }
            0x8a => self.long(1)?,
            0x8b => self.long(4)?,
            // BINFLOAT: the highest byte first.
            b'G' => {
                let number = f64::from_bits(self.number(8)?.swap_bytes());
                self.push(Value::Float(number))?;
            }
            // SHORT_BINUNICODE, BINUNICODE, BINUNICODE8
            0x8c => self.text(1)?,
            b'X' => self.text(4)?,
            0x8d => self.text(8)?,
            // SHORT_BINSTRING, BINSTRING: text of Python 2. SHORT_BINBYTES, BINBYTES, BINBYTES8,
            // BYTEARRAY8
            b'U' => self.text(1)?,
            b'T' => self.text(4)?,
            b'C' => self.raw(1)?,
            b'B' => self.raw(4)?,
            0x8e | 0x96 => self.raw(8)?,
            // EMPTY_LIST, APPEND, APPENDS, LIST
            b']' => self.push(Value::List(vec![]))?,
            b'a' => {
                let item = self.pop()?;
                self.append(&[item])?;
            }
            b'e' => {
                let items = self.pop_mark()?;
                self.append(&items)?;
            }
            b'l' => {
                let items = self.pop_mark()?;
                self.push(Value::List(items))?;
            }
            // EMPTY_TUPLE, TUPLE1, TUPLE2, TUPLE3, TUPLE
            b')' => self.tuple(0)?,
            0x85 => self.tuple(1)?,
            0x86 => self.tuple(2)?,
            0x87 => self.tuple(3)?,
            b't' => {
                let items = self.pop_mark()?;
                self.push(Value::Tuple(items))?;
            }
            // EMPTY_DICT, SETITEM, SETITEMS
            b'}' => self.push(Value::Dict(vec![]))?,
            b's' => {
                let value = self.pop()?;
                let key = self.pop()?;
                self.set_items(&[key, value])?;
            }
            b'u' => {
                let items = self.pop_mark()?;
                self.set_items(&items)?;
            }
            // EMPTY_SET, ADDITEMS, FROZENSET
            0x8f => self.push(Value::Set(vec![]))?,
            0x90 => {
                let items = self.pop_mark()?;
                let set = self.top()?;
                match &mut self.values[set as usize] {
                    Value::Set(set) => set.extend(items),
                    other => return Err(format!("something is added to {}", kind(other))),
                }
            }
            0x91 => {
                let items = self.pop_mark()?;
                self.push(Value::Set(items))?;
            }
            // MARK, POP, POP_MARK, DUP
            b'(' => self.marks.push(self.stack.len()),
            b'0' => {
                // At a mark it pops the mark.
                if self.pop().is_err() && self.marks.pop().is_none() {
                    return Err("the stack is empty".into());
                }
            }
            b'1' => {
                self.pop_mark()?;
            }
            b'2' => {
                let top = self.top()?;
                self.stack.push(top);
            }
            // BINPUT, LONG_BINPUT, MEMOIZE, BINGET, LONG_BINGET
            b'q' => {
                let index = self.number(1)?;
                self.put(index)?;
            }
            b'r' => {
                let index = self.number(4)?;
                self.put(index)?;
            }
            0x94 => self.put(self.memo.len() as u64)?,
            b'h' => {
                let index = self.number(1)?;
                self.get(index)?;
            }
            b'j' => {
                let index = self.number(4)?;
                self.get(index)?;
            }
            _ => return Err(self.refusal(opcode)),
        }
        Ok(None)
    }

    /// Why an opcode is not executed.
    fn refusal(&self, opcode: u8) -> String {
        if let Some((_, name)) = FORBIDDEN
            .iter()
            .find(|&&(forbidden, _)| forbidden == opcode)
        {
            let what = match opcode {
                b'c' | b'i' => self.lines(),
                0x93 => self.names(),
                _ => String::new(),
            };
            return format!(
                "the opcode {name}{what} runs code: only containers, strings and numbers are read"
            );
        }
        match TEXTUAL.contains(&opcode) {
            true => {
                format!(
                    "the opcode {:?} is one of protocol 0: write the file with protocol 2 or later",
                    opcode as char
                )
            }
            false => format!("the byte {opcode:#04x} is no opcode"),
        }
    }

    /// The module and name that follow GLOBAL.
    fn lines(&self) -> String {
        let mut lines = self.bytes[self.at..]
            .split(|&byte| byte == b'\n')
            .map(shown);
        format!(
            " {}.{}",
            lines.next().unwrap_or_default(),
            lines.next().unwrap_or_default()
        )
    }

    /// The module and name on the stack.
    fn names(&self) -> String {
        let names =
            self.stack
                .iter()
                .rev()
                .take(2)
                .rev()
                .map(|&id| match &self.values[id as usize] {
                    Value::Text(range) => shown(&self.bytes[range.clone()]),
                    other => kind(other).into(),
                });
        format!(" {}", names.collect::<Vec<_>>().join("."))
    }
}

/// The beginning of bytes that may not be text.
fn shown(bytes: &[u8]) -> String {
    String::from_utf8_lossy(&bytes[..bytes.len().min(60)])
        .escape_debug()
        .to_string()
}

/// A value's kind, in words.
pub(crate) fn kind(value: &Value) -> &'static str {
    match value {
        Value::None => "None",
        Value::Bool(_) => "a bool",
        Value::Int(_) => "an int",
        Value::Float(_) => "a float",
        Value::Text(_) => "a str",
        Value::Bytes(_) => "bytes",
        Value::List(_) => "a list",
        Value::Tuple(_) => "a tuple",
        Value::Dict(_) => "a dict",
        Value::Set(_) => "a set",
    }
}
