// Asks several questions about one text at the same time. The text goes through the model once; each question has a
// session that shares its cache, and the engine takes them through the model together.
//
//   cc -o prefix prefix.c $(pkg-config --cflags --libs dsv4) -pthread
//   ./prefix MODEL TEXTFILE QUESTION...

#include <dsv4.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct job {
    const dsv4_model *model;
    dsv4_session *session;
    const char *question;
    size_t number, length;
    char answer[4096];
    pthread_t thread;
} job;

static void check(dsv4_status status, const dsv4_error *err)
{
    if (status == DSV4_STATUS_OK) return;
    fprintf(stderr, "%s: %s\n", dsv4_status_name(status), err->message);
    exit(1);
}

// The tokens of a text, to be freed.
static uint32_t *encode(const dsv4_model *model, const char *text, size_t *n)
{
    dsv4_error err = {0};
    uint32_t *tokens = malloc((strlen(text) + 1) * sizeof *tokens);
    if (tokens == NULL) exit(1);
    check(dsv4_tokenizer_encode(model, text, strlen(text), DSV4_MARKUP_TEXT, tokens, strlen(text), n, &err), &err);
    return tokens;
}

static int32_t append(void *userdata, const dsv4_piece *piece)
{
    job *j = userdata;
    if (j->length + piece->text_len < sizeof j->answer) {
        memcpy(j->answer + j->length, piece->text, piece->text_len);
        j->length += piece->text_len;
    }
    return 0;
}

static void *answer(void *argument)
{
    job *j = argument;
    dsv4_error err = {0};
    size_t n;
    int32_t finish;
    uint32_t *tokens = encode(j->model, j->question, &n);
    check(dsv4_session_feed(j->session, tokens, n, NULL, NULL, &err), &err);
    free(tokens);
    dsv4_sampler_options chance;
    dsv4_sampler_options_init(&chance);
    chance.seed = j->number;
    dsv4_sampler *sampler;
    check(dsv4_sampler_new(&chance, &sampler, &err), &err);
    dsv4_generation_options options;
    dsv4_generation_options_init(&options);
    options.max_tokens = 40;
    check(dsv4_session_generate(j->session, sampler, &options, append, j, &finish, &err), &err);
    dsv4_sampler_free(sampler);
    return NULL;
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

int main(int argc, char **argv)
{
    if (argc < 4) return fprintf(stderr, "usage: prefix MODEL TEXTFILE QUESTION...\n"), 2;
    dsv4_error err = {0};
    dsv4_model *model;
    dsv4_engine *engine;
    dsv4_session *base;
    dsv4_model_info info = {0};
    info.size = sizeof info;
    size_t n, n_jobs = (size_t)argc - 3;
    check(dsv4_model_open(argv[1], NULL, &model, &err), &err);
    check(dsv4_model_get_info(model, &info, &err), &err);
    check(dsv4_engine_new(model, NULL, &engine, &err), &err);
    check(dsv4_session_new(engine, NULL, &base, &err), &err);
    char *text = read_file(argv[2]);
    uint32_t *tokens = encode(model, text, &n);
    check(dsv4_session_feed(base, &info.bos_token_id, 1, NULL, NULL, &err), &err);
    check(dsv4_session_feed(base, tokens, n, NULL, NULL, &err), &err);
    job *jobs = calloc(n_jobs, sizeof *jobs);
    if (jobs == NULL) return 1;
    for (size_t i = 0; i < n_jobs; i++) {
        jobs[i] = (job){.model = model, .question = argv[3 + i], .number = i};
        check(dsv4_session_fork(base, &jobs[i].session, &err), &err);
        if (pthread_create(&jobs[i].thread, NULL, answer, &jobs[i]) != 0) return 1;
    }
    for (size_t i = 0; i < n_jobs; i++) {
        pthread_join(jobs[i].thread, NULL);
        printf("%s ->%.*s\n\n", jobs[i].question, (int)jobs[i].length, jobs[i].answer);
        dsv4_session_free(jobs[i].session);
    }
    free(jobs), free(tokens), free(text);
    dsv4_session_free(base);
    dsv4_engine_free(engine);
    dsv4_model_free(model);
}
