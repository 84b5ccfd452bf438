//! Routines by themselves on a device, to be checked and timed.

use dplan_ir::dtype::DType;
use dplan_ir::splitmix;
use dplan_kernels::cuda::{Routine, SCALAR_BYTES, Scalars};
use dplan_kernels::trial::{Buffer, MICRO_BATCH, Prepared, step_scalars};

use super::driver::{Access, Address, Driver, DriverError, Event, Kernel, Queue, Rows, Value};
use super::step::Operands;
use crate::safetensors::encode;

/// Random bytes that operands are filled with, again and again.
const PATTERN: u64 = 1 << 20;
/// What is timed takes so long in all, at least.
const LONG: f64 = 0.02;

/// A device with one stream.
pub struct Solo<D: Driver> {
    driver: D,
    stream: Queue,
    scalars: Address,
    clocks: [Event; 2],
}

impl<D: Driver> Solo<D> {
    /// # Errors
    /// Here and below: what the device refuses.
    pub fn new(mut driver: D) -> Result<Solo<D>, DriverError> {
        let (stream, scalars) = (driver.create_stream()?, driver.allocate(SCALAR_BYTES)?);
        let clocks = [driver.create_clock()?, driver.create_clock()?];
        Ok(Solo { driver, stream, scalars, clocks })
    }
    pub fn driver(&mut self) -> &mut D {
        &mut self.driver
    }

    /// Runs a trial's kernels on its operands; its results.
    ///
    /// # Errors
    /// As [`Solo::new`].
    pub fn run(&mut self, trial: &Prepared) -> Result<Vec<Buffer>, DriverError> {
        let mut outs = trial.results();
        let mut at = SCALAR_BYTES.next_multiple_of(256);
        let mut place = |buffer: &Buffer| {
            let offset = at + buffer.beyond() as u64;
            at = (offset + buffer.bytes().len() as u64).next_multiple_of(256);
            offset
        };
        let (ins_at, outs_at): (Vec<u64>, Vec<u64>) = (trial.ins.iter().map(&mut place).collect(), outs.iter().map(&mut place).collect());
        let (bytes, aux) = (at, trial.routine.aux);
        let pinned = self.driver.pin(bytes)?;
        let memory = self.driver.allocate(bytes + aux)?;
        let staged = self.driver.pinned(pinned);
        staged[..SCALAR_BYTES as usize].copy_from_slice(step_scalars().map(f64::to_le_bytes).as_flattened());
        for (buffer, &offset) in trial.ins.iter().zip(&ins_at).chain(outs.iter().zip(&outs_at)) {
            staged[offset as usize..][..buffer.bytes().len()].copy_from_slice(buffer.bytes());
        }
        self.driver.copy_in(memory, pinned, 0, bytes, self.stream)?;
        let value = |(buffer, &offset): (&Buffer, &u64), access: Access| Value::Memory {
            at: memory.plus(offset),
            bytes: buffer.bytes().len() as u64,
            access,
        };
        let ins: Vec<Value> = trial.ins.iter().zip(&ins_at).map(|x| value(x, Access::Read)).collect();
        let results: Vec<Value> = outs.iter().zip(&outs_at).map(|x| value(x, Access::Write)).collect();
        let operands = Operands { ins: &ins, outs: &results, working: (memory.plus(bytes), aux), scalars: memory, micro: MICRO_BATCH };
        let kernels = self.load(&trial.routine)?;
        self.launch(&trial.routine, &kernels, &operands)?;
        self.driver.copy_out(pinned, 0, memory, bytes, self.stream)?;
        self.driver.synchronise()?;
        let staged = self.driver.pinned(pinned);
        for (buffer, &offset) in outs.iter_mut().zip(&outs_at) {
            let n = buffer.bytes().len();
            buffer.bytes_mut().copy_from_slice(&staged[offset as usize..][..n]);
        }
        self.unload(kernels)?;
        self.driver.free(memory)?;
        self.driver.unpin(pinned)?;
        Ok(outs)
    }

    /// Seconds that a routine takes on operands and results of these sizes, of a mean over many.
    ///
    /// # Errors
    /// As [`Solo::new`].
    pub fn time(&mut self, routine: &Routine, ins: &[(u64, DType)], outs: &[(u64, DType)], scalars: &Scalars) -> Result<f64, DriverError> {
        let mut memory = Vec::new();
        for &(bytes, dtype) in ins.iter().chain(outs) {
            memory.push(self.filled(bytes, dtype)?);
        }
        let working = self.driver.allocate(routine.aux.max(1))?;
        memory.push(working);
        let pinned = self.driver.pin(SCALAR_BYTES)?;
        self.driver.pinned(pinned)[..SCALAR_BYTES as usize].copy_from_slice(scalars.map(f64::to_le_bytes).as_flattened());
        self.driver.copy_in(self.scalars, pinned, 0, SCALAR_BYTES, self.stream)?;
        let value = |at: usize, bytes: u64, access: Access| Value::Memory { at: memory[at], bytes, access };
        let of_ins: Vec<Value> = ins.iter().enumerate().map(|(i, x)| value(i, x.0, Access::Read)).collect();
        let of_outs: Vec<Value> = outs.iter().enumerate().map(|(i, x)| value(ins.len() + i, x.0, Access::Write)).collect();
        let operands = Operands { ins: &of_ins, outs: &of_outs, working: (working, routine.aux), scalars: self.scalars, micro: 0 };
        let kernels = self.load(routine)?;
        let seconds = self.repeated(|solo| solo.launch(routine, &kernels, &operands))?;
        self.unload(kernels)?;
        memory.into_iter().try_for_each(|at| self.driver.free(at))?;
        self.driver.unpin(pinned)?;
        Ok(seconds)
    }

    /// Bytes a second that the device itself reads and writes when it copies so many.
    ///
    /// # Errors
    /// As [`Solo::new`].
    pub fn copy_rate(&mut self, bytes: u64) -> Result<f64, DriverError> {
        let (from, to) = (self.filled(bytes, DType::Bf16)?, self.filled(bytes, DType::Bf16)?);
        let width = bytes.min(1 << 16);
        let rows = Rows { from, from_pitch: width, to, to_pitch: width, width, rows: bytes / width };
        let (stream, moved) = (self.stream, 2 * rows.width * rows.rows);
        let seconds = self.repeated(|solo| solo.driver.copy_rows(rows, stream))?;
        self.driver.free(from)?;
        self.driver.free(to)?;
        Ok(moved as f64 / seconds)
    }

    /// Mean seconds of a call, after one that does not count, and as many times as take long enough.
    fn repeated(&mut self, mut call: impl FnMut(&mut Solo<D>) -> Result<(), DriverError>) -> Result<f64, DriverError> {
        call(self)?;
        self.driver.synchronise()?;
        let mut times = 1u64;
        loop {
            self.driver.record(self.clocks[0], self.stream)?;
            for _ in 0..times {
                call(self)?;
            }
            self.driver.record(self.clocks[1], self.stream)?;
            self.driver.synchronise()?;
            let seconds = self.driver.elapsed(self.clocks[0], self.clocks[1])? as f64 * 1e-9;
            if seconds >= LONG || times >= 10_000 {
                return Ok(seconds / times as f64);
            }
            times = ((LONG * 1.3 / seconds.max(1e-7) * times as f64) as u64).clamp(times * 2, times * 1000);
        }
    }

    /// Memory with numbers between -1 and 1, or indices below 8.
    fn filled(&mut self, bytes: u64, dtype: DType) -> Result<Address, DriverError> {
        let (mut random, n) = (7, bytes.min(PATTERN));
        let (pinned, memory) = (self.driver.pin(PATTERN)?, self.driver.allocate(bytes.max(1))?);
        let pattern = self.driver.pinned(pinned);
        for i in 0..(n / dtype.size()) as usize {
            let drawn = splitmix::next(&mut random);
            let value = if dtype == DType::I32 { (drawn % 8) as f64 } else { (drawn >> 11) as f64 / (1u64 << 52) as f64 - 1.0 };
            encode(dtype, value, pattern, i);
        }
        for at in (0..bytes).step_by(PATTERN as usize) {
            self.driver.copy_in(memory.plus(at), pinned, 0, n.min(bytes - at), self.stream)?;
        }
        self.driver.synchronise()?;
        self.driver.unpin(pinned)?;
        Ok(memory)
    }
    fn load(&mut self, routine: &Routine) -> Result<Vec<Kernel>, DriverError> {
        routine.launches.iter().map(|launch| self.driver.load(launch)).collect()
    }
    fn unload(&mut self, kernels: Vec<Kernel>) -> Result<(), DriverError> {
        kernels.into_iter().try_for_each(|kernel| self.driver.unload(kernel))
    }
    fn launch(&mut self, routine: &Routine, kernels: &[Kernel], operands: &Operands<'_>) -> Result<(), DriverError> {
        for (launch, kernel) in routine.launches.iter().zip(kernels) {
            let args: Vec<Value> = launch.args.iter().map(|arg| operands.value(arg)).collect();
            self.driver.launch(*kernel, launch, &args, self.stream)?;
        }
        Ok(())
    }
}

impl<D: Driver> Drop for Solo<D> {
    fn drop(&mut self) {
        // There is nobody to tell of an error.
        let _ = self.clocks.map(|clock| self.driver.destroy_event(clock));
        let _ = self.driver.free(self.scalars);
        let _ = self.driver.destroy_stream(self.stream);
    }
}
