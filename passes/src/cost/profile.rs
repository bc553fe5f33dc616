//! A measured machine: the file that `lighterage profile` writes, and a cost model made from it.
//! The time of an op that was not measured is a guess: its roofline, multiplied by the ratio of
//! measured times to their rooflines.

use super::{Cost, Lane, Roofline, Shares};
use crate::pipeline::Kernels;
use ir::{Device, Graph, Node, text};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use thiserror::Error;

/// The version of the file.
pub const VERSION: u32 = 1;
/// The last line of a file: without it, the file was cut off.
const END: &str = "# end of profile";
/// The most ops of a file. It is far more than any step has, and limits the time for reading a
/// hostile file.
const MAX_OPS: usize = 1 << 20;
/// The longest time of an op, µs: a day.
const MAX_MICROS: f64 = 8.64e10;

/// Why a profile cannot be read, written or used.
#[derive(Clone, PartialEq, Debug, Error)]
pub enum ProfileError {
    /// It is no profile; the message names the line and the field.
    #[error(transparent)]
    Read(#[from] toml::de::Error),
    /// It has no text.
    #[error(transparent)]
    Write(#[from] toml::ser::Error),
    /// The file is of another version.
    #[error("a profile of version {0}; this reads version {VERSION}: profile again")]
    Version(u32),
    /// The file's end is missing.
    #[error("it was cut off, for its last line is not `{END}`: profile again")]
    CutOff,
    /// A rate is not above 0, or higher than any machine reaches.
    #[error("{field} should be a positive number, not {rate}")]
    Rate {
        /// The field.
        field: &'static str,
        /// The rate.
        rate: f64,
    },
    /// A time is negative, or longer than a day.
    #[error("{field}: {micros} is not a time")]
    Time {
        /// The field, or the op's key.
        field: String,
        /// The time, µs.
        micros: f64,
    },
    /// A name is no lane, or both names are the same lane.
    #[error("keeps.{lane}.{other}: there is no such pair of lanes")]
    Lanes {
        /// The lane that keeps the share.
        lane: String,
        /// The lane that is busy.
        other: String,
    },
    /// A lane's share is too near to 0, or above 1.
    #[error("keeps.{lane}.{other} should be a share, from 0.01 to 1, not {share}")]
    Share {
        /// The lane that keeps the share.
        lane: String,
        /// The lane that is busy.
        other: String,
        /// The share.
        share: f64,
    },
    /// There are more ops than a step has.
    #[error("{0} ops; {MAX_OPS} at most")]
    ManyOps(usize),
    /// The profile describes another device.
    #[error("it was measured for {measured}, not for {device}")]
    Device {
        /// The device that it describes.
        measured: String,
        /// The requested device.
        device: String,
    },
}

/// What was measured on a machine.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    /// [`VERSION`].
    pub version: u32,
    /// The name of the device that it describes.
    pub device: String,
    /// The machine's name.
    pub machine: String,
    /// Its processor.
    pub cpu: String,
    /// The number of its cores. All of them shared each op's run.
    pub cores: u32,
    /// The model whose ops were measured.
    pub model: String,
    /// The kernels that ran.
    pub kernels: Kernels,
    /// How often each op was run.
    pub repeat: u32,
    /// How long the whole measurement took, seconds.
    pub profiling_seconds: f64,
    /// How long one step's ops take, one after the other, µs.
    pub step_micros: f64,
    /// The most memory that the measurement took, bytes.
    pub peak_bytes: u64,
    /// The factors of guesses: for products, and for all other ops.
    pub guess_factor: [f64; 2],
    /// From the end of a line to the start of one on another stream that waits for it, µs.
    pub handoff_micros: f64,
    /// Bytes per second that an update on the host's cores reads and writes.
    pub host_bandwidth: f64,
    /// The link.
    pub link: LinkFigures,
    /// For each lane, the share of its speed that it keeps while another is busy.
    pub keeps: BTreeMap<String, BTreeMap<String, f64>>,
    /// What each op took, by [`key`].
    pub ops: BTreeMap<String, OpFigures>,
}

/// What was measured of the link.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LinkFigures {
    /// The bandwidth that copies were slowed to, bytes per second; absent if they were not.
    pub paced: Option<f64>,
    /// To the device, while the other direction is idle, bytes per second.
    pub in_bandwidth: f64,
    /// From the device, bytes per second.
    pub out_bandwidth: f64,
    /// The time to start a copy, µs.
    pub micros: f64,
    /// A copy that is not slowed down, bytes per second.
    pub copy_bandwidth: f64,
}

/// What was measured of an op.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OpFigures {
    /// One run on the device, µs.
    pub micros: f64,
    /// The shortest run, µs. Different ways to compute the same value are compared by it, because
    /// other load disturbs it least.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub least_micros: Option<f64>,
    /// One run on the host's cores, µs, if they can run it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_micros: Option<f64>,
    /// How often a step runs it; 0 if it is part of a group, and was measured only for comparison
    /// with the group.
    pub count: u32,
}

/// What an op's time depends on, as text: op, attributes, types of operands and results.
pub fn key(graph: &Graph, node: Node) -> String {
    let data = &graph.nodes[node];
    let types = |values: &[ir::Value]| {
        let types: Vec<String> = values
            .iter()
            .map(|&v| graph.values[v].ty.to_string())
            .collect();
        types.join(" ")
    };
    format!(
        "{} {} -> {}",
        text::print_op(&data.op),
        types(&data.inputs),
        types(&data.outputs)
    )
}

impl Profile {
    /// The share of its speed that a lane keeps while another one is busy; 1 if it was not
    /// measured.
    pub fn kept(&self, lane: Lane, other: Lane) -> f64 {
        let shares = self.keeps.get(lane.name());
        let share = shares.and_then(|shares| shares.get(other.name()));
        share.copied().unwrap_or(1.0)
    }

    /// Reads a profile; the error names the field.
    pub fn from_toml(text: &str) -> Result<Profile, ProfileError> {
        // The version first: a file of another version may have other fields.
        #[derive(Deserialize)]
        struct Head {
            version: u32,
        }
        let head: Head = toml::from_str(text)?;
        if head.version != VERSION {
            return Err(ProfileError::Version(head.version));
        }
        let profile: Profile = toml::from_str(text)?;
        profile.validate()?;
        if !text.trim_end().ends_with(END) {
            return Err(ProfileError::CutOff);
        }
        Ok(profile)
    }

    /// The file's text; equal profiles have equal texts.
    pub fn to_toml(&self) -> Result<String, ProfileError> {
        Ok(toml::to_string(self)? + END + "\n")
    }

    fn validate(&self) -> Result<(), ProfileError> {
        let link = &self.link;
        let rates = [
            ("host_bandwidth", self.host_bandwidth),
            ("link.in_bandwidth", link.in_bandwidth),
            ("link.out_bandwidth", link.out_bandwidth),
            ("link.copy_bandwidth", link.copy_bandwidth),
            ("link.paced", link.paced.unwrap_or(1.0)),
            ("guess_factor", self.guess_factor[0]),
            ("guess_factor", self.guess_factor[1]),
        ];
        // At least a byte per day, at most a petabyte per microsecond.
        if let Some((field, rate)) = rates
            .into_iter()
            .find(|(_, rate)| !(1e-6 <= *rate && *rate <= 1e21))
        {
            return Err(ProfileError::Rate { field, rate });
        }
        let times = [
            ("step_micros", self.step_micros),
            ("handoff_micros", self.handoff_micros),
            ("link.micros", link.micros),
            ("profiling_seconds", self.profiling_seconds),
        ];
        let ops = self.ops.iter().flat_map(|(key, op)| {
            [Some(op.micros), op.least_micros, op.host_micros]
                .into_iter()
                .flatten()
                .map(|micros| (key.as_str(), micros))
        });
        if let Some((field, micros)) = times
            .into_iter()
            .chain(ops)
            .find(|(_, t)| !(0.0 <= *t && *t <= MAX_MICROS))
        {
            let field = field.to_string();
            return Err(ProfileError::Time { field, micros });
        }
        let lanes: BTreeSet<&str> = Lane::ALL.into_iter().map(Lane::name).collect();
        for (lane, shares) in &self.keeps {
            for (other, share) in shares {
                if !(lanes.contains(&**lane) && lanes.contains(&**other) && lane != other) {
                    let (lane, other) = (lane.clone(), other.clone());
                    return Err(ProfileError::Lanes { lane, other });
                }
                if !(0.01 <= *share && *share <= 1.0) {
                    return Err(ProfileError::Share {
                        lane: lane.clone(),
                        other: other.clone(),
                        share: *share,
                    });
                }
            }
        }
        match self.ops.len() <= MAX_OPS {
            true => Ok(()),
            false => Err(ProfileError::ManyOps(self.ops.len())),
        }
    }
}

/// The cost model of a profile.
#[derive(Clone, Debug)]
pub struct Profiled {
    profile: Profile,
    roofline: Roofline,
    /// Bytes per second, to the device and from it.
    link: [f64; 2],
    link_micros: f64,
    shares: Shares,
}

impl Profiled {
    /// The measured costs. With `link`, copies are slowed to this number of bytes per second, and
    /// take the device's time to start. If the host's pool is a disk, its rates are the device's.
    /// An error if the profile describes another device.
    pub fn new(
        profile: Profile,
        device: &Device,
        link: Option<f64>,
    ) -> Result<Profiled, ProfileError> {
        if profile.device != device.name {
            return Err(ProfileError::Device {
                measured: profile.device,
                device: device.name.clone(),
            });
        }
        let figures = profile.link;
        let mut shares = Shares {
            handoff: profile.handoff_micros,
            host_handoff: 0.0,
            ..Shares::default()
        };
        for (a, lane) in Lane::ALL.into_iter().enumerate() {
            for (b, other) in Lane::ALL.into_iter().enumerate() {
                shares.keeps[a][b] = profile.kept(lane, other);
            }
        }
        let (mut rates, mut link_micros) = (
            [figures.in_bandwidth, figures.out_bandwidth],
            figures.micros,
        );
        if device.host_is_disk {
            // The profile measured copies in memory. The device's description has the disk's.
            rates = [true, false].map(|to_device| device.link_way(to_device));
            link_micros = device.link_micros;
            shares.set_link(device);
        } else if let Some(link) = link.filter(|&link| figures.paced != Some(link)) {
            // A slowed copy moves bytes only a part of the time. Only then does it disturb others.
            let at_work = |rate: f64| (rate / figures.copy_bandwidth).min(1.0);
            let before = at_work(figures.paced.unwrap_or(f64::INFINITY));
            let less = at_work(link) / before;
            let is_link = |lane: usize| matches!(Lane::ALL[lane], Lane::In | Lane::Out);
            for (a, keeps) in shares.keeps.iter_mut().enumerate() {
                for (b, share) in keeps.iter_mut().enumerate() {
                    // A slowed copy disturbs others less. Others also disturb it less, because it
                    // has time to catch up.
                    let times = match (is_link(a), is_link(b)) {
                        (false, true) => less,
                        (true, false) | (true, true) if less < 1.0 => less * less,
                        (true, _) => 1.0,
                        (false, false) => continue,
                    };
                    *share = (1.0 - (1.0 - *share) * times).clamp(0.01, 1.0);
                }
            }
            rates = rates.map(|rate| {
                if figures.paced.is_some() {
                    link
                } else {
                    link.min(rate)
                }
            });
            link_micros = link_micros.max(device.link_micros);
        }
        shares.set_disk(device);
        Ok(Profiled {
            profile,
            roofline: Roofline::new(device),
            link: rates,
            link_micros,
            shares,
        })
    }

    /// Names of the ops of a graph that were not measured, and how many ops there are. Each kind is
    /// named once.
    pub fn guesses(&self, graph: &Graph) -> (Vec<String>, usize) {
        let real = graph
            .order
            .iter()
            .filter(|&&node| !graph.nodes[node].op.is_alias());
        let keys: BTreeSet<String> = real.map(|&node| key(graph, node)).collect();
        let n = keys.len();
        (
            keys.into_iter()
                .filter(|key| !self.profile.ops.contains_key(key))
                .collect(),
            n,
        )
    }
}

impl Cost for Profiled {
    fn disk(&self, bytes: u64, reads: bool) -> f64 {
        self.roofline.disk(bytes, reads)
    }
    fn run(&self, graph: &Graph, node: Node) -> f64 {
        if graph.nodes[node].op.is_alias() {
            return 0.0;
        }
        match self.profile.ops.get(&key(graph, node)) {
            Some(op) => op.micros,
            None => {
                let factor =
                    self.profile.guess_factor[usize::from(!super::is_product(graph, node))];
                self.roofline.run(graph, node) * factor
            }
        }
    }
    fn least(&self, graph: &Graph, node: Node) -> Option<f64> {
        self.profile.ops.get(&key(graph, node))?.least_micros
    }
    fn host(&self, graph: &Graph, node: Node) -> f64 {
        let measured = self
            .profile
            .ops
            .get(&key(graph, node))
            .and_then(|op| op.host_micros);
        measured.unwrap_or_else(|| {
            1e6 * super::operand_bytes(graph, node) as f64 / self.profile.host_bandwidth
        })
    }
    fn link(&self, bytes: u64) -> f64 {
        self.link_micros + 1e6 * bytes as f64 / self.link[0].min(self.link[1])
    }
    fn link_way(&self, bytes: u64, to_device: bool) -> f64 {
        self.link_micros + 1e6 * bytes as f64 / self.link[usize::from(!to_device)]
    }
    fn local(&self, bytes: u64) -> f64 {
        1e6 * bytes as f64 / self.profile.link.copy_bandwidth
    }
    fn shares(&self) -> Shares {
        self.shares
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::devices;

    const GRAPH: &str = "graph m {\n  input  %x : f32[4,4]\n  state  param %w -> %w : \
        f32[4,4] \"w\"\n  \
        fwd - %y = matmul %x, %w ta=false tb=false : f32[4,4]\n  fwd - %z = relu %y : f32[4,4]\n  \
        output z = %z\n}\n";

    fn profile(ops: &[(&str, f64)]) -> Profile {
        let op = |&(key, micros): &(&str, f64)| {
            (
                key.to_string(),
                OpFigures {
                    micros,
                    least_micros: Some(micros),
                    host_micros: None,
                    count: 1,
                },
            )
        };
        Profile {
            version: VERSION,
            device: "test".into(),
            machine: "m".into(),
            cpu: "c".into(),
            cores: 2,
            model: "m".into(),
            kernels: Kernels::Plain,
            repeat: 3,
            profiling_seconds: 1.0,
            step_micros: 10.0,
            peak_bytes: 100,
            guess_factor: [2.0, 3.0],
            handoff_micros: 5.0,
            host_bandwidth: 1e9,
            link: LinkFigures {
                paced: None,
                in_bandwidth: 4e9,
                out_bandwidth: 2e9,
                micros: 0.5,
                copy_bandwidth: 4e9,
            },
            keeps: BTreeMap::from([("compute".into(), BTreeMap::from([("in".into(), 0.8)]))]),
            ops: ops.iter().map(op).collect(),
        }
    }

    #[test]
    fn a_profile_comes_back() {
        let profile = profile(&[("relu f32[4,4] -> f32[4,4]", 7.5)]);
        assert_eq!(
            Profile::from_toml(&profile.to_toml().unwrap()).unwrap(),
            profile
        );
    }

    #[test]
    fn a_broken_profile_is_refused_by_field() {
        let text = profile(&[("relu f32[4,4] -> f32[4,4]", 7.5)])
            .to_toml()
            .unwrap();
        for (good, bad, says) in [
            ("version = 1", "version = 2", "version 2"),
            ("version = 1\n", "", "version"),
            ("micros = 7.5", "micros = -1.0", "relu"),
            ("micros = 7.5", "micros = nan", "relu"),
            ("micros = 7.5", "micros = \"x\"", "micros"),
            ("in = 0.8", "in = 0.0", "compute.in"),
            ("in = 0.8", "up = 0.8", "compute.up"),
            (
                "host_bandwidth = 1000000000.0",
                "host_bandwidth = 0.0",
                "host_bandwidth",
            ),
            (
                "copy_bandwidth = 4000000000.0",
                "copy_bandwidth = inf",
                "copy_bandwidth",
            ),
            ("cores = 2", "cores = 2\nspeed = 3", "speed"),
            ("kernels = \"plain\"", "kernels = \"quick\"", "kernels"),
        ] {
            assert!(text.contains(good), "{good} should be in\n{text}");
            let error = Profile::from_toml(&text.replacen(good, bad, 1))
                .unwrap_err()
                .to_string();
            assert!(error.contains(says), "{bad}: {error}");
        }
        for cut in 0..text.trim_end().len() {
            assert!(
                Profile::from_toml(&text[..cut]).is_err(),
                "{}",
                &text[..cut]
            );
        }
    }

    #[test]
    fn what_was_not_measured_is_a_scaled_roofline() {
        let graph = ir::text::parse_graph(GRAPH).unwrap();
        let device = devices::named("test").unwrap();
        let (matmul, relu) = (graph.order[0], graph.order[1]);
        let cost = Profiled::new(profile(&[(&key(&graph, relu), 7.5)]), &device, None).unwrap();
        assert_eq!(cost.run(&graph, relu), 7.5);
        assert_eq!(
            cost.run(&graph, matmul),
            2.0 * Roofline::new(&device).run(&graph, matmul)
        );
        assert_eq!(cost.guesses(&graph), (vec![key(&graph, matmul)], 2));
        assert_eq!(
            (
                cost.link_way(4000, true),
                cost.link_way(4000, false),
                cost.link(4000)
            ),
            (1.5, 2.5, 2.5)
        );
    }

    #[test]
    fn a_slowed_link_is_less_in_the_way() {
        let device = devices::named("test").unwrap();
        let shares = |link| {
            Profiled::new(profile(&[]), &device, link)
                .unwrap()
                .shares()
                .keeps[0][1]
        };
        assert_eq!(shares(None), 0.8);
        // A quarter of the time at work.
        assert!((shares(Some(1e9)) - 0.95).abs() < 1e-12);
        let slowed = Profiled::new(profile(&[]), &device, Some(1e9)).unwrap();
        assert_eq!(slowed.link(1000), 1.0 + device.link_micros);
        let other = devices::named("cpu").unwrap();
        assert!(
            Profiled::new(profile(&[]), &other, None)
                .unwrap_err()
                .to_string()
                .contains("test")
        );
    }
}
