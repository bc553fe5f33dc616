//! Operations: a name and attributes. Every fact about an operation stands in one table, [`ROWS`]:
//! how many operands, which attributes, the shape rule, purity, in-place pairs, arithmetic,
//! scratch. Passes ask the table; they do not match on names.
//!
//! All values are row-major and contiguous. Attributes are complete (no defaults) and normalised by
//! whoever builds the op: dimensions are counted from the front, sizes are resolved.

use crate::body::Body;
use crate::types::{DType, TensorType};
use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, LazyLock};

/// An attribute's value.
#[derive(Clone, PartialEq, Debug)]
pub enum Attr {
    /// `dim=1`
    Int(i64),
    /// `eps=1e-5`
    Float(f64),
    /// `keepdim=true`
    Bool(bool),
    /// `dims=[0,1]`
    Ints(Vec<i64>),
    /// `dtype=f32`
    Type(DType),
    /// `name="aten.foo"`
    Str(String),
    /// `body={%2 = add %0, %1 | %3 = relu %2 | %3}`
    Body(Arc<Body>),
}

/// An attribute's kind.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(missing_docs, reason = "the names are the documentation")]
pub enum Kind {
    Int,
    Float,
    /// Int or Float: an operand that is a number. Int for integer tensors.
    Number,
    Bool,
    Ints,
    Type,
    Str,
    Body,
}

/// Attributes in the order of their names.
pub type Attrs = BTreeMap<&'static str, Attr>;

/// What may be assumed of a repeated run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Purity {
    /// The same operands give the same bits. Random ops are pure: their generator's state is an
    /// operand.
    Pure,
    /// Unknown: never run again, never removed.
    Opaque,
}

/// Which elements of its operands a result's element is made of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Access {
    /// Those at its own place, broadcast, and single elements of options.
    Element,
    /// Those of its own row, along the last dimensions, or, in sums, of its own column.
    Row,
    /// Any: the op is a kernel by itself.
    Whole,
}

/// Arithmetic and scratch of one run.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Work {
    /// Floating-point operations; a multiply-add is two.
    pub flops: f64,
    /// True if the operations are products that run at the machine's matrix rate.
    pub matrix: bool,
    /// Bytes that the kernel needs while it runs, besides operands and results.
    pub scratch: u64,
}

type Infer = fn(&Call<'_>) -> Result<Vec<TensorType>, String>;
type WorkOf = fn(&Call<'_>, &[TensorType]) -> Work;

/// One row of the table.
pub struct Row {
    /// The op's name in text.
    pub name: &'static str,
    /// The least and the most number of operands.
    pub inputs: (usize, usize),
    /// Attributes, all required.
    pub attrs: &'static [(&'static str, Kind)],
    /// The shape rule.
    pub infer: Infer,
    /// What may be assumed of a repeated run.
    pub purity: Purity,
    /// (operand, result) pairs that may share their bytes, if their types are equal: the kernel
    /// reads each element of the operand before it writes that of the result, and no other element
    /// after.
    pub inplace: &'static [(usize, usize)],
    /// What its results are made of.
    pub access: Access,
    /// Arithmetic and scratch.
    pub work: WorkOf,
}

/// An op with its operand types: what shape rules and work functions see.
pub struct Call<'a> {
    op: &'a Op,
    types: &'a [&'a TensorType],
}

/// An operation: a row of the table and its attributes. Invariant: the attributes are exactly the
/// row's.
#[derive(Clone)]
pub struct Op {
    row: &'static Row,
    attrs: Attrs,
}

impl Op {
    /// An op by name; an error if there is no such op, or if the attributes are not the row's.
    pub fn new(
        name: &str,
        attrs: impl IntoIterator<Item = (&'static str, Attr)>,
    ) -> Result<Op, String> {
        Op::from_text(
            name,
            attrs.into_iter().map(|(k, v)| (k.to_string(), v)).collect(),
        )
    }
    /// The same, for attribute names that come from text.
    pub fn from_text(name: &str, mut given: BTreeMap<String, Attr>) -> Result<Op, String> {
        let row = row(name).ok_or_else(|| format!("there is no op {name}"))?;
        let mut attrs = Attrs::new();
        for &(key, kind) in row.attrs {
            let attr = given
                .remove(key)
                .ok_or_else(|| format!("{name} needs the attribute {key}"))?;
            let fits = matches!(
                (kind, &attr),
                (Kind::Int | Kind::Number, Attr::Int(_))
                    | (Kind::Float | Kind::Number, Attr::Float(_))
                    | (Kind::Bool, Attr::Bool(_))
                    | (Kind::Ints, Attr::Ints(_))
                    | (Kind::Type, Attr::Type(_))
                    | (Kind::Str, Attr::Str(_))
                    | (Kind::Body, Attr::Body(_))
            );
            if !fits {
                return Err(format!(
                    "{name}: attribute {key} should be of kind {kind:?}, not {attr:?}"
                ));
            }
            attrs.insert(key, attr);
        }
        match given.into_keys().next() {
            Some(key) => Err(format!("{name} has no attribute {key}")),
            None => Ok(Op { row, attrs }),
        }
    }
    /// The op's name.
    pub fn name(&self) -> &'static str {
        self.row.name
    }
    /// The op's row.
    pub fn row(&self) -> &'static Row {
        self.row
    }
    /// The op's attributes.
    pub fn attrs(&self) -> &Attrs {
        &self.attrs
    }
    /// Result types from operand types; the error says what does not fit.
    pub fn infer(&self, types: &[&TensorType]) -> Result<Vec<TensorType>, String> {
        let (least, most) = self.row.inputs;
        if types.len() < least || most < types.len() {
            return Err(format!(
                "{} takes {least} to {most} operands, not {}",
                self.name(),
                types.len()
            ));
        }
        (self.row.infer)(&Call { op: self, types }).map_err(|e| {
            let types: Vec<String> = types.iter().map(|t| t.to_string()).collect();
            format!("{} of {}: {e}", self.name(), types.join(", "))
        })
    }
    /// Arithmetic and scratch of one run.
    pub fn work(&self, inputs: &[&TensorType], outputs: &[TensorType]) -> Work {
        (self.row.work)(
            &Call {
                op: self,
                types: inputs,
            },
            outputs,
        )
    }
    /// True if the result shares its operand's bytes: it never becomes a line.
    pub fn is_alias(&self) -> bool {
        self.row.name == "reshape"
    }
    /// True if a repeated run gives the same bits.
    pub fn is_pure(&self) -> bool {
        self.row.purity == Purity::Pure
    }
    /// True if no kernel exists for the op: it is planned, not run.
    pub fn is_extern(&self) -> bool {
        self.row.name == "extern"
    }
    /// The (operand, result) pairs that may share their bytes.
    pub fn inplace(&self) -> &[(usize, usize)] {
        self.body().map_or(self.row.inplace, |body| body.inplace())
    }
    /// What a kernel of several ops computes.
    pub fn body(&self) -> Option<&Arc<Body>> {
        // Asked for often, and of few ops: their rows are the only ones with such an attribute.
        if !self.row.attrs.iter().any(|&(_, kind)| kind == Kind::Body) {
            return None;
        }
        match self.attrs.get("body") {
            Some(Attr::Body(body)) => Some(body),
            _ => None,
        }
    }
    /// An Int attribute. Panics if the row has none of that name.
    pub fn int(&self, key: &str) -> i64 {
        match self.attrs.get(key) {
            Some(&Attr::Int(i)) => i,
            other => panic!("{} should have an Int {key}, has {other:?}", self.name()),
        }
    }
    /// A Float or Number attribute. Panics if the row has none of that name.
    pub fn float(&self, key: &str) -> f64 {
        match self.attrs.get(key) {
            Some(&Attr::Float(x)) => x,
            Some(&Attr::Int(i)) => i as f64,
            other => panic!("{} should have a number {key}, has {other:?}", self.name()),
        }
    }
    /// A Bool attribute. Panics if the row has none of that name.
    pub fn bool(&self, key: &str) -> bool {
        match self.attrs.get(key) {
            Some(&Attr::Bool(b)) => b,
            other => panic!("{} should have a Bool {key}, has {other:?}", self.name()),
        }
    }
    /// An Ints attribute. Panics if the row has none of that name.
    pub fn ints(&self, key: &str) -> &[i64] {
        match self.attrs.get(key) {
            Some(Attr::Ints(v)) => v,
            other => panic!("{} should have Ints {key}, has {other:?}", self.name()),
        }
    }
    /// A Type attribute. Panics if the row has none of that name.
    pub fn dtype(&self, key: &str) -> DType {
        match self.attrs.get(key) {
            Some(&Attr::Type(d)) => d,
            other => panic!("{} should have a Type {key}, has {other:?}", self.name()),
        }
    }
    /// A Str attribute. Panics if the row has none of that name.
    pub fn str(&self, key: &str) -> &str {
        match self.attrs.get(key) {
            Some(Attr::Str(s)) => s,
            other => panic!("{} should have a Str {key}, has {other:?}", self.name()),
        }
    }
}

impl PartialEq for Op {
    fn eq(&self, other: &Op) -> bool {
        // Bits, not values: NaN equals itself, and -0.0 is not 0.0.
        let bits = |a: &Attr, b: &Attr| match (a, b) {
            (Attr::Float(x), Attr::Float(y)) => x.to_bits() == y.to_bits(),
            _ => a == b,
        };
        self.name() == other.name()
            && self.attrs.len() == other.attrs.len()
            && self
                .attrs
                .iter()
                .zip(&other.attrs)
                .all(|((k, a), (l, b))| k == l && bits(a, b))
    }
}

impl fmt::Debug for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{:?}", self.name(), self.attrs)
    }
}

/// The row of a name.
pub fn row(name: &str) -> Option<&'static Row> {
    static INDEX: LazyLock<BTreeMap<&'static str, &'static Row>> =
        LazyLock::new(|| ROWS.iter().map(|row| (row.name, row)).collect());
    INDEX.get(name).copied()
}

impl Row {
    const fn new(name: &'static str, inputs: (usize, usize), infer: Infer) -> Row {
        let access = Access::Whole;
        Row {
            name,
            inputs,
            attrs: &[],
            infer,
            purity: Purity::Pure,
            inplace: &[],
            access,
            work: elementwise_work,
        }
    }
    const fn access(self, access: Access) -> Row {
        Row { access, ..self }
    }
    const fn attrs(self, attrs: &'static [(&'static str, Kind)]) -> Row {
        Row { attrs, ..self }
    }
    const fn inplace(self, inplace: &'static [(usize, usize)]) -> Row {
        Row { inplace, ..self }
    }
    const fn work(self, work: WorkOf) -> Row {
        Row { work, ..self }
    }
    const fn opaque(self) -> Row {
        Row {
            purity: Purity::Opaque,
            ..self
        }
    }
    const fn unary(name: &'static str) -> Row {
        Row::new(name, (1, 1), same)
            .inplace(&[(0, 0)])
            .access(Element)
    }
    const fn scalar(name: &'static str) -> Row {
        Row::unary(name).attrs(&[("value", Kind::Number)])
    }
    const fn compare_scalar(name: &'static str) -> Row {
        Row::new(name, (1, 1), predicate)
            .attrs(&[("value", Kind::Number)])
            .access(Element)
    }
    const fn binary(name: &'static str) -> Row {
        Row::new(name, (2, 2), broadcast)
            .inplace(&[(0, 0), (1, 0)])
            .access(Element)
    }
    const fn compare(name: &'static str) -> Row {
        Row::new(name, (2, 2), broadcast_predicate).access(Element)
    }
    const fn reduce(name: &'static str) -> Row {
        Row::new(name, (1, 1), reduce)
            .attrs(&[("dims", Kind::Ints), ("keepdim", Kind::Bool)])
            .access(Access::Row)
    }
    const fn along(name: &'static str) -> Row {
        Row::new(name, (1, 1), same_along)
            .attrs(&[("dim", Kind::Int)])
            .inplace(&[(0, 0)])
            .access(Access::Row)
    }
    const fn random(name: &'static str) -> Row {
        Row::new(name, (1, 1), random).attrs(&[
            ("dtype", Kind::Type),
            ("shape", Kind::Ints),
            ("stream", Kind::Int),
        ])
    }
}

use Access::Element;
use Kind::{Bool, Float, Int, Ints, Number, Str, Type};

/// The table.
pub static ROWS: &[Row] = &[
    // One operand, element by element. y = f(x)
    Row::unary("neg"),
    Row::unary("abs"),
    Row::unary("sign"),
    Row::unary("exp"),
    Row::unary("log"),
    Row::unary("sqrt"),
    Row::unary("rsqrt"),
    Row::unary("reciprocal"),
    Row::unary("tanh"),
    Row::unary("sigmoid"),
    Row::unary("sin").access(Access::Whole),
    Row::unary("cos").access(Access::Whole),
    Row::unary("erf"),
    Row::unary("relu"),
    Row::unary("silu"),
    Row::unary("gelu").attrs(&[("tanh", Bool)]), // tanh=true is the tanh approximation.
    Row::unary("bitwise_not"),
    Row::new("logical_not", (1, 1), predicate).access(Element),
    Row::new("cast", (1, 1), cast)
        .attrs(&[("dtype", Type)])
        .access(Element),
    Row::unary("clamp").attrs(&[("max", Number), ("min", Number)]),
    // One operand and a number. rsub: value - x. pow: x^value.
    Row::scalar("add_scalar"),
    Row::scalar("mul_scalar"),
    Row::scalar("div_scalar"),
    Row::scalar("rsub_scalar"),
    Row::scalar("pow_scalar"),
    Row::compare_scalar("eq_scalar"),
    Row::compare_scalar("ne_scalar"),
    Row::compare_scalar("lt_scalar"),
    Row::compare_scalar("le_scalar"),
    Row::compare_scalar("gt_scalar"),
    Row::compare_scalar("ge_scalar"),
    // Two operands of one element type, broadcast against each other.
    Row::binary("add"),
    Row::binary("sub"),
    Row::binary("mul"),
    Row::binary("div"),
    Row::binary("pow").access(Access::Whole),
    Row::binary("maximum"),
    Row::binary("minimum"),
    Row::binary("bitwise_and"),
    Row::binary("bitwise_or"),
    Row::binary("bitwise_xor"),
    Row::compare("eq"),
    Row::compare("ne"),
    Row::compare("lt"),
    Row::compare("le"),
    Row::compare("gt"),
    Row::compare("ge"),
    Row::compare("logical_and"),
    Row::compare("logical_or"),
    Row::new("where", (3, 3), select)
        .inplace(&[(1, 0), (2, 0)])
        .access(Element), // where(condition: bool, x, y)
    // Derivatives of elementwise functions; no broadcast. (dy, y) for tanh and sigmoid, (dy, x) for
    // the others.
    Row::new("tanh_bwd", (2, 2), same2)
        .inplace(&[(0, 0), (1, 0)])
        .access(Element),
    Row::new("sigmoid_bwd", (2, 2), same2)
        .inplace(&[(0, 0), (1, 0)])
        .access(Element),
    Row::new("silu_bwd", (2, 2), same2)
        .inplace(&[(0, 0), (1, 0)])
        .access(Element),
    Row::new("gelu_bwd", (2, 2), same2)
        .attrs(&[("tanh", Bool)])
        .inplace(&[(0, 0), (1, 0)])
        .access(Element),
    // dx = x > value ? dy : 0
    Row::new("threshold_bwd", (2, 2), same2)
        .attrs(&[("value", Number)])
        .inplace(&[(0, 0), (1, 0)])
        .access(Element),
    // Reductions over `dims` (sorted, distinct, never empty: all dimensions are listed).
    Row::reduce("sum"),
    Row::reduce("mean"),
    Row::reduce("amax"),
    Row::reduce("amin"),
    Row::new("any", (1, 1), reduce_bool)
        .attrs(&[("dims", Ints), ("keepdim", Bool)])
        .access(Access::Row),
    Row::new("cumsum", (1, 1), same_along).attrs(&[("dim", Int)]),
    // topk(x) -> values, indices: i64, sorted
    Row::new("topk", (1, 1), topk).attrs(&[("dim", Int), ("k", Int), ("largest", Bool)]),
    // Softmax along `dim`; the derivatives take (dy, y).
    Row::along("softmax"),
    Row::along("log_softmax"),
    Row::new("softmax_bwd", (2, 2), same2_along)
        .attrs(&[("dim", Int)])
        .inplace(&[(0, 0), (1, 0)])
        .access(Access::Row),
    Row::new("log_softmax_bwd", (2, 2), same2_along)
        .attrs(&[("dim", Int)])
        .inplace(&[(0, 0), (1, 0)])
        .access(Access::Row),
    // Normalisation over the last `dims` dimensions: layer_norm(x[, w[, b]]) -> y, mean, rstd
    // (shape: leading dimensions, then ones). layer_norm_bwd(dy, x, mean, rstd[, w]) -> dx[, dw[,
    // db]] where `mask` is 1.
    Row::new("layer_norm", (1, 3), layer_norm)
        .attrs(&[("dims", Int), ("eps", Float)])
        .inplace(&[(0, 0)])
        .access(Access::Row),
    Row::new("layer_norm_bwd", (4, 5), layer_norm_bwd)
        .attrs(&[("dims", Int), ("mask", Ints)])
        .inplace(&[(0, 0)])
        .access(Access::Row)
        .work(layer_norm_bwd_work),
    // Over all dimensions but 1, in training: batch_norm(x, w, b, running_mean, running_var) -> y,
    // mean, rstd, running_mean', running_var'. batch_norm_bwd(dy, x, w, mean, rstd) -> dx, dw, db.
    Row::new("batch_norm", (5, 5), batch_norm)
        .attrs(&[("eps", Float), ("momentum", Float)])
        .inplace(&[(3, 3), (4, 4)]),
    Row::new("batch_norm_bwd", (5, 5), batch_norm_bwd).attrs(&[("mask", Ints)]),
    // Products. matmul(a, b): rank 2, or 3 with equal batch; ta, tb: the last two dimensions are
    // read transposed. addmm(c, a, b) = c + a b, where c broadcasts to the result.
    Row::new("matmul", (2, 2), matmul)
        .attrs(&[("ta", Bool), ("tb", Bool)])
        .work(matmul_work),
    Row::new("addmm", (3, 3), addmm)
        .attrs(&[("ta", Bool), ("tb", Bool)])
        .inplace(&[(0, 0)])
        .work(matmul_work),
    // convolution(x[N,C,..], w[O,C/groups,..][, b[O]]), one or two spatial dimensions.
    // convolution_bwd(dy, x, w) -> dx, dw, db where `mask` is 1.
    Row::new("convolution", (2, 3), convolution)
        .attrs(&[
            ("dilation", Ints),
            ("groups", Int),
            ("padding", Ints),
            ("stride", Ints),
        ])
        .work(convolution_work),
    Row::new("convolution_bwd", (3, 3), convolution_bwd)
        .attrs(&[
            ("dilation", Ints),
            ("groups", Int),
            ("mask", Ints),
            ("padding", Ints),
            ("stride", Ints),
        ])
        .work(convolution_work),
    // max_pool2d(x[N,C,H,W]) -> y, index into H*W of each window's maximum: i64. max_pool2d_bwd(dy,
    // index) -> dx[shape].
    Row::new("max_pool2d", (1, 1), max_pool2d).attrs(&[
        ("ceil", Bool),
        ("dilation", Ints),
        ("kernel", Ints),
        ("padding", Ints),
        ("stride", Ints),
    ]),
    Row::new("max_pool2d_bwd", (2, 2), max_pool2d_bwd).attrs(&[("shape", Ints)]),
    // Attention: sdpa(q[B,H,S,D], k[B,H,T,D], v[B,H,T,E][, mask: added, or bool true = take part;
    // broadcasts to [B,H,S,T]]) -> out[B,H,S,E], logsumexp: f32[B,H,S]. sdpa_bwd(dout, q, k, v,
    // out, logsumexp[, mask]) -> dq, dk, dv. H of k and v may divide that of q: grouped queries.
    Row::new("sdpa", (3, 4), sdpa)
        .attrs(&[("causal", Bool), ("scale", Float)])
        .work(sdpa_work),
    Row::new("sdpa_bwd", (6, 7), sdpa_bwd)
        .attrs(&[("causal", Bool), ("scale", Float)])
        .work(sdpa_bwd_work),
    // Tables. embedding(w[V,D], index) -> [index.., D]. embedding_bwd(dy, index) -> dw[rows, D];
    // rows of `padding` get 0 (-1: none).
    Row::new("embedding", (2, 2), embedding),
    Row::new("embedding_bwd", (2, 2), embedding_bwd)
        .attrs(&[("padding", Int), ("rows", Int)])
        .work(embedding_bwd_work),
    // nll_loss(logp[N,C], target[N]) -> loss, weight; reduction 0 none, 1 mean, 2 sum; targets
    // equal to `ignore` do not count, and weight is the number of those that do.
    // nll_loss_bwd(dloss, target, weight) -> dlogp[shape].
    Row::new("nll_loss", (2, 2), nll_loss).attrs(&[("ignore", Int), ("reduction", Int)]),
    // nll_sum(logp, target[, before: f64[]]) -> the rows' losses, added one after the other to
    // `before`, or to 0: f64[].
    Row::new("nll_sum", (2, 3), nll_sum)
        .attrs(&[("ignore", Int)])
        .inplace(&[(2, 0)]),
    Row::new("nll_loss_bwd", (3, 3), nll_loss_bwd).attrs(&[
        ("dtype", Type),
        ("ignore", Int),
        ("reduction", Int),
        ("shape", Ints),
    ]),
    // gather(x, index), scatter(x, index, source), scatter_value(x, index); scatter_add adds.
    Row::new("gather", (2, 2), gather).attrs(&[("dim", Int)]),
    Row::new("scatter", (3, 3), scatter)
        .attrs(&[("dim", Int)])
        .inplace(&[(0, 0)]),
    Row::new("scatter_add", (3, 3), scatter)
        .attrs(&[("dim", Int)])
        .inplace(&[(0, 0)]),
    Row::new("scatter_value", (2, 2), scatter)
        .attrs(&[("dim", Int), ("value", Number)])
        .inplace(&[(0, 0)]),
    // index(x, i0, i1, ..): x[i0, i1, ..] over the leading dimensions; the indices (i64) broadcast
    // against each other. index_put(x, values, i0, i1, ..): values broadcast to x[i0, i1, ..]'s
    // shape.
    Row::new("index", (2, 9), index),
    Row::new("index_put", (3, 10), index_put)
        .attrs(&[("accumulate", Bool)])
        .inplace(&[(0, 0)]),
    // Shapes. reshape shares its operand's bytes; the others copy.
    Row::new("reshape", (1, 1), reshape)
        .attrs(&[("shape", Ints)])
        .work(no_work),
    Row::new("permute", (1, 1), permute)
        .attrs(&[("dims", Ints)])
        .work(no_work),
    Row::new("expand", (1, 1), expand)
        .attrs(&[("shape", Ints)])
        .access(Element)
        .work(no_work),
    Row::new("flip", (1, 1), same)
        .attrs(&[("dims", Ints)])
        .work(no_work),
    Row::new("slice", (1, 1), slice)
        .attrs(&[("dim", Int), ("end", Int), ("start", Int), ("step", Int)])
        .work(no_work),
    // slice_scatter(x, source): x with x[.., start:end:step, ..] replaced.
    Row::new("slice_scatter", (2, 2), slice_scatter)
        .attrs(&[("dim", Int), ("end", Int), ("start", Int), ("step", Int)])
        .inplace(&[(0, 0)])
        .work(no_work),
    Row::new("cat", (1, 4096), cat)
        .attrs(&[("dim", Int)])
        .work(no_work),
    // pad: [before, after] for each dimension, outermost first; negative cuts.
    Row::new("pad", (1, 1), pad)
        .attrs(&[("pad", Ints), ("value", Number)])
        .work(no_work),
    // Sources. arange: start + step * i.
    Row::new("full", (0, 0), source)
        .attrs(&[("dtype", Type), ("shape", Ints), ("value", Number)])
        .access(Element)
        .work(no_work),
    Row::new("arange", (0, 0), source)
        .attrs(&[
            ("dtype", Type),
            ("shape", Ints),
            ("start", Number),
            ("step", Number),
        ])
        .work(no_work),
    // Random numbers: Philox4x32-10 of (seed, step, stream, element); rng: i64[2] = seed, step.
    // `stream` tells the random ops of a graph apart. The same operands give the same bits, so a
    // rerun reproduces them.
    Row::random("rand"),  // uniform in [0, 1)
    Row::random("randn"), // normal
    // dropout(x, rng) -> y = x * mask / (1 - p), mask: bool
    Row::new("dropout", (2, 2), dropout)
        .attrs(&[("p", Float), ("stream", Int)])
        .inplace(&[(0, 0)]),
    // dropout_bwd(dy, mask) -> dy * mask * scale
    Row::new("dropout_bwd", (2, 2), dropout_bwd)
        .attrs(&[("scale", Float)])
        .inplace(&[(0, 0)])
        .access(Element),
    Row::unary("rng_next"), // step + 1
    // The norm over all gradients, for clipping: sum_squares(g) -> f64[]; clip_scale(sum, sum, ..)
    // -> f32[], the factor min(1, max_norm / (sqrt of the sums + 1e-6)).
    Row::new("sum_squares", (1, 1), sum_squares),
    Row::new("clip_scale", (1, 4096), clip_scale).attrs(&[("max_norm", Float)]),
    // Optimizers. hyper: f64[5] = lr, beta1, beta2, eps, weight decay; step: i64[] counts from 1;
    // scale: f32[] is what the gradient is multiplied by first. adamw(p, g, m, v, step, hyper[,
    // scale]) -> p', m', v'
    Row::new("adamw", (6, 7), adamw)
        .inplace(&[(0, 0), (2, 1), (3, 2)])
        .access(Element)
        .work(adamw_work),
    // The same on f32 numbers whose nearest bf16 is p and whose lower 16 bits are low; m and v are
    // f32: adamw_split(p: bf16, g: bf16, low: i16, m, v, step, hyper[, scale]) -> p', low', m', v'
    Row::new("adamw_split", (7, 8), adamw_split)
        .inplace(&[(0, 0), (2, 1), (3, 2), (4, 3)])
        .access(Element)
        .work(adamw_work),
    // sgd(p, g, hyper: f64[3] = lr, momentum, weight decay[, scale]) -> p'
    Row::new("sgd", (3, 4), sgd)
        .inplace(&[(0, 0)])
        .access(Element),
    // sgd_momentum(p, g, buf, hyper[, scale]) -> p', buf'
    Row::new("sgd_momentum", (4, 5), sgd_momentum)
        .inplace(&[(0, 0), (2, 1)])
        .access(Element),
    // Several ops as one kernel, which a backend generates: see body.rs.
    Row::new("fused", (0, 4096), |c| fused(c).infer(c.types))
        .attrs(&[("body", Kind::Body)])
        .work(|c, _| fused(c).work(c.types)),
    // Anything else: planned and costed by its bytes, never run. `types` are the results':
    // "f32[4,4] i64[4]".
    Row::new("extern", (0, 4096), external)
        .attrs(&[("name", Str), ("types", Str)])
        .opaque(),
];

// --- shape rules ---

impl<'a> Call<'a> {
    /// Operand `i`'s type.
    fn at(&self, i: usize) -> &'a TensorType {
        self.types[i]
    }
    fn shape(&self, i: usize) -> &'a [u64] {
        self.types[i].shape()
    }
    /// Attribute `key` as a dimension of operand `i`.
    fn dim(&self, key: &str, i: usize) -> Result<usize, String> {
        let (dim, rank) = (self.op.int(key), self.at(i).rank());
        usize::try_from(dim)
            .ok()
            .filter(|&d| d < rank)
            .ok_or_else(|| format!("{key}={dim} is not below rank {rank}"))
    }
    /// Attribute `key` as distinct dimensions of operand `i`.
    fn dims(&self, key: &str, i: usize) -> Result<Vec<usize>, String> {
        let rank = self.at(i).rank();
        let mut seen = vec![false; rank];
        let mut dims = vec![];
        for &d in self.op.ints(key) {
            let d = usize::try_from(d).ok().filter(|&d| d < rank && !seen[d]);
            let d =
                d.ok_or_else(|| format!("{key} should be distinct dimensions below rank {rank}"))?;
            seen[d] = true;
            dims.push(d);
        }
        Ok(dims)
    }
    /// Attribute `key` as a shape.
    fn sizes(&self, key: &str) -> Result<Vec<u64>, String> {
        let sizes = self.op.ints(key).iter().map(|&d| u64::try_from(d));
        sizes
            .collect::<Result<_, _>>()
            .map_err(|_| format!("{key} has a negative size"))
    }
    fn expect(&self, i: usize, dtype: DType) -> Result<(), String> {
        ensure(self.at(i).dtype() == dtype, || {
            format!("operand {i} should be {dtype}")
        })
    }
    fn expect_index(&self, i: usize) -> Result<(), String> {
        ensure(
            matches!(self.at(i).dtype(), DType::I64 | DType::I32),
            || format!("operand {i} should be i64 or i32"),
        )
    }
    fn expect_same(&self, i: usize, j: usize) -> Result<(), String> {
        ensure(self.at(i) == self.at(j), || {
            format!("operands {i} and {j} should have one type")
        })
    }
    fn expect_dtype(&self, i: usize, j: usize) -> Result<(), String> {
        ensure(self.at(i).dtype() == self.at(j).dtype(), || {
            format!("operands {i} and {j} should have one element type")
        })
    }
    fn expect_shape(&self, i: usize, shape: &[u64]) -> Result<(), String> {
        ensure(self.shape(i) == shape, || {
            format!("operand {i} should have the shape {shape:?}")
        })
    }
    /// A list attribute of `n` numbers, each at least `least`.
    fn list(&self, key: &str, n: usize, least: i64) -> Result<Vec<i64>, String> {
        let list = self.op.ints(key);
        let fits = list.len() == n && list.iter().all(|&x| least <= x && x < 1 << 32);
        ensure(fits, || {
            format!("{key} should be {n} numbers of at least {least}")
        })?;
        Ok(list.to_vec())
    }
}

fn ensure(condition: bool, message: impl FnOnce() -> String) -> Result<(), String> {
    if condition { Ok(()) } else { Err(message()) }
}
fn ty(dtype: DType, shape: &[u64]) -> Result<Vec<TensorType>, String> {
    Ok(vec![TensorType::new(dtype, shape)?])
}
/// The shape to which `a` and `b` broadcast.
pub fn broadcast_shapes(a: &[u64], b: &[u64]) -> Result<Vec<u64>, String> {
    let rank = a.len().max(b.len());
    let at = |s: &[u64], i: usize| {
        if i + s.len() < rank {
            1
        } else {
            s[i + s.len() - rank]
        }
    };
    (0..rank)
        .map(|i| match (at(a, i), at(b, i)) {
            (x, y) if x == y => Ok(x),
            (1, y) => Ok(y),
            (x, 1) => Ok(x),
            _ => Err(format!("{a:?} and {b:?} do not broadcast")),
        })
        .collect()
}

fn fused<'a>(c: &Call<'a>) -> &'a Body {
    c.op.body().expect("a fused op should have a body")
}
fn same(c: &Call<'_>) -> Result<Vec<TensorType>, String> {
    Ok(vec![c.at(0).clone()])
}
fn same2(c: &Call<'_>) -> Result<Vec<TensorType>, String> {
    c.expect_same(0, 1)?;
    same(c)
}
fn same_along(c: &Call<'_>) -> Result<Vec<TensorType>, String> {
    c.dim("dim", 0)?;
    same(c)
}
fn same2_along(c: &Call<'_>) -> Result<Vec<TensorType>, String> {
    c.dim("dim", 0)?;
    same2(c)
}
fn predicate(c: &Call<'_>) -> Result<Vec<TensorType>, String> {
    ty(DType::Bool, c.shape(0))
}
fn cast(c: &Call<'_>) -> Result<Vec<TensorType>, String> {
    ty(c.op.dtype("dtype"), c.shape(0))
}
fn broadcast(c: &Call<'_>) -> Result<Vec<TensorType>, String> {
    c.expect_dtype(0, 1)?;
    ty(c.at(0).dtype(), &broadcast_shapes(c.shape(0), c.shape(1))?)
}
fn broadcast_predicate(c: &Call<'_>) -> Result<Vec<TensorType>, String> {
    c.expect_dtype(0, 1)?;
    ty(DType::Bool, &broadcast_shapes(c.shape(0), c.shape(1))?)
}
fn select(c: &Call<'_>) -> Result<Vec<TensorType>, String> {
    c.expect(0, DType::Bool)?;
    c.expect_dtype(1, 2)?;
    let shape = broadcast_shapes(&broadcast_shapes(c.shape(0), c.shape(1))?, c.shape(2))?;
    ty(c.at(1).dtype(), &shape)
}
fn reduced_shape(c: &Call<'_>) -> Result<Vec<u64>, String> {
    let dims = c.dims("dims", 0)?;
    let keep = c.op.bool("keepdim");
    let shape = c.shape(0).iter().enumerate();
    Ok(shape
        .filter_map(|(i, &d)| match (dims.contains(&i), keep) {
            (false, _) => Some(d),
            (true, true) => Some(1),
            (true, false) => None,
        })
        .collect())
}
fn reduce(c: &Call<'_>) -> Result<Vec<TensorType>, String> {
    ty(c.at(0).dtype(), &reduced_shape(c)?)
}
fn reduce_bool(c: &Call<'_>) -> Result<Vec<TensorType>, String> {
    ty(DType::Bool, &reduced_shape(c)?)
}
fn topk(c: &Call<'_>) -> Result<Vec<TensorType>, String> {
    let dim = c.dim("dim", 0)?;
    let mut shape = c.shape(0).to_vec();
    let k = c.op.int("k");
    ensure(0 <= k && k as u64 <= shape[dim], || {
        format!("k={k} is not in 0..={}", shape[dim])
    })?;
    shape[dim] = k as u64;
    Ok(vec![
        TensorType::new(c.at(0).dtype(), shape.clone())?,
        TensorType::new(DType::I64, shape)?,
    ])
}
/// The leading shape, then the normalised shape.
fn normalised<'a>(c: &Call<'a>, x: usize) -> Result<(&'a [u64], &'a [u64]), String> {
    let (dims, shape) = (c.op.int("dims"), c.shape(x));
    let dims = usize::try_from(dims)
        .ok()
        .filter(|&d| 1 <= d && d <= shape.len());
    let dims = dims.ok_or_else(|| format!("dims should be in 1..={}", shape.len()))?;
    Ok(shape.split_at(shape.len() - dims))
}
fn mask(c: &Call<'_>, types: Vec<TensorType>) -> Result<Vec<TensorType>, String> {
    let mask = c.op.ints("mask");
    let fits =
        mask.len() == types.len() && mask.iter().all(|&m| m == 0 || m == 1) && mask.contains(&1);
    ensure(fits, || {
        format!("mask should be {} numbers, 0 or 1, not all 0", types.len())
    })?;
    Ok(types
        .into_iter()
        .zip(mask)
        .filter(|&(_, &m)| m == 1)
        .map(|(t, _)| t)
        .collect())
}
fn layer_norm(c: &Call<'_>) -> Result<Vec<TensorType>, String> {
    let (lead, norm) = normalised(c, 0)?;
    for i in 1..c.types.len() {
        c.expect_shape(i, norm)?;
        c.expect_dtype(0, i)?;
    }
    let statistics: Vec<u64> = lead.iter().copied().chain(norm.iter().map(|_| 1)).collect();
    let statistics = TensorType::new(statistics_dtype(c.at(0).dtype()), statistics)?;
    Ok(vec![c.at(0).clone(), statistics.clone(), statistics])
}
/// Statistics of half-precision tensors are kept in f32.
fn statistics_dtype(dtype: DType) -> DType {
    if dtype == DType::F64 {
        DType::F64
    } else {
        DType::F32
    }
}
fn layer_norm_bwd(c: &Call<'_>) -> Result<Vec<TensorType>, String> {
    c.expect_same(0, 1)?;
    let (lead, norm) = normalised(c, 1)?;
    let statistics: Vec<u64> = lead.iter().copied().chain(norm.iter().map(|_| 1)).collect();
    for i in [2, 3] {
        c.expect_shape(i, &statistics)?;
        c.expect(i, statistics_dtype(c.at(1).dtype()))?;
    }
    if c.types.len() == 5 {
        c.expect_shape(4, norm)?;
        c.expect_dtype(4, 1)?;
    }
    let w = TensorType::new(c.at(1).dtype(), norm)?;
    mask(c, vec![c.at(1).clone(), w.clone(), w])
}
fn batch_norm(c: &Call<'_>) -> Result<Vec<TensorType>, String> {
    ensure(2 <= c.at(0).rank(), || {
        "operand 0 should have rank 2 or more".into()
    })?;
    let channels = &c.shape(0)[1..2];
    for i in 1..5 {
        c.expect_shape(i, channels)?;
        c.expect_dtype(i, 0)?;
    }
    let w = c.at(1).clone();
    Ok(vec![c.at(0).clone(), w.clone(), w.clone(), w.clone(), w])
}
fn batch_norm_bwd(c: &Call<'_>) -> Result<Vec<TensorType>, String> {
    c.expect_same(0, 1)?;
    ensure(2 <= c.at(1).rank(), || {
        "operand 1 should have rank 2 or more".into()
    })?;
    for i in 2..5 {
        c.expect_shape(i, &c.shape(1)[1..2])?;
        c.expect_dtype(i, 1)?;
    }
    mask(c, vec![c.at(1).clone(), c.at(2).clone(), c.at(2).clone()])
}
/// Batch, rows, inner, columns of a product of operands `a` and `a + 1`.
fn product(c: &Call<'_>, a: usize) -> Result<(Vec<u64>, u64, u64, u64), String> {
    let (x, y) = (c.shape(a), c.shape(a + 1));
    let fits = x.len() == y.len() && (2..=3).contains(&x.len());
    ensure(fits, || {
        "the factors should both have rank 2, or both 3".into()
    })?;
    let last2 = |s: &[u64], t: bool| {
        let (p, q) = (s[s.len() - 2], s[s.len() - 1]);
        if t { (q, p) } else { (p, q) }
    };
    let ((m, k), (k2, n)) = (last2(x, c.op.bool("ta")), last2(y, c.op.bool("tb")));
    let batch = &x[..x.len() - 2];
    ensure(k == k2 && batch == &y[..y.len() - 2], || {
        "inner or batch dimensions differ".into()
    })?;
    Ok((batch.to_vec(), m, k, n))
}
fn product_type(c: &Call<'_>, a: usize) -> Result<Vec<TensorType>, String> {
    c.expect_dtype(a, a + 1)?;
    let (mut shape, m, _, n) = product(c, a)?;
    shape.extend([m, n]);
    ty(c.at(a).dtype(), &shape)
}
fn matmul(c: &Call<'_>) -> Result<Vec<TensorType>, String> {
    product_type(c, 0)
}
fn addmm(c: &Call<'_>) -> Result<Vec<TensorType>, String> {
    c.expect_dtype(0, 1)?;
    let result = product_type(c, 1)?;
    let shape = broadcast_shapes(c.shape(0), result[0].shape())?;
    ensure(shape == result[0].shape(), || {
        "operand 0 does not broadcast to the product".into()
    })?;
    Ok(result)
}
/// Output size of a window along each spatial dimension.
fn window(
    input: &[u64],
    kernel: &[u64],
    stride: &[i64],
    padding: &[i64],
    dilation: &[i64],
    ceil: bool,
) -> Result<Vec<u64>, String> {
    let mut out = vec![];
    for i in 0..input.len() {
        let reach = dilation[i]
            * (i64::try_from(kernel[i])
                .unwrap_or(i64::MAX >> 33)
                .clamp(1, 1 << 28)
                - 1)
            + 1;
        let size = i64::try_from(input[i]).map_err(|_| "input too large".to_string())?;
        let room = size + 2 * padding[i] - reach;
        ensure(0 <= room, || {
            format!(
                "a window of {reach} does not fit into {size} + 2 * {}",
                padding[i]
            )
        })?;
        let mut n = if ceil {
            (room + stride[i] - 1) / stride[i]
        } else {
            room / stride[i]
        } + 1;
        // With `ceil`, the last window must start inside the input or the padding before it.
        if ceil && size + padding[i] <= (n - 1) * stride[i] {
            n -= 1;
        }
        out.push(n as u64);
    }
    Ok(out)
}
fn convolution_shape(c: &Call<'_>, x: usize, w: usize) -> Result<Vec<u64>, String> {
    let (xs, ws) = (c.shape(x), c.shape(w));
    c.expect_dtype(x, w)?;
    ensure(xs.len() == ws.len() && (3..=4).contains(&xs.len()), || {
        "rank should be 3 or 4".into()
    })?;
    let (n, groups) = (xs.len() - 2, c.op.int("groups"));
    let fits = 1 <= groups
        && Some(xs[1]) == ws[1].checked_mul(groups as u64)
        && ws[0].is_multiple_of(groups as u64)
        && ws[2..].iter().all(|&k| 1 <= k && k < 1 << 28);
    ensure(fits, || "channels, groups or kernel do not fit".into())?;
    let (stride, padding, dilation) = (
        c.list("stride", n, 1)?,
        c.list("padding", n, 0)?,
        c.list("dilation", n, 1)?,
    );
    let mut shape = vec![xs[0], ws[0]];
    shape.extend(window(
        &xs[2..],
        &ws[2..],
        &stride,
        &padding,
        &dilation,
        false,
    )?);
    Ok(shape)
}
fn convolution(c: &Call<'_>) -> Result<Vec<TensorType>, String> {
    let shape = convolution_shape(c, 0, 1)?;
    if c.types.len() == 3 {
        c.expect_shape(2, &shape[1..2])?;
        c.expect_dtype(2, 0)?;
    }
    ty(c.at(0).dtype(), &shape)
}
fn convolution_bwd(c: &Call<'_>) -> Result<Vec<TensorType>, String> {
    let shape = convolution_shape(c, 1, 2)?;
    c.expect_shape(0, &shape)?;
    c.expect_dtype(0, 1)?;
    let bias = TensorType::new(c.at(0).dtype(), &shape[1..2])?;
    mask(c, vec![c.at(1).clone(), c.at(2).clone(), bias])
}
fn max_pool2d(c: &Call<'_>) -> Result<Vec<TensorType>, String> {
    ensure(c.at(0).rank() == 4, || {
        "operand 0 should have rank 4".into()
    })?;
    let kernel: Vec<u64> = c
        .list("kernel", 2, 1)?
        .into_iter()
        .map(|k| k as u64)
        .collect();
    let (stride, padding, dilation) = (
        c.list("stride", 2, 1)?,
        c.list("padding", 2, 0)?,
        c.list("dilation", 2, 1)?,
    );
    ensure(kernel.iter().all(|&k| k < 1 << 28), || {
        "kernel too large".into()
    })?;
    ensure(
        padding
            .iter()
            .zip(&kernel)
            .all(|(&p, &k)| 2 * p as u64 <= k),
        || "padding above half the kernel".into(),
    )?;
    let mut shape = c.shape(0)[..2].to_vec();
    shape.extend(window(
        &c.shape(0)[2..],
        &kernel,
        &stride,
        &padding,
        &dilation,
        c.op.bool("ceil"),
    )?);
    Ok(vec![
        TensorType::new(c.at(0).dtype(), shape.clone())?,
        TensorType::new(DType::I64, shape)?,
    ])
}
fn max_pool2d_bwd(c: &Call<'_>) -> Result<Vec<TensorType>, String> {
    c.expect(1, DType::I64)?;
    c.expect_shape(1, c.shape(0))?;
    let shape = c.sizes("shape")?;
    let fits = c.at(0).rank() == 4 && shape.len() == 4 && shape[..2] == c.shape(0)[..2];
    ensure(fits, || {
        "shape should have rank 4 and the operands' first two sizes".into()
    })?;
    ty(c.at(0).dtype(), &shape)
}
/// Checks q, k, v at operands `q`.. and a mask at `mask`, if there is one.
fn attention(c: &Call<'_>, q: usize, mask: usize) -> Result<(), String> {
    let (qs, ks, vs) = (c.shape(q), c.shape(q + 1), c.shape(q + 2));
    ensure([qs, ks, vs].iter().all(|s| s.len() == 4), || {
        "q, k, v should have rank 4".into()
    })?;
    let heads = qs[1] == ks[1] || (0 < ks[1] && qs[1].is_multiple_of(ks[1]));
    let fits = qs[0] == ks[0] && heads && qs[3] == ks[3] && ks[..3] == vs[..3];
    ensure(fits, || "q, k, v do not fit together".into())?;
    c.expect_dtype(q, q + 1)?;
    c.expect_dtype(q, q + 2)?;
    if mask < c.types.len() {
        let full = [qs[0], qs[1], qs[2], ks[2]];
        let fits = broadcast_shapes(c.shape(mask), &full)? == full;
        ensure(fits, || format!("the mask does not broadcast to {full:?}"))?;
        let dtype = c.at(mask).dtype();
        ensure(dtype == DType::Bool || dtype == c.at(q).dtype(), || {
            "the mask should be bool or of q's type".into()
        })?;
    }
    Ok(())
}
fn sdpa(c: &Call<'_>) -> Result<Vec<TensorType>, String> {
    attention(c, 0, 3)?;
    let (q, v) = (c.shape(0), c.shape(2));
    let out = TensorType::new(c.at(0).dtype(), [q[0], q[1], q[2], v[3]])?;
    Ok(vec![out, TensorType::new(DType::F32, &q[..3])?])
}
fn sdpa_bwd(c: &Call<'_>) -> Result<Vec<TensorType>, String> {
    attention(c, 1, 6)?;
    let (q, v) = (c.shape(1), c.shape(3));
    for i in [0, 4] {
        c.expect_shape(i, &[q[0], q[1], q[2], v[3]])?;
        c.expect_dtype(i, 1)?;
    }
    c.expect_shape(5, &q[..3])?;
    c.expect(5, DType::F32)?;
    Ok(c.types[1..4].iter().map(|&t| t.clone()).collect())
}
fn embedding(c: &Call<'_>) -> Result<Vec<TensorType>, String> {
    c.expect_index(1)?;
    ensure(c.at(0).rank() == 2, || {
        "operand 0 should have rank 2".into()
    })?;
    let shape: Vec<u64> = c.shape(1).iter().chain(&c.shape(0)[1..]).copied().collect();
    ty(c.at(0).dtype(), &shape)
}
fn embedding_bwd(c: &Call<'_>) -> Result<Vec<TensorType>, String> {
    c.expect_index(1)?;
    let (dy, index) = (c.shape(0), c.shape(1));
    let fits = dy.len() == index.len() + 1 && dy[..index.len()] == *index;
    ensure(fits, || {
        "operand 0 should have operand 1's shape and one more dimension".into()
    })?;
    let rows =
        u64::try_from(c.op.int("rows")).map_err(|_| "rows should not be negative".to_string())?;
    ty(c.at(0).dtype(), &[rows, dy[index.len()]])
}
fn reduction(c: &Call<'_>) -> Result<i64, String> {
    let reduction = c.op.int("reduction");
    ensure((0..=2).contains(&reduction), || {
        "reduction should be 0, 1 or 2".into()
    })?;
    Ok(reduction)
}
fn nll_loss(c: &Call<'_>) -> Result<Vec<TensorType>, String> {
    c.expect_index(1)?;
    ensure(c.at(0).rank() == 2, || {
        "operand 0 should have rank 2".into()
    })?;
    c.expect_shape(1, &c.shape(0)[..1])?;
    let shape = if reduction(c)? == 0 { c.shape(1) } else { &[] };
    Ok(vec![
        TensorType::new(c.at(0).dtype(), shape)?,
        TensorType::new(c.at(0).dtype(), [])?,
    ])
}
fn nll_sum(c: &Call<'_>) -> Result<Vec<TensorType>, String> {
    c.expect_index(1)?;
    ensure(c.at(0).rank() == 2, || {
        "operand 0 should have rank 2".into()
    })?;
    c.expect_shape(1, &c.shape(0)[..1])?;
    if c.types.len() == 3 {
        c.expect(2, DType::F64)?;
        c.expect_shape(2, &[])?;
    }
    ty(DType::F64, &[])
}
fn nll_loss_bwd(c: &Call<'_>) -> Result<Vec<TensorType>, String> {
    c.expect_index(1)?;
    let (shape, dtype) = (c.sizes("shape")?, c.op.dtype("dtype"));
    ensure(shape.len() == 2, || "shape should have rank 2".into())?;
    c.expect_shape(1, &shape[..1])?;
    c.expect_shape(0, if reduction(c)? == 0 { &shape[..1] } else { &[] })?;
    c.expect_shape(2, &[])?;
    c.expect(0, dtype)?;
    c.expect(2, dtype)?;
    ty(dtype, &shape)
}
/// Checks that `index` has the rank of operand 0 and is no larger beside `dim`.
fn indexed(c: &Call<'_>) -> Result<(), String> {
    let dim = c.dim("dim", 0)?;
    c.expect_index(1)?;
    let (x, index) = (c.shape(0), c.shape(1));
    let fits = x.len() == index.len() && (0..x.len()).all(|i| i == dim || index[i] <= x[i]);
    ensure(fits, || "operand 1 does not fit operand 0".into())
}
fn gather(c: &Call<'_>) -> Result<Vec<TensorType>, String> {
    indexed(c)?;
    ty(c.at(0).dtype(), c.shape(1))
}
fn scatter(c: &Call<'_>) -> Result<Vec<TensorType>, String> {
    indexed(c)?;
    if c.types.len() == 3 {
        c.expect_dtype(2, 0)?;
        let fits = c.at(2).rank() == c.at(1).rank()
            && c.shape(1).iter().zip(c.shape(2)).all(|(i, s)| i <= s);
        ensure(fits, || "operand 2 is smaller than operand 1".into())?;
    }
    same(c)
}
/// The shape of operand 0 indexed by the operands from `first` on.
fn index_shape(c: &Call<'_>, first: usize) -> Result<Vec<u64>, String> {
    let x = c.shape(0);
    let n = c.types.len() - first;
    ensure(n <= x.len(), || "more indices than dimensions".into())?;
    let mut shape = vec![];
    for i in first..c.types.len() {
        c.expect_index(i)?;
        shape = broadcast_shapes(&shape, c.shape(i))?;
    }
    shape.extend(&x[n..]);
    Ok(shape)
}
fn index(c: &Call<'_>) -> Result<Vec<TensorType>, String> {
    ty(c.at(0).dtype(), &index_shape(c, 1)?)
}
fn index_put(c: &Call<'_>) -> Result<Vec<TensorType>, String> {
    let shape = index_shape(c, 2)?;
    c.expect_dtype(1, 0)?;
    ensure(broadcast_shapes(c.shape(1), &shape)? == shape, || {
        "the values do not broadcast".into()
    })?;
    same(c)
}
fn reshape(c: &Call<'_>) -> Result<Vec<TensorType>, String> {
    let result = ty(c.at(0).dtype(), &c.sizes("shape")?)?;
    ensure(result[0].numel() == c.at(0).numel(), || {
        format!("{} has another number of elements", result[0])
    })?;
    Ok(result)
}
fn permute(c: &Call<'_>) -> Result<Vec<TensorType>, String> {
    let dims = c.dims("dims", 0)?;
    ensure(dims.len() == c.at(0).rank(), || {
        "dims should name every dimension".into()
    })?;
    let shape: Vec<u64> = dims.iter().map(|&d| c.shape(0)[d]).collect();
    ty(c.at(0).dtype(), &shape)
}
fn expand(c: &Call<'_>) -> Result<Vec<TensorType>, String> {
    let shape = c.sizes("shape")?;
    ensure(broadcast_shapes(c.shape(0), &shape)? == shape, || {
        format!("does not expand to {shape:?}")
    })?;
    ty(c.at(0).dtype(), &shape)
}
/// `dim` and the number of elements that `start`, `end`, `step` take of it.
fn slice_range(c: &Call<'_>) -> Result<(usize, u64), String> {
    let dim = c.dim("dim", 0)?;
    let (start, end, step) = (c.op.int("start"), c.op.int("end"), c.op.int("step"));
    let size = c.shape(0)[dim];
    let fits = 0 <= start && start <= end && end as u64 <= size && 1 <= step;
    ensure(fits, || {
        format!("{start}:{end}:{step} is not within 0..{size}")
    })?;
    Ok((
        dim,
        (end - start) as u64 / step as u64 + u64::from((end - start) % step != 0),
    ))
}
fn slice(c: &Call<'_>) -> Result<Vec<TensorType>, String> {
    let (dim, n) = slice_range(c)?;
    let mut shape = c.shape(0).to_vec();
    shape[dim] = n;
    ty(c.at(0).dtype(), &shape)
}
fn slice_scatter(c: &Call<'_>) -> Result<Vec<TensorType>, String> {
    let part = slice(c)?;
    ensure(part[0] == *c.at(1), || {
        format!("operand 1 should be {}", part[0])
    })?;
    same(c)
}
fn cat(c: &Call<'_>) -> Result<Vec<TensorType>, String> {
    let dim = c.dim("dim", 0)?;
    let mut shape = c.shape(0).to_vec();
    for i in 1..c.types.len() {
        c.expect_dtype(i, 0)?;
        let other = c.shape(i);
        let fits = other.len() == shape.len()
            && (0..shape.len()).all(|d| d == dim || other[d] == shape[d]);
        ensure(fits, || format!("operand {i} does not fit operand 0"))?;
        shape[dim] = shape[dim].checked_add(other[dim]).ok_or("too large")?;
    }
    ty(c.at(0).dtype(), &shape)
}
fn pad(c: &Call<'_>) -> Result<Vec<TensorType>, String> {
    let pad = c.op.ints("pad");
    ensure(pad.len() == 2 * c.at(0).rank(), || {
        "pad should have two numbers a dimension".into()
    })?;
    let mut shape = vec![];
    for (&d, pair) in c.shape(0).iter().zip(pad.chunks(2)) {
        let d = i64::try_from(d)
            .ok()
            .and_then(|d| d.checked_add(pair[0])?.checked_add(pair[1]));
        shape.push(
            d.and_then(|d| u64::try_from(d).ok())
                .ok_or("pad leaves a negative size")?,
        );
    }
    ty(c.at(0).dtype(), &shape)
}
fn source(c: &Call<'_>) -> Result<Vec<TensorType>, String> {
    let result = ty(c.op.dtype("dtype"), &c.sizes("shape")?)?;
    ensure(c.op.name() != "arange" || result[0].rank() == 1, || {
        "shape should have rank 1".into()
    })?;
    Ok(result)
}
fn random(c: &Call<'_>) -> Result<Vec<TensorType>, String> {
    rng(c, 0)?;
    ensure(c.op.dtype("dtype").is_float(), || {
        "dtype should be a floating-point type".into()
    })?;
    ty(c.op.dtype("dtype"), &c.sizes("shape")?)
}
fn rng(c: &Call<'_>, i: usize) -> Result<(), String> {
    c.expect(i, DType::I64)?;
    c.expect_shape(i, &[2])
}
fn dropout(c: &Call<'_>) -> Result<Vec<TensorType>, String> {
    rng(c, 1)?;
    let p = c.op.float("p");
    ensure((0.0..=1.0).contains(&p), || {
        format!("p={p} is not in 0..=1")
    })?;
    Ok(vec![
        c.at(0).clone(),
        TensorType::new(DType::Bool, c.shape(0))?,
    ])
}
fn dropout_bwd(c: &Call<'_>) -> Result<Vec<TensorType>, String> {
    c.expect(1, DType::Bool)?;
    c.expect_shape(1, c.shape(0))?;
    same(c)
}
fn hyper(c: &Call<'_>, i: usize, n: u64) -> Result<(), String> {
    c.expect(i, DType::F64)?;
    c.expect_shape(i, &[n])
}
/// Checks the gradient's factor at operand `i`, if it is there.
fn scale(c: &Call<'_>, i: usize) -> Result<(), String> {
    if c.types.len() <= i {
        return Ok(());
    }
    c.expect(i, DType::F32)?;
    c.expect_shape(i, &[])
}
fn adamw(c: &Call<'_>) -> Result<Vec<TensorType>, String> {
    c.expect_same(0, 1)?;
    c.expect_same(0, 2)?;
    c.expect_same(0, 3)?;
    c.expect(4, DType::I64)?;
    c.expect_shape(4, &[])?;
    hyper(c, 5, 5)?;
    scale(c, 6)?;
    Ok(vec![c.at(0).clone(), c.at(2).clone(), c.at(3).clone()])
}
fn adamw_split(c: &Call<'_>) -> Result<Vec<TensorType>, String> {
    for (i, dtype) in [DType::BF16, DType::BF16, DType::I16, DType::F32, DType::F32]
        .into_iter()
        .enumerate()
    {
        c.expect(i, dtype)?;
        c.expect_shape(i, c.shape(0))?;
    }
    c.expect(5, DType::I64)?;
    c.expect_shape(5, &[])?;
    hyper(c, 6, 5)?;
    scale(c, 7)?;
    Ok([0, 2, 3, 4].map(|i| c.at(i).clone()).to_vec())
}
fn sgd(c: &Call<'_>) -> Result<Vec<TensorType>, String> {
    c.expect_same(0, 1)?;
    hyper(c, 2, 3)?;
    scale(c, 3)?;
    same(c)
}
fn sgd_momentum(c: &Call<'_>) -> Result<Vec<TensorType>, String> {
    c.expect_same(0, 1)?;
    c.expect_same(0, 2)?;
    hyper(c, 3, 3)?;
    scale(c, 4)?;
    Ok(vec![c.at(0).clone(), c.at(2).clone()])
}
fn sum_squares(c: &Call<'_>) -> Result<Vec<TensorType>, String> {
    ensure(c.at(0).dtype().is_float(), || {
        "operand 0 should be of a floating-point type".into()
    })?;
    ty(DType::F64, &[])
}
fn clip_scale(c: &Call<'_>) -> Result<Vec<TensorType>, String> {
    for i in 0..c.types.len() {
        c.expect(i, DType::F64)?;
        c.expect_shape(i, &[])?;
    }
    let most = c.op.float("max_norm");
    ensure(0.0 <= most, || {
        format!("max_norm={most} should not be negative")
    })?;
    ty(DType::F32, &[])
}
fn external(c: &Call<'_>) -> Result<Vec<TensorType>, String> {
    c.op.str("types")
        .split_whitespace()
        .map(parse_type)
        .collect()
}
/// A type from its text, `f32[4,64]`.
pub fn parse_type(text: &str) -> Result<TensorType, String> {
    let error = || format!("{text} is not a type like f32[4,64]");
    let (dtype, rest) = text.split_once('[').ok_or_else(error)?;
    let sizes = rest.strip_suffix(']').ok_or_else(error)?;
    let dtype = DType::from_name(dtype).ok_or_else(error)?;
    let sizes = sizes
        .split(',')
        .map(str::trim)
        .filter(|s| !sizes.is_empty() || !s.is_empty());
    let shape: Result<Vec<u64>, _> = sizes.map(|s| s.parse::<u64>()).collect();
    TensorType::new(dtype, shape.map_err(|_| error())?)
}

// --- work ---

fn no_work(_: &Call<'_>, _: &[TensorType]) -> Work {
    Work::default()
}
/// A few operations an element: the memory decides the time, not the arithmetic.
fn elementwise_work(c: &Call<'_>, outputs: &[TensorType]) -> Work {
    let elements = c
        .types
        .iter()
        .map(|t| t.numel())
        .chain(outputs.iter().map(|t| t.numel()))
        .max();
    Work {
        flops: 8.0 * elements.unwrap_or(0) as f64,
        matrix: false,
        scratch: 0,
    }
}
fn adamw_work(c: &Call<'_>, _: &[TensorType]) -> Work {
    Work {
        flops: 16.0 * c.at(0).numel() as f64,
        matrix: false,
        scratch: 0,
    }
}
/// The indices of each row, chained: a row is then summed and written once.
fn embedding_bwd_work(c: &Call<'_>, outputs: &[TensorType]) -> Work {
    Work {
        scratch: 4 * (outputs[0].shape()[0] + c.at(1).numel()),
        ..elementwise_work(c, outputs)
    }
}
fn is_half(dtype: DType) -> bool {
    matches!(dtype, DType::BF16 | DType::F16)
}
fn matmul_work(c: &Call<'_>, outputs: &[TensorType]) -> Work {
    let a = c.types.len() - 2;
    let (batch, m, k, n) = product(c, a).expect("a typed product should have dimensions");
    let batch: u64 = batch.iter().product();
    // Half-precision factors are widened to f32, one matrix of the batch at a time.
    let scratch = if is_half(outputs[0].dtype()) {
        4 * (m * k + k * n + m * n)
    } else {
        0
    };
    Work {
        flops: 2.0 * batch as f64 * m as f64 * k as f64 * n as f64,
        matrix: true,
        scratch,
    }
}
fn convolution_work(c: &Call<'_>, outputs: &[TensorType]) -> Work {
    // The forward's operands are x, w[, b]; the backward's dy, x, w: one product of that size for
    // each of dx and dw.
    let backward = c.op.name() == "convolution_bwd";
    let (y, w) = if backward {
        (c.at(0), c.shape(2))
    } else {
        (&outputs[0], c.shape(1))
    };
    let taps: u64 = w[1..].iter().product();
    let products = if backward {
        c.op.ints("mask")[..2].iter().sum::<i64>() as f64
    } else {
        1.0
    };
    Work {
        flops: 2.0 * products * y.numel() as f64 * taps as f64,
        matrix: true,
        scratch: 0,
    }
}
/// A tile of keys and a block of queries at a time, in a workspace of the thread that computes it.
fn sdpa_work(c: &Call<'_>, _: &[TensorType]) -> Work {
    let (q, v) = (c.shape(0), c.shape(2));
    let pairs = q[0] as f64 * q[1] as f64 * q[2] as f64 * v[2] as f64;
    Work {
        flops: 2.0 * pairs * (q[3] + v[3]) as f64,
        matrix: true,
        scratch: 0,
    }
}
fn sdpa_bwd_work(c: &Call<'_>, _: &[TensorType]) -> Work {
    let (q, v) = (c.shape(1), c.shape(3));
    let pairs = q[0] as f64 * q[1] as f64 * q[2] as f64 * v[2] as f64;
    Work {
        flops: 2.0 * pairs * (3 * q[3] + 2 * v[3]) as f64,
        matrix: true,
        scratch: 0,
    }
}
/// The sums over rows of the gradients of weight and bias, f64, of at most 32 chunks of rows.
fn layer_norm_bwd_work(c: &Call<'_>, outputs: &[TensorType]) -> Work {
    let (lead, norm) = c
        .shape(1)
        .split_at(c.shape(1).len() - c.op.int("dims") as usize);
    let (rows, n): (u64, u64) = (lead.iter().product(), norm.iter().product());
    let chunks = rows.div_ceil(rows.div_ceil(32).max(64));
    let scratch = if c.op.ints("mask")[1..] == [0, 0] {
        0
    } else {
        16 * n * chunks
    };
    Work {
        scratch,
        ..elementwise_work(c, outputs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_attributes_are_sorted_and_unique() {
        for row in ROWS {
            assert!(row.attrs.is_sorted_by_key(|a| a.0), "{}", row.name);
            assert_eq!(
                ROWS.iter().filter(|other| other.name == row.name).count(),
                1,
                "{}",
                row.name
            );
        }
    }

    #[test]
    fn types_read_back() {
        for text in ["f32[4,64]", "i64[]", "bool[0]"] {
            assert_eq!(parse_type(text).unwrap().to_string(), text);
        }
        for text in ["f32", "f32[4,]", "f32[-1]", "f9[1]", "f32[4"] {
            assert!(parse_type(text).is_err(), "{text}");
        }
        assert!(parse_type("f32[4294967296,4294967296]").is_err());
    }

    #[test]
    fn shapes_follow() {
        let t = |s: &str| parse_type(s).unwrap();
        let op = Op::new(
            "matmul",
            [("ta", Attr::Bool(true)), ("tb", Attr::Bool(false))],
        )
        .unwrap();
        assert_eq!(
            op.infer(&[&t("f32[2,3]"), &t("f32[2,5]")]).unwrap(),
            [t("f32[3,5]")]
        );
        assert!(op.infer(&[&t("f32[3,2]"), &t("f32[2,5]")]).is_err());
        assert!(Op::new("matmul", []).is_err());
    }
}
