//go:build !dsv4_debug

package dsv4

// settle does nothing; with the build tag dsv4_debug it lets the garbage collector run.
func settle() {}
