//! Single operations (`lowlat op`), as tests of engines in Rust call them.

use std::ffi::{CString, c_void};
use std::ptr;

use super::abi::{self, Dtype};
use super::api::text;
use super::{Buffer, KernelError, Kernels};

/// An array by name, row-major.
#[derive(Debug)]
pub struct OpArray {
    /// As in the operation's list of inputs or outputs.
    pub name: String,
    /// U8, I32, I64, F32 or BF16.
    pub dtype: Dtype,
    /// Elements of each dimension.
    pub shape: Vec<usize>,
    /// The elements' bytes.
    pub data: Buffer<u8>,
}

impl OpArray {
    /// Zeros of that shape.
    #[must_use]
    pub fn zeroed(name: &str, dtype: Dtype, shape: &[usize]) -> Self {
        let bytes = shape.iter().product::<usize>() * dtype.bytes();
        Self {
            name: name.into(),
            dtype,
            shape: shape.into(),
            data: Buffer::zeroed(bytes),
        }
    }

    fn c_array(&self, name: &CString) -> Result<abi::Array, KernelError> {
        if self.shape.len() > abi::MAX_DIMS {
            return Err(KernelError::invalid(format!(
                "{} has {} dimensions; needs at most {}",
                self.name,
                self.shape.len(),
                abi::MAX_DIMS
            )));
        }
        if self.data.len() != self.shape.iter().product::<usize>() * self.dtype.bytes() {
            return Err(KernelError::invalid(format!(
                "{} has {} bytes, which is not its shape's",
                self.name,
                self.data.len()
            )));
        }
        let mut shape = [0; abi::MAX_DIMS];
        for (to, from) in shape.iter_mut().zip(&self.shape) {
            *to = *from as i64;
        }
        Ok(abi::Array {
            name: name.as_ptr(),
            dtype: self.dtype as u32,
            ndim: self.shape.len() as u32,
            shape,
            data: self.data.address().cast::<c_void>(),
        })
    }
}

impl Kernels {
    /// The operations as JSON.
    #[must_use]
    pub fn op_list(&self) -> String {
        // SAFETY: takes nothing; the text is copied.
        unsafe { text((self.api.op_list)()) }
    }

    /// Runs one operation alone.
    ///
    /// # Errors
    /// An operation, model, platform or array that the library refuses, by name.
    pub fn op_run(
        &self,
        op: &str,
        model: &str,
        platform: &str,
        inputs: &[OpArray],
    ) -> Result<Vec<OpArray>, KernelError> {
        let [op, model, platform] = [op, model, platform].map(super::model::c_string);
        let (op, model, platform) = (op?, model?, platform?);
        let names = inputs
            .iter()
            .map(|input| super::model::c_string(&input.name));
        let names = names.collect::<Result<Vec<_>, _>>()?;
        let c_inputs = inputs
            .iter()
            .zip(&names)
            .map(|(input, name)| input.c_array(name));
        let c_inputs = c_inputs.collect::<Result<Vec<_>, _>>()?;
        let empty = abi::Array {
            name: ptr::null(),
            dtype: 0,
            ndim: 0,
            shape: [0; abi::MAX_DIMS],
            data: ptr::null_mut(),
        };
        let mut planned = [empty; abi::MAX_OP_OUTPUTS];
        let mut num_planned = 0;
        // SAFETY: strings and arrays live through the call, sizes are as the shapes say (checked
        // in `c_array`), and there is room for the most outputs that the header allows.
        let status = unsafe {
            (self.api.op_plan)(
                op.as_ptr(),
                model.as_ptr(),
                platform.as_ptr(),
                c_inputs.as_ptr(),
                c_inputs.len() as i32,
                planned.as_mut_ptr(),
                &raw mut num_planned,
            )
        };
        self.api.check(status)?;
        let mut outputs = Vec::new();
        for array in &mut planned[..usize::try_from(num_planned).unwrap_or(0)] {
            // SAFETY: the library names its outputs by constants.
            let name = unsafe { text(array.name) };
            let dtype = Dtype::from_code(array.dtype)
                .ok_or_else(|| KernelError::invalid(format!("{name} has an unknown dtype")))?;
            let dims = array.shape.iter().take(array.ndim as usize);
            let shape: Vec<usize> = dims.map(|dim| *dim as usize).collect();
            let output = OpArray::zeroed(&name, dtype, &shape);
            array.data = output.data.address().cast();
            outputs.push(output);
        }
        // SAFETY: as above; each output has the memory that the plan asked for.
        let status = unsafe {
            (self.api.op_run)(
                op.as_ptr(),
                model.as_ptr(),
                platform.as_ptr(),
                c_inputs.as_ptr(),
                c_inputs.len() as i32,
                planned.as_mut_ptr(),
                num_planned,
            )
        };
        self.api.check(status)?;
        Ok(outputs)
    }
}
