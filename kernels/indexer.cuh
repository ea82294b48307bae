// Arguments of the indexer's kernels, portable (indexer.cu) and for Hopper (indexer_sm90.cu).
#pragma once
#include "rows.cuh"

// Rows of one sequence that share the decoded keys.
struct Group {
  u32 sequence;
  u32 first_row;
  u32 rows;      // at most 16
  u32 position;  // of the first row
};

struct ScoreParams {
  const u16* q;         // [rows, heads, 128] bf16
  const u16* weights;   // [rows, heads] bf16
  const Group* groups;  // [grid.y]
  Pages keys;           // index pages
  float* scores;        // [rows of the launch, pitch]; row 0 is `first_row`
  u16* highest;         // [rows of the launch, highest_pitch]: rank of the highest score of 16 keys; only for Hopper
  u32* bad;             // set to 1 if a score is NaN or infinite, or null
  u32 first_row;
  u32 pitch;
  u32 heads;     // a multiple of 8, at most 64
  u32 stepwise;  // products, weighted products and sums are rounded to bf16
  u32 highest_pitch;
  u32 pad;
};

struct TopKParams {
  const float* scores;   // [rows, pitch]
  const u32* positions;  // [rows]: row r has (positions[r] + 1) / ratio values; or null: all have `count`
  u32* ids;              // [rows, k], ascending; only the first counts[r] are written
  u32* counts;           // [rows]
  float* part_scores;    // [rows, chunks * k] candidates; used with more than one chunk
  u32* part_ids;         // [rows, chunks * k]
  const u16* highest;    // [rows, highest_pitch]: as of the scores; only for Hopper
  u32 pitch;
  u32 ratio;
  u32 count;
  u32 k;
  u32 chunks;
  u32 highest_pitch;
};
