//! What a run shows while it goes on.

use super::rates::{Items, Numbers, Run, nonfinite_name};
use crate::args::TrainArgs;
use crate::out::{self, out};
use crate::size::short;
use indicatif::{ProgressBar, ProgressStyle};
use runtime::Machine;
use serde_json::json;

/// The approximate number of progress lines without a terminal.
const LINES: u64 = 20;
/// A run that ends sooner than this has no time left worth telling, seconds.
const LEFT_SECONDS: f64 = 10.0;

/// The progress display: a bar on a terminal, else lines; objects for programs.
pub(super) struct Progress {
    bar: Option<ProgressBar>,
    json: bool,
    /// The first step, and the last one.
    first: u64,
    last: u64,
    pub(super) items: Items,
    peak: String,
    noted_nan: bool,
}

impl Progress {
    /// The display of a run of `steps` that begins after some.
    pub(super) fn new(
        args: &TrainArgs,
        machine: &Machine,
        items: Items,
        (before, steps): (u64, u64),
    ) -> Progress {
        let style = ProgressStyle::with_template("{bar:30} {pos}/{len}  {msg}  {eta} left")
            .unwrap_or(ProgressStyle::default_bar());
        let bar = out::bar(ProgressBar::new(steps).with_style(style));
        Progress {
            bar,
            json: args.json,
            first: before + 1,
            last: before.saturating_add(steps),
            items,
            peak: short(machine.device_pool_bytes()),
            noted_nan: false,
        }
    }

    /// Shows a step.
    pub(super) fn step(&mut self, run: &Run, numbers: Numbers) {
        let (step, done) = (run.step(), run.millis.len() as u64);
        let millis = run.millis.last().copied().unwrap_or(0.0);
        let loss = run.losses.last().copied().flatten();
        let message = || {
            // The first step's time ends at its loss, so the time of a whole step is not known yet.
            let rate = run
                .recent()
                .map_or(String::new(), |ms| self.items.rate(ms) + "  ");
            let norm = numbers.grad_norm;
            let norm = norm.map_or(String::new(), |norm| format!("norm {norm:.3}  "));
            let scale = numbers.loss_scale;
            let scale = scale.map_or(String::new(), |scale| {
                let n = run.skipped;
                let skipped = if n > 0 {
                    format!(", {n} skipped")
                } else {
                    String::new()
                };
                format!("scale {scale}{skipped}  ")
            });
            let loss = run.last_loss();
            format!("loss {loss}  {norm}{scale}{rate}peak {}", self.peak)
        };
        if self.json {
            let mut line = json!({"step": step, "loss": loss, "ms": millis});
            for (name, value) in numbers.named() {
                line[name] = value.into();
            }
            if let Some(name) = loss.and_then(nonfinite_name) {
                line["nonfinite"] = name.into();
            }
            out!("{line}");
        } else if self.bar.is_none() && self.is_shown(step) {
            let seconds = |ms: f64| (self.last - step) as f64 * ms / 1e3;
            let left = run
                .recent()
                .map(seconds)
                .filter(|&left| left >= LEFT_SECONDS);
            let left = left.map_or(String::new(), |left| format!("  {} left", duration(left)));
            out!("step {step:>5}/{}  {}{left}", self.last, message());
        }
        if let Some(bar) = &self.bar {
            bar.set_message(message());
            bar.set_position(done);
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

    /// Whether a line is printed for a step.
    fn is_shown(&self, step: u64) -> bool {
        let steps = self.last.saturating_sub(self.first) + 1;
        step == self.first || step == self.last || step.is_multiple_of(steps.div_ceil(LINES))
    }

    pub(super) fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// A time that is left: `3s`, `5m 20s`, `2h 10m`.
fn duration(seconds: f64) -> String {
    let seconds = seconds.round() as u64;
    let (hours, minutes) = (seconds / 3600, seconds / 60 % 60);
    match (hours, minutes) {
        (0, 0) => format!("{seconds}s"),
        (0, _) => format!("{minutes}m {}s", seconds % 60),
        _ => format!("{hours}h {minutes}m"),
    }
}

#[cfg(test)]
mod tests {
    use super::duration;

    #[test]
    fn times_are_told_in_two_units() {
        let all = [0.4, 59.4, 320.0, 7_800.0, 360_000.0].map(duration);
        assert_eq!(all, ["0s", "59s", "5m 20s", "2h 10m", "100h 0m"]);
    }
}
