//! The kernel library, opened at run time: where it is looked for and which functions it must
//! have.

use std::ffi::{CStr, c_char, c_void};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use libloading::Library;

use super::KernelError;
use super::abi;

/// The environment variable that names the library; read here and nowhere else.
pub const KERNELS_VARIABLE: &str = "LOWLAT_KERNELS";

const FILE_NAME: &str = "liblowlat_kernels.so";

macro_rules! api {
    ($($field:ident = $symbol:literal: fn($($arg:ty),*) $(-> $result:ty)?;)*) => {
        /// The library's functions. The pointers are good for as long as `_library` is.
        pub(super) struct Api {
            pub(super) path: PathBuf,
            $(pub(super) $field: unsafe extern "C" fn($($arg),*) $(-> $result)?,)*
            _library: Library,
        }

        impl Api {
            fn resolve(library: Library, path: PathBuf) -> Result<Self, KernelError> {
                $(
                    // SAFETY: the header gives this symbol this type, and the version check
                    // refuses a library that was built from another header.
                    let $field = *unsafe {
                        library.get::<unsafe extern "C" fn($($arg),*) $(-> $result)?>(
                            concat!($symbol, "\0").as_bytes(),
                        )
                    }
                    .map_err(|_| not_ours(&path, concat!("it has no ", $symbol)))?;
                )*
                Ok(Self { path, $($field,)* _library: library })
            }
        }
    };
}

type Model = *mut c_void;

api! {
    abi_version = "lowlat_kernels_abi_version": fn() -> u32;
    last_error = "lowlat_last_error": fn() -> *const c_char;
    model_create = "lowlat_model_create":
        fn(*const c_char, *const abi::ModelConfig, *mut Model) -> i32;
    model_destroy = "lowlat_model_destroy": fn(Model);
    model_num_tensors = "lowlat_model_num_tensors": fn(Model) -> i32;
    model_tensor = "lowlat_model_tensor": fn(Model, i32, *mut abi::TensorSpec) -> i32;
    model_bind = "lowlat_model_bind": fn(Model, *const c_char, *const abi::Tensor) -> i32;
    model_alloc = "lowlat_model_alloc": fn(Model, u32, u64, *mut *mut c_void) -> i32;
    model_write = "lowlat_model_write": fn(Model, *mut c_void, *const c_void, u64) -> i32;
    model_own_bytes = "lowlat_model_own_bytes": fn(Model) -> u64;
    model_catalogue_digest = "lowlat_model_catalogue_digest": fn(Model) -> u64;
    model_catalogue = "lowlat_model_catalogue": fn(Model) -> *const c_char;
    peer_export = "lowlat_peer_export": fn(Model, *mut abi::PeerHandle) -> i32;
    peer_import = "lowlat_peer_import": fn(Model, i32, *const abi::PeerHandle) -> i32;
    model_ready = "lowlat_model_ready": fn(Model) -> i32;
    step_launch = "lowlat_step_launch": fn(Model, *const abi::Step, *mut c_void) -> i32;
    plain_step_launch = "lowlat_plain_step_launch": fn(Model, *const abi::Step, *mut c_void) -> i32;
    draft_launch = "lowlat_draft_launch": fn(Model, *const abi::Draft, *mut c_void) -> i32;
    plain_draft_launch = "lowlat_plain_draft_launch":
        fn(Model, *const abi::Draft, *mut c_void) -> i32;
    accept_launch = "lowlat_accept_launch": fn(Model, *const abi::Accept, *mut c_void) -> i32;
    synchronize = "lowlat_synchronize": fn(Model, u64) -> i32;
    status_read = "lowlat_status_read": fn(Model, *mut abi::StatusWords) -> i32;
    stage_name = "lowlat_stage_name": fn(u32) -> *const c_char;
    abort = "lowlat_abort": fn(Model);
    op_list = "lowlat_op_list": fn() -> *const c_char;
    op_plan = "lowlat_op_plan": fn(
        *const c_char, *const c_char, *const c_char,
        *const abi::Array, i32, *mut abi::Array, *mut i32
    ) -> i32;
    op_run = "lowlat_op_run": fn(
        *const c_char, *const c_char, *const c_char,
        *const abi::Array, i32, *mut abi::Array, i32
    ) -> i32;
}

fn not_ours(path: &Path, seen: &str) -> KernelError {
    KernelError::unavailable(format!(
        "{} is no kernel library of this version: {seen} (--kernels PATH or {KERNELS_VARIABLE})",
        path.display()
    ))
}

impl Api {
    pub(super) fn open(explicit: Option<&Path>) -> Result<Arc<Self>, KernelError> {
        let path = find(explicit)?;
        // SAFETY: loading runs the library's initialisers; ours has none beyond the C++ run
        // time's own, and the path was named by the user or lies beside this program.
        let library = unsafe { Library::new(&path) }.map_err(|error| {
            KernelError::unavailable(format!(
                "{} cannot be opened: {error} (--kernels PATH or {KERNELS_VARIABLE})",
                path.display()
            ))
        })?;
        let api = Self::resolve(library, path)?;
        // SAFETY: takes nothing and reads a constant.
        let version = unsafe { (api.abi_version)() };
        if version != abi::ABI_VERSION {
            let seen = format!(
                "its version is {version}, this program needs {}",
                abi::ABI_VERSION
            );
            return Err(not_ours(&api.path, &seen));
        }
        Ok(Arc::new(api))
    }

    /// `Ok` for the header's OK, else the status with the library's own line.
    pub(super) fn check(&self, status: i32) -> Result<(), KernelError> {
        if status == abi::STATUS_OK {
            return Ok(());
        }
        // SAFETY: the text is valid until this thread's next call into the library; it is copied.
        let message = unsafe { text((self.last_error)()) };
        Err(KernelError::from_status(status, message))
    }
}

/// # Safety
/// `chars` is null or a NUL-terminated string that lives through the call.
pub(super) unsafe fn text(chars: *const c_char) -> String {
    if chars.is_null() {
        return String::new();
    }
    // SAFETY: not null, and a C string by this function's contract.
    unsafe { CStr::from_ptr(chars) }
        .to_string_lossy()
        .into_owned()
}

/// The first of: the path that was given, the environment's, beside this program (installed: in
/// `../_lib`; built: in the same folder). A path that was named is taken without looking further.
fn find(explicit: Option<&Path>) -> Result<PathBuf, KernelError> {
    if let Some(path) = explicit {
        return existing(path, "--kernels");
    }
    if let Some(path) = std::env::var_os(KERNELS_VARIABLE).filter(|path| !path.is_empty()) {
        return existing(Path::new(&path), KERNELS_VARIABLE);
    }
    let folder = std::env::current_exe()
        .ok()
        .and_then(|exe| Some(exe.parent()?.to_path_buf()));
    let beside = folder.iter().flat_map(|folder| {
        [
            folder.join("../_lib").join(FILE_NAME),
            folder.join(FILE_NAME),
        ]
    });
    beside
        .into_iter()
        .find(|path| path.is_file())
        .ok_or_else(|| {
            KernelError::unavailable(format!(
                "no {FILE_NAME} in ../_lib or beside this program; name it by --kernels PATH or \
             {KERNELS_VARIABLE}"
            ))
        })
}

fn existing(path: &Path, named_by: &str) -> Result<PathBuf, KernelError> {
    if path.is_file() {
        return Ok(path.to_path_buf());
    }
    Err(KernelError::unavailable(format!(
        "{named_by} is {}, which is no file; needs the path of {FILE_NAME}",
        path.display()
    )))
}
