package dsv4

// #include "callbacks.h"
import "C"

import (
	"runtime/cgo"
	"sync"
)

// LogLevel says how important a message is.
type LogLevel int32

// The levels, the most important first. LogOff is no messages.
const (
	LogOff   LogLevel = C.DSV4_LOG_LEVEL_OFF
	LogError LogLevel = C.DSV4_LOG_LEVEL_ERROR
	LogWarn  LogLevel = C.DSV4_LOG_LEVEL_WARN
	LogInfo  LogLevel = C.DSV4_LOG_LEVEL_INFO
	LogDebug LogLevel = C.DSV4_LOG_LEVEL_DEBUG
	LogTrace LogLevel = C.DSV4_LOG_LEVEL_TRACE
)

var logging struct {
	sync.Mutex
	handle cgo.Handle
}

// SetLog sends the library's messages up to a level to f, from all objects of the process; nil ends the log. The library
// never writes to standard output or standard error itself. f may be called from any thread, also from several at once; it
// may use the package, but not call SetLog; if it panics, that is dropped; it must not end its goroutine.
func SetLog(level LogLevel, f func(level LogLevel, message string)) error {
	var handle cgo.Handle
	if f != nil {
		handle = cgo.NewHandle(f)
	}
	logging.Lock()
	defer logging.Unlock()
	err := call(func(e *C.dsv4_error) C.dsv4_status { return C.dsv4go_log_set(C.int32_t(level), C.uintptr_t(handle), e) })
	if err == nil {
		// the old function is not called any more now
		handle, logging.handle = logging.handle, handle
	}
	if handle != 0 {
		handle.Delete()
	}
	return err
}
