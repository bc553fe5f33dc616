//! A lower bound of the step time, and the fluid plan that attains it: a relaxation of the paper's
//! program (Section 6).
//!
//! The paper has a variable for each layer and operation. Bytes of different layers differ only in
//! the times at which they may leave and must be back, and gaps of one kind are nested. So here all
//! layers share a few levels and flows per operation, and each layer has only its bytes away in
//! each gap.
//!
//! Two constraints are dropped. As in the paper's relaxation, transfers need not be of whole layers
//! (Eqs 7, 8). And bytes that are away only between forward and backward have no uploads: each such
//! byte is prefetched once, so the upward direction, which carries fewer bytes than the downward
//! one, has enough time for them, and the timetable places them. One constraint is added: memory is
//! also limited at the end of each operation. Every schedule, with pieces of any size, is a point
//! of this program. So its optimum is at most the step time of any schedule.
//!
//! `t` is a moment, `y0` the bytes of a layer that are away between backward and forward, and `y1`
//! the bytes away between forward and backward:
//!
//! ```text
//! back(t)  back already, not yet needed     back' = back + prefetched - needed             >= 0
//! late(t)  of y0, not yet uploaded          late' = late + y0 of backwards done - uploaded >= 0
//! c0, c1   y0 and y1 of gaps around t; the same for a layer's forward and its backward, by nesting
//! away     c0 + c1 - late - back  >=  what must be away for the operation at t to fit
//! ```
//!
//! Flows are limited by an operation's time and by the idle time after it, which the program
//! minimises.
//!
//! Rows go from the last layer to the first, with a layer's backward and forward together: the
//! chain is folded in the middle. So related rows are near each other, and the solver's time is
//! linear in the number of layers.

use super::lp::{Program, Var};
use super::{Instance, Op};

/// The relaxed problem's optimum.
#[derive(Clone, Debug)]
pub(super) struct Relaxed {
    /// No step is shorter, µs. Proved from multipliers, so it holds for any rounding of the solver.
    pub(super) micros: f64,
    /// Idle time after each operation, µs.
    pub(super) idle: Vec<f64>,
    /// For each layer, bytes away between backward and forward, and between forward and backward.
    pub(super) away: Vec<[f64; 2]>,
}

/// A small extra cost of moving a byte: of two equally fast plans, the one that moves less is
/// chosen.
const MOVE: f64 = 1e-5;

/// Relaxes `instance`. `reserve` is memory to leave free during each operation, bytes; all 0 for a
/// bound.
pub(super) fn relax(instance: &Instance, ops: &[Op], reserve: &[f64]) -> Relaxed {
    let n_layers = instance.layers.len();
    let n_ops = ops.len();
    let total: f64 = instance
        .layers
        .iter()
        .map(|layer| layer.weight_bytes as f64)
        .sum();
    let compute: f64 = ops.iter().map(|op| op.micros).sum();
    let limit = instance.memory_bytes as f64;
    let excess: Vec<f64> = ops
        .iter()
        .zip(reserve)
        .map(|(op, reserve)| (total + op.held_bytes as f64 + reserve - limit).max(0.0))
        .collect();
    if excess.iter().all(|&excess| excess <= 0.0) {
        return Relaxed {
            micros: compute,
            idle: vec![0.0; n_ops],
            away: vec![[0.0; 2]; n_layers],
        };
    }
    // Units: the mean layer is 1, and the time to move it is 1.
    let unit = total / n_layers as f64;
    let tick = unit / instance.bytes_per_micro;
    let no_limit = f64::INFINITY;
    let mut program = Program::default();
    let weights: Vec<f64> = instance
        .layers
        .iter()
        .map(|layer| layer.weight_bytes as f64 / unit)
        .collect();
    let moves = |program: &mut Program, layer: usize, useful: bool| {
        (useful && 0.0 < weights[layer]).then(|| program.variable(0.0, weights[layer]))
    };
    // The backward and the forward of the first layer follow each other directly, so its bytes are
    // not away between them. The same holds for the last layer in the other gap.
    let y0: Vec<_> = (0..n_layers)
        .map(|layer| moves(&mut program, layer, layer != 0))
        .collect();
    let y1: Vec<_> = (0..n_layers)
        .map(|layer| moves(&mut program, layer, layer + 1 != n_layers))
        .collect();
    // Bytes of other layers that are away while a layer runs, by gap; 0 for the outermost layers.
    let mut level = |present: bool| present.then(|| program.variable(0.0, no_limit));
    let c0: Vec<_> = (0..n_layers)
        .map(|layer| level(layer + 1 != n_layers))
        .collect();
    let c1: Vec<_> = (0..n_layers).map(|layer| level(layer != 0)).collect();
    let idle: Vec<Var> = (0..n_ops)
        .map(|_| program.variable(1.0, no_limit))
        .collect();
    struct Levels {
        back: Var,
        late: Var,
    }
    let levels: Vec<Levels> = (0..n_ops)
        .map(|_| Levels {
            back: program.variable(0.0, no_limit),
            late: program.variable(0.0, no_limit),
        })
        .collect();
    fn push(terms: &mut Vec<(Var, f64)>, var: Option<Var>, factor: f64) {
        terms.extend(var.map(|var| (var, factor)));
    }
    for layer in (0..n_layers).rev() {
        // c0 of the layer before, plus this layer's bytes. c1 of the layer after in the same way.
        let inner =
            |program: &mut Program, of: Option<Var>, outer: Option<Var>, own: Option<Var>| {
                let Some(of) = of else { return };
                let mut terms = vec![(of, 1.0)];
                push(&mut terms, outer, -1.0);
                push(&mut terms, own, -1.0);
                program.row(&terms, 0.0);
            };
        if layer + 1 < n_layers {
            inner(&mut program, c0[layer], c0[layer + 1], y0[layer + 1]);
            inner(&mut program, c1[layer + 1], c1[layer], y1[layer]);
        }
        for j in [n_layers - 1 - layer, n_layers + layer] {
            let (op, next) = (&ops[j], (j + 1) % n_ops);
            let capacity = op.micros / tick;
            let runs = 1e-9 < capacity;
            let Levels { back, late } = levels[j];
            // Prefetches and uploads during the operation, then in the idle time after it.
            let p = runs.then(|| program.variable(MOVE, capacity));
            let v = runs.then(|| program.variable(MOVE, capacity));
            let [pg, vg] = [(); 2].map(|()| program.variable(MOVE, no_limit));
            let needed = if ops[next].backward {
                y1[ops[next].layer]
            } else {
                y0[ops[next].layer]
            };
            let mut terms = vec![(levels[next].back, 1.0), (back, -1.0), (pg, -1.0)];
            push(&mut terms, p, -1.0);
            push(&mut terms, needed, 1.0);
            program.row(&terms, 0.0);
            let mut late_end = late;
            if let Some(v) = v {
                late_end = program.variable(0.0, no_limit);
                program.row(&[(late_end, 1.0), (late, -1.0), (v, 1.0)], 0.0);
            }
            let mut terms = vec![(levels[next].late, 1.0), (late_end, -1.0), (vg, 1.0)];
            push(&mut terms, if op.backward { y0[layer] } else { None }, -1.0);
            program.row(&terms, 0.0);
            for flow in [pg, vg] {
                let slack = program.variable(0.0, no_limit);
                program.row(&[(flow, 1.0), (slack, 1.0), (idle[j], -1.0)], 0.0);
            }
            let hold = |program: &mut Program, late: Var, p: Option<Var>| {
                let slack = program.variable(0.0, no_limit);
                let mut terms = vec![(late, -1.0), (back, -1.0), (slack, -1.0)];
                push(&mut terms, c0[layer], 1.0);
                push(&mut terms, c1[layer], 1.0);
                push(&mut terms, p, -1.0);
                program.row(&terms, excess[j] / unit);
            };
            hold(&mut program, late, None);
            if runs {
                hold(&mut program, late_end, p);
            }
        }
    }
    let point = program.solve();
    // A schedule that does one thing at a time is idle for at most three times the transfer time of
    // all weights. No better schedule has a level above all weights. No schedule needs to move more
    // than three times all weights, once up and twice down. The cost `MOVE` for these is subtracted
    // once, not for each flow.
    let most = 3.0 * n_layers as f64 + 1.0;
    let bound = program.safe_bound(&point.rows, most) - MOVE * 3.0 * n_layers as f64;
    // Values of an interior point are never exactly 0.
    let none = 1e-5 * compute / n_ops as f64;
    let at = |var: Option<Var>| var.map_or(0.0, |var| point.x[var.0] * unit);
    Relaxed {
        micros: compute + (bound * tick).max(0.0),
        idle: idle
            .iter()
            .map(|var| point.x[var.0] * tick)
            .map(|idle| if idle < none { 0.0 } else { idle })
            .collect(),
        away: (0..n_layers)
            .map(|layer| [at(y0[layer]), at(y1[layer])])
            .collect(),
    }
}
