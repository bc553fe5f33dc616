//! Every format, from text or bytes to blocks.

use crate::common::{event, segment, snapshot};
use addresses::caching::{self, Agreement, Segments};
use addresses::stats::stats;
use lighterage_trace::{Format, Pool, events, read_bytes, table};
use placement::check::check;
use placement::trace::{Block, Origin, Span, Trace, Wait};
use proptest::prelude::*;

fn read(text: &str) -> Vec<Pool> {
    read_bytes(text.as_bytes(), None).unwrap_or_else(|error| panic!("{error}\n{text}"))
}

/// Start, end and size of all blocks of the only pool.
fn lives(text: &str) -> Vec<(u64, u64, u64)> {
    let pools = read(text);
    assert_eq!(pools.len(), 1);
    pools[0]
        .trace
        .blocks
        .iter()
        .map(|block| (block.start, block.end, block.bytes))
        .collect()
}

#[test]
fn tables_have_columns_in_any_order() {
    assert_eq!(
        lives("id,lower,upper,size\nb1,0,3,4\nb2,3,9,8\n"),
        [(0, 3, 4), (3, 9, 8)]
    );
    assert_eq!(
        lives("# made by hand\r\nsize, upper ,lower,hint,id\r\n4,3,0,-1,b1\r\n"),
        [(0, 3, 4)]
    );
    // Ends in a column of this name are inclusive.
    assert_eq!(lives("buffer_id,begin,end,size\n0,0,2,4\n"), [(0, 3, 4)]);
    let pools = read(
        "id,lower,upper,size,alignment,offset,gaps\nb,0,9,4,8,16,2-3 \
         5-7\nc,0,9,4,1,-1,\nd,0,9,4,1,-1,2-3@0:2\n",
    );
    let [b, c, d] = &pools[0].trace.blocks[..] else {
        panic!()
    };
    assert_eq!(
        (b.alignment, b.offset, &b.gaps[..]),
        (8, Some(16), &[(2, 3), (5, 7)][..])
    );
    assert_eq!((c.offset, c.gaps.len(), d.gaps.len()), (None, 0, 0));
}

#[test]
fn lines_are_numbered() {
    let pools = read("1 4 100\n2 5 200\n");
    assert_eq!(pools[0].trace.blocks[1].id, "1");
    assert_eq!(
        lives("1 4 100\n\n# and\n2 5 200\n"),
        [(1, 4, 100), (2, 5, 200)]
    );
}

#[test]
fn events_have_phases_and_modules() {
    let pools = read(
        "lighterage-trace 1\nalloc w 4096 align=512 at=0\nphase fwd.0\nenter mlp\nalloc a 100 \
         stream=7 dyn\nenter up\n\
         alloc t 8\nleave up\nleave mlp\nphase bwd.0\nfree t\nfree a\nphase -\npool cuda:1\nalloc \
         w 1\n",
    );
    assert_eq!(
        pools.iter().map(|pool| &*pool.name).collect::<Vec<_>>(),
        ["memory", "cuda:1"]
    );
    let Trace {
        blocks,
        phases,
        modules,
        ..
    } = &pools[0].trace;
    let span = |name: &str, start, end| Span {
        name: name.into(),
        start,
        end,
    };
    assert_eq!(phases[1..], [span("fwd.0", 1, 3), span("bwd.0", 3, 5)]);
    assert_eq!(modules[1..], [span("mlp", 1, 3), span("up", 2, 3)]);
    let [w, a, t] = &blocks[..] else { panic!() };
    assert_eq!(
        (w.start, w.end, w.alignment, w.offset),
        (0, 5, 512, Some(0))
    );
    assert_eq!((a.start, a.end), (1, 4));
    assert_eq!(
        a.origin,
        Origin {
            phases: (1, 2),
            modules: (1, 0),
            stream: 7,
            dynamic: true
        }
    );
    assert_eq!((t.start, t.end, t.origin.modules), (2, 3, (2, 0)));
}

#[test]
fn ticks_may_be_given() {
    let text = "lighterage-trace 1\ntick 5\nalloc a 8 gaps=6-7\nalloc b 8\ntick 9\nfree a\n";
    assert_eq!(lives(text), [(5, 9, 8), (5, 10, 8)]);
}

#[test]
fn blocks_may_share_bytes_and_streams_wait() {
    let text = "lighterage-trace 1\nalloc a 8 stream=1\nalloc b 8 stream=1 in=a\nfree a\nwait 0 \
        1\nfree b\nalloc c 9\nfree c\n";
    let pools = read(text);
    let Trace { blocks, waits, .. } = &pools[0].trace;
    assert_eq!(
        blocks.iter().map(|block| block.within).collect::<Vec<_>>(),
        [None, Some(0), None]
    );
    assert_eq!(
        waits[..],
        [Wait {
            tick: 3,
            stream: 0,
            on: 1
        }]
    );
    assert_eq!(lives(text), [(0, 2, 8), (1, 4, 8), (5, 6, 9)]);
    assert_eq!(events::write(&pools), text);
    // In a table the containing block may come later; a plan has the column, too.
    let pools = read("id,lower,upper,size,in\nb,2,9,4,a\na,0,2,8,\n");
    assert_eq!(pools[0].trace.blocks[0].within, Some(1));
    let plan = table::write_plan(&pools, &[vec![0, 0]]);
    assert_eq!(
        plan,
        "id,lower,upper,size,in,offset\nb,2,9,4,a,0\na,0,2,8,,0\n"
    );
    assert_eq!(read(&plan)[0].trace.blocks[0].within, Some(1));
    let mut sorted = read(&events::write(&pools))[0].trace.blocks.clone();
    sorted.reverse();
    assert_eq!(
        (sorted[0].within, &*sorted[0].id, &*sorted[1].id),
        (Some(0), "b", "a")
    );
}

#[test]
fn logs_of_stalloc_know_what_is_dynamic() {
    let pools = read(
        "1 0x10 4096 0\nIteration Index : 0\nmicro-batch : F\n1 0x20 100 0x55d0\n\
         layers.0.mlp->MoELayer Layer : F-start\n1 0x30 64 0\nlayers.0.mlp.router->TopKRouter \
         Layer : F-start\n\
         1 0x40 32 0\nlayers.0.mlp.router->TopKRouter Layer : F-end\nlayers.0.mlp->MoELayer Layer \
         : F-end\n\
         micro-batch : B\n0 0x20 100 0x55d0\n1 0x20 50 0\n0 0x20 50 0\nIteration Index : end\n",
    );
    let Trace { blocks, phases, .. } = &pools[0].trace;
    assert_eq!(
        phases.iter().map(|span| &*span.name).collect::<Vec<_>>(),
        ["", "0.fwd.0", "0.bwd.0"]
    );
    assert_eq!(
        blocks
            .iter()
            .map(|block| block.origin.dynamic)
            .collect::<Vec<_>>(),
        [false, false, true, false, false]
    );
    assert_eq!(
        (blocks[1].origin.stream, blocks[1].origin.phases),
        (1, (1, 2))
    );
    assert_eq!((blocks[0].start, blocks[0].end), (0, 7));
}

#[test]
fn snapshots_say_what_was_there() {
    let events = vec![
        event("alloc", 1000, 80),
        event("free_requested", 500, 40),
        event("free_completed", 500, 40),
        event("alloc", 500, 24),
        event("free_requested", 1000, 80),
    ];
    // The block at 2000 has no event.
    let segments = vec![
        segment(0, 0, 4096, &[(500, 512), (1000, 512), (2000, 512)]),
        segment(2, 0, 4096, &[(0, 64)]),
    ];
    let pools = read_bytes(&snapshot(segments, vec![events, vec![]]), None).unwrap();
    assert_eq!(
        pools.iter().map(|pool| &*pool.name).collect::<Vec<_>>(),
        ["cuda:0", "cuda:2"]
    );
    let lives: Vec<(u64, u64, u64)> = pools[0]
        .trace
        .blocks
        .iter()
        .map(|block| (block.start, block.end, block.bytes))
        .collect();
    assert_eq!(lives, [(0, 2, 40), (0, 4, 512), (1, 4, 80), (3, 4, 24)]);
    assert_eq!(pools[0].reserved_bytes, Some(4096));
}

/// A recorded step of a small GPT: see tests/data/strip.py.
fn training() -> Vec<Pool> {
    read_bytes(include_bytes!("data/training.pickle"), None).unwrap()
}

#[test]
fn a_real_allocator_follows_the_rules() {
    let pools = training();
    let history = pools[0].history.as_ref().unwrap();
    assert_eq!((history.segments.len(), history.events.len()), (216, 3442));
    assert_eq!(
        caching::replay(history),
        Some(Agreement {
            requests: 1721,
            same: 1721
        })
    );
    let stats = stats(&pools[0].trace);
    assert_eq!(
        (stats.blocks, stats.live_peak_bytes, stats.by_phases),
        (1950, 13923997700, true)
    );
    let reserved = pools[0].reserved_bytes.unwrap();
    // It had trained before, so its segments differ from those of a fresh start.
    let fresh = caching::simulate(&pools[0].trace, Segments::Fixed).reserved_bytes;
    assert!(
        stats.live_peak_bytes <= fresh && fresh <= reserved,
        "{fresh} {reserved}"
    );
}

#[test]
fn one_false_address_is_found() {
    let mut history = training()[0].history.clone().unwrap();
    let at = history
        .segments
        .iter()
        .position(|segment| segment.used.is_empty() && !segment.small)
        .unwrap();
    let there = history.segments[at].address;
    // A request that fits only in large free blocks, at an address that no rule gives: after the
    // start of one.
    let (address, bytes) = (there + (4 << 20), 5 << 20);
    history.events.push(caching::Event::Alloc {
        address,
        bytes,
        stream: 0,
    });
    history.events.push(caching::Event::Free { address, bytes });
    assert_eq!(
        caching::replay(&history),
        Some(Agreement {
            requests: 1722,
            same: 1721
        })
    );
}

#[test]
fn formats_are_told_by_content() {
    for (text, format) in [
        ("id,lower,upper,size\n0,0,1,1\n", Format::Csv),
        ("0 1 1\n", Format::Lines),
        ("lighterage-trace 1\nalloc 0 1\n", Format::Events),
        ("1 0x10 8 0\n", Format::Stalloc),
        ("Iteration Index : 0\n1 0x10 8 0\n", Format::Stalloc),
    ] {
        assert_eq!(
            read(text),
            read_bytes(text.as_bytes(), Some(format)).unwrap()
        );
        for other in Format::ALL.into_iter().filter(|&other| other != format) {
            assert!(
                read_bytes(text.as_bytes(), Some(other)).is_err(),
                "{text} as {}",
                other.name()
            );
        }
    }
}

#[test]
fn plans_are_written_and_read() {
    let text =
        "pool,id,lower,upper,size,alignment,gaps\na,x,0,9,8,16,2-3\nb,x,0,9,8,1,\na,y,2,3,8,1,\n";
    let pools = read(text);
    let offsets = vec![vec![32, 32], vec![0]];
    assert_eq!(check(&pools[0].trace, &offsets[0], 1, None), Ok(40));
    let plan = table::write_plan(&pools, &offsets);
    assert_eq!(table::read_plan(&plan, &pools).unwrap(), offsets);
    // A plan is a table, so it is also a trace with fixed addresses.
    let given = read(&plan);
    assert_eq!(
        given[0]
            .trace
            .blocks
            .iter()
            .map(|block| block.offset)
            .collect::<Vec<_>>(),
        [Some(32), Some(32)]
    );
    for (from, to, words) in [
        (
            "b,x,0,9,8,1,,0\n",
            "",
            "does not place block x of the pool b",
        ),
        ("b,x,0,9,8,1,,0\n", "b,x,0,9,8,1,,\n", "no offset"),
        (
            "b,x,0,9,8,1,,0\n",
            "b,z,0,9,8,1,,0\n",
            "no block z in the pool b",
        ),
        (
            "b,x,0,9,8,1,,0\n",
            "b,x,0,8,8,1,,0\n",
            "upper is 8 in the plan and 9",
        ),
        (
            "b,x,0,9,8,1,,0\n",
            "b,x,0,9,8,1,,0\nb,x,0,9,8,1,,0\n",
            "placed twice",
        ),
    ] {
        assert!(plan.contains(from));
        let error = table::read_plan(&plan.replace(from, to), &pools)
            .unwrap_err()
            .to_string();
        assert!(error.contains(words), "{error}");
    }
}

/// Text of our own format: a random sequence of events.
fn any_events() -> impl Strategy<Value = String> {
    let line = (0u8..11, 0usize..6, 1u64..100);
    (prop::collection::vec(line, 1..60), any::<bool>()).prop_map(|(lines, timed)| {
        let mut out = "lighterage-trace 1\n".to_string();
        let (mut next, mut live, mut running, mut clock) = (0, vec![], vec![], 0);
        for (what, pick, bytes) in lines {
            if timed {
                clock += bytes % 3;
                out += &format!("tick {clock}\n");
            }
            match what {
                0..=3 => {
                    let more = ["", " dyn", " stream=3", " align=64 at=128", " phase=0", ""][pick];
                    // A block that is large enough and has no own options may contain another.
                    let plain = |&&(.., size): &&(i32, u64, u64)| bytes <= size;
                    let shared = live.iter().find(plain).filter(|_| pick == 5);
                    let shared = shared.map_or(String::new(), |(other, ..)| format!(" in={other}"));
                    out += &format!("alloc {next} {bytes}{more}{shared}\n");
                    live.push((next, clock, if pick == 0 || pick == 5 { bytes } else { 0 }));
                    next += 1;
                }
                4..=6
                    if live
                        .get(pick)
                        .is_some_and(|&(_, since, _)| !timed || since < clock) =>
                {
                    out += &format!("free {}\n", live.remove(pick).0);
                }
                7 => {
                    out += &format!(
                        "phase {}\n",
                        ["fwd.0", "bwd.0", "-", "fwd.1", "opt", "-"][pick]
                    )
                }
                10 => out += &format!("wait {} {}\n", pick, bytes % 4),
                8 => {
                    running.push(pick % 3);
                    out += &format!("enter m{}\n", pick % 3);
                }
                9 => {
                    if let Some(name) = running.pop() {
                        out += &format!("leave m{name}\n");
                    }
                }
                _ => {}
            }
        }
        out + if next == 0 { "alloc w 1\n" } else { "" }
    })
}

proptest! {
    /// Written again and read again, the result is the same.
    #[test]
    fn events_go_round(text in any_events()) {
        let pools = read(&text);
        let written = events::write(&pools);
        prop_assert_eq!(&read(&written), &pools, "{}", written);
        prop_assert_eq!(events::write(&read(&written)), written);
    }

    /// Any blocks can be written as events; they come back in order of their start.
    #[test]
    fn tables_become_events(
        items in prop::collection::vec((0u64..20, 1u64..9, 0u64..50, 0u64..3), 1..30),
    ) {
        let blocks = items
            .iter()
            .enumerate()
            .map(|(i, &(start, span, bytes, gap))| Block {
                id: format!("b{i}"),
                start,
                end: start + span,
                bytes,
                gaps: if gap < span && 0 < gap {
                    vec![(start + gap, start + span)]
                } else {
                    vec![]
                },
                ..Block::default()
            });
        let none = || vec![Span::default()];
        let mut trace = Trace {
            blocks: blocks.collect(),
            phases: none(),
            modules: none(),
            ..Trace::default()
        };
        let pool = Pool {
            name: "memory".into(),
            trace: trace.clone(),
            ..Pool::default()
        };
        trace.blocks.sort_by_key(|block| block.start);
        prop_assert_eq!(&read(&events::write(&[pool]))[0].trace, &trace);
    }
}

#[test]
fn a_snapshot_can_be_written_as_events() {
    let pools = training();
    let again = read(&events::write(&pools));
    assert_eq!(again[0].trace, pools[0].trace);
}
