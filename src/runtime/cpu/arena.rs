//! A rank's memory: one allocation, in which the program's buffers are byte ranges; the program's host memory lies behind its arena. What is in the rank's file is behind both.
//!
//! The memory is shared between threads as raw bytes. Who may touch which range when is what the program verifier proves; this module only
//! checks that ranges lie inside the arena and are aligned, when a program is loaded.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::io;
use std::ptr::NonNull;

use dplan_ir::dtype::DType;
use dplan_ir::mesh::Mesh;
use dplan_ir::program::{ALIGN, Buffer};
use dplan_kernels::cpu::block::{Block, BlockMut};

use crate::runtime::scratch::Scratch;

/// Zeroed bytes at an aligned address.
#[derive(Debug)]
pub struct Arena {
    base: NonNull<u8>,
    layout: Layout,
    bytes: u64,
    file: Option<Scratch>,
}

// SAFETY: an arena is plain bytes; the accesses of different threads are ordered by the program (see the module docs).
unsafe impl Send for Arena {}
// SAFETY: as above.
unsafe impl Sync for Arena {}

impl Arena {
    /// `None` if there is not so much memory.
    pub fn new(bytes: u64, file: Option<Scratch>) -> Option<Arena> {
        let layout = Layout::from_size_align(usize::try_from(bytes).ok()?.max(1), ALIGN as usize).ok()?;
        // SAFETY: the size is not zero.
        let base = NonNull::new(unsafe { alloc_zeroed(layout) })?;
        Some(Arena { base, layout, bytes, file })
    }
    /// What was asked for.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
    pub fn file(&self) -> Option<&Scratch> {
        self.file.as_ref()
    }
    /// The address of a slot for a micro-batch.
    pub fn at(&self, slot: &Slot, micro_batch: u64) -> *mut u8 {
        let offset = slot.offset + (micro_batch % slot.slots) as usize * slot.stride;
        debug_assert!(offset + slot.bytes <= self.layout.size());
        // SAFETY: `Slot::new` checked that every slot ends inside the arena.
        unsafe { self.base.as_ptr().add(offset) }
    }
    /// The elements of a slot.
    ///
    /// # Safety
    /// Nobody writes them while the result lives.
    pub unsafe fn read(&self, slot: &Slot, micro_batch: u64) -> Block<'_> {
        let (at, n) = (self.at(slot, micro_batch), slot.elems());
        // SAFETY: in bounds and aligned by `Slot::new`; not written by the caller's promise.
        unsafe {
            match slot.dtype {
                DType::F32 => Block::F32(std::slice::from_raw_parts(at.cast(), n)),
                DType::F64 => Block::F64(std::slice::from_raw_parts(at.cast(), n)),
                DType::I32 => Block::I32(std::slice::from_raw_parts(at.cast(), n)),
                DType::Bf16 => Block::Bf16(std::slice::from_raw_parts(at.cast(), n)),
                DType::F16 => Block::F16(std::slice::from_raw_parts(at.cast(), n)),
            }
        }
    }
    /// The elements of a slot, to be written.
    ///
    /// # Safety
    /// Nobody else reads or writes them while the result lives.
    pub unsafe fn write(&self, slot: &Slot, micro_batch: u64) -> BlockMut<'_> {
        let (at, n) = (self.at(slot, micro_batch), slot.elems());
        // SAFETY: in bounds and aligned by `Slot::new`; exclusive by the caller's promise.
        unsafe {
            match slot.dtype {
                DType::F32 => BlockMut::F32(std::slice::from_raw_parts_mut(at.cast(), n)),
                DType::F64 => BlockMut::F64(std::slice::from_raw_parts_mut(at.cast(), n)),
                DType::I32 => BlockMut::I32(std::slice::from_raw_parts_mut(at.cast(), n)),
                DType::Bf16 => BlockMut::Bf16(std::slice::from_raw_parts_mut(at.cast(), n)),
                DType::F16 => BlockMut::F16(std::slice::from_raw_parts_mut(at.cast(), n)),
            }
        }
    }

    /// Copies the bytes of slot 0 out, wherever they are.
    ///
    /// # Safety
    /// Nobody writes them meanwhile.
    ///
    /// # Errors
    /// If they are in a file that cannot be read.
    ///
    /// # Panics
    /// If `into` is not as long as the slot.
    pub unsafe fn load(&self, slot: &Slot, into: &mut [u8]) -> io::Result<()> {
        assert_eq!(into.len(), slot.bytes, "as long as the slot");
        match &self.file {
            Some(file) if slot.address(0) >= self.bytes => file.read(slot.address(0), into),
            _ => {
                // SAFETY: in bounds by `Slot::new`; not written by the caller's promise.
                into.copy_from_slice(unsafe { std::slice::from_raw_parts(self.at(slot, 0), slot.bytes) });
                Ok(())
            }
        }
    }

    /// The inverse of [`Arena::load`].
    ///
    /// # Safety
    /// Nobody else reads or writes them meanwhile.
    ///
    /// # Errors
    /// If they are in a file that cannot be written.
    ///
    /// # Panics
    /// If `from` is not as long as the slot.
    pub unsafe fn store(&self, slot: &Slot, from: &[u8]) -> io::Result<()> {
        assert_eq!(from.len(), slot.bytes, "as long as the slot");
        match &self.file {
            Some(file) if slot.address(0) >= self.bytes => file.write(slot.address(0), from),
            _ => {
                // SAFETY: in bounds by `Slot::new`; exclusive by the caller's promise.
                unsafe { std::slice::from_raw_parts_mut(self.at(slot, 0), slot.bytes) }.copy_from_slice(from);
                Ok(())
            }
        }
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout.
        unsafe { dealloc(self.base.as_ptr(), self.layout) }
    }
}

/// Where a buffer lies in the arena of one rank.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Slot {
    offset: usize,
    stride: usize,
    slots: u64,
    pub bytes: usize,
    pub dtype: DType,
}

impl Slot {
    /// # Errors
    /// If the buffer does not fit in the arena, or is not aligned to its elements.
    pub fn new(buffer: &Buffer, arena_bytes: u64, mesh: &Mesh, local_rank: u64) -> Result<Slot, String> {
        let slots = buffer.slots.max(1);
        let offset = buffer.offset_at(0, mesh, local_rank);
        let end = (slots - 1).checked_mul(buffer.slot_stride).and_then(|s| s.checked_add(offset)?.checked_add(buffer.bytes));
        if end.is_none_or(|end| end > arena_bytes) {
            return Err(format!("its range ends past the arena of {arena_bytes} bytes"));
        }
        let size = buffer.dtype.size();
        if [offset, buffer.slot_stride, buffer.bytes].iter().any(|x| x % size != 0) {
            return Err(format!("its range is not aligned to {}", buffer.dtype));
        }
        Ok(Slot { offset: offset as usize, stride: buffer.slot_stride as usize, slots, bytes: buffer.bytes as usize, dtype: buffer.dtype })
    }
    pub fn elems(&self) -> usize {
        self.bytes / self.dtype.size() as usize
    }
    /// Where it begins for a micro-batch.
    pub fn address(&self, micro_batch: u64) -> u64 {
        self.offset as u64 + micro_batch % self.slots * self.stride as u64
    }
    /// `len` of its elements from one on; it has one slot.
    pub fn part(self, from: usize, len: usize) -> Slot {
        let size = self.dtype.size() as usize;
        debug_assert!(self.slots == 1 && (from + len) * size <= self.bytes);
        Slot { offset: self.offset + from * size, bytes: len * size, ..self }
    }
    /// The same bytes as elements of another type.
    pub fn typed(self, dtype: DType) -> Slot {
        Slot { dtype, ..self }
    }
    /// Whether two slots share bytes for some micro-batch that both serve.
    pub fn overlaps(&self, other: &Slot) -> bool {
        let at = |s: &Slot, m: u64| s.offset + (m % s.slots) as usize * s.stride;
        (0..self.slots.max(other.slots)).any(|m| {
            let (a, b) = (at(self, m), at(other, m));
            a < b + other.bytes && b < a + self.bytes
        })
    }
}
