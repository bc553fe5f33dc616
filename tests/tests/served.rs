//! From a recorded trace to served requests: a mixture of experts whose routing differs in every
//! step.

#[path = "../../runtime/allocator/tests/arena/mod.rs"]
mod arena;

use addresses::generate::{self, Setup};
use addresses::serve;
use arena::Arena;
use lighterage_alloc::{Allocator, Plan};
use lighterage_tests::serving::{self, Call};
use placement::trace::{Block, Origin, Span, Trace};
use placement::{Options, place};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

/// The events of a program, in order.
#[derive(Clone, Debug)]
enum Event {
    Alloc {
        id: usize,
        bytes: u64,
        stream: u32,
        dynamic: bool,
    },
    Free(usize),
    Enter,
    Leave,
}

/// A model of some layers, each with experts. Sizes in units of 512 bytes, so that an expert's size
/// never equals another one.
#[derive(Clone, Debug)]
struct Model {
    /// For each layer: the units kept for the backward, the temporary units, and the recorded bytes
    /// of its experts.
    layers: Vec<(u64, u64, Vec<u64>)>,
    /// True if a layer's experts are freed in the layer (as with recomputation); else in its
    /// backward.
    recomputed: bool,
    /// Blocks that the first half of the next step frees.
    carried: Vec<u64>,
}

impl Model {
    /// The weights, then steps; `tokens` gives an expert's bytes, and 0 if it has none.
    fn run(&self, steps: usize, mut tokens: impl FnMut(usize, u64) -> u64) -> Vec<Event> {
        let mut events = vec![];
        let mut n = 0;
        let mut alloc = |events: &mut Vec<Event>, bytes, stream, dynamic| {
            n += 1;
            events.push(Event::Alloc {
                id: n,
                bytes,
                stream,
                dynamic,
            });
            n
        };
        for (i, (keeps, ..)) in self.layers.iter().enumerate() {
            alloc(&mut events, keeps * 1024 + i as u64 * 2, 0, false);
        }
        let mut carried: Vec<usize> = vec![];
        for step in 0..steps {
            let mut kept = vec![];
            for (i, (keeps, needs, experts)) in self.layers.iter().enumerate() {
                events.push(Event::Enter);
                let output = alloc(&mut events, keeps * 512, 0, false);
                // Every second layer gathers on another stream.
                let input = alloc(&mut events, needs * 512, i as u32 % 2, false);
                let bytes: Vec<u64> = experts
                    .iter()
                    .map(|&bytes| tokens(step, bytes))
                    .filter(|bytes| 0 < *bytes)
                    .collect();
                let experts: Vec<usize> = bytes
                    .iter()
                    .map(|&bytes| alloc(&mut events, bytes, 0, true))
                    .collect();
                events.push(Event::Free(input));
                if self.recomputed {
                    events.extend(experts.iter().copied().map(Event::Free));
                    kept.push((output, vec![]));
                } else {
                    kept.push((output, experts));
                }
                events.push(Event::Leave);
            }
            events.extend(carried.drain(..).map(Event::Free));
            for ((_, needs, _), (output, experts)) in self.layers.iter().zip(kept).rev() {
                events.push(Event::Enter);
                let gradient = alloc(&mut events, needs * 1024, 0, false);
                events.extend(experts.into_iter().chain([output]).map(Event::Free));
                let next = alloc(&mut events, needs * 512, 0, false);
                events.extend([gradient, next].map(Event::Free));
                events.push(Event::Leave);
            }
            carried = self
                .carried
                .iter()
                .map(|bytes| alloc(&mut events, bytes * 512, 0, false))
                .collect();
        }
        events
    }
}

fn trace(events: &[Event]) -> Trace {
    let mut trace = Trace {
        modules: vec![Span::default()],
        phases: vec![Span::default()],
        ..Trace::default()
    };
    let (mut open, mut module, mut tick) = (BTreeMap::new(), 0, 0);
    for event in events {
        match *event {
            Event::Alloc {
                id,
                bytes,
                stream,
                dynamic,
            } => {
                open.insert(id, trace.blocks.len());
                let origin = Origin {
                    stream,
                    dynamic,
                    modules: (module, 0),
                    phases: (0, 0),
                };
                trace.blocks.push(Block {
                    id: id.to_string(),
                    start: tick,
                    bytes,
                    origin,
                    ..Block::default()
                });
                tick += 1;
            }
            Event::Free(id) => {
                let block = &mut trace.blocks[open.remove(&id).unwrap()];
                (block.end, block.origin.modules.1) = (tick, module);
                tick += 1;
            }
            Event::Enter => {
                trace.modules.push(Span {
                    name: "moe".into(),
                    start: tick,
                    end: tick,
                });
                module = trace.modules.len() as u32 - 1;
            }
            Event::Leave => {
                trace.modules[module as usize].end = tick;
                module = 0;
            }
        }
    }
    open.into_values().for_each(|i| trace.blocks[i].end = tick);
    trace
}

/// First fit, largest first: slow and plain.
fn first_fit(trace: &Trace) -> Vec<u64> {
    let has = |block: &Block, tick| {
        block.start <= tick
            && tick < block.end
            && !block.gaps.iter().any(|gap| gap.0 <= tick && tick < gap.1)
    };
    let meet = |a: &Block, b: &Block| {
        (a.start.max(b.start)..a.end.min(b.end)).any(|tick| has(a, tick) && has(b, tick))
    };
    let mut order: Vec<usize> = (0..trace.blocks.len()).collect();
    order.sort_by_key(|&i| (std::cmp::Reverse(trace.blocks[i].bytes), i));
    let mut offsets = vec![0; trace.blocks.len()];
    let mut placed: Vec<usize> = vec![];
    for i in order {
        let block = &trace.blocks[i];
        let others = placed.iter().filter(|&&j| meet(block, &trace.blocks[j]));
        let mut taken: Vec<(u64, u64)> = others
            .map(|&j| (offsets[j], offsets[j] + trace.blocks[j].bytes))
            .collect();
        taken.sort_unstable();
        for (lo, hi) in taken {
            if offsets[i] + block.bytes <= lo {
                break;
            }
            offsets[i] = offsets[i].max(hi.next_multiple_of(512));
        }
        placed.push(i);
    }
    offsets
}

fn plan(trace: &Trace) -> Plan {
    let text = serve::plan(trace, 512, |trace| Ok::<_, ()>(first_fit(trace))).unwrap();
    Plan::read(&text).unwrap_or_else(|error| panic!("{error}\n{text}"))
}

fn models() -> impl Strategy<Value = Model> {
    let layer = (1u64..9, 1u64..40, prop::collection::vec(1u64..12_000, 0..5));
    (
        prop::collection::vec(layer, 1..7),
        any::<bool>(),
        prop::collection::vec(1u64..30, 0..3),
    )
        .prop_map(|(layers, recomputed, carried)| Model {
            layers,
            recomputed,
            carried,
        })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]
    /// In every step, every planned request gets its planned place, for any requests of the
    /// experts; and no two blocks overlap.
    #[test]
    fn a_dynamic_block_never_meets_a_planned_one(model in models(), seed in any::<u64>()) {
        let recorded = model.run(3, |_, bytes| bytes | 1);
        let plan = plan(&trace(&recorded));
        // All three steps are equal, except that the first has no predecessor.
        prop_assert!(0 < plan.step() && plan.requests().len() < recorded.len());
        let arena = Arena::new(1 << 26);
        let mut allocator = Allocator::planned(arena.pool(), plan).unwrap();
        let mut state = seed | 1;
        let mut random = |n: u64| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state % n
        };
        let mut missing = 0;
        // The same mean number of tokens as before, never a multiple of 512 bytes; one expert in
        // eight gets none.
        let events = model.run(8, |_, bytes| match random(8) {
            0 => {
                missing += 1;
                0
            }
            _ => (random(2 * bytes) | 1).max(1),
        });
        let mut live = BTreeMap::new();
        let (mut planned, mut experts) = (0, 0);
        for event in events {
            match event {
                Event::Alloc {
                    id,
                    bytes,
                    stream,
                    dynamic,
                } => {
                    let stream = u64::from(stream) * 64;
                    let address = allocator.malloc(bytes, stream).unwrap();
                    arena.own(address, bytes, id as u64);
                    arena.work(address, bytes, stream, true);
                    live.insert(id, (address, bytes, stream));
                    if dynamic { experts += 1 } else { planned += 1 }
                }
                Event::Free(id) => {
                    let (address, bytes, stream) = live.remove(&id).unwrap();
                    arena.work(address, bytes, stream, false);
                    arena.disown(address, bytes, id as u64);
                    prop_assert!(allocator.free(address));
                }
                Event::Enter | Event::Leave => {}
            }
        }
        let stats = allocator.stats();
        prop_assert_eq!((stats.planned, stats.occupied), (planned, 0), "{}", stats);
        prop_assert_eq!(stats.dynamic + stats.dynamic_fallback, experts, "{}", stats);
        prop_assert_eq!(stats.fallback, stats.dynamic_fallback, "{}", stats);
        let strays = stats.mismatches;
        prop_assert_eq!(
            (
                strays.extra,
                strays.missing,
                strays.resized,
                strays.reordered
            ),
            (0, 0, 0, 0),
            "{}",
            stats
        );
        // Requests that are skipped at the very end have not been counted so far.
        prop_assert!(strays.dynamic_missing <= missing, "{}", stats);
    }
}

/// A plan in which streams share no bytes needs no waits; a plan in which they share bytes is
/// smaller, and streams wait.
#[test]
fn streams_that_keep_apart_do_not_wait() {
    let layers = (0..6).map(|i| (2 + i % 3, 24 + i, vec![])).collect();
    let model = Model {
        layers,
        recomputed: false,
        carried: vec![],
    };
    let served = |share: bool| {
        let placed = |step: &Trace| {
            let step = if share {
                step.one_stream()
            } else {
                step.clone()
            };
            let options = Options {
                align: 512,
                ..Options::default()
            };
            place(&step, &options, &mut |_, _| ()).map(|placement| placement.offsets)
        };
        let text = serve::plan(&trace(&model.run(3, |_, bytes| bytes)), 512, placed).unwrap();
        let plan = Plan::read(&text).unwrap();
        let bytes = plan.bytes();
        let mut allocator = Allocator::planned(Arena::new(1 << 26).pool(), plan).unwrap();
        let mut live = BTreeMap::new();
        for event in model.run(4, |_, bytes| bytes) {
            match event {
                Event::Alloc {
                    id, bytes, stream, ..
                } => {
                    live.insert(id, allocator.malloc(bytes, u64::from(stream) * 64).unwrap());
                }
                Event::Free(id) => assert!(allocator.free(live.remove(&id).unwrap())),
                Event::Enter | Event::Leave => {}
            }
        }
        let stats = allocator.stats();
        assert_eq!(
            (stats.planned, stats.fallback),
            (stats.requests, 0),
            "{stats}"
        );
        (bytes, stats.waits)
    };
    let (apart, shared) = (served(false), served(true));
    assert_eq!(apart.1, 0);
    assert!(0 < shared.1 && shared.0 < apart.0, "{apart:?} {shared:?}");
}

/// With the idle bytes of the plan, experts need less from the cache than without (Table 3 of the
/// paper).
#[test]
fn idle_bytes_are_used() {
    // Weights of a layer's backward are larger than the kept blocks of its forward: bytes are idle
    // while experts run.
    let model = Model {
        layers: (0..6)
            .map(|i| (2 + i % 3, 24, vec![3000, 2000 + 100 * i, 2500]))
            .collect(),
        recomputed: true,
        carried: vec![],
    };
    let plan = plan(&trace(&model.run(3, |_, bytes| bytes | 1)));
    let mut allocator = Allocator::planned(Arena::new(1 << 26).pool(), plan).unwrap();
    let mut live = BTreeMap::new();
    for event in model.run(4, |step, bytes| (bytes + step as u64 * 200) | 1) {
        match event {
            Event::Alloc {
                id, bytes, stream, ..
            } => {
                live.insert(id, allocator.malloc(bytes, stream.into()).unwrap());
            }
            Event::Free(id) => assert!(allocator.free(live.remove(&id).unwrap())),
            Event::Enter | Event::Leave => {}
        }
    }
    let stats = allocator.stats();
    assert_eq!(
        (stats.dynamic, stats.fallback, stats.peak_cache_bytes),
        (4 * 6 * 3, 0, 0),
        "{stats}"
    );
}

/// Of the thousands of requests of a step of Llama2-7B, 16 do not come. Few others fall back to the
/// cache: each finds the place of an equal one, or idle bytes.
#[test]
fn a_few_missing_requests_send_few_to_the_cache() {
    let setup = Setup {
        recompute: true,
        micro_batches: 8,
        steps: 3,
        ..Setup::new(generate::Model::Llama2)
    };
    let recorded = setup.trace().unwrap();
    let plan = serving::plan(&recorded);
    let step = plan.requests().len() - plan.step() as usize;
    assert!(4000 < step, "{step} requests in a step");
    let calls = serving::calls(&recorded);
    let served = |is_missing: &dyn Fn(usize) -> bool| {
        let mut allocator = serving::allocator(plan.clone());
        let mut live: BTreeMap<u64, (u64, usize)> = BTreeMap::new();
        let mut address_of = BTreeMap::new();
        for &Call {
            comes, block: i, ..
        } in &calls
        {
            if is_missing(i) {
                continue;
            }
            if !comes {
                let address = address_of.remove(&i).unwrap();
                live.remove(&address);
                assert!(allocator.free(address));
                continue;
            }
            let block = &recorded.blocks[i];
            let address = allocator
                .malloc(block.bytes, block.origin.stream.into())
                .unwrap();
            let below = live.range(..address + block.bytes).next_back();
            assert!(
                below.is_none_or(|(start, (bytes, _))| start + bytes <= address),
                "{i} meets {below:?}"
            );
            live.insert(address, (block.bytes, i));
            address_of.insert(i, address);
        }
        allocator.stats()
    };
    assert_eq!(served(&|_| false).fallback, 0);
    // Requests of the last step, evenly spread.
    let mut order: Vec<usize> = (0..recorded.blocks.len()).collect();
    order.sort_by_key(|&i| recorded.blocks[i].start);
    let last = &order[order.len() - step..];
    let missing: BTreeSet<usize> = (0..16).map(|k| last[(2 * k + 1) * step / 32]).collect();
    let stats = served(&|i| missing.contains(&i));
    assert!((1..=16).contains(&stats.mismatches.missing), "{stats}");
    assert!(stats.fallback <= 40, "{stats}");
}
