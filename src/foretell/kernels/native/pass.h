/* The functions and structures that a whole pass (pass.c) is made of. */
#ifndef FORETELL_PASS_H
#define FORETELL_PASS_H

#include "common.h"

typedef struct {
  const float *q, *k_new, *v_new;
  float *out, *k, *v;
  int64_t q_stride, kv_stride, head_stride;         /* floats between rows; between arena heads */
  int64_t rows, heads, kv_heads, dim;
  const int64_t *slot;                              /* per row: the arena slot of its K and V */
  const int64_t *base, *lo, *hi;                    /* per row: first slot of its request, range */
  const int64_t *extra_start, *extra;               /* per row: CSR of further slots */
  const int64_t *order_at, *order;                  /* per row: where its request's list of slots begins, -1: none */
  const int64_t *task_row, *task_kv, *task_first, *task_count; /* row-heads, per task */
  int64_t tasks, chunk;
  const float *sinks;                               /* per head, or null */
  float scale, softcap;                             /* softcap 0: none */
  float *lse;                                       /* per row-head: log of the sum of exp(score), or null */
} attend_t;

void ft_add_norm(float *residual, const float *delta, const float *weight, float *out, int64_t rows,
                 int64_t width, float eps, int threads);
void ft_rope(float *qkv, const float *cos, const float *sin, const float *q_norm, const float *k_norm,
             const int64_t *position, int64_t rows, int64_t heads, int64_t kv_heads, int64_t dim,
             int64_t stride, float eps, int threads);
void ft_silu_mul(const float *gate_up, float *out, int64_t rows, int64_t width, int threads);
void ft_attend(attend_t *a, int threads);
void ft_linear(const float *x, const void *w, const float *bias, float *out, int64_t rows, int64_t in,
               int64_t panels, int kind, int threads);
void ft_linear8(const float *x, const void *w, const float *bias, float *out, int16_t *q, float *scale,
                int64_t rows, int64_t in, int64_t panels, int threads);

#endif
