//! What a run shows while it goes on.

use super::rates::{Items, Run, nonfinite_name};
use crate::args::TrainArgs;
use crate::out::{self, out};
use crate::size::short;
use indicatif::{ProgressBar, ProgressStyle};
use runtime::Machine;
use serde_json::json;

/// The approximate number of progress lines without a terminal.
const LINES: u64 = 20;

/// The progress display: a bar on a terminal, else lines; objects for programs.
pub(super) struct Progress {
    bar: Option<ProgressBar>,
    json: bool,
    steps: u64,
    items: Items,
    peak: String,
    noted_nan: bool,
}

impl Progress {
    pub(super) fn new(args: &TrainArgs, machine: &Machine, items: Items) -> Progress {
        let style = ProgressStyle::with_template("{bar:30} {pos}/{len}  {msg}  {eta} left")
            .unwrap_or(ProgressStyle::default_bar());
        let bar = out::bar(ProgressBar::new(args.steps).with_style(style));
        Progress {
            bar,
            json: args.json,
            steps: args.steps,
            items,
            peak: short(machine.device_pool_bytes()),
            noted_nan: false,
        }
    }

    /// Shows a step, with its learning rate and the norm over its gradients where it has them.
    pub(super) fn step(&mut self, run: &Run, lr: Option<f64>, grad_norm: Option<f64>) {
        let (step, millis) = (run.millis.len() as u64, run.millis[run.millis.len() - 1]);
        let loss = run.losses.last().copied().flatten();
        let message = || {
            // The first step's time ends at its loss, so the time of a whole step is not known yet.
            let rate = run
                .recent()
                .map_or(String::new(), |ms| self.items.rate(ms) + "  ");
            let norm = grad_norm.map_or(String::new(), |norm| format!("norm {norm:.3}  "));
            let loss = run.last_loss();
            format!("loss {loss}  {norm}{rate}peak {}", self.peak)
        };
        if self.json {
            let mut line = json!({"step": step, "loss": loss, "ms": millis});
            for (name, value) in [("lr", lr), ("grad_norm", grad_norm)] {
                if let Some(value) = value {
                    line[name] = value.into();
                }
            }
            if let Some(name) = loss.and_then(nonfinite_name) {
                line["nonfinite"] = name.into();
            }
            out!("{line}");
        } else if self.bar.is_none()
            && (step == 1 || step == self.steps || step.is_multiple_of(self.steps.div_ceil(LINES)))
        {
            out!("step {step:>5}/{}  {}", self.steps, message());
        }
        if let Some(bar) = &self.bar {
            bar.set_message(message());
            bar.set_position(step);
        }
        if loss.is_some_and(|loss| !loss.is_finite())
            && !std::mem::replace(&mut self.noted_nan, true)
        {
            out::note(&format!(
                "warning: the loss of step {step} is {}",
                run.last_loss()
            ));
        }
    }

    pub(super) fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
