package dsv4

// #include <dsv4.h>
import "C"

import "unsafe"

// Draft is the kind of a checkpoint's draft module.
type Draft int32

// The kinds of draft modules.
const (
	DraftNone   Draft = C.DSV4_DRAFT_NONE
	DraftMTP    Draft = C.DSV4_DRAFT_MTP
	DraftDSpark Draft = C.DSV4_DRAFT_DSPARK
)

// ModelOptions says how to open a model. Its zero value is the default.
type ModelOptions struct {
	// Read tokenizer.json while opening, so that a folder without a usable one is refused at once.
	PreloadTokenizer bool
}

// ModelInfo has the dimensions of a model; names are the keys of config.json.
type ModelInfo struct {
	// Bytes of all weights, and number of tensors.
	WeightBytes, Tensors uint64
	// Longest context, in tokens.
	MaxPositionEmbeddings uint64
	// Number of token ids, and length of a row of logits.
	VocabSize uint32
	// Width of the residual stream, layers, attention heads, values per head.
	HiddenSize, NumHiddenLayers, NumAttentionHeads, HeadDim uint32
	// Tokens that every layer attends to directly.
	SlidingWindow uint32
	// Routed experts per layer, and those that a token uses.
	NRoutedExperts, NumExpertsPerTok uint32
	// The token that begins a prompt, and the one with which the model ends its output.
	BosTokenID, EosTokenID Token
	Draft                  Draft
}

// Plan is what a model and a session take, in bytes. Weights are mapped, not copied.
type Plan struct {
	// All weights, and their parts.
	WeightBytes, EmbeddingBytes, AttentionBytes, RoutedExpertBytes, SharedExpertBytes uint64
	OtherBytes, DraftBytes, UnknownBytes                                              uint64
	// Tokens of the session that the next three are for: windows, compressor states, and pages of a full context.
	Context, WindowBytes, StateBytes, PageBytes uint64
	// What a session takes when it is made, what each further 256 tokens take, and each token of SessionOptions.Rollback.
	SessionBytes, BlockBytes, RollbackTokenBytes uint64
	// Windows of the draft module's layers, per session; not part of the other figures.
	DraftWindowBytes uint64
	// The cache's limit, the longest session that fits under it alone, and how many of Context tokens do together.
	CacheBytes, LongestContext, Sessions uint64
}

// Model is an opened checkpoint folder. It may be used by several goroutines at once.
type Model struct{ *object }

// Open opens a checkpoint folder as published. It reads headers and checks every tensor, and copies no weights. Options
// may be nil.
func Open(path string, options *ModelOptions) (*Model, error) {
	var c C.dsv4_model_options
	C.dsv4_model_options_init(&c)
	var keep scratch
	defer keep.free()
	name, err := keep.text("path", path)
	if err != nil {
		return nil, err
	}
	if options != nil {
		if err := toC(*options, &c, false, &keep); err != nil {
			return nil, err
		}
	}
	var out *C.dsv4_model
	if err := call(func(e *C.dsv4_error) C.dsv4_status { return C.dsv4_model_open(name, &c, &out, e) }); err != nil {
		return nil, err
	}
	o := newObject(unsafe.Pointer(out), func(p unsafe.Pointer) { C.dsv4_model_free((*C.dsv4_model)(p)) })
	return collect(&Model{o}, o), nil
}

// Info gives the dimensions of the model.
func (m *Model) Info() (ModelInfo, error) {
	var c C.dsv4_model_info
	c.size = C.sizeof_dsv4_model_info
	var info ModelInfo
	err := m.with(func(p unsafe.Pointer, e *C.dsv4_error) C.dsv4_status {
		return C.dsv4_model_get_info((*C.dsv4_model)(p), &c, e)
	})
	if err == nil {
		fromC(&c, &info)
	}
	return info, err
}

// Path is the folder that the model was opened from.
func (m *Model) Path() (path string, err error) {
	err = m.with(func(p unsafe.Pointer, e *C.dsv4_error) C.dsv4_status {
		var text *C.char
		status := C.dsv4_model_path((*C.dsv4_model)(p), &text, e)
		path = C.GoString(text)
		return status
	})
	return path, err
}

// Plan says what the model takes on an engine with these options, which may be nil, and each session of context tokens (0
// is the model's longest) on it. Nothing is loaded.
func (m *Model) Plan(options *EngineOptions, context uint64) (Plan, error) {
	var engine C.dsv4_engine_options
	var c C.dsv4_plan
	c.size = C.sizeof_dsv4_plan
	var keep scratch
	defer keep.free()
	var plan Plan
	if err := options.toC(&engine, &keep); err != nil {
		return plan, err
	}
	err := m.with(func(p unsafe.Pointer, e *C.dsv4_error) C.dsv4_status {
		return C.dsv4_model_get_plan((*C.dsv4_model)(p), &engine, C.uint64_t(context), &c, e)
	})
	if err == nil {
		fromC(&c, &plan)
	}
	return plan, err
}
