//! The values of a file's names. Calls that write into a tensor give its names a new value, so the
//! graph stays in SSA form.
//!
//! A call that writes into a tensor also changes the tensor's views. So it is refused if the tensor
//! had a view by then. Views that are made later see the new value.

use ir::Value;
use std::collections::{BTreeMap, BTreeSet};

/// The values of names, and which names share a tensor.
#[derive(Default)]
pub(crate) struct Names<'a> {
    values: BTreeMap<&'a str, Value>,
    /// For the result of a call that writes into a tensor and returns it: the tensor's name.
    same: BTreeMap<&'a str, &'a str>,
    /// Tensors that have views, or are views.
    viewed: BTreeSet<&'a str>,
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

    /// Two tensors share memory from now on.
    pub(crate) fn share(&mut self, names: impl IntoIterator<Item = &'a str>) {
        for name in names {
            let origin = self.origin(name);
            self.viewed.insert(origin);
        }
    }

    /// True if a call may write into a tensor.
    pub(crate) fn is_alone(&self, name: &'a str) -> bool {
        !self.viewed.contains(self.origin(name))
    }

    /// Gives all names of a tensor a new value. `result` is a further name.
    pub(crate) fn write(&mut self, name: &'a str, value: Value, result: Option<&'a str>) {
        let origin = self.origin(name);
        if let Some(result) = result.filter(|&result| result != origin) {
            self.same.insert(result, origin);
        }
        let names: Vec<&str> = self.values.keys().copied().collect();
        for name in names {
            if self.origin(name) == origin {
                self.values.insert(name, value);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Names;
    use ir::{Id, Value};

    fn value(n: usize) -> Value {
        Value::new(n)
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
    fn a_tensor_with_views_is_not_alone() {
        let mut names = Names::default();
        names.bind("x", value(0));
        names.write("x", value(1), Some("x_"));
        assert!(names.is_alone("x"));
        names.share(["x_", "view"]);
        assert!(!names.is_alone("x") && !names.is_alone("x_") && !names.is_alone("view"));
        assert!(names.is_alone("y"));
    }
}
