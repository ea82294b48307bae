// One thread with an event loop and eight requests: prompts, then generations, in shared steps and with the tokens of calls
// that wait. Cancels, errors, and requests and sessions that are freed while they run. In the common part of C11 and C++17.

#include "check.h"

#include <sys/epoll.h>
#include <unistd.h>

#define REQUESTS 8
#define GENERATED 16
#define PROMPT 40

typedef struct client {
    dsv4_session *session;
    dsv4_sampler *sampler;
    dsv4_request *request;
    uint32_t prompt[PROMPT];
    uint32_t tokens[GENERATED];
    size_t n_tokens;
    int ended;
    int32_t finish;
} client;

static dsv4_sampler *new_sampler(int i)
{
    dsv4_error err = {0};
    dsv4_sampler_options options;
    dsv4_sampler_options_init(&options);
    options.seed = (uint64_t)i;
    dsv4_sampler *sampler = NULL;
    OK(dsv4_sampler_new(&options, &sampler, &err));
    return sampler;
}

static dsv4_generation_options sixteen(void)
{
    dsv4_generation_options options;
    dsv4_generation_options_init(&options);
    options.max_tokens = GENERATED;
    options.ignore_eos = 1;
    return options;
}

static dsv4_request_event wait_for(dsv4_request *request)
{
    dsv4_error err = {0};
    dsv4_request_event event;
    memset(&event, 0, sizeof event);
    event.size = sizeof event;
    OK(dsv4_request_wait(request, UINT64_MAX, &event, &err));
    return event;
}

static void on_event(client *c, const dsv4_request_event *event)
{
    switch (event->kind) {
    case DSV4_REQUEST_EVENT_KIND_PROGRESS:
        CHECK(event->done <= event->total && event->total == PROMPT && !c->ended);
        break;
    case DSV4_REQUEST_EVENT_KIND_PIECE:
        CHECK(c->n_tokens < GENERATED && !c->ended);
        c->tokens[c->n_tokens++] = event->token;
        break;
    default:
        CHECK(event->kind == DSV4_REQUEST_EVENT_KIND_END && event->status == DSV4_STATUS_OK && !c->ended);
        c->ended = 1;
        c->finish = event->finish;
    }
}

// The program's loop: asleep, unless the library has something to do or to tell.
static void run(const dsv4_engine *engine, int epoll, client *clients)
{
    dsv4_error err = {0};
    for (int left = REQUESTS; left > 0;) {
        struct epoll_event ready;
        CHECK(epoll_wait(epoll, &ready, 1, 20000) == 1);
        int32_t worked = 0;
        OK(dsv4_engine_step(engine, &worked, &err));
        left = 0;
        for (int i = 0; i < REQUESTS; i++) {
            client *c = &clients[i];
            dsv4_request_event event;
            while (!c->ended && (event = event_of(c->request)).kind != DSV4_REQUEST_EVENT_KIND_NONE) on_event(c, &event);
            left += !c->ended;
        }
    }
    for (int i = 0; i < REQUESTS; i++) {
        CHECK(event_of(clients[i].request).kind == DSV4_REQUEST_EVENT_KIND_NONE);
        dsv4_request_free(clients[i].request);
        clients[i].ended = 0;
    }
}

static void eight_requests(const fixture *f, int epoll)
{
    dsv4_error err = {0};
    client clients[REQUESTS];
    uint32_t expected[REQUESTS][GENERATED];
    memset(clients, 0, sizeof clients);
    dsv4_session_options options;
    dsv4_session_options_init(&options);
    options.context = 128;
    dsv4_generation_options generation = sixteen();
    for (int i = 0; i < REQUESTS; i++) {
        client *c = &clients[i];
        for (int t = 0; t < PROMPT; t++) c->prompt[t] = (uint32_t)(300 + 7 * i + t);
        // what a call that waits gives
        OK(dsv4_session_new(f->engine, &options, &c->session, &err));
        OK(dsv4_session_feed(c->session, c->prompt, PROMPT, NULL, NULL, &err));
        dsv4_sampler *sampler = new_sampler(i);
        dsv4_generation *g = NULL;
        OK(dsv4_generation_new(c->session, sampler, &generation, &g, &err));
        for (int t = 0; t < GENERATED; t++) {
            dsv4_piece piece;
            memset(&piece, 0, sizeof piece);
            piece.size = sizeof piece;
            OK(dsv4_generation_next(g, &piece, &err));
            expected[i][t] = piece.token;
        }
        dsv4_generation_free(g);
        dsv4_sampler_free(sampler);
        OK(dsv4_session_clear(c->session, &err));
        OK(dsv4_session_submit_feed(c->session, c->prompt, PROMPT, &c->request, &err));
    }
    // nothing was computed yet, and the session is not ours meanwhile
    CHECK(event_of(clients[0].request).kind == DSV4_REQUEST_EVENT_KIND_NONE);
    REFUSED(DSV4_STATUS_BUSY, "request", dsv4_session_clear(clients[0].session, &err));
    run(f->engine, epoll, clients);

    dsv4_engine_metrics before = metrics_of(f->engine);
    for (int i = 0; i < REQUESTS; i++) {
        client *c = &clients[i];
        CHECK(info_of(c->session).position == PROMPT);
        c->sampler = new_sampler(i);
        OK(dsv4_session_submit_generate(c->session, c->sampler, &generation, &c->request, &err));
    }
    run(f->engine, epoll, clients);
    dsv4_engine_metrics after = metrics_of(f->engine);
    // each step has a token of every request
    CHECK(after.decode_tokens - before.decode_tokens == REQUESTS * (GENERATED - 1));
    CHECK(after.batch_sessions - before.batch_sessions >= (REQUESTS - 1) * (after.steps - before.steps));
    for (int i = 0; i < REQUESTS; i++) {
        client *c = &clients[i];
        CHECK(c->finish == DSV4_FINISH_MAX_TOKENS && c->n_tokens == GENERATED);
        CHECK(memcmp(c->tokens, expected[i], sizeof c->tokens) == 0);
        dsv4_session_free(c->session);
        dsv4_sampler_free(c->sampler);
    }
    int32_t worked = 1;
    struct epoll_event ready;
    OK(dsv4_engine_step(f->engine, &worked, &err));
    CHECK(worked == 0 && epoll_wait(epoll, &ready, 1, 0) == 0);
}

static void ends(fixture *f)
{
    dsv4_error err = {0};
    uint32_t tokens[200];
    for (uint32_t i = 0; i < 200; i++) tokens[i] = 300 + i;
    dsv4_request *request = NULL;

    // a cancel ends it within a chunk, and the session goes on
    OK(dsv4_session_submit_feed(f->session, tokens, 200, &request, &err));
    CHECK(wait_for(request).kind == DSV4_REQUEST_EVENT_KIND_PROGRESS);
    OK(dsv4_session_cancel(f->session, &err));
    dsv4_request_event event = wait_for(request);
    CHECK(event.kind == DSV4_REQUEST_EVENT_KIND_END && event.status == DSV4_STATUS_CANCELLED);
    CHECK(strstr(event.text, "cancelled") != NULL && event.text_len == strlen(event.text));
    CHECK(wait_for(request).kind == DSV4_REQUEST_EVENT_KIND_NONE);
    CHECK(info_of(f->session).position == 16);
    dsv4_request_free(request);

    // one that is freed while it runs is cancelled
    OK(dsv4_session_submit_feed(f->session, tokens, 200, &request, &err));
    CHECK(wait_for(request).done == 16);
    dsv4_request_free(request);
    CHECK(info_of(f->session).position == 32);

    // what is wrong with the tokens is told at the end
    uint32_t wrong = 1u << 30;
    OK(dsv4_session_submit_feed(f->session, &wrong, 1, &request, &err));
    event = wait_for(request);
    CHECK(event.kind == DSV4_REQUEST_EVENT_KIND_END && event.status == DSV4_STATUS_INVALID_ARGUMENT);
    CHECK(strstr(event.text, "1073741824") != NULL);
    dsv4_request_free(request);

    // a generation without logits is refused at once
    dsv4_sampler *sampler = new_sampler(1);
    OK(dsv4_session_clear(f->session, &err));
    REFUSED(DSV4_STATUS_INVALID_ARGUMENT, "no logits",
            dsv4_session_submit_generate(f->session, sampler, NULL, &request, &err));
    CHECK(request == NULL && info_of(f->session).position == 0);

    // a time limit
    dsv4_call_options call;
    dsv4_call_options_init(&call);
    call.time_limit_ms = 1;
    OK(dsv4_session_set_call_options(f->session, &call, &err));
    OK(dsv4_session_submit_feed(f->session, tokens, 200, &request, &err));
    usleep(3000);
    event = wait_for(request);
    CHECK(event.status == DSV4_STATUS_CANCELLED && strstr(event.text, "time limit") != NULL);
    dsv4_request_free(request);
    OK(dsv4_session_set_call_options(f->session, NULL, &err));

    // a request goes on without the handle of its session, and the engine's
    dsv4_session *other = NULL;
    OK(dsv4_session_new(f->engine, NULL, &other, &err));
    OK(dsv4_session_submit_feed(other, tokens, 40, &request, &err));
    dsv4_session_free(other);
    do event = wait_for(request);
    while (event.kind == DSV4_REQUEST_EVENT_KIND_PROGRESS);
    CHECK(event.kind == DSV4_REQUEST_EVENT_KIND_END && event.status == DSV4_STATUS_OK);
    dsv4_request_free(request);
    dsv4_request_free(NULL);
    dsv4_sampler_free(sampler);
}

int main(int argc, char **argv)
{
    CHECK(argc == 2);
    dsv4_error err = {0};
    fixture f = fixture_open(argv[1]);
    int32_t fd = -1;
    OK(dsv4_engine_wake_fd(f.engine, &fd, &err));
    int epoll = epoll_create1(EPOLL_CLOEXEC);
    struct epoll_event interest;
    memset(&interest, 0, sizeof interest);
    interest.events = EPOLLIN;
    CHECK(epoll >= 0 && epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &interest) == 0);
    eight_requests(&f, epoll);
    ends(&f);
    close(epoll);
    CHECK(metrics_of(f.engine).sessions == 1);
    fixture_close(&f);
    return 0;
}
