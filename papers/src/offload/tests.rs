//! The paper's table and figure, the validator against broken schedules, and random instances.

use super::paper::{MIB_PER_MS, TABLE_1};
use super::validate::validate;
use super::*;
use proptest::prelude::*;

/// A solution that the validator accepts.
#[track_caller]
fn solved(instance: &Instance, algorithm: Algorithm) -> Solution {
    let solution =
        solve(instance, algorithm).unwrap_or_else(|error| panic!("{}: {error}", algorithm.name()));
    let peak = validate(instance, &solution.schedule)
        .unwrap_or_else(|error| panic!("{}: {error}", algorithm.name()));
    assert!(peak <= instance.memory_bytes);
    assert!(solution.compute_micros <= solution.bound_micros);
    assert!(
        solution.bound_micros <= solution.schedule.period * (1.0 + 1e-9),
        "{}: {solution:?}",
        algorithm.name()
    );
    solution
}

#[test]
fn table_1_without_a_pause_a_layer_above_the_floor() {
    for row in &TABLE_1 {
        let mut instance = row.instance();
        let block = instance.layers[1].weight_bytes;
        instance.memory_bytes = instance.floor_bytes() + block + block / 10;
        let solution = solved(&instance, Algorithm::GreedyPlus);
        let pause = solution.schedule.period - solution.compute_micros;
        assert!(
            pause.abs() <= 1e-9 * solution.compute_micros,
            "{}: {pause} µs",
            row.name()
        );
    }
}

#[test]
fn table_1_has_the_papers_columns() {
    for row in &TABLE_1 {
        let mut instance = row.instance();
        let block = instance.layers[1].weight_bytes;
        instance.memory_bytes = instance.floor_bytes() + 6 * block;
        let millis = |algorithm| solved(&instance, algorithm).schedule.period / 1e3;
        let off = millis(Algorithm::L2l) - f64::from(row.l2l);
        assert!(off.abs() < 1.0, "{}: l2l is off by {off} ms", row.name());
        // The paper reports 1 to 7 times the transfer time of a block.
        let block_ms = block as f64 / instance.bytes_per_micro / 1e3;
        for algorithm in [
            Algorithm::Greedy,
            Algorithm::GreedyStar,
            Algorithm::FirstHalf,
        ] {
            let gap = (millis(algorithm) - f64::from(row.compute)) / block_ms;
            assert!(
                0.9 < gap && gap < 7.1,
                "{}: {} pauses for {gap} blocks",
                row.name(),
                algorithm.name()
            );
        }
    }
}

#[test]
fn at_any_bandwidth_near_the_bound() {
    for point in paper::figure_4() {
        let solution = solved(&point.instance(), Algorithm::GreedyPlus);
        let gap = solution.schedule.period / solution.bound_micros - 1.0;
        assert!(gap < 0.01, "{point:?}: {gap}");
    }
}

/// Section 7.2: "Greedy* is always slower than Greedy".
#[test]
fn one_upload_for_two_absences_is_never_slower() {
    let mut slower = 0;
    for point in paper::figure_4() {
        let instance = point.instance();
        let micros = |algorithm| solved(&instance, algorithm).schedule.period;
        let (once, twice) = (micros(Algorithm::Greedy), micros(Algorithm::GreedyStar));
        assert!(once <= twice * (1.0 + 1e-12), "{point:?}: {once}, {twice}");
        slower += usize::from(once * 1.001 < twice);
    }
    assert!(
        slower >= 8,
        "the discount saves time at {slower} points only"
    );
}

#[test]
fn the_paper_bound_without_a_pause_above_4_gb_per_second() {
    let mut instance = TABLE_1[5].instance();
    instance.memory_bytes = 9000 << 20;
    for bandwidth in [4.0, 8.0, 12.0] {
        instance.bytes_per_micro = bandwidth * MIB_PER_MS;
        assert!(bound(&instance).unwrap() <= instance.compute_micros() * (1.0 + 1e-6));
    }
    instance.bytes_per_micro = MIB_PER_MS;
    assert!(instance.compute_micros() * 1.4 < bound(&instance).unwrap());
}

#[test]
fn the_bound_is_no_more_than_the_optimum_of_theorem_1() {
    let instance = exact::three_partition(&[4, 4, 5, 4, 4, 5]).unwrap();
    assert!(bound(&instance).unwrap() <= 4.0 * (1.0 + 1e-9));
}

#[test]
fn one_layer_and_no_layer() {
    let layer = Layer {
        weight_bytes: 100,
        activation_bytes: 10,
        forward_micros: 1.0,
        backward_micros: 2.0,
    };
    let one = Instance {
        layers: vec![layer],
        bytes_per_micro: 1.0,
        memory_bytes: 210,
    };
    for algorithm in Algorithm::ALL {
        let solution = solved(&one, algorithm);
        let waits = if algorithm == Algorithm::L2l {
            200.0
        } else {
            0.0
        };
        assert_eq!(
            solution.schedule.period,
            3.0 + waits,
            "{}",
            algorithm.name()
        );
    }
    let small = Instance {
        memory_bytes: 209,
        ..one.clone()
    };
    let error = Error::TooSmall {
        layer: 0,
        needed_bytes: 210,
        memory_bytes: 209,
    };
    assert_eq!(solve(&small, Algorithm::GreedyPlus), Err(error));
    let none = Instance {
        layers: vec![],
        ..one.clone()
    };
    assert!(matches!(
        solve(&none, Algorithm::GreedyPlus),
        Err(Error::Invalid(_))
    ));
    for broken in [
        Layer {
            forward_micros: -1.0,
            ..layer
        },
        Layer {
            backward_micros: f64::NAN,
            ..layer
        },
        Layer {
            forward_micros: f64::INFINITY,
            ..layer
        },
        Layer {
            weight_bytes: u64::MAX,
            ..layer
        },
        Layer {
            activation_bytes: u64::MAX,
            ..layer
        },
    ] {
        let instance = Instance {
            layers: vec![broken],
            ..one.clone()
        };
        assert!(
            matches!(bound(&instance), Err(Error::Invalid(_))),
            "{broken:?}"
        );
    }
    for bytes_per_micro in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        let instance = Instance {
            bytes_per_micro,
            ..one.clone()
        };
        assert!(
            matches!(bound(&instance), Err(Error::Invalid(_))),
            "{bytes_per_micro}"
        );
    }
}

#[test]
fn the_validator_refuses_broken_schedules() {
    let mut instance = TABLE_1[8].instance();
    instance.memory_bytes = 9000 << 20;
    instance.bytes_per_micro = 2.0 * MIB_PER_MS;
    for algorithm in [Algorithm::GreedyPlus, Algorithm::Greedy] {
        let good = solved(&instance, algorithm).schedule;
        let refused = |what: &str, change: &dyn Fn(&mut Schedule)| {
            let mut broken = good.clone();
            change(&mut broken);
            assert!(
                validate(&instance, &broken).is_err(),
                "{}: {what}",
                algorithm.name()
            );
        };
        for way in [Way::ToDevice, Way::ToHost] {
            let which = |schedule: &Schedule| {
                schedule
                    .transfers
                    .iter()
                    .position(|t| t.way == way)
                    .unwrap()
            };
            refused("a transfer is missing", &|schedule| {
                schedule.transfers.remove(which(schedule));
            });
            refused("a transfer is too fast", &|schedule| {
                let k = which(schedule);
                let transfer = &mut schedule.transfers[k];
                transfer.end = transfer.start + 0.9 * (transfer.end - transfer.start);
            });
            refused("two transfers at once", &|schedule| {
                let again = schedule.transfers[which(schedule)].clone();
                schedule.transfers.push(again);
            });
            refused("a transfer is of no layer", &|schedule| {
                let k = which(schedule);
                schedule.transfers[k].bytes.end = u64::MAX;
            });
        }
        for k in 0..good.absences.len() {
            refused(
                "bytes are never away: too much memory, or nothing",
                &|schedule| {
                    // The absences of one layer may be unnecessary, but not those of all layers.
                    schedule.absences.truncate(k);
                    schedule.absences.truncate(good.absences.len() / 2);
                },
            );
            refused("deleted before its upload, or its operation", &|schedule| {
                let absence = &mut schedule.absences[k];
                absence.from = (absence.from - 0.4 * schedule.period).max(0.0);
                absence.from -= if absence.from == 0.0 { 1.0 } else { 0.0 };
            });
            refused("back later than its prefetch", &|schedule| {
                schedule.absences[k].until += 0.01 * schedule.period;
            });
        }
        refused("operations overlap", &|schedule| {
            schedule.starts[3] = schedule.starts[2]
        });
        refused("operations are missing", &|schedule| {
            schedule.starts.pop();
        });
        refused("the step is too short", &|schedule| schedule.period *= 0.99);
        let tight = Instance {
            memory_bytes: instance.floor_bytes(),
            ..instance.clone()
        };
        assert!(validate(&tight, &good).is_err());
        let slow = Instance {
            bytes_per_micro: 0.9 * instance.bytes_per_micro,
            ..instance.clone()
        };
        assert!(validate(&slow, &good).is_err());
    }
}

/// Section 3: only backwards change weights, so one upload serves the absence after a backward and
/// the one after the next forward. Without that, each absence has an upload of its own.
#[test]
fn one_upload_serves_two_absences() {
    let mut fewer = 0;
    for row in &TABLE_1 {
        let mut instance = row.instance();
        instance.memory_bytes = instance.floor_bytes() / 2 + instance.keep_bytes() / 2;
        let ops = instance.ops();
        for away in [
            select::greedy(&instance, &ops, 0.0).unwrap(),
            select::first(&instance, &ops, 0.0).unwrap(),
        ] {
            let moved = |discount| -> u64 {
                let schedule = lists::schedule(&instance, &ops, &away, discount).unwrap();
                let up = schedule
                    .transfers
                    .iter()
                    .filter(|transfer| transfer.way == Way::ToHost);
                up.map(|transfer| transfer.bytes.end - transfer.bytes.start)
                    .sum()
            };
            let sum = |of: fn(&[u64; 2]) -> u64| away.iter().map(of).sum::<u64>();
            // Bytes that are back before they leave are never uploaded.
            assert!(moved(true) <= sum(|bytes| bytes[0].max(bytes[1])));
            assert!(moved(true) <= moved(false));
            fewer += usize::from(moved(true) * 10 <= moved(false) * 6);
        }
    }
    assert!(
        fewer >= TABLE_1.len(),
        "{fewer} of {} upload far less",
        2 * TABLE_1.len()
    );
}

/// Chains of a few layers, some without weights or without time, and a memory between the minimum
/// and the size of everything.
fn instances() -> impl Strategy<Value = Instance> {
    let layer = (0..4u64, 0..300u64, 0..100u64, 0..4u32, 0..40u32, 0..80u32).prop_map(
        |(heavy, w, a, slow, f, b)| {
            let (f, b) = if slow == 0 { (0, 0) } else { (f, b) };
            Layer {
                weight_bytes: if heavy == 0 { 0 } else { w << 20 },
                activation_bytes: a << 18,
                forward_micros: f64::from(f) * 1e3,
                backward_micros: f64::from(b) * 1e3,
            }
        },
    );
    (prop::collection::vec(layer, 1..9), 1..40u32, 0..=20u32).prop_map(|(layers, rate, share)| {
        let mut instance = Instance {
            layers,
            bytes_per_micro: f64::from(rate) * 250.0,
            memory_bytes: 0,
        };
        let (floor, keep) = (instance.floor_bytes(), instance.keep_bytes());
        instance.memory_bytes = floor + (keep - floor) * u64::from(share) / 20;
        instance
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None,
        ..ProptestConfig::default() })]

    #[test]
    fn schedules_are_right_and_no_shorter_than_the_bound(instance in instances()) {
        for algorithm in Algorithm::ALL {
            match solve(&instance, algorithm) {
                Ok(solution) => {
                    let peak = validate(&instance, &solution.schedule);
                    prop_assert!(peak.is_ok(), "{}: {peak:?}", algorithm.name());
                    prop_assert!(bound(&instance).unwrap() <= solution.schedule.period
                        * (1.0 + 1e-9) + 1e-9);
                    prop_assert!(solution.bound_micros <= solution.schedule.period * (1.0 + 1e-9)
                        + 1e-9);
                }
                Err(Error::Stuck(_)) if algorithm != Algorithm::GreedyPlus => {}
                Err(error) => prop_assert!(false, "{}: {error}", algorithm.name()),
            }
        }
    }

    #[test]
    fn greedy_plus_is_hardly_ever_longer_than_the_others(instance in instances()) {
        let best = solve(&instance, Algorithm::GreedyPlus).unwrap().schedule.period;
        for algorithm in [Algorithm::Greedy, Algorithm::GreedyStar, Algorithm::L2l,
            Algorithm::FirstHalf] {
            if let Ok(solution) = solve(&instance, algorithm) {
                // It stops this near to the bound.
                prop_assert!(best <= solution.schedule.period * 1.005 + 1e-9, "{}",
                    algorithm.name());
            }
        }
    }
}
