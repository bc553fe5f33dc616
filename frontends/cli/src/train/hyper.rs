//! The optimizer's options for each step, of each group of parameters.

use super::failure;
use super::schedule::Rates;
use crate::args::HyperArgs;
use crate::failure::Failure;
use artifact::Artifact;
use passes::graph::optimizer::{Optimizer, hyper_of};
use runtime::Machine;

/// Options with flags of their own: an option's name in the artifact, its flag, the given value,
/// and the value's upper bound.
fn given(args: &HyperArgs) -> [(&'static str, &'static str, Option<f64>, f64); 6] {
    let (beta1, beta2) = args.betas.unzip();
    [
        ("lr", "--lr", args.lr, f64::MAX),
        ("beta1", "--betas", beta1, 1.0),
        ("beta2", "--betas", beta2, 1.0),
        ("eps", "--eps", args.eps, f64::MAX),
        (
            "weight_decay",
            "--weight-decay",
            args.weight_decay,
            f64::MAX,
        ),
        ("momentum", "--momentum", args.momentum, f64::MAX),
    ]
}

/// The optimizers' names, with `or` before the last.
fn optimizers() -> String {
    let all = Optimizer::ALL.into_iter();
    let mut names: Vec<&str> = all
        .filter(|&optimizer| optimizer != Optimizer::None)
        .map(Optimizer::name)
        .collect();
    names.sort_unstable();
    let last = names.pop().expect("there are optimizers");
    format!("{} or {last}", names.join(", "))
}

/// The optimizer's options in a run.
pub(super) struct Hyper {
    /// Each group's input, and its options without the schedule.
    groups: Vec<(String, Vec<f64>)>,
    /// The options' names.
    names: Vec<String>,
    /// The place of the learning rate among the options.
    lr: usize,
    rates: Rates,
}

impl Hyper {
    /// The options of a run of `steps`; none if the step takes none.
    pub(super) fn new(
        args: &HyperArgs,
        artifact: &Artifact,
        steps: u64,
    ) -> Result<Option<Hyper>, Failure> {
        let (name, defaults): (&str, &[(String, f64)]) = match &artifact.summary.optimizer {
            Some((name, defaults)) => (name, defaults),
            None => ("none", &[]),
        };
        let values = values(args, name, defaults)?;
        let rates = Rates::new(args, steps)?;
        let at = |key: &str| defaults.iter().position(|(default, _)| default == key);
        let Some(lr) = at("lr") else {
            if args.schedule.is_some() || args.warmup.is_some() {
                return Err(Failure::Input(format!(
                    "--schedule, --warmup: the step has no optimizer with a rate; compile the \
                     model with --optimizer {}",
                    optimizers()
                )));
            }
            return Ok(None);
        };
        let mut groups = vec![];
        let overrides =
            std::iter::once(&[][..]).chain(artifact.summary.groups.iter().map(|g| &g[..]));
        for (number, overrides) in overrides.enumerate() {
            let input = hyper_of(number);
            if !artifact.inputs.iter().any(|binding| binding.name == input) {
                continue;
            }
            let mut values = values.clone();
            for (key, value) in overrides {
                if let Some(option) = at(key).and_then(|option| values.get_mut(option)) {
                    *option = *value;
                }
            }
            groups.push((input, values));
        }
        let names = defaults.iter().map(|(name, _)| name.clone()).collect();
        Ok((!groups.is_empty()).then_some(Hyper {
            groups,
            names,
            lr,
            rates,
        }))
    }

    /// All options as text by name.
    pub(super) fn described(&self) -> impl Iterator<Item = (String, String)> {
        let groups = self.groups.iter().flat_map(|(input, values)| {
            let named = self.names.iter().zip(values);
            let group = input.strip_prefix(artifact::OPTIMIZER_INPUT).unwrap_or("");
            named.map(move |(name, value)| (format!("{name}{group}"), value.to_string()))
        });
        let rates = ("schedule".to_string(), self.rates.to_string());
        groups.chain([rates])
    }

    /// Writes the options of a step, from 0.
    pub(super) fn write(&self, machine: &mut Machine, step: u64) -> Result<(), Failure> {
        for (input, values) in &self.groups {
            let mut values = values.clone();
            values[self.lr] = self.rates.at(step, values[self.lr]);
            let bytes: Vec<u8> = values
                .iter()
                .flat_map(|value| value.to_le_bytes())
                .collect();
            machine.write_input(input, &bytes).map_err(failure)?;
        }
        Ok(())
    }

    /// The learning rate of a step, of the first group.
    pub(super) fn rate(&self, step: u64) -> f64 {
        let (_, values) = &self.groups[0];
        self.rates.at(step, values[self.lr])
    }
}

/// The values of the options, in the order of `defaults`.
fn values(args: &HyperArgs, name: &str, defaults: &[(String, f64)]) -> Result<Vec<f64>, Failure> {
    let given = given(args);
    for (_, option, value, below) in given {
        if let Some(value) = value.filter(|value| !(0.0 <= *value && *value < below)) {
            let below = if below == 1.0 {
                "from 0 up to, but not including, 1"
            } else {
                "a number that is not negative"
            };
            return Err(Failure::Input(format!(
                "{option} should be {below}, not {value}"
            )));
        }
    }
    let mut values: Vec<f64> = defaults.iter().map(|&(_, value)| value).collect();
    let flags = given
        .into_iter()
        .filter_map(|(key, option, value, _)| Some((key.to_string(), option.to_string(), value?)));
    let named = args
        .option
        .iter()
        .map(|(key, value)| (key.clone(), format!("--option {key}"), *value));
    for (key, option, value) in flags.chain(named) {
        match defaults.iter().position(|(default, _)| *default == key) {
            Some(position) => values[position] = value,
            None if name == "none" => {
                return Err(Failure::Input(format!(
                    "{option}: the step has no optimizer; compile the model with --optimizer {}",
                    optimizers()
                )));
            }
            None => {
                let has: Vec<&str> = defaults.iter().map(|(key, _)| key.as_str()).collect();
                return Err(Failure::Input(format!(
                    "{option}: {name} has no such option; it has {}",
                    has.join(", ")
                )));
            }
        }
    }
    if name == "sgd" && args.momentum.is_some_and(|momentum| momentum != 0.0) {
        let help = "compile the model with --optimizer sgd-momentum";
        return Err(Failure::Input(format!(
            "--momentum: the step was compiled without momentum; {help}"
        )));
    }
    Ok(values)
}
