// How calls are treated: priority, time limit, threads that only wait, a full cache, load; and the figures that tell of it.
// In the common part of C11 and C++17.

#include "check.h"

#include <pthread.h>

#define LONG 500

static uint32_t tokens[LONG];

static dsv4_engine *engine_with(const dsv4_model *model, uint64_t cache_bytes, int32_t when_full, uint32_t load_percent)
{
    dsv4_error err = {0};
    dsv4_engine_options options;
    dsv4_engine_options_init(&options);
    CHECK(options.when_full == DSV4_WHEN_FULL_DEFAULT && options.degraded_load_percent == 0);
    options.threads = 1;
    options.prefill_chunk = 16;
    options.cache_bytes = cache_bytes;
    options.when_full = when_full;
    options.degraded_load_percent = load_percent;
    options.degraded_context = 64;
    options.degraded_chunk = 8;
    options.checkpoints = DSV4_CHECKPOINTS_NONE;
    dsv4_engine *engine = NULL;
    OK(dsv4_engine_new(model, &options, &engine, &err));
    return engine;
}

static dsv4_session *session_on(const dsv4_engine *engine)
{
    dsv4_error err = {0};
    dsv4_session_options options;
    dsv4_session_options_init(&options);
    options.context = 512;
    dsv4_session *session = NULL;
    OK(dsv4_session_new(engine, &options, &session, &err));
    return session;
}

static dsv4_session_metrics session_metrics_of(dsv4_session *session)
{
    dsv4_error err = {0};
    dsv4_session_metrics metrics;
    memset(&metrics, 0, sizeof metrics);
    metrics.size = sizeof metrics;
    OK(dsv4_session_get_metrics(session, &metrics, &err));
    return metrics;
}

static void options_out_of_range(dsv4_session *session)
{
    dsv4_error err = {0};
    dsv4_call_options options;
    dsv4_call_options_init(&options);
    CHECK(options.size == sizeof options && options.priority == 0 && options.time_limit_ms == 0 && options.reserve == 0);
    CHECK(options.when_full == DSV4_WHEN_FULL_DEFAULT && options.waits_only == 0);
    OK(dsv4_session_set_call_options(session, &options, &err));
    options.when_full = 4;
    REFUSED(DSV4_STATUS_INVALID_ARGUMENT, "when_full is 4", dsv4_session_set_call_options(session, &options, &err));
    options.when_full = DSV4_WHEN_FULL_WAIT;
    options.waits_only = 2;
    REFUSED(DSV4_STATUS_INVALID_ARGUMENT, "waits_only is 2", dsv4_session_set_call_options(session, &options, &err));
    OK(dsv4_session_set_call_options(session, NULL, &err));
}

// Of two prompts that do not fit into one step, the later one of higher priority is through first.
static void priority(const dsv4_engine *engine)
{
    dsv4_error err = {0};
    dsv4_session *sessions[2] = {session_on(engine), session_on(engine)};
    dsv4_request *requests[2] = {NULL, NULL};
    dsv4_call_options options;
    dsv4_call_options_init(&options);
    options.priority = 1;
    OK(dsv4_session_set_call_options(sessions[1], &options, &err));
    for (int i = 0; i < 2; i++) OK(dsv4_session_submit_feed(sessions[i], tokens, 200, &requests[i], &err));
    for (int first = -1; first < 0;) {
        int32_t worked = 0;
        OK(dsv4_engine_step(engine, &worked, &err));
        CHECK(worked == 1);
        for (int i = 0; i < 2; i++) {
            dsv4_request_event event;
            do event = event_of(requests[i]);
            while (event.kind == DSV4_REQUEST_EVENT_KIND_PROGRESS);
            if (event.kind == DSV4_REQUEST_EVENT_KIND_END) {
                CHECK(event.status == DSV4_STATUS_OK);
                first = i;
            }
        }
        CHECK(first != 0);
    }
    for (int i = 0; i < 2; i++) {
        dsv4_request_free(requests[i]);
        dsv4_session_free(sessions[i]);
    }
}

static void time_limit(const dsv4_engine *engine)
{
    dsv4_error err = {0};
    dsv4_session *session = session_on(engine);
    dsv4_call_options options;
    dsv4_call_options_init(&options);
    options.time_limit_ms = 1;
    OK(dsv4_session_set_call_options(session, &options, &err));
    REFUSED(DSV4_STATUS_CANCELLED, "time limit", dsv4_session_feed(session, tokens, LONG, NULL, NULL, &err));
    uint64_t position = info_of(session).position;
    CHECK(position < LONG && position % 16 == 0);
    OK(dsv4_session_set_call_options(session, NULL, &err));
    OK(dsv4_session_feed(session, tokens + position, LONG - (size_t)position, NULL, NULL, &err));
    dsv4_session_free(session);
}

typedef struct waiter {
    dsv4_session *session;
    pthread_mutex_t lock;
    int done;
    dsv4_status status;
} waiter;

static void *feed(void *arg)
{
    waiter *w = (waiter *)arg;
    dsv4_error err = {0};
    w->status = dsv4_session_feed(w->session, tokens, LONG, NULL, NULL, &err);
    pthread_mutex_lock(&w->lock);
    w->done = 1;
    pthread_mutex_unlock(&w->lock);
    return NULL;
}

static int is_done(waiter *w)
{
    pthread_mutex_lock(&w->lock);
    int done = w->done;
    pthread_mutex_unlock(&w->lock);
    return done;
}

static void begin(waiter *w, dsv4_session *session, pthread_t *thread)
{
    w->session = session;
    w->done = 0;
    CHECK(pthread_mutex_init(&w->lock, NULL) == 0);
    CHECK(pthread_create(thread, NULL, feed, w) == 0);
}

// A thread that only waits: all its steps are run here.
static void waits_only(const dsv4_engine *engine)
{
    dsv4_error err = {0};
    dsv4_session *session = session_on(engine);
    dsv4_call_options options;
    dsv4_call_options_init(&options);
    options.waits_only = 1;
    OK(dsv4_session_set_call_options(session, &options, &err));
    waiter w;
    pthread_t thread;
    begin(&w, session, &thread);
    int steps = 0;
    while (!is_done(&w)) {
        int32_t worked = 0;
        OK(dsv4_engine_step(engine, &worked, &err));
        steps += worked;
    }
    pthread_join(thread, NULL);
    CHECK(w.status == DSV4_STATUS_OK && steps >= LONG / 16 && info_of(session).position == LONG);
    dsv4_session_free(session);
}

static void figures(const dsv4_engine *engine)
{
    dsv4_error err = {0};
    dsv4_engine_metrics before = metrics_of(engine);
    dsv4_session *session = session_on(engine);
    OK(dsv4_session_feed(session, tokens, 32, NULL, NULL, &err));
    OK(dsv4_session_feed(session, tokens, 1, NULL, NULL, &err));
    dsv4_engine_metrics after = metrics_of(engine);
    CHECK(after.prefill_tokens - before.prefill_tokens == 32 && after.decode_tokens - before.decode_tokens == 1);
    CHECK(after.steps - before.steps == 3 && after.batch_sessions - before.batch_sessions == 3);
    CHECK(after.sessions == before.sessions + 1 && after.step_p50_nanos > 0 && after.step_p99_nanos >= after.step_p50_nanos);
    dsv4_session_metrics own = session_metrics_of(session);
    CHECK(own.prefill_tokens == 32 && own.decode_tokens == 1 && own.steps == 3 && own.step_nanos > 0);
    CHECK(own.first_token_nanos > 0 && own.is_degraded == 0);

    size_t len = 0, again = 0;
    OK(dsv4_engine_metrics_text(engine, NULL, 0, &len, &err));
    char small[8], *text = (char *)malloc(len + 4096);
    CHECK(len > 1000 && text != NULL);
    EXPECT(DSV4_STATUS_BUFFER_TOO_SMALL, dsv4_engine_metrics_text(engine, small, sizeof small, &again, &err));
    CHECK(again >= len);
    OK(dsv4_engine_metrics_text(engine, text, len + 4096, &len, &err));
    CHECK(strlen(text) == len && text[len - 1] == '\n');
    CHECK(strstr(text, "# TYPE dsv4_") != NULL && strstr(text, "_bucket{le=\"+Inf\"} ") != NULL);
    free(text);
    dsv4_session_free(session);
}

// Bytes that a session of LONG tokens, two blocks, takes.
static dsv4_cache_info measure(const dsv4_engine *engine)
{
    dsv4_error err = {0};
    dsv4_session *session = session_on(engine);
    OK(dsv4_session_feed(session, tokens, LONG, NULL, NULL, &err));
    dsv4_cache_info info;
    memset(&info, 0, sizeof info);
    info.size = sizeof info;
    OK(dsv4_session_get_cache_info(session, &info, &err));
    dsv4_session_free(session);
    return info;
}

// Room for two sessions, but only for one block of the second.
static void a_full_cache(const dsv4_model *model, dsv4_cache_info one)
{
    dsv4_error err = {0};
    uint64_t bytes = 2 * (one.window_bytes + one.state_bytes) + one.page_bytes + one.page_bytes * 3 / 4;
    dsv4_engine *engine = engine_with(model, bytes, DSV4_WHEN_FULL_REFUSE, 0);
    dsv4_session *first = session_on(engine), *second = session_on(engine);
    OK(dsv4_session_feed(first, tokens, LONG, NULL, NULL, &err));
    // as the engine says: whole or not at all
    REFUSED(DSV4_STATUS_NO_BLOCKS, "bytes", dsv4_session_feed(second, tokens + 1, LONG - 1, NULL, NULL, &err));
    CHECK(info_of(second).position == 0);
    CHECK(metrics_of(engine).refused_admissions == 1 && metrics_of(engine).refused_calls == 1);
    // as the session says: what there is
    dsv4_call_options options;
    dsv4_call_options_init(&options);
    options.when_full = DSV4_WHEN_FULL_EVICT;
    OK(dsv4_session_set_call_options(second, &options, &err));
    EXPECT(DSV4_STATUS_NO_BLOCKS, dsv4_session_feed(second, tokens + 1, LONG - 1, NULL, NULL, &err));
    CHECK(info_of(second).position > 0);
    OK(dsv4_session_clear(second, &err));
    // until there is room, or the time is up
    options.when_full = DSV4_WHEN_FULL_WAIT;
    options.time_limit_ms = 30;
    OK(dsv4_session_set_call_options(second, &options, &err));
    REFUSED(DSV4_STATUS_CANCELLED, "time limit", dsv4_session_feed(second, tokens, LONG, NULL, NULL, &err));
    CHECK(info_of(second).position == 0 && metrics_of(engine).waits >= 1);
    options.time_limit_ms = 0;
    OK(dsv4_session_set_call_options(second, &options, &err));
    waiter w;
    pthread_t thread;
    begin(&w, second, &thread);
    while (metrics_of(engine).waiting_calls == 0) CHECK(!is_done(&w));
    dsv4_session_free(first);
    pthread_join(thread, NULL);
    CHECK(w.status == DSV4_STATUS_OK && info_of(second).position == LONG && metrics_of(engine).waiting_calls == 0);
    dsv4_session_free(second);
    dsv4_engine_free(engine);
}

static void degraded(const dsv4_model *model, dsv4_cache_info one)
{
    dsv4_error err = {0};
    uint64_t bytes = 2 * (one.window_bytes + one.state_bytes + one.page_bytes);
    dsv4_engine *engine = engine_with(model, bytes, DSV4_WHEN_FULL_EVICT, 40);
    dsv4_session *first = session_on(engine);
    OK(dsv4_session_feed(first, tokens, LONG, NULL, NULL, &err));
    CHECK(info_of(first).context == 512 && metrics_of(engine).degraded_sessions == 0);
    dsv4_session *second = session_on(engine);
    dsv4_engine_metrics metrics = metrics_of(engine);
    CHECK(metrics.is_degraded == 1 && metrics.degraded_sessions == 1 && metrics.load_percent >= 40);
    CHECK(info_of(second).context == 64 && session_metrics_of(second).is_degraded == 1);
    OK(dsv4_session_feed(second, tokens, 64, NULL, NULL, &err));
    CHECK(session_metrics_of(second).steps == 8);
    EXPECT(DSV4_STATUS_CONTEXT_FULL, dsv4_session_feed(second, tokens, 1, NULL, NULL, &err));
    dsv4_session_free(first);
    dsv4_session_free(second);
    dsv4_engine_free(engine);
}

int main(int argc, char **argv)
{
    CHECK(argc == 2);
    dsv4_error err = {0};
    dsv4_model *model = NULL;
    OK(dsv4_model_open(argv[1], NULL, &model, &err));
    for (uint32_t i = 0; i < LONG; i++) tokens[i] = 300 + i % 200;
    dsv4_engine *engine = engine_with(model, 0, DSV4_WHEN_FULL_DEFAULT, 0);
    dsv4_session *session = session_on(engine);
    options_out_of_range(session);
    dsv4_session_free(session);
    priority(engine);
    time_limit(engine);
    waits_only(engine);
    figures(engine);
    dsv4_cache_info one = measure(engine);
    dsv4_engine_free(engine);
    a_full_cache(model, one);
    degraded(model, one);
    dsv4_model_free(model);
    return 0;
}
