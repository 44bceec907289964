/* Kernels that work row by row: norm, rotary embedding, gated SiLU. See common.h for the rule. */
#include "common.h"

gomp_parallel_fn ft_gomp_parallel = 0;
__thread team_t *ft_team = 0;
__thread int64_t ft_member = 0, ft_job = 0, ft_phase = 0;

/* `parallel` is GOMP_parallel of the OpenMP runtime in this process, or null. */
void ft_init(void *parallel) { ft_gomp_parallel = (gomp_parallel_fn)parallel; }

/* ---- norm --------------------------------------------------------------------------------- */

/* out = x / rms(x) * weight over n floats (n % 8 == 0). */
INLINE void rms_row(const float *x, const float *weight, float *out, int64_t n, float eps) {
  f8 sum = splat(0);
  for (int64_t i = 0; i < n; i += 8) sum = fma8(LOAD(x + i), LOAD(x + i), sum);
  f8 scale = splat(1.0f / sqrtf(hsum(sum) / (float)n + eps));
  for (int64_t i = 0; i < n; i += 8) STORE(out + i, LOAD(x + i) * scale * LOAD(weight + i));
}

typedef struct {
  float *residual;
  const float *delta, *weight;
  float *out;
  int64_t width;
  float eps;
} norm_t;

static void norm_task(void *p, int64_t row) {
  norm_t *a = p;
  float *x = a->residual + row * a->width;
  if (a->delta) {
    const float *d = a->delta + row * a->width;
    for (int64_t i = 0; i < a->width; i += 8) STORE(x + i, LOAD(x + i) + LOAD(d + i));
  }
  if (a->weight) rms_row(x, a->weight, a->out + row * a->width, a->width, a->eps);
}

/* residual[rows, width] += delta (if any); out = rms_norm(residual) * weight (if any). */
void ft_add_norm(float *residual, const float *delta, const float *weight, float *out, int64_t rows,
                 int64_t width, float eps, int threads) {
  norm_t a = {residual, delta, weight, out, width, eps};
  parallel_for(rows, threads_for(rows * width, threads), norm_task, &a);
}

/* ---- rotary embedding --------------------------------------------------------------------- */

typedef struct {
  float *qkv;
  const float *cos, *sin, *q_norm, *k_norm;
  const int64_t *position;
  int64_t heads, kv_heads, dim, stride;
  float eps;
} rope_t;

static void rope_task(void *p, int64_t row) {
  rope_t *a = p;
  int64_t half = a->dim / 2;
  const float *cos = a->cos + a->position[row] * half, *sin = a->sin + a->position[row] * half;
  for (int64_t h = 0; h < a->heads + a->kv_heads; h++) {
    float *x = a->qkv + row * a->stride + h * a->dim;
    const float *norm = h < a->heads ? a->q_norm : a->k_norm;
    if (norm) rms_row(x, norm, x, a->dim, a->eps);
    for (int64_t i = 0; i < half; i++) {
      float lo = x[i], hi = x[i + half];
      x[i] = lo * cos[i] - hi * sin[i];
      x[i + half] = hi * cos[i] + lo * sin[i];
    }
  }
}

/* Rotates the q and k heads of qkv[rows, stride] in place ("rotate half" layout); q_norm and k_norm,
 * where given, normalise each head first (Qwen3). cos and sin are [positions, dim / 2]. */
void ft_rope(float *qkv, const float *cos, const float *sin, const float *q_norm, const float *k_norm,
             const int64_t *position, int64_t rows, int64_t heads, int64_t kv_heads, int64_t dim,
             int64_t stride, float eps, int threads) {
  rope_t a = {qkv, cos, sin, q_norm, k_norm, position, heads, kv_heads, dim, stride, eps};
  parallel_for(rows, threads_for(rows * stride, threads), rope_task, &a);
}

/* ---- gated SiLU --------------------------------------------------------------------------- */

typedef struct {
  const float *gate_up;
  float *out;
  int64_t width;
} silu_t;

static void silu_task(void *p, int64_t row) {
  silu_t *a = p;
  const float *gate = a->gate_up + row * 2 * a->width, *up = gate + a->width;
  float *out = a->out + row * a->width;
  for (int64_t i = 0; i < a->width; i += 8) {
    f8 g = LOAD(gate + i);
    i8 negative = g < splat(0);
    f8 e = exp8((f8)((i8)g | (i8)splat(-0.0f))); /* exp(-|g|) */
    f8 top = (f8)(((i8)e & negative) | ((i8)splat(1.0f) & ~negative));
    STORE(out + i, g * (top / (splat(1.0f) + e)) * LOAD(up + i));
  }
}

/* out[rows, width] = silu(gate) * up for gate_up[rows, 2 * width] (width % 8 == 0). */
void ft_silu_mul(const float *gate_up, float *out, int64_t rows, int64_t width, int threads) {
  silu_t a = {gate_up, out, width};
  parallel_for(rows, threads_for(rows * width * 4, threads), silu_task, &a);
}
