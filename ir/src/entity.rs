//! Typed indices and the tables they index.
//!
//! Everything in a program is named by a `u32` newtype, so a value can never be mistaken for a node, and facts about entities live in side
//! tables keyed by the same ids. The prefix of an id is how it is spelled in the text form: `%12`, `n7`, `buf3`.

use std::fmt;
use std::marker::PhantomData;
use std::ops::{Index, IndexMut};

/// A typed index: a `u32` that belongs to one kind of table.
pub trait Id: Copy + Eq + Ord + fmt::Debug {
    fn from_index(index: usize) -> Self;
    fn index(self) -> usize;
}

macro_rules! id {
    ($(#[$doc:meta])* $name:ident, $prefix:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub u32);
        impl Id for $name {
            fn from_index(index: usize) -> Self {
                $name(u32::try_from(index).expect("more than 2^32 entities"))
            }
            fn index(self) -> usize {
                self.0 as usize
            }
        }
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($prefix, "{}"), self.0)
            }
        }
        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(self, f)
            }
        }
    };
}

id!(/// A named tensor dimension of a graph.
    DimId, "d");
id!(/// A tensor of a graph.
    ValueId, "%");
id!(/// An operation of a graph.
    NodeId, "n");
id!(/// A trainable parameter of a graph.
    ParamId, "p");
id!(/// A value in one sharding, in a sharded graph.
    FormId, "f");
id!(/// A flat group of parameters that are synchronised together, in a stage's program.
    BucketId, "bucket");
id!(/// A typed byte range of a stage's arena.
    BufferId, "buf");
id!(/// A straight-line piece of a stage's program.
    SegmentId, "seg");
id!(/// An event that orders two streams.
    EventId, "ev");

/// A growing table of `V`, indexed by `K`.
#[derive(Clone, PartialEq, Eq)]
pub struct Table<K, V> {
    rows: Vec<V>,
    key: PhantomData<K>,
}

impl<K: Id, V> Table<K, V> {
    pub fn new() -> Self {
        Table { rows: Vec::new(), key: PhantomData }
    }
    pub fn push(&mut self, row: V) -> K {
        let id = K::from_index(self.rows.len());
        self.rows.push(row);
        id
    }
    pub fn len(&self) -> usize {
        self.rows.len()
    }
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }
    /// Drops all rows from the `len`th on.
    pub fn truncate(&mut self, len: usize) {
        self.rows.truncate(len);
    }
    pub fn get(&self, id: K) -> Option<&V> {
        self.rows.get(id.index())
    }
    pub fn get_mut(&mut self, id: K) -> Option<&mut V> {
        self.rows.get_mut(id.index())
    }
    pub fn ids(&self) -> impl DoubleEndedIterator<Item = K> + ExactSizeIterator + use<K, V> {
        (0..self.rows.len()).map(K::from_index)
    }
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = (K, &V)> + ExactSizeIterator {
        self.rows.iter().enumerate().map(|(i, v)| (K::from_index(i), v))
    }
    pub fn iter_mut(&mut self) -> impl DoubleEndedIterator<Item = (K, &mut V)> + ExactSizeIterator {
        self.rows.iter_mut().enumerate().map(|(i, v)| (K::from_index(i), v))
    }
    pub fn values(&self) -> std::slice::Iter<'_, V> {
        self.rows.iter()
    }
    /// A table with the same keys and rows computed from each.
    pub fn map<W>(&self, mut f: impl FnMut(K, &V) -> W) -> Table<K, W> {
        self.iter().map(|(k, v)| f(k, v)).collect()
    }
}

impl<K: Id, V: Clone> Table<K, V> {
    /// A side table with one `row` for each of `len` entities.
    pub fn filled(len: usize, row: V) -> Self {
        Table { rows: vec![row; len], key: PhantomData }
    }
}

impl<K: Id, V> Default for Table<K, V> {
    fn default() -> Self {
        Self::new()
    }
}
impl<K: Id, V> FromIterator<V> for Table<K, V> {
    fn from_iter<I: IntoIterator<Item = V>>(iter: I) -> Self {
        Table { rows: iter.into_iter().collect(), key: PhantomData }
    }
}
impl<K: Id, V> Index<K> for Table<K, V> {
    type Output = V;
    fn index(&self, id: K) -> &V {
        &self.rows[id.index()]
    }
}
impl<K: Id, V> IndexMut<K> for Table<K, V> {
    fn index_mut(&mut self, id: K) -> &mut V {
        &mut self.rows[id.index()]
    }
}
impl<K: Id, V: fmt::Debug> fmt::Debug for Table<K, V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.iter()).finish()
    }
}
