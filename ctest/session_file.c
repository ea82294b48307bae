// Sessions in files: saved, looked at, restored, and going on identically; forked and truncated; and files that are no good.

#include "check.h"

#include <unistd.h>

// A copy of the session's logits, to be freed.
static float *logits_of(dsv4_session *session, size_t *n)
{
    dsv4_error err = {0};
    const float *logits = NULL;
    OK(dsv4_session_logits(session, &logits, n, &err));
    float *copy = malloc(*n * sizeof *copy);
    CHECK(copy != NULL);
    memcpy(copy, logits, *n * sizeof *copy);
    return copy;
}

static void check_same(dsv4_session *a, dsv4_session *b)
{
    size_t n = 0, m = 0;
    float *x = logits_of(a, &n), *y = logits_of(b, &m);
    CHECK(n == m && memcmp(x, y, n * sizeof *x) == 0);
    free(x);
    free(y);
}

static void feed(dsv4_session *session, const uint32_t *tokens, size_t n)
{
    dsv4_error err = {0};
    OK(dsv4_session_feed(session, tokens, n, NULL, NULL, &err));
}

// A save from within a feed (pitfall 47).
typedef struct attempt {
    dsv4_session *session;
    const char *path;
    dsv4_status status;
} attempt;

static int32_t on_progress(void *userdata, size_t done, size_t total)
{
    attempt *a = userdata;
    (void)done;
    (void)total;
    a->status = dsv4_session_save(a->session, a->path, 0, NULL);
    return 0;
}

// Stages of a save or a restore, counted, and how many calls it may have.
typedef struct watch {
    int calls, most;
    int stages[4];
    uint64_t done, total;
} watch;

static int32_t on_file_progress(void *userdata, dsv4_file_stage stage, uint64_t done, uint64_t total)
{
    watch *w = userdata;
    CHECK((int)stage >= 0 && (int)stage < 4 && done <= total);
    w->stages[stage]++;
    w->done = done;
    w->total = total;
    return ++w->calls > w->most;
}

static long size_of_file(const char *path)
{
    FILE *file = fopen(path, "rb");
    if (file == NULL) return -1;
    CHECK(fseek(file, 0, SEEK_END) == 0);
    long size = ftell(file);
    CHECK(fclose(file) == 0);
    return size;
}

// A save and a restore that are cancelled at each place in turn, then one that is not.
static void cancel_everywhere(dsv4_session *session, const dsv4_engine *engine, const char *path)
{
    dsv4_error err = {0};
    dsv4_status status = DSV4_STATUS_CANCELLED;
    watch w = {0, 0, {0, 0, 0, 0}, 0, 0};
    for (int most = 0; status == DSV4_STATUS_CANCELLED; most++) {
        watch now = {0, most, {0, 0, 0, 0}, 0, 0};
        status = dsv4_session_save_with_progress(session, path, 1, on_file_progress, &now, &err);
        CHECK(status == DSV4_STATUS_OK || (size_of_file(path) == -1 && strstr(err.message, "the file is as it was")));
        w = now;
    }
    OK(status);
    CHECK(w.calls > 2 && w.stages[DSV4_FILE_STAGE_WRITE] == w.calls && w.done == w.total);
    long size = size_of_file(path);
    CHECK(size > (long)w.total);

    dsv4_session *restored = NULL;
    status = DSV4_STATUS_CANCELLED;
    for (int most = 0; status == DSV4_STATUS_CANCELLED; most++) {
        watch now = {0, most, {0, 0, 0, 0}, 0, 0};
        status = dsv4_session_restore_with_progress(engine, path, NULL, on_file_progress, &now, &restored, &err);
        CHECK((status == DSV4_STATUS_OK) == (restored != NULL));
        CHECK(restored != NULL || strstr(err.message, "there is no session") != NULL);
        w = now;
    }
    OK(status);
    CHECK(w.stages[DSV4_FILE_STAGE_CHECK] > 1 && w.stages[DSV4_FILE_STAGE_READ] > 1 && w.stages[DSV4_FILE_STAGE_WRITE] == 0);
    check_same(session, restored);
    dsv4_session_free(restored);
    CHECK(size_of_file(path) == size);

    // from anywhere, and without anybody to tell
    OK(dsv4_session_cancel(session, &err));
    CHECK(remove(path) == 0);
    REFUSED(DSV4_STATUS_CANCELLED, "cancelled after 0 of", dsv4_session_save(session, path, 1, &err));
    CHECK(size_of_file(path) == -1);
    OK(dsv4_session_save_with_progress(session, path, 1, NULL, NULL, &err));
    OK(dsv4_session_restore_with_progress(engine, path, NULL, NULL, NULL, &restored, &err));
    check_same(session, restored);
    dsv4_session_free(restored);
    CHECK(remove(path) == 0);
}

int main(int argc, char **argv)
{
    CHECK(argc == 2);
    dsv4_error err = {0};
    char path[64], other[64];
    snprintf(path, sizeof path, "session_file_%ld.session", (long)getpid());
    snprintf(other, sizeof other, "session_file_%ld.other", (long)getpid());
    fixture f = fixture_open(argv[1]);
    uint32_t tokens[64];
    for (uint32_t i = 0; i < 64; i++) tokens[i] = 10 + i;
    feed(f.session, tokens, 40);

    cancel_everywhere(f.session, f.engine, path);

    // there and back, on an engine of its own
    OK(dsv4_session_save(f.session, path, 0, &err));
    dsv4_session_file_info file = {0};
    file.size = sizeof file;
    OK(dsv4_session_file_verify(path, &file, &err));
    CHECK(file.tokens == 40 && file.pending_tokens == 0 && file.saves == 1 && file.kv_format == DSV4_KV_FORMAT_FP8);
    CHECK(strcmp(file.numerics, "reference") == 0 && strlen(file.fingerprint) == 32);
    CHECK(file.file_bytes == file.frame_bytes + file.block_bytes + file.state_bytes + file.token_bytes + file.unused_bytes);
    fixture g = fixture_open(argv[1]);
    dsv4_session *restored = NULL;
    OK(dsv4_session_restore(g.engine, path, NULL, &restored, &err));
    dsv4_session_info info = {sizeof info, 0, 0, 0, 0, 0, 0};
    OK(dsv4_session_get_info(restored, &info, &err));
    CHECK(info.position == 40 && info.reused_tokens == 40 && info.has_logits == 1);
    check_same(f.session, restored);

    // they go on identically, and so does a fork that goes another way and back
    dsv4_session *fork = NULL;
    OK(dsv4_session_fork(restored, &fork, &err));
    for (size_t i = 40; i < 50; i++) {
        feed(f.session, tokens + i, 1);
        feed(restored, tokens + i, 1);
        check_same(f.session, restored);
    }
    feed(fork, tokens, 7);
    OK(dsv4_session_truncate(fork, 40, &err));
    feed(fork, tokens + 40, 10);
    check_same(f.session, fork);
    REFUSED(DSV4_STATUS_INVALID_ARGUMENT, "cannot truncate to 51 tokens", dsv4_session_truncate(fork, 51, &err));

    // a history that comes out differently from its 45th token on
    size_t kept = 0;
    feed(fork, tokens, 5);
    OK(dsv4_session_keep_common(fork, tokens, 50, &kept, &err));
    CHECK(kept == 50);
    check_same(f.session, fork);
    uint32_t other_end[50];
    memcpy(other_end, tokens, sizeof other_end);
    other_end[45] = tokens[45] == 3 ? 4 : 3;
    OK(dsv4_session_keep_common(fork, other_end, 50, &kept, &err));
    CHECK(kept == 45);
    feed(fork, tokens + 45, 5);
    check_same(f.session, fork);
    REFUSED(DSV4_STATUS_INVALID_ARGUMENT, "kept is NULL", dsv4_session_keep_common(fork, tokens, 1, NULL, &err));

    // an addition, complete
    OK(dsv4_session_save(restored, path, 1, &err));
    OK(dsv4_session_file_get_info(path, &file, &err));
    CHECK(file.tokens == 50 && file.pending_tokens == 0);
    REFUSED(DSV4_STATUS_INVALID_ARGUMENT, "complete is 2; 0 or 1", dsv4_session_save(restored, path, 2, &err));
    OK(dsv4_session_truncate(fork, 0, &err));
    OK(dsv4_session_get_info(fork, &info, &err));
    CHECK(info.position == 0 && info.has_logits == 0);
    dsv4_session_free(restored);
    dsv4_session_free(fork);

    // what cannot be
    attempt during = {f.session, other, DSV4_STATUS_OK};
    OK(dsv4_session_feed(f.session, tokens, 2, on_progress, &during, &err));
    CHECK(during.status == DSV4_STATUS_BUSY);
    dsv4_session_options small;
    dsv4_session_options_init(&small);
    small.context = 49;
    REFUSED(DSV4_STATUS_CONTEXT_FULL, "holds 50 tokens", dsv4_session_restore(g.engine, path, &small, &restored, &err));
    CHECK(restored == NULL);
    REFUSED(DSV4_STATUS_NOT_FOUND, "nowhere", dsv4_session_restore(g.engine, "nowhere", NULL, &restored, &err));
    REFUSED(DSV4_STATUS_INVALID_ARGUMENT, "path is NULL", dsv4_session_save(f.session, NULL, 0, &err));
    FILE *foreign = fopen(other, "w");
    CHECK(foreign != NULL && fputs("mine", foreign) >= 0 && fclose(foreign) == 0);
    REFUSED(DSV4_STATUS_INVALID_ARGUMENT, "not a session file of dsv4", dsv4_session_save(f.session, other, 1, &err));
    REFUSED(DSV4_STATUS_INVALID_ARGUMENT, "a folder", dsv4_session_save(f.session, ".", 0, &err));
    EXPECT(DSV4_STATUS_NOT_FOUND, dsv4_session_save(f.session, "nowhere/a.session", 0, &err));
    dsv4_engine_options options;
    dsv4_engine_options_init(&options);
    options.threads = 1;
    options.numerics = DSV4_NUMERICS_SERVED;
    dsv4_engine *served = NULL;
    OK(dsv4_engine_new(f.model, &options, &served, &err));
    REFUSED(DSV4_STATUS_MISMATCH, "numerics reference", dsv4_session_restore(served, path, NULL, &restored, &err));
    dsv4_engine_free(served);
    FILE *in = fopen(path, "rb"), *out = fopen(other, "wb");
    CHECK(in != NULL && out != NULL);
    // what the last save wrote is at the end
    for (long i = 0; i < (long)file.file_bytes; i++) {
        int byte = fgetc(in);
        CHECK(byte != EOF && fputc(i == (long)file.file_bytes - 1000 ? byte ^ 1 : byte, out) != EOF);
    }
    CHECK(fclose(in) == 0 && fclose(out) == 0);
    EXPECT(DSV4_STATUS_CORRUPT, dsv4_session_file_verify(other, &file, &err));
    CHECK(file.tokens == 0);
    REFUSED(DSV4_STATUS_CORRUPT, other, dsv4_session_restore(g.engine, other, NULL, &restored, &err));

    // figures of the cache
    dsv4_cache_stats stats = {0};
    stats.size = sizeof stats;
    OK(dsv4_engine_get_cache_stats(g.engine, &stats, &err));
    CHECK(stats.computed_tokens >= 10 && stats.forks == 1 && stats.used_bytes > 0 && stats.held_bytes <= stats.limit_bytes);
    CHECK(remove(path) == 0 && remove(other) == 0);
    fixture_close(&f);
    fixture_close(&g);
    return 0;
}
