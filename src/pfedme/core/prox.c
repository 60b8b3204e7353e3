/* The proximal step of a network's mini-batch loss in sample space, as `Span` and `descend` of prox.py take it.

For each problem of a stack, K steps of gradient descent on f(θ) + λ/2 ‖θ − w‖² in the coordinates
A = p A_w + s A_0 + Cᵀ X of the first layer. A row of an activation belongs to a row of the batch X, and its length
is a multiple of LANES, with zeros at the end; `z` has the outputs of the first layer, and moves by
z ← z − α ((X Xᵀ) G + l2 z + λ (z − z_w)) as A does by A ← A − α (G X + l2 A + λ (A − A_w)).

Products keep a tile of their result in registers. Nothing here depends on the instruction set: the compiler
makes of a vector V what the machine has. */

#include <stdint.h>
#include <stdlib.h>

#include "xla/ffi/api/c_api.h"

enum { LANES = 8, DEEPEST = 16 };

typedef float V __attribute__((vector_size(4 * LANES)));
typedef float Loose __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t I __attribute__((vector_size(4 * LANES)));
typedef float Four __attribute__((vector_size(16)));
typedef int32_t Mask __attribute__((vector_size(16)));
typedef float LooseFour __attribute__((vector_size(16), aligned(4), may_alias));

#define INLINE static inline __attribute__((always_inline))

INLINE int64_t padded(int64_t n) { return (n + LANES - 1) / LANES * LANES; }
INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE V all(float a) { return a - (V){0}; }
INLINE V load(const float *p) { return *(const Loose *)p; }
INLINE void store(float *p, V v) { *(Loose *)p = v; }
INLINE V pick(I mask, V a, V b) { return (V)((mask & (I)a) | (~mask & (I)b)); }
INLINE V larger(V a, V b) { return pick(a > b, a, b); }

/* The first n < LANES numbers at p, and zeros. */
INLINE V load_part(const float *p, int64_t n) {
  Four first = {0}, rest = {0};
  int64_t at = n & 4;
  if (at) first = *(const LooseFour *)p;
  if (n > at) rest[0] = p[at];
  if (n > at + 1) rest[1] = p[at + 1];
  if (n > at + 2) rest[2] = p[at + 2];
  return at ? __builtin_shufflevector(first, rest, 0, 1, 2, 3, 4, 5, 6, 7)
            : __builtin_shufflevector(rest, first, 0, 1, 2, 3, 4, 5, 6, 7);
}

INLINE void store_part(float *p, V v, int64_t n) {
  float part[LANES];
  store(part, v);
  for (int64_t k = 0; k < n; k++) p[k] = part[k];
}

INLINE V swap4(V v) { return __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3); }
INLINE V swap2(V v) { return __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5); }
INLINE V swap1(V v) { return __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6); }

/* The sum, or the largest, of all numbers in every lane. */
INLINE V total(V v) { return v += swap4(v), v += swap2(v), v + swap1(v); }
INLINE V largest(V v) { return v = larger(v, swap4(v)), v = larger(v, swap2(v)), larger(v, swap1(v)); }

/* The sums of four vectors. */
INLINE Four totals(V a, V b, V c, V d) {
  V ab = __builtin_shufflevector(a, b, 0, 8, 2, 10, 4, 12, 6, 14) +
         __builtin_shufflevector(a, b, 1, 9, 3, 11, 5, 13, 7, 15);
  V cd = __builtin_shufflevector(c, d, 0, 8, 2, 10, 4, 12, 6, 14) +
         __builtin_shufflevector(c, d, 1, 9, 3, 11, 5, 13, 7, 15);
  V sum = __builtin_shufflevector(ab, cd, 0, 1, 8, 9, 4, 5, 12, 13) +
          __builtin_shufflevector(ab, cd, 2, 3, 10, 11, 6, 7, 14, 15);
  return __builtin_shufflevector(sum, sum, 0, 1, 2, 3) + __builtin_shufflevector(sum, sum, 4, 5, 6, 7);
}

/* eˣ for x ≤ 0, within 2 units of the last place; NaN for NaN. */
INLINE V exponential(V x) {
  V inside = larger(x, all(-87.0f));
  I n = __builtin_convertvector(inside * 1.44269504f - 0.5f, I);
  V k = __builtin_convertvector(n, V);
  V r = (x - k * 0.693359375f) + k * 2.12194440e-4f;
  V sum = all(1.0f / 5040);
  sum = sum * r + 1.0f / 720;
  sum = sum * r + 1.0f / 120;
  sum = sum * r + 1.0f / 24;
  sum = sum * r + 1.0f / 6;
  sum = sum * r + 0.5f;
  sum = sum * r + 1.0f;
  sum = sum * r + 1.0f;
  V found = sum * (V)((n + 127) << 23);
  return (V)(~(x < -87.0f) & (I)found);
}

/* --- Products ------------------------------------------------------------------------------------------ */

/* out[i][c] = ⟨a_i, b_c⟩ + bias_c for five rows of a, which are padded, and those of four of b, of length n, that are
there. */
INLINE void dots_tile(float *const out[5], const float *const a[5], const float *const b[4], int64_t n, Mask there,
                      Four bias) {
  V sum[5][4] = {0};
  int64_t k = 0;
  for (; k + LANES <= n; k += LANES)
    for (int c = 0; c < 4; c++) {
      V own = load(b[c] + k);
      for (int i = 0; i < 5; i++) sum[i][c] += load(a[i] + k) * own;
    }
  if (k < n)
    for (int c = 0; c < 4; c++) {
      V own = load_part(b[c] + k, n - k);
      for (int i = 0; i < 5; i++) sum[i][c] += load(a[i] + k) * own;
    }
  for (int i = 0; i < 5; i++)
    *(LooseFour *)out[i] = (Four)(there & (Mask)totals(sum[i][0], sum[i][1], sum[i][2], sum[i][3])) + bias;
}

/* out = a bᵀ + bias, an m_a × m_b matrix whose rows are padded, as those of a are, but with `fill`; b has rows of n
numbers that are step_b apart. If a is b, the part above the diagonal may be missing. */
static void dots(float *out, const float *a, int64_t m_a, const float *b, int64_t m_b, int64_t step_b, int64_t n,
                 const float *bias, float fill) {
  int64_t step = padded(m_b), step_a = padded(n);
  for (int64_t c = 0; c < step; c += 4) {
    const float *b_rows[4];
    Mask there;
    Four own;
    for (int k = 0; k < 4; k++) {
      b_rows[k] = b + least(c + k, m_b - 1) * step_b;
      there[k] = c + k < m_b ? -1 : 0;
      own[k] = c + k >= m_b ? fill : bias ? bias[c + k] : 0;
    }
    for (int64_t i = a == b ? least(c, m_a - 1) / 5 * 5 : 0; i < m_a; i += 5) {
      const float *a_rows[5];
      float *out_rows[5];
      for (int k = 0; k < 5; k++) {
        int64_t row = least(i + k, m_a - 1);
        a_rows[k] = a + row * step_a, out_rows[k] = out + row * step + c;
      }
      if (c < m_b) dots_tile(out_rows, a_rows, b_rows, n, there, own);
      else for (int k = 0; k < 5; k++) *(LooseFour *)out_rows[k] = own;
    }
  }
}

/* What `mix` does with a vector of its result. */
typedef struct {
  enum { SET, POSITIVE, STEP, POINT } kind; /* POSITIVE: the sum where `one` is positive, as ReLU's gradient */
  float *out;           /* SET, POSITIVE, POINT: the result; STEP: z */
  const float *one;     /* POSITIVE: z; STEP: z_w; POINT: A_w */
  const float *other;   /* POINT: A_0 */
  float keep, step, pull; /* STEP: z ← keep z − step (the sum) + pull z_w; POINT: keep A_w + pull A_0 + the sum */
} Use;

INLINE V used(const Use *use, V sum, V out, V one, V other) {
  if (use->kind == SET) return sum;
  if (use->kind == POSITIVE) return (V)((one > 0) & (I)sum);
  if (use->kind == STEP) return use->keep * out - use->step * sum + use->pull * one;
  return use->keep * one + use->pull * other + sum;
}

/* The part of `mix` for `rows` rows and `vectors` vectors of columns, the last of them with `last` columns. */
INLINE void mix_tile(const Use *use, int64_t at, int64_t step_out, const float *a, int64_t row_a, int64_t column_a,
                     const float *b, int64_t m, int64_t step_b, int rows, int vectors, int64_t last) {
  V sum[10][4] = {0};
  for (int64_t k = 0; k < m; k++) {
    V own[4];
    for (int v = 0; v < vectors; v++)
      own[v] = load(b + k * step_b + v * LANES);
    for (int i = 0; i < rows; i++)
      for (int v = 0; v < vectors; v++) sum[i][v] += a[i * row_a + k * column_a] * own[v];
  }
  for (int i = 0; i < rows; i++)
    for (int v = 0; v < vectors; v++) {
      int64_t here = at + i * step_out + v * LANES;
      if (last == LANES) {
        V out = use->kind == STEP ? load(use->out + here) : (V){0};
        V one = use->kind != SET ? load(use->one + here) : (V){0};
        V other = use->kind == POINT ? load(use->other + here) : (V){0};
        store(use->out + here, used(use, sum[i][v], out, one, other));
      } else {  /* only POINT has rows that are not padded */
        V one = load_part(use->one + here, last), other = load_part(use->other + here, last);
        store_part(use->out + here, used(use, sum[i][v], one, one, other), last);
      }
    }
}

#define ROWS(count, vectors, last)                                                                         \
  for (; i + (count) <= m_a; i += (count))                                                                 \
  mix_tile(&use, i * step_out + c, step_out, a + i * row_a, row_a, column_a, b + c, m, step_b, count, vectors, last)

/* The rows Σ_k a_ik b_k for i < m_a, of n columns, where a_ik = a[i row_a + k column_a] and k < m. */
INLINE void mix(Use use, int64_t step_out, const float *a, int64_t m_a, int64_t row_a, int64_t column_a,
                const float *b, int64_t m, int64_t step_b, int64_t n) {
  for (int64_t c = 0; c < n;) {
    int64_t left = (n - c) / LANES, i = 0;
    if (left >= 4) {
      ROWS(5, 4, LANES);
      ROWS(1, 4, LANES);
      c += 4 * LANES;
    } else if (left == 3) {
      ROWS(5, 3, LANES);
      ROWS(1, 3, LANES);
      c += 3 * LANES;
    } else if (left == 2) {
      ROWS(10, 2, LANES);
      ROWS(5, 2, LANES);
      ROWS(1, 2, LANES);
      c += 2 * LANES;
    } else if (left == 1) {
      ROWS(10, 1, LANES);
      ROWS(1, 1, LANES);
      c += LANES;
    } else {
      ROWS(5, 1, n - c);
      ROWS(1, 1, n - c);
      c = n;
    }
  }
}

/* --- One problem --------------------------------------------------------------------------------------- */

typedef struct {
  int64_t B, K, layers, n[DEEPEST + 1]; /* n[l] inputs and n[l + 1] outputs of layer l */
  int classes;                          /* 0 for a regression */
} Shape;

/* A layer's weights, with padded rows, and biases. */
typedef struct {
  float *W, *b;
} Layer;

typedef struct {
  float *x, *gram, *z_w, *C, *target, *share;
  float *z[DEEPEST]; /* the outputs of each layer, and their gradients */
  float *G[DEEPEST];
  float *a[DEEPEST]; /* the inputs of each layer but the first */
  Layer theta[DEEPEST], w[DEEPEST], g[DEEPEST]; /* of each layer but the first */
} Scratch;

/* Divides `from` into the arrays of a `Scratch`, and returns how many numbers they have. */
static int64_t divide(Scratch *it, const Shape *s, float *from) {
  int64_t used = 0;
#define TAKE(name, size) (name) = from + used, used += ((size) + 15) / 16 * 16
  TAKE(it->x, s->B * padded(s->n[0]));
  TAKE(it->target, s->B * padded(s->n[s->layers]));
  TAKE(it->share, s->B);
  TAKE(it->gram, s->B * padded(s->B));
  TAKE(it->z_w, s->B * padded(s->n[1]));
  TAKE(it->C, s->B * padded(s->n[1]));
  for (int64_t l = 0; l < s->layers; l++) {
    TAKE(it->z[l], s->B * padded(s->n[l + 1]));
    TAKE(it->G[l], s->B * padded(s->n[l + 1]));
    if (l == 0) continue;
    TAKE(it->a[l], s->B * padded(s->n[l]));
    Layer *own[] = {&it->theta[l], &it->w[l], &it->g[l]};
    for (int k = 0; k < 3; k++) {
      TAKE(own[k]->W, s->n[l + 1] * padded(s->n[l]));
      TAKE(own[k]->b, padded(s->n[l + 1]));
    }
  }
#undef TAKE
  return used;
}

/* Copies m rows of n numbers between matrices whose rows are `step_to` and `step_from` apart; pads with zeros. */
static void copy(float *to, int64_t step_to, const float *from, int64_t step_from, int64_t m, int64_t n) {
  for (int64_t i = 0; i < m; i++) {
    __builtin_memcpy(to + i * step_to, from + i * step_from, 4 * n);
    for (int64_t k = n; k < step_to && step_to != n; k++) to[i * step_to + k] = 0;
  }
}

/* G = scale (softmax(z) − [y]), or scale (z − y) for a regression, where `target` is scale [y] or scale y. Each pass
is short, so that the processor works on several rows at a time. */
static void slope(float *G, const float *z, const float *target, const float *scale, float *share, const Shape *s) {
  int64_t step = padded(s->n[s->layers]);
  if (!s->classes) {
    for (int64_t i = 0; i < s->B; i++) G[i * step] = scale[i] * z[i * step] - target[i * step];
    return;
  }
  for (int64_t i = 0; i < s->B; i++) {
    V top = load(z + i * step);
    for (int64_t c = LANES; c < step; c += LANES) top = larger(load(z + i * step + c), top);
    share[i] = largest(top)[0];
  }
  for (int64_t i = 0; i < s->B; i++) {
    V sum = {0};
    for (int64_t c = i * step; c < (i + 1) * step; c += LANES) {
      V e = exponential(load(z + c) - share[i]);
      store(G + c, e), sum += e;
    }
    share[i] = scale[i] / total(sum)[0];
  }
  for (int64_t i = 0; i < s->B; i++)
    for (int64_t c = i * step; c < (i + 1) * step; c += LANES)
      store(G + c, load(G + c) * share[i] - load(target + c));
}

/* θ ← keep θ − α g + pull w for `size` numbers. */
static void step_by(float *theta, const float *g, const float *w, int64_t size, float keep, float alpha, float pull) {
  for (int64_t k = 0; k < size; k += LANES)
    store(theta + k, keep * load(theta + k) - alpha * load(g + k) + pull * load(w + k));
}

/* θ for one problem; `w`, `start` and `theta` are its layers, weights and biases in turn. */
static void solve(const Shape *s, Scratch *it, const float *scale, const float *numbers, const float *const *w,
                  const float *const *start, float *const *theta) {
  int64_t B = s->B, L = s->layers, d = s->n[0], D = padded(d), h = s->n[1], H = padded(h);
  float lam = numbers[0], alpha = numbers[1], l2 = numbers[2];
  float keep = 1 - alpha * (l2 + lam), pull = alpha * lam, p = 0, q = 1;
  float last_fill = s->classes ? -1e30f : 0; /* scores of no class, whose share is 0 */
  float first_fill = L == 1 ? last_fill : 0;
  dots(it->z_w, it->x, B, w[0], h, d, d, w[1], first_fill);
  dots(it->z[0], it->x, B, start[0], h, d, d, start[1], first_fill);
  dots(it->gram, it->x, B, it->x, B, D, D, NULL, 0);
  for (int64_t i = 0; i < B; i++)
    for (int64_t k = 0; k <= i; k++) {
      float *gram = it->gram, own = gram[i * padded(B) + k] + 1;
      gram[i * padded(B) + k] = gram[k * padded(B) + i] = own;
    }
  for (int64_t k = 0; k < B * H; k += LANES) store(it->C + k, (V){0});
  if (!s->classes)
    for (int64_t k = 0; k < B * padded(s->n[L]); k += LANES) store(it->G[L - 1] + k, (V){0});
  for (int64_t l = 1; l < L; l++) {
    int64_t m = s->n[l + 1], n = s->n[l];
    copy(it->w[l].W, padded(n), w[2 * l], n, m, n), copy(it->w[l].b, padded(m), w[2 * l + 1], m, 1, m);
    copy(it->theta[l].W, padded(n), start[2 * l], n, m, n);
    copy(it->theta[l].b, padded(m), start[2 * l + 1], m, 1, m);
  }
  for (int64_t k = 0; k < s->K; k++) {
    for (int64_t l = 1; l < L; l++) {
      int64_t n = padded(s->n[l]);
      for (int64_t j = 0; j < B * n; j += LANES) store(it->a[l] + j, larger(load(it->z[l - 1] + j), (V){0}));
      dots(it->z[l], it->a[l], B, it->theta[l].W, s->n[l + 1], n, n, it->theta[l].b, l == L - 1 ? last_fill : 0);
    }
    slope(it->G[L - 1], it->z[L - 1], it->target, scale, it->share, s);
    for (int64_t l = L - 1; l > 0; l--) {
      int64_t m = s->n[l + 1], M = padded(m), n = padded(s->n[l]);
      mix((Use){SET, it->g[l].W}, n, it->G[l], m, 1, M, it->a[l], B, n, n);
      for (int64_t c = 0; c < M; c += LANES) {
        V sum = {0};
        for (int64_t i = 0; i < B; i++) sum += load(it->G[l] + i * M + c);
        store(it->g[l].b + c, sum);
      }
      Use positive = {POSITIVE, it->G[l - 1], it->z[l - 1]};
      mix(positive, n, it->G[l], B, M, 1, it->theta[l].W, m, n, n);
      step_by(it->theta[l].W, it->g[l].W, it->w[l].W, m * n, keep, alpha, pull);
      step_by(it->theta[l].b, it->g[l].b, it->w[l].b, M, keep, alpha, pull);
    }
    Use move = {STEP, it->z[0], it->z_w, NULL, keep, alpha, pull};
    mix(move, H, it->gram, B, padded(B), 1, it->G[0], B, H, H);
    step_by(it->C, it->G[0], it->C, B * H, keep, alpha, 0);
    p = keep * p + pull, q = keep * q;
  }
  Use point = {POINT, theta[0], w[0], start[0], p, 0, q};
  mix(point, d, it->C, h, 1, H, it->x, B, D, d);
  for (int64_t c = 0; c < h; c++) {
    float sum = p * w[1][c] + q * start[1][c];
    for (int64_t i = 0; i < B; i++) sum += it->C[i * H + c];
    theta[1][c] = sum;
  }
  for (int64_t l = 1; l < L; l++) {
    int64_t m = s->n[l + 1], n = s->n[l];
    copy(theta[2 * l], n, it->theta[l].W, padded(n), m, n), copy(theta[2 * l + 1], m, it->theta[l].b, padded(m), 1, m);
  }
}

/* --- XLA ----------------------------------------------------------------------------------------------- */

static XLA_FFI_Error *failed(const XLA_FFI_CallFrame *frame, const char *message) {
  XLA_FFI_Error_Create_Args args = {XLA_FFI_Error_Create_Args_STRUCT_SIZE, NULL, message,
                                    XLA_FFI_Error_Code_INVALID_ARGUMENT};
  return frame->api->XLA_FFI_Error_Create(&args);
}

/* Where an array of problem k of a stack begins; its own dimensions are the last `own`, and an axis of the stack
along which it has one element is shared. */
static void *part_of(const XLA_FFI_Buffer *it, int64_t own, const int64_t *stack, int64_t k) {
  int64_t stacked = it->rank - own, size = 4, offset = 0; /* all numbers have four bytes */
  for (int64_t j = stacked; j < it->rank; j++) size *= it->dims[j];
  for (int64_t j = stacked - 1; j >= 0; k /= stack[j], j--) {
    offset += it->dims[j] == 1 ? 0 : k % stack[j] * size;
    size *= it->dims[j];
  }
  return (char *)it->data + offset;
}

/* A store of rows x and their labels y, the rows of the batch in it, their scale and the numbers λ, α, l2 of each
problem, then the layers of w, then those of start; returns the layers of θ. The first axes of all of them are the
stack. Attributes: K, and whether labels are classes. */
XLA_FFI_Error *pfedme_prox(XLA_FFI_CallFrame *frame) {
  for (XLA_FFI_Extension_Base *e = frame->extension_start; e; e = e->next)
    if (e->type == XLA_FFI_Extension_Metadata) {
      XLA_FFI_Metadata *own = ((XLA_FFI_Metadata_Extension *)e)->metadata;
      own->api_version.major_version = XLA_FFI_API_MAJOR;
      own->api_version.minor_version = XLA_FFI_API_MINOR;
      return NULL;
    }
  XLA_FFI_Buffer **args = (XLA_FFI_Buffer **)frame->args.args, **rets = (XLA_FFI_Buffer **)frame->rets.rets;
  int64_t leaves = frame->rets.size;
  int64_t stacked = args[2]->rank - 1;
  Shape s = {args[2]->dims[stacked], 0, leaves / 2, {args[0]->dims[stacked + 1]}, 0};
  if (s.layers > DEEPEST) return failed(frame, "too many layers");
  for (int64_t l = 0; l < s.layers; l++) s.n[l + 1] = rets[2 * l + 1]->dims[stacked];
  for (int64_t k = 0; k < frame->attrs.size; k++) {
    int64_t value = *(int64_t *)((XLA_FFI_Scalar *)frame->attrs.attrs[k])->value;
    if (frame->attrs.names[k]->ptr[0] == 'K') s.K = value;
    else s.classes = value != 0;
  }
  int64_t problems = 1, *stack = rets[0]->dims;
  for (int64_t k = 0; k < stacked; k++) problems *= stack[k];
  Scratch it;
  float *memory = aligned_alloc(64, 4 * divide(&it, &s, NULL));
  if (!memory) return failed(frame, "not enough memory");
  divide(&it, &s, memory);
  for (int64_t k = 0; k < problems; k++) {
    const float *x = part_of(args[0], 2, stack, k), *layers[4 * DEEPEST];
    const void *y = part_of(args[1], 1, stack, k);
    const int32_t *rows = part_of(args[2], 1, stack, k);
    const float *scale = part_of(args[3], 1, stack, k);
    float *theta[2 * DEEPEST];
    for (int64_t i = 0; i < s.B; i++) {
      copy(it.x + i * padded(s.n[0]), padded(s.n[0]), x + rows[i] * s.n[0], 0, 1, s.n[0]);
      float *target = it.target + i * padded(s.n[s.layers]);
      for (int64_t c = 0; c < padded(s.n[s.layers]); c++)
        target[c] = s.classes ? (c == ((const int32_t *)y)[rows[i]] ? scale[i] : 0)
                    : c       ? 0
                              : scale[i] * ((const float *)y)[rows[i]];
    }
    for (int64_t j = 0; j < 2 * leaves; j++) layers[j] = part_of(args[5 + j], 2 - j % 2, stack, k);
    for (int64_t j = 0; j < leaves; j++) theta[j] = part_of(rets[j], 2 - j % 2, stack, k);
    solve(&s, &it, scale, part_of(args[4], 1, stack, k), layers, layers + leaves, theta);
  }
  free(memory);
  return NULL;
}
