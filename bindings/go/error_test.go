package dsv4

import (
	"context"
	"errors"
	"math"
	"strings"
	"testing"
)

func TestErrorsHaveAStatusAndNameWhatIsWrong(t *testing.T) {
	_, err := Open("/nowhere", nil)
	refused(t, err, ErrNotFound)
	var e *Error
	if !errors.As(err, &e) || e.Status != ErrNotFound || !strings.Contains(e.Message, "/nowhere") || errors.Is(err, ErrIO) {
		t.Fatal(err)
	}
	if ErrNotFound.Error() != "dsv4: NOT_FOUND" || Status(12345).String() != "UNKNOWN" {
		t.Fatal(ErrNotFound, Status(12345))
	}
	f := open(t)
	session := f.session(t)
	refused(t, session.Feed(context.Background(), repeated(2000)), ErrContextFull)
	refused(t, session.Feed(context.Background(), []Token{math.MaxUint32}), ErrInvalidArgument)
	_, err = session.Logits(nil)
	refused(t, err, ErrInvalidArgument)
	_, err = f.model.Render([]Message{{Role: "king"}}, nil)
	refused(t, err, ErrChat)
	_, err = f.model.Render(func() {}, nil)
	if err == nil {
		t.Fatal("a function is no message")
	}
	_, err = f.model.Decode([]Token{math.MaxUint32})
	refused(t, err, ErrTokenizer)
	_, err = NewEngine(f.model, &EngineOptions{Numerics: 99})
	refused(t, err, ErrInvalidArgument)
	_, err = NewSession(f.engine, &SessionOptions{Rollback: 65})
	refused(t, err, ErrInvalidArgument)
}

func TestTemperatureZeroIsRefusedAndNeverGreedy(t *testing.T) {
	options := DefaultSamplerOptions()
	if options.Temperature != 1 || options.TopP != 1 || options.Greedy {
		t.Fatal(options)
	}
	options.Temperature = 0
	_, err := NewSampler(&options)
	refused(t, err, ErrInvalidArgument)
	_, err = NewSampler(&SamplerOptions{})
	refused(t, err, ErrInvalidArgument)
}

func TestTextsWithNULAreRefused(t *testing.T) {
	f := open(t)
	_, err := Open("a\x00b", nil)
	refused(t, err, ErrInvalidArgument)
	_, err = NewEngine(f.model, &EngineOptions{PrefixSalt: "\x00"})
	refused(t, err, ErrInvalidArgument)
	refused(t, f.session(t).Save(context.Background(), "a\x00b", true), ErrInvalidArgument)
	session := f.session(t)
	ok(t, session.Feed(context.Background(), []Token{300}))
	_, err = NewGeneration(session, greedy(t), &GenerationOptions{StopStrings: []string{"fine", "\x00"}})
	refused(t, err, ErrInvalidArgument)
	if !strings.Contains(err.Error(), "stop_strings[1]") {
		t.Fatal(err)
	}
	// with a length it may hold any character
	if text := must(f.model.Decode(must(f.model.Encode("a\x00b", MarkupText))(t)))(t); text != "a\x00b" {
		t.Fatalf("%q", text)
	}
}
