//! The paper's experiments: reconstructed instances of Table 1 and Figure 4, their columns, and the
//! same columns of our algorithms.
//!
//! The paper states neither weights nor memory sizes. Table 1 implies them: the column of L2L minus
//! the first column is the time to move all weights twice, and greedy's gaps are multiples of the
//! time to move one block. β = 12 MiB/ms. GPT-2: h = 3072, blocks of 12 h² + 13 h parameters in
//! f32, an embedding that takes no time, a head without weights: depth D has D - 2 blocks. BERT: h
//! = 2560 and 3072 inside, D blocks and an embedding. Assumptions: a forward takes a quarter of a
//! block's time (its backward recomputes), sequences of 128.

use super::validate::validate;
use super::{Algorithm, Error, Instance, Layer, Solution, solve};
use crate::table::Table;

/// A row of Table 1; times in ms.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Row {
    /// GPT-2, or else BERT.
    pub gpt2: bool,
    /// Its "network depth".
    pub depth: usize,
    /// Its batch.
    pub batch: usize,
    /// Σ u, which is also the bound that the paper found.
    pub compute: u32,
    /// The paper's Greedy.
    pub greedy: u32,
    /// The paper's L2L.
    pub l2l: u32,
    /// The paper's Greedy*.
    pub greedy_star: u32,
}

const fn row(
    gpt2: bool,
    depth: usize,
    batch: usize,
    [compute, greedy, l2l, greedy_star]: [u32; 4],
) -> Row {
    Row {
        gpt2,
        depth,
        batch,
        compute,
        greedy,
        l2l,
        greedy_star,
    }
}

/// Table 1.
pub const TABLE_1: [Row; 15] = [
    row(true, 74, 64, [47421, 47493, 52707, 47493]),
    row(true, 56, 64, [35553, 35625, 39542, 35625]),
    row(true, 38, 64, [23694, 23838, 26387, 23838]),
    row(true, 74, 32, [23697, 23769, 28983, 23769]),
    row(true, 56, 32, [17762, 17834, 21751, 17834]),
    row(true, 38, 32, [11840, 11948, 14533, 11948]),
    row(true, 74, 16, [11612, 11684, 16898, 11715]),
    row(true, 56, 16, [8697, 8769, 12686, 8800]),
    row(true, 38, 16, [5794, 5902, 8487, 5934]),
    row(false, 144, 64, [34486, 34499, 38379, 34499]),
    row(false, 96, 64, [22965, 22978, 25577, 22978]),
    row(false, 144, 32, [17443, 17483, 21336, 17483]),
    row(false, 96, 32, [11617, 11657, 14230, 11657]),
    row(false, 144, 16, [9090, 9183, 12983, 9215]),
    row(false, 96, 16, [6058, 6085, 8670, 6085]),
];

/// Bytes per µs of 1 MiB/ms: the paper's GB/s.
pub const MIB_PER_MS: f64 = 1048576.0 / 1e3;

/// The paper's GB: 1000 MiB.
pub const GB: f64 = 1000.0 * 1048576.0;

/// A point of Figure 4: GPT-2 with 36 blocks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Point {
    /// The row of Table 1 with its times.
    pub row: Row,
    /// The memory, in the paper's GB. The paper says "smaller than 16GB and depends on the batch
    /// size".
    pub memory: f64,
    /// The bandwidth, in the paper's GB/s.
    pub bandwidth: f64,
}

impl Point {
    /// The chain with this memory and link.
    pub fn instance(&self) -> Instance {
        Instance {
            memory_bytes: (self.memory * GB) as u64,
            bytes_per_micro: self.bandwidth * MIB_PER_MS,
            ..self.row.instance()
        }
    }
}

/// Figure 4's batches and bandwidths, each at two memories.
pub fn figure_4() -> Vec<Point> {
    let mut points = vec![];
    for row in [TABLE_1[2], TABLE_1[5]] {
        for memory in [13.0, 9.0] {
            points.extend([0.5, 1.0, 2.0, 4.0, 8.0, 12.0].map(|bandwidth| Point {
                row,
                memory,
                bandwidth,
            }));
        }
    }
    points
}

/// A solution that the validator accepts; `None` if the algorithm finds no schedule.
fn checked(instance: &Instance, algorithm: Algorithm) -> Result<Option<Solution>, Error> {
    match solve(instance, algorithm) {
        Ok(solution) => {
            validate(instance, &solution.schedule).map_err(|error| {
                Error::Invalid(format!("{}: a wrong schedule: {error}", algorithm.name()))
            })?;
            Ok(Some(solution))
        }
        Err(Error::Stuck(_)) => Ok(None),
        Err(error) => Err(error),
    }
}

/// What tables show of an algorithm: the paper's, and those that it compares with.
const SHOWN: [Algorithm; 9] = [
    Algorithm::GreedyPlus,
    Algorithm::Greedy,
    Algorithm::GreedyStar,
    Algorithm::FirstHalf,
    Algorithm::L2l,
    Algorithm::AutoSwapDoa,
    Algorithm::AutoSwapAoa,
    Algorithm::AutoSwapWdoa,
    Algorithm::AutoSwapSwdoa,
];

/// Table 1: steps in ms, with a memory of `blocks` blocks' weights more than the least. `theirs`
/// are the paper's columns. The sum of the operations is Σ u, which no step can be shorter than.
///
/// # Errors
///
/// Those of [`solve`], except that an algorithm finds no schedule: then its cell is empty.
pub fn table_1(blocks: f64) -> Result<Table, Error> {
    let mut table = Table::new(
        ["row", "sum of u", "bound"]
            .into_iter()
            .chain(SHOWN.iter().map(|algorithm| algorithm.name()))
            .chain(["their greedy", "their greedy*", "their l2l"]),
    );
    for row in &TABLE_1 {
        let mut instance = row.instance();
        let block = instance.layers[1].weight_bytes as f64;
        instance.memory_bytes = instance.floor_bytes() + (blocks * block) as u64;
        let millis = |micros: f64| format!("{:.0}", micros / 1e3);
        let mut cells = vec![
            row.name(),
            row.compute.to_string(),
            millis(super::bound(&instance)?),
        ];
        for algorithm in SHOWN {
            let solution = checked(&instance, algorithm)?;
            cells.push(solution.map_or("-".into(), |s| millis(s.schedule.period)));
        }
        cells.extend([row.greedy, row.greedy_star, row.l2l].map(|millis| millis.to_string()));
        table.push(cells);
    }
    Ok(table)
}

/// Figure 4: by how many percent a step is longer than its operations.
///
/// # Errors
///
/// As [`table_1`].
pub fn table_of_figure_4() -> Result<Table, Error> {
    let mut table = Table::new(
        ["batch", "memory GB", "GB/s", "bound"]
            .into_iter()
            .chain(SHOWN.iter().map(|algorithm| algorithm.name())),
    );
    for point in figure_4() {
        let instance = point.instance();
        let compute = instance.compute_micros();
        let over = |micros: f64| format!("{:.2}", 100.0 * (micros / compute - 1.0).max(0.0));
        let mut cells = vec![
            point.row.batch.to_string(),
            point.memory.to_string(),
            point.bandwidth.to_string(),
            over(super::bound(&instance)?),
        ];
        for algorithm in SHOWN {
            let solution = checked(&instance, algorithm)?;
            cells.push(solution.map_or("-".into(), |s| over(s.schedule.period)));
        }
        table.push(cells);
    }
    Ok(table)
}

impl Row {
    /// `GPT-2 38, batch 16`.
    pub fn name(&self) -> String {
        format!(
            "{} {}, batch {}",
            if self.gpt2 { "GPT-2" } else { "BERT" },
            self.depth,
            self.batch
        )
    }

    /// The row's chain: its embedding and its blocks. The caller chooses the memory; here it holds
    /// everything.
    pub fn instance(&self) -> Instance {
        let (n_blocks, h) = if self.gpt2 {
            (self.depth - 2, 3072u64)
        } else {
            (self.depth, 2560)
        };
        let embedding = if self.gpt2 {
            (50257 + 1024) * h
        } else {
            (30522 + 512 + 2) * h
        };
        let inner = 3072;
        let block = if self.gpt2 {
            12 * h * h + 13 * h
        } else {
            4 * (h * h + h) + 2 * h * inner + inner + h + 4 * h
        };
        let activation_bytes = self.batch as u64 * 128 * h * 4;
        let micros = f64::from(self.compute) * 1e3 / n_blocks as f64;
        let first = Layer {
            weight_bytes: 4 * embedding,
            activation_bytes,
            forward_micros: 0.0,
            backward_micros: 0.0,
        };
        let other = Layer {
            weight_bytes: 4 * block,
            activation_bytes,
            forward_micros: micros / 4.0,
            backward_micros: micros * 0.75,
        };
        let layers = std::iter::once(first)
            .chain(std::iter::repeat_n(other, n_blocks))
            .collect();
        let mut instance = Instance {
            layers,
            bytes_per_micro: 12.0 * MIB_PER_MS,
            memory_bytes: 0,
        };
        instance.memory_bytes = instance.keep_bytes();
        instance
    }
}
