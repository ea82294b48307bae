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
// `find_package(dsv4)` with the targets `dsv4::dsv4` (shared) and `dsv4::static`. The library links no CUDA and no C++
// library; the NVIDIA driver is opened at run time where there is one. A process can hold one copy of the static
// library and, beside it, copies of the shared one.
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
// this library does not know must be zero. Set `size` of structs that a call fills: `dsv4_piece piece = {sizeof piece};`.
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
// on the calling thread, except the log's. Signals may arrive at any time; calls go on.
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
// `OUT_OF_MEMORY` with the bytes asked for; the objects are as before the call. What remains are small allocations of
// fixed size inside the Rust standard library and other libraries, and the tokenizer's own tables: if the system refuses
// one of those, the process aborts, as it does in most programs.
//
// MAPPED FILES
//
// Weights are mapped read-only. Sizes are checked when a model is opened and again with each step; a file that another
// process truncates within a step makes the system raise SIGBUS, as with any mapped file. Replace checkpoints by
// renaming folders, never by writing into files that are in use.

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
    // A checkpoint is damaged, truncated or contradicts itself.
    DSV4_STATUS_CORRUPT = 4,
    // `config.json` has a known key with a wrong type or an impossible value.
    DSV4_STATUS_CONFIG = 5,
    // A model of another architecture; never loaded by guess.
    DSV4_STATUS_UNSUPPORTED_MODEL = 6,
    // A valid request that this build or device cannot serve.
    DSV4_STATUS_UNSUPPORTED = 7,
    // A device or library that was asked for is not there; the message says the remedy.
    DSV4_STATUS_UNAVAILABLE = 8,
    // An allocation sized by model, context, batch or file was refused; the message has the bytes. The objects of the
    // call are as before it and can be used on.
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
    // `sizeof(dsv4_error)`, or 0, which stands for the layout of the first version. Never written.
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
// `UNSUPPORTED_MODEL` for the model itself, `TOKENIZER` if it is preloaded; messages name the file, key or tensor.
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
// Errors: `BUFFER_TOO_SMALL`; `INVALID_ARGUMENT`, for example for text that is not UTF-8; `NOT_FOUND`, `IO` and
// `TOKENIZER` if the model's tokenizer cannot be read.
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
// `dsv4_detokenizer`, which waits for incomplete characters.
//
// `*text_len` receives the length in bytes and `text`, an array with room for `capacity` bytes, the text and a final
// NUL, so that `capacity` must be at least the length plus 1.
//
// Errors: `BUFFER_TOO_SMALL`; `TOKENIZER` for an id outside the vocabulary; as `dsv4_tokenizer_encode`.
DSV4_API DSV4_NODISCARD
dsv4_status dsv4_tokenizer_decode(const dsv4_model *model,
                                  const uint32_t *tokens,
                                  size_t n_tokens,
                                  char *text,
                                  size_t capacity,
                                  size_t *text_len,
                                  dsv4_error *err);

// The bytes that one token stands for: a control token's spelling, or a piece of text that may begin or end within a
// character. `*bytes` points to `*len` bytes without a final NUL, which live as long as the model or an object made
// from it.
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
// Errors: `NOT_FOUND`, `IO` and `TOKENIZER` if the model's tokenizer cannot be read.
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
    // Most tokens that go through the model at once, 1 to 65536; 256 by default. More is faster and takes more memory,
    // and a call is cancelled within one such chunk.
    uint32_t prefill_chunk;
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
// Errors: `INVALID_ARGUMENT` for an option out of range; `UNAVAILABLE` for a device that is not there and
// `UNSUPPORTED` for one that this version cannot run on; `OUT_OF_MEMORY`.
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
// Errors: `INVALID_ARGUMENT` if the context is longer than the model's; `OUT_OF_MEMORY`.
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
// is fed then); `CANCELLED`, `OUT_OF_MEMORY`, `NUMERIC`, `IO` (the chunks that were complete stay, see
// `dsv4_session_info.position`; feed the rest to go on).
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
// Errors: `INVALID_ARGUMENT` if there are none: before the first token, and after a `feed` that stopped half-way.
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

// Empties the session; its memory is kept for reuse. Generations that were started on it end with an error.
//
// Errors: only `INVALID_ARGUMENT`, `BUSY` and `POISONED`.
DSV4_API DSV4_NODISCARD dsv4_status dsv4_session_clear(dsv4_session *session, dsv4_error *err);

// Cancels the running call of this session, or its next one if none is running: it returns `CANCELLED` within the time
// of one layer of one chunk. From any thread, at any time before the session is freed; it never waits.
//
// Errors: only `INVALID_ARGUMENT`.
DSV4_API DSV4_NODISCARD
dsv4_status dsv4_session_cancel(const dsv4_session *session,
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
    // still count; temperature, top_k, top_p, min_p and seed mean nothing then. Greedy decoding is this choice and
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
// Errors: only `INVALID_ARGUMENT`, `BUSY` and `POISONED`.
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
// but the last one that was handed out. Between two calls the session may be read, but not fed or cleared.
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
    // character or a possible stop string is incomplete.
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
// session.
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
// Errors: `INVALID_ARGUMENT` if the session has no logits, or for an option out of range; `NOT_FOUND`, `IO` and
// `TOKENIZER` if the model's tokenizer cannot be read.
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
// `dsv4_generation_next`. The tokens that were told of stay in the session, but for the last.
DSV4_API DSV4_NODISCARD
dsv4_status dsv4_session_generate(dsv4_session *session,
                                  dsv4_sampler *sampler,
                                  const dsv4_generation_options *options,
                                  dsv4_piece_callback callback,
                                  void *userdata,
                                  int32_t *finish,
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
// Errors: `CHAT` naming the place in the JSON, for example `messages[2].tool_calls[0].function`; `INVALID_ARGUMENT` for
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

// The prompt as the official encoder writes it, `*len` bytes of UTF-8 and a final NUL, which live as long as the prompt.
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
// Errors: `TOKENIZER` for an id outside the vocabulary; the parser is unchanged.
DSV4_API DSV4_NODISCARD
dsv4_status dsv4_chat_parser_push_token(dsv4_chat_parser *parser,
                                        uint32_t token,
                                        dsv4_error *err);

// Takes output as `text_len` bytes of UTF-8, in which control tokens are told by their spelling. For output that is not
// there as tokens; do not mix with `dsv4_chat_parser_push_token`.
//
// Errors: only `INVALID_ARGUMENT`, `BUSY` and `POISONED`.
DSV4_API DSV4_NODISCARD
dsv4_status dsv4_chat_parser_push_text(dsv4_chat_parser *parser,
                                       const char *text,
                                       size_t text_len,
                                       dsv4_error *err);

// Ends the answer, for whatever reason no token follows; then take the last events with `dsv4_chat_parser_next`.
//
// Errors: only `INVALID_ARGUMENT`, `BUSY` and `POISONED`.
DSV4_API DSV4_NODISCARD
dsv4_status dsv4_chat_parser_finish(dsv4_chat_parser *parser,
                                    dsv4_error *err);

// The next event, or one of kind `NONE` if more has to be pushed first.
//
// Errors: only `INVALID_ARGUMENT`, `BUSY` and `POISONED`.
DSV4_API DSV4_NODISCARD
dsv4_status dsv4_chat_parser_next(dsv4_chat_parser *parser,
                                  dsv4_chat_event *event,
                                  dsv4_error *err);

// The answer so far as an OpenAI-style message, to append to the messages of the next `dsv4_chat_render`: `*json` points
// to `*len` bytes of UTF-8 and a final NUL, valid until the next call with this parser.
//
// Errors: only `INVALID_ARGUMENT`, `BUSY` and `POISONED`.
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

// Cache memory that the session holds now.
//
// Errors: only `INVALID_ARGUMENT`, `BUSY` and `POISONED`.
DSV4_API DSV4_NODISCARD
dsv4_status dsv4_session_get_cache_info(dsv4_session *session,
                                        dsv4_cache_info *info,
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
