/* The sixteen outputs of a panel: one register where the processor has AVX-512, else two. All is done element
 * by element, so the bits are the same either way. */
#ifndef FORETELL_PANEL_H
#define FORETELL_PANEL_H
#include "common.h"

enum { FP32 = 0, FP16 = 1, BF16 = 2 };

#if defined(__AVX512F__) && defined(__AVX512BW__)
#define ROWS 12  /* rows that share a weight in registers */
#define PANELS 2 /* panels whose weights share a row's value there */

typedef __m512 p16;  /* floats */
typedef __m512i n16; /* 32-bit integers */
typedef __m512i d16; /* pairs of 16-bit integers */

INLINE p16 p_zero(void) { return _mm512_setzero_ps(); }
INLINE p16 p_load(const float *p) { return _mm512_loadu_ps(p); }
INLINE void p_store(float *p, p16 v) { _mm512_storeu_ps(p, v); }
INLINE p16 p_add(p16 a, p16 b) { return _mm512_add_ps(a, b); }
INLINE p16 p_times(p16 a, float x) { return _mm512_mul_ps(a, _mm512_set1_ps(x)); }
INLINE p16 p_fma(p16 a, p16 b, p16 sum) { return _mm512_fmadd_ps(a, b, sum); }
INLINE p16 p_axpy(float x, p16 a, p16 sum) { return _mm512_fmadd_ps(_mm512_set1_ps(x), a, sum); }

INLINE p16 p_widen(const void *w, int64_t at, const int kind) {
  if (kind == FP32) return p_load((const float *)w + at);
  __m256i half = _mm256_loadu_si256((const __m256i *)((const uint16_t *)w + at));
  if (kind == BF16) return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
  return _mm512_cvtph_ps(half);
}

INLINE n16 n_zero(void) { return _mm512_setzero_si512(); }
INLINE p16 n_floats(n16 v) { return _mm512_cvtepi32_ps(v); }
INLINE d16 d_widen(const int8_t *w) { return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)w)); }
INLINE n16 d_pairs(d16 w, int32_t both, n16 sum) {
#if defined(__AVX512VNNI__)
  return _mm512_dpwssd_epi32(sum, w, _mm512_set1_epi32(both));
#else
  return _mm512_add_epi32(sum, _mm512_madd_epi16(w, _mm512_set1_epi32(both)));
#endif
}

#else
#define ROWS 6
#define PANELS 1

typedef struct { f8 low, high; } p16;
typedef struct { i8 low, high; } n16;
typedef int16_t s16 __attribute__((vector_size(32), aligned(2)));
typedef struct { s16 low, high; } d16;

INLINE p16 p_zero(void) { return (p16){splat(0), splat(0)}; }
INLINE p16 p_load(const float *p) { return (p16){LOAD(p), LOAD(p + 8)}; }
INLINE void p_store(float *p, p16 v) { STORE(p, v.low); STORE(p + 8, v.high); }
INLINE p16 p_add(p16 a, p16 b) { return (p16){a.low + b.low, a.high + b.high}; }
INLINE p16 p_times(p16 a, float x) { return (p16){a.low * splat(x), a.high * splat(x)}; }
INLINE p16 p_fma(p16 a, p16 b, p16 sum) { return (p16){fma8(a.low, b.low, sum.low), fma8(a.high, b.high, sum.high)}; }
INLINE p16 p_axpy(float x, p16 a, p16 sum) { return p_fma((p16){splat(x), splat(x)}, a, sum); }

INLINE f8 widen(const void *w, int64_t at, const int kind) {
  typedef uint16_t h8 __attribute__((vector_size(16), aligned(2)));
  typedef uint32_t u8 __attribute__((vector_size(32), aligned(4)));
  if (kind == FP32) return LOAD((const float *)w + at);
  const uint16_t *p = (const uint16_t *)w + at;
  if (kind == BF16) return (f8)(__builtin_convertvector(*(const h8 *)p, u8) << 16);
#if defined(__F16C__)
  return (f8)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#elif defined(__aarch64__)
  f8 out;
  for (int i = 0; i < 8; i++) { _Float16 x; memcpy(&x, p + i, 2); out[i] = (float)x; }
  return out;
#else
  return splat(0); /* never packed as fp16: ft_has_fp16 */
#endif
}
INLINE p16 p_widen(const void *w, int64_t at, const int kind) {
  return (p16){widen(w, at, kind), widen(w, at + 8, kind)};
}

INLINE n16 n_zero(void) { return (n16){{0}, {0}}; }
INLINE p16 n_floats(n16 v) { return (p16){__builtin_convertvector(v.low, f8), __builtin_convertvector(v.high, f8)}; }

INLINE s16 widen8(const int8_t *w) {
#if defined(__AVX2__)
  return (s16)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)w));
#else
  typedef int8_t b16 __attribute__((vector_size(16), aligned(1)));
  return __builtin_convertvector(*(const b16 *)w, s16);
#endif
}
INLINE d16 d_widen(const int8_t *w) { return (d16){widen8(w), widen8(w + 16)}; }

INLINE i8 pairs(s16 a, s16 b, i8 sum) {
#if defined(__AVX2__)
  return sum + (i8)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
  for (int i = 0; i < 8; i++) sum[i] += (int32_t)a[2 * i] * b[2 * i] + (int32_t)a[2 * i + 1] * b[2 * i + 1];
  return sum;
#endif
}
/* sum += a[2i] * b[0] + a[2i + 1] * b[1], `both` being b's two 16-bit integers. */
INLINE n16 d_pairs(d16 w, int32_t both, n16 sum) {
  s16 x = (s16)(i8){both, both, both, both, both, both, both, both};
  return (n16){pairs(w.low, x, sum.low), pairs(w.high, x, sum.high)};
}
#endif

/* CALL(R) with R the number of rows of a pass as a constant. */
#if ROWS == 12
#define MORE_ROWS(CALL) \
  case 7: CALL(7); break; \
  case 8: CALL(8); break; \
  case 9: CALL(9); break; \
  case 10: CALL(10); break; \
  case 11: CALL(11); break; \
  case 12: CALL(12); break;
#else
#define MORE_ROWS(CALL)
#endif
#define FOR_ROWS(count, CALL) \
  switch (count) { \
    case 1: CALL(1); break; \
    case 2: CALL(2); break; \
    case 3: CALL(3); break; \
    case 4: CALL(4); break; \
    case 5: CALL(5); break; \
    case 6: CALL(6); break; \
    MORE_ROWS(CALL) \
  }

/* out[rows, stride] at one panel = sums[rows, PANEL] + bias (if any). */
INLINE void store_panel(float *out, int64_t stride, int64_t panel, const float *sums, const float *bias,
                        int64_t rows) {
  p16 more = bias ? p_load(bias + panel * PANEL) : p_zero();
  for (int64_t r = 0; r < rows; r++)
    p_store(out + r * stride + panel * PANEL, p_add(p_load(sums + r * PANEL), more));
}

#endif
