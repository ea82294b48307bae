// Server answers OpenAI-style chat requests over HTTP, token by token as server-sent events.
//
//	go run ./server MODEL :8080
//	curl -N localhost:8080/v1/chat/completions -d '{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 50}'
//	curl localhost:8080/metrics
//
// Each request has a session; requests at the same time go through the model together, and beginnings that the engine
// knows, such as the earlier turns of a conversation, are not computed again. A client that goes away ends its answer.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"os"

	"dsv4"
)

type request struct {
	Messages    json.RawMessage `json:"messages"`
	MaxTokens   uint64          `json:"max_tokens"`
	Temperature *float32        `json:"temperature"`
	Seed        uint64          `json:"seed"`
	Stream      *bool           `json:"stream"`
}

type server struct {
	model  *dsv4.Model
	engine *dsv4.Engine
}

func newServer(path string, options *dsv4.EngineOptions) (*server, error) {
	model, err := dsv4.Open(path, &dsv4.ModelOptions{PreloadTokenizer: true})
	if err != nil {
		return nil, err
	}
	engine, err := dsv4.NewEngine(model, options)
	return &server{model, engine}, err
}

func (s *server) handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /v1/chat/completions", s.chat)
	mux.HandleFunc("GET /metrics", func(w http.ResponseWriter, _ *http.Request) {
		text, err := s.engine.MetricsText()
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		_, _ = io.WriteString(w, text)
	})
	return mux
}

// prepare makes the sampler and a session that holds the prompt.
func (s *server) prepare(ctx context.Context, q *request) (*dsv4.Session, *dsv4.Sampler, error) {
	chance := dsv4.DefaultSamplerOptions()
	chance.Seed = q.Seed
	if q.Temperature != nil {
		// what clients mean by it; the library itself takes greedy decoding by its name only
		if chance.Greedy = *q.Temperature == 0; !chance.Greedy {
			chance.Temperature = *q.Temperature
		}
	}
	sampler, err := dsv4.NewSampler(&chance)
	if err != nil {
		return nil, nil, err
	}
	prompt, err := s.model.Render(q.Messages, nil)
	if err != nil {
		return nil, nil, err
	}
	tokens, err := prompt.Tokens()
	if err != nil {
		return nil, nil, err
	}
	session, err := dsv4.NewSession(s.engine, nil)
	if err != nil {
		return nil, nil, err
	}
	if err := session.Feed(ctx, tokens); err != nil {
		session.Close()
		return nil, nil, err
	}
	return session, sampler, nil
}

func (s *server) chat(w http.ResponseWriter, r *http.Request) {
	var q request
	if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, 1<<26)).Decode(&q); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	if q.Stream != nil && !*q.Stream {
		http.Error(w, "answers come as streams only: stream must be true or left out", http.StatusBadRequest)
		return
	}
	session, sampler, err := s.prepare(r.Context(), &q)
	if err != nil {
		http.Error(w, err.Error(), status(err))
		return
	}
	defer session.Close()
	parser, err := dsv4.NewChatParser(s.model, false)
	if err != nil {
		http.Error(w, err.Error(), status(err))
		return
	}
	defer parser.Close()
	w.Header().Set("Content-Type", "text/event-stream")
	finish := dsv4.FinishNone
	pieces := func(yield func(dsv4.Piece, error) bool) {
		for piece, err := range session.Generate(r.Context(), sampler, &dsv4.GenerationOptions{MaxTokens: q.MaxTokens}) {
			if finish = piece.Finish; !yield(piece, err) {
				return
			}
		}
	}
	for event, err := range parser.Events(pieces) {
		switch {
		case err != nil:
			send(w, map[string]any{"error": map[string]any{"message": err.Error()}})
			return
		case event.Kind == dsv4.EventContent:
			send(w, chunk(map[string]any{"content": event.Text}, nil))
		}
	}
	reason := "stop"
	if finish == dsv4.FinishMaxTokens || finish == dsv4.FinishContextFull {
		reason = "length"
	}
	send(w, chunk(map[string]any{}, reason))
	_, _ = io.WriteString(w, "data: [DONE]\n\n")
}

// chunk is a part of an answer as OpenAI's clients take it.
func chunk(delta map[string]any, finishReason any) map[string]any {
	choice := map[string]any{"index": 0, "delta": delta, "finish_reason": finishReason}
	return map[string]any{"object": "chat.completion.chunk", "choices": []any{choice}}
}

func send(w http.ResponseWriter, chunk any) {
	text, _ := json.Marshal(chunk)
	_, _ = fmt.Fprintf(w, "data: %s\n\n", text)
	_ = http.NewResponseController(w).Flush()
}

func status(err error) int {
	switch {
	case errors.Is(err, dsv4.ErrChat), errors.Is(err, dsv4.ErrInvalidArgument), errors.Is(err, dsv4.ErrContextFull):
		return http.StatusBadRequest
	case errors.Is(err, dsv4.ErrNoBlocks), errors.Is(err, dsv4.ErrOutOfMemory):
		return http.StatusServiceUnavailable
	}
	return http.StatusInternalServerError
}

func main() {
	if len(os.Args) != 3 {
		log.Fatal("usage: server MODEL ADDRESS")
	}
	// requests wait for room in the cache rather than fail
	s, err := newServer(os.Args[1], &dsv4.EngineOptions{WhenFull: dsv4.WhenFullWait})
	if err != nil {
		log.Fatal(err)
	}
	listener, err := net.Listen("tcp", os.Args[2])
	if err != nil {
		log.Fatal(err)
	}
	log.Print("listening on ", listener.Addr())
	log.Fatal(http.Serve(listener, s.handler()))
}
