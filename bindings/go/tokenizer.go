package dsv4

// #include <dsv4.h>
import "C"

import "unsafe"

// Markup says whether text that spells a control token becomes that token.
type Markup int32

const (
	// MarkupText never does: the right choice for everything that a user wrote.
	MarkupText Markup = C.DSV4_MARKUP_TEXT
	// MarkupParse does, as the official encoder with a whole prompt.
	MarkupParse Markup = C.DSV4_MARKUP_PARSE
)

func charsOf(text string) (*C.char, C.size_t) {
	return (*C.char)(unsafe.Pointer(unsafe.StringData(text))), C.size_t(len(text))
}

func idsOf(tokens []Token) (*C.uint32_t, C.size_t) {
	return (*C.uint32_t)(unsafe.Pointer(unsafe.SliceData(tokens))), C.size_t(len(tokens))
}

// Encode makes tokens of a text. No begin-of-sentence token is added.
func (m *Model) Encode(text string, markup Markup) ([]Token, error) {
	chars, size := charsOf(text)
	// a text never has more tokens than bytes, and most have a quarter of that
	tokens := make([]Token, len(text)/3+1)
	var n C.size_t
	err := m.with(func(p unsafe.Pointer, e *C.dsv4_error) C.dsv4_status {
		for {
			ids, capacity := idsOf(tokens)
			status := C.dsv4_tokenizer_encode((*C.dsv4_model)(p), chars, size, C.int32_t(markup), ids, capacity, &n, e)
			if status != C.DSV4_STATUS_BUFFER_TOO_SMALL {
				return status
			}
			tokens = make([]Token, n)
		}
	})
	if err != nil {
		return nil, err
	}
	return tokens[:n], nil
}

// Decode makes text of tokens. For text that arrives token by token use a [Detokenizer].
func (m *Model) Decode(tokens []Token) (string, error) {
	ids, count := idsOf(tokens)
	return m.gather(len(tokens)*5+1, func(p unsafe.Pointer, text *C.char, capacity C.size_t, n *C.size_t, e *C.dsv4_error) C.dsv4_status {
		return C.dsv4_tokenizer_decode((*C.dsv4_model)(p), ids, count, text, capacity, n, e)
	})
}

// TokenBytes gives the bytes that one token stands for, which may begin or end within a character.
func (m *Model) TokenBytes(token Token) (bytes []byte, err error) {
	err = m.with(func(p unsafe.Pointer, e *C.dsv4_error) C.dsv4_status {
		var text *C.char
		var n C.size_t
		status := C.dsv4_tokenizer_token_bytes((*C.dsv4_model)(p), C.uint32_t(token), &text, &n, e)
		bytes = C.GoBytes(unsafe.Pointer(text), C.int(n))
		return status
	})
	return bytes, err
}

// TokenID finds a control token by its exact spelling, for example "<think>".
func (m *Model) TokenID(text string) (Token, error) {
	chars, size := charsOf(text)
	var token C.uint32_t
	err := m.with(func(p unsafe.Pointer, e *C.dsv4_error) C.dsv4_status {
		return C.dsv4_tokenizer_token_id((*C.dsv4_model)(p), chars, size, &token, e)
	})
	return Token(token), err
}

// gather calls f, which writes a text with a NUL behind it, with as large a buffer as it needs.
func (o *object) gather(capacity int, f func(unsafe.Pointer, *C.char, C.size_t, *C.size_t, *C.dsv4_error) C.dsv4_status) (string, error) {
	buffer := make([]byte, capacity)
	var n C.size_t
	err := o.with(func(p unsafe.Pointer, e *C.dsv4_error) C.dsv4_status {
		for {
			status := f(p, (*C.char)(unsafe.Pointer(&buffer[0])), C.size_t(len(buffer)), &n, e)
			if status != C.DSV4_STATUS_BUFFER_TOO_SMALL {
				return status
			}
			buffer = make([]byte, n+1+n/8)
		}
	})
	if err != nil {
		return "", err
	}
	return string(buffer[:n]), nil
}

// lend calls f, which lends a text, and copies it.
func (o *object) lend(f func(unsafe.Pointer, **C.char, *C.size_t, *C.dsv4_error) C.dsv4_status) (text string, err error) {
	err = o.with(func(p unsafe.Pointer, e *C.dsv4_error) C.dsv4_status {
		var chars *C.char
		var n C.size_t
		status := f(p, &chars, &n, e)
		text = C.GoStringN(chars, C.int(n))
		return status
	})
	return text, err
}

// Detokenizer decodes one stream of tokens, giving out text only once its characters are complete.
type Detokenizer struct{ *object }

// NewDetokenizer starts an empty stream.
func NewDetokenizer(model *Model) (*Detokenizer, error) {
	var out *C.dsv4_detokenizer
	err := model.with(func(p unsafe.Pointer, e *C.dsv4_error) C.dsv4_status {
		return C.dsv4_detokenizer_new((*C.dsv4_model)(p), &out, e)
	})
	if err != nil {
		return nil, err
	}
	o := newObject(unsafe.Pointer(out), func(p unsafe.Pointer) { C.dsv4_detokenizer_free((*C.dsv4_detokenizer)(p)) })
	return collect(&Detokenizer{o}, o), nil
}

// Push adds one token and gives the text that it completes.
func (d *Detokenizer) Push(token Token) (string, error) {
	return d.lend(func(p unsafe.Pointer, text **C.char, n *C.size_t, e *C.dsv4_error) C.dsv4_status {
		return C.dsv4_detokenizer_push((*C.dsv4_detokenizer)(p), C.uint32_t(token), text, n, e)
	})
}

// Finish ends the stream; the detokenizer can be used for another.
func (d *Detokenizer) Finish() (string, error) {
	return d.lend(func(p unsafe.Pointer, text **C.char, n *C.size_t, e *C.dsv4_error) C.dsv4_status {
		return C.dsv4_detokenizer_finish((*C.dsv4_detokenizer)(p), text, n, e)
	})
}
