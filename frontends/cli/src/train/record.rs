//! What is measured after a step: lines of metrics, and the loss on held-out batches.

use super::evaluation::{Evaluated, Evaluator};
use super::metrics::{Metrics, object};
use super::rates::{Items, Run};
use crate::failure::Failure;
use crate::out::{self, out};
use crate::size::micros;
use artifact::Artifact;
use runtime::Machine;

/// What measures.
pub(super) struct Record {
    pub(super) metrics: Metrics,
    pub(super) evaluator: Option<Evaluator>,
    pub(super) items: Items,
    /// Steps of an epoch.
    pub(super) epoch: f64,
    /// The position of the learning rate among the optimizer's options, if it has one.
    pub(super) lr: Option<usize>,
    pub(super) json: bool,
}

/// The position of the learning rate among the options of a step's optimizer.
pub(super) fn lr_position(artifact: &Artifact) -> Option<usize> {
    let (_, options) = artifact.summary.optimizer.as_ref()?;
    options.iter().position(|(name, _)| name == "lr")
}

impl Record {
    /// Writes a step's measures. `hyper`: the bytes of the optimizer's options in this step.
    pub(super) fn step(&mut self, run: &Run, hyper: Option<&[u8]>) -> Result<(), Failure> {
        let ms = run.millis.last().copied().unwrap_or(0.0);
        let rate = format!("{}_per_second", self.items.word);
        let lr = || {
            let at = self.lr?;
            let bytes = hyper?.get(8 * at..)?.first_chunk()?;
            Some(f64::from_le_bytes(*bytes))
        };
        let measures = [
            ("loss", run.losses.last().copied().flatten()),
            ("lr", lr()),
            ("ms", Some(ms)),
            (&rate, Some(self.items.count as f64 * 1e3 / ms.max(1e-6))),
            ("epoch", Some(run.step() as f64 / self.epoch)),
        ];
        self.metrics.add(run.step(), &measures)
    }

    /// Evaluates if that is due after the last step. Returns why the run should end, if it should.
    pub(super) fn evaluate(
        &mut self,
        machine: &mut Machine,
        run: &Run,
        is_last: bool,
    ) -> Result<Option<String>, Failure> {
        let Some(evaluator) = &mut self.evaluator else {
            return Ok(None);
        };
        if !evaluator.is_due(run.step(), is_last) {
            return Ok(None);
        }
        let Some(evaluated) = evaluator.run(machine)? else {
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
