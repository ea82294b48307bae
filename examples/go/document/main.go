// Document reads a long document and asks about it. What has been read is saved as it goes, so that a program that was
// stopped goes on where it was, and one that has read it all answers at once.
//
//	go run ./document MODEL TEXTFILE SESSIONFILE QUESTION
package main

import (
	"context"
	"errors"
	"fmt"
	"log"
	"os"
	"os/signal"

	"dsv4"
)

const portion = 2048 // tokens between two saves

// openSession gives the session in the file, or a new one if there is none.
func openSession(ctx context.Context, engine *dsv4.Engine, path string) (*dsv4.Session, error) {
	session, err := dsv4.RestoreSession(ctx, engine, path, nil)
	if errors.Is(err, dsv4.ErrNotFound) {
		return dsv4.NewSession(engine, nil)
	}
	return session, err
}

// read makes the session hold the document, and saves it; also what there is when ctx ends.
func read(ctx context.Context, session *dsv4.Session, document []dsv4.Token, path string) error {
	// all of it, if it is this document's session; less, if the document was changed
	done, err := session.KeepCommon(ctx, document)
	if err != nil {
		return err
	}
	fmt.Fprintf(os.Stderr, "%d of %d tokens are in %s\n", done, len(document), path)
	for done < len(document) {
		next := min(done+portion, len(document))
		if err := session.Feed(ctx, document[done:next]); err != nil {
			// the chunks that were complete are in the session
			return errors.Join(err, session.Save(context.WithoutCancel(ctx), path, true))
		}
		done = next
		if err := session.Save(ctx, path, done == len(document)); err != nil {
			return err
		}
		fmt.Fprintf(os.Stderr, "\r%d of %d tokens", done, len(document))
	}
	fmt.Fprintln(os.Stderr)
	return nil
}

func run(ctx context.Context, path, file, sessionFile, question string) error {
	model, err := dsv4.Open(path, nil)
	if err != nil {
		return err
	}
	defer model.Close()
	engine, err := dsv4.NewEngine(model, nil)
	if err != nil {
		return err
	}
	defer engine.Close()
	session, err := openSession(ctx, engine, sessionFile)
	if err != nil {
		return err
	}
	defer session.Close()
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	info, err := model.Info()
	if err != nil {
		return err
	}
	tokens, err := model.Encode(string(text), dsv4.MarkupText)
	if err != nil {
		return err
	}
	if err := read(ctx, session, append([]dsv4.Token{info.BosTokenID}, tokens...), sessionFile); err != nil {
		return err
	}
	if tokens, err = model.Encode(question, dsv4.MarkupText); err != nil {
		return err
	}
	if err := session.Feed(ctx, tokens); err != nil {
		return err
	}
	sampler, err := dsv4.NewSampler(nil)
	if err != nil {
		return err
	}
	defer sampler.Close()
	fmt.Print(question)
	for piece, err := range session.Generate(ctx, sampler, &dsv4.GenerationOptions{MaxTokens: 60}) {
		if err != nil {
			return err
		}
		fmt.Print(piece.Text)
	}
	fmt.Println()
	return nil
}

func main() {
	log.SetFlags(0)
	if len(os.Args) != 5 {
		log.Fatal("usage: document MODEL TEXTFILE SESSIONFILE QUESTION")
	}
	ctx, done := signal.NotifyContext(context.Background(), os.Interrupt)
	defer done()
	if err := run(ctx, os.Args[1], os.Args[2], os.Args[3], os.Args[4]); err != nil {
		log.Fatal(err)
	}
}
