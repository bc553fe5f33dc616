//! Files that are cut or changed: an error, or integers, but no panic, and no memory that the file
//! does not justify.

use crate::common::{Bytes, Column, column, file};
use lighterage_columns::{Sink, Source, read};
use std::io;

const FILES: [&str; 13] = [
    "plain.parquet",
    "dictionary.parquet",
    "snappy.parquet",
    "gzip_v2.parquet",
    "lz4.parquet",
    "zstd_delta.parquet",
    "split_v2.parquet",
    "stream.arrow",
    "others.arrow",
    "stream_zstd.arrow",
    "fixed_lz4.arrow",
    "sliced.feather",
    "polars.arrow",
];

#[test]
fn a_file_that_is_cut_is_refused() {
    for name in FILES {
        let whole = file(name);
        for n in 0..whole.len() {
            assert!(column(whole[..n].to_vec(), None).is_err(), "{name} {n}");
        }
    }
}

/// A source that counts what is asked of it, and a sink that ends a column which never would.
struct Counted(Bytes);

impl Source for Counted {
    fn length(&self) -> u64 {
        self.0.length()
    }

    fn read(&self, start: u64, length: usize) -> io::Result<Vec<u8>> {
        assert!(length as u64 <= self.length(), "{length} bytes at once");
        self.0.read(start, length)
    }
}

struct Few(Column);

impl Sink for Few {
    fn integer(&mut self, integer: i64) -> io::Result<()> {
        self.0.integer(integer)?;
        enough(self.0.integers.len())
    }

    fn list_ends(&mut self) -> io::Result<()> {
        self.0.list_ends()?;
        enough(self.0.ends.len())
    }
}

fn enough(n: usize) -> io::Result<()> {
    match n < 1 << 12 {
        true => Ok(()),
        false => Err(io::Error::other("enough")),
    }
}

#[test]
fn a_file_that_is_changed_is_read_or_refused() {
    for name in FILES {
        let whole = file(name);
        let expected = column(whole.clone(), None).unwrap();
        let mut refused = 0;
        for at in 0..whole.len() {
            for change in [0x01, 0x80, 0xFF] {
                let mut changed = whole.clone();
                changed[at] ^= change;
                let mut found = Few(Column::default());
                let result = read(&Counted(Bytes(changed)), None, &mut found);
                refused += usize::from(result.is_err() || found.0 != expected);
            }
        }
        assert!(refused > whole.len() / 4, "{name}: {refused}");
    }
}

#[test]
fn sizes_that_a_file_only_states_take_no_memory() {
    // A page header that says that the page has 2^31 - 1 bytes, in files of each codec.
    for name in &FILES[..7] {
        let whole = file(name);
        for at in 4..whole.len() - 6 {
            let mut changed = whole.clone();
            // The largest positive number of 32 bits, as Thrift writes it.
            changed[at..at + 5].copy_from_slice(&[0xFE, 0xFF, 0xFF, 0xFF, 0x0F]);
            let mut found = Few(Column::default());
            let _ = read(&Counted(Bytes(changed)), None, &mut found);
        }
    }
    #[cfg(target_os = "linux")]
    {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let kib = peak
            .and_then(|peak| peak.trim().strip_suffix(" kB"))
            .unwrap();
        assert!(kib.parse::<u64>().unwrap() < 256 << 10, "{kib} KiB");
    }
}
