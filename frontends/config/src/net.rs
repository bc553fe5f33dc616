//! Adds nodes and parameters to a forward.

use crate::{Error, Tensor};
use ir::op::Number;
use ir::op::attrs::{Along, Cast, Dims, Full, LayerNorm, Product, Reduction, Scalar, Sizes, Slice};
use ir::{DType, Graph, Op, Phase, StateKind, TensorType, Value};
use lower::Generator;
use std::collections::BTreeMap;

/// A forward that is being built.
pub(crate) struct Net {
    pub(crate) graph: Graph,
    pub(crate) tensors: BTreeMap<String, Tensor>,
    /// The path of the module whose nodes are added.
    pub(crate) module: String,
    pub(crate) generator: Generator,
}

impl Net {
    pub(crate) fn new(name: &str) -> Net {
        Net {
            graph: Graph::new(name),
            tensors: BTreeMap::new(),
            module: String::new(),
            generator: Generator::new("rng"),
        }
    }

    /// The graph, whose next step draws other random numbers, and the values of its buffers.
    pub(crate) fn finish(mut self) -> Result<(Graph, BTreeMap<String, Tensor>), Error> {
        self.generator.advance(&mut self.graph)?;
        Ok((self.graph, self.tensors))
    }

    /// Adds a node; returns its first result.
    pub(crate) fn op(&mut self, op: Op, inputs: &[Value]) -> Result<Value, Error> {
        Ok(self.results(op, inputs)?[0])
    }

    /// Adds a node; returns its results.
    pub(crate) fn results(&mut self, op: Op, inputs: &[Value]) -> Result<Vec<Value>, Error> {
        let types = self.graph.types(inputs);
        let refused = |e: String| Error::new(op.name(), e);
        let results = op
            .infer(&types.iter().collect::<Vec<_>>())
            .map_err(|e| refused(e.to_string()))?;
        let n = self.graph.nodes.len();
        let names: Vec<String> = (0..results.len())
            .map(|i| match i {
                0 => format!("{}_{n}", op.name()),
                i => format!("{}_{n}_{i}", op.name()),
            })
            .collect();
        let (name, module) = (op.name(), self.module.clone());
        let added = self
            .graph
            .add_node(op, inputs, &names, Phase::Forward, module);
        added.map_err(|e| Error::new(name, e.to_string()))
    }

    pub(crate) fn input(&mut self, name: &str, shape: &[u64]) -> Result<Value, Error> {
        let ty = ty(DType::I64, shape)?;
        Ok(self.graph.add_input(name, ty))
    }

    pub(crate) fn parameter(&mut self, path: &str, shape: &[u64]) -> Result<Value, Error> {
        let name = format!("p_{}", path.replace('.', "_"));
        let ty = ty(DType::F32, shape)?;
        Ok(self.graph.add_state(name, path, StateKind::Param, ty))
    }

    /// A tensor that is not trained.
    pub(crate) fn buffer(
        &mut self,
        path: &str,
        shape: &[u64],
        values: &[f32],
    ) -> Result<Value, Error> {
        let name = format!("b_{}", path.replace('.', "_"));
        let ty = ty(DType::F32, shape)?;
        let data = values
            .iter()
            .flat_map(|value| value.to_le_bytes())
            .collect();
        let tensor = Tensor {
            ty: ty.clone(),
            data,
        };
        self.tensors.insert(path.to_string(), tensor);
        Ok(self.graph.add_state(name, path, StateKind::Buffer, ty))
    }

    pub(crate) fn shape(&self, x: Value) -> &[u64] {
        self.graph.values[x].ty.shape()
    }

    pub(crate) fn reshape(&mut self, x: Value, shape: &[u64]) -> Result<Value, Error> {
        let shape = shape.iter().map(|&size| size as i64).collect();
        self.op(Op::Reshape(Sizes { shape }), &[x])
    }

    pub(crate) fn permute(&mut self, x: Value, dims: &[i64]) -> Result<Value, Error> {
        let dims = dims.to_vec();
        self.op(Op::Permute(Dims { dims }), &[x])
    }

    /// Elements `from..to` of the last dimension.
    pub(crate) fn columns(&mut self, x: Value, from: u64, to: u64) -> Result<Value, Error> {
        let rank = self.shape(x).len();
        if from == 0 && to == self.shape(x)[rank - 1] {
            return Ok(x);
        }
        let slice = Slice {
            dim: rank as i64 - 1,
            start: from as i64,
            end: to as i64,
            step: 1,
        };
        self.op(Op::Slice(slice), &[x])
    }

    /// Joins tensors along their last dimension.
    pub(crate) fn cat(&mut self, parts: &[Value]) -> Result<Value, Error> {
        let dim = self.shape(parts[0]).len() as i64 - 1;
        self.op(Op::Cat(Along { dim }), parts)
    }

    pub(crate) fn cast(&mut self, x: Value, dtype: DType) -> Result<Value, Error> {
        self.op(Op::Cast(Cast { dtype }), &[x])
    }

    /// A function of a tensor and a number.
    pub(crate) fn by(
        &mut self,
        op: fn(Scalar) -> Op,
        x: Value,
        number: f64,
    ) -> Result<Value, Error> {
        let value = match self.graph.values[x].ty.dtype().is_float() {
            true => Number::Float(number),
            false => Number::Int(number as i64),
        };
        self.op(op(Scalar { value }), &[x])
    }

    /// `x w + b` on the last dimension of x, with new parameters. The weight is `[out, in]`, as in
    /// `nn.Linear`, or, if `conv` is true, `[in, out]`.
    pub(crate) fn linear(
        &mut self,
        path: &str,
        x: Value,
        columns: u64,
        bias: bool,
        conv: bool,
    ) -> Result<Value, Error> {
        let outer = std::mem::replace(&mut self.module, path.to_string());
        let inner = *self.shape(x).last().unwrap_or(&1);
        let shape = match conv {
            true => [inner, columns],
            false => [columns, inner],
        };
        let w = self.parameter(&format!("{path}.weight"), &shape)?;
        let b = match bias {
            true => Some(self.parameter(&format!("{path}.bias"), &[columns])?),
            false => None,
        };
        let y = self.product(x, w, conv, b)?;
        self.module = outer;
        Ok(y)
    }

    /// `x w + b` on the last dimension of x, for a weight as in [`Net::linear`].
    pub(crate) fn product(
        &mut self,
        x: Value,
        w: Value,
        conv: bool,
        b: Option<Value>,
    ) -> Result<Value, Error> {
        let (mut shape, columns) = (self.shape(x).to_vec(), self.shape(w)[usize::from(conv)]);
        let inner = shape.pop().unwrap_or(1);
        let rows = self.reshape(x, &[shape.iter().product(), inner])?;
        let product = Product {
            ta: false,
            tb: !conv,
        };
        let y = match b {
            Some(b) => self.op(Op::Addmm(product), &[b, rows, w])?,
            None => self.op(Op::Matmul(product), &[rows, w])?,
        };
        shape.push(columns);
        self.reshape(y, &shape)
    }

    /// `cap tanh(x / cap)`: x, but never beyond the cap.
    pub(crate) fn capped(&mut self, x: Value, cap: f64) -> Result<Value, Error> {
        let share = self.by(Op::DivScalar, x, cap)?;
        let bounded = self.op(Op::Tanh, &[share])?;
        self.by(Op::MulScalar, bounded, cap)
    }

    /// x where a condition holds, and a number elsewhere.
    pub(crate) fn or(&mut self, condition: Value, x: Value, number: f64) -> Result<Value, Error> {
        let number = Full {
            dtype: DType::F32,
            shape: vec![],
            value: Number::Float(number),
        };
        let number = self.op(Op::Full(number), &[])?;
        self.op(Op::Where, &[condition, x, number])
    }

    /// Normalises the last dimension: its mean becomes 0 and its deviation 1. Weight and bias
    /// follow, if there are any.
    pub(crate) fn layer_norm(
        &mut self,
        x: Value,
        eps: f64,
        factors: &[Value],
    ) -> Result<Value, Error> {
        let inputs: Vec<Value> = [&[x], factors].concat();
        self.op(Op::LayerNorm(LayerNorm { dims: 1, eps }), &inputs)
    }

    /// Divides the last dimension by the root of its mean square.
    pub(crate) fn rms_norm(&mut self, x: Value, eps: f64) -> Result<Value, Error> {
        let rank = self.shape(x).len();
        let square = self.by(Op::PowScalar, x, 2.0)?;
        let over = Reduction {
            dims: vec![rank as i64 - 1],
            keepdim: true,
        };
        let mean = self.op(Op::Mean(over), &[square])?;
        let sum = self.by(Op::AddScalar, mean, eps)?;
        let factor = self.op(Op::Rsqrt, &[sum])?;
        self.op(Op::Mul, &[x, factor])
    }
}

fn ty(dtype: DType, shape: &[u64]) -> Result<TensorType, Error> {
    TensorType::new(dtype, shape).map_err(|e| Error::new("", e.to_string()))
}
