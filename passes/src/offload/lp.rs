//! Linear programs by an interior-point method, for the chains that [`bound`](super::bound) writes.
//!
//! Mehrotra's predictor-corrector method (S. Mehrotra, SIAM J. Optim. 2, 1992) over the normal equations `A D Aᵀ`, which a
//! skyline Cholesky factors: rows that meet lie near each other, so the factor's rows are short and the whole is linear in
//! the length of the chain. What comes out is nearly optimal. What is *proved* is [`Program::safe_bound`]: it holds for any
//! multipliers, whatever rounding did to them (A. Neumaier, O. Shcherbina, Math. Program. 99, 2004).

/// `min cost·x` subject to `A x = rhs`, `0 <= x <= upper`.
#[derive(Clone, Debug, Default)]
pub(super) struct Program {
    cost: Vec<f64>,
    /// Infinite where there is none.
    upper: Vec<f64>,
    /// For each variable: the rows that it stands in, and its factor there.
    columns: Vec<Vec<(usize, f64)>>,
    rhs: Vec<f64>,
}

/// A point that the method ended at.
#[derive(Clone, Debug)]
pub(super) struct Point {
    /// A value for each variable.
    pub(super) x: Vec<f64>,
    /// A multiplier for each row.
    pub(super) rows: Vec<f64>,
}

/// A variable's number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Var(pub(super) usize);

/// Steps of the method; it needs some 20 to 50.
const STEPS: usize = 80;
/// Residuals and gap, relative, at which it ends.
const CLOSE: f64 = 1e-9;

impl Program {
    /// Adds a variable with its cost and its upper bound.
    pub(super) fn variable(&mut self, cost: f64, upper: f64) -> Var {
        self.cost.push(cost);
        self.upper.push(upper);
        self.columns.push(Vec::new());
        Var(self.cost.len() - 1)
    }

    /// Adds the row `terms = rhs`. Rows that share variables should be added near each other.
    pub(super) fn row(&mut self, terms: &[(Var, f64)], rhs: f64) {
        let row = self.rhs.len();
        self.rhs.push(rhs);
        for &(Var(column), factor) in terms {
            match self.columns[column].last_mut() {
                Some((last, sum)) if *last == row => *sum += factor,
                _ => self.columns[column].push((row, factor)),
            }
        }
    }

    /// A lower bound of `cost·x` over the points of the program in which no variable exceeds `most`, for any multipliers.
    pub(super) fn safe_bound(&self, rows: &[f64], most: f64) -> f64 {
        let fixed: f64 = self.rhs.iter().zip(rows).map(|(b, y)| b * y).sum();
        let reduced = |column: usize| self.cost[column] - self.across(column, rows);
        let slack = |column: usize| (reduced(column) * self.upper[column].min(most)).min(0.0);
        fixed + (0..self.cost.len()).map(slack).sum::<f64>()
    }

    /// `A x`.
    fn times(&self, x: &[f64]) -> Vec<f64> {
        let mut sums = vec![0.0; self.rhs.len()];
        for (column, &value) in self.columns.iter().zip(x) {
            column.iter().for_each(|&(row, factor)| sums[row] += factor * value);
        }
        sums
    }

    /// `Aᵀ y`, one variable's.
    fn across(&self, column: usize, rows: &[f64]) -> f64 {
        self.columns[column].iter().map(|&(row, factor)| factor * rows[row]).sum()
    }

    /// Solves the program, or goes as near as rounding lets it.
    pub(super) fn solve(&self) -> Point {
        let n = self.cost.len();
        let mut factor = Skyline::new(self);
        let bounded: Vec<bool> = self.upper.iter().map(|upper| upper.is_finite()).collect();
        let scale = |values: &[f64]| 1.0 + values.iter().fold(0.0f64, |most, value| most.max(value.abs()));
        let (rhs_scale, cost_scale) = (scale(&self.rhs), scale(&self.cost));
        // Begin inside the bounds, away from them.
        let mut x: Vec<f64> = self.upper.iter().map(|&upper| (0.5 * upper).min(1.0)).collect();
        let mut w: Vec<f64> = (0..n).map(|i| if bounded[i] { self.upper[i] - x[i] } else { 1.0 }).collect();
        let mut z = vec![1.0; n];
        let mut v: Vec<f64> = bounded.iter().map(|&bounded| if bounded { 1.0 } else { 0.0 }).collect();
        let mut y = vec![0.0; self.rhs.len()];
        let pairs = (n + bounded.iter().filter(|&&bounded| bounded).count()) as f64;
        for _ in 0..STEPS {
            let primal: Vec<f64> = self.times(&x).iter().zip(&self.rhs).map(|(a, b)| b - a).collect();
            let dual: Vec<f64> = (0..n).map(|i| self.cost[i] - self.across(i, &y) - z[i] + v[i]).collect();
            let product = |x: &[f64], w: &[f64], z: &[f64], v: &[f64]| -> f64 {
                (0..n).map(|i| x[i] * z[i] + if bounded[i] { w[i] * v[i] } else { 0.0 }).sum::<f64>() / pairs
            };
            let mu = product(&x, &w, &z, &v);
            let most = |values: &[f64]| values.iter().fold(0.0f64, |most, value| most.max(value.abs()));
            let objective: f64 = self.cost.iter().zip(&x).map(|(c, x)| c * x).sum();
            if most(&primal) <= CLOSE * rhs_scale && most(&dual) <= CLOSE * cost_scale && mu * pairs <= CLOSE * (1.0 + objective.abs())
            {
                break;
            }
            let d: Vec<f64> = (0..n).map(|i| 1.0 / (z[i] / x[i] + if bounded[i] { v[i] / w[i] } else { 0.0 })).collect();
            factor.factor(self, &d);
            // Directions for given targets of the products x z and w v, less their second-order terms.
            let direction = |xz: &dyn Fn(usize) -> f64, wv: &dyn Fn(usize) -> f64| {
                let h: Vec<f64> = (0..n)
                    .map(|i| {
                        dual[i] - (xz(i) - x[i] * z[i]) / x[i] + if bounded[i] { (wv(i) - w[i] * v[i]) / w[i] } else { 0.0 }
                    })
                    .collect();
                let scaled: Vec<f64> = (0..n).map(|i| d[i] * h[i]).collect();
                let right: Vec<f64> = self.times(&scaled).iter().zip(&primal).map(|(a, p)| a + p).collect();
                let dy = factor.solve(&right);
                let dx: Vec<f64> = (0..n).map(|i| d[i] * (self.across(i, &dy) - h[i])).collect();
                let dz: Vec<f64> = (0..n).map(|i| (xz(i) - z[i] * x[i] - z[i] * dx[i]) / x[i]).collect();
                let dv: Vec<f64> = (0..n)
                    .map(|i| if bounded[i] { (wv(i) - v[i] * w[i] + v[i] * dx[i]) / w[i] } else { 0.0 })
                    .collect();
                (dx, dy, dz, dv)
            };
            let reach = |dx: &[f64], dz: &[f64], dv: &[f64]| {
                let (mut primal, mut dual) = (1.0f64, 1.0f64);
                for i in 0..n {
                    if dx[i] < 0.0 {
                        primal = primal.min(-x[i] / dx[i]);
                    }
                    if dz[i] < 0.0 {
                        dual = dual.min(-z[i] / dz[i]);
                    }
                    if bounded[i] && 0.0 < dx[i] {
                        primal = primal.min(w[i] / dx[i]);
                    }
                    if bounded[i] && dv[i] < 0.0 {
                        dual = dual.min(-v[i] / dv[i]);
                    }
                }
                (primal, dual)
            };
            let (dx, _, dz, dv) = direction(&|_| 0.0, &|_| 0.0);
            let (a, b) = reach(&dx, &dz, &dv);
            let step = |values: &[f64], by: f64, delta: &[f64]| -> Vec<f64> {
                values.iter().zip(delta).map(|(value, delta)| value + by * delta).collect()
            };
            let back: Vec<f64> = dx.iter().map(|dx| -dx).collect();
            let after = product(&step(&x, a, &dx), &step(&w, a, &back), &step(&z, b, &dz), &step(&v, b, &dv));
            let sigma = (after / mu).powi(3).min(1.0);
            let (dx, dy, dz, dv) =
                direction(&|i| sigma * mu - dx[i] * dz[i], &|i| sigma * mu + dx[i] * dv[i]);
            if !dx.iter().chain(&dy).all(|value| value.is_finite()) {
                break;
            }
            let (a, b) = reach(&dx, &dz, &dv);
            let (a, b) = ((0.9995 * a).min(1.0), (0.9995 * b).min(1.0));
            for i in 0..n {
                x[i] += a * dx[i];
                z[i] += b * dz[i];
                v[i] += b * dv[i];
                w[i] = if bounded[i] { (w[i] - a * dx[i]).max(1e-300) } else { 1.0 };
            }
            y.iter_mut().zip(&dy).for_each(|(y, dy)| *y += b * dy);
        }
        Point { x, rows: y }
    }
}

/// A symmetric matrix's lower half and then its Cholesky factor, row by row from each row's first entry to the diagonal.
struct Skyline {
    /// Each row's first column.
    first: Vec<usize>,
    /// Where each row begins in `values`.
    start: Vec<usize>,
    values: Vec<f64>,
}

impl Skyline {
    fn new(program: &Program) -> Skyline {
        let n = program.rhs.len();
        let mut first: Vec<usize> = (0..n).collect();
        for column in &program.columns {
            let least = column.iter().map(|&(row, _)| row).min();
            column.iter().for_each(|&(row, _)| first[row] = first[row].min(least.unwrap_or(row)));
        }
        let mut start = Vec::with_capacity(n + 1);
        let mut end = 0;
        for row in 0..n {
            start.push(end);
            end += row - first[row] + 1;
        }
        start.push(end);
        Skyline { first, start, values: vec![0.0; end] }
    }

    /// `A D Aᵀ = L Lᵀ`. A row that hangs on others gets a pivot so large that its multiplier stays 0.
    fn factor(&mut self, program: &Program, d: &[f64]) {
        self.values.fill(0.0);
        for (column, &d) in program.columns.iter().zip(d) {
            for (i, &(row, a)) in column.iter().enumerate() {
                for &(other, b) in &column[..=i] {
                    // A column lists its rows in ascending order.
                    self.values[self.start[row] + other - self.first[row]] += a * d * b;
                }
            }
        }
        for row in 0..self.first.len() {
            let (done, rest) = self.values.split_at_mut(self.start[row]);
            let (first, width) = (self.first[row], row - self.first[row]);
            let diagonal = rest[width];
            for at in 0..width {
                let column = first + at;
                let from = self.first[column].max(first);
                let left = &rest[from - first..at];
                let other = &done[self.start[column] + from - self.first[column]..self.start[column + 1]];
                let (pivot, other) = other.split_last().expect("a row should have a diagonal");
                let value = (rest[at] - dot(left, other)) / pivot;
                rest[at] = value;
            }
            let pivot = diagonal - dot(&rest[..width], &rest[..width]);
            rest[width] = if pivot <= 1e-13 * diagonal.max(1e-20) { 1e64 } else { pivot.sqrt() };
        }
    }

    fn solve(&self, right: &[f64]) -> Vec<f64> {
        let mut x = right.to_vec();
        for row in 0..x.len() {
            let line = &self.values[self.start[row]..self.start[row + 1]];
            let width = line.len() - 1;
            x[row] = (x[row] - dot(&line[..width], &x[self.first[row]..row])) / line[width];
        }
        for row in (0..x.len()).rev() {
            let line = &self.values[self.start[row]..self.start[row + 1]];
            let width = line.len() - 1;
            x[row] /= line[width];
            let value = x[row];
            x[self.first[row]..row].iter_mut().zip(line).for_each(|(x, factor)| *x -= factor * value);
        }
        x
    }
}

/// Four sums at a time: the compiler may then use wide registers.
fn dot(a: &[f64], b: &[f64]) -> f64 {
    let mut sums = [0.0; 4];
    let (a4, b4) = (a.chunks_exact(4), b.chunks_exact(4));
    let rest: f64 = a4.remainder().iter().zip(b4.remainder()).map(|(a, b)| a * b).sum();
    for (a, b) in a4.zip(b4) {
        (0..4).for_each(|i| sums[i] += a[i] * b[i]);
    }
    sums.iter().sum::<f64>() + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_program_has_its_known_optimum() {
        // max 3a + 5b; a <= 4, 2b <= 12, 3a + 2b <= 18: 36 at (2, 6).
        let mut program = Program::default();
        let a = program.variable(-3.0, 4.0);
        let b = program.variable(-5.0, f64::INFINITY);
        let (s, t) = (program.variable(0.0, f64::INFINITY), program.variable(0.0, f64::INFINITY));
        program.row(&[(b, 2.0), (s, 1.0)], 12.0);
        program.row(&[(a, 3.0), (b, 2.0), (t, 1.0)], 18.0);
        let point = program.solve();
        assert!((point.x[0] - 2.0).abs() < 1e-6 && (point.x[1] - 6.0).abs() < 1e-6, "{point:?}");
        let bound = program.safe_bound(&point.rows, 20.0);
        assert!(-36.0 - 1e-5 < bound && bound <= -36.0 + 1e-9, "{bound}");
    }

    #[test]
    fn the_safe_bound_holds_for_any_multipliers() {
        // min a + b with a + b = 1, in [0, 1]: 1.
        let mut program = Program::default();
        let (a, b) = (program.variable(1.0, 1.0), program.variable(1.0, 1.0));
        program.row(&[(a, 1.0), (b, 1.0)], 1.0);
        for multiplier in [-3.0, 0.0, 0.5, 1.0, 2.0, 100.0] {
            assert!(program.safe_bound(&[multiplier], 1.0) <= 1.0);
        }
        assert_eq!(program.safe_bound(&[1.0], 1.0), 1.0);
    }

    #[test]
    fn a_row_said_twice_does_no_harm() {
        let mut program = Program::default();
        let (a, b) = (program.variable(1.0, f64::INFINITY), program.variable(2.0, f64::INFINITY));
        program.row(&[(a, 1.0), (b, 1.0)], 3.0);
        program.row(&[(a, 1.0), (b, 1.0)], 3.0);
        let point = program.solve();
        assert!((point.x[0] - 3.0).abs() < 1e-5 && point.x[1].abs() < 1e-5, "{point:?}");
    }
}
