//! One object of each kind and valid arguments for every parameter of the header, so that any function can be called.

use std::ffi::{CStr, CString, c_char};
use std::path::{Path, PathBuf};
use std::slice;
use std::sync::{Arc, LazyLock};

use dsv4::Model;
use dsv4::ffi::testing::model_handle;
use tempfile::TempDir;

use super::functions::address;
use super::signatures::{Parameter, Signature};

/// Elements of every buffer; more than three rows of logits of the small model, and than the text of the metrics.
const CAPACITY: usize = 65_536;
/// Size of every struct: a newer caller's, with a tail that this library does not know.
const STRUCT_SIZE: usize = 512;
/// What outputs hold before a call.
const GARBAGE: u8 = 0xA5;
/// Tokens, bytes of text and so on that inputs have.
const INPUTS: usize = 3;

/// Objects by the name of their type, memory for outputs, and the error.
pub(crate) struct World {
    handles: Vec<(&'static str, usize)>,
    error: Box<Error>,
    /// Memory of the current call.
    memory: Vec<Vec<u64>>,
    path: CString,
    /// A session file in the folder.
    session_path: CString,
    _folder: TempDir,
}

/// `dsv4_error` as C sees it.
#[repr(C)]
struct Error {
    size: usize,
    code: i32,
    message: [c_char; 1000],
}

/// What a call returned and left in its outputs.
pub(crate) struct Outcome {
    /// For functions that return one.
    pub(crate) status: Option<i32>,
    /// The result register, for the others.
    pub(crate) value: usize,
    /// Whether every byte of every output is zero.
    pub(crate) outputs_are_zero: bool,
}

impl World {
    pub(crate) fn new() -> Self {
        static MODEL: LazyLock<Arc<Model>> =
            LazyLock::new(|| Model::open(model_path()).expect("the small model opens"));
        let path = CString::new(model_path().to_str().expect("a UTF-8 path")).expect("no NUL");
        let folder = tempfile::tempdir().expect("a temporary folder");
        let session_path = folder.path().join("a.session");
        let session_path = CString::new(session_path.to_str().expect("a UTF-8 path")).expect("no NUL");
        let error = Box::new(Error { size: 0, code: -1, message: [0x55; 1000] });
        let model = model_handle(Arc::clone(&MODEL)).expect("a handle");
        let handles = vec![("dsv4_model", model as usize)];
        let mut world = Self { handles, error, memory: Vec::new(), path, session_path, _folder: folder };
        let signatures = Signature::all();
        for (kind, maker) in [
            ("dsv4_engine", "dsv4_engine_new"),
            ("dsv4_session", "dsv4_session_new"),
            // which takes that session
            ("dsv4_request", "dsv4_session_submit_feed"),
            ("dsv4_session", "dsv4_session_new"),
            ("dsv4_sampler", "dsv4_sampler_new"),
            ("", "dsv4_session_feed"),
            ("", "dsv4_session_save"),
            ("dsv4_generation", "dsv4_generation_new"),
            ("dsv4_detokenizer", "dsv4_detokenizer_new"),
            ("dsv4_prompt", "dsv4_chat_render"),
            ("dsv4_chat_parser", "dsv4_chat_parser_new"),
        ] {
            let signature = signatures.iter().find(|s| s.name == maker).expect("it is in the header");
            let (outcome, object) = world.run(signature, None);
            assert_eq!(outcome.status, Some(0), "{maker}: {}", world.message());
            world.handles.splice(0..0, object.map(|object| (kind, object)));
        }
        world
    }

    /// Calls a function with valid arguments, but for number `null`, which is NULL.
    pub(crate) fn call(&mut self, signature: &Signature, null: Option<usize>) -> Outcome {
        let (outcome, object) = self.run(signature, null);
        // what a constructor gave is freed at once; the world has its own
        if let (Some(object), Some(out)) = (object, signature.parameters.iter().find(|p| p.name == "out")) {
            free(out.kind.trim_end_matches(" **"), object);
        }
        if signature.name.ends_with("_free") && null.is_none() {
            let kind = signature.name.trim_end_matches("_free");
            self.handles.retain(|(known, _)| *known != kind);
        }
        outcome
    }

    /// The message of the last call.
    pub(crate) fn message(&self) -> String {
        // SAFETY: the library ends every message with a NUL.
        unsafe { CStr::from_ptr(self.error.message.as_ptr()) }.to_str().expect("messages are UTF-8").to_owned()
    }

    /// The code in the error of the last call.
    pub(crate) fn code(&self) -> i32 {
        assert_eq!(self.error.size, 0, "the size is the caller's and is never written");
        self.error.code
    }

    /// Also returns what `out` received.
    fn run(&mut self, signature: &Signature, null: Option<usize>) -> (Outcome, Option<usize>) {
        type Any = unsafe extern "C" fn(usize, usize, usize, usize, usize, usize, usize, usize) -> usize;
        self.memory.clear();
        self.error.code = -1;
        let mut arguments = [0usize; 8];
        let mut outputs = Vec::new();
        let mut out = None;
        for (i, parameter) in signature.parameters.iter().enumerate().filter(|&(i, _)| null != Some(i)) {
            assert!(!["float", "double"].contains(&parameter.kind.as_str()), "floats would travel in other registers");
            if let Some(output) = self.output(parameter) {
                arguments[i] = output.address;
                out = (parameter.name == "out").then_some(output.address).or(out);
                outputs.push(output);
            } else {
                arguments[i] = self.input(signature, parameter);
            }
        }
        let [a, b, c, d, e, f, g, h] = arguments;
        // SAFETY: on the 64-bit ABIs that this runs on, integers and pointers travel in the same places whatever their
        // width, a callee ignores arguments that it does not have, and no function takes or returns a float.
        let function = unsafe { std::mem::transmute::<*const (), Any>(address(&signature.name)) };
        // SAFETY: the arguments are valid by construction.
        let value = unsafe { function(a, b, c, d, e, f, g, h) };
        let outputs_are_zero = outputs.iter().all(Output::is_zero);
        // SAFETY: `out` is a cell in `self.memory`.
        let object = out.map(|cell| unsafe { *(cell as *const usize) }).filter(|object| *object != 0);
        let status = (signature.result == "dsv4_status").then_some(value as u32 as i32);
        (Outcome { status, value, outputs_are_zero }, object)
    }

    /// Memory for an output; `None` if the parameter is an input.
    fn output(&mut self, parameter: &Parameter) -> Option<Output> {
        let pointee = parameter.kind.strip_suffix('*')?.trim_end();
        let is_cell = pointee.ends_with('*');
        let is_input = pointee.starts_with("const ") || is_object(pointee) || ["dsv4_error", "void"].contains(&pointee);
        if is_input && !is_cell {
            return None;
        }
        let (zero_from, zero_to) = match pointee {
            _ if is_cell => (0, size_of::<usize>()),
            "size_t" => (0, size_of::<usize>()),
            "uint32_t" if parameter.name == "tokens" => (0, CAPACITY * size_of::<u32>()),
            "float" => (0, CAPACITY * size_of::<f32>()),
            "char" => (0, CAPACITY),
            "uint32_t" | "int32_t" => (0, size_of::<u32>()),
            // filled by an init function, which cannot fail
            _ if pointee.ends_with("_options") => (0, 0),
            _ => (size_of::<usize>(), STRUCT_SIZE),
        };
        let address = self.block(zero_to.max(STRUCT_SIZE), GARBAGE);
        if zero_from > 0 {
            // SAFETY: a block of ours, aligned for any field.
            unsafe { *(address as *mut usize) = STRUCT_SIZE };
        }
        Some(Output { address, zero_from, zero_to })
    }

    fn input(&mut self, signature: &Signature, parameter: &Parameter) -> usize {
        let Parameter { kind, name } = parameter;
        let base = kind.trim_start_matches("const ").trim_end_matches([' ', '*']);
        if is_object(base) {
            let found = self.handles.iter().find(|(known, _)| *known == base);
            return found.unwrap_or_else(|| panic!("teach tests/ffi/world.rs to make a {base}")).1;
        }
        if base.ends_with("_options") {
            return self.options(base);
        }
        let is_marker = signature.name == "dsv4_tokenizer_token_id";
        match (kind.as_str(), name.as_str()) {
            ("dsv4_error *", "err") => &raw mut *self.error as usize,
            ("const char *", "path") if signature.name.starts_with("dsv4_session_") => {
                self.session_path.as_ptr() as usize
            }
            ("const char *", "path") => self.path.as_ptr() as usize,
            ("const char *", "messages") => MESSAGES.as_ptr() as usize,
            ("size_t", "messages_len") => MESSAGES.len(),
            ("const char *", "text") if is_marker => MARKER.as_ptr() as usize,
            ("size_t", "text_len") if is_marker => MARKER.len(),
            ("const char *", "text") => c"abc".as_ptr() as usize,
            ("size_t", "text_len" | "n_tokens") => INPUTS,
            ("const uint32_t *", "tokens") => TOKENS.as_ptr() as usize,
            ("const float *", "logits") => LOGITS.as_ptr() as usize,
            ("size_t", "n") => LOGITS.len(),
            ("size_t", "capacity") => CAPACITY,
            ("size_t", "size") => STRUCT_SIZE,
            ("uint32_t", "token") => 5,
            ("uint32_t", "header_version") => 1 << 8,
            ("size_t", "index")
            | ("uint64_t", "context" | "position" | "timeout_ms")
            | ("int32_t", "complete" | "markup" | "thinking" | "level" | "status")
            | ("void *", "userdata") => 0,
            ("dsv4_progress_callback", _) => on_progress as *const () as usize,
            ("dsv4_file_progress_callback", _) => on_file_progress as *const () as usize,
            ("dsv4_piece_callback", _) => on_piece as *const () as usize,
            ("dsv4_log_callback", _) => on_log as *const () as usize,
            _ => panic!("{}: teach tests/ffi/world.rs a valid `{kind} {name}`", signature.name),
        }
    }

    fn options(&mut self, kind: &str) -> usize {
        type Init = unsafe extern "C" fn(usize, usize);
        let block = self.block(STRUCT_SIZE, GARBAGE);
        // SAFETY: the init functions have this signature.
        let init = unsafe { std::mem::transmute::<*const (), Init>(address(&format!("{kind}_init_sized"))) };
        // SAFETY: the block has that size.
        unsafe { init(block, STRUCT_SIZE) };
        // the fields that are set have their low half here on little-endian machines
        let field = |offset: usize| (block + offset) as *mut u32;
        match kind {
            // SAFETY: `max_tokens`, within the block.
            "dsv4_generation_options" => unsafe { *field(8) = 2 },
            // SAFETY: `context`, within the block; so short that a generation without options ends soon.
            "dsv4_session_options" => unsafe { *field(8) = 24 },
            // SAFETY: `threads`, within the block.
            "dsv4_engine_options" => unsafe { *field(24) = 1 },
            _ => {}
        }
        block
    }

    fn block(&mut self, bytes: usize, fill: u8) -> usize {
        self.memory.push(vec![u64::from_ne_bytes([fill; 8]); bytes.div_ceil(8)]);
        self.memory.last_mut().expect("just pushed").as_mut_ptr() as usize
    }
}

impl Drop for World {
    fn drop(&mut self) {
        for (kind, object) in self.handles.drain(..) {
            free(kind, object);
        }
    }
}

/// Memory of one output, and the part that must be zero after a failure.
struct Output {
    address: usize,
    zero_from: usize,
    zero_to: usize,
}

impl Output {
    fn is_zero(&self) -> bool {
        let len = self.zero_to - self.zero_from;
        // SAFETY: the output lies in the memory of the current call.
        let bytes = unsafe { slice::from_raw_parts((self.address + self.zero_from) as *const u8, len) };
        bytes.iter().all(|&byte| byte == 0)
    }
}

fn free(kind: &str, object: usize) {
    type Free = unsafe extern "C" fn(usize);
    // SAFETY: every `_free` has this signature.
    let free = unsafe { std::mem::transmute::<*const (), Free>(address(&format!("{kind}_free"))) };
    // SAFETY: the object is of that kind and not used any more.
    unsafe { free(object) };
}

/// Whether a type is an opaque object, by the header's names.
pub(crate) fn is_object(base: &str) -> bool {
    let ends =
        ["_options", "_info", "_stats", "_metrics", "_error", "_piece", "_event", "_plan", "_callback", "_status"];
    base.starts_with("dsv4_") && !base.ends_with('*') && !ends.iter().any(|end| base.ends_with(end))
}

const MESSAGES: &str = r#"[{"role": "user", "content": "Hi"}]"#;
const MARKER: &str = "<think>";
static TOKENS: [u32; INPUTS] = [7, 8, 9];

/// Logits as sampling wants them: one likely token.
static LOGITS: LazyLock<Vec<f32>> = LazyLock::new(|| (0..64).map(|i| if i == 9 { 5.0 } else { 0.0 }).collect());

fn model_path() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/models/tiny-v4")
}

extern "C" fn on_progress(_: usize, _: usize, _: usize) -> i32 {
    0
}

extern "C" fn on_file_progress(_: usize, _: i32, _: u64, _: u64) -> i32 {
    0
}

extern "C" fn on_piece(_: usize, _: usize) -> i32 {
    0
}

extern "C" fn on_log(_: usize, _: i32, _: usize) {}
