//! Where the states of a step live, so that steps on batches of other sizes can share them.
//!
//! Several steps run on one set of states without a copy if each finds every state at the same
//! address. Addresses follow from two facts: which states live on the host, and in which chunks.
//! For in each pool, the states come first, in the order of the graph: see
//! [`states_first`](crate::alloc::states_first). So the first step is planned freely, and all
//! others start from its [`Homes`], which their planners do not change.

use std::collections::BTreeSet;

/// Where states live, by path: the graphs of two steps number them differently.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Homes {
    /// States that live on the host.
    pub(super) hosted: BTreeSet<String>,
    /// Of these, those that live on the disk behind it.
    pub(super) on_disk: BTreeSet<String>,
    /// Those that come in one copy.
    pub(super) chunks: Vec<Vec<String>>,
    /// Nodes that the host runs, by name: updates of hosted states.
    pub(super) on_host: BTreeSet<String>,
}

impl Homes {
    /// The same homes, of which some are on the disk.
    pub fn with_disk(self, on_disk: BTreeSet<String>) -> Homes {
        Homes { on_disk, ..self }
    }

    /// True if a state lives on the host.
    pub fn has_hosted(&self) -> bool {
        !self.hosted.is_empty()
    }
}
