//! Weights to the device through pinned memory: while one half is on its way, the other is filled.

use cudarc::driver::sys;

use super::device::Gpu;
use super::memory::{Buffer, Pinned};
use super::stream::{Event, Stream};
use crate::error::{Error, Result, bail};

/// Copies host memory of any size and kind to the device.
pub(crate) struct Uploader {
    stream: Stream,
    halves: [Half; 2],
    next: usize,
    len: usize,
}

struct Half {
    pinned: Pinned,
    /// Passed when the device has read the half.
    done: Event,
}

impl Uploader {
    /// With two halves of `bytes` bytes.
    ///
    /// # Errors
    /// `OutOfMemory` if the system does not pin that much.
    pub(crate) fn new(gpu: &Gpu, bytes: usize) -> Result<Self> {
        let half = || Ok::<_, Error>(Half { done: Event::new(gpu)?, pinned: Pinned::new(gpu, bytes)? });
        Ok(Self { stream: Stream::new(gpu)?, halves: [half()?, half()?], next: 0, len: bytes.max(1) })
    }

    /// Copies `from` into `to`, and tells `progress` after each piece how many of its bytes are on their way. The copy is
    /// complete after [`Self::finish`].
    ///
    /// # Errors
    /// `InvalidArgument` if the sizes differ; that of `progress`, which ends the upload.
    pub(crate) fn upload(
        &mut self,
        to: &Buffer<u8>,
        from: &[u8],
        progress: &mut dyn FnMut(u64) -> Result<()>,
    ) -> Result<()> {
        if from.len() != to.len() {
            bail!(InvalidArgument, "{} bytes for a device buffer of {}", from.len(), to.len());
        }
        let gpu = self.stream.gpu().clone();
        let mut sent = 0;
        for piece in from.chunks(self.len) {
            let half = &self.halves[self.next];
            half.done.synchronize()?;
            // SAFETY: the half has `self.len` bytes, and the device has read what was in it.
            unsafe { std::ptr::copy_nonoverlapping(piece.as_ptr(), half.pinned.address(), piece.len()) };
            let address = to.slice(sent..sent + piece.len())?.address();
            let current = gpu.enter()?;
            // SAFETY: both sides have this many bytes; the half is not touched before its event has passed.
            let status = unsafe {
                sys::cuMemcpyHtoDAsync_v2(
                    address,
                    half.pinned.address().cast_const().cast(),
                    piece.len(),
                    self.stream.raw(),
                )
            };
            gpu.check("uploading weights", status)?;
            drop(current);
            self.stream.record(&half.done)?;
            self.next = 1 - self.next;
            sent += piece.len();
            progress(sent as u64)?;
        }
        Ok(())
    }

    /// Waits for all uploads.
    pub(crate) fn finish(&self) -> Result<()> {
        self.stream.synchronize()
    }
}

impl Drop for Half {
    fn drop(&mut self) {
        // a copy may still be reading; after a fault nothing is
        drop(self.done.synchronize());
    }
}
