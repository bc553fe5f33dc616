//! A machine description: the fourth noun. Read from `passes/devices/*.toml`.

use serde::Deserialize;

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
    /// A field's number is out of its range.
    #[error("device {device}: {field} should be {range}")]
    Range {
        /// The device's name.
        device: String,
        /// The field.
        field: &'static str,
        /// The numbers that the field can have.
        range: &'static str,
    },
}

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
        let ensure = |field, range, holds| {
            if holds {
                return Ok(());
            }
            Err(DeviceError::Range {
                device: self.name.clone(),
                field,
                range,
            })
        };
        let disk = self.disk.as_ref();
        for (field, rate) in [
            ("f32_flops", Some(self.f32_flops)),
            ("bf16_flops", Some(self.bf16_flops)),
            ("tf32_flops", self.tf32_flops),
            ("attention_flops", self.attention_flops),
            ("convolution_flops", self.convolution_flops),
            ("f32_peak", self.f32_peak),
            ("bf16_peak", self.bf16_peak),
            ("memory_bandwidth", Some(self.memory_bandwidth)),
            ("link_bandwidth", Some(self.link_bandwidth)),
            ("out_bandwidth", self.out_bandwidth),
            ("host_bandwidth", Some(self.host_bandwidth)),
            ("read_bandwidth", disk.map(|disk| disk.read_bandwidth)),
            ("write_bandwidth", disk.map(|disk| disk.write_bandwidth)),
        ] {
            let holds = rate.is_none_or(|rate| rate.is_finite() && rate > 0.0);
            ensure(field, "a positive number", holds)?;
        }
        for (field, share) in [
            ("duplex", Some(self.duplex)),
            ("out_duplex", self.out_duplex),
            ("kernels_keep", Some(self.kernels_keep)),
            ("read_keeps", disk.map(|disk| disk.read_keeps)),
            ("write_keeps", disk.map(|disk| disk.write_keeps)),
            ("disk.kernels_keep", disk.map(|disk| disk.kernels_keep)),
        ] {
            let is_share = share.is_none_or(|share| share > 0.0 && share <= 1.0);
            ensure(field, "a share, above 0 and at most 1", is_share)?;
        }
        for (field, micros) in [
            ("launch_micros", self.launch_micros),
            ("link_micros", self.link_micros),
            ("host_micros", self.host_micros),
            ("disk.micros", disk.map_or(0.0, |disk| disk.micros)),
        ] {
            let holds = micros.is_finite() && micros >= 0.0;
            ensure(field, "a number that is not negative", holds)?;
        }
        Ok(())
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
                "host_bandwidth = 1.0",
                "host_bandwidth = -1.0",
                "host_bandwidth",
            ),
            ("host_bandwidth = 1.0\n", "", "host_bandwidth"),
            ("name = \"d\"", "name = \"d\"\nspeed = 1", "speed"),
        ] {
            let error = Device::from_toml(&GOOD.replace(good, bad)).unwrap_err();
            let error = error.to_string();
            assert!(error.contains(field), "{bad}: {error}");
        }
    }
}
