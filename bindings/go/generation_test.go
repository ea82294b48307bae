package dsv4

import (
	"context"
	"strings"
	"testing"
)

func TestPiecesAreWhatSamplingByHandGives(t *testing.T) {
	f, ctx := open(t), context.Background()
	session, sampler := f.session(t), greedy(t)
	prompt := must(f.model.Encode("The old man looked at the sea and", MarkupText))(t)
	text, tokens := generated(t, session, sampler, prompt, 12)
	if len(tokens) != 12 || len(text) < 10 {
		t.Fatal(text)
	}
	ok(t, session.Clear())
	ok(t, session.Feed(ctx, prompt))
	var logits []float32
	for i, want := range tokens {
		logits = must(session.Logits(logits[:0]))(t)
		token := must(sampler.Sample(logits))(t)
		if token != want {
			t.Fatalf("token %d is %d, not %d", i, token, want)
		}
		ok(t, sampler.Accept(token))
		ok(t, session.Feed(ctx, []Token{token}))
	}
	ok(t, sampler.Reset())
}

func TestGenerationsStopWhereTheyShall(t *testing.T) {
	f, ctx := open(t), context.Background()
	session, sampler := f.session(t), greedy(t)
	prompt := must(f.model.Encode("The old man looked at the sea and", MarkupText))(t)
	text, tokens := generated(t, session, sampler, prompt, 12)
	stopAt := func(options GenerationOptions) (shown string, last Piece) {
		ok(t, session.Clear())
		ok(t, session.Feed(ctx, prompt))
		for piece, err := range session.Generate(ctx, sampler, &options) {
			ok(t, err)
			shown += piece.Text
			last = piece
		}
		return shown, last
	}
	stop := text[5:9]
	shown, last := stopAt(GenerationOptions{MaxTokens: 12, StopStrings: []string{"never in the text", stop}})
	if last.Finish != FinishString || last.FinishValue != 1 || strings.Contains(shown, stop) || !strings.HasPrefix(text, shown) {
		t.Fatalf("%q %+v", shown, last)
	}
	_, last = stopAt(GenerationOptions{MaxTokens: 12, StopTokens: []Token{1, tokens[4]}})
	if last.Finish != FinishToken || last.FinishValue != tokens[4] {
		t.Fatalf("%+v", last)
	}
	_, last = stopAt(GenerationOptions{MaxTokens: 3})
	if last.Finish != FinishMaxTokens {
		t.Fatalf("%+v", last)
	}

	// leaving the loop ends it, and the session goes on
	ok(t, session.Clear())
	ok(t, session.Feed(ctx, prompt))
	for range session.Generate(ctx, sampler, nil) {
		break
	}
	ok(t, session.Feed(ctx, tokens[:1]))
	generation := must(NewGeneration(session, sampler, &GenerationOptions{MaxTokens: 3}))(t)
	if piece := must(generation.Next(ctx))(t); piece.Token != tokens[1] {
		t.Fatalf("%+v", piece)
	}
	must(generation.Finish())(t)
	_, err := generation.Next(ctx)
	refused(t, err, ErrInvalidArgument)
}

func TestBiasBansTokens(t *testing.T) {
	f, ctx := open(t), context.Background()
	session := f.session(t)
	ok(t, session.Feed(ctx, repeated(8)))
	logits := must(session.Logits(nil))(t)
	first := must(greedy(t).Sample(logits))(t)
	options := DefaultSamplerOptions()
	options.Greedy = true
	options.Bias = map[Token]float32{first: -1000, 5: 0.5, 6: -0.5}
	second := must(must(NewSampler(&options))(t).Sample(logits))(t)
	if first == second {
		t.Fatal("the bias has no effect")
	}
}
