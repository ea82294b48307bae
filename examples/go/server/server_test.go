package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"dsv4"
)

func start(t *testing.T) (*server, *httptest.Server) {
	path := os.Getenv("DSV4_TEST_MODEL")
	if path == "" {
		path = "../../models/tiny-v4"
	}
	s, err := newServer(path, &dsv4.EngineOptions{Threads: 1})
	if err != nil {
		t.Fatal(err)
	}
	h := httptest.NewServer(s.handler())
	t.Cleanup(h.Close)
	return s, h
}

// ask gives the text of an answer.
func ask(ctx context.Context, address, question string, seed int) (text string, err error) {
	body := fmt.Sprintf(`{"messages": [{"role": "user", "content": %q}], "max_tokens": 48, "seed": %d}`, question, seed)
	q, err := http.NewRequestWithContext(ctx, http.MethodPost, address+"/v1/chat/completions", strings.NewReader(body))
	if err != nil {
		return "", err
	}
	response, err := http.DefaultClient.Do(q)
	if err != nil {
		return "", err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return "", fmt.Errorf("status %s", response.Status)
	}
	reason, lines := "", bufio.NewScanner(response.Body)
	for lines.Scan() {
		data, found := strings.CutPrefix(lines.Text(), "data: ")
		if data == "[DONE]" {
			if reason != "stop" && reason != "length" {
				return text, fmt.Errorf("an answer ended for the reason %q", reason)
			}
			return text, nil
		}
		var chunk struct {
			Choices []struct {
				Delta        struct{ Content string }
				FinishReason string `json:"finish_reason"`
			}
		}
		if found {
			if err := json.Unmarshal([]byte(data), &chunk); err != nil || len(chunk.Choices) == 0 {
				return text, fmt.Errorf("%s: %v", data, err)
			}
			text += chunk.Choices[0].Delta.Content
			reason = chunk.Choices[0].FinishReason
		}
	}
	return text, fmt.Errorf("the stream ended early: %v", lines.Err())
}

func TestEightStreamsShareStepsAndEachHasWhatItHasAlone(t *testing.T) {
	const streams = 8
	question := func(i int) string { return fmt.Sprintf("Tell me about %d ships.", i+2) }
	var alone [streams]string
	_, h := start(t)
	for i := range streams {
		text, err := ask(context.Background(), h.URL, question(i), i)
		if err != nil || text == "" {
			t.Fatal(text, err)
		}
		alone[i] = text
	}
	s, h := start(t)
	var all sync.WaitGroup
	for i := range streams {
		all.Add(1)
		go func() {
			defer all.Done()
			if text, err := ask(context.Background(), h.URL, question(i), i); err != nil || text != alone[i] {
				t.Errorf("stream %d: %v: %q, alone it was %q", i, err, text, alone[i])
			}
		}()
	}
	all.Wait()
	metrics, err := s.engine.Metrics()
	if err != nil || metrics.BatchSessions < 2*metrics.Steps {
		t.Fatalf("%d sessions in %d steps: %v", metrics.BatchSessions, metrics.Steps, err)
	}
	t.Logf("%.1f sessions a step", float64(metrics.BatchSessions)/float64(metrics.Steps))
}

func TestAClientThatGoesAwayEndsItsAnswer(t *testing.T) {
	s, h := start(t)
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
	defer cancel()
	if text, err := ask(ctx, h.URL, strings.Repeat("A long question. ", 300), 0); err == nil {
		t.Fatal(text)
	}
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		metrics, err := s.engine.Metrics()
		if err != nil || time.Now().After(end) {
			t.Fatalf("%d sessions are left: %v", metrics.Sessions, err)
		}
		if metrics.Sessions == 0 {
			return
		}
	}
}

func TestWrongRequestsAreRefusedInWords(t *testing.T) {
	_, h := start(t)
	for _, body := range []string{`{`, `{"messages": []}`, `{"messages": [{"role": "king"}]}`, `{"messages": 1, "temperature": -1}`,
		`{"messages": [{"role": "user", "content": "x"}], "stream": false}`} {
		response, err := http.Post(h.URL+"/v1/chat/completions", "application/json", strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		response.Body.Close()
		if response.StatusCode != http.StatusBadRequest {
			t.Errorf("%s: %s", body, response.Status)
		}
	}
}
