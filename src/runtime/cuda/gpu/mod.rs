//! A GPU of this machine, through CUDA's driver, NVRTC, cuBLASLt and NCCL, all opened at run time.
//!
//! One process has one GPU and one thread that calls. Sizes, orders and names of calls are decided above ([`super::rank`]); here they become C. A step's end is polled, with
//! the state of every communicator, so that a peer's failure or a hang ends the wait. Communicators are aborted then, never waited for.

pub mod cublaslt;
pub mod cuda;
pub mod library;
pub mod nccl;

use std::collections::HashMap;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::ptr::null_mut;
use std::sync::Arc;
use std::time::{Duration, Instant};

use dplan_kernels::cuda::library::{Library, Row, RowError};
use dplan_kernels::cuda::{Launch, Target, TensorMap};
use dplan_kernels::jit::{self, Arch, Cache, Nvrtc};

use self::cublaslt::{CublasLt, Product, WORKSPACE};
use self::cuda::{Copy2D, Cuda, Handle, Tensor};
use self::nccl::{Config, Nccl, Place, UniqueId, World};
use super::disk::Errand;
use super::driver::{Address, Captured, Communicator, Driver, DriverError, Event, Exchange, Kernel, Pinned, Queue, Rows, Value};
use super::load::Primitive;

/// Why there is no GPU to run on.
#[derive(Debug, thiserror::Error)]
pub enum AbsentError {
    #[error("{what} was not found: {hint}; looked for {looked}")]
    Library { what: &'static str, hint: &'static str, looked: String },
    #[error("{path} has no function `{function}`: {what} is too old")]
    Function { path: String, function: &'static str, what: &'static str },
    #[error("no GPU: {0}")]
    Device(String),
    #[error(transparent)]
    Call(#[from] DriverError),
    #[error(transparent)]
    Nvrtc(#[from] jit::JitError),
    #[error("{path}: {why}; without the file, published products alone are known")]
    Products { path: String, why: RowError },
}

/// A GPU, as one rank's device.
pub struct Gpu {
    cuda: Cuda,
    nvrtc: Nvrtc,
    cache: Cache,
    arch: Arch,
    device: c_int,
    timeout: Duration,
    streams: Vec<Handle>,
    pinned: HashMap<u64, (*mut u8, usize)>,
    kernels: Vec<Loaded>,
    /// cuBLASLt, or why products have none.
    cublaslt: Result<CublasLt, AbsentError>,
    /// Who computes which product, where there is a library.
    asked: Library,
    /// The library's working memory on each stream that called it.
    workspaces: HashMap<u64, Address>,
    world: Option<World>,
}

/// What a launch was made ready as.
#[derive(Clone, Copy)]
enum Loaded {
    Kernel { module: Handle, function: Handle },
    Product(Product),
    Gone,
}

/// Makes the id that all ranks of a job share.
///
/// # Errors
/// If there is no NCCL, or it cannot.
pub fn unique_id() -> Result<UniqueId, AbsentError> {
    let nccl = Nccl::open()?;
    let mut id = UniqueId([0; 128]);
    // SAFETY: an id to write to.
    nccl.check("ncclGetUniqueId", unsafe { (nccl.unique_id)(&raw mut id) })?;
    Ok(id)
}

impl Gpu {
    /// Opens the libraries and the GPU with this number.
    ///
    /// # Errors
    /// What is absent.
    pub fn open(number: u64, timeout: Duration) -> Result<Gpu, AbsentError> {
        let cuda = Cuda::open()?;
        let (mut count, mut device, mut major, mut minor) = (0, 0, 0, 0);
        let number = c_int::try_from(number).map_err(|_| AbsentError::Device(format!("no number {number}")))?;
        // SAFETY: integers to write to; the context is retained before it is made current.
        unsafe {
            cuda.check("cuInit", (cuda.init)(0))?;
            cuda.check("cuDeviceGetCount", (cuda.device_get_count)(&raw mut count))?;
            if number >= count {
                return Err(AbsentError::Device(format!("rank wants GPU {number} of this machine, which has {count}")));
            }
            cuda.check("cuDeviceGet", (cuda.device_get)(&raw mut device, number))?;
            cuda.check("cuDeviceGetAttribute", (cuda.device_get_attribute)(&raw mut major, cuda::COMPUTE_CAPABILITY_MAJOR, device))?;
            cuda.check("cuDeviceGetAttribute", (cuda.device_get_attribute)(&raw mut minor, cuda::COMPUTE_CAPABILITY_MINOR, device))?;
        }
        let arch = Arch::of_device(major, minor).ok_or_else(|| {
            AbsentError::Device(format!("GPU {number} has compute capability {major}.{minor}; kernels are made for 8.x, 9.0 and 10.x"))
        })?;
        let nvrtc = Nvrtc::open()?;
        let mut context = null_mut();
        // SAFETY: as above.
        unsafe {
            cuda.check("cuDevicePrimaryCtxRetain", (cuda.context_retain)(&raw mut context, device))?;
            cuda.check("cuCtxSetCurrent", (cuda.context_set)(context))?;
        }
        let (cache, cublaslt) = (Cache::standard(), CublasLt::open());
        let asked = if cublaslt.is_ok() { Library::Table(cublaslt::rows(&cache)?) } else { Library::Absent };
        Ok(Gpu {
            cuda,
            nvrtc,
            cache,
            arch,
            device,
            timeout,
            streams: Vec::new(),
            pinned: HashMap::new(),
            kernels: Vec::new(),
            cublaslt,
            asked,
            workspaces: HashMap::new(),
            world: None,
        })
    }

    pub fn arch(&self) -> Arch {
        self.arch
    }
    /// As its maker calls it.
    pub fn name(&self) -> String {
        let mut name = [0 as c_char; 128];
        // SAFETY: as many characters to write to as are said, the last of which stays zero.
        let status = unsafe { (self.cuda.device_name)(name.as_mut_ptr(), name.len() as c_int - 1, self.device) };
        // SAFETY: it ends with a zero.
        if status == 0 { unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned() } else { "a GPU".into() }
    }
    /// Asks the library for every product that it takes, or for none, whatever the table says: to time both.
    pub fn ask_library(&mut self, asked: Library) {
        self.asked = if self.cublaslt.is_ok() { asked } else { Library::Absent };
    }
    /// Why no library computes products, if none does.
    pub fn lacks(&self) -> Option<&AbsentError> {
        self.cublaslt.as_ref().err()
    }
    /// What decides how kernels and products round, in words: all ranks must have the same.
    pub fn products(&self) -> String {
        let (major, minor) = self.nvrtc.version;
        format!("NVRTC {major}.{minor}, {}", self.multiplier())
    }
    fn multiplier(&self) -> String {
        match (&self.cublaslt, self.asked) {
            (Ok(library), Library::Table(rows)) => {
                let rows: Vec<String> = rows.iter().map(Row::to_string).collect();
                format!("cuBLASLt {:?}\n{}", library.version(), rows.join("\n"))
            }
            (Ok(library), Library::Always) => format!("cuBLASLt {:?} for all", library.version()),
            (Ok(_), Library::Absent) | (Err(_), _) => "generated".into(),
        }
    }

    /// Meets all ranks of the job.
    ///
    /// # Errors
    /// If NCCL is absent, or the others do not come.
    pub fn join(&mut self, id: UniqueId, rank: u64, ranks: u64) -> Result<(), AbsentError> {
        let nccl = Nccl::open()?;
        let (call, place, config) = ("ncclCommInitRankConfig", Place::new(), Config::NON_BLOCKING);
        // SAFETY: a handle to write to that lives as long as NCCL may write, and a configuration that outlives the call.
        let status = unsafe { (nccl.init)(place.0, ranks as c_int, id, rank as c_int, &raw const config) };
        nccl.check(call, status)?;
        // From here on, dropping this GPU ends what NCCL does.
        let world = self.world.insert(World { nccl, rank, all: place.get(), parts: Vec::new() });
        world.settle(call, world.all, self.timeout)?;
        world.all = place.settled();
        Ok(())
    }

    fn ask(&self, call: &'static str, status: c_int) -> Result<(), DriverError> {
        self.cuda.check(call, status)
    }
    fn stream(&self, stream: Queue) -> Handle {
        stream.0 as Handle
    }
    fn world(&self, call: &'static str) -> Result<&World, DriverError> {
        self.world.as_ref().ok_or_else(|| unmet(call))
    }
    /// A function of a module, that may use so much shared memory: what its launch needs, not what the architecture has at most, since some of its GPUs have less.
    fn function(&self, module: Handle, entry: &CStr, shared: u32) -> Result<Handle, DriverError> {
        let mut function = null_mut();
        // SAFETY: a handle to write to; the module is loaded, and the name outlives the call.
        unsafe {
            self.ask("cuModuleGetFunction", (self.cuda.module_function)(&raw mut function, module, entry.as_ptr()))?;
            if shared > 48 * 1024 {
                self.ask("cuFuncSetAttribute", (self.cuda.function_set)(function, cuda::MAX_DYNAMIC_SHARED, shared as c_int))?;
            }
        }
        Ok(function)
    }
    /// A tensor in memory as a kernel takes it.
    fn encode(&self, at: Address, map: TensorMap) -> Result<Tensor, DriverError> {
        let (mut tensor, steps) = (Tensor([0; 16]), [1; 3]);
        // SAFETY: all arrays are as long as the rank asks, or one less; they are read, and the tensor written, before the call returns.
        let status = unsafe {
            (self.cuda.encode_tensor)(
                &raw mut tensor,
                cuda::ELEMENTS_OF_16_BITS,
                map.dims.len() as u32,
                at.0 as *mut c_void,
                map.dims.as_ptr(),
                map.pitches.as_ptr(),
                TensorMap::BOX.as_ptr(),
                steps.as_ptr(),
                cuda::NOT_INTERLEAVED,
                cuda::SWIZZLED_BY_128_BYTES,
                cuda::PROMOTED_TO_256_BYTES,
                cuda::ZERO_OUTSIDE,
            )
        };
        self.ask("cuTensorMapEncodeTiled", status).map_err(|e| DriverError { why: format!("{} ({map:?} at {:#x})", e.why, at.0), ..e })?;
        Ok(tensor)
    }
    /// Has the library compute a product, of the arguments that the kernel has in whose place it does.
    fn multiply(&mut self, product: Product, args: &[Value], stream: Queue) -> Result<(), DriverError> {
        let workspace = match self.workspaces.get(&stream.0) {
            Some(at) => *at,
            // The first step's calls: nothing is captured yet.
            None => {
                let at = self.allocate(WORKSPACE)?;
                self.workspaces.insert(stream.0, at);
                at
            }
        };
        match &self.cublaslt {
            Ok(library) => library.multiply(product, args, workspace, stream),
            Err(_) => Err(DriverError { call: "cublasLtMatmul", why: "there is no library".into() }),
        }
    }
    fn event(&self, flags: std::ffi::c_uint) -> Result<Event, DriverError> {
        let mut event = null_mut();
        // SAFETY: a handle to write to.
        self.ask("cuEventCreate", unsafe { (self.cuda.event_create)(&raw mut event, flags) })?;
        Ok(Event(event as u64))
    }
    fn host(&self, memory: Pinned, offset: u64) -> *mut c_void {
        // The address is the handle.
        (memory.0 + offset) as *mut c_void
    }
}

fn unmet(call: &'static str) -> DriverError {
    DriverError { call, why: "this rank has met no others".into() }
}

impl Driver for Gpu {
    fn target(&self) -> Target {
        Target { beside: self.asked, ..Target::of(self.arch) }
    }

    fn allocate(&mut self, bytes: u64) -> Result<Address, DriverError> {
        let mut at = 0;
        // SAFETY: an address to write to.
        self.ask("cuMemAlloc", unsafe { (self.cuda.alloc)(&raw mut at, bytes as usize) })?;
        Ok(Address(at))
    }
    fn free(&mut self, at: Address) -> Result<(), DriverError> {
        // SAFETY: `at` was allocated and is freed once.
        self.ask("cuMemFree", unsafe { (self.cuda.free)(at.0) })
    }
    fn pin(&mut self, bytes: u64) -> Result<Pinned, DriverError> {
        let mut at = null_mut();
        // SAFETY: an address to write to.
        self.ask("cuMemHostAlloc", unsafe { (self.cuda.host_alloc)(&raw mut at, bytes as usize, 0) })?;
        self.pinned.insert(at as u64, (at.cast(), bytes as usize));
        Ok(Pinned(at as u64))
    }
    fn unpin(&mut self, memory: Pinned) -> Result<(), DriverError> {
        self.pinned.remove(&memory.0);
        // SAFETY: allocated by `pin` and freed once.
        self.ask("cuMemFreeHost", unsafe { (self.cuda.host_free)(self.host(memory, 0)) })
    }
    fn pinned(&mut self, memory: Pinned) -> &mut [u8] {
        match self.pinned.get(&memory.0) {
            // SAFETY: as long as it was allocated, and nothing queued touches it, by the caller's promise.
            Some(&(at, bytes)) => unsafe { std::slice::from_raw_parts_mut(at, bytes) },
            None => &mut [],
        }
    }

    fn create_stream(&mut self) -> Result<Queue, DriverError> {
        let mut stream = null_mut();
        // SAFETY: a handle to write to.
        self.ask("cuStreamCreate", unsafe { (self.cuda.stream_create)(&raw mut stream, cuda::NON_BLOCKING) })?;
        self.streams.push(stream);
        Ok(Queue(stream as u64))
    }
    fn destroy_stream(&mut self, stream: Queue) -> Result<(), DriverError> {
        self.streams.retain(|s| *s as u64 != stream.0);
        if let Some(at) = self.workspaces.remove(&stream.0) {
            self.free(at)?;
        }
        // SAFETY: created and destroyed once.
        self.ask("cuStreamDestroy", unsafe { (self.cuda.stream_destroy)(self.stream(stream)) })
    }
    fn create_event(&mut self) -> Result<Event, DriverError> {
        self.event(cuda::DISABLE_TIMING)
    }
    fn create_clock(&mut self) -> Result<Event, DriverError> {
        self.event(cuda::TIMING)
    }
    fn elapsed(&mut self, from: Event, to: Event) -> Result<u64, DriverError> {
        let mut milliseconds = 0.0;
        // SAFETY: a number to write to; live handles.
        self.ask("cuEventElapsedTime", unsafe { (self.cuda.event_elapsed)(&raw mut milliseconds, from.0 as Handle, to.0 as Handle) })?;
        Ok((f64::from(milliseconds) * 1e6) as u64)
    }
    fn destroy_event(&mut self, event: Event) -> Result<(), DriverError> {
        // SAFETY: created and destroyed once.
        self.ask("cuEventDestroy", unsafe { (self.cuda.event_destroy)(event.0 as Handle) })
    }
    fn record(&mut self, event: Event, stream: Queue) -> Result<(), DriverError> {
        // SAFETY: live handles.
        self.ask("cuEventRecord", unsafe { (self.cuda.event_record)(event.0 as Handle, self.stream(stream)) })
    }
    fn wait(&mut self, stream: Queue, event: Event) -> Result<(), DriverError> {
        // SAFETY: live handles.
        self.ask("cuStreamWaitEvent", unsafe { (self.cuda.stream_wait)(self.stream(stream), event.0 as Handle, 0) })
    }

    fn load(&mut self, launch: &Launch) -> Result<Kernel, DriverError> {
        let kernel = Kernel(self.kernels.len() as u64);
        if let (Some(product), Ok(library)) = (&launch.instead, &mut self.cublaslt) {
            // Where it has no algorithm, the same version has none on any rank: all take the generated kernel.
            if let Some(product) = library.describe(product)? {
                self.kernels.push(Loaded::Product(product));
                return Ok(kernel);
            }
        }
        let failed = |why: String| DriverError { call: "nvrtcCompileProgram", why };
        let (made, _) = self.cache.compile(&self.nvrtc, &jit::text(launch), self.arch).map_err(|e| failed(e.to_string()))?;
        let entry = CString::new(launch.entry).map_err(|e| failed(e.to_string()))?;
        let mut module = null_mut();
        // SAFETY: a handle to write to; the image outlives the call.
        self.ask("cuModuleLoadData", unsafe { (self.cuda.module_load)(&raw mut module, made.cubin.as_ptr().cast()) })?;
        self.kernels.push(Loaded::Kernel { module, function: null_mut() });
        match self.function(module, &entry, launch.shared) {
            Ok(function) => self.kernels[kernel.0 as usize] = Loaded::Kernel { module, function },
            Err(error) => {
                self.unload(kernel)?;
                return Err(error);
            }
        }
        Ok(kernel)
    }
    fn unload(&mut self, kernel: Kernel) -> Result<(), DriverError> {
        match std::mem::replace(&mut self.kernels[kernel.0 as usize], Loaded::Gone) {
            // SAFETY: loaded and unloaded once.
            Loaded::Kernel { module, .. } => self.ask("cuModuleUnload", unsafe { (self.cuda.module_unload)(module) }),
            Loaded::Product(product) => {
                self.cublaslt.iter_mut().for_each(|library| library.forget(product));
                Ok(())
            }
            Loaded::Gone => Err(DriverError { call: "cuModuleUnload", why: "unloaded twice".into() }),
        }
    }
    fn launch(&mut self, kernel: Kernel, launch: &Launch, args: &[Value], stream: Queue) -> Result<(), DriverError> {
        let function = match self.kernels[kernel.0 as usize] {
            Loaded::Kernel { function, .. } => function,
            Loaded::Product(product) => return self.multiply(product, args, stream),
            Loaded::Gone => return Err(DriverError { call: "cuLaunchKernel", why: format!("{} was unloaded", launch.entry) }),
        };
        // Pointers and integers of kernels have eight bytes each, tensors as many as CUDA says.
        let mut values: Vec<Tensor> = Vec::with_capacity(args.len());
        for arg in args {
            let word = |word: u64| Tensor(std::array::from_fn(|i| if i == 0 { word } else { 0 }));
            values.push(match *arg {
                Value::Memory { at, .. } => word(at.0),
                Value::Int(i) => word(i as u64),
                Value::Tensor { at, map, .. } => self.encode(at, map)?,
            });
        }
        let mut pointers: Vec<*mut c_void> = values.iter_mut().map(|v| std::ptr::from_mut(v).cast()).collect();
        // SAFETY: the kernel takes as many arguments as its launch lists; they are copied before the call returns.
        let status = unsafe {
            (self.cuda.launch)(
                function,
                launch.grid,
                1,
                1,
                launch.threads,
                1,
                1,
                launch.shared,
                self.stream(stream),
                pointers.as_mut_ptr(),
                null_mut(),
            )
        };
        self.ask("cuLaunchKernel", status).map_err(|e| DriverError { why: format!("{} ({})", e.why, launch.entry), ..e })
    }

    fn copy_in(&mut self, to: Address, from: Pinned, offset: u64, bytes: u64, stream: Queue) -> Result<(), DriverError> {
        // SAFETY: both ranges are allocated.
        self.ask("cuMemcpyHtoDAsync", unsafe { (self.cuda.copy_in)(to.0, self.host(from, offset), bytes as usize, self.stream(stream)) })
    }
    fn copy_out(&mut self, to: Pinned, offset: u64, from: Address, bytes: u64, stream: Queue) -> Result<(), DriverError> {
        // SAFETY: both ranges are allocated.
        self.ask("cuMemcpyDtoHAsync", unsafe { (self.cuda.copy_out)(self.host(to, offset), from.0, bytes as usize, self.stream(stream)) })
    }
    fn copy_rows(&mut self, rows: Rows, stream: Queue) -> Result<(), DriverError> {
        let what = Copy2D::on_device(rows);
        // SAFETY: both ranges are allocated; the description is read before the call returns.
        self.ask("cuMemcpy2DAsync", unsafe { (self.cuda.copy_rows)(&raw const what, self.stream(stream)) })
    }
    fn call(&mut self, errand: &Arc<Errand>, stream: Queue) -> Result<(), DriverError> {
        unsafe extern "C" fn run(errand: *mut c_void) {
            // SAFETY: a live errand, that its owner keeps until it was done.
            unsafe { &*errand.cast::<Errand>() }.run();
        }
        // SAFETY: as above; the function takes a pointer.
        self.ask("cuLaunchHostFunc", unsafe { (self.cuda.host_function)(self.stream(stream), run, Arc::as_ptr(errand).cast_mut().cast()) })
    }
    fn zero(&mut self, at: Address, bytes: u64, stream: Queue) -> Result<(), DriverError> {
        // SAFETY: the range is allocated.
        self.ask("cuMemsetD8Async", unsafe { (self.cuda.fill)(at.0, 0, bytes as usize, self.stream(stream)) })
    }

    fn split(&mut self, _family: u64, members: Option<&[u64]>) -> Result<Option<Communicator>, DriverError> {
        let call = "ncclCommSplit";
        let timeout = self.timeout;
        let world = self.world.as_mut().ok_or_else(|| unmet(call))?;
        // The first member is in no other group of the family, and says which group this is; the key says which position this rank has in it.
        let position = members.and_then(|m| m.iter().position(|&r| r == world.rank)).unwrap_or(0);
        let color = members.map_or(nccl::NO_COLOR, |m| m[0] as c_int);
        let place = Place::new();
        // SAFETY: a handle to write to that lives as long as NCCL may write; the parent's configuration is inherited.
        let status = unsafe { (world.nccl.split)(world.all, color, position as c_int, place.0, std::ptr::null()) };
        world.nccl.check(call, status)?;
        world.settle(call, world.all, timeout)?;
        if members.is_none() {
            place.settled();
            return Ok(None);
        }
        let part = place.get();
        world.parts.push(part);
        world.settle(call, part, timeout)?;
        place.settled();
        Ok(Some(Communicator(part as u64)))
    }
    fn leave(&mut self, communicator: Communicator) -> Result<(), DriverError> {
        let timeout = self.timeout;
        let world = self.world("ncclCommDestroy")?;
        let part = communicator.0 as Handle;
        // SAFETY: a live communicator, given back once.
        unsafe {
            world.nccl.check("ncclCommFinalize", (world.nccl.finalize)(part))?;
            world.settle("ncclCommFinalize", part, timeout)?;
            world.nccl.check("ncclCommDestroy", (world.nccl.destroy)(part))?;
        }
        if let Some(world) = &mut self.world {
            world.parts.retain(|p| *p != part);
        }
        Ok(())
    }
    fn abort(&mut self, communicator: Communicator) -> Result<(), DriverError> {
        let world = self.world("ncclCommAbort")?;
        let part = communicator.0 as Handle;
        // SAFETY: as above.
        let status = unsafe { (world.nccl.abort)(part) };
        if let Some(world) = &mut self.world {
            world.parts.retain(|p| *p != part);
        }
        self.world("ncclCommAbort")?.nccl.check("ncclCommAbort", status)
    }
    fn exchange(&mut self, communicator: Communicator, what: Exchange, stream: Queue) -> Result<(), DriverError> {
        let world = self.world("ncclAllReduce")?;
        if matches!(what.primitive, Primitive::AllToAll | Primitive::Shift) {
            world.messages(what, communicator.0 as Handle, self.stream(stream))?;
            return world.settle("ncclGroupEnd", communicator.0 as Handle, self.timeout);
        }
        let (from, to) = (what.from.0 as *const c_void, what.to.0 as *mut c_void);
        let (n, dtype, c, s) = (what.elems as usize, nccl::type_of(what.dtype), communicator.0 as Handle, self.stream(stream));
        // SAFETY: the ranges are allocated and as long as the primitive takes.
        let (call, status) = unsafe {
            match what.primitive {
                Primitive::AllReduce(r) => ("ncclAllReduce", (world.nccl.all_reduce)(from, to, n, dtype, nccl::operation(r), c, s)),
                Primitive::ReduceScatter(r) => ("ncclReduceScatter", (world.nccl.reduce_scatter)(from, to, n, dtype, nccl::operation(r), c, s)),
                Primitive::AllGather => ("ncclAllGather", (world.nccl.all_gather)(from, to, n, dtype, c, s)),
                Primitive::AllToAll | Primitive::Shift => unreachable!("made of messages above"),
            }
        };
        world.nccl.check(call, status)?;
        world.settle(call, c, self.timeout)
    }
    fn send(&mut self, communicator: Communicator, peer: u64, from: Address, bytes: u64, stream: Queue) -> Result<(), DriverError> {
        let (world, c) = (self.world("ncclSend")?, communicator.0 as Handle);
        // SAFETY: the range is allocated.
        let status = unsafe { (world.nccl.send)(from.0 as *const c_void, bytes as usize, nccl::BYTES, peer as c_int, c, self.stream(stream)) };
        world.nccl.check("ncclSend", status)?;
        world.settle("ncclSend", c, self.timeout)
    }
    fn receive(&mut self, communicator: Communicator, peer: u64, to: Address, bytes: u64, stream: Queue) -> Result<(), DriverError> {
        let (world, c) = (self.world("ncclRecv")?, communicator.0 as Handle);
        // SAFETY: the range is allocated.
        let status = unsafe { (world.nccl.receive)(to.0 as *mut c_void, bytes as usize, nccl::BYTES, peer as c_int, c, self.stream(stream)) };
        world.nccl.check("ncclRecv", status)?;
        world.settle("ncclRecv", c, self.timeout)
    }

    fn begin_capture(&mut self, stream: Queue) -> Result<(), DriverError> {
        // SAFETY: a live stream.
        self.ask("cuStreamBeginCapture", unsafe { (self.cuda.capture_begin)(self.stream(stream), cuda::RELAXED) })
    }
    fn end_capture(&mut self, stream: Queue) -> Result<Captured, DriverError> {
        let (mut graph, mut executable) = (null_mut(), null_mut());
        // SAFETY: handles to write to; the graph is destroyed once, and what was made of it does not need it.
        unsafe {
            self.ask("cuStreamEndCapture", (self.cuda.capture_end)(self.stream(stream), &raw mut graph))?;
            let made = self.ask("cuGraphInstantiateWithFlags", (self.cuda.graph_instantiate)(&raw mut executable, graph, 0));
            let gone = self.ask("cuGraphDestroy", (self.cuda.graph_destroy)(graph));
            made?;
            let captured = Captured(executable as u64);
            if gone.is_err() {
                self.discard(captured)?;
            }
            gone.map(|()| captured)
        }
    }
    fn replay(&mut self, graph: Captured, stream: Queue) -> Result<(), DriverError> {
        // SAFETY: live handles.
        self.ask("cuGraphLaunch", unsafe { (self.cuda.graph_launch)(graph.0 as Handle, self.stream(stream)) })
    }
    fn discard(&mut self, graph: Captured) -> Result<(), DriverError> {
        // SAFETY: made by `end_capture` and destroyed once.
        self.ask("cuGraphExecDestroy", unsafe { (self.cuda.executable_destroy)(graph.0 as Handle) })
    }

    fn synchronise(&mut self) -> Result<(), DriverError> {
        let begin = Instant::now();
        for &stream in &self.streams {
            loop {
                // SAFETY: a live stream.
                let status = unsafe { (self.cuda.stream_query)(stream) };
                if status == 0 {
                    break;
                }
                if status != cuda::NOT_READY {
                    self.ask("cuStreamQuery", status)?;
                }
                if let Some(world) = &self.world {
                    for &part in &world.parts {
                        let mut state = 0;
                        // SAFETY: an integer to write to.
                        world.nccl.check("ncclCommGetAsyncError", unsafe { (world.nccl.async_error)(part, &raw mut state) })?;
                        world.nccl.check("a collective", state)?;
                    }
                }
                if begin.elapsed() > self.timeout {
                    return Err(DriverError { call: "cuStreamQuery", why: format!("the step did not end within {} s", self.timeout.as_secs()) });
                }
                std::thread::yield_now();
            }
        }
        Ok(())
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        // SAFETY: everything made from them was given back; the process's end takes what is left.
        unsafe {
            if let Some(world) = &self.world {
                for &communicator in world.parts.iter().chain([&world.all]).filter(|c| !c.is_null()) {
                    (world.nccl.abort)(communicator);
                }
            }
            (self.cuda.context_release)(self.device);
        }
    }
}
