/* All layers of a decoder in one parallel region.
 *
 * A step of few rows is many small operations; waking the threads for each of them, and coming back to
 * Python in between, costs as much as some of the operations. Here the threads stay together (team_t) and
 * meet after each. The operations are the ones that Python calls one by one, so the bits are the same. */
#include "pass.h"

#define AT_ONCE 128 /* rows of a product whose inputs stay in the cache */
#define INT8 3      /* matrix_t.kind beside FP32, FP16, BF16 of linear.c */

typedef struct {
  const void *w;
  const float *bias;
  int64_t in, panels, kind;
} matrix_t;

/* What the rows see in a layer of one window. */
typedef struct {
  const int64_t *slot, *base, *lo, *hi, *extra_start, *extra, *order_at, *order;
  const int64_t *task_row, *task_kv, *task_first, *task_count;
  int64_t tasks, chunk, parallel;
} seen_t;

typedef struct {
  const float *attn_norm, *mlp_norm, *q_norm, *k_norm; /* attn_norm null: attention reads `input` */
  matrix_t qkv, out, gate_up, down;
  int64_t seen; /* index of its window */
} layer_t;

typedef struct {
  const layer_t *layers;
  const seen_t *seen;
  const float *norm, *input, *cos, *sin; /* norm null: the stream is not normed at the end */
  const int64_t *position;
  float *x, *h, *qkv, *mixed, *delta, *gate_up, *act, *scale8;
  int16_t *q8;
  int64_t *next;
  float *keys, *values; /* of all layers */
  float *const *aux;     /* per layer, where the stream that enters it is copied, or null */
  float *const *queries; /* per layer, where its rotated queries are copied, or null */
  int64_t count, rows, width, inner, heads, kv_heads, dim, head_stride, layer_stride;
  float eps, scale;
} pass_t;

static void multiply(const pass_t *p, const matrix_t *m, const float *x, float *out, int threads) {
  for (int64_t r = 0; r < p->rows; r += AT_ONCE) {
    int64_t rows = p->rows - r < AT_ONCE ? p->rows - r : AT_ONCE;
    const float *part = x + r * m->in;
    float *to = out + r * m->panels * PANEL;
    if (m->kind == INT8) ft_linear8(part, m->w, m->bias, to, p->q8, p->scale8, rows, m->in, m->panels, threads);
    else ft_linear(part, m->w, m->bias, to, rows, m->in, m->panels, (int)m->kind, threads);
  }
}

typedef struct {
  const float *from;
  float *to;
  int64_t width, stride; /* floats of a row, and between rows of `from` */
} copy_t;

static void copy_task(void *arg, int64_t row) {
  const copy_t *c = arg;
  memcpy(c->to + row * c->width, c->from + row * c->stride, (size_t)c->width * sizeof(float));
}

static void attend_layer(const pass_t *p, int64_t layer, int threads) {
  const seen_t *s = p->seen + p->layers[layer].seen;
  float *k = p->keys + layer * p->layer_stride, *v = p->values + layer * p->layer_stride;
  int64_t q = p->heads * p->dim, kv = p->kv_heads * p->dim, stride = q + 2 * kv;
  attend_t a = {p->qkv, p->qkv + q, p->qkv + q + kv, p->mixed, k, v, stride, stride, p->head_stride,
                p->rows, p->heads, p->kv_heads, p->dim, s->slot, s->base, s->lo, s->hi, s->extra_start,
                s->extra, s->order_at, s->order, s->task_row, s->task_kv, s->task_first, s->task_count, s->tasks, s->chunk, 0,
                p->scale, 0};
  ft_attend(&a, s->parallel ? threads : 1);
}

static void run(const pass_t *p, int threads) {
  const float *delta = 0;
  int64_t q = p->heads * p->dim, stride = q + 2 * p->kv_heads * p->dim;
  for (int64_t i = 0; i < p->count; i++) {
    const layer_t *l = p->layers + i;
    ft_add_norm(p->x, delta, l->attn_norm, p->h, p->rows, p->width, p->eps, threads);
    const float *input = l->attn_norm ? p->h : p->input;
    if (p->aux[i]) {
      copy_t c = {p->x, p->aux[i], p->width, p->width};
      parallel_for(p->rows, 1, copy_task, &c);
    }
    multiply(p, &l->qkv, input, p->qkv, threads);
    ft_rope(p->qkv, p->cos, p->sin, l->q_norm, l->k_norm, p->position, p->rows, p->heads, p->kv_heads, p->dim,
            stride, p->eps, threads);
    if (p->queries[i]) {
      copy_t c = {p->qkv, p->queries[i], q, stride};
      parallel_for(p->rows, 1, copy_task, &c);
    }
    attend_layer(p, i, threads);
    multiply(p, &l->out, p->mixed, p->delta, threads);
    ft_add_norm(p->x, p->delta, l->mlp_norm, p->h, p->rows, p->width, p->eps, threads);
    multiply(p, &l->gate_up, p->h, p->gate_up, threads);
    ft_silu_mul(p->gate_up, p->act, p->rows, p->inner, threads);
    multiply(p, &l->down, p->act, p->delta, threads);
    delta = p->delta;
  }
  ft_add_norm(p->x, delta, p->norm, p->h, p->rows, p->width, p->eps, threads);
}

typedef struct {
  const pass_t *pass;
  team_t team;
  int64_t joined;
  int threads;
} run_t;

static void member(void *arg) {
  run_t *r = arg;
  ft_member = __atomic_fetch_add(&r->joined, 1, __ATOMIC_ACQ_REL);
  ft_job = ft_phase = 0;
  ft_team = &r->team;
  run(r->pass, r->threads);
  ft_team = 0;
}

/* Runs the layers on x[rows, width] in place and writes the normed stream that leaves the last one to h,
 * where there is a final norm.
 * `next` holds a zero per parallel_for. `threads` must be what the OpenMP runtime really gives. */
void ft_pass(const pass_t *pass, int threads) {
  run_t r = {pass, {.members = threads, .next = pass->next}, 0, threads};
  if (threads < 2 || !ft_gomp_parallel) run(pass, 1);
  else ft_gomp_parallel(member, &r, (unsigned)threads, 0);
}

static void count_task(void *arg) { __atomic_fetch_add((int64_t *)arg, 1, __ATOMIC_RELAXED); }

/* How many threads the OpenMP runtime gives when asked for so many. */
int ft_given_threads(int threads) {
  int64_t given = 0;
  if (threads < 2 || !ft_gomp_parallel) return 1;
  ft_gomp_parallel(count_task, &given, (unsigned)threads, 0);
  return (int)given;
}
