//! Runs a kernel: blocks one after the other; in a block, each thread up to the next instruction
//! that needs other threads.

use super::float::{extreme, f32_of, flushed, low, narrow, odd_sum, signed, wide};
use super::parse::{
    Arg, Atom, BASE, Binary, Flags, Instr, Kernel, LOCAL_WINDOW, Op, Round, SHARED_WINDOW,
};
use super::parse::{Shuffle, Space, Special, Ty, Unary, Vote};
use super::race::{Actor, Shadow, WARP};
use super::{Access, Error, Launch, Memory, Param, Stats};

/// Runs every block of a grid; returns its counts, and the bytes of tensors that it touched.
pub(super) fn run(
    kernel: &Kernel,
    launch: &Launch,
    params: &[Param],
    memory: &mut Memory,
) -> Result<(Stats, Vec<Access>), Error> {
    let refuse = |what: String| {
        Err(Error {
            what,
            at: kernel.name.clone(),
        })
    };
    let count = |n: [u32; 3]| n.iter().map(|&n| u64::from(n)).product::<u64>();
    let threads = count(launch.block);
    if threads == 0
        || 1024 < threads
        || count(launch.grid) == 0
        || u64::from(u32::MAX) < count(launch.grid)
    {
        return refuse(format!(
            "a grid of {:?} blocks of {:?} threads cannot be started",
            launch.grid, launch.block
        ));
    }
    if kernel
        .max_threads
        .is_some_and(|max| u64::from(max) < threads)
    {
        return refuse(format!(
            "{threads} threads where .maxntid is {:?}",
            kernel.max_threads
        ));
    }
    if params.len() != kernel.params.len() {
        return refuse(format!(
            "{} arguments for {} parameters",
            params.len(),
            kernel.params.len()
        ));
    }
    let mut bytes = vec![0; kernel.params.last().map_or(0, |&(at, n)| at + n)];
    for (i, (param, &(at, n))) in params.iter().zip(&kernel.params).enumerate() {
        let (value, width) = match *param {
            Param::U64(v) => (v, 8),
            Param::U32(v) => (u64::from(v), 4),
            Param::F32(v) => (u64::from(v.to_bits()), 4),
        };
        if width != n {
            return refuse(format!("argument {i} has {width} bytes, its parameter {n}"));
        }
        bytes[at..at + n].copy_from_slice(&value.to_le_bytes()[..n]);
    }
    let mut shadows: Vec<Shadow> = memory
        .tensors
        .iter()
        .map(|(_, bytes)| Shadow::new(bytes.len(), true))
        .collect();
    let mut stats = Stats::default();
    for number in 0..count(launch.grid) as u32 {
        let [x, y, _] = launch.grid;
        let mut block = Block {
            kernel,
            launch,
            params: &bytes,
            memory,
            shadows: &mut shadows,
            stats: &mut stats,
            number,
            id: [number % x, number / x % y, number / x / y],
            regs: vec![0; kernel.n_regs * threads as usize],
            threads: vec![Thread::default(); threads as usize],
            shared: vec![0; kernel.shared_bytes + launch.shared_bytes as usize],
            shadow: Shadow::new(kernel.shared_bytes + launch.shared_bytes as usize, false),
            local: vec![0; kernel.local_bytes * threads as usize],
            epoch: 0,
            warp_epochs: vec![0; threads.div_ceil(32) as usize],
        };
        block.run()?;
    }
    let tensors = memory.tensors.iter().zip(&shadows);
    let accesses = tensors.flat_map(|((address, _), shadow)| shadow.accesses(*address));
    Ok((stats, accesses.collect()))
}

#[derive(Clone, Copy, PartialEq, Eq, Default)]
enum State {
    #[default]
    Runs,
    /// Waits for its warp.
    Warp,
    /// Waits for its block.
    Block,
    Done,
}

/// A copy that `cp.async` began: its destination and bytes.
#[derive(Clone)]
struct Copy {
    to: usize,
    bytes: [u8; 16],
    n: usize,
}

#[derive(Clone, Default)]
struct Thread {
    pc: usize,
    state: State,
    /// Copies without a group so far.
    begun: Vec<Copy>,
    groups: std::collections::VecDeque<Vec<Copy>>,
}

struct Block<'a> {
    kernel: &'a Kernel,
    launch: &'a Launch,
    params: &'a [u8],
    memory: &'a mut Memory,
    shadows: &'a mut [Shadow],
    stats: &'a mut Stats,
    number: u32,
    id: [u32; 3],
    regs: Vec<u64>,
    threads: Vec<Thread>,
    shared: Vec<u8>,
    shadow: Shadow,
    local: Vec<u8>,
    epoch: u32,
    warp_epochs: Vec<u32>,
}

type Done<T> = Result<T, String>;

impl Block<'_> {
    fn run(&mut self) -> Result<(), Error> {
        let n = self.threads.len();
        loop {
            for warp in 0..n.div_ceil(32) {
                let lanes = warp * 32..n.min(warp * 32 + 32);
                loop {
                    for thread in lanes.clone() {
                        while self.threads[thread].state == State::Runs {
                            self.step(thread).map_err(|what| self.error(thread, what))?;
                        }
                    }
                    let waits = |t: &usize| self.threads[*t].state == State::Warp;
                    let Some(first) = lanes.clone().find(waits) else {
                        break;
                    };
                    self.together(lanes.clone())
                        .map_err(|what| self.error(first, what))?;
                }
            }
            let Some(first) = (0..n).find(|&t| self.threads[t].state == State::Block) else {
                return Ok(());
            };
            for warp in 0..n.div_ceil(32) {
                let lanes = &self.threads[warp * 32..n.min(warp * 32 + 32)];
                let (pc, state) = (lanes[0].pc, lanes[0].state);
                if let Some(other) = lanes.iter().position(|t| (t.pc, t.state) != (pc, state)) {
                    return Err(self.error(
                        warp * 32 + other,
                        "bar.sync is not reached by a whole warp".into(),
                    ));
                }
            }
            if self.threads.iter().any(|t| t.state == State::Done) {
                return Err(self.error(
                    first,
                    "bar.sync, and threads of the block have ended".into(),
                ));
            }
            self.epoch += 1;
            for thread in &mut self.threads {
                thread.pc += 1;
                thread.state = State::Runs;
            }
        }
    }

    fn error(&self, thread: usize, what: String) -> Error {
        let at = self
            .kernel
            .instrs
            .get(self.threads[thread].pc)
            .map_or("the end".into(), Instr::at);
        Error {
            what,
            at: format!("{at}; block {:?}, thread {thread}", self.id),
        }
    }

    fn actor(&self, thread: usize) -> Actor {
        let warp = thread / 32;
        Actor {
            block: self.number,
            warp: warp as u32,
            thread: thread as u32,
            epoch: self.epoch,
            warp_epoch: self.warp_epochs[warp],
        }
    }

    // --- values ---

    #[inline(always)]
    fn get(&self, thread: usize, arg: &Arg) -> u64 {
        match arg {
            Arg::Reg(register) => self.regs[thread * self.kernel.n_regs + register],
            Arg::Const(value) => *value,
            Arg::Special(special) => u64::from(self.special(thread, *special)),
            _ => 0,
        }
    }
    fn special(&self, thread: usize, special: Special) -> u32 {
        let [x, y, _] = self.launch.block;
        let at = thread as u32;
        match special {
            Special::Tid(axis) => [at % x, at / x % y, at / x / y][axis],
            Special::Ntid(axis) => self.launch.block[axis],
            Special::Ctaid(axis) => self.id[axis],
            Special::Nctaid(axis) => self.launch.grid[axis],
            Special::Lane => at % 32,
            Special::Warp => at / 32,
        }
    }
    /// An operand of a type, without higher bits; signed numbers are extended to 64 bits.
    #[inline(always)]
    fn typed(&self, thread: usize, arg: &Arg, ty: Ty) -> u64 {
        let value = self.get(thread, arg);
        match ty {
            Ty::S(bits) => signed(bits, value) as u64,
            ty => low(ty.bits(), value),
        }
    }
    #[inline(always)]
    fn set(&mut self, thread: usize, arg: &Arg, value: u64) -> Done<()> {
        match arg {
            Arg::Reg(register) => self.regs[thread * self.kernel.n_regs + register] = value,
            Arg::None => {}
            _ => return Err("a result goes to something that is no register".into()),
        }
        Ok(())
    }

    // --- memory ---

    fn address(&self, thread: usize, arg: &Arg) -> Done<u64> {
        match arg {
            Arg::At(Some(register), offset) => {
                Ok(self.regs[thread * self.kernel.n_regs + register].wrapping_add_signed(*offset))
            }
            Arg::At(None, offset) => Ok(*offset as u64),
            _ => Err("an address is missing".into()),
        }
    }
    /// The space of a generic address, and the address in this space.
    fn place(space: Space, at: u64) -> (Space, u64) {
        match space {
            Space::Generic if SHARED_WINDOW <= at && at < SHARED_WINDOW + (1 << 32) => {
                (Space::Shared, at - SHARED_WINDOW)
            }
            Space::Generic if LOCAL_WINDOW <= at && at < LOCAL_WINDOW + (1 << 32) => {
                (Space::Local, at - LOCAL_WINDOW)
            }
            Space::Generic => (Space::Global, at),
            space => (space, at),
        }
    }
    fn aligned(at: u64, n: usize) -> Done<()> {
        match at.is_multiple_of(n as u64) {
            true => Ok(()),
            false => Err(format!("the address {at:#x} is no multiple of {n}")),
        }
    }
    /// The tensor, and the offset in it.
    fn tensor(&self, at: u64, n: usize) -> Done<(usize, usize)> {
        self.memory.find(at, n).ok_or_else(|| {
            let tensors = &self.memory.tensors;
            match tensors
                .partition_point(|(begin, _)| *begin <= at)
                .checked_sub(1)
            {
                Some(i) => {
                    let (begin, bytes) = &tensors[i];
                    format!(
                        "out of bounds: byte {} of tensor {i}, which has {}, {n} bytes wide",
                        at - begin,
                        bytes.len()
                    )
                }
                None => format!("out of bounds: {at:#x} is in no tensor"),
            }
        })
    }
    fn in_shared(&self, at: u64, n: usize) -> Done<usize> {
        let offset = at.wrapping_sub(BASE);
        let end = offset
            .checked_add(n as u64)
            .filter(|&end| end <= self.shared.len() as u64);
        end.map(|_| offset as usize).ok_or_else(|| {
            format!(
                "out of bounds: byte {} of shared memory, which has {}",
                offset as i64,
                self.shared.len()
            )
        })
    }
    fn in_local(&self, thread: usize, at: u64, n: usize) -> Done<usize> {
        let (each, offset) = (self.kernel.local_bytes, at.wrapping_sub(BASE));
        let end = offset
            .checked_add(n as u64)
            .filter(|&end| end <= each as u64);
        end.map(|_| thread * each + offset as usize)
            .ok_or_else(|| format!("out of bounds: {at:#x} of local memory"))
    }
    /// Reads up to 32 bytes.
    fn load(&mut self, thread: usize, space: Space, at: u64, n: usize) -> Done<[u8; 32]> {
        let (space, at) = Self::place(space, at);
        Self::aligned(at, n)?;
        let mut out = [0; 32];
        let actor = self.actor(thread);
        let bytes = match space {
            Space::Param => {
                let end = (at as usize)
                    .checked_add(n)
                    .filter(|&end| end <= self.params.len());
                end.map(|end| &self.params[at as usize..end])
                    .ok_or("out of bounds: behind the last parameter")?
            }
            Space::Shared => {
                let at = self.in_shared(at, n)?;
                self.shadow.read(at, n, actor)?;
                &self.shared[at..at + n]
            }
            Space::Local => {
                let at = self.in_local(thread, at, n)?;
                &self.local[at..at + n]
            }
            Space::Global | Space::Generic => {
                let (i, at) = self.tensor(at, n)?;
                self.shadows[i].read(at, n, actor)?;
                *(if 16 <= n {
                    &mut self.stats.wide_loads
                } else {
                    &mut self.stats.narrow_loads
                }) += 1;
                &self.memory.tensors[i].1[at..at + n]
            }
        };
        out[..n].copy_from_slice(bytes);
        Ok(out)
    }
    fn store(&mut self, thread: usize, space: Space, at: u64, bytes: &[u8]) -> Done<()> {
        let (space, at) = Self::place(space, at);
        let (n, actor) = (bytes.len(), self.actor(thread));
        Self::aligned(at, n)?;
        let to = match space {
            Space::Param => return Err("parameters cannot be written".into()),
            Space::Shared => {
                let at = self.in_shared(at, n)?;
                let to = &mut self.shared[at..at + n];
                self.shadow.write(at, n, actor, to == bytes)?;
                to
            }
            Space::Local => {
                let at = self.in_local(thread, at, n)?;
                &mut self.local[at..at + n]
            }
            Space::Global | Space::Generic => {
                let (i, at) = self.tensor(at, n)?;
                *(if 16 <= n {
                    &mut self.stats.wide_stores
                } else {
                    &mut self.stats.narrow_stores
                }) += 1;
                let to = &mut self.memory.tensors[i].1[at..at + n];
                self.shadows[i].write(at, n, actor, to == bytes)?;
                to
            }
        };
        to.copy_from_slice(bytes);
        Ok(())
    }
    /// Begins a copy to shared memory.
    fn copy(&mut self, thread: usize, args: &[Arg], n: usize) -> Done<()> {
        let to = self.address(thread, &args[0])?;
        let from = self.address(thread, &args[1])?;
        // The instruction may give fewer bytes: the rest is filled with zeros.
        let size = args
            .get(3)
            .map_or(n, |arg| low(32, self.get(thread, arg)) as usize);
        if ![4, 8, 16].contains(&n) || n < size {
            return Err(format!("cp.async copies {size} of {n} bytes"));
        }
        Self::aligned(to, n)?;
        Self::aligned(from, n)?;
        let to = self.in_shared(to, n)?;
        let mut copy = Copy {
            to,
            bytes: [0; 16],
            n,
        };
        let actor = self.actor(thread);
        if 0 < size {
            let (i, at) = self.tensor(from, size)?;
            self.shadows[i].read(at, size, actor)?;
            copy.bytes[..size].copy_from_slice(&self.memory.tensors[i].1[at..at + size]);
            *(if size == 16 {
                &mut self.stats.wide_loads
            } else {
                &mut self.stats.narrow_loads
            }) += 1;
        }
        self.shadow.begin(to, n, actor)?;
        self.threads[thread].begun.push(copy);
        Ok(())
    }
    /// Waits until all groups except the latest `n` have arrived.
    fn wait(&mut self, thread: usize, n: usize) {
        while n < self.threads[thread].groups.len() {
            let group = self.threads[thread].groups.pop_front().unwrap_or_default();
            let actor = self.actor(thread);
            for copy in group {
                self.shared[copy.to..copy.to + copy.n].copy_from_slice(&copy.bytes[..copy.n]);
                self.shadow.arrive(copy.to, copy.n, actor);
            }
        }
    }

    // --- one thread ---

    /// Runs a thread's next instruction, or makes the thread wait for others.
    fn step(&mut self, thread: usize) -> Done<()> {
        let kernel = self.kernel;
        let Some(instr) = kernel.instrs.get(self.threads[thread].pc) else {
            return Err("the kernel ends without ret".into());
        };
        self.stats.instructions += 1;
        if let Some((register, on)) = instr.guard
            && (self.regs[thread * kernel.n_regs + register] & 1 == 1) != on
        {
            self.threads[thread].pc += 1;
            return Ok(());
        }
        let state = match instr.op {
            Op::Bra(to) => {
                self.threads[thread].pc = to;
                return Ok(());
            }
            Op::Brx(table) => {
                let i = self.get(thread, &instr.args[0]) as u32 as usize;
                let to = kernel.targets[table].get(i);
                self.threads[thread].pc = *to.ok_or("jumps behind its last target")?;
                return Ok(());
            }
            Op::Ret
                if self.threads[thread].begun.is_empty()
                    && self.threads[thread].groups.is_empty() =>
            {
                State::Done
            }
            Op::Ret => return Err("ends before its cp.async have arrived".into()),
            Op::Bar => State::Block,
            Op::WarpBar | Op::Shfl(_) | Op::Vote(_) | Op::Mma(_) | Op::LdMatrix { .. } => {
                State::Warp
            }
            _ => {
                self.alone(thread, instr)?;
                self.threads[thread].pc += 1;
                return Ok(());
            }
        };
        self.threads[thread].state = state;
        Ok(())
    }

    fn alone(&mut self, t: usize, instr: &Instr) -> Done<()> {
        let args = &instr.args[..];
        match instr.op {
            Op::Mov(ty) => match (&args[0], &args[1]) {
                (Arg::Many(parts), from) => {
                    let bits = ty.bits() / parts.len() as u32;
                    let value = self.get(t, from);
                    for (i, part) in parts.iter().enumerate() {
                        self.set(t, part, low(bits, value >> (bits * i as u32)))?;
                    }
                }
                (to, Arg::Many(parts)) => {
                    let bits = ty.bits() / parts.len() as u32;
                    let value = parts
                        .iter()
                        .rev()
                        .fold(0, |sum, part| sum << bits | low(bits, self.get(t, part)));
                    self.set(t, to, value)?;
                }
                (to, from) => self.set(t, to, low(ty.bits(), self.get(t, from)))?,
            },
            Op::Ld(space, ty) => {
                let at = self.address(t, &args[1])?;
                let (size, parts) = (ty.bits() as usize / 8, parts(&args[0]));
                let bytes = self.load(t, space, at, size * parts.len())?;
                for (part, bytes) in parts.iter().zip(bytes.chunks(size)) {
                    let value = bytes
                        .iter()
                        .rev()
                        .fold(0, |sum, &byte| sum << 8 | u64::from(byte));
                    let value = if let Ty::S(bits) = ty {
                        signed(bits, value) as u64
                    } else {
                        value
                    };
                    self.set(t, part, value)?;
                }
            }
            Op::St(space, ty) => {
                let at = self.address(t, &args[0])?;
                let size = ty.bits() as usize / 8;
                let (mut bytes, mut n) = ([0; 32], 0);
                for part in parts(&args[1]) {
                    let value = self.get(t, part).to_le_bytes();
                    bytes[n..n + size].copy_from_slice(&value[..size]);
                    n += size;
                }
                self.store(t, space, at, &bytes[..n])?;
            }
            Op::Binary(op, ty, flags) => {
                // Counts of shifts are 32 bits wide; a wide product is twice as wide as its
                // factors.
                let second = if matches!(op, Binary::Shl | Binary::Shr) {
                    Ty::U(32)
                } else {
                    ty
                };
                let (a, b) = (self.typed(t, &args[1], ty), self.typed(t, &args[2], second));
                self.set(t, &args[0], binary(op, ty, flags, a, b)?)?;
            }
            Op::Unary(op, ty, flags) => {
                let value = unary(op, ty, flags, self.typed(t, &args[1], ty))?;
                self.set(t, &args[0], value)?;
            }
            Op::Mad(ty, wide) => {
                let bits = if wide { 2 * ty.bits() } else { ty.bits() };
                let (a, b) = (self.typed(t, &args[1], ty), self.typed(t, &args[2], ty));
                let sum = a.wrapping_mul(b).wrapping_add(self.get(t, &args[3]));
                self.set(t, &args[0], low(bits, sum))?;
            }
            Op::Fma(ty, flags) => {
                let [a, b, c] = [1, 2, 3].map(|i| self.typed(t, &args[i], ty));
                self.set(t, &args[0], fma(ty, flags, a, b, c)?)?;
            }
            Op::FmaMixed(half) => {
                let [a, b] = [1, 2].map(|i| wide(half, self.typed(t, &args[i], half)));
                let sum = odd_sum(a * b, wide(Ty::F32, self.get(t, &args[3])));
                self.set(t, &args[0], narrow(Ty::F32, sum))?;
            }
            Op::AddMixed(half, op) => {
                let a = narrow(Ty::F32, wide(half, self.typed(t, &args[1], half)));
                let sum = binary(
                    op,
                    Ty::F32,
                    Flags::default(),
                    a,
                    self.typed(t, &args[2], Ty::F32),
                )?;
                self.set(t, &args[0], sum)?;
            }
            Op::Setp(compare, with, ty, flags) => {
                let (a, b) = (self.typed(t, &args[1], ty), self.typed(t, &args[2], ty));
                let holds = compares(compare, ty, flags, a, b);
                let other = args.get(3).map_or(0, |arg| self.get(t, arg));
                let value = match with {
                    Some(Binary::And) => u64::from(holds) & other,
                    Some(Binary::Or) => u64::from(holds) | other,
                    Some(_) => u64::from(holds) ^ other,
                    None => u64::from(holds),
                };
                self.set(t, &args[0], value & 1)?;
            }
            Op::Selp(ty) => {
                let from = if self.get(t, &args[3]) & 1 == 1 {
                    &args[1]
                } else {
                    &args[2]
                };
                self.set(t, &args[0], low(ty.bits(), self.get(t, from)))?;
            }
            Op::Cvt {
                to,
                from,
                round,
                flags,
                saturate,
            } => {
                let value = convert(
                    to,
                    from,
                    round,
                    flags,
                    saturate,
                    self.typed(t, &args[1], from),
                )?;
                self.set(t, &args[0], value)?;
            }
            Op::CvtPair { to, relu } => {
                let half = to.half().ok_or("a pair of halves")?;
                let [high, low] = [1, 2].map(|i| {
                    let x = wide(Ty::F32, self.get(t, &args[i]));
                    narrow(half, if relu { extreme(x, 0.0, true, true) } else { x })
                });
                self.set(t, &args[0], high << 16 | low)?;
            }
            Op::ToGeneric(space) | Op::FromGeneric(space) => {
                let window = match space {
                    Space::Shared => SHARED_WINDOW,
                    Space::Local => LOCAL_WINDOW,
                    _ => 0,
                };
                let at = self.get(t, &args[1]);
                let to = matches!(instr.op, Op::ToGeneric(_));
                self.set(
                    t,
                    &args[0],
                    if to {
                        at.wrapping_add(window)
                    } else {
                        at.wrapping_sub(window)
                    },
                )?;
            }
            Op::CpAsync { bytes } => self.copy(t, args, bytes)?,
            Op::Commit => {
                let group = std::mem::take(&mut self.threads[t].begun);
                self.threads[t].groups.push_back(group);
            }
            Op::Wait(n) => {
                if args.is_empty() {
                    let group = std::mem::take(&mut self.threads[t].begun);
                    self.threads[t].groups.push_back(group);
                }
                self.wait(t, n);
            }
            Op::Atom(op, ty, space) => self.atomic(t, op, ty, space, args)?,
            Op::Nothing => {}
            Op::Trap => return Err("trap".into()),
            Op::Prmt => {
                let [a, b, how] = [1, 2, 3].map(|i| low(32, self.get(t, &args[i])));
                let bytes = (b << 32 | a).to_le_bytes();
                let value = (0..4).fold(0, |sum, i| {
                    let nibble = how >> (4 * i);
                    let byte = bytes[(nibble & 7) as usize];
                    let byte = if nibble & 8 == 0 {
                        byte
                    } else {
                        0u8.wrapping_sub(byte >> 7)
                    };
                    sum | u64::from(byte) << (8 * i)
                });
                self.set(t, &args[0], value)?;
            }
            Op::Lop3 => {
                let [a, b, c, table] = [1, 2, 3, 4].map(|i| low(32, self.get(t, &args[i])));
                let bit =
                    |i: u32| table >> ((a >> i & 1) << 2 | (b >> i & 1) << 1 | (c >> i & 1)) & 1;
                self.set(t, &args[0], (0..32).fold(0, |sum, i| sum | bit(i) << i))?;
            }
            Op::Bfe(ty) => {
                let value = self.typed(t, &args[1], ty);
                let [at, n] = [2, 3].map(|i| low(8, self.get(t, &args[i])) as u32);
                let taken = if n == 0 || 64 <= at {
                    0
                } else {
                    low(n.min(64), (value as i64 >> at) as u64)
                };
                let taken = if let Ty::S(_) = ty {
                    signed(n.clamp(1, 64), taken) as u64
                } else {
                    taken
                };
                self.set(t, &args[0], low(ty.bits(), taken))?;
            }
            Op::Bfi(ty) => {
                let (a, b) = (self.get(t, &args[1]), self.get(t, &args[2]));
                let [at, n] = [3, 4].map(|i| low(8, self.get(t, &args[i])) as u32);
                let mask = if 64 <= at {
                    0
                } else {
                    low(n.min(64), u64::MAX) << at
                };
                let shifted = if 64 <= at { 0 } else { a << at };
                self.set(t, &args[0], low(ty.bits(), (b & !mask) | (shifted & mask)))?;
            }
            Op::Shf(left, clamp) => {
                let [a, b, n] = [1, 2, 3].map(|i| low(32, self.get(t, &args[i])));
                let n = if clamp { n.min(32) } else { n & 31 };
                let both = b << 32 | a;
                let value = if left {
                    (u128::from(both) << n >> 32) as u64
                } else {
                    both >> n
                };
                self.set(t, &args[0], low(32, value))?;
            }
            Op::Bra(_)
            | Op::Brx(_)
            | Op::Ret
            | Op::Bar
            | Op::WarpBar
            | Op::Shfl(_)
            | Op::Vote(_)
            | Op::Mma(_)
            | Op::LdMatrix { .. } => {
                unreachable!("handled by the caller")
            }
        }
        Ok(())
    }

    fn atomic(&mut self, t: usize, op: Atom, ty: Ty, space: Space, args: &[Arg]) -> Done<()> {
        // `red` has no result.
        let (to, args) = if matches!(args[0], Arg::At(..)) {
            (&Arg::None, args)
        } else {
            (&args[0], &args[1..])
        };
        let (space, at) = Self::place(space, self.address(t, &args[0])?);
        let n = ty.bits() as usize / 8;
        Self::aligned(at, n)?;
        let b = self.typed(t, args.get(1).ok_or("an operand is missing")?, ty);
        let c = args.get(2).map_or(0, |arg| self.typed(t, arg, ty));
        let bytes = match space {
            Space::Shared => {
                let at = self.in_shared(at, n)?;
                &mut self.shared[at..at + n]
            }
            Space::Global | Space::Generic => {
                let (i, at) = self.tensor(at, n)?;
                self.shadows[i].update(at, n);
                &mut self.memory.tensors[i].1[at..at + n]
            }
            _ => return Err("atomics of this memory are not known".into()),
        };
        let old = bytes
            .iter()
            .rev()
            .fold(0, |sum, &byte| sum << 8 | u64::from(byte));
        let a = if let Ty::S(bits) = ty {
            signed(bits, old) as u64
        } else {
            old
        };
        let flags = Flags::default();
        let new = match op {
            Atom::Add => binary(Binary::Add, ty, flags, a, b)?,
            Atom::Min => binary(Binary::Min, ty, flags, a, b)?,
            Atom::Max => binary(Binary::Max, ty, flags, a, b)?,
            Atom::And => a & b,
            Atom::Or => a | b,
            Atom::Xor => a ^ b,
            Atom::Exch => b,
            Atom::Cas => {
                if a == b {
                    c
                } else {
                    a
                }
            }
        };
        bytes.copy_from_slice(&new.to_le_bytes()[..n]);
        self.set(t, to, old)
    }

    // --- a warp ---

    /// Runs the instruction at which the threads of a warp wait.
    fn together(&mut self, lanes: std::ops::Range<usize>) -> Done<()> {
        let kernel = self.kernel;
        for first in lanes
            .clone()
            .filter(|&t| self.threads[t].state == State::Warp)
        {
            let pc = self.threads[first].pc;
            let here =
                |t: &usize| self.threads[*t].state == State::Warp && self.threads[*t].pc == pc;
            let group: Vec<usize> = lanes.clone().filter(here).collect();
            let instr = &kernel.instrs[pc];
            let mask = match instr.op {
                Op::WarpBar | Op::Shfl(_) | Op::Vote(_) => instr
                    .args
                    .last()
                    .map_or(u64::MAX, |arg| self.get(first, arg)),
                _ => u64::MAX,
            };
            let wanted = |t: &usize| {
                mask >> (t - lanes.start) & 1 == 1 && self.threads[*t].state != State::Done
            };
            let members: Vec<usize> = lanes.clone().filter(wanted).collect();
            if members.contains(&first) && members.iter().all(|t| group.contains(t)) {
                self.warp(instr, &lanes, &members)?;
                for t in members {
                    self.threads[t].pc += 1;
                    self.threads[t].state = State::Runs;
                }
                return Ok(());
            }
        }
        let mut places: Vec<usize> = lanes.map(|t| self.threads[t].pc).collect();
        places.dedup();
        let places: Vec<String> = places
            .iter()
            .filter_map(|&pc| kernel.instrs.get(pc))
            .map(Instr::at)
            .collect();
        Err(format!(
            "a warp's threads wait for each other at different places: {}",
            places.join(" | ")
        ))
    }

    fn warp(
        &mut self,
        instr: &Instr,
        lanes: &std::ops::Range<usize>,
        members: &[usize],
    ) -> Done<()> {
        let args = &instr.args[..];
        let whole = || match members.len() {
            32 => Ok(()),
            n => Err(format!("{n} threads of a warp of 32 are there")),
        };
        match instr.op {
            Op::WarpBar => {
                self.warp_epochs[lanes.start / 32] += u32::from(members.len() == lanes.len())
            }
            Op::Shfl(how) => {
                let mut values = vec![];
                for &t in members {
                    let lane = (t - lanes.start) as u64;
                    let (b, c) = (
                        low(32, self.get(t, &args[2])) & 31,
                        low(32, self.get(t, &args[3])),
                    );
                    let (clamp, segment) = (c & 31, c >> 8 & 31);
                    let (most, least) = ((lane & segment) | (clamp & !segment), lane & segment);
                    let (from, inside) = match how {
                        Shuffle::Up => {
                            (lane.wrapping_sub(b), most as i64 <= lane as i64 - b as i64)
                        }
                        Shuffle::Down => (lane + b, lane + b <= most),
                        Shuffle::Bfly => (lane ^ b, lane ^ b <= most),
                        Shuffle::Idx => (least | (b & !segment), least | (b & !segment) <= most),
                    };
                    let from = lanes.start + if inside { from } else { lane } as usize;
                    if !members.contains(&from) {
                        return Err(format!(
                            "shfl.sync reads lane {}, which is not there",
                            from - lanes.start
                        ));
                    }
                    values.push(low(32, self.get(from, &args[1])));
                }
                for (&t, value) in members.iter().zip(values) {
                    self.set(t, &args[0], value)?;
                }
            }
            Op::Vote(how) => {
                let ballot = members.iter().fold(0, |sum, &t| {
                    sum | (self.get(t, &args[1]) & 1) << (t - lanes.start)
                });
                let all = members.iter().all(|&t| self.get(t, &args[1]) & 1 == 1);
                for &t in members {
                    let value = match how {
                        Vote::All => u64::from(all),
                        Vote::Any => u64::from(ballot != 0),
                        Vote::Ballot => ballot,
                    };
                    self.set(t, &args[0], value)?;
                }
            }
            Op::Mma(ty) => {
                whole()?;
                self.stats.mmas += 1;
                match ty {
                    Ty::Tf32 => self.mma_tf32(lanes.start, args)?,
                    _ => self.mma(ty, lanes.start, args)?,
                }
            }
            Op::LdMatrix { n, transposed } => {
                whole()?;
                self.matrices(lanes.start, args, n, transposed)?;
            }
            _ => unreachable!("only instructions of a warp come here"),
        }
        Ok(())
    }

    /// d = a·b + c. For a thread with place p in group g (groups have 4 threads): a's registers
    /// hold rows g, g+8, g, g+8 and columns 2p, 2p+1 of the left half (first two) and the right
    /// half; b's registers hold column g and rows 2p, 2p+1 of the upper and the lower half; c's and
    /// d's hold rows g, g, g+8, g+8 and columns 2p, 2p+1.
    fn mma(&mut self, ty: Ty, start: usize, args: &[Arg]) -> Done<()> {
        let (mut a, mut b, mut c) = ([[0f64; 16]; 16], [[0f64; 8]; 16], [[0f64; 8]; 16]);
        let [to, of_a, of_b, of_c] = [0, 1, 2, 3].map(|i| parts(&args[i]));
        if [to.len(), of_a.len(), of_b.len(), of_c.len()] != [4, 4, 2, 4] {
            return Err("mma has 4, 4, 2 and 4 registers".into());
        }
        for lane in 0..32 {
            let (t, g, p) = (start + lane, lane / 4, lane % 4);
            for i in 0..2 {
                for (r, arg) in of_a.iter().enumerate() {
                    a[g + 8 * (r % 2)][2 * p + i + 8 * (r / 2)] =
                        wide(ty, low(16, self.get(t, arg) >> (16 * i)));
                }
                for (r, arg) in of_b.iter().enumerate() {
                    b[2 * p + i + 8 * r][g] = wide(ty, low(16, self.get(t, arg) >> (16 * i)));
                }
            }
            for (r, arg) in of_c.iter().enumerate() {
                c[g + 8 * (r / 2)][2 * p + r % 2] = wide(Ty::F32, self.get(t, arg));
            }
        }
        for lane in 0..32 {
            let (t, g, p) = (start + lane, lane / 4, lane % 4);
            for (r, arg) in to.iter().enumerate() {
                let (row, column) = (g + 8 * (r / 2), 2 * p + r % 2);
                let sum: f64 =
                    (0..16).map(|k| a[row][k] * b[k][column]).sum::<f64>() + c[row][column];
                self.set(t, arg, narrow(Ty::F32, sum))?;
            }
        }
        Ok(())
    }

    /// The same of 16 × 8 and 8 × 8 numbers, each in a register of its own: a's hold rows g, g+8,
    /// g, g+8 of columns p, p, p+4, p+4; b's hold column g of rows p and p+4. Lower bits of the
    /// factors do not count.
    fn mma_tf32(&mut self, start: usize, args: &[Arg]) -> Done<()> {
        let (mut a, mut b, mut c) = ([[0f64; 8]; 16], [[0f64; 8]; 8], [[0f64; 8]; 16]);
        let [to, of_a, of_b, of_c] = [0, 1, 2, 3].map(|i| parts(&args[i]));
        if [to.len(), of_a.len(), of_b.len(), of_c.len()] != [4, 4, 2, 4] {
            return Err("mma has 4, 4, 2 and 4 registers".into());
        }
        let cut = |v: u64| wide(Ty::F32, v & !0x1fff);
        for lane in 0..32 {
            let (t, g, p) = (start + lane, lane / 4, lane % 4);
            for (r, arg) in of_a.iter().enumerate() {
                a[g + 8 * (r % 2)][p + 4 * (r / 2)] = cut(self.get(t, arg));
            }
            for (r, arg) in of_b.iter().enumerate() {
                b[p + 4 * r][g] = cut(self.get(t, arg));
            }
            for (r, arg) in of_c.iter().enumerate() {
                c[g + 8 * (r / 2)][2 * p + r % 2] = wide(Ty::F32, self.get(t, arg));
            }
        }
        for lane in 0..32 {
            let (t, g, p) = (start + lane, lane / 4, lane % 4);
            for (r, arg) in to.iter().enumerate() {
                let (row, column) = (g + 8 * (r / 2), 2 * p + r % 2);
                let sum: f64 =
                    (0..8).map(|k| a[row][k] * b[k][column]).sum::<f64>() + c[row][column];
                self.set(t, arg, narrow(Ty::F32, sum))?;
            }
        }
        Ok(())
    }

    /// Loads 8 × 8 matrices of 16-bit numbers. Threads 8j..8j+8 have the addresses of the rows of
    /// matrix j. Of each matrix, thread t receives the numbers 2(t % 4) and 2(t % 4) + 1 of row t /
    /// 4 (if transposed, of column t / 4).
    fn matrices(&mut self, start: usize, args: &[Arg], n: usize, transposed: bool) -> Done<()> {
        if parts(&args[0]).len() != n {
            return Err(format!("ldmatrix.x{n} has {n} registers"));
        }
        for (j, to) in parts(&args[0]).iter().enumerate() {
            let mut matrix = [[0u16; 8]; 8];
            let mut banks = [0u64; 8];
            for (i, row) in matrix.iter_mut().enumerate() {
                let (_, at) =
                    Self::place(Space::Shared, self.address(start + 8 * j + i, &args[1])?);
                Self::aligned(at, 16)?;
                banks[(at / 16 % 8) as usize] += 1;
                let at = self.in_shared(at, 16)?;
                let actor = Actor {
                    thread: WARP,
                    ..self.actor(start)
                };
                self.shadow.read(at, 16, actor)?;
                for (k, number) in row.iter_mut().enumerate() {
                    *number =
                        u16::from_le_bytes([self.shared[at + 2 * k], self.shared[at + 2 * k + 1]]);
                }
            }
            self.stats.matrices += 1;
            self.stats.bank_conflicts += banks.iter().max().map_or(0, |most| most - 1);
            for lane in 0..32 {
                let (g, p) = (lane / 4, lane % 4);
                let [first, second] = [0, 1].map(|i| {
                    u64::from(if transposed {
                        matrix[2 * p + i][g]
                    } else {
                        matrix[g][2 * p + i]
                    })
                });
                self.set(start + lane, to, second << 16 | first)?;
            }
        }
        Ok(())
    }
}

/// The parts of a vector; any other argument as its only part.
fn parts(arg: &Arg) -> &[Arg] {
    match arg {
        Arg::Many(parts) => parts,
        arg => std::slice::from_ref(arg),
    }
}

// --- - ---
// arithmetic

/// Applies `of` to each half of a pair.
fn pair(half: Ty, v: [u64; 3], of: impl Fn([u64; 3]) -> Done<u64>) -> Done<u64> {
    let bits = half.bits();
    Ok(of(v.map(|v| v >> bits))? << bits | of(v.map(|v| low(bits, v)))?)
}

fn binary(op: Binary, ty: Ty, flags: Flags, a: u64, b: u64) -> Done<u64> {
    if let Some(half) = ty.half() {
        return pair(half, [a, b, 0], |[a, b, _]| binary(op, half, flags, a, b));
    }
    let unknown = || Err(format!("{op:?} of {ty:?} is not known"));
    if ty == Ty::F32 {
        let (a, b) = (flushed(f32_of(a), flags.ftz), flushed(f32_of(b), flags.ftz));
        let value = match op {
            Binary::Add => a + b,
            Binary::Sub => a - b,
            Binary::Mul => a * b,
            Binary::Div => a / b,
            Binary::Min | Binary::Max => {
                extreme(f64::from(a), f64::from(b), op == Binary::Max, flags.nan) as f32
            }
            Binary::CopySign => b.copysign(a),
            _ => return unknown(),
        };
        return Ok(u64::from(flushed(value, flags.ftz).to_bits()));
    }
    if ty.is_float() {
        let (a, b) = (wide(ty, a), wide(ty, b));
        // A sum of halves may not fit in an f64. For products and quotients of halves, rounding to
        // f64 first makes no tie.
        let exact = if ty == Ty::F64 {
            |a: f64, b: f64| a + b
        } else {
            odd_sum
        };
        let value = match op {
            Binary::Add => exact(a, b),
            Binary::Sub => exact(a, -b),
            Binary::Mul => a * b,
            Binary::Div => a / b,
            Binary::Min | Binary::Max => extreme(a, b, op == Binary::Max, flags.nan),
            Binary::CopySign => b.copysign(a),
            _ => return unknown(),
        };
        return Ok(narrow(ty, value));
    }
    let is_signed = matches!(ty, Ty::S(_));
    let bits = ty.bits();
    // Signed operands are extended to 64 bits.
    let (x, y) = (a as i64, b as i64);
    let (wide_a, wide_b) = if is_signed {
        (i128::from(x), i128::from(y))
    } else {
        (i128::from(a), i128::from(b))
    };
    let value = match op {
        Binary::Add => a.wrapping_add(b),
        Binary::Sub => a.wrapping_sub(b),
        Binary::Mul => a.wrapping_mul(b),
        Binary::MulWide => return Ok(low(2 * bits, (wide_a * wide_b) as u64)),
        Binary::MulHigh => (wide_a.wrapping_mul(wide_b) >> bits) as u64,
        // PTX does not define this; here it is an error.
        Binary::Div | Binary::Rem if b == 0 => return Err("a division by zero".into()),
        Binary::Div => (wide_a / wide_b) as u64,
        Binary::Rem => (wide_a % wide_b) as u64,
        Binary::Min => wide_a.min(wide_b) as u64,
        Binary::Max => wide_a.max(wide_b) as u64,
        Binary::And => a & b,
        Binary::Or => a | b,
        Binary::Xor => a ^ b,
        Binary::Shl if u64::from(bits) <= b => 0,
        Binary::Shl => a << b,
        Binary::Shr if is_signed => (x >> b.min(63)) as u64,
        Binary::Shr if u64::from(bits) <= b => 0,
        Binary::Shr => a >> b,
        Binary::CopySign => return unknown(),
    };
    Ok(low(bits, value))
}

fn unary(op: Unary, ty: Ty, flags: Flags, a: u64) -> Done<u64> {
    if let Some(half) = ty.half() {
        return pair(half, [a, 0, 0], |[a, ..]| unary(op, half, flags, a));
    }
    if ty.is_float() {
        let sign = 1 << (ty.bits() - 1);
        match op {
            Unary::Neg => return Ok(a ^ sign),
            Unary::Abs => return Ok(a & !sign),
            _ => {}
        }
        let input = if ty == Ty::F32 {
            flushed(f32_of(a), flags.ftz).into()
        } else {
            wide(ty, a)
        };
        let value = match op {
            Unary::Rcp => 1.0 / input,
            Unary::Sqrt => input.sqrt(),
            Unary::Rsqrt => 1.0 / input.sqrt(),
            Unary::Ex2 => input.exp2(),
            Unary::Lg2 => input.log2(),
            Unary::Sin => input.sin(),
            Unary::Cos => input.cos(),
            Unary::Tanh => input.tanh(),
            _ => return Err(format!("{op:?} of {ty:?} is not known")),
        };
        let value = narrow(ty, value);
        return Ok(if ty == Ty::F32 {
            u64::from(flushed(f32_of(value), flags.ftz).to_bits())
        } else {
            value
        });
    }
    let bits = ty.bits();
    Ok(match op {
        Unary::Neg => low(bits, a.wrapping_neg()),
        Unary::Abs => low(bits, (a as i64).unsigned_abs()),
        Unary::Not => low(bits, !a),
        Unary::Popc => u64::from(a.count_ones()),
        Unary::Clz => u64::from(a.leading_zeros() - (64 - bits)),
        Unary::Brev => a.reverse_bits() >> (64 - bits),
        _ => return Err(format!("{op:?} of {ty:?} is not known")),
    })
}

fn fma(ty: Ty, flags: Flags, a: u64, b: u64, c: u64) -> Done<u64> {
    if let Some(half) = ty.half() {
        return pair(half, [a, b, c], |[a, b, c]| fma(half, flags, a, b, c));
    }
    Ok(match ty {
        Ty::F32 => {
            let [a, b, c] = [a, b, c].map(|v| flushed(f32_of(v), flags.ftz));
            u64::from(flushed(a.mul_add(b, c), flags.ftz).to_bits())
        }
        Ty::F64 => f64::from_bits(a)
            .mul_add(f64::from_bits(b), f64::from_bits(c))
            .to_bits(),
        // A product of halves is exact in f64.
        ty => narrow(ty, odd_sum(wide(ty, a) * wide(ty, b), wide(ty, c))),
    })
}

fn compares(compare: [bool; 4], ty: Ty, flags: Flags, a: u64, b: u64) -> bool {
    let order = if ty.is_float() {
        let of = |v| {
            if ty == Ty::F32 {
                flushed(f32_of(v), flags.ftz).into()
            } else {
                wide(ty, v)
            }
        };
        of(a).partial_cmp(&of(b))
    } else if let Ty::S(_) = ty {
        Some((a as i64).cmp(&(b as i64)))
    } else {
        Some(a.cmp(&b))
    };
    compare[order.map_or(3, |order| (order as i8 + 1) as usize)]
}

fn convert(
    to: Ty,
    from: Ty,
    round: Option<Round>,
    flags: Flags,
    saturate: bool,
    v: u64,
) -> Done<u64> {
    let whole = |x: f64| match round {
        Some(Round::IntEven) => Ok(x.round_ties_even()),
        Some(Round::IntZero) => Ok(x.trunc()),
        Some(Round::IntDown) => Ok(x.floor()),
        Some(Round::IntUp) => Ok(x.ceil()),
        _ => Err("no way of rounding to a number without fraction".to_string()),
    };
    match (to, from) {
        // To the nearest, away from zero if two are equally near. NaN stays.
        (Ty::Tf32, _) if f32_of(v).is_nan() => Ok(v),
        (Ty::Tf32, _) => Ok((v + 0x1000) & !0x1fff),
        (Ty::U(_) | Ty::S(_), from) if from.is_float() => {
            let x = if from == Ty::F32 {
                flushed(f32_of(v), flags.ftz).into()
            } else {
                wide(from, v)
            };
            let x = whole(x)?;
            // Rust's conversion saturates too; NaN becomes 0, as in PTX for 32 bits and less.
            let (is_signed, bits) = (matches!(to, Ty::S(_)), to.bits());
            let x = if is_signed {
                (x as i64).clamp(
                    signed(bits, 1 << (bits - 1)),
                    (u64::MAX >> (65 - bits)) as i64,
                ) as u64
            } else {
                (x as u64).min(u64::MAX >> (64 - bits))
            };
            Ok(if is_signed { x } else { low(bits, x) })
        }
        (to, from) if to.is_float() && from.is_float() => {
            let mut x = if from == Ty::F32 {
                flushed(f32_of(v), flags.ftz).into()
            } else {
                wide(from, v)
            };
            if matches!(
                round,
                Some(Round::IntEven | Round::IntZero | Round::IntDown | Round::IntUp)
            ) {
                x = whole(x)?;
            }
            if saturate {
                x = extreme(x, 0.0, true, false).min(1.0);
            }
            let value = narrow(to, x);
            Ok(if to == Ty::F32 {
                u64::from(flushed(f32_of(value), flags.ftz).to_bits())
            } else {
                value
            })
        }
        (to, Ty::S(_)) if to.is_float() => Ok(integer(to, i128::from(v as i64))),
        (to, _) if to.is_float() => Ok(integer(to, i128::from(v))),
        (to, from) => {
            let x = if let Ty::S(_) = from {
                i128::from(v as i64)
            } else {
                i128::from(v)
            };
            let bits = to.bits();
            let x = match (saturate, to) {
                (false, _) => x,
                (true, Ty::S(_)) => x.clamp(-(1 << (bits - 1)), (1 << (bits - 1)) - 1),
                (true, _) => x.clamp(0, (1 << bits) - 1),
            };
            // Signed results are sign-extended to the width of their register.
            Ok(if let Ty::S(_) = to {
                signed(bits, x as u64) as u64
            } else {
                low(bits, x as u64)
            })
        }
    }
}
/// An integer as a float, rounded once.
fn integer(to: Ty, x: i128) -> u64 {
    match to {
        Ty::F32 => u64::from((x as f32).to_bits()),
        Ty::F64 => (x as f64).to_bits(),
        // A half does not keep the last bits of more than 53.
        to => narrow(
            to,
            odd_sum((x >> 32 << 32) as f64, (x & 0xffff_ffff) as f64),
        ),
    }
}
