//! Tests.
use super::*;
#[test]
fn probe() {
    for (k, gb) in [(5usize, 13.0), (8, 9.0), (5, 9.0), (8, 13.0)] {
        for beta in [0.5, 1.0, 2.0, 4.0, 8.0, 12.0] {
            let mut i = paper::TABLE_1[k].instance();
            i.memory_bytes = (gb * 1e3 * 1048576.0) as u64;
            i.bytes_per_micro = beta * paper::MIB_PER_MS;
            let t = std::time::Instant::now();
            let s = solve(&i, Algorithm::GreedyPlus).unwrap();
            let el = t.elapsed().as_secs_f64();
            let v = validate::validate(&i, &s.schedule);
            eprintln!("{} M {gb} beta {beta}: T {:.4} LB {:.4} gap {:.3}% {:?} {el:.3}s transfers {}", paper::TABLE_1[k].name(), s.schedule.period / s.compute_micros, s.bound_micros / s.compute_micros, 100.0 * (s.schedule.period / s.bound_micros - 1.0), v.map(|_| ()), s.schedule.transfers.len());
        }
    }
}

#[test]
fn probe_floor() {
    for row in &paper::TABLE_1 {
        let mut i = row.instance();
        let w = i.layers[1].weight_bytes as f64;
        let floor = i.floor_bytes();
        let mut line = format!("{} floor {:.0} MiB: ", row.name(), floor as f64 / 1048576.0);
        for k in [0.6, 0.8, 0.9, 1.0, 1.05, 1.1, 1.2, 1.3, 1.45, 2.0, 3.0] {
            i.memory_bytes = floor + (k * w) as u64;
            let t = std::time::Instant::now();
            let s = solve(&i, Algorithm::GreedyPlus).unwrap();
            let el = t.elapsed().as_secs_f64();
            let v = validate::validate(&i, &s.schedule);
            line += &format!(" {k}: {:.3}%/{:.3}% {}ms{}", 100.0 * (s.schedule.period / s.compute_micros - 1.0), 100.0 * (s.schedule.period / s.bound_micros - 1.0), (el * 1e3) as u64, if v.is_ok() { "" } else { "INVALID" });
        }
        eprintln!("{line}");
    }
}
#[test]
fn probe_long() {
    for l in [128usize, 512] {
        for beta in [0.5, 1.0, 2.0, 4.0, 12.0] {
            let mut i = paper::TABLE_1[5].instance();
            i.layers = std::iter::once(i.layers[0]).chain(std::iter::repeat_n(i.layers[1], l - 1)).collect();
            i.memory_bytes = i.floor_bytes() + (i.keep_bytes() - i.floor_bytes()) / 2;
            i.bytes_per_micro = beta * paper::MIB_PER_MS;
            let t = std::time::Instant::now();
            let s = solve(&i, Algorithm::GreedyPlus).unwrap();
            let el = t.elapsed().as_secs_f64();
            let v = validate::validate(&i, &s.schedule);
            eprintln!("L {l} beta {beta}: T {:.4} gap {:.3}% {:?} {el:.3}s transfers {}", s.schedule.period / s.compute_micros, 100.0 * (s.schedule.period / s.bound_micros - 1.0), v.map(|_| ()), s.schedule.transfers.len());
        }
    }
}
