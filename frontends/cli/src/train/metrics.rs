//! Metrics of steps and evaluations, in files: lines of JSON, and events for TensorBoard.

use super::events::Events;
use super::rates::nonfinite_name;
use crate::args::MetricsArgs;
use crate::data::check_writable;
use crate::failure::Failure;
use serde_json::{Value, json};
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::Path;

/// The files.
pub(super) struct Metrics {
    lines: Option<File>,
    events: Option<Events>,
    /// Both files, for errors.
    names: String,
}

/// The measures of a step or an evaluation, by name; what is not known has no value.
pub(super) type Measures<'a> = [(&'a str, Option<f64>)];

impl Metrics {
    /// Opens the files that the user names. An existing file of lines is continued. If the run goes
    /// on after a step, the lines of later steps at its end leave: these steps run again.
    pub(super) fn open(args: &MetricsArgs, after: Option<u64>) -> Result<Metrics, Failure> {
        let failed = |option: &str, path: &Path| {
            let name = format!("{option} {}", path.display());
            move |e: io::Error| Failure::Input(format!("{name}: {e}"))
        };
        let lines = match &args.metrics {
            Some(path) => {
                check_writable("--metrics", path)?;
                if let Some(step) = after {
                    cut(path, step).map_err(failed("--metrics", path))?;
                }
                let file = OpenOptions::new().append(true).create(true).open(path);
                Some(file.map_err(failed("--metrics", path))?)
            }
            None => None,
        };
        let events = match &args.tensorboard {
            Some(path) => Some(Events::create(path).map_err(failed("--tensorboard", path))?),
            None => None,
        };
        let paths = [&args.metrics, &args.tensorboard].into_iter().flatten();
        let names: Vec<String> = paths.map(|path| path.display().to_string()).collect();
        Ok(Metrics {
            lines,
            events,
            names: names.join(", "),
        })
    }

    /// Writes the measures of a step. Each line is in the file when this returns.
    pub(super) fn add(&mut self, step: u64, measures: &Measures<'_>) -> Result<(), Failure> {
        let written = self.write(step, measures);
        written.map_err(|e| Failure::System(format!("{}: {e}", self.names)))
    }

    fn write(&mut self, step: u64, measures: &Measures<'_>) -> io::Result<()> {
        if let Some(file) = &mut self.lines {
            file.write_all(format!("{}\n", object(step, measures)).as_bytes())?;
        }
        if let Some(events) = &mut self.events {
            let known = measures
                .iter()
                .filter_map(|&(name, value)| Some((name, value?)));
            events.add(step, &known.collect::<Vec<_>>())?;
        }
        Ok(())
    }
}

/// Removes the lines at the end of a file that are of steps after this one, and the line that a
/// killed run did not end. Any other line ends the search, so that no other file loses anything.
fn cut(path: &Path, step: u64) -> io::Result<()> {
    let text = match std::fs::read(path) {
        Ok(text) => text,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(e),
    };
    let lines = text.split_inclusive(|&byte| byte == b'\n').rev();
    let is_later = |line: &&[u8]| {
        let was_cut = !line.ends_with(b"\n") && line.starts_with(b"{");
        let line: Option<Value> = serde_json::from_slice(line).ok();
        let of = line.and_then(|line| line["step"].as_u64());
        of.map_or(was_cut, |of| of > step)
    };
    let later: usize = lines.take_while(is_later).map(<[u8]>::len).sum();
    if later == 0 {
        return Ok(());
    }
    let file = OpenOptions::new().write(true).open(path)?;
    file.set_len((text.len() - later) as u64)
}

/// `{"step": 1, "loss": 2.5}`. A measure that is not known is left out. A number that JSON cannot
/// hold is `null`, and `nonfinite` names it.
pub(super) fn object(step: u64, measures: &Measures<'_>) -> Value {
    let mut line = json!({"step": step});
    for &(name, value) in measures {
        let Some(value) = value else { continue };
        line[name] = value.into();
        if let Some(nonfinite) = nonfinite_name(value) {
            line["nonfinite"] = nonfinite.into();
        }
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_steps_that_run_again_leave() {
        let name = format!("lighterage-metrics-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        // An earlier run had more steps; the last line was not ended.
        let before = "{\"step\":9}\n{\"step\":1}\n{\"step\":2}\n";
        std::fs::write(&path, format!("{before}{{\"step\":3}}\n{{\"ste")).unwrap();
        cut(&path, 2).unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), before);
        cut(&path, 2).unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), before);
        // A file of something else.
        let notes = "{\"step\":9}\nto do\n\nunfinished";
        std::fs::write(&path, notes).unwrap();
        cut(&path, 2).unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), notes);
        std::fs::remove_file(&path).unwrap();
        cut(&path, 2).unwrap();
        assert!(!path.exists());
    }

    #[test]
    fn numbers_that_json_lacks_are_named() {
        let line = object(
            3,
            &[("loss", Some(f64::NAN)), ("lr", None), ("ms", Some(0.5))],
        );
        assert_eq!(
            line.to_string(),
            r#"{"loss":null,"ms":0.5,"nonfinite":"nan","step":3}"#
        );
    }
}
