//! Graph records: what was captured for each key.

use std::ffi::{CString, c_char};
use std::sync::OnceLock;

use lowlat_core::graph_key::{GraphKey, GraphMode, KeyIdx, Path, Record, Recorder, SealView};

use crate::border::{
    Failure, Out, Status, border, c_text, destroy, give, invalid, list_of, struct_of, text_of,
};
use crate::dispatcher::FactsMode;
use crate::handle::{exclusive, kind, shared};

/// Graphs of one record, seals of one graph, and dimensions of one seal, at most.
const MAX_GRAPHS: usize = 4096;
const MAX_SEALS: usize = 4096;
const MAX_DIMS: usize = 16;

/// Notes what is captured.
pub struct RecorderHandle {
    recorder: Recorder,
    num_graphs: usize,
}
kind!(RecorderHandle, 7);

/// What was captured.
pub struct RecordHandle {
    pub(crate) record: Record,
    text: OnceLock<CString>,
}
kind!(RecordHandle, 8);

impl RecordHandle {
    fn new(record: Record) -> Self {
        Self {
            record,
            text: OnceLock::new(),
        }
    }
}

/// What runs a captured graph; the values of `path` in lowlat_recorder_note.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GraphPath {
    /// A few resident kernels a layer.
    Persistent = 0,
    /// Chains of kernels.
    Fused = 1,
    /// The engine's own forward: captured, but not ours.
    Plain = 2,
}

/// Everything that a captured graph fixes.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct KeyParts {
    /// LOWLAT_FACTS_MODE_DECODE, _TARGET_VERIFY or _DRAFT.
    pub mode: u32,
    /// Requests of the step, above 0.
    pub batch_size: u32,
    /// Rows a request, above 0.
    pub tokens_per_request: u32,
    /// The built row count that runs it, at least batch_size x tokens_per_request.
    pub width: u32,
    /// The shape's name.
    pub shape: *const c_char,
    /// The machine code, such as "sm_90".
    pub isa: *const c_char,
    /// Digest of the declared numerics.
    pub numerics_digest: u64,
    /// Digest of the weights' layout.
    pub layout_digest: u64,
}

/// Something that a captured graph reads.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct SealParts {
    /// What it is, such as "page_table".
    pub name: *const c_char,
    /// Its dtype.
    pub dtype: *const c_char,
    /// Where it lies.
    pub address: u64,
    /// Elements of each dimension: `num_dims` of them; NULL where there are none.
    pub shape: *const i64,
    /// How many, 16 at most.
    pub num_dims: u32,
}

fn mode_of(mode: u32) -> Result<GraphMode, Failure> {
    match mode {
        mode if mode == FactsMode::Decode as u32 => Ok(GraphMode::Decode),
        mode if mode == FactsMode::TargetVerify as u32 => Ok(GraphMode::TargetVerify),
        mode if mode == FactsMode::Draft as u32 => Ok(GraphMode::Draft),
        mode => Err(invalid(format!(
            "mode is {mode}; a graph runs LOWLAT_FACTS_MODE_DECODE, _TARGET_VERIFY or _DRAFT"
        ))),
    }
}

fn path_of(path: u32) -> Result<Path, Failure> {
    match path {
        path if path == GraphPath::Persistent as u32 => Ok(Path::Persistent),
        path if path == GraphPath::Fused as u32 => Ok(Path::Fused),
        path if path == GraphPath::Plain as u32 => Ok(Path::Plain),
        path => Err(invalid(format!(
            "path is {path}; a lowlat_graph_path is needed"
        ))),
    }
}

/// Writes what `of` says of a record.
///
/// # Safety
/// `out` is NULL or valid for a write.
unsafe fn answer<T>(
    record: *const RecordHandle,
    name: &str,
    out: *mut T,
    of: impl FnOnce(&Record) -> T,
) -> Status {
    border(|| {
        let handle = shared("record", record)?;
        // SAFETY: by the contract above.
        let out = unsafe { Out::new(name, out) }?;
        out.put(of(&handle.record));
        Ok(())
    })
}

/// The seals of a list that C hands over.
///
/// # Safety
/// `seals` is NULL or holds `num_seals`, whose texts are NULL or NUL-terminated and whose shapes
/// are NULL or hold `num_dims`, all alive and unchanged for `'a`.
unsafe fn views_of<'a>(
    seals: *const SealParts,
    num_seals: u32,
) -> Result<Vec<SealView<'a>>, Failure> {
    // SAFETY: this function's contract.
    let seals = unsafe { list_of("seals", seals, num_seals, MAX_SEALS) }?;
    let view = |seal: &SealParts| {
        // SAFETY: NULL or terminated, by this function's contract.
        let name = unsafe { text_of("a seal's name", seal.name) }?;
        // SAFETY: NULL or terminated, by this function's contract.
        let dtype = unsafe { text_of("a seal's dtype", seal.dtype) }?;
        // SAFETY: NULL or `num_dims` of them, by this function's contract.
        let shape = unsafe { list_of("dimensions", seal.shape, seal.num_dims, MAX_DIMS) }?;
        Ok(SealView {
            name,
            address: seal.address,
            shape,
            dtype,
        })
    };
    seals.iter().map(view).collect()
}

/// A recorder that has noted nothing.
///
/// Ownership: the recorder is the caller's, for lowlat_recorder_destroy. Threads: any, at any time.
/// Errors: INVALID for a NULL output.
///
/// # Safety
/// `out_recorder` is NULL or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowlat_recorder_create(out_recorder: *mut *mut RecorderHandle) -> Status {
    border(|| {
        let make = || {
            Ok(RecorderHandle {
                recorder: Recorder::new(),
                num_graphs: 0,
            })
        };
        // SAFETY: NULL or valid for a write, by the contract above.
        unsafe { give("out_recorder", out_recorder, make) }
    })
}

/// Notes one captured graph: its key, what runs it (a lowlat_graph_path), and what it reads, in an
/// order that lowlat_record_check_seals will see again.
///
/// Ownership: everything is copied. Threads: one call on a recorder at a time. Errors: INVALID for
/// a key that can be none or was noted before, more than 4096 graphs or seals, a text that is not
/// UTF-8.
///
/// # Safety
/// `key` is NULL or valid; `seals` is NULL or holds `num_seals`; their texts are NULL or
/// NUL-terminated, and their shapes NULL or as long as they say; nothing changes during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowlat_recorder_note(
    recorder: *mut RecorderHandle,
    key: *const KeyParts,
    path: u32,
    seals: *const SealParts,
    num_seals: u32,
) -> Status {
    border(|| {
        let mut handle = exclusive("recorder", recorder)?;
        // SAFETY: NULL or valid for this call, by the contract above.
        let parts = unsafe { struct_of("key", key) }?;
        let key = GraphKey {
            mode: mode_of(parts.mode)?,
            batch_size: parts.batch_size,
            tokens_per_request: parts.tokens_per_request,
            width: parts.width,
            // SAFETY: NULL or terminated, by the contract above.
            shape: unsafe { text_of("the key's shape", parts.shape) }?.to_owned(),
            // SAFETY: NULL or terminated, by the contract above.
            isa: unsafe { text_of("the key's isa", parts.isa) }?.to_owned(),
            numerics_digest: parts.numerics_digest,
            layout_digest: parts.layout_digest,
        };
        let path = path_of(path)?;
        // SAFETY: the contract above.
        let seals = unsafe { views_of(seals, num_seals) }?;
        if handle.num_graphs == MAX_GRAPHS {
            return Err(invalid(format!(
                "{MAX_GRAPHS} graphs are noted; a record holds no more"
            )));
        }
        handle
            .recorder
            .note(key, path, &seals)
            .map_err(|error| invalid(error.to_string()))?;
        handle.num_graphs += 1;
        Ok(())
    })
}

/// Ends the capture: the record of what was noted. The recorder is empty again after it.
///
/// Ownership: the record is the caller's, for lowlat_record_destroy; the recorder stays the
/// caller's. Threads: one call on a recorder at a time. Errors: INVALID for a NULL output.
///
/// # Safety
/// `out_record` is NULL or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowlat_recorder_finish(
    recorder: *mut RecorderHandle,
    out_record: *mut *mut RecordHandle,
) -> Status {
    border(|| {
        let mut handle = exclusive("recorder", recorder)?;
        let make = || {
            handle.num_graphs = 0;
            let noted = std::mem::replace(&mut handle.recorder, Recorder::new());
            Ok(RecordHandle::new(noted.finish()))
        };
        // SAFETY: NULL or valid for a write, by the contract above.
        unsafe { give("out_record", out_record, make) }
    })
}

/// Frees a recorder; NULL is allowed.
///
/// Ownership: ends the caller's. Threads: any, once no other call uses the handle. Errors: INVALID
/// for what is no living recorder, or one in use.
#[unsafe(no_mangle)]
pub extern "C" fn lowlat_recorder_destroy(recorder: *mut RecorderHandle) -> Status {
    destroy("recorder", recorder)
}

/// Reads the text of a record.
///
/// Ownership: the text stays the caller's; the record is the caller's, for lowlat_record_destroy.
/// Threads: any, at any time. Errors: INVALID for a text that is truncated, damaged, of a newer
/// version or none.
///
/// # Safety
/// `text` is NULL or NUL-terminated and does not change during the call; `out_record` is NULL or
/// valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowlat_record_read(
    text: *const c_char,
    out_record: *mut *mut RecordHandle,
) -> Status {
    border(|| {
        // SAFETY: NULL or terminated, by the contract above.
        let text = unsafe { text_of("text", text) }?;
        let make = || {
            let record = Record::from_json(text).map_err(|error| invalid(error.to_string()))?;
            Ok(RecordHandle::new(record))
        };
        // SAFETY: NULL or valid for a write, by the contract above.
        unsafe { give("out_record", out_record, make) }
    })
}

/// The text of a record, for a file that lowlat_record_read and `lowlat inspect` read.
///
/// Ownership: the text stays the record's, valid until lowlat_record_destroy. Threads: any, at the
/// same time too. Errors: INVALID for a NULL output.
///
/// # Safety
/// `out_text` is NULL or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowlat_record_text(
    record: *const RecordHandle,
    out_text: *mut *const c_char,
) -> Status {
    border(|| {
        let handle = shared("record", record)?;
        // SAFETY: NULL or valid for a write, by the contract above.
        let out_text = unsafe { Out::new("out_text", out_text) }?;
        let text = handle.text.get_or_init(|| c_text(&handle.record.to_json()));
        out_text.put(text.as_ptr());
        Ok(())
    })
}

/// How many graphs a record holds.
///
/// Ownership: nothing is given. Threads: any, at the same time too. Errors: INVALID for a NULL
/// output.
///
/// # Safety
/// `out_num_graphs` is NULL or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowlat_record_num_graphs(
    record: *const RecordHandle,
    out_num_graphs: *mut u32,
) -> Status {
    // SAFETY: NULL or valid for a write, by the contract above.
    unsafe {
        answer(record, "out_num_graphs", out_num_graphs, |record| {
            record.entries().len() as u32
        })
    }
}

/// Digest of a record's keys and of what runs each, for the ballot.
///
/// Ownership: nothing is given. Threads: any, at the same time too. Errors: INVALID for a NULL
/// output.
///
/// # Safety
/// `out_digest` is NULL or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowlat_record_keys_digest(
    record: *const RecordHandle,
    out_digest: *mut u64,
) -> Status {
    // SAFETY: NULL or valid for a write, by the contract above.
    unsafe {
        answer(record, "out_digest", out_digest, |record| {
            record.keys_digest()
        })
    }
}

/// Digest of everything that ranks must have in common in a record: keys, paths, and the seals
/// without their addresses, which are each rank's own.
///
/// Ownership: nothing is given. Threads: any, at the same time too. Errors: INVALID for a NULL
/// output.
///
/// # Safety
/// `out_digest` is NULL or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowlat_record_digest(
    record: *const RecordHandle,
    out_digest: *mut u64,
) -> Status {
    // SAFETY: NULL or valid for a write, by the contract above.
    unsafe { answer(record, "out_digest", out_digest, |record| record.digest()) }
}

/// Whether ranks with these two records could replay together.
///
/// Ownership: nothing is given. Threads: any, at the same time too. Errors: DECLINE with every
/// difference, one a line.
#[unsafe(no_mangle)]
pub extern "C" fn lowlat_record_compare(
    first: *const RecordHandle,
    second: *const RecordHandle,
) -> Status {
    border(|| {
        let first = shared("first", first)?;
        let second = shared("second", second)?;
        let differences = first.record.differences(&second.record);
        if differences.is_empty() {
            return Ok(());
        }
        Err((Status::Decline, differences.join("\n")))
    })
}

/// Whether what the graph at `key_idx` reads is as it was at capture; `seals` lists what is there
/// now, in the order of lowlat_recorder_note.
///
/// Ownership: nothing is kept. Threads: any, at the same time too. Errors: FAULT names the first
/// seal that changed, with both values; INVALID for a place outside the record.
///
/// # Safety
/// `seals` is NULL or holds `num_seals`, with texts and shapes as in lowlat_recorder_note.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowlat_record_check_seals(
    record: *const RecordHandle,
    key_idx: u32,
    seals: *const SealParts,
    num_seals: u32,
) -> Status {
    border(|| {
        let handle = shared("record", record)?;
        let num_graphs = handle.record.entries().len();
        if num_graphs <= key_idx as usize {
            return Err(invalid(format!(
                "key_idx is {key_idx}; the record holds {num_graphs} graphs"
            )));
        }
        // SAFETY: the contract above.
        let seals = unsafe { views_of(seals, num_seals) }?;
        handle
            .record
            .check_seals(KeyIdx(key_idx), seals)
            .map_err(|fault| (Status::Fault, fault.to_string()))
    })
}

/// Frees a record and its text; NULL is allowed.
///
/// Ownership: ends the caller's. Threads: any, once no other call uses the handle. Errors: INVALID
/// for what is no living record, or one in use.
#[unsafe(no_mangle)]
pub extern "C" fn lowlat_record_destroy(record: *mut RecordHandle) -> Status {
    destroy("record", record)
}
