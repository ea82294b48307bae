//! Every operation on the device against the CPU's, on random data: what `dsv4 selftest` runs.
//!
//! All device memory of a check is filled with 0xFF first, which is NaN in every format, so an output that was not
//! written, or padding that was read, shows. Errors are `|got - want| / |want|` over whole tensors; a NaN anywhere is an
//! infinite error. A limit of 0 means: the same bits. Why a limit is what it is stands beside it.

mod attention;
mod dense;
mod experts;
mod fusions;
mod lab;
mod long;
mod pages;
mod prompts;
mod sample;
mod sequence;
mod timing;
mod world;

use std::fmt;

use super::device::Gpu;
use crate::backend::cpu::Cpu;
use crate::error::{Error, Result};
use lab::Lab;

pub use timing::{Timing, timings};

/// Outcome of one check.
#[derive(Clone, Debug)]
pub struct Check {
    /// The operation and what was looked at.
    pub op: &'static str,
    /// Sizes, for people.
    pub shape: String,
    /// Relative error, or number of differing values where the limit is 0.
    pub error: f64,
    /// Largest error that passes.
    pub limit: f64,
    /// Seed of the data; with the same one the check can be repeated.
    pub seed: u64,
}

impl Check {
    /// Whether the error is within the limit.
    pub fn passed(&self) -> bool {
        self.error <= self.limit
    }
}

impl fmt::Display for Check {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verdict = if self.passed() { "ok" } else { "FAILED" };
        let Self { op, shape, error, limit, seed, .. } = self;
        write!(f, "{verdict:6} {op:34} {shape:40} error {error:.2e} limit {limit:.0e} seed {seed}")
    }
}

/// What a self-test covers.
#[derive(Clone, Debug, Default)]
pub struct SelfTestOptions {
    /// Number of the device.
    pub device: u32,
    /// Seed of all random data.
    pub seed: u64,
    /// Only checks whose operation contains this.
    pub only: Option<String>,
    /// Small sizes only, for memory checkers.
    pub small: bool,
    /// Wait for each kernel, so that a fault names it. Off, kernels overlap as they do in use.
    pub careful: bool,
    /// End with a planted fault: the device object must name the stage and still be freed. Leaves the device unusable for
    /// the rest of the process.
    pub fault: bool,
}

/// One group of checks.
type Group = fn(&mut Lab<'_>) -> Result<()>;

const GROUPS: &[(&str, Group)] = &[
    ("upload", dense::upload),
    ("streams", dense::streams),
    ("page memory", pages::page_memory),
    ("pages", pages::pages),
    ("embed", dense::embed),
    ("rms_norm", dense::rms_norm),
    ("quantise", dense::quantise),
    ("rotations", dense::rotations),
    ("linear", dense::linear),
    ("hyper", dense::hyper),
    ("argmax", sample::argmax),
    ("top_logits", sample::top_logits),
    ("sample", sample::sample),
    ("top_k", dense::top_k),
    ("route", experts::route),
    ("group", experts::group),
    ("experts", experts::experts),
    ("prompts: linear", prompts::linear),
    ("prompts: experts", prompts::experts),
    ("swiglu", experts::swiglu),
    ("combine", experts::combine),
    ("chain", experts::chain),
    ("watch", sequence::watch),
    ("fusion: insert", sequence::insert),
    ("fusion: compress", sequence::compress),
    ("fusion: attention's output", attention::output),
    ("indexer", sequence::indexer),
    ("attend", attention::attend),
    ("far pages", attention::far_pages),
    ("far writes", sequence::far_writes),
    ("long context", long::long_context),
];

/// Runs the checks and tells `seen` each outcome as it comes; true if all passed. A check that cannot run is an error.
///
/// # Errors
/// As opening the device; `Poisoned` with the kernel's name if one faults.
pub fn self_test(options: &SelfTestOptions, seen: &mut dyn FnMut(&Check)) -> Result<bool> {
    let gpu = Gpu::open(options.device)?;
    gpu.set_careful(options.careful);
    let cpu = Cpu::new(0)?;
    let mut passed = true;
    let mut count = |check: &Check| {
        passed &= check.passed();
        seen(check);
    };
    for (i, (name, run)) in GROUPS.iter().enumerate() {
        if options.only.as_ref().is_some_and(|only| !name.contains(only.as_str())) {
            continue;
        }
        let seed = options.seed.wrapping_mul(1000).wrapping_add(i as u64);
        let mut lab = Lab::new(&gpu, &cpu, seed, options.small, &mut count)?;
        run(&mut lab).map_err(|e: Error| e.context(name))?;
    }
    if options.fault {
        gpu.set_careful(true);
        let mut lab = Lab::new(&gpu, &cpu, 0, true, &mut count)?;
        lab.fault()?;
    }
    Ok(passed)
}
