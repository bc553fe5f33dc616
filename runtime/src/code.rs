//! Generated kernels: machine code from an artifact, in memory, and its launches.
//!
//! Before: an object of the artifact and the functions that kernels name in it. After: the object's
//! sections in memory that can be run and no longer be written, and an address for each function;
//! or an error that says what is wrong with the object. All headers, symbols and relocations of an
//! object are checked: no object makes the loader touch bytes outside its own.
//!
//! **The code itself cannot be checked.** An artifact with code is trusted like a program. The
//! compiler promises that the code reads and writes only tensors of its types; `validate` checks
//! that every launch has those types.

#![allow(
    unsafe_code,
    reason = "generated kernels are foreign functions; see the module's text"
)]

use crate::Error;
use crate::kernel::Tensor;
use crate::kernels::KernelError;
use crate::team::{Parts, Team};
use artifact::{Artifact, Code, Kernel, Object, Target};
use memmap2::{Mmap, MmapMut};
use object::read::elf::ElfFile64;
use object::{
    Architecture, LittleEndian, Object as _, ObjectSection as _, ObjectSymbol as _, RelocationFlags,
};
use object::{RelocationTarget, SectionKind, SymbolIndex, elf};
use std::collections::BTreeMap;
use std::sync::Arc;

/// A function of a kernel: see [`artifact::Phase`]. Its code lives as long as its [`Loaded`].
pub type Function = unsafe extern "C" fn(tensors: *const *mut u8, first: u64, end: u64);

/// An object in memory.
pub struct Loaded {
    memory: Option<Mmap>,
    /// Offsets of the functions.
    functions: BTreeMap<String, usize>,
}

/// What is wrong with an object.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ObjectError {
    /// The file is not a 64-bit little-endian ELF file.
    #[error("is no ELF object: {0}")]
    NotElf(#[source] object::Error),
    /// The code is for another kind of processor.
    #[error("is for {found:?}, not {here:?}")]
    Architecture {
        /// The object's architecture.
        found: Architecture,
        /// This machine's architecture.
        here: Architecture,
    },
    /// A part of the file cannot be read.
    #[error("has a broken {part}: {source}")]
    Broken {
        /// `section`, `symbol`, `name`.
        part: &'static str,
        /// The reader's error.
        source: object::Error,
    },
    /// The loader does not support a section or relocation.
    #[error("has {0}")]
    Refused(&'static str),
    /// A section needs a larger alignment than memory for code has.
    #[error("has a section aligned to {0} bytes")]
    Alignment(u64),
    /// A symbol is used and not defined: objects refer to nothing outside themselves.
    #[error("needs {0}, which is not in it")]
    Missing(String),
    /// A symbol's address is not in its section.
    #[error("has {0} outside its section")]
    Outside(String),
    /// A type of relocation that the compiler does not use.
    #[error("has a relocation of type {0}, which is not known")]
    Relocation(u32),
    /// The system gives no memory for code, or does not let it run.
    #[error("cannot be placed: {0}")]
    Memory(String),
}

/// Sections of an object are placed at multiples of this.
const ALIGN: usize = 64;
/// The largest size of an object's sections together, bytes.
const MOST_BYTES: usize = 1 << 28;

type Elf<'a> = ElfFile64<'a, LittleEndian>;

/// Where each section goes in memory, by its index: its start and its size.
type Places = BTreeMap<usize, (usize, usize)>;

impl Loaded {
    /// Loads an object; an error says what is wrong with it.
    pub fn new(bytes: &[u8]) -> Result<Loaded, ObjectError> {
        let file = ElfFile64::<LittleEndian>::parse(bytes).map_err(ObjectError::NotElf)?;
        let here = if cfg!(target_arch = "aarch64") {
            Architecture::Aarch64
        } else {
            Architecture::X86_64
        };
        if file.architecture() != here {
            let found = file.architecture();
            return Err(ObjectError::Architecture { found, here });
        }
        let (places, length) = layout(&file)?;
        if length == 0 {
            return Ok(Loaded {
                memory: None,
                functions: BTreeMap::new(),
            });
        }

        let mut memory =
            MmapMut::map_anon(length).map_err(|e| ObjectError::Memory(e.to_string()))?;
        fill(&file, &places, &mut memory)?;
        link(&file, &places, &mut memory)?;
        let functions = functions(&file, &places)?;
        let memory = memory
            .make_exec()
            .map_err(|e| ObjectError::Memory(format!("its code may not run: {e}")))?;
        Ok(Loaded {
            memory: Some(memory),
            functions,
        })
    }

    /// A function by its name.
    pub fn function(&self, symbol: &str) -> Option<Function> {
        let &offset = self.functions.get(symbol)?;
        let start = self.memory.as_ref()?.as_ptr();
        // SAFETY: the address is within a text section of the object, which stays in memory as long
        // as `self`. The compiler promises that a function of this signature starts there, as the
        // module's text says.
        Some(unsafe { std::mem::transmute::<*const u8, Function>(start.add(offset)) })
    }
}

/// Places the sections one after the other. Also returns the bytes that they take together.
fn layout(file: &Elf<'_>) -> Result<(Places, usize), ObjectError> {
    let mut places = BTreeMap::new();
    let mut length = 0usize;
    for section in file.sections().filter(|s| is_loaded(s.kind())) {
        let size = usize::try_from(section.size())
            .ok()
            .filter(|&size| size <= MOST_BYTES);
        let size = size.ok_or(ObjectError::Refused("a section that is too large"))?;
        if usize::try_from(section.align()).unwrap_or(usize::MAX) > ALIGN {
            return Err(ObjectError::Alignment(section.align()));
        }
        places.insert(section.index().0, (length, size));
        length = (length + size).next_multiple_of(ALIGN);
        if length > MOST_BYTES {
            return Err(ObjectError::Refused("sections that are too large"));
        }
    }
    Ok((places, length))
}

/// Copies the sections to their places.
fn fill(file: &Elf<'_>, places: &Places, memory: &mut [u8]) -> Result<(), ObjectError> {
    for section in file.sections() {
        let Some(&(at, size)) = places.get(&section.index().0) else {
            continue;
        };
        let data = section.data().map_err(broken("section"))?;
        // A section of zeros has no data.
        if !data.is_empty() {
            let data = data.get(..size);
            let data = data.ok_or(ObjectError::Refused("a section that is cut off"))?;
            memory[at..at + size].copy_from_slice(data);
        }
    }
    Ok(())
}

/// Writes addresses at the places that the sections' relocations name.
fn link(file: &Elf<'_>, places: &Places, memory: &mut [u8]) -> Result<(), ObjectError> {
    let start = memory.as_ptr().addr();
    for section in file.sections() {
        let Some(&(at, size)) = places.get(&section.index().0) else {
            continue;
        };
        for (offset, relocation) in section.relocations() {
            let RelocationTarget::Symbol(symbol) = relocation.target() else {
                return Err(ObjectError::Refused("a relocation without a symbol"));
            };
            let RelocationFlags::Elf { r_type } = relocation.flags() else {
                return Err(ObjectError::Refused("a relocation that is not ELF's"));
            };
            let to = (start + symbol_at(file, places, symbol)?) as i64;
            let to = to.wrapping_add(relocation.addend());
            let offset = usize::try_from(offset).ok().filter(|&offset| offset < size);
            let offset = offset.ok_or(ObjectError::Refused("a relocation outside its section"))?;
            let place = &mut memory[at..at + size][offset..];
            relocate(place, r_type, to, (start + at + offset) as i64)?;
        }
    }
    Ok(())
}

/// The offset of a symbol from the start of memory.
fn symbol_at(file: &Elf<'_>, places: &Places, index: SymbolIndex) -> Result<usize, ObjectError> {
    let symbol = file.symbol_by_index(index).map_err(broken("symbol"))?;
    let name = symbol.name().unwrap_or("?");
    let section = symbol
        .section_index()
        .and_then(|section| places.get(&section.0));
    let &(at, size) = section.ok_or_else(|| ObjectError::Missing(name.into()))?;
    let offset = usize::try_from(symbol.address())
        .ok()
        .filter(|&offset| offset <= size);
    offset
        .map(|offset| at + offset)
        .ok_or_else(|| ObjectError::Outside(name.into()))
}

/// The offset of each function from the start of memory.
fn functions(file: &Elf<'_>, places: &Places) -> Result<BTreeMap<String, usize>, ObjectError> {
    let mut functions = BTreeMap::new();
    for symbol in file
        .symbols()
        .filter(|symbol| symbol.is_global() && symbol.is_definition())
    {
        let section = symbol
            .section_index()
            .and_then(|section| file.section_by_index(section).ok());
        let Some(section) = section.filter(|section| section.kind() == SectionKind::Text) else {
            continue;
        };
        let (at, size) = places[&section.index().0];
        let name = symbol.name().map_err(broken("name"))?;
        let offset = usize::try_from(symbol.address())
            .ok()
            .filter(|&offset| offset < size);
        let offset = offset.ok_or_else(|| ObjectError::Outside(name.into()))?;
        functions.insert(name.to_string(), at + offset);
    }
    Ok(functions)
}

fn broken(part: &'static str) -> impl Fn(object::Error) -> ObjectError {
    move |source| ObjectError::Broken { part, source }
}

fn is_loaded(kind: SectionKind) -> bool {
    use SectionKind::{Data, ReadOnlyData, ReadOnlyString, Text, UninitializedData};
    matches!(
        kind,
        Text | Data | ReadOnlyData | ReadOnlyString | UninitializedData
    )
}

/// Writes the address `to` into the bytes at `from`, in the form of this type of relocation.
fn relocate(place: &mut [u8], r_type: u32, to: i64, from: i64) -> Result<(), ObjectError> {
    let outside = || ObjectError::Refused("a relocation at the end of its section");
    let far = || ObjectError::Refused("a relocation that reaches too far");
    let distance = to.wrapping_sub(from);
    if cfg!(target_arch = "aarch64") {
        let word = place.first_chunk_mut::<4>().ok_or_else(outside)?;
        let code = u32::from_le_bytes(*word);
        let pages = (to >> 12).wrapping_sub(from >> 12);
        let low = |shift: u32| (((to & 0xfff) >> shift) as u32) << 10;
        let new = match r_type {
            elf::R_AARCH64_ADR_PREL_PG_HI21 if pages.unsigned_abs() < 1 << 20 => {
                code | ((pages as u32 & 3) << 29) | (((pages >> 2) as u32 & 0x7ffff) << 5)
            }
            elf::R_AARCH64_ADR_PREL_PG_HI21 => return Err(far()),
            elf::R_AARCH64_ADD_ABS_LO12_NC | elf::R_AARCH64_LDST8_ABS_LO12_NC => code | low(0),
            elf::R_AARCH64_LDST16_ABS_LO12_NC => code | low(1),
            elf::R_AARCH64_LDST32_ABS_LO12_NC => code | low(2),
            elf::R_AARCH64_LDST64_ABS_LO12_NC => code | low(3),
            elf::R_AARCH64_LDST128_ABS_LO12_NC => code | low(4),
            elf::R_AARCH64_PREL32 => i32::try_from(distance).map_err(|_| far())? as u32,
            other => return Err(ObjectError::Relocation(other)),
        };
        *word = new.to_le_bytes();
        return Ok(());
    }
    match r_type {
        elf::R_X86_64_PC32 | elf::R_X86_64_PLT32 => {
            let word = place.first_chunk_mut::<4>().ok_or_else(outside)?;
            *word = i32::try_from(distance).map_err(|_| far())?.to_le_bytes();
        }
        elf::R_X86_64_64 => *place.first_chunk_mut::<8>().ok_or_else(outside)? = to.to_le_bytes(),
        other => return Err(ObjectError::Relocation(other)),
    }
    Ok(())
}

/// A generated kernel and what it runs on.
pub(crate) struct CodeLaunch {
    phases: Vec<Arc<Phase>>,
    /// Bytes that it reads and writes. A second thread does not make short launches faster.
    bytes: usize,
}

/// A function of a launch.
#[derive(Clone)]
struct Phase {
    function: Function,
    parts: u64,
    tensors: Box<[Address]>,
    /// Keeps the function in memory.
    _code: Arc<Loaded>,
}

/// Where a tensor starts.
#[derive(Clone, Copy)]
#[repr(transparent)]
struct Address(*mut u8);

// SAFETY: an address is data; the caller of a phase's function is responsible for accesses through
// it, see `Phase::run`.
unsafe impl Send for Address {}
// SAFETY: as above.
unsafe impl Sync for Address {}

/// The number of pieces of a phase for each thread of a team. A piece consists of whole parts.
const PIECES: u64 = 4;
/// One thread completes fewer bytes than this before another wakes.
const SMALL: usize = 1 << 16;

impl CodeLaunch {
    /// A launch of a validated kernel; the caller is responsible for the tensors, as for
    /// [`crate::kernel::Call::new`]. Panics if the object lacks a function: `check` refuses such
    /// artifacts.
    pub(crate) fn new(code: &Code, loaded: &Arc<Loaded>, tensors: &[Tensor]) -> CodeLaunch {
        let addresses: Box<[Address]> = tensors.iter().map(|tensor| Address(tensor.data)).collect();
        let phase = |phase: &artifact::Phase| {
            let function = loaded
                .function(&phase.symbol)
                .expect("a checked kernel should have its functions");
            Arc::new(Phase {
                function,
                parts: phase.parts,
                tensors: addresses.clone(),
                _code: loaded.clone(),
            })
        };
        let bytes = tensors.iter().map(|tensor| tensor.bytes).sum();
        CodeLaunch {
            phases: code.phases.iter().map(phase).collect(),
            bytes,
        }
    }
    /// Has it find an operand, or a result, elsewhere from now on; the caller is responsible as in
    /// [`CodeLaunch::new`].
    pub(crate) fn point(&mut self, operand: usize, to: *mut u8) {
        for phase in &mut self.phases {
            Arc::make_mut(phase).tensors[operand] = Address(to);
        }
    }
    /// True if threads can share it.
    pub(crate) fn is_split(&self) -> bool {
        self.bytes > SMALL && self.phases.iter().any(|phase| phase.parts > 1)
    }
    /// Runs it; on a team if one is given and the launch is not short.
    pub(crate) fn run(&self, team: Option<&Team>) -> Result<(), KernelError> {
        for phase in &self.phases {
            match team {
                Some(team) if self.is_split() && phase.parts > 1 => {
                    // A few pieces a thread, so that threads end together.
                    let pieces = phase.parts.min(PIECES * team.threads() as u64);
                    team.run(phase.clone(), pieces as usize)?;
                }
                _ => phase.call(0, phase.parts),
            }
        }
        Ok(())
    }
}

impl Phase {
    fn call(&self, first: u64, end: u64) {
        // SAFETY: the function takes these tensors, whose types `validate` compared with those the
        // code was made for, and parts of its own number. `validate` proved the tensors within
        // their pools, results disjoint from all else except in-place pairs, and ordered with
        // every conflicting access of other streams. `Address` is a transparent pointer.
        unsafe { (self.function)(self.tensors.as_ptr().cast(), first, end) }
    }
}

impl Parts for Phase {
    fn run(&self, piece: usize, pieces: usize) -> Result<(), KernelError> {
        let at = |piece: usize| (u128::from(self.parts) * piece as u128 / pieces as u128) as u64;
        self.call(at(piece), at(piece + 1));
        Ok(())
    }
}

/// Loads object `number` of an artifact. An error says why it cannot be loaded.
pub(crate) fn load(number: usize, object: &Object) -> Result<Arc<Loaded>, Error> {
    let cpu = match object.target {
        Target::Cpu(cpu) => cpu,
        Target::Gpu(sm) => {
            return Err(Error::Unsupported(format!(
                "the artifact's kernels are for {sm}, a GPU; compile it with --target cpu to run \
                 it on this processor"
            )));
        }
    };
    if !cpu.is_here() {
        return Err(Error::Unsupported(format!(
            "the artifact's kernels are for {cpu}, which this processor is not; compile it for \
             this machine, or with --kernels plain"
        )));
    }
    let loaded = Loaded::new(&object.bytes);
    loaded
        .map(Arc::new)
        .map_err(|e| Error::Invalid(format!("object {number}: {e}")))
}

/// Refuses a kernel if its object lacks one of its functions.
pub(crate) fn check(kernel: &Kernel, code: &Code, object: Option<&Loaded>) -> Result<(), Error> {
    let has = |symbol| object.is_some_and(|object| object.function(symbol).is_some());
    match code.phases.iter().find(|phase| !has(&phase.symbol)) {
        None => Ok(()),
        Some(phase) => Err(Error::Invalid(format!(
            "object {} lacks the function {} of a kernel of {}",
            code.object, phase.symbol, kernel.op
        ))),
    }
}

/// Loads every object of an artifact, and checks that they have the functions of its kernels.
pub(crate) fn load_all(artifact: &Artifact) -> Result<Vec<Arc<Loaded>>, Error> {
    let objects = artifact.objects.iter().enumerate();
    let loaded: Vec<_> = objects
        .map(|(number, object)| load(number, object))
        .collect::<Result<_, _>>()?;
    for kernel in &artifact.kernels {
        if let Some(code) = &kernel.code {
            check(
                kernel,
                code,
                loaded.get(code.object as usize).map(Arc::as_ref),
            )?;
        }
    }
    Ok(loaded)
}
