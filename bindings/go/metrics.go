package dsv4

// #include <dsv4.h>
import "C"

import "unsafe"

// EngineMetrics are figures of an engine since it was made. Medians and 99th percentiles are in nanoseconds.
type EngineMetrics struct {
	// Tokens of prompts, and of calls of at most eight tokens, that went through the model.
	PrefillTokens, DecodeTokens uint64
	// Passes over the weights, and those that failed or were stopped.
	Steps, FailedSteps uint64
	// Sessions in all steps together: divided by Steps, the mean batch.
	BatchSessions              uint64
	StepP50Nanos, StepP99Nanos uint64
	// Time of a call in the queue before each of its steps.
	QueueP50Nanos, QueueP99Nanos uint64
	// From a prompt to its logits.
	FirstTokenP50Nanos, FirstTokenP99Nanos uint64
	// Between the results of two calls of a session.
	TokenP50Nanos, TokenP99Nanos uint64
	// Sessions that exist, and calls that wait for room, now; calls that had to wait.
	Sessions, WaitingCalls, Waits uint64
	// Prompts that were not admitted, and calls that ended with ErrNoBlocks, those prompts among them.
	RefusedAdmissions, RefusedCalls uint64
	// Sessions whose pages were taken, that came back from host memory, and that are computed again.
	Preemptions, RestoredSessions, LostSessions uint64
	// Bytes of host memory that preempted sessions take, and percent of the cache that sessions hold, now.
	ParkedBytes, LoadPercent uint64
	// How far steps and checkpoints are cut back for want of room: 0 not at all, 3 most.
	Pressure uint32
	// Whether sessions that are made are smaller ones now, and how many were.
	IsDegraded       bool
	DegradedSessions uint64
	// Routed experts that were in host memory when they were chosen, and those that had to be read; 0 without HostBytes.
	HostExpertHits, HostExpertMisses, HostExpertReadAhead uint64
	// Bytes of experts read, how long steps waited for them, and bytes of host memory for them.
	HostExpertReadBytes, HostExpertWaitNanos, HostExpertBytes uint64
}

// SessionMetrics are figures of a session since it was made.
type SessionMetrics struct {
	// Tokens of prompts and of short calls that went through the model; taken from the cache instead; computed again.
	PrefillTokens, DecodeTokens, ReusedTokens, RecomputedTokens uint64
	// Steps it took part in, time in the queue and in steps, and from its last prompt to the logits.
	Steps, QueuedNanos, StepNanos, FirstTokenNanos uint64
	// How often its pages were taken for others, and whether it was made smaller.
	Preemptions uint64
	IsDegraded  bool
}

// CacheStats are figures of an engine's cache.
type CacheStats struct {
	// Most bytes of pages, bytes in use, and bytes held, those that wait for reuse included.
	LimitBytes, UsedBytes, HeldBytes uint64
	// Pages: wide (64 rows), index (64 index keys), narrow (2 rows).
	UsedPages, FreePages [3]uint64
	// Reusable blocks of 256 tokens, those of them that no session uses, and checkpoints.
	PrefixBlocks, EvictableBlocks, Checkpoints uint64
	// Tokens of prompts that were looked up, and reused.
	LookupTokens, HitTokens uint64
	// Lookups that ended for want of a block, or of a checkpoint.
	EndedNoBlock, EndedNoCheckpoint uint64
	// What was dropped to make room.
	EvictedBlocks, EvictedCheckpoints uint64
	// Sessions forked, and shared blocks copied before they were written.
	Forks, CopiesOnWrite uint64
	// The tiers: records and bytes in host memory now, what moved and how long that took.
	HostRecords, HostBytes, OffloadBytes, OffloadNanos           uint64
	WrittenBytes, WriteNanos, ReadBytes, ReadNanos, WaitNanos    uint64
	HostHits, DiskHits, Prefetched, Timeouts                     uint64
	LimitedWrites, Dropped, DeletedFiles, DamagedFiles, IOErrors uint64
	// Tokens that went through the model, in all sessions.
	ComputedTokens uint64
}

// CacheInfo is cache memory by kind, in bytes.
type CacheInfo struct {
	WindowBytes, StateBytes, PageBytes uint64
}

// Metrics gives the figures of the engine now.
func (n *Engine) Metrics() (EngineMetrics, error) {
	var c C.dsv4_engine_metrics
	c.size = C.sizeof_dsv4_engine_metrics
	var metrics EngineMetrics
	err := n.with(func(p unsafe.Pointer, e *C.dsv4_error) C.dsv4_status {
		return C.dsv4_engine_get_metrics((*C.dsv4_engine)(p), &c, e)
	})
	if err == nil {
		fromC(&c, &metrics)
	}
	return metrics, err
}

// MetricsText gives all figures of the engine in the Prometheus text format.
func (n *Engine) MetricsText() (string, error) {
	return n.gather(16384, func(p unsafe.Pointer, text *C.char, capacity C.size_t, size *C.size_t, e *C.dsv4_error) C.dsv4_status {
		return C.dsv4_engine_metrics_text((*C.dsv4_engine)(p), text, capacity, size, e)
	})
}

// CacheStats gives the figures of the engine's cache now.
func (n *Engine) CacheStats() (CacheStats, error) {
	var c C.dsv4_cache_stats
	c.size = C.sizeof_dsv4_cache_stats
	var stats CacheStats
	err := n.with(func(p unsafe.Pointer, e *C.dsv4_error) C.dsv4_status {
		return C.dsv4_engine_get_cache_stats((*C.dsv4_engine)(p), &c, e)
	})
	if err == nil {
		fromC(&c, &stats)
	}
	return stats, err
}

// Metrics gives the figures of the session now.
func (s *Session) Metrics() (SessionMetrics, error) {
	var c C.dsv4_session_metrics
	c.size = C.sizeof_dsv4_session_metrics
	var metrics SessionMetrics
	err := s.with(func(p unsafe.Pointer, e *C.dsv4_error) C.dsv4_status {
		return C.dsv4_session_get_metrics((*C.dsv4_session)(p), &c, e)
	})
	if err == nil {
		fromC(&c, &metrics)
	}
	return metrics, err
}

// CacheInfo gives the cache memory that the session holds now.
func (s *Session) CacheInfo() (CacheInfo, error) {
	var c C.dsv4_cache_info
	c.size = C.sizeof_dsv4_cache_info
	var info CacheInfo
	err := s.with(func(p unsafe.Pointer, e *C.dsv4_error) C.dsv4_status {
		return C.dsv4_session_get_cache_info((*C.dsv4_session)(p), &c, e)
	})
	if err == nil {
		fromC(&c, &info)
	}
	return info, err
}
