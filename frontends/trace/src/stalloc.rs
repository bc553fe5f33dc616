//! The log of STAlloc's profiler (github.com/infinigence/STAlloc, `Allocator/trace.cpp` and
//! `utils/`): the output of mode `Trace`, a file for each device.
//!
//! ```text
//! Iteration Index : 0              a step begins; `end` ends the last
//! micro-batch : F                  a forward of the next micro-batch begins
//!                                  B, W: backwards, of activations and of weights
//! layers.3.mlp->MoELayer Layer : F-start     a module begins; F-end, B-start, B-end
//! 1 0x7f1e41329c00 2048 0          asks: address, bytes, stream
//! 0 0x7f1e41329c00 2048 0          frees
//! ```
//!
//! Requests within a module called `mlp`, but not within its router or shared experts, are dynamic,
//! as in STAlloc's own reader. Phases are called `ITERATION.KIND.MICROBATCH`.

use crate::recorder::{Asked, Recorder};
use crate::{Error, POOL, Pool};
use std::collections::HashMap;

/// Reads a log.
pub(crate) fn read(text: &str) -> Result<Vec<Pool>, Error> {
    let mut log = Log {
        recorder: Recorder::new(POOL),
        streams: HashMap::from([("0".into(), 0), ("(nil)".into(), 0)]),
        iteration: "head".into(),
        batches: [0; 3],
        blocks: 0,
    };
    for (line, text) in text
        .lines()
        .enumerate()
        .map(|(i, line)| (i + 1, line.trim()))
    {
        if !text.is_empty() {
            log.line(text)
                .map_err(|message| Error::line(line, message))?;
        }
    }
    Ok(vec![log.recorder.finish()])
}

struct Log {
    recorder: Recorder<u64>,
    /// Streams by their handles, in the order of their first use.
    streams: HashMap<String, u32>,
    iteration: String,
    /// The next micro-batch of F, B and W.
    batches: [u64; 3],
    blocks: u64,
}

impl Log {
    fn line(&mut self, text: &str) -> Result<(), String> {
        if let Some(iteration) = text.strip_prefix("Iteration Index :") {
            self.iteration = iteration.trim().into();
            self.batches = [0; 3];
            self.recorder.phase(None);
            return Ok(());
        }
        if let Some(kind) = text.strip_prefix("micro-batch :") {
            return self.micro_batch(kind.trim());
        }
        match text.split_once(" Layer :") {
            Some((module, what)) => self.layer(module, what.trim()),
            None => self.request(text),
        }
    }

    fn micro_batch(&mut self, kind: &str) -> Result<(), String> {
        let at = ["F", "B", "W"].iter().position(|known| *known == kind);
        let at =
            at.ok_or_else(|| format!("a micro-batch of kind {kind:?}: F, B and W are known"))?;
        let (iteration, part) = (&self.iteration, ["fwd", "bwd", "wgrad"][at]);
        let name = format!("{iteration}.{part}.{}", self.batches[at]);
        self.batches[at] += 1;
        self.recorder.phase(Some(name));
        Ok(())
    }

    fn layer(&mut self, module: &str, what: &str) -> Result<(), String> {
        let module = module.split_once("->").map_or(module, |(name, _)| name);
        let module = module.trim();
        if module.is_empty() {
            return Err("the layer has no name".into());
        }
        let (kind, edge) = what
            .split_once('-')
            .ok_or("a layer's line ends with F-start, F-end or such")?;
        // The backward of a module is a separate run.
        let name = if kind == "F" {
            module.to_string()
        } else {
            format!("{module}:{kind}")
        };
        match edge {
            "start" => self.recorder.enter(name),
            "end" if self.recorder.leave(&name) => Ok(()),
            "end" => Err(format!("the module {name} ends and has not begun")),
            _ => Err(format!("{edge:?} is neither start nor end")),
        }
    }

    /// A request for a block, or the free of a block.
    fn request(&mut self, text: &str) -> Result<(), String> {
        let fields: Vec<&str> = text.split_ascii_whitespace().collect();
        let [status, address, bytes, stream] = fields[..] else {
            return Err(
                "neither a request (1|0 ADDRESS SIZE STREAM) nor a mark of an iteration, \
                 micro-batch or layer"
                    .into(),
            );
        };
        let digits = address.strip_prefix("0x");
        let key = digits.map_or_else(|| address.parse(), |digits| u64::from_str_radix(digits, 16));
        let key = key.map_err(|_| format!("{address:?} is no address"))?;
        let bytes: u64 = bytes
            .parse()
            .map_err(|_| format!("the size is {bytes:?}: not a whole number"))?;
        match status {
            "1" => {
                // Two handles mean the first stream.
                let next = self.streams.len() as u32 - 1;
                let asked = Asked {
                    bytes,
                    stream: *self.streams.entry(stream.into()).or_insert(next),
                    dynamic: self.is_dynamic(),
                    ..Asked::default()
                };
                let id = self.blocks.to_string();
                self.blocks += 1;
                self.recorder.alloc(key, id, asked)?;
            }
            "0" => {
                // Address 0 belongs to requests of no bytes, which are not recorded.
                if self.recorder.free(&key)?.is_none() && key != 0 {
                    return Err(format!("{address} is freed and was not asked for"));
                }
            }
            _ => return Err(format!("{status:?} is neither 1, a request, nor 0, a free")),
        }
        Ok(())
    }

    fn is_dynamic(&self) -> bool {
        for name in self.recorder.running().rev() {
            let name = name.split(':').next().unwrap_or(name);
            let last = name.rsplit('.').next().unwrap_or(name);
            match last {
                "shared_experts" | "shared_expert" | "router" => return false,
                "mlp" => return true,
                _ => {}
            }
        }
        false
    }
}
