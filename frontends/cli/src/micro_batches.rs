//! `--micro-batches auto`: cuts the batch into the number of micro-batches with the fastest step
//! whose plan fits the budget. The model is read again for each number, with a smaller batch.

use crate::args::{Compiling, MOST_MICRO_BATCHES, MicroBatches};
use crate::failure::Failure;
use crate::model::{self, Machine, Model};
use crate::observe::Dumps;
use crate::out;
use crate::size::micros;
use ir::Graph;
use passes::micro_batches::{self, Considered, StepTime};
use passes::pipeline::{Budget, Compiled, Planner};

/// The model and the options with a number of micro-batches, if the user leaves it open; else both
/// as they are.
pub(crate) fn decide(
    model: Model,
    compiling: &Compiling,
    machine: &Machine,
) -> Result<(Model, Compiling), Failure> {
    let mut decided = compiling.clone();
    if compiling.micro_batches != Some(MicroBatches::Auto) {
        return Ok((model, decided));
    }
    let (symbol, batch) = batch_of(&model)?;
    let search = Search {
        model: &model,
        symbol: &symbol,
        batch,
        machine,
        compiling: Compiling {
            dump_ir_after: None,
            dump_dir: None,
            time_passes: false,
            ..compiling.clone()
        },
    };
    let budget = search.budget()?;
    let mut closest: Option<Failure> = None;
    let mut numbers = micro_batches::divisors(batch, MOST_MICRO_BATCHES);
    // A file states a range of sizes; those of torch.export begin with 2.
    let mut refused = None;
    while let [_, .., n] = numbers[..] {
        match search.graph(n) {
            Ok(_) => break,
            Err(failure) => refused = Some(failure),
        }
        numbers.pop();
    }
    if let ([_], Some(Failure::Input(why))) = (&numbers[..], refused) {
        out::note(&format!("note: the batch of {batch} cannot be cut: {why}"));
    }
    let considered = micro_batches::consider(
        &numbers,
        |n| {
            let one = search.kept(n)?;
            Ok(n as f64 * micro_batches::kernel_micros(&one, &*machine.cost))
        },
        |n| match search.planned(n, budget) {
            Ok(compiled) => Ok(Some(compiled.timeline.micros)),
            Err(failure @ (Failure::NoFit(_) | Failure::HostTooSmall(_))) => {
                if closest.as_ref().is_none_or(|c| needs(&failure) < needs(c)) {
                    closest = Some(failure);
                }
                Ok(None)
            }
            Err(other) => Err(other),
        },
    )?;
    let Some(n) = micro_batches::fastest(&considered) else {
        let why = "a batch has no number of micro-batches";
        return Err(closest.unwrap_or_else(|| Failure::Bug(why.into())));
    };
    out::note(&note(&considered, n, batch));
    let graph = search.graph(n)?;
    decided.micro_batches = Some(MicroBatches::Of(n));
    decided.budget = budget;
    let mut model = model;
    model.graph = graph;
    // Other sizes of the model have this batch too.
    let dims = model.from.1.dim.iter_mut();
    dims.filter(|(name, _)| *name == symbol)
        .for_each(|(_, size)| *size = batch / n);
    Ok((model, decided))
}

/// The bytes that would fit.
fn needs(failure: &Failure) -> u64 {
    match failure {
        Failure::NoFit(infeasible) => infeasible.smallest,
        Failure::HostTooSmall(host) => host.infeasible.smallest,
        _ => u64::MAX,
    }
}

fn note(considered: &[Considered], n: u64, batch: u64) -> String {
    let one = |c: &Considered| {
        let time = match c.time {
            StepTime::Planned(time) => micros(time),
            StepTime::AtLeast(time) => format!("{} or more", micros(time)),
            StepTime::TooLarge => "does not fit".into(),
        };
        format!("{} of {}: {time}", c.n, batch / c.n)
    };
    let all: Vec<String> = considered.iter().map(one).collect();
    let rows = batch / n;
    format!("note: micro-batches: {n} of {rows} ({})", all.join(", "))
}

struct Search<'a> {
    model: &'a Model,
    /// The symbolic size that is the batch.
    symbol: &'a str,
    batch: u64,
    machine: &'a Machine,
    compiling: Compiling,
}

impl Search<'_> {
    /// The step on a micro-batch.
    fn graph(&self, n: u64) -> Result<Graph, Failure> {
        model::graph_with(self.model, self.symbol, self.batch / n)
    }

    fn compiled(&self, n: u64, compiling: &Compiling) -> Result<Compiled, Failure> {
        model::compile(&self.graph(n)?, compiling, self.machine, Dumps::Stderr)
    }

    fn planned(&self, n: u64, budget: Option<Budget>) -> Result<Compiled, Failure> {
        let compiling = Compiling {
            micro_batches: Some(MicroBatches::Of(n)),
            budget,
            ..self.compiling.clone()
        };
        self.compiled(n, &compiling)
    }

    /// A step on one micro-batch with all memory that it needs.
    fn kept(&self, n: u64) -> Result<Compiled, Failure> {
        let compiling = Compiling {
            micro_batches: None,
            budget: Some(Budget::Bytes(u64::MAX)),
            planner: Some(Planner::Keep),
            protrain: None,
            host: None,
            ..self.compiling.clone()
        };
        self.compiled(n, &compiling)
    }

    /// The budget for all numbers; a share is of what the whole batch needs.
    fn budget(&self) -> Result<Option<Budget>, Failure> {
        Ok(match self.compiling.budget {
            Some(Budget::Share(share)) => {
                let needs = self.kept(1)?.decided.keep_peak;
                Some(Budget::Bytes((share * needs as f64) as u64))
            }
            given => given,
        })
    }
}

/// The symbolic size that is the first dimension of every input, and its value.
fn batch_of(model: &Model) -> Result<(String, u64), Failure> {
    let (path, reading) = &model.from;
    for (name, size) in &reading.dim {
        // Any other size shows what depends on it; the file states which sizes it can have.
        let smallest = (2..=*size).find(|part| size.is_multiple_of(*part));
        let others = [
            size / smallest.unwrap_or(1),
            size.saturating_mul(2),
            size.saturating_add(1),
            size.saturating_sub(1),
        ];
        let found = others
            .into_iter()
            .filter(|other| other != size)
            .find_map(|other| Some((other, model::graph_with(model, name, other).ok()?)));
        if let Some((other, graph)) = found
            && is_batch(&model.graph, *size, &graph, other)
        {
            return Ok((name.clone(), *size));
        }
    }
    let path = path.display();
    Err(Failure::Input(format!(
        "--micro-batches auto: {path}: no symbolic size with a value from --dim is the first \
         dimension of every input, so the batch cannot be cut; export the model with a symbolic \
         batch (dynamic_shapes of torch.export) and give --dim NAME=SIZE, or take several batches \
         with --micro-batches N"
    )))
}

/// Whether two readings of a model differ in the first dimension of their inputs alone, by these
/// sizes.
fn is_batch(a: &Graph, size: u64, b: &Graph, other: u64) -> bool {
    let cut = |(&a_in, &b_in): (&ir::Value, &ir::Value)| {
        let shapes = (a.values[a_in].ty.shape(), b.values[b_in].ty.shape());
        match shapes {
            ([], []) => true,
            ([first, rest @ ..], [own, others @ ..]) => {
                (*first, *own) == (size, other) && rest == others
            }
            _ => false,
        }
    };
    a.inputs.len() == b.inputs.len() && a.inputs.iter().zip(&b.inputs).all(cut)
}
