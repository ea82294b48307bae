// A host with a thread pool of its own (OpenMP), a timer whose signals interrupt its threads, and two copies of the library,
// as when two plugins bring their own: each copy is called from the pool, between and beside the pool's own work, and gives
// what it gives alone.

#include "check.h"

#include <dlfcn.h>
#include <signal.h>
#include <sys/time.h>

#define CALLS 8
#define ROUNDS 3

// A function of both copies by name.
#define FIND(name) \
    __typeof__(name) *name##_of[2] = {*(__typeof__(name) **)&(void *){find(copies[0], #name)}, \
                                      *(__typeof__(name) **)&(void *){find(copies[1], #name)}}

static volatile sig_atomic_t ticks;

static void on_tick(int signal)
{
    (void)signal;
    ticks++;
}

static void *find(void *library, const char *name)
{
    void *found = dlsym(library, name);
    CHECK(found != NULL);
    return found;
}

// The pool's own work: the same sum, whatever the number of its threads.
static long own_work(void)
{
    long sum = 0;
#pragma omp parallel for reduction(+ : sum)
    for (long i = 0; i < 2000000; i++) sum += i % 7;
    return sum;
}

int main(int argc, char **argv)
{
    CHECK(argc == 4);
    struct sigaction action = {0};
    action.sa_handler = on_tick;
    CHECK(sigaction(SIGPROF, &action, NULL) == 0);
    const struct itimerval often = {{0, 500}, {0, 500}};
    CHECK(setitimer(ITIMER_PROF, &often, NULL) == 0);
    const long sum = own_work();

    void *copies[2] = {dlopen(argv[2], RTLD_NOW | RTLD_LOCAL), dlopen(argv[3], RTLD_NOW | RTLD_LOCAL)};
    CHECK(copies[0] != NULL && copies[1] != NULL && copies[0] != copies[1]);
    FIND(dsv4_model_open);
    FIND(dsv4_model_free);
    FIND(dsv4_engine_new);
    FIND(dsv4_engine_free);
    FIND(dsv4_session_new);
    FIND(dsv4_session_free);
    FIND(dsv4_session_feed);
    FIND(dsv4_session_logits);
    dsv4_error err = {0};
    dsv4_model *models[2];
    dsv4_engine *engines[2];
    for (int i = 0; i < 2; i++) {
        CHECK(dsv4_model_open_of[i](argv[1], NULL, &models[i], &err) == DSV4_STATUS_OK);
        CHECK(dsv4_engine_new_of[i](models[i], NULL, &engines[i], &err) == DSV4_STATUS_OK);
    }

    float *expected = NULL;
    size_t vocabulary = 0;
    for (int round = 0; round < ROUNDS; round++) {
        int wrong = 0;
        // the first round, on one thread, says what a call gives alone
#pragma omp parallel for schedule(dynamic, 1) reduction(+ : wrong) if (round > 0)
        for (int call = 0; call < (round > 0 ? CALLS : 1); call++) {
            const int i = call % 2;
            dsv4_error own = {0};
            dsv4_session *session = NULL;
            uint32_t tokens[60];
            for (uint32_t t = 0; t < 60; t++) tokens[t] = 3 + t * 7 % 200;
            const float *logits = NULL;
            size_t n = 0;
            CHECK(dsv4_session_new_of[i](engines[i], NULL, &session, &own) == DSV4_STATUS_OK);
            CHECK(dsv4_session_feed_of[i](session, tokens, 60, NULL, NULL, &own) == DSV4_STATUS_OK);
            CHECK(dsv4_session_logits_of[i](session, &logits, &n, &own) == DSV4_STATUS_OK);
            if (round == 0) {
                vocabulary = n;
                expected = malloc(n * sizeof *expected);
                CHECK(expected != NULL);
                memcpy(expected, logits, n * sizeof *expected);
            }
            wrong += n != vocabulary || memcmp(expected, logits, n * sizeof *expected) != 0;
            dsv4_session_free_of[i](session);
        }
        CHECK(wrong == 0);
        CHECK(own_work() == sum);
    }

    for (int i = 0; i < 2; i++) {
        dsv4_engine_free_of[i](engines[i]);
        dsv4_model_free_of[i](models[i]);
    }
    CHECK(own_work() == sum);
    CHECK(ticks > 0);
    free(expected);
    return 0;
}
