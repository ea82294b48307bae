// dsv4.hpp as a program with exceptions meets it: objects, ranges, errors, callbacks that throw, views. What sources
// without exceptions get is in cpp_expected.cpp, which is linked to the same program.

#include <dsv4.hpp>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include <poll.h>

#if __cplusplus >= 202002L
#include <ranges>
#include <span>
#endif

#ifdef DSV4_HPP_THROWS
#error "dsv4.hpp leaks a macro"
#endif

#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);                                       \
            std::exit(1);                                                                                              \
        }                                                                                                              \
    } while (0)

void without_exceptions(const char *path);

namespace {

using dsv4::Status;

template <class F> void refused(Status status, const char *part, F &&call)
{
    try {
        call();
    } catch (const dsv4::Error &error) {
        if (error.status() == status && std::strstr(error.what(), part) != nullptr) return;
        std::fprintf(stderr, "%s: %s, expected %s\n", error.name(), error.what(), part);
        std::exit(1);
    }
    std::fprintf(stderr, "not refused: %s\n", part);
    std::exit(1);
}

struct Fixture {
    explicit Fixture(const char *path) : model(dsv4::Model::open(path)), engine(make(model))
    {
        greedy.greedy = 1;
        few.max_tokens = 12;
    }

    static dsv4::Engine make(const dsv4::Model &model)
    {
        dsv4::EngineOptions options;
        options.threads = 1;
        options.prefill_chunk = 16;
        return dsv4::Engine::create(model, options);
    }

    dsv4::Session session() const
    {
        dsv4::SessionOptions options;
        options.context = 512;
        return dsv4::Session::create(engine, options);
    }

    dsv4::Model model;
    dsv4::Engine engine;
    dsv4::SamplerOptions greedy;
    dsv4::GenerationOptions few;
};

static_assert(!std::is_copy_constructible_v<dsv4::Model> && std::is_nothrow_move_constructible_v<dsv4::Model>);
static_assert(!std::is_copy_assignable_v<dsv4::Session> && std::is_nothrow_move_assignable_v<dsv4::Session>);
static_assert(sizeof(dsv4::Session) == sizeof(void *));
static_assert(!std::is_copy_constructible_v<dsv4::Request> && std::is_nothrow_move_constructible_v<dsv4::Request>);
static_assert(std::is_same_v<dsv4::Outcome<int>, int>);
#if __cplusplus >= 202002L
static_assert(std::ranges::input_range<dsv4::Generation> && std::ranges::input_range<dsv4::ChatParser>);
static_assert(std::ranges::input_range<dsv4::Request>);
static_assert(std::is_convertible_v<dsv4::Span<const float>, std::span<const float>>);
#endif

void text_round_trips_and_structs_are_filled(const Fixture &f)
{
    const std::string text = "Der Bär trinkt \"Tee\".\n";
    const auto tokens = f.model.encode(text);
    CHECK(!tokens.empty() && f.model.decode(tokens) == text);
    CHECK(f.model.encode("").empty() && f.model.decode({}).empty());
    std::string bytes;
    dsv4::Detokenizer stream = dsv4::Detokenizer::create(f.model);
    std::string streamed;
    for (const dsv4::Token token : tokens) {
        bytes += f.model.token_bytes(token);
        streamed += stream.push(token);
    }
    streamed += stream.finish();
    CHECK(bytes == text && streamed == text);
    CHECK(f.model.token_id(f.model.token_bytes(f.model.info().bos_token_id)) == f.model.info().bos_token_id);
    CHECK(f.model.plan({}, 256).context == 256 && f.engine.info().threads == 1);
    CHECK(std::string(f.model.path()).find("tiny-v4") != std::string::npos);
    CHECK(f.engine.metrics_text().find("dsv4_") != std::string::npos && !f.engine.step());
    f.engine.flush_cache();
    CHECK(dsv4::quote("a\"b\\c\n\x1f") == R"("a\"b\\c\u000a\u001f")");
    dsv4::check_version();
    if (const auto devices = dsv4::attempt([] { return dsv4::devices(); }); !devices)
        CHECK(devices.error().status() == Status::unavailable);
}

void generations_are_ranges(const Fixture &f)
{
    dsv4::Session session = f.session();
    dsv4::Sampler sampler = dsv4::Sampler::create(f.greedy);
    const auto prompt = f.model.encode("The old man looked at the sea and");
    session.feed(prompt);
    std::string text;
    std::vector<dsv4::Token> tokens;
    dsv4::Generation generation = session.generate(sampler, f.few);
    for (const dsv4::Piece &piece : generation) {
        text += piece.text;
        tokens.push_back(piece.token);
        CHECK((piece.finish == dsv4::Finish::max_tokens) == (tokens.size() == 12));
    }
    CHECK(tokens.size() == 12 && text.size() > 10);
    CHECK(!(generation.begin() != generation.end()) && generation.next().finish == dsv4::Finish::max_tokens);

    // by hand, with logits in place
    session.clear();
    session.feed(prompt);
    for (const dsv4::Token wanted : tokens) {
        const dsv4::Token token = sampler.sample(session.logits());
        CHECK(token == wanted);
        session.feed(token);
    }
    CHECK(session.tokens().size() == prompt.size() + 12 && session.info().position == session.tokens().size());

    // left in the middle, and what was held back
    session.sync(prompt);
    dsv4::Generation left = session.generate(sampler, f.few);
    CHECK(left.next().token == tokens[0] && left.finish().size() < 8);
    refused(Status::invalid_argument, "was ended", [&] { left.next(); });
}

void sessions_fork_truncate_and_go_on(const Fixture &f)
{
    dsv4::Session session = f.session();
    const auto tokens = f.model.encode("Two ways lead from here, and both are long.");
    session.feed(tokens);
    const std::vector<float> logits(session.logits().begin(), session.logits().end());
    dsv4::Session fork = session.fork();
    fork.feed(tokens[0]);
    fork.truncate(tokens.size());
    CHECK(std::equal(logits.begin(), logits.end(), fork.logits().begin()));
    CHECK(session.sync(tokens) == tokens.size());
    std::vector<float> rows(tokens.size() * logits.size());
    session.clear();
    session.feed_all(tokens, rows);
    CHECK(std::equal(logits.begin(), logits.end(), rows.end() - static_cast<std::ptrdiff_t>(logits.size())));
    dsv4::CallOptions calls;
    calls.priority = 1;
    session.set_call_options(calls);
    CHECK(session.metrics().steps > 0 && session.cache_info().window_bytes > 0);
    CHECK(f.engine.cache_stats().forks >= 1 && f.engine.metrics().steps > 0);

    const std::string path = "cpp.session";
    session.save(path, true);
    dsv4::Session restored = dsv4::Session::restore(f.engine, path);
    const auto no = [](dsv4_file_stage, std::uint64_t, std::uint64_t) { return false; };
    const auto yes = [](dsv4_file_stage, std::uint64_t done, std::uint64_t total) { return done <= total; };
    refused(Status::cancelled, "the file is as it was", [&] { session.save(path + ".2", true, no); });
    refused(Status::cancelled, "there is no session", [&] { dsv4::Session::restore(f.engine, path, {}, no); });
    session.save(path + ".2", true, yes);
    CHECK(dsv4::Session::restore(f.engine, path + ".2", {}, yes).info().position == session.info().position);
    CHECK(std::remove((path + ".2").c_str()) == 0);
    CHECK(std::equal(logits.begin(), logits.end(), restored.logits().begin()));
    CHECK(dsv4::Session::file_info(path).tokens == tokens.size());
    CHECK(dsv4::Session::verify_file(path).saves == 1);
    CHECK(std::remove(path.c_str()) == 0);
}

void errors_have_a_status_and_name_what_is_wrong(const Fixture &f)
{
    refused(Status::not_found, "/nowhere", [] { dsv4::Model::open("/nowhere"); });
    refused(Status::invalid_argument, "temperature", [] {
        dsv4::SamplerOptions options;
        options.temperature = 0;
        dsv4::Sampler::create(options);
    });
    dsv4::Session session = f.session();
    refused(Status::invalid_argument, "no logits", [&] { session.logits(); });
    refused(Status::context_full, "512", [&] { session.feed(std::vector<dsv4::Token>(600, 300)); });
    refused(Status::chat, "messages[0]", [&] { f.model.render(R"([{"role": "king"}])"); });
    // an object that was moved from is empty, and says so
    dsv4::Session moved = std::move(session);
    refused(Status::invalid_argument, "session is NULL", [&] { session.feed(1); }); // NOLINT: that is the test
    moved.feed(300);
    const auto result = dsv4::attempt([&] { return moved.truncate(7); });
    CHECK(!result && result.error().status() == Status::invalid_argument);
    CHECK(dsv4::attempt([&] { moved.truncate(0); }) && *dsv4::attempt([] { return 7; }) == 7);
}

void callbacks_may_throw_and_cancel(const Fixture &f)
{
    dsv4::Session session = f.session();
    const std::vector<dsv4::Token> tokens(64, 300);
    const dsv4::Token one[] = {300};
    struct Mine : std::exception {};
    bool caught = false;
    try {
        session.feed(tokens, [](std::size_t, std::size_t) -> bool { throw Mine{}; });
    } catch (const Mine &) {
        caught = true;
    }
    CHECK(caught && session.info().position == 16);
    int chunks = 0;
    refused(Status::cancelled, "32 of 48", [&] {
        session.feed(dsv4::Span<const dsv4::Token>(tokens).drop(16), [&](std::size_t, std::size_t total) {
            CHECK(total == 48);
            return ++chunks < 2;
        });
    });
    session.feed(one, [](std::size_t done, std::size_t total) { return done <= total; });

    // from another thread, while the call runs
    std::thread other;
    refused(Status::cancelled, "cancelled", [&] {
        session.feed(tokens, [&](std::size_t, std::size_t) {
            if (!other.joinable()) other = std::thread([&] { session.cancel(); });
            other.join();
            return true;
        });
    });

    // what a log function throws is dropped
    int messages = 0;
    {
        const dsv4::Log log = dsv4::Log::open(DSV4_LOG_LEVEL_INFO, [&](dsv4_log_level, std::string_view text) {
            CHECK(!text.empty());
            messages++;
            throw Mine{};
        });
        Fixture::make(f.model);
    }
    const int before = messages;
    CHECK(before > 0);
    Fixture::make(f.model);
    CHECK(messages == before);
}

void answers_are_ranges_of_events(const Fixture &f)
{
    dsv4::Session session = f.session();
    dsv4::Sampler sampler = dsv4::Sampler::create(f.greedy);
    std::string messages = R"([{"role": "user", "content": )" + dsv4::quote("Tell me about the \"sea\".") + "}";
    for (int turn = 0; turn < 2; turn++) {
        const dsv4::Prompt prompt = f.model.render(messages + "]");
        CHECK(!prompt.text().empty());
        const std::size_t kept = session.sync(prompt.tokens());
        CHECK((kept > 10) == (turn == 1));
        dsv4::Answer answer(session.generate(sampler, f.few), dsv4::ChatParser::create(f.model));
        std::string text;
        dsv4::EventKind last = dsv4::EventKind::none;
        for (const dsv4::Event &event : answer) {
            if (event.kind == dsv4::EventKind::content) text += event.text;
            last = event.kind;
        }
        CHECK(text.size() > 5 && last == dsv4::EventKind::end && answer.finish() != dsv4::Finish::none);
        CHECK(answer.next().kind == dsv4::EventKind::none && answer.last_token() > 0);
        (messages += ',') += answer.message();
        messages += R"(,{"role": "user", "content": "And then?"})";
    }
    dsv4::ChatParser parser = dsv4::ChatParser::create(f.model);
    parser.push("Hello");
    parser.finish();
    std::string text;
    for (const dsv4::Event &event : parser) text += event.text;
    CHECK(text == "Hello");
}

// One thread with one descriptor.
struct Loop {
    explicit Loop(const dsv4::Engine &on) : engine(on), wake{on.wake_fd(), POLLIN, 0} {}

    void run(std::vector<dsv4::Request> &requests, std::vector<std::vector<dsv4::Token>> &tokens)
    {
        const auto over = [](const dsv4::Request &request) { return request.ended(); };
        while (!std::all_of(requests.begin(), requests.end(), over)) {
            CHECK(::poll(&wake, 1, 20000) == 1);
            engine.step();
            for (std::size_t i = 0; i < requests.size(); i++) {
                for (const dsv4::RequestEvent &event : requests[i]) {
                    event.check();
                    if (event.kind == dsv4::RequestEventKind::piece) tokens[i].push_back(event.token);
                    if (event.kind == dsv4::RequestEventKind::progress) CHECK(event.done <= event.total);
                }
            }
        }
        CHECK(!engine.step() && ::poll(&wake, 1, 0) == 0);
    }

    const dsv4::Engine &engine;
    pollfd wake;
};

void requests_share_steps_and_give_what_calls_give(const Fixture &f)
{
    constexpr std::size_t n = 4;
    std::vector<std::vector<dsv4::Token>> expected(n);
    std::vector<std::vector<dsv4::Token>> generated(n);
    std::vector<dsv4::Session> sessions;
    std::vector<dsv4::Sampler> samplers;
    std::vector<dsv4::Request> requests;
    for (std::size_t i = 0; i < n; i++) {
        const std::vector<dsv4::Token> prompt(40, static_cast<dsv4::Token>(300 + i));
        dsv4::SamplerOptions chance;
        chance.seed = i;
        samplers.push_back(dsv4::Sampler::create(chance));
        sessions.push_back(f.session());
        sessions[i].feed(prompt);
        for (const dsv4::Piece &piece : sessions[i].generate(samplers[i], f.few)) expected[i].push_back(piece.token);
        samplers[i].reset();
        sessions[i].clear();
        requests.push_back(sessions[i].submit_feed(prompt));
        CHECK(requests[i].poll().kind == dsv4::RequestEventKind::none && !requests[i].ended());
        refused(Status::busy, "request", [&] { sessions[i].clear(); });
    }
    Loop loop(f.engine);
    loop.run(requests, generated);
    requests.clear();

    const dsv4::EngineMetrics before = f.engine.metrics();
    for (std::size_t i = 0; i < n; i++) requests.push_back(sessions[i].submit_generate(samplers[i], f.few));
    loop.run(requests, generated);
    const dsv4::EngineMetrics after = f.engine.metrics();
    CHECK(generated == expected);
    CHECK(after.batch_sessions - before.batch_sessions >= (n - 1) * (after.steps - before.steps));
}

void requests_end_in_words_and_when_they_are_left(const Fixture &f)
{
    using dsv4::RequestEventKind;
    dsv4::Session session = f.session();
    const std::vector<dsv4::Token> tokens(100, 300);
    {
        dsv4::Request request = session.submit_feed(tokens);
        const dsv4::RequestEvent first = request.wait();
        CHECK(first.kind == RequestEventKind::progress && first.done == 16 && first.total == 100 && first.text.empty());
        session.cancel();
        const dsv4::RequestEvent last = request.wait(std::chrono::seconds(20));
        CHECK(last.kind == RequestEventKind::end && last.status == Status::cancelled && request.ended());
        refused(Status::cancelled, "cancelled", [&] { last.check(); });
        CHECK(request.wait(std::chrono::milliseconds(-1)).kind == RequestEventKind::none);
        CHECK(!(request.begin() != request.end()));
    }
    // one that is left is cancelled; one that is moved goes on
    {
        dsv4::Request request = session.submit_feed(tokens);
        CHECK(request.wait().done == 16);
        dsv4::Request moved = std::move(request);
        refused(Status::busy, "request", [&] { session.clear(); });
        refused(Status::invalid_argument, "request is NULL", [&] { request.poll(); }); // NOLINT: that is the test
        CHECK(moved.wait().done == 32 && !moved.ended());
    }
    CHECK(session.info().position == 16 + 32);

    dsv4::Sampler sampler = dsv4::Sampler::create(f.greedy);
    session.clear();
    refused(Status::invalid_argument, "no logits", [&] { session.submit_generate(sampler); });
    dsv4::Request wrong = session.submit_feed(std::vector<dsv4::Token>(1, 1U << 30U));
    const dsv4::RequestEvent end = wrong.wait();
    CHECK(end.kind == RequestEventKind::end);
    refused(Status::invalid_argument, "1073741824", [&] { end.check(); });
}

} // namespace

int main(int argc, char **argv)
{
    CHECK(argc == 2);
    try {
        const Fixture f(argv[1]);
        text_round_trips_and_structs_are_filled(f);
        generations_are_ranges(f);
        sessions_fork_truncate_and_go_on(f);
        errors_have_a_status_and_name_what_is_wrong(f);
        callbacks_may_throw_and_cancel(f);
        answers_are_ranges_of_events(f);
        requests_share_steps_and_give_what_calls_give(f);
        requests_end_in_words_and_when_they_are_left(f);
        without_exceptions(argv[1]);
    } catch (const std::exception &error) {
        std::fprintf(stderr, "not caught: %s\n", error.what());
        return 1;
    }
    return 0;
}
