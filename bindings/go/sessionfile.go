package dsv4

// #include "callbacks.h"
import "C"

import (
	"context"
	"errors"
	"runtime/cgo"
	"unsafe"
)

// SessionFileInfo has facts about a session file.
type SessionFileInfo struct {
	// Fingerprint of the model, 32 hexadecimal digits, and name of the numerics.
	Fingerprint, Numerics string
	// Version of the format, and oldest version of a reader that can read it.
	Version, OldestReader uint32
	// Never KVFormatAuto.
	KVFormat KVFormat
	// Whether the last save is damaged, so that the one before it is described here.
	IsLastSaveDamaged bool
	// Tokens of the session, those of them that restoring computes again, full blocks of 256, saves.
	Tokens, PendingTokens, Blocks, Saves uint64
	// Bytes of the file, which are the sum of the next five.
	FileBytes, FrameBytes, BlockBytes, StateBytes, TokenBytes, UnusedBytes uint64
}

// FileStage is what a save or a restore is at. A save only writes; a restore goes through the others in order.
type FileStage int32

const (
	// FileWrite: bytes are written.
	FileWrite FileStage = C.DSV4_FILE_STAGE_WRITE
	// FileCheck: the file's bytes are compared with their checksums.
	FileCheck FileStage = C.DSV4_FILE_STAGE_CHECK
	// FileRead: the file's bytes are read into the cache; from the beginning again where the cache had no room at first.
	FileRead FileStage = C.DSV4_FILE_STAGE_READ
	// FileCompute: tokens that the last save left out are computed.
	FileCompute FileStage = C.DSV4_FILE_STAGE_COMPUTE
)

// FileProgress says how far a save or a restore has come.
type FileProgress struct {
	Stage FileStage
	// Of this stage: bytes, or tokens in FileCompute.
	Done, Total uint64
}

// watched lends f the handle of a function that follows the call, and panics as that did.
func watched(ctx context.Context, progressed func(FileProgress) bool, f func(C.uintptr_t) error) error {
	p := &fileProgress{ctx, progressed, outcome{returned: true}}
	handle := cgo.NewHandle(p)
	defer handle.Delete()
	err := f(C.uintptr_t(handle))
	p.last.pass()
	return err
}

// Save saves the session to a file. It adds to a file that holds a beginning of this session. With complete everything is
// written, which is what the last save wants; without, at most twice the session's size is written however often it is
// saved, and restoring may compute the last tokens again. If ctx ends it, the old file is as it was.
func (s *Session) Save(ctx context.Context, path string, complete bool) error {
	return s.SaveProgress(ctx, path, complete, nil)
}

// SaveProgress is [Session.Save] that calls a function at the beginning and after each part of a few megabytes; false
// cancels. The session is busy for it. It runs on a goroutine of its own; if it panics, so does SaveProgress, with the same
// value, once the call has ended.
func (s *Session) SaveProgress(ctx context.Context, path string, complete bool, progressed func(FileProgress) bool) error {
	var keep scratch
	defer keep.free()
	name, err := keep.text("path", path)
	if err != nil {
		return err
	}
	var whole C.int32_t
	if complete {
		whole = 1
	}
	return watched(ctx, progressed, func(handle C.uintptr_t) error {
		return s.compute(ctx, s.object, func(p unsafe.Pointer, e *C.dsv4_error) C.dsv4_status {
			return C.dsv4go_save((*C.dsv4_session)(p), name, whole, handle, e)
		})
	})
}

// RestoreSession makes a session from a file, bit for bit as it was saved. Options may be nil. If ctx ends it, there is no
// session.
func RestoreSession(ctx context.Context, engine *Engine, path string, options *SessionOptions) (*Session, error) {
	return RestoreSessionProgress(ctx, engine, path, options, nil)
}

// RestoreSessionProgress is [RestoreSession] that calls a function at the beginning of each stage, after each part of a few
// megabytes and after each chunk of tokens; false cancels. It runs as that of [Session.SaveProgress].
func RestoreSessionProgress(ctx context.Context, engine *Engine, path string, options *SessionOptions, progressed func(FileProgress) bool) (*Session, error) {
	if ctx.Err() != nil {
		return nil, ended(ctx, "the context ended before the call")
	}
	var keep scratch
	defer keep.free()
	name, err := keep.text("path", path)
	if err != nil {
		return nil, err
	}
	var c C.dsv4_session_options
	options.toC(&c)
	var out *C.dsv4_session
	err = watched(ctx, progressed, func(handle C.uintptr_t) error {
		return engine.with(func(p unsafe.Pointer, e *C.dsv4_error) C.dsv4_status {
			return C.dsv4go_restore((*C.dsv4_engine)(p), name, &c, handle, &out, e)
		})
	})
	if errors.Is(err, ErrCancelled) && ctx.Err() != nil {
		return nil, ended(ctx, err.(*Error).Message)
	}
	if err != nil {
		return nil, err
	}
	return ownSession(out), nil
}

// ReadSessionFile says what a session file says about itself. It needs no model.
func ReadSessionFile(path string) (SessionFileInfo, error) {
	return sessionFile(path, func(name *C.char, c *C.dsv4_session_file_info, e *C.dsv4_error) C.dsv4_status {
		return C.dsv4_session_file_get_info(name, c, e)
	})
}

// VerifySessionFile is [ReadSessionFile] after comparing everything in the file with its checksums.
func VerifySessionFile(path string) (SessionFileInfo, error) {
	return sessionFile(path, func(name *C.char, c *C.dsv4_session_file_info, e *C.dsv4_error) C.dsv4_status {
		return C.dsv4_session_file_verify(name, c, e)
	})
}

func sessionFile(path string, read func(*C.char, *C.dsv4_session_file_info, *C.dsv4_error) C.dsv4_status) (SessionFileInfo, error) {
	var info SessionFileInfo
	var keep scratch
	defer keep.free()
	name, err := keep.text("path", path)
	if err != nil {
		return info, err
	}
	var c C.dsv4_session_file_info
	c.size = C.sizeof_dsv4_session_file_info
	if err := call(func(e *C.dsv4_error) C.dsv4_status { return read(name, &c, e) }); err != nil {
		return info, err
	}
	fromC(&c, &info)
	return info, nil
}
