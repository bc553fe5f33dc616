//! Computes the loss over a large vocabulary in chunks of rows, so that the full logits and their
//! full gradient never exist.
//!
//! Before: the rows of logits are a product of the hidden rows and the head's weight. Their
//! negative log likelihood is summed or averaged. From their gradient the backward computes two
//! values: the gradient of the hidden rows, which also has rows, and the gradient of the weight,
//! which is a sum over rows. The factor of the loss's gradient does not depend on the loss. So the
//! backward of some rows can directly follow their forward.
//!
//! After: the same values. The region between them exists once for each chunk of rows. `cat` joins
//! the chunks' rows of the hidden gradient. `addmm` adds a chunk's part of the weight's gradient to
//! the parts before it, in place. For a gradient in half precision `matmul_sum` does this in f32,
//! and the sum is rounded after the last chunk. `nll_sum` adds up the losses. The mean's gradient
//! needs the number of targets that count. This number is computed first, from the targets.
//!
//! **Invariant:** no bit depends on the number of chunks. Rows do not depend on each other. Chunks
//! begin at multiples of [`PRODUCT_DEPTH`], where products over rows are cut anyway, and a product
//! in half precision rounds its sum once, at its end. `nll_sum` adds in the order of `nll_loss`.
//! The mean is divided last. The loss stays whole if a result would differ: with a bias's gradient,
//! and with a product of integers.
//!
//! The idea is from Liger Kernel's fused linear cross-entropy (Hsu et al., 2024, arXiv 2410.10989).

use artifact::PRODUCT_DEPTH;
use ir::graph::{self, NodeData};
use ir::op::attrs::{Along, Cast, NllLoss, NllSum, Product, Reduction, Scalar, Slice};
use ir::op::body::Combines;
use ir::op::{Access, Number, attributes};
use ir::{DType, Graph, Node, Op, Value};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use thiserror::Error;

/// How many chunks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Chunks {
    /// The planner chooses for the budget: see [`crate::pipeline`].
    #[default]
    Auto,
    /// At most this number. All chunks except the last have the same number of rows, a multiple of
    /// [`PRODUCT_DEPTH`].
    Of(u64),
}

/// Why a loss is not computed in chunks of rows.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum ChunkError {
    /// The graph has no loss that could be cut.
    #[error(
        "the loss cannot be computed in {chunks} chunks of rows: the graph has no mean or sum of \
         negative log likelihoods"
    )]
    NoLoss {
        /// How many chunks were asked for.
        chunks: u64,
    },
    /// No loss can be cut.
    #[error("the loss cannot be computed in {chunks} chunks of rows: %{loss}: {source}")]
    Whole {
        /// How many chunks were asked for.
        chunks: u64,
        /// The last loss.
        loss: String,
        /// Why it stays whole.
        source: Uncut,
    },
    /// A node of a chunk does not fit the graph.
    #[error(transparent)]
    Graph(#[from] graph::Error),
}

/// Why a loss stays whole. Nodes and values have their names in text, without the `%`.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[allow(missing_docs, reason = "the messages are the documentation")]
pub enum Uncut {
    #[error("it is no mean or sum of negative log likelihoods")]
    NoLoss,
    #[error("it has {rows} rows, and chunks are multiples of {DEPTH}")]
    FewRows { rows: u64 },
    /// The logits are an input or a state.
    #[error("its logits are no product")]
    NoProduct,
    #[error("its logits come from %{node}, {op}")]
    OtherLogits { node: String, op: &'static str },
    #[error("%{node}, {op}, reads what would be cut")]
    Reads { node: String, op: &'static str },
    #[error("%{value} is to leave the step whole")]
    Leaves { value: String },
    #[error("%{node} waits for the whole of it")]
    Waits { node: String },
}

/// The number of chunks of the loss if at most `n` are allowed; 1 if it cannot be cut. With several
/// losses, the largest number.
pub fn chunks(graph: &Graph, n: u64) -> u64 {
    let region = |&node: &Node| Region::around(graph, node).ok();
    let chunks = |region: Region| region.rows.div_ceil(region.chunk(n.max(1)));
    graph
        .order
        .iter()
        .filter_map(region)
        .map(chunks)
        .max()
        .unwrap_or(1)
}

/// Computes every loss that can be cut in at most `n` chunks of rows. If there is no such loss, an
/// error says why.
pub fn run(graph: &mut Graph, n: u64) -> Result<(), ChunkError> {
    if n <= 1 {
        return Ok(());
    }
    let losses: Vec<Node> = graph
        .order
        .iter()
        .copied()
        .filter(|&node| is_loss(graph, node))
        .collect();
    let mut why = ChunkError::NoLoss { chunks: n };
    let mut cut = false;
    for node in losses {
        match Region::around(graph, node) {
            Ok(region) => {
                rewrite(graph, &region, region.chunk(n))?;
                cut = true;
            }
            Err(source) => {
                why = ChunkError::Whole {
                    chunks: n,
                    loss: graph.node_name(node).to_string(),
                    source,
                }
            }
        }
    }
    *graph = graph.compact();
    if cut { Ok(()) } else { Err(why) }
}

const DEPTH: u64 = PRODUCT_DEPTH as u64;

fn is_loss(graph: &Graph, node: Node) -> bool {
    matches!(&graph.nodes[node].op, Op::NllLoss(loss) if loss.reduction != NllLoss::NONE)
}

/// What a node of a region computes from a chunk of rows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Part {
    /// Rows that only the region reads.
    Inner,
    /// Rows that other nodes read: the chunks are joined.
    Rows,
    /// A product over rows: the chunks' parts are added up.
    Sum,
    /// The loss.
    Loss,
}

/// The nodes between the hidden rows and the gradients that other nodes read. They are computed
/// once for each chunk.
struct Region {
    rows: u64,
    /// In the graph's order.
    nodes: BTreeMap<Node, Part>,
    loss: Node,
}

impl Region {
    /// The region of a loss; an error says why there is none.
    fn around(graph: &Graph, loss: Node) -> Result<Region, Uncut> {
        if !is_loss(graph, loss) {
            return Err(Uncut::NoLoss);
        }
        let logp = graph.nodes[loss].inputs[0];
        let rows = graph.values[logp].ty.shape()[0];
        if rows <= DEPTH {
            return Err(Uncut::FewRows { rows });
        }
        let mut region = Region {
            rows,
            nodes: BTreeMap::from([(loss, Part::Loss)]),
            loss,
        };
        region.forward(graph, logp)?;
        region.readers(graph)?;
        region.is_alone(graph)?;
        Ok(region)
    }

    /// The number of rows of a chunk if there are at most `n` chunks.
    fn chunk(&self, n: u64) -> u64 {
        self.rows.div_ceil(n).next_multiple_of(DEPTH)
    }

    /// Adds the nodes from the operand of the loss back to the product that computes the logits.
    fn forward(&mut self, graph: &Graph, logp: Value) -> Result<(), Uncut> {
        let mut value = logp;
        loop {
            let Some(node) = graph.def_node(value) else {
                return Err(Uncut::NoProduct);
            };
            let data = &graph.nodes[node];
            let alike = data.inputs.len() == 1
                && graph.values[data.inputs[0]].ty.shape() == graph.values[value].ty.shape()
                && self.is_rowwise(graph, node, &BTreeSet::from([data.inputs[0]]));
            let is_product =
                is_product(&data.op) && self.is_product_of_rows(graph, node, &BTreeSet::new());
            if !alike && !is_product {
                return Err(Uncut::OtherLogits {
                    node: graph.node_name(node).to_string(),
                    op: data.op.name(),
                });
            }
            self.nodes.insert(node, Part::Inner);
            if is_product {
                return Ok(());
            }
            value = data.inputs[0];
        }
    }

    /// Adds the nodes that read the region's rows.
    fn readers(&mut self, graph: &Graph) -> Result<(), Uncut> {
        let mut wide: BTreeSet<Value> = BTreeSet::new();
        let (targets, weight) = (
            graph.nodes[self.loss].inputs[1],
            graph.nodes[self.loss].outputs[1],
        );
        for &node in &graph.order {
            let data = &graph.nodes[node];
            let part = match self.nodes.get(&node) {
                Some(&part) => part,
                None if matches!(data.op, Op::NllLossBwd(_))
                    && data.inputs[1..] == [targets, weight] =>
                {
                    Part::Inner
                }
                None if !data.inputs.iter().any(|v| wide.contains(v)) => continue,
                None if self.is_rowwise(graph, node, &wide) => Part::Inner,
                None if is_product(&data.op) && self.is_product_of_rows(graph, node, &wide) => {
                    Part::Rows
                }
                None if self.is_product_over_rows(graph, node) => Part::Sum,
                None => {
                    return Err(Uncut::Reads {
                        node: graph.node_name(node).to_string(),
                        op: data.op.name(),
                    });
                }
            };
            self.nodes.insert(node, part);
            if part == Part::Inner {
                wide.extend(&data.outputs);
            }
        }
        match graph.wanted().find(|value| wide.contains(value)) {
            Some(value) => Err(Uncut::Leaves {
                value: graph.values[value].name.clone(),
            }),
            None => Ok(()),
        }
    }

    /// Refuses a region in which a node needs a whole result of the region. The number of targets
    /// that count is allowed.
    fn is_alone(&self, graph: &Graph) -> Result<(), Uncut> {
        let weight = graph.nodes[self.loss].outputs[1];
        let mut after: BTreeSet<Value> = BTreeSet::new();
        for &node in &graph.order {
            let data = &graph.nodes[node];
            let is_after = data.inputs.iter().any(|v| after.contains(v));
            if self.nodes.contains_key(&node) {
                if is_after {
                    return Err(Uncut::Waits {
                        node: graph.node_name(node).to_string(),
                    });
                }
                let gives = data
                    .outputs
                    .iter()
                    .filter(|&&v| v != weight && self.nodes[&node] != Part::Inner);
                after.extend(gives);
            } else if is_after {
                after.extend(&data.outputs);
            }
        }
        Ok(())
    }

    /// True if each row of the op's results depends only on the same row of its operands, and all
    /// operands with rows are `wide`.
    fn is_rowwise(&self, graph: &Graph, node: Node, wide: &BTreeSet<Value>) -> bool {
        let data = &graph.nodes[node];
        let shape = |v: Value| graph.values[v].ty.shape();
        let has_rows = |v: Value| shape(v).len() == 2 && shape(v)[0] == self.rows;
        let whole = |&v: &Value| wide.contains(&v) && has_rows(v);
        if !data.op.is_pure() || !data.outputs.iter().all(|&v| has_rows(v)) {
            return false;
        }
        match data.op.facts().access {
            Access::Element => {
                // These have the sizes of their results in attributes.
                let keys = attributes(data.op.kind());
                let sized = keys.iter().any(|&(key, _)| key == "shape");
                !sized && data.inputs.iter().all(|v| whole(v) || no_rows(shape(*v)))
            }
            Access::Row => {
                let along = matches!(Combines::of(&data.op), Combines::Line { dim: 1 });
                along && data.inputs.iter().all(whole)
            }
            Access::Whole => false,
        }
    }

    /// True for a product whose left factor has the rows and whose right factor is not `wide`.
    fn is_product_of_rows(&self, graph: &Graph, node: Node, wide: &BTreeSet<Value>) -> bool {
        let data = &graph.nodes[node];
        let shape = |v: &Value| graph.values[*v].ty.shape();
        let [before @ .., left, right] = &data.inputs[..] else {
            return false;
        };
        let transposed = factors(&data.op).is_none_or(|factors| factors.ta);
        let fits = shape(left).len() == 2 && shape(left)[0] == self.rows && !transposed;
        fits && before.iter().all(|v| no_rows(shape(v))) && left != right && !wide.contains(right)
    }

    /// True for a product that sums over the rows of two values of floating-point numbers.
    fn is_product_over_rows(&self, graph: &Graph, node: Node) -> bool {
        let data = &graph.nodes[node];
        let ty = |v: &Value| &graph.values[*v].ty;
        let dtype = graph.values[data.outputs[0]].ty.dtype();
        matches!(
            data.op,
            Op::Matmul(Product {
                ta: true,
                tb: false
            })
        ) && ty(&data.inputs[0]).rank() == 2
            && (is_half(dtype) || matches!(dtype, DType::F32 | DType::F64))
    }
}

fn is_half(dtype: DType) -> bool {
    matches!(dtype, DType::BF16 | DType::F16)
}
fn is_product(op: &Op) -> bool {
    factors(op).is_some()
}
/// How a product reads its factors; `None` for other ops.
fn factors(op: &Op) -> Option<&Product> {
    match op {
        Op::Matmul(factors) | Op::Addmm(factors) => Some(factors),
        _ => None,
    }
}

/// True for a shape that broadcasts along rows.
fn no_rows(shape: &[u64]) -> bool {
    shape.len() < 2 || (shape.len() == 2 && shape[0] == 1)
}

// --- rewriting ---

/// Replaces the region by its chunks.
fn rewrite(graph: &mut Graph, region: &Region, chunk: u64) -> Result<(), graph::Error> {
    let order = std::mem::take(&mut graph.order);
    let needed = needed(graph, region, &order);
    let names = graph
        .values
        .values()
        .map(|data| data.name.clone())
        .collect();
    let mut chunks = Chunked {
        graph,
        region,
        names,
        counted: None,
    };
    let mut done: BTreeSet<Node> = region.nodes.keys().copied().collect();
    let mut begun = false;
    for &node in &order {
        if region.nodes.contains_key(&node) && !begun {
            begun = true;
            for &before in order.iter().filter(|node| needed.contains(node)) {
                if done.insert(before) {
                    chunks.keep(before)?;
                }
            }
            chunks.all(&order, chunk)?;
        }
        if done.insert(node) {
            chunks.keep(node)?;
        }
    }
    graph.debug_assert_ssa();
    Ok(())
}

/// The nodes outside of the region that it needs.
fn needed(graph: &Graph, region: &Region, order: &[Node]) -> BTreeSet<Node> {
    let mut values: BTreeSet<Value> = BTreeSet::new();
    let mut needed = BTreeSet::new();
    for &node in order.iter().rev() {
        let data = &graph.nodes[node];
        let inside = region.nodes.contains_key(&node);
        if inside || data.outputs.iter().any(|v| values.contains(v)) {
            values.extend(&data.inputs);
            if !inside {
                needed.insert(node);
            }
        }
    }
    needed
}

/// The parts so far of each value that leaves the region: rows that will be joined, or one sum.
type Parts = BTreeMap<Node, Vec<Value>>;

/// A chunk of rows that is being added.
struct Chunk {
    number: u64,
    rows: Range<u64>,
    is_last: bool,
    /// The chunk's rows of each value.
    here: BTreeMap<Value, Value>,
}

struct Chunked<'a> {
    graph: &'a mut Graph,
    region: &'a Region,
    /// Names that are in use.
    names: BTreeSet<String>,
    /// The number of targets that count, f64, after it was added to the graph. The loss's second
    /// result is this number.
    counted: Option<Value>,
}

impl Chunked<'_> {
    /// Keeps a node unchanged.
    fn keep(&mut self, node: Node) -> Result<(), graph::Error> {
        let weight = self.graph.nodes[self.region.loss].outputs[1];
        if self.graph.nodes[node].inputs.contains(&weight) {
            self.count()?;
        }
        self.graph.order.push(node);
        Ok(())
    }

    /// Adds a node with one result that has an unused name.
    fn add(
        &mut self,
        op: Op,
        inputs: &[Value],
        name: String,
        like: Node,
    ) -> Result<Value, graph::Error> {
        let mut name = name;
        while !self.names.insert(name.clone()) {
            name.push('_');
        }
        let NodeData { phase, module, .. } = &self.graph.nodes[like];
        let (phase, module) = (*phase, module.clone());
        Ok(self.graph.add_node(op, inputs, &[name], phase, module)?[0])
    }

    /// Adds a node whose result replaces `value`.
    fn define(&mut self, value: Value, op: Op, inputs: &[Value], like: Node) {
        let NodeData { phase, module, .. } = &self.graph.nodes[like];
        let (phase, module) = (*phase, module.clone());
        let node = self
            .graph
            .define(&[value], op, inputs.to_vec(), phase, module);
        self.graph.order.push(node);
    }

    /// Adds the number of targets that count.
    fn count(&mut self) -> Result<Value, graph::Error> {
        if let Some(counted) = self.counted {
            return Ok(counted);
        }
        let loss = self.region.loss;
        let (targets, weight) = (
            self.graph.nodes[loss].inputs[1],
            self.graph.nodes[loss].outputs[1],
        );
        let name = self.graph.values[weight].name.clone();
        let Op::NllLoss(NllLoss { ignore, .. }) = self.graph.nodes[loss].op else {
            unreachable!("a region's loss should be an nll_loss");
        };
        let counts = self.add(
            Op::NeScalar(Scalar {
                value: Number::Int(ignore),
            }),
            &[targets],
            format!("{name}.counts"),
            loss,
        )?;
        let ones = self.add(cast(DType::F64), &[counts], format!("{name}.ones"), loss)?;
        let sum = Op::Sum(Reduction {
            dims: vec![0],
            keepdim: false,
        });
        let counted = self.add(sum, &[ones], format!("{name}.sum"), loss)?;
        self.define(
            weight,
            cast(self.graph.values[weight].ty.dtype()),
            &[counted],
            loss,
        );
        self.counted = Some(counted);
        Ok(counted)
    }

    /// Adds all chunks and joins their results.
    fn all(&mut self, order: &[Node], chunk: u64) -> Result<(), graph::Error> {
        let counted = self.count()?;
        let (region, rows) = (self.region, self.region.rows);
        let nodes: Vec<(Node, Part)> = order
            .iter()
            .filter_map(|&node| Some((node, *region.nodes.get(&node)?)))
            .collect();
        let mut parts = Parts::new();
        let n = rows.div_ceil(chunk);
        for k in 0..n {
            let mut chunk = Chunk {
                number: k,
                rows: k * chunk..rows.min((k + 1) * chunk),
                is_last: k + 1 == n,
                here: BTreeMap::new(),
            };
            for &(node, part) in &nodes {
                self.compute(&mut chunk, node, part, &mut parts)?;
            }
        }
        for (node, part) in nodes {
            let parts = parts.remove(&node).unwrap_or_default();
            self.join(node, part, &parts, counted)?;
        }
        Ok(())
    }

    /// Computes a chunk's rows of a node.
    fn compute(
        &mut self,
        chunk: &mut Chunk,
        node: Node,
        part: Part,
        parts: &mut Parts,
    ) -> Result<(), graph::Error> {
        let mut operands = self.operands(chunk, node, part)?;
        let NodeData { op, outputs, .. } = self.graph.nodes[node].clone();
        let value = outputs[0];
        let name = format!("{}.{}", self.graph.values[value].name, chunk.number);
        let parts = parts.entry(node).or_default();
        match part {
            Part::Inner => {
                let op = with_rows(op, chunk.rows.end - chunk.rows.start);
                let own = self.add(op, &operands, name, node)?;
                chunk.here.insert(value, own);
            }
            Part::Rows => parts.push(self.add(op, &operands, name, node)?),
            Part::Sum => {
                let dtype = self.graph.values[value].ty.dtype();
                let op = match (op, parts.pop()) {
                    (Op::Matmul(factors), sum) if is_half(dtype) => {
                        operands.extend(sum);
                        Op::MatmulSum(factors)
                    }
                    (Op::Matmul(factors), Some(sum)) => {
                        operands.insert(0, sum);
                        Op::Addmm(factors)
                    }
                    (op, _) => op,
                };
                if !chunk.is_last {
                    parts.push(self.add(op, &operands, name, node)?);
                } else if is_half(dtype) {
                    let sum = self.add(op, &operands, name, node)?;
                    self.define(value, cast(dtype), &[sum], node);
                } else {
                    self.define(value, op, &operands, node);
                }
            }
            Part::Loss => {
                operands.extend(parts.pop());
                let op = match op {
                    Op::NllLoss(loss) => Op::NllSum(NllSum {
                        ignore: loss.ignore,
                    }),
                    op => op,
                };
                parts.push(self.add(op, &operands, name, node)?);
            }
        }
        Ok(())
    }

    /// The operands of a node in a chunk: values that the chunk computed, rows of a whole value, or
    /// whole values.
    fn operands(
        &mut self,
        chunk: &mut Chunk,
        node: Node,
        part: Part,
    ) -> Result<Vec<Value>, graph::Error> {
        let NodeData { op, inputs, .. } = self.graph.nodes[node].clone();
        let sliced = self.operands_with_rows(&op, inputs.len(), part);
        let mut operands = vec![];
        for (i, value) in inputs.into_iter().enumerate() {
            let own = match chunk.here.get(&value) {
                Some(&own) => own,
                None if sliced.contains(&i) => {
                    // Sizes of types are far below the largest i64.
                    let op = Op::Slice(Slice {
                        dim: 0,
                        end: chunk.rows.end as i64,
                        start: chunk.rows.start as i64,
                        step: 1,
                    });
                    let name = &self.graph.values[value].name;
                    let name = format!("{name}.rows.{}", chunk.number);
                    let own = self.add(op, &[value], name, node)?;
                    chunk.here.insert(value, own);
                    own
                }
                None => value,
            };
            operands.push(own);
        }
        Ok(operands)
    }

    /// Computes a node's value from its parts; `counted` is the number of targets that count.
    fn join(
        &mut self,
        node: Node,
        part: Part,
        parts: &[Value],
        counted: Value,
    ) -> Result<(), graph::Error> {
        let value = self.graph.nodes[node].outputs[0];
        match part {
            Part::Inner | Part::Sum => {}
            Part::Rows => self.define(value, Op::Cat(Along { dim: 0 }), parts, node),
            Part::Loss => {
                let name = format!("{}.f64", self.graph.values[value].name);
                let is_mean = matches!(&self.graph.nodes[node].op,
                    Op::NllLoss(loss) if loss.reduction == NllLoss::MEAN);
                let loss = if is_mean {
                    self.add(Op::Div, &[parts[0], counted], name, node)?
                } else {
                    parts[0]
                };
                let op = cast(self.graph.values[value].ty.dtype());
                self.define(value, op, &[loss], node);
            }
        }
        Ok(())
    }

    /// The operands of a region's node of which a chunk reads only its own rows, by position.
    fn operands_with_rows(&self, op: &Op, n: usize, part: Part) -> Vec<usize> {
        match (part, op) {
            (Part::Loss | Part::Sum, _) => vec![0, 1],
            (_, Op::NllLossBwd(_)) => vec![1],
            (_, Op::Matmul(_) | Op::Addmm(_)) => vec![n - 2],
            // For other nodes, the operands with rows are values of the region.
            _ => vec![],
        }
    }
}

fn cast(dtype: DType) -> Op {
    Op::Cast(Cast { dtype })
}

/// The op for this number of rows. In a region, only the derivative of the loss has the shape of
/// its result as an attribute.
fn with_rows(mut op: Op, rows: u64) -> Op {
    if let Op::NllLossBwd(loss) = &mut op {
        loss.shape[0] = rows as i64;
    }
    op
}
