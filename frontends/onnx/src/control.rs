//! Functions, branches and loops: their bodies are read in place of the node. Conditions and
//! numbers of iterations must be known while the file is read.

use crate::Error;
use crate::attributes::{Attributes, Given};
use crate::builder::{Place, Slot};
use crate::import::{Frame, Import, opset, whole};
use crate::proto::{FunctionProto, GraphProto, NodeProto};
use crate::sequence::{Item, joined};
use crate::tensor::Numbers;
use lower::{Range, Ref, wrap};

/// The most iterations of a loop.
const ITERATIONS: i64 = 1 << 12;

type Result<T> = std::result::Result<T, Error>;
type Items = Vec<Option<Item>>;

fn error(message: &str) -> Error {
    Error::new("", message)
}

/// A call of a model's function: the node, its attributes and its inputs.
pub(crate) fn function<'a>(
    import: &mut Import<'a>,
    function: &'a FunctionProto,
    (node, mut given, items): (&'a NodeProto, Given<'a>, Items),
    (frame, module): (&Frame<'a>, String),
) -> Result<()> {
    let mut inner = import.inner(frame, module, None)?;
    if !function.opset_import.is_empty() {
        inner.opset = opset(&function.opset_import, function.name())?;
    }
    for default in &function.attribute_proto {
        given.entry(default.name()).or_insert(default);
    }
    inner.given = given;
    let given = items.into_iter().map(|item| item.unwrap_or(Item::Absent));
    let given = given.chain(std::iter::repeat(Item::Absent));
    for (name, item) in function.input.iter().zip(given) {
        import.bind(name, item, inner.scope)?;
    }
    let outputs: Vec<&str> = function.output.iter().map(String::as_str).collect();
    import.nodes(&function.node, &outputs, &inner)?;
    let mut results = vec![];
    for (name, wanted) in function.output.iter().zip(&node.output) {
        let is_wanted = !wanted.is_empty();
        results.push(if is_wanted {
            Some(import.item(name, inner.scope)?)
        } else {
            None
        });
    }
    import.leave();
    import.bind_all(node, results, frame)
}

/// A body's results with these inputs.
fn body<'a>(
    import: &mut Import<'a>,
    graph: &'a GraphProto,
    inputs: Items,
    frame: &Frame<'a>,
) -> Result<Vec<Item>> {
    if inputs.len() != graph.input.len() {
        return Err(error("the body has another number of inputs"));
    }
    import.charge(graph.initializer.len() as u64 / 16)?;
    let inner = import.inner(frame, frame.module.clone(), Some(frame.scope))?;
    for (info, item) in graph.input.iter().zip(inputs) {
        if let Some(item) = item {
            import.bind(info.name(), item, inner.scope)?;
        }
    }
    for proto in &graph.initializer {
        let slot = import.builder.stored(proto.name(), proto)?;
        import.bind(proto.name(), Item::Tensor(slot), inner.scope)?;
    }
    let outputs: Vec<&str> = graph.output.iter().map(|info| info.name()).collect();
    import.nodes(&graph.node, &outputs, &inner)?;
    let results = outputs
        .iter()
        .map(|name| import.item(name, inner.scope))
        .collect();
    import.leave();
    results
}

fn graph<'a>(attributes: &Attributes<'a>, name: &str) -> Result<&'a GraphProto> {
    attributes
        .graph(name)
        .ok_or_else(|| Error::new("", format!("the attribute {name} is missing")))
}

/// A known boolean or integer.
fn known(import: &Import<'_>, item: Option<&Item>, what: &str) -> Result<i64> {
    let number = match item {
        Some(Item::Tensor(slot)) => import.builder.numbers(*slot).and_then(Numbers::scalar),
        _ => None,
    };
    let why = || {
        Error::new(
            "",
            format!("{what} must be known when the file is read, but depends on data"),
        )
    };
    Ok(number.ok_or_else(why)?.float() as i64)
}

/// `If`: the branch that is taken.
pub(crate) fn branch<'a>(
    import: &mut Import<'a>,
    node: &'a NodeProto,
    attributes: &Attributes<'a>,
    items: Items,
    frame: &Frame<'a>,
) -> Result<()> {
    let condition = known(
        import,
        items.first().and_then(Option::as_ref),
        "the condition",
    )?;
    let name = if condition != 0 {
        "then_branch"
    } else {
        "else_branch"
    };
    let results = body(import, graph(attributes, name)?, vec![], frame)?;
    import.bind_all(node, results.into_iter().map(Some).collect(), frame)
}

/// `Loop`: its iterations one after the other.
pub(crate) fn repeat<'a>(
    import: &mut Import<'a>,
    node: &'a NodeProto,
    attributes: &Attributes<'a>,
    items: Items,
    frame: &Frame<'a>,
) -> Result<()> {
    let graph = graph(attributes, "body")?;
    let most = match items.first() {
        Some(Some(item)) => known(import, Some(item), "the number of iterations")?,
        _ => i64::MAX,
    };
    let mut goes_on = match items.get(1) {
        Some(Some(item)) => known(import, Some(item), "the condition")? != 0,
        _ => true,
    };
    let mut carried: Items = items.into_iter().skip(2).collect();
    let n_carried = carried.len();
    let n_rows = graph.output.len().checked_sub(1 + n_carried);
    let n_rows = n_rows.ok_or_else(|| error("the body has too few outputs"))?;
    let mut rows: Vec<Vec<Slot>> = vec![vec![]; n_rows];
    let mut i = 0;
    while goes_on && i < most {
        if i == ITERATIONS {
            return Err(Error::new(
                "",
                format!("has more than {ITERATIONS} iterations"),
            ));
        }
        let number = |n: Option<Numbers>| n.ok_or_else(|| error("overflows"));
        let (i_now, condition) = (number(Numbers::int(i))?, number(Numbers::boolean(true))?);
        let mut inputs: Items = vec![
            Some(Item::Tensor(import.builder.known("iteration", i_now))),
            Some(Item::Tensor(import.builder.known("condition", condition))),
        ];
        inputs.append(&mut carried);
        let mut results = body(import, graph, inputs, frame)?.into_iter();
        goes_on = known(import, results.next().as_ref(), "the condition")? != 0;
        carried = results.by_ref().take(n_carried).map(Some).collect();
        append(&mut rows, results)?;
        i += 1;
    }
    let stacked = stacked(import, &rows, (node, n_carried), frame, &vec![0; n_rows])?;
    carried.extend(stacked);
    import.bind_all(node, carried, frame)
}

fn append(rows: &mut [Vec<Slot>], results: impl Iterator<Item = Item>) -> Result<()> {
    for (row, result) in rows.iter_mut().zip(results) {
        match result {
            Item::Tensor(slot) => row.push(slot),
            Item::Sequence(_) | Item::Absent => return Err(error("collects sequences")),
        }
    }
    Ok(())
}

/// The results of all iterations along a new dimension.
fn stacked<'a>(
    import: &mut Import<'a>,
    rows: &[Vec<Slot>],
    (node, first): (&'a NodeProto, usize),
    frame: &Frame<'a>,
    axes: &[i64],
) -> Result<Items> {
    let mut made = vec![];
    for (i, row) in rows.iter().enumerate() {
        let name = node.output.get(first + i).map_or("", String::as_str);
        if name.is_empty() {
            made.push(None);
            continue;
        }
        if row.is_empty() {
            return Err(error("collects the results of no iteration"));
        }
        let place = Place {
            names: vec![name],
            module: &frame.module,
        };
        let slot = joined(&mut import.builder, row, axes[i], true, &place).map_err(whole)?;
        made.push(Some(Item::Tensor(slot)));
    }
    Ok(made)
}

/// `Scan`: a loop over the elements of some inputs.
pub(crate) fn scan<'a>(
    import: &mut Import<'a>,
    node: &'a NodeProto,
    attributes: &Attributes<'a>,
    items: Items,
    frame: &Frame<'a>,
) -> Result<()> {
    let graph = graph(attributes, "body")?;
    let n_scanned = attributes
        .int("num_scan_inputs")
        .and_then(|n| usize::try_from(n).ok());
    let n_carried = n_scanned.and_then(|n| items.len().checked_sub(n));
    let n_carried = n_carried.ok_or_else(|| error("has too few inputs"))?;
    let mut carried = items;
    let scanned = carried.split_off(n_carried);
    let n_rows = graph.output.len().checked_sub(n_carried);
    let n_rows = n_rows.ok_or_else(|| error("the body has too few outputs"))?;
    let list = |name: &str, n: usize| match attributes.ints(name) {
        None => Ok(vec![0; n]),
        Some(list) if list.len() == n => Ok(list.to_vec()),
        Some(_) => Err(Error::new(
            "",
            format!("the attribute {name} has another length"),
        )),
    };
    let (in_axes, in_back) = (
        list("scan_input_axes", scanned.len())?,
        list("scan_input_directions", scanned.len())?,
    );
    let (out_axes, out_back) = (
        list("scan_output_axes", n_rows)?,
        list("scan_output_directions", n_rows)?,
    );

    let mut parts: Vec<Vec<Slot>> = vec![];
    for (i, item) in scanned.iter().enumerate() {
        let Some(Item::Tensor(slot)) = item else {
            return Err(error("scans no tensor"));
        };
        let mut list = elements(import, *slot, in_axes[i], frame)?;
        if in_back[i] != 0 {
            list.reverse();
        }
        parts.push(list);
    }
    let n = parts.first().map_or(0, Vec::len);
    let mut rows: Vec<Vec<Slot>> = vec![vec![]; n_rows];
    for i in 0..n {
        let mut inputs = std::mem::take(&mut carried);
        for list in &parts {
            let slot = list
                .get(i)
                .ok_or_else(|| error("scans inputs of different lengths"))?;
            inputs.push(Some(Item::Tensor(*slot)));
        }
        let mut results = body(import, graph, inputs, frame)?.into_iter();
        carried = results.by_ref().take(n_carried).map(Some).collect();
        append(&mut rows, results)?;
    }
    for (row, back) in rows.iter_mut().zip(&out_back) {
        if *back != 0 {
            row.reverse();
        }
    }
    carried.extend(stacked(import, &rows, (node, n_carried), frame, &out_axes)?);
    import.bind_all(node, carried, frame)
}

/// The elements of a tensor along a dimension, which is removed.
fn elements<'a>(
    import: &mut Import<'a>,
    slot: Slot,
    axis: i64,
    frame: &Frame<'a>,
) -> Result<Vec<Slot>> {
    let ty = import.builder.ty(slot).clone();
    let axis = wrap(axis, ty.rank()).map_err(whole)?;
    let size = ty.shape()[axis] as i64;
    if size > ITERATIONS {
        return Err(Error::new(
            "",
            format!("has more than {ITERATIONS} iterations"),
        ));
    }
    let names: Vec<String> = (0..size).map(|i| format!("element_{i}")).collect();
    let names = names.iter().map(String::as_str).collect();
    let place = Place {
        names,
        module: &frame.module,
    };
    let value = Ref::Value(import.builder.value(slot)?);
    let made = import.builder.compose(&place, &mut |c| {
        let mut list = vec![];
        for i in 0..size {
            let mut shape = c.shape_of(value);
            shape.remove(axis);
            let part = c.slice(value, axis, Range::new(i, i + 1))?;
            list.push(c.reshape(part, &shape)?);
        }
        lower::all(list)
    });
    let made = made
        .map_err(whole)?
        .into_iter()
        .collect::<Option<Vec<Slot>>>();
    made.ok_or_else(|| error("has no elements"))
}
