package dsv4

// #include "callbacks.h"
import "C"

import (
	"context"
	"runtime"
	"runtime/cgo"
)

// outcome is how a function of the host's ended that C called. It must return to C whatever it does, so it runs on a
// goroutine of its own, and the one that called C ends as it did.
type outcome struct {
	returned, panicked bool
	value              any
}

func apart(f func()) (o outcome) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer func() {
			// nil when the goroutine was ended; a panic with nil is a *runtime.PanicNilError
			o.value = recover()
			o.panicked = o.value != nil
		}()
		f()
		o.returned = true
	}()
	<-done
	return o
}

// pass ends this goroutine as the function ended its own.
func (o outcome) pass() {
	switch {
	case o.panicked:
		panic(o.value)
	case !o.returned:
		runtime.Goexit()
	}
}

type progress struct {
	function func(done, total int) bool
	last     outcome
}

//export dsv4goProgress
func dsv4goProgress(handle C.uintptr_t, done, total C.size_t) (stop C.int32_t) {
	p, goesOn := cgo.Handle(handle).Value().(*progress), false
	p.last = apart(func() { goesOn = p.function(int(done), int(total)) })
	if goesOn && p.last.returned {
		return 0
	}
	return 1
}

type fileProgress struct {
	ctx      context.Context
	function func(FileProgress) bool
	last     outcome
}

//export dsv4goFileProgress
func dsv4goFileProgress(handle C.uintptr_t, stage C.int32_t, done, total C.uint64_t) (stop C.int32_t) {
	p, goesOn := cgo.Handle(handle).Value().(*fileProgress), true
	if p.ctx.Err() != nil {
		return 1
	}
	if p.function != nil {
		now := FileProgress{FileStage(stage), uint64(done), uint64(total)}
		p.last = apart(func() { goesOn = p.function(now) })
	}
	if goesOn && p.last.returned {
		return 0
	}
	return 1
}

// The log's function stays on the thread that logs, by which the library knows that it is called from within.
//
//export dsv4goLog
func dsv4goLog(handle C.uintptr_t, level C.int32_t, message *C.char) {
	defer func() { _ = recover() }()
	cgo.Handle(handle).Value().(func(LogLevel, string))(LogLevel(level), C.GoString(message))
}
