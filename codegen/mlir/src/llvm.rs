//! The part of LLVM's C interface that is needed: from a module of the LLVM dialect to an object or
//! a text. mlir-sys links LLVM but declares only MLIR's functions, so LLVM's are declared here.
#![allow(
    unsafe_code,
    reason = "LLVM's C interface is called here, and nowhere else"
)]

use crate::Stage;
use melior::Context;
use melior::dialect::DialectRegistry;
use melior::ir::operation::OperationLike;
use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::ptr::null_mut;

type Ptr = *mut c_void;

// SAFETY: the declarations are copied from LLVM 22's headers
// llvm-c/{Core,Error,Target,TargetMachine}.h and llvm-c/Transforms/PassBuilder.h, with every
// reference as an untyped pointer.
unsafe extern "C" {
    fn LLVMContextCreate() -> Ptr;
    fn LLVMContextDispose(context: Ptr);
    fn LLVMInitializeX86Target();
    fn LLVMInitializeX86TargetInfo();
    fn LLVMInitializeX86TargetMC();
    fn LLVMInitializeX86AsmPrinter();
    fn LLVMInitializeAArch64Target();
    fn LLVMInitializeAArch64TargetInfo();
    fn LLVMInitializeAArch64TargetMC();
    fn LLVMInitializeAArch64AsmPrinter();
    fn LLVMInitializeNVPTXTarget();
    fn LLVMInitializeNVPTXTargetInfo();
    fn LLVMInitializeNVPTXTargetMC();
    fn LLVMInitializeNVPTXAsmPrinter();
    fn LLVMGetTargetFromTriple(
        triple: *const c_char,
        target: *mut Ptr,
        error: *mut *mut c_char,
    ) -> c_int;
    fn LLVMCreateTargetMachine(
        target: Ptr,
        triple: *const c_char,
        cpu: *const c_char,
        features: *const c_char,
        level: c_int,
        relocation: c_int,
        code_model: c_int,
    ) -> Ptr;
    fn LLVMCreateTargetDataLayout(machine: Ptr) -> Ptr;
    fn LLVMDisposeTargetData(layout: Ptr);
    fn LLVMSetModuleDataLayout(module: Ptr, layout: Ptr);
    fn LLVMSetTarget(module: Ptr, triple: *const c_char);
    fn LLVMCreatePassBuilderOptions() -> Ptr;
    fn LLVMDisposePassBuilderOptions(options: Ptr);
    fn LLVMRunPasses(module: Ptr, passes: *const c_char, machine: Ptr, options: Ptr) -> Ptr;
    fn LLVMGetErrorMessage(error: Ptr) -> *mut c_char;
    fn LLVMDisposeErrorMessage(message: *mut c_char);
    fn LLVMTargetMachineEmitToMemoryBuffer(
        machine: Ptr,
        module: Ptr,
        file_type: c_int,
        error: *mut *mut c_char,
        buffer: *mut Ptr,
    ) -> c_int;
    fn LLVMGetBufferStart(buffer: Ptr) -> *const u8;
    fn LLVMGetBufferSize(buffer: Ptr) -> usize;
    fn LLVMDisposeMemoryBuffer(buffer: Ptr);
    fn LLVMDisposeModule(module: Ptr);
    fn LLVMPrintModuleToString(module: Ptr) -> *mut c_char;
    fn LLVMDisposeMessage(message: *mut c_char);
}

// SAFETY: C++ functions of MLIR 22 that take one reference, by their mangled names: MLIR's C
// interface can only register the interfaces of all dialects, or of none.
unsafe extern "C" {
    #[link_name = "_ZN4mlir30registerLLVMDialectTranslationERNS_11MLIRContextE"]
    fn register_llvm_translation(context: Ptr);
    #[link_name = "_ZN4mlir30registerNVVMDialectTranslationERNS_11MLIRContextE"]
    fn register_nvvm_translation(context: Ptr);
    #[link_name = "_ZN4mlir33registerBuiltinDialectTranslationERNS_11MLIRContextE"]
    fn register_builtin_translation(context: Ptr);
    #[link_name = "_ZN4mlir34registerConvertNVVMToLLVMInterfaceERNS_15DialectRegistryE"]
    fn register_nvvm_to_llvm(registry: Ptr);
}

/// Registers the dialects for which melior has no handle, and the passes.
pub(crate) fn register(registry: &DialectRegistry) {
    // SAFETY: handles are constants, the registry lives through the calls; passes are registered
    // once, by the one caller.
    unsafe {
        for handle in [
            mlir_sys::mlirGetDialectHandle__math__(),
            mlir_sys::mlirGetDialectHandle__vector__(),
            mlir_sys::mlirGetDialectHandle__nvvm__(),
        ] {
            mlir_sys::mlirDialectHandleInsertDialect(handle, registry.to_raw());
        }
        register_nvvm_to_llvm(registry.to_raw().ptr.cast());
        mlir_sys::mlirRegisterConversionSCFToControlFlowPass();
        mlir_sys::mlirRegisterConversionConvertVectorToLLVMPass();
        mlir_sys::mlirRegisterConversionConvertMathToLLVMPass();
        mlir_sys::mlirRegisterConversionArithToLLVMConversionPass();
        mlir_sys::mlirRegisterConversionConvertControlFlowToLLVMPass();
        mlir_sys::mlirRegisterConversionConvertNVVMToLLVMPass();
        mlir_sys::mlirRegisterConversionReconcileUnrealizedCastsPass();
    }
}

/// Makes a context's modules translatable to LLVM.
pub(crate) fn register_translations(context: &Context) {
    let context: Ptr = context.to_raw().ptr.cast();
    // SAFETY: the context lives through the calls.
    unsafe {
        register_builtin_translation(context);
        register_llvm_translation(context);
        register_nvvm_translation(context);
    }
}

/// The target of code.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Target {
    pub(crate) triple: String,
    pub(crate) cpu: String,
    pub(crate) features: String,
}

/// LLVM's code generators, each made at its first use.
#[derive(Default)]
pub(crate) struct Machines(BTreeMap<Target, Machine>);

impl Machines {
    pub(crate) fn of(&mut self, target: &Target) -> Result<&Machine, String> {
        if !self.0.contains_key(target) {
            self.0.insert(target.clone(), Machine::new(target)?);
        }
        Ok(&self.0[target])
    }
}

/// A code generator. It lives until the process ends.
pub(crate) struct Machine {
    raw: Ptr,
    triple: CString,
}

impl Machine {
    fn new(target: &Target) -> Result<Machine, String> {
        let text = |s: &str| CString::new(s).map_err(|e| e.to_string());
        let (triple, cpu, features) = (
            text(&target.triple)?,
            text(&target.cpu)?,
            text(&target.features)?,
        );
        // SAFETY: initialising twice does nothing more; strings end with 0 and live through the
        // calls.
        unsafe {
            match target.triple.split('-').next() {
                Some("x86_64") => {
                    LLVMInitializeX86TargetInfo();
                    LLVMInitializeX86Target();
                    LLVMInitializeX86TargetMC();
                    LLVMInitializeX86AsmPrinter();
                }
                Some("aarch64") => {
                    LLVMInitializeAArch64TargetInfo();
                    LLVMInitializeAArch64Target();
                    LLVMInitializeAArch64TargetMC();
                    LLVMInitializeAArch64AsmPrinter();
                }
                Some("nvptx64") => {
                    LLVMInitializeNVPTXTargetInfo();
                    LLVMInitializeNVPTXTarget();
                    LLVMInitializeNVPTXTargetMC();
                    LLVMInitializeNVPTXAsmPrinter();
                }
                _ => return Err(format!("there is no code generator for {}", target.triple)),
            }
            let (mut found, mut error) = (null_mut(), null_mut());
            if LLVMGetTargetFromTriple(triple.as_ptr(), &mut found, &mut error) != 0 {
                return Err(taken(error));
            }
            // Aggressive optimisation, position-independent code, the small code model.
            let raw = LLVMCreateTargetMachine(
                found,
                triple.as_ptr(),
                cpu.as_ptr(),
                features.as_ptr(),
                3,
                2,
                3,
            );
            if raw.is_null() {
                return Err(format!(
                    "LLVM has no machine for {} {}",
                    target.triple, target.cpu
                ));
            }
            Ok(Machine { raw, triple })
        }
    }

    /// Optimises a module of the LLVM dialect and emits it.
    pub(crate) fn emit<'c: 'a, 'a>(
        &self,
        module: &impl OperationLike<'c, 'a>,
        stage: Stage,
    ) -> Result<Vec<u8>, String> {
        // SAFETY: each object is made and disposed of here, the module before its context. LLVM's
        // results are read while their owner lives.
        unsafe {
            let context = LLVMContextCreate();
            let result = self.emit_in(context, module.to_raw(), stage);
            LLVMContextDispose(context);
            result
        }
    }

    /// SAFETY: `context` is an LLVM context, `module` an operation.
    unsafe fn emit_in(
        &self,
        context: Ptr,
        module: mlir_sys::MlirOperation,
        stage: Stage,
    ) -> Result<Vec<u8>, String> {
        // SAFETY: as promised by the caller; the module is disposed of on every path.
        unsafe {
            let module: Ptr = mlir_sys::mlirTranslateModuleToLLVMIR(module, context.cast()).cast();
            if module.is_null() {
                return Err("the module does not become LLVM's".into());
            }
            LLVMSetTarget(module, self.triple.as_ptr());
            let layout = LLVMCreateTargetDataLayout(self.raw);
            LLVMSetModuleDataLayout(module, layout);
            LLVMDisposeTargetData(layout);
            let result = self.optimise(module).and_then(|()| match stage {
                Stage::Llvm => {
                    let text = LLVMPrintModuleToString(module);
                    let copy = CStr::from_ptr(text).to_bytes().to_vec();
                    LLVMDisposeMessage(text);
                    Ok(copy)
                }
                Stage::Asm => self.code(module, 0),
                Stage::Object => self.code(module, 1),
            });
            LLVMDisposeModule(module);
            result
        }
    }

    /// SAFETY: `module` is a module of LLVM's.
    unsafe fn optimise(&self, module: Ptr) -> Result<(), String> {
        // Kernels are already vectorised, and their loops are final. Of the usual passes only these
        // improve them.
        let passes =
            c"function(instcombine<no-verify-fixpoint>,early-cse,loop-mssa(licm),simplifycfg)";
        // SAFETY: as promised by the caller; an error is taken once.
        unsafe {
            let options = LLVMCreatePassBuilderOptions();
            let error = LLVMRunPasses(module, passes.as_ptr(), self.raw, options);
            LLVMDisposePassBuilderOptions(options);
            if error.is_null() {
                return Ok(());
            }
            let message = LLVMGetErrorMessage(error);
            let copy = CStr::from_ptr(message).to_string_lossy().into_owned();
            LLVMDisposeErrorMessage(message);
            Err(copy)
        }
    }

    /// SAFETY: `module` is a module of LLVM's.
    unsafe fn code(&self, module: Ptr, file_type: c_int) -> Result<Vec<u8>, String> {
        // SAFETY: as promised by the caller; the buffer is copied before it goes.
        unsafe {
            let (mut error, mut buffer) = (null_mut(), null_mut());
            if LLVMTargetMachineEmitToMemoryBuffer(
                self.raw,
                module,
                file_type,
                &mut error,
                &mut buffer,
            ) != 0
            {
                return Err(taken(error));
            }
            let bytes =
                std::slice::from_raw_parts(LLVMGetBufferStart(buffer), LLVMGetBufferSize(buffer))
                    .to_vec();
            LLVMDisposeMemoryBuffer(buffer);
            Ok(bytes)
        }
    }
}

/// Returns an LLVM message and disposes of it. SAFETY: `message` is one.
unsafe fn taken(message: *mut c_char) -> String {
    // SAFETY: as promised by the caller.
    unsafe {
        let copy = CStr::from_ptr(message).to_string_lossy().into_owned();
        LLVMDisposeMessage(message);
        copy
    }
}
