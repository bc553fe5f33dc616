//! `--disk`: a disk in place of the host's memory, or behind it.

use crate::failure::Failure;
use crate::out;
use crate::size::parse_bytes;
use artifact::PAGE;
use ir::Device;
use std::convert::Infallible;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Instant;

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

/// Bytes that are written and read to measure a disk.
const SAMPLE: usize = 256 << 20;
const PIECE: usize = 4 << 20;
/// The share of their speed that kernels keep while a transfer runs: the system's part of one takes
/// a little of a core. An estimate for two cores.
const KERNELS_KEEP: f64 = 0.95;
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
) -> Result<(), Failure> {
    let Disk { folder, bytes } = disk;
    let refused = |e: std::io::Error| Failure::Input(format!("--disk {}: {e}", folder.display()));
    let bytes = match *bytes {
        Some(bytes) => bytes,
        None => {
            let free = free_bytes(folder).map_err(refused)?;
            free - free / SPARE
        }
    };
    let rates = match rate {
        Some(rate) => Rates::shared(rate),
        None => {
            let spinner = out::spinner(format!("measuring the disk of {}", folder.display()));
            let rates = measured(folder).map_err(refused)?;
            drop(spinner);
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

/// What a disk does.
#[derive(Clone, Copy, PartialEq, Debug)]
struct Rates {
    /// Bytes per second, while it does nothing else.
    read: f64,
    write: f64,
    /// The shares of them that stay while it reads and writes at once.
    read_keeps: f64,
    write_keeps: f64,
}

impl Rates {
    /// Reads and writes that share one rate.
    fn shared(rate: f64) -> Rates {
        Rates {
            read: rate,
            write: rate,
            read_keeps: 0.5,
            write_keeps: 0.5,
        }
    }
}

fn free_bytes(folder: &Path) -> std::io::Result<u64> {
    let found = rustix::fs::statvfs(folder)?;
    Ok(found.f_bavail.saturating_mul(found.f_frsize))
}

/// Measures a disk as a step uses it: long transfers between a file and memory, one in each
/// direction, past the system's cache where that is possible.
fn measured(folder: &Path) -> std::io::Result<Rates> {
    let path = folder.join(format!(".lighterage-sample-{}", std::process::id()));
    let mut options = std::fs::File::options();
    options.read(true).write(true);
    let file = options.clone().create_new(true).open(&path)?;
    #[cfg(target_os = "linux")]
    let file = {
        use std::os::unix::fs::OpenOptionsExt;
        let direct = options.custom_flags(libc::O_DIRECT).open(&path);
        direct.unwrap_or(file)
    };
    std::fs::remove_file(&path)?;
    // Numbers that no disk compresses, at the start of a page.
    let mut state = 1u64;
    let mut bytes: Vec<u8> = vec![0; PIECE + PAGE];
    let start = bytes.as_ptr().align_offset(PAGE);
    let piece = &mut bytes[start..start + PIECE];
    for bytes in piece.chunks_exact_mut(8) {
        state = state
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        bytes.copy_from_slice(&(state ^ (state >> 29)).to_le_bytes());
    }
    let mut other = vec![0; PIECE + PAGE];
    let start = other.as_ptr().align_offset(PAGE);
    let other = &mut other[start..start + PIECE];

    // The blocks of the file are found by the first writes, which take longer than later ones.
    write(&file, piece, 0)?;
    write(&file, piece, SAMPLE)?;
    file.sync_data()?;
    let write_alone = write(&file, piece, 0)?;
    let read_alone = read(&file, other, 0)?;
    let (reads, writes) = std::thread::scope(|scope| {
        let reads = scope.spawn(|| read(&file, other, 0));
        let writes = write(&file, piece, SAMPLE);
        let reads = reads
            .join()
            .unwrap_or_else(|_| Err(std::io::Error::other("no reader")));
        (reads, writes)
    });
    let keeps = |both: f64, alone: f64| (both / alone).clamp(0.05, 1.0);
    Ok(Rates {
        read: read_alone,
        write: write_alone,
        read_keeps: keeps(reads?, read_alone),
        write_keeps: keeps(writes?, write_alone),
    })
}

/// Bytes per second of writing a sample's bytes from an offset on.
fn write(file: &std::fs::File, piece: &[u8], from: usize) -> std::io::Result<f64> {
    let start = Instant::now();
    for at in (from..from + SAMPLE).step_by(PIECE) {
        file.write_all_at(piece, at as u64)?;
    }
    Ok(SAMPLE as f64 / start.elapsed().as_secs_f64().max(1e-9))
}

/// The same of reading.
fn read(file: &std::fs::File, piece: &mut [u8], from: usize) -> std::io::Result<f64> {
    #[cfg(target_os = "linux")]
    rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::DontNeed)?;
    let start = Instant::now();
    for at in (from..from + SAMPLE).step_by(PIECE) {
        file.read_exact_at(piece, at as u64)?;
    }
    Ok(SAMPLE as f64 / start.elapsed().as_secs_f64().max(1e-9))
}
