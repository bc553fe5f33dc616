//! What is measured after a step: lines of metrics, and the loss on held-out batches.

use super::evaluation::{Evaluated, Evaluator};
use super::metrics::{Metrics, object};
use super::rates::{Items, Numbers, Run};
use crate::failure::Failure;
use crate::out::{self, out};
use crate::size::micros;
use runtime::Steps;
use std::collections::BTreeMap;

/// What measures.
pub(super) struct Record {
    pub(super) metrics: Metrics,
    pub(super) evaluator: Option<Evaluator>,
    pub(super) items: Items,
    /// Steps of an epoch.
    pub(super) epoch: f64,
    pub(super) json: bool,
}

impl Record {
    /// Writes a step's measures.
    pub(super) fn step(&mut self, run: &Run, numbers: Numbers) -> Result<(), Failure> {
        let ms = run.millis.last().copied().unwrap_or(0.0);
        let rate = format!("{}_per_second", self.items.word);
        let mut measures = vec![
            ("loss", run.losses.last().copied().flatten()),
            ("ms", Some(ms)),
            (&rate, Some(self.items.count as f64 * 1e3 / ms.max(1e-6))),
            ("epoch", Some(run.step() as f64 / self.epoch)),
        ];
        measures.extend(numbers.named().map(|(name, number)| (name, Some(number))));
        self.metrics.add(run.step(), &measures)
    }

    /// What a run that goes on must know, as numbers by name.
    pub(super) fn numbers(&self) -> BTreeMap<String, u64> {
        let evaluator = self.evaluator.as_ref();
        evaluator.map_or_else(BTreeMap::new, Evaluator::numbers)
    }

    /// Evaluates if that is due after the last step. Returns why the run should end, if it should.
    pub(super) fn evaluate(
        &mut self,
        steps: &mut Steps,
        run: &Run,
        is_last: bool,
    ) -> Result<Option<String>, Failure> {
        let Some(evaluator) = &mut self.evaluator else {
            return Ok(None);
        };
        if !evaluator.is_due(run.step(), is_last) {
            return Ok(None);
        }
        let Some(evaluated) = evaluator.run(steps)? else {
            return Ok(None);
        };
        let exhausted = evaluator.exhausted().filter(|_| !is_last);
        self.show(run.step(), evaluated)?;
        Ok(exhausted)
    }

    fn show(&mut self, step: u64, evaluated: Evaluated) -> Result<(), Failure> {
        let Evaluated { loss, batches, ms } = evaluated;
        let measures = [("eval_loss", Some(loss)), ("eval_ms", Some(ms))];
        if self.json {
            out!("{}", object(step, &measures));
        } else {
            let time = micros(ms * 1e3);
            out!("eval {step:>5}  loss {loss:.4} on {batches} batches in {time}");
        }
        if !loss.is_finite() {
            out::note(&format!(
                "warning: the evaluation loss after step {step} is {loss}"
            ));
        }
        self.metrics.add(step, &measures)
    }
}
