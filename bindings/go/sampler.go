package dsv4

// #include <dsv4.h>
import "C"

import (
	"maps"
	"slices"
	"unsafe"
)

// SamplerOptions says what a sampler does. Begin with [DefaultSamplerOptions]: here zero is no default, since a temperature
// of zero is refused and never taken for greedy decoding.
type SamplerOptions struct {
	// Equal seeds give equal tokens for equal logits, on every platform.
	Seed uint64
	// The penalties look at this many accepted tokens, the latest; 0 looks at all.
	PenaltyWindow uint64
	// What is added to the logits of tokens: finite, or minus infinity to ban one.
	Bias map[Token]float32
	// Take the largest logit instead of drawing.
	Greedy bool
	// Keep the k largest logits; 0 keeps all.
	TopK uint32
	// Divides the logits; above 0.
	Temperature float32
	// Keep the smallest set of likeliest tokens whose probabilities reach this; above 0, at most 1.
	TopP float32
	// Keep tokens at least this fraction as likely as the likeliest.
	MinP float32
	// Divides positive and multiplies negative logits of accepted tokens; above 0, 1 is none.
	RepetitionPenalty float32
	// Subtracted from the logits of accepted tokens, once and per occurrence.
	PresencePenalty, FrequencyPenalty float32
}

// DefaultSamplerOptions draw from the model's own distribution.
func DefaultSamplerOptions() SamplerOptions {
	var c C.dsv4_sampler_options
	C.dsv4_sampler_options_init(&c)
	var options SamplerOptions
	fromC(&c, &options)
	return options
}

// Sampler chooses the tokens of one sequence.
type Sampler struct{ *object }

// NewSampler makes a sampler. Options may be nil, which are the defaults.
func NewSampler(options *SamplerOptions) (*Sampler, error) {
	var c C.dsv4_sampler_options
	C.dsv4_sampler_options_init(&c)
	var keep scratch
	defer keep.free()
	if options != nil {
		if err := toC(*options, &c, true, &keep); err != nil {
			return nil, err
		}
		tokens := slices.Collect(maps.Keys(options.Bias))
		values := slices.Collect(func(yield func(float32) bool) {
			for _, token := range tokens {
				if !yield(options.Bias[token]) {
					return
				}
			}
		})
		if len(tokens) > 0 {
			keep.pins.Pin(&tokens[0])
			keep.pins.Pin(&values[0])
			c.bias_tokens, c.n_bias = idsOf(tokens)
			c.bias_values = (*C.float)(unsafe.Pointer(&values[0]))
		}
	}
	var out *C.dsv4_sampler
	if err := call(func(e *C.dsv4_error) C.dsv4_status { return C.dsv4_sampler_new(&c, &out, e) }); err != nil {
		return nil, err
	}
	o := newObject(unsafe.Pointer(out), func(p unsafe.Pointer) { C.dsv4_sampler_free((*C.dsv4_sampler)(p)) })
	return collect(&Sampler{o}, o), nil
}

// Sample chooses the next token for logits: those of [Session.Logits], or your own. It does not count as accepted.
func (s *Sampler) Sample(logits []float32) (Token, error) {
	var token C.uint32_t
	err := s.with(func(p unsafe.Pointer, e *C.dsv4_error) C.dsv4_status {
		values := (*C.float)(unsafe.Pointer(unsafe.SliceData(logits)))
		return C.dsv4_sampler_sample((*C.dsv4_sampler)(p), values, C.size_t(len(logits)), &token, e)
	})
	return Token(token), err
}

// Accept counts a token for the penalties.
func (s *Sampler) Accept(token Token) error {
	return s.with(func(p unsafe.Pointer, e *C.dsv4_error) C.dsv4_status {
		return C.dsv4_sampler_accept((*C.dsv4_sampler)(p), C.uint32_t(token), e)
	})
}

// Reset forgets the accepted tokens and starts the random numbers anew.
func (s *Sampler) Reset() error {
	return s.with(func(p unsafe.Pointer, e *C.dsv4_error) C.dsv4_status {
		return C.dsv4_sampler_reset((*C.dsv4_sampler)(p), e)
	})
}
