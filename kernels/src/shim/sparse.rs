//! Addresses without memory: zeros, of which only pages that are touched take any.

use memmap2::{MmapMut, MmapOptions};

use super::ShimError;

/// Zeroed bytes at the beginning of a page.
pub struct Sparse {
    map: MmapMut,
    bytes: usize,
}

impl Sparse {
    /// # Errors
    /// If the system has no so many addresses, or promises none that it has no memory for.
    pub fn new(bytes: usize) -> Result<Sparse, ShimError> {
        // A map of nothing is refused.
        let map = MmapOptions::new().len(bytes.max(1)).no_reserve_swap().map_anon();
        Ok(Sparse { map: map.map_err(|source| ShimError::Addresses { bytes, source })?, bytes })
    }
    pub fn bytes(&self) -> &[u8] {
        &self.map[..self.bytes]
    }
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.map[..self.bytes]
    }
}
