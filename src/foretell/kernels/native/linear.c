/* y = x W^T + b for few rows: the verification pass. See common.h for the rule that it keeps.
 *
 * Weights lie in panels of 16 outputs, [panel][input][16], so a step reads them as one stream at
 * the speed of memory. Up to ROWS rows share each weight while it is in a register; with more rows
 * the block of a panel passes through the first-level cache once per so many, and every pass fetches
 * its share of the next block, so that arithmetic and memory overlap. Each output is a sum of blocks,
 * each block one chain of fused multiply-adds over its inputs in order, whatever the number of rows.
 *
 * fp16 and bf16 weights are widened in registers: the result has the same bits as with the same
 * weights in fp32, for half the bytes. */
#include "panel.h"

#define BLOCK 128 /* inputs of a panel that one pass takes */
#define WIDEN_ONCE 4 /* passes from which a widened copy of the block pays */

/* Whether fp16 weights can be widened quickly. */
int ft_has_fp16(void) {
#if defined(__F16C__) || defined(__aarch64__)
  return 1;
#else
  return 0;
#endif
}

typedef struct {
  const float *x, *bias;
  const char *w;
  float *out;
  int64_t rows, in, panels, per_task;
  int kind;
} linear_t;

/* A block of `n` inputs, of P panels. `next`: what is fetched meanwhile, a cache line of each panel every `every`
 * inputs. The `apart`s lead from one panel to the next: in the weights that are read, in those that are fetched,
 * in the sums. */
typedef struct {
  const char *w, *next;
  int64_t n, apart, next_apart, every, sums_apart;
  int first;
} block_t;

/* One block for R rows of x. */
INLINE void linear_tile(const block_t *b, const float *x, int64_t in, float *sums, const int kind, const int P,
                        const int R) {
  p16 a[ROWS][PANELS];
  const char *next = b->next, *w = b->w;
  const int64_t n = b->n, apart = b->apart, every = b->every;
  for (int r = 0; r < R; r++) for (int p = 0; p < P; p++) a[r][p] = p_zero();
  int64_t since = 0;
  for (int64_t k = 0; k < n; k++) {
    if (++since == every) {
      since = 0;
      for (int p = 0; p < P; p++) __builtin_prefetch(next + p * b->next_apart, 0, 3);
      next += 64;
    }
    p16 v[PANELS];
    for (int p = 0; p < P; p++) v[p] = p_widen(w + p * apart, k * PANEL, kind);
    for (int r = 0; r < R; r++) for (int p = 0; p < P; p++) a[r][p] = p_axpy(x[r * in + k], v[p], a[r][p]);
  }
  for (int r = 0; r < R; r++) for (int p = 0; p < P; p++) {
    float *sum = sums + p * b->sums_apart + r * PANEL;
    p_store(sum, b->first ? a[r][p] : p_add(p_load(sum), a[r][p]));
  }
}

INLINE void linear_pass(const block_t *b, const float *x, int64_t in, float *sums, int count, const int kind,
                        const int P) {
#define TILE(R) linear_tile(b, x, in, sums, kind, P, R)
  FOR_ROWS(count, TILE)
#undef TILE
}

/* P panels for all rows: sums[P][rows][16] stay in the cache, out is written once at the end. Where a block
 * serves many passes it is widened once. */
INLINE void linear_panels(const linear_t *a, int64_t panel, float *sums, float *wide, const int kind, const int P) {
  const int64_t size = kind == FP32 ? 4 : 2, apart = a->in * PANEL * size, rows = a->rows;
  const int64_t passes = (rows + ROWS - 1) / ROWS, each = (rows + passes - 1) / passes;
  const int64_t share = BLOCK * PANEL * size / passes;
  const int once = kind != FP32 && passes > WIDEN_ONCE;
  for (int64_t k0 = 0, pass = 0; k0 < a->in; k0 += BLOCK, pass = 0) {
    const char *w = a->w + panel * apart + k0 * PANEL * size;
    const char *next = k0 + BLOCK < a->in ? w + BLOCK * PANEL * size : a->w + (panel + P) * apart;
    block_t b = {w, next, a->in - k0 < BLOCK ? a->in - k0 : BLOCK, apart, apart, passes * (64 / (PANEL * size)),
                 rows * PANEL, k0 == 0};
    if (once) {
      for (int p = 0; p < P; p++) for (int64_t k = 0; k < b.n; k++)
        p_store(wide + (p * BLOCK + k) * PANEL, p_widen(w + p * apart, k * PANEL, kind));
      b.w = (const char *)wide;
      b.apart = BLOCK * PANEL * (int64_t)sizeof(float);
    }
    for (int64_t r = 0; r < rows; r += each, pass++) {
      const float *x = a->x + r * a->in + k0;
      int count = (int)(rows - r < each ? rows - r : each);
      b.next = next + pass * share;
      if (once) linear_pass(&b, x, a->in, sums + r * PANEL, count, FP32, P);
      else linear_pass(&b, x, a->in, sums + r * PANEL, count, kind, P);
    }
  }
  for (int p = 0; p < P; p++)
    store_panel(a->out, a->panels * PANEL, panel + p, sums + p * rows * PANEL, a->bias, rows);
}

INLINE void linear_kind(const linear_t *a, int64_t panel, int64_t end, float *sums, const int kind) {
  float *wide = sums + PANELS * a->rows * PANEL;
  for (; panel + PANELS <= end; panel += PANELS) linear_panels(a, panel, sums, wide, kind, PANELS);
  for (; panel < end; panel++) linear_panels(a, panel, sums, wide, kind, 1);
}

static void linear_task(void *p, int64_t task) {
  const linear_t *a = p;
  float *sums = get_scratch((a->rows + BLOCK) * PANEL * PANELS);
  int64_t end = (task + 1) * a->per_task < a->panels ? (task + 1) * a->per_task : a->panels;
  switch (a->kind) {
    case FP32: linear_kind(a, task * a->per_task, end, sums, FP32); break;
    case FP16: linear_kind(a, task * a->per_task, end, sums, FP16); break;
    default: linear_kind(a, task * a->per_task, end, sums, BF16);
  }
}

/* out[rows, panels * 16] = x[rows, in] times the packed weight, plus bias[panels * 16] if not null. */
void ft_linear(const float *x, const void *w, const float *bias, float *out, int64_t rows, int64_t in,
               int64_t panels, int kind, int threads) {
  linear_t a = {x, bias, w, out, rows, in, panels, 2, kind};
  parallel_for((panels + 1) / 2, threads_for(panels * PANEL * in, threads), linear_task, &a);
}
