//! The built `dsv4` command on the model in the repository and on broken inputs: what it prints where, and its exit codes.

#![allow(clippy::unwrap_used, reason = "a failed call is a failed test")]

use std::ffi::OsStr;
use std::fs;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use serde_json::Value;

const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/models/tiny-v4");

fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_dsv4"));
    command.args(args).stdin(Stdio::null());
    command
}

fn dsv4(args: &[&str]) -> Output {
    command(args).output().unwrap()
}

fn spawn(args: &[&str]) -> Child {
    command(args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Output with `input` on standard input.
fn with_input(args: &[&str], input: &[u8]) -> Output {
    let mut child = spawn(args);
    child.stdin.take().unwrap().write_all(input).unwrap();
    child.wait_with_output().unwrap()
}

fn stdout(output: &Output) -> &str {
    std::str::from_utf8(&output.stdout).unwrap()
}

fn stderr(output: &Output) -> &str {
    std::str::from_utf8(&output.stderr).unwrap()
}

/// Standard output of a call that succeeds.
#[track_caller]
fn ok(args: &[&str]) -> String {
    let output = dsv4(args);
    assert_eq!(output.status.code(), Some(0), "{args:?}: {}", stderr(&output));
    stdout(&output).to_owned()
}

#[track_caller]
fn json(args: &[&str]) -> Value {
    serde_json::from_str(&ok(args)).unwrap()
}

/// The call fails with exit code 1, one line on standard error that has all `parts`, and nothing on standard output.
#[track_caller]
fn fails(args: &[&str], parts: &[&str]) {
    let output = dsv4(args);
    let message = stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{args:?}: {message}");
    assert!(message.starts_with("error: ") && message.lines().count() == 1, "{args:?}: {message}");
    assert!(parts.iter().all(|part| message.contains(part)), "{message} lacks one of {parts:?}");
    assert_eq!(stdout(&output), "");
}

/// The call is refused with exit code 2 and a message with `part`.
#[track_caller]
fn misused(args: &[&str], part: &str) {
    let output = dsv4(args);
    assert_eq!(output.status.code(), Some(2), "{args:?}: {}", stderr(&output));
    assert!(stderr(&output).contains(part), "{args:?}: {} lacks {part}", stderr(&output));
    assert_eq!(stdout(&output), "");
}

/// A copy of the model that a test may damage.
fn copy_of_model() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(MODEL).unwrap() {
        let path = entry.unwrap().path();
        if path.is_file() {
            fs::copy(&path, dir.path().join(path.file_name().unwrap())).unwrap();
        }
    }
    dir
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn model_file(name: &str) -> String {
    format!("{MODEL}/{name}")
}

fn run_args<'a>(more: &[&'a str]) -> Vec<&'a str> {
    [&["run", MODEL, "--prompt", "Once upon a time", "-n", "12"], more].concat()
}

// ---- the command as a whole

#[test]
fn help_explains_every_option_of_every_command() {
    let engine = [
        "--numerics",
        "--kv",
        "--device",
        "--threads",
        "--chunk",
        "--batch-invariant",
        "--gpu-bytes",
        "--gpu-experts",
        "--host-bytes",
        "--cache-bytes",
        "--checkpoint-bytes",
        "--checkpoints",
        "--salt",
        "--poison",
        "--host-tier",
        "--disk-tier",
        "--disk-tier-bytes",
        "--disk-write-rate",
        "--disk-write-total",
        "--prefetch",
        "--prefetch-depth",
        "--tier-timeout",
        "--when-full",
        "--session-tier",
        "--degraded",
    ];
    let sampling = [
        "--greedy",
        "--temperature",
        "--top-p",
        "--top-k",
        "--min-p",
        "--repetition-penalty",
        "--presence-penalty",
        "--frequency-penalty",
        "--penalty-window",
        "--seed",
        "--context",
        "--time-limit",
        "--metrics",
    ];
    let run = ["--prompt", "--prompt-file", "--bos", "--no-bos", "--markup", "--max-tokens", "--stop", "--ignore-eos"];
    let run_output = ["--echo", "--no-echo", "--stats", "--session"];
    let eval = ["--text", "--limit", "--recall", "--recall-distances", "--filler", "--cases", "--json", "--context"];
    let bench = [
        "--prefill",
        "--decode",
        "--context",
        "--repetitions",
        "--bandwidth",
        "--layers",
        "--batch",
        "--sessions",
        "--max-context",
        "--seed",
        "--metrics",
        "--json",
        "--csv",
    ];
    let chat = ["--system", "--thinking", "--effort", "--tools", "--max-tokens", "--stats", "--session"];
    let commands: [(&str, Vec<&str>); 9] = [
        ("run", [&run[..], &run_output, &sampling, &engine].concat()),
        ("chat", [&chat[..], &sampling, &engine].concat()),
        ("info", vec!["--context", "--kv", "--cache-bytes", "--json"]),
        ("verify", vec!["--scan"]),
        ("cache", vec!["--verify", "--json"]),
        ("eval", [&eval[..], &engine].concat()),
        ("bench", [&bench[..], &engine].concat()),
        ("trace", [&["--tokens", "--out"], &engine[..]].concat()),
        (
            "selftest",
            vec![
                "--tokens",
                "--device",
                "--seed",
                "--only",
                "--small",
                "--careful",
                "--quiet",
                "--fault",
                "--speed",
                "--json",
            ],
        ),
    ];
    let overview = ok(&["--help"]);
    for (name, options) in commands {
        assert!(overview.contains(&format!("\n  {name} ")), "{name} is not in the overview");
        let help = ok(&[name, "--help"]);
        assert!(help.contains("Example"), "{name} has no example");
        let known = [&options[..], &["--verbose", "--help"]].concat();
        for option in &known {
            let line = help.lines().position(|line| line.trim_start().trim_start_matches("-n, ").contains(option));
            let line = line.unwrap_or_else(|| panic!("{name} --help does not mention {option}"));
            let words = help.lines().skip(line).take(2).collect::<String>().split_whitespace().count();
            assert!(words > 3, "{name} --help does not explain {option}");
        }
        // the other way round: every option in the help is one of these
        for line in help.lines().map(str::trim_start).filter(|line| line.starts_with('-')) {
            let long = line.split([' ', ',', '.']).find(|word| word.starts_with("--"));
            let long = long.unwrap_or_else(|| panic!("{name}: {line} has no long name"));
            assert!(known.contains(&long), "{name} has the option {long}, which this test does not know");
        }
    }
}

#[test]
fn version_is_the_crates() {
    assert_eq!(ok(&["--version"]), format!("dsv4 {}\n", env!("CARGO_PKG_VERSION")));
}

#[test]
fn wrong_usage_is_exit_code_2_and_says_what_is_wrong() {
    misused(&[], "Usage");
    misused(&["fly"], "fly");
    misused(&["run", MODEL], "--prompt");
    misused(&["run", MODEL, "--prompt", "a", "--prompt-file", "b"], "cannot be used with");
    misused(&run_args(&["--numerics", "fuzzy"]), "one of reference, served, kvquant, exact");
    misused(&run_args(&["--kv", "q4"]), "one of fp8, bf16, f32");
    misused(&run_args(&["--device", "tpu"]), "cpu, cuda or cuda:N");
    misused(&run_args(&["--chunk", "65537"]), "65536");
    misused(&run_args(&["--threads", "9999"]), "1024");
    misused(&run_args(&["--cache-bytes", "8Q"]), "not a size");
    misused(&run_args(&["--cache-bytes", "99999999999T"]), "64 bits");
    misused(&run_args(&["--checkpoints", "300"]), "multiple of 256");
    for option in ["--disk-tier-bytes", "--disk-write-rate", "--disk-write-total", "--prefetch-depth"] {
        misused(&run_args(&[option, "8"]), "--disk-tier <FOLDER>");
    }
    misused(&run_args(&["--prefetch", "off"]), "--disk-tier <FOLDER>");
    misused(&run_args(&["--prefetch", "soon"]), "off, next or aggressive");
    misused(&run_args(&["--prefetch-depth", "0"]), "1024");
    misused(&run_args(&["--when-full", "cry"]), "evict, refuse or wait");
    misused(&run_args(&["--degraded", "80"]), "80:8192:64");
    misused(&run_args(&["--time-limit", "0"]), "above 0");
    misused(&["cache"], "FILE");
    misused(&run_args(&["--stop", ""]), "--stop");
    misused(&run_args(&["--greedy", "--top-k", "3"]), "cannot be used with");
    misused(&run_args(&["--temperature", "0"]), "greedy");
    misused(&run_args(&["--top-p", "1.5"]), "top_p is 1.5");
    misused(&["run", MODEL, "--prompt", "", "--no-bos"], "empty");
    misused(&["chat", MODEL, "--effort", "high"], "--thinking");
    misused(&["eval", MODEL], "--text");
    misused(&["bench", MODEL, "--decode", "0", "--bandwidth"], "--decode");
    misused(&["bench", MODEL, "--decode", "0", "--sessions", "2"], "--decode");
    misused(&["bench", MODEL, "--json", "--csv"], "cannot be used with");
    misused(&["trace", MODEL, "--out", "x"], "--tokens");
}

#[test]
fn a_folder_that_is_no_checkpoint_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let missing = dir.path().join("nowhere");
    for args in [&["run", "M", "--prompt", "a"][..], &["chat", "M"], &["info", "M"], &["verify", "M"], &["bench", "M"]]
    {
        let args: Vec<&str> = args.iter().map(|&a| if a == "M" { text(&missing) } else { a }).collect();
        fails(&args, &["nowhere"]);
    }
    fails(&["info", text(dir.path())], &["config.json"]);
}

#[test]
fn another_architecture_is_refused_by_name() {
    let dir = copy_of_model();
    let config = fs::read_to_string(model_file("config.json")).unwrap().replace("\"deepseek_v4\"", "\"deepseek_v41\"");
    fs::write(dir.path().join("config.json"), config).unwrap();
    fails(&["run", text(dir.path()), "--prompt", "a"], &["deepseek_v41", "another architecture"]);
}

#[test]
fn verbose_tells_what_happens_on_standard_error() {
    let quiet = dsv4(&run_args(&[]));
    let verbose = dsv4(&run_args(&["-v"]));
    assert_eq!(stderr(&quiet), "");
    assert!(stderr(&verbose).contains("info: engine ready"), "{}", stderr(&verbose));
    assert_eq!(quiet.stdout, verbose.stdout);
}

#[cfg(unix)]
#[test]
fn arguments_that_are_not_utf8_are_a_clear_error() {
    use std::os::unix::ffi::OsStrExt;
    let bad = OsStr::from_bytes(b"\xff\xfe");
    let output = command(&["run", MODEL, "--prompt"]).arg(bad).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("UTF-8"), "{}", stderr(&output));
    let output = command(&["info"]).arg(bad).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(String::from_utf8_lossy(&output.stderr).lines().count(), 1);
}

#[test]
fn a_closed_pipe_ends_quietly() {
    let endless = ["run", MODEL, "--prompt", "Once", "-n", "0", "--ignore-eos"];
    for args in [&endless[..], &["info", MODEL]] {
        let mut child = spawn(args);
        let mut first = [0; 8];
        child.stdout.take().unwrap().read_exact(&mut first).unwrap();
        let output = child.wait_with_output().unwrap();
        assert_eq!(stderr(&output), "", "{args:?}");
        assert_eq!(output.status.code(), Some(0), "{args:?}");
    }
}

#[cfg(unix)]
#[test]
fn an_interrupt_ends_a_generation_and_keeps_what_was_printed() {
    let mut child = spawn(&["run", MODEL, "--prompt", "Once", "-n", "0", "--ignore-eos", "--stats"]);
    let mut first = [0; 8];
    child.stdout.as_mut().unwrap().read_exact(&mut first).unwrap();
    let sent = Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(sent.success());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{}", stderr(&output));
    assert!(stderr(&output).contains("ended by interrupted"), "{}", stderr(&output));
}

// ---- run

#[test]
fn the_same_seed_gives_the_same_text_however_it_is_computed() {
    let first = ok(&run_args(&[]));
    assert!(first.trim().len() > 12 && first.ends_with('\n'), "{first:?}");
    assert_eq!(ok(&run_args(&["--seed", "0"])), first);
    assert_eq!(ok(&run_args(&["--threads", "1", "--chunk", "2"])), first);
    assert_ne!(ok(&run_args(&["--seed", "1"])), first);
}

#[test]
fn a_full_cache_a_time_limit_and_load_are_told_apart_and_figures_are_written() {
    let dir = tempfile::tempdir().unwrap();
    let (figures, prompt) = (dir.path().join("figures"), "a little dog ran ".repeat(600));
    let long = |more: &[&'static str]| [&["run", MODEL, "-n", "1", "--chunk", "16", "--prompt"], more].concat();
    let with = |more: &[&'static str]| long(more).into_iter().map(String::from).collect::<Vec<_>>();
    let mut args = with(&[]);
    args.extend([prompt.clone(), "--time-limit".into(), "0.001".into()]);
    fails(&args.iter().map(String::as_str).collect::<Vec<_>>(), &["time limit"]);
    let mut args = with(&[]);
    args.extend([prompt, "--cache-bytes".into(), "1M".into(), "--when-full".into(), "refuse".into()]);
    fails(&args.iter().map(String::as_str).collect::<Vec<_>>(), &["cache is full"]);

    let plain = ok(&run_args(&[]));
    let options =
        ["--degraded", "80:4096:64", "--session-tier", "1M", "--time-limit", "600", "--metrics", text(&figures)];
    assert_eq!(ok(&run_args(&options)), plain, "the text is the same");
    let figures = fs::read_to_string(&figures).unwrap();
    assert!(figures.starts_with("# HELP dsv4_") && figures.contains("\ndsv4_degraded 0\n"), "{figures}");
    fails(&run_args(&["--metrics", MODEL]), &["tiny-v4"]);
}

#[test]
fn prompts_come_from_files_and_standard_input_too() {
    let expected = ok(&run_args(&["--greedy"]));
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("prompt");
    fs::write(&file, "Once upon a time").unwrap();
    let args = |file| ["run", MODEL, "--greedy", "-n", "12", "--prompt-file", file];
    assert_eq!(ok(&args(text(&file))), expected);
    assert_eq!(stdout(&with_input(&args("-"), b"Once upon a time")), expected);
    fs::write(&file, b"Once \xff").unwrap();
    fails(&args(text(&file)), &["prompt", "not UTF-8"]);
    fails(&args("/nowhere/at/all"), &["/nowhere/at/all"]);
}

#[test]
fn options_of_run_do_what_they_say() {
    let plain = ok(&run_args(&["--greedy"]));
    let echoed = ok(&run_args(&["--greedy", "--echo"]));
    assert_eq!(echoed, format!("Once upon a time{plain}"));
    assert_ne!(ok(&run_args(&["--greedy", "--no-bos"])), plain);
    let word = plain.split_whitespace().nth(2).unwrap();
    let stopped = ok(&run_args(&["--greedy", "--stop", word]));
    assert_eq!(format!("{}\n", &plain[..plain.find(word).unwrap()]), stopped);
    // without --markup the marker is text, so the two prompts differ
    let marked =
        |more: &[&str]| ok(&[&["run", MODEL, "--greedy", "-n", "8", "-p", "Hello<｜Assistant｜>"], more].concat());
    assert_ne!(marked(&["--markup"]), marked(&[]));
    let stats = dsv4(&run_args(&["--greedy", "--stats"]));
    for part in
        ["prompt: 6 tokens, 0 of them reused", "output: 12 tokens", "--max-tokens", "cache:", "reference", "fp8"]
    {
        assert!(stderr(&stats).contains(part), "{}", stderr(&stats));
    }
    fails(&run_args(&["--context", "4"]), &["6 tokens do not fit", "0 of 4"]);
    fails(&run_args(&["--context", "99999999"]), &["99999999", "65536"]);
    fails(&run_args(&["--numerics", "exact", "--kv", "fp8"]), &["exact has no fp8 cache"]);
    let full = dsv4(&run_args(&["--context", "9", "--stats", "--ignore-eos"]));
    assert_eq!(full.status.code(), Some(0));
    assert!(stderr(&full).contains("context full"), "{}", stderr(&full));
}

#[test]
fn the_models_generation_config_gives_the_defaults() {
    let dir = copy_of_model();
    let config = dir.path().join("generation_config.json");
    let run = |more: &[&str]| {
        [&["run", text(dir.path()), "--prompt", "Once upon a time", "-n", "12"], more].concat().join("\n")
    };
    let call = |joined: String| dsv4(&joined.split('\n').collect::<Vec<_>>());
    fs::write(&config, r#"{"do_sample": false, "temperature": 0.7}"#).unwrap();
    let greedy = ok(&run_args(&["--greedy"]));
    assert_eq!(stdout(&call(run(&[]))), greedy);
    assert_ne!(stdout(&call(run(&["--temperature", "1"]))), greedy, "an explicit temperature asks for sampling");
    for (content, part) in [
        ("{", "not valid JSON"),
        (r#"{"temperature": "warm"}"#, "temperature is \"warm\""),
        (r#"{"top_p": 7}"#, "top_p is 7"),
    ] {
        fs::write(&config, content).unwrap();
        let output = call(run(&[]));
        assert_eq!(output.status.code(), Some(1));
        assert!(
            stderr(&output).contains(part) && stderr(&output).contains("generation_config.json"),
            "{}",
            stderr(&output)
        );
    }
    fs::remove_file(&config).unwrap();
    assert_eq!(stdout(&call(run(&[]))), ok(&run_args(&["--temperature", "1"])), "without the file");
}

// ---- chat

#[test]
fn a_piped_chat_answers_each_line_and_feeds_only_what_is_new() {
    let args = ["chat", MODEL, "--greedy", "-n", "24", "--stats", "--system", "Be brief."];
    let output = with_input(&args, b"Hello!\n\nWhat is your name?\n/reset\nHello!\n/quit\nnot read\n");
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let answers: Vec<&str> = stdout(&output).lines().filter(|line| !line.is_empty()).collect();
    assert!(answers.len() >= 3, "{answers:?}");
    let turns: Vec<&str> = stderr(&output).lines().filter(|line| line.contains("known")).collect();
    assert_eq!(turns.len(), 3, "{}", stderr(&output));
    assert!(turns[0].starts_with("(0 tokens known"), "{turns:?}");
    assert!(!turns[1].starts_with("(0 tokens known"), "the second turn goes on: {turns:?}");
    assert_eq!(turns[2], turns[0], "a reset chat begins anew");
    assert_eq!(with_input(&args, b"Hello!\n\nWhat is your name?\n/reset\nHello!\n").stdout, output.stdout);
}

/// Pitfall 46: the model chooses tokens that the tokenizer would not make of the text.
#[test]
fn a_chat_finds_all_of_its_sampled_tokens_again() {
    for seed in ["1", "2", "3", "5"] {
        let args = ["chat", MODEL, "--temperature", "1.3", "--seed", seed, "-n", "60", "--stats"];
        let output = with_input(&args, b"Once upon a time there was a dog.\nAnd then?\nAnd then?\nAnd then?\n");
        let mut held = "0".to_owned();
        let turns = stderr(&output).lines().filter(|line| line.contains("tokens known"));
        for turn in turns {
            assert!(turn.starts_with(&format!("({held} tokens known")), "seed {seed}: {}", stderr(&output));
            held = turn.split(' ').rev().nth(3).unwrap().to_owned();
        }
        assert_ne!(held, "0", "seed {seed}: {}", stderr(&output));
    }
}

#[test]
fn a_full_context_is_a_message_and_the_chat_goes_on() {
    let args = ["chat", MODEL, "--greedy", "--context", "24"];
    let long =
        "This line is a good deal longer than the context that was asked for, so it cannot be fed at all. ".repeat(2);
    let output = with_input(&args, format!("{long}\nHello!\n/what\n").as_bytes());
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert!(stderr(&output).contains("the context holds 24"), "{}", stderr(&output));
    assert!(stderr(&output).contains("/what: not known"), "{}", stderr(&output));
    assert!(!stdout(&output).trim().is_empty(), "the short line is answered");
}

#[test]
fn reasoning_stands_between_its_markers_in_a_pipe() {
    let args = ["chat", MODEL, "--greedy", "-n", "16", "--thinking", "--effort", "max"];
    let output = with_input(&args, b"Hello!\n");
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert!(stdout(&output).starts_with("<think>"), "{}", stdout(&output));
    // an April checkpoint
    let output = with_input(&["chat", MODEL, "--thinking", "--effort", "low"], b"");
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("high and max"), "{}", stderr(&output));
}

#[test]
fn chat_refuses_bad_tools_and_bad_input() {
    let dir = tempfile::tempdir().unwrap();
    let tools = dir.path().join("tools.json");
    let function = r#"[{"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}]"#;
    fs::write(&tools, function).unwrap();
    let args = ["chat", MODEL, "--greedy", "-n", "4", "--tools", text(&tools)];
    assert_eq!(with_input(&args, b"Hello!\n").status.code(), Some(0));
    fs::write(&tools, "{]").unwrap();
    fails(&args, &["tools.json", "JSON"]);
    let output = with_input(&["chat", MODEL], b"\xff\xfe\n");
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("standard input: not UTF-8"), "{}", stderr(&output));
}

// ---- info and verify

#[test]
fn info_tells_layers_inventory_and_memory() {
    let printed = ok(&["info", MODEL]);
    for part in ["6: 2 window only, 2 c4a, 2 c128a", "0 0 (4 128)x2", "585 tensors", "routed experts", "one MTP block"]
    {
        assert!(printed.contains(part), "{printed} lacks {part}");
    }
    let info = json(&["info", MODEL, "--json", "--context", "512"]);
    assert_eq!(info["model"]["layers"]["pattern"], serde_json::json!([0, 0, 4, 128, 4, 128]));
    assert_eq!(info["checkpoint"]["tensors"], 585);
    let categories = info["checkpoint"]["by_category"].as_array().unwrap();
    let sum: u64 = categories.iter().map(|c| c["bytes"].as_u64().unwrap()).sum();
    assert_eq!(info["checkpoint"]["bytes"], sum);
    assert_eq!(info["checkpoint"]["shards"].as_array().unwrap().len(), 3);
    // 584 bytes a row: two c4a layers with 64, two c128a layers with 2 a block; 68 bytes a key, two layers with 64
    assert_eq!(info["memory"]["cache"]["pages"], 2 * (2 * 64 * 584 + 2 * 2 * 584 + 2 * 64 * 68));
    assert_eq!(info["memory"]["cache"]["window"], 6 * 128 * 584);
    assert!(info["devices"]["cuda"].is_array());
    assert_eq!(info["tokenizer"]["vocab_size"], 3712);
}

#[test]
fn info_reads_a_bare_config_too() {
    let config = model_file("config.json");
    let info = json(&["info", &config, "--json", "--kv", "bf16"]);
    assert_eq!(info["checkpoint"], Value::Null);
    assert_eq!(info["memory"]["row_bytes"], 1024);
    assert!(ok(&["info", &config]).contains("only a config.json was given"));
    fails(&["info", &model_file("eval.txt")], &["eval.txt"]);
}

#[test]
fn a_whole_checkpoint_passes_verification() {
    assert!(ok(&["verify", MODEL]).starts_with("ok: 585 tensors in 3 shards"));
    assert!(ok(&["verify", MODEL, "--scan"]).contains("all bytes read"));
}

/// Lines that `verify` prints for a damaged folder.
fn findings(dir: &Path, more: &[&str]) -> Vec<String> {
    let output = dsv4(&[&["verify", text(dir)], more].concat());
    assert_eq!(output.status.code(), Some(1), "{}", stdout(&output));
    let mut lines: Vec<String> = stdout(&output).lines().map(str::to_owned).collect();
    let count = lines.pop().unwrap();
    assert_eq!(count.split(' ').next().unwrap(), lines.len().to_string(), "{count} after {lines:?}");
    lines
}

fn shard(dir: &Path, n: usize) -> PathBuf {
    dir.join(format!("model-0000{n}-of-00003.safetensors"))
}

#[test]
fn verify_names_every_bad_shard_with_both_sizes() {
    let dir = copy_of_model();
    let size = fs::metadata(shard(dir.path(), 1)).unwrap().len();
    fs::OpenOptions::new().write(true).open(shard(dir.path(), 1)).unwrap().set_len(size - 100).unwrap();
    fs::remove_file(shard(dir.path(), 3)).unwrap();
    fs::write(dir.path().join("tokenizer.json"), "{}").unwrap();
    let found = findings(dir.path(), &[]);
    assert_eq!(found.len(), 3, "{found:?}");
    assert!(found[0].contains("model-00001") && found[0].contains(&size.to_string()), "{found:?}");
    assert!(found[0].contains(&(size - 100).to_string()), "{found:?}");
    assert!(found[1].contains("model-00003"), "{found:?}");
    assert!(found[2].contains("tokenizer.json"), "{found:?}");
}

#[test]
fn verify_compares_tensors_with_the_config_and_scans_their_values() {
    let dir = copy_of_model();
    let config = fs::read_to_string(model_file("config.json")).unwrap();
    let changed = config.replace("\"n_routed_experts\": 8", "\"n_routed_experts\": 9");
    assert_ne!(config, changed);
    fs::write(dir.path().join("config.json"), changed).unwrap();
    let found = findings(dir.path(), &[]);
    assert!(found.len() == 1 && found[0].contains("ffn."), "{found:?}");

    fs::write(dir.path().join("config.json"), config).unwrap();
    let path = (1..=3).map(|n| shard(dir.path(), n)).find(|path| span(path, "norm.weight").is_some()).unwrap();
    let range = span(&path, "norm.weight").unwrap();
    let mut bytes = fs::read(&path).unwrap();
    bytes[range].fill(0);
    fs::write(&path, bytes).unwrap();
    assert!(ok(&["verify", text(dir.path())]).starts_with("ok:"), "sizes and shapes are right");
    assert_eq!(findings(dir.path(), &["--scan"]), ["tensor norm.weight is all zeros"]);
}

/// Bytes of a tensor in a safetensors file.
fn span(path: &Path, name: &str) -> Option<std::ops::Range<usize>> {
    let bytes = fs::read(path).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
    let offset = |i: usize| Some(8 + length + header[name]["data_offsets"][i].as_u64()? as usize);
    Some(offset(0)?..offset(1)?)
}

// ---- eval, bench, trace

#[test]
fn eval_gives_the_published_perplexity() {
    let eval =
        json(&["eval", MODEL, "--text", &model_file("eval.txt"), "--limit", "1024", "--numerics", "exact", "--json"]);
    assert_eq!(eval["perplexity"]["predictions"], 1024);
    let perplexity = eval["perplexity"]["perplexity"].as_f64().unwrap();
    // EVALUATION.md has four decimals; its tolerance is 1e-4 in the loss
    assert!((perplexity.ln() - 25.0682f64.ln()).abs() < 1e-4, "{perplexity}");
}

#[test]
fn eval_asks_for_planted_keys() {
    let cases: Value = serde_json::from_str(&fs::read_to_string(model_file("recall.json")).unwrap()).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let few = dir.path().join("few.json");
    let mut wrong = cases[1].clone();
    wrong["answer"] = serde_json::json!([5, 5, 5]);
    fs::write(&few, serde_json::json!([cases[0], wrong]).to_string()).unwrap();
    let args = ["eval", MODEL, "--recall", text(&few), "--numerics", "exact"];
    assert_eq!(ok(&args), "recall at      64 tokens: 1/2\n");
    let filler = model_file("passages/1.txt");
    let planted = json(&["eval", MODEL, "--recall-distances", "64,300", "--filler", &filler, "--json", "--cases", "2"]);
    let right = planted["recall"].as_array().unwrap().iter().map(|r| r["right"].as_u64().unwrap()).sum::<u64>();
    assert!(right >= 3, "{planted}");
}

#[test]
fn eval_refuses_what_it_cannot_read() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("cases.json");
    for (content, part) in
        [("[]", "empty"), ("[1]", "recall cases"), ("[{\"distance\": 1}]", "prompt"), ("\u{0}", "line 1")]
    {
        fs::write(&file, content).unwrap();
        fails(&["eval", MODEL, "--recall", text(&file)], &["cases.json", part]);
    }
    fs::write(&file, "").unwrap();
    fails(&["eval", MODEL, "--text", text(&file)], &["at least 2 tokens"]);
    fails(&["eval", MODEL, "--recall-distances", "3"], &["distance is 3"]);
    let long = r#"[{"distance": 1, "prompt": [4000000], "answer": [1]}]"#;
    fs::write(&file, long).unwrap();
    fails(&["eval", MODEL, "--recall", text(&file)], &["4000000"]);
}

#[test]
fn bench_measures_sessions_that_decode_together_and_beside_a_prompt() {
    let arguments =
        ["bench", MODEL, "--sessions", "1,3", "--decode", "4", "--prefill", "20", "--repetitions", "2", "--json"];
    let rows = json(&arguments);
    let rows = rows.as_array().unwrap();
    let kinds: Vec<_> =
        rows.iter().map(|r| (r["sessions"].as_u64().unwrap(), r["reading"].as_u64().unwrap())).collect();
    assert_eq!(kinds, [(1, 0), (1, 20), (3, 0), (3, 20)]);
    for r in rows {
        let between = |key: &str| r["ms_between_tokens"][key].as_f64().unwrap();
        assert!(
            0.0 < between("median") && between("median") <= between("p99") && between("p99") <= between("max"),
            "{r}"
        );
        assert!(r["tokens_per_second"].as_f64().unwrap() > 0.0);
        assert_eq!(r["reader_tokens_per_second"].is_f64(), r["reading"] == 20, "{r}");
    }
}

/// The table of what sessions cost: the plan is kept to the byte, however many there are.
#[test]
fn bench_says_what_sessions_take_beside_the_plan_and_a_cache_in_one_piece() {
    let sessions = ["bench", MODEL, "--sessions", "1,2,5", "--context", "300", "--max-context", "16384"];
    let rest = ["--prefill", "0", "--decode", "3", "--repetitions", "1"];
    let rows = json(&[&sessions[..], &rest[..], &["--json"]].concat());
    let cache = |r: &Value, key: &str| r["cache_bytes"][key].as_u64().unwrap();
    let rows = rows.as_array().unwrap();
    let of_one = &rows[0];
    for (r, count) in rows.iter().zip([1, 2, 5]) {
        assert_eq!((r["sessions"].as_u64(), r["context"].as_u64()), (Some(count), Some(300)));
        for key in ["own", "planned", "contiguous"] {
            assert_eq!(cache(r, key), count * cache(of_one, key), "{key}: nothing is shared");
        }
        assert_eq!(cache(r, "own"), cache(r, "planned"));
        // a session also marks its prompt's end, with a state of its own
        assert!((cache(r, "planned")..2 * cache(r, "planned")).contains(&cache(r, "used")), "{r}");
        assert!(cache(r, "used") < cache(r, "contiguous"), "{r}");
        let a_step = r["tokens_per_step"].as_f64().unwrap();
        assert!(1.0 <= a_step && a_step <= count as f64, "{r}");
        assert!(r["ms_per_step"].as_f64().unwrap() > 0.0, "{r}");
    }
    let table = ok(&[&sessions[..], &rest[..]].concat());
    assert_eq!(table.lines().count(), 2 + 3, "{table}");
    fails(&["bench", MODEL, "--sessions", "1", "--max-context", "70000", "--prefill", "0"], &["70000", "65536"]);
    misused(&["bench", MODEL, "--max-context", "70000"], "--sessions");
}

#[test]
fn bench_measures_every_frontier_without_a_tokenizer() {
    let dir = copy_of_model();
    fs::remove_file(dir.path().join("tokenizer.json")).unwrap();
    let small =
        ["bench", text(dir.path()), "--prefill", "8,16", "--decode", "2", "--context", "0,20", "--repetitions", "2"];
    let bench = json(&[&small[..], &["--bandwidth", "--json", "--threads", "1"]].concat());
    let measurements = bench["measurements"].as_array().unwrap();
    let kinds: Vec<_> =
        measurements.iter().map(|m| (m["kind"].as_str().unwrap(), &m["context"], &m["tokens"])).collect();
    assert_eq!(kinds.len(), 6, "{kinds:?}");
    assert_eq!(kinds.iter().filter(|k| k.0 == "prefill").count(), 4);
    for m in measurements {
        let rate = |key: &str| m["tokens_per_second"][key].as_f64().unwrap();
        assert!(0.0 < rate("min") && rate("min") <= rate("median") && rate("median") <= rate("max"), "{m}");
        assert_eq!(m["seconds"].as_array().unwrap().len(), 2);
    }
    assert_eq!(bench["threads"], 1);
    let info = json(&["info", MODEL, "--json"]);
    assert_eq!(bench["bandwidth"]["bytes_per_token"], info["checkpoint"]["decode_bytes_per_token"]);
    assert!(bench["bandwidth"]["ratio"].as_f64().unwrap() > 0.0);
    let csv = ok(&[&small[..], &["--csv"]].concat());
    let columns: Vec<usize> = csv.lines().map(|line| line.split(',').count()).collect();
    assert_eq!(columns, [10; 7]);
    fails(&["bench", MODEL, "--context", "70000", "--prefill", "0"], &["70000", "65536"]);
}

#[test]
fn trace_writes_the_same_file_for_every_chunking() {
    let dir = tempfile::tempdir().unwrap();
    let ids = dir.path().join("ids.json");
    fs::write(&ids, "[0, 373, 2658, 265, 1667, 647, 1500, 1413, 313]").unwrap();
    let trace = |chunk: &str, name: &str| {
        let out = dir.path().join(name);
        ok(&["trace", MODEL, "--tokens", text(&ids), "--numerics", "exact", "--chunk", chunk, "--out", text(&out)]);
        fs::read(out).unwrap()
    };
    let whole = trace("256", "whole.safetensors");
    assert!(trace("2", "split.safetensors") == whole, "the chunking shows");
    let file = safetensors::SafeTensors::deserialize(&whole).unwrap();
    assert_eq!(file.tensor("logits").unwrap().shape(), [9, 3712]);
    for layer in 0..6 {
        assert_eq!(file.tensor(&format!("layers.{layer}.streams")).unwrap().shape(), [9, 4, 128]);
    }
    assert_eq!(file.len(), 7);
    let logits = file.tensor("logits").unwrap();
    let values = logits.data().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap()));
    assert!(values.clone().all(f32::is_finite) && values.clone().any(|v| v != 0.0));
    let left: Vec<_> = fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(left.len(), 3, "no temporary file stays: {left:?}");
}

#[test]
fn trace_refuses_bad_ids_and_leaves_no_file() {
    let dir = tempfile::tempdir().unwrap();
    let (ids, out) = (dir.path().join("ids.json"), dir.path().join("out.safetensors"));
    let args = ["trace", MODEL, "--tokens", text(&ids), "--out", text(&out)];
    for (content, part) in
        [("[0, 3712]", "3712"), ("[]", "empty"), ("[-1]", "ids.json"), ("{}", "ids.json"), ("[0", "ids.json")]
    {
        fs::write(&ids, content).unwrap();
        fails(&args, &[part]);
        assert!(!out.exists());
    }
    fs::write(&ids, "[0]").unwrap();
    fails(&["trace", MODEL, "--tokens", text(&ids), "--out", "/nowhere/at/all"], &["/nowhere/at"]);
}

// ---- session files and tiers

#[test]
fn a_story_goes_on_from_its_session_file_as_if_it_had_never_ended() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("tale.session");
    let session = ["--session", text(&file), "--greedy", "--ignore-eos", "--no-echo"];
    let whole = ok(&[&["run", MODEL, "--prompt", "Once upon a time", "-n", "20"], &session[2..]].concat());
    let first = ok(&[&["run", MODEL, "--prompt", "Once upon a time", "-n", "12"], &session[..]].concat());
    let second = ok(&[&["run", MODEL, "--prompt", "", "-n", "8"], &session[..]].concat());
    assert_eq!(format!("{}{second}", first.trim_end_matches('\n')), whole);

    let report = json(&["cache", "--json", "--verify", text(&file)]);
    assert_eq!((&report[0]["verified"], &report[0]["numerics"]), (&Value::from(true), &Value::from("reference")));
    assert_eq!(report[0]["pending_tokens"], 0);
    assert_eq!(report[0]["bytes"]["file"], fs::metadata(&file).unwrap().len());
    let human = ok(&["cache", text(&file)]);
    assert!(human.contains("tokens") && human.contains("fp8 cache"), "{human}");

    // another mode, and damage
    fails(&[&["run", MODEL, "--prompt", "a", "--numerics", "served"], &session[..]].concat(), &["numerics reference"]);
    let mut bytes = fs::read(&file).unwrap();
    // within what the last save wrote
    let at = bytes.len() - 1000;
    bytes[at] ^= 1;
    fs::write(&file, bytes).unwrap();
    let bad = dsv4(&["cache", "--verify", text(&file), text(&dir.path().join("none"))]);
    assert_eq!(bad.status.code(), Some(1));
    assert_eq!(stdout(&bad).lines().count(), 2, "{}", stdout(&bad));
    assert!(stdout(&bad).contains("checksum"), "{}", stdout(&bad));
    fails(&[&["run", MODEL, "--prompt", "a"], &session[..]].concat(), &["tale.session", "damaged"]);
}

#[test]
fn a_chat_goes_on_from_its_session_file_as_if_it_had_never_ended() {
    let dir = tempfile::tempdir().unwrap();
    for options in [&["--system", "Be brief."][..], &["--thinking"]] {
        let file = dir.path().join(options[0]);
        let all = [&["chat", MODEL, "--greedy", "-n", "24", "--stats"], options].concat();
        let session = [&all[..], &["--session", text(&file)]].concat();
        let chat = |args: &[&str], input: &[u8]| {
            let output = with_input(args, input);
            assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
            (stdout(&output).to_owned(), stderr(&output).to_owned())
        };
        let whole = chat(&all, b"Hello!\nWhat is your name?\nAnd mine?\n");
        let parts = [&b"Hello!\n"[..], b"What is your name?\n", b"And mine?\n"].map(|line| chat(&session, line));
        assert_eq!(parts.each_ref().map(|(answers, _)| answers.as_str()).concat(), whole.0, "{options:?}");
        assert!(parts[1].1.contains("(going on: 2 messages"), "{}", parts[1].1);
        assert!(parts[2].1.contains("(going on: 4 messages"), "{}", parts[2].1);
        let known = |turn: &str| turn.split(' ').next().unwrap()[1..].parse::<usize>().unwrap();
        let turns =
            |text: &str| text.lines().filter(|line| line.contains("tokens known")).map(known).next_back().unwrap();
        assert!(turns(&parts[2].1) >= turns(&whole.1), "{} {}", parts[2].1, whole.1);
    }
    let file = dir.path().join("--system");
    let session = ["chat", MODEL, "--greedy", "-n", "4", "--session", text(&file)];
    fails(&[&session[..], &["--system", "Be long."]].concat(), &["--system: begins otherwise", "system message"]);
    // reset and left: forgotten
    with_input(&[&session[..], &["--system", "Be brief."]].concat(), b"/reset\n");
    let output = with_input(&[&session[..], &["--system", "Be long."]].concat(), b"Hello!\n");
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    // no chat at all
    let tale = dir.path().join("tale");
    ok(&["run", MODEL, "--prompt", "Once", "-n", "4", "--greedy", "--session", text(&tale)]);
    fails(&["chat", MODEL, "--session", text(&tale)], &["tale: begins otherwise"]);
}

#[test]
fn a_session_that_could_not_be_saved_fails_before_the_model_is_opened() {
    let dir = tempfile::tempdir().unwrap();
    let run =
        |session: &Path| ["run", "/nowhere/model", "--prompt", "a", "--session", text(session)].map(str::to_owned);
    let refused = |session: &Path, why: &str| {
        let args = run(session);
        fails(&args.each_ref().map(String::as_str), &[text(session), why]);
    };
    refused(&dir.path().join("none/a.session"), "No such file");
    refused(&dir.path().join("x".repeat(300)), "too long");
    refused(dir.path(), "not a regular file");
    refused(Path::new("/dev/full"), "not a regular file");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "nothing is left");
    // a place that is good
    let args = run(&dir.path().join("a.session"));
    fails(&args.each_ref().map(String::as_str), &["/nowhere/model"]);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[cfg(unix)]
#[test]
fn an_interrupt_while_the_prompt_is_read_saves_its_complete_chunks() {
    let dir = tempfile::tempdir().unwrap();
    let (prompt, file) = (dir.path().join("prompt"), dir.path().join("a.session"));
    fs::write(&prompt, "The sea was calm and the little boat went on. ".repeat(2000)).unwrap();
    let args = ["run", MODEL, "-f", text(&prompt), "--session", text(&file), "--chunk", "16", "--threads", "1"];
    let child = spawn(&args);
    std::thread::sleep(std::time::Duration::from_millis(1500));
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{}", stderr(&output));
    assert!(stderr(&output).contains("interrupted: ") && stderr(&output).contains("a.session"), "{}", stderr(&output));
    let report = json(&["cache", "--json", "--verify", text(&file)]);
    let tokens = report[0]["tokens"].as_u64().unwrap();
    assert!(tokens > 0 && tokens.is_multiple_of(16), "{tokens} tokens");
    // and it goes on from there
    ok(&["run", MODEL, "--prompt", " The end", "-n", "1", "--session", text(&file)]);
}

#[test]
fn a_second_run_finds_the_prompt_in_the_disk_tier() {
    let dir = tempfile::tempdir().unwrap();
    let prompt = "The sea was calm and the little boat went on. ".repeat(80);
    let args = ["run", MODEL, "--prompt", &prompt, "-n", "4", "--no-echo", "--disk-tier", text(dir.path())];
    let first = ok(&args);
    let files = fs::read_dir(dir.path()).unwrap().count();
    assert!(files >= 2, "{files} files");
    let again = dsv4(&[&args[..], &["--stats"]].concat());
    assert_eq!(stdout(&again), first);
    let reused = stderr(&again).split_once(" of them reused").unwrap().0.rsplit(' ').next().unwrap();
    assert!(reused.parse::<usize>().unwrap() >= 256, "{}", stderr(&again));
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), files);
    for entry in fs::read_dir(dir.path()).unwrap() {
        let file = entry.unwrap().path();
        let report = json(&["cache", "--json", "--verify", text(&file)]);
        let name = format!("{}.{}", report[0]["key"].as_str().unwrap(), report[0]["tier"].as_str().unwrap());
        assert_eq!(file.file_name().unwrap().to_str(), Some(&*name));
        assert!(report[0]["tokens"].as_u64().unwrap() >= 256, "{report}");
        let human = ok(&["cache", text(&file)]);
        assert!(human.contains("of a disk tier") && human.contains("reference, fp8 cache"), "{human}");
        let mut bytes = fs::read(&file).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        fs::write(&file, bytes).unwrap();
        let bad = dsv4(&["cache", "--verify", text(&file)]);
        assert!(bad.status.code() == Some(1) && stdout(&bad).contains("checksum"), "{}", stdout(&bad));
    }
}
