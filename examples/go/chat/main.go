// Chat loads a model and chats: it keeps the conversation and streams each answer.
//
//	go run ./chat MODEL "What is the capital of France?"    one question
//	go run ./chat MODEL                                     a line of standard input each
//
// Ctrl-C ends an answer.
package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"log"
	"os"
	"os/signal"

	"dsv4"
)

type conversation struct {
	model    *dsv4.Model
	session  *dsv4.Session
	sampler  *dsv4.Sampler
	messages []dsv4.Message
}

func open(path string) (*conversation, error) {
	model, err := dsv4.Open(path, nil)
	if err != nil {
		return nil, err
	}
	engine, err := dsv4.NewEngine(model, nil)
	if err != nil {
		return nil, err
	}
	session, err := dsv4.NewSession(engine, nil)
	if err != nil {
		return nil, err
	}
	sampler, err := dsv4.NewSampler(nil)
	return &conversation{model: model, session: session, sampler: sampler}, err
}

func (c *conversation) ask(ctx context.Context, question string) error {
	ctx, done := signal.NotifyContext(ctx, os.Interrupt)
	defer done()
	c.messages = append(c.messages, dsv4.Message{Role: "user", Content: question})
	prompt, err := c.model.Render(c.messages, nil)
	if err != nil {
		return err
	}
	tokens, err := prompt.Tokens()
	if err != nil {
		return err
	}
	// what the session has of the conversation is not computed again
	if _, err := c.session.Sync(ctx, tokens); err != nil {
		return err
	}
	parser, err := dsv4.NewChatParser(c.model, false)
	if err != nil {
		return err
	}
	defer parser.Close()
	pieces := c.session.Generate(ctx, c.sampler, &dsv4.GenerationOptions{MaxTokens: 200})
	for event, err := range parser.Events(pieces) {
		if errors.Is(err, dsv4.ErrCancelled) {
			break
		}
		if err != nil {
			return err
		}
		if event.Kind == dsv4.EventContent {
			fmt.Print(event.Text)
		}
	}
	fmt.Println()
	answer, err := parser.Message()
	c.messages = append(c.messages, answer)
	return err
}

func main() {
	log.SetFlags(0)
	if len(os.Args) < 2 {
		log.Fatal("usage: chat MODEL [QUESTION]")
	}
	c, err := open(os.Args[1])
	if err != nil {
		log.Fatal(err)
	}
	if len(os.Args) > 2 {
		if err := c.ask(context.Background(), os.Args[2]); err != nil {
			log.Fatal(err)
		}
		return
	}
	lines := bufio.NewScanner(os.Stdin)
	for fmt.Fprint(os.Stderr, "> "); lines.Scan(); fmt.Fprint(os.Stderr, "> ") {
		if err := c.ask(context.Background(), lines.Text()); err != nil {
			log.Fatal(err)
		}
	}
}
