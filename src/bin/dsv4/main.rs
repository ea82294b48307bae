//! `dsv4`: the library's own shell. Each subcommand is one file; all use the public Rust API only.
//!
//! Results go to standard output, everything else (progress, warnings, speed) to standard error. Exit codes: 0 done,
//! 1 failed or something was found, 2 wrong usage.

mod args;
mod bench;
mod cache;
mod chat;
mod eval;
mod failure;
mod info;
mod interrupt;
mod logging;
#[cfg(all(test, feature = "cuda"))]
mod man;
mod number;
mod outfile;
mod output;
mod progress;
mod run;
#[cfg(feature = "cuda")]
mod selftest;
mod trace;
mod verify;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Runs DeepSeek-V4 models from their official checkpoint folders
#[derive(Parser)]
#[command(name = "dsv4", version, max_term_width = 100, arg_required_else_help = true, after_help = EXAMPLES)]
struct Cli {
    #[command(subcommand)]
    command: Command,

    /// Say more on standard error: -v for what happens, -vv for details
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    verbose: u8,
}

const EXAMPLES: &str = "\
MODEL is a checkpoint folder as released: config.json, *.safetensors,
tokenizer.json.

Examples:
  dsv4 run examples/models/tiny-v4 --prompt \"Once upon a time\"
  dsv4 chat ~/models/DeepSeek-V4-Flash --thinking
  dsv4 info ~/models/DeepSeek-V4-Flash --context 131072
  dsv4 verify ~/models/DeepSeek-V4-Flash --scan

`dsv4 COMMAND --help` explains each command.
Exit codes: 0 done, 1 failed, 2 wrong usage.";

#[derive(Subcommand)]
enum Command {
    Run(run::Args),
    Chat(chat::Args),
    Info(info::Args),
    Verify(verify::Args),
    Cache(cache::Args),
    Eval(eval::Args),
    Bench(bench::Args),
    #[cfg(feature = "cuda")]
    Selftest(selftest::Args),
    Trace(trace::Args),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    logging::start(cli.verbose);
    let result = match cli.command {
        Command::Run(args) => run::run(args),
        Command::Chat(args) => chat::run(args),
        Command::Info(args) => info::run(&args),
        Command::Verify(args) => verify::run(&args),
        Command::Cache(args) => cache::run(&args),
        Command::Eval(args) => eval::run(&args),
        Command::Bench(args) => bench::run(&args),
        #[cfg(feature = "cuda")]
        Command::Selftest(args) => selftest::run(&args),
        Command::Trace(args) => trace::run(&args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    }
}
