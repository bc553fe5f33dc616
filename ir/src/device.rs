//! A machine description: the fourth noun. Read from `passes/devices/*.toml`.

use serde::Deserialize;
use std::ops::RangeInclusive;

/// What the cost model and the planners need to know about a machine.
#[derive(Clone, PartialEq, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Device {
    /// Its name: `cpu`, `a100-80g`.
    pub name: String,
    /// Memory that the budget limits, bytes.
    pub device_bytes: u64,
    /// Memory on the other side of the link, bytes.
    pub host_bytes: u64,
    /// f32 operations per second that products reach. A multiply-add counts as two.
    pub f32_flops: f64,
    /// The same if factors are rounded to TF32 on a GPU. None: as fast as f32.
    #[serde(default)]
    pub tf32_flops: Option<f64>,
    /// bf16 and f16 operations per second that products reach.
    pub bf16_flops: f64,
    /// Operations per second that attention reaches. All pairs of a query and a key count, also
    /// those that a causal mask removes. On a GPU, of attention by tensor cores. None: as fast as
    /// other products.
    #[serde(default)]
    pub attention_flops: Option<f64>,
    /// Operations per second that a GPU's convolutions of bf16 by tensor cores reach. None: as fast
    /// as other products.
    #[serde(default)]
    pub convolution_flops: Option<f64>,
    /// The data sheet's figures for f32 products, and for those of bf16. Only reports use them.
    #[serde(default)]
    pub f32_peak: Option<f64>,
    /// See `f32_peak`.
    #[serde(default)]
    pub bf16_peak: Option<f64>,
    /// Bytes per second between the processor and its memory.
    pub memory_bandwidth: f64,
    /// Time to start one kernel, µs.
    pub launch_micros: f64,
    /// Bytes per second over the link, one way.
    pub link_bandwidth: f64,
    /// The same from the device to the host. None: as towards the device.
    #[serde(default)]
    pub out_bandwidth: Option<f64>,
    /// Share of `link_bandwidth` that each direction keeps while both are busy; 1 is a full duplex.
    pub duplex: f64,
    /// The same from the device to the host. None: as towards the device.
    #[serde(default)]
    pub out_duplex: Option<f64>,
    /// Share of their speed that kernels keep while a copy runs.
    #[serde(default = "one")]
    pub kernels_keep: f64,
    /// Time to start one copy, µs.
    pub link_micros: f64,
    /// Bytes per second that the host's cores read and write in an optimizer's update.
    pub host_bandwidth: f64,
    /// Whether a disk takes the place of the host's memory: then no update runs there.
    #[serde(default)]
    pub host_is_disk: bool,
    /// A disk behind the host's memory, if steps may use one.
    #[serde(default)]
    pub disk: Option<Disk>,
    /// From the end of a kernel to the start of an update on the host that waits for it, or the
    /// other way round, µs.
    #[serde(default)]
    pub host_micros: f64,
    /// Of a GPU of NVIDIA's: the compute capability times ten, which its kernels are made for. None
    /// of a processor.
    #[serde(default)]
    pub sm: Option<u32>,
}

/// A disk behind the host's memory. Only copies between the two use it.
#[derive(Clone, PartialEq, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Disk {
    /// Bytes that steps may use.
    pub bytes: u64,
    /// Bytes per second from the disk to the host's memory, while nothing is written.
    pub read_bandwidth: f64,
    /// Bytes per second to the disk, while nothing is read.
    pub write_bandwidth: f64,
    /// Share of `read_bandwidth` that stays while something is written.
    pub read_keeps: f64,
    /// Share of `write_bandwidth` that stays while something is read.
    pub write_keeps: f64,
    /// Share of their speed that the host's cores keep while a copy runs.
    #[serde(default = "one")]
    pub kernels_keep: f64,
    /// Time to start one copy, µs.
    pub micros: f64,
}

impl Disk {
    /// Bytes per second from the disk, or to it.
    pub fn way(&self, reads: bool) -> f64 {
        match reads {
            true => self.read_bandwidth,
            false => self.write_bandwidth,
        }
    }

    /// The least time in which so many bytes can be read and written, µs.
    pub fn least_micros(&self, read: f64, written: f64) -> f64 {
        let (reads, writes) = (read / self.read_bandwidth, written / self.write_bandwidth);
        // Both at once for as long as there is something of both, if that gains anything.
        let together = match self.read_keeps + self.write_keeps > 1.0 {
            true => (reads / self.read_keeps).min(writes / self.write_keeps),
            false => 0.0,
        };
        1e6 * (reads + writes + together * (1.0 - self.read_keeps - self.write_keeps))
    }

    /// Its numbers, with their limits.
    fn numbers(&self) -> Vec<Number> {
        vec![
            ("disk.bytes", self.bytes as f64, BYTES),
            ("disk.read_bandwidth", self.read_bandwidth, RATES),
            ("disk.write_bandwidth", self.write_bandwidth, RATES),
            ("disk.read_keeps", self.read_keeps, SHARES),
            ("disk.write_keeps", self.write_keeps, SHARES),
            ("disk.kernels_keep", self.kernels_keep, SHARES),
            ("disk.micros", self.micros, MICROS),
        ]
    }
}

fn one() -> f64 {
    1.0
}

/// What is wrong with a description.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum DeviceError {
    /// The text is not TOML, or a field is missing, unknown or of another type.
    #[error(transparent)]
    Toml(#[from] toml::de::Error),
    /// A field's number is out of its limits.
    #[error("device {device}: {field} is {value}, and should be from {least} to {most}")]
    Range {
        /// The device's name.
        device: String,
        /// The field.
        field: &'static str,
        /// Its number.
        value: String,
        /// The smallest number that it can have.
        least: String,
        /// The largest.
        most: String,
    },
}

// The limits are far from every machine. Within them, the time of any step is a finite number, and
// sums of bytes are numbers of 64 bits.

/// Operations or bytes per second.
const RATES: RangeInclusive<f64> = 1e3..=1e18;
/// Shares of a rate.
const SHARES: RangeInclusive<f64> = 1e-3..=1.0;
/// Times of one start, µs.
const MICROS: RangeInclusive<f64> = 0.0..=1e9;
/// Bytes of a pool.
const BYTES: RangeInclusive<f64> = 0.0..=1e18;
/// Compute capabilities times ten.
const CAPABILITIES: RangeInclusive<f64> = 10.0..=1000.0;

/// A kind of hardware that runs kernels.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Processor {
    /// Cores with vector instructions.
    Cpu,
    /// A GPU.
    Gpu,
}

impl Device {
    /// What runs the kernels of its lines.
    pub fn processor(&self) -> Processor {
        match self.sm {
            Some(_) => Processor::Gpu,
            None => Processor::Cpu,
        }
    }

    /// Bytes per second over the link, towards the device or from it.
    pub fn link_way(&self, to_device: bool) -> f64 {
        match to_device {
            true => self.link_bandwidth,
            false => self.out_bandwidth.unwrap_or(self.link_bandwidth),
        }
    }

    /// Reads a description; the error names the field.
    pub fn from_toml(text: &str) -> Result<Device, DeviceError> {
        let device: Device = toml::from_str(text)?;
        device.check()?;
        Ok(device)
    }

    fn check(&self) -> Result<(), DeviceError> {
        let numbers = self.numbers().into_iter().chain(self.optional_numbers());
        for (field, number, limits) in numbers {
            if !limits.contains(&number) {
                return Err(DeviceError::Range {
                    device: self.name.clone(),
                    field,
                    value: shown(number),
                    least: shown(*limits.start()),
                    most: shown(*limits.end()),
                });
            }
        }
        Ok(())
    }

    /// The numbers that every device has, with their limits.
    fn numbers(&self) -> Vec<Number> {
        vec![
            ("device_bytes", self.device_bytes as f64, BYTES),
            ("host_bytes", self.host_bytes as f64, BYTES),
            ("f32_flops", self.f32_flops, RATES),
            ("bf16_flops", self.bf16_flops, RATES),
            ("memory_bandwidth", self.memory_bandwidth, RATES),
            ("link_bandwidth", self.link_bandwidth, RATES),
            ("host_bandwidth", self.host_bandwidth, RATES),
            ("duplex", self.duplex, SHARES),
            ("kernels_keep", self.kernels_keep, SHARES),
            ("launch_micros", self.launch_micros, MICROS),
            ("link_micros", self.link_micros, MICROS),
            ("host_micros", self.host_micros, MICROS),
        ]
    }

    /// The numbers that a device may lack, with their limits.
    fn optional_numbers(&self) -> Vec<Number> {
        let own = [
            ("tf32_flops", self.tf32_flops, RATES),
            ("attention_flops", self.attention_flops, RATES),
            ("convolution_flops", self.convolution_flops, RATES),
            ("f32_peak", self.f32_peak, RATES),
            ("bf16_peak", self.bf16_peak, RATES),
            ("out_bandwidth", self.out_bandwidth, RATES),
            ("out_duplex", self.out_duplex, SHARES),
            ("sm", self.sm.map(f64::from), CAPABILITIES),
        ];
        let own = own
            .into_iter()
            .filter_map(|(field, number, limits)| Some((field, number?, limits)));
        own.chain(self.disk.iter().flat_map(Disk::numbers))
            .collect()
    }
}

/// A field, its number, and the numbers that it can have.
type Number = (&'static str, f64, RangeInclusive<f64>);

/// A number as a file has it: `1e18`, `0.5`, `1000`.
fn shown(number: f64) -> String {
    let text = format!("{number:?}");
    text.strip_suffix(".0").unwrap_or(&text).to_string()
}

#[cfg(test)]
mod tests {
    use super::Device;

    const GOOD: &str = "name = \"d\"\ndevice_bytes = 1\nhost_bytes = 1\nf32_flops = \
        1e9\nbf16_flops = 1e9\n\
        memory_bandwidth = 1e9\nlaunch_micros = 0.0\nlink_bandwidth = 1e9\nduplex = \
        0.5\nlink_micros = 0.0\n\
        host_bandwidth = 1e9\n";
    const DISK: &str = "[disk]\nbytes = 1\nread_bandwidth = 1e9\nwrite_bandwidth = \
        1e9\nread_keeps = 0.5\nwrite_keeps = 0.5\nmicros = 0.0\n";

    #[test]
    fn a_field_that_is_out_of_range_is_named() {
        assert_eq!(Device::from_toml(GOOD).unwrap().duplex, 0.5);
        for (good, bad, field) in [
            ("duplex = 0.5", "duplex = 0.0", "duplex"),
            ("duplex = 0.5", "duplex = 1.5", "duplex"),
            ("duplex = 0.5", "duplex = nan", "duplex"),
            (
                "duplex = 0.5",
                "duplex = 0.5\nout_duplex = 2.0",
                "out_duplex",
            ),
            (
                "duplex = 0.5",
                "duplex = 0.5\nkernels_keep = 0.0",
                "kernels_keep",
            ),
            (
                "host_bandwidth = 1e9",
                "host_bandwidth = -1.0",
                "host_bandwidth",
            ),
            ("host_bandwidth = 1e9\n", "", "host_bandwidth"),
            ("name = \"d\"", "name = \"d\"\nspeed = 1", "speed"),
        ] {
            let error = Device::from_toml(&GOOD.replace(good, bad)).unwrap_err();
            let error = error.to_string();
            assert!(error.contains(field), "{bad}: {error}");
        }
    }
    #[test]
    fn an_absurd_number_is_an_error_with_its_limits() {
        let text = format!("{GOOD}{DISK}");
        Device::from_toml(&text).unwrap();
        for (good, bad, says) in [
            ("f32_flops = 1e9", "f32_flops = 1e-300", "is 1e-300"),
            ("f32_flops = 1e9", "f32_flops = 1e300", "1000 to 1e18"),
            ("\nlink_bandwidth = 1e9", "\nlink_bandwidth = 999", "999,"),
            (
                "launch_micros = 0.0",
                "launch_micros = 2e9",
                "launch_micros",
            ),
            ("duplex = 0.5", "duplex = 1e-4", "0.001 to 1"),
            ("duplex = 0.5", "duplex = 0.5\nf32_peak = 1", "f32_peak"),
            ("duplex = 0.5", "duplex = 0.5\nsm = 1", "sm is 1,"),
            (
                "device_bytes = 1",
                "device_bytes = 9000000000000000000",
                "device_bytes is 9e18",
            ),
            ("read_keeps = 0.5", "read_keeps = 1e-9", "disk.read_keeps"),
            ("\nmicros = 0.0", "\nmicros = 1e300", "disk.micros"),
        ] {
            let error = Device::from_toml(&text.replace(good, bad)).unwrap_err();
            let error = error.to_string();
            assert!(error.contains(says), "{bad}: {error}");
        }
    }
}
