//! The library, and the functions of it that we call.

use std::ffi::{CStr, CString, c_char, c_int};
use std::path::PathBuf;
use std::ptr::{null, null_mut};

use libloading::Library;

use super::{Arch, Compiled, JitError, flags, search};

type Program = *mut std::ffi::c_void;

/// NVRTC, opened.
pub struct Nvrtc {
    /// Keeps the functions below in memory.
    _library: Library,
    functions: Functions,
    pub version: (i32, i32),
    pub path: PathBuf,
}

struct Functions {
    create: unsafe extern "C" fn(*mut Program, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char) -> c_int,
    destroy: unsafe extern "C" fn(*mut Program) -> c_int,
    compile: unsafe extern "C" fn(Program, c_int, *const *const c_char) -> c_int,
    log_size: unsafe extern "C" fn(Program, *mut usize) -> c_int,
    log: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
    cubin_size: unsafe extern "C" fn(Program, *mut usize) -> c_int,
    cubin: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
    ptx_size: unsafe extern "C" fn(Program, *mut usize) -> c_int,
    ptx: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
    version: unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int,
    error: unsafe extern "C" fn(c_int) -> *const c_char,
}

impl Nvrtc {
    /// Opens the first library found.
    ///
    /// # Errors
    /// If there is none, or it lacks a function.
    pub fn open() -> Result<Nvrtc, JitError> {
        let places = search("DPLAN_NVRTC", &["libnvrtc.so", "libnvrtc.so.13", "libnvrtc.so.12"]);
        for place in &places {
            // SAFETY: loading NVRTC runs its own initialisers, which need no device.
            if let Ok(library) = unsafe { Library::new(place) } {
                return Nvrtc::of(library, place.clone());
            }
        }
        Err(JitError::Absent { looked: places.iter().map(|p| p.display().to_string()).collect::<Vec<_>>().join(", ") })
    }

    fn of(library: Library, path: PathBuf) -> Result<Nvrtc, JitError> {
        let lacks = |name: &str| JitError::Library { path: path.display().to_string(), why: format!("has no function `{name}`") };
        macro_rules! function {
            // SAFETY: the types are those of NVRTC's header, unchanged since CUDA 11.1.
            ($name:literal) => {
                *unsafe { library.get($name.as_bytes()) }.map_err(|_| lacks($name))?
            };
        }
        let functions = Functions {
            create: function!("nvrtcCreateProgram"),
            destroy: function!("nvrtcDestroyProgram"),
            compile: function!("nvrtcCompileProgram"),
            log_size: function!("nvrtcGetProgramLogSize"),
            log: function!("nvrtcGetProgramLog"),
            cubin_size: function!("nvrtcGetCUBINSize"),
            cubin: function!("nvrtcGetCUBIN"),
            ptx_size: function!("nvrtcGetPTXSize"),
            ptx: function!("nvrtcGetPTX"),
            version: function!("nvrtcVersion"),
            error: function!("nvrtcGetErrorString"),
        };
        let (mut major, mut minor) = (0, 0);
        // SAFETY: two integers to write to.
        unsafe { (functions.version)(&raw mut major, &raw mut minor) };
        Ok(Nvrtc { _library: library, functions, version: (major, minor), path })
    }

    /// Compiles a whole text to machine code.
    ///
    /// # Errors
    /// What the compiler said.
    pub fn compile(&self, text: &str, arch: Arch) -> Result<Compiled, JitError> {
        let f = &self.functions;
        let refused = |log: String| JitError::Compile { arch: arch.name(), log };
        let text = CString::new(text).map_err(|_| refused("a text with a zero byte".into()))?;
        let flags: Vec<CString> = flags(arch).into_iter().filter_map(|f| CString::new(f).ok()).collect();
        let pointers: Vec<*const c_char> = flags.iter().map(|f| f.as_ptr()).collect();
        let mut program: Program = null_mut();
        // SAFETY: the pointers outlive each call; sizes are asked for before the bytes are taken; the program is destroyed once.
        unsafe {
            let status = (f.create)(&raw mut program, text.as_ptr(), c"kernel.cu".as_ptr(), 0, null(), null());
            if status != 0 {
                return Err(refused(self.message(status)));
            }
            let status = (f.compile)(program, pointers.len() as c_int, pointers.as_ptr());
            let take = |size: unsafe extern "C" fn(Program, *mut usize) -> c_int, get: unsafe extern "C" fn(Program, *mut c_char) -> c_int| {
                let mut n = 0;
                if size(program, &raw mut n) != 0 {
                    return Vec::new();
                }
                let mut bytes = vec![0u8; n];
                if get(program, bytes.as_mut_ptr().cast()) != 0 {
                    bytes.clear();
                }
                bytes
            };
            let log = String::from_utf8_lossy(&take(f.log_size, f.log)).trim_end_matches('\0').to_string();
            let cubin = if status == 0 { take(f.cubin_size, f.cubin) } else { Vec::new() };
            let ptx = if status == 0 { take(f.ptx_size, f.ptx) } else { Vec::new() };
            let ptx = String::from_utf8_lossy(&ptx).trim_end_matches('\0').to_string();
            let message = self.message(status);
            (f.destroy)(&raw mut program);
            if status != 0 || cubin.is_empty() {
                return Err(refused(format!("{message}\n{log}")));
            }
            Ok(Compiled { cubin, ptx, log })
        }
    }

    fn message(&self, status: c_int) -> String {
        // SAFETY: NVRTC gives a static string for every status.
        let text = unsafe { (self.functions.error)(status) };
        if text.is_null() {
            return format!("status {status}");
        }
        // SAFETY: as above.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    }
}
