//! Small artifacts, written by hand.
#![allow(dead_code, reason = "each test file uses some of it")]

use artifact::*;

/// An artifact under construction. Every tensor is f32[16]: one cache line, so place `i` of a pool
/// is at `64 * i`.
pub(crate) struct Plan(pub(crate) Artifact);

pub(crate) const DEVICE: u32 = 0;
pub(crate) const HOST: u32 = 1;

/// A tensor.
pub(crate) fn at(pool: u32, place: u64) -> Operand {
    Operand {
        place: Place {
            pool,
            offset: 64 * place,
        },
        dtype: DType::F32,
        shape: vec![16],
    }
}

/// Sixteen floats as bytes.
pub(crate) fn floats(x: f32) -> Vec<u8> {
    x.to_le_bytes().repeat(16)
}

/// Bytes as floats.
pub(crate) fn values(bytes: &[u8]) -> Vec<f32> {
    bytes
        .chunks_exact(4)
        .map(|b| f32::from_le_bytes(b.try_into().unwrap()))
        .collect()
}

impl Plan {
    pub(crate) fn new(device_places: u64, host_places: u64, streams: &[&str]) -> Plan {
        let pool = |name: &str, space, places: u64| Pool {
            name: name.into(),
            space,
            bytes: 64 * places,
            lent: false,
        };
        let device = pool("device", MemorySpace::Device(0), device_places);
        let host = pool("host", MemorySpace::Host, host_places);
        Plan(Artifact {
            name: "test".into(),
            device: "test".into(),
            pools: vec![device, host],
            streams: streams.iter().map(|s| s.to_string()).collect(),
            summary: Summary {
                planned_peak_bytes: 64 * device_places,
                ..Summary::default()
            },
            ..Artifact::default()
        })
    }
    fn push(&mut self, stream: u32, line: u32, kind: CommandKind) {
        self.0.commands.push(Command { stream, line, kind });
    }
    fn line(&mut self, name: &str, why: &str) -> u32 {
        self.0.lines.push(Line {
            name: name.into(),
            why: why.into(),
        });
        self.0.lines.len() as u32 - 1
    }
    pub(crate) fn kernel(&mut self, op: &str, attrs: &[(&str, Attr)]) -> u32 {
        let attrs = attrs
            .iter()
            .map(|(k, v)| (k.to_string(), v.clone()))
            .collect();
        self.0.kernels.push(Kernel {
            op: op.into(),
            attrs,
            code: None,
        });
        self.0.kernels.len() as u32 - 1
    }
    pub(crate) fn run(
        &mut self,
        stream: u32,
        name: &str,
        op: &str,
        ins: &[Operand],
        outs: &[Operand],
    ) {
        let kernel = self.kernel(op, &[]);
        let line = self.line(name, "run");
        let kind = CommandKind::Launch {
            kernel,
            ins: ins.to_vec(),
            outs: outs.to_vec(),
            scratch: None,
        };
        self.push(stream, line, kind);
    }
    pub(crate) fn copy(&mut self, stream: u32, name: &str, why: &str, src: Operand, dst: Operand) {
        let line = self.line(name, why);
        let bytes = src.bytes().unwrap();
        self.push(
            stream,
            line,
            CommandKind::Copy {
                src: src.place,
                dst: dst.place,
                bytes,
            },
        );
    }
    /// Records the next event, for the last line.
    pub(crate) fn record(&mut self, stream: u32) -> u32 {
        let line = self.0.lines.len() as u32 - 1;
        self.push(
            stream,
            line,
            CommandKind::Record {
                event: self.0.events,
            },
        );
        self.0.events += 1;
        self.0.events - 1
    }
    /// Waits, for the next line.
    pub(crate) fn wait(&mut self, stream: u32, event: u32, previous: bool) {
        let line = self.0.lines.len() as u32;
        self.push(stream, line, CommandKind::Wait { event, previous });
    }
    pub(crate) fn input(&mut self, name: &str, operand: Operand) {
        self.0.inputs.push(Binding {
            name: name.into(),
            operand,
        });
    }
    pub(crate) fn output(&mut self, name: &str, operand: Operand) {
        self.0.outputs.push(Binding {
            name: name.into(),
            operand,
        });
    }
    pub(crate) fn state(
        &mut self,
        path: &str,
        kind: StateKind,
        operand: Operand,
        initial: Initial,
    ) {
        self.0.states.push(State {
            path: path.into(),
            kind,
            operand,
            initial,
        });
    }
}

/// A step whose parameter lives on the host: `out = 2 (x + w)`, then `w = w + x`. The last event's
/// number is 3; the step has exactly the waits that it needs.
///
/// Device: 0 x, 1 w, 2 y = x + w and then z, 3 w'. Host: 0 x, 1 w, 2 out.
pub(crate) fn offloading() -> Artifact {
    let mut p = Plan::new(4, 3, &["compute", "h2d", "d2h"]);
    let (x, w, y, w2) = (at(DEVICE, 0), at(DEVICE, 1), at(DEVICE, 2), at(DEVICE, 3));
    // Events are numbered by their records; waits for the previous step need the numbers earlier.
    let (arrived, computed, left) = (0, 1, 2);
    p.wait(1, computed, true);
    p.copy(1, "x", "feed", at(HOST, 0), x.clone());
    p.wait(1, left, true);
    p.copy(1, "w.host -> w", "gather", at(HOST, 1), w.clone());
    assert_eq!(p.record(1), arrived);
    // By then the previous step has copied w' and z: the second copy waited for this.
    p.wait(0, arrived, false);
    p.run(
        0,
        "y",
        "add",
        &[x.clone(), w.clone()],
        std::slice::from_ref(&y),
    );
    p.run(0, "w'", "add", &[w, x], std::slice::from_ref(&w2));
    p.run(
        0,
        "z",
        "add",
        &[y.clone(), y.clone()],
        std::slice::from_ref(&y),
    );
    assert_eq!(p.record(0), computed);
    p.wait(2, computed, false);
    p.copy(2, "out", "fetch", y, at(HOST, 2));
    p.copy(2, "w -> w.host", "offload", w2, at(HOST, 1));
    assert_eq!(p.record(2), left);
    p.input("x", at(HOST, 0));
    p.output("out", at(HOST, 2));
    p.0.data = floats(1.0);
    p.state(
        "w",
        StateKind::Param,
        at(HOST, 1),
        Initial::Data {
            start: 0,
            bytes: 64,
        },
    );
    p.0
}

/// The number of [`updating`]'s parameters: enough for more than one part of a shared kernel.
pub(crate) const PARAMETERS: u64 = 200_000;

/// A step that updates a parameter of [`PARAMETERS`] numbers by SGD on one stream, in the host's
/// pool: inputs `g`, `hyper`.
pub(crate) fn updating(stream: &str) -> Artifact {
    let places = (4 * PARAMETERS).div_ceil(64);
    let mut p = Plan::new(0, 2 * places + 1, &[stream]);
    let large = |place| Operand {
        shape: vec![PARAMETERS],
        ..at(HOST, place)
    };
    let (w, g) = (large(0), large(places));
    let hyper = Operand {
        dtype: DType::F64,
        shape: vec![3],
        ..at(HOST, 2 * places)
    };
    p.run(
        0,
        "w'",
        "sgd",
        &[w.clone(), g.clone(), hyper.clone()],
        std::slice::from_ref(&w),
    );
    p.input("g", g);
    p.input("hyper", hyper);
    p.state("w", StateKind::Param, w, Initial::Zeros);
    p.0
}
