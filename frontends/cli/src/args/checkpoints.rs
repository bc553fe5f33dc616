//! The options of `train` about checkpoints, and `checkpoint`.

use clap::{Args, Subcommand};
use std::num::NonZeroU64;
use std::path::PathBuf;
use std::time::Duration;

/// When something is done again.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Every {
    /// After this many steps.
    Steps(u64),
    /// After the first step that ends this long after the last time.
    Time(Duration),
}

/// Checkpoints, and going on from one.
#[derive(Args, Debug)]
#[command(next_help_heading = "Checkpoints")]
pub(crate) struct CheckpointArgs {
    /// Write everything that resuming takes to a folder DIR/step-N: after the last step, and when
    /// Ctrl-C or a signal ends the run [default with --resume: the same folder]
    #[arg(long, value_name = "DIR")]
    pub(crate) checkpoints: Option<PathBuf>,
    /// Write a checkpoint also after every N steps, or every 30s, 10min or 2h
    #[arg(long, value_name = "N|TIME", value_parser = Every::parse)]
    pub(crate) save_every: Option<Every>,
    /// Keep the last K checkpoints only [default: all]
    #[arg(long, value_name = "K")]
    pub(crate) keep_last: Option<NonZeroU64>,
    /// Keep those after each multiple of M steps, too
    #[arg(long, value_name = "M", requires = "keep_last")]
    pub(crate) keep_every: Option<NonZeroU64>,
    /// End the run when N checkpoints in a row could not be written [default: go on, and say so]
    #[arg(long, value_name = "N")]
    pub(crate) save_failures: Option<NonZeroU64>,
    /// Let steps wait while a checkpoint is written. Otherwise it is written while steps go on,
    /// which takes host memory for a copy of the states
    #[arg(long)]
    pub(crate) save_sync: bool,
    /// Go on from the newest whole checkpoint in a folder, or from DIR/step-N. If --checkpoints
    /// names the same folder and it has none yet, the run begins, with --init
    #[arg(long, value_name = "DIR", conflicts_with = "start_step")]
    pub(crate) resume: Option<PathBuf>,
    /// Resume even if options differ from those of the checkpoint
    #[arg(long, requires = "resume")]
    pub(crate) allow_changes: bool,
}

/// `checkpoint`.
#[derive(Args, Debug)]
pub(crate) struct CheckpointCommandArgs {
    /// What to do.
    #[command(subcommand)]
    pub(crate) command: CheckpointCommand,
}

/// What to do with checkpoints.
#[derive(Subcommand, Debug)]
pub(crate) enum CheckpointCommand {
    /// List the checkpoints of a folder: steps, sizes, what is damaged
    #[command(after_help = "Example:\n  lighterage checkpoint list runs/gpt2")]
    List {
        /// The folder
        #[arg(value_name = "DIR")]
        path: PathBuf,
        /// Print one JSON object per checkpoint
        #[arg(long)]
        json: bool,
    },
    /// Compare every tensor with its checksum. The exit code is 2 if one differs
    #[command(after_help = "Example:\n  lighterage checkpoint verify runs/gpt2")]
    Verify {
        /// A folder of checkpoints, or one checkpoint
        #[arg(value_name = "DIR|DIR/step-N")]
        path: PathBuf,
        /// Print one JSON object per checkpoint
        #[arg(long)]
        json: bool,
    },
    /// Write a checkpoint's parameters and buffers as a safetensors file, or as a folder that
    /// Hugging Face's libraries read. `train --init` reads both
    #[command(after_help = "Examples:\n  \
        lighterage checkpoint convert runs/gpt2 -o model.safetensors\n  \
        lighterage checkpoint convert runs/gpt2/step-00000120 -o gpt2-folder")]
    Convert {
        /// A checkpoint, or a folder, of which the newest is taken
        #[arg(value_name = "DIR|DIR/step-N")]
        path: PathBuf,
        /// The file to write, or a new folder
        #[arg(short, long, value_name = "OUT.safetensors|DIR")]
        output: PathBuf,
        /// Write all states, as `train --save` does: moments and random states too
        #[arg(long)]
        states: bool,
        /// Print one JSON object
        #[arg(long)]
        json: bool,
    },
}

impl CheckpointArgs {
    /// The folder to write to.
    pub(crate) fn folder(&self) -> Option<PathBuf> {
        if self.checkpoints.is_some() {
            return self.checkpoints.clone();
        }
        let resumed = self.resume.as_ref()?;
        match resumed.join(checkpoint::MANIFEST).exists() {
            true => resumed.canonicalize().ok()?.parent().map(PathBuf::from),
            false => Some(resumed.clone()),
        }
    }

    /// Whether the run begins if the folder to resume from has no checkpoint.
    pub(crate) fn may_begin(&self) -> bool {
        self.checkpoints == self.resume
    }

    /// The first given option that needs a folder.
    pub(crate) fn needs_folder(&self) -> Option<&'static str> {
        let given = [
            ("--save-every", self.save_every.is_some()),
            ("--keep-last", self.keep_last.is_some()),
            ("--save-failures", self.save_failures.is_some()),
            ("--save-sync", self.save_sync),
        ];
        given
            .into_iter()
            .find_map(|(name, given)| given.then_some(name))
    }
}

impl Every {
    fn parse(text: &str) -> Result<Every, String> {
        let bad = || format!("{text:?}: write a number of steps, 500, or a time, 30s, 10min, 2h");
        let split = text.find(|c: char| !c.is_ascii_digit());
        let (number, unit) = text.split_at(split.unwrap_or(text.len()));
        let number: u64 = number.parse().map_err(|_| bad())?;
        let seconds = match unit {
            "" if number > 0 => return Ok(Every::Steps(number)),
            "s" => 1,
            "min" => 60,
            "h" => 3600,
            _ => return Err(bad()),
        };
        let time = number.checked_mul(seconds).filter(|&time| time > 0);
        Ok(Every::Time(Duration::from_secs(time.ok_or_else(bad)?)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_and_times_are_read() {
        let seconds = |s| Ok(Every::Time(Duration::from_secs(s)));
        assert_eq!(Every::parse("500"), Ok(Every::Steps(500)));
        assert_eq!(Every::parse("30s"), seconds(30));
        assert_eq!(Every::parse("10min"), seconds(600));
        assert_eq!(Every::parse("2h"), seconds(7200));
        for bad in [
            "",
            "0",
            "0s",
            "-1",
            "5 days",
            "1.5h",
            "10m",
            "99999999999999999h",
        ] {
            assert!(Every::parse(bad).is_err(), "{bad}");
        }
    }
}
