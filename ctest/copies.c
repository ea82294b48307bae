// Two copies of the shared library in one process, as when two plugins bring their own; opened at run time, on a machine
// with or without a driver.

#include "check.h"

#include <dlfcn.h>

typedef const char *(*version_fn)(void);
typedef dsv4_status (*open_fn)(const char *, const dsv4_model_options *, dsv4_model **, dsv4_error *);
typedef void (*free_fn)(dsv4_model *);
typedef dsv4_status (*log_fn)(int32_t, dsv4_log_callback, void *, dsv4_error *);
typedef dsv4_status (*engine_fn)(const dsv4_model *, const dsv4_engine_options *, dsv4_engine **, dsv4_error *);
typedef void (*engine_free_fn)(dsv4_engine *);

static void count(void *userdata, dsv4_log_level level, const char *message)
{
    CHECK(level > 0 && message != NULL);
    ++*(int *)userdata;
}

// A function by name; POSIX promises that the conversion works.
static void *find(void *library, const char *name)
{
    void *found = dlsym(library, name);
    CHECK(found != NULL);
    return found;
}

#define FIND(type, library, name) (*(type *)&(void *){find(library, name)})

int main(int argc, char **argv)
{
    CHECK(argc == 4);
    dsv4_error err = {0};
    void *libraries[2];
    dsv4_model *models[2] = {NULL, NULL};
    dsv4_engine *engines[2] = {NULL, NULL};
    int messages[2] = {0, 0};
    for (int i = 0; i < 2; i++) {
        libraries[i] = dlopen(argv[2 + i], RTLD_NOW | RTLD_LOCAL);
        if (libraries[i] == NULL) fprintf(stderr, "%s\n", dlerror());
        CHECK(libraries[i] != NULL);
        CHECK(strcmp(FIND(version_fn, libraries[i], "dsv4_version")(), DSV4_VERSION) == 0);
        CHECK(FIND(log_fn, libraries[i], "dsv4_log_set")(DSV4_LOG_LEVEL_INFO, count, &messages[i], &err) == DSV4_STATUS_OK);
    }
    CHECK(dlsym(libraries[0], "dsv4_version") != dlsym(libraries[1], "dsv4_version"));
    CHECK(dlsym(libraries[0], "dsv4_of_a_later_version") == NULL);
    for (int i = 0; i < 2; i++) {
        CHECK(FIND(open_fn, libraries[i], "dsv4_model_open")(argv[1], NULL, &models[i], &err) == DSV4_STATUS_OK);
        CHECK(FIND(engine_fn, libraries[i], "dsv4_engine_new")(models[i], NULL, &engines[i], &err) == DSV4_STATUS_OK);
        CHECK(messages[i] > 0 && (i == 1 || messages[1] == 0));
    }
    for (int i = 0; i < 2; i++) {
        FIND(engine_free_fn, libraries[i], "dsv4_engine_free")(engines[i]);
        FIND(free_fn, libraries[i], "dsv4_model_free")(models[i]);
    }
    return 0;
}
