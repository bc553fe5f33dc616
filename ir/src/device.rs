//! A machine description: the fourth noun. Read from `passes/devices/*.toml`.

use serde::Deserialize;

/// What the cost model and the planners need to know of a machine.
#[derive(Clone, PartialEq, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Device {
    /// Its name: `cpu`, `a100-80g`.
    pub name: String,
    /// Memory that the budget limits, bytes.
    pub device_bytes: u64,
    /// Memory on the other side of the link, bytes.
    pub host_bytes: u64,
    /// Multiply-adds count two. f32 operations per second, in products.
    pub f32_flops: f64,
    /// bf16 and f16 operations per second, in products.
    pub bf16_flops: f64,
    /// Bytes per second between the processor and its memory.
    pub memory_bandwidth: f64,
    /// Time to start one kernel, µs.
    pub launch_micros: f64,
    /// Bytes per second over the link, one way.
    pub link_bandwidth: f64,
    /// Time to start one copy, µs.
    pub link_micros: f64,
}

impl Device {
    /// Reads a description; the error names the field.
    pub fn from_toml(text: &str) -> Result<Device, String> {
        let device: Device = toml::from_str(text).map_err(|e| e.to_string())?;
        let rates = [
            ("f32_flops", device.f32_flops),
            ("bf16_flops", device.bf16_flops),
            ("memory_bandwidth", device.memory_bandwidth),
            ("link_bandwidth", device.link_bandwidth),
        ];
        for (field, rate) in rates {
            if !(rate.is_finite() && 0.0 < rate) {
                return Err(format!("device {}: {field} should be a positive number", device.name));
            }
        }
        for (field, micros) in [("launch_micros", device.launch_micros), ("link_micros", device.link_micros)] {
            if !(micros.is_finite() && 0.0 <= micros) {
                return Err(format!("device {}: {field} should be a number that is not negative", device.name));
            }
        }
        Ok(device)
    }
}
