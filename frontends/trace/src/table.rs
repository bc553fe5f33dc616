//! Blocks as rows: minimalloc's tables, plain lines, and plans.
//!
//! A table has a header that names its columns, in any order: `id`, `lower`, `upper`, `size`, and
//! optionally `alignment`, `offset` (a fixed address), `gaps` (`3-5 8-9`: the block is not needed
//! then), `hint` (not used), `pool`, and `in` (the id of the block that contains it). minimalloc's
//! other names are accepted: `begin` and `start` for `lower`, `buffer` and `buffer_id` for `id`,
//! `end` for `upper`, with inclusive ends. A gap in which a part of the block is needed
//! (`3-5@0:16`) is ignored: a plan that keeps the whole block is right too.
//!
//! A plan is a table with all offsets.

use crate::{Error, Gate, POOL, Pool, empty, shared};
use placement::trace::Block;
use std::collections::BTreeMap;
use std::fmt::Write;

/// A known column.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Column {
    Id,
    Lower,
    Upper,
    Size,
    Alignment,
    Offset,
    Gaps,
    Hint,
    Pool,
    In,
}

const COLUMNS: [(&str, Column); 15] = [
    ("id", Column::Id),
    ("buffer", Column::Id),
    ("buffer_id", Column::Id),
    ("lower", Column::Lower),
    ("begin", Column::Lower),
    ("start", Column::Lower),
    ("upper", Column::Upper),
    ("end", Column::Upper),
    ("size", Column::Size),
    ("alignment", Column::Alignment),
    ("offset", Column::Offset),
    ("gaps", Column::Gaps),
    ("hint", Column::Hint),
    ("pool", Column::Pool),
    ("in", Column::In),
];

fn column(name: &str) -> Option<Column> {
    let name = name.trim();
    COLUMNS
        .iter()
        .find(|(known, _)| known.eq_ignore_ascii_case(name))
        .map(|&(_, column)| column)
}

/// True if a line may be a header: one of its words is a column.
pub(crate) fn is_header(line: &str) -> bool {
    line.contains(',') && line.split(',').any(|name| column(name).is_some())
}

/// A row of the file.
struct Row<'a> {
    line: usize,
    pool: &'a str,
    /// The id of the block that contains it; empty if there is none.
    within: &'a str,
    block: Block,
}

/// The rows of a table.
fn rows(text: &str) -> Result<Vec<Row<'_>>, Error> {
    let mut lines = text
        .lines()
        .enumerate()
        .map(|(i, line)| (i + 1, line.trim()));
    let mut lines = lines
        .by_ref()
        .filter(|(_, line)| !line.is_empty() && !line.starts_with('#'));
    let Some((at, header)) = lines.next() else {
        return Err(Error::new("", "there is no header"));
    };
    let mut columns: Vec<Column> = vec![];
    // Ends in a column of this name are inclusive, as in minimalloc's older tables.
    let mut last = 0;
    for name in header.split(',') {
        let known = COLUMNS.map(|(name, _)| name).join(", ");
        let column = column(name).ok_or_else(|| {
            Error::line(at, format!("the column {:?} is not known", name.trim()))
                .help(format!("known are {known}"))
        })?;
        if columns.contains(&column) {
            return Err(Error::line(
                at,
                format!("the column {} is there twice", name.trim()),
            ));
        }
        last = if name.trim().eq_ignore_ascii_case("end") {
            1
        } else {
            last
        };
        columns.push(column);
    }
    for needed in [Column::Id, Column::Lower, Column::Upper, Column::Size] {
        if !columns.contains(&needed) {
            let name = format!("{needed:?}").to_lowercase();
            return Err(Error::line(at, format!("there is no column {name}"))
                .help("id, lower, upper and size must be"));
        }
    }
    lines
        .map(|(line, text)| {
            row(line, text, &columns, last).map_err(|message| Error::line(line, message))
        })
        .collect()
}

fn row<'a>(line: usize, text: &'a str, columns: &[Column], last: u64) -> Result<Row<'a>, String> {
    let fields: Vec<&str> = text.split(',').map(str::trim).collect();
    if fields.len() != columns.len() {
        return Err(format!(
            "{} fields, and the header has {}",
            fields.len(),
            columns.len()
        ));
    }
    let mut block = Block::default();
    let (mut pool, mut within_id) = (POOL, "");
    for (column, field) in columns.iter().zip(fields) {
        match column {
            Column::Id if field.is_empty() => return Err("the id is empty".into()),
            Column::Id => block.id = field.into(),
            Column::Lower => block.start = number("lower", field)?,
            Column::Upper => {
                block.end = number("upper", field)?
                    .checked_add(last)
                    .ok_or("the end is beyond all time")?
            }
            Column::Size => block.bytes = number("size", field)?,
            Column::Alignment if field.is_empty() => {}
            Column::Alignment => block.alignment = number("alignment", field)?,
            // minimalloc writes -1 for none.
            Column::Offset if field.is_empty() || field == "-1" => {}
            Column::Offset => block.offset = Some(number("offset", field)?),
            Column::Gaps => block.gaps = gaps(field, last)?,
            Column::Hint => {}
            Column::Pool if field.is_empty() => {}
            Column::Pool => pool = field,
            Column::In => within_id = field,
        }
    }
    within(&block)?;
    Ok(Row {
        line,
        pool,
        within: within_id,
        block,
    })
}

/// A number that is not negative.
fn number(what: &str, field: &str) -> Result<u64, String> {
    field
        .parse::<u64>()
        .map_err(|_| match field.parse::<i128>() {
            Ok(number) if number < 0 => format!("{what} is {field}: it must not be negative"),
            Ok(_) => format!("{what} is {field}: numbers end at {}", u64::MAX),
            Err(_) => format!("{what} is {field:?}: not a whole number"),
        })
}

/// `3-5 8-9`.
fn gaps(field: &str, last: u64) -> Result<Vec<(u64, u64)>, String> {
    let mut gaps = vec![];
    for gap in field.split_ascii_whitespace() {
        let bad = || format!("the gap {gap:?} is not LOWER-UPPER");
        let (times, window) = gap
            .split_once('@')
            .map_or((gap, None), |(times, window)| (times, Some(window)));
        let (start, end) = times.split_once('-').ok_or_else(bad)?;
        let (start, end) = (
            number("the gap's start", start)?,
            number("the gap's end", end)?,
        );
        let end = end.checked_add(last).ok_or_else(bad)?;
        match window {
            None => gaps.push((start, end)),
            Some(window) => {
                let (lo, hi) = window.split_once(':').ok_or_else(bad)?;
                number("the window's start", lo)?;
                number("the window's end", hi)?;
            }
        }
    }
    Ok(gaps)
}

/// Checks that a block's life is not empty, and that its gaps are within its life, ascending and
/// separate.
pub(crate) fn within(block: &Block) -> Result<(), String> {
    let Block { start, end, .. } = *block;
    if end <= start {
        return Err(format!(
            "the block ends at {end}, which is not after its start, {start}"
        ));
    }
    let mut before = start;
    for &(lower, upper) in &block.gaps {
        if upper <= lower {
            return Err(format!("the gap {lower}-{upper} ends before it starts"));
        }
        if lower < before || end < upper {
            return Err(format!(
                "the gap {lower}-{upper} is not within {start}-{end}, after the gaps before it"
            ));
        }
        before = upper;
    }
    Ok(())
}

/// Reads a table.
pub fn read(text: &str) -> Result<Vec<Pool>, Error> {
    let mut pools: Vec<(Pool, Gate)> = vec![];
    let mut names: BTreeMap<&str, usize> = BTreeMap::new();
    let mut shares: Vec<(usize, usize, usize, &str)> = vec![];
    for Row {
        line,
        pool,
        within,
        block,
    } in rows(text)?
    {
        let at = *names.entry(pool).or_insert_with(|| {
            pools.push((
                Pool {
                    name: pool.into(),
                    trace: empty(),
                    ..Pool::default()
                },
                Gate::default(),
            ));
            pools.len() - 1
        });
        let (pool, gate) = &mut pools[at];
        let gated = gate
            .id(&block.id)
            .and_then(|()| gate.size(block.bytes, block.alignment));
        let gated = gated.and_then(|()| {
            block
                .offset
                .map_or(Ok(()), |offset| gate.offset(offset, block.bytes))
        });
        gated.map_err(|message| Error::line(line, message))?;
        if !within.is_empty() {
            shares.push((line, at, pool.trace.blocks.len(), within));
        }
        pool.trace.blocks.push(block);
    }
    // The containing block may come later in the file.
    for (line, at, block, within) in shares {
        let (pool, gate) = &mut pools[at];
        pool.trace.blocks[block].within = Some(
            gate.find(within)
                .map_err(|message| Error::line(line, message))?,
        );
    }
    let pools: Vec<Pool> = pools.into_iter().map(|(pool, _)| pool).collect();
    pools.iter().try_for_each(shared)?;
    Ok(pools)
}

/// Reads lines of start, end and size. Blocks are numbered from 0.
pub fn read_lines(text: &str) -> Result<Vec<Pool>, Error> {
    let mut pool = Pool {
        name: POOL.into(),
        trace: empty(),
        ..Pool::default()
    };
    let mut gate = Gate::default();
    for (line, text) in text
        .lines()
        .enumerate()
        .map(|(i, line)| (i + 1, line.trim()))
    {
        if text.is_empty() || text.starts_with('#') {
            continue;
        }
        let mut block = || {
            let fields: Vec<&str> = text.split_ascii_whitespace().collect();
            let [start, end, bytes] = fields[..] else {
                return Err(format!("{} fields; a line is START END SIZE", fields.len()));
            };
            let block = Block {
                id: pool.trace.blocks.len().to_string(),
                start: number("the start", start)?,
                end: number("the end", end)?,
                bytes: number("the size", bytes)?,
                ..Block::default()
            };
            within(&block)?;
            gate.size(block.bytes, 0)?;
            Ok(block)
        };
        let block = block().map_err(|message| Error::line(line, message))?;
        pool.trace.blocks.push(block);
    }
    Ok(vec![pool])
}

/// Writes a plan: a table with an offset for each block of each pool. `offsets` has a list for each
/// pool, and an offset for each of its blocks.
pub fn write_plan(pools: &[Pool], offsets: &[Vec<u64>]) -> String {
    let blocks = || pools.iter().flat_map(|pool| &pool.trace.blocks);
    let (aligned, gapped) = (
        blocks().any(|block| block.alignment > 1),
        blocks().any(|block| !block.gaps.is_empty()),
    );
    let mut out = String::new();
    out += if pools.len() > 1 {
        "pool,id,lower,upper,size"
    } else {
        "id,lower,upper,size"
    };
    out += if aligned { ",alignment" } else { "" };
    out += if gapped { ",gaps" } else { "" };
    let shared = blocks().any(|block| block.within.is_some());
    out += if shared { ",in" } else { "" };
    out += ",offset\n";
    for (pool, offsets) in pools.iter().zip(offsets) {
        for (block, offset) in pool.trace.blocks.iter().zip(offsets) {
            if pools.len() > 1 {
                out += &pool.name;
                out.push(',');
            }
            // Writing to a String cannot fail.
            let _ = write!(
                out,
                "{},{},{},{}",
                block.id, block.start, block.end, block.bytes
            );
            if aligned {
                let _ = write!(out, ",{}", block.alignment.max(1));
            }
            if gapped {
                let gaps: Vec<String> = block
                    .gaps
                    .iter()
                    .map(|(start, end)| format!("{start}-{end}"))
                    .collect();
                let _ = write!(out, ",{}", gaps.join(" "));
            }
            if shared {
                let other = block
                    .within
                    .map_or("", |other| &pool.trace.blocks[other].id);
                let _ = write!(out, ",{other}");
            }
            let _ = writeln!(out, ",{offset}");
        }
    }
    out
}

/// Reads a plan of these pools: a list of offsets for each. The table's other columns must agree
/// with the trace.
pub fn read_plan(text: &str, pools: &[Pool]) -> Result<Vec<Vec<u64>>, Error> {
    let mut blocks: BTreeMap<(&str, &str), (usize, usize)> = BTreeMap::new();
    for (p, pool) in pools.iter().enumerate() {
        blocks.extend(
            pool.trace
                .blocks
                .iter()
                .enumerate()
                .map(|(b, block)| ((&*pool.name, &*block.id), (p, b))),
        );
    }
    let mut offsets: Vec<Vec<Option<u64>>> = pools
        .iter()
        .map(|pool| vec![None; pool.trace.blocks.len()])
        .collect();
    for Row {
        line, pool, block, ..
    } in rows(text)?
    {
        // A plan of one pool need not name it.
        let pool = if pools.len() == 1 && pool == POOL {
            &*pools[0].name
        } else {
            pool
        };
        let error = |message: String| Error::line(line, message);
        let Some(&(p, b)) = blocks.get(&(pool, &*block.id)) else {
            return Err(error(format!(
                "the trace has no block {} in the pool {pool}",
                block.id
            )));
        };
        let known = &pools[p].trace.blocks[b];
        for (what, here, there) in [
            ("lower", block.start, known.start),
            ("upper", block.end, known.end),
            ("size", block.bytes, known.bytes),
        ] {
            if here != there {
                let id = &block.id;
                return Err(error(format!(
                    "block {id}: {what} is {here} in the plan and {there} in the trace"
                )));
            }
        }
        let offset = block
            .offset
            .ok_or_else(|| error(format!("block {} has no offset", block.id)))?;
        if offsets[p][b].replace(offset).is_some() {
            return Err(error(format!("block {} is placed twice", block.id)));
        }
    }
    pools
        .iter()
        .zip(offsets)
        .map(|(pool, offsets)| all_placed(pool, offsets))
        .collect()
}

/// The offsets of a pool's blocks. An error if an offset is missing.
fn all_placed(pool: &Pool, offsets: Vec<Option<u64>>) -> Result<Vec<u64>, Error> {
    let blocks = pool.trace.blocks.iter().zip(&offsets);
    let mut missing = blocks.filter(|(_, offset)| offset.is_none());
    if let Some((first, _)) = missing.next() {
        let more = match missing.count() {
            0 => String::new(),
            n => format!(", nor {n} others"),
        };
        let (id, name) = (&first.id, &pool.name);
        let message = format!("the plan does not place block {id} of the pool {name}{more}");
        return Err(Error::new("", message));
    }
    Ok(offsets.into_iter().flatten().collect())
}
