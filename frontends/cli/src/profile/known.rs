//! An earlier profile of this machine: what it has is not measured again.

use super::Found;
use crate::args::ProfileArgs;
use crate::failure::Failure;
use crate::model::read_text;
use ir::Device;
use passes::cost::Lane;
use passes::cost::profile::Profile;
use runtime::profile::{Figures, Micros};
use std::path::Path;

/// Reads it.
///
/// # Errors
///
/// It is no profile, or its times would be others here and now.
pub(super) fn read(file: &Path, args: &ProfileArgs, device: &Device) -> Result<Profile, Failure> {
    let refused = |why: String| Failure::Input(format!("--reuse {}: {why}", file.display()));
    let text = read_text(file)?;
    let known = Profile::from_toml(&text).map_err(|e| refused(e.to_string()))?;
    let cores = super::cores();
    let differs = if known.device != device.name {
        format!("it describes {}, not {}", known.device, device.name)
    } else if (&known.cpu, known.cores) != (&super::cpu(), cores) {
        format!(
            "it was measured on {} with {} cores",
            known.cpu, known.cores
        )
    } else if known.kernels != args.kernels.unwrap_or_default() {
        format!("its kernels are {}", known.kernels.name())
    } else if known.link.paced != args.link {
        match known.link.paced {
            Some(rate) => format!("its copies were slowed down: --link {rate}B/s"),
            None => "its copies were not slowed down: leave out --link".into(),
        }
    } else {
        return Ok(known);
    };
    Err(refused(differs))
}

/// The times of its ops.
pub(super) fn found(known: &Profile) -> impl Iterator<Item = (String, Found)> {
    known.ops.iter().map(|(key, figures)| {
        let micros = Micros {
            median: figures.micros,
            fastest: figures.micros,
            least: figures.least_micros.unwrap_or(figures.micros),
        };
        (key.clone(), Ok(micros))
    })
}

/// What it says of the machine.
pub(super) fn figures(known: &Profile) -> Figures {
    let kept = |a: Lane, b: Lane| known.keeps.get(a.name())?.get(b.name()).copied();
    Figures {
        link_bandwidth: [known.link.in_bandwidth, known.link.out_bandwidth],
        link_micros: known.link.micros,
        copy_bandwidth: known.link.copy_bandwidth,
        host_bandwidth: known.host_bandwidth,
        keeps: Lane::MEASURED.map(|a| Lane::MEASURED.map(|b| kept(a, b).unwrap_or(1.0))),
        handoff: known.handoff_micros,
        bytes: 0,
    }
}
