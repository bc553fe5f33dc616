//! Kernels: PTX, compiled by the driver for the device that is there.

use super::context::Context;
use super::device::Device;
use super::driver::{Arguments, DriverError, Grid, Handle};
use super::stream::Stream;
use std::ffi::{CStr, CString, c_int};
use std::fmt;
use std::sync::Arc;

/// Compiled PTX.
pub struct Module {
    context: Arc<Context>,
    handle: Handle,
}

/// A kernel of a module, which it keeps.
#[derive(Clone)]
pub struct Function {
    handle: Handle,
    most_threads: u32,
    _module: Arc<Module>,
}

/// Why a module or a function of it cannot be used.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ModuleError {
    /// The bytes are no text.
    #[error("is no PTX: a zero byte is in it")]
    NotText,
    /// The driver refuses.
    #[error("{source}{}", Log(log))]
    Driver {
        /// Why.
        source: DriverError,
        /// What its compiler says; may be empty.
        log: String,
    },
    /// A name that a kernel cannot have.
    #[error("{0:?} is no kernel's name")]
    Name(String),
    /// More dynamic shared memory than can be said to the driver.
    #[error("{0} bytes of shared memory are more than any device has")]
    Shared(u32),
}

impl From<DriverError> for ModuleError {
    fn from(source: DriverError) -> ModuleError {
        ModuleError::Driver {
            source,
            log: String::new(),
        }
    }
}

impl ModuleError {
    /// The driver's part in it, if it has one.
    pub fn driver(&self) -> Option<&DriverError> {
        match self {
            ModuleError::Driver { source, .. } => Some(source),
            ModuleError::NotText | ModuleError::Name(_) | ModuleError::Shared(_) => None,
        }
    }
}

/// A compiler's messages, on one line.
struct Log<'a>(&'a str);

impl fmt::Display for Log<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut lines = self
            .0
            .lines()
            .map(str::trim)
            .filter(|line| !line.is_empty());
        lines.try_for_each(|line| write!(f, "; {line}"))
    }
}

impl Module {
    /// Has the driver compile PTX.
    ///
    /// # Errors
    /// The driver does not take it: then the error has its compiler's messages.
    pub fn load(device: &Device, ptx: &[u8]) -> Result<Arc<Module>, ModuleError> {
        // A text from an assembler may end with the zero already.
        let text = match ptx {
            [text @ .., 0] => text,
            text => text,
        };
        let text = CString::new(text).map_err(|_| ModuleError::NotText)?;
        let context = device.context();
        context.alive()?;
        let handle = compiled(context, &text)?;
        Ok(Arc::new(Module {
            context: context.clone(),
            handle,
        }))
    }

    /// A kernel by its name, to be launched with up to `shared_bytes` bytes of dynamic shared
    /// memory.
    ///
    /// # Errors
    /// There is none, or the device has no such memory.
    pub fn function(
        self: &Arc<Self>,
        name: &str,
        shared_bytes: u32,
    ) -> Result<Function, ModuleError> {
        let symbol = CString::new(name).map_err(|_| ModuleError::Name(name.into()))?;
        let context = &self.context;
        let handle = context.call(|driver| driver.module_function(self.handle, &symbol))?;
        if shared_bytes > 0 {
            let bytes = c_int::try_from(shared_bytes);
            let bytes = bytes.map_err(|_| ModuleError::Shared(shared_bytes))?;
            context.call(|driver| driver.permit_shared(handle, bytes))?;
        }
        let most_threads = context.call(|driver| driver.most_threads(handle))?;
        Ok(Function {
            handle,
            most_threads: u32::try_from(most_threads).unwrap_or(0),
            _module: self.clone(),
        })
    }
}

/// The handle of compiled PTX.
fn compiled(context: &Context, ptx: &CStr) -> Result<Handle, ModuleError> {
    let mut log = String::new();
    let loaded = context.call(|driver| {
        driver.module_load(ptx).map_err(|(source, said)| {
            log = said;
            source
        })
    });
    loaded.map_err(|source| ModuleError::Driver { source, log })
}

impl Stream {
    /// Starts a kernel with these arguments.
    pub fn launch(
        &self,
        function: &Function,
        grid: Grid,
        arguments: &Arguments,
    ) -> Result<(), DriverError> {
        self.context()
            .call(|driver| driver.launch(function.handle, grid, arguments, self.handle()))
    }
}

impl Function {
    pub(super) fn handle(&self) -> Handle {
        self.handle
    }
    /// The most threads that a block of it can have on this device.
    pub fn most_threads(&self) -> u32 {
        self.most_threads
    }
}

impl fmt::Debug for Module {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Module").field(&self.handle).finish()
    }
}

impl fmt::Debug for Function {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Function").field(&self.handle).finish()
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        self.context
            .destroy(|driver| driver.module_unload(self.handle));
    }
}
