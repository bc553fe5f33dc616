//! The machines for which kernels are generated.

use std::fmt;

/// A processor for which kernels are generated. It needs fused multiply-adds. Kernels compute 16
/// elements at a time, for any width of its registers, so results are the same bits on every CPU.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum CpuTarget {
    /// x86-64 with AVX2 and FMA: Intel since 2013, AMD since 2015.
    Avx2,
    /// x86-64 with AVX-512.
    Avx512,
    /// 64-bit ARM.
    Neon,
}

/// A GPU for which kernels are generated.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum GpuTarget {
    /// NVIDIA's A100.
    Sm80,
    /// NVIDIA's RTX 3090.
    Sm86,
    /// NVIDIA's RTX 4090.
    Sm89,
    /// NVIDIA's H100 and H200.
    Sm90,
    /// NVIDIA's B200.
    Sm100,
}

/// A machine for which kernels are generated.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Target {
    /// Kernels are objects.
    Cpu(CpuTarget),
    /// Kernels are PTX.
    Gpu(GpuTarget),
}

impl CpuTarget {
    fn name(self) -> &'static str {
        match self {
            CpuTarget::Avx2 => "avx2",
            CpuTarget::Avx512 => "avx512",
            CpuTarget::Neon => "neon",
        }
    }

    fn cpu(self) -> &'static str {
        match self {
            CpuTarget::Avx2 => "x86-64-v3",
            CpuTarget::Avx512 => "x86-64-v4",
            CpuTarget::Neon => "generic",
        }
    }
}

impl GpuTarget {
    fn name(self) -> &'static str {
        match self {
            GpuTarget::Sm80 => "sm_80",
            GpuTarget::Sm86 => "sm_86",
            GpuTarget::Sm89 => "sm_89",
            GpuTarget::Sm90 => "sm_90",
            GpuTarget::Sm100 => "sm_100",
        }
    }
}

impl Target {
    /// See [`CpuTarget::Avx2`].
    pub const AVX2: Target = Target::Cpu(CpuTarget::Avx2);
    /// See [`CpuTarget::Avx512`].
    pub const AVX512: Target = Target::Cpu(CpuTarget::Avx512);
    /// See [`CpuTarget::Neon`].
    pub const NEON: Target = Target::Cpu(CpuTarget::Neon);
    /// See [`GpuTarget::Sm80`].
    pub const SM_80: Target = Target::Gpu(GpuTarget::Sm80);
    /// See [`GpuTarget::Sm86`].
    pub const SM_86: Target = Target::Gpu(GpuTarget::Sm86);
    /// See [`GpuTarget::Sm89`].
    pub const SM_89: Target = Target::Gpu(GpuTarget::Sm89);
    /// See [`GpuTarget::Sm90`].
    pub const SM_90: Target = Target::Gpu(GpuTarget::Sm90);
    /// See [`GpuTarget::Sm100`].
    pub const SM_100: Target = Target::Gpu(GpuTarget::Sm100);
    /// Every target.
    pub const ALL: [Target; 8] = [
        Target::AVX2,
        Target::AVX512,
        Target::NEON,
        Target::SM_80,
        Target::SM_86,
        Target::SM_89,
        Target::SM_90,
        Target::SM_100,
    ];

    /// The target for this machine; none if it lacks features that kernels need.
    pub fn host() -> Option<Target> {
        [Target::AVX512, Target::AVX2, Target::NEON]
            .into_iter()
            .find(|target| match target.in_artifacts() {
                artifact::Target::Cpu(cpu) => cpu.is_here(),
                artifact::Target::Gpu(_) => false,
            })
    }

    /// The target for a GPU by its compute capability times ten; none if no kernels support it.
    pub fn gpu(sm: u32) -> Option<Target> {
        Target::ALL
            .into_iter()
            .find(|target| target.in_artifacts() == artifact::Target::Gpu(artifact::Sm(sm)))
    }

    /// A GPU's compute capability times ten; `None` for a processor.
    pub fn sm(&self) -> Option<u32> {
        match self.in_artifacts() {
            artifact::Target::Gpu(artifact::Sm(sm)) => Some(sm),
            artifact::Target::Cpu(_) => None,
        }
    }

    /// What runs its kernels.
    pub fn processor(&self) -> ir::Processor {
        match self {
            Target::Cpu(_) => ir::Processor::Cpu,
            Target::Gpu(_) => ir::Processor::Gpu,
        }
    }

    /// Its short name: `avx2`, `sm_90`.
    pub fn name(&self) -> &'static str {
        match self {
            Target::Cpu(cpu) => cpu.name(),
            Target::Gpu(gpu) => gpu.name(),
        }
    }

    /// LLVM's name of processor, vendor and system.
    pub fn triple(&self) -> &'static str {
        match self {
            Target::Cpu(CpuTarget::Avx2 | CpuTarget::Avx512) => "x86_64-unknown-linux-gnu",
            Target::Cpu(CpuTarget::Neon) => "aarch64-unknown-linux-gnu",
            Target::Gpu(_) => "nvptx64-nvidia-cuda",
        }
    }

    /// LLVM's name of the processor.
    pub fn cpu(&self) -> &'static str {
        match self {
            Target::Cpu(cpu) => cpu.cpu(),
            Target::Gpu(gpu) => gpu.name(),
        }
    }

    /// Features that LLVM may use in addition to the processor's; `-` if none.
    fn features(&self) -> &'static str {
        match self {
            Target::Cpu(CpuTarget::Avx2 | CpuTarget::Avx512) => "-",
            Target::Cpu(CpuTarget::Neon) => "+neon",
            Target::Gpu(GpuTarget::Sm80 | GpuTarget::Sm86 | GpuTarget::Sm89 | GpuTarget::Sm90) => {
                "+ptx80"
            }
            Target::Gpu(GpuTarget::Sm100) => "+ptx86",
        }
    }

    /// The target in artifacts.
    pub fn in_artifacts(&self) -> artifact::Target {
        use artifact::{Cpu, Sm, Target as To};
        match self {
            Target::Cpu(CpuTarget::Avx2) => To::Cpu(Cpu::X86_64V3),
            Target::Cpu(CpuTarget::Avx512) => To::Cpu(Cpu::X86_64V4),
            Target::Cpu(CpuTarget::Neon) => To::Cpu(Cpu::Aarch64),
            Target::Gpu(GpuTarget::Sm80) => To::Gpu(Sm(80)),
            Target::Gpu(GpuTarget::Sm86) => To::Gpu(Sm(86)),
            Target::Gpu(GpuTarget::Sm89) => To::Gpu(Sm(89)),
            Target::Gpu(GpuTarget::Sm90) => To::Gpu(Sm(90)),
            Target::Gpu(GpuTarget::Sm100) => To::Gpu(Sm(100)),
        }
    }

    /// True if it is a GPU.
    pub fn is_gpu(&self) -> bool {
        matches!(self, Target::Gpu(_))
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {}", self.triple(), self.cpu(), self.features())
    }
}
