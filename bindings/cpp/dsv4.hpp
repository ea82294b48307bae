// dsv4 from C++17: DeepSeek-V4 inside your own process.
//
//     auto model = dsv4::Model::open("DeepSeek-V4-Flash");
//     auto engine = dsv4::Engine::create(model);
//     auto session = dsv4::Session::create(engine);
//     auto sampler = dsv4::Sampler::create();
//     session.feed(model.info().bos_token_id);
//     session.feed(model.encode("Once upon a time"));
//     for (const dsv4::Piece &piece : session.generate(sampler)) std::cout << piece.text << std::flush;
//
// This is a thin layer over dsv4.h, which is the reference of what each call does; names here are those there without
// the prefix. Objects own a C object and can be moved, not copied; `get()` lends it for C functions. One that was moved
// from is empty: calls with it fail with `invalid_argument`. An object holds what it was made from, so the order of ends
// means nothing. What is said there of threads holds here: `const` functions may run on several threads at once, others
// on one at a time, and `Session::cancel` from any. Programs with an event loop need no threads: see `Request`.
//
// ERRORS
//
// A call that fails throws `dsv4::Error`, which has a status and a message. Where exceptions are off, or
// `DSV4_NO_EXCEPTIONS` is defined before this header is included, it returns a `dsv4::Result` instead, which has either the
// value or the error; `Outcome<T>` below is the one or the other. Both kinds of sources may be linked to one program. In
// sources with exceptions, `dsv4::attempt([&] { return session.feed(tokens); })` gives a `Result` of a single call.
//
// VIEWS
//
// `std::string_view` and `Span` that a function returns lie in the object and are valid as long as dsv4.h says, in general
// until the next call with the object. `Piece::text` and `Event::text` are such views: copy what you keep.

#ifndef DSV4_HPP
#define DSV4_HPP

#include <dsv4.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <iterator>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#if defined(__cpp_exceptions) && !defined(DSV4_NO_EXCEPTIONS)
#define DSV4_HPP_THROWS
#include <exception>
#endif

namespace dsv4 {

// The names of sources with and without exceptions are different ones for the linker.
#ifdef DSV4_HPP_THROWS
inline namespace throwing {
#else
inline namespace expected {
#endif

using Token = std::uint32_t;

// ---- Status and error

// A `dsv4_status`. Later versions may add numbers: treat one that is not here as a failure.
enum class Status : std::int32_t {
    ok = DSV4_STATUS_OK,
    invalid_argument = DSV4_STATUS_INVALID_ARGUMENT,
    not_found = DSV4_STATUS_NOT_FOUND,
    io = DSV4_STATUS_IO,
    corrupt = DSV4_STATUS_CORRUPT,
    config = DSV4_STATUS_CONFIG,
    unsupported_model = DSV4_STATUS_UNSUPPORTED_MODEL,
    unsupported = DSV4_STATUS_UNSUPPORTED,
    unavailable = DSV4_STATUS_UNAVAILABLE,
    out_of_memory = DSV4_STATUS_OUT_OF_MEMORY,
    context_full = DSV4_STATUS_CONTEXT_FULL,
    cancelled = DSV4_STATUS_CANCELLED,
    busy = DSV4_STATUS_BUSY,
    numeric = DSV4_STATUS_NUMERIC,
    tokenizer = DSV4_STATUS_TOKENIZER,
    chat = DSV4_STATUS_CHAT,
    poisoned = DSV4_STATUS_POISONED,
    panic = DSV4_STATUS_PANIC,
    buffer_too_small = DSV4_STATUS_BUFFER_TOO_SMALL,
    no_blocks = DSV4_STATUS_NO_BLOCKS,
    mismatch = DSV4_STATUS_MISMATCH,
};

// What went wrong: a status for programs, `what()` for people.
class Error : public std::runtime_error {
public:
    explicit Error(const dsv4_error &error) : runtime_error(error.message), status_(static_cast<Status>(error.code)) {}

    Status status() const noexcept { return status_; }

    // Name of the status as in dsv4.h: `"OUT_OF_MEMORY"`.
    const char *name() const noexcept { return dsv4_status_name(static_cast<std::int32_t>(status_)); }

private:
    Status status_;
};

// A value or an error. `*result` needs a value and `error()` an error: look first.
template <class T> class [[nodiscard]] Result {
public:
    // Implicit, for `return value;` and `return error;`.
    template <class U, class = std::enable_if_t<!std::is_same_v<std::decay_t<U>, Result>>> Result(U &&either)
        : either_(std::forward<U>(either)) {}

    bool has_value() const noexcept { return either_.index() == 0; }
    explicit operator bool() const noexcept { return has_value(); }

    T &operator*() & noexcept { return *std::get_if<0>(&either_); }
    const T &operator*() const & noexcept { return *std::get_if<0>(&either_); }
    T &&operator*() && noexcept { return std::move(*std::get_if<0>(&either_)); }
    T *operator->() noexcept { return std::get_if<0>(&either_); }
    const T *operator->() const noexcept { return std::get_if<0>(&either_); }

    const Error &error() const noexcept { return *std::get_if<1>(&either_); }

private:
    std::variant<T, Error> either_;
};

// Nothing or an error.
template <> class [[nodiscard]] Result<void> {
public:
    Result() = default;
    Result(Error error) : error_(std::move(error)) {}

    bool has_value() const noexcept { return !error_; }
    explicit operator bool() const noexcept { return has_value(); }
    const Error &error() const noexcept { return *error_; }

private:
    std::optional<Error> error_;
};

// What a call returns that can fail: the value, or a `Result` where nothing is thrown.
#ifdef DSV4_HPP_THROWS
template <class T> using Outcome = T;

// Calls `call` and gives its value or the `Error` that it threw. Other exceptions pass.
template <class F> Result<std::invoke_result_t<F &>> attempt(F &&call)
{
    try {
        if constexpr (std::is_void_v<std::invoke_result_t<F &>>) {
            call();
            return {};
        } else {
            return call();
        }
    } catch (Error &error) {
        return std::move(error);
    }
}
#else
template <class T> using Outcome = Result<T>;
#endif

// ---- Helpers

// An array that lies elsewhere; `std::span` for C++17, to which it converts.
template <class T> class Span {
public:
    using element_type = T;
    using value_type = std::remove_cv_t<T>;

    constexpr Span() noexcept = default;
    constexpr Span(T *data, std::size_t size) noexcept : data_(data), size_(size) {}

    // Implicit: vectors, arrays and spans are spans.
    template <class C, class = std::enable_if_t<std::is_convertible_v<decltype(std::data(std::declval<C &>())), T *>>>
    constexpr Span(C &&container) noexcept : data_(std::data(container)), size_(std::size(container)) {}

    constexpr T *data() const noexcept { return data_; }
    constexpr std::size_t size() const noexcept { return size_; }
    constexpr bool empty() const noexcept { return size_ == 0; }
    constexpr T *begin() const noexcept { return data_; }
    constexpr T *end() const noexcept { return data_ + size_; }
    constexpr T &operator[](std::size_t i) const noexcept { return data_[i]; }

    // What follows the first `n` elements; `n` is at most `size()`.
    constexpr Span drop(std::size_t n) const noexcept { return {data_ + n, size_ - n}; }

private:
    T *data_ = nullptr;
    std::size_t size_ = 0;
};

// `text` as a JSON string with its quotes, for messages.
inline std::string quote(std::string_view text)
{
    constexpr std::string_view hex = "0123456789abcdef";
    std::string json = "\"";
    for (const char c : text) {
        const auto code = static_cast<unsigned char>(c);
        if (c == '"' || c == '\\') {
            (json += '\\') += c;
        } else if (code < ' ') {
            ((json += "\\u00") += hex[code >> 4U]) += hex[code & 15U];
        } else {
            json += c;
        }
    }
    return json += '"';
}

namespace detail {

template <auto free> struct Free {
    template <class T> void operator()(T *object) const noexcept { free(object); }
};

// What every object is: the owner of a C object.
template <class T, auto free> class Object {
public:
    // The C object, which stays this one's.
    T *get() const noexcept { return object_.get(); }

protected:
    explicit Object(T *object) noexcept : object_(object) {}

private:
    std::unique_ptr<T, Free<free>> object_;
};

// A C struct with its defaults.
template <class C, auto init> struct Options : C {
    Options() noexcept : C() { init(this, sizeof(C)); }
};

// A C struct that a call fills.
template <class C> struct Filled : C {
    Filled() noexcept : C() { this->size = sizeof(C); }
};

template <class T> Outcome<T> failure(const dsv4_error &error)
{
#ifdef DSV4_HPP_THROWS
    throw Error(error);
#else
    return Error(error);
#endif
}

// Whether an outcome is an error, and the value of one that is none: the same words for both kinds of sources.
#ifdef DSV4_HPP_THROWS
template <class T> bool failed(const T &) noexcept { return false; }
template <class T> const T &value(const T &outcome) noexcept { return outcome; }
#else
template <class T> bool failed(const Result<T> &outcome) noexcept { return !outcome; }
template <class T> const T &value(const Result<T> &outcome) noexcept { return *outcome; }
#endif

// `function` is a call that takes the error; `make` makes the value.
template <class T, class F, class M> Outcome<T> call(F &&function, M &&make)
{
    dsv4_error error{};
    error.size = sizeof error;
    if (function(&error) != DSV4_STATUS_OK) return failure<T>(error);
    return make();
}

template <class F> Outcome<void> call(F &&function)
{
    return call<void>(std::forward<F>(function), [] { return Outcome<void>(); });
}

// A call that fills a struct.
template <class T, class F> Outcome<T> filled(F &&function)
{
    T value;
    return call<T>([&](dsv4_error *error) { return function(&value, error); }, [&] { return value; });
}

// A call that lends an array: a view of it.
template <class View, class F> Outcome<View> lent(F &&function)
{
    std::add_pointer_t<const typename View::value_type> data = nullptr;
    std::size_t size = 0;
    return call<View>([&](dsv4_error *error) { return function(&data, &size, error); }, [&] { return View(data, size); });
}

// Text or tokens whose length is asked for first; `function` takes buffer, capacity and length.
template <class C, class F> Outcome<C> gathered(std::size_t guess, std::size_t spare, F &&function)
{
    C buffer;
    std::size_t length = guess;
    const auto fill = [&](dsv4_error *error) {
        dsv4_status status = DSV4_STATUS_BUFFER_TOO_SMALL;
        while (status == DSV4_STATUS_BUFFER_TOO_SMALL) {
            buffer.resize(length + spare);
            status = function(buffer.data(), buffer.size(), &length, error);
        }
        return status;
    };
    return call<C>(fill, [&] {
        buffer.resize(length);
        return std::move(buffer);
    });
}

// A callable behind a C callback, which no exception leaves.
template <class F> struct Callback {
    F &function;
#ifdef DSV4_HPP_THROWS
    std::exception_ptr thrown = nullptr;
#endif

    // Whether to go on.
    template <class... A> bool operator()(A... arguments)
    {
#ifdef DSV4_HPP_THROWS
        try {
            return static_cast<bool>(function(arguments...));
        } catch (...) {
            thrown = std::current_exception();
            return false;
        }
#else
        return static_cast<bool>(function(arguments...));
#endif
    }

    // Throws what the callable threw.
    void pass_on() const
    {
#ifdef DSV4_HPP_THROWS
        if (thrown) std::rethrow_exception(thrown);
#endif
    }
};

// A `dsv4_file_progress_callback` for a `Callback` of an `F &&`.
template <class F>
std::int32_t tell_stage(void *callback, dsv4_file_stage stage, std::uint64_t done, std::uint64_t total)
{
    return (*static_cast<Callback<std::remove_reference_t<F>> *>(callback))(stage, done, total) ? 0 : 1;
}

// The end of every range here.
struct End {};

// An iterator over what `range.advance()` gives; `std::nullopt` ends it.
template <class R, class T> class Iterator {
public:
    using iterator_category = std::input_iterator_tag;
    using value_type = Outcome<T>;
    using difference_type = std::ptrdiff_t;
    using pointer = const value_type *;
    using reference = const value_type &;

    explicit Iterator(R *range) : range_(range), current_(range->advance()) {}

    reference operator*() const noexcept { return *current_; }
    pointer operator->() const noexcept { return &*current_; }

    Iterator &operator++()
    {
        current_ = range_->advance();
        return *this;
    }
    void operator++(int) { ++*this; }

    friend bool operator==(const Iterator &a, End) noexcept { return !a.current_; }
    friend bool operator!=(const Iterator &a, End) noexcept { return a.current_.has_value(); }

private:
    R *range_;
    std::optional<value_type> current_;
};

} // namespace detail

// ---- Structs. Fields and their meaning are those of dsv4.h; options begin with every default.

using ModelOptions = detail::Options<dsv4_model_options, &dsv4_model_options_init_sized>;
using EngineOptions = detail::Options<dsv4_engine_options, &dsv4_engine_options_init_sized>;
using SessionOptions = detail::Options<dsv4_session_options, &dsv4_session_options_init_sized>;
using CallOptions = detail::Options<dsv4_call_options, &dsv4_call_options_init_sized>;
using SamplerOptions = detail::Options<dsv4_sampler_options, &dsv4_sampler_options_init_sized>;
using GenerationOptions = detail::Options<dsv4_generation_options, &dsv4_generation_options_init_sized>;
using ChatOptions = detail::Options<dsv4_chat_options, &dsv4_chat_options_init_sized>;

using DeviceInfo = detail::Filled<dsv4_device_info>;
using ModelInfo = detail::Filled<dsv4_model_info>;
using EngineInfo = detail::Filled<dsv4_engine_info>;
using EngineMetrics = detail::Filled<dsv4_engine_metrics>;
using SessionInfo = detail::Filled<dsv4_session_info>;
using SessionMetrics = detail::Filled<dsv4_session_metrics>;
using SessionFileInfo = detail::Filled<dsv4_session_file_info>;
using CacheInfo = detail::Filled<dsv4_cache_info>;
using CacheStats = detail::Filled<dsv4_cache_stats>;
using Plan = detail::Filled<dsv4_plan>;

// ---- Library

// Checks that the library that was loaded fits the header that this program was compiled with; call it at the start.
inline Outcome<void> check_version()
{
    return detail::call([](dsv4_error *error) { return dsv4_abi_check(DSV4_VERSION_NUMBER, error); });
}

// The GPUs. Where there are none it fails with `unavailable` and the reason; the CPU works all the same.
inline Outcome<std::vector<DeviceInfo>> devices()
{
    std::vector<DeviceInfo> all;
    const auto fill = [&](dsv4_error *error) {
        std::size_t count = 0;
        dsv4_status status = dsv4_device_count(&count, error);
        if (status == DSV4_STATUS_OK) all.resize(count);
        for (std::size_t i = 0; i < all.size() && status == DSV4_STATUS_OK; i++)
            status = dsv4_device_get_info(i, &all[i], error);
        return status;
    };
    return detail::call<std::vector<DeviceInfo>>(fill, [&] { return std::move(all); });
}

// Receives the library's log as long as it lives; one at a time. The function may run on any thread, also on several at
// once; what it throws is dropped.
class Log {
public:
    using Function = std::function<void(dsv4_log_level, std::string_view)>;

    // `level` is a `dsv4_log_level`.
    static Outcome<Log> open(std::int32_t level, Function function)
    {
        auto held = std::make_unique<Held>(Held{std::move(function)});
        const auto tell = [](void *userdata, dsv4_log_level at, const char *message) {
            const auto deliver = [&](std::string_view text) {
                static_cast<Held *>(userdata)->function(at, text);
                return true;
            };
            detail::Callback<decltype(deliver)>{deliver}(std::string_view(message));
        };
        return detail::call<Log>([&](dsv4_error *error) { return dsv4_log_set(level, tell, held.get(), error); },
                                 [&] { return Log(std::move(held)); });
    }

private:
    struct Held {
        Function function;
    };
    struct Stop {
        void operator()(Held *held) const noexcept
        {
            // only a call from within the function is refused: then it may run on, and its memory must stay
            if (dsv4_log_set(DSV4_LOG_LEVEL_OFF, nullptr, nullptr, nullptr) == DSV4_STATUS_OK) delete held;
        }
    };
    explicit Log(std::unique_ptr<Held> held) : held_(held.release()) {}

    std::unique_ptr<Held, Stop> held_;
};

// ---- Model

// Whether text that spells a control token becomes that token.
enum class Markup : std::int32_t {
    text = DSV4_MARKUP_TEXT,
    parse = DSV4_MARKUP_PARSE,
};

// A prompt: tokens for a session, text for people.
class Prompt : public detail::Object<dsv4_prompt, &dsv4_prompt_free> {
public:
    Outcome<Span<const Token>> tokens() const
    {
        return detail::lent<Span<const Token>>([&](auto... out) { return dsv4_prompt_tokens(get(), out...); });
    }

    Outcome<std::string_view> text() const
    {
        return detail::lent<std::string_view>([&](auto... out) { return dsv4_prompt_text(get(), out...); });
    }

private:
    friend class Model;
    using Object::Object;
};

// An opened checkpoint folder.
class Model : public detail::Object<dsv4_model, &dsv4_model_free> {
public:
    static Outcome<Model> open(const std::string &path, const ModelOptions &options = {})
    {
        dsv4_model *model = nullptr;
        return detail::call<Model>(
            [&](dsv4_error *error) { return dsv4_model_open(path.c_str(), &options, &model, error); },
            [&] { return Model(model); });
    }

    Outcome<ModelInfo> info() const
    {
        return detail::filled<ModelInfo>([&](auto... out) { return dsv4_model_get_info(get(), out...); });
    }

    // What the model and each session of `context` tokens take; 0 is the model's longest.
    Outcome<Plan> plan(const EngineOptions &options = {}, std::uint64_t context = 0) const
    {
        return detail::filled<Plan>([&](auto... out) { return dsv4_model_get_plan(get(), &options, context, out...); });
    }

    Outcome<std::string_view> path() const
    {
        const char *path = nullptr;
        return detail::call<std::string_view>([&](dsv4_error *error) { return dsv4_model_path(get(), &path, error); },
                                              [&] { return std::string_view(path); });
    }

    Outcome<std::vector<Token>> encode(std::string_view text, Markup markup = Markup::text) const
    {
        // a text has no more tokens than bytes, and most have a quarter of that
        return detail::gathered<std::vector<Token>>(text.size() / 3 + 1, 0, [&](auto... out) {
            return dsv4_tokenizer_encode(get(), text.data(), text.size(), static_cast<std::int32_t>(markup), out...);
        });
    }

    Outcome<std::string> decode(Span<const Token> tokens) const
    {
        return detail::gathered<std::string>(tokens.size() * 5, 1, [&](auto... out) {
            return dsv4_tokenizer_decode(get(), tokens.data(), tokens.size(), out...);
        });
    }

    // The bytes that one token stands for.
    Outcome<std::string_view> token_bytes(Token token) const
    {
        return detail::lent<std::string_view>(
            [&](auto... out) { return dsv4_tokenizer_token_bytes(get(), token, out...); });
    }

    // The id of a control token by its spelling.
    Outcome<Token> token_id(std::string_view text) const
    {
        Token token = 0;
        return detail::call<Token>(
            [&](dsv4_error *error) {
                return dsv4_tokenizer_token_id(get(), text.data(), text.size(), &token, error);
            },
            [&] { return token; });
    }

    // The prompt of a JSON list of OpenAI-style messages.
    Outcome<Prompt> render(std::string_view messages, const ChatOptions &options = {}) const
    {
        dsv4_prompt *prompt = nullptr;
        return detail::call<Prompt>(
            [&](dsv4_error *error) {
                return dsv4_chat_render(get(), messages.data(), messages.size(), &options, &prompt, error);
            },
            [&] { return Prompt(prompt); });
    }

private:
    using Object::Object;
};

// Decodes one stream of tokens to text.
class Detokenizer : public detail::Object<dsv4_detokenizer, &dsv4_detokenizer_free> {
public:
    static Outcome<Detokenizer> create(const Model &model)
    {
        dsv4_detokenizer *made = nullptr;
        return detail::call<Detokenizer>(
            [&](dsv4_error *error) { return dsv4_detokenizer_new(model.get(), &made, error); },
            [&] { return Detokenizer(made); });
    }

    // The text that `token` completes.
    Outcome<std::string_view> push(Token token)
    {
        return detail::lent<std::string_view>([&](auto... out) { return dsv4_detokenizer_push(get(), token, out...); });
    }

    Outcome<std::string_view> finish()
    {
        return detail::lent<std::string_view>([&](auto... out) { return dsv4_detokenizer_finish(get(), out...); });
    }

private:
    using Object::Object;
};

// ---- Engine

// A model on a device.
class Engine : public detail::Object<dsv4_engine, &dsv4_engine_free> {
public:
    static Outcome<Engine> create(const Model &model, const EngineOptions &options = {})
    {
        dsv4_engine *engine = nullptr;
        return detail::call<Engine>(
            [&](dsv4_error *error) { return dsv4_engine_new(model.get(), &options, &engine, error); },
            [&] { return Engine(engine); });
    }

    Outcome<EngineInfo> info() const
    {
        return detail::filled<EngineInfo>([&](auto... out) { return dsv4_engine_get_info(get(), out...); });
    }

    Outcome<CacheStats> cache_stats() const
    {
        return detail::filled<CacheStats>([&](auto... out) { return dsv4_engine_get_cache_stats(get(), out...); });
    }

    Outcome<EngineMetrics> metrics() const
    {
        return detail::filled<EngineMetrics>([&](auto... out) { return dsv4_engine_get_metrics(get(), out...); });
    }

    // All figures in the Prometheus text format.
    Outcome<std::string> metrics_text() const
    {
        return detail::gathered<std::string>(16384, 1, [&](auto... out) { return dsv4_engine_metrics_text(get(), out...); });
    }

    // Moves what no session uses to the tiers, for an orderly end.
    Outcome<void> flush_cache() const
    {
        return detail::call([&](dsv4_error *error) { return dsv4_engine_flush_cache(get(), error); });
    }

    // Has requests go on, and runs one step of what they and calls with `waits_only` wait for; whether there was something
    // to do.
    Outcome<bool> step() const
    {
        std::int32_t worked = 0;
        return detail::call<bool>([&](dsv4_error *error) { return dsv4_engine_step(get(), &worked, error); },
                                  [&] { return worked != 0; });
    }

    // A descriptor that can be read while `step` has something to do or has left news with requests, for one loop to wait
    // with. It is the engine's.
    Outcome<int> wake_fd() const
    {
        std::int32_t fd = -1;
        return detail::call<int>([&](dsv4_error *error) { return dsv4_engine_wake_fd(get(), &fd, error); },
                                 [&] { return fd; });
    }

private:
    using Object::Object;
};

// ---- Sampler

// Chooses the tokens of one sequence. `SamplerOptions::greedy` takes the likeliest ones.
class Sampler : public detail::Object<dsv4_sampler, &dsv4_sampler_free> {
public:
    static Outcome<Sampler> create(const SamplerOptions &options = {})
    {
        dsv4_sampler *sampler = nullptr;
        return detail::call<Sampler>([&](dsv4_error *error) { return dsv4_sampler_new(&options, &sampler, error); },
                                     [&] { return Sampler(sampler); });
    }

    Outcome<Token> sample(Span<const float> logits)
    {
        Token token = 0;
        return detail::call<Token>(
            [&](dsv4_error *error) {
                return dsv4_sampler_sample(get(), logits.data(), logits.size(), &token, error);
            },
            [&] { return token; });
    }

    Outcome<void> accept(Token token)
    {
        return detail::call([&](dsv4_error *error) { return dsv4_sampler_accept(get(), token, error); });
    }

    Outcome<void> reset()
    {
        return detail::call([&](dsv4_error *error) { return dsv4_sampler_reset(get(), error); });
    }

private:
    using Object::Object;
};

// ---- Generation

// Why a generation ended.
enum class Finish : std::int32_t {
    none = DSV4_FINISH_NONE,
    eos = DSV4_FINISH_EOS,
    token = DSV4_FINISH_TOKEN,
    string = DSV4_FINISH_STRING,
    max_tokens = DSV4_FINISH_MAX_TOKENS,
    context_full = DSV4_FINISH_CONTEXT_FULL,
};

// One generated token and the text that became certain with it, valid until the next piece.
struct Piece {
    std::string_view text;
    Token token = 0;
    Finish finish = Finish::none;
    // The stop token's id or the stop string's index.
    std::uint32_t finish_value = 0;
};

// A running generation: a range of pieces, the last of which has a `finish`. Its last token is not in the session: to go
// on from the text, feed it.
class Generation : public detail::Object<dsv4_generation, &dsv4_generation_free> {
public:
    using Iterator = detail::Iterator<Generation, Piece>;

    // After the last piece it gives that one's `finish` again.
    Outcome<Piece> next()
    {
        dsv4_piece piece{};
        piece.size = sizeof piece;
        return detail::call<Piece>(
            [&](dsv4_error *error) { return dsv4_generation_next(get(), &piece, error); },
            [&] {
                const auto finish = static_cast<Finish>(piece.finish);
                ended_ = finish != Finish::none;
                return Piece{{piece.text, piece.text_len}, piece.token, finish, piece.finish_value};
            });
    }

    // Ends it before its time; the text that was held back.
    Outcome<std::string_view> finish()
    {
        ended_ = true;
        return detail::lent<std::string_view>([&](auto... out) { return dsv4_generation_finish(get(), out...); });
    }

    // The pieces that are still to come. Where nothing is thrown an error is the range's last element; a new range goes on.
    Iterator begin()
    {
        failed_ = false;
        return Iterator(this);
    }
    detail::End end() const noexcept { return {}; }

private:
    friend class Session;
    friend Iterator;
    using Object::Object;

    std::optional<Outcome<Piece>> advance()
    {
        if (ended_ || failed_) return std::nullopt;
        Outcome<Piece> piece = next();
        failed_ = detail::failed(piece);
        return piece;
    }

    bool ended_ = false;
    bool failed_ = false;
};

// ---- Event loops

// What is new with a request.
enum class RequestEventKind : std::int32_t {
    none = DSV4_REQUEST_EVENT_KIND_NONE,
    progress = DSV4_REQUEST_EVENT_KIND_PROGRESS,
    piece = DSV4_REQUEST_EVENT_KIND_PIECE,
    end = DSV4_REQUEST_EVENT_KIND_END,
};

// News of a request; the text is valid until the next.
struct RequestEvent {
    RequestEventKind kind = RequestEventKind::none;
    // Of a piece, its text; at the end, the message of an error.
    std::string_view text;
    // Of a prompt: the tokens that are in the session, of all.
    std::uint64_t done = 0;
    std::uint64_t total = 0;
    Token token = 0;
    // At the end of a generation.
    Finish finish = Finish::none;
    std::uint32_t finish_value = 0;
    // At the end: what a call that waits would have come to.
    Status status = Status::ok;

    // Fails with the error of a request that ended with one.
    Outcome<void> check() const
    {
        return detail::call([&](dsv4_error *error) {
            error->code = static_cast<dsv4_status>(status);
            const std::size_t length = std::min(text.size(), sizeof error->message - 1);
            if (status != Status::ok) text.copy(error->message, length);
            return error->code;
        });
    }
};

// A feed or a generation that nobody waits in, for programs with a loop of their own. Calls of `Engine::step` do the work
// of all requests together, and what is new with each is a range:
//
//     dsv4::Request request = session.submit_generate(sampler);
//     while (!request.ended()) {
//         poll(&wake, 1, -1); // Engine::wake_fd, among whatever else there is
//         engine.step();
//         for (const dsv4::RequestEvent &event : request) std::cout << event.text << std::flush;
//     }
//
// While it runs its session and sampler are `busy`, but for `Session::cancel`. It may be left at any time: one that is not
// over is cancelled then, and the session keeps what was complete.
class Request : public detail::Object<dsv4_request, &dsv4_request_free> {
public:
    using Iterator = detail::Iterator<Request, RequestEvent>;

    // The oldest news, or one of kind `none`. Does no work and does not wait.
    Outcome<RequestEvent> poll()
    {
        return fetch([&](auto... out) { return dsv4_request_poll(get(), out...); });
    }

    // As `poll`, but works, for all who wait, or waits until there is news or the time is over.
    Outcome<RequestEvent> wait(std::chrono::milliseconds limit)
    {
        const auto milliseconds = static_cast<std::uint64_t>(std::max<std::int64_t>(limit.count(), 0));
        return fetch([&](auto... out) { return dsv4_request_wait(get(), milliseconds, out...); });
    }
    Outcome<RequestEvent> wait()
    {
        return fetch([&](auto... out) { return dsv4_request_wait(get(), UINT64_MAX, out...); });
    }

    // Whether it has told its end; session and sampler are free again then.
    bool ended() const noexcept { return ended_; }

    // The news that are there now. Where nothing is thrown an error is the range's last element.
    Iterator begin()
    {
        failed_ = false;
        return Iterator(this);
    }
    detail::End end() const noexcept { return {}; }

private:
    friend class Session;
    friend Iterator;
    using Object::Object;

    template <class F> Outcome<RequestEvent> fetch(F &&function)
    {
        dsv4_request_event event{};
        event.size = sizeof event;
        return detail::call<RequestEvent>(
            [&](dsv4_error *error) { return function(&event, error); },
            [&] {
                const auto kind = static_cast<RequestEventKind>(event.kind);
                ended_ = ended_ || kind == RequestEventKind::end;
                return RequestEvent{
                    kind,
                    {event.text, event.text_len},
                    event.done,
                    event.total,
                    event.token,
                    static_cast<Finish>(event.finish),
                    event.finish_value,
                    static_cast<Status>(event.status),
                };
            });
    }

    std::optional<Outcome<RequestEvent>> advance()
    {
        if (failed_) return std::nullopt;
        Outcome<RequestEvent> event = poll();
        failed_ = detail::failed(event);
        if (!failed_ && detail::value(event).kind == RequestEventKind::none) return std::nullopt;
        return event;
    }

    bool ended_ = false;
    bool failed_ = false;
};

// ---- Session

// One token timeline with its cache.
class Session : public detail::Object<dsv4_session, &dsv4_session_free> {
public:
    static Outcome<Session> create(const Engine &engine, const SessionOptions &options = {})
    {
        dsv4_session *session = nullptr;
        return detail::call<Session>(
            [&](dsv4_error *error) { return dsv4_session_new(engine.get(), &options, &session, error); },
            [&] { return Session(session); });
    }

    // A session from a file that `save` made.
    static Outcome<Session> restore(const Engine &engine, const std::string &path, const SessionOptions &options = {})
    {
        dsv4_session *session = nullptr;
        return detail::call<Session>(
            [&](dsv4_error *error) {
                return dsv4_session_restore(engine.get(), path.c_str(), &options, &session, error);
            },
            [&] { return Session(session); });
    }

    // The same; `progress(stage, done, total)` runs as it goes on, with a `dsv4_file_stage`, and `false` cancels.
    template <class F>
    static Outcome<Session> restore(const Engine &engine, const std::string &path, const SessionOptions &options,
                                    F &&progress)
    {
        dsv4_session *session = nullptr;
        detail::Callback<std::remove_reference_t<F>> callback{progress};
        return detail::call<Session>(
            [&](dsv4_error *error) {
                const auto status = dsv4_session_restore_with_progress(
                    engine.get(), path.c_str(), &options, detail::tell_stage<F>, &callback, &session, error);
                callback.pass_on();
                return status;
            },
            [&] { return Session(session); });
    }

    // What a file says about itself; `verify_file` also compares everything in it with its checksums.
    static Outcome<SessionFileInfo> file_info(const std::string &path)
    {
        return detail::filled<SessionFileInfo>(
            [&](auto... out) { return dsv4_session_file_get_info(path.c_str(), out...); });
    }
    static Outcome<SessionFileInfo> verify_file(const std::string &path)
    {
        return detail::filled<SessionFileInfo>([&](auto... out) { return dsv4_session_file_verify(path.c_str(), out...); });
    }

    // Appends tokens and computes the logits behind the last one.
    Outcome<void> feed(Span<const Token> tokens)
    {
        return detail::call([&](dsv4_error *error) {
            return dsv4_session_feed(get(), tokens.data(), tokens.size(), nullptr, nullptr, error);
        });
    }

    Outcome<void> feed(Token token) { return feed(Span<const Token>(&token, 1)); }

    // `progress(done, total)` runs after each chunk; `false` cancels. What it throws cancels and is thrown from here.
    template <class F> Outcome<void> feed(Span<const Token> tokens, F &&progress)
    {
        detail::Callback<std::remove_reference_t<F>> callback{progress};
        const auto tell = [](void *userdata, std::size_t done, std::size_t total) -> std::int32_t {
            return (*static_cast<decltype(callback) *>(userdata))(done, total) ? 0 : 1;
        };
        return detail::call([&](dsv4_error *error) {
            const auto status = dsv4_session_feed(get(), tokens.data(), tokens.size(), tell, &callback, error);
            callback.pass_on();
            return status;
        });
    }

    // Makes the session hold exactly `tokens`, computing only what follows the beginning that it has of them: for
    // conversations that are rendered anew each turn. How many it had.
    Outcome<std::size_t> sync(Span<const Token> tokens)
    {
        std::size_t kept = 0;
        return detail::call<std::size_t>(
            [&](dsv4_error *error) {
                const auto status = dsv4_session_keep_common(get(), tokens.data(), tokens.size(), &kept, error);
                if (status != DSV4_STATUS_OK) return status;
                return dsv4_session_feed(get(), tokens.data() + kept, tokens.size() - kept, nullptr, nullptr, error);
            },
            [&] { return kept; });
    }

    // As `feed`, giving the logits behind every token, `[tokens.size(), vocab_size]`.
    Outcome<void> feed_all(Span<const Token> tokens, Span<float> logits)
    {
        return detail::call([&](dsv4_error *error) {
            return dsv4_session_feed_all(get(), tokens.data(), tokens.size(), logits.data(), logits.size(), error);
        });
    }

    // Logits behind the last token, in place, until the next call that changes the session.
    Outcome<Span<const float>> logits()
    {
        return detail::lent<Span<const float>>([&](auto... out) { return dsv4_session_logits(get(), out...); });
    }

    // The tokens in the session, in place.
    Outcome<Span<const Token>> tokens()
    {
        return detail::lent<Span<const Token>>([&](auto... out) { return dsv4_session_tokens(get(), out...); });
    }

    Outcome<SessionInfo> info()
    {
        return detail::filled<SessionInfo>([&](auto... out) { return dsv4_session_get_info(get(), out...); });
    }

    Outcome<SessionMetrics> metrics()
    {
        return detail::filled<SessionMetrics>([&](auto... out) { return dsv4_session_get_metrics(get(), out...); });
    }

    Outcome<CacheInfo> cache_info()
    {
        return detail::filled<CacheInfo>([&](auto... out) { return dsv4_session_get_cache_info(get(), out...); });
    }

    Outcome<void> clear()
    {
        return detail::call([&](dsv4_error *error) { return dsv4_session_clear(get(), error); });
    }

    // A session with the same tokens, for another continuation; nothing is copied but tokens and logits.
    Outcome<Session> fork()
    {
        dsv4_session *fork = nullptr;
        return detail::call<Session>([&](dsv4_error *error) { return dsv4_session_fork(get(), &fork, error); },
                                     [&] { return Session(fork); });
    }

    // Goes back to the first `position` tokens.
    Outcome<void> truncate(std::uint64_t position)
    {
        return detail::call([&](dsv4_error *error) { return dsv4_session_truncate(get(), position, error); });
    }

    // Goes back to what the session has in common with `tokens`; how many tokens that is.
    Outcome<std::size_t> keep_common(Span<const Token> tokens)
    {
        std::size_t kept = 0;
        return detail::call<std::size_t>(
            [&](dsv4_error *error) {
                return dsv4_session_keep_common(get(), tokens.data(), tokens.size(), &kept, error);
            },
            [&] { return kept; });
    }

    Outcome<void> set_call_options(const CallOptions &options)
    {
        return detail::call([&](dsv4_error *error) { return dsv4_session_set_call_options(get(), &options, error); });
    }

    // Cancels the running call, or the next one, from any thread.
    Outcome<void> cancel() const
    {
        return detail::call([&](dsv4_error *error) { return dsv4_session_cancel(get(), error); });
    }

    // Takes back a cancel that no call has seen.
    Outcome<void> reset_cancel() const
    {
        return detail::call([&](dsv4_error *error) { return dsv4_session_reset_cancel(get(), error); });
    }

    // Saves to a file; `complete` for the last save of a session.
    Outcome<void> save(const std::string &path, bool complete)
    {
        return detail::call(
            [&](dsv4_error *error) { return dsv4_session_save(get(), path.c_str(), complete ? 1 : 0, error); });
    }

    // The same with progress, as that of `restore`; the old file stays if it cancels or throws.
    template <class F> Outcome<void> save(const std::string &path, bool complete, F &&progress)
    {
        detail::Callback<std::remove_reference_t<F>> callback{progress};
        return detail::call([&](dsv4_error *error) {
            const auto status = dsv4_session_save_with_progress(
                get(), path.c_str(), complete ? 1 : 0, detail::tell_stage<F>, &callback, error);
            callback.pass_on();
            return status;
        });
    }

    // Starts a generation from the session's logits; nothing is computed yet.
    Outcome<Generation> generate(Sampler &sampler, const GenerationOptions &options = {})
    {
        dsv4_generation *generation = nullptr;
        return detail::call<Generation>(
            [&](dsv4_error *error) {
                return dsv4_generation_new(get(), sampler.get(), &options, &generation, error);
            },
            [&] { return Generation(generation); });
    }

    // Submits a `feed` and returns at once; what is wrong with the tokens is told at the end. They are copied.
    Outcome<Request> submit_feed(Span<const Token> tokens)
    {
        dsv4_request *request = nullptr;
        return detail::call<Request>(
            [&](dsv4_error *error) {
                return dsv4_session_submit_feed(get(), tokens.data(), tokens.size(), &request, error);
            },
            [&] { return Request(request); });
    }

    // Submits a generation to its end and returns at once; each piece is an event.
    Outcome<Request> submit_generate(Sampler &sampler, const GenerationOptions &options = {})
    {
        dsv4_request *request = nullptr;
        return detail::call<Request>(
            [&](dsv4_error *error) {
                return dsv4_session_submit_generate(get(), sampler.get(), &options, &request, error);
            },
            [&] { return Request(request); });
    }

private:
    using Object::Object;
};

// ---- Chat

// What an event says.
enum class EventKind : std::int32_t {
    none = DSV4_EVENT_KIND_NONE,
    reasoning = DSV4_EVENT_KIND_REASONING,
    content = DSV4_EVENT_KIND_CONTENT,
    tool_call_begin = DSV4_EVENT_KIND_TOOL_CALL_BEGIN,
    tool_call_arguments = DSV4_EVENT_KIND_TOOL_CALL_ARGUMENTS,
    tool_call_end = DSV4_EVENT_KIND_TOOL_CALL_END,
    malformed = DSV4_EVENT_KIND_MALFORMED,
    end = DSV4_EVENT_KIND_END,
};

// One step of an answer; the text is valid until the next one.
struct Event {
    EventKind kind = EventKind::none;
    std::string_view text;
    // Number of the tool call, or -1.
    std::int32_t call = -1;
};

// Reads an answer while it is written: push, then take the events, which are a range.
class ChatParser : public detail::Object<dsv4_chat_parser, &dsv4_chat_parser_free> {
public:
    using Iterator = detail::Iterator<ChatParser, Event>;

    // `thinking` as in the options with which the prompt was rendered.
    static Outcome<ChatParser> create(const Model &model, bool thinking = false)
    {
        dsv4_chat_parser *parser = nullptr;
        return detail::call<ChatParser>(
            [&](dsv4_error *error) { return dsv4_chat_parser_new(model.get(), thinking ? 1 : 0, &parser, error); },
            [&] { return ChatParser(parser); });
    }

    Outcome<void> push(Token token)
    {
        return detail::call([&](dsv4_error *error) { return dsv4_chat_parser_push_token(get(), token, error); });
    }

    Outcome<void> push(std::string_view text)
    {
        return detail::call(
            [&](dsv4_error *error) { return dsv4_chat_parser_push_text(get(), text.data(), text.size(), error); });
    }

    Outcome<void> finish()
    {
        return detail::call([&](dsv4_error *error) { return dsv4_chat_parser_finish(get(), error); });
    }

    // The next event, or one of kind `none` if more has to be pushed first.
    Outcome<Event> next()
    {
        dsv4_chat_event event{};
        event.size = sizeof event;
        return detail::call<Event>(
            [&](dsv4_error *error) { return dsv4_chat_parser_next(get(), &event, error); },
            [&] { return Event{static_cast<EventKind>(event.kind), {event.text, event.text_len}, event.call}; });
    }

    // The answer so far as a JSON message, to append to the next turn's messages.
    Outcome<std::string_view> message()
    {
        return detail::lent<std::string_view>([&](auto... out) { return dsv4_chat_parser_message(get(), out...); });
    }

    // The events that are there now. Where nothing is thrown an error is the range's last element.
    Iterator begin()
    {
        failed_ = false;
        return Iterator(this);
    }
    detail::End end() const noexcept { return {}; }

private:
    friend Iterator;
    using Object::Object;

    std::optional<Outcome<Event>> advance()
    {
        if (failed_) return std::nullopt;
        Outcome<Event> event = next();
        failed_ = detail::failed(event);
        if (!failed_ && detail::value(event).kind == EventKind::none) return std::nullopt;
        return event;
    }

    bool failed_ = false;
};

// A generation and the parser that reads it: a range of events, which generates as it goes.
class Answer {
public:
    using Iterator = detail::Iterator<Answer, Event>;

    Answer(Generation generation, ChatParser parser) : generation_(std::move(generation)), parser_(std::move(parser)) {}

    // The next event, or one of kind `none` after the last.
    Outcome<Event> next()
    {
        dsv4_chat_event event{};
        event.size = sizeof event;
        const auto pull = [&](dsv4_error *error) -> dsv4_status {
            for (;;) {
                dsv4_status status = dsv4_chat_parser_next(parser_.get(), &event, error);
                if (status != DSV4_STATUS_OK || event.kind != DSV4_EVENT_KIND_NONE || ended_) return status;
                dsv4_piece piece{};
                piece.size = sizeof piece;
                status = dsv4_generation_next(generation_.get(), &piece, error);
                if (status == DSV4_STATUS_OK) status = dsv4_chat_parser_push_token(parser_.get(), piece.token, error);
                if (status != DSV4_STATUS_OK) return status;
                last_ = piece.token;
                finish_ = static_cast<Finish>(piece.finish);
                if (finish_ == Finish::none) continue;
                ended_ = true;
                status = dsv4_chat_parser_finish(parser_.get(), error);
                if (status != DSV4_STATUS_OK) return status;
            }
        };
        return detail::call<Event>(
            pull, [&] { return Event{static_cast<EventKind>(event.kind), {event.text, event.text_len}, event.call}; });
    }

    // The answer so far as a JSON message, to append to the next turn's messages.
    Outcome<std::string_view> message() { return parser_.message(); }

    // Why it ended; `none` while it goes on.
    Finish finish() const noexcept { return finish_; }

    // The last token, which is not in the session yet.
    Token last_token() const noexcept { return last_; }

    // The events that are still to come. Where nothing is thrown an error is the range's last element; a new range goes on.
    Iterator begin()
    {
        failed_ = false;
        return Iterator(this);
    }
    detail::End end() const noexcept { return {}; }

private:
    friend Iterator;

    std::optional<Outcome<Event>> advance()
    {
        if (failed_) return std::nullopt;
        Outcome<Event> event = next();
        failed_ = detail::failed(event);
        if (!failed_ && detail::value(event).kind == EventKind::none) return std::nullopt;
        return event;
    }

    Generation generation_;
    ChatParser parser_;
    Finish finish_ = Finish::none;
    Token last_ = 0;
    bool ended_ = false;
    bool failed_ = false;
};

} // namespace throwing or expected
} // namespace dsv4

#undef DSV4_HPP_THROWS

#endif // DSV4_HPP
