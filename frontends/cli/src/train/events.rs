//! Event files of TensorBoard: scalars by step, as TensorFlow's summary writers write them.
//!
//! A file is a list of records: the length of the data, its checksum, the data, its checksum. The
//! data are the protocol buffer `Event` (tensorflow/core/util/event.proto), of which three fields
//! and one kind of value are needed. So a few lines replace a library of protocol buffers.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

/// The version that readers look for in the first record.
const VERSION: &str = "brain.Event:2";
/// CRC-32C's polynomial, reflected (Castagnoli; RFC 3720).
const POLYNOMIAL: u32 = 0x82F6_3B78;

/// A file of events.
pub(super) struct Events(File);

impl Events {
    /// Makes the folder and a new file in it.
    pub(super) fn create(folder: &Path) -> io::Result<Events> {
        fs::create_dir_all(folder)?;
        let now = now();
        let name = |n: u32| {
            let (seconds, process) = (now as u64, std::process::id());
            format!("events.out.tfevents.{seconds:010}.lighterage.{process}.{n}")
        };
        // Runs of one process and second have numbers.
        let mut n = 0;
        let file = loop {
            match File::create_new(folder.join(name(n))) {
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => n += 1,
                file => break file?,
            }
        };
        let mut events = Events(file);
        let mut event = double_field(1, now);
        event.extend(bytes_field(3, VERSION.as_bytes()));
        events.record(&event)?;
        Ok(events)
    }

    /// Adds values by name for a step.
    pub(super) fn add(&mut self, step: u64, values: &[(&str, f64)]) -> io::Result<()> {
        let mut summary = vec![];
        for (tag, value) in values {
            let mut one = bytes_field(1, tag.as_bytes());
            one.extend(float_field(2, *value as f32));
            summary.extend(bytes_field(1, &one));
        }
        let mut event = double_field(1, now());
        event.extend(integer_field(2, step));
        event.extend(bytes_field(5, &summary));
        self.record(&event)
    }

    /// One write, so that a reader finds no half of a record for long.
    fn record(&mut self, data: &[u8]) -> io::Result<()> {
        let length = (data.len() as u64).to_le_bytes();
        let mut record = length.to_vec();
        record.extend(masked(&length).to_le_bytes());
        record.extend(data);
        record.extend(masked(data).to_le_bytes());
        self.0.write_all(&record)
    }
}

/// Seconds since 1970.
fn now() -> f64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0.0, |since| since.as_secs_f64())
}

/// A number in groups of seven bits, the lowest first.
fn varint(mut n: u64) -> Vec<u8> {
    let mut bytes = vec![];
    while n >= 0x80 {
        bytes.push(n as u8 | 0x80);
        n >>= 7;
    }
    bytes.push(n as u8);
    bytes
}

/// The key of a field: its number, and how its value is written.
fn key(field: u8, kind: u8) -> u8 {
    field << 3 | kind
}

fn integer_field(field: u8, value: u64) -> Vec<u8> {
    [vec![key(field, 0)], varint(value)].concat()
}

fn double_field(field: u8, value: f64) -> Vec<u8> {
    [&[key(field, 1)][..], &value.to_le_bytes()].concat()
}

fn bytes_field(field: u8, value: &[u8]) -> Vec<u8> {
    [&[key(field, 2)][..], &varint(value.len() as u64), value].concat()
}

fn float_field(field: u8, value: f32) -> Vec<u8> {
    [&[key(field, 5)][..], &value.to_le_bytes()].concat()
}

/// The checksum in records: rotated and shifted, because the data may contain checksums.
fn masked(bytes: &[u8]) -> u32 {
    crc32c(bytes).rotate_right(15).wrapping_add(0xA282_EAD8)
}

/// CRC-32C, bit by bit: records have about 100 bytes.
fn crc32c(bytes: &[u8]) -> u32 {
    let byte = |crc: u32, &byte: &u8| {
        (0..8).fold(crc ^ u32::from(byte), |crc, _| {
            crc >> 1 ^ if crc & 1 == 1 { POLYNOMIAL } else { 0 }
        })
    };
    !bytes.iter().fold(!0, byte)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_are_those_of_the_standard() {
        // RFC 3720, B.4.
        assert_eq!(crc32c(&[0; 32]), 0x8A91_36AA);
        assert_eq!(crc32c(&[0xFF; 32]), 0x62A8_AB43);
        assert_eq!(crc32c(b"123456789"), 0xE306_9283);
    }

    #[test]
    fn numbers_are_written_in_groups_of_seven_bits() {
        assert_eq!(varint(1), [1]);
        assert_eq!(varint(300), [0xAC, 0x02]);
        assert_eq!(varint(u64::MAX).len(), 10);
    }
}
