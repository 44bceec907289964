/* The highest scores of a history or of a row of logits, without sorting them. */
#include "common.h"

#define BITS 11
#define BINS (1 << BITS)

/* Floats as integers of the same order. */
INLINE uint32_t rank_of(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  return u ^ ((u >> 31) ? 0xffffffffu : 0x80000000u);
}

/* Sets kept[i] for the `wanted` highest scores among those that are not kept, the first ones where scores are
 * equal; at least so many are not kept. `rank` and `place` have room for `count` entries. */
void ft_mark_best(const float *score, uint8_t *kept, uint32_t *rank, int32_t *place, int64_t count, int64_t wanted) {
  int64_t left = 0;
  for (int64_t i = 0; i < count; i++) {
    rank[left] = rank_of(score[i]);
    place[left] = (int32_t)i;
    left += !kept[i];
  }
  for (int shift = 32 - BITS; wanted > 0 && left > wanted; shift -= BITS) {
    int64_t bins[BINS] = {0}, above = 0, still = 0;
    int low = shift < 0 ? 0 : shift;
    for (int64_t i = 0; i < left; i++) bins[(rank[i] >> low) & (BINS - 1)]++;
    int64_t bin = BINS - 1;
    while (above + bins[bin] < wanted) above += bins[bin--];
    for (int64_t i = 0; i < left; i++) { /* above the bin: in; in the bin: goes on to the next digits */
      int64_t own = (rank[i] >> low) & (BINS - 1);
      if (own > bin) kept[place[i]] = 1;
      rank[still] = rank[i];
      place[still] = place[i];
      still += own == bin;
    }
    left = still;
    wanted -= above;
    if (low == 0) break;
  }
  for (int64_t i = 0; i < wanted; i++) kept[place[i]] = 1;
}

/* The `count` highest of n scores, the highest first and lower places first where scores are equal, and the
 * logarithm of the sum of exp(score). At least one score is finite; none is above the largest float. */
float ft_top(const float *score, int64_t n, int64_t count, int64_t *place, float *value) {
  int64_t held = 0;
  for (int64_t i = 0; i < n; i++) {
    if (held == count && !(score[i] > value[held - 1])) continue;
    int64_t at = held < count ? held++ : held - 1;
    for (; at > 0 && value[at - 1] < score[i]; at--) {
      value[at] = value[at - 1];
      place[at] = place[at - 1];
    }
    value[at] = score[i];
    place[at] = i;
  }
  f8 top = splat(value[0]), sum = splat(0), rest = splat(-INFINITY);
  int64_t whole = n - n % 8;
  for (int64_t i = 0; i < whole; i += 8) sum += exp8(LOAD(score + i) - top);
  for (int64_t i = whole; i < n; i++) rest[i - whole] = score[i];
  return value[0] + logf(hsum(sum + exp8(rest - top)));
}
