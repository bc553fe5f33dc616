//! Makes blocks from events in order of time.
//!
//! Unless ticks are given, each event that requests or frees a block has its own tick, so that a
//! block that ends before another begins does not overlap it. A block that exists before the first
//! event lives from tick 0; a block that is never freed lives to the last tick.

use crate::{Gate, Pool, empty};
use placement::trace::{Block, Origin, Span, Wait};
use std::collections::HashMap;

/// Makes a pool from events. `K` identifies a live block: an id, or an address.
pub(crate) struct Recorder<K> {
    pool: Pool,
    gate: Gate,
    open: HashMap<K, usize>,
    clock: u64,
    /// Ticks are given, and events take none.
    timed: bool,
    phase: u32,
    /// Modules that run, the innermost last.
    modules: Vec<u32>,
}

/// Deeper nesting of modules than this is a mistake.
const MOST_NESTED: usize = 256;

const TIME_OVER: &str = "time is over: no block lives beyond tick 2^64 - 1";

/// The data of an event besides the block's id.
#[derive(Clone, Copy, Default)]
pub(crate) struct Asked {
    pub(crate) bytes: u64,
    pub(crate) alignment: u64,
    pub(crate) offset: Option<u64>,
    pub(crate) stream: u32,
    pub(crate) dynamic: bool,
    pub(crate) within: Option<usize>,
}

impl<K: std::hash::Hash + Eq> Recorder<K> {
    pub(crate) fn new(name: &str) -> Recorder<K> {
        let pool = Pool {
            name: name.into(),
            trace: empty(),
            ..Pool::default()
        };
        Recorder {
            pool,
            gate: Gate::default(),
            open: HashMap::new(),
            clock: 0,
            timed: false,
            phase: 0,
            modules: vec![],
        }
    }

    /// Sets the tick.
    pub(crate) fn at(&mut self, tick: u64) -> Result<(), String> {
        if tick < self.clock {
            return Err(format!("tick {tick} is past: it is {} already", self.clock));
        }
        (self.clock, self.timed) = (tick, true);
        Ok(())
    }

    fn tick(&mut self) -> Result<u64, String> {
        let now = self.clock;
        if !self.timed {
            self.clock = now.checked_add(1).ok_or(TIME_OVER)?;
        }
        Ok(now)
    }

    fn module(&self) -> u32 {
        self.modules.last().copied().unwrap_or(0)
    }

    /// Adds a block that begins at `start`; returns its position.
    fn add(&mut self, key: K, id: String, asked: Asked, start: u64) -> Result<usize, String> {
        let Asked {
            bytes,
            alignment,
            offset,
            stream,
            dynamic,
            within,
        } = asked;
        self.gate.id(&id)?;
        self.gate.size(bytes, alignment)?;
        offset.map_or(Ok(()), |offset| self.gate.offset(offset, bytes))?;
        let origin = Origin {
            phases: (self.phase, 0),
            modules: (self.module(), 0),
            stream,
            dynamic,
        };
        let at = self.pool.trace.blocks.len();
        self.open.insert(key, at);
        let block = Block {
            id,
            start,
            end: start,
            bytes,
            alignment,
            offset,
            within,
            gaps: vec![],
            origin,
        };
        self.pool.trace.blocks.push(block);
        Ok(at)
    }

    /// A block is requested.
    pub(crate) fn alloc(&mut self, key: K, id: String, asked: Asked) -> Result<&mut Block, String> {
        if let Some(&at) = self.open.get(&key) {
            let there = &self.pool.trace.blocks[at];
            return Err(format!(
                "block {} is still there, from tick {}",
                there.id, there.start
            ));
        }
        let start = self.tick()?;
        if start == u64::MAX {
            return Err(TIME_OVER.into());
        }
        let at = self.add(key, id, asked, start)?;
        Ok(&mut self.pool.trace.blocks[at])
    }

    /// A block existed before the first event.
    pub(crate) fn was_there(&mut self, key: K, id: String, asked: Asked) -> Result<(), String> {
        // The first event may be its end.
        self.clock = self.clock.max(1);
        self.add(key, id, asked, 0).map(|_| ())
    }

    /// A block is freed. None if there is no block with this key.
    pub(crate) fn free(&mut self, key: &K) -> Result<Option<&mut Block>, String> {
        let Some(at) = self.open.remove(key) else {
            return Ok(None);
        };
        let end = self.tick()?;
        if end == self.pool.trace.blocks[at].start {
            return Err(format!("the block goes at tick {end}, at which it came"));
        }
        let (phase, module) = (self.phase, self.module());
        let block = &mut self.pool.trace.blocks[at];
        block.end = end;
        (block.origin.phases.1, block.origin.modules.1) = (phase, module);
        Ok(Some(block))
    }

    /// The position of a block, live or freed.
    pub(crate) fn find(&self, id: &str) -> Result<usize, String> {
        self.gate.find(id)
    }

    /// A stream waits for all work submitted to another stream.
    pub(crate) fn wait(&mut self, stream: u32, on: u32) -> Result<(), String> {
        let tick = self.tick()?;
        self.pool.trace.waits.push(Wait { tick, stream, on });
        Ok(())
    }

    /// A phase begins, and the previous one ends; without a name no phase begins.
    pub(crate) fn phase(&mut self, name: Option<String>) {
        let now = self.clock;
        if self.phase != 0 {
            self.pool.trace.phases[self.phase as usize].end = now;
        }
        self.phase = match name {
            Some(name) => {
                self.pool.trace.phases.push(Span {
                    name,
                    start: now,
                    end: now,
                });
                self.pool.trace.phases.len() as u32 - 1
            }
            None => 0,
        };
    }

    /// A module begins within the current modules.
    pub(crate) fn enter(&mut self, name: String) -> Result<(), String> {
        if MOST_NESTED <= self.modules.len() {
            return Err(format!(
                "more than {MOST_NESTED} modules run within each other"
            ));
        }
        let now = self.clock;
        self.pool.trace.modules.push(Span {
            name,
            start: now,
            end: now,
        });
        self.modules.push(self.pool.trace.modules.len() as u32 - 1);
        Ok(())
    }

    /// The innermost running module with this name ends. False if there is none.
    pub(crate) fn leave(&mut self, name: &str) -> bool {
        let modules = &mut self.pool.trace.modules;
        match self
            .modules
            .iter()
            .rposition(|&module| modules[module as usize].name == name)
        {
            Some(at) => {
                let module = self.modules.remove(at);
                modules[module as usize].end = self.clock;
                true
            }
            None => false,
        }
    }

    /// Names of the modules that run, the innermost last.
    pub(crate) fn running(&self) -> impl DoubleEndedIterator<Item = &str> {
        self.modules
            .iter()
            .map(|&module| &*self.pool.trace.modules[module as usize].name)
    }

    /// The pool; live blocks live to the end.
    pub(crate) fn finish(mut self) -> Pool {
        // No event has the last tick.
        let end = if self.timed {
            self.clock.saturating_add(1)
        } else {
            self.clock.max(1)
        };
        self.clock = end;
        let still: Vec<usize> = self.open.values().copied().collect();
        for at in still {
            self.pool.trace.blocks[at].end = end;
        }
        self.phase(None);
        for module in std::mem::take(&mut self.modules) {
            self.pool.trace.modules[module as usize].end = end;
        }
        self.pool
    }
}
