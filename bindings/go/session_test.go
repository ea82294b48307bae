package dsv4

import (
	"context"
	"errors"
	"os"
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
	ok(t, session.Save(ctx, path, false))
	ok(t, session.Feed(ctx, []Token{300}))
	ok(t, session.Save(ctx, path, true))
	restored := must(RestoreSession(ctx, f.engine, path, nil))(t)
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
	_, err := RestoreSession(ctx, f.engine, path+"x", nil)
	refused(t, err, ErrNotFound)
	refused(t, session.Save(ctx, t.TempDir(), true), ErrInvalidArgument)
}

// Saves and restores end at each place where a function says so, or the context has ended.
func TestSavesAndRestoresEndAnywhere(t *testing.T) {
	f, path := open(t), filepath.Join(t.TempDir(), "a.session")
	session := f.session(t)
	ok(t, session.Feed(context.Background(), repeated(600)))
	cause := errors.New("the user left")
	// at report number `at`, by context or by the function; the result is nil once there are no more
	attempt := func(at int, byContext bool, call func(context.Context, func(FileProgress) bool) error) (reports []FileProgress, err error) {
		ctx, cancel := context.WithCancelCause(context.Background())
		defer cancel(nil)
		err = call(ctx, func(now FileProgress) bool {
			reports = append(reports, now)
			if len(reports) <= at {
				return true
			}
			if byContext {
				cancel(cause)
				// the next report, or what comes of the cancel, ends it
				return len(reports) <= at+1
			}
			return false
		})
		if err != nil {
			refused(t, err, ErrCancelled)
			if byContext && !errors.Is(err, cause) {
				t.Fatal(err)
			}
		}
		return reports, err
	}
	ctx := context.Background()
	for _, byContext := range []bool{false, true} {
		saves, restores := 0, 0
		for ; ; saves++ {
			reports, err := attempt(saves, byContext, func(ctx context.Context, progressed func(FileProgress) bool) error {
				return session.SaveProgress(ctx, path, true, progressed)
			})
			if err == nil {
				if last := reports[len(reports)-1]; last.Stage != FileWrite || last.Done != last.Total || last.Total == 0 {
					t.Fatalf("%+v", last)
				}
				break
			}
			if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
				t.Fatal("a cancelled save left a file", err)
			}
		}
		for ; ; restores++ {
			var restored *Session
			reports, err := attempt(restores, byContext, func(ctx context.Context, progressed func(FileProgress) bool) (err error) {
				restored, err = RestoreSessionProgress(ctx, f.engine, path, nil, progressed)
				return err
			})
			if (err == nil) != (restored != nil) {
				t.Fatal("a cancelled restore has a session")
			}
			if err == nil {
				if !slices.Equal(must(restored.Logits(nil))(t), must(session.Logits(nil))(t)) || reports[0].Stage != FileCheck {
					t.Fatal("the logits differ", reports)
				}
				ok(t, restored.Close())
				break
			}
		}
		if saves < 3 || restores < 3 {
			t.Fatal(saves, restores)
		}
		ok(t, os.Remove(path))
	}
	// one that has ended already, and none of it is left for the next call
	over, cancel := context.WithCancel(ctx)
	cancel()
	refused(t, session.Save(over, path, true), context.Canceled)
	ok(t, session.Save(ctx, path, true))
	_, err := RestoreSession(over, f.engine, path, nil)
	refused(t, err, context.Canceled)
	func() {
		defer func() {
			if recover() != "mine" {
				t.Error("the panic was lost")
			}
		}()
		_ = session.SaveProgress(ctx, path+"2", true, func(FileProgress) bool { panic("mine") })
	}()
	if must(f.engine.Metrics())(t).Sessions != 1 {
		t.Fatal("a session is left")
	}
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
