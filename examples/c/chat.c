// Loads a model and chats: keeps the conversation and streams each answer.
//
//   cc -o chat chat.c $(pkg-config --cflags --libs dsv4)
//   ./chat MODEL "What is the capital of France?"    one question
//   ./chat MODEL                                     a line of standard input each

#include <dsv4.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static dsv4_error err;
// The conversation: a JSON array of messages without its last bracket.
static char *messages;
static size_t length;

static void check(dsv4_status status)
{
    if (status == DSV4_STATUS_OK) return;
    fprintf(stderr, "%s: %s\n", dsv4_status_name(status), err.message);
    exit(1);
}

static void append(const char *text)
{
    if ((messages = realloc(messages, length + strlen(text) + 1)) == NULL) exit(1);
    strcpy(messages + length, text);
    length += strlen(text);
}

static void ask(dsv4_model *model, dsv4_session *session, dsv4_sampler *sampler, const char *question)
{
    append(length == 0 ? "[" : ",");
    append("{\"role\": \"user\", \"content\": \"");
    for (; *question != 0; question++) {
        char c[] = {(unsigned char)*question < ' ' ? ' ' : *question, 0};
        if (*c == '"' || *c == '\\') append("\\");
        append(c);
    }
    append("\"}]");
    dsv4_prompt *prompt;
    const uint32_t *tokens;
    size_t n, kept;
    check(dsv4_chat_render(model, messages, length--, NULL, &prompt, &err));
    check(dsv4_prompt_tokens(prompt, &tokens, &n, &err));
    // what the session has of the conversation is not computed again
    check(dsv4_session_keep_common(session, tokens, n, &kept, &err));
    check(dsv4_session_feed(session, tokens + kept, n - kept, NULL, NULL, &err));
    dsv4_prompt_free(prompt);
    dsv4_generation *generation;
    dsv4_generation_options options;
    dsv4_generation_options_init(&options);
    options.max_tokens = 200;
    check(dsv4_generation_new(session, sampler, &options, &generation, &err));
    dsv4_chat_parser *parser;
    check(dsv4_chat_parser_new(model, 0, &parser, &err));
    dsv4_piece piece = {0};
    dsv4_chat_event event = {0};
    piece.size = sizeof piece;
    event.size = sizeof event;
    do {
        check(dsv4_generation_next(generation, &piece, &err));
        check(dsv4_chat_parser_push_token(parser, piece.token, &err));
        if (piece.finish != DSV4_FINISH_NONE) check(dsv4_chat_parser_finish(parser, &err));
        // markers, reasoning and calls of tools are other kinds of events
        while (check(dsv4_chat_parser_next(parser, &event, &err)), event.kind != DSV4_EVENT_KIND_NONE)
            if (event.kind == DSV4_EVENT_KIND_CONTENT) fwrite(event.text, 1, event.text_len, stdout);
        fflush(stdout);
    } while (piece.finish == DSV4_FINISH_NONE);
    const char *answer;
    check(dsv4_chat_parser_message(parser, &answer, &n, &err));
    append(",");
    append(answer);
    puts("");
    dsv4_chat_parser_free(parser);
    dsv4_generation_free(generation);
}

int main(int argc, char **argv)
{
    if (argc < 2) return fprintf(stderr, "usage: chat MODEL [QUESTION]\n"), 2;
    dsv4_model *model;
    dsv4_engine *engine;
    dsv4_session *session;
    dsv4_sampler *sampler;
    char line[4096];
    check(dsv4_abi_check(DSV4_VERSION_NUMBER, &err));
    check(dsv4_model_open(argv[1], NULL, &model, &err));
    check(dsv4_engine_new(model, NULL, &engine, &err));
    check(dsv4_session_new(engine, NULL, &session, &err));
    check(dsv4_sampler_new(NULL, &sampler, &err));
    if (argc > 2) ask(model, session, sampler, argv[2]);
    while (argc == 2 && (fputs("> ", stderr), fgets(line, sizeof line, stdin) != NULL)) {
        line[strcspn(line, "\n")] = 0;
        ask(model, session, sampler, line);
    }
    free(messages);
    dsv4_sampler_free(sampler);
    dsv4_session_free(session);
    dsv4_engine_free(engine);
    dsv4_model_free(model);
    return 0;
}
