//! Linear programs by an interior-point method, for the chains that [`bound`](super::bound) writes.
//!
//! Mehrotra's predictor-corrector method (S. Mehrotra, SIAM J. Optim. 2, 1992) over the normal
//! equations `A D Aᵀ`, factored by a skyline Cholesky. Related rows are near each other, so the
//! factor's rows are short and the total time is linear in the length of the chain. The result is
//! nearly optimal. [`Program::safe_bound`] is *proved*: it holds for any multipliers, whatever
//! their rounding errors (A. Neumaier, O. Shcherbina, Math. Program. 99, 2004).

/// `min cost·x` subject to `A x = rhs`, `0 <= x <= upper`.
#[derive(Clone, Debug, Default)]
pub(super) struct Program {
    cost: Vec<f64>,
    /// Infinite if there is no bound.
    upper: Vec<f64>,
    /// For each variable: the rows that contain it, with its factor.
    columns: Vec<Vec<(usize, f64)>>,
    rhs: Vec<f64>,
}

/// The point at which the method ended.
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

/// The most steps of the method; it needs about 20 to 50.
const STEPS: usize = 80;
/// The relative residuals and gap at which it ends.
const CLOSE: f64 = 1e-6;

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

    /// A lower bound of `cost·x` over the points of the program in which no variable exceeds
    /// `most`, for any multipliers.
    pub(super) fn safe_bound(&self, rows: &[f64], most: f64) -> f64 {
        let fixed: f64 = self.rhs.iter().zip(rows).map(|(b, y)| b * y).sum();
        let reduced = |column: usize| self.cost[column] - self.across(column, rows);
        let slack = |column: usize| (reduced(column) * self.upper[column].min(most)).min(0.0);
        fixed + (0..self.cost.len()).map(slack).sum::<f64>()
    }

    /// `Aᵀ y` for one variable.
    fn across(&self, column: usize, rows: &[f64]) -> f64 {
        self.columns[column]
            .iter()
            .map(|&(row, factor)| factor * rows[row])
            .sum()
    }

    /// Solves the program, as exactly as rounding permits.
    pub(super) fn solve(&self) -> Point {
        let n = self.cost.len();
        let mut normal = Normal::new(self);
        let bounded: Vec<usize> = (0..n).filter(|&i| self.upper[i].is_finite()).collect();
        let (rhs_scale, cost_scale) = (1.0 + most(&self.rhs), 1.0 + most(&self.cost));
        // Start inside the bounds, away from them. `z` are the multipliers of x >= 0, `w` the room
        // below the upper bound, `v` its multipliers; without a bound `v` is 0 and `w` never used.
        let mut x: Vec<f64> = self
            .upper
            .iter()
            .map(|&upper| (0.5 * upper).min(1.0))
            .collect();
        let mut z = vec![1.0; n];
        let (mut w, mut v) = (vec![1.0; n], vec![0.0; n]);
        for &i in &bounded {
            (w[i], v[i]) = (self.upper[i] - x[i], 1.0);
        }
        let mut y = vec![0.0; self.rhs.len()];
        let pairs = (n + bounded.len()) as f64;
        for _ in 0..STEPS {
            let primal: Vec<f64> = normal
                .times(&x)
                .iter()
                .zip(&self.rhs)
                .map(|(a, b)| b - a)
                .collect();
            let across = normal.across(&y);
            let dual: Vec<f64> = (0..n)
                .map(|i| self.cost[i] - across[i] - z[i] + v[i])
                .collect();
            let mu = (dot(&x, &z) + dot(&w, &v)) / pairs;
            let objective = dot(&self.cost, &x).abs();
            let done = most(&primal) <= CLOSE * rhs_scale && most(&dual) <= CLOSE * cost_scale;
            if done && mu * pairs <= CLOSE * (1.0 + objective) {
                break;
            }
            // Divisions are slow, so each is computed once.
            let per_x: Vec<f64> = x.iter().map(|x| 1.0 / x).collect();
            let mut d: Vec<f64> = z.iter().zip(&per_x).map(|(z, per_x)| z * per_x).collect();
            bounded.iter().for_each(|&i| d[i] += v[i] / w[i]);
            d.iter_mut().for_each(|d| *d = 1.0 / *d);
            normal.factor(&d);
            // The step at which the products x z and w v change by these amounts, to first order.
            let direction = |xz: &[f64], wv: &[f64]| {
                let mut h: Vec<f64> = (0..n).map(|i| dual[i] - xz[i] * per_x[i]).collect();
                bounded.iter().for_each(|&i| h[i] += wv[i] / w[i]);
                let scaled: Vec<f64> = d.iter().zip(&h).map(|(d, h)| d * h).collect();
                let right: Vec<f64> = normal
                    .times(&scaled)
                    .iter()
                    .zip(&primal)
                    .map(|(a, p)| a + p)
                    .collect();
                let dy = normal.solve(right);
                let dx: Vec<f64> = normal
                    .across(&dy)
                    .iter()
                    .enumerate()
                    .map(|(i, a)| d[i] * (a - h[i]))
                    .collect();
                let dz: Vec<f64> = (0..n).map(|i| (xz[i] - z[i] * dx[i]) * per_x[i]).collect();
                let mut dv = vec![0.0; n];
                bounded
                    .iter()
                    .for_each(|&i| dv[i] = (wv[i] + v[i] * dx[i]) / w[i]);
                (dx, dy, dz, dv)
            };
            // The largest step in this direction before one of x and w, or of z and v, becomes 0.
            let reach = |dx: &[f64], dz: &[f64], dv: &[f64]| {
                let until = |value: &[f64], delta: &[f64]| {
                    let ends = value.iter().zip(delta);
                    ends.fold(1.0f64, |reach, (value, delta)| {
                        if value + reach * delta < 0.0 {
                            -value / delta
                        } else {
                            reach
                        }
                    })
                };
                let room = bounded
                    .iter()
                    .filter(|&&i| 0.0 < dx[i])
                    .fold(1.0f64, |reach, &i| reach.min(w[i] / dx[i]));
                let other = bounded
                    .iter()
                    .filter(|&&i| dv[i] < 0.0)
                    .fold(1.0f64, |reach, &i| reach.min(-v[i] / dv[i]));
                (until(&x, dx).min(room), until(&z, dz).min(other))
            };
            let mut xz: Vec<f64> = x.iter().zip(&z).map(|(x, z)| -x * z).collect();
            let mut wv: Vec<f64> = w.iter().zip(&v).map(|(w, v)| -w * v).collect();
            let (dx, _, dz, dv) = direction(&xz, &wv);
            let (a, b) = reach(&dx, &dz, &dv);
            let after: f64 = (0..n)
                .map(|i| (x[i] + a * dx[i]) * (z[i] + b * dz[i]))
                .sum::<f64>()
                + bounded
                    .iter()
                    .map(|&i| (w[i] - a * dx[i]) * (v[i] + b * dv[i]))
                    .sum::<f64>();
            let target = (after / pairs / mu).powi(3).min(1.0) * mu;
            (0..n).for_each(|i| xz[i] += target - dx[i] * dz[i]);
            bounded
                .iter()
                .for_each(|&i| wv[i] += target + dx[i] * dv[i]);
            let (dx, dy, dz, dv) = direction(&xz, &wv);
            if !dx.iter().chain(&dy).all(|value| value.is_finite()) {
                break;
            }
            let (a, b) = reach(&dx, &dz, &dv);
            let (a, b) = ((0.9995 * a).min(1.0), (0.9995 * b).min(1.0));
            for i in 0..n {
                x[i] += a * dx[i];
                z[i] += b * dz[i];
            }
            for &i in &bounded {
                v[i] += b * dv[i];
                w[i] = (w[i] - a * dx[i]).max(1e-300);
            }
            y.iter_mut().zip(&dy).for_each(|(y, dy)| *y += b * dy);
        }
        Point { x, rows: y }
    }
}

fn most(values: &[f64]) -> f64 {
    values
        .iter()
        .fold(0.0f64, |most, value| most.max(value.abs()))
}

/// `A`, column by column, and `A D Aᵀ`: its lower half and then its Cholesky factor, row by row
/// from each row's first entry to the diagonal.
struct Normal {
    /// The start of each column in `entries`.
    columns: Vec<usize>,
    entries: Vec<(u32, f64)>,
    /// For each column and each pair of its entries: the position of their product, and the
    /// product.
    products: Vec<(u32, f64)>,
    /// The start of each column in `products`.
    pairs: Vec<usize>,
    /// Each row's first column.
    first: Vec<usize>,
    /// The start of each row in `values`.
    start: Vec<usize>,
    values: Vec<f64>,
}

impl Normal {
    fn new(program: &Program) -> Normal {
        let n = program.rhs.len();
        let mut first: Vec<usize> = (0..n).collect();
        for column in &program.columns {
            // A column lists its rows in ascending order.
            let least = column.first().map_or(0, |&(row, _)| row);
            column
                .iter()
                .for_each(|&(row, _)| first[row] = first[row].min(least));
        }
        let mut start = vec![0];
        (0..n).for_each(|row| start.push(start[row] + row - first[row] + 1));
        let (mut columns, mut entries, mut pairs, mut products) =
            (vec![0], Vec::new(), vec![0], Vec::new());
        for column in &program.columns {
            for (i, &(row, a)) in column.iter().enumerate() {
                entries.push((row as u32, a));
                let at = |other: usize| (start[row] + other - first[row]) as u32;
                products.extend(column[..=i].iter().map(|&(other, b)| (at(other), a * b)));
            }
            columns.push(entries.len());
            pairs.push(products.len());
        }
        let values = vec![0.0; start[n]];
        Normal {
            columns,
            entries,
            products,
            pairs,
            first,
            start,
            values,
        }
    }

    /// `A x`.
    fn times(&self, x: &[f64]) -> Vec<f64> {
        let mut sums = vec![0.0; self.first.len()];
        for (column, &value) in self.columns.windows(2).zip(x) {
            self.entries[column[0]..column[1]]
                .iter()
                .for_each(|&(row, factor)| sums[row as usize] += factor * value);
        }
        sums
    }

    /// `Aᵀ y`.
    fn across(&self, rows: &[f64]) -> Vec<f64> {
        let column = |column: &[usize]| {
            self.entries[column[0]..column[1]]
                .iter()
                .map(|&(row, factor)| factor * rows[row as usize])
                .sum()
        };
        self.columns.windows(2).map(column).collect()
    }

    /// `A D Aᵀ = L Lᵀ`. A row that depends on others gets a pivot so large that its multiplier
    /// stays 0.
    fn factor(&mut self, d: &[f64]) {
        self.values.fill(0.0);
        for (pairs, &d) in self.pairs.windows(2).zip(d) {
            self.products[pairs[0]..pairs[1]]
                .iter()
                .for_each(|&(at, product)| self.values[at as usize] += d * product);
        }
        for row in 0..self.first.len() {
            let (done, rest) = self.values.split_at_mut(self.start[row]);
            let (first, width) = (self.first[row], row - self.first[row]);
            let diagonal = rest[width];
            for at in 0..width {
                let column = first + at;
                let from = self.first[column].max(first);
                let left = &rest[from - first..at];
                let other =
                    &done[self.start[column] + from - self.first[column]..self.start[column + 1]];
                let (pivot, other) = other.split_last().expect("a row should have a diagonal");
                rest[at] = (rest[at] - dot(left, other)) / pivot;
            }
            let pivot = diagonal - dot(&rest[..width], &rest[..width]);
            rest[width] = if pivot <= 1e-13 * diagonal.max(1e-20) {
                1e64
            } else {
                pivot.sqrt()
            };
        }
    }

    /// `L Lᵀ x = right`.
    fn solve(&self, mut x: Vec<f64>) -> Vec<f64> {
        for row in 0..x.len() {
            let line = &self.values[self.start[row]..self.start[row + 1]];
            let width = line.len() - 1;
            x[row] = (x[row] - dot(&line[..width], &x[self.first[row]..row])) / line[width];
        }
        for row in (0..x.len()).rev() {
            let line = &self.values[self.start[row]..self.start[row + 1]];
            x[row] /= line[line.len() - 1];
            let value = x[row];
            x[self.first[row]..row]
                .iter_mut()
                .zip(line)
                .for_each(|(x, factor)| *x -= factor * value);
        }
        x
    }
}

/// Four sums at a time, so that the compiler can use wide registers.
fn dot(a: &[f64], b: &[f64]) -> f64 {
    let mut sums = [0.0; 4];
    let (a4, b4) = (a.chunks_exact(4), b.chunks_exact(4));
    let rest: f64 = a4
        .remainder()
        .iter()
        .zip(b4.remainder())
        .map(|(a, b)| a * b)
        .sum();
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
        let (s, t) = (
            program.variable(0.0, f64::INFINITY),
            program.variable(0.0, f64::INFINITY),
        );
        program.row(&[(b, 2.0), (s, 1.0)], 12.0);
        program.row(&[(a, 3.0), (b, 2.0), (t, 1.0)], 18.0);
        let point = program.solve();
        assert!(
            (point.x[0] - 2.0).abs() < 1e-6 && (point.x[1] - 6.0).abs() < 1e-6,
            "{point:?}"
        );
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
        let (a, b) = (
            program.variable(1.0, f64::INFINITY),
            program.variable(2.0, f64::INFINITY),
        );
        program.row(&[(a, 1.0), (b, 1.0)], 3.0);
        program.row(&[(a, 1.0), (b, 1.0)], 3.0);
        let point = program.solve();
        assert!(
            (point.x[0] - 3.0).abs() < 1e-5 && point.x[1].abs() < 1e-5,
            "{point:?}"
        );
    }
}
