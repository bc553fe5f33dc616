//! The arguments of a traced call: names become values of the graph, symbols become sizes.

use crate::schema::{self, Argument, Item, Node};
use crate::symbols::Symbols;
use ir::Value;
use lower::{Arguments, Error, Result, Scalar};
use std::collections::BTreeMap;

/// The arguments of one node of a file.
pub(crate) struct NodeArguments<'a, 's> {
    node: &'a Node,
    env: &'a BTreeMap<&'s str, Value>,
    symbols: &'a mut Symbols<'s>,
    /// For each argument, whether it has been read.
    used: Vec<bool>,
}

/// Arguments that say where or how a tensor is stored. The planner decides this.
const PLACEMENT: [&str; 8] = [
    "device",
    "pin_memory",
    "memory_format",
    "non_blocking",
    "implicit",
    "generator",
    "copy",
    "physical_layout",
];

impl<'a, 's> NodeArguments<'a, 's> {
    pub(crate) fn new(
        node: &'a Node,
        env: &'a BTreeMap<&'s str, Value>,
        symbols: &'a mut Symbols<'s>,
    ) -> NodeArguments<'a, 's> {
        NodeArguments {
            node,
            env,
            symbols,
            used: vec![false; node.inputs.len()],
        }
    }

    fn value(&self, tensor: &str) -> Result<Value> {
        let undefined = || Error::Inexpressible(format!("{tensor} is not defined").into());
        self.env.get(tensor).copied().ok_or_else(undefined)
    }

    /// A list of tensors; `None` if it is a list of something else.
    fn tensors(&self, items: &[Item]) -> Result<Option<Vec<Option<Value>>>> {
        let one = |item: &Item| match item {
            Item::Name(tensor) => self.value(tensor).map(|value| Some(Some(value))),
            Item::None => Ok(Some(None)),
            Item::Int(_) => Ok(None),
        };
        items.iter().map(one).collect()
    }

    fn ints(&mut self, name: &str, items: &[Item]) -> Result<Vec<i64>> {
        let one = |item: &Item| match item {
            Item::Int(i) => Ok(*i),
            Item::Name(symbol) => self.symbols.named(symbol).map_err(Error::from),
            Item::None => Err(format!("the argument {name} has a gap").into()),
        };
        items.iter().map(one).collect()
    }
}

impl Arguments for NodeArguments<'_, '_> {
    fn read(&mut self, name: &str) -> Result<Option<lower::Argument>> {
        let node = self.node;
        let Some(i) = node.inputs.iter().position(|arg| arg.name == name) else {
            return Ok(None);
        };
        self.used[i] = true;
        Ok(Some(match &node.inputs[i].arg {
            Argument::None => return Ok(None),
            Argument::Tensor(tensor) => lower::Argument::Tensor(self.value(tensor)?),
            Argument::Tensors(items) => match self.tensors(items)? {
                Some(list) => lower::Argument::Tensors(list),
                None => lower::Argument::Other,
            },
            &Argument::Int(i) => lower::Argument::Number(Scalar::Int(i)),
            &Argument::Float(x) => lower::Argument::Number(Scalar::Float(x)),
            // The imaginary part: see `Import::complex_call`.
            &Argument::Complex(x) => lower::Argument::Number(Scalar::Float(x.real)),
            &Argument::Bool(b) => lower::Argument::Number(Scalar::Bool(b)),
            Argument::SymInt(symbol) => {
                lower::Argument::Number(Scalar::Int(self.symbols.named(symbol)?))
            }
            Argument::Ints(items) => lower::Argument::Ints(self.ints(name, items)?),
            Argument::Floats(list) => lower::Argument::Floats(list.clone()),
            Argument::Bools(list) => lower::Argument::Bools(list.clone()),
            Argument::String(text) => lower::Argument::Text(text.clone()),
            &Argument::ScalarType(number) => {
                let dtype = schema::dtype(number).or(schema::part(number));
                let dtype = dtype.ok_or_else(|| format!("element type {number} is not known"))?;
                lower::Argument::Type(dtype)
            }
            Argument::Layout(_) | Argument::Region(_) | Argument::Other => lower::Argument::Other,
        }))
    }

    fn skip(&mut self, name: &str) {
        if let Some(i) = self.node.inputs.iter().position(|arg| arg.name == name) {
            self.used[i] = true;
        }
    }

    fn finish(&self) -> Result<()> {
        for (arg, used) in self.node.inputs.iter().zip(&self.used) {
            let is_strided =
                arg.name == "layout" && matches!(arg.arg, Argument::Layout(schema::STRIDED));
            let is_idle = matches!(arg.arg, Argument::None)
                || is_strided
                || PLACEMENT.contains(&arg.name.as_str());
            if !used && !is_idle {
                return Err(Error::Unread(arg.name.clone()));
            }
        }
        Ok(())
    }
}
