//! What steps consume, and the time that they take.

use artifact::{DType, Operand};

/// Progress shows the median time of this many last steps. The summary has the median of all.
const RECENT: usize = 101;

/// The items that a step consumes, for rates.
#[derive(Clone, Copy)]
pub(super) struct Items {
    pub(super) count: u64,
    pub(super) word: &'static str,
}

impl Items {
    /// Tokens if the first input is a matrix of integers, else samples.
    pub(super) fn of(inputs: &[(String, Operand)], micro_batches: u64) -> Items {
        let Items { count, word } = Items::of_one_batch(inputs);
        Items {
            count: count * micro_batches,
            word,
        }
    }

    pub(super) fn of_one_batch(inputs: &[(String, Operand)]) -> Items {
        let Some((_, first)) = inputs.first() else {
            return Items {
                count: 1,
                word: "steps",
            };
        };
        let integer = matches!(
            first.dtype,
            DType::U8 | DType::I8 | DType::I16 | DType::I32 | DType::I64
        );
        match (integer, &first.shape[..]) {
            (true, [rows, columns]) => Items {
                count: rows * columns,
                word: "tokens",
            },
            (_, [samples, ..]) => Items {
                count: *samples,
                word: "samples",
            },
            (_, []) => Items {
                count: 1,
                word: "samples",
            },
        }
    }

    pub(super) fn rate(&self, millis: f64) -> String {
        format!(
            "{:.0} {}/s",
            self.count as f64 * 1e3 / millis.max(1e-6),
            self.word
        )
    }
}

/// What a step has beside its loss, if it has it.
#[derive(Clone, Copy)]
pub(super) struct Numbers {
    /// The learning rate.
    pub(super) lr: Option<f64>,
    /// The norm over all gradients.
    pub(super) grad_norm: Option<f64>,
    /// The scale of the loss.
    pub(super) loss_scale: Option<f64>,
    /// 1 if a gradient was not finite, so that nothing was updated, else 0.
    pub(super) found_inf: Option<f64>,
}

impl Numbers {
    /// Those that the step has, with their names.
    pub(super) fn named(self) -> impl Iterator<Item = (&'static str, f64)> {
        let numbers = [
            ("lr", self.lr),
            ("grad_norm", self.grad_norm),
            ("loss_scale", self.loss_scale),
            ("found_inf", self.found_inf),
        ];
        let numbers = numbers.into_iter();
        numbers.filter_map(|(name, number)| Some((name, number?)))
    }
}

/// Steps so far.
#[derive(Default)]
pub(super) struct Run {
    /// The number of steps that runs before this one had done: `--start-step`.
    pub(super) before: u64,
    /// The time of each, ms.
    pub(super) millis: Vec<f64>,
    /// The items that each consumed.
    pub(super) counts: Vec<u64>,
    /// Their losses.
    pub(super) losses: Vec<Option<f64>>,
    /// How many of them updated nothing, because a gradient was not finite.
    pub(super) skipped: u64,
}

impl Run {
    pub(super) fn add(&mut self, millis: f64, loss: Option<f64>, count: u64) {
        self.millis.push(millis);
        self.counts.push(count);
        self.losses.push(loss);
    }

    /// The number of the last step, from 1.
    pub(super) fn step(&self) -> u64 {
        self.before + self.millis.len() as u64
    }

    /// The median time of the steps, without the first, which uses cold memory.
    pub(super) fn median(&self) -> Option<f64> {
        let warm = &self.millis[self.millis.len().min(1)..];
        if warm.is_empty() {
            median(&self.millis)
        } else {
            median(warm)
        }
    }

    /// Items per second. If steps have several sizes, it is that of all steps but the first.
    pub(super) fn rate(&self) -> Option<f64> {
        let warm = self.millis.len().min(1);
        let of = |count: u64, ms: f64| Some(count as f64 * 1e3 / ms.max(1e-6));
        let first = *self.counts.first()?;
        match self.counts.iter().all(|&count| count == first) {
            true => of(first, self.median()?),
            false => of(
                self.counts[warm..].iter().sum(),
                self.millis[warm..].iter().sum(),
            ),
        }
    }

    /// The median time of the last steps; none before the second step. Its cost does not grow with
    /// the run.
    pub(super) fn recent(&self) -> Option<f64> {
        let from = self.millis.len().saturating_sub(RECENT).max(1);
        median(self.millis.get(from..).unwrap_or_default())
    }

    pub(super) fn last_loss(&self) -> String {
        self.losses
            .last()
            .copied()
            .flatten()
            .map_or("-".into(), |loss| format!("{loss:.4}"))
    }
}

pub(super) fn median(millis: &[f64]) -> Option<f64> {
    let mut millis = millis.to_vec();
    millis.sort_by(f64::total_cmp);
    match millis.len() {
        0 => None,
        n if n % 2 == 1 => Some(millis[n / 2]),
        n => Some((millis[n / 2 - 1] + millis[n / 2]) / 2.0),
    }
}

/// `nan`, `inf` or `-inf`, for a number that JSON cannot hold.
pub(super) fn nonfinite_name(value: f64) -> Option<&'static str> {
    if value.is_nan() {
        Some("nan")
    } else if value.is_infinite() {
        Some(if value > 0.0 { "inf" } else { "-inf" })
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_while_steps_run_are_those_of_the_last_ones() {
        let mut run = Run::default();
        run.add(1e6, None, 1);
        assert_eq!((run.recent(), run.median()), (None, Some(1e6)));
        run.add(2.0, None, 1);
        assert_eq!((run.recent(), run.median()), (Some(2.0), Some(2.0)));
        for _ in 0..RECENT {
            run.add(8.0, None, 1);
        }
        (0..RECENT / 2).for_each(|_| run.add(4.0, None, 1));
        assert_eq!(run.recent(), Some(8.0));
        run.add(4.0, None, 1);
        assert_eq!(run.recent(), Some(4.0));
        assert_eq!(run.median(), Some(8.0));
    }
}
