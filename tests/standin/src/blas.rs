//! The functions of cuBLASLt that the runtime uses. cublasLt.h describes their arguments.

#![allow(unsafe_code, reason = "a C interface")]
#![allow(non_snake_case, reason = "the names are the library's")]

use crate::api::world;
use crate::product::{Call, Layout, Number, Problem};
use crate::world::{Command, World};
use std::ffi::{c_int, c_void};
use std::hash::{DefaultHasher, Hash, Hasher};

// Statuses of cublas_api.h.
const SUCCESS: c_int = 0;
const INVALID_VALUE: c_int = 7;
const EXECUTION_FAILED: c_int = 13;
const NOT_SUPPORTED: c_int = 15;

// Numbers of cublasLt.h, cublas_api.h and library_types.h.
const COMPUTE_F32: c_int = 68;
const COMPUTE_TF32: c_int = 77;
const R_32F: c_int = 0;
const R_16BF: c_int = 14;
const EPILOGUE_DEFAULT: u32 = 1;
const EPILOGUE_BIAS: u32 = 4;
const REDUCTION_INPLACE: u32 = 1;
/// What the stand-in's algorithms begin with.
const MAGIC: u64 = 0x4c49_4748_5445_5241;
/// Bytes of a workspace that its algorithms use.
const USED_BYTES: u64 = 1024;

type Algorithm = [u64; 8];

/// cublasLtMatmulHeuristicResult_t of cublasLt.h.
#[repr(C)]
struct Choice {
    algorithm: Algorithm,
    workspace: usize,
    state: c_int,
    waves: f32,
    reserved: [c_int; 4],
}

struct Operation {
    transposed: [bool; 2],
    is_tf32: bool,
    epilogue: u32,
    bias: u64,
}

struct Preference {
    workspace: u64,
    reductions: u32,
    alignments: [u32; 4],
}

/// A function's status.
type Said = Result<(), c_int>;

fn status(said: Said) -> c_int {
    said.err().unwrap_or(SUCCESS)
}

/// A call of the library, which counts as one of the driver.
fn call(name: &'static str, does: impl FnOnce(&mut World) -> Said) -> c_int {
    let mut world = world();
    let entered = world.enter(name, true).map_err(|_| EXECUTION_FAILED);
    status(entered.and_then(|()| does(&mut world)))
}

/// An attribute's value.
///
/// # Safety
/// The pointer is valid for as many bytes as are told.
unsafe fn value<const N: usize>(bytes: *const c_void, n: usize) -> Result<[u8; N], c_int> {
    if n != N {
        return Err(INVALID_VALUE);
    }
    // SAFETY: by this function's contract.
    Ok(unsafe { bytes.cast::<[u8; N]>().read() })
}

/// Declares functions of the library.
macro_rules! library {
    ($(fn $name:ident($($arg:ident: $ty:ty),*) $body:block)*) => {$(
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name($($arg: $ty),*) -> c_int {
            // SAFETY: the caller follows cublasLt.h: results have room, descriptions were made by
            // this library and exist.
            unsafe { $body }
        }
    )*};
}

#[unsafe(no_mangle)]
extern "C" fn cublasLtGetVersion() -> usize {
    world().options.cublaslt as usize
}

library! {
    fn cublasLtCreate(handle: *mut *mut c_void) {
        call("cublasLtCreate", |_| {
            handle.write(Box::into_raw(Box::new(0_u64)).cast());
            Ok(())
        })
    }
    fn cublasLtDestroy(handle: *mut c_void) {
        drop(Box::from_raw(handle.cast::<u64>()));
        SUCCESS
    }
    fn cublasLtMatrixLayoutCreate(
        to: *mut *mut Layout, number: c_int, rows: u64, columns: u64, pitch: i64
    ) {
        let number = match number {
            R_32F => Number::F32,
            R_16BF => Number::Bf16,
            _ => return NOT_SUPPORTED,
        };
        let layout = Layout {
            number,
            rows,
            columns,
            pitch: pitch as u64,
            batch: 1,
            step: 0,
        };
        to.write(Box::into_raw(Box::new(layout)));
        SUCCESS
    }
    fn cublasLtMatrixLayoutSetAttribute(
        layout: *mut Layout, attribute: c_int, bytes: *const c_void, n: usize
    ) {
        let layout = &mut *layout;
        status(match attribute {
            5 => value(bytes, n).map(|b| layout.batch = i32::from_ne_bytes(b) as u64),
            6 => value(bytes, n).map(|b| layout.step = i64::from_ne_bytes(b) as u64),
            _ => Err(INVALID_VALUE),
        })
    }
    fn cublasLtMatrixLayoutDestroy(layout: *mut Layout) {
        drop(Box::from_raw(layout));
        SUCCESS
    }
    fn cublasLtMatmulDescCreate(to: *mut *mut Operation, compute: c_int, scale: c_int) {
        if ![COMPUTE_F32, COMPUTE_TF32].contains(&compute) || scale != R_32F {
            return NOT_SUPPORTED;
        }
        let operation = Operation {
            transposed: [false; 2],
            is_tf32: compute == COMPUTE_TF32,
            epilogue: EPILOGUE_DEFAULT,
            bias: 0,
        };
        to.write(Box::into_raw(Box::new(operation)));
        SUCCESS
    }
    fn cublasLtMatmulDescSetAttribute(
        operation: *mut Operation, attribute: c_int, bytes: *const c_void, n: usize
    ) {
        let operation = &mut *operation;
        status(match attribute {
            3 => value(bytes, n).map(|b| operation.transposed[0] = i32::from_ne_bytes(b) == 1),
            4 => value(bytes, n).map(|b| operation.transposed[1] = i32::from_ne_bytes(b) == 1),
            7 => value(bytes, n).map(|b| operation.epilogue = u32::from_ne_bytes(b)),
            8 => value(bytes, n).map(|b| operation.bias = u64::from_ne_bytes(b)),
            _ => Err(INVALID_VALUE),
        })
    }
    fn cublasLtMatmulDescDestroy(operation: *mut Operation) {
        drop(Box::from_raw(operation));
        SUCCESS
    }
    fn cublasLtMatmulPreferenceCreate(to: *mut *mut Preference) {
        let preference = Preference {
            workspace: 0,
            reductions: 7,
            alignments: [256; 4],
        };
        to.write(Box::into_raw(Box::new(preference)));
        SUCCESS
    }
    fn cublasLtMatmulPreferenceSetAttribute(
        preference: *mut Preference, attribute: c_int, bytes: *const c_void, n: usize
    ) {
        let preference = &mut *preference;
        status(match attribute {
            1 => value(bytes, n).map(|b| preference.workspace = u64::from_ne_bytes(b)),
            3 => value(bytes, n).map(|b| preference.reductions = u32::from_ne_bytes(b)),
            5..=8 => value(bytes, n).map(|b| {
                preference.alignments[attribute as usize - 5] = u32::from_ne_bytes(b);
            }),
            _ => Err(INVALID_VALUE),
        })
    }
    fn cublasLtMatmulPreferenceDestroy(preference: *mut Preference) {
        drop(Box::from_raw(preference));
        SUCCESS
    }
    fn cublasLtMatmulAlgoGetHeuristic(
        _handle: *mut c_void, operation: *const Operation, a: *const Layout, b: *const Layout,
        c: *const Layout, d: *const Layout, preference: *const Preference, wanted: c_int,
        choices: *mut Choice, found: *mut c_int
    ) {
        call("cublasLtMatmulAlgoGetHeuristic", |world| {
            let preference = &*preference;
            if preference.reductions & REDUCTION_INPLACE != 0 {
                world.find("an algorithm may add up parts in place: no order is sure".into());
            }
            if preference.alignments.iter().any(|&bytes| bytes > 64) {
                world.find("an algorithm may need more alignment than places have".into());
            }
            let problem = problem(&*operation, [&*a, &*b, &*c, &*d]);
            if let Some(why) = problem.misfit() {
                world.find(format!("cuBLASLt: {why}"));
                return Err(INVALID_VALUE);
            }
            found.write(0);
            if wanted > 0 {
                choices.write(choice(&problem, preference.workspace.min(USED_BYTES)));
                found.write(1);
            }
            Ok(())
        })
    }
    fn cublasLtMatmulAlgoCheck(
        _handle: *mut c_void, operation: *const Operation, a: *const Layout, b: *const Layout,
        c: *const Layout, d: *const Layout, algorithm: *const Algorithm, to: *mut Choice
    ) {
        call("cublasLtMatmulAlgoCheck", |_| {
            let problem = problem(&*operation, [&*a, &*b, &*c, &*d]);
            let right = choice(&problem, (*algorithm)[2]);
            if right.algorithm != *algorithm {
                return Err(NOT_SUPPORTED);
            }
            to.write(right);
            Ok(())
        })
    }
    fn cublasLtMatmul(
        _handle: *mut c_void, operation: *const Operation, alpha: *const f32,
        at_a: u64, a: *const Layout, at_b: u64, b: *const Layout, beta: *const f32,
        at_c: u64, c: *const Layout, at_d: u64, d: *const Layout, algorithm: *const Algorithm,
        workspace: u64, workspace_bytes: usize, stream: u64
    ) {
        call("cublasLtMatmul", |world| {
            let operation = &*operation;
            let problem = problem(operation, [&*a, &*b, &*c, &*d]);
            let used = (*algorithm)[2];
            if choice(&problem, used).algorithm != *algorithm {
                world.find("cublasLtMatmul: the algorithm is another product's".into());
            }
            if used > workspace_bytes as u64 || used > 0 && !workspace.is_multiple_of(256) {
                world.find(format!(
                    "cublasLtMatmul: {workspace_bytes} bytes at {workspace:#x} are no workspace of \
                     {used}"
                ));
                return Err(INVALID_VALUE);
            }
            let at = [at_a, at_b, at_c, at_d];
            if at.iter().any(|at| !at.is_multiple_of(64)) {
                world.find(format!("cublasLtMatmul: {at:#x?} are not aligned"));
            }
            let product = Call {
                problem,
                at,
                bias: operation.bias,
                alpha: *alpha,
                beta: *beta,
                workspace: (workspace, used),
            };
            let submitted = world.submit(stream, Command::Product(Box::new(product)));
            submitted.map_err(|_| EXECUTION_FAILED)
        })
    }
}

fn problem(operation: &Operation, layouts: [&Layout; 4]) -> Problem {
    Problem {
        transposed: operation.transposed,
        is_tf32: operation.is_tf32,
        has_bias: operation.epilogue == EPILOGUE_BIAS,
        layouts: layouts.map(|layout| *layout),
    }
}

/// The one algorithm that a product has.
fn choice(problem: &Problem, workspace: u64) -> Choice {
    let mut hasher = DefaultHasher::new();
    problem.hash(&mut hasher);
    Choice {
        algorithm: [MAGIC, hasher.finish(), workspace, 0, 0, 0, 0, 0],
        workspace: workspace as usize,
        state: SUCCESS,
        waves: 1.0,
        reserved: [0; 4],
    }
}
