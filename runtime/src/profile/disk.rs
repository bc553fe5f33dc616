//! Measures a disk as a step uses it: long transfers between the file of a pool and the memory of
//! one, in one direction and in both, beside kernels.

use super::{Op, Ready, median, share, together};
use crate::disk::{Disk, PIECE, failed};
use crate::memory::Arena;
use crate::team::Team;
use crate::{Error, Options};
use artifact::{Attr, DType, Kernel, Operand, Place};
use std::io;
use std::path::Path;

/// The most bytes of memory that transfers go through. A system copies to some pages faster than to
/// others, up to twice as fast where it runs in a virtual machine, so these are many.
const MEMORY: u64 = 256 << 20;
/// Bytes of the file that transfers of one direction go through.
const FILE: u64 = 256 << 20;

/// How often each combination is measured; the median counts.
const TURNS: usize = 5;

/// What a disk does while kernels run.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct DiskRates {
    /// Bytes per second, while it does not write.
    pub read: f64,
    /// Bytes per second, while it does not read.
    pub write: f64,
    /// The share of the rate of reads that stays while it writes, too.
    pub read_keeps: f64,
    /// The share of the rate of writes that stays while it reads, too.
    pub write_keeps: f64,
}

impl DiskRates {
    /// Reads and writes that share one rate, bytes per second.
    pub fn shared(rate: f64) -> DiskRates {
        DiskRates {
            read: rate,
            write: rate,
            read_keeps: 0.5,
            write_keeps: 0.5,
        }
    }
}

/// Measures the disk of a folder, a few times `seconds` for each combination of reads and writes.
/// Takes 512 MiB of the disk, and of memory at most 256 MiB and about `memory` bytes.
///
/// # Errors
///
/// Those of the disk, such as no room, and too little memory.
pub fn disk(folder: &Path, memory: u64, seconds: f64) -> Result<DiskRates, Error> {
    let disk = Disk::new(folder, 2 * FILE).map_err(failed)?;
    // Whole pieces, half of them for each direction.
    let bytes = (memory.min(MEMORY) / 2).max(PIECE as u64) / PIECE as u64 * PIECE as u64;
    let lacking = || {
        Error::Resources(format!(
            "no memory for twice {bytes} bytes to measure the disk with; --disk-rate says its rate"
        ))
    };
    let [Some(source), Some(target)] = [(); 2].map(|()| Arena::new(bytes)) else {
        return Err(lacking());
    };
    fill(&source);
    let at = |i: usize, bytes: u64| (i * PIECE) as u64 % bytes;
    let piece = |arena: &Arena, i: usize| arena.range(at(i, bytes), PIECE as u64);
    let done = |done: Result<(), io::Error>| done.map(|()| PIECE as f64).map_err(failed);
    let read = |i: usize| done(disk.load(at(i, FILE), &piece(&target, i), || false));
    let write = |i: usize| done(disk.store(&piece(&source, i), FILE + at(i, FILE), || false));
    // The first writes find the blocks of the file and take longer than later ones.
    for i in 0..FILE as usize / PIECE {
        done(disk.store(&piece(&source, i), at(i, FILE), || false))?;
        write(i)?;
    }

    let team = Team::new(Options::default().team())?;
    let memory = Arena::new(PRODUCT.iter().map(|[m, n]| 4 * m * n).sum()).ok_or_else(lacking)?;
    let product = Ready::new(&product(), &memory).map_err(Error::Host)?;
    let kernels = |_: usize| match product.run(&team) {
        Ok(()) => Ok(1.0),
        Err(e) => Err(Error::Host(e.to_string())),
    };
    let mut turns = [(); 4].map(|()| vec![]);
    for _ in 0..TURNS {
        let [_, reads] = together([&kernels, &read], seconds)?;
        let [_, writes] = together([&kernels, &write], seconds)?;
        let [_, both_reads, both_writes] = together([&kernels, &read, &write], seconds)?;
        let found = [reads, writes, both_reads, both_writes];
        for (turn, found) in turns.iter_mut().zip(found) {
            turn.push(found);
        }
    }
    // A time is bytes divided by a rate, so no rate is 0.
    let rate = |turn: Vec<f64>| median(&turn).unwrap_or(0.0).max(1.0);
    let [read, write, both_read, both_write] = turns.map(rate);
    Ok(DiskRates {
        read,
        write,
        read_keeps: share(both_read, read),
        write_keeps: share(both_write, write),
    })
}

/// The shapes of a product's operands and result. It takes about a millisecond.
const PRODUCT: [[u64; 2]; 3] = [[256, 1024], [1024, 1024], [256, 1024]];

/// A product whose operands lie one after the other.
fn product() -> Op {
    let mut offset = 0;
    let operands = PRODUCT.map(|shape| {
        let place = Place { pool: 0, offset };
        offset += 4 * shape[0] * shape[1];
        Operand {
            place,
            dtype: DType::F32,
            shape: shape.to_vec(),
        }
    });
    let [a, b, out] = operands;
    let plain = |name: &str| (name.to_string(), Attr::Bool(false));
    Op {
        kernel: Kernel {
            op: "matmul".into(),
            attrs: vec![plain("ta"), plain("tb")],
            code: None,
        },
        ins: vec![a, b],
        outs: vec![out],
        scratch: None,
    }
}

/// Numbers that no disk compresses.
fn fill(arena: &Arena) {
    let mut state = 1u64;
    let mut piece = vec![0; PIECE];
    for at in (0..arena.bytes()).step_by(PIECE) {
        for bytes in piece.as_chunks_mut::<8>().0 {
            state = state
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            *bytes = (state ^ (state >> 29)).to_le_bytes();
        }
        arena.write(at, &piece);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_has_rates() {
        let rates = disk(&std::env::temp_dir(), 0, 1e-3).unwrap();
        assert!(0.0 < rates.read && 0.0 < rates.write, "{rates:?}");
        for keeps in [rates.read_keeps, rates.write_keeps] {
            assert!(0.0 < keeps && keeps <= 1.0, "{rates:?}");
        }
        assert!(disk(Path::new("/no/such/folder"), 0, 1e-3).is_err());
    }
}
