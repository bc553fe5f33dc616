//! A module of MLIR to the LLVM dialect. Only the dialects and passes that generated kernels need
//! are registered, because each makes the program megabytes larger.

use crate::{Request, llvm};
use melior::dialect::{DialectHandle, DialectRegistry};
use melior::ir::Module;
use melior::pass::PassManager;
use melior::{Context, utility};
use std::sync::{Arc, Mutex, PoisonError};

/// From `scf`, `math`, `arith`, `vector` to the LLVM dialect. Kernels are `llvm.func`s and access
/// memory by `llvm.load` and `llvm.store` as it is.
const PASSES: &str = "builtin.module(convert-scf-to-cf,convert-vector-to-llvm,convert-math-to-llvm,\
                      convert-arith-to-llvm,convert-cf-to-llvm,convert-nvvm-to-llvm,\
                      reconcile-unrealized-casts)";

/// What requests share.
pub(crate) struct Lowering {
    context: Context,
    /// MLIR's messages about the current module.
    findings: Arc<Mutex<Vec<String>>>,
    machines: llvm::Machines,
}

impl Lowering {
    pub(crate) fn new() -> Lowering {
        let registry = DialectRegistry::new();
        llvm::register(&registry);
        for handle in [
            DialectHandle::arith(),
            DialectHandle::cf(),
            DialectHandle::scf(),
            DialectHandle::llvm(),
        ] {
            handle.insert_dialect(&registry);
        }
        let context = Context::new_with_registry(&registry, false);
        context.load_all_available_dialects();
        llvm::register_translations(&context);
        let findings = Arc::new(Mutex::new(vec![]));
        let heard = findings.clone();
        context.attach_diagnostic_handler(move |finding| {
            heard
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .push(format!("{} {finding}", finding.location()));
            true
        });
        Lowering {
            context,
            findings,
            machines: llvm::Machines::default(),
        }
    }

    /// Answers a request.
    pub(crate) fn run(&mut self, text: &str, request: &Request) -> Result<Vec<u8>, String> {
        self.findings
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clear();
        let module = Module::parse(&self.context, text)
            .ok_or_else(|| self.said("the module does not parse"))?;
        let manager = PassManager::new(&self.context);
        manager.enable_verifier(true);
        utility::parse_pass_pipeline(manager.as_operation_pass_manager(), PASSES)
            .map_err(|e| e.to_string())?;
        let mut module = module;
        manager
            .run(&mut module)
            .map_err(|_| self.said("the module does not lower"))?;
        let machine = self.machines.of(&request.target)?;
        machine
            .emit(&module.as_operation(), request.stage)
            .map_err(|e| self.said(&e))
    }

    fn said(&self, what: &str) -> String {
        let findings = self.findings.lock().unwrap_or_else(PoisonError::into_inner);
        if findings.is_empty() {
            what.into()
        } else {
            format!("{what}: {}", findings.join("; "))
        }
    }
}
