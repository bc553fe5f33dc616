//! An interpreter for PTX: runs a GPU's kernels on a machine without a GPU.
//!
//! [`run`] reads the text that LLVM's NVPTX backend writes and runs one kernel over a grid. It
//! reports errors that a GPU does not report. An error names the instruction, its line, the block
//! and the thread:
//! * an unknown instruction or modifier;
//! * an access outside of every tensor, or at an address that is not a multiple of its width;
//! * a read of shared memory that was not written, or without a wait for its `cp.async`;
//! * two threads access one byte, one of them writing, without a barrier between (`bar.sync` for a
//!   block, `bar.warp.sync` for a warp). A warp's threads may write the same value; threads of
//!   different blocks are never ordered;
//! * a warp whose threads wait at different places, or a `bar.sync` that only a part of a warp
//!   reaches.
//!
//! Threads run one after the other up to the next instruction that needs other threads (barriers,
//! `shfl.sync`, `vote.sync`, `mma.sync`, `ldmatrix`). Results do not depend on how a GPU
//! interleaves threads: any such dependence is reported as a race.
//!
//! Arithmetic follows IEEE; `.ftz` flushes subnormals. Approximations (`ex2`, `lg2`, `rsqrt`,
//! `tanh`, …) are the f64 function rounded: a GPU's results differ in the last bits, as the PTX ISA
//! states. The sums of `mma.sync` are computed in f64 and rounded once; a GPU's order and rounding
//! are not specified. Atomics are not checked for races. The layouts of `mma.sync` and `ldmatrix`
//! are in the PTX ISA, "Matrix fragments for mma.m16n8k16" and "ldmatrix".

mod float;
mod machine;
mod parse;
mod race;

use std::fmt;

/// How a kernel is started.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Launch {
    /// Blocks, in x, y and z.
    pub grid: [u32; 3],
    /// Threads of a block, in x, y and z.
    pub block: [u32; 3],
    /// Bytes of `.extern .shared` memory.
    pub shared_bytes: u32,
}

impl Launch {
    /// `blocks` blocks of `threads` threads, with no dynamic shared memory.
    pub fn new(blocks: u32, threads: u32) -> Launch {
        Launch {
            grid: [blocks, 1, 1],
            block: [threads, 1, 1],
            shared_bytes: 0,
        }
    }
}

/// An argument.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Param {
    /// The address of a tensor, or any number of 64 bits.
    U64(u64),
    /// A number of 32 bits.
    U32(u32),
    /// A float.
    F32(f32),
}

/// Global memory: tensors with gaps between them.
#[derive(Clone, Default, Debug)]
pub struct Memory {
    tensors: Vec<(u64, Vec<u8>)>,
}

impl Memory {
    /// Addresses are multiples of this.
    const ALIGN: u64 = 256;

    /// Memory without tensors.
    pub fn new() -> Memory {
        Memory::default()
    }
    /// Adds a tensor with these bytes; returns its address.
    pub fn add(&mut self, bytes: Vec<u8>) -> u64 {
        // A gap follows each tensor, so an access beyond the end touches no other tensor.
        let end = self.tensors.last().map_or(1 << 32, |(at, bytes)| {
            at + bytes.len() as u64 + Memory::ALIGN
        });
        let at = end.next_multiple_of(Memory::ALIGN);
        self.tensors.push((at, bytes));
        at
    }
    /// Adds a tensor with these bytes at this address.
    ///
    /// # Panics
    /// If it overlaps another.
    pub fn place(&mut self, address: u64, bytes: Vec<u8>) {
        let i = self.tensors.partition_point(|(at, _)| *at < address);
        let end = address + bytes.len() as u64;
        let before = self.tensors[..i].last();
        let free = before.is_none_or(|(at, bytes)| at + bytes.len() as u64 <= address)
            && self.tensors.get(i).is_none_or(|(at, _)| end <= *at);
        assert!(free, "a tensor at {address:#x} should overlap no other");
        self.tensors.insert(i, (address, bytes));
    }
    /// Removes the tensor that begins at an address; returns its bytes.
    pub fn remove(&mut self, address: u64) -> Option<Vec<u8>> {
        let i = self.tensors.iter().position(|(at, _)| *at == address)?;
        Some(self.tensors.remove(i).1)
    }
    /// `n` bytes from an address on, if they lie in one tensor.
    pub fn slice(&self, address: u64, n: usize) -> Option<&[u8]> {
        let (i, at) = self.find(address, n)?;
        Some(&self.tensors[i].1[at..at + n])
    }
    /// Like [`Memory::slice`], but mutable.
    pub fn slice_mut(&mut self, address: u64, n: usize) -> Option<&mut [u8]> {
        let (i, at) = self.find(address, n)?;
        Some(&mut self.tensors[i].1[at..at + n])
    }
    /// The tensor that contains `n` bytes from an address on, and the offset of the first.
    fn find(&self, address: u64, n: usize) -> Option<(usize, usize)> {
        let next = self.tensors.partition_point(|(at, _)| *at <= address);
        let i = next.checked_sub(1)?;
        let (begin, bytes) = &self.tensors[i];
        let end = (address - begin).checked_add(n as u64)?;
        (end <= bytes.len() as u64).then_some((i, (address - begin) as usize))
    }
    /// Adds a tensor of `bytes` bytes. Its bytes are NaN in every float type.
    pub fn room(&mut self, bytes: usize) -> u64 {
        self.add(vec![0xFF; bytes])
    }
    /// A tensor of floats.
    pub fn add_f32(&mut self, values: &[f32]) -> u64 {
        self.add(values.iter().flat_map(|v| v.to_le_bytes()).collect())
    }
    /// A tensor of floats, rounded to bf16.
    pub fn add_bf16(&mut self, values: &[f32]) -> u64 {
        self.add(
            values
                .iter()
                .flat_map(|&v| half::bf16::from_f32(v).to_le_bytes())
                .collect(),
        )
    }
    /// The bytes of the tensor at an address.
    ///
    /// # Panics
    ///
    /// If no tensor begins there.
    pub fn bytes(&self, address: u64) -> &[u8] {
        &self
            .tensors
            .iter()
            .find(|(at, _)| *at == address)
            .expect("a tensor should begin there")
            .1
    }
    /// The tensor at an address, as f32.
    pub fn f32(&self, address: u64) -> Vec<f32> {
        self.bytes(address)
            .as_chunks::<4>()
            .0
            .iter()
            .map(|&b| f32::from_le_bytes(b))
            .collect()
    }
    /// The tensor at an address, of bf16.
    pub fn bf16(&self, address: u64) -> Vec<f32> {
        self.bytes(address)
            .as_chunks::<2>()
            .0
            .iter()
            .map(|&b| half::bf16::from_le_bytes(b).to_f32())
            .collect()
    }
}

/// Counts of a launch, over all threads.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Stats {
    /// Instructions that were executed.
    pub instructions: u64,
    /// Global loads of 16 bytes or more, including `cp.async` of 16 bytes.
    pub wide_loads: u64,
    /// Narrower global loads.
    pub narrow_loads: u64,
    /// Global stores of 16 bytes or more.
    pub wide_stores: u64,
    /// Narrower global stores.
    pub narrow_stores: u64,
    /// `mma.sync`, once for a warp.
    pub mmas: u64,
    /// Matrices of `ldmatrix`.
    pub matrices: u64,
    /// Additional accesses to banks of shared memory for matrices of `ldmatrix`, beyond the first.
    pub bank_conflicts: u64,
}

/// Why a kernel cannot run, or what it did wrong.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Error {
    /// The reason.
    pub what: String,
    /// The place: line and instruction, block and thread, as far as known.
    pub at: String,
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.what, self.at)
    }
}

impl std::error::Error for Error {}

/// Bytes of global memory that a launch touched.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Access {
    /// The first byte.
    pub address: u64,
    /// The number of bytes, at least 1.
    pub bytes: u64,
    /// A thread reads them.
    pub reads: bool,
    /// A thread writes them.
    pub writes: bool,
}

/// A parsed kernel, which can be launched many times.
#[derive(Clone, Debug)]
pub struct Kernel(parse::Kernel);

impl Kernel {
    /// Its name in the text.
    pub fn name(&self) -> &str {
        &self.0.name
    }
    /// The bytes of each parameter.
    pub fn parameter_bytes(&self) -> impl Iterator<Item = usize> {
        self.0.params.iter().map(|&(_, bytes)| bytes)
    }
    /// The bytes of shared memory that the text declares, without the dynamic part of a launch.
    pub fn shared_bytes(&self) -> usize {
        self.0.shared_bytes
    }
    /// Runs the kernel over a grid; it changes tensors in `memory`. The result includes the bytes
    /// that the launch touched, by rising addresses: neighbours with the same access are one entry.
    ///
    /// # Errors
    /// The kernel cannot be launched like this, or makes one of the errors above.
    pub fn run(
        &self,
        launch: &Launch,
        params: &[Param],
        memory: &mut Memory,
    ) -> Result<(Stats, Vec<Access>), Error> {
        machine::run(&self.0, launch, params, memory)
    }
}

/// The kernels of a PTX text, in its order, each parsed once.
///
/// # Errors
/// A kernel has something unknown.
pub fn parse(text: &str) -> Result<Vec<Kernel>, Error> {
    Ok(parse::kernels(text)?.into_iter().map(Kernel).collect())
}

/// Runs a kernel of a PTX text over a grid; it changes tensors in `memory`.
pub fn run(
    text: &str,
    kernel: &str,
    launch: &Launch,
    params: &[Param],
    memory: &mut Memory,
) -> Result<Stats, Error> {
    let kernel = parse::kernel(text, kernel)?;
    machine::run(&kernel, launch, params, memory).map(|(stats, _)| stats)
}

/// The kernels of a PTX text, in its order.
pub fn kernels(text: &str) -> Vec<&str> {
    let entries = parse::entries(text).into_iter();
    entries.map(|entry| entry.name).collect()
}
