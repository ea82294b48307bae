package dsv4

// #include <dsv4.h>
import "C"

import (
	"runtime"
	"sync/atomic"
	"unsafe"
)

// object owns an object of C's, and frees it when it is closed and no call uses it any more. So neither Close nor the
// garbage collector can take it from under a call.
type object struct {
	pointer unsafe.Pointer
	free    func(unsafe.Pointer)
	closed  atomic.Bool
	// calls that run, and one more until it is closed
	users atomic.Int64
}

func newObject(pointer unsafe.Pointer, free func(unsafe.Pointer)) *object {
	o := &object{pointer: pointer, free: free}
	o.users.Store(1)
	return o
}

// collect closes o when owner, which holds it, is garbage.
func collect[T any](owner *T, o *object) *T {
	runtime.AddCleanup(owner, func(o *object) { o.close() }, o)
	return owner
}

func (o *object) close() {
	if !o.closed.Swap(true) {
		o.release()
	}
}

// Close ends the object; calls that run with it end first. It may be called again.
func (o *object) Close() error {
	if o != nil {
		o.close()
	}
	return nil
}

// acquire keeps the object until release is called, if it is open.
func (o *object) acquire() bool {
	if o == nil {
		return false
	}
	for !o.closed.Load() {
		if users := o.users.Load(); users > 0 && o.users.CompareAndSwap(users, users+1) {
			return true
		}
	}
	return false
}

func (o *object) release() {
	if o.users.Add(-1) == 0 {
		o.free(o.pointer)
	}
}

// with runs a call with the object.
func (o *object) with(f func(unsafe.Pointer, *C.dsv4_error) C.dsv4_status) error {
	if !o.acquire() {
		return ErrClosed
	}
	defer o.release()
	settle()
	defer settle()
	return call(func(e *C.dsv4_error) C.dsv4_status { return f(o.pointer, e) })
}
