//! Messages whose short lists have no room to grow. A list of messages otherwise has room for four
//! as soon as it has one, and most nodes have one attribute, one result and one entry.

use crate::proto::NodeProto;
use prost::bytes::{Buf, BufMut};
use prost::encoding::{DecodeContext, WireType};
use prost::{DecodeError, Message};
use std::ops::Deref;

/// Lists of at most this many elements have no room; longer ones double it.
pub(crate) const SHORT: usize = 4;

/// A node with tight lists.
#[derive(Clone, PartialEq, Default, Debug)]
pub(crate) struct Tight(NodeProto);

impl Deref for Tight {
    type Target = NodeProto;

    fn deref(&self) -> &NodeProto {
        &self.0
    }
}

fn tighten<T>(list: &mut Vec<T>) {
    if list.len() <= SHORT {
        list.shrink_to_fit();
    }
}

impl Message for Tight {
    fn encode_raw(&self, buf: &mut impl BufMut) {
        self.0.encode_raw(buf);
    }
    fn merge_field(
        &mut self,
        tag: u32,
        wire_type: WireType,
        buf: &mut impl Buf,
        ctx: DecodeContext,
    ) -> Result<(), DecodeError> {
        let node = &mut self.0;
        node.merge_field(tag, wire_type, buf, ctx)?;
        tighten(&mut node.attribute);
        tighten(&mut node.input);
        tighten(&mut node.metadata_props);
        tighten(&mut node.output);
        Ok(())
    }
    fn encoded_len(&self) -> usize {
        self.0.encoded_len()
    }
    fn clear(&mut self) {
        self.0.clear();
    }
}
