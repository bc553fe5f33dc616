//! The compiler's log on standard error: `-v`, `-vv` and `LIGHTERAGE_LOG`.
//!
//! This is our own logger because its lines must not disturb the bars on the terminal, which `out`
//! manages.

use crate::out;
use log::{Level, LevelFilter, Log, Metadata, Record};

/// The variable that selects what is logged, instead of `-v`.
pub(crate) const VARIABLE: &str = "LIGHTERAGE_LOG";

/// Our crates' names begin with this. It is left out of log lines and may be left out in the
/// variable.
const PREFIX: &str = "lighterage_";

/// Which modules are logged, and how much of each.
#[derive(Debug, PartialEq)]
struct Logger {
    /// A module, as a prefix of paths, and its most detailed level. The longest prefix counts.
    rules: Vec<(String, LevelFilter)>,
}

/// Starts logging, by the variable if it is set, else by the number of `-v`.
pub(crate) fn start(verbose: u8) -> Result<(), String> {
    let logger = match std::env::var(VARIABLE) {
        Ok(rules) if !rules.is_empty() => Logger::read(&rules)?,
        _ => Logger::verbose(verbose),
    };
    let levels = logger.rules.iter().map(|(_, level)| *level);
    log::set_max_level(levels.max().unwrap_or(LevelFilter::Off));
    // Refused only if a logger exists already, and that one is ours.
    let _ = log::set_logger(Box::leak(Box::new(logger)));
    Ok(())
}

impl Logger {
    fn verbose(times: u8) -> Logger {
        let level = match times {
            0 => LevelFilter::Warn,
            1 => LevelFilter::Debug,
            _ => LevelFilter::Trace,
        };
        Logger {
            rules: vec![("lighterage".to_string(), level)],
        }
    }

    /// Rules such as `debug`, `passes=trace`, or several separated by commas.
    fn read(rules: &str) -> Result<Logger, String> {
        let rules = rules.split(',').map(|rule| {
            let (module, level) = match rule.trim().split_once('=') {
                Some((module, level)) => (module, level),
                None => ("", rule.trim()),
            };
            let level = level.parse().map_err(|_| {
                format!(
                    "{VARIABLE}: `{rule}` should be LEVEL or MODULE=LEVEL, such as passes=debug; \
                     levels are off, error, warn, info, debug, trace"
                )
            })?;
            Ok((module.trim().to_string(), level))
        });
        let rules = rules.collect::<Result<_, String>>()?;
        Ok(Logger { rules })
    }

    fn level(&self, target: &str) -> LevelFilter {
        let within = |module: &str| {
            let rest = target.strip_prefix(module);
            rest.is_some_and(|rest| {
                rest.is_empty() || module.is_empty() || rest.starts_with(['_', ':'])
            })
        };
        let of_target = |module: &str| within(module) || within(&format!("{PREFIX}{module}"));
        let rules = self.rules.iter().filter(|(module, _)| of_target(module));
        let longest = rules.max_by_key(|(module, _)| module.len());
        longest.map_or(LevelFilter::Off, |(_, level)| *level)
    }
}

impl Log for Logger {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.level() <= self.level(metadata.target())
    }

    fn log(&self, record: &Record<'_>) {
        if !self.enabled(record.metadata()) {
            return;
        }
        let target = record.target();
        let module = target.strip_prefix(PREFIX).unwrap_or(target);
        let level = match record.level() {
            Level::Error => "error",
            Level::Warn => "warn",
            Level::Info => "info",
            Level::Debug => "debug",
            Level::Trace => "trace",
        };
        out::note(&format!("{level} {module}: {}", record.args()));
    }

    fn flush(&self) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_prefix_counts() {
        let logger = Logger::read("warn, passes=debug,lighterage_passes::decide=trace").unwrap();
        assert_eq!(
            logger.level("lighterage_passes::pipeline"),
            LevelFilter::Debug
        );
        assert_eq!(
            logger.level("lighterage_passes::decide::greedy"),
            LevelFilter::Trace
        );
        assert_eq!(
            logger.level("lighterage_passes::decided"),
            LevelFilter::Debug
        );
        assert_eq!(logger.level("lighterage_codegen"), LevelFilter::Warn);
        assert_eq!(logger.level("egg::run"), LevelFilter::Warn);
    }

    #[test]
    fn verbose_speaks_of_our_crates_alone() {
        assert_eq!(
            Logger::verbose(1).level("lighterage_passes"),
            LevelFilter::Debug
        );
        assert_eq!(
            Logger::verbose(2).level("lighterage_codegen::kernels"),
            LevelFilter::Trace
        );
        assert_eq!(Logger::verbose(2).level("egg::run"), LevelFilter::Off);
    }

    #[test]
    fn wrong_levels_are_refused() {
        assert!(
            Logger::read("passes=loud")
                .unwrap_err()
                .contains("passes=loud")
        );
        assert!(Logger::read("passes").is_err());
    }
}
