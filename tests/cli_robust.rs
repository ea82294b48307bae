//! The built `dsv4` command against files and numbers that somebody chose to break it with: nothing but an older result is
//! ever written over, nothing hangs, and whatever is refused is refused in words.

#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "a failed call is a failed test")]

use std::fs;
use std::io::Write;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/models/tiny-v4");

fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_dsv4"));
    command.args(args).stdin(Stdio::null());
    command
}

fn dsv4(args: &[&str]) -> Output {
    command(args).output().unwrap()
}

fn stdout(output: &Output) -> &str {
    std::str::from_utf8(&output.stdout).unwrap()
}

fn stderr(output: &Output) -> &str {
    std::str::from_utf8(&output.stderr).unwrap()
}

#[track_caller]
fn ok(args: &[&str]) -> String {
    let output = dsv4(args);
    assert_eq!(output.status.code(), Some(0), "{args:?}: {}", stderr(&output));
    stdout(&output).to_owned()
}

/// The call ends with `code` and a message on standard error that has all `parts` and is not long.
#[track_caller]
fn ends(args: &[&str], code: i32, parts: &[&str]) {
    let output = dsv4(args);
    let message = stderr(&output);
    assert_eq!(output.status.code(), Some(code), "{args:?}: {message}");
    assert!(parts.iter().all(|part| message.contains(part)), "{message} lacks one of {parts:?}");
    assert!(message.len() < 2000, "{} bytes of message", message.len());
}

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

fn mkfifo(path: &Path) {
    assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
}

/// Lines that `verify` prints for a damaged folder.
fn findings(dir: &Path) -> Vec<String> {
    let output = dsv4(&["verify", text(dir)]);
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    stdout(&output).lines().map(str::to_owned).collect()
}

fn edit(path: &Path, change: impl FnOnce(&mut Value)) {
    let mut json = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    change(&mut json);
    fs::write(path, serde_json::to_vec(&json).unwrap()).unwrap();
}

// ---- outputs

/// A folder with `ids.json`, for `trace`.
struct Traces {
    dir: tempfile::TempDir,
    ids: PathBuf,
}

impl Traces {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let ids = dir.path().join("ids.json");
        fs::write(&ids, "[0, 5]").unwrap();
        Self { dir, ids }
    }

    fn at(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn args<'a>(&'a self, model: &'a str, out: &'a Path) -> [&'a str; 6] {
        ["trace", model, "--tokens", text(&self.ids), "--out", text(out)]
    }

    fn whole(&self) -> Vec<u8> {
        let out = self.at("whole");
        ok(&self.args(MODEL, &out));
        fs::read(out).unwrap()
    }

    /// No temporary file is left.
    fn is_tidy(&self) {
        let names = fs::read_dir(self.dir.path()).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
        let left: Vec<String> = names.filter(|name| name.contains("tmp")).collect();
        assert!(left.is_empty(), "{left:?}");
    }
}

#[test]
fn an_output_is_a_whole_safetensors_file() {
    let whole = Traces::new().whole();
    let header = u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    assert_eq!(header % 8, 0);
    let tensors = safetensors::SafeTensors::deserialize(&whole).unwrap();
    assert_eq!(tensors.tensor("logits").unwrap().shape()[0], 2);
    assert!(tensors.tensor("layers.0.streams").unwrap().data().len() > 1000);
}

#[test]
fn what_is_no_regular_file_is_written_through_and_stays_what_it_is() {
    let t = Traces::new();
    let whole = t.whole();
    let pipe = t.at("pipe");
    mkfifo(&pipe);
    let child = command(&t.args(MODEL, &pipe)).spawn().unwrap();
    assert!(fs::read(&pipe).unwrap() == whole, "the pipe carried the file");
    assert!(child.wait_with_output().unwrap().status.success());
    assert!(fs::metadata(&pipe).unwrap().file_type().is_fifo());

    let output = dsv4(&["trace", MODEL, "--tokens", text(&t.ids), "--out", "-"]);
    assert!(output.status.success() && output.stdout == whole, "- is standard output");
    assert!(!Path::new("-").exists());

    // a symbolic link is followed, to a file that is there and to one that is not
    for (link, target) in [("link", "target"), ("link2", "new")] {
        symlink(t.at(target), t.at(link)).unwrap();
    }
    fs::write(t.at("target"), "older").unwrap();
    for (link, target) in [("link", "target"), ("link2", "new")] {
        ok(&t.args(MODEL, &t.at(link)));
        assert!(fs::symlink_metadata(t.at(link)).unwrap().is_symlink());
        assert!(fs::read(t.at(target)).unwrap() == whole);
    }
    t.is_tidy();
}

#[test]
fn an_output_never_replaces_an_input_the_model_or_what_is_protected() {
    let t = Traces::new();
    let model = copy_of_model();
    let shard = model.path().join("model-00001-of-00003.safetensors");
    let before = fs::read(&shard).unwrap();
    symlink(&shard, t.at("to-shard")).unwrap();
    fs::hard_link(&t.ids, t.at("same-ids")).unwrap();
    symlink(t.at("round"), t.at("round")).unwrap();
    fs::write(t.at("protected"), "mine").unwrap();
    fs::set_permissions(t.at("protected"), fs::Permissions::from_mode(0o444)).unwrap();
    let nowhere = t.at("nowhere/x");
    for (out, why) in [
        (shard.as_path(), "inside the model's folder"),
        (&t.at("to-shard"), "the model"),
        (&model.path().join("new.safetensors"), "inside the model's folder"),
        (&t.ids, "the command reads it"),
        (&t.at("same-ids"), "the command reads it"),
        (&t.at("protected"), "read-only"),
        (&t.at("round"), "symbolic links"),
        (t.dir.path(), "a folder"),
        (&nowhere, "nowhere: No such file or directory"),
        (Path::new(".."), "not a file name"),
    ] {
        ends(&t.args(text(model.path()), out), 1, &[why]);
    }
    assert!(fs::read(&shard).unwrap() == before);
    assert_eq!(fs::read(&t.ids).unwrap(), b"[0, 5]");
    assert_eq!(fs::read(t.at("protected")).unwrap(), b"mine");
    t.is_tidy();
}

#[test]
fn a_shard_that_the_model_links_to_is_not_an_output() {
    let t = Traces::new();
    let model = copy_of_model();
    let (shard, blob) = (model.path().join("model-00001-of-00003.safetensors"), t.at("blob"));
    fs::copy(&shard, &blob).unwrap();
    fs::remove_file(&shard).unwrap();
    symlink(&blob, &shard).unwrap();
    let before = fs::read(&blob).unwrap();
    ends(&t.args(text(model.path()), &blob), 1, &["a file of the model"]);
    assert!(fs::read(&blob).unwrap() == before);
}

#[test]
fn a_new_output_has_the_mode_of_new_files_and_an_old_one_keeps_its_own() {
    let t = Traces::new();
    let script = r#"umask 027; exec "$@""#;
    let out = t.at("out");
    let run = |out: &Path| {
        let mut sh = Command::new("sh");
        sh.args(["-c", script, "sh", env!("CARGO_BIN_EXE_dsv4")]).args(t.args(MODEL, out));
        assert!(sh.output().unwrap().status.success());
        fs::metadata(out).unwrap().mode() & 0o777
    };
    assert_eq!(run(&out), 0o640);
    fs::set_permissions(&out, fs::Permissions::from_mode(0o604)).unwrap();
    assert_eq!(run(&out), 0o604);
    // the longest name there can be
    assert_eq!(run(&t.at(&"n".repeat(255))), 0o640);
}

// ---- inputs

#[test]
fn a_file_of_a_model_that_is_a_pipe_or_too_long_is_refused_at_once() {
    for name in ["config.json", "generation_config.json", "tokenizer.json", "model.safetensors.index.json"] {
        let dir = copy_of_model();
        let path = dir.path().join(name);
        fs::remove_file(&path).unwrap_or_default();
        mkfifo(&path);
        let start = Instant::now();
        ends(&["run", text(dir.path()), "--prompt", "a"], 1, &[name, "not a regular file"]);
        assert!(findings(dir.path()).iter().any(|f| f.contains(name) && f.contains("not a regular file")));
        fs::remove_file(&path).unwrap();
        fs::File::create(&path).unwrap().set_len(1 << 41).unwrap();
        ends(&["run", text(dir.path()), "--prompt", "a"], 1, &[name, "bytes accepted", "2199023255552"]);
        assert!(start.elapsed() < Duration::from_secs(20));
    }
}

#[test]
fn lists_for_the_command_are_regular_files_of_bounded_size() {
    let dir = tempfile::tempdir().unwrap();
    let pipe = dir.path().join("pipe");
    mkfifo(&pipe);
    ends(&["trace", MODEL, "--tokens", text(&pipe), "--out", text(&dir.path().join("o"))], 1, &["not a regular file"]);
    ends(&["eval", MODEL, "--recall", text(&pipe)], 1, &["not a regular file"]);
    let sparse = dir.path().join("sparse");
    fs::File::create(&sparse).unwrap().set_len(1 << 41).unwrap();
    for args in [
        ["eval", MODEL, "--text", text(&sparse)],
        ["eval", MODEL, "--recall", text(&sparse)],
        ["run", MODEL, "-f", text(&sparse)],
    ] {
        ends(&args, 1, &["bytes accepted of a"]);
    }
}

#[test]
fn a_prompt_may_come_through_a_pipe() {
    let dir = tempfile::tempdir().unwrap();
    let pipe = dir.path().join("pipe");
    mkfifo(&pipe);
    let prompt = "Once upon a time";
    let direct = ok(&["run", MODEL, "--prompt", prompt, "-n", "8", "--greedy"]);
    let through = |path: &str, stdin: Stdio| {
        let mut child = command(&["run", MODEL, "-f", path, "-n", "8", "--greedy"]);
        child.stdin(stdin).stdout(Stdio::piped()).spawn().unwrap()
    };
    let child = through(text(&pipe), Stdio::null());
    fs::write(&pipe, prompt).unwrap();
    assert_eq!(stdout(&child.wait_with_output().unwrap()), direct);
    for path in ["-", "/dev/stdin"] {
        let mut child = through(path, Stdio::piped());
        child.stdin.take().unwrap().write_all(prompt.as_bytes()).unwrap();
        assert_eq!(stdout(&child.wait_with_output().unwrap()), direct, "{path}");
    }
}

#[test]
fn a_prompt_that_cannot_fit_is_refused_before_it_is_encoded() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("long");
    fs::write(&path, "a".repeat(10_000_000)).unwrap();
    ends(
        &["run", MODEL, "-f", text(&path), "--context", "1000"],
        1,
        &["10000000 bytes has at least", "the context holds 1000"],
    );
}

#[test]
fn generation_config_is_read_strictly() {
    for (content, parts) in [
        ("[]", "[] is not a JSON object"),
        ("null", "null is not a JSON object"),
        (r#"{"do_sample": 5}"#, "do_sample is 5; it must be true or false"),
        (r#"{"temperature": "hot"}"#, "temperature is \"hot\"; it must be a number"),
        (r#"{"top_p": 7}"#, "top_p is 7"),
        ("{", "not valid JSON"),
    ] {
        let dir = copy_of_model();
        fs::write(dir.path().join("generation_config.json"), content).unwrap();
        ends(&["run", text(dir.path()), "--prompt", "a", "-n", "1"], 1, &["generation_config.json", parts]);
        assert!(findings(dir.path())[0].contains(parts), "{content}");
    }
}

// ---- verify finds what run dies of

#[test]
fn verify_compares_the_tokenizer_with_the_model() {
    let dir = copy_of_model();
    let path = dir.path().join("tokenizer.json");
    edit(&path, |json| {
        let added = json["added_tokens"].as_array_mut().unwrap();
        let mut more = added[0].clone();
        more["id"] = json!(5000);
        more["content"] = json!("<beyond>");
        added.push(more);
    });
    assert!(findings(dir.path())[0].contains("5001 ids, but the model's vocab_size is"));
    ends(&["run", text(dir.path()), "--prompt", "a"], 1, &["5001 ids"]);
}

#[test]
fn ids_without_a_token_give_no_text() {
    let dir = copy_of_model();
    let path = dir.path().join("tokenizer.json");
    // the last added tokens are gone, as where a checkpoint has rounded its vocabulary up
    edit(&path, |json| {
        let vocab = json["model"]["vocab"].as_object().unwrap();
        let ordinary = vocab.values().filter_map(Value::as_u64).max().unwrap();
        json["added_tokens"].as_array_mut().unwrap().retain(|t| t["id"].as_u64().unwrap() <= ordinary);
    });
    assert!(ok(&["verify", text(dir.path())]).starts_with("ok"));
    let model = dsv4::Model::open(dir.path()).unwrap();
    let (tokenizer, vocab) = (model.tokenizer().unwrap(), model.config().vocab_size as u32);
    assert!(tokenizer.vocab_size() < vocab as usize, "nothing was taken away");
    assert_eq!(tokenizer.decode(&[300, vocab - 1, 301]), tokenizer.decode(&[300, 301]));
    assert!(tokenizer.decode(&[vocab]).is_err());
    let mut parser = dsv4::chat::Parser::new(dsv4::chat::ThinkingMode::Chat);
    assert_eq!(parser.push_token(tokenizer, vocab - 1), Ok(Vec::new()));
    // uniform draws reach such ids soon
    ok(&["run", text(dir.path()), "--prompt", "a", "-n", "200", "--temperature", "1000000", "--ignore-eos"]);
}

/// Range of a tensor in a shard.
fn span(path: &Path, name: &str) -> Option<std::ops::Range<usize>> {
    let bytes = fs::read(path).unwrap();
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let json: Value = serde_json::from_slice(&bytes[8..8 + header]).unwrap();
    let offset = |i: usize| Some(8 + header + json[name]["data_offsets"][i].as_u64()? as usize);
    Some(offset(0)?..offset(1)?)
}

fn shards(dir: &Path) -> Vec<PathBuf> {
    let paths = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    paths.filter(|path| path.extension().is_some_and(|e| e == "safetensors")).collect()
}

#[test]
fn verify_reads_the_tables_of_experts() {
    let name = "layers.0.ffn.gate.tid2eid";
    for id in [-1i64, 8, 1 << 62] {
        let dir = copy_of_model();
        let path = shards(dir.path()).into_iter().find(|path| span(path, name).is_some()).unwrap();
        let mut bytes = fs::read(&path).unwrap();
        let end = span(&path, name).unwrap().end;
        bytes[end - 8..end].copy_from_slice(&id.to_le_bytes());
        fs::write(&path, bytes).unwrap();
        let found = findings(dir.path());
        assert!(found[0].contains(name) && found[0].contains(&format!("expert id {id}")), "{found:?}");
    }
}

#[test]
fn verify_finds_a_tensor_in_two_shards_and_a_wrong_total() {
    let dir = copy_of_model();
    let index = dir.path().join("model.safetensors.index.json");
    edit(&index, |json| json["metadata"]["total_size"] = json!(17));
    let found = findings(dir.path());
    assert!(found[0].contains("metadata.total_size is 17, but the tensors have"), "{found:?}");

    // a third of the tensors once more, in a shard that is there for one tensor of its own
    let dir = copy_of_model();
    let index = dir.path().join("model.safetensors.index.json");
    fs::copy(dir.path().join("model-00001-of-00003.safetensors"), dir.path().join("extra.safetensors")).unwrap();
    edit(&index, |json| {
        let map = json["weight_map"].as_object_mut().unwrap();
        let (_, file) = map.iter_mut().find(|(_, file)| **file == "model-00001-of-00003.safetensors").unwrap();
        *file = json!("extra.safetensors");
    });
    let found = findings(dir.path());
    let says = "is in model-00001-of-00003.safetensors, as the index says, and in extra.safetensors too";
    assert!(found[0].contains("tensor ") && found[0].contains(says), "{found:?}");
    assert!(found.iter().any(|f| f.contains("tensors more are in two shards")), "{found:?}");
    ok(&["run", text(dir.path()), "--prompt", "a", "-n", "1"]);
}

// ---- numbers

#[test]
fn lengths_beyond_the_context_are_refused_before_memory_is_taken() {
    for n in ["18446744073709551615", "4611686018427387904", "4000000000"] {
        ends(&["eval", MODEL, "--recall-distances", n], 1, &["--recall-distances", n, "of the context"]);
        ends(&["bench", MODEL, "--prefill", n], 1, &["--prefill", n, "max_position_embeddings"]);
        ends(&["bench", MODEL, "--decode", n], 1, &["--decode", n, "max_position_embeddings"]);
        ends(&["bench", MODEL, "--context", n], 1, &["--context", n, "max_position_embeddings"]);
        ends(&["info", MODEL, "--context", n], 1, &["context is", n, "max_position_embeddings"]);
        ends(&["run", MODEL, "--prompt", "a", "--context", n], 1, &["context is", n, "max_position_embeddings"]);
    }
}

#[test]
fn what_is_no_number_is_refused_in_words() {
    for (args, option) in [
        (vec!["run", MODEL, "--prompt", "a", "--top-k=-1"], "--top-k"),
        (vec!["run", MODEL, "--prompt", "a", "--max-tokens=-1"], "--max-tokens"),
        (vec!["run", MODEL, "--prompt", "a", "--threads=x"], "--threads"),
        (vec!["chat", MODEL, "--seed=-5"], "--seed"),
        (vec!["info", MODEL, "--context=1.5"], "--context"),
        (vec!["bench", MODEL, "--prefill=1,-2"], "--prefill"),
        (vec!["bench", MODEL, "--repetitions=-2"], "--repetitions"),
        (vec!["eval", MODEL, "--recall-distances=-2"], "--recall-distances"),
    ] {
        ends(&args, 2, &[option, "it must be a whole number from"]);
    }
    ends(&["run", MODEL, "--prompt", "a", "--top-k", "4294967296"], 2, &["larger than 4294967295"]);
    ends(&["run", MODEL, "--prompt", "a", "--temperature", "0"], 2, &["--greedy"]);
    ends(&["run", MODEL], 2, &["--prompt TEXT", "--prompt-file FILE"]);
    ends(&["bench", MODEL, "--prefill", "0", "--decode", "0"], 2, &["nothing to measure"]);
}

#[test]
fn a_model_that_is_a_file_is_named_as_such() {
    let file = format!("{MODEL}/config.json");
    for command in [&["run", &file, "--prompt", "a"][..], &["chat", &file], &["verify", &file], &["bench", &file]] {
        ends(command, 1, &["config.json: not a folder; a model is the folder with config.json"]);
    }
}

#[test]
fn a_generation_that_fills_the_context_says_so() {
    let args = ["run", MODEL, "--prompt", "Once upon a time", "--context", "20", "--ignore-eos"];
    ends(&args, 0, &["(the context of 20 tokens is full)"]);
}

#[test]
fn a_message_about_a_huge_value_is_short() {
    let dir = copy_of_model();
    edit(&dir.path().join("config.json"), |json| json["model_type"] = json!("x".repeat(1_000_000)));
    ends(&["run", text(dir.path()), "--prompt", "a"], 1, &["config.json"]);
    let dir = copy_of_model();
    let path = dir.path().join("model-00001-of-00003.safetensors");
    let header = format!(r#"{{"t":{{"dtype":"{}","shape":[],"data_offsets":[0,4]}}}}"#, "F".repeat(1_000_000));
    let bytes = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &[0; 4]].concat();
    fs::write(path, bytes).unwrap();
    ends(&["run", text(dir.path()), "--prompt", "a"], 1, &["tensor t has dtype FFF", "checkpoints do not use"]);
}

#[test]
fn the_first_interrupt_ends_a_measurement_inside_a_feed() {
    // how long a feed takes on this machine now; the one that is interrupted takes six times as long, in one chunk
    let args = ["bench", MODEL, "--prefill", "1000", "--repetitions", "1", "--decode", "0", "--json"];
    let measured: Value = serde_json::from_str(&ok(&args)).unwrap();
    let seconds = measured["measurements"][0]["seconds"][0].as_f64().unwrap();
    let args = ["bench", MODEL, "--prefill", "6000", "--chunk", "65536", "--decode", "0"];
    let child = command(&args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    std::thread::sleep(Duration::from_millis(1000));
    let start = Instant::now();
    // SAFETY: the child was not waited for, so the number is still its own.
    unsafe { libc::kill(child.id() as libc::pid_t, libc::SIGINT) };
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{}", stderr(&output));
    let elapsed = start.elapsed().as_secs_f64();
    assert!(elapsed < 3.0 * seconds + 1.0, "{elapsed:.1} s, where 1000 tokens take {seconds:.1} s");
}
