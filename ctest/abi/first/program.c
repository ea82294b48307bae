// A program of the first header, dsv4.h beside this file: it calls every function that the header has, with structs as
// they were then. It must go on working with every library of its version line; see abi/CMakeLists.txt, which also builds
// it against a header that is newer than the library. Neither file is ever changed.

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
#define EXPECT(wanted, call)                                                                                           \
    do {                                                                                                               \
        dsv4_status status_ = (call);                                                                                  \
        if (status_ != (wanted)) {                                                                                     \
            fprintf(stderr, "%s:%d: %s: %s: %s\n", __FILE__, __LINE__, #call, dsv4_status_name(status_), err.message); \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)
#define OK(call) EXPECT(DSV4_STATUS_OK, call)

static dsv4_error err;

// What lies behind a caller's struct, which a library that knows more fields must leave alone.
static const uint64_t MARK = 0x6b72616d6b72616d;

#define GUARDED(type, name)                                                                                            \
    struct {                                                                                                           \
        type s;                                                                                                        \
        uint64_t mark;                                                                                                 \
    } name;                                                                                                            \
    memset(&name, 0x55, sizeof name);                                                                                  \
    name.s.size = sizeof name.s;                                                                                       \
    name.mark = MARK
#define UNTOUCHED(name) CHECK((name).mark == MARK && (name).s.size == sizeof (name).s)

static void on_log(void *userdata, dsv4_log_level level, const char *message)
{
    CHECK(level != DSV4_LOG_LEVEL_OFF && strlen(message) > 0);
    ++*(int *)userdata;
}

static int32_t on_progress(void *userdata, size_t done, size_t total)
{
    CHECK(done <= total);
    ++*(int *)userdata;
    return 0;
}

static int32_t on_piece(void *userdata, const dsv4_piece *piece)
{
    CHECK(piece->size >= offsetof(dsv4_piece, finish_value) && strlen(piece->text) == piece->text_len);
    ++*(int *)userdata;
    return 0;
}

static void versions(void)
{
    OK(dsv4_abi_check(DSV4_VERSION_NUMBER, &err));
    EXPECT(DSV4_STATUS_UNSUPPORTED, dsv4_abi_check(9u << 16, &err));
    CHECK(strstr(err.message, "the library is too old") != NULL);
    EXPECT(DSV4_STATUS_UNSUPPORTED, dsv4_abi_check(1u, &err));
    CHECK(strstr(err.message, "the program is too old") != NULL);
    CHECK(dsv4_version()[0] != 0 && dsv4_version_number() > 0 && dsv4_build_info()[0] != 0);
    CHECK(strcmp(dsv4_status_name(DSV4_STATUS_CONTEXT_FULL), "CONTEXT_FULL") == 0);

    size_t devices = 0;
    GUARDED(dsv4_device_info, device);
    dsv4_status status = dsv4_device_count(&devices, &err);
    CHECK(status == DSV4_STATUS_OK || (status == DSV4_STATUS_UNAVAILABLE && devices == 0 && err.message[0] != 0));
    status = dsv4_device_get_info(devices, &device.s, &err);
    CHECK(status == DSV4_STATUS_NOT_FOUND || status == DSV4_STATUS_UNAVAILABLE);
    UNTOUCHED(device);
}

static void texts(const dsv4_model *model)
{
    uint32_t tokens[32], token = 0;
    char text[64] = "";
    const char *bytes = NULL;
    size_t n = 0, len = 0;
    OK(dsv4_tokenizer_encode(model, "Once upon a time", 16, DSV4_MARKUP_TEXT, tokens, 32, &n, &err));
    OK(dsv4_tokenizer_decode(model, tokens, n, text, sizeof text, &len, &err));
    CHECK(len == 16 && strcmp(text, "Once upon a time") == 0);
    OK(dsv4_tokenizer_token_bytes(model, tokens[0], &bytes, &len, &err));
    CHECK(len > 0 && memcmp(bytes, text, len) == 0);
    OK(dsv4_tokenizer_token_id(model, "<think>", 7, &token, &err));

    dsv4_detokenizer *detokenizer = NULL;
    OK(dsv4_detokenizer_new(model, &detokenizer, &err));
    OK(dsv4_detokenizer_push(detokenizer, tokens[0], &bytes, &len, &err));
    OK(dsv4_detokenizer_finish(detokenizer, &bytes, &len, &err));
    dsv4_detokenizer_free(detokenizer);

    GUARDED(dsv4_chat_options, chat);
    dsv4_chat_options_init(&chat.s);
    UNTOUCHED(chat);
    chat.s.thinking = 1;
    const char *json = "[{\"role\": \"user\", \"content\": \"2+2?\"}]";
    dsv4_prompt *prompt = NULL;
    const uint32_t *ids = NULL;
    OK(dsv4_chat_render(model, json, strlen(json), &chat.s, &prompt, &err));
    OK(dsv4_prompt_tokens(prompt, &ids, &n, &err));
    OK(dsv4_prompt_text(prompt, &bytes, &len, &err));
    CHECK(n > 3 && ids[n - 1] == token && strlen(bytes) == len);
    dsv4_prompt_free(prompt);

    dsv4_chat_parser *parser = NULL;
    GUARDED(dsv4_chat_event, event);
    int kinds = 0;
    OK(dsv4_chat_parser_new(model, 1, &parser, &err));
    OK(dsv4_chat_parser_push_text(parser, "Hm.</think>", 11, &err));
    OK(dsv4_chat_parser_push_token(parser, tokens[0], &err));
    OK(dsv4_chat_parser_finish(parser, &err));
    do {
        OK(dsv4_chat_parser_next(parser, &event.s, &err));
        kinds |= 1 << event.s.kind;
    } while (event.s.kind != DSV4_EVENT_KIND_NONE);
    UNTOUCHED(event);
    CHECK(kinds & 1 << DSV4_EVENT_KIND_REASONING && kinds & 1 << DSV4_EVENT_KIND_CONTENT && kinds & 1 << DSV4_EVENT_KIND_END);
    OK(dsv4_chat_parser_message(parser, &bytes, &len, &err));
    CHECK(strlen(bytes) == len && len > 0);
    dsv4_chat_parser_free(parser);
}

static dsv4_engine *engine_of(const dsv4_model *model)
{
    GUARDED(dsv4_engine_options, options);
    dsv4_engine_options_init(&options.s);
    UNTOUCHED(options);
    options.s.numerics = DSV4_NUMERICS_EXACT;
    options.s.threads = 1;
    options.s.prefill_chunk = 16;
    dsv4_engine *engine = NULL;
#ifdef DSV4_LATER
    options.s.of_a_later_version = 1;
    EXPECT(DSV4_STATUS_INVALID_ARGUMENT, dsv4_engine_new(model, &options.s, &engine, &err));
    CHECK(engine == NULL && strstr(err.message, "use the newer library") != NULL);
    options.s.of_a_later_version = 0;
#endif
    OK(dsv4_engine_new(model, &options.s, &engine, &err));
    UNTOUCHED(options);

    GUARDED(dsv4_engine_info, info);
    OK(dsv4_engine_get_info(engine, &info.s, &err));
    UNTOUCHED(info);
    CHECK(info.s.numerics == DSV4_NUMERICS_EXACT && info.s.kv_format == DSV4_KV_FORMAT_F32);
    CHECK(info.s.threads == 1 && info.s.prefill_chunk == 16 && info.s.simd[0] != 0);
    GUARDED(dsv4_plan, plan);
    OK(dsv4_model_get_plan(model, &options.s, 512, &plan.s, &err));
    UNTOUCHED(plan);
    CHECK(plan.s.context == 512 && plan.s.weight_bytes > 0 && plan.s.page_bytes > 0);
#ifdef DSV4_LATER
    CHECK(info.s.of_a_later_version == 0 && plan.s.of_a_later_version == 0);
#endif
    return engine;
}

static void generations(dsv4_session *session)
{
    GUARDED(dsv4_sampler_options, sampling);
    dsv4_sampler_options_init(&sampling.s);
    UNTOUCHED(sampling);
    sampling.s.greedy = 1;
    GUARDED(dsv4_generation_options, options);
    dsv4_generation_options_init(&options.s);
    UNTOUCHED(options);
    options.s.max_tokens = 4;
    options.s.ignore_eos = 1;
    dsv4_sampler *sampler = NULL;
    dsv4_generation *generation = NULL;
    OK(dsv4_sampler_new(&sampling.s, &sampler, &err));

    uint32_t prompt[40], pulled[4] = {0}, token = 0;
    for (uint32_t i = 0; i < 40; i++) prompt[i] = 300 + i;
    int chunks = 0, pieces = 0, got = 0;
    int32_t finish = -1;
    OK(dsv4_session_feed(session, prompt, 40, on_progress, &chunks, &err));
    CHECK(chunks == 3);
    const float *logits = NULL;
    size_t n = 0, len = 0;
    OK(dsv4_session_logits(session, &logits, &n, &err));
    OK(dsv4_sampler_sample(sampler, logits, n, &token, &err));
    OK(dsv4_sampler_accept(sampler, token, &err));
    OK(dsv4_sampler_reset(sampler, &err));
    OK(dsv4_generation_new(session, sampler, &options.s, &generation, &err));
    GUARDED(dsv4_piece, piece);
    do {
        OK(dsv4_generation_next(generation, &piece.s, &err));
        CHECK(got < 4);
        pulled[got++] = piece.s.token;
    } while (piece.s.finish == DSV4_FINISH_NONE);
    UNTOUCHED(piece);
    CHECK(got == 4 && piece.s.finish == DSV4_FINISH_MAX_TOKENS && pulled[0] == token);
    const char *rest = NULL;
    OK(dsv4_generation_finish(generation, &rest, &len, &err));
    dsv4_generation_free(generation);

    OK(dsv4_session_clear(session, &err));
    OK(dsv4_session_cancel(session, &err));
    EXPECT(DSV4_STATUS_CANCELLED, dsv4_session_feed(session, prompt, 40, NULL, NULL, &err));
    OK(dsv4_session_clear(session, &err));
    float *rows = malloc(40 * n * sizeof *rows);
    CHECK(rows != NULL);
    OK(dsv4_session_feed_all(session, prompt, 40, rows, 40 * n, &err));
    OK(dsv4_session_logits(session, &logits, &n, &err));
    CHECK(memcmp(rows + 39 * n, logits, n * sizeof *rows) == 0);
    free(rows);
    OK(dsv4_session_generate(session, sampler, &options.s, on_piece, &pieces, &finish, &err));
    CHECK(pieces == 4 && finish == DSV4_FINISH_MAX_TOKENS);
    const uint32_t *held = NULL;
    OK(dsv4_session_tokens(session, &held, &n, &err));
    CHECK(n == 43 && memcmp(held + 40, pulled, 3 * sizeof *held) == 0);
    dsv4_sampler_free(sampler);
}

int main(int argc, char **argv)
{
    CHECK(argc == 2);
    int messages = 0;
    OK(dsv4_log_set(DSV4_LOG_LEVEL_DEBUG, on_log, &messages, &err));
    versions();

    GUARDED(dsv4_model_options, opening);
    dsv4_model_options_init(&opening.s);
    UNTOUCHED(opening);
    opening.s.preload_tokenizer = 1;
    dsv4_model *model = NULL;
    OK(dsv4_model_open(argv[1], &opening.s, &model, &err));
    const char *path = NULL;
    OK(dsv4_model_path(model, &path, &err));
    CHECK(strcmp(path, argv[1]) == 0);
    GUARDED(dsv4_model_info, info);
    OK(dsv4_model_get_info(model, &info.s, &err));
    UNTOUCHED(info);
    CHECK(info.s.vocab_size > 0 && info.s.weight_bytes > 0 && info.s.reserved == 0);
    texts(model);

    dsv4_engine *engine = engine_of(model);
    GUARDED(dsv4_session_options, options);
    dsv4_session_options_init(&options.s);
    UNTOUCHED(options);
    options.s.context = 128;
    dsv4_session *session = NULL;
    OK(dsv4_session_new(engine, &options.s, &session, &err));
    generations(session);
    GUARDED(dsv4_session_info, state);
    OK(dsv4_session_get_info(session, &state.s, &err));
    UNTOUCHED(state);
    CHECK(state.s.position == 43 && state.s.context == 128 && state.s.remaining == 85);
    GUARDED(dsv4_cache_info, cache);
    OK(dsv4_session_get_cache_info(session, &cache.s, &err));
    UNTOUCHED(cache);
    CHECK(cache.s.window_bytes > 0 && cache.s.state_bytes > 0);
    dsv4_session_free(session);
    dsv4_engine_free(engine);
    dsv4_model_free(model);
    CHECK(messages > 0);
    OK(dsv4_log_set(DSV4_LOG_LEVEL_OFF, NULL, NULL, &err));
    return 0;
}
