//! The CPU machine runs artifacts, and reports what it cannot run.

use crate::common::*;
use artifact::*;
use lighterage_runtime::kernels::halves::join;
use lighterage_runtime::{Error, Machine, Options, Port, StateInit};
use std::time::{Duration, Instant};

fn machine(artifact: Artifact, options: Options) -> Machine {
    Machine::new(artifact, options).expect("the artifact should load")
}

fn shuffled(seed: u64) -> Options {
    Options {
        shuffle: Some(seed),
        ..Options::default()
    }
}

/// Runs `n` steps of `offloading` and returns out and w.
fn offload(options: Options, n: usize) -> (f32, f32) {
    let mut machine = machine(offloading(), options);
    for step in 0..n {
        machine.write_input("x", &floats(step as f32)).unwrap();
        machine.step().unwrap();
    }
    let (out, w) = (
        machine.read_output("out").unwrap(),
        machine.read_state("w").unwrap(),
    );
    assert!(values(&out).iter().all(|&y| y == values(&out)[0]));
    (values(&out)[0], values(&w)[0])
}

#[test]
fn streams_compute_what_the_list_says() {
    // w starts at 1; after steps with x = 0, 1, 2, 3 it is 7; the last out is 2 (3 + 4).
    assert_eq!(offload(Options::default(), 4), (14.0, 7.0));
    for n in [1, 2, 100] {
        let xs: f32 = (0..n).map(|x| x as f32).sum();
        let last = (n - 1) as f32;
        assert_eq!(
            offload(Options::default(), n),
            (2.0 * (1.0 + xs), 1.0 + xs),
            "{n} steps, last x {last}"
        );
    }
}

#[test]
fn shuffled_runs_equal_threaded_ones() {
    let expected = offload(Options::default(), 5);
    for seed in 0..64 {
        assert_eq!(offload(shuffled(seed), 5), expected, "seed {seed}");
    }
}

#[test]
fn steps_launched_together_overlap_and_agree() {
    let run = |options| {
        let mut machine = machine(offloading(), options);
        machine.write_input("x", &floats(1.0)).unwrap();
        for _ in 0..7 {
            machine.launch().unwrap();
        }
        assert_eq!(machine.wait().unwrap().step, 7);
        values(&machine.read_state("w").unwrap())[0]
    };
    assert_eq!(run(Options::default()), 8.0);
    for seed in 0..64 {
        assert_eq!(run(shuffled(seed)), 8.0, "seed {seed}");
    }
}

#[test]
fn the_host_waits_its_turn() {
    let mut machine = machine(offloading(), Options::default());
    machine.write_input("x", &floats(1.0)).unwrap();
    machine.launch().unwrap();
    for refused in [
        machine.read_output("out").err(),
        machine.write_input("x", &floats(2.0)).err(),
    ] {
        assert!(matches!(refused, Some(Error::Host(why)) if why.contains("wait")));
    }
    machine.wait().unwrap();
    machine.write_input("x", &floats(2.0)).unwrap();
}

#[test]
fn a_machine_may_be_dropped_while_it_runs() {
    let options = Options {
        link_bandwidth: Some(64.0),
        ..Options::default()
    };
    let mut machine = machine(offloading(), options);
    machine.write_input("x", &floats(1.0)).unwrap();
    machine.launch().unwrap();
    machine.launch().unwrap();
}

/// A shuffled run fills dead bytes with NaNs, and no value is among them. A read of bytes that were
/// never written, which are zero in an ordinary run, is refused.
#[test]
fn shuffled_runs_keep_what_is_read_and_reads_of_dead_bytes_are_refused() {
    let plan = |place: u64| {
        let mut p = Plan::new(5, 0, &["compute"]);
        p.run(
            0,
            "a",
            "add",
            &[at(DEVICE, 0), at(DEVICE, 0)],
            &[at(DEVICE, 1)],
        );
        p.run(
            0,
            "b",
            "add",
            &[at(DEVICE, 1), at(DEVICE, 1)],
            &[at(DEVICE, 2)],
        );
        p.run(
            0,
            "c",
            "add",
            &[at(DEVICE, 2), at(DEVICE, place)],
            &[at(DEVICE, 3)],
        );
        p.input("x", at(DEVICE, 0));
        p.output("y", at(DEVICE, 3));
        p.0
    };
    let run = |place, options| {
        let mut machine = machine(plan(place), options);
        machine.write_input("x", &floats(1.0)).unwrap();
        machine.step().unwrap();
        values(&machine.read_output("y").unwrap())[0]
    };
    assert_eq!(run(2, Options::default()), 8.0);
    assert_eq!(run(2, shuffled(0)), 8.0);
    let refused = Machine::new(plan(4), Options::default()).err().unwrap();
    let message = "line c: reads bytes 256..320 of pool device, and nothing has written byte 256";
    assert!(refused.to_string().contains(message), "{refused}");
}

#[test]
fn inputs_that_a_step_overwrites_are_written_before_each() {
    let mut p = Plan::new(1, 0, &["compute"]);
    p.run(
        0,
        "a",
        "add",
        &[at(DEVICE, 0), at(DEVICE, 0)],
        &[at(DEVICE, 0)],
    );
    p.input("x", at(DEVICE, 0));
    p.output("y", at(DEVICE, 0));
    for options in [Options::default(), shuffled(1)] {
        let mut machine = machine(p.0.clone(), options);
        assert!(
            machine
                .step()
                .unwrap_err()
                .to_string()
                .contains("input x must be written")
        );
        machine.write_input("x", &floats(3.0)).unwrap();
        machine.step().unwrap();
        assert_eq!(values(&machine.read_output("y").unwrap())[0], 6.0);
        assert!(
            machine
                .step()
                .unwrap_err()
                .to_string()
                .contains("input x must be written")
        );
    }
}

#[test]
fn the_measured_peak_is_what_was_touched() {
    let mut artifact = offloading();
    let mut exact = machine(artifact.clone(), Options::default());
    assert_eq!(exact.measured_peak_bytes(), 0);
    exact.write_input("x", &floats(1.0)).unwrap();
    exact.step().unwrap();
    assert_eq!(exact.measured_peak_bytes(), 4 * 64);
    let host = [
        exact.measured_in(MemorySpace::Host),
        exact.planned_in(MemorySpace::Host),
    ];
    assert_eq!(host, [3 * 64; 2]);
    assert_eq!(exact.measured_in(MemorySpace::Disk), 0);
    assert_eq!(
        exact.device_pool_bytes(),
        exact.summary().planned_peak_bytes
    );
    // A pool that is larger than the plan needs is detected.
    artifact.pools[0].bytes += 64;
    artifact.pools[1].bytes += 64;
    artifact.summary.planned_peak_bytes += 64;
    let mut loose = machine(artifact, Options::default());
    loose.write_input("x", &floats(1.0)).unwrap();
    loose.step().unwrap();
    assert_eq!(
        (loose.measured_peak_bytes(), loose.device_pool_bytes()),
        (4 * 64, 5 * 64)
    );
    assert_eq!(loose.measured_in(MemorySpace::Host), 3 * 64);
    assert_eq!(loose.planned_in(MemorySpace::Host), 4 * 64);
}

#[test]
fn states_without_a_value_are_asked_for_by_name() {
    let mut p = Plan::new(4, 0, &["compute"]);
    p.state(
        "fc.weight",
        StateKind::Param,
        at(DEVICE, 0),
        Initial::Absent,
    );
    p.state("fc.bias", StateKind::Param, at(DEVICE, 1), Initial::Absent);
    let mut table = at(DEVICE, 2);
    table.shape = vec![4, 4];
    p.state("table", StateKind::Param, table, Initial::Absent);
    p.state("mean", StateKind::Buffer, at(DEVICE, 3), Initial::Absent);
    let mut machine = machine(p.0, Options::default());
    let why = machine.step().unwrap_err().to_string();
    assert!(
        why.contains("state fc.weight has no value, nor do 3 others"),
        "{why}"
    );
    machine
        .initialise(&StateInit {
            seed: 1,
            std: Some(0.5),
        })
        .unwrap();
    let why = machine.step().unwrap_err().to_string();
    assert!(why.contains("state mean has no value:"), "{why}");
    machine.write_state("mean", &floats(0.0)).unwrap();
    machine.step().unwrap();
    assert_eq!(machine.read_state("fc.weight").unwrap(), floats(1.0));
    assert_eq!(machine.read_state("fc.bias").unwrap(), floats(0.0));
    let table = machine.read_state("table").unwrap();
    assert!(values(&table).iter().all(|x| *x != 0.0 && x.abs() < 5.0));
    // The same seed gives the same values; states with a value stay as they are.
    machine
        .initialise(&StateInit {
            seed: 2,
            std: Some(0.5),
        })
        .unwrap();
    assert_eq!(machine.read_state("table").unwrap(), table);
}

/// The f32 that is drawn for a parameter is in its master, if it has one.
#[test]
fn masters_have_the_numbers_that_are_drawn() {
    let drawn = |dtype, master: Option<(&str, DType)>| {
        let mut p = Plan::new(2, 0, &["compute"]);
        let matrix = |place, dtype| Operand {
            dtype,
            shape: vec![4, 4],
            ..at(DEVICE, place)
        };
        p.state("w", StateKind::Param, matrix(0, dtype), Initial::Absent);
        if let Some((path, dtype)) = master {
            p.state(path, StateKind::Moment, matrix(1, dtype), Initial::Zeros);
        }
        let mut machine = machine(p.0, Options::default());
        let init = StateInit {
            seed: 1,
            std: Some(0.5),
        };
        machine.initialise(&init).unwrap();
        let w = machine.read_state("w").unwrap();
        let master = master.map(|(path, _)| machine.read_state(path).unwrap());
        // A value stays, and so does its master.
        machine.write_state("w", &w).unwrap();
        machine.initialise(&StateInit { seed: 2, ..init }).unwrap();
        assert_eq!(machine.read_state("w").unwrap(), w);
        (w, master)
    };
    let (whole, _) = drawn(DType::F32, None);
    let words = |bytes: &[u8]| -> Vec<u16> {
        let words = bytes.as_chunks().0.iter();
        words.map(|word| u16::from_le_bytes(*word)).collect()
    };
    let rounded = values(&whole).into_iter().map(half::bf16::from_f32);
    let rounded: Vec<u16> = rounded.map(half::bf16::to_bits).collect();
    let (high, master) = drawn(DType::BF16, Some(("master.w", DType::F32)));
    assert_eq!(
        (words(&high), master.unwrap()),
        (rounded.clone(), whole.clone())
    );
    let (high, low) = drawn(DType::BF16, Some(("low.w", DType::I16)));
    let halves = words(&high).into_iter().zip(words(&low.unwrap()));
    let joined: Vec<f32> = halves.map(|(high, low)| join(high, low)).collect();
    assert_eq!(joined, values(&whole));
    assert_eq!(words(&drawn(DType::BF16, None).0), rounded);
}

#[test]
fn random_states_start_from_the_seed() {
    let mut p = Plan::new(1, 0, &["compute"]);
    let rng = Operand {
        place: Place { pool: 0, offset: 0 },
        dtype: DType::I64,
        shape: vec![2],
    };
    p.state("rng", StateKind::Rng, rng, Initial::Absent);
    let mut machine = machine(p.0, Options::default());
    machine
        .initialise(&StateInit {
            seed: 77,
            std: None,
        })
        .unwrap();
    assert_eq!(
        machine.read_state("rng").unwrap(),
        [77_u64, 0].map(u64::to_le_bytes).concat()
    );
}

/// A paced copy takes at least its time, even if other work takes longer.
#[test]
fn a_slow_link_can_be_played() {
    // Two copies to the device of 64 bytes each and two back, one after the other in each
    // direction: 20 ms each way.
    let options = Options {
        link_bandwidth: Some(64.0 / 0.009),
        link_latency: Duration::from_millis(1),
        ..Options::default()
    };
    let mut machine = machine(offloading(), options);
    machine.write_input("x", &floats(1.0)).unwrap();
    let start = Instant::now();
    let report = machine.step().unwrap();
    assert!(Duration::from_millis(40) <= start.elapsed());
    assert!(40.0 <= report.ms);
    assert_eq!(values(&machine.read_output("out").unwrap())[0], 4.0);
}

#[test]
fn a_link_without_a_pace_is_refused() {
    for bandwidth in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        let options = Options {
            link_bandwidth: Some(bandwidth),
            ..Options::default()
        };
        assert!(
            matches!(Machine::new(offloading(), options), Err(Error::Host(_))),
            "{bandwidth}"
        );
    }
}

#[test]
fn traces_tell_what_ran() {
    for shuffle in [None, Some(3)] {
        let mut artifact = offloading();
        artifact.lines[0].name = "x \"quoted\"\\\n".into();
        let mut machine = machine(
            artifact,
            Options {
                trace: true,
                shuffle,
                ..Options::default()
            },
        );
        for _ in 0..200 {
            machine.write_input("x", &floats(1.0)).unwrap();
            machine.step().unwrap();
        }
        let spans = machine.trace().unwrap();
        let last: Vec<&str> = spans
            .iter()
            .filter(|s| s.step == 200 && s.stream == "compute" && s.why != "wait")
            .map(|s| s.line)
            .collect();
        assert_eq!(last, ["y", "w'", "z"]);
        assert!(
            spans
                .iter()
                .all(|s| 0.0 <= s.duration_us && 0.0 <= s.start_us)
        );
        assert!(
            spans
                .windows(2)
                .all(|w| w[0].stream != w[1].stream || w[0].start_us <= w[1].start_us)
        );
        // The first steps made room.
        assert!(spans.iter().all(|s| 1 < s.step));
        let y = spans
            .iter()
            .find(|s| s.line == "y" && s.why != "wait")
            .unwrap();
        assert_eq!((y.why, y.bytes), ("run", 192));

        let path = std::env::temp_dir().join(format!(
            "lighterage-trace-{}-{shuffle:?}.json",
            std::process::id()
        ));
        machine.write_trace(&path).unwrap();
        let json: serde_json::Value =
            serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        std::fs::remove_file(&path).unwrap();
        let events = json["traceEvents"].as_array().unwrap();
        assert!(
            events
                .iter()
                .any(|e| e["ph"] == "M" && e["args"]["name"] == "d2h")
        );
        assert!(
            events
                .iter()
                .any(|e| e["ph"] == "X" && e["name"] == "x \"quoted\"\\\n" && e["cat"] == "feed")
        );
    }
}

/// A failed step names its line; the machine stays stopped, and its tensors can still be read.
#[test]
fn a_failed_step_stops_the_machine() {
    let mut p = Plan::new(4, 0, &["compute", "other"]);
    let table = Operand {
        shape: vec![16, 1],
        ..at(DEVICE, 0)
    };
    let tokens = Operand {
        dtype: DType::I64,
        shape: vec![8],
        ..at(DEVICE, 1)
    };
    let rows = Operand {
        shape: vec![8, 1],
        ..at(DEVICE, 2)
    };
    p.wait(0, 1, true);
    p.run(
        0,
        "wte",
        "embedding",
        &[table.clone(), tokens.clone()],
        std::slice::from_ref(&rows),
    );
    p.record(0);
    p.wait(1, 0, false);
    p.copy(1, "rows", "run", rows, at(DEVICE, 3));
    p.record(1);
    p.state("wte.weight", StateKind::Param, table, Initial::Zeros);
    p.input("tokens", tokens);
    for shuffle in [None, Some(1)] {
        let mut machine = machine(
            p.0.clone(),
            Options {
                shuffle,
                ..Options::default()
            },
        );
        machine.write_input("tokens", &[0; 64]).unwrap();
        machine.step().unwrap();
        machine.write_input("tokens", &[1; 64]).unwrap();
        let failure = machine.step().unwrap_err();
        let Error::Failed { line, why } = &failure else {
            panic!("{failure}")
        };
        assert_eq!(line, "wte");
        assert!(why.contains("0..16"), "{why}");
        assert_eq!(machine.step().unwrap_err(), failure);
        assert_eq!(machine.wait().unwrap_err(), failure);
        assert_eq!(machine.read_state("wte.weight").unwrap(), floats(0.0));
    }
}

#[test]
fn wrong_names_and_sizes_are_told() {
    let mut machine = machine(offloading(), Options::default());
    let refused = [
        machine.write_input("z", &[]).unwrap_err(),
        machine.write_input("x", &[0; 4]).unwrap_err(),
        machine.read_output("z").unwrap_err(),
        machine.read_output_into("out", &mut [0; 4]).unwrap_err(),
        machine.read_state("z").unwrap_err(),
        machine.write_state("w", &[0; 4]).unwrap_err(),
    ];
    let told: Vec<String> = refused.iter().map(|e| e.to_string()).collect();
    assert_eq!(told[0], "no input z");
    assert_eq!(told[1], "x has 64 bytes (F32[16]), not 4");
    assert_eq!(told[5], "w has 64 bytes (F32[16]), not 4");
}

#[test]
fn a_lent_tensor_is_the_state_s_own_and_counts_as_written_once_that_is_said() {
    let mut artifact = offloading();
    artifact.states[0].initial = Initial::Absent;
    let (path, operand) = (
        artifact.states[0].path.clone(),
        artifact.states[0].operand.clone(),
    );
    let mut machine = machine(artifact, Options::default());
    let lent = machine.lend(Port::State(&path)).expect("it has the state");
    assert_eq!(lent.tensor().dtype, operand.dtype);
    let numel: u64 = operand.shape.iter().product();
    assert_eq!(lent.tensor().numel() as u64, numel);
    let input = machine
        .lend(Port::Input("x"))
        .expect("the machine has an input");
    assert_ne!(lent.tensor().start(), input.tensor().start());
    assert!(machine.lend(Port::State("nothing")).is_none());
    assert!(machine.written(Port::Output("out")).is_err());

    // Its bytes are zeros until the host writes others.
    assert!(!machine.has_state(&path));
    machine.written(Port::State(&path)).unwrap();
    machine.write_input("x", &floats(3.0)).unwrap();
    machine.step().unwrap();
    assert_eq!(values(&machine.read_state(&path).unwrap())[0], 3.0);
    drop(machine);
    assert_eq!(lent.tensor().dtype, operand.dtype);
}

#[test]
fn a_pool_beyond_all_memory_is_an_error() {
    let mut artifact = offloading();
    artifact.pools[1].bytes = 1 << 62;
    match Machine::new(artifact, Options::default()) {
        Err(Error::Resources(why)) => {
            assert_eq!(why, "no memory for pool host: 4611686018427387904 bytes")
        }
        other => panic!("{other:?}"),
    }
}

/// Threads share an update on either stream; the bits are the same as with one thread.
#[test]
fn shared_updates_are_the_same() {
    let bytes =
        |x: &mut dyn Iterator<Item = f32>| -> Vec<u8> { x.flat_map(|x| x.to_le_bytes()).collect() };
    let g = bytes(&mut (0..PARAMETERS).map(|i| (i as f32 * 0.37).sin()));
    let hyper: Vec<u8> = [1e-3f64, 0.0, 0.1]
        .iter()
        .flat_map(|x| x.to_le_bytes())
        .collect();
    let run = |stream, options| {
        let mut machine = machine(updating(stream), options);
        for _ in 0..3 {
            machine.write_input("g", &g).unwrap();
            machine.write_input("hyper", &hyper).unwrap();
            machine.step().unwrap();
        }
        machine.read_state("w").unwrap()
    };
    let threads = |n| Options {
        threads: Some(n),
        ..Options::default()
    };
    let expected = run("compute", threads(1));
    assert!(expected.iter().any(|&byte| byte != 0));
    for stream in ["host", "compute"] {
        for options in [Options::default(), threads(2), threads(5), shuffled(1)] {
            assert!(run(stream, options) == expected, "{stream}, {options:?}");
        }
    }
}
