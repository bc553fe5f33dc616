//! `--disk`: a folder's disk takes the place of the host's memory, for steps on the processor.

use crate::failure::Failure;
use crate::out;
use ir::Device;
use std::io::{Read, Seek, Write};
use std::path::Path;
use std::time::Instant;

/// Bytes that are written and read to measure a disk.
const SAMPLE: usize = 128 << 20;
const PIECE: usize = 4 << 20;
/// Of the free bytes, one part in this many stays free.
const SPARE: u64 = 20;
/// The time to start a copy to or from a file, µs.
const COPY_MICROS: f64 = 100.0;

/// The device with the folder's disk as its host. `link`: its bytes per second, if the user says
/// it; else they are measured. `host`: how many bytes a plan may use; else most of what is free.
pub(crate) fn behind(
    device: &mut Device,
    folder: &Path,
    link: Option<f64>,
    host: Option<u64>,
) -> Result<(), Failure> {
    let refused = |e: std::io::Error| Failure::Input(format!("--disk {}: {e}", folder.display()));
    if device.sm.is_some() {
        return Err(Failure::Input(format!(
            "--disk: only steps on the processor have one; {} is a GPU, and its host is memory",
            device.name
        )));
    }
    device.host_bytes = match host {
        Some(bytes) => bytes,
        None => {
            let free = free_bytes(folder).map_err(refused)?;
            free - free / SPARE
        }
    };
    device.link_bandwidth = match link {
        Some(link) => link,
        None => {
            let spinner = out::spinner(format!("measuring the disk of {}", folder.display()));
            let rate = measured(folder).map_err(refused)?;
            drop(spinner);
            rate
        }
    };
    // Reads and writes share it.
    device.duplex = 0.5;
    device.link_micros = COPY_MICROS;
    device.host_updates = false;
    Ok(())
}

fn free_bytes(folder: &Path) -> std::io::Result<u64> {
    let found = rustix::fs::statvfs(folder)?;
    Ok(found.f_bavail.saturating_mul(found.f_frsize))
}

/// Bytes per second of the slower of writing a new file to the disk and reading it from there.
fn measured(folder: &Path) -> std::io::Result<f64> {
    let path = folder.join(format!(".lighterage-sample-{}", std::process::id()));
    let mut file = std::fs::File::options()
        .read(true)
        .write(true)
        .create_new(true)
        .open(&path)?;
    std::fs::remove_file(&path)?;
    // Numbers that no disk compresses.
    let mut state = 1u64;
    let mut piece: Vec<u8> = vec![0; PIECE];
    for bytes in piece.chunks_exact_mut(8) {
        state = state
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        bytes.copy_from_slice(&(state ^ (state >> 29)).to_le_bytes());
    }
    let start = Instant::now();
    for _ in 0..SAMPLE / PIECE {
        file.write_all(&piece)?;
    }
    file.sync_data()?;
    let writing = start.elapsed();
    #[cfg(target_os = "linux")]
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed)?;
    file.rewind()?;
    let start = Instant::now();
    for _ in 0..SAMPLE / PIECE {
        file.read_exact(&mut piece)?;
    }
    let slower = writing.max(start.elapsed());
    Ok(SAMPLE as f64 / slower.as_secs_f64().max(1e-9))
}
