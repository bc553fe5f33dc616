//! The updates of a graph's parameters: what all of them read, and for each parameter the numbers
//! that are updated, their update, and the new values of its states.

use super::rounding::Random;
use super::rules::{Moment, Rule, Update};
use super::{Attach, AttachError, GRAD_NORM, MASTER, group_of, module_of, norm, scaling};
use crate::graph::scale::SCALE;
use ir::graph::{self, Output, StateData};
use ir::op::Op;
use ir::op::attrs::Cast;
use ir::{DType, Graph, Phase, State, StateKind, TensorType, Value};
use std::collections::BTreeMap;

/// Adds nodes of a module.
pub(super) struct Nodes<'g> {
    pub(super) graph: &'g mut Graph,
    pub(super) module: &'g str,
}

impl Nodes<'_> {
    /// Adds a node with one result.
    pub(super) fn add(
        &mut self,
        op: Op,
        inputs: &[Value],
        name: &str,
    ) -> Result<Value, graph::Error> {
        let names = [name.to_string()];
        let (phase, module) = (Phase::Optimizer, self.module);
        Ok(self.graph.add_node(op, inputs, &names, phase, module)?[0])
    }

    /// A value in another type.
    pub(super) fn cast(
        &mut self,
        value: Value,
        dtype: DType,
        name: &str,
    ) -> Result<Value, graph::Error> {
        if self.graph.values[value].ty.dtype() == dtype {
            return Ok(value);
        }
        self.add(Op::Cast(Cast { dtype }), &[value], name)
    }
}

/// What all updates read.
#[derive(Clone, Copy, Default)]
pub(super) struct Factors {
    /// The factor of gradients, if they have one: f32, or f64 if a gradient is.
    pub(super) scale: Option<Value>,
    /// True if no state is updated.
    pub(super) skipped: Option<Value>,
}

/// Adds what all updates read.
pub(super) fn factors(
    graph: &mut Graph,
    attach: &Attach,
    gradients: &[(State, Value)],
) -> Result<Factors, AttachError> {
    let Attach {
        clip_norm,
        grad_norm,
        ref loss_scale,
        ..
    } = *attach;
    let state = graph.states.iter().find(|(_, state)| state.path == SCALE);
    let scaled = state.map(|(state, _)| state).zip(loss_scale.as_ref());
    if clip_norm.is_none() && !grad_norm && scaled.is_none() {
        return Ok(Factors::default());
    }
    let mut squares = norm::squares(graph, gradients)?;
    let mut factors = Factors::default();
    if let Some((state, numbers)) = scaled {
        let scaling = scaling::add(graph, state, numbers, &squares)?;
        squares = vec![scaling.squares];
        (factors.scale, factors.skipped) = (Some(scaling.inverse), Some(scaling.skipped));
    }
    if let Some(norm) = clip_norm {
        let is_wide =
            |(_, gradient): &(State, Value)| graph.values[*gradient].ty.dtype() == DType::F64;
        let dtype = if gradients.iter().any(is_wide) {
            DType::F64
        } else {
            DType::F32
        };
        let clip = norm::clip_scale(graph, &squares, norm, dtype)?;
        factors.scale = Some(match factors.scale {
            Some(inverse) => {
                let mut nodes = Nodes { graph, module: "" };
                let inverse = nodes.cast(inverse, dtype, "clip_scale.inverse")?;
                nodes.add(Op::Mul, &[clip, inverse], "clip_scale.unscaled")?
            }
            None => clip,
        });
    }
    if grad_norm {
        let total = match scaled {
            Some(_) => squares[0],
            None => norm::total(graph, &squares)?,
        };
        let (name, value) = (GRAD_NORM.to_string(), norm::root(graph, total)?);
        graph.outputs.push(Output { name, value });
    }
    Ok(factors)
}

/// The updates of a graph's parameters.
pub(super) struct Updates<'a> {
    pub(super) attach: &'a Attach,
    pub(super) rule: Rule,
    /// The options of each group.
    pub(super) hypers: BTreeMap<usize, Value>,
    pub(super) factors: Factors,
    /// The number of the step, from 1, if it is counted.
    pub(super) step: Option<Value>,
    /// The source of random numbers, if parameters are rounded with them.
    pub(super) random: Option<Random>,
    /// See [`Update::shared`].
    pub(super) shared: BTreeMap<(Value, String), Value>,
}

impl Updates<'_> {
    /// Takes the count of steps.
    pub(super) fn count(&mut self, graph: &mut Graph, state: State) -> Result<(), AttachError> {
        let StateData { before, after, .. } = graph.states[state];
        self.step = Some(after);
        let mut nodes = Nodes { graph, module: "" };
        let kept = self.unless_skipped(&mut nodes, before, after)?;
        graph.states[state].after = kept;
        Ok(())
    }

    /// The factor of the gradient of a parameter of a type, in the type of its update.
    fn scale_of(
        &mut self,
        graph: &mut Graph,
        ty: &TensorType,
    ) -> Result<Option<Value>, AttachError> {
        let Some(scale) = self.factors.scale else {
            return Ok(None);
        };
        let dtype = match ty.dtype() {
            DType::F64 => DType::F64,
            _ => DType::F32,
        };
        let name = format!("{}.{dtype}", graph.values[scale].name);
        if let Some(&known) = self.shared.get(&(scale, name.clone())) {
            return Ok(Some(known));
        }
        let cast = Nodes { graph, module: "" }.cast(scale, dtype, &name)?;
        self.shared.insert((scale, name), cast);
        Ok(Some(cast))
    }

    /// The new value of a state, or the old one if updates are left out.
    fn unless_skipped(
        &self,
        nodes: &mut Nodes<'_>,
        before: Value,
        after: Value,
    ) -> Result<Value, graph::Error> {
        let Some(skipped) = self.factors.skipped else {
            return Ok(after);
        };
        let name = format!("{}.kept", nodes.graph.values[after].name);
        nodes.add(Op::Where, &[skipped, before, after], &name)
    }

    /// Adds the update of a parameter.
    pub(super) fn add(
        &mut self,
        graph: &mut Graph,
        state: State,
        mut gradient: Value,
    ) -> Result<(), AttachError> {
        let master = self.attach.master;
        let StateData { path, before, .. } = graph.states[state].clone();
        let name = graph.values[before].name.clone();
        let mut ty = graph.values[before].ty.clone();
        let own = ty.dtype();

        let module = &module_of(&path);

        // The update widens a gradient in half precision: until then it has half the bytes to keep
        // and to move.
        let wide = graph.values[gradient].ty.dtype();
        gradient = norm::narrow(graph, gradient);
        if !master.splits(&ty) {
            let name = format!("{name}.grad.wide");
            gradient = Nodes { graph, module }.cast(gradient, wide, &name)?;
        }

        // What is updated: the parameter, or an f32 instead.
        let (mut parameter, mut updated) = (before, state);
        let is_random = self.attach.rounding.is_random(&ty);
        if is_random {
            ty = TensorType::new(DType::F32, ty.shape())?;
            let mut nodes = Nodes { graph, module };
            parameter = nodes.cast(before, DType::F32, &format!("{name}.f32"))?;
            gradient = nodes.cast(gradient, DType::F32, &format!("{name}.grad.f32"))?;
        }
        if master.widens(&ty) {
            ty = TensorType::new(DType::F32, ty.shape())?;
            updated = graph.states.next_id();
            let (as_name, as_path) = (format!("{MASTER}.{name}"), format!("{MASTER}.{path}"));
            let held = graph.add_state(as_name.clone(), as_path, StateKind::Moment, ty.clone());
            let mut nodes = Nodes { graph, module };
            // Where a master is not of this parameter, because a program wrote to the parameter or
            // the run begins, it becomes the parameter.
            let whole = nodes.cast(before, DType::F32, &format!("{name}.f32"))?;
            let rounded = nodes.cast(held, own, &format!("{as_name}.rounded"))?;
            let is_own = nodes.add(Op::Eq, &[rounded, before], &format!("{as_name}.is_own"))?;
            let inputs = [is_own, held, whole];
            parameter = nodes.add(Op::Where, &inputs, &format!("{as_name}.now"))?;
            gradient = nodes.cast(gradient, DType::F32, &format!("{name}.grad.f32"))?;
        }

        let mut changed = vec![updated];
        let mut moments = vec![];
        let group = group_of(&self.attach.groups, &path);
        let states = match self.rule.whole_moments {
            Some(whole) if self.attach.whole.contains(&group) => whole(&ty)?,
            _ => (self.rule.moments)(&ty, master)?,
        };
        for Moment { name: moment, ty } in states {
            changed.push(graph.states.next_id());
            moments.push(graph.add_state(
                format!("{moment}.{name}"),
                format!("{moment}.{path}"),
                StateKind::Moment,
                ty,
            ));
        }
        let scale = self.scale_of(graph, &ty)?;
        let mut update = Update {
            graph: &mut *graph,
            module: module.clone(),
            parameter,
            gradient,
            moments,
            step: self.step.filter(|_| self.rule.counts_steps),
            hyper: self.hypers[&group],
            scale,
            is_split: master.splits(&ty),
            options: self.rule.options,
            shared: &mut self.shared,
            is_shared: false,
        };
        let mut after = (self.rule.update)(&mut update)?;
        assert_eq!(
            after.len(),
            changed.len(),
            "an update should give the parameter and each moment"
        );
        let mut nodes = Nodes { graph, module };
        let rounded = format!("{name}.rounded");
        if let (true, Some(random)) = (is_random, &mut self.random) {
            after[0] = random.rounded(&mut nodes, after[0], &rounded)?;
        }
        if updated != state {
            changed.push(state);
            after.push(nodes.cast(after[0], own, &rounded)?);
        }
        for (state, after) in changed.into_iter().zip(after) {
            let before = nodes.graph.states[state].before;
            let after = self.unless_skipped(&mut nodes, before, after)?;
            nodes.graph.states[state].after = after;
        }
        Ok(())
    }
}
