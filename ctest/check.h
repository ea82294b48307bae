// What every test program uses: checks that say what went wrong and end the program, and one object of each kind.

#ifndef CHECK_H
#define CHECK_H

#include <dsv4.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);                                            \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

// Calls a function whose last argument is the address of `err`, and wants a status.
#define EXPECT(wanted, call)                                                                                           \
    do {                                                                                                               \
        dsv4_status status_ = (call);                                                                                  \
        if (status_ != (wanted)) {                                                                                     \
            fprintf(stderr, "%s:%d: %s: %s, not %s: %s\n", __FILE__, __LINE__, #call, dsv4_status_name(status_),       \
                    dsv4_status_name(wanted), err.message);                                                            \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

#define OK(call) EXPECT(DSV4_STATUS_OK, call)

// Also wants the message to contain a text.
#define REFUSED(wanted, text, call)                                                                                    \
    do {                                                                                                               \
        EXPECT(wanted, call);                                                                                          \
        if (strstr(err.message, (text)) == NULL || err.code != (wanted)) {                                             \
            fprintf(stderr, "%s:%d: the message lacks \"%s\": %s\n", __FILE__, __LINE__, (text), err.message);         \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

// A model, an engine with one thread, and a session of 512 tokens.
typedef struct fixture {
    dsv4_model *model;
    dsv4_engine *engine;
    dsv4_session *session;
} fixture;

static inline fixture fixture_open(const char *path)
{
    dsv4_error err = {0};
    fixture f = {0};
    OK(dsv4_model_open(path, NULL, &f.model, &err));
    dsv4_engine_options engine;
    dsv4_engine_options_init(&engine);
    engine.threads = 1;
    engine.prefill_chunk = 16;
    OK(dsv4_engine_new(f.model, &engine, &f.engine, &err));
    dsv4_session_options session;
    dsv4_session_options_init(&session);
    session.context = 512;
    OK(dsv4_session_new(f.engine, &session, &f.session, &err));
    return f;
}

static inline void fixture_close(fixture *f)
{
    dsv4_session_free(f->session);
    dsv4_engine_free(f->engine);
    dsv4_model_free(f->model);
}

// Figures as they are now, and the oldest news of a request.
static inline dsv4_session_info info_of(dsv4_session *session)
{
    dsv4_error err = {0};
    dsv4_session_info info;
    memset(&info, 0, sizeof info);
    info.size = sizeof info;
    OK(dsv4_session_get_info(session, &info, &err));
    return info;
}

static inline dsv4_engine_metrics metrics_of(const dsv4_engine *engine)
{
    dsv4_error err = {0};
    dsv4_engine_metrics metrics;
    memset(&metrics, 0, sizeof metrics);
    metrics.size = sizeof metrics;
    OK(dsv4_engine_get_metrics(engine, &metrics, &err));
    return metrics;
}

static inline dsv4_request_event event_of(dsv4_request *request)
{
    dsv4_error err = {0};
    dsv4_request_event event;
    memset(&event, 0, sizeof event);
    event.size = sizeof event;
    OK(dsv4_request_poll(request, &event, &err));
    CHECK(event.reserved == 0 && event.text != NULL && event.text[event.text_len] == 0);
    return event;
}

// Encodes a text that ends with a NUL; returns the number of tokens.
static inline size_t encode(const dsv4_model *model, const char *text, uint32_t *tokens, size_t capacity)
{
    dsv4_error err = {0};
    size_t n = 0;
    OK(dsv4_tokenizer_encode(model, text, strlen(text), DSV4_MARKUP_TEXT, tokens, capacity, &n, &err));
    return n;
}

#endif
