// Queries and window rows of a step in one launch: per-head norm and rotation of q, in place; norm, rotation,
// quantisation and storing of kv. One warp a head or row, 8 a block; grid (ceil((heads + 1) / 8), rows). Portable.
//
// New window rows go to a linear buffer of the step, not into the ring: the step's first queries still read what the last
// rows would overwrite, and a step that fails must leave the ring alone. `window_commit` moves them when it succeeds.
#include "rows.cuh"

struct InsertParams {
  u16* q;               // [rows, heads, 512] bf16, in place
  const u16* kv;        // [rows, 512] bf16
  const float* weight;  // [512] of the kv norm
  const float2* turns;  // [rows, 32]
  u8* staged;           // [rows, ROW_BYTES]
  u32 heads;
  float eps;
  u32 stepwise;  // the head norm rounds each of its steps to bf16, as the official code does
};

extern "C" __global__ void __launch_bounds__(256) insert(const __grid_constant__ InsertParams p) {
  wait_for_inputs();
  const u32 head = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
  const u64 row = blockIdx.y;
  if (head > p.heads) return;
  const bool is_query = head < p.heads;
  u16* q = p.q + (row * p.heads + head) * HEAD_DIM;
  float v[2][8];
  load_row(is_query ? q : p.kv + row * HEAD_DIM, v);
  norm_row(is_query ? nullptr : p.weight, p.eps, is_query && p.stepwise, v);
  rotate_row(p.turns + row * (ROPE_DIM / 2), v);
  if (!is_query) {
    store_row(p.staged + row * ROW_BYTES, v);
    return;
  }
#pragma unroll
  for (int i = 0; i < 2; i++) reinterpret_cast<uint4*>(q)[i * 32 + lane] = pack8(v[i]);
}

struct CommitParams {
  const u8* staged;           // [layers, rows, ROW_BYTES]
  Pages ring;                 // wide pages of layer 0; the row of position p is at slot p mod window
  const Sequence* sequences;  // [grid.y]
  const u32* bad;             // set: nothing is committed
  u64 staged_bytes;           // of a layer
  u32 ring_ids;               // of a layer
  u32 window;
};

// The last `window` rows of each sequence and layer into its ring. grid (at most window, sequences, layers), 96 threads
extern "C" __global__ void __launch_bounds__(96) window_commit(const __grid_constant__ CommitParams p) {
  wait_for_inputs();
  const Sequence s = p.sequences[blockIdx.y];
  const u32 count = min(s.rows, p.window);
  if (blockIdx.x >= count || threadIdx.x >= ROW_BYTES / 8 || *p.bad) return;
  const u32 i = s.rows - count + blockIdx.x;
  const u32 slot = (s.start + i) % p.window;
  const u64 layer = blockIdx.z;
  const u8* row = p.staged + layer * p.staged_bytes + u64(s.first_row + i) * ROW_BYTES;
  Pages ring = p.ring;
  ring.ids += layer * p.ring_ids;
  u64* to = reinterpret_cast<u64*>(ring.row(blockIdx.y, slot, PAGE_ROWS, ROW_BYTES));
  to[threadIdx.x] = reinterpret_cast<const u64*>(row)[threadIdx.x];
}
