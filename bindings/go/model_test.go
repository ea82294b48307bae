package dsv4

import (
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func TestTextRoundTrips(t *testing.T) {
	f := open(t)
	for _, text := range []string{"", "x", "Der Bär trinkt \"Tee\".\n", strings.Repeat("<think> ", 500), "🙂🙂"} {
		tokens := must(f.model.Encode(text, MarkupText))(t)
		if got := must(f.model.Decode(tokens))(t); got != text {
			t.Fatalf("%q came back as %q", text, got)
		}
		stream := must(NewDetokenizer(f.model))(t)
		var streamed strings.Builder
		var bytes []byte
		for _, token := range tokens {
			streamed.WriteString(must(stream.Push(token))(t))
			bytes = append(bytes, must(f.model.TokenBytes(token))(t)...)
		}
		streamed.WriteString(must(stream.Finish())(t))
		ok(t, stream.Close())
		if streamed.String() != text || string(bytes) != text {
			t.Fatalf("%q was streamed as %q, its bytes are %q", text, streamed.String(), bytes)
		}
	}
	think := must(f.model.TokenID("<think>"))(t)
	if tokens := must(f.model.Encode("<think>", MarkupParse))(t); !slices.Equal(tokens, []Token{think}) {
		t.Fatal(tokens)
	}
	_, err := f.model.TokenID("<no such token>")
	refused(t, err, ErrNotFound)
}

func TestStructsAreFilled(t *testing.T) {
	f := open(t)
	info := must(f.model.Info())(t)
	if info.VocabSize == 0 || info.HeadDim == 0 || info.BosTokenID == info.EosTokenID || info.WeightBytes < 1<<20 {
		t.Fatalf("%+v", info)
	}
	if path := must(f.model.Path())(t); filepath.Base(path) != filepath.Base(modelPath()) {
		t.Fatal(path)
	}
	plan := must(f.model.Plan(&EngineOptions{CacheBytes: 1 << 30}, 512))(t)
	if plan.Context != 512 || plan.CacheBytes != 1<<30 || plan.WeightBytes < info.WeightBytes || plan.Sessions == 0 {
		t.Fatalf("%+v", plan)
	}
	engine := must(f.engine.Info())(t)
	if engine.Threads != 1 || engine.PrefillChunk != 16 || engine.SIMD == "" || engine.Device != "cpu" || engine.KVFormat != KVFormatFP8 {
		t.Fatalf("%+v", engine)
	}
	if must(f.engine.Step())(t) {
		t.Fatal("there was nothing to do")
	}
	ok(t, f.engine.FlushCache())
}
