//! Adds adapters of low rank to the products of a forward (Hu et al., 2021, "LoRA"): beside a
//! matrix W, `y = x W` becomes `y = x W + s (x A) B`, where A has few columns and B few rows. Some
//! elements of that x may be dropped. W and all other parameters are frozen.
//!
//! Names are those of PEFT, so that its files fit: the matrices of the module `q` are
//! `base_model.model.q.lora_A.default.weight` of `[rank, in]`, and `lora_B` of `[out, rank]`.

use super::generator::Generator;
use ir::graph;
use ir::op::Number;
use ir::op::attrs::{Dropout, Product, Scalar};
use ir::types::TypeError;
use ir::{Graph, Node, Op, State, StateKind, TensorType, Value};
use std::collections::BTreeMap;
use thiserror::Error;

/// Adapters that are asked for.
#[derive(Clone, PartialEq, Debug)]
pub struct Lora {
    /// Rows of A and columns of B.
    pub rank: u64,
    /// The factor of what adapters add.
    pub scale: f64,
    /// The share of the elements of an adapter's operand that is dropped, from 0 to less than 1.
    pub dropout: f64,
    /// The modules that get one, by their path's last names. If it is empty, all but the head and
    /// the routers of experts, as with PEFT's `all-linear`.
    pub targets: Vec<String>,
}

/// The path of the generator's state if the step has none: the same as in models with dropout.
const RNG: &str = "rng";

/// The states of an adapter.
#[derive(Clone, PartialEq, Debug)]
pub struct Adapter {
    /// The path of A, `[rank, in]`, and of B, `[out, rank]`.
    pub paths: [String; 2],
    /// Their types.
    pub types: [TensorType; 2],
}

/// Why a graph gets no adapters.
#[derive(Clone, PartialEq, Debug, Error)]
pub enum LoraError {
    /// The graph has a backward, which would lack the adapters.
    #[error(
        "adapters are added to a forward, and the model has a backward; export the forward alone, \
         with torch.export, or let PEFT add the adapters before the export"
    )]
    HasGradients,
    /// A name stands for no module with a product.
    #[error("{target:?} is no module with a matrix of its own; there are {known}")]
    NoModule {
        /// The name.
        target: String,
        /// Last names of modules that have one.
        known: String,
    },
    /// No module but the head, and routers, has a matrix that only products read.
    #[error(
        "no module but heads and routers has a matrix that only products read; targets=NAME gives \
         them adapters"
    )]
    Nothing,
    /// The rank is 0, or larger than what it stands for.
    #[error(
        "rank {rank} of {module}, which makes {outer} columns of {inner}; the rank is at least 1, \
         and at most the smaller of the two"
    )]
    Rank {
        /// The rank.
        rank: u64,
        /// The module.
        module: String,
        /// Columns of its operand.
        inner: u64,
        /// Columns of its result.
        outer: u64,
    },
    /// The types of states are not possible.
    #[error(transparent)]
    Type(#[from] TypeError),
    /// A node does not fit the graph.
    #[error(transparent)]
    Graph(#[from] graph::Error),
}

/// A module with a matrix of its own.
struct Linear {
    module: String,
    /// The products with the matrix, each with its operand x.
    products: Vec<(Node, Value)>,
    inner: u64,
    outer: u64,
    ty: TensorType,
}

/// Adds adapters and freezes all other parameters; returns the adapters.
pub fn run(graph: &mut Graph, lora: &Lora) -> Result<Vec<Adapter>, LoraError> {
    if !graph.gradients.is_empty() {
        return Err(LoraError::HasGradients);
    }
    let linears = linears(graph);
    let known = || {
        let mut names: Vec<&str> = linears.iter().map(|linear| last(&linear.module)).collect();
        names.sort_unstable();
        names.dedup();
        names.join(", ")
    };
    for target in &lora.targets {
        if !linears.iter().any(|linear| is_in(&linear.module, target)) {
            let (target, known) = (target.clone(), known());
            return Err(LoraError::NoModule { target, known });
        }
    }
    let chosen: Vec<&Linear> = match lora.targets.is_empty() {
        true => linears
            .iter()
            .filter(|linear| !is_head(graph, linear) && !is_router(graph, linear))
            .collect(),
        false => {
            let is_target = |linear: &&Linear| {
                let mut targets = lora.targets.iter();
                targets.any(|target| is_in(&linear.module, target))
            };
            linears.iter().filter(is_target).collect()
        }
    };
    if chosen.is_empty() {
        return Err(LoraError::Nothing);
    }
    for state in graph.states.values_mut() {
        if state.kind == StateKind::Param {
            state.kind = StateKind::Buffer;
        }
    }
    let mut generator = match lora.dropout {
        0.0 => None,
        _ => Some(Generator::of(graph, RNG)?),
    };
    chosen
        .into_iter()
        .map(|linear| add(graph, linear, lora, generator.as_mut()))
        .collect()
}

/// The modules whose matrix is read by nothing but products.
fn linears(graph: &Graph) -> Vec<Linear> {
    let mut of: BTreeMap<State, Option<Linear>> = BTreeMap::new();
    // The matrices, and what they are transposed.
    let mut matrices: BTreeMap<Value, State> = graph
        .states
        .iter()
        .filter(|(_, data)| data.kind == StateKind::Param && data.before == data.after)
        .map(|(state, data)| (data.before, state))
        .collect();
    for &node in &graph.order {
        let data = &graph.nodes[node];
        for (i, &input) in data.inputs.iter().enumerate() {
            let Some(&state) = matrices.get(&graph.root(input)) else {
                continue;
            };
            let known = of.entry(state).or_insert_with(|| linear(graph, state));
            if matches!(&data.op, Op::Permute(order) if order.dims == [1, 0]) {
                matrices.insert(data.outputs[0], state);
                continue;
            }
            let product = product(graph, node, i).filter(|_| input == graph.root(input));
            match (known.as_mut(), product) {
                (Some(linear), Some((x, inner, outer)))
                    if (linear.inner, linear.outer) == (0, 0)
                        || (linear.inner, linear.outer) == (inner, outer) =>
                {
                    (linear.inner, linear.outer) = (inner, outer);
                    linear.products.push((node, x));
                }
                // Another reader, or a reader of another kind.
                _ => *known = None,
            }
        }
    }
    of.into_values().flatten().collect()
}

/// The module of a state that is its matrix, without products yet.
fn linear(graph: &Graph, state: State) -> Option<Linear> {
    let data = &graph.states[state];
    let ty = graph.values[data.before].ty.clone();
    let module = data.path.strip_suffix(".weight")?;
    (ty.rank() == 2 && ty.dtype().is_float()).then(|| Linear {
        module: module.to_string(),
        products: vec![],
        inner: 0,
        outer: 0,
        ty,
    })
}

/// If operand `i` is the matrix of a product `x W`: x, its columns and those of the result.
fn product(graph: &Graph, node: Node, i: usize) -> Option<(Value, u64, u64)> {
    let data = &graph.nodes[node];
    let (x, of) = match &data.op {
        Op::Matmul(product) if i == 1 => (data.inputs[0], product),
        Op::Addmm(product) if i == 2 => (data.inputs[1], product),
        _ => return None,
    };
    let shape = graph.values[data.inputs[i]].ty.shape();
    let (&[_, inner], &[rows, columns]) = (graph.values[x].ty.shape(), shape) else {
        return None;
    };
    let outer = if of.tb { rows } else { columns };
    (!of.ta).then_some((x, inner, outer))
}

/// True if a module's result is an output of the graph, as that of a language model's head.
fn is_head(graph: &Graph, linear: &Linear) -> bool {
    linear.products.iter().any(|&(node, _)| {
        let result = graph.nodes[node].outputs[0];
        let mut outputs = graph.outputs.iter();
        outputs.any(|output| graph.root(output.value) == result)
    })
}

/// True for the matrix that chooses among experts, which lie beside it. It is no linear layer in
/// transformers, so PEFT gives it no adapter.
fn is_router(graph: &Graph, linear: &Linear) -> bool {
    linear.module.rsplit_once('.').is_some_and(|(parent, _)| {
        let experts = format!("{parent}.experts.");
        let mut states = graph.states.values();
        states.any(|state| state.path.starts_with(&experts))
    })
}

/// True if a module has this name, or ends with it: `q_proj`, `self_attn.q_proj`.
fn is_in(module: &str, target: &str) -> bool {
    let rest = module.strip_suffix(target);
    rest.is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
}

fn last(module: &str) -> &str {
    module.rsplit('.').next().unwrap_or(module)
}

/// Adds the adapter of a module. With a generator, it drops elements of its operand.
fn add(
    graph: &mut Graph,
    linear: &Linear,
    lora: &Lora,
    mut generator: Option<&mut Generator>,
) -> Result<Adapter, LoraError> {
    let (rank, inner, outer) = (lora.rank, linear.inner, linear.outer);
    if rank == 0 || inner.min(outer) < rank {
        return Err(LoraError::Rank {
            rank,
            module: linear.module.clone(),
            inner,
            outer,
        });
    }
    let mut added = vec![];
    for (name, shape) in [("lora_A", [rank, inner]), ("lora_B", [outer, rank])] {
        let ty = TensorType::new(linear.ty.dtype(), shape.to_vec())?;
        let path = format!("base_model.model.{}.{name}.default.weight", linear.module);
        let name = format!("{}.{name}", linear.module.replace('.', "_"));
        let value = graph.add_state(name, path.clone(), StateKind::Param, ty.clone());
        added.push((path, ty, value));
    }
    let [(a_path, a_ty, a), (b_path, b_ty, b)] =
        <[_; 2]>::try_from(added).expect("an adapter has two matrices");
    let by_rows = || Product {
        ta: false,
        tb: true,
    };
    let mut edit = graph.edit();
    for &(node, x) in &linear.products {
        let data = &edit.graph().nodes[node];
        let (op, inputs, result) = (data.op.clone(), data.inputs.clone(), data.outputs[0]);
        let name = edit.graph().values[result].name.clone();
        let mut insert = |op: Op, inputs: &[Value], parts: &[&str]| {
            let names: Vec<String> = parts.iter().map(|part| format!("{name}.{part}")).collect();
            let node = edit.insert_before(node, op, inputs, &names)?;
            Ok::<Value, graph::Error>(edit.graph().nodes[node].outputs[0])
        };
        let y = insert(op, &inputs, &["base"])?;
        let x = match &mut generator {
            Some(generator) => {
                let (p, stream) = (lora.dropout, generator.stream());
                let dropout = Op::Dropout(Dropout { p, stream });
                insert(dropout, &[x, generator.rng], &["kept", "mask"])?
            }
            None => x,
        };
        let narrow = insert(Op::Matmul(by_rows()), &[x, a], &["lora_A"])?;
        let mut more = insert(Op::Matmul(by_rows()), &[narrow, b], &["lora_B"])?;
        if lora.scale != 1.0 {
            let value = Number::Float(lora.scale);
            more = insert(Op::MulScalar(Scalar { value }), &[more], &["lora"])?;
        }
        edit.set_op(node, Op::Add, vec![y, more]);
    }
    edit.finish();
    Ok(Adapter {
        paths: [a_path, b_path],
        types: [a_ty, b_ty],
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use ir::text::{parse_graph, print_graph};

    /// `emb` is read by index, and `head` computes the output.
    const GRAPH: &str = "graph g {
        input %x : i64[3]
        state param %e -> %e : f32[9,4] \"emb.weight\"
        state param %q -> %q : f32[6,4] \"h.q.weight\"
        state param %b -> %b : f32[6] \"h.q.bias\"
        state param %c -> %c : f32[6,4] \"h.c.weight\"
        state param %o -> %o : f32[9,4] \"head.weight\"
        fwd emb %h = index %e, %x : f32[3,4]
        fwd h.q %y = addmm %b, %h, %q ta=false tb=true : f32[3,6]
        fwd h.c %z = matmul %y, %c ta=false tb=false : f32[3,4]
        fwd head %l = matmul %z, %o ta=false tb=true : f32[3,9]
        output logits = %l
    }";

    fn added(targets: &[&str]) -> Result<(Graph, Vec<Adapter>), LoraError> {
        let mut graph = parse_graph(GRAPH).unwrap();
        let lora = Lora {
            rank: 2,
            scale: 0.5,
            dropout: 0.0,
            targets: targets.iter().map(|name| name.to_string()).collect(),
        };
        let adapters = run(&mut graph, &lora)?;
        assert!(ir::verify::graph(&graph).is_empty());
        Ok((graph, adapters))
    }

    #[test]
    fn a_product_gets_two_narrow_ones_beside_it() {
        let (graph, adapters) = added(&["q"]).unwrap();
        let [adapter] = &adapters[..] else {
            panic!("{adapters:?}");
        };
        let path = |part: &str| format!("base_model.model.h.q.{part}.default.weight");
        assert_eq!(adapter.paths, [path("lora_A"), path("lora_B")]);
        let text = print_graph(&graph);
        for line in [
            "%y.base = addmm %b, %h, %q ta=false tb=true",
            "%y.lora_A = matmul %h, %h_q.lora_A ta=false tb=true",
            "%y.lora_B = matmul %y.lora_A, %h_q.lora_B ta=false tb=true",
            "%y.lora = mul_scalar %y.lora_B value=0.5",
            "%y = add %y.base, %y.lora",
        ] {
            assert!(text.contains(line), "{line} in\n{text}");
        }
        let trained = graph.states.values().filter(|s| s.kind == StateKind::Param);
        assert_eq!(trained.count(), 2);
    }

    /// Each adapter drops others, and draws them from the model's own generator if it has one.
    #[test]
    fn what_an_adapter_reads_may_be_dropped() {
        let own = GRAPH.replace(
            "fwd emb %h",
            "state rng %rng -> %next : i64[2] \"rng\"
             opt - %next = rng_next %rng : i64[2]
             fwd - %noise = rand %rng dtype=f32 shape=[2] stream=4 : f32[2]
             fwd emb %h",
        );
        for (text, first) in [(GRAPH, 0), (&own, 5)] {
            let mut graph = parse_graph(text).unwrap();
            let lora = Lora {
                rank: 2,
                scale: 1.0,
                dropout: 0.25,
                targets: vec![],
            };
            run(&mut graph, &lora).unwrap();
            assert!(ir::verify::graph(&graph).is_empty());
            let text = print_graph(&graph);
            for line in [
                format!("%y.kept, %y.mask = dropout %h, %rng p=0.25 stream={first}"),
                format!("dropout %y, %rng p=0.25 stream={}", first + 1),
                "matmul %y.kept, %h_q.lora_A".into(),
            ] {
                assert!(text.contains(&line), "{line} in\n{text}");
            }
            let generators = graph.states.values().filter(|s| s.kind == StateKind::Rng);
            assert_eq!(generators.count(), 1);
        }
    }

    /// A matrix that is stored by rows of the operand has an adapter by PEFT's shapes, too.
    #[test]
    fn all_modules_but_the_head_have_adapters() {
        let (_, adapters) = added(&[]).unwrap();
        let shapes = adapters.iter().map(|adapter| {
            let [a, b] = &adapter.types;
            [a.shape().to_vec(), b.shape().to_vec()]
        });
        let wanted = [[vec![2, 4], vec![6, 2]], [vec![2, 6], vec![4, 2]]];
        assert_eq!(shapes.collect::<Vec<_>>(), wanted);
    }

    /// As ONNX files have it.
    #[test]
    fn a_matrix_may_be_read_transposed() {
        let text = "graph g {
            input %x : f32[3,4]
            state param %q -> %q : f32[6,4] \"q.weight\"
            fwd - %t = permute %q dims=[1,0] : f32[4,6]
            fwd q %y = matmul %x, %t ta=false tb=false : f32[3,6]
            fwd - %z = relu %y : f32[3,6]
            output z = %z
        }";
        let mut graph = parse_graph(text).unwrap();
        let lora = Lora {
            rank: 1,
            scale: 1.0,
            dropout: 0.0,
            targets: vec![],
        };
        let adapters = run(&mut graph, &lora).unwrap();
        assert!(ir::verify::graph(&graph).is_empty());
        let [a, b] = &adapters[0].types;
        assert_eq!((a.shape(), b.shape()), (&[1, 4][..], &[6, 1][..]));
        // An exponential reads it, too.
        let text = text.replace("relu %y : f32[3,6]", "exp %t : f32[4,6]");
        let error = run(&mut parse_graph(&text).unwrap(), &lora).unwrap_err();
        assert_eq!(error, LoraError::Nothing);
    }

    #[test]
    fn a_router_has_none_unless_it_is_asked_for() {
        let text = GRAPH.replace("h.c.weight", "h.experts.down_proj");
        let added = |targets: &[&str]| {
            let mut graph = parse_graph(&text).unwrap();
            let targets = targets.iter().map(|name| name.to_string()).collect();
            let lora = Lora {
                rank: 2,
                scale: 1.0,
                dropout: 0.0,
                targets,
            };
            run(&mut graph, &lora).map(|adapters| adapters.len())
        };
        assert_eq!(added(&[]), Err(LoraError::Nothing));
        assert_eq!(added(&["q"]), Ok(1));
    }

    #[test]
    fn a_module_that_cannot_have_one_is_named() {
        for name in ["emb", "k", "ead"] {
            let error = added(&["q", name]).unwrap_err().to_string();
            assert!(
                error.starts_with(&format!("{name:?} is no module")),
                "{error}"
            );
            assert!(error.ends_with("c, head, q"), "{error}");
        }
        assert!(added(&["h.q", "head"]).is_ok());
    }
}
