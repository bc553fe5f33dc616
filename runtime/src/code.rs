//! Generated kernels: machine code from an artifact, in memory, and its launches.
//!
//! Before: an object of the artifact and the functions that kernels name in it. After: the object's
//! sections in memory that can be run and no longer be written, and an address for each function;
//! or an error that says what is wrong with the object. Whatever an object's headers, symbols and
//! relocations say is checked: no object makes the loader touch bytes outside its own.
//!
//! **The code itself cannot be checked.** Who runs an artifact with code trusts it like a program.
//! That the code reads and writes no more than the tensors of its types is the compiler's promise;
//! `validate` holds every launch to those types.

#![allow(
    unsafe_code,
    reason = "generated kernels are foreign functions; see the module's text"
)]

use crate::Error;
use crate::kernel::Tensor;
use crate::team::{Parts, Team};
use artifact::{Artifact, Code, Object, Target};
use memmap2::{Mmap, MmapMut};
use object::read::elf::ElfFile64;
use object::{
    Architecture, LittleEndian, Object as _, ObjectSection as _, ObjectSymbol as _, RelocationFlags,
};
use object::{RelocationTarget, SectionKind, elf};
use std::collections::BTreeMap;
use std::sync::Arc;

/// A function of a kernel: see [`artifact::Phase`]. Its code lives as long as the [`Loaded`] that
/// it is from.
pub type Function = unsafe extern "C" fn(tensors: *const *mut u8, first: u64, end: u64);

/// An object in memory.
pub struct Loaded {
    memory: Option<Mmap>,
    /// Offsets of the functions.
    functions: BTreeMap<String, usize>,
}

/// Sections of an object are placed at multiples of this.
const ALIGN: usize = 64;
/// The most bytes of an object's sections together.
const MOST_BYTES: usize = 1 << 28;

impl Loaded {
    /// Loads every object of an artifact. An error says which object cannot be, and why.
    pub(crate) fn all(artifact: &Artifact) -> Result<Vec<Arc<Loaded>>, Error> {
        let load = |(i, object): (usize, &Object)| {
            let Target::Cpu(cpu) = object.target;
            if !cpu.is_here() {
                return Err(Error::Unsupported(format!(
                    "the artifact's kernels are for {cpu}, which this processor is not; compile \
                     it for this machine, or with --kernels plain"
                )));
            }
            Loaded::new(&object.bytes)
                .map(Arc::new)
                .map_err(|e| Error::Invalid(format!("object {i}: {e}")))
        };
        artifact.objects.iter().enumerate().map(load).collect()
    }

    /// Loads an object; an error says what is wrong with it.
    pub fn new(bytes: &[u8]) -> Result<Loaded, String> {
        let file = ElfFile64::<LittleEndian>::parse(bytes)
            .map_err(|e| format!("is no ELF object: {e}"))?;
        let here = if cfg!(target_arch = "aarch64") {
            Architecture::Aarch64
        } else {
            Architecture::X86_64
        };
        if file.architecture() != here {
            return Err(format!("is for {:?}, not {here:?}", file.architecture()));
        }
        // Where each section goes.
        let mut places = BTreeMap::new();
        let mut length = 0usize;
        for section in file.sections().filter(|s| is_loaded(s.kind())) {
            let size = usize::try_from(section.size())
                .ok()
                .filter(|&size| size <= MOST_BYTES);
            let size = size.ok_or("has a section that is too large")?;
            if ALIGN < usize::try_from(section.align()).unwrap_or(usize::MAX) {
                return Err(format!(
                    "has a section aligned to {} bytes",
                    section.align()
                ));
            }
            places.insert(section.index().0, (length, size));
            length = (length + size).next_multiple_of(ALIGN);
            if MOST_BYTES < length {
                return Err("has sections that are too large".into());
            }
        }
        if length == 0 {
            return Ok(Loaded {
                memory: None,
                functions: BTreeMap::new(),
            });
        }
        let mut memory =
            MmapMut::map_anon(length).map_err(|e| format!("no memory for code: {e}"))?;
        let start = memory.as_ptr().addr();
        for section in file.sections() {
            let Some(&(at, size)) = places.get(&section.index().0) else {
                continue;
            };
            let data = section
                .data()
                .map_err(|e| format!("has a broken section: {e}"))?;
            // A section of zeros has no data.
            if !data.is_empty() {
                let data = data.get(..size).ok_or("has a section that is cut off")?;
                memory[at..at + size].copy_from_slice(data);
            }
        }
        let address = |index: object::SymbolIndex| -> Result<i64, String> {
            let symbol = file
                .symbol_by_index(index)
                .map_err(|e| format!("has a broken symbol: {e}"))?;
            let name = symbol.name().unwrap_or("?");
            let section = symbol
                .section_index()
                .and_then(|section| places.get(&section.0));
            let &(at, size) = section.ok_or_else(|| format!("needs {name}, which is not in it"))?;
            let offset = usize::try_from(symbol.address())
                .ok()
                .filter(|&offset| offset <= size);
            offset
                .map(|offset| (start + at + offset) as i64)
                .ok_or_else(|| format!("has {name} outside its section"))
        };
        for section in file.sections() {
            let Some(&(at, size)) = places.get(&section.index().0) else {
                continue;
            };
            for (offset, relocation) in section.relocations() {
                let RelocationTarget::Symbol(symbol) = relocation.target() else {
                    return Err("has a relocation without a symbol".into());
                };
                let RelocationFlags::Elf { r_type } = relocation.flags() else {
                    return Err("has a relocation that is not ELF's".into());
                };
                let to = address(symbol)?.wrapping_add(relocation.addend());
                let offset = usize::try_from(offset).ok().filter(|&offset| offset < size);
                let offset = offset.ok_or("has a relocation outside its section")?;
                let place = &mut memory[at..at + size][offset..];
                relocate(place, r_type, to, (start + at + offset) as i64)?;
            }
        }
        let mut functions = BTreeMap::new();
        for symbol in file
            .symbols()
            .filter(|symbol| symbol.is_global() && symbol.is_definition())
        {
            let section = symbol
                .section_index()
                .and_then(|section| file.section_by_index(section).ok());
            let Some(section) = section.filter(|section| section.kind() == SectionKind::Text)
            else {
                continue;
            };
            let (at, size) = places[&section.index().0];
            let name = symbol
                .name()
                .map_err(|e| format!("has a broken name: {e}"))?;
            let offset = usize::try_from(symbol.address())
                .ok()
                .filter(|&offset| offset < size);
            functions.insert(
                name.to_string(),
                at + offset.ok_or_else(|| format!("has {name} outside its section"))?,
            );
        }
        let memory = memory
            .make_exec()
            .map_err(|e| format!("the system does not let its code run: {e}"))?;
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
        // as `self`. That a function of this signature starts there is the compiler's promise, as
        // the module's text says.
        Some(unsafe { std::mem::transmute::<*const u8, Function>(start.add(offset)) })
    }
}

fn is_loaded(kind: SectionKind) -> bool {
    use SectionKind::{Data, ReadOnlyData, ReadOnlyString, Text, UninitializedData};
    matches!(
        kind,
        Text | Data | ReadOnlyData | ReadOnlyString | UninitializedData
    )
}

/// Writes the address `to`, as a relocation of this type wants it, into the bytes at `from`.
fn relocate(place: &mut [u8], r_type: u32, to: i64, from: i64) -> Result<(), String> {
    let outside = || "has a relocation at the end of its section".to_string();
    let far = || "has a relocation that reaches too far".to_string();
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
            other => {
                return Err(format!(
                    "has a relocation of type {other}, which is not known"
                ));
            }
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
        other => {
            return Err(format!(
                "has a relocation of type {other}, which is not known"
            ));
        }
    }
    Ok(())
}

/// A generated kernel and what it runs on.
pub(crate) struct CodeLaunch {
    phases: Vec<Arc<Phase>>,
    /// Bytes that it reads and writes: short launches are not worth a second thread.
    bytes: usize,
}

/// A function of a launch.
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

// SAFETY: an address is data; whoever calls a phase's function answers for what is behind it, see
// `Phase::run`.
unsafe impl Send for Address {}
// SAFETY: as above.
unsafe impl Sync for Address {}

/// Into how many pieces a phase is cut for each thread of a team. A piece is whole parts.
const PIECES: u64 = 4;
/// Fewer bytes than this are done by one thread before another has woken.
const SMALL: usize = 1 << 16;

impl CodeLaunch {
    /// A launch of a validated kernel; the caller answers for the tensors, as for
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
    /// True if threads can share it.
    pub(crate) fn is_split(&self) -> bool {
        SMALL < self.bytes && self.phases.iter().any(|phase| 1 < phase.parts)
    }
    /// Runs it, on a team if there is one and it is worth it.
    pub(crate) fn run(&self, team: Option<&Team>) -> Result<(), String> {
        for phase in &self.phases {
            match team {
                Some(team) if self.is_split() && 1 < phase.parts => {
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
        // their pools, results disjoint from all else but for in-place pairs, and ordered with
        // every conflicting access of other streams. `Address` is a transparent pointer.
        unsafe { (self.function)(self.tensors.as_ptr().cast(), first, end) }
    }
}

impl Parts for Phase {
    fn run(&self, piece: usize, pieces: usize) -> Result<(), String> {
        let at = |piece: usize| (u128::from(self.parts) * piece as u128 / pieces as u128) as u64;
        self.call(at(piece), at(piece + 1));
        Ok(())
    }
}

/// Refuses an artifact whose kernels name functions that its objects lack.
pub(crate) fn check(artifact: &Artifact, loaded: &[Arc<Loaded>]) -> Result<(), Error> {
    for kernel in &artifact.kernels {
        let Some(code) = &kernel.code else { continue };
        let object = loaded.get(code.object as usize);
        let lacks = |phase: &&artifact::Phase| {
            object.is_none_or(|object| object.function(&phase.symbol).is_none())
        };
        if let Some(phase) = code.phases.iter().find(lacks) {
            let (symbol, n) = (&phase.symbol, code.object);
            return Err(Error::Invalid(format!(
                "object {n} lacks the function {symbol} of a kernel of {}",
                kernel.op
            )));
        }
    }
    Ok(())
}
