//! The guard.

use std::ffi::c_char;

use lowlat_core::Servable;
use lowlat_core::spec::{CheckOptions, serve};

use crate::border::{Status, border, give, invalid, take_back, text_of};

/// Proof that the guard found nothing against serving on this rank.
pub struct ServableHandle(pub(crate) Servable);

/// Checks a model's published config.json against the built-in kernels. `options_json` holds
/// "tp_size", "isa", "dtype", "page_size", "moe_runner_backend", "server_args", "env", "features"
/// and "resident_blocks", each of which may be left out. LOWLAT_DISPATCH_STATUS_DECLINE puts every
/// reason, one a line, into the last error.
///
/// # Safety
/// The texts are NULL or NUL-terminated and do not change during the call; `out_servable` is NULL
/// or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowlat_guard(
    config_json: *const c_char,
    options_json: *const c_char,
    out_servable: *mut *mut ServableHandle,
) -> Status {
    border(|| {
        // SAFETY: NULL or terminated, by the contract above.
        let config = unsafe { text_of("config_json", config_json) }?;
        // SAFETY: NULL or terminated, by the contract above.
        let options = unsafe { text_of("options_json", options_json) }?;
        let make = || {
            let options =
                CheckOptions::from_json(options).map_err(|error| invalid(error.to_string()))?;
            let servable = serve(config, &options).map_err(|declines| {
                let lines: Vec<String> = declines.iter().map(ToString::to_string).collect();
                (Status::Decline, lines.join("\n"))
            });
            servable.map(ServableHandle)
        };
        // SAFETY: NULL or valid for a write, by the contract above.
        unsafe { give("out_servable", out_servable, make) }
    })
}

/// Frees a proof.
///
/// # Safety
/// `servable` is NULL or came from lowlat_guard and was not destroyed before.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowlat_servable_destroy(servable: *mut ServableHandle) {
    // SAFETY: the caller's contract is that of `take_back`.
    unsafe { take_back(servable) };
}
