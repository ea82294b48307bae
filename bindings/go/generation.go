package dsv4

// #include <dsv4.h>
import "C"

import (
	"context"
	"iter"
	"unsafe"
)

// Finish says why a generation ended.
type Finish int32

const (
	// FinishNone: it has not.
	FinishNone Finish = C.DSV4_FINISH_NONE
	// FinishEOS is the model's end-of-sentence token.
	FinishEOS Finish = C.DSV4_FINISH_EOS
	// FinishToken is one of the stop tokens; the value is its id.
	FinishToken Finish = C.DSV4_FINISH_TOKEN
	// FinishString is one of the stop strings; the value is its index.
	FinishString Finish = C.DSV4_FINISH_STRING
	// FinishMaxTokens is the most tokens of the options.
	FinishMaxTokens Finish = C.DSV4_FINISH_MAX_TOKENS
	// FinishContextFull is the session's context.
	FinishContextFull Finish = C.DSV4_FINISH_CONTEXT_FULL
)

// GenerationOptions says when a generation ends. Fields that are zero are the defaults.
type GenerationOptions struct {
	// Most tokens to generate; 0 is no limit but the context.
	MaxTokens uint64
	// Tokens that end the generation; their text is not part of it.
	StopTokens []Token
	// Texts that end the generation; they are not part of the output, not even in parts.
	StopStrings []string
	// Go on behind the end-of-sentence token.
	IgnoreEOS bool
}

// Piece is one generated token and the text that became certain with it.
type Piece struct {
	// Empty while a character or a possible stop string is incomplete.
	Text string
	// A stop token is reported too.
	Token Token
	// Anything but FinishNone says that this is the last piece.
	Finish      Finish
	FinishValue uint32
}

// Generation is a running generation of one session with one sampler, for one goroutine at a time. Its last token is not in
// the session, since its logits were not needed: to go on from the text, feed it.
type Generation struct {
	*object
	session *Session
}

// NewGeneration starts a generation from the session's logits; nothing is computed yet. Options may be nil.
func NewGeneration(session *Session, sampler *Sampler, options *GenerationOptions) (*Generation, error) {
	var c C.dsv4_generation_options
	C.dsv4_generation_options_init(&c)
	var keep scratch
	defer keep.free()
	if options != nil {
		if err := toC(*options, &c, false, &keep); err != nil {
			return nil, err
		}
	}
	if !sampler.acquire() {
		return nil, ErrClosed
	}
	defer sampler.release()
	var out *C.dsv4_generation
	err := session.with(func(p unsafe.Pointer, e *C.dsv4_error) C.dsv4_status {
		return C.dsv4_generation_new((*C.dsv4_session)(p), (*C.dsv4_sampler)(sampler.pointer), &c, &out, e)
	})
	if err != nil {
		return nil, err
	}
	o := newObject(unsafe.Pointer(out), func(p unsafe.Pointer) { C.dsv4_generation_free((*C.dsv4_generation)(p)) })
	return collect(&Generation{o, session}, o), nil
}

// Next generates one token. After the last piece it gives that one's Finish again, with no text. After an error it can be
// called again to go on.
func (g *Generation) Next(ctx context.Context) (Piece, error) {
	var piece Piece
	err := g.session.compute(ctx, g.object, func(p unsafe.Pointer, e *C.dsv4_error) C.dsv4_status {
		var c C.dsv4_piece
		c.size = C.sizeof_dsv4_piece
		status := C.dsv4_generation_next((*C.dsv4_generation)(p), &c, e)
		piece = Piece{C.GoStringN(c.text, C.int(c.text_len)), Token(c.token), Finish(c.finish), uint32(c.finish_value)}
		return status
	})
	return piece, err
}

// Finish ends the generation before its time and gives the text that was held back.
func (g *Generation) Finish() (string, error) {
	return g.lend(func(p unsafe.Pointer, text **C.char, n *C.size_t, e *C.dsv4_error) C.dsv4_status {
		return C.dsv4_generation_finish((*C.dsv4_generation)(p), text, n, e)
	})
}

// Pieces generates to the end. An error is the last thing it gives; call it again to go on.
func (g *Generation) Pieces(ctx context.Context) iter.Seq2[Piece, error] {
	return func(yield func(Piece, error) bool) {
		for {
			piece, err := g.Next(ctx)
			if !yield(piece, err) || err != nil || piece.Finish != FinishNone {
				return
			}
		}
	}
}

// Generate generates from the session's logits to the end. An error is the last thing it gives. Options may be nil. To go on
// from the text afterwards, feed the last piece's token.
func (s *Session) Generate(ctx context.Context, sampler *Sampler, options *GenerationOptions) iter.Seq2[Piece, error] {
	return func(yield func(Piece, error) bool) {
		generation, err := NewGeneration(s, sampler, options)
		if err != nil {
			yield(Piece{}, err)
			return
		}
		defer generation.Close()
		generation.Pieces(ctx)(yield)
	}
}
