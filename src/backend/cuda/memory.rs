//! Device memory: one allocation, handed out in aligned pieces by a plan.
//!
//! A plan is the allocating function itself, run on an arena that only counts: [`Arena::counting`] gives the bytes, then
//! the same function runs on [`Arena::new`] with that many. Pieces live as long as someone holds them; the allocation is
//! freed when the arena and all pieces are gone. Addresses and sizes are 64-bit throughout.

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;

use cudarc::driver::sys;

use super::device::Gpu;
use crate::error::{Error, Result, bail};

/// Alignment of every piece, in bytes.
const ALIGNED: u64 = 256;

/// A type whose values are plain bytes, the same on host and device.
///
/// # Safety
/// Any bit pattern is a value, and there is no padding.
pub(crate) unsafe trait Plain: Copy + Send + Sync + 'static {}
// SAFETY: numbers.
unsafe impl Plain for u8 {}
// SAFETY: numbers.
unsafe impl Plain for u16 {}
// SAFETY: numbers.
unsafe impl Plain for u32 {}
// SAFETY: numbers.
unsafe impl Plain for u64 {}
// SAFETY: numbers.
unsafe impl Plain for i64 {}
// SAFETY: numbers.
unsafe impl Plain for f32 {}
// SAFETY: numbers.
unsafe impl<T: Plain, const N: usize> Plain for [T; N] {}

/// Memory of one purpose.
pub(crate) struct Arena {
    block: Arc<Block>,
    used: u64,
}

struct Block {
    gpu: Option<Gpu>,
    address: u64,
    bytes: u64,
}

impl Arena {
    /// An arena without memory, which counts what would be taken.
    pub(crate) fn counting() -> Self {
        Self { block: Arc::new(Block { gpu: None, address: 0, bytes: u64::MAX }), used: 0 }
    }

    /// An arena of `bytes` bytes.
    ///
    /// # Errors
    /// `OutOfMemory` with the bytes asked for and free.
    pub(crate) fn new(gpu: &Gpu, bytes: u64) -> Result<Self> {
        let (free, _) = gpu.memory()?;
        let refused = || {
            Error::out_of_memory(format_args!("device memory of {} ({free} bytes are free)", gpu.limits().name), bytes)
        };
        let len = usize::try_from(bytes).map_err(|_| refused())?;
        let _current = gpu.enter()?;
        let mut address = 0;
        // SAFETY: the pointer outlives the call; the context is current.
        let status = unsafe { sys::cuMemAlloc_v2(&raw mut address, len.max(1)) };
        if status == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY {
            return Err(refused());
        }
        gpu.check("allocating device memory", status)?;
        Ok(Self { block: Arc::new(Block { gpu: Some(gpu.clone()), address, bytes }), used: 0 })
    }

    /// Bytes taken so far.
    pub(crate) fn used(&self) -> u64 {
        self.used
    }

    /// Forgets what was taken: later pieces overlap earlier ones, which must not be used any more.
    pub(crate) fn restart(&mut self) {
        self.used = 0;
    }

    /// Pieces for two purposes that are never in use at the same time, at the same place.
    pub(crate) fn overlap<A, B>(
        &mut self,
        one: impl FnOnce(&mut Self) -> Result<A>,
        other: impl FnOnce(&mut Self) -> Result<B>,
    ) -> Result<(A, B)> {
        let start = self.used;
        let one = one(self)?;
        let end = std::mem::replace(&mut self.used, start);
        let other = other(self)?;
        self.used = self.used.max(end);
        Ok((one, other))
    }

    /// `len` values for `what`, with undefined content.
    ///
    /// # Errors
    /// `OutOfMemory` if the plan was smaller than this.
    pub(crate) fn take<T: Plain>(&mut self, what: &str, len: usize) -> Result<Buffer<T>> {
        let start = self.used.next_multiple_of(ALIGNED);
        let bytes = (len as u64).checked_mul(size_of::<T>() as u64);
        let Some(end) = bytes.and_then(|b| start.checked_add(b)).filter(|&end| end <= self.block.bytes) else {
            let asked = bytes.unwrap_or(u64::MAX);
            return Err(Error::out_of_memory(
                format_args!("{what} in an arena of {} bytes, {start} of them taken", self.block.bytes),
                asked,
            ));
        };
        self.used = end;
        Ok(Buffer { address: self.block.address + start, len, block: Arc::clone(&self.block), of: PhantomData })
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        let Some(gpu) = &self.gpu else { return };
        let _current = gpu.enter_to_free();
        // SAFETY: allocated in `Arena::new`, freed once. After a fault the call fails, which changes nothing.
        let _ = unsafe { sys::cuMemFree_v2(self.address) };
    }
}

/// Host memory that the device reads and writes without a copy in between.
pub(crate) struct Pinned {
    gpu: Gpu,
    address: *mut u8,
    bytes: usize,
}

// SAFETY: the memory belongs to the object alone.
unsafe impl Send for Pinned {}

impl Pinned {
    /// `bytes` bytes, with undefined content.
    ///
    /// # Errors
    /// `OutOfMemory` if the system does not pin that much.
    pub(crate) fn new(gpu: &Gpu, bytes: usize) -> Result<Self> {
        let _current = gpu.enter()?;
        let mut address = std::ptr::null_mut();
        // SAFETY: the pointer outlives the call; the context is current.
        let status = unsafe { sys::cuMemHostAlloc(&raw mut address, bytes.max(1), 0) };
        if status == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY {
            return Err(Error::out_of_memory("pinned memory", bytes as u64));
        }
        gpu.check("pinning memory", status)?;
        Ok(Self { gpu: gpu.clone(), address: address.cast(), bytes })
    }

    /// Bytes of it.
    pub(crate) fn len(&self) -> usize {
        self.bytes
    }

    /// Its first byte.
    pub(super) fn address(&self) -> *mut u8 {
        self.address
    }

    /// Its first `len` values, which the device has written and does not touch any more.
    ///
    /// # Errors
    /// `InvalidArgument` if there are fewer.
    pub(crate) fn values<T: Plain>(&mut self, len: usize) -> Result<&[T]> {
        if len.checked_mul(size_of::<T>()).is_none_or(|bytes| bytes > self.bytes) {
            bail!(InvalidArgument, "{len} values of {} pinned bytes", self.bytes);
        }
        // SAFETY: within the memory, which is aligned to a page, and any bytes are a value; the borrow is exclusive.
        Ok(unsafe { std::slice::from_raw_parts(self.address.cast(), len) })
    }

    /// The same to write to, which the device must not be reading for anything that counts.
    ///
    /// # Errors
    /// As [`Self::values`].
    pub(crate) fn values_mut<T: Plain>(&mut self, len: usize) -> Result<&mut [T]> {
        self.values::<T>(len)?;
        // SAFETY: as in `values`.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.address.cast(), len) })
    }

    /// The word at byte `at`, by which host and device tell each other how far they are.
    ///
    /// # Errors
    /// `InvalidArgument` if it lies outside or is not aligned.
    pub(crate) fn flag(&self, at: usize) -> Result<&AtomicU32> {
        if at.checked_add(size_of::<u32>()).is_none_or(|end| end > self.bytes) || !at.is_multiple_of(size_of::<u32>()) {
            bail!(InvalidArgument, "a word at {at} of {} pinned bytes", self.bytes);
        }
        // SAFETY: within the memory, aligned, any bytes are a value; a shared borrow gives out nothing but flags.
        Ok(unsafe { AtomicU32::from_ptr(self.address.add(at).cast()) })
    }
}

impl Pinned {
    /// Puts `values` at byte `at`, a multiple of their size; the device must not be reading there for anything that counts.
    ///
    /// # Errors
    /// `InvalidArgument` if they do not fit.
    pub(crate) fn put<T: Plain>(&mut self, at: usize, values: &[T]) -> Result<()> {
        let bytes = size_of_val(values);
        if at > self.bytes || bytes > self.bytes - at || !at.is_multiple_of(size_of::<T>()) {
            bail!(InvalidArgument, "{bytes} bytes at {at} of {} pinned ones", self.bytes);
        }
        // SAFETY: within the memory, which is aligned to a page; the borrow is exclusive and `values` lie elsewhere.
        unsafe { std::ptr::copy_nonoverlapping(values.as_ptr(), self.address.add(at).cast(), values.len()) };
        Ok(())
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let _current = self.gpu.enter_to_free();
        // SAFETY: allocated in `new`, freed once.
        let _ = unsafe { sys::cuMemFreeHost(self.address.cast()) };
    }
}

/// `len` values in device memory. Clones and slices are the same memory.
pub(crate) struct Buffer<T> {
    address: u64,
    len: usize,
    block: Arc<Block>,
    of: PhantomData<T>,
}

impl<T> Clone for Buffer<T> {
    fn clone(&self) -> Self {
        Self { address: self.address, len: self.len, block: Arc::clone(&self.block), of: PhantomData }
    }
}

impl<T: Plain> Buffer<T> {
    /// Device address, for kernel parameters.
    pub(crate) fn address(&self) -> u64 {
        self.address
    }

    /// Number of values.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Bytes of all values.
    pub(crate) fn bytes(&self) -> usize {
        self.len * size_of::<T>()
    }

    /// The same memory as bytes.
    pub(crate) fn as_bytes(&self) -> Buffer<u8> {
        Buffer { address: self.address, len: self.bytes(), block: Arc::clone(&self.block), of: PhantomData }
    }

    /// The same memory as values of another type.
    ///
    /// # Errors
    /// `InvalidArgument` if it is no whole number of them, or not aligned for them.
    pub(crate) fn cast<U: Plain>(&self) -> Result<Buffer<U>> {
        let size = size_of::<U>();
        if !self.bytes().is_multiple_of(size) || !self.address.is_multiple_of(align_of::<U>() as u64) {
            bail!(InvalidArgument, "a device buffer of {} bytes as values of {size}", self.bytes());
        }
        let len = self.bytes() / size;
        Ok(Buffer { address: self.address, len, block: Arc::clone(&self.block), of: PhantomData })
    }

    /// The same length at an address where nothing is, to plant a fault.
    pub(super) fn at_bad_address(&self) -> Self {
        Self { address: 1 << 56, ..self.clone() }
    }

    /// Part of it.
    ///
    /// # Errors
    /// `InvalidArgument` if the range lies outside.
    pub(crate) fn slice(&self, range: Range<usize>) -> Result<Self> {
        if range.start > range.end || range.end > self.len {
            bail!(InvalidArgument, "values {}..{} of a device buffer of {}", range.start, range.end, self.len);
        }
        let address = self.address + (range.start * size_of::<T>()) as u64;
        Ok(Self { address, len: range.end - range.start, block: Arc::clone(&self.block), of: PhantomData })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_counts_what_the_arena_then_needs() {
        let plan = |arena: &mut Arena| -> Result<()> {
            arena.take::<u8>("a", 1)?;
            arena.take::<f32>("b", 100)?;
            arena.take::<u16>("c", 3)?;
            Ok(())
        };
        let mut counting = Arena::counting();
        plan(&mut counting).unwrap();
        assert_eq!(counting.used(), 512 + 256 + 6, "pieces start at multiples of 256");
        let mut exact = Arena { block: Arc::new(Block { gpu: None, address: 1 << 40, bytes: 774 }), used: 0 };
        plan(&mut exact).unwrap();
        let error = exact.take::<u8>("more", 1).err().unwrap();
        assert!(error.message().contains("more") && error.message().contains("774"), "{error}");
    }

    /// Pitfalls 50, 51.
    #[test]
    fn sizes_beyond_32_bits_and_beyond_64_bits_are_told_apart() {
        let mut arena = Arena::counting();
        let big = arena.take::<f32>("pages", 3 << 32).unwrap();
        assert_eq!(big.bytes(), 12 << 32);
        let far = big.slice(3 << 31..3 << 32).unwrap();
        assert_eq!(far.address(), 4 * (3u64 << 31), "offsets are 64-bit");
        assert!(arena.take::<u64>("too much", usize::MAX / 4).is_err());
        assert!(big.slice(1..(3 << 32) + 1).is_err());
    }
}
