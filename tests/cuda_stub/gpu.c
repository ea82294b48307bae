/* A CUDA driver over host memory: copies copy, kernels do nothing, and everything handed out is counted. One call can be
   refused, once or with all that follow, as after a fault. kernels.h, which the test makes of the CUDA sources, has
   their names and the sizes of their parameter structs. */
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

typedef unsigned long long address;

static struct kernel { const char *name; size_t params; } kernels[200];
static unsigned kernel_count;

static void kernel(const char *name, size_t params) { kernels[kernel_count++] = (struct kernel){name, params}; }

#include "kernels.h"

static atomic_long calls, fail_at, live, depth, allocations;
static atomic_int code, stays, broken;
static atomic_size_t held, room = (size_t)4 << 30;

/* For the test: the nth call from now answers `status`; with `fault`, every later one too. 0: none. */
void stub_fail(long nth, int status, int fault) {
    calls = 0;
    fail_at = nth;
    code = status;
    stays = fault;
    broken = 0;
}
long stub_calls(void) { return calls; }
/* Objects that were made and not given back, contexts pushed and not popped, allocations so far, bytes of device memory held. */
long stub_live(void) { return live; }
long stub_depth(void) { return depth; }
long stub_allocations(void) { return allocations; }
size_t stub_held(void) { return held; }
void stub_room(size_t bytes) { room = bytes; }

static int refused(void) {
    long n = ++calls;
    if (broken || n == fail_at) {
        broken = stays;
        return code;
    }
    return 0;
}
#define CALL do { int status = refused(); if (status) return status; } while (0)
/* Giving back works even after a fault, but says so. */
#define DONE return broken ? code : 0

static int make(void **out) { CALL; *out = malloc(1); live++; return 0; }
static int give_back(void *object) { free(object); live--; DONE; }

int cuInit(unsigned flags) { (void)flags; return 0; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuGetErrorName(int status, const char **text) { (void)status; *text = "CUDA_ERROR_STUB"; return 0; }
int cuGetErrorString(int status, const char **text) { (void)status; *text = "the stub said so"; return 0; }
int cuDeviceGetCount(int *count) { *count = 1; return 0; }
int cuDeviceGet(int *device, int number) { CALL; *device = number; return number == 0 ? 0 : 101; }
int cuDeviceGetName(char *name, int size, int device) { (void)device; strncpy(name, "Stub", (size_t)size); return 0; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { (void)device; *bytes = room; return 0; }
/* 75, 76: capability; 16: multiprocessors; 97: shared memory of a block; 38: L2 cache */
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    CALL;
    (void)device;
    *value = attribute == 75 ? 9 : attribute == 76 ? 0 : attribute == 16 ? 132 : attribute == 97 ? 227 << 10 : 50 << 20;
    return 0;
}

int cuDevicePrimaryCtxRetain(void **context, int device) { (void)device; return make(context); }
int cuDevicePrimaryCtxRelease_v2(int device) { (void)device; live--; DONE; }
int cuCtxPushCurrent_v2(void *context) { CALL; (void)context; depth++; return 0; }
int cuCtxPopCurrent_v2(void **context) { *context = NULL; depth--; DONE; }

int cuMemGetInfo_v2(size_t *free_bytes, size_t *total) { CALL; *free_bytes = room - held, *total = room; return 0; }
/* `counted`: bytes of the device's room; host memory is not among them. */
static int allocate(void **out, size_t bytes, size_t counted) {
    CALL;
    if (counted > room - held) return 2;
    /* kernels rely on the alignment of the driver's memory */
    size_t *block = aligned_alloc(256, (bytes + 511) / 256 * 256);
    if (!block) return 2;
    memset(block, 0, bytes + 256);
    *block = counted;
    *out = (char *)block + 256;
    held += counted;
    live++;
    allocations++;
    return 0;
}
static int release(void *memory) {
    size_t *block = (size_t *)((char *)memory - 256);
    held -= *block;
    live--;
    free(block);
    DONE;
}
int cuMemAlloc_v2(address *out, size_t bytes) {
    void *memory = NULL;
    int status = allocate(&memory, bytes, bytes);
    *out = (address)memory;
    return status;
}
int cuMemFree_v2(address memory) { return release((void *)memory); }
int cuMemHostAlloc(void **out, size_t bytes, unsigned flags) { (void)flags; return allocate(out, bytes, 0); }
int cuMemFreeHost(void *memory) { return release(memory); }
int cuMemcpyHtoDAsync_v2(address to, const void *from, size_t n, void *s) { CALL; (void)s; memcpy((void *)to, from, n); return 0; }
int cuMemcpyDtoHAsync_v2(void *to, address from, size_t n, void *s) { CALL; (void)s; memcpy(to, (void *)from, n); return 0; }
int cuMemcpyDtoDAsync_v2(address to, address from, size_t n, void *s) { CALL; (void)s; memmove((void *)to, (void *)from, n); return 0; }
int cuMemsetD8Async(address to, unsigned char byte, size_t n, void *s) { CALL; (void)s; memset((void *)to, byte, n); return 0; }

int cuStreamCreate(void **stream, unsigned flags) { (void)flags; return make(stream); }
int cuStreamDestroy_v2(void *stream) { return give_back(stream); }
int cuStreamSynchronize(void *stream) { CALL; (void)stream; return 0; }
int cuStreamQuery(void *stream) { CALL; (void)stream; return 0; }
int cuStreamWaitEvent(void *stream, void *event, unsigned flags) { CALL; (void)stream, (void)event, (void)flags; return 0; }
int cuEventCreate(void **event, unsigned flags) { (void)flags; return make(event); }
int cuEventDestroy_v2(void *event) { return give_back(event); }
int cuEventRecord(void *event, void *stream) { CALL; (void)event, (void)stream; return 0; }
int cuEventSynchronize(void *event) { CALL; (void)event; return 0; }
int cuEventElapsedTime_v2(float *millis, void *from, void *to) { CALL; (void)from, (void)to; *millis = 1; return 0; }

/* A graph's questions to the host (kernels/exchange.cu): flags in pinned memory, which are all set when it is launched. */
static struct { unsigned *flags, blocks; } asked[100];
static unsigned asked_count, is_capturing;

int cuStreamBeginCapture_v2(void *stream, int mode) {
    CALL;
    (void)stream, (void)mode;
    is_capturing = 1, asked_count = 0;
    return 0;
}
int cuStreamEndCapture(void *stream, void **graph) { (void)stream; is_capturing = 0; return make(graph); }
int cuGraphInstantiateWithFlags(void **run, void *graph, address flags) { (void)graph, (void)flags; return make(run); }
int cuGraphDestroy(void *graph) { if (graph) give_back(graph); DONE; }
int cuGraphExecDestroy(void *run) { return give_back(run); }
int cuGraphLaunch(void *run, void *stream) {
    CALL;
    (void)run, (void)stream;
    for (unsigned i = 0; i < asked_count; i++)
        for (unsigned block = 0; block < asked[i].blocks; block++) asked[i].flags[block] = 1;
    return 0;
}

/* The first module that is loaded has all kernels. */
static void *first_module;
int cuModuleLoadData(void **module, const void *image) {
    (void)image;
    int status = make(module);
    if (!status && !first_module) first_module = *module;
    return status;
}
int cuModuleUnload(void *module) {
    if (module == first_module) first_module = NULL;
    return give_back(module);
}
int cuModuleGetFunctionCount(unsigned *count, void *module) {
    CALL;
    if (!kernel_count) all_kernels();
    *count = module == first_module ? kernel_count : 0;
    return 0;
}
int cuModuleEnumerateFunctions(void **functions, unsigned count, void *module) {
    CALL;
    (void)module;
    for (unsigned i = 0; i < count; i++) functions[i] = &kernels[i];
    return 0;
}
int cuFuncGetName(const char **name, void *function) { CALL; *name = ((struct kernel *)function)->name; return 0; }
int cuFuncGetParamInfo(void *function, size_t index, size_t *offset, size_t *size) {
    CALL;
    (void)index;
    *offset = 0, *size = ((struct kernel *)function)->params;
    return 0;
}
int cuFuncSetAttribute(void *function, int attribute, int value) { CALL; (void)function, (void)attribute, (void)value; return 0; }
int cuLaunchKernelEx(const void *config, void *function, void **arguments, void **extra) {
    CALL;
    (void)extra;
    if (is_capturing && !strcmp(((struct kernel *)function)->name, "ask") && asked_count < 100) {
        /* the eighth pointer of its parameters; the first number of a launch is that of its blocks */
        asked[asked_count].flags = ((unsigned **)arguments[0])[7];
        asked[asked_count++].blocks = *(const unsigned *)config;
    }
    return 0;
}

/* NVRTC, for builds that hold sources: it compiles everything to eight bytes. */
int nvrtcCreateProgram(void **program, const char *source, const char *name, int n, const char *const *texts, const char *const *names) {
    (void)source, (void)name, (void)n, (void)texts, (void)names;
    return make(program) ? 1 : 0;
}
int nvrtcCompileProgram(void *program, int n, const char *const *options) { (void)program, (void)n, (void)options; return 0; }
int nvrtcGetCUBINSize(void *program, size_t *size) { (void)program; *size = 8; return 0; }
int nvrtcGetCUBIN(void *program, char *code8) { (void)program; memset(code8, 0, 8); return 0; }
int nvrtcGetProgramLogSize(void *program, size_t *size) { (void)program; *size = 1; return 0; }
int nvrtcGetProgramLog(void *program, char *log) { (void)program; *log = 0; return 0; }
int nvrtcDestroyProgram(void **program) { return give_back(*program); }
