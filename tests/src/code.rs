//! Runs generated kernels on tensors.
#![allow(unsafe_code, reason = "generated kernels are foreign functions")]

use codegen::kernels::{Cache, Generated, Generator, Stage, Target, compile_kernels};
use ir::{Op, TensorType};
use runtime::Loaded;
use runtime::kernels::KernelError;
use runtime::kernels::owned::{OwnedTensor, Run};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

/// A kernel in memory.
pub struct Kernel {
    /// Its source.
    pub generated: Generated,
    loaded: Loaded,
}

/// Compiles a kernel by a generator that all tests of a program share.
pub fn compile(generated: Generated, target: &Target) -> Kernel {
    static GENERATOR: Mutex<Option<Generator>> = Mutex::new(None);
    let mut guard = GENERATOR.lock().unwrap_or_else(PoisonError::into_inner);
    let generator = guard.get_or_insert_with(|| {
        let program = codegen::kernels::find().expect("the generator should have been built");
        Generator::start(&program).expect("the generator should start")
    });
    let object = generator.run(&generated.name, &generated.mlir, target, Stage::Object);
    let object = object.unwrap_or_else(|e| panic!("{e}\n{}", generated.mlir));
    Kernel {
        generated,
        loaded: Loaded::new(&object).expect("objects should load"),
    }
}

/// Compiles many kernels, with one generator for each core.
pub fn compile_all(generated: Vec<Generated>, target: &Target) -> Vec<Kernel> {
    let objects = compile_kernels(&generated.iter().collect::<Vec<_>>(), target, &Cache::off());
    let objects = objects.expect("kernels should compile");
    let load = |(generated, object): (Generated, Vec<u8>)| Kernel {
        generated,
        loaded: Loaded::new(&object).expect("objects should load"),
    };
    generated.into_iter().zip(objects).map(load).collect()
}

impl Kernel {
    /// The kernel with its operands and results; it can be run many times on `threads` threads.
    pub fn bind<'a>(
        &'a self,
        ins: &'a [OwnedTensor],
        outs: &[TensorType],
        threads: usize,
    ) -> impl FnMut() + use<'a> {
        let shape = |ty: &TensorType| {
            ty.shape()
                .iter()
                .map(|&d| d as usize)
                .collect::<Vec<usize>>()
        };
        let zeros = |ty: &TensorType| OwnedTensor::zeros(codegen::dtype(ty.dtype()), &shape(ty));
        let mut results: Vec<OwnedTensor> = outs.iter().map(zeros).collect();
        let mut scratch = OwnedTensor::zeros(
            artifact::DType::U8,
            &[self.generated.scratch_bytes as usize],
        );
        move || {
            let mut pointers: Vec<*mut u8> = ins.iter().map(|t| t.as_ptr().cast_mut()).collect();
            pointers.extend(results.iter_mut().map(OwnedTensor::as_mut_ptr));
            pointers.push(scratch.as_mut_ptr());
            let pointers = Pointers(&pointers);
            for phase in &self.generated.phases {
                let function = self
                    .loaded
                    .function(&phase.symbol)
                    .expect("a kernel should have its functions");
                share(threads, phase.parts, |first, end| {
                    // SAFETY: the pointers belong to distinct tensors of the kernel's types, the
                    // parts to the phase.
                    unsafe { function(pointers.all().as_ptr(), first, end) };
                });
            }
        }
    }
    /// Runs the kernel on operands, into results of the given types. Results have arbitrary bytes
    /// before, or lie on operands. `cuts` are the cuts between a phase's calls, in 2^-16 of its
    /// parts.
    pub fn run(
        &self,
        ins: &[OwnedTensor],
        outs: &[TensorType],
        pairs: &[(usize, usize)],
        cuts: &[u16],
    ) -> Vec<OwnedTensor> {
        let shape = |ty: &TensorType| {
            ty.shape()
                .iter()
                .map(|&d| d as usize)
                .collect::<Vec<usize>>()
        };
        let rubbish = |dtype, shape: &[usize]| {
            let mut tensor = OwnedTensor::zeros(dtype, shape);
            tensor.fill(0xA5);
            tensor
        };
        let mut results: Vec<OwnedTensor> = outs
            .iter()
            .map(|ty| rubbish(codegen::dtype(ty.dtype()), &shape(ty)))
            .collect();
        for &(i, j) in pairs {
            results[j] = ins[i].clone();
        }
        let mut scratch = rubbish(
            artifact::DType::U8,
            &[self.generated.scratch_bytes as usize],
        );
        let result_pointers: Vec<*mut u8> =
            results.iter_mut().map(OwnedTensor::as_mut_ptr).collect();
        let mut pointers: Vec<*mut u8> = ins.iter().map(|t| t.as_ptr().cast_mut()).collect();
        for &(i, j) in pairs {
            pointers[i] = result_pointers[j];
        }
        pointers.extend(result_pointers);
        pointers.push(scratch.as_mut_ptr());
        for phase in &self.generated.phases {
            let function = self
                .loaded
                .function(&phase.symbol)
                .expect("a kernel should have its functions");
            let mut at: Vec<u64> = cuts
                .iter()
                .map(|&c| (phase.parts * u64::from(c)) >> 16)
                .collect();
            at.extend([0, phase.parts]);
            at.sort_unstable();
            // Backwards, because parts do not wait for each other.
            for pair in at.windows(2).rev() {
                // SAFETY: the pointers belong to tensors of the kernel's types, which are distinct
                // except for allowed in-place pairs; the parts belong to the phase.
                unsafe { function(pointers.as_ptr(), pair[0], pair[1]) };
            }
        }
        results
    }
}

/// Runs `f` on pieces of `0..parts`, on this many threads.
fn share(threads: usize, parts: u64, f: impl Fn(u64, u64) + Sync) {
    let pieces = parts.min(4 * threads as u64);
    let next = AtomicU64::new(0);
    let work = || {
        loop {
            let piece = next.fetch_add(1, Ordering::Relaxed);
            if pieces <= piece {
                return;
            }
            f(parts * piece / pieces, parts * (piece + 1) / pieces);
        }
    };
    std::thread::scope(|scope| {
        (1..threads).for_each(|_| {
            scope.spawn(work);
        });
        work();
    });
}

/// Pointers for the threads that share a kernel's run.
struct Pointers<'a>(&'a [*mut u8]);

impl Pointers<'_> {
    fn all(&self) -> &[*mut u8] {
        self.0
    }
}

// SAFETY: addresses are data; the caller of a kernel is responsible for accesses through them.
unsafe impl Sync for Pointers<'_> {}

/// An op's attributes in the artifact's types.
pub fn attrs(op: &Op) -> Vec<(String, artifact::Attr)> {
    op.attrs()
        .iter()
        .map(|(&key, value)| (key.to_string(), codegen::attr(value)))
        .collect()
}
/// A run of an op's plain kernel.
pub fn bind_plain<'a>(
    op: &Op,
    attrs: &'a [(String, artifact::Attr)],
    ins: &[&'a OwnedTensor],
    outs: &[TensorType],
) -> Result<Run<'a>, KernelError> {
    let types: Vec<(artifact::DType, Vec<usize>)> = outs
        .iter()
        .map(|ty| {
            (
                codegen::dtype(ty.dtype()),
                ty.shape().iter().map(|&d| d as usize).collect(),
            )
        })
        .collect();
    Run::new(op.name(), attrs, ins, &types, 1 << 20, &[])
}
/// The results of an op's plain kernel.
pub fn plain(
    op: &Op,
    ins: &[&OwnedTensor],
    outs: &[TensorType],
) -> Result<Vec<OwnedTensor>, KernelError> {
    let attrs = attrs(op);
    let mut run = bind_plain(op, &attrs, ins, outs)?;
    run.run()?;
    Ok(run.results)
}
