//go:build dsv4_debug

package dsv4

import "runtime"

// settle runs the garbage collector and the cleanups before and after every call, so that an object which is freed too
// early shows at once.
func settle() {
	runtime.GC()
	runtime.Gosched()
}
