//! Arguments of the exported functions: from raw pointers to checked Rust values, and back to the caller's outputs.
//!
//! Invariant: whatever can be checked about a pointer is checked before it is used (NULL, alignment, length, UTF-8), and
//! an output is zero from the beginning of the call until the value is complete. What cannot be checked, that a pointer
//! points to what its type says, is the contract of the header.

use std::ffi::{CStr, c_char};
use std::path::Path;

use super::guard::injection_point;
use super::status::{Fault, dsv4_status};
use crate::alloc;
use crate::error::{Error, ErrorKind, Result, bail, beginning};

/// No struct of this API will ever be larger; a larger `size` is one that was not set.
const MAX_STRUCT_SIZE: usize = 4096;
/// Longest path in bytes; no system has longer ones.
const MAX_PATH: usize = 1 << 16;
/// Sizes are multiples of this, and no field crosses a multiple, so a smaller struct never ends within a field.
const STRUCT_STEP: usize = 8;

/// A struct that begins with its `size` as the caller knows it.
///
/// # Safety
/// `repr(C)`, begins with `size: usize`, has no padding, no field that crosses a multiple of 8 bytes, and every pattern
/// of bits is a valid value.
pub(super) unsafe trait SizedStruct: Copy {
    /// Its name in C.
    const NAME: &'static str;
}

/// A [`SizedStruct`] that the caller fills.
pub(super) trait Options: SizedStruct {
    /// Every default; `size` is that of this version.
    fn defaults() -> Self;
}

fn null(name: &str) -> Error {
    Error::new(ErrorKind::InvalidArgument, format!("{name} is NULL"))
}

/// The object behind a handle.
///
/// # Safety
/// `ptr` is NULL or was made by this library, is not freed, and has the type it was made with.
pub(super) unsafe fn object<'a, T>(ptr: *const T, name: &str) -> Result<&'a T> {
    // SAFETY: by the contract above.
    unsafe { ptr.as_ref() }.ok_or_else(|| null(name))
}

/// Ends the life of an object; NULL is none.
///
/// # Safety
/// As for [`object`], made by [`OutObject::set`], and no other call uses it.
pub(super) unsafe fn free<T>(ptr: *mut T) {
    if !ptr.is_null() {
        // SAFETY: by the contract above it came from `Box::into_raw`.
        let object = unsafe { Box::from_raw(ptr) };
        injection_point();
        drop(object);
    }
}

/// As [`free`], but what came here by a fork is left alone: its end could wait for threads that are not here.
///
/// # Safety
/// As for [`free`].
pub(super) unsafe fn free_own<T>(ptr: *mut T, is_inherited: impl FnOnce(&T) -> bool) {
    // SAFETY: by the contract above.
    let is_inherited = unsafe { ptr.as_ref() }.is_some_and(is_inherited);
    if !is_inherited {
        // SAFETY: as above.
        unsafe { free(ptr) }
    }
}

/// `len` values at `ptr`, which may be NULL if there are none.
///
/// # Safety
/// `ptr` is NULL or points to `len` values that do not change during the call.
pub(super) unsafe fn slice<'a, T>(ptr: *const T, len: usize, name: &str) -> Result<&'a [T]> {
    injection_point();
    if len == 0 {
        return Ok(&[]);
    }
    if ptr.is_null() {
        bail!(InvalidArgument, "{name} is NULL, but its length is {len}");
    }
    if !ptr.is_aligned() {
        bail!(InvalidArgument, "{name} is not aligned to {} bytes", align_of::<T>());
    }
    if len > isize::MAX as usize / size_of::<T>() {
        bail!(InvalidArgument, "{name} has length {len}, more than memory can hold");
    }
    // SAFETY: not NULL, aligned, not too long; the rest is the contract above.
    Ok(unsafe { std::slice::from_raw_parts(ptr, len) })
}

/// `len` bytes of UTF-8 at `ptr`.
///
/// # Safety
/// As for [`slice`].
pub(super) unsafe fn text<'a>(ptr: *const c_char, len: usize, name: &str) -> Result<&'a str> {
    // SAFETY: by the contract above.
    let bytes = unsafe { slice(ptr.cast::<u8>(), len, name) }?;
    utf8(bytes, name)
}

/// Text that ends with a NUL.
///
/// # Safety
/// `ptr` is NULL or points to bytes with a NUL that do not change during the call.
pub(super) unsafe fn c_text<'a>(ptr: *const c_char, name: &str) -> Result<&'a str> {
    // SAFETY: by the contract above.
    utf8(unsafe { bytes_before_nul(ptr, name) }?, name)
}

/// A path that ends with a NUL: the file system's own bytes on Unix, UTF-8 elsewhere.
///
/// # Safety
/// As for [`c_text`].
pub(super) unsafe fn path<'a>(ptr: *const c_char, name: &str) -> Result<&'a Path> {
    // SAFETY: by the contract above.
    let bytes = unsafe { bytes_before_nul(ptr, name) }?;
    if bytes.is_empty() {
        bail!(InvalidArgument, "{name} is empty");
    }
    if bytes.len() > MAX_PATH {
        bail!(InvalidArgument, "{name} has {} bytes; at most {MAX_PATH} are a path", bytes.len());
    }
    #[cfg(unix)]
    return Ok(Path::new(<std::ffi::OsStr as std::os::unix::ffi::OsStrExt>::from_bytes(bytes)));
    #[cfg(not(unix))]
    return Ok(Path::new(utf8(bytes, name)?));
}

unsafe fn bytes_before_nul<'a>(ptr: *const c_char, name: &str) -> Result<&'a [u8]> {
    injection_point();
    if ptr.is_null() {
        return Err(null(name));
    }
    // SAFETY: not NULL; the rest is the caller's contract.
    Ok(unsafe { CStr::from_ptr(ptr) }.to_bytes())
}

fn utf8<'a>(bytes: &'a [u8], name: &str) -> Result<&'a str> {
    std::str::from_utf8(bytes).map_err(|e| {
        Error::new(
            ErrorKind::InvalidArgument,
            format!("{name} is not UTF-8: the byte at offset {} is wrong", e.valid_up_to()),
        )
    })
}

/// A yes or no that arrives as a number.
pub(super) fn flag(value: i32, name: &str) -> Result<bool> {
    match value {
        0 => Ok(false),
        1 => Ok(true),
        _ => bail!(InvalidArgument, "{name} is {value}; 0 or 1"),
    }
}

/// The value of `all` that has the number `value`, which arrives as a plain number because it may be any.
pub(super) fn choice<C: Copy, T: Copy>(value: i32, name: &str, all: &[(C, T)], number: fn(C) -> i32) -> Result<T> {
    let found = all.iter().find(|&&(c, _)| number(c) == value);
    found.map(|&(_, t)| t).ok_or_else(|| {
        let last = all.iter().map(|&(c, _)| number(c)).max().unwrap_or(0);
        Error::new(ErrorKind::InvalidArgument, format!("{name} is {value}; 0 to {last}"))
    })
}

/// A count as `usize`.
pub(super) fn count(value: u64, name: &str) -> Result<usize> {
    usize::try_from(value)
        .map_err(|_| Error::new(ErrorKind::InvalidArgument, format!("{name} is {value}, more than memory can hold")))
}

/// Reads an options struct of any version: what an older caller does not have keeps its default, what a newer one has
/// in addition must be zero. NULL is all defaults.
///
/// # Safety
/// `ptr` is NULL or points to as many bytes as its `size` says.
pub(super) unsafe fn options<T: Options>(ptr: *const T) -> Result<T> {
    injection_point();
    let mut options = T::defaults();
    if ptr.is_null() {
        return Ok(options);
    }
    // SAFETY: every version begins with `size`.
    let size = unsafe { ptr.cast::<usize>().read_unaligned() };
    let name = T::NAME;
    let init = name.strip_prefix("dsv4_").unwrap_or(name);
    check_size(size).map_err(|why| {
        Error::new(ErrorKind::InvalidArgument, format!("{name}: size is {size}, {why}: fill it with dsv4_{init}_init"))
    })?;
    let known = size.min(size_of::<T>());
    // SAFETY: `options` has at least `known` bytes of plain data, and so has the caller's struct.
    unsafe { (&raw mut options).cast::<u8>().copy_from_nonoverlapping(ptr.cast(), known) };
    for offset in known..size {
        // SAFETY: `offset` is below the caller's `size`.
        let byte = unsafe { ptr.cast::<u8>().add(offset).read() };
        if byte != 0 {
            bail!(
                InvalidArgument,
                "{name}: the byte at offset {offset} is {byte}, but this library ({}) knows only the first {known} bytes; \
                 leave newer fields zero or use the newer library",
                env!("CARGO_PKG_VERSION")
            );
        }
    }
    Ok(options)
}

/// Fills the caller's options with the defaults, as far as its version of the struct reaches. A size that no version has
/// leaves the struct with that size only, which every later use refuses.
///
/// # Safety
/// `ptr` is NULL or points to `size` bytes.
pub(super) unsafe fn init_options<T: Options>(ptr: *mut T, size: usize) {
    injection_point();
    if ptr.is_null() || size < size_of::<usize>() {
        return;
    }
    // SAFETY: there is room for `size` at least.
    unsafe { ptr.cast::<usize>().write_unaligned(size) };
    if check_size(size).is_err() {
        return;
    }
    let defaults = T::defaults();
    let head = size_of::<usize>();
    let known = size.min(size_of::<T>());
    // SAFETY: `head <= size`, and the caller's struct has `size` bytes.
    let target = unsafe { ptr.cast::<u8>().add(head) };
    // SAFETY: `defaults` has at least `known` bytes.
    let source = unsafe { (&raw const defaults).cast::<u8>().add(head) };
    // SAFETY: both have `known - head` bytes behind them.
    unsafe { target.copy_from_nonoverlapping(source, known - head) };
    // SAFETY: `known <= size`.
    let tail = unsafe { ptr.cast::<u8>().add(known) };
    // SAFETY: up to the caller's `size`.
    unsafe { tail.write_bytes(0, size - known) };
}

fn check_size(size: usize) -> Result<(), &'static str> {
    match size {
        0 => Err("not set"),
        _ if size > MAX_STRUCT_SIZE => Err("larger than any version's"),
        _ if !size.is_multiple_of(STRUCT_STEP) => Err("which no version has"),
        _ => Ok(()),
    }
}

/// An output: a plain value in the caller's memory, zero until it is set.
pub(super) struct Out<T: Copy> {
    ptr: *mut T,
    name: &'static str,
}

impl<T: Copy> Out<T> {
    /// Zeroes the caller's value.
    ///
    /// # Safety
    /// `ptr` is NULL or valid for writes, and a `T` of zeros is valid.
    pub(super) unsafe fn new(ptr: *mut T, name: &'static str) -> Self {
        if !ptr.is_null() {
            // SAFETY: by the contract above.
            unsafe { ptr.cast::<u8>().write_bytes(0, size_of::<T>()) };
        }
        Self { ptr, name }
    }

    /// Refuses NULL.
    pub(super) fn check(&self) -> Result<()> {
        injection_point();
        if self.ptr.is_null() { Err(null(self.name)) } else { Ok(()) }
    }

    /// Writes the value; the last thing that a function does.
    pub(super) fn set(&self, value: T) {
        if !self.ptr.is_null() {
            // SAFETY: by the contract of `new`.
            unsafe { self.ptr.write_unaligned(value) };
        }
    }
}

impl<T> Out<*mut T> {
    /// Hands a new object to the caller.
    pub(super) fn give(&self, object: T) {
        self.set(Box::into_raw(Box::new(object)));
    }
}

/// An output struct that begins with its size: zero behind that until it is set.
pub(super) struct OutStruct<T: SizedStruct> {
    ptr: *mut T,
    name: &'static str,
    size: usize,
}

impl<T: SizedStruct> OutStruct<T> {
    /// Zeroes the caller's struct behind its `size`, if that is a possible one.
    ///
    /// # Safety
    /// `ptr` is NULL or points to as many bytes as its `size` says.
    pub(super) unsafe fn new(ptr: *mut T, name: &'static str) -> Self {
        if ptr.is_null() {
            return Self { ptr, name, size: 0 };
        }
        // SAFETY: every version begins with `size`.
        let size = unsafe { ptr.cast::<usize>().read_unaligned() };
        if check_size(size).is_ok() {
            let head = size_of::<usize>();
            // SAFETY: `check_size` lets no size below 8 pass.
            let rest = unsafe { ptr.cast::<u8>().add(head) };
            // SAFETY: the caller's struct has `size` bytes.
            unsafe { rest.write_bytes(0, size - head) };
        }
        Self { ptr, name, size }
    }

    /// Refuses NULL and impossible sizes.
    pub(super) fn check(&self) -> Result<()> {
        injection_point();
        let name = self.name;
        if self.ptr.is_null() {
            return Err(null(name));
        }
        check_size(self.size).map_err(|why| {
            let message = format!("{name}: size is {}, {why}: set it to sizeof({})", self.size, T::NAME);
            Error::new(ErrorKind::InvalidArgument, message)
        })
    }

    /// Writes as much of `value` as the caller's version has, all but `size`.
    pub(super) fn set(&self, value: T) {
        if self.check().is_err() {
            return;
        }
        let head = size_of::<usize>();
        let known = self.size.min(size_of::<T>());
        // SAFETY: `value` has `known >= 8` bytes.
        let source = unsafe { (&raw const value).cast::<u8>().add(head) };
        // SAFETY: the caller's struct has `size >= known` bytes.
        let target = unsafe { self.ptr.cast::<u8>().add(head) };
        // SAFETY: both have `known - head` bytes behind them.
        unsafe { target.copy_from_nonoverlapping(source, known - head) };
    }
}

/// An output array in the caller's memory with the length that was needed: zero until it is filled.
pub(super) struct Buffer<T: Copy> {
    ptr: *mut T,
    capacity: usize,
    len: Out<usize>,
    name: &'static str,
}

impl<T: Copy> Buffer<T> {
    /// Zeroes the caller's buffer and length.
    ///
    /// # Safety
    /// `ptr` is NULL or has room for `capacity` values, for which zeros are valid; `len` is as for [`Out::new`].
    pub(super) unsafe fn new(ptr: *mut T, capacity: usize, name: &'static str, len: Out<usize>) -> Self {
        if !ptr.is_null() && capacity <= isize::MAX as usize / size_of::<T>() {
            // SAFETY: by the contract above.
            unsafe { ptr.cast::<u8>().write_bytes(0, capacity * size_of::<T>()) };
        }
        Self { ptr, capacity, len, name }
    }

    /// Refuses a buffer that is NULL, unless its capacity is 0: then only the length is asked for.
    pub(super) fn check(&self) -> Result<()> {
        self.len.check()?;
        let Self { ptr, capacity, name, .. } = self;
        if ptr.is_null() && *capacity > 0 {
            bail!(InvalidArgument, "{name} is NULL, but its capacity is {capacity}");
        }
        if !ptr.is_aligned() {
            bail!(InvalidArgument, "{name} is not aligned to {} bytes", align_of::<T>());
        }
        if *capacity > isize::MAX as usize / size_of::<T>() {
            bail!(InvalidArgument, "the capacity of {name} is {capacity}, more than memory can hold");
        }
        Ok(())
    }

    /// Writes `values` and their number; only their number if the caller asks for it, or if they do not fit.
    /// `terminated` leaves room for one zero behind them.
    pub(super) fn fill(&self, values: &[T], terminated: bool) -> Result<(), Fault> {
        self.len.set(values.len());
        if self.ptr.is_null() {
            return Ok(());
        }
        let needed = values.len() + usize::from(terminated);
        if needed > self.capacity {
            return Err(Fault {
                status: dsv4_status::BufferTooSmall,
                message: format!("{} has room for {}, but {needed} are needed", self.name, self.capacity),
            });
        }
        // SAFETY: there is room for `needed` values; they are ours and do not overlap the caller's memory.
        unsafe { self.ptr.copy_from_nonoverlapping(values.as_ptr(), values.len()) };
        Ok(())
    }
}

/// An output array `[rows, width]` in the caller's memory: zero until its rows are set.
pub(super) struct Rows {
    ptr: *mut f32,
    capacity: usize,
    name: &'static str,
}

impl Rows {
    /// Zeroes the caller's array.
    ///
    /// # Safety
    /// `ptr` is NULL or has room for `capacity` values.
    pub(super) unsafe fn new(ptr: *mut f32, capacity: usize, name: &'static str) -> Self {
        let rows = Self { ptr, capacity, name };
        rows.clear();
        rows
    }

    /// Zeroes it again, when the call fails half-way.
    pub(super) fn clear(&self) {
        if !self.ptr.is_null() && self.capacity <= isize::MAX as usize / size_of::<f32>() {
            // SAFETY: by the contract of `new`.
            unsafe { self.ptr.cast::<u8>().write_bytes(0, self.capacity * size_of::<f32>()) };
        }
    }

    /// Refuses NULL, unless there are no rows, and too little room.
    pub(super) fn check(&self, rows: usize, width: usize) -> Result<()> {
        let Self { ptr, capacity, name } = self;
        if rows == 0 {
            return Ok(());
        }
        if ptr.is_null() {
            return Err(null(name));
        }
        if !ptr.is_aligned() {
            bail!(InvalidArgument, "{name} is not aligned to {} bytes", align_of::<f32>());
        }
        let needed = rows.saturating_mul(width);
        if needed > *capacity || *capacity > isize::MAX as usize / size_of::<f32>() {
            bail!(InvalidArgument, "the capacity of {name} is {capacity}, but {rows} rows of {width} are {needed}");
        }
        Ok(())
    }

    /// Writes row number `row`, which [`Self::check`] found room for.
    pub(super) fn set(&self, row: usize, values: &[f32]) {
        // SAFETY: `check` was called with more rows of this width, so the place is within the array.
        let place = unsafe { self.ptr.add(row * values.len()) };
        // SAFETY: as above; the values are ours and do not overlap the caller's memory.
        unsafe { place.copy_from_nonoverlapping(values.as_ptr(), values.len()) };
    }
}

/// A copy of `text` that ends with a NUL.
pub(super) fn c_bytes(text: &str) -> Result<Vec<u8>> {
    let mut bytes = alloc::with_capacity("a text", text.len() + 1)?;
    bytes.extend_from_slice(text.as_bytes());
    bytes.push(0);
    Ok(bytes)
}

/// Copies as much as fits and leaves a NUL behind it.
pub(super) fn copy_text(text: &str, out: &mut [c_char]) {
    let text = beginning(text, out.len() - 1);
    for (out, &byte) in out.iter_mut().zip(text.as_bytes()) {
        *out = byte as c_char;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[repr(C)]
    #[derive(Clone, Copy, Debug, PartialEq)]
    struct Known {
        size: usize,
        first: u64,
        second: u64,
    }

    // SAFETY: as the trait asks.
    unsafe impl SizedStruct for Known {
        const NAME: &'static str = "dsv4_known_options";
    }

    impl Options for Known {
        fn defaults() -> Self {
            Self { size: size_of::<Self>(), first: 11, second: 22 }
        }
    }

    fn read(words: &[u64]) -> Result<Known> {
        // SAFETY: the tests give sizes within `words`, or such that no word behind the first is read.
        unsafe { options(words.as_ptr().cast::<Known>()) }
    }

    fn refused(words: &[u64], reason: &str) {
        let error = read(words).expect_err(reason);
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert!(error.message().contains(reason), "{error}");
    }

    /// Pitfall 97.
    #[test]
    fn options_of_older_and_newer_callers_are_read() {
        assert_eq!(read(&[24, 1, 2]).map(|o| (o.first, o.second)), Ok((1, 2)));
        assert_eq!(read(&[16, 1]).map(|o| (o.first, o.second)), Ok((1, 22)), "an older caller");
        assert_eq!(read(&[8]).map(|o| (o.first, o.second)), Ok((11, 22)), "the oldest");
        assert_eq!(read(&[40, 1, 2, 0, 0]).map(|o| (o.first, o.second)), Ok((1, 2)), "a newer caller");
        // SAFETY: NULL is allowed.
        assert_eq!(unsafe { options::<Known>(std::ptr::null()) }, Ok(Known::defaults()));
    }

    /// Pitfall 97.
    #[test]
    fn an_unknown_tail_and_impossible_sizes_are_refused() {
        refused(&[40, 1, 2, 0, 0x0700], "the byte at offset 33 is 7");
        refused(&[0, 1, 2], "size is 0, not set: fill it with dsv4_known_options_init");
        refused(&[20, 1, 2], "size is 20, which no version has");
        refused(&[4104], "larger than any version's");
        refused(&[u64::MAX], "larger than any version's");
    }

    #[test]
    fn defaults_reach_as_far_as_the_callers_struct() {
        for (size, want) in [(8, [8, 9, 9, 9]), (16, [16, 11, 9, 9]), (24, [24, 11, 22, 9]), (32, [32, 11, 22, 0])] {
            let mut words = [9u64; 4];
            // SAFETY: `size` is within `words`.
            unsafe { init_options(words.as_mut_ptr().cast::<Known>(), size) };
            assert_eq!(words, want);
        }
    }

    #[test]
    fn an_output_struct_is_written_as_far_as_the_caller_knows_it() {
        for (size, want) in [(8, [8, 9, 9, 9]), (16, [16, 1, 9, 9]), (24, [24, 1, 2, 9]), (32, [32, 1, 2, 0])] {
            let mut words = [9u64; 4];
            words[0] = size;
            // SAFETY: `size` is within `words`.
            let out = unsafe { OutStruct::new(words.as_mut_ptr().cast::<Known>(), "info") };
            assert!(out.check().is_ok());
            out.set(Known { size: 77, first: 1, second: 2 });
            assert_eq!(words, want);
        }
    }

    #[test]
    fn a_buffer_that_is_too_small_gets_the_length_and_no_values() {
        let (mut values, mut len) = ([9u32; 4], 9usize);
        let buffer = |ptr, capacity, len: &mut usize| {
            // SAFETY: locals, and a capacity within them.
            unsafe { Buffer::new(ptr, capacity, "tokens", Out::new(&raw mut *len, "len")) }
        };
        let fault = buffer(values.as_mut_ptr(), 3, &mut len).fill(&[1, 2, 3, 4], false).expect_err("too small");
        assert_eq!((fault.status, len, values), (dsv4_status::BufferTooSmall, 4, [0, 0, 0, 9]));
        assert!(buffer(values.as_mut_ptr(), 4, &mut len).fill(&[1, 2, 3], true).is_ok());
        assert_eq!((len, values), (3, [1, 2, 3, 0]));
        assert!(buffer(values.as_mut_ptr(), 3, &mut len).fill(&[1, 2, 3], true).is_err(), "no room for the zero");
        assert!(buffer(std::ptr::null_mut(), 0, &mut len).fill(&[1, 2], true).is_ok());
        assert_eq!(len, 2);
        assert!(buffer(std::ptr::null_mut(), 1, &mut len).check().is_err());
    }
}
