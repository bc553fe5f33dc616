//! The GPUs of this machine, as devices to plan for: the command line's and Python's `cuda:0`.

use codegen::kernels::Target;
use ir::Device;
use passes::devices;
use report::size::{rate, short};
use runtime::cuda::{self, Driver, DriverError, Found};
use runtime::profile;
use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

/// Why there is no such device.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("device {device}: {why}")]
pub struct Error {
    device: String,
    why: String,
}

impl Error {
    fn new(device: impl Into<String>, why: impl ToString) -> Error {
        Error {
            device: device.into(),
            why: why.to_string(),
        }
    }

    fn of(number: u32, why: impl ToString) -> Error {
        Error::new(format!("cuda:{number}"), why)
    }
}

/// A GPU's number from `cuda` or `cuda:1`; `None` for other names of devices.
///
/// # Errors
/// It is no number.
pub fn number(name: &str) -> Option<Result<u32, Error>> {
    if name == "cuda" {
        return Some(Ok(0));
    }
    let number = name.strip_prefix("cuda:")?;
    Some(number.parse().map_err(|_| {
        Error::new(
            name,
            "cuda:0 is the first GPU; `lighterage devices` lists them",
        )
    }))
}

/// A GPU of this machine, as the planner sees it.
#[derive(Clone, Debug)]
pub struct Here {
    /// The GPU.
    pub found: Found,
    /// Its figures. The memory is what is free beside the driver's context, and the link's rate is
    /// measured.
    pub device: Device,
    /// Memory of the context and of other programs, bytes.
    pub taken: u64,
    /// True if no known machine describes it: times are those of a similar one.
    pub is_similar: bool,
}

/// Planned memory is a multiple of this, so that small changes of what is free change no plan.
const STEP: u64 = 64 << 20;
/// Left free: the driver keeps kernels, and what it needs for launches, beside the context.
const SPARE: u64 = 128 << 20;

impl Here {
    /// The GPU of a number.
    ///
    /// # Errors
    /// There is no such GPU, its driver refuses, or no kernels are generated for it.
    pub fn find(number: u32) -> Result<Here, Error> {
        let refused = |e: DriverError| Error::of(number, e);
        let mut all = Found::all(&Driver::open(None).map_err(refused)?).map_err(refused)?;
        let n = all.len();
        if number as usize >= n {
            let why = format!("this machine has {n} GPUs, counted from 0");
            return Err(Error::of(number, why));
        }
        let found = all.swap_remove(number as usize);
        let driver = Driver::open(None).map_err(refused)?;
        let open = cuda::Device::new(driver, number).map_err(refused)?;
        let (free, total) = open.memory().map_err(refused)?;
        let known = known();
        let (like, is_similar) = match described(&known, &found) {
            Some(device) => (device, false),
            None => (similar(&known, &found)?, true),
        };
        let mut device = like.clone();
        device.sm = target(&found).and_then(|target| target.sm());
        device.device_bytes = plannable(free);
        device.link_bandwidth = link(number, &open).map_err(refused)?;
        Ok(Here {
            found,
            device,
            taken: total.saturating_sub(free),
            is_similar,
        })
    }

    /// What is to be known beside the plan.
    pub fn note(&self) -> String {
        let Found { number, name, .. } = &self.found;
        let like = match self.is_similar {
            true => format!(
                "; no file describes it, so times are those of {}: --device FILE.toml describes it",
                self.device.name
            ),
            false => format!(", planned as {}", self.device.name),
        };
        format!(
            "note: cuda:{number} is {name}{like}; the driver's context and other programs take {} \
             of its memory beside the plan, which may have {}; copies to the host and from it run \
             at {}",
            short(self.taken),
            short(self.device.device_bytes),
            rate(self.device.link_bandwidth)
        )
    }
}

/// The rate of a GPU's link, bytes per second. It is measured once in a process, so that all plans
/// of a program have the same.
fn link(number: u32, open: &cuda::Device) -> Result<f64, DriverError> {
    static RATES: Mutex<BTreeMap<u32, f64>> = Mutex::new(BTreeMap::new());
    let mut rates = RATES.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(&rate) = rates.get(&number) {
        return Ok(rate);
    }
    let rate = two_digits(profile::link(open)?);
    rates.insert(number, rate);
    Ok(rate)
}

/// What a plan may have of free memory.
fn plannable(free: u64) -> u64 {
    // A device in a test has less than is left free of a GPU.
    match free.checked_sub(SPARE) {
        Some(left) if left >= STEP => left / STEP * STEP,
        _ => free,
    }
}

/// A rate with two digits, so that the noise of a measurement changes few plans.
fn two_digits(rate: f64) -> f64 {
    let unit = 10f64.powf(rate.max(1.0).log10().floor() - 1.0);
    (rate / unit).round() * unit
}

/// The machines that `--device` knows by name.
pub fn known() -> Vec<Device> {
    let named = |name| devices::named(name).expect("a machine that comes with Lighterage reads");
    devices::names().into_iter().map(named).collect()
}

/// The known machine that describes a GPU, if any.
pub fn described<'a>(known: &'a [Device], gpu: &Found) -> Option<&'a Device> {
    let words = |text: &str| text.to_uppercase().replace([' ', '-', '_'], "");
    let name = words(&gpu.name);
    let model = |device: &&Device| {
        let model = device.name.split('-').next().unwrap_or_default();
        // Names of GPUs have digits; `cpu` and `test` have none.
        model.contains(|c: char| c.is_ascii_digit()) && name.contains(&words(model))
    };
    // `GH200` contains `H200`: the longest name counts.
    let models = known.iter().filter(model);
    models.max_by_key(|device| device.name.len())
}

/// The newest target whose kernels run on a GPU.
fn target(gpu: &Found) -> Option<Target> {
    let targets = Target::ALL.into_iter();
    let runs = targets.filter(|target| target.sm().is_some_and(|sm| sm <= gpu.sm));
    runs.max_by_key(Target::sm)
}

/// The known GPU that is most like another: of its architecture or the newest one before, and with
/// about its memory.
fn similar<'a>(known: &'a [Device], gpu: &Found) -> Result<&'a Device, Error> {
    let older = known.iter().filter_map(|d| d.sm.map(|sm| (sm, d)));
    let older = older.filter(|(sm, _)| *sm <= gpu.sm);
    let like = older.max_by_key(|(sm, device)| {
        let difference = device.device_bytes.abs_diff(gpu.bytes);
        (*sm, u64::MAX - difference)
    });
    let unsupported = || {
        let why = format!("no kernels are generated for {}, sm_{}", gpu.name, gpu.sm);
        Error::of(gpu.number, why)
    };
    match (like, target(gpu)) {
        (Some((_, device)), Some(_)) => Ok(device),
        _ => Err(unsupported()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu(name: &str, sm: u32, gib: u64) -> Found {
        Found {
            number: 0,
            name: name.into(),
            sm,
            bytes: gib << 30,
        }
    }

    #[test]
    fn gpus_are_known_by_their_drivers_names() {
        let known = known();
        for (name, expected) in [
            ("NVIDIA H100 80GB HBM3", Some("h100")),
            ("NVIDIA H200", Some("h200")),
            ("NVIDIA GH200 480GB", Some("gh200")),
            ("NVIDIA A100-SXM4-80GB", Some("a100-80g")),
            ("NVIDIA GeForce RTX 4090", Some("rtx4090")),
            ("NVIDIA RTX 6000 Ada Generation", None),
            ("stand-in", None),
        ] {
            let found = described(&known, &gpu(name, 90, 80)).map(|d| d.name.as_str());
            assert_eq!(found, expected, "{name}");
        }
    }

    #[test]
    fn an_unknown_gpu_is_like_one_of_its_architecture() {
        let known = known();
        let like = |sm, gib| similar(&known, &gpu("?", sm, gib)).map(|d| d.name.clone());
        assert_eq!(like(89, 48).unwrap(), "rtx4090");
        assert_eq!(like(90, 80).unwrap(), "h100");
        assert_eq!(like(90, 141).unwrap(), "h200");
        assert!(like(120, 32).is_ok());
        assert!(like(75, 16).is_err());
    }

    #[test]
    fn small_changes_of_what_is_free_change_no_plan() {
        assert_eq!(plannable(80 << 30), (80 << 30) - SPARE);
        assert_eq!(plannable((80 << 30) + 12345), plannable(80 << 30));
        assert_eq!(plannable(64 << 20), 64 << 20);
    }

    #[test]
    fn noise_changes_no_rate() {
        assert_eq!(two_digits(53.4e9), two_digits(52.6e9));
        assert_eq!(two_digits(53.4e9), 53e9);
        assert_eq!(two_digits(9.96e9), 10e9);
        assert_eq!(two_digits(1.0), 1.0);
    }

    #[test]
    fn names_have_numbers() {
        let read = |name| number(name).map(|n| n.ok());
        assert_eq!(read("cuda"), Some(Some(0)));
        assert_eq!(read("cuda:3"), Some(Some(3)));
        assert_eq!(read("cuda:x"), Some(None));
        assert_eq!(read("h100"), None);
    }
}
