/* Attention of packed rows over the KV arena. See common.h for the rule that it keeps.
 *
 * A row sees the slots [lo, hi) of its request's range and then a list of further slots (the
 * scattered ancestors of a tree node). Where a request reads a selection of its slots, [lo, hi) are places
 * in its list of them. Softmax takes two passes: all
 * scores, then weights times values added up key by key in that order. A "row-head" is one query
 * head of one row; the row-heads of a task share one K/V head, so K and V are read once for them. */
#include "pass.h"

#define TILE 4        /* row-heads that share one pass over keys in registers */
#define MAX_CHUNK 16  /* row-heads of a task, at most */
#define KEY_BLOCK 128 /* keys that stay in the L1/L2 cache while all tiles of a task pass them */

typedef struct {
  const float *q;
  float *score, *out;
  int64_t row, head, count; /* count: scores in the buffer, padded to 8 */
} rowhead_t;

/* score[j] = q . k[j] for keys j0..j1 and `count` row-heads; order: k[order[j]] instead of k[j]. */
INLINE void score_tile(rowhead_t *t, const float *k, const int64_t *order, int64_t j0, int64_t j1, int64_t dim, const int count) {
  for (int64_t j = j0; j < j1; j++) {
    const float *at = k + (order ? order[j] : j) * dim;
    f8 acc[TILE];
    for (int r = 0; r < count; r++) acc[r] = splat(0);
    for (int64_t i = 0; i < dim; i += 8) {
      f8 key = LOAD(at + i);
      for (int r = 0; r < count; r++) acc[r] = fma8(LOAD(t[r].q + i), key, acc[r]);
    }
    for (int r = 0; r < count; r++) t[r].score[j - j0] = hsum(acc[r]);
  }
}

/* out += weight[j] * v[j] for keys j0..j1, in that order; `lanes` vectors of 8 at a time. */
INLINE void value_tile(rowhead_t *t, int64_t offset, const float *v, const int64_t *order, int64_t j0, int64_t j1,
                       int64_t dim, const int count, const int lanes) {
  for (int64_t c = 0; c < dim; c += 8 * lanes) {
    f8 acc[TILE][4];
    for (int r = 0; r < count; r++)
      for (int x = 0; x < lanes; x++) acc[r][x] = LOAD(t[r].out + c + 8 * x);
    for (int64_t j = j0; j < j1; j++) {
      const float *at = v + (order ? order[j] : j) * dim + c;
      for (int x = 0; x < lanes; x++) {
        f8 value = LOAD(at + 8 * x);
        for (int r = 0; r < count; r++) acc[r][x] = fma8(splat(t[r].score[offset + j - j0]), value, acc[r][x]);
      }
    }
    for (int r = 0; r < count; r++)
      for (int x = 0; x < lanes; x++) STORE(t[r].out + c + 8 * x, acc[r][x]);
  }
}

static void score_keys(rowhead_t *t, const float *k, const int64_t *order, int64_t j0, int64_t j1, int64_t dim,
                       int count) {
  switch (count) {
    case 1: score_tile(t, k, order, j0, j1, dim, 1); break;
    case 2: score_tile(t, k, order, j0, j1, dim, 2); break;
    case 3: score_tile(t, k, order, j0, j1, dim, 3); break;
    default: score_tile(t, k, order, j0, j1, dim, 4);
  }
}

static void value_keys(rowhead_t *t, int64_t offset, const float *v, const int64_t *order, int64_t j0, int64_t j1,
                       int64_t dim, int count) {
#define VALUES(n) \
  if (dim % 16) value_tile(t, offset, v, order, j0, j1, dim, n, 1); \
  else value_tile(t, offset, v, order, j0, j1, dim, n, 2)
  switch (count) {
    case 1:
      if (dim % 32) { VALUES(1); }
      else value_tile(t, offset, v, order, j0, j1, dim, 1, 4);
      break;
    case 2: VALUES(2); break;
    case 3: VALUES(3); break;
    default: VALUES(4);
  }
}

/* Scores of range [jlo, jhi) and extras become softmax weights; keys outside the row's own range get
 * exactly 0. Returns 1 / (sum of weights); 0 where a row sees no key. */
static float weigh(const attend_t *a, rowhead_t *t, int64_t jlo, int64_t jhi) {
  int64_t lo = a->lo[t->row] - jlo, hi = a->hi[t->row] - jlo, range = jhi - jlo;
  float *s = t->score;
  for (int64_t j = 0; j < lo; j++) s[j] = -INFINITY;
  for (int64_t j = hi; j < range; j++) s[j] = -INFINITY;
  int64_t padded = (t->count + 7) / 8 * 8;
  for (int64_t j = t->count; j < padded; j++) s[j] = -INFINITY;
  float top = a->sinks ? a->sinks[t->head] : -INFINITY;
  for (int64_t j = 0; j < t->count; j++) {
    s[j] *= a->scale;
    if (a->softcap > 0 && s[j] != -INFINITY) s[j] = a->softcap * tanhf(s[j] / a->softcap);
    top = s[j] > top ? s[j] : top;
  }
  float *lse = a->lse ? a->lse + t->row * a->heads + t->head : 0;
  if (top == -INFINITY) {
    for (int64_t j = 0; j < padded; j++) s[j] = 0;
    if (lse) *lse = -INFINITY;
    return 0;
  }
  for (int64_t j = 0; j < padded; j += 8) STORE(s + j, exp8(LOAD(s + j) - splat(top)));
  float sum = 0;
  if (a->sinks) { f8 e = exp8(splat(a->sinks[t->head] - top)); sum = e[0]; }
  for (int64_t j = lo; j < hi; j++) sum += s[j];
  for (int64_t j = range; j < t->count; j++) sum += s[j];
  if (lse) *lse = top + logf(sum);
  return 1.0f / sum;
}

static void attend_rowheads(const attend_t *a, rowhead_t *t, int count, const float *k, const float *v) {
  int64_t jlo = a->lo[t[0].row], jhi = a->hi[t[0].row], dim = a->dim, extras = 0;
  for (int r = 0; r < count; r++) {
    int64_t row = t[r].row, n = a->extra_start[row + 1] - a->extra_start[row];
    jlo = a->lo[row] < jlo ? a->lo[row] : jlo;
    jhi = a->hi[row] > jhi ? a->hi[row] : jhi;
    extras = n > extras ? n : extras;
  }
  const int64_t *order = a->order_at[t[0].row] < 0 ? 0 : a->order + a->order_at[t[0].row];
  int64_t range = jhi - jlo, stride = (range + extras + 15) / 8 * 8;
  float *buffer = get_scratch(stride * count);
  for (int r = 0; r < count; r++) {
    t[r].score = buffer + r * stride;
    t[r].count = range + a->extra_start[t[r].row + 1] - a->extra_start[t[r].row];
  }
  for (int64_t j0 = jlo; j0 < jhi; j0 += KEY_BLOCK) {
    int64_t j1 = j0 + KEY_BLOCK < jhi ? j0 + KEY_BLOCK : jhi;
    for (int r = 0; r < count; r += TILE) {
      int n = count - r < TILE ? count - r : TILE;
      rowhead_t tile[TILE];
      for (int x = 0; x < n; x++) { tile[x] = t[r + x]; tile[x].score += j0 - jlo; }
      score_keys(tile, k, order, j0, j1, dim, n);
    }
  }
  float inverse[MAX_CHUNK];
  for (int r = 0; r < count; r++) {
    for (int64_t e = a->extra_start[t[r].row], x = range; e < a->extra_start[t[r].row + 1]; e++, x++) {
      rowhead_t one = t[r];
      one.score += x;
      score_keys(&one, k, 0, a->extra[e], a->extra[e] + 1, dim, 1);
    }
    inverse[r] = weigh(a, &t[r], jlo, jhi);
    for (int64_t i = 0; i < dim; i += 8) STORE(t[r].out + i, splat(0));
  }
  for (int64_t j0 = jlo; j0 < jhi; j0 += KEY_BLOCK) {
    int64_t j1 = j0 + KEY_BLOCK < jhi ? j0 + KEY_BLOCK : jhi;
    for (int r = 0; r < count; r += TILE) {
      int n = count - r < TILE ? count - r : TILE;
      value_keys(t + r, j0 - jlo, v, order, j0, j1, dim, n);
    }
  }
  for (int r = 0; r < count; r++) {
    for (int64_t e = a->extra_start[t[r].row], x = range; e < a->extra_start[t[r].row + 1]; e++, x++)
      value_keys(t + r, x, v, 0, a->extra[e], a->extra[e] + 1, dim, 1);
    for (int64_t i = 0; i < dim; i += 8) STORE(t[r].out + i, LOAD(t[r].out + i) * splat(inverse[r]));
  }
}

static void attend_task(void *p, int64_t task) {
  const attend_t *a = p;
  int64_t group = a->heads / a->kv_heads, kv = a->task_kv[task];
  rowhead_t t[MAX_CHUNK];
  int count = (int)a->task_count[task];
  for (int r = 0; r < count; r++) {
    int64_t f = a->task_first[task] + r;
    t[r].row = a->task_row[task] + f / group;
    t[r].head = kv * group + f % group;
    t[r].q = a->q + t[r].row * a->q_stride + t[r].head * a->dim;
    t[r].out = a->out + (t[r].row * a->heads + t[r].head) * a->dim;
  }
  int64_t origin = kv * a->head_stride + a->base[t[0].row] * a->dim;
  attend_rowheads(a, t, count, a->k + origin, a->v + origin);
}

static void store_task(void *p, int64_t row) {
  const attend_t *a = p;
  for (int64_t h = 0; h < a->kv_heads; h++) {
    int64_t to = h * a->head_stride + a->slot[row] * a->dim, from = row * a->kv_stride + h * a->dim;
    memcpy(a->k + to, a->k_new + from, (size_t)a->dim * sizeof(float));
    memcpy(a->v + to, a->v_new + from, (size_t)a->dim * sizeof(float));
  }
}

/* Stores each row's K and V at its slot, where it brings some, then attends: out[rows, heads, dim]. */
void ft_attend(attend_t *a, int threads) {
  if (a->k_new) parallel_for(a->rows, 1, store_task, a);
  parallel_for(a->tasks, threads, attend_task, a);
}
