package dsv4

// #include <dsv4.h>
import "C"

import "unsafe"

// Numerics says how closely an engine follows the roundings of the official inference code.
type Numerics int32

const (
	// NumericsReference has every quantisation point of the official code. The default.
	NumericsReference Numerics = C.DSV4_NUMERICS_REFERENCE
	// NumericsServed also casts the attention output to FP8, as production servers do.
	NumericsServed Numerics = C.DSV4_NUMERICS_SERVED
	// NumericsKVQuant has exactly dequantised weights, quantised caches, unquantised activations.
	NumericsKVQuant Numerics = C.DSV4_NUMERICS_KVQUANT
	// NumericsExact is float32 arithmetic with nothing else rounded: for research.
	NumericsExact Numerics = C.DSV4_NUMERICS_EXACT
)

// KVFormat is the storage of the cache.
type KVFormat int32

const (
	// KVFormatAuto is the numerics' own. The default.
	KVFormatAuto KVFormat = C.DSV4_KV_FORMAT_AUTO
	// KVFormatFP8 has FP8 entries and FP4 index keys.
	KVFormatFP8 KVFormat = C.DSV4_KV_FORMAT_FP8
	// KVFormatBF16 has bfloat16 for both.
	KVFormatBF16 KVFormat = C.DSV4_KV_FORMAT_BF16
	// KVFormatF32 has float32 for both.
	KVFormatF32 KVFormat = C.DSV4_KV_FORMAT_F32
)

// Checkpoints says where checkpoints are kept, at which later prompts with the same beginning can start.
type Checkpoints int32

const (
	// CheckpointsBoundary keeps them at the ends of prompts and at multiples of 256 tokens that decoding reaches. The default.
	CheckpointsBoundary Checkpoints = C.DSV4_CHECKPOINTS_BOUNDARY
	// CheckpointsNone keeps none.
	CheckpointsNone Checkpoints = C.DSV4_CHECKPOINTS_NONE
	// CheckpointsEvery keeps them at every multiple of EngineOptions.CheckpointEvery.
	CheckpointsEvery Checkpoints = C.DSV4_CHECKPOINTS_EVERY
)

// Prefetch says how far ahead of their use blocks are read from the disk tier.
type Prefetch int32

const (
	// PrefetchNext reads the next ones while one is taken over. The default.
	PrefetchNext Prefetch = C.DSV4_PREFETCH_NEXT
	// PrefetchOff reads each when it is waited for.
	PrefetchOff Prefetch = C.DSV4_PREFETCH_OFF
	// PrefetchAggressive reads all that a prompt can reuse as soon as it is known.
	PrefetchAggressive Prefetch = C.DSV4_PREFETCH_AGGRESSIVE
)

// WhenFull says what a call does for which the cache has no room.
type WhenFull int32

const (
	// WhenFullDefault does as the engine's options say; there, as WhenFullEvict.
	WhenFullDefault WhenFull = C.DSV4_WHEN_FULL_DEFAULT
	// WhenFullEvict takes what there is and ends with ErrNoBlocks when nothing is left.
	WhenFullEvict WhenFull = C.DSV4_WHEN_FULL_EVICT
	// WhenFullRefuse compares a prompt with the room before it begins, and refuses it whole.
	WhenFullRefuse WhenFull = C.DSV4_WHEN_FULL_REFUSE
	// WhenFullWait waits until there is room, in order of priority and age.
	WhenFullWait WhenFull = C.DSV4_WHEN_FULL_WAIT
)

// EngineOptions says how an engine runs its model. Fields that are zero are the defaults.
type EngineOptions struct {
	// "cpu", the default, "cuda" or "cuda:N".
	Device   string
	Numerics Numerics
	KVFormat KVFormat
	// Worker threads; 0 is one per available core, 1 works on the calling thread.
	Threads uint32
	// Most tokens that go through the model at once; 0 is 256 on the CPU and 2048 on a GPU. A call is cancelled within one
	// such chunk.
	PrefillChunk uint32
	// Most bytes of the cache, for sessions and reusable prompt beginnings together; 0 is a quarter of the machine's memory.
	CacheBytes uint64
	// Most bytes of checkpoints, within CacheBytes; 0 is a quarter of those.
	CheckpointBytes uint64
	Checkpoints     Checkpoints
	// For CheckpointsEvery: a multiple of 256.
	CheckpointEvery uint32
	// Prompt beginnings are shared only under the same salt: different ones for users who must not learn from response times
	// what others asked.
	PrefixSalt string
	// Bytes of host memory, beyond CacheBytes, for reusable beginnings that had to make room.
	HostTierBytes uint64
	// Folder where what the host tier has no room for is kept, also for later runs.
	DiskTierPath string
	// Most bytes of files in that folder; most bytes written per second, and in all. 0 is no limit.
	DiskTierBytes, DiskTierWriteRate, DiskTierWriteTotal uint64
	Prefetch                                             Prefetch
	// Blocks that are read ahead; 0 is 4.
	PrefetchDepth uint32
	// Most milliseconds that a prompt waits for the tiers; 0 is 2000.
	TierTimeoutMS uint32
	// Fill freed cache memory with NaN, so that a defect shows.
	PoisonCache bool
	// Logits on a GPU do not depend on how tokens are cut into calls, chunks and batches; slower.
	BatchInvariant bool
	// Most bytes of host memory for sessions that give their pages up for others; 0 is none.
	SessionTierBytes uint64
	WhenFull         WhenFull
	// Percent of the cache held by sessions from which on new ones are smaller, 0 is never; their context and chunk.
	DegradedLoadPercent            uint32
	DegradedContext, DegradedChunk uint64
	// Most bytes of a GPU's memory; 0 is what is free.
	GPUBytes uint64
	// Routed experts of each layer whose weights the GPU holds, the CPU computes the others; 0 is as many as fit, -1 none.
	GPUExperts int64
	// Most bytes of host memory for the weights of routed experts, what does not fit is read when it is needed; 0 uses all
	// where they are mapped.
	HostBytes uint64
}

func (o *EngineOptions) toC(c *C.dsv4_engine_options, keep *scratch) error {
	C.dsv4_engine_options_init(c)
	if o == nil {
		return nil
	}
	return toC(*o, c, false, keep)
}

// EngineInfo is what an engine was made with and found.
type EngineInfo struct {
	// Instruction set of the CPU kernels, for example "avx2".
	SIMD     string
	Numerics Numerics
	// Never KVFormatAuto.
	KVFormat              KVFormat
	Threads, PrefillChunk uint32
	// Name of the device for people.
	Device string
}

// Engine is a model on a device. It may be used by several goroutines at once, and any number of sessions run on it.
type Engine struct{ *object }

// NewEngine makes an engine. Options may be nil.
func NewEngine(model *Model, options *EngineOptions) (*Engine, error) {
	var c C.dsv4_engine_options
	var keep scratch
	defer keep.free()
	if err := options.toC(&c, &keep); err != nil {
		return nil, err
	}
	var out *C.dsv4_engine
	err := model.with(func(p unsafe.Pointer, e *C.dsv4_error) C.dsv4_status {
		return C.dsv4_engine_new((*C.dsv4_model)(p), &c, &out, e)
	})
	if err != nil {
		return nil, err
	}
	o := newObject(unsafe.Pointer(out), func(p unsafe.Pointer) { C.dsv4_engine_free((*C.dsv4_engine)(p)) })
	return collect(&Engine{o}, o), nil
}

// Info says what the engine was made with and found.
func (n *Engine) Info() (EngineInfo, error) {
	var c C.dsv4_engine_info
	c.size = C.sizeof_dsv4_engine_info
	var info EngineInfo
	err := n.with(func(p unsafe.Pointer, e *C.dsv4_error) C.dsv4_status {
		return C.dsv4_engine_get_info((*C.dsv4_engine)(p), &c, e)
	})
	if err == nil {
		fromC(&c, &info)
	}
	return info, err
}

// FlushCache moves every reusable beginning that no session uses to the tiers, for an orderly end.
func (n *Engine) FlushCache() error {
	return n.with(func(p unsafe.Pointer, e *C.dsv4_error) C.dsv4_status {
		return C.dsv4_engine_flush_cache((*C.dsv4_engine)(p), e)
	})
}

// Step runs one step of what calls with CallOptions.WaitsOnly wait for, and says whether there was something to do.
func (n *Engine) Step() (bool, error) {
	var worked C.int32_t
	err := n.with(func(p unsafe.Pointer, e *C.dsv4_error) C.dsv4_status {
		return C.dsv4_engine_step((*C.dsv4_engine)(p), &worked, e)
	})
	return worked != 0, err
}
