//! Statuses of calls, with the names and texts of cuda.h.

use std::ffi::CStr;

/// The status of a failed call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Status(pub(crate) u32);

/// Declares the statuses that the stand-in returns, by itself or on request.
macro_rules! statuses {
    ($($name:ident = $code:literal, $text:literal;)*) => {
        impl Status {
            $(pub(crate) const $name: Status = Status($code);)*

            /// The name in cuda.h, and its meaning.
            pub(crate) fn words(self) -> Option<(&'static CStr, &'static CStr)> {
                let words: (&str, &str) = match self {
                    $(Status::$name => (
                        concat!("CUDA_", stringify!($name), "\0"),
                        concat!($text, "\0"),
                    ),)*
                    _ => return None,
                };
                let text = |text: &'static str| CStr::from_bytes_with_nul(text.as_bytes()).ok();
                Some((text(words.0)?, text(words.1)?))
            }
        }
    };
}

statuses! {
    SUCCESS = 0, "no error";
    ERROR_INVALID_VALUE = 1, "invalid argument";
    ERROR_OUT_OF_MEMORY = 2, "out of memory";
    ERROR_NOT_INITIALIZED = 3, "initialization error";
    ERROR_INVALID_DEVICE = 101, "invalid device ordinal";
    ERROR_INVALID_CONTEXT = 201, "invalid device context";
    ERROR_ECC_UNCORRECTABLE = 214, "uncorrectable ECC error encountered";
    ERROR_INVALID_PTX = 218, "a PTX JIT compilation failed";
    ERROR_UNSUPPORTED_PTX_VERSION = 222, "the provided PTX is too new";
    ERROR_INVALID_HANDLE = 400, "invalid resource handle";
    ERROR_NOT_FOUND = 500, "named symbol not found";
    ERROR_NOT_READY = 600, "device not ready";
    ERROR_ILLEGAL_ADDRESS = 700, "an illegal memory access was encountered";
    ERROR_LAUNCH_TIMEOUT = 702, "the launch timed out and was terminated";
    ERROR_HOST_MEMORY_ALREADY_REGISTERED = 712, "memory is already mapped";
    ERROR_HOST_MEMORY_NOT_REGISTERED = 713, "memory is not registered";
    ERROR_LAUNCH_FAILED = 719, "unspecified launch failure";
    ERROR_NOT_SUPPORTED = 801, "operation not supported";
}
