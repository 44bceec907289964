/* y = x W^T + b with 8-bit weights and activations, for few rows. See common.h for the rule.
 *
 * Both sides are cut into blocks of 64 inputs with one scale each: per output for the weights, per row for
 * the activations, so a row is rounded by its own values alone. Within a block sums are integers, hence
 * exact; block after block is added in fp32 in order, whatever the number of rows.
 *
 * Weights lie in panels of 16 outputs, per block 16 scales and then pairs of inputs side by side for
 * every output: widened to 16 bits, they meet a pair of activations in one multiply-add. Rows share weights
 * in registers, ROWS at a time, as in linear.c. */
#include "panel.h"

#define BLOCK8 64
#define GROUP 8 /* blocks that one pass over the rows takes */
#define BLOCK_BYTES (PANEL * 4 + BLOCK8 * PANEL)

/* ---- activations ---------------------------------------------------------------------------- */

typedef struct {
  const float *x;
  int16_t *q;
  float *scale;
  int64_t in, blocks;
} round_t;

/* The nearest integers, ties to even. */
INLINE i8 nearest(f8 x) {
#if defined(__AVX2__)
  return (i8)_mm256_cvtps_epi32((__m256)x);
#else
  i8 out;
  for (int i = 0; i < 8; i++) out[i] = (int32_t)lrintf(x[i]);
  return out;
#endif
}

/* `n` values of one block to integers in [-127, 127]; returns their scale, NaN where one is not finite. */
INLINE float round_block(const float *x, int16_t *q, int64_t n) {
  float padded[BLOCK8];
  if (n < BLOCK8) {
    memset(padded, 0, sizeof padded);
    memcpy(padded, x, (size_t)n * sizeof(float));
    x = padded;
  }
  f8 top = splat(0), broken = splat(0);
  for (int i = 0; i < BLOCK8; i += 8) {
    f8 size = (f8)((i8)LOAD(x + i) & 0x7fffffff);
    i8 more = size > top;
    top = (f8)(((i8)size & more) | ((i8)top & ~more));
    broken += size * splat(0); /* 0, or NaN */
  }
  float most = 0;
  for (int i = 0; i < 8; i++) most = top[i] > most ? top[i] : most;
  f8 inverse = splat(most > 0 ? 127.0f / most : 0);
  for (int i = 0; i < BLOCK8; i += 8) {
    typedef int16_t s8 __attribute__((vector_size(16), aligned(2)));
    *(s8 *)(q + i) = __builtin_convertvector(nearest(LOAD(x + i) * inverse), s8);
  }
  return most / 127.0f + hsum(broken);
}

/* One row; beyond `in` its integers are 0. */
static void round_row(void *p, int64_t row) {
  const round_t *a = p;
  for (int64_t b = 0; b < a->blocks; b++) {
    int64_t n = a->in - b * BLOCK8 < BLOCK8 ? a->in - b * BLOCK8 : BLOCK8;
    a->scale[row * a->blocks + b] = round_block(a->x + row * a->in + b * BLOCK8, a->q + (row * a->blocks + b) * BLOCK8, n);
  }
}

/* ---- product -------------------------------------------------------------------------------- */

typedef struct {
  const int16_t *q;
  const float *scale, *bias;
  const char *w;
  float *out;
  int64_t rows, blocks, panels;
} linear8_t;

INLINE int32_t pair_of(const int16_t *q) {
  int32_t both;
  memcpy(&both, q, 4);
  return both;
}

/* One block of a panel for R rows, added to sums[r][16]. */
INLINE void block_tile(const int16_t *q, const float *scale, int64_t blocks, const char *w, float *sums,
                       const int R) {
  const int8_t *v = (const int8_t *)w + PANEL * 4;
  n16 a[ROWS];
  for (int r = 0; r < R; r++) a[r] = n_zero();
  for (int k = 0; k < BLOCK8; k += 2, v += 2 * PANEL) {
    d16 both = d_widen(v);
    for (int r = 0; r < R; r++) a[r] = d_pairs(both, pair_of(q + r * blocks * BLOCK8 + k), a[r]);
  }
  p16 scales = p_load((const float *)w);
  for (int r = 0; r < R; r++) {
    float *sum = sums + r * PANEL;
    p_store(sum, p_fma(n_floats(a[r]), p_times(scales, scale[r * blocks]), p_load(sum)));
  }
}

/* `count` blocks for R rows, fetching its share of the next group meanwhile. */
INLINE void group_tile(const int16_t *q, const float *scale, int64_t blocks, const char *w, float *sums,
                       int64_t count, const char *next, int64_t share, const int R) {
  for (int64_t b = 0; b < count; b++) {
    for (int64_t at = b * share / GROUP; at < (b + 1) * share / GROUP; at += 64) __builtin_prefetch(next + at, 0, 3);
    block_tile(q + b * BLOCK8, scale + b, blocks, w + b * BLOCK_BYTES, sums, R);
  }
}

static void linear8_panel(const linear8_t *a, int64_t panel, float *sums) {
  const int64_t passes = (a->rows + ROWS - 1) / ROWS, each = (a->rows + passes - 1) / passes;
  memset(sums, 0, (size_t)(a->rows * PANEL) * sizeof(float));
  for (int64_t b0 = 0; b0 < a->blocks; b0 += GROUP) {
    int64_t count = a->blocks - b0 < GROUP ? a->blocks - b0 : GROUP, share = GROUP * BLOCK_BYTES / passes, pass = 0;
    const char *w = a->w + (panel * a->blocks + b0) * BLOCK_BYTES;
    for (int64_t r = 0; r < a->rows; r += each, pass++) {
      const int16_t *q = a->q + (r * a->blocks + b0) * BLOCK8;
      const float *scale = a->scale + r * a->blocks + b0;
      const char *next = w + GROUP * BLOCK_BYTES + pass * share;
      float *sum = sums + r * PANEL;
#define TILE(R) group_tile(q, scale, a->blocks, w, sum, count, next, share, R)
      FOR_ROWS((int)(a->rows - r < each ? a->rows - r : each), TILE)
#undef TILE
    }
  }
  store_panel(a->out, a->panels * PANEL, panel, sums, a->bias, a->rows);
}

static void linear8_task(void *p, int64_t task) {
  const linear8_t *a = p;
  float *sums = get_scratch(a->rows * PANEL);
  int64_t end = 4 * task + 4 < a->panels ? 4 * task + 4 : a->panels;
  for (int64_t panel = 4 * task; panel < end; panel++) linear8_panel(a, panel, sums);
}

/* out[rows, panels * 16] = x[rows, in] times the packed 8-bit weight, plus bias if not null. `q` and `scale`
 * are room for the rounded rows: rows * blocks * 64 int16 and rows * blocks floats. */
void ft_linear8(const float *x, const void *w, const float *bias, float *out, int16_t *q, float *scale,
                int64_t rows, int64_t in, int64_t panels, int threads) {
  int64_t blocks = (in + BLOCK8 - 1) / BLOCK8;
  round_t r = {x, q, scale, in, blocks};
  parallel_for(rows, threads_for(rows * in, threads), round_row, &r);
  linear8_t a = {q, scale, bias, w, out, rows, blocks, panels};
  parallel_for((panels + 3) / 4, threads_for(panels * PANEL * in / 4, threads), linear8_task, &a);
}
