//! Limits of a GPU's launches, and the places of its tensors.
//!
//! A GPU's kernel gets addresses of the device, and a processor's kernel addresses of the host.
//! Without a GPU, all pools are in the host's memory, also those that mean a device. If an artifact
//! has code for a GPU, each launch must have its tensors in the memory where its kernel runs.
//! Source and destination of a copy may be in either memory: their pools give the direction.

use artifact::{Artifact, Kernel, MemorySpace, Object, Phase, Place, Sm, Target};

/// The largest number of threads of a block.
const MOST_THREADS: u32 = 1024;
/// The largest number of blocks of a launch: CUDA C++ Programming Guide, "Technical Specifications
/// per Compute Capability".
const MOST_BLOCKS: u64 = (1 << 31) - 1;

/// The pools of an artifact with code for a GPU: one device's, the host's, a disk's.
pub(super) fn pools(artifact: &Artifact) -> Result<(), String> {
    if artifact.gpu().is_none() {
        return Ok(());
    }
    for pool in &artifact.pools {
        match pool.space {
            MemorySpace::Device(0) | MemorySpace::Host | MemorySpace::Disk => {}
            MemorySpace::Device(n) => {
                return Err(format!(
                    "pool {} is in the memory of device {n}; one GPU runs a step, device 0",
                    pool.name
                ));
            }
        }
    }
    Ok(())
}

/// Whether a function can be started on a GPU.
pub(super) fn phase(sm: Sm, phase: &Phase) -> Result<(), String> {
    let Phase {
        symbol,
        parts,
        threads,
        shared_bytes,
    } = phase;
    if !(1..=MOST_THREADS).contains(threads) {
        return Err(format!(
            "{symbol} has {threads} threads in a block; a GPU has 1 to {MOST_THREADS}"
        ));
    }
    if !(1..=MOST_BLOCKS).contains(parts) {
        return Err(format!(
            "{symbol} has {parts} blocks; a GPU starts 1 to {MOST_BLOCKS}"
        ));
    }
    let most = sm.most_shared_bytes();
    if *shared_bytes > most {
        return Err(format!(
            "{symbol} has {shared_bytes} shared bytes in a block; {sm} has {most}"
        ));
    }
    Ok(())
}

/// Whether the tensors of a launch, which begin at these valid places, lie where its kernel runs.
pub(super) fn places(
    artifact: &Artifact,
    kernel: &Kernel,
    mut places: impl Iterator<Item = Place>,
) -> Result<(), String> {
    if artifact.gpu().is_none() {
        return Ok(());
    }
    let code = kernel.code.as_ref();
    let object = code.and_then(|code| artifact.objects.get(code.object as usize));
    let is_gpu = |object: &Object| match object.target {
        Target::Cpu(_) => false,
        Target::Gpu(_) => true,
    };
    let on_gpu = object.is_some_and(is_gpu);
    let elsewhere = |place: &Place| {
        let space = artifact.pools[place.pool as usize].space;
        on_gpu != matches!(space, MemorySpace::Device(_))
    };
    let Some(place) = places.find(elsewhere) else {
        return Ok(());
    };
    let pool = &artifact.pools[place.pool as usize].name;
    Err(match on_gpu {
        true => format!(
            "{} runs on the GPU, and a tensor of it lies in pool {pool}, on the host",
            kernel.op
        ),
        false => format!(
            "{} has no code for the GPU, and a tensor of it lies in pool {pool}, on the device",
            kernel.op
        ),
    })
}
