//! Standard output. A reader that closes the pipe (`| head`) is not an error: later output is
//! dropped. Nothing else in the command writes to standard output.

use std::borrow::Cow;
use std::io::{IsTerminal, Write, stderr, stdout};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

static CLOSED: AtomicBool = AtomicBool::new(false);
static FAILED: AtomicBool = AtomicBool::new(false);
/// Bars on the terminal. They are cleared before a line is written.
static BARS: Mutex<Option<indicatif::MultiProgress>> = Mutex::new(None);

/// Prepares the terminal.
pub(crate) fn start() {
    if stderr().is_terminal() {
        *BARS.lock().unwrap_or_else(PoisonError::into_inner) =
            Some(indicatif::MultiProgress::new());
    }
}

/// Text without control characters: names of files, tensors and lines must not move a terminal's
/// cursor or set its title.
pub(crate) fn printable(text: &str) -> Cow<'_, str> {
    let is_harmful = |c: char| c.is_control() && !matches!(c, '\n' | '\t');
    if !text.contains(is_harmful) {
        return Cow::Borrowed(text);
    }
    let mut shown = String::with_capacity(text.len());
    for c in text.chars() {
        if is_harmful(c) {
            shown.extend(c.escape_default());
        } else {
            shown.push(c);
        }
    }
    Cow::Owned(shown)
}

/// Adds a bar to the terminal; none if standard error is not one.
pub(crate) fn bar(bar: indicatif::ProgressBar) -> Option<indicatif::ProgressBar> {
    let bars = BARS.lock().unwrap_or_else(PoisonError::into_inner);
    bars.as_ref().map(|bars| bars.add(bar))
}

/// A line with a spinner, for long work.
pub(crate) fn spinner(message: String) -> Option<indicatif::ProgressBar> {
    let style = indicatif::ProgressStyle::with_template("{spinner} {wide_msg} {elapsed}").ok()?;
    let spinner = bar(indicatif::ProgressBar::new_spinner()
        .with_style(style)
        .with_message(printable(&message).into_owned()))?;
    spinner.enable_steady_tick(std::time::Duration::from_millis(120));
    Some(spinner)
}

/// True if the reader of standard output has closed it.
pub(crate) fn closed() -> bool {
    CLOSED.load(Ordering::Relaxed)
}

/// True if standard output could not be written for a reason other than a closed reader.
pub(crate) fn failed() -> bool {
    FAILED.load(Ordering::Relaxed)
}

/// Writes to standard output.
pub(crate) fn text(text: &str) {
    if closed() {
        return;
    }
    let text = printable(text);
    let write = || {
        let mut stdout = stdout().lock();
        stdout
            .write_all(text.as_bytes())
            .and_then(|()| stdout.flush())
    };
    let bars = BARS.lock().unwrap_or_else(PoisonError::into_inner);
    let written = match &*bars {
        Some(bars) => bars.suspend(write),
        None => write(),
    };
    if let Err(error) = written {
        CLOSED.store(true, Ordering::Relaxed);
        if error.kind() != std::io::ErrorKind::BrokenPipe {
            FAILED.store(true, Ordering::Relaxed);
            // The lock is held: `note` would wait for itself.
            let _ = writeln!(stderr(), "error: standard output: {error}");
        }
    }
}

/// Writes a line to standard output.
pub(crate) fn line(line: &str) {
    text(&format!("{line}\n"));
}

/// Writes a line to standard error, and ignores a failure.
pub(crate) fn note(line: &str) {
    let line = printable(line);
    let write = || {
        let _ = writeln!(stderr(), "{line}");
    };
    // A panic may happen while this thread has the lock: then the bars stay unchanged.
    match BARS.try_lock() {
        Ok(bars) => match &*bars {
            Some(bars) => bars.suspend(write),
            None => write(),
        },
        Err(_) => write(),
    }
}

/// Writes a formatted line to standard output.
macro_rules! out {
    ($($part:tt)*) => { $crate::out::line(&format!($($part)*)) };
}
pub(crate) use out;

#[cfg(test)]
mod tests {
    use super::printable;

    #[test]
    fn control_characters_are_shown_and_do_nothing() {
        assert_eq!(printable("two\n\tlines é"), "two\n\tlines é");
        assert_eq!(
            printable("\u{1b}]0;owned\u{7}\r\u{9b}2J"),
            "\\u{1b}]0;owned\\u{7}\\r\\u{9b}2J"
        );
    }
}
