//! Frames: what a layer keeps of a micro-batch, on its way out of the device's memory and back.
//!
//! In the device's memory a frame is the values that lie in it; elsewhere nothing but copies touch its bytes, and it is one content: which values lie where, counted
//! from its beginning, and which micro-batches they are of, counted from that of the copy. Copying out notes that, copying in puts the values back, wherever that is.
//! A copy asks nothing of what it moves: what a value's bytes should hold is asked where it is read.

use super::content::Fact;
use super::dataflow::Walk;
use super::flat::{Profile, only};
use crate::entity::BufferId;
use crate::program::Space;

/// What frames outside of the device's memory hold, by number: equal ones have one.
#[derive(Default)]
pub(super) struct Frames(Vec<Profile>);

impl Frames {
    fn number(&mut self, held: Profile) -> u32 {
        let known = self.0.iter().position(|known| *known == held);
        known.unwrap_or_else(|| {
            self.0.push(held);
            self.0.len() - 1
        }) as u32
    }
}

impl Walk<'_> {
    /// dst ← src, of which one is in the device's memory.
    pub fn copy_frame(&mut self, src: BufferId, dst: BufferId) {
        self.note_read(src);
        let held = self.profile(src);
        self.note_write(dst);
        let [from, to] = [src, dst].map(|buffer| self.flat(buffer).base);
        if self.types.stage.space(dst) == Space::Device { self.unpack(&held, from, dst, to) } else { self.pack(held, from, dst, to) }
    }

    /// Of the bytes from `from` on, which hold this, a frame that begins at `to`.
    fn pack(&mut self, held: Profile, from: u64, dst: BufferId, to: u64) {
        let micro_batch = self.micro_batch;
        let mut packed = Profile::new();
        for (end, fact) in held {
            let fact = moved(fact, |of, base| (micro_batch.wrapping_sub(of), base.wrapping_sub(from)));
            match packed.last_mut() {
                Some(last) if last.1 == fact => last.0 = end,
                Some(_) | None => packed.push((end, fact)),
            }
        }
        let number = self.frames.number(packed);
        self.put_unordered(dst, Fact::Frame { number, micro_batch, base: to });
    }

    /// The values of the frame at `from`, in the bytes from `to` on; nothing known if there is none.
    fn unpack(&mut self, held: &Profile, from: u64, dst: BufferId, to: u64) {
        let (range, grid) = (self.range(dst), self.grid(dst));
        let frame = match held.first() {
            Some(&(_, fact @ Fact::Frame { number, micro_batch, base })) if base == from && held.iter().all(|h| h.1 == fact) => {
                Some((&self.frames.0[number as usize], micro_batch))
            }
            _ => None,
        };
        for at in range {
            let (start, end) = (self.layout.starts[at] - to, self.layout.starts[at + 1] - to);
            let fact = frame.map_or(Fact::Garbage, |(packed, micro_batch)| {
                moved(only(packed, start, end), |of, base| (micro_batch.wrapping_sub(of), base.wrapping_add(to)))
            });
            self.cells[at].set(grid, fact);
        }
    }
}

/// A value with another micro-batch and base; of bytes that hold no value, nothing is known.
fn moved(fact: Fact, by: impl Fn(u64, u64) -> (u64, u64)) -> Fact {
    match fact {
        Fact::Value { value, sharding, micro_batch, base } => {
            let (micro_batch, base) = by(micro_batch, base);
            Fact::Value { value, sharding, micro_batch, base }
        }
        Fact::Garbage
        | Fact::Zero
        | Fact::State { .. }
        | Fact::Grad { .. }
        | Fact::Scalar { .. }
        | Fact::Frame { .. }
        | Fact::Trust { .. }
        | Fact::Wire { .. } => Fact::Garbage,
    }
}
