// Loads a model, chats, streams the answer.
//
//   cc -o chat chat.c $(pkg-config --cflags --libs dsv4)
//   ./chat MODEL "What is the capital of France?"    one question
//   ./chat MODEL                                     a line of standard input each

#include <dsv4.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static dsv4_error err;

static void check(dsv4_status status)
{
    if (status == DSV4_STATUS_OK) return;
    fprintf(stderr, "%s: %s\n", dsv4_status_name(status), err.message);
    exit(1);
}

// Writes `text` as a JSON string, without its quotes. Returns the end.
static char *quote(char *out, const char *text)
{
    for (; *text != 0; text++) {
        if (*text == '"' || *text == '\\') *out++ = '\\';
        *out++ = (unsigned char)*text < ' ' ? ' ' : *text;
    }
    return out;
}

static void ask(dsv4_model *model, dsv4_session *session, dsv4_sampler *sampler, const char *question)
{
    char *json = malloc(2 * strlen(question) + 64);
    if (json == NULL) exit(1);
    strcpy(json, "[{\"role\": \"user\", \"content\": \"");
    strcpy(quote(json + strlen(json), question), "\"}]");

    dsv4_prompt *prompt;
    const uint32_t *tokens;
    size_t n;
    check(dsv4_chat_render(model, json, strlen(json), NULL, &prompt, &err));
    check(dsv4_prompt_tokens(prompt, &tokens, &n, &err));
    check(dsv4_session_clear(session, &err));
    check(dsv4_session_feed(session, tokens, n, NULL, NULL, &err));
    dsv4_prompt_free(prompt);
    free(json);

    dsv4_generation_options options;
    dsv4_generation_options_init(&options);
    options.max_tokens = 200;
    dsv4_generation *generation;
    check(dsv4_generation_new(session, sampler, &options, &generation, &err));
    dsv4_piece piece = {0};
    piece.size = sizeof piece;
    while (piece.finish == DSV4_FINISH_NONE) {
        check(dsv4_generation_next(generation, &piece, &err));
        fwrite(piece.text, 1, piece.text_len, stdout);
        fflush(stdout);
    }
    puts("");
    dsv4_generation_free(generation);
}

int main(int argc, char **argv)
{
    if (argc < 2) return fprintf(stderr, "usage: chat MODEL [QUESTION]\n"), 2;
    dsv4_model *model;
    dsv4_engine *engine;
    dsv4_session *session;
    dsv4_sampler *sampler;
    check(dsv4_abi_check(DSV4_VERSION_NUMBER, &err));
    check(dsv4_model_open(argv[1], NULL, &model, &err));
    check(dsv4_engine_new(model, NULL, &engine, &err));
    check(dsv4_session_new(engine, NULL, &session, &err));
    check(dsv4_sampler_new(NULL, &sampler, &err));

    char line[4096];
    if (argc > 2) {
        ask(model, session, sampler, argv[2]);
    } else {
        while (fputs("> ", stdout), fflush(stdout), fgets(line, sizeof line, stdin) != NULL)
            ask(model, session, sampler, line);
    }
    dsv4_sampler_free(sampler);
    dsv4_session_free(session);
    dsv4_engine_free(engine);
    dsv4_model_free(model);
    return 0;
}
