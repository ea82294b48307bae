// Callbacks of C's that call Go: `userdata` is the number of a cgo.Handle, never a pointer of Go's.

#include <dsv4.h>

dsv4_status dsv4go_feed(dsv4_session *session, const uint32_t *tokens, size_t n_tokens, uintptr_t handle,
                        dsv4_error *err);
dsv4_status dsv4go_save(dsv4_session *session, const char *path, int32_t complete, uintptr_t handle, dsv4_error *err);
dsv4_status dsv4go_restore(const dsv4_engine *engine, const char *path, const dsv4_session_options *options,
                           uintptr_t handle, dsv4_session **out, dsv4_error *err);
dsv4_status dsv4go_log_set(int32_t level, uintptr_t handle, dsv4_error *err);
