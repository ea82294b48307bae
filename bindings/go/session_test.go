package dsv4

import (
	"context"
	"path/filepath"
	"runtime"
	"slices"
	"testing"
)

func TestSessionsForkTruncateAndGoOn(t *testing.T) {
	f, ctx := open(t), context.Background()
	session := f.session(t)
	tokens := repeated(40)
	ok(t, session.Feed(ctx, tokens))
	logits := must(session.Logits(nil))(t)
	fork := must(session.Fork())(t)
	defer runtime.KeepAlive(fork) // or it is garbage before the metrics count it
	ok(t, fork.Feed(ctx, tokens[:5]))
	ok(t, fork.Truncate(ctx, 40))
	if !slices.Equal(must(fork.Logits(nil))(t), logits) || !slices.Equal(must(fork.Tokens())(t), tokens) {
		t.Fatal("a truncated fork is another session")
	}
	if kept := must(session.Sync(ctx, append(slices.Clone(tokens[:30]), 300)))(t); kept != 30 {
		t.Fatal(kept)
	}
	ok(t, session.Clear())
	rows := must(session.FeedAll(ctx, tokens, len(logits)))(t)
	if !slices.Equal(rows[39*len(logits):], logits) {
		t.Fatal("the last row is not the logits")
	}
	info := must(session.Info())(t)
	if info.Position != 40 || info.Context != 1024 || info.Remaining != 984 || !info.HasLogits {
		t.Fatalf("%+v", info)
	}
	ok(t, session.SetCallOptions(&CallOptions{Priority: 2, WhenFull: WhenFullRefuse}))
	ok(t, session.SetCallOptions(nil))
	if m := must(session.Metrics())(t); m.PrefillTokens < 80 || m.Steps == 0 || m.StepNanos == 0 {
		t.Fatalf("%+v", m)
	}
	if c := must(session.CacheInfo())(t); c.WindowBytes == 0 || c.StateBytes == 0 {
		t.Fatalf("%+v", c)
	}
	if s := must(f.engine.CacheStats())(t); s.Forks != 1 || s.UsedPages == [3]uint64{} || s.ComputedTokens < 80 {
		t.Fatalf("%+v", s)
	}
	if m := must(f.engine.Metrics())(t); m.Steps == 0 || m.Sessions != 2 || m.StepP99Nanos == 0 {
		t.Fatalf("%+v", m)
	}
	if text := must(f.engine.MetricsText())(t); len(text) < 1000 {
		t.Fatal(text)
	}
}

func TestSessionsComeBackFromFiles(t *testing.T) {
	f, ctx := open(t), context.Background()
	session, path := f.session(t), filepath.Join(t.TempDir(), "a.session")
	ok(t, session.Feed(ctx, repeated(300)))
	ok(t, session.Save(path, false))
	ok(t, session.Feed(ctx, []Token{300}))
	ok(t, session.Save(path, true))
	restored := must(RestoreSession(f.engine, path, nil))(t)
	if !slices.Equal(must(restored.Logits(nil))(t), must(session.Logits(nil))(t)) {
		t.Fatal("the logits differ")
	}
	info := must(VerifySessionFile(path))(t)
	if info.Tokens != 301 || info.Blocks != 1 || info.Saves != 2 || info.Numerics != "reference" || len(info.Fingerprint) != 32 {
		t.Fatalf("%+v", info)
	}
	if read := must(ReadSessionFile(path))(t); read != info {
		t.Fatalf("%+v", read)
	}
	_, err := RestoreSession(f.engine, path+"x", nil)
	refused(t, err, ErrNotFound)
	refused(t, session.Save(t.TempDir(), true), ErrInvalidArgument)
}

func TestASecondGoroutineIsToldBusy(t *testing.T) {
	f, ctx := open(t), context.Background()
	session := f.session(t)
	err := session.FeedProgress(ctx, repeated(40), func(done, total int) bool {
		_, err := session.Info()
		refused(t, err, ErrBusy)
		return done <= total
	})
	ok(t, err)
}
