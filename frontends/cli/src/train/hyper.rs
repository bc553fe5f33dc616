//! The optimizer's options for each step.

use crate::args::HyperArgs;
use crate::failure::Failure;
use artifact::Artifact;
use passes::graph::optimizer::{HYPER, Optimizer};

/// Options of optimizers: an option's name in the artifact, its flag, the given value, and the
/// value's upper bound.
pub(super) fn given(args: &HyperArgs) -> [(&'static str, &'static str, Option<f64>, f64); 6] {
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

/// The optimizers' names: `adamw, sgd or sgd-momentum`.
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

/// The bytes of the optimizer's options; none if the step takes none.
pub(super) fn bytes(args: &HyperArgs, artifact: &Artifact) -> Result<Option<Vec<u8>>, Failure> {
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
    let (name, defaults): (&str, &[(String, f64)]) = match &artifact.summary.optimizer {
        Some((name, defaults)) => (name, defaults),
        None => ("none", &[]),
    };
    let mut values: Vec<f64> = defaults.iter().map(|&(_, value)| value).collect();
    for (key, option, value, _) in given {
        let Some(value) = value else { continue };
        match defaults.iter().position(|(default, _)| default == key) {
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
    let takes = artifact.inputs.iter().any(|input| input.name == HYPER);
    Ok((takes && !defaults.is_empty()).then(|| {
        values
            .iter()
            .flat_map(|value| value.to_le_bytes())
            .collect()
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_option_of_an_optimizer_has_a_flag() {
        let keys = given(&HyperArgs::default()).map(|(key, ..)| key);
        for optimizer in Optimizer::ALL {
            for (option, _) in optimizer.options() {
                assert!(
                    keys.contains(option),
                    "`given` has no flag for {option} of {}",
                    optimizer.name()
                );
            }
        }
    }
}
