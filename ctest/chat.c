// Messages to prompt, output to events.

#include "check.h"

static size_t next(dsv4_chat_parser *parser, dsv4_chat_event *event)
{
    dsv4_error err = {0};
    event->size = sizeof *event;
    OK(dsv4_chat_parser_next(parser, event, &err));
    CHECK(event->text != NULL && strlen(event->text) == event->text_len);
    return event->text_len;
}

int main(int argc, char **argv)
{
    CHECK(argc == 2);
    dsv4_error err = {0};
    dsv4_model *model = NULL;
    OK(dsv4_model_open(argv[1], NULL, &model, &err));

    // a user's text never becomes a control token
    const char *json = "[{\"role\": \"user\", \"content\": \"Say <think> twice\"}]";
    dsv4_prompt *prompt = NULL;
    OK(dsv4_chat_render(model, json, strlen(json), NULL, &prompt, &err));
    const uint32_t *tokens = NULL;
    const char *text = NULL;
    size_t n = 0, len = 0;
    OK(dsv4_prompt_tokens(prompt, &tokens, &n, &err));
    OK(dsv4_prompt_text(prompt, &text, &len, &err));
    CHECK(strlen(text) == len && strstr(text, "Say <think> twice") != NULL);
    uint32_t think = 0;
    OK(dsv4_tokenizer_token_id(model, "<think>", 7, &think, &err));
    dsv4_model_info info = {0};
    info.size = sizeof info;
    OK(dsv4_model_get_info(model, &info, &err));
    CHECK(n > 5 && tokens[0] == info.bos_token_id);
    for (size_t i = 0; i < n; i++) CHECK(tokens[i] != think);

    // thinking asks for it
    dsv4_chat_options options;
    dsv4_chat_options_init(&options);
    options.thinking = 1;
    dsv4_prompt *thinking = NULL;
    OK(dsv4_chat_render(model, json, strlen(json), &options, &thinking, &err));
    OK(dsv4_prompt_tokens(thinking, &tokens, &n, &err));
    CHECK(tokens[n - 1] == think);
    dsv4_prompt_free(thinking);
    dsv4_prompt_free(prompt);

    // events
    dsv4_chat_parser *parser = NULL;
    dsv4_chat_event event;
    OK(dsv4_chat_parser_new(model, 1, &parser, &err));
    CHECK(next(parser, &event) == 0 && event.kind == DSV4_EVENT_KIND_NONE && event.call == -1);
    const char *out = "Let me see.</think>It is 4.";
    OK(dsv4_chat_parser_push_text(parser, out, strlen(out), &err));
    OK(dsv4_chat_parser_finish(parser, &err));
    char reasoning[64] = "", content[64] = "";
    int ended = 0;
    for (;;) {
        next(parser, &event);
        if (event.kind == DSV4_EVENT_KIND_NONE) break;
        if (event.kind == DSV4_EVENT_KIND_REASONING) strcat(reasoning, event.text);
        if (event.kind == DSV4_EVENT_KIND_CONTENT) strcat(content, event.text);
        ended += event.kind == DSV4_EVENT_KIND_END;
    }
    CHECK(strcmp(reasoning, "Let me see.") == 0 && strcmp(content, "It is 4.") == 0 && ended == 1);

    // the answer goes into the next prompt
    OK(dsv4_chat_parser_message(parser, &text, &len, &err));
    CHECK(strlen(text) == len && strstr(text, "It is 4.") != NULL);
    char both[256];
    snprintf(both, sizeof both, "[{\"role\": \"user\", \"content\": \"2+2?\"}, %s, {\"role\": \"user\", \"content\": \"Sure?\"}]",
             text);
    OK(dsv4_chat_render(model, both, strlen(both), NULL, &prompt, &err));
    OK(dsv4_prompt_text(prompt, &text, &len, &err));
    CHECK(strstr(text, "It is 4.") != NULL);
    dsv4_prompt_free(prompt);
    dsv4_chat_parser_free(parser);

    // token for token: the tokenizer would not cut "ab" in two
    uint32_t sampled[2];
    OK(dsv4_tokenizer_encode(model, "a", 1, DSV4_MARKUP_TEXT, &sampled[0], 1, &n, &err));
    OK(dsv4_tokenizer_encode(model, "b", 1, DSV4_MARKUP_TEXT, &sampled[1], 1, &n, &err));
    OK(dsv4_chat_parser_new(model, 0, &parser, &err));
    for (int i = 0; i < 2; i++) OK(dsv4_chat_parser_push_token(parser, sampled[i], &err));
    OK(dsv4_chat_parser_finish(parser, &err));
    OK(dsv4_chat_parser_message(parser, &text, &len, &err));
    CHECK(strstr(text, "\"content\": \"ab\"") != NULL && strstr(text, "\"sampled\": {") != NULL);
    snprintf(both, sizeof both, "[{\"role\": \"user\", \"content\": \"2+2?\"}, %s]", text);
    OK(dsv4_chat_render(model, both, strlen(both), NULL, &prompt, &err));
    OK(dsv4_prompt_tokens(prompt, &tokens, &n, &err));
    CHECK(n > 3 && tokens[n - 3] == sampled[0] && tokens[n - 2] == sampled[1] && tokens[n - 1] == info.eos_token_id);
    dsv4_prompt_free(prompt);
    dsv4_chat_parser_free(parser);
    dsv4_model_free(model);
    return 0;
}
