//! The machines that come with Lighterage: `passes/devices/*.toml`.

use ir::Device;

const FILES: &[(&str, &str)] = &[
    ("cpu", include_str!("../devices/cpu.toml")),
    ("rtx3090", include_str!("../devices/rtx3090.toml")),
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

/// The device of that name.
pub fn named(name: &str) -> Result<Device, String> {
    match FILES.iter().find(|&&(known, _)| known == name) {
        Some((_, text)) => Device::from_toml(text),
        None => Err(format!(
            "there is no device {name}; there are {}, or name a .toml file",
            names().join(", ")
        )),
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn every_device_reads_and_has_its_name() {
        for name in super::names() {
            assert_eq!(super::named(name).unwrap().name, name);
        }
    }
}
