package dsv4

// #include "callbacks.h"
import "C"

import (
	"context"
	"errors"
	"runtime/cgo"
	"unsafe"
)

// SessionOptions are options of a session. Fields that are zero are the defaults.
type SessionOptions struct {
	// Most tokens that the session can hold; 0 is the model's MaxPositionEmbeddings. Memory is taken as it fills.
	Context uint64
	// Tokens that Truncate can always take back without computing; at most 64.
	Rollback uint64
}

func (o *SessionOptions) toC(c *C.dsv4_session_options) {
	C.dsv4_session_options_init(c)
	if o != nil {
		c.context, c.rollback = C.uint64_t(o.Context), C.uint64_t(o.Rollback)
	}
}

// SessionInfo says where a session stands.
type SessionInfo struct {
	// Tokens in the session, most that it can hold, and those that still fit.
	Position, Context, Remaining uint64
	// Whether there are logits.
	HasLogits bool
	// Tokens that were taken from the cache instead of computed.
	ReusedTokens uint64
}

// CallOptions says how a session's calls are treated among those of others. Fields that are zero are the defaults. Time
// limits come from contexts.
type CallOptions struct {
	// Tokens that are expected behind a prompt, for which room is asked too with WhenFullRefuse and WhenFullWait.
	Reserve uint64
	// Higher goes first where not all fit into a step; nobody waits for ever.
	Priority int32
	WhenFull WhenFull
	// The calling thread does no work for the model: another one must, for example in [Engine.Step].
	WaitsOnly bool
}

// Session is one token timeline with its cache, for one goroutine at a time.
type Session struct{ *object }

func ownSession(out *C.dsv4_session) *Session {
	o := newObject(unsafe.Pointer(out), func(p unsafe.Pointer) { C.dsv4_session_free((*C.dsv4_session)(p)) })
	return collect(&Session{o}, o)
}

// NewSession makes an empty session. Options may be nil.
func NewSession(engine *Engine, options *SessionOptions) (*Session, error) {
	var c C.dsv4_session_options
	options.toC(&c)
	var out *C.dsv4_session
	err := engine.with(func(p unsafe.Pointer, e *C.dsv4_error) C.dsv4_status {
		return C.dsv4_session_new((*C.dsv4_engine)(p), &c, &out, e)
	})
	if err != nil {
		return nil, err
	}
	return ownSession(out), nil
}

// compute runs a call that ctx may end. o is the object that f works on: the session, or a generation of it.
func (s *Session) compute(ctx context.Context, o *object, f func(unsafe.Pointer, *C.dsv4_error) C.dsv4_status) error {
	if ctx.Err() != nil {
		return ended(ctx, "the context ended before the call")
	}
	if !s.acquire() {
		return ErrClosed
	}
	defer s.release()
	if ctx.Done() != nil {
		session, cancelled := (*C.dsv4_session)(s.pointer), make(chan struct{})
		stop := context.AfterFunc(ctx, func() {
			defer close(cancelled)
			_ = C.dsv4_session_cancel(session, nil)
		})
		defer func() {
			if !stop() {
				// if it came too late for this call, it is not for the next one
				<-cancelled
				_ = C.dsv4_session_reset_cancel(session, nil)
			}
		}()
	}
	err := o.with(f)
	if errors.Is(err, ErrCancelled) && ctx.Err() != nil {
		return ended(ctx, err.(*Error).Message)
	}
	return err
}

// Feed appends tokens and computes the logits behind the last one. If it ends early, the chunks that were complete stay,
// see [SessionInfo].Position: feed the rest to go on.
func (s *Session) Feed(ctx context.Context, tokens []Token) error {
	return s.feed(ctx, tokens, 0)
}

// FeedProgress is [Session.Feed] that calls a function after each chunk; false cancels. The session is busy for it. It runs
// on a goroutine of its own; if it panics, so does FeedProgress, with the same value, once the call has ended.
func (s *Session) FeedProgress(ctx context.Context, tokens []Token, progressed func(done, total int) bool) error {
	p := &progress{function: progressed, last: outcome{returned: true}}
	handle := cgo.NewHandle(p)
	defer handle.Delete()
	err := s.feed(ctx, tokens, handle)
	p.last.pass()
	return err
}

func (s *Session) feed(ctx context.Context, tokens []Token, handle cgo.Handle) error {
	return s.compute(ctx, s.object, func(p unsafe.Pointer, e *C.dsv4_error) C.dsv4_status {
		ids, n := idsOf(tokens)
		if handle != 0 {
			return C.dsv4go_feed((*C.dsv4_session)(p), ids, n, C.uintptr_t(handle), e)
		}
		return C.dsv4_session_feed((*C.dsv4_session)(p), ids, n, nil, nil, e)
	})
}

// FeedAll is [Session.Feed] that gives the logits behind every token: row i, of vocab values, belongs to tokens[i].
func (s *Session) FeedAll(ctx context.Context, tokens []Token, vocab int) ([]float32, error) {
	logits := make([]float32, len(tokens)*vocab)
	err := s.compute(ctx, s.object, func(p unsafe.Pointer, e *C.dsv4_error) C.dsv4_status {
		ids, n := idsOf(tokens)
		values := (*C.float)(unsafe.Pointer(unsafe.SliceData(logits)))
		return C.dsv4_session_feed_all((*C.dsv4_session)(p), ids, n, values, C.size_t(len(logits)), e)
	})
	if err != nil {
		return nil, err
	}
	return logits, nil
}

// Sync makes the session hold exactly tokens, computing only what follows the beginning that it has of them: for
// conversations that are rendered anew each turn. It says how many tokens it had.
func (s *Session) Sync(ctx context.Context, tokens []Token) (kept int, err error) {
	if kept, err = s.KeepCommon(ctx, tokens); err != nil {
		return 0, err
	}
	return kept, s.Feed(ctx, tokens[kept:])
}

// KeepCommon goes back to what the session has in common with tokens, and says how many tokens that is.
func (s *Session) KeepCommon(ctx context.Context, tokens []Token) (int, error) {
	var kept C.size_t
	err := s.compute(ctx, s.object, func(p unsafe.Pointer, e *C.dsv4_error) C.dsv4_status {
		ids, n := idsOf(tokens)
		return C.dsv4_session_keep_common((*C.dsv4_session)(p), ids, n, &kept, e)
	})
	return int(kept), err
}

// Truncate goes back to the first position tokens.
func (s *Session) Truncate(ctx context.Context, position uint64) error {
	return s.compute(ctx, s.object, func(p unsafe.Pointer, e *C.dsv4_error) C.dsv4_status {
		return C.dsv4_session_truncate((*C.dsv4_session)(p), C.uint64_t(position), e)
	})
}

// Clear empties the session.
func (s *Session) Clear() error {
	return s.with(func(p unsafe.Pointer, e *C.dsv4_error) C.dsv4_status {
		return C.dsv4_session_clear((*C.dsv4_session)(p), e)
	})
}

// Fork makes a session with the same tokens, for another continuation. Nothing is copied but tokens and logits.
func (s *Session) Fork() (*Session, error) {
	var out *C.dsv4_session
	err := s.with(func(p unsafe.Pointer, e *C.dsv4_error) C.dsv4_status {
		return C.dsv4_session_fork((*C.dsv4_session)(p), &out, e)
	})
	if err != nil {
		return nil, err
	}
	return ownSession(out), nil
}

// Logits appends the logits behind the last token, before softmax, to buffer, which may be nil.
func (s *Session) Logits(buffer []float32) ([]float32, error) {
	err := s.with(func(p unsafe.Pointer, e *C.dsv4_error) C.dsv4_status {
		var values *C.float
		var n C.size_t
		status := C.dsv4_session_logits((*C.dsv4_session)(p), &values, &n, e)
		buffer = append(buffer, unsafe.Slice((*float32)(unsafe.Pointer(values)), n)...)
		return status
	})
	return buffer, err
}

// Tokens gives the tokens in the session.
func (s *Session) Tokens() (tokens []Token, err error) {
	err = s.with(func(p unsafe.Pointer, e *C.dsv4_error) C.dsv4_status {
		var ids *C.uint32_t
		var n C.size_t
		status := C.dsv4_session_tokens((*C.dsv4_session)(p), &ids, &n, e)
		tokens = append(tokens, unsafe.Slice((*Token)(unsafe.Pointer(ids)), n)...)
		return status
	})
	return tokens, err
}

// Info says where the session stands.
func (s *Session) Info() (SessionInfo, error) {
	var c C.dsv4_session_info
	c.size = C.sizeof_dsv4_session_info
	var info SessionInfo
	err := s.with(func(p unsafe.Pointer, e *C.dsv4_error) C.dsv4_status {
		return C.dsv4_session_get_info((*C.dsv4_session)(p), &c, e)
	})
	if err == nil {
		fromC(&c, &info)
	}
	return info, err
}

// SetCallOptions says how the session's calls are treated from now on. Options may be nil, which are the defaults.
func (s *Session) SetCallOptions(options *CallOptions) error {
	var c C.dsv4_call_options
	C.dsv4_call_options_init(&c)
	if options != nil {
		if err := toC(*options, &c, false, nil); err != nil {
			return err
		}
	}
	return s.with(func(p unsafe.Pointer, e *C.dsv4_error) C.dsv4_status {
		return C.dsv4_session_set_call_options((*C.dsv4_session)(p), &c, e)
	})
}
