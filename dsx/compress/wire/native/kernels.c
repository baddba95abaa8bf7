/* The arithmetic of group_kernels.py and mean_kernels.py in one pass over a vector, and that of an
 * outer step (method/in_one_pass.py).
 *
 * Every operation on a value is the eager kernels', in their order and in fp32, so the bytes and
 * the values are theirs: no product is contracted with a sum, sums over a group are of whole
 * numbers, in integers, and nothing is reordered. What is a NaN there is one here, with the sign
 * and payload that the processor gives it.
 *
 * The loops are plain C, which the compiler makes vector code of: once for each instruction set in
 * the list below, of which library.py takes the best that the processor has, or one by name. There
 * is no state, no allocation and no call of Python, so threads run side by side.
 */
#include <stddef.h>
#include <string.h>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "form.h"

enum { LONG = 1 << 18 }; /* elements */
enum { MOST_GROUPS = 8 }; /* that are coded together; of a ternary block there are 5 */

static const float MIN_SCALE = 0x1p-100f, LARGEST = 0x1.fffffep127f;

static inline float float_of(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline uint32_t bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

static inline int block_of(Kind kind, int size)
{
    return kind.grid == TERNARY ? kind.parts * size : size;
}

static inline int batch_of(Kind kind, int size)
{
    return kind.grid == TERNARY ? kind.parts * size : MOST_GROUPS * size;
}

static inline int64_t code_bytes(Kind kind, int64_t numel)
{
    return (numel + kind.parts - 1) / kind.parts * kind.word_bytes;
}

typedef void (*Encode)(const Form *, float *, float *, uint8_t *, int64_t, Key);
typedef void (*Decode)(const Form *, const uint8_t *, float *, int64_t, int);
typedef void (*Momentum)(const float *, float *, float *, int64_t, float, float, int);
typedef void (*Blend)(float *, const float *, int64_t, float, float);
typedef void (*Difference)(const float *, const float *, float *, int64_t);

#if defined(__x86_64__)
#define NAME(function) function##_sse4
#define TARGET __attribute__((target("sse4.1")))
#include "loops.h"
#include "steps.h"
#undef NAME
#undef TARGET
#define NAME(function) function##_avx2
#define TARGET __attribute__((target("avx2")))
#include "loops.h"
#include "steps.h"
#undef NAME
#undef TARGET
#define NAME(function) function##_avx512
#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))
#include "loops.h"
#include "steps.h"
#else
#define NAME(function) function##_plain
#define TARGET
#include "loops.h"
#include "steps.h"
#endif

static const struct {
    const char *name;
    Encode encode;
    Decode decode;
    Momentum momentum;
    Blend blend;
    Difference difference;
} SETS[] = { /* the best last */
#if defined(__x86_64__)
    {"sse4", encode_sse4, decode_sse4, momentum_sse4, blend_sse4, difference_sse4},
    {"avx2", encode_avx2, decode_avx2, momentum_avx2, blend_avx2, difference_avx2},
    {"avx512", encode_avx512, decode_avx512, momentum_avx512, blend_avx512, difference_avx512},
#else
    {"plain", encode_plain, decode_plain, momentum_plain, blend_plain, difference_plain},
#endif
};

/* The name of instruction set `index`, from 0 on; NULL behind the last. */
const char *dsx_wire_set(int index)
{
    return index < (int)(sizeof SETS / sizeof *SETS) ? SETS[index].name : NULL;
}

/* Whether this processor has instruction set `index`. */
int dsx_wire_has(int index)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
    switch (index) {
    case 0:
        return !!__builtin_cpu_supports("sse4.1");
    case 1:
        return !!__builtin_cpu_supports("avx2");
    default:
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    }
#else
    return index == 0;
#endif
}

/* Which of these kernels they are: another number with every change of what they do or take. */
int dsx_wire_version(void)
{
    return 2;
}

/* Bytes of a form, so that the caller knows that its own is the same. */
int dsx_wire_form_bytes(void)
{
    return (int)sizeof(Form);
}

/* Write the message of x[numel]; with a residual, which may be NULL, that is added to x before and
 * becomes what encoding lost. */
void dsx_wire_encode(int set, const Form *form, float *x, float *residual, uint8_t *out,
                     int64_t numel, uint32_t first, uint32_t second)
{
    SETS[set].encode(form, x, residual, out, numel, (Key){first, second});
}

/* Write the values of a message to out[numel], or add them to it. */
void dsx_wire_decode(int set, const Form *form, const uint8_t *data, float *out, int64_t numel,
                     int is_added)
{
    SETS[set].decode(form, data, out, numel, is_added);
}

/* Step a momentum buffer[numel] with grad[numel]; out[numel], which may be grad, is to be
 * subtracted. */
void dsx_step_momentum(int set, const float *grad, float *buffer, float *out, int64_t numel,
                       float lr, float mu, int looks_ahead)
{
    SETS[set].momentum(grad, buffer, out, numel, lr, mu, looks_ahead);
}

/* Mix anchor[numel] into local[numel]. */
void dsx_step_blend(int set, float *local, const float *anchor, int64_t numel, float kept,
                    float taken)
{
    SETS[set].blend(local, anchor, numel, kept, taken);
}

/* Write origin[numel] - local[numel] to out[numel]. */
void dsx_step_difference(int set, const float *origin, const float *local, float *out,
                         int64_t numel)
{
    SETS[set].difference(origin, local, out, numel);
}
