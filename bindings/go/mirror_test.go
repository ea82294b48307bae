package dsv4

import (
	"reflect"
	"slices"
	"testing"
)

// Tests cannot import "C"; these are its names for the structs in Go.
type (
	cEngineOptions = _Ctype_struct_dsv4_engine_options
	cChatOptions   = _Ctype_struct_dsv4_chat_options
)

// What C's structs have besides.
var unmirrored = []string{
	"size", "reserved", "n_stop_tokens", "n_stop_strings", "bias_tokens", "bias_values", "n_bias",
	// padding that cgo adds
	"_",
	// contexts have deadlines
	"time_limit_ms",
}

// Pitfall 97: a field of C's that the mirror lacks keeps its default without a word.
func TestEveryFieldOfTheCStructsIsMirrored(t *testing.T) {
	for _, pair := range [][2]any{
		{ModelOptions{}, _Ctype_struct_dsv4_model_options{}},
		{ModelInfo{}, _Ctype_struct_dsv4_model_info{}},
		{Plan{}, _Ctype_struct_dsv4_plan{}},
		{EngineOptions{}, cEngineOptions{}},
		{EngineInfo{}, _Ctype_struct_dsv4_engine_info{}},
		{EngineMetrics{}, _Ctype_struct_dsv4_engine_metrics{}},
		{SessionOptions{}, _Ctype_struct_dsv4_session_options{}},
		{SessionInfo{}, _Ctype_struct_dsv4_session_info{}},
		{SessionMetrics{}, _Ctype_struct_dsv4_session_metrics{}},
		{SessionFileInfo{}, _Ctype_struct_dsv4_session_file_info{}},
		{CallOptions{}, _Ctype_struct_dsv4_call_options{}},
		{CacheStats{}, _Ctype_struct_dsv4_cache_stats{}},
		{CacheInfo{}, _Ctype_struct_dsv4_cache_info{}},
		{SamplerOptions{}, _Ctype_struct_dsv4_sampler_options{}},
		{GenerationOptions{}, _Ctype_struct_dsv4_generation_options{}},
		{ChatOptions{}, cChatOptions{}},
		{DeviceInfo{}, _Ctype_struct_dsv4_device_info{}},
	} {
		fields, c := reflect.TypeOf(pair[0]), pair[1]
		var mirrored []string
		for i := range fields.NumField() {
			field := fields.Field(i)
			name, _, found := counterpart(field, reflect.TypeOf(c))
			if !found && field.Name != "Bias" {
				t.Errorf("%v.%s has no field of C's", fields, field.Name)
			}
			mirrored = append(mirrored, name)
		}
		for i := range reflect.TypeOf(c).NumField() {
			name := reflect.TypeOf(c).Field(i).Name
			if !slices.Contains(mirrored, name) && !slices.Contains(unmirrored, name) {
				t.Errorf("%v lacks %s", fields, name)
			}
		}
	}
}

func TestOptionsArriveAsTheyWereSet(t *testing.T) {
	var keep scratch
	defer keep.free()
	engineOptionsInC := func(options *EngineOptions) (c cEngineOptions) {
		ok(t, options.toC(&c, &keep))
		return c
	}
	chatOptionsInC := func(options ChatOptions) (c cChatOptions) {
		ok(t, options.toC(&c, &keep))
		return c
	}
	if e := engineOptionsInC(&EngineOptions{}); e != engineOptionsInC(nil) {
		t.Fatalf("zero is not the default: %+v", e)
	}
	e := engineOptionsInC(&EngineOptions{Threads: 3, CacheBytes: 1 << 40, PoisonCache: true, WhenFull: WhenFullWait, Prefetch: PrefetchOff})
	if e.threads != 3 || e.cache_bytes != 1<<40 || e.poison_cache != 1 || e.when_full != 3 || e.prefetch != 1 || e.prefetch_depth != 4 {
		t.Fatalf("%+v", e)
	}
	c := chatOptionsInC(ChatOptions{})
	if c.drop_thinking != 1 || c.add_generation_prompt != 1 || c.thinking != 0 {
		t.Fatalf("%+v", c)
	}
	c = chatOptionsInC(ChatOptions{KeepThinking: true, NoGenerationPrompt: true, Thinking: true, Effort: EffortMax})
	if c.drop_thinking != 0 || c.add_generation_prompt != 0 || c.thinking != 1 || c.effort != 3 {
		t.Fatalf("%+v", c)
	}
}
