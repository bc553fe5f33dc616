//! A step, as ops that can be run one by one.

use crate::{Error, Found, Request};
use artifact::Object;
use codegen::kernels::{Generated, Target};
use ir::graph::Def;
use ir::schedule::{InstrKind, Why};
use ir::{Loc, Plan, StateKind, Value};
use passes::cost::Roofline;
use passes::cost::profile::key;
use passes::graph::optimizer::HYPER;
use passes::pipeline::{self, Compiled, Kernels};
use runtime::profile::{Content, Op, Times};
use std::collections::BTreeMap;

/// A step to be replayed.
pub(crate) struct Step {
    pub(crate) compiled: Compiled,
    /// The ops of the plan in order.
    pub(crate) ops: Vec<Op>,
    /// Their nodes.
    pub(crate) nodes: Vec<ir::Node>,
    /// What says that two of them are equal.
    pub(crate) keys: Vec<String>,
    /// Objects of generated kernels.
    pub(crate) objects: Vec<Object>,
}

impl Step {
    /// Compiles a step with these groups of ops; kernels are generated if a target is given.
    pub(crate) fn new(
        request: &Request<'_>,
        kernels: Kernels,
        target: Option<&Target>,
    ) -> Result<Step, Error> {
        let options = request.options(kernels);
        let cost = Roofline::new(request.device);
        let graph = request.graph.clone();
        let compiled = pipeline::compile(graph, &options, request.device, &cost, &mut |_| ())?;
        let (graph, schedule) = (&compiled.program.graph, &compiled.program.schedule);
        let plan = plan(&compiled);
        let place = |loc: Loc| artifact::Place {
            pool: 0,
            offset: plan.address(loc),
        };
        let operand = |(&value, &loc): (&Value, &Loc)| {
            let ty = &graph.values[value].ty;
            artifact::Operand {
                place: place(loc),
                dtype: codegen::dtype(ty.dtype()),
                shape: ty.shape().to_vec(),
            }
        };
        let (mut ops, mut nodes) = (vec![], vec![]);
        let mut generated: Vec<Generated> = vec![];
        let mut objects: BTreeMap<String, usize> = BTreeMap::new();
        for data in schedule.instrs.values() {
            let InstrKind::Run {
                node,
                args,
                outs,
                scratch,
                ..
            } = &data.kind
            else {
                continue;
            };
            let op = &graph.nodes[*node];
            let attrs = op
                .op
                .attrs()
                .iter()
                .map(|(&key, attr)| (key.to_string(), codegen::attr(attr)))
                .collect();
            let scratch = scratch.map(|loc| artifact::Range {
                place: place(loc),
                bytes: schedule.buffers[loc.buffer].bytes - loc.offset,
            });
            let bytes = scratch.map_or(0, |scratch| scratch.bytes);
            let kernel = codegen::generated(graph, *node, bytes, target, false)?;
            let code = kernel.map(|kernel| {
                let object = *objects
                    .entry(kernel.name.clone())
                    .or_insert(generated.len());
                let [ins, outs] = [&op.inputs, &op.outputs].map(|values| graph.types(values));
                let code = codegen::code(&kernel, &ins, &outs, object);
                if object == generated.len() {
                    generated.push(kernel);
                }
                code
            });
            nodes.push(*node);
            ops.push(Op {
                kernel: artifact::Kernel {
                    op: op.op.name().into(),
                    attrs,
                    code,
                },
                ins: op.inputs.iter().zip(args).map(operand).collect(),
                outs: op.outputs.iter().zip(outs).map(operand).collect(),
                scratch,
            });
        }
        let objects = match target {
            Some(target) => {
                let generated: Vec<_> = generated.iter().collect();
                codegen::objects(&generated, target, &compiled.options.cancel)?
            }
            None => vec![],
        };
        let keys = nodes.iter().map(|&node| key(graph, node)).collect();
        Ok(Step {
            compiled,
            ops,
            nodes,
            keys,
            objects,
        })
    }

    /// The times of all ops, from those of a sample and what was known before.
    pub(crate) fn times(&self, sample: Times, found: &BTreeMap<String, Found>) -> Times {
        let none = || Err("it was not run".to_string());
        let micros = |key: &String| found.get(key).cloned().unwrap_or_else(none);
        Times {
            micros: self.keys.iter().map(micros).collect(),
            ..sample
        }
    }

    /// The initial data that the step cannot replace by random numbers: the optimizer's options,
    /// and moments.
    pub(crate) fn contents(&self) -> BTreeMap<u64, Content> {
        let compiled = &self.compiled;
        let optimizer = compiled.options.optimizer;
        let (graph, schedule) = (&compiled.program.graph, &compiled.program.schedule);
        let plan = plan(compiled);
        let mut contents = BTreeMap::new();
        for &(value, loc) in &schedule.entry {
            match graph.values[value].def {
                Def::State(state) if graph.states[state].kind == StateKind::Moment => {
                    contents.insert(plan.address(loc), Content::Zeros);
                }
                Def::Input(_) if graph.values[value].name == HYPER => {
                    let options = optimizer
                        .options()
                        .iter()
                        .flat_map(|(_, value)| value.to_le_bytes())
                        .collect();
                    let fed = schedule
                        .instrs
                        .values()
                        .filter(|data| data.why == Why::Feed);
                    for data in fed {
                        if let InstrKind::Copy { src, dst, .. } = data.kind
                            && src == loc
                        {
                            contents.insert(plan.address(dst), Content::Bytes(options));
                            break;
                        }
                    }
                }
                _ => {}
            }
        }
        contents
    }
}

fn plan(compiled: &Compiled) -> &Plan {
    let plan = compiled.program.plan.as_ref();
    plan.expect("a compiled program should have a plan")
}
