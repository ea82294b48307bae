// Generation, pulled and pushed: the same tokens, stop conditions, cancelling and going on, logits in place.

#include "check.h"

#define MAX 24

typedef struct pushed {
    uint32_t tokens[MAX];
    size_t n;
    size_t stop_after;
    dsv4_session *session;
} pushed;

static int32_t on_piece(void *userdata, const dsv4_piece *piece)
{
    pushed *p = userdata;
    CHECK(p->n < MAX);
    p->tokens[p->n++] = piece->token;
    CHECK(strlen(piece->text) == piece->text_len);
    // a callback may use the library, also on the session it runs for
    dsv4_error err = {0};
    dsv4_session_info info = {sizeof info, 0, 0, 0, 0, 0, 0};
    OK(dsv4_session_get_info(p->session, &info, &err));
    return p->n == p->stop_after;
}

static int32_t count_progress(void *userdata, size_t done, size_t total)
{
    CHECK(done <= total);
    return ++*(int *)userdata == 2;
}

int main(int argc, char **argv)
{
    CHECK(argc == 2);
    dsv4_error err = {0};
    fixture f = fixture_open(argv[1]);
    uint32_t prompt[64];
    size_t n = encode(f.model, "The old man looked at the sea and", prompt, 64);

    dsv4_sampler_options greedy;
    dsv4_sampler_options_init(&greedy);
    greedy.greedy = 1;
    dsv4_sampler *sampler = NULL;
    OK(dsv4_sampler_new(&greedy, &sampler, &err));
    dsv4_generation_options options;
    dsv4_generation_options_init(&options);
    options.max_tokens = 12;

    // pulled
    OK(dsv4_session_feed(f.session, prompt, n, NULL, NULL, &err));
    dsv4_generation *generation = NULL;
    OK(dsv4_generation_new(f.session, sampler, &options, &generation, &err));
    uint32_t tokens[MAX];
    char text[1024] = "";
    size_t count = 0;
    dsv4_piece piece = {sizeof piece, NULL, 0, 0, 0, 0, 0};
    do {
        OK(dsv4_generation_next(generation, &piece, &err));
        tokens[count++] = piece.token;
        strcat(text, piece.text);
    } while (piece.finish == DSV4_FINISH_NONE);
    CHECK(count == 12 && piece.finish == DSV4_FINISH_MAX_TOKENS && strlen(text) > 10);
    OK(dsv4_generation_next(generation, &piece, &err));
    CHECK(piece.finish == DSV4_FINISH_MAX_TOKENS && piece.text_len == 0 && piece.token == 0);
    dsv4_generation_free(generation);

    // pushed: the same tokens
    OK(dsv4_session_clear(f.session, &err));
    OK(dsv4_session_feed(f.session, prompt, n, NULL, NULL, &err));
    pushed p = {{0}, 0, 0, f.session};
    int32_t finish = -1;
    OK(dsv4_session_generate(f.session, sampler, &options, on_piece, &p, &finish, &err));
    CHECK(finish == DSV4_FINISH_MAX_TOKENS && p.n == 12 && memcmp(p.tokens, tokens, 12 * sizeof *tokens) == 0);

    // by hand, with logits in place: the same tokens
    OK(dsv4_session_clear(f.session, &err));
    OK(dsv4_session_feed(f.session, prompt, n, NULL, NULL, &err));
    for (size_t i = 0; i < 12; i++) {
        const float *logits = NULL;
        size_t vocab = 0;
        uint32_t token = 0;
        OK(dsv4_session_logits(f.session, &logits, &vocab, &err));
        OK(dsv4_sampler_sample(sampler, logits, vocab, &token, &err));
        CHECK(token == tokens[i]);
        OK(dsv4_session_feed(f.session, &token, 1, NULL, NULL, &err));
    }
    const uint32_t *held = NULL;
    size_t n_held = 0;
    OK(dsv4_session_tokens(f.session, &held, &n_held, &err));
    CHECK(n_held == n + 12 && memcmp(held, prompt, n * sizeof *held) == 0 && held[n + 11] == tokens[11]);
    dsv4_cache_info cache = {sizeof cache, 0, 0, 0};
    OK(dsv4_session_get_cache_info(f.session, &cache, &err));
    CHECK(cache.window_bytes > 0 && cache.state_bytes > 0 && cache.page_bytes > 0);

    // the logits of all positions: the last row is that of a feed
    dsv4_session *other = NULL;
    OK(dsv4_session_new(f.engine, NULL, &other, &err));
    const float *last = NULL;
    size_t vocab = 0;
    OK(dsv4_session_feed(other, prompt, 3, NULL, NULL, &err));
    OK(dsv4_session_logits(other, &last, &vocab, &err));
    float *rows = malloc(3 * vocab * sizeof *rows);
    CHECK(rows != NULL);
    OK(dsv4_session_clear(f.session, &err));
    OK(dsv4_session_feed_all(f.session, prompt, 3, rows, 3 * vocab, &err));
    CHECK(memcmp(rows + 2 * vocab, last, vocab * sizeof *rows) == 0);
    free(rows);
    dsv4_session_free(other);

    // a stop string is never shown, not even in parts
    const char *stops[] = {"never in the text", NULL};
    char stop[8] = {0};
    memcpy(stop, text + 5, 4);
    stops[1] = stop;
    OK(dsv4_session_clear(f.session, &err));
    OK(dsv4_session_feed(f.session, prompt, n, NULL, NULL, &err));
    options.stop_strings = stops;
    options.n_stop_strings = 2;
    OK(dsv4_generation_new(f.session, sampler, &options, &generation, &err));
    char shown[1024] = "";
    do {
        OK(dsv4_generation_next(generation, &piece, &err));
        strcat(shown, piece.text);
    } while (piece.finish == DSV4_FINISH_NONE);
    CHECK(piece.finish == DSV4_FINISH_STRING && piece.finish_value == 1);
    CHECK(strstr(shown, stop) == NULL && strncmp(text, shown, strlen(shown)) == 0);
    dsv4_generation_free(generation);
    stops[0] = NULL;
    REFUSED(DSV4_STATUS_INVALID_ARGUMENT, "stop_strings[0] is NULL",
            dsv4_generation_new(f.session, sampler, &options, &generation, &err));
    CHECK(generation == NULL);

    // a stop token
    dsv4_generation_options_init(&options);
    options.max_tokens = 12;
    options.stop_tokens = &tokens[4];
    options.n_stop_tokens = 1;
    OK(dsv4_session_clear(f.session, &err));
    OK(dsv4_session_feed(f.session, prompt, n, NULL, NULL, &err));
    OK(dsv4_session_generate(f.session, sampler, &options, NULL, NULL, &finish, &err));
    CHECK(finish == DSV4_FINISH_TOKEN);

    // a callback that cancels, and a session that goes on
    dsv4_generation_options_init(&options);
    options.max_tokens = 12;
    OK(dsv4_session_clear(f.session, &err));
    OK(dsv4_session_feed(f.session, prompt, n, NULL, NULL, &err));
    pushed c = {{0}, 0, 3, f.session};
    EXPECT(DSV4_STATUS_CANCELLED, dsv4_session_generate(f.session, sampler, &options, on_piece, &c, &finish, &err));
    CHECK(c.n == 3 && finish == 0 && memcmp(c.tokens, tokens, 3 * sizeof *tokens) == 0);

    // a cancelled next is tried again, and nothing is lost
    OK(dsv4_session_clear(f.session, &err));
    OK(dsv4_session_feed(f.session, prompt, n, NULL, NULL, &err));
    OK(dsv4_generation_new(f.session, sampler, &options, &generation, &err));
    OK(dsv4_generation_next(generation, &piece, &err));
    OK(dsv4_session_cancel(f.session, &err));
    EXPECT(DSV4_STATUS_CANCELLED, dsv4_generation_next(generation, &piece, &err));
    CHECK(piece.text == NULL && piece.text_len == 0);
    OK(dsv4_generation_next(generation, &piece, &err));
    CHECK(piece.token == tokens[1]);
    // a session that was changed under it is noticed
    OK(dsv4_session_clear(f.session, &err));
    REFUSED(DSV4_STATUS_INVALID_ARGUMENT, "start a new one", dsv4_generation_next(generation, &piece, &err));
    const char *rest = NULL;
    size_t len = 7;
    OK(dsv4_generation_finish(generation, &rest, &len, &err));
    CHECK(rest != NULL && strlen(rest) == len);
    REFUSED(DSV4_STATUS_INVALID_ARGUMENT, "was ended", dsv4_generation_next(generation, &piece, &err));
    dsv4_generation_free(generation);

    // progress cancels within one chunk (16 tokens here), and what was fed stays
    uint32_t longer[64];
    for (size_t i = 0; i < 64; i++) longer[i] = prompt[i % n];
    OK(dsv4_session_clear(f.session, &err));
    int chunks = 0;
    EXPECT(DSV4_STATUS_CANCELLED, dsv4_session_feed(f.session, longer, 64, count_progress, &chunks, &err));
    dsv4_session_info info = {sizeof info, 0, 0, 0, 0, 0, 0};
    OK(dsv4_session_get_info(f.session, &info, &err));
    CHECK(chunks == 2 && info.position == 32 && info.has_logits == 0);
    OK(dsv4_session_feed(f.session, longer + 32, 32, NULL, NULL, &err));

    dsv4_sampler_free(sampler);
    fixture_close(&f);
    return 0;
}
