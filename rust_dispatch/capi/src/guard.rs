//! The guard.

use std::ffi::c_char;

use lowlat_core::guard::Decline;
use lowlat_core::spec::{CheckOptions, serve};
use lowlat_core::{Facts, Requirements, Servable};

use crate::border::{Failure, Status, border, destroy, give, invalid, text_of};
use crate::handle::kind;

/// Proof that the guard found nothing against serving on this rank.
pub struct ServableHandle(pub(crate) Servable);
kind!(ServableHandle, 1);

fn declined(declines: Vec<Decline>) -> Failure {
    let lines: Vec<String> = declines.iter().map(ToString::to_string).collect();
    (Status::Decline, lines.join("\n"))
}

/// Checks what an engine sees against what its own kernels need.
///
/// `requirements_json` holds "name" and "isas", and any of "tp_sizes", "dtypes", "model",
/// "divides", "server_args", "env", "resident_blocks", "features"; settings are lists of {"name",
/// "accepted", "unset_accepted"}, divisions of {"field", "unit"}. `facts_json` holds "isa" and
/// "tp_size", and any of "dtype", "model", "server_args", "env", "resident_blocks", "features".
///
/// Ownership: the texts stay the caller's; the servable is the caller's, for
/// lowlat_servable_destroy. Threads: any, at any time. Errors: DECLINE with every reason, one a
/// line; INVALID for a text that is none.
///
/// # Safety
/// The texts are NULL or NUL-terminated and do not change during the call; `out_servable` is NULL
/// or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowlat_guard(
    requirements_json: *const c_char,
    facts_json: *const c_char,
    out_servable: *mut *mut ServableHandle,
) -> Status {
    border(|| {
        // SAFETY: NULL or terminated, by the contract above.
        let requirements = unsafe { text_of("requirements_json", requirements_json) }?;
        // SAFETY: NULL or terminated, by the contract above.
        let facts = unsafe { text_of("facts_json", facts_json) }?;
        let make = || {
            let requirements = Requirements::from_json(requirements);
            let requirements = requirements.map_err(|error| invalid(error.to_string()))?;
            let facts = Facts::from_json(facts).map_err(|error| invalid(error.to_string()))?;
            lowlat_core::guard(&facts, &requirements)
                .map(ServableHandle)
                .map_err(declined)
        };
        // SAFETY: NULL or valid for a write, by the contract above.
        unsafe { give("out_servable", out_servable, make) }
    })
}

/// Checks a model's published config.json against the built-in kernels, those of
/// lowlat/kernels.h.
///
/// `options_json` holds "tp_size", "isa", "dtype", "page_size", "moe_runner_backend",
/// "server_args", "env", "features" and "resident_blocks", each of which may be left out.
///
/// Ownership: the texts stay the caller's; the servable is the caller's, for
/// lowlat_servable_destroy. Threads: any, at any time. Errors: DECLINE with every reason, one a
/// line; INVALID for options that are none.
///
/// # Safety
/// The texts are NULL or NUL-terminated and do not change during the call; `out_servable` is NULL
/// or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowlat_guard_model(
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
            serve(config, &options)
                .map(ServableHandle)
                .map_err(declined)
        };
        // SAFETY: NULL or valid for a write, by the contract above.
        unsafe { give("out_servable", out_servable, make) }
    })
}

/// Frees a servable; NULL is allowed.
///
/// Ownership: ends the caller's. Threads: any, once no other call uses the handle. Errors: INVALID
/// for what is no living servable, or one in use.
#[unsafe(no_mangle)]
pub extern "C" fn lowlat_servable_destroy(servable: *mut ServableHandle) -> Status {
    destroy("servable", servable)
}
