//! Damaged and hostile files give errors with the place and the reason: no panic, no hang, no
//! memory out of proportion to the file.

use crate::common::{Py, event, pickle, segment, snapshot, text};
use addresses::caching;
use addresses::stats::stats;
use lighterage_trace::{Format, read_bytes, table};
use placement::check::check;
use placement::trace::Trace;
use placement::{Effort, Options, place};
use proptest::prelude::*;

#[track_caller]
fn refused(bytes: &[u8], words: &[&str]) {
    let error = read_bytes(bytes, None)
        .expect_err("it should be refused")
        .to_string();
    for word in words {
        assert!(error.contains(word), "{word:?} should be in: {error}");
    }
}

#[test]
fn tables_name_the_line() {
    let head = "id,lower,upper,size";
    for (text, words) in [
        (
            format!("{head}\n0,0,1,1\n1,5,5,1\n"),
            &["line 3", "ends at 5", "not after its start"][..],
        ),
        (format!("{head}\n0,9,3,1\n"), &["line 2", "ends at 3"]),
        (
            format!("{head}\n0,-4,3,1\n"),
            &["line 2", "lower is -4", "negative"],
        ),
        (
            format!("{head}\n0,0,1,-1\n"),
            &["line 2", "size is -1", "negative"],
        ),
        (
            format!("{head}\n0,0,1,9223372036854775808\n"),
            &["line 2", "2^62"],
        ),
        (
            format!("{head}\n0,0,1,4611686018427387903\n1,0,1,1\n"),
            &["line 3", "2^62"],
        ),
        (
            format!("{head}\n0,0,1,99999999999999999999999\n"),
            &["line 2", "size is 9999", "numbers end at"],
        ),
        (
            format!("{head}\n0,0,1,x\n"),
            &["line 2", "\"x\"", "whole number"],
        ),
        (format!("{head}\n0,0,1,1.5\n"), &["line 2", "whole number"]),
        (format!("{head}\n0,0,1\n"), &["line 2", "3 fields", "4"]),
        (format!("{head}\n,0,1,1\n"), &["line 2", "id is empty"]),
        (
            format!("{head}\n7,0,1,1\n7,0,1,1\n"),
            &["line 3", "two blocks", "7"],
        ),
        (format!("{head}\n"), &["no block"]),
        (
            "id,lower,size\n0,0,1\n".into(),
            &["line 1", "no column upper"],
        ),
        (
            "id,lower,upper,size,colour\n0,0,1,1,red\n".into(),
            &["line 1", "\"colour\"", "known are"],
        ),
        ("id,lower,begin,upper,size\n".into(), &["line 1", "twice"]),
        (
            "id,lower,upper,size,alignment\n0,0,1,1,48\n".into(),
            &["line 2", "48", "power of two"],
        ),
        (
            "id,lower,upper,size,alignment\n0,0,1,1,9223372036854775808\n".into(),
            &["line 2", "2^62"],
        ),
        (
            "id,lower,upper,size,offset\n0,0,1,1,18446744073709551615\n".into(),
            &["line 2", "too large"],
        ),
        (
            "id,lower,upper,size,gaps\n0,0,9,1,3-5 4-6\n".into(),
            &["line 2", "gap 4-6"],
        ),
        (
            "id,lower,upper,size,gaps\n0,0,9,1,3-10\n".into(),
            &["line 2", "gap 3-10", "0-9"],
        ),
        (
            "id,lower,upper,size,gaps\n0,0,9,1,5-3\n".into(),
            &["line 2", "gap 5-3"],
        ),
        (
            "id,lower,upper,size,gaps\n0,0,9,1,x\n".into(),
            &["line 2", "\"x\""],
        ),
        (
            "id,lower,upper,size,in\na,0,9,1,b\n".into(),
            &["line 2", "no block b"],
        ),
        (
            "id,lower,upper,size,in\na,0,9,1,b\nb,0,9,1,c\nc,0,9,1,b\n".into(),
            &["in its own"],
        ),
        (
            "id,lower,upper,size,in\na,0,9,1,a\n".into(),
            &["block a", "in its own"],
        ),
        (
            "id,begin,end,size\n0,0,18446744073709551615,1\n".into(),
            &["line 2", "beyond all time"],
        ),
    ] {
        refused(text.as_bytes(), words);
    }
}

#[test]
fn other_texts_name_the_line() {
    for (text, words) in [
        ("1 4 100\n5 2 100\n", &["line 2", "ends at 2"][..]),
        ("1 4 100\n5 2\n", &["line 2", "2 fields"]),
        ("1 4 -100\n", &["line 1", "negative"]),
        ("lighterage-trace 2\n", &["line 1", "version \"2\""]),
        ("lighterage-trace 1\nfree a\n", &["line 2", "no block a"]),
        (
            "lighterage-trace 1\nalloc a 1\nalloc a 1\n",
            &["line 3", "block a is still there"],
        ),
        (
            "lighterage-trace 1\nalloc a 1\nfree a\nalloc a 1\n",
            &["line 4", "two blocks with the id a"],
        ),
        (
            "lighterage-trace 1\nalloc a 9223372036854775808\n",
            &["line 2", "2^62"],
        ),
        ("lighterage-trace 1\nalloc a -1\n", &["line 2", "\"-1\""]),
        ("lighterage-trace 1\nalloc a\n", &["line 2", "size"]),
        ("lighterage-trace 1\nalloc a,b 1\n", &["line 2", "a,b"]),
        (
            "lighterage-trace 1\nalloc a 1 colour=red\n",
            &["line 2", "colour=red"],
        ),
        (
            "lighterage-trace 1\nalloc a 1 align=3\n",
            &["line 2", "power of two"],
        ),
        (
            "lighterage-trace 1\nalloc a 1 phase=7\n",
            &["block a", "phase 7"],
        ),
        (
            "lighterage-trace 1\nalloc a 1 in=a\n",
            &["line 2", "no block a"],
        ),
        (
            "lighterage-trace 1\nalloc a 1\nalloc b 2 in=a\n",
            &["block b", "2 bytes", "1, in which"],
        ),
        (
            "lighterage-trace 1\nalloc a 1\nfree a\nalloc b 1 in=a\n",
            &["block b", "begins at 2", "lives from 0 to 1"],
        ),
        (
            "lighterage-trace 1\nalloc a 1\nalloc b 1 in=a stream=2\n",
            &["block b", "another stream"],
        ),
        (
            "lighterage-trace 1\nalloc a 1 dyn\nalloc b 1 in=a\n",
            &["block b", "dynamic"],
        ),
        (
            "lighterage-trace 1\nalloc a 1 at=0\nalloc b 1 in=a at=8\n",
            &["block b", "address", "a"],
        ),
        ("lighterage-trace 1\nwait 1\n", &["line 2", "two streams"]),
        ("lighterage-trace 1\nwait 1 x\n", &["line 2", "\"x\""]),
        ("lighterage-trace 1\nleave mlp\n", &["line 2", "mlp"]),
        ("lighterage-trace 1\nreserve 7\n", &["line 2", "reserve"]),
        ("lighterage-trace 1\ntick 5\ntick 4\n", &["line 3", "past"]),
        (
            "lighterage-trace 1\ntick 5\nalloc a 1\nfree a\n",
            &["line 4", "tick 5"],
        ),
        (
            "lighterage-trace 1\ntick 18446744073709551615\nalloc a 1\n",
            &["line 3", "time is over"],
        ),
        (
            "lighterage-trace 1\nalloc a 1\ntick 18446744073709551615\npool b\nfree a\n",
            &["line 5", "no block a"],
        ),
        ("1 0x10 8 0\n1 0x10 8 0\n", &["line 2", "still there"]),
        ("1 0x10 8 0\n0 0x20 8 0\n", &["line 2", "0x20"]),
        ("1 0x10 x 0\n", &["line 1", "\"x\""]),
        (
            "Iteration Index : 0\nmicro-batch : Q\n",
            &["line 2", "\"Q\""],
        ),
        (
            "Iteration Index : 0\na->B Layer : F-end\n",
            &["line 2", "has not begun"],
        ),
        ("", &["empty"]),
        (" \n\n", &["empty"]),
        ("hello\n", &["no known format", "hello", "--format"]),
        ("PK\u{3}\u{4}", &["compressed"]),
    ] {
        refused(text.as_bytes(), words);
    }
    refused(
        b"id,lower,upper,size\n0,0,1,1\n\xff\xfe\n",
        &["line 3", "UTF-8"],
    );
    refused(&[1, 2, 3, 255], &["UTF-8"]);
}

#[test]
fn a_pickle_runs_nothing() {
    for (opcodes, words) in [
        (
            &b"cos\nsystem\n(S'ls'\ntR."[..],
            &["byte 2", "GLOBAL os.system", "runs code"][..],
        ),
        (
            b"\x8c\x02os\x8c\x06system\x93.",
            &["byte 14", "STACK_GLOBAL os.system", "runs code"],
        ),
        (b"]]R.", &["byte 4", "REDUCE"]),
        (b"]]b.", &["byte 4", "BUILD"]),
        (b"(ios\nsystem\n.", &["INST os.system"]),
        (b"]]\x81.", &["NEWOBJ"]),
        (b"]Q.", &["BINPERSID"]),
        (b"\x82\x01.", &["EXT1"]),
        (b"\x97.", &["NEXT_BUFFER"]),
        (b"I1\n.", &["'I'", "protocol 0"]),
        (b"\xff.", &["byte 2", "0xff"]),
    ] {
        refused(&[b"\x80\x04", opcodes].concat(), words);
    }
}

#[test]
fn a_pickle_cannot_lie_about_lengths() {
    for (opcodes, words) in [
        (
            &b"X\xff\xff\xff\xff"[..],
            &["byte 2", "4294967295 bytes", "0 are left"][..],
        ),
        (
            b"\x8d\xff\xff\xff\xff\xff\xff\xff\xff",
            &["18446744073709551615"],
        ),
        (b"\x8b\xff\xff\xff\x7f", &["2147483647"]),
        (
            b"\x8a\x11\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\x01.",
            &["17 bytes", "16 are the most"],
        ),
        (b"K", &["cut off"]),
        (b"", &["cut off"]),
        (b".", &["stack is empty"]),
        (b"a.", &["stack is empty"]),
        (b"e.", &["no mark"]),
        (b"}(K\x01u.", &["without a value"]),
        (b"}K\x01a.", &["appended to a dict"]),
        (b"]K\x01K\x02s.", &["set in a list"]),
        (b"j\xff\xff\xff\xff.", &["memo", "4294967295"]),
    ] {
        refused(&[b"\x80\x04", opcodes].concat(), words);
    }
    refused(b"\x80\x09.", &["protocol 9"]);
}

#[test]
fn depth_and_cycles_are_no_matter() {
    // A million nested lists.
    let deep = [
        &b"\x80\x04"[..],
        &b"]".repeat(1_000_000),
        &b"a".repeat(999_999),
        b".",
    ]
    .concat();
    refused(&deep, &["should be a dict"]);
    let marks = [&b"\x80\x04"[..], &b"(".repeat(1_000_000), b"."].concat();
    refused(&marks, &["stack is empty"]);
    // A list that contains itself, used for everything.
    let own = Py::Raw(b"]\x94h\0a".to_vec());
    let value = Py::Dict(vec![("segments", own.clone()), ("device_traces", own)]);
    refused(&pickle(&value), &["should be"]);
    // Each list contains the previous one twice: 2^60 lists if they were not shared.
    let mut shared = b"\x80\x04]".to_vec();
    (0..60).for_each(|_| shared.extend(b"2\x86"));
    shared.push(b'.');
    refused(&shared, &["should be a dict"]);
}

#[test]
fn snapshots_say_what_is_wrong() {
    let with = |events: Vec<Py>| snapshot(vec![], vec![events]);
    refused(&pickle(&Py::Int(7)), &["an int", "should be a dict"]);
    refused(
        &pickle(&Py::Dict(vec![("segments", Py::List(vec![]))])),
        &["device_traces", "missing"],
    );
    refused(&with(vec![]), &["no events", "_record_memory_history"]);
    refused(
        &with(vec![Py::Int(1)]),
        &["event 0 of device 0", "should be a dict"],
    );
    refused(
        &with(vec![event("alloc", -1, 8)]),
        &["event 0 of device 0: addr", "-1"],
    );
    refused(
        &with(vec![event("alloc", 8, -8)]),
        &["event 0 of device 0: size", "-8"],
    );
    refused(
        &with(vec![event("alloc", 8, i64::MAX)]),
        &["event 0", "2^62"],
    );
    refused(
        &with(vec![event("alloc", 8, 8), event("alloc", 8, 8)]),
        &["event 1 of cuda:0", "0x8", "still there"],
    );
    let free = || event("free_completed", 8, 8);
    refused(
        &with(vec![free(), free()]),
        &["event 1 of cuda:0", "0x8", "twice"],
    );
    let huge = Py::Dict(vec![
        ("action", text("alloc")),
        ("addr", Py::Long(vec![255; 16])),
        ("size", Py::Int(1)),
    ]);
    refused(&with(vec![huge]), &["addr", "-1"]);
    let device = segment(4096, 0, 8, &[]);
    refused(
        &snapshot(vec![device], vec![vec![event("alloc", 8, 8)]]),
        &["segments[0]", "1024 devices"],
    );
    let full = || segment(0, 0, i64::MAX, &[]);
    refused(
        &snapshot(
            vec![full(), full(), full()],
            vec![vec![event("alloc", 8, 8)]],
        ),
        &["segments[2]", "2^64"],
    );
}

#[test]
fn what_is_shared_is_not_visited_without_end() {
    // 2^16 times the same list of 2^16 times the same event: half a gigabyte of events in a file of
    // a few hundred kilobytes.
    let many = |times: usize| [&b"("[..], &b"h\0".repeat(times), b"e"].concat();
    let list = |times: usize| Py::Raw([&b"]"[..], &many(times)].concat());
    let memo =
        |value: Py| Py::Raw([&pickle(&value)[2..pickle(&value).len() - 1], b"\x94"].concat());
    let root = |first: Py, traces: Py, segments: Py| {
        pickle(&Py::Dict(vec![
            ("first", first),
            ("segments", segments),
            ("device_traces", traces),
        ]))
    };
    let events = || Py::List(vec![event("alloc", 8, 8), event("alloc", 16, 8)]);
    refused(
        &root(memo(events()), list(1 << 16), Py::List(vec![])),
        &["device_traces", "1024 devices"],
    );
    refused(
        &root(memo(events()), list(1000), Py::List(vec![])),
        &["repeats itself"],
    );
    let blocks = segment(0, 0, 64, &[(0, 8), (8, 8), (16, 8)]);
    refused(
        &root(memo(blocks), Py::List(vec![events()]), list(1 << 16)),
        &["repeats itself"],
    );
    // One event of 10^5 entries; one whose text is a megabyte.
    let keys = (0..100_000).map(|_| ("action", text("alloc"))).collect();
    refused(
        &snapshot(vec![], vec![vec![Py::Dict(keys)]]),
        &["event 0 of device 0", "missing"],
    );
    let long = Py::Dict(vec![("action", Py::Str("a".repeat(1 << 20)))]);
    refused(
        &snapshot(vec![], vec![vec![long]]),
        &["event 0 of device 0: action"],
    );
}

#[test]
fn texts_cannot_nest_without_end() {
    let nested = format!("lighterage-trace 1\n{}", "enter m\n".repeat(100_000));
    refused(nested.as_bytes(), &["line 258", "256 modules"]);
    let pools: String = (0..100_000).map(|i| format!("pool p{i}\n")).collect();
    refused(
        format!("lighterage-trace 1\n{pools}").as_bytes(),
        &["line 1025", "1024 pools"],
    );
}

/// One file of each format.
fn files() -> Vec<Vec<u8>> {
    let events = vec![
        event("alloc", 4096, 700),
        event("alloc", 8192, 90),
        event("free_requested", 4096, 700),
        event("free_completed", 4096, 700),
        event("segment_alloc", 1 << 30, 20 << 20),
        event("free_completed", 0, 64),
    ];
    vec![
        b"id,lower,upper,size,alignment,offset,gaps\nb1,0,3,4,8,-1,1-2\nb2,3,9,400,1,16,\n\
            b3,0,9,7,1,,4-5 7-8\n"
            .to_vec(),
        b"pool,id,lower,upper,size,offset\na,b1,0,3,4,0\nb,b2,3,9,400,0\n".to_vec(),
        b"1 4 100\n2 5 200\n3 9 77\n".to_vec(),
        b"lighterage-trace 1\nalloc w 4096 align=512 at=0\nphase fwd.0\nenter mlp\nalloc a 9 \
            stream=7 dyn\nfree a\nleave mlp\n\
          phase -\ntick 9\nalloc b 5 gaps=10-11 phase=1\ntick 12\nfree b module=1\n"
            .to_vec(),
        b"1 0x10 4096 0\nIteration Index : 0\nmicro-batch : F\n1 0x20 100 0x55d0\nl.mlp->MoE \
            Layer : F-start\n1 0x30 64 0\n\
          l.mlp->MoE Layer : F-end\n0 0x20 100 0x55d0\n"
            .to_vec(),
        snapshot(vec![segment(0, 0, 16384, &[(8192, 512)])], vec![events]),
    ]
}

/// An accepted file can be used; a refused one has a message.
fn survives(bytes: &[u8], format: Option<Format>) {
    match read_bytes(bytes, format) {
        Ok(pools) => {
            for pool in &pools {
                for block in &pool.trace.blocks {
                    assert!(block.start < block.end);
                    assert!(
                        block
                            .gaps
                            .iter()
                            .all(|gap| block.start <= gap.0 && gap.0 < gap.1 && gap.1 <= block.end)
                    );
                }
                let _ = stats(&pool.trace);
                placed(&pool.trace);
                let _ = pool.history.as_ref().map(caching::replay);
                let _ = caching::simulate(&pool.trace, caching::Segments::Fixed);
                let _ = caching::simulate(&pool.trace, caching::Segments::Expandable);
            }
            let offsets: Vec<Vec<u64>> = pools
                .iter()
                .map(|pool| vec![0; pool.trace.blocks.len()])
                .collect();
            let plan = table::write_plan(&pools, &offsets);
            let _ = table::read_plan(&plan, &pools);
            let written = lighterage_trace::events::write(&pools);
            assert!(read_bytes(written.as_bytes(), None).is_ok(), "{written}");
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}

/// If the trace has a plan, the plan is right.
fn placed(trace: &Trace) {
    const ALIGN: u64 = 512;
    let options = Options {
        effort: Effort::Fast,
        align: ALIGN,
        threads: 1,
        ..Options::default()
    };
    let Ok(placed) = place(trace, &options, &mut |_, _| ()) else {
        return;
    };
    assert!(placed.peak >= placed.lower_bound);
    // Addresses that the trace gives may contradict each other.
    if trace.blocks.iter().all(|block| block.offset.is_none()) {
        assert!(check(trace, &placed.offsets, ALIGN, None).is_ok());
    }
}

#[test]
fn valid_files_are_read() {
    for file in files() {
        assert_eq!(
            read_bytes(&file, None).map(|_| ()),
            Ok(()),
            "{}",
            String::from_utf8_lossy(&file)
        );
        survives(&file, None);
    }
}

/// Other formats have names that ours has not.
#[test]
fn names_are_written_as_one_word() {
    let text = "lighterage-trace 1\nphase a\nenter b\nalloc 0 64\nleave b\nphase -\nalloc 1 64\n";
    for name in [",.mlp", "a, b", "-", " ", ",", "c"] {
        let mut pools = read_bytes(text.as_bytes(), None).unwrap();
        pools[0].trace.phases[1].name = name.into();
        pools[0].trace.modules[1].name = name.into();
        let written = lighterage_trace::events::write(&pools);
        let again = read_bytes(written.as_bytes(), None).unwrap();
        assert_eq!(again[0].trace.blocks, pools[0].trace.blocks, "{written}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    /// Bytes are changed, lost or doubled; numbers become large.
    #[test]
    fn mutated_files_do_no_harm(
        which in 0usize..6,
        edits in prop::collection::vec((0u8..6, any::<prop::sample::Index>(), any::<u8>()), 1..5),
    ) {
        let mut file = files().swap_remove(which);
        for (kind, at, byte) in edits {
            if file.is_empty() {
                break;
            }
            let at = at.index(file.len());
            match kind {
                0 => file[at] = byte,
                1 => file[at] ^= 1 << (byte % 8),
                2 => drop(file.remove(at)),
                3 => file.insert(at, byte),
                4 => file.truncate(at),
                _ => drop(file.splice(at..at, *b"18446744073709551615")),
            }
        }
        survives(&file, None);
        for format in Format::ALL {
            survives(&file, Some(format));
        }
    }

    /// Random bytes.
    #[test]
    fn random_bytes_do_no_harm(mut bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        survives(&bytes, None);
        bytes.splice(0..0, [0x80, 4]);
        survives(&bytes, None);
    }
}
