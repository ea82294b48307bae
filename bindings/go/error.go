package dsv4

// #include <dsv4.h>
import "C"

import (
	"context"
	"errors"
	"strings"
)

// Status is the kind of an error. Each is an error itself, for [errors.Is]. Later versions may add some.
type Status int32

// The kinds of errors, as in dsv4.h.
const (
	ErrInvalidArgument  Status = C.DSV4_STATUS_INVALID_ARGUMENT
	ErrNotFound         Status = C.DSV4_STATUS_NOT_FOUND
	ErrIO               Status = C.DSV4_STATUS_IO
	ErrCorrupt          Status = C.DSV4_STATUS_CORRUPT
	ErrConfig           Status = C.DSV4_STATUS_CONFIG
	ErrUnsupportedModel Status = C.DSV4_STATUS_UNSUPPORTED_MODEL
	ErrUnsupported      Status = C.DSV4_STATUS_UNSUPPORTED
	ErrUnavailable      Status = C.DSV4_STATUS_UNAVAILABLE
	ErrOutOfMemory      Status = C.DSV4_STATUS_OUT_OF_MEMORY
	ErrContextFull      Status = C.DSV4_STATUS_CONTEXT_FULL
	ErrCancelled        Status = C.DSV4_STATUS_CANCELLED
	ErrBusy             Status = C.DSV4_STATUS_BUSY
	ErrNumeric          Status = C.DSV4_STATUS_NUMERIC
	ErrTokenizer        Status = C.DSV4_STATUS_TOKENIZER
	ErrChat             Status = C.DSV4_STATUS_CHAT
	ErrPoisoned         Status = C.DSV4_STATUS_POISONED
	ErrPanic            Status = C.DSV4_STATUS_PANIC
	ErrNoBlocks         Status = C.DSV4_STATUS_NO_BLOCKS
	ErrMismatch         Status = C.DSV4_STATUS_MISMATCH
)

// ErrClosed is the error of a call with an object that was closed.
var ErrClosed = errors.New("dsv4: the object is closed")

// String is the status's name in dsv4.h, for example "OUT_OF_MEMORY".
func (s Status) String() string { return C.GoString(C.dsv4_status_name(C.int32_t(s))) }

func (s Status) Error() string { return "dsv4: " + s.String() }

// Error is what went wrong: a status for programs, a message for people.
type Error struct {
	Status  Status
	Message string
	cause   error
}

func (e *Error) Error() string { return "dsv4: " + e.Message }

// Unwrap gives the status and, if a context ended the call, the context's error.
func (e *Error) Unwrap() []error {
	if e.cause == nil {
		return []error{e.Status}
	}
	return []error{e.Status, e.cause}
}

// call runs f and makes its outcome an error of Go's.
func call(f func(*C.dsv4_error) C.dsv4_status) error {
	var e C.dsv4_error
	e.size = C.sizeof_dsv4_error
	if status := f(&e); status != C.DSV4_STATUS_OK {
		return &Error{Status: Status(status), Message: C.GoString(&e.message[0])}
	}
	return nil
}

func invalid(message string) error {
	return &Error{Status: ErrInvalidArgument, Message: message}
}

// ended is the error of a call that ctx ends.
func ended(ctx context.Context, message string) error {
	cause := context.Cause(ctx)
	if err := ctx.Err(); !errors.Is(cause, err) {
		cause = errors.Join(err, cause)
	}
	return &Error{Status: ErrCancelled, Message: message, cause: cause}
}

func hasNUL(text string) bool { return strings.IndexByte(text, 0) >= 0 }
