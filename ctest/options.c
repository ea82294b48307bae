// Options and outputs of programs that are older or newer than the library, and values out of range.

#include "check.h"

// A newer program's struct: fields that this library does not know.
typedef struct newer {
    dsv4_engine_options known;
    uint64_t unknown[2];
} newer;

int main(int argc, char **argv)
{
    CHECK(argc == 2);
    dsv4_error err = {0};
    dsv4_model *model = NULL;
    OK(dsv4_model_open(argv[1], NULL, &model, &err));
    dsv4_engine *engine = NULL;

    // all defaults are set, and only within the caller's struct
    newer options;
    memset(&options, 0x55, sizeof options);
    dsv4_engine_options_init(&options.known);
    CHECK(options.known.size == sizeof options.known && options.unknown[0] == 0x5555555555555555u);
    CHECK(options.known.device == NULL && options.known.threads == 0 && options.known.prefill_chunk == 0);
    CHECK(options.known.numerics == DSV4_NUMERICS_REFERENCE && options.known.kv_format == DSV4_KV_FORMAT_AUTO);

    // a newer program: zero is fine, anything else is refused with its place
    dsv4_engine_options_init_sized(&options.known, sizeof options);
    CHECK(options.known.size == sizeof options && options.unknown[0] == 0 && options.unknown[1] == 0);
    options.known.threads = 1;
    OK(dsv4_engine_new(model, &options.known, &engine, &err));
    dsv4_engine_free(engine);
    options.unknown[1] = 1;
    REFUSED(DSV4_STATUS_INVALID_ARGUMENT, "knows only the first", dsv4_engine_new(model, &options.known, &engine, &err));
    CHECK(engine == NULL);
    char place[32];
    snprintf(place, sizeof place, "offset %zu", offsetof(newer, unknown) + 8);
    CHECK(strstr(err.message, place) != NULL);

    // an older program knows less; what it lacks has its default
    dsv4_engine_options_init(&options.known);
    options.known.size = offsetof(dsv4_engine_options, threads);
    options.known.threads = 5000;
    options.known.prefill_chunk = 70000;
    options.known.numerics = DSV4_NUMERICS_EXACT;
    OK(dsv4_engine_new(model, &options.known, &engine, &err));
    dsv4_engine_info info = {sizeof info, {0}, 0, 0, 0, 0, {0}};
    OK(dsv4_engine_get_info(engine, &info, &err));
    CHECK(info.numerics == DSV4_NUMERICS_EXACT && info.kv_format == DSV4_KV_FORMAT_F32 && info.prefill_chunk == 256);
    CHECK(info.threads >= 1 && info.simd[0] != 0 && strcmp(info.device, "cpu") == 0);

    // outputs of older and newer programs
    info.size = offsetof(dsv4_engine_info, threads);
    info.threads = 777;
    OK(dsv4_engine_get_info(engine, &info, &err));
    CHECK(info.threads == 777 && info.numerics == DSV4_NUMERICS_EXACT);
    struct {
        dsv4_engine_info known;
        uint64_t unknown;
    } more = {{sizeof more, {0}, 0, 0, 0, 0, {0}}, 777};
    OK(dsv4_engine_get_info(engine, &more.known, &err));
    CHECK(more.known.threads >= 1 && more.unknown == 0);
    info.size = 0;
    REFUSED(DSV4_STATUS_INVALID_ARGUMENT, "size is 0, not set: set it to sizeof(dsv4_engine_info)",
            dsv4_engine_get_info(engine, &info, &err));
    info.size = SIZE_MAX;
    EXPECT(DSV4_STATUS_INVALID_ARGUMENT, dsv4_engine_get_info(engine, &info, &err));
    dsv4_engine_free(engine);

    // sizes that no version has, and options that were not initialised
    const size_t sizes[] = {0, 1, sizeof(size_t) + 1, 4104, SIZE_MAX};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        dsv4_engine_options_init(&options.known);
        options.known.size = sizes[i];
        REFUSED(DSV4_STATUS_INVALID_ARGUMENT, "dsv4_engine_options_init",
                dsv4_engine_new(model, &options.known, &engine, &err));
    }

    // values out of range are named
    dsv4_engine_options_init(&options.known);
    options.known.numerics = -1;
    REFUSED(DSV4_STATUS_INVALID_ARGUMENT, "numerics is -1; 0 to 3", dsv4_engine_new(model, &options.known, &engine, &err));
    dsv4_engine_options_init(&options.known);
    options.known.kv_format = 4;
    REFUSED(DSV4_STATUS_INVALID_ARGUMENT, "kv_format is 4; 0 to 3", dsv4_engine_new(model, &options.known, &engine, &err));
    dsv4_engine_options_init(&options.known);
    options.known.prefill_chunk = 65537;
    REFUSED(DSV4_STATUS_INVALID_ARGUMENT, "prefill_chunk is 65537", dsv4_engine_new(model, &options.known, &engine, &err));
    dsv4_engine_options_init(&options.known);
    options.known.reserved = 7;
    REFUSED(DSV4_STATUS_INVALID_ARGUMENT, "reserved is 7", dsv4_engine_new(model, &options.known, &engine, &err));
    dsv4_engine_options_init(&options.known);
    options.known.threads = 5000;
    REFUSED(DSV4_STATUS_INVALID_ARGUMENT, "threads is 5000", dsv4_engine_new(model, &options.known, &engine, &err));

    // the cache: limits, policies, salt
    dsv4_engine_options_init(&options.known);
    CHECK(options.known.cache_bytes == 0 && options.known.checkpoint_bytes == 0 && options.known.prefix_salt == NULL);
    CHECK(options.known.checkpoints == DSV4_CHECKPOINTS_BOUNDARY && options.known.poison_cache == 0);
    options.known.threads = 1;
    options.known.cache_bytes = 8 << 20;
    options.known.checkpoint_bytes = 1 << 20;
    options.known.checkpoints = DSV4_CHECKPOINTS_EVERY;
    options.known.checkpoint_every = 512;
    options.known.prefix_salt = "one user";
    options.known.poison_cache = 1;
    OK(dsv4_engine_new(model, &options.known, &engine, &err));
    dsv4_cache_stats stats = {0};
    stats.size = sizeof stats;
    OK(dsv4_engine_get_cache_stats(engine, &stats, &err));
    CHECK(stats.limit_bytes == 8 << 20);
    dsv4_engine_free(engine);
    options.known.checkpoint_every = 300;
    REFUSED(DSV4_STATUS_INVALID_ARGUMENT, "300", dsv4_engine_new(model, &options.known, &engine, &err));
    options.known.checkpoints = 3;
    REFUSED(DSV4_STATUS_INVALID_ARGUMENT, "checkpoints is 3; 0 to 2", dsv4_engine_new(model, &options.known, &engine, &err));
    options.known.checkpoints = DSV4_CHECKPOINTS_NONE;
    options.known.prefix_salt = "\xff";
    REFUSED(DSV4_STATUS_INVALID_ARGUMENT, "prefix_salt is not UTF-8",
            dsv4_engine_new(model, &options.known, &engine, &err));

    // the tiers
    dsv4_engine_options_init(&options.known);
    CHECK(options.known.host_tier_bytes == 0 && options.known.disk_tier_path == NULL);
    CHECK(options.known.prefetch == DSV4_PREFETCH_NEXT && options.known.prefetch_depth == 4);
    CHECK(options.known.tier_timeout_ms == 2000);
    options.known.disk_tier_path = "/dev/null/folder";
    REFUSED(DSV4_STATUS_IO, "/dev/null/folder", dsv4_engine_new(model, &options.known, &engine, &err));
    options.known.disk_tier_path = NULL;
    options.known.prefetch_depth = 0;
    REFUSED(DSV4_STATUS_INVALID_ARGUMENT, "prefetch_depth is 0; 1 to 1024",
            dsv4_engine_new(model, &options.known, &engine, &err));
    options.known.prefetch_depth = 1;
    options.known.prefetch = 3;
    REFUSED(DSV4_STATUS_INVALID_ARGUMENT, "prefetch is 3; 0 to 2", dsv4_engine_new(model, &options.known, &engine, &err));
    options.known.prefetch = DSV4_PREFETCH_AGGRESSIVE;
    options.known.host_tier_bytes = 1 << 20;
    options.known.threads = 1;
    OK(dsv4_engine_new(model, &options.known, &engine, &err));
    OK(dsv4_engine_flush_cache(engine, &err));
    dsv4_engine_free(engine);

    // the other options: defaults, and fields without a meaning must be 0
    dsv4_model_options open;
    dsv4_model_options_init(&open);
    open.reserved = 1;
    dsv4_model *again = NULL;
    REFUSED(DSV4_STATUS_INVALID_ARGUMENT, "reserved is 1", dsv4_model_open(argv[1], &open, &again, &err));
    dsv4_chat_options chat;
    dsv4_chat_options_init(&chat);
    CHECK(chat.drop_thinking == 1 && chat.add_generation_prompt == 1 && chat.thinking == 0 && chat.tools == NULL);
    dsv4_sampler_options sampler;
    dsv4_sampler_options_init(&sampler);
    CHECK(sampler.greedy == 0 && sampler.temperature == 1 && sampler.top_p == 1 && sampler.repetition_penalty == 1);
    dsv4_generation_options generation;
    dsv4_generation_options_init(&generation);
    CHECK(generation.max_tokens == 0 && generation.ignore_eos == 0 && generation.stop_strings == NULL);

    // the plan: nothing is loaded, the parts make the sum
    dsv4_plan plan = {0};
    plan.size = sizeof plan;
    OK(dsv4_model_get_plan(model, NULL, 4096, &plan, &err));
    CHECK(plan.weight_bytes == plan.embedding_bytes + plan.attention_bytes + plan.routed_expert_bytes +
                                   plan.shared_expert_bytes + plan.other_bytes + plan.draft_bytes + plan.unknown_bytes);
    CHECK(plan.context == 4096 && plan.page_bytes > 0 && plan.window_bytes > 0);
    dsv4_model_info model_info = {0};
    model_info.size = sizeof model_info;
    OK(dsv4_model_get_info(model, &model_info, &err));
    CHECK(model_info.weight_bytes == plan.weight_bytes && model_info.vocab_size > 0 && model_info.draft == DSV4_DRAFT_MTP);
    EXPECT(DSV4_STATUS_INVALID_ARGUMENT,
           dsv4_model_get_plan(model, NULL, model_info.max_position_embeddings + 1, &plan, &err));
    CHECK(plan.weight_bytes == 0);
    dsv4_model_free(model);
    return 0;
}
