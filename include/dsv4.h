// dsv4: DeepSeek-V4 inside your own process
//
// Open an official checkpoint folder, make an engine on it, feed a session, generate. No daemon, no Python, no
// conversion, no second copy of the weights.
//
// ```c
// dsv4_error err = {0};
// dsv4_model *model; dsv4_engine *engine; dsv4_session *session; dsv4_sampler *sampler;
// if (dsv4_model_open("DeepSeek-V4-Flash", NULL, &model, &err)) { puts(err.message); return 1; }
// ```
//
// `bindings/c/README.md` is the guide and `examples/c/chat.c` a whole program. This header is the reference.
//
// INSTALL AND LINK
//
// `cmake -S bindings/c -B build && cmake --build build && cmake --install build --prefix P` installs this header, the
// shared and the static library, `dsv4.pc` and a CMake package. Then `pkg-config --cflags --libs dsv4`, or
// `find_package(dsv4)` with the targets `dsv4::dsv4` (shared) and `dsv4::static`. Link the installed tree, not
// `target/release`: programs look for the library under its soname, `libdsv4.so.0.1`, which is a link that the
// installation makes (`ln -s libdsv4.so target/release/libdsv4.so.0.1` is enough for a trial). The library
// needs libc, libm and `libgcc_s`, no CUDA and no C++ library; the NVIDIA driver is opened at run time where there is one.
// A program can link one static library that was written in Rust; where another one is linked already, take the shared
// library.
//
// CONVENTIONS
//
// Names are `dsv4_<object>_<verb>`. Arguments come in the order: the object, inputs, outputs, `err`. Text is UTF-8; with
// a length it may hold any character, without one it ends with a NUL. Counts are numbers of elements, sizes are bytes,
// tokens are `uint32_t` ids. Fields and parameters that hold a number of an enum have the type `int32_t` and are
// checked.
//
// Structs begin with `size`, so that old programs run with new libraries and the other way round. Fill options with
// their `dsv4_<object>_options_init`, which sets `size` and every default; NULL options are the defaults; fields that
// this library does not know must be zero. Set `size` of structs that a call fills:
// `dsv4_piece piece = {0}; piece.size = sizeof piece;`. The header needs C99 or C++11.
//
// ERRORS
//
// Every fallible function returns a `dsv4_status`, 0 for success, and writes code and message to `err`, its last
// parameter, which may be NULL everywhere. Outputs are written only on success and are zero after a failure; with
// `BUFFER_TOO_SMALL` the required length is written. A NULL that is not allowed is `INVALID_ARGUMENT` and named. Each
// function's "Errors:" lists what it returns besides `INVALID_ARGUMENT`, `POISONED` and `PANIC`.
//
// OWNERSHIP
//
// What a function gives through `out` belongs to the caller, who ends it with the `_free` of its type; `_free(NULL)` does
// nothing. Objects hold what they are made from: a model may be freed before its engine, an engine before its sessions.
// Everything else that a function points to belongs to an object and lives as long as the function says. Inputs are
// read during the call only.
//
// THREAD SAFETY
//
// A function that takes an object as `const` may run on several threads at once. One that takes it without `const` is for
// one thread at a time: a second one gets `BUSY` at once. `_free` needs an object that no other call uses. Callbacks run
// on the calling thread, except the log's. Signals may arrive at any time; calls go on. Programs that have no thread for
// each session submit calls as requests: see "Event loops".
//
// After `fork()` the parent goes on. In the child, engines, sessions, generations and requests that it inherited are of no
// use: every call with one returns `UNAVAILABLE` at once, and freeing it does nothing. Models may be used, also for engines of
// the child's own.
//
// PANICS
//
// The library never exits or aborts on purpose, installs no signal handler, and writes nothing to stdout or stderr. A
// defect that shows as a Rust panic is stopped: the call returns `PANIC` with place and text, the object it was called
// on is poisoned, from then on refuses every call with `POISONED`, and can be freed; other objects go on. In functions
// without a status the value after a panic is 0, NULL or the text that their description names. Programs that are
// themselves written in Rust keep their panic hook for their own panics.
//
// MEMORY
//
// Whatever grows with model, context, batch or file is reserved in a way that can fail, and a refusal is
// `OUT_OF_MEMORY` with the bytes asked for; the objects are as before the call. The parts that read JSON and encode text
// allocate without asking; for those the most that the input can take is asked for first and given back, so the bytes
// in the message can be far more than the text has. What remains are small allocations of fixed size inside the Rust
// standard library and other libraries, and what other threads take in between: if the system refuses one of those, the
// process aborts, as it does in most programs.
//
// MAPPED FILES
//
// Weights are mapped read-only. Sizes are checked when a model is opened and again with each step, and pages are brought in
// where they are used first, so that a disk error is an `IO`; a file that another process truncates within a step makes the
// system raise SIGBUS, as with any mapped file. Experts that are read because of `host_bytes` are not mapped: there a shorter
// file is a `CORRUPT` that names it. Replace checkpoints by renaming folders, never by writing into files that are in use.

// Generated from src/ffi; do not edit.

#ifndef DSV4_H
#define DSV4_H

#include <stddef.h>
#include <stdint.h>

#ifndef DSV4_API
#if defined(_WIN32) && !defined(DSV4_STATIC)
#define DSV4_API __declspec(dllimport)
#else
#define DSV4_API
#endif
#endif

// Warns when a status is thrown away.
#if defined(__GNUC__) || defined(__clang__)
#define DSV4_NODISCARD __attribute__((warn_unused_result))
#else
#define DSV4_NODISCARD
#endif

#ifdef __cplusplus
extern "C" {
#endif

////////////////////////////////////////////////////////////////////////////////////////////////////
// Version
//
// The header and the library that is loaded at run time can be of different versions; `dsv4_abi_check` below tells in
// words whether they fit.

// Version of this header.
#define DSV4_VERSION "0.1.0"
#define DSV4_VERSION_MAJOR 0
#define DSV4_VERSION_MINOR 1
#define DSV4_VERSION_PATCH 0
// `DSV4_VERSION` as a number that grows; what dsv4_abi_check takes.
#define DSV4_VERSION_NUMBER (0u << 16 | 1u << 8 | 0u)

// Version of the library as text, for example `"0.1.0"`. Static text; never NULL.
DSV4_API DSV4_NODISCARD const char *dsv4_version(void);

// Version of the library as a number that grows: `major << 16 | minor << 8 | patch`. Compare with
// `DSV4_VERSION_NUMBER`, the version of this header.
DSV4_API DSV4_NODISCARD uint32_t dsv4_version_number(void);

// How the library was built, for bug reports: version, target, features. Static text; never NULL.
DSV4_API DSV4_NODISCARD const char *dsv4_build_info(void);


////////////////////////////////////////////////////////////////////////////////////////////////////
// Status and error
//
// Every fallible function returns a `dsv4_status` and takes a `dsv4_error *` as its last parameter, which may be NULL.
// The error is the caller's own memory: nothing is thread-local and nothing has to be freed.

// Bytes of `dsv4_error.message`, the final NUL included.
#define DSV4_ERROR_MESSAGE_SIZE 1000

// Outcome of a call. Numbers are never changed or used again; later versions may add some, so treat an unknown number
// as a failure.
enum dsv4_status
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : int32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
    // Success.
    DSV4_STATUS_OK = 0,
    // An argument is NULL or out of its documented range, or the call is not possible in this state.
    DSV4_STATUS_INVALID_ARGUMENT = 1,
    // A file, folder, tensor or entry that was named does not exist.
    DSV4_STATUS_NOT_FOUND = 2,
    // The operating system refused to read, map or write a file.
    DSV4_STATUS_IO = 3,
    // A checkpoint or session file is damaged, truncated or contradicts itself.
    DSV4_STATUS_CORRUPT = 4,
    // `config.json` has a known key with a wrong type or an impossible value.
    DSV4_STATUS_CONFIG = 5,
    // A model of another architecture; never loaded by guess.
    DSV4_STATUS_UNSUPPORTED_MODEL = 6,
    // A valid request that this build or device cannot serve.
    DSV4_STATUS_UNSUPPORTED = 7,
    // A device or library that was asked for is not there; the message says the remedy.
    DSV4_STATUS_UNAVAILABLE = 8,
    // An allocation sized by model, context, batch, file or text was refused; the message has the bytes. The objects of
    // the call are as before it and can be used on.
    DSV4_STATUS_OUT_OF_MEMORY = 9,
    // The session's context is full; the session is unchanged.
    DSV4_STATUS_CONTEXT_FULL = 10,
    // The call was cancelled; what was computed before stays usable.
    DSV4_STATUS_CANCELLED = 11,
    // The object is in use by another thread.
    DSV4_STATUS_BUSY = 12,
    // Logits or activations became NaN or infinite.
    DSV4_STATUS_NUMERIC = 13,
    // `tokenizer.json` cannot be read, or text or ids do not fit it.
    DSV4_STATUS_TOKENIZER = 14,
    // A chat message list does not follow the expected form.
    DSV4_STATUS_CHAT = 15,
    // A panic broke this object earlier; it can only be freed.
    DSV4_STATUS_POISONED = 16,
    // A defect of this library: a panic that was stopped at its border. The object is poisoned.
    DSV4_STATUS_PANIC = 17,
    // The caller's buffer is too small; the required length has been written. Call again with more room.
    DSV4_STATUS_BUFFER_TOO_SMALL = 18,
    // The engine's cache limit is reached by pages in use; the message has the counts. As after `CANCELLED`, the chunks
    // of a feed that were complete stay in the session; free or clear any session and feed the rest to go on.
    DSV4_STATUS_NO_BLOCKS = 19,
    // A session file was written with another model, numerics or cache format than the engine's.
    DSV4_STATUS_MISMATCH = 20,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum dsv4_status dsv4_status;
#else
typedef int32_t dsv4_status;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// What went wrong, in the caller's own memory. `dsv4_error err = {0};` is a valid start. Every call that gets it
// writes `code` and `message`, also when it succeeds (`DSV4_STATUS_OK` and an empty message).
typedef struct dsv4_error {
    // `sizeof(dsv4_error)`, or 0, which stands for the layout of the first version. Nothing is written beyond it: a
    // smaller size cuts the message. Never written itself.
    size_t size;
    // The status that the call returned.
    dsv4_status code;
    // For people: UTF-8, cut at a character border if it is too long, always ended by a NUL. Lower case, without a
    // final period; names the file, key, tensor or value at fault.
    char message[DSV4_ERROR_MESSAGE_SIZE];
} dsv4_error;

// Name of a status as in this header, without the prefix: `"OUT_OF_MEMORY"`. `"UNKNOWN"` for a number that this
// version does not know. Static text; never NULL.
DSV4_API DSV4_NODISCARD
const char *dsv4_status_name(int32_t status);

// Checks that a program compiled against the header of version `header_version` (pass `DSV4_VERSION_NUMBER`) can use
// this library. Call it once at the start.
//
// Versions fit if the major number is equal and, while that is 0, also the minor number; from 1.0 on, if the library's
// minor number is at least the header's.
//
// Errors: `UNSUPPORTED`, with a message that says which side is too old.
DSV4_API DSV4_NODISCARD
dsv4_status dsv4_abi_check(uint32_t header_version,
                           dsv4_error *err);


////////////////////////////////////////////////////////////////////////////////////////////////////
// Log
//
// The library never writes to stdout or stderr. What it has to say goes to one callback, if there is one.

// How important a message is.
enum dsv4_log_level
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : int32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
    // No messages.
    DSV4_LOG_LEVEL_OFF = 0,
    // Something failed that no call reports, or a defect of the library.
    DSV4_LOG_LEVEL_ERROR = 1,
    // Something is odd, and the library goes on.
    DSV4_LOG_LEVEL_WARN = 2,
    // What was opened and how it runs: a few lines per model and engine.
    DSV4_LOG_LEVEL_INFO = 3,
    // For bug reports.
    DSV4_LOG_LEVEL_DEBUG = 4,
    // For developers of the library.
    DSV4_LOG_LEVEL_TRACE = 5,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum dsv4_log_level dsv4_log_level;
#else
typedef int32_t dsv4_log_level;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// Receives log messages. `message` is UTF-8 that ends with a NUL and is valid during the call only.
//
// It may be called from any thread, also from several at once. It must return (no `longjmp`, no C++ exception). It may
// call functions of the library, but not `dsv4_log_set`; what those log while it runs is dropped.
typedef void (*dsv4_log_callback)(void *userdata, dsv4_log_level level, const char *message);

// Sends messages up to `level` (a `dsv4_log_level`) to `callback`, from all objects of the process. A new call replaces
// the callback; when it returns, the old one is not running any more and will not be called again. `callback` may be
// NULL, which ends the log, and `userdata` may be NULL.
//
// Errors: `INVALID_ARGUMENT` for an unknown level; `BUSY` when called from within a log callback; `UNAVAILABLE` if the
// host is a Rust program with a `tracing` subscriber of its own, which gets the messages already.
DSV4_API DSV4_NODISCARD
dsv4_status dsv4_log_set(int32_t level,
                         dsv4_log_callback callback,
                         void *userdata,
                         dsv4_error *err);


////////////////////////////////////////////////////////////////////////////////////////////////////
// Devices
//
// The CPU is always there and needs no entry. No CUDA library is linked: the driver is looked for when devices are
// listed, and its absence is a status with a reason, never a failure to load this library.

// A GPU. Set `size` to `sizeof(dsv4_device_info)` before the call that fills it.
typedef struct dsv4_device_info {
    // `sizeof(dsv4_device_info)`.
    size_t size;
    // Total memory in bytes; 0 where it is not known.
    uint64_t memory_bytes;
    // What `dsv4_engine_options.device` takes: `"cuda:0"`. Ends with a NUL.
    char id[32];
    // Name for people; ends with a NUL.
    char name[256];
} dsv4_device_info;

// Number of GPUs.
//
// Errors: `UNAVAILABLE` if there is none, with the reason and the remedy: no driver, a driver that is too old or
// refuses, no device, or a library built without CUDA. `*count` is 0 then, and the CPU works all the same.
DSV4_API DSV4_NODISCARD
dsv4_status dsv4_device_count(size_t *count,
                              dsv4_error *err);

// Describes GPU number `index`, counted from 0.
//
// Errors: `NOT_FOUND` if there is no such GPU, `UNAVAILABLE` as for `dsv4_device_count`.
DSV4_API DSV4_NODISCARD
dsv4_status dsv4_device_get_info(size_t index,
                                 dsv4_device_info *info,
                                 dsv4_error *err);


////////////////////////////////////////////////////////////////////////////////////////////////////
// Model
//
// An opened checkpoint folder: configuration, tokenizer and memory-mapped weights. Immutable; one model serves any
// number of engines and threads.

// The draft module of a checkpoint.
enum dsv4_draft
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : int32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
    // None.
    DSV4_DRAFT_NONE = 0,
    // One MTP block, as in the releases of April 2026.
    DSV4_DRAFT_MTP = 1,
    // DSpark stages, as in the releases of July and August 2026.
    DSV4_DRAFT_DSPARK = 2,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum dsv4_draft dsv4_draft;
#else
typedef int32_t dsv4_draft;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// An opened checkpoint. Functions that take it as `const` may run on several threads at once.
typedef struct dsv4_model dsv4_model;

// How to open a model. Fill with `dsv4_model_options_init`, then change what you like.
typedef struct dsv4_model_options {
    // `sizeof(dsv4_model_options)`.
    size_t size;
    // 1 reads `tokenizer.json` while opening, so that a folder without a usable tokenizer is refused at once; 0, the
    // default, reads it at its first use.
    int32_t preload_tokenizer;
    // 0.
    int32_t reserved;
} dsv4_model_options;

// Dimensions of a model; names are the keys of `config.json`. Set `size` to `sizeof(dsv4_model_info)` before the call.
typedef struct dsv4_model_info {
    // `sizeof(dsv4_model_info)`.
    size_t size;
    // Bytes of all weights in the checkpoint.
    uint64_t weight_bytes;
    // Number of tensors in the checkpoint.
    uint64_t tensors;
    // Longest context, in tokens.
    uint64_t max_position_embeddings;
    // Number of token ids, and length of a row of logits.
    uint32_t vocab_size;
    // Width of the residual stream.
    uint32_t hidden_size;
    // Layers of the trunk.
    uint32_t num_hidden_layers;
    // Attention heads.
    uint32_t num_attention_heads;
    // Values per head.
    uint32_t head_dim;
    // Tokens that every layer attends to directly.
    uint32_t sliding_window;
    // Routed experts per layer.
    uint32_t n_routed_experts;
    // Routed experts that a token uses per layer.
    uint32_t num_experts_per_tok;
    // The token that begins a prompt.
    uint32_t bos_token_id;
    // The token with which the model ends its output.
    uint32_t eos_token_id;
    // A `dsv4_draft`.
    int32_t draft;
    // 0.
    int32_t reserved;
} dsv4_model_info;

// Sets every default in `options`, a struct of `size` bytes. Use `dsv4_model_options_init`, which passes the size as
// your header has it. `options` may be NULL; then nothing happens.
DSV4_API void dsv4_model_options_init_sized(dsv4_model_options *options,
                                   size_t size);

// Sets `size` and every default in `options`.
static inline void dsv4_model_options_init(dsv4_model_options *options)
{
    dsv4_model_options_init_sized(options, sizeof *options);
}

// Opens the checkpoint folder at `path`: `config.json`, safetensors shards with their index (or one
// `model.safetensors`) and `tokenizer.json`, as published. The path ends with a NUL; UTF-8 on Windows, the file system's
// own bytes elsewhere. `options` may be NULL.
//
// Opening reads the headers of all shards and checks every tensor; it touches no page of the weights and copies none.
// `*out` receives the model, to be freed with `dsv4_model_free`.
//
// Errors: `NOT_FOUND` and `IO` for files; `CORRUPT` for damaged, truncated or contradicting ones, `CONFIG` and
// `UNSUPPORTED_MODEL` for the model itself, `TOKENIZER` if it is preloaded; `OUT_OF_MEMORY`. Messages name the file, key
// or tensor.
DSV4_API DSV4_NODISCARD
dsv4_status dsv4_model_open(const char *path,
                            const dsv4_model_options *options,
                            dsv4_model **out,
                            dsv4_error *err);

// Frees a model. Engines and other objects made from it keep what they need and live on. `model` may be NULL.
DSV4_API void dsv4_model_free(dsv4_model *model);

// Dimensions and constants of the model.
//
// Errors: only `INVALID_ARGUMENT` and `POISONED`.
DSV4_API DSV4_NODISCARD
dsv4_status dsv4_model_get_info(const dsv4_model *model,
                                dsv4_model_info *info,
                                dsv4_error *err);

// The folder that the model was opened from, as it was given to `dsv4_model_open`; ends with a NUL. It lives as long as
// the model.
//
// Errors: only `INVALID_ARGUMENT` and `POISONED`.
DSV4_API DSV4_NODISCARD
dsv4_status dsv4_model_path(const dsv4_model *model,
                            const char **path,
                            dsv4_error *err);


////////////////////////////////////////////////////////////////////////////////////////////////////
// Tokenizer
//
// Text to token ids and back. The tokenizer belongs to the model, is read from `tokenizer.json` at its first use (or at
// opening, see `dsv4_model_options`), and may be used from several threads at once.
//
// Functions that fill a buffer of the caller's always report the length that is needed. With a NULL buffer of capacity
// 0 they report the length and succeed; with a buffer that is too small they return `BUFFER_TOO_SMALL` and the length.

// Whether text that spells a control token becomes that token.
enum dsv4_markup
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : int32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
    // Never. The right choice for everything that a user wrote.
    DSV4_MARKUP_TEXT = 0,
    // Yes, as the official encoder does with a whole prompt.
    DSV4_MARKUP_PARSE = 1,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum dsv4_markup dsv4_markup;
#else
typedef int32_t dsv4_markup;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// Decodes one stream of tokens, giving out text only once its characters are complete. One thread at a time; a second
// one gets `BUSY`.
typedef struct dsv4_detokenizer dsv4_detokenizer;

// Encodes `text_len` bytes of UTF-8 to token ids. No begin-of-sentence token is added. `markup` is a `dsv4_markup`.
//
// `*n_tokens` receives the number of tokens and `tokens`, an array with room for `capacity`, the tokens. A text never
// has more tokens than bytes, so a capacity of `text_len` is always enough.
//
// Long texts are encoded in pieces, so that what is needed beside the tokens does not grow with the text; a word without
// an end takes up to 400 bytes for each of its own.
//
// Errors: `BUFFER_TOO_SMALL`; `OUT_OF_MEMORY` with the bytes; `INVALID_ARGUMENT`, for example for text that is not
// UTF-8; `NOT_FOUND`, `IO` and `TOKENIZER` if the model's tokenizer cannot be read.
DSV4_API DSV4_NODISCARD
dsv4_status dsv4_tokenizer_encode(const dsv4_model *model,
                                  const char *text,
                                  size_t text_len,
                                  int32_t markup,
                                  uint32_t *tokens,
                                  size_t capacity,
                                  size_t *n_tokens,
                                  dsv4_error *err);

// Decodes `n_tokens` ids to text. Bytes that are not UTF-8 become U+FFFD; for text that arrives token by token use a
// `dsv4_detokenizer`, which waits for incomplete characters. Ids without a token, with which checkpoints round their
// vocabulary up, give no text.
//
// `*text_len` receives the length in bytes and `text`, an array with room for `capacity` bytes, the text and a final
// NUL, so that `capacity` must be at least the length plus 1.
//
// Errors: `BUFFER_TOO_SMALL`; `OUT_OF_MEMORY`; `TOKENIZER` for an id outside the vocabulary; as `dsv4_tokenizer_encode`.
DSV4_API DSV4_NODISCARD
dsv4_status dsv4_tokenizer_decode(const dsv4_model *model,
                                  const uint32_t *tokens,
                                  size_t n_tokens,
                                  char *text,
                                  size_t capacity,
                                  size_t *text_len,
                                  dsv4_error *err);

// The bytes that one token stands for: a control token's spelling, or a piece of text that may begin or end within a
// character; none for an id without a token. `*bytes` points to `*len` bytes without a final NUL, which live as long as
// the model or an object made from it.
//
// Errors: `TOKENIZER` for an id outside the vocabulary; as `dsv4_tokenizer_encode`.
DSV4_API DSV4_NODISCARD
dsv4_status dsv4_tokenizer_token_bytes(const dsv4_model *model,
                                       uint32_t token,
                                       const char **bytes,
                                       size_t *len,
                                       dsv4_error *err);

// The id of a control token by its exact spelling (`text_len` bytes of UTF-8), for example `<think>`.
//
// Errors: `NOT_FOUND` if there is no such token; as `dsv4_tokenizer_encode`.
DSV4_API DSV4_NODISCARD
dsv4_status dsv4_tokenizer_token_id(const dsv4_model *model,
                                    const char *text,
                                    size_t text_len,
                                    uint32_t *token,
                                    dsv4_error *err);

// Starts an empty stream. `*out` receives it, to be freed with `dsv4_detokenizer_free`.
//
// Errors: `NOT_FOUND`, `IO`, `OUT_OF_MEMORY` and `TOKENIZER` if the model's tokenizer cannot be read.
DSV4_API DSV4_NODISCARD
dsv4_status dsv4_detokenizer_new(const dsv4_model *model,
                                 dsv4_detokenizer **out,
                                 dsv4_error *err);

// Frees a detokenizer. `detokenizer` may be NULL.
DSV4_API void dsv4_detokenizer_free(dsv4_detokenizer *detokenizer);

// Adds one token. `*text` receives the text that it completes, `*len` bytes of UTF-8 and a final NUL, valid until the
// next call with this detokenizer; empty while a character is incomplete.
//
// Errors: `TOKENIZER` for an id outside the vocabulary; the stream is unchanged.
DSV4_API DSV4_NODISCARD
dsv4_status dsv4_detokenizer_push(dsv4_detokenizer *detokenizer,
                                  uint32_t token,
                                  const char **text,
                                  size_t *len,
                                  dsv4_error *err);

// Ends the stream: `*text` is U+FFFD if it stopped within a character, else empty; as in `dsv4_detokenizer_push`. The
// detokenizer can be used for another stream.
//
// Errors: only `INVALID_ARGUMENT`, `BUSY` and `POISONED`.
DSV4_API DSV4_NODISCARD
dsv4_status dsv4_detokenizer_finish(dsv4_detokenizer *detokenizer,
                                    const char **text,
                                    size_t *len,
                                    dsv4_error *err);


////////////////////////////////////////////////////////////////////////////////////////////////////
// Engine
//
// A model on a device: numerics, threads, format of the cache. Any number of sessions run on one engine, from any
// threads.

// How closely an engine follows the roundings of the official inference code.
enum dsv4_numerics
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : int32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
    // Every quantisation point of the official code. The default.
    DSV4_NUMERICS_REFERENCE = 0,
    // As `REFERENCE`, and the attention output is cast to FP8, as production servers do.
    DSV4_NUMERICS_SERVED = 1,
    // Exactly dequantised weights, quantised caches, unquantised activations.
    DSV4_NUMERICS_KVQUANT = 2,
    // float32 arithmetic and nothing else rounded: for research.
    DSV4_NUMERICS_EXACT = 3,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum dsv4_numerics dsv4_numerics;
#else
typedef int32_t dsv4_numerics;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// Storage of the cache.
enum dsv4_kv_format
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : int32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
    // The numerics' own: fp8, or f32 for `EXACT`. The default.
    DSV4_KV_FORMAT_AUTO = 0,
    // FP8 entries and FP4 index keys; not for `EXACT`.
    DSV4_KV_FORMAT_FP8 = 1,
    // bfloat16 for both.
    DSV4_KV_FORMAT_BF16 = 2,
    // float32 for both.
    DSV4_KV_FORMAT_F32 = 3,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum dsv4_kv_format dsv4_kv_format;
#else
typedef int32_t dsv4_kv_format;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// Where checkpoints are kept, at which later prompts with the same beginning can start.
enum dsv4_checkpoints
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : int32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
    // At the last multiple of 256 tokens at or below the end of each prompt, and at each multiple that decoding reaches.
    // The default.
    DSV4_CHECKPOINTS_BOUNDARY = 0,
    // Nowhere: every prompt is computed from its beginning.
    DSV4_CHECKPOINTS_NONE = 1,
    // At every multiple of `checkpoint_every` tokens.
    DSV4_CHECKPOINTS_EVERY = 2,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum dsv4_checkpoints dsv4_checkpoints;
#else
typedef int32_t dsv4_checkpoints;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// How far ahead of their use blocks are read from the disk tier.
enum dsv4_prefetch
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : int32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
    // While one is taken over, the next ones are read, `prefetch_depth` of them. The default.
    DSV4_PREFETCH_NEXT = 0,
    // Not at all: each is read when it is waited for.
    DSV4_PREFETCH_OFF = 1,
    // As soon as a prompt is known, all that it can reuse is read, up to 16 times `prefetch_depth` ahead.
    DSV4_PREFETCH_AGGRESSIVE = 2,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum dsv4_prefetch dsv4_prefetch;
#else
typedef int32_t dsv4_prefetch;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// An engine. Functions that take it as `const` may run on several threads at once.
typedef struct dsv4_engine dsv4_engine;

// How an engine runs its model. Fill with `dsv4_engine_options_init`, then change what you like.
typedef struct dsv4_engine_options {
    // `sizeof(dsv4_engine_options)`.
    size_t size;
    // Where to run, ending with a NUL: `"cpu"`, `"cuda"` or `"cuda:N"`; NULL is `"cpu"`, the default. Read during the
    // call only.
    const char *device;
    // A `dsv4_numerics`.
    int32_t numerics;
    // A `dsv4_kv_format`.
    int32_t kv_format;
    // Worker threads, at most 1024; 0, the default, is one per available core. They belong to the engine and end with
    // it; 1 starts none and works on the calling thread.
    uint32_t threads;
    // Most tokens that go through the model at once, at most 65536; 0, the default, is 256 on the CPU and 2048 on a GPU.
    // More is faster and takes more memory, and a call is cancelled within one such chunk, on the CPU within one layer
    // of it.
    uint32_t prefill_chunk;
    // Most bytes of the cache, for sessions and reusable prompt beginnings together; 0, the default, is a quarter of the
    // machine's memory, or half of what weights and steps leave of a GPU's. Memory is taken as it fills, on a GPU when
    // the engine is made; at the limit, beginnings that no session uses are dropped, the
    // longest unused first, and when all is in use calls do as `when_full` says.
    uint64_t cache_bytes;
    // Most bytes of checkpoints, within `cache_bytes`; 0, the default, is a quarter of those.
    uint64_t checkpoint_bytes;
    // A `dsv4_checkpoints`.
    int32_t checkpoints;
    // For `EVERY`: a multiple of 256. Otherwise it means nothing.
    uint32_t checkpoint_every;
    // Prompt beginnings are shared only between sessions under the same salt: a text that ends with a NUL, different for
    // users who must not learn from response times what others asked. NULL, the default, is the empty text. Read during
    // the call only.
    const char *prefix_salt;
    // Bytes of host memory, beyond `cache_bytes`, for reusable beginnings that had to make room: the host tier. 0, the
    // default, is none.
    uint64_t host_tier_bytes;
    // Folder of the disk tier, where what the host tier has no room for is kept, also for later runs and other processes:
    // a path that ends with a NUL. It is made if it is not there. NULL, the default, is none. Read during the call only.
    const char *disk_tier_path;
    // Most bytes of files in that folder; 0, the default, is no limit. The longest unused are deleted first.
    uint64_t disk_tier_bytes;
    // Most bytes that are written to the folder per second, on average; what would exceed it is dropped. 0, the default,
    // is no limit.
    uint64_t disk_tier_write_rate;
    // Most bytes that this engine writes to the folder in all; 0, the default, is no limit.
    uint64_t disk_tier_write_total;
    // A `dsv4_prefetch`.
    int32_t prefetch;
    // Blocks that are read ahead, 1 to 1024; 4 by default.
    uint32_t prefetch_depth;
    // Most milliseconds that a prompt waits for the tiers, before it computes what is missing; 2000 by default.
    uint32_t tier_timeout_ms;
    // 1 fills freed cache memory with NaN, so that a defect shows as `NUMERIC`; slower. 0 is the default.
    int32_t poison_cache;
    // 1 makes logits on a GPU independent of how tokens are cut into calls, chunks and batches, to the last bit, as they
    // always are on the CPU; prefill is slower. 0 is the default.
    int32_t batch_invariant;
    // 0.
    int32_t reserved;
    // Most bytes of host memory, beyond the limits above, for sessions that give their pages up for others: idle ones, and
    // waiting ones that rank behind. They have them back before their next step, with the same results; one that finds no
    // place there is computed again from its tokens. 0, the default, is no such place: sessions keep their pages.
    uint64_t session_tier_bytes;
    // A `dsv4_when_full`: what calls do for which the cache has no room. `dsv4_session_set_call_options` may say otherwise.
    int32_t when_full;
    // Percent of the cache held by sessions, 1 to 100, from which on new sessions are made smaller, as the next two fields
    // say; 0, the default, is never.
    uint32_t degraded_load_percent;
    // Most tokens of such a session's context, at least 1. Without `degraded_load_percent` it means nothing.
    uint64_t degraded_context;
    // Most tokens that such a session has in a step, at least 1. Without `degraded_load_percent` it means nothing.
    uint64_t degraded_chunk;
    // Most bytes of a GPU's memory, weights, steps and cache together; 0, the default, is what is free.
    uint64_t gpu_bytes;
    // Routed experts of each layer whose weights the GPU holds; the CPU computes the others while
    // the GPU does its share. 0, the default, is as many as fit, -1 is none.
    int64_t gpu_experts;
    // Most bytes of host memory for the weights of routed experts, those on a GPU aside. Where they do not all fit, the
    // experts that a step needs are read from the files into this memory, and what is used most stays; at least the
    // experts of one token must fit. Results are the same. 0, the default, uses all where they are mapped and leaves it to
    // the system what stays in memory.
    uint64_t host_bytes;
} dsv4_engine_options;

// What an engine was made with and found. Set `size` to `sizeof(dsv4_engine_info)` before the call.
typedef struct dsv4_engine_info {
    // `sizeof(dsv4_engine_info)`.
    size_t size;
    // Instruction set of the CPU kernels, for example `"avx2"`; ends with a NUL.
    char simd[16];
    // A `dsv4_numerics`.
    int32_t numerics;
    // A `dsv4_kv_format`, never `AUTO`.
    int32_t kv_format;
    // Threads that work at once.
    uint32_t threads;
    // Most tokens that go through the model at once.
    uint32_t prefill_chunk;
    // Name of the device for people: `"cpu"`, or that of a GPU, for example `"NVIDIA H200"`; ends with a NUL, cut if it is
    // longer.
    char device[64];
} dsv4_engine_info;

// Sets every default in `options`, a struct of `size` bytes. Use `dsv4_engine_options_init`, which passes the size as
// your header has it. `options` may be NULL; then nothing happens.
DSV4_API void dsv4_engine_options_init_sized(dsv4_engine_options *options,
                                    size_t size);

// Sets `size` and every default in `options`.
static inline void dsv4_engine_options_init(dsv4_engine_options *options)
{
    dsv4_engine_options_init_sized(options, sizeof *options);
}

// Makes an engine on `model`. `options` may be NULL. `*out` receives the engine, to be freed with `dsv4_engine_free`.
//
// On a GPU the weights are uploaded during the call, as the checkpoint stores them.
//
// Errors: `INVALID_ARGUMENT` for an option out of range; `UNAVAILABLE` for a device that is not there and
// `UNSUPPORTED` for what it cannot run (too old a device, numerics `EXACT`, another cache than FP8); `IO` for a folder of the disk tier that cannot be made or read;
// `OUT_OF_MEMORY`.
DSV4_API DSV4_NODISCARD
dsv4_status dsv4_engine_new(const dsv4_model *model,
                            const dsv4_engine_options *options,
                            dsv4_engine **out,
                            dsv4_error *err);

// Frees an engine. Sessions made on it keep what they need and live on. `engine` may be NULL.
DSV4_API void dsv4_engine_free(dsv4_engine *engine);

// What the engine was made with and found.
//
// Errors: only `INVALID_ARGUMENT` and `POISONED`.
DSV4_API DSV4_NODISCARD
dsv4_status dsv4_engine_get_info(const dsv4_engine *engine,
                                 dsv4_engine_info *info,
                                 dsv4_error *err);


////////////////////////////////////////////////////////////////////////////////////////////////////
// Session
//
// One token timeline with its cache. Feed it tokens, read the logits behind the last one, generate.
//
// One thread at a time: a second one gets `BUSY` and does not wait. `dsv4_session_cancel` is the exception. After any
// error but `PANIC` the session is consistent and can go on.

// A session. One thread at a time.
typedef struct dsv4_session dsv4_session;

// Options of a session. Fill with `dsv4_session_options_init`, then change what you like.
typedef struct dsv4_session_options {
    // `sizeof(dsv4_session_options)`.
    size_t size;
    // Most tokens that the session can hold, prompt and output together; 0, the default, is the model's
    // `max_position_embeddings`. Memory for the context is taken as it fills.
    uint64_t context;
    // Tokens that `dsv4_session_truncate` can always take back without computing, for callers that try tokens out; at
    // most 64. Each costs a copy of the compressor states and the logits (V4-Flash: about 2 MB). 0, the default: a
    // truncation goes back to a checkpoint and computes from there. What may still be taken back is not offered to other
    // prompts: of a call with at most `rollback + 1` tokens, the last `rollback` wait for later ones.
    uint64_t rollback;
} dsv4_session_options;

// Told on the calling thread, after each chunk of a `dsv4_session_feed`, that `done` of its `total` tokens are in the
// session. Return 0 to go on; anything else cancels. It must return (no `longjmp`, no C++ exception), and the session
// is `BUSY` for it, except for `dsv4_session_cancel`.
typedef int32_t (*dsv4_progress_callback)(void *userdata, size_t done, size_t total);

// Where a session stands. Set `size` to `sizeof(dsv4_session_info)` before the call.
typedef struct dsv4_session_info {
    // `sizeof(dsv4_session_info)`.
    size_t size;
    // Tokens in the session.
    uint64_t position;
    // Most tokens that it can hold.
    uint64_t context;
    // Tokens that still fit.
    uint64_t remaining;
    // 1 if `dsv4_session_logits` has something to give, else 0.
    int32_t has_logits;
    // 0.
    int32_t reserved;
    // Tokens that were taken from the cache instead of computed, over the session's life: beginnings of prompts that the
    // engine knew, and what was restored from a file.
    uint64_t reused_tokens;
} dsv4_session_info;

// Sets every default in `options`, a struct of `size` bytes. Use `dsv4_session_options_init`, which passes the size as
// your header has it. `options` may be NULL; then nothing happens.
DSV4_API void dsv4_session_options_init_sized(dsv4_session_options *options,
                                     size_t size);

// Sets `size` and every default in `options`.
static inline void dsv4_session_options_init(dsv4_session_options *options)
{
    dsv4_session_options_init_sized(options, sizeof *options);
}

// Makes an empty session on `engine`. `options` may be NULL. `*out` receives the session, to be freed with
// `dsv4_session_free`.
//
// Errors: `INVALID_ARGUMENT` if the context is longer than the model's or `rollback` is above 64; `OUT_OF_MEMORY`.
DSV4_API DSV4_NODISCARD
dsv4_status dsv4_session_new(const dsv4_engine *engine,
                             const dsv4_session_options *options,
                             dsv4_session **out,
                             dsv4_error *err);

// Frees a session and its cache. A generation that was started on it keeps what it needs. `session` may be NULL.
DSV4_API void dsv4_session_free(dsv4_session *session);

// Appends `n_tokens` tokens and computes the logits behind the last one. No tokens is no work and no error. `progress`
// may be NULL, and `userdata` may be NULL.
//
// Errors: `INVALID_ARGUMENT` for an id outside the vocabulary and `CONTEXT_FULL` if the tokens do not all fit (nothing
// is fed then); `CANCELLED`, `NO_BLOCKS`, `OUT_OF_MEMORY`, `NUMERIC`, `IO` (the chunks that were complete stay, see
// `dsv4_session_info.position`, and there are no logits if there was one; feed the rest to go on).
DSV4_API DSV4_NODISCARD
dsv4_status dsv4_session_feed(dsv4_session *session,
                              const uint32_t *tokens,
                              size_t n_tokens,
                              dsv4_progress_callback progress,
                              void *userdata,
                              dsv4_error *err);

// As `dsv4_session_feed`, giving out the logits behind every token: row `i` of `logits`, an array `[n_tokens,
// vocab_size]` with room for `capacity` values, belongs to `tokens[i]`.
//
// Errors: as `dsv4_session_feed`; `INVALID_ARGUMENT` if `capacity` is too small. `logits` is zero then.
DSV4_API DSV4_NODISCARD
dsv4_status dsv4_session_feed_all(dsv4_session *session,
                                  const uint32_t *tokens,
                                  size_t n_tokens,
                                  float *logits,
                                  size_t capacity,
                                  dsv4_error *err);

// Logits behind the last token, before softmax, in place: `*logits` points to `*n` float32, one per token id, valid
// until the next call with this session that is not a question (`get_info`, `logits`, `tokens`).
//
// In a generation on a GPU the device chooses the tokens and keeps the logits: asking computes them again, bit for bit,
// and the next token's come along.
//
// Errors: `INVALID_ARGUMENT` if there are none: before the first token, and after a `feed` that stopped half-way; those of
// a device that computes them.
DSV4_API DSV4_NODISCARD
dsv4_status dsv4_session_logits(dsv4_session *session,
                                const float **logits,
                                size_t *n,
                                dsv4_error *err);

// The tokens in the session, in place: `*tokens` points to `*n` ids, valid as long as the logits are.
//
// Errors: only `INVALID_ARGUMENT`, `BUSY` and `POISONED`.
DSV4_API DSV4_NODISCARD
dsv4_status dsv4_session_tokens(dsv4_session *session,
                                const uint32_t **tokens,
                                size_t *n,
                                dsv4_error *err);

// Where the session stands.
//
// Errors: only `INVALID_ARGUMENT`, `BUSY` and `POISONED`.
DSV4_API DSV4_NODISCARD
dsv4_status dsv4_session_get_info(dsv4_session *session,
                                  dsv4_session_info *info,
                                  dsv4_error *err);

// Empties the session, and takes back a cancel that no call has seen. Generations that were started on it end with an
// error.
//
// Errors: `BUSY`; `OUT_OF_MEMORY` and `NO_BLOCKS` if there is no room for an empty state of its own.
DSV4_API DSV4_NODISCARD
dsv4_status dsv4_session_clear(dsv4_session *session,
                               dsv4_error *err);

// Makes a session with the same tokens and logits, for another continuation. `*out` receives it, to be freed with
// `dsv4_session_free`. Nothing is copied but tokens and logits: the cache is shared until one of the two writes to it.
//
// Errors: `BUSY`; `OUT_OF_MEMORY`.
DSV4_API DSV4_NODISCARD
dsv4_status dsv4_session_fork(dsv4_session *session,
                              dsv4_session **out,
                              dsv4_error *err);

// Goes back to the first `position` tokens, exactly. The last `rollback` tokens of the session's options, fed one at a
// time, are taken back without computing; otherwise it starts from the nearest checkpoint below and computes the rest
// again. The logits are then those behind token `position - 1`; at 0 there are none. Generations that were started on the
// session end with an error.
//
// Errors: `INVALID_ARGUMENT` if the session has fewer tokens; `BUSY`; those of `dsv4_session_feed`, after which the
// session holds a beginning of the tokens that were wanted.
DSV4_API DSV4_NODISCARD
dsv4_status dsv4_session_truncate(dsv4_session *session,
                                  uint64_t position,
                                  dsv4_error *err);

// Goes back to what the session has in common with `tokens`, and says how many tokens that is in `*kept`; feed the rest
// of `tokens` next. For conversations whose history is rendered anew each turn and may come out differently: what is the
// same is not computed again, and if nothing differs, nothing changes.
//
// Errors: `INVALID_ARGUMENT`; `BUSY`; those of `dsv4_session_truncate`.
DSV4_API DSV4_NODISCARD
dsv4_status dsv4_session_keep_common(dsv4_session *session,
                                     const uint32_t *tokens,
                                     size_t n_tokens,
                                     size_t *kept,
                                     dsv4_error *err);

// Cancels the running call of this session, or its next one if none is running: it returns `CANCELLED` within the time
// of one layer of one chunk, or of the chunk where other sessions' calls share it. From any thread, at any time before the
// session is freed; it never waits. A cancel that comes when the call it was meant for has just ended counts for the next
// one; `dsv4_session_reset_cancel` takes it back.
//
// Errors: only `INVALID_ARGUMENT`.
DSV4_API DSV4_NODISCARD
dsv4_status dsv4_session_cancel(const dsv4_session *session,
                                dsv4_error *err);

// Takes back a cancel that no call has seen. For a thread whose call has ended while another one may have cancelled it: when
// that one is done, this leaves nothing behind for the next call.
//
// Errors: only `INVALID_ARGUMENT`.
DSV4_API DSV4_NODISCARD
dsv4_status dsv4_session_reset_cancel(const dsv4_session *session,
                                      dsv4_error *err);


////////////////////////////////////////////////////////////////////////////////////////////////////
// Calls of many sessions
//
// Calls of several threads at the same time go through the model together; one of the threads does the work for all. How
// a session's calls are treated among those of others, and what they do when the cache is full, is set here.

// What a call does for which the cache has no room. In any case what no session uses makes room first, and with
// `session_tier_bytes` in the engine's options, sessions that are idle give their pages up for a while.
enum dsv4_when_full
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : int32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
    // In call options, as the engine's options say; there, as `EVICT`. The default.
    DSV4_WHEN_FULL_DEFAULT = 0,
    // It takes what there is and ends with `NO_BLOCKS` when nothing is left; the chunks that were complete stay.
    DSV4_WHEN_FULL_EVICT = 1,
    // A prompt is compared with the room before it begins, and refused whole with `NO_BLOCKS` and the counts.
    DSV4_WHEN_FULL_REFUSE = 2,
    // A prompt waits until there is room for all of it, and any call waits that needs more than there is: in order of
    // priority and age, until room is made, or a cancel or the time limit ends it. Sessions that are idle may hold the
    // room: if one thread owns them all, give a time limit. If all sessions wait for each other, or a call needs more than
    // the whole cache, it is `NO_BLOCKS`.
    DSV4_WHEN_FULL_WAIT = 3,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum dsv4_when_full dsv4_when_full;
#else
typedef int32_t dsv4_when_full;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// How a session's calls are treated. Fill with `dsv4_call_options_init`, then change what you like.
typedef struct dsv4_call_options {
    // `sizeof(dsv4_call_options)`.
    size_t size;
    // Most milliseconds that one call may take, from its beginning; one that takes longer ends with `CANCELLED` within one
    // chunk, and what was complete stays. Each token of a generation is a call. 0, the default, is no limit.
    uint64_t time_limit_ms;
    // Tokens that are expected behind a prompt: with `REFUSE` and `WAIT`, room is asked for these too before the prompt
    // begins, and kept for the session. 0 is the default.
    uint64_t reserve;
    // Higher goes first where not all fit into a step; nobody waits for ever. 0 is the default.
    int32_t priority;
    // A `dsv4_when_full`.
    int32_t when_full;
    // 1: the calling thread does no work for the model, but waits for others, for threads with little stack or much
    // priority. Something must work then: calls of other sessions, or a thread in `dsv4_engine_step`. 0 is the default.
    int32_t waits_only;
    // 0.
    int32_t reserved;
} dsv4_call_options;

// Sets every default in `options`, a struct of `size` bytes. Use `dsv4_call_options_init`, which passes the size as your
// header has it. `options` may be NULL; then nothing happens.
DSV4_API void dsv4_call_options_init_sized(dsv4_call_options *options,
                                  size_t size);

// Sets `size` and every default in `options`.
static inline void dsv4_call_options_init(dsv4_call_options *options)
{
    dsv4_call_options_init_sized(options, sizeof *options);
}

// How the session's calls are treated from now on. `options` may be NULL, which is all defaults.
//
// Errors: `INVALID_ARGUMENT` for an option out of range; `BUSY`.
DSV4_API DSV4_NODISCARD
dsv4_status dsv4_session_set_call_options(dsv4_session *session,
                                          const dsv4_call_options *options,
                                          dsv4_error *err);


////////////////////////////////////////////////////////////////////////////////////////////////////
// Session file
//
// A session saved to one file, to go on later, in another process or on another engine of the same model, numerics and
// cache format. Files carry checksums and are read with suspicion: whatever is wrong with one is an error that names it,
// and nothing changes. While a file is saved, at every moment the file under the path is a complete old save or the
// complete new one, also when the process is killed or the power fails.
//
// The model is known by its fingerprint, which is made of the config, the tensors, and the shards' sizes and modification
// times, so that a changed weight is noticed. A copy of a model has the same only if it keeps the times: `cp -a`.

// What a save or a restore is at. A save only writes; a restore goes through the others in order.
enum dsv4_file_stage
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : int32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
    // Bytes are written.
    DSV4_FILE_STAGE_WRITE = 0,
    // The file's bytes are compared with their checksums.
    DSV4_FILE_STAGE_CHECK = 1,
    // The file's bytes are read into the cache; from the beginning again where the cache had no room at first.
    DSV4_FILE_STAGE_READ = 2,
    // Tokens that the last save left out are computed.
    DSV4_FILE_STAGE_COMPUTE = 3,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum dsv4_file_stage dsv4_file_stage;
#else
typedef int32_t dsv4_file_stage;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// Told on the calling thread, at the beginning of each stage of a save or a restore, after each part of a few megabytes and
// after each chunk of tokens, that `done` of the stage's `total` bytes (in `DSV4_FILE_STAGE_COMPUTE`, tokens) are through.
// Return 0 to go on; anything else cancels, also the last time. Later versions may have more stages. It must return (no
// `longjmp`, no C++ exception), and a session that is saved is `BUSY` for it, except for `dsv4_session_cancel`.
typedef int32_t (*dsv4_file_progress_callback)(void *userdata,
                                               dsv4_file_stage stage,
                                               uint64_t done,
                                               uint64_t total);

// Facts about a session file. Set `size` to `sizeof(dsv4_session_file_info)` before the call.
typedef struct dsv4_session_file_info {
    // `sizeof(dsv4_session_file_info)`.
    size_t size;
    // Fingerprint of the model, 32 hexadecimal digits; ends with a NUL.
    char fingerprint[40];
    // Name of the numerics, for example `"reference"`; ends with a NUL.
    char numerics[24];
    // Version of the format that the file is written in.
    uint32_t version;
    // Oldest version of a reader that can read it.
    uint32_t oldest_reader;
    // A `dsv4_kv_format`, never `AUTO`.
    int32_t kv_format;
    // 1 if the last save is damaged, so that the one before it is described here, else 0.
    int32_t is_last_save_damaged;
    // Tokens of the session.
    uint64_t tokens;
    // Of these, tokens that restoring computes again.
    uint64_t pending_tokens;
    // Full blocks of 256 tokens.
    uint64_t blocks;
    // Saves since the file was made.
    uint64_t saves;
    // Bytes of the file: the sum of the next five.
    uint64_t file_bytes;
    // Header and tables.
    uint64_t frame_bytes;
    // Rows and tokens of the full blocks, and rows of the partial block behind them: something even where `blocks` is 0.
    uint64_t block_bytes;
    // Windows and states.
    uint64_t state_bytes;
    // Tokens behind the last full block, and logits.
    uint64_t token_bytes;
    // What earlier saves left, which a later one removes.
    uint64_t unused_bytes;
} dsv4_session_file_info;

// Saves the session to the file at `path`. A file that holds a beginning of this session is added to. A file of another
// session or model, a damaged one and an empty one are replaced; what is not dsv4's, or only newer versions can read, is
// not. The session does not change.
//
// Over the life of a session that grows, at most twice its size is written, however often it is saved. To keep that, a
// save soon after another may write only the new tokens, which restoring then computes again: never more than about as
// many as take the room of one state (1,600 for V4-Flash). With `complete` = 1 everything is written, which is what the
// last save wants; 0 keeps the bound.
//
// `dsv4_session_cancel` and the time limit of the session's call options end it between parts of a few megabytes.
//
// Errors: `IO` and `NOT_FOUND` from the file system (disk full, permissions, no such folder), `INVALID_ARGUMENT` if
// something other than a file, or a file that is not dsv4's, is at `path`, `UNSUPPORTED` if a file of a newer version or of
// the other byte order is, `BUSY` also during another save to the same file, `OUT_OF_MEMORY`, `CANCELLED`. After any of them
// the old file is as it was.
DSV4_API DSV4_NODISCARD
dsv4_status dsv4_session_save(dsv4_session *session,
                              const char *path,
                              int32_t complete,
                              dsv4_error *err);

// As `dsv4_session_save`, telling `progress` how far it has come. A save that has nothing to write does not call it.
// `progress` may be NULL, and `userdata` may be NULL.
//
// Errors: as `dsv4_session_save`.
DSV4_API DSV4_NODISCARD
dsv4_status dsv4_session_save_with_progress(dsv4_session *session,
                                            const char *path,
                                            int32_t complete,
                                            dsv4_file_progress_callback progress,
                                            void *userdata,
                                            dsv4_error *err);

// Makes a session on `engine` from the file at `path`: tokens, logits and cache bit for bit as they were saved, ready to
// sample. `options` may be NULL. `*out` receives the session, to be freed with `dsv4_session_free`. Equal blocks that the
// engine has already are shared, and those of the file can be reused by later prompts.
//
// Errors: `NOT_FOUND`, `IO`; `CORRUPT` for a damaged or truncated file, `UNSUPPORTED` for one of a newer version or of
// the other byte order, `MISMATCH` for one of another model, numerics or cache format; `CONTEXT_FULL` if it holds more
// tokens than the context; `NO_BLOCKS`, `OUT_OF_MEMORY`; and where tokens are pending, those of `dsv4_session_feed`.
DSV4_API DSV4_NODISCARD
dsv4_status dsv4_session_restore(const dsv4_engine *engine,
                                 const char *path,
                                 const dsv4_session_options *options,
                                 dsv4_session **out,
                                 dsv4_error *err);

// As `dsv4_session_restore`, telling `progress` how far it has come. `options` may be NULL, `progress` may be NULL, and
// `userdata` may be NULL. To cancel from another thread, have `progress` look at something that the other one sets.
//
// Errors: as `dsv4_session_restore`; `CANCELLED`, and there is no session then.
DSV4_API DSV4_NODISCARD
dsv4_status dsv4_session_restore_with_progress(const dsv4_engine *engine,
                                               const char *path,
                                               const dsv4_session_options *options,
                                               dsv4_file_progress_callback progress,
                                               void *userdata,
                                               dsv4_session **out,
                                               dsv4_error *err);

// What the file at `path` says about itself. Reads header and tables only, and needs no model.
//
// Errors: `NOT_FOUND`, `IO`; `CORRUPT`, `UNSUPPORTED` and `MISMATCH` for files that no session can be restored from;
// `OUT_OF_MEMORY`.
DSV4_API DSV4_NODISCARD
dsv4_status dsv4_session_file_get_info(const char *path,
                                       dsv4_session_file_info *info,
                                       dsv4_error *err);

// As `dsv4_session_file_get_info`, after comparing everything in the file with its checksums.
//
// Errors: as there; `CORRUPT` names the part that differs.
DSV4_API DSV4_NODISCARD
dsv4_status dsv4_session_file_verify(const char *path,
                                     dsv4_session_file_info *info,
                                     dsv4_error *err);


////////////////////////////////////////////////////////////////////////////////////////////////////
// Sampler
//
// Logits to a token, deterministic for a seed: penalties, logit bias, then either the largest logit (greedy) or
// temperature, top-k, top-p, min-p and one draw. One thread at a time; a second one gets `BUSY`.

// Chooses the tokens of one sequence. One thread at a time.
typedef struct dsv4_sampler dsv4_sampler;

// What a sampler does. Fill with `dsv4_sampler_options_init`, then change what you like. The defaults draw from the
// model's own distribution, as its authors recommend.
typedef struct dsv4_sampler_options {
    // `sizeof(dsv4_sampler_options)`.
    size_t size;
    // Start of the random numbers: equal seeds give equal tokens for equal logits, on every platform. 0 by default.
    uint64_t seed;
    // The penalties look at this many accepted tokens, the latest; 0, the default, looks at all.
    uint64_t penalty_window;
    // Ids whose logits get a bias, `n_bias` of them, each once; NULL if there are none. Read during the call only.
    const uint32_t *bias_tokens;
    // What is added to their logits: finite, or minus infinity to ban a token.
    const float *bias_values;
    // Number of biases; 0 by default.
    size_t n_bias;
    // 1 takes the largest logit (the lowest id among equals) instead of drawing; 0 by default. Penalties and bias
    // still count; `temperature`, `top_k`, `top_p`, `min_p` and `seed` mean nothing then. Greedy decoding is this choice and
    // never a temperature of 0, which is refused.
    int32_t greedy;
    // Keeps the k largest logits; 0, the default, keeps all.
    uint32_t top_k;
    // Divides the logits; finite and above 0, 1 by default.
    float temperature;
    // Keeps the smallest set of likeliest tokens whose probabilities reach this; above 0, at most 1, the default.
    float top_p;
    // Keeps tokens at least this fraction as likely as the likeliest; from 0, the default, to below 1.
    float min_p;
    // Divides positive and multiplies negative logits of accepted tokens; above 0, 1 by default.
    float repetition_penalty;
    // Subtracted from the logits of accepted tokens; finite, 0 by default.
    float presence_penalty;
    // Subtracted once per accepted occurrence; finite, 0 by default.
    float frequency_penalty;
} dsv4_sampler_options;

// Sets every default in `options`, a struct of `size` bytes. Use `dsv4_sampler_options_init`, which passes the size as
// your header has it. `options` may be NULL; then nothing happens.
DSV4_API void dsv4_sampler_options_init_sized(dsv4_sampler_options *options,
                                     size_t size);

// Sets `size` and every default in `options`.
static inline void dsv4_sampler_options_init(dsv4_sampler_options *options)
{
    dsv4_sampler_options_init_sized(options, sizeof *options);
}

// Makes a sampler. `options` may be NULL. `*out` receives it, to be freed with `dsv4_sampler_free`.
//
// Errors: `INVALID_ARGUMENT` naming the option that is out of range; `OUT_OF_MEMORY`.
DSV4_API DSV4_NODISCARD
dsv4_status dsv4_sampler_new(const dsv4_sampler_options *options,
                             dsv4_sampler **out,
                             dsv4_error *err);

// Frees a sampler. A generation that was started with it keeps what it needs. `sampler` may be NULL.
DSV4_API void dsv4_sampler_free(dsv4_sampler *sampler);

// Chooses the next token for `logits`, `n` float32: those of `dsv4_session_logits`, in place, or your own. It does not
// count as accepted; call `dsv4_sampler_accept` for that.
//
// Errors: `NUMERIC` for NaN, plus infinity, or nothing but minus infinity; `INVALID_ARGUMENT` for no logits, or a
// biased or accepted id beyond them; `OUT_OF_MEMORY`. A failed call uses up no random number.
DSV4_API DSV4_NODISCARD
dsv4_status dsv4_sampler_sample(dsv4_sampler *sampler,
                                const float *logits,
                                size_t n,
                                uint32_t *token,
                                dsv4_error *err);

// Counts a token for the penalties: every token of the sequence, those of the prompt only if they shall be penalised.
//
// Errors: `OUT_OF_MEMORY`, and the token is not counted then; `BUSY`.
DSV4_API DSV4_NODISCARD
dsv4_status dsv4_sampler_accept(dsv4_sampler *sampler,
                                uint32_t token,
                                dsv4_error *err);

// Forgets the accepted tokens and starts the random numbers anew.
//
// Errors: only `INVALID_ARGUMENT`, `BUSY` and `POISONED`.
DSV4_API DSV4_NODISCARD dsv4_status dsv4_sampler_reset(dsv4_sampler *sampler, dsv4_error *err);


////////////////////////////////////////////////////////////////////////////////////////////////////
// Generation
//
// The loop of sampling, feeding and decoding, with stop conditions, in two forms: pull one piece after the other with
// `dsv4_generation_next`, which needs no callback, or have them pushed by `dsv4_session_generate`.
//
// The last token that was handed out is not in the session: its logits were not needed. To go on from the text, feed it:
//
// ```c
// dsv4_session_feed(session, &piece.token, 1, NULL, NULL, &err);
// ```

// Why a generation ended.
enum dsv4_finish
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : int32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
    // It has not.
    DSV4_FINISH_NONE = 0,
    // The model's end-of-sentence token.
    DSV4_FINISH_EOS = 1,
    // One of the stop tokens; `finish_value` is its id.
    DSV4_FINISH_TOKEN = 2,
    // One of the stop strings; `finish_value` is its index.
    DSV4_FINISH_STRING = 3,
    // `max_tokens` tokens were generated.
    DSV4_FINISH_MAX_TOKENS = 4,
    // The session's context is full.
    DSV4_FINISH_CONTEXT_FULL = 5,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum dsv4_finish dsv4_finish;
#else
typedef int32_t dsv4_finish;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// A running generation of one session with one sampler. One thread at a time.
//
// A token is sampled, handed out, and fed to the session when the next one is asked for; so the session holds all tokens
// but the last one that was handed out (to go on from the text, feed that one). Between two calls the session may be
// read, but not fed or cleared.
typedef struct dsv4_generation dsv4_generation;

// When a generation ends. Fill with `dsv4_generation_options_init`, then change what you like. By default it ends at the
// model's end-of-sentence token or when the context is full.
typedef struct dsv4_generation_options {
    // `sizeof(dsv4_generation_options)`.
    size_t size;
    // Most tokens to generate; 0, the default, is no limit but the context.
    uint64_t max_tokens;
    // Tokens that end the generation; their text is not part of it. NULL if there are none. Read during the call only.
    const uint32_t *stop_tokens;
    // Number of stop tokens; 0 by default.
    size_t n_stop_tokens;
    // Texts that end the generation, each of UTF-8 that ends with a NUL; they are not part of the output, not even in
    // parts. NULL if there are none. Read during the call only.
    const char *const *stop_strings;
    // Number of stop strings; 0 by default.
    size_t n_stop_strings;
    // 1 goes on behind the end-of-sentence token; 0 by default.
    int32_t ignore_eos;
    // 0.
    int32_t reserved;
} dsv4_generation_options;

// One generated token and the text that became certain with it. Set `size` to `sizeof(dsv4_piece)` before the call that
// fills it.
typedef struct dsv4_piece {
    // `sizeof(dsv4_piece)`.
    size_t size;
    // `text_len` bytes of complete UTF-8 and a final NUL, valid until the next call with this generation. Empty while a
    // character or a possible stop string is incomplete. Control tokens come spelled out, as `<think>` does;
    // `dsv4_chat_parser` tells them from text.
    const char *text;
    // Bytes of `text`, without the NUL.
    size_t text_len;
    // The token. A stop token is reported too.
    uint32_t token;
    // A `dsv4_finish`: anything but `NONE` says that this is the last piece.
    int32_t finish;
    // See `dsv4_finish`; otherwise 0.
    uint32_t finish_value;
    // 0.
    uint32_t reserved;
} dsv4_piece;

// Told on the calling thread of each piece of a `dsv4_session_generate`; `piece` and its text are valid during the call
// only. Return 0 to go on; anything else cancels. It must return (no `longjmp`, no C++ exception). It may read the
// session (`dsv4_session_get_info`, `_logits`, `_tokens`) and cancel it; for everything else the session is `BUSY`.
typedef int32_t (*dsv4_piece_callback)(void *userdata, const dsv4_piece *piece);

// Sets every default in `options`, a struct of `size` bytes. Use `dsv4_generation_options_init`, which passes the size
// as your header has it. `options` may be NULL; then nothing happens.
DSV4_API void dsv4_generation_options_init_sized(dsv4_generation_options *options,
                                        size_t size);

// Sets `size` and every default in `options`.
static inline void dsv4_generation_options_init(dsv4_generation_options *options)
{
    dsv4_generation_options_init_sized(options, sizeof *options);
}

// Starts a generation from the logits of `session`. `options` may be NULL. `*out` receives it, to be freed with
// `dsv4_generation_free`; nothing is computed yet. It keeps session and sampler alive.
//
// Errors: `INVALID_ARGUMENT` if the session has no logits, or for an option out of range; `OUT_OF_MEMORY`; `NOT_FOUND`,
// `IO` and `TOKENIZER` if the model's tokenizer cannot be read.
DSV4_API DSV4_NODISCARD
dsv4_status dsv4_generation_new(dsv4_session *session,
                                dsv4_sampler *sampler,
                                const dsv4_generation_options *options,
                                dsv4_generation **out,
                                dsv4_error *err);

// Frees a generation, which ends it; the session can go on. `generation` may be NULL.
DSV4_API void dsv4_generation_free(dsv4_generation *generation);

// Generates one token. After the last piece it gives the same `finish` again, with token 0 and no text.
//
// Errors: `BUSY` if generation, session or sampler is in use; `INVALID_ARGUMENT` if the session was fed or cleared since
// the last piece; those of `dsv4_session_feed` and `dsv4_sampler_sample`. After an error other than `PANIC` call it
// again to go on.
DSV4_API DSV4_NODISCARD
dsv4_status dsv4_generation_next(dsv4_generation *generation,
                                 dsv4_piece *piece,
                                 dsv4_error *err);

// Ends a generation before its time, for example after `CANCELLED`: `*text` receives the text that was held back because
// it could have become a stop string or because a character was incomplete (U+FFFD then), `*len` bytes of UTF-8 and a
// final NUL, valid until the next call with this generation.
//
// Errors: only `INVALID_ARGUMENT`, `BUSY` and `POISONED`.
DSV4_API DSV4_NODISCARD
dsv4_status dsv4_generation_finish(dsv4_generation *generation,
                                   const char **text,
                                   size_t *len,
                                   dsv4_error *err);

// Generates to the end, telling `callback` of each piece. `options` may be NULL, `callback` may be NULL, `userdata` may
// be NULL. `*finish` receives the `dsv4_finish`.
//
// Errors: `CANCELLED` if the callback or `dsv4_session_cancel` asks for it; otherwise as `dsv4_generation_new` and
// `dsv4_generation_next`. The tokens that were told of are in the session, but for the last: to go on from the text, feed
// `piece->token` of the last piece.
DSV4_API DSV4_NODISCARD
dsv4_status dsv4_session_generate(dsv4_session *session,
                                  dsv4_sampler *sampler,
                                  const dsv4_generation_options *options,
                                  dsv4_piece_callback callback,
                                  void *userdata,
                                  int32_t *finish,
                                  dsv4_error *err);


////////////////////////////////////////////////////////////////////////////////////////////////////
// Event loops
//
// Calls that return at once, for programs with a loop of their own. A submitted call does the same as one that waits, with
// the same results, options, cancels and time limits, and shares steps with all others; but nobody waits in it. The work is
// done in `dsv4_engine_step`, which the loop calls when a descriptor can be read, and by threads that wait in calls of other
// sessions. One thread's loop, with any number of requests:
//
// ```c
// while (requests_left > 0) {
//     poll(&wake, 1, -1);                      // or epoll, kqueue, libuv, glib; among whatever else there is
//     if (dsv4_engine_step(engine, &worked, &err) != DSV4_STATUS_OK) return;   // one step for all of them
//     for (each request) {
//         dsv4_request_event event = {0};
//         event.size = sizeof event;
//         while (dsv4_request_poll(request, &event, &err) == DSV4_STATUS_OK && event.kind != DSV4_REQUEST_EVENT_KIND_NONE)
//             on_event(request, &event);         // a token, the end, ...
//     }
// }
// ```
//
// While a request runs, its session, and a generation's sampler, are `BUSY`; they can be used again when the request has
// told its end, or is freed. `dsv4_session_cancel` works all the time.

// What is new with a request.
enum dsv4_request_event_kind
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : int32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
    // Nothing.
    DSV4_REQUEST_EVENT_KIND_NONE = 0,
    // `done` of the `total` tokens of a prompt are in the session. Only the last such news is kept.
    DSV4_REQUEST_EVENT_KIND_PROGRESS = 1,
    // A token was generated, with the text that became certain with it.
    DSV4_REQUEST_EVENT_KIND_PIECE = 2,
    // The request is over: with `status` and, if that is no error, a generation's `finish`. The last news; session and
    // sampler are free again.
    DSV4_REQUEST_EVENT_KIND_END = 3,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum dsv4_request_event_kind dsv4_request_event_kind;
#else
typedef int32_t dsv4_request_event_kind;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// A submitted call. One thread at a time.
typedef struct dsv4_request dsv4_request;

// News of a request. Set `size` to `sizeof(dsv4_request_event)` before the call that fills it.
typedef struct dsv4_request_event {
    // `sizeof(dsv4_request_event)`.
    size_t size;
    // `text_len` bytes of UTF-8 and a final NUL, valid until the next call with this request: a piece's text, as in
    // `dsv4_piece`; at the end, the message of an error. Otherwise empty.
    const char *text;
    // Bytes of `text`, without the NUL.
    size_t text_len;
    // Of a prompt: tokens that are in the session.
    uint64_t done;
    // Of a prompt: all its tokens.
    uint64_t total;
    // A `dsv4_request_event_kind`.
    int32_t kind;
    // Of a piece: the token. A stop token is reported too.
    uint32_t token;
    // At the end of a generation: a `dsv4_finish`; otherwise `NONE`.
    int32_t finish;
    // See `dsv4_finish`; otherwise 0.
    uint32_t finish_value;
    // At the end: the `dsv4_status` that a call which waits would have returned; otherwise 0.
    int32_t status;
    // 0.
    int32_t reserved;
} dsv4_request_event;

// Submits a `dsv4_session_feed` and returns at once: nothing is computed or checked yet, and what is wrong with the tokens
// is told at the end. The tokens are copied. `*out` receives the request, to be freed with `dsv4_request_free`.
//
// Errors: `BUSY`; `OUT_OF_MEMORY`; `UNAVAILABLE` in a fork of the process.
DSV4_API DSV4_NODISCARD
dsv4_status dsv4_session_submit_feed(dsv4_session *session,
                                     const uint32_t *tokens,
                                     size_t n_tokens,
                                     dsv4_request **out,
                                     dsv4_error *err);

// Submits a `dsv4_session_generate` to its end and returns at once; each piece is an event. `options` may be NULL. `*out`
// receives the request, to be freed with `dsv4_request_free`.
//
// Errors: as `dsv4_generation_new`; `BUSY`; `UNAVAILABLE` in a fork of the process.
DSV4_API DSV4_NODISCARD
dsv4_status dsv4_session_submit_generate(dsv4_session *session,
                                         dsv4_sampler *sampler,
                                         const dsv4_generation_options *options,
                                         dsv4_request **out,
                                         dsv4_error *err);

// The oldest news that was not fetched; of kind `NONE` if there is none now. Does no work and does not wait.
//
// Errors: `BUSY`; `OUT_OF_MEMORY` for the text (call it again); `UNAVAILABLE` in a fork of the process. What goes wrong
// with the request itself is told by its end.
DSV4_API DSV4_NODISCARD
dsv4_status dsv4_request_poll(dsv4_request *request,
                              dsv4_request_event *event,
                              dsv4_error *err);

// As `dsv4_request_poll`, but works, for all who wait, or waits until there is news: for `timeout_ms` milliseconds at most,
// or without end if that is `UINT64_MAX`. A step that has begun is completed.
//
// Errors: as `dsv4_request_poll`.
DSV4_API DSV4_NODISCARD
dsv4_status dsv4_request_wait(dsv4_request *request,
                              uint64_t timeout_ms,
                              dsv4_request_event *event,
                              dsv4_error *err);

// Frees a request. One that is not over is cancelled first: the session keeps what was complete, and can be used. If
// another thread has it in a step at this moment, the end of that step is waited for. `request` may be NULL.
DSV4_API void dsv4_request_free(dsv4_request *request);

// Has requests go on, and runs one step of what they and calls with `waits_only` wait for, on this thread. `*worked`
// receives 1 if there was something to do and 0 if not, or if another thread is at it already.
//
// Errors: `UNAVAILABLE` in a fork of the process. What goes wrong in the step is told to the calls in it.
DSV4_API DSV4_NODISCARD
dsv4_status dsv4_engine_step(const dsv4_engine *engine,
                             int32_t *worked,
                             dsv4_error *err);

// A descriptor that can be read, as `poll` and `epoll` mean it, while `dsv4_engine_step` has something to do or has left
// news with requests. It is for waiting only, belongs to the engine, and lives as long as the engine and its sessions. One
// loop uses it: a step takes the signal back, so a second loop might miss it.
//
// Errors: `UNSUPPORTED` where descriptors are none (Windows): use `dsv4_request_wait`, or steps in an idle handler; `IO` if
// the system gives none; `UNAVAILABLE` in a fork of the process.
DSV4_API DSV4_NODISCARD
dsv4_status dsv4_engine_wake_fd(const dsv4_engine *engine,
                                int32_t *fd,
                                dsv4_error *err);


////////////////////////////////////////////////////////////////////////////////////////////////////
// Chat
//
// OpenAI-style messages to a prompt, exactly as the model was trained to see it, and what the model writes back to
// events: reasoning, content, tool calls. Text from users never becomes a control token, whatever it spells.

// How much the model shall reason.
enum dsv4_effort
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : int32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
    // The checkpoint's own.
    DSV4_EFFORT_DEFAULT = 0,
    // Only for checkpoints with DSpark stages, whose default it is.
    DSV4_EFFORT_LOW = 1,
    // The default of the April checkpoints.
    DSV4_EFFORT_HIGH = 2,
    // As much as the checkpoint was trained for.
    DSV4_EFFORT_MAX = 3,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum dsv4_effort dsv4_effort;
#else
typedef int32_t dsv4_effort;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// Which texts stand for which effort; they differ between releases.
enum dsv4_effort_rules
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : int32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
    // Those of the checkpoint, told by its draft module. The default.
    DSV4_EFFORT_RULES_CHECKPOINT = 0,
    // Those of April 2026.
    DSV4_EFFORT_RULES_APRIL = 1,
    // Those of July and August 2026.
    DSV4_EFFORT_RULES_DSPARK = 2,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum dsv4_effort_rules dsv4_effort_rules;
#else
typedef int32_t dsv4_effort_rules;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// What an event says.
enum dsv4_event_kind
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : int32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
    // There is no event; push more.
    DSV4_EVENT_KIND_NONE = 0,
    // More of what the model thinks.
    DSV4_EVENT_KIND_REASONING = 1,
    // More of the answer.
    DSV4_EVENT_KIND_CONTENT = 2,
    // Tool call number `call` begins; the text is the function's name.
    DSV4_EVENT_KIND_TOOL_CALL_BEGIN = 3,
    // More JSON text of the call's arguments.
    DSV4_EVENT_KIND_TOOL_CALL_ARGUMENTS = 4,
    // The call is complete, and its arguments together are a JSON object.
    DSV4_EVENT_KIND_TOOL_CALL_END = 5,
    // Output that does not follow the format, as the model wrote it. If `call` is not -1, that call is void.
    DSV4_EVENT_KIND_MALFORMED = 6,
    // The answer is complete.
    DSV4_EVENT_KIND_END = 7,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum dsv4_event_kind dsv4_event_kind;
#else
typedef int32_t dsv4_event_kind;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// Reads one answer of the model while it is written. One thread at a time; a second one gets `BUSY`.
typedef struct dsv4_chat_parser dsv4_chat_parser;

// A prompt: tokens for `dsv4_session_feed`, and text for people. Functions that take it as `const` may run on several
// threads at once.
typedef struct dsv4_prompt dsv4_prompt;

// How messages become a prompt. Fill with `dsv4_chat_options_init`, then change what you like.
typedef struct dsv4_chat_options {
    // `sizeof(dsv4_chat_options)`.
    size_t size;
    // OpenAI `tools`: a JSON array that ends with a NUL; NULL if there are none. Read during the call only.
    const char *tools;
    // OpenAI `response_format`: a JSON object that ends with a NUL; NULL for plain text. Read during the call only.
    const char *response_format;
    // 1 lets the model reason before it answers; 0 by default.
    int32_t thinking;
    // A `dsv4_effort`; anything but `DEFAULT` needs `thinking`.
    int32_t effort;
    // A `dsv4_effort_rules`.
    int32_t effort_rules;
    // 1, the default, leaves out the reasoning of answers before the last user message, as the models were trained. It
    // has no effect when tools are offered.
    int32_t drop_thinking;
    // 1, the default, ends the prompt where the model's answer begins.
    int32_t add_generation_prompt;
    // 0.
    int32_t reserved;
} dsv4_chat_options;

// One step of an answer. Set `size` to `sizeof(dsv4_chat_event)` before the call that fills it.
typedef struct dsv4_chat_event {
    // `sizeof(dsv4_chat_event)`.
    size_t size;
    // `text_len` bytes of UTF-8 and a final NUL, valid until the next call with this parser. Never NULL after success.
    const char *text;
    // Bytes of `text`, without the NUL.
    size_t text_len;
    // A `dsv4_event_kind`.
    int32_t kind;
    // Number of the tool call, from 0; -1 if the event belongs to none.
    int32_t call;
} dsv4_chat_event;

// Sets every default in `options`, a struct of `size` bytes. Use `dsv4_chat_options_init`, which passes the size as your
// header has it. `options` may be NULL; then nothing happens.
DSV4_API void dsv4_chat_options_init_sized(dsv4_chat_options *options,
                                  size_t size);

// Sets `size` and every default in `options`.
static inline void dsv4_chat_options_init(dsv4_chat_options *options)
{
    dsv4_chat_options_init_sized(options, sizeof *options);
}

// Renders `messages_len` bytes of JSON, a list of OpenAI-style messages: `[{"role": "user", "content": "Hello"}]` with
// the roles system, developer, user, assistant and tool. `options` may be NULL. `*out` receives the prompt, to be freed
// with `dsv4_prompt_free`.
//
// Where an assistant message has a field `sampled` (see `dsv4_chat_parser_message`), the prompt has those tokens, so that
// it begins with what the session that gave the answer holds, whatever spacing, order of arguments or tokens the model
// chose. They are used as long as they say what the message says (ids of calls and the way their JSON is written do not
// count): an edited message is rendered from what it says now. So is an answer with malformed parts, and one in a place
// for which the format wants another beginning: with `drop_thinking` an answer that reasoned loses its reasoning when the
// next user message comes, and the tokens differ from there on.
//
// Errors: `CHAT` naming the place in the JSON, for example `messages[2].tool_calls[0].function`, also for a key that an
// object has twice and for a list without messages; `OUT_OF_MEMORY` with the bytes; `INVALID_ARGUMENT` for
// an effort that the mode or the checkpoint does not know; `NOT_FOUND`, `IO` and `TOKENIZER` if the model's tokenizer
// cannot be read or lacks a control token.
DSV4_API DSV4_NODISCARD
dsv4_status dsv4_chat_render(const dsv4_model *model,
                             const char *messages,
                             size_t messages_len,
                             const dsv4_chat_options *options,
                             dsv4_prompt **out,
                             dsv4_error *err);

// Frees a prompt. `prompt` may be NULL.
DSV4_API void dsv4_prompt_free(dsv4_prompt *prompt);

// The prompt's tokens: `*tokens` points to `*n` ids, which live as long as the prompt.
//
// Errors: only `INVALID_ARGUMENT` and `POISONED`.
DSV4_API DSV4_NODISCARD
dsv4_status dsv4_prompt_tokens(const dsv4_prompt *prompt,
                               const uint32_t **tokens,
                               size_t *n,
                               dsv4_error *err);

// The prompt as the official encoder writes it for these messages, `*len` bytes of UTF-8 and a final NUL, which live as
// long as the prompt. An answer that has its own tokens may be spaced differently there.
// Do not encode it with `DSV4_MARKUP_PARSE` to feed it: that makes control tokens of whatever users spelt.
//
// Errors: only `INVALID_ARGUMENT` and `POISONED`.
DSV4_API DSV4_NODISCARD
dsv4_status dsv4_prompt_text(const dsv4_prompt *prompt,
                             const char **text,
                             size_t *len,
                             dsv4_error *err);

// Starts reading an answer to a prompt that was rendered with this `thinking` (0 or 1). `*out` receives the parser, to be
// freed with `dsv4_chat_parser_free`.
//
// Errors: `NOT_FOUND`, `IO` and `TOKENIZER` if the model's tokenizer cannot be read.
DSV4_API DSV4_NODISCARD
dsv4_status dsv4_chat_parser_new(const dsv4_model *model,
                                 int32_t thinking,
                                 dsv4_chat_parser **out,
                                 dsv4_error *err);

// Frees a parser. `parser` may be NULL.
DSV4_API void dsv4_chat_parser_free(dsv4_chat_parser *parser);

// Takes one generated token, the end-of-sentence token included; then take the events with `dsv4_chat_parser_next`.
//
// Errors: `TOKENIZER` for an id outside the vocabulary, `OUT_OF_MEMORY`, `BUSY`; the parser is unchanged.
DSV4_API DSV4_NODISCARD
dsv4_status dsv4_chat_parser_push_token(dsv4_chat_parser *parser,
                                        uint32_t token,
                                        dsv4_error *err);

// Takes output as `text_len` bytes of UTF-8, in which control tokens are told by their spelling. For output that is not
// there as tokens; do not mix with `dsv4_chat_parser_push_token`.
//
// Errors: `OUT_OF_MEMORY`, and the parser is unchanged; `BUSY`.
DSV4_API DSV4_NODISCARD
dsv4_status dsv4_chat_parser_push_text(dsv4_chat_parser *parser,
                                       const char *text,
                                       size_t text_len,
                                       dsv4_error *err);

// Ends the answer, for whatever reason no token follows; then take the last events with `dsv4_chat_parser_next`.
//
// Errors: `OUT_OF_MEMORY`, and the parser is unchanged; `BUSY`.
DSV4_API DSV4_NODISCARD
dsv4_status dsv4_chat_parser_finish(dsv4_chat_parser *parser,
                                    dsv4_error *err);

// The next event, or one of kind `NONE` if more has to be pushed first.
//
// Errors: `OUT_OF_MEMORY`, and the event is given again by the next call; `BUSY`.
DSV4_API DSV4_NODISCARD
dsv4_status dsv4_chat_parser_next(dsv4_chat_parser *parser,
                                  dsv4_chat_event *event,
                                  dsv4_error *err);

// The answer so far as an OpenAI-style message, to append to the messages of the next `dsv4_chat_render`: `*json` points
// to `*len` bytes of UTF-8 and a final NUL, valid until the next call with this parser.
//
// An answer that came by `dsv4_chat_parser_push_token` and is complete (after the end-of-sentence token or
// `dsv4_chat_parser_finish`) also has the field `sampled`, `{"thinking": true, "tokens": [1, 2]}`: its tokens, with which
// the next prompt has this answer exactly as the model wrote it. A server whose clients do not send the field back keeps
// it by the id that it gave the answer's first call, and puts it into the message again. See `dsv4_chat_render`.
//
// Errors: `OUT_OF_MEMORY`; `BUSY`.
DSV4_API DSV4_NODISCARD
dsv4_status dsv4_chat_parser_message(dsv4_chat_parser *parser,
                                     const char **json,
                                     size_t *len,
                                     dsv4_error *err);


////////////////////////////////////////////////////////////////////////////////////////////////////
// Cache and statistics

// Bytes of cache memory by kind. Set `size` to `sizeof(dsv4_cache_info)` before the call.
typedef struct dsv4_cache_info {
    // `sizeof(dsv4_cache_info)`.
    size_t size;
    // Sliding windows of all layers; fixed.
    uint64_t window_bytes;
    // States of the compressors; fixed.
    uint64_t state_bytes;
    // Pages of compressed entries and index keys; grow with the context.
    uint64_t page_bytes;
} dsv4_cache_info;

// Figures of an engine's cache. Set `size` to `sizeof(dsv4_cache_stats)` before the call. Counters count from the
// engine's beginning.
typedef struct dsv4_cache_stats {
    // `sizeof(dsv4_cache_stats)`.
    size_t size;
    // Most bytes of pages.
    uint64_t limit_bytes;
    // Bytes of the pages in use, by sessions and by reusable prompt beginnings.
    uint64_t used_bytes;
    // Bytes of all pages, those that wait for reuse included.
    uint64_t held_bytes;
    // Pages in use: wide (64 rows), index (64 index keys), narrow (2 rows).
    uint64_t used_pages[3];
    // Pages that wait for reuse.
    uint64_t free_pages[3];
    // Reusable blocks of 256 tokens.
    uint64_t prefix_blocks;
    // Of these, blocks that no session uses, which make room when it is needed.
    uint64_t evictable_blocks;
    // Checkpoints, at which prompts can start.
    uint64_t checkpoints;
    // Tokens of prompts that were looked up.
    uint64_t lookup_tokens;
    // Of these, tokens that were reused instead of computed.
    uint64_t hit_tokens;
    // Lookups that ended because the next block was not there.
    uint64_t ended_no_block;
    // Lookups that ended because blocks go on, but without a checkpoint.
    uint64_t ended_no_checkpoint;
    // Blocks dropped to make room.
    uint64_t evicted_blocks;
    // Checkpoints dropped to make room.
    uint64_t evicted_checkpoints;
    // Sessions forked.
    uint64_t forks;
    // Shared partial blocks copied before they were written.
    uint64_t copies_on_write;
    // Blocks and checkpoints in the host tier now; the next fields are all zero where there are no tiers.
    uint64_t host_records;
    // Their bytes.
    uint64_t host_bytes;
    // Bytes of evicted blocks and checkpoints that went to the tiers.
    uint64_t offload_bytes;
    // Nanoseconds of copying them there.
    uint64_t offload_nanos;
    // Bytes written to the disk tier.
    uint64_t written_bytes;
    // Nanoseconds of writing them, on a thread of their own.
    uint64_t write_nanos;
    // Bytes read from the disk tier.
    uint64_t read_bytes;
    // Nanoseconds of reading them, on that thread.
    uint64_t read_nanos;
    // Nanoseconds that prompts waited for the tiers.
    uint64_t wait_nanos;
    // Blocks and checkpoints that came back from the host tier.
    uint64_t host_hits;
    // Blocks and checkpoints that came back from the disk tier.
    uint64_t disk_hits;
    // Of these, those that had been read ahead when they were asked for.
    uint64_t prefetched;
    // Prompts that stopped waiting.
    uint64_t timeouts;
    // Blocks and checkpoints that the write limits kept from the disk tier.
    uint64_t limited_writes;
    // Blocks and checkpoints that were lost because memory or disk were full, or writing was too slow.
    uint64_t dropped;
    // Files of the disk tier that were deleted to make room for others.
    uint64_t deleted_files;
    // Files of the disk tier that were damaged or of another engine, and were deleted.
    uint64_t damaged_files;
    // Failures of the file system.
    uint64_t io_errors;
    // Tokens that went through the model, in all sessions.
    uint64_t computed_tokens;
} dsv4_cache_stats;

// Cache memory that the session holds now.
//
// Errors: only `INVALID_ARGUMENT`, `BUSY` and `POISONED`.
DSV4_API DSV4_NODISCARD
dsv4_status dsv4_session_get_cache_info(dsv4_session *session,
                                        dsv4_cache_info *info,
                                        dsv4_error *err);

// Figures of the engine's cache now.
//
// Errors: only `INVALID_ARGUMENT` and `POISONED`.
DSV4_API DSV4_NODISCARD
dsv4_status dsv4_engine_get_cache_stats(const dsv4_engine *engine,
                                        dsv4_cache_stats *stats,
                                        dsv4_error *err);

// Moves every reusable beginning that no session uses to the tiers, and the host tier to the folder of the disk tier,
// within the write limits. Returns when all is written: for an orderly end, after which other processes find them.
// Without tiers it does nothing.
//
// Errors: only `INVALID_ARGUMENT` and `POISONED`; what cannot be written is lost and counted.
DSV4_API DSV4_NODISCARD
dsv4_status dsv4_engine_flush_cache(const dsv4_engine *engine,
                                    dsv4_error *err);


////////////////////////////////////////////////////////////////////////////////////////////////////
// Metrics
//
// What an engine did, how long it took, and who waited. Thresholds and alerts are the host's.

// Figures of an engine. Set `size` to `sizeof(dsv4_engine_metrics)` before the call. Counters count from the engine's
// beginning; medians and 99th percentiles, in nanoseconds, are as exact as the buckets of `dsv4_engine_metrics_text`. What
// the cache has is in `dsv4_cache_stats`.
typedef struct dsv4_engine_metrics {
    // `sizeof(dsv4_engine_metrics)`.
    size_t size;
    // Tokens of prompts, calls of more than eight tokens, that went through the model.
    uint64_t prefill_tokens;
    // Tokens of shorter calls that went through the model.
    uint64_t decode_tokens;
    // Passes over the weights.
    uint64_t steps;
    // Passes that failed as a whole, or ended early because all their calls were stopped.
    uint64_t failed_steps;
    // Sessions in all steps together: divided by `steps`, the mean batch.
    uint64_t batch_sessions;
    // Time of a step, median.
    uint64_t step_p50_nanos;
    // Time of a step that 99 of 100 do not exceed.
    uint64_t step_p99_nanos;
    // Time of a call in the queue before each of its steps, median.
    uint64_t queue_p50_nanos;
    // That time, 99 of 100.
    uint64_t queue_p99_nanos;
    // From a prompt to its logits, median.
    uint64_t first_token_p50_nanos;
    // That time, 99 of 100.
    uint64_t first_token_p99_nanos;
    // Between the results of two calls of a session, the second of one token, median; the host's own time included.
    uint64_t token_p50_nanos;
    // That time, 99 of 100.
    uint64_t token_p99_nanos;
    // Sessions that exist now.
    uint64_t sessions;
    // Calls that wait for room now.
    uint64_t waiting_calls;
    // Calls that had to wait for room.
    uint64_t waits;
    // Prompts that were not admitted, since the room for all of their plan was not there.
    uint64_t refused_admissions;
    // Calls that ended with `NO_BLOCKS`, those prompts among them.
    uint64_t refused_calls;
    // Sessions whose pages were taken for others.
    uint64_t preemptions;
    // Sessions that came back from host memory.
    uint64_t restored_sessions;
    // Sessions for which there was no place in host memory, and which are computed again.
    uint64_t lost_sessions;
    // Bytes of host memory that preempted sessions take now.
    uint64_t parked_bytes;
    // Percent of the cache that sessions hold.
    uint64_t load_percent;
    // How far steps and checkpoints are cut back for want of room: 0 not at all, 3 most.
    uint32_t pressure;
    // 1 while sessions that are made are smaller ones.
    int32_t is_degraded;
    // Sessions that were made smaller.
    uint64_t degraded_sessions;
    // Routed experts that were in host memory when they were chosen. This and the next five are 0 without `host_bytes`, or
    // where all experts fit.
    uint64_t host_expert_hits;
    // Those that had to be read from the files, or were still being read.
    uint64_t host_expert_misses;
    // Reads of experts before they were chosen, where token ids tell which will be.
    uint64_t host_expert_read_ahead;
    // Bytes of experts that were read.
    uint64_t host_expert_read_bytes;
    // Nanoseconds that steps waited for these reads.
    uint64_t host_expert_wait_nanos;
    // Bytes of host memory for experts.
    uint64_t host_expert_bytes;
} dsv4_engine_metrics;

// Figures of a session since it was made; a fork begins with its parent's reused tokens. Set `size` to
// `sizeof(dsv4_session_metrics)` before the call.
typedef struct dsv4_session_metrics {
    // `sizeof(dsv4_session_metrics)`.
    size_t size;
    // Tokens of prompts that went through the model.
    uint64_t prefill_tokens;
    // Tokens of calls of at most eight tokens that went through the model.
    uint64_t decode_tokens;
    // Tokens that were taken from the cache instead.
    uint64_t reused_tokens;
    // Tokens that were computed again, because the session's pages had been taken and lost.
    uint64_t recomputed_tokens;
    // Steps it took part in.
    uint64_t steps;
    // Nanoseconds in the queue.
    uint64_t queued_nanos;
    // Nanoseconds in steps.
    uint64_t step_nanos;
    // Nanoseconds from the beginning of its last prompt's call to the logits; 0 before the first.
    uint64_t first_token_nanos;
    // How often its pages were taken for others.
    uint64_t preemptions;
    // 1 if it was made smaller, since the engine was under load.
    int32_t is_degraded;
    // 0.
    int32_t reserved;
} dsv4_session_metrics;

// Figures of the engine now.
//
// Errors: `UNAVAILABLE` in a fork of the process; otherwise only `INVALID_ARGUMENT` and `POISONED`.
DSV4_API DSV4_NODISCARD
dsv4_status dsv4_engine_get_metrics(const dsv4_engine *engine,
                                    dsv4_engine_metrics *metrics,
                                    dsv4_error *err);

// All figures of the engine, those of the cache and the histograms included, in the Prometheus text exposition format,
// version 0.0.4. `*text_len` receives the length in bytes and `text`, an array with room for `capacity` bytes, the text and
// a final NUL; with NULL and 0 the length alone is asked for, which grows with the figures: leave some room.
//
// Errors: `BUFFER_TOO_SMALL`; `UNAVAILABLE` in a fork of the process.
DSV4_API DSV4_NODISCARD
dsv4_status dsv4_engine_metrics_text(const dsv4_engine *engine,
                                     char *text,
                                     size_t capacity,
                                     size_t *text_len,
                                     dsv4_error *err);

// Figures of the session now.
//
// Errors: `UNAVAILABLE` in a fork of the process; otherwise only `INVALID_ARGUMENT`, `BUSY` and `POISONED`.
DSV4_API DSV4_NODISCARD
dsv4_status dsv4_session_get_metrics(dsv4_session *session,
                                     dsv4_session_metrics *metrics,
                                     dsv4_error *err);


////////////////////////////////////////////////////////////////////////////////////////////////////
// Plan
//
// What a model takes, before any of it is loaded.

// Memory of a model and of one session, in bytes. Set `size` to `sizeof(dsv4_plan)` before the call.
//
// Weights are mapped, not copied: the operating system reads a page when it is first used and may drop it again.
typedef struct dsv4_plan {
    // `sizeof(dsv4_plan)`.
    size_t size;
    // All weights: the sum of the next seven.
    uint64_t weight_bytes;
    // Token embedding and output head.
    uint64_t embedding_bytes;
    // Attention with compressors and indexers.
    uint64_t attention_bytes;
    // Routed experts: the bulk; a token uses a few of them.
    uint64_t routed_expert_bytes;
    // Shared experts.
    uint64_t shared_expert_bytes;
    // Routers, hyper-connections and norms.
    uint64_t other_bytes;
    // Draft module.
    uint64_t draft_bytes;
    // Tensors that mean nothing to this library.
    uint64_t unknown_bytes;
    // Tokens of the session that the next three are for.
    uint64_t context;
    // Sliding windows of all layers, per session.
    uint64_t window_bytes;
    // States of the compressors, per session.
    uint64_t state_bytes;
    // Pages of compressed entries and index keys of a full context, per session.
    uint64_t page_bytes;
    // What a session takes when it is made, padding of pages included: its windows and states.
    uint64_t session_bytes;
    // What each further 256 tokens take.
    uint64_t block_bytes;
    // What each token of `dsv4_session_options.rollback` takes.
    uint64_t rollback_token_bytes;
    // Windows of the draft module's layers, per session; not part of the other figures.
    uint64_t draft_window_bytes;
    // The limit of the engine's cache that the next two are for. On a GPU set `cache_bytes`: how much of its memory is free
    // is known when the engine is made.
    uint64_t cache_bytes;
    // Tokens of the longest session that fits under the limit alone.
    uint64_t longest_context;
    // Sessions of `context` tokens that fit under the limit together.
    uint64_t sessions;
} dsv4_plan;

// What `model` takes on an engine with `engine_options`, and each session of `context` tokens (0 is the model's
// `max_position_embeddings`) on it. Nothing is loaded or allocated. `engine_options` may be NULL.
//
// Errors: `INVALID_ARGUMENT`, also for a context longer than the model's.
DSV4_API DSV4_NODISCARD
dsv4_status dsv4_model_get_plan(const dsv4_model *model,
                                const dsv4_engine_options *engine_options,
                                uint64_t context,
                                dsv4_plan *plan,
                                dsv4_error *err);

#ifdef __cplusplus
} // extern "C"
#endif

#endif // DSV4_H
