//! For whom kernels are made.

use std::fmt;

/// A machine that kernels are made for. Kernels for a CPU need fused multiply-adds; all of them
/// compute 16 elements at a time, whatever the width of the machine's registers, so that their
/// results are the same bits on every CPU.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Target {
    /// LLVM's name of processor, vendor and system.
    pub triple: &'static str,
    /// LLVM's name of the processor.
    pub cpu: &'static str,
    /// What LLVM may use beside what the processor has: `+f16c,-avx`.
    pub features: &'static str,
}

impl Target {
    /// x86-64 with AVX2 and FMA: Intel since 2013, AMD since 2015.
    pub const AVX2: Target = Target {
        triple: "x86_64-unknown-linux-gnu",
        cpu: "x86-64-v3",
        features: "",
    };
    /// x86-64 with AVX-512.
    pub const AVX512: Target = Target {
        triple: "x86_64-unknown-linux-gnu",
        cpu: "x86-64-v4",
        features: "",
    };
    /// 64-bit ARM.
    pub const NEON: Target = Target {
        triple: "aarch64-unknown-linux-gnu",
        cpu: "generic",
        features: "+neon",
    };
    /// NVIDIA's A100.
    pub const SM_80: Target = Target {
        triple: "nvptx64-nvidia-cuda",
        cpu: "sm_80",
        features: "+ptx80",
    };
    /// NVIDIA's H100 and H200.
    pub const SM_90: Target = Target {
        triple: "nvptx64-nvidia-cuda",
        cpu: "sm_90",
        features: "+ptx80",
    };
    /// NVIDIA's B200.
    pub const SM_100: Target = Target {
        triple: "nvptx64-nvidia-cuda",
        cpu: "sm_100",
        features: "+ptx86",
    };
    /// Every target.
    pub const ALL: [Target; 6] = [
        Target::AVX2,
        Target::AVX512,
        Target::NEON,
        Target::SM_80,
        Target::SM_90,
        Target::SM_100,
    ];

    /// The target for the machine that this runs on; none if it lacks what kernels need.
    pub fn host() -> Option<Target> {
        [Target::AVX512, Target::AVX2, Target::NEON]
            .into_iter()
            .find(|target| artifact::runs(target.processor()))
    }
    /// Its short name: `avx2`, `sm_90`.
    pub fn name(&self) -> &'static str {
        match self.cpu {
            "x86-64-v3" => "avx2",
            "x86-64-v4" => "avx512",
            "generic" => "neon",
            cpu => cpu,
        }
    }
    /// What artifacts call the processors that can run its code: see [`artifact::runs`].
    pub fn processor(&self) -> &'static str {
        if self.triple.starts_with("aarch64") {
            "aarch64"
        } else {
            self.cpu
        }
    }
    /// True if it is a GPU.
    pub fn is_gpu(&self) -> bool {
        self.triple.starts_with("nvptx")
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} {} {}",
            self.triple,
            self.cpu,
            if self.features.is_empty() {
                "-"
            } else {
                self.features
            }
        )
    }
}
