//! Files with code for a GPU that are changed by accident or with intent: each is refused with one
//! line before any command runs, or its step ends. None causes a panic, a hang, or a finding of the
//! library in the driver's place.
//!
//! What kernels compute is trusted, so their texts are only cut, not changed.

use super::machine::{Watched, none, standin, threads};
use super::steps;
use super::watched::Watch;
use artifact::{Artifact, CommandKind, MemorySpace, Object, Phase, Sm, Target};
use lighterage_tests::evaluate::Tensors;
use lighterage_tests::generate::mix;
use runtime::Error;
use std::sync::Arc;

const OPS: usize = 12;
/// Changes of each step.
const CHANGES: u64 = 60;

struct Dice(u64);

impl Dice {
    fn below(&mut self, n: usize) -> usize {
        self.0 = mix(self.0);
        (self.0 >> 33) as usize % n.max(1)
    }
    fn pick<'a, T>(&mut self, of: &'a mut [T]) -> &'a mut T {
        let i = self.below(of.len());
        &mut of[i]
    }
}

fn is_gpu(object: &Object) -> bool {
    matches!(object.target, Target::Gpu(_))
}

/// The phases of kernels on the device.
fn phases(artifact: &mut Artifact) -> Vec<&mut Phase> {
    let gpu: Vec<bool> = artifact.objects.iter().map(is_gpu).collect();
    let kernels = artifact.kernels.iter_mut();
    let codes = kernels.filter_map(|kernel| kernel.code.as_mut());
    let on_gpu = codes.filter(|code| gpu[code.object as usize]);
    on_gpu.flat_map(|code| code.phases.iter_mut()).collect()
}

/// Changes one thing; whether the file must be refused then.
fn change(artifact: &mut Artifact, dice: &mut Dice) -> bool {
    let module = artifact.objects.iter().position(is_gpu).unwrap();
    match dice.below(12) {
        0 => {
            let bytes = &mut artifact.objects[module].bytes;
            let header = bytes.windows(6).position(|w| w == b".entry").unwrap();
            let keep = header + dice.below(bytes.len() - header);
            bytes.truncate(keep);
            true
        }
        1 => {
            let n = artifact.objects[module].bytes.len();
            artifact.objects[module].bytes[dice.below(n)] = 0;
            true
        }
        2 => {
            artifact.objects[module].bytes = vec![0xFF; 1000];
            true
        }
        3 => {
            artifact.objects[module].target = Target::Gpu(Sm(120));
            true
        }
        4 => {
            // The processor's code as the device's.
            artifact.objects[module].bytes = b"\x7fELF".to_vec();
            true
        }
        5 => {
            dice.pick(&mut phases(artifact)).symbol = "no such kernel\0".into();
            true
        }
        6 => {
            dice.pick(&mut phases(artifact)).threads = [0, 1025, u32::MAX][dice.0 as usize % 3];
            true
        }
        7 => {
            dice.pick(&mut phases(artifact)).parts = [1 << 31, u64::MAX][dice.0 as usize % 2];
            true
        }
        8 => {
            dice.pick(&mut phases(artifact)).shared_bytes =
                [1 << 20, u32::MAX][dice.0 as usize % 2];
            true
        }
        9 => {
            // A tensor of the device's kernel lies on the host, or the other way round.
            let other = |space| match space {
                MemorySpace::Device(_) => MemorySpace::Host,
                MemorySpace::Host | MemorySpace::Disk => MemorySpace::Device(0),
            };
            let pool = dice.pick(&mut artifact.pools);
            pool.space = other(pool.space);
            false
        }
        10 => {
            let n = artifact.pools.len();
            let pool = dice.below(n) as u32;
            let command = dice.pick(&mut artifact.commands);
            match &mut command.kind {
                CommandKind::Launch { ins, outs, .. } => {
                    let operands = ins.iter_mut().chain(outs);
                    operands.for_each(|operand| operand.place.pool = pool);
                }
                CommandKind::Copy { src, dst, .. } => (src.pool, dst.pool) = (pool, pool),
                CommandKind::Record { .. } | CommandKind::Wait { .. } => {}
            }
            false
        }
        _ => {
            let n = artifact.commands.len();
            artifact.commands.remove(dice.below(n));
            false
        }
    }
}

/// Loads and runs a file; what it is refused for.
fn attempt(watch: &Arc<Watch>, artifact: &Artifact) -> Result<(), Error> {
    let inputs = artifact.inputs.iter();
    let feed: Tensors = inputs
        .map(|input| {
            let bytes = input.operand.bytes().unwrap_or(0) as usize;
            (input.name.clone(), vec![0; bytes])
        })
        .collect();
    let mut watched = Watched::new(watch, artifact, threads())?;
    watched.write(&feed)?;
    watched.launch()?;
    // If a command overwrites an input, there is one step.
    let _ = watched.launch();
    watched.machine.wait().map(|_| ())
}

#[test]
fn changed_files_are_refused_or_end() {
    let mut refused = 0;
    for seed in 0..4 {
        let step = steps::step(OPS, seed);
        let mut dice = Dice(seed);
        for _ in 0..CHANGES {
            let mut artifact = step.artifact.clone();
            let must_be_refused = change(&mut artifact, &mut dice);
            let watch = Watch::new(&standin(seed));
            let ended = attempt(&watch, &artifact);
            assert!(!must_be_refused || ended.is_err(), "{artifact:?}");
            assert_eq!(watch.standin.findings(), none(), "{ended:?}");
            if let Err(error) = ended {
                assert!(!error.to_string().contains('\n'), "{error}");
                // A change that is refused is refused before any command runs.
                assert!(!matches!(error, Error::Device { .. }), "{error}");
                refused += 1;
            }
        }
    }
    assert!(refused > 150, "{refused}");
}
