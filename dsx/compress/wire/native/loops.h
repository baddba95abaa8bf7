/* The loops of one instruction set: included by kernels.c for each, with NAME and TARGET set.
 *
 * A group is coded in three steps: its scale, the digits of its elements (a byte each, what a code
 * is sent as), and the packing of a block's digits. Functions that take a constant `form` kind are
 * inlined into one loop for each kind.
 */
#define INLINE static inline __attribute__((always_inline)) TARGET

INLINE float NAME(largest)(const float *restrict x, int n)
{
    int32_t most = 0; /* as bits: a NaN is above infinity, and is kept */
    for (int j = 0; j < n; j++) {
        int32_t bits = (int32_t)(bits_of(x[j]) & 0x7FFFFFFF);
        most = bits > most ? bits : most;
    }
    return float_of((uint32_t)most);
}

INLINE float NAME(to_bf16)(float scale, uint32_t carry, float largest_scale)
{
    scale = float_of((bits_of(scale) + carry) & 0xFFFF0000);
    scale = scale < MIN_SCALE ? MIN_SCALE : scale;
    return scale > largest_scale ? largest_scale : scale;
}

/* How many elements group g of so many has: the last one may be short. */
INLINE int NAME(length)(int g, int size, int filled)
{
    return filled - g * size < size ? filled - g * size : size;
}

INLINE int32_t NAME(sum_of_steps)(int is_squared, const float *restrict x, int n, float count)
{
    int32_t total = 0;
    for (int j = 0; j < n; j++) {
        int32_t whole = (int32_t)(__builtin_fabsf(x[j]) * count + 0.5f);
        total += is_squared ? whole * whole : whole;
    }
    return total;
}

/* Scales that are the root mean square of a group, or with one level its mean |x|; from whole
 * steps of its top. */
INLINE void NAME(mean_scales)(Kind kind, const Form *form, int size, int filled,
                              const float *restrict x, const float *restrict tops,
                              float *restrict scales, int groups)
{
    int is_squared = kind.num_levels > 1;
    float steps[MOST_GROUPS], counts[MOST_GROUPS], means[MOST_GROUPS];
    int32_t totals[MOST_GROUPS];
    for (int g = 0; g < groups; g++) {
        float top = tops[g] < MIN_SCALE ? MIN_SCALE : tops[g];
        steps[g] = top * (is_squared ? 0x1p-8f : 0x1p-15f);
        counts[g] = 1 / steps[g];
    }
    for (int g = 0; g < groups; g++)
        totals[g] = NAME(sum_of_steps)(is_squared, x + g * size, NAME(length)(g, size, filled),
                                       counts[g]);
    for (int g = 0; g < groups; g++)
        means[g] = (tops[g] <= LARGEST ? (float)totals[g] : tops[g] * 0.0f) *
                   (float)(1.0 / NAME(length)(g, size, filled));
    for (int g = 0; g < groups; g++) {
        float mean = is_squared ? __builtin_sqrtf(means[g]) : means[g];
        scales[g] = NAME(to_bf16)(mean * steps[g], 0x8000, form->largest_scale);
    }
}

/* Scales that are the mean of what exceeds 0.7 times the mean |x|; those `thresholds`, in steps of
 * which 1 has `counts`. */
INLINE void NAME(ternary_scales)(const Form *form, int size, int filled, const float *restrict x,
                                 const float *restrict tops, float *restrict scales,
                                 float *restrict counts, float *restrict thresholds, int groups)
{
    for (int g = 0; g < groups; g++) {
        int n = NAME(length)(g, size, filled), is_finite = tops[g] <= LARGEST;
        float step = (tops[g] < MIN_SCALE ? MIN_SCALE : tops[g]) * 0x1p-15f, count = 1 / step;
        const float *restrict own = x + g * size;
        int32_t total = 0, kept = 0, num_kept = 0;
        for (int j = 0; j < n; j++)
            total += (int32_t)(__builtin_fabsf(own[j]) * count);
        counts[g] = count;
        thresholds[g] = (is_finite ? (float)total : tops[g] * 0.0f) * (float)(0.7 / n);
        for (int j = 0; j < n; j++) {
            int32_t whole = (int32_t)(__builtin_fabsf(own[j]) * count);
            int32_t is_kept = (float)whole > thresholds[g];
            kept += is_kept ? whole : 0;
            num_kept += is_kept;
        }
        num_kept = num_kept ? num_kept : 1;
        scales[g] = (is_finite ? (float)kept / (float)num_kept : tops[g] * 0.0f) * step;
        scales[g] = NAME(to_bf16)(scales[g], 0xFFFF, form->largest_scale);
    }
}

/* The rank of a scaled value in a small float's grid: straight lines between powers of two. */
INLINE float NAME(curve)(float x, int num_bends, int mantissa_bits)
{
    float power = (float)(1 << mantissa_bits), rank, size, below;
    if (num_bends <= 5) {
        x *= 1 / (float)(1 << num_bends);
        rank = x;
#pragma GCC unroll 8
        for (int bend = 0; bend < num_bends; bend++) {
            float part = x < -1 ? -1 : x;
            rank += part > 1 ? 1 : part;
            x *= 2;
        }
        return rank * power;
    }
    size = __builtin_fabsf(x);
    rank = (float)(int32_t)(bits_of(size) - (126u << 23)) * 0x1p-23f;
    below = size > 1 ? 1 : size;
    rank = rank > below ? rank : below;
    return __builtin_copysignf(rank * power, x);
}

/* The value of a whole rank. */
INLINE float NAME(uncurve)(int32_t rank, int mantissa_bits)
{
    uint32_t size = rank < 0 ? 0u - (uint32_t)rank : (uint32_t)rank;
    int32_t exponent = (int32_t)((uint32_t)((int32_t)size >> mantissa_bits) - 1);
    exponent = exponent < 0 ? 0 : exponent;
    size -= (uint32_t)exponent << mantissa_bits;
    size = exponent > 31 ? 0 : size << (exponent & 31); /* of what was not finite */
    return (float)(int32_t)(rank < 0 ? 0u - size : size) * (1 / (float)(1 << mantissa_bits));
}

INLINE float NAME(noise)(uint32_t index, Key key)
{
    uint32_t bits = index ^ key.first;
    bits = (bits ^ bits >> 16) * 0x85EBCA6Bu + key.second;
    bits = (bits ^ bits >> 13) * 0xC2B2AE35u + key.second;
    bits ^= bits >> 16;
    return (float)(int32_t)(bits >> 8) * 0x1p-24f;
}

/* The codes of n elements of an integer grid or a small float, as whole floats. */
INLINE void NAME(codes_of)(Kind kind, const Form *form, int is_stochastic, const float *restrict x,
                           float *restrict codes, int n, float inverse, uint32_t start, Key key)
{
    float top = form->top_rank;
    for (int j = 0; j < n; j++) {
        float scaled = x[j] * inverse;
        if (kind.grid == SMALL_FLOATS)
            scaled = NAME(curve)(scaled, kind.num_bends, kind.mantissa_bits);
        if (is_stochastic) {
            float code = __builtin_floorf(scaled + NAME(noise)(start + (uint32_t)j, key));
            code = code < -top ? -top : code;
            codes[j] = code > top ? top : code;
        } else {
            codes[j] = __builtin_floorf(scaled + 0.5f);
        }
    }
}

/* What is sent of two codes in a byte of which one is not finite: the eager sum is not, either. */
static TARGET void NAME(spoil)(const float *codes, uint8_t *digits, int n, int width)
{
    for (int j = 0; j < n; j++) {
        int other = j < width ? j + width : j - width;
        if (!(__builtin_fabsf(codes[j]) < 0x1p31f))
            digits[j] = digits[other] = 8;
    }
}

INLINE void NAME(levels_of)(Kind kind, const Form *form, const float *restrict x, float scale,
                            float *restrict values, uint8_t *restrict digits, int n)
{
    const float *levels = form->levels, *cuts = form->cuts;
    float l0 = levels[0], l1 = levels[1], l2 = levels[2], l3 = levels[3];
    float cut0 = cuts[0] * scale, cut1 = cuts[1] * scale, cut2 = cuts[2] * scale;
    for (int j = 0; j < n; j++) {
        float size = __builtin_fabsf(x[j]), level = l0;
        int32_t above = 0, sign = (int32_t)bits_of(x[j]) >> 31;
        if (kind.num_levels > 1) {
            level = size >= cut0 ? l1 : level;
            above += size >= cut0;
        }
        if (kind.num_levels > 2) {
            level = size >= cut1 ? l2 : level;
            level = size >= cut2 ? l3 : level;
            above += (size >= cut1) + (size >= cut2);
            above = (above ^ 2 ^ (sign & 3)) | (sign & 4);
        } else {
            above ^= sign;
        }
        values[j] = float_of(bits_of(level) | (bits_of(x[j]) & 0x80000000));
        digits[j] = (uint8_t)(above & (2 * kind.num_levels - 1));
    }
}

/* Write the digits of a group, and with a residual what they lose. */
INLINE void NAME(encode_group)(Kind kind, const Form *form, const float *restrict x,
                               float *restrict residual, uint8_t *restrict digits, int n, float top,
                               float scale, float inverse, float threshold, uint32_t start, Key key)
{
    float codes[256];
    if (kind.grid == TERNARY) {
        for (int j = 0; j < n; j++) {
            int32_t is_kept = __builtin_floorf(__builtin_fabsf(x[j]) * inverse) > threshold;
            int32_t code = is_kept ? ((int32_t)bits_of(x[j]) < 0 ? -1 : 1) : 0;
            codes[j] = (float)code;
            digits[j] = (uint8_t)(code + 1);
        }
    } else if (kind.grid == LEVELS) {
        NAME(levels_of)(kind, form, x, scale, codes, digits, n);
    } else {
        if (form->is_stochastic)
            NAME(codes_of)(kind, form, 1, x, codes, n, inverse, start, key);
        else
            NAME(codes_of)(kind, form, 0, x, codes, n, inverse, start, key);
        for (int j = 0; j < n; j++)
            digits[j] = (uint8_t)((int32_t)codes[j] & (kind.parts == 1 ? 255 : 15));
        if (kind.parts == 2 && !(top <= LARGEST))
            NAME(spoil)(codes, digits, n, (n + 1) / 2);
    }
    if (residual && kind.grid == SMALL_FLOATS)
        for (int j = 0; j < n; j++)
            residual[j] = x[j] - NAME(uncurve)((int32_t)codes[j], kind.mantissa_bits) * scale;
    else if (residual)
        for (int j = 0; j < n; j++)
            residual[j] = x[j] - codes[j] * scale;
}

INLINE void NAME(pack)(Kind kind, const uint8_t *restrict digits,
                       uint8_t *restrict out, int width)
{
    if (kind.word_bytes == 3) { /* two bits of each half, then the third of all */
        for (int j = 0; j < width; j++) {
            uint8_t low = 0, high = 0, signs = 0;
#pragma GCC unroll 8
            for (int k = 0; k < 8; k++)
                signs |= (uint8_t)(digits[k * width + j] >> 2 << k);
#pragma GCC unroll 8
            for (int k = 0; k < 4; k++) {
                low |= (uint8_t)((digits[k * width + j] & 3) << 2 * k);
                high |= (uint8_t)((digits[(4 + k) * width + j] & 3) << 2 * k);
            }
            out[j] = low;
            out[width + j] = high;
            out[2 * width + j] = signs;
        }
        return;
    }
    for (int j = 0; j < width; j++) {
        uint8_t word = 0;
#pragma GCC unroll 8
        for (int k = kind.parts - 1; k >= 0; k--) {
            uint8_t digit = digits[k * width + j];
            word = (uint8_t)(kind.parts == 5 ? 3 * word + digit : (word << 8 / kind.parts) | digit);
        }
        out[j] = word;
    }
}

INLINE void NAME(unpack)(Kind kind, const uint8_t *restrict data, uint8_t *restrict digits, int width)
{
    for (int j = 0; j < width; j++) {
        uint8_t word = data[j];
#pragma GCC unroll 8
        for (int k = 0; k < kind.parts; k++) {
            uint8_t digit = (uint8_t)(word & ((1 << 8 / kind.parts) - 1));
            if (kind.word_bytes == 3) {
                uint8_t low = data[k / 4 * width + j], signs = data[2 * width + j];
                digit = (uint8_t)((low >> 2 * (k % 4) & 3) | (signs >> k & 1) << 2);
            } else if (kind.parts == 5) {
                uint8_t above = (uint8_t)(word * 171 >> 9); /* a third */
                digit = (uint8_t)(word - 3 * above);
                word = above;
            } else {
                word = (uint8_t)(word >> 8 / kind.parts);
            }
            digits[k * width + j] = digit;
        }
    }
}

/* The number in the grid that a digit stands for. */
INLINE float NAME(value_of)(Kind kind, const float *levels, uint8_t digit)
{
    int32_t code = kind.parts == 1 ? (int8_t)digit : (digit ^ 8) - 8, sign;
    float level = levels[0];
    switch (kind.grid) {
    case INTEGERS:
        return (float)code;
    case SMALL_FLOATS:
        return NAME(uncurve)(code, kind.mantissa_bits);
    case TERNARY:
        return (float)(digit - 1);
    }
    sign = digit & kind.num_levels ? -1 : 0;
    code = kind.num_levels == 4 ? (digit ^ 2 ^ sign) & 3 : digit ^ sign;
    if (kind.num_levels == 4)
        level = code & 2 ? (code & 1 ? levels[3] : levels[2])
                         : (code & 1 ? levels[1] : levels[0]);
    else if (kind.num_levels == 2)
        level = code & 1 ? levels[1] : levels[0];
    return float_of(bits_of(level) ^ ((uint32_t)sign & 0x80000000));
}

/* Code a batch of groups, `filled` elements; what does not fill one comes last in a vector. */
INLINE void NAME(encode_batch)(Kind kind, const Form *form, int size, int filled,
                               float *restrict x, float *restrict residual,
                               uint8_t *restrict words, uint8_t *restrict scale_bytes,
                               uint32_t start, Key key)
{
    float tops[MOST_GROUPS], scales[MOST_GROUPS], inverses[MOST_GROUPS], thresholds[MOST_GROUPS];
    uint8_t buffer[MOST_GROUPS * 256 + 8], *digits = kind.parts == 1 ? words : buffer;
    int groups = (filled + size - 1) / size, block = block_of(kind, size);
    for (int j = filled; j < filled + kind.parts; j++) /* what may be missing of the last words */
        buffer[j] = kind.grid == TERNARY ? 1 : kind.word_bytes == 3 ? 2 : 0;
    for (int j = 0; residual && j < filled; j++)
        x[j] += residual[j];
    for (int g = 0; g < groups; g++)
        tops[g] = NAME(largest)(x + g * size, NAME(length)(g, size, filled));
    if (kind.grid == TERNARY)
        NAME(ternary_scales)(form, size, filled, x, tops, scales, inverses, thresholds, groups);
    else if (kind.grid == LEVELS)
        NAME(mean_scales)(kind, form, size, filled, x, tops, scales, groups);
    else
        for (int g = 0; g < groups; g++) {
            scales[g] = NAME(to_bf16)(tops[g] / form->top_value, 0xFFFF, form->largest_scale);
            inverses[g] = 1 / scales[g];
        }
    for (int g = 0; g < groups; g++) {
        uint16_t sent;
        scales[g] *= tops[g] > 0 ? 1.0f : 0.0f;
        sent = scales[g] == scales[g] ? (uint16_t)(bits_of(scales[g]) >> 16) : 0xFFFF;
        memcpy(scale_bytes + 2 * g, &sent, 2);
    }
    for (int g = 0; g < groups; g++)
        NAME(encode_group)(kind, form, x + g * size, residual ? residual + g * size : NULL,
                           digits + g * size, NAME(length)(g, size, filled), tops[g], scales[g],
                           inverses[g], thresholds[g], start + (uint32_t)(g * size), key);
    for (int first = 0; kind.parts > 1 && first < filled; first += block) {
        int n = filled - first < block ? filled - first : block;
        int width = (n + kind.parts - 1) / kind.parts;
        NAME(pack)(kind, digits + first, words + code_bytes(kind, first), width);
    }
}

INLINE void NAME(decode_batch)(Kind kind, const float *levels, int size, int filled,
                               const uint8_t *restrict words, const uint8_t *restrict scale_bytes,
                               float *restrict out, int is_added)
{
    uint8_t buffer[MOST_GROUPS * 256 + 8];
    const uint8_t *digits = kind.parts == 1 ? words : buffer;
    int groups = (filled + size - 1) / size, block = block_of(kind, size);
    for (int first = 0; kind.parts > 1 && first < filled; first += block) {
        int n = filled - first < block ? filled - first : block;
        NAME(unpack)(kind, words + code_bytes(kind, first), buffer + first,
                     (n + kind.parts - 1) / kind.parts);
    }
    for (int g = 0; g < groups; g++) {
        int n = NAME(length)(g, size, filled);
        float *restrict own = out + g * size, scale;
        const uint8_t *restrict of = digits + g * size;
        uint16_t sent;
        memcpy(&sent, scale_bytes + 2 * g, 2);
        scale = float_of((uint32_t)sent << 16);
        if (is_added)
            for (int j = 0; j < n; j++)
                own[j] += NAME(value_of)(kind, levels, of[j]) * scale;
        else
            for (int j = 0; j < n; j++)
                own[j] = NAME(value_of)(kind, levels, of[j]) * scale;
    }
}

INLINE void NAME(encode_whole)(Kind kind, const Form *form, int size, float *x, float *residual,
                               uint8_t *out, int64_t numel, Key key)
{
    int batch = batch_of(kind, size);
    uint8_t *scales = out + code_bytes(kind, numel);
    for (int64_t start = 0; start + batch <= numel; start += batch)
        NAME(encode_batch)(kind, form, size, batch, x + start, residual ? residual + start : NULL,
                           out + code_bytes(kind, start), scales + start / size * 2,
                           (uint32_t)start, key);
}

INLINE void NAME(decode_whole)(Kind kind, const Form *form, int size, const uint8_t *data,
                               float *out, int64_t numel, int is_added)
{
    int batch = kind.parts == 8 ? size : batch_of(kind, size); /* more of them are not faster */
    const uint8_t *scales = data + code_bytes(kind, numel);
    const float levels[] = {form->levels[0], form->levels[1], form->levels[2], form->levels[3]};
    for (int64_t start = 0; start + batch <= numel; start += batch)
        NAME(decode_batch)(kind, levels, size, batch, data + code_bytes(kind, start),
                           scales + start / size * 2, out + start, is_added);
}

/* Of each kind of format and size of a group a loop of its own. */
#define EACH_SIZE(CALL, kind)                                                                      \
    case kind:                                                                                     \
        switch (form->group_size) {                                                                \
        case 32:                                                                                   \
            CALL(KINDS[kind], 32);                                                                 \
            break;                                                                                 \
        case 64:                                                                                   \
            CALL(KINDS[kind], 64);                                                                 \
            break;                                                                                 \
        case 128:                                                                                  \
            CALL(KINDS[kind], 128);                                                                \
            break;                                                                                 \
        default:                                                                                   \
            CALL(KINDS[kind], 256);                                                                \
        }                                                                                          \
        break;
#define EACH_KIND(CALL)                                                                            \
    switch (form->kind) {                                                                          \
        EACH_SIZE(CALL, INT8)                                                                      \
        EACH_SIZE(CALL, INT4)                                                                      \
        EACH_SIZE(CALL, E4M3)                                                                      \
        EACH_SIZE(CALL, E2M1)                                                                      \
        EACH_SIZE(CALL, E3M0)                                                                      \
        EACH_SIZE(CALL, TERNARY_FORMAT)                                                            \
        EACH_SIZE(CALL, THREE_BITS)                                                                \
        EACH_SIZE(CALL, TWO_BITS)                                                                  \
        EACH_SIZE(CALL, ONE_BIT)                                                                   \
    }

static TARGET void NAME(encode)(const Form *form, float *x, float *residual, uint8_t *out,
                                int64_t numel, Key key)
{
    Kind kind = KINDS[form->kind];
    int size = form->group_size, left = (int)(numel % batch_of(kind, size));
#define ENCODE(kind, size) NAME(encode_whole)(kind, form, size, x, residual, out, numel, key)
    EACH_KIND(ENCODE)
#undef ENCODE
    if (left) {
        int64_t start = numel - left;
        NAME(encode_batch)(kind, form, size, left, x + start, residual ? residual + start : NULL,
                           out + code_bytes(kind, start),
                           out + code_bytes(kind, numel) + start / size * 2, (uint32_t)start, key);
    }
}

static TARGET void NAME(decode)(const Form *form, const uint8_t *data, float *out, int64_t numel,
                                int is_added)
{
    Kind kind = KINDS[form->kind];
    int size = form->group_size, batch = kind.parts == 8 ? size : batch_of(kind, size);
    int left = (int)(numel % batch);
#define DECODE(kind, size) NAME(decode_whole)(kind, form, size, data, out, numel, is_added)
    EACH_KIND(DECODE)
#undef DECODE
    if (left) {
        int64_t start = numel - left;
        NAME(decode_batch)(kind, form->levels, size, left, data + code_bytes(kind, start),
                           data + code_bytes(kind, numel) + start / size * 2, out + start,
                           is_added);
    }
}

#undef EACH_SIZE
#undef EACH_KIND
#undef INLINE
