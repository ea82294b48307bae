// Pitfall 107: signals that interrupt system calls, thousands of them while calls run, on the thread of the call and on the
// engine's. Every call goes on, and gives what it gives in peace. Go's runtime sends SIGURG, profilers SIGPROF.

#include "check.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define PROMPT 400
#define TOKENS 24

static atomic_int urgent, profiled, over;

static void on_signal(int signal)
{
    int before = errno;
    atomic_fetch_add(signal == SIGURG ? &urgent : &profiled, 1);
    errno = before;
}

static void *send_signals(void *thread)
{
    const struct timespec pause = {0, 50000};
    while (!atomic_load(&over)) {
        CHECK(pthread_kill(*(pthread_t *)thread, SIGURG) == 0);
        nanosleep(&pause, NULL);
    }
    return NULL;
}

// Everything that waits, reads or writes; what was generated goes to `tokens`.
static void run(const char *path, const char *file, uint32_t *tokens)
{
    dsv4_error err = {0};
    dsv4_model *model = NULL;
    dsv4_engine *engine = NULL;
    dsv4_session *session = NULL, *again = NULL;
    dsv4_sampler *sampler = NULL;
    OK(dsv4_model_open(path, NULL, &model, &err));
    dsv4_engine_options options;
    dsv4_engine_options_init(&options);
    options.threads = 2;
    OK(dsv4_engine_new(model, &options, &engine, &err));
    OK(dsv4_session_new(engine, NULL, &session, &err));
    dsv4_sampler_options greedy;
    dsv4_sampler_options_init(&greedy);
    greedy.greedy = 1;
    OK(dsv4_sampler_new(&greedy, &sampler, &err));
    uint32_t prompt[PROMPT];
    for (uint32_t i = 0; i < PROMPT; i++) prompt[i] = 300 + i % 150;
    OK(dsv4_session_feed(session, prompt, PROMPT, NULL, NULL, &err));
    OK(dsv4_session_save(session, file, 1, &err));
    OK(dsv4_session_restore(engine, file, NULL, &again, &err));
    dsv4_session *half[] = {session, again};
    for (size_t i = 0; i < TOKENS; i++) {
        const float *logits = NULL;
        size_t n = 0;
        dsv4_session *from = half[i * 2 / TOKENS];
        OK(dsv4_session_logits(from, &logits, &n, &err));
        OK(dsv4_sampler_sample(sampler, logits, n, &tokens[i], &err));
        for (int j = 0; j < 2; j++) OK(dsv4_session_feed(half[j], &tokens[i], 1, NULL, NULL, &err));
    }
    dsv4_sampler_free(sampler);
    dsv4_session_free(again);
    dsv4_session_free(session);
    dsv4_engine_free(engine);
    dsv4_model_free(model);
}

int main(int argc, char **argv)
{
    CHECK(argc == 2);
    char file[64];
    snprintf(file, sizeof file, "signals-%ld.session", (long)getpid());
    uint32_t calm[TOKENS], stormy[TOKENS];
    run(argv[1], file, calm);

    // without SA_RESTART: system calls return EINTR
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_handler = on_signal;
    CHECK(sigaction(SIGURG, &action, NULL) == 0 && sigaction(SIGPROF, &action, NULL) == 0);
    const struct itimerval often = {{0, 1000}, {0, 1000}}, never = {{0, 0}, {0, 0}};
    CHECK(setitimer(ITIMER_PROF, &often, NULL) == 0);
    pthread_t here = pthread_self(), sender;
    CHECK(pthread_create(&sender, NULL, send_signals, &here) == 0);
    for (int i = 0; i < 3 || atomic_load(&urgent) < 1000; i++) {
        run(argv[1], file, stormy);
        CHECK(memcmp(calm, stormy, sizeof calm) == 0);
    }
    atomic_store(&over, 1);
    CHECK(pthread_join(sender, NULL) == 0);
    CHECK(setitimer(ITIMER_PROF, &never, NULL) == 0);
    CHECK(atomic_load(&profiled) > 0);
    CHECK(unlink(file) == 0);
    return 0;
}
