package dsv4

import (
	"context"
	"encoding/json"
	"strings"
	"testing"
)

func TestConversationsGoOn(t *testing.T) {
	f, ctx := open(t), context.Background()
	session, sampler := f.session(t), greedy(t)
	messages := []Message{{Role: "user", Content: "Tell me about the \"sea\"."}}
	for turn := range 2 {
		prompt := must(f.model.Render(messages, nil))(t)
		if text := must(prompt.Text())(t); !strings.Contains(text, "\"sea\"") {
			t.Fatal(text)
		}
		kept := must(session.Sync(ctx, must(prompt.Tokens())(t)))(t)
		if (kept > 10) != (turn == 1) {
			t.Fatalf("turn %d keeps %d tokens", turn, kept)
		}
		parser := must(NewChatParser(f.model, false))(t)
		var text string
		var last EventKind
		for event, err := range parser.Events(session.Generate(ctx, sampler, &GenerationOptions{MaxTokens: 12})) {
			ok(t, err)
			if event.Kind == EventContent {
				text += event.Text
			}
			last = event.Kind
		}
		answer := must(parser.Message())(t)
		if last != EventEnd || text == "" || answer.Role != "assistant" || answer.Content != text || len(answer.Sampled) == 0 {
			t.Fatalf("%q %v %+v", text, last, answer)
		}
		messages = append(messages, answer, Message{Role: "user", Content: "And then?"})
	}
}

func TestAParserTellsReasoningContentAndCalls(t *testing.T) {
	f := open(t)
	parser := must(NewChatParser(f.model, true))(t)
	ok(t, parser.PushText("Let me see.</think>Hello"))
	ok(t, parser.Finish())
	texts := map[EventKind]string{}
	for {
		event := must(parser.Next())(t)
		if event.Kind == EventNone {
			break
		}
		texts[event.Kind] += event.Text
	}
	if texts[EventReasoning] != "Let me see." || texts[EventContent] != "Hello" {
		t.Fatal(texts)
	}
	message := must(parser.Message())(t)
	if message.Content != "Hello" || message.ReasoningContent != "Let me see." {
		t.Fatalf("%+v", message)
	}
	must(f.model.Render(json.RawMessage(`[{"role": "user", "content": "Hi"}]`), &ChatOptions{Thinking: true}))(t)
}
