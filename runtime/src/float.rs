//! How the processor computes with floats, while a thread runs kernels.
//!
//! A program may have its threads take denormal numbers for zero: `torch.set_flush_denormal` does
//! so, and libraries that were compiled with `-ffast-math` do when they are loaded. Kernels on such
//! a thread would give other bits than on the team's, and no run would be like the one before.

#![allow(
    unsafe_code,
    reason = "the register that says so has no function of the language"
)]

/// While it exists, this thread computes as the standard says: to nearest, with denormal numbers.
pub(crate) struct Standard {
    was: u64,
}

impl Standard {
    pub(crate) fn enter() -> Standard {
        let was = control();
        if was != STANDARD {
            set_control(STANDARD);
        }
        Standard { was }
    }
}

impl Drop for Standard {
    fn drop(&mut self) {
        if self.was != STANDARD {
            set_control(self.was);
        }
    }
}

/// Nothing is trapped, and no exception has been noted yet.
#[cfg(target_arch = "x86_64")]
const STANDARD: u64 = 0x1F80;
#[cfg(not(target_arch = "x86_64"))]
const STANDARD: u64 = 0;

/// The register, without the exceptions that were noted.
#[cfg(target_arch = "x86_64")]
fn control() -> u64 {
    let mut value = 0_u32;
    // SAFETY: the instruction writes four bytes, which are the variable's.
    unsafe {
        let at = &raw mut value;
        std::arch::asm!("stmxcsr [{}]", in(reg) at, options(nostack, preserves_flags));
    }
    u64::from(value & !0x3F)
}
#[cfg(target_arch = "x86_64")]
fn set_control(value: u64) {
    let value = value as u32;
    // SAFETY: the instruction reads four bytes, which are the variable's. The value is the
    // standard's, which the language relies on, or what the thread had.
    unsafe {
        let at = &raw const value;
        std::arch::asm!("ldmxcsr [{}]", in(reg) at, options(nostack, readonly, preserves_flags));
    }
}

#[cfg(target_arch = "aarch64")]
fn control() -> u64 {
    let value: u64;
    // SAFETY: the instruction reads a register that every thread may read.
    unsafe { std::arch::asm!("mrs {}, fpcr", out(reg) value, options(nomem, nostack)) };
    value
}
#[cfg(target_arch = "aarch64")]
fn set_control(value: u64) {
    // SAFETY: as above; the value is the standard's, which the language relies on, or what the
    // thread had.
    unsafe { std::arch::asm!("msr fpcr, {}", in(reg) value, options(nomem, nostack)) };
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn control() -> u64 {
    STANDARD
}
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn set_control(_: u64) {}

#[cfg(test)]
mod tests {
    use super::*;
    use std::hint::black_box;

    #[test]
    #[cfg(target_arch = "x86_64")]
    fn denormal_numbers_count_meanwhile() {
        let half = || black_box(1e-40_f32) * black_box(0.5_f32);
        std::thread::spawn(move || {
            // Denormal operands and results are zero.
            set_control(STANDARD | 0x8040);
            assert_eq!(half(), 0.0);
            {
                let _standard = Standard::enter();
                assert_eq!(half(), 5e-41);
            }
            assert_eq!(half(), 0.0);
        })
        .join()
        .expect("the thread should end");
    }
}
