//! Called at the end of each pass: dumps, times, progress.

use crate::args::Compiling;
use crate::failure::Failure;
use crate::out;
use crate::page::PassTime;
use indicatif::ProgressBar;
use ir::Graph;
use passes::pipeline::{self, Report};
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

/// Where dumps without a folder go.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Dumps {
    /// To standard output.
    Stdout,
    /// To standard error, because standard output has another use.
    Stderr,
}

/// The actions at each pass.
pub(crate) struct Observer {
    /// The pass after which to dump, or `all`; `None` dumps nothing.
    after: Option<String>,
    folder: Option<PathBuf>,
    dumps: Dumps,
    /// Passes that have ended, and whether to print a table of them.
    times: Vec<PassTime>,
    print_times: bool,
    spinner: Option<ProgressBar>,
    size: String,
    /// The first dump that could not be written.
    failure: Option<Failure>,
}

impl Observer {
    /// An observer for the options; the graph as imported is dumped at once.
    pub(crate) fn new(
        compiling: &Compiling,
        dumps: Dumps,
        graph: &Graph,
    ) -> Result<Observer, Failure> {
        let folder = compiling.dump_dir.clone();
        if let Some(folder) = &folder {
            fs::create_dir_all(folder)
                .map_err(|e| Failure::Input(format!("--dump-dir {}: {e}", folder.display())))?;
        }
        // A folder without a pass means all passes.
        let after = compiling
            .dump_ir_after
            .clone()
            .or_else(|| folder.as_ref().map(|_| "all".to_string()));
        let size = format!("{}, {} nodes", graph.name, graph.order.len());
        let mut observer = Observer {
            after,
            folder,
            dumps,
            times: vec![],
            print_times: compiling.time_passes,
            spinner: out::spinner(format!("compiling {size}")),
            size,
            failure: None,
        };
        observer.dump("import", 0, true, &|| ir::text::print_graph(graph));
        Ok(observer)
    }

    /// A pass has ended.
    pub(crate) fn see(&mut self, report: &Report<'_>) {
        self.times.push((report.name, report.time, report.changed));
        self.dump(
            report.name,
            report.position + 1,
            report.changed,
            report.text,
        );
        if let Some(spinner) = &self.spinner {
            let next = pipeline::names()
                .get(report.position + 1)
                .copied()
                .unwrap_or("check");
            spinner.set_message(format!("compiling {}: {next}", self.size));
        }
    }

    fn dump(&mut self, name: &str, position: usize, changed: bool, text: &dyn Fn() -> String) {
        if !self
            .after
            .as_deref()
            .is_some_and(|after| after == "all" || after == name)
        {
            return;
        }
        match &self.folder {
            Some(folder) if changed => {
                // Decisions are a list for reading; every other dump parses as a graph or program.
                let ending = if name == "decide" { "txt" } else { "ir" };
                let path = folder.join(format!("{position:02}-{name}.{ending}"));
                if let Err(e) = fs::write(&path, text()) {
                    self.failure
                        .get_or_insert(Failure::System(format!("{}: {e}", path.display())));
                }
            }
            Some(_) => {}
            None => {
                let text = format!("; after {name}\n{}", text());
                match self.dumps {
                    Dumps::Stdout => out::text(&text),
                    Dumps::Stderr => out::note(text.trim_end()),
                }
            }
        }
    }

    /// All passes have ended; returns their times.
    pub(crate) fn finish(self) -> Result<Vec<PassTime>, Failure> {
        if let Some(spinner) = self.spinner {
            spinner.finish_and_clear();
        }
        let times = self.times;
        if self.print_times {
            out::note("pass             ms  changed");
            for (name, time, changed) in &times {
                let millis = time.as_secs_f64() * 1e3;
                out::note(&format!(
                    "{name:<10} {millis:>9.2}  {}",
                    if *changed { "yes" } else { "no" }
                ));
            }
            let total: Duration = times.iter().map(|(_, time, _)| time).sum();
            out::note(&format!("{:<10} {:>9.2}", "all", total.as_secs_f64() * 1e3));
        }
        self.failure.map_or(Ok(times), Err)
    }
}
