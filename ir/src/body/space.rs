//! The rows and columns over which a kernel runs.
//!
//! Before: a body and types that fit it. After: a [`Space`], if one exists: the widest values have `rows × columns` elements,
//! every other value has an element a row, an element a column or a single one, and operands may be broadcast over some of
//! the dimensions that make up the rows. Whatever makes kernels from bodies goes over such a space row by row.

use super::Body;
use crate::op::Op;
use crate::types::{DType, TensorType};

/// Where a kernel runs. All sizes are numbers of elements.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Space {
    /// How many rows; at least one.
    pub rows: u64,
    /// How many columns; at least one.
    pub columns: u64,
    /// How each step's results lie, by number of the value less the operands'.
    pub lies: Vec<Lies>,
    /// How each step reads each of its operands.
    pub reads: Vec<Vec<Read>>,
}

/// How a value lies in a [`Space`]: all false for a single number.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Lies {
    /// Whether it has elements for each row.
    pub rows: bool,
    /// Whether it has elements for each column.
    pub columns: bool,
    /// Whether it is a sum over the rows, which is known after the last one, so that no step may read it.
    pub summed: bool,
}

/// Where the element is that a step reads at a row and a column.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Read {
    /// Sizes of the dimensions that make up the rows, outermost first, and the elements of the operand between neighbours,
    /// 0 where it is broadcast. Empty if every row reads the same.
    pub rows: Vec<(u64, u64)>,
    /// Whether each column has its element; they are next to each other.
    pub columns: bool,
}

/// Into how many parts, at most, the rows are cut for sums over rows: each part has its own sums, which are added up in order.
pub const PARTS: u64 = 32;

impl Space {
    /// How many parts the rows are cut into for sums over rows.
    pub fn parts(&self) -> u64 {
        self.rows.min(PARTS)
    }
    /// Bytes of the parts' sums, for results that are sums over rows; each result's are a multiple of 64 bytes. `dtypes` are
    /// the element types of the steps' results. Sums of half precision are f32.
    pub fn scratch(&self, dtypes: impl Iterator<Item = DType>) -> u64 {
        let sums = self.lies.iter().zip(dtypes).filter(|(lies, _)| lies.summed);
        let bytes = |dtype: DType| if dtype.bytes() == 8 { 8 } else { 4 };
        sums.map(|(_, dtype)| (self.parts() * self.columns * bytes(dtype)).next_multiple_of(64)).sum()
    }
}

const FULL: Lies = Lies { rows: true, columns: true, summed: false };
const ROW: Lies = Lies { rows: true, columns: false, summed: false };
const COLUMN: Lies = Lies { rows: false, columns: true, summed: false };
const SUM: Lies = Lies { rows: false, columns: true, summed: true };

/// What an op does with rows.
enum Shape {
    /// Each element by itself, operands broadcast.
    Elements,
    /// Along the last dimensions, of which there are so many: how the operands lie, and the results.
    Rows(usize, Vec<Lies>, Vec<Lies>),
    /// Sums over the first dimensions; so many are left.
    Columns(usize),
}

impl Body {
    /// The space of a body whose values have these types, by number. An error says which step does not fit.
    pub fn space(&self, types: &[TensorType]) -> Result<Space, String> {
        let n_values = self.operands + self.steps.iter().map(|step| step.outputs).sum::<usize>();
        if types.len() != n_values {
            return Err(format!("the body has {n_values} values, not {}", types.len()));
        }
        if types.iter().any(|ty| ty.numel() == 0) {
            return Err("a value has no elements".into());
        }
        let mut shapes = vec![];
        let mut columns = None;
        for (i, step) in self.steps.iter().enumerate() {
            let shape = shape(&step.op, &step.inputs, types).map_err(|e| format!("step {i}: {e}"))?;
            if let Shape::Rows(trailing, ..) | Shape::Columns(trailing) = shape {
                let sizes = types[step.inputs[0]].shape();
                let here: u64 = sizes[sizes.len() - trailing..].iter().product();
                if *columns.get_or_insert(here) != here {
                    return Err(format!("step {i}: {} has other columns than a step before it", step.op.name()));
                }
            }
            shapes.push(shape);
        }
        let widest = types.iter().rev().max_by_key(|ty| ty.numel()).expect("a body should have values");
        let columns = columns.unwrap_or_else(|| widest.shape().last().copied().unwrap_or(1));
        let mut space = Space { rows: widest.numel() / columns, columns, lies: vec![], reads: vec![] };
        let mut at = self.operands;
        for (i, (step, shape)) in self.steps.iter().zip(&shapes).enumerate() {
            let results = &types[at..at + step.outputs];
            at += step.outputs;
            let (lies, reads) = match shape {
                Shape::Elements => space.elements(self.operands, &step.inputs, types, &results[0]),
                Shape::Rows(trailing, ins, outs) => {
                    space.along(self.operands, &step.inputs, types, (*trailing, ins)).map(|r| (outs.clone(), r))
                }
                Shape::Columns(trailing) => space
                    .along(self.operands, &step.inputs, types, (*trailing, &[FULL]))
                    .map(|reads| (vec![SUM], reads)),
            }
            .map_err(|e| format!("step {i}: {} {e}", step.op.name()))?;
            space.lies.extend(lies);
            space.reads.push(reads);
        }
        for &v in &self.results {
            let lies = space.lies[v - self.operands];
            if !lies.rows && !lies.summed && 1 < space.rows {
                return Err(format!("the result %{v} is the same in every row"));
            }
        }
        Ok(space)
    }
}

/// What a step does with rows, from its op and types.
fn shape(op: &Op, inputs: &[usize], types: &[TensorType]) -> Result<Shape, String> {
    let Some(&first) = inputs.first() else { return Ok(Shape::Elements) };
    let rank = types[first].rank();
    let last = |dim: i64| {
        let is_last = dim as usize + 1 == rank;
        if is_last { Ok(1) } else { Err(format!("{} should be along the last dimension", op.name())) }
    };
    let full = vec![FULL; inputs.len()];
    Ok(match op.name() {
        "sum" | "mean" | "amax" | "amin" | "any" => {
            let dims = op.ints("dims");
            let trailing = dims.iter().rev().zip((0..rank as i64).rev()).all(|(&d, e)| d == e);
            let leading = dims.iter().zip(0..).all(|(&d, e)| d == e);
            match (trailing, leading) {
                (true, false) => Shape::Rows(dims.len(), full, vec![ROW]),
                (false, true) if op.name() == "sum" => Shape::Columns(rank - dims.len()),
                _ => return Err(format!("{} should be over the last dimensions, or sum over the first", op.name())),
            }
        }
        "softmax" | "log_softmax" | "softmax_bwd" | "log_softmax_bwd" => {
            Shape::Rows(last(op.int("dim"))?, full, vec![FULL])
        }
        "layer_norm" => {
            let mut ins = vec![COLUMN; inputs.len()];
            ins[0] = FULL;
            Shape::Rows(op.int("dims") as usize, ins, vec![FULL, ROW, ROW])
        }
        "layer_norm_bwd" => {
            let ins = [FULL, FULL, ROW, ROW, COLUMN];
            let outs = [FULL, SUM, SUM].into_iter().zip(op.ints("mask")).filter(|&(_, &m)| m == 1);
            Shape::Rows(op.int("dims") as usize, ins[..inputs.len()].to_vec(), outs.map(|(lies, _)| lies).collect())
        }
        _ => Shape::Elements,
    })
}

impl Space {
    /// How a value before this step lies, if it is no operand.
    fn known(&self, operands: usize, value: usize) -> Option<Lies> {
        value.checked_sub(operands).map(|i| self.lies[i])
    }
    /// A read of the whole of a value that lies so.
    fn read(&self, lies: Lies) -> Read {
        let stride = if lies.columns { self.columns } else { 1 };
        let rows = if lies.rows && self.rows != 1 { vec![(self.rows, stride)] } else { vec![] };
        Read { rows, columns: lies.columns && self.columns != 1 }
    }
    /// Refuses a step's read that is not how the value lies.
    fn expect(&self, operands: usize, value: usize, read: &Read) -> Result<(), String> {
        match self.known(operands, value) {
            Some(lies) if lies.summed => Err(format!("uses %{value}, which is a sum over all rows")),
            Some(lies) if self.read(lies) != *read => Err(format!("reads %{value} across its rows or columns")),
            _ => Ok(()),
        }
    }
    /// A step along the last `trailing` dimensions, whose operands lie as it wants.
    fn along(
        &self,
        operands: usize,
        inputs: &[usize],
        types: &[TensorType],
        (trailing, lies): (usize, &[Lies]),
    ) -> Result<Vec<Read>, String> {
        let sizes = types[inputs[0]].shape();
        let columns: u64 = sizes[sizes.len() - trailing..].iter().product();
        if types[inputs[0]].numel() != self.rows * self.columns || columns != self.columns {
            return Err("should be over all rows and columns".into());
        }
        let reads: Vec<Read> = lies.iter().map(|&lies| self.read(lies)).collect();
        for (&value, read) in inputs.iter().zip(&reads) {
            self.expect(operands, value, read)?;
        }
        Ok(reads)
    }
    /// A step that computes each element by itself.
    fn elements(
        &self,
        operands: usize,
        inputs: &[usize],
        types: &[TensorType],
        result: &TensorType,
    ) -> Result<(Vec<Lies>, Vec<Read>), String> {
        let (to, numel) = (result.shape(), result.numel());
        if numel == self.rows * self.columns {
            let trailing = suffix(to, self.columns).ok_or("should keep rows apart")?;
            let mut reads = vec![];
            for &value in inputs {
                // A reshape keeps the order of elements.
                let read = match types[value].numel() == numel {
                    true => self.read(FULL),
                    false => self.broadcast(types[value].shape(), to, trailing)?,
                };
                self.expect(operands, value, &read)?;
                reads.push(read);
            }
            return Ok((vec![FULL], reads));
        }
        // A small value: as the operands that have as many elements lie, or by its size.
        let of_inputs = inputs.iter().filter(|&&v| types[v].numel() == numel).find_map(|&v| self.known(operands, v));
        let lies = match of_inputs {
            Some(lies) => lies,
            None if numel == 1 => Lies { rows: false, columns: false, summed: false },
            None if numel == self.rows && (self.rows != self.columns || to.last() == Some(&1)) => ROW,
            None if numel == self.columns => COLUMN,
            None => return Err("has a result that is neither wide, a row, a column nor a number".into()),
        };
        let mut reads = vec![];
        for &value in inputs {
            let read = match types[value].numel() {
                n if n == numel => self.read(lies),
                1 => Read { rows: vec![], columns: false },
                _ => return Err("broadcasts within a row or a column".into()),
            };
            self.expect(operands, value, &read)?;
            reads.push(read);
        }
        Ok((vec![lies], reads))
    }
    /// The read of an operand that is broadcast to a shape whose last `trailing` dimensions are the columns.
    fn broadcast(&self, from: &[u64], to: &[u64], trailing: usize) -> Result<Read, String> {
        let skip = to.len() - from.len();
        let size = |i: usize| if i < skip { 1 } else { from[i - skip] };
        let leading = to.len() - trailing;
        let equal = (leading..to.len()).all(|i| size(i) == to[i]);
        let one = (leading..to.len()).all(|i| size(i) == 1);
        if !equal && !one {
            return Err("broadcasts within its columns".into());
        }
        let columns = equal && self.columns != 1;
        // From the innermost dimension: neighbours that lie like one longer dimension become one.
        let mut stride = if equal { self.columns } else { 1 };
        let mut rows: Vec<(u64, u64)> = vec![];
        for i in (0..leading).rev().filter(|&i| to[i] != 1) {
            let step = if size(i) == 1 { 0 } else { stride };
            stride *= size(i);
            match rows.last_mut() {
                Some((n, inner)) if step == *inner * *n => *n *= to[i],
                _ => rows.push((to[i], step)),
            }
        }
        rows.reverse();
        if rows.iter().all(|&(_, step)| step == 0) {
            rows.clear();
        }
        Ok(Read { rows, columns })
    }
}

/// How many of the last sizes have this product; the fewest.
fn suffix(sizes: &[u64], product: u64) -> Option<usize> {
    let mut here = 1;
    for (n, &size) in sizes.iter().rev().enumerate() {
        if here == product {
            return Some(n);
        }
        here *= size;
    }
    (here == product).then_some(sizes.len())
}

#[cfg(test)]
mod tests {
    use crate::text::parse_graph;

    /// The space of the only node of a graph, in short: rows x columns, then each step's reads; or why there is none.
    fn space(text: &str) -> String {
        let graph = match parse_graph(text) {
            Ok(graph) => graph,
            Err(e) => return e.message[e.message.find("step").unwrap_or(0)..].into(),
        };
        let node = &graph.nodes[graph.order[0]];
        let body = node.op.body().expect("a fused op should have a body");
        let types: Vec<_> = node.inputs.iter().map(|&v| &graph.values[v].ty).collect();
        let types = body.types(&types).expect("types should fit");
        let space = body.space(&types).expect("the shape rule should have asked for the space");
        let read = |read: &super::Read| {
            let rows: Vec<String> = read.rows.iter().map(|(n, step)| format!("{n}:{step}")).collect();
            format!("({}{})", rows.join(" "), if read.columns { " c" } else { "" })
        };
        let steps = space.reads.iter().map(|reads| reads.iter().map(read).collect::<Vec<_>>().join(""));
        format!("{}x{} {}", space.rows, space.columns, steps.collect::<Vec<_>>().join(" "))
    }

    #[test]
    fn operands_are_broadcast() {
        let of = |b: &str| {
            space(&format!(
                "graph g {{\n input %a : f32[2,3,4]\n input %b : f32[{b}]\n fwd - %y = fused %a, %b body={{%2 = add %0, %1 | %2}} : f32[2,3,4]\n output y = %y\n}}"
            ))
        };
        assert_eq!(of("2,3,4"), "6x4 (6:4 c)(6:4 c)");
        assert_eq!(of("4"), "6x4 (6:4 c)( c)");
        assert_eq!(of("3,4"), "6x4 (6:4 c)(2:0 3:4 c)");
        assert_eq!(of("3,1"), "6x4 (6:4 c)(2:0 3:1)");
        assert_eq!(of("2,1,4"), "6x4 (6:4 c)(2:4 3:0 c)");
        assert_eq!(of("2,3,1"), "6x4 (6:4 c)(6:1)");
        assert_eq!(of("1"), "6x4 (6:4 c)()");
    }

    #[test]
    fn rows_and_sums() {
        let head = "graph g {\n input %a : f32[2,3,4]\n input %w : f32[4]\n";
        let of = |types: &str, body: &str| {
            space(&format!("{head} fwd - %y = fused %a, %w body={{{body}}} : {types}\n output y = %y\n}}"))
        };
        let normed = "%2, %3, %4 = layer_norm %0, %1 dims=1 eps=1e-5 | %5 = mul %2, %3";
        assert_eq!(of("f32[2,3,4]", &format!("{normed} | %5")), "6x4 (6:4 c)( c) (6:4 c)(6:1)");
        let mean = "%2 = mean %0 dims=[2] keepdim=true | %3 = add_scalar %2 value=1.0";
        assert_eq!(of("f32[2,3,4]", &format!("{mean} | %4 = sub %0, %3 | %4")), "6x4 (6:4 c) (6:1) (6:4 c)(6:1)");
        let sum = "%2 = mul %0, %1 | %3 = sum %2 dims=[0,1] keepdim=false";
        assert_eq!(of("f32[4]", &format!("{sum} | %3")), "6x4 (6:4 c)( c) (6:4 c)");
        let used = of("f32[4]", &format!("{sum} | %4 = add %3, %1 | %4"));
        assert_eq!(used, "step 2: add uses %3, which is a sum over all rows");
        let other = of("f32[2,4]", "%2 = sum %0 dims=[1] keepdim=false | %2");
        assert_eq!(other, "step 0: sum should be over the last dimensions, or sum over the first");
        let flat = "%2 = reshape %0 shape=[6,4] | %3 = add %2, %1 | %3";
        assert_eq!(of("f32[6,4]", flat), "6x4 (6:4 c) (6:4 c)( c)");
    }

    #[test]
    fn a_row_is_not_read_as_columns() {
        // Row sums [3] of [3,3], added to [3,3] as if they were a row: right as a graph, no kernel of one pass over rows.
        let text = "graph g {\n input %a : f32[3,3]\n fwd - %y = fused %a body={%1 = sum %0 dims=[1] keepdim=false | %2 = add %0, %1 | %2} : f32[3,3]\n output y = %y\n}";
        assert_eq!(space(text), "step 1: add reads %1 across its rows or columns");
    }
}
