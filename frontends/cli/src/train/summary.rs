//! What a run shows at its end.

use super::rates::Run;
use crate::size::{bytes, micros, short};
use artifact::MemorySpace;
use runtime::{Machine, Steps};
use serde_json::json;

/// The most memory that the process had, as the system counts it: with programs and libraries.
/// `None` if the system does not say it.
pub(super) fn most_resident() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kib: u64 = line.trim().strip_suffix(" kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

/// The bytes of a pool, planned and measured.
pub(super) struct Peak {
    planned: u64,
    /// Of all steps.
    measured: u64,
}

impl Peak {
    fn text(&self) -> String {
        let Peak { planned, measured } = *self;
        match measured == planned {
            true => format!("{}, planned = measured", bytes(measured)),
            false => format!("planned {}, measured {}", bytes(planned), bytes(measured)),
        }
    }
}

/// The peaks of the device, the host and the disk.
pub(super) fn peaks(machines: &Steps) -> [Peak; 3] {
    [MemorySpace::Device(0), MemorySpace::Host, MemorySpace::Disk].map(|space| {
        let planned = machines.machines().iter().map(|m| m.planned_in(space));
        Peak {
            planned: planned.max().unwrap_or(0),
            measured: machines.measured_in(space),
        }
    })
}

/// The summary at the end.
pub(super) struct Summary<'a> {
    /// The machine of the only step, or of the largest.
    pub(super) machine: &'a Machine,
    /// Those of the device, the host and the disk.
    pub(super) peaks: [Peak; 3],
    pub(super) run: &'a Run,
    pub(super) word: &'static str,
    pub(super) batches: u64,
    /// The share of what was filled to get the size of a step.
    pub(super) padding: Option<f64>,
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
        let [device, host, disk] = &self.peaks;
        let losses = &self.run.losses;
        json!({
            "planned_peak_bytes": device.planned,
            "measured_peak_bytes": device.measured,
            "planned_host_peak_bytes": host.planned,
            "measured_host_peak_bytes": host.measured,
            "planned_disk_peak_bytes": disk.planned,
            "measured_disk_peak_bytes": disk.measured,
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
            format!("{}_per_second", self.word): self.run.rate(),
            "padding": self.padding,
        })
    }

    pub(super) fn text(&self) -> String {
        let planned = self.machine.summary();
        let [device, host, disk] = &self.peaks;
        let peak = device.text();
        // Without a disk, what leaves the device is all that the host has.
        let behind = match (host.planned, disk.planned) {
            (_, 0) => String::new(),
            (0, _) => format!("disk peak     {}\n", disk.text()),
            (_, _) => format!(
                "host peak     {}\ndisk peak     {}\n",
                host.text(),
                disk.text()
            ),
        };
        let share =
            100.0 * planned.planned_peak_bytes as f64 / planned.keep_peak_bytes.max(1) as f64;
        let predicted = micros(planned.predicted_ms * 1e3);
        let step = match self.run.median() {
            Some(ms) => {
                let rate = self.run.rate().unwrap_or(0.0);
                format!(
                    "{} measured (median), {predicted} predicted; {rate:.0} {}/s",
                    micros(ms * 1e3),
                    self.word
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
        let padding = self.padding.map_or(String::new(), |share| {
            format!(
                "padding       {:.1} % of what steps computed\n",
                100.0 * share
            )
        });
        format!(
            "peak          {peak}\n{behind}keep          {}: the peak is {share:.1}% of it\n\
             step          {step}\nmoved         {moved}\n{padding}loss          \
             {first} -> {} in {steps} steps on {} batches{skipped}\n",
            bytes(planned.keep_peak_bytes),
            self.run.last_loss(),
            self.batches
        )
    }
}
