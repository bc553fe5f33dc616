//! An earlier profile of this machine: what it has is not measured again.

use crate::{Error, Found, Request, cores, cpu};
use passes::cost::Lane;
use passes::cost::profile::Profile;
use runtime::profile::{Figures, Micros};

/// An error if its times would be others here and now.
pub(crate) fn check(known: &Profile, request: &Request<'_>) -> Result<(), Error> {
    let differs = if known.device != request.device.name {
        format!("it describes {}, not {}", known.device, request.device.name)
    } else if (&known.cpu, known.cores) != (&cpu(), cores()) {
        format!(
            "it was measured on {} with {} cores",
            known.cpu, known.cores
        )
    } else if known.kernels != request.options.kernels {
        format!("its kernels are {}", known.kernels.name())
    } else if known.link.paced != request.link {
        match known.link.paced {
            Some(rate) => format!("its copies were slowed down: --link {rate}B/s"),
            None => "its copies were not slowed down: leave out --link".into(),
        }
    } else {
        return Ok(());
    };
    Err(Error::Request(differs))
}

/// The times of its ops.
pub(crate) fn found(known: &Profile) -> impl Iterator<Item = (String, Found)> {
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
pub(crate) fn figures(known: &Profile) -> Figures {
    Figures {
        link_bandwidth: [known.link.in_bandwidth, known.link.out_bandwidth],
        link_micros: known.link.micros,
        copy_bandwidth: known.link.copy_bandwidth,
        host_bandwidth: known.host_bandwidth,
        keeps: Lane::MEASURED.map(|a| Lane::MEASURED.map(|b| known.kept(a, b))),
        handoff: known.handoff_micros,
        bytes: 0,
    }
}
