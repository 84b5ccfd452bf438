//! Functions of shared libraries, opened at run time.

use std::path::PathBuf;

use libloading::Library;

use super::AbsentError;

/// A library and where it was found.
pub struct Opened {
    handle: Library,
    path: PathBuf,
    what: &'static str,
}

impl Opened {
    /// Opens the first of `places` that there is.
    ///
    /// # Errors
    /// If there is none.
    pub fn first(what: &'static str, hint: &'static str, places: &[PathBuf]) -> Result<Opened, AbsentError> {
        for path in places {
            // SAFETY: loading CUDA's libraries runs their own initialisers.
            if let Ok(handle) = unsafe { Library::new(path) } {
                return Ok(Opened { handle, path: path.clone(), what });
            }
        }
        let looked = places.iter().map(|p| p.display().to_string()).collect::<Vec<_>>().join(", ");
        Err(AbsentError::Library { what, hint, looked })
    }
    /// A function of the library, which must outlive it.
    ///
    /// # Errors
    /// If the library does not have it.
    ///
    /// # Safety
    /// `T` is the function's type.
    pub unsafe fn function<T: Copy>(&self, name: &'static str) -> Result<T, AbsentError> {
        // SAFETY: by the caller's promise.
        let found = unsafe { self.handle.get::<T>(name.as_bytes()) };
        found.map(|f| *f).map_err(|_| AbsentError::Function { path: self.path.display().to_string(), function: name, what: self.what })
    }
}

/// The functions of a library as a struct: name of the field, name in the library, arguments.
macro_rules! functions {
    ($(#[$doc:meta])* $table:ident { $($field:ident = $name:literal($($arg:ty),*)),* $(,)? }) => {
        $(#[$doc])*
        pub struct $table {
            $(pub $field: unsafe extern "C" fn($($arg),*) -> std::ffi::c_int,)*
            /// Keeps the functions in memory.
            _library: $crate::runtime::cuda::gpu::library::Opened,
        }
        impl $table {
            pub fn of(library: $crate::runtime::cuda::gpu::library::Opened) -> Result<$table, $crate::runtime::cuda::gpu::AbsentError> {
                // SAFETY: the types are those of the library's header, and the table keeps the library.
                unsafe {
                    Ok($table { $($field: library.function($name)?,)* _library: library })
                }
            }
        }
    };
}
pub(super) use functions;
