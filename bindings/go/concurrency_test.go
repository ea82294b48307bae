package dsv4

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"runtime/pprof"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
	"unsafe"
)

func TestContextsEndCalls(t *testing.T) {
	f := open(t)
	session, sampler := f.session(t), greedy(t)
	before, cancel := context.WithCancel(context.Background())
	cancel()
	err := session.Feed(before, repeated(10))
	refused(t, err, ErrCancelled)
	refused(t, err, context.Canceled)

	// from within a call: it ends within a chunk of 16 tokens
	why := errors.New("the client has gone")
	during, end := context.WithCancelCause(context.Background())
	err = session.FeedProgress(during, repeated(800), func(done, total int) bool {
		end(why)
		return true
	})
	refused(t, err, ErrCancelled)
	refused(t, err, context.Canceled)
	refused(t, err, why)
	if info := must(session.Info())(t); info.Position < 16 || info.Position == 800 {
		t.Fatalf("%+v", info)
	}

	// nothing of it is left for the next call
	ok(t, session.Clear())
	ok(t, session.Feed(context.Background(), repeated(20)))
	late, cancel := context.WithDeadline(context.Background(), time.Now().Add(30*time.Millisecond))
	defer cancel()
	for piece, e := range session.Generate(late, sampler, &GenerationOptions{IgnoreEOS: true}) {
		if err = e; err == nil && piece.Finish != FinishNone {
			t.Skip("this machine fills the context within the deadline")
		}
	}
	refused(t, err, ErrCancelled)
	refused(t, err, context.DeadlineExceeded)
}

// A context that ends just when its call does is nothing to the next call.
func TestLateCancelsAreForgotten(t *testing.T) {
	f := open(t)
	session, token := f.session(t), []Token{300}
	for i := range 300 {
		if i%200 == 0 {
			ok(t, session.Clear())
		}
		ctx, cancel := context.WithCancel(context.Background())
		go func() {
			time.Sleep(time.Duration(rand.IntN(1200)) * time.Microsecond)
			cancel()
		}()
		if err := session.Feed(ctx, token); err != nil {
			refused(t, err, ErrCancelled)
		}
		ok(t, session.Feed(context.Background(), token))
	}
}

// Pitfall 107: a function that C calls panics, ends its goroutine, or cancels.
func TestCallbacksMayPanicAndCancel(t *testing.T) {
	f, ctx := open(t), context.Background()
	session := f.session(t)
	for _, value := range []any{"mine", errors.New("an error"), nil} {
		func() {
			defer func() {
				if got := recover(); value != nil && got != value || value == nil && got == nil {
					t.Fatalf("recovered %v, not %v", got, value)
				}
			}()
			_ = session.FeedProgress(ctx, repeated(40), func(int, int) bool { panic(value) })
			t.Fatal("the panic is lost")
		}()
	}
	if info := must(session.Info())(t); info.Position != 48 {
		t.Fatalf("%+v", info)
	}
	refused(t, session.FeedProgress(ctx, repeated(40), func(int, int) bool { return false }), ErrCancelled)
	ok(t, session.Feed(ctx, repeated(3)))

	// one that ends its goroutine, as t.Fatal does, ends the one that called, behind the call
	exited := make(chan bool)
	go func() {
		returned := false
		defer func() { exited <- !returned }()
		_ = session.FeedProgress(ctx, repeated(40), func(int, int) bool { runtime.Goexit(); return true })
		returned = true
	}()
	if !<-exited {
		t.Fatal("the goroutine goes on")
	}
	ok(t, session.Feed(ctx, repeated(3)))
}

// Pitfalls 102, 107: the log's function has the messages, may panic, and is not called after it was taken back.
func TestLogFunctionsMayPanicAndAreCalledNoMore(t *testing.T) {
	f := open(t)
	var messages atomic.Int64
	ok(t, SetLog(LogInfo, func(level LogLevel, message string) {
		messages.Add(1)
		if level < LogError || message == "" {
			t.Errorf("%d %q", level, message)
		}
		refused(t, SetLog(LogOff, nil), ErrBusy)
		panic("dropped")
	}))
	ok(t, must(NewEngine(f.model, nil))(t).Close())
	n := messages.Load()
	ok(t, SetLog(LogOff, nil))
	ok(t, must(NewEngine(f.model, nil))(t).Close())
	if n == 0 || messages.Load() != n {
		t.Fatal(n, messages.Load())
	}
	refused(t, SetLog(99, func(LogLevel, string) {}), ErrInvalidArgument)
}

// Pitfall 107: objects are closed while calls run, from callbacks, twice, in any order, and never.
func TestObjectsAreClosedAtAnyTime(t *testing.T) {
	f, ctx := open(t), context.Background()
	session, sampler := must(NewSession(f.engine, nil))(t), greedy(t)
	freed := 0
	free := session.free
	session.free = func(p unsafe.Pointer) { free(p); freed++ }
	ok(t, session.FeedProgress(ctx, repeated(40), func(done, total int) bool {
		ok(t, session.Close())
		ok(t, session.Close())
		refused(t, session.Clear(), ErrClosed)
		return freed == 0
	}))
	if freed != 1 {
		t.Fatalf("freed %d times", freed)
	}
	ok(t, session.Close())
	refused(t, session.Feed(ctx, repeated(1)), ErrClosed)
	for _, err := range session.Generate(ctx, sampler, nil) {
		refused(t, err, ErrClosed)
	}

	// a session outlives what it was made from, and a generation its session
	model := must(Open(modelPath(), nil))(t)
	engine := must(NewEngine(model, nil))(t)
	orphan := must(NewSession(engine, nil))(t)
	ok(t, model.Close())
	ok(t, engine.Close())
	ok(t, orphan.Feed(ctx, repeated(4)))
	generation := must(NewGeneration(orphan, sampler, nil))(t)
	must(generation.Next(ctx))(t)
	ok(t, orphan.Close())
	_, err := generation.Next(ctx)
	refused(t, err, ErrClosed)
	ok(t, generation.Close())
	_, err = NewSession(engine, nil)
	refused(t, err, ErrClosed)
}

func TestGarbageIsFreed(t *testing.T) {
	f := open(t)
	sessions := func() uint64 { return must(f.engine.Metrics())(t).Sessions }
	for range 8 {
		must(NewSession(f.engine, nil))(t)
	}
	waitFor(t, "the freeing of sessions", func() bool { return sessions() == 0 })
}

// The collector runs all the time while every kind of call does.
func TestTheGarbageCollectorTakesNothingFromUnderACall(t *testing.T) {
	done := make(chan struct{})
	var collector sync.WaitGroup
	collector.Add(1)
	go func() {
		defer collector.Done()
		for {
			select {
			case <-done:
				return
			default:
				runtime.GC()
			}
		}
	}()
	defer collector.Wait()
	defer close(done)
	ctx, path := context.Background(), filepath.Join(t.TempDir(), "gc.session")
	for range 3 {
		// each object is garbage as soon as the call that used it last has begun
		model := must(Open(modelPath(), &ModelOptions{PreloadTokenizer: true}))(t)
		must(model.Info())(t)
		prompt := must(model.Render([]Message{{Role: "user", Content: "Hello"}}, &ChatOptions{Tools: "[]"}))(t)
		must(prompt.Text())(t)
		tokens := must(prompt.Tokens())(t)
		must(model.Decode(tokens))(t)
		engine := must(NewEngine(model, &EngineOptions{Device: "cpu", PrefixSalt: "salt", PrefillChunk: 16}))(t)
		session := must(NewSession(engine, nil))(t)
		ok(t, session.FeedProgress(ctx, tokens, func(int, int) bool { return true }))
		fork := must(session.Fork())(t)
		ok(t, fork.Save(ctx, path, true))
		must(VerifySessionFile(path))(t)
		restored := must(RestoreSession(ctx, engine, path, nil))(t)
		options := DefaultSamplerOptions()
		options.Bias = map[Token]float32{7: -1}
		sampler := must(NewSampler(&options))(t)
		parser := must(NewChatParser(model, false))(t)
		pieces := restored.Generate(ctx, sampler, &GenerationOptions{
			MaxTokens: 5, StopStrings: []string{"no such text", "nor this"}, StopTokens: []Token{1, 2},
		})
		for event, err := range parser.Events(pieces) {
			ok(t, err)
			_ = event.Text
		}
		must(parser.Message())(t)
		must(fork.Logits(nil))(t)
		must(engine.MetricsText())(t)
	}
}

func TestSixteenGoroutinesHaveTheResultsOfOneAlone(t *testing.T) {
	f := open(t)
	prompts, want := make([][]Token, 4), make([][]Token, 4)
	alone := f.session(t)
	for i := range prompts {
		prompts[i] = must(f.model.Encode(fmt.Sprintf("%d ships left the harbour that day.", i+2), MarkupText))(t)
		_, want[i] = generated(t, alone, greedy(t), prompts[i], 16)
	}
	var group sync.WaitGroup
	var cancelled atomic.Int64
	for g := range 16 {
		group.Add(1)
		go func() {
			defer group.Done()
			session, sampler := f.session(t), greedy(t)
			which := g % len(prompts)
			for round := range 6 {
				ok(t, session.Clear())
				ctx, cancel := context.WithCancel(context.Background())
				if round%2 == 0 {
					timer := time.AfterFunc(time.Duration(rand.IntN(20))*time.Millisecond, cancel)
					defer timer.Stop()
				}
				err := session.Feed(ctx, prompts[which])
				var tokens []Token
				if err == nil {
					for piece, e := range session.Generate(ctx, sampler, &GenerationOptions{MaxTokens: 16, IgnoreEOS: true}) {
						if err = e; err == nil {
							tokens = append(tokens, piece.Token)
						}
					}
				}
				cancel()
				if err != nil {
					if !errors.Is(err, ErrCancelled) || !errors.Is(err, context.Canceled) {
						t.Errorf("goroutine %d: %v", g, err)
						return
					}
					cancelled.Add(1)
				}
				if len(tokens) > 16 || err == nil && len(tokens) != 16 || !slices.Equal(tokens, want[which][:len(tokens)]) {
					t.Errorf("goroutine %d has %v, alone it was %v", g, tokens, want[which])
					return
				}
			}
		}()
	}
	group.Wait()
	metrics := must(f.engine.Metrics())(t)
	if metrics.BatchSessions <= metrics.Steps {
		t.Errorf("no step had more than one session: %+v", metrics)
	}
	t.Logf("%d of 96 calls were cancelled; %.1f sessions a step", cancelled.Load(), float64(metrics.BatchSessions)/float64(metrics.Steps))
}

// Pitfall 107: signals arrive all the time during long calls, and while files are read and written.
func TestSignalsDoNotDisturbCalls(t *testing.T) {
	f, ctx := open(t), context.Background()
	session, path := f.session(t), filepath.Join(t.TempDir(), "storm.session")
	tokens := repeated(700)
	ok(t, session.Feed(ctx, tokens))
	want := must(session.Logits(nil))(t)

	ok(t, pprof.StartCPUProfile(io.Discard))
	defer pprof.StopCPUProfile()
	done := make(chan struct{})
	var storm sync.WaitGroup
	defer storm.Wait()
	defer close(done)
	for range 2 {
		storm.Add(1)
		go func() {
			defer storm.Done()
			for {
				select {
				case <-done:
					return
				default:
					_ = syscall.Kill(os.Getpid(), syscall.SIGURG)
					_ = syscall.Kill(os.Getpid(), syscall.SIGPROF)
				}
			}
		}()
	}
	for range 3 {
		ok(t, session.Clear())
		ok(t, session.Feed(ctx, tokens))
		ok(t, session.Save(ctx, path, true))
		restored := must(RestoreSession(ctx, f.engine, path, nil))(t)
		if !slices.Equal(must(restored.Logits(nil))(t), want) || !slices.Equal(must(session.Logits(nil))(t), want) {
			t.Fatal("the logits differ")
		}
		ok(t, restored.Close())
		model := must(Open(modelPath(), &ModelOptions{PreloadTokenizer: true}))(t)
		ok(t, model.Close())
	}
	if saved := must(os.ReadFile(path))(t); bytes.Count(saved, []byte{0}) == len(saved) {
		t.Fatal("the file is empty")
	}
}
