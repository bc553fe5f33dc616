//! What device and driver the stand-in is, and which call fails.

/// The simulated device and driver, and the call that fails. The library reads them from the
/// environment at its first call; a test replaces them by [`crate::Standin::reset`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub struct Options {
    /// Seed of the order in which streams run. `STANDIN_SEED`.
    pub seed: u64,
    /// Bytes of device memory. `STANDIN_BYTES`.
    pub device_bytes: u64,
    /// The device's architecture: 90 is `sm_90`. `STANDIN_SM`.
    pub sm: u32,
    /// The driver's version, as in `cuDriverGetVersion`: 12020 is 12.2. `STANDIN_DRIVER`.
    pub driver: u32,
    /// The number of the call that fails, from 1; 0: none. `STANDIN_FAIL_AT`.
    pub fail_at: u64,
    /// The status that this call returns. `STANDIN_FAIL_WITH`.
    pub fail_with: u32,
    /// 1: all later calls return the status too, and nothing runs any more. 0: only this call.
    /// `STANDIN_STICKY`.
    pub sticky: u32,
    /// The number of the command that never ends, from 1, and with it its stream; 0: none.
    /// `STANDIN_HANG_AT`.
    pub hang_at: u64,
    /// 1: launches that find the same bytes as an earlier one are not interpreted again, also those
    /// before a reset. `STANDIN_REMEMBERS`.
    pub remembers: u32,
    /// The version of cuBLASLt: 130100 is 13.1. `STANDIN_CUBLASLT`.
    pub cublaslt: u64,
    /// 1: an address of device memory is an address of the process, so that a program without a GPU
    /// can use the memory. Bounds of allocations are less exact. `STANDIN_UNIFIED`.
    pub unified: u32,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            seed: 1,
            device_bytes: 64 << 20,
            sm: 90,
            driver: 13000,
            fail_at: 0,
            fail_with: 719,
            sticky: 1,
            hang_at: 0,
            remembers: 0,
            cublaslt: 130_100,
            unified: 0,
        }
    }
}

impl Options {
    /// The options from variables, with defaults.
    ///
    /// # Panics
    /// A variable is not a number: a misspelt test should not pass.
    pub(crate) fn of(variable: impl Fn(&str) -> Option<String>) -> Options {
        let number = |name: &str, or: u64| match variable(name) {
            Some(text) => text
                .parse()
                .unwrap_or_else(|_| panic!("{name} should be a number, not {text:?}")),
            None => or,
        };
        let small = |name: &str, or: u32| {
            u32::try_from(number(name, or.into()))
                .unwrap_or_else(|_| panic!("{name} should have 32 bits"))
        };
        let or = Options::default();
        Options {
            seed: number("STANDIN_SEED", or.seed),
            device_bytes: number("STANDIN_BYTES", or.device_bytes),
            sm: small("STANDIN_SM", or.sm),
            driver: small("STANDIN_DRIVER", or.driver),
            fail_at: number("STANDIN_FAIL_AT", or.fail_at),
            fail_with: small("STANDIN_FAIL_WITH", or.fail_with),
            sticky: small("STANDIN_STICKY", or.sticky),
            hang_at: number("STANDIN_HANG_AT", or.hang_at),
            remembers: small("STANDIN_REMEMBERS", or.remembers),
            cublaslt: number("STANDIN_CUBLASLT", or.cublaslt),
            unified: small("STANDIN_UNIFIED", or.unified),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_change_what_they_name() {
        let given = |name: &str| match name {
            "STANDIN_SM" => Some("80".into()),
            "STANDIN_FAIL_AT" => Some("7".into()),
            _ => None,
        };
        let expected = Options {
            sm: 80,
            fail_at: 7,
            ..Options::default()
        };
        assert_eq!(Options::of(given), expected);
    }
}
