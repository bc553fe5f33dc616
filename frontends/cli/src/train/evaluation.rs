//! The mean loss on held-out batches, computed between steps in the memory of the plan, or by a
//! model that only evaluates.

use super::buckets::Buckets;
use super::number::Number;
use super::{eval_model, failure, feeding, write};
use crate::args::TrainArgs;
use crate::data::Data;
use crate::failure::Failure;
use crate::interrupt;
use crate::model::{self, Format};
use crate::out;
use artifact::Artifact;
use runtime::{Evaluation, Files, Machine, NotEvaluable, Options, Steps};
use std::collections::BTreeMap;
use std::time::Instant;

/// What to evaluate, and when.
pub(super) struct Evaluator {
    /// Of each step.
    evaluations: Vec<Evaluation>,
    loss: Number,
    /// The machine of a model that only evaluates; absent if the step that learns evaluates.
    own: Option<Steps>,
    data: Data,
    buckets: Buckets,
    /// The number of steps' batches that are read.
    n_turns: u64,
    every: Option<u64>,
    patience: Patience,
}

/// A finished evaluation.
#[derive(Clone, Copy)]
pub(super) struct Evaluated {
    /// The mean loss.
    pub(super) loss: f64,
    pub(super) batches: u64,
    pub(super) ms: f64,
}

impl Evaluator {
    /// Opens the held-out data, and the model that evaluates if it is another; none without
    /// `--eval`. `artifact`: the step that learns. `options`: how its machine runs.
    pub(super) fn open(
        args: &TrainArgs,
        artifact: &Artifact,
        options: Options,
    ) -> Result<Option<Evaluator>, Failure> {
        if args.eval.eval.is_empty() {
            return Ok(None);
        }
        let (mut own, option) = match &args.eval.eval_model {
            Some(path) => {
                let option = format!("--eval-model {}", path.display());
                (eval_model::of_file(args, path, artifact)?, option)
            }
            None if is_training_mode(artifact) && model::format(&args.model)? != Format::Lit => {
                let own =
                    eval_model::of_training(args, artifact).map_err(|failure| match failure {
                        Failure::Input(why) => Failure::Input(format!("--eval: {why}{EXPORT}")),
                        other => other,
                    })?;
                out::note(
                    "note: --eval: without dropout, and with the running statistics of batch \
                     norms; this takes memory of its own",
                );
                (own, "--eval".into())
            }
            None => return Evaluator::of(args, artifact, "--eval").map(Some),
        };
        eval_model::check_states(&option, &own, artifact)?;
        let mut evaluator = Evaluator::of(args, &own, &option)?;
        let files = Files {
            choices: None,
            disk: args.compiling.disk.as_ref().map(|disk| &*disk.folder),
        };
        let others = std::mem::take(&mut own.others);
        let machine = Machine::beside(own, options, files).map_err(failure)?;
        evaluator.own = Some(Steps::new(machine, others, options).map_err(failure)?);
        Ok(Some(evaluator))
    }

    /// An evaluator by a step. `option`: what names it.
    fn of(args: &TrainArgs, artifact: &Artifact, option: &str) -> Result<Evaluator, Failure> {
        let refused = |why: String| Failure::Input(format!("{option}: {why}"));
        let Some(loss) = Number::loss(artifact) else {
            return Err(refused(
                "the model has no loss: no output is one number".into(),
            ));
        };
        let refuse = |e: NotEvaluable| match e {
            NotEvaluable::Invalid(error) => failure(error),
            NotEvaluable::Random(_) | NotEvaluable::Buffer(_) => refused(format!("{e}{EXPORT}")),
            NotEvaluable::State(_) => refused(format!("{e}; --update after may help")),
            NotEvaluable::NoOutput(_) | NotEvaluable::InParts => refused(e.to_string()),
        };
        let steps = std::iter::once(artifact).chain(&artifact.others);
        let evaluations = steps.map(|step| Evaluation::of(step, loss.name()).map_err(refuse));
        let evaluations = evaluations.collect::<Result<_, _>>()?;

        let buckets = Buckets::of(artifact, args.data.labels_input.as_deref());
        let micro_batches = buckets.micro_batches();
        let data = feeding::held_out(&args.data, &args.eval.eval, &buckets)?;
        let most = args.eval.eval_batches.unwrap_or(u64::MAX);
        let batches = data.batches().min(most);
        // A step's loss is that of all its micro-batches, so they are evaluated together.
        let n_turns = batches / micro_batches;
        if n_turns == 0 {
            return Err(refused(format!(
                "{batches} batches, and a step takes {micro_batches}"
            )));
        }
        Ok(Evaluator {
            evaluations,
            loss,
            own: None,
            data,
            buckets,
            n_turns,
            every: args.eval.eval_every,
            patience: Patience::new(args.eval.patience),
        })
    }

    /// Whether an evaluation follows a step.
    pub(super) fn is_due(&self, step: u64, is_last: bool) -> bool {
        is_last || self.every.is_some_and(|every| step.is_multiple_of(every))
    }

    /// The mean loss; none if the user interrupts it. All steps are done when it returns, and no
    /// state of the machine that learns has changed.
    pub(super) fn run(&mut self, steps: &mut Steps) -> Result<Option<Evaluated>, Failure> {
        steps.now().wait().map_err(failure)?;
        let start = Instant::now();
        let steps = match &mut self.own {
            Some(own) => {
                eval_model::copy_states(steps.now(), own.now())?;
                own
            }
            None => steps,
        };
        let mut sum = 0.0;
        let mut number = 0;
        for _ in 0..self.n_turns {
            if interrupt::pressed() {
                return Ok(None);
            }
            let n = self.buckets.micro_batches();
            let batches = (number..number + n).map(|k| self.data.batch(k));
            let batches = batches.collect::<Result<Vec<_>, _>>()?;
            number += n;
            let step = self.buckets.choose(&batches)?;
            let machine = steps.turn(step).map_err(failure)?;
            write(machine, &mut self.buckets, step, batches)?;
            let bytes = machine.evaluate(&self.evaluations[step]).map_err(failure)?;
            sum += self.loss.value(&bytes).unwrap_or(f64::NAN);
        }
        let mean = sum / self.n_turns as f64;
        self.patience.note(mean);
        Ok(Some(Evaluated {
            loss: mean,
            batches: number,
            ms: start.elapsed().as_secs_f64() * 1e3,
        }))
    }

    /// What a run that goes on must know, as numbers by name.
    pub(super) fn numbers(&self) -> BTreeMap<String, u64> {
        let Patience { lowest, since, .. } = self.patience;
        [(LOWEST, lowest.to_bits()), (SINCE, since)]
            .map(|(name, number)| (name.to_string(), number))
            .into()
    }

    /// Goes on with the numbers of a run before.
    pub(super) fn go_on(&mut self, numbers: &BTreeMap<String, u64>) {
        if let (Some(&lowest), Some(&since)) = (numbers.get(LOWEST), numbers.get(SINCE)) {
            let lowest = f64::from_bits(lowest);
            (self.patience.lowest, self.patience.since) = (lowest, since);
        }
    }

    /// Why the run should end, if the loss has not fallen for long enough.
    pub(super) fn exhausted(&self) -> Option<String> {
        self.patience.exhausted()
    }
}

/// What helps where the model in evaluation is not known.
const EXPORT: &str = "; export the model after model.eval() too, and name that: --eval-model \
    EVAL.pt2";

/// Whether the loss of a step is not what evaluation means.
fn is_training_mode(artifact: &Artifact) -> bool {
    let of = |loss: Number| Evaluation::of(artifact, loss.name());
    let why = Number::loss(artifact).and_then(|loss| of(loss).err());
    matches!(why, Some(NotEvaluable::Random(_) | NotEvaluable::Buffer(_)))
}

/// Names of numbers in checkpoints: the bits of the lowest loss, and evaluations since it.
const LOWEST: &str = "evaluation.lowest";
const SINCE: &str = "evaluation.since";

/// How long to wait for a loss that falls.
struct Patience {
    /// Absent: for ever.
    most: Option<u64>,
    lowest: f64,
    /// Evaluations since the lowest loss.
    since: u64,
}

impl Patience {
    fn new(most: Option<u64>) -> Patience {
        Patience {
            most,
            lowest: f64::INFINITY,
            since: 0,
        }
    }

    fn note(&mut self, loss: f64) {
        // A loss that is not a number has not fallen.
        if loss < self.lowest {
            (self.lowest, self.since) = (loss, 0);
        } else {
            self.since += 1;
        }
    }

    fn exhausted(&self) -> Option<String> {
        let most = self.most.filter(|&most| self.since >= most)?;
        Some(format!(
            "the evaluation loss has not fallen below {:.4} for {most} evaluations",
            self.lowest
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::Patience;

    #[test]
    fn a_run_ends_when_the_loss_has_not_fallen() {
        let ended_at = |losses: &[f64]| {
            let mut patience = Patience::new(Some(2));
            losses.iter().position(|&loss| {
                patience.note(loss);
                patience.exhausted().is_some()
            })
        };
        assert_eq!(ended_at(&[3.0, 2.0, 2.5, 1.0, 1.5, 1.0]), Some(5));
        assert_eq!(ended_at(&[3.0, f64::NAN, f64::NAN]), Some(2));
        assert_eq!(ended_at(&[3.0, 3.0, 2.9, 2.9, 2.8]), None);
    }
}
