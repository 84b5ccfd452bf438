//! The functions of CUDA's driver that are called, by their versioned names, and their numbers.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use dplan_kernels::jit;

use super::AbsentError;
use super::library::{Opened, functions};
use crate::runtime::cuda::driver::DriverError;

/// A context, stream, event, module or function.
pub type Handle = *mut c_void;

pub const COMPUTE_CAPABILITY_MAJOR: c_int = 75;
pub const COMPUTE_CAPABILITY_MINOR: c_int = 76;
pub const NON_BLOCKING: c_uint = 1;
pub const TIMING: c_uint = 0;
pub const DISABLE_TIMING: c_uint = 2;
pub const MAX_DYNAMIC_SHARED: c_int = 8;
/// Of captures: calls of other kinds may be made meanwhile, as NCCL does.
pub const RELAXED: c_int = 2;
pub const NOT_READY: c_int = 600;
const MEMORY_OF_DEVICE: c_int = 2;

functions! {
    /// The driver.
    Cuda {
        init = "cuInit"(c_uint),
        device_get_count = "cuDeviceGetCount"(*mut c_int),
        device_get = "cuDeviceGet"(*mut c_int, c_int),
        device_get_attribute = "cuDeviceGetAttribute"(*mut c_int, c_int, c_int),
        device_name = "cuDeviceGetName"(*mut c_char, c_int, c_int),
        context_retain = "cuDevicePrimaryCtxRetain"(*mut Handle, c_int),
        context_release = "cuDevicePrimaryCtxRelease_v2"(c_int),
        context_set = "cuCtxSetCurrent"(Handle),
        alloc = "cuMemAlloc_v2"(*mut u64, usize),
        free = "cuMemFree_v2"(u64),
        host_alloc = "cuMemHostAlloc"(*mut *mut c_void, usize, c_uint),
        host_free = "cuMemFreeHost"(*mut c_void),
        stream_create = "cuStreamCreate"(*mut Handle, c_uint),
        stream_destroy = "cuStreamDestroy_v2"(Handle),
        stream_wait = "cuStreamWaitEvent"(Handle, Handle, c_uint),
        stream_query = "cuStreamQuery"(Handle),
        capture_begin = "cuStreamBeginCapture_v2"(Handle, c_int),
        capture_end = "cuStreamEndCapture"(Handle, *mut Handle),
        graph_instantiate = "cuGraphInstantiateWithFlags"(*mut Handle, Handle, u64),
        graph_launch = "cuGraphLaunch"(Handle, Handle),
        graph_destroy = "cuGraphDestroy"(Handle),
        executable_destroy = "cuGraphExecDestroy"(Handle),
        event_create = "cuEventCreate"(*mut Handle, c_uint),
        event_destroy = "cuEventDestroy_v2"(Handle),
        event_elapsed = "cuEventElapsedTime"(*mut f32, Handle, Handle),
        event_record = "cuEventRecord"(Handle, Handle),
        module_load = "cuModuleLoadData"(*mut Handle, *const c_void),
        module_unload = "cuModuleUnload"(Handle),
        module_function = "cuModuleGetFunction"(*mut Handle, Handle, *const c_char),
        function_set = "cuFuncSetAttribute"(Handle, c_int, c_int),
        launch = "cuLaunchKernel"(Handle, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Handle, *mut *mut c_void, *mut *mut c_void),
        encode_tensor = "cuTensorMapEncodeTiled"(*mut Tensor, c_int, c_uint, *mut c_void, *const u64, *const u64, *const c_uint, *const c_uint, c_int, c_int, c_int, c_int),
        copy_in = "cuMemcpyHtoDAsync_v2"(u64, *const c_void, usize, Handle),
        copy_out = "cuMemcpyDtoHAsync_v2"(*mut c_void, u64, usize, Handle),
        copy_rows = "cuMemcpy2DAsync_v2"(*const Copy2D, Handle),
        host_function = "cuLaunchHostFunc"(Handle, unsafe extern "C" fn(*mut c_void), *mut c_void),
        fill = "cuMemsetD8Async"(u64, u8, usize, Handle),
        error_name = "cuGetErrorName"(c_int, *mut *const c_char),
    }
}

/// `CUtensorMap`: what the copy engine takes for a tensor. Its bits are the driver's business.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
pub struct Tensor(pub [u64; 16]);

/// Numbers of `CUtensorMapDataType` and the enums after it.
pub const ELEMENTS_OF_16_BITS: c_int = 1;
pub const NOT_INTERLEAVED: c_int = 0;
pub const SWIZZLED_BY_128_BYTES: c_int = 3;
pub const PROMOTED_TO_256_BYTES: c_int = 3;
pub const ZERO_OUTSIDE: c_int = 0;

/// `CUDA_MEMCPY2D`.
#[repr(C)]
pub struct Copy2D {
    from_x: usize,
    from_y: usize,
    from_kind: c_int,
    from_host: *const c_void,
    from_device: u64,
    from_array: Handle,
    from_pitch: usize,
    to_x: usize,
    to_y: usize,
    to_kind: c_int,
    to_host: *mut c_void,
    to_device: u64,
    to_array: Handle,
    to_pitch: usize,
    width: usize,
    height: usize,
}

impl Copy2D {
    pub fn on_device(rows: crate::runtime::cuda::driver::Rows) -> Copy2D {
        Copy2D {
            from_x: 0,
            from_y: 0,
            from_kind: MEMORY_OF_DEVICE,
            from_host: std::ptr::null(),
            from_device: rows.from.0,
            from_array: std::ptr::null_mut(),
            from_pitch: rows.from_pitch as usize,
            to_x: 0,
            to_y: 0,
            to_kind: MEMORY_OF_DEVICE,
            to_host: std::ptr::null_mut(),
            to_device: rows.to.0,
            to_array: std::ptr::null_mut(),
            to_pitch: rows.to_pitch as usize,
            width: rows.width as usize,
            height: rows.rows as usize,
        }
    }
}

impl Cuda {
    /// # Errors
    /// If there is no driver.
    pub fn open() -> Result<Cuda, AbsentError> {
        let hint =
            "CUDA ranks need an NVIDIA GPU with its driver (or DPLAN_CUDA, the path of libcuda.so.1); without --device cuda, ranks run on the CPU";
        Cuda::of(Opened::first("the CUDA driver", hint, &jit::search("DPLAN_CUDA", &["libcuda.so.1", "libcuda.so"]))?)
    }
    /// # Errors
    /// If the status is one.
    pub fn check(&self, call: &'static str, status: c_int) -> Result<(), DriverError> {
        if status == 0 { Ok(()) } else { Err(DriverError { call, why: self.name(status) }) }
    }
    fn name(&self, status: c_int) -> String {
        let mut name: *const c_char = std::ptr::null();
        // SAFETY: the driver gives a static string, or none.
        let known = unsafe { (self.error_name)(status, &raw mut name) } == 0 && !name.is_null();
        // SAFETY: as above.
        if known { unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned() } else { format!("error {status}") }
    }
}
