//! Sequences of tensors, which exist only while the file is read: exporters write a split as a
//! sequence and its elements.

use crate::attributes::Attributes;
use crate::builder::{Builder, Place, SMALL, Slot};
use crate::tensor::Numbers;
use lower::{Ref, Result, ensure, wrap};

/// A value of the file.
#[derive(Clone, Debug)]
pub(crate) enum Item {
    Tensor(Slot),
    Sequence(Vec<Slot>),
    /// An input of a function that its call leaves out.
    Absent,
}

/// The operators of this file.
pub(crate) const OPS: [&str; 8] = [
    "ConcatFromSequence",
    "SequenceAt",
    "SequenceConstruct",
    "SequenceEmpty",
    "SequenceErase",
    "SequenceInsert",
    "SequenceLength",
    "SplitToSequence",
];

/// A node's inputs.
struct Given<'n> {
    items: &'n [Option<Item>],
}

impl<'n> Given<'n> {
    fn item(&self, i: usize) -> Option<&'n Item> {
        self.items.get(i).and_then(Option::as_ref)
    }
    fn sequence(&self) -> Result<&'n [Slot]> {
        match self.item(0) {
            Some(Item::Sequence(list)) => Ok(list),
            _ => Err("input 0 is no sequence".into()),
        }
    }
    fn tensor(&self, i: usize) -> Result<Slot> {
        match self.item(i) {
            Some(Item::Tensor(slot)) => Ok(*slot),
            _ => Err(format!("input {i} is no tensor").into()),
        }
    }
    /// A position, which must be known; the last one if it is not given.
    fn position(&self, b: &Builder<'_>, n: usize) -> Result<usize> {
        let Some(Item::Tensor(slot)) = self.items.last().and_then(Option::as_ref) else {
            return n
                .checked_sub(1)
                .ok_or_else(|| "the sequence is empty".into());
        };
        let at = b.numbers(*slot).and_then(Numbers::scalar);
        let at = at.ok_or("the position must be known when the file is read")?;
        wrap(at.float() as i64, n)
    }
}

/// The result of a node with one of these operators.
pub(crate) fn run<'a>(
    b: &mut Builder<'a>,
    op: &str,
    items: &[Option<Item>],
    attributes: &Attributes<'a>,
    place: &Place<'_>,
) -> Result<Item> {
    let item = result(b, op, items, attributes, place)?;
    if let Item::Sequence(list) = &item {
        // Each sequence is a list of its own.
        let fits = b.take(list.len() as u64);
        ensure(fits, "the sequences have too many elements together")?;
    }
    Ok(item)
}

fn result<'a>(
    b: &mut Builder<'a>,
    op: &str,
    items: &[Option<Item>],
    attributes: &Attributes<'a>,
    place: &Place<'_>,
) -> Result<Item> {
    let given = Given { items };
    let name = place.names.first().copied().unwrap_or("");
    Ok(match op {
        "SequenceEmpty" => Item::Sequence(vec![]),
        "SequenceConstruct" => {
            let tensors = (0..items.len()).map(|i| given.tensor(i));
            Item::Sequence(tensors.collect::<Result<_>>()?)
        }
        "SequenceAt" => {
            let list = given.sequence()?;
            Item::Tensor(list[given.position(b, list.len())?])
        }
        "SequenceErase" => {
            let mut list = given.sequence()?.to_vec();
            let only_sequence = items.len() < 2;
            let at = if only_sequence {
                list.len().saturating_sub(1)
            } else {
                given.position(b, list.len())?
            };
            ensure(at < list.len(), "the sequence is empty")?;
            list.remove(at);
            Item::Sequence(list)
        }
        "SequenceInsert" => {
            let mut list = given.sequence()?.to_vec();
            let at = if items.len() < 3 {
                list.len()
            } else {
                given.position(b, list.len() + 1)?
            };
            list.insert(at, given.tensor(1)?);
            Item::Sequence(list)
        }
        "SequenceLength" => {
            let n = Numbers::int(given.sequence()?.len() as i64).ok_or("is too long")?;
            Item::Tensor(b.known("", n))
        }
        "ConcatFromSequence" => {
            let list = given.sequence()?;
            let (axis, new) = (attributes.int("axis"), attributes.int("new_axis"));
            Item::Tensor(joined(
                b,
                list,
                axis.ok_or("the axis is missing")?,
                new == Some(1),
                place,
            )?)
        }
        "SplitToSequence" => {
            let x = given.tensor(0)?;
            let axis = attributes.int("axis").unwrap_or(0);
            let axis = wrap(axis, b.ty(x).rank())?;
            let sizes = match given.item(1) {
                Some(Item::Tensor(sizes)) => Some(*sizes),
                _ => None,
            };
            let keeps = sizes.is_some() || attributes.int("keepdims").unwrap_or(1) != 0;
            Item::Sequence(parts(b, x, (axis, keeps), sizes, (name, place.module))?)
        }
        _ => return Err("is no operator of sequences".into()),
    })
}

/// Tensors one after another along a dimension, which may be new.
pub(crate) fn joined(
    b: &mut Builder<'_>,
    list: &[Slot],
    axis: i64,
    new: bool,
    place: &Place<'_>,
) -> Result<Slot> {
    let mut parts = vec![];
    for &slot in list {
        parts.push(Ref::Value(b.value(slot).map_err(|e| e.to_string())?));
    }
    let first = *list.first().ok_or("the sequence is empty")?;
    let (rank, dtype) = (b.ty(first).rank(), b.ty(first).dtype());
    let axis = wrap(axis, if new { rank + 1 } else { rank })?;
    let made = b.compose(place, &mut |c| {
        lower::one(if new {
            c.stack(parts.clone(), axis, dtype)?
        } else {
            c.cat(&parts, axis)?
        })
    })?;
    made.into_iter()
        .next()
        .flatten()
        .ok_or_else(|| "has no result".into())
}

/// The parts of a tensor: of these sizes, of one size, or of size 1.
fn parts(
    b: &mut Builder<'_>,
    x: Slot,
    (axis, keeps): (usize, bool),
    sizes: Option<Slot>,
    (name, module): (&str, &str),
) -> Result<Vec<Slot>> {
    let size = b.ty(x).shape()[axis] as i64;
    let given = match sizes {
        None => vec![1],
        Some(sizes) => {
            let known = b.numbers(sizes).and_then(|numbers| numbers.as_ints());
            known
                .ok_or("the sizes must be known when the file is read")?
                .to_vec()
        }
    };
    let is_one_size = sizes.is_none_or(|sizes| b.ty(sizes).rank() == 0);
    let list = match given[..] {
        [part] if is_one_size => {
            ensure(
                part > 0 && size / part <= SMALL as i64,
                "has too many parts",
            )?;
            let n = size / part + i64::from(size % part != 0);
            (0..n).map(|i| part.min(size - i * part)).collect()
        }
        _ => given,
    };
    let names: Vec<String> = (0..list.len()).map(|i| format!("{name}_{i}")).collect();
    let place = Place {
        names: names.iter().map(String::as_str).collect(),
        module,
    };
    let value = Ref::Value(b.value(x).map_err(|e| e.to_string())?);
    let made = b.compose(&place, &mut |c| {
        let mut parts = c.split(value, axis, &list)?;
        for part in parts.iter_mut().filter(|_| !keeps) {
            let mut shape = c.shape_of(*part);
            shape.remove(axis);
            *part = c.reshape(*part, &shape)?;
        }
        lower::all(parts)
    })?;
    made.into_iter()
        .collect::<Option<_>>()
        .ok_or_else(|| "has no result".into())
}
