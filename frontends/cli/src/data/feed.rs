//! Batches one after the other, read ahead by a thread while steps run.

use super::{Batch, Order, Source, Value};
use crate::failure::Failure;
use std::cell::RefCell;
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread::{self, JoinHandle};

/// A source, and the order of its units.
pub(crate) struct Data {
    source: Box<dyn Source>,
    order: Order,
    /// Into how many batches each one of the source is cut, along its rows.
    parts: u64,
    /// The source's batch that was read last, with its number.
    whole: RefCell<Option<(u64, Batch)>>,
}

impl Data {
    /// The source's units, shuffled if there is a seed.
    pub(crate) fn new(source: Box<dyn Source>, seed: Option<u64>) -> Data {
        let order = Order::new(source.units(), source.units_per_batch(), seed);
        Data {
            source,
            order,
            parts: 1,
            whole: RefCell::new(None),
        }
    }

    /// The same, with each batch of the source cut into `parts` batches with equal numbers of rows.
    /// What has no rows is in each of them.
    pub(crate) fn in_parts(self, parts: u64) -> Data {
        Data { parts, ..self }
    }

    /// The number of whole batches; 0 for a model without inputs.
    pub(crate) fn batches(&self) -> u64 {
        self.source.units() / self.source.units_per_batch() * self.parts
    }

    /// What the order of batches depends on, as text.
    pub(crate) fn order(&self) -> String {
        self.order.to_string()
    }

    /// The number of batches in an epoch, at least 1.
    pub(crate) fn epoch(&self) -> u64 {
        self.order.batches() * self.parts
    }

    /// A batch, by its number in the run; after the last batch of an epoch the next epoch follows.
    pub(crate) fn batch(&self, number: u64) -> Result<Batch, Failure> {
        let (whole, part) = (number / self.parts, number % self.parts);
        let read = || self.source.batch(&self.order.units_of(whole));
        if self.parts == 1 {
            return read();
        }
        let mut last = self.whole.borrow_mut();
        let (_, batch) = match last.take() {
            Some(last_read) if last_read.0 == whole => last.insert(last_read),
            _ => last.insert((whole, read()?)),
        };
        let cut = |(value, has_rows): (&Value, bool)| match has_rows {
            true => {
                let length = value.bytes.len() / self.parts as usize;
                let mut shape = value.shape.clone();
                if let Some(rows) = shape.first_mut() {
                    *rows /= self.parts;
                }
                Value {
                    shape,
                    bytes: value.bytes[part as usize * length..][..length].to_vec(),
                }
            }
            false => value.clone(),
        };
        Ok(batch.iter().zip(self.source.with_rows()).map(cut).collect())
    }
}

/// Where the batches of a run come from.
pub(crate) struct Feed {
    from: From,
}

enum From {
    /// Each batch is read when it is needed.
    Source { data: Data, next: u64 },
    /// A thread reads ahead. It ends when the receiver is dropped, or after the last batch.
    Thread {
        batches: Option<Receiver<Result<Batch, Failure>>>,
        thread: Option<JoinHandle<()>>,
    },
}

impl Feed {
    /// Batches `first` up to `end`, at most `ahead` of them read before they are needed.
    pub(crate) fn start(data: Data, first: u64, end: u64, ahead: usize) -> Result<Feed, Failure> {
        // The thread holds a batch while the channel is full.
        let Some(queued) = ahead.checked_sub(1) else {
            let from = From::Source { data, next: first };
            return Ok(Feed { from });
        };
        let (sender, receiver) = sync_channel(queued);
        let read = move || {
            for number in first..end {
                let batch = data.batch(number);
                let failed = batch.is_err();
                if sender.send(batch).is_err() || failed {
                    return;
                }
            }
        };
        let thread = thread::Builder::new().name("data".into()).spawn(read);
        let thread =
            thread.map_err(|e| Failure::System(format!("the thread that reads data: {e}")))?;
        Ok(Feed {
            from: From::Thread {
                batches: Some(receiver),
                thread: Some(thread),
            },
        })
    }

    /// The next batch.
    pub(crate) fn next(&mut self) -> Result<Batch, Failure> {
        match &mut self.from {
            From::Source { data, next } => {
                let batch = data.batch(*next);
                *next += 1;
                batch
            }
            From::Thread { batches, .. } => {
                let batch = batches.as_ref().and_then(|batches| batches.recv().ok());
                batch.unwrap_or_else(|| {
                    let why = "the thread that reads data ended before its last batch";
                    Err(Failure::Bug(why.into()))
                })
            }
        }
    }
}

impl Drop for Feed {
    fn drop(&mut self) {
        if let From::Thread { batches, thread } = &mut self.from {
            // The thread may wait for room: its next send fails.
            drop(batches.take());
            if let Some(thread) = thread.take() {
                // It reports its failures as batches.
                let _ = thread.join();
            }
        }
    }
}
