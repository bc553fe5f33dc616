//! Files of `data/gen_columns.py`, and what a column has.

use lighterage_columns::{Error, Sink, Source, read};
use std::io;

/// A file in memory.
pub(crate) struct Bytes(pub(crate) Vec<u8>);

impl Source for Bytes {
    fn length(&self) -> u64 {
        self.0.len() as u64
    }

    fn read(&self, start: u64, length: usize) -> io::Result<Vec<u8>> {
        let rest = self.0.get(start as usize..);
        let read = rest.and_then(|rest| rest.get(..length));
        Ok(read.ok_or(io::ErrorKind::UnexpectedEof)?.to_vec())
    }
}

/// The integers of a column, and how many there were at the end of each list.
#[derive(Default, PartialEq, Eq, Debug)]
pub(crate) struct Column {
    pub(crate) integers: Vec<i64>,
    pub(crate) ends: Vec<usize>,
}

impl Sink for Column {
    fn integer(&mut self, integer: i64) -> io::Result<()> {
        self.integers.push(integer);
        Ok(())
    }

    fn list_ends(&mut self) -> io::Result<()> {
        self.ends.push(self.integers.len());
        Ok(())
    }
}

/// A file of the generator.
pub(crate) fn file(name: &str) -> Vec<u8> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data");
    std::fs::read(format!("{folder}/{name}")).unwrap()
}

/// The column of a file.
pub(crate) fn column(bytes: Vec<u8>, name: Option<&str>) -> Result<Column, Error> {
    let mut column = Column::default();
    read(&Bytes(bytes), name, &mut column).map(|()| column)
}
