//! Lets a result take the bytes of an operand that dies there.
//!
//! Before: every result has its own buffer. After: result and operand share one buffer if the op's
//! row in the table allows it, the types are equal, and the line is the operand's last access. The
//! meaning does not change.

use ir::schedule::{Buffer, InstrKind, Loc, Schedule};
use ir::{Graph, Id, Table};
use smallvec::SmallVec;

/// Merges buffers.
pub fn run(graph: &Graph, schedule: &mut Schedule) {
    let n_buffers = schedule.buffers.len();
    // The last line that touches each buffer, and whether the buffer must not change.
    let mut last = Table::filled(n_buffers, 0u32);
    let mut first = Table::filled(n_buffers, u32::MAX);
    let mut pinned = Table::filled(n_buffers, false);
    for (_, loc) in schedule.entry.iter().chain(&schedule.exit) {
        pinned[loc.buffer] = true;
    }
    for (instr, data) in schedule.instrs.iter() {
        for loc in data.kind.places() {
            last[loc.buffer] = instr.index() as u32;
            first[loc.buffer] = first[loc.buffer].min(instr.index() as u32);
        }
    }
    // The buffer that replaces each buffer; merged ones point to the operand's.
    let mut home: Table<Buffer, Buffer> = schedule.buffers.ids().collect();
    for instr in schedule.instrs.ids() {
        let InstrKind::Run {
            node, args, outs, ..
        } = &schedule.instrs[instr].kind
        else {
            continue;
        };
        let data = &graph.nodes[*node];
        let now = instr.index() as u32;
        let mut taken: SmallVec<[Buffer; 4]> = SmallVec::new();
        for &(i, j) in data.op.inplace() {
            let (Some(&input), Some(&output)) = (data.inputs.get(i), data.outputs.get(j)) else {
                continue;
            };
            let (from, to) = (args[i], outs[j]);
            let whole = from.offset == 0 && to.offset == 0;
            let dies = last[from.buffer] == now && !pinned[from.buffer];
            let fresh = first[to.buffer] == now && !pinned[to.buffer] && from.buffer != to.buffer;
            if !(whole && dies && fresh) {
                continue;
            }
            let same_type = graph.values[input].ty == graph.values[output].ty;
            let other_reader = (0..args.len()).any(|k| k != i && args[k].buffer == from.buffer);
            let same_size = schedule.buffers[from.buffer].bytes
                == schedule.buffers[to.buffer].bytes
                && schedule.buffers[from.buffer].pool == schedule.buffers[to.buffer].pool;
            let free = !taken.contains(&from.buffer) && !taken.contains(&to.buffer);
            if same_type && !other_reader && same_size && free {
                home[to.buffer] = home[from.buffer];
                taken.extend([from.buffer, to.buffer]);
            }
        }
    }
    rename(schedule, &home);
}

/// Replaces every buffer by its home, and drops unused buffers.
fn rename(schedule: &mut Schedule, home: &Table<Buffer, Buffer>) {
    let mut kept: Table<Buffer, Option<Buffer>> = Table::filled(home.len(), None);
    let mut buffers = Table::new();
    for (data, (buffer, &home)) in std::mem::take(&mut schedule.buffers)
        .into_values()
        .zip(home.iter())
    {
        if home == buffer {
            kept[buffer] = Some(buffers.push(data));
        }
    }
    let to = |loc: &mut Loc| loc.buffer = kept[home[loc.buffer]].expect("a home should be kept");
    for id in schedule.instrs.ids() {
        schedule.instrs[id].kind.places_mut().for_each(to);
    }
    schedule
        .entry
        .iter_mut()
        .chain(&mut schedule.exit)
        .for_each(|(_, loc)| to(loc));
    schedule.buffers = buffers;
}
