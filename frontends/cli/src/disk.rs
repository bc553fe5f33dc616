//! `--disk`: a disk in place of the host's memory, or behind it.

use crate::failure::Failure;
use crate::out;
use crate::size::parse_bytes;
use ir::Device;
use passes::pipeline::Budget;
use runtime::profile::{self, DiskRates};
use std::convert::Infallible;
use std::error::Error;
use std::path::{Path, PathBuf};

/// `--disk DIR:BYTES`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Disk {
    /// A folder on the disk.
    pub(crate) folder: PathBuf,
    /// The most bytes of the file; `None` for most of what is free.
    bytes: Option<u64>,
}

impl Disk {
    /// Reads the option. What follows the last colon belongs to the folder's name unless it is a
    /// number of bytes.
    pub(crate) fn parse(text: &str) -> Result<Disk, Infallible> {
        let sized = text.rsplit_once(':');
        let sized = sized.and_then(|(folder, size)| Some((folder, parse_bytes(size).ok()?)));
        let (folder, bytes) = match sized {
            Some((folder, bytes)) => (folder, Some(bytes)),
            None => (text, None),
        };
        Ok(Disk {
            folder: folder.into(),
            bytes,
        })
    }
}

/// The share of their speed that kernels keep while a transfer runs: the system's part of one takes
/// a little of a core. An estimate for two cores.
const KERNELS_KEEP: f64 = 0.95;
/// Bytes of memory for the test of a disk if the budget is a share.
const MEMORY: u64 = 32 << 20;
/// How long each combination of loads is measured at a time, seconds.
const SECONDS: f64 = 0.1;
/// Of the free bytes, one part in this many stays free.
const SPARE: u64 = 20;
/// The time to start a copy to or from a file, µs.
const COPY_MICROS: f64 = 100.0;

/// Gives the device a disk: in place of the host's memory, or, if the host has room for steps,
/// behind it. `rate`: the bytes per second that reads and writes share, if the user says it; else
/// both rates are measured.
pub(crate) fn add(
    device: &mut Device,
    disk: &Disk,
    rate: Option<f64>,
    host: Option<u64>,
    budget: Option<Budget>,
) -> Result<(), Failure> {
    let Disk { folder, bytes } = disk;
    let refused = |e: &dyn Error| Failure::Input(format!("--disk {}: {e}", folder.display()));
    let bytes = match *bytes {
        Some(bytes) => bytes,
        None => {
            let free = free_bytes(folder).map_err(|e| refused(&e))?;
            free - free / SPARE
        }
    };
    let rates = match rate {
        Some(rate) => DiskRates::shared(rate),
        None => {
            // The step is to fit into little memory, so the test must, too.
            let memory = match budget {
                Some(Budget::Bytes(bytes)) => bytes,
                Some(Budget::Share(_)) => MEMORY,
                Some(Budget::Device) | None => u64::MAX,
            };
            let spinner = out::spinner(format!("measuring the disk of {}", folder.display()));
            let rates = profile::disk(folder, memory, SECONDS).map_err(|e| refused(&e))?;
            drop(spinner);
            let [read, write, both_read, both_write] = [
                rates.read,
                rates.write,
                rates.read * rates.read_keeps,
                rates.write * rates.write_keeps,
            ]
            .map(|rate| format!("{:.2} GB/s", rate / 1e9));
            out::note(&format!(
                "note: the disk of {} reads {read} and writes {write}; at once {both_read} and \
                 {both_write}",
                folder.display()
            ));
            rates
        }
    };
    if device.sm.is_some() || host.is_some_and(|bytes| bytes > 0) {
        device.disk = Some(ir::Disk {
            bytes,
            read_bandwidth: rates.read,
            write_bandwidth: rates.write,
            read_keeps: rates.read_keeps,
            write_keeps: rates.write_keeps,
            kernels_keep: KERNELS_KEEP,
            micros: COPY_MICROS,
        });
        return Ok(());
    }
    device.host_bytes = bytes;
    device.link_bandwidth = rates.read;
    device.out_bandwidth = Some(rates.write);
    device.duplex = rates.read_keeps;
    device.out_duplex = Some(rates.write_keeps);
    device.link_micros = COPY_MICROS;
    device.kernels_keep = KERNELS_KEEP;
    device.host_is_disk = true;
    Ok(())
}

fn free_bytes(folder: &Path) -> std::io::Result<u64> {
    let found = rustix::fs::statvfs(folder)?;
    Ok(found.f_bavail.saturating_mul(found.f_frsize))
}
