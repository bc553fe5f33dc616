//! Typed arenas. An id is a `u32` newtype that is `Copy` and names its entry in one [`Table`];
//! tables are append-only, so an id stays valid for the life of its table.

use std::fmt;
use std::marker::PhantomData;
use std::ops::{Index, IndexMut};

/// An id that indexes a [`Table`].
pub trait Id: Copy + Eq + Ord + fmt::Debug {
    /// The id of entry `index`.
    fn new(index: usize) -> Self;
    /// The position of this id's entry.
    fn index(self) -> usize;
}

/// Declares id types, each with the prefix that it prints.
///
/// ```
/// lighterage_ir::ids! {
///     /// A room.
///     Room = "r";
/// }
/// let mut rooms: lighterage_ir::Table<Room, &str> = lighterage_ir::Table::new();
/// let hall = rooms.push("hall");
/// assert_eq!((rooms[hall], format!("{hall:?}")), ("hall", "r0".to_string()));
/// ```
#[macro_export]
macro_rules! ids {
    ($($(#[$doc:meta])* $name:ident = $prefix:literal;)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(u32);
        impl $name {
            /// The id of entry `index`, in constants.
            pub const fn nth(index: u32) -> Self {
                Self(index)
            }
        }
        impl $crate::table::Id for $name {
            #[inline]
            fn new(index: usize) -> Self {
                Self(u32::try_from(index).expect("a table should hold fewer than 2^32 entries"))
            }
            #[inline]
            fn index(self) -> usize {
                self.0 as usize
            }
        }
        impl std::fmt::Debug for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                write!(f, concat!($prefix, "{}"), self.0)
            }
        }
    )*};
}

/// An append-only arena of `T`, indexed by the id `K`.
#[derive(Clone, PartialEq, Eq)]
pub struct Table<K, T> {
    rows: Vec<T>,
    id: PhantomData<fn(K)>,
}

impl<K: Id, T> Table<K, T> {
    /// An empty table.
    pub fn new() -> Self {
        Self {
            rows: Vec::new(),
            id: PhantomData,
        }
    }
    /// A table of `n` copies of `row`.
    pub fn filled(n: usize, row: T) -> Self
    where
        T: Clone,
    {
        Self {
            rows: vec![row; n],
            id: PhantomData,
        }
    }
    /// Appends a row; returns its id.
    pub fn push(&mut self, row: T) -> K {
        let id = self.next_id();
        self.rows.push(row);
        id
    }
    /// The id of the row that is pushed next.
    pub fn next_id(&self) -> K {
        K::new(self.rows.len())
    }
    /// The number of rows.
    pub fn len(&self) -> usize {
        self.rows.len()
    }
    /// True if the table has no rows.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }
    /// The row of `id`, if it is in this table.
    pub fn get(&self, id: K) -> Option<&T> {
        self.rows.get(id.index())
    }
    /// All ids, in order.
    pub fn ids(&self) -> impl DoubleEndedIterator<Item = K> + ExactSizeIterator + use<K, T> {
        (0..self.rows.len()).map(K::new)
    }
    /// All rows with their ids, in order.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = (K, &T)> + ExactSizeIterator {
        self.rows
            .iter()
            .enumerate()
            .map(|(i, row)| (K::new(i), row))
    }
    /// All rows, in order.
    pub fn values(&self) -> std::slice::Iter<'_, T> {
        self.rows.iter()
    }
    /// All rows, in order, to be changed.
    pub fn values_mut(&mut self) -> std::slice::IterMut<'_, T> {
        self.rows.iter_mut()
    }
    /// All rows, in order, taken out.
    pub fn into_values(self) -> std::vec::IntoIter<T> {
        self.rows.into_iter()
    }
}

impl<K: Id, T> Default for Table<K, T> {
    fn default() -> Self {
        Self::new()
    }
}
impl<K: Id, T> FromIterator<T> for Table<K, T> {
    fn from_iter<I: IntoIterator<Item = T>>(rows: I) -> Self {
        Self {
            rows: rows.into_iter().collect(),
            id: PhantomData,
        }
    }
}
impl<K: Id, T> Index<K> for Table<K, T> {
    type Output = T;
    fn index(&self, id: K) -> &T {
        &self.rows[id.index()]
    }
}
impl<K: Id, T> IndexMut<K> for Table<K, T> {
    fn index_mut(&mut self, id: K) -> &mut T {
        &mut self.rows[id.index()]
    }
}
impl<K: Id, T: fmt::Debug> fmt::Debug for Table<K, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(&self.rows).finish()
    }
}
