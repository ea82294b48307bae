//! `dsv4 selftest`: does this machine's GPU compute what the CPU computes?

#![forbid(unsafe_code)]

use dsv4::backend::cuda::{SelfTestOptions, self_test, timings};
use dsv4::backend::{cuda_devices, cuda_kernels};
use dsv4::{DeviceChoice, ErrorKind};

use crate::failure::{Failure, Result};
use crate::output::{self, note};

const EXAMPLES: &str = "\
Runs every GPU operation against the CPU's on random data: one line each on
standard output, then a summary. Attach the output to a bug report. The exit code
is 1 if anything fails.

Example:
  dsv4 selftest --device cuda:0";

/// Compare every GPU operation with the CPU's
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// The GPU: cuda or cuda:N
    #[arg(long, default_value_t = DeviceChoice::Cuda(0))]
    device: DeviceChoice,

    /// Seed of the random data; without, a new one each time
    #[arg(long, value_name = "N")]
    seed: Option<u64>,

    /// Only groups of operations whose name contains this
    #[arg(long, value_name = "NAME")]
    only: Option<String>,

    /// Small sizes only, for memory checkers
    #[arg(long)]
    small: bool,

    /// Wait for each kernel, so that a fault names it
    #[arg(long)]
    careful: bool,

    /// Print failures and the summary only
    #[arg(long)]
    quiet: bool,

    /// End with a planted fault: is it named, and does freeing work?
    #[arg(long)]
    fault: bool,

    /// Measure speed on the shapes of V4-Flash instead of correctness
    #[arg(long)]
    speed: bool,
}

pub(crate) fn run(args: &Args) -> Result {
    let DeviceChoice::Cuda(device) = args.device else {
        return Err(Failure::Usage("selftest compares a GPU with the CPU: --device cuda or cuda:N".into()));
    };
    let (inventory, devices) = (cuda_kernels(), cuda_devices()?);
    let name = devices.get(device as usize).map_or("no such device", |d| d.name.as_str());
    let held = if inventory.architectures.is_empty() { "sources".into() } else { inventory.architectures.join(" ") };
    output::line(format_args!("dsv4 {} on cuda:{device} ({name}); kernels: {held}", env!("CARGO_PKG_VERSION")))?;
    if args.speed {
        timings(device, args.only.as_deref(), &mut |timing| note(format_args!("{timing}")))?;
        return Ok(());
    }
    let seed = args.seed.unwrap_or_else(|| {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        now.map_or(0, |t| t.as_millis() as u64 % 1_000_000_007)
    });
    let (only, small, careful, fault) = (args.only.clone(), args.small, args.careful, args.fault);
    let options = SelfTestOptions { device, seed, only, small, careful, fault };
    let (mut checks, mut failed, mut lines) = (0, 0, Ok(()));
    let passed = self_test(&options, &mut |check| {
        checks += 1;
        failed += usize::from(!check.passed());
        if lines.is_ok() && !(args.quiet && check.passed()) {
            lines = output::line(format_args!("{check}"));
        }
    });
    lines?;
    let passed = match passed {
        Err(error) if error.kind() == ErrorKind::Poisoned => {
            output::line(format_args!("FAULT  {}", error.message()))?;
            return Err(Failure::Findings);
        }
        other => other?,
    };
    output::line(format_args!("{checks} checks, {failed} failed, seed {seed}"))?;
    if passed { Ok(()) } else { Err(Failure::Findings) }
}
