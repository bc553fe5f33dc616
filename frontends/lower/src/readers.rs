//! Operators read the arguments of a call with these functions: by name and by kind, with defaults.

use crate::{Argument, Call, Error, Operand, Ref, Result, Scalar, wrap};
use ir::DType;

fn missing(name: &str) -> Error {
    Error::Missing(name.into())
}

fn kind<T>(name: &str, expected: &str) -> Result<T> {
    Err(Error::Kind {
        name: name.into(),
        expected: expected.into(),
    })
}

/// Readers of arguments: `opt_x` for one that may be absent, `x_or` for one with a default.
#[allow(missing_docs, reason = "named by what they read")]
impl Call<'_> {
    /// Counts arguments as read, because they do not change the results.
    pub fn ignore(&mut self, names: &[&str]) {
        for name in names {
            self.arguments.skip(name);
        }
    }

    pub fn opt_tensor(&mut self, name: &str) -> Result<Option<Ref>> {
        match self.arguments.read(name)? {
            None => Ok(None),
            Some(Argument::Tensor(value)) => Ok(Some(Ref::Value(value))),
            Some(_) => kind(name, "a tensor"),
        }
    }
    pub fn tensor(&mut self, name: &str) -> Result<Ref> {
        self.opt_tensor(name)?.ok_or_else(|| missing(name))
    }
    /// A list of tensors, some of which may be absent.
    pub fn opt_tensors(&mut self, name: &str) -> Result<Vec<Option<Ref>>> {
        match self.arguments.read(name)? {
            None => Err(missing(name)),
            Some(Argument::Tensors(list)) => {
                Ok(list.into_iter().map(|v| v.map(Ref::Value)).collect())
            }
            Some(_) => kind(name, "a list of tensors"),
        }
    }
    pub fn tensors(&mut self, name: &str) -> Result<Vec<Ref>> {
        let list: Option<Vec<Ref>> = self.opt_tensors(name)?.into_iter().collect();
        list.ok_or_else(|| format!("a tensor of {name} is None").into())
    }

    /// A tensor or a number.
    pub fn operand(&mut self, name: &str) -> Result<Operand> {
        match self.arguments.read(name)? {
            None => Err(missing(name)),
            Some(Argument::Tensor(value)) => Ok(Operand::Tensor(Ref::Value(value))),
            Some(Argument::Number(number)) => Ok(Operand::Scalar(number)),
            Some(_) => kind(name, "a number"),
        }
    }
    pub fn opt_scalar(&mut self, name: &str) -> Result<Option<Scalar>> {
        match self.arguments.read(name)? {
            None => Ok(None),
            Some(Argument::Number(number)) => Ok(Some(number)),
            Some(_) => kind(name, "a number"),
        }
    }
    pub fn scalar(&mut self, name: &str) -> Result<Scalar> {
        self.opt_scalar(name)?.ok_or_else(|| missing(name))
    }
    pub fn scalar_or(&mut self, name: &str, default: Scalar) -> Result<Scalar> {
        Ok(self.opt_scalar(name)?.unwrap_or(default))
    }
    pub fn float(&mut self, name: &str) -> Result<f64> {
        self.scalar(name).map(Scalar::float)
    }
    pub fn float_or(&mut self, name: &str, default: f64) -> Result<f64> {
        Ok(self.opt_scalar(name)?.map_or(default, Scalar::float))
    }
    pub fn opt_int(&mut self, name: &str) -> Result<Option<i64>> {
        match self.opt_scalar(name)? {
            None => Ok(None),
            Some(Scalar::Int(i)) => Ok(Some(i)),
            Some(_) => kind(name, "an integer"),
        }
    }
    pub fn int(&mut self, name: &str) -> Result<i64> {
        self.opt_int(name)?.ok_or_else(|| missing(name))
    }
    /// Floats; `None` for an absent or empty list.
    pub fn opt_floats(&mut self, name: &str) -> Result<Option<Vec<f64>>> {
        match self.arguments.read(name)? {
            None => Ok(None),
            Some(Argument::Floats(list)) => Ok(Some(list)),
            Some(Argument::Ints(list)) if list.is_empty() => Ok(None),
            Some(Argument::Tensors(list)) if list.is_empty() => Ok(None),
            Some(Argument::Number(number)) => Ok(Some(vec![number.float()])),
            Some(_) => kind(name, "a list of numbers"),
        }
    }
    pub fn int_or(&mut self, name: &str, default: i64) -> Result<i64> {
        Ok(self.opt_int(name)?.unwrap_or(default))
    }
    pub fn bool_or(&mut self, name: &str, default: bool) -> Result<bool> {
        match self.arguments.read(name)? {
            None => Ok(default),
            Some(Argument::Number(Scalar::Bool(b))) => Ok(b),
            Some(_) => kind(name, "a boolean"),
        }
    }
    pub fn bools(&mut self, name: &str) -> Result<Vec<bool>> {
        match self.arguments.read(name)? {
            None => Err(missing(name)),
            Some(Argument::Bools(list)) => Ok(list),
            Some(_) => kind(name, "a list of booleans"),
        }
    }
    pub fn string_or(&mut self, name: &str, default: &str) -> Result<String> {
        match self.arguments.read(name)? {
            None => Ok(default.into()),
            Some(Argument::Text(text)) => Ok(text),
            Some(_) => kind(name, "a string"),
        }
    }
    pub fn texts_or(&mut self, name: &str, default: &[&str]) -> Result<Vec<String>> {
        match self.arguments.read(name)? {
            None => Ok(default.iter().map(ToString::to_string).collect()),
            Some(Argument::Texts(list)) => Ok(list),
            Some(_) => kind(name, "a list of strings"),
        }
    }
    pub fn opt_dtype(&mut self, name: &str) -> Result<Option<DType>> {
        match self.arguments.read(name)? {
            None => Ok(None),
            Some(Argument::Type(dtype)) => Ok(Some(dtype)),
            Some(_) => kind(name, "an element type"),
        }
    }

    /// A list of integers; a single integer counts as a list of one.
    pub fn opt_ints(&mut self, name: &str) -> Result<Option<Vec<i64>>> {
        match self.arguments.read(name)? {
            None => Ok(None),
            Some(Argument::Ints(list)) => Ok(Some(list)),
            Some(Argument::Tensors(list)) if list.is_empty() => Ok(Some(vec![])),
            Some(Argument::Number(Scalar::Int(i))) => Ok(Some(vec![i])),
            Some(Argument::Number(_)) => kind(name, "an integer"),
            Some(_) => kind(name, "a number"),
        }
    }
    pub fn ints(&mut self, name: &str) -> Result<Vec<i64>> {
        self.opt_ints(name)?.ok_or_else(|| missing(name))
    }
    /// A list of `n` integers; a list of one means `n` equal ones, an absent or empty list means
    /// `default`.
    pub fn ints_of(&mut self, name: &str, n: usize, default: &[i64]) -> Result<Vec<i64>> {
        match self.opt_ints(name)?.as_deref() {
            None | Some([]) => Ok(default.to_vec()),
            Some(&[one]) => Ok(vec![one; n]),
            Some(list) if list.len() == n => Ok(list.to_vec()),
            Some(_) => kind(name, &format!("a list of {n}")),
        }
    }
    /// A dimension below `rank`, counted from the front.
    pub fn dim(&mut self, name: &str, default: Option<i64>, rank: usize) -> Result<usize> {
        let dim = self.opt_int(name)?.or(default);
        wrap(dim.ok_or_else(|| missing(name))?, rank)
    }
    /// Sorted dimensions; all of them if none is named.
    pub fn dims(&mut self, name: &str, rank: usize) -> Result<Vec<usize>> {
        match self.opt_ints(name)?.as_deref() {
            None | Some([]) => Ok((0..rank).collect()),
            // For a scalar, PyTorch allows dimension 0 although the scalar has none.
            Some([0 | -1]) if rank == 0 => Ok(vec![]),
            Some(list) => {
                let dims: Result<Vec<usize>> = list.iter().map(|&d| wrap(d, rank)).collect();
                let mut dims = dims?;
                dims.sort_unstable();
                dims.dedup();
                Ok(dims)
            }
        }
    }
    /// A shape; sizes of -1 are not allowed.
    pub fn shape(&mut self, name: &str) -> Result<Vec<u64>> {
        let one = |d: i64| {
            let negative = |_| format!("the argument {name} has the negative size {d}").into();
            u64::try_from(d).map_err(negative)
        };
        self.ints(name)?.into_iter().map(one).collect()
    }
}
