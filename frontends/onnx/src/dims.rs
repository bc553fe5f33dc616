//! The types of a graph's inputs and outputs: symbolic sizes become numbers.

use crate::Error;
use crate::proto::tensor_shape_proto::dimension::Value;
use crate::proto::{ValueInfoProto, type_proto};
use crate::tensor;
use ir::TensorType;
use std::collections::{BTreeMap, BTreeSet};

/// A size in a file: a number, or a name. A size without either is named after its input and place.
enum Size {
    Number(i64),
    Name(String),
}

/// The element type and the sizes of a tensor; `None` if its shape is not given.
fn sizes(info: &ValueInfoProto) -> Result<(i32, Option<Vec<Size>>), Error> {
    let no_tensor = |what: &str| Error::new(info.name(), format!("is {what}, not a tensor"));
    let tensor = match info.r#type.as_ref().and_then(|ty| ty.value.as_ref()) {
        Some(type_proto::Value::TensorType(tensor)) => tensor,
        Some(type_proto::Value::SequenceType(_)) => return Err(no_tensor("a sequence")),
        Some(type_proto::Value::OptionalType(_)) => return Err(no_tensor("optional")),
        None => return Err(Error::new(info.name(), "has no type")),
    };
    let size = |(i, value): (usize, &Option<Value>)| match value {
        Some(Value::DimValue(n)) => Size::Number(*n),
        Some(Value::DimParam(name)) if !name.is_empty() => Size::Name(name.clone()),
        _ => Size::Name(format!("{}.{i}", info.name())),
    };
    let shape = tensor.shape.as_ref();
    let shape = shape.map(|s| {
        s.dim
            .iter()
            .map(|dim| &dim.value)
            .enumerate()
            .map(size)
            .collect()
    });
    Ok((tensor.elem_type(), shape))
}

fn made(info: &ValueInfoProto, elements: i32, shape: Vec<u64>) -> Result<TensorType, Error> {
    let dtype = tensor::dtype(elements.into()).map_err(|e| Error::new(info.name(), e))?;
    TensorType::new(dtype, shape).map_err(|e| Error::new(info.name(), e.to_string()))
}

/// The types of the inputs. An error names all symbolic sizes without a value, and values that no
/// size has.
pub(crate) fn inputs(
    list: &[&ValueInfoProto],
    dims: &BTreeMap<String, u64>,
) -> Result<Vec<TensorType>, Error> {
    let mut used = BTreeSet::new();
    let mut missing = BTreeSet::new();
    let mut types = vec![];
    for info in list {
        let (elements, sizes) = sizes(info)?;
        let sizes = sizes.ok_or_else(|| {
            Error::new(info.name(), "has no shape").help("export the model with shapes")
        })?;
        let mut shape = vec![];
        for size in sizes {
            match size {
                Size::Number(n) => {
                    shape.push(u64::try_from(n).map_err(|_| {
                        Error::new(info.name(), format!("has the negative size {n}"))
                    })?)
                }
                Size::Name(name) => match dims.get(&name) {
                    Some(&n) => {
                        used.insert(name);
                        shape.push(n);
                    }
                    None => {
                        missing.insert(name);
                    }
                },
            }
        }
        types.push((info, elements, shape));
    }
    if !missing.is_empty() {
        let names: Vec<&str> = missing.iter().map(String::as_str).collect();
        let choices: Vec<String> = names.iter().map(|name| format!("--dim {name}=8")).collect();
        let error = Error::new("", format!("has symbolic sizes: {}", names.join(", ")));
        return Err(error.help(format!("choose with {}", choices.join(" "))));
    }
    if let Some(name) = dims.keys().find(|name| !used.contains(*name)) {
        let known: Vec<&str> = used.iter().map(String::as_str).collect();
        let known = if known.is_empty() {
            "none".into()
        } else {
            known.join(", ")
        };
        let message = format!("has no symbolic size {name}; it has {known}");
        return Err(Error::new("", message));
    }
    types
        .into_iter()
        .map(|(info, elements, shape)| made(info, elements, shape))
        .collect()
}

/// The declared type of another tensor, if all its sizes are known.
pub(crate) fn declared(info: &ValueInfoProto, dims: &BTreeMap<String, u64>) -> Option<TensorType> {
    let (elements, sizes) = sizes(info).ok()?;
    let size = |size: &Size| match size {
        Size::Number(n) => u64::try_from(*n).ok(),
        Size::Name(name) => dims.get(name).copied(),
    };
    let shape: Option<Vec<u64>> = sizes?.iter().map(size).collect();
    made(info, elements, shape?).ok()
}
