//! Ends a compilation from outside, for example on Ctrl-C in a program that compiles on another
//! thread.
//!
//! The search is deep inside of planners and of rayon's threads when that happens, and it has no
//! result to give back. So it unwinds, as salsa does: [`Cancel::look`] resumes a panic whose value
//! is [`Cancelled`]. No message is printed, because no panic hook runs. The code that sets a flag
//! catches it with [`Cancelled::caught`]. A flag that is never set changes nothing.

use std::any::Any;
use std::panic::resume_unwind;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// A flag that all clones share. The default has none: it can never be set.
#[derive(Clone, Debug, Default)]
pub struct Cancel(Option<Arc<AtomicBool>>);

impl Cancel {
    /// A flag that is not set.
    pub fn new() -> Cancel {
        Cancel(Some(Arc::default()))
    }

    /// Ends what looks at this flag.
    pub fn set(&self) {
        if let Some(flag) = &self.0 {
            flag.store(true, Ordering::Relaxed);
        }
    }

    /// Unwinds if the flag is set. Passes, drafts and kernels begin with this, so some ten
    /// milliseconds lie between two looks for a graph of a thousand nodes.
    pub fn look(&self) {
        let flag = self.0.as_ref();
        if flag.is_some_and(|flag| flag.load(Ordering::Relaxed)) {
            resume_unwind(Box::new(Cancelled));
        }
    }
}

/// Clones of one flag are equal.
impl PartialEq for Cancel {
    fn eq(&self, other: &Cancel) -> bool {
        match (&self.0, &other.0) {
            (Some(flag), Some(other)) => Arc::ptr_eq(flag, other),
            (None, None) => true,
            (Some(_), None) | (None, Some(_)) => false,
        }
    }
}

/// The value with which a cancelled compilation unwinds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Cancelled;

impl Cancelled {
    /// What a thread unwound with, if it was cancelled. Every other panic goes on.
    pub fn caught(panic: Box<dyn Any + Send>) -> Cancelled {
        match panic.downcast::<Cancelled>() {
            Ok(cancelled) => *cancelled,
            Err(bug) => resume_unwind(bug),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rayon::prelude::*;
    use std::panic::{AssertUnwindSafe, catch_unwind};

    #[test]
    fn all_threads_end_and_the_flag_is_told_from_a_bug() {
        let cancel = Cancel::new();
        cancel.look();
        cancel.clone().set();
        let search = || (0..100).into_par_iter().for_each(|_| cancel.look());
        let ended = catch_unwind(AssertUnwindSafe(search));
        assert_eq!(Cancelled::caught(ended.unwrap_err()), Cancelled);

        let bug = catch_unwind(|| resume_unwind(Box::new("a bug"))).unwrap_err();
        let bug = AssertUnwindSafe(bug);
        let bug = catch_unwind(move || Cancelled::caught({ bug }.0)).unwrap_err();
        assert_eq!(bug.downcast_ref(), Some(&"a bug"));
    }

    #[test]
    fn a_flag_that_nobody_has_is_never_set() {
        Cancel::default().set();
        Cancel::default().look();
        assert_eq!(Cancel::default(), Cancel::default());
        assert_ne!(Cancel::new(), Cancel::new());
    }
}
