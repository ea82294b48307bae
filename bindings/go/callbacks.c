#include "callbacks.h"
#include "_cgo_export.h"

static int32_t on_progress(void *userdata, size_t done, size_t total)
{
    return dsv4goProgress((uintptr_t)userdata, done, total);
}

static int32_t on_file_progress(void *userdata, dsv4_file_stage stage, uint64_t done, uint64_t total)
{
    return dsv4goFileProgress((uintptr_t)userdata, stage, done, total);
}

static void on_log(void *userdata, dsv4_log_level level, const char *message)
{
    dsv4goLog((uintptr_t)userdata, level, (char *)message);
}

dsv4_status dsv4go_feed(dsv4_session *session, const uint32_t *tokens, size_t n_tokens, uintptr_t handle,
                        dsv4_error *err)
{
    return dsv4_session_feed(session, tokens, n_tokens, on_progress, (void *)handle, err);
}

dsv4_status dsv4go_save(dsv4_session *session, const char *path, int32_t complete, uintptr_t handle, dsv4_error *err)
{
    return dsv4_session_save_with_progress(session, path, complete, on_file_progress, (void *)handle, err);
}

dsv4_status dsv4go_restore(const dsv4_engine *engine, const char *path, const dsv4_session_options *options,
                           uintptr_t handle, dsv4_session **out, dsv4_error *err)
{
    return dsv4_session_restore_with_progress(engine, path, options, on_file_progress, (void *)handle, out, err);
}

dsv4_status dsv4go_log_set(int32_t level, uintptr_t handle, dsv4_error *err)
{
    return dsv4_log_set(level, handle ? on_log : NULL, (void *)handle, err);
}
