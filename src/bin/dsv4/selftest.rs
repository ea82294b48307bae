//! `dsv4 selftest`: does this machine's GPU compute what the CPU computes?

#![forbid(unsafe_code)]

use std::path::PathBuf;
use std::sync::Arc;

use dsv4::backend::cuda::{SelfTestOptions, self_test, timings};
use dsv4::backend::{cuda_devices, cuda_kernels};
use dsv4::{DeviceChoice, EngineOptions, ErrorKind, Model, Numerics, TokenId, research};
use serde_json::json;

use crate::failure::{Failure, Result};
use crate::number::between;
use crate::output::{self, note};

const EXAMPLES: &str = "\
Runs every GPU operation against the CPU's on random data: one line each on
standard output, then a summary. Given a model, also every half layer of it, in the
numerics reference and served, on random tokens; limits are what other orders of
float32 sums change. Attach the output to a bug report. The exit code is 1 if
anything fails.

Examples:
  dsv4 selftest --device cuda:0
  dsv4 selftest examples/models/tiny-v4 --only nothing    the model alone";

/// Compare every GPU operation with the CPU's
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Checkpoint folder of a model whose half layers are compared too
    model: Option<PathBuf>,

    /// Tokens that the model's half layers are compared on
    #[arg(long, value_name = "N", default_value_t = 300, value_parser = between([1, 65_536]), requires = "model")]
    tokens: u64,

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

    /// Print the times of --speed as JSON, an object a line
    #[arg(long, requires = "speed")]
    json: bool,
}

pub(crate) fn run(args: &Args) -> Result {
    let DeviceChoice::Cuda(device) = args.device else {
        return Err(Failure::Usage("selftest compares a GPU with the CPU: --device cuda or cuda:N".into()));
    };
    let (inventory, devices) = (cuda_kernels(), cuda_devices()?);
    let name = devices.get(device as usize).map_or("no such device", |d| d.name.as_str());
    let held = if inventory.architectures.is_empty() { "sources".into() } else { inventory.architectures.join(" ") };
    let head = format!("dsv4 {} on cuda:{device} ({name}); kernels: {held}", env!("CARGO_PKG_VERSION"));
    if args.json {
        note(head);
    } else {
        output::line(head)?;
    }
    if args.speed {
        let mut lines = Ok(());
        timings(device, args.only.as_deref(), &mut |timing| {
            if !args.json {
                note(format_args!("{timing}"));
            } else if lines.is_ok() {
                let (op, bytes, flops) = (&timing.op, timing.bytes, timing.flops);
                let line =
                    json!({ "op": op, "us": timing.micros, "bytes": bytes, "flops": flops, "apart_us": timing.apart });
                lines = output::line(line);
            }
        })?;
        return lines;
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
    let mut halves_passed = true;
    if let Some(model) = &args.model {
        let model = Model::open(model)?;
        for numerics in [Numerics::Reference, Numerics::Served] {
            let (count, wrong) = halves(args, &model, numerics, seed)?;
            (checks, failed) = (checks + count, failed + wrong);
            halves_passed &= wrong == 0;
        }
    }
    output::line(format_args!("{checks} checks, {failed} failed, seed {seed}"))?;
    if passed && halves_passed { Ok(()) } else { Err(Failure::Findings) }
}

/// Compares the model's half layers; how many comparisons there were, and how many failed.
fn halves(args: &Args, model: &Arc<Model>, numerics: Numerics, seed: u64) -> Result<(usize, usize)> {
    let vocab = model.config().vocab_size as u64;
    let id = |i: u64| ((i + seed).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 24) % vocab;
    let text: Vec<TokenId> = (0..args.tokens).map(|i| id(i) as TokenId).collect();
    let options = EngineOptions { device: args.device, numerics, ..EngineOptions::default() };
    let halves = research::compare_halves(model, &options, &[text])?;
    let verdict = |passed| if passed { "ok" } else { "FAILED" };
    for half in &halves.layers {
        if args.quiet && half.passed() {
            continue;
        }
        let (what, shape) = (format!("{numerics}, {}", half.what), format!("layer {} ({:?})", half.layer, half.kind));
        output::line(format_args!(
            "{:6} {what:34} {shape:40} median {:.2e} limit {:.2e}, 90th percentile {:.2e} limit {:.2e}, {:.0} % equal",
            verdict(half.passed()),
            half.error.p50,
            half.limit[0],
            half.error.p90,
            half.limit[1],
            100.0 * half.error.equal
        ))?;
    }
    let wrong = halves.layers.iter().filter(|half| !half.passed()).count();
    let routes = halves.passed() || wrong > 0;
    let shape = format!("{} of {}", halves.other_routes, halves.routes);
    output::line(format_args!("{:6} {:34} {shape}", verdict(routes), format!("{numerics}, other experts")))?;
    Ok((halves.layers.len() + 1, wrong + usize::from(!routes)))
}
