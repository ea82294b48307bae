//! The functions by name. A test compares the table with the header.

use dsv4::ffi::{
    cache, call, chat, device, engine, generate, log, metrics, model, plan, request, sampler, session, session_file,
    status, tokenizer, version,
};

macro_rules! functions {
    ($($module:ident: $($function:ident)+;)+) => {
        &[$($((stringify!($function), || $module::$function as *const ())),+),+]
    };
}

/// Name and address.
pub(crate) type Function = (&'static str, fn() -> *const ());

/// Every exported function.
pub(crate) const FUNCTIONS: &[Function] = functions! {
    version: dsv4_version dsv4_version_number dsv4_build_info;
    status: dsv4_status_name dsv4_abi_check;
    log: dsv4_log_set;
    device: dsv4_device_count dsv4_device_get_info;
    model: dsv4_model_options_init_sized dsv4_model_open dsv4_model_free dsv4_model_get_info dsv4_model_path;
    tokenizer: dsv4_tokenizer_encode dsv4_tokenizer_decode dsv4_tokenizer_token_bytes dsv4_tokenizer_token_id
        dsv4_detokenizer_new dsv4_detokenizer_free dsv4_detokenizer_push dsv4_detokenizer_finish;
    engine: dsv4_engine_options_init_sized dsv4_engine_new dsv4_engine_free dsv4_engine_get_info;
    session: dsv4_session_options_init_sized dsv4_session_new dsv4_session_free dsv4_session_feed dsv4_session_feed_all
        dsv4_session_logits dsv4_session_tokens dsv4_session_get_info dsv4_session_clear dsv4_session_fork
        dsv4_session_truncate dsv4_session_keep_common dsv4_session_cancel
        dsv4_session_reset_cancel;
    call: dsv4_call_options_init_sized dsv4_session_set_call_options;
    session_file: dsv4_session_save dsv4_session_save_with_progress dsv4_session_restore dsv4_session_restore_with_progress
        dsv4_session_file_get_info dsv4_session_file_verify;
    sampler: dsv4_sampler_options_init_sized dsv4_sampler_new dsv4_sampler_free dsv4_sampler_sample dsv4_sampler_accept
        dsv4_sampler_reset;
    generate: dsv4_generation_options_init_sized dsv4_generation_new dsv4_generation_free dsv4_generation_next
        dsv4_generation_finish dsv4_session_generate;
    request: dsv4_session_submit_feed dsv4_session_submit_generate dsv4_request_poll dsv4_request_wait dsv4_request_free
        dsv4_engine_step dsv4_engine_wake_fd;
    chat: dsv4_chat_options_init_sized dsv4_chat_render dsv4_prompt_free dsv4_prompt_tokens dsv4_prompt_text
        dsv4_chat_parser_new dsv4_chat_parser_free dsv4_chat_parser_push_token dsv4_chat_parser_push_text
        dsv4_chat_parser_finish dsv4_chat_parser_next dsv4_chat_parser_message;
    cache: dsv4_session_get_cache_info dsv4_engine_get_cache_stats dsv4_engine_flush_cache;
    metrics: dsv4_engine_get_metrics dsv4_engine_metrics_text dsv4_session_get_metrics;
    plan: dsv4_model_get_plan;
};

/// The address of `name`.
pub(crate) fn address(name: &str) -> *const () {
    let found = FUNCTIONS.iter().find(|(known, _)| *known == name);
    found.unwrap_or_else(|| panic!("{name} is in the header, but not in tests/ffi/functions.rs")).1()
}
