//! Machines for which code can be made. Compiler and runtime share these definitions.

use serde::{Deserialize, Serialize};
use std::fmt;

/// The machine that runs an object's code.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub enum Target {
    /// A processor. The object is a relocatable ELF file for its architecture.
    Cpu(Cpu),
    /// A GPU of NVIDIA. The object is a module of PTX, as text without a zero at its end.
    Gpu(Sm),
}

/// GPUs of NVIDIA by the instructions that code may use: the compute capability times ten, 90 for
/// an H100. A GPU also runs code for smaller numbers.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct Sm(pub u32);

impl Sm {
    /// The most bytes of shared memory of a block: CUDA C++ Programming Guide, "Technical
    /// Specifications per Compute Capability". For numbers that are not in it, the most of all.
    pub fn most_shared_bytes(self) -> u32 {
        let kib = match self.0 {
            75 => 64,
            70 | 72 => 96,
            86 | 89 | 120 | 121 => 99,
            80 | 87 => 163,
            _ => 227,
        };
        kib << 10
    }
}

impl fmt::Display for Sm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sm_{}", self.0)
    }
}

/// Processors by the instructions that code may use.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub enum Cpu {
    /// x86-64 with AVX2 and FMA: Intel since 2013, AMD since 2015.
    X86_64V3,
    /// x86-64 with AVX-512 (F, BW, CD, DQ, VL).
    X86_64V4,
    /// 64-bit ARM.
    Aarch64,
}

impl Cpu {
    /// The name that compilers use: `x86-64-v3`, `aarch64`.
    pub fn name(self) -> &'static str {
        match self {
            Cpu::X86_64V3 => "x86-64-v3",
            Cpu::X86_64V4 => "x86-64-v4",
            Cpu::Aarch64 => "aarch64",
        }
    }

    /// True if the processor that this program runs on can run the code.
    #[cfg(target_arch = "x86_64")]
    pub fn is_here(self) -> bool {
        let v3 = || {
            is_x86_feature_detected!("avx2")
                && is_x86_feature_detected!("fma")
                && is_x86_feature_detected!("f16c")
                && is_x86_feature_detected!("bmi1")
                && is_x86_feature_detected!("bmi2")
                && is_x86_feature_detected!("lzcnt")
                && is_x86_feature_detected!("movbe")
        };
        let v4 = || {
            is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512cd")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl")
        };
        match self {
            Cpu::X86_64V3 => v3(),
            Cpu::X86_64V4 => v3() && v4(),
            Cpu::Aarch64 => false,
        }
    }

    /// True if the processor that this program runs on can run the code.
    #[cfg(not(target_arch = "x86_64"))]
    pub fn is_here(self) -> bool {
        self == Cpu::Aarch64 && cfg!(target_arch = "aarch64")
    }
}

impl fmt::Display for Cpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Target::Cpu(cpu) => cpu.fmt(f),
            Target::Gpu(sm) => sm.fmt(f),
        }
    }
}
