//! Random plans: `validate` agrees with the definition of races, and accepted plans compute the
//! same results on one stream, on many, and shuffled.

use crate::common::*;
use artifact::*;
use lighterage_runtime::{Machine, Options, validate};
use proptest::prelude::*;

const STATES: u64 = 3;
const PLACES: u64 = 6;

/// A command before it has waits: stream, two operands, a result.
type Draft = (u32, u64, u64, u64);

/// Makes drafts read places that are not states only after the step has written them.
fn settle(drafts: &[Draft]) -> Vec<Draft> {
    let mut written = [false; PLACES as usize];
    let mut settled = Vec::new();
    for &(stream, a, b, y) in drafts {
        let readable = |x: u64| {
            if STATES <= x && !written[x as usize] {
                x % STATES
            } else {
                x
            }
        };
        settled.push((stream, readable(a), readable(b), y));
        written[y as usize] = true;
    }
    settled
}

fn conflict(x: Draft, y: Draft) -> bool {
    let reads = |d: Draft| [d.1, d.2, d.3];
    reads(x).contains(&y.3) || reads(y).contains(&x.3)
}

/// Every command records an event and waits for all conflicting commands, except for the waits in
/// `dropped`.
fn plan(drafts: &[Draft], dropped: &[prop::sample::Index]) -> Artifact {
    let mut p = Plan::new(PLACES, 0, &["a", "b", "c"]);
    for (i, &(stream, a, b, y)) in drafts.iter().enumerate() {
        for (j, &other) in drafts.iter().enumerate() {
            if other.0 != stream && conflict((stream, a, b, y), other) {
                p.wait(stream, j as u32, i <= j);
            }
        }
        p.run(
            stream,
            &format!("{i}"),
            "add",
            &[at(DEVICE, a), at(DEVICE, b)],
            &[at(DEVICE, y)],
        );
        p.record(stream);
    }
    for index in dropped {
        let waits = |c: &Command| matches!(c.kind, CommandKind::Wait { .. });
        let waits: Vec<usize> = (0..p.0.commands.len())
            .filter(|&i| waits(&p.0.commands[i]))
            .collect();
        if !waits.is_empty() {
            p.0.commands.remove(waits[index.index(waits.len())]);
        }
    }
    p.0.data = (0..STATES).flat_map(|i| floats(i as f32 + 1.0)).collect();
    for i in 0..STATES {
        let initial = Initial::Data {
            start: 64 * i,
            bytes: 64,
        };
        p.state(&format!("s{i}"), StateKind::Param, at(DEVICE, i), initial);
    }
    p.0
}

/// The definition: over two steps, every two conflicting commands are joined by a path of stream
/// order and events.
fn is_ordered(artifact: &Artifact) -> bool {
    let commands = &artifact.commands;
    let n = commands.len();
    let mut before = vec![vec![false; 2 * n]; 2 * n];
    let record = |event| {
        commands
            .iter()
            .position(|c| c.kind == CommandKind::Record { event })
            .unwrap()
    };
    for i in 0..2 * n {
        let command = &commands[i % n];
        let mut direct: Vec<usize> = (0..i)
            .filter(|&j| commands[j % n].stream == command.stream)
            .collect();
        match command.kind {
            CommandKind::Wait {
                event,
                previous: false,
            } => direct.push(i / n * n + record(event)),
            CommandKind::Wait {
                event,
                previous: true,
            } if n <= i => direct.push(record(event)),
            _ => {}
        }
        for j in direct {
            let through = before[j].clone();
            before[i]
                .iter_mut()
                .zip(through)
                .for_each(|(mine, theirs)| *mine |= theirs);
            before[i][j] = true;
        }
    }
    let launch = |i: usize| match &commands[i % n].kind {
        CommandKind::Launch { ins, outs, .. } => {
            let place = |x: &Operand| x.place.offset / 64;
            Some((0, place(&ins[0]), place(&ins[1]), place(&outs[0])))
        }
        _ => None,
    };
    (0..2 * n).all(|i| {
        (0..i).all(|j| match (launch(i), launch(j)) {
            (Some(x), Some(y)) => !conflict(x, y) || before[i][j],
            _ => true,
        })
    })
}

fn run(artifact: &Artifact, shuffle: Option<u64>) -> Vec<Vec<u8>> {
    let mut machine = Machine::new(
        artifact.clone(),
        Options {
            shuffle,
            ..Options::default()
        },
    )
    .unwrap();
    for _ in 0..3 {
        machine.launch().unwrap();
    }
    machine.wait().unwrap();
    (0..STATES)
        .map(|i| machine.read_state(&format!("s{i}")).unwrap())
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 1500,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn races_are_what_the_definition_says(
        drafts in prop::collection::vec((0..3_u32, 0..PLACES, 0..PLACES, 0..PLACES), 1..12),
        dropped in prop::collection::vec(any::<prop::sample::Index>(), 0..4),
        seed: u64,
    ) {
        let artifact = plan(&settle(&drafts), &dropped);
        let validated = validate(&artifact);
        prop_assert_eq!(validated.is_ok(), is_ordered(&artifact), "{:?}", validated);
        if validated.is_ok() {
            let mut serial = artifact.clone();
            serial.commands.iter_mut().for_each(|c| c.stream = 0);
            let expected = run(&serial, None);
            prop_assert_eq!(&run(&artifact, None), &expected);
            for seed in [seed, seed ^ 1, seed ^ 2] {
                prop_assert_eq!(&run(&artifact, Some(seed)), &expected);
            }
        }
    }
}
