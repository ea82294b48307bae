package dsv4_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"os"
	"path/filepath"
	"time"

	"dsv4"
)

const tiny = "../../examples/models/tiny-v4"

// setUp opens a model and what the examples need.
func setUp() (*dsv4.Model, *dsv4.Engine, *dsv4.Session, *dsv4.Sampler) {
	model, err := dsv4.Open(tiny, nil)
	if err != nil {
		log.Fatal(err)
	}
	engine, err := dsv4.NewEngine(model, nil)
	if err != nil {
		log.Fatal(err)
	}
	session, err := dsv4.NewSession(engine, nil)
	if err != nil {
		log.Fatal(err)
	}
	sampler, err := dsv4.NewSampler(nil)
	if err != nil {
		log.Fatal(err)
	}
	return model, engine, session, sampler
}

// Open a model, see what it takes, and make an engine and a session on it.
func Example() {
	model, err := dsv4.Open("../../examples/models/tiny-v4", nil)
	if err != nil {
		log.Fatal(err)
	}
	defer model.Close()
	plan, err := model.Plan(nil, 1000)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("weights above 10 MB:", plan.WeightBytes > 10_000_000)

	engine, err := dsv4.NewEngine(model, &dsv4.EngineOptions{Threads: 2})
	if err != nil {
		log.Fatal(err)
	}
	defer engine.Close()
	session, err := dsv4.NewSession(engine, nil)
	if err != nil {
		log.Fatal(err)
	}
	defer session.Close()
	tokens, err := model.Encode("Once upon a time", dsv4.MarkupText)
	if err != nil {
		log.Fatal(err)
	}
	if err := session.Feed(context.Background(), tokens); err != nil {
		log.Fatal(err)
	}
	info, err := session.Info()
	fmt.Println("all tokens are in the session:", info.Position == uint64(len(tokens)), err)
	// Output:
	// weights above 10 MB: true
	// all tokens are in the session: true <nil>
}

// Generation is a loop over pieces; a deadline or a client that goes away ends it through the context.
func ExampleSession_Generate() {
	model, _, session, sampler := setUp()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	tokens, err := model.Encode("Once upon a time", dsv4.MarkupText)
	if err != nil {
		log.Fatal(err)
	}
	if err := session.Feed(ctx, tokens); err != nil {
		log.Fatal(err)
	}
	var last dsv4.Piece
	n := 0
	for piece, err := range session.Generate(ctx, sampler, &dsv4.GenerationOptions{MaxTokens: 20, IgnoreEOS: true}) {
		if err != nil {
			log.Fatal(err)
		}
		// fmt.Print(piece.Text)
		n++
		last = piece
	}
	// to go on from the text
	if err := session.Feed(ctx, []dsv4.Token{last.Token}); err != nil {
		log.Fatal(err)
	}
	fmt.Println(n, last.Finish == dsv4.FinishMaxTokens)
	// Output: 20 true
}

// A chat: render the messages, feed what the session does not have of them, and read the answer's events.
func ExampleChatParser_Events() {
	model, _, session, sampler := setUp()
	ctx := context.Background()
	messages := []dsv4.Message{{Role: "user", Content: "Tell me about the sea."}}
	prompt, err := model.Render(messages, nil)
	if err != nil {
		log.Fatal(err)
	}
	tokens, err := prompt.Tokens()
	if err != nil {
		log.Fatal(err)
	}
	if _, err := session.Sync(ctx, tokens); err != nil {
		log.Fatal(err)
	}
	parser, err := dsv4.NewChatParser(model, false)
	if err != nil {
		log.Fatal(err)
	}
	pieces := session.Generate(ctx, sampler, &dsv4.GenerationOptions{MaxTokens: 20})
	text := ""
	for event, err := range parser.Events(pieces) {
		if err != nil {
			log.Fatal(err)
		}
		if event.Kind == dsv4.EventContent {
			text += event.Text
		}
	}
	answer, err := parser.Message()
	if err != nil {
		log.Fatal(err)
	}
	messages = append(messages, answer) // for the next turn
	fmt.Println(len(messages), answer.Role, answer.Content == text)
	// Output: 2 assistant true
}

// Errors have a status; a context's own error is in them too.
func ExampleError() {
	_, err := dsv4.Open("no/such/folder", nil)
	fmt.Println(errors.Is(err, dsv4.ErrNotFound))

	model, _, session, _ := setUp()
	tokens, _ := model.Encode("Too late.", dsv4.MarkupText)
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	err = session.Feed(ctx, tokens)
	fmt.Println(errors.Is(err, dsv4.ErrCancelled), errors.Is(err, context.Canceled))
	// Output:
	// true
	// true true
}

// A session in a file goes on in another process, bit for bit.
func ExampleRestoreSession() {
	model, engine, session, _ := setUp()
	folder, err := os.MkdirTemp("", "dsv4")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(folder)
	tokens, err := model.Encode("It was a long day.", dsv4.MarkupText)
	if err != nil {
		log.Fatal(err)
	}
	if err := session.Feed(context.Background(), tokens); err != nil {
		log.Fatal(err)
	}
	path := filepath.Join(folder, "day.session")
	if err := session.Save(context.Background(), path, true); err != nil {
		log.Fatal(err)
	}
	restored, err := dsv4.RestoreSession(context.Background(), engine, path, nil)
	if err != nil {
		log.Fatal(err)
	}
	info, err := restored.Info()
	fmt.Println(info.HasLogits, info.Position == uint64(len(tokens)), err)
	// Output: true true <nil>
}
