// The header alone, in the language that CMake compiles this as; header.cpp includes it.

#include <dsv4.h>
#include <dsv4.h>

#if DSV4_VERSION_NUMBER != (DSV4_VERSION_MAJOR << 16 | DSV4_VERSION_MINOR << 8 | DSV4_VERSION_PATCH)
#error "the version number is not made of all three parts"
#endif

int uses_the_header(void);

int uses_the_header(void)
{
    dsv4_engine_options options;
    dsv4_engine_options_init(&options);
    options.numerics = DSV4_NUMERICS_EXACT;
    dsv4_engine *engine;
    return dsv4_engine_new(0, &options, &engine, 0) == DSV4_STATUS_OK;
}
