//! One rank's model behind the C ABI.

use std::ffi::{CString, c_void};
use std::marker::PhantomData;
use std::ptr::{self, NonNull};
use std::sync::{Arc, Mutex, PoisonError};

use super::abi::{self, Dtype};
use super::api::{Api, text};
use super::{Buffer, Element, KernelError, Status};

/// A tensor that the model must be given, with its shape on this rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Published name (experts stacked), or a pool's.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// The header's `lowlat_layout`.
    pub layout: u32,
    /// Read and written by steps, zero at first; else a weight.
    pub is_pool: bool,
    /// Elements of each dimension.
    pub shape: Vec<usize>,
    /// Dimension of the published tensor that is split over the ranks.
    pub shard_dim: Option<usize>,
}

impl TensorInfo {
    /// Bytes, contiguous.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.shape.iter().product::<usize>() * self.dtype.bytes()
    }
}

/// The C handle and the memory that its launches use, which outlives it.
struct Inner {
    api: Arc<Api>,
    handle: NonNull<c_void>,
    bound: Mutex<Vec<Buffer<u8>>>,
    kept: Mutex<Vec<Box<dyn Send>>>,
}

// SAFETY: the header allows calls from any thread, one thread at a time for all but abort and
// status_read, which any thread may call. Those two are all that `&Inner` is used for, except by
// `KernelModel`, which is not Sync and so is on one thread at a time.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

impl Drop for Inner {
    fn drop(&mut self) {
        // SAFETY: made by `model_create`, destroyed once, which ends what still runs; the bound and
        // the kept memory is freed after it.
        unsafe { (self.api.model_destroy)(self.handle.as_ptr()) }
    }
}

/// What any thread may do to a model: stop it, and ask how it is. Keeps the model alive.
#[derive(Clone)]
pub struct ModelHandle {
    inner: Arc<Inner>,
}

impl ModelHandle {
    /// Raises the abort word on this rank and every peer; waits end as soon as they see it.
    pub fn abort(&self) {
        // SAFETY: the handle lives as long as `inner`; any thread may call this.
        unsafe { (self.inner.api.abort)(self.inner.handle.as_ptr()) }
    }

    /// The status words.
    ///
    /// # Errors
    /// Whatever the library refuses with.
    pub fn status(&self) -> Result<abi::StatusWords, KernelError> {
        let mut words = abi::StatusWords {
            struct_bytes: size_of::<abi::StatusWords>() as u32,
            state: 0,
            kernel: 0,
            stage: 0,
            peer: -1,
            place: 0,
            epoch: 0,
        };
        // SAFETY: the handle lives as long as `inner`, `words` through the call.
        let status =
            unsafe { (self.inner.api.status_read)(self.inner.handle.as_ptr(), &raw mut words) };
        self.inner.api.check(status)?;
        Ok(words)
    }
}

/// One rank's model: made, bound, joined to its peers, launched. On one thread at a time.
pub struct KernelModel {
    inner: Arc<Inner>,
    /// Whether the platform's memory is the process's own.
    on_host: bool,
    _not_sync: PhantomData<std::cell::Cell<()>>,
}

impl KernelModel {
    pub(super) fn create(
        api: Arc<Api>,
        platform: &str,
        config: &abi::ModelConfig,
    ) -> Result<Self, KernelError> {
        let on_host = platform == "scalar";
        let platform = c_string(platform)?;
        let mut handle = ptr::null_mut();
        // SAFETY: both inputs live through the call; the handle is written only on success.
        let status = unsafe { (api.model_create)(platform.as_ptr(), config, &raw mut handle) };
        api.check(status)?;
        let Some(handle) = NonNull::new(handle) else {
            return Err(KernelError {
                status: Status::Bug,
                message: "lowlat_model_create gave no model and no error".into(),
            });
        };
        let inner = Arc::new(Inner {
            api,
            handle,
            bound: Mutex::default(),
            kept: Mutex::default(),
        });
        Ok(Self {
            inner,
            on_host,
            _not_sync: PhantomData,
        })
    }

    /// `bytes` of the model's own, zeroed.
    fn alloc(&mut self, kind: u32, bytes: usize) -> Result<NonNull<c_void>, KernelError> {
        let mut memory = ptr::null_mut();
        // SAFETY: our handle; `memory` lives through the call.
        let status =
            unsafe { (self.api().model_alloc)(self.handle(), kind, bytes as u64, &raw mut memory) };
        self.api().check(status)?;
        NonNull::new(memory).ok_or_else(|| KernelError {
            status: Status::Bug,
            message: "lowlat_model_alloc gave no memory and no error".into(),
        })
    }

    /// Zeroed memory for a step's arrays and outputs, which the process and launches reach at one
    /// address.
    ///
    /// # Errors
    /// Whatever the library refuses with.
    ///
    /// # Safety
    /// The buffer's elements are not touched any more once the model is gone. To drop it is
    /// allowed at any time.
    pub unsafe fn step_memory<T: Element>(&mut self, len: usize) -> Result<Buffer<T>, KernelError> {
        if self.on_host {
            return Ok(Buffer::zeroed(len));
        }
        let bytes = len.max(1) * size_of::<T>();
        let first = self.alloc(abi::MEMORY_SHARED, bytes)?.cast();
        // SAFETY: the library gave this memory, aligned for every element and zeroed, to nobody
        // else; it stays until the model is destroyed, after which nobody reads it by this
        // function's contract.
        Ok(unsafe { Buffer::of_model(first, len) })
    }

    /// A tensor's bytes where the platform's launches find them.
    fn place(
        &mut self,
        info: &TensorInfo,
        memory: &Buffer<u8>,
    ) -> Result<*mut c_void, KernelError> {
        if self.on_host {
            return Ok(memory.address().cast());
        }
        let placed = self.alloc(abi::MEMORY_DEVICE, memory.len())?;
        if !info.is_pool {
            // SAFETY: our handle; both sides hold as many bytes, and nothing was launched yet that
            // could use them.
            let status = unsafe {
                (self.api().model_write)(
                    self.handle(),
                    placed.as_ptr(),
                    memory.address().cast_const().cast(),
                    memory.len() as u64,
                )
            };
            self.api().check(status)?;
        }
        Ok(placed.as_ptr())
    }

    fn handle(&self) -> *mut c_void {
        self.inner.handle.as_ptr()
    }

    fn api(&self) -> &Api {
        &self.inner.api
    }

    /// For threads that watch.
    #[must_use]
    pub fn watch(&self) -> ModelHandle {
        ModelHandle {
            inner: Arc::clone(&self.inner),
        }
    }

    /// Every tensor that must be bound.
    ///
    /// # Errors
    /// A tensor that this binding cannot express is a bug.
    pub fn tensors(&self) -> Result<Vec<TensorInfo>, KernelError> {
        // SAFETY: our handle.
        let num_tensors = unsafe { (self.api().model_num_tensors)(self.handle()) };
        (0..num_tensors)
            .map(|tensor_idx| self.tensor(tensor_idx))
            .collect()
    }

    fn tensor(&self, tensor_idx: i32) -> Result<TensorInfo, KernelError> {
        let mut spec = abi::TensorSpec {
            struct_bytes: size_of::<abi::TensorSpec>() as u32,
            dtype: 0,
            layout: 0,
            role: 0,
            ndim: 0,
            shard_dim: -1,
            shape: [0; abi::MAX_DIMS],
            name: ptr::null(),
        };
        // SAFETY: our handle; `spec` lives through the call.
        let status = unsafe { (self.api().model_tensor)(self.handle(), tensor_idx, &raw mut spec) };
        self.api().check(status)?;
        // SAFETY: the name lives as long as the model; it is copied.
        let name = unsafe { text(spec.name) };
        let odd = |what: &str| KernelError {
            status: Status::Bug,
            message: format!("tensor {name:?} of the kernel library has {what}"),
        };
        let dims = spec
            .shape
            .get(..spec.ndim as usize)
            .ok_or_else(|| odd("too many dimensions"))?;
        let shape = dims
            .iter()
            .map(|dim| usize::try_from(*dim))
            .collect::<Result<_, _>>();
        Ok(TensorInfo {
            dtype: Dtype::from_code(spec.dtype).ok_or_else(|| odd("an unknown dtype"))?,
            layout: spec.layout,
            is_pool: spec.role == abi::ROLE_POOL,
            shape: shape.map_err(|_| odd("a negative dimension"))?,
            shard_dim: usize::try_from(spec.shard_dim).ok(),
            name,
        })
    }

    /// Gives the model the memory of a tensor, contiguous; it stays until the model is gone. On a
    /// platform with memory of its own the bytes are copied there, and the buffer is let go.
    ///
    /// # Errors
    /// A name, dtype, shape or layout that the model has not.
    pub fn bind(&mut self, info: &TensorInfo, memory: Buffer<u8>) -> Result<(), KernelError> {
        if memory.len() != info.bytes() {
            return Err(KernelError::invalid(format!(
                "{} has {} bytes; needs {}",
                info.name,
                memory.len(),
                info.bytes()
            )));
        }
        let name = c_string(&info.name)?;
        let data = self.place(info, &memory)?;
        let mut tensor = abi::Tensor {
            struct_bytes: size_of::<abi::Tensor>() as u32,
            dtype: info.dtype as u32,
            layout: info.layout,
            ndim: info.shape.len() as u32,
            shape: [0; abi::MAX_DIMS],
            stride: [0; abi::MAX_DIMS],
            data,
        };
        let mut stride = 1;
        for (dim_idx, dim) in info.shape.iter().enumerate().rev() {
            tensor.shape[dim_idx] = *dim as i64;
            tensor.stride[dim_idx] = stride;
            stride *= *dim as i64;
        }
        // SAFETY: our handle; name and tensor live through the call. The memory is as large as
        // shape and dtype say (checked above) and is kept until the model is destroyed.
        let status =
            unsafe { (self.api().model_bind)(self.handle(), name.as_ptr(), &raw const tensor) };
        self.api().check(status)?;
        if self.on_host {
            self.inner
                .bound
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .push(memory);
        }
        Ok(())
    }

    /// Takes over memory that launches point into: it goes when the model has been destroyed, by
    /// whoever holds it last. A rank that ends while a launch of its own may still run leaves its
    /// memory here.
    pub fn keep(&mut self, memory: impl Send + 'static) {
        self.inner
            .kept
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(Box::new(memory));
    }

    /// Bytes that the library took for itself.
    #[must_use]
    pub fn own_bytes(&self) -> u64 {
        // SAFETY: our handle.
        unsafe { (self.api().model_own_bytes)(self.handle()) }
    }

    /// Digest of everything that must be equal on all ranks.
    #[must_use]
    pub fn catalogue_digest(&self) -> u64 {
        // SAFETY: our handle.
        unsafe { (self.api().model_catalogue_digest)(self.handle()) }
    }

    /// The catalogue in words, one kernel a line.
    #[must_use]
    pub fn catalogue(&self) -> String {
        // SAFETY: our handle; the text is copied before anything else is called.
        unsafe { text((self.api().model_catalogue)(self.handle())) }
    }

    /// What peers need to reach this rank's memory.
    ///
    /// # Errors
    /// Whatever the library refuses with.
    pub fn peer_export(&mut self) -> Result<abi::PeerHandle, KernelError> {
        let mut handle = abi::PeerHandle {
            bytes: [0; abi::PEER_HANDLE_BYTES],
        };
        // SAFETY: our handle; the peer handle lives through the call.
        let status = unsafe { (self.api().peer_export)(self.handle(), &raw mut handle) };
        self.api().check(status)?;
        Ok(handle)
    }

    /// Maps a peer's memory.
    ///
    /// # Errors
    /// A handle of another shape, width set, rank, process or library version.
    ///
    /// # Safety
    /// `handle` was exported by a model that is not destroyed before this one has run its last
    /// step.
    pub unsafe fn peer_import(
        &mut self,
        peer_rank: u32,
        handle: &abi::PeerHandle,
    ) -> Result<(), KernelError> {
        // SAFETY: our handle; the peer's memory lives long enough by this function's contract.
        let status = unsafe { (self.api().peer_import)(self.handle(), peer_rank as i32, handle) };
        self.api().check(status)
    }

    /// Ends the building.
    ///
    /// # Errors
    /// One line for each tensor or peer that is missing.
    pub fn ready(&mut self) -> Result<(), KernelError> {
        // SAFETY: our handle.
        let status = unsafe { (self.api().model_ready)(self.handle()) };
        self.api().check(status)
    }

    /// Launches a target step: by the persistent schedule, or `plain`.
    ///
    /// # Errors
    /// `Unsupported` where the persistent schedule was not built for these rows.
    ///
    /// # Safety
    /// Until the next [`Self::synchronize`] that returned, every pointer of `step` is good for
    /// the shape that the header gives it, and nobody else writes what it points to or reads the
    /// outputs.
    pub unsafe fn launch_step(&mut self, step: &abi::Step, plain: bool) -> Result<(), KernelError> {
        let launch = if plain {
            self.api().plain_step_launch
        } else {
            self.api().step_launch
        };
        // SAFETY: our handle; the struct is copied, its pointers are good by the contract above.
        let status = unsafe { launch(self.handle(), step, ptr::null_mut()) };
        self.api().check(status)
    }

    /// Launches an injection and a draft.
    ///
    /// # Errors
    /// As for a step.
    ///
    /// # Safety
    /// As for a step.
    pub unsafe fn launch_draft(
        &mut self,
        draft: &abi::Draft,
        plain: bool,
    ) -> Result<(), KernelError> {
        let launch = if plain {
            self.api().plain_draft_launch
        } else {
            self.api().draft_launch
        };
        // SAFETY: our handle; the struct is copied, its pointers are good by the contract above.
        let status = unsafe { launch(self.handle(), draft, ptr::null_mut()) };
        self.api().check(status)
    }

    /// Launches the acceptance rule.
    ///
    /// # Errors
    /// As for a step.
    ///
    /// # Safety
    /// As for a step.
    pub unsafe fn launch_accept(&mut self, accept: &abi::Accept) -> Result<(), KernelError> {
        // SAFETY: our handle; the struct is copied, its pointers are good by the contract above.
        let status = unsafe { (self.api().accept_launch)(self.handle(), accept, ptr::null_mut()) };
        self.api().check(status)
    }

    /// Waits until everything launched has run.
    ///
    /// # Errors
    /// A fault when a wait expired, the model was aborted or `budget_ns` passed.
    pub fn synchronize(&mut self, budget_ns: u64) -> Result<(), KernelError> {
        // SAFETY: our handle.
        let status = unsafe { (self.api().synchronize)(self.handle(), budget_ns) };
        self.api().check(status)
    }
}

pub(super) fn c_string(text: &str) -> Result<CString, KernelError> {
    CString::new(text).map_err(|_| KernelError::invalid(format!("{text:?} has a zero byte")))
}
