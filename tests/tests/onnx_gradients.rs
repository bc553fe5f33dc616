//! Derivatives of the `onnx` package's node tests: every floating-point input of a case counts as
//! a parameter, and its gradient is compared with central differences. The graph is computed in
//! f64, and the loss is the sum of its floating-point outputs times fixed numbers.
//!
//! `tests/data/onnx/underived.txt` lists the cases that run and are not compared, with the reasons.
//! `BLESS=1 cargo test -p lighterage-tests onnx_gradients` writes it anew.

use crate::onnx_nodes::{cases, is_listed, numbers, options, packed};
use ir::graph::{Def, Output};
use ir::op::OpKind;
use ir::op::attrs::{Reduction, Sizes};
use ir::{Attr, DType, Graph, Op, Phase, StateKind, Table, TensorType, Value};
use lighterage_tests::evaluate::{self, Tensors};
use lighterage_tests::numbers::Random;
use passes::graph::autodiff::{self, AutodiffError};
use passes::graph::optimizer::{self, Optimizer};
use rayon::prelude::*;
use safetensors::SafeTensors;

/// The number of cases that are compared at least. It may only rise.
const LEAST: usize = 1171;
/// Half of the distance between the two points of a central difference, for numbers near 1.
const STEP: f64 = 1e-6;
/// The allowed error, as a share of what the difference sums up, and of the loss.
const CLOSE: f64 = 1e-6;
/// Points that are tried until the loss is a number: some functions have borders.
const POINTS: u64 = 4;

/// A case in f64, with a loss.
struct Case {
    graph: Graph,
    states: Tensors,
    inputs: Tensors,
}

/// Why a case is not compared, or what is wrong with it.
enum Failure {
    Without(String),
    Wrong(String),
}

fn wrong(e: impl std::fmt::Display) -> Failure {
    Failure::Wrong(e.to_string())
}

fn bytes(numbers: &[f64]) -> Vec<u8> {
    numbers.iter().flat_map(|x| x.to_le_bytes()).collect()
}

fn floats(bytes: &[u8]) -> Vec<f64> {
    let all = bytes.as_chunks().0.iter();
    all.map(|&b| f64::from_le_bytes(b)).collect()
}

/// The type with f64 in place of other floats.
fn wide(ty: &TensorType) -> TensorType {
    let dtype = if ty.dtype().is_float() {
        DType::F64
    } else {
        ty.dtype()
    };
    TensorType::new(dtype, ty.shape().to_vec()).expect("a type of the same shape")
}

impl Case {
    /// `None` if the case was refused when it was read.
    fn read(file: &SafeTensors<'_>, case: &str) -> Option<Result<Case, Failure>> {
        let model = file.tensor(&format!("{case}/model")).ok()?;
        let model = onnx::read_bytes(model.data(), case, &options()).ok()?;
        let is_run = model.unsupported.is_empty();
        is_run.then(|| Case::of(file, case, &model))
    }

    fn of(file: &SafeTensors<'_>, case: &str, model: &onnx::Model) -> Result<Case, Failure> {
        let mut made = Case {
            graph: Graph::new(case),
            states: Tensors::new(),
            inputs: Tensors::new(),
        };
        let old = &model.graph;
        let mut new: Table<Value, Option<Value>> = Table::filled(old.values.len(), None);
        for (value, data) in old.values.iter() {
            let (name, ty) = (data.name.clone(), wide(&data.ty));
            let given = match data.def {
                Def::Input(_) => {
                    let given = file.tensor(&format!("{case}/in/{name}")).map_err(wrong)?;
                    (given.dtype(), given.data().to_vec())
                }
                Def::State(state) => {
                    let path = &old.states[state].path;
                    let Some(tensor) = model.tensors.get(path) else {
                        return Err(Failure::Without("draws random numbers".into()));
                    };
                    (safe(tensor.ty.dtype()), tensor.data.clone())
                }
                _ => continue,
            };
            let is_float = data.ty.dtype().is_float();
            new[value] = Some(if is_float {
                let numbers = numbers(given.0, &given.1);
                made.states.insert(name.clone(), bytes(&numbers));
                made.graph.add_state(&name, &name, StateKind::Param, ty)
            } else {
                made.inputs.insert(name.clone(), given.1);
                made.graph.add_input(&name, ty)
            });
        }
        for &node in &old.order {
            let node = &old.nodes[node];
            let inputs: Option<Vec<Value>> = node.inputs.iter().map(|&v| new[v]).collect();
            let inputs = inputs.ok_or_else(|| wrong("a value comes too late"))?;
            let names: Vec<String> = node
                .outputs
                .iter()
                .map(|&v| old.values[v].name.clone())
                .collect();
            let op = widened(&node.op).map_err(wrong)?;
            let results = made.graph.add_node(op, &inputs, &names, Phase::Forward, "");
            for (&output, result) in node.outputs.iter().zip(results.map_err(wrong)?) {
                new[output] = Some(result);
            }
        }
        let outputs = old.outputs.iter().filter_map(|output| new[output.value]);
        made.lose(outputs.collect())?;
        Ok(made)
    }

    /// Adds the loss.
    fn lose(&mut self, outputs: Vec<Value>) -> Result<(), Failure> {
        let mut random = Random(7);
        let mut loss = None;
        for (i, value) in outputs.into_iter().enumerate() {
            let ty = self.graph.values[value].ty.clone();
            if !ty.dtype().is_float() {
                continue;
            }
            let shape = vec![ty.numel()];
            let factors: Vec<f64> = (0..ty.numel()).map(|_| random.unit()).collect();
            let name = format!("factors{i}");
            self.inputs.insert(name.clone(), bytes(&factors));
            let factors = TensorType::new(DType::F64, shape.clone()).map_err(wrong)?;
            let factors = self.graph.add_input(&name, factors);
            let mut node = |op, inputs: &[Value], name: String| {
                let made = self.graph.add_node(op, inputs, &[name], Phase::Forward, "");
                made.map(|made| made[0]).map_err(wrong)
            };
            let shape = vec![shape[0] as i64];
            let y = node(Op::Reshape(Sizes { shape }), &[value], format!("flat{i}"))?;
            let y = node(Op::Mul, &[y, factors], format!("weighed{i}"))?;
            let all = Reduction {
                dims: vec![0],
                keepdim: false,
            };
            let y = node(Op::Sum(all), &[y], format!("sum{i}"))?;
            loss = Some(match loss {
                Some(loss) => node(Op::Add, &[loss, y], format!("loss{i}"))?,
                None => y,
            });
        }
        let value = loss.ok_or_else(|| Failure::Without("has no floating-point output".into()))?;
        if self.states.is_empty() {
            return Err(Failure::Without("has no floating-point input".into()));
        }
        let name = autodiff::LOSS.to_string();
        self.graph.outputs = vec![Output { name, value }];
        Ok(())
    }

    fn loss(&self, states: &Tensors) -> Result<f64, Failure> {
        let found = evaluate::step(&self.graph, &mut states.clone(), &self.inputs);
        Ok(floats(&found.map_err(wrong)?[autodiff::LOSS])[0])
    }

    /// The gradients by name; `None` if the loss depends on no parameter.
    fn backward(&self) -> Result<Option<Graph>, Failure> {
        let mut graph = self.graph.clone();
        match autodiff::run(&mut graph, true) {
            Ok(()) => (),
            Err(AutodiffError::Independent(_)) => return Ok(None),
            Err(error) => {
                let error = error.to_string();
                let (_, why) = error.split_once(", ").unwrap_or(("", &error));
                return Err(Failure::Without(why.into()));
            }
        }
        if let Some(finding) = ir::verify::graph(&graph).first() {
            return Err(wrong(finding));
        }
        optimizer::run(&mut graph, Optimizer::None).map_err(wrong)?;
        Ok(Some(graph))
    }

    /// The parameters near those of the case, where most functions have a derivative.
    fn point(&self, seed: u64) -> Tensors {
        let mut random = Random(seed);
        let mut near = |x: f64| match x.is_finite() {
            true => x + (0.01 + 0.02 * x.abs()) * random.unit(),
            // The border of a mask stays one.
            false => x,
        };
        let states = self.states.iter().map(|(name, data)| {
            let numbers: Vec<f64> = floats(data).into_iter().map(&mut near).collect();
            (name.clone(), bytes(&numbers))
        });
        states.collect()
    }

    fn compare(&self) -> Result<(), Failure> {
        let backward = self.backward()?;
        let mut at = None;
        for seed in 0..POINTS {
            let states = self.point(seed);
            let loss = self.loss(&states)?;
            if loss.is_finite() {
                at = Some((states, loss));
                break;
            }
        }
        let none = || Failure::Without("the loss is infinite or no number".into());
        let (states, loss) = at.ok_or_else(none)?;
        let found = match &backward {
            Some(graph) => {
                evaluate::step(graph, &mut states.clone(), &self.inputs).map_err(wrong)?
            }
            None => Tensors::new(),
        };
        let mut random = Random(11);
        for (name, data) in &states {
            let x = floats(data);
            let gradient = match found.get(&format!("grad.{name}")) {
                Some(gradient) => floats(gradient),
                None => vec![0.0; x.len()],
            };
            let mut pairs = gradient.iter().zip(&x);
            if pairs.any(|(gradient, x)| gradient.is_nan() && x.is_finite()) {
                return Err(Failure::Without("the gradient is no number".into()));
            }
            // Two directions in which all numbers change, and some in which one does.
            for i in 0..6 {
                let alone = random.next() as usize % x.len().max(1);
                let direction = |j: usize, unit: f64| match i {
                    0 | 1 => unit,
                    _ => f64::from(u8::from(j == alone)),
                };
                let by: Vec<f64> = (0..x.len())
                    .map(|j| match x[j].is_finite() {
                        true => direction(j, random.unit()) * (1.0 + x[j].abs()),
                        false => 0.0,
                    })
                    .collect();
                let loss_at = |step: f64| {
                    let moved: Vec<f64> = x.iter().zip(&by).map(|(x, by)| x + step * by).collect();
                    let mut states = states.clone();
                    states.insert(name.clone(), bytes(&moved));
                    self.loss(&states)
                };
                let across = |step: f64| Ok((loss_at(step)? - loss_at(-step)?) / (2.0 * step));
                let terms = gradient.iter().zip(&by);
                let terms = terms.map(|(g, by)| if *by == 0.0 { 0.0 } else { g * by });
                let (sum, size) =
                    terms.fold((0.0, 1.0), |(sum, size), x| (sum + x, size + x.abs()));
                let is_near =
                    |difference: f64| (difference - sum).abs() <= CLOSE * (size + loss.abs());
                let near = across(STEP)?;
                if is_near(near) {
                    continue;
                }
                // Where a function bends much, two differences have less error than one.
                let far = across(2.0 * STEP)?;
                if !is_near((4.0 * near - far) / 3.0) {
                    return Err(wrong(format!("{name}: {sum}, the difference {near}")));
                }
            }
        }
        Ok(())
    }
}

/// The op on f64.
fn widened(op: &Op) -> Result<Op, String> {
    let attrs = op.attrs().into_iter().map(|(key, attr)| {
        let attr = match attr {
            Attr::Type(dtype) if dtype.is_float() => Attr::Type(DType::F64),
            attr => attr,
        };
        (key.to_string(), attr)
    });
    match op.kind() {
        OpKind::Extern | OpKind::Fused => Ok(op.clone()),
        kind => Op::of(kind, attrs.collect()).map_err(|e| e.to_string()),
    }
}

fn safe(dtype: DType) -> safetensors::Dtype {
    match dtype {
        DType::Bool => safetensors::Dtype::BOOL,
        DType::U8 => safetensors::Dtype::U8,
        DType::I8 => safetensors::Dtype::I8,
        DType::I16 => safetensors::Dtype::I16,
        DType::I32 => safetensors::Dtype::I32,
        DType::I64 => safetensors::Dtype::I64,
        DType::F16 => safetensors::Dtype::F16,
        DType::BF16 => safetensors::Dtype::BF16,
        DType::F32 => safetensors::Dtype::F32,
        DType::F64 => safetensors::Dtype::F64,
        DType::F8E4M3 => safetensors::Dtype::F8_E4M3,
        DType::F8E5M2 => safetensors::Dtype::F8_E5M2,
    }
}

#[test]
fn derivatives_of_node_tests_are_differences() {
    let bytes = packed();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let (cases, _) = cases(&bytes);
    let outcome = |case: &String| {
        let read = Case::read(&file, case)?;
        Some(read.and_then(|read| read.compare()))
    };
    let outcomes: Vec<_> = cases.par_iter().map(outcome).collect();
    let outcomes = cases.iter().zip(outcomes);
    let outcomes = outcomes.filter_map(|(case, outcome)| Some((case, outcome?)));
    let (mut without, mut faults, mut n) = (String::new(), vec![], 0);
    for (case, outcome) in outcomes {
        match outcome {
            Ok(()) => n += 1,
            Err(Failure::Without(why)) => without.push_str(&format!("{case}: {why}\n")),
            Err(Failure::Wrong(why)) => faults.push(format!("{case}: {why}")),
        }
    }
    let faults = (faults.len(), faults.join("\n"));
    assert_eq!(faults.0, 0, "of {n} right ones:\n{}", faults.1);
    is_listed("underived.txt", &without);
    assert!(n >= LEAST, "{n} cases are compared");
}
