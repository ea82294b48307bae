// Prefix asks several questions about one text at the same time. The text goes through the model once; each question has a
// session that shares its cache, and the engine takes them through the model together.
//
//	go run ./prefix MODEL TEXTFILE QUESTION...
package main

import (
	"context"
	"fmt"
	"log"
	"os"
	"strings"
	"sync"

	"dsv4"
)

func answer(ctx context.Context, model *dsv4.Model, session *dsv4.Session, question string, seed uint64) (string, error) {
	defer session.Close()
	tokens, err := model.Encode(question, dsv4.MarkupText)
	if err != nil {
		return "", err
	}
	if err := session.Feed(ctx, tokens); err != nil {
		return "", err
	}
	chance := dsv4.DefaultSamplerOptions()
	chance.Seed = seed
	sampler, err := dsv4.NewSampler(&chance)
	if err != nil {
		return "", err
	}
	defer sampler.Close()
	var text strings.Builder
	for piece, err := range session.Generate(ctx, sampler, &dsv4.GenerationOptions{MaxTokens: 40}) {
		if err != nil {
			return "", err
		}
		text.WriteString(piece.Text)
	}
	return text.String(), nil
}

func run(ctx context.Context, path, file string, questions []string) error {
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
	base, err := dsv4.NewSession(engine, nil)
	if err != nil {
		return err
	}
	defer base.Close()
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	tokens, err := model.Encode(string(text), dsv4.MarkupText)
	if err != nil {
		return err
	}
	info, err := model.Info()
	if err != nil {
		return err
	}
	if err := base.Feed(ctx, append([]dsv4.Token{info.BosTokenID}, tokens...)); err != nil {
		return err
	}
	answers, errs := make([]string, len(questions)), make([]error, len(questions))
	var all sync.WaitGroup
	for i, question := range questions {
		session, err := base.Fork()
		if err != nil {
			return err
		}
		all.Add(1)
		go func() {
			defer all.Done()
			answers[i], errs[i] = answer(ctx, model, session, question, uint64(i))
		}()
	}
	all.Wait()
	for i, question := range questions {
		if errs[i] != nil {
			return errs[i]
		}
		fmt.Printf("%s ->%s\n\n", question, answers[i])
	}
	return nil
}

func main() {
	log.SetFlags(0)
	if len(os.Args) < 4 {
		log.Fatal("usage: prefix MODEL TEXTFILE QUESTION...")
	}
	if err := run(context.Background(), os.Args[1], os.Args[2], os.Args[3:]); err != nil {
		log.Fatal(err)
	}
}
