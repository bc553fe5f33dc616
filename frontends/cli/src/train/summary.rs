//! What a run shows at its end.

use super::rates::{Items, Run};
use crate::size::{bytes, micros, short};
use runtime::Machine;
use serde_json::json;

/// The most memory that the process had, as the system counts it: with programs and libraries.
/// `None` if the system does not say it.
pub(super) fn most_resident() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kib: u64 = line.trim().strip_suffix(" kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

/// The summary at the end.
pub(super) struct Summary<'a> {
    pub(super) machine: &'a Machine,
    pub(super) run: &'a Run,
    pub(super) items: Items,
    pub(super) batches: u64,
}

impl Summary<'_> {
    /// The first step whose loss was not finite, from 1.
    fn first_nonfinite_step(&self) -> Option<u64> {
        let is_broken = |loss: &Option<f64>| loss.is_some_and(|loss| !loss.is_finite());
        let position = self.run.losses.iter().position(is_broken);
        position.map(|i| self.run.before + i as u64 + 1)
    }

    pub(super) fn json(&self) -> serde_json::Value {
        let planned = self.machine.summary();
        let losses = &self.run.losses;
        json!({
            "planned_peak_bytes": planned.planned_peak_bytes,
            "measured_peak_bytes": self.machine.measured_peak_bytes(),
            "keep_peak_bytes": planned.keep_peak_bytes,
            "budget_bytes": planned.budget_bytes,
            "predicted_ms": planned.predicted_ms,
            "measured_ms": self.run.median(),
            "swapped_bytes": planned.swapped_bytes,
            "recomputed_ms": planned.recomputed_ms,
            "steps": self.run.millis.len(),
            "batches": self.batches,
            "first_loss": losses.first().copied().flatten(),
            "last_loss": losses.last().copied().flatten(),
            "first_nonfinite_step": self.first_nonfinite_step(),
            "skipped_steps": self.run.skipped,
            format!("{}_per_second", self.items.word): self.run.median()
                .map(|ms| self.items.count as f64 * 1e3 / ms.max(1e-6)),
        })
    }

    pub(super) fn text(&self) -> String {
        let planned = self.machine.summary();
        let measured = self.machine.measured_peak_bytes();
        let peak = match measured == planned.planned_peak_bytes {
            true => format!("{}, planned = measured", bytes(measured)),
            false => format!(
                "planned {}, measured {}",
                bytes(planned.planned_peak_bytes),
                bytes(measured)
            ),
        };
        let share =
            100.0 * planned.planned_peak_bytes as f64 / planned.keep_peak_bytes.max(1) as f64;
        let predicted = micros(planned.predicted_ms * 1e3);
        let step = match self.run.median() {
            Some(ms) => {
                let rate = self.items.rate(ms);
                format!(
                    "{} measured (median), {predicted} predicted; {rate}",
                    micros(ms * 1e3)
                )
            }
            None => format!("{predicted} predicted"),
        };
        let first = self
            .run
            .losses
            .first()
            .copied()
            .flatten()
            .map_or("-".into(), |loss| format!("{loss:.4}"));
        let steps = self.run.millis.len();
        let skipped = match self.run.skipped {
            0 => String::new(),
            n => format!("; {n} updated nothing: a gradient was not finite"),
        };
        let moved = format!(
            "{} of swaps and states, {} recomputed a step",
            short(planned.swapped_bytes),
            micros(planned.recomputed_ms * 1e3)
        );
        format!(
            "peak          {peak}\nkeep          {}: the peak is {share:.1}% of it\nstep          \
             {step}\nmoved         {moved}\nloss          \
             {first} -> {} in {steps} steps on {} batches{skipped}\n",
            bytes(planned.keep_peak_bytes),
            self.run.last_loss(),
            self.batches
        )
    }
}
