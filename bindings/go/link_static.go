//go:build dsv4_static

package dsv4

// #cgo pkg-config: dsv4-static
import "C"
