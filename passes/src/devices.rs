//! The machines that come with Lighterage: `passes/devices/*.toml`.

use ir::Device;
use ir::device::DeviceError;

const FILES: &[(&str, &str)] = &[
    ("cpu", include_str!("../devices/cpu.toml")),
    ("rtx3090", include_str!("../devices/rtx3090.toml")),
    ("rtx4090", include_str!("../devices/rtx4090.toml")),
    ("a100-80g", include_str!("../devices/a100-80g.toml")),
    ("h100", include_str!("../devices/h100.toml")),
    ("h200", include_str!("../devices/h200.toml")),
    ("gh200", include_str!("../devices/gh200.toml")),
    ("test", include_str!("../devices/test.toml")),
];

/// Their names.
pub fn names() -> Vec<&'static str> {
    FILES.iter().map(|&(name, _)| name).collect()
}

/// The device of this name.
pub fn named(name: &str) -> Result<Device, NamedError> {
    match FILES.iter().find(|&&(known, _)| known == name) {
        Some((_, text)) => Ok(Device::from_toml(text)?),
        None => Err(NamedError::Unknown { name: name.into() }),
    }
}

/// Why a name gives no device.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum NamedError {
    /// There is no file of this name.
    #[error("there is no device {name}; there are {}, or name a .toml file", names().join(", "))]
    Unknown {
        /// The requested name.
        name: String,
    },
    /// The file is wrong.
    #[error(transparent)]
    File(#[from] DeviceError),
}

#[cfg(test)]
mod tests {
    #[test]
    fn every_file_is_a_device() {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("devices");
        for entry in folder.read_dir().unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_stem().unwrap().to_str().unwrap();
            assert!(
                super::names().contains(&name),
                "passes/src/devices.rs has no line for {name}"
            );
        }
    }

    #[test]
    fn every_device_reads_and_has_its_name() {
        for name in super::names() {
            assert_eq!(super::named(name).unwrap().name, name);
        }
    }
}
