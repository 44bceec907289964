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

/* `n` inputs of one panel for R rows; prefetches one cache line at `next` every `every` inputs. */
INLINE void linear_tile(const float *x, const void *w, float *sums, int64_t n, int64_t in,
                        int first, const char *next, int64_t every, const int kind, const int R) {
  p16 a[ROWS];
  for (int r = 0; r < R; r++) a[r] = p_zero();
  int64_t since = 0;
  for (int64_t k = 0; k < n; k++) {
    if (++since == every) {
      since = 0;
      __builtin_prefetch(next, 0, 3);
      next += 64;
    }
    p16 v = p_widen(w, k * PANEL, kind);
    for (int r = 0; r < R; r++) a[r] = p_axpy(x[r * in + k], v, a[r]);
  }
  for (int r = 0; r < R; r++) p_store(sums + r * PANEL, first ? a[r] : p_add(p_load(sums + r * PANEL), a[r]));
}

/* One pass over a block for `count` rows. */
INLINE void linear_pass(const float *x, const void *w, float *sums, int64_t n, int64_t in, int first,
                        const char *next, int64_t every, int count, const int kind) {
#define TILE(R) linear_tile(x, w, sums, n, in, first, next, every, kind, R)
  FOR_ROWS(count, TILE)
#undef TILE
}

/* One panel for all rows: sums[rows, 16] stays in the cache, out is written once at the end. Where a
 * block serves many passes it is widened once. */
INLINE void linear_panel(const linear_t *a, int64_t panel, float *sums, float *wide, const int kind) {
  const int64_t size = kind == FP32 ? 4 : 2;
  const int64_t passes = (a->rows + ROWS - 1) / ROWS, each = (a->rows + passes - 1) / passes;
  const int64_t every = passes * (64 / (PANEL * size)), share = BLOCK * PANEL * size / passes;
  for (int64_t k0 = 0; k0 < a->in; k0 += BLOCK) {
    int64_t n = a->in - k0 < BLOCK ? a->in - k0 : BLOCK, pass = 0;
    const char *w = a->w + (panel * a->in + k0) * PANEL * size;
    const int once = kind != FP32 && passes > WIDEN_ONCE;
    if (once) for (int64_t i = 0; i < n * PANEL; i += PANEL) p_store(wide + i, p_widen(w, i, kind));
    for (int64_t r = 0; r < a->rows; r += each, pass++) {
      const float *x = a->x + r * a->in + k0;
      const char *next = w + BLOCK * PANEL * size + pass * share;
      int count = (int)(a->rows - r < each ? a->rows - r : each);
      if (once) linear_pass(x, wide, sums + r * PANEL, n, a->in, k0 == 0, next, every, count, FP32);
      else linear_pass(x, w, sums + r * PANEL, n, a->in, k0 == 0, next, every, count, kind);
    }
  }
  store_panel(a->out, a->panels * PANEL, panel, sums, a->bias, a->rows);
}

static void linear_task(void *p, int64_t task) {
  const linear_t *a = p;
  float *sums = get_scratch((a->rows + BLOCK) * PANEL), *wide = sums + a->rows * PANEL;
  int64_t end = (task + 1) * a->per_task < a->panels ? (task + 1) * a->per_task : a->panels;
  for (int64_t panel = task * a->per_task; panel < end; panel++) switch (a->kind) {
      case FP32: linear_panel(a, panel, sums, wide, FP32); break;
      case FP16: linear_panel(a, panel, sums, wide, FP16); break;
      default: linear_panel(a, panel, sums, wide, BF16);
    }
}

/* out[rows, panels * 16] = x[rows, in] times the packed weight, plus bias[panels * 16] if not null. */
void ft_linear(const float *x, const void *w, const float *bias, float *out, int64_t rows, int64_t in,
               int64_t panels, int kind, int threads) {
  linear_t a = {x, bias, w, out, rows, in, panels, 2, kind};
  parallel_for((panels + 1) / 2, threads_for(panels * PANEL * in, threads), linear_task, &a);
}
