//! The learning rate of each step: PyTorch's schedules in closed form.

use crate::args::{HyperArgs, Schedule};
use crate::failure::Failure;
use std::f64::consts::PI;
use std::fmt;

/// Of `OneCycleLR`: the share of steps in which the rate rises, the first rate is `1/FIRST` of the
/// highest one, and the last `1/LAST` of the first.
const RISE: f64 = 0.3;
const FIRST: f64 = 25.0;
const LAST: f64 = 1e4;

/// The learning rates of a run.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rates {
    schedule: Schedule,
    /// Of the schedule, with the warm-up.
    steps: u64,
    warmup: u64,
    /// The rate at the end.
    least: f64,
}

impl Rates {
    /// The rates that the options ask for, over a run of `steps`.
    pub(super) fn new(args: &HyperArgs, steps: u64) -> Result<Rates, Failure> {
        let schedule = args.schedule.unwrap_or_default();
        let rates = Rates {
            schedule,
            steps: args.schedule_steps.unwrap_or(steps),
            warmup: args.warmup.unwrap_or(0),
            least: args.min_lr.unwrap_or(0.0),
        };
        let refused = |message: String| Err(Failure::Input(message));
        let falls = matches!(schedule, Schedule::Linear | Schedule::Cosine);
        if args.min_lr.is_some() && !falls {
            return refused(format!(
                "--min-lr: the schedule {} does not fall to a rate of the user's; linear and \
                 cosine do",
                schedule.name()
            ));
        }
        if !(rates.least.is_finite() && 0.0 <= rates.least) {
            return refused(format!(
                "--min-lr should be a number from 0, not {}",
                rates.least
            ));
        }
        if schedule == Schedule::OneCycle && 0 < rates.warmup {
            return refused("--warmup: the schedule one-cycle has a rise of its own".into());
        }
        if rates.steps <= rates.warmup && 0 < rates.warmup {
            return refused(format!(
                "--warmup {}: the schedule has {} steps, so nothing is left after it; \
                 --schedule-steps sets their number",
                rates.warmup, rates.steps
            ));
        }
        Ok(rates)
    }

    /// The rate of a step, from 0, where `lr` is the highest one.
    pub(super) fn at(&self, step: u64, lr: f64) -> f64 {
        if step < self.warmup {
            // LinearLR(start_factor=1/(warmup + 1), total_iters=warmup).
            return lr * ((step + 1) as f64 / (self.warmup + 1) as f64);
        }
        let length = (self.steps - self.warmup) as f64;
        // After its last step, a schedule stays where it ends.
        let at = ((step - self.warmup) as f64).min(length);
        match self.schedule {
            // Exactly, although the formulas round.
            Schedule::Linear | Schedule::Cosine if at == 0.0 => lr,
            Schedule::Constant => lr,
            Schedule::Linear => lr + (self.least - lr) * (at / length),
            Schedule::Cosine => {
                self.least + (lr - self.least) * (1.0 + (PI * at / length).cos()) / 2.0
            }
            Schedule::OneCycle => one_cycle(step as f64, self.steps as f64, lr),
        }
    }
}

impl fmt::Display for Rates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Rates {
            schedule,
            steps,
            warmup,
            least,
        } = self;
        write!(f, "{}", schedule.name())?;
        if *schedule != Schedule::Constant {
            write!(f, " over {steps} steps to {least}")?;
        }
        match warmup {
            0 => Ok(()),
            warmup => write!(f, ", warm-up {warmup}"),
        }
    }
}

/// `OneCycleLR` with cosines.
fn one_cycle(step: f64, steps: f64, most: f64) -> f64 {
    let (first, last) = (most / FIRST, most / FIRST / LAST);
    let (top, end) = (RISE * steps - 1.0, steps - 1.0);
    let between =
        |from: f64, to: f64, share: f64| to + (from - to) / 2.0 * (1.0 + (PI * share).cos());
    match step {
        _ if step <= top => between(first, most, step / top),
        _ => between(most, last, ((step - top) / (end - top)).min(1.0)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `tests/data/schedules.py` writes what PyTorch's schedulers give.
    const TORCH: &str = include_str!("../../tests/data/schedules.txt");

    #[test]
    fn rates_are_those_of_pytorch() {
        let mut n_rates = 0;
        for line in TORCH.lines().filter(|line| !line.starts_with('#')) {
            let mut words = line.split(' ');
            let mut word = || words.next().expect("the line has this word");
            let schedule = word();
            let schedule = Schedule::ALL.into_iter().find(|s| s.name() == schedule);
            let [steps, warmup] = [word(), word()].map(|n| n.parse().unwrap());
            let [lr, least]: [f64; 2] = [word(), word()].map(|x| x.parse().unwrap());
            let rates = Rates {
                schedule: schedule.unwrap(),
                steps,
                warmup,
                least,
            };
            for (step, expected) in (0..).zip(words) {
                let (rate, expected) = (rates.at(step, lr), expected.parse::<f64>().unwrap());
                // PyTorch computes some rates from those of the step before.
                assert!(
                    (rate - expected).abs() <= 1e-13 * lr,
                    "{line:.40}: step {step}: {rate} {expected}"
                );
                n_rates += 1;
            }
        }
        assert!(1000 < n_rates);
    }
}
