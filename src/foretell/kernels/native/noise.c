/* Keyed Gumbel noise. See common.h for the rule; foretell/noise.py has the same generator in torch. */
#include "common.h"

/* SplitMix64 finaliser (Steele, Lea, Flood 2014) of key + (id + 1) * golden ratio. */
INLINE uint64_t hash(uint64_t key, uint64_t id) {
  uint64_t z = key + (id + 1) * 0x9E3779B97F4A7C15ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

INLINE double gumbel(uint64_t bits) {
  double u = ((double)(bits >> 11) + 0.5) * 0x1p-53;
  return -log(-log(u));
}

#define STEPS 64
#define LOWEST (-8)

/* argmax of scores[i] + gumbel(key, i); entries of -inf never win; ties go to the lower id.
 * A token can only beat the best so far if its noise exceeds best - score. exp(-exp(-floor(that)))
 * is a lower bound of the uniform it would need, so two logarithms are taken for few tokens. */
int64_t ft_keyed_argmax(const float *scores, int64_t n, uint64_t key) {
  uint64_t needed[STEPS];
  for (int i = 0; i < STEPS; i++) needed[i] = (uint64_t)(exp(-exp(-(double)(i + LOWEST))) * 0x1p53);
  int64_t top = 0;
  for (int64_t i = 1; i < n; i++)
    if (scores[i] > scores[top]) top = i;
  int64_t best = top;
  double value = (double)scores[top] + gumbel(hash(key, (uint64_t)top));
  for (int64_t i = 0; i < n; i++) {
    double gap = value - (double)scores[i];
    if (i == top || gap > STEPS + LOWEST - 1) continue;
    uint64_t bits = hash(key, (uint64_t)i);
    if (gap >= LOWEST && (bits >> 11) + 1 < needed[(int)floor(gap) - LOWEST]) continue;
    double v = (double)scores[i] + gumbel(bits);
    if (v > value || (v == value && i < best)) { value = v; best = i; }
  }
  return best;
}
