// One session for one thread at a time, cancelling from another, many sessions at once, the log from all of them.

#include "check.h"

#include <pthread.h>
#include <stdatomic.h>

#define THREADS 4
#define TOKENS 96

static atomic_int messages;

static void on_log(void *userdata, dsv4_log_level level, const char *message)
{
    CHECK(userdata == &messages && level >= DSV4_LOG_LEVEL_ERROR && message[0] != 0);
    // what the library would log meanwhile is dropped, and the log cannot be changed from here
    dsv4_error err = {0};
    EXPECT(DSV4_STATUS_BUSY, dsv4_log_set(DSV4_LOG_LEVEL_OFF, NULL, NULL, &err));
    dsv4_model *model = NULL;
    EXPECT(DSV4_STATUS_NOT_FOUND, dsv4_model_open("/nowhere", NULL, &model, &err));
    atomic_fetch_add(&messages, 1);
}

typedef struct held {
    dsv4_session *session;
    pthread_barrier_t barrier;
    dsv4_status during;
} held;

// The other thread, while the first is in the progress callback.
static void *intrude(void *arg)
{
    held *h = arg;
    dsv4_error err = {0};
    dsv4_session_info info = {sizeof info, 0, 0, 0, 0, 0, 0};
    pthread_barrier_wait(&h->barrier);
    h->during = dsv4_session_get_info(h->session, &info, &err);
    CHECK(info.position == 0 && info.context == 0);
    OK(dsv4_session_cancel(h->session, &err));
    pthread_barrier_wait(&h->barrier);
    return NULL;
}

static int32_t wait_for_the_other(void *userdata, size_t done, size_t total)
{
    held *h = userdata;
    CHECK(done == 16 && total == TOKENS);
    pthread_barrier_wait(&h->barrier);
    pthread_barrier_wait(&h->barrier);
    return 0;
}

typedef struct job {
    const dsv4_engine *engine;
    const uint32_t *tokens;
    float best;
} job;

static void *work(void *arg)
{
    job *j = arg;
    dsv4_error err = {0};
    dsv4_session *session = NULL;
    OK(dsv4_session_new(j->engine, NULL, &session, &err));
    OK(dsv4_session_feed(session, j->tokens, TOKENS, NULL, NULL, &err));
    const float *logits = NULL;
    size_t n = 0;
    OK(dsv4_session_logits(session, &logits, &n, &err));
    j->best = logits[0];
    for (size_t i = 1; i < n; i++)
        if (logits[i] > j->best) j->best = logits[i];
    dsv4_session_free(session);
    return NULL;
}

int main(int argc, char **argv)
{
    CHECK(argc == 2);
    dsv4_error err = {0};
    OK(dsv4_log_set(DSV4_LOG_LEVEL_INFO, on_log, &messages, &err));
    EXPECT(DSV4_STATUS_INVALID_ARGUMENT, dsv4_log_set(6, on_log, NULL, &err));
    fixture f = fixture_open(argv[1]);
    CHECK(atomic_load(&messages) > 0);
    OK(dsv4_log_set(DSV4_LOG_LEVEL_OFF, NULL, NULL, &err));
    int before = atomic_load(&messages);
    uint32_t tokens[TOKENS];
    for (uint32_t i = 0; i < TOKENS; i++) tokens[i] = 300 + i;

    // a second thread is told BUSY at once, and its cancel ends the call within one chunk
    held h = {.session = f.session, .during = DSV4_STATUS_OK};
    pthread_barrier_init(&h.barrier, NULL, 2);
    pthread_t other;
    CHECK(pthread_create(&other, NULL, intrude, &h) == 0);
    EXPECT(DSV4_STATUS_CANCELLED, dsv4_session_feed(f.session, tokens, TOKENS, wait_for_the_other, &h, &err));
    pthread_join(other, NULL);
    pthread_barrier_destroy(&h.barrier);
    CHECK(h.during == DSV4_STATUS_BUSY);
    dsv4_session_info info = {sizeof info, 0, 0, 0, 0, 0, 0};
    OK(dsv4_session_get_info(f.session, &info, &err));
    CHECK(info.position == 16);
    // the cancel is used up
    OK(dsv4_session_feed(f.session, tokens + 16, TOKENS - 16, NULL, NULL, &err));

    // many sessions on one engine: the same result on every thread
    pthread_t threads[THREADS];
    job jobs[THREADS];
    for (int i = 0; i < THREADS; i++) {
        jobs[i] = (job){f.engine, tokens, 0};
        CHECK(pthread_create(&threads[i], NULL, work, &jobs[i]) == 0);
    }
    for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
    for (int i = 1; i < THREADS; i++) CHECK(jobs[i].best == jobs[0].best);

    // a cancel that comes before the call ends the next one, once
    OK(dsv4_session_cancel(f.session, &err));
    EXPECT(DSV4_STATUS_CANCELLED, dsv4_session_feed(f.session, tokens, 1, NULL, NULL, &err));
    OK(dsv4_session_feed(f.session, tokens, 1, NULL, NULL, &err));
    // or none, if it is taken back
    OK(dsv4_session_cancel(f.session, &err));
    OK(dsv4_session_reset_cancel(f.session, &err));
    OK(dsv4_session_feed(f.session, tokens, 1, NULL, NULL, &err));
    fixture_close(&f);
    CHECK(atomic_load(&messages) == before);
    return 0;
}
