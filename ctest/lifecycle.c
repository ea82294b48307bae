// Making, using and freeing of every object, parents first too. Short, since it also runs under valgrind.

#include "check.h"

int main(int argc, char **argv)
{
    CHECK(argc == 2);
    dsv4_error err = {0};

    OK(dsv4_abi_check(DSV4_VERSION_NUMBER, &err));
    CHECK(dsv4_version_number() == DSV4_VERSION_NUMBER);
    CHECK(strcmp(dsv4_version(), DSV4_VERSION) == 0);
    CHECK(strstr(dsv4_build_info(), DSV4_VERSION) != NULL);

    // everything that is freed may be NULL
    dsv4_model_free(NULL);
    dsv4_engine_free(NULL);
    dsv4_session_free(NULL);
    dsv4_sampler_free(NULL);
    dsv4_generation_free(NULL);
    dsv4_detokenizer_free(NULL);
    dsv4_prompt_free(NULL);
    dsv4_chat_parser_free(NULL);

    fixture f = fixture_open(argv[1]);
    const char *path = NULL;
    OK(dsv4_model_path(f.model, &path, &err));
    CHECK(strcmp(path, argv[1]) == 0);

    uint32_t tokens[32];
    size_t n = encode(f.model, "Once upon a time", tokens, 32);
    dsv4_detokenizer *detokenizer = NULL;
    OK(dsv4_detokenizer_new(f.model, &detokenizer, &err));
    dsv4_sampler_options options;
    dsv4_sampler_options_init(&options);
    options.greedy = 1;
    dsv4_sampler *sampler = NULL;
    OK(dsv4_sampler_new(&options, &sampler, &err));

    // the session holds what it needs
    dsv4_engine_free(f.engine);
    dsv4_model_free(f.model);
    OK(dsv4_session_feed(f.session, tokens, n, NULL, NULL, &err));
    dsv4_generation_options end;
    dsv4_generation_options_init(&end);
    end.max_tokens = 3;
    dsv4_generation *generation = NULL;
    OK(dsv4_generation_new(f.session, sampler, &end, &generation, &err));

    // and so do generation and detokenizer
    dsv4_session_free(f.session);
    dsv4_sampler_free(sampler);
    dsv4_piece piece = {sizeof piece, NULL, 0, 0, 0, 0, 0};
    int pieces = 0;
    do {
        OK(dsv4_generation_next(generation, &piece, &err));
        const char *text = NULL;
        size_t len = 0;
        OK(dsv4_detokenizer_push(detokenizer, piece.token, &text, &len, &err));
        CHECK(len == piece.text_len && memcmp(text, piece.text, len) == 0);
        pieces++;
    } while (piece.finish == DSV4_FINISH_NONE);
    CHECK(pieces == 3 && piece.finish == DSV4_FINISH_MAX_TOKENS);
    dsv4_generation_free(generation);
    dsv4_detokenizer_free(detokenizer);
    return 0;
}
