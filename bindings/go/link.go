//go:build !dsv4_static

package dsv4

// The library is linked in a file of its own for each way: what Go keeps of a build depends on the files in it, and not on
// conditions within one, so that the other way would be taken from its cache.

// #cgo pkg-config: dsv4
import "C"
