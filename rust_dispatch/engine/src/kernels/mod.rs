//! The kernels by their C ABI (`lowlat/kernels.h`): the library, a rank's model, the single
//! operations. Everything unsafe about the border is in this folder but for launches, whose
//! promises only the caller can keep.

pub mod abi;
mod api;
mod buffer;
mod model;
pub mod ops;

use std::path::Path;
use std::sync::Arc;

use thiserror::Error;

pub use api::KERNELS_VARIABLE;
pub use buffer::{Buffer, Element};
pub use model::{KernelModel, ModelHandle, TensorInfo};

use api::Api;

/// What kind of refusal a call met; the header's `lowlat_status`, and one of our own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// An argument is wrong.
    Invalid,
    /// A decline: right in itself, but not built.
    Unsupported,
    /// A deadline passed, a peer was lost or the model was aborted.
    Fault,
    /// The library broke its own rule, or gave a status that the header does not have.
    Bug,
    /// There is no library to call.
    Unavailable,
}

/// A call that did not go well, with the library's own line about it.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{message}")]
pub struct KernelError {
    /// What kind.
    pub status: Status,
    /// One line (a list of lines from a refused configuration).
    pub message: String,
}

impl KernelError {
    fn unavailable(message: String) -> Self {
        Self {
            status: Status::Unavailable,
            message,
        }
    }

    fn invalid(message: String) -> Self {
        Self {
            status: Status::Invalid,
            message,
        }
    }

    fn from_status(code: i32, message: String) -> Self {
        let status = match code {
            1 => Status::Invalid,
            2 => Status::Unsupported,
            3 => Status::Fault,
            _ => Status::Bug,
        };
        Self { status, message }
    }
}

/// The kernel library, open.
#[derive(Clone)]
pub struct Kernels {
    api: Arc<Api>,
}

impl Kernels {
    /// Opens the library at `explicit`, else at `LOWLAT_KERNELS`, else beside this program.
    ///
    /// ```
    /// use std::path::Path;
    /// use lowlat_engine::kernels::Kernels;
    /// let error = Kernels::open(Some(Path::new("no/such.so"))).err().unwrap();
    /// assert!(error.to_string().contains("no/such.so, which is no file"));
    /// ```
    ///
    /// # Errors
    /// Names the path and what is wrong with it.
    pub fn open(explicit: Option<&Path>) -> Result<Self, KernelError> {
        Ok(Self {
            api: Api::open(explicit)?,
        })
    }

    /// Where the library was found.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.api.path
    }

    /// The word for a stage number of the status words.
    #[must_use]
    pub fn stage_name(&self, stage: u32) -> String {
        // SAFETY: any number is allowed; the text is a constant of the library.
        unsafe { api::text((self.api.stage_name)(stage)) }
    }

    /// One rank's model, to be bound.
    ///
    /// # Errors
    /// Every reason against the configuration, one a line.
    pub fn create_model(
        &self,
        platform: &str,
        config: &abi::ModelConfig,
    ) -> Result<KernelModel, KernelError> {
        KernelModel::create(Arc::clone(&self.api), platform, config)
    }
}
