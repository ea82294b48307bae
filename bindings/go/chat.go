package dsv4

// #include <dsv4.h>
import "C"

import (
	"encoding/json"
	"iter"
	"unsafe"
)

// Effort says how much the model shall reason.
type Effort int32

const (
	// EffortDefault is the checkpoint's own.
	EffortDefault Effort = C.DSV4_EFFORT_DEFAULT
	// EffortLow is only for checkpoints with DSpark stages, whose default it is.
	EffortLow Effort = C.DSV4_EFFORT_LOW
	// EffortHigh is the default of the April checkpoints.
	EffortHigh Effort = C.DSV4_EFFORT_HIGH
	// EffortMax is as much as the checkpoint was trained for.
	EffortMax Effort = C.DSV4_EFFORT_MAX
)

// EffortRules says which texts stand for which effort; they differ between releases.
type EffortRules int32

const (
	// EffortRulesCheckpoint are those of the checkpoint. The default.
	EffortRulesCheckpoint EffortRules = C.DSV4_EFFORT_RULES_CHECKPOINT
	// EffortRulesApril are those of April 2026.
	EffortRulesApril EffortRules = C.DSV4_EFFORT_RULES_APRIL
	// EffortRulesDSpark are those of July and August 2026.
	EffortRulesDSpark EffortRules = C.DSV4_EFFORT_RULES_DSPARK
)

// ChatOptions says how messages become a prompt. Fields that are zero are the defaults.
type ChatOptions struct {
	// OpenAI tools, a JSON array, and OpenAI response_format, a JSON object.
	Tools, ResponseFormat string
	// Let the model reason before it answers.
	Thinking    bool
	Effort      Effort
	EffortRules EffortRules
	// Keep the reasoning of answers before the last user message, which the models were trained without.
	KeepThinking bool `c:"!drop_thinking"`
	// Do not end the prompt where the model's answer begins.
	NoGenerationPrompt bool `c:"!add_generation_prompt"`
}

func (o *ChatOptions) toC(c *C.dsv4_chat_options, keep *scratch) error {
	C.dsv4_chat_options_init(c)
	if o == nil {
		return nil
	}
	return toC(*o, c, false, keep)
}

// Message is a message in OpenAI's form, for [Model.Render] and from [ChatParser.Message]. Any value that marshals to such a
// list does for Render.
type Message struct {
	Role             string          `json:"role"`
	Content          string          `json:"content"`
	ReasoningContent string          `json:"reasoning_content,omitempty"`
	Name             string          `json:"name,omitempty"`
	ToolCalls        json.RawMessage `json:"tool_calls,omitempty"`
	ToolCallID       string          `json:"tool_call_id,omitempty"`
	// An answer's own tokens, with which the next prompt has it exactly as the model wrote it.
	Sampled json.RawMessage `json:"sampled,omitempty"`
}

// Prompt is a rendered prompt: tokens for a session, text for people. It may be used by several goroutines at once.
type Prompt struct{ *object }

// Render makes a prompt of messages: a []Message, or any value that encoding/json makes a list of OpenAI-style messages of,
// such as a json.RawMessage. Options may be nil.
func (m *Model) Render(messages any, options *ChatOptions) (*Prompt, error) {
	list, err := json.Marshal(messages)
	if err != nil {
		return nil, err
	}
	var c C.dsv4_chat_options
	var keep scratch
	defer keep.free()
	if err := options.toC(&c, &keep); err != nil {
		return nil, err
	}
	var out *C.dsv4_prompt
	err = m.with(func(p unsafe.Pointer, e *C.dsv4_error) C.dsv4_status {
		chars := (*C.char)(unsafe.Pointer(unsafe.SliceData(list)))
		return C.dsv4_chat_render((*C.dsv4_model)(p), chars, C.size_t(len(list)), &c, &out, e)
	})
	if err != nil {
		return nil, err
	}
	o := newObject(unsafe.Pointer(out), func(p unsafe.Pointer) { C.dsv4_prompt_free((*C.dsv4_prompt)(p)) })
	return collect(&Prompt{o}, o), nil
}

// Tokens gives the prompt's tokens.
func (r *Prompt) Tokens() (tokens []Token, err error) {
	err = r.with(func(p unsafe.Pointer, e *C.dsv4_error) C.dsv4_status {
		var ids *C.uint32_t
		var n C.size_t
		status := C.dsv4_prompt_tokens((*C.dsv4_prompt)(p), &ids, &n, e)
		tokens = append(tokens, unsafe.Slice((*Token)(unsafe.Pointer(ids)), n)...)
		return status
	})
	return tokens, err
}

// Text gives the prompt as the official encoder writes it.
func (r *Prompt) Text() (string, error) {
	return r.lend(func(p unsafe.Pointer, text **C.char, n *C.size_t, e *C.dsv4_error) C.dsv4_status {
		return C.dsv4_prompt_text((*C.dsv4_prompt)(p), text, n, e)
	})
}

// EventKind is what an event says.
type EventKind int32

const (
	// EventNone: there is no event; push more.
	EventNone EventKind = C.DSV4_EVENT_KIND_NONE
	// EventReasoning is more of what the model thinks.
	EventReasoning EventKind = C.DSV4_EVENT_KIND_REASONING
	// EventContent is more of the answer.
	EventContent EventKind = C.DSV4_EVENT_KIND_CONTENT
	// EventToolCallBegin begins a tool call; the text is the function's name.
	EventToolCallBegin EventKind = C.DSV4_EVENT_KIND_TOOL_CALL_BEGIN
	// EventToolCallArguments is more JSON text of the call's arguments.
	EventToolCallArguments EventKind = C.DSV4_EVENT_KIND_TOOL_CALL_ARGUMENTS
	// EventToolCallEnd: the call is complete, and its arguments together are a JSON object.
	EventToolCallEnd EventKind = C.DSV4_EVENT_KIND_TOOL_CALL_END
	// EventMalformed is output that does not follow the format. If the call is not -1, that call is void.
	EventMalformed EventKind = C.DSV4_EVENT_KIND_MALFORMED
	// EventEnd: the answer is complete.
	EventEnd EventKind = C.DSV4_EVENT_KIND_END
)

// Event is one step of an answer.
type Event struct {
	Kind EventKind
	Text string
	// Number of the tool call, from 0; -1 if the event belongs to none.
	Call int
}

// ChatParser reads one answer of the model while it is written, for one goroutine at a time.
type ChatParser struct{ *object }

// NewChatParser starts reading an answer to a prompt that was rendered with this thinking.
func NewChatParser(model *Model, thinking bool) (*ChatParser, error) {
	var on C.int32_t
	if thinking {
		on = 1
	}
	var out *C.dsv4_chat_parser
	err := model.with(func(p unsafe.Pointer, e *C.dsv4_error) C.dsv4_status {
		return C.dsv4_chat_parser_new((*C.dsv4_model)(p), on, &out, e)
	})
	if err != nil {
		return nil, err
	}
	o := newObject(unsafe.Pointer(out), func(p unsafe.Pointer) { C.dsv4_chat_parser_free((*C.dsv4_chat_parser)(p)) })
	return collect(&ChatParser{o}, o), nil
}

// Push takes one generated token, the end-of-sentence token included; then take the events with Next.
func (r *ChatParser) Push(token Token) error {
	return r.with(func(p unsafe.Pointer, e *C.dsv4_error) C.dsv4_status {
		return C.dsv4_chat_parser_push_token((*C.dsv4_chat_parser)(p), C.uint32_t(token), e)
	})
}

// PushText takes output that is not there as tokens; do not mix with Push.
func (r *ChatParser) PushText(text string) error {
	chars, n := charsOf(text)
	return r.with(func(p unsafe.Pointer, e *C.dsv4_error) C.dsv4_status {
		return C.dsv4_chat_parser_push_text((*C.dsv4_chat_parser)(p), chars, n, e)
	})
}

// Finish ends the answer, for whatever reason no token follows; then take the last events with Next.
func (r *ChatParser) Finish() error {
	return r.with(func(p unsafe.Pointer, e *C.dsv4_error) C.dsv4_status {
		return C.dsv4_chat_parser_finish((*C.dsv4_chat_parser)(p), e)
	})
}

// Next gives the next event, or one of kind EventNone if more has to be pushed first.
func (r *ChatParser) Next() (Event, error) {
	var event Event
	err := r.with(func(p unsafe.Pointer, e *C.dsv4_error) C.dsv4_status {
		var c C.dsv4_chat_event
		c.size = C.sizeof_dsv4_chat_event
		status := C.dsv4_chat_parser_next((*C.dsv4_chat_parser)(p), &c, e)
		event = Event{EventKind(c.kind), C.GoStringN(c.text, C.int(c.text_len)), int(c.call)}
		return status
	})
	return event, err
}

// Message gives the answer so far, to append to the messages of the next prompt.
func (r *ChatParser) Message() (Message, error) {
	var message Message
	text, err := r.lend(func(p unsafe.Pointer, text **C.char, n *C.size_t, e *C.dsv4_error) C.dsv4_status {
		return C.dsv4_chat_parser_message((*C.dsv4_chat_parser)(p), text, n, e)
	})
	if err != nil {
		return message, err
	}
	return message, json.Unmarshal([]byte(text), &message)
}

// Events reads pieces, such as those of [Session.Generate], to their end, and gives the events as they become certain. An
// error is the last thing it gives.
func (r *ChatParser) Events(pieces iter.Seq2[Piece, error]) iter.Seq2[Event, error] {
	return func(yield func(Event, error) bool) {
		for piece, err := range pieces {
			if err == nil {
				err = r.Push(piece.Token)
			}
			if err == nil && piece.Finish != FinishNone {
				err = r.Finish()
			}
			for err == nil {
				var event Event
				if event, err = r.Next(); err != nil || event.Kind == EventNone {
					break
				}
				if !yield(event, nil) {
					return
				}
			}
			if err != nil {
				yield(Event{}, err)
				return
			}
		}
	}
}
