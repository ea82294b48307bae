package dsv4

// #include <dsv4.h>
import "C"

import "unsafe"

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

// Save saves the session to a file. It adds to a file that holds a beginning of this session. With complete everything is
// written, which is what the last save wants; without, at most twice the session's size is written however often it is
// saved, and restoring may compute the last tokens again.
func (s *Session) Save(path string, complete bool) error {
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
	return s.with(func(p unsafe.Pointer, e *C.dsv4_error) C.dsv4_status {
		return C.dsv4_session_save((*C.dsv4_session)(p), name, whole, e)
	})
}

// RestoreSession makes a session from a file, bit for bit as it was saved. Options may be nil.
func RestoreSession(engine *Engine, path string, options *SessionOptions) (*Session, error) {
	var keep scratch
	defer keep.free()
	name, err := keep.text("path", path)
	if err != nil {
		return nil, err
	}
	var c C.dsv4_session_options
	options.toC(&c)
	var out *C.dsv4_session
	err = engine.with(func(p unsafe.Pointer, e *C.dsv4_error) C.dsv4_status {
		return C.dsv4_session_restore((*C.dsv4_engine)(p), name, &c, &out, e)
	})
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
