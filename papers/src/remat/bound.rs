//! A lower bound on the time of any set of reruns.
//!
//! Consider one line. The values in memory while its node runs must fit into the budget. Every
//! other value that is read later must be recomputed after the line. That run needs its operands,
//! which were in memory at the line, or are recomputed too. So the reruns after the line are a
//! choice as in [`cut`](super::cut) whose saved bytes fit. The shortest time of such a choice is a
//! bound. If the bytes get a price instead of a limit (Lagrange), the bound can only become lower,
//! and the problem becomes a minimum cut. The best price gives the bound of the linear relaxation,
//! because the cut's program is integral. The result is the best bound of several lines.

use super::Problem;
use super::cut::{self, Choice};
use super::profile::{Profile, line_of, step};

/// The bound is computed for at least this many lines. Short problems use more lines, for about the
/// same total work.
const N_LINES: usize = 6;
const LENGTH: usize = 20_000;
/// The most prices that are tried at a line. In practice the search for the best price ends
/// earlier.
const N_PRICES: usize = 24;

/// A lower bound on a step's time, in µs, over all sets of reruns whose peak is at most `budget`
/// bytes. Infinite if provably no set fits.
pub fn lower_bound(problem: &Problem, budget: u64) -> f64 {
    let profile = Profile::new(problem);
    let n_lines = problem.nodes.len() as u32;
    let mut lines: Vec<(i64, u32)> = (0..n_lines)
        .map(|line| (profile.bytes_at(step(line, line)), line))
        .collect();
    if (0..n_lines).any(|line| budget < cut::must(problem, line)) {
        return f64::INFINITY;
    }
    lines.retain(|&(bytes, _)| budget < bytes as u64);
    lines.sort_unstable_by(|a, b| b.cmp(a));
    // The fullest line, and other lines, spread over the lines that are too full.
    let mut chosen: Vec<u32> = lines.first().map(|l| l.1).into_iter().collect();
    lines.sort_unstable_by_key(|l| l.1);
    let most = (N_LINES + LENGTH / n_lines.max(1) as usize).min(lines.len());
    chosen.extend((0..most).map(|k| lines[k * lines.len() / most].1));
    let reruns = chosen
        .into_iter()
        .map(|line| at_line(problem, line, budget, &|n| problem.nodes[n as usize].micros).least);
    problem.base_micros() + reruns.fold(0.0, f64::max)
}

/// The results for one line.
pub(super) struct AtLine {
    /// Reruns take at least this long, µs.
    pub(super) least: f64,
    /// The price that gave `least`, µs per byte.
    pub(super) price: f64,
    /// The cheapest choice found that fits, if one was found.
    pub(super) fits: Option<Choice>,
    /// The next cheaper choice found, which does not fit.
    pub(super) above: Option<Choice>,
}

/// The line with the most bytes in memory when nothing runs again.
pub(super) fn fullest(problem: &Problem) -> u32 {
    line_of(Profile::new(problem).peak_step())
}

/// The bound of one line, with the choices on both sides of the budget.
pub(super) fn at_line(
    problem: &Problem,
    line: u32,
    budget: u64,
    time: &dyn Fn(u32) -> f64,
) -> AtLine {
    let mut known = AtLine {
        least: 0.0,
        price: 0.0,
        fits: None,
        above: None,
    };
    let room = budget as f64 - cut::must(problem, line) as f64;
    // The value of a choice is a linear function of the price: its time, with its bytes above the
    // budget as slope. The minimum over all choices is concave. Its maximum is where a falling and
    // a rising function meet.
    let all = saved_at_no_price(problem, line);
    if all as f64 <= room {
        return known;
    }
    let total: f64 = (0..problem.nodes.len() as u32).map(time).sum();
    let mut rising = (0.0, all as f64 - room);
    let mut falling: Option<(f64, f64)> = None;
    for _ in 0..N_PRICES {
        let price = match falling {
            Some((micros, slope)) => (micros - rising.0) / (rising.1 - slope),
            None => (total * 1e-3 / rising.1).max(4.0 * known.price),
        };
        let choice = cut::choose(problem, line, price, time);
        let least = choice.least - price * room;
        if known.least < least {
            known.least = least;
        }
        known.price = price;
        let micros: f64 = choice.nodes.iter().map(|&n| time(n)).sum();
        let this = (micros, choice.bytes as f64 - room);
        // Except for the rounding of capacities, no choice is below these two.
        let meet = rising.0 + price * rising.1;
        if falling.is_some() && meet <= choice.least - price * room + 1e-3 + 1e-9 * meet {
            break;
        }
        if this.1 <= 0.0 {
            falling = Some(this);
            known.fits = Some(choice);
        } else {
            rising = this;
            known.above = Some(choice);
        }
    }
    known
}

/// Bytes across a line, in addition to its own, if nothing runs again.
fn saved_at_no_price(problem: &Problem, line: u32) -> u64 {
    let profile = Profile::new(problem);
    (profile.bytes_at(step(line, line)) as u64).saturating_sub(cut::must(problem, line))
}
