//! `lighterage devices`: the machines that `--device` knows, and the GPUs of this machine.

use crate::args::DevicesArgs;
use crate::failure::Failure;
use crate::out::out;
use crate::size::{flops, rate, short};
use ir::Device;
use runtime::cuda::{Driver, DriverError, Found};
use serde_json::json;

/// Runs the command.
pub(crate) fn run(args: &DevicesArgs) -> Result<(), Failure> {
    let known = gpu::known();
    let gpus = gpus();
    if args.json {
        out!("{}", to_json(&known, &gpus));
    } else {
        print(&known, &gpus);
    }
    Ok(())
}

/// The GPUs of this machine.
struct Gpus {
    /// The newest version of CUDA that the driver supports: 12020 is 12.2.
    version: i32,
    found: Vec<Found>,
}

fn gpus() -> Result<Gpus, DriverError> {
    let driver = Driver::open(None)?;
    Ok(Gpus {
        version: driver.version()?,
        found: Found::all(&driver)?,
    })
}

fn print(known: &[Device], gpus: &Result<Gpus, DriverError>) {
    out!(
        "{:<12} {:>10}  {:>14}  {:>14}  {:>12}  {:>12}",
        "--device",
        "memory",
        "f32 products",
        "bf16 products",
        "bandwidth",
        "link"
    );
    for device in known {
        out!(
            "{:<12} {:>10}  {:>14}  {:>14}  {:>12}  {:>12}",
            device.name,
            short(device.device_bytes),
            flops(device.f32_flops),
            flops(device.bf16_flops),
            rate(device.memory_bandwidth),
            rate(device.link_bandwidth)
        );
    }
    out!("");
    match gpus {
        Err(error) => out!("GPUs of this machine: none ({error})"),
        Ok(Gpus { version, found }) => {
            let (major, minor) = (version / 1000, version % 1000 / 10);
            out!("GPUs of this machine; the driver serves CUDA {major}.{minor}");
            for gpu in found {
                let like = match gpu::described(known, gpu) {
                    Some(device) => format!("--device {} describes it", device.name),
                    None => "no --device describes it: write a .toml file".to_string(),
                };
                let Found {
                    number,
                    name,
                    sm,
                    bytes,
                } = gpu;
                out!(
                    "  cuda:{number}  {name}, sm_{sm}, {}; {like}",
                    short(*bytes)
                );
            }
        }
    }
}

fn to_json(known: &[Device], gpus: &Result<Gpus, DriverError>) -> serde_json::Value {
    let machine = |device: &Device| {
        json!({
            "name": device.name,
            "device_bytes": device.device_bytes,
            "host_bytes": device.host_bytes,
            "f32_flops": device.f32_flops,
            "bf16_flops": device.bf16_flops,
            "memory_bandwidth": device.memory_bandwidth,
            "link_bandwidth": device.link_bandwidth,
        })
    };
    let gpu = |gpu: &Found| {
        json!({
            "number": gpu.number,
            "name": gpu.name,
            "sm": gpu.sm,
            "bytes": gpu.bytes,
            "device": gpu::described(known, gpu).map(|device| &device.name),
        })
    };
    let known_json: Vec<_> = known.iter().map(machine).collect();
    match gpus {
        Ok(Gpus { version, found }) => {
            let gpus: Vec<_> = found.iter().map(gpu).collect();
            json!({"known": known_json, "gpus": gpus, "cuda_version": version})
        }
        Err(error) => json!({"known": known_json, "gpus": [], "why_none": error.to_string()}),
    }
}
