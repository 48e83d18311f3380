//! Memory that the kernels read and write: owned, aligned, zero at first, and at one address
//! from its making to its end.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ptr::NonNull;

/// A cache line pair: no two buffers share one, and every vector load is aligned.
const ALIGN: usize = 128;

/// Plain numbers, for which all bytes zero is a value and any bytes are one.
///
/// # Safety
/// The type has no padding, no invalid bit pattern and an alignment of at most 128.
pub unsafe trait Element: Copy + Send + Sync + 'static {}
// SAFETY: integers and floats have neither padding nor invalid patterns.
unsafe impl Element for u8 {}
// SAFETY: as above.
unsafe impl Element for u16 {}
// SAFETY: as above.
unsafe impl Element for i32 {}
// SAFETY: as above.
unsafe impl Element for i64 {}
// SAFETY: as above.
unsafe impl Element for f32 {}

/// `len` elements at an address that does not change.
///
/// Kernels reach the memory by its address while a launch runs. References handed out here are
/// for the time when none does; [`super::KernelModel`]'s launches are unsafe for that reason.
#[derive(Debug)]
pub struct Buffer<T: Element> {
    first: NonNull<T>,
    len: usize,
    owner: Owner,
}

/// Who frees a buffer's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Owner {
    Buffer,
    /// The model that it was taken from, when that is destroyed.
    Model,
}

// SAFETY: nobody else refers to the memory, and `Element`s may be used from any thread.
unsafe impl<T: Element> Send for Buffer<T> {}
// SAFETY: `&Buffer` only reads.
unsafe impl<T: Element> Sync for Buffer<T> {}

impl<T: Element> Buffer<T> {
    /// Zeros. A length of 0 still has an address.
    ///
    /// ```
    /// use lowlat_engine::kernels::Buffer;
    /// let mut buffer = Buffer::<f32>::zeroed(3);
    /// buffer.as_mut_slice()[1] = 2.0;
    /// assert_eq!(buffer.as_slice(), [0.0, 2.0, 0.0]);
    /// assert_eq!(buffer.address() as usize % 128, 0);
    /// ```
    #[must_use]
    pub fn zeroed(len: usize) -> Self {
        let layout = Self::layout(len);
        // SAFETY: the layout's size is not 0.
        let memory = unsafe { alloc_zeroed(layout) };
        let Some(first) = NonNull::new(memory.cast::<T>()) else {
            handle_alloc_error(layout)
        };
        Self {
            first,
            len,
            owner: Owner::Buffer,
        }
    }

    /// A view of `len` elements that belong to somebody else.
    ///
    /// # Safety
    /// `first` is aligned, holds `len` elements that nobody else refers to, and outlives every use
    /// of the buffer but its dropping.
    pub(super) unsafe fn of_model(first: NonNull<T>, len: usize) -> Self {
        Self {
            first,
            len,
            owner: Owner::Model,
        }
    }

    fn layout(len: usize) -> Layout {
        let bytes = len
            .checked_mul(size_of::<T>())
            .expect("a buffer's bytes fit a usize");
        Layout::from_size_align(bytes.max(1), ALIGN).expect("a buffer's bytes fit an isize")
    }

    /// Elements.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Address of the first element; the same for the buffer's whole life.
    #[must_use]
    pub fn address(&self) -> *mut T {
        self.first.as_ptr()
    }

    /// What is in it, while no launch writes it.
    #[must_use]
    pub fn as_slice(&self) -> &[T] {
        // SAFETY: `len` elements were allocated and zeroed, any bytes are a `T`, and whoever
        // launches kernels on this memory promised that none runs now.
        unsafe { std::slice::from_raw_parts(self.first.as_ptr(), self.len) }
    }

    /// The same to write, while no launch uses it.
    #[must_use]
    pub fn as_mut_slice(&mut self) -> &mut [T] {
        // SAFETY: as in `as_slice`, and `&mut self` excludes every other reference.
        unsafe { std::slice::from_raw_parts_mut(self.first.as_ptr(), self.len) }
    }
}

impl<T: Element> Drop for Buffer<T> {
    fn drop(&mut self) {
        if self.owner == Owner::Model {
            return;
        }
        // SAFETY: allocated by `zeroed` with the same layout, and freed once.
        unsafe { dealloc(self.first.as_ptr().cast(), Self::layout(self.len)) }
    }
}
