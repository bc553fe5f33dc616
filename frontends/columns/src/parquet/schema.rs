//! The columns that a Parquet file has, and which of them are integers or lists of integers.

use super::thrift::Value;
use crate::Named;

/// Groups in groups.
const MOST_DEPTH: u32 = 32;

/// A column: a top-level field.
pub(super) struct Column {
    pub(super) name: String,
    text: String,
    /// Its leaf, if it is a column of integers or of lists of integers.
    pub(super) leaf: Option<Leaf>,
}

impl Column {
    pub(super) fn named(&self) -> Named {
        Named {
            name: self.name.clone(),
            text: self.text.clone(),
            fits: self.leaf.is_some(),
        }
    }
}

/// A leaf of the schema, which has values. Levels tell where values of lists, and nulls, are.
#[derive(Clone)]
pub(super) struct Leaf {
    /// Its number among all leaves, which is that in row groups.
    pub(super) number: usize,
    /// Bytes of a value: 4 or 8; 0 if it is not an integer.
    pub(super) width: usize,
    pub(super) unsigned: bool,
    /// The definition level of a value. Lower ones are nulls, and lists without elements.
    pub(super) defined: u32,
    /// For a list, the definition level from which on there is an element.
    pub(super) element: Option<u32>,
    text: &'static str,
}

/// The fields of an element of the schema.
const TYPE: i16 = 1;
const REPETITION: i16 = 3;
const NAME: i16 = 4;
const CHILDREN: i16 = 5;
const CONVERTED: i16 = 6;
const LOGICAL: i16 = 10;

/// All columns; `None` if the schema is malformed.
pub(super) fn columns(metadata: &Value<'_>) -> Option<Vec<Column>> {
    let elements = metadata.list(2)?;
    let n = elements.first()?.size(CHILDREN)?;
    let mut walk = Walk {
        elements,
        at: 1,
        leaves: 0,
    };
    let mut columns = vec![];
    for _ in 0..n {
        let top = walk.elements.get(walk.at)?;
        let name = String::from_utf8_lossy(top.bytes(NAME)?).into_owned();
        let is_alone = top.size(CHILDREN).unwrap_or(0) == 0;
        let is_list = is_list(top);
        let mut found = vec![];
        walk.field(&Levels::default(), &mut found)?;
        columns.push(column(name, is_alone, is_list, found));
    }
    Some(columns)
}

/// A column, from its leaves.
fn column(name: String, is_alone: bool, is_list: bool, found: Vec<(Leaf, u32)>) -> Column {
    let (text, leaf) = match &found[..] {
        [(leaf, repeated)] => {
            let text = match *repeated {
                0 if is_alone => leaf.text.to_string(),
                1 if is_alone || is_list => format!("lists of {}", leaf.text),
                0 => format!("a structure with {}", leaf.text),
                _ => format!("nested lists of {}", leaf.text),
            };
            let fits = match *repeated {
                0 => is_alone,
                1 => is_alone || is_list,
                _ => false,
            };
            (text, (fits && leaf.width > 0).then(|| leaf.clone()))
        }
        leaves => (format!("a structure of {}", leaves.len()), None),
    };
    Column { name, text, leaf }
}

fn is_list(element: &Value<'_>) -> bool {
    let logical = element.field(LOGICAL);
    element.int(CONVERTED) == Some(3) || logical.is_some_and(|logical| logical.field(3).is_some())
}

/// What is above a field.
#[derive(Clone, Default)]
struct Levels {
    defined: u32,
    repeated: u32,
    element: Option<u32>,
    depth: u32,
}

struct Walk<'a> {
    elements: &'a [Value<'a>],
    at: usize,
    leaves: usize,
}

impl Walk<'_> {
    /// Reads a field and those in it; adds its leaves, each with the number of lists around it.
    fn field(&mut self, above: &Levels, found: &mut Vec<(Leaf, u32)>) -> Option<()> {
        let element = self.elements.get(self.at)?;
        self.at += 1;
        let mut levels = above.clone();
        levels.depth += 1;
        match element.int(REPETITION)? {
            0 => {}
            1 => levels.defined += 1,
            2 => {
                levels.defined += 1;
                levels.repeated += 1;
                levels.element = Some(levels.defined);
            }
            _ => return None,
        }
        let children = element.size(CHILDREN).unwrap_or(0);
        if children > 0 {
            if levels.depth > MOST_DEPTH {
                return None;
            }
            for _ in 0..children {
                self.field(&levels, found)?;
            }
            return Some(());
        }
        // A group without fields has no values.
        let Some(kind) = element.int(TYPE) else {
            return Some(());
        };
        let (width, unsigned, text) = integer(element, kind);
        let leaf = Leaf {
            number: self.leaves,
            width,
            unsigned,
            defined: levels.defined,
            element: levels.element,
            text,
        };
        self.leaves += 1;
        found.push((leaf, levels.repeated));
        Some(())
    }
}

/// The bytes of an integer, whether it has no sign, and the name of its type; no bytes for what is
/// not an integer.
fn integer(element: &Value<'_>, kind: i64) -> (usize, bool, &'static str) {
    let other = |text| (0, false, text);
    let width = match kind {
        0 => return other("booleans"),
        1 => 4,
        2 => 8,
        3 => return other("times"),
        4 | 5 => return other("floating-point numbers"),
        _ => return other("bytes"),
    };
    // Dates, times and decimals are integers, too, but no tokens.
    let unsigned = match (element.field(LOGICAL), element.int(CONVERTED)) {
        (Some(logical), _) => match logical.field(10) {
            Some(integer) => integer.bool(2) == Some(false),
            None => return other("dates, times or decimals"),
        },
        (None, Some(11..=14)) => true,
        (None, Some(15..=18) | None) => false,
        (None, Some(_)) => return other("dates, times or decimals"),
    };
    let text = match (width, unsigned) {
        (4, false) => "int32",
        (4, true) => "uint32",
        (_, false) => "int64",
        (_, true) => "uint64",
    };
    (width, unsigned, text)
}
