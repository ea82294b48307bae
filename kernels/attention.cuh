// What both kinds of attention kernels share: their arguments, and how a query's keys are cut into tiles and runs.
#pragma once
#include "rows.cuh"

constexpr u32 MAX_SPLITS = 32;
constexpr u32 RUN_KEYS = 128;  // fewest of a run

struct AttentionParams {
  const u16* q;               // [rows, heads, 512] bf16
  u16* out;                   // [rows, heads, 512] bf16
  const float* sink;          // [heads]
  const float2* turns;        // [rows, 32]
  const u32* sequence;        // [rows]
  const Sequence* sequences;  // [sequences]
  const u8* staged;           // [rows, ROW_BYTES] window rows of the step
  Pages ring;                 // window rows before the step
  Pages entries;              // wide pages for ratio 4, narrow ones for 128
  const u32* selected;        // [rows, width] entries of each query, or null for all visible ones
  const u32* counts;          // [rows]; used with `selected`
  float* part_out;            // [rows, MAX_SPLITS, heads, 512]; split only
  float2* part_sums;          // [rows, MAX_SPLITS, heads] (maximum, sum); split only
  u32 ratio;                  // tokens of an entry; 0: window only
  u32 width;
  u32 heads;
  u32 window;
  u32 quantise;
};

// Which keys a query has, and how they are cut.
struct Tiles {
  u32 first;          // first position of the window
  u32 in_window, entries;
  u32 window_tiles, total;
  u32 per_run;
};

template <int KEYS>
__device__ __forceinline__ Tiles tiles_of(const AttentionParams& p, u32 row, u32 position) {
  Tiles t;
  t.first = position + 1 > p.window ? position + 1 - p.window : 0;
  t.in_window = position + 1 - t.first;
  t.entries = p.ratio == 0 ? 0 : p.selected ? p.counts[row] : (position + 1) / p.ratio;
  t.window_tiles = (t.in_window + KEYS - 1) / KEYS;
  t.total = t.window_tiles + (t.entries + KEYS - 1) / KEYS;
  t.per_run = max(RUN_KEYS / KEYS, (t.total + MAX_SPLITS - 1) / MAX_SPLITS);
  return t;
}
