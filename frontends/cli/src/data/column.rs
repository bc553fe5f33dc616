//! The tokens in a column of a Parquet or an Arrow file. They are written once, when the file is
//! opened, to a file without a name, as integers of one size. So they can be read at any position,
//! as those of other files, and memory does not depend on their number.

use super::files::Input;
use super::span::{Integer, Part, Span, none};
use crate::failure::Failure;
use crate::out;
use columns::Error;
use indicatif::{ProgressBar, ProgressStyle};
use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read, Seek, SeekFrom, Write};
use std::path::PathBuf;

/// Bytes that are written at a time.
const PIECE: usize = 1 << 18;
/// Bytes of a token: as small as all tokens permit.
const WIDTHS: [usize; 3] = [2, 4, 8];

/// Writes the tokens of a column; with the ends of its lists, if that is asked for.
pub(super) fn part(
    input: &Input,
    column: Option<&str>,
    with_documents: bool,
) -> Result<Part, Failure> {
    let path = input.path().display();
    let folder = std::env::temp_dir();
    let full = |e: io::Error| {
        Failure::System(format!(
            "{path}: its tokens are written to a file in {}, which failed: {e}; TMPDIR names \
             another folder",
            folder.display()
        ))
    };
    let mut spool = Spool::new(folder.clone(), with_documents).map_err(full)?;
    let watched = Watched::new(input);
    columns::read(&watched, column, &mut spool).map_err(|error| match error {
        Error::File(why) => Failure::Input(format!("{path}: {why}")),
        Error::Read(e) => Failure::System(format!("{path}: {e}")),
        Error::Sink(e) => full(e),
    })?;
    drop(watched);

    let (integer, count) = (spool.token_type(), spool.count);
    if count == 0 {
        return Err(none(input.path()));
    }
    let file = spool.file.into_inner().map_err(|e| full(e.into_error()))?;
    let span = Span {
        start: 0,
        count,
        integer,
    };
    let bytes = count * integer.bytes as u64;
    let input = Input::in_place_of(input.path(), file, bytes);
    let documents = spool.documents.unwrap_or_default();
    Ok(Part::of(input, span, documents))
}

/// The file, and a bar that shows how far it was read.
struct Watched<'a> {
    input: &'a Input,
    bar: Option<ProgressBar>,
}

impl Watched<'_> {
    fn new(input: &Input) -> Watched<'_> {
        let style = "reading {msg}  {bar:30} {percent}%  {elapsed}";
        let style = ProgressStyle::with_template(style).unwrap_or(ProgressStyle::default_bar());
        let name = input.path().file_name().unwrap_or_default();
        let name = out::printable(&name.to_string_lossy()).into_owned();
        let bar = ProgressBar::new(input.length()).with_style(style);
        Watched {
            input,
            bar: out::bar(bar.with_message(name)),
        }
    }
}

impl columns::Source for Watched<'_> {
    fn length(&self) -> u64 {
        self.input.length()
    }

    fn read(&self, start: u64, length: usize) -> io::Result<Vec<u8>> {
        if let Some(bar) = &self.bar {
            bar.set_position(start);
        }
        self.input.read(start, length)
    }
}

impl Drop for Watched<'_> {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// Tokens in a file without a name.
struct Spool {
    folder: PathBuf,
    file: BufWriter<File>,
    /// Which of [`WIDTHS`] they have.
    width: usize,
    count: u64,
    /// The numbers of tokens at the ends of lists.
    documents: Option<Vec<u64>>,
}

impl Spool {
    fn new(folder: PathBuf, with_documents: bool) -> io::Result<Spool> {
        Ok(Spool {
            file: nameless(&folder)?,
            folder,
            width: 0,
            count: 0,
            documents: with_documents.then(Vec::new),
        })
    }

    fn token_type(&self) -> Integer {
        let bytes = WIDTHS[self.width];
        // Only the widest has a sign, for tokens that are not ids.
        Integer::new(bytes, bytes == 8)
    }

    /// Writes all tokens so far again, with more bytes each.
    fn widen(&mut self) -> io::Result<()> {
        self.file.flush()?;
        let mut from = BufReader::with_capacity(PIECE, self.file.get_ref());
        from.seek(SeekFrom::Start(0))?;
        let mut wider = nameless(&self.folder)?;
        let (bytes, more) = (WIDTHS[self.width], WIDTHS[self.width + 1]);
        for _ in 0..self.count {
            let mut token = [0; 8];
            from.read_exact(&mut token[..bytes])?;
            wider.write_all(&token[..more])?;
        }
        (self.file, self.width) = (wider, self.width + 1);
        Ok(())
    }
}

impl columns::Sink for Spool {
    fn integer(&mut self, token: i64) -> io::Result<()> {
        let fits = |width: usize| width == 8 || 0 <= token && token >> (8 * width) == 0;
        while !fits(WIDTHS[self.width]) {
            self.widen()?;
        }
        self.count += 1;
        let bytes = WIDTHS[self.width];
        self.file.write_all(&token.to_le_bytes()[..bytes])
    }

    fn list_ends(&mut self) -> io::Result<()> {
        let Some(ends) = &mut self.documents else {
            return Ok(());
        };
        // A list without tokens is no document.
        if self.count > ends.last().copied().unwrap_or(0) {
            ends.push(self.count);
        }
        Ok(())
    }
}

fn nameless(folder: &std::path::Path) -> io::Result<BufWriter<File>> {
    let file = runtime::nameless(folder)?;
    Ok(BufWriter::with_capacity(PIECE, file))
}

#[cfg(test)]
mod tests {
    use super::*;
    use columns::Sink;

    #[test]
    fn tokens_get_as_many_bytes_as_the_largest_needs() {
        let tokens = [1, 65_535, 65_536, 7, (1 << 32) - 1, -1, i64::MAX];
        for (n, bytes) in [(2, 2), (5, 4), (6, 8), (7, 8)] {
            let mut spool = Spool::new(std::env::temp_dir(), true).unwrap();
            for &token in &tokens[..n] {
                spool.integer(token).unwrap();
                spool.list_ends().unwrap();
                spool.list_ends().unwrap();
            }
            let ends: Vec<u64> = (1..=n as u64).collect();
            assert_eq!(spool.documents.as_ref(), Some(&ends));
            let integer = spool.token_type();
            assert_eq!(integer.bytes, bytes);
            let mut file = spool.file.into_inner().unwrap();
            let mut written = vec![];
            file.seek(SeekFrom::Start(0)).unwrap();
            file.read_to_end(&mut written).unwrap();
            let read = written
                .chunks_exact(bytes)
                .map(|token| integer.value(token));
            assert!(read.eq(tokens[..n].iter().map(|&token| Some(token))));
        }
    }
}
