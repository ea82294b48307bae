// Reads a long document and asks about it. What has been read is saved as it goes, so that a program that was stopped goes
// on where it was, and one that has read it all answers at once.
//
//   cc -o document document.c $(pkg-config --cflags --libs dsv4)
//   ./document MODEL TEXTFILE SESSIONFILE QUESTION

#include <dsv4.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PORTION 2048 // tokens between two saves

static dsv4_error err;
static volatile sig_atomic_t stopped;

static void stop(int number)
{
    (void)number;
    stopped = 1;
}

static void check(dsv4_status status)
{
    if (status == DSV4_STATUS_OK) return;
    fprintf(stderr, "%s: %s\n", dsv4_status_name(status), err.message);
    exit(1);
}

static char *read_file(const char *path)
{
    FILE *file = fopen(path, "rb");
    if (file == NULL) return perror(path), exit(1), NULL;
    size_t length = 0, capacity = 1 << 16, n;
    char *text = malloc(capacity);
    while (text != NULL && (n = fread(text + length, 1, capacity - length - 1, file)) > 0)
        if ((length += n) == capacity - 1) text = realloc(text, capacity *= 2);
    if (text == NULL) exit(1);
    fclose(file);
    text[length] = 0;
    return text;
}

// The tokens of a text, to be freed, behind a first one.
static uint32_t *encode(const dsv4_model *model, uint32_t first, const char *text, size_t *n)
{
    size_t length = strlen(text);
    uint32_t *tokens = malloc((length + 1) * sizeof *tokens);
    if (tokens == NULL) exit(1);
    tokens[0] = first;
    check(dsv4_tokenizer_encode(model, text, length, DSV4_MARKUP_TEXT, tokens + 1, length, n, &err));
    ++*n;
    return tokens;
}

static int32_t print(void *userdata, const dsv4_piece *piece)
{
    (void)userdata;
    fwrite(piece->text, 1, piece->text_len, stdout);
    fflush(stdout);
    return 0;
}

int main(int argc, char **argv)
{
    if (argc != 5) return fprintf(stderr, "usage: document MODEL TEXTFILE SESSIONFILE QUESTION\n"), 2;
    signal(SIGINT, stop);
    dsv4_model *model;
    dsv4_engine *engine;
    dsv4_session *session;
    dsv4_sampler *sampler;
    dsv4_model_info info = {0};
    info.size = sizeof info;
    check(dsv4_model_open(argv[1], NULL, &model, &err));
    check(dsv4_model_get_info(model, &info, &err));
    check(dsv4_engine_new(model, NULL, &engine, &err));
    dsv4_status status = dsv4_session_restore(engine, argv[3], NULL, &session, &err);
    if (status == DSV4_STATUS_NOT_FOUND) status = dsv4_session_new(engine, NULL, &session, &err);
    check(status);

    size_t n, done;
    char *text = read_file(argv[2]);
    uint32_t *tokens = encode(model, info.bos_token_id, text, &n);
    // all of it, if it is this document's session; less, if the document was changed
    check(dsv4_session_keep_common(session, tokens, n, &done, &err));
    fprintf(stderr, "%zu of %zu tokens are in %s\n", done, n, argv[3]);
    while (done < n) {
        size_t part = n - done < PORTION ? n - done : PORTION;
        check(dsv4_session_feed(session, tokens + done, part, NULL, NULL, &err));
        done += part;
        check(dsv4_session_save(session, argv[3], done == n || stopped, &err));
        fprintf(stderr, "\r%zu of %zu tokens", done, n);
        if (stopped) return fprintf(stderr, "\nstopped; run it again to go on\n"), 130;
    }
    fputs("\n", stderr);

    size_t n_question;
    int32_t finish;
    uint32_t *question = encode(model, 0, argv[4], &n_question);
    check(dsv4_session_feed(session, question + 1, n_question - 1, NULL, NULL, &err));
    check(dsv4_sampler_new(NULL, &sampler, &err));
    dsv4_generation_options options;
    dsv4_generation_options_init(&options);
    options.max_tokens = 60;
    printf("%s", argv[4]);
    check(dsv4_session_generate(session, sampler, &options, print, NULL, &finish, &err));
    puts("");
    free(question), free(tokens), free(text);
    dsv4_sampler_free(sampler);
    dsv4_session_free(session);
    dsv4_engine_free(engine);
    dsv4_model_free(model);
}
