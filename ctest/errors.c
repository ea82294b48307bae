// Every kind of failure that a program can cause: the status, the words, zeroed outputs, and objects that go on.

#include "check.h"

#include <limits.h>
#include <math.h>

static void opening(void)
{
    dsv4_error err = {0};
    dsv4_model *model = (dsv4_model *)&err;
    REFUSED(DSV4_STATUS_NOT_FOUND, "/nowhere/config.json", dsv4_model_open("/nowhere", NULL, &model, &err));
    CHECK(model == NULL);
    REFUSED(DSV4_STATUS_INVALID_ARGUMENT, "path is NULL", dsv4_model_open(NULL, NULL, &model, &err));
    REFUSED(DSV4_STATUS_INVALID_ARGUMENT, "path is empty", dsv4_model_open("", NULL, &model, &err));
    REFUSED(DSV4_STATUS_INVALID_ARGUMENT, "out is NULL", dsv4_model_open("/nowhere", NULL, NULL, &err));
    // the error may be NULL
    CHECK(dsv4_model_open("/nowhere", NULL, &model, NULL) == DSV4_STATUS_NOT_FOUND);
    // and is written by a call that succeeds
    OK(dsv4_abi_check(DSV4_VERSION_NUMBER, &err));
    CHECK(err.code == DSV4_STATUS_OK && err.message[0] == 0);
    REFUSED(DSV4_STATUS_UNSUPPORTED, "the library is too old", dsv4_abi_check(9u << 16, &err));
    CHECK(strcmp(dsv4_status_name(DSV4_STATUS_CONTEXT_FULL), "CONTEXT_FULL") == 0);
    CHECK(strcmp(dsv4_status_name(4711), "UNKNOWN") == 0);

    // a message longer than its place is cut and still ends
    static char path[3000];
    memset(path, 'x', sizeof path - 1);
    dsv4_status status = dsv4_model_open(path, NULL, &model, &err);
    CHECK(status == DSV4_STATUS_IO || status == DSV4_STATUS_NOT_FOUND);
    CHECK(strlen(err.message) == DSV4_ERROR_MESSAGE_SIZE - 1);
}

static void text(const dsv4_model *model)
{
    dsv4_error err = {0};
    uint32_t tokens[64];
    char out[64];
    size_t n = 77;
    REFUSED(DSV4_STATUS_INVALID_ARGUMENT, "not UTF-8: the byte at offset 1",
            dsv4_tokenizer_encode(model, "a\xff", 2, DSV4_MARKUP_TEXT, tokens, 64, &n, &err));
    CHECK(n == 0);
    REFUSED(DSV4_STATUS_INVALID_ARGUMENT, "markup is 5; 0 to 1",
            dsv4_tokenizer_encode(model, "a", 1, 5, tokens, 64, &n, &err));
    REFUSED(DSV4_STATUS_INVALID_ARGUMENT, "more than memory can hold",
            dsv4_tokenizer_encode(model, "a", SIZE_MAX, DSV4_MARKUP_TEXT, tokens, 64, &n, &err));
    // the length protocol
    OK(dsv4_tokenizer_encode(model, "Once upon a time", 16, DSV4_MARKUP_TEXT, NULL, 0, &n, &err));
    size_t needed = n;
    CHECK(needed > 2);
    EXPECT(DSV4_STATUS_BUFFER_TOO_SMALL,
           dsv4_tokenizer_encode(model, "Once upon a time", 16, DSV4_MARKUP_TEXT, tokens, 2, &n, &err));
    CHECK(n == needed && tokens[0] == 0);
    OK(dsv4_tokenizer_encode(model, "Once upon a time", 16, DSV4_MARKUP_TEXT, tokens, needed, &n, &err));
    size_t len = 0;
    EXPECT(DSV4_STATUS_BUFFER_TOO_SMALL, dsv4_tokenizer_decode(model, tokens, n, out, 16, &len, &err));
    CHECK(len == 16);
    OK(dsv4_tokenizer_decode(model, tokens, n, out, 17, &len, &err));
    CHECK(strcmp(out, "Once upon a time") == 0);
    // an empty text needs no memory
    OK(dsv4_tokenizer_encode(model, NULL, 0, DSV4_MARKUP_TEXT, NULL, 0, &n, &err));
    CHECK(n == 0);
    tokens[0] = 99999999;
    REFUSED(DSV4_STATUS_TOKENIZER, "99999999", dsv4_tokenizer_decode(model, tokens, 1, out, 64, &len, &err));
    CHECK(len == 0);
    const char *bytes = out;
    REFUSED(DSV4_STATUS_TOKENIZER, "99999999", dsv4_tokenizer_token_bytes(model, 99999999, &bytes, &len, &err));
    CHECK(bytes == NULL && len == 0);
    uint32_t token = 1;
    REFUSED(DSV4_STATUS_NOT_FOUND, "no control token \"<none>\"", dsv4_tokenizer_token_id(model, "<none>", 6, &token, &err));
    CHECK(token == 0);
    OK(dsv4_tokenizer_token_id(model, "<think>", 7, &token, &err));
    CHECK(token != 0);
}

static void sessions(const fixture *f)
{
    dsv4_error err = {0};
    dsv4_session_info info = {sizeof info, 0, 0, 0, 0, 0, 0};
    const float *logits = (const float *)&info;
    size_t n = 5;
    REFUSED(DSV4_STATUS_INVALID_ARGUMENT, "no logits", dsv4_session_logits(f->session, &logits, &n, &err));
    CHECK(logits == NULL && n == 0);

    uint32_t bad[2] = {5, 99999999};
    REFUSED(DSV4_STATUS_INVALID_ARGUMENT, "token 1 has id 99999999",
            dsv4_session_feed(f->session, bad, 2, NULL, NULL, &err));
    REFUSED(DSV4_STATUS_INVALID_ARGUMENT, "tokens is not aligned",
            dsv4_session_feed(f->session, (const uint32_t *)((const char *)bad + 1), 1, NULL, NULL, &err));
    static uint32_t many[513];
    REFUSED(DSV4_STATUS_CONTEXT_FULL, "513 tokens do not fit: 0 of 512",
            dsv4_session_feed(f->session, many, 513, NULL, NULL, &err));
    float row[2];
    REFUSED(DSV4_STATUS_INVALID_ARGUMENT, "the capacity of logits is 2",
            dsv4_session_feed_all(f->session, bad, 1, row, 2, &err));
    OK(dsv4_session_get_info(f->session, &info, &err));
    CHECK(info.position == 0 && info.context == 512 && info.remaining == 512 && info.has_logits == 0);
    // and the session goes on
    OK(dsv4_session_feed(f->session, bad, 1, NULL, NULL, &err));
    OK(dsv4_session_logits(f->session, &logits, &n, &err));
    CHECK(logits != NULL && n > 1000);

    dsv4_session_options options;
    dsv4_session_options_init(&options);
    options.context = UINT64_MAX;
    dsv4_session *session = f->session;
    EXPECT(DSV4_STATUS_INVALID_ARGUMENT, dsv4_session_new(f->engine, &options, &session, &err));
    CHECK(session == NULL);
}

static void sampling(void)
{
    dsv4_error err = {0};
    dsv4_sampler_options options;
    dsv4_sampler_options_init(&options);
    dsv4_sampler *sampler = NULL;
    options.temperature = 0;
    REFUSED(DSV4_STATUS_INVALID_ARGUMENT, "temperature is 0", dsv4_sampler_new(&options, &sampler, &err));
    options.temperature = 1;
    options.greedy = 2;
    REFUSED(DSV4_STATUS_INVALID_ARGUMENT, "greedy is 2", dsv4_sampler_new(&options, &sampler, &err));
    options.greedy = 0;
    options.n_bias = 1;
    REFUSED(DSV4_STATUS_INVALID_ARGUMENT, "bias_tokens is NULL", dsv4_sampler_new(&options, &sampler, &err));
    CHECK(sampler == NULL);

    OK(dsv4_sampler_new(NULL, &sampler, &err));
    float logits[3] = {0, NAN, 0};
    uint32_t token = 9;
    REFUSED(DSV4_STATUS_NUMERIC, "token id 1", dsv4_sampler_sample(sampler, logits, 3, &token, &err));
    CHECK(token == 0);
    EXPECT(DSV4_STATUS_INVALID_ARGUMENT, dsv4_sampler_sample(sampler, NULL, 0, &token, &err));
    logits[1] = 0;
    OK(dsv4_sampler_sample(sampler, logits, 3, &token, &err));
    CHECK(token < 3);
    OK(dsv4_sampler_accept(sampler, token, &err));
    OK(dsv4_sampler_reset(sampler, &err));
    dsv4_sampler_free(sampler);
}

static void chats(const dsv4_model *model)
{
    dsv4_error err = {0};
    dsv4_prompt *prompt = (dsv4_prompt *)&err;
    const char *json = "[{\"role\": \"nobody\", \"content\": \"x\"}]";
    REFUSED(DSV4_STATUS_CHAT, "messages[0]", dsv4_chat_render(model, json, strlen(json), NULL, &prompt, &err));
    CHECK(prompt == NULL);
    REFUSED(DSV4_STATUS_CHAT, "", dsv4_chat_render(model, "[{]", 3, NULL, &prompt, &err));
    dsv4_chat_parser *parser = NULL;
    REFUSED(DSV4_STATUS_INVALID_ARGUMENT, "thinking is 7", dsv4_chat_parser_new(model, 7, &parser, &err));
    CHECK(parser == NULL);
}

int main(int argc, char **argv)
{
    CHECK(argc == 2);
    opening();
    fixture f = fixture_open(argv[1]);
    text(f.model);
    sessions(&f);
    sampling();
    chats(f.model);
    dsv4_error err = {0};
    size_t devices = 7;
    dsv4_status status = dsv4_device_count(&devices, &err);
    if (status != DSV4_STATUS_OK) {
        // no GPU: a reason in words, and everything above ran on the CPU
        CHECK(status == DSV4_STATUS_UNAVAILABLE && devices == 0 && strlen(err.message) > 20);
        dsv4_engine_options options;
        dsv4_engine_options_init(&options);
        options.device = "cuda:0";
        dsv4_engine *engine = NULL;
        EXPECT(DSV4_STATUS_UNAVAILABLE, dsv4_engine_new(f.model, &options, &engine, &err));
        options.device = "toaster";
        REFUSED(DSV4_STATUS_INVALID_ARGUMENT, "toaster", dsv4_engine_new(f.model, &options, &engine, &err));
    }
    fixture_close(&f);
    return 0;
}
