/* Shared by the CPU kernels of the decode path (rows.c, attend.c, noise.c).
 *
 * One rule holds for every function of this folder: the bits of a row's result depend on that row alone.
 * Not on how many rows are computed with it, on where the row stands, on the number of threads,
 * or on holes between the cache slots that it may see. Whoever changes a loop keeps the order in
 * which one row's terms are added. Two things follow from the rule:
 *   - all is compiled with -ffp-contract=off, and every fused multiply-add is written out;
 *     a compiler that contracts a*b+c in one copy of an inlined loop and not in another breaks it;
 *   - softmax takes two passes and adds key after key in position order, so a tree node whose
 *     ancestors lie scattered over the block gets the sums that plain decoding would get.
 *
 * Threads: work is shared through GOMP_parallel of the OpenMP runtime that torch has loaded, so
 * that these kernels and torch's own use one pool. Without it everything runs on the caller. */
#ifndef FORETELL_COMMON_H
#define FORETELL_COMMON_H

#if defined(__linux__)
#define _GNU_SOURCE
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#include <math.h>
#include <sched.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
#endif

typedef float f8 __attribute__((vector_size(32), aligned(4)));
typedef int32_t i8 __attribute__((vector_size(32), aligned(4)));
typedef float f4 __attribute__((vector_size(16), aligned(4)));

#define INLINE static inline __attribute__((always_inline))
#define LOAD(p) (*(const f8 *)(p))
#define STORE(p, v) (*(f8 *)(p) = (v))

/* ---- threads ------------------------------------------------------------------------------ */

typedef void (*gomp_parallel_fn)(void (*)(void *), void *, unsigned, unsigned);
extern gomp_parallel_fn ft_gomp_parallel;

typedef struct {
  void (*task)(void *, int64_t);
  void *arg;
  int64_t count, next;
} job_t;

/* Threads that run one function together (pass.c). Inside, every parallel_for is shared by all members,
 * who call it in the same order with equal arguments, and ends with a barrier. */
typedef struct {
  int32_t members, arrived, sleepers;
  int64_t *next; /* per parallel_for of the function: the next task; zero at first */
} team_t;
extern __thread team_t *ft_team;
extern __thread int64_t ft_member, ft_job, ft_phase;

#define SPINS 500 /* some 10 us; with a busy neighbour, 20000 made a step 10 times as long, this 2.5 times */

#if defined(__linux__)
static inline void sleep_until(team_t *team, int32_t all) {
  __atomic_fetch_add(&team->sleepers, 1, __ATOMIC_SEQ_CST);
  for (int32_t seen; (seen = __atomic_load_n(&team->arrived, __ATOMIC_SEQ_CST)) < all;)
    syscall(SYS_futex, &team->arrived, FUTEX_WAIT_PRIVATE, seen, 0, 0, 0);
  __atomic_fetch_sub(&team->sleepers, 1, __ATOMIC_SEQ_CST);
}
static inline void wake_sleepers(team_t *team) {
  if (__atomic_load_n(&team->sleepers, __ATOMIC_SEQ_CST) > 0)
    syscall(SYS_futex, &team->arrived, FUTEX_WAKE_PRIVATE, INT32_MAX, 0, 0, 0);
}
#else
static inline void sleep_until(team_t *team, int32_t all) {
  while (__atomic_load_n(&team->arrived, __ATOMIC_ACQUIRE) < all) sched_yield();
}
static inline void wake_sleepers(team_t *team) { (void)team; }
#endif

/* Waits for a while by looking, then asleep: a member that has lost its core gets this one. */
static inline void meet(team_t *team) {
  int32_t all = (int32_t)++ft_phase * team->members;
  if (__atomic_add_fetch(&team->arrived, 1, __ATOMIC_SEQ_CST) == all) {
    wake_sleepers(team);
    return;
  }
  for (int64_t spins = 0; spins < SPINS; spins++) {
    if (__atomic_load_n(&team->arrived, __ATOMIC_ACQUIRE) >= all) return;
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
  sleep_until(team, all);
}

static inline void work(void *p) {
  job_t *job = p;
  for (;;) {
    int64_t i = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED);
    if (i >= job->count) return;
    job->task(job->arg, i);
  }
}

static inline void team_for(team_t *team, int64_t count, int threads, void (*task)(void *, int64_t), void *arg) {
  int64_t *next = &team->next[ft_job++];
  if (threads < 2 || count < 2) {
    if (ft_member == 0) for (int64_t i = 0; i < count; i++) task(arg, i);
  } else {
    for (int64_t i; (i = __atomic_fetch_add(next, 1, __ATOMIC_RELAXED)) < count;) task(arg, i);
  }
  meet(team);
}

static inline void parallel_for(int64_t count, int threads, void (*task)(void *, int64_t), void *arg) {
  if (ft_team) {
    team_for(ft_team, count, threads, task, arg);
    return;
  }
  job_t job = {task, arg, count, 0};
  if (threads < 2 || count < 2 || !ft_gomp_parallel) work(&job);
  else ft_gomp_parallel(work, &job, (unsigned)threads, 0);
}

/* Below this many floats a second thread costs more than it saves. */
#define SERIAL_FLOATS 16384
INLINE int threads_for(int64_t floats, int threads) { return floats < SERIAL_FLOATS ? 1 : threads; }

/* A buffer of the calling thread; the next call in that thread reuses it. */
static __thread float *scratch = 0;
static __thread int64_t scratch_size = 0;

static inline float *get_scratch(int64_t floats) {
  if (floats > scratch_size) {
    free(scratch);
    scratch_size = floats + floats / 4;
    scratch = malloc((size_t)scratch_size * sizeof(float));
    if (!scratch) abort();
  }
  return scratch;
}

/* ---- vector helpers ----------------------------------------------------------------------- */

INLINE f8 splat(float x) { return (f8){x, x, x, x, x, x, x, x}; }

INLINE f8 fma8(f8 a, f8 b, f8 c) {
#if defined(__AVX2__) && defined(__FMA__)
  return (f8)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  f8 out;
  for (int i = 0; i < 8; i++) out[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return out;
#endif
}

#define PANEL 16 /* outputs side by side in a packed weight */

INLINE float hsum(f8 v) {
  f4 lo, hi;
  memcpy(&lo, &v, 16);
  memcpy(&hi, (char *)&v + 16, 16);
  f4 s = lo + hi;
  return (s[0] + s[2]) + (s[1] + s[3]);
}

/* exp(x) for x <= 0 (Cephes polynomial, 1 ulp); 0 below -87.3. Elementwise. */
INLINE f8 exp8(f8 x) {
  f8 lowest = splat(-87.3f);
  i8 dead = x < lowest;
  x = (f8)(((i8)x & ~dead) | ((i8)lowest & dead));
  /* truncation of a negative number minus a half rounds to the nearest integer */
  i8 n = __builtin_convertvector(fma8(x, splat(1.44269504088896341f), splat(-0.5f)), i8);
  f8 nf = __builtin_convertvector(n, f8);
  f8 r = fma8(nf, splat(-0.693359375f), x);
  r = fma8(nf, splat(2.12194440e-4f), r);
  f8 y = splat(1.9875691500e-4f);
  y = fma8(y, r, splat(1.3981999507e-3f));
  y = fma8(y, r, splat(8.3334519073e-3f));
  y = fma8(y, r, splat(4.1665795894e-2f));
  y = fma8(y, r, splat(1.6666665459e-1f));
  y = fma8(y, r, splat(5.0000001201e-1f));
  y = fma8(y, r * r, r + splat(1.0f));
  i8 power = (n + 127) << 23;
  y = y * (f8)power;
  return (f8)((i8)y & ~dead);
}

#endif
