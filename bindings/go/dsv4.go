// Package dsv4 runs DeepSeek-V4 inside the program: open an official checkpoint folder, make an engine on it, feed a
// session, generate. No daemon, no Python, no conversion, no second copy of the weights.
//
//	model, err := dsv4.Open("DeepSeek-V4-Flash", nil)
//	engine, err := dsv4.NewEngine(model, nil)
//	session, err := dsv4.NewSession(engine, nil)
//	sampler, err := dsv4.NewSampler(nil)
//	info, err := model.Info()
//	tokens, err := model.Encode("Once upon a time", dsv4.MarkupText)
//	err = session.Feed(ctx, append([]dsv4.Token{info.BosTokenID}, tokens...))
//	for piece, err := range session.Generate(ctx, sampler, nil) {
//		fmt.Print(piece.Text)
//	}
//
// It is a thin layer over the C library, whose header dsv4.h is the reference of what each call does.
//
// # Linking
//
// The package finds the installed library with pkg-config (set PKG_CONFIG_PATH to PREFIX/lib/pkgconfig, and LD_LIBRARY_PATH
// to PREFIX/lib where the program runs). With the build tag dsv4_static the library becomes part of the program.
//
// # Objects
//
// Close ends an object and may be called several times, also while a call with it runs: that one ends first. An object that
// nobody reaches any more is closed too, when the garbage collector finds it; Close is for those who know earlier. Objects
// hold what they were made from, so they may be closed in any order. Nothing that a call returns lies in memory of C's.
//
// # Goroutines
//
// A [Model], an [Engine] and a [Prompt] may be used by several goroutines at once. Everything else is for one at a time: a
// second one gets [ErrBusy] at once. Calls of several sessions of one engine go through the model together, so a server has
// a session for each conversation and simply calls them from its goroutines.
//
// # Contexts
//
// Calls that compute take a context. When it ends, the call ends within one chunk of a prompt or one token, with an error
// that is [ErrCancelled] and the context's own error ([context.Canceled], [context.DeadlineExceeded], or the cause). The
// session is consistent then and can go on.
//
// # Errors
//
// Errors of the library are an [*Error], which has a [Status] and a message that names the file, key or value at fault.
// Test for a status with [errors.Is]: errors.Is(err, dsv4.ErrContextFull).
package dsv4

// #cgo CFLAGS: -std=gnu11
// #include <dsv4.h>
import "C"

// Token is the id of a token.
type Token = uint32

// Version is the version of the library that was loaded, for example "0.1.0".
func Version() string { return C.GoString(C.dsv4_version()) }

// BuildInfo says how the library was built, for bug reports.
func BuildInfo() string { return C.GoString(C.dsv4_build_info()) }

// CheckVersion tells in words when the library that was loaded does not fit the header that this package was compiled with.
func CheckVersion() error {
	return call(func(e *C.dsv4_error) C.dsv4_status { return C.dsv4_abi_check(C.DSV4_VERSION_NUMBER, e) })
}
