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
    /// Share of `link_bandwidth` that each direction keeps while both are busy; 1 is a full duplex.
    pub duplex: f64,
    /// Time to start one copy, µs.
    pub link_micros: f64,
    /// Bytes per second that the host's cores read and write in an optimizer's update.
    pub host_bandwidth: f64,
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
            ("host_bandwidth", device.host_bandwidth),
        ];
        for (field, rate) in rates {
            if !(rate.is_finite() && 0.0 < rate) {
                return Err(format!(
                    "device {}: {field} should be a positive number",
                    device.name
                ));
            }
        }
        if !(0.0 < device.duplex && device.duplex <= 1.0) {
            return Err(format!(
                "device {}: duplex should be a share, above 0 and at most 1",
                device.name
            ));
        }
        for (field, micros) in [
            ("launch_micros", device.launch_micros),
            ("link_micros", device.link_micros),
        ] {
            if !(micros.is_finite() && 0.0 <= micros) {
                return Err(format!(
                    "device {}: {field} should be a number that is not negative",
                    device.name
                ));
            }
        }
        Ok(device)
    }
}

#[cfg(test)]
mod tests {
    use super::Device;

    const GOOD: &str = "name = \"d\"\ndevice_bytes = 1\nhost_bytes = 1\nf32_flops = \
        1.0\nbf16_flops = 1.0\n\
        memory_bandwidth = 1.0\nlaunch_micros = 0.0\nlink_bandwidth = 1.0\nduplex = \
        0.5\nlink_micros = 0.0\n\
        host_bandwidth = 1.0\n";

    #[test]
    fn a_field_that_is_out_of_range_is_named() {
        assert_eq!(Device::from_toml(GOOD).unwrap().duplex, 0.5);
        for (good, bad, field) in [
            ("duplex = 0.5", "duplex = 0.0", "duplex"),
            ("duplex = 0.5", "duplex = 1.5", "duplex"),
            ("duplex = 0.5", "duplex = nan", "duplex"),
            (
                "host_bandwidth = 1.0",
                "host_bandwidth = -1.0",
                "host_bandwidth",
            ),
            ("host_bandwidth = 1.0\n", "", "host_bandwidth"),
            ("name = \"d\"", "name = \"d\"\nspeed = 1", "speed"),
        ] {
            let error = Device::from_toml(&GOOD.replace(good, bad)).unwrap_err();
            assert!(error.contains(field), "{bad}: {error}");
        }
    }
}
