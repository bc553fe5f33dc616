//! A node's attributes by name. In a function's body, some refer to attributes of the call.

use crate::proto::{AttributeProto, GraphProto, NodeProto, TensorProto};
use lower::{Argument, Arguments, Error, Result, Scalar};
use std::collections::BTreeMap;

/// Attributes by name: those of a call of a function.
pub(crate) type Given<'a> = BTreeMap<&'a str, &'a AttributeProto>;

/// A node's attributes.
#[derive(Clone)]
pub(crate) struct Attributes<'a> {
    /// Sorted by name; each with whether it was read.
    list: Vec<(&'a str, &'a AttributeProto, bool)>,
}

// ONNX's numbers of kinds of attributes.
const FLOAT: i32 = 1;
const INT: i32 = 2;
const STRING: i32 = 3;
const TENSOR: i32 = 4;
const GRAPH: i32 = 5;
const FLOATS: i32 = 6;
const INTS: i32 = 7;
const STRINGS: i32 = 8;

impl<'a> Attributes<'a> {
    /// Those of a node; `given` are the attributes of the call of the function around it.
    pub(crate) fn of(node: &'a NodeProto, given: &Given<'a>) -> Result<Attributes<'a>> {
        let mut list = vec![];
        for attribute in &node.attribute {
            let reference = attribute.ref_attr_name();
            if reference.is_empty() {
                list.push((attribute.name(), attribute, false));
            } else if let Some(&of_call) = given.get(reference) {
                list.push((attribute.name(), of_call, false));
            }
        }
        list.sort_by_key(|(name, ..)| *name);
        let twice = list.windows(2).find(|pair| pair[0].0 == pair[1].0);
        match twice {
            Some(pair) => Err(format!("has two attributes {}", pair[0].0).into()),
            None => Ok(Attributes { list }),
        }
    }
    /// No attributes.
    pub(crate) fn none() -> Attributes<'a> {
        Attributes { list: vec![] }
    }
    /// All by name, for the call of a function.
    pub(crate) fn given(&self) -> Given<'a> {
        self.list
            .iter()
            .map(|&(name, attribute, _)| (name, attribute))
            .collect()
    }

    fn find(&self, name: &str) -> Option<&'a AttributeProto> {
        let i = self
            .list
            .binary_search_by_key(&name, |(name, ..)| name)
            .ok()?;
        Some(self.list[i].1)
    }
    pub(crate) fn has(&self, name: &str) -> bool {
        self.find(name).is_some()
    }
    pub(crate) fn int(&self, name: &str) -> Option<i64> {
        self.find(name)
            .filter(|a| kind(a) == INT)
            .map(AttributeProto::i)
    }
    pub(crate) fn float(&self, name: &str) -> Option<f64> {
        self.find(name)
            .filter(|a| kind(a) == FLOAT)
            .map(|a| a.f().into())
    }
    pub(crate) fn ints(&self, name: &str) -> Option<&'a [i64]> {
        self.find(name)
            .filter(|a| kind(a) == INTS)
            .map(|a| &a.ints[..])
    }
    pub(crate) fn floats(&self, name: &str) -> Option<&'a [f32]> {
        self.find(name)
            .filter(|a| kind(a) == FLOATS)
            .map(|a| &a.floats[..])
    }
    pub(crate) fn tensor(&self, name: &str) -> Option<&'a TensorProto> {
        self.find(name)?.t.as_deref()
    }
    pub(crate) fn graph(&self, name: &str) -> Option<&'a GraphProto> {
        self.find(name)?.g.as_deref()
    }
}

/// The kind that is stated, or that follows from the fields.
fn kind(a: &AttributeProto) -> i32 {
    match a.r#type() {
        0 if a.i.is_some() => INT,
        0 if a.f.is_some() => FLOAT,
        0 if a.s.is_some() => STRING,
        0 if a.t.is_some() => TENSOR,
        0 if a.g.is_some() => GRAPH,
        0 if !a.floats.is_empty() => FLOATS,
        0 if !a.ints.is_empty() => INTS,
        0 if !a.strings.is_empty() => STRINGS,
        kind => kind,
    }
}

impl Arguments for Attributes<'_> {
    fn read(&mut self, name: &str) -> Result<Option<Argument>> {
        let Ok(i) = self.list.binary_search_by_key(&name, |(name, ..)| name) else {
            return Ok(None);
        };
        self.list[i].2 = true;
        let attribute = self.list[i].1;
        Ok(Some(match kind(attribute) {
            FLOAT => Argument::Number(Scalar::Float(attribute.f().into())),
            INT => Argument::Number(Scalar::Int(attribute.i())),
            STRING => {
                let text = std::str::from_utf8(attribute.s());
                Argument::Text(text.map_err(|_| Error::from("is no text"))?.into())
            }
            INTS => Argument::Ints(attribute.ints.clone()),
            STRINGS => {
                let text = |bytes: &prost::bytes::Bytes| String::from_utf8(bytes.to_vec());
                let texts: std::result::Result<_, _> = attribute.strings.iter().map(text).collect();
                Argument::Texts(texts.map_err(|_| Error::from("is no text"))?)
            }
            _ => Argument::Other,
        }))
    }
    fn skip(&mut self, name: &str) {
        if let Ok(i) = self.list.binary_search_by_key(&name, |(name, ..)| name) {
            self.list[i].2 = true;
        }
    }
    fn finish(&self) -> Result<()> {
        match self.list.iter().find(|(.., is_read)| !is_read) {
            Some((name, ..)) => Err(Error::Unread(name.to_string())),
            None => Ok(()),
        }
    }
}
