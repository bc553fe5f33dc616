//! Orders in which first fit takes items: the largest key first.

use super::problem::{Item, Problem};

pub(super) type Order = fn(&Problem, &Item) -> [u64; 2];

fn power(bytes: u64, life: u64, root: u32) -> u64 {
    let mut b = bytes as f64;
    for _ in 0..root { b = b.sqrt(); }
    (b * life as f64 * 256.0) as u64
}
fn press(p: &Problem, item: &Item) -> u64 {
    // Lab: slow for long ones.
    let mut m = 0; let mut s = item.start; while s < item.end { m = m.max(p.live[s as usize]); s += 1; } m
}

pub(super) const ORDERS: &[(&str, Order)] = &[
    ("life,size", |_, i| [i.sections(), i.bytes]),
    ("size,life", |_, i| [i.bytes, i.sections()]),
    ("area", |_, i| [i.bytes.saturating_mul(i.sections()), i.bytes]),
    ("life.size^1/2", |_, i| [power(i.bytes, i.sections(), 1), i.bytes]),
    ("life.size^1/4", |_, i| [power(i.bytes, i.sections(), 2), i.bytes]),
    ("life^1/2.size", |_, i| [power(i.sections(), i.bytes, 1), i.bytes]),
    ("life^1/4.size", |_, i| [power(i.sections(), i.bytes, 2), i.bytes]),
    ("start", |_, i| [u64::MAX - u64::from(i.start), i.bytes]),
    ("end", |_, i| [u64::from(i.end), i.bytes]),
    ("press,life", |p, i| [press(p, i), i.sections()]),
    ("press,size", |p, i| [press(p, i), i.bytes]),
    ("loglife,size", |_, i| [u64::from(i.sections().ilog2()), i.bytes]),
    ("logsize,life", |_, i| [u64::from(i.bytes.ilog2()), i.sections()]),
];

pub(super) const RANKS: &[(&str, Order)] = &[
    ("WAT", |_, i| [i.sections(), i.bytes]),
    ("TAW", |p, i| [press(p, i), i.bytes.saturating_mul(i.sections())]),
    ("TWA", |p, i| [press(p, i), i.sections()]),
];
