//! Streams, events and graphs: the order in which a device does things.

use std::ffi::c_void;
use std::sync::atomic::{AtomicU32, Ordering};

use cudarc::driver::sys;

use super::device::Gpu;
use super::kernels::Kernel;
use super::memory::{Buffer, Pinned, Plain};
use crate::alloc;
use crate::error::{Result, bail};

/// Dynamic shared memory that needs no opt-in.
const PLAIN_SHARED: u32 = 48 << 10;

/// First compute capability where a kernel may start before the one in front has ended.
const EARLY_LAUNCH: (u32, u32) = (9, 0);

/// The one parameter struct of a kernel, mirrored from its source.
///
/// # Safety
/// `repr(C)` with the fields of the kernel's struct, in order.
pub(super) unsafe trait Params: Copy {}

/// A queue of work on a device.
pub(crate) struct Stream {
    gpu: Gpu,
    raw: sys::CUstream,
}

// SAFETY: stream handles may be used from any thread.
unsafe impl Send for Stream {}
// SAFETY: the driver serialises calls on one stream.
unsafe impl Sync for Stream {}

/// Shape of a launch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Launch {
    /// Blocks.
    pub(super) grid: [usize; 3],
    /// Threads of a block.
    pub(super) block: u32,
    /// Bytes of dynamic shared memory.
    pub(super) shared: usize,
}

impl Stream {
    /// A stream that does not wait for the default one.
    pub(crate) fn new(gpu: &Gpu) -> Result<Self> {
        let _current = gpu.enter()?;
        let mut raw = std::ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the pointer outlives the call; the context is current.
        gpu.check("making a stream", unsafe { sys::cuStreamCreate(&raw mut raw, flags) })?;
        Ok(Self { gpu: gpu.clone(), raw })
    }

    /// The device.
    pub(crate) fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// Waits until everything queued has ended.
    ///
    /// # Errors
    /// `Poisoned` if a kernel faulted; the message names the stages that were in flight.
    pub(crate) fn synchronize(&self) -> Result<()> {
        let _current = self.gpu.enter()?;
        // SAFETY: the stream lives as long as `self`.
        self.gpu.check("waiting for the device", unsafe { sys::cuStreamSynchronize(self.raw) })?;
        self.gpu.note_well();
        Ok(())
    }

    /// Whether everything queued has ended.
    ///
    /// # Errors
    /// As [`Self::synchronize`].
    pub(crate) fn is_idle(&self) -> Result<bool> {
        let _current = self.gpu.enter()?;
        // SAFETY: the stream lives as long as `self`.
        let status = unsafe { sys::cuStreamQuery(self.raw) };
        if status == sys::CUresult::CUDA_ERROR_NOT_READY {
            return Ok(false);
        }
        self.gpu.check("looking after the device", status)?;
        Ok(true)
    }

    /// Queues a kernel.
    ///
    /// # Safety
    /// `params` is the struct that `kernel` takes, and describes device memory that lives until the stream has passed
    /// the launch and is as large as the kernel reads and writes.
    pub(super) unsafe fn launch<P: Params>(&self, kernel: &Kernel, shape: Launch, params: &P) -> Result<()> {
        let name = &*kernel.name;
        if kernel.params != size_of::<P>() {
            bail!(Unsupported, "kernel {name} takes {} bytes, its launcher gives {}", kernel.params, size_of::<P>());
        }
        let (limits, mut grid) = ([0x7FFF_FFFF, 65_535, 65_535], [0u32; 3]);
        for (i, &blocks) in shape.grid.iter().enumerate() {
            if blocks > limits[i] {
                bail!(InvalidArgument, "kernel {name} would need {blocks} blocks along dimension {i}");
            }
            grid[i] = blocks as u32;
        }
        let available = self.gpu.limits().shared_bytes;
        let Some(shared) = u32::try_from(shape.shared).ok().filter(|&s| s <= available) else {
            bail!(Unsupported, "kernel {name} needs {} bytes of shared memory; a block has {available}", shape.shared);
        };
        if grid.contains(&0) {
            return Ok(());
        }
        let _current = self.gpu.enter()?;
        self.opt_in(kernel, shared)?;
        let mut arguments = [std::ptr::from_ref(params).cast_mut().cast::<c_void>()];
        // the kernel may start before the one in front has ended: it waits by itself (`wait_for_inputs`)
        let mut early = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        };
        let config = sys::CUlaunchConfig {
            gridDimX: grid[0],
            gridDimY: grid[1],
            gridDimZ: grid[2],
            blockDimX: shape.block,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: shared,
            hStream: self.raw,
            attrs: &raw mut early,
            numAttrs: u32::from(self.gpu.limits().arch >= EARLY_LAUNCH),
        };
        // SAFETY: the function takes one argument of this size; the rest is the caller's contract.
        let status = unsafe {
            sys::cuLaunchKernelEx(&raw const config, kernel.function.0, arguments.as_mut_ptr(), std::ptr::null_mut())
        };
        self.gpu.note_launch(&kernel.name);
        self.gpu.check(name, status)?;
        if self.gpu.is_careful() {
            // SAFETY: the stream lives as long as `self`.
            self.gpu.check(name, unsafe { sys::cuStreamSynchronize(self.raw) })?;
            self.gpu.note_well();
        }
        Ok(())
    }

    fn opt_in(&self, kernel: &Kernel, shared: u32) -> Result<()> {
        if shared <= PLAIN_SHARED.max(kernel.shared.load(Ordering::Relaxed)) {
            return Ok(());
        }
        let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: the function belongs to the current context.
        let status = unsafe { sys::cuFuncSetAttribute(kernel.function.0, attribute, shared.cast_signed()) };
        self.gpu.check(&kernel.name, status)?;
        AtomicU32::store(&kernel.shared, shared, Ordering::Relaxed);
        Ok(())
    }

    /// Copies `values` to the device and waits for it. For large transfers see [`super::upload`].
    pub(crate) fn write<T: Plain>(&self, to: &Buffer<T>, values: &[T]) -> Result<()> {
        if values.len() != to.len() {
            bail!(InvalidArgument, "{} values for a device buffer of {}", values.len(), to.len());
        }
        let current = self.gpu.enter()?;
        // SAFETY: both sides have this many bytes, and the host side lives until the wait below.
        let status = unsafe { sys::cuMemcpyHtoDAsync_v2(to.address(), values.as_ptr().cast(), to.bytes(), self.raw) };
        self.gpu.check("copying to the device", status)?;
        drop(current);
        self.synchronize()
    }

    /// Queues a copy of `values` to the device by way of `pinned`, from byte `at` on, which must stay as it is until the next
    /// [`Self::synchronize`].
    pub(crate) fn write_later<T: Plain>(
        &self,
        to: &Buffer<T>,
        values: &[T],
        pinned: &mut Pinned,
        at: usize,
    ) -> Result<()> {
        if values.len() != to.len() {
            bail!(InvalidArgument, "{} values for a device buffer of {}", values.len(), to.len());
        }
        pinned.put(at, values)?;
        let _current = self.gpu.enter()?;
        // SAFETY: both sides have this many bytes, `put` has checked it; pinned memory lives until its owner, who waits, drops
        // it.
        let status = unsafe {
            let from = pinned.address().add(at).cast();
            sys::cuMemcpyHtoDAsync_v2(to.address(), from, to.bytes(), self.raw)
        };
        self.gpu.check("copying to the device", status)
    }

    /// Queues a copy of the first bytes of `from` to the device; they must stay as they are until the next
    /// [`Self::synchronize`].
    pub(crate) fn write_pinned<T: Plain>(&self, to: &Buffer<T>, from: &Pinned) -> Result<()> {
        if to.bytes() > from.len() {
            bail!(InvalidArgument, "a device buffer of {} bytes from {} pinned ones", to.bytes(), from.len());
        }
        let _current = self.gpu.enter()?;
        // SAFETY: both sides have this many bytes; pinned memory lives until its owner, who waits, drops it.
        let status = unsafe { sys::cuMemcpyHtoDAsync_v2(to.address(), from.address().cast(), to.bytes(), self.raw) };
        self.gpu.check("copying to the device", status)
    }

    /// The values of a buffer, once everything queued before has ended.
    pub(crate) fn read<T: Plain + Default>(&self, from: &Buffer<T>) -> Result<Vec<T>> {
        let mut values = alloc::zeroed::<T>("values from the device", from.len())?;
        let current = self.gpu.enter()?;
        // SAFETY: both sides have this many bytes, and the host side lives until the wait below.
        let status =
            unsafe { sys::cuMemcpyDtoHAsync_v2(values.as_mut_ptr().cast(), from.address(), from.bytes(), self.raw) };
        self.gpu.check("copying from the device", status)?;
        drop(current);
        self.synchronize()?;
        Ok(values)
    }

    /// Queues a copy of `from` to the start of `to`, which is there after the next [`Self::synchronize`].
    pub(crate) fn read_later<T: Plain>(&self, from: &Buffer<T>, to: &mut Pinned) -> Result<()> {
        if from.bytes() > to.len() {
            bail!(InvalidArgument, "{} bytes for a pinned buffer of {}", from.bytes(), to.len());
        }
        let _current = self.gpu.enter()?;
        // SAFETY: both sides have this many bytes; pinned memory lives until its owner, who waits, drops it.
        let status = unsafe { sys::cuMemcpyDtoHAsync_v2(to.address().cast(), from.address(), from.bytes(), self.raw) };
        self.gpu.check("copying from the device", status)
    }

    /// Sets every byte of a buffer.
    pub(crate) fn fill<T: Plain>(&self, buffer: &Buffer<T>, byte: u8) -> Result<()> {
        let _current = self.gpu.enter()?;
        // SAFETY: the buffer has this many bytes.
        let status = unsafe { sys::cuMemsetD8Async(buffer.address(), byte, buffer.bytes(), self.raw) };
        self.gpu.check("filling device memory", status)
    }

    /// Copies one buffer to another of the same length.
    pub(crate) fn copy<T: Plain>(&self, from: &Buffer<T>, to: &Buffer<T>) -> Result<()> {
        if from.len() != to.len() {
            bail!(InvalidArgument, "{} values for a device buffer of {}", from.len(), to.len());
        }
        let _current = self.gpu.enter()?;
        // SAFETY: both sides have this many bytes.
        let status = unsafe { sys::cuMemcpyDtoDAsync_v2(to.address(), from.address(), from.bytes(), self.raw) };
        self.gpu.check("copying within the device", status)
    }

    /// Marks a point in the stream.
    pub(crate) fn record(&self, event: &Event) -> Result<()> {
        let _current = self.gpu.enter()?;
        // SAFETY: both live.
        self.gpu.check("recording an event", unsafe { sys::cuEventRecord(event.raw, self.raw) })
    }

    /// What is queued from here on waits until the other stream has passed `event`.
    pub(crate) fn wait(&self, event: &Event) -> Result<()> {
        let _current = self.gpu.enter()?;
        // SAFETY: both live.
        self.gpu.check("waiting for an event", unsafe { sys::cuStreamWaitEvent(self.raw, event.raw, 0) })
    }

    /// Records what `queue` launches on this stream, and on streams that wait for it, as a graph.
    pub(crate) fn capture(&self, queue: impl FnOnce() -> Result<()>) -> Result<Graph> {
        let current = self.gpu.enter()?;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream lives.
        self.gpu.check("beginning a graph", unsafe { sys::cuStreamBeginCapture_v2(self.raw, mode) })?;
        let result = queue();
        let mut graph = std::ptr::null_mut();
        // SAFETY: the stream lives, the pointer outlives the call; also ends a capture that went wrong.
        let ended = unsafe { sys::cuStreamEndCapture(self.raw, &raw mut graph) };
        let mut raw = std::ptr::null_mut();
        let made = result.and_then(|()| self.gpu.check("ending a graph", ended)).and_then(|()| {
            // SAFETY: the graph was just made.
            let status = unsafe { sys::cuGraphInstantiateWithFlags(&raw mut raw, graph, 0) };
            self.gpu.check("instantiating a graph", status)
        });
        if !graph.is_null() {
            // SAFETY: as above; the executable graph does not need it.
            let _ = unsafe { sys::cuGraphDestroy(graph) };
        }
        made?;
        drop(current);
        Ok(Graph { gpu: self.gpu.clone(), raw })
    }

    /// Queues a whole graph.
    pub(crate) fn replay(&self, graph: &Graph) -> Result<()> {
        let _current = self.gpu.enter()?;
        // SAFETY: both live.
        self.gpu.check("launching a graph", unsafe { sys::cuGraphLaunch(graph.raw, self.raw) })
    }

    pub(super) fn raw(&self) -> sys::CUstream {
        self.raw
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let _current = self.gpu.enter_to_free();
        // SAFETY: made in `new`, destroyed once; work that is queued still runs.
        let _ = unsafe { sys::cuStreamDestroy_v2(self.raw) };
    }
}

/// A point in a stream.
pub(crate) struct Event {
    gpu: Gpu,
    raw: sys::CUevent,
}

// SAFETY: event handles may be used from any thread.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// An event with a time stamp.
    pub(crate) fn new(gpu: &Gpu) -> Result<Self> {
        let _current = gpu.enter()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the pointer outlives the call; the context is current.
        gpu.check("making an event", unsafe { sys::cuEventCreate(&raw mut raw, 0) })?;
        Ok(Self { gpu: gpu.clone(), raw })
    }

    /// Waits until the stream has passed it.
    pub(crate) fn synchronize(&self) -> Result<()> {
        let _current = self.gpu.enter()?;
        // SAFETY: the event lives.
        self.gpu.check("waiting for an event", unsafe { sys::cuEventSynchronize(self.raw) })
    }

    /// Microseconds from `earlier` to this one; both have passed.
    pub(crate) fn micros_since(&self, earlier: &Self) -> Result<f64> {
        let _current = self.gpu.enter()?;
        let mut millis = 0.0;
        // SAFETY: both live; the pointer outlives the call.
        let status = unsafe { sys::cuEventElapsedTime_v2(&raw mut millis, earlier.raw, self.raw) };
        self.gpu.check("reading an event", status)?;
        Ok(f64::from(millis) * 1e3)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let _current = self.gpu.enter_to_free();
        // SAFETY: made in `new`, destroyed once.
        let _ = unsafe { sys::cuEventDestroy_v2(self.raw) };
    }
}

/// Work that is queued as one.
pub(crate) struct Graph {
    gpu: Gpu,
    raw: sys::CUgraphExec,
}

// SAFETY: graph handles may be used from any thread.
unsafe impl Send for Graph {}

impl Drop for Graph {
    fn drop(&mut self) {
        let _current = self.gpu.enter_to_free();
        // SAFETY: made in `capture`, destroyed once.
        let _ = unsafe { sys::cuGraphExecDestroy(self.raw) };
    }
}
