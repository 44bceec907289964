/* Attention probabilities without values: what the rows of one request pay to each of its keys. See common.h
 * for the rule that it keeps.
 *
 * Keys are cut into blocks that threads share. A block's scores become exp(score - the block's highest); then
 * the blocks' heights and sums, added in order, give each row-head its softmax. Keys that a row does not see
 * weigh exactly 0, so what a row adds depends neither on later keys nor on the rows beside it. */
#include "common.h"

#define TILE 2   /* row-heads that share one pass over keys in registers */
#define MANY 32 /* row-heads from which on adding them up is worth a second barrier */
#define AHEAD 16 /* keys between what is used and what is fetched */
#define KEYS 512 /* of a block; scores of some row-heads over them stay in the cache */

typedef struct {
  const float *q, *k;                /* [rows, heads, dim]; first key of the first key/value head */
  float *out;                        /* [keys]: += the rows' probabilities, one row after another */
  float *score, *top, *sum;          /* set here: [row-heads, blocks * KEYS], [row-heads, blocks] twice */
  int64_t q_stride, head_stride;     /* floats between rows; between heads of the arena */
  int64_t rows, chosen, group, keys, dim;
  const int64_t *heads, *last;       /* chosen query heads, ascending; per row the last key it sees */
  int64_t window;                    /* 0: none */
  const float *sinks;                /* per query head, or null */
  float scale, softcap;              /* softcap 0: none */
} mass_t;

/* Sums of four vectors, each in the order of hsum up to the last two terms. */
INLINE f4 hsum4(const f8 *v) {
  f4 half[4], out;
  for (int i = 0; i < 4; i++) {
    f4 lo, hi;
    memcpy(&lo, &v[i], 16);
    memcpy(&hi, (const char *)&v[i] + 16, 16);
    half[i] = lo + hi;
  }
#if defined(__AVX2__) && defined(__FMA__)
  __m128 a = _mm_hadd_ps((__m128)half[0], (__m128)half[1]), b = _mm_hadd_ps((__m128)half[2], (__m128)half[3]);
  out = (f4)_mm_hadd_ps(a, b);
#else
  for (int i = 0; i < 4; i++) out[i] = (half[i][0] + half[i][1]) + (half[i][2] + half[i][3]);
#endif
  return out;
}

/* to[r][j] = q[r] . k[j] for keys j < keys, four at a time; rows of `to` have room for whole fours. */
INLINE void dot_tile(const float *const *q, float *const *to, const float *k, int64_t keys, int64_t dim,
                     const int count) {
  for (int64_t j = 0; j < keys; j += 4) {
    const float *at[4];
    for (int x = 0; x < 4; x++) at[x] = k + (j + x < keys ? j + x : keys - 1) * dim;
    for (int64_t i = 0; i < 4 * dim; i += 16) __builtin_prefetch(at[0] + AHEAD * dim + i);
    f8 acc[TILE][4];
    for (int r = 0; r < count; r++)
      for (int x = 0; x < 4; x++) acc[r][x] = splat(0);
    for (int64_t i = 0; i < dim; i += 8) {
      f8 key[4] = {LOAD(at[0] + i), LOAD(at[1] + i), LOAD(at[2] + i), LOAD(at[3] + i)};
      for (int r = 0; r < count; r++) {
        f8 query = LOAD(q[r] + i);
        for (int x = 0; x < 4; x++) acc[r][x] = fma8(query, key[x], acc[r][x]);
      }
    }
    for (int r = 0; r < count; r++) {
      f4 sums = hsum4(acc[r]);
      memcpy(to[r] + j, &sums, 16);
    }
  }
}

static void dots(const float *const *q, float *const *to, const float *k, int64_t keys, int64_t dim, int count) {
  if (count == 1) dot_tile(q, to, k, keys, dim, 1);
  else dot_tile(q, to, k, keys, dim, 2);
}

/* Raw scores of keys j0.. become exp(score - top); keys that are not seen 0, as is what pads the block. */
static void weigh_block(const mass_t *a, float *s, int64_t j0, int64_t count, int64_t last, float *top, float *sum) {
  int64_t hi = last + 1 - j0, lo = a->window ? last + 1 - a->window - j0 : 0;
  lo = lo < 0 ? 0 : lo > count ? count : lo;
  hi = hi < lo ? lo : hi > count ? count : hi;
  for (int64_t j = 0; j < lo; j++) s[j] = -INFINITY;
  for (int64_t j = hi; j < KEYS; j++) s[j] = -INFINITY;
  if (a->softcap > 0)
    for (int64_t j = lo; j < hi; j++) s[j] = a->softcap * tanhf(s[j] * a->scale / a->softcap) / a->scale;
  f8 highest = splat(-INFINITY);
  for (int64_t j = 0; j < KEYS; j += 8) {
    f8 x = LOAD(s + j) * splat(a->scale);
    i8 more = x > highest;
    highest = (f8)(((i8)x & more) | ((i8)highest & ~more));
    STORE(s + j, x);
  }
  float most = -INFINITY;
  for (int i = 0; i < 8; i++) most = highest[i] > most ? highest[i] : most;
  *top = most;
  f8 total = splat(0);
  for (int64_t j = 0; j < KEYS; j += 8) {
    f8 e = lo < hi ? exp8(LOAD(s + j) - splat(most)) : splat(0);
    STORE(s + j, e);
    total += e;
  }
  *sum = hsum(total);
}

static void score_block(void *p, int64_t block) {
  const mass_t *a = p;
  int64_t blocks = (a->keys + KEYS - 1) / KEYS, j0 = block * KEYS, pairs = a->rows * a->chosen;
  int64_t j1 = j0 + KEYS < a->keys ? j0 + KEYS : a->keys;
  for (int64_t first = 0; first < a->chosen;) { /* chosen heads that read the same keys */
    int64_t kv = a->heads[first] / a->group, end = first;
    while (end < a->chosen && a->heads[end] / a->group == kv) end++;
    const float *q[TILE];
    float *to[TILE];
    int n = 0;
    for (int64_t c = first; c < end; c++)
      for (int64_t row = 0; row < a->rows; row++) {
        q[n] = a->q + row * a->q_stride + a->heads[c] * a->dim;
        to[n++] = a->score + (c * a->rows + row) * blocks * KEYS + j0;
        if (n == TILE || (c + 1 == end && row + 1 == a->rows)) {
          dots(q, to, a->k + kv * a->head_stride + j0 * a->dim, j1 - j0, a->dim, n);
          n = 0;
        }
      }
    first = end;
  }
  for (int64_t i = 0; i < pairs; i++)
    weigh_block(a, a->score + i * blocks * KEYS + j0, j0, j1 - j0, a->last[i % a->rows], a->top + i * blocks + block,
                a->sum + i * blocks + block);
}

/* A row-head's sums become the factors that make its blocks' exponentials shares of the mean over heads. */
static void join_blocks(const mass_t *a, int64_t pair, int64_t blocks) {
  float *top = a->top + pair * blocks, *sum = a->sum + pair * blocks;
  float sink = a->sinks ? a->sinks[a->heads[pair / a->rows]] : -INFINITY, most = sink;
  for (int64_t b = 0; b < blocks; b++) most = top[b] > most ? top[b] : most;
  float total = sink == -INFINITY ? 0 : expf(sink - most);
  for (int64_t b = 0; b < blocks; b++) {
    top[b] = expf(top[b] - most);
    total += sum[b] * top[b];
  }
  float share = 1.0f / (total * (float)a->chosen);
  for (int64_t b = 0; b < blocks; b++) sum[b] = top[b] * share;
}

static void add_block(void *p, int64_t block) {
  const mass_t *a = p;
  int64_t blocks = (a->keys + KEYS - 1) / KEYS, j0 = block * KEYS;
  int64_t count = a->keys - j0 < KEYS ? a->keys - j0 : KEYS;
  float row_sum[KEYS];
  for (int64_t row = 0; row < a->rows; row++) {
    for (int64_t j = 0; j < KEYS; j += 8) STORE(row_sum + j, splat(0));
    for (int64_t c = 0; c < a->chosen; c++) {
      int64_t pair = c * a->rows + row;
      const float *e = a->score + pair * blocks * KEYS + j0;
      f8 factor = splat(a->sum[pair * blocks + block]);
      for (int64_t j = 0; j < KEYS; j += 8) STORE(row_sum + j, fma8(LOAD(e + j), factor, LOAD(row_sum + j)));
    }
    for (int64_t j = 0; j < count; j++) a->out[j0 + j] += row_sum[j];
  }
}

void ft_mass(mass_t *a, int threads) {
  int64_t blocks = (a->keys + KEYS - 1) / KEYS, pairs = a->rows * a->chosen;
  a->score = get_scratch(pairs * blocks * (KEYS + 2));
  a->top = a->score + pairs * blocks * KEYS;
  a->sum = a->top + pairs * blocks;
  threads = threads_for(pairs * a->keys, threads);
  parallel_for(blocks, threads, score_block, a);
  for (int64_t i = 0; i < pairs; i++) join_blocks(a, i, blocks);
  parallel_for(blocks, pairs < MANY ? 1 : threads, add_block, a);
}
