//! Processors by what machine code may use: compiler and runtime must mean the same by a name.

/// True if the processor that this runs on can run code for `cpu`: `x86-64-v3` (AVX2 and FMA: Intel
/// since 2013, AMD since 2015), `x86-64-v4` (AVX-512), `aarch64`.
pub fn runs(cpu: &str) -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        let v3 = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c")
            && is_x86_feature_detected!("bmi1")
            && is_x86_feature_detected!("bmi2")
            && is_x86_feature_detected!("lzcnt")
            && is_x86_feature_detected!("movbe");
        let v4 = v3
            && is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512cd")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl");
        (cpu == "x86-64-v3" && v3) || (cpu == "x86-64-v4" && v4)
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        cfg!(target_arch = "aarch64") && cpu == "aarch64"
    }
}
