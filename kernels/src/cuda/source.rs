//! From a config to a kernel's text.

use std::fmt::Write as _;

use dplan_ir::dtype::DType;
use dplan_ir::op::Op;
use dplan_ir::program::Write;

use super::{Alignment, Arg, Descriptor, Family, Launch, PrepareError};

/// What NVRTC compiles before a kernel's own text.
pub const DEVICE: &str = concat!(include_str!("text/device.cuh"), include_str!("text/device_hopper.cuh"), include_str!("text/common.cuh"));
/// What a C++ compiler compiles before it: once, for any number of texts.
pub const HOST: &str = concat!(include_str!("../shim/shim.h"), include_str!("../shim/hopper.h"), include_str!("text/common.cuh"));

/// Names of the constants that a config defines, so that texts can be put one after the other.
#[derive(Clone, Default, Debug)]
pub struct Config(String);

impl Config {
    pub fn ty(mut self, name: &str, dtype: DType) -> Config {
        let _ = writeln!(self.0, "typedef {} {name};", c_type(dtype));
        self
    }
    pub fn int(mut self, name: &str, value: u64) -> Config {
        let _ = writeln!(self.0, "constexpr int {name} = {value};");
        self
    }
    pub fn signed(mut self, name: &str, value: i64) -> Config {
        let _ = writeln!(self.0, "constexpr int {name} = {value};");
        self
    }
    pub fn flag(mut self, name: &str, value: bool) -> Config {
        let _ = writeln!(self.0, "constexpr bool {name} = {value};");
        self
    }
    /// Printed so that it reads back as the same number.
    pub fn real(mut self, name: &str, value: f64) -> Config {
        let _ = writeln!(self.0, "constexpr double {name} = {value:e};");
        self
    }
    pub fn line(mut self, line: &str) -> Config {
        self.0.push_str(line);
        self.0.push('\n');
        self
    }
    pub fn text(self, parts: &[&str]) -> String {
        self.0 + &parts.concat()
    }
}

pub fn c_type(dtype: DType) -> &'static str {
    match dtype {
        DType::F64 => "double",
        DType::F32 => "float",
        DType::Bf16 => "bf16",
        DType::F16 => "f16",
        DType::I32 => "i32",
    }
}

/// Collects the launches of a routine.
pub struct Builder<'a> {
    pub d: &'a Descriptor<'a>,
    /// The type of the operands that are no indices.
    pub elem: DType,
    /// What sums are kept in.
    pub acc: DType,
    pub launches: Vec<Launch>,
    pub aux: u64,
}

impl<'a> Builder<'a> {
    /// # Errors
    /// If nothing but indices is computed with.
    pub fn new(d: &'a Descriptor<'a>) -> Result<Builder<'a>, PrepareError> {
        let found = if *d.op == Op::Mean { d.ins.first() } else { d.ins.iter().chain(d.outs).find(|t| t.dtype != DType::I32) };
        let elem = found.map(|t| t.dtype).ok_or_else(|| PrepareError::Sizes("no operand".into()))?;
        Ok(Builder { d, elem, acc: elem.accumulator(), launches: Vec::new(), aux: 0 })
    }
    pub fn add(&self) -> bool {
        self.d.write == Write::Add
    }
    /// `elem`, `acc`, `THREADS` and `ADD`, which nearly every text has.
    pub fn config(&self, threads: u64) -> Config {
        Config::default().ty("elem", self.elem).ty("acc", self.acc).int("THREADS", threads).flag("ADD", self.add())
    }
    /// Elements in a pack of at most 16 bytes that divides all of `runs` (lengths of what stands together in memory).
    pub fn pack(&self, runs: &[u64]) -> u64 {
        match self.d.alignment {
            Alignment::Elements => 1,
            Alignment::Packs => {
                let mut n = 16 / self.elem.size();
                while n > 1 && runs.iter().any(|r| r % n != 0) {
                    n /= 2;
                }
                n
            }
        }
    }
    pub fn input(&self, at: usize) -> Arg {
        // A text names operands that its config does not read; any address will do for them.
        if at < self.d.ins.len() { Arg::In(at) } else { Arg::Scalars }
    }
    /// The operand of an epilogue; any address if it has none.
    pub fn extra(&self, at: usize) -> Arg {
        if at < self.d.epilogue.operands.len() { Arg::In(self.d.ins.len() + at) } else { Arg::Scalars }
    }
    pub fn output(&self, at: usize) -> Arg {
        Arg::Out(at.min(self.d.outs.len() - 1))
    }
    /// Takes `bytes` of working memory.
    pub fn take(&mut self, bytes: u64) -> Arg {
        let at = self.aux;
        self.aux += bytes.next_multiple_of(256);
        Arg::Aux(at)
    }
    pub fn launch(&mut self, family: Family, entry: &'static str, text: String, size: Size, args: Vec<Arg>) {
        if size.blocks > 0 {
            let (grid, threads, shared) = (size.blocks as u32, size.threads as u32, size.shared as u32);
            self.launches.push(Launch { family, entry, text, grid, threads, shared, args, instead: None });
        }
    }
}

/// How large a launch is.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    pub blocks: u64,
    pub threads: u64,
    /// Bytes.
    pub shared: u64,
}

impl Size {
    /// One thread for each of `n` things.
    pub fn over(n: u64, threads: u64) -> Size {
        Size { blocks: n.div_ceil(threads), threads, shared: 0 }
    }
    pub fn blocks(blocks: u64, threads: u64, shared: u64) -> Size {
        Size { blocks, threads, shared }
    }
}

pub fn int(value: u64) -> Arg {
    Arg::Int(value as i64)
}
