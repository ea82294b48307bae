package dsv4

import (
	"context"
	"errors"
	"os"
	"runtime"
	"testing"
	"time"
)

// modelPath is tiny-v4, a small trained model; DSV4_TEST_MODEL names another place for it.
func modelPath() string {
	if path := os.Getenv("DSV4_TEST_MODEL"); path != "" {
		return path
	}
	return "../../examples/models/tiny-v4"
}

func must[T any](value T, err error) func(testing.TB) T {
	return func(t testing.TB) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return value
	}
}

func ok(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func refused(t testing.TB, err error, want error) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Fatalf("got %v, want %v", err, want)
	}
}

type fixture struct {
	model  *Model
	engine *Engine
}

func open(t testing.TB) fixture {
	model := must(Open(modelPath(), nil))(t)
	engine := must(NewEngine(model, &EngineOptions{Threads: 1, PrefillChunk: 16}))(t)
	t.Cleanup(func() {
		ok(t, engine.Close())
		ok(t, model.Close())
	})
	return fixture{model, engine}
}

func (f fixture) session(t testing.TB) *Session {
	session := must(NewSession(f.engine, &SessionOptions{Context: 1024}))(t)
	t.Cleanup(func() { session.Close() })
	return session
}

func greedy(t testing.TB) *Sampler {
	options := DefaultSamplerOptions()
	options.Greedy = true
	sampler := must(NewSampler(&options))(t)
	t.Cleanup(func() { sampler.Close() })
	return sampler
}

func repeated(n int) []Token {
	tokens := make([]Token, n)
	for i := range tokens {
		tokens[i] = Token(300 + i%64)
	}
	return tokens
}

// generated is the text and the tokens of a generation behind a prompt.
func generated(t testing.TB, session *Session, sampler *Sampler, prompt []Token, n uint64) (text string, tokens []Token) {
	t.Helper()
	ctx := context.Background()
	ok(t, session.Clear())
	ok(t, session.Feed(ctx, prompt))
	for piece, err := range session.Generate(ctx, sampler, &GenerationOptions{MaxTokens: n, IgnoreEOS: true}) {
		ok(t, err)
		text += piece.Text
		tokens = append(tokens, piece.Token)
	}
	return text, tokens
}

func TestVersionsFitAndTheLibrarySaysWhatItIs(t *testing.T) {
	ok(t, CheckVersion())
	if Version() == "" || BuildInfo() == "" {
		t.Fatal("no version")
	}
	if devices, err := Devices(); err != nil {
		refused(t, err, ErrUnavailable)
	} else if devices[0].ID == "" {
		t.Fatal(devices)
	}
}

// waitFor runs the garbage collector until a condition holds.
func waitFor(t testing.TB, what string, holds func() bool) {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); !holds(); {
		if time.Now().After(end) {
			t.Fatalf("%s does not happen", what)
		}
		runtime.GC()
		time.Sleep(time.Millisecond)
	}
}
