//! The functions of NCCL that are called, and their numbers. Communicators do not block, so that a rank whose peer is gone can end.

use std::ffi::{c_int, c_uint, c_void};
use std::ptr::null_mut;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use dplan_ir::dtype::DType;
use dplan_kernels::jit;

use super::AbsentError;
use super::cuda::Handle;
use super::library::{Opened, functions};
use crate::runtime::cuda::driver::DriverError;
use crate::runtime::cuda::driver::Exchange;
use crate::runtime::cuda::load::{Primitive, Reduction};

/// What all ranks of a job must share to find each other.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct UniqueId(pub [u8; 128]);

/// `ncclConfig_t` as of 2.14: later versions read its size and version, and take what it lacks as undefined.
#[repr(C)]
pub struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
}

impl Config {
    pub const NON_BLOCKING: Config = Config { size: size_of::<Config>(), magic: 0xcafe_beef, version: 21_400, blocking: 0 };
}

pub const IN_PROGRESS: c_int = 7;
pub const NO_COLOR: c_int = -1;

functions! {
    /// NCCL.
    Nccl {
        unique_id = "ncclGetUniqueId"(*mut UniqueId),
        init = "ncclCommInitRankConfig"(*mut Handle, c_int, UniqueId, c_int, *const Config),
        split = "ncclCommSplit"(Handle, c_int, c_int, *mut Handle, *const Config),
        async_error = "ncclCommGetAsyncError"(Handle, *mut c_int),
        count = "ncclCommCount"(Handle, *mut c_int),
        user_rank = "ncclCommUserRank"(Handle, *mut c_int),
        finalize = "ncclCommFinalize"(Handle),
        destroy = "ncclCommDestroy"(Handle),
        abort = "ncclCommAbort"(Handle),
        all_reduce = "ncclAllReduce"(*const c_void, *mut c_void, usize, c_int, c_int, Handle, Handle),
        reduce_scatter = "ncclReduceScatter"(*const c_void, *mut c_void, usize, c_int, c_int, Handle, Handle),
        all_gather = "ncclAllGather"(*const c_void, *mut c_void, usize, c_int, Handle, Handle),
        group_start = "ncclGroupStart"(),
        group_end = "ncclGroupEnd"(),
        send = "ncclSend"(*const c_void, usize, c_int, c_int, Handle, Handle),
        receive = "ncclRecv"(*mut c_void, usize, c_int, c_int, Handle, Handle),
    }
}

/// `ncclInt8`: bytes.
pub const BYTES: c_int = 0;

pub fn type_of(dtype: DType) -> c_int {
    match dtype {
        DType::I32 => 2,
        DType::F16 => 6,
        DType::F32 => 7,
        DType::F64 => 8,
        DType::Bf16 => 9,
    }
}

pub fn operation(reduction: Reduction) -> c_int {
    match reduction {
        Reduction::Sum => 0,
        Reduction::Max => 2,
    }
}

impl Nccl {
    /// NCCL, opened once and never closed: threads of its own run on after calls that failed, and after the id was made.
    ///
    /// # Errors
    /// If it is not installed.
    pub fn open() -> Result<&'static Nccl, AbsentError> {
        static OPENED: OnceLock<Nccl> = OnceLock::new();
        if let Some(nccl) = OPENED.get() {
            return Ok(nccl);
        }
        let hint = "plans for several GPUs need it (`pip install nvidia-nccl-cu12`, or DPLAN_NCCL, the path of libnccl.so.2)";
        let opened = Opened::first("NCCL", hint, &jit::search("DPLAN_NCCL", &["libnccl.so.2", "libnccl.so"]))?;
        let nccl = Nccl::of(opened)?;
        Ok(OPENED.get_or_init(|| nccl))
    }
    /// # Errors
    /// If the status is one; work that goes on is none.
    pub fn check(&self, call: &'static str, status: c_int) -> Result<(), DriverError> {
        if status == 0 || status == IN_PROGRESS { Ok(()) } else { Err(DriverError { call, why: name(status) }) }
    }
}

/// `ncclResult_t`.
fn name(status: c_int) -> String {
    let known = [
        "ncclSuccess",
        "ncclUnhandledCudaError",
        "ncclSystemError",
        "ncclInternalError",
        "ncclInvalidArgument",
        "ncclInvalidUsage",
        "ncclRemoteError",
    ];
    usize::try_from(status).ok().and_then(|s| known.get(s)).map_or_else(|| format!("error {status}"), |n| (*n).to_string())
}

/// NCCL and the communicator of all ranks.
pub(super) struct World {
    pub(super) nccl: &'static Nccl,
    /// Of this process.
    pub(super) rank: u64,
    pub(super) all: Handle,
    pub(super) parts: Vec<Handle>,
}

impl World {
    /// An exchange that NCCL has no call for, as messages in one group.
    pub(super) fn messages(&self, what: Exchange, c: Handle, stream: Handle) -> Result<(), DriverError> {
        let (n, dtype, block) = (what.elems as usize, type_of(what.dtype), what.elems * what.dtype.size());
        let (mut members, mut me) = (0, 0);
        // SAFETY: integers to write to.
        unsafe {
            self.nccl.check("ncclCommCount", (self.nccl.count)(c, &raw mut members))?;
            self.nccl.check("ncclCommUserRank", (self.nccl.user_rank)(c, &raw mut me))?;
        }
        // Peers to send to and to receive from, and the number of the block.
        let peers: Vec<[c_int; 3]> = match what.primitive {
            Primitive::Shift => vec![[(me + 1) % members.max(1), (me + members - 1) % members.max(1), 0]],
            Primitive::AllToAll => (0..members).map(|peer| [peer; 3]).collect(),
            Primitive::AllReduce(_) | Primitive::ReduceScatter(_) | Primitive::AllGather => Vec::new(),
        };
        // SAFETY: the ranges are allocated and as long as the primitive takes; a group that was started is ended.
        unsafe {
            self.nccl.check("ncclGroupStart", (self.nccl.group_start)())?;
            let mut asked = Ok(());
            for [to, from, number] in peers {
                let at = |of: u64| of + number as u64 * block;
                asked = asked.and(self.nccl.check("ncclSend", (self.nccl.send)(at(what.from.0) as *const c_void, n, dtype, to, c, stream)));
                asked = asked.and(self.nccl.check("ncclRecv", (self.nccl.receive)(at(what.to.0) as *mut c_void, n, dtype, from, c, stream)));
            }
            let ended = self.nccl.check("ncclGroupEnd", (self.nccl.group_end)());
            asked.and(ended)
        }
    }
    /// Waits until what a communicator was last asked has begun.
    pub(super) fn settle(&self, call: &'static str, communicator: Handle, timeout: Duration) -> Result<(), DriverError> {
        let begin = Instant::now();
        loop {
            let mut state = 0;
            // SAFETY: an integer to write to.
            self.nccl.check("ncclCommGetAsyncError", unsafe { (self.nccl.async_error)(communicator, &raw mut state) })?;
            self.nccl.check(call, state)?;
            if state == 0 {
                return Ok(());
            }
            if begin.elapsed() > timeout {
                return Err(DriverError { call, why: format!("peers did not come within {} s", timeout.as_secs()) });
            }
            std::thread::yield_now();
        }
    }
}

/// Where NCCL writes a handle. A thread of its own may do so for as long as the call has not settled; until then this memory is nobody else's, and stays so if it never settles.
pub(super) struct Place(pub(super) *mut Handle);

impl Place {
    pub(super) fn new() -> Place {
        Place(Box::into_raw(Box::new(null_mut())))
    }
    /// What was written so far.
    pub(super) fn get(&self) -> Handle {
        // SAFETY: allocated above and not freed while there is a `Place`.
        unsafe { self.0.read_volatile() }
    }
    /// What was written, once nothing more will be.
    pub(super) fn settled(self) -> Handle {
        // SAFETY: allocated as a box above, and taken back once.
        *unsafe { Box::from_raw(self.0) }
    }
}
