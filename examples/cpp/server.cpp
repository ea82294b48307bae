// Answers OpenAI-style chat requests over HTTP, token by token, as server-sent events. Needs cpp-httplib and
// nlohmann-json (Debian: libcpp-httplib-dev nlohmann-json3-dev).
//
//   c++ -std=c++17 -o server server.cpp $(pkg-config --cflags --libs dsv4 cpp-httplib nlohmann_json) -pthread
//   ./server MODEL 8080
//   curl -N localhost:8080/v1/chat/completions -d '{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 50}'
//   curl localhost:8080/metrics
//
// Each request has a session; requests at the same time go through the model together, and beginnings that the engine
// knows, such as the earlier turns of a conversation, are not computed again. A client that goes away ends its answer.

#include <dsv4.hpp>

#include <httplib.h>
#include <nlohmann/json.hpp>

#include <sys/socket.h>

#include <atomic>
#include <charconv>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <exception>
#include <iostream>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>

namespace {

// schemas of tools are part of the prompt: their keys keep their order
using Json = nlohmann::ordered_json;

// The JSON of a request. One that is nested without end would end the stack of whoever writes it.
Json parse(const std::string &body)
{
    return Json::parse(body, [](int depth, Json::parse_event_t, const Json &) {
        if (depth > 100) throw std::invalid_argument("the JSON is nested more than 100 deep");
        return true;
    });
}

// All that an answer needs. What is wrong with a request shows here, while the answer can still have another status.
struct Chat {
    Chat(const dsv4::Model &model, const dsv4::Engine &engine, const Json &request)
        : prompt(model.render(request.at("messages").dump())), session(dsv4::Session::create(engine)),
          sampler(make_sampler(request)), parser(dsv4::ChatParser::create(model))
    {
        if (!request.value("stream", true))
            throw std::invalid_argument("answers come as streams only: stream must be true or left out");
        const auto most = request.value("max_tokens", std::int64_t{0});
        if (most < 0) throw std::invalid_argument("max_tokens is " + std::to_string(most) + ", it must not be below 0");
        options.max_tokens = static_cast<std::uint64_t>(most);
        if (const std::size_t tokens = prompt.tokens().size(); tokens > session.info().context)
            throw std::invalid_argument("the prompt has " + std::to_string(tokens) + " tokens, the context holds " +
                                        std::to_string(session.info().context));
    }

    static dsv4::Sampler make_sampler(const Json &request)
    {
        dsv4::SamplerOptions options;
        options.seed = request.value("seed", std::uint64_t{0});
        const float temperature = request.value("temperature", 1.0F);
        // what clients mean by it; the library itself takes greedy decoding by its name only
        options.greedy = temperature == 0 ? 1 : 0;
        if (temperature != 0) options.temperature = temperature;
        return dsv4::Sampler::create(options);
    }

    dsv4::Prompt prompt;
    dsv4::Session session;
    dsv4::Sampler sampler;
    dsv4::ChatParser parser;
    dsv4::GenerationOptions options;
};

// Status and words for a request that failed before its answer began.
void refuse(const std::exception_ptr &thrown, httplib::Response &response)
{
    try {
        std::rethrow_exception(thrown);
    } catch (const dsv4::Error &error) {
        const dsv4::Status status = error.status();
        response.status = 500;
        if (status == dsv4::Status::chat || status == dsv4::Status::invalid_argument) response.status = 400;
        if (status == dsv4::Status::no_blocks || status == dsv4::Status::out_of_memory) response.status = 503;
        response.set_content(error.what(), "text/plain");
    } catch (const std::exception &error) { // the JSON is wrong, or what is in it
        response.status = 400;
        response.set_content(error.what(), "text/plain");
    }
}

// Nobody listens to an answer any more.
struct Gone : std::exception {};

void send(const httplib::DataSink &sink, std::string_view text)
{
    if (!sink.write(text.data(), text.size())) throw Gone{};
}

void send_data(const httplib::DataSink &sink, const Json &data)
{
    send(sink, "data: " + data.dump() + "\n\n");
}

// A part of an answer as OpenAI's clients take it.
void send_chunk(const httplib::DataSink &sink, const Json &delta, const Json &finish_reason)
{
    const Json choice{{"index", 0}, {"delta", delta}, {"finish_reason", finish_reason}};
    send_data(sink, Json{{"object", "chat.completion.chunk"}, {"choices", Json::array({choice})}});
}

class Server {
public:
    Server(const dsv4::Model &model, const dsv4::Engine &engine) : model_(model), engine_(engine)
    {
        // a thread for each connection; one of those that wait works for all
        http_.new_task_queue = [] { return new httplib::ThreadPool(64); };
        http_.set_payload_max_length(std::size_t{1} << 26U);
        http_.set_tcp_nodelay(true);
        http_.set_socket_options([](int socket) { // the default would share a port with another server
            const int yes = 1;
            setsockopt(socket, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
        });
        // read in parts: what a client calls a form, as curl does, may have 8 KiB as a whole
        http_.Post("/v1/chat/completions", [this](const auto &, auto &response, const httplib::ContentReader &read) {
            std::string body;
            const bool is_read = read([&](const char *part, std::size_t length) {
                body.append(part, length);
                return true;
            });
            if (is_read) chat(body, response);
        });
        http_.Get("/metrics", [this](const auto &, auto &response) {
            response.set_content(engine_.metrics_text(), "text/plain; version=0.0.4");
        });
        http_.set_exception_handler(
            [](const auto &, auto &response, const std::exception_ptr &thrown) { refuse(thrown, response); });
    }

    // Serves until one of the signals `ends`, which all threads must leave to this one.
    void run(int port, const sigset_t &ends)
    {
        const char *host = "127.0.0.1";
        const bool is_any = port == 0;
        if (is_any) port = http_.bind_to_any_port(host);
        if (is_any ? port < 0 : !http_.bind_to_port(host, port))
            throw std::runtime_error(std::string(host) + ':' + std::to_string(port) +
                                     " cannot be had; does another program listen there?");
        std::thread serving([this] { http_.listen_after_bind(); });
        while (!http_.is_running()) std::this_thread::yield();
        std::cerr << "listening on http://" << host << ':' << port << '\n';
        int signal = 0;
        sigwait(&ends, &signal);
        stopped_ = true;
        http_.stop();
        serving.join();
    }

private:
    void chat(const std::string &body, httplib::Response &response)
    {
        const auto chat = std::make_shared<Chat>(model_, engine_, parse(body));
        response.set_chunked_content_provider("text/event-stream", [this, chat](std::size_t, httplib::DataSink &sink) {
            try {
                answer(*chat, sink);
                send(sink, "data: [DONE]\n\n");
            } catch (const Gone &) {
                return false;
            } catch (const std::exception &error) {
                sink.os << "data: " << Json{{"error", Json{{"message", error.what()}}}} << "\n\n";
            }
            sink.done();
            return true;
        });
    }

    void answer(Chat &chat, httplib::DataSink &sink) const
    {
        follow(chat.session.submit_feed(chat.prompt.tokens()), sink, [](const dsv4::RequestEvent &) {});
        follow(chat.session.submit_generate(chat.sampler, chat.options), sink, [&](const dsv4::RequestEvent &event) {
            if (event.kind == dsv4::RequestEventKind::piece) chat.parser.push(event.token);
            if (event.kind == dsv4::RequestEventKind::end) chat.parser.finish();
            for (const dsv4::Event &part : chat.parser) {
                if (part.kind == dsv4::EventKind::content) send_chunk(sink, Json{{"content", part.text}}, nullptr);
            }
            if (event.kind != dsv4::RequestEventKind::end) return;
            const bool is_cut = event.finish == dsv4::Finish::max_tokens || event.finish == dsv4::Finish::context_full;
            send_chunk(sink, Json::object(), is_cut ? "length" : "stop");
        });
    }

    // Has a request go on to its end. What is thrown leaves it, which cancels it.
    template <class F> void follow(dsv4::Request request, httplib::DataSink &sink, F &&on_event) const
    {
        while (!request.ended()) {
            const dsv4::RequestEvent event = request.wait(std::chrono::milliseconds(500));
            event.check();
            if (stopped_) throw Gone{};
            // while there is nothing to say, a comment shows whether someone listens
            if (event.kind != dsv4::RequestEventKind::piece) send(sink, ": working\n\n");
            on_event(event);
        }
    }

    const dsv4::Model &model_;
    const dsv4::Engine &engine_;
    httplib::Server http_;
    std::atomic<bool> stopped_{false};
};

} // namespace

int main(int argc, char **argv)
{
    std::uint16_t port = 0;
    const std::string_view digits = argc == 3 ? argv[2] : "";
    const auto [end, failed] = std::from_chars(digits.data(), digits.data() + digits.size(), port);
    if (failed != std::errc() || end != digits.data() + digits.size()) {
        std::cerr << "usage: server MODEL PORT, a number up to 65535; 0 is any that is free\n";
        return 2;
    }
    sigset_t ends;
    sigemptyset(&ends);
    for (const int signal : {SIGINT, SIGTERM}) sigaddset(&ends, signal);
    pthread_sigmask(SIG_BLOCK, &ends, nullptr);
    try {
        const dsv4::Model model = dsv4::Model::open(argv[1]);
        dsv4::EngineOptions options;
        options.when_full = DSV4_WHEN_FULL_WAIT; // requests wait for room in the cache rather than fail
        const dsv4::Engine engine = dsv4::Engine::create(model, options);
        Server(model, engine).run(port, ends);
    } catch (const std::exception &error) {
        std::cerr << error.what() << '\n';
        return 1;
    }
}
