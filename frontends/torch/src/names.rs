//! The values of a file's names. A call that writes into a tensor gives the tensor's names a new
//! value, so the graph stays in SSA form.
//!
//! A view shares the memory of the tensor that it was made of. A write into one of them changes all
//! views of that tensor. The written tensor gets its new value, and so do the tensors of which it
//! is a part, up to the base, which is no view (`Import::write`). Other views are stale from then
//! on: the call that made one is repeated on the new value before the view is read again
//! (`Import::refresh`).

use crate::schema::Node;
use ir::Value;
use std::collections::{BTreeMap, BTreeSet};

/// The deepest view of a view that a call may write into. Each write and each later reading adds
/// nodes for each level.
const DEPTH: usize = 16;

/// How a view was made.
#[derive(Clone, Copy)]
pub(crate) struct View<'a> {
    /// The tensor whose memory it shares.
    pub(crate) of: &'a str,
    /// The call that made it.
    pub(crate) node: &'a Node,
    /// Its position among the results of the call.
    pub(crate) result: usize,
}

/// The values of names, and which names share memory.
#[derive(Default)]
pub(crate) struct Names<'a> {
    values: BTreeMap<&'a str, Value>,
    /// For the result of a call that writes into a tensor and returns it: the tensor's name.
    same: BTreeMap<&'a str, &'a str>,
    views: BTreeMap<&'a str, View<'a>>,
    /// The number of writes into a base and its views.
    writes: BTreeMap<&'a str, u64>,
    /// The writes that a tensor's value includes.
    seen: BTreeMap<&'a str, u64>,
    /// Bases that may share memory with tensors that are not known as views.
    blurred: BTreeSet<&'a str>,
}

impl<'a> Names<'a> {
    /// Gives a new name its value. False if the name has one.
    pub(crate) fn bind(&mut self, name: &'a str, value: Value) -> bool {
        self.values.insert(name, value).is_none()
    }

    /// The value of each name.
    pub(crate) fn values(&self) -> &BTreeMap<&'a str, Value> {
        &self.values
    }

    /// The first name of a tensor.
    fn origin(&self, mut name: &'a str) -> &'a str {
        while let Some(&tensor) = self.same.get(name) {
            name = tensor;
        }
        name
    }

    /// A tensor with the tensors of which it is a view, from itself to its base.
    fn line(&self, name: &'a str) -> Vec<&'a str> {
        let mut line = vec![self.origin(name)];
        while let Some(view) = line.last().and_then(|last| self.views.get(last)) {
            line.push(self.origin(view.of));
        }
        line
    }

    fn base(&self, name: &'a str) -> &'a str {
        let line = self.line(name);
        line.last().copied().unwrap_or(name)
    }

    /// How a tensor was made, if it is a view.
    pub(crate) fn view(&self, name: &'a str) -> Option<View<'a>> {
        self.views.get(self.origin(name)).copied()
    }

    /// A new name is a view. Its value is up to date.
    pub(crate) fn share(&mut self, name: &'a str, view: View<'a>) {
        let of = self.origin(view.of);
        if name == of {
            return;
        }
        self.views.insert(name, View { of, ..view });
        let base = self.base(name);
        let writes = self.writes.get(base).copied().unwrap_or(0);
        self.seen.insert(name, writes);
        if self.line(name).len() > DEPTH {
            self.blurred.insert(base);
        }
    }

    /// Two tensors may share memory in some other way.
    pub(crate) fn blur(&mut self, names: impl IntoIterator<Item = &'a str>) {
        for name in names {
            let base = self.base(name);
            self.blurred.insert(base);
        }
    }

    /// The views through which a write into a tensor reaches its base; `None` if other tensors may
    /// change in a way that is not known.
    pub(crate) fn writable(&self, name: &'a str) -> Option<Vec<View<'a>>> {
        let line = self.line(name);
        let is_blurred = line.last().is_some_and(|base| self.blurred.contains(base));
        let views = line.iter().filter_map(|name| self.views.get(name));
        (!is_blurred).then(|| views.copied().collect())
    }

    /// True if a tensor of which a name is a view was written since the name got its value.
    pub(crate) fn is_stale(&self, name: &'a str) -> bool {
        let origin = self.origin(name);
        let seen = self.seen.get(origin).copied().unwrap_or(0);
        self.views.contains_key(origin)
            && seen != self.writes.get(self.base(origin)).copied().unwrap_or(0)
    }

    /// Gives all names of a tensor the value that includes all writes.
    pub(crate) fn renew(&mut self, name: &'a str, value: Value) {
        let origin = self.origin(name);
        let writes = self.writes.get(self.base(origin)).copied().unwrap_or(0);
        self.seen.insert(origin, writes);
        let names: Vec<&str> = self.values.keys().copied().collect();
        for name in names {
            if self.origin(name) == origin {
                self.values.insert(name, value);
            }
        }
    }

    /// A call wrote into a tensor: all its names get the new value, and its views are stale.
    /// `result` is a further name. The number of writes into the base is returned.
    pub(crate) fn write(&mut self, name: &'a str, value: Value, result: Option<&'a str>) -> u64 {
        let origin = self.origin(name);
        if let Some(result) = result.filter(|&result| result != origin) {
            self.same.insert(result, origin);
        }
        let writes = self.writes.entry(self.base(origin)).or_default();
        *writes += 1;
        let writes = *writes;
        self.renew(origin, value);
        writes
    }
}

#[cfg(test)]
mod tests {
    use super::{DEPTH, Names, View};
    use crate::schema::Node;
    use ir::{Id, Value};

    fn value(n: usize) -> Value {
        Value::new(n)
    }

    fn node() -> Node {
        serde_json::from_str(r#"{"target": "", "inputs": [], "outputs": []}"#).unwrap()
    }

    #[test]
    fn a_write_gives_all_names_of_a_tensor_a_new_value() {
        let mut names = Names::default();
        assert!(names.bind("x", value(0)) && names.bind("other", value(0)));
        assert!(!names.bind("x", value(0)));
        names.bind("x_", value(1));
        names.write("x", value(1), Some("x_"));
        names.write("x_", value(2), Some("x__"));
        let found = |name: &str| names.values()[name];
        assert_eq!(
            [found("x"), found("x_"), found("other")],
            [2, 2, 0].map(value)
        );
    }

    #[test]
    fn a_write_makes_other_views_stale() {
        let node = node();
        let view = |of: &'static str| View {
            of,
            node: &node,
            result: 0,
        };
        let mut names = Names::default();
        for (i, name) in ["x", "row", "column", "part"].into_iter().enumerate() {
            names.bind(name, value(i));
        }
        names.share("row", view("x"));
        names.share("column", view("x"));
        names.share("part", view("row"));
        let stale =
            |names: &Names<'_>| ["x", "row", "column", "part"].map(|name| names.is_stale(name));
        assert_eq!(stale(&names), [false; 4]);
        assert_eq!(names.writable("part").map(|views| views.len()), Some(2));
        names.write("part", value(4), None);
        names.renew("row", value(5));
        names.renew("x", value(6));
        assert_eq!(stale(&names), [false, false, true, false]);
        names.renew("column", value(7));
        assert_eq!(stale(&names), [false; 4]);
    }

    #[test]
    fn a_blurred_or_deep_tensor_is_not_writable() {
        let node = node();
        let list: Vec<String> = (0..=DEPTH).map(|i| format!("v{i}")).collect();
        let mut names = Names::default();
        for (i, pair) in list.windows(2).enumerate() {
            names.bind(&pair[1], value(i));
            let view = View {
                of: &pair[0],
                node: &node,
                result: 0,
            };
            names.share(&pair[1], view);
            assert_eq!(names.writable(&pair[1]).is_some(), i + 2 <= DEPTH);
        }
        names.blur(["y"]);
        assert!(names.writable("y").is_none() && names.writable("z").is_some());
    }
}
