// dsv4.hpp without exceptions (this file is compiled with -fno-exceptions): every call returns a Result.

#include <dsv4.hpp>

#include <cstdio>
#include <cstring>
#include <string>

#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);                                       \
            std::exit(1);                                                                                              \
        }                                                                                                              \
    } while (0)

void without_exceptions(const char *path);

void without_exceptions(const char *path)
{
    const auto nothing = dsv4::Model::open("/nowhere");
    CHECK(!nothing && nothing.error().status() == dsv4::Status::not_found);
    CHECK(std::strstr(nothing.error().what(), "/nowhere") != nullptr);

    const auto model = dsv4::Model::open(path);
    CHECK(model && model->info()->vocab_size > 0);
    const auto engine = dsv4::Engine::create(*model);
    CHECK(engine);
    auto session = dsv4::Session::create(*engine);
    dsv4::SamplerOptions greedy;
    greedy.greedy = 1;
    auto sampler = dsv4::Sampler::create(greedy);
    CHECK(session && sampler && !session->logits());
    const auto prompt = model->encode("Once upon a time");
    CHECK(prompt && session->feed(*prompt));
    std::size_t told = 0;
    const dsv4::Token two[] = {300, 301};
    CHECK(session->feed(two, [&](std::size_t done, std::size_t) { return (told = done) > 0; }) && told == 2);

    dsv4::GenerationOptions few;
    few.max_tokens = 6;
    auto generation = session->generate(*sampler, few);
    CHECK(generation);
    std::string text;
    std::size_t pieces = 0;
    for (const auto &piece : *generation) {
        CHECK(piece);
        text += piece->text;
        pieces++;
    }
    CHECK(pieces == 6 && !text.empty());

    // an error is the last element, and a new range goes on behind it
    auto next = session->generate(*sampler, few);
    CHECK(next && next->next() && session->cancel());
    std::size_t errors = 0;
    for (const auto &piece : *next) {
        CHECK(!piece && piece.error().status() == dsv4::Status::cancelled);
        errors++;
    }
    CHECK(errors == 1);
    pieces = 0;
    for (const auto &piece : *next) pieces += piece ? 1U : 0U;
    CHECK(pieces == 5);

    auto parser = dsv4::ChatParser::create(*model);
    CHECK(parser && session->sync(*prompt));
    dsv4::Answer answer(*session->generate(*sampler, few), *std::move(parser));
    text.clear();
    for (const auto &event : answer) {
        CHECK(event);
        text += event->text;
    }
    CHECK(!text.empty() && answer.message());

    // requests: what goes wrong is told by the last event
    CHECK(engine->wake_fd() && *engine->wake_fd() >= 0);
    auto request = session->submit_feed(*prompt);
    CHECK(request && !session->clear());
    std::size_t steps = 0;
    dsv4::Status status = dsv4::Status::busy;
    while (!request->ended()) {
        const auto worked = engine->step();
        CHECK(worked && *worked && ++steps < 10);
        for (const auto &event : *request) {
            CHECK(event && event->check());
            status = event->status;
        }
    }
    CHECK(status == dsv4::Status::ok && session->clear());
    request = session->submit_feed(*prompt);
    CHECK(request && session->cancel());
    const auto end = request->wait();
    CHECK(end && end->kind == dsv4::RequestEventKind::end && !end->check());
    CHECK(end->check().error().status() == dsv4::Status::cancelled);
}
